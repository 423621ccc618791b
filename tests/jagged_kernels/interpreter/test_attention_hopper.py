"""Hopper's attention kernels on a CPU, with their warpgroups."""

import pytest
import torch
from marks import slow_after
from space import MASKS

FP16, BF16 = torch.float16, torch.bfloat16
SELF = [3, 0, 1, 70, 5, 130, 64, 9, 257]
pytestmark = pytest.mark.usefixtures("hopper_attention")


@pytest.fixture
def check(check_attention):
    def check(lengths, dims=(64, 64), dtype=BF16, **options):
        check_attention(lengths, dtype, "cpu", dims=dims, kernels="hopper", **options)

    return check


@pytest.mark.parametrize("lengths", ["mixed", "empty-ends", "no-keys", "no-queries"])
def test_lengths(check, lengths):
    check(lengths)


@slow_after(
    5,
    "dims",
    [(40, 56), (128, 128), (192, 192), (256, 136), (216, 208), (96, 72), (160, 256)],
    ids=str,
)
def test_head_dims(check, dims):
    check(([3, 70, 0, 140], [65, 20, 4, 200]), dims, FP16)


@slow_after(1, "activation", ["softmax", "silu"])
@slow_after(5, "mask", ["hstu", *(x for x in MASKS if x != "hstu")])
def test_masks(check, mask, activation):
    check((SELF, SELF), mask=mask, activation=activation)


@pytest.mark.parametrize("dims, long", [((64, 64), False), ((128, 128), False), ((128, 128), True)])
def test_the_first_tile_of_a_segment_is_the_one_that_is_not_full(
    check, change_selection, dims, long
):
    """Under a causal mask, of tiles with two and three consumers, some without rows. long: blocks
    of 128 keys, as many as a tile has rows: no tile begins within a block."""
    change_selection("small_tiles_are_faster", lambda *_: (False, False))
    change_selection("long_key_blocks_are_faster", lambda *_: long)
    check(([70, 200, 0, 3, 257], [70, 220, 5, 9, 257]), dims, FP16, mask="causal")


@slow_after(1, "shared", ["q", "kv"])
def test_shared_operands(check, shared):
    check("mixed", shared=shared)


@slow_after(1, "mask", ["causal", None])
def test_query_groups(check, mask):
    check("two-groups", mask=mask)


@slow_after(1, "activation", ["softmax", "silu"])
@slow_after(2, "consumers", [2, 3, 1])
def test_short_queries(check, change_selection, activation, consumers):
    change_selection("short_query_consumers", lambda *_: consumers)
    lengths = [3, 0, 1, 64, 65, 129, 5], [70, 5, 1, 64, 0, 200, 130]
    check(lengths, heads=(3, 3), activation=activation)


@slow_after(1, "dims", [(64, 64), (40, 56)], ids=str)
@slow_after(1, "mask", ["causal", None])
def test_one_pass(check, one_pass_calls, mask, dims):
    """In fp16: the interpreter, which writes dq, rounds to bfloat16 towards 0."""
    for lengths in ((SELF, SELF), ([4, 130, 5], [0, 0, 70])):
        check(lengths, dims, FP16, mask=mask)
    assert one_pass_calls["one_pass"] == 2


@slow_after(
    2,
    "activation, mask, shared",
    [("softmax", "causal", None), ("silu", None, "q"), ("silu", "hstu", None)],
)
def test_dropout(check, activation, mask, shared):
    seed = torch.tensor(0x1234567890ABCDEF)
    lengths = (SELF, SELF) if shared is None else "mixed"
    options = dict(activation=activation, mask=mask, shared=shared)
    check(lengths, dropout_p=0.3, dropout_seed=seed, **options)
