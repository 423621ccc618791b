"""Block attention for Hopper: the same computation, with tiles loaded and stored by the tensor memory accelerator.

A thread block of four warps takes the 64 rows of a place (eight warps the 128 of a block so large), a few heads of them in turn; two or
three share a multiprocessor. An operand's buffer is filled for the next head as soon as the last product has read it. Rotary turns q and k
where they lie in shared memory, and dq and dk in the registers that the products leave them in: every thread meets the same rows and pairs
of columns there, and keeps their cos and sin for all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.device import descriptor_sizes, device_properties, has_descriptor
from ..common.gluon_api import load_tile, reinterpret, store_tile, thread_barrier
from ..common.pipeline import LOG2_E, box_layout, mma_layout
from ..common.ptxas import safe_ptxas


@gluon.constexpr_function
def pairs_layout(rows, width):
    """Of the even or the odd columns of such a product, [rows, width / 2]."""
    registers = [[8, 0]] + [[0, 4 << i] for i in range((width // 8).bit_length() - 1)]
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warps, [], [rows, width // 2])


@gluon.constexpr_function
def words_layout():
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


@gluon.constexpr_function
def rows_of_a_tile(block_size):
    return max(block_size, 64)


# -- tiles ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _tile(place, offsets_ptr, num_segments, ROWS: gl.constexpr):
    """First row, number of rows (none: not positive) and first position of the tile at a place: that of the last segment whose first place
    is not past it."""
    segment = gl.to_tensor(0)
    high = num_segments
    while high - segment > 1:
        middle = (segment + high) // 2
        past = gl.load(offsets_ptr + middle) // ROWS + middle > place
        segment = gl.where(past, segment, middle)
        high = gl.where(past, middle, high)
    start = gl.load(offsets_ptr + segment)
    position = ((place - start // ROWS - segment) * ROWS).to(gl.int32)
    row = start.to(gl.int32) + position
    return row, (gl.load(offsets_ptr + segment + 1) - start).to(gl.int32) - position, position


@gluon.jit
def _anew(x):
    """x, of which the compiler does not know that it is the same in every turn: a tail's addresses would fill registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch(desc, buf, barrier, row, head, wanted):
    mbarrier.expect(barrier, desc.block_type.nbytes, pred=wanted)
    load_tile(desc, [head, row, 0], barrier, buf, pred=wanted)


# -- rotary ----------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _table(
    cos_ptr, sin_ptr, positions_ptr, num_positions, row, position, num_rows,
    ROTATE: gl.constexpr, RELATIVE: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """cos and sin of a tile's rows and pairs; numbers without rotary. Positions past the table take its last row."""
    if ROTATE:
        L: gl.constexpr = pairs_layout(ROWS, WIDTH)
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
        pairs = gl.arange(0, WIDTH // 2, layout=gl.SliceLayout(0, L))
        positions = rows if RELATIVE else position + rows
        if positions_ptr is not None and not RELATIVE:
            positions = gl.load(positions_ptr + row + rows, mask=rows < num_rows, other=0).to(gl.int32)
        places = gl.minimum(positions, num_positions - 1)[:, None] * (DIM // 2) + pairs[None, :]
        mask = (rows < num_rows)[:, None] & (pairs < DIM // 2)[None, :]
        return gl.load(cos_ptr + places, mask=mask, other=0.0), gl.load(sin_ptr + places, mask=mask, other=0.0)
    else:
        return 1.0, 0.0


@gluon.jit
def _unpack(words, DTYPE: gl.constexpr):
    if DTYPE == gl.bfloat16:
        return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)
    else:
        low = (words & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        return low.to(gl.float32), high.to(gl.float32)


@gluon.jit
def _pack(even, odd, DTYPE: gl.constexpr):
    """Both rounded to 16 bits, in one word."""
    if DTYPE == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _words(buf):
    return reinterpret(buf, gl.int32, [buf.shape[0], buf.shape[1] // 2], words_layout())


@gluon.jit
def _clear(buf, num_rows):
    """What follows the rows of a tile becomes 0."""
    if num_rows < buf.shape[0]:
        L: gl.constexpr = pairs_layout(buf.shape[0], buf.shape[1])
        rows = gl.arange(0, buf.shape[0], layout=gl.SliceLayout(1, L))
        words_buf = _words(buf)
        words_buf.store(gl.where((rows < num_rows)[:, None], words_buf.load(L), 0))


@gluon.jit
def _turn(buf, cos, sin, num_rows, PRECISE: gl.constexpr):
    """Turn the rows of a tile where they lie; what follows them becomes 0. Returns the unit that they are then given in.

    PRECISE: in fp16, which keeps three bits more than bf16; the unit, a power of two, keeps them in its range.
    """
    L: gl.constexpr = pairs_layout(buf.shape[0], buf.shape[1])
    rows = gl.arange(0, buf.shape[0], layout=gl.SliceLayout(1, L))
    words_buf = _words(buf)
    even, odd = _unpack(gl.where((rows < num_rows)[:, None], words_buf.load(L), 0), buf.dtype)
    unit = 1.0
    if PRECISE:
        unit = _unit(gl.maximum(gl.abs(even), gl.abs(odd)))
        even, odd = even * (1.0 / unit), odd * (1.0 / unit)
    words_buf.store(_pack(even * cos - odd * sin, odd * cos + even * sin, gl.float16 if PRECISE else buf.dtype))
    return unit


@gluon.jit
def _unit(x):
    """The largest power of two that is not above all of x >= 0, within reason; NaN does not count, and where x has an infinity, 1."""
    largest = gl.max(gl.max(x, 1), 0)
    power = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    return gl.where(largest < float("inf"), gl.minimum(gl.maximum(power, 2.0**-100), 2.0**100), 1.0)


@gluon.jit
def _as(buf, DTYPE: gl.constexpr):
    return reinterpret(buf, DTYPE, [buf.shape[0], buf.shape[1]], buf.layout)


# -- products ----------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _softmax(scores, num_rows, scale, BLOCK: gl.constexpr):
    """softmax(scale · scores) within the blocks of a tile, 0 elsewhere; scale in base 2."""
    ROWS: gl.constexpr = scores.shape[0]
    L: gl.constexpr = scores.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))[:, None]
    columns = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))[None, :]
    visible = (columns < num_rows) & (rows < num_rows)
    if BLOCK < ROWS:
        visible = visible & (rows // BLOCK == columns // BLOCK)
    scores = gl.where(visible, scores * scale, float("-inf"))
    largest = gl.max(scores, 1)
    p = gl.exp2(scores - gl.where(largest == float("-inf"), 0.0, largest)[:, None])
    total = gl.sum(p, 1)
    return p * (1.0 / gl.where(total > 0, total, 1.0))[:, None]


@gluon.jit
def _put(
    acc, stage, desc, ptr, stride_row, stride_head, row, head, num_rows, cos, sin,
    ROTATE: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Store a tile through the staging buffer; ROTATE turns it back before its one rounding."""
    ROWS: gl.constexpr = stage.shape[0]
    WIDTH: gl.constexpr = stage.shape[1]
    tma.store_wait(0)
    thread_barrier()
    even, odd = acc.reshape([ROWS, WIDTH // 2, 2]).split()
    even = gl.convert_layout(even, pairs_layout(ROWS, WIDTH), assert_trivial=True)
    odd = gl.convert_layout(odd, pairs_layout(ROWS, WIDTH), assert_trivial=True)
    if ROTATE:
        turned = even * cos + odd * sin
        odd = odd * cos - even * sin
        even = turned
    _words(stage).store(_pack(even, odd, stage.dtype))
    if num_rows >= ROWS:
        fence_async_shared()
        thread_barrier()
        store_tile(desc, [head, row, 0], stage.reshape([1, ROWS, WIDTH]))
    else:
        thread_barrier()
        L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [ROWS // 16, 1], [1, 0])
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
        columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
        ptrs = ptr + (row + rows).to(gl.int64)[:, None] * stride_row + head * stride_head + columns[None, :]
        gl.store(ptrs, stage.load(L), mask=(rows < num_rows)[:, None] & (columns < DIM)[None, :])


# -- kernels -----------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def _buffer(desc, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """As the accelerator fills it, [1, ROWS, WIDTH], and as products read it, [ROWS, WIDTH]."""
    tile = gl.allocate_shared_memory(desc.dtype, [1, ROWS, WIDTH], desc.layout)
    return tile, tile.reshape([ROWS, WIDTH])


@safe_ptxas
@gluon.jit(do_not_specialize=["num_positions", "num_segments"])
def block_attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, offsets_ptr, cos_ptr, sin_ptr, positions_ptr,
    num_positions, num_segments, scale, stride_om, stride_oh,
    HEADS: gl.constexpr, TURNS: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr,
    ROTATE: gl.constexpr, ROTATE_V: gl.constexpr, RELATIVE: gl.constexpr, PRECISE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = rows_of_a_tile(BLOCK)
    DTYPE: gl.constexpr = q_desc.dtype
    q_full, k_full, v_full = _barrier(), _barrier(), _barrier()
    q_tile, q_buf = _buffer(q_desc, ROWS, WIDTH)
    k_tile, k_buf = _buffer(k_desc, ROWS, WIDTH)
    v_tile, v_buf = _buffer(v_desc, ROWS, WIDTH)
    _, stage = _buffer(out_desc, ROWS, WIDTH)
    QK_DTYPE: gl.constexpr = gl.float16 if PRECISE else DTYPE
    q_turned, k_turned = _as(q_buf, QK_DTYPE), _as(k_buf, QK_DTYPE)
    no_scores = gl.zeros([ROWS, ROWS], gl.float32, mma_layout(ROWS, ROWS))
    no_rows = gl.zeros([ROWS, WIDTH], gl.float32, mma_layout(ROWS, WIDTH))

    first_head = gl.program_id(0) % (HEADS // TURNS) * TURNS
    row, num_rows, position = _tile(gl.program_id(0) // (HEADS // TURNS), offsets_ptr, num_segments, ROWS)
    _fetch(q_desc, q_tile, q_full, row, first_head, num_rows > 0)
    _fetch(k_desc, k_tile, k_full, row, first_head, num_rows > 0)
    _fetch(v_desc, v_tile, v_full, row, first_head, num_rows > 0)
    cos, sin = _table(cos_ptr, sin_ptr, positions_ptr, num_positions, row, position, num_rows, ROTATE, RELATIVE, DIM, ROWS, WIDTH)
    for turn in range(gl.where(num_rows > 0, TURNS, 0)):
        row, num_rows = _anew(row), _anew(num_rows)
        head = first_head + turn
        more = turn + 1 < TURNS
        phase = turn & 1
        mbarrier.wait(q_full, phase)
        mbarrier.wait(k_full, phase)
        unit = 1.0
        if ROTATE:  # otherwise what follows the rows reaches only scores that are masked
            unit = _turn(q_buf, cos, sin, num_rows, PRECISE) * _turn(k_buf, cos, sin, num_rows, PRECISE)
            fence_async_shared()
            thread_barrier()
        scores = warpgroup_mma(q_turned, k_turned.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full, phase)
        if ROTATE_V:
            _turn(v_buf, cos, sin, num_rows, False)
        else:
            _clear(v_buf, num_rows)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        fence_async_shared()
        thread_barrier()
        _fetch(q_desc, q_tile, q_full, row, head + 1, more)
        _fetch(k_desc, k_tile, k_full, row, head + 1, more)
        p = _softmax(scores, num_rows, scale * unit * LOG2_E, BLOCK)
        p = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, mma_layout(ROWS, WIDTH), 2))
        out = warpgroup_mma(p, v_buf, no_rows, use_acc=False, is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        _put(out, stage, out_desc, out_ptr, stride_om, stride_oh, row, head, num_rows, cos, sin, False, DIM)
        _fetch(v_desc, v_tile, v_full, row, head + 1, more)
    tma.store_wait(0)


@safe_ptxas
@gluon.jit(do_not_specialize=["num_positions", "num_segments"])
def block_attention_bwd_hopper_kernel(
    do_desc, q_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, offsets_ptr, cos_ptr, sin_ptr, positions_ptr,
    num_positions, num_segments, scale, stride_dqm, stride_dqh, stride_dkm, stride_dkh, stride_dvm, stride_dvh,
    HEADS: gl.constexpr, TURNS: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr,
    ROTATE: gl.constexpr, ROTATE_V: gl.constexpr, RELATIVE: gl.constexpr, PRECISE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = rows_of_a_tile(BLOCK)
    DTYPE: gl.constexpr = q_desc.dtype
    q_full, k_full, v_full, do_full = _barrier(), _barrier(), _barrier(), _barrier()
    q_tile, q_buf = _buffer(q_desc, ROWS, WIDTH)
    k_tile, k_buf = _buffer(k_desc, ROWS, WIDTH)
    v_tile, v_buf = _buffer(v_desc, ROWS, WIDTH)
    do_tile, do_buf = _buffer(do_desc, ROWS, WIDTH)
    _, stage = _buffer(dq_desc, ROWS, WIDTH)
    QK_DTYPE: gl.constexpr = gl.float16 if PRECISE else DTYPE
    q_turned, k_turned = _as(q_buf, QK_DTYPE), _as(k_buf, QK_DTYPE)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], DTYPE)
    p_buf = gl.allocate_shared_memory(DTYPE, [ROWS, ROWS], square)
    ds_buf = gl.allocate_shared_memory(QK_DTYPE, [ROWS, ROWS], square)
    no_scores = gl.zeros([ROWS, ROWS], gl.float32, mma_layout(ROWS, ROWS))
    no_rows = gl.zeros([ROWS, WIDTH], gl.float32, mma_layout(ROWS, WIDTH))

    first_head = gl.program_id(0) % (HEADS // TURNS) * TURNS
    row, num_rows, position = _tile(gl.program_id(0) // (HEADS // TURNS), offsets_ptr, num_segments, ROWS)
    _fetch(q_desc, q_tile, q_full, row, first_head, num_rows > 0)
    _fetch(k_desc, k_tile, k_full, row, first_head, num_rows > 0)
    _fetch(v_desc, v_tile, v_full, row, first_head, num_rows > 0)
    _fetch(do_desc, do_tile, do_full, row, first_head, num_rows > 0)
    cos, sin = _table(cos_ptr, sin_ptr, positions_ptr, num_positions, row, position, num_rows, ROTATE, RELATIVE, DIM, ROWS, WIDTH)
    for turn in range(gl.where(num_rows > 0, TURNS, 0)):
        row, num_rows = _anew(row), _anew(num_rows)
        head = first_head + turn
        more = turn + 1 < TURNS
        phase = turn & 1
        mbarrier.wait(q_full, phase)
        mbarrier.wait(k_full, phase)
        q_unit, k_unit, ds_unit = 1.0, 1.0, 1.0
        if ROTATE:
            q_unit = _turn(q_buf, cos, sin, num_rows, PRECISE)
            k_unit = _turn(k_buf, cos, sin, num_rows, PRECISE)
        else:
            _clear(q_buf, num_rows)
            _clear(k_buf, num_rows)
        fence_async_shared()
        thread_barrier()
        scores = warpgroup_mma(q_turned, k_turned.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full, phase)
        mbarrier.wait(do_full, phase)
        _clear(do_buf, num_rows)
        if ROTATE_V:
            _turn(v_buf, cos, sin, num_rows, False)
        fence_async_shared()
        thread_barrier()
        dp = warpgroup_mma(do_buf, v_buf.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p = _softmax(scores, num_rows, scale * q_unit * k_unit * LOG2_E, BLOCK)
        p_buf.store(p.to(DTYPE))
        dp = warpgroup_mma_wait(0, deps=(dp,))
        dp = gl.where(p > 0, dp, 0.0)
        ds = p * (dp - gl.sum(p * dp, 1)[:, None]) * scale
        if PRECISE:
            ds_unit = _unit(gl.abs(ds))
            ds *= 1.0 / ds_unit
        ds_buf.store(ds.to(QK_DTYPE))
        fence_async_shared()
        thread_barrier()
        _fetch(v_desc, v_tile, v_full, row, head + 1, more)

        dv = warpgroup_mma(p_buf.permute((1, 0)), do_buf, no_rows, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(0, deps=(dv,))
        _put(dv, stage, dv_desc, dv_ptr, stride_dvm, stride_dvh, row, head, num_rows, cos, sin, ROTATE_V, DIM)
        _fetch(do_desc, do_tile, do_full, row, head + 1, more)
        dq = warpgroup_mma(ds_buf, k_turned, no_rows, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _put(dq * (ds_unit * k_unit), stage, dq_desc, dq_ptr, stride_dqm, stride_dqh, row, head, num_rows, cos, sin, ROTATE, DIM)
        _fetch(k_desc, k_tile, k_full, row, head + 1, more)
        dk = warpgroup_mma(ds_buf.permute((1, 0)), q_turned, no_rows, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        _put(dk * (ds_unit * q_unit), stage, dk_desc, dk_ptr, stride_dkm, stride_dkh, row, head, num_rows, cos, sin, ROTATE, DIM)
        _fetch(q_desc, q_tile, q_full, row, head + 1, more)
    tma.store_wait(0)


# -- launchers ---------------------------------------------------------------------------------------------------------------------


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels support these operands: 16-bit, D a multiple of 8 up to 128, no grouped heads, aligned rows, or no rows at all,
    for which no kernel is launched."""
    if q.device.type != "cuda" or device_properties(q.device)[0] != (9, 0) or k.shape != q.shape:
        return False
    return q.element_size() == 2 and q.shape[2] in range(8, 129, 8) and (q.shape[0] == 0 or all(has_descriptor(x) for x in (q, k, v)))


def forward(q, k, v, out, offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale) -> None:
    """Launch the forward kernel; arguments as those of the portable one."""
    grid, sizes, common = _launch(q, offsets, cos, positions, rotate_v, relative, precise, block_size)
    block_attention_fwd_hopper_kernel[grid](
        *_descriptors(block_size, q, k, v, out), out, offsets, cos, sin, positions, *sizes, scale, *out.stride()[:2], **common,
        maxnreg=168 if block_size <= 64 else None,  # three thread blocks on a multiprocessor
    )  # fmt: skip


def backward(do, q, k, v, dq, dk, dv, offsets, cos, sin, positions, rotate_v, relative, precise, block_size, scale) -> None:
    """Launch the backward kernel; arguments as those of the portable one."""
    do = do if has_descriptor(do) else do.contiguous()
    grid, sizes, common = _launch(q, offsets, cos, positions, rotate_v, relative, precise, block_size)
    block_attention_bwd_hopper_kernel[grid](
        *_descriptors(block_size, do, q, k, v, dq, dk, dv), dq, dk, dv, offsets, cos, sin, positions, *sizes, scale,
        *dq.stride()[:2], *dk.stride()[:2], *dv.stride()[:2], **common, maxnreg=168 if common["WIDTH"] == 64 and block_size <= 64 else None,
    )  # fmt: skip


def _launch(q, offsets, cos, positions, rotate_v: bool, relative: bool, precise: bool, block_size: int):
    """Grid, sizes, and the launch arguments that both kernels share.

    Thread blocks are short: the hardware deals them out evenly, and neighbours read the same rows, which keeps DRAM pages open.
    """
    num_segments, heads = offsets.shape[0] - 1, q.shape[1]
    rotate = cos is not None
    turns = max(n for n in (1, 2, 3, 4) if heads % n == 0)
    common = dict(HEADS=heads, TURNS=turns, DIM=q.shape[2], WIDTH=64 if q.shape[2] <= 64 else 128, BLOCK=block_size)
    common |= dict(ROTATE=rotate, ROTATE_V=rotate and rotate_v, RELATIVE=rotate and relative and positions is None and not rotate_v)
    common |= dict(PRECISE=rotate and precise and q.dtype == torch.bfloat16)
    rows = max(block_size, 64)
    grid = ((q.shape[0] // rows + num_segments) * (heads // turns),)
    return grid, (cos.shape[0] if rotate else 0, num_segments), common | dict(num_warps=rows // 16)


def _descriptors(block_size: int, *tensors: Tensor) -> list[TensorDescriptor]:
    """Of `[L, H, D]`, as `[H, L, D]`, in boxes of a tile's rows of a head."""
    head_dim = tensors[0].shape[2]
    box = [1, max(block_size, 64), 64 if head_dim <= 64 else 128]
    layout = box_layout(tensors[0].dtype, *box)
    return [TensorDescriptor(x, *descriptor_sizes(x), box, layout) for x in tensors]
