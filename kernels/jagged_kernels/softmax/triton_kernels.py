"""Device code of jagged softmax. The equations are in op.py.

A line is what the softmax runs along: a column of a segment, or a row or a column of a jagged
matrix. Its elements are a stride apart, and lines lie side by side. A program holds a tile of lines
in registers if they are short: one read, one write. It reads longer ones twice. Columns of long
segments are cut into chunks: one launch stores the maximum and the sum of each chunk, another adds
them up and writes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.activations import LOG2_E
from ..common.loads import find_tile, load_segment, log2
from ..common.ptxas import safe_ptxas


class Options(NamedTuple):
    """Constants of `jagged_softmax_kernel`. h: columns. align: elements that strides count. lines,
    length: of a block."""

    h: int
    finish: bool
    align: int
    lines: int
    length: int


class Lines(NamedTuple):
    """An operand: pointer to the first element of its lines, stride from line to line, stride along
    a line."""

    ptr: tl.tensor
    stride_line: tl.tensor
    stride: tl.tensor


class Part(NamedTuple):
    """The lines from first_line on that a program takes, of num_lines lines, and the elements of
    each, from first to last."""

    first_line: tl.tensor
    num_lines: tl.tensor
    first: tl.tensor
    last: tl.tensor


class LineSums(NamedTuple):
    """For each line. Forward: the maximum of x so far, and Σ weight · exp(x - max). Backward: no
    maximum, and Σ weight · x."""

    max: tl.tensor
    sum: tl.tensor


@triton.jit
def _block(operand, part, first, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """Pointers [LINES, LENGTH] to a part's elements from `first` on, and a mask of those that the
    part has."""
    lines, elements = tl.arange(0, LINES), tl.arange(0, LENGTH)
    ptr = operand.ptr + (
        tl.cast(part.first_line, tl.int64) * operand.stride_line
        + tl.cast(first, tl.int64) * operand.stride
    )
    mask = (part.first_line + lines < part.num_lines)[:, None] & (first + elements < part.last)[
        None, :
    ]
    return ptr + (lines[:, None] * operand.stride_line + elements[None, :] * operand.stride), mask


@triton.jit
def _load(
    x, weight, part, first, BACKWARD: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr
):
    """Blocks of x and its weights in fp32; masked elements add nothing. Without a weight pointer,
    weights are 1."""
    ptrs, mask = _block(x, part, first, LINES, LENGTH)
    x_block = tl.load(ptrs, mask=mask, other=0.0 if BACKWARD else float("-inf")).to(tl.float32)
    if weight.ptr is None:
        return x_block, tl.full([LINES, LENGTH], 1.0, tl.float32)
    else:
        ptrs, mask = _block(weight, part, first, LINES, LENGTH)
        return x_block, tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add(x, weight, sums, BACKWARD: tl.constexpr):
    """The sums with one more block."""
    if BACKWARD:
        return LineSums(sums.max, sums.sum + tl.sum(weight * x, 1))
    else:
        new_max = tl.maximum(sums.max, tl.max(x, 1))
        shift = _finite(new_max)
        terms = weight * tl.exp2((x - shift[:, None]) * LOG2_E)
        return LineSums(new_max, sums.sum * tl.exp2((sums.max - shift) * LOG2_E) + tl.sum(terms, 1))


@triton.jit
def _finite(line_max):
    """What to subtract: 0 while all elements are -inf, as -inf - -inf is NaN and finite elements
    may follow."""
    return tl.where(line_max == float("-inf"), 0.0, line_max)


@triton.jit
def _store(out, x, weight, part, first, sums, BACKWARD: tl.constexpr):
    """The result for a block, given the sums of its lines."""
    if BACKWARD:
        result = x * (weight - sums.sum[:, None])
    else:
        # 0: all elements are -inf, so the results are 0
        total = tl.where(sums.sum == 0, 1.0, sums.sum)
        result = tl.exp2((x - _finite(sums.max)[:, None]) * LOG2_E) * (1.0 / total)[:, None]
    ptrs, mask = _block(out, part, first, x.shape[0], x.shape[1])
    tl.store(ptrs, result.to(out.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _no_sums(LINES: tl.constexpr):
    return LineSums(tl.full([LINES], float("-inf"), tl.float32), tl.zeros([LINES], tl.float32))


@triton.jit
def _sum_lines(x, weight, part, BACKWARD: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr):
    sums = _no_sums(LINES)
    for first in range(part.first, part.last, LENGTH):
        x_block, weight_block = _load(x, weight, part, first, BACKWARD, LINES, LENGTH)
        sums = _add(x_block, weight_block, sums, BACKWARD)
    return sums


@triton.jit
def _store_lines(
    x, weight, out, part, sums, BACKWARD: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr
):
    for first in range(part.first, part.last, LENGTH):
        x_block, weight_block = _load(x, weight, part, first, BACKWARD, LINES, LENGTH)
        _store(out, x_block, weight_block, part, first, sums, BACKWARD)


@triton.jit
def _full_lines(
    x, weight, out, first_line, num_lines, length,
    BACKWARD: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Lines that are not cut into chunks."""
    part = Part(first_line, num_lines, 0, length)
    if length <= LENGTH:
        x_block, weight_block = _load(x, weight, part, 0, BACKWARD, LINES, LENGTH)
        sums = _add(x_block, weight_block, _no_sums(LINES), BACKWARD)
        _store(out, x_block, weight_block, part, 0, sums, BACKWARD)
    else:
        sums = _sum_lines(x, weight, part, BACKWARD, LINES, LENGTH)
        _store_lines(x, weight, out, part, sums, BACKWARD, LINES, LENGTH)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "shift", "stride_x", "stride_grad"])
def jagged_softmax_kernel(
    x_ptr, grad_ptr, out_ptr, sums_ptr, offsets_ptr, num_segments, shift, stride_x, stride_grad,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """softmax over the rows of each segment, `[L, H]`. With grad_ptr: the gradient of its input,
    given its result x and that of the result.

    A segment longer than a chunk of 2^shift rows stores the maximum and the sum of its i-th chunk
    (backward: the sum, and its weight 1) in slot 2 (offsets[b] // chunk) + i of sums
    `[slots, 2, H]`; `jagged_jagged_bmm_kernel` explains why no two share a slot. With `finish`, the
    kernel computes the results of these segments alone. Strides are in units of ALIGN elements (see
    `aligned_strides`). Grid: chunk indices, blocks of columns.
    """
    H: tl.constexpr = OPTIONS.h
    ALIGN: tl.constexpr = OPTIONS.align
    LINES: tl.constexpr = OPTIONS.lines
    LENGTH: tl.constexpr = OPTIONS.length
    BACKWARD: tl.constexpr = grad_ptr is not None
    BLOCKS: tl.constexpr = (H + LINES - 1) // LINES
    chunk_index, line = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * LINES
    segment, start, length, first = find_tile(chunk_index, offsets_ptr, num_segments, shift)
    if first >= length:
        return
    x = Lines(x_ptr + start * (stride_x * ALIGN), 1, stride_x * ALIGN)
    if BACKWARD:
        weight = Lines(grad_ptr + start * (stride_grad * ALIGN), 1, stride_grad * ALIGN)
    else:
        weight = Lines(None, 0, 0)
    out, chunk = Lines(out_ptr + start * H, 1, H), 1 << shift
    if length <= chunk:
        if not OPTIONS.finish:
            _full_lines(x, weight, out, line, H, length, BACKWARD, LINES, LENGTH)
    else:
        part = Part(line, H, first, tl.minimum(first + chunk, length))
        sums_ptr += 2 * (start >> shift) * (2 * H)
        if OPTIONS.finish:
            num_chunks = ((length - 1) >> shift) + 1
            chunk_sums, chunk_weights = Lines(sums_ptr, 1, 2 * H), Lines(sums_ptr + H, 1, 2 * H)
            sums = _sum_lines(
                chunk_sums, chunk_weights, Part(line, H, 0, num_chunks), BACKWARD, LINES, LENGTH
            )
            _store_lines(x, weight, out, part, sums, BACKWARD, LINES, LENGTH)
        else:
            sums = _sum_lines(x, weight, part, BACKWARD, LINES, LENGTH)
            lines = line + tl.arange(0, LINES)
            slot_ptr = sums_ptr + tl.cast(first >> shift, tl.int64) * (2 * H) + lines
            tl.store(slot_ptr, sums.sum if BACKWARD else sums.max, mask=lines < H)
            tl.store(
                slot_ptr + H,
                tl.full([LINES], 1.0, tl.float32) if BACKWARD else sums.sum,
                mask=lines < H,
            )


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def jagged2_softmax_kernel(
    p_ptr, grad_ptr, out_ptr, x_offsets_ptr, y_offsets_ptr, p_offsets_ptr, num_segments,
    OVER_COLUMNS: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """softmax of each row of the matrices p[b] `[N_b, M_b]`; OVER_COLUMNS: of each column. With
    grad_ptr: the gradient of its input, given its result p and that of the result.

    Grid: tile indices of blocks of LINES lines, which are rows, or columns with OVER_COLUMNS.
    """
    BACKWARD: tl.constexpr = grad_ptr is not None
    line_offsets_ptr, length_offsets_ptr = (
        (y_offsets_ptr, x_offsets_ptr) if OVER_COLUMNS else (x_offsets_ptr, y_offsets_ptr)
    )
    segment, _, num_lines, line = find_tile(
        tl.program_id(0), line_offsets_ptr, num_segments, log2(LINES)
    )
    if line >= num_lines:
        return
    start = tl.load(p_offsets_ptr + segment).to(tl.int64)
    _, length = load_segment(length_offsets_ptr, segment)
    if OVER_COLUMNS:
        stride_line, stride = 1, num_lines
    else:
        stride_line, stride = length, 1
    x, out = Lines(p_ptr + start, stride_line, stride), Lines(out_ptr + start, stride_line, stride)
    if BACKWARD:
        weight = Lines(grad_ptr + start, stride_line, stride)
    else:
        weight = Lines(None, 0, 0)
    _full_lines(x, weight, out, line, num_lines, length, BACKWARD, LINES, LENGTH)
