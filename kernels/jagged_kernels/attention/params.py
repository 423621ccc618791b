"""The arguments of an attention call as named tuples. No triton import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..common.configs import padded_dim
from ..schedule.cost import MaskParams
from ..schedule.host import NOT_LISTED, TileList, num_query_groups
from .pages import Pages
from .select import AttentionProblem

if TYPE_CHECKING:
    from ..schedule.host import TileSchedule


class BiasKind(NamedTuple):
    """What a RelativeBias has, as a constant of a launch. boundaries: a power of 2 not below their
    number; 0 without a time table. stored: its buckets are in memory (stored_buckets.py)."""

    position: bool
    boundaries: int
    query_times: bool
    shift: bool
    stored: bool = False


def are_same(q_offsets: Tensor, kv_offsets: Tensor) -> bool:
    """Whether the offsets are one tensor, which may have gone through an operator or a graph."""
    return q_offsets is kv_offsets or (
        q_offsets.data_ptr() == kv_offsets.data_ptr() and q_offsets.shape == kv_offsets.shape
    )


class Segments(NamedTuple):
    """The segments of an attention, for a kernel with the tiles of one of the two sides.

    Attributes:
        q_offsets, kv_offsets: offsets of the rows of queries and of keys, in their normal form.
            `[B + 1]`; n query groups have `[n · B + 1]` q_offsets: the segments b, B + b, ... of q
            read the keys of segment b. Equal offsets are one tensor: kernels compare them by
            identity.
        q_shared: every segment takes all rows of q; q_offsets count output rows.
        kv_shared: every segment takes all rows of k and v. For a kernel, all query rows are then
            one segment.
        has_tail: whether there may be rows behind the last segment.
        pages: where the keys lie, if they are in pages; there is then one query group.
        tiles: of queries or of keys, within an operator.
        long_only: kernels leave out the tiles of short segments.
    """

    q_offsets: Tensor
    kv_offsets: Tensor
    q_shared: bool = False
    kv_shared: bool = False
    has_tail: bool = False
    pages: Pages | None = None
    tiles: TileList = NOT_LISTED
    long_only: bool = False

    @property
    def num_segments(self) -> int:
        """Of queries."""
        return self.q_offsets.shape[0] - 1

    @property
    def query_groups(self) -> int:
        queries, keys = self.q_offsets.shape[0] - 1, self.kv_offsets.shape[0] - 1
        return 1 if queries == keys else num_query_groups("q_offsets", queries, "kv_offsets", keys)

    @property
    def segments_per_group(self) -> int | None:
        """What kernels call `num_segments`: None with one query group."""
        return None if self.query_groups == 1 else self.kv_offsets.shape[0] - 1

    @property
    def in_8_bits(self) -> bool:
        """Whether the keys lie in pages of 8 bits."""
        return self.pages is not None and self.pages.scales is not None

    @property
    def share_keys(self) -> bool:
        """Whether several segments of queries read the same keys."""
        return self.kv_shared or self.q_offsets.shape[0] != self.kv_offsets.shape[0]

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys are the same rows: their offsets are one tensor, which may have
        gone through an operator or a graph."""
        if self.q_shared or self.kv_shared or self.pages is not None:
            return False
        return are_same(self.q_offsets, self.kv_offsets)

    def num_output_rows(self, q: Tensor) -> int:
        return q.shape[0] * self.num_segments if self.q_shared else q.shape[0]

    def num_keys(self, k: Tensor) -> int:
        """Keys of all segments together."""
        return k.shape[0] if self.pages is None else self.pages.num_rows


class AttentionParams(NamedTuple):
    """What is computed, and how.

    Attributes:
        scale: factor of q kᵀ.
        activation: a public name.
        mask: None: everything is visible.
        output_scale: factor of the output.
        batch_invariant: kernels, tiles and splits do not depend on the number of rows or segments.
        implementation: "auto", "triton" or "hopper".
        workspace: limit in bytes of the memory in which the backward stores dS; None: a default
            limit.
        table_gradients: the backward also computes the gradients of position_bias and time_bias.
        num_targets: `[B]`, if the mask has targets.
        segment_scale: fp32, one factor of the output for each segment of queries; replaces
            output_scale if not None.
        position_bias, time_bias, timestamps, boundaries, query_timestamps, query_shift: the fields
            of `RelativeBias`. Tables are `[H or 1, entries]`, in fp32, or fp64 with fp64 operands.
            None without them.
        buckets, first_blocks: `StoredBuckets`, or None.
        dropout_p: probability with which a weight of P becomes 0, a multiple of 2^-16 below 1.
        dropout_seed: int64 `[]`, on the operands' device; None if dropout_p is 0.
    """

    scale: float
    activation: str = "softmax"
    mask: MaskParams | None = None
    output_scale: float = 1.0
    batch_invariant: bool = False
    implementation: str = "auto"
    workspace: int | None = None
    table_gradients: bool = False
    num_targets: Tensor | None = None
    segment_scale: Tensor | None = None
    position_bias: Tensor | None = None
    time_bias: Tensor | None = None
    timestamps: Tensor | None = None
    boundaries: Tensor | None = None
    query_timestamps: Tensor | None = None
    query_shift: Tensor | None = None
    buckets: Tensor | None = None
    first_blocks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None

    @property
    def dropout_threshold(self) -> float | None:
        """How many of 2^16 numbers drop a weight, as kernels take it; None without dropout."""
        return None if self.dropout_seed is None else self.dropout_p * 2**16

    @property
    def has_bias(self) -> bool:
        return self.position_bias is not None or self.time_bias is not None

    @property
    def bias_kind(self) -> BiasKind | None:
        if self.position_bias is None and self.time_bias is None:
            return None
        boundaries = 0 if self.time_bias is None else padded_dim(self.time_bias.shape[1] - 1)
        return BiasKind(
            self.position_bias is not None,
            boundaries,
            self.query_timestamps is not None,
            self.query_shift is not None,
            self.buckets is not None,
        )


class AttentionCall(NamedTuple):
    """One attention, as every implementation takes it: checked, on one device.

    Attributes:
        q, k, v: `[rows, heads, dim]`.
        schedule: the tiles of these segments, for kernels; None: they are listed on the device.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    segments: Segments
    params: AttentionParams
    schedule: TileSchedule | None = None

    def problem(self, **others: Any) -> AttentionProblem:
        """What the choice of kernels depends on: what the call says, and others."""
        q, k, v, segments, params, _ = self
        return AttentionProblem(
            head_dim=q.shape[2],
            v_dim=v.shape[2],
            dtype=q.dtype,
            implementation=params.implementation,
            activation=params.activation,
            masked=params.mask is not None,
            biased=params.has_bias,
            timed=params.time_bias is not None,
            dropout=params.dropout_seed is not None,
            batch_invariant=params.batch_invariant,
            scaled=segments.in_8_bits,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            **others,
        )


# -- the arguments of the registered operators: an AttentionCall in groups -------------------------


class SegmentTensors(NamedTuple):
    """The tensors of the segments, and of the schedule's tiles of queries and of keys."""

    q_offsets: Tensor
    kv_offsets: Tensor
    num_targets: Tensor | None
    segment_scale: Tensor | None
    page_table: Tensor | None
    tiles: Tensor | None
    num_tiles: Tensor | None
    key_tiles: Tensor | None
    num_key_tiles: Tensor | None
    dropout_seed: Tensor | None = None  # exported programs may hold lists without the last two
    page_scales: Tensor | None = None


class Options(NamedTuple):
    """Flags and sizes, as integers; -1 stands for None. tile_rows, key_tile_rows: `TileList.block`
    of the schedule's tiles."""

    q_shared: int
    kv_shared: int
    has_tail: int
    batch_invariant: int
    table_gradients: int
    page_rows: int
    num_keys: int
    workspace: int
    tile_rows: int
    key_tile_rows: int


class Arguments(NamedTuple):
    """The arguments of an operator: the fields of `AttentionCall`.

    Attributes:
        segments, options: the fields of `SegmentTensors` and of `Options`.
        bias: position_bias, time_bias, timestamps, boundaries, query_timestamps and query_shift;
            then buckets and first_blocks, if they are stored.
        mask: the fields of `MaskParams`.
        factors: scale, output_scale and dropout_p, which is left out where it is 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    segments: list[Tensor | None]
    bias: list[Tensor | None]
    mask: list[int] | None
    options: list[int]
    factors: list[float]
    activation: str
    implementation: str


_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor?[] segments, Tensor?[] bias, SymInt[]? mask,"
    " SymInt[] options, float[] factors, str activation, str implementation"
)
FORWARD_SCHEMA = f"({_SCHEMA}) -> (Tensor, Tensor)"
PAGED_SCHEMA = f"({_SCHEMA}) -> Tensor"
BACKWARD_SCHEMA = (
    f"(Tensor do, Tensor?[] results, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
PACKED_BACKWARD_SCHEMA = (
    "(Tensor do, Tensor?[] results, Tensor(a!) of_queries, Tensor(b!)? of_keys, int[] columns,"
    f" {_SCHEMA}) -> (Tensor, Tensor)"
)


def pack(
    call: AttentionCall, queries: TileList = NOT_LISTED, keys: TileList = NOT_LISTED
) -> Arguments:
    """The arguments of an operator. queries, keys: the schedule's tiles."""
    q, k, v, (q_offsets, kv_offsets, q_shared, kv_shared, has_tail, pages, *_), p, _ = call
    table, page_rows, num_keys, scales = None, -1, -1, None
    if pages is not None:
        table, page_rows, num_keys = pages.table, pages.page_rows, pages.num_rows
        scales = pages.scales
    tiles, num_tiles, tile_rows = queries
    key_tiles, num_key_tiles, key_tile_rows = keys
    of_rows = [q_offsets, kv_offsets, p.num_targets, p.segment_scale]
    of_kernels = [table, tiles, num_tiles, key_tiles, num_key_tiles, p.dropout_seed, scales]
    tables = [p.position_bias, p.time_bias]
    of_tables = [p.timestamps, p.boundaries, p.query_timestamps, p.query_shift]
    of_tables += [] if p.buckets is None else [p.buckets, p.first_blocks]
    flags = [int(q_shared), int(kv_shared), int(has_tail)]
    flags += [int(p.batch_invariant), int(p.table_gradients)]
    sizes = [
        page_rows,
        num_keys,
        -1 if p.workspace is None else p.workspace,
        -1 if tile_rows is None else tile_rows,
        -1 if key_tile_rows is None else key_tile_rows,
    ]
    mask, factors = None if p.mask is None else list(p.mask), [p.scale, p.output_scale]
    factors += [] if p.dropout_seed is None else [p.dropout_p]
    tensors, bias, options = of_rows + of_kernels, tables + of_tables, flags + sizes
    return Arguments(q, k, v, tensors, bias, mask, options, factors, p.activation, p.implementation)


def unpack(*arguments: Any) -> tuple[AttentionCall, TileList, TileList]:
    """Undo `pack`. The call has no schedule."""
    q, k, v, tensors, bias, mask, options, factors, activation, implementation = arguments
    t, o = SegmentTensors(*tensors), Options(*options)
    pages = None
    if t.page_table is not None:
        pages = Pages(t.page_table, o.page_rows, o.num_keys, t.page_scales)
    segments = Segments(
        t.q_offsets, t.kv_offsets, bool(o.q_shared), bool(o.kv_shared), bool(o.has_tail), pages
    )
    optional = o.workspace, o.tile_rows, o.key_tile_rows
    workspace, rows, key_rows = [None if x < 0 else x for x in optional]
    scale, output_scale, *dropout = factors
    dropout_p = dropout[0] if dropout else 0.0
    params = AttentionParams(
        scale, activation, None if mask is None else MaskParams(*mask), output_scale,
        bool(o.batch_invariant), implementation, workspace, bool(o.table_gradients), t.num_targets,
        t.segment_scale, *bias, dropout_p=dropout_p, dropout_seed=t.dropout_seed,
    )  # fmt: skip
    queries = TileList(t.tiles, t.num_tiles, rows)
    keys = TileList(t.key_tiles, t.num_key_tiles, key_rows)
    return AttentionCall(q, k, v, segments, params), queries, keys


# -- within an operator ----------------------------------------------------------------------------


class Operands(NamedTuple):
    """q, k, v and out `[rows, heads, dim]`, and with softmax the log-sum-exp of the scores in base
    2, `[H, rows]`. out is None if the backward does not read it."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor


class Gradients(NamedTuple):
    """do: gradient of the output. dq, dk, dv: the backward's results. delta: rowsum(dO ∘ O), which
    one kernel writes, another reads."""

    do: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor


class PackedGradients(NamedTuple):
    """dq, dk and dv as columns of one tensor, or of one for the queries and one for the keys.

    Attributes:
        of_queries: `[rows, width]`; of queries that all segments share, on a GPU, fp32 with rows
            for each segment. of_keys: the same of keys, or None: columns of of_queries, whose
            first rows are those of the keys.
        columns: the first ones of dq, dk and dv.
    """

    of_queries: Tensor
    of_keys: Tensor | None
    columns: list[int]

    @classmethod
    def empty(
        cls, operands: Sequence[Tensor], together: bool, rows: tuple[int, int] | None = None
    ) -> PackedGradients:
        """Of q, k and v `[rows, heads, dim]`: `[q | k | v]` if they are parts of one projection,
        else q, and `[k | v]`. rows: of these tensors, if they are more than the operands'."""
        q, k, _ = operands
        rows = rows or (q.shape[0], k.shape[0])
        widths = [x.shape[1] * x.shape[2] for x in operands]
        if together:
            out = q.new_empty(rows[0], sum(widths))
            return cls(out, None, [0, widths[0], widths[0] + widths[1]])
        of_queries = q.new_empty(rows[0], widths[0])
        return cls(of_queries, k.new_empty(rows[1], sum(widths[1:])), [0, 0, widths[1]])

    def parts(self, q: Tensor, k: Tensor, v: Tensor, q_shared: bool) -> list[Tensor]:
        """Where dq, dk and dv are, as views in the shapes of q, k and v; dq with the rows of all
        segments if they share q. A single row has the stride of many: it runs the same kernels."""
        keys = self.of_queries if self.of_keys is None else self.of_keys
        rows = self.of_queries.shape[0] if q_shared else q.shape[0]
        shapes = (rows, *q.shape[1:]), k.shape, v.shape
        return [
            out.as_strided(shape, (out.stride(0), shape[2], 1), out.storage_offset() + first)
            for out, first, shape in zip((self.of_queries, keys, keys), self.columns, shapes)
        ]


def empty_table_gradients(params: AttentionParams, like: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors of the shapes of the tables' gradients; `[0]` for a table that gets none."""
    if not params.table_gradients:
        return like.new_empty(0), like.new_empty(0)
    tables = params.position_bias, params.time_bias
    dposition, dtime = (
        like.new_empty(0) if table is None else torch.empty_like(table) for table in tables
    )
    return dposition, dtime
