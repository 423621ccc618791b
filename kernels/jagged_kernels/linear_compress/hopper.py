"""Linear compression for Hopper: one persistent launch for shared levels and the candidates.

    shared_l[u] = W_l @ E_l[u]                        up to three shared levels, kept in fp32
    out[b]      = W @ E[b] + Σ_l addends_l[index_l[b]]    the candidates; each shared_l is an addend

Warps           0-3 and 4-7: consumers (MMA and epilogue); 8: producer (TMA loads, tile queue)
Tiles           up to three M tiles of 64 rows x BLOCK_N columns of one batch row. Each consumer
                computes one M tile ("wide"), and half of
                the columns of the third ("half"): both have equal work. BLOCK_N x BLOCK_K: 128 x 64
                for N <= 128, else 256 x 64
Barriers        ring.full[s]: arrive count 1 (the producer, plus the TMA's bytes); stage s holds its
                blocks of W and E
                ring.empty[s]: arrive count 2 (one per consumer); the MMAs that read stage s are
                complete
                queue.full[i]: arrive count 1 (the producer); slot i holds a tile number
                queue.empty[i]: arrive count 2 (one per consumer); both have read slot i
                flags in global memory: an M tile of a shared result is stored at 2; a wide
                accumulator adds 2, each half adds 1
Shared memory   BLOCK_N = 256: W 3 stages x 24 + E 3 stages x 32 + staging 2 consumers x 3 x 8 = 216
                KiB, barriers less than 0.2 KiB
                BLOCK_N = 128: W 4 stages x 24 + E 4 stages x 16 + staging 2 consumers x 3 x 8 = 208
                KiB
Registers       240 for consumers, of which accumulators take 192 (BLOCK_N = 256); 24 for the
                producer

Tile numbers come from an atomic counter, those of the shared levels first. Waiting for a flag
cannot deadlock: a running thread block has taken the tile that sets it, and shared tiles wait for
nothing.
hopper_gemm.py has the consumers' GEMM.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..common.gluon_api import load_tile, store_tile, thread_barrier
from ..common.pipeline import (
    launch_specialised,
    make_barriers,
    mark_full,
    mma_layout,
    release,
    wait_until_empty,
    wait_until_full,
)
from ..common.ptxas import safe_ptxas
from .hopper_gemm import M_TILE, PART_N, Addends, Ring, Role, free_steps, gemm, store_fragments

MAX_POLLS = gl.constexpr(1 << 26)  # about a minute
FLAGS = gl.constexpr(4)  # the state: the tile counter, three unused words, then the flags


class TileQueue(NamedTuple):
    """Two slots with the number of a tile, and their barriers."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Memory(NamedTuple):
    """The first shared result that this launch stores (or None), and int32 zeros: the tile counter
    and from FLAGS on the flags of the result."""

    result_ptr: gl.tensor
    state_ptr: gl.tensor


class Shared(NamedTuple):
    """Shared results that candidates add, and their indices; the results that this launch stores,
    which are the first of them, and the flags of each (none if none reads them)."""

    addends_ptr: gl.tuple
    indices_ptr: gl.tuple
    results_ptr: gl.tuple
    flags_ptr: gl.tuple


class Schedule(NamedTuple):
    """Tile numbers below shared_tiles[l] are those of shared levels up to l, those below tiles the
    candidates'. Batch rows below shared_tall[l] and tall have tiles as tall as possible; later ones
    have one tile for each M tile."""

    shared_tiles: gl.tuple
    tiles: gl.tensor
    shared_tall: gl.tuple
    tall: gl.tensor


class Options(NamedTuple):
    """Constants of a launch. k: 0 where candidates are not computed. shared_k: one for each shared
    level that is. n_tiles: of block_n columns. stages: of the ring. buffers: for the epilogue of
    each consumer."""

    m: int
    k: int
    shared_k: tuple
    n_tiles: int
    block_n: int
    block_k: int
    stages: int
    buffers: int
    consumers: int = 2
    registers: int = 240


class Kernel(NamedTuple):
    """What a kernel hands to its warps. A level that is not computed has no descriptors. staging:
    the epilogue's buffers of each consumer."""

    w_desc: gl.tensor
    e_desc: gl.tensor
    shared_w_descs: gl.tuple
    shared_e_descs: gl.tuple
    out_desc: gl.tensor
    staging: gl.tuple
    shared: Shared
    state_ptr: gl.tensor
    ring: Ring
    queue: TileQueue
    schedule: Schedule


class Tile(NamedTuple):
    """Batch row, first M tile, number of M tiles, and N tile."""

    batch: gl.tensor
    m_tile: gl.tensor
    height: gl.tensor
    n_tile: gl.tensor


@gluon.constexpr_function
def has_height(m, height):
    """Whether a tile may have `height` M tiles. Tiles are as few as possible and of nearly equal
    heights; some have height 1."""
    m_tiles = triton.cdiv(m, 64)
    tiles = triton.cdiv(m_tiles, 3)
    return height in (1, m_tiles // tiles, triton.cdiv(m_tiles, tiles))


# -- tile queue ------------------------------------------------------------------------------------


@gluon.jit
def _tile(number, tall, OPTIONS: gl.constexpr):
    """The tile with a number; `tall`: as in Schedule."""
    M_TILES: gl.constexpr = triton.cdiv(OPTIONS.m, M_TILE)
    TILES: gl.constexpr = triton.cdiv(M_TILES, 3)
    tile = number // OPTIONS.n_tiles
    n_tile = number % OPTIONS.n_tiles
    batch = tile // TILES
    part = tile % TILES
    m_tile = part * (M_TILES // TILES) + gl.minimum(part, M_TILES % TILES)
    height = M_TILES // TILES + gl.where(part < M_TILES % TILES, 1, 0)
    single = tile - tall * TILES
    batch = gl.where(single < 0, batch, tall + single // M_TILES)
    m_tile = gl.where(single < 0, m_tile, single % M_TILES)
    return Tile(batch, m_tile, gl.where(single < 0, height, 1), n_tile)


@gluon.jit
def _shared_index(index, m_tile, n_tile, OPTIONS: gl.constexpr):
    """Index of an M tile and N tile in a shared result."""
    return (index * triton.cdiv(OPTIONS.m, M_TILE) + m_tile) * OPTIONS.n_tiles + n_tile


@gluon.jit
def _push_tile(state_ptr, queue, step):
    """Take the next tile's number from the counter, and pass it to the consumers."""
    number = gl.atomic_add(state_ptr, 1, sem="relaxed", scope="gpu")
    wait_until_empty(queue, step)
    queue.numbers.index(step % 2).store(
        gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    )
    thread_barrier()  # the number is stored before one thread arrives for the warp
    mark_full(queue, step)
    return number


@gluon.jit
def _pop_tile(queue, step):
    wait_until_full(queue, step)
    # the maximum of one element: a scalar, so that branches on it are uniform
    number = gl.max(queue.numbers.index(step % 2).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    thread_barrier()  # all warps have read it before one thread arrives for them
    release(queue, step)
    return number


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def _wait_for_flags(flag_ptr, height, STRIDE: gl.constexpr):
    """Wait until the M tiles of a shared result are stored. All flags are read at once, as a read
    takes long. After MAX_POLLS the kernel traps instead of hanging."""
    m_tiles = gl.minimum(gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0])), height - 1)
    ready = gl.min(_acquire(flag_ptr + m_tiles * STRIDE), 0)
    polls = gl.to_tensor(0)
    while (ready < 2) & (polls < MAX_POLLS):
        ready = gl.min(_acquire(flag_ptr + m_tiles * STRIDE), 0)
        polls += 1
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $1, 2; @p trap; mov.b32 $0, $1; }", "=r,r", [ready],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    thread_barrier()


@gluon.jit
def _acquire(ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load_tile(w_desc, e_desc, ring, step, tile, flags, N_TILES: gl.constexpr, K: gl.constexpr):
    """Load the blocks of a tile's K steps as stages become empty. flags: pointers to the flag of
    the first M tile of each shared result that is added; the producer waits for the flags before it
    loads the steps between which the consumers add."""
    STAGES: gl.constexpr = ring.e_bufs.shape[0]
    BLOCK_K: gl.constexpr = ring.e_bufs.shape[2]
    BLOCK_N: gl.constexpr = ring.e_bufs.shape[3]
    E_BYTES: gl.constexpr = e_desc.block_type.nbytes
    W_BYTES: gl.constexpr = w_desc.block_type.nbytes
    FREE: gl.constexpr = free_steps(K, BLOCK_K, 3 * BLOCK_N // 2 // PART_N)
    for k in range(0, K, BLOCK_K):
        stage = step % STAGES
        if len(flags) > 0:
            if k == FREE * BLOCK_K:
                for level in gl.static_range(len(flags)):
                    _wait_for_flags(flags[level], tile.height, N_TILES)
        wait_until_empty(ring, step)
        full = ring.full.index(stage)
        for i in gl.static_range(3):
            mbarrier.expect(full, E_BYTES + (i + 1) * W_BYTES, pred=tile.height == i + 1)
        load_tile(e_desc, [tile.batch, k, tile.n_tile * BLOCK_N], full, ring.e_bufs.index(stage))
        for i in gl.static_range(3):
            row, buffer = (tile.m_tile + i) * M_TILE, ring.w_bufs.index(stage * 3 + i)
            load_tile(w_desc, [row, k], full, buffer, pred=i < tile.height)
        step += 1
    return step


@gluon.jit
def _is_of(number, schedule, LEVEL: gl.constexpr, LEVELS: gl.constexpr):
    """Whether a shared tile is of this level: constant where there is one level."""
    if LEVELS == 1:
        return True
    elif LEVEL == 0:
        return number < schedule.shared_tiles[0]
    else:
        return (number >= schedule.shared_tiles[LEVEL - 1]) & (
            number < schedule.shared_tiles[LEVEL]
        )


@gluon.jit
def _shared_tile_of(number, schedule, LEVEL: gl.constexpr, OPTIONS: gl.constexpr):
    """The tile of a shared level with a number."""
    if LEVEL > 0:
        number -= schedule.shared_tiles[LEVEL - 1]
    return _tile(number, schedule.shared_tall[LEVEL], OPTIONS)


@gluon.jit
def _produce(kernel, OPTIONS: gl.constexpr):
    ring, schedule, shared = kernel.ring, kernel.schedule, kernel.shared
    LEVELS: gl.constexpr = len(kernel.shared_w_descs)
    step = gl.to_tensor(0)
    queue_step = gl.to_tensor(0)
    number = _push_tile(kernel.state_ptr, kernel.queue, queue_step)
    while number < schedule.tiles:
        if number < schedule.shared_tiles[-1]:
            for level in gl.static_range(LEVELS):
                if _is_of(number, schedule, level, LEVELS):
                    tile = _shared_tile_of(number, schedule, level, OPTIONS)
                    step = _load_tile(
                        kernel.shared_w_descs[level], kernel.shared_e_descs[level], ring, step,
                        tile, (), OPTIONS.n_tiles, OPTIONS.shared_k[level],
                    )  # fmt: skip
        else:
            if kernel.w_desc is not None:
                tile = _tile(number - schedule.shared_tiles[-1], schedule.tall, OPTIONS)
                flags = ()
                for level in gl.static_range(len(shared.flags_ptr)):
                    index = gl.load(shared.indices_ptr[level] + tile.batch).to(gl.int32)
                    flag = _shared_index(index, tile.m_tile, tile.n_tile, OPTIONS)
                    flags = flags + (shared.flags_ptr[level] + flag,)
                step = _load_tile(
                    kernel.w_desc, kernel.e_desc, ring, step, tile, flags,
                    OPTIONS.n_tiles, OPTIONS.k,
                )  # fmt: skip
        queue_step += 1
        number = _push_tile(kernel.state_ptr, kernel.queue, queue_step)


# -- consumers -------------------------------------------------------------------------------------


@gluon.jit
def _store_epilogue(acc, out_desc, staging, batch, row, column, NUM_BEFORE: gl.constexpr):
    """Store an accumulator through the staging buffers, 64 columns each. NUM_BEFORE: buffers filled
    for this tile before."""
    WIDTH: gl.constexpr = acc.shape[1]
    BUFFERS: gl.constexpr = staging.shape[0]
    if WIDTH > staging.shape[3]:
        left, right = acc.reshape([M_TILE, 2, WIDTH // 2]).permute((0, 2, 1)).split()
        _store_epilogue(left, out_desc, staging, batch, row, column, NUM_BEFORE)
        BEFORE_RIGHT: gl.constexpr = NUM_BEFORE + WIDTH // 2 // staging.shape[3]
        _store_epilogue(right, out_desc, staging, batch, row, column + WIDTH // 2, BEFORE_RIGHT)
    else:
        if NUM_BEFORE == 0:  # stores of the tile before may still read any buffer
            tma.store_wait(0)
        elif NUM_BEFORE >= BUFFERS:  # the oldest store reads the buffer that is filled again
            tma.store_wait(BUFFERS - 1)
        thread_barrier()
        buffer = staging.index(NUM_BEFORE % BUFFERS)
        rounded = gl.convert_layout(
            acc.to(staging.dtype), mma_layout(M_TILE, WIDTH), assert_trivial=True
        )
        buffer.reshape([M_TILE, WIDTH]).store(rounded)
        fence_async_shared()
        thread_barrier()
        store_tile(out_desc, [batch, row, column], buffer)


@gluon.jit
def _shared_tile(ring, step, shared, tile, role, LEVEL: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute a tile of a shared level, store it in fp32 and set its flags."""
    result_ptr = shared.results_ptr[LEVEL]
    SIZE: gl.constexpr = M_TILE * ring.e_bufs.shape[3]
    step, accs = gemm(ring, step, Addends((), ()), role, OPTIONS.shared_k[LEVEL])
    wide_index = _shared_index(tile.batch, tile.m_tile + role.CONSUMER, tile.n_tile, OPTIONS)
    half_index = _shared_index(tile.batch, tile.m_tile + 2 * role.WIDE, tile.n_tile, OPTIONS)
    if role.WIDE:
        store_fragments(result_ptr + wide_index.to(gl.int64) * SIZE, accs.wide)
    if role.HALF:
        half_ptr = result_ptr + half_index.to(gl.int64) * SIZE
        store_fragments(half_ptr + role.CONSUMER * (SIZE // 2), accs.half)
    if len(shared.flags_ptr) > 0:
        flags_ptr = shared.flags_ptr[LEVEL]
        thread_barrier()  # all warps have stored their rows before one thread releases them
        if role.WIDE:
            gl.atomic_add(flags_ptr + wide_index, 2, sem="release", scope="gpu")
        if role.HALF:
            gl.atomic_add(flags_ptr + half_index, 1, sem="release", scope="gpu")
    return step


@gluon.jit
def _candidate_tile(ring, step, kernel, tile, role, OPTIONS: gl.constexpr):
    """Compute a tile of the candidates, with the shared results added, and store it."""
    BLOCK_N: gl.constexpr = ring.e_bufs.shape[3]
    SIZE: gl.constexpr = M_TILE * BLOCK_N
    shared, out_desc, staging = kernel.shared, kernel.out_desc, kernel.staging[role.CONSUMER]
    wide_ptrs, half_ptrs = (), ()
    for level in gl.static_range(len(shared.addends_ptr)):
        index = gl.load(shared.indices_ptr[level] + tile.batch).to(gl.int32)
        wide_index = _shared_index(index, tile.m_tile + role.CONSUMER, tile.n_tile, OPTIONS)
        half_index = _shared_index(index, tile.m_tile + 2 * role.WIDE, tile.n_tile, OPTIONS)
        wide_ptrs = wide_ptrs + (shared.addends_ptr[level] + wide_index.to(gl.int64) * SIZE,)
        half_ptr = shared.addends_ptr[level] + half_index.to(gl.int64) * SIZE
        half_ptrs = half_ptrs + (half_ptr + role.CONSUMER * (SIZE // 2),)
    step, accs = gemm(ring, step, Addends(wide_ptrs, half_ptrs), role, OPTIONS.k)
    column = tile.n_tile * BLOCK_N
    if role.HALF:
        row = (tile.m_tile + 2 * role.WIDE) * M_TILE
        half_column = column + role.CONSUMER * (BLOCK_N // 2)
        _store_epilogue(accs.half, out_desc, staging, tile.batch, row, half_column, 0)
    if role.WIDE:
        row = (tile.m_tile + role.CONSUMER) * M_TILE
        BEFORE: gl.constexpr = BLOCK_N // 2 // staging.shape[3] if role.HALF else 0
        _store_epilogue(accs.wide, out_desc, staging, tile.batch, row, column, BEFORE)
    return step


@gluon.jit
def _consume(CONSUMER: gl.constexpr, kernel, OPTIONS: gl.constexpr):
    ring, queue, schedule = kernel.ring, kernel.queue, kernel.schedule
    LEVELS: gl.constexpr = len(kernel.shared_w_descs)
    step = gl.to_tensor(0)
    queue_step = gl.to_tensor(0)
    number = _pop_tile(queue, queue_step)
    while number < schedule.tiles:
        if number < schedule.shared_tiles[-1]:
            for level in gl.static_range(LEVELS):
                if _is_of(number, schedule, level, LEVELS):
                    tile = _shared_tile_of(number, schedule, level, OPTIONS)
                    for h in gl.static_range(1, 4):
                        if has_height(OPTIONS.m, h):
                            if tile.height == h:
                                role: gl.constexpr = Role(CONSUMER, h > 1, h != 2)
                                step = _shared_tile(
                                    ring, step, kernel.shared, tile, role, level, OPTIONS
                                )
        else:
            if kernel.out_desc is not None:
                tile = _tile(number - schedule.shared_tiles[-1], schedule.tall, OPTIONS)
                for h in gl.static_range(1, 4):
                    if has_height(OPTIONS.m, h):
                        if tile.height == h:
                            role: gl.constexpr = Role(CONSUMER, h > 1, h != 2)
                            step = _candidate_tile(ring, step, kernel, tile, role, OPTIONS)
        queue_step += 1
        number = _pop_tile(queue, queue_step)
    tma.store_wait(0)


@gluon.jit
def _make_staging(desc, OPTIONS: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [OPTIONS.buffers, 1, M_TILE, 64], desc.layout)


@safe_ptxas
@gluon.jit(
    do_not_specialize=[
        "shared_tiles",
        "tiles",
        "shared_tall",
        "tall",
        "second_tiles",
        "second_tall",
        "third_tiles",
        "third_tall",
    ]
)
def linear_compress_fwd_hopper_kernel(
    w_desc, e_desc, out_desc, shared_w_desc, shared_e_desc, addends, memory,
    shared_tiles, tiles, shared_tall, tall, second_w_desc, second_e_desc, third_w_desc,
    third_e_desc, second_tiles, second_tall, third_tiles, third_tall, more_flags,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """The candidates' level, up to three shared levels (see the file's head), or both; a level
    without descriptors is not computed. Triton takes no descriptors in a tuple.

    addends: the shared results that candidates add, those of this launch first, then as many
    tensors of indices. memory: Memory. more_flags: of the second and third shared level, int32
    zeros. Others: see Schedule.
    """
    STAGES: gl.constexpr = OPTIONS.stages
    any_desc = e_desc if e_desc is not None else shared_e_desc
    any_w_desc = w_desc if w_desc is not None else shared_w_desc
    w_bufs = gl.allocate_shared_memory(
        any_desc.dtype, [STAGES * 3, M_TILE, OPTIONS.block_k], any_w_desc.layout
    )
    e_bufs = gl.allocate_shared_memory(
        any_desc.dtype, [STAGES, 1, OPTIONS.block_k, OPTIONS.block_n], any_desc.layout
    )
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = Ring(w_bufs, e_bufs, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    queue = TileQueue(numbers, make_barriers(2, 1), make_barriers(2, 2))
    w_descs, e_descs, shared_tiles, shared_tall = (), (), (shared_tiles,), (shared_tall,)
    if shared_w_desc is not None:
        w_descs, e_descs = (shared_w_desc,), (shared_e_desc,)
    if second_w_desc is not None:
        w_descs, e_descs = w_descs + (second_w_desc,), e_descs + (second_e_desc,)
        shared_tiles, shared_tall = shared_tiles + (second_tiles,), shared_tall + (second_tall,)
    if third_w_desc is not None:
        w_descs, e_descs = w_descs + (third_w_desc,), e_descs + (third_e_desc,)
        shared_tiles, shared_tall = shared_tiles + (third_tiles,), shared_tall + (third_tall,)
    staging, flags_ptr = (), ()
    if out_desc is not None:
        if memory.result_ptr is not None:
            flags_ptr = (memory.state_ptr + FLAGS,) + more_flags
        staging = _make_staging(out_desc, OPTIONS), _make_staging(out_desc, OPTIONS)
    LEVELS: gl.constexpr = len(addends) // 2
    results_ptr = (memory.result_ptr,) + addends[1 : len(w_descs)]
    shared = Shared(addends[:LEVELS], addends[LEVELS:], results_ptr, flags_ptr)
    kernel = Kernel(
        w_desc, e_desc, w_descs, e_descs, out_desc, staging, shared, memory.state_ptr,
        ring, queue, Schedule(shared_tiles, tiles, shared_tall, tall),
    )  # fmt: skip
    launch_specialised(_consume, _produce, kernel, OPTIONS)
