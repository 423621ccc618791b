"""Linear compression for Hopper: one persistent launch for a shared level and the candidates.

    shared[u] = W' @ E'[u]                              a shared level, kept in fp32
    out[b]    = W @ E[b] + Σ_l addends_l[index_l[b]]    the candidates; shared may be an addend

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

Tile numbers come from an atomic counter, those of the shared level first. Waiting for a flag cannot
deadlock: a running thread block has taken the tile that sets it, and shared tiles wait for nothing.
hopper_gemm.py has the consumers' GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.device import cdiv, device_properties
from ..common.gluon_api import load_tile, store_tile, thread_barrier
from ..common.pipeline import descriptor, make_barriers, mma_layout
from ..common.ptxas import safe_ptxas
from .configs import HopperGemmConfig
from .hopper_gemm import M_TILE, PART_N, Addends, Ring, Role, free_steps, gemm, store_fragments

MAX_POLLS = gl.constexpr(1 << 26)  # about a minute
FLAGS = gl.constexpr(4)  # the state: the tile counter, three unused words, then the flags


class TileQueue(NamedTuple):
    """Two slots with the number of a tile, and their barriers."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Inputs(NamedTuple):
    """Descriptors of the candidates' and the shared level's operands; None if there is no such
    level."""

    w_desc: gl.tensor
    e_desc: gl.tensor
    shared_w_desc: gl.tensor
    shared_e_desc: gl.tensor


class Shared(NamedTuple):
    """Shared results that candidates add, their indices, the result that this launch stores (or
    None), and its flags (None if none reads them)."""

    addends_ptr: gl.tensor
    indices_ptr: gl.tensor
    result_ptr: gl.tensor
    flags_ptr: gl.tensor


class Schedule(NamedTuple):
    """Tile numbers below shared_tiles are the shared level's, those below tiles the candidates'.
    Batch rows below shared_tall and tall have tiles as tall as possible; later ones have one tile
    for each M tile."""

    shared_tiles: gl.tensor
    tiles: gl.tensor
    shared_tall: gl.tensor
    tall: gl.tensor


class Sizes(NamedTuple):
    """Constants of a kernel; N_TILES: of BLOCK_N columns."""

    M: gl.constexpr
    K: gl.constexpr
    SHARED_K: gl.constexpr
    N_TILES: gl.constexpr


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
def _tile(number, tall, sizes):
    """The tile with a number; `tall`: as in Schedule."""
    M_TILES: gl.constexpr = triton.cdiv(sizes.M, M_TILE)
    TILES: gl.constexpr = triton.cdiv(M_TILES, 3)
    tile = number // sizes.N_TILES
    n_tile = number % sizes.N_TILES
    batch = tile // TILES
    part = tile % TILES
    m_tile = part * (M_TILES // TILES) + gl.minimum(part, M_TILES % TILES)
    height = M_TILES // TILES + gl.where(part < M_TILES % TILES, 1, 0)
    single = tile - tall * TILES
    batch = gl.where(single < 0, batch, tall + single // M_TILES)
    m_tile = gl.where(single < 0, m_tile, single % M_TILES)
    return Tile(batch, m_tile, gl.where(single < 0, height, 1), n_tile)


@gluon.jit
def _shared_index(index, m_tile, n_tile, sizes):
    """Index of an M tile and N tile in a shared result."""
    return (index * triton.cdiv(sizes.M, M_TILE) + m_tile) * sizes.N_TILES + n_tile


@gluon.jit
def _push_tile(state_ptr, queue, step):
    """Take the next tile's number from the counter, and pass it to the consumers."""
    number = gl.atomic_add(state_ptr, 1, sem="relaxed", scope="gpu")
    mbarrier.wait(queue.empty.index(step % 2), (step // 2 & 1) ^ 1)
    queue.numbers.index(step % 2).store(
        gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    )
    thread_barrier()
    mbarrier.arrive(queue.full.index(step % 2), count=1)
    return number


@gluon.jit
def _pop_tile(queue, step):
    mbarrier.wait(queue.full.index(step % 2), step // 2 & 1)
    number = gl.max(queue.numbers.index(step % 2).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    thread_barrier()
    mbarrier.arrive(queue.empty.index(step % 2), count=1)
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
        "{ .reg .pred p; setp.lt.s32 p, $1, 2; @p trap; mov.b32 $0, $1; }",
        "=r,r",
        [ready],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    thread_barrier()


@gluon.jit
def _acquire(ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load_tile(w_desc, e_desc, ring, step, tile, flag_ptr, N_TILES: gl.constexpr, K: gl.constexpr):
    """Load the blocks of a tile's K steps as stages become empty. flag_ptr: flag of the first M
    tile of the shared result that is added, or None; the producer waits for the flags before it
    loads the steps between which the consumers add."""
    STAGES: gl.constexpr = ring.e_bufs.shape[0]
    BLOCK_K: gl.constexpr = ring.e_bufs.shape[2]
    FREE: gl.constexpr = free_steps(K, BLOCK_K, 3 * ring.e_bufs.shape[3] // 2 // PART_N)
    for k in range(0, K, BLOCK_K):
        stage = step % STAGES
        if flag_ptr is not None:
            if k == FREE * BLOCK_K:
                _wait_for_flags(flag_ptr, tile.height, N_TILES)
        mbarrier.wait(ring.empty.index(stage), (step // STAGES & 1) ^ 1)
        for i in gl.static_range(3):
            mbarrier.expect(
                ring.full.index(stage),
                e_desc.block_type.nbytes + (i + 1) * w_desc.block_type.nbytes,
                pred=tile.height == i + 1,
            )
        load_tile(
            e_desc,
            [tile.batch, k, tile.n_tile * ring.e_bufs.shape[3]],
            ring.full.index(stage),
            ring.e_bufs.index(stage),
        )
        for i in gl.static_range(3):
            row = (tile.m_tile + i) * M_TILE
            load_tile(
                w_desc,
                [row, k],
                ring.full.index(stage),
                ring.w_bufs.index(stage * 3 + i),
                pred=i < tile.height,
            )
        step += 1
    return step


@gluon.jit
def _producer(inputs, shared, state_ptr, ring, queue, schedule, sizes):
    step = gl.to_tensor(0)
    queue_step = gl.to_tensor(0)
    number = _push_tile(state_ptr, queue, queue_step)
    while number < schedule.tiles:
        if number < schedule.shared_tiles:
            if inputs.shared_w_desc is not None:
                tile = _tile(number, schedule.shared_tall, sizes)
                step = _load_tile(
                    inputs.shared_w_desc,
                    inputs.shared_e_desc,
                    ring,
                    step,
                    tile,
                    None,
                    sizes.N_TILES,
                    sizes.SHARED_K,
                )
        else:
            if inputs.w_desc is not None:
                tile = _tile(number - schedule.shared_tiles, schedule.tall, sizes)
                flag_ptr = None
                if shared.flags_ptr is not None:
                    index = gl.load(shared.indices_ptr[0] + tile.batch).to(gl.int32)
                    flag_ptr = shared.flags_ptr + _shared_index(
                        index, tile.m_tile, tile.n_tile, sizes
                    )
                step = _load_tile(
                    inputs.w_desc, inputs.e_desc, ring, step, tile, flag_ptr, sizes.N_TILES, sizes.K
                )
        queue_step += 1
        number = _push_tile(state_ptr, queue, queue_step)


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
        _store_epilogue(
            right,
            out_desc,
            staging,
            batch,
            row,
            column + WIDTH // 2,
            NUM_BEFORE + WIDTH // 2 // staging.shape[3],
        )
    else:
        if NUM_BEFORE == 0:
            tma.store_wait(0)
        elif NUM_BEFORE >= BUFFERS:
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
def _shared_tile(ring, step, shared, tile, role, sizes):
    """Compute a tile of the shared level, store it in fp32 and set its flags."""
    SIZE: gl.constexpr = M_TILE * ring.e_bufs.shape[3]
    step, accs = gemm(ring, step, Addends((), ()), role, sizes.SHARED_K)
    wide_index = _shared_index(tile.batch, tile.m_tile + role.CONSUMER, tile.n_tile, sizes)
    half_index = _shared_index(tile.batch, tile.m_tile + 2 * role.WIDE, tile.n_tile, sizes)
    if role.WIDE:
        store_fragments(shared.result_ptr + wide_index.to(gl.int64) * SIZE, accs.wide)
    if role.HALF:
        store_fragments(
            shared.result_ptr + half_index.to(gl.int64) * SIZE + role.CONSUMER * (SIZE // 2),
            accs.half,
        )
    if shared.flags_ptr is not None:
        thread_barrier()
        if role.WIDE:
            gl.atomic_add(shared.flags_ptr + wide_index, 2, sem="release", scope="gpu")
        if role.HALF:
            gl.atomic_add(shared.flags_ptr + half_index, 1, sem="release", scope="gpu")
    return step


@gluon.jit
def _candidate_tile(ring, step, shared, tile, out_desc, staging, role, sizes):
    """Compute a tile of the candidates, with the shared results added, and store it."""
    BLOCK_N: gl.constexpr = ring.e_bufs.shape[3]
    SIZE: gl.constexpr = M_TILE * BLOCK_N
    wide_ptrs, half_ptrs = (), ()
    for level in gl.static_range(len(shared.addends_ptr)):
        index = gl.load(shared.indices_ptr[level] + tile.batch).to(gl.int32)
        wide_index = _shared_index(index, tile.m_tile + role.CONSUMER, tile.n_tile, sizes)
        half_index = _shared_index(index, tile.m_tile + 2 * role.WIDE, tile.n_tile, sizes)
        wide_ptrs = wide_ptrs + (shared.addends_ptr[level] + wide_index.to(gl.int64) * SIZE,)
        half_ptrs = half_ptrs + (
            shared.addends_ptr[level]
            + half_index.to(gl.int64) * SIZE
            + role.CONSUMER * (SIZE // 2),
        )
    step, accs = gemm(ring, step, Addends(wide_ptrs, half_ptrs), role, sizes.K)
    column = tile.n_tile * BLOCK_N
    if role.HALF:
        row = (tile.m_tile + 2 * role.WIDE) * M_TILE
        _store_epilogue(
            accs.half,
            out_desc,
            staging,
            tile.batch,
            row,
            column + role.CONSUMER * (BLOCK_N // 2),
            0,
        )
    if role.WIDE:
        row = (tile.m_tile + role.CONSUMER) * M_TILE
        _store_epilogue(
            accs.wide,
            out_desc,
            staging,
            tile.batch,
            row,
            column,
            BLOCK_N // 2 // staging.shape[3] if role.HALF else 0,
        )
    return step


@gluon.jit
def _consumer(CONSUMER: gl.constexpr, out_desc, staging, shared, ring, queue, schedule, sizes):
    step = gl.to_tensor(0)
    queue_step = gl.to_tensor(0)
    number = _pop_tile(queue, queue_step)
    while number < schedule.tiles:
        if number < schedule.shared_tiles:
            if shared.result_ptr is not None:
                tile = _tile(number, schedule.shared_tall, sizes)
                for h in gl.static_range(1, 4):
                    if has_height(sizes.M, h):
                        if tile.height == h:
                            role: gl.constexpr = Role(CONSUMER, h > 1, h != 2)
                            step = _shared_tile(ring, step, shared, tile, role, sizes)
        else:
            if out_desc is not None:
                tile = _tile(number - schedule.shared_tiles, schedule.tall, sizes)
                for h in gl.static_range(1, 4):
                    if has_height(sizes.M, h):
                        if tile.height == h:
                            role: gl.constexpr = Role(CONSUMER, h > 1, h != 2)
                            step = _candidate_tile(
                                ring, step, shared, tile, out_desc, staging, role, sizes
                            )
        queue_step += 1
        number = _pop_tile(queue, queue_step)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(do_not_specialize=["shared_tiles", "tiles", "shared_tall", "tall"])
def linear_compress_fwd_hopper_kernel(
    w_desc,
    e_desc,
    out_desc,
    addends_ptr,
    indices_ptr,
    shared_w_desc,
    shared_e_desc,
    shared_ptr,
    state_ptr,
    shared_tiles,
    tiles,
    shared_tall,
    tall,
    M: gl.constexpr,
    K: gl.constexpr,
    SHARED_K: gl.constexpr,
    N_TILES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """The candidates' level, the shared level (see the file's head), or both; a level without
    descriptors is not computed.

    state_ptr: int32 zeros, the tile counter and from FLAGS on the flags of the shared result.
    Others: see Schedule.
    """
    any_desc = e_desc if e_desc is not None else shared_e_desc
    any_w_desc = w_desc if w_desc is not None else shared_w_desc
    w_bufs = gl.allocate_shared_memory(
        any_desc.dtype, [STAGES * 3, M_TILE, BLOCK_K], any_w_desc.layout
    )
    e_bufs = gl.allocate_shared_memory(
        any_desc.dtype, [STAGES, 1, BLOCK_K, BLOCK_N], any_desc.layout
    )
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = Ring(w_bufs, e_bufs, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    queue = TileQueue(numbers, make_barriers(2, 1), make_barriers(2, 2))
    schedule = Schedule(shared_tiles, tiles, shared_tall, tall)
    sizes: gl.constexpr = Sizes(M, K, SHARED_K, N_TILES)
    staging_0, staging_1, flags_ptr = None, None, None
    if out_desc is not None:
        if shared_ptr is not None:
            flags_ptr = state_ptr + FLAGS
        staging_0 = gl.allocate_shared_memory(
            out_desc.dtype, [BUFFERS, 1, M_TILE, 64], out_desc.layout
        )
        staging_1 = gl.allocate_shared_memory(
            out_desc.dtype, [BUFFERS, 1, M_TILE, 64], out_desc.layout
        )
    inputs = Inputs(w_desc, e_desc, shared_w_desc, shared_e_desc)
    shared = Shared(addends_ptr, indices_ptr, shared_ptr, flags_ptr)
    gl.warp_specialize(
        [
            (_consumer, (0, out_desc, staging_0, shared, ring, queue, schedule, sizes)),
            (_consumer, (1, out_desc, staging_1, shared, ring, queue, schedule, sizes)),
            (_producer, (inputs, shared, state_ptr, ring, queue, schedule, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


# -- launches --------------------------------------------------------------------------------------


class Level(NamedTuple):
    weight: Tensor
    embedding: Tensor


class Candidates(NamedTuple):
    """The candidates' level, its output, and the shared results that are added with their indices;
    that of the same launch is the first."""

    level: Level
    out: Tensor
    addends: tuple[Tensor, ...]
    indices: tuple[Tensor, ...]


class SharedLevel(NamedTuple):
    level: Level
    result: Tensor


class Tiling(NamedTuple):
    """M and N, their numbers of tiles of 64 x block_n, and the launch configuration."""

    m: int
    n: int
    m_tiles: int
    n_tiles: int
    config: HopperGemmConfig

    def shared_tiles(self, embedding: Tensor) -> int:
        return embedding.shape[0] * self.m_tiles * self.n_tiles


def tiling(m: int, n: int, config: HopperGemmConfig) -> Tiling:
    return Tiling(m, n, cdiv(m, 64), cdiv(n, config.block_n), config)


def state_size(embeddings: Sequence[Tensor], tiling: Tiling) -> int:
    """Number of int32 zeros that the launches of `forward` need: FLAGS for each, and the last one's
    flags."""
    flags = tiling.shared_tiles(embeddings[-2]) if len(embeddings) > 1 else 0
    return FLAGS.value * max(len(embeddings) - 1, 1) + flags


def forward(
    levels: Sequence[Level],
    indices: Sequence[Tensor],
    state: Tensor,
    tiling: Tiling,
    batch_invariant: bool,
) -> Tensor:
    """`[B, M, N]`: one launch for up to two levels, and one for each further level.

    levels: weights with rows at 16-byte boundaries. state: int32 zeros, `state_size` of them.
    """
    *shared_levels, candidates = levels
    out = candidates.embedding.new_empty((candidates.embedding.shape[0], tiling.m, tiling.n))
    shared = []
    for level in shared_levels:
        size = tiling.shared_tiles(level.embedding), 64 * tiling.config.block_n
        shared.append(SharedLevel(level, out.new_empty(size, dtype=torch.float32)))
    for i, level in enumerate(shared[:-1]):
        _launch(tiling, state[FLAGS.value * i :], None, level, batch_invariant)
    results = tuple(level.result for level in shared[::-1])
    last_state = state[FLAGS.value * max(len(shared) - 1, 0) :]
    _launch(
        tiling,
        last_state,
        Candidates(candidates, out, results, tuple(indices[::-1])),
        shared[-1] if shared else None,
        batch_invariant,
    )
    return out


def _launch(
    tiling: Tiling,
    state: Tensor,
    candidates: Candidates | None,
    shared: SharedLevel | None,
    batch_invariant: bool,
) -> None:
    """Launch for a shared level, the candidates, or both.

    The K steps between which a tile adds shared results depend on its height, so batch_invariant
    uses tall tiles only.
    """
    m_tiles, n_tiles, config = tiling.m_tiles, tiling.n_tiles, tiling.config
    num_sms = device_properties(state.device).num_sms
    tall_tiles = cdiv(m_tiles, 3)
    shared_tiles, shared_tall, tiles, tall = 0, 0, 0, 0
    if shared is not None:  # few tiles: single M tiles, so that all SMs have some
        batch = shared.level.embedding.shape[0]
        shared_tall = batch if batch_invariant or batch * m_tiles * n_tiles > 2 * num_sms else 0
        tiles = shared_tiles = (
            shared_tall * tall_tiles + (batch - shared_tall) * m_tiles
        ) * n_tiles
    # the last batch rows as single M tiles, so that all SMs end together
    if candidates is not None:
        batch = candidates.level.embedding.shape[0]
        tall = batch if batch_invariant else max(batch - cdiv(num_sms, m_tiles * n_tiles), 0)
        tiles += (tall * tall_tiles + (batch - tall) * m_tiles) * n_tiles
    none = Candidates(None, None, (), ())
    level, out, addends, indices = none if candidates is None else candidates
    shared_level, result = (None, None) if shared is None else shared
    linear_compress_fwd_hopper_kernel[(min(num_sms, tiles),)](
        *_descriptors(level, config),
        None if out is None else descriptor(out, 1, 64, 64),
        addends,
        indices,
        *_descriptors(shared_level, config),
        result,
        state,
        shared_tiles,
        tiles,
        shared_tall,
        tall,
        M=tiling.m,
        K=0 if level is None else level.weight.shape[1],
        SHARED_K=0 if shared_level is None else shared_level.weight.shape[1],
        N_TILES=n_tiles,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        BUFFERS=config.num_buffers,
        num_warps=4,
        maxnreg=168,
    )


def _descriptors(
    level: Level | None, config: HopperGemmConfig
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    if level is None:
        return None, None
    return descriptor(level.weight, 64, config.block_k), descriptor(
        level.embedding, 1, config.block_k, config.block_n
    )
