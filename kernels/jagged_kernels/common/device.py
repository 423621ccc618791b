"""Facts about the device and about tensors that launchers need."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Size = TypeVar("Size", int, Tensor)
INVARIANT_SHIFT = 11  # log2 of the length of a long segment's chunks, under batch_invariant


def precision(x: Tensor) -> str:
    """Precision of fp32 MMAs, as `tl.dot` takes it. "bf16x6": six bf16 MMAs, which keep all 24 bits
    in a tenth of the time of fp32 FMAs. "tf32": if the user allows it with
    torch.set_float32_matmul_precision. "ieee": in Triton's interpreter, which has neither."""
    if not x.is_cuda:
        return "ieee"
    return "bf16x6" if torch.get_float32_matmul_precision() == "highest" else "tf32"


class DeviceProperties(NamedTuple):
    """Compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    num_sms: int


@functools.cache
def device_properties(device: torch.device) -> DeviceProperties:
    """Properties of a GPU. Triton's interpreter runs on host tensors, as four multiprocessors of
    capability 9.0."""
    if device.type != "cuda":
        return DeviceProperties((9, 0), 4)
    properties = torch.cuda.get_device_properties(device)
    return DeviceProperties(
        torch.cuda.get_device_capability(device), properties.multi_processor_count
    )


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the machine's first GPU, None without one. Does not initialise CUDA: a
    data loader's worker must not."""
    if torch.cuda.is_initialized():
        return device_properties(torch.device("cuda", 0)).capability
    return _driver_capability()


@functools.cache
def _driver_capability() -> tuple[int, int] | None:
    """The compute capability that the driver's management library reports."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver, no GPU
        return None
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        or library.nvmlDeviceGetCudaComputeCapability(
            device, ctypes.byref(major), ctypes.byref(minor)
        )
    )
    return None if failed else (major.value, minor.value)


def aligned_strides(*dims: tuple[Tensor, int]) -> tuple[int, list[int]]:
    """Strides of (tensor, dimension) in units of `align` elements, the most that divides all of
    them, up to 16 bytes.

    Triton learns a stride's divisibility only at 16 elements; a row of 3 heads of 40 would load
    element by element. The kernels multiply by the constant `align` instead, which tells the
    compiler how wide a load may be. A single row keeps its stride, though no kernel uses it: it
    then runs the same kernel as many rows, which adds in the same order.
    """
    strides = [x.stride(dim) if dim == 0 or x.shape[dim] > 1 else 0 for x, dim in dims]
    return _in_aligned_units(strides, min([x.element_size() for x, _ in dims]))


def row_strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """`aligned_strides` of the first dimension."""
    return _in_aligned_units(
        [x.stride(0) for x in tensors], min([x.element_size() for x in tensors])
    )


def row_and_head_strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """`aligned_strides` of the first two dimensions of tensors `[rows, H, D]`."""
    strides, itemsize = [], 16
    for x in tensors:
        stride_row, stride_head, _ = x.stride()
        strides += stride_row, stride_head if x.shape[1] > 1 else 0
        itemsize = min(itemsize, x.element_size())
    return _in_aligned_units(strides, itemsize)


def _in_aligned_units(strides: list[int], itemsize: int) -> tuple[int, list[int]]:
    # Triton passes a stride as int32 if it fits. One that fits in units alone would overflow when a
    # kernel multiplies it by `align`.
    align = 1 if max(strides) >= 2**31 else math.gcd(16 // itemsize, *strides)
    return align, [stride // align for stride in strides]


def has_descriptor(x: Tensor) -> bool:
    """Whether the tensor memory accelerator reads rows of x `[rows, H, D]`: they start at 16-byte
    boundaries, and none is expanded."""
    rows, heads, _ = x.shape
    stride_row, stride_head, stride = x.stride()
    if rows == 0 or stride != 1 or x.data_ptr() % 16 != 0:
        return False
    unit = 16 // x.element_size()
    aligned_rows = rows == 1 or (stride_row > 0 and stride_row % unit == 0)
    return aligned_rows and (heads == 1 or (stride_head > 0 and stride_head % unit == 0))


def contiguous_last_dim(x: Tensor) -> Tensor:
    """Copies unless the last dimension is contiguous."""
    return x if x.stride()[-1] == 1 else x.contiguous()


def zeroed_behind(x: Tensor, rows: int) -> Tensor:
    """x `[n, ...]`, whose rows from this one on become 0, in place."""
    if x.shape[0] > rows:
        x[rows:].zero_()
    return x


def chunk_shift(
    num_rows: int,
    max_seqlen: int | None,
    tiles: int,
    device: torch.device,
    batch_invariant: bool = False,
) -> int:
    """log2 of the length of the chunks that long segments are cut into: enough chunks to fill the
    GPU, and not many more, as another launch adds them up.

    Args:
        num_rows: rows of all segments. max_seqlen: rows of the longest, if known. No segment is cut
            if it is at most the shortest chunk.
        tiles: tiles of the result per chunk.
        batch_invariant: chunks of a fixed length.
    """
    shift = INVARIANT_SHIFT if batch_invariant else 9
    if max_seqlen is not None and max_seqlen <= 1 << shift:
        return 30
    if batch_invariant:
        return shift
    while (num_rows >> shift) * tiles > 4 * device_properties(device).num_sms:
        shift += 1
    return shift


def cdiv(size: Size, block: int) -> Size:
    """Blocks that cover a size; of a tensor, element by element."""
    return (size + (block - 1)) // block
