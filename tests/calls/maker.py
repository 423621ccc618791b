"""`Call`, and the tensors of a case in their layouts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch
from accuracy import Bound
from cases import Case
from forms import defaults, in_form
from space import dtype_of, form_of
from torch import Tensor

from jagged_modules import functional as F


@dataclasses.dataclass
class Call:
    """A function of named tensors.

    Attributes:
        inputs: tensors by name, in the order of the function's parameters.
        function: takes the inputs as keyword arguments, returns the results by name.
        model: (inputs, gradients of the results) → `accuracy.Bound`s of the results and, as "d" +
            name, of the inputs' gradients. An integer result is expected exactly.
        segments: the segment of each row, for inputs and results whose rows belong to one segment
            each.
        rows: names of the inputs and results that have rows behind the last segment, if the case
            has any.
        indices: tensors of indices that the function reads, which it must not write to.
    """

    inputs: dict[str, Tensor]
    function: Callable[..., dict[str, Tensor]]
    model: Callable[[dict[str, Tensor], dict[str, Tensor]], dict]
    segments: dict[str, Tensor]
    rows: frozenset[str] = frozenset()
    indices: Sequence[Tensor] = ()


# -- tensors ---------------------------------------------------------------------------------------


class Maker:
    """Makes the tensors of a case."""

    def __init__(self, case: Case, stream: int = 0):
        """stream: different streams have different random values."""
        self.case, self.options = case, case.options
        self.device = "cuda" if case.device == "cuda" else "cpu"
        self.dtype = getattr(torch, case.dtype)
        self.generator = torch.Generator(self.device).manual_seed(2 * case.seed + stream)
        self.behind = self.options.get("behind", 0)
        self.indices: list[Tensor] = []  # in the case's forms

    def values(self, *shape: int, factor: float = 1.0) -> Tensor:
        kind = self.options.get("values", "normal")
        if kind == "zeros":
            return torch.zeros(shape, device=self.device, dtype=self.dtype)
        x = torch.randn(shape, generator=self.generator, device=self.device) * factor
        if kind == "large":
            bounded = (
                self.options.get("activation", "softmax") == "softmax"
                and self.dtype != torch.float16
            )
            x = x * (8 if bounded else 2)
        if kind == "equal rows" and x.dim() > 1 and x.shape[0]:
            x = x[:1].expand_as(x)
        return x.to(self.dtype)

    def tensor(self, *shape: int, factor: float = 1.0) -> Tensor:
        """Values in the case's layout."""
        return lay_out(self.values(*shape, factor=factor), self.options["layout"])

    def gradient(self, out: Tensor) -> Tensor:
        """A random gradient of a result, in the layout of the case's gradients."""
        kind = self.options["grad"]
        x = torch.randn(out.shape, generator=self.generator, device=self.device).to(out.dtype)
        if kind == "one number":
            return x.new_ones(()).expand_as(x)
        if kind == "one row" and x.shape[0]:
            return x[:1].expand_as(x)
        return lay_out(x, kind)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def defaults(self) -> contextlib.AbstractContextManager[None]:
        """The case's default device and dtype of torch."""
        device, dtype = (self.options.get(name) for name in ("default_device", "default_dtype"))
        return defaults(self.device if device == "the operands'" else device, dtype)

    def index(self, name: str, x: Tensor) -> Tensor:
        """x's values in the form that the case has for the argument of this name."""
        return self._in_form(name, x, self.device)

    def _in_form(self, name: str, x: Tensor, device: str) -> Tensor:
        dtype = "int32 " if self.options.get(dtype_of(name)) == "int32" else ""
        self.indices.append(in_form(x, dtype + self.options[form_of(name)], device))
        return self.indices[-1]

    def offsets(self, name: str, lengths: list[int]) -> Tensor:
        return self.index(name, offsets_of(lengths))

    def segments(self, lengths: list[int], repeats: int = 1) -> Tensor:
        """The segment of each row."""
        return (
            torch.arange(len(lengths))
            .repeat_interleave(torch.tensor(lengths, dtype=torch.int64) * repeats)
            .to(self.device)
        )

    def max_seqlen(self, lengths: list[int]) -> int | None:
        return max(lengths, default=0) if self.options.get("max_seqlen") else None

    def plan(self, x_lengths: list[int], y_lengths: list[int] | None = None) -> F.ScorePlan:
        given = {
            name: x
            for name, x in dict(x_offsets=x_lengths, y_offsets=y_lengths).items()
            if x is not None
        }
        offsets = [self._in_form(name, offsets_of(x), "cpu") for name, x in given.items()]
        with self.defaults():
            return F.ScorePlan.from_offsets(*offsets).to(self.device)


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """x's values with the strides and alignment of a layout, and NaN around them."""
    if x.numel() == 0:
        return (
            x
            if layout == "contiguous"
            else x.as_strided(x.shape, [5 + 2 * i for i in range(x.dim())])
        )
    if layout == "misaligned":
        buffer = x.new_full((x.numel() + 1,), float("nan"))
        return buffer[1:].view(x.shape).copy_(x)
    if layout == "every other column":
        buffer = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
        return buffer[..., ::2].copy_(x)
    if layout == "any stride of size 1":  # contiguous in torch's sense
        x = x.contiguous()
        return x.as_strided(
            x.shape, [stride if size > 1 else 7 for size, stride in zip(x.shape, x.stride())]
        )
    if layout == "contiguous" or x.dim() == 1:
        return x.contiguous()
    if layout == "columns" or layout == "transposed" and x.dim() == 2:
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    width = x[0].numel()
    before, after = {"packed": (width, width), "odd rows": (0, 1)}.get(layout, (0, 0))
    buffer = x.new_full((x.shape[0], before + width + after), float("nan"))
    return buffer[:, before : before + width].unflatten(1, x.shape[1:]).copy_(x)


def stacked(bounds: Sequence[Bound], dim: int) -> Bound:
    """Bounds of equal shapes, stacked along a new dimension."""
    return bounds[0]._replace(
        **{
            part: torch.stack([getattr(x, part) for x in bounds], dim)
            for part in ("value", "error", "rms")
        }
    )
