"""Settings as constants of traced graphs, because torch.compile cannot trace a ContextVar.

This module is imported only while a graph is traced, because the decorator imports torch._dynamo
and triton.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # unannotated in torch
def traced_value(setting: Any) -> Any:
    """The current value of a setting, one of the classes in `settings`."""
    return setting._state().value
