"""Registration of the CPU path's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import library
from torch._C import DisableTorchFunction

if TYPE_CHECKING:  # torch has no public name of it
    from torch._library.custom_ops import CustomOpDef

R = TypeVar("R")


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
