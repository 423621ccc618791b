"""Forward kernels of DIN's attention: weighted sums of events, and moments of hidden units."""

import triton
import triton.language as tl

from ..common.loads import find_segment, find_tile, load_segment, log2, store_matrix
from ..common.ptxas import safe_ptxas
from .mlp import (
    activate,
    first_layer,
    load_events,
    load_mlp,
    load_query,
    scores,
    second_layer,
    store_pieces,
    zero_vector,
    zero_vectors,
    zeros,
)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def din_fwd_kernel(
    operands, strides, weights, biases, tables, out_ptr, lse_ptr, q_offsets_ptr, kv_offsets_ptr,
    num_segments, ACTIVATION: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """out `[R, Ev]` = p v, and the scores' log-sum-exp `[R]`.

    A program has a group of rows of q of one user, and loads each block of events once for all of
    them. Their scores are columns of a tile, so that the sums over the events are one MMA.
    """
    user, q_start, q_len, row = find_tile(
        tl.program_id(0), q_offsets_ptr, num_segments, log2(OPTIONS.group)
    )
    if row >= q_len:
        return
    kv_start, kv_len = load_segment(kv_offsets_ptr, user)
    mlp = load_mlp(weights, biases, tables, OPTIONS)
    columns = tl.arange(0, OPTIONS.group)
    acc = zeros(OPTIONS.group, OPTIONS.block_v)
    running_max = zero_vector(OPTIONS.group) - float("inf")
    running_sum = zero_vector(OPTIONS.group)
    for start in range(0, kv_len, OPTIONS.block):
        events = load_events(operands, strides, kv_start + start, kv_len - start, OPTIONS)
        p = zeros(OPTIONS.block, OPTIONS.group)
        for i in range(0, tl.minimum(q_len - row, OPTIONS.group)):
            q, a = load_query(operands, strides, q_start + row + i, OPTIONS)
            s = scores(q, a, events, mlp, ACTIVATION, OPTIONS).s
            p = tl.where((columns == i)[None, :], s[:, None], p)
        if OPTIONS.softmax:
            p = tl.where(events.real[:, None], p, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(p, 0))
            p, rescale = tl.exp(p - new_max[None, :]), tl.exp(running_max - new_max)
            running_sum, running_max = running_sum * rescale + tl.sum(p, 0), new_max
            acc *= rescale[:, None]
        # behind the last event v is 0
        acc = tl.dot(
            tl.trans(p.to(events.v.dtype)), events.v, acc, input_precision=OPTIONS.precision
        )
    if OPTIONS.softmax:
        running_sum = tl.where(running_sum > 0, running_sum, 1.0)  # rows without events
        acc /= running_sum[:, None]
        lse = running_max + tl.log(running_sum)
        tl.store(lse_ptr + q_start + row + columns, lse, mask=row + columns < q_len)
    out_ptr += q_start * OPTIONS.v_width
    store_matrix(out_ptr, row, 0, OPTIONS.v_width, acc, q_len, OPTIONS.v_width)


@safe_ptxas
@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def din_moments_kernel(
    operands, strides, weights, biases, tables, parts_ptr, q_offsets_ptr, kv_offsets_ptr,
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
        user = find_segment(row, q_offsets_ptr, num_segments, 0, False)
        kv_start, kv_len = load_segment(kv_offsets_ptr, user)
        # behind the last segment
        kv_len = tl.where(row < tl.load(q_offsets_ptr + num_segments), kv_len, 0)
        q, a = load_query(operands, strides, tl.cast(row, tl.int64), OPTIONS)
        for start in range(0, kv_len, OPTIONS.block):
            events = load_events(operands, strides, kv_start + start, kv_len - start, OPTIONS)
            z = first_layer(q, a, events, mlp, OPTIONS)
            if OPTIONS.only == 1:
                h = activate(z, mlp, 0, ACTIVATION, OPTIONS)
                z = second_layer(h, mlp, events.k.dtype, OPTIONS)
            number = tl.minimum(kv_len - start, OPTIONS.block).to(tl.float32)
            mean, squares = _joined(mean, squares, count, z, events.real, number)
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
def _joined(mean, squares, count, z, real, number):
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
