"""Tiles of block attention on Hopper: how they are found, loaded, rotated and stored (hopper.py has
the kernels)."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..common.gluon_api import load_tile, reinterpret, store_tile, thread_barrier
from .triton_kernels import softmax_base_2


class Tile(NamedTuple):
    """First row, and number of rows from it to the segment's end (not positive: no tile)."""

    row: gl.tensor
    num_rows: gl.tensor


class Rotary(NamedTuple):
    """Tables [num_positions, DIM / 2]; positions_ptr None: positions are counted from the segments'
    starts."""

    cos_ptr: gl.tensor
    sin_ptr: gl.tensor
    positions_ptr: gl.tensor
    num_positions: gl.tensor


class Angles(NamedTuple):
    """[BLOCK_M, BLOCK_D / 2] of a tile's rows; numbers without rotary."""

    cos: gl.tensor
    sin: gl.tensor


class Input(NamedTuple):
    """q, k, v or dO. full: barrier that completes when the tile is loaded. box, rows: the tile, [1,
    BLOCK_M, BLOCK_D] as the TMA writes it, and [BLOCK_M, BLOCK_D] as an MMA reads it."""

    desc: gl.tensor
    full: gl.shared_memory_descriptor
    box: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor


class Output(NamedTuple):
    """O or a gradient: the descriptor stores full tiles, the pointer tails."""

    desc: gl.tensor
    ptr: gl.tensor
    stride_row: gl.tensor
    stride_head: gl.tensor


@gluon.constexpr_function
def pairs_layout(block_m, block_d):
    """Layout of the even or the odd columns [block_m, block_d / 2] of an accumulator."""
    registers = [[8, 0]] + [[0, 4 << i] for i in range((block_d // 8).bit_length() - 1)]
    warps = [[16 << i, 0] for i in range((block_m // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [block_m, block_d // 2]
    )


@gluon.constexpr_function
def words_layout():
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


# -- tiles -----------------------------------------------------------------------------------------


@gluon.jit
def _find_tile(tile_index, offsets_ptr, num_segments, BLOCK_M: gl.constexpr):
    """The tile of a tile index, and its first position in the segment: the last segment whose first
    tile index is not past it."""
    segment = gl.to_tensor(0)
    high = num_segments
    while high - segment > 1:
        middle = (segment + high) // 2
        past = gl.load(offsets_ptr + middle) // BLOCK_M + middle > tile_index
        segment = gl.where(past, segment, middle)
        high = gl.where(past, middle, high)
    start = gl.load(offsets_ptr + segment)
    position = ((tile_index - start // BLOCK_M - segment) * BLOCK_M).to(gl.int32)
    row = start.to(gl.int32) + position
    return Tile(row, (gl.load(offsets_ptr + segment + 1) - start).to(gl.int32) - position), position


@gluon.jit
def first_tile(offsets_ptr, num_segments, OPTIONS: gl.constexpr):
    """The program's tile, its first position in the segment, and its first head."""
    GROUPS: gl.constexpr = OPTIONS.heads // OPTIONS.heads_per_cta
    tile_index, group = gl.program_id(0) // GROUPS, gl.program_id(0) % GROUPS
    tile, position = _find_tile(tile_index, offsets_ptr, num_segments, OPTIONS.block_m)
    return tile, position, group * OPTIONS.heads_per_cta


@gluon.jit
def _opaque(x):
    """x, hidden from the compiler. It would otherwise hold a tail's addresses in registers for all
    heads."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque_tile(tile):
    return Tile(_opaque(tile.row), _opaque(tile.num_rows))


@gluon.jit
def make_input(desc, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    box = gl.allocate_shared_memory(desc.dtype, [1, BLOCK_M, BLOCK_D], desc.layout)
    return Input(desc, full, box, box.reshape([BLOCK_M, BLOCK_D]))


@gluon.jit
def load(x, tile, head, wanted):
    """Start to load the tile of a head, if wanted."""
    mbarrier.expect(x.full, x.desc.block_type.nbytes, pred=wanted)
    load_tile(x.desc, [head, tile.row, 0], x.full, x.box, pred=wanted)


# -- rotary ----------------------------------------------------------------------------------------


@gluon.jit
def load_angles(rotary, tile, position, OPTIONS: gl.constexpr):
    """Positions past the table take its last row. OPTIONS.relative: positions are counted from the
    tile's first row."""
    if OPTIONS.rotate:
        PAIRS: gl.constexpr = OPTIONS.dim // 2
        L: gl.constexpr = pairs_layout(OPTIONS.block_m, OPTIONS.block_d)
        rows = gl.arange(0, OPTIONS.block_m, layout=gl.SliceLayout(1, L))
        pairs = gl.arange(0, OPTIONS.block_d // 2, layout=gl.SliceLayout(0, L))
        positions = rows if OPTIONS.relative else position + rows
        if rotary.positions_ptr is not None and not OPTIONS.relative:
            positions = gl.load(
                rotary.positions_ptr + tile.row + rows, mask=rows < tile.num_rows, other=0
            ).to(gl.int32)
        offsets = gl.minimum(positions, rotary.num_positions - 1)[:, None] * PAIRS + pairs[None, :]
        mask = (rows < tile.num_rows)[:, None] & (pairs < PAIRS)[None, :]
        return Angles(
            gl.load(rotary.cos_ptr + offsets, mask=mask, other=0.0),
            gl.load(rotary.sin_ptr + offsets, mask=mask, other=0.0),
        )
    else:
        return Angles(1.0, 0.0)


@gluon.jit
def _unpack(words, DTYPE: gl.constexpr):
    """Even and odd columns in fp32 of words that hold a pair of 16-bit elements each."""
    if DTYPE == gl.bfloat16:
        return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(
            gl.float32, bitcast=True
        )
    else:
        low = (words & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        return low.to(gl.float32), high.to(gl.float32)


@gluon.jit
def _pack(even, odd, DTYPE: gl.constexpr):
    """Words that hold a pair of elements each, rounded to 16 bits."""
    CONVERT: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + CONVERT + ".f32 $0, $2, $1;", "=r,f,f", [even, odd],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _as_words(rows_buf):
    return reinterpret(
        rows_buf, gl.int32, [rows_buf.shape[0], rows_buf.shape[1] // 2], words_layout()
    )


@gluon.jit
def as_dtype(rows_buf, DTYPE: gl.constexpr):
    return reinterpret(rows_buf, DTYPE, [rows_buf.shape[0], rows_buf.shape[1]], rows_buf.layout)


@gluon.jit
def zero_tail(rows_buf, num_rows):
    """Zero the rows from num_rows on. They are the next segment's, and 0 · NaN is NaN."""
    if num_rows < rows_buf.shape[0]:
        L: gl.constexpr = pairs_layout(rows_buf.shape[0], rows_buf.shape[1])
        rows = gl.arange(0, rows_buf.shape[0], layout=gl.SliceLayout(1, L))
        words_buf = _as_words(rows_buf)
        words_buf.store(gl.where((rows < num_rows)[:, None], words_buf.load(L), 0))


@gluon.jit
def rotate_in_place(rows_buf, angles, num_rows, PRECISE: gl.constexpr):
    """Rotate a tile in shared memory, and zero its rows from num_rows on. Returns the unit: the
    tile holds the rotated rows divided by it.

    PRECISE: the tile becomes fp16, which has three more bits of precision than bf16; the unit, a
    power of two, keeps it in fp16's range.
    """
    L: gl.constexpr = pairs_layout(rows_buf.shape[0], rows_buf.shape[1])
    rows = gl.arange(0, rows_buf.shape[0], layout=gl.SliceLayout(1, L))
    words_buf = _as_words(rows_buf)
    even, odd = _unpack(gl.where((rows < num_rows)[:, None], words_buf.load(L), 0), rows_buf.dtype)
    unit = 1.0
    if PRECISE:
        unit = unit_of(gl.maximum(gl.abs(even), gl.abs(odd)))
        even, odd = even * (1.0 / unit), odd * (1.0 / unit)
    cos, sin = angles
    DTYPE: gl.constexpr = gl.float16 if PRECISE else rows_buf.dtype
    words_buf.store(_pack(even * cos - odd * sin, odd * cos + even * sin, DTYPE))
    return unit


@gluon.jit
def unit_of(x):
    """The largest power of two up to the maximum of x >= 0, within 2^-100 to 2^100. NaN is ignored;
    with an infinity in x, 1."""
    largest = gl.max(gl.max(x, 1), 0)
    power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    return gl.where(largest < float("inf"), gl.minimum(gl.maximum(power, 2.0**-100), 2.0**100), 1.0)


# -- softmax and epilogue --------------------------------------------------------------------------


@gluon.jit
def block_softmax(scores, num_rows, scale, BLOCK_SIZE: gl.constexpr):
    """softmax(scale · scores) within the blocks of a tile, 0 elsewhere; scale: times log2(e)."""
    BLOCK_M: gl.constexpr = scores.shape[0]
    L: gl.constexpr = scores.type.layout
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))[:, None]
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, L))[None, :]
    visible = (columns < num_rows) & (rows < num_rows)
    if BLOCK_SIZE < BLOCK_M:
        visible = visible & (rows // BLOCK_SIZE == columns // BLOCK_SIZE)
    return softmax_base_2(gl.where(visible, scores * scale, float("-inf")))


@gluon.jit
def make_staging(desc, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    box = gl.allocate_shared_memory(desc.dtype, [1, BLOCK_M, BLOCK_D], desc.layout)
    return box.reshape([BLOCK_M, BLOCK_D])


@gluon.jit
def store_epilogue(acc, staging, out, tile, head, angles, ROTATE: gl.constexpr, DIM: gl.constexpr):
    """Store an accumulator through the staging buffer; ROTATE: rotated back before it is
    rounded."""
    BLOCK_M: gl.constexpr = staging.shape[0]
    BLOCK_D: gl.constexpr = staging.shape[1]
    tma.store_wait(0)
    thread_barrier()
    even, odd = acc.reshape([BLOCK_M, BLOCK_D // 2, 2]).split()
    even = gl.convert_layout(even, pairs_layout(BLOCK_M, BLOCK_D), assert_trivial=True)
    odd = gl.convert_layout(odd, pairs_layout(BLOCK_M, BLOCK_D), assert_trivial=True)
    if ROTATE:
        cos, sin = angles
        rotated_even = even * cos + odd * sin
        odd = odd * cos - even * sin
        even = rotated_even
    _as_words(staging).store(_pack(even, odd, staging.dtype))
    if tile.num_rows >= BLOCK_M:
        fence_async_shared()
        thread_barrier()
        store_tile(out.desc, [head, tile.row, 0], staging.reshape([1, BLOCK_M, BLOCK_D]))
    else:
        thread_barrier()
        L: gl.constexpr = gl.BlockedLayout(
            [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [BLOCK_M // 16, 1], [1, 0]
        )
        rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
        columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, L))
        row_ptrs = out.ptr + (tile.row + rows).to(gl.int64)[:, None] * out.stride_row
        ptrs = row_ptrs + head * out.stride_head + columns[None, :]
        mask = (rows < tile.num_rows)[:, None] & (columns < DIM)[None, :]
        gl.store(ptrs, staging.load(L), mask=mask)
