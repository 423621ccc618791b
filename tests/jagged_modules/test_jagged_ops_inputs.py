"""Jagged operators and row operators: meta tensors, bad input, implementations."""

import dataclasses

import pytest
import torch
from marks import raising
from torch._subclasses.fake_tensor import FakeTensorMode

import jagged_modules as jm
from jagged_modules import functional as F


def calls(offsets_of):
    """Every operator, of tensors alone."""
    offsets = offsets_of([2, 0, 3])
    plan = F.ScorePlan.from_offsets(offsets_of([2, 0, 3]), offsets_of([4, 5, 1]))
    x, y, p = torch.randn(5, 4), torch.randn(3, 4, 6), torch.randn(plan.total)
    dense, rows, lengths = torch.randn(3, 3, 4), torch.randn(10, 4), torch.tensor([1, 0, 2])

    def moved(*bounds):
        return dataclasses.replace(
            plan, **dict(zip(("x_offsets", "y_offsets", "p_offsets"), bounds))
        )

    bounds = plan.offsets
    return {
        "jagged_dense_bmm": (F.jagged_dense_bmm, x, y, offsets),
        "jagged_jagged_bmm": (F.jagged_jagged_bmm, x, x[:, :2], offsets),
        "jagged_softmax": (F.jagged_softmax, x, offsets),
        "jagged_jagged_bmm_jagged_out": (
            lambda x, y, *o: F.jagged_jagged_bmm_jagged_out(x, y, moved(*o)),
            x,
            rows,
            *bounds,
        ),
        "array_jagged_bmm_jagged_out": (
            lambda p, y, *o: F.array_jagged_bmm_jagged_out(p, y, moved(*o)),
            p,
            rows,
            *bounds,
        ),
        "transposed": (
            lambda p, y, *o: F.array_jagged_bmm_jagged_out(p, y, moved(*o), transposed=True),
            p,
            x,
            *bounds,
        ),
        "jagged2_softmax": (lambda p, *o: F.jagged2_softmax(p, moved(*o)), p, *bounds),
        "jagged_linear": (
            lambda x, w, b, o: F.jagged_linear(x, w, b, o, "silu"),
            x,
            y,
            torch.randn(3, 6),
            offsets,
        ),
        "jagged_linear-shared": (F.jagged_linear, x, torch.randn(6, 4), torch.randn(6)),
        "jagged_layer_norm": (F.jagged_layer_norm, x),
        "jagged_dense_add": (F.jagged_dense_add, x, dense, offsets),
        "jagged_dense_mul": (F.jagged_dense_mul, x, dense, offsets),
        "jagged_concat": (lambda x, y, o: F.jagged_concat([x, y], [o, o]), x, x, offsets),
        "jagged_split": (lambda x, o, n: F.jagged_split(x, o, n, 3), x, offsets, lengths),
        "jagged_sum": (F.jagged_sum, x, offsets),
        "jagged_mean": (F.jagged_mean, x, offsets),
        "jagged_max": (F.jagged_max, x, offsets),
        "jagged_first": (lambda x, o: F.jagged_first(x, o, 0), x, offsets),
        "jagged_last": (lambda x, o: F.jagged_last(x, o, 0), x, offsets),
        "jagged_between": (
            lambda x, o, times: F.jagged_between(x, o, times=times, start=0),
            x,
            offsets,
            torch.arange(5),
        ),
        "jagged_select": (
            lambda x, o, i: F.jagged_select(x, o, i, 8),
            x,
            offsets,
            torch.tensor([2, 0, 2]),
        ),
        "jagged_to_padded": (lambda x, o: F.jagged_to_padded(x, o, 4), x, offsets),
        "padded_to_jagged": (lambda x, o: F.padded_to_jagged(x, o, 5), dense, offsets),
    }


CALLS = [*calls(lambda lengths: torch.tensor([0, *lengths]).cumsum(0))]


def described(out):
    return [(tuple(x.shape), x.dtype) for x in torch.utils._pytree.tree_leaves(out)]


def test_every_operator_is_called():
    assert {name.split("-")[0] for name in CALLS} - {"transposed"} == {
        name
        for name in F.__all__
        if name.startswith(("jagged", "array", "padded")) and name != "jagged_attention"
    }


@pytest.mark.parametrize("call", CALLS)
def test_meta_and_fake_tensors_agree_with_eager(call, conversions, offsets_of):
    function, *tensors = calls(offsets_of)[call]
    expected = described(function(*tensors))
    meta = function(*(x.to("meta") for x in tensors))
    assert described(meta) == expected and all(
        x.is_meta for x in torch.utils._pytree.tree_leaves(meta)
    )
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


# -- bad input -------------------------------------------------------------------------------------

X, Y, P, OFFSETS = torch.ones(6, 4), torch.ones(2, 4, 3), torch.ones(20), torch.tensor([0, 2, 6])
PLAN = F.ScorePlan.from_offsets(OFFSETS)  # 4 + 16 scores
DENSE, BIAS = torch.ones(2, 5, 4), torch.ones(2, 3)
META = torch.ones(6, 4, device="meta")
BAD_CALLS = [
    *raising(
        TypeError,
        {
            "x must be a torch.Tensor, got NoneType": (F.jagged_dense_bmm, (None, Y, OFFSETS)),
            "x must be float64, .* on cpu, got torch.int64": (
                F.jagged_dense_bmm,
                (X.long(), Y, OFFSETS),
            ),
            "offsets must be a torch.Tensor, got NoneType": (F.jagged_dense_bmm, (X, Y, None)),
            "offsets must be int32 or int64, got torch.float32": (
                F.jagged_dense_bmm,
                (X, Y, OFFSETS.float()),
            ),
            "plan must be a ScorePlan, got Tensor": (
                F.jagged_jagged_bmm_jagged_out,
                (X, X, OFFSETS),
            ),
            "plan must be a ScorePlan, got NoneType": (F.jagged2_softmax, (P, None)),
            "index must be a torch.Tensor, got list": (F.jagged_select, (X, OFFSETS, [0])),
            "first_lengths must be an int, got float": (F.jagged_split, (X, OFFSETS, 2.0)),
            "values must be a sequence of tensors, got int": (F.jagged_concat, (3, [OFFSETS])),
            "offsets must be a sequence of tensors, got Tensor": (F.jagged_concat, ([X], OFFSETS)),
            "padding_value must be a number, got str": (F.jagged_to_padded, (X, OFFSETS, 4, "0")),
            "max_seqlen must be an int, got float": (F.jagged_to_padded, (X, OFFSETS, 3.0)),
            "values must be a torch.Tensor, got list": (
                F.jagged_to_padded,
                (OFFSETS.tolist(), OFFSETS, 4),
            ),
            "x_offsets must be a torch.Tensor, got NoneType": (F.ScorePlan.from_offsets, (None,)),
        },
    ),
    *raising(
        ValueError,
        {
            r"x must have shape \[L, D\], got \[4\]": (F.jagged_dense_bmm, (X[0], Y, OFFSETS)),
            r"y must have shape \[B, D, T\], got \[6, 4\]": (F.jagged_dense_bmm, (X, X, OFFSETS)),
            r"y must have shape \[B, D, T\] with B, D = \[2, 4\], got \[1, 4, 3\]": (
                F.jagged_dense_bmm,
                (X, Y[:1], OFFSETS),
            ),
            r"y must have shape .* = \[2, 4\], got \[2, 3, 4\]": (
                F.jagged_dense_bmm,
                (X, Y.mT, OFFSETS),
            ),
            "y must have x's dtype, torch.float32, got torch.float16": (
                F.jagged_dense_bmm,
                (X, Y.half(), OFFSETS),
            ),
            "y must be on x's device, cpu, got meta": (
                F.jagged_dense_bmm,
                (X, Y.to("meta"), OFFSETS),
            ),
            "offsets must start at 0, got 1": (F.jagged_dense_bmm, (X, Y, OFFSETS + 1)),
            "offsets must end at the number of rows, 5, got 6": (
                F.jagged_dense_bmm,
                (X[1:], Y, OFFSETS),
            ),
            "offsets must be on x's device, cpu, or the host, got meta": (
                F.jagged_dense_bmm,
                (X, Y, OFFSETS.to("meta")),
            ),
            "y must have x's rows, 6, got 5": (F.jagged_jagged_bmm, (X, X[1:], OFFSETS)),
            r"x must have shape \[L, H\], got \[20\]": (F.jagged_softmax, (P, OFFSETS)),
            "offsets must not decrease, got 4 then 2 at segment 1": (
                F.jagged_softmax,
                (X, torch.tensor([0, 4, 2, 6])),
            ),
            "x must have one entry for each of the plan's 6 x rows, got 5": (
                F.jagged_jagged_bmm_jagged_out,
                (X[1:], X, PLAN),
            ),
            "y must have one entry for each of the plan's 6 y rows, got 5": (
                F.jagged_jagged_bmm_jagged_out,
                (X, X[1:], PLAN),
            ),
            "y must have x's width, 4, got 3": (
                F.jagged_jagged_bmm_jagged_out,
                (X, X[:, 1:], PLAN),
            ),
            "plan must be on x's device, cpu, .* got meta": (
                F.jagged_jagged_bmm_jagged_out,
                (X, X, PLAN.to("meta")),
            ),
            "p must have one entry for each of the plan's 20 scores, got 19": (
                F.array_jagged_bmm_jagged_out,
                (P[1:], X, PLAN),
            ),
            r"p must have shape \[total\], got \[6, 4\]": (
                F.array_jagged_bmm_jagged_out,
                (X, X, PLAN),
            ),
            "p must have one entry for each of the plan's 20 scores, got 3": (
                F.jagged2_softmax,
                (P[:3], PLAN),
            ),
            r"dim must be -1 \(rows\) or -2 \(columns\), got 0": (F.jagged2_softmax, (P, PLAN, 0)),
            r"dim must be -1 \(rows\) or -2 \(columns\), got tensor\(\[-1, -2\]\)": (
                F.jagged2_softmax,
                (P, PLAN, torch.tensor([-1, -2])),
            ),
            r"weight must have shape \[T, D\] with x's D, 4, got \[4, 3\]": (
                F.jagged_linear,
                (X, Y[0], None),
            ),
            r"bias must have shape \[T\] = \[3\], got \[4\]": (F.jagged_linear, (X, Y[0].T, X[0])),
            r"bias must have shape \[B, T\] = \[2, 3\], got \[1, 3\]": (
                F.jagged_linear,
                (X, Y, BIAS[:1], OFFSETS),
            ),
            r"bias must have shape \[B, T\], got \[3\]": (
                F.jagged_linear,
                (X, Y, BIAS[0], OFFSETS),
            ),
            "bias must have x's dtype, torch.float32, got torch.float16": (
                F.jagged_linear,
                (X, Y, BIAS.half(), OFFSETS),
            ),
            "activation must be None or one of .*, got 'softmax'": (
                F.jagged_linear,
                (X, Y, BIAS, OFFSETS, "softmax"),
            ),
            r"activation must be None or one of .*, got \['relu'\]": (
                F.jagged_linear,
                (X, Y, BIAS, OFFSETS, ["relu"]),
            ),
            r"weight must have shape \[D\] = \[4\], got \[3\]": (
                F.jagged_layer_norm,
                (X, X[0, 1:]),
            ),
            r"eps must be finite and at least 0, got -1.0": (
                F.jagged_layer_norm,
                (X, None, None, -1.0),
            ),
            r"x must have shape \[L, D\], got \[20\]": (F.jagged_layer_norm, (P,)),
            "offsets must have segments of at most y.s N = 3 rows, got 4": (
                F.jagged_dense_add,
                (X, DENSE[:, :3], OFFSETS),
            ),
            r"y must have x's row shape, \[4\], got \[3\]": (
                F.jagged_dense_add,
                (X, DENSE[..., :3], OFFSETS),
            ),
            "y must have x's dtype, torch.float32, got torch.float64": (
                F.jagged_dense_mul,
                (X, DENSE.double(), OFFSETS),
            ),
            r"y must have one block for each of the 2 segments, got \[1, 5, 4\]": (
                F.jagged_dense_mul,
                (X, DENSE[:1], OFFSETS),
            ),
            "values and offsets must have equal lengths, at least 1, got 0 and 0": (
                F.jagged_concat,
                ([], []),
            ),
            "values and offsets must have equal lengths, at least 1, got 2 and 1": (
                F.jagged_concat,
                ([X, X], [OFFSETS]),
            ),
            r"offsets\[1\] must end at the number of rows, 5, got 6": (
                F.jagged_concat,
                ([X, X[1:]], [OFFSETS, OFFSETS]),
            ),
            r"values\[1\] must have values\[0\]'s row shape, \[4\], got \[3\]": (
                F.jagged_concat,
                ([X, X[:, 1:]], [OFFSETS, OFFSETS]),
            ),
            r"values\[1\] must have values\[0\]'s dtype, torch.float32, got .*16": (
                F.jagged_concat,
                ([X, X.half()], [OFFSETS] * 2),
            ),
            r"offsets\[1\] must have offsets\[0\]'s shape, \[3\], got \[2\]": (
                F.jagged_concat,
                ([X, X], [OFFSETS, OFFSETS[::2]]),
            ),
            "index must be 0 to B - 1 = 1, got values 1 to 2": (
                F.jagged_select,
                (X, OFFSETS, torch.tensor([1, 2])),
            ),
            "total must be at least the sum of lengths, 2, got 1": (
                F.jagged_select,
                (X, OFFSETS, torch.tensor([0]), 1),
            ),
            "total must be the number of rows of the result .* got None": (
                F.jagged_select,
                (X.to("meta"), OFFSETS.to("meta"), torch.tensor([0])),
            ),
            "first_lengths must be 0 to the segment's length, got 3 of 2 at segment 0": (
                F.jagged_split,
                (META, OFFSETS, 3),
            ),
            "first_lengths must be at least 0, got -1": (F.jagged_split, (X, OFFSETS, -1)),
            "first_lengths must be 0 to .*, got -1 of 4 at segment 1": (
                F.jagged_split,
                (X, OFFSETS, torch.tensor([0, -1])),
            ),
            "total_first must be the sum of first_lengths, 2, got 3": (
                F.jagged_split,
                (X, OFFSETS, 1, 3),
            ),
            r"first_lengths must have shape \[B\] = \[2\], got \[1\]": (
                F.jagged_split,
                (X, OFFSETS, torch.tensor([1])),
            ),
            "total_first must be at most x's rows, 6, got 7": (
                F.jagged_split,
                (META, OFFSETS, OFFSETS[1:].to("meta"), 7),
            ),
            "total_first must be the sum of first_lengths if .* got None": (
                F.jagged_split,
                (META, OFFSETS, OFFSETS[1:].to("meta")),
            ),
            "offsets must have segments of at most max_seqlen = 3 rows, got 4": (
                F.jagged_to_padded,
                (X, OFFSETS, 3),
            ),
            "padding_value must be 0 to 255 for values of torch.uint8, got -1": (
                F.jagged_to_padded,
                (X.to(torch.uint8), OFFSETS, 4, -1),
            ),
            "padding_value must be -65504.0 to 65504.0 for values of torch.float16, got 1000000": (
                F.jagged_to_padded,
                (X.half(), OFFSETS, 4, 10**6),
            ),
            "empty must be -128 to 127 for x of torch.int8, got 1000000000000": (
                F.jagged_max,
                (X.to(torch.int8), OFFSETS, 10**12),
            ),
            "padding_value must be an integer for values of torch.int64, got 0.5": (
                F.jagged_to_padded,
                (X.long(), OFFSETS, 4, 0.5),
            ),
            r"values must have shape \[L, ...\], got \[\]": (
                F.jagged_to_padded,
                (X[0, 0], OFFSETS, 4),
            ),
            "offsets must have segments of at most dense.s N = 3 rows, got 4": (
                F.padded_to_jagged,
                (DENSE[:, :3], OFFSETS),
            ),
            "total must be the number of rows if .* got None": (
                F.padded_to_jagged,
                (DENSE.to("meta"), OFFSETS.to("meta")),
            ),
            r"dense must have shape \[B, N, ...\], got \[6\]": (
                F.padded_to_jagged,
                (X[:, 0], OFFSETS),
            ),
            "x_offsets must start at 0, got 1": (F.ScorePlan.from_offsets, (OFFSETS + 1,)),
            "must describe the same number of segments, got 2 and 1": (
                F.ScorePlan.from_offsets,
                (OFFSETS, OFFSETS[:2]),
            ),
            r"y_offsets must be on the host, .*plan.to\(device\), got meta": (
                F.ScorePlan.from_offsets,
                (OFFSETS, OFFSETS.to("meta")),
            ),
        },
    ),
    (
        F.array_jagged_bmm_jagged_out,
        (P, X[1:], PLAN),
        ValueError,
        "y must have one entry for each of the plan's 6 y rows, got 5",
    ),
    (F.jagged_linear, (X, Y, None), TypeError, "offsets must be a torch.Tensor, got NoneType"),
    (F.jagged_linear, (X, Y[0].T, None, OFFSETS + 1), ValueError, "offsets must start at 0, got 1"),
    (F.jagged_split, (X, None, 2), TypeError, "offsets must be a torch.Tensor, got NoneType"),
    (
        F.jagged_split,
        (X, OFFSETS, 3),
        ValueError,
        "first_lengths must be 0 to the segment's length, got 3 of 2 at segment 0",
    ),
    (
        F.jagged_split,
        (X, OFFSETS, torch.tensor([1, 1]), 3),
        ValueError,
        "total_first must be the sum of first_lengths, 2, got 3",
    ),
    (
        F.padded_to_jagged,
        (DENSE, None, 6),
        TypeError,
        "offsets must be a torch.Tensor, got NoneType",
    ),
    (
        F.padded_to_jagged,
        (DENSE, OFFSETS, 5),
        ValueError,
        "offsets must end at the number of rows, 5, got 6",
    ),
]


def test_transposed_is_a_bool():
    plan = F.ScorePlan.from_offsets(OFFSETS)
    with pytest.raises(TypeError, match="transposed must be a bool, got str"):
        F.array_jagged_bmm_jagged_out(
            torch.ones(plan.total), torch.ones(plan.y_rows, 3), plan, transposed="no"
        )


@pytest.mark.parametrize(
    "function, arguments, error, message",
    BAD_CALLS,
    ids=[f"{f.__name__}-{m[:30]}" for f, _, _, m in BAD_CALLS],
)
def test_bad_input(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


@pytest.mark.parametrize(
    "call",
    [
        name
        for name in CALLS
        if name.startswith(("jagged_dense_bmm", "jagged_jagged", "jagged_softmax"))
    ],
)
def test_implementations(call, offsets_of):
    function, *tensors = calls(offsets_of)[call]
    if "out" in call:
        return
    with pytest.raises(ValueError, match="implementation must be one of .*, got 'cutlass'"):
        function(*tensors, implementation="cutlass")
    with pytest.raises(
        ValueError,
        match="float32, float16 or bfloat16 for .* with implementation='triton', got torch.float64",
    ):
        function(
            *(x.double() if x.is_floating_point() else x for x in tensors), implementation="triton"
        )


def test_torch_func_transforms(offsets_of):
    x, offsets = torch.randn(5, 2), offsets_of([2, 3])
    with pytest.raises(RuntimeError, match="torch.func transforms"):
        torch.func.grad(lambda x: F.jagged_softmax(x, offsets).sum())(x)
    torch.func.grad(lambda x: F.jagged_softmax(x, offsets, implementation="reference")[0].sum())(x)


def test_containers_of_split_rows(offsets_of):
    """They are pairs, which every layer accepts."""
    (head, _), tail = F.jagged_split(torch.randn(5, 4), offsets_of([2, 3]), 1)
    assert head.shape == (2, 4) and jm.Jagged.wrap(tail).num_segments == 2


@pytest.mark.parametrize(
    "call",
    [
        name
        for name in CALLS
        if name.startswith(("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax"))
    ],
)
def test_a_stated_longest_segment(call, offsets_of):
    function, *tensors = calls(offsets_of)[call]
    if "out" in call:
        return
    longest = int(tensors[-1].diff().max())
    assert torch.equal(function(*tensors, max_seqlen=longest), function(*tensors))
    with pytest.raises(
        ValueError,
        match=(
            f"offsets must have segments of at most max_seqlen = {longest - 1} rows, got {longest}"
        ),
    ):
        function(*tensors, max_seqlen=longest - 1)
    with pytest.raises(TypeError, match="max_seqlen must be an int, got float"):
        function(*tensors, max_seqlen=4.0)
