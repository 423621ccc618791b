"""JaggedKunlun: layers that alternate between a user's features and its events (Kunlun, Hou et al.
2026, arXiv:2602.10016)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.types import Device

from ..activations import ACTIVATIONS
from ..containers.jagged import C, Jagged
from ..masks import AttentionMask
from ..scalars import check_choice, check_flag, check_kind, check_number, check_size, check_sizes
from .feature_interaction import FeatureInteraction, UserLayers
from .gdpa import GDPAConfig
from .gdpa_block import GDPABlock
from .invariant import fixed_module
from .linear_compress import LinearCompressEmbedding
from .parameters import Layer, check_parameter_dtype, name_keywords
from .pffn import JaggedPFFN
from .seed_pooling import JaggedSeedPooling


@dataclasses.dataclass(frozen=True)
class KunlunConfig:
    """Options of `JaggedKunlun`.

    Args:
        num_summary: number of vectors that a user's features are summarised in.
        num_seeds, num_tokens, rank: of the history's summary, as in `JaggedSeedPooling`.
        num_weights: hidden width of the feed-forward networks; embedding_dim if None.
        activation: of the feed-forward networks, as in `JaggedPFFN`.
        max_seqlen: the temperature τ by which the feed-forward networks divide q kᵀ; Kunlun has the
            longest history's length. sqrt(head dim) if None.
        window: each event sees this many events before and behind it; None: all.
        skip: alternate, as Kunlun's CompSkip: even layers have the feed-forward network and a new
            summary, odd ones have self-attention and the last summary. If False, all have all.
        interaction_dim: hidden width of the network that combines the features; 2 · embedding_dim
            if None.
        interaction_rank: number of columns that inner products of features are compressed to.
        dropout: dropout probability of attention's results, before the output projections.

    Raises:
        TypeError, ValueError: a field has another type or is out of range.
    """

    num_summary: int = 4
    num_seeds: int = 32
    num_tokens: int = 8
    rank: int = 8
    num_weights: int | None = None
    activation: str = "gelu_tanh"
    max_seqlen: int | None = None
    window: int | None = 100
    skip: bool = True
    interaction_dim: int | None = None
    interaction_rank: int = 8
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "num_summary", "num_seeds", "num_tokens", "rank", "interaction_rank")
        optional = "num_weights", "max_seqlen", "window", "interaction_dim"
        check_sizes(self, *optional, optional=True)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_flag("skip", self.skip)
        check_number("dropout", self.dropout, 0, 1)


@name_keywords
class JaggedKunlun(UserLayers):
    """Kunlun: layers in which a user's history S [L, E] and features X [F, E] update one another.

        X_sum = MLP(compress(X))                     H_sum = HSP(S)
        X ← interaction([X_sum | H_sum])             interaction block
        S ← PFFN(S, X_sum)                           transformer block, even layers
        S ← S + attention in a window(norm(S))       transformer block, odd layers

    HSP is `JaggedSeedPooling`, PFFN is `JaggedPFFN`, and odd layers read the H_sum of the layer
    before: see `KunlunConfig.skip`. The norm is before the attention, where the paper has it behind
    the residual. The interaction is one expert of the paper's mixture. Features stay F in all
    layers. Rotary temporal embeddings are not part of it.

    Features are those of users. Candidates attend to the result by `JaggedTargetAttention`, so that
    no user is computed once per candidate. For event types with sizes of their own, use one
    `JaggedKunlun` for each.

    Args:
        embedding_dim: width E of the rows and of the features; a multiple of num_heads.
        num_heads: attention heads.
        num_features: number F of features of each user.
        num_layers: number of layers.
        config: the other options; `KunlunConfig()` if None.
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.

    Raises:
        TypeError, ValueError: an argument has another type or is out of range; num_heads does not
            divide embedding_dim; the head dim is above 256.

    Example::

        kunlun = jm.JaggedKunlun(32, num_heads=4, num_features=6, num_layers=2)
        history = torch.randn(5, 32), torch.tensor([0, 2, 5])  # two users with 2 and 3 events
        (values, offsets), features = kunlun(history, torch.randn(2, 6, 32))  # [2, 6, 32]
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_features: int,
        num_layers: int = 2,
        config: KunlunConfig | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_parameter_dtype(dtype)
        check_size("embedding_dim", embedding_dim)
        check_size("num_features", num_features)
        check_size("num_layers", num_layers)
        config = KunlunConfig() if config is None else config
        check_kind("config", config, KunlunConfig, "a KunlunConfig")
        sizes = embedding_dim, num_heads, num_features, config
        where: dict[str, Any] = dict(device=device, dtype=dtype)
        layers = (KunlunLayer(*sizes, i, **where) for i in range(num_layers))
        super().__init__(embedding_dim, num_features, config, layers)

    @fixed_module
    def forward(self, history: C, features: Tensor) -> tuple[C, Tensor]:
        """Update the histories and the features.

        Args:
            history: any container of `[L, E]` values in B segments, one per user.
            features: `[B, F, E]`, those of each user.

        Returns:
            The history's kind of container with `[L, E]` values, and `[B, F, E]`.

        Raises:
            TypeError, ValueError: as `JaggedPFFN.forward`.
        """
        layers: Any = self.layers
        rows, state = self._parse(history, features, layers[0].linear1)
        summary = None
        for layer in layers:
            state, features, summary = layer(state, features, summary)
        return rows.unwrap(state.values), features


class KunlunLayer(Layer):
    """Layer `index` of `JaggedKunlun`, whose arguments the others are."""

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_features: int,
        config: KunlunConfig,
        index: int,
        **where: Any,
    ) -> None:
        super().__init__()
        is_even, count = index % 2 == 0, config.num_summary
        self.compress = LinearCompressEmbedding(num_features, count, **where)
        self.linear1, self.linear2 = (
            nn.Linear(embedding_dim, embedding_dim, **where) for _ in range(2)
        )
        self.pool = self.pffn = self.attention = None
        if is_even or not config.skip:
            sizes = config.num_seeds, config.num_tokens, 0, config.rank
            self.pool = JaggedSeedPooling(embedding_dim, num_heads, *sizes, **where)
            scale = None if config.max_seqlen is None else 1 / config.max_seqlen
            gdpa = GDPAConfig(qk_norm=True, scale=scale, dropout=config.dropout)
            num_weights = embedding_dim if config.num_weights is None else config.num_weights
            networks = count, num_weights, config.activation, gdpa
            self.pffn = JaggedPFFN(embedding_dim, num_heads, *networks, **where)
        if not (is_even and config.skip):
            mask, gdpa = None, GDPAConfig(dropout=config.dropout)
            if config.window is not None:
                mask = AttentionMask(window=(config.window, config.window))
            self.attention = GDPABlock(embedding_dim, num_heads, "softmax", mask, gdpa, **where)
        vectors = count + config.num_tokens, num_features
        inner = config.interaction_dim, config.interaction_rank
        self.interaction = FeatureInteraction(embedding_dim, *vectors, *inner, **where)

    def forward(
        self, history: Jagged, features: Tensor, summary: Tensor | None
    ) -> tuple[Jagged, Tensor, Tensor | None]:
        """The new history, the new features `[B, F, E]`, and the history's summary, which is the
        given one in odd layers that skip."""
        of_features = self.linear2(nnf.silu(self.linear1(self.compress(features))))
        if self.pool is not None:
            summary = self.pool(history)
        vectors: Any = of_features, summary  # the first layer makes a summary
        features = self.interaction(torch.cat(vectors, 1))
        if self.pffn is not None:
            history = self.pffn(history, of_features)
        if self.attention is not None:
            history = self.attention(history)
        return history, features, summary
