"""Portable device code of block attention: one kernel forward, one backward, and nothing stored
between them. op.py has the equations.

A tile holds whole blocks, so its softmax needs no second pass and the backward computes it again.
Tiles are numbered in closed form: segment b owns the tile indices from offsets[b] // BLOCK_M + b
on, at least as many as it has tiles, so the number of tile indices follows from the shapes alone.
Every program takes an equal range of tile indices and searches for the segment of its first one.

Rotary scores depend only on the distance of two rows if angles are linear in the position.
Positions are then counted from the tile's first row (RELATIVE), and a program loads cos and sin
once. If v is rotated too, or angles are not linear, it loads them for every tile.

An MMA cannot read even and odd columns of one block, so a rotated operand is held as two blocks,
and an MMA over it is the sum of two.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..attention.dropout import dropout_of_head, is_kept
from ..common.activations import LOG2_E
from ..common.loads import Rows, find_segment, load_pairs, load_rows, log2, store_pairs, store_rows
from ..common.ptxas import safe_ptxas


class Rotary(NamedTuple):
    """Tables [num_positions, DIM / 2]; positions_ptr None: positions are counted from the segments'
    starts."""

    cos_ptr: tl.tensor
    sin_ptr: tl.tensor
    positions_ptr: tl.tensor
    num_positions: tl.tensor


class Tile(NamedTuple):
    """First row, number of rows from it to the segment's end (not positive: no tile), and the first
    row's position in its segment."""

    row: tl.tensor
    num_rows: tl.tensor
    position: tl.tensor


class Angles(NamedTuple):
    """[BLOCK_M, BLOCK_D / 2] of a tile's rows; numbers without rotary."""

    cos: tl.tensor
    sin: tl.tensor


class Halves(NamedTuple):
    """Even and odd columns [BLOCK_M, BLOCK_D / 2] of a rotated block. If it is not rotated, both
    are the block [BLOCK_M, BLOCK_D]."""

    even: tl.tensor
    odd: tl.tensor


class Options(NamedTuple):
    """Constants of a launch. group: query heads of a key head. relative: positions are counted from
    a tile's first row. align: elements that strides count. packed: a pair of 16-bit elements is
    loaded and stored as one word. local_rows: dropout counts rows from their block's start."""

    heads: int
    group: int
    dim: int
    block_m: int
    block_size: int
    block_d: int
    rotate: bool
    rotate_v: bool
    relative: bool
    align: int
    packed: bool
    precision: str
    local_rows: bool = False


class DropoutArguments(NamedTuple):
    """What dropout_of_head takes."""

    seed_ptr: tl.tensor
    threshold: tl.tensor


class Forward(NamedTuple):
    """Pointers of the forward."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    out: tl.tensor


class Backward(NamedTuple):
    """Pointers of the backward."""

    do: tl.tensor
    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    dq: tl.tensor
    dk: tl.tensor
    dv: tl.tensor


# -- tiles -----------------------------------------------------------------------------------------


@triton.jit
def _program_range(num_items):
    """This program's equal share of the items: first, one past the last."""
    share, rest = num_items // tl.num_programs(0), num_items % tl.num_programs(0)
    first = tl.program_id(0) * share + tl.minimum(tl.program_id(0), rest)
    return first, first + share + tl.where(tl.program_id(0) < rest, 1, 0)


@triton.jit
def _find_tile(tile_index, segment, offsets_ptr, num_segments, BLOCK_M: tl.constexpr):
    """Segment and tile of a tile index, given the segment of the tile index before. The Hopper
    kernels have a search of their own, as each of their thread blocks takes one tile."""
    if segment + 1 < num_segments:
        segment += tl.where(
            tl.load(offsets_ptr + segment + 1) // BLOCK_M + segment + 1 <= tile_index, 1, 0
        )
    start, end = (
        tl.load(offsets_ptr + segment).to(tl.int64),
        tl.load(offsets_ptr + segment + 1).to(tl.int64),
    )
    position = (tile_index - start // BLOCK_M - segment) * BLOCK_M
    return segment, Tile(
        start + position, (end - start - position).to(tl.int32), position.to(tl.int32)
    )


# -- loads and stores ------------------------------------------------------------------------------


@triton.jit
def _load_angles(rotary, tile, ROTATE: tl.constexpr, OPTIONS: tl.constexpr):
    """Positions past the table take its last row."""
    if ROTATE:
        rows, pairs = tl.arange(0, OPTIONS.block_m), tl.arange(0, OPTIONS.block_d // 2)[None, :]
        positions = tile.position + rows
        if rotary.positions_ptr is not None:
            positions = tl.load(
                rotary.positions_ptr + tile.row + rows, mask=rows < tile.num_rows, other=0
            ).to(tl.int32)
        offsets = (
            tl.minimum(positions, rotary.num_positions - 1)[:, None] * (OPTIONS.dim // 2) + pairs
        )
        mask = (rows < tile.num_rows)[:, None] & (pairs < OPTIONS.dim // 2)
        return Angles(
            tl.load(rotary.cos_ptr + offsets, mask=mask, other=0.0),
            tl.load(rotary.sin_ptr + offsets, mask=mask, other=0.0),
        )
    else:
        return Angles(1.0, 0.0)


@triton.jit
def _load(rows, tile, head, angles, ROTATE: tl.constexpr, OPTIONS: tl.constexpr):
    """A tile's rows; ROTATE: rotated in fp32, then rounded."""
    if ROTATE:
        even, odd = load_pairs(
            rows, tile.row, head, tile.num_rows, OPTIONS.dim, OPTIONS.block_m, OPTIONS.block_d // 2,
            OPTIONS.packed,
        )  # fmt: skip
        rotated_even, rotated_odd = _rotate(
            even.to(tl.float32), odd.to(tl.float32), angles.cos, angles.sin
        )
        return Halves(rotated_even.to(even.dtype), rotated_odd.to(even.dtype))
    else:
        x = load_rows(
            rows, tile.row, head, tile.num_rows, OPTIONS.dim, OPTIONS.block_m, OPTIONS.block_d, True
        )
        return Halves(x, x)


@triton.jit
def _store(rows, tile, head, x, ROTATED: tl.constexpr, OPTIONS: tl.constexpr):
    """Store an accumulator; ROTATED: it has even and odd columns."""
    if ROTATED:
        store_pairs(
            rows, tile.row, head, x.even, x.odd, tile.num_rows, OPTIONS.dim, OPTIONS.block_m,
            OPTIONS.block_d // 2, OPTIONS.packed,
        )  # fmt: skip
    else:
        store_rows(
            rows, tile.row, head, x.even, tile.num_rows, OPTIONS.dim, OPTIONS.block_m,
            OPTIONS.block_d,
        )  # fmt: skip


@triton.jit
def _store_gradient(rows, tile, head, x, angles, ROTATE: tl.constexpr, OPTIONS: tl.constexpr):
    """Store a gradient; ROTATE: that of the operand before its rotation, rounded once."""
    if ROTATE:
        even, odd = _rotate(x.even, x.odd, angles.cos, -angles.sin)
        x = Halves(even, odd)
    _store(rows, tile, head, x, ROTATE, OPTIONS)


@triton.jit
def _rotate(even, odd, cos, sin):
    return even * cos - odd * sin, odd * cos + even * sin


# -- MMAs and softmax ------------------------------------------------------------------------------


@triton.jit
def _mma_abt(a, b, ROTATE: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ [BLOCK_M, BLOCK_M] of two operands, both rotated or neither."""
    acc = tl.dot(a.even, tl.trans(b.even), input_precision=PRECISION)
    if ROTATE:
        acc = tl.dot(a.odd, tl.trans(b.odd), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _mma_ab(a, b, acc, ROTATE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a @ b; ROTATE: b has even and odd columns."""
    even = tl.dot(a, b.even, acc.even, input_precision=PRECISION)
    if ROTATE:
        return Halves(even, tl.dot(a, b.odd, acc.odd, input_precision=PRECISION))
    else:
        return Halves(even, even)


@triton.jit
def _zeros(ROTATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    zeros = tl.zeros([BLOCK_M, BLOCK_D // 2 if ROTATE else BLOCK_D], tl.float32)
    return Halves(zeros, zeros)


@triton.jit
def _softmax(scores, num_rows, scale, BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """softmax(scale · scores) within the blocks of a tile, 0 elsewhere; scale: times log2(e)."""
    rows, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_M)[None, :]
    visible = columns < num_rows
    if BLOCK_SIZE < BLOCK_M:
        visible = visible & (rows // BLOCK_SIZE == columns // BLOCK_SIZE)
    return softmax_base_2(tl.where(visible, scores * scale, float("-inf")))


@triton.jit
def softmax_base_2(scores):
    """softmax(ln(2) · scores) of each row; 0 in rows of -inf alone, which are those past the
    segment's end."""
    row_max = tl.max(scores, 1)
    p = tl.exp2(scores - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None])
    row_sum = tl.sum(p, 1)
    return p * (1.0 / tl.where(row_sum > 0, row_sum, 1.0))[:, None]


@triton.jit
def _drop(x, dropout, tile, head, OPTIONS: tl.constexpr):
    """x [BLOCK_M, BLOCK_M], times 0 or 1 / (1 - p). Blocks are the segments of
    attention/dropout.py. They begin at multiples of 16 rows of a tile."""
    rows, start = tl.arange(0, OPTIONS.block_m)[:, None], tile.row
    if OPTIONS.local_rows:
        rows, start = rows % OPTIONS.block_size, start - start
    of_head = dropout_of_head(dropout.seed_ptr, dropout.threshold, head, start)
    kept = is_kept(of_head, rows, tl.arange(0, OPTIONS.block_m)[None, :] % OPTIONS.block_size)
    return tl.where(kept, x * of_head.factor, 0.0)


# -- kernels ---------------------------------------------------------------------------------------


@safe_ptxas
@triton.jit(do_not_specialize=["num_positions", "num_segments", "num_tiles"])
def block_attention_fwd_kernel(
    x, offsets_ptr, tables, num_positions, num_segments, num_tiles, scale, strides, dropout,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """O of one tile and one head after the other. The heads of a tile follow one another, so rows
    of a packed projection are read together.

    x: Forward, with the strides of rows and heads in turn in `strides`, in units of align elements
    (see `aligned_strides`). tables: cos, sin and positions. num_tiles: number of tile indices.
    dropout: DropoutArguments, or None.
    """
    ALIGN: tl.constexpr = OPTIONS.align
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    ROTATE: tl.constexpr = OPTIONS.rotate
    ROTATE_V: tl.constexpr = OPTIONS.rotate_v
    PRECISION: tl.constexpr = OPTIONS.precision
    HEADS: tl.constexpr = OPTIONS.heads
    q_rows = Rows(x.q, None, strides[0] * ALIGN, strides[1] * ALIGN)
    k_rows = Rows(x.k, None, strides[2] * ALIGN, strides[3] * ALIGN)
    v_rows = Rows(x.v, None, strides[4] * ALIGN, strides[5] * ALIGN)
    out_rows = Rows(x.out, None, strides[6] * ALIGN, strides[7] * ALIGN)
    rotary = Rotary(tables[0], tables[1], tables[2], num_positions)
    first, last = _program_range(num_tiles * HEADS)
    segment = find_segment(first // HEADS, offsets_ptr, num_segments, log2(BLOCK_M), True)
    relative_angles = _load_angles(rotary, Tile(0, BLOCK_M, 0), OPTIONS.relative, OPTIONS)
    for item in range(first, last):
        segment, tile = _find_tile(item // HEADS, segment, offsets_ptr, num_segments, BLOCK_M)
        head = item % HEADS
        if OPTIONS.relative:
            angles = relative_angles
        else:
            angles = _load_angles(rotary, tile, ROTATE, OPTIONS)
        q = _load(q_rows, tile, head, angles, ROTATE, OPTIONS)
        k = _load(k_rows, tile, head // OPTIONS.group, angles, ROTATE, OPTIONS)
        v = _load(v_rows, tile, head // OPTIONS.group, angles, ROTATE_V, OPTIONS)
        scores = _mma_abt(q, k, ROTATE, PRECISION)
        p = _softmax(scores, tile.num_rows, scale * LOG2_E, BLOCK_M, OPTIONS.block_size)
        if dropout is not None:
            p = _drop(p, dropout, tile, head, OPTIONS)
        zeros = _zeros(ROTATE_V, BLOCK_M, OPTIONS.block_d)
        out = _mma_ab(p.to(v.even.dtype), v, zeros, ROTATE_V, PRECISION)
        _store(out_rows, tile, head, out, ROTATE_V, OPTIONS)


@safe_ptxas
@triton.jit(do_not_specialize=["num_positions", "num_segments", "num_tiles"])
def block_attention_bwd_kernel(
    x, offsets_ptr, tables, num_positions, num_segments, num_tiles, scale, strides, dropout,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one tile and one key head after the other, with the query heads of its
    group: every gradient is written once.

    x: Backward. Others: as in the forward.
    """
    ALIGN: tl.constexpr = OPTIONS.align
    BLOCK_M: tl.constexpr = OPTIONS.block_m
    BLOCK_D: tl.constexpr = OPTIONS.block_d
    ROTATE: tl.constexpr = OPTIONS.rotate
    ROTATE_V: tl.constexpr = OPTIONS.rotate_v
    PRECISION: tl.constexpr = OPTIONS.precision
    do_rows = Rows(x.do, None, strides[0] * ALIGN, strides[1] * ALIGN)
    q_rows = Rows(x.q, None, strides[2] * ALIGN, strides[3] * ALIGN)
    k_rows = Rows(x.k, None, strides[4] * ALIGN, strides[5] * ALIGN)
    v_rows = Rows(x.v, None, strides[6] * ALIGN, strides[7] * ALIGN)
    dq_rows = Rows(x.dq, None, strides[8] * ALIGN, strides[9] * ALIGN)
    dk_rows = Rows(x.dk, None, strides[10] * ALIGN, strides[11] * ALIGN)
    dv_rows = Rows(x.dv, None, strides[12] * ALIGN, strides[13] * ALIGN)
    rotary = Rotary(tables[0], tables[1], tables[2], num_positions)
    KEY_HEADS: tl.constexpr = OPTIONS.heads // OPTIONS.group
    first, last = _program_range(num_tiles * KEY_HEADS)
    segment = find_segment(first // KEY_HEADS, offsets_ptr, num_segments, log2(BLOCK_M), True)
    relative_angles = _load_angles(rotary, Tile(0, BLOCK_M, 0), OPTIONS.relative, OPTIONS)
    for item in range(first, last):
        segment, tile = _find_tile(item // KEY_HEADS, segment, offsets_ptr, num_segments, BLOCK_M)
        key_head = item % KEY_HEADS
        if OPTIONS.relative:
            angles = relative_angles
        else:
            angles = _load_angles(rotary, tile, ROTATE, OPTIONS)
        k = _load(k_rows, tile, key_head, angles, ROTATE, OPTIONS)
        v = _load(v_rows, tile, key_head, angles, ROTATE_V, OPTIONS)
        dk, dv = _zeros(ROTATE, BLOCK_M, BLOCK_D), _zeros(ROTATE_V, BLOCK_M, BLOCK_D)
        for group_head in range(0, OPTIONS.group):
            head = key_head * OPTIONS.group + group_head
            q = _load(q_rows, tile, head, angles, ROTATE, OPTIONS)
            do = _load(do_rows, tile, head, Angles(1.0, 0.0), ROTATE_V, OPTIONS)
            scores = _mma_abt(q, k, ROTATE, PRECISION)
            dp = _mma_abt(do, v, ROTATE_V, PRECISION)
            p = _softmax(scores, tile.num_rows, scale * LOG2_E, BLOCK_M, OPTIONS.block_size)
            if dropout is not None:
                dp = _drop(dp, dropout, tile, head, OPTIONS)
            ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.even.dtype)
            dq = _mma_ab(ds, k, _zeros(ROTATE, BLOCK_M, BLOCK_D), ROTATE, PRECISION)
            _store_gradient(dq_rows, tile, head, dq, angles, ROTATE, OPTIONS)
            if dropout is not None:
                p = _drop(p, dropout, tile, head, OPTIONS)
            dv = _mma_ab(tl.trans(p.to(do.even.dtype)), do, dv, ROTATE_V, PRECISION)
            dk = _mma_ab(tl.trans(ds), q, dk, ROTATE, PRECISION)
        _store_gradient(dv_rows, tile, key_head, dv, angles, ROTATE_V, OPTIONS)
        _store_gradient(dk_rows, tile, key_head, dk, angles, ROTATE, OPTIONS)
