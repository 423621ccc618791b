"""Device functions of DIN's attention: the MLP's scores of a block of events for one row of q, and
their backward.

    M = B + D ∘ q,  z1 = k Mᵀ + a,  h1 = act(z1),  z2 = h1 W2ᵀ + b2,  h2 = act(z2),  s = h2 · w + b3

With one hidden layer, s = h1 · w + b3. M is computed once for a row of q: for a pair, the first
layer is nothing but an MMA. A tile's number of columns must be a power of two, and 80
units in a tile of 128 would waste a third of the arithmetic. So a layer's units are split into
pieces of sizes that are powers of two (80 = 64 + 16), and what has a column for each unit is a
tuple of tiles, one for each piece. Units behind the last one have weights of 0.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..attention.mask import is_visible, visible_columns
from ..common.loads import find_segment
from ..schedule.cost import MaskParams
from .accumulators import partial_sums, zeros
from .walk import Seen, end_of, find_seen, find_tile


class Options(NamedTuple):
    """Constants of the kernels.

    Attributes:
        width, v_width: E and Ev; block_e, block_v: their tiles.
        hidden: numbers of units. pieces: of each hidden layer, (first unit, size) of its pieces.
        block: events of a tile.
        align: see `aligned_strides`. precision: of MMAs.
        units: "relu", "prelu" or "dice"; None: ACTIVATION, a function of z alone.
        factors: which ACTIVATION leaves out, of value and derivative.
        softmax: over the events. same: v is k.
        only: the hidden layer of which the kernel computes only the sums; -1: all. In
            hopper_rows.py the layer whose gradients a launch computes.
        mask: which events a row of q sees; None: all.
    """

    width: int
    v_width: int
    block_e: int
    block_v: int
    hidden: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    block: int
    align: int
    precision: str
    units: str | None
    factors: tuple[float, float]
    softmax: bool
    same: bool
    only: int = -1
    mask: MaskParams | None = None


class Users(NamedTuple):
    """Pointers to the offsets `[B + 1]` of rows of q and of events, and to the number of targets of
    each user `[B]`, None unless the mask has them."""

    q_offsets: tl.tensor
    kv_offsets: tl.tensor
    num_targets: tl.tensor


class Operands(NamedTuple):
    """Pointers to q `[R, E]`, k `[L, E]`, a `[R, H1]`, B `[H1, E]` and v `[L, Ev]`."""

    q: tl.tensor
    k: tl.tensor
    a: tl.tensor
    of_k: tl.tensor
    v: tl.tensor


class Unit(NamedTuple):
    """Rows [1, n] of a piece with Dice, which `din_units_kernel` computes from a `UnitTable` of
    jagged_modules. rest is 1 - slope, half of the argument of the sigmoid is half · z + shift,
    curve is rest · weight · rstd, and the gradient of z through the statistics is d0 + d1 · z."""

    slope: tl.tensor
    rest: tl.tensor
    mean: tl.tensor
    rstd: tl.tensor
    half: tl.tensor
    shift: tl.tensor
    curve: tl.tensor
    d0: tl.tensor
    d1: tl.tensor


class Mlp(NamedTuple):
    """The MLP's matrices, and pointers to its vectors.

    first: M of a row of q, pieces [n, block_e]. second: W2, for each piece of the first layer those
    of the second one, [m, n], which a program keeps. a: of the row of q. bias: b2. last: w.
    last_bias: b3, its value. tables: of each layer, with Dice the rows of a Unit.
    """

    first: tl.tuple
    second: tl.tuple
    a: tl.tensor
    bias: tl.tensor
    last: tl.tensor
    last_bias: tl.tensor
    tables: tl.tuple


class Keys(NamedTuple):
    """The events that a row of q sees. end: of a loop over blocks, whose rounds `load_block`
    takes."""

    end: tl.tensor
    seen: Seen


class Events(NamedTuple):
    """A block of events: k [block, block_e], v [block, block_v], and which rows are seen."""

    k: tl.tensor
    v: tl.tensor
    real: tl.tensor


class Scores(NamedTuple):
    """z and h of each hidden layer, and the scores [block]."""

    z: tl.tuple
    h: tl.tuple
    s: tl.tensor


@triton.constexpr_function
def has_table(units):
    """Whether units have parameters."""
    return units in ("prelu", "dice")


# -- loads -----------------------------------------------------------------------------------------


@triton.jit
def load_vector(ptr, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Elements from FIRST on; 0 from SIZE on."""
    columns = FIRST + tl.arange(0, BLOCK)
    return tl.load(ptr + columns, mask=columns < SIZE, other=0.0)


@triton.jit
def load_tile(
    ptr, stride, num_rows, FIRST: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK] from column FIRST on. Rows from num_rows on, and columns from SIZE on, are
    0."""
    rows, columns = tl.arange(0, ROWS), FIRST + tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_pieces(ptr, LAYER: tl.constexpr, OPTIONS: tl.constexpr):
    """The pieces of a vector of a hidden layer's units, in fp32."""
    pieces = ()
    for i in tl.static_range(len(OPTIONS.pieces[LAYER])):
        piece = load_vector(
            ptr, OPTIONS.pieces[LAYER][i][0], OPTIONS.hidden[LAYER], OPTIONS.pieces[LAYER][i][1]
        )
        pieces = pieces + (piece.to(tl.float32),)
    return pieces


@triton.jit
def _load_row(
    mlp, ROW: tl.constexpr, LAYER: tl.constexpr, PIECE: tl.constexpr, OPTIONS: tl.constexpr
):
    """A row [1, n] of a piece of a layer's table. Row 0 has the slopes."""
    row = load_vector(
        mlp.tables[LAYER] + ROW * OPTIONS.hidden[LAYER], OPTIONS.pieces[LAYER][PIECE][0],
        OPTIONS.hidden[LAYER], OPTIONS.pieces[LAYER][PIECE][1],
    )  # fmt: skip
    return row[None, :]


@triton.jit
def _load_unit(mlp, LAYER: tl.constexpr, PIECE: tl.constexpr, OPTIONS: tl.constexpr):
    """The Unit of a piece of a layer with Dice."""
    rows = ()
    for row in tl.static_range(9):
        rows = rows + (_load_row(mlp, row, LAYER, PIECE, OPTIONS),)
    return Unit(*rows)


@triton.jit
def load_weight(
    ptr, COLUMNS: tl.constexpr, LAYER: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """The pieces [n, BLOCK] of a weight `[H, COLUMNS]` of a layer, from a column on."""
    pieces = ()
    for i in tl.static_range(len(OPTIONS.pieces[LAYER])):
        piece = load_tile(
            ptr + OPTIONS.pieces[LAYER][i][0] * COLUMNS, COLUMNS,
            OPTIONS.hidden[LAYER] - OPTIONS.pieces[LAYER][i][0], FIRST, COLUMNS,
            OPTIONS.pieces[LAYER][i][1], BLOCK,
        )  # fmt: skip
        pieces = pieces + (piece,)
    return pieces


@triton.jit
def _load_second(ptr, OPTIONS: tl.constexpr):
    """W2: for each piece of the first layer, those of the second one."""
    pieces = ()
    for i in tl.static_range(len(OPTIONS.pieces[0])):
        piece = load_weight(
            ptr, OPTIONS.hidden[0], 1, OPTIONS.pieces[0][i][0], OPTIONS.pieces[0][i][1], OPTIONS
        )
        pieces = pieces + (piece,)
    return pieces


@triton.jit
def load_mlp(weights, biases, tables, OPTIONS: tl.constexpr):
    """The Mlp of pointers to contiguous tensors, of no row of q yet."""
    LAST: tl.constexpr = len(OPTIONS.hidden) - 1
    second = ()
    if LAST == 1:
        second = _load_second(weights[1], OPTIONS)
    last_bias = tl.load(biases[LAST]).to(tl.float32)
    return Mlp((), second, biases[0], biases[0], weights[LAST + 1], last_bias, tables)


@triton.jit
def packed_fma(x, y, z):
    """x y + z in bf16, rounded once: one instruction for two numbers."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z],
        dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def of_query(mlp, q, a, operands, weights, OPTIONS: tl.constexpr, PACKED: tl.constexpr = False):
    """mlp for a row of q and the pointer to its a. PACKED: in bf16, M in fewer
    instructions."""
    first = ()
    of_k = load_weight(operands.of_k, OPTIONS.width, 0, 0, OPTIONS.block_e, OPTIONS)
    products = load_weight(weights[0], OPTIONS.width, 0, 0, OPTIONS.block_e, OPTIONS)
    for i in tl.static_range(len(of_k)):
        if PACKED and q.dtype == tl.bfloat16:
            piece = packed_fma(products[i], q[None, :], of_k[i])
        else:
            piece = of_k[i].to(tl.float32) + products[i].to(tl.float32) * q.to(tl.float32)[None, :]
        first = first + (piece.to(q.dtype),)
    return Mlp(first, mlp.second, a, mlp.bias, mlp.last, mlp.last_bias, mlp.tables)


@triton.jit
def reread(mlp, index):
    """mlp in the round of a loop that has an index from 0 on. The compiler does not know that what
    it adds to the pointers is 0, so it loads the units' vectors in each round. In registers
    throughout the loop, they would leave too few for z."""
    zero = tl.minimum(index, 0)
    tables = ()
    for i in tl.static_range(len(mlp.tables)):
        tables = tables + (mlp.tables[i] + tl.multiple_of(zero, 16),)
    return Mlp(
        mlp.first, mlp.second, mlp.a + zero, mlp.bias + zero, mlp.last + zero, mlp.last_bias, tables
    )


@triton.jit
def load_events(operands, strides, row, num_rows, OPTIONS: tl.constexpr):
    """The block of events from a row on, of which num_rows are the segment's."""
    k = load_tile(
        operands.k + row * (strides[1] * OPTIONS.align), strides[1] * OPTIONS.align, num_rows,
        0, OPTIONS.width, OPTIONS.block, OPTIONS.block_e,
    )  # fmt: skip
    v = k
    if not OPTIONS.same:
        v = load_tile(
            operands.v + row * (strides[4] * OPTIONS.align), strides[4] * OPTIONS.align, num_rows,
            0, OPTIONS.v_width, OPTIONS.block, OPTIONS.block_v,
        )  # fmt: skip
    return Events(k, v, tl.arange(0, OPTIONS.block) < num_rows)


@triton.jit
def load_keys(row, users, num_segments, OPTIONS: tl.constexpr):
    """The Keys of a row of q; none behind the last segment."""
    MASK: tl.constexpr = OPTIONS.mask
    user = find_segment(row, users.q_offsets, num_segments, 0, False)
    seen = find_seen(row, user, None, num_segments, users, MASK, 1)
    return Keys(end_of(seen), seen)


@triton.jit
def load_block(operands, strides, keys, index, OPTIONS: tl.constexpr):
    """The Events of a round of a loop over a row's Keys. index: 0, block, 2 · block, ... up to the
    end."""
    row, num_rows = find_tile(keys.seen, index)
    if len(keys.seen.others) > 0:  # of each event of the block, which may be one of another run
        i = tl.arange(0, OPTIONS.block)[:, None]
        row, num_rows = find_tile(keys.seen, index + i)[0] - i, keys.end - index
    return load_events(operands, strides, row, num_rows, OPTIONS)


@triton.jit
def sees(first, column, first_target, OPTIONS: tl.constexpr):
    """Which events of the block from `first` on a row of q at a column sees."""
    MASK: tl.constexpr = OPTIONS.mask
    events = first + tl.arange(0, OPTIONS.block)
    return is_visible(events, column, visible_columns(column, first_target, MASK), MASK)


@triton.jit
def load_query(operands, strides, row, OPTIONS: tl.constexpr):
    """A row of q [block_e] and the pointer to its a."""
    q = load_vector(
        operands.q + row * (strides[0] * OPTIONS.align), 0, OPTIONS.width, OPTIONS.block_e
    )
    return q, operands.a + row * (strides[2] * OPTIONS.align)


# -- scores ----------------------------------------------------------------------------------------


@triton.jit
def activate(z, mlp, LAYER: tl.constexpr, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr):
    """h of the pieces of a layer."""
    h = ()
    for i in tl.static_range(len(z)):
        if OPTIONS.units is None:
            h = h + (ACTIVATION(z[i], 1.0)[0] * OPTIONS.factors[0],)
        elif OPTIONS.units == "relu":
            h = h + (ACTIVATION(z[i], 1.0)[0],)
        elif OPTIONS.units == "prelu":
            slope = _load_row(mlp, 0, LAYER, i, OPTIONS)
            h = h + (tl.where(z[i] > 0, z[i], slope * z[i]),)
        else:
            unit = _load_unit(mlp, LAYER, i, OPTIONS)
            p = ACTIVATION(z[i] * unit.half + unit.shift, 2.0)[0]
            h = h + (z[i] * (unit.slope + unit.rest * p),)
    return h


@triton.jit
def first_layer(events, mlp, OPTIONS: tl.constexpr):
    """z of the first layer, for one row of q."""
    z, a = (), load_pieces(mlp.a, 0, OPTIONS)
    for i in tl.static_range(len(mlp.first)):
        start = tl.broadcast_to(a[i][None, :], [OPTIONS.block, OPTIONS.pieces[0][i][1]])
        piece = tl.dot(events.k, tl.trans(mlp.first[i]), start, input_precision=OPTIONS.precision)
        z = z + (piece,)
    return z


@triton.jit
def second_layer(h, mlp, DTYPE: tl.constexpr, OPTIONS: tl.constexpr):
    """z of the second layer. DTYPE: of the MMA's operands."""
    z, bias = (), load_pieces(mlp.bias, 1, OPTIONS)
    for j in tl.static_range(len(bias)):
        piece = tl.broadcast_to(bias[j][None, :], [OPTIONS.block, OPTIONS.pieces[1][j][1]])
        for i in tl.static_range(len(h)):
            piece = tl.dot(
                h[i].to(DTYPE), tl.trans(mlp.second[i][j]), piece,
                input_precision=OPTIONS.precision,
            )  # fmt: skip
        z = z + (piece,)
    return z


@triton.jit
def scores(events, mlp, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr):
    """The Scores of a block of events for one row of q."""
    z1 = first_layer(events, mlp, OPTIONS)
    h1 = activate(z1, mlp, 0, ACTIVATION, OPTIONS)
    if len(OPTIONS.hidden) == 1:
        return Scores((z1,), (h1,), _last_layer(h1, mlp, OPTIONS))
    else:
        z2 = second_layer(h1, mlp, events.k.dtype, OPTIONS)
        h2 = activate(z2, mlp, 1, ACTIVATION, OPTIONS)
        return Scores((z1, z2), (h1, h2), _last_layer(h2, mlp, OPTIONS))


@triton.jit
def _last_layer(h, mlp, OPTIONS: tl.constexpr):
    last = load_pieces(mlp.last, len(OPTIONS.hidden) - 1, OPTIONS)
    s = tl.sum(h[0] * last[0][None, :], 1) + mlp.last_bias
    for i in tl.static_range(1, len(h)):
        s += tl.sum(h[i] * last[i][None, :], 1)
    return s


# -- backward --------------------------------------------------------------------------------------


@triton.jit
def score_gradient(do, lse, delta, s, events, OPTIONS: tl.constexpr):
    """The weights p [block] and the gradient of the scores. do: of the row of q, [block_v]."""
    # an MMA has at least 16 columns
    columns = tl.trans(tl.where((tl.arange(0, 16) == 0)[:, None], do[None, :], 0.0))
    ds = tl.sum(tl.dot(events.v, columns, input_precision=OPTIONS.precision), 1)
    p = s
    if OPTIONS.softmax:
        p = tl.exp(s - lse)
        ds = p * (ds - delta)
    return tl.where(events.real, p, 0.0), tl.where(events.real, ds, 0.0)


@triton.jit
def last_gradient(ds, mlp, OPTIONS: tl.constexpr):
    """dh of the last hidden layer, given ds [block]."""
    dh, last = (), load_pieces(mlp.last, len(OPTIONS.hidden) - 1, OPTIONS)
    for i in tl.static_range(len(last)):
        dh = dh + (ds[:, None] * last[i][None, :],)
    return dh


@triton.jit
def activation_gradient(
    dh, z, real, mlp, LAYER: tl.constexpr, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr
):
    """dz of a layer, and for each piece `partial_sums` of the gradients of slope, and with Dice
    of bias and weight, of its table; none without one. Those of bias lack the factor rest, those of
    weight rest · rstd."""
    dz, sums = (), ()
    for i in tl.static_range(len(z)):
        if OPTIONS.units is None:
            dz = dz + (dh[i] * (ACTIVATION(z[i], 1.0)[1] * OPTIONS.factors[1]),)
        elif OPTIONS.units == "relu":
            dz = dz + (tl.where(z[i] > 0, dh[i], 0.0),)
        elif OPTIONS.units == "prelu":
            slope = _load_row(mlp, 0, LAYER, i, OPTIONS)
            dz = dz + (tl.where(z[i] > 0, dh[i], slope * dh[i]),)
            dslope = partial_sums(tl.where(z[i] > 0, 0.0, dh[i] * z[i]))
            sums = sums + ((dslope,),)
        else:
            unit = _load_unit(mlp, LAYER, i, OPTIONS)
            p = ACTIVATION(z[i] * unit.half + unit.shift, 2.0)[0]
            left = z[i] - z[i] * p
            bend = left * p  # z p (1 - p)
            slope = unit.slope + unit.rest * p + unit.curve * bend
            piece = dh[i] * slope + (unit.d0 + unit.d1 * z[i])
            dz = dz + (tl.where(real[:, None], piece, 0.0),)
            g = dh[i] * bend
            dweight = partial_sums(g * (z[i] - unit.mean))
            sums = sums + ((partial_sums(dh[i] * left), partial_sums(g), dweight),)
    return dz, sums


@triton.jit
def second_gradient(dz, mlp, DTYPE: tl.constexpr, OPTIONS: tl.constexpr):
    """dh of the first layer, given dz of the second one."""
    dh = ()
    for i in tl.static_range(len(mlp.first)):
        piece = zeros(OPTIONS.block, OPTIONS.pieces[0][i][1])
        for j in tl.static_range(len(dz)):
            piece = tl.dot(
                dz[j].to(DTYPE), mlp.second[i][j], piece, input_precision=OPTIONS.precision
            )
        dh = dh + (piece,)
    return dh


@triton.jit
def add_event_gradient(dk, dz, mlp, DTYPE: tl.constexpr, OPTIONS: tl.constexpr):
    """dk [block, block_e] and the gradient of the events, given dz of the first layer."""
    for i in tl.static_range(len(dz)):
        dk = tl.dot(dz[i].to(DTYPE), mlp.first[i], dk, input_precision=OPTIONS.precision)
    return dk
