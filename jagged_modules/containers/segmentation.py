"""Segmentation: what all containers with the same offsets tensor share."""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..schedule import TileSchedule
from ..validation import values_are_checkable

MAX_SCHEDULES = 16  # kept with a segmentation


class Segmentation:
    """Host lengths, tile schedules, and an id that survives copying and pickling.

    Attributes:
        host_lengths: `[B]` lengths on the host, None until they are known.
        schedules: the attention schedules built so far, by sizes and queries.
        prepared: descriptions of what `Jagged.prepare` built schedules for.
    """

    def __init__(self, host_lengths: Tensor | None = None) -> None:
        self.host_lengths = host_lengths
        self.schedules: dict[tuple, TileSchedule] = {}
        self.prepared: dict[str, None] = {}  # an ordered set

    @property
    def id(self) -> bytes:
        """Equal for all copies of this segmentation, in every process and thread.

        Random: process ids are reused, and forked processes would continue a counter from the same number.
        """
        return vars(self).setdefault("_id", os.urandom(16))

    def keep(self, key: tuple, schedule: TileSchedule) -> None:
        """Store a schedule, and drop the oldest beyond MAX_SCHEDULES: cached histories outlive their batch and would collect them.

        There is no lock, because a forked process could inherit it locked. Concurrent calls are safe without one.
        """
        self.schedules[key] = schedule
        for oldest in list(self.schedules)[:-MAX_SCHEDULES]:
            self.schedules.pop(oldest, None)

    def note_build(self, what: str, prepares: bool) -> None:
        """Record that a schedule for `what` is built: by `Jagged.prepare` (`prepares`), or later, which warns if others were prepared."""
        if prepares:
            self.prepared[what] = None
        elif self.prepared:
            other = " of other queries" if what in self.prepared else ""
            prepared = "; ".join(self.prepared)
            warnings.warn(
                f"no schedule that Jagged.prepare built fits this attention, so it builds one: it needs ({what}){other}, prepared are "
                f"({prepared})",
                stacklevel=4,
            )

    def lengths_on_host(self, offsets: Tensor) -> Tensor | None:
        """host_lengths, computed once if the offsets are on the host; None if they are on a device only."""
        if self.host_lengths is None and offsets.device.type == "cpu" and not torch.compiler.is_compiling():
            self.host_lengths = offsets.diff()
        return self.host_lengths


# offsets → (a copy of their values, or their version on a device; segmentation). An attribute of the tensor would be saved by torch.save.
_segmentations = WeakTensorKeyDictionary()


def segmentation_of(offsets: Tensor, host_lengths: Tensor | None = None) -> Segmentation:
    """The segmentation of this tensor object, a new one if the tensor was written to since the last call."""
    if not _is_tracked(offsets):
        return Segmentation(host_lengths)
    kept = _segmentations.get(offsets)
    segmentation = None
    if kept is not None:
        state, segmentation = kept
        if not (torch.equal(state, offsets) if isinstance(state, Tensor) else state == offsets._version):
            segmentation = None
    if segmentation is None:
        segmentation = Segmentation(host_lengths)
        remember(offsets, segmentation)
    if segmentation.host_lengths is None:
        segmentation.host_lengths = host_lengths
    return segmentation


def remember(offsets: Tensor, segmentation: Segmentation) -> None:
    """Associate the segmentation with this tensor, for instance a copy on another device."""
    if _is_tracked(offsets):
        _segmentations[offsets] = offsets.clone() if _on_host(offsets) else offsets._version, segmentation


def _is_tracked(offsets: Tensor) -> bool:
    """Whether writes to the tensor can be detected: inference tensors on a device have no version counter."""
    return not torch.compiler.is_compiling() and (_on_host(offsets) or not offsets.is_inference())


def _on_host(offsets: Tensor) -> bool:
    return values_are_checkable(offsets) and offsets.device.type == "cpu"
