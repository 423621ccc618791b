"""What layers share that run as one autograd node: when they may, and the GEMMs of a node.

A layer's forward is otherwise a chain of modules: each call costs host time, each result is saved
for the backward, and autocast casts activations and parameters between them. A node computes the
same from the parameters of these modules, casts each of them once, and saves only what its backward
cannot cheaply compute again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jagged_kernels.rows.configs import BIAS_COLUMNS
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..dtypes import autocast_dtype, dtypes_of
from ..functional.nodes import release
from ..functional.tail import cleared, runs_kernels
from ..scalars import rounded_size
from ..settings import is_batch_invariant
from ..tracing import as_constant, is_exporting, is_recording
from ..validation import runs_transforms

MANY = 2**22  # elements of rows, from which a GEMM sums a bias's gradient faster than torch


def may_be_one_node(x: Tensor, *modules: nn.Module, on_cpu: bool = False) -> bool:
    """Whether a layer may compute these modules from their parameters instead of calling them: if
    nothing but the modules' own forward would run.

    A module that was replaced (LoRA, quantised weights), is parametrised or has hooks is called.
    Exported graphs have the modules' operators, which other passes know.

    Args:
        on_cpu: the node also runs on the CPU, but not where what is computed is recorded.
    """
    if not (x.is_cuda or (on_cpu and x.is_cpu and not is_recorded())):
        return False
    if is_exporting() or is_batch_invariant() or has_global_hooks():
        return False
    return all(map(_is_plain, modules))


def is_recorded() -> bool:
    """Whether a graph is made of the calls, or a mode sees them."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())  # pyright: ignore[reportPrivateUsage]


def _is_plain(module: nn.Module) -> bool:
    if not type(module).__module__.startswith(("torch.nn.modules.", "jagged_modules.")):
        return False  # parametrised, quantised or a user's
    own: Any = module  # torch has no public name for these
    for x in own._parameters.values():
        if not (x is None or type(x) is nn.Parameter or type(x) is Tensor):
            return False
    if "weight" in vars(module) or "bias" in vars(module):
        return False  # a tensor took a parameter's place
    return not has_call_of_its_own(module)


def has_call_of_its_own(module: nn.Module) -> bool:
    """Whether a call does more than the forward of the module's class: hooks, or a forward that was
    set on the module itself."""
    own: Any = module  # torch has no public names for these
    hooks = own._forward_hooks or own._forward_pre_hooks
    return bool(hooks or own._backward_hooks or own._backward_pre_hooks or "forward" in vars(own))


def parameters_of(*modules: nn.Module) -> list[Any]:
    """The modules' own weights and biases; None for one that is registered as None.
    `module.parameters()` takes ten times longer, and an attribute of a module longer than one of
    other objects. By name: in a module whose weight was pruned or parametrised once, the bias comes
    first."""
    owners: Any = modules
    names = "weight", "bias"
    return [x[name] for owner in owners for x in [owner._parameters] for name in names if name in x]


def has_global_hooks() -> bool:
    of_all: Any = torch_module
    forward = of_all._global_forward_hooks or of_all._global_forward_pre_hooks
    return bool(forward or of_all._global_backward_hooks or of_all._global_backward_pre_hooks)


def cast(dtype: torch.dtype, *parameters: Tensor) -> Sequence[Tensor]:
    """The parameters in the operands' dtype: copies by few launches."""
    if all([x.dtype == dtype for x in parameters]):
        return parameters
    copies = [torch.empty_like(x, dtype=dtype) for x in parameters]
    torch._foreach_copy_(copies, list(parameters))  # pyright: ignore - torch exports it under no other name
    return copies


def in_training(layer: nn.Module, probability: float) -> float:
    """The probability of dropout of a layer, or of an nn.Dropout: 0 outside of training."""
    return as_constant(probability) if layer.training else 0


def dropped(x: Tensor, probability: float) -> tuple[Tensor, Tensor | None]:
    """Dropout, and what it keeps; None for a probability of 0."""
    return torch.native_dropout(x, probability, True) if probability else (x, None)


def dropout_gradient(dx: Tensor, kept: Tensor | None, probability: float) -> Tensor:
    """The gradient of the input of `dropped`."""
    if kept is None:
        return dx
    scale = dropout_scale(kept, probability)
    return torch.ops.aten.native_dropout_backward(dx, kept, scale)


def dropout_scale(kept: Tensor | None, probability: float) -> float:
    """The factor of what `dropped` keeps."""
    if kept is None:
        return 1.0
    return 0.0 if probability == 1 else 1 / (1 - probability)


def bias_columns(x: Tensor, dtype: torch.dtype) -> int:
    """Columns behind the rows of x, copied to this dtype, that give a bias's gradient: sums in
    16-bit GEMMs are as exact as in fp32, which tf32 is not. Few rows have none: taking the
    columns out again would cost the host more than a sum."""
    return BIAS_COLUMNS if dtype.itemsize == 2 and _has_many(x) else 0


def _has_many(x: Tensor) -> bool:
    """Whether x has MANY elements. A graph, which does not know its size, assumes so."""
    return torch.compiler.is_compiling() or x.numel() >= MANY


def rounded_rows(x: Tensor, end: Tensor | None, dtype: torch.dtype) -> int:
    """The number of rows for the copy of x that `gemm_rows` makes on a GPU: x's own, rounded up, so
    that cuBLAS sees few. x's own if nothing is copied, or while a graph is recorded."""
    is_copied = end is not None or x.dtype != dtype
    if not is_copied or is_recording(x.device):
        return x.shape[0]
    # GEMMs of many rows take longer than cuBLAS's choices for more numbers of rows.
    return rounded_size(x.shape[0], 64 if x.numel() >= MANY else 16)


def gemm_rows(
    x: Tensor,
    end: Tensor | None,
    dtype: torch.dtype,
    num_rows: int | None = None,
    has_columns: bool = True,
) -> Tensor:
    """x `[L, K]` in the dtype of a GEMM, cleared behind the end. On a GPU, a copy has more rows, of
    0, and in 16 bits `BIAS_COLUMNS` more columns, of 1, 0, 0, ...: `linear` skips them, and
    `linear_gradients` takes the bias's gradient from them.

    Args:
        num_rows: of such a copy; None: L.
        has_columns: whether it has the columns.
    """
    if end is None and x.dtype == dtype:
        return x
    if not x.is_cuda or x.dim() != 2:
        return cleared(x, end, dtype)
    extra = bias_columns(x, dtype) if has_columns else 0
    if runs_kernels(x):
        from jagged_kernels.rows.copies import copied_rows

        return copied_rows(x, end, dtype, num_rows or x.shape[0], extra)
    x = cleared(x, end, dtype)
    if not extra:
        return x
    return torch.cat([x, x.new_ones(x.shape[0], 1), x.new_zeros(x.shape[0], extra - 1)], 1)


def rounded_gemm_rows(x: Tensor, end: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`gemm_rows` with as many rows as `rounded_rows` says."""
    return gemm_rows(x, end, dtype, rounded_rows(x, end, dtype))


def rows_for_attention(x: Tensor, num_rows: int, end: Tensor | None) -> Tensor:
    """The projected rows x. Without an end, those that `gemm_rows` added are cut off; with one,
    attention skips them."""
    return first_rows(x, num_rows) if end is None else x


def first_rows(x: Tensor, num_rows: int) -> Tensor:
    """The first rows of x. Itself if it has no others, as always in a graph: a view costs the host
    more than the comparison."""
    return x if x.shape[0] == num_rows else x[:num_rows]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x `[L, K]` @ weightᵀ + bias, all of one dtype. More columns of x are not read."""
    if x.shape[1] > weight.shape[1]:
        x = x[:, : weight.shape[1]]
    return nn.functional.linear(x, weight, bias)


def product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ y of matrices, in this dtype; in fp32 on a GPU without a rounding to the operands' in
    between. torch.mm takes the host half of the time of `@`."""
    if x.dtype == dtype:
        return torch.mm(x, y)
    if dtype == torch.float32 and x.is_cuda:
        return torch.mm(x, y, out_dtype=dtype)
    return torch.mm(x, y).to(dtype)


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the rows of dy, in fp32. On a GPU a GEMM of 16 bits takes it of many rows up to
    three times faster than torch's sum, and as exactly."""
    if dy.is_cuda and dy.dtype.itemsize == 2 and _has_many(dy):
        ones = dy.new_ones(dy.shape[0], 8)  # rows of 16 bytes
        return torch.mm(ones.t(), dy, out_dtype=torch.float32)[0].to(dtype)
    wide = torch.float32 if dy.dtype.itemsize == 2 else dy.dtype
    total = dy.sum(0, dtype=wide)
    return total if wide == dtype else total.to(dtype)


# of x, weight and bias of a `linear`; None where none is wanted
LinearGradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def linear_gradients(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    wanted: Sequence[bool],
    x_dtype: torch.dtype,
    dtype: torch.dtype,
    frees_x: bool = False,
    num_rows: int | None = None,
    sums: Tensor | None = None,
) -> LinearGradients:
    """Of x, in x_dtype, and of weight and bias, in dtype. wanted: which of the three. frees_x: the
    node has made x and reads it no more. x may have the columns and the rows of `gemm_rows`, dy
    such rows too; x is None if no gradient of the weight is wanted. num_rows: of the gradient of x;
    None: as many as dy has. sums: of the rows of dy, if they are known."""
    dweight, dbias, width = None, None if sums is None else sums.to(dtype), weight.shape[1]
    if x is not None:
        if x.shape[0] > dy.shape[0]:
            x = x[: dy.shape[0]]
        if wanted[1]:
            dweight = product(dy.t(), x, dtype)
        if dweight is not None and x.shape[1] > width:
            # Views: where autograd keeps a gradient, it copies them, and where it adds them to one
            # that is there, it need not.
            dweight, dbias = dweight[:, :width], dweight[:, width]
        if frees_x or x.dtype != x_dtype:  # then x is a copy of the node's input
            release(x)
    dx = product(dy, weight, x_dtype) if wanted[0] else None
    if dx is not None and num_rows is not None:
        dx = first_rows(dx, num_rows)
    if wanted[2] and dbias is None:
        dbias = bias_gradient(dy, dtype)
    return dx, dweight, dbias if wanted[2] else None


def node_dtype(
    x: Tensor, linears: Sequence[nn.Module], *others: nn.Module, on_cpu: bool = False
) -> torch.dtype | None:
    """The dtype of a node's GEMMs; None if the modules are called instead: see `may_be_one_node`.
    Each of `linears` must be an nn.Linear with a bias. After autocast's casts, x and all their
    parameters must have one dtype, which jagged_attention takes."""
    if not may_be_one_node(x, *linears, *others, on_cpu=on_cpu) or runs_transforms():
        return None
    # Lists here, and in `cast`: a generator costs the host a call for each element.
    if any([type(module) is not nn.Linear for module in linears]):
        return None
    parameters = parameters_of(*linears)
    if any([parameter is None for parameter in parameters]):
        return None
    dtype, dtypes = autocast_dtype(x), {parameter.dtype for parameter in parameters}
    if len(dtypes) != 1 or (x.dtype not in dtypes and autocast_dtype(parameters[0]) != dtype):
        return None
    return dtype if dtype in dtypes_of("jagged_attention", x.device) else None


def cast_linears(x: Tensor, *linears: nn.Module) -> Sequence[Callable[[Tensor], Tensor]]:
    """Linear layers of rows x outside of a node, as functions. Without gradients, autocast would
    cast each weight and each bias by itself: where a node might compute the layers, all are cast
    together."""
    dtype = None if torch.is_grad_enabled() else node_dtype(x, linears, on_cpu=True)
    parameters = parameters_of(*linears)
    if dtype is None or parameters[0].dtype == dtype:
        return linears
    tensors = iter(cast(dtype, *parameters))
    return [functools.partial(_linear_in, dtype, *pair) for pair in zip(tensors, tensors)]


def _linear_in(dtype: torch.dtype, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return nn.functional.linear(x.to(dtype), weight, bias)
