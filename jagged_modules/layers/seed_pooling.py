"""JaggedSeedPooling: pooling of each user's rows by seeds, in one level or two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ..containers.jagged import wrap_rows
from ..scalars import check_size
from .gdpa import GDPAConfig, JaggedGDPA
from .invariant import fixed_module
from .linear_compress import LinearCompressEmbedding
from .norms import RMSNorm
from .parameters import Layer, name_keywords
from .pffn import check_features
from .target_attention import JaggedTargetAttention


@name_keywords
class JaggedSeedPooling(Layer):
    """Pool each user's rows to a few tokens: pooling by multi-head attention (PMA), or, with
    num_tokens, Kunlun's hierarchical seed pooling (HSP).

        H = MHA(seeds, rows, rows)         num_seeds rows for each user: PMA
        Y = Σ_i Z_iᵀ H W_i, i < rank       num_tokens rows for each user: SumKronLinear

    Seeds are learned, the same for all users, and normed; or, with num_features, made of each
    user's features by a linear compression and a norm. No user's rows are copied.

    Args:
        embedding_dim: width E of the rows and of the tokens; a multiple of num_heads.
        num_heads: attention heads.
        num_seeds: number of seeds.
        num_tokens: number of tokens that the seeds are compressed to; None: the seeds' results are
            the tokens.
        num_features: number F of features of each user, of which the seeds are made; 0: learned
            seeds.
        rank: number of Kronecker products.
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.

    Raises:
        TypeError, ValueError: a size is not a positive integer; num_heads does not divide
            embedding_dim; the head dim is above 256.

    Example::

        pooling = jm.JaggedSeedPooling(32, num_heads=4, num_seeds=8, num_tokens=2)
        pooling((torch.randn(5, 32), torch.tensor([0, 2, 5])))  # [2, 2, 32]
    """

    _shown = "num_features", "rank"

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        num_seeds: int,
        num_tokens: int | None = None,
        num_features: int = 0,
        rank: int = 8,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        check_size("num_seeds", num_seeds)
        check_size("num_features", num_features, at_least=0)
        check_size("rank", rank)
        where: dict[str, Any] = dict(device=device, dtype=dtype)
        self.embedding_dim, self.num_features = embedding_dim, num_features
        self.attention: JaggedTargetAttention | JaggedGDPA
        if num_features:
            self.seeds = LinearCompressEmbedding(num_features, num_seeds, **where)
            self.norm = RMSNorm(embedding_dim, **where)
            self.attention = JaggedTargetAttention(embedding_dim, num_heads, **where)
        else:
            config = GDPAConfig(num_seeds=num_seeds, qk_norm=True)
            self.attention = JaggedGDPA(embedding_dim, num_heads, "softmax", config=config, **where)
        self.rank, self.compress = rank, None
        if num_tokens is not None:
            check_size("num_tokens", num_tokens)
            self.compress = LinearCompressEmbedding(num_seeds, num_tokens * rank, **where)
            self.mix = nn.Linear(rank * embedding_dim, embedding_dim, bias=False, **where)

    @fixed_module
    def forward(self, x: Any, features: Tensor | None = None) -> Tensor:
        """Pool the rows of each segment.

        Args:
            x: any container of `[L, E]` values in B segments, one per user.
            features: `[B, F, E]`, those of each user; None with learned seeds.

        Returns:
            `[B, num_tokens, E]`, or `[B, num_seeds, E]` without num_tokens.

        Raises:
            TypeError, ValueError: x has another type, shape, dtype or device; features do not match
                x or num_features.
        """
        attention: Any = self.attention
        projection = attention.out_proj
        wrapped = wrap_rows("x", x, self.embedding_dim, projection)
        rows = wrapped.with_values(wrapped.values)  # the result is dense for all containers
        if not self.num_features:
            if features is not None:
                raise ValueError("features must be None with learned seeds, got a tensor")
            pooled = attention(rows)
        else:
            check_features(features, rows, self.num_features, projection)
            pooled = attention(self.norm(self.seeds(features)), rows)
        if self.compress is None:
            return pooled
        # rows of Z are ordered by token, so that the products of a token are adjacent
        of_tokens = torch.unflatten(self.compress(pooled), 1, (-1, self.rank)).flatten(2)
        return self.mix(of_tokens)
