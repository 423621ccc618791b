"""Initialisation of parameters, shared by the layers."""

from collections.abc import Iterable

from torch import nn


def reset_all(modules: Iterable[nn.Module]) -> None:
    """Call each module's `reset_parameters`. If a module has none (for example a LoRA wrapper around a Linear), call its children's."""
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            reset_all(module.children())
        else:
            reset()
