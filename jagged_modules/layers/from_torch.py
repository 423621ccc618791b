"""Weights of torch's attention modules in those of the layers here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..scalars import check_kind


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
    """Copy the projections of a `checked_attention` into a layer that has `q_proj`, `kv_proj` and
    `out_proj`."""
    own: Any = layer
    width, bias = module.embed_dim, module.in_proj_bias
    q, kv = module.in_proj_weight.tensor_split([width])
    q_bias, kv_bias = (None, None) if bias is None else bias.tensor_split([width])
    load(own.q_proj, q, q_bias)
    load(own.kv_proj, kv, kv_bias)
    load(own.out_proj, module.out_proj.weight, module.out_proj.bias)
