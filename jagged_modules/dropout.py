"""Dropout on the weights of attention: which of them are kept, by definition.

A weight has a number below 2^16, and is kept if this is at least 2^16 · p. The numbers of four
weights, of two query rows i and i + 8 and of two keys j and j + 8, are a call of Philox-2x32 with 7
rounds (Salmon et al. 2011):

    i, j      the query row and the key, counted from the start of their segment
    counter   (start + (i & ~8), (j & ~8) ^ seed >> 32), two words of 32 bits
    key       the lower word of seed ^ query head
    number    half (j >> 3) & 1, the lower one first, of word (i >> 3) & 1

start is the row of the output in which the segment of queries starts; 0 if batch-invariant. So a
number follows from the seed and the pair alone. A thread has such four weights of an MMA's result.
The kernels repeat this in `jagged_kernels/attention/dropout.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jagged_kernels.attention.params import AttentionParams
from torch import Tensor

from .scalars import check_kind, check_number
from .segments import check_device

NUMBERS = 2**16
_ROUNDS, _MULTIPLIER, _KEY_STEP, _WORD = 7, 0xD256D193, 0x9E3779B9, 2**32 - 1


class Dropout(NamedTuple):
    """p: a multiple of 2^-16, below 1. seed: int64 `[]`. local: segments start at row 0."""

    p: float
    seed: Tensor
    local: bool = False

    @classmethod
    def of(cls, params: AttentionParams) -> Dropout | None:
        if params.dropout_seed is None:
            return None
        return cls(params.dropout_p, params.dropout_seed, params.batch_invariant)

    @property
    def factor(self) -> float:
        """Of the weights that are kept."""
        return 1 / (1 - self.p)

    def dropped(self, start: Tensor, heads: Tensor, rows: slice, keys: slice) -> Tensor:
        """Which weights of these rows and keys of segments are dropped: booleans
        `[..., rows, keys]`, where start and heads have the shape `[...]` together."""
        i, j = (_groups_of_16(x, start.device) for x in (rows, keys))
        start = torch.zeros_like(start) if self.local else start
        counters = start[..., None, None] + i[:, None], j ^ (self.seed >> 32)
        words = _philox(*counters, (self.seed ^ heads)[..., None, None])
        halves = (half for word in words for half in (word & (NUMBERS - 1), word >> 16))
        dropped = torch.stack([half < round(self.p * NUMBERS) for half in halves], -1)
        # [..., i // 16, i & 7, j // 16, j & 7, i & 8, j & 8], then in the order of i and j
        for dim, sizes in ((-1, (2, 2)), (-3, (-1, 8)), (-5, (-1, 8))):
            dropped = torch.unflatten(dropped, dim, sizes)
        dropped = dropped.movedim(-2, -5).movedim(-1, -2).flatten(-3, -1).flatten(-4, -2)
        dropped = dropped.narrow(-2, rows.start % 16, rows.stop - rows.start)
        return dropped.narrow(-1, keys.start % 16, keys.stop - keys.start)


def parse_dropout(p: float, seed: Tensor | None, like: Tensor) -> tuple[float, Tensor | None]:
    """p as a multiple of 2^-16, and the seed, by default from torch's generator of the device of
    `like`: checkpoints restore it, and CUDA graphs replay it. None if nothing is dropped."""
    p = min(round(p * NUMBERS), NUMBERS - 1) / NUMBERS
    if not p:
        return 0.0, None
    if seed is None:
        return p, torch.randint(2**62, (), device=like.device)
    return p, seed.to(like.device, non_blocking=True)


def check_dropout(name: str, p: object) -> None:
    """TypeError or ValueError unless p is a probability below 1."""
    check_number(name, p, 0, 1)
    if p == 1:
        raise ValueError(f"{name} must be below 1, got {p}: no weight would be left")


def check_seed(seed: Tensor, device: torch.device) -> None:
    """TypeError or ValueError unless this is a seed, on q's device or the host."""
    check_kind("dropout_seed", seed, Tensor, "a torch.Tensor")
    if seed.dtype != torch.int64 or seed.dim():
        raise ValueError(
            f"dropout_seed must be int64 of shape [], got {seed.dtype} {list(seed.shape)}"
        )
    check_device("dropout_seed", seed, device, "q's")


def _groups_of_16(places: slice, device: torch.device) -> Tensor:
    """The places without bit 3 in the blocks of 16 that have these."""
    first, blocks = places.start // 16, -(-places.stop // 16) - places.start // 16
    starts = torch.arange(first, first + blocks, device=device) * 16
    return (starts[:, None] + torch.arange(8, device=device)).flatten()


def _philox(low: Tensor, high: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Two random words for each counter, as int64."""
    low, high, key = (x & _WORD for x in (low, high, key))
    for _ in range(_ROUNDS):
        product = low * _MULTIPLIER  # its 64 bits are right, though not its sign
        upper = (product >> 32).bitwise_and_(_WORD)
        low, high = upper ^ (high ^ key), product.bitwise_and_(_WORD)
        key = (key + _KEY_STEP) & _WORD
    return low, high
