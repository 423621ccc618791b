"""Containers of torch and TorchRec to values and offsets, and back. No other file knows these
containers."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..scalars import possessive, to_ints
from ..segments import values_are_checkable


def values_and_offsets(name: str, x: Any) -> tuple[Any, Any]:
    """The parts of any container but Jagged, not checked yet."""
    if _is_torchrec(x):
        _refuse_weights(name, x)
        offsets = x.offsets()
        # JaggedTensor.empty() has no offsets
        return x.values(), offsets if offsets.shape[0] else offsets.new_zeros(1)
    if _is_nested(x):
        if x.layout != torch.jagged or x._lengths is not None or x._ragged_idx != 1:
            what = x.layout
            if what == torch.jagged:
                what = "holes" if x._lengths is not None else f"dimension {x._ragged_idx} ragged"
            raise ValueError(
                f"{name} must have layout torch.jagged, its second dimension ragged and no holes,"
                f" got {what}"
            )
        return x.values(), x.offsets()
    pair: Any = x if issubclass(type(x), (tuple, list)) else ()
    if len(pair) == 2 and isinstance(pair[0], Tensor):
        return pair
    of = f" of {', '.join(type(y).__name__ for y in pair[:3])}" if pair else ""
    raise TypeError(
        f"{name} must be a JaggedTensor, KeyedJaggedTensor, (values, offsets) pair, nested tensor"
        f" of jagged layout or Jagged, got {type(x).__name__}{of}"
    )


def longest_segment(x: Any) -> int | None:
    """The rows of the longest segment, if known: a nested tensor may have a max_seqlen."""
    return x._maybe_max_seqlen if _is_nested(x) else None


def rebuild(x: Any, values: Tensor, offsets: Tensor) -> Any:
    """x's kind of container, with other values in the same segments. offsets: those of x."""
    if isinstance(x, tuple):
        return values, offsets
    if isinstance(x, list):
        return [values, offsets]
    if _is_nested(x):  # without a max_seqlen, to_padded_tensor pads to the number of all rows
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, min_seqlen=x._maybe_min_seqlen, max_seqlen=x._maybe_max_seqlen
        )
    same = dict(
        lengths=x.lengths_or_none(), offsets=x.offsets_or_none(), weights=x.weights_or_none()
    )
    if hasattr(x, "keys"):
        strides = (
            dict(stride_per_key_per_rank=x.stride_per_key_per_rank())
            if x.variable_stride_per_key()
            else dict(stride=x.stride())
        )
        # where each of these ints is an input, and 0 and 1 are compiled apart
        if not torch.compiler.is_compiling():
            strides.update(
                length_per_key=x.length_per_key_or_none(), offset_per_key=x.offset_per_key_or_none()
            )
        return type(x)(
            x.keys(), values, **same, **strides, inverse_indices=x.inverse_indices_or_none()
        )
    return type(x)(values, **same)


def check_lengths(name: str, x: Any, offsets: Tensor) -> None:
    """ValueError if x is a TorchRec container whose lengths contradict its offsets: TorchRec reads
    one or the other."""
    lengths = x.lengths_or_none() if _is_torchrec(x) else None
    if lengths is None or not (values_are_checkable(lengths) and values_are_checkable(offsets)):
        return
    if not torch.equal(lengths, offsets.diff().to(lengths)):
        expected = to_ints(offsets.diff())
        raise ValueError(
            f"{possessive(name)} lengths must be the differences of its offsets, {expected}, got"
            f" {to_ints(lengths)}"
        )


def wait_for(x: Any) -> Any:
    """The result of a TorchRec LazyAwaitable, which sharded collections return; any other x
    unchanged."""
    torchrec: Any = sys.modules.get("torchrec.distributed.types")
    if torchrec is None or not isinstance(x, torchrec.LazyAwaitable):
        return x
    # keeps the result; a second wait() would communicate again
    return torchrec.LazyAwaitable._wait_async(x)


def is_keyed_tensor(x: Any) -> bool:
    """Whether x is a KeyedTensor of TorchRec: dense `[B, Σ widths]` values of named features."""
    return _is_one_of(x, "KeyedTensor")


def _refuse_weights(name: str, x: Any) -> None:
    weights = x.weights_or_none()
    if weights is not None and weights.is_floating_point():
        raise ValueError(
            f"{name} must have no floating-point weights, which would not be applied, got weights"
            f" {list(weights.shape)}; multiply the values by them, or make the container without"
            " them"
        )


def _is_torchrec(x: Any) -> bool:
    return _is_one_of(x, "JaggedTensor", "KeyedJaggedTensor")


def _is_nested(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_nested


def _is_one_of(x: Any, *names: str) -> bool:
    # None: nobody imported it, so x cannot be one of its classes
    torchrec: Any = sys.modules.get("torchrec.sparse.jagged_tensor")
    return torchrec is not None and isinstance(x, attrgetter(*names)(torchrec))
