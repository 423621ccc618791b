"""JaggedPFFN: a feed-forward network with weights that are made of each user's features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ..containers.jagged import C, Jagged, wrap_rows
from ..scalars import check_shape, check_size
from ..segments import RowSegments
from ..tracing import one_module
from ..validation import check_layer_tensor
from .gdpa import GDPAConfig
from .gdpa_block import GDPABlock
from .linear_compress import LinearCompressEmbedding
from .norms import RMSNorm
from .parameters import Layer, name_keywords


@name_keywords
class JaggedPFFN(Layer):
    """A personalised feed-forward network: each user's rows take weights that are made of this
    user's features.

        [k | v] = W_kv W RMSNorm(features)                  num_weights rows for each user
        x + W_o · activation(scale · (W_q RMSNorm(x)) kᵀ) v

    This is the PFFN of InterFormer, f(features) x, as Kunlun (arXiv:2602.10016) and GDPA compute
    it: k and v are the weights of the two linear layers, so it is attention of the rows to a few
    keys of their user. W is that of InterFormer's weights X_sum W. InterFormer's f(features) x is
    linear in x: activation="identity" without qk_norm, of the normed rows.

    Args:
        embedding_dim: width E of the rows and of the features; a multiple of num_heads.
        num_heads: heads, each a feed-forward network of embedding_dim / num_heads columns.
        num_features: number F of features of each user.
        num_weights: hidden width of the networks.
        activation: any of `functional.jagged_attention`.
        config: as in `JaggedGDPA`, without learned rows. qk_norm if None.
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.

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
        super().__init__(dtype)
        check_size("num_features", num_features)
        check_size("num_weights", num_weights)
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
        wrapped = wrap_rows("x", x, attention.embedding_dim, attention.out_proj)
        check_features(features, wrapped, self.num_features, self.norm)
        rows = wrapped.with_values(wrapped.values)  # offsets on the device
        weights = equal_segments(self.compress(self.norm(features)), rows.offsets)
        return wrapped.unwrap(self.block(rows, weights).values)


def check_features(features: Any, rows: Jagged, count: int, projection: nn.Module) -> None:
    """Raise unless features are `[B, count, E]` of the users of these rows."""
    check_layer_tensor("features", features, "[B, F, E]", projection)
    expected = rows.num_segments, count, rows.values.shape[1]
    check_shape("features", features, "[B, F, E]", *expected)


def equal_segments(x: Tensor, like: Tensor) -> Jagged:
    """x `[B, N, E]` as B segments of N rows, with offsets of `like`'s dtype and device."""
    count, rows = x.shape[:2]
    segments = RowSegments.equal(rows, count, like)
    return Jagged(x.flatten(0, 1), segments.offsets, rows, host_lengths=segments.host_lengths)
