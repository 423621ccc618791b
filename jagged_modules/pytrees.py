"""Containers as pytrees, for torch.export and everything else in torch that finds tensors with `tree_map`.

The children are tensors or pytrees. A map may replace them by anything, so nothing is checked when a container is rebuilt. All other
attributes are structure: an exported model takes only inputs of the same structure. Schedules and host lengths are not included; a
rebuilt container finds them by its offsets tensor if that is the same tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.serialization import add_safe_globals  # pyright: ignore[reportUnknownVariableType] - unannotated in torch
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .containers.candidates import CandidateIndex
from .containers.jagged import Jagged
from .containers.segmentation import Segmentation
from .functional import ScorePlan
from .layers.hstu import HSTUCache
from .masks import AttentionMask
from .rotary import Rotary
from .scalars import is_sequence
from .schedule import TileSchedule

Build = Callable[..., Any]


def _register(
    cls: type, children: Sequence[str], constants: Sequence[str] = (), build: Build | None = None, get: Callable[[Any, str], Any] = getattr
) -> None:
    """Register cls as a pytree that `torch.export.save` stores and that `torch.load` accepts with weights_only=True.

    Args:
        children: attributes that are leaves or pytrees. Which of them are None is structure.
        constants: attributes that are structure, of JSON types.
        build: makes the object, without checks, from all of these attributes as keyword arguments; None: sets them on a new object.
        get: (object, name of a child) → the child.
    """

    def flatten(x: Any) -> tuple[list[Any], Any]:
        given = {name: get(x, name) for name in children}
        given = {name: child for name, child in given.items() if child is not None}
        return list(given.values()), (tuple(given), tuple(getattr(x, name) for name in constants))

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Any]:  # Any: to checkers torch's GetAttrKey is no KeyEntry
        values, context = flatten(x)
        return [(GetAttrKey(name), value) for name, value in zip(context[0], values)], context

    def unflatten(values: Iterable[Any], context: Any) -> Any:
        present, fixed = context
        return (build or _object(cls))(**dict.fromkeys(children) | dict(zip(present, values)) | dict(zip(constants, fixed)))

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"jagged_modules.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_tuples,
    )
    add_safe_globals([cls])


def _object(cls: type[object]) -> Build:
    def build(**attributes: Any) -> object:
        x = object.__new__(cls)
        vars(x).update(attributes)  # not the constructor of a frozen dataclass, which checks
        return x

    return build


def _tuples(context: Any) -> Any:
    """The context with tuples for the lists that JSON turned them into."""
    return tuple(_tuples(x) for x in context) if is_sequence(context) else context


def _plan_child(plan: ScorePlan, name: str) -> Any:
    """The child. y_offsets that are x_offsets are None: operators compute x with itself then, so that this is structure."""
    return None if name == "y_offsets" and plan.y_offsets is plan.x_offsets else getattr(plan, name)


def _plan(x_offsets: Any, y_offsets: Any, **others: Any) -> ScorePlan:
    return ScorePlan(x_offsets, x_offsets if y_offsets is None else y_offsets, **others)


add_safe_globals([Segmentation])
_register(Jagged, ("values", "offsets"), ("max_seqlen",), build=Jagged.unchecked)
_register(CandidateIndex, ("offsets", "order", "inverse"), build=CandidateIndex)
_register(
    AttentionMask,
    ("num_targets",),
    ("causal", "window", "target_group_size", "contextual_seqlen", "max_attn_len", "min_full_attn_seqlen"),
)
_register(Rotary, ("cos", "sin", "positions"), ("rotate", "linear", "precise"))
_register(ScorePlan, ("x_offsets", "y_offsets", "p_offsets", "x_rows", "y_rows", "total"), build=_plan, get=_plan_child)
_register(TileSchedule, ("tiles", "num_tiles", "work", "backward"), ("block_m", "block_n", "num_heads", "num_workers"))
_register(HSTUCache, ("layers",))
