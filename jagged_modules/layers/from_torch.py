"""Weights of torch's attention modules in those of the layers here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from ..activations import POINTWISE
from ..scalars import check_kind
from .one_node import has_call_of_its_own

L = TypeVar("L", bound=nn.Module)
EPS_NAMES = "eps", "variance_epsilon", "epsilon"  # of norms that are not torch's


def check_torchs(module: nn.Module, kind: type[nn.Module]) -> None:
    """TypeError unless the module computes what this class of torch does."""
    expected = f"an nn.{kind.__name__}"
    check_kind("module", module, kind, expected)
    if not is_of_class(module, kind):
        what = type(module).__name__
        if type(module).forward is kind.forward:
            what += " with hooks, or a forward of its own"
        raise TypeError(f"module must have the forward of {expected} and no hooks, got {what}")


def is_of_class(module: nn.Module, kind: type[L]) -> TypeGuard[L]:
    """Whether a call of the module is the forward of this class of torch. Hooks may change it, and
    may make the weights that it reads, as those of weight_norm do."""
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and not has_call_of_its_own(module)
    )


def checked_attention(module: Any) -> Any:
    """The module, whose attributes torch does not annotate; TypeError or ValueError unless the
    layers here compute what this nn.MultiheadAttention does."""
    check_torchs(module, nn.MultiheadAttention)
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


def like(layer: L, *modules: nn.Module) -> L:
    """The layer in the mode of the first of the modules, and frozen if all their parameters are."""
    if not any(x.requires_grad for module in modules for x in module.parameters()):
        layer.requires_grad_(False)
    return layer.train(modules[0].training)


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
    *parts, out = linears
    projections = [linear_of(f"attention[{i}]", linear) for i, linear in enumerate(parts)]
    weight, bias = joined(projections)
    width = own.q_proj.weight.shape[0]
    if len(weight) != 3 * width:
        raise ValueError(
            f"attention must have linears with {width} outputs for queries, keys and values each,"
            " then that of the output, or nn.Identity(), got"
            f" {[len(w) for w, _ in projections]} outputs before the last"
        )
    load(own.q_proj, weight[:width], bias[:width])
    load(own.kv_proj, weight[width:], bias[width:])
    if isinstance(out, nn.Identity):
        load(own.out_proj, torch.eye(width, device=weight.device), None)
        own.out_proj.requires_grad_(False)
    else:
        load(own.out_proj, *linear_of(f"attention[{len(parts)}]", out))


def joined(linears: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    """Weight and bias of linears whose outputs are one after another."""
    weight = torch.cat([w for w, _ in linears])
    return weight, torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in linears])


def linear_of(name: str, module: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of an nn.Linear, of an nn.Conv1d that computes each row by itself, or of a
    module of another class that has these parameters and results."""
    if isinstance(module, nn.Module) and has_call_of_its_own(module):
        raise TypeError(
            f"{name} must have no hooks and no forward of its own, which may change its weight or"
            f" its result (prune.remove and remove_weight_norm end theirs), got {module}"
        )
    if is_of_class(module, nn.Conv1d):
        given = module.kernel_size, module.stride, module.padding, module.groups
        if given != ((1,), (1,), (0,), 1):
            raise ValueError(
                f"{name} must have kernel_size 1, stride 1, padding 0 and groups 1, got {module}"
            )
        return module.weight[:, :, 0], module.bias
    if is_of_class(module, nn.Linear):
        return module.weight, module.bias
    expected = "an nn.Linear, an nn.Conv1d of single rows, or a module that computes the same"
    check_kind(name, module, nn.Module, expected)
    parameters = list(module.parameters())
    if [x.dim() for x in parameters] in ([2], [2, 1]):
        own = _in_float64(module)
        in_float64, *bias = own.parameters()
        for given, weight in ((parameters[0], in_float64), (parameters[0].mT, in_float64.mT)):
            x = _a_row(weight.shape[1])
            rows = torch.stack([x, -x, x.flip(0)])
            try:
                results = own(rows)
            except RuntimeError:  # of the shapes: transposed
                continue
            if torch.allclose(results, nnf.linear(rows, weight, *bias), 1e-9, 1e-9):
                return given, parameters[1] if bias else None
    raise TypeError(f"{name} must be {expected}, got {module}")


def activation_of(name: str, given: Callable[[Tensor], Tensor]) -> str:
    """The name of the activation that has the values of this function or module."""
    # an even number: gated activations halve it
    x = torch.linspace(-10, 10, 162, dtype=torch.float64, device="cpu")
    values = _in_float64(given)(x.clone())  # some write to their operand
    for known, activation in POINTWISE.items():
        if values.shape == x.shape and torch.allclose(activation.function(x), values, 1e-9, 1e-9):
            return known
    raise ValueError(f"{name} must have the values of one of {tuple(POINTWISE)}, got {given}")


def torch_norm(name: str, norm: Any, width: int) -> Any:
    """The norm as an nn.LayerNorm or nn.RMSNorm if it has its parameters in their order, an eps,
    and its results for rows of about 1 and of about √eps. Otherwise the module, which must compute
    each row by itself."""
    if _kind_of_norm(norm) is not None:
        return norm
    check_kind(name, norm, nn.Module, "an nn.LayerNorm, an nn.RMSNorm or another module of rows")
    _check_rows(name, norm, width)
    eps = next((x for x in (getattr(norm, y, None) for y in EPS_NAMES) if x is not None), None)
    parameters = list(norm.parameters())
    if eps is None or [x.shape for x in parameters] not in ([(width,)], [(width,)] * 2):
        return norm
    own: Any = (nn.RMSNorm, nn.LayerNorm)[len(parameters) - 1](width, eps)
    x = _a_row(width)

    def results(module: Any) -> Tensor:
        module = _in_float64(module)
        for parameter, values in zip(module.parameters(), (x + 2, x.flip(0))):
            parameter.copy_(values)
        return module(torch.stack([x, x * (eps**0.5 or 1)]))

    if not float((results(norm) - results(own)).abs().max()) < 1e-5:
        return norm
    own.to(**place(norm))
    with torch.no_grad():
        for parameter, values in zip(own.parameters(), parameters):
            parameter.copy_(values)
    return own


def _kind_of_norm(norm: Any) -> type[nn.Module] | None:
    """nn.LayerNorm or nn.RMSNorm, if a call of the norm computes its class's forward. A forward of
    its own may do so in another dtype."""
    kinds: tuple[Any, ...] = nn.LayerNorm, nn.RMSNorm
    for kind in kinds:
        if is_of_class(norm, kind):
            return kind
        if isinstance(norm, kind) and norm.weight is not None:
            x = _a_row(norm.weight.numel()).to(norm.weight).view_as(norm.weight)
            tolerance = 8 * torch.finfo(x.dtype).eps
            with torch.no_grad():
                if torch.allclose(norm(x), kind.forward(norm, x), tolerance, tolerance):
                    return kind
    return None


def _check_rows(name: str, norm: nn.Module, width: int) -> None:
    """ValueError unless the module computes each row of this width by itself, in training too."""
    own, x = _in_float64(norm).train(), _a_row(width)
    rows = torch.stack([x, 2 - x, x.flip(0)])
    expected = f"{name} must compute each row of width {width} by itself, got {norm}"
    try:
        together, alone = own(rows), torch.cat([own(row[None]) for row in rows])
    except (RuntimeError, ValueError) as error:  # of shapes, of dtypes, of statistics of one row
        raise ValueError(f"{expected}: {error}") from error
    if together.shape != rows.shape or not torch.allclose(together, alone, 1e-9, 1e-9):
        raise ValueError(expected)


def _a_row(width: int) -> Tensor:
    return torch.linspace(-1, 2, width, dtype=torch.float64, device="cpu").cos()


def _in_float64(given: Any) -> Any:
    """A copy on the host, in eval mode, without gradients; a function as it is."""
    if isinstance(given, nn.Module):
        return copy.deepcopy(given).to("cpu", torch.float64).eval().requires_grad_(False)
    return given


def norm_of(norms: Sequence[Any]) -> dict[str, Any]:
    """The options `norm` and `norm_eps` of an encoder layer with these two norms; none if they are
    not torch's, or not of one kind with one eps."""
    first, second = norms
    kind, other = map(_kind_of_norm, norms)
    if kind is None or other is not kind or not first.eps == second.eps is not None:
        return {}
    return dict(norm="rms" if kind is nn.RMSNorm else "layer", norm_eps=first.eps)


def load_norm(target: nn.Module, norm: Any) -> None:
    """Copy the parameters of a norm; those that it does not have are 1 and 0."""
    own: Any = target
    with torch.no_grad():
        nn.init.ones_(own.weight) if norm.weight is None else own.weight.copy_(norm.weight)
        if isinstance(own, nn.LayerNorm):
            nn.init.zeros_(own.bias) if norm.bias is None else own.bias.copy_(norm.bias)
