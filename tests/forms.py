"""Forms of a tensor of indices: the same values as users have them, with another dtype, stride,
storage or device.

A form is a text of words in any order, for example "int32 column host":

    int32         instead of int64. Floating-point tensors keep their dtype.
    column        a column of a matrix, as torch.stack([x, other], 1)[:, 0]
    every other   every second element of a longer tensor, from the second one on
    view          a part of a longer tensor, not aligned to 16 bytes
    expanded      one element with a stride of 0, where all values are equal; otherwise a column
    host          on the host, whatever the device of the operands
    pinned        on the host, in page-locked memory where there is a GPU
    read-only     on the host, over a read-only numpy buffer

"" is the plain form: int64, contiguous, on the operands' device. The elements between and around
the values are `POISON`: far out of range of every index, so that reading one fails or gives a wrong
result.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

POISON = 2**30 + 7
WORDS = ("int32", "column", "every", "other", "view", "expanded", "host", "pinned", "read-only")

LAYOUTS = ("", "column", "every other", "view", "expanded")
ON_HOST = ("host", "pinned", "read-only")


def all_forms(
    *, dtypes: tuple[str, ...] = ("", "int32"), places: tuple[str, ...] = ("", *ON_HOST)
) -> tuple[str, ...]:
    """Every combination of a dtype, a layout and a place, the simplest first."""
    return tuple(
        " ".join(filter(None, (dtype, layout, place)))
        for layout in LAYOUTS
        for place in places
        for dtype in dtypes
    )


def few_forms(forms: tuple[str, ...]) -> tuple[str, ...]:
    """Those forms, without the plain one, that differ from it in one way, and those of int32 or on
    the host with one other difference."""
    return tuple(
        form for form in forms if form and len(form.replace("every other", "other").split()) <= 2
    )


def in_form(x: Tensor, form: str, device: torch.device | str = "cpu") -> Tensor:
    """x's values, `[n]`, in a form, for operands on `device`."""
    words = form.split()
    if unknown := set(words) - set(WORDS):
        raise ValueError(
            f"form must have words of {', '.join(WORDS)}, got {', '.join(sorted(unknown))}"
        )
    if not x.is_floating_point():
        x = x.to(torch.int32 if "int32" in words else torch.int64)
    x = _laid_out(x.to("cpu" if is_on_host(form) else device), words)
    if "read-only" in words:
        x = _read_only(x)
    return _pinned(x) if "pinned" in words and torch.cuda.is_available() else x


def is_on_host(form: str) -> bool:
    """Whether the form is on the host, whatever the device of the operands."""
    return not {"host", "pinned", "read-only"}.isdisjoint(form.split())


def _laid_out(x: Tensor, words: list[str]) -> Tensor:
    (n,) = x.shape
    poison = POISON if not x.is_floating_point() else float("nan")
    if "expanded" in words and n and bool((x == x[0]).all()):
        return x[:1].clone().expand(n)
    if "column" in words or "expanded" in words:
        return torch.stack([x, torch.full_like(x, poison)], 1)[:, 0]
    if "every" in words:
        return torch.stack([torch.full_like(x, poison), x], 1).flatten()[1::2]
    if "view" in words:
        return torch.cat([x.new_full((3,), poison), x, x.new_full((2,), poison)])[3 : 3 + n]
    return x.clone()


def _whole(x: Tensor) -> Tensor:
    """The storage of x as a tensor."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def _read_only(x: Tensor) -> Tensor:
    """x with its strides over a buffer that numpy may not write."""
    if not x.numel():
        return x
    buffer = np.frombuffer(_whole(x).numpy().tobytes(), dtype=x.numpy().dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(buffer).as_strided(x.shape, x.stride(), x.storage_offset())


def _pinned(x: Tensor) -> Tensor:
    """x with its strides in page-locked memory: `Tensor.pin_memory` would make it contiguous."""
    return (
        _whole(x).pin_memory().as_strided(x.shape, x.stride(), x.storage_offset())
        if x.numel()
        else x
    )


@contextlib.contextmanager
def unchanged(*tensors: Tensor) -> Iterator[None]:
    """Check that nothing writes to the tensors, nor to the elements between theirs.

    Raises:
        AssertionError: a tensor was written to.
    """
    before = [_whole(x).clone() for x in tensors]
    yield
    for x, old in zip(tensors, before):
        same = (_whole(x) == old) | (old != old)
        assert same.all(), f"an index tensor was written to: {x.tolist()}"


@contextlib.contextmanager
def defaults(device: str | None = None, dtype: str | None = None) -> Iterator[None]:
    """torch's default device and dtype inside the context; None leaves one as it is. "meta" shows a
    factory that is called without its operands' device, on any machine."""
    before = torch.get_default_dtype()
    with torch.device(device) if device else contextlib.nullcontext():
        torch.set_default_dtype(getattr(torch, dtype) if dtype else before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
