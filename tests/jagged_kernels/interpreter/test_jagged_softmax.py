"""Softmax of jagged tensors and jagged matrices in Triton's interpreter (fp32 and fp16; its bf16
arithmetic is wrong)."""

import pytest
import torch
from marks import slow_after
from torch import library

DTYPES = [torch.float32, torch.float16]
SOFTMAXES = ["softmax", "rows", "columns"]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@slow_after(1, "dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths", ["mixed", "empty-ends", "skewed", "no-columns", "no-rows", "nothing", "no-segments"]
)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_forward_and_gradient(jagged_softmaxes, name, lengths, dtype):
    jagged_softmaxes(name, lengths, dtype, "cpu").check()


@pytest.mark.parametrize("columns", [0, 1, 16, 33, 70])
def test_numbers_of_columns(jagged_softmaxes, columns):
    for dtype in DTYPES:
        jagged_softmaxes("softmax", ([3, 0, 130], [0] * 3), dtype, "cpu", columns).check()


@slow_after(
    2, "sizes", [([1], [300]), ([300], [1]), ([33, 2], [129, 128]), ([127, 128], [33, 3])], ids=str
)
@pytest.mark.parametrize("name", ["rows", "columns"])
def test_sizes_of_matrices(jagged_softmaxes, name, sizes):
    jagged_softmaxes(name, sizes, torch.float32, "cpu").check()


@slow_after(1, "shift", [2, 7])
def test_chunks_of_long_segments(jagged_softmaxes, monkeypatch, shift):
    from jagged_kernels.softmax import op as jagged_softmax

    monkeypatch.setattr(jagged_softmax, "chunk_shift", lambda *_: shift)
    lengths = [3, 0, 14, 1, 6, 0, 0, 4, 21] if shift == 2 else [64, 129, 0, 700, 1, 128]
    for dtype in DTYPES:
        jagged_softmaxes("softmax", (lengths, [0] * len(lengths)), dtype, "cpu").check()


@pytest.mark.parametrize(
    "lengths, longest", [([500, 13], 500), ([600, 1], 20)], ids=["known", "understated"]
)
def test_one_launch_where_no_segment_is_said_to_be_long(offsets, monkeypatch, lengths, longest):
    from jagged_kernels.softmax import op as jagged_softmax

    launches = []
    kernel = jagged_softmax.jagged_softmax_kernel

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(jagged_softmax, "jagged_softmax_kernel", Counted())
    x = torch.randn(sum(lengths), 3, requires_grad=True)
    out = jagged_softmax.triton_jagged_softmax(x, offsets(lengths), longest)
    torch.testing.assert_close(out, torch.cat([part.softmax(0) for part in x.split(lengths)]))
    out.square().sum().backward()
    assert len(launches) == 2
    jagged_softmax.triton_jagged_softmax(x, offsets(lengths))
    assert len(launches) == 4


@pytest.mark.parametrize("shift", [6, 9])
def test_infinite_elements(jagged_softmaxes, monkeypatch, shift):
    """-inf before and after finite elements, and alone; +inf. Results are those of torch, but 0
    where all elements are -inf."""
    from jagged_kernels.softmax import op as jagged_softmax

    monkeypatch.setattr(jagged_softmax, "chunk_shift", lambda *_: shift)
    operator, reference, (x,), *_ = jagged_softmaxes(
        "softmax", ([300, 5, 20], [0] * 3), torch.float32, "cpu", 6
    )
    x[:200, 0], x[150:, 1], x[:300, 2], x[7, 3], x[301, 4] = (
        -torch.inf,
        -torch.inf,
        -torch.inf,
        torch.inf,
        -torch.inf,
    )
    expected = reference(x)
    expected[:300, 2] = expected[300:, 1] = 0
    torch.testing.assert_close(operator(x), expected, equal_nan=True)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_lines_of_minus_infinity(assert_hidden_lines_give_0, name):
    for dtype in DTYPES:
        assert_hidden_lines_give_0(name, dtype, "cpu")


@pytest.mark.parametrize("name", SOFTMAXES)
def test_large_elements(jagged_softmaxes, name):
    case = jagged_softmaxes(name, ([3, 0, 40, 1], [5, 4, 65, 2]), torch.float32, "cpu")
    case.check([1000 + 30 * case.tensors[0]])


@pytest.mark.parametrize("name", SOFTMAXES)
def test_operands_and_gradients_of_any_stride(jagged_softmaxes, name):
    case = jagged_softmaxes(name, ([3, 0, 40, 1], [5, 4, 65, 2]), torch.float32, "cpu")
    (x,) = case.tensors
    wider = torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)[..., : x.shape[-1]]
    transposed = x.t().contiguous().t()
    grads = (
        torch.ones(()).expand_as(x),
        torch.randn(*x.shape[:-1], 2 * x.shape[-1])[..., ::2],
        torch.randn(x.t().shape).t(),
    )
    for tensor, grad in zip((wider, transposed, x[:1].expand_as(x)), grads):
        case.check([tensor], grad)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_a_neighbours_nan_stays_where_it_is(
    jagged_softmaxes, jagged_pair, assert_neighbours_kept, name
):
    lengths = [3, 140, 0, 33], [5, 7, 2, 66]
    (x_offsets, _, p_offsets), _ = jagged_pair(lengths, "cpu")
    start, end = (x_offsets if name == "softmax" else p_offsets)[1:3].tolist()

    def second_segment(x):
        rows = torch.arange(len(x))
        return (start <= rows) & (rows < end)

    def spoil(x):
        x[start:end] = float("nan")
        return x

    operator, _, tensors, *_ = jagged_softmaxes(name, lengths, torch.float32, "cpu")
    assert_neighbours_kept(operator, tensors, spoil, second_segment)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_no_second_derivative(jagged_softmaxes, name):
    operator, _, (x,), *_ = jagged_softmaxes(
        name, ([3, 0, 40, 1], [5, 4, 65, 2]), torch.float32, "cpu"
    )
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(operator(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        gradient.sum().backward()


def test_operators_pass_opcheck(jagged_pair):
    from jagged_kernels.softmax import op as jagged

    offsets, (x_rows, y_rows, total) = jagged_pair(([3, 0, 7], [2, 4, 5]), "cpu")
    x, p = torch.randn(x_rows, 6, requires_grad=True), torch.randn(total, requires_grad=True)
    for operator, arguments in (
        (jagged.triton_jagged_softmax, (x, offsets[0])),
        (jagged.triton_jagged_softmax_backward, (x.detach(), x.detach(), offsets[0])),
        (jagged.triton_jagged2_softmax, (p, *offsets, x_rows, False)),
        (jagged.triton_jagged2_softmax, (p, *offsets, y_rows, True)),
        (jagged.triton_jagged2_softmax_backward, (p.detach(), p.detach(), *offsets, y_rows, True)),
    ):
        library.opcheck(operator, arguments)
