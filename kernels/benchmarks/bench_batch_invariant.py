"""The cost of `jm.batch_invariant(True)`: each case runs with and without it.

Cases are the first of each table of the other benchmarks, the first of each jagged operator, and a
layer's projection, which is torch's own matrix multiplication by default.

    python kernels/benchmarks/bench_batch_invariant.py                        # on a CUDA device
    python kernels/benchmarks/bench_batch_invariant.py --only "attention"     # some of the tables
    python kernels/benchmarks/bench_batch_invariant.py --tiny --device cpu

Speed-ups are over the default.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial

import bench_attention
import bench_block_attention
import bench_gdpa
import bench_jagged_ops
import bench_linear_compress
import torch
from inputs import leaves, random_tensors
from names import INVARIANT, OURS
from runner import Case, Implementation, Setup, main

import jagged_modules as jm
from jagged_modules import functional as F

BENCHMARKS = (
    bench_attention,
    bench_gdpa,
    bench_block_attention,
    bench_jagged_ops,
    bench_linear_compress,
)


def invariant(build: Callable[[], Implementation]) -> Implementation:
    """The implementation, built and run under batch_invariant: schedules are built for the mode."""
    with jm.batch_invariant(True):
        return dataclasses.replace(build(), around=partial(jm.batch_invariant, True))


def in_both_modes(case: Case) -> Case:
    def setup() -> Setup:
        made = case.setup()
        build = made.implementations[OURS]
        return dataclasses.replace(
            made, implementations={OURS: build, INVARIANT: partial(invariant, build)}, baseline=OURS
        )

    return dataclasses.replace(case, setup=setup, picture="")


def projection(device: str, rows: int, width: int, columns: int) -> Setup:
    """`[rows, width]` times the weight `[columns, width]` of a layer."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, weight, grad = random_tensors(
        device, dtype, (rows, width), (columns, width), (rows, columns)
    )
    inputs = leaves(x=x, weight=weight)

    def build() -> Implementation:
        return Implementation(
            lambda: F.jagged_linear(**inputs), inputs, lambda name, x: {"all": x}, grad
        )

    def reference(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        x, weight, g = (tensor.detach().to(dtype) for tensor in (*inputs.values(), grad))
        return {"out/all": x @ weight.mT, "dx/all": g @ weight, "dweight/all": g.mT @ x}

    flops = 2 * rows * width * columns
    return Setup({OURS: build}, reference, dtype, flops=flops, backward_flops=2 * flops)


def make_cases(device: str, tiny: bool) -> list[Case]:
    """The first cases of the other benchmarks, with their shapes and dtypes, and a projection."""
    first = {}
    for benchmark in BENCHMARKS:
        for case in benchmark.make_cases(device, tiny):
            if case.timed:
                first.setdefault(
                    (case.table, case.name.split()[0] if benchmark is bench_jagged_ops else ""),
                    case,
                )
    sizes = (64, 16, 24) if tiny else (65536 if device == "cuda" else 4096, 256, 768)
    linear = Case("projections", "L{} D{} T{}".format(*sizes), partial(projection, device, *sizes))
    return [in_both_modes(case) for case in (*first.values(), linear)]


if __name__ == "__main__":
    sys.exit(main("batch_invariant", make_cases))
