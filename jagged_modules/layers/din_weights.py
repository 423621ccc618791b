"""The parts of an attention MLP of another library, by their order and their types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .from_torch import is_of_class
from .one_node import has_call_of_its_own

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Sigmoid: "sigmoid",
    nn.SiLU: "silu",
    nn.Identity: "identity",
    nn.PReLU: "prelu",
}
DROPOUTS = nn.Dropout, nn.AlphaDropout


class DINWeights(NamedTuple):
    """linears: of the MLP. activation: its name. modules: those of the activations. norm: what the
    layer's constructor takes for Dice's batch norm."""

    linears: list[nn.Linear]
    activation: str
    modules: list[Any]
    norm: dict[str, Any]

    def state_dict(self) -> dict[str, Tensor]:
        """The state of a `JaggedDINAttention` with these weights."""
        state: dict[str, Tensor] = {}
        for i, linear in enumerate(self.linears):
            state |= {f"linears.{i}.{name}": x for name, x in linear.state_dict().items()}
        for i, (module, linear) in enumerate(zip(self.modules, self.linears)):
            if self.activation == "dice":
                slope = module.alpha
                state |= {f"units.{i}.norm.{name}": x for name, x in module.bn.state_dict().items()}
            elif self.activation == "prelu":
                slope = module.weight
            else:
                continue
            state[f"units.{i}.slope"] = slope.detach().flatten().expand(linear.out_features)
        return state


def read_mlp(mlp: nn.Module) -> DINWeights:
    """The linears and activations of the module, each in the order in which they are registered.
    ValueError as `JaggedDINAttention.from_torch`."""
    parts = [x for x in _parts(mlp) if not isinstance(x, DROPOUTS)]
    for x in parts:
        if has_call_of_its_own(x) or (isinstance(x, nn.Linear) and not is_of_class(x, nn.Linear)):
            raise ValueError(
                "mlp's linears must have the forward of an nn.Linear, and no part hooks or a"
                f" forward of its own, got {x}"
            )
    linears = [x for x in parts if isinstance(x, nn.Linear)]
    modules = [x for x in parts if not isinstance(x, nn.Linear)]
    if len(linears) < 2 or len(modules) != len(linears) - 1:
        raise ValueError(
            "mlp must have two or more linears and an activation behind each but the last, got"
            f" {len(linears)} and {[type(x).__name__ for x in modules]}"
        )
    kinds: list[type[Any]] = [type(x) for x in modules]
    names = {
        "dice" if _is_dice(x) else ACTIVATIONS.get(kind, kind.__name__)
        for x, kind in zip(modules, kinds)
    }
    known = {*ACTIVATIONS.values(), "dice"}
    if len(names) != 1 or not names <= known:
        raise ValueError(f"mlp must have one activation, one of {known}, got {names}")
    sizes = [linears[0].in_features, *(x.out_features for x in linears)]
    if sizes[0] % 4 or sizes[-1] != 1 or [x.in_features for x in linears] != sizes[:-1]:
        raise ValueError(f"mlp must map 4 · E features to 1, got linears of sizes {sizes}")
    if any(x.bias is None for x in linears):  # pyright: ignore[reportUnnecessaryComparison]
        raise ValueError("mlp's linears must have biases")
    (activation,) = names
    norm: dict[str, Any] = {}
    if activation == "dice":
        norms = {(x.bn.eps, x.bn.momentum, x.bn.affine) for x in modules}
        if len(norms) != 1 or not all(x.bn.track_running_stats for x in modules):
            raise ValueError(
                f"mlp's Dices must have equal norms with running statistics, got {norms}"
            )
        norm = dict(zip(("eps", "momentum", "affine"), *norms))
    return DINWeights(linears, activation, modules, norm)


def _is_dice(module: nn.Module) -> bool:
    alpha, norm = getattr(module, "alpha", None), getattr(module, "bn", None)
    return isinstance(alpha, Tensor) and isinstance(norm, nn.BatchNorm1d)


def _parts(module: nn.Module) -> Iterator[Any]:
    """Modules without children, and Dices as a whole. Empty containers are none."""
    if isinstance(module, (nn.Sequential, nn.ModuleList)) and not len(module):
        return
    if _is_dice(module) or next(module.children(), None) is None:
        yield module
        return
    for child in module.children():
        yield from _parts(child)
