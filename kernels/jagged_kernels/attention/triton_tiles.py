"""What the portable attention kernels share (triton_forward.py, triton_dq.py, triton_dkdv.py): the
constants of a launch, tiles, and the scores of a block.

    S = scale · q kᵀ + bias,  P = activation(S),  O = output scale · P v    per segment and head
    dV = Pᵀ dO,  dP = dO vᵀ,  dQ = scale · dS k,  dK = scale · dSᵀ q
    softmax:    dS = P ∘ (dP − delta),  delta = rowsum(dO ∘ O);  scores and lse are in base 2
    pointwise:  dS = activation'(S) ∘ dP

Tile: BLOCK_M query rows of a head, over blocks of BLOCK_N keys; for dk and dv, BLOCK_N keys of a
key head, over query groups, the query heads of the key head, and blocks of BLOCK_M query rows. A
program takes tiles from the zigzag schedule, and reads the next tile's bounds while it works on
one. Full blocks come first, without masking; then masked blocks, which the mask or the segment's
end cuts (mask.py).

Operands that a tile loops over are loaded by TMA if they have a descriptor. At most one of those
that it loads once is loaded by TMA: two TMA loads outside a loop wait for one another.
`num_segments` is None with one query group (load_tile). The forward's keys and values may lie in
pages (pages.py): a block lies in one page, so only its first row changes (key_row).

MASK and BIAS are constants of their own in each function: read from OPTIONS where they are passed
on, Triton makes tensors of their fields.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.loads import Rows, load_rows, load_tile
from .bias import key_times
from .dropout import dropout_of_head
from .mask import column_blocks, first_query_row, first_target_column, visible_columns
from .params import BiasKind, MaskParams
from .scales import output_factor
from .triton_bias import bias_block


class Options(NamedTuple):
    """Constants of a launch.

    group: query heads of a key head. tile, block: rows of a tile, and of the blocks that it loops
    over. block_d, block_dv: head dims padded to powers of 2. align: elements that strides count.
    page_rows: as in load_page. buckets: entries of the time table's sums;
    0 if dS is not summed for the bias tables. local_rows: dropout counts rows from their segment's
    start, and does not know the segment.
    """

    group: int
    head_dim: int
    v_dim: int
    block_d: int
    block_dv: int
    precision: str
    mask: MaskParams | None
    bias: BiasKind | None
    masked_stages: int
    tile: int
    block: int
    align: int
    q_shared: bool = False
    kv_shared: bool = False
    query_groups: int = 1
    page_rows: int | None = None
    buckets: int = 0
    local_rows: bool = False


class Call(NamedTuple):
    """What the three kernels are given alike: the segments, the list of tiles, factors, and what
    dropout_of_head takes, None without dropout."""

    q_offsets_ptr: tl.tensor
    kv_offsets_ptr: tl.tensor
    tiles_ptr: tl.tensor
    num_targets_ptr: tl.tensor
    segment_scale_ptr: tl.tensor
    scale: tl.tensor
    act_factor: tl.tensor
    dact_factor: tl.tensor
    output_scale: tl.tensor
    seed_ptr: tl.tensor
    threshold: tl.tensor


class Visible(NamedTuple):
    """Columns `[BLOCK_M, 1]` of a tile's query rows, what they see: visible_columns, and their
    places in the segment."""

    rows: tl.tensor
    bounds: tl.tensor
    places: tl.tensor


class Keys(NamedTuple):
    """What a tile of query rows loops over. scales: pointer to the factors of rows in 8 bits, and
    the strides of their rows and heads; None of other rows."""

    k: Rows
    v: Rows
    scales: tl.tuple


class KeyBlock(NamedTuple):
    """A block of keys: first row, first column, head, and number of keys from there on in the
    segment."""

    row: tl.tensor
    column: tl.tensor
    head: tl.tensor
    num_keys: tl.tensor


@triton.jit
def load_call_tile(call, wave, waves, num_segments):
    """The program's tile in a wave."""
    return load_tile(
        call.tiles_ptr, wave, waves, tl.program_id(0), tl.num_programs(0),
        call.q_offsets_ptr, call.kv_offsets_ptr, num_segments,
    )  # fmt: skip


@triton.jit
def query_rows(tile, OPTIONS: tl.constexpr):
    """A tile's first row in its segment, among all rows and in q, and the number of rows from there
    on in the segment, or under a mask in the tile."""
    ROWS: tl.constexpr = OPTIONS.tile
    MASK: tl.constexpr = OPTIONS.mask
    first = first_query_row(tile.block, tile.q_len, MASK, ROWS, OPTIONS.block)
    num_rows = tile.q_len - first
    if MASK is not None:
        num_rows = tl.minimum(num_rows, ROWS) + tl.minimum(first, 0)
        first = tl.maximum(first, 0)
    row = tile.q_start + first
    q_row = row
    if OPTIONS.q_shared:
        q_row = row - tile.q_start
    return first, row, q_row, num_rows


@triton.jit
def visited_blocks(call, tile, first, num_rows, num_segments, OPTIONS: tl.constexpr):
    """Blocks that a tile of query rows visits, and what its rows see. first: of `query_rows`, as
    num_rows."""
    ROWS: tl.constexpr = OPTIONS.tile
    MASK: tl.constexpr = OPTIONS.mask
    column = first + tile.kv_len - tile.q_len
    first_target = first_target_column(
        call.num_targets_ptr, tile.segment, tile.kv_len, MASK, num_segments
    )
    last = column + tl.minimum(num_rows, ROWS) - 1
    blocks = column_blocks(column, last, tile.kv_len, first_target, MASK, OPTIONS.block)
    rows = (column + tl.arange(0, ROWS))[:, None]
    places = (first + tl.arange(0, ROWS))[:, None]
    if MASK is None:  # the bounds are not read
        return blocks, Visible(rows, (rows, rows, rows), places)
    else:
        return blocks, Visible(rows, visible_columns(rows, first_target, MASK), places)


@triton.jit
def load_keys(keys, block, OPTIONS: tl.constexpr, MASKED: tl.constexpr):
    """k and v of a key block."""
    row, head, num_keys = block.row, block.head, block.num_keys
    BLOCK_N: tl.constexpr = OPTIONS.block
    k = load_rows(keys.k, row, head, num_keys, OPTIONS.head_dim, BLOCK_N, OPTIONS.block_d, MASKED)
    v = load_rows(keys.v, row, head, num_keys, OPTIONS.v_dim, BLOCK_N, OPTIONS.block_dv, MASKED)
    return k, v


@triton.jit
def scaled_keys(k, v, scales, block, DTYPE: tl.constexpr):
    """k and v of a key block in this dtype, from rows in 8 bits and `Keys.scales`."""
    lanes = tl.arange(0, k.shape[0])
    place = (block.row + lanes).to(tl.int64) * scales[1] + block.head.to(tl.int64) * scales[2]
    factors = tl.load(scales[0] + place, mask=lanes < block.num_keys, other=0.0)[:, None]
    return (k.to(tl.float32) * factors).to(DTYPE), (v.to(tl.float32) * factors).to(DTYPE)


@triton.jit
def block_scores(q, k, block, bias, OPTIONS: tl.constexpr):
    """q kᵀ of a key block, plus the bias divided by the scale."""
    BIAS: tl.constexpr = OPTIONS.bias
    if OPTIONS.bias is None:
        return tl.dot(q, tl.trans(k), input_precision=OPTIONS.precision)
    else:
        times = key_times(bias.of_tile, block.column + tl.arange(0, OPTIONS.block), BIAS)
        start = bias_block(
            bias.of_tile, bias.row, block.column, bias.times, times,
            q.shape[0], OPTIONS.block, False, BIAS,
        )  # fmt: skip
        return tl.dot(q, tl.trans(k), start, input_precision=OPTIONS.precision)


@triton.jit
def segment_dropout(call, head, q_start, OPTIONS: tl.constexpr):
    """The Dropout, or None, of a head and the segment of queries that starts at row q_start. The
    rows that share keys are one segment, whose chunks a tile of keys may have."""
    if call.seed_ptr is not None:
        if OPTIONS.local_rows or OPTIONS.kv_shared:
            q_start = q_start - q_start
        return dropout_of_head(call.seed_ptr, call.threshold, head, q_start)


@triton.jit
def segment_factor(call, tile):
    """The output scale of a tile's segment."""
    return output_factor(call.output_scale, call.segment_scale_ptr, tile.segment)
