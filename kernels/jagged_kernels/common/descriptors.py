"""Descriptors of the portable kernels for the tensor memory accelerator (TMA). pipeline.py has
Hopper's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.tools import tensor_descriptor

from .configs import padded_dim


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """What a kernel is compiled for, of a descriptor. There is one object for each kind of box, so
    that comparing identities is enough. shape: of a block of elements. layout: of the block in
    shared memory, for Gluon."""

    dtype: torch.dtype
    shape: list[int]
    layout: Any = None


class Described:
    """A TensorDescriptor of Triton or of Gluon that knows its box."""

    box: Box


class TensorDescriptor(Described, tensor_descriptor.TensorDescriptor):
    """Triton's, of a box."""


D = TypeVar("D", bound=Described)


def descriptor(x: Tensor, *box: int) -> TensorDescriptor:
    """Descriptor of x, last dim contiguous, for boxes of a shape. A dimension of size 1 may have
    any stride: 16 stands in for it."""
    return fill(TensorDescriptor, x, *shape_and_strides(x), _box(x.dtype, *box))


def head_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of `[rows, H, D]`, as `heads_first`: a box is `rows` rows of a head; columns past
    D read as 0."""
    shape, strides = heads_first(x)
    return fill(TensorDescriptor, x, shape, strides, _head_box(x.dtype, rows, shape[2]))


@functools.cache
def _head_box(dtype: torch.dtype, rows: int, dim: int) -> Box:
    return _box(dtype, 1, rows, padded_dim(dim))


def heads_first(x: Tensor) -> tuple[list[int], list[int]]:
    """`shape_and_strides` of `[rows, H, D]` as `[H, rows, D]`."""
    (rows, heads, dim), (stride_row, stride_head, _) = x.shape, x.stride()
    strides = [stride_head if heads > 1 else 16, stride_row if rows > 1 else 16, 1]
    return [heads, rows, dim], strides


def shape_and_strides(x: Tensor) -> tuple[list[int], list[int]]:
    """Of x as a descriptor takes them, last dim contiguous. A dimension of size 1 may have any
    stride: 16 stands in for it."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride())]
    return list(x.shape), [*strides, 1]


def fill(kind: type[D], base: Tensor, shape: list[int], strides: list[int], box: Box) -> D:
    """A descriptor without the checks of its constructor, which take most of its time:
    `has_descriptor` has made them. box: of the dtype of `base`. Other fields have their
    defaults."""
    filled = object.__new__(kind)
    filled.__dict__ = {
        "base": base,
        "shape": shape,
        "strides": strides,
        "block_shape": box.shape,
        "layout": box.layout,
        "box": box,
    }
    return filled


@functools.cache
def _box(dtype: torch.dtype, *shape: int) -> Box:
    return Box(dtype, list(shape))
