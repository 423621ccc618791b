"""The kernels for short segments in Triton's interpreter."""

import pytest
import torch
from marks import slow_after

from ..fixtures.packed import EVERY_KIND

DTYPES = [torch.float16]
CASES = [  # activation, mask, heads, head dims
    ("softmax", None, (4, 2), (24, 40)),
    ("silu", "causal", (2, 2), (16, 16)),
    ("softmax", "grouped-targets", (2, 2), (16, 16)),
    ("gelu", "window", (2, 1), (16, 64)),
    ("softmax", "hstu", (2, 2), (8, 24)),
    ("relu_squared", "truncated", (2, 2), (16, 16)),
    ("softmax", "semi-local", (3, 1), (16, 16)),
    ("silu", "open-targets", (2, 2), (96, 128)),
    ("softmax", "window", (2, 2), (128, 128)),
]


@slow_after(5, "activation, mask, heads, dims", CASES, ids=str)
def test_forward_and_gradients(check_packed, activation, mask, heads, dims):
    scale = torch.rand(len(EVERY_KIND)) + 0.1 if activation != "softmax" else 1.0
    check_packed(EVERY_KIND, torch.float16, "cpu", heads=heads, dims=dims, activation=activation, mask=mask, output_scale=scale)


@pytest.mark.parametrize("lengths", [[1] * 150, [64] * 3, [65, 80], [0, 0], [5]], ids=str)
def test_batches_of_one_kind(check_packed, lengths):
    if sum(lengths):
        check_packed(lengths, torch.float16, "cpu", heads=(1, 1), dims=(16, 16))


@pytest.mark.parametrize("options", [dict(), dict(activation="silu")], ids=str)
def test_a_segments_values_stay_in_it(check_packed_neighbours, options):
    check_packed_neighbours(torch.float16, "cpu", heads=(2, 1), implementation="triton", **options)


@pytest.mark.parametrize("seed", range(6))
def test_packed_tiles(check_packed_tiles, seed):
    random = torch.Generator().manual_seed(seed)
    num_segments, longest = [1, 63, 64, 65, 200, 300][seed], [64, 90, 30, 200, 66, 8][seed]
    lengths = torch.randint(0, longest + 1, (num_segments,), generator=random).tolist()
    check_packed_tiles(lengths, "cpu", [torch.int64, torch.int32][seed % 2])
