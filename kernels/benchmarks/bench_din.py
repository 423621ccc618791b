"""DIN's attention: an MLP scores each pair of a candidate and an event of its user's history.

    python kernels/benchmarks/bench_din.py                      # on a CUDA device, bf16
    python kernels/benchmarks/bench_din.py --only "dice$"        # one case
    python kernels/benchmarks/bench_din.py --compile-limit 200   # seconds for the compiled form
    python kernels/benchmarks/bench_din.py --tiny --device cpu

Lengths are lognormal. The materialising form has a row of features for each pair, as the published
models have, but without padding; "compiled" is torch.compile of it, which takes minutes: it comes
last, and is given up after --compile-limit seconds. Dice takes running statistics, as in serving.
TFLOP/s count 2 · (E·H1 + H1·H2 + H2 + E) for each visible pair, and twice that in the backward: the
linears of q and of k are computed once per row. "GEMM of as many operations" is one long GEMM with
the forward's number of operations, the floor. Speed-ups are over the materialising form.
"""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from inputs import ATTAINABLE, leaves, lognormal_lengths, offsets_of, random_tensors
from names import OURS
from runner import Case, Implementation, Setup, device_name, main
from torch import Tensor
from torch.nn.functional import linear

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.masks import is_visible
from jagged_modules.unit_activations import WITH_PARAMETERS, UnitParameters

MATERIALIZED, COMPILED = "a row for each pair", "a row for each pair, compiled"
GEMM = "GEMM of as many operations"
STATISTICS = 0.125, 1.5  # Dice's running means and variances
MASKS = {  # of the candidates, as the history's last rows: all events before, the last 64 of them
    "causal": jm.AttentionMask(causal=True),
    "window": jm.AttentionMask(causal=True, window=(63, None)),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Candidates of each user, mean length of the histories, E, activation, hidden units, and a
    mask of MASKS."""

    users: int
    candidates: int
    mean: int
    width: int
    activation: str = "relu"
    hidden: tuple[int, int] = (80, 40)
    mask: str | None = None

    @property
    def name(self) -> str:
        return (
            f"{self.users} users, {self.candidates} per user, {self.mean} events, E={self.width},"
            f" {self.activation}{', ' + self.mask if self.mask else ''}"
        )


def activated(z: Tensor, name: str, slope: Tensor | None) -> Tensor:
    """The activation of hidden units."""
    if slope is None:
        return getattr(torch, name)(z)
    if name == "prelu":
        return torch.where(z > 0, z, slope * z)
    mean, variance = (torch.full_like(slope, x) for x in STATISTICS)
    p = torch.sigmoid((z - mean) * torch.rsqrt(variance + 1e-8))
    return z * (p + slope * (1 - p))


def materialized(inputs: Mapping[str, Tensor], i: Tensor, j: Tensor, activation: str) -> Tensor:
    """Σ p v over the pairs (i, j) of rows of q and k."""
    q_rows, k_rows = inputs["q"][i], inputs["k"][j]
    h = torch.cat([q_rows, k_rows, q_rows - k_rows, q_rows * k_rows], 1)
    for n in "12":
        z = linear(h, inputs[f"w{n}"], inputs[f"b{n}"])
        h = activated(z, activation, inputs.get(f"slope{n}"))
    p = linear(h, inputs["w3"], inputs["b3"])
    return torch.zeros_like(inputs["q"]).index_add(0, i, p * k_rows)


class _TimeIsUp(BaseException):
    """No `except Exception` of a compiler catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError if the block, in the main thread, takes longer."""

    def stop(*_):
        raise _TimeIsUp

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again: a destructor ignores what it raises
    try:
        yield
    except _TimeIsUp:
        raise TimeoutError(f"not compiled within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class Problem:
    """Inputs of one case, and its definition, of a few users at a time."""

    def __init__(self, device: str, dtype: torch.dtype, sizes: Sizes):
        self.device, self.sizes = device, sizes
        self.mask = MASKS[sizes.mask] if sizes.mask else None
        self.lengths = lognormal_lengths(sizes.users, sizes.mean, 20 * sizes.mean, 1.0)
        self.offsets = offsets_of(self.lengths)
        counts = torch.full_like(self.lengths, sizes.candidates)
        self.index = jm.CandidateIndex.from_counts(counts).to(device)
        rows, events, e = sizes.users * sizes.candidates, int(self.offsets[-1]), sizes.width
        h1, h2 = sizes.hidden
        shapes = dict(q=(rows, e), k=(events, e), w1=(h1, 4 * e), b1=(h1,), w2=(h2, h1), b2=(h2,))
        shapes |= dict(w3=(1, h2), b3=(1,))
        if sizes.activation in WITH_PARAMETERS:
            shapes |= dict(slope1=(h1,), slope2=(h2,))
        tensors = zip(shapes, random_tensors(device, dtype, *shapes.values()))
        scaled = {n: x * x.shape[1] ** -0.5 if n[0] == "w" else x for n, x in tensors}
        self.inputs = leaves(**scaled)
        (self.grad,) = random_tensors(device, dtype, (rows, e))
        self.kv_offsets = self.offsets.to(device)

    def pairs(self, users: range) -> tuple[Tensor, Tensor]:
        """The visible pairs of adjacent users: rows of q and of k."""
        lengths = self.lengths[users.start : users.stop].repeat_interleave(self.sizes.candidates)
        starts = self.offsets[users.start : users.stop].repeat_interleave(self.sizes.candidates)
        first = users.start * self.sizes.candidates
        i = torch.arange(first, first + len(lengths)).repeat_interleave(lengths)
        within = torch.arange(len(i)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        j = starts.repeat_interleave(lengths) + within
        if self.mask is not None:
            position = lengths + torch.arange(len(lengths)) % self.sizes.candidates
            position, num_keys = (x.repeat_interleave(lengths) for x in (position, lengths))
            seen = is_visible(self.mask, position - self.sizes.candidates, within, num_keys, 0)
            i, j = i[seen], j[seen]
        return i.to(self.device), j.to(self.device)

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = max(1, 2**20 // (self.sizes.candidates * self.sizes.mean))
        for first in range(0, self.sizes.users, step):
            yield self.pairs(range(first, min(first + step, self.sizes.users)))

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = {n: x.detach().to(dtype).requires_grad_() for n, x in self.inputs.items()}
        leaves, grad = list(inputs.values()), self.grad.to(dtype)
        totals = [torch.zeros_like(x, dtype=torch.float64) for x in (self.grad, *leaves)]
        for i, j in self.chunks():
            out = materialized(inputs, i, j, self.sizes.activation)
            for total, x in zip(totals, (out.detach(), *torch.autograd.grad(out, leaves, grad))):
                total += x
        names = "out", *(f"d{name}" for name in inputs)
        return {f"{name}/all": x for name, x in zip(names, totals)}

    def implementation(self, forward, note: str = "") -> Implementation:
        return Implementation(
            lambda: forward(self.inputs), self.inputs, lambda _, x: {"all": x}, self.grad, note
        )

    def ours(self) -> Implementation:
        name, units = self.sizes.activation, None
        if name in WITH_PARAMETERS:
            slopes = [self.inputs["slope1"], self.inputs["slope2"]]
            mean, variance = (
                [torch.full_like(x, y, dtype=torch.float32) for x in slopes] for y in STATISTICS
            )
            statistics = dict(running_means=mean, running_vars=variance) if name == "dice" else {}
            units = UnitParameters(slopes, **statistics)

        def forward(x: dict[str, Tensor]) -> Tensor:
            weights, biases = ([x[f"{kind}{n}"] for n in "123"] for kind in "wb")
            return F.din_attention(
                x["q"], x["k"], x["k"], self.index, self.kv_offsets, weights, biases,
                activation=name, units=units, mask=self.mask,
            )  # fmt: skip

        return self.implementation(forward)

    def materialized(self, compile_limit: float | None = None) -> Implementation:
        """compile_limit: seconds for torch.compile. None: without it."""
        i, j = self.pairs(range(self.sizes.users))
        function = materialized
        if compile_limit is not None:
            torch.compiler.reset()  # other cases' sizes would make these dynamic
            function = torch.compile(materialized)
        found = self.implementation(
            partial(function, i=i, j=j, activation=self.sizes.activation), "the pairs are given"
        )
        if compile_limit is not None:
            with time_limit(compile_limit):
                for backward in (False, True):
                    found.run(backward)
        return found

    def setup(self, compile_limit: float) -> Setup:
        e, (h1, h2) = self.sizes.width, self.sizes.hidden
        pairs = sum(len(i) for i, _ in self.chunks())
        flops = 2.0 * pairs * (e * h1 + h1 * h2 + h2 + e)
        read, out = sum(x.nbytes for x in self.inputs.values()), self.grad.nbytes
        size = 4096 if self.device == "cuda" else 64
        rows = max(1, round(flops / (2 * size * size)))
        x, y = random_tensors(self.device, self.grad.dtype, (rows, size), (size, size))

        def reference(dtype: torch.dtype) -> dict[str, Tensor]:
            return self.reference(dtype) | {"out/gemm": x[:1].to(dtype) @ y.to(dtype)}

        def gemm() -> Implementation:
            return Implementation(
                lambda: x @ y, {"x": x, "y": y}, lambda _, z: {"gemm": z[:1]}, whole=False
            )

        implementations = {OURS: self.ours, MATERIALIZED: self.materialized, GEMM: gemm}
        if self.device == "cuda":
            implementations[COMPILED] = partial(self.materialized, compile_limit)
        return Setup(
            implementations,
            reference,
            self.grad.dtype,
            flops=flops,
            backward_flops=2 * flops,
            bytes=read + out,
            backward_bytes=2 * read + out,
            attainable=ATTAINABLE.get(device_name(self.device)),
            baseline=MATERIALIZED,
        )


FULL = (
    *(Sizes(512, 50, 400, 64, name) for name in ("relu", "prelu", "sigmoid", "dice")),
    *(Sizes(512, 50, 400, 64, name, mask="causal") for name in ("relu", "dice")),
    Sizes(512, 50, 400, 64, "dice", mask="window"),
    Sizes(512, 50, 50, 64),
    Sizes(4096, 1, 400, 64),
    Sizes(4096, 1, 50, 128),
    *(Sizes(512, 50, 400, 128, name) for name in ("relu", "prelu", "dice")),
    *(Sizes(512, 50, 400, 128, name, mask="causal") for name in ("relu", "dice")),
)
CPU = Sizes(16, 50, 400, 64), Sizes(512, 1, 50, 128)
TINY = tuple(
    Sizes(3, 2, 5, 8, name, (7, 5), mask)
    for name, mask in (("relu", None), ("prelu", "causal"), ("dice", None))
)


def make_cases(device: str, tiny: bool, compile_limit: float = 60.0) -> list[Case]:
    """CUDA: bf16. CPU: fp32 and fewer users."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def setup(sizes: Sizes) -> Setup:
        return Problem(device, dtype, sizes).setup(compile_limit)

    return [
        Case("DIN", sizes.name, partial(setup, sizes))
        for sizes in (TINY if tiny else FULL if device == "cuda" else CPU)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--compile-limit",
        type=float,
        default=60.0,
        help="seconds for torch.compile of a case (default: %(default)s)",
    )
    own, _ = parser.parse_known_args()
    cases = partial(make_cases, compile_limit=own.compile_limit)
    sys.exit(main("din", cases, own_options=[parser]))
