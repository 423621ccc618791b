"""A walk over a module that is cheap enough for each call."""

from __future__ import annotations

from torch import nn


def submodules(module: nn.Module) -> list[nn.Module]:
    """The module and all modules inside of it; one that several others share comes several times.
    torch's iterators take far longer."""
    found = [module]
    for part in found:  # which grows meanwhile
        if children := part.__dict__["_modules"]:
            found += [x for x in children.values() if x is not None]
    return found
