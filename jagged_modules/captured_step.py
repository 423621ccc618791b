"""A module's forward and backward on buffers of fixed sizes, as CUDA graphs: for graphed.py."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from .padded_arguments import OFFSETS, SCALAR, Arguments, build
from .padded_buffers import Buffers
from .tracing import rehearsal

WARM_UPS = 2  # the first run compiles kernels, the second launches them as later ones do


_fork_rng: Callable[..., AbstractContextManager[None]] = torch.random.fork_rng  # pyright: ignore - unannotated in torch


def _clear_workspaces() -> None:
    """Drop the workspaces that cuBLAS keeps for each stream. Captured GEMMs then allocate theirs
    from the graphs' pool. Otherwise they would share those of earlier captures on the stream, which
    torch frees with any of the graphs (https://github.com/pytorch/pytorch/issues/193402). torch's
    own graph trees clear them too, before and after a capture."""
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore - torch has no public function for it


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _CudaGraphs:
    """Replays a step's calls from CUDA graphs, which the constructor captures. The results are the
    same tensors each time."""

    def __init__(
        self,
        forward: Callable[[], list[Tensor]],
        backward: Callable[[list[Tensor]], list[Any]] | None,
        device: torch.device,
        pool: Any,
    ) -> None:
        self._graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # captured in this thread
        with torch.cuda.device(device), torch.autograd.set_multithreading_enabled(False):
            self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
            stream = _capture_stream(device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), _fork_rng([device.index]):
                for _ in range(WARM_UPS):
                    outputs = forward()
                    if not any(x.requires_grad for x in outputs):
                        backward = None
                    if backward is not None:
                        backward(outputs)
                    del outputs
            torch.cuda.current_stream().wait_stream(stream)
            _clear_workspaces()
            # "thread_local": a data loader's thread may allocate page-locked memory meanwhile.
            capture = functools.partial(
                torch.cuda.graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"
            )
            with capture(self._graphs[0]):
                outputs = forward()
            if backward is not None:
                with capture(self._graphs[1]):
                    self._gradients = backward(outputs)
            _clear_workspaces()
            self._outputs = [x.detach() for x in outputs]

    def forward(self) -> list[Tensor]:
        self._graphs[0].replay()
        return self._outputs

    def backward(self) -> list[Tensor | None]:
        self._graphs[1].replay()
        return self._gradients


# by the type of the device; elsewhere the module runs as it is
RUNNERS: dict[str, Any] = {"cuda": _CudaGraphs}


class Step:
    """A module's step for one bucket: buffers of the arguments and of the results' gradients, and
    what runs on them."""

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        device: torch.device,
        trained: bool,
        pool: Any,
    ) -> None:
        capacities = arguments.capacities
        self._module, self._trained = module, trained
        self._spec, self._storages = arguments.spec, arguments.storages
        self._kinds = [leaf.kind for leaf in arguments.leaves]
        self._parameters = (
            {name: x for name, x in module.named_parameters() if x.requires_grad} if trained else {}
        )
        self._wanted = [trained and leaf.tensor.requires_grad for leaf in arguments.leaves]
        self._autocast = (
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
        )
        # what each result is: a place among the arguments, a capacity, or a constant
        self._results: list[Any] | None = None
        self._rows = [both.rows for both in capacities]
        # of a capacity, the leaf whose size or rows it is, and which of the two
        self._places = {
            capacity: (place, number)
            for place, both in enumerate(capacities)
            for number, capacity in enumerate(both)
            if capacity >= 0
        }
        self._buffers = Buffers(arguments.leaves, capacities, device)
        self.buffers = self._buffers.tensors
        self.pad(arguments)
        versions = [(x, x._version, x.clone()) for x in module.buffers()]
        self._runner: Any = RUNNERS[device.type](
            self._forward, self._backward if trained else None, device, pool
        )
        for x, version, value in versions:
            if x._version != version:  # the warm-up counts as no call
                x.copy_(value)
        self.pool = self._runner.pool

    def _forward(self) -> list[Tensor]:
        """Run the module on the buffers. Parameters are aliases, so that the graphs contain no
        hooks of theirs."""
        device, (enabled, dtype) = self.buffers[0].device.type, self._autocast
        # not by the caller's hooks, such as checkpoint's
        kept_as_they_are = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        autocast = torch.autocast(device, dtype, enabled, cache_enabled=False)
        with torch.set_grad_enabled(self._trained), kept_as_they_are, autocast, rehearsal():
            leaves = [
                x.detach().requires_grad_(wanted) for x, wanted in zip(self.buffers, self._wanted)
            ]
            aliases = {name: x.detach().requires_grad_() for name, x in self._parameters.items()}
            # those that get gradients: of the leaves, then of the parameters
            self._inputs = [*(x for x in leaves if x.requires_grad), *aliases.values()]
            args, kwargs = build(self._spec, self._storages, leaves, self._rows)
            result = torch.func.functional_call(self._module, aliases, args, kwargs)
            flat, structure = tree_flatten(result)
            is_first = self._results is None
            if self._results is None:
                self._results = [self._describe(x) for x in flat]
                self._make = _maker(structure, len(flat))
            outputs = [x for x, result in zip(flat, self._results) if result is _SLICED]
            if is_first:
                if not self._trained:  # a backward looks up those of the leaves too
                    used = {x.shape[0] for x in outputs}
                    self._places = {size: x for size, x in self._places.items() if size in used}
                self.gradients = [torch.zeros_like(x) if x.requires_grad else None for x in outputs]
                self._readers = _readers(outputs, self._inputs)
            return outputs

    def _describe(self, x: Any) -> Any:
        """A constant; the index of the offsets that x is; or _SLICED."""
        if x is None or isinstance(x, (bool, str)):
            return _Constant(x)
        if not isinstance(x, Tensor):  # a number may be a size, which is that of the padding
            raise ValueError(
                "module must return tensors, None, bools and strings, and containers of them, got"
                f" {type(x).__name__}"
            )
        for place, (buffer, kind) in enumerate(zip(self.buffers, self._kinds)):
            if kind == OFFSETS and (x.data_ptr(), x.shape, x.dtype) == (
                buffer.data_ptr(),
                buffer.shape,
                buffer.dtype,
            ):
                return place
        sizes = {
            len(buffer) - (kind == OFFSETS)
            for buffer, kind in zip(self.buffers, self._kinds)
            if kind != SCALAR
        }
        if not x.dim() or x.shape[0] not in sizes:
            raise ValueError(
                "module must return tensors with one row for each row or segment of its arguments,"
                f" padded to {sorted(sizes)}, got {list(x.shape)}; compute losses and means over"
                " the batch outside"
            )
        return _SLICED

    def _backward(self, outputs: list[Tensor]) -> list[Tensor | None]:
        """Gradients of `_inputs`."""
        outputs = [x for x in outputs if x.requires_grad]
        if not outputs:
            return [None] * len(self._inputs)
        given = [x for x in self.gradients if x is not None]
        with torch.autocast(self.buffers[0].device.type, enabled=False):
            found = torch.autograd.grad(outputs, self._inputs, given, allow_unused=True)
        gradients: list[Tensor | None] = [*found]
        if any(x is not None and x.layout != torch.strided for x in gradients):
            raise ValueError(
                "module must have dense gradients, got sparse ones: leave such embeddings outside"
            )
        return gradients

    def pad(self, arguments: Arguments) -> None:
        self._buffers.pad(arguments.leaves, arguments.capacities)

    def results(self, arguments: Arguments, call: Call | None) -> Any:
        """The module's result for arguments that `pad` has copied. call: gets the gradients, if
        given."""
        leaves = arguments.leaves
        sizes = {
            capacity: leaves[i].rows if j else leaves[i].size
            for capacity, (i, j) in self._places.items()
        }
        if call is None:
            outputs = iter(self.forward(sizes))
        else:
            wanted = [x.tensor for x, is_wanted in zip(leaves, self._wanted) if is_wanted]
            outputs = iter(_replay(self, call, sizes, *wanted, *self._parameters.values()))
        flat: list[Any] = []
        for x in self._results or ():
            if x is _SLICED:
                flat.append(next(outputs))
            else:
                flat.append(x.value if isinstance(x, _Constant) else leaves[int(x)].tensor)
        return self._make(flat)

    def forward(self, sizes: Mapping[int, int]) -> list[Tensor]:
        outputs = self._runner.forward()
        return [x[: sizes[x.shape[0]]].clone() for x in outputs]

    def backward(
        self, sizes: Mapping[int, int], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gradients of the leaves that want one, then of the parameters: new tensors, because
        autograd keeps what it is given. The graph computes those of all results. What only results
        without a gradient depend on gets None, as without a graph: given zeros, an optimizer with
        momentum or weight decay would change it."""
        for buffer, gradient in zip(self.gradients, gradients):
            if buffer is None:
                continue
            size = 0 if gradient is None else gradient.shape[0]
            if gradient is not None:
                buffer[:size].copy_(gradient)
            if size < len(buffer):
                buffer[size:].zero_()
        used = {place for place, gradient in enumerate(gradients) if gradient is not None}
        found = [
            None if used.isdisjoint(readers) else x
            for x, readers in zip(self._runner.backward(), self._readers)
        ]
        rows = sum(self._wanted)
        of_leaves = [
            x if x is None else x[: sizes[x.shape[0]]].clone() if x.dim() else x.clone()
            for x in found[:rows]
        ]
        of_parameters = [x for x in found[rows:] if x is not None]
        copies = iter(_multiply(of_parameters, 1) if of_parameters else ())  # one launch
        return [*of_leaves, *(None if x is None else next(copies) for x in found[rows:])]


_multiply: Callable[[list[Tensor], int], tuple[Tensor, ...]] = torch._foreach_mul  # pyright: ignore - documented under this name


def _maker(structure: Any, count: int) -> Callable[[list[Any]], Any]:
    """What makes a result of this structure of its leaves. Most are one tensor, or a tuple of some:
    torch's function takes far longer."""
    if structure.is_leaf():
        return operator.itemgetter(0)
    if structure.type is tuple and structure.num_nodes == 1 + count:
        return tuple
    return functools.partial(tree_unflatten, treespec=structure)


def _readers(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[set[int]]:
    """For each input, the places of the outputs that depend on it."""
    places = {get_gradient_edge(x).node: place for place, x in enumerate(inputs)}
    found: list[set[int]] = [set() for _ in inputs]
    for output, x in enumerate(outputs):
        stack: list[Any] = [get_gradient_edge(x).node] if x.requires_grad else []
        seen = set(stack)
        while stack:
            node = stack.pop()
            if node in places:
                found[places[node]].add(output)
            new = {
                following for following, _ in node.next_functions if following is not None
            } - seen
            seen |= new
            stack += new
    return found


_SLICED = object()  # a result whose first dimension is a capacity


class _Constant(NamedTuple):
    """A result that is no tensor."""

    value: Any


class Call:
    """A forward whose backward is to come. Only autograd's graph refers to it, so it goes when the
    results do."""

    differentiated = False


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: Step, call: Call, sizes: Mapping[int, int], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.call, ctx.sizes = step, call, sizes
        ctx.set_materialize_grads(False)
        outputs = step.forward(sizes)
        ctx.mark_non_differentiable(
            *(x for x, gradient in zip(outputs, step.gradients) if gradient is None)
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:  # pyright: ignore - the decorator
        if ctx.call.differentiated:
            raise RuntimeError(
                "a graphed module's backward runs once for each call: its intermediate results are"
                " overwritten"
            )
        ctx.call.differentiated = True
        return None, None, None, *ctx.step.backward(ctx.sizes, gradients)


_replay: Callable[..., tuple[Tensor, ...]] = _Replayed.apply  # pyright: ignore - unannotated in torch


def _same(x: Any) -> Any:
    return x
