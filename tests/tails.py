"""Calls of every function whose rows may lie behind the last segment, and what must hold for these rows.

A tensor of a side ("x" or "y") has a row for each row of its segments, then the rows of the tail, which are NaN. So does the gradient of a
result. The results and gradients of the real rows must be those of a call without a tail, and those of the tail 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import jagged_modules as jm
from jagged_modules import functional as F

LENGTHS = {"x": [3, 0, 40, 1, 17], "y": [5, 4, 33, 0, 8]}
TAIL = {"x": 9, "y": 70}  # one within the tile of the last segment, one that fills tiles of its own
SEGMENTS, HEADS, DIM, WIDTH = 5, 2, 16, 12
ROWS = {side: sum(lengths) for side, lengths in LENGTHS.items()}
SHAPES = {  # of the tensors that are not rows of a side
    "shared": (3, HEADS, DIM),
    "matrices": (SEGMENTS, WIDTH, 7),
    "bias": (SEGMENTS, 7),
    "weight": (7, WIDTH),
    "one_bias": (7,),
    "padded": (SEGMENTS, 40, WIDTH),
    "position": (79,),
    "time": (HEADS, 9),
    "scale": (SEGMENTS,),
    "scales": (2 * SEGMENTS,),
}


class Tailed(NamedTuple):
    """A call: (tensors by name, offsets by side, options) → results. inputs: names, ":x" or ":y" behind those of rows, and "h" before the
    colon for rows of heads. results: the side of each result, None of one without rows."""

    call: Callable[..., object]
    inputs: tuple[str, ...]
    results: tuple[str | None, ...]


def _masked(t, o, **options):
    mask = jm.AttentionMask(causal=True, num_targets=o["x"].diff() // 3)
    return F.jagged_attention(t["q"], t["k"], t["v"], o["x"], mask=mask, activation="silu", output_scale=0.125, **options)


def _biased(t, o, **options):
    times = torch.arange(t["k"].shape[0], device=t["k"].device) * 3
    bias = jm.RelativeBias(t["position"], t["time"], times, query_timestamps=times + 7)
    return F.jagged_attention(t["q"], t["k"], t["v"], o["x"], mask=jm.AttentionMask(causal=True), activation="silu", bias=bias, **options)


def _groups(t, o, activation="softmax", **options):
    scale = {"output_scale": t["scales"]} if "scales" in t else {}
    both = torch.cat([o["y"], o["y"][1:] + o["y"][-1]])  # the second group is in the tail of the first one
    return F.jagged_attention(t["q"], t["k"], t["v"], both, o["x"], activation=activation, **scale, **options)


def _target(t, o, **options):
    index = jm.CandidateIndex.from_offsets(o["y"])
    return F.target_attention(t["q"].unflatten(0, (-1, 1)), t["k"], t["v"], index, o["x"], **options).flatten(0, 1)


def _self_target(t, o, **options):
    options |= dict(output_scale=t["scales"]) if "scales" in t else {}
    return F.self_target_attention(t["own"], t["q"], t["k"], t["v"], o["x"], o["y"], **options)


def _block(t, o, **options):
    rotary = jm.Rotary.from_frequencies(DIM, 40, device=t["q"].device)
    return F.block_diagonal_attention(t["q"], t["k"], t["v"], o["x"], block_size=16, rotary=rotary, **options)


def _packed(t, o, **options):
    return F.block_diagonal_attention_packed(torch.stack([t["q"], t["k"], t["v"]], 1), o["x"], block_size=32, **options)


def _attention(q, k, v, q_offsets, kv_offsets=None, **fixed):
    def call(t, o, **options):
        of = [o.get(x, x) for x in (q_offsets, kv_offsets)]
        scale = {"output_scale": t["scale"]} if "scale" in t else {}
        return F.jagged_attention(t[q], t[k], t[v], *of, **fixed, **scale, **options)

    return call


def _softmax(t, o, **options):
    return F.jagged_softmax(t["x"], o["x"], **options)


SELF, CROSS = ("qh:x", "kh:x", "vh:x"), ("qh:y", "kh:x", "vh:x")
ON_KERNELS = {  # take `implementation`
    "attention": Tailed(_attention("q", "k", "v", "x"), SELF, ("x",)),
    "attention-masked": Tailed(_masked, SELF, ("x",)),
    "attention-biased": Tailed(_biased, (*SELF, "position", "time"), ("x",)),
    "attention-cross": Tailed(_attention("q", "k", "v", "y", "x", activation="silu"), CROSS, ("y",)),
    "attention-scaled": Tailed(_attention("q", "k", "v", "y", "x", activation="silu"), (*CROSS, "scale"), ("y",)),
    "attention-shared-queries": Tailed(_attention("shared", "k", "v", "shared", "x"), ("shared", "kh:x", "vh:x"), (None,)),
    "attention-shared-keys": Tailed(_attention("q", "shared", "shared", "x", "shared"), ("qh:x", "shared"), ("x",)),
    "attention-shared-keys-scaled": Tailed(
        _attention("q", "shared", "shared", "x", "shared", activation="sigmoid"), ("qh:x", "shared", "scale"), ("x",)
    ),
    "target": Tailed(_target, CROSS, ("y",)),
    "self-target": Tailed(_self_target, ("ownh:x", *CROSS), ("x", "y")),
    "self-target-scaled": Tailed(
        lambda t, o, **options: _self_target(t, o, activation="silu", **options), ("ownh:x", *CROSS, "scales"), ("x", "y")
    ),
    "block": Tailed(_block, SELF, ("x",)),
    "block-packed": Tailed(_packed, SELF, ("x",)),
    "softmax": Tailed(_softmax, ("x:x",), ("x",)),
    "dense": Tailed(lambda t, o, **options: F.jagged_dense_bmm(t["x"], t["matrices"], o["x"], **options), ("x:x", "matrices"), ("x",)),
    "jagged": Tailed(lambda t, o, **options: F.jagged_jagged_bmm(t["x"], t["z"], o["x"], **options), ("x:x", "z:x"), (None,)),
    "linear-by-segment": Tailed(
        lambda t, o, **options: F.jagged_linear(t["x"], t["matrices"], t["bias"], o["x"], "sigmoid", **options),
        ("x:x", "matrices", "bias"),
        ("x",),
    ),
}
ON_TORCH = {
    "linear": Tailed(
        lambda t, o: F.jagged_linear(t["x"], t["weight"], t["one_bias"], o["x"], "sigmoid"), ("x:x", "weight", "one_bias"), ("x",)
    ),
    "add": Tailed(lambda t, o: F.jagged_dense_add(t["x"], t["padded"], o["x"]), ("x:x", "padded"), ("x",)),
    "mul": Tailed(lambda t, o: F.jagged_dense_mul(t["x"], t["padded"], o["x"]), ("x:x", "padded"), ("x",)),
    "to-padded": Tailed(lambda t, o: F.jagged_to_padded(t["x"], o["x"], 40), ("x:x",), (None,)),
}


def make_inputs(case: Tailed, dtype: torch.dtype, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors without a tail, and the side of each that has one."""
    tensors, sides = {}, {}
    for text in case.inputs:
        name, _, side = text.partition(":")
        if side:
            heads = name.endswith("h")
            name = name.removesuffix("h")
            sides[name] = side
        shape = (ROWS[side], *((HEADS, DIM) if heads else (WIDTH,))) if side else SHAPES[name]
        tensors[name] = torch.randn(shape, device=device).to(dtype)
    return tensors, sides


def with_tail(x: Tensor, side: str | None) -> Tensor:
    """x with a tail of NaN, if it has the rows of a side."""
    return x if side is None else torch.cat([x, x.new_full((TAIL[side], *x.shape[1:]), float("nan"))])


def check(case: Tailed, run: Callable[..., object], dtype: torch.dtype, device: str = "cpu", **options) -> None:
    """run: as the case's call, where only the device knows the lengths."""
    tensors, sides = make_inputs(case, dtype, device)
    offsets = {side: torch.tensor([0, *lengths], device=device).cumsum(0) for side, lengths in LENGTHS.items()}
    exact = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    tailed = {name: with_tail(x, sides.get(name)).requires_grad_() for name, x in tensors.items()}
    expected = tree_leaves(case.call(exact, offsets, **options))
    gradients = [torch.randn_like(x) for x in expected]
    expected += torch.autograd.grad(expected, list(exact.values()), gradients)
    found = tree_leaves(run(tailed, offsets, **options))
    found += torch.autograd.grad(found, list(tailed.values()), [with_tail(x, side) for x, side in zip(gradients, case.results)])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x[: len(y)], y)
        assert not x[len(y) :].any()
    for x, side in zip(found, (*case.results, *(sides.get(name) for name in tensors))):
        assert side is None or len(x) == ROWS[side] + TAIL[side]


def compiled(call: Callable[..., object]) -> Callable[..., object]:
    """The call in a graph, which does not know the lengths."""
    return torch.compile(call, backend="aot_eager", fullgraph=True)
