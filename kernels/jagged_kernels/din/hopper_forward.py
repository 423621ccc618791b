"""Forward of DIN's attention for Hopper, where v is k.

    M = B + D ∘ q,  h1 = act(k Mᵀ + a),  h2 = act(h1 W2ᵀ + b2),  p = h2 · w + b3,  out = Σ_i p_i k_i

Warps           no specialisation: four warps compute one row of q after another; four thread
                blocks an SM, or two
Tiles           64 adjacent events of E columns, 64 or 128, of those that the row sees: walk.py. A
                layer's units are in pieces, see mlp.py
MMAs            z1: k from shared memory. z2: h1 from registers. out: kᵀ, 64 or 128 rows, times p in
                eight equal columns, the smallest number
Barriers        full, one for each stage of the ring of k: arrive count 1 (the thread that expects
                the TMA's bytes). There are no empty barriers: a stage is filled again behind a
                barrier of all warps that have waited for the MMAs that read it. Tiles are loaded
                three ahead, also those of the next row of q
Shared memory   in KiB, and less than 3 for vectors and barriers, at hidden (80, 40):
                E =  64:  50 = k 4 x 8 + M 10 + W2 6 + p 2 x 1
                E = 128:  92 = k 4 x 16 + M 20 + W2 6 + p 2 x 1
Registers       128 a thread for four thread blocks an SM, no limit for two: configs.hopper_config

Order of a tile (`_tile`): h1; start z2; start z1 of the next tile, which runs during all that
follows but the last wait; wait for z2; store p; start out; wait for both.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.activations import _fast_tanh
from ..common.gluon_api import thread_barrier
from ..common.pipeline import make_barriers, mma_abt, mma_layout, to_mma_operand
from ..common.ptxas import safe_ptxas
from .hopper_parts import (
    BLOCK,
    COPIES,
    STAGES,
    find_next_seen,
    load_events,
    load_missing,
    load_pieces,
    make_matrix,
    make_second,
    make_vectors,
    of_columns,
    plus,
    prelu,
    relu16,
    store_first,
    store_vectors,
    wait,
    wait_for_events,
    walk_tiles,
)
from .mlp import has_table
from .walk import AHEAD, end_of, find_tile, find_tile_ahead, num_missing


class Buffers(NamedTuple):
    """Shared memory. k `[STAGES, 64, E]`, their barriers, pieces of M `[n, E]`, of W2 `[m, n]` for
    each piece of the first layer, p `[2, 8, 64]`, and pieces of a, b2, w, and of tables."""

    k: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    first: gl.tuple
    second: gl.tuple
    p: gl.shared_memory_descriptor
    a: gl.tuple
    bias: gl.tuple
    weight: gl.tuple
    tables: gl.tuple


class Sums(NamedTuple):
    """Of a row of q: acc, outᵀ in 8 equal columns [E, 8]; with softmax the largest score so far,
    and the sum of the weights, of which each of the 64 events of a tile has a part."""

    acc: gl.tensor
    largest: gl.tensor
    total: gl.tensor


@gluon.jit
def _make_table(ptr, w_ptr, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """What a layer's activation needs of its table, in shared memory: c0 and c1, with PReLU slope
    and 1 - slope; with Dice also scale and shift, h = z (c0 + c1 tanh(scale z + shift)). Of the
    last layer, c0 and c1 have the factor w."""
    UNITS: gl.constexpr = OPTIONS.hidden[LAYER]
    rows, vectors = (), ()
    for row in gl.static_range(5 if OPTIONS.units == "dice" else 1):
        rows = rows + (load_pieces(ptr + row * UNITS, LAYER, OPTIONS),)
    for _ in gl.static_range(4 if OPTIONS.units == "dice" else 2):
        vectors = vectors + (make_vectors(LAYER, OPTIONS),)
    w = load_pieces(w_ptr, 1, OPTIONS)
    for i in gl.static_range(len(rows[0])):
        c0, c1 = rows[0][i], 1.0 - rows[0][i]
        if OPTIONS.units == "dice":
            c0, c1 = 0.5 + 0.5 * c0, 0.5 * c1
            scale = 0.5 * rows[3][i] * rows[2][i]
            vectors[2][i].store(scale)
            vectors[3][i].store(0.5 * rows[4][i] - rows[1][i] * scale)
        if LAYER == 1:
            c0, c1 = c0 * w[i], c1 * w[i]
        vectors[0][i].store(c0)
        vectors[1][i].store(c1)
    return vectors


@gluon.jit
def _make_tables(tables, w_ptr, OPTIONS: gl.constexpr):
    """_make_table of both layers."""
    if has_table(OPTIONS.units):
        return _make_table(tables[0], w_ptr, 0, OPTIONS), _make_table(tables[1], w_ptr, 1, OPTIONS)
    else:
        return ()


@gluon.jit
def _make_second(ptr, OPTIONS: gl.constexpr):
    """W2 in shared memory: for each piece of the first layer, those of the second one."""
    found = ()
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        pieces = ()
        for j in gl.static_range(len(OPTIONS.pieces[1])):
            pieces = pieces + (
                make_second(ptr, i, OPTIONS.pieces[1][j][0], OPTIONS.pieces[1][j][1], OPTIONS),
            )
        found = found + (pieces,)
    return found


@gluon.jit
def _make_first(DTYPE: gl.constexpr, WIDTH: gl.constexpr, OPTIONS: gl.constexpr):
    """Shared memory for the pieces of M."""
    found = ()
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        found = found + (make_matrix(DTYPE, OPTIONS.pieces[0][i][1], WIDTH),)
    return found


@gluon.jit
def _activate(z, buffers, LAYER: gl.constexpr, i: gl.constexpr, ACTIVATION, OPTIONS: gl.constexpr):
    """h of a piece of a layer; with Dice of the last layer, w h."""
    if not has_table(OPTIONS.units):
        return ACTIVATION(z, 1.0)[0] * OPTIONS.factors[0]
    else:
        vectors = buffers.tables[LAYER]
        first = of_columns(vectors[0][i], z)
        if OPTIONS.units == "prelu":
            return prelu(z, z, first)
        else:
            t = plus(z * of_columns(vectors[2][i], z), vectors[3][i])
            return z * (first + of_columns(vectors[1][i], z) * _fast_tanh(t))


@gluon.jit
def _weighted(x, buffers, i: gl.constexpr, ACTIVATION, OPTIONS: gl.constexpr):
    """w h of a piece of the last layer, where x is h1 W2ᵀ. With PReLU it is less by w b2, which is
    the same for all events: z = x + b2 is slope z + (1 - slope) (max(x, -b2) + b2)."""
    bias = of_columns(buffers.bias[i], x)
    if OPTIONS.units == "prelu":
        vectors = buffers.tables[1]
        c0, c1 = of_columns(vectors[0][i], x), of_columns(vectors[1][i], x)
        return c0 * x + c1 * gl.maximum(x, bias)
    elif OPTIONS.units == "dice":
        return _activate(x + bias, buffers, 1, i, ACTIVATION, OPTIONS)
    else:
        h = _activate(x + bias, buffers, 1, i, ACTIVATION, OPTIONS)
        return h * of_columns(buffers.weight[i], x)


@gluon.jit
def _start_first(buffers, step, num_rows):
    """Start z1 of a tile with num_rows events of the segment, once it is loaded."""
    k, z = wait_for_events(buffers, step, num_rows), ()
    for i in gl.static_range(len(buffers.first)):
        z = z + (mma_abt(k, buffers.first[i]),)
    return z


@gluon.jit
def _start_second(h, buffers, j: gl.constexpr, DTYPE: gl.constexpr, OPTIONS: gl.constexpr):
    """Start z2 of a piece, and its operands in registers."""
    N: gl.constexpr = OPTIONS.pieces[1][j][1]
    operands = (to_mma_operand(h[0], DTYPE, N),)
    z = mma_abt(operands[0], buffers.second[0][j])
    for i in gl.static_range(1, len(h)):
        operands = operands + (to_mma_operand(h[i], DTYPE, N),)
        z = mma_abt(operands[i], buffers.second[i][j], z)
    return z, operands


@gluon.jit
def _tile(
    z, sums, k_desc, buffers, last_bias, seen, next_seen, step,
    NEXT: gl.constexpr, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """z1 of the next tile, if there is one (NEXT), and the sums with this tile's, the first one of
    `seen`. next_seen: of the next row of q."""
    DTYPE: gl.constexpr = k_desc.dtype
    FIRST: gl.constexpr = len(OPTIONS.pieces[0])
    SECOND: gl.constexpr = len(OPTIONS.pieces[1])
    h = ()
    for i in gl.static_range(FIRST):
        if OPTIONS.units == "relu":
            piece = relu16(plus(z[i], buffers.a[i]))
        else:
            piece = _activate(plus(z[i], buffers.a[i]), buffers, 0, i, ACTIVATION, OPTIONS)
        h = h + (piece,)
    z2, operands = (), ()
    for j in gl.static_range(SECOND):
        part, used = _start_second(h, buffers, j, DTYPE, OPTIONS)
        z2, operands = z2 + (part,), operands + used
    if NEXT:
        next_z = _start_first(buffers, step + 1, find_tile(seen, BLOCK)[1])
        found = warpgroup_mma_wait(FIRST, deps=z2 + operands)
    else:
        next_z = ()
        found = warpgroup_mma_wait(0, deps=z2 + operands)
    L: gl.constexpr = mma_layout(BLOCK, COPIES)
    p = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, L)) + last_bias
    for j in gl.static_range(SECOND):
        s = gl.sum(_weighted(found[j], buffers, j, ACTIVATION, OPTIONS), 1)
        p += gl.convert_layout(s, gl.SliceLayout(1, L), assert_trivial=True)
    acc, largest, total = sums
    if OPTIONS.softmax:
        rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
        p = gl.where(rows < find_tile(seen, 0)[1], p, float("-inf"))
        new = gl.maximum(largest, gl.max(p, 0))
        p, rescale = gl.exp(p - new), gl.exp(largest - new)
        acc, total, largest = acc * rescale, total * rescale + p, new
    of_tile = buffers.p.index(step & 1)
    of_tile.permute((1, 0)).store(p.to(DTYPE)[:, None].broadcast_to([BLOCK, COPIES]))
    fence_async_shared()
    thread_barrier()
    acc = warpgroup_mma(
        buffers.k.index(step % STAGES).permute((1, 0)), of_tile.permute((1, 0)), acc, is_async=True
    )
    row, ahead, wanted = find_tile_ahead(seen, next_seen, step, BLOCK)
    load_events(k_desc, buffers, row, ahead, wanted)  # its barriers come while MMAs run
    if NEXT:
        done = warpgroup_mma_wait(0, deps=next_z + (acc,))
        return done[:FIRST], Sums(done[FIRST], largest, total)
    else:
        return (), Sums(warpgroup_mma_wait(0, deps=(acc,)), largest, total)


@safe_ptxas
@gluon.jit(do_not_specialize=["num_rows", "num_segments"])
def din_fwd_hopper_kernel(
    k_desc, operands, strides, weights, biases, tables, results, users,
    num_rows, num_segments, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Each program has every num_programs-th row of q. results: as in triton_forward.py."""
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    DTYPE: gl.constexpr = k_desc.dtype
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COPIES, BLOCK], DTYPE)
    buffers = Buffers(
        gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, WIDTH], k_desc.layout),
        make_barriers(STAGES, 1),
        _make_first(DTYPE, WIDTH, OPTIONS),
        _make_second(weights[1], OPTIONS),
        gl.allocate_shared_memory(DTYPE, [2, COPIES, BLOCK], P),
        make_vectors(0, OPTIONS),
        make_vectors(1, OPTIONS),
        make_vectors(1, OPTIONS),
        _make_tables(tables, weights[2], OPTIONS),
    )
    bias, weight = load_pieces(biases[0], 1, OPTIONS), load_pieces(weights[2], 1, OPTIONS)
    last_bias = gl.load(biases[1]).to(gl.float32)
    for i in gl.static_range(len(bias)):
        buffers.weight[i].store(weight[i])
        if OPTIONS.units == "prelu":
            buffers.bias[i].store(-bias[i])
            last_bias += gl.sum(bias[i] * weight[i], 0)
        else:
            buffers.bias[i].store(bias[i])
    L: gl.constexpr = mma_layout(BLOCK, COPIES)
    columns = gl.arange(0, COPIES, layout=gl.SliceLayout(0, L))[None, :]
    units = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, L))[:, None]
    step, missing = 0, AHEAD
    next_seen = find_next_seen(gl.program_id(0), num_rows, num_segments, users, OPTIONS)
    for row in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        seen = next_seen
        load_missing(k_desc, buffers, seen, step, missing)
        next_row = row + gl.num_programs(0)
        next_seen = find_next_seen(next_row, num_rows, num_segments, users, OPTIONS)
        missing = num_missing(seen, BLOCK)
        row = row.to(gl.int64)
        sums = Sums(
            gl.zeros([WIDTH, COPIES], gl.float32, L),
            float("-inf"),
            gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, L)),
        )
        if end_of(seen) > 0:
            q_ptr = operands.q + row * (strides[0] * OPTIONS.align)
            store_first(buffers.first, q_ptr, operands.of_k, weights[0], OPTIONS)
            a_ptr = operands.a + row * (strides[2] * OPTIONS.align)
            store_vectors(buffers.a, load_pieces(a_ptr, 0, OPTIONS))
            fence_async_shared()
            thread_barrier()
            z = wait(_start_first(buffers, step, find_tile(seen, 0)[1]), 0)
            sums, step = walk_tiles(
                _tile, step, seen, next_seen, sums, z, k_desc, buffers, last_bias,
                ACTIVATION, OPTIONS,
            )  # fmt: skip
        acc = sums.acc
        if OPTIONS.softmax:
            total = gl.sum(sums.total, 0)
            total = gl.where(total > 0, total, 1.0)  # rows without events
            acc /= total
            gl.store(results[1] + row, sums.largest + gl.log(total))
        gl.store(
            results[0] + row * OPTIONS.width + units + columns * 0,
            acc.to(results[0].dtype.element_ty),
            mask=(columns == 0) & (units < OPTIONS.width),
        )
