"""Attention tile schedules: on the host from lengths where the host knows them, else on the device without a sync."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os

import torch
from jagged_kernels.attention.configs import attention_tile, hopper_attention_pays
from jagged_kernels.schedule.host import TileSchedule, zigzag_schedule
from torch import Tensor

from .masks import AttentionMask

NUM_WORKERS = 132  # of `TileSchedule.worker` on a host without a GPU; kernels deal anew to the workers there are


def new_token() -> bytes:
    """An identifier of a segmentation, by which its schedules are found.

    Random: process ids are reused, and forked processes would continue a counter from the same number.
    """
    return os.urandom(16)


def chooses_hopper(device: torch.device | int, query_rows: float | None, key_rows: float | None) -> bool:
    """Whether "auto" selects the kernels for compute capability 9.0.

    query_rows, key_rows: mean rows per segment; None: the choice does not depend on them. Where CUDA is not initialised, the answer is for
    the machine's first GPU: a data loader's worker must not initialise CUDA.
    """
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0) if torch.cuda.is_initialized() else _first_gpu_is_hopper()
    return is_hopper and hopper_attention_pays(query_rows, key_rows)


@functools.cache
def _first_gpu_is_hopper() -> bool:
    """Whether the machine's first GPU is of compute capability 9.0, as the driver's management library has it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver, no GPU
        return False
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
        or library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    )
    return not failed and (major.value, minor.value) == (9, 0)


def host_schedule(
    q_lengths: Tensor,
    kv_lengths: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    mask: AttentionMask | None = None,
    hopper: bool | None = None,
    batch_invariant: bool = False,
) -> TileSchedule:
    """Zigzag schedules of the forward and the backward from host lengths `[B]`; in page-locked memory where there is a GPU.

    Args:
        q_lengths, kv_lengths: rows of each segment, host integers; of queries also several lists, as in `zigzag_schedule`.
        head_dim: the larger of the query and the value head dim. itemsize: bytes of an element.
        mask: blocks that it hides cost nothing.
        hopper: for the kernels of compute capability 9.0; None: where attention chooses them on the machine's first GPU. Kernels that want
            another tile make their own list.
        batch_invariant: the tile does not depend on the lengths.
    """
    initialized = torch.cuda.is_initialized()
    workers = torch.cuda.get_device_properties(0).multi_processor_count if initialized else NUM_WORKERS
    means = (None if batch_invariant else int(lengths.sum()) / max(1, len(lengths)) for lengths in (q_lengths, kv_lengths))
    query_rows, key_rows = means
    if hopper is None:
        hopper = chooses_hopper(0, query_rows, key_rows)
    tile = attention_tile(head_dim, itemsize, query_rows, hopper)
    common = dict(num_workers=workers, mask=None if mask is None or mask.hides_nothing() else mask)
    forward = zigzag_schedule(q_lengths, kv_lengths, num_heads=num_heads, block_m=tile.query, block_n=tile.key, **common)
    backward = zigzag_schedule(
        kv_lengths, q_lengths, num_heads=num_kv_heads, block_m=tile.key, block_n=tile.query, **common, key_tiles=True
    )
    schedule = dataclasses.replace(forward, backward=backward)
    return schedule.pin_memory() if initialized else schedule


def device_schedule(
    q_offsets: Tensor,
    kv_offsets: Tensor,
    total_q: int,
    total_kv: int | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    mask: list[int] | None = None,
    num_targets: Tensor | None = None,
    hopper: bool = False,
    batch_invariant: bool = False,
) -> TileSchedule:
    """The same tiles from offsets on a device, through an operator that torch.compile and CUDA graphs can record.

    total_q, total_kv: rows of all segments. Without total_kv the backward's tiles are left to the backward, which may never come.
    mask: `AttentionMask.spec`, with num_targets on the offsets' device. hopper: for the kernels of compute capability 9.0. batch_invariant:
    the tile does not depend on the lengths.
    """
    from jagged_kernels.schedule.device import tile_list

    # Under torch.compile the sizes are symbols, and choosing by them would compile anew.
    mean_queries = None if batch_invariant or torch.compiler.is_compiling() else total_q / max(1, q_offsets.shape[0] - 1)
    tile = attention_tile(head_dim, itemsize, mean_queries, hopper)

    def build(offsets, other_offsets, total, heads, block_m, block_n, backward, key_tiles=False):
        tiles, num_tiles = tile_list(offsets, other_offsets, total, heads, block_m, block_n, mask, num_targets, key_tiles)
        return TileSchedule(tiles, None, None, num_tiles, block_m, block_n, heads, NUM_WORKERS, backward)

    backward = None if total_kv is None else build(kv_offsets, q_offsets, total_kv, num_kv_heads, tile.key, tile.query, None, True)
    return build(q_offsets, kv_offsets, total_q, num_heads, tile.query, tile.key, backward)
