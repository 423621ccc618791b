"""Weights of torch's attention modules in those of the layers here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..activations import POINTWISE
from ..scalars import check_kind

EPS_NAMES = "eps", "variance_epsilon", "epsilon"  # of norms that are not torch's


def checked_attention(module: Any) -> Any:
    """The module, whose attributes torch does not annotate; TypeError or ValueError unless the
    layers here compute what this nn.MultiheadAttention does."""
    check_kind("module", module, nn.MultiheadAttention, "an nn.MultiheadAttention")
    if not module._qkv_same_embed_dim:
        raise ValueError(
            f"kdim and vdim must be embed_dim, {module.embed_dim}, got {module.kdim} and"
            f" {module.vdim}: project keys and values first"
        )
    if module.bias_k is not None or module.add_zero_attn:
        found = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
        raise ValueError(f"module must have no keys besides the history's, got {found}=True")
    return module


def place(module: nn.Module) -> dict[str, Any]:
    """Device and dtype of a module's parameters."""
    parameter = next(module.parameters())
    return dict(device=parameter.device, dtype=parameter.dtype)


def load(target: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Copy the parameters of a linear layer or a norm. A bias of None is one of 0."""
    own: Any = target
    with torch.no_grad():
        own.weight.copy_(weight)
        if bias is None:
            own.bias.zero_()
        else:
            own.bias.copy_(bias)


def load_attention(layer: nn.Module, module: Any) -> None:
    """Copy a `checked_attention`'s projections into a layer's q_proj, kv_proj and out_proj."""
    own: Any = layer
    width, bias = module.embed_dim, module.in_proj_bias
    q, kv = module.in_proj_weight.tensor_split([width])
    q_bias, kv_bias = (None, None) if bias is None else bias.tensor_split([width])
    load(own.q_proj, q, q_bias)
    load(own.kv_proj, kv, kv_bias)
    load(own.out_proj, module.out_proj.weight, module.out_proj.bias)


def load_projections(layer: nn.Module, linears: Sequence[Any]) -> None:
    """Copy the linears of queries, keys and values, which may be parts of one, and of the output
    into a layer as above."""
    own: Any = layer
    *parts, out = (linear_of(f"attention[{i}]", linear) for i, linear in enumerate(linears))
    weight = torch.cat([w for w, _ in parts])
    bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in parts])
    width = own.q_proj.weight.shape[0]
    if len(weight) != 3 * width:
        raise ValueError(
            f"attention must have linears with {width} outputs for queries, keys and values each,"
            f" then that of the output, got {[len(w) for w, _ in parts]} outputs before the last"
        )
    load(own.q_proj, weight[:width], bias[:width])
    load(own.kv_proj, weight[width:], bias[width:])
    load(own.out_proj, *out)


def linear_of(name: str, module: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of an nn.Linear, or of an nn.Conv1d that computes each row by itself."""
    if isinstance(module, nn.Conv1d):
        given = module.kernel_size, module.stride, module.padding, module.groups
        if given != ((1,), (1,), (0,), 1):
            raise ValueError(
                f"{name} must have kernel_size 1, stride 1, padding 0 and groups 1, got {module}"
            )
        return module.weight[:, :, 0], module.bias
    check_kind(name, module, nn.Linear, "an nn.Linear or an nn.Conv1d of single rows")
    return module.weight, module.bias


def activation_of(name: str, given: Callable[[Tensor], Tensor]) -> str:
    """The name of the activation that has the values of this function or module."""
    # an even number: gated activations halve it
    x = torch.linspace(-10, 10, 162, dtype=torch.float64, device="cpu")
    values = _in_float64(given)(x.clone())  # some write to their operand
    for known, activation in POINTWISE.items():
        if values.shape == x.shape and torch.allclose(activation.function(x), values, 1e-9, 1e-9):
            return known
    raise ValueError(f"{name} must have the values of one of {tuple(POINTWISE)}, got {given}")


def torch_norm(name: str, norm: Any) -> Any:
    """The norm as an nn.LayerNorm or nn.RMSNorm. One of another class must have the parameters of
    one of these in their order, an eps, and its results for rows of about 1 and of about √eps."""
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        return norm
    expected = "an nn.LayerNorm, an nn.RMSNorm, or a module that computes the same"
    check_kind(name, norm, nn.Module, expected)
    eps = next((x for x in (getattr(norm, y, None) for y in EPS_NAMES) if x is not None), None)
    parameters = list(norm.parameters())
    if eps is None or [x.dim() for x in parameters] not in ([1], [1, 1]):
        raise TypeError(f"{name} must be {expected} with an {' or '.join(EPS_NAMES)}, got {norm}")
    own: Any = (nn.RMSNorm, nn.LayerNorm)[len(parameters) - 1](len(parameters[0]), eps)
    x = torch.linspace(-1, 2, len(parameters[0]), dtype=torch.float64, device="cpu").cos()

    def results(module: Any) -> Tensor:
        module = _in_float64(module)
        for parameter, values in zip(module.parameters(), (x + 2, x.flip(0))):
            parameter.copy_(values)
        return module(torch.stack([x, x * (eps**0.5 or 1)]))

    difference = float((results(norm) - results(own)).abs().max())
    if not difference < 1e-5:
        raise ValueError(f"{name} must have the results of {own}, got {norm}, {difference:.3g} off")
    own.to(**place(norm))
    with torch.no_grad():
        for parameter, values in zip(own.parameters(), parameters):
            parameter.copy_(values)
    return own


def _in_float64(given: Any) -> Any:
    """A copy on the host, in eval mode, without gradients; a function as it is."""
    if isinstance(given, nn.Module):
        return copy.deepcopy(given).to("cpu", torch.float64).eval().requires_grad_(False)
    return given


def norm_of(norms: Sequence[Any]) -> dict[str, Any]:
    """The options `norm` and `norm_eps` of an encoder layer with these two norms."""
    first, second = norms
    if isinstance(first, nn.RMSNorm) != isinstance(second, nn.RMSNorm) or first.eps != second.eps:
        raise ValueError(f"norm2 must be as norm1, {first}, got {second}")
    if first.eps is None:
        raise ValueError("norm1 must have an eps, which nn.RMSNorm's default is not, got None")
    return dict(norm="rms" if isinstance(first, nn.RMSNorm) else "layer", norm_eps=first.eps)


def load_norm(target: nn.Module, norm: Any) -> None:
    """Copy the parameters of a norm; those that it does not have are 1 and 0."""
    own: Any = target
    with torch.no_grad():
        nn.init.ones_(own.weight) if norm.weight is None else own.weight.copy_(norm.weight)
        if isinstance(own, nn.LayerNorm):
            nn.init.zeros_(own.bias) if norm.bias is None else own.bias.copy_(norm.bias)
