"""From scores to P and dS in a consumer's registers, for all backward kernels for Hopper, and which
scores are visible.

    softmax:    P = exp2(S − lse),  dS = P ∘ (dP − delta),  delta = rowsum(dO ∘ O)
    pointwise:  P = activation(S),  dS = activation'(S) ∘ dP
    dropout, which keeps the weights M:  O = (P ∘ M) v,  dV = (P ∘ M)ᵀ dO,  dP = M ∘ dO vᵀ

The host multiplies the results' factors by dropout's, 1 / (1 - p), and delta is divided by it. The
kernels call the parts between their own MMAs and waits.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.gluon_api import thread_barrier
from ...common.pipeline import (
    WARPGROUP_ROWS,
    consumer_wait,
    mma_layout,
    vector_layout,
    wait_until_empty,
)
from ..dropout import Dropout, dropout_of_head, is_kept, of_other_head
from ..mask import is_visible, visible_columns


class Position(NamedTuple):
    """Where a consumer's block of scores lies: column of its first row, first column, number of
    keys from there on in the segment, the segment's first target column, and dropout_of_queries or
    None."""

    row: gl.tensor
    column: gl.tensor
    num_keys: gl.tensor
    first_target: gl.tensor
    dropout: Dropout = None


class QueryRows(NamedTuple):
    """A consumer's rows of a tile of queries: q and dO in shared memory, and with softmax lse and
    delta in registers."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.tensor
    delta: gl.tensor


class QueryBlock(NamedTuple):
    """A block of query rows that a tile of keys visits: the first one, its column, number of rows
    from there on in the segment, and the segment's first target column. dropout: of head 0, or
    None; with it, `start` is the segment's first row, and `head` the query head."""

    first: gl.tensor
    column: gl.tensor
    num_rows: gl.tensor
    first_target: gl.tensor
    dropout: Dropout = None
    start: gl.tensor = None
    head: gl.tensor = None


# -- P and dS --------------------------------------------------------------------------------------


@gluon.jit
def weights(scores, lse, scale, OPTIONS: gl.constexpr):
    """P of a block, and the factor of dP in dS: P with softmax, else the activation's derivative.
    lse: of the rows `[64, 1]`, or of the columns `[1, columns]`."""
    if OPTIONS.activation is None:
        p = gl.exp2(scores * scale - lse)
        return p, p
    else:
        return OPTIONS.activation(scores, scale)


@gluon.jit
def minus_delta(dp, delta, OPTIONS: gl.constexpr):
    """dP − delta, with softmax: times the factor of `weights`, it is dS. delta: as lse there."""
    if OPTIONS.activation is None:
        return dp - delta
    else:
        return dp


@gluon.jit
def weights_of_keys(
    scores, rings, step, column, rows, scale, OPTIONS: gl.constexpr, MASKED: gl.constexpr
):
    """`weights` of the keys from `column` on and the query block of a step, 0 where the rows do not
    see the keys or dropout drops the weight (_drop_by_keys)."""
    L: gl.constexpr = scores.type.layout
    lse = stats_of_step(rings.lse, step, L, OPTIONS)
    p, dact = weights(scores, lse, scale, OPTIONS)
    if MASKED and OPTIONS.mask is not None:
        visible = visible_rows(column, rows, OPTIONS.mask, scores.shape[1], L)
        p, dact = gl.where(visible, p, 0.0), gl.where(visible, dact, 0.0)
    if rows.dropout is not None:
        p, dact = _drop_by_keys(p, dact, column, rows, OPTIONS)
    return p, dact


# -- visibility ------------------------------------------------------------------------------------


@gluon.jit
def visible_keys(position, MASK: gl.constexpr, COLUMNS: gl.constexpr):
    """Which of a block's first COLUMNS keys the consumer's rows see, `[64 or 1, COLUMNS]`."""
    L: gl.constexpr = mma_layout(WARPGROUP_ROWS, COLUMNS)
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    if MASK is None:
        return columns < position.num_keys
    else:
        rows = position.row + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None]
        seen = visible_columns(rows, position.first_target, MASK)
        return is_visible(position.column + columns, rows, seen, MASK)


@gluon.jit
def visible_rows(column, rows, MASK: gl.constexpr, BLOCK: gl.constexpr, L: gl.constexpr):
    """Which query rows of a block see the consumer's keys from `column` on, `[64, BLOCK]` in
    layout L: transposed, as the scores are."""
    key_columns = column + gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None]
    row_columns = rows.column + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))[None, :]
    seen = visible_columns(row_columns, rows.first_target, MASK)
    return is_visible(key_columns, row_columns, seen, MASK)


# -- dropout ---------------------------------------------------------------------------------------


@gluon.jit
def dropout_of_queries(args, tile, first, OPTIONS: gl.constexpr):
    """The Dropout, or None, of a tile's query rows, counted from the `first` one of the segment
    on."""
    if args.seed_ptr is not None:
        start = first
        if not OPTIONS.local_rows:
            start = tile.q_start + first
        return dropout_of_head(args.seed_ptr, args.threshold, tile.head, start)


@gluon.jit
def drop_by_queries(x, position):
    """x, 0 where dropout drops the weight."""
    if position.dropout is None:
        return x
    else:
        L: gl.constexpr = x.type.layout
        rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))[:, None]
        columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))[None, :]
        kept = is_kept(position.dropout, rows, columns, column=position.column)
        return gl.where(kept, x, 0.0)


@gluon.jit
def _drop_by_keys(p, dact, column, rows, OPTIONS: gl.constexpr):
    """`weights` of the keys from `column` on and a query block, 0 where they are dropped. Softmax's
    dS needs all of them: dact is negative there, which takes fewer registers than a mask."""
    L: gl.constexpr = p.type.layout
    keys = gl.arange(0, p.shape[0], layout=gl.SliceLayout(1, L))[:, None]
    places = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, L))[None, :]
    first, start = rows.first, rows.start
    if OPTIONS.kv_shared:  # rows of the batch: a chunk of them may begin anywhere
        places += (start + first).to(gl.int32)
        first, start = 0, 0
    elif OPTIONS.local_rows:
        start = 0
    dropout = of_other_head(rows.dropout, rows.head, start)
    kept = is_kept(dropout, places, keys, first, column)
    other = 0.0
    if OPTIONS.activation is None:
        other = -dact
    return gl.where(kept, p, 0.0), gl.where(kept, dact, other)


@gluon.jit
def drop_gradient(dp, dact, rows, OPTIONS: gl.constexpr):
    """dP, 0 where dropout drops the weight, and the dact of weights_of_keys without signs. Where
    dact is 0, so is dS."""
    if rows.dropout is None or OPTIONS.activation is not None:
        return dp, dact
    else:
        return gl.where(dact < 0, 0.0, dp), gl.abs(dact)


# -- lse and delta ---------------------------------------------------------------------------------


@gluon.jit
def lanes_of_block(BLOCK: gl.constexpr):
    """The rows of a block in the producer's warp."""
    return gl.arange(0, BLOCK, layout=gl.BlockedLayout([BLOCK // 32], [32], [1], [0]))


@gluon.jit
def make_stats(ring):
    """Buffers of lse or delta of the rows in a ring's buffers, fp32 `[stages, rows]`."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shape: gl.constexpr = [ring.buffers.shape[0], ring.buffers.shape[2]]
    return gl.allocate_shared_memory(gl.float32, shape, PLAIN)


@gluon.jit
def put_stats(kernel, step, head, q_start, q_len, first, lanes):
    """Write lse and delta of the segment's query rows first + lanes to the buffers of a step,
    before producer_load fills that of q and marks it as full. Rows past the segment add nothing:
    exp2(score - inf) = 0."""
    args, rings = kernel.args, kernel.rings
    offsets = head.to(gl.int64) * kernel.schedule.num_rows + q_start + first + lanes
    lse = gl.load(args.lse_ptr + offsets, mask=lanes < q_len - first, other=float("inf"))
    delta = gl.load(args.delta_ptr + offsets, mask=lanes < q_len - first, other=0.0)
    wait_until_empty(rings.q, step)
    slot = step % rings.q.buffers.shape[0]
    rings.lse.index(slot).store(lse)
    rings.delta.index(slot).store(delta)
    thread_barrier()


@gluon.jit
def stats_of_step(buffers, step, LAYOUT: gl.constexpr, OPTIONS: gl.constexpr):
    """lse or delta of the query rows of a step, `[1, rows]`; 0, which nothing reads, unless
    softmax."""
    if OPTIONS.activation is None:
        return buffers.index(step % buffers.shape[0]).load(gl.SliceLayout(0, LAYOUT))[None, :]
    else:
        return 0


@gluon.jit
def row_sums(kernel, ring, step, row, head, num_rows, OPTIONS: gl.constexpr):
    """delta = rowsum(dO ∘ O) of a consumer's rows: dO from a step of a ring, O from global
    memory."""
    WIDTH: gl.constexpr = ring.buffers.shape[3]
    DIM: gl.constexpr = OPTIONS.v_dim
    L: gl.constexpr = vector_layout(WIDTH)
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    first = kernel.args.out_ptr + row * (OPTIONS.heads * DIM) + head * DIM
    ptrs = first + rows[:, None] * (OPTIONS.heads * DIM) + columns[None, :]
    out = gl.load(ptrs, mask=(rows < num_rows)[:, None] & (columns < DIM)[None, :], other=0.0)
    do = consumer_wait(ring, step).load(L)
    return gl.sum(out.to(gl.float32) * do.to(gl.float32), 1)


@gluon.jit
def row_stats(kernel, do_ring, step, tile, first, OTHER: gl.constexpr, OPTIONS: gl.constexpr):
    """lse and delta of a consumer's rows of a tile, from its `first` on, and their offsets and
    which of them are in the segment. OTHER: lse of the others."""
    BLOCK: gl.constexpr = kernel.rings.k.buffers.shape[2]
    STATS: gl.constexpr = gl.SliceLayout(1, mma_layout(WARPGROUP_ROWS, BLOCK))
    lanes = gl.arange(0, WARPGROUP_ROWS, layout=STATS)
    num_rows, row = tile.q_len - first, tile.q_start + first
    head = tile.head.to(gl.int64) * kernel.schedule.num_rows
    offsets = head + tile.q_start + first + lanes
    lse = gl.load(kernel.args.lse_ptr + offsets, mask=lanes < num_rows, other=OTHER)
    delta = row_sums(kernel, do_ring, step, row, tile.head, num_rows, OPTIONS)
    return lse, gl.convert_layout(delta, STATS), offsets, lanes < num_rows
