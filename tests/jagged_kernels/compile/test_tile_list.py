"""The kernels that list tiles on the device compile for the GPU generations that we support."""

import itertools

import pytest
from marks import diagonal_first, slow_after

pytest.importorskip("triton")

from jagged_kernels.schedule import device as tile_list
from jagged_kernels.schedule.short_queries import _short_queries_kernel

from .ahead_of_time import MASKS, compile_for

CAPABILITIES = [80, 90, 100]


@slow_after(
    3, "capability, groups, other_groups", diagonal_first(CAPABILITIES, [(1, 1), (2, 1), (1, 3)])
)
def test_tile_list_kernel_compiles(capability, groups, other_groups):
    types = dict(
        offsets_ptr="*i64", other_offsets_ptr="*i64", tiles_ptr="*i32", num_tiles_ptr="*i32"
    )
    types |= dict(num_segments="i32", num_heads="i32")
    constants = dict(
        BLOCK_M=64, BLOCK_N=64, SEGMENTS=32, CHUNK=256, GROUPS=groups, OTHER_GROUPS=other_groups
    )
    assert compile_for(
        capability, tile_list._tile_list_kernel, constants, types.get, aligned=()
    ).asm["cubin"]


@pytest.mark.parametrize("key_tiles", [False, True], ids=["queries", "keys"])
@slow_after(
    3,
    "capability, mask",
    diagonal_first(CAPABILITIES, [name for name, mask in MASKS.items() if mask]),
)
def test_tile_work_kernel_compiles(capability, key_tiles, mask):
    types = dict(
        offsets_ptr="*i64", other_offsets_ptr="*i32", chunks_ptr="*i32", num_targets_ptr="*i64"
    )
    constants = dict(
        MASK=MASKS[mask], KEY_TILES=key_tiles, BLOCK_M=192, BLOCK_N=64, SHIFT=7, CHUNK=256
    )
    if not MASKS[mask].has_targets:
        constants["num_targets_ptr"] = None
    assert compile_for(
        capability, tile_list._tile_work_kernel, constants, types.get, aligned=(), num_warps=1
    ).asm["cubin"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_masked_list_kernel_compiles(capability):
    types = dict(chunks_ptr="*i32", tiles_ptr="*i32", num_tiles_ptr="*i32")
    assert compile_for(
        capability, tile_list._masked_list_kernel, dict(CHUNK=256, ROWS=8), types.get, num_warps=8
    ).asm["cubin"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_grouped_list_kernels_compile(capability):
    types = dict(
        offsets_ptr="*i64",
        other_offsets_ptr="*i64",
        order_ptr="*i32",
        tiles_ptr="*i32",
        num_tiles_ptr="*i32",
    )
    types |= dict(num_segments="i32", num_heads="i32", group_rows="i32")
    for kernel, constants in [
        (tile_list._segment_order_kernel, dict(BLOCK_M=128, SEGMENTS=32, CHUNK=256)),
        (
            tile_list._grouped_list_kernel,
            dict(KEY_TILES=True, ALTERNATES=False, BLOCK_M=128, BLOCKS=32, CHUNK=128),
        ),
        (
            tile_list._grouped_list_kernel,
            dict(KEY_TILES=False, ALTERNATES=True, BLOCK_M=128, BLOCKS=32, CHUNK=128),
        ),
    ]:
        assert compile_for(capability, kernel, constants, types.get, aligned=()).asm["cubin"]


@pytest.mark.parametrize("q_offsets, kv_offsets", [*itertools.product(["*i32", "*i64"], repeat=2)])
def test_short_queries_kernel_compiles(q_offsets, kv_offsets):
    types = dict.fromkeys(("query_tiles_ptr", "key_tiles_ptr", "counts_ptr"), "*i32")
    types |= dict(q_offsets_ptr=q_offsets, kv_offsets_ptr=kv_offsets)
    constants = dict(ROWS=64, KEYS=128, BLOCK=64, SEGMENTS=32, CHUNK=512)
    assert compile_for(90, _short_queries_kernel, constants, types.get, aligned=()).asm["cubin"]
