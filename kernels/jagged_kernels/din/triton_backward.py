"""Backward kernels of DIN's attention. Each computes the scores again, and sums over what it loops
over: gradients of rows of q and of the MLP over events, gradients of events over rows of q."""

import triton
import triton.language as tl

from ..common.loads import find_segment, find_tile, load_segment, log2
from ..common.ptxas import safe_ptxas
from .mlp import (
    activation_gradient,
    column_sums,
    last_gradient,
    load_events,
    load_mlp,
    load_query,
    load_vector,
    plus,
    product_gradient,
    score_gradient,
    scores,
    second_gradient,
    store_pieces,
    store_tile_pieces,
    zero_pieces,
    zero_vector,
    zero_vectors,
    zeros,
)


@triton.jit
def _zero_second(OPTIONS: tl.constexpr):
    """Accumulators of dW2ᵀ, in the form of `_load_second`."""
    out = ()
    if len(OPTIONS.hidden) == 2:
        for i in tl.static_range(len(OPTIONS.pieces[0])):
            out = out + (zero_pieces(OPTIONS.pieces[0][i][1], 1, OPTIONS),)
    return out


@triton.jit
def _add_products(acc, x, dz, OPTIONS: tl.constexpr):
    """acc + xᵀ dz, for x [block, M] and each piece [block, n] of dz."""
    out = ()
    for i in tl.static_range(len(dz)):
        piece = tl.dot(
            tl.trans(x), dz[i].to(x.dtype), acc[i], input_precision=OPTIONS.precision
        )
        out = out + (piece,)
    return out


@triton.jit
def _add_second(acc, h, dz, DTYPE: tl.constexpr, OPTIONS: tl.constexpr):
    """acc + h1ᵀ dz2, pieces by pieces."""
    out = ()
    for i in tl.static_range(len(h)):
        out = out + (_add_products(acc[i], h[i].to(DTYPE), dz, OPTIONS),)
    return out


@triton.jit
def _zero_sums(OPTIONS: tl.constexpr):
    """For each layer and piece with a table, three sums [n]."""
    layers = ()
    if OPTIONS.units is not None:
        for layer in tl.static_range(len(OPTIONS.hidden)):
            pieces = ()
            zeros = zero_vectors(layer, OPTIONS)
            for i in tl.static_range(len(zeros)):
                pieces = pieces + ((zeros[i], zeros[i], zeros[i]),)
            layers = layers + (pieces,)
    return layers


@triton.jit
def _plus_sums(acc, sums):
    out = ()
    for i in tl.static_range(len(sums)):
        out = out + (plus(acc[i], sums[i]),)
    return out


@triton.jit
def _store_sums(ptr, sums, OPTIONS: tl.constexpr):
    """`[3, H]` of each layer, one after the other."""
    for layer in tl.static_range(len(sums)):
        for row in tl.static_range(3):
            pieces = ()
            for i in tl.static_range(len(sums[layer])):
                pieces = pieces + (sums[layer][i][row],)
            store_pieces(ptr + row * OPTIONS.hidden[layer], pieces, layer, OPTIONS)
        ptr += 3 * OPTIONS.hidden[layer]


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def din_bwd_dq_kernel(
    operands, strides, weights, biases, tables, gradients, q_offsets_ptr, kv_offsets_ptr,
    num_rows, num_segments, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dq and da, and each program's part of the gradients of the MLP.

    gradients: do, lse, delta, dq, da, and parts, of zeros: of each program Dᵀ `[E, H1]`, W2ᵀ `[H1, H2]`, w
    and the biases in this order, then the sums `[3, H]` of each layer with a table. With
    S = Kᵀ dZ1 of a row of q, dD = Σ S ∘ q and dq = Σ_units S ∘ Dᵀ: one MMA gives both.

    OPTIONS.only: the sums of one layer alone are computed.
    """
    do_ptr, lse_ptr, delta_ptr = gradients[0], gradients[1], gradients[2]
    parts_ptr = gradients[5]
    LAYERS: tl.constexpr = len(OPTIONS.hidden)
    dtype: tl.constexpr = operands.k.dtype.element_ty
    SECOND: tl.constexpr = OPTIONS.hidden[0] * OPTIONS.hidden[LAYERS - 1] * (LAYERS - 1)
    FIRST: tl.constexpr = OPTIONS.width * OPTIONS.hidden[0]
    LAST: tl.constexpr = OPTIONS.hidden[LAYERS - 1]
    SUMS: tl.constexpr = FIRST + SECOND + LAST * LAYERS + 1
    UNITS: tl.constexpr = 3 * (OPTIONS.hidden[0] + OPTIONS.hidden[LAYERS - 1] * (LAYERS - 1))
    parts_ptr += tl.program_id(0).to(tl.int64) * (SUMS + (0 if OPTIONS.units is None else UNITS))
    mlp = load_mlp(weights, biases, tables, OPTIONS)
    dsecond = _zero_second(OPTIONS)
    dlast, dlast_bias = zero_vectors(LAYERS - 1, OPTIONS), 0.0
    dbias, sums = zero_vectors(LAYERS - 1, OPTIONS), _zero_sums(OPTIONS)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        user = find_segment(row, q_offsets_ptr, num_segments, 0, False)
        kv_start, kv_len = load_segment(kv_offsets_ptr, user)
        is_of_user = row < tl.load(q_offsets_ptr + num_segments)
        kv_len = tl.where(is_of_user, kv_len, 0)
        row64 = tl.cast(row, tl.int64)
        q, a = load_query(operands, strides, row64, OPTIONS)
        do = load_vector(
            do_ptr + row64 * OPTIONS.v_width, 0, OPTIONS.v_width, OPTIONS.block_v
        ).to(tl.float32)
        lse, delta = 0.0, 0.0
        if OPTIONS.softmax:
            lse, delta = tl.load(lse_ptr + row64), tl.load(delta_ptr + row64)
        products, da = zero_pieces(OPTIONS.block_e, 0, OPTIONS), zero_vectors(0, OPTIONS)
        for start in range(0, kv_len, OPTIONS.block):
            events = load_events(operands, strides, kv_start + start, kv_len - start, OPTIONS)
            found = scores(q, a, events, mlp, ACTIVATION, OPTIONS)
            _, ds = score_gradient(do, lse, delta, found.s, events, OPTIONS)
            dh = last_gradient(ds, mlp)
            dz, more = activation_gradient(
                dh, found.z[LAYERS - 1], events.real, mlp, LAYERS - 1, ACTIVATION, OPTIONS
            )
            if OPTIONS.only < 0:
                dlast_bias += tl.sum(ds, 0)
                dlast = plus(dlast, _weighted_sums(found.h[LAYERS - 1], ds))
            if LAYERS == 2:
                first_sums = ()
                if OPTIONS.only < 0:
                    dbias = plus(dbias, column_sums(dz))
                    dsecond = _add_second(dsecond, found.h[0], dz, dtype, OPTIONS)
                if OPTIONS.only < 1:
                    dh = second_gradient(dz, mlp, dtype, OPTIONS)
                    dz, first_sums = activation_gradient(
                        dh, found.z[0], events.real, mlp, 0, ACTIVATION, OPTIONS
                    )
                if OPTIONS.units is not None:
                    if OPTIONS.only < 1:
                        sums = (_plus_sums(sums[0], first_sums), _plus_sums(sums[1], more))
                    else:
                        sums = (sums[0], _plus_sums(sums[1], more))
            elif OPTIONS.units is not None:
                sums = (_plus_sums(sums[0], more),)
            if OPTIONS.only < 0:
                da = plus(da, column_sums(dz))
                products = _add_products(products, events.k, dz, OPTIONS)
        if OPTIONS.only < 0:
            _finish_row(q, products, da, mlp, gradients, parts_ptr, row64, OPTIONS)
    if OPTIONS.only < 0:
        for i in tl.static_range(len(dsecond)):
            store_tile_pieces(
                parts_ptr + FIRST + OPTIONS.pieces[0][i][0] * OPTIONS.hidden[1], dsecond[i],
                OPTIONS.hidden[0] - OPTIONS.pieces[0][i][0], OPTIONS.pieces[0][i][1], 1, OPTIONS,
            )  # fmt: skip
        store_pieces(parts_ptr + FIRST + SECOND, dlast, LAYERS - 1, OPTIONS)
        if LAYERS == 2:
            store_pieces(parts_ptr + FIRST + SECOND + LAST, dbias, 1, OPTIONS)
        tl.store(parts_ptr + SUMS - 1, dlast_bias)
    _store_sums(parts_ptr + SUMS, sums, OPTIONS)


@triton.jit
def _weighted_sums(h, ds):
    """Σ_i ds_i h_i of each piece."""
    out = ()
    for i in tl.static_range(len(h)):
        out = out + (tl.sum(h[i] * ds[:, None], 0),)
    return out


@triton.jit
def _finish_row(q, products, da, mlp, gradients, dfirst_ptr, row, OPTIONS: tl.constexpr):
    """Store dq and da of a row, and add its part to the program's dDᵀ `[E, H1]`, for which there are
    no registers. products: Kᵀ dZ1, [block_e, n]."""
    dq = zero_vector(OPTIONS.block_e)
    rows = tl.arange(0, OPTIONS.block_e)
    for i in tl.static_range(len(products)):
        dq += tl.sum(products[i] * tl.trans(mlp.first[i]).to(tl.float32), 1)
        columns = OPTIONS.pieces[0][i][0] + tl.arange(0, OPTIONS.pieces[0][i][1])
        ptrs = dfirst_ptr + rows[:, None] * OPTIONS.hidden[0] + columns[None, :]
        mask = (rows < OPTIONS.width)[:, None] & (columns < OPTIONS.hidden[0])[None, :]
        old = tl.load(ptrs, mask=mask, other=0.0)
        tl.store(ptrs, old + products[i] * q.to(tl.float32)[:, None], mask=mask)
    dq_ptr = gradients[3] + row * OPTIONS.width
    tl.store(dq_ptr + rows, dq.to(dq_ptr.dtype.element_ty), mask=rows < OPTIONS.width)
    store_pieces(gradients[4] + row * OPTIONS.hidden[0], da, 0, OPTIONS)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def din_bwd_dkdv_kernel(
    operands, strides, weights, biases, tables, gradients, q_offsets_ptr, kv_offsets_ptr,
    num_segments, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dk, db and dv of a block of events of one user: sums over the user's rows of q.

    gradients: do, lse, delta, dk, db, dv. Where v is k, dk has both gradients.
    """
    do_ptr, lse_ptr, delta_ptr, dk_ptr, db_ptr, dv_ptr = gradients
    LAYERS: tl.constexpr = len(OPTIONS.hidden)
    dtype: tl.constexpr = operands.k.dtype.element_ty
    user, kv_start, kv_len, start = find_tile(
        tl.program_id(0), kv_offsets_ptr, num_segments, log2(OPTIONS.block)
    )
    if start >= kv_len:
        return
    q_start, q_len = load_segment(q_offsets_ptr, user)
    mlp = load_mlp(weights, biases, tables, OPTIONS)
    events = load_events(operands, strides, kv_start + start, kv_len - start, OPTIONS)
    dk = zeros(OPTIONS.block, OPTIONS.block_e)
    dv = zeros(OPTIONS.block, OPTIONS.block_v)
    db = zero_pieces(OPTIONS.block, 0, OPTIONS)
    for i in range(0, q_len):
        row = q_start + i
        q, a = load_query(operands, strides, row, OPTIONS)
        do = load_vector(
            do_ptr + row * OPTIONS.v_width, 0, OPTIONS.v_width, OPTIONS.block_v
        ).to(tl.float32)
        lse, delta = 0.0, 0.0
        if OPTIONS.softmax:
            lse, delta = tl.load(lse_ptr + row), tl.load(delta_ptr + row)
        found = scores(q, a, events, mlp, ACTIVATION, OPTIONS)
        p, ds = score_gradient(do, lse, delta, found.s, events, OPTIONS)
        if OPTIONS.same:
            dk += p[:, None] * do[None, :]
        else:
            dv += p[:, None] * do[None, :]
        dz, _ = activation_gradient(
            last_gradient(ds, mlp), found.z[LAYERS - 1], events.real, mlp, LAYERS - 1, ACTIVATION,
            OPTIONS,
        )  # fmt: skip
        if LAYERS == 2:
            dz, _ = activation_gradient(
                second_gradient(dz, mlp, dtype, OPTIONS), found.z[0], events.real, mlp, 0,
                ACTIVATION, OPTIONS,
            )  # fmt: skip
        db = plus(db, dz)
        dk += product_gradient(dz, mlp, dtype, OPTIONS) * q.to(tl.float32)[None, :]
    first = kv_start + start
    rows = tl.arange(0, OPTIONS.block)
    _store_rows(dk_ptr + first * OPTIONS.width, dk, rows < kv_len - start, OPTIONS.width)
    if not OPTIONS.same:
        _store_rows(dv_ptr + first * OPTIONS.v_width, dv, rows < kv_len - start, OPTIONS.v_width)
    store_tile_pieces(
        db_ptr + first * OPTIONS.hidden[0], db, kv_len - start, OPTIONS.block, 0, OPTIONS
    )


@triton.jit
def _store_rows(ptr, x, real, WIDTH: tl.constexpr):
    rows, columns = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    ptrs = ptr + rows[:, None] * WIDTH + columns[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=real[:, None] & (columns < WIDTH)[None, :])
