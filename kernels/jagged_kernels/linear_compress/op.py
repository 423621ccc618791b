"""Linear compression: the registered operators, their launches and autograd.

    out[b] = Σ_l (W_l @ E_l)[index_l[b]]    the last level has no index: its row b is b
    G_l[u] = Σ dO[b] over the b with index_l[b] = u,  dW_l = Σ_u G_l[u] E_l[u]ᵀ,  dE_l[u] = W_lᵀ
    G_l[u]

Results of the shared levels are kept in fp32, and added to the candidates' accumulator before it is
rounded. Every output tile has one owner and every sum a fixed order, so results are deterministic.

select.py chooses the kernels, configs.py has their launch configurations. triton_kernels.py and
hopper.py are the two backends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.autograd import below_autograd, differentiate, refuse_twice
from ..common.configs import GemmConfig, KernelChoice
from ..common.descriptors import descriptor
from ..common.device import (
    aligned_strides,
    cdiv,
    contiguous_last_dim,
    device_properties,
    has_descriptor,
    precision,
)
from ..common.ops import direct, operator
from .select import LinearCompressProblem, select_backward, select_forward, select_shared_gemm
from .triton_kernels import (
    Options,
    SharedLevel,
    align_rows_kernel,
    linear_compress_bwd_dw_kernel,
    linear_compress_fwd_kernel,
    linear_compress_fwd_levels_kernel,
    sum_groups_kernel,
)

# -- forward ---------------------------------------------------------------------------------------


def _fake(weights, embeddings, indices, orders, offsets, *options):
    return embeddings[-1].new_empty(
        (embeddings[-1].shape[0], weights[-1].shape[0], embeddings[-1].shape[2])
    )


@operator("linear_compress", fake=_fake)
def triton_linear_compress(
    weights: list[Tensor],
    embeddings: list[Tensor],
    indices: list[Tensor],
    orders: list[Tensor | None],
    offsets: list[Tensor | None],
    implementation: str,
    batch_invariant: bool = False,
) -> Tensor:
    """Multiply every shared level at its own batch size, then the candidates' level, adding the
    others.

    Args:
        weights: `[M, K_l]`, embeddings: `[B_l, K_l, N]`; fp32, fp16 or bf16. The last level is the
            candidates', with the output's batch B.
        indices: `[B]` for every level but the last.
        orders, offsets: the batch rows grouped by their index, as `CandidateIndex` has them, for
            the backward. Offsets None: the backward sorts them. Order None with offsets: they are
            grouped already.
        implementation: "triton", "hopper", or "auto": "hopper" where it is supported and faster.
        batch_invariant: kernels, tiles and splits do not depend on the batch sizes.

    Returns:
        `[B, M, N]`.

    Raises:
        ValueError: implementation "hopper", which does not support the operands.
    """
    (batch, _, n), m = embeddings[-1].shape, weights[-1].shape[0]
    aligned = implementation != "triton" and (
        batch == 0 or all(has_descriptor(x) for x in embeddings)
    )
    nonempty = all(x.numel() > 0 for x in weights) and (
        batch == 0 or all(x.numel() > 0 for x in embeddings)
    )
    choice = select_forward(_problem(embeddings[-1], aligned, nonempty), implementation)
    if batch == 0:
        return embeddings[-1].new_empty((0, m, n))
    if choice.backend == "hopper":
        # Gluon is imported only on Hopper, which alone compiles these kernels
        from . import hopper_launch as hopper

        tiling = hopper.tiling(m, n, choice.config)
        weights, state = aligned_weights(weights, hopper.state_size(embeddings, tiling))
        levels = [hopper.Level(*level) for level in zip(weights, embeddings)]
        return hopper.forward(levels, indices, state, tiling, batch_invariant)
    if len(weights) > 2:
        return _all_levels(weights, embeddings, indices, choice.config)
    weights, _ = aligned_weights(weights)
    shared = [
        _shared_gemm(*level, choice.config, batch_invariant)
        for level in zip(weights, embeddings[:-1])
    ]
    return _gemm(weights[-1], embeddings[-1], shared, indices, embeddings[-1].dtype, choice.config)


def _problem(
    candidates: Tensor, aligned: bool = True, nonempty: bool = True
) -> LinearCompressProblem:
    device = candidates.device
    capability = device_properties(device).capability
    return LinearCompressProblem(
        candidates.shape[2], candidates.dtype, aligned, nonempty, device.type, capability
    )


def _shared_gemm(
    weight: Tensor, embedding: Tensor, config: GemmConfig, batch_invariant: bool
) -> Tensor:
    """A shared level's result in fp32, which the candidates' GEMM adds in its epilogue. weight:
    with aligned rows."""
    (batch, _, n), m, device = embedding.shape, weight.shape[0], embedding.device
    num_tiles = batch * cdiv(m, 128) * cdiv(n, 256)
    gpu = device.type, device_properties(device).num_sms
    if select_shared_gemm(num_tiles, embedding.dtype, *gpu, batch_invariant) == "triton":
        return _gemm(weight, embedding, (), (), torch.float32, config)
    return _cublas_gemm(weight, embedding, torch.float32)


def _cublas_gemm(weight: Tensor, embedding: Tensor, dtype: torch.dtype) -> Tensor:
    """weight `[M, K]` @ embedding[b] `[K, N]` in this dtype: theirs, or fp32."""
    weight = weight.expand(embedding.shape[0], -1, -1)
    if dtype == embedding.dtype:
        return torch.bmm(weight, embedding)
    if embedding.device.type != "cuda":  # in Triton's interpreter
        return torch.bmm(weight.to(dtype), embedding.to(dtype))
    return torch.bmm(weight, embedding, out_dtype=dtype)


def _all_levels(
    weights: Sequence[Tensor],
    embeddings: Sequence[Tensor],
    indices: Sequence[Tensor],
    config: GemmConfig,
) -> Tensor:
    """All levels by Triton in one launch, for candidates. It does not depend on the batch sizes
    which tiles a level has, nor in which order a tile is summed."""
    embeddings = [contiguous_last_dim(x) for x in embeddings]
    (batch, _, n), m = embeddings[-1].shape, weights[0].shape[0]
    out = embeddings[-1].new_empty((batch, m, n))
    tiles = cdiv(m, config.block_m) * cdiv(n, config.block_n)
    if tiles == 0:
        return out
    firsts = tuple(itertools.accumulate((x.shape[0] for x in embeddings), initial=0))
    weights, state = aligned_weights(weights, 1 + firsts[-2] * tiles)
    levels, options = [], []
    for weight, embedding in zip(weights, embeddings):
        align, strides = aligned_strides((weight, 0), (embedding, 0), (embedding, 1))
        levels.append((weight, embedding, tuple(strides)))
        options.append(_options(weight, embedding, config, align))
    *shared, (weight, embedding, strides) = levels
    results = [out.new_empty((x.shape[0], m, n), dtype=torch.float32) for x in embeddings[:-1]]
    shared = [SharedLevel(*level, result) for level, result in zip(shared, results)]
    workers = device_properties(out.device).num_sms * config.ctas_per_sm
    linear_compress_fwd_levels_kernel[(min(firsts[-1] * tiles, workers),)](
        weight, embedding, out, tuple(shared), tuple(indices), state,
        *_descriptors(weight.unsqueeze(0), embedding, options[-1].tail_m, config),
        strides, encoded(firsts), OPTIONS=options[-1], DEPTHS=tuple(x.k for x in options[:-1]),
        ALIGNS=tuple(x.align for x in options[:-1]),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def encoded(numbers: Sequence[int]) -> tuple[int, ...]:
    """Numbers that are neither 1 nor multiples of 16: Triton would compile a kernel for these, as
    do_not_specialize does not reach into tuples."""
    return tuple(2 * x + 3 for x in numbers)


def _options(weight: Tensor, embedding: Tensor, config: GemmConfig, align: int) -> Options:
    """Constants of weight `[M, K]` @ embedding[b] `[K, N]`."""
    (m, k), n, half = weight.shape, embedding.shape[2], config.block_m // 2
    # rows of the last M tile
    tail = half if half >= 64 and 0 < m % config.block_m <= half else config.block_m
    blocks = config.block_m, config.block_n, config.block_k
    return Options(m, k, n, *blocks, align=align, precision=precision(embedding), tail_m=tail)


def _descriptors(
    weight: Tensor, embedding: Tensor, tail: int, config: GemmConfig
) -> tuple[TensorDescriptor | None, ...]:
    """Of a weight `[1, M, K]`, of its last M tile where that has fewer rows, of embeddings."""
    return (
        _descriptor(weight, config.block_m, config.block_k, config),
        _descriptor(weight, tail, config.block_k, config) if tail < config.block_m else None,
        _descriptor(embedding, config.block_k, config.block_n, config),
    )


def _gemm(
    weight: Tensor,
    embedding: Tensor,
    addends: Sequence[Tensor],
    indices: Sequence[Tensor],
    dtype: torch.dtype,
    config: GemmConfig,
) -> Tensor:
    """weight `[M, K]`, with aligned rows, @ embedding[b] `[K, N]` + Σ addends[index[b]],
    `[B, M, N]`, by Triton."""
    weight, embedding = weight.unsqueeze(0), contiguous_last_dim(embedding)
    (batch, _, n), m = embedding.shape, weight.shape[1]
    out = embedding.new_empty((batch, m, n), dtype=dtype)
    tiles = batch * cdiv(m, config.block_m) * cdiv(n, config.block_n)
    if tiles == 0:
        return out
    workers = device_properties(embedding.device).num_sms * config.ctas_per_sm
    align, strides = aligned_strides((weight, 1), (embedding, 0), (embedding, 1))
    options = _options(weight[0], embedding, config, align)
    linear_compress_fwd_kernel[(min(tiles, workers),)](
        weight, embedding, out, tuple(addends), tuple(indices),
        *_descriptors(weight, embedding, options.tail_m, config), batch, tuple(strides),
        OPTIONS=options, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def aligned_weights(weights: Sequence[Tensor], num_zeros: int = 0) -> tuple[list[Tensor], Tensor]:
    """The weights, and num_zeros int32 zeros. Weights whose rows do not start at 16-byte boundaries
    are copied to rows that do: otherwise they would be loaded 4 bytes at a time, which would take
    most of the time. One launch for the copies and the zeros."""
    aligned, copies = list(weights), []
    for level, weight in enumerate(weights):
        if not has_descriptor(weight.unsqueeze(0)):
            (rows, columns), stride = weight.shape, cdiv(weight.shape[1], 8) * 8
            aligned[level] = weight.new_empty((rows, stride))[:, :columns]
            copies.append((weight, *weight.stride(), aligned[level], stride, columns))
    if not copies or weights[0].shape[0] == 0:
        # less of the host's time
        return aligned, weights[0].new_zeros(num_zeros, dtype=torch.int32)
    zeros = weights[0].new_empty(num_zeros, dtype=torch.int32)
    align_rows_kernel[(weights[0].shape[0],)](
        tuple(copies), zeros, num_zeros, BLOCK=1024, num_warps=4
    )
    return aligned, zeros


def _descriptor(x: Tensor, rows: int, columns: int, config: GemmConfig) -> TensorDescriptor | None:
    """TMA descriptor of x for blocks [1, rows, columns]. None without TMA, or if rows of x do not
    start at 16-byte boundaries."""
    if config.uses_tma and x.numel() > 0 and has_descriptor(x):
        return descriptor(x, 1, rows, columns)
    return None


# -- backward --------------------------------------------------------------------------------------


def _backward_fake(
    do, weights, embeddings, indices, orders, offsets, wanted, widened, batch_invariant=False
):
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in weights]
    gradients += [
        x.new_empty((x.shape[0], cdiv(x.shape[1], 8) * 8, x.shape[2]))[:, : x.shape[1]]
        for x in embeddings
    ]
    gradients = [x.to(torch.float32) if widens else x for x, widens in zip(gradients, widened)]
    return [x if want else x.new_empty(0) for x, want in zip(gradients, wanted)]


@operator("linear_compress_backward", fake=_backward_fake)
def triton_linear_compress_backward(
    do: Tensor,
    weights: list[Tensor],
    embeddings: list[Tensor],
    indices: list[Tensor],
    orders: list[Tensor | None],
    offsets: list[Tensor | None],
    wanted: list[bool],
    widened: list[bool],
    batch_invariant: bool = False,
) -> list[Tensor]:
    """Gradients of the weights and the embeddings that are `wanted` (first of all weights, then of
    all embeddings); the others empty. widened: which ones are in fp32, not in the dtype of the
    operands."""
    do = do.contiguous()
    levels = len(weights)
    dtypes = [torch.float32 if x else do.dtype for x in widened]
    choice = select_backward(
        _problem(embeddings[-1]), do.shape[1], tuple(x.shape[1] for x in weights), batch_invariant
    )
    gradients: list[Tensor | None] = [None] * len(wanted)
    # the longest kernels first, so that the host runs ahead
    chosen = [x for x in reversed(range(levels)) if wanted[x] or wanted[levels + x]]
    shared, sums = [x for x in chosen if x < levels - 1], []
    for level in chosen:
        weight, embedding, gradient = weights[level], embeddings[level], do
        if level < levels - 1:
            if not sums:
                groups = [
                    (orders[x], offsets[x])
                    if offsets[x] is not None
                    else _group(indices[x], embeddings[x].shape[0])
                    for x in shared
                ]
                sums = _sum_groups(do, groups, batch_invariant)
            gradient = sums[shared.index(level)]
        if wanted[level]:
            gradients[level] = _weight_gradient(
                gradient, embedding, choice.weights[level], dtypes[level]
            )
        if wanted[levels + level]:
            gradients[levels + level] = _embedding_gradient(
                weight, gradient, choice.embeddings, dtypes[levels + level]
            )
    return [do.new_empty(0) if x is None else x for x in gradients]


def _embedding_gradient(
    weight: Tensor, gradient: Tensor, choice: KernelChoice, dtype: torch.dtype
) -> Tensor:
    """weightᵀ `[K, M]` @ gradient[b] `[M, N]`, with K padded to a multiple of 8: otherwise cuBLAS
    takes five times as long."""
    columns = weight.shape[1]
    if columns % 8:
        weight = functional.pad(weight, (0, -columns % 8))
    if choice.backend == "triton":
        (weight,), _ = aligned_weights([weight.t()])
        return _gemm(weight, gradient, (), (), dtype, choice.config)[:, :columns]
    return _cublas_gemm(weight.t(), gradient, dtype)[:, :columns]


def _weight_gradient(
    gradient: Tensor, embedding: Tensor, config: GemmConfig, dtype: torch.dtype
) -> Tensor:
    """Σ_b gradient[b] `[M, N]` @ embedding[b]ᵀ `[N, K]`. Fp32 parts, enough to fill the GPU, are
    added in a fixed order."""
    embedding = contiguous_last_dim(embedding)
    (batch, m, n), k = gradient.shape, embedding.shape[1]
    tiles = cdiv(m, config.block_m) * cdiv(k, config.block_n)
    steps = batch * cdiv(n, config.block_k)
    if tiles * steps == 0:
        return gradient.new_zeros((m, k), dtype=dtype)
    workers = device_properties(embedding.device).num_sms * config.ctas_per_sm
    parts = max(1, min(workers // tiles, steps // 8))
    partial = gradient.new_empty((parts, m, k), dtype=torch.float32)
    align, strides = aligned_strides((gradient, 0), (gradient, 1), (embedding, 0), (embedding, 1))
    blocks = config.block_m, config.block_k, config.block_n  # it sums over N
    linear_compress_bwd_dw_kernel[(tiles, parts)](
        gradient, embedding, partial,
        _descriptor(gradient, config.block_m, config.block_k, config),
        _descriptor(embedding, config.block_n, config.block_k, config), batch, *strides,
        OPTIONS=Options(m, k, n, *blocks, align=align, precision=precision(embedding)),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return partial.sum(0).to(dtype)


def _group(index: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Order that groups equal indices, and the groups' offsets."""
    groups, order = torch.sort(index, stable=True)
    return order, torch.searchsorted(
        groups, torch.arange(num_groups + 1, dtype=groups.dtype, device=groups.device)
    )


def _sum_groups(
    x: Tensor, groups: Sequence[tuple[Tensor | None, Tensor]], batch_invariant: bool = False
) -> list[Tensor]:
    """Sums of groups of x's first dimension, with one rounding, for each level: its order and its
    offsets. One launch. x is contiguous."""
    orders, offsets = zip(*groups)
    outs = [x.new_empty((len(y) - 1, *x.shape[1:])) for y in offsets]
    firsts = tuple(itertools.accumulate((len(out) for out in outs), initial=0))
    if firsts[-1] == 0 or x.numel() == 0:
        return [out.zero_() for out in outs]
    # not x's stride: a dimension of size 1 may have any in a contiguous tensor
    size = math.prod(x.shape[1:])
    small_blocks = (
        batch_invariant or firsts[-1] * cdiv(size, 1024) < 4 * device_properties(x.device).num_sms
    )
    block, rows = (256, 16) if small_blocks else (1024, 8)
    sum_groups_kernel[(firsts[-1] * cdiv(size, block),)](
        x, orders, offsets, tuple(outs), encoded(firsts) if len(outs) > 1 else (), size,
        ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return outs


# -- autograd --------------------------------------------------------------------------------------


class _LinearCompress(torch.autograd.Function):
    """dtype: that of the operands, to which weights and embeddings are cast; None: theirs. What was
    cast gets its gradient from a GEMM in fp32."""

    @staticmethod
    def forward(ctx, levels: int, options: tuple, dtype: torch.dtype | None, *tensors):
        ctx.levels, ctx.options = levels, options
        operands, others = tensors[: 2 * levels], tensors[2 * levels :]
        ctx.widened = [dtype not in (None, x.dtype) for x in operands]
        if dtype is not None:
            operands = [x.to(dtype) for x in operands]
        ctx.save_for_backward(*operands, *others)
        with below_autograd():
            return triton_linear_compress(*_unflatten(levels, (*operands, *others)), *options)

    @staticmethod
    def backward(ctx, do):
        wanted = list(ctx.needs_input_grad[3 : 3 + 2 * ctx.levels])
        if torch.is_grad_enabled() and any(ctx.widened):
            # what was cast has no graph, so that a second derivative would silently be 0
            do = do + do.new_zeros(()).requires_grad_()
        gradients = triton_linear_compress_backward(
            do, *_unflatten(ctx.levels, ctx.saved_tensors), wanted, ctx.widened, *ctx.options[1:]
        )
        gradients = [gradient if want else None for gradient, want in zip(gradients, wanted)]
        return None, None, None, *gradients, *(None,) * 3 * (ctx.levels - 1)


def _unflatten(levels: int, tensors: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    """Weights, embeddings, indices, orders, offsets."""
    left = iter(tensors)
    return [list(itertools.islice(left, x)) for x in (levels, levels, *[levels - 1] * 3)]


def linear_compress(
    weights: list[Tensor], embeddings: list[Tensor], *others: Any, dtype: torch.dtype
) -> Tensor:
    """`triton_linear_compress` of operands that it casts to this dtype, as one autograd node, in
    less host time. A graph of torch.compile has the casts, which it fuses with what is before."""
    casts = any(x.dtype != dtype for x in (*weights, *embeddings))
    if casts and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        tensors = itertools.chain(weights, embeddings, *others[:3])
        return _LinearCompress.apply(len(weights), others[3:], dtype, *tensors)
    weights, embeddings = ([x.to(dtype) for x in level] for level in (weights, embeddings))
    args = weights, embeddings, *others
    if torch.is_grad_enabled():
        return triton_linear_compress(*args)
    return direct(triton_linear_compress, args, [*itertools.chain(*args[:5])])(*args)


differentiate(
    triton_linear_compress,
    lambda *args: _LinearCompress.apply(len(args[0]), args[5:], None, *itertools.chain(*args[:5])),
)
refuse_twice("linear_compress", triton_linear_compress_backward)
