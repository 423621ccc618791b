"""Batches of torch's DataLoader from the samples of users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..scalars import check_equal, check_kind
from .jagged import Jagged


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Jagged | Tensor]:
    """The batch of the samples of B users: the `collate_fn` of `torch.utils.data.DataLoader`, whose
    workers and `pin_memory` take such batches.

    Args:
        samples: a dictionary for each user, all with the same keys. A value is a tensor
            `[n, ...]`, whose n rows are a segment, or a number or a tensor without dimensions. The
            values of a key have equal dtypes, devices and, behind n, equal shapes.

    Returns:
        By key a Jagged of B segments, with int64 offsets and host lengths, or a tensor `[B]` of the
        numbers.

    Raises:
        TypeError: a sample is no dictionary, or a value neither a tensor nor a number.
        ValueError: there are no samples, or keys, shapes, dtypes or devices differ.

    Example::

        samples = [{"items": torch.tensor([7, 8, 9]), "label": 1.0},
                   {"items": torch.tensor([5]), "label": 0.0}]
        batch = jm.collate(samples)
        assert batch["items"].offsets.tolist() == [0, 3, 4]
        assert batch["label"].tolist() == [1.0, 0.0]
    """
    if not samples:
        raise ValueError("samples must have at least one sample, got none")
    for at, sample in enumerate(samples):
        check_kind(f"samples[{at}]", sample, Mapping, "a dictionary")
        if sample.keys() != samples[0].keys():
            keys = list(samples[0]), list(sample)
            check_equal(f"samples[{at}]", "have the keys of samples[0]", *keys)
    return {key: _join(key, [sample[key] for sample in samples]) for key in samples[0]}


def _join(key: str, values: list[Any]) -> Jagged | Tensor:
    rows: list[Tensor] = []
    for at, value in enumerate(values):
        name = f"samples[{at}][{key!r}]"
        check_kind(name, value, (Tensor, int, float), "a tensor or a number")
        rows.append(value if isinstance(value, Tensor) else torch.tensor(value, device="cpu"))
        if _kind(rows[at]) != _kind(rows[0]):
            expected, found = _kind(rows[0]), _kind(rows[at])
            raise ValueError(f"{name} must be {expected} as samples[0][{key!r}], got {found}")
    if not rows[0].dim():
        return torch.stack(rows)
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(rows[0].device)
    return Jagged(torch.cat(rows), offsets, host_lengths=lengths)


def _kind(rows: Tensor) -> str:
    """What the values of a key must have in common."""
    shape = ", ".join(["n", *map(str, rows.shape[1:])]) if rows.dim() else ""
    return f"{rows.dtype} [{shape}] on {rows.device}"
