"""Records the launches of Triton kernels that would be made on a GPU, on a machine without one.

Host tensors report a CUDA device, so that the library takes its GPU paths. A launch computes the
key by which Triton compiles and caches kernels, and runs nothing. Results are uninitialised memory.
So are those of torch's matrix products: they would take nearly all of the time on a host that has
no instructions for bfloat16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import library
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from ..common import launch as launches_of_kernels
from ..common import ops as operators
from ..common.ptxas import compile_kernel

FACTORIES = "arange empty eye full linspace ones rand randint randn randperm tensor zeros".split()
FACTORIES_LIKE = ["empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"]
METHODS = ["to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"]
PRODUCTS = ["mm", "addmm", "bmm", "baddbmm"]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's name, and Triton's key of the compiled variant: types of the arguments and
    properties of their values.

    source, target, options: what `triton.compile` takes.
    """

    kernel: str
    specialisation: str
    source: ASTSource = dataclasses.field(compare=False, repr=False)
    target: GPUTarget = dataclasses.field(compare=False, repr=False)
    options: dict = dataclasses.field(compare=False, repr=False)

    def compile(self) -> CompiledKernel:
        """Compiles the variant ahead of time, without a GPU."""
        return compile_kernel(self.source, self.target, self.options)


@contextlib.contextmanager
def recorded_launches(capability: tuple[int, int] = (9, 0)) -> Iterator[list[Launch]]:
    """A list that grows by every launch made inside the context."""
    # one index per capability: the library caches device properties
    device = torch.device("cuda", 10 * capability[0] + capability[1])
    recorder = _Recorder(device)

    def run(kernel, *args, grid, warmup, **options):
        recorder.record(kernel, args, grid, options)
        if kernel.__name__ == "group_candidates_kernel":  # torch takes its results for indices
            _, *results = args[:4]
            for x in results:
                x.zero_()

    with _reported_gpu(device, capability), _made_on_the_host(), _no_products():
        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(
                launches_of_kernels, "driver", SimpleNamespace(active=recorder.driver)
            ),
        ):
            yield recorder.launches


class Variants:
    """What is compiled for launches on a target."""

    def __init__(self, target: GPUTarget):
        self.target, self.backend = target, make_backend(target)
        self.found: dict[tuple[str, str], Launch] = {}
        self.binder = functools.cache(self._binder)

    def _binder(self, kernel: JITFunction):
        return create_function_from_signature(kernel.signature, kernel.params, self.backend), {}

    def of(self, kernel: JITFunction, args: tuple, options: dict) -> Launch:
        """The variant of a kernel for these arguments and options."""
        kwargs = dict(options, debug=False, instrumentation_mode="")
        bind, keys = self.binder(kernel)
        bound, specialisation, all_options = bind(*args, **kwargs)
        variant = kernel.__name__, compute_cache_key(keys, specialisation, all_options)
        if variant not in self.found:
            all_options, signature, constants, attributes = kernel._pack_args(
                self.backend, kwargs, bound, specialisation, all_options
            )
            source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
                kernel, signature, constants, attributes
            )
            self.found[variant] = Launch(*variant, source, self.target, all_options.__dict__)
        return self.found[variant]


class _Recorder:
    """The launches on a device, and the driver that reports it."""

    def __init__(self, device: torch.device):
        self.device, target = device, GPUTarget("cuda", device.index, 32)
        self.driver = SimpleNamespace(get_current_target=lambda: target)
        self.launches: list[Launch] = []
        self.of_keys: dict[tuple, str] = {}  # the library's key of a launch → Triton's
        self.variants = Variants(target)

    def record(self, kernel, args: tuple, grid: tuple, options: dict) -> None:
        assert all(size <= 65_535 for size in grid[1:]), (kernel.__name__, grid)  # CUDA's limit
        for x in args:
            if hasattr(x, "block_shape"):
                x.__post_init__()  # a descriptor's own checks, which the library leaves out
        launch = self.variants.of(kernel, args, options)
        key = kernel.__name__, *kernel._cache_key(self.device.index, args, options)
        # one key, one compiled kernel
        assert self.of_keys.setdefault(key, launch.specialisation) == launch.specialisation
        self.launches.append(launch)


@contextlib.contextmanager
def _reported_gpu(device: torch.device, capability: tuple[int, int]):
    """Tensors of the host report the device, and torch reports a GPU."""
    properties = SimpleNamespace(multi_processor_count=132, total_memory=80 * 2**30)
    of_tensors = dict(
        device=property(lambda x: device),
        is_cuda=property(lambda x: True),
        is_cpu=property(lambda x: False),
    )
    of_cuda = dict(
        get_device_capability=lambda *_: capability,
        get_device_properties=lambda *_: properties,
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: False,
        current_stream=lambda *_: None,
    )
    # Host tensors dispatch to the operators' CPU key, which is registered for the interpreter only.
    of_operators = dict(
        knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=True)),
        current_device=lambda: device.index,
    )
    with (
        _replaced(torch.Tensor, of_tensors),
        _replaced(torch.cuda, of_cuda),
        _replaced(operators, of_operators),
    ):
        yield


@contextlib.contextmanager
def _made_on_the_host():
    """What would make or move tensors to a device leaves them on the host."""
    functions: dict[str, Any] = {
        name: _on_the_host(getattr(torch, name)) for name in FACTORIES + FACTORIES_LIKE
    }
    bmm = torch.bmm
    functions["bmm"] = lambda x, y, out_dtype=None: bmm(x, y)
    methods = {name: _on_the_host(getattr(torch.Tensor, name)) for name in METHODS}
    with _replaced(torch, functions), _replaced(torch.Tensor, methods):
        yield


@contextlib.contextmanager
def _no_products():
    """Matrix products are uninitialised memory. A dispatch mode would change the path to a
    launch."""
    with library._scoped_library("aten", "IMPL") as overrides:
        with warnings.catch_warnings():
            # of the override
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in PRODUCTS:
                overrides.impl(name, _uninitialised_product, "CPU", allow_override=True)
                overrides.impl(f"{name}.out", _product_left_out, "CPU", allow_override=True)
        overrides.impl("mm.dtype", _uninitialised_fp32_product, "CPU")
        yield


@contextlib.contextmanager
def _replaced(owner: Any, attributes: Mapping[str, Any]):
    with contextlib.ExitStack() as stack:
        for name, attribute in attributes.items():
            stack.enter_context(mock.patch.object(owner, name, attribute, create=True))
        yield


def _uninitialised_product(*operands, **factors):
    x, y = operands[-2:]
    return x.new_empty(*x.shape[:-1], y.shape[-1])


def _product_left_out(*operands, out, **factors):
    return out


def _uninitialised_fp32_product(x, y, dtype):
    return x.new_empty(x.shape[0], y.shape[1], dtype=dtype)


def _on_the_host(function):
    """The function without the device among its arguments: it makes host tensors."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        args = [
            x
            for x in args
            if not isinstance(x, torch.device) and not (isinstance(x, str) and x.startswith("cuda"))
        ]
        kwargs.pop("device", None)
        if function is _TO and len(args) == 1 and not kwargs:
            return args[0]
        return function(*args, **kwargs)

    return call


_TO = torch.Tensor.to
