"""Autocast for this package's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, library
from torch._C import DisableTorchFunction

if TYPE_CHECKING:  # torch has no public name of it
    from torch._library.custom_ops import CustomOpDef

R = TypeVar("R")


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x under autocast, which does not change float64, as in torch's attention."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def autocast(x: Tensor) -> Tensor:
    """x in the dtype of `autocast_dtype`."""
    dtype = autocast_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def autocast_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`autocast` of each. They nearly always have one dtype and one device, for which one look at
    the setting is enough."""
    dtype, device = autocast_dtype(q), q.device
    q, k, v = [x if x.dtype == dtype and x.device == device else autocast(x) for x in (q, k, v)]
    return q, k, v


def host_operator(
    name: str, fake: Callable[..., object], no_derivative: str | None = None
) -> Callable[[Callable[..., object]], CustomOpDef]:
    """Decorator: register the body as an operator of host tensors, `in_own_dtypes`. fake: same
    arguments, makes outputs of the right shape and dtype without looking at data. no_derivative:
    what the error of the operator's backward says, if it must have none."""

    def no_backward(*_: object) -> None:
        raise RuntimeError(no_derivative)

    def register(body: Callable[..., object]) -> CustomOpDef:
        infer_schema: Callable[..., str] = library.infer_schema  # pyright: ignore - unannotated
        schema = infer_schema(body, mutates_args=())
        body = in_own_dtypes(body)
        operator: Any = library.custom_op(  # whose methods have no types
            name, body, mutates_args=(), device_types="cpu", schema=schema
        )
        operator.register_fake(fake)
        if no_derivative is not None:
            operator.register_autograd(no_backward)
        return operator

    return register


def in_own_dtypes(body: Callable[..., R]) -> Callable[..., R]:
    """The body of an operator of host tensors, computing in its tensors' dtypes: autocast and torch
    function modes (such as that of layers under `batch_invariant`) do not change what it computes.
    They may be active, because a caller may run the backward inside of them."""

    def alone(*args: Any) -> R:
        with torch.autocast("cpu", enabled=False), DisableTorchFunction():
            return body(*args)

    return alone
