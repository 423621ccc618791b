"""Records the launches of Triton kernels that would be made on a Hopper GPU, on a machine without
one.

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
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from jagged_kernels.common.ptxas import compile_kernel
from torch import library
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

FACTORIES = [
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
]
FACTORIES_LIKE = ["empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"]
METHODS = ["to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"]
PRODUCTS = ["mm", "addmm", "bmm", "baddbmm"]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's name, and Triton's key of the compiled variant: types of the arguments and
    properties of their values.

    compile: compiles the variant ahead of time, without a GPU.
    """

    kernel: str
    specialisation: str
    compile: Callable[[], CompiledKernel] = dataclasses.field(compare=False, repr=False)


@contextlib.contextmanager
def recorded_launches(
    capability: tuple[int, int] = (9, 0), num_sms: int = 132
) -> Iterator[list[Launch]]:
    """A list that grows by every launch made inside the context."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    backend = make_backend(target)
    launches: list[Launch] = []
    of_keys: dict[tuple, str] = {}
    compilations: dict[tuple[str, str], Callable] = {}

    @functools.cache
    def binder(kernel):
        return create_function_from_signature(kernel.signature, kernel.params, backend), {}

    def record(kernel, *args, grid, warmup, **options):
        assert all(size <= 65_535 for size in grid[1:]), (kernel.__name__, grid)  # CUDA's limit
        for x in args:
            if hasattr(x, "block_shape"):
                x.__post_init__()  # a descriptor's own checks, which the library leaves out
        bind, keys = binder(kernel)
        bound, specialisation, all_options = bind(
            *args, **options, debug=False, instrumentation_mode=""
        )
        variant = kernel.__name__, compute_cache_key(keys, specialisation, all_options)
        if variant not in compilations:
            kwargs = dict(options, debug=False, instrumentation_mode="")
            all_options, signature, constants, attributes = kernel._pack_args(
                backend, kwargs, bound, specialisation, all_options
            )
            source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
                kernel, signature, constants, attributes
            )
            compilations[variant] = functools.partial(
                compile_kernel, source, target, all_options.__dict__
            )
        launch = Launch(*variant, compilations[variant])
        key = kernel.__name__, *kernel._cache_key(device.index, args, options)
        # one key, one compiled kernel
        assert of_keys.setdefault(key, launch.specialisation) == launch.specialisation
        launches.append(launch)

    # one index per capability: the library caches device properties
    device = torch.device("cuda", 10 * capability[0] + capability[1])
    driver = SimpleNamespace(
        get_current_device=lambda: device.index, get_current_target=lambda: target
    )
    properties = SimpleNamespace(multi_processor_count=num_sms, total_memory=80 * 2**30)
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (JITFunction, "run", record),
            (_launch(), "driver", SimpleNamespace(active=driver)),
            (torch.Tensor, "device", property(lambda x: device)),
            (torch.Tensor, "is_cuda", property(lambda x: True)),
            (torch.cuda, "get_device_capability", lambda *_: capability),
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch.cuda, "current_device", lambda: device.index),
            (torch.cuda, "is_initialized", lambda: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            # Host tensors dispatch to the operators' CPU key, which is registered for the
            # interpreter only.
            (_operators(), "knobs", SimpleNamespace(runtime=SimpleNamespace(interpret=True))),
            (torch, "bmm", _without(torch.bmm, "out_dtype")),
            *(
                (torch, name, _on_the_host(getattr(torch, name)))
                for name in FACTORIES + FACTORIES_LIKE
            ),
            *((torch.Tensor, name, _on_the_host(getattr(torch.Tensor, name))) for name in METHODS),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        # a dispatch mode would change the path to a launch
        overrides = stack.enter_context(library._scoped_library("aten", "IMPL"))
        with warnings.catch_warnings():
            # of the override
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in PRODUCTS:
                overrides.impl(name, _uninitialised_product, "CPU", allow_override=True)
        yield launches


def _uninitialised_product(*operands, **factors):
    x, y = operands[-2:]
    return x.new_empty(*x.shape[:-1], y.shape[-1])


def _operators():
    from jagged_kernels.common import ops as operators

    return operators


def _launch():
    from jagged_kernels.common import launch

    return launch


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


def _without(function, option: str):
    return lambda *args, **options: function(
        *args, **{name: x for name, x in options.items() if name != option}
    )


_TO = torch.Tensor.to
