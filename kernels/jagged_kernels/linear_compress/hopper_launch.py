"""Launchers of linear compression for Hopper."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.device import ceil_div, device_properties, has_descriptor
from ..common.pipeline import box_layout
from .configs import HopperProductConfig, hopper_product_config
from .hopper import linear_compress_fwd_hopper_kernel
from .op import aligned_weights


def supports(weights: Sequence[Tensor], embeddings: Sequence[Tensor]) -> bool:
    """Whether the kernel supports these operands: on Hopper, 16-bit, embeddings with aligned rows, or none at all, and weights that are not
    empty. Weights need no alignment: they are copied."""
    x = embeddings[-1]
    if x.device.type != "cuda" or device_properties(x.device)[0] != (9, 0) or x.element_size() != 2 or x.shape[2] % 8:
        return False
    return all(x.numel() > 0 for x in weights) and (x.shape[0] == 0 or all(x.numel() > 0 and has_descriptor(x) for x in embeddings))


def forward(weights: Sequence[Tensor], embeddings: Sequence[Tensor], indices: Sequence[Tensor], batch_invariant: bool = False) -> Tensor:
    """Arguments as those of the portable kernels. One launch prepares, one is for up to two levels, one for each further."""
    (batch, _, n), m = embeddings[-1].shape, weights[-1].shape[0]
    out = embeddings[-1].new_empty((batch, m, n))
    if batch == 0:
        return out
    strips, panels, config = _plan(m, n)
    # Shared products as the kernel keeps them: whole strips and panels, in fp32. The last launch tells which of its own are stored.
    sizes = [x.shape[0] * strips * panels for x in embeddings[:-1]]
    products = [out.new_empty((size, 64 * config.columns), dtype=torch.float32) for size in sizes]
    states = 4 * max(len(products) - 1, 0)
    weights, state = aligned_weights(weights, states + 4 + sum(sizes[-1:]))
    *shared, candidates = zip(weights, embeddings)
    for i, (level, product) in enumerate(zip(shared[:-1], products)):
        _launch(m, n, state[4 * i :], batch_invariant, shared=level, product=product)
    last = (shared[-1], products[-1]) if shared else ()
    _launch(m, n, state[states:], batch_invariant, candidates, out, tuple(products[::-1]), tuple(indices[::-1]), *last)
    return out


@functools.cache
def _plan(m: int, n: int) -> tuple[int, int, HopperProductConfig]:
    """Strips of 64 rows, panels of columns, and the configuration."""
    config = hopper_product_config(n)
    return ceil_div(m, 64), ceil_div(n, config.columns), config


def _launch(m, n, state, batch_invariant, candidates=None, out=None, addends=(), indices=(), shared=None, product=None) -> None:
    """Launch for the candidates' product, weight and embedding, or a shared level's, or both; addends: the shared one's first.

    Where in its sum over K a tile adds them depends on the tile's height, so that batch_invariant uses the largest height only."""
    strips, panels, config = _plan(m, n)
    tiles = ceil_div(strips, 3)
    processors = device_properties(state.device)[1]
    shared_tiles, shared_whole, all_tiles, whole = 0, 0, 0, 0
    if shared is not None:  # few tiles: strip by strip, that all processors have some
        batch = shared[1].shape[0]
        shared_whole = batch if batch_invariant or batch * strips * panels > 2 * processors else 0
        all_tiles = shared_tiles = (shared_whole * tiles + (batch - shared_whole) * strips) * panels
    if candidates is not None:  # the last ones strip by strip, that all processors end together
        batch = candidates[1].shape[0]
        whole = batch if batch_invariant else max(batch - ceil_div(processors, strips * panels), 0)
        all_tiles += (whole * tiles + (batch - whole) * strips) * panels
    linear_compress_fwd_hopper_kernel[(min(processors, all_tiles),)](
        *_operands(candidates, config), None if out is None else _descriptor(out, 1, 64, 64), addends, indices,
        *_operands(shared, config), product, state, shared_tiles, all_tiles, shared_whole, whole,
        M=m, K=0 if candidates is None else candidates[0].shape[1], SHARED_K=0 if shared is None else shared[0].shape[1],
        PANELS=panels, BLOCK_N=config.columns, BLOCK_K=config.depth, STAGES=config.stages, BUFFERS=config.buffers,
        num_warps=4, maxnreg=168,
    )  # fmt: skip


def _operands(level: tuple[Tensor, Tensor] | None, config: HopperProductConfig) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    if level is None:
        return None, None
    weight, embedding = level
    return _descriptor(weight, 64, config.depth), _descriptor(embedding, 1, config.depth, config.columns)


def _descriptor(x: Tensor, *box: int) -> TensorDescriptor:
    """In boxes of a size. A dimension of size 1 may have any stride: one that the accelerator takes stands in for it."""
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:-1], x.stride())]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(box), box_layout(x.dtype, *box))
