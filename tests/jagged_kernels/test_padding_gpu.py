"""Jagged rows and padded ones on a GPU."""

import pytest
import torch
from torch import library

from jagged_modules import functional as F

from .fixtures.padding import SHAPES, by_lengths, calls, every_function

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
MANY = [*[100, 0, 37, 1] * 50, 3000]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_lengths
def test_shapes(check_padding, lengths, shape):
    check_padding(lengths, shape, torch.float32, "cuda", behind=3)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.bool], ids=str)
def test_dtypes(check_padding, record_cell, dtype):
    for width in (5, 64, 300):
        if dtype.is_floating_point:
            record_cell("padding", dtype, (width,))
        check_padding(MANY, (width,), dtype, "cuda", torch.int32, behind=20)


def test_no_synchronisation_and_equal_runs(assert_no_synchronisation, offsets):
    of_rows, total = offsets(MANY, "cuda"), sum(MANY)
    x = torch.randn(total, 96, device="cuda", requires_grad=True)
    y = torch.randn(len(MANY), 200, 96, device="cuda", requires_grad=True)
    for call, names in calls(of_rows, total, 200, True).values():
        inputs = [dict(x=x, y=y)[key] for key in names]

        def step(call=call, inputs=inputs):
            out = call(*inputs)
            return out, *torch.autograd.grad(out, inputs, out.detach())

        first = step()
        assert_no_synchronisation(step)
        assert all(map(torch.equal, first, step()))


def test_graphs_of_inductor(offsets):
    torch._dynamo.reset()
    graph = torch.compile(every_function, fullgraph=True, dynamic=True)
    for lengths, width in ((MANY, 200), ([40, 2], 9), ([2, 3, 0, 4, 7], 4)):
        of_rows = offsets(lengths, "cuda")
        x = torch.randn(sum(lengths), 24, device="cuda", requires_grad=True)
        outs = [f(x, of_rows, width) for f in (graph, every_function)]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), x) for out in outs))


@pytest.mark.large_memory
def test_more_than_two_to_the_31_elements(offsets):
    length = 2**31 // 512 + 100
    of_rows = offsets([length - 70, 0, 70], "cuda")
    x = torch.randn(length, 512, device="cuda", dtype=torch.bfloat16)
    padded = F.jagged_to_padded(x, of_rows, length - 70, side="left")
    assert torch.equal(padded[2, -70:], x[-70:]) and not padded[2, :-70].any()
    assert torch.equal(padded[0], x[:-70]) and not padded[1].any()
    padded = F.jagged_to_padded(x, of_rows, length - 70)
    assert torch.equal(F.padded_to_jagged(padded, of_rows, length), x)
    assert torch.equal(F.jagged_dense_mul(x, padded, of_rows), x * x)


def test_operators_pass_opcheck(offsets):
    from jagged_kernels.rows import padding

    x, z = (torch.randn(7, 4, device="cuda", requires_grad=True) for _ in range(2))
    y = torch.randn(3, 2, 4, device="cuda", requires_grad=True)
    of_rows = offsets([2, 0, 3], "cuda")
    for operator, given in (
        (padding.triton_jagged_to_padded, (x, None, of_rows, 2, 1.5, True, True)),
        (padding.triton_jagged_to_padded, (x, z, of_rows, 2)),
        (padding.triton_padded_to_jagged, (y, of_rows, 7, True)),
        (padding.triton_jagged_dense, (x, y, of_rows, True)),
        (padding.triton_jagged_dense, (x, y, of_rows, False)),
        (padding.triton_jagged_dense, (x, None, of_rows, False)),
    ):
        library.opcheck(operator, given)
