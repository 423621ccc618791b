"""What Hopper's kernels of DIN's attention share: the ring of tiles of events, vectors and M in
shared memory, activations in few instructions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..common.gluon_api import load_tile, thread_barrier
from ..common.pipeline import vector_layout, zero_rows
from .configs import HOPPER_STAGES
from .mlp import packed_fma
from .walk import AHEAD, end_of, find_seen, find_tile, without_tile

BLOCK = gl.constexpr(64)  # events of a tile
STAGES = gl.constexpr(HOPPER_STAGES)
COPIES = gl.constexpr(8)  # the fewest columns of an MMA
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def find_user(index, offsets_ptr, num_segments, SHIFT: gl.constexpr = None):
    """The last segment that starts at a row or before: as common/loads.py's find_segment. SHIFT:
    for a tile of 2^SHIFT rows, as its find_tile."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    low, size = 0, num_segments
    while size > 1:
        step = (size + 31) // 32
        segments = low + lanes * step
        inside = lanes * step < size
        first = gl.load(offsets_ptr + segments, mask=inside, other=0)
        if SHIFT is not None:
            first = (first.to(gl.int64) >> SHIFT) + segments
        skipped = (gl.sum((inside & (first <= index)).to(gl.int32), 0) - 1) * step
        low += skipped
        size = gl.minimum(step, size - skipped)
    return low


@gluon.jit
def find_next_seen(row, num_rows, num_segments, users, OPTIONS: gl.constexpr):
    """The Seen of a row of q, of any user."""
    MASK: gl.constexpr = OPTIONS.mask
    user = find_user(row, users.q_offsets, num_segments)
    return find_seen(row, user, num_rows, num_segments, users, MASK, BLOCK)


@gluon.jit
def load_pieces(ptr, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """The pieces of a vector of a layer's units, in fp32. A thread has at most one unit of each."""
    pieces = ()
    for i in gl.static_range(len(OPTIONS.pieces[LAYER])):
        columns = OPTIONS.pieces[LAYER][i][0] + gl.arange(
            0, OPTIONS.pieces[LAYER][i][1], layout=gl.BlockedLayout([1], [32], [4], [0])
        )
        there = columns < OPTIONS.hidden[LAYER]
        pieces = pieces + (gl.load(ptr + columns, mask=there, other=0.0).to(gl.float32),)
    return pieces


@gluon.jit
def make_vectors(LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """Shared memory for the pieces of a vector of a layer's units."""
    pieces = ()
    for i in gl.static_range(len(OPTIONS.pieces[LAYER])):
        piece = gl.allocate_shared_memory(gl.float32, [OPTIONS.pieces[LAYER][i][1]], WORDS)
        pieces = pieces + (piece,)
    return pieces


@gluon.jit
def store_vectors(buffers, pieces):
    for i in gl.static_range(len(pieces)):
        buffers[i].store(pieces[i])


@gluon.jit
def make_matrix(DTYPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for an operand of an MMA."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], SHARED)


@gluon.jit
def make_second(
    ptr, i: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr, OPTIONS: gl.constexpr
):
    """Shared memory with W2 `[ROWS, n]` of a piece of the first layer and ROWS units, from FIRST
    on, of the second one."""
    K: gl.constexpr = OPTIONS.pieces[0][i][1]
    L: gl.constexpr = vector_layout(K)
    columns = OPTIONS.pieces[0][i][0] + gl.arange(0, K, layout=gl.SliceLayout(0, L))
    rows = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    mask = (rows < OPTIONS.hidden[1])[:, None] & (columns < OPTIONS.hidden[0])[None, :]
    ptrs = ptr + rows[:, None] * OPTIONS.hidden[0] + columns[None, :]
    buffer = make_matrix(ptr.dtype.element_ty, ROWS, K)
    buffer.store(gl.load(ptrs, mask=mask, other=0.0))
    return buffer


@gluon.jit
def store_first(first, q_ptr, of_k_ptr, products_ptr, OPTIONS: gl.constexpr):
    """Store M of a row of q in its pieces `[n, E]`, which may have rows behind theirs."""
    WIDTH: gl.constexpr = first[0].shape[1]
    L: gl.constexpr = vector_layout(WIDTH)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    inside = column < OPTIONS.width
    q = gl.load(q_ptr + column, mask=inside, other=0.0)
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        rows = OPTIONS.pieces[0][i][0] + gl.arange(
            0, OPTIONS.pieces[0][i][1], layout=gl.SliceLayout(1, L)
        )
        mask = (rows < OPTIONS.hidden[0])[:, None] & inside[None, :]
        offsets = rows[:, None] * OPTIONS.width + column[None, :]
        of_k = gl.load(of_k_ptr + offsets, mask=mask, other=0.0)
        products = gl.load(products_ptr + offsets, mask=mask, other=0.0)
        m = packed_fma(products, q[None, :], of_k)
        first[i].slice(0, OPTIONS.pieces[0][i][1], 0).store(m)


@gluon.jit
def of_columns(vector, z):
    """A vector in shared memory as a row [1, n] beside z."""
    return vector.load(gl.SliceLayout(0, z.type.layout))[None, :]


@gluon.jit
def plus(z, vector):
    """z plus a vector in shared memory."""
    return z + of_columns(vector, z)


@gluon.jit
def relu16(z):
    """ReLU of z, rounded to bf16: one instruction for two numbers."""
    return gl.inline_asm_elementwise(
        "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f", [z],
        dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def prelu(z, x, slope):
    """x where z > 0, otherwise slope x: PReLU of z if x is z, and its gradient. The compiler makes
    three instructions of a selection, here it is two."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.f32 p, $1, 0f00000000; mov.f32 $0, $2; @!p mul.f32 $0, $2, $3; }",
        "=&f,f,f,f", [z, x, slope], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load_events(k_desc, buffers, row, step, wanted):
    """Start to load the tile of events from a row on, if wanted."""
    stage = step % STAGES
    mbarrier.expect(buffers.full.index(stage), k_desc.block_type.nbytes, pred=wanted)
    load_tile(
        k_desc, [row.to(gl.int32), 0], buffers.full.index(stage), buffers.k.index(stage),
        pred=wanted,
    )  # fmt: skip


@gluon.jit
def load_missing(k_desc, buffers, seen, step, missing):
    """Start to load the first tiles of a row, of which only `missing` were not."""
    for i in gl.static_range(AHEAD):
        wanted = (i < missing) & (end_of(seen) > BLOCK * i)
        load_events(k_desc, buffers, find_tile(seen, BLOCK * i)[0], step + i, wanted)


@gluon.jit
def wait_for_events(buffers, step, num_rows):
    """k of a tile with num_rows events of the segment, once it is loaded; 0 behind them."""
    stage = step % STAGES
    mbarrier.wait(buffers.full.index(stage), step // STAGES & 1)
    if num_rows < BLOCK:
        zero_rows(buffers.k.index(stage), num_rows, 0, 1)
    return buffers.k.index(stage)


@gluon.jit
def walk_tiles(
    compute: gl.constexpr, step, seen, next_seen, sums, started, k_desc, buffers, of_row,
    ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """The sums over the tiles that a row of q sees, of which there is one at least, and the next
    step. compute: adds the first tile of `seen`, and starts the MMAs of the next one, if there is
    one (NEXT)."""
    while end_of(seen) > BLOCK:
        started, sums = compute(
            started, sums, k_desc, buffers, of_row, seen, next_seen, step,
            True, ACTIVATION, OPTIONS,
        )  # fmt: skip
        seen = without_tile(seen, BLOCK)
        step += 1
    nothing, sums = compute(
        started, sums, k_desc, buffers, of_row, seen, next_seen, step, False, ACTIVATION, OPTIONS
    )
    thread_barrier()  # every warp has read what the next row writes
    return sums, step + 1


@gluon.jit
def wait(mmas, PENDING: gl.constexpr):
    """The results of all MMAs but the last PENDING, as a tuple."""
    if len(mmas) == 1:
        return (warpgroup_mma_wait(PENDING, deps=mmas),)
    else:
        return warpgroup_mma_wait(PENDING, deps=mmas)
