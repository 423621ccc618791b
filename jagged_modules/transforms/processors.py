"""What work costs on a CPU and on a GPU, in bytes that the processor copies in the same time.

Elements of some operators cost more than their bytes: a CPU computes exp in several steps, and
torch's masked_fill and where take one element at a time there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class Processor:
    """What work costs, in bytes that the processor reads or writes in the same time.

    Attributes:
        flops_16_bit, flops: FLOPs per byte of operators on elements of 16 bits, and on others.
        kernel: bytes in the time of an operator, however small.
        view: bytes in the time of a view.
        element: bytes per element that is copied by itself, as torch's index_select, gather and cat
            do on CUDA unless slices are vectors.
        cache: bytes that an operator reads and writes at this rate. More come from memory, which
            takes twice the time.
        vector: bytes of the columns of a GEMM that are computed together, however few are needed.
        wave: elements of a float32 GEMM that all units compute at once, and less in the same time.
        score: bytes per score of attention.
        elements: more bytes per element of the largest operand, of operators that compute more than
            they read and write.
    """

    flops: float
    flops_16_bit: float
    kernel: float
    view: float
    element: float
    cache: float = math.inf
    vector: int = 1
    wave: int = 0
    score: float = 0
    elements: Mapping[Any, float] = field(default_factory=dict)


# measured of fp32 [4000, 64] and [80000, 64], less the bytes that the operator reads and writes
OF_CPU = {
    200: "var.correction std.correction var_mean.correction",
    100: "where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Scalar"
        " masked_fill.Tensor index.Tensor",  # by several indices
    45: "max.dim min.dim",
    30: "embedding_bag.padding_idx elu.default softplus.default atan2.default log1p.default",
    20: "tanh.default softmax.int _softmax.default layer_norm.default rms_norm.default",
    10: "exp.default log.default gelu.default sigmoid.default silu.default _to_copy.default"
        " eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar eq.Tensor ne.Tensor lt.Tensor"
        " le.Tensor gt.Tensor ge.Tensor",
}  # fmt: skip
_ELEMENTS = {
    getattr(getattr(aten, name.split(".")[0]), name.split(".")[1]): cost
    for cost, names in OF_CPU.items()
    for name in names.split()
}
# CPU, one thread of an Intel Xeon with AVX-512: 165 GFLOP/s of a GEMM whose columns fill vectors,
# also of few rows or of a batch, less the time of its bytes; 25 GB/s of a copy of 12 MB, 13 of 80.
# An AMD EPYC has 75 GFLOP/s and 20 GB/s. In eager models, a call of a small operator takes 10 µs,
# with all that Python does for it, a view 2. A softmax of 4 or 11 elements takes 19 ns for each.
# Attention writes the scores, and reads and writes them in a softmax.
# GPU, one H200: 722 TFLOP/s of a bf16 GEMM, 67 of fp32, 4.24 TB/s of a copy, 2 µs a small kernel in
# a CUDA graph. Element by element, index_select copied 8.4 million elements in 40 µs and cat 11.2
# million in 34 µs: 3.8 ps each. A fp32 GEMM has tiles of 128 by 128, one for each of 132 units.
CPU = Processor(
    6.5, 6.5, kernel=2.5e5, view=5e4, element=0, cache=16e6, vector=64, score=36,
    elements=_ELEMENTS,
)  # fmt: skip
GPU = Processor(flops=16, flops_16_bit=170, kernel=8e6, view=0, element=16, wave=132 * 128 * 128)
