"""LinearCompressEmbedding: a learned linear map from the embeddings of a candidate and its user to
fewer embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ..containers.conversions import is_keyed_tensor, wait_for
from ..functional.linear_compress import compress_levels
from ..scalars import check_equal, check_kind, check_size, is_sequence, possessive
from ..tracing import one_module
from .parameters import Layer

torch.fx.wrap("compress_levels")


class LinearCompressEmbedding(Layer):
    """Linear compression of K candidate and K_user user embeddings to M, without bias.

        out[b] = W_cand @ E_cand[b] + W_user @ E_user[user_of[b]]

    The user's part is computed once per user (or vendor, ...) and added to the part of each
    candidate. User embeddings are not replicated.

    Args:
        num_candidate_embeddings: number K of embeddings of each candidate.
        num_compressed: number M of output embeddings.
        num_user_embeddings: number of embeddings of each user. For several shared levels (for
            example users and vendors), a sequence of one number per level, coarsest first. 0: no
            shared embeddings.
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.
        candidate_features: the names of the K features in the order of the weights' columns.
            Required if candidate_embeddings is a
            KeyedTensor: the order of its keys may depend on the sharding plan and is ignored.
        user_features: the same for user_embeddings. For several shared levels, a sequence of one
            entry per level, None for a level whose embeddings are a tensor.

    `weights[l]` is the weight `[M, K_l]` of level l, coarsest level first, the candidates last.
    Weights are contiguous for every K_l: fused optimizers reject parameters with gaps between their
    rows, or update them wrongly.

    Raises:
        TypeError, ValueError: a size is not a positive integer; feature names are not distinct, or
            not one per embedding.

    Example::

        compress = jm.LinearCompressEmbedding(
            num_candidate_embeddings=3, num_compressed=4, num_user_embeddings=6
        )
        candidates = jm.CandidateIndex.from_counts(torch.tensor([3, 0, 2]))  # of 3 users
        out = compress(torch.randn(5, 3, 16), torch.randn(3, 6, 16), candidates)  # [5, 4, 16]
    """

    def __init__(
        self,
        num_candidate_embeddings: int,
        num_compressed: int,
        num_user_embeddings: int | Sequence[int] = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        candidate_features: Sequence[str] | None = None,
        user_features: Sequence[str] | Sequence[Sequence[str] | None] | None = None,
    ) -> None:
        super().__init__(dtype)
        check_size("num_candidate_embeddings", num_candidate_embeddings)
        check_size("num_compressed", num_compressed)
        if isinstance(num_user_embeddings, str):
            raise TypeError("num_user_embeddings must be an int or a sequence of ints, got str")
        if isinstance(num_user_embeddings, Sequence):
            shared = list(num_user_embeddings)
            for level, size in enumerate(shared):
                check_size(f"num_user_embeddings[{level}]", size)
        else:
            check_size("num_user_embeddings", num_user_embeddings, at_least=0)
            shared = [num_user_embeddings] if num_user_embeddings else []
        self.num_embeddings = [*shared, num_candidate_embeddings]
        self.num_compressed = num_compressed
        features: Sequence[Sequence[object] | None] = [user_features]
        if user_features is None:
            features = [None] * len(shared)
        elif isinstance(num_user_embeddings, Sequence):
            expected = "a sequence of one entry per shared level"
            check_kind("user_features", user_features, (list, tuple), expected)
            features = user_features
        if len(features) != len(shared):
            raise ValueError(
                f"user_features must have one entry per shared level, {len(shared)}, got {features}"
            )
        names = [*_names("user_features", len(shared)), "candidate_features"]
        self.features = [
            *map(_checked_features, names, [*features, candidate_features], self.num_embeddings)
        ]
        self.weights = _Weights(
            torch.empty(num_compressed, size, device=device, dtype=dtype)
            for size in self.num_embeddings
        )
        self.reset_parameters()

    @one_module
    def forward(
        self, candidate_embeddings: Any, user_embeddings: Any = None, candidates: Any = None
    ) -> Tensor:
        """Compress the embeddings of B candidates.

        Args:
            candidate_embeddings: `[B, K, N]`, or a TorchRec KeyedTensor of the K
                candidate_features, each of width N. A KeyedTensor is copied only if its features
                are in another order. A LazyAwaitable of either is waited for.
            user_embeddings: `[U, K_user, N]` or a KeyedTensor, as above; for several shared levels,
                a sequence of them, coarsest first.
            candidates: the row of user_embeddings of each candidate: a `CandidateIndex`, or `[B]`
                int32 or int64 in any order. For several shared levels, a sequence of them.

        Returns:
            `[B, M, N]`, in the dtype of the weights.

        Raises:
            TypeError, ValueError: types, shapes, dtypes, devices, levels or feature names do not
                match; the message names the argument.
        """
        shared, indices = _levels(user_embeddings), _levels(candidates)
        levels = len(self.num_embeddings) - 1
        for name, given in (("user_embeddings", shared), ("candidates", indices)):
            check_equal(name, "have one entry per shared level", levels, len(given))
        names = [*_names("user_embeddings", levels), "candidate_embeddings"]
        tensors = [
            _dense(*level) for level in zip(names, [*shared, candidate_embeddings], self.features)
        ]
        weights = [f"weights[{level}]" for level in range(len(names))]
        of_levels = weights, names, _names("candidates", levels), ["the layer"] * len(names)
        return compress_levels(list(self.weights), tensors, indices, of_levels)

    def extra_repr(self) -> str:
        *shared, candidate = self.num_embeddings
        return (
            f"num_candidate_embeddings={candidate}, num_compressed={self.num_compressed},"
            f" num_user_embeddings={shared}"
        )


class _Weights(nn.ParameterList):
    """The weights of all levels, initialised as an nn.Linear whose inputs are the embeddings of all
    levels. DistributedModelParallel resets the module that owns parameters."""

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(sum(weight.shape[1] for weight in self))
        for weight in self:
            nn.init.uniform_(weight, -bound, bound)


def _levels(x: Any) -> list[Any]:
    """The argument of each shared level."""
    return [] if x is None else list(x) if is_sequence(x) else [x]


def _names(argument: str, levels: int) -> list[str]:
    """The name of the argument for each shared level, as the caller knows it."""
    return [argument] if levels == 1 else [f"{argument}[{level}]" for level in range(levels)]


def _checked_features(
    name: str, features: Sequence[object] | None, size: int
) -> tuple[str, ...] | None:
    if features is None:
        return None
    if not isinstance(features, (list, tuple)) or not all(
        isinstance(feature, str) for feature in features
    ):
        raise TypeError(f"{name} must be a sequence of names, got {features!r}")
    if not len(features) == len(set(features)) == size:
        raise ValueError(f"{name} must be {size} different names, got {list(features)}")
    return tuple(map(str, features))


@torch.fx.wrap
def _dense(name: str, x: Any, features: tuple[str, ...] | None) -> Tensor:
    """x itself, or the values `[B, K · N]` of a KeyedTensor as `[B, K, N]`: a view if its features
    are in the order of `features`."""
    x = wait_for(x)
    if not is_keyed_tensor(x):
        return x
    if features is None:
        option = name.partition("_")[0] + "_features"
        raise ValueError(
            f"{name} must be a torch.Tensor if the layer has no {option}, got a KeyedTensor of"
            f" {x.keys()}: the order of its features depends on how its collection is sharded;"
            f" construct the layer with {option}=[...] in the order of the weights' columns"
        )
    if x.key_dim() != 1:
        raise ValueError(
            f"{name} must be a KeyedTensor with key_dim 1, one row per example, got key_dim"
            f" {x.key_dim()}"
        )
    keys, widths, values = tuple(x.keys()), x.length_per_key(), x.values()
    if len(set(widths)) != 1:
        raise ValueError(f"{name} must have features of one width, got {widths}")
    if values.dim() != 2 or values.shape[1] != sum(widths):
        raise ValueError(
            f"{possessive(name)} values must have shape [B, {sum(widths)}], that of its features,"
            f" got {list(values.shape)}"
        )
    if sorted(keys) != sorted(features):
        missing = [key for key in features if key not in keys]
        unexpected = [key for key in keys if key not in features]
        raise ValueError(
            f"{name} must have each of the layer's {len(features)} features once, got {len(keys)}:"
            f" missing {missing}, unexpected {unexpected}"
        )
    if keys != features:
        columns = dict(zip(keys, values.split(widths, dim=1)))
        values = torch.cat([columns[feature] for feature in features], dim=1)
    return torch.unflatten(values, 1, (len(widths), widths[0]))
