"""Properties of devices as constants of traced graphs.

This module is imported only while a graph is traced, because the decorator imports torch._dynamo,
which takes seconds.
"""

from __future__ import annotations

import torch

from .device import device_properties


@torch.compiler.assume_constant_result
def traced_capability(device: torch.device) -> tuple[int, int]:
    """`device.capability`. Functions that take sizes cannot be constants: sizes may be symbolic."""
    return device_properties(device).capability
