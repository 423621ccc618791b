"""Input checks shared by the operators. Values of host tensors are always checked, those of device
tensors only under `debug_checks`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .dtypes import (
    DTYPES,
    EVERYWHERE,
    FLOATS,
    WrongDtype,
    autocast_dtype,
    dtypes_of,
    names,
    uses_kernels,
)
from .scalars import check_choice, check_size

IMPLEMENTATIONS = ("auto", "reference", "triton")
MAX_HEAD_DIM = 256  # of attention


def check_dense(name: str, x: Any, expected: str = "a torch.Tensor") -> None:
    """TypeError unless x is a tensor, which the message calls `expected`. ValueError if it is
    sparse or nested."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be {expected}, got {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        raise ValueError(
            f"{name} must be a dense tensor, got {'a nested tensor' if x.is_nested else x.layout}"
        )


def check_tensor(
    name: str,
    x: object,
    dim: int,
    shape: str,
    function: str | None = None,
    implementation: str = "auto",
) -> None:
    """TypeError unless x is a tensor; WrongDtype or ValueError unless it is dense, of a
    floating-point dtype that is allowed, and has `dim` dimensions.

    Args:
        shape: the expected shape as text for the message, for example "[L, H, D]".
        function: the function whose dtypes are allowed, see `check_dtype`. None: fp64, fp32, fp16
            and bf16.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if function is not None:
        check_dtype(name, x, function, implementation)
    elif x.dtype not in FLOATS:
        raise WrongDtype(f"{name} must be {names(FLOATS)}, got {x.dtype}")
    check_dense(name, x)
    if x.dim() != dim:
        raise ValueError(f"{name} must have shape {shape}, got {list(x.shape)}")


def check_dtype(name: str, x: Tensor, function: str, implementation: str = "auto") -> None:
    """WrongDtype unless the table in `dtypes` has x's dtype for this function, x's device and the
    implementation. ValueError if neither the kernels nor the CPU path support the device."""
    if x.dtype in EVERYWHERE and (x.is_cuda or x.is_cpu or x.is_meta):  # fast path
        return
    plain, kernels = DTYPES[function]
    if (
        plain != kernels
        and implementation == "auto"
        and x.device.type not in ("cpu", "cuda", "meta")
    ):
        raise ValueError(
            f"{name} must be on the CPU or a CUDA device, got {x.device};"
            ' implementation="reference" takes any device'
        )
    taken = dtypes_of(function, x.device, implementation)
    if x.dtype not in taken:
        where = x.device.type
        if implementation != "auto":
            where += f" with implementation={implementation!r}"
        raise WrongDtype(f"{name} must be {names(taken)} for {function} on {where}, got {x.dtype}")


def check_implementation(
    implementation: str, known: tuple[str, ...], device: torch.device, reads_offsets: bool = True
) -> None:
    """ValueError unless the implementation is known and supports the device. In Triton's
    interpreter, kernels support host tensors.

    Args:
        reads_offsets: "reference" reads the values of offsets. Meta tensors have none, so they are
            an error.
    """
    check_choice("implementation", implementation, known)
    if implementation == "auto":
        return
    if (
        uses_kernels(device, implementation)
        and device.type not in ("cuda", "meta")
        and not _triton_interprets()
    ):
        raise ValueError(
            f"implementation={implementation!r} needs CUDA tensors, got {device.type} tensors;"
            " 'auto' takes both"
        )
    if implementation == "reference" and reads_offsets and device.type == "meta":
        raise ValueError(
            "implementation='reference' needs tensors with data, got meta tensors; 'auto' gives"
            " their shapes"
        )


def _triton_interprets() -> bool:
    # triton's knobs cannot be traced; the operators reject host tensors when the graph runs
    if torch.compiler.is_compiling():
        return True
    try:
        from triton import knobs  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        return False
    return knobs.runtime.interpret


def check_layer_tensor(name: str, x: Any, shape: str, projection: nn.Module) -> None:
    """`check_dense` and `check_layer_input`. shape: the expected one as text."""
    check_dense(name, x, f"a torch.Tensor {shape}")
    check_layer_input(name, x, projection)


def check_layer_input(
    name: str, x: Tensor, projection: nn.Module, function: str = "jagged_attention"
) -> None:
    """ValueError unless x has the device and, after autocast, the dtype of the projection's weight.
    Not checked if that is unknown. `check_dtype` for the function that the layer calls."""
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor):  # a quantised module may have a method of this name, or none
        return
    distributed = sys.modules.get("torch.distributed.tensor")
    # sharded: fully_shard may compute in another dtype
    if distributed is not None and isinstance(weight, distributed.DTensor):
        return
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the layer's device, {weight.device}, got {x.device}")
    if x.dtype == weight.dtype and x.is_floating_point():  # fast path
        check_dtype(name, x, function)
    elif x.dtype not in FLOATS or autocast_dtype(x) != autocast_dtype(weight):
        raise WrongDtype(f"{name} must have the layer's dtype, {weight.dtype}, got {x.dtype}")


def transforms_are_active() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) runs."""
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage] - torch has no public function for it


def runs_transforms() -> bool:
    """Whether a torch.func transform or forward-mode AD is active."""
    is_forward = forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]
    return transforms_are_active() or bool(is_forward)  # pyright: ignore[reportUnknownArgumentType]


def refuse_transforms(what: str) -> None:
    """RuntimeError inside a torch.func transform or forward-mode AD: their derivatives would be
    silently zero."""
    if runs_transforms():
        raise RuntimeError(
            f"{what} not run under torch.func transforms (vmap, grad, jvp) or forward mode: use"
            " torch.autograd.grad, and a loop in place of vmap; a function called directly also"
            ' takes implementation="reference"'
        )


def resolve_head_dim(
    embedding_dim: int, num_heads: int, head_dim: int | None = None, name: str = "head_dim"
) -> int:
    """head_dim, which errors call `name`, or embedding_dim / num_heads if it is None. Raises unless
    all are positive integers and the result is at most MAX_HEAD_DIM."""
    check_size("embedding_dim", embedding_dim)
    check_size("num_heads", num_heads)
    if head_dim is None:
        if embedding_dim % num_heads:
            raise ValueError(
                f"embedding_dim must be a multiple of num_heads, got {embedding_dim} and"
                f" {num_heads}"
            )
        name, head_dim = "embedding_dim / num_heads", embedding_dim // num_heads
    check_size(name, head_dim)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{name} must be at most {MAX_HEAD_DIM}, got {head_dim}")
    return head_dim
