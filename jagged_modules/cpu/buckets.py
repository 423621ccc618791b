"""Groups of segments with equal lengths, which batched GEMMs compute together without padding.
Shared by the CPU operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

softmax_gradient = torch._softmax_backward_data  # pyright: ignore[reportPrivateImportUsage] - torch's __init__ does not declare it
# up to this many elements, gathering a scattered segment costs less than a GEMM of its own
GATHERED = 2048
FEW = 256  # segments


class Rows(NamedTuple):
    """Rows of segments of equal length: a slice if the segments are adjacent, otherwise row
    indices. copied: `take` returns a contiguous copy. Otherwise the order of sums in a GEMM could
    depend on alignment and strides."""

    rows: slice | Tensor
    length: int
    copied: bool = False

    @property
    def num_rows(self) -> int:
        """The rows of all segments."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @classmethod
    def of(cls, starts: tuple[int, ...], length: int, copied: bool = False) -> Rows:
        if _adjoin(starts, length):
            return cls(slice(starts[0], starts[-1] + length), length, copied)
        firsts = torch.tensor(starts, device="cpu")[:, None]
        rows = (firsts + torch.arange(length, device="cpu")).flatten()
        return cls(rows, length, copied)

    def take(self, x: Tensor) -> Tensor:
        """Rows of x as `[segments, length, ...]`. A view if they are a slice and not copied."""
        x = x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)
        x = x.clone(memory_format=torch.contiguous_format) if self.copied else x
        return x.view(x.shape[0] // self.length, self.length, *x.shape[1:])

    def put(self, x: Tensor, block: Tensor) -> None:
        """Undo `take`: write a block to its rows of x."""
        if isinstance(self.rows, slice):
            rows = x[self.rows]
            rows.copy_(block.reshape(rows.shape))
        else:
            x.index_copy_(0, self.rows, block.reshape(len(self.rows), *x.shape[1:]).to(x.dtype))


def groups(*offsets: Tensor, batch_invariant: bool = False) -> Iterator[tuple[Rows, ...]]:
    """Groups of segments whose lengths are equal in each of the offsets `[B + 1]`. A group is one
    `Rows` per offsets. Segments with a length of 0 are left out. batch_invariant: one segment per
    group."""
    starts, present = defaultdict(list), present_segments(*offsets)
    bounds = [[x[present].tolist() for x in (of[:-1], of[1:])] for of in offsets]
    for firsts, ends in zip(*map(zip, *bounds)):
        lengths = tuple(end - first for first, end in zip(firsts, ends))
        if all(lengths):
            starts[lengths].append(firsts)
    for lengths, segments in starts.items():
        together = not batch_invariant and (
            max(lengths) <= GATHERED or all(map(_adjoin, zip(*segments), lengths))
        )
        for some in [segments] if together else zip(segments):
            yield tuple(
                Rows.of(firsts, length, batch_invariant)
                for firsts, length in zip(zip(*some), lengths)
            )


def present_segments(*offsets: Tensor) -> slice | Tensor:
    """An index that leaves out segments with a length of 0. All segments if they are few, as a loop
    over them then takes less time."""
    if len(offsets[0]) <= FEW:
        return slice(None)
    return torch.stack([x.diff() > 0 for x in offsets]).all(0).nonzero().flatten()


def _adjoin(starts: tuple[int, ...], length: int) -> bool:
    """Whether segments in ascending order are adjacent."""
    return starts[-1] - starts[0] == (len(starts) - 1) * length


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64, otherwise fp32. Results are rounded to x's dtype once, at the end."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
