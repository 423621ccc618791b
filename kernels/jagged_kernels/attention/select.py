"""Which kernels run an attention call, and with which tiles. Nothing else decides it but the room
for the one-pass backward's workspace (`hopper/launch.py`), and nothing else asks which GPU this is.

`select` is a pure function of an `AttentionProblem`. It needs neither a GPU nor triton: a data
loader asks it for the tiles of a schedule, and docs/kernels-used.md is printed from it. A forward
asks once, its backward once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..common.configs import LaunchConfig, padded_dim
from ..common.device import cdiv
from ..schedule.cost import LoopedSide, one_pass_may_run
from .configs import (
    AttentionTile,
    HopperConfig,
    attention_config,
    attention_tile,
    biased_dq_config,
    dq_config,
    hopper_attention_config,
    packed_config,
    short_queries_config,
    small_hopper_config,
)

HOPPER = (9, 0)  # the compute capability that the Gluon kernels are written for
# packed_tiles_are_faster below these mean rows of a segment, (in the forward, in the backward). In
# cross-attention: of the queries or the keys, whichever are more. ..._OF_HOPPER: where Hopper's
# kernels take the other segments.
PACKED_MEAN, PACKED_MEAN_OF_HOPPER = (64, 128), (32, 128)
PACKED_CROSS_MEAN, PACKED_CROSS_MEAN_OF_HOPPER = (64, 64), (24, 32)
PACKED_ROWS_PER_SM = 512  # and from this many rows on, times key heads, for each multiprocessor
LONG = 768  # larger blocks are faster if a tile loops over at least this many rows on average
# small_tiles_are_faster below these mean rows of a segment, by padded head dim
SMALL_TILES = {64: 640, 128: 128}
# short_query_consumers: 1, 2, 3 below these mean query rows, by padded head dim
SHORT_QUERIES = {64: (36, 60, 120), 128: (36, 110)}
# short_query_consumers: rows of the keys of all heads; with fewer, two more launches cost more than
# it saves
SHORT_QUERIES_ROWS = 2**18
# mean keys from which on a thread block of the forward has few and large tiles, so static shares
# differ too much; above head dim 64 with pointwise activations under the causal mask
DYNAMIC_TILES, DYNAMIC_TILES_OF_WIDE = 640, 3072
# Query rows of a segment on average: from here on a segment's are split if tiles of keys are few
MANY_QUERIES = 8192
FEW_KEYS = 320  # small_tiles_are_faster for queries of any number below so many mean keys
# most keys that all segments share for which kernels without code for ends are faster, by padded
# head dim
WHOLE_BLOCKS = {64: 512, 128: 256}
FEW_ROWS = 256  # of a segment on average: smaller blocks of them are faster


class AttentionProblem(NamedTuple):
    """What the choice depends on. Numbers of rows and segments are None where they are not known:
    under torch.compile, whose graph serves every batch.

    Attributes:
        head_dim, v_dim: of q and k, and of v.
        dtype: of q, k and v.
        capability: compute capability of the GPU; None: there is none (Triton's interpreter).
        implementation: "auto", "triton" or "hopper".
        activation: a public name. masked, biased, timed: whether there is a mask, a RelativeBias, a
            time table in it.
        causal: whether the mask hides exactly the later keys. targets: or these and targets of
            other groups.
        dropout: whether weights are dropped.
        batch_invariant: the choice does not depend on numbers of rows and segments, except for
            whether they are 0.
        q_rows, q_segments: rows of q, and segments that they are split into; with q_shared, each
            segment takes all rows.
        kv_rows, kv_segments: rows and segments of k and v. With kv_shared, there is one segment.
        self_attention: queries and keys have the same offsets.
        paged: keys and values lie in pages. scaled: in 8 bits, with factors.
        misaligned: descriptions of the operands among q, k and v that the tensor memory accelerator
            cannot read. Only Hopper's kernels ask.
        schedule: rows of the query tiles and of the key tiles of the given schedule; None for a
            side that has none.
        num_heads, num_kv_heads: of q, and of k and v. num_sms: of the GPU.
    """

    head_dim: int
    v_dim: int
    dtype: torch.dtype
    capability: tuple[int, int] | None = None
    implementation: str = "auto"
    activation: str = "softmax"
    masked: bool = False
    biased: bool = False
    timed: bool = False
    causal: bool = False
    targets: bool = False
    dropout: bool = False
    batch_invariant: bool = False
    q_rows: int | None = None
    q_segments: int | None = None
    kv_rows: int | None = None
    kv_segments: int | None = None
    q_shared: bool = False
    kv_shared: bool = False
    self_attention: bool = False
    paged: bool = False
    scaled: bool = False
    misaligned: tuple[str, ...] = ()
    schedule: tuple[int | None, int | None] = (None, None)
    num_heads: int = 1
    num_kv_heads: int = 1
    num_sms: int = 1


class Selection(NamedTuple):
    """The kernels of a call.

    Attributes:
        backend: "triton", the portable kernels, or "hopper".
        fwd, dq, dkdv: their launch configurations, each with its tile: query rows, or key rows of
            dkdv.
        one_pass: configuration of the Hopper kernel for all three gradients, which replaces dq
            and dkdv; None: they run.
        tma: whether portable kernels load aligned rows through the GPU's tensor memory accelerator.
        query_chunks: number of chunks that the query rows are split into: with kv_shared by dkdv,
            whose chunks read all keys; without, those of each segment (split_queries.py).
        short_queries: configuration of the Hopper kernel for all gradients of segments whose query
            rows fit into its tile. The others then leave these segments out; None: they do not.
        packed_fwd, packed_bwd: configurations of the kernels for short segments, which the others
            then leave out; None: they do not.
    """

    backend: str
    fwd: LaunchConfig | HopperConfig
    dq: LaunchConfig | HopperConfig
    dkdv: LaunchConfig | HopperConfig
    one_pass: HopperConfig | None = None
    tma: bool = False
    query_chunks: int = 1
    short_queries: HopperConfig | None = None
    packed_fwd: LaunchConfig | None = None
    packed_bwd: LaunchConfig | None = None

    @property
    def tile(self) -> AttentionTile:
        """The tiles of a schedule for these kernels."""
        return AttentionTile(query=self.fwd.tile, key=(self.one_pass or self.dkdv).tile)


def select(problem: AttentionProblem) -> Selection:
    """The kernels for a problem.

    Raises:
        ValueError: implementation is "hopper" and those kernels do not support the problem.
    """
    p = problem
    selection = _select_unpacked(p)
    forward, backward = packed_tiles_are_faster(p, selection.backend)
    if not backward:
        return selection
    dim = max(p.head_dim, p.v_dim)
    fwd = packed_config("fwd", dim) if forward else None
    return selection._replace(packed_fwd=fwd, packed_bwd=packed_config("bwd", dim))


def _select_unpacked(p: AttentionProblem) -> Selection:
    """The kernels for all segments that are not in packed tiles."""
    q_seqlen = p.q_rows if p.q_shared else _mean_seqlen(p, p.q_rows, p.q_segments)
    kv_seqlen = _mean_seqlen(p, p.kv_rows, p.kv_segments)
    if _takes_hopper(p, q_seqlen, kv_seqlen):
        # buckets and random numbers take many registers
        long = long_key_blocks_are_faster(p, kv_seqlen)
        long = long or (p.kv_shared and kv_seqlen == 128)  # one block, without code for its end
        long = long and not (p.timed or p.dropout)
        selection = _hopper_selection(
            p.head_dim, p.activation, p.masked, p.biased, long, p.timed, p.dropout
        )
        queries, keys = small_tiles_are_faster(p, q_seqlen, kv_seqlen)
        if queries or keys:
            options = p.head_dim, p.biased, p.timed, _is_below(q_seqlen, FEW_ROWS)
            selection = _with_small_tiles(selection, queries, keys, *options)
        elif dynamic_tiles_are_faster(p, kv_seqlen):
            selection = selection._replace(fwd=selection.fwd._replace(dynamic_tiles=True))
        if one_pass_is_faster(p):
            options = p.head_dim, p.activation, p.masked
            one_pass = hopper_attention_config("one_pass", *options)
            selection = selection._replace(one_pass=one_pass)
        elif consumers := short_query_consumers(p, q_seqlen, kv_seqlen):
            selection = _with_short_queries(selection, p.head_dim, consumers)
        if p.kv_shared and p.kv_rows <= WHOLE_BLOCKS.get(padded_dim(p.head_dim), 0):
            fwd, dq = [
                x._replace(whole_blocks=p.kv_rows % x.block == 0)
                for x in (selection.fwd, selection.dq)
            ]
            selection = selection._replace(fwd=fwd, dq=dq)
        chunks = query_chunks(p, selection.dkdv.tile, q_seqlen)
        return selection._replace(query_chunks=chunks) if chunks > 1 else selection

    tile = _triton_tile(p, q_seqlen)
    chunks = query_chunks(p, tile.key, q_seqlen)
    q_rows = p.q_rows * p.q_segments if p.q_shared and p.q_rows is not None else p.q_rows
    queries_of_keys = _mean_seqlen(p, q_rows, chunks if p.kv_shared else p.kv_segments)
    long_keys, long_queries = [
        not p.masked and (length or 0) >= LONG for length in (kv_seqlen, queries_of_keys)
    ]
    selection = _triton_selection(
        max(p.head_dim, p.v_dim), p.dtype.itemsize, p.capability, tile, long_keys, long_queries
    )
    if p.biased:
        selection = selection._replace(dq=biased_dq_config(selection.dq))
    return selection._replace(query_chunks=chunks) if chunks > 1 else selection


# -- rules -----------------------------------------------------------------------------------------


def hopper_is_supported(
    head_dim: int, v_dim: int, dtype: torch.dtype, capability: tuple[int, int] | None
) -> bool:
    """Whether kernels for compute capability 9.0 run these, if rows begin at 16-byte boundaries."""
    if capability == HOPPER and dtype.itemsize == 2:  # torch 2.11 does not trace != of tuples
        sizes = 40 <= min(head_dim, v_dim) and max(head_dim, v_dim) <= 256
        alike = sizes and padded_dim(head_dim) == padded_dim(v_dim)
        return alike and head_dim % 8 == v_dim % 8 == 0
    return False


def hopper_is_faster(p: AttentionProblem, q_seqlen: float | None, kv_seqlen: float | None) -> bool:
    """Whether the kernels for compute capability 9.0 are faster, forward and backward together.
    Lengths are means; None: long segments.

    Above head dim 128, dq and the bias tables' sums take more than the shared memory of a
    multiprocessor. "gelu_taylor" has many instructions, which leave too few registers above head
    dim 64: the portable kernels took 8 to 16 % less time. With a bias, very short segments and GELU
    at head dims up to 64 have not been measured with small tiles, and dropout not at all.
    """
    narrow = padded_dim(p.head_dim) <= 64
    if not p.biased:
        return p.activation != "gelu_taylor" or narrow
    long = q_seqlen is None or kv_seqlen is None or q_seqlen * kv_seqlen >= 1024
    long = long and p.head_dim <= 128 and not p.dropout
    return long and p.activation != "gelu_taylor" and (p.activation != "gelu" or not narrow)


def packed_tiles_are_faster(p: AttentionProblem, backend: str) -> tuple[bool, bool]:
    """Whether short segments are packed (packed_tiles.py), in the forward and in the backward: with
    one group of queries and short segments that fill the GPU. It takes two launches more. backend:
    of the other segments. docs/decisions/short-segments.md has figures."""
    one_group = not (p.q_shared or p.kv_shared or p.paged) and p.q_segments == p.kv_segments
    supported = (
        one_group and p.dtype.itemsize == 2 and max(p.head_dim, p.v_dim) <= 128 and not p.biased
    )
    if (
        not supported
        or p.batch_invariant
        or p.implementation == "hopper"
        or p.q_rows is None
        or p.kv_rows is None
    ):
        return False, False
    if p.self_attention:
        forward, backward = PACKED_MEAN_OF_HOPPER if backend == "hopper" else PACKED_MEAN
    elif backend == "hopper":
        forward, backward = PACKED_CROSS_MEAN_OF_HOPPER
    else:
        forward, backward = PACKED_CROSS_MEAN
    rows = max(p.q_rows, p.kv_rows)
    mean = rows / max(1, p.q_segments)
    fills_gpu = rows < 2**31 and rows * p.num_kv_heads >= PACKED_ROWS_PER_SM * p.num_sms
    return fills_gpu and mean < forward, fills_gpu and mean < backward


def long_key_blocks_are_faster(p: AttentionProblem, kv_seqlen: float | None) -> bool:
    """Whether Hopper's forward loops over blocks of 128 keys instead of 64. kv_seqlen: mean keys of
    a segment; None: few. The waits of a block take the same time for both sizes; with small blocks,
    fewer scores are computed past a segment's end or behind a mask. Both sizes took the same time
    for about 320 keys at head dim 128 and 600 at 64; under a mask, for four times as many, and with
    targets, which do not see one another, for ten times as many."""
    shortest = LONG if p.head_dim <= 64 else LONG // 2
    times = 10 if p.targets and not p.causal else 4 if p.masked else 1
    return kv_seqlen is not None and kv_seqlen >= shortest * times


def small_tiles_are_faster(
    p: AttentionProblem, q_seqlen: float | None, kv_seqlen: float | None
) -> tuple[bool, bool]:
    """Whether Hopper's kernels have tiles of 64 rows and several thread blocks on a multiprocessor:
    those with query tiles, and the one with key tiles. docs/decisions/short-segments.md has
    figures.

    Above head dim 64, two thread blocks of the kernel with key tiles have too few registers, and
    above 128 those of all kernels. Up to 64, the long arithmetic of GELU and its polynomial takes
    less time with small query tiles at all lengths. With few keys, the code of a tile must be
    fetched as often as it runs: one consumer has a third of it.
    """
    narrow = padded_dim(p.head_dim) <= 64
    longest = SMALL_TILES.get(padded_dim(p.head_dim), 0)
    if p.timed:
        longest = FEW_ROWS
    elif p.masked and not p.biased:
        longest //= 2
    long_arithmetic = narrow and not p.biased and p.activation in ("gelu", "gelu_taylor")
    few_keys = _is_below(kv_seqlen, FEW_KEYS) and not (p.masked or p.biased or p.dropout)
    if p.kv_shared and p.kv_rows % 64 == 0:  # kernels with large tiles have little code for these
        few_keys = False
    queries = _is_below(q_seqlen, longest) or long_arithmetic or (narrow and few_keys)
    return queries, narrow and (_is_below(q_seqlen, FEW_ROWS) or _is_below(kv_seqlen, longest))


def one_pass_is_faster(p: AttentionProblem) -> bool:
    """Whether one Hopper kernel for dq, dk and dv replaces two. docs/decisions/one-pass-backward.md
    has figures. It takes self- or cross-attention with one group of queries, without a bias and
    dropout, and no mask but the causal one: there, every key tile up to some tile visits a block of
    queries."""
    supported = not (p.biased or p.dropout or p.q_shared or p.kv_shared)
    supported = supported and p.q_segments == p.kv_segments
    if not supported or p.batch_invariant or p.q_rows is None or p.kv_rows is None:
        return False
    queries = LoopedSide(p.q_rows, p.num_heads, p.head_dim)
    return one_pass_may_run(queries, p.kv_rows, p.num_kv_heads, p.kv_segments, p.masked, p.causal)


def dynamic_tiles_are_faster(p: AttentionProblem, kv_seqlen: float | None) -> bool:
    """Whether large tiles of Hopper's forward are assigned dynamically.
    docs/decisions/zigzag-schedule.md has figures.

    Masks with limits, time biases, and above head dim 64 pointwise activations without a mask were
    not faster. Shared operands and several query groups have not been measured. With keys in pages,
    the forward assigns tiles statically whatever the rule says.
    """
    if p.timed or (p.masked and not (p.causal or p.targets)):
        return False
    shortest = DYNAMIC_TILES
    if p.head_dim > 64 and p.activation != "softmax":
        if not p.masked:
            return False
        if p.causal:
            shortest = DYNAMIC_TILES_OF_WIDE
    one_group = not (p.q_shared or p.kv_shared) and p.q_segments == p.kv_segments
    return one_group and kv_seqlen is not None and kv_seqlen >= shortest


def short_query_consumers(
    p: AttentionProblem, q_seqlen: float | None, kv_seqlen: float | None
) -> int:
    """How many consumers, of 64 query rows each, Hopper's kernel for segments with few query rows
    has; 0: it does not run. Segments with more rows need two kernels beside it.
    docs/decisions/short-queries.md has figures.

    It takes cross-attention with one group of queries and as many heads of keys, without a mask, a
    bias and dropout. In self-attention, many short segments often come with a few long ones, which
    take as long without the short ones. Beside packed tiles, few segments are left.
    """
    supported = not (p.masked or p.biased or p.q_shared or p.kv_shared or p.self_attention)
    if not supported or p.dropout or p.head_dim > 128 or p.q_segments != p.kv_segments:
        return 0
    if p.num_heads != p.num_kv_heads or q_seqlen is None or kv_seqlen is None:
        return 0
    narrow = padded_dim(p.head_dim) <= 64
    if p.kv_rows * p.num_heads < SHORT_QUERIES_ROWS or (narrow and kv_seqlen < 64):
        return 0
    if packed_tiles_are_faster(p, "hopper")[1]:
        return 0
    means = SHORT_QUERIES[64 if narrow else 128]
    return next((consumers for consumers, mean in enumerate(means, 1) if q_seqlen < mean), 0)


def query_chunks(p: AttentionProblem, key_tile: int, q_seqlen: float | None) -> int:
    """Number of chunks of query rows, at least 256 rows each, for which the tiles of keys fill the
    GPU. Without kv_shared: of each segment, if these have very many."""
    if p.kv_shared:
        tiles, rows = cdiv(p.kv_rows, key_tile), p.q_rows
    elif q_seqlen is None or q_seqlen < MANY_QUERIES or not _splits_queries(p):
        return 1
    else:
        tiles, rows = max(p.kv_segments, p.kv_rows // key_tile), int(q_seqlen)
    return max(1, min(2 * p.num_sms // max(1, tiles * p.num_kv_heads), cdiv(rows, 256)))


def _splits_queries(p: AttentionProblem) -> bool:
    """Whether a weight does not depend on its row's place in the segment, and each segment of
    queries has its own keys."""
    placed = p.masked or p.biased or p.dropout or p.paged
    return not (placed or p.q_shared or p.self_attention) and p.q_segments == p.kv_segments


def _takes_hopper(p: AttentionProblem, q_seqlen: float | None, kv_seqlen: float | None) -> bool:
    supported = hopper_is_supported(p.head_dim, p.v_dim, p.dtype, p.capability)
    if p.implementation == "hopper" and not supported:
        gpu = "no GPU" if p.capability is None else "compute capability {}.{}".format(*p.capability)
        raise ValueError(
            "implementation 'hopper' takes fp16 or bf16 on a GPU of compute capability 9.0, head"
            f" dims of q and v both 40 to 64, 72 to 128 or 136 to 256, in multiples of 8; got"
            f" {p.dtype} on {gpu}, head dims {p.head_dim} and {p.v_dim}"
        )
    if p.implementation == "hopper" and p.biased and p.head_dim > 128:
        raise ValueError(
            "implementation 'hopper' takes a bias at head dims up to 128: use 'auto' or 'triton';"
            f" got {p.head_dim}"
        )
    if p.implementation == "hopper" and p.scaled:
        raise ValueError("implementation 'hopper' takes no pages in 8 bits: use 'auto' or 'triton'")
    if not supported or p.scaled or p.implementation == "triton":
        return False
    misaligned = p.misaligned and p.q_rows != 0 and p.kv_rows != 0  # without rows no kernel runs
    if p.implementation == "hopper" and misaligned:
        operands = ", ".join(p.misaligned)
        raise ValueError(
            "implementation 'hopper' takes rows that begin at 16-byte boundaries, and no expanded"
            f" operands; got {operands}"
        )
    if p.implementation == "hopper":
        return True
    return not misaligned and hopper_is_faster(p, q_seqlen, kv_seqlen)


def _is_below(length: float | None, limit: int) -> bool:
    """Whether a mean length is known and below a limit."""
    return length is not None and length < limit


def _mean_seqlen(p: AttentionProblem, rows: int | None, segments: int | None) -> float | None:
    return None if rows is None or p.batch_invariant else rows / max(1, segments)


def _triton_tile(p: AttentionProblem, q_seqlen: float | None) -> AttentionTile:
    """The schedule's tiles, limited to the largest that the kernels support. Without a schedule, or
    batch-invariant: the largest."""
    if p.schedule[0] is not None:
        q_seqlen = None
    largest = attention_tile(
        max(p.head_dim, p.v_dim), p.dtype.itemsize, p.capability or HOPPER, q_seqlen
    )
    if p.batch_invariant:
        return largest
    query, key = p.schedule
    return AttentionTile(
        min(query or largest.query, largest.query), min(key or largest.key, largest.key)
    )


def _cached(function: Callable) -> Callable:
    """functools.cache; under torch.compile, which warns of caches, the function itself."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def call(*args, **fields):
        run = function if torch.compiler.is_compiling() else cached
        return run(*args, **fields)

    return call


@_cached
def _with_small_tiles(
    selection: Selection, queries: bool, keys: bool, *options: int | bool
) -> Selection:
    """options: of small_hopper_config, after the kernel."""
    kernels = ("fwd", "dq") * queries + ("dkdv",) * keys
    configs = {kernel: small_hopper_config(kernel, *options) for kernel in kernels}
    return selection._replace(**configs)


@_cached
def _with_short_queries(selection: Selection, dim: int, consumers: int) -> Selection:
    """The dq kernel has the same tiles, so that both share a list."""
    return selection._replace(
        short_queries=short_queries_config(dim, consumers), dq=dq_config(dim, consumers)
    )


@_cached
def _hopper_selection(dim: int, *options: str | bool) -> Selection:
    """options: of hopper_attention_config, after the head dim."""
    kernels = "fwd", "dq", "dkdv"
    return Selection(
        "hopper", **{kernel: hopper_attention_config(kernel, dim, *options) for kernel in kernels}
    )


@_cached
def _triton_selection(
    dim: int,
    itemsize: int,
    capability: tuple[int, int] | None,
    tile: AttentionTile,
    long_keys: bool,
    long_queries: bool,
) -> Selection:
    keys, queries = (
        attention_config(dim, itemsize, capability or HOPPER, tile.query, long)
        for long in (long_keys, long_queries)
    )
    fwd, dq = (
        config if config.tile else config._replace(tile=tile.query)
        for config in (keys.fwd, keys.dq)
    )
    # torch 2.11 does not trace comparisons of tuples
    tma = capability is not None and capability[0] >= 9
    return Selection("triton", fwd, dq, queries.dkdv._replace(tile=tile.key), tma=tma)
