"""What InterFormer and Kunlun share: layers of users' rows and features, and what combines a user's
vectors: a gate of each, and inner products of all."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from ..containers.jagged import Jagged, wrap_rows
from .linear_compress import LinearCompressEmbedding
from .norms import RMSNorm
from .parameters import Layer
from .pffn import check_features


class UserLayers(Layer):
    """Layers in which users' rows and features update one another, one after the other."""

    _shown = ("config",)

    def __init__(
        self, embedding_dim: int, num_features: int, config: Any, layers: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        self.embedding_dim, self.num_features, self.config = embedding_dim, num_features, config
        self.layers = nn.ModuleList(layers)

    def _parse(self, history: Any, features: Any, projection: nn.Module) -> tuple[Jagged, Jagged]:
        """The history as wrapped, which `unwrap`s the result, and as a Jagged with offsets on the
        device, which layers pass on. Raises as `JaggedPFFN.forward`."""
        wrapped = wrap_rows("history", history, self.embedding_dim, projection)
        check_features(features, wrapped, self.num_features, projection)
        return wrapped, wrapped.with_values(wrapped.values)


class SelfGate(Layer):
    """silu(x · MLP(x)) of each vector: InterFormer's gate. It begins near silu(x): of a product
    with an MLP of torch's initial weights, which is small, the norms behind it would have large
    gradients."""

    def __init__(self, embedding_dim: int, **where: Any) -> None:
        super().__init__()
        self.linear1, self.linear2 = (
            nn.Linear(embedding_dim, embedding_dim, **where) for _ in range(2)
        )
        # on the instance, as `xavier_linear`
        vars(self.linear2)["reset_parameters"] = functools.partial(_reset_open, self.linear2)
        self.linear2.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return nnf.silu(x * self.linear2(nnf.silu(self.linear1(x))))


def _reset_open(linear: nn.Linear) -> None:
    nn.Linear.reset_parameters(linear)
    nn.init.ones_(linear.bias)


class FeatureInteraction(Layer):
    """RMSNorm(MLP(X (W X)ᵀ) + W' X): M embeddings from the inner products of N, compressed to
    `rank` columns, and from a linear compression, as in a layer of Wukong (arXiv:2403.02545)."""

    def __init__(
        self,
        embedding_dim: int,
        num_embeddings: int,
        num_outputs: int,
        hidden: int | None,
        rank: int,
        **where: Any,
    ) -> None:
        super().__init__()
        self.sizes, products = [rank, num_outputs], num_embeddings * rank
        hidden = 2 * embedding_dim if hidden is None else hidden
        self.compress = LinearCompressEmbedding(num_embeddings, sum(self.sizes), **where)
        self.products_norm = nn.LayerNorm(products, **where)
        self.linear1 = nn.Linear(products, hidden, **where)
        self.linear2 = nn.Linear(hidden, num_outputs * embedding_dim, **where)
        self.norm = RMSNorm(embedding_dim, **where)

    def forward(self, x: Tensor) -> Tensor:
        columns, shortcut = torch.split_with_sizes(self.compress(x), self.sizes, 1)
        products = self.products_norm((x @ columns.mT).flatten(1))
        out = self.linear2(nnf.silu(self.linear1(products)))
        return self.norm(torch.unflatten(out, 1, (self.sizes[1], -1)) + shortcut)
