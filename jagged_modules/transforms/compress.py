"""Sums W_user @ A[map] + W_cand @ B, found in a captured graph: `linear_compress` computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .analysis import Analysis
from .calls import is_tensor, positional
from .lineage import Lineage, shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Compression:
    """A sum of the products of two weights with the embeddings of users and of candidates.

    Attributes:
        node: the sum.
        user_weight, user_embeddings: `[M, K_user]` and A[map] `[C, K_user, N]`.
        weight, embeddings: `[M, K]` and `[C, K, N]`.
        products: both of them, which it replaces.
        lineage: of A[map].
    """

    node: fx.Node
    user_weight: fx.Node
    user_embeddings: fx.Node
    weight: fx.Node
    embeddings: fx.Node
    products: tuple[fx.Node, fx.Node]
    lineage: Lineage
    name = "linear_compress"

    @property
    def inputs(self) -> list[fx.Node]:
        return [self.user_weight, self.user_embeddings, self.weight, self.embeddings]

    @property
    def operands(self) -> list[fx.Node]:
        """The operands whose bases are read."""
        return [self.user_embeddings]

    @property
    def reads(self) -> set[tuple[fx.Node, fx.Node]]:
        """As of `TargetAttention`: none, because the product with the users' embeddings has a
        lineage itself."""
        return set()


def find_compressions(graph: fx.Graph, analysis: Analysis) -> dict[fx.Node, Compression]:
    """All such sums, by their node."""
    found = {}
    for node in graph.nodes:
        if node.target is not aten.add.Tensor or node.kwargs or node in analysis.lineages:
            continue
        first, second, *_ = positional(node)
        for own, shared in ((first, second), (second, first)):
            lineage = analysis.lineages.get(shared)
            if lineage is None or own in analysis.lineages:
                continue
            if not _is_product(own) or not _is_product(shared):
                continue
            values = [x.meta["val"] for x in (node, own, shared)]
            # the sum does not broadcast
            if len({x.dtype for x in values}) == len({shape_of(x) for x in values}) == 1:
                embeddings = analysis.lineages.get(shared.args[1])
                if (
                    embeddings is not None
                    and embeddings.dim == 0
                    and not embeddings.is_folded
                    and not embeddings.is_uniform
                ):
                    found[node] = Compression(
                        node, shared.args[0], shared.args[1], own.args[0], own.args[1],
                        (own, shared), embeddings,
                    )  # fmt: skip
                    break
    return found


def _is_product(x: Any) -> bool:
    """Whether x is weight @ embeddings, and not used otherwise."""
    if not isinstance(x, fx.Node) or x.target is not aten.matmul.default or len(x.users) != 1:
        return False
    return [is_tensor(operand) and operand.meta["val"].dim() for operand in positional(x)] == [2, 3]
