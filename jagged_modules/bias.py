"""RelativeBias: learned biases of attention scores by relative position and by time difference."""

from __future__ import annotations

import dataclasses
import decimal
import functools
import itertools

import torch
from torch import Tensor
from torch.types import Device

from .scalars import check_equal, check_size
from .segments import check_integers, values_are_checkable
from .validation import check_tensor

LOG_STEP = decimal.Decimal("0.301")  # HSTU's published rule: bucket(d) = floor(ln(d) / 0.301)
LARGEST = torch.iinfo(torch.int64).max


@dataclasses.dataclass(frozen=True, eq=False)
class RelativeBias:
    """Biases that are added to attention scores before the activation, as in HSTU (Zhai et al.
    2024, arXiv:2402.17152).

        S[b, h, i, j] = scale · <q_i, k_j> + position[h, j - i + N - 1] + time[h, bucket]
        bucket        = number of boundaries that are <= |u[i] - t[j]|

    i and j are positions in the segment. Queries are aligned with the end of the keys: row i of Nq
    has position i + Nk - Nq. t are the timestamps of the keys, u those of the queries. By default
    u[i] = t[min(i + 1, Nk - 1)]: a row knows when the next event comes, as in the published
    protocol. Both tables get gradients, summed in fp32 in a fixed order. ALiBi and T5's bias are
    special position tables.

    Args:
        position: `[2N - 1]`, shared by the heads, or `[H, 2N - 1]`. Entry N - 1 belongs to distance
            0, later entries to later keys. Segments have at most N rows: longer ones are an error
            if offsets are on the host; otherwise distances beyond N - 1 count as N - 1.
        time: `[K + 1]`, shared by the heads, or `[H, K + 1]`, one entry per bucket.
        timestamps: int64 `[Lk]`, of each key row, in any unit and order. Differences are taken in
            int64: they must be below 2^63, or they wrap.
        boundaries: int64 `[K]`, not decreasing; `log_boundaries(K)` if None.
        query_timestamps: int64 `[Lq]`, u of each query row, for example the time of the event to be
            predicted.
        query_shift: int32 or int64 `[B]`: the queries of segment b have positions that are larger
            by query_shift[b]. Queries that follow cached keys, and are not among them, are shifted
            by their number.

    Raises:
        TypeError, ValueError: both tables are None; a tensor has another dtype, shape or device;
            timestamps are missing, or given without `time`; boundaries decrease.

    Example::

        q = k = v = torch.randn(5, 2, 16)  # two users with 2 and 3 events
        bias = jm.RelativeBias(position=torch.zeros(2 * 100 - 1))  # histories of up to 100 events
        F.jagged_attention(q, k, v, torch.tensor([0, 2, 5]), activation="silu", bias=bias)
    """

    position: Tensor | None = None
    time: Tensor | None = None
    timestamps: Tensor | None = None
    boundaries: Tensor | None = None
    query_timestamps: Tensor | None = None
    query_shift: Tensor | None = None

    def __post_init__(self) -> None:
        if self.position is None and self.time is None:
            raise ValueError("position or time must be given, got None for both")
        for name, shape, table in (
            ("position", "[2N - 1] or [H, 2N - 1]", self.position),
            ("time", "[K + 1] or [H, K + 1]", self.time),
        ):
            if table is None:
                continue
            check_tensor(name, table, 2 if getattr(table, "ndim", 1) == 2 else 1, shape)
            size = table.shape[-1]
            if size == 0 or (name == "position" and size % 2 == 0):
                raise ValueError(f"{name} must have shape {shape}, got {list(table.shape)}")
        others = dict(
            timestamps=self.timestamps,
            boundaries=self.boundaries,
            query_timestamps=self.query_timestamps,
        )
        for name, x in others.items():
            if x is None:
                continue
            if self.time is None:
                raise ValueError(f"{name} must be None without time, got a {type(x).__name__}")
            check_integers(name, x, (torch.int64,))
        if self.query_shift is not None:
            check_integers("query_shift", self.query_shift)
        if self.time is not None and self.timestamps is None:
            raise ValueError("timestamps must be given with time, got None")
        if self.time is not None and self.boundaries is not None:
            edges, count = self.boundaries, self.time.shape[-1] - 1
            must = "have one element less than time has buckets"
            check_equal("boundaries", must, count, edges.shape[0])
            if values_are_checkable(edges) and bool((edges.diff() < 0).any()):
                raise ValueError(f"boundaries must not decrease, got {edges}")

    @staticmethod
    def log_boundaries(num_buckets: int, device: Device = None) -> Tensor:
        """Boundaries of HSTU's published rule, int64 `[num_buckets]`: bucket(d) = floor(ln(max(|d|,
        1)) / 0.301), at most num_buckets.

        Boundary k, counted from 1, is the smallest integer d with ln(d) >= 0.301 k, so buckets
        follow from integer comparisons alone. They are made on `device`.

        Raises:
            TypeError, ValueError: num_buckets is not a non-negative integer.
        """
        check_size("num_buckets", num_buckets, at_least=0)
        return _log_boundaries(num_buckets, device)

    @property
    def max_seqlen(self) -> int | None:
        """The number of rows N that the position table serves; None without one."""
        return None if self.position is None else (self.position.shape[-1] + 1) // 2

    def with_boundaries(self) -> RelativeBias:
        """This bias with boundaries, on the device of `time`."""
        if self.time is None or self.boundaries is not None:
            return self
        # torch.compile warns of caches
        make = _log_boundaries if torch.compiler.is_compiling() else _boundaries_on
        return dataclasses.replace(self, boundaries=make(self.time.shape[-1] - 1, self.time.device))

    def __repr__(self) -> str:
        """The tensors' shapes: reading values could wait for a device."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shapes = [f"{name}={list(x.shape)}" for name, x in given.items() if x is not None]
        return f"RelativeBias({', '.join(shapes)})"


def _log_edges() -> tuple[int, ...]:
    with decimal.localcontext() as context:
        context.prec = 60
        edges = (
            int((LOG_STEP * k).exp().to_integral_value(decimal.ROUND_CEILING))
            for k in itertools.count(1)
        )
        return tuple(itertools.takewhile(lambda edge: edge < LARGEST, edges))


# those below 2^63 - 1. Made here because torch.compile cannot trace decimal arithmetic
LOG_EDGES = _log_edges()


def _log_boundaries(num_buckets: int, device: Device = None) -> Tensor:
    edges = [*LOG_EDGES[:num_buckets], *[LARGEST] * (num_buckets - len(LOG_EDGES))]
    return torch.tensor(edges, dtype=torch.int64, device=device)


_boundaries_on = functools.cache(_log_boundaries)


# -- definition, for one or more segments of equal lengths -----------------------------------------


def position_index(i: Tensor, j: Tensor, max_seqlen: int) -> Tensor:
    """Index into the position table, int64 `[rows, columns]`, of query positions i `[rows]` and key
    positions j `[columns]`."""
    return (j - i[:, None] + (max_seqlen - 1)).clamp(0, 2 * max_seqlen - 2)


def time_buckets(u: Tensor, t: Tensor, boundaries: Tensor) -> Tensor:
    """Buckets, int64 `[..., rows, columns]`, of query timestamps u `[..., rows]` and key timestamps
    t `[..., columns]`."""
    return torch.bucketize((u[..., :, None] - t[..., None, :]).abs(), boundaries, right=True)


def next_timestamps(i: Tensor, t: Tensor) -> Tensor:
    """The default timestamps u of queries at positions i `[rows]`: those of the next keys, or of
    the last one. t: `[..., Nk]`, Nk > 0."""
    return t[..., (i + 1).clamp(0, t.shape[-1] - 1)]
