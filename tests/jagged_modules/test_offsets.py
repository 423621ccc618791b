"""Blocks of segments: their offsets and the positions of rows."""

import itertools

import pytest
import torch

from jagged_modules.containers.offsets import block_offsets, positions_in_segments


def length_lists(block_size):
    """Every list of up to four of the lengths around block_size; empty segments first, last and in
    runs among them."""
    lengths = sorted({0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size})
    return itertools.chain.from_iterable(
        itertools.product(lengths, repeat=count) for count in range(5)
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_offsets(block_size, dtype, offsets_of):
    for lengths in length_lists(block_size):
        offsets, total = offsets_of(lengths, dtype), sum(lengths)
        expected = []
        for start, end in itertools.pairwise(offsets.tolist()):
            expected += [(row, min(row + block_size, end)) for row in range(start, end, block_size)]
        blocks = block_offsets(offsets, block_size, total)
        assert blocks.dtype == dtype and blocks.shape == (total // block_size + len(lengths) + 1,)
        pairs = list(itertools.pairwise(blocks.tolist()))
        assert [(start, end) for start, end in pairs if start < end] == expected, lengths
        assert (
            blocks[0] == 0 and blocks[-1] == total and all(start <= end for start, end in pairs)
        ), lengths


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_in_segments(dtype, offsets_of):
    for lengths in length_lists(3):
        positions = positions_in_segments(offsets_of(lengths, dtype), sum(lengths))
        assert positions.dtype == dtype and positions.tolist() == [
            i for length in lengths for i in range(length)
        ], lengths
