"""Backward kernels of DIN's attention. Each computes the scores again, and sums over what it loops
over: dq and da over events, gradients of events over rows of q, gradients of the MLP over both.

The gradients of q and of the MLP have kernels of their own, and dB and dD are summed in memory,
because the sums of one kernel for all would take more registers than there are. On an H200, one
kernel for q and the MLP took 3.8 ms with ReLU, two take 3.7, and with Dice 16.2 and 8.8.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..attention.mask import masked_block
from ..common.loads import find_tile, load_segment, log2
from ..common.ptxas import safe_ptxas
from .accumulators import (
    column_sums,
    partial_sums,
    plus,
    store_pieces,
    store_tile_pieces,
    total_sums,
    zero_pieces,
    zero_sums,
    zero_vector,
    zeros,
)
from .mlp import (
    Events,
    Mlp,
    activation_gradient,
    add_event_gradient,
    has_table,
    last_gradient,
    load_block,
    load_events,
    load_keys,
    load_mlp,
    load_pieces,
    load_query,
    load_vector,
    load_weight,
    of_query,
    reread,
    score_gradient,
    scores,
    second_gradient,
    sees,
)
from .queries import load_queries


class Query(NamedTuple):
    """A row of q, the Mlp for it, and do, lse and delta of its result."""

    q: tl.tensor
    mlp: Mlp
    do: tl.tensor
    lse: tl.tensor
    delta: tl.tensor


@triton.jit
def _load_query(
    mlp, operands, strides, weights, gradients, row,
    OPTIONS: tl.constexpr, PACKED: tl.constexpr = False,
):  # fmt: skip
    q, a = load_query(operands, strides, row, OPTIONS)
    mlp = of_query(mlp, q, a, operands, weights, OPTIONS, PACKED)
    do = load_vector(gradients[0] + row * OPTIONS.v_width, 0, OPTIONS.v_width, OPTIONS.block_v)
    lse, delta = 0.0, 0.0
    if OPTIONS.softmax:
        lse, delta = tl.load(gradients[1] + row), tl.load(gradients[2] + row)
    return Query(q, mlp, do, lse, delta)


@triton.jit
def _last_layer_gradient(
    query, events, index, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
    AGAIN: tl.constexpr = False,
):  # fmt: skip
    """Scores, p and ds of a block of events, dz of the last hidden layer, and its sums. index: of
    the round of a loop. AGAIN: vectors are not kept between scores and gradient."""
    LAST: tl.constexpr = len(OPTIONS.hidden) - 1
    mlp = reread(query.mlp, index)
    found = scores(events, mlp, ACTIVATION, OPTIONS)
    if AGAIN:
        mlp = reread(query.mlp, index + 1)  # another unknown 0
    p, ds = score_gradient(query.do, query.lse, query.delta, found.s, events, OPTIONS)
    dz, sums = activation_gradient(
        last_gradient(ds, mlp, OPTIONS), found.z[LAST], events.real, mlp, LAST, ACTIVATION, OPTIONS
    )
    return found, p, ds, dz, sums


@triton.jit
def _first_layer_gradient(
    dz, found, query, events, index, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr
):
    """dz of the first layer and its sums, given dz of the second one."""
    mlp = reread(query.mlp, index + 1)
    dh = second_gradient(dz, mlp, events.k.dtype, OPTIONS)
    return activation_gradient(dh, found.z[0], events.real, mlp, 0, ACTIVATION, OPTIONS)


# -- gradients of q --------------------------------------------------------------------------------


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def din_bwd_dq_kernel(
    operands, strides, weights, biases, tables, gradients, users,
    num_rows, num_segments, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dq and da, and parts of dDᵀ and dBᵀ `[2, E, H1]` and of the sums `[3, H1]` of the first of
    two layers.

    gradients: do, lse, delta, dq, da, parts of zeros, sums. With S = Kᵀ dZ1 of a row of q, dBᵀ =
    Σ S, dDᵀ = Σ S ∘ q and dq = Σ_units S ∘ Dᵀ: one MMA gives all. OPTIONS.only = 0: only the sums.
    """
    SUMS: tl.constexpr = has_table(OPTIONS.units) and len(OPTIONS.hidden) == 2
    # H200, ReLU: 2.3 ms without. Other kernels, and those with tables, take less time without.
    AGAIN: tl.constexpr = not has_table(OPTIONS.units)
    mlp = load_mlp(weights, biases, tables, OPTIONS)
    sums = _zero_sums(0, SUMS, OPTIONS)
    SIZE: tl.constexpr = OPTIONS.width * OPTIONS.hidden[0]
    parts_ptr = gradients[5] + tl.program_id(0).to(tl.int64) * (2 * SIZE)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        keys = load_keys(row, users, num_segments, OPTIONS)
        query = _load_query(
            mlp, operands, strides, weights, gradients, tl.cast(row, tl.int64), OPTIONS
        )
        products, da = zero_pieces(OPTIONS.block_e, 0, OPTIONS), zero_sums(0, OPTIONS)
        for start in range(0, keys.end, OPTIONS.block):
            events = load_block(operands, strides, keys, start, OPTIONS)
            found, _, ds, dz, more = _last_layer_gradient(
                query, events, start, ACTIVATION, OPTIONS, AGAIN
            )
            if len(OPTIONS.hidden) == 2:
                dz, more = _first_layer_gradient(
                    dz, found, query, events, start, ACTIVATION, OPTIONS
                )
            if SUMS:
                sums = _plus_sums(sums, more)
            if OPTIONS.only < 0:
                da = plus(da, column_sums(dz))
                products = _add_products(products, events.k, dz, OPTIONS)
        if OPTIONS.only < 0:
            _finish_row(query, products, da, weights[0], gradients, parts_ptr, row, OPTIONS)
    if SUMS:
        _store_sums(gradients[6], sums, tables[0], 0, OPTIONS)


@triton.jit
def _finish_row(query, products, da, weight, gradients, parts_ptr, row, OPTIONS: tl.constexpr):
    """Store dq and da of a row, and add its parts to the program's dDᵀ and dBᵀ. products: Kᵀ dZ1,
    [block_e, n]. weight: D."""
    dq = zero_vector(OPTIONS.block_e)
    first = load_weight(weight, OPTIONS.width, 0, 0, OPTIONS.block_e, OPTIONS)
    rows, row = tl.arange(0, OPTIONS.block_e), tl.cast(row, tl.int64)
    for i in tl.static_range(len(products)):
        dq += tl.sum(products[i] * tl.trans(first[i]).to(tl.float32), 1)
        columns = OPTIONS.pieces[0][i][0] + tl.arange(0, OPTIONS.pieces[0][i][1])
        ptrs = parts_ptr + rows[:, None] * OPTIONS.hidden[0] + columns[None, :]
        mask = (rows < OPTIONS.width)[:, None] & (columns < OPTIONS.hidden[0])[None, :]
        old = tl.load(ptrs, mask=mask, other=0.0)
        tl.store(ptrs, old + products[i] * query.q.to(tl.float32)[:, None], mask=mask)
        ptrs += OPTIONS.width * OPTIONS.hidden[0]
        tl.store(ptrs, tl.load(ptrs, mask=mask, other=0.0) + products[i], mask=mask)
    dq_ptr = gradients[3] + row * OPTIONS.width
    tl.store(dq_ptr + rows, dq.to(dq_ptr.dtype.element_ty), mask=rows < OPTIONS.width)
    store_pieces(gradients[4] + row * OPTIONS.hidden[0], total_sums(da), 0, OPTIONS)


@triton.jit
def _add_products(acc, x, dz, OPTIONS: tl.constexpr):
    """acc + xᵀ dz, for x [block, M] and each piece [block, n] of dz."""
    out = ()
    for i in tl.static_range(len(dz)):
        piece = tl.dot(tl.trans(x), dz[i].to(x.dtype), acc[i], input_precision=OPTIONS.precision)
        out = out + (piece,)
    return out


@triton.jit
def _zero_sums(LAYER: tl.constexpr, WANTED: tl.constexpr, OPTIONS: tl.constexpr):
    """The `partial_sums` of a table's gradients for each piece of a layer, one of PReLU and three
    of Dice; none unless they are wanted."""
    pieces = ()
    if WANTED:
        zero = zero_sums(LAYER, OPTIONS)
        for i in tl.static_range(len(zero)):
            if OPTIONS.units == "prelu":
                pieces = pieces + ((zero[i],),)
            else:
                pieces = pieces + ((zero[i], zero[i], zero[i]),)
    return pieces


@triton.jit
def _plus_sums(acc, sums):
    out = ()
    for i in tl.static_range(len(sums)):
        out = out + (plus(acc[i], sums[i]),)
    return out


@triton.jit
def _store_sums(ptr, sums, table, LAYER: tl.constexpr, OPTIONS: tl.constexpr):
    """Store rows of the program's part `[3, H]`, with the factors that they lack."""
    UNITS: tl.constexpr = OPTIONS.hidden[LAYER]
    ptr += tl.program_id(0) * (3 * UNITS)
    for row in tl.static_range(len(sums[0])):
        pieces = ()
        for i in tl.static_range(len(sums)):
            total = tl.sum(tl.sum(sums[i][row], 1), 0)
            if row > 0:  # with Dice, of which table has the rows of a Unit: rest
                total *= load_pieces(table + UNITS, LAYER, OPTIONS)[i]
            if row == 2:  # rstd
                total *= load_pieces(table + 3 * UNITS, LAYER, OPTIONS)[i]
            pieces = pieces + (total,)
        store_pieces(ptr + row * UNITS, pieces, LAYER, OPTIONS)


# -- gradients of the MLP behind the first linear --------------------------------------------------


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def din_bwd_dmlp_kernel(
    operands, strides, weights, biases, tables, gradients, users,
    num_rows, num_segments, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Each program's parts of the gradients of W2ᵀ `[H1, H2]`, w, b2 and b3, and of the sums
    `[3, H]` of the last hidden layer.

    gradients: do, lse, delta, parts, sums. A part has the four gradients in this order; without a
    second layer, those of w and b3. OPTIONS.only >= 0: only the sums.
    """
    LAST: tl.constexpr = len(OPTIONS.hidden) - 1
    SUMS: tl.constexpr = has_table(OPTIONS.units)
    dtype: tl.constexpr = operands.k.dtype.element_ty
    mlp = load_mlp(weights, biases, tables, OPTIONS)
    dsecond, sums = _zero_second(OPTIONS), _zero_sums(LAST, SUMS, OPTIONS)
    dlast, dbias = zero_sums(LAST, OPTIONS), zero_sums(LAST, OPTIONS)
    dlast_bias = zero_vector(OPTIONS.block)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        keys = load_keys(row, users, num_segments, OPTIONS)
        query = _load_query(
            mlp, operands, strides, weights, gradients, tl.cast(row, tl.int64), OPTIONS
        )
        for start in range(0, keys.end, OPTIONS.block):
            events = load_block(operands, strides, keys, start, OPTIONS)
            found, _, ds, dz, more = _last_layer_gradient(query, events, start, ACTIVATION, OPTIONS)
            if SUMS:
                sums = _plus_sums(sums, more)
            if OPTIONS.only < 0:
                dlast_bias += ds
                dlast = plus(dlast, _weighted_sums(found.h[LAST], ds))
                if LAST == 1:
                    dbias = plus(dbias, column_sums(dz))
                    dsecond = _add_second(dsecond, found.h[0], dz, dtype, OPTIONS)
    if SUMS:
        _store_sums(gradients[4], sums, tables[LAST], LAST, OPTIONS)
    if OPTIONS.only < 0:
        SECOND: tl.constexpr = OPTIONS.hidden[0] * OPTIONS.hidden[LAST] * LAST
        UNITS: tl.constexpr = OPTIONS.hidden[LAST]
        parts_ptr = gradients[3] + tl.program_id(0) * (SECOND + UNITS * (LAST + 1) + 1)
        for i in tl.static_range(len(dsecond)):
            store_tile_pieces(
                parts_ptr + OPTIONS.pieces[0][i][0] * UNITS, dsecond[i],
                OPTIONS.hidden[0] - OPTIONS.pieces[0][i][0], OPTIONS.pieces[0][i][1], LAST, OPTIONS,
            )  # fmt: skip
        store_pieces(parts_ptr + SECOND, total_sums(dlast), LAST, OPTIONS)
        if LAST == 1:
            store_pieces(parts_ptr + SECOND + UNITS, total_sums(dbias), LAST, OPTIONS)
        tl.store(parts_ptr + SECOND + UNITS * (LAST + 1), tl.sum(dlast_bias, 0))


@triton.jit
def _zero_second(OPTIONS: tl.constexpr):
    """Accumulators of dW2ᵀ, for each piece of the first layer those of the second one."""
    out = ()
    if len(OPTIONS.hidden) == 2:
        for i in tl.static_range(len(OPTIONS.pieces[0])):
            out = out + (zero_pieces(OPTIONS.pieces[0][i][1], 1, OPTIONS),)
    return out


@triton.jit
def _add_second(acc, h, dz, DTYPE: tl.constexpr, OPTIONS: tl.constexpr):
    """acc + h1ᵀ dz2, pieces by pieces."""
    out = ()
    for i in tl.static_range(len(h)):
        out = out + (_add_products(acc[i], h[i].to(DTYPE), dz, OPTIONS),)
    return out


@triton.jit
def _weighted_sums(h, ds):
    """The `partial_sums` of ds_i h_i of each piece."""
    out = ()
    for i in tl.static_range(len(h)):
        out = out + (partial_sums(h[i] * ds[:, None]),)
    return out


# -- gradients of events ---------------------------------------------------------------------------


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def din_bwd_dkdv_kernel(
    operands, strides, weights, biases, tables, gradients, users,
    num_segments, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of events of one user: sums over the user's rows of q.

    gradients: do, lse, delta, dk, dv. Where v is k, dk has both gradients.
    """
    dk_ptr, dv_ptr = gradients[3], gradients[4]
    # H200, ReLU: 1.75 ms, and 1.60 so. But 1.64 and 1.75 in one stage, which tables have.
    # With z1 = k Bᵀ + (k ∘ q) Dᵀ, of constant B and D in shared memory: 2.0 ms instead of 1.5.
    PACKED: tl.constexpr = not has_table(OPTIONS.units)
    user, kv_start, kv_len, start = find_tile(
        tl.program_id(0), users.kv_offsets, num_segments, log2(OPTIONS.block)
    )
    if start >= kv_len:
        return
    q_start, q_len = load_segment(users.q_offsets, user)
    mlp = load_mlp(weights, biases, tables, OPTIONS)
    events = load_events(operands, strides, kv_start + start, kv_len - start, OPTIONS)
    queries = load_queries(user, users, start, q_len, kv_len, OPTIONS)
    dk = zeros(OPTIONS.block, OPTIONS.block_e)
    dv = zeros(OPTIONS.block, OPTIONS.block_v)
    for i in range(0, queries.count):
        number = i
        if OPTIONS.mask is not None:
            number = masked_block(i, queries.rows)
        query = _load_query(
            mlp, operands, strides, weights, gradients, q_start + number, OPTIONS, PACKED
        )
        seen = events
        if OPTIONS.mask is not None:
            column = number + kv_len - q_len
            real = events.real & sees(start, column, queries.first_target, OPTIONS)
            seen = Events(events.k, events.v, real)
        found, p, _, dz, _ = _last_layer_gradient(query, seen, i, ACTIVATION, OPTIONS)
        if OPTIONS.same:
            dk += p[:, None] * query.do.to(tl.float32)[None, :]
        else:
            dv += p[:, None] * query.do.to(tl.float32)[None, :]
        if len(OPTIONS.hidden) == 2:
            dz, _ = _first_layer_gradient(dz, found, query, seen, i, ACTIVATION, OPTIONS)
        dk = add_event_gradient(dk, dz, query.mlp, events.k.dtype, OPTIONS)
    first = kv_start + start
    rows = tl.arange(0, OPTIONS.block)
    _store_rows(dk_ptr + first * OPTIONS.width, dk, rows < kv_len - start, OPTIONS.width)
    if not OPTIONS.same:
        _store_rows(dv_ptr + first * OPTIONS.v_width, dv, rows < kv_len - start, OPTIONS.v_width)


@triton.jit
def _store_rows(ptr, x, real, WIDTH: tl.constexpr):
    rows, columns = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    ptrs = ptr + rows[:, None] * WIDTH + columns[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=real[:, None] & (columns < WIDTH)[None, :])
