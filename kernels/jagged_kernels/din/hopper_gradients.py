"""What Hopper's backward kernels of DIN's attention share: a tile's scores and their gradients for
one row of q, down to dz1, and sums over tiles.

    ds = do · k,  dz2 = act'(z2) ∘ (ds w),  dz1 = act'(z1) ∘ (dz2 W2)

With softmax, ds is p (do · k - delta) with p = exp(s - lse). z and h as in hopper_forward.py.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ..common.activations import NAN
from ..common.pipeline import halves, mma_abt, mma_layout, to_mma_operand, vector_layout
from .accumulators import partial_sums
from .hopper_parts import (
    BLOCK,
    COPIES,
    WORDS,
    load_pieces,
    make_second,
    make_vectors,
    of_columns,
    plus,
    prelu,
    relu16,
    store_first,
    store_vectors,
)
from .mlp import Unit, has_table


class Net(NamedTuple):
    """The MLP behind its first linear, in shared memory: W2 `[64, n]` for each piece of the first
    layer, pieces of b2 and of w, and of each layer the pieces of its table's rows: slopes, with
    Dice those of a Unit. last_bias: b3."""

    second: gl.tuple
    bias: gl.tuple
    weight: gl.tuple
    tables: gl.tuple
    last_bias: gl.tensor


class Given(NamedTuple):
    """Arguments of a kernel. gradients: do, lse and delta, then results."""

    operands: gl.tuple
    strides: gl.tuple
    weights: gl.tuple
    gradients: gl.tuple


class Row(NamedTuple):
    """A row of q. In shared memory pieces of M `[n, E]`, of which the last one may have do in the
    rows behind, otherwise do is `([16, E],)`, and the pieces of a. lse and delta of its result."""

    first: gl.tuple
    do: gl.tuple
    a: gl.tuple
    lse: gl.tensor
    delta: gl.tensor


class Layers(NamedTuple):
    """Of a tile, pieces of h1 in 16 bits, and what `through` wants of z1."""

    h1: gl.tuple
    kept1: gl.tuple
    dots: gl.tensor


class Last(NamedTuple):
    """p and ds [64] of a tile; pieces of h2, dz2, and the sums of the last layer's table."""

    p: gl.tensor
    ds: gl.tensor
    h2: gl.tuple
    dz2: gl.tuple
    of_table: gl.tuple


# -- the MLP ---------------------------------------------------------------------------------------


@gluon.jit
def make_net(weights, biases, tables, OPTIONS: gl.constexpr):
    second, of_units = (), ()
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        second = second + (make_second(weights[1], i, 0, BLOCK, OPTIONS),)
    if has_table(OPTIONS.units):
        of_units = _make_table(tables[0], 0, OPTIONS), _make_table(tables[1], 1, OPTIONS)
    bias, weight = make_vectors(1, OPTIONS), make_vectors(1, OPTIONS)
    store_vectors(bias, load_pieces(biases[0], 1, OPTIONS))
    store_vectors(weight, load_pieces(weights[2], 1, OPTIONS))
    return Net(second, bias, weight, of_units, gl.load(biases[1]).to(gl.float32))


@gluon.jit
def _make_table(ptr, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    vectors = ()
    for row in gl.static_range(9 if OPTIONS.units == "dice" else 1):
        pieces = make_vectors(LAYER, OPTIONS)
        store_vectors(pieces, load_pieces(ptr + row * OPTIONS.hidden[LAYER], LAYER, OPTIONS))
        vectors = vectors + (pieces,)
    return vectors


@gluon.jit
def _unit(net, LAYER: gl.constexpr, i: gl.constexpr, z):
    """The Unit of a piece of a layer with Dice, as rows beside z."""
    rows = ()
    for row in gl.static_range(9):
        rows = rows + (of_columns(net.tables[LAYER][row][i], z),)
    return Unit(*rows)


@gluon.jit
def _activate(z, net, LAYER: gl.constexpr, i: gl.constexpr, ACTIVATION, OPTIONS: gl.constexpr):
    """h of a piece, and what `through` wants of it."""
    if OPTIONS.units == "relu":
        rounded = relu16(z)
        return rounded if LAYER == 0 else gl.maximum(z, 0.0, propagate_nan=NAN), rounded
    elif OPTIONS.units == "prelu":
        return prelu(z, z, of_columns(net.tables[LAYER][0][i], z)), z
    elif OPTIONS.units == "dice":
        unit = _unit(net, LAYER, i, z)
        p = ACTIVATION(z * unit.half + unit.shift, 2.0)[0]
        return z * (unit.slope + unit.rest * p), z
    else:
        h, slope = ACTIVATION(z, 1.0)
        return h * OPTIONS.factors[0], slope * OPTIONS.factors[1]


@gluon.jit
def _where_positive(h, dh):
    """dh where h, in bf16, is positive, otherwise 0: three instructions for two numbers."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .b32 z; mov.b32 z, 0; setp.gt.bf16x2 p|q, $2, z;"
        " selp.f32 $0, $3, 0f00000000, p; selp.f32 $1, $4, 0f00000000, q; }",
        "=&f,=&f,r,f,f", [h, dh], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def through(
    dh, kept, real, net, LAYER: gl.constexpr, i: gl.constexpr, ACTIVATION, OPTIONS: gl.constexpr
):
    """dz of a piece of a layer, and what mlp.py's `activation_gradient` sums for its table. real:
    which rows are seen."""
    if OPTIONS.units == "relu":
        return _where_positive(kept, dh), ()
    elif OPTIONS.units == "prelu":
        slope = of_columns(net.tables[LAYER][0][i], dh)
        return prelu(kept, dh, slope), (partial_sums(dh * gl.minimum(kept, 0.0)),)
    elif OPTIONS.units == "dice":
        unit, z = _unit(net, LAYER, i, kept), kept
        p = ACTIVATION(z * unit.half + unit.shift, 2.0)[0]
        left = z - z * p
        bend = left * p  # z p (1 - p)
        dz = dh * (unit.slope + unit.rest * p + unit.curve * bend) + (unit.d0 + unit.d1 * z)
        g = dh * bend
        sums = partial_sums(dh * left), partial_sums(g), partial_sums(g * (z - unit.mean))
        return gl.where(beside(real, z), dz, 0.0), sums
    else:
        return dh * kept, ()


# -- a row of q ------------------------------------------------------------------------------------


@gluon.constexpr_function
def joins(pieces):
    """Whether the last piece of the first layer shares an MMA with do, as both are small."""
    return pieces[len(pieces) - 1][1] <= 32


@gluon.constexpr_function
def _num_rows(pieces, i):
    """Rows of a piece of M, and of do if it follows."""
    return pieces[i][1] * (2 if i == len(pieces) - 1 and joins(pieces) else 1)


@gluon.jit
def make_rows(
    NUMBER: gl.constexpr, DTYPE: gl.constexpr, WIDTH: gl.constexpr, OPTIONS: gl.constexpr
):
    """Shared memory for some Rows: (first, do, a)."""
    first, do, a = (), (), ()
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        first = first + (_make_matrices(NUMBER, DTYPE, _num_rows(OPTIONS.pieces[0], i), WIDTH),)
        a = a + (gl.allocate_shared_memory(gl.float32, [NUMBER, OPTIONS.pieces[0][i][1]], WORDS),)
    if not joins(OPTIONS.pieces[0]):
        do = (_make_matrices(NUMBER, DTYPE, 16, WIDTH),)
    return first, do, a


@gluon.jit
def _make_matrices(
    NUMBER: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [NUMBER, ROWS, COLUMNS], SHARED)


@gluon.jit
def _slot(buffers, slot):
    found = ()
    for i in gl.static_range(len(buffers)):
        found = found + (buffers[i].index(slot),)
    return found


@gluon.jit
def do_rows(row, OPTIONS: gl.constexpr):
    """The rows of shared memory whose first one is do, the others 0."""
    LAST: gl.constexpr = len(OPTIONS.pieces[0]) - 1
    if joins(OPTIONS.pieces[0]):
        return row.first[LAST].slice(OPTIONS.pieces[0][LAST][1], OPTIONS.pieces[0][LAST][1], 0)
    else:
        return row.do[0]


@gluon.jit
def store_row(rows, slot, number, given, OPTIONS: gl.constexpr):
    """Store a row of q in a slot of what `make_rows` made. given: a Given. Its Row."""
    operands, strides, weights, gradients = given
    lse, delta = 0.0, 0.0
    if OPTIONS.softmax:
        lse, delta = gl.load(gradients[1] + number), gl.load(gradients[2] + number)
    row = Row(_slot(rows[0], slot), _slot(rows[1], slot), _slot(rows[2], slot), lse, delta)
    q_ptr = operands.q + number * (strides[0] * OPTIONS.align)
    a = load_pieces(operands.a + number * (strides[2] * OPTIONS.align), 0, OPTIONS)
    store_first(row.first, q_ptr, operands.of_k, weights[0], OPTIONS)
    store_vectors(row.a, a)
    buffer = do_rows(row, OPTIONS)
    L: gl.constexpr = vector_layout(buffer.shape[1])
    column = gl.arange(0, buffer.shape[1], layout=gl.SliceLayout(0, L))[None, :]
    copy = gl.arange(0, buffer.shape[0], layout=gl.SliceLayout(1, L))[:, None]
    ptrs = gradients[0] + number * OPTIONS.width + column + 0 * copy
    inside = (column < OPTIONS.width) & (copy == 0)
    buffer.store(gl.load(ptrs, mask=inside, other=0.0))
    return row


# -- a tile ----------------------------------------------------------------------------------------


@gluon.jit
def start_scores(k, row, OPTIONS: gl.constexpr):
    """Start z1 and do · k of a tile of events: an MMA for each piece of M, the last one with do, or
    one more for do."""
    found = ()
    for i in gl.static_range(len(row.first)):
        found = found + (mma_abt(k, row.first[i]),)
    if not joins(OPTIONS.pieces[0]):
        found = found + (mma_abt(k, row.do[0].slice(0, COPIES, 0)),)
    return found


@gluon.jit
def first_layer(started, row, net, ACTIVATION, OPTIONS: gl.constexpr):
    """The Layers of what `start_scores` has started, once it is awaited. Up to here, columns stay
    together, of which all are wanted: ptxas would wait for each MMA if a loop carried a part."""
    LAST: gl.constexpr = len(OPTIONS.pieces[0]) - 1
    if joins(OPTIONS.pieces[0]):
        started = started[:LAST] + halves(started[LAST])
    h1, kept1 = (), ()
    for i in gl.static_range(LAST + 1):
        h, kept = _activate(plus(started[i], row.a[i]), net, 0, i, ACTIVATION, OPTIONS)
        h1, kept1 = h1 + (h.to(gl.bfloat16),), kept1 + (kept,)
    return Layers(h1, kept1, started[LAST + 1])


@gluon.jit
def start_second(h1, net):
    """Start z2 of all units, and its operands in registers: a tuple of them."""
    found = (to_mma_operand(h1[0], gl.bfloat16, BLOCK),)
    z = mma_abt(found[0], net.second[0])
    for i in gl.static_range(1, len(h1)):
        found = found + (to_mma_operand(h1[i], gl.bfloat16, BLOCK),)
        z = mma_abt(found[i], net.second[i], z)
    return (z,) + found


@gluon.jit
def _narrow(x, COLUMNS: gl.constexpr):
    """The first columns of x: registers of the same thread."""
    if x.shape[1] == COLUMNS:
        return x
    else:
        return _narrow(halves(x)[0], COLUMNS)


@gluon.jit
def _split(z, OPTIONS: gl.constexpr):
    """The pieces of z2."""
    if len(OPTIONS.pieces[1]) == 1:
        return (_narrow(z, OPTIONS.pieces[1][0][1]),)
    else:
        left, right = halves(_narrow(z, 2 * OPTIONS.pieces[1][0][1]))
        return left, _narrow(right, OPTIONS.pieces[1][1][1])


@gluon.jit
def last_layer(z2, dots, real, row, net, ACTIVATION, OPTIONS: gl.constexpr):
    """The Last of a tile, of which `real` rows are seen."""
    L: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK, COPIES))
    z, h2, kept2 = _split(z2, OPTIONS), (), ()
    for j in gl.static_range(len(z)):
        h, kept = _activate(plus(z[j], net.bias[j]), net, 1, j, ACTIVATION, OPTIONS)
        h2, kept2 = h2 + (h,), kept2 + (kept,)
    ds = gl.convert_layout(gl.sum(dots, 1), L, assert_trivial=True)
    p = gl.zeros([BLOCK], gl.float32, L) + net.last_bias
    for j in gl.static_range(len(z)):
        part = gl.sum(h2[j] * of_columns(net.weight[j], h2[j]), 1)
        p += gl.convert_layout(part, L, assert_trivial=True)
    if OPTIONS.softmax:
        p = gl.exp(p - row.lse)
        ds = p * (ds - row.delta)
    p, ds = gl.where(real, p, 0.0), gl.where(real, ds, 0.0)
    dz2, of_table = (), ()
    for j in gl.static_range(len(z)):
        dh = beside(ds, h2[j]) * of_columns(net.weight[j], h2[j])
        dz, more = through(dh, kept2[j], real, net, 1, j, ACTIVATION, OPTIONS)
        dz2, of_table = dz2 + (dz,), of_table + (more,)
    return Last(p, ds, h2, dz2, of_table)


@gluon.jit
def start_back(dz2, net, OPTIONS: gl.constexpr):
    """Start dz2 W2, pieces of dh1, and its operands in registers: two tuples."""
    found, operands = (), ()
    for i in gl.static_range(len(net.second)):
        part, used = _start_back_piece(dz2, net.second[i], OPTIONS)
        found, operands = found + (part,), operands + used
    return found, operands


@gluon.jit
def _start_back_piece(dz2, second, OPTIONS: gl.constexpr):
    N: gl.constexpr = second.shape[1]
    part, operands = zero_piece(BLOCK, N), ()
    for j in gl.static_range(len(dz2)):
        operands = operands + (to_mma_operand(dz2[j], gl.bfloat16, N),)
        units = second.slice(OPTIONS.pieces[1][j][0], OPTIONS.pieces[1][j][1], 0)
        part = warpgroup_mma(operands[j], units, part, use_acc=j > 0, is_async=True)
    return part, operands


@gluon.jit
def beside(vector, x):
    """A vector [64] as a column [64, 1] beside an MMA's result."""
    L: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.convert_layout(vector, L, assert_trivial=True)[:, None]


# -- sums ------------------------------------------------------------------------------------------


@gluon.jit
def zero_piece(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """An MMA's result."""
    return gl.zeros([ROWS, COLUMNS], gl.float32, mma_layout(BLOCK, COLUMNS))


@gluon.jit
def zero_pieces(ROWS: gl.constexpr, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """An MMA's result [ROWS, n] for each piece of a layer."""
    found = ()
    for i in gl.static_range(len(OPTIONS.pieces[LAYER])):
        found = found + (zero_piece(ROWS, OPTIONS.pieces[LAYER][i][1]),)
    return found


@gluon.jit
def zero_vectors(LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """A `partial_sums` for each piece of a layer."""
    found, zeros = (), zero_pieces(BLOCK, LAYER, OPTIONS)
    for i in gl.static_range(len(zeros)):
        found = found + (partial_sums(zeros[i]),)
    return found


@gluon.jit
def zero_table(LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """Sums of a layer's table for each piece, one with PReLU, three with Dice; () without one."""
    found, zeros = (), zero_vectors(LAYER, OPTIONS)
    for i in gl.static_range(len(zeros)):
        if OPTIONS.units == "dice":
            found = found + ((zeros[i], zeros[i], zeros[i]),)
        elif OPTIONS.units == "prelu":
            found = found + ((zeros[i],),)
    return found


@gluon.jit
def add_to_table(sums, more):
    """sums with what `through` found for each piece."""
    out = ()
    for i in gl.static_range(len(sums)):
        of_piece = ()
        for j in gl.static_range(len(sums[i])):
            of_piece = of_piece + (sums[i][j] + more[i][j],)
        out = out + (of_piece,)
    return out


@gluon.jit
def places(x, FIRST: gl.constexpr):
    """Rows [m, 1] and columns [1, n] of x, these from FIRST on."""
    L: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    columns = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))
    return rows[:, None], columns[None, :]


@gluon.jit
def store_totals(ptr, sums, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """Store the totals of `partial_sums` of each piece of a layer."""
    for i in gl.static_range(len(sums)):
        total = gl.sum(gl.sum(sums[i], 1), 0)
        unit = OPTIONS.pieces[LAYER][i][0] + gl.arange(
            0, OPTIONS.pieces[LAYER][i][1], layout=total.type.layout
        )
        gl.store(ptr + unit, total.to(ptr.dtype.element_ty), mask=unit < OPTIONS.hidden[LAYER])


@gluon.jit
def store_table(ptr, sums, tables, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
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
            if row > 0:  # with Dice, whose tables have the rows of a Unit: rest
                total *= gl.load(tables[LAYER] + UNITS + unit, mask=inside, other=0.0)
            if row == 2:  # rstd
                total *= gl.load(tables[LAYER] + 3 * UNITS + unit, mask=inside, other=0.0)
            gl.store(ptr + row * UNITS + unit, total, mask=inside)
