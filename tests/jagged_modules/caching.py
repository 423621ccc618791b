"""Layers with a cache, and histories that come in parts, for tests of PagedHistoryCache."""

import torch
from torch import nn

import jagged_modules as jm

from .hstu_cases import HEADS, WIDTH, config_of

HSTU_CONFIGS = {
    "plain": config_of(),
    "dims": config_of(head_dim=3, linear_dim=5),
    "short": config_of(max_attn_len=3),
    "groups": config_of(target_group_size=2),
    "position": config_of(relative_position=40),
    "short-position": config_of(max_attn_len=3, relative_position=40),
    "time": config_of(relative_time=6),
    "all": config_of(
        max_attn_len=4, relative_position=40, relative_time=6, target_group_size=2, linear_dim=3
    ),
}


class Rows(nn.Module):
    """Its keys and values are the rows themselves, so that a cache must return them bit by bit."""

    append_reads_cache, max_cached_rows = False, None

    def __init__(self, max_cached_rows: int | None = None):
        super().__init__()
        self.weight, self.max_cached_rows = nn.Parameter(torch.zeros(1)), max_cached_rows

    def cache(self, history) -> jm.HistoryCache:
        history = jm.Jagged.wrap(history)
        return jm.HistoryCache((history.with_values(history.values[:, None]),))

    def append(self, events, cache: jm.HistoryCache) -> tuple[None, jm.HistoryCache]:
        return None, self.cache(events)


def rows_of(kv: jm.HistoryCache) -> list[torch.Tensor]:
    """The rows of each user that `Rows` cached."""
    (layer,) = kv.layers
    return list(layer.values[:, 0].split(layer.offsets.diff().tolist()))


def jagged(parts: list[torch.Tensor]) -> jm.Jagged:
    lengths = torch.tensor([len(part) for part in parts])
    return jm.Jagged(torch.cat(parts), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))


class Timeline:
    """Users with random events, cut into parts, and targets after them."""

    def __init__(
        self,
        parts: list[list[int]],
        targets: list[int],
        dtype=torch.float64,
        width: int = WIDTH,
        device="cpu",
    ):
        """parts: for each part, the number of events of each user."""
        self.parts, self.targets = parts, targets
        self.lengths = [sum(x) + t for *x, t in zip(*parts, targets)]
        self.rows = [torch.randn(n, width, device=device).to(dtype) for n in self.lengths]
        self.times = [torch.randint(50, (n,), device=device).cumsum(0) for n in self.lengths]
        self.next_times = [torch.cat([x[1:], x[-1:] + 5]) for x in self.times]

    def part(self, number: int) -> list[slice]:
        """The rows of each user in a part; part -1 has the targets."""
        begins = [sum(x[:number]) if number >= 0 else sum(x) for x in zip(*self.parts)]
        counts = self.parts[number] if number >= 0 else self.targets
        return [slice(begin, begin + count) for begin, count in zip(begins, counts)]

    def take(self, x: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        return [rows[where] for rows, where in zip(x, self.part(number))]

    def times_of(self, number: int | None, timed: bool) -> dict[str, torch.Tensor]:
        """The timestamps of a part, or of all rows, as arguments."""
        if not timed:
            return {}
        columns = dict(timestamps=self.times, query_timestamps=self.next_times)
        return {
            name: torch.cat(x if number is None else self.take(x, number))
            for name, x in columns.items()
        }


def hstu(
    config: jm.HSTUConfig, num_layers: int = 3, dtype=torch.float64, device=None
) -> jm.HSTUStack:
    return jm.HSTUStack(WIDTH, HEADS, num_layers, config, device=device).to(dtype).eval()
