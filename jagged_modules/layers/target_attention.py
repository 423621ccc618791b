"""JaggedTargetAttention: targets attend to a variable-length history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor, nn
from torch.types import Device

from ..containers.candidates import CandidateIndex
from ..containers.history_cache import HistoryCache
from ..containers.jagged import wrap_rows
from ..dropout import check_dropout
from ..functional.attention_call import AttentionOptions
from ..functional.tail import entering, leaving
from ..functional.target_levels import LEVELS, attend_to_levels
from ..scalars import check_choice, check_number, check_size
from ..tracing import through_call
from ..validation import resolve_head_dim
from .cached_projections import CachesProjection, cached_operands
from .from_torch import checked_attention, like, load_attention, place
from .invariant import fixed_module
from .one_node import cast_linears, in_training, node_dtype
from .parameters import in_heads, name_keywords
from .target_node import target_node
from .targets import LevelIndices, T, Targets, parse_histories, parse_targets

if TYPE_CHECKING:
    from typing_extensions import Self

Projection = Callable[[Tensor], Tensor]


@name_keywords
class JaggedTargetAttention(CachesProjection):
    """Multi-head softmax attention of targets (queries) to each user's history (keys and values).

    The history is projected once per user. All of the user's candidates read it in place: neither
    the forward nor the backward makes a copy per candidate.

    Args:
        embedding_dim: width E of the history and of the output; a multiple of num_heads.
        num_heads: attention heads.
        target_dim: width E_t of the targets; embedding_dim if None.
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.
        dropout: dropout probability, applied to the attention's result before the output
            projection.
        attention_dropout: dropout probability of the attention weights, below 1, as of
            nn.MultiheadAttention.
        levels: of targets that have histories in several levels, "joint": one softmax over all of
            them; or "each": one result for each level.

    Raises:
        TypeError, ValueError: a size is not a positive integer; num_heads does not divide
            embedding_dim; the head dim is above 256; dropout or attention_dropout is not in 0 to
            1, or attention_dropout is 1; the dtype is not a floating-point one; levels is unknown.

    Example::

        attention = jm.JaggedTargetAttention(embedding_dim=32, num_heads=4)
        history = (torch.randn(5, 32), torch.tensor([0, 2, 5]))  # two users with 2 and 3 items
        candidates = jm.CandidateIndex.from_counts(torch.tensor([3, 1]))  # 3 and 1 candidates
        out = attention(torch.randn(4, 1, 32), history, candidates)  # [4, 1, 32]
    """

    _shown = "embedding_dim", "num_heads", "target_dim"

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        target_dim: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        dropout: float = 0,  # an int, because torch.compile makes a symbol of a float
        attention_dropout: float = 0,
        levels: str = "joint",
    ) -> None:
        super().__init__(dtype)
        self.target_dim = embedding_dim if target_dim is None else target_dim
        self.embedding_dim, self.num_heads = embedding_dim, num_heads
        self.num_kv_heads = num_heads
        self.head_dim = resolve_head_dim(embedding_dim, num_heads)
        check_size("target_dim", self.target_dim)
        check_number("dropout", dropout, 0, 1)
        check_dropout("attention_dropout", attention_dropout)
        self.attention_dropout = attention_dropout
        check_choice("levels", levels, LEVELS)
        self.levels = levels
        self.q_proj = nn.Linear(self.target_dim, embedding_dim, device=device, dtype=dtype)
        self.kv_proj = nn.Linear(embedding_dim, 2 * embedding_dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(embedding_dim, embedding_dim, device=device, dtype=dtype)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> Self:
        """A layer with the weights of an nn.MultiheadAttention, in its mode, on its device. In eval
        mode its results are those of the module, whose keys and values are the history. The
        module's dropout is `attention_dropout`: in training, it draws other random numbers. The
        layer is frozen if the module is.

        Args:
            module: whose keys and values have its embed_dim. A bias that it does not have is one of
                0 here.

        Raises:
            TypeError, ValueError: another kind of module, or options that this layer does not have.
        """
        given = checked_attention(module)
        where, dropout = place(module), given.dropout
        layer = cls(given.embed_dim, given.num_heads, attention_dropout=dropout, **where)
        load_attention(layer, module)
        return like(layer, module)

    @through_call
    def score(
        self,
        targets: T,
        cache: HistoryCache | Sequence[HistoryCache],
        candidates: CandidateIndex | Tensor | LevelIndices | None = None,
    ) -> T:
        """Attend from the targets to cached histories: `forward(targets, history, candidates)`
        without projecting the histories.

        Args:
            targets, candidates: as in `forward`.
            cache: the result of `cache` for the histories, or of `PagedHistoryCache.select`. It is
                valid until the parameters change. Of several levels, a tuple of caches.

        Returns:
            As `forward`.

        Raises:
            TypeError, ValueError: as `forward`; the cache does not fit the layer.

        Example::

            attention = jm.JaggedTargetAttention(embedding_dim=32, num_heads=4)
            cache = attention.cache((torch.randn(5, 32), torch.tensor([0, 2, 5])))  # 2 and 3 events
            # [4, 1, 32]
            out = attention.score(torch.randn(4, 1, 32), cache, torch.tensor([0, 0, 0, 1]))
        """
        histories = parse_histories(
            "cache", cache, candidates, lambda _, x: self._layer_of(x, "targets", None)
        )
        given = parse_targets(targets, candidates, histories, self.q_proj, self.target_dim)
        keys_and_values, pages = cached_operands(histories.values())
        q_proj, out_proj = cast_linears(given.rows, self.q_proj, self.out_proj)
        return self._attend(given, keys_and_values, q_proj, out_proj, pages)

    append_reads_cache = False  # for PagedHistoryCache

    @fixed_module
    def forward(
        self,
        targets: T,
        history: Any,
        candidates: CandidateIndex | Tensor | LevelIndices | None = None,
    ) -> T:
        """Attend from the targets to the history of their user.

        Args:
            targets: one of: a dense tensor `[B, T, E_t]`, T targets for each of B users; any
                container of `[N, E_t]` values in B segments; with `candidates`, a dense tensor
                `[num_candidates, n_q, E_t]`, n_q query rows for each candidate.
            history: any container of `[L, E]` values in B segments, one per user. Of several
                levels, a tuple of containers, for example of users' and of vendors' histories.
            candidates: the user of each candidate: a `CandidateIndex`, which several layers may
                share, or `[num_candidates]` int32 or int64 in any order. Of several levels, a tuple
                of as many: each candidate's user, and its vendor.

        Returns:
            `[B, T, E]`, the targets' kind of container with `[N, E]` values, or
            `[num_candidates, n_q, E]`, as targets are. The dtype is that of the projections. The
            result of a target whose history is empty is out_proj's bias. With levels="each" and
            several levels, a tuple of their results.

        Raises:
            TypeError, ValueError: types, shapes, dtypes, devices or numbers of segments do not
                match; the message names the argument.
        """
        linears = q_proj, kv_proj, out_proj = self.q_proj, self.kv_proj, self.out_proj
        wrap = partial(wrap_rows, width=self.embedding_dim, projection=kv_proj)
        histories = parse_histories("history", history, candidates, wrap)
        given = parse_targets(targets, candidates, histories, q_proj, self.target_dim)
        if not given.of_levels:
            dtype = node_dtype(given.rows, linears, self.dropout, on_cpu=True)
            if dtype is not None:
                values = histories["history"].values
                return given.unwrap(target_node(self, linears, given, values, dtype))
        rows = [entering(x.values, level.end) for x, level in zip(histories.values(), given.levels)]
        keys_and_values = [self._project(x) for x in rows]
        return self._attend(given, keys_and_values, q_proj, out_proj)

    def _attend(
        self,
        given: Targets,
        keys_and_values: Sequence[Sequence[Tensor]],
        q_proj: Projection,
        out_proj: Projection,
        pages: Pages | None = None,
    ) -> Any:
        """Attend from the targets to the keys and values of each level."""
        q = q_proj(entering(given.rows, given.end))
        q = in_heads("q_proj", q, self.num_heads, self.head_dim)
        dropout = in_training(self, self.attention_dropout)
        options = AttentionOptions(pages=pages, dropout_p=dropout)
        jointly = self.levels == "joint"
        outs = attend_to_levels(q, keys_and_values, given.levels, options, jointly)
        results = [out_proj(self.dropout(x.flatten(-2))) for x in outs]
        results = [given.unwrap(leaving(x, given.end)) for x in results]
        return tuple(results) if given.of_levels and not jointly else results[0]
