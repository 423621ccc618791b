"""GDPABlock: JaggedGDPA between a norm and a residual."""

from __future__ import annotations

from typing import Any

import torch
from jagged_kernels.rows.configs import MAX_WIDTH
from torch import Tensor
from torch.types import Device

from ..bias import RelativeBias
from ..containers.jagged import C, wrap_rows
from ..functional.tail import entering, leaving
from ..masks import AttentionMask
from ..tracing import one_module
from .gdpa import GDPAConfig, JaggedGDPA
from .gdpa_node import gdpa_dtype, gdpa_node
from .norms import RMSNorm
from .parameters import Layer, name_keywords


@name_keywords
class GDPABlock(Layer):
    """A residual block: x + JaggedGDPA(RMSNorm(x), context).

    Args:
        embedding_dim, num_heads, activation, mask, device, dtype: as in `JaggedGDPA`.
        config: as in `JaggedGDPA`, but num_seeds must be 0: pooled rows have no residual.

    Raises:
        TypeError, ValueError: as `JaggedGDPA`; config.num_seeds is not 0.

    Example::

        encoder = torch.nn.Sequential(
            jm.GDPABlock(32, num_heads=4),  # self-attention,
            jm.GDPABlock(32, num_heads=4, config=jm.GDPAConfig(num_weights=64)),  # a feed-forward,
            # pooling by 2 queries
            jm.JaggedGDPA(32, num_heads=4, config=jm.GDPAConfig(num_seeds=2)),
        )
        encoder((torch.randn(5, 32), torch.tensor([0, 2, 5])))  # [2, 2, 32]
    """

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        activation: str = "gelu_tanh",
        mask: AttentionMask | None = None,
        config: GDPAConfig | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention = JaggedGDPA(
            embedding_dim, num_heads, activation, mask, config, device, dtype
        )
        if self.attention.config.num_seeds:
            raise ValueError(
                "num_seeds must be 0: pooled rows have no residual, got"
                f" {self.attention.config.num_seeds}"
            )
        self.norm = RMSNorm(embedding_dim, device=device, dtype=dtype)

    @one_module
    def forward(
        self,
        x: C,
        context: Any = None,
        num_targets: Tensor | None = None,
        bias: RelativeBias | None = None,
    ) -> C:
        """Update all rows.

        Args:
            x: any container of `[L, E]` values in B segments.
            context: as in `JaggedGDPA.forward`. The norm is not applied to it.
            num_targets, bias: as in `JaggedGDPA.forward`.

        Returns:
            x's kind of container, with `[L, E]` values.

        Raises:
            TypeError, ValueError: as `JaggedGDPA.forward`.
        """
        jagged = wrap_rows("x", x, self.attention.embedding_dim, self.attention.out_proj)
        attention, norm = self.attention, self.norm
        is_plain = type(attention) is JaggedGDPA and type(norm) is RMSNorm
        is_plain = is_plain and attention.embedding_dim <= MAX_WIDTH
        dtype = gdpa_dtype(attention, jagged.values, bias, attention, norm) if is_plain else None
        if dtype is not None:
            sides = attention._sides(jagged, context, num_targets, dtype)  # pyright: ignore[reportPrivateUsage]
            return jagged.unwrap(gdpa_node(attention, jagged.values, norm, dtype, sides))
        end = jagged.end("x")
        rows = entering(jagged.values, end)
        normed = jagged.with_values(norm(rows))
        normed.is_clean = end is not None or jagged.is_clean
        out = rows + attention(normed, context, num_targets, bias).values
        return jagged.unwrap(leaving(out, end))
