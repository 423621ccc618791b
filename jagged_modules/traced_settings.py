"""Settings as constants of graphs that are being traced: torch.compile cannot trace a ContextVar.

A module of its own, imported where a graph is traced: the decorator imports torch._dynamo, and with it triton.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.assume_constant_result
def traced_value(setting: type) -> Any:
    return setting._state().value
