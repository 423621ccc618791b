"""What layers share that run as one autograd node: when they may, and the GEMMs of a node.

A layer's forward is otherwise a chain of modules: each call costs host time, each result is saved
for the backward, and autocast casts activations and parameters between them. A node computes the
same from the parameters of these modules, casts each of them once, and saves only what its backward
cannot cheaply compute again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..settings import is_batch_invariant


def may_be_one_node(x: Tensor, *modules: nn.Module) -> bool:
    """Whether a layer may compute these modules from their parameters instead of calling them: on a
    GPU, if nothing but the modules' own forward would run.

    A module that was replaced (LoRA, quantised weights), is parametrised or has hooks is called.
    """
    if not x.is_cuda or is_batch_invariant() or _has_global_hooks():
        return False
    return all(map(_is_plain, modules))


def _is_plain(module: nn.Module) -> bool:
    hooks = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    # Also false for the subclass that parametrisation makes, and for quantised weights.
    return not hooks and _is_known(type(module)) and all(map(_is_a_tensor, module.parameters()))


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(("torch.nn.modules.", "jagged_modules."))


def _is_a_tensor(x: Tensor) -> bool:
    return type(x) in (nn.Parameter, Tensor)


def _has_global_hooks() -> bool:
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a GEMM's operands: autocast's, or that of x."""
    if torch.is_autocast_enabled("cuda") and x.dtype != torch.float64:
        return torch.get_autocast_dtype("cuda")
    return x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x `[L, K]` @ weightᵀ + bias; all of one dtype."""
    return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dyᵀ `[N, L]` @ x in the weight's dtype, without a rounding to the operands' in between."""
    if dtype == x.dtype:
        return dy.t() @ x
    return torch.mm(dy.t(), x, out_dtype=torch.float32).to(dtype)


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the rows of dy, in fp32."""
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(dtype)
