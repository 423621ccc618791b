"""Jagged: the form that layers and operators turn every input into."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor, nn

from ..masks import AttentionMask
from ..scalars import check_equal, check_kind, check_size, possessive, rounded_size, to_ints
from ..segments import (
    Queries,
    RowSegments,
    Segmentation,
    check_device,
    check_integers,
    check_is_device,
    check_not_negative,
    check_offsets,
    outside_inference_mode,
    parse_segments,
    record_stream,
    remember,
    values_are_checkable,
)
from ..tracing import is_recording, one_call, recorded_call
from ..validation import check_dense, check_layer_input
from .conversions import check_lengths, longest_segment, rebuild, values_and_offsets, wait_for
from .padding import padded_to, real_rows
from .schedules import Sizes, kept_schedule

if TYPE_CHECKING:
    from typing_extensions import Self

C = TypeVar("C")  # a container, of a layer's argument and of its result


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Jagged(Queries):
    """Rows of variable-length segments: segment b is `values[offsets[b]:offsets[b + 1]]`.

    Args:
        values: `[L, ...]`.
        offsets: `[B + 1]` int32 or int64, on the values' device or the host.
        max_seqlen: length of the longest segment, if known. Nothing is truncated to it.
        host_lengths: `[B]` the segments' lengths on the host, if known. Schedules are then built on
            the host without a sync. Not needed where the offsets are on the host.

    Raises:
        TypeError, ValueError: offsets that do not describe L rows, or host_lengths that differ from
            the lengths in offsets.

    Example::

        history = jm.Jagged(torch.randn(5, 8), torch.tensor([0, 2, 2, 5]))  # 2, 0 and 3 rows
    """

    values: Tensor  # torch's fully_shard finds tensors in dataclasses, but not in other pytrees
    offsets: Tensor
    max_seqlen: int | None
    # whether the caller of a layer sees to the rows behind the last segment
    is_clean = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        recorded = recorded_call(cls, args, kwargs)
        return super().__new__(cls) if recorded is None else recorded

    def __init__(
        self,
        values: Tensor,
        offsets: Tensor,
        max_seqlen: int | None = None,
        *,
        host_lengths: Tensor | None = None,
    ) -> None:
        _check_parts("", values, offsets, max_seqlen)
        if host_lengths is not None:
            host_lengths = as_tensor("host_lengths", host_lengths)
            _check_host_lengths(host_lengths, offsets, values.shape[0])
        self.values, self.offsets, self.max_seqlen = values, offsets, max_seqlen
        self._read_offsets(host_lengths)
        self._note_check()
        self._container: Any = None  # the argument of wrap
        # of a KeyedJaggedTensor, whose segments are feature-major
        self.feature_keys: list[str] | None = None

    # -- containers in and out ---------------------------------------------------------------------

    @classmethod
    @one_call
    def wrap(cls, x: Any, max_seqlen: int | None = None, *, name: str = "x") -> Jagged:
        """The Jagged of any container.

        Layers do not apply the weights of TorchRec's containers, so floating-point weights are an
        error. Integer weights are the row ids of an EmbeddingCollection with need_indices: `unwrap`
        passes them on.

        Args:
            x: a JaggedTensor; a KeyedJaggedTensor (each pair of feature and sample is a segment,
                feature-major); a (values, offsets) pair; a torch nested tensor of jagged layout; or
                a Jagged, which is returned unless max_seqlen differs.
            max_seqlen: as in `Jagged`; that of a nested tensor if None.
            name: what errors call x.

        Raises:
            TypeError: another kind of input.
            ValueError: a nested tensor with another layout or with holes; offsets that do not fit
                the values, or that contradict the lengths of a JaggedTensor; a segment longer than
                max_seqlen; floating-point weights.
        """
        if isinstance(x, Jagged):
            if max_seqlen in (None, x.max_seqlen):
                return x
            check_offsets(f"{possessive(name)} offsets", x.offsets, max_seqlen=max_seqlen)
            jagged = x._copy(x.values, x.offsets)
            jagged.max_seqlen, jagged._container = max_seqlen, x._container
            return jagged
        x = wait_for(x)
        values, offsets = values_and_offsets(name, x)
        max_seqlen = longest_segment(x) if max_seqlen is None else max_seqlen
        _check_parts(f"{possessive(name)} ", values, offsets, max_seqlen)
        check_lengths(name, x, offsets)
        jagged = cls.unchecked(values, offsets, max_seqlen)
        jagged._note_check()
        jagged._container, jagged.feature_keys = x, x.keys() if hasattr(x, "keys") else None
        return jagged

    def unwrap(self, values: Tensor) -> Any:
        """The kind of container that was given to `wrap`, with new values `[L, ...]` in the same
        segments.

        Raises:
            TypeError, ValueError: values are no tensor, or have another number of rows.
        """
        self._check_rows(values)
        if self._container is None:
            return self.with_values(values)
        return rebuild(self._container, values, self.offsets)

    def with_values(self, values: Tensor) -> Jagged:
        """A Jagged of the same segments with other values `[L, ...]` and with offsets on their
        device. It shares the schedules.

        Raises:
            TypeError, ValueError: as `unwrap`.
        """
        self._check_rows(values)
        offsets = self.offsets
        if offsets.device != values.device:
            offsets = offsets.to(values.device, non_blocking=True)
        return self._copy(values, offsets)

    def rounded(self, steps_per_octave: int = 16) -> Jagged:
        """The same segments on a GPU, with rows of 0 behind the last one: `steps_per_octave`
        different numbers of rows in an octave. cuBLAS takes .1 to .2 ms of the host for a GEMM with
        a number of rows that it has not seen. On the host: itself.

        Raises:
            TypeError, ValueError: steps_per_octave is not a positive integer.
        """
        check_size("steps_per_octave", steps_per_octave)
        rows = rounded_size(self.num_rows, steps_per_octave)
        if rows == self.num_rows or not (self.values.is_cuda and self.offsets.is_cuda):
            return self
        return Jagged(padded_to(self.values, rows), self.offsets, self.max_seqlen)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Jagged:
        """The Jagged with its tensors on `device`. non_blocking is that of `Tensor.to`. It shares
        the schedules; their first use on the device copies them there.

        Raises:
            TypeError: device is none, as a dtype: `with_values` takes values of another dtype.
        """
        check_is_device(device)
        return self._copy(
            *(x.to(device, non_blocking=non_blocking) for x in (self.values, self.offsets))
        )

    def pin_memory(self) -> Jagged:
        """The Jagged and its schedules in page-locked memory. DataLoader calls it."""
        pinned = self._copy(self.values.pin_memory(), self.offsets.pin_memory())
        for key, schedule in list(self.segmentation.schedules.items()):
            self.segmentation.keep(key, schedule.pin_memory())
        return pinned

    def record_stream(self, stream: torch.Stream) -> None:
        """`Tensor.record_stream(stream)` of the tensors on a device, those of the schedules too.
        TorchRec's pipelines call it."""
        record_stream(stream, self.values, self.offsets)
        for schedule in list(self.segmentation.schedules.values()):
            schedule.record_stream(stream)

    def _copy(self, values: Tensor, offsets: Tensor) -> Jagged:
        if offsets is not self.offsets:
            self.segmentation.lengths_on_host(self.offsets)  # while the offsets are on the host
            remember(offsets, self.segmentation)
        jagged = Jagged.unchecked(values, offsets, self.max_seqlen, self.segmentation)
        jagged.feature_keys = self.feature_keys
        return jagged

    @classmethod
    def unchecked(
        cls,
        values: Any,
        offsets: Any,
        max_seqlen: int | None,
        segmentation: Segmentation | None = None,
    ) -> Jagged:
        """A Jagged of values, offsets and max_seqlen without checks: a pytree is rebuilt from
        tensors, fake tensors or other objects.

        segmentation: what another Jagged of the same segments knows of them.
        """
        jagged = object.__new__(cls)
        jagged.values = values
        jagged.offsets = offsets
        jagged.max_seqlen = max_seqlen
        jagged._container = None
        jagged.feature_keys = None
        if segmentation is None:
            jagged._read_offsets()
        else:
            jagged._known, jagged._known_of = segmentation, offsets
        return jagged

    def _check_rows(self, values: Tensor) -> None:
        check_kind("values", values, Tensor, "a torch.Tensor")
        if values.dim() < 1 or values.shape[0] != self.num_rows:
            raise ValueError(
                f"values must keep the number of rows, {self.num_rows}, got"
                f" {values.shape[0] if values.dim() else 'a scalar'}"
            )

    # -- padded tensors ----------------------------------------------------------------------------

    @classmethod
    def from_padded(
        cls,
        x: Tensor,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        side: str = "right",
    ) -> Jagged:
        """The real rows of a padded tensor, in their order. Give lengths or mask.

        Args:
            x: `[B, N, ...]`.
            lengths: `[B]` int32 or int64, the real rows of each segment, at most N.
            mask: bool `[B, N]`, True for real rows, which may have others between them. It is the
                opposite of torch's `key_padding_mask`.
            side: of the padding, "right" or "left"; not read with a mask.

        Returns:
            `[L, ...]`, with as many rows as are real. If only a device knows their number, it is
            not waited for: the values have B · N rows, of which those behind the last segment are
            0.

        Raises:
            TypeError, ValueError: not one of lengths and mask; shapes, dtypes or devices do not
                match; host lengths are negative or above N.
        """
        values, offsets, longest, host_lengths = real_rows(x, lengths, mask, side)
        return cls(values, offsets, longest, host_lengths=host_lengths)

    def to_padded(
        self,
        max_seqlen: int | None = None,
        padding_value: float = 0,
        side: str = "right",
        truncate: str | None = None,
    ) -> Tensor:
        """The rows as `[B, N, ...]`, as `functional.jagged_to_padded`.

        Args:
            max_seqlen: rows N of each segment; if None, `max_seqlen` of the container, or the
                longest of host_lengths.
            padding_value, side, truncate: as in `functional.jagged_to_padded`.

        Raises:
            TypeError, ValueError: as `functional.jagged_to_padded`; N is not known.
        """
        from ..functional.rows import jagged_to_padded  # which imports this file

        if max_seqlen is None:
            max_seqlen = self.max_seqlen
        if max_seqlen is None:
            lengths = self.host_lengths
            if lengths is None:
                raise ValueError(
                    "max_seqlen must be given: neither the container nor the host knows the longest"
                    " segment, got None"
                )
            max_seqlen = int(lengths.max()) if len(lengths) else 0
        return jagged_to_padded(
            self.values, self.offsets, max_seqlen, padding_value, side=side, truncate=truncate
        )

    # -- sizes -------------------------------------------------------------------------------------

    @property
    def num_segments(self) -> int:
        """The number B of segments."""
        return self.offsets.shape[0] - 1

    @property
    def num_rows(self) -> int:
        """The number L of rows."""
        return self.values.shape[0]

    @property
    def device(self) -> torch.device:
        """The values' device."""
        return self.values.device

    @property
    def host_lengths(self) -> Tensor | None:
        """`[B]` lengths of the segments on the host, or None if only the device knows them."""
        return self.segmentation.lengths_on_host(self.offsets)

    def parsed(self, name: str) -> RowSegments:
        """The segments as layers and operators take them, on the values' device; parsed once.
        Errors call the container `name`."""
        offsets, rows, device = self.offsets, self.num_rows, self.device
        if is_recording(device):
            return parse_segments(f"{possessive(name)} offsets", offsets, rows, device)
        segmentation = self.segmentation
        key = segmentation, rows, device
        if self._parsed is None or self._parsed[0] != key:
            name = f"{possessive(name)} offsets"
            # values or offsets may be new ones, and `debug_checks` may be on now
            if self._checked != key[:2]:
                check_offsets(name, offsets, rows)
            known = None if self._read is None else segmentation
            with outside_inference_mode():
                segments = parse_segments(name, offsets, rows, device, known)
            self._parsed = key, segments
        return self._parsed[1]

    def _note_check(self) -> None:
        """Called after `_check_parts`, which reads no values while a graph is recorded."""
        if self.offsets.is_cpu and values_are_checkable(self.offsets):
            self._checked = self._known, self.num_rows

    def end(self, name: str) -> Tensor | None:
        """The parsed offsets, at whose end the rows of a layer end. None if the host knows it, or a
        caller has cleared those behind. Errors call the container `name`."""
        return None if self.is_clean else self.parsed(name).end

    def __repr__(self) -> str:
        return (
            f"Jagged(values={list(self.values.shape)}, num_segments={self.num_segments},"
            f" device={self.values.device})"
        )

    # -- schedules ---------------------------------------------------------------------------------

    def prepare(
        self,
        *,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
        num_kv_heads: int | None = None,
        queries: Queries | int | None = None,
        rows_per_candidate: int = 1,
        mask: AttentionMask | None = None,
    ) -> Jagged:
        """Build the schedule of an attention on the host, for example in a DataLoader worker, and
        keep it. Returns self.

        These segments are the keys. The attention finds the schedule if it has the same number of
        heads, head dim, queries, mask fields, size of dtype and setting of `batch_invariant`. If
        one of them differs, the attention warns and builds another schedule.

        Args:
            num_heads, head_dim, num_kv_heads: those of the attention; num_kv_heads is num_heads if
                None. For HSTU, head_dim is the larger of the config's head_dim and linear_dim.
            dtype: dtype of q, k and v: autocast's dtype under autocast; torch's default dtype if
                None.
            queries: a Jagged whose rows are the queries; a CandidateIndex; a number of query rows,
                the same for every segment; None for self-attention.
            rows_per_candidate: query rows of each candidate, if queries is a CandidateIndex.
            mask: the attention's mask. It changes only how evenly the schedule spreads the work.
                Its num_targets count if they are on the host.

        Raises:
            TypeError: an argument of the wrong kind.
            ValueError: sizes below 1, or lengths that only the device knows.
        """
        if self.host_lengths is None:
            raise ValueError(
                "prepare builds on the host, but the lengths are on a device only; pass"
                " host_lengths to Jagged"
            )
        dtype = torch.get_default_dtype() if dtype is None else dtype
        sizes = Sizes.of(num_heads, num_kv_heads, head_dim, dtype)
        kept_schedule(self, self if queries is None else queries, rows_per_candidate, sizes, mask)
        return self

    def schedule(
        self,
        *,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_kv_heads: int | None = None,
        queries: Queries | int | None = None,
        rows_per_candidate: int = 1,
        mask: AttentionMask | None = None,
    ) -> TileSchedule | None:
        """The schedule of an attention with these segments as keys, on the values' device.

        Built once and kept: that of `prepare` if it fits, else one that the device makes without a
        sync; under `torch.no_grad()` for the forward alone. None if the caller needs none: on the
        CPU, which uses no schedule, and under torch.compile or in a CUDA graph, where the operators
        build it inside the graph. None also if only the device knows the number of query rows; the
        operator then builds the schedule.

        Args:
            num_heads, head_dim, dtype, num_kv_heads, queries, rows_per_candidate, mask: as in
                `prepare`.

        Raises:
            TypeError, ValueError: as `prepare`.
        """
        device = self.device
        if device.type == "cpu" or is_recording(device):
            return None
        sizes = Sizes.of(num_heads, num_kv_heads, head_dim, dtype)
        queries = self if queries is None else queries
        return kept_schedule(self, queries, rows_per_candidate, sizes, mask, by_prepare=False)

    def query_segments(self, rows_per_candidate: int) -> RowSegments:
        """The segments as those of queries. For schedules; rows_per_candidate is for the index of
        candidates."""
        return self.parsed("queries")._replace(host_lengths=self.host_lengths)


def _check_parts(prefix: str, values: Any, offsets: Any, max_seqlen: int | None) -> None:
    """TypeError or ValueError unless the parts make a Jagged. prefix: of their names in errors,
    "x's " for a container x."""
    check_dense(f"{prefix}values", values)
    if values.dim() < 1:
        raise ValueError(f"{prefix}values must have shape [L, ...], got {list(values.shape)}")
    check_offsets(f"{prefix}offsets", offsets, values.shape[0], max_seqlen)
    check_device(f"{prefix}offsets", offsets, values.device, f"{prefix or 'the '}values'")


def as_tensor(name: str, x: Any) -> Tensor:
    try:
        return x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{name} must be a tensor or a sequence of ints, got {type(x).__name__}"
        ) from None


def _check_host_lengths(host_lengths: Tensor, offsets: Tensor, total: int) -> None:
    segments = offsets.shape[0] - 1
    if host_lengths.device.type != "cpu" or host_lengths.shape != (segments,):
        raise ValueError(
            f"host_lengths must be [B] = [{segments}] on the host, got {list(host_lengths.shape)}"
            f" on {host_lengths.device}"
        )
    check_integers("host_lengths", host_lengths)
    check_not_negative("host_lengths", host_lengths)
    if not values_are_checkable(host_lengths):
        return
    check_equal("host_lengths", "add up to the number of rows", total, int(host_lengths.sum()))
    if values_are_checkable(offsets) and not torch.equal(
        host_lengths, offsets.diff().to(host_lengths)
    ):
        lengths = to_ints(offsets.diff())
        raise ValueError(
            f"host_lengths must be the differences of offsets, {lengths}, got"
            f" {to_ints(host_lengths)}"
        )


def wrap_rows(
    name: str, x: Any, width: int, projection: nn.Module, function: str = "jagged_attention"
) -> Jagged:
    """A layer's input as a Jagged: TypeError or ValueError unless its values are `[L, width]`, of
    the projection's dtype and device, and of a dtype that the function takes."""
    jagged = x if isinstance(x, Jagged) else Jagged.wrap(x, name=name)
    values = f"{possessive(name)} values"
    if jagged.values.dim() != 2 or jagged.values.shape[1] != width:
        raise ValueError(f"{values} must have shape [L, {width}], got {list(jagged.values.shape)}")
    check_layer_input(values, jagged.values, projection, function)
    return jagged


def check_same_segments(name: str, x: Jagged, other_name: str, other: Jagged) -> None:
    """ValueError unless both have as many segments and, if both are KeyedJaggedTensors, as many
    keys. The same keys must come in the same order."""
    if x.num_segments != other.num_segments:
        raise ValueError(
            f"{name} and {other_name} must have the same number of segments, got {x.num_segments}"
            f" and {other.num_segments}"
        )
    keys, other_keys = x.feature_keys, other.feature_keys
    if keys is None or other_keys is None or keys == other_keys:
        return
    if len(keys) != len(other_keys) or sorted(keys) == sorted(other_keys):
        raise ValueError(
            f"{other_name} must have as many keys as {name}, in the same order, {keys}, got"
            f" {other_keys}"
        )
