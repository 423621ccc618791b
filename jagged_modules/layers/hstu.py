"""HSTU: a layer with pointwise attention over events and targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.types import Device

from ..bias import RelativeBias
from ..containers.history_cache import HistoryCache
from ..containers.jagged import Jagged, check_same_segments, wrap_rows
from ..containers.pages import paged_operands, room_of
from ..functional import jagged_attention
from ..functional.layer_norm import layer_norm_rows
from ..masks import AttentionMask, check_num_targets
from ..scalars import check_flag, check_kind
from ..tracing import one_module
from ..validation import (
    MAX_HEAD_DIM,
    check_device,
    check_index_values,
    check_integers,
    check_layer_input,
    resolve_head_dim,
)
from .hstu_config import (
    HSTUConfig,
    check_appendable,
    check_lengths,
    check_row_timestamps,
    check_times,
    next_timestamps,
)
from .invariant import fixed_rows
from .parameters import check_columns, check_parameter_dtype, reset_all, xavier_linear
from .tail import end_of, entering, leaving

NORM_EPS = 1e-6
C = TypeVar("C")  # a container
BIAS_STD = 0.02  # initial standard deviation of the entries of both bias tables


class HSTULayer(nn.Module):
    """One layer of an HSTU (Zhai et al. 2024, arXiv:2402.17152), as implemented in Meta's
    generative-recommenders.

        [u | v | q | k] = LayerNorm(x) W + b        u = silu(u)
        a = attention of q, k and v with silu(q kᵀ / sqrt(head_dim)) / scaling_seqlen in place of
        softmax, under HSTU's mask y = u · LayerNorm(a), in fp32
        out = x + dropout([u | a | y]) W_o

    With config.relative_position or relative_time, a learned `RelativeBias` is added to q kᵀ /
    sqrt(head_dim): the tables `position_bias` `[2N - 1]` and `time_bias` `[K + 1]`, which all heads
    share. The boundaries of the buckets are a buffer, `time_boundaries`.

    The kernels read q, k and v in place from the packed projection.

    Args:
        embedding_dim: width E of the rows.
        num_heads: number H of attention heads.
        config: the other sizes, dropout and mask; `HSTUConfig()` if None.
        device: device of the parameters.
        dtype: dtype of the parameters; torch.get_default_dtype() if None.

    Raises:
        TypeError, ValueError: a size is not a positive integer; num_heads does not divide
            embedding_dim and head_dim or linear_dim is None; a head is wider than 256.

    Example::

        layer = jm.HSTULayer(32, num_heads=4, config=jm.HSTUConfig(scaling_seqlen=100))
        x = torch.randn(5, 32), torch.tensor([0, 2, 5])  # two users with 2 and 3 rows
        values, offsets = layer(x, num_targets=torch.tensor([1, 1]))  # the last of each is a target
    """

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
        super().__init__()
        check_parameter_dtype(dtype)
        config = HSTUConfig() if config is None else config
        check_kind("config", config, HSTUConfig, "an HSTUConfig")
        self.embedding_dim, self.num_heads, self.config = embedding_dim, num_heads, config
        self.head_dim = resolve_head_dim(
            "head_dim", config.head_dim, embedding_dim, num_heads, MAX_HEAD_DIM
        )
        self.linear_dim = resolve_head_dim(
            "linear_dim", config.linear_dim, embedding_dim, num_heads, MAX_HEAD_DIM
        )
        width = num_heads * self.linear_dim
        self.input_norm = _RowNorm(embedding_dim, eps=NORM_EPS, device=device, dtype=dtype)
        self.uvqk_proj = xavier_linear(
            embedding_dim, 2 * width + 2 * num_heads * self.head_dim, device=device, dtype=dtype
        )
        self.output_norm = _WideNorm(width, eps=NORM_EPS, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)
        self.out_proj = xavier_linear(
            3 * width, embedding_dim, bias=False, device=device, dtype=dtype
        )
        self._make_bias(device, dtype)

    def _make_bias(self, device: Device, dtype: torch.dtype | None) -> None:
        n, k = self.config.relative_position, self.config.relative_time
        self.register_parameter(
            "position_bias",
            nn.Parameter(torch.empty(2 * n - 1, device=device, dtype=dtype)) if n else None,
        )
        self.register_parameter(
            "time_bias", nn.Parameter(torch.empty(k + 1, device=device, dtype=dtype)) if k else None
        )
        # Persistent, so that a layer built on the meta device is complete after `to_empty` and
        # `load_state_dict`.
        self.register_buffer(
            "time_boundaries", torch.empty(k, dtype=torch.int64, device=device) if k else None
        )
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
        reset_all(self.children())
        self._reset_bias()

    @one_module
    def forward(
        self,
        x: Any,
        num_targets: Tensor | None = None,
        *,
        timestamps: Tensor | None = None,
        query_timestamps: Tensor | None = None,
        cache: Jagged | None = None,
        cache_timestamps: Tensor | None = None,
        cache_rows: Tensor | slice | None = None,
        update: bool = True,
        append: bool = False,
    ) -> Any:
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
            cache: keys and values `[M, H, head_dim + linear_dim]` of B histories, which this layer
                returned for cache_rows. All rows of x are then targets of these histories;
                num_targets, if given, must equal the segments' lengths.
            append: with cache, the rows of x are the next events of these histories instead of
                targets. See `HSTUStack.append`.
            cache_timestamps: int64 `[M]`, the timestamps of cache's rows. Needed with
                config.relative_time.
            cache_rows: a slice, or `[n]` int32 or int64 indices, of rows of x whose keys and values
                are returned too.
            update: if False, the rows are not updated and None is returned in place of the
                container. The last layer needs no update when histories are cached.

        Returns:
            x's kind of container, with `[L, E]` values. With cache_rows, a pair: the container, and
            keys and values
            `[n, H, head_dim + linear_dim]`.

        Raises:
            TypeError, ValueError: types, shapes, dtypes, devices or numbers of segments do not
                match; scaling_seqlen is None and the container has no max_seqlen; a segment is
                longer than config.relative_position and its length is on the host; timestamps are
                missing, or given without config.relative_time.
        """
        check_flag("update", update)
        self._check_append(append, cache, num_targets)
        jagged = wrap_rows("x", x, self.embedding_dim, self.uvqk_proj)
        mask = self._mask(jagged, num_targets, cache, append)
        check_num_targets(
            "num_targets", num_targets, jagged.offsets, jagged.values.device, "the layer's"
        )
        check_lengths("x", self.config, jagged.offsets)
        check_times("x", jagged, self.config, timestamps, query_timestamps)
        if cache is not None:
            self.check_cache("x", jagged, cache)
            check_layer_input("cache's values", paged_operands(cache)[0], self.uvqk_proj)
            check_row_timestamps("cache_timestamps", cache_timestamps, "cache", cache, self.config)
        elif cache_timestamps is not None:
            raise ValueError(
                "cache_timestamps must be None without cache, got a"
                f" {type(cache_timestamps).__name__}"
            )
        if isinstance(cache_rows, Tensor):
            check_integers("cache_rows", cache_rows)
            check_device("cache_rows", cache_rows, jagged.device, "the layer's")
            check_index_values("cache_rows", cache_rows, jagged.num_rows, "{}, the rows of x")
        elif cache_rows is not None:
            check_kind("cache_rows", cache_rows, slice, "a torch.Tensor or a slice")
        end = end_of("x", jagged)
        values = entering(jagged.values, end)
        u, q, k, v = self._project(values)
        out = None
        if update:
            if cache is None:
                bias = self._bias(timestamps, query_timestamps)
                a = self._attend(q, k, v, jagged, jagged, mask, self._scaling_seqlen(jagged), bias)
            else:
                if timestamps is not None and query_timestamps is None:
                    query_timestamps = next_timestamps(timestamps, jagged.offsets)
                if append and (self.config.max_attn_len or room_of(cache)):
                    a = self._attend_to_joined(
                        q, k, v, jagged, cache, timestamps, query_timestamps, cache_timestamps
                    )
                else:
                    biases = (
                        self._bias(cache_timestamps, query_timestamps, jagged),
                        self._bias(timestamps, query_timestamps),
                    )
                    a = self._attend_with_cache(q, k, v, jagged, cache, mask, *biases)
            out = jagged.unwrap(leaving(self._output(values, u, a), end))
            if jagged.is_clean:
                out.is_clean = True
        if cache_rows is None:
            return out
        if end is not None and isinstance(cache_rows, slice):
            return out, leaving(torch.cat([k, v], dim=2), end)[cache_rows]
        return out, torch.cat([k[cache_rows], v[cache_rows]], dim=2)

    if TYPE_CHECKING:  # nn.Module declares that calls return Any

        @overload
        def __call__(
            self,
            x: C,
            num_targets: Tensor | None = None,
            *,
            timestamps: Tensor | None = None,
            query_timestamps: Tensor | None = None,
            cache: Jagged | None = None,
            cache_timestamps: Tensor | None = None,
            cache_rows: None = None,
            append: bool = False,
        ) -> C: ...

        @overload
        def __call__(
            self,
            x: C,
            num_targets: Tensor | None = None,
            *,
            timestamps: Tensor | None = None,
            query_timestamps: Tensor | None = None,
            cache: Jagged | None = None,
            cache_timestamps: Tensor | None = None,
            cache_rows: Tensor | slice,
            update: Literal[True] = True,
            append: bool = False,
        ) -> tuple[C, Tensor]: ...

        @overload
        def __call__(
            self,
            x: C,
            num_targets: Tensor | None = None,
            *,
            timestamps: Tensor | None = None,
            query_timestamps: Tensor | None = None,
            cache: Jagged | None = None,
            cache_timestamps: Tensor | None = None,
            cache_rows: Tensor | slice,
            update: bool,
            append: bool = False,
        ) -> tuple[C | None, Tensor]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def check_cache(self, name: str, x: Jagged, cache: Jagged) -> None:
        """TypeError or ValueError unless the cache has the shape of this layer's keys and values,
        and one segment per segment of x.

        Errors call x `name`.
        """
        check_kind("cache", cache, Jagged, "a Jagged of keys and values")
        check_same_segments(name, x, "cache", cache)
        (values, _), shape = (
            paged_operands(cache),
            [self.num_heads, self.head_dim + self.linear_dim],
        )
        if list(values.shape[1:]) != shape:
            raise ValueError(
                f"cache's values must have shape [L, {shape[0]}, {shape[1]}], got"
                f" {[cache.num_rows, *values.shape[1:]]}"
            )
        check_lengths(f"{name} and cache", self.config, x.offsets, cache.offsets)

    def _check_append(self, append: bool, cache: Jagged | None, num_targets: Tensor | None) -> None:
        check_flag("append", append)
        if not append:
            return
        check_appendable(self.config)
        if cache is None:
            raise ValueError("cache must be given with append, got None")
        if num_targets is not None:
            raise ValueError(
                f"num_targets must be None with append, got {type(num_targets).__name__}"
            )

    def _bias(
        self,
        timestamps: Tensor | None,
        query_timestamps: Tensor | None,
        after: Jagged | None = None,
    ) -> RelativeBias | None:
        """The layer's bias of scores of keys with these timestamps, None without tables. after: the
        queries, if they follow the keys."""
        if self.position_bias is None and self.time_bias is None:
            return None
        shift = None if after is None else after.offsets.diff().to(after.device, non_blocking=True)
        return RelativeBias(
            self.position_bias,
            self.time_bias,
            timestamps,
            self.time_boundaries,
            query_timestamps,
            shift,
        )

    def _scaling_seqlen(self, jagged: Jagged) -> int:
        length = (
            jagged.max_seqlen if self.config.scaling_seqlen is None else self.config.scaling_seqlen
        )
        if length is None:
            raise ValueError(
                "config.scaling_seqlen must be given if the container has no max_seqlen, got None"
            )
        return max(1, length)

    @fixed_rows
    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u `[L, H · Dv]` before its SiLU, q and k `[L, H, D]`, v `[L, H, Dv]`."""
        heads = self.num_heads
        widths = [
            heads * size
            for size in (self.linear_dim, self.linear_dim, self.head_dim, self.head_dim)
        ]
        packed = self.uvqk_proj(self.input_norm(x))
        check_columns("uvqk_proj", packed, sum(widths))
        u, v, q, k = packed.split(widths, dim=1)
        return (
            u,
            q.unflatten(1, (heads, -1)),
            k.unflatten(1, (heads, -1)),
            v.unflatten(1, (heads, -1)),
        )

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Jagged,
        keys: Jagged,
        mask: AttentionMask | None,
        scaling_seqlen: int,
        bias: RelativeBias | None,
        pages: Pages | None = None,
    ) -> Tensor:
        """Attention output `[rows of queries, H · Dv]`."""
        head_dim = max(self.head_dim, self.linear_dim)
        schedule = keys.schedule(
            num_heads=self.num_heads, head_dim=head_dim, dtype=q.dtype, queries=queries, mask=mask
        )
        return jagged_attention(
            q,
            k,
            v,
            queries.offsets,
            keys.offsets,
            activation="silu",
            output_scale=1 / scaling_seqlen,
            mask=mask,
            bias=bias,
            schedule=schedule,
            pages=pages,
        ).flatten(1)

    def _mask(
        self, rows: Jagged, num_targets: Tensor | None, cache: Jagged | None, append: bool
    ) -> AttentionMask:
        """Which of these rows a row sees. With a cache, they are new events or, without append,
        targets."""
        if cache is None:
            return self.config.mask(num_targets)
        if append:
            return AttentionMask(causal=True)
        num_targets = rows.offsets.diff() if num_targets is None else num_targets
        return AttentionMask(
            num_targets=num_targets, target_group_size=self.config.target_group_size
        )

    def _attend_with_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Jagged,
        cache: Jagged,
        mask: AttentionMask,
        cache_bias: RelativeBias | None,
        bias: RelativeBias | None,
    ) -> Tensor:
        """Attention of rows to cached histories, plus to one another under the mask. SiLU has no
        normalisation, so the two add up."""
        scaling_seqlen = self._scaling_seqlen(cache)
        cached, pages = paged_operands(cache)
        cached_k, cached_v = torch.split_with_sizes(cached, [self.head_dim, self.linear_dim], dim=2)
        of_history = self._attend(
            q, cached_k, cached_v, rows, cache, None, scaling_seqlen, cache_bias, pages
        )
        return of_history + self._attend(q, k, v, rows, rows, mask, scaling_seqlen, bias)

    def _attend_to_joined(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        events: Jagged,
        cache: Jagged,
        timestamps: Tensor | None,
        query_timestamps: Tensor | None,
        cache_timestamps: Tensor | None,
    ) -> Tensor:
        """Attention of events to the cached rows and the events. It writes the events behind the
        cached rows, or copies both once."""
        added, room = events.with_values(torch.cat([k, v], dim=2)), room_of(cache)
        keys = _joined(cache, added) if room is None else room.write(added.values)
        if timestamps is not None:
            assert cache_timestamps is not None
            timestamps = _joined(
                cache.with_values(cache_timestamps), events.with_values(timestamps)
            ).values
        kv, pages = paged_operands(keys)
        k, v = torch.split_with_sizes(kv, [self.head_dim, self.linear_dim], dim=2)
        bias = self._bias(timestamps, query_timestamps)
        return self._attend(
            q, k, v, events, keys, self.config.mask(), self._scaling_seqlen(events), bias, pages
        )

    @fixed_rows
    def _output(self, x: Tensor, u: Tensor, a: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        u, a = nnf.silu(u.to(dtype)), a.to(dtype)
        y = u * self.output_norm(a)
        return x + self.out_proj(self.dropout(torch.cat([u, a, y], dim=1)).to(x.dtype))

    def extra_repr(self) -> str:
        return (
            f"embedding_dim={self.embedding_dim}, num_heads={self.num_heads}, config={self.config}"
        )


def _joined(rows: Jagged, added: Jagged) -> Jagged:
    """Each segment's rows, then those that are added. Copies both."""
    return HistoryCache((rows,)).append(HistoryCache((added,))).layers[0]


class _RowNorm(nn.LayerNorm):
    """A LayerNorm that sums the gradients of its weight and bias in fp32 or fp64 on the CPU too."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm_rows(input, self.weight, self.bias, self.eps)


class _WideNorm(nn.LayerNorm):
    """A LayerNorm in the dtype of its input, which may be wider than that of its weight and
    bias."""

    def forward(self, input: Tensor) -> Tensor:
        return nnf.layer_norm(
            input,
            self.normalized_shape,
            self.weight.to(input.dtype),
            self.bias.to(input.dtype),
            self.eps,
        )
