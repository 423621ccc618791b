"""What layers share about their parameters."""

from collections.abc import Iterable

from torch import nn


def reset_all(modules: Iterable[nn.Module]) -> None:
    """`reset_parameters` of each module, or of what it holds where it has none itself, as a LoRA wrapper around a Linear."""
    for module in modules:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        else:
            reset_all(module.children())
