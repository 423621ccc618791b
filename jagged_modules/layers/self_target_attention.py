"""JaggedSelfTargetAttention: a history attends to itself, and targets attend to it, in one
launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ..bias import RelativeBias
from ..containers.candidates import CandidateIndex
from ..containers.history_cache import HistoryCache
from ..containers.jagged import C, wrap_rows
from ..dropout import check_dropout
from ..functional.attention import attend
from ..functional.attention_arguments import check_mask
from ..functional.attention_bias import check_layer_bias
from ..functional.attention_call import AttentionOptions
from ..functional.tail import entering, leaving
from ..functional.target_attention import attend_users_and_candidates
from ..functional.target_levels import attend_to_levels
from ..masks import AttentionMask, field_of_later_rows
from ..scalars import check_size
from ..tracing import through_call
from ..validation import resolve_head_dim
from .cached_projections import CachesProjection, cached_operands
from .invariant import fixed_module
from .one_node import cast_linears, in_training, node_dtype
from .parameters import in_heads, name_keywords
from .self_target_node import self_target_node
from .targets import LevelIndices, T, Targets, parse_histories, parse_targets


@name_keywords
class JaggedSelfTargetAttention(CachesProjection):
    """Multi-head softmax attention of each event of a history to the whole history, and of targets
    to the same history.

    Both share the projection of keys and values. Each kernel runs once for events and targets, and
    reads keys and values in place. Targets see the whole history, whatever the mask hides from
    events, and do not see one another. As they are no rows of the history, a bias is not theirs.

    Args:
        embedding_dim, num_heads, target_dim, device, dtype: as in `JaggedTargetAttention`.
        mask: which events each event sees, without num_targets; the whole history if None.
        attention_dropout: dropout probability of the attention weights, below 1.

    Raises:
        TypeError, ValueError: a size is not a positive integer; num_heads does not divide
            embedding_dim; the head dim is above 256; mask is no AttentionMask, or has num_targets;
            attention_dropout is not in 0 to 1, or is 1.

    Example::

        attention = jm.JaggedSelfTargetAttention(embedding_dim=32, num_heads=4)
        history = (torch.randn(5, 32), torch.tensor([0, 2, 5]))  # two users with 2 and 3 items
        candidates = jm.CandidateIndex.from_counts(torch.tensor([3, 1]))  # 3 and 1 candidates
        (values, offsets), out = attention(history, torch.randn(4, 1, 32), candidates)  # [4, 1, 32]
    """

    _shown = "embedding_dim", "num_heads", "target_dim", "mask"

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        target_dim: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        mask: AttentionMask | None = None,
        attention_dropout: float = 0,
    ) -> None:
        super().__init__(dtype)
        self.target_dim = embedding_dim if target_dim is None else target_dim
        self.embedding_dim, self.num_heads = embedding_dim, num_heads
        self.num_kv_heads = num_heads
        self.head_dim = resolve_head_dim(embedding_dim, num_heads)
        check_size("target_dim", self.target_dim)
        check_mask(mask)
        if mask is not None and mask.num_targets is not None:
            raise ValueError(
                f"mask.num_targets must be None: targets are no rows of the history; got {mask}"
            )
        check_dropout("attention_dropout", attention_dropout)
        self.mask, self.attention_dropout = mask, attention_dropout
        self.q_proj = nn.Linear(embedding_dim, embedding_dim, device=device, dtype=dtype)
        self.target_proj = nn.Linear(self.target_dim, embedding_dim, device=device, dtype=dtype)
        self.kv_proj = nn.Linear(embedding_dim, 2 * embedding_dim, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embedding_dim, embedding_dim, device=device, dtype=dtype)
        self.target_out_proj = nn.Linear(embedding_dim, embedding_dim, device=device, dtype=dtype)

    @through_call
    def append(
        self, events: C, cache: HistoryCache, bias: RelativeBias | None = None
    ) -> tuple[C | None, HistoryCache]:
        """Process the next events of cached histories. The keys and values of the earlier events do
        not change.

        Args:
            events: any container of `[N, E]` values; segment b has the next events of history b.
            cache: keys and values of the histories.
            bias: as in `forward` over the history and the events: its timestamps are those of all
                keys, a user's events behind the history; the query_timestamps those of the events.

        Returns:
            The events' rows of `forward` over the history and the events, in the events' kind of
            container; None if later events would change them: unless the mask is causal, without
            contextual_seqlen, recent_history, and max_attn_len with min_full_attn_seqlen. And the
            keys and values of the events. `cache.append` adds them to the cache.

        Raises:
            TypeError, ValueError: as `forward`; the cache has another number of segments or another
                shape.

        Example::

            attention = jm.JaggedSelfTargetAttention(32, 4, mask=jm.AttentionMask(causal=True))
            cache = attention.cache((torch.randn(5, 32), torch.tensor([0, 2, 5])))  # 2 and 3 events
            event = torch.randn(1, 32), torch.tensor([0, 0, 1])  # of user 1
            (values, _), new = attention.append(event, cache)
            cache = cache.append(new)  # 2 and 4 events
            # [3, 1, 32]
            out = attention.score(torch.randn(3, 1, 32), cache, torch.tensor([0, 1, 1]))
        """
        rows, new = self._appended(events, cache)
        if not self.append_reads_cache:
            return None, new
        (keys,), end = cache.append(new).layers, rows.end("events")
        if bias is not None:
            check_layer_bias(bias, self.num_heads, ("events", rows), ("cache and events", keys))
        k, v = keys.values.chunk(2, dim=2)
        q_proj, out_proj = cast_linears(rows.values, self.q_proj, self.out_proj)
        q = q_proj(entering(rows.values, end))
        q = in_heads("q_proj", q, self.num_heads, self.head_dim)
        segments = rows.parsed("events"), keys.parsed("cache")
        out = attend(q, k, v, *segments, self._options(self.mask, bias))
        return rows.unwrap(leaving(out_proj(out.flatten(1)), end)), new

    @through_call
    def score(
        self,
        targets: T,
        cache: HistoryCache | Sequence[HistoryCache],
        candidates: CandidateIndex | Tensor | LevelIndices | None = None,
    ) -> T:
        """Attend from the targets to cached histories: the targets' result of `forward`.

        Args:
            targets, candidates: as in `forward`.
            cache: the result of `cache` for the histories, or of `PagedHistoryCache.select`. It is
                valid until the parameters change. Of several levels, a tuple of caches.

        Returns:
            The targets' kind of container with `[N, E]` values, or `[num_candidates, n_q, E]`.

        Raises:
            TypeError, ValueError: as `forward`; the cache does not fit the layer.
        """
        histories = parse_histories(
            "cache", cache, candidates, lambda _, x: self._layer_of(x, "targets", None)
        )
        linears = self.target_proj, self.target_out_proj
        given = parse_targets(
            targets, candidates, histories, linears[0], self.target_dim, may_be_equal=False
        )
        keys_and_values, pages = cached_operands(histories.values())
        target_proj, out_proj = cast_linears(given.rows, *linears)
        q = target_proj(entering(given.rows, given.end))
        q = in_heads("target_proj", q, self.num_heads, self.head_dim)
        options = self._options(None)._replace(pages=pages)
        out = attend_to_levels(q, keys_and_values, given.levels, options, True)[0]
        return given.unwrap(leaving(out_proj(out.flatten(-2)), given.end))

    @property
    def append_reads_cache(self) -> bool:
        """Whether `append` computes the events' rows: later events do not change them."""
        mask = self.mask
        return mask is not None and mask.causal and field_of_later_rows(mask) is None

    def _options(
        self, mask: AttentionMask | None, bias: RelativeBias | None = None
    ) -> AttentionOptions:
        dropout = in_training(self, self.attention_dropout)
        return AttentionOptions(mask=mask, bias=bias, dropout_p=dropout)

    @fixed_module
    def forward(
        self,
        history: C,
        targets: T,
        candidates: CandidateIndex | Tensor | LevelIndices | None = None,
        bias: RelativeBias | None = None,
    ) -> tuple[C, T]:
        """Attend from the history and from the targets to the history.

        Args:
            history: any container of `[L, E]` values in B segments, one per user. Of several
                levels, a tuple of containers, as in `JaggedTargetAttention`: the rows of each level
                attend to their own segment, the targets to all levels as one history.
            targets: any container of `[N, E_t]` values in B segments; with `candidates`, a dense
                tensor `[num_candidates, n_q, E_t]`, n_q query rows for each candidate.
            candidates: the user of each candidate: a `CandidateIndex`, which several layers may
                share, or `[num_candidates]` int32 or int64 in any order. Of several levels, a tuple
                of as many.
            bias: biases of the events' scores by relative position and time, on the values' device.
                With several levels, it must be None.

        Returns:
            The history's kind of container with `[L, E]` values, and the targets' kind of container
            with `[N, E]` values, or `[num_candidates, n_q, E]` as targets are. The result of a
            target whose history is empty is target_out_proj's bias.

        Raises:
            TypeError, ValueError: types, shapes, dtypes, devices or numbers of segments do not
                match, or bias is given with several levels; the message names the argument.
        """
        wrap = partial(wrap_rows, width=self.embedding_dim, projection=self.kv_proj)
        histories = parse_histories("history", history, candidates, wrap)
        given = parse_targets(
            targets, candidates, histories, self.target_proj, self.target_dim, may_be_equal=False
        )
        linears = self.q_proj, self.kv_proj, self.target_proj, self.out_proj, self.target_out_proj
        if bias is not None and given.of_levels:
            raise ValueError("bias must be None with several levels, got a RelativeBias")
        if not given.of_levels:
            users, dtype = histories["history"], None
            if bias is None:
                dtype = node_dtype(given.rows, linears, on_cpu=True)
            else:
                check_layer_bias(bias, self.num_heads, *[("history", users)] * 2)
            if dtype is not None:
                results = self_target_node(self, linears, given, users.values, dtype)
                return users.unwrap(results[0]), given.unwrap(results[1])
        q = self.target_proj(entering(given.rows, given.end))
        q = in_heads("target_proj", q, self.num_heads, self.head_dim)
        levels = list(zip(histories.values(), given.levels))
        operands = [self._projected(entering(x.values, level.end)) for x, level in levels]
        own, of_targets = self._attend(given, q, operands, self._options(self.mask, bias))
        of_users: Any = tuple(
            x.unwrap(leaving(self.out_proj(y.flatten(1)), level.end))
            for (x, level), y in zip(levels, own)
        )
        of_targets = leaving(self.target_out_proj(of_targets.flatten(-2)), given.end)
        return of_users if given.of_levels else of_users[0], given.unwrap(of_targets)

    def _attend(
        self,
        given: Targets,
        q: Tensor,
        operands: Sequence[Sequence[Tensor]],
        options: AttentionOptions,
    ) -> tuple[Sequence[Tensor], Tensor]:
        """The attention of each history to itself, with the options, and that of the targets' q to
        all histories. operands: q, k and v of each history. There is one launch for one history."""
        if len(operands) == 1:
            ((own, k, v),), (level,) = operands, given.levels
            of_users, of_targets = attend_users_and_candidates(
                (own, level.grouped(q)), k, v, level.keys, level.queries, options
            )
            return [of_users], level.ungrouped(of_targets)
        outs = [
            attend(own, k, v, level.keys, level.keys, options)
            for (own, k, v), level in zip(operands, given.levels)
        ]
        keys_and_values, options = [x[1:] for x in operands], self._options(None)
        return outs, attend_to_levels(q, keys_and_values, given.levels, options, True)[0]

    def _projected(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a history's rows, in heads."""
        own = in_heads("q_proj", self.q_proj(rows), self.num_heads, self.head_dim)
        return own, *self._project(rows)
