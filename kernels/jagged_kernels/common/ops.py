"""Registration of launchers as torch operators.

torch's `custom_op` does the same with less code, but its autograd wrapper costs more host time than
a short kernel runs (autograd.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, library
from torch._C import (
    _are_functorch_transforms_active,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import profiler
from triton import knobs

from .device import device_properties

# not FakeTensor, SymInt, ...
_PLAIN = frozenset(
    {Tensor, torch.nn.Parameter, int, float, bool, str, type(None), list, torch.dtype}
)
# A tensor on a GPU shows that CUDA is initialised: torch's public function checks it first.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_launchers: dict[Callable, Callable] = {}  # of operators, on CUDA tensors
bodies: dict[Callable, Callable] = {}  # of operators, as they are defined


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, a constant for torch.compile."""
    if torch.compiler.is_compiling():
        from .traced import traced_capability

        found: tuple[int, int] = traced_capability(device)
        return found
    return device_properties(device).capability


def operator(
    name: str, fake: Callable[..., Any], schema: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function becomes the body of operator `jagged_kernels::name` on CUDA, and on
    the host for Triton's interpreter.

    Args:
        name: the operator's name.
        fake: same arguments, makes outputs of the right shape and dtype without looking at data.
        schema: None: from the function's annotations.

    Returns:
        The operator, called with positional arguments.
    """

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        full_name = f"jagged_kernels::{name}"
        library.define(full_name, schema or library.infer_schema(launcher, mutates_args=()))
        library.impl(full_name, "CPU", _in_the_interpreter(name, launcher))
        on_cuda = on_the_tensors_device(launcher)
        library.impl(full_name, "CUDA", on_cuda)
        library.register_fake(full_name, fake)
        op = getattr(torch.ops.jagged_kernels, name).default
        _launchers[op], bodies[op] = on_cuda, launcher
        return op

    return register


def _in_the_interpreter(name: str, launcher: Callable) -> Callable:
    """Host tensors are for Triton's interpreter. Elsewhere Triton would say that there is no
    driver; this says what is wrong."""

    def launch(*args):
        if not knobs.runtime.interpret:
            raise ValueError(
                f"{name}: Triton's kernels take CUDA tensors, got host tensors; implementation"
                " 'auto' takes both"
            )
        return launcher(*args)

    return launch


def on_the_tensors_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device. Set the tensors' device where it is another; that
    costs more than comparing them."""

    def launch(*args, **options):
        first = args[0]
        device = (first[0] if isinstance(first, (list, tuple)) else first).device
        if device.index == current_device():
            return launcher(*args, **options)
        with torch.cuda.device(device):
            return launcher(*args, **options)

    return launch


def direct(op: Callable, args: tuple, operands: Sequence[Tensor | None]) -> Callable:
    """What to call instead of an operator, with the same arguments: its launcher if torch's
    dispatcher would do nothing but call it, else the operator. The dispatcher converts all
    arguments to C++ and back, at each of its keys.

    The dispatcher does more under traces, modes, transforms and profilers, and with tensors that
    are not plain. It is also what calls autograd, so `direct` is for calls below autograd.

    Args:
        operands: those of the arguments, and the tensors in lists among them, that are
            floating-point tensors of a caller, which may be lazy. The first one is not None.
    """
    if torch.compiler.is_compiling() or profiler._is_profiler_enabled or not operands[0].is_cuda:
        return op
    if (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
        or _is_tracing()
    ):
        return op
    lists = [x for x in args if type(x) is list]
    if not _PLAIN.issuperset(map(type, chain(args, *lists))):
        return op
    for x in operands:
        if x is not None and (x.is_neg() or x._is_zerotensor()):
            return op
    return _launchers.get(op, op)


def called(op: Callable[..., Any], *args: Any) -> Any:
    """Call an operator. In a node, where gradients are off, `direct` chooses what is called. The
    first argument is a tensor. Tensors in lists are not looked at: nodes made them."""
    if not torch.is_grad_enabled():
        op = direct(op, args, [x for x in args if isinstance(x, Tensor)])
    return op(*args)
