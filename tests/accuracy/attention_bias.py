"""Bounds of attention with a RelativeBias: of the scores that it is added to, and of the gradients
of its tables.

    S = scale · q kᵀ + position[h, j - i + N - 1] + time[h, bucket(u_i - t_j)]
    dposition[h, d] = Σ dS,  dtime[h, b] = Σ dS    over all scores of head h that use the entry; of
                                                   all heads if they share it

dS is not rounded to the operands' dtype before these sums, which are in fp32, or in float64 for
float64 operands, in any order.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from jagged_modules.bias import RelativeBias, next_timestamps, position_index, time_buckets

from .bound import RMS_OF_ROUNDING, Bound, largest_of_sum, partial_sums


class SharedError(NamedTuple):
    """An error that all scores of a row share: it changes dS by `weights` `[..., rows, columns]`
    times an error `[..., rows, 1]`."""

    weights: Tensor
    error: Tensor
    rms: Tensor


class Tables:
    """The tables of a bias, and the sums of dS over the scores that use each entry."""

    def __init__(self, bias: RelativeBias, heads: int, operands: torch.dtype):
        self.bias, self.heads = bias.with_boundaries(), heads
        self.dtype = torch.promote_types(operands, torch.float32)
        self.given = {
            name: x
            for name, x in (("position", bias.position), ("time", bias.time))
            if x is not None
        }
        self.values = {
            name: x.detach().to(self.dtype).double().reshape(-1, x.shape[-1])
            for name, x in self.given.items()
        }
        self.sums = {name: _Sums.empty(x) for name, x in self.values.items()}

    def of_segments(self, group: Any) -> ScoreBias:
        """The bias of the scores of a `_Group`. It is that of the first query group."""
        rows, kv_rows = group.rows[:, : group.masked], group.kv_rows
        num_queries, num_keys = rows.shape[1], kv_rows.shape[1]
        shift = (
            torch.zeros(len(rows), dtype=torch.int64)
            if self.bias.query_shift is None
            else self.bias.query_shift[group.numbers]
        )
        j = torch.arange(num_keys, device=rows.device)
        i = [
            torch.arange(num_queries, device=rows.device) + num_keys - num_queries + x
            for x in shift.tolist()
        ]
        indices = {}
        if "position" in self.values:
            indices["position"] = torch.stack(
                [position_index(x, j, self.bias.max_seqlen) for x in i]
            )
        if "time" in self.values:
            t = self.bias.timestamps[kv_rows]
            asked = self.bias.query_timestamps
            u = (
                torch.stack([next_timestamps(x, y) for x, y in zip(i, t)])
                if asked is None
                else asked[rows]
            )
            indices["time"] = time_buckets(u, t, self.bias.boundaries)
        return ScoreBias(self, indices, group.rows.shape[1] - num_queries)

    def bounds(self, shares_errors: bool) -> dict[str, Bound]:
        """ "dposition" and "dtime" of the tables that require a gradient. shares_errors: errors of
        a row's dS are not independent, and so not those of a head's entries."""
        results = {}
        for name, table in self.given.items():
            if table.requires_grad:
                results[f"d{name}"] = self.sums[name].bound(table, self.dtype, shares_errors)
        return results


@dataclasses.dataclass
class ScoreBias:
    """The bias of the scores of segments of equal lengths. indices: table name → its entry for each
    score, `[segments, rows, columns]`. others: number of rows behind these, which have no bias."""

    tables: Tables
    indices: dict[str, Tensor]
    others: int

    def added_to(self, scores: Bound, head_dim: int) -> Bound:
        """scores `[segments · key heads, group · rows, columns]` with the bias.

        The kernels compute (position + time) · (1 / scale), and start the MMA from it or add it
        afterwards; an MMA cuts off up to a whole eps, half of one on average, once for 16 products.
        Then they multiply by the scale.
        """
        each = [self.tables.values[name][:, index] for name, index in self.indices.items()]
        shape = self.tables.heads, *each[0].shape[1:]
        bias, size, own = (
            pad(sum(f(x) for x in each).expand(shape), (0, 0, 0, self.others))
            .transpose(0, 1)
            .reshape(scores.value.shape)
            for f in (lambda x: x, torch.abs, torch.ones_like)
        )
        sums = (
            Bound(scores.value + bias, scores.error, scores.rms, scores.dtype)
            .off_by(1, scores.value.abs().where(own > 0, 0.0) + size)
            .off_by(6, size)
        )
        return sums.widened((1 + head_dim / 16) * sums.eps * size, head_dim / 32 * sums.eps * size)

    def collect(self, ds: Bound, keep: Tensor, shared: list[SharedError], alike: Tensor) -> None:
        """Add dS `[segments · key heads, group · rows, columns]` to the sums of the tables.

        shared: errors beyond those of ds. alike: matrices in which all errors of ds may be equal.
        """
        segments = next(iter(self.indices.values())).shape[0]

        def by_head(x: Tensor) -> Tensor:
            """`[H, segments, rows, columns]`, of the rows with a bias."""
            x = x.expand(*ds.value.shape[:-1], x.shape[-1] if x.dim() else ds.value.shape[-1])
            x = x.reshape(segments, self.tables.heads, -1, x.shape[-1]).transpose(0, 1)
            return x[:, :, : x.shape[2] - self.others]

        value, error, rms, visible = (by_head(x) for x in (ds.value, ds.error, ds.rms, keep))
        parts = dict(
            value=value,
            error=error,
            size=value.abs(),
            variance=rms**2,
            squares=value**2,
            terms=visible.double(),
        )
        parts["common"] = (
            (rms * by_head(alike.double())) if bool(alike.any()) else torch.zeros_like(rms)
        )
        for name, index in self.indices.items():
            sums = self.tables.sums[name]
            for head in range(self.tables.heads):
                sums.add(head, index, {part: x[head] for part, x in parts.items()})
            for weights, row_error, row_rms in shared:
                weights, row_error, row_rms = (
                    by_head(x) for x in (weights.abs(), row_error, row_rms)
                )
                for head in range(self.tables.heads):
                    sums.add_shared(head, index, weights[head], row_error[head], row_rms[head])


class _Sums(NamedTuple):
    """Sums `[H or 1, entries]` over the scores that use an entry: of dS, its largest error, its
    variance and the standard deviations that are not independent; of the absolute values and the
    squares of dS; and the number of scores."""

    value: Tensor
    error: Tensor
    variance: Tensor
    common: Tensor
    size: Tensor
    squares: Tensor
    terms: Tensor

    @classmethod
    def empty(cls, table: Tensor) -> _Sums:
        return cls(*(torch.zeros_like(table) for _ in cls._fields))

    def add(self, head: int, index: Tensor, parts: dict[str, Tensor]) -> None:
        """Add numbers `[segments, rows, columns]` of a head."""
        for name, x in parts.items():
            total = getattr(self, name)
            total[head % len(total)].index_add_(0, index.flatten(), x.flatten())

    def add_shared(
        self, head: int, index: Tensor, weights: Tensor, error: Tensor, rms: Tensor
    ) -> None:
        """Add an error that the scores of a row share: the scores of a row that use the same entry
        add up before their squares do."""
        first = int(index.min()) if index.numel() else 0
        span = int(index.max()) - first + 1 if index.numel() else 0
        of_rows = weights.new_zeros(*weights.shape[:-1], span).scatter_add_(
            -1, index - first, weights
        )
        row = head % len(self.value)
        self.error[row, first : first + span] += (of_rows * error).sum((0, 1))
        self.variance[row, first : first + span] += ((of_rows * rms) ** 2).sum((0, 1))

    def bound(self, table: Tensor, dtype: torch.dtype, shares_errors: bool) -> Bound:
        """The bound of the gradient of a table. No score uses some entries: their gradients are
        exactly 0."""
        eps, used = torch.finfo(dtype).eps, self.terms > 0
        # As `Bound.summed`, without the truncation of tensor cores.
        deviation = (
            2 * RMS_OF_ROUNDING * partial_sums(self.terms, self.value, self.squares)
            + self.squares.sqrt() / 2
        )
        total = Bound(self.value, self.error, torch.hypot(self.variance.sqrt(), self.common), dtype)
        total = (
            total.widened(largest_of_sum(self.terms) * eps * self.size, deviation * eps)
            .rounded(table.dtype)
            .where(used)
        )
        lines = len(self.value) if shares_errors else max(1, int(used.sum()))
        return total.map(lambda x: x.view(table.shape))._replace(lines=lines)
