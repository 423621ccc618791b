"""Products, softmaxes and layers within the segments of jagged tensors. Public through `functional`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jagged_kernels.common.device import rows_in_place
from torch import Tensor
from torch.nn import functional as nnf

from ..activations import POINTWISE
from ..autocast import autocast, autocast_dtype
from ..containers.offsets import rows_and_segments
from ..cpu.buckets import compute_dtype
from ..cpu.invariant import pointwise_rows_cpu, products_cpu
from ..cpu.matmul import outer_cpu, product_cpu, softmax_cpu
from ..dtypes import uses_kernels
from ..reference import (
    array_jagged_bmm_reference,
    jagged2_softmax_reference,
    jagged_dense_bmm_reference,
    jagged_jagged_bmm_reference,
    jagged_outer_reference,
    jagged_softmax_reference,
)
from ..settings import is_batch_invariant
from ..validation import (
    IMPLEMENTATIONS,
    check_device,
    check_flag,
    check_implementation,
    check_offsets,
    check_tensor,
    checked_offsets,
    refuse_transforms,
    values_are_checkable,
)


@dataclasses.dataclass(frozen=True, eq=False)
class ScorePlan:
    """Where the scores of each segment lie in one flat buffer: N_b · M_b of them from p_offsets[b] on, row by row.

    Made once per batch on the host, by `from_offsets`; shared by all operators on these segments, forward and backward.

    Attributes:
        x_offsets, y_offsets: `[B + 1]`, N_b rows of x and M_b rows of y in segment b. p_offsets: `[B + 1]` int64.
        x_rows, y_rows, total: Σ N_b, Σ M_b and Σ N_b · M_b.

    Example::

        plan = F.ScorePlan.from_offsets(torch.tensor([0, 2, 5]))   # scores of a sequence with itself: 2 · 2 + 3 · 3
        p = F.jagged_jagged_bmm_jagged_out(q, k, plan)             # [13]
        out = F.array_jagged_bmm_jagged_out(F.jagged2_softmax(p, plan), v, plan)
    """

    x_offsets: Tensor
    y_offsets: Tensor
    p_offsets: Tensor
    x_rows: int
    y_rows: int
    total: int

    @classmethod
    def from_offsets(cls, x_offsets: Tensor, y_offsets: Tensor | None = None) -> ScorePlan:
        """The plan for x's and y's segments `[B + 1]` int32 or int64 on the host; of x with itself if y_offsets is None.

        Raises:
            TypeError: not integer tensors. ValueError: no offsets, of different numbers of segments, or not on the host, where alone
            sizes can be read without waiting. Inside of torch.compile too: make the plan outside and pass it in.
        """
        y_offsets = x_offsets if y_offsets is None else y_offsets
        for name, offsets in (("x_offsets", x_offsets), ("y_offsets", y_offsets)):
            check_offsets(name, offsets)
            if offsets.device.type != "cpu":
                raise ValueError(f"{name} must be on the host, where the plan is made before plan.to(device), got {offsets.device}")
            if not values_are_checkable(offsets):
                raise ValueError(f"{name} must have values for a plan to be made, got offsets of a graph that is being traced")
        if x_offsets.shape != y_offsets.shape:
            segments = x_offsets.shape[0] - 1, y_offsets.shape[0] - 1
            raise ValueError("x_offsets and y_offsets must describe the same number of segments, got {} and {}".format(*segments))
        p_offsets = nnf.pad((x_offsets.diff().long() * y_offsets.diff()).cumsum(0), (1, 0))
        return cls(x_offsets, y_offsets, p_offsets, *(int(x[-1]) for x in (x_offsets, y_offsets, p_offsets)))

    @property
    def offsets(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x_offsets, self.y_offsets, self.p_offsets

    def to(self, device, non_blocking: bool = False) -> ScorePlan:
        """The plan with its tensors on `device`."""
        return self._moved(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ScorePlan:
        """The plan in page-locked memory. DataLoader calls it."""
        return self._moved(lambda x: x.pin_memory())

    def _moved(self, move: Callable[[Tensor], Tensor]) -> ScorePlan:
        x_offsets = move(self.x_offsets)
        y_offsets = x_offsets if self.y_offsets is self.x_offsets else move(self.y_offsets)
        return ScorePlan(x_offsets, y_offsets, move(self.p_offsets), self.x_rows, self.y_rows, self.total)


def jagged_dense_bmm(x: Tensor, y: Tensor, offsets: Tensor, *, max_seqlen: int | None = None, implementation: str = "auto") -> Tensor:
    """out[b] = x[b] @ y[b]: the rows of each segment times its own matrix.

    Gradients of any order flow to x and y. Low precision is accumulated in fp32 and rounded once.

    Args:
        x: `[L, D]` fp32, fp16 or bf16 (on the CPU also fp64). y: `[B, D, T]`, same dtype, any strides.
        offsets: `[B + 1]` int32 or int64, on x's device or the host.
        max_seqlen: rows of the longest segment, if the host knows. On CUDA, segments of up to 512 rows then need one launch less. A
            longer segment is an error where the host has the offsets; elsewhere it is computed correctly, only slower.
        implementation: "auto" (triton on CUDA, segments of equal lengths together on the CPU), "reference" or "triton".

    Returns:
        `[L, T]`.

    Raises:
        TypeError: an argument of the wrong kind. ValueError: shapes, dtypes, devices, offsets or names that do not fit together.
        RuntimeError: a torch.func transform (vmap, grad, jvp); the reference has them.
    """
    x, y = _operands("jagged_dense_bmm", implementation, x=(x, "[L, D]"), y=(y, "[B, D, T]"))
    offsets = checked_offsets("offsets", offsets, x.shape[0], x, "x's", max_seqlen)
    _check_segment_matrices("y", y, offsets, x.shape[1])
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return jagged_dense_bmm_reference(x, y, offsets)
    if _on_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_dense_bmm

        return triton_jagged_dense_bmm(rows_in_place(x), offsets, y, None, None, max_seqlen, batch_invariant)
    return _jagged_dense_bmm_cpu(x, y, offsets, batch_invariant)


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, *, max_seqlen: int | None = None, implementation: str = "auto") -> Tensor:
    """out[b] = x[b]ᵀ @ y[b]: one matrix for each segment, 0 for an empty one.

    Gradients, precision, offsets, max_seqlen, implementation and errors as in `jagged_dense_bmm`.

    Args:
        x: `[L, D]`, y: `[L, T]`, same dtype.

    Returns:
        `[B, D, T]`.
    """
    x, y = _operands("jagged_jagged_bmm", implementation, x=(x, "[L, D]"), y=(y, "[L, T]"))
    offsets = checked_offsets("offsets", offsets, x.shape[0], x, "x's", max_seqlen)
    if y.shape[0] != x.shape[0]:
        raise ValueError(f"y must have x's rows, {x.shape[0]}, got {y.shape[0]}")
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return jagged_jagged_bmm_reference(x, y, offsets)
    if _on_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_jagged_bmm

        return triton_jagged_jagged_bmm(rows_in_place(x), rows_in_place(y), offsets, max_seqlen, batch_invariant)
    segments, width = offsets.shape[0] - 1, x.shape[1]
    out = product_cpu(x.flatten(), y, offsets, *_matrix_offsets(offsets, width), segments * width, True, batch_invariant)
    return out.unflatten(0, (segments, width))


def jagged_softmax(x: Tensor, offsets: Tensor, *, max_seqlen: int | None = None, implementation: str = "auto") -> Tensor:
    """Softmax over the rows of each segment, each column by itself.

    First derivatives. Computed in fp32 at least; offsets, max_seqlen, implementation and errors as in `jagged_dense_bmm`.

    Args:
        x: `[L, H]`, one column per head, for instance.

    Returns:
        `[L, H]`; the rows of a segment add up to 1.
    """
    (x,) = _operands("jagged_softmax", implementation, False, x=(x, "[L, H]"))
    offsets = checked_offsets("offsets", offsets, x.shape[0], x, "x's", max_seqlen)
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return jagged_softmax_reference(x, offsets)
    if _on_kernels(implementation, x):
        from jagged_kernels.softmax.op import triton_jagged_softmax

        return triton_jagged_softmax(rows_in_place(x), offsets, max_seqlen, batch_invariant)
    return softmax_cpu(x.flatten(), offsets, *_matrix_offsets(offsets, x.shape[1]), True, batch_invariant).view(x.shape)


def jagged_jagged_bmm_jagged_out(x: Tensor, y: Tensor, plan: ScorePlan, *, implementation: str = "auto") -> Tensor:
    """p[b] = x[b] @ y[b]ᵀ: the scores of every row of x with every row of y in its segment, in one flat buffer.

    Gradients, precision, implementation and errors as in `jagged_dense_bmm`.

    Args:
        x: `[Lx, D]`, y: `[Ly, D]`, same dtype. plan: of their offsets. The very same tensor twice, with a plan of x alone, takes
            about half the time with its gradient.

    Returns:
        `[Σ N_b · M_b]`, p[b] row by row.
    """
    itself = y is x
    x, y = _operands("jagged_jagged_bmm_jagged_out", implementation, x=(x, "[Lx, D]"), y=(y, "[Ly, D]"))
    offsets = _plan_offsets(plan, "x", x)
    _check_rows("x", x, "x rows", plan.x_rows)
    _check_rows("y", y, "y rows", plan.y_rows)
    if y.shape[1] != x.shape[1]:
        raise ValueError(f"y must have x's width, {x.shape[1]}, got {y.shape[1]}")
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return jagged_outer_reference(x, y, *offsets[:2])
    if _on_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_gram, triton_jagged_outer

        if itself and plan.y_offsets is plan.x_offsets:
            return triton_jagged_gram(rows_in_place(x), offsets[0], offsets[2], plan.total)
        return triton_jagged_outer(rows_in_place(x), rows_in_place(y), *offsets, plan.total)
    return outer_cpu(x, y, *offsets, plan.total, batch_invariant)


def array_jagged_bmm_jagged_out(p: Tensor, y: Tensor, plan: ScorePlan, *, transposed: bool = False, implementation: str = "auto") -> Tensor:
    """out[b] = p[b] @ y[b]: rows of y weighted by the scores of its segment; transposed, p[b]ᵀ @ y[b] for a y over x's rows.

    Gradients, precision, implementation and errors as in `jagged_dense_bmm`. A row that no scores belong to gives 0.

    Args:
        p: `[Σ N_b · M_b]`, as `jagged_jagged_bmm_jagged_out` gives it. y: `[Ly, D]`, same dtype; `[Lx, D]` if transposed.
        plan: of the offsets of x and y.

    Returns:
        `[Lx, D]`; `[Ly, D]` if transposed.
    """
    check_flag("transposed", transposed)
    p, y = _operands("array_jagged_bmm_jagged_out", implementation, p=(p, "[total]"), y=(y, "[Lx, D]" if transposed else "[Ly, D]"))
    offsets = _plan_offsets(plan, "p", p)
    _check_rows("p", p, "scores", plan.total)
    _check_rows("y", y, *(("x rows", plan.x_rows) if transposed else ("y rows", plan.y_rows)))
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return array_jagged_bmm_reference(p, y, *offsets, transposed)
    out_rows = plan.y_rows if transposed else plan.x_rows
    if _on_kernels(implementation, p):
        from jagged_kernels.matmul.op import triton_array_jagged_bmm

        return triton_array_jagged_bmm(p.contiguous(), rows_in_place(y), *offsets, out_rows, transposed)
    return product_cpu(p, y, *offsets, out_rows, transposed, batch_invariant)


def jagged2_softmax(p: Tensor, plan: ScorePlan, dim: int = -1, *, implementation: str = "auto") -> Tensor:
    """Softmax over each row of every p[b] `[N_b, M_b]`, or over each column.

    First derivatives. Computed in fp32 at least; implementation and errors as in `jagged_dense_bmm`.

    Args:
        p: `[Σ N_b · M_b]`, as `jagged_jagged_bmm_jagged_out` gives it.
        dim: -1, the scores of a row of x add up to 1, or -2, those of a row of y do.

    Returns:
        `[Σ N_b · M_b]`.
    """
    (p,) = _operands("jagged2_softmax", implementation, False, p=(p, "[total]"))
    offsets = _plan_offsets(plan, "p", p)
    _check_rows("p", p, "scores", plan.total)
    if dim not in (-1, -2):
        raise ValueError(f"dim must be -1 (rows) or -2 (columns), got {dim}")
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return jagged2_softmax_reference(p, *offsets, dim)
    if _on_kernels(implementation, p):
        from jagged_kernels.softmax.op import triton_jagged2_softmax

        return triton_jagged2_softmax(p.contiguous(), *offsets, plan.y_rows if dim == -2 else plan.x_rows, dim == -2)
    return softmax_cpu(p, *offsets, dim == -2, batch_invariant)


def jagged_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
    activation: str | None = None,
    *,
    max_seqlen: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """activation(x Wᵀ + b) with weights for all rows, or activation(x[b] @ W[b] + bias[b]) with weights for each segment.

    One weight for all rows is torch's own matrix multiplication. Under `batch_invariant` it is computed as one segment, because the
    algorithm that torch chooses depends on the number of rows. Weights for each segment are
    `jagged_dense_bmm` with bias and activation in the same kernel, rounded once.

    Args:
        x: `[L, D]`, dtypes as in `jagged_dense_bmm`.
        weight: `[T, D]`, as nn.Linear has it, or `[B, D, T]`. bias: `[T]`, or `[B, T]`, or None.
        offsets: `[B + 1]`; weights for all rows do without.
        activation: None, or a function of each result by itself, one of those of `jagged_attention` other than softmax.
        max_seqlen: as in `jagged_dense_bmm`; with weights for each segment.
        implementation: as in `jagged_dense_bmm`, for weights for each segment or under `batch_invariant`; otherwise ignored.

    Returns:
        `[L, T]`.

    Raises:
        TypeError, ValueError, RuntimeError: as `jagged_dense_bmm`; also offsets that are missing.
    """
    if activation is not None and activation not in tuple(POINTWISE):
        raise ValueError(f"activation must be None or one of {tuple(POINTWISE)}, got {activation!r}")
    shared = isinstance(weight, Tensor) and weight.dim() == 2
    named = dict(x=(x, "[L, D]"), weight=(weight, "[T, D]" if shared else "[B, D, T]"))
    named |= {} if bias is None else dict(bias=(bias, "[T]" if shared else "[B, T]"))
    variant = "jagged_linear (one weight)" if shared else "jagged_linear (weight per segment)"
    x, weight, bias = [*_operands(variant, implementation, **named), None][:3]
    function = POINTWISE["identity" if activation is None else activation].function
    batch_invariant = is_batch_invariant(implementation)
    if shared:
        if offsets is not None:
            check_offsets("offsets", offsets, x.shape[0], max_seqlen)
            check_device("offsets", offsets, x.device, "x's")
        if weight.shape[1] != x.shape[1]:
            raise ValueError(f"weight must have shape [T, D] with x's D, {x.shape[1]}, got {list(weight.shape)}")
        if bias is not None and bias.shape[0] != weight.shape[0]:
            raise ValueError(f"bias must have shape [T] = [{weight.shape[0]}], got {list(bias.shape)}")
        if batch_invariant:
            return _fixed_linear(x, weight, bias, activation, implementation)
        return function(nnf.linear(x, weight, bias))
    offsets = checked_offsets("offsets", offsets, x.shape[0], x, "x's", max_seqlen)
    _check_segment_matrices("weight", weight, offsets, x.shape[1])
    if bias is not None and bias.shape != weight.shape[::2]:
        raise ValueError(f"bias must have shape [B, T] = {list(weight.shape[::2])}, got {list(bias.shape)}")
    if implementation != "reference" and _on_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_dense_bmm

        return triton_jagged_dense_bmm(rows_in_place(x), offsets, weight, bias, activation, max_seqlen, batch_invariant)
    dtype = x.dtype
    x, weight = (tensor.to(compute_dtype(tensor)) for tensor in (x, weight))  # so that the sum with the bias is rounded once
    if implementation == "reference":
        out = jagged_dense_bmm_reference(x, weight, offsets)
    else:
        out = _jagged_dense_bmm_cpu(x, weight, offsets, batch_invariant)
    if bias is not None:
        out = out + bias.to(out.dtype).index_select(0, rows_and_segments(offsets, x.shape[0])[1])
    if batch_invariant and activation is not None:
        return pointwise_rows_cpu(out, activation).to(dtype)
    return function(out).to(dtype)


def _fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, implementation: str) -> Tensor:
    """activation(x Wᵀ + b), weight `[T, D]`; no row of the result depends on the other rows of x."""
    if _on_kernels(implementation, x):
        from jagged_kernels.matmul.op import triton_jagged_dense_bmm

        offsets, bias = torch.arange(2, device=x.device) * x.shape[0], None if bias is None else bias[None]
        return triton_jagged_dense_bmm(rows_in_place(x), offsets, weight.mT[None], bias, activation, None, True)
    dtype = x.dtype
    x, weight = (tensor.to(compute_dtype(tensor)) for tensor in (x, weight))
    out = products_cpu(weight, x[:, :, None]).squeeze(2)
    out = out if bias is None else out + bias.to(out.dtype)
    return (out if activation is None else pointwise_rows_cpu(out, activation)).to(dtype)


def jagged_layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """torch.nn.functional.layer_norm of each row of x `[L, D]` by itself, with HSTU's eps: rows need no offsets.

    Args:
        weight, bias: `[D]`, or None.

    Raises:
        TypeError, ValueError: x is not a floating-point tensor `[L, D]`; weight or bias is not `[D]` of x's dtype on x's device.
    """
    check_tensor("x", x, 2, "[L, D]", "jagged_layer_norm")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_tensor(name, tensor, 1, "[D]", "jagged_layer_norm")
            if tensor.shape[0] != x.shape[1]:
                raise ValueError(f"{name} must have shape [D] = [{x.shape[1]}], got {list(tensor.shape)}")
            if tensor.device != x.device:
                raise ValueError(f"{name} must be on x's device, {x.device}, got {tensor.device}")
            if autocast_dtype(tensor) != autocast_dtype(x):
                raise ValueError(f"{name} must have x's dtype, {x.dtype}, got {tensor.dtype}")
    return layer_norm_rows(x, weight, bias, eps)


def layer_norm_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`jagged_layer_norm` without checks, of x `[..., D]`."""
    if x.device.type != "cpu":
        return nnf.layer_norm(x, x.shape[-1:], weight, bias, eps)
    # torch would sum the gradients of weight and bias in x's dtype: in bf16 a sum of ones stops at 256
    wide = [None if tensor is None else tensor.to(compute_dtype(tensor)) for tensor in (x, weight, bias)]
    return nnf.layer_norm(wide[0], x.shape[-1:], *wide[1:], eps).to(x.dtype)


def _jagged_dense_bmm_cpu(x: Tensor, y: Tensor, offsets: Tensor, batch_invariant: bool) -> Tensor:
    matrices = _matrix_offsets(offsets, x.shape[1])
    return product_cpu(x.flatten(), y.flatten(0, 1), offsets, *matrices, x.shape[0], False, batch_invariant)


def _matrix_offsets(offsets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Offsets of B times `width` rows, and of jagged rows of that width in a flat buffer."""
    return torch.arange(offsets.shape[0], device=offsets.device) * width, offsets.long() * width


def _operands(function: str, implementation: str, cast: bool = True, **named: tuple[Tensor, str]) -> list[Tensor]:
    """The function's named tensors after checks of type, dtype and shape; in autocast's dtype if `cast`."""
    for name, (x, shape) in named.items():
        check_tensor(name, x, shape.count(",") + 1, shape, function, implementation)
        check_implementation(implementation, IMPLEMENTATIONS, x.device)
    (first, *others), tensors = named, [autocast(x) if cast else x for x, _ in named.values()]
    for name, x in zip(others, tensors[1:]):
        if x.dtype != tensors[0].dtype:
            raise ValueError(f"{name} must have {first}'s dtype, {tensors[0].dtype}, got {x.dtype}")
        if x.device != tensors[0].device:
            raise ValueError(f"{name} must be on {first}'s device, {tensors[0].device}, got {x.device}")
    return tensors


def _on_kernels(implementation: str, x: Tensor) -> bool:
    refuse_transforms("the jagged operators do")
    return uses_kernels(x.device, implementation)


def _plan_offsets(plan: ScorePlan, name: str, x: Tensor) -> list[Tensor]:
    """The plan's offsets on the device of the argument x, called `name`."""
    if not isinstance(plan, ScorePlan):
        raise TypeError(f"plan must be a ScorePlan, got {type(plan).__name__}")
    check_device("plan", plan.p_offsets, x.device, f"{name}'s")
    return [offsets.to(x.device, non_blocking=True) for offsets in plan.offsets]


def _check_rows(name: str, x: Tensor, what: str, rows: int) -> None:
    if x.shape[0] != rows:
        raise ValueError(f"{name} must have one entry for each of the plan's {rows} {what}, got {x.shape[0]}")


def _check_segment_matrices(name: str, x: Tensor, offsets: Tensor, width: int) -> None:
    expected = offsets.shape[0] - 1, width
    if x.shape[:2] != expected:
        raise ValueError(f"{name} must have shape [B, D, T] with B, D = {list(expected)}, got {list(x.shape)}")
