"""The warps of Hopper's one-pass backward (one_pass.py) that add dq to its sums in global
memory, in the order of the tiles.

Its docstring has the roles and barriers.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...common.gluon_api import add_tile, store_tile, thread_barrier
from ...common.pipeline import WARPGROUP_ROWS, consumer_wait, release, wait_until_full
from .tile_source import consume_taken, query_blocks


class DescendingBlocks(NamedTuple):
    """The blocks of query rows that a tile of keys visits in each head, in descending order from
    `last` on: `at_end` masked blocks at the end of the segment, `full` full ones, and the rest of
    `count` masked ones at the diagonal."""

    last: gl.tensor
    at_end: gl.tensor
    full: gl.tensor
    count: gl.tensor


@gluon.jit
def descending_blocks(tile, OPTIONS: gl.constexpr):
    """The DescendingBlocks of a tile."""
    blocks, count = query_blocks(
        tile, OPTIONS.mask, OPTIONS.consumers * WARPGROUP_ROWS, OPTIONS.block
    )
    first = gl.where(blocks.count > 0, blocks.first, blocks.second_first)
    at_end = gl.where(blocks.full_count > 0, count - blocks.full_index - blocks.full_count, count)
    return DescendingBlocks(first + count - 1, at_end, blocks.full_count, count)


@gluon.jit
def _load_acquire(ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for_tiles(added_ptr, count):
    """Wait until `count` tiles have been added to a block."""
    added = _load_acquire(added_ptr)
    while added < count:
        added = _load_acquire(added_ptr)
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [added], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for_writes(step):
    """Wait until this warp's TMA stores and additions are complete; tma.store_wait waits until
    shared memory has been read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [step], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    thread_barrier()


@gluon.jit
def _block_of_sums(tile, number, visited, OPTIONS: gl.constexpr):
    """Head, and index among the blocks of all segments, of the number-th block that a tile
    visits."""
    last = (tile.q_start // OPTIONS.block).to(gl.int32) + tile.segment + visited.last
    if OPTIONS.group > 1:
        return tile.head * OPTIONS.group + number // visited.count, last - number % visited.count
    else:
        return tile.head, last - number


@gluon.jit
def _write_tile(tile, wave, step, start, writer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    """start: number of the tile's first block among those of all tiles."""
    exchange, added_ptr = kernel.exchange, kernel.args.added_ptr
    ring = exchange.dq[writer]
    STAGES: gl.constexpr = ring.buffers.shape[0]
    WIDE: gl.constexpr = kernel.rings.q.buffers.shape[3] == 128
    visited = descending_blocks(tile, OPTIONS)
    count = OPTIONS.group * visited.count
    first, stride = 0, 1
    if not WIDE:
        first, stride = (start + writer) % 2, 2
    for number in range(first, count, stride):
        head, block = _block_of_sums(tile, number, visited, OPTIONS)
        row, column = block * OPTIONS.block, 0
        if WIDE:
            column = 64 * writer
        _wait_for_tiles(added_ptr + head * kernel.num_blocks + block, tile.block)
        consumer_wait(ring, step)
        buffer = ring.buffers.index(step % STAGES)
        if tile.block == 0:
            store_tile(exchange.sums_desc, [head, row, column], buffer)
        else:
            add_tile(exchange.sums_desc, [head, row, column], buffer)
        tma.store_wait(0)
        thread_barrier()
        release(ring, step)
        mbarrier.wait(exchange.written.empty.index(writer), step & 1 ^ 1)
        _wait_for_writes(step)
        mbarrier.arrive(exchange.written.full.index(writer), count=1)
        step += 1
    return step, start + count


@gluon.jit
def write_dq(writer: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    """Adds a writer's terms of dq: half of the columns at head dim 128, every other block at 64.
    The order of the tiles of a segment and head is that of their blocks."""
    consume_taken(_write_tile, writer, kernel, OPTIONS)


@gluon.jit
def _publish_tile(tile, wave, step, unused, index: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    written, added_ptr = kernel.exchange.written, kernel.args.added_ptr
    visited = descending_blocks(tile, OPTIONS)
    for number in range(OPTIONS.group * visited.count):
        head, block = _block_of_sums(tile, number, visited, OPTIONS)
        if kernel.rings.q.buffers.shape[3] == 128:
            mbarrier.wait(written.full.index(0), step & 1)
            mbarrier.wait(written.full.index(1), step & 1)
        else:
            wait_until_full(written, step)
        thread_barrier()
        gl.atomic_add(added_ptr + head * kernel.num_blocks + block, 1, sem="release")
        if kernel.rings.q.buffers.shape[3] == 128:
            mbarrier.arrive(written.empty.index(0), count=1)
            mbarrier.arrive(written.empty.index(1), count=1)
        else:
            release(written, step)
        step += 1
    return step, 0


@gluon.jit
def publish_dq(kernel, OPTIONS: gl.constexpr):
    """Counts the tiles added to each block, once both writers have added their halves of it, or one
    of them all of it."""
    consume_taken(_publish_tile, 0, kernel, OPTIONS)
