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
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.activations import _fast_tanh
from ..common.gluon_api import load_tile, thread_barrier
from ..common.pipeline import (
    halves,
    make_barriers,
    mma_abt,
    mma_layout,
    to_mma_operand,
    vector_layout,
    zero_rows,
)
from ..common.ptxas import safe_ptxas
from .configs import HOPPER_STAGES
from .mlp import has_table, packed_fma
from .shares import first_row
from .walk import AHEAD, end_of, find_seen, find_tile, find_tile_ahead, num_missing, without_tile

BLOCK = gl.constexpr(64)  # events of a tile
STAGES = gl.constexpr(HOPPER_STAGES)
COPIES = gl.constexpr(8)  # columns of p
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


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
def _find_user(index, offsets_ptr, num_segments, SHIFT: gl.constexpr = None):
    """The last segment that starts at a row or before: as common/loads.py's find_segment. SHIFT: of
    a virtual tile."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    low, size = 0, num_segments
    while size > 1:
        step = (size + 31) // 32
        segments = low + lanes * step
        inside = lanes * step < size
        first = gl.load(offsets_ptr + segments, mask=inside, other=0)
        if SHIFT is not None:
            first = (first.to(gl.int64) >> SHIFT) + segments
        skipped = (gl.sum((inside & (first <= index)).to(gl.int32), 0) - 1) * step
        low += skipped
        size = gl.minimum(step, size - skipped)
    return low


@gluon.jit
def _find_share(costs_ptr, users, num_segments):
    """The first row of q of the program's share, the end of the share, and its first user."""
    total = gl.load(costs_ptr + num_segments)
    cost = total * gl.program_id(0) // gl.num_programs(0)
    end_cost = total * (gl.program_id(0) + 1) // gl.num_programs(0)
    user = _find_user(cost, costs_ptr, num_segments + 1)
    end_user = _find_user(end_cost, costs_ptr, num_segments + 1)
    row = first_row(costs_ptr, users.q_offsets, user, cost)
    return row, first_row(costs_ptr, users.q_offsets, end_user, end_cost), user


@gluon.jit
def _find_seen(row, end, user, num_segments, users, OPTIONS: gl.constexpr):
    """The Seen of a row of q of a user or of one behind, none from the end of the share on; and the
    user."""
    MASK: gl.constexpr = OPTIONS.mask
    user = gl.minimum(user, num_segments - 1)
    while (row < end) & (row >= gl.load(users.q_offsets + user + 1)):
        user += 1
    return find_seen(row, user, end, num_segments, users, MASK, BLOCK), user


@gluon.jit
def _load_pieces(ptr, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """The pieces of a vector of a layer's units, in fp32. A thread has at most one unit of each."""
    pieces = ()
    for i in gl.static_range(len(OPTIONS.pieces[LAYER])):
        columns = OPTIONS.pieces[LAYER][i][0] + gl.arange(
            0, OPTIONS.pieces[LAYER][i][1], layout=gl.BlockedLayout([1], [32], [4], [0])
        )
        there = columns < OPTIONS.hidden[LAYER]
        pieces = pieces + (gl.load(ptr + columns, mask=there, other=0.0).to(gl.float32),)
    return pieces


@gluon.jit
def _make_vectors(LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """Shared memory for the pieces of a vector of a layer's units."""
    pieces = ()
    for i in gl.static_range(len(OPTIONS.pieces[LAYER])):
        piece = gl.allocate_shared_memory(gl.float32, [OPTIONS.pieces[LAYER][i][1]], WORDS)
        pieces = pieces + (piece,)
    return pieces


@gluon.jit
def _store_vectors(buffers, pieces):
    for i in gl.static_range(len(pieces)):
        buffers[i].store(pieces[i])


@gluon.jit
def _make_table(ptr, w_ptr, LAYER: gl.constexpr, OPTIONS: gl.constexpr):
    """What a layer's activation needs of its table, in shared memory: c0 and c1, with PReLU slope
    and 1 - slope; with Dice also scale and shift, h = z (c0 + c1 tanh(scale z + shift)). Of the
    last layer, c0 and c1 have the factor w."""
    UNITS: gl.constexpr = OPTIONS.hidden[LAYER]
    rows, vectors = (), ()
    for row in gl.static_range(5 if OPTIONS.units == "dice" else 1):
        rows = rows + (_load_pieces(ptr + row * UNITS, LAYER, OPTIONS),)
    for _ in gl.static_range(4 if OPTIONS.units == "dice" else 2):
        vectors = vectors + (_make_vectors(LAYER, OPTIONS),)
    w = _load_pieces(w_ptr, 1, OPTIONS)
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
def _make_matrix(DTYPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for an operand of an MMA."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], SHARED)


@gluon.constexpr_function
def whole_units(pieces):
    """Number of columns of an MMA that computes all pieces of a layer."""
    first, size = pieces[len(pieces) - 1]
    return size if len(pieces) == 1 else 2 * first


@gluon.jit
def _make_second_piece(ptr, i: gl.constexpr, OPTIONS: gl.constexpr):
    K: gl.constexpr = OPTIONS.pieces[0][i][1]
    N: gl.constexpr = whole_units(OPTIONS.pieces[1])
    L: gl.constexpr = vector_layout(K)
    columns = OPTIONS.pieces[0][i][0] + gl.arange(0, K, layout=gl.SliceLayout(0, L))
    rows = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    mask = (rows < OPTIONS.hidden[1])[:, None] & (columns < OPTIONS.hidden[0])[None, :]
    ptrs = ptr + rows[:, None] * OPTIONS.hidden[0] + columns[None, :]
    buffer = _make_matrix(ptr.dtype.element_ty, N, K)
    buffer.store(gl.load(ptrs, mask=mask, other=0.0))
    return buffer


@gluon.jit
def _make_second(ptr, OPTIONS: gl.constexpr):
    """W2 in shared memory: for each piece of the first layer, all units of the second one."""
    found = ()
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        found = found + (_make_second_piece(ptr, i, OPTIONS),)
    return found


@gluon.jit
def _make_first(DTYPE: gl.constexpr, WIDTH: gl.constexpr, OPTIONS: gl.constexpr):
    """Shared memory for the pieces of M."""
    found = ()
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        found = found + (_make_matrix(DTYPE, OPTIONS.pieces[0][i][1], WIDTH),)
    return found


@gluon.jit
def _store_first(buffers, q_ptr, of_k_ptr, products_ptr, OPTIONS: gl.constexpr):
    """Store M of a row of q."""
    WIDTH: gl.constexpr = buffers.k.shape[2]
    L: gl.constexpr = vector_layout(WIDTH)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    inside = column < OPTIONS.width
    q = gl.load(q_ptr + column, mask=inside, other=0.0)
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        rows = OPTIONS.pieces[0][i][0] + gl.arange(
            0, OPTIONS.pieces[0][i][1], layout=gl.SliceLayout(1, L)
        )
        mask = (rows < OPTIONS.hidden[0])[:, None] & inside[None, :]
        offsets = rows[:, None] * OPTIONS.width + column[None, :]
        of_k = gl.load(of_k_ptr + offsets, mask=mask, other=0.0)
        products = gl.load(products_ptr + offsets, mask=mask, other=0.0)
        buffers.first[i].store(packed_fma(products, q[None, :], of_k))


@gluon.jit
def _of_columns(vector, z):
    """A vector in shared memory as a row [1, n] beside z."""
    return vector.load(gl.SliceLayout(0, z.type.layout))[None, :]


@gluon.jit
def _plus(z, vector):
    """z plus a vector in shared memory."""
    return z + _of_columns(vector, z)


@gluon.jit
def _relu16(z):
    """ReLU of z, rounded to bf16: one instruction for two numbers."""
    return gl.inline_asm_elementwise(
        "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f", [z],
        dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _prelu(z, x, slope):
    """x where z > 0, otherwise slope x: PReLU of z if x is z, and its gradient. The compiler makes
    three instructions of a selection, here it is two."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.f32 p, $1, 0f00000000; mov.f32 $0, $2; @!p mul.f32 $0, $2, $3; }",
        "=&f,f,f,f", [z, x, slope], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _activate(z, buffers, LAYER: gl.constexpr, i: gl.constexpr, ACTIVATION, OPTIONS: gl.constexpr):
    """h of a piece of a layer; with Dice of the last layer, w h."""
    if not has_table(OPTIONS.units):
        return ACTIVATION(z, 1.0)[0] * OPTIONS.factors[0]
    else:
        vectors = buffers.tables[LAYER]
        first = _of_columns(vectors[0][i], z)
        if OPTIONS.units == "prelu":
            return _prelu(z, z, first)
        else:
            t = _plus(z * _of_columns(vectors[2][i], z), vectors[3][i])
            return z * (first + _of_columns(vectors[1][i], z) * _fast_tanh(t))


@gluon.jit
def _weighted(x, buffers, i: gl.constexpr, ACTIVATION, OPTIONS: gl.constexpr):
    """w h of a piece of the last layer, where x is h1 W2ᵀ. With PReLU it is less by w b2, which is
    the same for all events: z = x + b2 is slope z + (1 - slope) (max(x, -b2) + b2)."""
    bias = _of_columns(buffers.bias[i], x)
    if OPTIONS.units == "prelu":
        vectors = buffers.tables[1]
        c0, c1 = _of_columns(vectors[0][i], x), _of_columns(vectors[1][i], x)
        return c0 * x + c1 * gl.maximum(x, bias)
    elif OPTIONS.units == "dice":
        return _activate(x + bias, buffers, 1, i, ACTIVATION, OPTIONS)
    else:
        h = _activate(x + bias, buffers, 1, i, ACTIVATION, OPTIONS)
        return h * _of_columns(buffers.weight[i], x)


@gluon.jit
def _load_events(k_desc, buffers, row, step, wanted):
    """Start to load the tile of events from a row on, if wanted."""
    stage = step % STAGES
    mbarrier.expect(buffers.full.index(stage), k_desc.block_type.nbytes, pred=wanted)
    load_tile(
        k_desc, [row.to(gl.int32), 0], buffers.full.index(stage), buffers.k.index(stage),
        pred=wanted,
    )  # fmt: skip


@gluon.jit
def _load_missing(k_desc, buffers, seen, step, missing):
    """Start to load the first tiles of a row, of which only `missing` were not."""
    for i in gl.static_range(AHEAD):
        wanted = (i < missing) & (end_of(seen) > BLOCK * i)
        _load_events(k_desc, buffers, find_tile(seen, BLOCK * i)[0], step + i, wanted)


@gluon.jit
def _wait(mmas, PENDING: gl.constexpr):
    """The results of all MMAs but the last PENDING, as a tuple."""
    if len(mmas) == 1:
        return (warpgroup_mma_wait(PENDING, deps=mmas),)
    else:
        return warpgroup_mma_wait(PENDING, deps=mmas)


@gluon.jit
def _start_first(buffers, step, num_rows):
    """Start z1 of a tile with num_rows events of the segment, once it is loaded."""
    stage = step % STAGES
    mbarrier.wait(buffers.full.index(stage), step // STAGES & 1)
    if num_rows < BLOCK:
        zero_rows(buffers.k.index(stage), num_rows, 0, 1)
    z = ()
    for i in gl.static_range(len(buffers.first)):
        z = z + (mma_abt(buffers.k.index(stage), buffers.first[i]),)
    return z


@gluon.jit
def _start_second(h, second, FIRST: gl.constexpr, UNITS: gl.constexpr):
    """Start z2 of some units of the second layer, and its operands in registers."""
    operands = (to_mma_operand(h[0], second[0].dtype, UNITS),)
    z = mma_abt(operands[0], second[0].slice(FIRST, UNITS, 0))
    for i in gl.static_range(1, len(h)):
        operands = operands + (to_mma_operand(h[i], second[0].dtype, UNITS),)
        z = mma_abt(operands[i], second[i].slice(FIRST, UNITS, 0), z)
    return z, operands


@gluon.jit
def _split(z, OPTIONS: gl.constexpr):
    """The pieces of z2, of an MMA's columns: registers of the same thread."""
    if len(OPTIONS.pieces[1]) == 1:
        return (z,)
    else:
        left, right = halves(z)
        return left, _narrow(right, OPTIONS.pieces[1][1][1])


@gluon.jit
def _narrow(x, COLUMNS: gl.constexpr):
    """The first columns of x."""
    if x.shape[1] == COLUMNS:
        return x
    else:
        return _narrow(halves(x)[0], COLUMNS)


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
            piece = _relu16(_plus(z[i], buffers.a[i]))
        else:
            piece = _activate(_plus(z[i], buffers.a[i]), buffers, 0, i, ACTIVATION, OPTIONS)
        h = h + (piece,)
    z2, operands = (), ()
    for j in gl.static_range(SECOND):
        part, used = _start_second(
            h, buffers.second, OPTIONS.pieces[1][j][0], OPTIONS.pieces[1][j][1]
        )
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
    _load_events(k_desc, buffers, row, ahead, wanted)  # its barriers come while MMAs run
    if NEXT:
        done = warpgroup_mma_wait(0, deps=next_z + (acc,))
        return done[:FIRST], Sums(done[FIRST], largest, total)
    else:
        return (), Sums(warpgroup_mma_wait(0, deps=(acc,)), largest, total)


@safe_ptxas
@gluon.jit(do_not_specialize=["num_rows", "num_segments"])
def din_fwd_hopper_kernel(
    k_desc, operands, strides, weights, biases, tables, results, users, costs_ptr,
    num_rows, num_segments, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Each program has a share of the rows of q, and every num_programs-th row behind the last
    segment. costs: of din_costs_kernel. results: as in triton_forward.py."""
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    DTYPE: gl.constexpr = k_desc.dtype
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COPIES, BLOCK], DTYPE)
    buffers = Buffers(
        gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, WIDTH], k_desc.layout),
        make_barriers(STAGES, 1),
        _make_first(DTYPE, WIDTH, OPTIONS),
        _make_second(weights[1], OPTIONS),
        gl.allocate_shared_memory(DTYPE, [2, COPIES, BLOCK], P),
        _make_vectors(0, OPTIONS),
        _make_vectors(1, OPTIONS),
        _make_vectors(1, OPTIONS),
        _make_tables(tables, weights[2], OPTIONS),
    )
    bias, weight = _load_pieces(biases[0], 1, OPTIONS), _load_pieces(weights[2], 1, OPTIONS)
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
    first, end, user = _find_share(costs_ptr, users, num_segments)
    next_seen, user = _find_seen(first, end, user, num_segments, users, OPTIONS)
    for row in range(first, end):
        seen = next_seen
        _load_missing(k_desc, buffers, seen, step, missing)
        next_seen, user = _find_seen(row + 1, end, user, num_segments, users, OPTIONS)
        missing = num_missing(seen, BLOCK)
        sums = Sums(
            gl.zeros([WIDTH, COPIES], gl.float32, L),
            float("-inf"),
            gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, L)),
        )
        if end_of(seen) > 0:
            q_ptr = operands.q + row * (strides[0] * OPTIONS.align)
            _store_first(buffers, q_ptr, operands.of_k, weights[0], OPTIONS)
            a_ptr = operands.a + row * (strides[2] * OPTIONS.align)
            _store_vectors(buffers.a, _load_pieces(a_ptr, 0, OPTIONS))
            fence_async_shared()
            thread_barrier()
            z = _wait(_start_first(buffers, step, find_tile(seen, 0)[1]), 0)
            while end_of(seen) > BLOCK:
                z, sums = _tile(
                    z, sums, k_desc, buffers, last_bias, seen, next_seen, step,
                    True, ACTIVATION, OPTIONS,
                )  # fmt: skip
                seen = without_tile(seen, BLOCK)
                step += 1
            _, sums = _tile(
                z, sums, k_desc, buffers, last_bias, seen, next_seen, step,
                False, ACTIVATION, OPTIONS,
            )  # fmt: skip
            step += 1
            thread_barrier()  # every warp has read what the next row writes
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
    behind = gl.load(users.q_offsets + num_segments).to(gl.int64)
    for row in range(behind + gl.program_id(0), num_rows, gl.num_programs(0)):
        zeros = gl.zeros([WIDTH, COPIES], results[0].dtype.element_ty, L)
        ptrs = results[0] + row * OPTIONS.width + units + columns * 0
        gl.store(ptrs, zeros, mask=(columns == 0) & (units < OPTIONS.width))
