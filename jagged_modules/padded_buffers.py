"""Buffers of the capacities of padded_arguments.py, which a call's arguments are copied into."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .padded_arguments import (
    OFFSETS,
    ORDER,
    ROWS,
    SCALAR,
    USERS,
    Capacities,
    Leaf,
    cdiv,
    padding_step,
)

# of the module array
_TYPECODES: dict[torch.dtype, Literal["i", "q"]] = {torch.int32: "i", torch.int64: "q"}


def _held(function: Any, kind: Any) -> Any:
    """A function of ctypes on memory that lets no other thread of Python go first."""
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    return ctypes.PYFUNCTYPE(None, ctypes.c_void_p, kind, ctypes.c_size_t)(address)


_move, _fill = _held(ctypes.memmove, ctypes.c_void_p), _held(ctypes.memset, ctypes.c_int)
_ZEROS = ROWS, USERS  # the padding of these kinds
_ALIGNMENT = 128  # of the parts of a packed buffer, in bytes: more than any kernel asks for


class Buffers:
    """The buffers of a bucket, one for each leaf, `tensors`. The arguments on the host have parts
    of one buffer, and of a copy of it in page-locked memory. They are padded there, and go to the
    device in one copy."""

    def __init__(
        self, leaves: Sequence[Leaf], capacities: Sequence[Capacities], device: torch.device
    ) -> None:
        self.tensors: list[Tensor] = []
        self._written: list[Tensor] = []  # by `pad`
        parts, end = list[tuple[int, int] | None](), 0  # of the leaves, in bytes
        for leaf, both in zip(leaves, capacities):
            if leaf.tensor.is_cpu:
                size = math.prod(leaf.shape(both)) * leaf.tensor.element_size()
                parts.append((end, end + size))
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
            else:
                parts.append(None)
        on_gpu = device.type == "cuda"
        self._on_device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._on_host = torch.zeros(end, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        first = self._on_host.data_ptr()
        # the places of leaves of integers on the host, with the address, the bytes and the numbers
        # of their parts of the memory; and others
        self._integers, self._others = list[tuple[int, int, int, memoryview]](), list[int]()
        self._is_on_host = end > 0
        self._copied = torch.cuda.Event() if on_gpu and end else None
        for place, (leaf, part, both) in enumerate(zip(leaves, parts, capacities)):
            x, shape = leaf.tensor, leaf.shape(both)
            if part is not None and part[0] < part[1] and x.dtype in _TYPECODES:
                address = first + part[0]
                memory = (ctypes.c_ubyte * (part[1] - part[0])).from_address(address)
                numbers = memoryview(memory).cast("B").cast(_TYPECODES[x.dtype])
                self._integers.append((place, address, numbers.nbytes, numbers))
            else:
                self._others.append(place)
            if part is not None:
                written, buffer = (
                    whole[slice(*part)].view(x.dtype).view(shape)
                    for whole in (self._on_host, self._on_device)
                )
            else:
                buffer = written = torch.zeros(shape, dtype=x.dtype, device=device)
            self.tensors.append(buffer)
            self._written.append(written)

    def pad(self, leaves: Sequence[Leaf], capacities: Sequence[Capacities]) -> None:
        """Copy the leaves' tensors into the buffers, and write the rest of these."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the call before
        # Each operator of torch would take longer than all of it, and let another thread of Python
        # go first.
        for place, address, whole, memory in self._integers:
            leaf = leaves[place]
            x = leaf.tensor.contiguous()
            size = x.nbytes
            _move(address, x.data_ptr(), size)
            rest = whole - size
            if not rest:
                continue
            if leaf.kind in _ZEROS:
                _fill(address + size, 0, rest)
            else:
                rest //= memory.itemsize
                memory[-rest:] = _padding(leaf, capacities[place].rows, memory.format, rest)
        for place in self._others:
            pad(self._written[place], leaves[place], capacities[place])
        if self._is_on_host:
            self._on_device.copy_(self._on_host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def pad(buffer: Tensor, leaf: Leaf, capacities: Capacities) -> None:
    """Copy the leaf's tensor into the buffer, and write the rest of the buffer."""
    x, size = leaf.tensor.detach(), leaf.size
    if leaf.kind == SCALAR:
        buffer.copy_(x, non_blocking=True)
    elif leaf.kind == OFFSETS:
        buffer[: size + 1].copy_(x, non_blocking=True)
        tail, first = buffer[size + 1 :], leaf.rows
        step = padding_step(leaf, capacities)
        last = first + step * len(tail)
        torch.arange(first + step, last + 1, step, out=tail, device=tail.device)
        tail.clamp_(max=capacities.rows)
    else:
        size = x.shape[0]
        buffer[:size].copy_(x, non_blocking=True)
        if leaf.kind == ORDER:
            torch.arange(size, len(buffer), out=buffer[size:], device=buffer.device)
        elif size < len(buffer):
            buffer[size:].zero_()


def _padding(leaf: Leaf, last: int, typecode: str, count: int) -> array[int]:
    """So many numbers behind a leaf's own, as `pad` writes them. last: the capacity of rows."""
    if leaf.kind == ORDER:
        return array(typecode, range(leaf.size, leaf.size + count))
    step = cdiv(last - leaf.rows, count)  # that of `padding_step`, without its call
    numbers = range(leaf.rows + step, min(leaf.rows + step * count, last) + 1, step)
    # a list of them takes less time than the range
    return array(typecode, [*numbers]) + array(typecode, [last]) * (count - len(numbers))
