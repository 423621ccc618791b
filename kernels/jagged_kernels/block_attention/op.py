"""Block-diagonal attention: one kernel forward, one backward, and nothing stored between them.

    S = scale · R q (R k)ᵀ,  P = softmax(S),  O = P R v                   within blocks; R: rotary, of v where asked for
    dV = R⁻¹ Pᵀ dO,  dP = dO (R v)ᵀ,  dS = P ∘ (dP − rowsum(P ∘ dP)),  dQ = scale · R⁻¹ dS R k,  dK = scale · R⁻¹ dSᵀ R q

A tile holds whole blocks, so its softmax is complete at once and the backward computes it again. Tiles are numbered in closed form:
segment b owns the places from offsets[b] // TILE + b on, at least as many as it has tiles, so that the number of places follows from
the shapes alone. Every program takes an equal range of places and searches for the segment of its first one.

Rotary scores depend on the distance of two rows alone where angles are linear in the position. Positions are then counted from the tile's
start (RELATIVE): a program loads cos and sin once. Where values are rotated too, or the table is any other, it loads them for every tile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.configs import padded_dim
from ..common.device import aligned_strides, device_properties, precision, rows_in_place
from ..common.loads import find_segment, load_pairs, load_rows, log2, store_pairs, store_rows
from ..common.ops import below_autograd, capability, differentiate, operator, refuse_derivative
from ..common.ptxas import safe_ptxas
from . import configs
from .configs import block_attention_config

LOG2_E = tl.constexpr(1.4426950408889634)


# -- device code -------------------------------------------------------------------------------------------------------------


@triton.jit
def _tile(place, segment, offsets_ptr, num_segments, TILE: tl.constexpr):
    """Segment of a place, given that of the place before; the tile's first row, its rows (none: not positive), its first position."""
    if segment + 1 < num_segments:
        segment += tl.where(tl.load(offsets_ptr + segment + 1) // TILE + segment + 1 <= place, 1, 0)
    start, end = tl.load(offsets_ptr + segment).to(tl.int64), tl.load(offsets_ptr + segment + 1).to(tl.int64)
    position = (place - start // TILE - segment) * TILE
    return segment, start + position, (end - start - position).to(tl.int32), position.to(tl.int32)


@triton.jit
def _load_rotation(
    rotary, row, position, num_rows, ROTATE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """cos and sin [TILE, BLOCK_D / 2] of a tile's rows; numbers without rotary. Positions past the table take its last row."""
    if ROTATE:
        cos_ptr, sin_ptr, positions_ptr, num_positions = rotary
        rows, pairs = tl.arange(0, TILE), tl.arange(0, BLOCK_D // 2)[None, :]
        positions = position + rows
        if positions_ptr is not None:
            positions = tl.load(positions_ptr + row + rows, mask=rows < num_rows, other=0).to(tl.int32)
        places = tl.minimum(positions, num_positions - 1)[:, None] * (DIM // 2) + pairs
        mask = (rows < num_rows)[:, None] & (pairs < DIM // 2)
        return tl.load(cos_ptr + places, mask=mask, other=0.0), tl.load(sin_ptr + places, mask=mask, other=0.0)
    else:
        return 1.0, 0.0


@triton.jit
def _load(
    operand, row, head, num_rows, cos, sin, ROTATE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The rows of a tile. What is rotated, as its even and its odd columns [TILE, BLOCK_D / 2], of which products are sums of two; what
    is not, as one block, twice. PACKED: a pair of 16-bit elements is loaded as one word."""
    if ROTATE:
        first, second = load_pairs(operand, row, head, num_rows, DIM, TILE, BLOCK_D // 2, PACKED)
        turned_first, turned_second = _rotate(first.to(tl.float32), second.to(tl.float32), cos, sin)
        return turned_first.to(first.dtype), turned_second.to(first.dtype)
    else:
        x = load_rows(operand, row, head, num_rows, DIM, TILE, BLOCK_D, True)
        return x, x


@triton.jit
def _store(
    operand, row, head, x, num_rows, cos, sin, ROTATE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Store a gradient, in the form of _load; that of what was rotated is turned back before its one rounding."""
    if ROTATE:
        first, second = _rotate(x[0], x[1], cos, -sin)
        store_pairs(operand, row, head, first, second, num_rows, DIM, TILE, BLOCK_D // 2, PACKED)
    else:
        store_rows(operand, row, head, x[0], num_rows, DIM, TILE, BLOCK_D)


@triton.jit
def _rotate(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _outer(a, b, ROTATE: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ [TILE, TILE] of two operands of one form."""
    out = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if ROTATE:
        out = tl.dot(a[1], tl.trans(b[1]), out, input_precision=PRECISION)
    return out


@triton.jit
def _inner(weights, x, acc, ROTATE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + weights @ x, in x's form."""
    first = tl.dot(weights, x[0], acc[0], input_precision=PRECISION)
    if ROTATE:
        return first, tl.dot(weights, x[1], acc[1], input_precision=PRECISION)
    else:
        return first, first


@triton.jit
def _zeros(ROTATE: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr):
    zeros = tl.zeros([TILE, BLOCK_D // 2 if ROTATE else BLOCK_D], tl.float32)
    return zeros, zeros


@triton.jit
def _softmax(scores, num_rows, scale, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """softmax(scale · scores) within the blocks of a tile, 0 elsewhere; scale in base 2."""
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    visible = columns < num_rows
    if BLOCK < TILE:
        visible = visible & (rows // BLOCK == columns // BLOCK)
    scores = tl.where(visible, scores * scale, float("-inf"))
    largest = tl.max(scores, 1)
    p = tl.exp2(scores - tl.where(largest == float("-inf"), 0.0, largest)[:, None])  # a row past the segment may see nothing
    total = tl.sum(p, 1)
    return p * (1.0 / tl.where(total > 0, total, 1.0))[:, None]


@safe_ptxas
@triton.jit(do_not_specialize=["num_positions", "num_segments", "num_places"])
def block_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, offsets_ptr, cos_ptr, sin_ptr, positions_ptr, num_positions, num_segments, num_places, scale,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_om, stride_oh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTATE: tl.constexpr, ROTATE_V: tl.constexpr, RELATIVE: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Heads follow one another within a place: the rows of a packed projection are read together."""
    q_operand = q_ptr, None, stride_qm * ALIGN, stride_qh * ALIGN
    k_operand = k_ptr, None, stride_kn * ALIGN, stride_kh * ALIGN
    v_operand = v_ptr, None, stride_vn * ALIGN, stride_vh * ALIGN
    out_operand = out_ptr, None, stride_om * ALIGN, stride_oh * ALIGN
    rotary = cos_ptr, sin_ptr, positions_ptr, num_positions
    first, last = _range(num_places * HEADS)
    segment = find_segment(first // HEADS, offsets_ptr, num_segments, log2(TILE), True)
    relative = _load_rotation(rotary, 0, 0, TILE, RELATIVE, DIM, TILE, BLOCK_D)
    for item in range(first, last):
        segment, row, num_rows, position = _tile(item // HEADS, segment, offsets_ptr, num_segments, TILE)
        head = item % HEADS
        if RELATIVE:
            cos, sin = relative
        else:
            cos, sin = _load_rotation(rotary, row, position, num_rows, ROTATE, DIM, TILE, BLOCK_D)
        q = _load(q_operand, row, head, num_rows, cos, sin, ROTATE, DIM, TILE, BLOCK_D, PACKED)
        k = _load(k_operand, row, head // GROUP, num_rows, cos, sin, ROTATE, DIM, TILE, BLOCK_D, PACKED)
        v = _load(v_operand, row, head // GROUP, num_rows, cos, sin, ROTATE_V, DIM, TILE, BLOCK_D, PACKED)
        p = _softmax(_outer(q, k, ROTATE, PRECISION), num_rows, scale * LOG2_E, TILE, BLOCK)
        out = _inner(p.to(v[0].dtype), v, _zeros(ROTATE_V, TILE, BLOCK_D), ROTATE_V, PRECISION)
        if ROTATE_V:
            store_pairs(out_operand, row, head, out[0], out[1], num_rows, DIM, TILE, BLOCK_D // 2, PACKED)
        else:
            store_rows(out_operand, row, head, out[0], num_rows, DIM, TILE, BLOCK_D)


@safe_ptxas
@triton.jit(do_not_specialize=["num_positions", "num_segments", "num_places"])
def block_attention_bwd_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, offsets_ptr, cos_ptr, sin_ptr, positions_ptr, num_positions, num_segments,
    num_places, scale,
    stride_dom, stride_doh, stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
    stride_dqm, stride_dqh, stride_dkn, stride_dkh, stride_dvn, stride_dvh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTATE: tl.constexpr, ROTATE_V: tl.constexpr, RELATIVE: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program takes a place and a key head, with the query heads of its group: every gradient is written once."""
    do_operand = do_ptr, None, stride_dom * ALIGN, stride_doh * ALIGN
    q_operand = q_ptr, None, stride_qm * ALIGN, stride_qh * ALIGN
    k_operand = k_ptr, None, stride_kn * ALIGN, stride_kh * ALIGN
    v_operand = v_ptr, None, stride_vn * ALIGN, stride_vh * ALIGN
    dq_operand = dq_ptr, None, stride_dqm * ALIGN, stride_dqh * ALIGN
    dk_operand = dk_ptr, None, stride_dkn * ALIGN, stride_dkh * ALIGN
    dv_operand = dv_ptr, None, stride_dvn * ALIGN, stride_dvh * ALIGN
    rotary = cos_ptr, sin_ptr, positions_ptr, num_positions
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    first, last = _range(num_places * KEY_HEADS)
    segment = find_segment(first // KEY_HEADS, offsets_ptr, num_segments, log2(TILE), True)
    relative = _load_rotation(rotary, 0, 0, TILE, RELATIVE, DIM, TILE, BLOCK_D)
    for item in range(first, last):
        segment, row, num_rows, position = _tile(item // KEY_HEADS, segment, offsets_ptr, num_segments, TILE)
        key_head = item % KEY_HEADS
        if RELATIVE:
            cos, sin = relative
        else:
            cos, sin = _load_rotation(rotary, row, position, num_rows, ROTATE, DIM, TILE, BLOCK_D)
        k = _load(k_operand, row, key_head, num_rows, cos, sin, ROTATE, DIM, TILE, BLOCK_D, PACKED)
        v = _load(v_operand, row, key_head, num_rows, cos, sin, ROTATE_V, DIM, TILE, BLOCK_D, PACKED)
        dk, dv = _zeros(ROTATE, TILE, BLOCK_D), _zeros(ROTATE_V, TILE, BLOCK_D)
        for group_head in range(0, GROUP):
            head = key_head * GROUP + group_head
            q = _load(q_operand, row, head, num_rows, cos, sin, ROTATE, DIM, TILE, BLOCK_D, PACKED)
            do = _load(do_operand, row, head, num_rows, 1.0, 0.0, ROTATE_V, DIM, TILE, BLOCK_D, PACKED)
            scores = _outer(q, k, ROTATE, PRECISION)
            dp = _outer(do, v, ROTATE_V, PRECISION)
            p = _softmax(scores, num_rows, scale * LOG2_E, TILE, BLOCK)
            ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q[0].dtype)
            dq = _inner(ds, k, _zeros(ROTATE, TILE, BLOCK_D), ROTATE, PRECISION)
            _store(dq_operand, row, head, dq, num_rows, cos, sin, ROTATE, DIM, TILE, BLOCK_D, PACKED)
            dv = _inner(tl.trans(p.to(do[0].dtype)), do, dv, ROTATE_V, PRECISION)
            dk = _inner(tl.trans(ds), q, dk, ROTATE, PRECISION)
        _store(dv_operand, row, key_head, dv, num_rows, cos, sin, ROTATE_V, DIM, TILE, BLOCK_D, PACKED)
        _store(dk_operand, row, key_head, dk, num_rows, cos, sin, ROTATE, DIM, TILE, BLOCK_D, PACKED)


@triton.jit
def _range(num_items):
    """This program's equal share of the items: first, one past the last."""
    share, rest = num_items // tl.num_programs(0), num_items % tl.num_programs(0)
    first = tl.program_id(0) * share + tl.minimum(tl.program_id(0), rest)
    return first, first + share + tl.where(tl.program_id(0) < rest, 1, 0)


# -- launchers: the bodies of the registered operators ----------------------------------------------------------------------


def block_attention_fits(head_dim: int, itemsize: int, device: torch.device, block_size: int, group: int) -> bool:
    """Whether the kernels take blocks of that many rows on a device."""
    return configs.block_attention_fits(head_dim, itemsize, capability(device), block_size, group)


def _fake(q, k, v, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@operator("block_attention", fake=_fake)
def triton_block_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None,
    rotate_v: bool, relative: bool, precise: bool, block_size: int, scale: float, implementation: str,
) -> Tensor:  # fmt: skip
    """Launch the forward kernel.

    Args:
        q: `[L, H, D]`, k, v: `[L, Hkv, D]`, fp32, fp16 or bf16, last dim contiguous. offsets: `[B + 1]`.
        cos, sin: `[P, D / 2]` fp32, contiguous, or None. positions: `[L]`, or None: from the segments' starts.
        relative: angles are linear in the position. precise: on Hopper, turned bf16 operands are fp16 in units.
        block_size: a power of two.
        implementation: "triton", "hopper", or "auto", "hopper" where it takes the operands.

    Returns:
        `[L, H, D]`.
    """
    return _forward(q, k, v, offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale, implementation)


@operator("block_attention_packed", fake=lambda qkv, *rest: _fake(*qkv.unbind(1)))
def triton_block_attention_packed(
    qkv: Tensor, offsets: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None,
    rotate_v: bool, relative: bool, precise: bool, block_size: int, scale: float, implementation: str,
) -> Tensor:  # fmt: skip
    """Launch the forward kernel on q, k and v of `[L, 3, H, D]`, last dim contiguous. Their gradients are written as one tensor, which a
    projection's backward reads as it is; autograd would copy three into one. Others, returns: as triton_block_attention."""
    return _forward(*qkv.unbind(1), offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale, implementation)


def _forward(q, k, v, offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale, implementation) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if _on_hopper(implementation, q, k, v) and q.shape[0] > 0:
        from . import hopper

        hopper.forward(q, k, v, out, offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale)
        return out
    grid, sizes, common = _launch("fwd", q, k, offsets, cos, positions, rotate_v, relative, block_size)
    if grid:
        strides, layout = _layout(q, k, v, out)
        block_attention_fwd_kernel[grid](q, k, v, out, offsets, cos, sin, positions, *sizes, scale, *strides, **common, **layout)
    return out


def _backward_fake(do, q, k, v, *rest):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@operator("block_attention_backward", fake=_backward_fake)
def triton_block_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None,
    rotate_v: bool, relative: bool, precise: bool, block_size: int, scale: float, implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernel: dq, dk, dv of the operands' shapes and dtype."""
    gradients = _backward_fake(do, q, k, v)
    _backward(gradients, do, q, k, v, offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale, implementation)
    return gradients


def _packed_backward_fake(do, qkv, *rest):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


@operator("block_attention_packed_backward", fake=_packed_backward_fake)
def triton_block_attention_packed_backward(
    do: Tensor, qkv: Tensor, offsets: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None,
    rotate_v: bool, relative: bool, precise: bool, block_size: int, scale: float, implementation: str,
) -> Tensor:  # fmt: skip
    """Launch the backward kernel: the gradient `[L, 3, H, D]` of qkv, in its dtype."""
    gradient = _packed_backward_fake(do, qkv)
    _backward(
        gradient.unbind(1), do, *qkv.unbind(1), offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale, implementation
    )
    return gradient


def _backward(gradients, do, q, k, v, offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale, implementation) -> None:
    dq, dk, dv = gradients
    do = rows_in_place(do)
    if _on_hopper(implementation, q, k, v) and q.shape[0] > 0:
        from . import hopper

        hopper.backward(do, q, k, v, dq, dk, dv, offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale)
        return
    grid, sizes, common = _launch("bwd", q, k, offsets, cos, positions, rotate_v, relative, block_size)
    if grid:
        strides, layout = _layout(do, q, k, v, dq, dk, dv)
        block_attention_bwd_kernel[grid](
            do, q, k, v, dq, dk, dv, offsets, cos, sin, positions, *sizes, scale, *strides, **common, **layout
        )  # fmt: skip


def _on_hopper(implementation: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    if implementation == "triton" or device_properties(q.device)[0] != (9, 0) or q.device.type != "cuda":
        supported = False
    else:
        from . import hopper  # Gluon is compiled for Hopper alone, and imported there alone

        supported = hopper.supports(q, k, v)
    if implementation == "hopper" and not supported and q.shape[0]:  # no rows have no address to be aligned
        raise ValueError(
            "implementation 'hopper' takes fp16 or bf16 on a GPU of compute capability 9.0, D a multiple of 8 up to 128, as many key heads "
            f"as query heads and rows at 16-byte boundaries; got {q.dtype} on {q.device}, q {list(q.shape)} with strides {q.stride()}, "
            f"k {list(k.shape)} with strides {k.stride()}"
        )
    return supported


def _layout(*tensors: Tensor) -> tuple[list[int], dict]:
    """Row and head strides, and what is constant about them: pairs of 16-bit elements are words where all begin at 4-byte boundaries."""
    align, strides = aligned_strides(*((x, dim) for x in tensors for dim in (0, 1)))
    packed = tensors[0].element_size() == 2 and align % 2 == 0 and all(x.data_ptr() % 4 == 0 for x in tensors)
    return strides, dict(ALIGN=align, PACKED=packed)


def _launch(
    kernel: str, q: Tensor, k: Tensor, offsets: Tensor, cos: Tensor | None, positions: Tensor | None, rotate_v: bool, relative: bool,
    block_size: int,
):  # fmt: skip
    """Grid (none where there is nothing to do), sizes, and the launch arguments that both kernels share."""
    relative = relative and positions is None and not rotate_v
    rotary = "none" if cos is None else "relative" if relative else "absolute"
    workers, common = _constants(kernel, q.shape[1], k.shape[1], q.shape[2], q.dtype, block_size, rotary, q.device, precision(q))
    num_segments = offsets.shape[0] - 1
    num_places = q.shape[0] // common["TILE"] + num_segments if q.shape[0] else 0
    items = num_places * (q.shape[1] if kernel == "fwd" else k.shape[1])
    grid = (min(workers, items),) if items else ()
    num_positions = 0 if cos is None else cos.shape[0]
    return grid, (num_positions, num_segments, num_places), common | dict(ROTATE_V=cos is not None and rotate_v)


@functools.cache
def _constants(kernel, heads, key_heads, dim, dtype, block_size, rotary, device, precision) -> tuple[int, dict]:
    """Programs at a time, constants and launch options."""
    capability, processors = device_properties(device)
    config = block_attention_config(kernel, dim, dtype.itemsize, capability, block_size, heads // key_heads, rotary)
    return processors * config.ctas_per_sm, dict(
        HEADS=heads,
        GROUP=heads // key_heads,
        DIM=dim,
        TILE=config.tile,
        BLOCK=block_size,
        BLOCK_D=max(32, padded_dim(dim)),  # products over pairs take half of it, and no less than 16
        ROTATE=rotary != "none",
        RELATIVE=rotary == "relative",
        PRECISION=precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


# -- autograd ----------------------------------------------------------------------------------------------------------------


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, backward_op, *inputs):
        tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]  # the first arguments, the options after them
        ctx.save_for_backward(*tensors)
        ctx.backward_op, ctx.options, ctx.num_inputs = backward_op, inputs[len(tensors) :], len(inputs)
        with below_autograd():
            return op(*inputs)

    @staticmethod
    def backward(ctx, do):
        gradients = ctx.backward_op(do, *ctx.saved_tensors, *ctx.options)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return None, None, *gradients, *(None,) * (ctx.num_inputs - len(gradients))


def _differentiate(op, backward_op) -> None:
    differentiate(op, functools.partial(_BlockAttention.apply, op, backward_op))
    refuse_derivative(backward_op, "block_diagonal_attention is not differentiable twice: its backward kernel has no derivative of its own")


_differentiate(triton_block_attention, triton_block_attention_backward)
_differentiate(triton_block_attention_packed, triton_block_attention_packed_backward)
