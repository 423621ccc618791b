"""What layers share about their parameters."""

from collections.abc import Iterable

from torch import nn


def reset_all(modules: Iterable[nn.Module]) -> None:
    """Call `reset_parameters` of each module, or of its children if it has none (for example a LoRA wrapper around a Linear)."""
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            reset_all(module.children())
        else:
            reset()
