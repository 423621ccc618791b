"""Traces operators as the launches of their kernels, for programs without Python.

An exported model calls the library's operators, whose bodies are Python. Here they are run by the
trace instead: their tensors become torch's own, and each launch becomes the operator
`jagged_kernels::launch`, which jagged_modules/cpp/launch.cpp defines for CUDA. Its first argument
names a cubin and says how to launch it:

    <file> <kernel> <threads> <bytes of shared memory> <a letter for each parameter of the kernel>

    w, r: the next written or read tensor; W, R: at a multiple of 16 bytes
    i, l: the next integer, in 32 or 64 bits; f: the next number, in 32 bits

Numbers of rows and segments are integers that a trace does not know: no kernel is compiled for
their values. Where a launcher chooses by them, the example's choice stays; each is right for all.
The kernels are the portable ones, without descriptors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, library
from torch.fx.experimental import symbolic_shapes
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from ..common import ops as operators
from ..common.configs import has_small_shared_memory
from ..common.device import device_properties
from ..common.launch import CachedLaunches
from .recorder import Launch, Variants

SCHEMA = (
    "(str kernel, Tensor(a!)[] written, Tensor[] read, SymInt[] integers, float[] factors,"
    " SymInt[] grid) -> ()"
)
UNKNOWN = 3  # stands for an integer that is neither 1 nor a multiple of 16


@functools.cache
def _operator() -> Callable:
    """`launch`, which Python defines for traces alone."""
    if not hasattr(torch.ops.jagged_kernels, "launch"):
        # addresses and strides are those of the trace
        tags = torch.Tag.needs_exact_strides
        library.define("jagged_kernels::launch", SCHEMA, tags=tags)
    library.register_fake("jagged_kernels::launch", lambda *args: None)
    return torch.ops.jagged_kernels.launch.default


@contextlib.contextmanager
def traced_launches(folder: Path, capability: tuple[int, int]) -> Iterator[None]:
    """Inside, operators are traced as launches for GPUs of this compute capability, and cubins are
    written to the folder."""
    num_sms = 132  # a limit of grids, right for any GPU
    if torch.cuda.is_available():
        num_sms = torch.cuda.get_device_properties().multi_processor_count
    # the kernels of 8.x need neither descriptors nor instructions of later GPUs
    chosen = (8, 6) if has_small_shared_memory(capability) else (8, 0)
    properties = SimpleNamespace(multi_processor_count=num_sms)
    trace = _Trace(folder, GPUTarget("cuda", 10 * capability[0] + capability[1], 32))

    def run(kernel, *args, grid, warmup, **options):
        trace.launch(kernel, args, grid, options)

    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: chosen),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(CachedLaunches, "__getitem__", JITFunction.__getitem__),
    ):
        device_properties.cache_clear()
        try:
            with trace:
                yield
        finally:
            device_properties.cache_clear()


class _Trace(TorchFunctionMode):
    """Runs the bodies of the operators that are called."""

    def __init__(self, folder: Path, target: GPUTarget):
        super().__init__()
        self.folder, self.variants, self.op = folder, Variants(target), _operator()
        self.described: dict[Launch, str] = {}
        self.made: list[list[Tensor]] = []  # by the bodies that run, the innermost last

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.data_ptr:
            return _address(args[0])
        body = operators.bodies.get(function)
        if body is None:
            result = function(*args, **(kwargs or {}))
            if self.made and (_makes_memory(function) or any(map(self._is_made, _tensors(args)))):
                self.made[-1] += _tensors(result)
            return result
        self.made.append([])
        try:
            with self, _sizes_stay_open():
                return body(*args)
        finally:
            self.made.pop()

    def _is_made(self, x: Tensor) -> bool:
        return any(x is y for made in self.made[-1:] for y in made)

    def launch(self, kernel: JITFunction, args: tuple, grid: tuple, options: dict) -> None:
        """Traces a launch."""
        leaves, spec = pytree.tree_flatten(args)
        stand_ins = pytree.tree_unflatten(map(_stand_in, leaves), spec)
        options = pytree.tree_map(_constant, options)
        found = self.variants.of(kernel, stand_ins, options)
        types = pytree.tree_leaves(list(found.source.signature.values())[: len(args)])
        written, read, integers, factors, letters = [], [], [], [], ""
        for x, type in zip(leaves, types, strict=True):
            if type == "constexpr":
                continue
            if isinstance(x, Tensor):
                letter, values = ("w", written) if self._is_made(x) else ("r", read)
                letter = letter if _address(x) % 16 else letter.upper()
            elif type in ("i32", "i64"):
                letter, values = "i" if type == "i32" else "l", integers
            elif type == "fp32":
                letter, values = "f", factors
            else:
                raise NotImplementedError(f"{found.kernel} has a parameter of type {type}")
            values.append(x)
            letters += letter
        if not written:
            raise NotImplementedError(f"{found.kernel} writes to what its operator was given")
        # AOTInductor passes None for an empty list of tensors or integers
        read, integers = read or [written[0].new_empty(0)], integers or [0]
        description = f"{self._described(found)} {letters}"
        self.op(description, written, read, integers, factors, [*grid, 1, 1][:3])

    def _described(self, launch: Launch) -> str:
        """The first words of `launch`. Writes the cubin, whose name has a hash of it."""
        if launch in self.described:
            return self.described[launch]
        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = True  # two thirds of a cubin
            compiled = launch.compile()
        cubin, metadata = compiled.asm["cubin"], compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise NotImplementedError(f"{launch.kernel} needs memory of its own")
        file = f"{launch.kernel}-{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"
        (self.folder / file).write_bytes(cubin)
        found = f"{file} {metadata.name} {32 * metadata.num_warps} {metadata.shared}"
        return self.described.setdefault(launch, found)


def _stand_in(x: Any) -> Any:
    """What a kernel is compiled for in place of an argument."""
    if isinstance(x, Tensor):
        return _Pointer(x)
    known = _known(x)
    return UNKNOWN if isinstance(known, torch.SymInt) else known


class _Pointer(MockTensor):
    """A tensor, for Triton's description of arguments."""

    def __init__(self, x: Tensor):
        super().__init__(x.dtype)
        self.address = _address(x)

    def data_ptr(self) -> int:
        return self.address


def _address(x: Tensor) -> int:
    """Of a tensor whose memory begins at 0; 1 if a trace does not know it."""
    start = _known(x.storage_offset())
    return start * x.element_size() if isinstance(start, int) else 1


def _known(x: Any) -> Any:
    """An integer of a trace that has one value, as an int."""
    value = x.node.maybe_as_int() if isinstance(x, torch.SymInt) else None
    return x if value is None else value


def _constant(x: Any) -> Any:
    """A kernel's constant, such as the number of query groups: a condition of the program."""
    if not isinstance(x, torch.SymInt):
        return x
    with mock.patch.object(symbolic_shapes.TLS, "suppress_guards", False, create=True):
        return int(x)


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]


def _makes_memory(function: Any) -> bool:
    return function.__name__.startswith(("new_", "empty", "zeros", "full"))


@contextlib.contextmanager
def _sizes_stay_open() -> Iterator[None]:
    """Comparisons of sizes are the example's, and no conditions of the exported program."""
    mode = torch._guards.detect_fake_mode()
    if mode is None or mode.shape_env is None:  # the tensors are no trace's
        yield
        return
    with symbolic_shapes._suppress_guards(mode.shape_env):
        yield
