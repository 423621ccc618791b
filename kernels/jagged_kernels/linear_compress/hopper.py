"""Device code of linear compression for Hopper: one persistent launch for a shared level and the candidates.

Two groups of four warps multiply, a warp loads for them through a ring of shared memory. A tile is up to three times 64 rows of one batch
row's product: a group takes 64 of them over all columns, and the third 64 over half of the columns, so that both always have as much to do.
Tiles are dealt by a counter, those of the shared level first: whoever waits for one, waits for a thread block that runs and waits for
nothing. Shared products are kept in fp32, in the order that registers hold them in; the candidates' products take them in by columns while
they grow, so that nothing waits for them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..common.gluon_api import load_tile, store_tile, thread_barrier
from ..common.pipeline import make_barriers, opaque
from ..common.ptxas import safe_ptxas

ROWS = gl.constexpr(64)  # of a product instruction
COLUMNS = gl.constexpr(32)  # of a shared product taken in at once: 16 registers
POLLS = gl.constexpr(1 << 26)  # about a minute


@gluon.constexpr_function
def product_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def fragment_layout():
    return gl.BlockedLayout([4], [32], [4], [0])


@gluon.constexpr_function
def cdiv(size, block):
    return -(-size // block)


@gluon.constexpr_function
def depth(k, block, step):
    """How much of its block a step of a sum over k multiplies: a part of the last one."""
    return min(cdiv(k - step * block, 16) * 16, block)


@gluon.constexpr_function
def free_steps(k, block, parts):
    """Steps of a sum over k before those between which so many parts are added, one for each 64 of k."""
    return max(cdiv(k, block) - parts * (64 // block), 0)


@gluon.constexpr_function
def has_height(m, height):
    """Whether tiles of a product of m rows are so high: as few as possible, as equal as possible, and single ones to even out the end."""
    strips = cdiv(m, 64)
    tiles = cdiv(strips, 3)
    return height in (1, strips // tiles, cdiv(strips, tiles))


# -- dealing tiles ---------------------------------------------------------------------------------------------------------------


@gluon.jit
def _tile(number, whole, M: gl.constexpr, PANELS: gl.constexpr):
    """Batch row, first strip of 64 rows, height in strips and panel of columns of a tile. Batch rows from `whole` on are dealt strip by
    strip."""
    STRIPS: gl.constexpr = cdiv(M, ROWS)
    TILES: gl.constexpr = cdiv(STRIPS, 3)
    tile = number // PANELS
    panel = number % PANELS
    batch = tile // TILES
    part = tile % TILES
    strip = part * (STRIPS // TILES) + gl.minimum(part, STRIPS % TILES)
    height = STRIPS // TILES + gl.where(part < STRIPS % TILES, 1, 0)
    single = tile - whole * TILES
    batch = gl.where(single < 0, batch, whole + single // STRIPS)
    strip = gl.where(single < 0, strip, single % STRIPS)
    return batch, strip, gl.where(single < 0, height, 1), panel


@gluon.jit
def _strip(index, strip, panel, M: gl.constexpr, PANELS: gl.constexpr):
    """Place of a strip of a shared product."""
    return (index * cdiv(M, ROWS) + strip) * PANELS + panel


@gluon.jit
def _deal(state_ptr, mail, turn):
    """Draw the next tile's number, and tell the others."""
    numbers, dealt, taken = mail
    number = gl.atomic_add(state_ptr, 1, sem="relaxed", scope="gpu")
    mbarrier.wait(taken.index(turn % 2), (turn // 2 & 1) ^ 1)
    numbers.index(turn % 2).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    thread_barrier()
    mbarrier.arrive(dealt.index(turn % 2), count=1)
    return number


@gluon.jit
def _take(mail, turn):
    numbers, dealt, taken = mail
    mbarrier.wait(dealt.index(turn % 2), turn // 2 & 1)
    number = gl.max(numbers.index(turn % 2).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    thread_barrier()
    mbarrier.arrive(taken.index(turn % 2), count=1)
    return number


# -- the warp that loads ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _wait_for(flag_ptr, height, STRIDE: gl.constexpr):
    """Until both halves of a tile's shared strips are stored: their flags are read at once, as each takes long. Their thread blocks run, so
    that this ends; were it not so, an error is better than a kernel without end."""
    strips = gl.minimum(gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0])), height - 1)
    ready = gl.min(_acquire(flag_ptr + strips * STRIDE), 0)
    polls = gl.to_tensor(0)
    while (ready < 2) & (polls < POLLS):
        ready = gl.min(_acquire(flag_ptr + strips * STRIDE), 0)
        polls += 1
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $1, 2; @p trap; mov.b32 $0, $1; }", "=r,r", [ready], dtype=gl.int32, is_pure=False, pack=1
    )
    thread_barrier()


@gluon.jit
def _acquire(ptr):
    return gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load(w_desc, e_desc, ring, step, batch, strip, height, panel, flag_ptr, STRIDE: gl.constexpr, K: gl.constexpr):
    """Load the blocks of a tile's sum, one for each step, as they become free. Those from which on shared strips are added come after
    the flags of these, which start at flag_ptr."""
    w_bufs, e_bufs, full, empty = ring
    STAGES: gl.constexpr = e_bufs.shape[0]
    BLOCK_K: gl.constexpr = e_bufs.shape[2]
    FREE: gl.constexpr = free_steps(K, BLOCK_K, 3 * e_bufs.shape[3] // 2 // COLUMNS)
    for k in range(0, K, BLOCK_K):
        stage = step % STAGES
        if flag_ptr is not None:
            if k == FREE * BLOCK_K:
                _wait_for(flag_ptr, height, STRIDE)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        for i in gl.static_range(3):
            mbarrier.expect(full.index(stage), e_desc.block_type.nbytes + (i + 1) * w_desc.block_type.nbytes, pred=height == i + 1)
        load_tile(e_desc, [batch, k, panel * e_bufs.shape[3]], full.index(stage), e_bufs.index(stage))
        for i in gl.static_range(3):
            load_tile(w_desc, [(strip + i) * ROWS, k], full.index(stage), w_bufs.index(stage * 3 + i), pred=i < height)
        step += 1
    return step


@gluon.jit
def _produce(
    inputs, shared, state_ptr, ring, mail, sizes,
    M: gl.constexpr, K: gl.constexpr, SHARED_K: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    w_desc, e_desc, shared_w_desc, shared_e_desc = inputs
    _, indices_ptr, _, flags_ptr = shared
    shared_tiles, tiles, shared_whole, whole = sizes
    step = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = _deal(state_ptr, mail, turn)
    while number < tiles:
        if number < shared_tiles:
            if shared_w_desc is not None:
                batch, strip, height, panel = _tile(number, shared_whole, M, PANELS)
                step = _load(shared_w_desc, shared_e_desc, ring, step, batch, strip, height, panel, None, PANELS, SHARED_K)
        else:
            if w_desc is not None:
                batch, strip, height, panel = _tile(number - shared_tiles, whole, M, PANELS)
                flag_ptr = None
                if flags_ptr is not None:
                    flag_ptr = flags_ptr + _strip(gl.load(indices_ptr[0] + batch).to(gl.int32), strip, panel, M, PANELS)
                step = _load(w_desc, e_desc, ring, step, batch, strip, height, panel, flag_ptr, PANELS, K)
        turn += 1
        number = _deal(state_ptr, mail, turn)


# -- shared products -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_fragments(ptr, WIDTH: gl.constexpr):
    """[64, WIDTH] of a shared product: every thread finds its own elements in turn, 512 bytes for a warp."""
    x = gl.load(ptr + gl.arange(0, ROWS * WIDTH, layout=fragment_layout()))
    return x.reshape([WIDTH // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, WIDTH])


@gluon.jit
def _store_fragments(ptr, x):
    WIDTH: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([ROWS * WIDTH])
    gl.store(ptr + gl.arange(0, ROWS * WIDTH, layout=fragment_layout()), gl.convert_layout(x, fragment_layout(), assert_trivial=True))


@gluon.jit
def _anew(x):
    """x, defined again: at no cost, as the assembler removes it after it has looked at products."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _add_columns(acc, x, FIRST: gl.constexpr):
    """acc, x added to its columns from FIRST on. Columns are registers: nothing moves. The others are defined anew with them, as ptxas
    serialises products whose accumulator is defined anew in part."""
    WIDTH: gl.constexpr = acc.shape[1]
    if x.shape[1] == WIDTH:
        return acc + gl.convert_layout(x, acc.type.layout, assert_trivial=True)
    else:
        left, right = acc.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)).split()
        if FIRST < WIDTH // 2:
            left, right = _add_columns(left, x, FIRST), _anew(right)
        else:
            left, right = _anew(left), _add_columns(right, x, FIRST - WIDTH // 2)
        return gl.convert_layout(gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, WIDTH]), acc.type.layout, assert_trivial=True)


@gluon.jit
def _shared_columns(ptrs, FIRST: gl.constexpr):
    """Sum of the shared products' columns from FIRST on."""
    total = _load_fragments(ptrs[0] + FIRST * ROWS, COLUMNS)
    for level in gl.static_range(1, len(ptrs)):
        total += _load_fragments(ptrs[level] + FIRST * ROWS, COLUMNS)
    return total


@gluon.jit
def _shared_part(shared, PART: gl.constexpr, WIDE_PARTS: gl.constexpr):
    """The PART-th columns to be added, those of the wide product first."""
    wide_ptrs, half_ptrs = shared
    if PART < WIDE_PARTS:
        return _shared_columns(wide_ptrs, PART * COLUMNS)
    else:
        return _shared_columns(half_ptrs, (PART - WIDE_PARTS) * COLUMNS)


# -- products --------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _product(w, e, acc, FIRST: gl.constexpr, DEPTH: gl.constexpr):
    """acc + w @ e over DEPTH of their common dimension, a multiple of 16."""
    LENGTH: gl.constexpr = 64 if DEPTH == 64 else 32 if DEPTH >= 32 else 16
    acc = warpgroup_mma(w.slice(FIRST, LENGTH, 1), e.slice(FIRST, LENGTH, 0), acc, is_async=True)
    if DEPTH > LENGTH:
        acc = _product(w, e, acc, FIRST + LENGTH, DEPTH - LENGTH)
    return acc


@gluon.jit
def _step(
    ring, step, wide, half, GROUP: gl.constexpr, WIDE: gl.constexpr, HALF: gl.constexpr, HALF_FIRST: gl.constexpr, DEPTH: gl.constexpr
):  # fmt: skip
    """Issue the products of a step, those that are complete first first."""
    w_bufs, e_bufs, full, _ = ring
    STAGES: gl.constexpr = e_bufs.shape[0]
    WIDTH: gl.constexpr = e_bufs.shape[3]
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    e = e_bufs.index(stage).reshape([e_bufs.shape[2], WIDTH])
    if HALF and HALF_FIRST:
        half = _product(w_bufs.index(stage * 3 + 2 * WIDE), e.slice(GROUP * (WIDTH // 2), WIDTH // 2, 1), half, 0, DEPTH)
    if WIDE:
        wide = _product(w_bufs.index(stage * 3 + GROUP), e, wide, 0, DEPTH)
    if HALF and not HALF_FIRST:
        half = _product(w_bufs.index(stage * 3 + 2 * WIDE), e.slice(GROUP * (WIDTH // 2), WIDTH // 2, 1), half, 0, DEPTH)
    return wide, half


@gluon.jit
def _wait(wide, half, WIDE: gl.constexpr, HALF: gl.constexpr, PENDING: gl.constexpr):
    if WIDE and HALF:
        wide, half = warpgroup_mma_wait(PENDING, deps=(wide, half))
    elif WIDE:
        wide = warpgroup_mma_wait(PENDING, deps=(wide,))
    else:
        half = warpgroup_mma_wait(PENDING, deps=(half,))
    return wide, half


@gluon.jit
def _release(ring, step, wanted):
    STAGES: gl.constexpr = ring[1].shape[0]
    mbarrier.arrive(ring[3].index(step % STAGES), count=1, pred=wanted)


@gluon.jit
def _multiply(ring, step, shared, GROUP: gl.constexpr, WIDE: gl.constexpr, HALF: gl.constexpr, K: gl.constexpr):
    """A group's part of a tile of W @ E: 64 rows over all columns if WIDE, 64 over its half of them if HALF. The shared products' parts
    are added by columns, one by one between the last steps; those are written out, as registers have no index."""
    wide_ptrs, half_ptrs = shared
    BLOCK_K: gl.constexpr = ring[1].shape[2]
    WIDTH: gl.constexpr = ring[1].shape[3]
    STEPS: gl.constexpr = cdiv(K, BLOCK_K)
    ROUND: gl.constexpr = 64 // BLOCK_K  # steps between two additions
    WIDE_PARTS: gl.constexpr = WIDTH // COLUMNS if WIDE and len(wide_ptrs) > 0 else 0
    PARTS: gl.constexpr = WIDE_PARTS + (WIDTH // 2 // COLUMNS if HALF and len(half_ptrs) > 0 else 0)
    ROUNDS: gl.constexpr = min(cdiv(STEPS, ROUND), max(PARTS, 1))
    FREE: gl.constexpr = free_steps(K, BLOCK_K, ROUNDS)
    GROUPS: gl.constexpr = WIDE + HALF
    upcoming = None
    wide = gl.zeros([ROWS, WIDTH], gl.float32, product_layout(WIDTH))
    half = gl.zeros([ROWS, WIDTH // 2], gl.float32, product_layout(WIDTH // 2))
    for i in range(opaque(gl.to_tensor(FREE))):
        wide, half = _step(ring, step, wide, half, GROUP, WIDE, HALF, False, BLOCK_K)
        wide, half = _wait(wide, half, WIDE, HALF, GROUPS)
        _release(ring, step - 1, i > 0)
        step += 1
    if FREE > 0:
        wide, half = _wait(wide, half, WIDE, HALF, 0)
        _release(ring, step - 1, True)
    for i in gl.static_range(max(ROUNDS, PARTS)):
        if i < ROUNDS:
            for j in gl.static_range(FREE + i * ROUND, min(FREE + (i + 1) * ROUND, STEPS)):
                wide, half = _step(ring, step, wide, half, GROUP, WIDE, HALF, i >= WIDE_PARTS and i < PARTS, depth(K, BLOCK_K, j))
                if j > FREE + i * ROUND:
                    wide, half = _wait(wide, half, WIDE, HALF, GROUPS)
                    _release(ring, step - 1, True)
                step += 1
        if i < PARTS:
            if i == 0 or GROUPS == 2:
                x = _shared_part(shared, i, WIDE_PARTS)
            else:
                x = upcoming
            if i + 1 < PARTS and GROUPS == 1:  # there are registers for another
                upcoming = _shared_part(shared, i + 1, WIDE_PARTS)
        if i < ROUNDS:
            wide, half = _wait(wide, half, WIDE, HALF, GROUPS - 1)
            if GROUPS == 1:
                _release(ring, step - 1, True)
        if i < WIDE_PARTS:
            wide = _add_columns(wide, x, i * COLUMNS)
        elif i < PARTS:
            half = _add_columns(half, x, (i - WIDE_PARTS) * COLUMNS)
        if i < ROUNDS and GROUPS == 2:
            wide, half = _wait(wide, half, WIDE, HALF, 0)
            _release(ring, step - 1, True)
    return step, wide, half


# -- the groups that multiply ----------------------------------------------------------------------------------------------------


@gluon.jit
def _put(acc, out_desc, stages, batch, row, column, PLACE: gl.constexpr):
    """Store a strip through the staging buffers, as many columns at once as one has. PLACE: buffers filled for this tile before."""
    WIDTH: gl.constexpr = acc.shape[1]
    BUFFERS: gl.constexpr = stages.shape[0]
    if WIDTH > stages.shape[3]:
        left, right = acc.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)).split()
        _put(left, out_desc, stages, batch, row, column, PLACE)
        _put(right, out_desc, stages, batch, row, column + WIDTH // 2, PLACE + WIDTH // 2 // stages.shape[3])
    else:
        if PLACE == 0:
            tma.store_wait(0)
        elif PLACE >= BUFFERS:
            tma.store_wait(BUFFERS - 1)
        thread_barrier()
        stage = stages.index(PLACE % BUFFERS)
        stage.reshape([ROWS, WIDTH]).store(gl.convert_layout(acc.to(stages.dtype), product_layout(WIDTH), assert_trivial=True))
        fence_async_shared()
        thread_barrier()
        store_tile(out_desc, [batch, row, column], stage)


@gluon.jit
def _shared_tile(
    ring, step, target, place, GROUP: gl.constexpr, WIDE: gl.constexpr, HALF: gl.constexpr,
    M: gl.constexpr, K: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    shared_ptr, flags_ptr = target
    batch, strip, panel = place
    SIZE: gl.constexpr = ROWS * ring[1].shape[3]
    step, wide, half = _multiply(ring, step, ((), ()), GROUP, WIDE, HALF, K)
    wide_strip = _strip(batch, strip + GROUP, panel, M, PANELS)
    half_strip = _strip(batch, strip + 2 * WIDE, panel, M, PANELS)
    if WIDE:
        _store_fragments(shared_ptr + wide_strip.to(gl.int64) * SIZE, wide)
    if HALF:
        _store_fragments(shared_ptr + half_strip.to(gl.int64) * SIZE + GROUP * (SIZE // 2), half)
    if flags_ptr is not None:
        thread_barrier()
        if WIDE:
            gl.atomic_add(flags_ptr + wide_strip, 2, sem="release", scope="gpu")
        if HALF:
            gl.atomic_add(flags_ptr + half_strip, 1, sem="release", scope="gpu")
    return step


@gluon.jit
def _candidate_tile(
    ring, step, target, place, addends_ptr, indices_ptr, GROUP: gl.constexpr, WIDE: gl.constexpr, HALF: gl.constexpr,
    M: gl.constexpr, K: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    out_desc, stages = target
    batch, strip, panel = place
    WIDTH: gl.constexpr = ring[1].shape[3]
    wide_ptrs, half_ptrs = (), ()
    for level in gl.static_range(len(addends_ptr)):
        index = gl.load(indices_ptr[level] + batch).to(gl.int32)
        wide_strip = _strip(index, strip + GROUP, panel, M, PANELS)
        half_strip = _strip(index, strip + 2 * WIDE, panel, M, PANELS)
        wide_ptrs = wide_ptrs + (addends_ptr[level] + wide_strip.to(gl.int64) * (ROWS * WIDTH),)
        half_ptrs = half_ptrs + (addends_ptr[level] + half_strip.to(gl.int64) * (ROWS * WIDTH) + GROUP * (ROWS * WIDTH // 2),)
    step, wide, half = _multiply(ring, step, (wide_ptrs, half_ptrs), GROUP, WIDE, HALF, K)
    if HALF:
        _put(half, out_desc, stages, batch, (strip + 2 * WIDE) * ROWS, panel * WIDTH + GROUP * (WIDTH // 2), 0)
    if WIDE:
        _put(wide, out_desc, stages, batch, (strip + GROUP) * ROWS, panel * WIDTH, WIDTH // 2 // stages.shape[3] if HALF else 0)
    return step


@gluon.jit
def _consume(
    GROUP: gl.constexpr, out_desc, stages, shared, ring, mail, sizes,
    M: gl.constexpr, K: gl.constexpr, SHARED_K: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    addends_ptr, indices_ptr, shared_ptr, flags_ptr = shared
    shared_tiles, tiles, shared_whole, whole = sizes
    step = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = _take(mail, turn)
    while number < tiles:
        if number < shared_tiles:
            if shared_ptr is not None:
                batch, strip, height, panel = _tile(number, shared_whole, M, PANELS)
                for h in gl.static_range(1, 4):
                    if has_height(M, h):
                        if height == h:
                            step = _shared_tile(
                                ring, step, (shared_ptr, flags_ptr), (batch, strip, panel), GROUP, h > 1, h != 2, M, SHARED_K, PANELS
                            )  # fmt: skip
        else:
            if out_desc is not None:
                batch, strip, height, panel = _tile(number - shared_tiles, whole, M, PANELS)
                for h in gl.static_range(1, 4):
                    if has_height(M, h):
                        if height == h:
                            step = _candidate_tile(
                                ring, step, (out_desc, stages), (batch, strip, panel), addends_ptr, indices_ptr,
                                GROUP, h > 1, h != 2, M, K, PANELS,
                            )  # fmt: skip
        turn += 1
        number = _take(mail, turn)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(do_not_specialize=["shared_tiles", "tiles", "shared_whole", "whole"])
def linear_compress_fwd_hopper_kernel(
    w_desc, e_desc, out_desc, addends_ptr, indices_ptr, shared_w_desc, shared_e_desc, shared_ptr, state_ptr,
    shared_tiles, tiles, shared_whole, whole,
    M: gl.constexpr, K: gl.constexpr, SHARED_K: gl.constexpr, PANELS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """out[b] = W @ E[b] + Σ_l addends_l[index_l[b]], and before it, on the same thread blocks, shared[u] = W' @ E'[u]; either alone
    without the descriptors of the other. Tiles up to `shared_tiles` are the shared level's. `state` starts as zeros: the number of tiles
    dealt, and from its fifth on, how much of each shared strip is stored."""
    any_desc = e_desc if e_desc is not None else shared_e_desc
    any_w_desc = w_desc if w_desc is not None else shared_w_desc
    w_bufs = gl.allocate_shared_memory(any_desc.dtype, [STAGES * 3, ROWS, BLOCK_K], any_w_desc.layout)
    e_bufs = gl.allocate_shared_memory(any_desc.dtype, [STAGES, 1, BLOCK_K, BLOCK_N], any_desc.layout)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = w_bufs, e_bufs, make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    mail = numbers, make_barriers(2, 1), make_barriers(2, 2)
    sizes = shared_tiles, tiles, shared_whole, whole
    left_stages, right_stages, flags_ptr = None, None, None
    if out_desc is not None:
        if shared_ptr is not None:
            flags_ptr = state_ptr + 4
        left_stages = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS, 1, ROWS, 64], out_desc.layout)
        right_stages = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS, 1, ROWS, 64], out_desc.layout)
    inputs = w_desc, e_desc, shared_w_desc, shared_e_desc
    shared = addends_ptr, indices_ptr, shared_ptr, flags_ptr
    gl.warp_specialize(
        [
            (_consume, (0, out_desc, left_stages, shared, ring, mail, sizes, M, K, SHARED_K, PANELS)),
            (_consume, (1, out_desc, right_stages, shared, ring, mail, sizes, M, K, SHARED_K, PANELS)),
            (_produce, (inputs, shared, state_ptr, ring, mail, sizes, M, K, SHARED_K, PANELS)),
        ],
        [4, 1],
        [240, 24],
    )
