"""FLOP formulas of this project's operators for `torch.utils.flop_counter`. Importing this module
registers them.

As torch's formulas, they count a multiplication and an addition as two, GEMMs only, and pairs that
a mask hides too. There is no padding to count. A formula reads the lengths from the offsets; on a
device it waits for them. Offsets without values (meta, fake) count as segments of equal lengths.

Example::

    import jagged_modules.flops
    from torch.utils.flop_counter import FlopCounterMode

    attention = jm.JaggedTargetAttention(32, num_heads=4)
    with FlopCounterMode(display=False) as counter:
        attention(torch.randn(2, 1, 32), (torch.randn(5, 32), torch.tensor([0, 2, 5])))
    counter.get_total_flops()
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jagged_kernels.attention.params import unpack
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula  # pyright: ignore[reportUnknownVariableType] - unannotated in torch

from .cpu import attention as _cpu_attention  # noqa: F401  # pyright: ignore[reportUnusedImport] - defines the operators
from .cpu import din as _din_cpu  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .cpu import invariant as _invariant  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .cpu import matmul as _matmul  # noqa: F401  # pyright: ignore[reportUnusedImport]

Formula = Callable[..., int]


def _has_values(x: Tensor) -> bool:
    return not (x.is_meta or isinstance(x, FakeTensor))


def _num_pairs(q_offsets: Tensor, kv_offsets: Tensor, rows: int, keys: int) -> int:
    """Pairs of a query and a key in the same segment. q_offsets may be several query groups, whose
    segments read the keys in turn."""
    segments = max(1, kv_offsets.shape[0] - 1)
    if not (_has_values(q_offsets) and _has_values(kv_offsets)):
        return rows * keys // segments
    return int((q_offsets.diff().view(-1, segments) * kv_offsets.diff()).sum())


def _attention(backward: bool, first: int = 0) -> Formula:
    """The forward's two GEMMs, or the backward's: scores again, dP, dV, dQ and dK. first: index of
    the first argument that forward and backward share."""

    def formula(*args: Any, **_: Any) -> int:
        call = unpack(*args[first:])[0]
        q, k, v, segments = call.q, call.k, call.v, call.segments
        rows, keys = segments.num_output_rows(q), segments.num_keys(k)
        pairs = _num_pairs(segments.q_offsets, segments.kv_offsets, rows, keys)
        gemms = (3, 2) if backward else (1, 1)
        return 2 * q.shape[1] * pairs * (gemms[0] * q.shape[2] + gemms[1] * v.shape[2])

    return formula


def _gate_linear_backward(dout: Tensor, *args: Any, **_: Any) -> int:
    """The gradient of the projection's input, and of the projection if it gets one."""
    projection, needs_projection = args[3], args[9]
    return 2 * dout.shape[0] * projection.numel() * (2 if needs_projection else 1)


def _block_attention(gemms: int, packed: bool, backward: bool) -> Formula:
    def formula(*args: Any, out_val: Any, **_: Any) -> int:
        rows, *operands = args[1:] if backward else args
        offsets, block_size = (operands[0], operands[3]) if packed else (operands[2], operands[5])
        pairs, lengths = rows.shape[0] * block_size, offsets.diff()  # of rows in the same block
        if _has_values(offsets):
            of_segments = lengths // block_size * block_size**2 + (lengths % block_size) ** 2
            pairs = int(of_segments.sum())
        return 2 * gemms * pairs * rows.shape[-2] * rows.shape[-1]

    return formula


def _product(x: int, y: int) -> Formula:
    """Elements of an operator's argument x, for each of which argument y has its last size of
    multiplications."""

    def formula(*args: Any, **_: Any) -> int:
        return 2 * args[x].numel() * args[y].shape[-1]

    return formula


def _outer(x: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return 2 * out_val.numel() * x.shape[1]


def _batched_matmul(weight: Tensor, x: Tensor, **_: Any) -> int:
    return 2 * weight.shape[0] * x.numel()


def _compress(weights: Sequence[Tensor], embeddings: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return sum(
        2 * weight.shape[0] * embedding.numel() for weight, embedding in zip(weights, embeddings)
    )


def _compress_backward(
    do: Tensor, weights: Sequence[Tensor], embeddings: Sequence[Tensor], *others: Any, **_: Any
) -> int:
    pairs, wanted = 2 * list(zip(weights, embeddings)), others[3]
    return sum(_compress([weight], [x]) for (weight, x), want in zip(pairs, wanted) if want)


def _din(operands: Sequence[Tensor], weights: Sequence[Tensor], *others: Any, **_: Any) -> int:
    """For each pair of a row of q and an event: the linears but that of q and of k, and p v."""
    v = operands[4 if len(operands) == 5 else 1]
    return _din_pairs(operands, others) * (_din_weights(weights) + 2 * v.shape[1])


def _din_moments(
    operands: Sequence[Tensor], weights: Sequence[Tensor], *others: Any, **_: Any
) -> int:
    return _din_pairs(operands, others) * _din_weights(weights[: others[4] + 1])


def _din_backward(do: Tensor, lse: Tensor, delta: Tensor, *args: Any, **_: Any) -> int:
    """Scores again, the gradients of each linear's input and weight, do · v and dv. A pass for the
    sums of a layer: scores, and the gradients of the inputs down to this layer."""
    operands, weights, *others = args
    pairs, all_weights, layer = _din_pairs(operands, others), _din_weights(weights), others[5]
    if layer >= 0:
        return pairs * (all_weights + _din_weights(weights[layer + 1 :]) + 2 * do.shape[1])
    return pairs * (3 * all_weights + 4 * do.shape[1])


def _din_weights(weights: Sequence[Tensor]) -> int:
    return 2 * sum(weight.numel() for weight in weights)


def _din_pairs(operands: Sequence[Tensor], others: Sequence[Any]) -> int:
    """others: the operator's arguments from the biases on."""
    q_offsets, kv_offsets, _ = others[2]
    return _num_pairs(q_offsets, kv_offsets, operands[0].shape[0], operands[1].shape[0])


ON_THE_HOST: dict[str, Formula] = {
    "attention_cpu": _attention(backward=False),
    "attention_cpu_backward": _attention(backward=True, first=2),
    "attention_cpu_packed_backward": _attention(backward=True, first=5),
    "din_attention_cpu": _din,
    "din_attention_cpu_backward": _din_backward,
    "din_moments_cpu": _din_moments,
    "outer_cpu": _outer,
    "matmul_cpu": _product(0, 1),
    "batched_matmul_cpu": _batched_matmul,
}
OF_KERNELS: dict[str, Formula] = {
    "attention": _attention(backward=False),
    "paged_attention": _attention(backward=False),
    "attention_backward": _attention(backward=True, first=2),
    "attention_packed_backward": _attention(backward=True, first=5),
    "block_attention": _block_attention(2, packed=False, backward=False),
    "block_attention_packed": _block_attention(2, packed=True, backward=False),
    "block_attention_backward": _block_attention(5, packed=False, backward=True),
    "block_attention_packed_backward": _block_attention(5, packed=True, backward=True),
    "din_attention": _din,
    "din_moments": _din_moments,
    "din_attention_backward": _din_backward,
    "gate_linear_backward": _gate_linear_backward,
    "linear_compress": _compress,
    "linear_compress_backward": _compress_backward,
    "jagged_dense_bmm": _product(0, 2),
    "jagged_dense_bmm_dact": _product(1, 3),
    "jagged_jagged_bmm": _product(0, 1),
    "jagged_outer": _outer,
    "jagged_gram": _outer,
    "array_jagged_bmm": _product(0, 1),
}


def _register(namespace: Any, formulas: dict[str, Formula]) -> None:
    for name, formula in formulas.items():
        register_flop_formula(getattr(namespace, name), get_raw=True)(formula)


if (_relu_linear := torch.ops.aten._addmm_activation) not in flop_registry:
    register_flop_formula(_relu_linear, get_raw=True)(flop_registry[torch.ops.aten.addmm])
_register(torch.ops.jagged_modules, ON_THE_HOST)
if importlib.util.find_spec("triton") is not None:
    for _folder in ("attention", "block_attention", "din", "linear_compress", "matmul", "rows"):
        importlib.import_module(f"jagged_kernels.{_folder}.op")  # defines the operators
    _register(torch.ops.jagged_kernels, OF_KERNELS)
