"""Softmax within the segments of jagged tensors, and of jagged matrices: kernels, the registered operators that launch them, autograd.

    forward   y = exp(x - max x) / Σ exp(x - max x)        along a line
    backward  dx = y (g - Σ y g)

A line is a column of a segment, or a row or a column of a jagged matrix: so many elements a stride apart, and lines lie side by side. A
program holds a tile of lines in registers where they are short: one read, one write. Longer ones it reads twice. Columns of long segments
are cut into chunks: one kernel leaves what each comes to (its maximum and its sum), another adds that up and writes. Sums are made in
fp32 and in an order that follows from the shapes, so results are deterministic. Offsets stay on the device; the last of them is the number
of rows, or of elements of all matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.device import aligned_strides, ceil_div, chunk_shift, rows_in_place
from ..common.loads import find_tile, load_segment, log2
from ..common.ops import below_autograd, differentiate, operator, refuse_derivative
from ..common.ptxas import safe_ptxas
from .configs import SoftmaxConfig, jagged2_softmax_config, jagged_softmax_config

LOG2_E = tl.constexpr(1.4426950408889634)


# -- device code -------------------------------------------------------------------------------------------------------------


@triton.jit
def _block(operand, line, first, num_lines, last, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """Pointers [LINES, LENGTH] into an operand (pointer, stride from line to line, stride along a line) from (line, first) on, and
    which of them are within its lines and before `last`."""
    ptr, stride_line, stride = operand
    lines, places = tl.arange(0, LINES), tl.arange(0, LENGTH)
    ptr += tl.cast(line, tl.int64) * stride_line + tl.cast(first, tl.int64) * stride
    mask = (line + lines < num_lines)[:, None] & (first + places < last)[None, :]
    return ptr + (lines[:, None] * stride_line + places[None, :] * stride), mask


@triton.jit
def _load(x, weight, line, first, num_lines, last, BACKWARD: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """Blocks of two operands in fp32, such that what is masked counts for nothing. Weights of no operand are 1."""
    ptrs, mask = _block(x, line, first, num_lines, last, LINES, LENGTH)
    x_block = tl.load(ptrs, mask=mask, other=0.0 if BACKWARD else float("-inf")).to(tl.float32)
    if weight[0] is None:
        return x_block, tl.full([LINES, LENGTH], 1.0, tl.float32)
    else:
        ptrs, mask = _block(weight, line, first, num_lines, last, LINES, LENGTH)
        return x_block, tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add(x, weight, largest, total, BACKWARD: tl.constexpr):
    """A block more of Σ weight · exp(x - largest), of which `largest` may grow; backward: of Σ weight · x."""
    if BACKWARD:
        return largest, total + tl.sum(weight * x, 1)
    else:
        new = tl.maximum(largest, tl.max(x, 1))
        shift = _finite(new)
        terms = weight * tl.exp2((x - shift[:, None]) * LOG2_E)
        return new, total * tl.exp2((largest - shift) * LOG2_E) + tl.sum(terms, 1)


@triton.jit
def _finite(largest):
    """What to subtract where all elements so far are -inf: they make no NaN yet, as finite ones may follow."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _store(out, x, weight, line, first, num_lines, last, largest, total, BACKWARD: tl.constexpr):
    """The result for a block, given the sum over its lines."""
    if BACKWARD:
        result = x * (weight - total[:, None])
    else:
        result = tl.exp2((x - _finite(largest)[:, None]) * LOG2_E) * (1.0 / total)[:, None]
    ptrs, mask = _block(out, line, first, num_lines, last, x.shape[0], x.shape[1])
    tl.store(ptrs, result.to(out[0].dtype.element_ty), mask=mask)


@triton.jit
def _nothing(LINES: tl.constexpr):
    return tl.full([LINES], float("-inf"), tl.float32), tl.zeros([LINES], tl.float32)


@triton.jit
def _sum_lines(x, weight, line, num_lines, first, last, BACKWARD: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr):
    """Maximum and sum of lines from `first` to `last`."""
    largest, total = _nothing(LINES)
    for place in range(first, last, LENGTH):
        x_block, weight_block = _load(x, weight, line, place, num_lines, last, BACKWARD, LINES, LENGTH)
        largest, total = _add(x_block, weight_block, largest, total, BACKWARD)
    return largest, total


@triton.jit
def _store_lines(
    x, weight, out, line, num_lines, first, last, largest, total, BACKWARD: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr
):  # fmt: skip
    for place in range(first, last, LENGTH):
        x_block, weight_block = _load(x, weight, line, place, num_lines, last, BACKWARD, LINES, LENGTH)
        _store(out, x_block, weight_block, line, place, num_lines, last, largest, total, BACKWARD)


@triton.jit
def _whole_lines(x, weight, out, line, num_lines, length, BACKWARD: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr):
    if length <= LENGTH:
        x_block, weight_block = _load(x, weight, line, 0, num_lines, length, BACKWARD, LINES, LENGTH)
        largest, total = _nothing(LINES)
        largest, total = _add(x_block, weight_block, largest, total, BACKWARD)
        _store(out, x_block, weight_block, line, 0, num_lines, length, largest, total, BACKWARD)
    else:
        largest, total = _sum_lines(x, weight, line, num_lines, 0, length, BACKWARD, LINES, LENGTH)
        _store_lines(x, weight, out, line, num_lines, 0, length, largest, total, BACKWARD, LINES, LENGTH)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments", "shift", "stride_x", "stride_grad"])
def jagged_softmax_kernel(
    x_ptr, grad_ptr, out_ptr, sums_ptr, offsets_ptr, num_segments, shift, stride_x, stride_grad,
    H: tl.constexpr, FINISH: tl.constexpr, ALIGN: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """softmax over the rows of each segment, `[L, H]`; with a gradient of it, x being its result, that of its input.

    A segment longer than a chunk of 2^shift rows leaves maximum and sum of its i-th chunk (backward: the sum and 1, its weight) in slot
    2 (offsets[b] // chunk) + i of sums `[slots, 2, H]`; `jagged_jagged_bmm_kernel` says why no two share one. With FINISH, the kernel does
    the rest for these segments alone. Strides are in units of ALIGN elements (see launch.py).
    Grid: places of chunks, blocks of columns.
    """
    BACKWARD: tl.constexpr = grad_ptr is not None
    COLUMNS: tl.constexpr = (H + LINES - 1) // LINES
    place, line = tl.program_id(0) // COLUMNS, tl.program_id(0) % COLUMNS * LINES
    segment, start, length, first = find_tile(place, offsets_ptr, num_segments, shift)
    if first >= length:
        return
    x = x_ptr + start * (stride_x * ALIGN), 1, stride_x * ALIGN
    if BACKWARD:
        weight = grad_ptr + start * (stride_grad * ALIGN), 1, stride_grad * ALIGN
    else:
        weight = None, 0, 0
    out, chunk = (out_ptr + start * H, 1, H), 1 << shift
    if length <= chunk:
        if not FINISH:
            _whole_lines(x, weight, out, line, H, length, BACKWARD, LINES, LENGTH)
    else:
        last = tl.minimum(first + chunk, length)
        sums_ptr += 2 * (start >> shift) * (2 * H)
        if FINISH:
            parts = ((length - 1) >> shift) + 1
            sums = sums_ptr, 1, 2 * H
            weights = sums_ptr + H, 1, 2 * H
            largest, total = _sum_lines(sums, weights, line, H, 0, parts, BACKWARD, LINES, LENGTH)
            _store_lines(x, weight, out, line, H, first, last, largest, total, BACKWARD, LINES, LENGTH)
        else:
            largest, total = _sum_lines(x, weight, line, H, first, last, BACKWARD, LINES, LENGTH)
            lines = line + tl.arange(0, LINES)
            slot_ptr = sums_ptr + tl.cast(first >> shift, tl.int64) * (2 * H) + lines
            tl.store(slot_ptr, total if BACKWARD else largest, mask=lines < H)
            tl.store(slot_ptr + H, tl.full([LINES], 1.0, tl.float32) if BACKWARD else total, mask=lines < H)


@safe_ptxas
@triton.jit(do_not_specialize=["num_segments"])
def jagged2_softmax_kernel(
    p_ptr, grad_ptr, out_ptr, x_offsets_ptr, y_offsets_ptr, p_offsets_ptr, num_segments,
    OVER_COLUMNS: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """softmax of each row of the matrices p[b] `[N_b, M_b]`; OVER_COLUMNS: of each column. With a gradient of it, p being its result,
    that of its input.

    Grid: places of blocks of LINES lines, numbered as the rows (OVER_COLUMNS: the columns) of all matrices are.
    """
    BACKWARD: tl.constexpr = grad_ptr is not None
    line_offsets_ptr, length_offsets_ptr = (y_offsets_ptr, x_offsets_ptr) if OVER_COLUMNS else (x_offsets_ptr, y_offsets_ptr)
    segment, _, num_lines, line = find_tile(tl.program_id(0), line_offsets_ptr, num_segments, log2(LINES))
    if line >= num_lines:
        return
    start = tl.load(p_offsets_ptr + segment).to(tl.int64)
    _, length = load_segment(length_offsets_ptr, segment)
    if OVER_COLUMNS:
        stride_line, stride = 1, num_lines
    else:
        stride_line, stride = length, 1
    x, out = (p_ptr + start, stride_line, stride), (out_ptr + start, stride_line, stride)
    if BACKWARD:
        weight = grad_ptr + start, stride_line, stride
    else:
        weight = None, 0, 0
    _whole_lines(x, weight, out, line, num_lines, length, BACKWARD, LINES, LENGTH)


# -- launchers: the bodies of the registered operators ----------------------------------------------------------------------


@operator("jagged_softmax", fake=lambda x, *_: x.new_empty(x.shape))
def triton_jagged_softmax(x: Tensor, offsets: Tensor, longest: int | None = None, batch_invariant: bool = False) -> Tensor:
    """softmax over the rows of each segment, column by column: x `[L, H]`, fp32, fp16 or bf16, offsets `[B + 1]` → `[L, H]`.
    longest: rows of the longest segment; too small a value only costs time. batch_invariant: long segments are split into parts of a fixed
    length."""
    return _softmax(x, None, offsets, longest, batch_invariant)


@operator("jagged_softmax_backward", fake=lambda grad, out, *_: out.new_empty(out.shape))
def triton_jagged_softmax_backward(
    grad: Tensor, out: Tensor, offsets: Tensor, longest: int | None = None, batch_invariant: bool = False
) -> Tensor:
    """Gradient `[L, H]` of the input, given that of the result and the result."""
    return _softmax(out, grad, offsets, longest, batch_invariant)


def _softmax(x: Tensor, grad: Tensor | None, offsets: Tensor, longest: int | None, batch_invariant: bool) -> Tensor:
    x, grad = rows_in_place(x), None if grad is None else rows_in_place(grad)
    (rows, columns), segments = x.shape, offsets.shape[0] - 1
    out = x.new_empty((rows, columns))
    if out.numel() == 0:
        return out
    config = jagged_softmax_config(x.element_size(), columns)
    blocks = ceil_div(columns, config.lines)
    shift = chunk_shift(rows, longest, blocks, x.device, batch_invariant)
    chunks = rows >> shift
    sums = x.new_empty((2 * chunks, 2, columns), dtype=torch.float32)
    align, strides = aligned_strides(*((tensor, 0) for tensor in (x, grad) if tensor is not None))
    for finish in (False, True) if rows > 1 << shift else (False,):
        jagged_softmax_kernel[((chunks + segments) * blocks,)](
            x, grad, out, sums, offsets, segments, shift, strides[0], strides[-1],
            H=columns, FINISH=finish, ALIGN=align, **_options(config),
        )  # fmt: skip
    return out


@operator("jagged2_softmax", fake=lambda p, *_: p.new_empty(p.shape))
def triton_jagged2_softmax(p: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, lines: int, columns: bool) -> Tensor:
    """softmax of each row of the matrices p[b], or of each column.

    Args:
        p: `[Σ N_b M_b]`, the matrices `[N_b, M_b]` row-major, one after the other; fp32, fp16 or bf16.
        x_offsets, y_offsets: `[B + 1]`, of segments of N_b and M_b rows. p_offsets: `[B + 1]`, of N_b M_b elements.
        lines: rows of all matrices, or columns, whichever it is of.

    Returns:
        `[Σ N_b M_b]`.
    """
    return _softmax2(p, None, x_offsets, y_offsets, p_offsets, lines, columns)


@operator("jagged2_softmax_backward", fake=lambda grad, out, *_: out.new_empty(out.shape))
def triton_jagged2_softmax_backward(
    grad: Tensor, out: Tensor, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, lines: int, columns: bool
) -> Tensor:
    """Gradient of p, given that of the result and the result, `[Σ N_b M_b]` each."""
    return _softmax2(out, grad, x_offsets, y_offsets, p_offsets, lines, columns)


def _softmax2(p: Tensor, grad: Tensor | None, x_offsets: Tensor, y_offsets: Tensor, p_offsets: Tensor, lines: int, columns: bool) -> Tensor:
    p, grad, segments = p.contiguous(), None if grad is None else grad.contiguous(), p_offsets.shape[0] - 1
    out = torch.empty_like(p)
    if p.numel():
        config = jagged2_softmax_config(columns)
        jagged2_softmax_kernel[(lines // config.lines + segments,)](
            p, grad, out, x_offsets, y_offsets, p_offsets, segments, OVER_COLUMNS=columns, **_options(config)
        )
    return out


def _options(config: SoftmaxConfig) -> dict:
    return dict(LINES=config.lines, LENGTH=config.length, num_warps=config.num_warps)


# -- autograd ----------------------------------------------------------------------------------------------------------------


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, *chunking):
        with below_autograd():
            out = triton_jagged_softmax(x, offsets, *chunking)
        ctx.save_for_backward(out, offsets)
        ctx.chunking = chunking
        return out

    @staticmethod
    def backward(ctx, grad):
        return triton_jagged_softmax_backward(grad, *ctx.saved_tensors, *ctx.chunking), None, *(None for _ in ctx.chunking)


class _Softmax2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, x_offsets, y_offsets, p_offsets, lines, columns):
        with below_autograd():
            out = triton_jagged2_softmax(p, x_offsets, y_offsets, p_offsets, lines, columns)
        ctx.save_for_backward(out, x_offsets, y_offsets, p_offsets)
        ctx.lines, ctx.columns = lines, columns
        return out

    @staticmethod
    def backward(ctx, grad):
        return triton_jagged2_softmax_backward(grad, *ctx.saved_tensors, ctx.lines, ctx.columns), *(None,) * 5


differentiate(triton_jagged_softmax, _Softmax.apply)
differentiate(triton_jagged2_softmax, _Softmax2.apply)
for _name, _backward in (("jagged_softmax", triton_jagged_softmax_backward), ("jagged2_softmax", triton_jagged2_softmax_backward)):
    refuse_derivative(_backward, f"{_name} is not differentiable twice: its backward kernel has no derivative of its own")
