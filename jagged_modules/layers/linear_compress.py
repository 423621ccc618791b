"""LinearCompressEmbedding: fewer embeddings for each candidate, each a learned mixture of the candidate's and its user's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ..containers.jagged import is_keyed_tensor, wait_for
from ..functional import linear_compress
from ..scalars import check_size, is_sequence

torch.fx.wrap("linear_compress")


class LinearCompressEmbedding(nn.Module):
    """Compresses K embeddings per candidate to M: out[b] = W_cand @ E_cand[b] + W_user @ E_user[user_of[b]], without bias.

    What candidates share is multiplied once per user (vendor, ...) and added where a candidate asks for it; it is never replicated.

    Args:
        num_candidate_embeddings: embeddings K of each candidate.
        num_compressed: embeddings M that come out.
        num_user_embeddings: embeddings of each user; or of each row of several shared levels, coarsest first. 0: none are shared.
        device: device of the parameters.
        candidate_features: the names of the K features, in the order of the weights' columns, where candidate_embeddings are KeyedTensors.
            A KeyedTensor's own order does not matter then; that of a sharded collection depends on the sharding plan.
        user_features: the same of user_embeddings; for several shared levels a sequence of them, with None for a level of tensors.

    The weights `[M, K_l]` are `weights[l]`, coarsest level first, the candidates' last. They are contiguous whatever K_l is: fused
    optimizers refuse parameters with gaps between their rows, or update them wrongly.

    Raises:
        TypeError, ValueError: sizes that are not positive integers; feature names that are not one per embedding, or not distinct.

    Example::

        compress = jm.LinearCompressEmbedding(num_candidate_embeddings=3, num_compressed=4, num_user_embeddings=6)
        candidates = jm.CandidateIndex.from_counts(torch.tensor([3, 0, 2]))                       # of 3 users
        out = compress(torch.randn(5, 3, 16), torch.randn(3, 6, 16), candidates)                  # [5, 4, 16]
    """

    def __init__(
        self,
        num_candidate_embeddings: int,
        num_compressed: int,
        num_user_embeddings: int | Sequence[int] = 0,
        device: Device = None,
        *,
        candidate_features: Sequence[str] | None = None,
        user_features: Sequence[str] | Sequence[Sequence[str] | None] | None = None,
    ) -> None:
        super().__init__()
        check_size("num_candidate_embeddings", num_candidate_embeddings)
        check_size("num_compressed", num_compressed)
        several_levels = isinstance(num_user_embeddings, Sequence)
        if several_levels:
            shared = list(num_user_embeddings)
            for level, size in enumerate(shared):
                check_size(f"num_user_embeddings[{level}]", size)
        else:
            check_size("num_user_embeddings", num_user_embeddings, at_least=0)
            shared = [num_user_embeddings] if num_user_embeddings else []
        self.num_embeddings, self.num_compressed = [*shared, num_candidate_embeddings], num_compressed
        features: Sequence[Sequence[object] | None] = [user_features]
        if user_features is None:
            features = [None] * len(shared)
        elif several_levels:
            features = user_features
        if len(features) != len(shared):
            raise ValueError(f"user_features must have one entry per shared level, {len(shared)}, got {features}")
        names = [*_names("user_features", len(shared)), "candidate_features"]
        self.features = [*map(_checked_features, names, [*features, candidate_features], self.num_embeddings)]
        self.weights = _Weights(torch.empty(num_compressed, size, device=device) for size in self.num_embeddings)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights as nn.Linear does with the embeddings of all levels as its inputs."""
        self.weights.reset_parameters()

    def forward(self, candidate_embeddings: Any, user_embeddings: Any = None, candidates: Any = None) -> Tensor:
        """Compress.

        Args:
            candidate_embeddings: `[B, K, N]`, or a TorchRec KeyedTensor of the K candidate_features, each of width N. It is copied only
                if its features come in another order. A LazyAwaitable of either is waited for.
            user_embeddings: the same of the shared level, `[U, K_user, N]`; a sequence of them, coarsest first, where there are several.
            candidates: the row of user_embeddings that each candidate takes: a `CandidateIndex` or `[B]` int32 or int64 in any order; a
                sequence of them for several levels.

        Returns:
            `[B, M, N]`, in the dtype of the weights.

        Raises:
            TypeError, ValueError: inputs that do not fit together; the message names them.
        """
        shared, indices = _levels(user_embeddings), _levels(candidates)
        levels = len(self.num_embeddings) - 1
        for name, given in (("user_embeddings", shared), ("candidates", indices)):
            if len(given) != levels:
                raise ValueError(f"{name} must be one per shared level, {levels}, got {len(given)}")
        names = [*_names("user_embeddings", levels), "candidate_embeddings"]
        tensors = [_dense(*level) for level in zip(names, [*shared, candidate_embeddings], self.features)]
        names = dict(weights=["the layer"] * len(names), embeddings=names, indices=_names("candidates", levels))
        return linear_compress(list(self.weights), tensors, indices, names=names)

    def extra_repr(self) -> str:
        *shared, candidate = self.num_embeddings
        return f"num_candidate_embeddings={candidate}, num_compressed={self.num_compressed}, num_user_embeddings={shared}"


class _Weights(nn.ParameterList):
    """The weights of all levels. DistributedModelParallel resets the module that owns the parameters, which is this one."""

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(sum(weight.shape[1] for weight in self))
        for weight in self:
            nn.init.uniform_(weight, -bound, bound)


def _levels(x: Any) -> list[Any]:
    """The argument of each shared level."""
    return [] if x is None else list(x) if is_sequence(x) else [x]


def _names(argument: str, levels: int) -> list[str]:
    """The name of the argument for each shared level, as the caller writes it."""
    return [argument] if levels == 1 else [f"{argument}[{level}]" for level in range(levels)]


def _checked_features(name: str, features: Sequence[object] | None, size: int) -> tuple[str, ...] | None:
    if features is None:
        return None
    if not isinstance(features, (list, tuple)) or not all(isinstance(feature, str) for feature in features):
        raise TypeError(f"{name} must be a sequence of names, got {features!r}")
    if not len(features) == len(set(features)) == size:
        raise ValueError(f"{name} must be {size} different names, got {list(features)}")
    return tuple(map(str, features))


@torch.fx.wrap
def _dense(name: str, x: Any, features: tuple[str, ...] | None) -> Tensor:
    """x, or the values `[B, K · N]` of a KeyedTensor as `[B, K, N]`; a view if its features are in order."""
    x = wait_for(x)
    if not is_keyed_tensor(x):
        return x
    if features is None:
        option = name.partition("_")[0] + "_features"
        raise ValueError(
            f"{name} must be a torch.Tensor where the layer has no {option}, got a KeyedTensor of {x.keys()}: the order of its features "
            f"depends on how its collection is sharded; construct the layer with {option}=[...] in the order of the weights' columns"
        )
    keys, widths, values = tuple(x.keys()), x.length_per_key(), x.values()
    if len(set(widths)) != 1:
        raise ValueError(f"{name} must have features of one width, got {widths}")
    if keys != features:
        _check_same_features(name, keys, features)
        columns = dict(zip(keys, values.split(widths, dim=1)))
        values = torch.cat([columns[feature] for feature in features], dim=1)
    return torch.unflatten(values, 1, (len(widths), widths[0]))


def _check_same_features(name: str, keys: tuple[str, ...], features: tuple[str, ...]) -> None:
    if sorted(keys) != sorted(features):
        missing, unexpected = ([key for key in some if key not in others] for some, others in ((features, keys), (keys, features)))
        found = f"missing {missing}, unexpected {unexpected}"
        raise ValueError(f"{name} must have each of the layer's {len(features)} features once, got {len(keys)}: {found}")
