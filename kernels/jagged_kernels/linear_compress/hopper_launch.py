"""Launches of linear compression for Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.device import cdiv, device_properties
from ..common.pipeline import descriptor
from .configs import HopperGemmConfig
from .hopper import FLAGS, Memory, Options, linear_compress_fwd_hopper_kernel


class Level(NamedTuple):
    weight: Tensor
    embedding: Tensor


class Candidates(NamedTuple):
    """The candidates' level, its output, and the shared results that are added, then their indices;
    the result of the same launch is the first."""

    level: Level
    out: Tensor
    addends: tuple[Tensor, ...]


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
    last = Candidates(candidates, out, (*results, *indices[::-1]))
    _launch(tiling, last_state, last, shared[-1] if shared else None, batch_invariant)
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
    level, out, addends = (None, None, ()) if candidates is None else candidates
    shared_level, result = (None, None) if shared is None else shared
    options = Options(
        tiling.m,
        0 if level is None else level.weight.shape[1],
        0 if shared_level is None else shared_level.weight.shape[1],
        n_tiles,
        *(config.block_n, config.block_k, config.num_stages, config.num_buffers),
    )
    linear_compress_fwd_hopper_kernel[(min(num_sms, tiles),)](
        *_descriptors(level, config),
        None if out is None else descriptor(out, 1, 64, 64),
        *_descriptors(shared_level, config),
        addends,
        Memory(result, state),
        *(shared_tiles, tiles, shared_tall, tall),
        OPTIONS=options,
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
