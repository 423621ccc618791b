"""Backward of DIN's attention for Hopper, where v is k: gradients of events.

    dk = Σ (dz1 M + p doᵀ)  over the rows of q of the events' user

dz1 and p as in hopper_gradients.py.

Warps           no specialisation: four warps compute a tile of 64 events for one row of q after
                another; two thread blocks an SM
MMAs            z1, do · k: k from shared memory. z2, dh1, dk: from registers, dk with p as one more
                unit
Barriers        one for the TMA of k
Shared memory   in KiB, and less than 3 for vectors and barriers, at E = 64, hidden (80, 40):
                42 = k 8 + M and do of two rows 24 + W2 10
Registers       255 a thread

Order of a row (`_row`): h1; start z2; wait for it and for dk of the row before; dz2; start dh1;
store M of the next row; wait for dh1; dz1; start z1 of the next row, and dk, which runs during its
h1.
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
from ..common.pipeline import make_barriers, mma_layout, to_mma_operand, zero_rows
from ..common.ptxas import safe_ptxas
from .hopper_gradients import (
    Given,
    Net,
    beside,
    do_rows,
    first_layer,
    last_layer,
    make_net,
    make_rows,
    places,
    start_back,
    start_scores,
    start_second,
    store_row,
    through,
    zero_piece,
)
from .hopper_parts import BLOCK, COPIES, find_user, make_matrix, wait
from .queries import load_queries


class Tile(NamedTuple):
    """A tile of events in shared memory `[64, E]`, the first one's index in its segment, and the
    numbers of rows of q and of events of its user. net: of all tiles."""

    k: gl.shared_memory_descriptor
    start: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    net: Net


@gluon.jit
def _number(i, queries, OPTIONS: gl.constexpr):
    """The user's row of q of a round of a loop over its Queries."""
    if OPTIONS.mask is None:
        return i
    else:
        return masked_block(i, queries.rows)


@gluon.jit
def _sees(tile, number, queries, OPTIONS: gl.constexpr):
    """Which events of the tile a user's row of q sees."""
    MASK: gl.constexpr = OPTIONS.mask
    L: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK, COPIES))
    event = tile.start + gl.arange(0, BLOCK, layout=L)
    real = event < tile.kv_len
    if MASK is not None:
        column = number + tile.kv_len - tile.q_len
        bounds = visible_columns(column, queries.first_target, MASK)
        real = real & is_visible(event, column, bounds, MASK)
    return real


@safe_ptxas
@gluon.jit(do_not_specialize=["num_segments"])
def din_bwd_events_hopper_kernel(
    k_desc, operands, strides, weights, biases, tables, gradients, users,
    num_segments, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Each program has a tile of events of one user. gradients: do, lse, delta, dk."""
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    DTYPE: gl.constexpr = k_desc.dtype
    index = gl.program_id(0)
    user = find_user(index, users.kv_offsets, num_segments, 6)
    kv_start, kv_len = load_segment(users.kv_offsets, user)
    start = ((index - (kv_start >> 6) - user) << 6).to(gl.int32)
    if start >= kv_len:
        return
    q_start, q_len = load_segment(users.q_offsets, user)
    queries = load_queries(user, users, start, q_len, kv_len, OPTIONS)
    net = make_net(weights, biases, tables, OPTIONS)
    tile = Tile(make_matrix(DTYPE, BLOCK, WIDTH), start, q_len, kv_len, net)
    loaded = make_barriers(1, 1)
    mbarrier.expect(loaded.index(0), k_desc.block_type.nbytes)
    load_tile(k_desc, [(kv_start + start).to(gl.int32), 0], loaded.index(0), tile.k)
    rows, given = make_rows(2, DTYPE, WIDTH, OPTIONS), Given(operands, strides, weights, gradients)
    dk = zero_piece(BLOCK, WIDTH)
    if queries.count > 0:
        number = _number(0, queries, OPTIONS)
        row = store_row(rows, 0, q_start + number, given, OPTIONS)
        mbarrier.wait(loaded.index(0), 0)
        if kv_len - start < BLOCK:
            zero_rows(tile.k, kv_len - start, 0, 1)
        fence_async_shared()
        thread_barrier()
        started = wait(start_scores(tile.k, row, OPTIONS), 0)
        acc = warpgroup_mma_init(dk)
        for i in range(0, queries.count - 1):
            following = _number(i + 1, queries, OPTIONS)
            real = _sees(tile, number, queries, OPTIONS)
            started, acc, row = _row(
                started, acc, row, real, tile, rows, i + 1 & 1, given, q_start + following,
                True, ACTIVATION, OPTIONS,
            )  # fmt: skip
            number = following
        real = _sees(tile, number, queries, OPTIONS)
        nothing, dk, row = _row(
            started, acc, row, real, tile, rows, 0, given, q_start, False, ACTIVATION, OPTIONS,
        )  # fmt: skip
    event, column = places(dk, 0)
    ptrs = gradients[3] + (kv_start + start + event) * OPTIONS.width + column
    mask = (event < kv_len - start) & (column < OPTIONS.width)
    gl.store(ptrs, dk.to(DTYPE), mask=mask)


@gluon.jit
def _row(
    started, dk, row, real, tile, rows, slot, given, following,
    NEXT: gl.constexpr, ACTIVATION: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """What `start_scores` starts for the following row of q, if there is one (NEXT), dk with this
    row's, whose MMAs may be under way, and the following Row, which is stored in a slot of rows."""
    WIDTH: gl.constexpr = tile.k.shape[1]
    FIRST: gl.constexpr = len(OPTIONS.pieces[0])
    net = tile.net
    layers = first_layer(started, row, net, ACTIVATION, OPTIONS)
    z2 = start_second(layers.h1, net)
    done = warpgroup_mma_wait(0, deps=z2 + (dk,))
    dk = done[len(done) - 1]
    found = last_layer(done[0], layers.dots, real, row, net, ACTIVATION, OPTIONS)
    dh, operands1 = start_back(found.dz2, net, OPTIONS)
    new = row
    if NEXT:
        thread_barrier()  # all warps have waited for the MMAs that read the following row's slot
        new = store_row(rows, slot, following, given, OPTIONS)
        fence_async_shared()
        thread_barrier()
    dh, dz1 = warpgroup_mma_wait(0, deps=dh + operands1), ()
    for i in gl.static_range(FIRST):
        dz, unused = through(dh[i], layers.kept1[i], real, net, 0, i, ACTIVATION, OPTIONS)
        dz1 = dz1 + (to_mma_operand(dz, gl.bfloat16, WIDTH),)
    started = ()
    if NEXT:
        started = start_scores(tile.k, new, OPTIONS)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, mma_layout(BLOCK, 16)))[None, :]
    p = gl.where(column == 0, beside(found.p, zero_piece(BLOCK, 16)), 0.0)
    p = to_mma_operand(p, gl.bfloat16, WIDTH)
    dk = warpgroup_mma(p, do_rows(row, OPTIONS).slice(0, 16, 0), dk, is_async=True)
    for i in gl.static_range(FIRST):
        m = row.first[i].slice(0, OPTIONS.pieces[0][i][1], 0)
        dk = warpgroup_mma(dz1[i], m, dk, is_async=True)
    if NEXT:
        started = wait(started, FIRST + 1)
    else:
        dk = warpgroup_mma_wait(0, deps=(dk, p) + dz1)[0]
    return started, dk, new
