"""Dropout of weights by the portable kernels, in Triton's interpreter."""

import pytest
import torch
from marks import slow_after

import jagged_modules as jm
from jagged_modules import functional as F

from ..fixtures.packed import EVERY_KIND, EVERY_PAIR

DROPOUT = dict(dropout_p=0.3, dropout_seed=torch.tensor(0x1234567890ABCDEF))
LENGTHS = [3, 70, 0, 20], [65, 20, 4, 0]
DTYPES = [torch.float32, torch.float16]
# each is a case of its own: lengths, activation, mask, heads, shared operand
CASES = [
    ("mixed", "softmax", None, (4, 2), None),
    (LENGTHS, "silu", None, (2, 2), None),
    (([3, 0, 1, 70, 40],) * 2, "softmax", "hstu", (2, 1), None),
    (([3, 0, 1, 70, 40],) * 2, "gelu", "window", (2, 1), None),
    ("mixed", "softmax", None, (4, 2), "q"),
    ("mixed", "softmax", None, (4, 2), "kv"),
    ("two-groups", "softmax", None, (2, 1), None),
    ("two-groups", "silu", None, (2, 2), None),
]


@slow_after(1, "dtype", DTYPES, ids=str)
@slow_after(6, "lengths, activation, mask, heads, shared", CASES)
def test_forward_and_gradients(check_attention, lengths, activation, mask, heads, shared, dtype):
    options = dict(heads=heads, activation=activation, mask=mask, shared=shared)
    check_attention(lengths, dtype, "cpu", **options, **DROPOUT)


@pytest.mark.parametrize("lengths", [EVERY_KIND, EVERY_PAIR], ids=["self", "cross"])
@slow_after(2, "activation, mask", [("softmax", None), ("silu", "hstu"), ("softmax", "window")])
def test_packed_tiles(check_packed, activation, mask, lengths):
    options = dict(heads=(4, 2), dims=(24, 40), activation=activation, mask=mask)
    check_packed(lengths, torch.float16, "cpu", **options, **DROPOUT)


@slow_after(
    3, "block_size, heads, rotate", [(16, (2, 2), None), (32, (4, 2), "qkv"), (64, (2, 1), "qk")]
)
def test_blocks(check_block_attention, block_size, heads, rotate):
    sizes = dict(block_size=block_size, heads=heads, dim=16, rotate=rotate)
    check_block_attention([3, 0, 70, 40], torch.float32, "cpu", **sizes, **DROPOUT)


@pytest.mark.parametrize("function", ["jagged", "block"])
def test_batch_invariant_rows_are_counted_within_the_segment(function, offsets):
    """As on the CPU, and whatever the batch."""
    attend = F.jagged_attention if function == "jagged" else F.block_diagonal_attention
    q, k, v = torch.randn(3, 93, 2, 16).unbind(0)
    options = dict(**DROPOUT, **({} if function == "jagged" else dict(block_size=16)))
    with jm.batch_invariant(True):
        out = attend(q, k, v, offsets([3, 20, 70]), implementation="triton", **options)
        alone = attend(q[23:], k[23:], v[23:], offsets([70]), implementation="triton", **options)
        assert torch.equal(out[23:], alone)
        torch.testing.assert_close(out, attend(q, k, v, offsets([3, 20, 70]), **options))


def test_keys_in_pages(check_pages, offsets):
    """A weight has the number of its key's place in the segment, not in memory."""
    check_pages(([3, 70, 9], [30, 40, 12]), torch.float32, "cpu", **DROPOUT)
