"""LinearCompressEmbedding: fewer embeddings for each candidate, each a learned mixture of the candidate's and its user's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .checks import check_size, check_tensor
from .functional import linear_compress
from .jagged import is_keyed_tensor

torch.fx.wrap("linear_compress")


class LinearCompressEmbedding(nn.Module):
    """Compresses K embeddings per candidate to M: out[b] = W_cand @ E_cand[b] + W_user @ E_user[user_of[b]], without bias.

    What candidates share is multiplied once per user (vendor, ...) and added where a candidate asks for it; it is never replicated.

    Args:
        num_candidate_embeddings: embeddings K of each candidate.
        num_compressed: embeddings M that come out.
        num_user_embeddings: embeddings of each user; or of each row of several shared levels, coarsest first. 0: none are shared.
        device: device of the parameters.

    The weights `[M, K_l]` are `weights[l]`, coarsest level first, the candidates' last. They are contiguous whatever K_l is: fused
    optimizers refuse parameters with gaps between their rows, or update them wrongly.

    Raises:
        TypeError, ValueError: sizes that are no positive integers.

    Example::

        compress = jm.LinearCompressEmbedding(num_candidate_embeddings=3, num_compressed=4, num_user_embeddings=6)
        candidates = jm.CandidateIndex.from_counts(torch.tensor([3, 0, 2]))                       # of 3 users
        out = compress(torch.randn(5, 3, 16), torch.randn(3, 6, 16), candidates)                  # [5, 4, 16]
    """

    def __init__(
        self, num_candidate_embeddings: int, num_compressed: int, num_user_embeddings: int | Sequence[int] = 0, device=None
    ) -> None:
        super().__init__()
        check_size("num_candidate_embeddings", num_candidate_embeddings)
        check_size("num_compressed", num_compressed)
        if isinstance(num_user_embeddings, (list, tuple)):
            shared = list(num_user_embeddings)
            for level, size in enumerate(shared):
                check_size(f"num_user_embeddings[{level}]", size)
        else:
            check_size("num_user_embeddings", num_user_embeddings, at_least=0)
            shared = [num_user_embeddings] if num_user_embeddings else []
        self.num_embeddings, self.num_compressed = [*shared, num_candidate_embeddings], num_compressed
        self.weights = nn.ParameterList(torch.empty(num_compressed, size, device=device) for size in self.num_embeddings)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights as nn.Linear does with the embeddings of all levels as its inputs."""
        bound = 1 / math.sqrt(sum(self.num_embeddings))
        for weight in self.weights:
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, candidate_embeddings, user_embeddings=None, candidates=None) -> Tensor:
        """Compress.

        Args:
            candidate_embeddings: `[B, K, N]`, or a TorchRec KeyedTensor of K features of width N, which is not copied.
            user_embeddings: the same of the shared level, `[U, K_user, N]`; a sequence of them, coarsest first, where there are several.
            candidates: the row of user_embeddings that each candidate takes: a `CandidateIndex` or `[B]` int32 or int64 in any order; a
                sequence of them for several levels.

        Returns:
            `[B, M, N]`, in the dtype of the weights.

        Raises:
            TypeError, ValueError: inputs that do not fit together; the message names them.
        """
        shared = _levels(user_embeddings)
        levels, indices = len(self.num_embeddings) - 1, _levels(candidates)
        for name, given in (("user_embeddings", shared), ("candidates", indices)):
            if len(given) != levels:
                raise ValueError(f"{name} must be one per shared level, {levels}, got {len(given)}")
        names = ["user_embeddings" if levels == 1 else f"user_embeddings[{level}]" for level in range(levels)]
        given = zip([*names, "candidate_embeddings"], [*shared, candidate_embeddings], self.num_embeddings)
        return linear_compress(list(self.weights), [_dense(*level) for level in given], indices)

    def extra_repr(self) -> str:
        *shared, candidate = self.num_embeddings
        return f"num_candidate_embeddings={candidate}, num_compressed={self.num_compressed}, num_user_embeddings={shared}"


def _levels(x) -> list:
    return [] if x is None else list(x) if isinstance(x, (list, tuple)) else [x]


@torch.fx.wrap
def _dense(name: str, x, num_embeddings: int) -> Tensor:
    """`[B, K, N]` of x, or a view of the values `[B, K · N]` if it is a KeyedTensor."""
    if is_keyed_tensor(x):
        widths = x.length_per_key()
        if len(set(widths)) != 1:
            raise ValueError(f"{name} must have features of one width, got {widths}")
        x = x.values().unflatten(1, (len(widths), widths[0]))
    check_tensor(name, x, 3, "[B, K, N]")
    if x.shape[1] != num_embeddings:
        raise ValueError(f"{name} must have shape [B, K, N] with K = {num_embeddings}, got {list(x.shape)}")
    return x
