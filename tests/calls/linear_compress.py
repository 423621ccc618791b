"""Calls of linear compression."""

from __future__ import annotations

import accuracy
import torch
from torch import Tensor

import jagged_modules as jm
from jagged_modules import functional as F

from .maker import Call, Maker


def _replicated(
    weights: list[Tensor], embeddings: list[Tensor], maps: list[Tensor], do: Tensor
) -> dict[str, accuracy.Bound]:
    """Bounds with all levels replicated to the candidates and one GEMM: a shared level's gradients
    are sums over its copies."""
    maps = [*maps, torch.arange(len(do), device=do.device)]
    copies = torch.cat([x[index] for x, index in zip(embeddings, maps)], 1)
    bounds = accuracy.linear_compress(
        [torch.cat(weights, 1)],
        [copies],
        [],
        do,
        arithmetic=accuracy.KERNELS._replace(torch_matmul=True),
    )
    results, start = dict(out=bounds["out"]), 0
    for level, (weight, embedding, index) in enumerate(zip(weights, embeddings, maps)):
        rows = slice(start, start + weight.shape[1])
        start = rows.stop
        results[f"dw{level}"] = bounds["dweights[0]"].map(lambda x, rows=rows: x[:, rows])
        terms = bounds["dembeddings[0]"].map(lambda x, rows=rows: x[:, rows])

        def total(x: Tensor, like: Tensor = embedding, index: Tensor = index) -> Tensor:
            return torch.zeros(like.shape, dtype=x.dtype, device=x.device).index_add_(0, index, x)

        sums = terms._replace(
            value=total(terms.value), error=total(terms.error), rms=total(terms.rms**2).sqrt()
        )
        count = index.bincount(minlength=len(embedding))[:, None, None]
        results[f"de{level}"] = sums.summed(
            count, total(terms.value.abs()), total(terms.value**2)
        ).rounded(do.dtype)
    return results


def linear_compress(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    """Levels are users, vendors and candidates; each user has as many candidates as a segment is
    long."""
    (counts,) = lengths
    users = make.segments(counts)
    if o["index"] == "shuffled map":
        users = users[torch.randperm(len(users), generator=make.generator, device=make.device)]
    num_vendors = len(counts) // 2 + 1
    batches = (
        [len(counts), num_vendors, len(users)][-o["levels"] :]
        if o["levels"] != 2
        else [len(counts), len(users)]
    )
    maps = [users, make.integers(0, num_vendors, len(users))][: o["levels"] - 1]
    by_counts = o["index"] == "counts" and len(maps) > 0
    given = [torch.tensor(counts, dtype=torch.int64), *maps[1:]] if by_counts else maps
    given = [make.index(f"indices[{level}]", x) for level, x in enumerate(given)]
    levels, depths = range(o["levels"]), o["depths"]
    # "hopper" raises an error for empty embeddings
    implementation = o["implementation"] if len(users) else "auto"
    weights = {
        f"w{i}": make.tensor(o["compressed"], depths[i], factor=depths[i] ** -0.5) for i in levels
    }
    embeddings = {f"e{i}": make.tensor(batches[i], depths[i], o["columns"]) for i in levels}

    def function(**inputs):
        tensors = list(inputs.values())
        indices = [jm.CandidateIndex.from_counts(given[0]), *given[1:]] if by_counts else given
        return dict(
            out=F.linear_compress(
                tensors[: o["levels"]],
                tensors[o["levels"] :],
                indices or None,
                implementation=implementation,
            )
        )

    def model(inputs, gradients):
        tensors = list(inputs.values())
        if implementation == "reference":
            return _replicated(
                tensors[: o["levels"]], tensors[o["levels"] :], maps, gradients["out"]
            )
        bounds = accuracy.linear_compress(
            tensors[: o["levels"]], tensors[o["levels"] :], maps, gradients["out"]
        )
        names = {f"dweights[{i}]": f"dw{i}" for i in levels} | {
            f"dembeddings[{i}]": f"de{i}" for i in levels
        }
        return {names.get(name, name): bound for name, bound in bounds.items()}

    rows = users if o["levels"] > 1 else torch.arange(len(users), device=make.device)
    segments = {"out": rows, f"e{levels[-1]}": rows} | (
        dict(e0=torch.arange(len(counts), device=make.device)) if o["levels"] > 1 else {}
    )
    return Call(weights | embeddings, function, model, segments)
