"""Jagged attention: Triton forward, dq and dk, dv kernels; the registered operators whose bodies launch them; autograd.

    S = scale · q kᵀ,  P = softmax(S),  O = P v                      per segment and head
    dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P ∘ (dP − rowsum(dO ∘ O)),  dQ = scale · dS K,  dK = scale · dSᵀ Q

Every kernel is persistent over a zigzag schedule (tile_schedule.py); each output tile has one owner, so results are
deterministic. Scores and the stored log-sum-exp (fp32, [H, rows]) are in base 2, whose exponential the hardware has.

Shared operands are not replicated. Keys shared by all segments make one segment of all query rows; only dk, dv need a split of
the query rows into chunks, summed afterwards. Queries shared by all segments are read at row 0 of every segment (`Q_SHARED`)
and their dq is summed over the segments.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import LaunchConfig, attention_config, padded_dim
from .operators import below_autograd, differentiate, operator
from .tile_list import tile_list
from .tiles import load_rows, load_tile, store_rows, zigzag_position, zigzag_waves

LOG2_E = tl.constexpr(1.4426950408889634)


# -- device code -----------------------------------------------------------------------------------------------------------


@triton.jit
def _fwd_block(
    q, k_operand, v_operand, row, head, num_keys, acc, row_max, row_sum, qk_scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """One key block: scores, online softmax, acc += P v."""
    k = load_rows(k_operand, row, head, num_keys, HEAD_DIM, BLOCK_N, BLOCK_D, RAGGED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if RAGGED:
        scores = tl.where((tl.arange(0, BLOCK_N) < num_keys)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
    p = tl.exp2(scores * qk_scale - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None]
    v = load_rows(v_operand, row, head, num_keys, V_DIM, BLOCK_N, BLOCK_DV, RAGGED)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_desc, k_desc, v_desc, q_offsets_ptr, kv_offsets_ptr, tiles_ptr, num_tiles_ptr, scale,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_om, stride_oh, stride_lse,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr, Q_SHARED: tl.constexpr,
):  # fmt: skip
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_operand = q_ptr, q_desc, stride_qm * ALIGN, stride_qh * ALIGN
    k_operand = k_ptr, k_desc, stride_kn * ALIGN, stride_kh * ALIGN
    v_operand = v_ptr, v_desc, stride_vn * ALIGN, stride_vh * ALIGN
    out_operand = out_ptr, None, stride_om * ALIGN, stride_oh * ALIGN
    qk_scale = scale * LOG2_E
    for wave in range(0, zigzag_waves(num_tiles, worker, num_workers)):
        tile_ptr = tiles_ptr + zigzag_position(wave, worker, num_workers) * 3
        head, block, q_start, q_len, kv_start, kv_len = load_tile(tile_ptr, q_offsets_ptr, kv_offsets_ptr)
        row, num_rows = q_start + block * BLOCK_M, q_len - block * BLOCK_M
        q_row = row
        if Q_SHARED:
            q_row = row - q_start
        q = load_rows(q_operand, q_row, head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, q_desc is None)

        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        full = kv_len // BLOCK_N * BLOCK_N
        for n in range(0, full, BLOCK_N):
            acc, row_max, row_sum = _fwd_block(
                q, k_operand, v_operand, kv_start + n, head // GROUP, BLOCK_N, acc, row_max, row_sum, qk_scale,
                HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, False,
            )  # fmt: skip
        if full < kv_len:
            acc, row_max, row_sum = _fwd_block(
                q, k_operand, v_operand, kv_start + full, head // GROUP, kv_len - full, acc, row_max, row_sum, qk_scale,
                HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, True,
            )  # fmt: skip

        # A segment without keys leaves row_sum at 0: its output is 0 and its log-sum-exp -inf.
        acc = acc * (1.0 / tl.where(row_sum > 0, row_sum, 1.0))[:, None]
        store_rows(out_operand, row, head, acc, num_rows, V_DIM, BLOCK_M, BLOCK_DV)
        rows = tl.arange(0, BLOCK_M)
        tl.store(lse_ptr + head.to(tl.int64) * stride_lse + row + rows, row_max + tl.log2(row_sum), mask=rows < num_rows)


@triton.jit
def _dq_block(
    q, do, k_operand, v_operand, row, head, num_keys, lse, delta, acc, qk_scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """One key block: P again from the log-sum-exp, dS = P ∘ (dP − delta), acc += dS k."""
    k = load_rows(k_operand, row, head, num_keys, HEAD_DIM, BLOCK_N, BLOCK_D, RAGGED)
    v = load_rows(v_operand, row, head, num_keys, V_DIM, BLOCK_N, BLOCK_DV, RAGGED)
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * qk_scale - lse[:, None])
    ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    if RAGGED:
        ds = tl.where((tl.arange(0, BLOCK_N) < num_keys)[None, :], ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)


@triton.jit
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, q_desc, k_desc, v_desc, out_desc, do_desc,
    q_offsets_ptr, kv_offsets_ptr, tiles_ptr, num_tiles_ptr, scale,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_om, stride_oh, stride_dom, stride_doh,
    stride_dqm, stride_dqh, stride_lse,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr, Q_SHARED: tl.constexpr,
):  # fmt: skip
    """dq of a tile of query rows; also writes delta = rowsum(dO ∘ O), which the dk, dv kernel reads."""
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_operand = q_ptr, q_desc, stride_qm * ALIGN, stride_qh * ALIGN
    k_operand = k_ptr, k_desc, stride_kn * ALIGN, stride_kh * ALIGN
    v_operand = v_ptr, v_desc, stride_vn * ALIGN, stride_vh * ALIGN
    out_operand = out_ptr, out_desc, stride_om * ALIGN, stride_oh * ALIGN
    do_operand = do_ptr, do_desc, stride_dom * ALIGN, stride_doh * ALIGN
    dq_operand = dq_ptr, None, stride_dqm * ALIGN, stride_dqh * ALIGN
    qk_scale = scale * LOG2_E
    for wave in range(0, zigzag_waves(num_tiles, worker, num_workers)):
        tile_ptr = tiles_ptr + zigzag_position(wave, worker, num_workers) * 3
        head, block, q_start, q_len, kv_start, kv_len = load_tile(tile_ptr, q_offsets_ptr, kv_offsets_ptr)
        row, num_rows = q_start + block * BLOCK_M, q_len - block * BLOCK_M
        q_row = row
        if Q_SHARED:
            q_row = row - q_start
        q = load_rows(q_operand, q_row, head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, q_desc is None)
        do = load_rows(do_operand, row, head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, do_desc is None)
        out = load_rows(out_operand, row, head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, out_desc is None)
        rows = tl.arange(0, BLOCK_M)
        stat = head.to(tl.int64) * stride_lse + row + rows
        lse = tl.load(lse_ptr + stat, mask=rows < num_rows, other=0.0)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(delta_ptr + stat, delta, mask=rows < num_rows)

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        full = kv_len // BLOCK_N * BLOCK_N
        for n in range(0, full, BLOCK_N):
            acc = _dq_block(
                q, do, k_operand, v_operand, kv_start + n, head // GROUP, BLOCK_N, lse, delta, acc, qk_scale,
                HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, False,
            )  # fmt: skip
        if full < kv_len:
            acc = _dq_block(
                q, do, k_operand, v_operand, kv_start + full, head // GROUP, kv_len - full, lse, delta, acc, qk_scale,
                HEAD_DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, True,
            )  # fmt: skip
        store_rows(dq_operand, row, head, acc * scale, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _dkdv_block(
    k, v, q_operand, do_operand, lse_ptr, delta_ptr, q_row, row, head, num_rows, dk, dv, qk_scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """One query block, transposed so that P and dS are first operands: dv += Pᵀ do, dk += dSᵀ q."""
    q = load_rows(q_operand, q_row, head, num_rows, HEAD_DIM, BLOCK_M, BLOCK_D, RAGGED)
    rows = tl.arange(0, BLOCK_M)
    if RAGGED:  # rows past the segment: exp2(0 - inf) = 0, so they add nothing
        lse = tl.load(lse_ptr + row + rows, mask=rows < num_rows, other=float("inf"))
        delta = tl.load(delta_ptr + row + rows, mask=rows < num_rows, other=0.0)
    else:
        lse = tl.load(lse_ptr + row + rows)
        delta = tl.load(delta_ptr + row + rows)
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * qk_scale - lse[None, :])
    do = load_rows(do_operand, row, head, num_rows, V_DIM, BLOCK_M, BLOCK_DV, RAGGED)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, q_desc, k_desc, v_desc, do_desc,
    q_offsets_ptr, kv_offsets_ptr, tiles_ptr, num_tiles_ptr, scale,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_dom, stride_doh,
    stride_dkn, stride_dkh, stride_dvn, stride_dvh, stride_lse,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr, Q_SHARED: tl.constexpr, KV_SHARED: tl.constexpr,
):  # fmt: skip
    """dk, dv of a tile of BLOCK_N key rows; loops over the query heads of its group and their blocks of BLOCK_M rows."""
    worker, num_workers, num_tiles = tl.program_id(0), tl.num_programs(0), tl.load(num_tiles_ptr)
    q_operand = q_ptr, q_desc, stride_qm * ALIGN, stride_qh * ALIGN
    k_operand = k_ptr, k_desc, stride_kn * ALIGN, stride_kh * ALIGN
    v_operand = v_ptr, v_desc, stride_vn * ALIGN, stride_vh * ALIGN
    do_operand = do_ptr, do_desc, stride_dom * ALIGN, stride_doh * ALIGN
    dk_operand = dk_ptr, None, stride_dkn * ALIGN, stride_dkh * ALIGN
    dv_operand = dv_ptr, None, stride_dvn * ALIGN, stride_dvh * ALIGN
    qk_scale = scale * LOG2_E
    for wave in range(0, zigzag_waves(num_tiles, worker, num_workers)):
        tile_ptr = tiles_ptr + zigzag_position(wave, worker, num_workers) * 3
        kv_head, block, q_start, q_len, kv_start, kv_len = load_tile(tile_ptr, q_offsets_ptr, kv_offsets_ptr)
        row, num_rows = kv_start + block * BLOCK_N, kv_len - block * BLOCK_N
        kv_row, q_row = row, q_start
        if KV_SHARED:
            kv_row = row - kv_start
        if Q_SHARED:
            q_row = q_start - q_start
        k = load_rows(k_operand, kv_row, kv_head, num_rows, HEAD_DIM, BLOCK_N, BLOCK_D, k_desc is None)
        v = load_rows(v_operand, kv_row, kv_head, num_rows, V_DIM, BLOCK_N, BLOCK_DV, v_desc is None)

        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        full = q_len // BLOCK_M * BLOCK_M
        for group_head in range(0, GROUP):
            head = kv_head * GROUP + group_head
            lse_head, delta_head = lse_ptr + head.to(tl.int64) * stride_lse, delta_ptr + head.to(tl.int64) * stride_lse
            for m in range(0, full, BLOCK_M):
                dk, dv = _dkdv_block(
                    k, v, q_operand, do_operand, lse_head, delta_head, q_row + m, q_start + m, head, BLOCK_M, dk, dv, qk_scale,
                    HEAD_DIM, V_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION, False,
                )  # fmt: skip
            if full < q_len:
                dk, dv = _dkdv_block(
                    k, v, q_operand, do_operand, lse_head, delta_head, q_row + full, q_start + full, head, q_len - full, dk, dv,
                    qk_scale, HEAD_DIM, V_DIM, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION, True,
                )  # fmt: skip
        store_rows(dk_operand, row, kv_head, dk * scale, num_rows, HEAD_DIM, BLOCK_N, BLOCK_D)
        store_rows(dv_operand, row, kv_head, dv, num_rows, V_DIM, BLOCK_N, BLOCK_DV)


# -- launchers: the bodies of the registered operators ----------------------------------------------------------------------


def _attention_fake(q, k, v, q_offsets, kv_offsets, *schedule_and_scale):
    return _empty_outputs(q, v, q_offsets, q_shared=schedule_and_scale[-2])


@operator("attention", fake=_attention_fake)
def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor,
    tiles: Tensor, num_tiles: Tensor, block_m: int,
    key_tiles: Tensor | None, num_key_tiles: Tensor | None, key_block: int,
    scale: float, q_shared: bool, kv_shared: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel.

    Args:
        q, k, v: `[rows, heads, dim]`, fp32, fp16 or bf16, last dim contiguous.
        q_offsets, kv_offsets: `[B + 1]`. With `q_shared`, q_offsets count output rows (every segment reads q's rows anew). With
            `kv_shared` they describe one segment of all rows; the flag matters to the backward alone.
        tiles, num_tiles, block_m: schedule of query tiles. key_*: schedule of key tiles, for the backward; built there if None.

    Returns:
        out `[rows, H, Dv]` in q's dtype and lse `[H, rows]` fp32, log2 of the sum of exp(scores).
    """
    out, lse = _empty_outputs(q, v, q_offsets, q_shared)
    config, grid, common = _launch("fwd", q, k, v, tiles, block_m)
    if grid:
        align, strides = _strides(q, k, v, out)
        _attention_fwd_kernel[grid](
            q, k, v, out, lse, *_descriptors(align, (q, block_m), (k, config.block), (v, config.block)),
            q_offsets, kv_offsets, tiles, num_tiles, scale, *strides, lse.stride(0),
            **common, ALIGN=align, BLOCK_M=block_m, BLOCK_N=config.block, Q_SHARED=q_shared,
        )  # fmt: skip
    return out, lse


def _backward_fake(do, q, k, v, *saved_and_scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@operator("attention_backward", fake=_backward_fake)
def triton_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor, kv_offsets: Tensor,
    tiles: Tensor, num_tiles: Tensor, block_m: int,
    key_tiles: Tensor | None, num_key_tiles: Tensor | None, key_block: int,
    scale: float, q_shared: bool, kv_shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the dq kernel, which also writes delta, then the dk, dv kernel. A gradient has its operand's shape and dtype."""
    do = do if do.stride(-1) == 1 else do.contiguous()
    delta = torch.empty_like(lse)
    # A shared operand's gradient is one fp32 partial per segment (queries) or chunk of query rows (keys), then a fixed-order sum.
    dq = q.new_empty((lse.shape[1], *q.shape[1:]), dtype=torch.float32 if q_shared else q.dtype)
    config, grid, common = _launch("dq", q, k, v, tiles, block_m)
    if grid:
        align, strides = _strides(q, k, v, out, do, dq)
        _attention_bwd_dq_kernel[grid](
            q, k, v, out, do, dq, lse, delta,
            *_descriptors(align, (q, block_m), (k, config.block), (v, config.block), (out, block_m), (do, block_m)),
            q_offsets, kv_offsets, tiles, num_tiles, scale, *strides, lse.stride(0),
            **common, ALIGN=align, BLOCK_M=block_m, BLOCK_N=config.block, Q_SHARED=q_shared,
        )  # fmt: skip
    if q_shared:
        dq = dq.view(q_offsets.shape[0] - 1, *q.shape).sum(0).to(q.dtype)

    chunks = 1
    if kv_shared:
        q_offsets, kv_offsets, chunks = _chunk_rows(q, k, key_block)
    if kv_shared or key_tiles is None:
        key_tiles, num_key_tiles = tile_list(kv_offsets, q_offsets, chunks * k.shape[0], k.shape[1], key_block, block_m)
    dk, dv = (x.new_empty((chunks * x.shape[0], *x.shape[1:]), dtype=torch.float32 if kv_shared else x.dtype) for x in (k, v))
    config, grid, common = _launch("dkdv", q, k, v, key_tiles, block_m)
    if grid:
        align, strides = _strides(q, k, v, do, dk, dv)
        _attention_bwd_dkdv_kernel[grid](
            q, k, v, do, dk, dv, lse, delta,
            *_descriptors(align, (q, config.block), (k, key_block), (v, key_block), (do, config.block)),
            q_offsets, kv_offsets, key_tiles, num_key_tiles, scale, *strides, lse.stride(0),
            **common, ALIGN=align, BLOCK_M=config.block, BLOCK_N=key_block, Q_SHARED=q_shared, KV_SHARED=kv_shared,
        )  # fmt: skip
    if kv_shared:
        dk, dv = (dx.view(chunks, *x.shape).sum(0).to(x.dtype) for dx, x in ((dk, k), (dv, v)))
    return dq, dk, dv


def _empty_outputs(q: Tensor, v: Tensor, q_offsets: Tensor, q_shared: bool) -> tuple[Tensor, Tensor]:
    rows = q.shape[0] * (q_offsets.shape[0] - 1) if q_shared else q.shape[0]
    return q.new_empty((rows, q.shape[1], v.shape[2])), q.new_empty((q.shape[1], rows), dtype=torch.float32)


def _launch(kernel: str, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, block_m: int) -> tuple[LaunchConfig, tuple[int, ...], dict]:
    """The kernel's table entry, its grid (empty: nothing to do) and the launch arguments that all three kernels share."""
    group = q.shape[1] // k.shape[1]
    config, common = _constants(kernel, group, q.shape[2], v.shape[2], q.element_size(), block_m, q.device, _precision(q))
    workers = min(_device(q.device)[1] * config.ctas_per_sm, tiles.shape[0])
    return config, (workers,) if workers else (), common


@functools.cache
def _constants(kernel, group, head_dim, v_dim, itemsize, query_tile, device, precision) -> tuple[LaunchConfig, dict]:
    config = getattr(attention_config(max(head_dim, v_dim), itemsize, _device(device)[0], query_tile), kernel)
    return config, dict(
        GROUP=group,
        HEAD_DIM=head_dim,
        V_DIM=v_dim,
        BLOCK_D=padded_dim(head_dim),
        BLOCK_DV=padded_dim(v_dim),
        PRECISION=precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _precision(x: Tensor) -> str:
    """How fp32 products are made: six bf16 products carry all 24 bits on the matrix units, a tenth of the time of ordinary fp32
    arithmetic; tf32 where the user allowed it for matrix products. Triton's interpreter knows neither."""
    if x.device.type != "cuda":
        return "ieee"
    return "bf16x6" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def _device(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors; Triton's interpreter runs on host tensors, as four workers."""
    if device.type != "cuda":
        return (9, 0), 4
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count


def _strides(*tensors: Tensor) -> tuple[int, list[int]]:
    """Row and head strides of each tensor in units of `align` elements, the most that divides all of them, up to 16 bytes.

    Triton learns a stride's divisibility only at 16 elements; a row of 3 heads of 40 would load element by element. The kernels
    multiply by the constant `align` instead, which tells the compiler how wide a load may be.
    """
    strides = [x.stride(dim) if x.shape[dim] > 1 else 0 for x in tensors for dim in (0, 1)]
    align = math.gcd(16 // min(x.element_size() for x in tensors), *strides)
    return align, [stride // align for stride in strides]


def _descriptors(align: int, *blocks: tuple[Tensor, int]) -> list[TensorDescriptor | None]:
    """TMA descriptors `[H, rows, D]` for (tensor, rows of a block), where the GPU has TMA and rows start at 16-byte boundaries."""
    device = blocks[0][0].device
    if device.type != "cuda" or _device(device)[0] < (9, 0) or not all(_has_descriptor(x, align) for x, _ in blocks):
        return [None] * len(blocks)
    return [
        # A dimension of size 1 may have any stride: one that TMA takes stands in for it.
        TensorDescriptor(
            x,
            [x.shape[1], x.shape[0], x.shape[2]],
            [*(x.stride(dim) if x.shape[dim] > 1 else 16 for dim in (1, 0)), 1],
            [1, rows, padded_dim(x.shape[2])],
        )
        for x, rows in blocks
    ]


def _has_descriptor(x: Tensor, align: int) -> bool:
    expanded = any(x.stride(dim) == 0 and x.shape[dim] > 1 for dim in (0, 1))
    return align * x.element_size() >= 16 and x.data_ptr() % 16 == 0 and x.shape[0] > 0 and not expanded


def _chunk_rows(q: Tensor, k: Tensor, key_block: int) -> tuple[Tensor, Tensor, int]:
    """Offsets that cut the query rows into chunks, each against all keys, enough to fill the GPU: (q, kv, number of chunks)."""
    tiles = max(1, triton.cdiv(k.shape[0], key_block) * k.shape[1])
    chunks = max(1, min(2 * _device(q.device)[1] // tiles, triton.cdiv(q.shape[0], 256)))
    boundaries = torch.arange(chunks + 1, device=q.device)
    return boundaries * q.shape[0] // chunks, boundaries * k.shape[0], chunks


# -- autograd ----------------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with below_autograd():
            out, lse = triton_attention(*inputs)
        q, k, v, q_offsets, kv_offsets, tiles, num_tiles, block_m, key_tiles, num_key_tiles, *rest = inputs
        ctx.save_for_backward(q, k, v, out, lse, q_offsets, kv_offsets, tiles, num_tiles, key_tiles, num_key_tiles)
        ctx.block_m, ctx.rest = block_m, rest
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, do, _dlse):
        *saved, key_tiles, num_key_tiles = ctx.saved_tensors
        return *triton_attention_backward(do, *saved, ctx.block_m, key_tiles, num_key_tiles, *ctx.rest), *(None,) * 11


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with below_autograd():
            return triton_attention_backward(*inputs)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("jagged_attention is not differentiable twice: its backward kernels have no derivative of their own")


differentiate(triton_attention, _Attention)
differentiate(triton_attention_backward, _AttentionBackward)
