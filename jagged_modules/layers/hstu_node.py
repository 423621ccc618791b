"""HSTULayer's forward as one autograd node, from kernels that read and write each row once.

    x̂ = norm(x),  [u | v | q | k] = x̂ W + b,  a = attention(q, k, v)
    out = x + gate(u, a) W_o,       gate(u, a) = dropout([silu(u) | a | silu(u) · norm(a)])

The backward goes through these in reverse. du, dv, dq and dk are columns of one tensor: one GEMM
gives the gradients of W and b, and one that of x̂. Until dv, dq and dk are written, their columns
hold the gradient of gate(u, a). da replaces a. The residual's gradient is added where the norm's
backward rounds dx.

What the backward reads is kept or computed again, as `HSTUConfig.recompute` says. Each parameter of
a GEMM is cast once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jagged_kernels.attention.params import Arguments
from jagged_kernels.common.device import zeroed_behind
from jagged_kernels.rows.configs import MAX_WIDTH
from torch import Tensor, nn

from ..dtypes import autocast_dtype
from ..functional.nodes import apply, differentiable_once, is_last_backward, release
from ..functional.tail import residual_sum, with_zero_tail
from .norms import NORM_KINDS, NormOptions, norm_parameters
from .one_node import bias_columns, cast, linear, linear_gradients, may_be_one_node, rounded_rows

if TYPE_CHECKING:
    from .hstu import HSTULayer


class Stages(NamedTuple):
    """What a node computes besides GEMMs: operators of jagged_kernels, with their arguments."""

    row_norm: Callable[..., Any]
    row_norm_backward: Callable[..., Any]
    gate: Callable[..., Any]
    gate_linear_backward: Callable[..., Any]
    attention: Callable[..., Any]
    attention_backward: Callable[..., Any]


def stages() -> Stages:
    """The kernels. A test on the CPU replaces this function."""
    from jagged_kernels.attention import op as attention
    from jagged_kernels.common.ops import called
    from jagged_kernels.rows import op as rows

    operators = (
        rows.triton_row_norm, rows.triton_row_norm_backward, rows.triton_gate,
        rows.triton_gate_linear_backward, attention.triton_attention,
        attention.triton_attention_packed_backward,
    )  # fmt: skip
    return Stages(*[partial(called, op) for op in operators])


class Gate(NamedTuple):
    """Numbers of the output's stage: of dropout, and of the norm of attention's output."""

    dropout: float
    norm: NormOptions


class Plan(NamedTuple):
    """Numbers of a layer's node.

    Attributes:
        heads: number of heads. uv_dim, qk_dim: columns of u and v, and of q and k, per head.
        dtype: of the GEMMs' operands.
        recompute: of the config.
        in_place: whether the result may take the place of x.
    """

    heads: int
    uv_dim: int
    qk_dim: int
    dtype: torch.dtype
    norm: NormOptions
    gate: Gate
    recompute: tuple[str, ...]
    in_place: bool

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u `[L, H · Dv]`, and q, k and v by head."""
        uv, qk = self.heads * self.uv_dim, self.heads * self.qk_dim
        u, v, q, k = torch.split_with_sizes(packed, [uv, uv, qk, qk], dim=1)
        q, k, v = [torch.unflatten(x, 1, (self.heads, -1)) for x in (q, k, v)]
        return u, q, k, v

    def columns(self) -> list[int]:
        """Of the packed tensor, the first ones of q, k and v."""
        uv, qk = self.heads * self.uv_dim, self.heads * self.qk_dim
        return [2 * uv, 2 * uv + qk, uv]


def takes_kernels(layer: HSTULayer, x: Tensor) -> bool:
    """Whether kernels may replace the calls of the layer's modules for rows x."""
    of_input, of_output = NORM_KINDS[layer.config.norm]
    modules = {
        layer.input_norm: of_input,
        layer.uvqk_proj: nn.Linear,
        layer.output_norm: of_output,
        layer.dropout: nn.Dropout,
        layer.out_proj: nn.Linear,
    }
    if not may_be_one_node(x, *modules) or any(
        [type(m) is not kind for m, kind in modules.items()]
    ):
        return False
    dtype, bias = autocast_dtype(x), getattr(layer.out_proj, "bias", None)
    widths = x.shape[1], layer.num_heads * layer.linear_dim
    return (
        dtype in (torch.float32, torch.float16, torch.bfloat16)
        and torch.promote_types(x.dtype, dtype) == x.dtype
        and bias is None
        and max(widths) <= MAX_WIDTH
        and (layer.out_proj.weight.dtype == x.dtype or torch.is_autocast_enabled("cuda"))
    )


def dropout_seed(layer: HSTULayer, x: Tensor) -> Tensor | None:
    """A seed of the device's generator, which CUDA graphs replay; None if nothing is dropped."""
    if not (layer.dropout.training and layer.dropout.p):
        return None
    return torch.randint(2**62, (), device=x.device)


def norm_rows(norm: nn.Module, x: Tensor, end: Tensor | None) -> Tensor:
    """The norm of rows by one kernel, in the dtype that a GEMM takes them in. It reads nothing
    behind the end."""
    weight, bias = norm_parameters(norm)
    of_norm = weight, bias, autocast_dtype(x), *NormOptions.of(norm)
    return stages().row_norm(x, *of_norm, 0, end)[0]


def gated_output(layer: HSTULayer, x: Tensor, u: Tensor, a: Tensor) -> Tensor:
    """x + gate(u, a) W_o, of operands that are not of one node."""
    norm, gate = layer.output_norm, Gate(layer.dropout.p, NormOptions.of(layer.output_norm))
    projection = layer.out_proj.weight.to(autocast_dtype(x))
    seed = dropout_seed(layer, x)
    return apply(_GatedOutput, x, u, a, *norm_parameters(norm), projection, seed, gate)


def hstu_node(
    layer: HSTULayer, x: Tensor, end: Tensor | None, arguments: Arguments, in_place: bool
) -> Tensor:
    """The layer's update of rows x, which it may overwrite in place. end: of the rows, if only the
    device knows it: see `functional/tail.py`. arguments: of attention's operator. Its q, k and v
    are not read."""
    norms = input_norm, output_norm = layer.input_norm, layer.output_norm
    plan = Plan(
        layer.num_heads, layer.linear_dim, layer.head_dim, autocast_dtype(x),
        NormOptions.of(input_norm), Gate(layer.dropout.p, NormOptions.of(output_norm)),
        layer.config.recompute, in_place,
    )  # fmt: skip
    of_input, of_output = map(norm_parameters, norms)
    projection = layer.uvqk_proj.weight, layer.uvqk_proj.bias
    _, _, _, segments, bias, *others = arguments
    result: Tensor = apply(
        _HSTULayer, x, dropout_seed(layer, x), end, plan, (segments, bias[2:], others), *of_input,
        *projection, *of_output, layer.out_proj.weight, *bias[:2],
    )  # fmt: skip
    return result


class _HSTULayer(torch.autograd.Function):
    """of_attention: the arguments of attention's operator that are no operands or tables. The
    parameters are those that `hstu_node` gives, not cast."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, seed: Tensor | None, end: Tensor | None, *others: Any
    ) -> Tensor:
        plan: Plan = others[0]
        return _sum(ctx, x, *_gated(ctx, x, seed, end, *others), end, plan.in_place)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads_of_outputs: Any) -> tuple[Tensor | None, ...]:
        (dout,) = grads_of_outputs
        (
            x, mean, rstd, norm_weight, norm_bias, weight, bias, normed, gated, packed,
            a, lse, gate_mean, gate_rstd, gate_weight, gate_bias, projection, seed, end,
            *of_attention,
        ) = ctx.saved_tensors  # fmt: skip
        kernels, plan, needs = stages(), ctx.plan, ctx.needs_input_grad
        dtypes, (eps, _, rms), (dropout, gate_norm) = ctx.dtypes, plan.norm, plan.gate

        def norm_again() -> Tensor:
            columns = 0 if bias is None else bias_columns(x, plan.dtype)
            of_norm = norm_weight, norm_bias, plan.dtype, *plan.norm, columns, end, dout
            return kernels.row_norm(x, *of_norm, a.shape[0])[0]

        if packed is None:
            normed = norm_again() if normed is None else normed
            packed = linear(normed, weight, bias)
        u, q, k, v = plan.split(packed)
        grads = _new(packed, dout)
        da = a if is_last_backward() else _new(a, dout)
        gate_sums, dprojection = kernels.gate_linear_backward(
            dout, gated, [u, a, gate_mean, gate_rstd, gate_weight], gate_bias, projection, seed,
            dropout, gate_norm.eps, gate_norm.rms, [grads, da], needs[11], end,
        )  # fmt: skip
        segments, bias_tensors = of_attention[: ctx.num_segments], of_attention[ctx.num_segments :]
        da = torch.unflatten(da, 1, (plan.heads, -1))
        dtables = kernels.attention_backward(
            da, [None, lse], grads, None, plan.columns(), q, k, v, segments, bias_tensors,
            *ctx.others,
        )  # fmt: skip
        if end is None:
            zeroed_behind(grads, x.shape[0])
        release(packed, a, *([] if gated is None else [gated]))
        del da
        if normed is None and needs[7]:
            normed = norm_again()
        wanted = [needs[0] or needs[5] or needs[6], *needs[7:9]]
        dnormed, dweight, dbias = linear_gradients(
            grads, normed, weight, wanted, plan.dtype, dtypes[0], True, x.shape[0]
        )
        del grads
        dx = sums = None
        if dnormed is not None:
            dx, sums = kernels.row_norm_backward(
                dnormed, x, mean, rstd, norm_weight, dout, eps, rms, end
            )
        return (
            dx,
            *(None,) * 4,
            *_of_norm(sums, norm_weight, norm_bias),
            dweight,
            dbias,
            *_of_norm(gate_sums, gate_weight, gate_bias),
            dprojection.to(dtypes[1]) if needs[11] else None,
            *(dtable if needed else None for dtable, needed in zip(dtables, needs[12:])),
        )


def _gated(
    ctx: Any,
    x: Tensor,
    seed: Tensor | None,
    end: Tensor | None,
    plan: Plan,
    of_attention: tuple[Any, Any, Any],
    *parameters: Any,
) -> tuple[Tensor, Tensor]:
    """The operands of the output's projection. Saves what a backward reads; what it does not is
    free when this returns, and the normed rows before the attention."""
    norm_weight, norm_bias, weight, bias, gate_weight, gate_bias, projection, *tables = parameters
    segments, bias_tensors, others = of_attention
    kernels, dtype, dropped = stages(), plan.dtype, set(plan.recompute)
    if not any(ctx.needs_input_grad):
        dropped = {"norm", "activation", "projection"}

    def kept(name: str, x: Tensor) -> Tensor | None:
        return None if name in dropped else x

    biases = [] if bias is None else [bias]
    cast_weight, cast_projection, *biases = cast(dtype, weight, projection, *biases)
    cast_bias = biases[0] if biases else None
    of_norm = norm_weight, norm_bias, dtype, *plan.norm, bias_columns(x, dtype) if biases else 0
    rows = rounded_rows(x, end, dtype)  # the backward copies dout if x has another dtype
    normed, *statistics = kernels.row_norm(x, *of_norm, end, None, rows)
    packed = linear(normed, cast_weight, cast_bias)
    normed = kept("norm", normed)
    u, q, k, v = plan.split(packed)
    a, lse = kernels.attention(q, k, v, segments, [*tables, *bias_tensors], *others)
    if end is None:  # otherwise the attention clears what is behind it
        zeroed_behind(a, x.shape[0])
    a, (dropout, gate_norm) = a.flatten(1), plan.gate
    gated, *gate_statistics = kernels.gate(u, a, gate_weight, gate_bias, seed, dropout, *gate_norm)
    ctx.save_for_backward(
        x, *statistics, norm_weight, norm_bias, cast_weight, cast_bias, normed,
        kept("activation", gated), kept("projection", packed), a, lse, *gate_statistics,
        gate_weight, gate_bias, cast_projection, seed, end, *segments, *tables, *bias_tensors,
    )  # fmt: skip
    ctx.plan, ctx.others, ctx.num_segments = plan, others, len(segments)
    ctx.dtypes = weight.dtype, projection.dtype
    return gated, cast_projection


def _sum(
    ctx: Any, x: Tensor, gated: Tensor, projection: Tensor, end: Tensor | None, in_place: bool
) -> Tensor:
    """x + gated projectionᵀ, 0 behind the end. Where no backward follows, the GEMM adds its result
    to x, or to a copy: one rounding and one pass less."""
    if x.dtype != gated.dtype or any(ctx.needs_input_grad) or torch.compiler.is_compiling():
        return residual_sum(x, linear(gated, projection, None)[: x.shape[0]], end)
    rows = gated[: x.shape[0]]
    out = x if in_place else x.clone(memory_format=torch.contiguous_format)
    # `out`, not addmm_: recorders of launches know it
    return with_zero_tail(torch.addmm(out, rows, projection.t(), out=out), end)


def _new(like: Tensor, dout: Tensor) -> Tensor:
    """Made of dout: a graph would make in the forward what depends on nothing else, and keep it."""
    return dout.new_empty(like.shape, dtype=like.dtype)


def _of_norm(
    sums: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a norm's weight and bias, from their sums `[2, W]`."""
    if sums is None:
        return None, None
    return sums[0].to(weight.dtype), None if bias is None else sums[1].to(bias.dtype)


class _GatedOutput(torch.autograd.Function):
    """x + gate(u, a) W_o, of which nothing is kept but u, a and statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        u: Tensor,
        a: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Tensor,
        seed: Tensor | None,
        gate: Gate,
    ) -> Tensor:
        kernels, (dropout, norm) = stages(), gate
        gated, *statistics = kernels.gate(u, a, weight, bias, seed, dropout, *norm)
        ctx.save_for_backward(u, a, *statistics, weight, bias, projection, seed)
        ctx.gate = gate
        return _sum(ctx, x, gated, projection, None, False)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads_of_outputs: Any) -> tuple[Tensor | None, ...]:
        (dout,) = grads_of_outputs
        *operands, weight, bias, projection, seed = ctx.saved_tensors
        needs, (dropout, norm) = ctx.needs_input_grad, ctx.gate
        du, da = outs = [_new(operands[1], dout) for _ in range(2)]
        sums, dprojection = stages().gate_linear_backward(
            dout, None, [*operands, weight], bias, projection, seed, dropout, norm.eps, norm.rms,
            outs, needs[5],
        )  # fmt: skip
        dprojection = dprojection.to(projection.dtype) if needs[5] else None
        return dout, du, da, *_of_norm(sums, weight, bias), dprojection, None, None
