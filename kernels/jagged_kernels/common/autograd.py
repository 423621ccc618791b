"""Autograd of registered operators, at torch's Autograd dispatch key. No triton import.

An autograd function there costs a third of the host time of `custom_op`'s autograd wrapper, and
takes tensors from lists that hold None too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

below_autograd = torch._C._AutoDispatchBelowAutograd


def differentiate(op: Callable, apply: Callable) -> None:
    """Route the operator's calls under autograd through `apply`, a method of an autograd function.
    Its forward calls `op` inside `below_autograd()`."""

    def call(*args):
        if torch.is_grad_enabled():
            return apply(*args)
        with below_autograd():
            return op(*args)

    library.impl(op.name(), "Autograd", call)


def differentiate_by(op: Callable, gradients: Callable, kept: Callable | None = None) -> None:
    """The same by a function: gradients(gradient of the result, needs_input_grad, *arguments)
    returns those of the first arguments. kept(*arguments): what it takes in place of the arguments,
    of which fewer tensors live until the backward."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            given = args if kept is None else kept(*args)
            ctx.num_inputs = len(args)
            ctx.sizes = [len(x) if isinstance(x, list) else -1 for x in given]
            flat = [y for x in given for y in (x if isinstance(x, list) else [x])]
            ctx.others = [None if isinstance(x, Tensor) else x for x in flat]
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in flat))
            with below_autograd():
                return op(*args)

        @staticmethod
        def backward(ctx, grad):
            flat = iter(x if y is None else y for x, y in zip(ctx.others, ctx.saved_tensors))
            args = [next(flat) if n < 0 else [next(flat) for _ in range(n)] for n in ctx.sizes]
            found = gradients(grad, ctx.needs_input_grad, *args)
            return *found, *(None,) * (ctx.num_inputs - len(found))

    differentiate(op, Node.apply)


def differentiate_by_result(op: Callable, backward_op: Callable, num_tensors: int) -> None:
    """The same by an operator that reads the result: of an operator of x, so many other tensors and
    options, backward_op(gradient of the result, result, *others) is the gradient of x."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *others):
            with below_autograd():
                out = op(x, *others)
            ctx.save_for_backward(out, *others[:num_tensors])
            ctx.options = others[num_tensors:]
            return out

        @staticmethod
        def backward(ctx, grad):
            out, *tensors = ctx.saved_tensors
            others = *tensors, *ctx.options
            return backward_op(grad, out, *others), *(None,) * len(others)

    differentiate(op, Node.apply)


def refuse_derivative(op: Callable, message: str) -> None:
    """Route the operator's calls under autograd through a function that runs it, and raises
    RuntimeError when it is differentiated."""

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs, *tensors):
            with below_autograd():
                results = op(*inputs)
            return (
                tuple(results) if isinstance(results, list) else results
            )  # autograd takes no list

        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError(message)

    differentiate(op, lambda *inputs: Last.apply(inputs, *_tensors(inputs)))


def refuse_twice(function: str, *backward_ops: Callable) -> None:
    """`refuse_derivative` of the operators of a function's backward."""
    message = f"{function} is not differentiable twice: its backward has no derivative of its own"
    for op in backward_ops:
        refuse_derivative(op, message)


def _tensors(inputs: Any) -> list[Tensor]:
    """The tensors among the inputs, and in lists among them."""
    of_lists = (x for entry in inputs if isinstance(entry, list) for x in entry)
    return [x for x in (*inputs, *of_lists) if isinstance(x, Tensor)]
