"""Jagged attention: the registered operators whose bodies launch the Triton kernels of attention_kernels.py, and autograd.

    S = scale · q kᵀ,  P = activation(S) · output_scale,  O = P v                      per segment and head
    dV = Pᵀ dO,  dP = dO Vᵀ,  dQ = scale · dS K,  dK = scale · dSᵀ Q
    softmax: dS = P ∘ (dP − rowsum(dO ∘ O));  pointwise: dS = activation'(S) ∘ dP · output_scale

Every kernel is persistent over a zigzag schedule (tile_schedule.py); each output tile has one owner, so results are
deterministic. Softmax scores and the stored log-sum-exp (fp32, [H, rows]) are in base 2, whose exponential the hardware has;
pointwise activations store nothing. Each kernel computes the scores again, but for Hopper's, of which dq may take the dS that
dk, dv has kept (hopper/attention_score_gradients.py).

Shared operands are not replicated. Keys shared by all segments make one segment of all query rows; only dk, dv need a split of
the query rows into chunks, summed afterwards. Queries shared by all segments are read at row 0 of every segment (`Q_SHARED`)
and their dq is summed over the segments. Several lists of query segments are segments of one schedule: of each, its place in its list
says which keys it reads, and a tile of keys goes over its queries list by list.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.activations import activation_factors, activation_function
from ..common.configs import LaunchConfig, padded_dim
from ..common.device import aligned_strides, descriptor_sizes, device_properties, has_descriptor, mean_rows, precision, rows_in_place
from ..common.ops import below_autograd, capability, differentiate, operator, refuse_derivative
from ..schedule.device import fitting_tiles, query_lists
from .configs import LONG, attention_config, attention_tile, hopper_attention_fits, hopper_attention_pays
from .params import MaskParams
from .triton_kernels import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel, attention_fwd_kernel

# -- launchers: the bodies of the registered operators ----------------------------------------------------------------------


def _attention_fake(
    q, k, v, q_offsets, kv_offsets, tiles, num_tiles, block_m, key_tiles, num_key_tiles, key_block, scale, q_shared, kv_shared, activation,
    *options,
):  # fmt: skip
    return _empty_outputs(q, v, q_offsets, q_shared, activation)


@operator("attention", fake=_attention_fake)
def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor,
    tiles: Tensor, num_tiles: Tensor, block_m: int,
    key_tiles: Tensor | None, num_key_tiles: Tensor | None, key_block: int,
    scale: float, q_shared: bool, kv_shared: bool,
    activation: str, mask: list[int] | None, num_targets: Tensor | None, segment_scale: Tensor | None, output_scale: float,
    implementation: str, workspace: int | None = None, batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel.

    Args:
        q, k, v: `[rows, heads, dim]`, fp32, fp16 or bf16, last dim contiguous.
        q_offsets, kv_offsets: `[B + 1]`. With `q_shared`, q_offsets count output rows (every segment reads q's rows anew). With
            `kv_shared` they describe one segment of all rows; the flag matters to the backward alone. Without either or a mask, q_offsets
            may be several lists of segments, `[n · B + 1]`: those at b, B + b, ... read the keys of segment b, and have one segment_scale.
        tiles, num_tiles, block_m: schedule of query tiles. key_*: schedule of key tiles, for the backward; built there if None.
        activation: a public name. mask: as masks.py has it, with `num_targets` `[B]` if it has targets.
        segment_scale: fp32, one for each segment of queries, takes the place of `output_scale` if not None.
        implementation: "triton", "hopper", or "auto", which chooses.
        workspace: limit of the memory, in bytes, that the backward allocates to be faster; None: no limit.
        batch_invariant: kernels, tiles and splits do not depend on the number of rows or segments. The schedule's tile size is not used.

    Returns:
        out `[rows, H, Dv]` in q's dtype and, with softmax, lse `[H, rows]` fp32, log2 of the sum of exp(scores); `[H, 0]` without.
    """
    out, lse = _empty_outputs(q, v, q_offsets, q_shared, activation)
    if _on_hopper(implementation, q, k, v, q_offsets, kv_offsets, q_shared, activation, batch_invariant):
        from . import hopper_forward as hopper

        hopper.forward(
            q, k, v, out, lse, q_offsets, kv_offsets, tiles, num_tiles, block_m, scale, q_shared, activation, mask, num_targets,
            segment_scale, output_scale, batch_invariant,
        )  # fmt: skip
        return out, lse
    config, common = _launch("fwd", q, k, v, block_m, k.shape[0], kv_offsets, activation, mask, batch_invariant)
    _, num_segments = query_lists(q_offsets, kv_offsets)
    sizes = out.shape[0], q.shape[1], config.tile, config.block
    tiles, num_tiles = fitting_tiles(tiles, num_tiles, block_m, q_offsets, kv_offsets, *sizes, mask, num_targets)
    if grid := _grid(config, tiles):
        align, strides = _row_and_head_strides(q, k, v, out)
        factors = activation_factors(activation, q.dtype == torch.bfloat16, scale)
        attention_fwd_kernel[grid](
            q, k, v, out, lse, *_descriptors(align, (k, config.block), (v, config.block)),
            q_offsets, kv_offsets, num_segments, tiles, num_tiles, num_targets, segment_scale, scale, *factors, output_scale, *strides,
            lse.stride(0),
            **common, ALIGN=align, BLOCK_M=config.tile, BLOCK_N=config.block, Q_SHARED=q_shared,
        )  # fmt: skip
    return out, lse


def _backward_fake(do, q, k, v, *rest):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@operator("attention_backward", fake=_backward_fake)
def triton_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor, q_offsets: Tensor, kv_offsets: Tensor,
    tiles: Tensor, num_tiles: Tensor, block_m: int,
    key_tiles: Tensor | None, num_key_tiles: Tensor | None, key_block: int,
    scale: float, q_shared: bool, kv_shared: bool,
    activation: str, mask: list[int] | None, num_targets: Tensor | None, segment_scale: Tensor | None, output_scale: float,
    implementation: str, workspace: int | None = None, batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the dq kernel, which with softmax also writes delta = rowsum(dO ∘ O), then the dk, dv kernel, which reads it; or those for
    Hopper. `out` is read with softmax alone.

    A gradient has its operand's shape and dtype.
    """
    do = rows_in_place(do)
    chunks, key_offsets = 1, (q_offsets, kv_offsets)
    if kv_shared:
        *key_offsets, chunks = _chunk_rows(q, k, key_block)
        key_tiles = None
        segment_scale = None if segment_scale is None else segment_scale.repeat(chunks)
    # A shared operand's gradient is one fp32 partial per segment (queries) or chunk of query rows (keys), then a fixed-order sum.
    dq = q.new_empty((do.shape[0], *q.shape[1:]), dtype=torch.float32 if q_shared else q.dtype)
    dk, dv = (x.new_empty((chunks * x.shape[0], *x.shape[1:]), dtype=torch.float32 if kv_shared else x.dtype) for x in (k, v))
    arguments = (
        do, q, k, v, out, lse, torch.empty_like(lse), dq, dk, dv,
        (q_offsets, kv_offsets, tiles, num_tiles, block_m), (*key_offsets, key_tiles, num_key_tiles, key_block),
        scale, q_shared, kv_shared, activation, mask, num_targets, segment_scale, output_scale,
    )  # fmt: skip
    if _on_hopper(implementation, q, k, v, q_offsets, kv_offsets, q_shared, activation, batch_invariant):
        from . import hopper_backward as hopper

        hopper.backward(*arguments, workspace=0 if batch_invariant else workspace)  # whose dS fits depends on the batch
    else:
        _portable_backward(*arguments, batch_invariant=batch_invariant)
    if q_shared:
        dq = dq.view(q_offsets.shape[0] - 1, *q.shape).sum(0).to(q.dtype)
    if kv_shared:
        dk, dv = (dx.view(chunks, *x.shape).sum(0).to(x.dtype) for dx, x in ((dk, k), (dv, v)))
    return dq, dk, dv


def _portable_backward(
    do, q, k, v, out, lse, delta, dq, dk, dv, query_schedule, key_schedule, scale, q_shared, kv_shared, activation, mask, num_targets,
    segment_scale, output_scale, batch_invariant,
) -> None:  # fmt: skip
    """Launch the kernels of any GPU. A schedule is offsets of queries and keys, tiles and their number, None where there are none, and
    the rows of a tile."""
    factors = activation_factors(activation, q.dtype == torch.bfloat16, scale)
    scales = segment_scale, scale, *factors, output_scale
    q_offsets, kv_offsets, *schedule = query_schedule
    config, common = _launch("dq", q, k, v, schedule[-1], k.shape[0], kv_offsets, activation, mask, batch_invariant)
    lists, num_segments = query_lists(q_offsets, kv_offsets)
    sizes = do.shape[0], q.shape[1], config.tile, config.block
    tiles, num_tiles = fitting_tiles(*schedule, q_offsets, kv_offsets, *sizes, mask, num_targets)
    if grid := _grid(config, tiles):
        out = do if out is None else out
        align, strides = _row_and_head_strides(q, k, v, out, do, dq)
        attention_bwd_dq_kernel[grid](
            q, k, v, out, do, dq, lse, delta, *_descriptors(align, (k, config.block), (v, config.block)),
            q_offsets, kv_offsets, num_segments, tiles, num_tiles, num_targets, *scales, *strides, lse.stride(0),
            **common, ALIGN=align, BLOCK_M=config.tile, BLOCK_N=config.block, Q_SHARED=q_shared,
        )  # fmt: skip

    q_offsets, kv_offsets, *schedule = key_schedule
    config, common = _launch("dkdv", q, k, v, query_schedule[-1], do.shape[0], kv_offsets, activation, mask, batch_invariant)
    key_block = attention_tile(max(q.shape[2], v.shape[2]), q.element_size()).key
    key_block = key_block if batch_invariant else min(schedule[-1], key_block)
    sizes = dk.shape[0], k.shape[1], key_block, config.block
    tiles, num_tiles = fitting_tiles(*schedule, kv_offsets, q_offsets, *sizes, mask, num_targets, True)
    if grid := _grid(config, tiles):
        align, strides = _row_and_head_strides(q, k, v, do, dk, dv)
        attention_bwd_dkdv_kernel[grid](
            q, k, v, do, dk, dv, lse, delta,
            *_descriptors(align, (q, config.block), (k, key_block), (do, config.block)),
            q_offsets, kv_offsets, num_segments, tiles, num_tiles, num_targets, *scales, *strides, lse.stride(0),
            **common, ALIGN=align, BLOCK_M=config.block, BLOCK_N=key_block, Q_SHARED=q_shared, KV_SHARED=kv_shared,
            LISTS=lists,
        )  # fmt: skip


def _empty_outputs(q: Tensor, v: Tensor, q_offsets: Tensor, q_shared: bool, activation: str) -> tuple[Tensor, Tensor]:
    rows = q.shape[0] * (q_offsets.shape[0] - 1) if q_shared else q.shape[0]
    lse = q.new_empty((q.shape[1], rows if activation == "softmax" else 0), dtype=torch.float32)
    return q.new_empty((rows, q.shape[1], v.shape[2])), lse


def attention_on_hopper(implementation: str, head_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels for compute capability 9.0 take such operands, where rows begin at 16-byte boundaries, and may."""
    supported = device.type == "cuda" and hopper_attention_fits(head_dim, v_dim, dtype.itemsize, capability(device))
    if implementation == "hopper" and not supported:
        raise ValueError(
            "implementation 'hopper' takes fp16 or bf16 on a GPU of compute capability 9.0, head dims 40 to 64 or 72 to 128 in multiples "
            f"of 8; got {dtype} on {device}, head dims {head_dim} and {v_dim}"
        )
    return supported and implementation in ("auto", "hopper")


def _on_hopper(
    implementation: str, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, q_shared: bool, activation: str,
    batch_invariant: bool,
) -> bool:  # fmt: skip
    if not attention_on_hopper(implementation, q.shape[2], v.shape[2], q.dtype, q.device) or not (q.shape[0] and k.shape[0]):
        return False
    aligned = all(has_descriptor(x) for x in (q, k, v))
    if implementation == "hopper" and not aligned:
        strides = ", ".join(f"{name} {list(x.shape)} with strides {x.stride()}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"implementation 'hopper' takes rows that begin at 16-byte boundaries, none of them another's; got {strides}")
    if implementation == "hopper":
        return aligned
    if batch_invariant:  # has_descriptor ignores the stride of a single row
        aligned = aligned and _row_and_head_strides(q, k, v)[0] * q.element_size() >= 16
    return aligned and hopper_pays(q, k, q_offsets, kv_offsets, q_shared, activation, batch_invariant)


def hopper_pays(
    q: Tensor, k: Tensor, q_offsets: Tensor, kv_offsets: Tensor, q_shared: bool, activation: str, batch_invariant: bool
) -> bool:  # fmt: skip
    """Whether "auto" takes the kernels for compute capability 9.0, where they can, for segments as long as these are on average."""
    query_rows = q.shape[0] if q_shared else mean_rows(q.shape[0], q_offsets, batch_invariant)
    return hopper_attention_pays(query_rows, mean_rows(k.shape[0], kv_offsets, batch_invariant), q.shape[2], activation)


def _launch(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_m: int,
    loop_rows: int,
    offsets: Tensor,
    activation: str,
    mask: list[int] | None,
    batch_invariant: bool,
) -> tuple[LaunchConfig, dict]:
    """The kernel's table entry, and the launch arguments that all three kernels share.

    loop_rows: rows of the side that tiles loop over, in all segments of `offsets`.
    """
    dims = q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
    mean = mean_rows(loop_rows, offsets, batch_invariant)
    long = mask is None and mean is not None and mean >= LONG
    if batch_invariant:
        block_m = attention_tile(max(dims[1:]), q.element_size()).query
    return _constants(kernel, *dims, q.dtype, block_m, long, q.device, precision(q), activation, mask and tuple(mask))


def _grid(config: LaunchConfig, tiles: Tensor) -> tuple[int, ...]:
    """As many programs as the GPU holds at a time; none, which is no grid, where there are no tiles."""
    workers = min(device_properties(tiles.device)[1] * config.ctas_per_sm, tiles.shape[0])
    return (workers,) if workers else ()


@functools.cache
def _constants(kernel, group, head_dim, v_dim, dtype, query_tile, long, device, precision, activation, mask) -> tuple[LaunchConfig, dict]:
    dim = max(head_dim, v_dim)
    config = getattr(attention_config(dim, dtype.itemsize, device_properties(device)[0], query_tile, long), kernel)
    if config.tile is None:  # the schedule's, unless it is one for Hopper's kernels
        config = dataclasses.replace(config, tile=min(query_tile, attention_tile(dim, dtype.itemsize).query))
    return config, dict(
        GROUP=group,
        HEAD_DIM=head_dim,
        V_DIM=v_dim,
        BLOCK_D=padded_dim(head_dim),
        BLOCK_DV=padded_dim(v_dim),
        PRECISION=precision,
        ACTIVATION=activation_function(activation, dtype == torch.bfloat16),
        MASK=mask and MaskParams(*mask),
        PARTIAL_STAGES=1 if mask is None else min(2, config.num_stages),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _row_and_head_strides(*tensors: Tensor) -> tuple[int, list[int]]:
    return aligned_strides(*((x, dim) for x in tensors for dim in (0, 1)))


def _descriptors(align: int, *blocks: tuple[Tensor, int]) -> list[TensorDescriptor | None]:
    """TMA descriptors `[H, rows, D]` for (tensor, rows of a block), if the GPU has TMA and rows start at 16-byte boundaries.

    A tensor without rows gets a descriptor of one row that is never read: without descriptors another kernel would be compiled.
    """
    device = blocks[0][0].device
    tensors = [x if x.shape[0] else x.new_empty_strided((1, *x.shape[1:]), x.stride()) for x, _ in blocks]
    aligned = align * blocks[0][0].element_size() >= 16 and all(has_descriptor(x) for x in tensors)
    if device.type != "cuda" or device_properties(device)[0] < (9, 0) or not aligned:
        return [None] * len(blocks)
    return [TensorDescriptor(x, *descriptor_sizes(x), [1, rows, padded_dim(x.shape[2])]) for x, (_, rows) in zip(tensors, blocks)]


def _chunk_rows(q: Tensor, k: Tensor, key_block: int) -> tuple[Tensor, Tensor, int]:
    """Offsets that cut the query rows into chunks, each against all keys, enough to fill the GPU: (q, kv, number of chunks)."""
    tiles = max(1, triton.cdiv(k.shape[0], key_block) * k.shape[1])
    chunks = max(1, min(2 * device_properties(q.device)[1] // tiles, triton.cdiv(q.shape[0], 256)))
    boundaries = torch.arange(chunks + 1, device=q.device)
    return boundaries * q.shape[0] // chunks, boundaries * k.shape[0], chunks


# -- autograd ----------------------------------------------------------------------------------------------------------------


_ACTIVATION = 14  # place among the operator's inputs


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with below_autograd():
            out, lse = triton_attention(*inputs)
        ctx.inputs = [None if isinstance(x, Tensor) else x for x in inputs]
        saved_out = out if ctx.inputs[_ACTIVATION] == "softmax" else None
        ctx.save_for_backward(saved_out, lse, *(x if isinstance(x, Tensor) else None for x in inputs))
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, do, _dlse):
        out, lse, *tensors = ctx.saved_tensors
        q, k, v, *rest = (x if tensor is None else tensor for x, tensor in zip(ctx.inputs, tensors))
        return *triton_attention_backward(do, q, k, v, out, lse, *rest), *(None,) * len(rest)


differentiate(triton_attention, _Attention.apply)
refuse_derivative(
    triton_attention_backward, "jagged_attention is not differentiable twice: its backward kernels have no derivative of their own"
)
