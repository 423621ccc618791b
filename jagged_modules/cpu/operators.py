"""Registration of the CPU path's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library
from torch._C import DisableTorchFunction


def host_operator(
    name: str, fake: Callable[..., object], schema: str | None = None
) -> Callable[[Callable[..., object]], Any]:
    """Decorator: register the body as an operator `jagged_modules::<name>` of host tensors, which
    computes in their dtypes: autocast and torch function modes (such as that of layers under
    `batch_invariant`) do not change what it computes. They may be active, because a caller may run
    the backward inside of them. Each operator needs a derivative, or an error in its place, by
    `jagged_kernels.common.autograd`: else torch would differentiate the body.

    Args:
        fake: same arguments, makes outputs of the right shape and dtype without looking at data.
        schema: from the body's annotations if None.
    """

    def register(body: Callable[..., object]) -> Any:
        def alone(*args: Any) -> object:
            with torch.autocast("cpu", enabled=False), DisableTorchFunction():
                return body(*args)

        infer_schema: Callable[..., str] = library.infer_schema  # pyright: ignore - unannotated
        full_name = f"jagged_modules::{name}"
        library.define(full_name, schema or infer_schema(body, mutates_args=()))
        library.impl(full_name, "CPU", alone)
        library.register_fake(full_name, fake)
        return getattr(torch.ops.jagged_modules, name).default

    return register
