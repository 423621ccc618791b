"""HSTU: a layer with pointwise attention over events and targets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.types import Device

from ..bias import RelativeBias
from ..containers.history_cache import HistoryCache
from ..containers.jagged import C, Jagged, check_same_segments, wrap_rows
from ..containers.pages import paged_operands, with_room
from ..dtypes import autocast_dtype
from ..functional.attention import attend, attention_arguments
from ..functional.attention_call import AttentionOptions
from ..functional.tail import entering, leaving
from ..masks import AttentionMask, check_num_targets
from ..scalars import check_flag, check_kind
from ..segments import check_device, check_index_values, check_integers
from ..tracing import through_call
from ..validation import resolve_head_dim
from .cached_projections import check_cached_values
from .hstu_config import HSTUConfig, Times, check_appendable, check_lengths, check_row_timestamps
from .hstu_node import gated_output, hstu_node, norm_rows, takes_kernels
from .invariant import fixed_module
from .norms import NORM_KINDS, make_norm
from .one_node import cast_linears, in_training
from .parameters import Layer, check_columns, name_keywords, xavier_linear

BIAS_STD = 0.02  # initial standard deviation of the entries of both bias tables


class Rows(NamedTuple):
    """The rows of a call: their values, and the projections of these, which are finite behind
    `end`. by_kernels: whether kernels replace the layer's modules."""

    jagged: Jagged
    end: Tensor | None
    by_kernels: bool
    values: Tensor
    u: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def keys_and_values(self) -> Tensor:
        return leaving(torch.cat([self.k, self.v], dim=2), self.end)


class Keys(NamedTuple):
    """What rows attend to: keys and values of these segments, in pages or not. k and v are None if
    a node computes them."""

    jagged: Jagged
    k: Any
    v: Any
    bias: RelativeBias | None
    pages: Pages | None = None


@name_keywords
class HSTULayer(Layer):
    """One layer of an HSTU (Zhai et al. 2024, arXiv:2402.17152), as implemented in Meta's
    generative-recommenders.

        [u | v | q | k] = norm(x) W + b
        u = silu(u)
        a = silu(q kᵀ / sqrt(head_dim)) / scaling_seqlen · v, under HSTU's mask
        y = u · norm(a), in fp32
        out = x + dropout([u | a | y]) W_o

    With config.relative_position or relative_time, a learned `RelativeBias` is added to q kᵀ /
    sqrt(head_dim): the tables `position_bias` `[2N - 1]` and `time_bias` `[K + 1]`, which all heads
    share. The boundaries of the buckets are a buffer, `time_boundaries`.

    norm is a LayerNorm unless config.norm says otherwise. The kernels read q, k and v in place from
    the packed projection.

    On a GPU the layer is one autograd node of kernels that take whole rows, as long as its modules
    are those that the constructor made, without hooks. Otherwise, and on the CPU, it calls them.
    The node draws other random numbers for its dropout than torch's, from a seed of torch's
    generator.

    Args:
        embedding_dim: width E of the rows.
        num_heads: number H of attention heads.
        config: the other sizes, dropout and mask; `HSTUConfig()` if None.
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.

    Raises:
        TypeError, ValueError: a size is not a positive integer; num_heads does not divide
            embedding_dim and head_dim or linear_dim is None; a head is wider than 256.

    Example::

        layer = jm.HSTULayer(32, num_heads=4, config=jm.HSTUConfig(scaling_seqlen=100))
        x = torch.randn(5, 32), torch.tensor([0, 2, 5])  # two users with 2 and 3 rows
        values, offsets = layer(x, num_targets=torch.tensor([1, 1]))  # the last of each is a target
    """

    _shown = "embedding_dim", "num_heads", "config"

    position_bias: nn.Parameter | None
    time_bias: nn.Parameter | None
    time_boundaries: Tensor | None

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        config: HSTUConfig | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        config = HSTUConfig() if config is None else config
        check_kind("config", config, HSTUConfig, "an HSTUConfig")
        self.embedding_dim, self.num_heads, self.config = embedding_dim, num_heads, config
        self.head_dim = resolve_head_dim(embedding_dim, num_heads, config.head_dim)
        self.linear_dim = resolve_head_dim(
            embedding_dim, num_heads, config.linear_dim, "linear_dim"
        )
        width = num_heads * self.linear_dim
        of_input, of_output = NORM_KINDS[config.norm]
        self.input_norm = make_norm(of_input, embedding_dim, device=device, dtype=dtype)
        self.uvqk_proj = xavier_linear(
            embedding_dim, 2 * width + 2 * num_heads * self.head_dim, device=device, dtype=dtype
        )
        self.output_norm = make_norm(of_output, width, num_heads, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)
        self.out_proj = xavier_linear(
            3 * width, embedding_dim, bias=False, device=device, dtype=dtype
        )
        n, k = config.relative_position, config.relative_time
        self.position_bias = self.time_bias = None
        if n:
            self.position_bias = nn.Parameter(torch.empty(2 * n - 1, device=device, dtype=dtype))
        if k:
            self.time_bias = nn.Parameter(torch.empty(k + 1, device=device, dtype=dtype))
        # Persistent, so that a layer built on the meta device is complete after `to_empty` and
        # `load_state_dict`.
        boundaries = torch.empty(k, dtype=torch.int64, device=device) if k else None
        self.register_buffer("time_boundaries", boundaries)
        self._reset_bias()

    def _reset_bias(self) -> None:
        for table in (self.position_bias, self.time_bias):
            if table is not None:
                nn.init.normal_(table, std=BIAS_STD)
        if self.time_boundaries is not None:
            self.time_boundaries.copy_(
                RelativeBias.log_boundaries(self.config.relative_time, device="cpu")
            )

    def reset_parameters(self) -> None:
        """Initialise all parameters, for instance after `to_empty` of a layer built on the meta
        device."""
        super().reset_parameters()
        self._reset_bias()

    @fixed_module
    def forward(
        self,
        x: C,
        num_targets: Tensor | None = None,
        *,
        timestamps: Tensor | None = None,
        query_timestamps: Tensor | None = None,
    ) -> C:
        """Update all rows.

        Args:
            x: any container of `[L, E]` values in B segments. The rows of a segment are context,
                then history, then targets.
            num_targets: `[B]` int32 or int64, the number of rows at the end of each segment that
                are targets; 0 if None. A target sees the history, itself and the earlier targets of
                its group, and no other target.
            timestamps: int64 `[L]` on the values' device, of each row, in any unit. Needed with
                config.relative_time only.
            query_timestamps: int64 `[L]`, what each row takes for the time of the next event; the
                timestamp of the next row if None, and of the last row of a segment its own. See
                `RelativeBias`.

        Returns:
            x's kind of container, with `[L, E]` values.

        Raises:
            TypeError, ValueError: types, shapes, dtypes, devices or numbers of segments do not
                match; scaling_seqlen is None and the container has no max_seqlen; a segment is
                longer than config.relative_position and its length is on the host; timestamps are
                missing, or given without config.relative_time.
        """
        times = Times(timestamps, query_timestamps)
        return self._forward(x, num_targets, times, False)

    @through_call
    def _forward_in_place(
        self, x: Jagged, num_targets: Tensor | None, *, timestamps: Any, query_timestamps: Any
    ) -> Jagged:
        """`forward` that may overwrite x."""
        return self._forward(x, num_targets, Times(timestamps, query_timestamps), True)

    @through_call
    def cache(
        self,
        history: C,
        cache_rows: Tensor | slice = slice(None),
        *,
        timestamps: Tensor | None = None,
        query_timestamps: Tensor | None = None,
        update: bool = True,
    ) -> tuple[C | None, Tensor]:
        """Update the rows of histories, and compute keys and values for later calls of `score`.

        Args:
            history, timestamps, query_timestamps: as x in `forward`, without targets.
            cache_rows: a slice, or `[n]` int32 or int64 indices: the rows whose keys and values are
                returned.
            update: if False, the rows are not updated. The last layer of a stack needs no update.

        Returns:
            The history's kind of container, with `[L, E]` values, or without update None; and keys
            and values `[n, H, head_dim + linear_dim]`.

        Raises:
            TypeError, ValueError: as `forward`.
        """
        check_flag("update", update)
        jagged = self._checked("history", history, None, Times(timestamps, query_timestamps))
        if isinstance(cache_rows, Tensor):
            check_integers("cache_rows", cache_rows)
            check_device("cache_rows", cache_rows, jagged.device, "the layer's")
            check_index_values("cache_rows", cache_rows, jagged.num_rows, "{}, the rows of history")
        else:
            check_kind("cache_rows", cache_rows, slice, "a torch.Tensor or a slice")
        rows, out = self._project("history", jagged), None
        if update:
            bias = self._bias(timestamps, query_timestamps)
            out = self._updated(rows, self._attend_within(rows, self.config.mask(), bias))
        if isinstance(cache_rows, slice) and rows.end is not None:
            return out, rows.keys_and_values()[cache_rows]
        return out, torch.cat([rows.k[cache_rows], rows.v[cache_rows]], dim=2)

    @through_call
    def score(
        self,
        targets: C,
        cache: Jagged,
        num_targets: Tensor | None = None,
        *,
        timestamps: Tensor | None = None,
        query_timestamps: Tensor | None = None,
        cache_timestamps: Tensor | None = None,
    ) -> C:
        """Update targets of cached histories: see `HSTUStack.score`.

        Args:
            targets, timestamps, query_timestamps: as x in `forward`; segment b has the targets of
                history b.
            cache: keys and values `[M, H, head_dim + linear_dim]` of B histories, from this layer's
                `cache`.
            num_targets: the lengths of the targets' segments, if the caller has them on the values'
                device.
            cache_timestamps: int64 `[M]`, the timestamps of cache's rows. Needed with
                config.relative_time.

        Returns:
            The targets' kind of container, with `[N, E]` values.

        Raises:
            TypeError, ValueError: as `forward`; the cache does not fit the layer.
        """
        times = Times(timestamps, query_timestamps, cache_timestamps)
        rows, times = self._behind(cache, "targets", targets, num_targets, times)
        num_targets = rows.jagged.offsets.diff() if num_targets is None else num_targets
        mask = AttentionMask(
            num_targets=num_targets, target_group_size=self.config.target_group_size
        )
        return self._updated(rows, self._attend_with_cache(rows, cache, mask, times))

    @through_call
    def append(
        self,
        events: C,
        cache: Jagged,
        *,
        timestamps: Tensor | None = None,
        query_timestamps: Tensor | None = None,
        cache_timestamps: Tensor | None = None,
    ) -> tuple[C, Tensor]:
        """Update the next events of cached histories: see `HSTUStack.append`.

        Args:
            events, timestamps, query_timestamps: as x in `forward`; segment b has the next events
                of history b.
            cache, cache_timestamps: as in `score`.

        Returns:
            The events' kind of container, with `[N, E]` values, and the events' keys and values
            `[N, H, head_dim + linear_dim]`.

        Raises:
            TypeError, ValueError: as `score`; later events change earlier rows under the config.
        """
        check_appendable(self.config)
        times = Times(timestamps, query_timestamps, cache_timestamps)
        rows, times = self._behind(cache, "events", events, None, times)
        if self.config.max_attn_len or with_room(cache) is not None:
            a = self._attend_to_joined(rows, cache, times)
        else:
            a = self._attend_with_cache(rows, cache, AttentionMask(causal=True), times)
        return self._updated(rows, a), rows.keys_and_values()

    def _forward(self, x: Any, num_targets: Tensor | None, times: Times, in_place: bool) -> Any:
        jagged = self._checked("x", x, num_targets, times)
        mask = self.config.mask(num_targets)
        bias = self._bias(times.timestamps, times.query_timestamps)
        if takes_kernels(self, jagged.values):
            return self._updated_by_node(jagged, mask, bias, in_place)
        rows = self._project("x", jagged)
        return self._updated(rows, self._attend_within(rows, mask, bias))

    def _checked(self, name: str, x: Any, num_targets: Tensor | None, times: Times) -> Jagged:
        """The rows of a call, which errors call `name`."""
        jagged = wrap_rows(name, x, self.embedding_dim, self.uvqk_proj)
        if num_targets is not None:
            check_integers("num_targets", num_targets)
        check_num_targets("num_targets", num_targets, jagged.offsets, jagged.device, "the layer's")
        check_lengths(name, self.config, jagged.offsets)
        times.check(name, jagged, self.config)
        return jagged

    def _behind(
        self, cache: Jagged, name: str, x: Any, num_targets: Tensor | None, times: Times
    ) -> tuple[Rows, Times]:
        """The rows of a call, which errors call `name`, and their timestamps. TypeError or
        ValueError unless the cache has the shape, dtype and device of this layer's keys and values,
        and one segment per segment of x."""
        jagged = self._checked(name, x, num_targets, times)
        check_kind("cache", cache, Jagged, "a Jagged of keys and values")
        check_same_segments(name, jagged, "cache", cache)
        width = self.head_dim + self.linear_dim
        check_cached_values(cache, self.num_heads, width, self.uvqk_proj)
        parts = () if with_room(cache) is not None else (jagged.offsets,)
        check_lengths(f"{name} and cache", self.config, *parts, cache.offsets)
        owner = "cache", cache, self.config
        check_row_timestamps("cache_timestamps", times.cache_timestamps, *owner)
        return self._project(name, jagged), times.completed(jagged)

    def _bias(
        self,
        timestamps: Tensor | None,
        query_timestamps: Tensor | None,
        after: Jagged | None = None,
    ) -> RelativeBias | None:
        """The layer's bias of scores of keys with these timestamps, None without tables. after: the
        queries, if they follow the keys."""
        position, time = self.position_bias, self.time_bias
        if position is None and time is None:
            return None
        shift = None if after is None else after.offsets.diff().to(after.device, non_blocking=True)
        return RelativeBias(
            position, time, timestamps, self.time_boundaries, query_timestamps, shift
        )

    def _scaling_seqlen(self, jagged: Jagged) -> int:
        length = self.config.scaling_seqlen
        if length is None:
            length = jagged.max_seqlen
        if length is None:
            raise ValueError(
                "config.scaling_seqlen must be given if the container has no max_seqlen, got None"
            )
        return max(1, length)  # a batch without rows has a max_seqlen of 0

    def _project(self, name: str, x: Jagged) -> Rows:
        """The rows of x, which errors call `name`, and their projections."""
        end, values = x.end(name), x.values
        by_kernels = takes_kernels(self, values)
        if not by_kernels:
            values = entering(values, end)
        return Rows(x, end, by_kernels, values, *self._uqkv(values, end, by_kernels))

    def _uqkv(
        self, x: Tensor, end: Tensor | None, by_kernels: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u `[L, H · Dv]` before its SiLU, q and k `[L, H, D]`, v `[L, H, Dv]`."""
        qk_width, uv_width = self.num_heads * self.head_dim, self.num_heads * self.linear_dim
        normed = norm_rows(self.input_norm, x, end) if by_kernels else self.input_norm(x)
        (uvqk_proj,) = cast_linears(normed, self.uvqk_proj)
        packed: Any = uvqk_proj(normed)
        check_columns("uvqk_proj", packed, 2 * uv_width + 2 * qk_width)
        u, v, q, k = packed.split([uv_width, uv_width, qk_width, qk_width], dim=1)
        q, k, v = (part.unflatten(1, (self.num_heads, -1)) for part in (q, k, v))
        return u, q, k, v

    def _attend(
        self, rows: Rows, keys: Keys, mask: AttentionMask | None, scaling_seqlen: int
    ) -> Tensor:
        """Attention output `[rows, H · Dv]`."""
        options = self._options(rows.jagged, keys, mask, scaling_seqlen, rows.q.dtype)
        segments = rows.jagged.parsed("x"), keys.jagged.parsed("history")
        return attend(rows.q, keys.k, keys.v, *segments, options).flatten(1)

    def _options(
        self,
        queries: Jagged,
        keys: Keys,
        mask: AttentionMask | None,
        scaling_seqlen: int,
        dtype: torch.dtype,
    ) -> AttentionOptions:
        schedule = keys.jagged.schedule(
            num_heads=self.num_heads,
            head_dim=max(self.head_dim, self.linear_dim),
            dtype=dtype,
            queries=queries,
            mask=mask,
        )
        return AttentionOptions(
            "silu", None, 1 / scaling_seqlen, mask, keys.bias, schedule, pages=keys.pages,
            dropout_p=in_training(self, self.config.attention_dropout),
        )  # fmt: skip

    def _attend_within(
        self,
        rows: Rows,
        mask: AttentionMask,
        bias: RelativeBias | None,
        scaling_seqlen: int | None = None,
    ) -> Tensor:
        """Attention of rows to one another. scaling_seqlen: that of these rows if None."""
        keys = Keys(rows.jagged, rows.k, rows.v, bias)
        length = self._scaling_seqlen(rows.jagged) if scaling_seqlen is None else scaling_seqlen
        return self._attend(rows, keys, mask, length)

    def _cached_keys(self, cache: Jagged, bias: RelativeBias | None) -> Keys:
        values, pages = paged_operands(cache)
        k, v = torch.split_with_sizes(values, [self.head_dim, self.linear_dim], dim=2)
        return Keys(cache, k, v, bias, pages)

    def _attend_with_cache(
        self, rows: Rows, cache: Jagged, mask: AttentionMask, times: Times
    ) -> Tensor:
        """Attention of rows to cached histories, plus to one another under the mask. SiLU has no
        normalisation, so the two add up."""
        length = self._scaling_seqlen(cache)
        bias = self._bias(times.cache_timestamps, times.query_timestamps, rows.jagged)
        of_history = self._attend(rows, self._cached_keys(cache, bias), None, length)
        bias = self._bias(times.timestamps, times.query_timestamps)
        return of_history + self._attend_within(rows, mask, bias, length)

    def _attend_to_joined(self, rows: Rows, cache: Jagged, times: Times) -> Tensor:
        """Attention of events to the cached rows and the events. It writes the events behind the
        cached rows, or copies both once."""
        events, room, timestamps = rows.jagged, with_room(cache), times.cache_timestamps
        added, keys = torch.cat([rows.k, rows.v], dim=2), cache
        if room is not None:
            room.write(added)
        else:
            new = HistoryCache((events.with_values(added),), times.timestamps)
            grown = HistoryCache((cache,), timestamps).append(new)
            (keys,), timestamps = grown.layers, grown.timestamps
        both = self._cached_keys(keys, self._bias(timestamps, times.query_timestamps))
        return self._attend(rows, both, self.config.mask(), self._scaling_seqlen(events))

    def _updated_by_node(
        self, x: Jagged, mask: AttentionMask, bias: RelativeBias | None, in_place: bool
    ) -> Any:
        """x's container with updated values, as one autograd node."""
        end, values = x.end("x"), x.values
        like = values.new_empty((), dtype=autocast_dtype(values))
        options = self._options(
            x, Keys(x, None, None, bias), mask, self._scaling_seqlen(x), like.dtype
        )
        q_shape, v_shape = (
            (values.shape[0], self.num_heads, dim) for dim in (self.head_dim, self.linear_dim)
        )
        arguments = attention_arguments(like, q_shape, v_shape, x.parsed("x"), options)
        return x.unwrap(hstu_node(self, values, end, arguments, in_place))

    def _updated(self, rows: Rows, a: Tensor) -> Any:
        """The rows' container with updated values, from their attention."""
        return rows.jagged.unwrap(leaving(self._output(rows, a), rows.end))

    def _output(self, rows: Rows, a: Tensor) -> Tensor:
        x, u = rows.values, rows.u
        if rows.by_kernels:
            return gated_output(self, x, u, a)
        dtype = torch.promote_types(x.dtype, torch.float32)
        u, a = nnf.silu(u.to(dtype)), a.to(dtype)
        y = u * self.output_norm(a)
        return x + self.out_proj(self.dropout(torch.cat([u, a, y], dim=1)).to(x.dtype))
