"""Block attention for Hopper: the computation of triton_kernels.py, with tiles loaded and stored by
the tensor memory accelerator (TMA).

    forward    S = scale · R q (R k)ᵀ,  P = softmax(S),  O = P R v
               R: the rotation, of v only if ROTATE_V
    backward   dV = R⁻¹ Pᵀ dO,  dP = dO (R v)ᵀ,  dS = P ∘ (dP − rowsum(P ∘ dP)),
               dQ = scale · R⁻¹ dS R k,  dK = scale · R⁻¹ dSᵀ R q

Warps           no specialisation: all BLOCK_M / 16 warps (4; 8 for blocks of 128 rows) load,
                compute and store
Tiles           BLOCK_M x BLOCK_D: 64 rows of whole blocks (128 for blocks of 128), 64 columns for D
                <= 64, else 128. A thread block
                computes HEADS_PER_CTA heads of one tile, one after the other
Barriers        q.full, k.full, v.full, do.full: arrive count 1 (the thread that expects the TMA's
                bytes); the operand's tile of this head
                is in shared memory. There are no empty barriers: the same warps fill a buffer after
                the MMA that last reads it
                Results leave by TMA through the staging buffer: tma.store_wait(0) guards its reuse
Shared memory   per 64 x 128 tile of 16 bits 16 KiB, per 64 x 64 matrix 8 KiB; barriers take less
                than 0.1 KiB
                forward    q 16 + k 16 + v 16 + staging 16                                =  64 KiB,
                           three thread blocks an SM
                backward   q 16 + k 16 + v 16 + dO 16 + staging 16 + P 8 + dS 8           =  96 KiB,
                           two thread blocks an SM
                blocks of 128: forward 4 x 32 = 128 KiB, backward 5 x 32 + P 32 + dS 32 = 224 KiB,
                one thread block an SM
Registers       at most 168 a thread in the forward, and in the backward of D <= 64, for three
                thread blocks an SM; otherwise no limit

A buffer is filled for the next head as soon as the last MMA has read it. Rotary rotates q, k and v
in place in shared memory, and dq, dk and dv in registers. In both, a thread owns the same rows and
pairs of columns, so it keeps their cos and sin for all heads.
"""

from __future__ import annotations

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.activations import LOG2_E
from ..common.descriptors import has_descriptor
from ..common.gluon_api import load_tile, reinterpret, store_tile, thread_barrier
from ..common.pipeline import head_descriptor, mma_layout
from ..common.ptxas import safe_ptxas
from .configs import HopperBlockAttentionConfig
from .params import BlockAttentionParams
from .triton_kernels import softmax_base_2


class Options(NamedTuple):
    """Constants of a launch. heads_per_cta: heads of a thread block. Others: as of the portable
    kernels. precise: see `RotaryParams`."""

    heads: int
    heads_per_cta: int
    dim: int
    block_m: int
    block_d: int
    block_size: int
    rotate: bool
    rotate_v: bool
    relative: bool
    precise: bool


class Forward(NamedTuple):
    """Pointers of the forward besides those in descriptors."""

    out: gl.tensor
    offsets: gl.tensor
    cos: gl.tensor
    sin: gl.tensor
    positions: gl.tensor


class Backward(NamedTuple):
    """Pointers of the backward besides those in descriptors."""

    dq: gl.tensor
    dk: gl.tensor
    dv: gl.tensor
    offsets: gl.tensor
    cos: gl.tensor
    sin: gl.tensor
    positions: gl.tensor


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
def _opaque(x):
    """x, hidden from the compiler. It would otherwise hold a tail's addresses in registers for all
    heads."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _opaque_tile(tile):
    return Tile(_opaque(tile.row), _opaque(tile.num_rows))


@gluon.jit
def _load(x, tile, head, wanted):
    """Start to load the tile of a head, if wanted."""
    mbarrier.expect(x.full, x.desc.block_type.nbytes, pred=wanted)
    load_tile(x.desc, [head, tile.row, 0], x.full, x.box, pred=wanted)


# -- rotary ----------------------------------------------------------------------------------------


@gluon.jit
def _load_angles(
    rotary, tile, position,
    ROTATE: gl.constexpr, RELATIVE: gl.constexpr, DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Positions past the table take its last row. RELATIVE: positions are counted from the tile's
    first row."""
    if ROTATE:
        L: gl.constexpr = pairs_layout(BLOCK_M, BLOCK_D)
        rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
        pairs = gl.arange(0, BLOCK_D // 2, layout=gl.SliceLayout(0, L))
        positions = rows if RELATIVE else position + rows
        if rotary.positions_ptr is not None and not RELATIVE:
            positions = gl.load(
                rotary.positions_ptr + tile.row + rows, mask=rows < tile.num_rows, other=0
            ).to(gl.int32)
        offsets = (
            gl.minimum(positions, rotary.num_positions - 1)[:, None] * (DIM // 2) + pairs[None, :]
        )
        mask = (rows < tile.num_rows)[:, None] & (pairs < DIM // 2)[None, :]
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
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip


@gluon.jit
def _as_words(rows_buf):
    return reinterpret(
        rows_buf, gl.int32, [rows_buf.shape[0], rows_buf.shape[1] // 2], words_layout()
    )


@gluon.jit
def _as_dtype(rows_buf, DTYPE: gl.constexpr):
    return reinterpret(rows_buf, DTYPE, [rows_buf.shape[0], rows_buf.shape[1]], rows_buf.layout)


@gluon.jit
def _zero_tail(rows_buf, num_rows):
    """Zero the rows from num_rows on. They are the next segment's, and 0 · NaN is NaN."""
    if num_rows < rows_buf.shape[0]:
        L: gl.constexpr = pairs_layout(rows_buf.shape[0], rows_buf.shape[1])
        rows = gl.arange(0, rows_buf.shape[0], layout=gl.SliceLayout(1, L))
        words_buf = _as_words(rows_buf)
        words_buf.store(gl.where((rows < num_rows)[:, None], words_buf.load(L), 0))


@gluon.jit
def _rotate_in_place(rows_buf, angles, num_rows, PRECISE: gl.constexpr):
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
        unit = _unit_of(gl.maximum(gl.abs(even), gl.abs(odd)))
        even, odd = even * (1.0 / unit), odd * (1.0 / unit)
    cos, sin = angles
    words_buf.store(
        _pack(
            even * cos - odd * sin,
            odd * cos + even * sin,
            gl.float16 if PRECISE else rows_buf.dtype,
        )
    )
    return unit


@gluon.jit
def _unit_of(x):
    """The largest power of two up to the maximum of x >= 0, within 2^-100 to 2^100. NaN is ignored;
    with an infinity in x, 1."""
    largest = gl.max(gl.max(x, 1), 0)
    power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    return gl.where(largest < float("inf"), gl.minimum(gl.maximum(power, 2.0**-100), 2.0**100), 1.0)


# -- softmax and epilogue --------------------------------------------------------------------------


@gluon.jit
def _softmax(scores, num_rows, scale, BLOCK_SIZE: gl.constexpr):
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
def _store_epilogue(acc, staging, out, tile, head, angles, ROTATE: gl.constexpr, DIM: gl.constexpr):
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
        ptrs = (
            out.ptr
            + (tile.row + rows).to(gl.int64)[:, None] * out.stride_row
            + head * out.stride_head
            + columns[None, :]
        )
        gl.store(
            ptrs, staging.load(L), mask=(rows < tile.num_rows)[:, None] & (columns < DIM)[None, :]
        )


# -- kernels ---------------------------------------------------------------------------------------


@gluon.jit
def _make_barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def _make_input(desc, full, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    box = gl.allocate_shared_memory(desc.dtype, [1, BLOCK_M, BLOCK_D], desc.layout)
    return Input(desc, full, box, box.reshape([BLOCK_M, BLOCK_D]))


@gluon.jit
def _make_staging(desc, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [1, BLOCK_M, BLOCK_D], desc.layout).reshape(
        [BLOCK_M, BLOCK_D]
    )


@safe_ptxas
@gluon.jit(do_not_specialize=["num_positions", "num_segments"])
def block_attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, pointers, num_positions, num_segments, numbers,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """O of one tile, heads_per_cta heads. Grid: a program for each tile index and group of heads; a
    tile's groups are adjacent. pointers: Forward. numbers: the scale, strides of rows and heads."""
    HEADS: gl.constexpr = OPTIONS.heads
    HEADS_PER_CTA: gl.constexpr = OPTIONS.heads_per_cta
    DIM: gl.constexpr = OPTIONS.dim
    BLOCK_M: gl.constexpr = OPTIONS.block_m
    BLOCK_D: gl.constexpr = OPTIONS.block_d
    BLOCK_SIZE: gl.constexpr = OPTIONS.block_size
    ROTATE: gl.constexpr = OPTIONS.rotate
    ROTATE_V: gl.constexpr = OPTIONS.rotate_v
    RELATIVE: gl.constexpr = OPTIONS.relative
    PRECISE: gl.constexpr = OPTIONS.precise
    DTYPE: gl.constexpr = q_desc.dtype
    QK_DTYPE: gl.constexpr = gl.float16 if PRECISE else DTYPE
    q_full, k_full, v_full = _make_barrier(), _make_barrier(), _make_barrier()
    q = _make_input(q_desc, q_full, BLOCK_M, BLOCK_D)
    k = _make_input(k_desc, k_full, BLOCK_M, BLOCK_D)
    v = _make_input(v_desc, v_full, BLOCK_M, BLOCK_D)
    out = Output(out_desc, pointers.out, numbers[1], numbers[2])
    staging = _make_staging(out_desc, BLOCK_M, BLOCK_D)
    rotated_q, rotated_k = _as_dtype(q.rows, QK_DTYPE), _as_dtype(k.rows, QK_DTYPE)
    no_scores = gl.zeros([BLOCK_M, BLOCK_M], gl.float32, mma_layout(BLOCK_M, BLOCK_M))
    no_rows = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, mma_layout(BLOCK_M, BLOCK_D))

    first_head = gl.program_id(0) % (HEADS // HEADS_PER_CTA) * HEADS_PER_CTA
    tile, position = _find_tile(
        gl.program_id(0) // (HEADS // HEADS_PER_CTA), pointers.offsets, num_segments, BLOCK_M
    )
    _load(q, tile, first_head, tile.num_rows > 0)
    _load(k, tile, first_head, tile.num_rows > 0)
    _load(v, tile, first_head, tile.num_rows > 0)
    rotary = Rotary(pointers.cos, pointers.sin, pointers.positions, num_positions)
    angles = _load_angles(rotary, tile, position, ROTATE, RELATIVE, DIM, BLOCK_M, BLOCK_D)
    for step in range(gl.where(tile.num_rows > 0, HEADS_PER_CTA, 0)):
        tile = _opaque_tile(tile)
        head = first_head + step
        more = step + 1 < HEADS_PER_CTA
        phase = step & 1
        mbarrier.wait(q.full, phase)
        mbarrier.wait(k.full, phase)
        unit = 1.0
        if ROTATE:  # otherwise rows past the segment's end reach only scores that are masked
            unit = _rotate_in_place(q.rows, angles, tile.num_rows, PRECISE) * _rotate_in_place(
                k.rows, angles, tile.num_rows, PRECISE
            )
            fence_async_shared()
            thread_barrier()
        scores = warpgroup_mma(
            rotated_q, rotated_k.permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        mbarrier.wait(v.full, phase)
        if ROTATE_V:
            _rotate_in_place(v.rows, angles, tile.num_rows, False)
        else:
            _zero_tail(v.rows, tile.num_rows)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        fence_async_shared()
        thread_barrier()
        _load(q, tile, head + 1, more)
        _load(k, tile, head + 1, more)
        p = _softmax(scores, tile.num_rows, numbers[0] * unit * LOG2_E, BLOCK_SIZE)
        p = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, mma_layout(BLOCK_M, BLOCK_D), 2))
        acc = warpgroup_mma(p, v.rows, no_rows, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _store_epilogue(acc, staging, out, tile, head, angles, False, DIM)
        _load(v, tile, head + 1, more)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(do_not_specialize=["num_positions", "num_segments"])
def block_attention_bwd_hopper_kernel(
    do_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, pointers, num_positions,
    num_segments, numbers,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one tile, heads_per_cta heads. Grid, numbers: as in the forward.
    pointers: Backward."""
    HEADS: gl.constexpr = OPTIONS.heads
    HEADS_PER_CTA: gl.constexpr = OPTIONS.heads_per_cta
    DIM: gl.constexpr = OPTIONS.dim
    BLOCK_M: gl.constexpr = OPTIONS.block_m
    BLOCK_D: gl.constexpr = OPTIONS.block_d
    BLOCK_SIZE: gl.constexpr = OPTIONS.block_size
    ROTATE: gl.constexpr = OPTIONS.rotate
    ROTATE_V: gl.constexpr = OPTIONS.rotate_v
    RELATIVE: gl.constexpr = OPTIONS.relative
    PRECISE: gl.constexpr = OPTIONS.precise
    DTYPE: gl.constexpr = q_desc.dtype
    QK_DTYPE: gl.constexpr = gl.float16 if PRECISE else DTYPE
    q_full, k_full, v_full, do_full = (
        _make_barrier(),
        _make_barrier(),
        _make_barrier(),
        _make_barrier(),
    )
    q = _make_input(q_desc, q_full, BLOCK_M, BLOCK_D)
    k = _make_input(k_desc, k_full, BLOCK_M, BLOCK_D)
    v = _make_input(v_desc, v_full, BLOCK_M, BLOCK_D)
    do = _make_input(do_desc, do_full, BLOCK_M, BLOCK_D)
    dq_out = Output(dq_desc, pointers.dq, numbers[1], numbers[2])
    dk_out = Output(dk_desc, pointers.dk, numbers[3], numbers[4])
    dv_out = Output(dv_desc, pointers.dv, numbers[5], numbers[6])
    staging = _make_staging(dq_desc, BLOCK_M, BLOCK_D)
    rotated_q, rotated_k = _as_dtype(q.rows, QK_DTYPE), _as_dtype(k.rows, QK_DTYPE)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_M], DTYPE)
    p_buf = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_M], square)
    ds_buf = gl.allocate_shared_memory(QK_DTYPE, [BLOCK_M, BLOCK_M], square)
    no_scores = gl.zeros([BLOCK_M, BLOCK_M], gl.float32, mma_layout(BLOCK_M, BLOCK_M))
    no_rows = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, mma_layout(BLOCK_M, BLOCK_D))

    first_head = gl.program_id(0) % (HEADS // HEADS_PER_CTA) * HEADS_PER_CTA
    tile, position = _find_tile(
        gl.program_id(0) // (HEADS // HEADS_PER_CTA), pointers.offsets, num_segments, BLOCK_M
    )
    _load(q, tile, first_head, tile.num_rows > 0)
    _load(k, tile, first_head, tile.num_rows > 0)
    _load(v, tile, first_head, tile.num_rows > 0)
    _load(do, tile, first_head, tile.num_rows > 0)
    rotary = Rotary(pointers.cos, pointers.sin, pointers.positions, num_positions)
    angles = _load_angles(rotary, tile, position, ROTATE, RELATIVE, DIM, BLOCK_M, BLOCK_D)
    for step in range(gl.where(tile.num_rows > 0, HEADS_PER_CTA, 0)):
        tile = _opaque_tile(tile)
        head = first_head + step
        more = step + 1 < HEADS_PER_CTA
        phase = step & 1
        mbarrier.wait(q.full, phase)
        mbarrier.wait(k.full, phase)
        q_unit, k_unit, ds_unit = 1.0, 1.0, 1.0
        if ROTATE:
            q_unit = _rotate_in_place(q.rows, angles, tile.num_rows, PRECISE)
            k_unit = _rotate_in_place(k.rows, angles, tile.num_rows, PRECISE)
        else:
            _zero_tail(q.rows, tile.num_rows)
            _zero_tail(k.rows, tile.num_rows)
        fence_async_shared()
        thread_barrier()
        scores = warpgroup_mma(
            rotated_q, rotated_k.permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        mbarrier.wait(v.full, phase)
        mbarrier.wait(do.full, phase)
        _zero_tail(do.rows, tile.num_rows)
        if ROTATE_V:
            _rotate_in_place(v.rows, angles, tile.num_rows, False)
        fence_async_shared()
        thread_barrier()
        dp = warpgroup_mma(do.rows, v.rows.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p = _softmax(scores, tile.num_rows, numbers[0] * q_unit * k_unit * LOG2_E, BLOCK_SIZE)
        p_buf.store(p.to(DTYPE))
        dp = warpgroup_mma_wait(0, deps=(dp,))
        dp = gl.where(p > 0, dp, 0.0)
        ds = p * (dp - gl.sum(p * dp, 1)[:, None]) * numbers[0]
        if PRECISE:
            ds_unit = _unit_of(gl.abs(ds))
            ds *= 1.0 / ds_unit
        ds_buf.store(ds.to(QK_DTYPE))
        fence_async_shared()
        thread_barrier()
        _load(v, tile, head + 1, more)

        dv = warpgroup_mma(p_buf.permute((1, 0)), do.rows, no_rows, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(0, deps=(dv,))
        _store_epilogue(dv, staging, dv_out, tile, head, angles, ROTATE_V, DIM)
        _load(do, tile, head + 1, more)
        dq = warpgroup_mma(ds_buf, rotated_k, no_rows, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _store_epilogue(dq * (ds_unit * k_unit), staging, dq_out, tile, head, angles, ROTATE, DIM)
        _load(k, tile, head + 1, more)
        dk = warpgroup_mma(ds_buf.permute((1, 0)), rotated_q, no_rows, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        _store_epilogue(dk * (ds_unit * q_unit), staging, dk_out, tile, head, angles, ROTATE, DIM)
        _load(q, tile, head + 1, more)
    tma.store_wait(0)


# -- launches --------------------------------------------------------------------------------------


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    params: BlockAttentionParams,
    config: HopperBlockAttentionConfig,
) -> None:
    """Write out, contiguous."""
    rotary = params.rotary
    block_attention_fwd_hopper_kernel[_grid(q, params, config)](
        *_descriptors(config, q, k, v, out),
        Forward(out, params.offsets, *rotary[:3]),
        rotary.num_positions,
        params.offsets.shape[0] - 1,
        (params.scale, *out.stride()[:2]),
        **_constants(q, params, config),
    )


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    params: BlockAttentionParams, config: HopperBlockAttentionConfig,
) -> None:  # fmt: skip
    """Write dq, dk and dv, last dim contiguous."""
    do = do if has_descriptor(do) else do.contiguous()
    rotary = params.rotary
    block_attention_bwd_hopper_kernel[_grid(q, params, config)](
        *_descriptors(config, do, q, k, v, dq, dk, dv),
        Backward(dq, dk, dv, params.offsets, *rotary[:3]),
        rotary.num_positions,
        params.offsets.shape[0] - 1,
        (params.scale, *dq.stride()[:2], *dk.stride()[:2], *dv.stride()[:2]),
        **_constants(q, params, config),
    )


def _grid(
    q: Tensor, params: BlockAttentionParams, config: HopperBlockAttentionConfig
) -> tuple[int]:
    """Thread blocks are short: the hardware balances them, and neighbours read the same rows, which
    keeps DRAM pages open."""
    num_tiles = q.shape[0] // config.block_m + params.offsets.shape[0] - 1
    return (num_tiles * (q.shape[1] // config.heads_per_cta),)


def _constants(q: Tensor, params: BlockAttentionParams, config: HopperBlockAttentionConfig) -> dict:
    """Constants and launch options of both kernels."""
    rotary, kind = params.rotary, params.rotary.kind
    options = Options(
        heads=q.shape[1],
        heads_per_cta=config.heads_per_cta,
        dim=q.shape[2],
        block_m=config.block_m,
        block_d=config.block_d,
        block_size=params.block_size,
        rotate=kind != "none",
        rotate_v=rotary.rotate_v,
        relative=kind == "relative",
        precise=kind != "none" and rotary.precise and q.dtype == torch.bfloat16,
    )
    return dict(OPTIONS=options, num_warps=config.num_warps, maxnreg=config.max_registers)


def _descriptors(config: HopperBlockAttentionConfig, *tensors: Tensor) -> list[TensorDescriptor]:
    """TMA descriptors of `[L, H, D]` as `[H, L, D]`. A box is one head's tile."""
    return [head_descriptor(x, config.block_m) for x in tensors]
