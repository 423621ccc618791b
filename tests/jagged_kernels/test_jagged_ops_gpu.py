"""Matrix multiplication and softmax of jagged tensors on a GPU."""

import pytest
import torch
from torch import library

from jagged_modules.activations import POINTWISE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MATMULS = ["dense", "dense-bias", "jagged", "sum", "outer", "gram", "array", "array-transposed"]
SOFTMAXES = ["softmax", "rows", "columns"]
LENGTHS = ["mixed", "empty-ends", "skewed", "no-columns", "no-rows", "nothing", "no-segments"]


@pytest.fixture
def make(jagged_matmuls, jagged_softmaxes, record_cell):
    """Any of the operators, its definition and tensors, on the GPU."""

    def make(name, lengths, dtype, depth=20, columns=9):
        record_cell("softmax" if name in SOFTMAXES else "matmul", dtype, (depth, columns), name)
        if name in SOFTMAXES:
            return jagged_softmaxes(name, lengths, dtype, "cuda", columns)
        return jagged_matmuls(name, lengths, dtype, "cuda", depth, columns)

    return make


@pytest.fixture
def many():
    """Lengths of many short segments of x and y, empty ones among them, and of a long one."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 101, (2, 120), generator=generator)
    lengths[0, 17], lengths[1, 17] = 5000, 700
    return lengths.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", [*MATMULS, "dense-gelu_tanh", *SOFTMAXES])
def test_forward_and_gradients(make, name, lengths, dtype):
    make(name, lengths, dtype).check()


@pytest.mark.parametrize(
    "depth, columns, dtype",
    [
        (64, 64, torch.float32),
        (64, 64, torch.bfloat16),
        (128, 128, torch.float32),
        (128, 128, torch.float16),
        (256, 8, torch.bfloat16),
        (200, 130, torch.float16),
        (1000, 72, torch.float32),
        (1000, 72, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [*MATMULS, "dense-silu", *SOFTMAXES])
def test_many_segments_and_a_long_one(make, many, name, depth, columns, dtype):
    make(name, many, dtype, depth, columns).check()


@pytest.mark.parametrize("name", SOFTMAXES)
def test_lines_of_minus_infinity(assert_hidden_lines_give_0, name):
    for dtype in DTYPES:
        assert_hidden_lines_give_0(name, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "depth, columns", [(1, 1), (64, 130), (70, 8), (8, 64), (0, 5), (5, 0)], ids=str
)
@pytest.mark.parametrize("name", [*MATMULS, *SOFTMAXES])
def test_sizes(make, name, depth, columns, dtype):
    make(name, ([3, 0, 66, 1], [1, 2, 65, 300]), dtype, depth, columns).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "activation", [name for name in POINTWISE if name not in ("gelu_tanh", "silu")]
)
def test_activations(make, activation, dtype):
    make(f"dense-{activation}", "mixed", dtype).check()


@pytest.mark.parametrize("depth, columns", [(64, 64), (128, 128), (33, 70)], ids=str)
@pytest.mark.parametrize("name", [name for name in MATMULS if name != "sum"])
def test_tf32_where_it_is_allowed(make, many, name, depth, columns):
    """Tensor cores read the upper 10 bits of both mantissas: each product of two elements has a
    relative error of at most 2^-9."""
    operator, reference, tensors, *_ = make(name, many, torch.float32, depth, columns)
    allowed = 1.01 * 2**-9 * reference(*(x.double().abs() for x in tensors))
    exact = reference(*(x.double() for x in tensors))
    torch.set_float32_matmul_precision("high")
    try:
        outputs = [operator(*tensors)]
        if name.startswith("dense"):
            outputs.append(
                operator(
                    tensors[0],
                    tensors[1].transpose(1, 2).contiguous().transpose(1, 2),
                    *tensors[2:],
                )
            )
    finally:
        torch.set_float32_matmul_precision("highest")
    for out in outputs:
        assert ((out - exact).abs() <= allowed).all()
    assert not torch.equal(outputs[0], operator(*tensors))


@pytest.mark.parametrize("name", [*MATMULS, "dense-gelu_tanh", *SOFTMAXES])
def test_operands_and_gradients_of_any_stride(make, name):
    make(name, "mixed", torch.bfloat16).check_strides()


@pytest.mark.parametrize("name", MATMULS)
def test_second_derivatives(make, assert_second_derivatives, name):
    operator, reference, tensors, *_ = make(name, "mixed", torch.float32)
    assert_second_derivatives(operator, reference, tensors, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*MATMULS, "dense-gelu_tanh", *SOFTMAXES])
def test_twenty_runs_agree_bit_for_bit(make, many, name, dtype):
    operator, _, tensors, *_ = make(name, many, dtype, 64, 64)
    inputs = [x.requires_grad_() for x in tensors]
    grad = torch.randn_like(operator(*inputs))
    runs = []
    for _ in range(20):
        out = operator(*inputs)
        runs.append((out, *torch.autograd.grad(out, inputs, grad)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


@pytest.mark.parametrize("name", [*MATMULS, "dense-gelu_tanh", *SOFTMAXES])
def test_no_synchronisation(assert_no_synchronisation, make, many, name):
    operator, _, tensors, *_ = make(name, many, torch.float16)
    inputs = [x.requires_grad_() for x in tensors]

    def step():
        torch.autograd.grad(operator(*inputs).sum(), inputs)

    assert_no_synchronisation(step)


@pytest.mark.parametrize("name", [*MATMULS, *SOFTMAXES])
def test_no_compilation_per_batch(make, name):
    """Batches with other numbers of rows and segments, including one segment and one row, compile
    nothing."""
    from jagged_kernels.matmul import triton_kernels as jagged_matmul_kernels
    from jagged_kernels.softmax import triton_kernels as jagged_softmax

    kernels = [
        x
        for module in (jagged_matmul_kernels, jagged_softmax)
        for x in vars(module).values()
        if hasattr(x, "device_caches")
    ]

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def step(lengths):
        operator, _, tensors, *_ = make(name, lengths, torch.float16, 64, 64)
        inputs = [x.requires_grad_() for x in tensors]
        torch.autograd.grad(operator(*inputs).sum(), inputs)

    step(([600, 30], [5, 16]))
    step(([6000, 30], [5, 16]))
    before = compiled()
    for lengths in (
        ([1], [1]),
        ([16] * 16, [1] * 16),
        ([700, 3, 5], [1, 33, 500]),
        ([9000, 1], [3, 1]),
    ):
        step(lengths)
    assert compiled() == before


@pytest.mark.large_memory
def test_more_than_two_to_the_31_elements_of_a_matrix(offsets):
    from jagged_kernels.matmul import op as jagged
    from jagged_kernels.softmax import op as softmax

    rows, columns = 3, 46400
    x, y = (
        torch.randn(n, 8, device="cuda", dtype=torch.float16) for n in (rows + columns, 2 + columns)
    )
    x, y = x / 8, y / 8  # so that sums of so many terms stay within fp16
    bounds = [
        offsets(lengths, "cuda")
        for lengths in ([rows, columns], [2, columns], [rows * 2, columns**2])
    ]
    p = jagged.triton_jagged_outer(x, y, *bounds, rows * 2 + columns**2)
    assert len(p) > 2**31
    last = x[-5:] @ y[2:].T
    torch.testing.assert_close(p[-5 * columns :].view(5, columns), last, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        p[: rows * 2].view(rows, 2), x[:rows] @ y[:2].T, rtol=1e-3, atol=1e-3
    )
    out = jagged.triton_array_jagged_bmm(p, y, *bounds, len(x), False)
    expected = last.float() @ y[2:].float()
    assert (out[-5:] - expected).norm() <= 2e-3 * expected.norm()
    weights = softmax.triton_jagged2_softmax(p, *bounds, len(x), False)
    torch.testing.assert_close(
        weights[-5 * columns :].view(5, columns),
        p[-5 * columns :].view(5, columns).softmax(1),
        rtol=2e-3,
        atol=1e-7,
    )
    weights = softmax.triton_jagged2_softmax(p, *bounds, len(y), True)
    expected = p[rows * 2 :].view(columns, columns)[:, -5:].softmax(0)
    torch.testing.assert_close(
        weights[rows * 2 :].view(columns, columns)[:, -5:], expected, rtol=2e-3, atol=1e-7
    )


@pytest.mark.large_memory
def test_more_than_two_to_the_31_elements_of_rows(offsets):
    from jagged_kernels.matmul import op as jagged
    from jagged_kernels.softmax import op as softmax

    length = 2**31 // 512 + 100
    bounds = offsets([length - 70, 0, 70], "cuda")
    x = torch.randn(length, 512, device="cuda", dtype=torch.float16)
    y = torch.randn(3, 512, 8, device="cuda", dtype=torch.float16)
    out = jagged.triton_jagged_dense_bmm(x, bounds, y, None, None)
    torch.testing.assert_close(out[-70:], x[-70:] @ y[2], rtol=1e-2, atol=1e-2)
    result = jagged.triton_jagged_jagged_bmm(x, out, bounds)
    torch.testing.assert_close(result[2], x[-70:].T @ out[-70:], rtol=1e-2, atol=2e-1)
    assert not result[1].any()
    torch.testing.assert_close(
        softmax.triton_jagged_softmax(x, bounds)[-70:], x[-70:].softmax(0), rtol=2e-3, atol=1e-7
    )


def test_operators_pass_opcheck(jagged_pair):
    from jagged_kernels.matmul import op as jagged
    from jagged_kernels.softmax import op as softmax

    offsets, (x_rows, y_rows, total) = jagged_pair(([3, 0, 7], [2, 4, 5]), "cuda")
    sizes = (x_rows, 6), (x_rows, 4), (y_rows, 6), (total,)
    x, z, y, p = (torch.randn(size, device="cuda", requires_grad=True) for size in sizes)
    weight, bias = (
        torch.randn(size, device="cuda", requires_grad=True) for size in ((3, 6, 4), (3, 4))
    )
    squares, p_of_squares = (
        torch.tensor([0, 9, 9, 58], device="cuda"),
        torch.randn(58, device="cuda", requires_grad=True),
    )
    for operator, arguments in (
        (jagged.triton_jagged_dense_bmm, (x, offsets[0], weight, bias, "silu")),
        (jagged.triton_jagged_jagged_bmm, (x, z, offsets[0])),
        (jagged.triton_jagged_sum, (x, offsets[0])),
        (jagged.triton_jagged_outer, (x, y, *offsets, total)),
        (jagged.triton_jagged_gram, (x, offsets[0], squares, 58)),
        (jagged.triton_jagged_symmetric, (p_of_squares, offsets[0], squares, x_rows)),
        (jagged.triton_array_jagged_bmm, (p, x, *offsets, y_rows, True)),
        (softmax.triton_jagged_softmax, (x, offsets[0])),
        (softmax.triton_jagged2_softmax, (p, *offsets, y_rows, True)),
    ):
        library.opcheck(operator, arguments)
