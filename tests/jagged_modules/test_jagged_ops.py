"""Products, softmaxes and row operators of jagged tensors on the CPU, against loops over segments and published defects."""

import dataclasses
import sys

import accuracy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import POINTWISE
from jagged_modules.cpu.buckets import GATHERED, Rows, groups

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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


# -- the operators, their bounds, and tensors for them -----------------------------------------------------------------------------


def split(x, offsets):
    return x.split(offsets.diff().tolist())


def joined(parts, like):
    """The parts along their rows; `like`, which has none, keeps the gradient where there are no parts."""
    return torch.cat([like, *parts])


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
            F.jagged_dense_bmm, accuracy.jagged_dense_bmm, dict(x=(plan.x_rows, d), y=(b, d, t)), [x_offsets], {},
        ),
        "jagged_jagged_bmm": (
            F.jagged_jagged_bmm, accuracy.jagged_jagged_bmm, dict(x=(plan.x_rows, d), y=(plan.x_rows, t)), [x_offsets], {},
        ),
        "jagged_softmax": (F.jagged_softmax, accuracy.jagged_softmax, dict(x=(plan.x_rows, d)), [x_offsets], {}),
        "jagged_jagged_bmm_jagged_out": (
            F.jagged_jagged_bmm_jagged_out, accuracy.jagged_outer, dict(x=(plan.x_rows, d), y=(plan.y_rows, d)), [plan], {},
        ),
        "array_jagged_bmm_jagged_out": (array, accuracy.array_jagged_bmm, dict(p=(plan.total,), y=(plan.y_rows, d)), [plan], {}),
        "transposed": (array, accuracy.array_jagged_bmm, dict(p=(plan.total,), y=(plan.x_rows, d)), [plan], dict(transposed=True)),
        "jagged2_softmax": (softmax, accuracy.jagged2_softmax, dict(p=(plan.total,)), [plan], dict(dim=-1)),
        "jagged2_softmax-columns": (softmax, accuracy.jagged2_softmax, dict(p=(plan.total,)), [plan], dict(dim=-2)),
    }[name]  # fmt: skip
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    offsets = plan.offsets if arguments == [plan] else arguments

    def run(*x, **chosen):
        return operator(*x, *arguments, **options, **chosen)

    return run, lambda *x: bounds(*x[:-1], *offsets, x[-1], **options), tensors


def check_definition(operator, definition, tensors):
    """Hold an operator to what its definition in plain torch says."""
    accuracy.check(operator, lambda *x: accuracy.definition(definition, tensors, x[-1]), tensors)


PRODUCTS = ["jagged_dense_bmm", "jagged_jagged_bmm", "jagged_jagged_bmm_jagged_out", "array_jagged_bmm_jagged_out", "transposed"]
SOFTMAXES = ["jagged_softmax", "jagged2_softmax", "jagged2_softmax-columns"]


@pytest.fixture(params=[*PRODUCTS, *SOFTMAXES])
def name(request):
    return request.param


@pytest.fixture(params=["auto", "reference"])
def implementation(request):
    return request.param


# -- products and softmaxes ------------------------------------------------------------------------------------------------------


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
    accuracy.check(run, bounds, tensors if kind == "expanded" else {of: strided(x) for of, x in tensors.items()}, grad)


@pytest.mark.parametrize("lengths", [([2, 0, 3], [1, 2, 2]), ([2, 1, 2], [3, 1, 3])])
def test_gradcheck(name, lengths, implementation, offsets_of):
    run, _, tensors = make_case(name, lengths, offsets_of, torch.float64)
    inputs = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(lambda *x: run(*x, implementation=implementation), inputs)


@pytest.mark.parametrize("name", PRODUCTS)
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
    name = data.draw(st.sampled_from([*PRODUCTS, *SOFTMAXES]))
    lengths = data.draw(st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 3, 30, 70])] * 2), max_size=8))
    run, bounds, tensors = make_case(name, [*zip(*lengths)] or ([], []), offsets_of, data.draw(st.sampled_from([*DTYPES.values()])))
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
        assert F.jagged_jagged_bmm_jagged_out(x.T, x.T, F.ScorePlan.from_offsets(offsets_of([1]))).item() == 4096
        assert F.jagged_softmax(x, offsets)[0].item() == 1 / 4096


def test_softmax_of_large_scores(offsets_of):
    offsets = offsets_of([2, 1])
    x = torch.tensor([[1000.0], [0.0], [-1000.0]])
    assert F.jagged_softmax(x, offsets).flatten().tolist() == [1, 0, 1]
    plan = F.ScorePlan.from_offsets(offsets_of([1]), offsets_of([2]))
    assert F.jagged2_softmax(x[:2, 0], plan).tolist() == [1, 0]


def test_host_work_does_not_grow_with_the_segments_nor_padding_with_the_longest(tensor_sizes, offsets_of):
    """The autograd graph has one node for an operator, and nothing is as large as the segments padded to the longest."""
    lengths = [2000, *[3] * 500]
    plan, offsets = F.ScorePlan.from_offsets(offsets_of(lengths), offsets_of([1] * 501)), offsets_of(lengths)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((3500, 4), (501, 4), (501, 4, 4))]
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


def test_groups_cover_every_row_once(offsets_of):
    lengths = [GATHERED + 1, 2, 0, 2, 3, GATHERED + 1, 3, 2, GATHERED + 1]
    offsets, places = offsets_of(lengths), offsets_of([7] * len(lengths))
    counts, numbers = torch.zeros(sum(lengths)), torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    for rows, others in groups(offsets, places):
        block = rows.take(counts)
        rows.put(counts, block + 1)
        assert torch.equal(rows.take(numbers)[:, 0], others.take(torch.arange(63) // 7)[:, 0])
    assert torch.equal(counts, torch.ones_like(counts))


def test_segments_one_after_the_other_are_not_copied():
    x = torch.randn(12, 2)
    assert Rows.of((3, 5, 7), 2).take(x).data_ptr() == x[3].data_ptr()
    assert torch.equal(Rows.of((3, 7), 2).take(x), torch.stack([x[3:5], x[7:9]]))


# -- defects of published implementations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, columns", [(700, 3), (3, 700)])
def test_gradients_of_one_segment_much_longer_than_all_others(rows, columns, offsets_of):
    """A published gradient of array_jagged_bmm is wrong where a segment exceeds max_seq_len; here no operator takes one."""
    for name in PRODUCTS:
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


def test_causal_keeps_no_future(offsets_of):
    """Scores masked by hand, the only way to a causal softmax here: no later row changes an earlier result."""
    plan = F.ScorePlan.from_offsets(offsets_of([4, 3]))
    hidden = torch.cat([torch.ones(n, n).triu(1).flatten() for n in (4, 3)]).bool()

    def attend(x):
        p = F.jagged2_softmax(F.jagged_jagged_bmm_jagged_out(x, x, plan).masked_fill(hidden, float("-inf")), plan)
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


# -- attention of these parts ----------------------------------------------------------------------------------------------------


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

    accuracy.check(unfused, bounds, {name: torch.randn(n, 8) for name, n in zip("qkv", (plan.x_rows, plan.y_rows, plan.y_rows))})


# -- the plan --------------------------------------------------------------------------------------------------------------------


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


def test_plan_of_more_scores_than_an_int32_counts():
    plan = F.ScorePlan.from_offsets(torch.tensor([0, 70000, 140000], dtype=torch.int32))
    assert plan.p_offsets.tolist() == [0, 70000**2, 2 * 70000**2] and plan.total == 2 * 70000**2


# -- layers' functions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["identity", "relu", "gelu_tanh", "gelu_taylor", "hardswish"])
def test_linear_of_each_segment(activation, dtype, implementation, offsets_of):
    offsets = offsets_of([3, 0, 1, 40])
    tensors = {name: torch.randn(shape).to(DTYPES[dtype]) for name, shape in dict(x=(44, 5), y=(4, 5, 3), bias=(4, 3)).items()}
    accuracy.check(
        lambda *x: F.jagged_linear(*x, offsets, activation, implementation=implementation),
        lambda x, y, bias, do: accuracy.jagged_dense_bmm(x, y, offsets, do, bias=bias, activation=activation),
        tensors,
    )


@pytest.mark.parametrize("activation", POINTWISE)
def test_linear_of_all_rows(activation, offsets_of):
    def bounds(x, weight, bias, do):
        one_segment = accuracy.jagged_dense_bmm(x, weight.T[None], offsets_of([7]), do, bias=bias[None], activation=activation)
        dweight, dbias = (one_segment.pop(name).map(lambda y: y[0]) for name in ("dy", "dbias"))
        return one_segment | dict(dweight=dweight.mT, dbias=dbias)

    tensors = dict(x=torch.randn(7, 5), weight=torch.randn(3, 5), bias=torch.randn(3))
    accuracy.check(lambda *x: F.jagged_linear(*x, activation=activation), bounds, tensors)


def test_linear_without_bias_or_activation(offsets_of):
    x, weight, offsets = torch.randn(5, 4), torch.randn(2, 4, 3), offsets_of([2, 3])
    assert torch.equal(F.jagged_linear(x, weight, None, offsets), F.jagged_dense_bmm(x, weight, offsets))
    assert torch.equal(F.jagged_linear(x, weight[0].T), x @ weight[0])


def test_layer_norm():
    def normed(x, weight, bias):
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight + bias

    check_definition(F.jagged_layer_norm, normed, dict(x=torch.randn(7, 5), weight=torch.randn(5), bias=torch.randn(5)))
    x = 1e-3 * torch.randn(7, 5)
    torch.testing.assert_close(F.jagged_layer_norm(x), normed(x, 1, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_a_layer_norm_in_16_bits_are_summed_in_fp32(dtype):
    rows = 1000
    x, weight, bias = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((rows, 8), (8,), (8,)))
    out = F.jagged_layer_norm(x, weight, bias)
    d_weight, d_bias = torch.autograd.grad(out, (weight, bias), torch.ones_like(out))
    assert out.dtype == d_weight.dtype == dtype and (d_bias == rows).all()
    normal = torch.nn.functional.layer_norm(x.double(), (8,), eps=1e-6)
    torch.testing.assert_close(d_weight.double(), normal.sum(0), rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_autocast(offsets_of):
    x, y, offsets = torch.randn(5, 4, requires_grad=True), torch.randn(2, 4, 3), offsets_of([2, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.jagged_dense_bmm(x, y.half(), offsets)
        assert F.jagged_softmax(x, offsets).dtype == torch.float32
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == torch.float32


# -- rows ------------------------------------------------------------------------------------------------------------------------

ROW_LENGTHS = [[3, 0, 2, 5], [0, 0], [], [1, 1, 1], [400, 1]]


def padded_loop(values, offsets, max_seqlen, padding_value=0.0):
    out = values.new_full((len(offsets) - 1, max_seqlen, *values.shape[1:]), padding_value)
    for block, rows in zip(out, split(values, offsets)):
        block[: len(rows)] = rows
    return out


@pytest.fixture(params=["fbgemm", "torch"])
def conversions(request, monkeypatch):
    """The test runs with FBGEMM's operators and without."""
    if request.param == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    else:
        monkeypatch.delitem(sys.modules, "fbgemm_gpu", raising=False)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", ROW_LENGTHS)
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.int64, torch.bool])
def test_conversions(dtype, lengths, index, conversions, offsets_of):
    offsets, longest = offsets_of(lengths, index), max([0, *lengths])
    for shape in ((), (3,), (2, 3)):
        values = torch.randint(2 if dtype == torch.bool else 100, (sum(lengths), *shape)).to(dtype)
        padded = F.jagged_to_padded(values, offsets, longest + 2, 1)
        assert padded.dtype == dtype and torch.equal(padded, padded_loop(values, offsets, longest + 2, 1))
        assert torch.equal(F.padded_to_jagged(padded, offsets), values)
        assert torch.equal(F.padded_to_jagged(padded, offsets, sum(lengths)), values)


@given(data=st.data())
def test_conversions_round_trip(data, offsets_of):
    lengths, width = data.draw(st.lists(st.integers(0, 20), max_size=6)), data.draw(st.integers(0, 4))
    offsets, longest = offsets_of(lengths), max([0, *lengths])
    values = torch.randn(sum(lengths), width)
    padded = F.jagged_to_padded(values, offsets, longest + data.draw(st.integers(0, 3)), data.draw(st.floats(-5, 5, width=32)))
    assert torch.equal(F.padded_to_jagged(padded, offsets), values)
    again = F.jagged_to_padded(F.padded_to_jagged(padded, offsets), offsets, longest)
    assert torch.equal(again, F.jagged_to_padded(values, offsets, longest))


def test_second_derivatives_of_conversions(conversions, offsets_of):
    """FBGEMM's operator gives wrong ones."""
    offsets, x = offsets_of([1, 2]), torch.randn(3, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(F.jagged_to_padded(x, offsets, 2).pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), x), (6 * x,))


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_fbgemm_converts_what_needs_no_gradient(grad_enabled, offsets_of):
    pytest.importorskip("fbgemm_gpu")
    x = torch.randn(3, 2, requires_grad=True)
    with torch.set_grad_enabled(grad_enabled), torch.profiler.profile() as profile:
        F.jagged_to_padded(x, offsets_of([1, 2]), 2)
    assert any("fbgemm" in event.name for event in profile.events()) is not grad_enabled


@pytest.mark.parametrize("lengths", ROW_LENGTHS)
def test_gradients_of_conversions(lengths, conversions, offsets_of):
    offsets, longest = offsets_of(lengths), max([0, *lengths])
    values, dense = torch.randn(sum(lengths), 3, requires_grad=True), torch.randn(len(lengths), longest, 3, requires_grad=True)
    grads = torch.randn(3, longest, len(lengths)).permute(2, 1, 0), torch.randn(1, 3).expand(sum(lengths), 3)
    (dvalues,) = torch.autograd.grad(F.jagged_to_padded(values, offsets, longest), values, grads[0])
    (ddense,) = torch.autograd.grad(F.padded_to_jagged(dense, offsets), dense, grads[1])
    assert torch.equal(dvalues, F.padded_to_jagged(grads[0], offsets))
    assert torch.equal(ddense, padded_loop(grads[1], offsets, longest))


def test_rows_past_the_block(offsets_of, monkeypatch, conversions):
    """Offsets on a device are not read: N rows of a long segment are padded, and what a dense block does not have is 0."""
    from jagged_modules import validation as checks
    from jagged_modules.functional import rows as jagged_rows

    for module in (checks, jagged_rows):
        monkeypatch.setattr(module, "values_are_checkable", lambda x: False)
    offsets, values = offsets_of([1, 4, 2]), torch.randn(7, 3, requires_grad=True)
    padded = F.jagged_to_padded(values, offsets, 2)
    rows = [0, 1, 2, 5, 6]
    assert torch.equal(padded.flatten(0, 1)[[0, 2, 3, 4, 5]], values[rows]) and not padded[0, 1].any()
    (grad,) = torch.autograd.grad(padded.sum(), values)
    assert grad.sum(1).tolist() == [3, 3, 3, 0, 0, 3, 3]
    dense = torch.randn(3, 3, 3, requires_grad=True)
    taken = F.padded_to_jagged(dense, offsets, 7)
    assert torch.equal(taken[[0, 1, 2, 3, 5, 6]], dense[[0, 1, 1, 1, 2, 2], [0, 0, 1, 2, 0, 1]]) and not taken[4].any()
    (grad,) = torch.autograd.grad(taken.sum(), dense)
    assert grad.sum(2).tolist() == [[3, 0, 0], [3, 3, 3], [3, 3, 0]]
    assert torch.equal(F.jagged_dense_add(values, dense, offsets)[4], values[4])
    assert not F.jagged_dense_mul(values, dense, offsets)[4].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", ROW_LENGTHS)
def test_dense_arithmetic(lengths, dtype, offsets_of):
    offsets, b, longest = offsets_of(lengths), len(lengths), max([0, *lengths])
    x, y = torch.randn(sum(lengths), 3).to(DTYPES[dtype]), torch.randn(b, longest + 1, 3).to(DTYPES[dtype])

    def rows(y):
        return joined([block[:n] for block, n in zip(y, lengths)], y.flatten(0, 1)[:0])

    check_definition(lambda x, y: F.jagged_dense_add(x, y, offsets), lambda x, y: x + rows(y), dict(x=x, y=y))
    check_definition(lambda x, y: F.jagged_dense_mul(x, y, offsets), lambda x, y: x * rows(y), dict(x=x, y=y))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[[3, 0, 2]], [[3, 0, 2], [1, 4, 0]], [[0, 1], [2, 0], [0, 3]], [[0, 0], [0, 0]], [[], []]])
def test_concat(lengths, index, offsets_of):
    offsets = [offsets_of(x, index) for x in lengths]
    values = [torch.randn(sum(x), 2, 3) for x in lengths]
    expected = [rows for segment in zip(*(split(x, o) for x, o in zip(values, offsets))) for rows in segment]
    out, bounds = F.jagged_concat(values, offsets)
    assert torch.equal(out, joined(expected, values[0][:0]))
    assert bounds.dtype == index and bounds.tolist() == offsets_of(map(sum, zip(*lengths))).tolist()


@pytest.mark.parametrize("lengths, first", [([3, 0, 2], [1, 0, 2]), ([3, 4], 2), ([2, 1], [0, 0]), ([2, 1], [2, 1]), ([], []), ([], 3)])
def test_split(lengths, first, offsets_of):
    x, offsets = torch.randn(sum(lengths), 2), offsets_of(lengths, torch.int32)
    counts = [first] * len(lengths) if isinstance(first, int) else first
    (head, head_offsets), (tail, tail_offsets) = F.jagged_split(x, offsets, first if isinstance(first, int) else torch.tensor(first).long())
    parts = split(x, offsets)
    assert torch.equal(head, joined([rows[:n] for rows, n in zip(parts, counts)], x[:0]))
    assert torch.equal(tail, joined([rows[n:] for rows, n in zip(parts, counts)], x[:0]))
    assert head_offsets.diff().tolist() == counts and head_offsets.dtype == torch.int32
    assert torch.equal(head_offsets + tail_offsets, offsets)
    again, again_offsets = F.jagged_concat([head, tail], [head_offsets, tail_offsets])
    assert torch.equal(again, x) and torch.equal(again_offsets, offsets)


def test_gradcheck_of_rows(offsets_of):
    offsets, others = offsets_of([2, 0, 3]), offsets_of([1, 2, 0])
    x, z, dense = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 2), (3, 2), (3, 3, 2)))
    checks = [
        (lambda x: F.jagged_to_padded(x, offsets, 4, 1.5), [x]),
        (lambda dense: F.padded_to_jagged(dense, offsets), [dense]),
        (lambda x, dense: F.jagged_dense_mul(x, dense, offsets), [x, dense]),
        (lambda x, z: F.jagged_concat([x, z], [offsets, others])[0], [x, z]),
        (lambda x: F.jagged_split(x, offsets, torch.tensor([1, 0, 2]))[0][0], [x]),
        (lambda x: F.jagged_split(x, offsets, torch.tensor([1, 0, 2]))[1][0], [x]),
    ]
    for function, inputs in checks:
        assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(function, inputs)


# -- meta and fake tensors -------------------------------------------------------------------------------------------------------


def calls(offsets_of):
    """Every operator, of tensors alone."""
    offsets, plan = offsets_of([2, 0, 3]), F.ScorePlan.from_offsets(offsets_of([2, 0, 3]), offsets_of([4, 5, 1]))
    x, y, p = torch.randn(5, 4), torch.randn(3, 4, 6), torch.randn(plan.total)
    dense, rows, lengths = torch.randn(3, 3, 4), torch.randn(10, 4), torch.tensor([1, 0, 2])

    def moved(*bounds):
        return dataclasses.replace(plan, **dict(zip(("x_offsets", "y_offsets", "p_offsets"), bounds)))

    bounds = plan.offsets
    return {
        "jagged_dense_bmm": (F.jagged_dense_bmm, x, y, offsets),
        "jagged_jagged_bmm": (F.jagged_jagged_bmm, x, x[:, :2], offsets),
        "jagged_softmax": (F.jagged_softmax, x, offsets),
        "jagged_jagged_bmm_jagged_out": (lambda x, y, *o: F.jagged_jagged_bmm_jagged_out(x, y, moved(*o)), x, rows, *bounds),
        "array_jagged_bmm_jagged_out": (lambda p, y, *o: F.array_jagged_bmm_jagged_out(p, y, moved(*o)), p, rows, *bounds),
        "transposed": (lambda p, y, *o: F.array_jagged_bmm_jagged_out(p, y, moved(*o), transposed=True), p, x, *bounds),
        "jagged2_softmax": (lambda p, *o: F.jagged2_softmax(p, moved(*o)), p, *bounds),
        "jagged_linear": (lambda x, w, b, o: F.jagged_linear(x, w, b, o, "silu"), x, y, torch.randn(3, 6), offsets),
        "jagged_linear-shared": (F.jagged_linear, x, torch.randn(6, 4), torch.randn(6)),
        "jagged_layer_norm": (F.jagged_layer_norm, x),
        "jagged_dense_add": (F.jagged_dense_add, x, dense, offsets),
        "jagged_dense_mul": (F.jagged_dense_mul, x, dense, offsets),
        "jagged_concat": (lambda x, y, o: F.jagged_concat([x, y], [o, o]), x, x, offsets),
        "jagged_split": (lambda x, o, n: F.jagged_split(x, o, n, 3), x, offsets, lengths),
        "jagged_to_padded": (lambda x, o: F.jagged_to_padded(x, o, 4), x, offsets),
        "padded_to_jagged": (lambda x, o: F.padded_to_jagged(x, o, 5), dense, offsets),
    }


CALLS = [*calls(lambda lengths: torch.tensor([0, *lengths]).cumsum(0))]


def described(out):
    return [(tuple(x.shape), x.dtype) for x in torch.utils._pytree.tree_leaves(out)]


def test_every_operator_is_called():
    assert {name.split("-")[0] for name in CALLS} - {"transposed"} == {
        name for name in F.__all__ if name.startswith(("jagged", "array", "padded")) and name != "jagged_attention"
    }


@pytest.mark.parametrize("call", CALLS)
def test_meta_and_fake_tensors_agree_with_eager(call, conversions, offsets_of):
    function, *tensors = calls(offsets_of)[call]
    expected = described(function(*tensors))
    meta = function(*(x.to("meta") for x in tensors))
    assert described(meta) == expected and all(x.is_meta for x in torch.utils._pytree.tree_leaves(meta))
    with FakeTensorMode() as mode:
        assert described(function(*map(mode.from_tensor, tensors))) == expected


@pytest.mark.parametrize("call", CALLS)
def test_meta_and_fake_tensors_give_gradients_of_the_same_shapes(call, conversions, offsets_of):
    function, *tensors = calls(offsets_of)[call]

    def gradients(tensors):
        inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in tensors]
        out = next(x for x in torch.utils._pytree.tree_leaves(function(*inputs)) if x.requires_grad)
        return described(torch.autograd.grad(out.sum(), [x for x in inputs if x.requires_grad]))

    expected = gradients(tensors)
    assert gradients([x.to("meta") for x in tensors]) == expected
    with FakeTensorMode() as mode:
        assert gradients([mode.from_tensor(x) for x in tensors]) == expected


# -- bad input -------------------------------------------------------------------------------------------------------------------

X, Y, P, OFFSETS = torch.ones(6, 4), torch.ones(2, 4, 3), torch.ones(20), torch.tensor([0, 2, 6])
PLAN = F.ScorePlan.from_offsets(OFFSETS)  # 4 + 16 scores
DENSE, BIAS = torch.ones(2, 5, 4), torch.ones(2, 3)
META = torch.ones(6, 4, device="meta")
BAD_CALLS = [
    (F.jagged_dense_bmm, (None, Y, OFFSETS), TypeError, "x must be a torch.Tensor, got NoneType"),
    (F.jagged_dense_bmm, (X.long(), Y, OFFSETS), TypeError, "x must be float64, .* on cpu, got torch.int64"),
    (F.jagged_dense_bmm, (X[0], Y, OFFSETS), ValueError, r"x must have shape \[L, D\], got \[4\]"),
    (F.jagged_dense_bmm, (X, X, OFFSETS), ValueError, r"y must have shape \[B, D, T\], got \[6, 4\]"),
    (F.jagged_dense_bmm, (X, Y[:1], OFFSETS), ValueError, r"y must have shape \[B, D, T\] with B, D = \[2, 4\], got \[1, 4, 3\]"),
    (F.jagged_dense_bmm, (X, Y.mT, OFFSETS), ValueError, r"y must have shape .* = \[2, 4\], got \[2, 3, 4\]"),
    (F.jagged_dense_bmm, (X, Y.half(), OFFSETS), ValueError, "y must have x's dtype, torch.float32, got torch.float16"),
    (F.jagged_dense_bmm, (X, Y.to("meta"), OFFSETS), ValueError, "y must be on x's device, cpu, got meta"),
    (F.jagged_dense_bmm, (X, Y, None), TypeError, "offsets must be a torch.Tensor, got NoneType"),
    (F.jagged_dense_bmm, (X, Y, OFFSETS.float()), TypeError, "offsets must be int32 or int64, got torch.float32"),
    (F.jagged_dense_bmm, (X, Y, OFFSETS + 1), ValueError, "offsets must start at 0, got 1"),
    (F.jagged_dense_bmm, (X[1:], Y, OFFSETS), ValueError, "offsets must end at the number of rows, 5, got 6"),
    (F.jagged_dense_bmm, (X, Y, OFFSETS.to("meta")), ValueError, "offsets must be on x's device, cpu, or the host, got meta"),
    (F.jagged_jagged_bmm, (X, X[1:], OFFSETS), ValueError, "y must have x's rows, 6, got 5"),
    (F.jagged_softmax, (P, OFFSETS), ValueError, r"x must have shape \[L, H\], got \[20\]"),
    (F.jagged_softmax, (X, torch.tensor([0, 4, 2, 6])), ValueError, "offsets must not decrease, got 4 then 2 at segment 1"),
    (F.jagged_jagged_bmm_jagged_out, (X, X, OFFSETS), TypeError, "plan must be a ScorePlan, got Tensor"),
    (F.jagged_jagged_bmm_jagged_out, (X[1:], X, PLAN), ValueError, "x must have one entry for each of the plan's 6 x rows, got 5"),
    (F.jagged_jagged_bmm_jagged_out, (X, X[1:], PLAN), ValueError, "y must have one entry for each of the plan's 6 y rows, got 5"),
    (F.jagged_jagged_bmm_jagged_out, (X, X[:, 1:], PLAN), ValueError, "y must have x's width, 4, got 3"),
    (F.jagged_jagged_bmm_jagged_out, (X, X, PLAN.to("meta")), ValueError, "plan must be on x's device, cpu, .* got meta"),
    (F.array_jagged_bmm_jagged_out, (P[1:], X, PLAN), ValueError, "p must have one entry for each of the plan's 20 scores, got 19"),
    (F.array_jagged_bmm_jagged_out, (P, X[1:], PLAN), ValueError, "y must have one entry for each of the plan's 6 y rows, got 5"),
    (F.array_jagged_bmm_jagged_out, (X, X, PLAN), ValueError, r"p must have shape \[total\], got \[6, 4\]"),
    (F.jagged2_softmax, (P, None), TypeError, "plan must be a ScorePlan, got NoneType"),
    (F.jagged2_softmax, (P[:3], PLAN), ValueError, "p must have one entry for each of the plan's 20 scores, got 3"),
    (F.jagged2_softmax, (P, PLAN, 0), ValueError, r"dim must be -1 \(rows\) or -2 \(columns\), got 0"),
    (F.jagged_linear, (X, Y, None), TypeError, "offsets must be a torch.Tensor, got NoneType"),
    (F.jagged_linear, (X, Y[0].T, None, OFFSETS + 1), ValueError, "offsets must start at 0, got 1"),
    (F.jagged_linear, (X, Y[0], None), ValueError, r"weight must have shape \[T, D\] with x's D, 4, got \[4, 3\]"),
    (F.jagged_linear, (X, Y[0].T, X[0]), ValueError, r"bias must have shape \[T\] = \[3\], got \[4\]"),
    (F.jagged_linear, (X, Y, BIAS[:1], OFFSETS), ValueError, r"bias must have shape \[B, T\] = \[2, 3\], got \[1, 3\]"),
    (F.jagged_linear, (X, Y, BIAS[0], OFFSETS), ValueError, r"bias must have shape \[B, T\], got \[3\]"),
    (F.jagged_linear, (X, Y, BIAS.half(), OFFSETS), ValueError, "bias must have x's dtype, torch.float32, got torch.float16"),
    (F.jagged_linear, (X, Y, BIAS, OFFSETS, "softmax"), ValueError, "activation must be None or one of .*, got 'softmax'"),
    (F.jagged_linear, (X, Y, BIAS, OFFSETS, ["relu"]), ValueError, r"activation must be None or one of .*, got \['relu'\]"),
    (F.jagged_layer_norm, (X, X[0, 1:]), ValueError, r"weight must have shape \[D\] = \[4\], got \[3\]"),
    (F.jagged_layer_norm, (X, None, None, -1.0), ValueError, r"eps must be 0 to inf, got -1.0"),
    (F.jagged_layer_norm, (P,), ValueError, r"x must have shape \[L, D\], got \[20\]"),
    (F.jagged_dense_add, (X, DENSE[:, :3], OFFSETS), ValueError, "offsets has a segment of 4 rows, longer than y.s N = 3"),
    (F.jagged_dense_add, (X, DENSE[..., :3], OFFSETS), ValueError, r"y must have x's row shape, \[4\], got \[3\]"),
    (F.jagged_dense_mul, (X, DENSE.double(), OFFSETS), ValueError, "y must have x's dtype, torch.float32, got torch.float64"),
    (F.jagged_dense_mul, (X, DENSE[:1], OFFSETS), ValueError, r"y must have one block for each of the 2 segments, got \[1, 5, 4\]"),
    (F.jagged_dense_add, (META, DENSE[:, :1].to("meta"), OFFSETS.to("meta")), ValueError, "x's rows must be at most .* 2, got 6"),
    (F.jagged_concat, ([], []), ValueError, "values and offsets must be as many and at least one, got 0 and 0"),
    (F.jagged_concat, ([X, X], [OFFSETS]), ValueError, "values and offsets must be as many and at least one, got 2 and 1"),
    (F.jagged_concat, ([X, X[1:]], [OFFSETS, OFFSETS]), ValueError, r"offsets\[1\] must end at the number of rows, 5, got 6"),
    (F.jagged_concat, ([X, X[:, 1:]], [OFFSETS, OFFSETS]), ValueError, r"values\[1\] must have values\[0\]'s row shape, \[4\], got \[3\]"),
    (F.jagged_concat, ([X, X.half()], [OFFSETS] * 2), ValueError, r"values\[1\] must have values\[0\]'s dtype, torch.float32, got .*16"),
    (F.jagged_concat, ([X, X], [OFFSETS, OFFSETS[::2]]), ValueError, r"offsets\[1\] must have offsets\[0\]'s shape, \[3\], got \[2\]"),
    (F.jagged_split, (X, None, 2), TypeError, "offsets must be a torch.Tensor, got NoneType"),
    (F.jagged_split, (META, OFFSETS, 3), ValueError, "first_lengths must be 0 to the segment's length, got 3 of 2 at segment 0"),
    (F.jagged_split, (X, OFFSETS, 2.0), TypeError, "first_lengths must be an int, got float"),
    (F.jagged_split, (X, OFFSETS, -1), ValueError, "first_lengths must be at least 0, got -1"),
    (F.jagged_split, (X, OFFSETS, 3), ValueError, "first_lengths must be 0 to the segment's length, got 3 of 2 at segment 0"),
    (F.jagged_split, (X, OFFSETS, torch.tensor([0, -1])), ValueError, "first_lengths must be 0 to .*, got -1 of 4 at segment 1"),
    (F.jagged_split, (X, OFFSETS, torch.tensor([1])), ValueError, r"first_lengths must have shape \[B\] = \[2\], got \[1\]"),
    (F.jagged_split, (META, OFFSETS, OFFSETS[1:].to("meta"), 7), ValueError, "total_first must be at most x's rows, 6, got 7"),
    (F.jagged_split, (X, OFFSETS, torch.tensor([1, 1]), 3), ValueError, "total_first must be the sum of first_lengths, 2, got 3"),
    (F.jagged_split, (META, OFFSETS, OFFSETS[1:].to("meta")), ValueError, "total_first must be the sum of first_lengths where .* got None"),
    (F.jagged_to_padded, (X, OFFSETS, 3), ValueError, "offsets has a segment of 4 rows, longer than max_seqlen = 3"),
    (F.jagged_concat, (3, [OFFSETS]), TypeError, "values must be a sequence of tensors, got int"),
    (F.jagged_concat, ([X], OFFSETS), TypeError, "offsets must be a sequence of tensors, got Tensor"),
    (F.jagged_to_padded, (X, OFFSETS, 4, "0"), TypeError, "padding_value must be a number, got str"),
    (F.jagged_to_padded, (X, OFFSETS, 3.0), TypeError, "max_seqlen must be an int, got float"),
    (F.jagged_to_padded, (X[0, 0], OFFSETS, 4), ValueError, r"values must have shape \[L, ...\], got \[\]"),
    (F.jagged_to_padded, (OFFSETS.tolist(), OFFSETS, 4), TypeError, "values must be a torch.Tensor, got list"),
    (F.padded_to_jagged, (DENSE[:, :3], OFFSETS), ValueError, "offsets has a segment of 4 rows, longer than dense.s N = 3"),
    (F.padded_to_jagged, (DENSE, None, 6), TypeError, "offsets must be a torch.Tensor, got NoneType"),
    (F.padded_to_jagged, (DENSE, OFFSETS, 5), ValueError, "offsets must end at the number of rows, 5, got 6"),
    (F.padded_to_jagged, (DENSE.to("meta"), OFFSETS.to("meta")), ValueError, "total must be the number of rows where .* got None"),
    (F.padded_to_jagged, (X[:, 0], OFFSETS), ValueError, r"dense must have shape \[B, N, ...\], got \[6\]"),
    (F.ScorePlan.from_offsets, (None,), TypeError, "x_offsets must be a torch.Tensor, got NoneType"),
    (F.ScorePlan.from_offsets, (OFFSETS + 1,), ValueError, "x_offsets must start at 0, got 1"),
    (F.ScorePlan.from_offsets, (OFFSETS, OFFSETS[:2]), ValueError, "must describe the same number of segments, got 2 and 1"),
    (F.ScorePlan.from_offsets, (OFFSETS, OFFSETS.to("meta")), ValueError, r"y_offsets must be on the host, .*plan.to\(device\), got meta"),
]


def test_transposed_is_a_bool():
    plan = F.ScorePlan.from_offsets(OFFSETS)
    with pytest.raises(TypeError, match="transposed must be a bool, got str"):
        F.array_jagged_bmm_jagged_out(torch.ones(plan.total), torch.ones(plan.y_rows, 3), plan, transposed="no")


@pytest.mark.parametrize("function, arguments, error, message", BAD_CALLS, ids=[f"{f.__name__}-{m[:30]}" for f, _, _, m in BAD_CALLS])
def test_bad_input(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


@pytest.mark.parametrize("call", [name for name in CALLS if name.startswith(("jagged_dense_bmm", "jagged_jagged", "jagged_softmax"))])
def test_implementations(call, offsets_of):
    function, *tensors = calls(offsets_of)[call]
    if "out" in call:
        return
    with pytest.raises(ValueError, match="implementation must be one of .*, got 'cutlass'"):
        function(*tensors, implementation="cutlass")
    with pytest.raises(ValueError, match="float32, float16 or bfloat16 for .* with implementation='triton', got torch.float64"):
        function(*(x.double() if x.is_floating_point() else x for x in tensors), implementation="triton")


def test_torch_func_transforms(offsets_of):
    x, offsets = torch.randn(5, 2), offsets_of([2, 3])
    with pytest.raises(RuntimeError, match="torch.func transforms"):
        torch.func.grad(lambda x: F.jagged_softmax(x, offsets).sum())(x)
    torch.func.grad(lambda x: F.jagged_softmax(x, offsets, implementation="reference")[0].sum())(x)


def test_containers_of_split_rows(offsets_of):
    """Pairs, as every layer takes them."""
    (head, _), tail = F.jagged_split(torch.randn(5, 4), offsets_of([2, 3]), 1)
    assert head.shape == (2, 4) and jm.Jagged.wrap(tail).num_segments == 2


@pytest.mark.parametrize("call", [name for name in CALLS if name.startswith(("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax"))])
def test_a_stated_longest_segment(call, offsets_of):
    function, *tensors = calls(offsets_of)[call]
    if "out" in call:
        return
    longest = int(tensors[-1].diff().max())
    assert torch.equal(function(*tensors, max_seqlen=longest), function(*tensors))
    with pytest.raises(ValueError, match=f"offsets has a segment of {longest} rows, longer than max_seqlen = {longest - 1}"):
        function(*tensors, max_seqlen=longest - 1)
    with pytest.raises(TypeError, match="max_seqlen must be an int, got float"):
        function(*tensors, max_seqlen=4.0)
