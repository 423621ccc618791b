"""Jagged attention: the registered operators, whose bodies select and launch kernels, and autograd.

    S = scale · q kᵀ + bias,  P = activation(S) · output_scale,  O = P v               per segment
    and head
    dV = Pᵀ dO,  dP = dO Vᵀ,  dQ = scale · dS K,  dK = scale · dSᵀ Q
    softmax: dS = P ∘ (dP − rowsum(dO ∘ O));  pointwise: dS = activation'(S) ∘ dP · output_scale
    bias tables: dposition[j - i + N - 1] = Σ dS,  dtime[bucket(u_i - t_j)] = Σ dS      (bias.py)

Every kernel is persistent over a zigzag schedule (schedule/); each output tile has one owner, so
results are
deterministic. Softmax scores and the stored log-sum-exp (fp32, [H, rows]) are in base 2, whose
exponential the hardware has; pointwise activations store nothing. Each kernel computes the scores
again; on Hopper, one kernel may compute all gradients (hopper/one_pass.py). If there are many
short segments, these have kernels of their own (triton_packed.py).

Shared operands are not replicated. Keys shared by all segments make one segment of all query rows;
only dk, dv need a split of the query rows into chunks, summed afterwards. Queries shared by all
segments are read at row 0 of every segment (`Q_SHARED`) and their dq is summed over the segments.
Query groups are segments of one schedule: a segment's index in its group is that of its keys, and a
tile of keys loops over the groups.

Keys and values of cached histories may lie in pages (pages.py). The forward reads them there, as an
operator without a backward.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.activations import activation_factors, activation_function
from ..common.configs import LaunchConfig, padded_dim
from ..common.descriptors import descriptor, has_descriptor
from ..common.device import contiguous_last_dim, device_properties, precision, row_and_head_strides
from ..common.ops import below_autograd, differentiate, direct, operator, refuse_derivative
from ..common.tail import zero_tails
from ..schedule.device import kernel_tiles
from ..schedule.host import Segments, TileList
from . import packed
from .bias import Bias
from .bias_tables import TableGradients, kernel_bias
from .pages import Pages
from .params import (
    AttentionParams,
    BiasKind,
    Gradients,
    MaskParams,
    Operands,
    empty_table_gradients,
)
from .select import AttentionProblem, Selection, select
from .triton_kernels import attention_bwd_dkdv_kernel, attention_bwd_dq_kernel, attention_fwd_kernel

# -- the registered operators: flat arguments, packed at once --------------------------------------


def _attention_fake(
    q,
    k,
    v,
    q_offsets,
    kv_offsets,
    tiles,
    num_tiles,
    key_tiles,
    num_key_tiles,
    block_m,
    key_block,
    kv_shared,
    implementation,
    workspace,
    scale,
    q_shared,
    activation,
    *params,
):
    return _empty_outputs(q, v, q_offsets, q_shared, activation)


@operator("attention", fake=_attention_fake)
def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    key_tiles: Tensor | None,
    num_key_tiles: Tensor | None,
    block_m: int,
    key_block: int | None,
    kv_shared: bool,
    implementation: str,
    workspace: int | None,
    scale: float,
    q_shared: bool,
    activation: str,
    mask: list[int] | None,
    output_scale: float,
    batch_invariant: bool,
    table_gradients: bool,
    num_targets: Tensor | None,
    segment_scale: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    timestamps: Tensor | None,
    boundaries: Tensor | None,
    query_timestamps: Tensor | None,
    query_shift: Tensor | None,
    clear_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        q, k, v: `[rows, heads, dim]`, fp32, fp16 or bf16, last dim contiguous.
        q_offsets, kv_offsets: `[B + 1]`. With `q_shared`, q_offsets count output rows: each segment
            reads all rows of q. With `kv_shared`, both describe one segment of all rows. Without
            either or a mask, q_offsets may be several query groups, `[n · B + 1]`: the segments b,
            B + b, ... read the keys of segment b, and have one segment_scale.
        tiles, num_tiles, block_m: schedule of query tiles.
        key_tiles, num_key_tiles, key_block: schedule of key tiles; None: the backward makes its
            own. Only the backward reads these, kv_shared and workspace; the forward takes them
            because autograd passes its inputs on.
        implementation: "triton", "hopper", or "auto", which chooses.
        workspace: limit in bytes of the memory in which the backward adds up dq; None: a default
            limit.
        scale, ...: the fields of `AttentionParams`. batch_invariant: the schedule's tile size is
            not used.
        clear_tail: write 0 to the rows behind the last segment; False: there are none. With
            `kv_shared`, the segment of all query rows may end before them.

    Returns:
        out `[rows, H, Dv]` in q's dtype and, with softmax, lse `[H, rows]` fp32, log2 of the sum of
        exp(scores); `[H, 0]` without.
    """
    params = _params(
        scale,
        q_shared,
        activation,
        mask,
        output_scale,
        batch_invariant,
        table_gradients,
        num_targets,
        segment_scale,
        position_bias,
        time_bias,
        timestamps,
        boundaries,
        query_timestamps,
        query_shift,
    )
    segments = Segments(q_offsets, kv_offsets, TileList(tiles, num_tiles, block_m))
    operands = Operands(q, k, v, *_empty_outputs(q, v, q_offsets, q_shared, activation))
    selection = _select(operands, segments, key_block, params, kv_shared, implementation)
    _forward(operands, segments, params, selection, clear_tail)
    return operands.out, operands.lse


def _forward(
    operands: Operands,
    segments: Segments,
    params: AttentionParams,
    selection: Selection,
    clear_tail: bool,
) -> None:
    # no batch needs another kernel for this
    if not (operands.q.shape[0] and operands.k.shape[0] and segments.q_offsets.shape[0] > 1):
        operands.out.zero_()
        operands.lse.fill_(-math.inf)
        return
    if selection.packed_fwd is not None:
        packed.forward(operands, segments, params, selection.packed_fwd)
        segments = segments._replace(long_only=True)
    if selection.backend == "hopper":
        from .hopper.launch import forward

        forward(operands, segments, params, selection.fwd)
    else:
        _triton_forward(operands, segments, params, selection)
    if clear_tail and not params.q_shared:
        zero_tails((operands.out, segments.q_offsets))


def _paged_attention_fake(q, k, v, q_offsets, kv_offsets, page_table, page_rows, num_keys, *rest):
    return q.new_empty((*q.shape[:2], v.shape[2]))


@operator("paged_attention", fake=_paged_attention_fake)
def triton_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    page_table: Tensor,
    page_rows: int,
    num_keys: int,
    tiles: Tensor,
    num_tiles: Tensor,
    block_m: int,
    implementation: str,
    scale: float,
    q_shared: bool,
    activation: str,
    mask: list[int] | None,
    output_scale: float,
    batch_invariant: bool,
    table_gradients: bool,
    num_targets: Tensor | None,
    segment_scale: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    timestamps: Tensor | None,
    boundaries: Tensor | None,
    query_timestamps: Tensor | None,
    query_shift: Tensor | None,
    clear_tail: bool = True,
) -> Tensor:
    """Launch the forward kernel with keys and values in pages, in one query group. It has no
    backward.

    Args:
        k, v: the storage `[pages · page_rows, heads, dim]`.
        page_table, page_rows, num_keys: the fields of `Pages`; kv_offsets count the keys of each
            segment.
        Others: as of `triton_attention`.

    Returns:
        out `[rows, H, Dv]` in q's dtype.
    """
    params = _params(
        scale,
        q_shared,
        activation,
        mask,
        output_scale,
        batch_invariant,
        table_gradients,
        num_targets,
        segment_scale,
        position_bias,
        time_bias,
        timestamps,
        boundaries,
        query_timestamps,
        query_shift,
    )
    pages = Pages(page_table, page_rows, num_keys)
    segments = Segments(q_offsets, kv_offsets, TileList(tiles, num_tiles, block_m), pages=pages)
    operands = Operands(q, k, v, *_empty_outputs(q, v, q_offsets, False, activation))
    _forward(
        operands,
        segments,
        params,
        _select(operands, segments, None, params, False, implementation),
        clear_tail,
    )
    return operands.out


def _backward_fake(do, out, lse, q, k, v, *rest):
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, *empty_table_gradients(
        AttentionParams(*rest[_PARAMS.start - 3 : _PARAMS.stop - 3]), q
    )


@operator("attention_backward", fake=_backward_fake)
def triton_attention_backward(
    do: Tensor,
    out: Tensor | None,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    tiles: Tensor,
    num_tiles: Tensor,
    key_tiles: Tensor | None,
    num_key_tiles: Tensor | None,
    block_m: int,
    key_block: int | None,
    kv_shared: bool,
    implementation: str,
    workspace: int | None,
    scale: float,
    q_shared: bool,
    activation: str,
    mask: list[int] | None,
    output_scale: float,
    batch_invariant: bool,
    table_gradients: bool,
    num_targets: Tensor | None,
    segment_scale: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    timestamps: Tensor | None,
    boundaries: Tensor | None,
    query_timestamps: Tensor | None,
    query_shift: Tensor | None,
    clear_tail: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the dq kernel, which with softmax also writes delta = rowsum(dO ∘ O), then the dk, dv
    kernel, which reads it. On Hopper: hopper/launch.py. Only softmax reads `out`. Other
    arguments: as the forward's.

    Returns dq, dk, dv and the gradients of position_bias and time_bias, in the shapes and dtypes of
    what they are gradients of; `[0]` for a table that gets none.
    """
    params = _params(
        scale,
        q_shared,
        activation,
        mask,
        output_scale,
        batch_invariant,
        table_gradients,
        num_targets,
        segment_scale,
        position_bias,
        time_bias,
        timestamps,
        boundaries,
        query_timestamps,
        query_shift,
    )
    queries = Segments(q_offsets, kv_offsets, TileList(tiles, num_tiles, block_m))
    keys = Segments(q_offsets, kv_offsets, TileList(key_tiles, num_key_tiles, key_block))
    operands, do = Operands(q, k, v, out, lse), contiguous_last_dim(do)
    selection = _select(operands, queries, key_block, params, kv_shared, implementation)
    if not (q.shape[0] and k.shape[0] and q_offsets.shape[0] > 1):
        dtables = (x.zero_() for x in empty_table_gradients(params, q))
        return (
            *(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)),
            *dtables,
        )
    chunks = selection.query_chunks
    if kv_shared:
        keys = _query_chunks(q_offsets[-1] if clear_tail else q.shape[0], k, chunks)
        if segment_scale is not None:
            params = params._replace(segment_scale=segment_scale.repeat(chunks))
    # A shared operand's gradient is one fp32 partial per segment (queries) or chunk of query rows
    # (keys), then a fixed-order sum.
    dq = q.new_empty((do.shape[0], *q.shape[1:]), dtype=torch.float32 if q_shared else q.dtype)
    dk, dv = (
        x.new_empty(
            (chunks * x.shape[0], *x.shape[1:]), dtype=torch.float32 if kv_shared else x.dtype
        )
        for x in (k, v)
    )
    grads = Gradients(do, dq, dk, dv, delta=torch.empty_like(lse))
    if selection.packed_bwd is not None:
        packed.backward(operands, grads, queries, params, selection.packed_bwd)
        queries, keys = queries._replace(long_only=True), keys._replace(long_only=True)
    if selection.backend == "hopper":
        from .hopper.launch import backward

        dtables = backward(operands, grads, queries, keys, params, kv_shared, selection, workspace)
    else:
        bias = kernel_bias(params)
        dtables = _triton_dq(operands, grads, queries, params, bias, selection)
        _triton_dkdv(operands, grads, keys, params, bias, kv_shared, selection)
    if clear_tail:
        of_queries, of_keys = (
            [] if q_shared else [(dq, q_offsets)],
            [] if kv_shared else [(dk, kv_offsets), (dv, kv_offsets)],
        )
        zero_tails(*of_queries, *of_keys)
    if q_shared:
        dq = dq.view(q_offsets.shape[0] - 1, *q.shape).sum(0).to(q.dtype)
    if kv_shared:
        dk, dv = (dx.view(chunks, *x.shape).sum(0).to(x.dtype) for dx, x in ((dk, k), (dv, v)))
    return dq, dk, dv, *dtables


def _params(scale, q_shared, activation, mask, *rest) -> AttentionParams:
    return AttentionParams(
        scale, q_shared, activation, None if mask is None else MaskParams(*mask), *rest
    )


def _select(
    operands: Operands,
    segments: Segments,
    key_block: int | None,
    params: AttentionParams,
    kv_shared: bool,
    implementation: str,
) -> Selection:
    q, k, v, _, _ = operands
    self_attention = segments.is_self_attention and not (
        params.q_shared or kv_shared or segments.pages
    )
    # Hopper's kernels take 16 bits alone
    judges_alignment = implementation != "triton" and q.element_size() == 2
    return _selection(
        q.shape,
        segments.num_keys(k),
        k.shape[1],
        v.shape[2],
        q.dtype,
        q.device,
        segments.q_offsets.shape[0] - 1,
        segments.kv_offsets.shape[0] - 1,
        self_attention,
        params.q_shared,
        kv_shared,
        segments.pages is not None,
        (
            _misaligned(q, k, v, params.batch_invariant and implementation == "auto")
            if judges_alignment
            else ()
        ),
        (segments.tiles.block, key_block),
        implementation,
        params.activation,
        params.mask,
        params.has_bias,
        params.time_bias is not None,
        params.batch_invariant,
    )


@functools.lru_cache(maxsize=64)  # a backward finds what its forward has selected
def _selection(
    q_shape: torch.Size,
    kv_rows: int,
    num_kv_heads: int,
    v_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    q_segments: int,
    kv_segments: int,
    self_attention: bool,
    q_shared: bool,
    kv_shared: bool,
    paged: bool,
    misaligned: tuple[str, ...],
    schedule: tuple[int | None, int | None],
    implementation: str,
    activation: str,
    mask: MaskParams | None,
    biased: bool,
    timed: bool,
    batch_invariant: bool,
) -> Selection:
    capability, num_sms = device_properties(device)
    problem = AttentionProblem(
        head_dim=q_shape[2],
        v_dim=v_dim,
        dtype=dtype,
        capability=capability if device.type == "cuda" else None,
        implementation=implementation,
        activation=activation,
        masked=mask is not None,
        causal=mask is not None and mask.is_causal,
        biased=biased,
        timed=timed,
        batch_invariant=batch_invariant,
        q_rows=q_shape[0],
        q_segments=q_segments,
        kv_rows=kv_rows,
        kv_segments=kv_segments,
        q_shared=q_shared,
        kv_shared=kv_shared,
        self_attention=self_attention,
        paged=paged,
        misaligned=misaligned,
        schedule=schedule,
        num_heads=q_shape[1],
        num_kv_heads=num_kv_heads,
        num_sms=num_sms,
    )
    return select(problem)


def _misaligned(q: Tensor, k: Tensor, v: Tensor, single_rows: bool) -> tuple[str, ...]:
    """Descriptions of q, k and v if the tensor memory accelerator cannot read one of them.

    single_rows: also check the row stride of an operand with a single row. No kernel uses it, but
    the choice must not depend on the number of rows.
    """
    aligned = has_descriptor(q) and has_descriptor(k) and has_descriptor(v)
    if aligned and not (single_rows and row_and_head_strides(q, k, v)[0] * q.element_size() < 16):
        return ()
    return tuple(
        f"{name} {list(x.shape)} with strides {x.stride()}"
        for name, x in (("q", q), ("k", k), ("v", v))
    )


def _empty_outputs(
    q: Tensor, v: Tensor, q_offsets: Tensor, q_shared: bool, activation: str
) -> tuple[Tensor, Tensor]:
    rows = q.shape[0] * (q_offsets.shape[0] - 1) if q_shared else q.shape[0]
    lse = q.new_empty((q.shape[1], rows if activation == "softmax" else 0), dtype=torch.float32)
    return q.new_empty((rows, q.shape[1], v.shape[2])), lse


def _query_chunks(num_queries: int | Tensor, k: Tensor, chunks: int) -> Segments:
    """The query rows split into `chunks` segments, each of which sees all keys."""
    boundaries = torch.arange(chunks + 1, device=k.device)
    return Segments(
        boundaries * num_queries // chunks, boundaries * k.shape[0], TileList(None, None, None)
    )


# -- launchers of the portable kernels -------------------------------------------------------------


def _triton_forward(
    operands: Operands, segments: Segments, params: AttentionParams, selection: Selection
) -> None:
    q, k, v, out, lse = operands
    config, pages = selection.fwd, segments.pages
    tiles, num_tiles = kernel_tiles(segments, config, out.shape[0], q.shape[1], params)
    if grid := _grid(config, tiles):
        align, strides = row_and_head_strides(q, k, v, out)
        attention_fwd_kernel[grid](
            q,
            k,
            v,
            out,
            lse,
            *_descriptors(selection.tma, align, (k, config.block), (v, config.block)),
            segments.q_offsets,
            segments.kv_offsets,
            segments.segments_per_group,
            tiles,
            num_tiles,
            params.num_targets,
            params.segment_scale,
            kernel_bias(params),
            *_scales(q, params),
            *strides,
            lse.stride(0),
            pages and pages.table,
            **_constants(config, operands, params),
            ALIGN=align,
            BLOCK_M=config.tile,
            BLOCK_N=config.block,
            Q_SHARED=params.q_shared,
            PAGE_ROWS=pages and pages.page_rows,
        )


def _scales(q: Tensor, params: AttentionParams) -> tuple[float, ...]:
    return (
        params.scale,
        *activation_factors(params.activation, q.dtype == torch.bfloat16, params.scale),
        params.output_scale,
    )


def _triton_dq(
    operands: Operands,
    grads: Gradients,
    queries: Segments,
    params: AttentionParams,
    bias: Bias | None,
    selection: Selection,
) -> tuple[Tensor, Tensor]:
    """dq, and with softmax delta. Returns the gradients of the bias tables."""
    q, k, v, out, lse = operands
    do, dq, _, _, delta = grads
    config = selection.dq
    tiles, num_tiles = kernel_tiles(queries, config, do.shape[0], q.shape[1], params)
    grid = _grid(config, tiles)
    sums = None
    if params.table_gradients:
        sums = TableGradients.empty(
            params, grid[0] if grid else 0, q.device, block=config.tile * config.block
        )
    if grid:
        out = do if out is None else out
        align, strides = row_and_head_strides(q, k, v, out, do, dq)
        attention_bwd_dq_kernel[grid](
            q,
            k,
            v,
            out,
            do,
            dq,
            lse,
            delta,
            *_descriptors(selection.tma, align, (k, config.block), (v, config.block)),
            queries.q_offsets,
            queries.kv_offsets,
            queries.segments_per_group,
            tiles,
            num_tiles,
            params.num_targets,
            params.segment_scale,
            bias,
            *_scales(q, params),
            *strides,
            lse.stride(0),
            sums and sums.argument(),
            **_constants(config, operands, params),
            ALIGN=align,
            BLOCK_M=config.tile,
            BLOCK_N=config.block,
            Q_SHARED=params.q_shared,
            BUCKETS=sums.buckets if sums else 0,
        )
    return empty_table_gradients(params, q) if sums is None else sums.results(params, q)


def _triton_dkdv(
    operands: Operands,
    grads: Gradients,
    keys: Segments,
    params: AttentionParams,
    bias: Bias | None,
    kv_shared: bool,
    selection: Selection,
) -> None:
    q, k, v, _, lse = operands
    do, _, dk, dv, delta = grads
    config = selection.dkdv
    tiles, num_tiles = kernel_tiles(keys, config, dk.shape[0], k.shape[1], params, key_tiles=True)
    if grid := _grid(config, tiles):
        align, strides = row_and_head_strides(q, k, v, do, dk, dv)
        attention_bwd_dkdv_kernel[grid](
            q,
            k,
            v,
            do,
            dk,
            dv,
            lse,
            delta,
            *_descriptors(
                selection.tma, align, (q, config.block), (k, config.tile), (do, config.block)
            ),
            keys.q_offsets,
            keys.kv_offsets,
            keys.segments_per_group,
            tiles,
            num_tiles,
            params.num_targets,
            params.segment_scale,
            bias,
            *_scales(q, params),
            *strides,
            lse.stride(0),
            **_constants(config, operands, params),
            ALIGN=align,
            BLOCK_M=config.block,
            BLOCK_N=config.tile,
            Q_SHARED=params.q_shared,
            KV_SHARED=kv_shared,
            QUERY_GROUPS=keys.query_groups,
        )


def _grid(config: LaunchConfig, tiles: Tensor) -> tuple[int, ...]:
    """As many programs as run on the GPU at a time; `()`, no launch, without tiles."""
    workers = min(device_properties(tiles.device).num_sms * config.ctas_per_sm, tiles.shape[0])
    return (workers,) if workers else ()


def _constants(config: LaunchConfig, operands: Operands, params: AttentionParams) -> dict:
    """The launch arguments that all three kernels share."""
    q, k, v, _, _ = operands
    dims = q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
    return _constants_of(
        config, *dims, q.dtype, precision(q), params.activation, params.mask, params.bias_kind
    )


@functools.cache
def _constants_of(
    config: LaunchConfig,
    group: int,
    head_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    precision: str,
    activation: str,
    mask: MaskParams | None,
    bias: BiasKind | None,
) -> dict:
    return dict(
        GROUP=group,
        HEAD_DIM=head_dim,
        V_DIM=v_dim,
        BLOCK_D=padded_dim(head_dim),
        BLOCK_DV=padded_dim(v_dim),
        PRECISION=precision,
        ACTIVATION=activation_function(activation, dtype == torch.bfloat16),
        MASK=mask and MaskParams(*mask),
        BIAS=bias,
        MASKED_STAGES=1 if mask is None else min(2, config.num_stages),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _descriptors(
    tma: bool, align: int, *blocks: tuple[Tensor, int]
) -> list[TensorDescriptor | None]:
    """TMA descriptors `[H, rows, D]` for (tensor, rows of a block), if rows start at 16-byte
    boundaries; None without TMA.

    A tensor without rows gets a descriptor of one row that is never read: without descriptors
    another kernel would be compiled.
    """
    if not tma:
        return [None] * len(blocks)
    tensors = [
        x if x.shape[0] else x.new_empty_strided((1, *x.shape[1:]), x.stride()) for x, _ in blocks
    ]
    aligned = align * blocks[0][0].element_size() >= 16 and all(has_descriptor(x) for x in tensors)
    if not aligned:
        return [None] * len(blocks)
    return [
        descriptor(x.transpose(0, 1), 1, rows, padded_dim(x.shape[2]))
        for x, (_, rows) in zip(tensors, blocks)
    ]


# -- autograd --------------------------------------------------------------------------------------


# behind them is clear_tail, which torch leaves out where it has its default
_PARAMS = slice(14, 14 + len(AttentionParams._fields))


def _index(field: str) -> int:
    """Of a field of AttentionParams, among the arguments of the forward."""
    return _PARAMS.start + AttentionParams._fields.index(field)


# block_m to table_gradients: the arguments that are not tensors
_OPTIONS = slice(9, _index("num_targets"))
_TABLES = slice(_index("position_bias"), _index("timestamps"))
# floating-point tensors besides q, k and v
_FLOATS = slice(_index("segment_scale"), _index("timestamps"))
_ACTIVATION, _TABLE_GRADIENTS = _index("activation"), _index("table_gradients")


class _Attention(torch.autograd.Function):
    """Of the arguments that may get gradients, and a tuple of all arguments: autograd's time on the
    host grows with what it is given."""

    @staticmethod
    def forward(ctx, q, k, v, position_bias, time_bias, inputs, op):
        with below_autograd():
            out, lse = op(*inputs)
        saved_out = out if inputs[_ACTIVATION] == "softmax" else None
        ctx.save_for_backward(
            saved_out, lse, *inputs[: _OPTIONS.start], *inputs[_OPTIONS.stop : _PARAMS.stop]
        )
        ctx.options, ctx.clear_tail = inputs[_OPTIONS], inputs[_PARAMS.stop :]
        ctx.tables = tuple(
            inputs[_TABLE_GRADIENTS] and table is not None for table in (position_bias, time_bias)
        )
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, do, _dlse):
        out, lse, *tensors = ctx.saved_tensors
        q, k, v, *_ = tensors
        inputs = *tensors[: _OPTIONS.start], *ctx.options, *tensors[_OPTIONS.start :]
        op, floats = triton_attention_backward, inputs[_FLOATS]
        inputs = do, out, lse, *inputs, *ctx.clear_tail
        if not torch.is_grad_enabled():
            op = direct(op, inputs, (do, q, k, v, *floats))
        dq, dk, dv, dposition, dtime = op(*inputs)
        has_position, has_time = ctx.tables
        return (
            dq,
            dk,
            dv,
            dposition if has_position else None,
            dtime if has_time else None,
            None,
            None,
        )


def attention(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`triton_attention` in less host time."""
    op = direct(triton_attention, inputs, (*inputs[:3], *inputs[_FLOATS]))
    if op is triton_attention or not torch.is_grad_enabled():
        return op(*inputs)
    return _apply(*inputs[:3], *inputs[_TABLES], inputs, op)


def paged_attention(*inputs: Any) -> Tensor:
    """`triton_paged_attention` in less host time. It has two arguments fewer before the parameters
    than `triton_attention`."""
    return direct(
        triton_paged_attention, inputs, (*inputs[:3], *inputs[_FLOATS.start - 2 : _FLOATS.stop - 2])
    )(*inputs)


# without what `_Attention.apply` does for torch.func
_apply = super(torch.autograd.Function, _Attention).apply
differentiate(
    triton_attention,
    lambda *inputs: _Attention.apply(*inputs[:3], *inputs[_TABLES], inputs, triton_attention),
)
refuse_derivative(
    triton_paged_attention,
    "jagged_attention is not differentiable with pages: gather the keys and values first",
)
refuse_derivative(
    triton_attention_backward,
    "jagged_attention is not differentiable twice: its backward kernels have no derivative of"
    " their own",
)
