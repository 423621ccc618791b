"""Backward of DIN's attention for Hopper, where v is k: gradients of rows of q and of the MLP.

    ds = do · k,  dz2 = act'(z2) ∘ (ds w),  dz1 = act'(z1) ∘ (dz2 W2)
    S = Kᵀ dz1 of a row of q:  dBᵀ = Σ S,  dDᵀ = Σ S ∘ q,  dq = Σ_units S ∘ Dᵀ,  da = Σ dz1
    dW2 = Σ dz2ᵀ h1,  dw = Σ ds h2

With softmax, ds is p (do · k - delta) with p = exp(s - lse). z and h as in hopper_forward.py.

Warps           no specialisation: four warps compute one row of q after another; two thread blocks
                an SM
Tiles           those of hopper_forward.py
MMAs            z1, do · k: k from shared memory. z2, dz2 W2: from registers. S: kᵀ, dW2: dz2ᵀ, both
                operands from shared memory; their sums stay in registers, S for a row of q
Barriers        as hopper_forward.py; a stage of k is filled again once S of its tile is done
Shared memory   in KiB, and less than 3 for vectors and barriers, at hidden (80, 40):
                E =  64:  88 = k 4 x 8 + M 10 + W2 8 + h1 2 x 10 + dz2 8 + dz1 10 + do 1

Order of a tile (`_tile`): h1; start z2; wait for it and for the sums of the tile before; dz2; start
dz2 W2 and z1 of the next tile; wait for the former; dz1; start the sums, which run during h1 of the
next tile; wait for its z1.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..attention.mask import is_visible, masked_block, visible_columns
from ..common.gluon_api import load_tile, thread_barrier
from ..common.loads import load_segment
from ..common.pipeline import (
    make_barriers,
    mma_abt,
    halves,
    mma_layout,
    to_mma_operand,
    vector_layout,
    zero_rows,
)
from ..common.ptxas import safe_ptxas
from ..common.activations import NAN
from .hopper_forward import (
    BLOCK,
    COPIES,
    STAGES,
    WORDS,
    _find_seen,
    _find_share,
    _find_user,
    _load_events,
    _load_missing,
    _load_pieces,
    _make_matrix,
    _make_second,
    _make_vectors,
    _of_columns,
    _plus,
    _prelu,
    _relu16,
    _split,
    _start_second,
    _store_vectors,
    _wait,
)
from .mlp import Unit, has_table, packed_fma
from .queries import load_queries
from .walk import AHEAD, end_of, find_tile, find_tile_ahead, num_missing, without_tile


class Buffers(NamedTuple):
    """Shared memory. k, full, first, second, a, bias, weight: as hopper_forward.py's. tables: of
    each layer, the pieces of its rows. do `[8, E]`: the row's, and rows of 0. h: pieces
    `[2, 64, n]` of h1, dz2 `[64, 64]`, and pieces of dz1 `[64, n]`."""

    k: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    first: gl.tuple
    second: gl.tuple
    a: gl.tuple
    bias: gl.tuple
    weight: gl.tuple
    tables: gl.tuple
    do: gl.tuple
    dz: gl.tuple
    h: gl.tuple
    total: gl.tuple


class Row(NamedTuple):
    """lse and delta of a row of q, and b3."""

    lse: gl.tensor
    delta: gl.tensor
    last_bias: gl.tensor


class Sums(NamedTuple):
    """Of a row of q pieces of S `[E, n]` and of da: products, first. Or (MLP) of a program pieces
    of dW2 `[64, n]`, of db2 and dw, and db3: products, first, last, last_bias. tables: sums of the
    first layer's table, or (MLP) of the second's. Sums of vectors are `_partial`."""

    products: gl.tuple
    first: gl.tuple
    last: gl.tuple
    last_bias: gl.tensor
    tables: gl.tuple


@gluon.jit
def _partial(x):
    """Sums over the rows of x [64, n] that an MMA leaves to one thread: [4, 8, n]."""
    return gl.sum(x.reshape([4, 2, 8, x.shape[1]]), 1)


@gluon.jit
def _zeros(ROWS: gl.constexpr, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """An MMA's result [ROWS, n] for each piece of a layer."""
    found = ()
    for i in gl.static_range(len(OPTIONS.pieces[LAYER])):
        found = found + (_zero_piece(ROWS, OPTIONS.pieces[LAYER][i][1]),)
    return found


@gluon.jit
def _zero_piece(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, mma_layout(BLOCK, COLUMNS))


@gluon.jit
def _zero_vectors(LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """A `_partial` sum for each piece of a layer."""
    found, zeros = (), _zeros(BLOCK, LAYER, OPTIONS)
    for i in gl.static_range(len(zeros)):
        found = found + (_partial(zeros[i]),)
    return found


@gluon.jit
def _activate(z, buffers, LAYER: gl.constexpr, i: gl.constexpr, ACTIVATION, OPTIONS: gl.constexpr):
    """h of a piece, and what `_through` needs of it."""
    if OPTIONS.units == "relu":
        rounded = _relu16(z)
        return rounded if LAYER == 0 else gl.maximum(z, 0.0, propagate_nan=NAN), rounded
    elif OPTIONS.units == "prelu":
        return _prelu(z, z, _of_columns(buffers.tables[LAYER][0][i], z)), z
    elif OPTIONS.units == "dice":
        unit = _unit(buffers, LAYER, i, z)
        p = ACTIVATION(z * unit.half + unit.shift, 2.0)[0]
        return z * (unit.slope + unit.rest * p), z
    else:
        h, slope = ACTIVATION(z, 1.0)
        return h * OPTIONS.factors[0], slope * OPTIONS.factors[1]


@gluon.jit
def _unit(buffers, LAYER: gl.constexpr, i: gl.constexpr, z):
    """The Unit of a piece of a layer with Dice, as rows beside z."""
    rows = ()
    for row in gl.static_range(len(buffers.tables[LAYER])):
        rows = rows + (_of_columns(buffers.tables[LAYER][row][i], z),)
    return Unit(*rows)


@gluon.jit
def _where_positive(h, dh):
    """dh where h, in bf16, is positive, otherwise 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .b32 z; mov.b32 z, 0; setp.gt.bf16x2 p|q, $2, z;"
        " selp.f32 $0, $3, 0f00000000, p; selp.f32 $1, $4, 0f00000000, q; }",
        "=&f,=&f,r,f,f", [h, dh], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _through(
    dh, kept, real, buffers, LAYER: gl.constexpr, i: gl.constexpr, ACTIVATION,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """dz of a piece of a layer, and what `activation_gradient` sums for its table, if it has one.
    real: which rows are seen."""
    if OPTIONS.units == "relu":
        return _where_positive(kept, dh), ()
    elif OPTIONS.units == "prelu":
        slope = _of_columns(buffers.tables[LAYER][0][i], dh)
        return _prelu(kept, dh, slope), (_partial(dh * gl.minimum(kept, 0.0)),)
    elif OPTIONS.units == "dice":
        unit, z = _unit(buffers, LAYER, i, kept), kept
        p = ACTIVATION(z * unit.half + unit.shift, 2.0)[0]
        left = z - z * p
        bend = left * p  # z p (1 - p)
        dz = dh * (unit.slope + unit.rest * p + unit.curve * bend) + (unit.d0 + unit.d1 * z)
        g = dh * bend
        sums = _partial(dh * left), _partial(g), _partial(g * (z - unit.mean))
        return gl.where(_beside(real, z), dz, 0.0), sums
    else:
        return dh * kept, ()


@gluon.constexpr_function
def joins(pieces):
    """Whether the last piece of a first layer and do share an MMA: one of a few columns takes as
    long as one of 32."""
    return pieces[len(pieces) - 1][1] <= 32


@gluon.constexpr_function
def first_rows(pieces, i):
    """Rows of a piece of M in shared memory, with those of do, which follow."""
    return pieces[i][1] * (2 if i == len(pieces) - 1 and joins(pieces) else 1)


@gluon.jit
def _make_m(SLOTS: gl.constexpr, DTYPE: gl.constexpr, WIDTH: gl.constexpr, OPTIONS: gl.constexpr):
    """Shared memory for pieces of M and do of as many rows of q as there are SLOTS."""
    first, do = (), ()
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        first = first + (_make_slots(SLOTS, DTYPE, first_rows(OPTIONS.pieces[0], i), WIDTH),)
    if not joins(OPTIONS.pieces[0]):
        do = (_make_slots(SLOTS, DTYPE, 16, WIDTH),)
    return first, do


@gluon.jit
def _make_slots(SLOTS: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, WIDTH], SHARED)


@gluon.jit
def _slot(buffers, slot):
    """A slot of each of the buffers."""
    found = ()
    for i in gl.static_range(len(buffers)):
        found = found + (buffers[i].index(slot),)
    return found


@gluon.jit
def _store_m(first, q_ptr, of_k_ptr, products_ptr, OPTIONS: gl.constexpr):
    """Store M of a row of q."""
    WIDTH: gl.constexpr = first[0].shape[1]
    L: gl.constexpr = vector_layout(WIDTH)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    inside = column < OPTIONS.width
    q = gl.load(q_ptr + column, mask=inside, other=0.0)
    for i in gl.static_range(len(first)):
        rows = OPTIONS.pieces[0][i][0] + gl.arange(
            0, OPTIONS.pieces[0][i][1], layout=gl.SliceLayout(1, L)
        )
        mask = (rows < OPTIONS.hidden[0])[:, None] & inside[None, :]
        offsets = rows[:, None] * OPTIONS.width + column[None, :]
        of_k = gl.load(of_k_ptr + offsets, mask=mask, other=0.0)
        products = gl.load(products_ptr + offsets, mask=mask, other=0.0)
        _piece(first, i, OPTIONS).store(packed_fma(products, q[None, :], of_k))


@gluon.jit
def _do_rows(first, do, OPTIONS: gl.constexpr):
    """The rows of shared memory whose first one is do, the others 0: 16, or as many as the last
    piece of M has."""
    LAST: gl.constexpr = len(OPTIONS.pieces[0]) - 1
    if joins(OPTIONS.pieces[0]):
        return first[LAST].slice(OPTIONS.pieces[0][LAST][1], OPTIONS.pieces[0][LAST][1], 0)
    else:
        return do[0]


@gluon.jit
def _piece(first, i: gl.constexpr, OPTIONS: gl.constexpr):
    """A piece of M `[n, E]`, of shared memory that may have do too."""
    return first[i].slice(0, OPTIONS.pieces[0][i][1], 0)


@gluon.jit
def _start_scores(k, first, do, OPTIONS: gl.constexpr):
    """Start z1 and do · k of a tile of events, [64, 8], whose first column it is: one MMA for each
    piece of M, the last one with do, or one more for do."""
    found = ()
    for i in gl.static_range(len(first)):
        found = found + (mma_abt(k, first[i]),)
    if not joins(OPTIONS.pieces[0]):
        found = found + (mma_abt(k, do[0].slice(0, COPIES, 0)),)
    return found


@gluon.jit
def _split_scores(started, OPTIONS: gl.constexpr):
    """The pieces of z1, and do · k in the first of some columns, the others 0, of what
    `_start_scores` has started. All columns are wanted, and stay together up to here: ptxas would
    wait for each MMA if a loop carried a part of its result."""
    if not joins(OPTIONS.pieces[0]):
        return started
    else:
        LAST: gl.constexpr = len(OPTIONS.pieces[0]) - 1
        return started[:LAST] + halves(started[LAST])


@gluon.jit
def _start_tile(buffers, step, num_rows, OPTIONS: gl.constexpr):
    """_start_scores of a tile with num_rows events of the segment, once it is loaded."""
    stage = step % STAGES
    mbarrier.wait(buffers.full.index(stage), step // STAGES & 1)
    if num_rows < BLOCK:
        zero_rows(buffers.k.index(stage), num_rows, 0, 1)
    return _start_scores(buffers.k.index(stage), buffers.first, buffers.do, OPTIONS)


@gluon.jit
def _score_gradient(dots, h2, row, real, buffers, OPTIONS: gl.constexpr):
    """ds [64]. dots: do · k."""
    L: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK, COPIES))
    ds = gl.convert_layout(gl.sum(dots, 1), L, assert_trivial=True)
    if OPTIONS.softmax:
        s = gl.zeros([BLOCK], gl.float32, L) + row.last_bias
        for j in gl.static_range(len(h2)):
            part = gl.sum(h2[j] * _of_columns(buffers.weight[j], h2[j]), 1)
            s += gl.convert_layout(part, L, assert_trivial=True)
        ds = gl.exp(s - row.lse) * (ds - row.delta)
    return gl.where(real, ds, 0.0)


@gluon.jit
def _beside(vector, x):
    """A vector [64] as a column [64, 1] beside an MMA's result."""
    L: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.convert_layout(vector, L, assert_trivial=True)[:, None]


@gluon.jit
def _join(acc, parts):
    """The sums of two tuples of sums of a table."""
    out = ()
    for i in gl.static_range(len(acc)):
        of_piece = ()
        for j in gl.static_range(len(acc[i])):
            of_piece = of_piece + (acc[i][j] + parts[i][j],)
        out = out + (of_piece,)
    return out


@gluon.jit
def _start_back(dz2, second, OPTIONS: gl.constexpr):
    """Start dz2 W2 of a piece of the first layer, and its operands in registers."""
    N: gl.constexpr = second.shape[1]
    part, operands = _zero_piece(BLOCK, N), ()
    for j in gl.static_range(len(dz2)):
        operands = operands + (to_mma_operand(dz2[j], second.dtype, N),)
        units = second.slice(OPTIONS.pieces[1][j][0], OPTIONS.pieces[1][j][1], 0)
        part = warpgroup_mma(operands[j], units, part, use_acc=j > 0, is_async=True)
    return part, operands


@gluon.jit
def _tile(
    started, sums, k_desc, buffers, row, seen, next_seen, step,
    NEXT: gl.constexpr, MLP: gl.constexpr, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """What `_start_tile` starts for the next tile, if there is one (NEXT), and the sums with this
    tile's, the first one of `seen`. The sums' MMAs may be under way."""
    DTYPE: gl.constexpr = k_desc.dtype
    FIRST: gl.constexpr = len(OPTIONS.pieces[0])
    SECOND: gl.constexpr = len(OPTIONS.pieces[1])
    L: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK, COPIES))
    real = gl.arange(0, BLOCK, layout=L) < find_tile(seen, 0)[1]
    started = _split_scores(started, OPTIONS)
    h1, kept1 = (), ()
    for i in gl.static_range(FIRST):
        h, kept = _activate(_plus(started[i], buffers.a[i]), buffers, 0, i, ACTIVATION, OPTIONS)
        h1, kept1 = h1 + (h.to(DTYPE),), kept1 + (kept,)
    z2, operands = _start_second(h1, buffers.second, 0, buffers.second[0].shape[0])
    done = warpgroup_mma_wait(0, deps=(z2,) + operands + sums.products)
    z2, products = _split(done[0], OPTIONS), done[len(done) - FIRST :]
    dots, started = started[FIRST], ()
    h2, kept2 = (), ()
    for j in gl.static_range(SECOND):
        h, kept = _activate(_plus(z2[j], buffers.bias[j]), buffers, 1, j, ACTIVATION, OPTIONS)
        h2, kept2 = h2 + (h,), kept2 + (kept,)
    ds = _score_gradient(dots, h2, row, real, buffers, OPTIONS)
    thread_barrier()  # all warps have waited for the sums' MMAs, which read what follows
    dz, of_tables, first_sums, last_sums = (), (), (), ()
    for j in gl.static_range(SECOND):
        column = _beside(ds, h2[j])
        piece, more = _through(
            column * _of_columns(buffers.weight[j], h2[j]), kept2[j], real, buffers, 1, j,
            ACTIVATION, OPTIONS,
        )  # fmt: skip
        dz, of_tables = dz + (piece.to(DTYPE),), of_tables + (more,)
        if MLP:
            first_sums = first_sums + (sums.first[j] + _partial(piece),)
            last_sums = last_sums + (sums.last[j] + _partial(h2[j] * column),)
            units = buffers.dz[0].slice(OPTIONS.pieces[1][j][0], OPTIONS.pieces[1][j][1], 1)
            units.store(dz[j])
    if MLP:
        for i in gl.static_range(FIRST):
            buffers.h[i].store(h1[i])
    else:
        dh, used = (), ()
        for i in gl.static_range(FIRST):
            part, operands = _start_back(dz, buffers.second[i], OPTIONS)
            dh, used = dh + (part,), used + operands
        dh, of_tables = warpgroup_mma_wait(0, deps=dh + used), ()
        for i in gl.static_range(FIRST):
            piece, more = _through(dh[i], kept1[i], real, buffers, 0, i, ACTIVATION, OPTIONS)
            first_sums, of_tables = first_sums + (sums.first[i] + _partial(piece),), of_tables + (more,)
            buffers.dz[i].store(piece.to(DTYPE))
    fence_async_shared()
    thread_barrier()
    if NEXT:
        started = _start_tile(buffers, step + 1, find_tile(seen, BLOCK)[1], OPTIONS)
    new_products = ()
    for i in gl.static_range(FIRST):
        if MLP:
            left, right = buffers.dz[0], buffers.h[i]
        else:
            left, right = buffers.k.index(step % STAGES), buffers.dz[i]
        new_products = new_products + (
            warpgroup_mma(left.permute((1, 0)), right, products[i], is_async=True),
        )
    # the stage of the tile before, whose sums all warps have waited for
    ahead_row, ahead, wanted = find_tile_ahead(seen, next_seen, step, BLOCK)
    _load_events(k_desc, buffers, ahead_row, ahead, wanted)
    tables = sums.tables
    if len(tables) > 0:
        tables = _join(tables, of_tables)
    if NEXT:
        started = _wait(started, FIRST)
    else:
        new_products = warpgroup_mma_wait(0, deps=new_products)
        if FIRST == 1:
            new_products = (new_products,)
    return started, Sums(new_products, first_sums, last_sums, sums.last_bias + ds, tables)


@gluon.jit
def _store_do(buffer, ptr, OPTIONS: gl.constexpr):
    """Store do of a row of q in the first row of a buffer, and 0 in the others."""
    L: gl.constexpr = vector_layout(buffer.shape[1])
    column = gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, L))[None, :]
    copy = gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, L))[:, None]
    inside = (column < OPTIONS.width) & (copy == 0)
    buffer.store(gl.load(ptr + column + 0 * copy, mask=inside, other=0.0))


@gluon.jit
def _load_row(operands, strides, weights, gradients, buffers, last_bias, row, OPTIONS: gl.constexpr):
    """Store M, a and do of a row of q in shared memory. Its Row."""
    WIDTH: gl.constexpr = buffers.k.shape[2]
    q_ptr = operands.q + row * (strides[0] * OPTIONS.align)
    _store_m(buffers.first, q_ptr, operands.of_k, weights[0], OPTIONS)
    a_ptr = operands.a + row * (strides[2] * OPTIONS.align)
    _store_vectors(buffers.a, _load_pieces(a_ptr, 0, OPTIONS))
    _store_do(_do_rows(buffers.first, buffers.do, OPTIONS), gradients[0] + row * OPTIONS.width, OPTIONS)
    lse, delta = 0.0, 0.0
    if OPTIONS.softmax:
        lse, delta = gl.load(gradients[1] + row), gl.load(gradients[2] + row)
    return Row(lse, delta, last_bias)


@gluon.jit
def _places(x, FIRST: gl.constexpr):
    """Rows [m, 1] and columns [1, n] of x, these from FIRST on."""
    L: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    columns = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))
    return rows[:, None], columns[None, :]


@gluon.jit
def _make_total(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros `[2, ROWS, COLUMNS]` in shared memory, of which a warp reads and writes 8 rows of 32
    bytes at once."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, COLUMNS // 8), [1, 0])
    total = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLUMNS], SHARED)
    for i in gl.static_range(2):
        total.index(i).store(_zero_piece(ROWS, COLUMNS))
    return total


@gluon.jit
def _finish_row(sums, buffers, operands, strides, weights, gradients, row, OPTIONS: gl.constexpr):
    """Store dq and da of a row, and add S to the program's dDᵀ and dBᵀ."""
    WIDTH: gl.constexpr = sums.products[0].shape[0]
    L: gl.constexpr = mma_layout(BLOCK, COPIES)
    dq = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(1, L))
    for i in gl.static_range(len(sums.products)):
        products = sums.products[i]
        e, unit = _places(products, OPTIONS.pieces[0][i][0])
        mask = (e < OPTIONS.width) & (unit < OPTIONS.hidden[0])
        weight = gl.load(weights[0] + unit * OPTIONS.width + e, mask=mask, other=0.0)
        part = gl.sum(products * weight.to(gl.float32), 1)
        dq += gl.convert_layout(part, gl.SliceLayout(1, L), assert_trivial=True)
        q_ptr = operands.q + row * (strides[0] * OPTIONS.align)
        q = gl.load(q_ptr + e, mask=e < OPTIONS.width, other=0.0).to(gl.float32)
        for j in gl.static_range(2):
            total = buffers.total[i].index(j)
            more = products * q if j == 0 else products
            total.store(total.load(products.type.layout) + more)
    e = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, L))
    dq_ptr = gradients[3] + row * OPTIONS.width
    gl.store(dq_ptr + e, dq.to(dq_ptr.dtype.element_ty), mask=e < OPTIONS.width)
    _store_totals(gradients[4] + row * OPTIONS.hidden[0], sums.first, 0, OPTIONS)


@gluon.jit
def _store_totals(ptr, sums, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """Store the totals of `_partial` sums of each piece of a layer."""
    for i in gl.static_range(len(sums)):
        total = gl.sum(gl.sum(sums[i], 1), 0)
        unit = OPTIONS.pieces[LAYER][i][0] + gl.arange(
            0, OPTIONS.pieces[LAYER][i][1], layout=total.type.layout
        )
        gl.store(ptr + unit, total.to(ptr.dtype.element_ty), mask=unit < OPTIONS.hidden[LAYER])


@gluon.jit
def _zero_table(LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """Sums of a layer's table, for each piece."""
    found, zeros = (), _zero_vectors(LAYER, OPTIONS)
    for i in gl.static_range(len(zeros)):
        if OPTIONS.units == "dice":
            found = found + ((zeros[i], zeros[i], zeros[i]),)
        else:
            found = found + ((zeros[i],),)
    return found


@gluon.jit
def _make_table(ptr, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """The rows of a layer's table in shared memory: the slopes, with Dice those of a Unit."""
    vectors = ()
    for row in gl.static_range(9 if OPTIONS.units == "dice" else 1):
        pieces = _make_vectors(LAYER, OPTIONS)
        _store_vectors(pieces, _load_pieces(ptr + row * OPTIONS.hidden[LAYER], LAYER, OPTIONS))
        vectors = vectors + (pieces,)
    return vectors


@safe_ptxas
@gluon.jit(do_not_specialize=["num_segments"])
def din_bwd_rows_hopper_kernel(
    k_desc, operands, strides, weights, biases, tables, gradients, users, costs_ptr,
    num_segments, MLP: gl.constexpr, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Each program has a share of the rows of q. costs: of din_costs_kernel.

    gradients: do, lse, delta, then dq, da, and the program's parts of dDᵀ and dBᵀ
    `[2, E, H1]`, and of the sums `[3, H1]` of the first table. MLP: then its part of dW2ᵀ
    `[H1, H2]`, dw, db2 and db3 in this order, and of the sums `[3, H2]` of the second table.
    """
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    DTYPE: gl.constexpr = k_desc.dtype
    ROWS: gl.constexpr = BLOCK if MLP else WIDTH  # of products
    LAYER: gl.constexpr = 1 if MLP else 0  # of first and tables
    of_units, of_tables = (), ()
    if has_table(OPTIONS.units):
        of_units = _make_table(tables[0], 0, OPTIONS), _make_table(tables[1], 1, OPTIONS)
        of_tables = _zero_table(LAYER, OPTIONS)
    dz, h, last, total = (), (), (), ()
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        piece = _make_matrix(DTYPE, BLOCK, OPTIONS.pieces[0][i][1])
        if MLP:
            h = h + (piece,)
        else:
            dz = dz + (piece,)
            total = total + (_make_total(WIDTH, OPTIONS.pieces[0][i][1]),)
    if MLP:
        dz, last = (_make_matrix(DTYPE, BLOCK, BLOCK),), _zero_vectors(1, OPTIONS)
        dz[0].store(gl.zeros([BLOCK, BLOCK], DTYPE, mma_layout(BLOCK, BLOCK)))
    first, do = _make_m(1, DTYPE, WIDTH, OPTIONS)
    buffers = Buffers(
        gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, WIDTH], k_desc.layout),
        make_barriers(STAGES, 1),
        _slot(first, 0),
        _make_second(weights[1], OPTIONS),
        _make_vectors(0, OPTIONS),
        _make_vectors(1, OPTIONS),
        _make_vectors(1, OPTIONS),
        of_units,
        _slot(do, 0),
        dz,
        h,
        total,
    )
    _store_vectors(buffers.bias, _load_pieces(biases[0], 1, OPTIONS))
    _store_vectors(buffers.weight, _load_pieces(weights[2], 1, OPTIONS))
    last_bias = gl.load(biases[1]).to(gl.float32)
    sums = Sums(
        _zeros(ROWS, 0, OPTIONS), _zero_vectors(LAYER, OPTIONS), last,
        gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, mma_layout(BLOCK, COPIES))), of_tables,
    )  # fmt: skip
    step, missing = 0, AHEAD
    first_of_q, end, user = _find_share(costs_ptr, users, num_segments)
    next_seen, user = _find_seen(first_of_q, end, user, num_segments, users, OPTIONS)
    for row in range(first_of_q, end):
        seen = next_seen
        _load_missing(k_desc, buffers, seen, step, missing)
        next_seen, user = _find_seen(row + 1, end, user, num_segments, users, OPTIONS)
        missing = num_missing(seen, BLOCK)
        if not MLP:
            sums = Sums(
                _zeros(ROWS, 0, OPTIONS), _zero_vectors(0, OPTIONS), (), sums.last_bias, sums.tables
            )
        if end_of(seen) > 0:
            of_row = _load_row(
                operands, strides, weights, gradients, buffers, last_bias, row, OPTIONS
            )
            fence_async_shared()
            thread_barrier()
            started = _start_tile(buffers, step, find_tile(seen, 0)[1], OPTIONS)
            started = _wait(started, 0)
            while end_of(seen) > BLOCK:
                started, sums = _tile(
                    started, sums, k_desc, buffers, of_row, seen, next_seen, step,
                    True, MLP, ACTIVATION, OPTIONS,
                )  # fmt: skip
                seen = without_tile(seen, BLOCK)
                step += 1
            nothing, sums = _tile(
                started, sums, k_desc, buffers, of_row, seen, next_seen, step,
                False, MLP, ACTIVATION, OPTIONS,
            )  # fmt: skip
            step += 1
            thread_barrier()  # every warp has read what the next row writes
        if not MLP:
            _finish_row(sums, buffers, operands, strides, weights, gradients, row, OPTIONS)
    if MLP:
        _store_parts(sums, gradients, OPTIONS)
        if has_table(OPTIONS.units):
            _store_table(gradients[4], sums.tables, tables[1], 1, OPTIONS)
    else:
        _store_totals_of_first(buffers, gradients[5], WIDTH, OPTIONS)
    if not MLP and has_table(OPTIONS.units):
        _store_table(gradients[6], sums.tables, tables[0], 0, OPTIONS)


@gluon.jit
def _store_totals_of_first(buffers, ptr, WIDTH: gl.constexpr, OPTIONS: gl.constexpr):
    """Store the program's parts of dDᵀ and dBᵀ."""
    SIZE: gl.constexpr = OPTIONS.width * OPTIONS.hidden[0]
    ptr += gl.program_id(0).to(gl.int64) * (2 * SIZE)
    for i in gl.static_range(len(buffers.total)):
        for j in gl.static_range(2):
            buffer = buffers.total[i].index(j)
            total = buffer.load(mma_layout(BLOCK, OPTIONS.pieces[0][i][1]))
            e, unit = _places(total, OPTIONS.pieces[0][i][0])
            mask = (e < OPTIONS.width) & (unit < OPTIONS.hidden[0])
            gl.store(ptr + j * SIZE + e * OPTIONS.hidden[0] + unit, total, mask=mask)


@gluon.jit
def _store_parts(sums, gradients, OPTIONS: gl.constexpr):
    """Store the program's parts of dW2ᵀ, dw, db2 and db3."""
    UNITS: gl.constexpr = OPTIONS.hidden[1]
    SIZE: gl.constexpr = OPTIONS.hidden[0] * UNITS
    parts_ptr = gradients[3] + gl.program_id(0) * (SIZE + 2 * UNITS + 1)
    for i in gl.static_range(len(sums.products)):
        unit, first = _places(sums.products[i], OPTIONS.pieces[0][i][0])
        mask = (unit < UNITS) & (first < OPTIONS.hidden[0])
        gl.store(parts_ptr + first * UNITS + unit, sums.products[i], mask=mask)
    _store_totals(parts_ptr + SIZE, sums.last, 1, OPTIONS)
    _store_totals(parts_ptr + SIZE + UNITS, sums.first, 1, OPTIONS)
    gl.store(parts_ptr + SIZE + 2 * UNITS, gl.sum(sums.last_bias, 0))


@gluon.jit
def _store_table(ptr, sums, table, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """Store the program's part `[3, H]` of a table's sums, with the factors that they lack."""
    UNITS: gl.constexpr = OPTIONS.hidden[LAYER]
    ptr += gl.program_id(0) * (3 * UNITS)
    for i in gl.static_range(len(sums)):
        for row in gl.static_range(len(sums[i])):
            total = gl.sum(gl.sum(sums[i][row], 1), 0)
            unit = OPTIONS.pieces[LAYER][i][0] + gl.arange(
                0, OPTIONS.pieces[LAYER][i][1], layout=total.type.layout
            )
            inside = unit < UNITS
            if row > 0:  # with Dice, of which table has the rows of a Unit: rest
                total *= gl.load(table + UNITS + unit, mask=inside, other=0.0)
            if row == 2:  # rstd
                total *= gl.load(table + 3 * UNITS + unit, mask=inside, other=0.0)
            gl.store(ptr + row * UNITS + unit, total, mask=inside)


# -- gradients of events ---------------------------------------------------------------------------


class Events(NamedTuple):
    """Shared memory of a tile of events: k `[64, E]`, pieces of B and D `[n, E]`, of M `[2, n, E]` and of a, do
    `[2, 16, E]` in the first of 16 rows, of two rows of q. second, bias, weight, tables: as
    Buffers'."""

    k: gl.shared_memory_descriptor
    first: gl.tuple
    a: gl.tuple
    do: gl.tuple
    second: gl.tuple
    bias: gl.tuple
    weight: gl.tuple
    tables: gl.tuple


@gluon.jit
def _store_row(
    operands, strides, weights, gradients, events, slot, row, OPTIONS: gl.constexpr
):
    """Store M, a and do of a row of q in its slot of shared memory. Its lse and delta."""
    q_ptr = operands.q + row * (strides[0] * OPTIONS.align)
    a = _load_pieces(operands.a + row * (strides[2] * OPTIONS.align), 0, OPTIONS)
    first = _slot(events.first, slot)
    _store_m(first, q_ptr, operands.of_k, weights[0], OPTIONS)
    for i in gl.static_range(len(a)):
        events.a[i].index(slot).store(a[i])
    do = _do_rows(first, _slot(events.do, slot), OPTIONS)
    _store_do(do, gradients[0] + row * OPTIONS.width, OPTIONS)
    lse, delta = 0.0, 0.0
    if OPTIONS.softmax:
        lse, delta = gl.load(gradients[1] + row), gl.load(gradients[2] + row)
    return lse, delta


@gluon.jit
def _start_row(events, slot, OPTIONS: gl.constexpr):
    """_start_scores for a row of q."""
    first, do = _slot(events.first, slot), _slot(events.do, slot)
    return _start_scores(events.k, first, do, OPTIONS)


@gluon.jit
def _make_events(
    operands, weights, tables, DTYPE: gl.constexpr, WIDTH: gl.constexpr, OPTIONS: gl.constexpr
):
    a = ()
    first, do = _make_m(2, DTYPE, WIDTH, OPTIONS)
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        a = a + (gl.allocate_shared_memory(gl.float32, [2, OPTIONS.pieces[0][i][1]], WORDS),)
    of_units = ()
    if has_table(OPTIONS.units):
        of_units = _make_table(tables[0], 0, OPTIONS), _make_table(tables[1], 1, OPTIONS)
    return Events(
        _make_matrix(DTYPE, BLOCK, WIDTH),
        first, a, do,
        _make_second(weights[1], OPTIONS), _make_vectors(1, OPTIONS), _make_vectors(1, OPTIONS),
        of_units,
    )  # fmt: skip


@gluon.jit
def _sees(start, number, queries, q_len, kv_len, OPTIONS: gl.constexpr):
    """Which events of the tile from `start` on a user's row of q sees."""
    MASK: gl.constexpr = OPTIONS.mask
    L: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK, COPIES))
    event = start + gl.arange(0, BLOCK, layout=L)
    real = event < kv_len
    if MASK is not None:
        column = number + kv_len - q_len
        bounds = visible_columns(column, queries.first_target, MASK)
        real = real & is_visible(event, column, bounds, MASK)
    return real


@safe_ptxas
@gluon.jit(do_not_specialize=["num_segments"])
def din_bwd_events_hopper_kernel(
    k_desc, operands, strides, weights, biases, tables, gradients, users,
    num_segments, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """dk of a tile of events of one user: sums over the user's rows of q, in whose order MMAs add
    to it. gradients: do, lse, delta, dk."""
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    DTYPE: gl.constexpr = k_desc.dtype
    FIRST: gl.constexpr = len(OPTIONS.pieces[0])
    index = gl.program_id(0)
    user = _find_user(index, users.kv_offsets, num_segments, 6)
    kv_start, kv_len = load_segment(users.kv_offsets, user)
    start = ((index - (kv_start >> 6) - user) << 6).to(gl.int32)
    if start >= kv_len:
        return
    q_start, q_len = load_segment(users.q_offsets, user)
    queries = load_queries(user, users, start, q_len, kv_len, OPTIONS)
    events = _make_events(operands, weights, tables, DTYPE, WIDTH, OPTIONS)
    loaded = make_barriers(1, 1)
    mbarrier.expect(loaded.index(0), k_desc.block_type.nbytes)
    first_event = (kv_start + start).to(gl.int32)
    load_tile(k_desc, [first_event, 0], loaded.index(0), events.k)
    _store_vectors(events.bias, _load_pieces(biases[0], 1, OPTIONS))
    _store_vectors(events.weight, _load_pieces(weights[2], 1, OPTIONS))
    last_bias = gl.load(biases[1]).to(gl.float32)
    dk = _zero_piece(BLOCK, WIDTH)
    if queries.count > 0:
        number = _row_number(0, queries, OPTIONS)
        row = q_start + number
        lse, delta = _store_row(
            operands, strides, weights, gradients, events, 0, row, OPTIONS
        )
        mbarrier.wait(loaded.index(0), 0)
        if kv_len - start < BLOCK:
            zero_rows(events.k, kv_len - start, 0, 1)
        fence_async_shared()
        thread_barrier()
        started = _wait(_start_row(events, 0, OPTIONS), 0)
        acc = warpgroup_mma_init(dk)
        for i in range(0, queries.count - 1):
            next_number = _row_number(i + 1, queries, OPTIONS)
            real = _sees(start, number, queries, q_len, kv_len, OPTIONS)
            started, acc, lse, delta = _row(
                started, acc, Row(lse, delta, last_bias), real, i & 1, events, operands,
                strides, weights, gradients, q_start + next_number, True, ACTIVATION, OPTIONS,
            )  # fmt: skip
            number = next_number
        real = _sees(start, number, queries, q_len, kv_len, OPTIONS)
        nothing, dk, lse, delta = _row(
            started, acc, Row(lse, delta, last_bias), real, (queries.count - 1) & 1, events,
            operands, strides, weights, gradients, row, False, ACTIVATION, OPTIONS,
        )  # fmt: skip
    event, column = _places(dk, 0)
    ptrs = gradients[3] + (kv_start + start + event) * OPTIONS.width + column
    mask = (event < kv_len - start) & (column < OPTIONS.width)
    gl.store(ptrs, dk.to(DTYPE), mask=mask)


@gluon.jit
def _row_number(i, queries, OPTIONS: gl.constexpr):
    """The user's row of q of a round of a loop over its Queries."""
    if OPTIONS.mask is None:
        return i
    else:
        return masked_block(i, queries.rows)


@gluon.jit
def _row(
    started, dk, row, real, slot, events, operands, strides, weights, gradients, next_row,
    NEXT: gl.constexpr, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """What `_start_row` starts for the next row of q, if there is one (NEXT), dk with this row's,
    whose MMAs may be under way, and lse and delta of the next row."""
    DTYPE: gl.constexpr = events.k.dtype
    WIDTH: gl.constexpr = events.k.shape[1]
    FIRST: gl.constexpr = len(OPTIONS.pieces[0])
    SECOND: gl.constexpr = len(OPTIONS.pieces[1])
    started = _split_scores(started, OPTIONS)
    h1, kept1 = (), ()
    for i in gl.static_range(FIRST):
        h, kept = _activate(
            _plus(started[i], events.a[i].index(slot)), events, 0, i, ACTIVATION, OPTIONS
        )
        h1, kept1 = h1 + (h.to(DTYPE),), kept1 + (kept,)
    z2, operands2 = _start_second(h1, events.second, 0, events.second[0].shape[0])
    done = warpgroup_mma_wait(0, deps=(z2,) + operands2 + (dk,))
    z2, dk = _split(done[0], OPTIONS), done[len(done) - 1]
    h2, kept2 = (), ()
    for j in gl.static_range(SECOND):
        h, kept = _activate(_plus(z2[j], events.bias[j]), events, 1, j, ACTIVATION, OPTIONS)
        h2, kept2 = h2 + (h,), kept2 + (kept,)
    L: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK, COPIES))
    p = gl.zeros([BLOCK], gl.float32, L) + row.last_bias
    for j in gl.static_range(SECOND):
        part = gl.sum(h2[j] * _of_columns(events.weight[j], h2[j]), 1)
        p += gl.convert_layout(part, L, assert_trivial=True)
    ds = gl.convert_layout(gl.sum(started[FIRST], 1), L, assert_trivial=True)
    if OPTIONS.softmax:
        p = gl.exp(p - row.lse)
        ds = p * (ds - row.delta)
    p, ds = gl.where(real, p, 0.0), gl.where(real, ds, 0.0)
    dz2 = ()
    for j in gl.static_range(SECOND):
        column = _beside(ds, h2[j])
        dz, unused = _through(
            column * _of_columns(events.weight[j], h2[j]), kept2[j], real, events, 1, j,
            ACTIVATION, OPTIONS,
        )  # fmt: skip
        dz2 = dz2 + (dz.to(DTYPE),)
    dh, operands1 = (), ()
    for i in gl.static_range(FIRST):
        part, used = _start_back(dz2, events.second[i], OPTIONS)
        dh, operands1 = dh + (part,), operands1 + used
    lse, delta = row.lse, row.delta
    if NEXT:
        thread_barrier()  # all warps have waited for the MMAs that read the next row's slot
        lse, delta = _store_row(
            operands, strides, weights, gradients, events, 1 - slot, next_row, OPTIONS
        )
        fence_async_shared()
        thread_barrier()
    found = warpgroup_mma_wait(0, deps=dh + operands1)
    dz1 = ()
    for i in gl.static_range(FIRST):
        dz, unused = _through(found[i], kept1[i], real, events, 0, i, ACTIVATION, OPTIONS)
        dz1 = dz1 + (to_mma_operand(dz, DTYPE, WIDTH),)
    started = ()
    if NEXT:
        started = _start_row(events, 1 - slot, OPTIONS)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, mma_layout(BLOCK, 16)))[None, :]
    ones = gl.zeros([BLOCK, 16], gl.float32, mma_layout(BLOCK, 16))
    of_do = to_mma_operand(gl.where(column == 0, _beside(p, ones), ones), DTYPE, WIDTH)
    first = _slot(events.first, slot)
    do_rows = _do_rows(first, _slot(events.do, slot), OPTIONS)
    dk = warpgroup_mma(of_do, do_rows.slice(0, 16, 0), dk, is_async=True)
    for i in gl.static_range(FIRST):
        dk = warpgroup_mma(dz1[i], _piece(first, i, OPTIONS), dk, is_async=True)
    if NEXT:
        started = _wait(started, FIRST + 1)
    else:
        dk = warpgroup_mma_wait(0, deps=(dk,) + dz1 + (of_do,))[0]
    return started, dk, lse, delta
