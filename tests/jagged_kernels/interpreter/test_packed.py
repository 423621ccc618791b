"""The kernels for short segments in Triton's interpreter."""

import pytest
import torch
from marks import slow_after

import jagged_modules as jm
from jagged_modules.schedule import host_schedule

from ..fixtures.packed import EVERY_KIND, EVERY_PAIR

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
    check_packed(
        EVERY_KIND,
        torch.float16,
        "cpu",
        heads=heads,
        dims=dims,
        activation=activation,
        mask=mask,
        output_scale=scale,
    )


CROSS_CASES = [  # activation, mask, heads, head dims
    ("softmax", None, (4, 2), (24, 40)),
    ("silu", "grouped-targets", (2, 1), (16, 16)),
    ("softmax", "window", (2, 2), (16, 64)),
    ("gelu", "hstu", (3, 1), (8, 24)),
    ("relu_squared", "semi-local", (2, 2), (16, 16)),
    ("softmax", "causal", (2, 2), (96, 128)),
    ("silu", "open-truncated", (2, 2), (64, 64)),
    ("softmax", "open-targets", (2, 1), (16, 16)),
]


@slow_after(3, "activation, mask, heads, dims", CROSS_CASES, ids=str)
def test_cross_attention(check_packed, activation, mask, heads, dims):
    scale = torch.rand(len(EVERY_PAIR[0])) + 0.1 if activation != "softmax" else 1.0
    check_packed(
        EVERY_PAIR,
        torch.float16,
        "cpu",
        heads=heads,
        dims=dims,
        activation=activation,
        mask=mask,
        output_scale=scale,
    )


@pytest.mark.parametrize(
    "lengths",
    [
        ([1] * 150, [3] * 150),
        ([64] * 3, [64] * 3),
        ([5, 0, 64], [0, 9, 0]),
        ([0, 0, 1], [1, 64, 0]),
        ([1, 65], [64, 80]),
        ([70], [1]),
    ],
    ids=str,
)
def test_cross_batches_of_one_kind(check_packed, lengths):
    check_packed(lengths, torch.float16, "cpu", heads=(1, 1), dims=(16, 16))


@pytest.mark.parametrize("mask", [None, "causal"])
def test_a_given_schedule(check_packed, mask):
    """Its tiles of long segments are those that packed tiles leave out."""
    sizes = dict(num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    mask = mask and jm.AttentionMask(causal=True)
    schedule = host_schedule(*map(torch.tensor, EVERY_PAIR), **sizes, mask=mask)
    assert 0 < int(schedule.num_tiles[1]) < int(schedule.num_tiles[0])
    check_packed(
        EVERY_PAIR, torch.float16, "cpu", heads=(2, 1), dims=(16, 16), mask=mask, schedule=schedule
    )


def test_keys_in_pages_are_not_packed(check_pages, packed_launches):
    check_pages(([3, 70, 9], [30, 40, 12]), torch.float16, "cpu")
    assert packed_launches["forward"] == 1, "of the same keys side by side"


@pytest.mark.parametrize("lengths", [[1] * 150, [64] * 3, [65, 80], [0, 0], [5]], ids=str)
def test_batches_of_one_kind(check_packed, lengths):
    if sum(lengths):
        check_packed(lengths, torch.float16, "cpu", heads=(1, 1), dims=(16, 16))


@slow_after(
    2,
    "options",
    [dict(), dict(cross=True, activation="silu"), dict(activation="silu"), dict(cross=True)],
    ids=str,
)
def test_a_segments_values_stay_in_it(check_packed_neighbours, options):
    check_packed_neighbours(torch.float16, "cpu", heads=(2, 1), implementation="triton", **options)


@pytest.mark.parametrize("seed", range(6))
def test_packed_tiles(check_packed_tiles, seed):
    random = torch.Generator().manual_seed(seed)
    num_segments, longest = [1, 63, 64, 65, 200, 300][seed], [64, 90, 30, 200, 66, 8][seed]
    lengths = torch.randint(0, longest + 1, (num_segments,), generator=random).tolist()
    check_packed_tiles(lengths, "cpu", [torch.int64, torch.int32][seed % 2])


@pytest.mark.parametrize("seed", range(6))
def test_packed_tiles_of_two_sides(check_packed_tiles, seed):
    random = torch.Generator().manual_seed(seed)
    num_segments = [1, 63, 64, 65, 200, 300][seed]
    longest = [(64, 64), (90, 5), (5, 90), (70, 70), (20, 66), (2, 9)][seed]
    lengths = tuple(
        torch.randint(0, n + 1, (num_segments,), generator=random).tolist() for n in longest
    )
    check_packed_tiles(lengths, "cpu", [torch.int64, torch.int32][seed % 2])


def test_tiles_with_rows_on_one_side(check_packed_tiles):
    check_packed_tiles(([0] * 40, [60] * 40), "cpu")
    check_packed_tiles(([60] * 40, [0] * 40), "cpu")
    check_packed_tiles(([64, 0, 0, 64, 1, 65], [0, 64, 64, 0, 65, 1]), "cpu")
