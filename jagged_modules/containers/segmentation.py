"""What containers with the same offsets share: host lengths, tile schedules and an id."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any, NamedTuple

import torch
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..tracing import is_recording
from ..validation import normal_form, values_are_checkable

MAX_SCHEDULES = 16  # that a segmentation keeps


class Segmentation:
    """Host lengths, tile schedules, and an id that survives copying and pickling.

    Attributes:
        host_lengths: `[B]` lengths on the host, None until they are known.
        schedules: the attention schedules built so far. The key holds the sizes, the queries and
            the mask of the attention.
        prepared: descriptions of the schedules that `Jagged.prepare` built.
    """

    def __init__(self, host_lengths: Tensor | None = None) -> None:
        self.host_lengths: Tensor | None = host_lengths
        self._num_rows: int | None = None
        self.schedules: dict[tuple[object, ...], TileSchedule] = {}
        self.prepared: dict[str, None] = {}  # an ordered set

    @property
    def id(self) -> bytes:
        """Equal for all copies of this segmentation, in every process and thread.

        Random: process ids are reused, and forked processes would continue a counter from the same
        number.
        """
        return vars(self).setdefault("_id", os.urandom(16))

    @property
    def num_rows(self) -> int | None:
        """The sum of host_lengths, None until they are known."""
        if self.host_lengths is not None and self._num_rows is None:
            self._num_rows = int(self.host_lengths.sum())
        return self._num_rows

    def keep(self, key: tuple[object, ...], schedule: TileSchedule) -> None:
        """Store a schedule. Drop the oldest beyond MAX_SCHEDULES: a cached history meets new
        queries in every batch.

        There is no lock, because a forked process could inherit it locked. Concurrent calls are
        safe without one.
        """
        self.schedules[key] = schedule
        for oldest in list(self.schedules)[:-MAX_SCHEDULES]:
            self.schedules.pop(oldest, None)

    def note_build(self, description: str, by_prepare: bool) -> None:
        """Record a schedule that `Jagged.prepare` builds. Warn if attention builds one although
        others were prepared."""
        if by_prepare:
            self.prepared[description] = None
        elif self.prepared:
            other = " of other queries" if description in self.prepared else ""
            warnings.warn(
                "no schedule that Jagged.prepare built fits this attention, so it builds one: it"
                f" needs ({description}){other}, prepared are ({'; '.join(self.prepared)})",
                stacklevel=4,
            )

    def lengths_on_host(self, offsets: Tensor) -> Tensor | None:
        """host_lengths; computed once from offsets that are on the host, None if offsets are on a
        device and nobody gave the lengths."""
        if (
            self.host_lengths is None
            and offsets.device.type == "cpu"
            and not torch.compiler.is_compiling()
        ):
            self.host_lengths = offsets.diff()
        return self.host_lengths


class RowSegments(NamedTuple):
    """The segments of an operand's rows, parsed: nothing below checks or moves them again.

    Attributes:
        offsets: `[B + 1]` in their normal form, on the operand's device.
        host_lengths: `[B]` on the host, None if only the device knows them.
        num_rows: rows of the operand, None if it is not known.
        has_tail: whether there may be rows behind the last segment. Only the device knows.
    """

    offsets: Tensor
    host_lengths: Tensor | None = None
    num_rows: int | None = None
    has_tail: bool = False

    @property
    def end(self) -> Tensor | None:
        """The offsets, behind whose last one rows may have to be cleared. None if there are no such
        rows."""
        return self.offsets if self.has_tail else None


class Queries:
    """Base of the containers that can be the queries of an attention: `Jagged` and
    `CandidateIndex`."""

    offsets: Tensor
    _known: Segmentation  # of the offsets when they were last read
    _parsed: tuple[object, RowSegments] | None = None  # kept by `Jagged.parsed`

    @property
    def segmentation(self) -> Segmentation:
        """What is known of the segments. A write to the offsets, also through a view, makes a new
        one."""
        self._known = segmentation_of(self.offsets, known=self._known)
        return self._known

    @property
    def segmentation_id(self) -> bytes:
        """Equal for all copies of the container's segments, in every process and thread."""
        return self.segmentation.id

    def query_segments(self, rows_per_candidate: int) -> RowSegments:
        """The segments of the query rows. rows_per_candidate: query rows of each candidate, where
        the container's rows are candidates."""
        raise NotImplementedError


class _Kept(NamedTuple):
    """A tensor's segmentation, and the state that shows later writes to the tensor: a copy of its
    values, or on a device its version."""

    state: Tensor | int
    segmentation: Segmentation


# offsets → _Kept. Not an attribute of the tensor, because torch.save would save it.
_segmentations: Any = WeakTensorKeyDictionary()


def segmentation_of(
    offsets: Tensor, host_lengths: Tensor | None = None, known: Segmentation | None = None
) -> Segmentation:
    """The segmentation of this tensor object; a new one if the tensor was written to since the last
    call.

    known: that of a tensor of which no call or `remember` knows yet, for example an unpickled one.
    """
    if not _is_tracked(offsets):
        return known or Segmentation(host_lengths)
    kept: _Kept | None = _segmentations.get(offsets)
    if kept is None or not _is_unchanged(kept, offsets):
        segmentation = known if kept is None and known is not None else Segmentation(host_lengths)
        remember(offsets, segmentation)
        return segmentation
    if kept.segmentation.host_lengths is None:
        kept.segmentation.host_lengths = host_lengths
    return kept.segmentation


def parse_segments(name: str, offsets: Tensor, rows: int, device: torch.device) -> RowSegments:
    """The segments of an operand with so many rows, of offsets that are checked as far as their
    values may be read. Errors call the offsets `name`.

    Raises:
        ValueError: a container has noted the lengths on the host, and they do not add up to `rows`.
    """
    return RowSegments(
        normal_form(offsets, device),
        num_rows=rows,
        has_tail=may_have_tail(name, offsets, rows, device),
    )


def may_have_tail(name: str, offsets: Tensor, rows: int, device: torch.device) -> bool:
    """Whether only the device knows if there are rows behind offsets[-1].

    Args:
        offsets: as the caller gave them, before they are moved to `device`. Errors call them
            `name`.

    Raises:
        ValueError: as `parse_segments`.
    """
    if is_recording(device):
        return True
    if values_are_checkable(offsets):
        return False
    kept: _Kept | None = _segmentations.get(offsets) if _is_tracked(offsets) else None
    if kept is None or not _is_unchanged(kept, offsets):
        return True
    known = kept.segmentation.num_rows
    if known is not None and known != rows:
        raise ValueError(f"{name} must end at the number of rows, {rows}, got {known}")
    return known is None


def remember(offsets: Tensor, segmentation: Segmentation) -> None:
    """Assign the segmentation to this tensor too, for example to a copy on another device."""
    if _is_tracked(offsets):
        _segmentations[offsets] = _Kept(
            offsets.clone() if _on_host(offsets) else offsets._version, segmentation
        )


def _is_unchanged(kept: _Kept, offsets: Tensor) -> bool:
    return (
        torch.equal(kept.state, offsets)
        if isinstance(kept.state, Tensor)
        else kept.state == offsets._version
    )


def _is_tracked(offsets: Tensor) -> bool:
    """Whether writes to the tensor can be detected: inference tensors on a device have no version
    counter. A pytree may have put another object in the tensor's place."""
    if torch.compiler.is_compiling() or not isinstance(offsets, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    return _on_host(offsets) or not offsets.is_inference()


def _on_host(offsets: Tensor) -> bool:
    return offsets.is_cpu and values_are_checkable(offsets)


def outside_inference_mode() -> contextlib.AbstractContextManager[None]:
    """Where tensors are made that are kept: a later call may save them for its backward."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def record_stream(stream: torch.Stream, *tensors: Tensor | None) -> None:
    """`Tensor.record_stream` of the tensors on a device. Host tensors have no stream."""
    for x in tensors:
        if x is not None and x.device.type != "cpu":
            x.record_stream(stream)
