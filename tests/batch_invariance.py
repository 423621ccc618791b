"""Compares a segment alone and in batches under `batch_invariant`, for the tests on the CPU, in the
interpreter and on a GPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence

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
    options, how = dict(device=device, dtype=dtype), dict(implementation=implementation)

    def rows(*names: str, columns: int = width) -> Callable[[int], Segment]:
        return lambda length: {name: torch.randn(length, columns, **options) for name in names}

    def attended(length: int, keys: int | None = None, kv_heads: int = heads) -> Segment:
        keys = length if keys is None else keys
        sizes = dict(q=(length, heads), k=(keys, kv_heads), v=(keys, kv_heads))
        return {name: torch.randn(*size, dim, **options) for name, size in sizes.items()}

    def attention(*, among_others: bool = False, kv_heads: int = heads, **flags) -> Operator:
        """Self-attention or, with among_others, attention of three candidates whose user may have
        more."""
        return Operator(
            lambda length: attended(3 if among_others else length, length, kv_heads),
            lambda x, offsets: F.jagged_attention(
                x["q"], x["k"], x["v"], offsets["q"], offsets["k"], **flags, **how
            ),
            "q",
            ("q",) if among_others else ("q", "k", "v"),
            joined="q" if among_others else None,
        )

    def hstu(x: Segment, offsets: Segment) -> Tensor:
        mask = jm.AttentionMask(
            causal=True, num_targets=offsets["q"].diff() // 3, contextual_seqlen=2, max_attn_len=20
        )
        return F.jagged_attention(
            x["q"],
            x["k"],
            x["v"],
            offsets["q"],
            activation="silu",
            mask=mask,
            output_scale=0.01,
            **how,
        )

    tables = torch.randn(2 * 5000 - 1, **options).float(), torch.randn(heads, 9, **options).float()

    def biased(x: Segment, offsets: Segment) -> Tensor:
        bias = jm.RelativeBias(*tables, x["timestamps"])
        mask = jm.AttentionMask(causal=True)
        return F.jagged_attention(
            x["q"], x["k"], x["v"], offsets["q"], activation="silu", mask=mask, bias=bias, **how
        )

    def timed(length: int) -> Segment:
        return attended(length) | {"timestamps": torch.randint(5000, (length,), device=device)}

    shared = {name: torch.randn(5, heads, dim, **options) for name in ("q", "k", "v")}
    weights = dict(
        matrix=torch.randn(width, 24, **options),
        bias=torch.randn(24, **options),
        user=torch.randn(11, 3, **options),
    )
    weights["candidate"] = torch.randn(11, 7, **options)

    def matrices(length: int) -> Segment:
        return rows("x")(length) | {
            "y": torch.randn(1, width, 24, **options),
            "bias": torch.randn(1, 24, **options),
        }

    def pairs(length: int) -> Segment:
        return {
            name: torch.randn(n, width, **options)
            for name, n in (("x", length), ("y", (length + 3) % 41))
        }

    def scores(length: int) -> Segment:
        segment = pairs(length)
        return segment | {
            "p": torch.randn(segment["x"].shape[0] * segment["y"].shape[0], **options)
        }

    def plan(offsets: Segment) -> F.ScorePlan:
        return F.ScorePlan.from_offsets(offsets["x"], offsets["y"]).to(device)

    def compressed(candidates: int) -> Segment:
        return {
            "user": torch.randn(1, 3, width, **options),
            "candidate": torch.randn(candidates, 7, width, **options),
        }

    def compress(x: Segment, offsets: Segment) -> Tensor:
        levels = [weights["user"], weights["candidate"]], [x["user"], x["candidate"]]
        return F.linear_compress(
            *levels,
            jm.CandidateIndex.from_offsets(offsets["candidate"].to(device)),
            implementation=implementation,
        )

    def target(x: Segment, offsets: Segment) -> Tensor:
        """Candidates that are not sorted by user; those of one user keep their order."""
        users = torch.repeat_interleave(torch.arange(len(offsets["q"]) - 1), offsets["q"].diff())
        order = (torch.arange(len(users)) - offsets["q"][users]).argsort(stable=True)
        candidates = jm.CandidateIndex.from_map(users[order].to(device), len(offsets["q"]) - 1)
        out = F.target_attention(
            x["q"][order, None], x["k"], x["v"], candidates, offsets["k"], **how
        )
        return out.squeeze(1)[order.argsort()]

    def self_target(x: Segment, offsets: Segment) -> Tensor:
        out = F.self_target_attention(
            x["q"], x["candidates"], x["k"], x["v"], offsets["q"], offsets["candidates"], **how
        )
        return torch.cat(out)[_by_segment(offsets["q"], offsets["candidates"])]

    def block(packed: bool) -> Callable[[Segment, Segment], Tensor]:
        cos, sin = jm.rotary.rotary_tables(dim, 4096, device=device)
        rotary = jm.Rotary(cos, sin, "qk", linear=True)

        def apply(x: Segment, offsets: Segment) -> Tensor:
            flags = dict(block_size=block_size, rotary=rotary, **how)
            if packed:
                return F.block_diagonal_attention_packed(
                    torch.stack([x["q"], x["k"], x["v"]], 1), offsets["q"], **flags
                )
            return F.block_diagonal_attention(x["q"], x["k"], x["v"], offsets["q"], **flags)

        return apply

    qkv = ("q", "k", "v")
    one_scale = lambda length: attended(length) | {"scale": torch.rand(1, **options)}
    return {
        "attention": attention(),
        "attention-causal": attention(mask=jm.AttentionMask(causal=True)),
        "attention-silu": attention(activation="silu"),
        "attention-gelu-window": attention(
            activation="gelu", mask=jm.AttentionMask(window=(9, 5)), kv_heads=1
        ),
        "attention-hstu": Operator(attended, hstu, "q", qkv),
        "attention-bias": Operator(timed, biased, "q", qkv),
        "attention-candidates": attention(among_others=True),
        "attention-candidates-relu": attention(among_others=True, activation="relu", kv_heads=1),
        "attention-shared-queries": Operator(
            lambda length: {name: attended(length)[name] for name in ("k", "v")},
            lambda x, offsets: F.jagged_attention(
                shared["q"], x["k"], x["v"], "shared", offsets["k"], **how
            ),
            lambda segment: 5,
            ("k", "v"),
        ),
        "attention-shared-keys": Operator(
            lambda length: {"q": attended(length)["q"]},
            lambda x, offsets: F.jagged_attention(
                x["q"],
                shared["k"],
                shared["v"],
                offsets["q"],
                "shared",
                activation="gelu_tanh",
                **how,
            ),
            "q",
            ("q",),
        ),
        "attention-shared-keys-scales": Operator(
            lambda length: {name: one_scale(length)[name] for name in ("q", "scale")},
            lambda x, offsets: F.jagged_attention(
                x["q"],
                shared["k"],
                shared["v"],
                offsets["q"],
                "shared",
                activation="silu",
                output_scale=x["scale"].detach(),
                **how,
            ),
            "q",
            ("q",),
        ),
        "attention-scales": Operator(
            one_scale,
            lambda x, offsets: F.jagged_attention(
                x["q"],
                x["k"],
                x["v"],
                offsets["q"],
                activation="silu",
                output_scale=x["scale"].detach(),
                **how,
            ),
            "q",
            qkv,
        ),
        "target-attention": Operator(
            lambda length: attended(2, length), target, "q", ("q",), joined="q"
        ),
        "self-target-attention": Operator(
            lambda length: attended(length) | {"candidates": torch.randn(4, heads, dim, **options)},
            self_target,
            lambda segment: segment["q"].shape[0] + 4,
            ("candidates", *qkv),
        ),
        "block-attention": Operator(attended, block(False), "q", qkv),
        "block-attention-packed": Operator(attended, block(True), "q", qkv),
        "dense-bmm": Operator(
            matrices,
            lambda x, offsets: F.jagged_dense_bmm(x["x"], x["y"], offsets["x"], **how),
            "x",
            ("x", "y"),
        ),
        "jagged-bmm": Operator(
            rows("x", "y"),
            lambda x, offsets: F.jagged_jagged_bmm(x["x"], x["y"], offsets["x"], **how),
            lambda segment: 1,
            ("x", "y"),
        ),
        "softmax": Operator(
            rows("x"), lambda x, offsets: F.jagged_softmax(x["x"], offsets["x"], **how), "x", ("x",)
        ),
        "outer": Operator(
            pairs,
            lambda x, offsets: F.jagged_jagged_bmm_jagged_out(x["x"], x["y"], plan(offsets), **how),
            lambda segment: segment["x"].shape[0] * segment["y"].shape[0],
            ("x", "y"),
        ),
        "gram": Operator(
            rows("x"),
            lambda x, offsets: F.jagged_jagged_bmm_jagged_out(
                x["x"], x["x"], F.ScorePlan.from_offsets(offsets["x"]).to(device), **how
            ),
            lambda segment: segment["x"].shape[0] ** 2,
            ("x",),
        ),
        "array-bmm": Operator(
            scores,
            lambda x, offsets: F.array_jagged_bmm_jagged_out(x["p"], x["y"], plan(offsets), **how),
            "x",
            ("p", "y"),
        ),
        "softmax2": Operator(
            scores, lambda x, offsets: F.jagged2_softmax(x["p"], plan(offsets), **how), "p", ("p",)
        ),
        "softmax2-columns": Operator(
            scores,
            lambda x, offsets: F.jagged2_softmax(x["p"], plan(offsets), dim=-2, **how),
            "p",
            ("p",),
        ),
        "linear": Operator(
            rows("x"),
            lambda x, offsets: F.jagged_linear(
                x["x"], weights["matrix"].mT, weights["bias"], activation="silu", **how
            ),
            "x",
            ("x",),
        ),
        "linear-segments": Operator(
            matrices,
            lambda x, offsets: F.jagged_linear(
                x["x"], x["y"], x["bias"], offsets["x"], activation="gelu", **how
            ),
            "x",
            ("x", "y", "bias"),
        ),
        "linear-compress": Operator(compressed, compress, "candidate", ("user", "candidate")),
        "linear-compress-candidates": Operator(
            lambda length: compressed(1), compress, "candidate", ("candidate",), joined="candidate"
        ),
        "layer-norm": Operator(
            rows("x"),
            lambda x, offsets: F.jagged_layer_norm(x["x"], weights["matrix"][:, 0].contiguous()),
            "x",
            ("x",),
        ),
        "concat": Operator(
            rows("x", "y"),
            lambda x, offsets: F.jagged_concat([x["x"], x["y"]], [offsets["x"], offsets["y"]])[0],
            lambda segment: 2 * segment["x"].shape[0],
            ("x", "y"),
        ),
        "dense-mul": Operator(
            lambda length: rows("x")(length) | {"y": torch.randn(1, 3000, width, **options)},
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

    pooled = (
        jm.JaggedGDPA(width, 2, config=jm.GDPAConfig(num_seeds=3))
        .to(device, dtype)
        .requires_grad_(False)
    )
    target = jm.JaggedTargetAttention(width, 2).to(device, dtype).requires_grad_(False)
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
        "gdpa-seeds": Operator(
            lambda length: {"x": torch.randn(length, width, **options)},
            lambda x, offsets: pooled((x["x"], offsets["x"].to(device))),
            lambda segment: 1,
            ("x",),
        ),
        "block-attention": of(jm.BlockDiagonalSelfAttention(width, 2, block_size=16)),
        "hstu": of(jm.HSTUStack(width, 2, 2, jm.HSTUConfig(scaling_seqlen=100))),
        "mlp": of(jm.JaggedMLP([width, 33, width], "gelu")),
    }
