"""Launchers of Hopper's attention kernels: which of them compute a backward, and their
arguments."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...common.activations import activation_factors, activation_function
from ...common.device import has_descriptor
from ...common.pipeline import WARPGROUP_ROWS, TensorDescriptor, descriptor, head_descriptor
from ...schedule.cost import LoopedSide
from ..bias_tables import TableGradients, kernel_bias
from ..configs import HopperConfig
from ..params import AttentionParams, Gradients, Operands, Segments, empty_table_gradients
from ..select import Selection
from ..tile_lists import grid_of, kernel_tiles, list_short_queries
from .args import Arguments, Options
from .bias_sums import BLOCK_OF_SCRATCH, THREADS
from .delta import write_delta
from .dkdv import attention_bwd_dkdv_hopper_kernel
from .dq import attention_bwd_dq_hopper_kernel
from .dq_sums import DqSums
from .forward import attention_fwd_hopper_kernel
from .one_pass import attention_bwd_hopper_kernel
from .short_queries import attention_bwd_short_queries_hopper_kernel
from .wide_dkdv import attention_bwd_wide_dkdv_hopper_kernel

WORKSPACE = 2**31  # bytes of the sums of dq at most, unless the gradients take more

# -- arguments -------------------------------------------------------------------------------------


def config_constants(config: HopperConfig) -> dict:
    """The Options that follow from a kernel's configuration."""
    return dict(
        consumers=config.consumers,
        stages=config.stages,
        v_stages=config.v_stages or config.stages,
        row_stages=config.row_stages,
        registers=config.registers,
        q_in_registers=config.rows_in_registers,
        block=config.block,
        whole_blocks=config.whole_blocks,
    )


@functools.cache
def _constants(
    config: HopperConfig, activation: str, bfloat16: bool, local_rows: bool, *options: Any
) -> dict:
    return dict(
        ACTIVATION=activation_function(activation, bfloat16),
        CONSTANTS=Options(*options, local_rows=local_rows, **config_constants(config)),
        num_warps=config.warps,
        maxnreg=config.launch_registers,
    )


def _launch_constants(
    config: HopperConfig,
    operands: Operands,
    params: AttentionParams,
    q_shared: bool,
    head_dim: int | None = None,
    *options: Any,
) -> dict:
    """The constant arguments and options of a launch. head_dim and options: in the order of
    Options, where a kernel reads more than all kernels do."""
    q, k, v, _, _ = operands
    heads, dims = (q.shape[1], q.shape[1] // k.shape[1]), (head_dim, v.shape[2])
    common = *heads, *dims, params.mask, params.bias_kind, q_shared
    local_rows = params.dropout_seed is not None and params.batch_invariant
    bfloat16 = q.dtype == torch.bfloat16
    return _constants(config, params.activation, bfloat16, local_rows, *common, *options)


def _arguments(
    segments: Segments,
    tiles: Tensor,
    params: AttentionParams,
    factors: tuple[float, float],
    *pointers: Tensor | None,
    next_tile: Tensor | None = None,
) -> Arguments:
    """factors: of activations.activation_factors. pointers: from Arguments.out_ptr on."""
    offsets, scale = (segments.q_offsets, segments.kv_offsets), params.scale
    scales = scale, *factors, params.output_scale, params.segment_scale
    dropout = dict(seed_ptr=params.dropout_seed, threshold=params.dropout_threshold)
    return Arguments(tiles, next_tile, *offsets, params.num_targets, *scales, *pointers, **dropout)


def _factors(params: AttentionParams, dtype: torch.dtype) -> tuple[float, float]:
    """With the factor of weights that dropout keeps."""
    factors = activation_factors(params.activation, dtype == torch.bfloat16, params.scale)
    return tuple([x / (1 - params.dropout_p) for x in factors])


def _result_descriptor(x: Tensor) -> TensorDescriptor | None:
    """TMA descriptor for stores of 64 rows; None for fp32 sums, stored from registers."""
    return None if x.dtype == torch.float32 else head_descriptor(x, WARPGROUP_ROWS.value)


def _buckets_descriptor(params: AttentionParams) -> TensorDescriptor | None:
    """TMA descriptor for the blocks of stored buckets, as words."""
    if params.buckets is None:
        return None
    return descriptor(params.buckets.view(torch.float32).unflatten(1, (32, 32)), 1, 32, 32)


# -- forward ---------------------------------------------------------------------------------------


def forward(
    operands: Operands, segments: Segments, params: AttentionParams, config: HopperConfig
) -> None:
    """Launch the forward kernel."""
    q, k, v, out, lse = operands
    pages = segments.pages
    looped = LoopedSide(segments.num_keys(k), k.shape[1], q.shape[2])
    rows, heads, _ = out.shape
    # of mma_abt: up to 128, a kernel does not depend on it
    head_dim = -(-q.shape[2] // 64) * 64 if q.shape[2] > 128 else None
    tiles, num_tiles, blocks = kernel_tiles(segments, config, rows, heads, params, looped=looped)
    if blocks:
        dynamic = config.dynamic_tiles and pages is None
        next_tile = out.new_zeros(1, dtype=torch.int32) if dynamic else None
        table, page_rows = (None, None) if pages is None else (pages.table, pages.page_rows)
        factors = _factors(params, q.dtype)
        attention_fwd_hopper_kernel[blocks](
            head_descriptor(q, 64), *[head_descriptor(x, config.block) for x in (k, v)],
            head_descriptor(out, 64, 128), num_tiles, table, segments.segments_per_group,
            _arguments(segments, tiles, params, factors, out, lse, next_tile=next_tile),
            kernel_bias(params, segments, q.shape[0]), _buckets_descriptor(params),
            **_launch_constants(config, operands, params, segments.q_shared, head_dim, page_rows),
        )  # fmt: skip


# -- backward --------------------------------------------------------------------------------------


def workspace_limit(workspace: int | None, *gradients: Tensor) -> int:
    """How many bytes a backward may take besides its results: `workspace`; if it is None,
    `WORKSPACE` or the size of the gradients, whichever is larger."""
    return max(WORKSPACE, sum(x.nbytes for x in gradients)) if workspace is None else workspace


class _Backward:
    """The kernels of one backward, with the arguments that their launches share."""

    def __init__(
        self,
        operands: Operands,
        grads: Gradients,
        segments: Segments,
        params: AttentionParams,
        kv_shared: bool,
        selection: Selection,
    ) -> None:
        q, k, v, out, lse = operands
        do = grads.do if has_descriptor(grads.do) else grads.do.contiguous()
        out = do if out is None else out.contiguous()
        self.operands, self.grads = operands._replace(out=out), grads._replace(do=do)
        self.params, self.kv_shared, self.selection = params, kv_shared, selection
        self.q_shared = segments.q_shared
        self.bias = kernel_bias(params, segments, q.shape[0])
        self.buckets_desc = _buckets_descriptor(params)
        self.factors = _factors(params, q.dtype)
        self.query_descs = head_descriptor(q, 64), head_descriptor(do, 64)
        self.key_descs = head_descriptor(k, 64), head_descriptor(v, 64)
        self.dq_desc, self.dk_desc, self.dv_desc = [
            _result_descriptor(x) for x in (grads.dq, grads.dk, grads.dv)
        ]
        self.pointers = out, lse, grads.delta, grads.dq, grads.dk, grads.dv

    def _rows(self, block: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Descriptors of q and dO, for blocks of so many rows."""
        if block == 64:
            return self.query_descs
        return head_descriptor(self.operands.q, block), head_descriptor(self.grads.do, block)

    def _key_tiles(
        self, keys: Segments, config: HopperConfig
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        rows, heads, _ = self.grads.dk.shape
        looped = LoopedSide(*self.operands.q.shape)
        return kernel_tiles(keys, config, rows, heads, self.params, key_tiles=True, looped=looped)

    def _arguments(self, segments: Segments, tiles: Tensor, *more: Tensor, **others: Tensor) -> Any:
        return _arguments(
            segments, tiles, self.params, self.factors, *self.pointers, *more, **others
        )

    def _constants(self, config: HopperConfig, *options: Any) -> dict:
        _, dq, dk, dv, _ = self.grads
        strides = [x.stride(0) for x in (dq, dk, dv)]
        shared = self.q_shared, self.operands.q.shape[2], None
        return _launch_constants(config, self.operands, self.params, *shared, *strides, *options)

    def dq(self, queries: Segments) -> tuple[Tensor, Tensor]:
        """dq, and with softmax delta. Returns the gradients of the bias tables."""
        params, q, config = self.params, self.operands.q, self.selection.dq
        rows, heads, dim = self.grads.dq.shape
        looped = LoopedSide(*self.operands.k.shape[:2], dim)
        tiles, num_tiles, blocks = kernel_tiles(queries, config, rows, heads, params, looped=looped)
        sums = None
        if params.table_gradients:
            consumers = blocks[0] * config.consumers if blocks else 0
            sums = TableGradients.empty(
                params, consumers, q.device, threads=THREADS, block=BLOCK_OF_SCRATCH
            )
        if blocks:
            attention_bwd_dq_hopper_kernel[blocks](
                *self.query_descs, *self.key_descs, self.dq_desc, num_tiles,
                queries.segments_per_group, self._arguments(queries, tiles), self.bias,
                sums and sums.argument(), self.buckets_desc,
                **self._constants(config, False, 1, params.table_gradients),
            )  # fmt: skip
        return empty_table_gradients(params, q) if sums is None else sums.results(params, q)

    def dkdv(self, keys: Segments) -> None:
        """dk and dv."""
        config = self.selection.dkdv
        tiles, num_tiles, blocks = self._key_tiles(keys, config)
        if blocks:
            wide = config.warps == 8
            kernel = (
                attention_bwd_wide_dkdv_hopper_kernel if wide else attention_bwd_dkdv_hopper_kernel
            )
            kernel[blocks](
                *self._rows(config.block), *self.key_descs, self.dk_desc, self.dv_desc, num_tiles,
                keys.segments_per_group, self._arguments(keys, tiles),
                *(() if wide else (self.bias, self.buckets_desc)),
                **self._constants(config, self.kv_shared, keys.query_groups),
            )  # fmt: skip

    def one_pass(self, keys: Segments) -> None:
        """dq, dk and dv in one kernel, and another that rounds dq."""
        params, grads, config = self.params, self.grads, self.selection.one_pass
        if params.activation == "softmax":
            write_delta(grads.do, self.operands.out, grads.delta)
        sums = DqSums.empty(self.operands.q, keys.q_offsets.shape[0] - 1, config.block)
        tiles, num_tiles, blocks = self._key_tiles(keys, config)
        if blocks:
            attention_bwd_hopper_kernel[blocks](
                *self._rows(config.block), *self.key_descs, self.dk_desc, self.dv_desc,
                sums.descriptor(), num_tiles, sums.num_blocks,
                self._arguments(keys, tiles, sums.added, next_tile=sums.next_tile),
                **self._constants(config),
            )  # fmt: skip
        factor = params.scale * self.factors[1]
        sums.write(grads.dq, keys, params.segment_scale, factor, params.output_scale)

    def short_queries(self, segments: Segments, next_tile: Tensor) -> None:
        """dq, dk, dv of the segments that `segments`, with listed tiles, leaves out as short."""
        config = self.selection.short_queries
        tiles, num_tiles, _ = segments.tiles
        if blocks := grid_of(tiles, config):
            attention_bwd_short_queries_hopper_kernel[blocks](
                *self.query_descs, *self.key_descs, self.dq_desc, self.dk_desc, self.dv_desc,
                num_tiles, self._arguments(segments, tiles, next_tile=next_tile),
                **self._constants(config),
            )  # fmt: skip


def backward(
    operands: Operands,
    grads: Gradients,
    queries: Segments,
    keys: Segments,
    params: AttentionParams,
    kv_shared: bool,
    selection: Selection,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for all gradients, if it is selected and `workspace_limit` has room for its
    sums, else those for dq and for dk, dv; before them the one for short queries, if it is
    selected. Returns the gradients of the bias tables."""
    q, k, _, _, _ = operands
    launches = _Backward(operands, grads, queries, params, kv_shared, selection)
    if (one_pass := selection.one_pass) is not None:
        num_bytes = DqSums.num_bytes(q, keys.q_offsets.shape[0] - 1, one_pass.block)
        if num_bytes <= workspace_limit(params.workspace, grads.dq, grads.dk, grads.dv):
            launches.one_pass(keys)
            return empty_table_gradients(params, q)
    if (short := selection.short_queries) is not None:
        rows, heads = (q.shape[0], k.shape[0]), (q.shape[1], k.shape[1])
        queries, keys, next_tile = list_short_queries(
            queries, rows, heads, short.tile, selection.dkdv.tile, short.block
        )
        launches.short_queries(queries, next_tile)
    dtables = launches.dq(queries)
    launches.dkdv(keys)
    return dtables
