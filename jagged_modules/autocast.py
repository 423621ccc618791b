"""Autocast for operators that are not torch's own."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, as scaled_dot_product_attention has it: float64 stays."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def autocast(x: Tensor) -> Tensor:
    return x.to(autocast_dtype(x))
