"""Jagged attention with pointwise activations and masks: GDPA, HSTU, and operands that all segments
share (PMA, PFFN).

    python kernels/benchmarks/bench_gdpa.py                                   # on a CUDA device
    python kernels/benchmarks/bench_gdpa.py --only "GDPA|activations"         # some of the tables
    # the CPU path, smaller shapes
    python kernels/benchmarks/bench_gdpa.py --device cpu
    python kernels/benchmarks/bench_gdpa.py --tiny --device cpu

TFLOP/s count the useful work, 4·H·D forward for each pair of a query and a key it sees and 2.5
times that backward, for every implementation alike. torch's fused attention computes softmax only;
it is checked against softmax, and its rows say so.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import cached_property, partial

import peers
import torch
from inputs import (
    attention_setup,
    by_rows,
    exact,
    jagged_over_full,
    leaves,
    named,
    offsets_of,
    our_kernels,
    padded_form,
    random_tensors,
    sample_segments,
    timed_schedule,
    uniform_lengths,
    varlen_attention,
)
from names import OURS
from runner import Case, Implementation, Setup, main
from torch import Tensor

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import POINTWISE

GDPA = "GDPA (gelu_tanh)"
FA2 = "varlen_attn (FA2), softmax"
FLEX = "flex_attention, softmax"
SOFTMAX_NOTE = "another function: softmax"
SWEPT = ("softmax", "identity", "relu", "silu", "gelu", "gelu_tanh", "gelu_taylor")


@dataclasses.dataclass(frozen=True)
class Function:
    """The weights: activation(scale · q kᵀ) · output_scale. The fields are arguments of
    jagged_attention."""

    activation: str
    scale: float = 1.0
    output_scale: float = 1.0

    def plain(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        """On ``[..., N, D]`` in plain torch. True in ``hidden`` hides a key; every query must see
        at least one."""
        scores = (q if self.scale == 1 else self.scale * q) @ k.transpose(-1, -2)
        if self.activation == "softmax":
            return (
                scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
            ).softmax(-1) @ v
        weights = POINTWISE[self.activation].function(scores)
        out = (weights if hidden is None else weights.masked_fill(hidden, 0.0)) @ v
        return out if self.output_scale == 1 else self.output_scale * out


GELU = Function("gelu_tanh")


# -- jagged queries, jagged keys -------------------------------------------------------------------


class Problem:
    """Inputs of one shape, implementations of attention on them, and the definition on sampled
    segments.

    q and k are ``magnitude``·N(0,1). With ``num_targets`` ``[B]``, the mask is causal, and each
    segment ends with that many targets; without any targets it is causal alone.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        q_lengths: Tensor,
        kv_lengths: Tensor,
        num_heads: int,
        head_dim: int,
        magnitude: float = 1.0,
        num_targets: Tensor | None = None,
    ):
        self.device, self.dtype, self.lengths = device, dtype, (q_lengths, kv_lengths)
        self.max_q, self.max_kv = int(q_lengths.max()), int(kv_lengths.max())
        host_offsets = [offsets_of(lengths) for lengths in self.lengths]
        self.q_offsets, self.kv_offsets = (offsets.to(device) for offsets in host_offsets)
        self.num_targets = self.mask = None
        if num_targets is not None:
            self.num_targets = num_targets.to(device)
            some = self.num_targets if num_targets.any() else None
            self.mask = jm.AttentionMask(causal=True, num_targets=some)
        q_shape, kv_shape = ((int(lengths.sum()), num_heads, head_dim) for lengths in self.lengths)
        q, k, v, self.grad = random_tensors(device, dtype, q_shape, kv_shape, kv_shape, q_shape)
        self.inputs = leaves(q=magnitude * q, k=magnitude * k, v=v)
        self.samples = sample_segments(q_lengths)
        self.q_rows, self.kv_rows = (
            {b: slice(*offsets[b : b + 2].tolist()) for b in self.samples}
            for offsets in host_offsets
        )

    @cached_property
    def keep(self) -> Tensor:
        """``[B, max_q, max_kv]``: True for the keys that a query sees, False in the padding."""
        sizes = list(zip(*(x.tolist() for x in (*self.lengths, self.num_targets))))
        keep = torch.zeros(
            len(sizes), self.max_q, self.max_kv, dtype=torch.bool, device=self.device
        )
        for b, (rows, columns, targets) in enumerate(sizes):
            keep[b, :rows, :columns] = self.mask.keep(rows, columns, targets, self.device)
        return keep

    @property
    def softmax(self) -> Function:
        return Function("softmax", self.inputs["q"].shape[-1] ** -0.5)

    def setup(
        self,
        functions: tuple[Function, ...],
        implementations: dict[str, Callable[[], Implementation]],
    ) -> Setup:
        """``functions``: all functions that the implementations compute."""
        q_lengths, kv_lengths = self.lengths
        pairs = int((q_lengths * kv_lengths).sum() if self.mask is None else self.keep.sum())
        flops = 4.0 * self.inputs["q"].shape[1:].numel() * pairs
        reference = partial(self.reference, functions)
        return attention_setup(implementations, reference, self.dtype, self.device, flops)

    def reference(self, functions: tuple[Function, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        results, (q, k, v) = {}, self.inputs.values()
        q_lengths, kv_lengths = self.lengths
        for function in functions:
            for b in self.samples:
                rows, kv_rows = self.q_rows[b], self.kv_rows[b]
                hidden = (
                    None if self.mask is None else ~self.keep[b, : q_lengths[b], : kv_lengths[b]]
                )
                given = (q[rows], k[kv_rows], v[kv_rows]), self.grad[rows], dtype
                found = exact(by_rows(function.plain, hidden), *given)
                results |= named(f"{function.activation} {b}", found)
        return results

    def implementation(
        self,
        function: Function,
        forward,
        inputs=None,
        grad=None,
        rows_of=lambda x, b, rows: x[rows],
        **extra,
    ):
        """``rows_of(x, b, rows)`` returns segment b's ``[N, H, D]`` of a result in the layout of
        ``inputs``."""

        def pick(name, x):
            rows = self.q_rows if name in ("out", "dq") else self.kv_rows
            return {f"{function.activation} {b}": rows_of(x, b, rows[b]) for b in self.samples}

        inputs = self.inputs if inputs is None else inputs
        return Implementation(
            lambda: forward(**inputs), inputs, pick, self.grad if grad is None else grad, **extra
        )

    def ours(self, function: Function, note: str = "", kernels: str = "auto") -> Implementation:
        schedule, build_ms = timed_schedule(*self.lengths, self.inputs["q"], self.mask, kernels)
        forward = partial(
            F.jagged_attention,
            q_offsets=self.q_offsets,
            kv_offsets=self.kv_offsets,
            max_seqlen_q=self.max_q,
            max_seqlen_kv=self.max_kv,
            mask=self.mask,
            schedule=schedule,
            implementation=kernels,
            **dataclasses.asdict(function),
        )
        return self.implementation(function, forward, host_ms=build_ms, note=note)

    def our_implementations(
        self, function: Function, note: str = ""
    ) -> dict[str, Callable[[], Implementation]]:
        return {
            name: partial(self.ours, function, note, kernels)
            for name, kernels in our_kernels(self.device).items()
        }

    def varlen(self) -> Implementation:
        return self.by_offsets(self.softmax, varlen_attention, SOFTMAX_NOTE)

    def by_offsets(
        self, function: Function, attention: Callable[..., Tensor], note: str = ""
    ) -> Implementation:
        def forward(q, k, v):
            return attention(q, k, v, self.q_offsets, self.kv_offsets, self.max_q, self.max_kv)

        return self.implementation(function, forward, note=note)

    def padded(self, function: Function) -> Implementation:
        """Plain torch on ``[B, H, N, D]``, with the mask made beforehand. Without a mask, padded
        keys have weight activation(0) = 0."""
        q_valid, kv_valid = (
            (torch.arange(n) < x[:, None]).to(self.device)
            for n, x in zip((self.max_q, self.max_kv), self.lengths)
        )
        dense, *others = padded_form(self.inputs, self.grad, q_valid, kv_valid)
        masked = {} if self.mask is None else {"hidden": ~self.keep[:, None]}
        return self.implementation(
            function,
            function.plain,
            dense | masked,
            *others,
            note="padded inputs" + (", mask made beforehand" if masked else ""),
        )

    def flex(self) -> Implementation:
        """flex_attention, compiled, with all segments in one sequence; the block mask, made
        beforehand, separates them."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        host_lengths, _ = self.lengths
        lengths, total = host_lengths.to(self.device), int(host_lengths.sum())
        segment = torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)
        first_target = (self.q_offsets[1:] - self.num_targets).repeat_interleave(lengths)

        def sees(batch, head, i, j):
            return (segment[i] == segment[j]) & ((i == j) | (j < i) & (j < first_target[i]))

        block_mask = torch.compile(create_block_mask, dynamic=True)(
            sees, None, None, total, total, device=self.device
        )
        attention = partial(torch.compile(flex_attention, dynamic=True), block_mask=block_mask)
        dense = leaves(**{name: x.transpose(0, 1)[None] for name, x in self.inputs.items()})
        return self.implementation(
            self.softmax,
            lambda q, k, v: attention(q, k, v),
            dense,
            self.grad.transpose(0, 1)[None].contiguous(),
            lambda x, b, rows: x[0, :, rows].transpose(0, 1),
            note=f"{SOFTMAX_NOTE}; block mask made beforehand",
        )


def gdpa(problem: Callable[[], Problem], padded: bool, note: str) -> Setup:
    """tanh-GELU, no mask. Padded plain torch and Meta's kernel compute the same."""
    problem = problem()
    implementations = problem.our_implementations(GELU, note) | {FA2: problem.varlen}
    if problem.device == "cuda":
        implementations[peers.META_GDPA] = lambda: problem.by_offsets(GELU, peers.meta_gdpa())
    if padded:
        implementations["bmm + gelu_tanh + bmm, padded"] = partial(problem.padded, GELU)
    return problem.setup((GELU, problem.softmax), implementations)


def one_activation(problem: Callable[[], Problem], activation: str) -> Setup:
    problem, function = problem(), Function(activation)
    return problem.setup((function,), {OURS: partial(problem.ours, function)})


def hstu(problem: Callable[[], Problem], softmax: bool) -> Setup:
    """SiLU, causal, targets. ``softmax``: also softmax under the same mask, which flex_attention
    computes; it has no SiLU."""
    problem = problem()
    silu = Function("silu", problem.softmax.scale, output_scale=1 / problem.max_kv)
    implementations = problem.our_implementations(silu) | {
        "bmm + silu + bmm, padded + mask": partial(problem.padded, silu)
    }
    if not softmax:
        return problem.setup((silu,), implementations)
    implementations[f"{OURS}, softmax"] = partial(problem.ours, problem.softmax, SOFTMAX_NOTE)
    if problem.device == "cuda":  # elsewhere flex_attention has no backward
        implementations[FLEX] = problem.flex
    return problem.setup((silu, problem.softmax), implementations)


# -- an operand all segments share -----------------------------------------------------------------


def shared_operand(
    device: str,
    dtype: torch.dtype,
    lengths: Tensor,
    num_shared: int,
    num_heads: int,
    head_dim: int,
    pma: bool,
) -> Setup:
    """``pma``: ``num_shared`` seeds query every segment. Otherwise PFFN: every row attends to
    ``num_shared`` rows of weights.

    The replicated forms copy the shared operand to each segment in the measured call. All rows are
    checked, because a shared operand's gradient is a sum over all segments.
    """
    num_segments, total = len(lengths), int(lengths.sum())
    offsets = offsets_of(lengths).to(device)
    copies = torch.arange(num_segments + 1, dtype=torch.int32, device=device) * num_shared
    jagged, shared = (total, num_heads, head_dim), (num_shared, num_heads, head_dim)
    q_shape, kv_shape, out_shape = (
        (shared, jagged, (num_segments * num_shared, *shared[1:]))
        if pma
        else (jagged, shared, jagged)
    )
    q, k, v, grad = random_tensors(device, dtype, q_shape, kv_shape, kv_shape, out_shape)
    inputs = leaves(q=0.3 * q, k=0.3 * k, v=v)
    copy_lengths = torch.full_like(lengths, num_shared)
    schedule, build_ms = timed_schedule(
        *((copy_lengths, lengths) if pma else (lengths, copy_lengths)), q
    )
    attention = partial(F.jagged_attention, **dataclasses.asdict(GELU))

    def implementation(forward, **extra):
        return lambda: Implementation(
            lambda: forward(**inputs), inputs, lambda name, x: {"all": x}, grad, **extra
        )

    def replicated(q, k, v):
        if pma:
            return attention(q.repeat(num_segments, 1, 1), k, v, copies, offsets, schedule=schedule)
        return attention(
            q, *(x.repeat(num_segments, 1, 1) for x in (k, v)), offsets, copies, schedule=schedule
        )

    def plain(q, k, v):
        if not pma:
            return by_rows(GELU.plain)(q, k, v)
        seeds = q.expand(num_segments, *shared).unbind()
        segments = zip(seeds, *(x.split(lengths.tolist()) for x in (k, v)))
        return torch.cat([by_rows(GELU.plain)(*segment) for segment in segments])

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        return named("all", exact(plain, inputs.values(), grad, dtype))

    if pma:
        ours = implementation(
            partial(attention, q_offsets="shared", kv_offsets=offsets, schedule=schedule),
            host_ms=build_ms,
        )
    else:  # one segment of all rows, whose schedule is built in the call
        ours = implementation(partial(attention, q_offsets=offsets, kv_offsets="shared"))
    implementations = {
        OURS: ours,
        f"replicate + {OURS}": implementation(replicated, host_ms=build_ms),
    }
    if not pma:
        implementations["bmm + gelu_tanh + bmm"] = implementation(plain)
    flops = 4.0 * num_heads * head_dim * num_shared * total
    return attention_setup(implementations, reference, dtype, device, flops, attainable=None)


# -- cases -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """A row of the GDPA table.

    ``jagged``: lengths that are uniform over 1..maximum: "q", or "both" for equal lengths of q and
    kv. The others are full.
    """

    name: str
    batch: int
    max_q: int
    max_kv: int
    jagged: str = ""
    padded: bool = False
    # forward / backward TFLOP/s of Meta's Triton kernel, measured earlier on an H200
    meta: str = ""

    def lengths(self) -> tuple[Tensor, Tensor]:
        q, kv = (torch.full((self.batch,), length) for length in (self.max_q, self.max_kv))
        if self.jagged:
            q = uniform_lengths(self.batch, 1, self.max_q)
        return q, q if self.jagged == "both" else kv


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the tables."""

    num_heads: int
    head_dim: int
    gdpa: list[Shape]
    sweep: tuple[int, int]  # B, N
    hstu: list[tuple[int, int, int]]  # B, N, D
    # D for which HSTU's mask is also measured with softmax; flex_attention takes long to compile
    softmax_dim: int
    num_targets: int
    shared: tuple[int, int, int, int]  # B, N, seeds, rows of weights


FULL = Sizes(
    num_heads=4,
    head_dim=128,
    gdpa=[
        Shape("q and kv full L=2048", 576, 2048, 2048, meta="453 / 345"),
        Shape("q and kv full L=1024", 1152, 1024, 1024, meta="407 / 328"),
        Shape("q and kv full L=512", 1152, 512, 512, padded=True, meta="345 / 279"),
        Shape("q and kv full L=256", 1152, 256, 256, meta="242 / 243"),
        Shape("q jagged, kv full L=512", 1152, 512, 512, jagged="q", padded=True, meta="265 / 240"),
        Shape(
            "q jagged, kv full L=1024", 1152, 1024, 1024, jagged="q", padded=True, meta="360 / 286"
        ),
        Shape("q and kv jagged L=256", 1152, 256, 256, jagged="both"),
        Shape(
            "q and kv jagged L=512", 1152, 512, 512, jagged="both", padded=True, meta="203 / 218"
        ),
        Shape(
            "q and kv jagged L=1024", 1152, 1024, 1024, jagged="both", padded=True, meta="339 / 283"
        ),
        Shape("q and kv jagged L=2048", 576, 2048, 2048, jagged="both"),
        Shape("cross, q=512 kv=256 full", 1152, 512, 256, meta="241 / 268"),
        Shape("cross, q=1024 kv=256 full", 1152, 1024, 256),
        Shape("cross, q=2048 kv=256 full", 1152, 2048, 256, meta="267 / 280"),
    ],
    sweep=(288, 1024),
    hstu=[(128, longest, dim) for dim in (64, 128) for longest in (512, 1024, 2048)],
    softmax_dim=64,
    num_targets=20,
    shared=(1152, 512, 32, 128),
)
CPU = Sizes(
    num_heads=4,
    head_dim=64,
    gdpa=[
        Shape("q and kv full L=256", 64, 256, 256, padded=True),
        Shape("q jagged, kv full L=256", 64, 256, 256, jagged="q", padded=True),
        Shape("q and kv jagged L=256", 64, 256, 256, jagged="both", padded=True),
    ],
    sweep=(32, 256),
    hstu=[(32, 256, 64)],
    softmax_dim=64,
    num_targets=20,
    shared=(64, 256, 32, 128),
)
TINY = Sizes(
    num_heads=2,
    head_dim=16,
    gdpa=[
        Shape("q and kv full L=20", 4, 20, 20, padded=True),
        Shape("q jagged, kv full L=20", 4, 20, 20, jagged="q", padded=True),
        Shape("q and kv jagged L=20", 4, 20, 20, jagged="both", padded=True),
        Shape("cross, q=20 kv=7 full", 4, 20, 7, padded=True),
    ],
    sweep=(4, 20),
    hstu=[(4, 20, 8)],
    softmax_dim=8,
    num_targets=3,
    shared=(4, 12, 3, 5),
)


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: bf16. CPU: fp32 and smaller shapes. ``tiny``: everything, small."""
    sizes = TINY if tiny else FULL if device == "cuda" else CPU
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads, dim = sizes.num_heads, sizes.head_dim
    cases = []
    for shape in sizes.gdpa:
        problem = partial(Problem, device, dtype, *shape.lengths(), heads, dim, magnitude=0.3)
        note = (
            shape.meta
            and "Meta's Triton kernel, not measured in this run but earlier on an H200: "
            f"{shape.meta} TFLOP/s"
        )
        cases.append(
            Case(GDPA, shape.name, partial(gdpa, problem, shape.padded, note), backward_alone=True)
        )

    batch, longest = sizes.sweep
    lengths = uniform_lengths(batch, 1, longest)
    for activation in SWEPT:
        problem = partial(Problem, device, dtype, lengths, lengths, heads, dim, magnitude=0.3)
        table = f"activations, q and kv jagged L={longest} B={batch}"
        cases.append(
            Case(
                table, activation, partial(one_activation, problem, activation), backward_alone=True
            )
        )

    for batch, longest, head_dim in sizes.hstu:
        lengths = uniform_lengths(batch, 1, longest)
        problem = partial(
            Problem,
            device,
            dtype,
            lengths,
            lengths,
            heads,
            head_dim,
            num_targets=lengths.clamp(max=sizes.num_targets),
        )
        setup = partial(hstu, problem, head_dim == sizes.softmax_dim)
        cases.append(
            Case(
                f"HSTU (silu, causal, {sizes.num_targets} targets)",
                f"B{batch} N{longest} D{head_dim}",
                setup,
            )
        )

    batch, longest, num_seeds, num_weights = sizes.shared
    lengths = uniform_lengths(batch, 1, longest)
    for name, num_shared, pma in (("PMA", num_seeds, True), ("PFFN", num_weights, False)):
        setup = partial(shared_operand, device, dtype, lengths, num_shared, heads, dim, pma)
        what = "seeds" if pma else "rows of weights"
        cases.append(
            Case("shared operands", f"{name}, {num_shared} {what}, B{batch} N{longest}", setup)
        )
    return cases


summary = partial(jagged_over_full, table=GDPA, both="backward_tflops")


if __name__ == "__main__":
    sys.exit(main("gdpa", make_cases, summary=summary))
