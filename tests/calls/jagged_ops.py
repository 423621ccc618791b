"""Calls of jagged matrix multiplication and softmax."""

from __future__ import annotations

from collections.abc import Callable

import accuracy
import torch
from accuracy.activations import activated
from torch import Tensor

from jagged_modules import functional as F

from .maker import Call, Maker, offsets_of


def jagged_dense_bmm(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    y = make.tensor(len(lengths), o["depth"], o["columns"], factor=o["depth"] ** -0.5)
    tensors = dict(x=make.tensor(sum(lengths), o["depth"]), y=y)
    offsets = make.offsets("offsets", lengths)
    options = dict(max_seqlen=make.max_seqlen(lengths), implementation=o["implementation"])
    rows = make.segments(lengths)
    return Call(
        tensors,
        lambda x, y: dict(out=F.jagged_dense_bmm(x, y, offsets, **options)),
        lambda inputs, gradients: accuracy.jagged_dense_bmm(
            *inputs.values(), offsets_of(lengths), gradients["out"]
        ),
        dict(x=rows, out=rows, y=torch.arange(len(lengths), device=make.device)),
        frozenset(("x", "out")),
    )


def jagged_jagged_bmm(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    tensors = dict(
        x=make.tensor(sum(lengths), o["depth"]), y=make.tensor(sum(lengths), o["columns"])
    )
    offsets = make.offsets("offsets", lengths)
    options = dict(max_seqlen=make.max_seqlen(lengths), implementation=o["implementation"])
    rows = make.segments(lengths)
    return Call(
        tensors,
        lambda x, y: dict(out=F.jagged_jagged_bmm(x, y, offsets, **options)),
        lambda inputs, gradients: accuracy.jagged_jagged_bmm(
            *inputs.values(), offsets_of(lengths), gradients["out"]
        ),
        dict(x=rows, y=rows, out=torch.arange(len(lengths), device=make.device)),
        frozenset("xy"),
    )


def reduction(name: str) -> Callable:
    """Of `jagged_sum` and `jagged_mean`, whose model is that of a product with ones."""

    def build(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
        (lengths,) = lengths
        options = dict(max_seqlen=make.max_seqlen(lengths), implementation=o["implementation"])
        offsets, rows = make.offsets("offsets", lengths), make.segments(lengths)

        def model(inputs, gradients):
            x, do = inputs["x"], gradients["out"]
            ones = x.new_ones(x.shape[0], 1)
            if name == "jagged_sum":
                bounds = accuracy.jagged_jagged_bmm(ones, x, offsets_of(lengths), do[:, None])
                return dict(out=bounds["out"].map(lambda t: t[:, 0]), dx=bounds["dy"])
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            counts = torch.tensor(lengths, device=x.device).clamp(min=1).double()[:, None]
            ones = ones.to(wide.dtype)
            grads = do.double() / counts
            bounds = accuracy.jagged_jagged_bmm(ones, wide, offsets_of(lengths), grads[:, None])
            sums, dx = bounds["out"].map(lambda t: t[:, 0]), bounds["dy"].off_by(1)
            out = sums / accuracy.Bound.exact(counts.expand_as(sums.value))
            return dict(out=out.rounded(x.dtype), dx=dx.rounded(x.dtype))

        return Call(
            dict(x=make.tensor(sum(lengths), o["columns"])),
            lambda x: dict(out=getattr(F, name)(x, offsets, **options)),
            model,
            dict(x=rows, out=torch.arange(len(lengths), device=make.device)),
            frozenset("x"),
        )

    return build


def jagged_softmax(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    offsets = make.offsets("offsets", lengths)
    options = dict(max_seqlen=make.max_seqlen(lengths), implementation=o["implementation"])
    return Call(
        dict(x=make.tensor(sum(lengths), o["columns"], factor=3)),
        lambda x: dict(out=F.jagged_softmax(x, offsets, **options)),
        lambda inputs, gradients: accuracy.jagged_softmax(
            inputs["x"], offsets_of(lengths), gradients["out"]
        ),
        dict.fromkeys(("x", "out"), make.segments(lengths)),
        frozenset(("x", "out")),
    )


def _scores(make: Maker, x_lengths: list[int], y_lengths: list[int]) -> tuple[F.ScorePlan, Tensor]:
    """The plan for x and y, and the segment of each score."""
    return make.plan(x_lengths, y_lengths), make.segments(
        [n * m for n, m in zip(x_lengths, y_lengths)]
    )


def jagged2_softmax(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    plan, segments = _scores(make, *lengths)
    return Call(
        dict(p=make.tensor(plan.total, factor=3)),
        lambda p: dict(
            out=F.jagged2_softmax(p, plan, o["dim"], implementation=o["implementation"])
        ),
        lambda inputs, gradients: accuracy.jagged2_softmax(
            inputs["p"], *plan.offsets, gradients["out"], dim=o["dim"]
        ),
        dict.fromkeys(("p", "out"), segments),
    )


def jagged_outer(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    x_lengths, y_lengths = lengths if len(lengths) > 1 else lengths * 2
    itself = o["operands"] == "itself"
    plan = make.plan(x_lengths, None if itself else y_lengths)
    segments = _scores(make, x_lengths, y_lengths)[1]
    tensors = dict(x=make.tensor(plan.x_rows, o["depth"])) | (
        {} if itself else dict(y=make.tensor(plan.y_rows, o["depth"]))
    )

    def function(x, y=None):
        return dict(
            out=F.jagged_jagged_bmm_jagged_out(
                x, x if itself else y, plan, implementation=o["implementation"]
            )
        )

    def model(inputs, gradients):
        x, do = inputs["x"], gradients["out"]
        if itself and make.case.device != "cpu":
            return accuracy.jagged_gram(x, plan.x_offsets, plan.p_offsets, do)
        bounds = accuracy.jagged_outer(x, inputs.get("y", x), *plan.offsets, do)
        return bounds | (dict(dx=(bounds["dx"] + bounds["dy"]).rounded(x.dtype)) if itself else {})

    return Call(
        tensors,
        function,
        model,
        dict(x=make.segments(x_lengths), y=make.segments(y_lengths), out=segments),
    )


def array_jagged_bmm(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    x_lengths, y_lengths = lengths
    plan, segments = _scores(make, x_lengths, y_lengths)
    rows = [make.segments(side) for side in lengths]
    of_y, of_out = rows if o["transposed"] else rows[::-1]
    options = dict(transposed=o["transposed"])
    return Call(
        dict(p=make.tensor(plan.total), y=make.tensor(len(of_y), o["depth"])),
        lambda p, y: dict(
            out=F.array_jagged_bmm_jagged_out(
                p, y, plan, implementation=o["implementation"], **options
            )
        ),
        lambda inputs, gradients: accuracy.array_jagged_bmm(
            *inputs.values(), *plan.offsets, gradients["out"], **options
        ),
        dict(p=segments, y=of_y, out=of_out),
    )


def shared_linear(
    x: Tensor, weight: Tensor, bias: list[Tensor], do: Tensor, activation: str | None
) -> dict[str, accuracy.Bound]:
    """Bounds of torch's own matrix multiplication, and of an activation of its rounded result."""
    exact, dtype = accuracy.Bound.exact, x.dtype
    z = accuracy.torch_matmul(exact(x), exact(weight).mT, x).rounded(dtype)
    if bias:
        z = (z + exact(bias[0]).map(lambda b: b.expand_as(z.value))).rounded(dtype)
    out, grad = z, exact(do)
    if activation is not None:
        out, dact = activated(z, activation)
        out = out.rounded(dtype)
        if activation == "sigmoid":  # torch computes its derivative from the result
            dact = out * (exact(torch.ones_like(do)) - out)
        grad = (dact * grad).rounded(dtype)
    dx, dweight = (
        accuracy.torch_matmul(a, b, x).rounded(dtype)
        for a, b in ((grad, exact(weight)), (grad.mT, exact(x)))
    )
    bounds = dict(out=out, dx=dx, dweight=dweight)
    return bounds | (dict(dbias=grad.sum(0).rounded(dtype)) if bias else {})


def jagged_linear(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    shared, factor = o["weights"] == "shared", o["depth"] ** -0.5
    shape = (o["columns"], o["depth"]) if shared else (len(lengths), o["depth"], o["columns"])
    tensors = dict(
        x=make.tensor(sum(lengths), o["depth"]), weight=make.tensor(*shape, factor=factor)
    )
    if o["bias"]:
        tensors["bias"] = make.tensor(*shape[:1] if shared else shape[::2])
    offsets = make.offsets("offsets", lengths)
    options = dict(
        activation=o["activation"],
        max_seqlen=make.max_seqlen(lengths),
        implementation=o["implementation"],
    )

    def function(x, weight, bias=None):
        return dict(out=F.jagged_linear(x, weight, bias, offsets, **options))

    def model(inputs, gradients):
        x, weight, *bias = inputs.values()
        if shared:
            return shared_linear(x, weight, bias, gradients["out"], o["activation"])
        flags = dict(bias=bias[0] if bias else None, activation=o["activation"])
        bounds = accuracy.jagged_dense_bmm(
            x, weight, offsets_of(lengths), gradients["out"], **flags
        )
        return bounds | dict(dweight=bounds["dy"])

    rows, segments = make.segments(lengths), torch.arange(len(lengths), device=make.device)
    owners = dict(x=rows, out=rows) | ({} if shared else dict(weight=segments, bias=segments))
    return Call(tensors, function, model, owners, frozenset(("x", "out")))
