"""Launches of linear compression for Hopper."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common.device import cdiv, device_properties
from ..common.pipeline import descriptor
from .configs import HopperGemmConfig
from .hopper import FLAGS, Memory, Options, linear_compress_fwd_hopper_kernel

MOST_SHARED = 3  # shared levels of a launch: the kernel has an argument for each descriptor


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
    """Number of int32 zeros that the launches of `forward` need: FLAGS for each, and the flags of
    the shared levels of the last."""
    *shared, _ = embeddings
    launches = 1 + max(len(shared) - MOST_SHARED, 0)
    return FLAGS.value * launches + sum(_flags(x, tiling) for x in shared[-MOST_SHARED:])


def _flags(embedding: Tensor, tiling: Tiling) -> int:
    """The flags of a shared level, to 16 bytes."""
    return cdiv(tiling.shared_tiles(embedding), 4) * 4


def forward(
    levels: Sequence[Level],
    indices: Sequence[Tensor],
    state: Tensor,
    tiling: Tiling,
    batch_invariant: bool,
) -> Tensor:
    """`[B, M, N]`: one launch for the candidates and up to MOST_SHARED shared levels, and one for
    each further level.

    levels: weights with rows at 16-byte boundaries. state: int32 zeros, `state_size` of them.
    """
    *shared_levels, candidates = levels
    out = candidates.embedding.new_empty((candidates.embedding.shape[0], tiling.m, tiling.n))
    shared = []
    for level in reversed(shared_levels):
        size = tiling.shared_tiles(level.embedding), 64 * tiling.config.block_n
        shared.append(SharedLevel(level, out.new_empty(size, dtype=torch.float32)))
    for level in shared[MOST_SHARED:]:
        _launch(tiling, state, None, [level], batch_invariant)
        state = state[FLAGS.value :]
    results = tuple(level.result for level in shared)
    last = Candidates(candidates, out, (*results, *indices[::-1]))
    _launch(tiling, state, last, shared[:MOST_SHARED], batch_invariant)
    return out


def _launch(
    tiling: Tiling,
    state: Tensor,
    candidates: Candidates | None,
    shared: Sequence[SharedLevel],
    batch_invariant: bool,
) -> None:
    """Launch for shared levels, the candidates, or both. The K steps between which a tile adds
    shared results depend on its height, so batch_invariant uses tall tiles only."""
    m_tiles, n_tiles, config = tiling.m_tiles, tiling.n_tiles, tiling.config
    num_sms = device_properties(state.device).num_sms
    tall_tiles = cdiv(m_tiles, 3)
    tiles, tall, shared_tiles, shared_tall, flags = 0, 0, [], [], []
    for level, _ in shared:  # few tiles: single M tiles, so that all SMs have some
        batch = level.embedding.shape[0]
        shared_tall.append(
            batch if batch_invariant or batch * m_tiles * n_tiles > 2 * num_sms else 0
        )
        tiles += (shared_tall[-1] * tall_tiles + (batch - shared_tall[-1]) * m_tiles) * n_tiles
        shared_tiles.append(tiles)
        flags.append(_flags(level.embedding, tiling))
    # the last batch rows as single M tiles, so that all SMs end together
    if candidates is not None:
        batch = candidates.level.embedding.shape[0]
        tall = batch if batch_invariant else max(batch - cdiv(num_sms, m_tiles * n_tiles), 0)
        tiles += (tall * tall_tiles + (batch - tall) * m_tiles) * n_tiles
    level, out, addends = (None, None, ()) if candidates is None else candidates
    of_shared = [*(x.level for x in shared), *[None] * (MOST_SHARED - len(shared))]
    first, *more = (_descriptors(x, config) for x in of_shared)
    ends = itertools.accumulate(flags, initial=FLAGS.value)
    pairs = [*zip(shared_tiles, shared_tall)] or [(0, 0)]
    numbers = [*itertools.chain(*pairs), *[None] * 2 * (MOST_SHARED - len(pairs))]
    options = Options(
        tiling.m,
        0 if level is None else level.weight.shape[1],
        tuple(x.level.weight.shape[1] for x in shared),
        n_tiles,
        *(config.block_n, config.block_k, config.num_stages, config.num_buffers),
    )
    linear_compress_fwd_hopper_kernel[(min(num_sms, tiles),)](
        *_descriptors(level, config), None if out is None else descriptor(out, 1, 64, 64), *first,
        addends, Memory(shared[0].result if shared else None, state),
        *(numbers[0], tiles, numbers[1], tall), *itertools.chain(*more), *numbers[2:],
        tuple(state[end:] for end in list(ends)[1 : len(shared)]),
        OPTIONS=options, num_warps=4, maxnreg=168,
    )  # fmt: skip


def _descriptors(
    level: Level | None, config: HopperGemmConfig
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    if level is None:
        return None, None
    return descriptor(level.weight, 64, config.block_k), descriptor(
        level.embedding, 1, config.block_k, config.block_n
    )
