"""The Triton kernel that rounds the dq of Hopper's one-pass backward, in Triton's interpreter."""

import pytest
import torch
from jagged_kernels.attention.params import Segments

dq_sums = pytest.importorskip("jagged_kernels.attention.hopper.dq_sums")


@pytest.mark.parametrize("dim, block", [(40, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("lengths", [[5, 0, 200, 64, 1], [128], [0, 0, 70]], ids=str)
@pytest.mark.parametrize("segment_scale", [False, True])
def test_sums_are_rounded_to_dq(offsets, lengths, dim, block, segment_scale):
    """Blocks that no tile of keys visits have gradient 0. Their memory is not initialised: here it
    is NaN."""
    q = torch.empty(sum(lengths), 2, dim, dtype=torch.float16)
    segments, sums = offsets(lengths), dq_sums.DqSums.empty(q, len(lengths), block)
    assert (
        len(sums.added) == 2 * sums.num_blocks and not sums.added.any() and not sums.next_tile.any()
    )
    sums.sums.fill_(float("nan"))
    scales, expected = torch.rand(len(lengths)) + 0.5, torch.zeros(len(q), 2, dim)
    for segment, (start, length) in enumerate(zip(segments.tolist(), lengths)):
        for block_of_segment in range(-(-length // block)):
            index = start // block + segment + block_of_segment
            rows = slice(
                start + block_of_segment * block,
                min(start + (block_of_segment + 1) * block, start + length),
            )
            for head in range(2):
                if (index + head) % 3 == 0:
                    continue
                sums.added.view(2, sums.num_blocks)[head, index] = 1
                values = torch.randn(rows.stop - rows.start, dim)
                sums.sums[head, index, : len(values), :dim] = values
                expected[rows, head] = values * 0.3 * (scales[segment] if segment_scale else 2.0)
    dq = torch.full_like(q, float("nan"))
    sums.write(dq, Segments(segments, segments), scales if segment_scale else None, 0.3, 2.0)
    torch.testing.assert_close(dq, expected.half(), rtol=2**-10, atol=2**-24)
