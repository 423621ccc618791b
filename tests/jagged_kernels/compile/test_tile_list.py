"""The kernel that lists tiles on the device compiles for the GPU generations that we support."""

import pytest

pytest.importorskip("triton")

from jagged_kernels.schedule import device as tile_list  # noqa: E402

from .ahead_of_time import compile_for  # noqa: E402


@pytest.mark.parametrize("groups, other_groups", [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_tile_list_kernel_compiles(capability, groups, other_groups):
    types = dict(offsets_ptr="*i64", other_offsets_ptr="*i64", tiles_ptr="*i32", num_tiles_ptr="*i32")
    types |= dict(num_segments="i32", num_heads="i32")
    constants = dict(BLOCK_M=64, BLOCK_N=64, SEGMENTS=32, CHUNK=256, GROUPS=groups, OTHER_GROUPS=other_groups)
    assert compile_for(capability, tile_list._tile_list_kernel, constants, types.get, aligned=()).asm["cubin"]
