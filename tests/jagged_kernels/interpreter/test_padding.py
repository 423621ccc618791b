"""Jagged rows and padded ones in Triton's interpreter (bfloat16 is copied only)."""

import pytest
import torch
from tails import ON_TORCH, check, compiled
from torch import library
from torch.autograd import gradgradcheck

from jagged_modules import functional as F

from ..fixtures.padding import SHAPES, by_lengths, calls, every_function

DTYPES = [torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.bool]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@by_lengths
def test_shapes(check_padding, lengths):
    for i, shape in enumerate(SHAPES):
        check_padding(lengths, shape, torch.float32, "cpu", behind=i % 3)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.bool],
    ids=str,
)
@by_lengths
def test_dtypes(check_padding, lengths, dtype):
    check_padding(lengths, (5,), dtype, "cpu", torch.int32, behind=2)


def test_strides_of_many_blocks(check_padding):
    """Rows of more columns than a tile, and more rows than one."""
    check_padding([700, 3, 1500], (2, 3), torch.float16, "cpu")
    check_padding([70, 0, 30], (3, 200), torch.float64, "cpu", behind=1)


def test_derivatives_of_any_order(by_kernels, offsets):
    of_rows = offsets([2, 0, 3])
    x, y = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 2), (3, 2, 2))
    )
    for name, (call, names) in calls(of_rows, 5, 2, True).items():
        inputs = [dict(x=x, y=y)[key].detach().requires_grad_() for key in names]

        def function(*inputs, call=call):
            return by_kernels(call, *inputs)

        assert gradgradcheck(function, inputs, fast_mode=True), name


@pytest.mark.parametrize(
    "dtype, value",
    [
        (torch.int64, -(2**63)),
        (torch.int64, 2**53 + 1),
        (torch.int64, 2**31),
        (torch.uint8, 200),
        (torch.bool, 1),
        (torch.float16, -torch.inf),
        (torch.float64, 0.1),
        (torch.bfloat16, 0.3),
    ],
    ids=str,
)
def test_padding_values(by_kernels, offsets, dtype, value):
    x = torch.ones(3, 2, dtype=dtype)
    expected = torch.full((3, 2, 2), value, dtype=dtype)
    expected[0, 0], expected[1] = 1, 1
    assert torch.equal(by_kernels(F.jagged_to_padded, x, offsets([1, 2, 0]), 2, value), expected)


def test_an_offset_past_the_rows_is_not_followed(by_kernels, offsets):
    padded = by_kernels(F.jagged_to_padded, torch.ones(3, 2), offsets([2, 4]), 4)
    assert padded.sum(2).tolist() == [[2, 2, 0, 0], [2, 0, 0, 0]]


def test_operators_pass_opcheck(offsets):
    from jagged_kernels.rows import padding

    x, y, of_rows = torch.randn(7, 4), torch.randn(3, 2, 4), offsets([2, 0, 3])
    checks = dict(test_utils=("test_schema", "test_faketensor"))
    for given in ((x, None, of_rows, 2, 1.5, True, True), (x, x, of_rows, 2)):
        library.opcheck(padding.triton_jagged_to_padded, given, **checks)
    library.opcheck(padding.triton_padded_to_jagged, (y, of_rows, 7, True, True), **checks)
    for given in ((x, y, of_rows, True), (x, y, of_rows, False), (x, None, of_rows, False)):
        library.opcheck(padding.triton_jagged_dense, given, **checks)


@pytest.mark.parametrize("name", ["add", "mul", "to-padded"])
def test_rows_behind_the_end_in_graphs(by_kernels, name):
    case = ON_TORCH[name]
    check(case, lambda *args: by_kernels(compiled(case.call), *args), torch.float32)


def test_graphs_of_any_size(by_kernels, offsets):
    """One graph, with the operators, for all numbers of rows and segments."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    graph = torch.compile(every_function, backend=backend, fullgraph=True, dynamic=True)
    for lengths, width in (([3, 2, 5], 6), ([40, 2], 9), ([2, 3, 0, 4, 7], 4)):
        x = torch.randn(sum(lengths), 3, requires_grad=True)
        outs = [by_kernels(f, x, offsets(lengths), width) for f in (graph, every_function)]
        assert torch.equal(*outs)
        grads = [torch.autograd.grad(out.sin().sum(), x)[0] for out in outs]
        assert torch.equal(*grads)
    (code,) = graphs
    names = "jagged_to_padded", "jagged_dense", "padded_to_jagged"
    assert all(f"jagged_kernels.{name}" in code for name in names)
