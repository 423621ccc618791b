"""The small kernels of RelativeBias compile for the GPU generations that we support."""

import pytest
from marks import diagonal_first, slow_after

pytest.importorskip("triton")

from jagged_kernels.attention.bias_kernels import (
    bias_tables_kernel,
    stored_buckets_kernel,
    sum_tables_kernel,
)
from jagged_kernels.attention.params import BiasKind

from .ahead_of_time import BIASES, bias_types, compile_for

CAPABILITIES = [80, 90, 100]
KINDS = BIASES | {"time": BiasKind(position=False, boundaries=128, query_times=False, shift=False)}


TABLES = [("both", 128, True), ("time", 0, True), ("all", 300, False), ("position", 0, False)]
SUMS = [("both", 129, 128), ("both", 256, 1), ("time", 129, 128), ("position", 1, 1)]


@slow_after(4, "kind, num_boundaries, entries, capability", diagonal_first(TABLES, CAPABILITIES))
def test_bias_tables_kernel_compiles(capability, kind, num_boundaries, entries):
    def type_of(arg):
        types = dict(
            position_ptr="*fp32",
            time_ptr="*fp32",
            q_offsets_ptr="*i32",
            kv_offsets_ptr="*i32",
            inverse_scale="fp32",
        )
        return types.get(arg, bias_types(arg, KINDS[kind], scratch=False, entries=entries))

    constants = dict(BITS=num_boundaries.bit_length(), KIND=KINDS[kind])
    constants |= {"time": dict(position_ptr=None), "position": dict(time_ptr=None)}.get(kind, {})
    constants |= {} if entries else dict(q_offsets_ptr=None, kv_offsets_ptr=None)
    assert compile_for(
        capability, bias_tables_kernel, constants, type_of, aligned=(), num_warps=8
    ).asm["cubin"]


@slow_after(2, "kind, capability", diagonal_first(["both", "time", "all"], CAPABILITIES))
def test_stored_buckets_kernel_compiles(capability, kind):
    def type_of(arg):
        types = dict(
            q_offsets_ptr="*i32", kv_offsets_ptr="*i64", first_blocks_ptr="*i32", buckets_ptr="*u8"
        )
        return types.get(arg, bias_types(arg, KINDS[kind], scratch=False, entries=False))

    constants = dict(KIND=KINDS[kind])
    assert compile_for(capability, stored_buckets_kernel, constants, type_of, num_warps=4).asm[
        "cubin"
    ]


@slow_after(4, "kind, buckets, threads, capability", diagonal_first(SUMS, CAPABILITIES))
def test_sum_tables_kernel_compiles(capability, kind, buckets, threads):
    def type_of(arg):
        return (
            "*fp32"
            if arg.endswith("_ptr")
            else bias_types(arg, KINDS[kind], scratch=threads == 1, entries=False)
        )

    constants = dict(BUCKETS=buckets, THREADS=threads)
    assert compile_for(
        capability, sum_tables_kernel, constants, type_of, aligned=(), num_warps=16
    ).asm["cubin"]
