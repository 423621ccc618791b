"""JaggedPFFN and JaggedInterFormer: users' histories and their other features update one another
(InterFormer, Zeng et al. 2024, arXiv:2411.09852)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.types import Device

from ..activations import ACTIVATIONS
from ..containers.jagged import Jagged, check_same_segments, wrap_rows
from ..functional.rows import jagged_concat, jagged_split, jagged_to_padded
from ..masks import AttentionMask
from ..scalars import check_choice, check_kind, check_number, check_size
from ..tracing import call_of, one_module
from ..validation import check_dense, check_layer_input
from .gdpa import JaggedGDPA
from .gdpa_block import GDPABlock
from .gdpa_config import GDPAConfig
from .linear_compress import LinearCompressEmbedding
from .norms import RMSNorm
from .parameters import check_parameter_dtype, reset_all

C = TypeVar("C")  # a container


class JaggedPFFN(nn.Module):
    """A personalised feed-forward network: each user's rows take weights that are made of this
    user's features.

        [k | v] = W_kv RMSNorm(W features)                  num_weights rows for each user
        x + W_o · activation(scale · (W_q RMSNorm(x)) kᵀ) v

    This is the PFFN of InterFormer, f(features) x, as Kunlun (arXiv:2602.10016) and GDPA compute
    it: k and v are the weights of the two linear layers, so it is attention of the rows to a few
    keys of their user. W is InterFormer's X_sum W. With activation="identity" it is linear in x.

    Args:
        embedding_dim: width E of the rows and of the features; a multiple of num_heads.
        num_heads: heads, each a feed-forward network of embedding_dim / num_heads columns.
        num_features: number F of features of each user.
        num_weights: hidden width of the networks.
        activation: any of `functional.jagged_attention`.
        config: as in `JaggedGDPA`, without learned rows. qk_norm if None.
        device: device of the parameters.
        dtype: dtype of the parameters; torch.get_default_dtype() if None.

    Raises:
        TypeError, ValueError: as `JaggedGDPA` and `LinearCompressEmbedding`; config has learned
            rows.

    Example::

        pffn = jm.JaggedPFFN(32, num_heads=4, num_features=6, num_weights=16)
        history = torch.randn(5, 32), torch.tensor([0, 2, 5])  # two users with 2 and 3 events
        values, offsets = pffn(history, torch.randn(2, 6, 32))
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_features: int,
        num_weights: int,
        activation: str = "gelu_tanh",
        config: GDPAConfig | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = dict(device=device, dtype=dtype)
        config = GDPAConfig(qk_norm=True) if config is None else config
        self.block = GDPABlock(embedding_dim, num_heads, activation, None, config, **where)
        if self.block.attention.config.num_weights:
            raise ValueError(
                "config.num_weights must be 0: weights are made of features, got"
                f" {config.num_weights}"
            )
        self.num_features = num_features
        self.compress = LinearCompressEmbedding(num_features, num_weights, **where)
        self.norm = RMSNorm(embedding_dim, **where)

    def reset_parameters(self) -> None:
        """Initialise all parameters, for instance after `to_empty` of a layer built on the meta
        device."""
        reset_all(self.children())

    @one_module
    def forward(self, x: C, features: Tensor) -> C:
        """Update all rows.

        Args:
            x: any container of `[L, E]` values in B segments, one per user.
            features: `[B, F, E]`, those of each user.

        Returns:
            x's kind of container, with `[L, E]` values.

        Raises:
            TypeError, ValueError: as `JaggedGDPA.forward`; features have another shape.
        """
        attention = self.block.attention
        rows = wrap_rows("x", x, attention.embedding_dim, attention.out_proj)
        check_features(features, rows, self.num_features, self.norm)
        weights = self.norm(self.compress(features))
        return rows.unwrap(self.block(_own(rows), equal_segments(weights)).values)

    if TYPE_CHECKING:

        @call_of(forward)
        def __call__(self) -> Any: ...


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
        for name in ("num_cls", "num_pma", "rank"):
            check_size(name, getattr(self, name))
        check_size("num_recent", self.num_recent, at_least=0)
        for name in ("num_weights", "window", "interaction_dim"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        check_choice("activation", self.activation, ACTIVATIONS)
        check_number("dropout", self.dropout, 0, 1)


class JaggedInterFormer(nn.Module):
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
        embedding_dim: width E of the rows and of the features; a multiple of num_heads.
        num_heads: attention heads.
        num_features: number F of features of each user.
        num_layers: number of layers.
        config: the other options; `InterFormerConfig()` if None.
        device: device of the parameters.
        dtype: dtype of the parameters; torch.get_default_dtype() if None.

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
        super().__init__()
        check_parameter_dtype(dtype)
        check_size("num_layers", num_layers)
        config = InterFormerConfig() if config is None else config
        check_kind("config", config, InterFormerConfig, "an InterFormerConfig")
        self.embedding_dim, self.num_features, self.config = embedding_dim, num_features, config
        sizes = embedding_dim, num_heads, num_features, config
        self.layers = nn.ModuleList(
            InterFormerLayer(*sizes, device=device, dtype=dtype) for _ in range(num_layers)
        )

    def reset_parameters(self) -> None:
        """Initialise all parameters, for instance after `to_empty` of layers built on the meta
        device."""
        reset_all(self.children())

    @one_module
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
        first: Any = self.layers[0]
        rows = wrap_rows("history", history, self.embedding_dim, first.summary.attention.out_proj)
        check_features(features, rows, self.num_features, first.summary.attention.out_proj)
        summary = first.summarise(features)
        tokens = equal_segments(summary)
        values = rows.values.to(summary.dtype)
        joined = jagged_concat([tokens.values, values], [tokens.offsets, rows.offsets])
        state = Jagged(*joined)
        for layer in self.layers:
            state, features, summary = layer(state, features, summary)
        _, (values, _) = jagged_split(state.values, state.offsets, self.config.num_cls)
        return rows.unwrap(values), features

    if TYPE_CHECKING:

        @call_of(forward)
        def __call__(self) -> Any: ...
