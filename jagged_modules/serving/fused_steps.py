"""Steps of torch's fused optimizers, which write to parameters without counting it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def count_fused_steps(layer: nn.Module, owner: object) -> None:
    """As long as the owner exists, a step of an optimizer with fused=True increments the versions
    of the layer's parameters among its own, as steps of other optimizers do by themselves."""
    of_layer = weakref.ref(layer)

    def count(optimizer: Optimizer, *_: Any) -> None:
        fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
        layer = of_layer()
        if fused and layer is not None:
            own = set(map(id, layer.parameters()))
            increment_version([x for group in fused for x in group if id(x) in own])

    handle = register_optimizer_step_post_hook(count)
    weakref.finalize(owner, handle.remove).atexit = False
