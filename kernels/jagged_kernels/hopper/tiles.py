"""Device functions that the warp-specialised kernels share: layouts, rings of buffers, what leaves a tile."""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .gluon_api import load_tile, store_tile, thread_barrier

LOG2_E = gl.constexpr(1.4426950408889634)
WARPGROUP_ROWS = gl.constexpr(64)
LOAD_REGISTERS = gl.constexpr(24)  # of a thread of the warp that loads: the fewest there are


@gluon.constexpr_function
def product_layout(rows, columns):
    """Of a product in registers: 16 rows for each warp."""
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, 1], [16, columns, 16])


@gluon.constexpr_function
def vector_layout(width):
    """Of 16-bit rows that a warpgroup reads or writes 16 bytes at a time."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Buffers of a descriptor's box, a barrier for each that it is full, and one that all of its readers are done with it."""
    box: gl.constexpr = desc.block_type.shape
    buffers = gl.allocate_shared_memory(desc.dtype, [STAGES, box[0], box[1], box[2]], desc.layout)
    return buffers, make_barriers(STAGES, 1), make_barriers(STAGES, READERS)


@gluon.jit
def make_rings(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring for each warpgroup, which alone reads it."""
    if CONSUMERS == 2:
        return make_ring(desc, STAGES, 1), make_ring(desc, STAGES, 1)
    else:
        return make_ring(desc, STAGES, 1), make_ring(desc, STAGES, 1), make_ring(desc, STAGES, 1)


@gluon.jit
def rows_of(buffers, slot):
    """A ring's buffer as products read it, [rows, width]."""
    return buffers.index(slot).reshape([buffers.shape[2], buffers.shape[3]])


@gluon.jit
def fetch(ring, desc, turn, head, row, STAGES: gl.constexpr):
    """Fill the ring's buffer of that turn with a box of rows, once its readers are done with what it held."""
    buffers, full, empty = ring
    slot = turn % STAGES
    mbarrier.wait(empty.index(slot), turn // STAGES & 1 ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    load_tile(desc, [head, row.to(gl.int32), 0], full.index(slot), buffers.index(slot))


@gluon.jit
def await_full(ring, turn, STAGES: gl.constexpr):
    """The ring's buffer of that turn, [rows, width], once it is filled. Not after its release: its barrier may have turned twice since."""
    buffers, full, _ = ring
    mbarrier.wait(full.index(turn % STAGES), turn // STAGES & 1)
    return rows_of(buffers, turn % STAGES)


@gluon.jit
def release(ring, turn, STAGES: gl.constexpr):
    """This warpgroup is done with the buffer of that turn."""
    _, _, empty = ring
    mbarrier.arrive(empty.index(turn % STAGES), count=1)


@gluon.jit
def pass_over(ring, turn, STAGES: gl.constexpr):
    """Release the buffer of that turn unread."""
    await_full(ring, turn, STAGES)
    release(ring, turn, STAGES)


@gluon.jit
def clear_rows(buffer, num_rows):
    """What follows the rows of a block becomes 0: a neighbour's NaN would survive a weight of 0. Every reader does so for itself, which
    costs less than that one waits for another."""
    CHUNK: gl.constexpr = 32
    L: gl.constexpr = vector_layout(buffer.shape[1])
    if num_rows < buffer.shape[0]:
        rows = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, L))[:, None]
        for chunk in gl.static_range(buffer.shape[0] // CHUNK):
            if num_rows < CHUNK * (chunk + 1):
                part = buffer.slice(CHUNK * chunk, CHUNK)
                part.store(gl.where(CHUNK * chunk + rows < num_rows, part.load(L), 0.0))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def put_rows(acc, stage, desc, ptr, stride_row, stride_head, row, head, num_rows, DIM: gl.constexpr):
    """Store a warpgroup's 64 rows through its staging buffer. Where rows of another tile or segment follow, past the accelerator."""
    WIDTH: gl.constexpr = acc.shape[1]
    tma.store_wait(0)
    thread_barrier()
    rows_buffer = stage.reshape([WARPGROUP_ROWS, WIDTH])
    rows_buffer.store(acc.to(stage.dtype))
    if num_rows >= WARPGROUP_ROWS:
        fence_async_shared()
        thread_barrier()
        store_tile(desc, [head, row.to(gl.int32), 0], stage)
    else:
        thread_barrier()
        L: gl.constexpr = vector_layout(WIDTH)
        rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))
        columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
        ptrs = ptr + (row + rows)[:, None] * stride_row + head.to(gl.int64) * stride_head + columns[None, :]
        gl.store(ptrs, rows_buffer.load(L), mask=(rows < num_rows)[:, None] & (columns < DIM)[None, :])


@functools.cache
def box_layout(dtype: torch.dtype, *box: int):
    """Of a descriptor's box in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
