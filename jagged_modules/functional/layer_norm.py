"""Layer norm of rows."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as nnf

from ..cpu.buckets import compute_dtype
from ..dtypes import autocast_dtype
from ..scalars import check_equal, check_number, check_shape
from ..validation import check_tensor


def jagged_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """torch.nn.functional.layer_norm of each row of x, with HSTU's eps as default. Rows are
    independent, so it takes no offsets.

    Args:
        x: `[L, D]` fp64, fp32, fp16 or bf16.
        weight, bias: `[D]` of x's dtype, or None.
        eps: added to the variance.

    Returns:
        `[L, D]`.

    Raises:
        TypeError, ValueError: x is not a floating-point tensor `[L, D]`; weight or bias is not
            `[D]` of x's dtype on x's device; eps is not a number, or negative.
    """
    check_tensor("x", x, 2, "[L, D]", "jagged_layer_norm")
    check_number("eps", eps, low=0)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_tensor(name, tensor, 1, "[D]", "jagged_layer_norm")
            check_shape(name, tensor, "[D]", x.shape[1])
            check_equal(name, "be on x's device", x.device, tensor.device)
            if autocast_dtype(tensor) != autocast_dtype(x):
                raise ValueError(f"{name} must have x's dtype, {x.dtype}, got {tensor.dtype}")
    return layer_norm_rows(x, weight, bias, eps)


def layer_norm_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`jagged_layer_norm` of x `[..., D]`, without checks."""
    if x.device.type != "cpu":
        return nnf.layer_norm(x, x.shape[-1:], weight, bias, eps)
    # torch would sum the gradients of weight and bias in x's dtype. In bf16, a sum of ones stops
    # growing at 256.
    weight, bias = (
        None if tensor is None else tensor.to(compute_dtype(tensor)) for tensor in (weight, bias)
    )
    return nnf.layer_norm(x.to(compute_dtype(x)), x.shape[-1:], weight, bias, eps).to(x.dtype)
