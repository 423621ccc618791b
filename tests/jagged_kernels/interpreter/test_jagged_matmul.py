"""Matrix multiplication of jagged tensors in Triton's interpreter (fp32 and fp16; its bf16
arithmetic is wrong)."""

import accuracy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from marks import diagonal_first, slow_after
from torch import library

from jagged_modules import functional as F

triton = pytest.importorskip("triton")

import triton.language as tl
from jagged_kernels.common.loads import find_tile

DTYPES = [torch.float32, torch.float16]
MATMULS = [
    "dense",
    "dense-bias",
    "dense-gelu_tanh",
    "jagged",
    "sum",
    "outer",
    "gram",
    "array",
    "array-transposed",
]
FAMILY = ["dense", "dense-bias", "jagged", "sum", "outer", "gram", "array", "array-transposed"]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@slow_after(1, "dtype", DTYPES, ids=str)
@slow_after(len(MATMULS), "name, lengths", diagonal_first(MATMULS, ["mixed", "empty-ends"]))
def test_forward_and_gradients(jagged_matmuls, name, lengths, dtype):
    jagged_matmuls(name, lengths, dtype, "cpu").check()


@slow_after(4, "lengths", ["no-columns", "no-rows", "nothing", "no-segments", "skewed"])
@pytest.mark.parametrize("name", MATMULS)
def test_lengths(jagged_matmuls, name, lengths):
    jagged_matmuls(name, lengths, torch.float32, "cpu").check()


@pytest.mark.parametrize(
    "depth, columns", [(1, 1), (64, 130), (70, 8), (8, 64), (0, 5), (5, 0)], ids=str
)
@pytest.mark.parametrize("name", ["dense-bias", "jagged", "outer", "array"])
def test_sizes(jagged_matmuls, name, depth, columns):
    jagged_matmuls(name, ([3, 0, 66], [1, 2, 65]), torch.float16, "cpu", depth, columns).check()


@pytest.mark.parametrize(
    "activation", ["identity", "relu", "silu", "gelu", "sigmoid", "hardswish", "gelu_taylor"]
)
def test_activations(jagged_matmuls, activation):
    jagged_matmuls(f"dense-{activation}", ([3, 0, 20], [0] * 3), torch.float32, "cpu").check()


@pytest.mark.parametrize("name", MATMULS)
def test_operands_and_gradients_of_any_stride(jagged_matmuls, name):
    jagged_matmuls(name, ([3, 0, 40, 1], [5, 4, 65, 2]), torch.float32, "cpu").check_strides()


def test_a_transposed_dense_operand_is_read_in_place(jagged_matmuls, tensor_sizes):
    operator, _, (x, y), *_ = jagged_matmuls("dense", "mixed", torch.float32, "cpu")
    expected = operator(x, y)
    y = y.transpose(1, 2).contiguous().transpose(1, 2)
    with tensor_sizes() as sizes:
        actual = operator(x, y)
    torch.testing.assert_close(actual, expected)
    assert all(size == expected.numel() for size in sizes.made)


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 12))
def test_chunks_of_long_segments_share_no_slot(lengths, chunk):
    """`jagged_jagged_bmm_kernel` and `sum_chunks_kernel` rely on this."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    long = [i for i, length in enumerate(lengths) if length > chunk]
    slots = [
        2 * (starts[i] // chunk) + part for i in long for part in range(-(-lengths[i] // chunk))
    ]
    assert len(set(slots)) == len(slots) and all(
        slot < 2 * (sum(lengths) // chunk) for slot in slots
    )
    for i in long:
        window = starts[i] // chunk
        assert (
            window < sum(lengths) // chunk
            and max(j for j, start in enumerate(starts) if start // chunk <= window) == i
        )


@pytest.mark.parametrize("shift", [0, 3, 6])
@pytest.mark.parametrize("name", ["jagged", "sum"])
def test_sums_of_chunks(jagged_matmuls, monkeypatch, name, shift):
    from jagged_kernels.matmul import launch

    monkeypatch.setattr(launch, "chunk_shift", lambda *_: shift)
    lengths = [3, 0, 16, 1, 9, 0, 0, 8, 33] if shift < 6 else [64, 65, 0, 300, 1, 63]
    jagged_matmuls(name, (lengths, [0] * len(lengths)), torch.float16, "cpu").check()


def test_one_launch_where_no_segment_can_be_long(offsets, monkeypatch):
    from jagged_kernels.matmul import launch
    from jagged_kernels.matmul import op as jagged_matmul

    monkeypatch.setattr(launch, "sum_chunks_kernel", None)
    x = torch.randn(513, 3)
    jagged_matmul.triton_jagged_jagged_bmm(x[:512], x[:512], offsets([512]))
    with pytest.raises(TypeError, match="not subscriptable"):
        jagged_matmul.triton_jagged_jagged_bmm(x, x, offsets([513]))
    # known; understated, which costs time alone
    for lengths, longest in (([500, 13], 500), ([513], 20)):
        bounds = offsets(lengths)
        expected = torch.stack([part.T @ part for part in x.split(lengths)])
        torch.testing.assert_close(
            jagged_matmul.triton_jagged_jagged_bmm(x, x, bounds, longest), expected
        )
        y = torch.randn(len(lengths), 3, 2, requires_grad=True)
        jagged_matmul.triton_jagged_dense_bmm(x, bounds, y, None, None, longest).sum().backward()
        torch.testing.assert_close(
            y.grad, torch.stack([part.sum(0) for part in x.split(lengths)])[:, :, None].expand_as(y)
        )


@triton.jit
def find_tiles_kernel(indices_ptr, offsets_ptr, out_ptr, num_segments, SHIFT: tl.constexpr):
    index = tl.load(indices_ptr + tl.program_id(0))
    segment, start, num_rows, row = find_tile(index, offsets_ptr, num_segments, SHIFT)
    out_ptr += tl.program_id(0) * 4
    tl.store(out_ptr, segment)
    tl.store(out_ptr + 1, start)
    tl.store(out_ptr + 2, num_rows)
    tl.store(out_ptr + 3, row)


@pytest.mark.parametrize("num_segments", [1, 2, 31, 32, 33, 1023, 1024, 1025, 40000])
def test_the_tile_of_a_virtual_index(offsets, num_segments):
    lengths = torch.randint(0, 40, (num_segments,)) * torch.randint(0, 2, (num_segments,))
    bounds, tile = offsets(lengths.tolist()), 16
    first = bounds[:-1] // tile + torch.arange(num_segments)
    num_indices = int(bounds[-1]) // tile + num_segments
    owner = torch.arange(num_segments).repeat_interleave(
        torch.cat([first[1:], torch.tensor([num_indices])]) - first
    )
    indices = torch.randint(0, num_indices, (50,))
    indices[:2] = torch.tensor([0, num_indices - 1])
    expected = torch.stack(
        [owner, bounds[owner], lengths[owner], (torch.arange(num_indices) - first[owner]) * tile], 1
    )[indices]
    out = torch.empty(50, 4, dtype=torch.int64)
    find_tiles_kernel[(50,)](indices, bounds, out, num_segments, SHIFT=4)
    assert torch.equal(out, expected)
    row = (torch.arange(num_indices) - first[owner]) * tile  # every row has a tile
    assert (
        torch.bincount(owner[row < lengths[owner]], minlength=num_segments)
        == (lengths + tile - 1) // tile
    ).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_both_kinds(offsets, dtype):
    from jagged_kernels.matmul import op as jagged

    x, y, both = torch.randn(9, 4), torch.randn(3, 4, 5), offsets([2, 0, 7]).to(dtype)
    expected = torch.cat([x[:2] @ y[0], x[2:] @ y[2]])
    torch.testing.assert_close(jagged.triton_jagged_dense_bmm(x, both, y, None, None), expected)
    torch.testing.assert_close(
        jagged.triton_jagged_sum(x, both), torch.stack([x[:2].sum(0), x[:0].sum(0), x[2:].sum(0)])
    )


@pytest.mark.parametrize("name", FAMILY)
def test_second_derivatives(jagged_matmuls, assert_second_derivatives, name):
    operator, reference, tensors, *_ = jagged_matmuls(
        name, ([3, 0, 33, 1], [2, 4, 65, 0]), torch.float32, "cpu", 5, 4
    )
    assert_second_derivatives(operator, reference, tensors, rtol=1e-5, atol=1e-4)


def test_no_second_derivative_of_an_activation(jagged_matmuls):
    operator, _, (x, *others), *_ = jagged_matmuls("dense-silu", "mixed", torch.float32, "cpu")
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(operator(x, *others).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        gradient.sum().backward()


def test_a_neighbours_nan_stays_where_it_is(jagged_matmuls, jagged_pair, assert_neighbours_kept):
    lengths = [3, 70, 0, 33], [5, 33, 2, 67]
    (x_offsets, y_offsets, p_offsets), (x_rows, y_rows, total) = jagged_pair(lengths, "cpu")
    squares = torch.nn.functional.pad((x_offsets.diff() ** 2).cumsum(0), (1, 0))
    segments = {
        x_rows: x_offsets,
        y_rows: y_offsets,
        total: p_offsets,
        int(squares[-1]): squares,
        4: torch.arange(5),
    }

    def second_segment(x):
        mask, offsets = torch.zeros(len(x), dtype=torch.bool), segments[len(x)]
        mask[offsets[1] : offsets[2]] = True
        return mask

    for name in MATMULS:
        operator, _, tensors, *_ = jagged_matmuls(name, lengths, torch.float32, "cpu")
        spoil = lambda x: x.masked_fill_(
            second_segment(x).view(-1, *[1] * (x.dim() - 1)), float("nan")
        )
        assert_neighbours_kept(operator, tensors, spoil, second_segment)


@pytest.mark.parametrize("name", MATMULS)
def test_only_the_gradients_asked_for(jagged_matmuls, name):
    operator, reference, tensors, *_ = jagged_matmuls(
        name, ([3, 0, 9], [5, 4, 7]), torch.float32, "cpu"
    )
    for chosen in range(len(tensors)):
        inputs = [x.clone().requires_grad_(i == chosen) for i, x in enumerate(tensors)]
        operator(*inputs).sum().backward()
        expected = torch.autograd.grad(reference(*inputs).sum(), inputs[chosen])[0]
        torch.testing.assert_close(inputs[chosen].grad, expected, rtol=1e-4, atol=1e-4)
        assert all(x.grad is None for i, x in enumerate(inputs) if i != chosen)


@pytest.mark.parametrize("kind", ["itself", "detached", "another-plan"])
def test_scores_of_rows_with_themselves(monkeypatch, kind):
    """The same tensor twice uses its own operator, unless one of the two is detached or the plan
    has two offsets."""
    from jagged_kernels.matmul import op as jagged

    lengths, calls, gram = torch.tensor([3, 0, 70, 130]), [], jagged.triton_jagged_gram
    monkeypatch.setattr(
        jagged, "triton_jagged_gram", lambda *args: calls.append(args) or gram(*args)
    )
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    plan = F.ScorePlan.from_offsets(
        offsets, offsets.clone() if kind == "another-plan" else None
    ).to("cpu")

    def scores(implementation):
        return lambda x: F.jagged_jagged_bmm_jagged_out(
            x, x.detach() if kind == "detached" else x, plan, implementation=implementation
        )

    x = torch.randn(203, 20)
    actual, do = accuracy.results(scores("triton"), dict(x=x))
    expected = accuracy.jagged_outer(x, x, offsets, offsets, plan.p_offsets, do)
    of_other = expected.pop("dy")
    if kind == "itself":
        expected = accuracy.jagged_gram(x, offsets, plan.p_offsets, do)
    elif kind == "another-plan":
        expected["dx"] += of_other
    accuracy.assert_accurate(actual, expected)
    assert bool(calls) == (kind == "itself")


def test_operators_pass_opcheck(jagged_pair):
    from jagged_kernels.matmul import op as jagged

    offsets, (x_rows, y_rows, total) = jagged_pair(([3, 0, 7], [2, 4, 5]), "cpu")
    x, z, y, p = (
        torch.randn(size, requires_grad=True)
        for size in ((x_rows, 6), (x_rows, 4), (y_rows, 6), (total,))
    )
    weight, bias = torch.randn(3, 6, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    squares, p_of_squares = torch.tensor([0, 9, 9, 58]), torch.randn(58, requires_grad=True)
    for operator, arguments in (
        (jagged.triton_jagged_dense_bmm, (x, offsets[0], weight, bias, "silu")),
        (jagged.triton_jagged_dense_bmm, (x, offsets[0], weight, None, None)),
        (
            jagged.triton_jagged_dense_bmm_dact,
            (z.detach(), x.detach(), offsets[0], weight.detach(), None, "silu"),
        ),
        (jagged.triton_jagged_jagged_bmm, (x, z, offsets[0])),
        (jagged.triton_jagged_sum, (x, offsets[0])),
        (jagged.triton_jagged_outer, (x, y, *offsets, total)),
        (jagged.triton_jagged_gram, (x, offsets[0], squares, 58)),
        (jagged.triton_jagged_symmetric, (p_of_squares, offsets[0], squares, x_rows)),
        (jagged.triton_array_jagged_bmm, (p, y, *offsets, x_rows, False)),
        (jagged.triton_array_jagged_bmm, (p, x, *offsets, y_rows, True)),
    ):
        library.opcheck(operator, arguments)
