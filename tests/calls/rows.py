"""Calls of functions that move or change rows."""

from __future__ import annotations

from collections.abc import Callable

import accuracy
import torch
from torch import Tensor

from jagged_modules import functional as F

from .maker import Call, Maker, offsets_of


def dense(name: str) -> Callable:
    def build(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
        (lengths,) = lengths
        offsets, width, index, rows = _padding(make, o, lengths)
        y = make.tensor(len(lengths), width, o["columns"])

        def model(inputs, gradients):
            x, y, do = inputs["x"], inputs["y"], gradients["out"]
            x, taken, do = (accuracy.Bound.exact(t) for t in (x, y.flatten(0, 1)[index], do))
            multiplies = name == "jagged_dense_mul"
            out, dx, dtaken = (x * taken, do * taken, do * x) if multiplies else (x + taken, do, do)

            def in_blocks(part: Tensor) -> Tensor:
                blocks = part.new_zeros((len(lengths) * width, o["columns"]))
                blocks[index] = part
                return blocks.unflatten(0, (len(lengths), width))

            bounds = dict(out=out, dx=dx, dy=dtaken.map(in_blocks))
            return {key: bound.rounded(y.dtype) for key, bound in bounds.items()}

        return Call(
            dict(x=make.tensor(sum(lengths), o["columns"]), y=y),
            lambda x, y: dict(out=getattr(F, name)(x, y, offsets)),
            model,
            dict(x=rows, out=rows, y=torch.arange(len(lengths), device=make.device)),
            frozenset(("x", "out")),
        )

    return build


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, do: Tensor, eps: float
) -> dict[str, accuracy.Bound]:
    """n = (x - mean) / sqrt(variance + eps), out = n ∘ w + b;  dx = (g - mean(g) - n ∘ mean(g ∘ n))
    / sqrt(variance + eps), g = do ∘ w."""
    exact, dtype = accuracy.Bound.exact, x.dtype
    size = x.shape[1]

    def mean(t: accuracy.Bound) -> accuracy.Bound:
        return t.sum(1).scaled(1 / size).map(lambda y: y[:, None])

    centred = exact(x) - mean(exact(x))
    variance = mean(centred * centred)
    deviation = (variance.value + eps).sqrt()
    deviation = variance._replace(
        value=deviation, error=variance.error / (2 * deviation), rms=variance.rms / (2 * deviation)
    ).off_by(3)
    normal, grad = centred / deviation, exact(do)
    out, g = normal, grad
    if weight is not None:
        w = exact(weight).map(lambda y: y.expand_as(x))
        out, g = normal * w, grad * w
    if bias is not None:
        out = out + exact(bias).map(lambda y: y.expand_as(x))
    bounds = dict(
        out=out,
        dx=(g - mean(g) - normal * mean(g * normal)) / deviation,
        dweight=(grad * normal).sum(0),
        dbias=grad.sum(0),
    )
    return {name: bound.rounded(dtype) for name, bound in bounds.items()}


def jagged_layer_norm(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    tensors = dict(x=make.tensor(sum(lengths[0]), o["columns"]))
    tensors |= {
        name: make.tensor(o["columns"])
        for name in ("weight", "bias")
        if o["affine"] in ("both", name)
    }
    rows = make.segments(lengths[0])

    def model(inputs, gradients):
        return _layer_norm(
            inputs["x"], inputs.get("weight"), inputs.get("bias"), gradients["out"], o["eps"]
        )

    return Call(
        tensors,
        lambda **inputs: dict(out=F.jagged_layer_norm(**inputs, eps=o["eps"])),
        model,
        dict(x=rows, out=rows),
    )


def jagged_concat(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    offsets = [make.offsets(f"offsets[{i}]", side) for i, side in enumerate(lengths)]
    tensors = {f"x{i}": make.tensor(sum(side), o["columns"]) for i, side in enumerate(lengths)}
    parts = [make.segments(side) for side in lengths]
    order = torch.cat(parts).sort(stable=True).indices

    def function(**inputs):
        return dict(zip(("out", "offsets"), F.jagged_concat(list(inputs.values()), offsets)))

    def model(inputs, gradients):
        back = gradients["out"][order.argsort()].split([len(part) for part in parts])
        exact = {f"d{name}": accuracy.Bound.exact(x) for name, x in zip(inputs, back)}
        total = torch.tensor([0, *map(sum, zip(*lengths))]).cumsum(0)
        return (
            dict(out=accuracy.Bound.exact(torch.cat(list(inputs.values()))[order]), offsets=total)
            | exact
        )

    return Call(
        tensors, function, model, dict(zip(tensors, parts)) | dict(out=torch.cat(parts)[order])
    )


def jagged_split(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    """lengths: those of the first and of the second parts."""
    first, rest = lengths
    if o["first"] == "number":
        rest = [n + m for n, m in zip(first, rest)]
        first = [min(rest, default=0) // 2] * len(rest)
        rest = [n - first[0] for n in rest]
    whole = [n + m for n, m in zip(first, rest)]
    offsets, total = make.offsets("offsets", whole), None if o["first"] == "number" else sum(first)
    if o["first"] == "number":
        first_lengths = first[0] if first else 0
    else:
        first_lengths = make.index("first_lengths", torch.tensor(first, dtype=torch.int64))
    segments = make.segments(whole)
    position = (
        torch.arange(len(segments), device=make.device)
        - torch.tensor([0, *whole]).cumsum(0).to(make.device)[segments]
    )
    in_first = position < torch.tensor([*first, 0], device=make.device)[segments]

    def function(x):
        (head, head_offsets), (tail, tail_offsets) = F.jagged_split(
            x, offsets, first_lengths, total
        )
        return dict(head=head, head_offsets=head_offsets, tail=tail, tail_offsets=tail_offsets)

    def model(inputs, gradients):
        x, exact = inputs["x"], accuracy.Bound.exact
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dx[in_first], dx[~in_first] = gradients["head"], gradients["tail"]
        head_offsets, tail_offsets = (torch.tensor([0, *part]).cumsum(0) for part in (first, rest))
        return dict(
            head=exact(x[in_first]),
            head_offsets=head_offsets,
            tail=exact(x[~in_first]),
            tail_offsets=tail_offsets,
            dx=exact(dx),
        )

    tensors = dict(x=make.tensor(sum(whole), o["columns"]))
    return Call(
        tensors,
        function,
        model,
        dict(x=segments, head=segments[in_first], tail=segments[~in_first]),
    )


def _padding(make: Maker, o: dict, lengths: list[int]) -> tuple[Tensor, int, Tensor, Tensor]:
    """Offsets, rows of a dense block, and for each row its index in the flattened blocks and its
    segment."""
    offsets, width = make.offsets("offsets", lengths), max(lengths, default=0) + o["extra"]
    segments = make.segments(lengths)
    position = (
        torch.arange(len(segments), device=make.device)
        - offsets_of(lengths).to(make.device)[segments]
    )
    return offsets, width, segments * width + position, segments


def jagged_max(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    offsets, rows = make.offsets("offsets", lengths), make.segments(lengths)

    def model(inputs, gradients):
        x, do, exact = inputs["x"], gradients["out"], accuracy.Bound.exact
        out, dx = do.new_full(do.shape, o["empty"]), torch.zeros_like(x)
        for b, part in enumerate(x.split([*lengths, x.shape[0] - sum(lengths)])[:-1]):
            if len(part):
                first = (part == part.amax(0)).int().argmax(0)
                out[b] = part.gather(0, first[None])[0]
                dx[sum(lengths[:b]) :].scatter_(0, first[None], do[b : b + 1])
        return dict(out=exact(out), dx=exact(dx))

    return Call(
        dict(x=make.tensor(sum(lengths), o["columns"])),
        lambda x: dict(out=F.jagged_max(x, offsets, o["empty"])),
        model,
        dict(x=rows, out=torch.arange(len(lengths), device=make.device)),
        frozenset("x"),
    )


def _rows(index: Tensor, counts: list[int]) -> Callable:
    """The model of a function that moves these rows, so many of each segment."""

    def model(inputs, gradients):
        x, do, exact = inputs["x"], gradients["out"], accuracy.Bound.exact
        out, dx = torch.zeros_like(do), torch.zeros_like(x)
        out[: len(index)] = x[index]
        dx[index] = do[: len(index)]
        return dict(out=exact(out), dx=exact(dx), offsets=offsets_of(counts))

    return model


def part(name: str) -> Callable:
    """Of `jagged_first` and `jagged_last`."""

    def build(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
        (lengths,) = lengths
        offsets, k = make.offsets("offsets", lengths), o["k"]
        most = [k] * len(lengths)
        if k == "lengths":
            most = [n // 2 + 1 for n in lengths]
            k = make.index("k", torch.tensor(most, dtype=torch.int64))
        taken = [min(n, m) for n, m in zip(lengths, most)]
        first = [0 if name == "jagged_first" else n - t for n, t in zip(lengths, taken)]
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
        index = [s + f + i for s, f, t in zip(starts, first, taken) for i in range(t)]
        index = torch.tensor(index, dtype=torch.int64, device=make.device)
        return Call(
            dict(x=make.tensor(sum(lengths), o["columns"])),
            lambda x: dict(zip(("out", "offsets"), getattr(F, name)(x, offsets, k))),
            _rows(index, taken),
            dict(x=make.segments(lengths)),
        )

    return build


def jagged_between(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    offsets, times = make.offsets("offsets", lengths), make.integers(0, 20, sum(lengths))
    segments, bounds, limits = make.segments(lengths), {}, {}
    for name, least in (("start", 0), ("end", 10)):
        limit = bounds[name] = o[name]
        if limit == "each":
            limit = make.integers(least, least + 10, len(lengths))
            bounds[name] = make.index(name, limit)
            limit = limit.to(make.device)[segments]
        limits[name] = least * 2 if limit is None else limit
    times = times.to(make.device)
    taken = (times >= limits["start"]) & (times < limits["end"])
    index = taken.nonzero()[:, 0]
    counts = [int(x.sum()) for x in taken.split(lengths)]

    times = make.index("times", times)
    return Call(
        dict(x=make.tensor(sum(lengths), o["columns"])),
        lambda x: dict(
            zip(("out", "offsets"), F.jagged_between(x, offsets, times=times, **bounds))
        ),
        _rows(index, counts),
        dict(x=segments),
    )


def jagged_select(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    offsets, segments = make.offsets("offsets", lengths), len(lengths)
    chosen = list(range(segments - 1, -1, -2))
    index = make.index("index", torch.tensor(chosen, dtype=torch.int64))
    starts, taken = offsets_of(lengths).tolist(), [lengths[b] for b in chosen]
    rows = [starts[b] + i for b in chosen for i in range(lengths[b])]
    rows = torch.tensor(rows, dtype=torch.int64, device=make.device)

    return Call(
        dict(x=make.tensor(sum(lengths), o["columns"])),
        lambda x: dict(zip(("out", "offsets"), F.jagged_select(x, offsets, index, len(rows)))),
        _rows(rows, taken),
        dict(x=make.segments(lengths)),
    )


def jagged_to_padded(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    offsets, width, index, rows = _padding(make, o, lengths)
    options = dict(side=o["side"], truncate=o["truncate"])
    if o["side"] == "left":
        sizes = torch.tensor(lengths, device=make.device)
        index = index + (width - sizes)[rows] if len(rows) else index

    def model(inputs, gradients):
        values, exact = inputs["values"], accuracy.Bound.exact
        padded = values.new_full((len(lengths) * width, o["columns"]), o["padding"])
        padded[index] = values
        return dict(
            out=exact(padded.unflatten(0, (len(lengths), width))),
            dvalues=exact(gradients["out"].flatten(0, 1)[index]),
        )

    return Call(
        dict(values=make.tensor(sum(lengths), o["columns"])),
        lambda values: dict(
            out=F.jagged_to_padded(values, offsets, width, o["padding"], **options)
        ),
        model,
        dict(values=rows, out=torch.arange(len(lengths), device=make.device)),
        frozenset(["values"]),
    )


def padded_to_jagged(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    offsets, width, index, rows = _padding(make, o, lengths)

    def model(inputs, gradients):
        flat, exact = inputs["dense"].flatten(0, 1), accuracy.Bound.exact
        back = torch.zeros_like(flat, memory_format=torch.contiguous_format)
        back[index] = gradients["out"]
        return dict(out=exact(flat[index]), ddense=exact(back.unflatten(0, (len(lengths), width))))

    return Call(
        dict(dense=make.tensor(len(lengths), width, o["columns"])),
        lambda dense: dict(out=F.padded_to_jagged(dense, offsets, sum(lengths) + make.behind)),
        model,
        dict(dense=torch.arange(len(lengths), device=make.device), out=rows),
        frozenset(["out"]),
    )
