"""The cost of relative biases in causal attention: tables of positions and of time differences,
with their gradients.

    # on a CUDA device, about 2 minutes on an H100
    python kernels/benchmarks/bench_bias.py
    # some of the cases
    python kernels/benchmarks/bench_bias.py --only "HSTU.*: B128 N1024 D64"
    # the CPU path, smaller shapes
    python kernels/benchmarks/bench_bias.py --device cpu
    python kernels/benchmarks/bench_bias.py --tiny --device cpu

Tables are learned, in fp32 and shared by the heads; forward+backward includes their gradients.
Times between events are log-normal. Peers get padded inputs and read the same tables. Every
implementation is checked against the definition with the bias that it adds. Speed-ups are over our
attention without a bias. TFLOP/s count its work, 4·H·D forward for each pair of a query and a key
it sees and 2.5 times that backward, for every implementation alike.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial

import torch
from inputs import (
    attention_setup,
    by_rows,
    exact,
    leaves,
    lognormal_lengths,
    named,
    offsets_of,
    pad,
    padded_form,
    random_tensors,
    sample_segments,
    timed_schedule,
    uniform_lengths,
)
from names import OURS
from runner import Case, Implementation, Setup, main
from torch import Tensor

import jagged_modules as jm
from jagged_modules import functional as F

NO_BIAS: tuple[str, ...] = ()
POSITION = ("position",)
POSITION_AND_TIME = ("position", "time")
FLEX = "flex_attention"
NUM_BUCKETS = 128
# mean and standard deviation of the logarithm of the seconds between two events
LOG_SECONDS = (6.0, 2.0)


def name_of(implementation: str, tables: tuple[str, ...]) -> str:
    return f"{implementation}, {' and '.join(tables)}" if tables else implementation


@dataclasses.dataclass(frozen=True)
class Function:
    """The weights: activation(scale · q kᵀ + bias) · output_scale. The fields are arguments of
    jagged_attention."""

    activation: str
    scale: float
    output_scale: float = 1.0

    def plain(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
        """On ``[..., N, D]`` in plain torch. True in ``hidden`` hides a key. A bias in fp32 makes
        the scores fp32."""
        scores = (self.scale * q) @ k.transpose(-1, -2)
        scores = scores if bias is None else scores + bias
        if self.activation == "softmax":
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        else:
            weights = self.output_scale * torch.nn.functional.silu(scores).masked_fill(hidden, 0.0)
        return weights.to(v.dtype) @ v


def random_timestamps(lengths: Tensor) -> Tensor:
    """Host timestamps in seconds, int64: those of a segment increase, by log-normal times."""
    steps = torch.empty(int(lengths.sum()), dtype=torch.float64)
    steps = (
        steps.log_normal_(*LOG_SECONDS, generator=torch.Generator().manual_seed(0)).ceil().long()
    )
    return torch.cat([x.cumsum(0) for x in steps.split(lengths.tolist())])


def flex_with_tables(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    time: Tensor | None = None,
    *,
    buckets: Tensor,
    block_mask,
    scale: float,
) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    middle = position.shape[0] // 2

    def add_tables(score, batch, head, i, j):
        score = score + position[j - i + middle]
        return score if time is None else score + time[buckets[batch, i, j].int()]

    return flex_attention(q, k, v, score_mod=add_tables, block_mask=block_mask, scale=scale)


# -- one shape -------------------------------------------------------------------------------------


class Problem:
    """Inputs of one shape, implementations of causal attention on them with any of the two tables,
    and the definition.

    The definition's output and gradients of q, k and v are those of sampled segments. Gradients of
    tables are sums over all segments.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        lengths: Tensor,
        num_heads: int,
        head_dim: int,
        activation: str,
    ):
        self.device, self.dtype, self.lengths, self.longest = (
            device,
            dtype,
            lengths,
            int(lengths.max()),
        )
        self.function = Function(
            activation, head_dim**-0.5, 1.0 if activation == "softmax" else 1 / self.longest
        )
        host_offsets = offsets_of(lengths)
        self.offsets = host_offsets.to(device)
        q, k, v, self.grad = random_tensors(
            device, dtype, *[(int(lengths.sum()), num_heads, head_dim)] * 4
        )
        position, time = random_tensors(
            device, torch.float32, (2 * self.longest - 1,), (NUM_BUCKETS + 1,)
        )
        self.inputs = leaves(q=q, k=k, v=v)
        self.tables = leaves(position=position, time=time)
        timestamps = random_timestamps(lengths)
        rows = torch.arange(len(timestamps))
        last = (host_offsets[1:] - 1).long().repeat_interleave(lengths)
        self.timestamps, self.next_timestamps = (
            x.to(device) for x in (timestamps, timestamps[(rows + 1).minimum(last)])
        )
        self.boundaries = jm.RelativeBias.log_boundaries(NUM_BUCKETS).to(device)
        self.mask = jm.AttentionMask(causal=True)
        self.rows = [slice(*host_offsets[b : b + 2].tolist()) for b in range(len(lengths))]
        self.samples = sample_segments(lengths)
        i = torch.arange(self.longest)
        # [N, N], into the position table
        self.index = (i - i[:, None] + self.longest - 1).to(device)
        self.hidden = (i > i[:, None]).to(device)  # [N, N]: keys after the query
        self.valid = (i < lengths[:, None]).to(device)  # [B, N]: no padding

    def setup(self, implementations: dict[str, Callable[[], Implementation]]) -> Setup:
        flops = 4.0 * self.grad[0].numel() * int((self.lengths * (self.lengths + 1) // 2).sum())
        given = implementations, self.reference, self.dtype, self.device, flops
        return attention_setup(*given, baseline=OURS)

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """With no table, with one and with both. Tables stay in fp32 if ``dtype`` is shorter."""
        results = {}
        for names in (NO_BIAS, POSITION, POSITION_AND_TIME):
            part = " and ".join(names) or "no bias"
            tables = {
                name: (
                    self.tables[name]
                    .detach()
                    .to(torch.promote_types(dtype, torch.float32))
                    .requires_grad_()
                )
                for name in names
            }
            sums = {name: torch.zeros_like(x) for name, x in tables.items()}
            for b in range(len(self.lengths)) if names else self.samples:
                rows, n = self.rows[b], int(self.lengths[b])
                bias = self.bias(
                    self.index[:n, :n], self.next_timestamps[rows], self.timestamps[rows], **tables
                )
                forward = by_rows(self.function.plain, bias, self.hidden[:n, :n])
                qkv = (x[rows] for x in self.inputs.values())
                found = exact(forward, qkv, self.grad[rows], dtype, tables.values())
                if b in self.samples:
                    results |= named(f"{part} {b}", found)
                for name, gradient in zip(tables, found[4:]):
                    sums[name] += gradient
            results |= {f"d{name}/{part}": x for name, x in sums.items()}
        return results

    def bias(
        self,
        index: Tensor,
        u: Tensor,
        t: Tensor,
        position: Tensor | None = None,
        time: Tensor | None = None,
    ) -> Tensor | None:
        """``[..., N, N]``, of queries at times u ``[..., N]`` and keys at times t."""
        if position is None:
            return None
        bias = position[index]
        if time is not None:
            bias = (
                bias
                + time[
                    torch.bucketize(
                        (u[..., :, None] - t[..., None, :]).abs(), self.boundaries, right=True
                    )
                ]
            )
        return bias

    def implementation(
        self, tables, forward, inputs=None, grad=None, rows_of=lambda x, b, rows: x[rows], **extra
    ) -> Implementation:
        """``tables``: the names of those that it adds. ``rows_of(x, b, rows)`` returns segment b's
        ``[N, H, D]`` of a result."""
        part = " and ".join(tables) or "no bias"

        def pick(name, x):
            if name.removeprefix("d") in tables:
                return {part: x}
            return {f"{part} {b}": rows_of(x, b, self.rows[b]) for b in self.samples}

        inputs = (self.inputs if inputs is None else inputs) | {
            name: self.tables[name] for name in tables
        }
        return Implementation(
            lambda: forward(**inputs), inputs, pick, self.grad if grad is None else grad, **extra
        )

    def ours(self, tables: tuple[str, ...]) -> Implementation:
        schedule, build_ms = timed_schedule(self.lengths, self.lengths, self.inputs["q"], self.mask)
        options = dict(
            max_seqlen_q=self.longest,
            mask=self.mask,
            schedule=schedule,
            **dataclasses.asdict(self.function),
        )
        times = {"timestamps": self.timestamps} if "time" in tables else {}

        def forward(q, k, v, **tables):
            bias = jm.RelativeBias(**tables, **times) if tables else None
            return F.jagged_attention(q, k, v, self.offsets, bias=bias, **options)

        return self.implementation(tables, forward, host_ms=build_ms)

    def on_padded(self, tables: tuple[str, ...], forward: Callable, **options) -> Implementation:
        """``forward`` on ``[B, H, N, D]``, compiled on CUDA."""
        if self.device == "cuda":
            forward = torch.compile(forward, dynamic=False)
        return self.implementation(
            tables,
            lambda **inputs: forward(**inputs, **options),
            *padded_form(self.inputs, self.grad, self.valid, self.valid),
            note="padded inputs, compiled" if self.device == "cuda" else "padded inputs",
        )

    def padded(self, tables: tuple[str, ...]) -> Implementation:
        """Plain torch, which adds the bias as ``[N, N]`` or with times ``[B, N, N]``. No valid
        query sees padding, as it comes later."""
        index, hidden = self.index, self.hidden
        u, t = (
            pad(x[:, None], self.valid)[..., 0] for x in (self.next_timestamps, self.timestamps)
        )

        def forward(q, k, v, **tables):
            bias = self.bias(index, u, t, **tables)
            # the same for all heads
            bias = bias[:, None] if bias is not None and bias.dim() == 3 else bias
            return self.function.plain(q, k, v, bias, hidden)

        return self.on_padded(tables, forward)

    def flex(self, tables: tuple[str, ...]) -> Implementation:
        """flex_attention, whose score_mod adds the tables. The buckets of all pairs, a byte each,
        and the block mask, which also hides padded queries, are made beforehand."""
        from torch.nn.attention.flex_attention import create_block_mask

        lengths = self.offsets.diff()

        def sees(batch, head, i, j):
            return j <= i

        def sees_within(batch, head, i, j):
            return (j <= i) & (i < lengths[batch])

        mask, batch = (sees, None) if bool(self.valid.all()) else (sees_within, len(lengths))
        block_mask = create_block_mask(
            mask, batch, None, self.longest, self.longest, device=self.inputs["q"].device
        )
        u, t = (
            pad(x[:, None], self.valid)[..., 0] for x in (self.next_timestamps, self.timestamps)
        )
        distances = (u[:, :, None] - t[:, None, :]).abs()
        buckets = torch.bucketize(distances, self.boundaries, right=True).to(torch.uint8)
        options = dict(buckets=buckets, block_mask=block_mask, scale=self.function.scale)
        return self.on_padded(tables, flex_with_tables, **options)


def biases(problem: Callable[[], Problem]) -> Setup:
    """Ours without a bias, with one table and with both; the others with one table and with both.
    flex_attention has no SiLU."""
    problem = problem()
    if problem.device == "cuda":
        torch.compiler.reset()  # dynamo caches only a few graphs of a function
    implementations = {
        name_of(OURS, tables): partial(problem.ours, tables)
        for tables in (NO_BIAS, POSITION, POSITION_AND_TIME)
    }
    implementations |= {
        name_of("padded, bias materialised", tables): partial(problem.padded, tables)
        for tables in (POSITION, POSITION_AND_TIME)
    }
    # elsewhere flex_attention has no backward
    if problem.device == "cuda" and problem.function.activation == "softmax":
        implementations |= {
            name_of(FLEX, tables): partial(problem.flex, tables)
            for tables in (POSITION, POSITION_AND_TIME)
        }
    return problem.setup(implementations)


# -- cases -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """A row of a table. ``jagged``: lengths that are uniform over 1..longest; ``mean``: that of
    lognormal ones; otherwise they are full."""

    activation: str
    batch: int
    longest: int
    head_dim: int
    jagged: bool = False
    mean: int = 0

    @property
    def table(self) -> str:
        return (
            "softmax, causal"
            if self.activation == "softmax"
            else "HSTU (silu, output_scale 1/N), causal"
        )

    @property
    def name(self) -> str:
        mean = f" mean {self.mean}" if self.mean else ""
        low = "1.." if self.jagged else ""
        return f"B{self.batch}{mean} N{low}{self.longest} D{self.head_dim}"

    def lengths(self) -> Tensor:
        if self.mean:
            return lognormal_lengths(self.batch, self.mean, self.longest, 1.1)
        return uniform_lengths(self.batch, 1 if self.jagged else self.longest, self.longest)


FULL = [
    Shape(activation, 128, 1024, dim) for activation in ("silu", "softmax") for dim in (64, 128)
]
FULL += [Shape(activation, 128, 1024, 64, jagged=True) for activation in ("silu", "softmax")]
FULL += [Shape("silu", 32, 1024, 64)]
FULL += [
    Shape(activation, 128, 1024, dim, mean=474)
    for activation in ("silu", "softmax")
    for dim in (64, 128)
]
CPU = [
    Shape(activation, 16, 256, 64, jagged)
    for activation in ("silu", "softmax")
    for jagged in (False, True)
]
TINY = [
    Shape(activation, 4, 20, 8, jagged)
    for activation in ("silu", "softmax")
    for jagged in (False, True)
]
NUM_HEADS = {"cuda": 4, "cpu": 4, "tiny": 2}


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: bf16, the most important first. CPU: fp32 and smaller shapes. ``tiny``: everything,
    small."""
    shapes = TINY if tiny else FULL if device == "cuda" else CPU
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = NUM_HEADS["tiny" if tiny else device]
    cases = []
    for shape in shapes:
        problem = partial(
            Problem, device, dtype, shape.lengths(), heads, shape.head_dim, shape.activation
        )
        cases.append(Case(shape.table, shape.name, partial(biases, problem)))
    return cases


def summary(rows: list[dict]) -> list[str]:
    """What the tables add to our times, in %."""
    ours = {
        (row["table"], row["case"], row["implementation"]): row
        for row in rows
        if row.get("forward_backward_ms")
    }
    lines = []
    for (table, case, name), alone in ours.items():
        costs = []
        for tables in (POSITION, POSITION_AND_TIME) if name == OURS else ():
            row = ours.get((table, case, name_of(OURS, tables)))
            if row is not None:
                forward, both = (
                    100 * (row[key] / alone[key] - 1)
                    for key in ("forward_ms", "forward_backward_ms")
                )
                costs.append(
                    f"{' and '.join(tables)} {forward:+.0f} % forward, {both:+.0f} %"
                    " forward+backward"
                )
        if costs:
            lines.append(f"{table}, {case}: {'; '.join(costs)} ({OURS}).")
    return lines


if __name__ == "__main__":
    sys.exit(main("bias", make_cases, summary=summary))
