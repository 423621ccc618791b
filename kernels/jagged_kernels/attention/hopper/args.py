"""Arguments of the attention kernels for Hopper: one set of structs for all of them, on the host
and in the kernels. A field that a kernel does not read is None.

TMA descriptors and the activation are arguments of their own: Triton's launcher expands descriptors
at the top level alone, and its disk cache looks for a function's source there.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.pipeline import Output, Ring
from ..bias import Bias, TableSums

# Arguments of their own because Triton specialises all that is in a tuple: each number's
# divisibility by 16 and each pointer's alignment would be another compiled kernel.
UNSPECIALISED = dict(
    do_not_specialize=["num_segments", "num_blocks"],
    do_not_specialize_on_alignment=["num_tiles_ptr", "page_table_ptr"],
)


class Arguments(NamedTuple):
    """What all kernels are given.

    Attributes:
        tiles_ptr: the list of tiles. next_tile_ptr: how many of them have been taken, 0; None: the
            zigzag assigns them.
        q_offsets_ptr, kv_offsets_ptr: of the segments that the tiles belong to.
        num_targets_ptr: None unless the mask has targets.
        scale, act_factor, dact_factor, output_scale: of activations.activation_factors the second
            and third. segment_scale_ptr: replaces output_scale unless it is None.
        out_ptr: contiguous `[rows, heads, dim]`.
        dq_ptr, dk_ptr, dv_ptr: `[rows, heads, dim]`, whose heads follow one another.
        lse_ptr, delta_ptr: softmax's numbers of the query rows, fp32 `[H, rows]`: log-sum-exp of
            the scores, base 2, and rowsum(dO ∘ O).
        added_ptr: of the one-pass backward: int32 `[H, num_blocks]`, how many tiles have been added
            to a block of dq.
        seed_ptr, threshold: what dropout_of_head takes; None without dropout. act_factor and
            dact_factor then have the factor of weights that are kept.
    """

    tiles_ptr: gl.tensor
    next_tile_ptr: gl.tensor
    q_offsets_ptr: gl.tensor
    kv_offsets_ptr: gl.tensor
    num_targets_ptr: gl.tensor
    scale: gl.tensor
    act_factor: gl.tensor
    dact_factor: gl.tensor
    output_scale: gl.tensor
    segment_scale_ptr: gl.tensor
    out_ptr: gl.tensor = None
    lse_ptr: gl.tensor = None
    delta_ptr: gl.tensor = None
    dq_ptr: gl.tensor = None
    dk_ptr: gl.tensor = None
    dv_ptr: gl.tensor = None
    added_ptr: gl.tensor = None
    seed_ptr: gl.tensor = None
    threshold: gl.tensor = None


class Schedule(NamedTuple):
    """The tiles of a launch and the segments that they belong to.

    num_segments: number of key segments; None with one query group. num_rows: query rows of all
    segments, from one head to the next in lse and delta.
    """

    tiles_ptr: gl.tensor
    num_tiles_ptr: gl.tensor
    q_offsets_ptr: gl.tensor
    kv_offsets_ptr: gl.tensor
    num_segments: gl.tensor
    num_targets_ptr: gl.tensor
    num_rows: gl.tensor
    next_tile_ptr: gl.tensor


class Options(NamedTuple):
    """Constants of a launch. group: query heads per key head. dq_stride, dk_stride, dv_stride: of
    the rows of the gradients, which may be parts of one tensor. has_sums: dS is summed for the bias
    tables. local_rows: as in triton_tiles.Options. The next ones are HopperConfig's.
    activation: function of activations.py, None with softmax; `with_activation` sets it."""

    heads: int
    group: int = 1
    head_dim: int | None = None
    v_dim: int | None = None
    mask: tuple | None = None
    bias: tuple | None = None
    q_shared: bool = False
    page_rows: int | None = None
    dq_stride: int | None = None
    dk_stride: int | None = None
    dv_stride: int | None = None
    kv_shared: bool = False
    query_groups: int = 1
    has_sums: bool = False
    local_rows: bool = False
    consumers: int = 1
    stages: int = 1
    v_stages: int = 1
    row_stages: int = 1
    registers: int = 24
    q_in_registers: bool = False
    block: int = 64
    whole_blocks: bool = False
    activation: object = None


@gluon.constexpr_function
def with_activation(options, activation):
    """The Options of a kernel as constants that its functions may pass on. activation is the last
    field: Triton's own tuple, which newer versions pass, has no `_replace`."""
    return Options(*(gl.constexpr(x) for x in (*list(options)[:-1], activation)))


class Rings(NamedTuple):
    """Buffers in shared memory. Of a consumer's own rows there is a ring for each consumer. lse,
    delta: fp32 `[stages, rows]`, guarded by the barriers of q. tail: barrier of the tail's rows.
    buckets: of bias.make_buckets, guarded by the barriers of the ring that a tile loops over."""

    q: Ring = None
    do: Ring = None
    k: Ring = None
    v: Ring = None
    lse: gl.shared_memory_descriptor = None
    delta: gl.shared_memory_descriptor = None
    tail: gl.shared_memory_descriptor = None
    buckets: gl.shared_memory_descriptor = None


class Outputs(NamedTuple):
    """What a kernel stores through epilogue buffers."""

    out: Output = None
    dq: Output = None
    dk: Output = None
    dv: Output = None
    buffers: gl.shared_memory_descriptor = None


class Kernel(NamedTuple):
    """What a kernel hands to its warps.

    num_tiles: of the list, for short queries. num_blocks: of Arguments.added_ptr. page_table_ptr:
    None unless keys and values lie in pages. exchange: buffers and barriers between consumers and
    other warps. ranges, scratch: a tuple of memory for each consumer, of bias.make_ranges and
    bias.make_scratch. queue: a TileQueue.
    """

    args: Arguments
    schedule: Schedule
    rings: Rings
    queue: gl.tensor
    outputs: Outputs = None
    num_tiles: gl.tensor = None
    num_blocks: gl.tensor = None
    page_table_ptr: gl.tensor = None
    q_desc: gl.tensor = None
    do_desc: gl.tensor = None
    k_desc: gl.tensor = None
    v_desc: gl.tensor = None
    buckets_desc: gl.tensor = None
    exchange: gl.tensor = None
    bias: Bias = None
    ranges: gl.tensor = None
    sums: TableSums = None
    scratch: gl.tensor = None
