"""JaggedMLP: a multi-layer perceptron on the rows of any container."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.types import Device

from ..activations import POINTWISE, activation_of_rows
from ..containers.jagged import C, wrap_rows
from ..functional.tail import entering, leaving
from ..scalars import check_choice, check_kind, check_size
from .invariant import fixed_module
from .mlp_node import mlp_node
from .one_node import node_dtype
from .parameters import Layer


class JaggedMLP(Layer):
    """Linear layers, each followed by an activation, the last one too, as in TorchRec's MLP.

    All rows use the same weights, and segments do not affect the result. Append an nn.Linear if the
    output must not end with an activation.

    With "swiglu" (Shazeer 2020) each linear layer has twice as many outputs, [a | b], and the
    activation is silu(a) · b.

    Args:
        dims: width of the input rows, then of each layer's output: two sizes or more.
        activation: an activation of `functional.jagged_attention` except softmax, or "swiglu".
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.

    Raises:
        TypeError, ValueError: dims are not positive integers, or fewer than two; the activation is
            unknown.

    Example::

        mlp = jm.JaggedMLP([32, 64, 16])
        values, offsets = mlp((torch.randn(5, 32), torch.tensor([0, 2, 5])))  # values [5, 16]
    """

    _shown = ("activation",)

    def __init__(
        self,
        dims: Sequence[int],
        activation: str = "relu",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        if isinstance(dims, str):
            raise TypeError("dims must be a sequence of ints, got str")
        check_kind("dims", dims, Sequence, "a sequence of ints")
        if len(dims) < 2:
            raise ValueError(f"dims must be two sizes or more, got {list(dims)}")
        for i, size in enumerate(dims):
            check_size(f"dims[{i}]", size)
        check_choice("activation", activation, (*POINTWISE, "swiglu"))
        self.dims, self.activation = list(dims), activation
        parts = 2 if activation == "swiglu" else 1
        self.layers = nn.ModuleList(
            nn.Linear(width, parts * out, device=device, dtype=dtype)
            for width, out in zip(dims, dims[1:])
        )

    @fixed_module
    def forward(self, x: C) -> C:
        """Apply the layers to each row.

        Args:
            x: any container of `[L, dims[0]]` values.

        Returns:
            x's kind of container, with `[L, dims[-1]]` values in the dtype of the parameters.

        Raises:
            TypeError, ValueError: x has another type, shape, dtype or device.
        """
        jagged = wrap_rows("x", x, self.dims[0], self.layers[0], "jagged_linear (one weight)")
        end, dtype = jagged.end("x"), node_dtype(jagged.values, list(self.layers))
        if dtype is not None:
            return jagged.unwrap(mlp_node(self, jagged.values, end, dtype))
        values = entering(jagged.values, end)
        activation = activation_of_rows(self.activation)
        # call the module, because the caller may have replaced a Linear (LoRA, quantisation)
        for layer in self.layers:
            values = activation(layer(values))
        return jagged.unwrap(leaving(values, end))
