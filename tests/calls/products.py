"""Calls of linear compression, and of jagged matrix multiplication and softmax."""

from __future__ import annotations

import accuracy
import torch
from accuracy.activations import activated
from torch import Tensor

import jagged_modules as jm
from jagged_modules import functional as F

from .maker import Call, Maker


def _replicated(weights: list[Tensor], embeddings: list[Tensor], maps: list[Tensor], do: Tensor) -> dict[str, accuracy.Bound]:
    """Bounds with all levels replicated to the candidates and one GEMM: a shared level's gradients are sums over its copies."""
    maps = [*maps, torch.arange(len(do), device=do.device)]
    copies = torch.cat([x[index] for x, index in zip(embeddings, maps)], 1)
    bounds = accuracy.linear_compress([torch.cat(weights, 1)], [copies], [], do, arithmetic=accuracy.KERNELS._replace(torch_products=True))
    results, start = dict(out=bounds["out"]), 0
    for level, (weight, embedding, index) in enumerate(zip(weights, embeddings, maps)):
        rows = slice(start, start + weight.shape[1])
        start = rows.stop
        results[f"dw{level}"] = bounds["dweights[0]"].map(lambda x, rows=rows: x[:, rows])
        terms = bounds["dembeddings[0]"].map(lambda x, rows=rows: x[:, rows])

        def total(x: Tensor, like: Tensor = embedding, index: Tensor = index) -> Tensor:
            return torch.zeros(like.shape, dtype=x.dtype, device=x.device).index_add_(0, index, x)

        sums = terms._replace(value=total(terms.value), error=total(terms.error), rms=total(terms.rms**2).sqrt())
        count = index.bincount(minlength=len(embedding))[:, None, None]
        results[f"de{level}"] = sums.summed(count, total(terms.value.abs()), total(terms.value**2)).rounded(do.dtype)
    return results


def linear_compress(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    """Levels are users, vendors and candidates; each user has as many candidates as a segment is long."""
    (counts,) = lengths
    users = make.segments(counts)
    if o["index"] == "shuffled map":
        users = users[torch.randperm(len(users), generator=make.generator, device=make.device)]
    num_vendors = len(counts) // 2 + 1
    batches = [len(counts), num_vendors, len(users)][-o["levels"] :] if o["levels"] != 2 else [len(counts), len(users)]
    maps = [users, make.integers(0, num_vendors, len(users))][: o["levels"] - 1]
    indices = [x.int() for x in maps] if o["index"] == "int32 map" else list(maps)
    if o["index"] == "counts" and indices:
        indices[0] = jm.CandidateIndex.from_counts(torch.tensor(counts, dtype=torch.int64))
    levels, depths = range(o["levels"]), o["depths"]
    implementation = o["implementation"] if len(users) else "auto"  # "hopper" raises an error for empty embeddings
    arithmetic = accuracy.TORCH_CPU if implementation in ("decomposed", "padded") else None  # whose levels are rounded one by one
    weights = {f"w{i}": make.tensor(o["compressed"], depths[i], factor=depths[i] ** -0.5) for i in levels}
    embeddings = {f"e{i}": make.tensor(batches[i], depths[i], o["columns"]) for i in levels}

    def function(**inputs):
        tensors = list(inputs.values())
        return dict(out=F.linear_compress(tensors[: o["levels"]], tensors[o["levels"] :], indices or None, implementation=implementation))

    def model(inputs, gradients):
        tensors = list(inputs.values())
        if implementation == "reference":
            return _replicated(tensors[: o["levels"]], tensors[o["levels"] :], maps, gradients["out"])
        bounds = accuracy.linear_compress(tensors[: o["levels"]], tensors[o["levels"] :], maps, gradients["out"], arithmetic=arithmetic)
        names = {f"dweights[{i}]": f"dw{i}" for i in levels} | {f"dembeddings[{i}]": f"de{i}" for i in levels}
        return {names.get(name, name): bound for name, bound in bounds.items()}

    rows = users if o["levels"] > 1 else torch.arange(len(users), device=make.device)
    segments = {"out": rows, f"e{levels[-1]}": rows} | (dict(e0=torch.arange(len(counts), device=make.device)) if o["levels"] > 1 else {})
    return Call(weights | embeddings, function, model, segments)


# -- products and softmaxes ----------------------------------------------------------------------------------------------------------


def jagged_dense_bmm(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    y = make.tensor(len(lengths), o["depth"], o["columns"], factor=o["depth"] ** -0.5)
    tensors = dict(x=make.tensor(sum(lengths), o["depth"]), y=y)
    offsets, options = make.offsets(lengths), dict(max_seqlen=make.max_seqlen(lengths), implementation=o["implementation"])
    rows = make.segments(lengths)
    return Call(
        tensors,
        lambda x, y: dict(out=F.jagged_dense_bmm(x, y, offsets, **options)),
        lambda inputs, gradients: accuracy.jagged_dense_bmm(*inputs.values(), offsets, gradients["out"]),
        dict(x=rows, out=rows, y=torch.arange(len(lengths), device=make.device)),
    )


def jagged_jagged_bmm(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    tensors = dict(x=make.tensor(sum(lengths), o["depth"]), y=make.tensor(sum(lengths), o["columns"]))
    offsets, options = make.offsets(lengths), dict(max_seqlen=make.max_seqlen(lengths), implementation=o["implementation"])
    rows = make.segments(lengths)
    return Call(
        tensors,
        lambda x, y: dict(out=F.jagged_jagged_bmm(x, y, offsets, **options)),
        lambda inputs, gradients: accuracy.jagged_jagged_bmm(*inputs.values(), offsets, gradients["out"]),
        dict(x=rows, y=rows, out=torch.arange(len(lengths), device=make.device)),
    )


def jagged_softmax(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    offsets, options = make.offsets(lengths), dict(max_seqlen=make.max_seqlen(lengths), implementation=o["implementation"])
    return Call(
        dict(x=make.tensor(sum(lengths), o["columns"], factor=3)),
        lambda x: dict(out=F.jagged_softmax(x, offsets, **options)),
        lambda inputs, gradients: accuracy.jagged_softmax(inputs["x"], offsets, gradients["out"]),
        dict.fromkeys(("x", "out"), make.segments(lengths)),
    )


def _scores(make: Maker, x_lengths: list[int], y_lengths: list[int]) -> tuple[F.ScorePlan, Tensor]:
    """The plan for x and y, and the segment of each score."""
    return make.plan(x_lengths, y_lengths), make.segments([n * m for n, m in zip(x_lengths, y_lengths)])


def jagged2_softmax(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    plan, segments = _scores(make, *lengths)
    return Call(
        dict(p=make.tensor(plan.total, factor=3)),
        lambda p: dict(out=F.jagged2_softmax(p, plan, o["dim"], implementation=o["implementation"])),
        lambda inputs, gradients: accuracy.jagged2_softmax(inputs["p"], *plan.offsets, gradients["out"], dim=o["dim"]),
        dict.fromkeys(("p", "out"), segments),
    )


def jagged_outer(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    x_lengths, y_lengths = lengths if len(lengths) > 1 else lengths * 2
    itself = o["operands"] == "itself"
    plan, segments = make.plan(x_lengths, None if itself else y_lengths), _scores(make, x_lengths, y_lengths)[1]
    tensors = dict(x=make.tensor(plan.x_rows, o["depth"])) | ({} if itself else dict(y=make.tensor(plan.y_rows, o["depth"])))

    def function(x, y=None):
        return dict(out=F.jagged_jagged_bmm_jagged_out(x, x if itself else y, plan, implementation=o["implementation"]))

    def model(inputs, gradients):
        x, do = inputs["x"], gradients["out"]
        if itself and make.case.device != "cpu":
            return accuracy.jagged_gram(x, plan.x_offsets, plan.p_offsets, do)
        bounds = accuracy.jagged_outer(x, inputs.get("y", x), *plan.offsets, do)
        return bounds | (dict(dx=(bounds["dx"] + bounds["dy"]).rounded(x.dtype)) if itself else {})

    return Call(tensors, function, model, dict(x=make.segments(x_lengths), y=make.segments(y_lengths), out=segments))


def array_jagged_bmm(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    x_lengths, y_lengths = lengths
    plan, segments = _scores(make, x_lengths, y_lengths)
    rows = [make.segments(side) for side in lengths]
    of_y, of_out = rows if o["transposed"] else rows[::-1]
    options = dict(transposed=o["transposed"])
    return Call(
        dict(p=make.tensor(plan.total), y=make.tensor(len(of_y), o["depth"])),
        lambda p, y: dict(out=F.array_jagged_bmm_jagged_out(p, y, plan, implementation=o["implementation"], **options)),
        lambda inputs, gradients: accuracy.array_jagged_bmm(*inputs.values(), *plan.offsets, gradients["out"], **options),
        dict(p=segments, y=of_y, out=of_out),
    )


def _linear(x: Tensor, weight: Tensor, bias: list[Tensor], do: Tensor, activation: str | None) -> dict[str, accuracy.Bound]:
    """Bounds of torch's own matrix multiplication, and of an activation of its rounded result."""
    exact, dtype = accuracy.Bound.exact, x.dtype
    z = accuracy.torch_product(exact(x), exact(weight).mT, x).rounded(dtype)
    if bias:
        z = (z + exact(bias[0]).map(lambda b: b.expand_as(z.value))).rounded(dtype)
    out, grad = z, exact(do)
    if activation is not None:
        out, slope = activated(z, activation)
        out = out.rounded(dtype)
        if activation == "sigmoid":  # whose derivative torch makes from the result
            slope = out * (exact(torch.ones_like(do)) - out)
        grad = (slope * grad).rounded(dtype)
    dx, dweight = (accuracy.torch_product(a, b, x).rounded(dtype) for a, b in ((grad, exact(weight)), (grad.mT, exact(x))))
    bounds = dict(out=out, dx=dx, dweight=dweight)
    return bounds | (dict(dbias=grad.sum(0).rounded(dtype)) if bias else {})


def jagged_linear(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    shared, factor = o["weights"] == "shared", o["depth"] ** -0.5
    shape = (o["columns"], o["depth"]) if shared else (len(lengths), o["depth"], o["columns"])
    tensors = dict(x=make.tensor(sum(lengths), o["depth"]), weight=make.tensor(*shape, factor=factor))
    if o["bias"]:
        tensors["bias"] = make.tensor(*shape[:1] if shared else shape[::2])
    offsets = make.offsets(lengths)
    options = dict(activation=o["activation"], max_seqlen=make.max_seqlen(lengths), implementation=o["implementation"])

    def function(x, weight, bias=None):
        return dict(out=F.jagged_linear(x, weight, bias, offsets, **options))

    def model(inputs, gradients):
        x, weight, *bias = inputs.values()
        if shared:
            return _linear(x, weight, bias, gradients["out"], o["activation"])
        flags = dict(bias=bias[0] if bias else None, activation=o["activation"])
        bounds = accuracy.jagged_dense_bmm(x, weight, offsets, gradients["out"], **flags)
        return bounds | dict(dweight=bounds["dy"])

    rows, segments = make.segments(lengths), torch.arange(len(lengths), device=make.device)
    return Call(tensors, function, model, dict(x=rows, out=rows) | ({} if shared else dict(weight=segments, bias=segments)))
