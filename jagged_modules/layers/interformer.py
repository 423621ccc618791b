"""JaggedInterFormer: users' histories and their other features update one another
(InterFormer, Zeng et al. 2024, arXiv:2411.09852)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.types import Device

from ..activations import ACTIVATIONS
from ..containers.jagged import C, Jagged
from ..functional.rows import jagged_concat, jagged_split, rows_or_zeros
from ..masks import AttentionMask
from ..scalars import check_choice, check_kind, check_number, check_size, check_sizes
from .feature_interaction import FeatureInteraction, SelfGate, UserLayers
from .gdpa import GDPAConfig, JaggedGDPA
from .gdpa_block import GDPABlock
from .invariant import fixed_module
from .linear_compress import LinearCompressEmbedding
from .parameters import Layer, check_parameter_dtype, name_keywords
from .pffn import JaggedPFFN, equal_segments


@dataclasses.dataclass(frozen=True)
class InterFormerConfig:
    """Options of `JaggedInterFormer`. The defaults of the numbers of tokens are the paper's.

    Args:
        num_cls: number of vectors that a user's features are summarised in. They personalise the
            feed-forward networks, and are the first rows (CLS tokens) of the history.
        num_pma: number of learned queries that pool the history.
        num_recent: number of the history's last events in its summary; 0 in place of those that a
            shorter one does not have.
        num_weights: hidden width of the feed-forward networks; embedding_dim if None.
        activation: of the feed-forward networks, as in `JaggedPFFN`. The paper's formula has
            "identity".
        window: each event sees this many events before and behind it, and the CLS tokens, which
            see all; None: all events.
        interaction_dim: hidden width of the network that combines the features; 2 · embedding_dim
            if None.
        rank: number of columns that inner products of features are compressed to.
        dropout: dropout probability of attention's results, before the output projections.

    Raises:
        TypeError, ValueError: a field has another type or is out of range.
    """

    num_cls: int = 4
    num_pma: int = 2
    num_recent: int = 2
    num_weights: int | None = None
    activation: str = "gelu_tanh"
    window: int | None = None
    interaction_dim: int | None = None
    rank: int = 8
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "num_cls", "num_pma", "rank")
        check_size("num_recent", self.num_recent, at_least=0)
        check_sizes(self, "num_weights", "window", "interaction_dim", optional=True)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_number("dropout", self.dropout, 0, 1)


@name_keywords
class JaggedInterFormer(UserLayers):
    """InterFormer: layers in which a user's history [L, E] and features X [F, E] update one
    another. Each reads a summary of the other.

        X_sum = gate(compress(X))                            cross arch
        S_sum = gate([CLS tokens | PMA(S) | recent events])
        X ← interaction([X | S_sum])                         interaction arch
        S ← MHA(PFFN(S, X_sum))                              sequence arch
        gate(x) = silu(x · MLP(x))

    Before the first layer, X_sum is put in front of each user's events: the CLS tokens. The
    interaction is inner products with an MLP, and a linear compression as the shortcut. PFFN and
    MHA have a norm and a residual each, as in Kunlun, which the paper's formulas leave out, and
    there are no rotary positions. The gate has the paper's activation, Swish.

    Features are those of users. Candidates attend to the result by `JaggedTargetAttention`, so that
    no user is computed once per candidate.

    Args:
        embedding_dim, num_heads, num_features, num_layers, device, dtype: as in `JaggedKunlun`.
        config: the other options; `InterFormerConfig()` if None.

    Raises:
        TypeError, ValueError: an argument has another type or is out of range; num_heads does not
            divide embedding_dim; the head dim is above 256.

    Example::

        interformer = jm.JaggedInterFormer(32, num_heads=4, num_features=6, num_layers=2)
        history = torch.randn(5, 32), torch.tensor([0, 2, 5])  # two users with 2 and 3 events
        (values, offsets), features = interformer(history, torch.randn(2, 6, 32))  # [2, 6, 32]
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_features: int,
        num_layers: int = 1,
        config: InterFormerConfig | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_parameter_dtype(dtype)
        check_size("embedding_dim", embedding_dim)
        check_size("num_features", num_features)
        check_size("num_layers", num_layers)
        config = InterFormerConfig() if config is None else config
        check_kind("config", config, InterFormerConfig, "an InterFormerConfig")
        sizes = embedding_dim, num_heads, num_features, config
        where: dict[str, Any] = dict(device=device, dtype=dtype)
        layers = (InterFormerLayer(*sizes, **where) for _ in range(num_layers))
        super().__init__(embedding_dim, num_features, config, layers)

    @fixed_module
    def forward(self, history: C, features: Tensor) -> tuple[C, Tensor]:
        """Update the histories and the features.

        Args:
            history: any container of `[L, E]` values in B segments, one per user.
            features: `[B, F, E]`, those of each user.

        Returns:
            The history's kind of container with `[L, E]` values, without the CLS tokens, and
            `[B, F, E]`.

        Raises:
            TypeError, ValueError: as `JaggedPFFN.forward`.
        """
        layers: Any = self.layers
        rows, state = self._parse(history, features, layers[0].pool.out_proj)
        for i, layer in enumerate(layers):
            state, features = layer(state, features, begins=i == 0)
        _, (values, _) = jagged_split(state.values, state.offsets, self.config.num_cls)
        return rows.unwrap(values), features


class InterFormerLayer(Layer):
    """A layer of `JaggedInterFormer`, whose arguments these are."""

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_features: int,
        config: InterFormerConfig,
        **where: Any,
    ) -> None:
        super().__init__()
        self.config, cls = config, config.num_cls
        self.compress = LinearCompressEmbedding(num_features, cls, **where)
        self.features_gate = SelfGate(embedding_dim, **where)
        gdpa = GDPAConfig(num_seeds=config.num_pma, dropout=config.dropout)
        self.pool = JaggedGDPA(embedding_dim, num_heads, "softmax", config=gdpa, **where)
        self.history_gate = SelfGate(embedding_dim, **where)
        num_vectors = num_features + cls + config.num_pma + config.num_recent
        self.interaction = FeatureInteraction(
            embedding_dim, num_vectors, num_features, config.interaction_dim, config.rank, **where
        )
        num_weights = embedding_dim if config.num_weights is None else config.num_weights
        gdpa = GDPAConfig(qk_norm=True, dropout=config.dropout)
        sizes = embedding_dim, num_heads, cls, num_weights, config.activation, gdpa
        self.pffn = JaggedPFFN(*sizes, **where)
        mask = None
        if config.window is not None:  # of the events alone
            mask = AttentionMask(
                max_attn_len=config.window, contextual_seqlen=cls, global_prefix=cls
            )
        self.attention = GDPABlock(
            embedding_dim, num_heads, "softmax", mask, GDPAConfig(dropout=config.dropout), **where
        )

    def forward(self, history: Jagged, features: Tensor, begins: bool) -> tuple[Jagged, Tensor]:
        """The new history, whose segments begin with the CLS tokens, and the new features `[B, F,
        E]`. begins: the history does not have the CLS tokens yet."""
        of_features = self.features_gate(self.compress(features))
        if begins:
            history = behind_tokens(of_features, history)
        of_history = self.history_gate(torch.cat(self._summaries(history), 1))
        features = self.interaction(torch.cat([features, of_history], 1))
        return self.attention(self.pffn(history, of_features)), features

    def _summaries(self, history: Jagged) -> list[Tensor]:
        """CLS tokens, PMA tokens and the most recent events, each `[B, ..., E]`."""
        config, values = self.config, history.values
        first, ends = history.offsets[:-1, None], history.offsets[1:, None]

        def tokens(index: Tensor, absent: Tensor | None) -> Tensor:
            absent = None if absent is None else absent.flatten()
            return torch.unflatten(rows_or_zeros(values, index.flatten(), absent), 0, index.shape)

        cls = first + torch.arange(config.num_cls, device=values.device)
        recent = ends - torch.arange(config.num_recent, 0, -1, device=values.device)
        of_last = tokens(recent, recent < first + config.num_cls)
        pooled: Any = self.pool(history)
        return [tokens(cls, None), pooled, of_last]


def behind_tokens(tokens: Tensor, rows: Jagged) -> Jagged:
    """Segments that begin with the tokens `[B, N, E]` of a user, before its rows."""
    first = equal_segments(tokens.to(rows.values.dtype), rows.offsets)
    lengths, longest = rows.host_lengths, None
    joined = jagged_concat([first.values, rows.values], [first.offsets, rows.offsets])
    if rows.max_seqlen is not None:
        longest = rows.max_seqlen + tokens.shape[1]
    return Jagged(
        *joined, longest, host_lengths=None if lengths is None else lengths + tokens.shape[1]
    )
