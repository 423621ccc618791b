"""Registration of the containers as pytrees, for torch.export and all torch functions that use
`tree_map`.

Children are tensors or pytrees. A map may replace them by any object, so a rebuilt container is not
checked. All other attributes are structure: an exported model accepts only inputs of the same
structure. Schedules and host lengths are not part of the tree; a rebuilt container finds them
through its offsets if these are the same tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jagged_kernels.attention.pages import Pages
from jagged_kernels.schedule.host import TileSchedule
from torch.serialization import add_safe_globals  # pyright: ignore[reportUnknownVariableType] - unannotated in torch
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .bias import RelativeBias
from .containers.candidates import CandidateIndex
from .containers.history_cache import HistoryCache
from .containers.jagged import Jagged
from .containers.pages import PagedRows
from .functional import ScorePlan
from .layers.gdpa import GDPAConfig
from .layers.hstu_config import HSTUConfig
from .layers.interformer import InterFormerConfig
from .layers.kunlun import KunlunConfig
from .masks import AttentionMask
from .rotary import Rotary
from .scalars import is_sequence
from .segments import Segmentation, segmentation_of

Build = Callable[..., Any]


def _register(
    cls: type,
    children: Sequence[str],
    constants: Sequence[str] = (),
    build: Build | None = None,
    get: Callable[[Any, str], Any] = getattr,
) -> None:
    """Register cls as a pytree that `torch.export.save` stores and that `torch.load` accepts with
    weights_only=True.

    Args:
        children: names of attributes that are leaves or pytrees. Which of them are None is part of
            the structure.
        constants: names of attributes that are part of the structure; their types must be JSON
            types or dtypes.
        build: builds the object without checks, from all these attributes as keyword arguments.
            None: set them on a new object.
        get: returns a child, given the object and the child's name.
    """

    def flatten(x: Any) -> tuple[list[Any], Any]:
        given = {name: get(x, name) for name in children}
        given = {name: child for name, child in given.items() if child is not None}
        return list(given.values()), (tuple(given), tuple(getattr(x, name) for name in constants))

    # Any: type checkers do not see torch's GetAttrKey as a KeyEntry
    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
        values, context = flatten(x)
        return [(GetAttrKey(name), value) for name, value in zip(context[0], values)], context

    def unflatten(values: Iterable[Any], context: Any) -> Any:
        present, fixed = context
        return (build or _object(cls))(
            **dict.fromkeys(children) | dict(zip(present, values)) | dict(zip(constants, fixed))
        )

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"jagged_modules.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=_to_json,
        from_dumpable_context=_from_json,
    )
    add_safe_globals([cls])


def _object(cls: type[object]) -> Build:
    def build(**attributes: Any) -> object:
        x = object.__new__(cls)
        vars(x).update(attributes)  # bypasses the constructor, which would check the attributes
        return x

    return build


def _to_json(context: Any) -> Any:
    if is_sequence(context):
        return [_to_json(x) for x in context]
    return str(context) if isinstance(context, torch.dtype) else context


def _from_json(context: Any) -> Any:
    """Undo `_to_json`, with tuples for lists."""
    if is_sequence(context):
        return tuple(_from_json(x) for x in context)
    is_dtype = isinstance(context, str) and context.startswith("torch.")
    return getattr(torch, context.removeprefix("torch.")) if is_dtype else context


def _plan_child(plan: ScorePlan, name: str) -> Any:
    """The child, or None for y_offsets that are the tensor x_offsets. Operators then compute x with
    itself, so this must be structure."""
    return None if name == "y_offsets" and plan.y_offsets is plan.x_offsets else getattr(plan, name)


def _plan(x_offsets: Any, y_offsets: Any, **others: Any) -> ScorePlan:
    return ScorePlan(x_offsets, x_offsets if y_offsets is None else y_offsets, **others)


def _paged_rows(storage: Any, offsets: Any, pages: Any, dtype: Any) -> PagedRows:
    return PagedRows(storage, offsets, pages, segmentation_of(offsets), dtype)


# configs are no pytrees, and a checkpoint may hold them
add_safe_globals([Segmentation, GDPAConfig, HSTUConfig, InterFormerConfig, KunlunConfig])
_register(Jagged, ("values", "offsets"), ("max_seqlen",), build=Jagged.unchecked)
_register(PagedRows, ("storage", "offsets", "pages"), ("dtype",), build=_paged_rows)
_register(CandidateIndex, ("offsets", "order", "inverse"), build=CandidateIndex)
_register(
    AttentionMask,
    ("num_targets",),
    tuple(field.name for field in dataclasses.fields(AttentionMask) if field.name != "num_targets"),
)
_register(
    RelativeBias,
    ("position", "time", "timestamps", "boundaries", "query_timestamps", "query_shift"),
)
_register(Rotary, ("cos", "sin", "positions"), ("rotate", "linear", "precise"))
_register(
    ScorePlan,
    ("x_offsets", "y_offsets", "p_offsets", "x_rows", "y_rows", "total"),
    build=_plan,
    get=_plan_child,
)
_register(
    TileSchedule,
    ("tiles", "num_tiles", "backward"),
    ("block_m", "block_n", "num_heads", "ascending"),
)
_register(Pages, ("table", "num_rows", "scales"), ("page_rows",))
_register(HistoryCache, ("layers", "timestamps"), ("max_rows",))
