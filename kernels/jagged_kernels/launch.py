"""What launchers ask of the device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def precision(x: Tensor) -> str:
    """How fp32 products are made: six bf16 products carry all 24 bits on the matrix units, a tenth of the time of ordinary fp32
    arithmetic; tf32 where the user allowed it for matrix products. Triton's interpreter knows neither."""
    if x.device.type != "cuda":
        return "ieee"
    return "bf16x6" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def device_properties(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors; Triton's interpreter runs on host tensors, as four workers."""
    if device.type != "cuda":
        return (9, 0), 4
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count
