"""Matrix multiplications and softmaxes of jagged tensors on the CPU, against loops over segments
and published defects."""

import dataclasses

import accuracy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged_modules import functional as F
from jagged_modules.activations import POINTWISE
from jagged_modules.cpu.buckets import FEW, GATHERED, Rows, groups, present_segments

from .segments import DTYPES, check_definition, split

WIDTHS = 5, 3  # D, T
LENGTHS = {
    "skewed": ([3, 0, 1, 300, 3, 2], [2, 5, 0, 17, 2, 40]),
    "equal": ([4, 4, 4], [7, 7, 7]),
    "scattered": ([2, 9, 2, 1, 2], [3, 1, 3, 1, 3]),
    "long": ([1, 1500], [1, 90]),
    "one-row": ([1, 1, 1], [1, 1, 1]),
    "x-empty": ([0, 0], [3, 0]),
    "y-empty": ([3, 1], [0, 0]),
    "all-empty": ([0, 0], [0, 0]),
    "no-segments": ([], []),
}


# -- the operators, their bounds, and tensors for them ---------------------------------------------


def matrices(p, plan):
    shapes = zip(plan.x_offsets.diff().tolist(), plan.y_offsets.diff().tolist())
    return [part.reshape(shape) for part, shape in zip(split(p, plan.p_offsets), shapes)]


def make_case(name, lengths, offsets_of, dtype=torch.float32):
    """Operator of tensors, its bounds, and the tensors by name."""
    x_lengths, y_lengths = lengths
    x_offsets, y_offsets = offsets_of(x_lengths, torch.int32), offsets_of(y_lengths)
    plan = F.ScorePlan.from_offsets(x_offsets, y_offsets)
    (d, t), b = WIDTHS, len(x_lengths)
    array, softmax = F.array_jagged_bmm_jagged_out, F.jagged2_softmax
    operator, bounds, shapes, arguments, options = {
        "jagged_dense_bmm": (
            F.jagged_dense_bmm,
            accuracy.jagged_dense_bmm,
            dict(x=(plan.x_rows, d), y=(b, d, t)),
            [x_offsets],
            {},
        ),
        "jagged_jagged_bmm": (
            F.jagged_jagged_bmm,
            accuracy.jagged_jagged_bmm,
            dict(x=(plan.x_rows, d), y=(plan.x_rows, t)),
            [x_offsets],
            {},
        ),
        "jagged_softmax": (
            F.jagged_softmax,
            accuracy.jagged_softmax,
            dict(x=(plan.x_rows, d)),
            [x_offsets],
            {},
        ),
        "jagged_jagged_bmm_jagged_out": (
            F.jagged_jagged_bmm_jagged_out,
            accuracy.jagged_outer,
            dict(x=(plan.x_rows, d), y=(plan.y_rows, d)),
            [plan],
            {},
        ),
        "array_jagged_bmm_jagged_out": (
            array,
            accuracy.array_jagged_bmm,
            dict(p=(plan.total,), y=(plan.y_rows, d)),
            [plan],
            {},
        ),
        "transposed": (
            array,
            accuracy.array_jagged_bmm,
            dict(p=(plan.total,), y=(plan.x_rows, d)),
            [plan],
            dict(transposed=True),
        ),
        "jagged2_softmax": (
            softmax,
            accuracy.jagged2_softmax,
            dict(p=(plan.total,)),
            [plan],
            dict(dim=-1),
        ),
        "jagged2_softmax-columns": (
            softmax,
            accuracy.jagged2_softmax,
            dict(p=(plan.total,)),
            [plan],
            dict(dim=-2),
        ),
    }[name]
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    offsets = plan.offsets if arguments == [plan] else arguments

    def run(*x, **chosen):
        return operator(*x, *arguments, **options, **chosen)

    return run, lambda *x: bounds(*x[:-1], *offsets, x[-1], **options), tensors


MATMULS = [
    "jagged_dense_bmm",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "array_jagged_bmm_jagged_out",
    "transposed",
]
SOFTMAXES = ["jagged_softmax", "jagged2_softmax", "jagged2_softmax-columns"]


@pytest.fixture(params=[*MATMULS, *SOFTMAXES])
def name(request):
    return request.param


@pytest.fixture(params=["auto", "reference"])
def implementation(request):
    return request.param


# -- matrix multiplication and softmax -------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
def test_segments(name, lengths, implementation, offsets_of):
    run, bounds, tensors = make_case(name, LENGTHS[lengths], offsets_of)
    accuracy.check(lambda *x: run(*x, implementation=implementation), bounds, tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", ["skewed", "scattered"])
def test_dtypes(name, lengths, dtype, offsets_of):
    run, bounds, tensors = make_case(name, LENGTHS[lengths], offsets_of, DTYPES[dtype])
    accuracy.check(run, bounds, tensors)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_tensors_and_gradients_of_any_stride(name, kind, offsets_of):
    def strided(x):
        if kind == "expanded":
            return torch.randn([1] * x.dim()).expand(x.shape)
        if kind == "transposed":
            return torch.randn(x.shape[::-1]).permute(*range(x.dim())[::-1])
        return torch.randn([2 * n for n in x.shape])[(slice(None, None, 2),) * x.dim()]

    run, bounds, tensors = make_case(name, LENGTHS["scattered"], offsets_of)
    grad = strided(run(*tensors.values()))
    accuracy.check(
        run,
        bounds,
        tensors if kind == "expanded" else {of: strided(x) for of, x in tensors.items()},
        grad,
    )


@pytest.mark.parametrize("lengths", [([2, 0, 3], [1, 2, 2]), ([2, 1, 2], [3, 1, 3])])
def test_gradcheck(name, lengths, implementation, offsets_of):
    run, _, tensors = make_case(name, lengths, offsets_of, torch.float64)
    inputs = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(lambda *x: run(*x, implementation=implementation), inputs)


@pytest.mark.parametrize("name", MATMULS)
def test_second_derivatives(name, offsets_of):
    run, _, tensors = make_case(name, ([2, 0, 3], [1, 2, 2]), offsets_of, torch.float64)
    assert torch.autograd.gradgradcheck(run, [x.requires_grad_() for x in tensors.values()])


@pytest.mark.parametrize("name", SOFTMAXES)
def test_second_derivatives_of_the_softmaxes_are_those_of_the_reference(name, offsets_of):
    run, _, tensors = make_case(name, ([2, 0, 3], [1, 2, 2]), offsets_of, torch.float64)
    (x,) = tensors.values()
    x.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: run(x, implementation="reference"), x)
    (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


@given(data=st.data())
def test_anything(data, offsets_of):
    name = data.draw(st.sampled_from([*MATMULS, *SOFTMAXES]))
    lengths = data.draw(
        st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 3, 30, 70])] * 2), max_size=8)
    )
    run, bounds, tensors = make_case(
        name,
        [*zip(*lengths)] or ([], []),
        offsets_of,
        data.draw(st.sampled_from([*DTYPES.values()])),
    )
    accuracy.check(run, bounds, tensors)


@pytest.mark.parametrize("width", [0, 1])
def test_narrow(width, offsets_of):
    offsets = offsets_of([2, 3])
    x, y = (torch.ones(shape, requires_grad=True) for shape in ((5, width), (2, width, 4)))
    out = F.jagged_dense_bmm(x, y, offsets)
    out.sum().backward()
    assert torch.equal(out, torch.full((5, 4), float(width)))
    assert torch.equal(x.grad, torch.full((5, width), 4.0)) and y.grad.shape == (2, width, 4)
    assert F.jagged_jagged_bmm(x, torch.ones(5, 0), offsets).shape == (2, width, 0)


def test_low_precision_is_accumulated_in_fp32(offsets_of):
    """4096 ones: a sum in bf16 stops at 256, one in fp16 at 2048."""
    for dtype in (torch.bfloat16, torch.float16):
        x, offsets = torch.ones(4096, 1, dtype=dtype), offsets_of([4096])
        assert F.jagged_jagged_bmm(x, x, offsets).item() == 4096
        assert (
            F.jagged_jagged_bmm_jagged_out(
                x.T, x.T, F.ScorePlan.from_offsets(offsets_of([1]))
            ).item()
            == 4096
        )
        assert F.jagged_softmax(x, offsets)[0].item() == 1 / 4096


def test_softmax_of_large_scores(offsets_of):
    offsets = offsets_of([2, 1])
    x = torch.tensor([[1000.0], [0.0], [-1000.0]])
    assert F.jagged_softmax(x, offsets).flatten().tolist() == [1, 0, 1]
    plan = F.ScorePlan.from_offsets(offsets_of([1]), offsets_of([2]))
    assert F.jagged2_softmax(x[:2, 0], plan).tolist() == [1, 0]


@pytest.mark.parametrize("dim", [-1, -2])
def test_a_line_that_sees_nothing_gives_0(dim, implementation, offsets_of):
    """As attention does. In every implementation, with zeros as gradients; NaN still gives NaN."""
    plan = F.ScorePlan.from_offsets(offsets_of([2, 3]), offsets_of([4, 2]))
    p = torch.randn(plan.total, dtype=torch.float64)
    hidden = torch.zeros(plan.total, dtype=torch.bool)
    for matrix in matrices(hidden, plan):
        (matrix if dim == -1 else matrix.T)[1] = matrix[0, 0] = True
    masked = p.masked_fill(hidden, -torch.inf).requires_grad_()
    grad = torch.randn_like(p)
    results = []
    for x in (masked, p.masked_fill(hidden, -1e9).requires_grad_()):
        out = F.jagged2_softmax(x, plan, dim, implementation=implementation)
        results.append(
            [out.masked_fill(hidden, 0), *torch.autograd.grad(out.masked_fill(hidden, 0), x, grad)]
        )
    torch.testing.assert_close(*results)
    assert not F.jagged2_softmax(masked, plan, dim, implementation=implementation)[hidden].any()

    columns = torch.tensor(
        [[-torch.inf, 1], [-torch.inf, 1], [torch.nan, -torch.inf], [1, -torch.inf]],
        requires_grad=True,
    )
    out = F.jagged_softmax(columns, offsets_of([2, 2]), implementation=implementation)
    out[:2].sum().backward()
    assert out[:2].tolist() == [[0, 0.5], [0, 0.5]] and not columns.grad[:2].any()
    assert out[2:, 0].isnan().all() and not out[2:, 1].any()


def test_host_work_does_not_grow_with_the_segments_nor_padding_with_the_longest(
    tensor_sizes, offsets_of
):
    """The autograd graph has one node for an operator, and nothing is as large as the segments
    padded to the longest."""
    lengths = [2000, *[3] * 500]
    plan = F.ScorePlan.from_offsets(offsets_of(lengths), offsets_of([1] * 501))
    offsets = offsets_of(lengths)
    inputs = [
        torch.randn(shape, requires_grad=True) for shape in ((3500, 4), (501, 4), (501, 4, 4))
    ]
    with tensor_sizes() as sizes:
        p = F.jagged_jagged_bmm_jagged_out(*inputs[:2], plan)
        out = F.array_jagged_bmm_jagged_out(F.jagged2_softmax(p, plan), inputs[1], plan)
        out = F.jagged_dense_bmm(F.jagged_softmax(out, offsets), inputs[2], offsets)
        torch.autograd.grad(out.square().sum(), inputs)
    assert 0 < max(sizes.made) <= 4 * (3500 + 1)
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        seen.add(node)
        nodes += [n for n, _ in node.next_functions if n is not None and n not in seen]
    assert len(seen) < 20


@pytest.mark.parametrize("empty", [0, FEW], ids=["few", "many"])
def test_groups_cover_every_row_once(offsets_of, empty):
    lengths = [GATHERED + 1, 2, 0, 2, 3, GATHERED + 1, *[0] * empty, 3, 2, GATHERED + 1]
    offsets, padded = offsets_of(lengths), offsets_of([7] * len(lengths))
    counts = torch.zeros(sum(lengths))
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    for rows, others in groups(offsets, padded):
        block = rows.take(counts)
        rows.put(counts, block + 1)
        segments = torch.arange(len(lengths)).repeat_interleave(7)
        assert torch.equal(rows.take(numbers)[:, 0], others.take(segments)[:, 0])
    assert torch.equal(counts, torch.ones_like(counts))


def test_no_loop_over_many_empty_segments(offsets_of):
    index = present_segments(
        offsets_of([0] * FEW + [2, 0, 1, 4]), offsets_of([1] * FEW + [3, 5, 0, 1])
    )
    assert index.tolist() == [FEW, FEW + 3]


def test_segments_one_after_the_other_are_not_copied():
    x = torch.randn(12, 2)
    assert Rows.of((3, 5, 7), 2).take(x).data_ptr() == x[3].data_ptr()
    assert torch.equal(Rows.of((3, 7), 2).take(x), torch.stack([x[3:5], x[7:9]]))


# -- defects of published implementations ----------------------------------------------------------


@pytest.mark.parametrize("rows, columns", [(700, 3), (3, 700)])
def test_gradients_of_one_segment_much_longer_than_all_others(rows, columns, offsets_of):
    """A published gradient of array_jagged_bmm is wrong where a segment exceeds max_seq_len; here
    no operator takes one."""
    for name in MATMULS:
        run, bounds, tensors = make_case(name, ([2, rows, 1], [1, columns, 2]), offsets_of)
        accuracy.check(run, bounds, tensors)


def test_every_row_of_a_softmax_is_written(offsets_of):
    """A published one leaves rows past max_L as they were in memory."""
    for lengths in ([5000], [1, 5000, 0, 3]):
        out = F.jagged_softmax(torch.randn(sum(lengths), 2), offsets_of(lengths))
        sums = torch.stack([x.sum(0) for x in split(out, offsets_of(lengths)) if len(x)])
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_softmax_is_not_divided_by_a_length(offsets_of):
    p = torch.randn(2 * 3 + 4)
    plan = F.ScorePlan.from_offsets(offsets_of([2, 1]), offsets_of([3, 4]))
    first, second = matrices(F.jagged2_softmax(p, plan), plan)
    torch.testing.assert_close(torch.cat([first.sum(1), second.sum(1)]), torch.ones(3))
    first, second = matrices(F.jagged2_softmax(p, plan, dim=-2), plan)
    torch.testing.assert_close(torch.cat([first.sum(0), second.sum(0)]), torch.ones(7))


def test_causal_scores_see_no_later_row(offsets_of):
    """Scores masked by hand, the only way to a causal softmax here: no later row changes an earlier
    result."""
    plan = F.ScorePlan.from_offsets(offsets_of([4, 3]))
    hidden = torch.cat([torch.ones(n, n).triu(1).flatten() for n in (4, 3)]).bool()

    def attend(x):
        p = F.jagged2_softmax(
            F.jagged_jagged_bmm_jagged_out(x, x, plan).masked_fill(hidden, float("-inf")), plan
        )
        return F.array_jagged_bmm_jagged_out(p, x, plan)

    x = torch.randn(7, 5)
    before = attend(x)
    x[3] += 1
    assert (attend(x) != before).any(1).nonzero().flatten().tolist() == [3]


def test_bf16_backward_compiles(name, offsets_of):
    run, _, tensors = make_case(name, LENGTHS["scattered"], offsets_of, torch.bfloat16)
    graph = torch.compile(run, fullgraph=True, backend="aot_eager")
    grads = []
    for call in (run, graph):
        inputs = [x.clone().requires_grad_() for x in tensors.values()]
        grads.append(torch.autograd.grad(call(*inputs).square().sum(), inputs))
    torch.testing.assert_close(*grads)
    torch._dynamo.reset()


# -- attention of these parts ----------------------------------------------------------------------


@pytest.mark.parametrize("lengths", ["skewed", "scattered", "x-empty", "y-empty", "no-segments"])
def test_unfused_attention_is_jagged_attention(lengths, offsets_of):
    q_offsets, kv_offsets = map(offsets_of, LENGTHS[lengths])
    plan = F.ScorePlan.from_offsets(q_offsets, kv_offsets)

    def unfused(q, k, v):
        p = F.jagged2_softmax(F.jagged_jagged_bmm_jagged_out(q * 0.3, k, plan), plan)
        return F.array_jagged_bmm_jagged_out(p, v, plan)

    def bounds(q, k, v, do):
        operands = (x[:, None] for x in (q, k, v, do))
        whole = accuracy.attention(*operands, q_offsets, kv_offsets, scale=0.3)
        return {name: x.map(lambda y: y[:, 0]) for name, x in whole.items()}

    accuracy.check(
        unfused,
        bounds,
        {
            name: torch.randn(n, 8)
            for name, n in zip("qkv", (plan.x_rows, plan.y_rows, plan.y_rows))
        },
    )


# -- the plan --------------------------------------------------------------------------------------


def test_plan(offsets_of):
    plan = F.ScorePlan.from_offsets(offsets_of([2, 0, 3], torch.int32), offsets_of([4, 5, 1]))
    assert plan.p_offsets.tolist() == [0, 8, 8, 11] and plan.p_offsets.dtype == torch.int64
    assert (plan.x_rows, plan.y_rows, plan.total) == (5, 10, 11)
    itself = F.ScorePlan.from_offsets(offsets_of([2, 0, 3]))
    assert itself.p_offsets.tolist() == [0, 4, 4, 13] and itself.y_offsets is itself.x_offsets
    moved = plan.to("meta")
    assert all(x.is_meta for x in moved.offsets) and moved.total == 11
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.total = 3


def test_a_moved_plan_keeps_both_offsets():
    x, y = torch.tensor([0, 2, 5]), torch.tensor([0, 1, 4])
    plan, own = (F.ScorePlan.from_offsets(x, other).to("cpu") for other in (y, None))
    assert torch.equal(plan.x_offsets, x) and torch.equal(plan.y_offsets, y)
    assert own.y_offsets is own.x_offsets


def test_plan_of_more_scores_than_an_int32_counts():
    plan = F.ScorePlan.from_offsets(torch.tensor([0, 70000, 140000], dtype=torch.int32))
    assert plan.p_offsets.tolist() == [0, 70000**2, 2 * 70000**2] and plan.total == 2 * 70000**2


# -- layers' functions -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation", ["identity", "relu", "gelu_tanh", "gelu_taylor", "hardswish"]
)
def test_linear_of_each_segment(activation, dtype, implementation, offsets_of):
    offsets = offsets_of([3, 0, 1, 40])
    tensors = {
        name: torch.randn(shape).to(DTYPES[dtype])
        for name, shape in dict(x=(44, 5), y=(4, 5, 3), bias=(4, 3)).items()
    }
    accuracy.check(
        lambda *x: F.jagged_linear(*x, offsets, activation, implementation=implementation),
        lambda x, y, bias, do: accuracy.jagged_dense_bmm(
            x, y, offsets, do, bias=bias, activation=activation
        ),
        tensors,
    )


@pytest.mark.parametrize("activation", POINTWISE)
def test_linear_of_all_rows(activation, offsets_of):
    def bounds(x, weight, bias, do):
        one_segment = accuracy.jagged_dense_bmm(
            x, weight.T[None], offsets_of([7]), do, bias=bias[None], activation=activation
        )
        dweight, dbias = (one_segment.pop(name).map(lambda y: y[0]) for name in ("dy", "dbias"))
        return one_segment | dict(dweight=dweight.mT, dbias=dbias)

    tensors = dict(x=torch.randn(7, 5), weight=torch.randn(3, 5), bias=torch.randn(3))
    accuracy.check(lambda *x: F.jagged_linear(*x, activation=activation), bounds, tensors)


def test_linear_without_bias_or_activation(offsets_of):
    x, weight, offsets = torch.randn(5, 4), torch.randn(2, 4, 3), offsets_of([2, 3])
    assert torch.equal(
        F.jagged_linear(x, weight, None, offsets), F.jagged_dense_bmm(x, weight, offsets)
    )
    assert torch.equal(F.jagged_linear(x, weight[0].T), x @ weight[0])


def test_layer_norm():
    def normed(x, weight, bias):
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight + bias

    check_definition(
        F.jagged_layer_norm,
        normed,
        dict(x=torch.randn(7, 5), weight=torch.randn(5), bias=torch.randn(5)),
    )
    x = 1e-3 * torch.randn(7, 5)
    torch.testing.assert_close(F.jagged_layer_norm(x), normed(x, 1, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_a_layer_norm_in_16_bits_are_summed_in_fp32(dtype):
    rows = 1000
    x, weight, bias = (
        torch.randn(shape).to(dtype).requires_grad_() for shape in ((rows, 8), (8,), (8,))
    )
    out = F.jagged_layer_norm(x, weight, bias)
    d_weight, d_bias = torch.autograd.grad(out, (weight, bias), torch.ones_like(out))
    assert out.dtype == d_weight.dtype == dtype and (d_bias == rows).all()
    normal = torch.nn.functional.layer_norm(x.double(), (8,), eps=1e-6)
    torch.testing.assert_close(
        d_weight.double(), normal.sum(0), rtol=torch.finfo(dtype).eps, atol=1e-3
    )


def test_autocast(offsets_of):
    x, y, offsets = torch.randn(5, 4, requires_grad=True), torch.randn(2, 4, 3), offsets_of([2, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.jagged_dense_bmm(x, y.half(), offsets)
        assert F.jagged_softmax(x, offsets).dtype == torch.float32
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == torch.float32


def test_autocast_joins_dtypes_as_torch_does(offsets_of):
    """Mixed dtypes come from layers whose rows stay in their dtype."""
    x, offsets = torch.randn(5, 4).bfloat16().requires_grad_(), offsets_of([2, 3])
    y = torch.randn(2, 4, 4, requires_grad=True)
    rows = torch.cat([y[0, :2], y[1, :3]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = F.jagged_dense_add(x, y, offsets), F.jagged_dense_mul(x, y, offsets)
        joined, ends = F.jagged_concat([x, rows], [offsets, offsets])
    expected = x + rows, x * rows
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert joined.dtype == torch.float32 and ends.tolist() == [0, 4, 10]
    assert torch.equal(joined[[0, 1, 4, 5, 6]], x.float())
    dx, dy = torch.autograd.grad((joined * 2).sum(), (x, y))
    assert dx.dtype == torch.bfloat16 and (dx == 2).all() and dy.dtype == torch.float32
    for function in (F.jagged_dense_add, F.jagged_dense_mul):
        with pytest.raises(ValueError, match="y must have x's dtype"):
            function(x, y, offsets)
    with pytest.raises(ValueError, match="must have values\\[0\\]'s dtype"):
        F.jagged_concat([x, rows], [offsets, offsets])
