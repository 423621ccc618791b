"""Forward kernels of DIN's attention: weighted sums of events, and moments of hidden units.

Each program has every num_programs-th row of q, and walks over the blocks of its events.
"""

import triton
import triton.language as tl

from ..common.ptxas import safe_ptxas
from .accumulators import store_pieces, zero_vectors, zeros
from .mlp import (
    activate,
    first_layer,
    load_block,
    load_keys,
    load_mlp,
    load_query,
    load_vector,
    of_query,
    reread,
    scores,
    second_layer,
)

ROWS = tl.constexpr(16)  # the smallest side of an MMA


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def din_fwd_kernel(
    operands, strides, weights, biases, tables, results, users,
    num_rows, num_segments, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """results: out `[R, Ev]` = p v, and the scores' log-sum-exp `[R]`.

    The sums over a block of events are an MMA, whose rows are all the row of q.
    """
    mlp = load_mlp(weights, biases, tables, OPTIONS)
    copies, columns = tl.arange(0, ROWS), tl.arange(0, OPTIONS.block_v)
    mask = (copies == 0)[:, None] & (columns < OPTIONS.v_width)[None, :]
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        keys = load_keys(row, users, num_segments, OPTIONS)
        row = tl.cast(row, tl.int64)
        q, a = load_query(operands, strides, row, OPTIONS)
        of_row = of_query(mlp, q, a, operands, weights, OPTIONS)
        acc = zeros(ROWS, OPTIONS.block_v)
        running_max, running_sum = float("-inf"), 0.0
        for start in range(0, keys.end, OPTIONS.block):
            events = load_block(operands, strides, keys, start, OPTIONS)
            p = scores(events, reread(of_row, start), ACTIVATION, OPTIONS).s
            if OPTIONS.softmax:
                p = tl.where(events.real, p, float("-inf"))
                new_max = tl.maximum(running_max, tl.max(p, 0))
                p, rescale = tl.exp(p - new_max), tl.exp(running_max - new_max)
                running_sum, running_max = running_sum * rescale + tl.sum(p, 0), new_max
                acc *= rescale
            # where events are not real v is 0
            p = tl.broadcast_to(p.to(events.v.dtype)[None, :], [ROWS, OPTIONS.block])
            acc = tl.dot(p, events.v, acc, input_precision=OPTIONS.precision)
        if OPTIONS.softmax:
            running_sum = tl.where(running_sum > 0, running_sum, 1.0)  # rows without events
            acc /= running_sum
            tl.store(results[1] + row, running_max + tl.log(running_sum))
        ptrs = results[0] + row * OPTIONS.v_width + copies[:, None] * 0 + columns[None, :]
        tl.store(ptrs, acc.to(results[0].dtype.element_ty), mask=mask)


@safe_ptxas
@triton.jit
def din_units_kernel(tables, units, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of a Unit `[9, H]` of each layer's table `[7, H]`, for Dice. They are the same for
    all pairs."""
    for layer in tl.static_range(len(tables)):
        _store_unit_rows(tables[layer], units[layer], HIDDEN[layer], BLOCK)


@triton.jit
def _store_unit_rows(table, unit, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    rows = ()
    for row in tl.static_range(7):
        rows = rows + (load_vector(table + row * SIZE, 0, SIZE, BLOCK),)
    slope, mean, rstd, weight, bias, d0, d1 = rows
    rest, scale, d1 = 1.0 - slope, weight * rstd, d1 * rstd
    half = 0.5 * scale  # the fast sigmoid takes half of its argument
    shift, d0 = 0.5 * bias - mean * half, d0 - mean * d1
    rows = slope, rest, mean, rstd, half, shift, rest * scale, d0, d1
    columns = tl.arange(0, BLOCK)
    for row in tl.static_range(9):
        tl.store(unit + row * SIZE + columns, rows[row], mask=columns < SIZE)


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def din_moments_kernel(
    operands, strides, weights, biases, tables, parts_ptr, users,
    num_rows, num_segments, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Number of pairs, mean, and sum of squared deviations from it, of z of the hidden layer
    OPTIONS.only: a part `[3, H]` of each program.

    A block's moments are joined to those of the blocks before (Chan et al. 1979): a difference of
    sums of z² and of z would lose digits.
    """
    mlp = load_mlp(weights, biases, tables, OPTIONS)
    count = 0.0
    mean, squares = zero_vectors(OPTIONS.only, OPTIONS), zero_vectors(OPTIONS.only, OPTIONS)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        keys = load_keys(row, users, num_segments, OPTIONS)
        q, a = load_query(operands, strides, tl.cast(row, tl.int64), OPTIONS)
        of_row = of_query(mlp, q, a, operands, weights, OPTIONS)
        for start in range(0, keys.end, OPTIONS.block):
            events = load_block(operands, strides, keys, start, OPTIONS)
            again = reread(of_row, start)
            z = first_layer(events, again, OPTIONS)
            if OPTIONS.only == 1:
                h = activate(z, again, 0, ACTIVATION, OPTIONS)
                z = second_layer(h, again, events.k.dtype, OPTIONS)
            number = tl.minimum(keys.end - start, OPTIONS.block).to(tl.float32)
            mean, squares = _joined(mean, squares, count, z, events.real, number, OPTIONS)
            count += number
    units: tl.constexpr = OPTIONS.hidden[OPTIONS.only]
    parts_ptr += tl.program_id(0) * (3 * units)
    counts = ()
    for i in tl.static_range(len(mean)):
        counts = counts + (mean[i] * 0.0 + count,)
    store_pieces(parts_ptr, counts, OPTIONS.only, OPTIONS)
    store_pieces(parts_ptr + units, mean, OPTIONS.only, OPTIONS)
    store_pieces(parts_ptr + 2 * units, squares, OPTIONS.only, OPTIONS)


@triton.jit
def _joined(mean, squares, count, z, real, number, OPTIONS: tl.constexpr):
    """Mean and sum of squared deviations of `count` pairs, joined with those of a block of `number`
    more."""
    means, sums = (), ()
    for i in tl.static_range(len(z)):
        of_block = tl.sum(tl.where(real[:, None], z[i], 0.0), 0) / number
        deviations = tl.where(real[:, None], z[i] - of_block[None, :], 0.0)
        difference = of_block - mean[i]
        share = number / (count + number)
        means = means + (mean[i] + difference * share,)
        between = difference * difference * (count * share)
        sums = sums + (squares[i] + tl.sum(deviations * deviations, 0) + between,)
    return means, sums
