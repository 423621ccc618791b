"""The kernels that list tiles on the device compile for the GPU generations that we support."""

import itertools

import pytest
from marks import diagonal_first, slow_after

pytest.importorskip("triton")

from jagged_kernels.attention import tile_list_kernels
from jagged_kernels.attention.tile_list_kernels import Listed

from .ahead_of_time import MASKS, compile_for

CAPABILITIES = [80, 90, 100]
QUERIES, KEYS = Listed(64, 64, key_tiles=False), Listed(64, 64, key_tiles=True)
OFFSETS = dict(q_offsets_ptr="*i64", kv_offsets_ptr="*i64", lists_ptr="*i32")


def compiles(capability, kernel, constants, types=None, **options):
    types = OFFSETS | (types or {})
    return compile_for(capability, kernel, constants, types.get, aligned=(), **options).asm["cubin"]


@slow_after(
    3, "capability, groups, other_groups", diagonal_first(CAPABILITIES, [(1, 1), (2, 1), (1, 3)])
)
def test_tile_list_kernel_compiles(capability, groups, other_groups):
    queries = QUERIES._replace(groups=max(groups, other_groups))
    keys = KEYS._replace(other_groups=max(groups, other_groups))
    lists = dict(QUERIES=queries, KEYS=keys)
    if groups != other_groups:
        lists |= dict(KEYS=None) if groups > 1 else dict(QUERIES=None)
    assert compiles(capability, tile_list_kernels.tile_list_kernel, lists)


@pytest.mark.parametrize("lists", ["queries", "keys", "both"])
@slow_after(
    3,
    "capability, mask",
    diagonal_first(CAPABILITIES, [name for name, mask in MASKS.items() if mask]),
)
def test_tile_work_kernel_compiles(capability, lists, mask):
    constants = dict(
        MASK=MASKS[mask],
        QUERIES=None if lists == "keys" else Listed(192, 64, key_tiles=False),
        KEYS=None if lists == "queries" else Listed(192, 64, key_tiles=True),
        CHUNK=256,
    )
    if not MASKS[mask].has_targets:
        constants["num_targets_ptr"] = None
    types = dict(kv_offsets_ptr="*i32", num_targets_ptr="*i64")
    assert compiles(capability, tile_list_kernels.tile_work_kernel, constants, types, num_warps=1)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_masked_list_kernel_compiles(capability):
    constants = dict(QUERIES=QUERIES, KEYS=KEYS, CHUNK=256, ROWS=8)
    assert compiles(capability, tile_list_kernels.masked_list_kernel, constants, num_warps=8)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_grouped_list_kernels_compile(capability):
    in_groups = [x._replace(block_m=128, in_groups=True) for x in (QUERIES, KEYS)]
    queries, keys = in_groups[0]._replace(alternates=True), in_groups[1]
    for kernel in (tile_list_kernels.tile_list_kernel, tile_list_kernels.grouped_list_kernel):
        for lists in ((queries, keys), (None, keys), (queries, None)):
            assert compiles(capability, kernel, dict(zip(("QUERIES", "KEYS"), lists)))


@pytest.mark.parametrize("q_offsets, kv_offsets", [*itertools.product(["*i32", "*i64"], repeat=2)])
@pytest.mark.parametrize("rows, keys", [(64, 128), (192, 64)])
def test_kernel_lists_short_queries(q_offsets, kv_offsets, rows, keys):
    lists = dict(
        QUERIES=QUERIES._replace(block_m=rows, few_queries=rows),
        KEYS=KEYS._replace(block_m=keys, few_queries=rows),
    )
    types = dict(q_offsets_ptr=q_offsets, kv_offsets_ptr=kv_offsets)
    assert compiles(90, tile_list_kernels.tile_list_kernel, lists, types)
