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


class CachesRows(Layer):
    """A layer that caches something of each row of a history, which no other row changes."""

    max_cached_rows = None  # for PagedHistoryCache

    @through_call
    def cache(self, history: Any) -> HistoryCache:
        """Compute the keys and values of the histories, for any number of later calls of `score`.

        Args:
            history: any container of `[L, E]` values in B segments, one per user.

        Returns:
            The cache, with one layer of values `[L, num_heads, 2 · head_dim]`; of a
            `JaggedDINAttention` `[L, 1, E + H1]`, the events and what the first linear adds for
            each of them.

        Raises:
            TypeError, ValueError: as `forward`.
        """
        return self._cached("history", history)[1]

    @through_call
    def append(self, events: Any, cache: HistoryCache) -> tuple[None, HistoryCache]:
        """Compute the keys and values of the next events of cached histories. Those of the earlier
        events do not change.

        Args:
            events: any container of `[N, E]` values; segment b has the next events of history b.
            cache: of the histories, of which only the number is read.

        Returns:
            None, because events have no output, and the cache of the events. `cache.append` adds
            them to the cache.

        Raises:
            TypeError, ValueError: as `cache`; the cache has another number of segments or another
                shape.
        """
        return None, self._appended(events, cache)[1]

    def _cached(self, name: str, x: Any) -> tuple[Jagged, HistoryCache]:
        """The rows of x, which errors call `name`, and what is cached of them."""
        rows = self._wrapped(name, x)
        end = rows.end(name)
        kept = leaving(self._kept(entering(rows.values, end)), end)
        return rows, HistoryCache((rows.with_values(kept),))

    def _appended(self, events: Any, cache: HistoryCache) -> tuple[Jagged, HistoryCache]:
        """`_cached` of the events, after a check of the cache."""
        rows, new = self._cached("events", events)
        self._layer_of(cache, "events", rows)
        return rows, new

    def _wrapped(self, name: str, x: Any) -> Jagged:
        """The rows of x, which errors call `name`, checked."""
        raise NotImplementedError

    def _kept(self, rows: Tensor) -> Tensor:
        """What is cached of rows `[N, E]`, `[N, heads, width]`."""
        raise NotImplementedError

    def _layer_of(self, cache: HistoryCache, name: str, x: Jagged | None) -> Jagged:
        """`layer_of_cache` with the shape of `_kept`."""
        raise NotImplementedError


class CachesProjection(CachesRows):
    """A layer whose keys and values are a projection of a history's rows: `kv_proj`, which gives k
    of all heads, then v."""

    embedding_dim: int
    num_kv_heads: int
    head_dim: int
    kv_proj: nn.Linear

    def _wrapped(self, name: str, x: Any) -> Jagged:
        return wrap_rows(name, x, self.embedding_dim, self.kv_proj)

    def _kept(self, rows: Tensor) -> Tensor:
        kept = projected_in_heads(rows, self.kv_proj, self.num_kv_heads)
        return torch.cat(self._project(rows), dim=2) if kept is None else kept

    def _layer_of(self, cache: HistoryCache, name: str, x: Jagged | None) -> Jagged:
        return layer_of_cache(cache, name, x, self.num_kv_heads, 2 * self.head_dim, self.kv_proj)

    def _project(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[N, num_kv_heads, head_dim]` of these rows."""
        projected = self.kv_proj(rows)
        kv = in_heads("kv_proj", projected, 2, self.num_kv_heads, self.head_dim)
        k, v = kv.unbind(1)
        return k, v


def layer_of_cache(
    cache: HistoryCache, name: str, x: Jagged | None, heads: int, width: int, projection: nn.Module
) -> Jagged:
    """The only layer of the cache. TypeError or ValueError unless it has values `[L, heads,
    width]`.

    Args:
        x: rows that the cache must have as many segments as, which errors call `name`; None: not
            checked.
        projection: the keys' and values' projection, whose dtype and device the cache must have.
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
