"""Backward of DIN's attention for Hopper, where v is k: gradients of rows of q and of the MLP.

    S = Kᵀ dz1 of a row of q:  dBᵀ = Σ S,  dDᵀ = Σ S ∘ q,  dq = Σ_units S ∘ Dᵀ,  da = Σ dz1
    dW2 = Σ dz2ᵀ h1,  dw = Σ ds h2,  db2 = Σ dz2,  db3 = Σ ds

dz1, dz2 and ds as in hopper_gradients.py. Two launches: the sums of both lines would take more
registers than there are.

Warps           no specialisation: four warps compute one row of q after another; two thread blocks
                an SM
Tiles           those of hopper_forward.py
MMAs            z1, do · k: k from shared memory. z2, dh1: from registers. S and dW2: both operands
                from shared memory; their sums stay in registers, S for a row of q
Barriers        as hopper_forward.py; a stage of k is filled again once S of its tile is done
Shared memory   in KiB, and less than 3 for vectors and barriers, at E = 64, hidden (80, 40):
                rows: 104 = k 4 x 8 + M and do 12 + W2 10 + dz1 10 + sums of S and S ∘ q 40
                MLP:   72 = k 4 x 8 + M and do 12 + W2 10 + h1 10 + dz2 8
Registers       255 a thread. What is spilled is not read in the loop over tiles: it would come from
                L2, as shared memory leaves little L1. With 168, three blocks took twice the time

Order of a tile (`_tile`): h1; start z2; wait for it and for the sums of the tile before; dz2; start
dh1 and wait for it; dz1; start z1 of the next tile, and the sums, which run during its h1.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.gluon_api import thread_barrier
from ..common.pipeline import make_barriers, mma_layout
from ..common.ptxas import safe_ptxas
from .accumulators import partial_sums
from .hopper_gradients import (
    Given,
    Net,
    add_to_table,
    beside,
    first_layer,
    last_layer,
    make_net,
    make_rows,
    places,
    start_back,
    start_scores,
    start_second,
    store_row,
    store_table,
    store_totals,
    through,
    zero_piece,
    zero_pieces,
    zero_table,
    zero_vectors,
)
from .hopper_parts import (
    BLOCK,
    COPIES,
    STAGES,
    find_next_seen,
    load_events,
    load_missing,
    make_matrix,
    wait,
    wait_for_events,
    walk_tiles,
)
from .walk import AHEAD, end_of, find_tile, find_tile_ahead, num_missing


class Buffers(NamedTuple):
    """Shared memory. k `[STAGES, 64, E]`, their barriers, a Net, pieces of dz1 `[64, n]`, or (MLP)
    one of dz2 `[64, 64]`, pieces of h1 `[64, n]`, or of the sums of S ∘ q and S, `[2, E, n]`."""

    k: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    net: Net
    dz: gl.tuple
    h: gl.tuple
    total: gl.tuple


class Sums(NamedTuple):
    """Of a row of q pieces of S `[E, n]` and of da: products, bias. Or (MLP) of a program pieces of
    dW2 `[64, n]`, of db2 and dw, and db3. table: of the first layer, or (MLP) of the second. All
    but MMAs' results are `partial_sums`."""

    products: gl.tuple
    bias: gl.tuple
    last: gl.tuple
    last_bias: gl.tensor
    table: gl.tuple


@gluon.jit
def _start_tile(buffers, row, step, num_rows, OPTIONS: gl.constexpr):
    """start_scores of a tile with num_rows events of the segment, once it is loaded."""
    return start_scores(wait_for_events(buffers, step, num_rows), row, OPTIONS)


@gluon.jit
def _tile(
    started, sums, k_desc, buffers, row, seen, next_seen, step,
    NEXT: gl.constexpr, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """What `_start_tile` starts for the next tile, if there is one (NEXT), and the sums with this
    tile's, the first one of `seen`. The sums' MMAs may be under way."""
    FIRST: gl.constexpr = len(OPTIONS.pieces[0])
    MLP: gl.constexpr = OPTIONS.only == 1
    L: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK, COPIES))
    real = gl.arange(0, BLOCK, layout=L) < find_tile(seen, 0)[1]
    net = buffers.net
    layers = first_layer(started, row, net, ACTIVATION, OPTIONS)
    z2 = start_second(layers.h1, net)
    done = warpgroup_mma_wait(0, deps=z2 + sums.products)
    products = done[len(done) - FIRST :]
    found = last_layer(done[0], layers.dots, real, row, net, ACTIVATION, OPTIONS)
    thread_barrier()  # all warps have waited for the sums' MMAs, which read what follows
    bias, last, of_table = (), (), found.of_table
    if MLP:
        for j in gl.static_range(len(found.dz2)):
            bias = bias + (sums.bias[j] + partial_sums(found.dz2[j]),)
            ds = beside(found.ds, found.h2[j])
            last = last + (sums.last[j] + partial_sums(found.h2[j] * ds),)
            units = buffers.dz[0].slice(OPTIONS.pieces[1][j][0], OPTIONS.pieces[1][j][1], 1)
            units.store(found.dz2[j].to(gl.bfloat16))
        for i in gl.static_range(FIRST):
            buffers.h[i].store(layers.h1[i])
    else:
        dh, operands = start_back(found.dz2, net, OPTIONS)
        dh, of_table = warpgroup_mma_wait(0, deps=dh + operands), ()
        for i in gl.static_range(FIRST):
            dz, more = through(dh[i], layers.kept1[i], real, net, 0, i, ACTIVATION, OPTIONS)
            bias, of_table = bias + (sums.bias[i] + partial_sums(dz),), of_table + (more,)
            buffers.dz[i].store(dz.to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    started = ()
    if NEXT:
        started = _start_tile(buffers, row, step + 1, find_tile(seen, BLOCK)[1], OPTIONS)
    added = ()
    for i in gl.static_range(FIRST):
        if MLP:
            left, right = buffers.dz[0], buffers.h[i]
        else:
            left, right = buffers.k.index(step % STAGES), buffers.dz[i]
        product = warpgroup_mma(left.permute((1, 0)), right, products[i], is_async=True)
        added = added + (product,)
    # the stage of the tile before, whose sums all warps have waited for
    ahead_row, ahead, wanted = find_tile_ahead(seen, next_seen, step, BLOCK)
    load_events(k_desc, buffers, ahead_row, ahead, wanted)
    if NEXT:
        started = wait(started, FIRST)
    else:
        added = wait(added, 0)
    table = add_to_table(sums.table, of_table)
    return started, Sums(added, bias, last, sums.last_bias + found.ds, table)


@gluon.jit
def _make_total(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros `[2, ROWS, COLUMNS]`, of which a warp reads and writes 8 rows of 32 bytes at once."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, COLUMNS // 8), [1, 0])
    total = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLUMNS], SHARED)
    for i in gl.static_range(2):
        total.index(i).store(zero_piece(ROWS, COLUMNS))
    return total


@gluon.jit
def _finish_row(sums, buffers, given, row, OPTIONS: gl.constexpr):
    """Store dq and da of a row, and add S ∘ q and S to the program's."""
    operands, strides, weights, gradients = given
    WIDTH: gl.constexpr = sums.products[0].shape[0]
    L: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK, COPIES))
    dq = gl.zeros([WIDTH], gl.float32, L)
    for i in gl.static_range(len(sums.products)):
        products = sums.products[i]
        e, unit = places(products, OPTIONS.pieces[0][i][0])
        mask = (e < OPTIONS.width) & (unit < OPTIONS.hidden[0])
        weight = gl.load(weights[0] + unit * OPTIONS.width + e, mask=mask, other=0.0)
        part = gl.sum(products * weight.to(gl.float32), 1)
        dq += gl.convert_layout(part, L, assert_trivial=True)
        q_ptr = operands.q + row * (strides[0] * OPTIONS.align)
        q = gl.load(q_ptr + e, mask=e < OPTIONS.width, other=0.0).to(gl.float32)
        for j in gl.static_range(2):
            total = buffers.total[i].index(j)
            more = products * q if j == 0 else products
            total.store(total.load(products.type.layout) + more)
    e = gl.arange(0, WIDTH, layout=L)
    dq_ptr = gradients[3] + row * OPTIONS.width
    gl.store(dq_ptr + e, dq.to(dq_ptr.dtype.element_ty), mask=e < OPTIONS.width)
    store_totals(gradients[4] + row * OPTIONS.hidden[0], sums.bias, 0, OPTIONS)


@safe_ptxas
@gluon.jit(do_not_specialize=["num_rows", "num_segments"])
def din_bwd_rows_hopper_kernel(
    k_desc, operands, strides, weights, biases, tables, gradients, users,
    num_rows, num_segments, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Each program has every num_programs-th row of q.

    gradients: do, lse, delta. OPTIONS.only = 0: then dq, da, and each program's part of dDᵀ and dBᵀ
    `[2, E, H1]` and of the sums `[3, H1]` of the first table. OPTIONS.only = 1: then its part of
    dW2ᵀ `[H1, H2]`, dw, db2 and db3 in this order, and of the sums `[3, H2]` of the second table.
    """
    MLP: gl.constexpr = OPTIONS.only == 1
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    DTYPE: gl.constexpr = k_desc.dtype
    ROWS: gl.constexpr = BLOCK if MLP else WIDTH  # of products
    dz, h, last, total = (), (), (), ()
    for i in gl.static_range(len(OPTIONS.pieces[0])):
        piece = make_matrix(DTYPE, BLOCK, OPTIONS.pieces[0][i][1])
        if MLP:
            h = h + (piece,)
        else:
            dz = dz + (piece,)
            total = total + (_make_total(WIDTH, OPTIONS.pieces[0][i][1]),)
    if MLP:
        dz, last = (make_matrix(DTYPE, BLOCK, BLOCK),), zero_vectors(1, OPTIONS)
        dz[0].store(gl.zeros([BLOCK, BLOCK], DTYPE, mma_layout(BLOCK, BLOCK)))
    buffers = Buffers(
        gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, WIDTH], k_desc.layout),
        make_barriers(STAGES, 1), make_net(weights, biases, tables, OPTIONS), dz, h, total,
    )  # fmt: skip
    rows, given = make_rows(1, DTYPE, WIDTH, OPTIONS), Given(operands, strides, weights, gradients)
    last_bias = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, mma_layout(BLOCK, COPIES)))
    sums = Sums(
        zero_pieces(ROWS, 0, OPTIONS), zero_vectors(OPTIONS.only, OPTIONS), last, last_bias,
        zero_table(OPTIONS.only, OPTIONS),
    )  # fmt: skip
    step, missing = 0, AHEAD
    next_seen = find_next_seen(gl.program_id(0), num_rows, num_segments, users, OPTIONS)
    for number in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        seen = next_seen
        load_missing(k_desc, buffers, seen, step, missing)
        next_row = number + gl.num_programs(0)
        next_seen = find_next_seen(next_row, num_rows, num_segments, users, OPTIONS)
        missing = num_missing(seen, BLOCK)
        number = number.to(gl.int64)
        if not MLP:
            sums = Sums(
                zero_pieces(ROWS, 0, OPTIONS), zero_vectors(0, OPTIONS), (), last_bias, sums.table
            )
        if end_of(seen) > 0:
            row = store_row(rows, 0, number, given, OPTIONS)
            fence_async_shared()
            thread_barrier()
            started = wait(_start_tile(buffers, row, step, find_tile(seen, 0)[1], OPTIONS), 0)
            sums, step = walk_tiles(
                _tile, step, seen, next_seen, sums, started, k_desc, buffers, row,
                ACTIVATION, OPTIONS,
            )  # fmt: skip
        if not MLP:
            _finish_row(sums, buffers, given, number, OPTIONS)
    if MLP:
        _store_mlp(gradients[3], sums, OPTIONS)
    else:
        _store_first_linear(gradients[5], buffers, OPTIONS)
    if len(sums.table) > 0:
        store_table(gradients[4 if MLP else 6], sums.table, tables, OPTIONS.only, OPTIONS)


@gluon.jit
def _store_first_linear(ptr, buffers, OPTIONS: gl.constexpr):
    """Store the program's parts of dDᵀ and dBᵀ."""
    SIZE: gl.constexpr = OPTIONS.width * OPTIONS.hidden[0]
    ptr += gl.program_id(0).to(gl.int64) * (2 * SIZE)
    for i in gl.static_range(len(buffers.total)):
        for j in gl.static_range(2):
            total = buffers.total[i].index(j).load(mma_layout(BLOCK, OPTIONS.pieces[0][i][1]))
            e, unit = places(total, OPTIONS.pieces[0][i][0])
            mask = (e < OPTIONS.width) & (unit < OPTIONS.hidden[0])
            gl.store(ptr + j * SIZE + e * OPTIONS.hidden[0] + unit, total, mask=mask)


@gluon.jit
def _store_mlp(ptr, sums, OPTIONS: gl.constexpr):
    """Store the program's parts of dW2ᵀ, dw, db2 and db3."""
    UNITS: gl.constexpr = OPTIONS.hidden[1]
    SIZE: gl.constexpr = OPTIONS.hidden[0] * UNITS
    ptr += gl.program_id(0) * (SIZE + 2 * UNITS + 1)
    for i in gl.static_range(len(sums.products)):
        unit, first = places(sums.products[i], OPTIONS.pieces[0][i][0])
        mask = (unit < UNITS) & (first < OPTIONS.hidden[0])
        gl.store(ptr + first * UNITS + unit, sums.products[i], mask=mask)
    store_totals(ptr + SIZE, sums.last, 1, OPTIONS)
    store_totals(ptr + SIZE + UNITS, sums.bias, 1, OPTIONS)
    gl.store(ptr + SIZE + 2 * UNITS, gl.sum(sums.last_bias, 0))
