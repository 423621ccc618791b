"""A stack of HSTU layers, and scoring of targets against cached histories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ..containers.history_cache import HistoryCache
from ..containers.jagged import C, Jagged, wrap_rows
from ..scalars import check_kind, check_size
from ..tracing import one_module, through_call
from .hstu import HSTULayer
from .hstu_config import (
    HSTUConfig,
    Times,
    check_appendable,
    check_lengths,
    check_row_timestamps,
    rows_seen_by_targets,
)
from .one_node import has_call_of_its_own, has_global_hooks, is_recorded
from .parameters import Layer, name_keywords


@name_keywords
class HSTUStack(Layer):
    """A sequence of `HSTULayer`s.

    Args:
        embedding_dim, num_heads, config, device, dtype: arguments of each `HSTULayer`.
        num_layers: number of layers.

    Raises:
        TypeError, ValueError: as `HSTULayer`; num_layers is not a positive integer.

    Example::

        config = jm.HSTUConfig(scaling_seqlen=100)
        hstu = jm.HSTUStack(32, num_heads=4, num_layers=2, config=config).eval()
        history = torch.randn(5, 32), torch.tensor([0, 2, 5])  # two users with 2 and 3 events
        targets = torch.randn(4, 32), torch.tensor([0, 3, 4])  # 3 and 1 targets
        with torch.no_grad():
            cache = hstu.cache(history)
            values, offsets = hstu.score(targets, cache)  # [4, 32]
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_layers: int,
        config: HSTUConfig | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("num_layers", num_layers)
        layers: Any = nn.ModuleList(  # torch's ModuleList has no type of element
            HSTULayer(embedding_dim, num_heads, config, device, dtype) for _ in range(num_layers)
        )
        self.layers: Sequence[HSTULayer] = layers
        self.config = self.layers[0].config

    @one_module
    def forward(
        self,
        x: C,
        num_targets: Tensor | None = None,
        *,
        timestamps: Tensor | None = None,
        query_timestamps: Tensor | None = None,
    ) -> C:
        """Update all rows in each layer.

        Args:
            x, num_targets, timestamps, query_timestamps: as in `HSTULayer.forward`.

        Returns:
            x's kind of container, with `[L, E]` values.

        Raises:
            TypeError, ValueError: as `HSTULayer.forward`.
        """
        jagged = _without_container(x, self.config)
        times: Any = dict(timestamps=timestamps, query_timestamps=query_timestamps)
        before = None
        for layer in self.layers:
            in_place = type(jagged) is Jagged and _may_overwrite(before, layer)
            update: Any = layer._forward_in_place if in_place else layer  # pyright: ignore[reportPrivateUsage]
            jagged = update(jagged, num_targets, **times)
            before = layer
        return _in_container_of(x, jagged)

    @through_call
    def cache(
        self, history: Any, timestamps: Tensor | None = None, query_timestamps: Tensor | None = None
    ) -> HistoryCache:
        """Compute each layer's keys and values of the histories, for any number of later calls of
        `score`.

        Args:
            history: any container of `[L, E]` values. The rows of a segment are context, then
                history.
            timestamps, query_timestamps: int64 `[L]`, as in `HSTULayer.forward`. A cache does not
                know the targets. By default, the last row of a history takes its own timestamp for
                the time of the next event, and `forward` the first target's. For equal results pass
                query_timestamps: of each row the timestamp of the next one, and of the last that of
                the request.

        Returns:
            The cache, with a copy of the keys and values of the rows that targets see. If the
            config has max_attn_len, recent_history or contextual_seqlen, and the lengths are on the
            device only, finding these rows synchronises with the device.

        Raises:
            TypeError, ValueError: as `HSTULayer.forward`; the config has relative_position, a
                global_prefix and a limit of the rows that targets see: the cached rows would have
                gaps between their positions.
        """
        wrapped = self._wrap("history", history)
        check_lengths("history", self.config, wrapped.offsets)
        # offsets on the device, for all layers
        segments = wrapped.with_values(wrapped.values)
        rows, offsets = rows_seen_by_targets(segments, self.config)
        jagged: Any = segments
        kept: list[Tensor] = []
        for layer in self.layers:
            jagged, keys_and_values = layer.cache(
                jagged,
                rows,
                timestamps=timestamps,
                query_timestamps=query_timestamps,
                update=layer is not self.layers[-1],
            )
            kept.append(keys_and_values)
        if offsets is not None:
            segments = Jagged(kept[0], offsets, wrapped.max_seqlen)
        layers = tuple(segments.with_values(x) for x in kept)
        # A copy: the cache outlives the batch, whose tensor the caller may write to.
        times = None if timestamps is None else torch.cat([timestamps[rows]])
        return HistoryCache(layers, times, self.max_cached_rows)

    @through_call
    def score(
        self,
        targets: C,
        cache: HistoryCache,
        *,
        timestamps: Tensor | None = None,
        query_timestamps: Tensor | None = None,
    ) -> C:
        """Score targets against cached histories.

        The result equals the targets' rows of `forward` over the history and the targets of each
        user, with equal query_timestamps. The cost is that of the targets.

        Args:
            targets: any container of `[N, E]` values; segment b has the targets of history b.
            cache: the result of `cache` for the histories. It is valid until the parameters change.
            timestamps, query_timestamps: int64 `[N]` of the targets, as in `HSTULayer.forward`.

        Returns:
            The targets' kind of container, with `[N, E]` values.

        Raises:
            TypeError, ValueError: as `HSTULayer.forward`; the cache does not fit the layers.
        """
        wrapped = self._wrap("targets", targets)
        times = self._times("targets", wrapped, cache, Times(timestamps, query_timestamps))
        jagged = wrapped.with_values(wrapped.values)
        num_targets = jagged.offsets.diff()
        for layer, history in zip(self.layers, cache.layers):
            jagged = layer.score(jagged, history, num_targets, **times)
        return wrapped.unwrap(jagged.values)

    @through_call
    def append(
        self,
        events: C,
        cache: HistoryCache,
        *,
        timestamps: Tensor | None = None,
        query_timestamps: Tensor | None = None,
    ) -> tuple[C, HistoryCache]:
        """Process the next events of cached histories.

        The result equals the events' rows of `forward` over the history and the events of each
        user. Keys and values of earlier rows do not change. The cost is that of the events, and
        with config.max_attn_len per layer a copy of the cached rows. A `PagedHistoryCache` with
        long pages saves this copy.

        Args:
            events: any container of `[N, E]` values; segment b has the next events of history b,
                from oldest to newest.
            cache: keys and values of the histories: of all rows, or with config.max_attn_len of at
                least the last max_attn_len rows. It is valid until the parameters change.
            timestamps, query_timestamps: int64 `[N]` of the events, as in `cache`. The query
                timestamps of earlier rows do not change.

        Returns:
            The events' kind of container, with `[N, E]` values, and the keys and values of the
            events' rows. `cache.append` adds them to the cache.

        Raises:
            TypeError, ValueError: as `score`; later events change earlier rows under the config: it
                has contextual_seqlen, recent_history, or max_attn_len with min_full_attn_seqlen or
                global_prefix, or no scaling_seqlen.

        Example::

            config = jm.HSTUConfig(scaling_seqlen=100)
            hstu = jm.HSTUStack(32, num_heads=4, num_layers=2, config=config).eval()
            cache = hstu.cache((torch.randn(5, 32), torch.tensor([0, 2, 5])))  # 2 and 3 events
            event = torch.randn(1, 32), torch.tensor([0, 0, 1])  # of user 1
            (values, _), new = hstu.append(event, cache)
            cache = cache.append(new)  # 2 and 4 events
        """
        check_appendable(self.config)
        wrapped = self._wrap("events", events)
        times = self._times("events", wrapped, cache, Times(timestamps, query_timestamps))
        jagged = wrapped.with_values(wrapped.values)
        added: list[Jagged] = []
        for layer, history in zip(self.layers, cache.layers):
            jagged, keys_and_values = layer.append(jagged, history, **times)
            added.append(jagged.with_values(keys_and_values))
        new = HistoryCache(tuple(added), timestamps, self.max_cached_rows)
        return wrapped.unwrap(jagged.values), new

    # for PagedHistoryCache: keys and values of new events depend on cached rows
    append_reads_cache = True

    @property
    def append_writes_pages(self) -> bool:
        """Whether `append` can write behind cached rows in pages, and hides those before the last
        max_cached_rows.

        Not with relative positions, whose number bounds the hidden rows too.
        """
        return not (self.config.max_attn_len and self.config.relative_position)

    @property
    def max_cached_rows(self) -> int | None:
        """How many of the latest rows of a history its next events and targets see, if `append` is
        possible; None: all."""
        return self.config.max_attn_len or None

    def _wrap(self, name: str, x: Any) -> Jagged:
        first = self.layers[0]
        return wrap_rows(name, x, first.embedding_dim, first.uvqk_proj)

    def _times(self, name: str, x: Jagged, cache: HistoryCache, times: Times) -> dict[str, Any]:
        """The timestamps of x, which errors call `name`, and of the cache, as arguments of the
        layers. Checks what the layers do not."""
        check_kind("cache", cache, HistoryCache, "a HistoryCache")
        if len(cache.layers) != len(self.layers):
            raise ValueError(f"cache must have {len(self.layers)} layers, got {len(cache.layers)}")
        times.check(name, x, self.config)
        if times.timestamps is not None:
            check_row_timestamps(
                "cache's timestamps", cache.timestamps, "cache", cache.layers[0], self.config
            )
        return times._replace(cache_timestamps=cache.timestamps).completed(x)._asdict()


def _may_overwrite(before: HSTULayer | None, layer: HSTULayer) -> bool:
    """Whether nobody but the stack holds the rows between two layers: no graph, no hook, and no
    layer of a user's class. The first layer's rows are the caller's."""
    if before is None or torch.is_grad_enabled() or is_recorded() or has_global_hooks():
        return False
    return all(type(x) is HSTULayer and not has_call_of_its_own(x) for x in (before, layer))


@torch.fx.wrap
def _without_container(x: Any, config: HSTUConfig) -> Jagged:
    """x as a Jagged: torch's fully_shard finds the tensors in a Jagged that layers pass on, but not
    those in TorchRec's containers."""
    jagged = Jagged.wrap(x)
    check_lengths("x", config, jagged.offsets)  # before they are copied to a device
    return jagged.with_values(jagged.values)


@torch.fx.wrap
def _in_container_of(x: Any, jagged: Jagged) -> Any:
    return Jagged.wrap(x).unwrap(jagged.values)
