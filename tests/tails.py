"""Calls of every function whose rows may lie behind the last segment, and what must hold for these
rows.

A tensor of a side ("x" or "y") has a row for each row of its segments, then the rows of the tail,
which are NaN. So does the gradient of a result. The results and gradients of the real rows must be
those of a call without a tail, and those of the tail 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import jagged_modules as jm
from jagged_modules import functional as F

LENGTHS = {"x": [3, 0, 40, 1, 17], "y": [5, 4, 33, 0, 8]}
TAIL = {"x": 9, "y": 70}  # one within the tile of the last segment, one that fills tiles of its own
SEGMENTS, LONGEST, HEADS = 5, 40, 2
SHAPES = {  # of the tensors that are not rows of a side, given the head dim and the longest segment
    "shared": lambda dim, _: (3, HEADS, dim),
    "matrices": lambda dim, _: (SEGMENTS, HEADS * dim, 7),
    "bias": lambda *_: (SEGMENTS, 7),
    "weight": lambda dim, _: (7, HEADS * dim),
    "one_bias": lambda *_: (7,),
    "padded": lambda dim, longest: (SEGMENTS, longest, HEADS * dim),
    "position": lambda _, longest: (2 * longest - 1,),
    "time": lambda *_: (HEADS, 9),
    "scale": lambda *_: (SEGMENTS,),
    "scales": lambda *_: (2 * SEGMENTS,),
}


class Tailed(NamedTuple):
    """A call: (tensors by name, offsets by side, options) → results.

    inputs: names, those of rows with ":x" or ":y" behind them, and of rows of heads with "h:x" or
    "h:y". results: the side of each result, None of one without rows.
    """

    call: Callable[..., object]
    inputs: tuple[str, ...]
    results: tuple[str | None, ...]


def _masked(t, o, **options):
    mask = jm.AttentionMask(causal=True, num_targets=o["x"].diff() // 3)
    return F.jagged_attention(
        t["q"], t["k"], t["v"], o["x"], mask=mask, activation="silu", output_scale=0.125, **options
    )


def _biased(t, o, **options):
    times = torch.arange(t["k"].shape[0], device=t["k"].device) * 3
    bias = jm.RelativeBias(t["position"], t["time"], times, query_timestamps=times + 7)
    return F.jagged_attention(
        t["q"],
        t["k"],
        t["v"],
        o["x"],
        mask=jm.AttentionMask(causal=True),
        activation="silu",
        bias=bias,
        **options,
    )


def _target(t, o, **options):
    index = jm.CandidateIndex.from_offsets(o["y"])
    return F.target_attention(
        t["q"].unflatten(0, (-1, 1)), t["k"], t["v"], index, o["x"], **options
    ).flatten(0, 1)


def _self_target(t, o, **options):
    options |= dict(output_scale=t["scales"]) if "scales" in t else {}
    return F.self_target_attention(t["own"], t["q"], t["k"], t["v"], o["x"], o["y"], **options)


def _block(t, o, **options):
    rotary = jm.Rotary.from_frequencies(t["q"].shape[2], 400, device=t["q"].device)
    return F.block_diagonal_attention(
        t["q"], t["k"], t["v"], o["x"], block_size=16, rotary=rotary, **options
    )


def _packed(t, o, **options):
    return F.block_diagonal_attention_packed(
        torch.stack([t["q"], t["k"], t["v"]], 1), o["x"], block_size=32, **options
    )


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
    "attention-cross": Tailed(
        _attention("q", "k", "v", "y", "x", activation="silu"), CROSS, ("y",)
    ),
    "attention-scaled": Tailed(
        _attention("q", "k", "v", "y", "x", activation="silu"), (*CROSS, "scale"), ("y",)
    ),
    "attention-shared-queries": Tailed(
        _attention("shared", "k", "v", "shared", "x"), ("shared", "kh:x", "vh:x"), (None,)
    ),
    "attention-shared-keys": Tailed(
        _attention("q", "shared", "shared", "x", "shared"), ("qh:x", "shared"), ("x",)
    ),
    "attention-shared-keys-scaled": Tailed(
        _attention("q", "shared", "shared", "x", "shared", activation="sigmoid"),
        ("qh:x", "shared", "scale"),
        ("x",),
    ),
    "target": Tailed(_target, CROSS, ("y",)),
    "self-target": Tailed(_self_target, ("ownh:x", *CROSS), ("x", "y")),
    "self-target-scaled": Tailed(
        lambda t, o, **options: _self_target(t, o, activation="silu", **options),
        ("ownh:x", *CROSS, "scales"),
        ("x", "y"),
    ),
    "block": Tailed(_block, SELF, ("x",)),
    "block-packed": Tailed(_packed, SELF, ("x",)),
    "softmax": Tailed(_softmax, ("x:x",), ("x",)),
    "dense": Tailed(
        lambda t, o, **options: F.jagged_dense_bmm(t["x"], t["matrices"], o["x"], **options),
        ("x:x", "matrices"),
        ("x",),
    ),
    "jagged": Tailed(
        lambda t, o, **options: F.jagged_jagged_bmm(t["x"], t["z"], o["x"], **options),
        ("x:x", "z:x"),
        (None,),
    ),
    "linear-by-segment": Tailed(
        lambda t, o, **options: F.jagged_linear(
            t["x"], t["matrices"], t["bias"], o["x"], "sigmoid", **options
        ),
        ("x:x", "matrices", "bias"),
        ("x",),
    ),
}
ON_TORCH = {
    "linear": Tailed(
        lambda t, o: F.jagged_linear(t["x"], t["weight"], t["one_bias"], o["x"], "sigmoid"),
        ("x:x", "weight", "one_bias"),
        ("x",),
    ),
    "add": Tailed(
        lambda t, o: F.jagged_dense_add(t["x"], t["padded"], o["x"]), ("x:x", "padded"), ("x",)
    ),
    "mul": Tailed(
        lambda t, o: F.jagged_dense_mul(t["x"], t["padded"], o["x"]), ("x:x", "padded"), ("x",)
    ),
    "max": Tailed(lambda t, o: F.jagged_max(t["x"], o["x"]), ("x:x",), (None,)),
    "last": Tailed(lambda t, o: F.jagged_last(t["x"], o["x"], 3)[0][:1], ("x:x",), (None,)),
    "between": Tailed(
        lambda t, o: F.jagged_between(
            t["x"], o["x"], times=torch.arange(len(t["x"]), device=o["x"].device), start=1
        )[0][:1],
        ("x:x",),
        (None,),
    ),
    "select": Tailed(
        lambda t, o: F.jagged_select(t["x"], o["x"], o["x"][:1].long().repeat(2), 2 * 40)[0][:1],
        ("x:x",),
        (None,),
    ),
    "to-padded": Tailed(lambda t, o: F.jagged_to_padded(t["x"], o["x"], 40), ("x:x",), (None,)),
}


ON_ROWS, MASK = (("x:x",), ("x",)), jm.AttentionMask(causal=True)


def _on_rows(layer):
    return lambda t, o: layer((t["x"], o["x"]))[0]


def _to_rows(layer, **options):
    return lambda t, o: layer((t["z"], o["y"]), (t["x"], o["x"]), **options)[0]


def _to_candidates(layer):
    return lambda t, o: layer(
        t["z"].unflatten(0, (-1, 1)), (t["x"], o["x"]), jm.CandidateIndex.from_offsets(o["y"])
    ).flatten(0, 1)


def _both(layer):
    def call(t, o):
        (of_rows, _), out = layer(
            (t["x"], o["x"]), t["z"].unflatten(0, (-1, 1)), jm.CandidateIndex.from_offsets(o["y"])
        )
        return of_rows, out.flatten(0, 1)

    return call


HSTU = jm.HSTUConfig(scaling_seqlen=40)
LAYERS = {  # name → (head dim, options) → layer, layer → call, inputs, results
    "JaggedEncoder": (
        lambda dim, **to: jm.JaggedEncoder(
            [jm.JaggedEncoderLayer(2 * dim, HEADS, 24, **to)], torch.nn.LayerNorm(2 * dim, **to)
        ),
        _on_rows,
        *ON_ROWS,
    ),
    "JaggedEncoderLayer-queries": (
        lambda dim, **to: jm.JaggedEncoderLayer(
            2 * dim, HEADS, 24, norm_first="queries", activation="gelu", **to
        ),
        _on_rows,
        *ON_ROWS,
    ),
    "JaggedMLP": (
        lambda dim, **to: jm.JaggedMLP([2 * dim, 24, 40], "relu", **to),
        _on_rows,
        *ON_ROWS,
    ),
    "JaggedTargetAttention": (
        lambda dim, **to: jm.JaggedTargetAttention(2 * dim, HEADS, **to),
        _to_rows,
        ("x:x", "z:y"),
        ("y",),
    ),
    "JaggedTargetAttention-candidates": (
        lambda dim, **to: jm.JaggedTargetAttention(2 * dim, HEADS, **to),
        _to_candidates,
        ("x:x", "z:y"),
        ("y",),
    ),
    "JaggedSelfTargetAttention": (
        lambda dim, **to: jm.JaggedSelfTargetAttention(2 * dim, HEADS, **to),
        _both,
        ("x:x", "z:y"),
        ("x", "y"),
    ),
    "JaggedGDPA": (
        lambda dim, **to: jm.JaggedGDPA(
            2 * dim, HEADS, mask=MASK, config=jm.GDPAConfig(qk_norm=True), **to
        ),
        _on_rows,
        *ON_ROWS,
    ),
    "JaggedGDPA-context": (
        lambda dim, **to: jm.JaggedGDPA(2 * dim, HEADS, **to),
        _to_rows,
        ("x:x", "z:y"),
        ("y",),
    ),
    "JaggedGDPA-seeds": (
        lambda dim, **to: jm.JaggedGDPA(2 * dim, HEADS, config=jm.GDPAConfig(num_seeds=3), **to),
        lambda layer: lambda t, o: layer((t["x"], o["x"])),
        ("x:x",),
        (None,),
    ),
    "JaggedGDPA-weights": (
        lambda dim, **to: jm.JaggedGDPA(2 * dim, HEADS, config=jm.GDPAConfig(num_weights=6), **to),
        _on_rows,
        *ON_ROWS,
    ),
    "GDPABlock": (lambda dim, **to: jm.GDPABlock(2 * dim, HEADS, **to), _on_rows, *ON_ROWS),
    "HSTULayer": (lambda dim, **to: jm.HSTULayer(2 * dim, HEADS, HSTU, **to), _on_rows, *ON_ROWS),
    "HSTUStack": (
        lambda dim, **to: jm.HSTUStack(2 * dim, HEADS, 2, HSTU, **to),
        _on_rows,
        *ON_ROWS,
    ),
    "HSTUStack-score": (
        lambda dim, **to: jm.HSTUStack(2 * dim, HEADS, 2, HSTU, **to),
        lambda layer: lambda t, o: layer.score((t["z"], o["y"]), layer.cache((t["x"], o["x"])))[0],
        ("x:x", "z:y"),
        ("y",),
    ),
    "BlockDiagonalSelfAttention": (
        lambda dim, **to: jm.BlockDiagonalSelfAttention(2 * dim, HEADS, 16, max_seqlen=400, **to),
        _on_rows,
        *ON_ROWS,
    ),
}


def layer_case(name: str, dim: int = 16, **options) -> tuple[torch.nn.Module, Tailed]:
    """A new layer of a head dim, and its call. options: device and dtype."""
    build, call, inputs, results = LAYERS[name]
    layer = build(dim, **options)
    return layer, Tailed(call(layer), inputs, results)


def make_inputs(
    case: Tailed, dtype, device, dim, repeats
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without a tail, and the side of each that has one."""
    tensors, sides = {}, {}
    for text in case.inputs:
        name, _, side = text.partition(":")
        if side:
            row = (HEADS, dim) if name.endswith("h") else (HEADS * dim,)
            name = name.removesuffix("h")
            sides[name] = side
            shape = repeats * sum(LENGTHS[side]), *row
        else:
            shape = SHAPES[name](dim, repeats * LONGEST)
        tensors[name] = torch.randn(shape, device=device).to(dtype)
    return tensors, sides


def with_tail(x: Tensor, side: str | None) -> Tensor:
    """x with a tail of NaN, if it has the rows of a side."""
    return (
        x if side is None else torch.cat([x, x.new_full((TAIL[side], *x.shape[1:]), float("nan"))])
    )


def check(
    case: Tailed,
    run: Callable[..., object],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    parameters: Iterable[Tensor] = (),
    dim: int = 16,
    repeats: int = 1,
    tolerance: float | None = None,
    **options,
) -> None:
    """run: as the case's call, where only the device knows the lengths. The segments are `repeats`
    times as long as LENGTHS."""
    tensors, sides = make_inputs(case, dtype, device, dim, repeats)
    offsets = {
        side: repeats * torch.tensor([0, *lengths], device=device).cumsum(0)
        for side, lengths in LENGTHS.items()
    }
    exact = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    tailed = {name: with_tail(x, sides.get(name)).requires_grad_() for name, x in tensors.items()}
    expected, parameters = tree_leaves(case.call(exact, offsets, **options)), list(parameters)
    gradients = [torch.randn_like(x) for x in expected]
    expected += torch.autograd.grad(expected, [*exact.values(), *parameters], gradients)
    found = tree_leaves(run(tailed, offsets, **options))
    of_results = [with_tail(x, side) for x, side in zip(gradients, case.results, strict=True)]
    found += torch.autograd.grad(found, [*tailed.values(), *parameters], of_results)
    of = (*case.results, *(sides.get(name) for name in tensors), *(None for _ in parameters))
    for x, y, side in zip(found, expected, of, strict=True):
        assert len(x) == len(y) + (0 if side is None else TAIL[side])
        assert not x[len(y) :].any()
        if tolerance is None:
            torch.testing.assert_close(x[: len(y)], y)
        else:  # sums in another order: a fraction of the largest element
            assert (x[: len(y)] - y).abs().max() <= tolerance * y.abs().max()


def compiled(call: Callable[..., object]) -> Callable[..., object]:
    """The call in a graph, which does not know the lengths."""
    torch._dynamo.reset()  # calls share code whose constants differ
    return torch.compile(call, backend="aot_eager", fullgraph=True)


def gemm_shapes(run) -> list[list[list[int]]]:
    """The shapes of the operands of each GEMM."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        run()
    return [x.input_shapes for x in profile.events() if x.name in ("aten::mm", "aten::addmm")]
