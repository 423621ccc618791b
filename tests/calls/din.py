"""Calls of DIN's attention."""

from __future__ import annotations

import accuracy
import torch
from din_problem import Problem, roundings_of_kernels
from torch import Tensor

from .attention import attention_mask, candidate_index
from .maker import Call, Maker


def din_attention(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    counts, keys = lengths
    users, index = candidate_index(make, o["index"], counts)
    kv_offsets, width = make.offsets("kv_offsets", keys), o["width"]
    tensors = dict(
        q=make.tensor(len(users), *[o["rows"]] * (o["rows"] > 0), width),
        k=make.tensor(sum(keys), width),
    )
    if o["v_width"] is not None:
        tensors["v"] = make.tensor(sum(keys), o["v_width"])
    parameters, statistics = _mlp(make, o)
    name, _, _ = o["activation"].partition("-")
    options = dict(activation=name, normalize=o["normalize"], features=tuple(o["features"]))
    options |= dict(mask=attention_mask(make, o, keys))
    # Σ of a softmax's gradients, the last bias's, is rounding errors of 0
    last = f"bias{len(o['hidden'])}"
    fixed = {last: parameters.pop(last)} if o["normalize"] else {}
    tensors |= parameters

    def problem(inputs: dict[str, Tensor], candidates, offsets: Tensor) -> Problem:
        return Problem(inputs | fixed, candidates, offsets, options, len(o["hidden"]), statistics)

    def function(**inputs):
        call = problem(inputs, index(), kv_offsets)
        return dict(out=call.call(*call.tensors.values(), implementation=o["implementation"]))

    def model(inputs, gradients):
        device = gradients["out"].device
        case = problem(inputs, users.to(device), torch.tensor([0, *keys], device=device).cumsum(0))
        with roundings_of_kernels(case):
            do = gradients["out"]
            bounds = accuracy.definition(case.definition, case.tensors, do, samples=32)
        return {x: bounds[x] for x in ("out", *(f"d{x}" for x in inputs))}

    segments = dict(q=users, out=users) | dict.fromkeys("kv", make.segments(keys))
    if o["activation"] == "dice":  # its statistics are those of all pairs
        segments = {}
    return Call(tensors, function, model, segments, frozenset("kv"))


def _mlp(make: Maker, o: dict) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Parameters by the names of `Problem.tensors`, and running statistics."""
    hidden, (name, _, evaluates) = o["hidden"], o["activation"].partition("-")
    sizes = [len(o["features"]) * o["width"], *hidden, 1]
    parameters = {
        f"weight{i}": make.tensor(size, before, factor=before**-0.5)
        for i, (before, size) in enumerate(zip(sizes, sizes[1:]))
    }
    parameters |= {f"bias{i}": make.tensor(size, factor=0.3) for i, size in enumerate(sizes[1:])}
    units = dict(prelu=("slope",), dice=("slope", "norm_weight", "norm_bias")).get(name, ())
    parameters |= {
        f"{unit}{i}": make.tensor(size) for unit in units for i, size in enumerate(hidden)
    }
    if not evaluates:
        return parameters, {}
    means = [make.values(size, factor=0.3).float() for size in hidden]
    return parameters, dict(running_means=means, running_vars=[x.exp() for x in means])
