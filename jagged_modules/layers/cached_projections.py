"""Caches of layers whose keys and values are projections of single rows."""

from __future__ import annotations

from torch import nn

from ..containers.history_cache import HistoryCache
from ..containers.jagged import Jagged, check_same_segments
from ..containers.pages import paged_operands
from ..scalars import check_kind
from ..validation import check_layer_input


def layer_of_cache(
    cache: HistoryCache, name: str, x: Jagged | None, heads: int, width: int, projection: nn.Module
) -> Jagged:
    """The only layer of the cache, with values `[L, heads, width]`.

    Args:
        x: rows that the cache must have as many segments as, which errors call `name`; None: not
            checked.
        projection: the keys' and values' projection, whose dtype and device the cache must have.

    Raises:
        TypeError, ValueError: the cache has several layers, or another kind, shape, dtype or
            device.
    """
    check_kind("cache", cache, HistoryCache, "a HistoryCache")
    if len(cache.layers) != 1:
        raise ValueError(f"cache must have 1 layer, got {len(cache.layers)}")
    (layer,) = cache.layers
    check_kind("cache", layer, Jagged, "a HistoryCache of Jagged layers")
    values, _ = paged_operands(layer)
    if list(values.shape[1:]) != [heads, width]:
        raise ValueError(
            f"cache's values must have shape [L, {heads}, {width}], got"
            f" {[layer.num_rows, *values.shape[1:]]}"
        )
    check_layer_input("cache's values", values, projection)
    if x is not None:
        check_same_segments(name, x, "cache", layer)
    return layer
