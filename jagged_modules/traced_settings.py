"""Settings as constants of traced graphs, because torch.compile cannot trace a ContextVar.

This module is imported only while a graph is traced, because the decorator imports torch._dynamo and triton.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.assume_constant_result
def traced_value(setting: type) -> Any:
    """The current value of a setting of `settings`."""
    return setting._state().value
