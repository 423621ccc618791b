"""Linear compression: the registered operators that launch the kernels of linear_compress_kernels.py, and autograd.

    out[b] = Σ_l (W_l @ E_l)[index_l[b]]                       the last level has no index: its row b is b
    G_l[u] = Σ dO[b] over the b with index_l[b] = u,  dW_l = Σ_u G_l[u] E_l[u]ᵀ,  dE_l[u] = W_lᵀ G_l[u]

The shared levels' products are kept in fp32, and added to the candidates' before its one rounding. Every output tile has one owner
and every sum a fixed order, so results are deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.configs import ProductConfig
from ..common.device import aligned_strides, ceil_div, device_properties, has_descriptor, precision, rows_in_place
from ..common.ops import below_autograd, differentiate, operator
from .configs import linear_compress_config, weight_gradient_config
from .triton_kernels import align_rows_kernel, linear_compress_bwd_dw_kernel, linear_compress_fwd_kernel, sum_groups_kernel


def _fake(weights, embeddings, indices, orders, offsets, *options):
    return embeddings[-1].new_empty((embeddings[-1].shape[0], weights[-1].shape[0], embeddings[-1].shape[2]))


@operator("linear_compress", fake=_fake)
def triton_linear_compress(
    weights: list[Tensor], embeddings: list[Tensor], indices: list[Tensor], orders: list[Tensor | None], offsets: list[Tensor | None],
    implementation: str, batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply every shared level at its own batch size, then the last one, adding the others.

    Args:
        weights: `[M, K_l]`, embeddings: `[B_l, K_l, N]`; fp32, fp16 or bf16, the last level's batch B being the output's.
        indices: `[B]` for every level but the last.
        orders, offsets: the batch rows grouped by their index, as `CandidateIndex` has them, for the backward. Offsets None: sorted
            there; order None with offsets: grouped already.
        implementation: "fused", "hopper", or "auto", "hopper" where it takes the operands.
        batch_invariant: kernels, tiles and splits do not depend on the batch sizes.

    Returns:
        `[B, M, N]`.
    """
    if _on_hopper(implementation, weights, embeddings):
        from . import hopper_launch as hopper

        return hopper.forward(weights, embeddings, indices, batch_invariant)
    weights, _ = aligned_weights(weights)
    shared = [_shared_product(weight, embedding, batch_invariant) for weight, embedding in zip(weights, embeddings[:-1])]
    return _compress(weights[-1], embeddings[-1], shared, indices, embeddings[-1].dtype)


def _on_hopper(implementation: str, weights: list[Tensor], embeddings: list[Tensor]) -> bool:
    candidates = embeddings[-1]
    if implementation == "fused" or candidates.device.type != "cuda" or device_properties(candidates.device)[0] != (9, 0):
        supported = False
    else:
        from . import hopper_launch as hopper  # Gluon is compiled for Hopper alone, and imported there alone

        supported = hopper.supports(weights, embeddings)
    if implementation == "hopper" and not supported:
        shapes = [(list(x.shape), x.stride()) for x in embeddings]
        raise ValueError(
            "implementation 'hopper' takes fp16 or bf16 on a GPU of compute capability 9.0, no empty weights, and embeddings "
            f"of N a multiple of 8 with rows at 16-byte boundaries; got {candidates.dtype} on {candidates.device}, weights "
            f"{[list(x.shape) for x in weights]}, embeddings and their strides {shapes}"
        )
    return supported and (implementation == "hopper" or candidates.shape[2] > 64)  # narrow ones would fill half of its tiles


def _backward_fake(do, weights, embeddings, indices, orders, offsets, wanted, *options):
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in weights]
    gradients += [x.new_empty((x.shape[0], ceil_div(x.shape[1], 8) * 8, x.shape[2]))[:, : x.shape[1]] for x in embeddings]
    return [x if want else x.new_empty(0) for x, want in zip(gradients, wanted)]


@operator("linear_compress_backward", fake=_backward_fake)
def triton_linear_compress_backward(
    do: Tensor, weights: list[Tensor], embeddings: list[Tensor], indices: list[Tensor], orders: list[Tensor | None],
    offsets: list[Tensor | None], wanted: list[bool], batch_invariant: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the weights and the embeddings that are `wanted` (first of all weights, then of all embeddings); the others empty."""
    do = do.contiguous()
    levels = len(weights)
    gradients: list[Tensor | None] = [None] * len(wanted)
    for level in reversed(range(levels)):  # the longest kernels first: the host gets ahead
        weight, embedding = weights[level], embeddings[level]
        if not wanted[level] and not wanted[levels + level]:
            continue
        gradient = do
        if level < levels - 1:
            grouped = (orders[level], offsets[level]) if offsets[level] is not None else _group(indices[level], embedding.shape[0])
            gradient = _sum_groups(do, *grouped, batch_invariant)
        if wanted[level]:
            gradients[level] = _weight_gradient(gradient, embedding)
        if wanted[levels + level]:
            gradients[levels + level] = _embedding_gradient(weight, gradient, batch_invariant)
    return [do.new_empty(0) if x is None else x for x in gradients]


def _product(weight: Tensor, embedding: Tensor) -> Tensor:
    """weight `[M, K]` @ embedding[b] `[K, N]` by cuBLAS, in their dtype."""
    return torch.bmm(weight.expand(embedding.shape[0], -1, -1), embedding)


def _shared_product(weight: Tensor, embedding: Tensor, batch_invariant: bool) -> Tensor:
    """A shared level's result in fp32, which the candidates' GEMM adds in its epilogue. weight: with aligned rows."""
    if batch_invariant:
        return _compress(weight, embedding, (), (), torch.float32)
    if embedding.dtype == torch.float32:
        return _product(weight, embedding)
    if embedding.device.type != "cuda":
        return _product(weight.float(), embedding.float())
    batch, columns = embedding.shape[0], embedding.shape[2]
    if batch * ceil_div(weight.shape[0], 128) * ceil_div(columns, 256) > device_properties(embedding.device)[1]:
        return _compress(weight, embedding, (), (), torch.float32)
    return torch.bmm(weight.expand(batch, -1, -1), embedding, out_dtype=torch.float32)  # few tiles: less time on the host


def _embedding_gradient(weight: Tensor, gradient: Tensor, batch_invariant: bool) -> Tensor:
    """weightᵀ `[K, M]` @ gradient[b] `[M, N]`; a view into K padded rows, without which cuBLAS takes five times as long.
    cuBLAS chooses its algorithm by the batch size, so that batch_invariant uses this project's kernel."""
    columns = weight.shape[1]
    if columns % 8:
        weight = functional.pad(weight, (0, -columns % 8))
    if batch_invariant:
        (weight,), _ = aligned_weights([weight.t()])
        return _compress(weight, gradient, (), (), gradient.dtype)[:, :columns]
    return _product(weight.t(), gradient)[:, :columns]


def _compress(weight: Tensor, embedding: Tensor, addends: Sequence[Tensor], indices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """weight `[M, K]`, of aligned rows, @ embedding[b] `[K, N]` + Σ addends[index[b]], `[B, M, N]`."""
    weight, embedding = weight.unsqueeze(0), rows_in_place(embedding)
    (batch, k, n), m = embedding.shape, weight.shape[1]
    out = embedding.new_empty((batch, m, n), dtype=dtype)
    config, tail, tiles, workers = _compress_plan(m, n, embedding.element_size(), embedding.device)
    if batch * tiles == 0:
        return out
    align, strides = aligned_strides((weight, 1), (embedding, 0), (embedding, 1))
    linear_compress_fwd_kernel[(min(batch * tiles, workers),)](
        weight, embedding, out, tuple(addends), tuple(indices),
        _descriptor(weight, config.rows, config.depth),
        _descriptor(weight, tail, config.depth) if tail < config.rows else None,
        _descriptor(embedding, config.depth, config.columns),
        batch, *strides, M=m, K=k, N=n, BLOCK_M=config.rows, TAIL_M=tail, BLOCK_N=config.columns, BLOCK_K=config.depth,
        ALIGN=align, PRECISION=precision(embedding), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@functools.cache
def _compress_plan(rows: int, columns: int, itemsize: int, device: torch.device) -> tuple[ProductConfig, int, int, int]:
    """Launch configuration, height of the last tile, tiles of a batch row, programs at a time."""
    capability, processors = device_properties(device)
    config = linear_compress_config(itemsize, capability, columns)
    half = config.rows // 2
    tail = half if half >= 64 and 0 < rows % config.rows <= half else config.rows
    return config, tail, ceil_div(rows, config.rows) * ceil_div(columns, config.columns), processors * config.ctas_per_sm


def _weight_gradient(gradient: Tensor, embedding: Tensor) -> Tensor:
    """Σ_b gradient[b] `[M, N]` @ embedding[b]ᵀ `[N, K]`, from as many fp32 parts as keep the GPU busy, summed in order."""
    embedding = rows_in_place(embedding)
    (batch, m, n), k = gradient.shape, embedding.shape[1]
    config, tiles, workers = _weight_gradient_plan(m, k, embedding.element_size(), embedding.device)
    steps = batch * ceil_div(n, config.depth)
    if tiles * steps == 0:
        return gradient.new_zeros((m, k))
    parts = max(1, min(workers // tiles, steps // 8))
    partial = gradient.new_empty((parts, m, k), dtype=torch.float32)
    align, strides = aligned_strides((gradient, 0), (gradient, 1), (embedding, 0), (embedding, 1))
    linear_compress_bwd_dw_kernel[(tiles, parts)](
        gradient, embedding, partial,
        _descriptor(gradient, config.rows, config.depth), _descriptor(embedding, config.columns, config.depth),
        batch, *strides, M=m, K=k, N=n, BLOCK_M=config.rows, BLOCK_K=config.columns, BLOCK_N=config.depth,
        ALIGN=align, PRECISION=precision(embedding), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return partial.sum(0).to(gradient.dtype)


@functools.cache
def _weight_gradient_plan(rows: int, columns: int, itemsize: int, device: torch.device) -> tuple[ProductConfig, int, int]:
    """Launch configuration, tiles, programs at a time."""
    capability, processors = device_properties(device)
    config = weight_gradient_config(itemsize, capability, rows, columns)
    return config, ceil_div(rows, config.rows) * ceil_div(columns, config.columns), processors * config.ctas_per_sm


def _group(index: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Order that groups equal indices, and the groups' offsets."""
    groups, order = torch.sort(index, stable=True)
    return order, torch.searchsorted(groups, torch.arange(num_groups + 1, dtype=groups.dtype, device=groups.device))


def _sum_groups(x: Tensor, order: Tensor | None, offsets: Tensor, batch_invariant: bool = False) -> Tensor:
    """Sums of groups of x's first dimension, with one rounding."""
    groups = offsets.shape[0] - 1
    out = x.new_empty((groups, *x.shape[1:]))
    if out.numel() == 0 or x.numel() == 0:
        return out.zero_()
    size = x.stride(0)
    few = batch_invariant or groups * ceil_div(size, 1024) < 4 * device_properties(x.device)[1]
    block, rows = (256, 16) if few else (1024, 8)
    sum_groups_kernel[(ceil_div(size, block), groups)](x, order, offsets, out, size, ROWS=rows, BLOCK=block, num_warps=4)
    return out


def aligned_weights(weights: Sequence[Tensor], num_zeros: int = 0) -> tuple[list[Tensor], Tensor]:
    """The weights, those copied whose rows do not start at 16-byte boundaries (loads would be of 4 bytes and take most of the time), and
    so many int32 zeros; by one launch, if any is copied or any zero wanted."""
    aligned, copies = list(weights), []
    zeros = weights[0].new_empty(num_zeros, dtype=torch.int32)
    for level, weight in enumerate(weights):
        if not has_descriptor(weight.unsqueeze(0)):
            (rows, columns), stride = weight.shape, ceil_div(weight.shape[1], 8) * 8
            aligned[level] = weight.new_empty((rows, stride))[:, :columns]
            copies.append((weight, *weight.stride(), aligned[level], stride, columns))
    if weights[0].shape[0] > 0 and (copies or num_zeros > 0):
        align_rows_kernel[(weights[0].shape[0],)](tuple(copies), zeros, num_zeros, BLOCK=1024, num_warps=4)
    return aligned, zeros


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """TMA descriptor of `[batch, rows, columns]` for blocks [1, rows, columns], where there is TMA and rows start at 16-byte boundaries."""
    strides = [x.stride(dim) if x.shape[dim] > 1 else 16 for dim in (0, 1)]
    unaligned = any(stride * x.element_size() % 16 or stride == 0 for stride in strides)
    if x.device.type != "cuda" or device_properties(x.device)[0] < (9, 0) or unaligned or x.data_ptr() % 16 or x.numel() == 0:
        return None
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, rows, columns])


class _LinearCompress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, levels: int, options: tuple, *tensors):
        ctx.levels, ctx.options = levels, options
        ctx.save_for_backward(*tensors)
        with below_autograd():
            return triton_linear_compress(*_unflatten(levels, tensors), *options)

    @staticmethod
    def backward(ctx, do):
        wanted = list(ctx.needs_input_grad[2 : 2 + 2 * ctx.levels])
        gradients = triton_linear_compress_backward(do, *_unflatten(ctx.levels, ctx.saved_tensors), wanted, *ctx.options[1:])
        gradients = [gradient if want else None for gradient, want in zip(gradients, wanted)]
        return None, None, *gradients, *(None,) * 3 * (ctx.levels - 1)


class _LinearCompressBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, do, levels: int, options: tuple, *tensors):
        with below_autograd():
            return tuple(triton_linear_compress_backward(do, *_unflatten(levels, tensors), *options))

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("linear_compress is not differentiable twice: its backward kernels have no derivative of their own")


def _unflatten(levels: int, tensors: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    """Weights, embeddings, indices, orders, offsets."""
    sizes = [levels, levels, *[levels - 1] * 3]
    ends = [sum(sizes[: i + 1]) for i in range(5)]
    return [list(tensors[end - size : end]) for size, end in zip(sizes, ends)]


def _flatten(lists: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    return [x for tensors in lists for x in tensors]


differentiate(triton_linear_compress, lambda *args: _LinearCompress.apply(len(args[0]), args[5:], *_flatten(args[:5])))
differentiate(
    triton_linear_compress_backward,
    lambda do, *args: list(_LinearCompressBackward.apply(do, len(args[0]), args[5:], *_flatten(args[:5]))),
)
