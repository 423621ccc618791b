"""Building blocks of the warp-specialised kernels: MMA operands, rings of TMA buffers, zeroed
tails, epilogue stores.

One warp, the producer, fills the buffers of rings by TMA. One to three warpgroups, the consumers,
read them. Both count the uses of a ring from the start of the kernel: `step` uses buffer step %
stages, and waits for phase (step // stages) % 2 of that buffer's barriers.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia import hopper

from .configs import padded_dim
from .descriptors import Box, Described, fill, heads_first, shape_and_strides
from .gluon_api import load_tile, store_tile, thread_barrier

WARPGROUP_ROWS = gl.constexpr(64)  # rows of the MMA of a warpgroup
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
# registers per thread of the producer: the fewest that setmaxnreg takes
LOAD_REGISTERS = gl.constexpr(24)


class Ring(NamedTuple):
    """Shared-memory buffers that the producer fills and consumers empty.

    buffers: `[stages, 1, rows, width]`.
    full: a barrier per stage, arrive count 1: the producer's, with the bytes that TMA writes.
    empty: a barrier per stage, arrive count 1 per consumer that reads the ring.
    """

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Handover(NamedTuple):
    """The barriers of buffers that are not a Ring's: `full`, whose arrive count is that of their
    writers, and `empty`, of their readers."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Tail(NamedTuple):
    """The rows of a block past the last row of its segment. The consumers set them to 0 in shared
    memory, each a share of them.

    barrier: completes when all consumers have written their shares. phase: how many times it has
    completed before.
    """

    barrier: gl.shared_memory_descriptor
    phase: gl.tensor


# -- MMA -------------------------------------------------------------------------------------------


@gluon.constexpr_function
def mma_layout(rows, columns, groups=1):
    """Layout of an MMA's result in registers: 16 rows per warp. groups: of warps, which share the
    columns."""
    return gl.NVMMADistributedLayout([3, 0], [rows // 16, groups], [16, columns // groups, 16])


@gluon.constexpr_function
def vector_layout(width, warps=4):
    """Layout of 16-bit rows that warps read or write 16 bytes per thread at a time."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def num_parts(width, dim):
    """Number of MMAs for `width` columns, of which those from dim on are 0. Of 256 columns, the
    last 64 are left out if they are 0: two MMAs take 128 and 64."""
    return 2 if width == 256 and dim <= 192 else 1


@gluon.jit
def mma_abt(a, b, start=None, GROUPS: gl.constexpr = 1, DIM: gl.constexpr = 256):
    """Start the asynchronous MMA a bᵀ + start, `[64, rows of b]`; `a` in shared memory or
    registers, `b` in shared memory. GROUPS: of mma_layout. DIM: columns from DIM on are 0. It
    starts num_parts MMAs."""
    COLUMNS: gl.constexpr = b.shape[0]
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS, GROUPS)
    if num_parts(b.shape[1], DIM) == 2:
        left = mma_abt(a.slice(0, 128, 1), b.slice(0, 128, 1), start, GROUPS)
        return warpgroup_mma(
            a.slice(128, 64, 1), b.slice(128, 64, 1).permute((1, 0)), left, is_async=True
        )
    elif start is None:
        zeros = gl.zeros([WARPGROUP_ROWS, COLUMNS], gl.float32, L)
        return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(a, b.permute((1, 0)), start, is_async=True)


@gluon.jit
def to_mma_operand(x, DTYPE: gl.constexpr, WIDTH: gl.constexpr):
    """Round an MMA's result and use it as the first operand of an MMA of WIDTH columns: it stays in
    the same registers."""
    return gl.convert_layout(
        x.to(DTYPE), gl.DotOperandLayout(0, mma_layout(WARPGROUP_ROWS, WIDTH), 2)
    )


@gluon.jit
def zero_parts(WIDTH: gl.constexpr, DIM: gl.constexpr, GROUPS: gl.constexpr = 1):
    """A result of an MMA that is 0, as a tuple of num_parts parts `[64, columns]`. Functions below
    take tuples alone: Triton does not tell a tuple of one tensor from the tensor."""
    if num_parts(WIDTH, DIM) == 2:
        return zero_parts(128, 128, GROUPS) + zero_parts(64, 64, GROUPS)
    else:
        L: gl.constexpr = mma_layout(WARPGROUP_ROWS, WIDTH, GROUPS)
        return (gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, L),)


@gluon.jit
def mma_parts(a, b, parts):
    """Start the asynchronous MMAs a b + parts, `[64, columns of b]`; `a` in shared memory or of
    to_mma_operand."""
    if len(parts) == 1:
        return (warpgroup_mma(a, b, parts[0], is_async=True),)
    else:
        return (
            warpgroup_mma(_of_part(a, 128), b.slice(0, 128, 1), parts[0], is_async=True),
            warpgroup_mma(_of_part(a, 64), b.slice(128, 64, 1), parts[1], is_async=True),
        )


@gluon.jit
def _of_part(a, WIDTH: gl.constexpr):
    """The first operand of an MMA, for one of WIDTH columns."""
    if isinstance(a, gl.tensor):
        L: gl.constexpr = gl.DotOperandLayout(0, mma_layout(WARPGROUP_ROWS, WIDTH), 2)
        return gl.convert_layout(a, L, assert_trivial=True)
    else:
        return a


@gluon.jit
def wait_for_parts(parts, others, PENDING: gl.constexpr = 0):
    """Wait for all MMAs but the last PENDING. others: a tuple of their other results, and of
    operands in registers."""
    done = warpgroup_mma_wait(PENDING, deps=parts + others)
    return done[: len(parts)], done[len(parts) :]


# -- rings -----------------------------------------------------------------------------------------


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers with an arrive count of COUNT each."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of STAGES boxes of a descriptor, which CONSUMERS warpgroups read."""
    box: gl.constexpr = desc.block_type.shape
    buffers = gl.allocate_shared_memory(desc.dtype, [STAGES, box[0], box[1], box[2]], desc.layout)
    return Ring(buffers, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS))


@gluon.jit
def make_rings(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring for each consumer, which alone reads it."""
    if CONSUMERS == 1:
        return (make_ring(desc, STAGES, 1),)
    elif CONSUMERS == 2:
        return make_ring(desc, STAGES, 1), make_ring(desc, STAGES, 1)
    else:
        return make_ring(desc, STAGES, 1), make_ring(desc, STAGES, 1), make_ring(desc, STAGES, 1)


@gluon.jit
def ring_rows(ring, slot):
    """The buffer at an index of the ring as an MMA reads it, `[rows, width]`."""
    return ring.buffers.index(slot).reshape([ring.buffers.shape[2], ring.buffers.shape[3]])


@gluon.jit
def opaque(x):
    """x, hidden from the compiler. ptxas 12.8 shares the address of an MMA operand between two
    branches or loops and computes it in the first one alone, which may not have run. An address
    that depends on `opaque` is computed in each of them."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque_rows(ring, step):
    """The full buffer of a step at an opaque address, for one of several loops or branches that
    read it."""
    return ring_rows(ring, opaque(step % ring.buffers.shape[0]))


# Barriers by name, of any struct with `full` and `empty`: a Ring, a Handover, a tile queue.


@gluon.jit
def wait_until_full(ring, step, wanted=True):
    """Wait for the data of a step, if `wanted`. To wait ahead, call it between arithmetic and the
    wait for an MMA that it overlaps with: ptxas moves waits for MMAs above arithmetic, but not
    above the loop of this wait."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(step % STAGES), step // STAGES & 1, pred=wanted)


@gluon.jit
def wait_until_empty(ring, step):
    """Wait until the readers have released the buffer that a step reuses."""
    STAGES: gl.constexpr = ring.empty.shape[0]
    mbarrier.wait(ring.empty.index(step % STAGES), step // STAGES & 1 ^ 1)


@gluon.jit
def mark_full(ring, step):
    """The data of a step is in its buffer."""
    mbarrier.arrive(ring.full.index(step % ring.full.shape[0]), count=1)


@gluon.jit
def release(ring, step, wanted=True):
    """This warpgroup has read the buffer of a step, if `wanted`."""
    mbarrier.arrive(ring.empty.index(step % ring.empty.shape[0]), count=1, pred=wanted)


@gluon.jit
def publish(ring, step):
    """mark_full by a warpgroup that has written the buffer of a step, for MMAs or TMA."""
    fence_async_shared()
    thread_barrier()
    mark_full(ring, step)


@gluon.jit
def producer_load(ring, desc, step, head, row, MORE: gl.constexpr = 0):
    """Fill the buffer of a step with a box of rows by TMA, once the consumers have released it.
    MORE: bytes of other buffers that the caller then fills, under the same barriers."""
    wait_until_empty(ring, step)
    slot = step % ring.buffers.shape[0]
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes + MORE)
    load_tile(desc, [head, row.to(gl.int32), 0], ring.full.index(slot), ring.buffers.index(slot))


@gluon.jit
def producer_skip(ring, step):
    """Mark the buffer of a step as full without filling it, for a consumer that will skip it."""
    wait_until_empty(ring, step)
    mark_full(ring, step)


@gluon.jit
def consumer_wait(ring, step):
    """The buffer of a step, `[rows, width]`, once it is full. Do not call it after the release: the
    barrier may be two phases ahead."""
    wait_until_full(ring, step)
    return ring_rows(ring, step % ring.buffers.shape[0])


@gluon.jit
def skip_stage(ring, step):
    """Release the buffer of a step without reading it. One warp arrives for the whole warpgroup, so
    its warps synchronise first; elsewhere an MMA synchronises them. Otherwise a late warp could
    wait for a phase that the barrier has left."""
    consumer_wait(ring, step)
    thread_barrier()
    release(ring, step)


# -- tails -----------------------------------------------------------------------------------------


@gluon.jit
def zero_rows(buffer, num_rows, share: gl.constexpr, SHARES: gl.constexpr):
    """Write 0 to this warpgroup's share of a buffer's rows from num_rows on. They are rows of
    another segment, and 0 · NaN is NaN."""
    CHUNK: gl.constexpr = 16
    L: gl.constexpr = vector_layout(buffer.shape[1], gl.num_warps())
    rows = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, L))[:, None]
    for chunk in gl.static_range(share, buffer.shape[0] // CHUNK, SHARES):
        if num_rows < CHUNK * (chunk + 1):
            part = buffer.slice(CHUNK * chunk, CHUNK)
            part.store(gl.where(CHUNK * chunk + rows < num_rows, part.load(L), 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def zero_tail(buffer, num_rows, tail, consumer: gl.constexpr, CONSUMERS: gl.constexpr):
    """zero_rows of this consumer's share, and tell the others. All consumers take part, also those
    without rows in the tile."""
    zero_rows(buffer, num_rows, consumer, CONSUMERS)
    mbarrier.arrive(tail.barrier.index(0), count=1)


@gluon.jit
def wait_for_tail(tail):
    """Wait until all consumers have written their shares of the tail."""
    mbarrier.wait(tail.barrier.index(0), tail.phase & 1)


@gluon.jit
def skip_key_block(
    k_ring, other_ring, step, num_keys, tail, consumer: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Skip a block of keys, and the stage of another ring that belongs to it, but take part in
    zeroing the keys' tail."""
    if num_keys < k_ring.buffers.shape[2]:
        zero_tail(consumer_wait(k_ring, step), num_keys, tail, consumer, CONSUMERS)
        wait_for_tail(tail)
    skip_stage(k_ring, step)
    skip_stage(other_ring, step)


# -- epilogue --------------------------------------------------------------------------------------


@gluon.jit
def make_epilogue_buffers(desc, NUMBER: gl.constexpr):
    """Buffers of 64 rows, from which TMA stores results as boxes of a descriptor."""
    box: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [NUMBER, 1, WARPGROUP_ROWS, box[2]], desc.layout)


@gluon.jit
def wait_for_stores():
    """Wait until TMA has read all of this warpgroup's epilogue buffers."""
    tma.store_wait(0)
    thread_barrier()


class Output(NamedTuple):
    """A result `[rows, heads, dim]`, whose heads follow one another: its TMA descriptor, None in
    fp32, and a pointer to its first element."""

    desc: gl.tensor
    ptr: gl.tensor


@gluon.jit
def halves(x):
    """The left and the right half of an MMA's columns. Both are registers of the same thread, so
    nothing moves."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, x.shape[1] // 2)
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, L, assert_trivial=True), gl.convert_layout(
        right, L, assert_trivial=True
    )


@gluon.jit
def store_epilogue(
    parts, output, buffer, PENDING: gl.constexpr, row, head, num_rows,
    STRIDE: gl.constexpr, DIM: gl.constexpr, FIRST: gl.constexpr = 0,
):  # fmt: skip
    """Store the first num_rows of a warpgroup's 64 rows to (row, head) of an Output with heads of
    DIM and rows of STRIDE elements, from column FIRST of the head on.

    parts: of the result. TMA stores 64 rows from shared memory, in two steps if the buffer has
    fewer columns; if it has more, the others lie past the head's. Fewer rows are stored by 16 bytes
    per thread, as another segment's rows follow. fp32 is stored from registers. PENDING: how many
    later TMA stores may be under way when the buffer is reused; None: `wait_for_stores` has been
    called.
    """
    COLUMNS: gl.constexpr = parts[0].shape[1] if len(parts) == 1 else 192
    if output.desc is None:
        _store_rows(parts[0], output.ptr, row, head, num_rows, STRIDE, DIM, FIRST)
        if len(parts) == 2:
            _store_rows(parts[1], output.ptr, row, head, num_rows, STRIDE, DIM, FIRST + 128)
    elif COLUMNS > buffer.shape[2]:
        left, right = parts if len(parts) == 2 else halves(parts[0])
        RIGHT: gl.constexpr = FIRST + left.shape[1]
        store_epilogue((left,), output, buffer, PENDING, row, head, num_rows, STRIDE, DIM, FIRST)
        store_epilogue((right,), output, buffer, 0, row, head, num_rows, STRIDE, DIM, RIGHT)
    else:
        full = num_rows >= WARPGROUP_ROWS
        if PENDING is not None:
            if PENDING > 0 and full:
                tma.store_wait(PENDING)
            else:
                tma.store_wait(0)
            thread_barrier()
        rows = buffer.reshape([WARPGROUP_ROWS, buffer.shape[2]])
        rows.slice(0, parts[0].shape[1], 1).store(parts[0].to(buffer.dtype))
        if len(parts) == 2:
            rows.slice(128, 64, 1).store(parts[1].to(buffer.dtype))
        if full:
            fence_async_shared()
            thread_barrier()
            store_tile(output.desc, [head, row.to(gl.int32), FIRST], buffer)
        else:
            thread_barrier()
            x = rows.load(vector_layout(buffer.shape[2], gl.num_warps()))
            _store_rows(x, output.ptr, row, head, num_rows, STRIDE, DIM, FIRST)


@gluon.jit
def _store_rows(
    x, ptr, row, head, num_rows, STRIDE: gl.constexpr, DIM: gl.constexpr, FIRST: gl.constexpr
):
    L: gl.constexpr = x.type.layout
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))
    if FIRST > 0:
        columns += FIRST
    ptrs = ptr + row * STRIDE + head * DIM + rows[:, None] * STRIDE + columns[None, :]
    mask = (rows < num_rows)[:, None]
    if DIM < FIRST + x.shape[1]:
        mask = mask & (columns < DIM)[None, :]
    gl.store(ptrs, x, mask=mask)


# -- warp roles ------------------------------------------------------------------------------------


@gluon.jit
def _consume(index: gl.constexpr, consume: gl.constexpr, args, OPTIONS: gl.constexpr):
    consume(index, args, OPTIONS)


@gluon.jit
def _produce(produce: gl.constexpr, args, OPTIONS: gl.constexpr):
    produce(args, OPTIONS)


@gluon.jit
def launch_specialised(consume: gl.constexpr, produce: gl.constexpr, args, OPTIONS: gl.constexpr):
    """Run consume(index, args, OPTIONS) on each of OPTIONS.consumers warpgroups, 1 to 3, with
    OPTIONS.registers per thread, and produce(args, OPTIONS) on one more warp. Consumer 0 is the
    warps of the launch, num_warps=4."""
    REGISTERS: gl.constexpr = OPTIONS.registers
    if OPTIONS.consumers == 1:
        gl.warp_specialize([
            (_consume, (0, consume, args, OPTIONS)),
            (_produce, (produce, args, OPTIONS)),
        ], [1], [LOAD_REGISTERS])  # fmt: skip
    elif OPTIONS.consumers == 2:
        gl.warp_specialize([
            (_consume, (0, consume, args, OPTIONS)),
            (_consume, (1, consume, args, OPTIONS)),
            (_produce, (produce, args, OPTIONS)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, consume, args, OPTIONS)),
            (_consume, (1, consume, args, OPTIONS)),
            (_consume, (2, consume, args, OPTIONS)),
            (_produce, (produce, args, OPTIONS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOAD_REGISTERS])  # fmt: skip


# -- host ------------------------------------------------------------------------------------------


class TensorDescriptor(Described, hopper.TensorDescriptor):
    """Gluon's, of a box."""


def descriptor(x: Tensor, *box: int) -> TensorDescriptor:
    """TMA descriptor of x, last dim contiguous, for boxes of a shape. A dimension of size 1 may
    have any stride: 16 stands in for it."""
    return fill(TensorDescriptor, x, *shape_and_strides(x), _box(x.dtype, *box))


def head_descriptor(x: Tensor, rows: int, columns: int = 256) -> TensorDescriptor:
    """TMA descriptor of `[rows, H, D]`, as `heads_first`: a box is `rows` rows of a head, or at
    most `columns` columns of them; columns past D read as 0."""
    box = _head_box(x.dtype, rows, min(columns, x.shape[2]))
    return fill(TensorDescriptor, x, *heads_first(x), box)


@functools.cache
def _head_box(dtype: torch.dtype, rows: int, dim: int) -> Box:
    """Swizzles of 64 columns."""
    return _box(dtype, 1, rows, max(64, padded_dim(dim)))


@functools.cache
def _box(dtype: torch.dtype, *shape: int) -> Box:
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), ELEMENTS[dtype])
    return Box(dtype, list(shape), layout)
