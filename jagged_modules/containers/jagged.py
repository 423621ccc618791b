"""Jagged: the one form of every input, and the one place that knows TorchRec's and torch's containers."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import torch
from jagged_kernels.attention.select import AttentionProblem
from torch import Tensor, nn

from ..masks import AttentionMask
from ..scalars import check_size
from ..schedule import TileSchedule, device_schedule, host_schedule
from ..settings import is_batch_invariant
from ..validation import check_dense, check_device, check_integers, check_layer_input, check_offsets, values_are_checkable
from .candidates import CandidateIndex
from .segmentation import Segmentation, remember, segmentation_of


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Jagged:
    """Rows of variable-length segments: segment b is `values[offsets[b]:offsets[b + 1]]`.

    Args:
        values: `[L, ...]`.
        offsets: `[B + 1]` int32 or int64, on the values' device or the host.
        max_seqlen: the longest segment, if known; a hint for sizing, never a truncation.
        host_lengths: `[B]` the segments' lengths on the host, if known. Schedules are then built on the host, without waiting for a
            device; host offsets tell them by themselves.

    Raises:
        TypeError, ValueError: offsets that are no offsets of L rows, or host_lengths that are not their lengths.

    Example::

        history = jm.Jagged(torch.randn(5, 8), torch.tensor([0, 2, 2, 5]))      # segments of 2, 0 and 3 rows
    """

    values: Tensor  # torch's fully_shard finds tensors in dataclasses, but not in other pytrees
    offsets: Tensor
    max_seqlen: int | None

    def __init__(self, values: Tensor, offsets: Tensor, max_seqlen: int | None = None, *, host_lengths: Tensor | None = None) -> None:
        _check_parts("", values, offsets, max_seqlen)
        if host_lengths is not None:
            host_lengths = _as_tensor("host_lengths", host_lengths)
            _check_host_lengths(host_lengths, offsets, values.shape[0])
        self.values, self.offsets, self.max_seqlen = values, offsets, max_seqlen
        self._segmentation = segmentation_of(offsets, host_lengths)
        self._container: Any = None  # what wrap was given
        self._keys: list[str] | None = None  # of a KeyedJaggedTensor: the features that the segments belong to, in order

    # -- containers in and out ---------------------------------------------------------------------------------------------

    @classmethod
    def wrap(cls, x, max_seqlen: int | None = None, *, name: str = "x") -> Jagged:
        """Jagged of a JaggedTensor, a KeyedJaggedTensor (each feature and sample is a segment, feature-major), a (values, offsets)
        pair, a torch nested tensor of jagged layout, or a Jagged, which is returned as it is, but for another max_seqlen.

        Layers do not apply the weights of TorchRec's containers, so floating-point weights are an error. Integer weights are the row ids
        of an EmbeddingCollection with need_indices: they stay with the rows, and `unwrap` passes them on.

        Args:
            x: one of them.
            max_seqlen: as of `Jagged`.
            name: what errors call x.

        Raises:
            TypeError: another kind of input.
            ValueError: a nested tensor with another layout or with holes; offsets that do not fit the values; a segment longer than
                max_seqlen; floating-point weights.
        """
        if isinstance(x, Jagged):
            if max_seqlen in (None, x.max_seqlen):
                return x
            check_offsets(f"{name}'s offsets", x.offsets, max_seqlen=max_seqlen)
            jagged = x._copy(x.values, x.offsets)
            jagged.max_seqlen, jagged._container = max_seqlen, x._container
            return jagged
        x = wait_for(x)
        if _is_torchrec(x):
            _refuse_weights(name, x)
            values, offsets = x.values(), x.offsets()
            offsets = offsets if offsets.shape[0] else offsets.new_zeros(1)  # JaggedTensor.empty() has none
        elif isinstance(x, Tensor) and x.is_nested:
            if x.layout != torch.jagged or x._lengths is not None or x._ragged_idx != 1:
                what = x.layout if x.layout != torch.jagged else "holes" if x._lengths is not None else f"dimension {x._ragged_idx} ragged"
                raise ValueError(f"{name} must have layout torch.jagged, its second dimension ragged and no holes, got {what}")
            values, offsets = x.values(), x.offsets()
        elif isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[0], Tensor):
            values, offsets = x
        else:
            raise TypeError(
                f"{name} must be a JaggedTensor, KeyedJaggedTensor, (values, offsets) pair, nested tensor of jagged layout or Jagged, "
                f"got {type(x).__name__}"
            )
        _check_parts(f"{name}'s ", values, offsets, max_seqlen)
        jagged = cls._unchecked(values, offsets, max_seqlen)
        jagged._container, jagged._keys = x, x.keys() if hasattr(x, "keys") else None
        return jagged

    def unwrap(self, values: Tensor):
        """The kind of container that `wrap` was given, of the same segments, with new values `[L, ...]`."""
        self._check_rows(values)
        x = self._container
        if x is None:
            return self.with_values(values)
        if isinstance(x, (tuple, list)):
            return type(x)((values, x[1]))
        if isinstance(x, Tensor):
            return torch.nested.nested_tensor_from_jagged(values, x.offsets())
        same = dict(lengths=x.lengths_or_none(), offsets=x.offsets_or_none(), weights=x.weights_or_none())
        if hasattr(x, "keys"):
            strides = dict(stride_per_key_per_rank=x.stride_per_key_per_rank()) if x.variable_stride_per_key() else dict(stride=x.stride())
            return type(x)(x.keys(), values, **same, **strides, inverse_indices=x.inverse_indices_or_none())
        return type(x)(values, **same)

    def with_values(self, values: Tensor) -> Jagged:
        """A Jagged of the same segments with other values `[L, ...]`, offsets on their device; it shares the schedules."""
        self._check_rows(values)
        offsets = self.offsets if self.offsets.device == values.device else self.offsets.to(values.device, non_blocking=True)
        return self._copy(values, offsets)

    def to(self, device, non_blocking: bool = False) -> Jagged:
        """The Jagged with its tensors on `device`; it shares the schedules, which follow at their first use."""
        return self._copy(*(x.to(device, non_blocking=non_blocking) for x in (self.values, self.offsets)))

    def pin_memory(self) -> Jagged:
        """The Jagged, its schedules included, in page-locked memory. DataLoader calls it."""
        pinned = self._copy(self.values.pin_memory(), self.offsets.pin_memory())
        for key, schedule in list(self._segmentation.schedules.items()):
            self._segmentation.keep(key, schedule.pin_memory())
        return pinned

    def _copy(self, values: Tensor, offsets: Tensor) -> Jagged:
        if offsets is not self.offsets:
            self._segmentation.lengths_on_host(self.offsets)  # while the offsets are on the host
            remember(offsets, self._segmentation)
        jagged = self._unchecked(values, offsets, self.max_seqlen, self._segmentation)
        jagged._keys = self._keys
        return jagged

    @classmethod
    def _unchecked(cls, values, offsets, max_seqlen: int | None, segmentation: Segmentation | None = None) -> Jagged:
        """A Jagged without checks: a pytree's leaves may be tensors, fake tensors or other objects."""
        jagged = cls.__new__(cls)
        jagged.values, jagged.offsets, jagged.max_seqlen, jagged._container, jagged._keys = values, offsets, max_seqlen, None, None
        if segmentation is None:
            segmentation = segmentation_of(offsets) if isinstance(offsets, Tensor) else Segmentation()
        jagged._segmentation = segmentation
        return jagged

    def _check_rows(self, values: Tensor) -> None:
        if not isinstance(values, Tensor):
            raise TypeError(f"values must be a torch.Tensor, got {type(values).__name__}")
        if values.shape[0] != self.values.shape[0]:
            raise ValueError(f"values must keep the number of rows, {self.values.shape[0]}, got {values.shape[0]}")

    # -- sizes ---------------------------------------------------------------------------------------------------------------

    @property
    def num_segments(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def host_lengths(self) -> Tensor | None:
        """`[B]` lengths on the host, or None if only the device knows them."""
        return self._segmentation.lengths_on_host(self.offsets)

    def __repr__(self) -> str:
        return f"Jagged(values={list(self.values.shape)}, num_segments={self.num_segments}, device={self.values.device})"

    # -- schedules -------------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        *,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
        num_kv_heads: int | None = None,
        queries: Jagged | CandidateIndex | int | None = None,
        rows_per_candidate: int = 1,
        mask: AttentionMask | None = None,
    ) -> Jagged:
        """Build and store the attention schedule on the host, for instance in a DataLoader worker. Returns self.

        Attention with other sizes, another dtype size, mask, queries or `batch_invariant` finds no schedule here: it builds its own on the
        device, with a warning.

        Args:
            num_heads, head_dim, num_kv_heads: of the attention that will use it; for HSTU the larger of head_dim and linear_dim.
            dtype: of its q, k and v, under autocast that of autocast; torch's default dtype if None.
            queries: the query side: None for self-attention, another Jagged, the candidates of each user, or a number of query
                rows for every segment.
            rows_per_candidate: query rows of each candidate, where queries is a CandidateIndex.
            mask: the attention's. A schedule is right for every mask, and balanced for this one; for its num_targets too where they are
                on the side, host or device, that it is built on.

        Raises:
            TypeError: a wrong kind of argument. ValueError: sizes below 1, or lengths that only a device knows.
        """
        if self.host_lengths is None:
            raise ValueError("prepare builds on the host, but the lengths are on a device only; pass host_lengths to Jagged")
        sizes = dict(num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads)
        sizes["dtype"] = torch.get_default_dtype() if dtype is None else dtype
        self._schedule(queries, rows_per_candidate, mask, **sizes, prepares=True)
        return self

    def schedule(
        self,
        *,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_kv_heads: int | None = None,
        queries: Jagged | CandidateIndex | int | None = None,
        rows_per_candidate: int = 1,
        mask: AttentionMask | None = None,
    ) -> TileSchedule | None:
        """The attention schedule with these segments as keys, on the values' device; arguments as in `prepare`.

        Built once and kept: on the host where it knows the lengths of both sides, else on the device without waiting for it. None
        where nothing needs one: on the CPU, and under torch.compile, where the operators build it inside the graph.
        """
        if self.values.device.type == "cpu" or torch.compiler.is_compiling():
            return None
        sizes = dict(num_heads=num_heads, head_dim=head_dim, dtype=dtype, num_kv_heads=num_kv_heads)
        return self._schedule(queries, rows_per_candidate, mask, **sizes)

    def _schedule(
        self, queries, rows_per_candidate, mask, num_heads, head_dim, dtype, num_kv_heads, prepares: bool = False
    ) -> TileSchedule | None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in dict(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rows_per_candidate=rows_per_candidate
        ).items():
            check_size(name, size)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
        queries = self if queries is None else queries
        if not isinstance(queries, (Jagged, CandidateIndex, int)):
            raise TypeError(f"queries must be a Jagged, a CandidateIndex, an int or None, got {type(queries).__name__}")
        if mask is not None and not isinstance(mask, AttentionMask):
            raise TypeError(f"mask must be an AttentionMask, got {type(mask).__name__}")
        mask = None if mask is None or mask.hides_nothing() else mask
        sizes = _Sizes(num_heads, num_kv_heads, head_dim, dtype.itemsize, is_batch_invariant())
        segments = queries if isinstance(queries, int) else queries.segmentation_id
        key = (segments, rows_per_candidate, *sizes, *(mask.params if mask else ()))
        schedule = self._segmentation.schedules.get(key)
        if schedule is None:
            self._segmentation.note_build(_description(queries, rows_per_candidate, mask, sizes), prepares)
            with torch.inference_mode(False):  # a later call may save it for its backward
                schedule = self._build_schedule(queries, rows_per_candidate, mask, sizes, dtype)
            if schedule is None:
                return None
        schedule = schedule.to(self.values.device, non_blocking=True)
        self._segmentation.keep(key, schedule)
        return schedule

    def _build_schedule(
        self, queries, rows_per_candidate: int, mask: AttentionMask | None, sizes: _Sizes, dtype: torch.dtype
    ) -> TileSchedule | None:
        q_offsets, q_lengths, q_rows = self._query_segments(queries, rows_per_candidate)
        heads = dict(num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads)
        if q_lengths is not None and self.host_lengths is not None:
            options = dict(head_dim=sizes.head_dim, dtype=dtype, mask=mask, batch_invariant=sizes.batch_invariant)
            return host_schedule(q_lengths, self.host_lengths, **heads, **options)
        if q_rows is None:
            return None  # candidates' offsets on a device: only the operator knows their number, from q's shape
        device = self.values.device
        problem = AttentionProblem(
            sizes.head_dim, sizes.head_dim, dtype, masked=mask is not None, batch_invariant=sizes.batch_invariant
        )  # fmt: skip
        params, targets = (None, None) if mask is None else (mask.params, mask.num_targets)
        targets = None if targets is None else targets.to(device, non_blocking=True)
        offsets = (x.to(device, non_blocking=True) for x in (q_offsets, self.offsets))
        return device_schedule(problem, *offsets, q_rows, self.values.shape[0], **heads, mask=params, num_targets=targets)

    def _query_segments(self, queries, rows_per_candidate: int) -> tuple[Tensor, Tensor | None, int | None]:
        """Query offsets, host lengths if known, and number of rows if known."""
        if isinstance(queries, Jagged):
            return queries.offsets, queries.host_lengths, queries.values.shape[0]
        if isinstance(queries, CandidateIndex):
            candidates = None if queries.order is None else queries.order.shape[0] * rows_per_candidate
            return queries.query_offsets(rows_per_candidate), queries.query_lengths(rows_per_candidate), candidates
        check_size("queries", queries, at_least=0)
        offsets = torch.arange(self.num_segments + 1, device=self.offsets.device) * queries
        return offsets, torch.full((self.num_segments,), queries), self.num_segments * queries

    @property
    def segmentation_id(self) -> bytes:
        """Equal for all Jagged of the same segments, in every process."""
        return self._segmentation.id


class _Sizes(NamedTuple):
    """What of an attention a schedule is built for and found by, besides its segments and mask."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    batch_invariant: bool


def _description(queries, rows_per_candidate: int, mask: AttentionMask | None, sizes: _Sizes) -> str:
    """What a schedule is built for, as text for a warning."""
    parts = [f"{name}={size}" for name, size in sizes._asdict().items()]
    parts.append(f"queries={queries if isinstance(queries, int) else type(queries).__name__}")
    if isinstance(queries, CandidateIndex):
        parts.append(f"rows_per_candidate={rows_per_candidate}")
    return ", ".join([*parts, f"mask={None if mask is None else mask.params}"])


def _check_parts(whose: str, values, offsets, max_seqlen: int | None) -> None:
    """TypeError or ValueError unless the parts make a Jagged. whose: prefix of their names in errors, "x's " for a container x."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{whose}values must be a torch.Tensor, got {type(values).__name__}")
    check_dense(f"{whose}values", values)
    if values.dim() < 1:
        raise ValueError(f"{whose}values must have shape [L, ...], got {list(values.shape)}")
    check_offsets(f"{whose}offsets", offsets, values.shape[0], max_seqlen)
    check_device(f"{whose}offsets", offsets, values.device, f"{whose or 'the '}values'")


def _refuse_weights(name: str, x) -> None:
    weights = x.weights_or_none()
    if weights is not None and weights.is_floating_point():
        raise ValueError(
            f"{name} must have no floating-point weights, which would not be applied, got weights {list(weights.shape)}; multiply the "
            "values by them, or make the container without them"
        )


def _as_tensor(name: str, x) -> Tensor:
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a tensor or a sequence of ints, got {type(x).__name__}") from None


def _check_host_lengths(host_lengths: Tensor, offsets: Tensor, total: int) -> None:
    segments = offsets.shape[0] - 1
    if host_lengths.device.type != "cpu" or host_lengths.shape != (segments,):
        raise ValueError(f"host_lengths must be [B] = [{segments}] on the host, got {list(host_lengths.shape)} on {host_lengths.device}")
    check_integers("host_lengths", host_lengths)
    if not values_are_checkable(host_lengths):
        return
    if segments and int(host_lengths.min()) < 0:
        raise ValueError(f"host_lengths must not be negative, got {int(host_lengths.min())}")
    if int(host_lengths.sum()) != total:
        raise ValueError(f"host_lengths must add up to the number of rows, {total}, got {int(host_lengths.sum())}")
    if values_are_checkable(offsets) and not torch.equal(host_lengths, offsets.diff().to(host_lengths)):
        raise ValueError(f"host_lengths must be the differences of offsets, {offsets.diff().tolist()}, got {host_lengths.tolist()}")


def wrap_rows(name: str, x, width: int, projection: nn.Module) -> Jagged:
    """A layer's input: TypeError or ValueError unless it is a container of `[L, width]` values that the projection takes."""
    jagged = Jagged.wrap(x, name=name)
    if jagged.values.dim() != 2 or jagged.values.shape[1] != width:
        raise ValueError(f"{name}'s values must have shape [L, {width}], got {list(jagged.values.shape)}")
    check_layer_input(f"{name}'s values", jagged.values, projection)
    return jagged


def check_same_segments(name: str, x: Jagged, other_name: str, other: Jagged) -> None:
    """ValueError unless both have the same number of segments and, if both are KeyedJaggedTensors, of keys.

    Keys of the same names must have the same order.
    """
    if x.num_segments != other.num_segments:
        raise ValueError(f"{name} and {other_name} must have the same number of segments, got {x.num_segments} and {other.num_segments}")
    keys, other_keys = x._keys, other._keys
    if keys is None or other_keys is None or keys == other_keys:
        return
    if len(keys) != len(other_keys) or sorted(keys) == sorted(other_keys):
        raise ValueError(f"{other_name} must have as many keys as {name}, in the same order, {keys}, got {other_keys}")


def wait_for(x):
    """The result of a TorchRec LazyAwaitable, which sharded collections return; any other x unchanged."""
    torchrec = sys.modules.get("torchrec.distributed.types")
    if torchrec is None or not isinstance(x, torchrec.LazyAwaitable):
        return x
    return torchrec.LazyAwaitable._wait_async(x)  # which keeps the result: a second wait() would communicate again


def _is_torchrec(x) -> bool:
    return _is_one_of(x, "JaggedTensor", "KeyedJaggedTensor")


def is_keyed_tensor(x) -> bool:
    """Whether x is TorchRec's KeyedTensor: dense `[B, Σ widths]` values of named features."""
    return _is_one_of(x, "KeyedTensor")


def _is_one_of(x, *names: str) -> bool:
    torchrec = sys.modules.get("torchrec.sparse.jagged_tensor")  # not imported: then x is none of its classes
    return torchrec is not None and isinstance(x, tuple(getattr(torchrec, name) for name in names))
