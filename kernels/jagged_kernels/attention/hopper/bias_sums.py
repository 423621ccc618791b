"""Sums of dS for the gradients of a RelativeBias's tables, in the kernels for Hopper (bias.py).

The gradient of the position table is a sum over each diagonal of dS. A thread first adds its two
rows, whose diagonals meet if one row is moved by 8 columns: 18 sums of 32 elements. A consumer
writes them to shared memory in rows of 129 elements and reads them in rows of 130, so that a
diagonal becomes a column. Where Triton cannot express that, it writes the block to global memory
and reads it along the diagonals. It adds the columns' sums to its own part of global memory. Each
element there is only ever added to by one consumer, in the order of its blocks, so the result is
deterministic.

Sums of the time table's buckets are each thread's own. Neighbouring scores of a row are mostly in
one bucket: a thread sums them before it adds. In a block of few buckets, it sums each bucket. Of
stored buckets, it sums eight scores at a time where a warp's threads have eight equal ones.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.gluon_api import reinterpret, reinterprets_padding, thread_barrier
from ...common.pipeline import WARPGROUP_ROWS
from ..bias import first_entry
from .bias import of_each_consumer

THREADS = 128  # of a consumer
# buckets in a block up to which dS is summed for one after the other
SUMMED_ONE_BY_ONE = gl.constexpr(4)
SHARED_SCRATCH = gl.constexpr(reinterprets_padding)
# elements of global scratch memory of a consumer
BLOCK_OF_SCRATCH = None if reinterprets_padding else 64 * 64
FOLDED_ROWS = gl.constexpr(32)  # half of a block's rows, 8 of each warp
COLUMNS_OF_SCRATCH = gl.constexpr(128)  # a block of 64 by 64 has 127 diagonals


class SumsOfTile(NamedTuple):
    """Where a consumer adds its rows' dS, times `factor`: its part of the position table at
    distance 0, and of the time table, both at the tile's head, and its scratch memory. num_rows:
    its rows in the segment."""

    position_ptr: gl.tensor
    time_ptr: gl.tensor
    scratch: gl.shared_memory_descriptor
    num_rows: gl.tensor
    factor: gl.tensor


@gluon.constexpr_function
def _padded(shape, pad):
    """32 rows of 128 elements, each followed by padding. Further padding, behind 2 and 8 rows,
    keeps writes off each other's banks."""
    padding = [[128, pad], [2 * 128, 8], [8 * 128, 8 * pad]]
    return gl.PaddedSharedLayout.with_identity_for(padding, shape, list(range(len(shape)))[::-1])


@gluon.constexpr_function
def _column_layout(rows):
    """One column per thread of a warpgroup."""
    return gl.BlockedLayout([rows, 1], [1, 32], [1, 4], [1, 0])


@gluon.jit
def _zeroed_scratch():
    scratch = gl.allocate_shared_memory(
        gl.float32, [FOLDED_ROWS, COLUMNS_OF_SCRATCH], _padded([FOLDED_ROWS, COLUMNS_OF_SCRATCH], 2)
    )
    scratch.store(
        gl.zeros([FOLDED_ROWS, COLUMNS_OF_SCRATCH], gl.float32, _column_layout(FOLDED_ROWS))
    )
    return scratch


@gluon.jit
def make_scratch(CONSUMERS: gl.constexpr):
    """Shared scratch memory of each consumer, 0 at first."""
    if not SHARED_SCRATCH:
        return 0, 0, 0
    else:
        return of_each_consumer(_zeroed_scratch, CONSUMERS)


@gluon.jit
def sums_of_tile(sums, bias, scratch, part, head, num_rows, factor, KIND: gl.constexpr):
    """The SumsOfTile of a consumer; part: its number among all consumers of the grid."""
    position_ptr, time_ptr = 0, 0
    if KIND.position and not SHARED_SCRATCH:
        scratch = sums.scratch_ptr + part.to(gl.int64) * (WARPGROUP_ROWS * WARPGROUP_ROWS)
    if KIND.position:
        of_head = head.to(gl.int64) * bias.position_stride + bias.num_positions // 2
        position_ptr = sums.position_ptr + part.to(gl.int64) * sums.position_stride + of_head
    if KIND.boundaries > 0:
        time_ptr = (
            sums.time_ptr
            + part.to(gl.int64) * sums.time_stride
            + head.to(gl.int64) * sums.time_head_stride
        )
    return SumsOfTile(position_ptr, time_ptr, scratch, num_rows, factor)


@gluon.jit
def add_to_tables(ds, buckets, first, bias, sums, KIND: gl.constexpr):
    """Add a consumer's dS of the key block from `first` on, `[64, 64]`, to its sums. buckets: with
    a time table, the block's Buckets, or its stored buckets."""
    num_rows = gl.where(bias.of_tile.own > 0, sums.num_rows, 0)
    if num_rows < WARPGROUP_ROWS:
        rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, ds.type.layout))[:, None]
        ds = gl.where(rows < num_rows, ds, 0.0)
    if KIND.stored:
        _add_stored_buckets(ds, buckets, sums)
        thread_barrier()  # all warps have read the buckets
    if KIND.position:
        _add_diagonals(
            ds,
            sums.position_ptr
            + first_entry(bias.of_tile, bias.row, first, WARPGROUP_ROWS, ds.shape[1]),
            sums,
        )
    if KIND.boundaries > 0 and not KIND.stored:
        _add_bucket_sums(ds * sums.factor, buckets, sums.time_ptr)


@gluon.jit
def _column_groups(x):
    """The 8 column groups of `[..., 2, 2, 2]`, the bits of a group's number, the lowest first."""
    low, high = gl.split(x)
    low_0, low_1 = gl.split(low)
    high_0, high_1 = gl.split(high)
    x0, x1 = gl.split(low_0)
    x2, x3 = gl.split(low_1)
    x4, x5 = gl.split(high_0)
    x6, x7 = gl.split(high_1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def _store_folded(scratch, columns, PARITY: gl.constexpr):
    """Add rows r and r + 8 of each warp, the latter moved by 8 columns so that diagonals meet, and
    store the 72 columns of the sums from 56 on. A thread holds both rows. columns: the even or the
    odd ones of a block, `[64, 32]`."""
    upper, lower = gl.split(columns.reshape([4, 2, 8, 2, 2, 2, 4]).permute((0, 2, 6, 5, 4, 3, 1)))
    u = _column_groups(upper)
    v = _column_groups(lower)
    sums = (
        v[0],
        u[0] + v[1],
        u[1] + v[2],
        u[2] + v[3],
        u[3] + v[4],
        u[4] + v[5],
        u[5] + v[6],
        u[6] + v[7],
        u[7],
    )
    for group in gl.static_range(9):
        scratch.slice(28 + 4 * group, 4, 1).slice(PARITY, 1, 2).store(
            sums[group].reshape([FOLDED_ROWS, 4, 1])
        )


@gluon.jit
def _add_diagonals(ds, ptr, sums):
    """ptr: to the sum of the block's first row and first column. Column s of the scratch, read in
    rows of 130, holds diagonal s - 64."""
    ROWS: gl.constexpr = FOLDED_ROWS if SHARED_SCRATCH else WARPGROUP_ROWS
    CHUNK: gl.constexpr = 16
    COLUMNS: gl.constexpr = _column_layout(CHUNK)
    L: gl.constexpr = gl.SliceLayout(0, COLUMNS)
    total = gl.zeros([COLUMNS_OF_SCRATCH], gl.float32, L)
    thread_barrier()  # the previous block has been read
    if SHARED_SCRATCH:
        SHAPE: gl.constexpr = [FOLDED_ROWS, COLUMNS_OF_SCRATCH // 2, 2]
        written = reinterpret(sums.scratch, gl.float32, SHAPE, _padded(SHAPE, 1))
        even, odd = gl.split(ds.reshape([WARPGROUP_ROWS, WARPGROUP_ROWS // 2, 2]))
        _store_folded(written, even, 0)
        _store_folded(written, odd, 1)
    else:
        rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, ds.type.layout))[:, None]
        columns = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(0, ds.type.layout))[None, :]
        gl.store(sums.scratch + rows * WARPGROUP_ROWS + columns, ds)
    thread_barrier()
    for chunk in gl.static_range(ROWS // CHUNK):
        if SHARED_SCRATCH:
            part = sums.scratch.slice(CHUNK * chunk, CHUNK).load(COLUMNS)
        else:
            row = CHUNK * chunk + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COLUMNS))[:, None]
            column = row + gl.arange(0, COLUMNS_OF_SCRATCH, layout=L)[None, :] - 64
            inside = (column >= 0) & (column < WARPGROUP_ROWS)
            part = gl.load(sums.scratch + row * WARPGROUP_ROWS + column, mask=inside, other=0.0)
        total += gl.sum(part, 0)
    diagonals = gl.arange(0, COLUMNS_OF_SCRATCH, layout=L) - 64
    # Diagonal -64 does not exist. Its entry may be another consumer's, or not in memory.
    gl.atomic_add(ptr + diagonals, total * sums.factor, mask=diagonals > -64, sem="relaxed")


@gluon.constexpr_function
def _add_runs():
    """PTX that adds a thread's scores, of two rows, to its sums of each bucket. It sums runs of
    equal buckets in registers. Inputs: dS, the buckets, and the address of the sum of bucket 0."""
    lines = ["{ .reg .pred ends; .reg .b64 address; .reg .f32 run;"]
    for row in (0, 1):
        registers = [pair + 2 * row + 4 * group for group in range(8) for pair in (0, 1)]
        lines.append("mov.f32 run, 0f00000000;")
        for register, following in zip(registers, [*registers[1:], None]):
            lines.append(f"add.f32 run, run, ${32 + register};")
            ends = "" if following is None else "@ends "
            if following is not None:
                lines.append(f"setp.ne.s32 ends, ${64 + register}, ${64 + following};")
            lines.append(f"{ends}mad.wide.s32 address, ${64 + register}, {4 * THREADS}, $96;")
            lines.append(f"{ends}red.relaxed.gpu.global.add.f32 [address], run;")
            if following is not None:
                lines.append("@ends mov.f32 run, 0f00000000;")
    lines += [f"mov.b32 ${register}, 0;" for register in range(32)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _add_bucket():
    """PTX that adds a thread's scores of one bucket to its sum of this bucket. Inputs: dS, the
    buckets, the bucket, and the address of the sum of bucket 0."""
    lines = ["{ .reg .pred same; .reg .b64 address; .reg .f32 sum;", "mov.f32 sum, 0f00000000;"]
    for register in range(32):
        lines += [
            f"setp.eq.s32 same, ${64 + register}, $96;",
            f"@same add.f32 sum, sum, ${32 + register};",
        ]
    lines += [
        f"mad.wide.s32 address, $96, {4 * THREADS}, $128;",
        "red.relaxed.gpu.global.add.f32 [address], sum;",
    ]
    lines += [f"mov.b32 ${register}, 0;" for register in range(32)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _sum_constraints(*inputs):
    """Of PTX that writes nothing: its outputs are not used."""
    return ",".join(["=r"] * 32 + [kind for kind in inputs for _ in range(32)])


@gluon.jit
def _add_bucket_sums(ds, buckets, ptr):
    """Each thread adds its scores' dS to its own sums of the buckets, THREADS elements apart; ptr:
    to the consumer's first. It sums few buckets one by one, and runs of equal buckets if there may
    be more."""
    L: gl.constexpr = ds.type.layout
    sums = _sums_of_thread(ds, ptr)
    if buckets.last - buckets.first < SUMMED_ONE_BY_ONE:
        for bucket in range(buckets.first, buckets.last + 1):
            bucket_of_all = gl.full(ds.shape, bucket, gl.int32, L)
            gl.inline_asm_elementwise(
                _add_bucket(), _sum_constraints("f", "r", "r", "l"),
                [ds, buckets.of_scores, bucket_of_all, sums], dtype=gl.int32, is_pure=False,
                pack=32,
            )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            _add_runs(), _sum_constraints("f", "r", "l"), [ds, buckets.of_scores, sums],
            dtype=gl.int32, is_pure=False, pack=32,
        )  # fmt: skip


@gluon.jit
def _sums_of_thread(ds, ptr):
    """Addresses of each thread's sum of bucket 0."""
    L: gl.constexpr = ds.type.layout
    rows = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, L))[:, None]
    columns = gl.arange(0, ds.shape[1], layout=gl.SliceLayout(0, L))[None, :]
    thread = ((rows >> 4) * 8 + (rows & 7)) * 4 + ((columns & 6) >> 1)
    return (ptr + thread).to(gl.int64)


@gluon.constexpr_function
def add_groups():
    """PTX that adds a thread's scores to its sums of each bucket. It sums runs of equal buckets in
    registers: eight scores at a time, of two rows and four columns, if each thread of a warp has
    eight equal buckets. Inputs: dS and the buckets in the order of their bytes in memory, the
    address of the sum of bucket 0, and the factor of dS."""
    ds, words, ptr, factor = 32, 64, 72, 104

    def add(score):
        """A score, or a sum of scores, of bucket `next`."""
        return [
            "setp.ne.s32 ends, next, bucket;",
            "@ends red.relaxed.gpu.global.add.f32 [address], run;",
            "selp.f32 run, 0f00000000, run, ends;",
            "mov.b32 bucket, next;",
            f"mad.wide.u32 address, bucket, {4 * THREADS}, ${ptr};",
            f"fma.rn.f32 run, {score}, ${factor}, run;",
        ]

    lines = [
        "{ .reg .pred other, ends; .reg .b64 address; .reg .f32 run, sum;",
        ".reg .b32 bucket, next, all;",
        f"and.b32 bucket, ${words}, 255;",
        f"mad.wide.u32 address, bucket, {4 * THREADS}, ${ptr};",
        "mov.f32 run, 0f00000000;",
    ]
    for group in range(4):
        first, second = words + 2 * group, words + 2 * group + 1
        scores = [ds + 8 * group + i for i in range(8)]
        lines += [
            f"prmt.b32 all, ${first}, 0, 0x0000;",
            f"setp.ne.s32 other, ${first}, all;",
            f"setp.ne.or.s32 other, ${second}, all, other;",
            "vote.sync.any.pred other, other, 0xffffffff;",
            f"@other bra ONE_BY_ONE{group};",
            f"add.f32 sum, ${scores[0]}, ${scores[1]};",
            *(f"add.f32 sum, sum, ${x};" for x in scores[2:]),
            "and.b32 next, all, 255;",
            *add("sum"),
            f"bra DONE{group};",
            f"ONE_BY_ONE{group}:",
        ]
        # later rows and earlier columns first: the distance falls along this order
        for row, column in ((1, 0), (0, 0), (1, 1), (0, 1)):
            for pair in (0, 1):
                byte = row + 2 * column
                lines += [
                    f"prmt.b32 next, ${words + 2 * group + pair}, 0, 0x444{byte};",
                    *add(f"${scores[byte + 4 * pair]}"),
                ]
        lines.append(f"DONE{group}:")
    lines.append("red.relaxed.gpu.global.add.f32 [address], run;")
    lines += [f"mov.b32 ${register}, 0;" for register in range(32)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _group_constraints():
    inputs = ["f"] * 32 + ["r"] * 8 + ["l"] * 32 + ["f"] * 32
    return ",".join(["=r"] * 32 + inputs)


@gluon.jit
def _add_stored_buckets(ds, buckets, sums):
    """Each thread adds its scores' dS to its own sums. buckets: uint8, in bias._layout_of_bytes."""
    L: gl.constexpr = buckets.type.layout
    ptrs = gl.convert_layout(_sums_of_thread(ds, sums.time_ptr), L)
    factor = gl.full(ds.shape, 0.0, gl.float32, L) + sums.factor
    gl.inline_asm_elementwise(
        add_groups(), _group_constraints(), [gl.convert_layout(ds, L), buckets, ptrs, factor],
        dtype=gl.int32, is_pure=False, pack=32,
    )  # fmt: skip
