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
def unknown(x):
    """x, which the compiler does not know. Of addresses of products' operands that lie in two branches or loops, ptxas 12.8 computes some
    in the first alone, which may not have run: so each gets its own."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def own_rows(ring, turn, STAGES: gl.constexpr):
    """The buffer of that turn, filled, for one of several loops, which are not to share its address."""
    return rows_of(ring[0], unknown(turn % STAGES))


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
def hold_until_full(ring, turn, wanted, STAGES: gl.constexpr):
    """Wait for the buffer of that turn, if wanted, between arithmetic and the wait for the products that it shall overlap: the assembler
    moves waits for products above arithmetic, but not above a loop, as of this wait."""
    _, full, _ = ring
    mbarrier.wait(full.index(turn % STAGES), turn // STAGES & 1, pred=wanted)


@gluon.jit
def pass_over(ring, turn, STAGES: gl.constexpr):
    """Release the buffer of that turn unread. No product keeps the warpgroup's warps together here, and one of them releases it for all:
    another that came later would look for its own turn on a barrier that has turned twice."""
    await_full(ring, turn, STAGES)
    thread_barrier()
    release(ring, turn, STAGES)


@gluon.jit
def clear_rows(buffer, num_rows, cleared, consumer: gl.constexpr, CONSUMERS: gl.constexpr):
    """This warpgroup's share of making what follows the rows of a block 0: a neighbour's NaN would survive a weight of 0. All warpgroups
    take part, also those that have no rows in the tile."""
    CHUNK: gl.constexpr = 16
    L: gl.constexpr = vector_layout(buffer.shape[1])
    rows = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, L))[:, None]
    for chunk in gl.static_range(consumer, buffer.shape[0] // CHUNK, CONSUMERS):
        if num_rows < CHUNK * (chunk + 1):
            part = buffer.slice(CHUNK * chunk, CHUNK)
            part.store(gl.where(CHUNK * chunk + rows < num_rows, part.load(L), 0.0))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(cleared.index(0), count=1)


@gluon.jit
def await_cleared(cleared, turn):
    """Wait until all warpgroups have cleared their shares for the turn-th time."""
    mbarrier.wait(cleared.index(0), turn & 1)


@gluon.jit
def pass_over_keys(
    k_ring, other_ring, turn, num_keys, cleared, clears, consumer: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """A block of keys, and what belongs to it, that this warpgroup has no rows for; what follows the keys is made 0 by all together."""
    if num_keys < k_ring[0].shape[2]:
        clear_rows(await_full(k_ring, turn, STAGES), num_keys, cleared, consumer, CONSUMERS)
        await_cleared(cleared, clears)
    pass_over(k_ring, turn, STAGES)
    pass_over(other_ring, turn, STAGES)


@gluon.jit
def make_stages(desc, NUMBER: gl.constexpr):
    """Buffers of 64 rows, through which results leave."""
    box: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [NUMBER, 1, WARPGROUP_ROWS, box[2]], desc.layout)


@gluon.jit
def await_stored():
    """Wait until nothing is left in this warpgroup's staging buffers."""
    tma.store_wait(0)
    thread_barrier()


@gluon.jit
def put_rows(acc, stage, PENDING: gl.constexpr, desc, ptr, row, head, num_rows, HEADS: gl.constexpr, DIM: gl.constexpr):
    """Store a warpgroup's 64 rows, as far as they are the tile's, to a contiguous `[rows, HEADS, DIM]`. Through a staging buffer, whose
    former rows have left it once PENDING later boxes are under way (None: `await_stored` has been called): as a box, or, where another's
    rows follow, by 16 bytes a thread. In fp32, which has no descriptor, the product's layout stores whole sectors as it is."""
    if desc is None:
        _store_rows(acc, ptr, row, head, num_rows, HEADS, DIM)
    else:
        whole = num_rows >= WARPGROUP_ROWS
        if PENDING is not None:
            if PENDING > 0 and whole:
                tma.store_wait(PENDING)
            else:
                tma.store_wait(0)
            thread_barrier()
        rows = stage.reshape([WARPGROUP_ROWS, acc.shape[1]])
        rows.store(acc.to(stage.dtype))
        if whole:
            fence_async_shared()
            thread_barrier()
            store_tile(desc, [head, row.to(gl.int32), 0], stage)
        else:
            thread_barrier()
            _store_rows(rows.load(vector_layout(acc.shape[1])), ptr, row, head, num_rows, HEADS, DIM)


@gluon.jit
def _store_rows(x, ptr, row, head, num_rows, HEADS: gl.constexpr, DIM: gl.constexpr):
    L: gl.constexpr = x.type.layout
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))
    ptrs = ptr + row * (HEADS * DIM) + head * DIM + rows[:, None] * (HEADS * DIM) + columns[None, :]
    mask = (rows < num_rows)[:, None]
    if DIM < x.shape[1]:
        mask = mask & (columns < DIM)[None, :]
    gl.store(ptrs, x, mask=mask)


@functools.cache
def box_layout(dtype: torch.dtype, *box: int):
    """Of a descriptor's box in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
