"""Segmentation: what all containers of the same segments share. Found by the offsets tensor, whatever container it comes in."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .checks import values_are_checkable
from .schedule import TileSchedule, new_token

MAX_SCHEDULES = 16  # kept with a segmentation


class Segmentation:
    """Host lengths, tile schedules, and a token that outlives copies and the way out of a DataLoader worker.

    Attributes:
        host_lengths: `[B]` lengths on the host, None until they are known.
        schedules: the attention schedules built so far, by sizes and queries.
        prepared: what `Jagged.prepare` built schedules for, as text.
    """

    def __init__(self, host_lengths: Tensor | None = None) -> None:
        self.host_lengths = host_lengths
        self.schedules: dict[tuple, TileSchedule] = {}
        self.prepared: dict[str, None] = {}  # an ordered set

    @property
    def token(self) -> bytes:
        """Equal for all copies, in every process and thread."""
        return vars(self).setdefault("_token", new_token())

    def keep(self, key: tuple, schedule: TileSchedule) -> None:
        """Keep a schedule and forget the oldest past MAX_SCHEDULES: segments that outlive their batch, such as cached histories, meet ever
        new queries. Without a lock: other threads may do the same meanwhile, and no process inherits it locked."""
        self.schedules[key] = schedule
        for oldest in list(self.schedules)[:-MAX_SCHEDULES]:
            self.schedules.pop(oldest, None)

    def note_build(self, what: str, prepares: bool) -> None:
        """Note a schedule that `Jagged.prepare` builds. A warning where it is built in spite of it: none of the prepared ones fits."""
        if prepares:
            self.prepared[what] = None
        elif self.prepared:
            other = " of other queries" if what in self.prepared else ""
            prepared = "; ".join(self.prepared)
            warnings.warn(
                f"no schedule that Jagged.prepare built fits this attention, which builds its own: it needs ({what}){other}, prepared are "
                f"({prepared})",
                stacklevel=4,
            )

    def lengths_on_host(self, offsets: Tensor) -> Tensor | None:
        """host_lengths, computed once from offsets on the host; None if only a device knows them."""
        if self.host_lengths is None and offsets.device.type == "cpu" and not torch.compiler.is_compiling():
            self.host_lengths = offsets.diff()
        return self.host_lengths


# offsets -> (their state then, segmentation). Not an attribute of the tensor: torch.save would store it.
_segmentations = WeakTensorKeyDictionary()


def segmentation_of(offsets: Tensor, host_lengths: Tensor | None = None) -> Segmentation:
    """The segmentation of this very tensor. Writing to the tensor makes it another segmentation."""
    if not _is_tracked(offsets):
        return Segmentation(host_lengths)
    state, segmentation = _segmentations.get(offsets, (None, None))
    if state is None or not (torch.equal(state, offsets) if isinstance(state, Tensor) else state == offsets._version):
        segmentation = Segmentation(host_lengths)
        remember(offsets, segmentation)
    if segmentation.host_lengths is None:
        segmentation.host_lengths = host_lengths
    return segmentation


def remember(offsets: Tensor, segmentation: Segmentation) -> None:
    """Make the segmentation that of this tensor, for instance a copy on another device."""
    if _is_tracked(offsets):
        _segmentations[offsets] = offsets.clone() if _on_host(offsets) else offsets._version, segmentation


def _is_tracked(offsets: Tensor) -> bool:
    """Whether writes to the tensor can be noticed. Inference tensors do not count them."""
    return not torch.compiler.is_compiling() and (_on_host(offsets) or not offsets.is_inference())


def _on_host(offsets: Tensor) -> bool:
    return values_are_checkable(offsets) and offsets.device.type == "cpu"
