"""Which weights of attention dropout keeps, one by one: the formula of `jagged_modules.dropout`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASK = 2**32 - 1


class Dropout(NamedTuple):
    """p, seed: arguments of the function. starts, places: of each row of the output, where its
    segment starts, and its place in it."""

    p: float
    seed: Tensor
    starts: Tensor
    places: Tensor

    @classmethod
    def of(cls, p: float, seed: Tensor | None, segments: list[Tensor], rows: int) -> Dropout | None:
        """segments: the rows of each segment of queries."""
        if seed is None or round(p * 2**16) == 0:
            return None
        device = segments[0].device if segments else seed.device
        starts, places = torch.zeros((2, rows), dtype=torch.int64, device=device)
        for segment in segments:
            if len(segment):
                starts[segment], places[segment] = segment[0], segment - segment[0]
        return cls(p, seed.to(device), starts, places)

    def factors(self, rows: Tensor, num_keys: int, heads: int, kv_heads: int) -> Tensor:
        """0 or 1 / (1 - p) for rows `[segments, length]` of the output:
        `[segments · key heads, group · length, keys]`."""
        device = self.seed.device
        i, start = (x[rows][:, None, None, :, None] for x in (self.places, self.starts))
        head = torch.arange(heads, device=device).view(kv_heads, -1, 1, 1)
        numbers = dropout_numbers(self.seed, head, start, i, torch.arange(num_keys, device=device))
        threshold = min(round(self.p * 2**16), 2**16 - 1)
        kept = (numbers >= threshold).flatten(2, 3).flatten(0, 1)
        return kept.double() * (2**16 / (2**16 - threshold))


def dropout_numbers(seed: Tensor, head: Tensor, start: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The 16-bit numbers of weights, by broadcasting."""
    low, high, key = start + (i & ~8), (j & ~8) ^ (seed >> 32), seed ^ head
    low, high, key = (x & MASK for x in torch.broadcast_tensors(low, high, key))
    for _ in range(7):
        product = low * 0xD256D193
        low, high = (product >> 32) & MASK ^ key ^ high, product & MASK
        key = (key + 0x9E3779B9) & MASK
    words = torch.where((i & 8) != 0, high, low)
    return torch.where((j & 8) != 0, words >> 16, words & 0xFFFF)
