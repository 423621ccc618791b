"""Descriptors for the tensor memory accelerator (TMA): what it can read, and those of the portable kernels. pipeline.py has Hopper's."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

D = TypeVar("D")


def has_descriptor(x: Tensor) -> bool:
    """Whether TMA reads rows of x `[rows, H, D]`: they start at 16-byte boundaries, and none is expanded."""
    rows, heads, _ = x.shape
    stride_row, stride_head, stride = x.stride()
    if rows == 0 or stride != 1 or x.data_ptr() % 16 != 0:
        return False
    unit = 16 // x.element_size()
    aligned_rows = rows == 1 or stride_row > 0 and stride_row % unit == 0
    return aligned_rows and (heads == 1 or stride_head > 0 and stride_head % unit == 0)


def descriptor(x: Tensor, *box: int) -> TensorDescriptor:
    """Descriptor of x, last dim contiguous, for boxes of a shape. A dimension of size 1 may have any stride: 16 stands in for it."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride())]
    return fill(TensorDescriptor, base=x, shape=list(x.shape), strides=[*strides, 1], block_shape=list(box))


def fill(kind: type[D], **fields: Any) -> D:
    """A descriptor without the checks of its constructor, which take most of its time: `has_descriptor` has made them.

    Fields that are not given have their defaults.
    """
    filled = object.__new__(kind)
    filled.__dict__.update(fields)
    return filled
