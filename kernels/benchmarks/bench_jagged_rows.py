"""Conversions between jagged and padded rows, and arithmetic with padded rows, against torch and
FBGEMM.

    python kernels/benchmarks/bench_jagged_rows.py
    python kernels/benchmarks/bench_jagged_rows.py --only "jagged_dense"
    python kernels/benchmarks/bench_jagged_rows.py --tiny --device cpu

torch gathers and scatters with indices that were built beforehand. GB count each row once that is
read or written, in the backward too. The floor is the time of these bytes on an H200. Speed-ups are
over torch.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from functools import partial

import torch
from inputs import ATTAINABLE, leaves, offsets_of, random_tensors, uniform_lengths
from names import OURS
from runner import Case, Implementation, Setup, device_name, main
from torch import Tensor

import jagged_modules as jm
from jagged_modules import functional as F

TORCH, FBGEMM = "torch", "FBGEMM"


@dataclasses.dataclass(frozen=True)
class Operator:
    """Args:
    inputs: of x `[L, D]` and y `[B, N, D]`.
    ours: ``ours(*inputs, offsets, L, N)``.
    torch: ``torch(*inputs, index, [B, N])``, index: each row's place in y's flattened rows.
    fbgemm: ``fbgemm(operators, *inputs, offsets, L, N)``.
    forward, backward: jagged rows that are read and written; padded rows are once, where they are
        a result.
    """

    inputs: str
    ours: Callable[..., Tensor]
    torch: Callable[..., Tensor]
    fbgemm: Callable[..., Tensor]
    forward: int
    backward: int


def scattered(x: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    flat = x.new_zeros(shape[0] * shape[1], x.shape[1])
    return flat.index_copy(0, index, x).unflatten(0, shape)


def gathered(y: Tensor, index: Tensor) -> Tensor:
    return y.flatten(0, 1).index_select(0, index)


OPERATORS = {
    "jagged_to_padded": Operator(
        "x",
        lambda x, offsets, rows, longest: F.jagged_to_padded(x, offsets, longest),
        scattered,
        lambda ops, x, offsets, rows, longest: ops.jagged_to_padded_dense(x, [offsets], [longest]),
        forward=1,
        backward=2,
    ),
    "padded_to_jagged": Operator(
        "y",
        lambda y, offsets, rows, longest: F.padded_to_jagged(y, offsets, rows),
        lambda y, index, shape: gathered(y, index),
        lambda ops, y, offsets, rows, longest: ops.dense_to_jagged(y, [offsets], rows)[0],
        forward=2,
        backward=1,
    ),
    "jagged_dense_add": Operator(
        "xy",
        lambda x, y, offsets, rows, longest: F.jagged_dense_add(x, y, offsets),
        lambda x, y, index, shape: x + gathered(y, index),
        lambda ops, x, y, offsets, rows, longest: ops.jagged_dense_elementwise_add_jagged_output(
            x, [offsets], y
        )[0],
        forward=3,
        backward=1,  # x's gradient is that of the result
    ),
    "jagged_dense_mul": Operator(
        "xy",
        lambda x, y, offsets, rows, longest: F.jagged_dense_mul(x, y, offsets),
        lambda x, y, index, shape: x * gathered(y, index),
        lambda ops, x, y, offsets, rows, longest: ops.jagged_dense_elementwise_mul(x, [offsets], y)[
            0
        ],
        forward=3,
        backward=4,
    ),
}


class Problem:
    """Inputs of an operator in one shape, and implementations of it."""

    def __init__(self, device: str, operator: str, batch: int, longest: int, width: int):
        self.operator, self.device = OPERATORS[operator], device
        lengths = uniform_lengths(batch, 1, longest)
        self.rows, self.shape = int(lengths.sum()), (batch, longest)
        segment = torch.arange(batch).repeat_interleave(lengths)
        place = torch.arange(self.rows) - offsets_of(lengths)[segment]
        self.offsets = offsets_of(lengths).to(device)
        self.index = (segment * longest + place).to(device)
        x, y, *grads = random_tensors(
            device, torch.float32, *2 * [(self.rows, width), (*self.shape, width)]
        )
        # the functions know by this that there are no rows behind the last segment
        jm.Jagged(x, self.offsets, host_lengths=lengths)
        given = dict(x=x, y=y)
        self.inputs = leaves(**{name: given[name] for name in self.operator.inputs})
        self.grad = grads["y" not in self.operator.inputs]

    def implementation(self, call: Callable[..., Tensor], *others: object) -> Implementation:
        # the gradient too is kept: it is that of x in a sum
        return Implementation(
            lambda: call(*self.inputs.values(), *others),
            self.inputs | {"grad": self.grad},
            lambda name, x: {"all": x},
            self.grad,
        )

    def by_fbgemm(self) -> Implementation:
        importlib.import_module("fbgemm_gpu")
        sizes = self.offsets.long(), self.rows, self.shape[1]
        return self.implementation(partial(self.operator.fbgemm, torch.ops.fbgemm), *sizes)

    def setup(self) -> Setup:
        operator, sizes = self.operator, (self.offsets, self.rows, self.shape[1])
        row, padded = self.grad.shape[-1] * self.grad.itemsize, self.shape[0] * self.shape[1]
        is_padded = "y" not in operator.inputs
        return Setup(
            {
                OURS: lambda: self.implementation(operator.ours, *sizes),
                TORCH: lambda: self.implementation(operator.torch, self.index, self.shape),
                FBGEMM: self.by_fbgemm,
            },
            self.reference,
            torch.float32,
            bytes=row * (operator.forward * self.rows + is_padded * padded),
            backward_bytes=row * (operator.backward * self.rows + (not is_padded) * padded),
            attainable=ATTAINABLE.get(device_name(self.device)),
            baseline=TORCH,
        )

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in self.inputs.values()]
        out = self.operator.torch(*inputs, self.index, self.shape)
        gradients = torch.autograd.grad(out, inputs, self.grad.to(dtype))
        results = {"out": out.detach()} | {f"d{x}": g for x, g in zip(self.inputs, gradients)}
        return {f"{name}/all": x for name, x in results.items()}


# B, N, D
FULL = ((1024, 100, 64), (1024, 200, 256))
CPU, TINY = ((64, 100, 64),), ((6, 5, 8),)


def make_cases(device: str, tiny: bool) -> list[Case]:
    """fp32, on the CPU smaller shapes. ``tiny``: everything, small."""
    return [
        Case(
            "jagged and padded rows",
            f"{name} B{batch} N≤{longest} D{width}",
            lambda name=name, sizes=(batch, longest, width): Problem(device, name, *sizes).setup(),
            picture="ms",
        )
        for name in OPERATORS
        for batch, longest, width in (TINY if tiny else FULL if device == "cuda" else CPU)
    ]


if __name__ == "__main__":
    sys.exit(main("jagged_rows", make_cases))
