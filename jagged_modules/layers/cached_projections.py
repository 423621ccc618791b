"""Caches of layers whose keys and values are projections of single rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor, nn

from ..containers.history_cache import HistoryCache
from ..containers.jagged import Jagged, check_same_segments, wrap_rows
from ..containers.pages import PagedRows, paged_operands
from ..functional.tail import entering, leaving
from ..scalars import check_kind
from ..tracing import through_call
from ..validation import check_layer_input
from .one_node import linear, node_dtype
from .parameters import Layer, in_heads


class CachesProjection(Layer):
    """A layer whose keys and values are a projection of a history's rows: `kv_proj`, which gives k
    of all heads, then v."""

    embedding_dim: int
    num_heads: int
    head_dim: int
    kv_proj: nn.Linear

    max_cached_rows = None  # for PagedHistoryCache

    @through_call
    def cache(self, history: Any) -> HistoryCache:
        """Compute the keys and values of the histories, for any number of later calls of `score`.

        Args:
            history: any container of `[L, E]` values in B segments, one per user.

        Returns:
            The cache, with one layer of values `[L, num_heads, 2 · head_dim]`.

        Raises:
            TypeError, ValueError: as `forward`.
        """
        rows = wrap_rows("history", history, self.embedding_dim, self.kv_proj)
        return self._cached("history", rows)

    def _cached(self, name: str, rows: Jagged) -> HistoryCache:
        """Keys and values of these rows, which errors call `name`."""
        end = rows.end(name)
        values = entering(rows.values, end)
        keys_and_values = projected_in_heads(values, self.kv_proj, self.num_heads)
        if keys_and_values is None:
            k_and_v = in_heads("kv_proj", self.kv_proj(values), 2, self.num_heads, self.head_dim)
            keys_and_values = torch.cat(k_and_v.unbind(1), dim=2)
        return HistoryCache((rows.with_values(leaving(keys_and_values, end)),))

    def _appended(self, events: Any, cache: HistoryCache) -> tuple[Jagged, HistoryCache]:
        """The events' rows, and their keys and values."""
        rows = wrap_rows("events", events, self.embedding_dim, self.kv_proj)
        self._layer_of(cache, "events", rows)
        return rows, self._cached("events", rows)

    def _layer_of(self, cache: Any, name: str, x: Jagged | None) -> Jagged:
        return layer_of_cache(cache, name, x, self.num_heads, 2 * self.head_dim, self.kv_proj)


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
    check_cached_values(layer, heads, width, projection)
    if x is not None:
        check_same_segments(name, x, "cache", layer)
    return layer


def check_cached_values(cache: Jagged, heads: int, width: int, projection: nn.Module) -> None:
    """ValueError unless the cached rows are `[L, heads, width]`, on the device and in the dtype of
    the projection. In pages of 8 bits, the dtype is that of the rows that they stand for."""
    values, pages = paged_operands(cache)
    if list(values.shape[1:]) != [heads, width]:
        raise ValueError(
            f"cache's values must have shape [L, {heads}, {width}], got"
            f" {[cache.num_rows, *values.shape[1:]]}"
        )
    if isinstance(cache, PagedRows) and pages is not None and pages.scales is not None:
        values = values.new_empty(0, dtype=cache.dtype)
    check_layer_input("cache's values", values, projection)


def cached_operands(histories: Collection[Jagged]) -> tuple[list[Sequence[Tensor]], Pages | None]:
    """Keys and values of each level, and of one level the pages that they lie in."""
    first, *others = histories
    values, pages = (first.values, None) if others else paged_operands(first)
    return [x.chunk(2, dim=2) for x in (values, *[x.values for x in others])], pages


def projected_in_heads(x: Tensor, projection: nn.Linear, heads: int) -> Tensor | None:
    """`[k | v]` of each head, `[L, heads, width]`, for a projection of x `[L, E]` that gives k of
    all heads, then v. Its outputs change places in the weight: those of the rows are written once.
    None with gradients, or where the projection is called (`one_node.node_dtype`)."""
    dtype = None if torch.is_grad_enabled() else node_dtype(x, (projection,), on_cpu=True)
    if dtype is None:
        return None
    weight, bias = (
        parameter.view(2, heads, -1, *parameter.shape[1:])
        .transpose(0, 1)
        .to(dtype, copy=True, memory_format=torch.contiguous_format)
        .view(parameter.shape)
        for parameter in (projection.weight, projection.bias)
    )
    return torch.unflatten(linear(x.to(dtype), weight, bias), 1, (heads, -1))
