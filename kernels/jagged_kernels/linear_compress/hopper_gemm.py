"""The consumers' GEMM of linear compression on Hopper: K steps through a ring of stages, and the
addition of shared results.

Shared results are stored in the order of the accumulators' registers. Consumers add them to their
accumulators 32 columns at a time, between the last K steps, so their loads overlap MMAs.
"""

from typing import NamedTuple

from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..common.pipeline import mma_layout, opaque, release, wait_until_full

M_TILE = gl.constexpr(64)  # rows of a wgmma
PART_N = gl.constexpr(32)  # columns of a shared result that are added at once: 16 registers


class Ring(NamedTuple):
    """Stages of blocks of W, [STAGES * 3, 64, BLOCK_K], and of E, [STAGES, 1, BLOCK_K, BLOCK_N],
    and their barriers."""

    w_bufs: gl.shared_memory_descriptor
    e_bufs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Role(NamedTuple):
    """What a consumer (0 or 1) computes of a tile: an M tile over all columns (WIDE), an M tile
    over its half of the columns (HALF)."""

    CONSUMER: gl.constexpr
    WIDE: gl.constexpr
    HALF: gl.constexpr


class Accumulators(NamedTuple):
    """[64, BLOCK_N] and [64, BLOCK_N / 2]."""

    wide: gl.tensor
    half: gl.tensor


class Addends(NamedTuple):
    """Pointers to the parts of the shared results that are added to each accumulator, one for each
    level."""

    wide_ptrs: gl.tuple
    half_ptrs: gl.tuple


@gluon.constexpr_function
def fragment_layout():
    return gl.BlockedLayout([4], [32], [4], [0])


@gluon.constexpr_function
def step_depth(k, block_k, step):
    """Depth of a K step: block_k, except that the last step covers the rest of K, rounded up to a
    multiple of 16."""
    return min(cdiv(k - step * block_k, 16) * 16, block_k)


@gluon.constexpr_function
def free_steps(k, block_k, parts):
    """Number of K steps before the first of `parts` additions. From there on, there is one addition
    for each 64 of K."""
    return max(cdiv(k, block_k) - parts * (64 // block_k), 0)


# -- shared results --------------------------------------------------------------------------------


@gluon.jit
def _load_fragments(ptr, WIDTH: gl.constexpr):
    """[64, WIDTH] of a shared result, in the layout of an accumulator: each warp reads 512
    contiguous bytes at a time."""
    x = gl.load(ptr + gl.arange(0, M_TILE * WIDTH, layout=fragment_layout()))
    return (
        x.reshape([WIDTH // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([M_TILE, WIDTH])
    )


@gluon.jit
def store_fragments(ptr, x):
    WIDTH: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([M_TILE * WIDTH])
    gl.store(
        ptr + gl.arange(0, M_TILE * WIDTH, layout=fragment_layout()),
        gl.convert_layout(x, fragment_layout(), assert_trivial=True),
    )


@gluon.jit
def _redefine(x):
    """x in newly defined registers. The move costs nothing: ptxas removes it after it has analysed
    the MMAs."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _add_columns(acc, x, FIRST: gl.constexpr):
    """acc with x added to its columns from FIRST on. Columns are registers, so nothing moves. The
    other columns are redefined too: ptxas serialises MMAs if only a part of their accumulator is
    redefined."""
    WIDTH: gl.constexpr = acc.shape[1]
    if x.shape[1] == WIDTH:
        return acc + gl.convert_layout(x, acc.type.layout, assert_trivial=True)
    else:
        left, right = acc.reshape([M_TILE, 2, WIDTH // 2]).permute((0, 2, 1)).split()
        if FIRST < WIDTH // 2:
            left, right = _add_columns(left, x, FIRST), _redefine(right)
        else:
            left, right = _redefine(left), _add_columns(right, x, FIRST - WIDTH // 2)
        return gl.convert_layout(
            gl.join(left, right).permute((0, 2, 1)).reshape([M_TILE, WIDTH]),
            acc.type.layout,
            assert_trivial=True,
        )


@gluon.jit
def _sum_of_levels(ptrs, FIRST: gl.constexpr):
    """Sum over the levels of PART_N columns from FIRST on."""
    total = _load_fragments(ptrs[0] + FIRST * M_TILE, PART_N)
    for level in gl.static_range(1, len(ptrs)):
        total += _load_fragments(ptrs[level] + FIRST * M_TILE, PART_N)
    return total


@gluon.jit
def _load_part(addends, PART: gl.constexpr, WIDE_PARTS: gl.constexpr):
    """The PART-th columns to be added; those of the wide accumulator come first."""
    if PART < WIDE_PARTS:
        return _sum_of_levels(addends.wide_ptrs, PART * PART_N)
    else:
        return _sum_of_levels(addends.half_ptrs, (PART - WIDE_PARTS) * PART_N)


# -- GEMM ------------------------------------------------------------------------------------------


@gluon.jit
def _mma(w, e, acc, FIRST: gl.constexpr, DEPTH: gl.constexpr):
    """acc + w @ e over DEPTH of K from FIRST on, a multiple of 16."""
    LENGTH: gl.constexpr = 64 if DEPTH == 64 else 32 if DEPTH >= 32 else 16
    acc = warpgroup_mma(w.slice(FIRST, LENGTH, 1), e.slice(FIRST, LENGTH, 0), acc, is_async=True)
    if DEPTH > LENGTH:
        acc = _mma(w, e, acc, FIRST + LENGTH, DEPTH - LENGTH)
    return acc


@gluon.jit
def _issue_step(ring, step, accs, role, HALF_FIRST: gl.constexpr, DEPTH: gl.constexpr):
    """Issue the MMAs of a K step. HALF_FIRST: the half accumulator's is issued, and so complete,
    first."""
    STAGES: gl.constexpr = ring.e_bufs.shape[0]
    BLOCK_N: gl.constexpr = ring.e_bufs.shape[3]
    wide, half = accs
    stage = step % STAGES
    wait_until_full(ring, step)
    e = ring.e_bufs.index(stage).reshape([ring.e_bufs.shape[2], BLOCK_N])
    half_w = ring.w_bufs.index(stage * 3 + 2 * role.WIDE)
    half_e = e.slice(role.CONSUMER * (BLOCK_N // 2), BLOCK_N // 2, 1)
    if role.HALF and HALF_FIRST:
        half = _mma(half_w, half_e, half, 0, DEPTH)
    if role.WIDE:
        wide = _mma(ring.w_bufs.index(stage * 3 + role.CONSUMER), e, wide, 0, DEPTH)
    if role.HALF and not HALF_FIRST:
        half = _mma(half_w, half_e, half, 0, DEPTH)
    return Accumulators(wide, half)


@gluon.jit
def _wait(accs, role, PENDING: gl.constexpr):
    """Wait until at most PENDING MMAs are under way."""
    wide, half = accs
    if role.WIDE and role.HALF:
        wide, half = warpgroup_mma_wait(PENDING, deps=(wide, half))
    elif role.WIDE:
        wide = warpgroup_mma_wait(PENDING, deps=(wide,))
    else:
        half = warpgroup_mma_wait(PENDING, deps=(half,))
    return Accumulators(wide, half)


@gluon.jit
def gemm(ring, step, addends, role, K: gl.constexpr):
    """A consumer's part of a tile of W @ E plus the addends. The addends are added 32 columns at a
    time between the last K steps. These steps are unrolled, as registers cannot be indexed."""
    BLOCK_K: gl.constexpr = ring.e_bufs.shape[2]
    BLOCK_N: gl.constexpr = ring.e_bufs.shape[3]
    STEPS: gl.constexpr = cdiv(K, BLOCK_K)
    ROUND: gl.constexpr = 64 // BLOCK_K  # K steps between two additions
    WIDE_PARTS: gl.constexpr = BLOCK_N // PART_N if role.WIDE and len(addends.wide_ptrs) > 0 else 0
    PARTS: gl.constexpr = WIDE_PARTS + (
        BLOCK_N // 2 // PART_N if role.HALF and len(addends.half_ptrs) > 0 else 0
    )
    ROUNDS: gl.constexpr = min(cdiv(STEPS, ROUND), max(PARTS, 1))
    FREE: gl.constexpr = free_steps(K, BLOCK_K, ROUNDS)
    NUM_ACCS: gl.constexpr = role.WIDE + role.HALF
    upcoming = None
    wide = gl.zeros([M_TILE, BLOCK_N], gl.float32, mma_layout(M_TILE, BLOCK_N))
    half = gl.zeros([M_TILE, BLOCK_N // 2], gl.float32, mma_layout(M_TILE, BLOCK_N // 2))
    accs = Accumulators(wide, half)
    for i in range(opaque(gl.to_tensor(FREE))):
        accs = _issue_step(ring, step, accs, role, False, BLOCK_K)
        accs = _wait(accs, role, NUM_ACCS)
        release(ring, step - 1, i > 0)
        step += 1
    if FREE > 0:
        accs = _wait(accs, role, 0)
        release(ring, step - 1)
    for i in gl.static_range(max(ROUNDS, PARTS)):
        if i < ROUNDS:
            for j in gl.static_range(FREE + i * ROUND, min(FREE + (i + 1) * ROUND, STEPS)):
                accs = _issue_step(
                    ring, step, accs, role, i >= WIDE_PARTS and i < PARTS, step_depth(K, BLOCK_K, j)
                )
                if j > FREE + i * ROUND:
                    accs = _wait(accs, role, NUM_ACCS)
                    release(ring, step - 1)
                step += 1
        if i < PARTS:
            if i == 0 or NUM_ACCS == 2:
                x = _load_part(addends, i, WIDE_PARTS)
            else:
                x = upcoming
            if i + 1 < PARTS and NUM_ACCS == 1:  # there are registers for another part
                upcoming = _load_part(addends, i + 1, WIDE_PARTS)
        if i < ROUNDS:
            accs = _wait(accs, role, NUM_ACCS - 1)
            if NUM_ACCS == 1:
                release(ring, step - 1)
        if i < WIDE_PARTS:
            accs = Accumulators(_add_columns(accs.wide, x, i * PART_N), accs.half)
        elif i < PARTS:
            accs = Accumulators(accs.wide, _add_columns(accs.half, x, (i - WIDE_PARTS) * PART_N))
        if i < ROUNDS and NUM_ACCS == 2:
            accs = _wait(accs, role, 0)
            release(ring, step - 1)
    return step, accs
