"""The error that a correct program may make, derived from each computation. All tests use this one
rule.

    actual, do = accuracy.results(operator, dict(q=q, k=k, v=v))
    accuracy.assert_accurate(actual, accuracy.attention(q, k, v, do, q_offsets, kv_offsets,
    activation="silu"))

`accuracy.check` does both. `accuracy.definition` gives bounds for functions that have no model
here.
"""

from . import rows
from .arithmetic import KERNELS, TORCH_CPU, Arithmetic
from .attention import attention, block_attention
from .bound import Bound, assert_accurate, check, compare, equal_terms, results
from .definition import definition
from .jagged_ops import (
    array_jagged_bmm,
    jagged2_softmax,
    jagged_dense_bmm,
    jagged_gram,
    jagged_jagged_bmm,
    jagged_outer,
    jagged_softmax,
    jagged_sum,
)
from .linear_compress import linear_compress, torch_matmul

__all__ = [
    "KERNELS",
    "TORCH_CPU",
    "Arithmetic",
    "Bound",
    "array_jagged_bmm",
    "assert_accurate",
    "attention",
    "block_attention",
    "check",
    "compare",
    "definition",
    "equal_terms",
    "jagged2_softmax",
    "jagged_dense_bmm",
    "jagged_gram",
    "jagged_jagged_bmm",
    "jagged_outer",
    "jagged_softmax",
    "jagged_sum",
    "linear_compress",
    "results",
    "rows",
    "torch_matmul",
]
