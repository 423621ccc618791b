"""Compares a segment alone and in batches under `batch_invariant`, for the tests on the CPU, in the
interpreter and on a GPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
from marks import SLOW
from torch import Tensor

import jagged_modules as jm
from jagged_modules import functional as F

Segment = dict[str, Tensor]  # a segment's rows of each operand, [n, ...]


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator on a batch of segments.

    Attributes:
        operands: number of rows → random operands of one segment.
        apply: (operands of all segments, their offsets by the same names) → result.
        result: the operand that has as many rows as the result, or a function segment → number of
            the result's rows.
        gradients: operands whose gradients are compared.
        joined: an operand that gets other rows in the same segment, such as other candidates of a
            user. Only the result's rows and this operand's gradient are then compared.
    """

    operands: Callable[[int], Segment]
    apply: Callable[[Segment, Segment], Tensor]
    result: str | Callable[[Segment], int]
    gradients: Sequence[str]
    joined: str | None = None

    def rows(self, segment: Segment) -> int:
        return (
            segment[self.result].shape[0] if isinstance(self.result, str) else self.result(segment)
        )

    def run(self, segments: list[Segment]) -> dict[str, tuple[Tensor, ...]]:
        """The result "out" and the gradients by name, each split by segment."""
        names = segments[0]
        offsets = {
            name: _offsets([segment[name].shape[0] for segment in segments]) for name in names
        }
        operands = {name: torch.cat([segment[name] for segment in segments]) for name in names}
        wanted = {name: operands[name].requires_grad_() for name in self.gradients}
        with jm.batch_invariant(True):
            out = self.apply(operands, offsets)
        gradients = torch.autograd.grad(out, list(wanted.values()), out.detach() * 3 - 0.5)
        results = {
            name: grad.split(offsets[name].diff().tolist()) for name, grad in zip(wanted, gradients)
        }
        return results | {"out": out.detach().split([self.rows(segment) for segment in segments])}


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def check(
    operator: Operator,
    lengths: Sequence[int],
    own_lengths: Sequence[int],
    num_batches: int,
    most: int = 6,
) -> None:
    """Check that segments of each of own_lengths have the same bits alone and in batches with up to
    `most` others of `lengths`.

    num_batches: number of batches, for all own_lengths together.
    """
    choose = random.Random(0)
    for number in range(num_batches):
        if number % -(-num_batches // len(own_lengths)) == 0:
            own = operator.operands(own_lengths[number * len(own_lengths) // num_batches])
            alone = operator.run([own])
        segments = [
            operator.operands(choose.choice(lengths)) for _ in range(choose.randint(0, most))
        ]
        position, before, here = choose.randint(0, len(segments)), 0, own
        if operator.joined is not None:
            others = [operator.operands(choose.choice(lengths))[operator.joined] for _ in range(2)]
            before, name = others[0].shape[0], operator.joined
            here = own | {name: torch.cat([others[0], own[name], others[1]])}
        results = operator.run([*segments[:position], here, *segments[position:]])
        for name, expected in alone.items():
            if operator.joined is None or name in ("out", operator.joined):
                found = (
                    results[name][position][before : before + expected[0].shape[0]]
                    if operator.joined
                    else results[name][position]
                )
                assert _same_bits(found, expected[0]), (
                    f"{name} of batch {number}: {[operator.rows(x) for x in segments]}, at"
                    f" {position}"
                )


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Bitwise equality: -0 and 0 differ, a NaN equals itself."""
    return (
        x.dtype == y.dtype
        and x.shape == y.shape
        and torch.equal(*(z.contiguous().view(torch.uint8) for z in (x, y)))
    )


def names(operators: Iterable[str]) -> list:
    """Parameters of a test: names of operators, the variants of jagged attention marked slow."""
    return [
        pytest.param(name, marks=SLOW) if name.startswith("attention-") else name
        for name in operators
    ]


def operators(
    device: str,
    dtype: torch.dtype,
    dim: int = 12,
    width: int = 20,
    heads: int = 2,
    block_size: int = 16,
    implementation: str = "auto",
) -> dict[str, Operator]:
    """Every operator by name. dim: head dim; width: columns of rows without heads."""
    make = _Operands(device, dtype, dim, width, heads)
    how = dict(implementation=implementation)
    return (
        _attention_operators(make, how)
        | _shared_operators(make, how)
        | _user_operators(make, how)
        | _block_operators(make, how, block_size)
        | _products(make, how)
        | _row_operators(make, how)
    )


@dataclasses.dataclass(frozen=True)
class _Operands:
    """Makes random operands of a segment with so many rows. dim: head dim; width: columns of rows
    without heads."""

    device: str
    dtype: torch.dtype
    dim: int
    width: int
    heads: int

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=self.dtype)

    def rows(self, *names: str) -> Callable[[int], Segment]:
        return lambda length: {name: self.random(length, self.width) for name in names}

    def attended(self, length: int, keys: int | None = None, kv_heads: int | None = None):
        """Operands q, k, v of attention."""
        keys = length if keys is None else keys
        kv_heads = self.heads if kv_heads is None else kv_heads
        sizes = dict(q=(length, self.heads), k=(keys, kv_heads), v=(keys, kv_heads))
        return {name: self.random(*size, self.dim) for name, size in sizes.items()}

    def scaled(self, length: int) -> Segment:
        scale = torch.rand(1, device=self.device, dtype=self.dtype)
        return self.attended(length) | {"scale": scale}

    def timed(self, length: int) -> Segment:
        times = torch.randint(5000, (length,), device=self.device)
        return self.attended(length) | {"timestamps": times}

    def matrices(self, length: int) -> Segment:
        """Rows, and the matrix and the bias of their segment."""
        rows = self.rows("x")(length)
        return rows | {"y": self.random(1, self.width, 24), "bias": self.random(1, 24)}

    def pairs(self, length: int) -> Segment:
        """Rows of x and of y, with scores of all pairs: p."""
        x, y = self.random(length, self.width), self.random((length + 3) % 41, self.width)
        return {"x": x, "y": y, "p": self.random(len(x) * len(y))}

    def compressed(self, candidates: int) -> Segment:
        user, candidate = self.random(1, 3, self.width), self.random(candidates, 7, self.width)
        return {"user": user, "candidate": candidate}


QKV = ("q", "k", "v")


def _attention_operators(make: _Operands, how: dict) -> dict[str, Operator]:
    def attention(kv_heads: int = make.heads, among_others: bool = False, **flags) -> Operator:
        """Self-attention or, with among_others, attention of three candidates whose user may have
        more."""

        def operands(length: int) -> Segment:
            return make.attended(3 if among_others else length, length, kv_heads)

        def attend(x: Segment, offsets: Segment) -> Tensor:
            operands = x["q"], x["k"], x["v"], offsets["q"], offsets["k"]
            return F.jagged_attention(*operands, **flags, **how)

        if among_others:
            return Operator(operands, attend, "q", ("q",), joined="q")
        return Operator(operands, attend, "q", QKV)

    def hstu(x: Segment, offsets: Segment) -> Tensor:
        mask = jm.AttentionMask(
            causal=True, num_targets=offsets["q"].diff() // 3, contextual_seqlen=2, max_attn_len=20
        )
        flags = dict(activation="silu", mask=mask, output_scale=0.01)
        return F.jagged_attention(x["q"], x["k"], x["v"], offsets["q"], **flags, **how)

    position = torch.randn(2 * 5000 - 1, device=make.device)
    time = torch.randn(make.heads, 9, device=make.device)

    def biased(x: Segment, offsets: Segment) -> Tensor:
        bias = jm.RelativeBias(position, time, x["timestamps"])
        flags = dict(activation="silu", mask=jm.AttentionMask(causal=True), bias=bias)
        return F.jagged_attention(x["q"], x["k"], x["v"], offsets["q"], **flags, **how)

    def scaled(x: Segment, offsets: Segment) -> Tensor:
        flags = dict(activation="silu", output_scale=x["scale"].detach())
        return F.jagged_attention(x["q"], x["k"], x["v"], offsets["q"], **flags, **how)

    window = jm.AttentionMask(window=(9, 5))
    return {
        "attention": attention(),
        "attention-causal": attention(mask=jm.AttentionMask(causal=True)),
        "attention-silu": attention(activation="silu"),
        "attention-gelu-window": attention(1, activation="gelu", mask=window),
        "attention-hstu": Operator(make.attended, hstu, "q", QKV),
        "attention-bias": Operator(make.timed, biased, "q", QKV),
        "attention-candidates": attention(among_others=True),
        "attention-candidates-relu": attention(1, among_others=True, activation="relu"),
        "attention-scales": Operator(make.scaled, scaled, "q", QKV),
    }


def _shared_operators(make: _Operands, how: dict) -> dict[str, Operator]:
    """Attention with operands that all segments share."""
    q, k, v = (make.random(5, make.heads, make.dim) for _ in QKV)

    def to_queries(x: Segment, offsets: Segment) -> Tensor:
        return F.jagged_attention(q, x["k"], x["v"], "shared", offsets["k"], **how)

    def to_keys(x: Segment, offsets: Segment) -> Tensor:
        flags = dict(activation="gelu_tanh", **how)
        return F.jagged_attention(x["q"], k, v, offsets["q"], "shared", **flags)

    def to_keys_scaled(x: Segment, offsets: Segment) -> Tensor:
        flags = dict(activation="silu", output_scale=x["scale"].detach(), **how)
        return F.jagged_attention(x["q"], k, v, offsets["q"], "shared", **flags)

    def some(made: Callable[[int], Segment], *names: str) -> Callable[[int], Segment]:
        return lambda length: {name: made(length)[name] for name in names}

    keys, queries = some(make.attended, "k", "v"), some(make.attended, "q")
    scaled = some(make.scaled, "q", "scale")
    return {
        "attention-shared-queries": Operator(keys, to_queries, lambda segment: 5, ("k", "v")),
        "attention-shared-keys": Operator(queries, to_keys, "q", ("q",)),
        "attention-shared-keys-scales": Operator(scaled, to_keys_scaled, "q", ("q",)),
    }


def _user_operators(make: _Operands, how: dict) -> dict[str, Operator]:
    """Operators of users' candidates."""

    def target(x: Segment, offsets: Segment) -> Tensor:
        """Candidates that are not sorted by user; those of one user keep their order."""
        users = torch.repeat_interleave(torch.arange(len(offsets["q"]) - 1), offsets["q"].diff())
        order = (torch.arange(len(users)) - offsets["q"][users]).argsort(stable=True)
        candidates = jm.CandidateIndex.from_map(users[order].to(make.device), len(offsets["q"]) - 1)
        out = F.target_attention(
            x["q"][order, None], x["k"], x["v"], candidates, offsets["k"], **how
        )
        return out.squeeze(1)[order.argsort()]

    mask = jm.AttentionMask(causal=True, window=(60, None), global_prefix=3)

    def both(x: Segment, offsets: Segment, mask: jm.AttentionMask | None) -> tuple[Tensor, Tensor]:
        operands = x["q"], x["candidates"], x["k"], x["v"], offsets["q"], offsets["candidates"]
        return F.self_target_attention(*operands, mask=mask, **how)

    def self_target(x: Segment, offsets: Segment, mask: jm.AttentionMask | None = None) -> Tensor:
        out = torch.cat(both(x, offsets, mask))
        return out[_by_segment(offsets["q"], offsets["candidates"])]

    def with_candidates(length: int) -> Segment:
        return make.attended(length) | {"candidates": make.random(4, make.heads, make.dim)}

    weights = [make.random(11, rows) for rows in (3, 7)]

    def compress(x: Segment, offsets: Segment) -> Tensor:
        index = jm.CandidateIndex.from_offsets(offsets["candidate"].to(make.device))
        return F.linear_compress(weights, [x["user"], x["candidate"]], index, **how)

    return {
        "target-attention": Operator(
            lambda length: make.attended(2, length), target, "q", ("q",), joined="q"
        ),
        "self-target-attention": Operator(
            with_candidates,
            self_target,
            lambda segment: segment["q"].shape[0] + 4,
            ("candidates", *QKV),
        ),
        "self-target-attention-masked": Operator(
            with_candidates,
            partial(self_target, mask=mask),
            lambda segment: segment["q"].shape[0] + 4,
            ("candidates", *QKV),
        ),
        "self-target-attention-masked-candidates": Operator(
            with_candidates,
            lambda x, offsets: both(x, offsets, mask)[1],
            "candidates",
            ("candidates",),
            joined="candidates",
        ),
        "linear-compress": Operator(make.compressed, compress, "candidate", ("user", "candidate")),
        "linear-compress-candidates": Operator(
            lambda length: make.compressed(1),
            compress,
            "candidate",
            ("candidate",),
            joined="candidate",
        ),
    }


def _block_operators(make: _Operands, how: dict, block_size: int) -> dict[str, Operator]:
    cos, sin = jm.rotary.rotary_tables(make.dim, 4096, device=make.device)
    flags = dict(block_size=block_size, rotary=jm.Rotary(cos, sin, "qk", linear=True), **how)

    def attend(x: Segment, offsets: Segment) -> Tensor:
        return F.block_diagonal_attention(x["q"], x["k"], x["v"], offsets["q"], **flags)

    def attend_packed(x: Segment, offsets: Segment) -> Tensor:
        qkv = torch.stack([x["q"], x["k"], x["v"]], 1)
        return F.block_diagonal_attention_packed(qkv, offsets["q"], **flags)

    return {
        "block-attention": Operator(make.attended, attend, "q", QKV),
        "block-attention-packed": Operator(make.attended, attend_packed, "q", QKV),
    }


def _products(make: _Operands, how: dict) -> dict[str, Operator]:
    """Matrix products of segments, and the softmax of scores."""

    def plan(offsets: Segment) -> F.ScorePlan:
        return F.ScorePlan.from_offsets(offsets["x"], offsets["y"]).to(make.device)

    def gram(x: Segment, offsets: Segment) -> Tensor:
        own = F.ScorePlan.from_offsets(offsets["x"]).to(make.device)
        return F.jagged_jagged_bmm_jagged_out(x["x"], x["x"], own, **how)

    def pairs(length: int) -> Segment:
        return {name: x for name, x in make.pairs(length).items() if name != "p"}

    def product(segment: Segment) -> int:
        return segment["x"].shape[0] * segment["y"].shape[0]

    return {
        "dense-bmm": Operator(
            make.matrices,
            lambda x, offsets: F.jagged_dense_bmm(x["x"], x["y"], offsets["x"], **how),
            "x",
            ("x", "y"),
        ),
        "jagged-bmm": Operator(
            make.rows("x", "y"),
            lambda x, offsets: F.jagged_jagged_bmm(x["x"], x["y"], offsets["x"], **how),
            lambda segment: 1,
            ("x", "y"),
        ),
        "outer": Operator(
            pairs,
            lambda x, offsets: F.jagged_jagged_bmm_jagged_out(x["x"], x["y"], plan(offsets), **how),
            product,
            ("x", "y"),
        ),
        "gram": Operator(make.rows("x"), gram, lambda segment: segment["x"].shape[0] ** 2, ("x",)),
        "array-bmm": Operator(
            make.pairs,
            lambda x, offsets: F.array_jagged_bmm_jagged_out(x["p"], x["y"], plan(offsets), **how),
            "x",
            ("p", "y"),
        ),
        "softmax2": Operator(
            make.pairs,
            lambda x, offsets: F.jagged2_softmax(x["p"], plan(offsets), **how),
            "p",
            ("p",),
        ),
        "softmax2-columns": Operator(
            make.pairs,
            lambda x, offsets: F.jagged2_softmax(x["p"], plan(offsets), dim=-2, **how),
            "p",
            ("p",),
        ),
    }


def _row_operators(make: _Operands, how: dict) -> dict[str, Operator]:
    weight, bias = make.random(make.width, 24), make.random(24)
    scale = weight[:, 0].contiguous()

    def linear(x: Segment, offsets: Segment) -> Tensor:
        return F.jagged_linear(x["x"], weight.mT, bias, activation="silu", **how)

    def linear_segments(x: Segment, offsets: Segment) -> Tensor:
        flags = dict(activation="gelu", **how)
        return F.jagged_linear(x["x"], x["y"], x["bias"], offsets["x"], **flags)

    def with_dense(length: int) -> Segment:
        return make.rows("x")(length) | {"y": make.random(1, 3000, make.width)}

    return {
        "softmax": Operator(
            make.rows("x"),
            lambda x, offsets: F.jagged_softmax(x["x"], offsets["x"], **how),
            "x",
            ("x",),
        ),
        "linear": Operator(make.rows("x"), linear, "x", ("x",)),
        "linear-segments": Operator(make.matrices, linear_segments, "x", ("x", "y", "bias")),
        "layer-norm": Operator(
            make.rows("x"), lambda x, offsets: F.jagged_layer_norm(x["x"], scale), "x", ("x",)
        ),
        "concat": Operator(
            make.rows("x", "y"),
            lambda x, offsets: F.jagged_concat([x["x"], x["y"]], [offsets["x"], offsets["y"]])[0],
            lambda segment: 2 * segment["x"].shape[0],
            ("x", "y"),
        ),
        "dense-mul": Operator(
            with_dense,
            lambda x, offsets: F.jagged_dense_mul(x["x"], x["y"], offsets["x"]),
            "x",
            ("x", "y"),
        ),
    }


def _by_segment(*offsets: Tensor) -> Tensor:
    """Indices that reorder the rows of several query groups, one after the other, by segment."""
    return torch.cat(
        [torch.repeat_interleave(torch.arange(len(x) - 1), x.diff()) for x in offsets]
    ).argsort(stable=True)


def layers(device: str, dtype: torch.dtype, width: int = 24) -> dict[str, Operator]:
    """Layers as operators of their input's rows."""
    options = dict(device=device, dtype=dtype)

    def of(layer: torch.nn.Module, **flags) -> Operator:
        layer = layer.to(device, dtype).requires_grad_(False)
        return Operator(
            lambda length: {"x": torch.randn(length, width, **options)},
            lambda x, offsets: layer(jm.Jagged(x["x"], offsets["x"].to(device)), **flags).values,
            "x",
            ("x",),
        )

    def to_one_row(layer: torch.nn.Module) -> Operator:
        layer = layer.to(device, dtype).requires_grad_(False)
        return Operator(
            lambda length: {"x": torch.randn(length, width, **options)},
            lambda x, offsets: layer((x["x"], offsets["x"].to(device))),
            lambda segment: 1,
            ("x",),
        )

    target = jm.JaggedTargetAttention(width, 2).to(device, dtype).requires_grad_(False)

    def with_features(layer: torch.nn.Module) -> Operator:
        layer = layer.to(device, dtype).requires_grad_(False)
        return Operator(
            lambda length: {
                "x": torch.randn(length, width, **options),
                "features": torch.randn(1, 3, width, **options),
            },
            lambda x, offsets: layer((x["x"], offsets["x"].to(device)), x["features"])[0][0],
            "x",
            ("x", "features"),
        )

    return {
        "target-attention": Operator(
            lambda length: {
                "x": torch.randn(2, width, **options),
                "history": torch.randn(length, width, **options),
            },
            lambda x, offsets: target(
                *((x[name], offsets[name].to(device)) for name in ("x", "history"))
            )[0],
            "x",
            ("x",),
            joined="x",
        ),
        "gdpa": of(jm.GDPABlock(width, 2, config=jm.GDPAConfig(qk_norm=True, num_kv_heads=1))),
        "gdpa-weights": of(jm.GDPABlock(width, 2, config=jm.GDPAConfig(num_weights=5))),
        "gdpa-seeds": to_one_row(jm.JaggedGDPA(width, 2, config=jm.GDPAConfig(num_seeds=3))),
        "seed-pooling": to_one_row(jm.JaggedSeedPooling(width, 2, 8, 3, rank=2)),
        "block-attention": of(jm.BlockDiagonalSelfAttention(width, 2, block_size=16)),
        "hstu": of(jm.HSTUStack(width, 2, 2, jm.HSTUConfig(scaling_seqlen=100))),
        "mlp": of(jm.JaggedMLP([width, 33, width], "gelu")),
        "encoder": of(jm.JaggedEncoderLayer(width, 2, 33, norm="rms", activation="swiglu")),
        # the first of the two layers updates features that the second reads
        "interformer": with_features(jm.JaggedInterFormer(width, 2, 3, num_layers=2)),
        "kunlun": with_features(jm.JaggedKunlun(width, 2, 3, num_layers=2)),
    }
