"""What the autograd nodes of this package share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..dtypes import autocast_dtype
from ..tracing import is_exporting

SMALL = 2**20  # bytes, below which `release` frees nothing
# x, which a node has made and does not save, as its result of this shape. It is no view: torch
# lets nobody write in place to a view that a node returns.
reshaped_result = torch.ops.aten._unsafe_view.default


def apply(node: Any, *inputs: Any) -> Any:
    """The results of a node, an autograd.Function. Where no backward can follow, its forward runs
    alone and saves nothing: under torch.no_grad(), `needs_input_grad` may still be true, and what
    was saved lives until the forward returns. So it does in torch.export, which records the
    forward's operators: torch.export.draft_export of 2.13 fails at what a node detaches."""
    if torch.is_grad_enabled() and not is_exporting():
        for x in inputs:
            if isinstance(x, Tensor) and x.requires_grad:
                return node.apply(*inputs)
    return node.forward(_NoBackward(len(inputs)), *inputs)


class _NoBackward:
    """The context of a forward that no backward follows."""

    def __init__(self, num_inputs: int) -> None:
        self.needs_input_grad = (False,) * num_inputs

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def release(*tensors: Tensor) -> None:
    """Free the memory of tensors that a node has made, in its forward or its backward, and reads no
    more. Autograd would free what the forward saved when the backward ends. Not if the graph is
    kept for another backward, and no small ones, for which the host's time counts more."""
    if is_last_backward():
        for x in tensors:
            if x.nbytes >= SMALL:
                x.untyped_storage().resize_(0)


def is_last_backward() -> bool:
    """Whether what the forward saved may be overwritten or freed: no other backward reads it. A
    graph of torch.compile sees to both itself."""
    bindings: Any = torch._C  # pyright: ignore[reportPrivateUsage] - torch has no public name
    return not (
        torch.compiler.is_compiling() or bindings._autograd._get_current_graph_task_keep_graph()
    )


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a node's backward, whose results raise RuntimeError when they are
    differentiated. torch's once_differentiable does so only if the node's gradient has a graph of
    its own: else a second derivative would silently be 0."""

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        given = [x for x in gradients if x is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        first = given[0]
        if autocast_dtype(first) != first.dtype:  # that of the forward counts
            with torch.autocast(first.device.type, enabled=False):
                return once(ctx, *gradients)
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        context = _ReadOnce(ctx)
        with torch.no_grad():
            results = backward(context, *gradients)
        leaves = (getattr(node, "variable", None) for node, _ in ctx.next_functions)
        # A derivative with respect to any of these passes through the node and raises the error.
        sources = first.new_zeros(()).requires_grad_(), *gradients, *context.saved_tensors, *leaves
        return _Last.apply(results, *sources)  # type: ignore[no-untyped-call]  # unannotated in torch

    return once


class _ReadOnce:
    """A node's context that may be read again: activation checkpointing unpacks what a node saved
    once."""

    def __init__(self, ctx: Any) -> None:
        self.saved_tensors: tuple[Tensor | None, ...] = ctx.saved_tensors
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, results: tuple[Tensor | None, ...], *sources: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return results

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "jagged attention is not differentiable twice: its backward kernels have no derivative"
            " of their own"
        )
