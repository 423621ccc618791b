"""Autocast for operators that are not torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library
from torch._C import DisableTorchFunction

if TYPE_CHECKING:  # torch.library does not export the class
    from torch._library.custom_ops import CustomOpDef


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, as scaled_dot_product_attention has it: float64 stays."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def autocast(x: Tensor) -> Tensor:
    return x.to(autocast_dtype(x))


def host_operator(name: str) -> Callable[[Callable[..., object]], CustomOpDef]:
    """Decorator: an operator of host tensors, whose body computes in its tensors' dtypes also where autocast is on: a backward may be run
    inside it, where nn.Linear's takes no harm. Nor do modes of torch functions reach into it, `batch_invariant`'s of layers for one."""

    def register(body: Callable[..., object]) -> CustomOpDef:
        schema = library.infer_schema(body, mutates_args=())  # pyright: ignore[reportUnknownMemberType] - unannotated in torch

        def alone(*args: Any) -> object:
            with torch.autocast("cpu", enabled=False), DisableTorchFunction():
                return body(*args)

        return library.custom_op(name, alone, mutates_args=(), device_types="cpu", schema=schema)

    return register
