"""What the layers share: their base, initialisation, checks of what projections give, and errors
for keywords of other libraries."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.types import Device

from ..dtypes import FLOATS, WrongDtype, names
from ..scalars import check_kind

F = TypeVar("F", bound=Callable[..., Any], covariant=True)
T = TypeVar("T")


def check_parameter_dtype(dtype: torch.dtype | None) -> None:
    """Raise unless a layer's parameters may have this dtype, or None: the default dtype."""
    if dtype is None:
        return
    check_kind("dtype", dtype, torch.dtype, "a torch.dtype")
    if dtype not in FLOATS:
        raise WrongDtype(f"dtype must be {names(FLOATS)}, got {dtype}")


def in_heads(name: str, x: Tensor, *sizes: int) -> Tensor:
    """x, the result of the projection `name`, as `[..., *sizes]`: parts, heads and head dim. Raises
    as `check_columns`."""
    check_columns(name, x, math.prod(sizes))
    return torch.unflatten(x, -1, sizes)


def check_columns(name: str, x: Tensor, columns: int) -> None:
    """ValueError unless x, the result of the projection `name`, has all columns in a plain tensor.
    Tensor parallel plans may shard them. A shard does not hold whole heads, because projections are
    packed: half of `[k | v]` is k."""
    distributed = sys.modules.get("torch.distributed.tensor")
    is_sharded = distributed is not None and isinstance(x, distributed.DTensor)
    if is_sharded or x.shape[-1] != columns:
        raise ValueError(
            f"{name} must give {columns} columns, got {'a DTensor' if is_sharded else x.shape[-1]};"
            " a tensor parallel plan must gather them, by"
            " ColwiseParallel(output_layouts=Replicate()), and take out_proj's input whole, by"
            " RowwiseParallel(input_layouts=Replicate())"
        )


class _HasForward(Protocol[F]):
    @property
    def forward(self) -> F: ...


class Layer(nn.Module):
    """Base of the layers."""

    _shown: tuple[str, ...] = ()  # attributes in the repr

    if TYPE_CHECKING:  # calls have forward's type: nn.Module declares that they return Any

        @property
        def __call__(self: _HasForward[F]) -> F: ...  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """dtype: of the parameters, as the caller gave it. Raises as `check_parameter_dtype`."""
        super().__init__()
        check_parameter_dtype(dtype)

    def reset_parameters(self) -> None:
        """Initialise all parameters by the `reset_parameters` of each module, for instance after
        `to_empty` of a layer built on the meta device."""
        reset_all(self.children())

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)


def reset_all(modules: Iterable[nn.Module]) -> None:
    """Call each module's `reset_parameters`. If a module has none (for example a LoRA wrapper
    around a Linear), call its children's."""
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            reset_all(module.children())
        else:
            reset()


def xavier_linear(
    in_features: int,
    out_features: int,
    bias: bool = True,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> nn.Linear:
    """An nn.Linear with HSTU's initialisation, set on the instance: torch.ao.quantization does not
    support subclasses."""
    linear = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
    # to_empty of torch 2.13 fails in a FakeTensorMode
    where = torch.empty(0, device=device).device
    for name, parameter in [*linear.named_parameters()]:
        setattr(linear, name, nn.Parameter(torch.empty_like(parameter, device=where)))
    vars(linear)["reset_parameters"] = functools.partial(_reset_xavier, linear)
    linear.reset_parameters()
    return linear


def _reset_xavier(linear: nn.Linear) -> None:
    nn.init.xavier_uniform_(linear.weight)
    bias: Any = linear.bias  # which torch declares to be never None
    if bias is not None:
        nn.init.zeros_(bias)


# The keyword of another library, the argument here, and how to write it.
KEYWORDS = {
    "embed_dim": ("embedding_dim", "embedding_dim"),
    "d_model": ("embedding_dim", "embedding_dim"),
    "nhead": ("num_heads", "num_heads"),
    "dim_feedforward": ("ffn_dim", "ffn_dim"),
    "causal": ("mask", "mask=AttentionMask(causal=True)"),
    "is_causal": ("mask", "mask=AttentionMask(causal=True)"),
}


def name_keywords(cls: type[T]) -> type[T]:
    """A decorator of layers: a keyword of `KEYWORDS` or of the config raises a TypeError."""
    init = cls.__init__
    arguments = inspect.signature(init).parameters
    keywords = {name: how for name, (argument, how) in KEYWORDS.items() if argument in arguments}
    if "config" in arguments:
        config = arguments["config"].annotation.partition(" ")[0]  # "GDPAConfig | None"
        fields = inspect.signature(init.__globals__[config]).parameters
        keywords |= {name: f"config={config}({name}=...)" for name in fields}

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in arguments and name in keywords:
                raise TypeError(f"{cls.__name__} has no argument {name}: write {keywords[name]}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls
