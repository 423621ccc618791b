"""DIN's attention: an MLP scores each pair of a candidate and an event of its user's history.

    python kernels/benchmarks/bench_din.py                      # on a CUDA device, bf16
    python kernels/benchmarks/bench_din.py --only "50 per user"  # one case
    python kernels/benchmarks/bench_din.py --tiny --device cpu

Lengths are lognormal. The materialising form has a row of features for each pair, as the published
models have, but without padding; "compiled" is torch.compile of it. TFLOP/s count
2 · (E·H1 + H1·H2 + H2 + E) for each pair, and twice that in the backward: the linears of q and of k
are computed once per row. "GEMM of as many operations" is one long GEMM with the forward's number
of operations, the floor. Speed-ups are over the compiled form.
"""

import dataclasses
import sys
from collections.abc import Iterator
from functools import partial

import torch
from inputs import ATTAINABLE, leaves, lognormal_lengths, offsets_of, random_tensors
from names import OURS
from runner import Case, Implementation, Setup, device_name, main
from torch import Tensor
from torch.nn.functional import linear, relu

import jagged_modules as jm
from jagged_modules import functional as F

MATERIALIZED, COMPILED = "a row for each pair", "a row for each pair, compiled"
GEMM = "GEMM of as many operations"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Candidates of each user, mean length of the histories, E, and hidden units."""

    users: int
    candidates: int
    mean: int
    width: int
    hidden: tuple[int, int] = (80, 40)

    @property
    def name(self) -> str:
        return f"{self.users} users, {self.candidates} per user, {self.mean} events, E={self.width}"


def materialized(
    q: Tensor, k: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, b3: Tensor,
    i: Tensor, j: Tensor,
) -> Tensor:  # fmt: skip
    """Σ p v over the pairs (i, j) of rows of q and k."""
    q_rows, k_rows = q[i], k[j]
    x = torch.cat([q_rows, k_rows, q_rows - k_rows, q_rows * k_rows], 1)
    h = relu(linear(relu(linear(x, w1, b1)), w2, b2))
    return torch.zeros_like(q).index_add(0, i, linear(h, w3, b3) * k_rows)


class Problem:
    """Inputs of one case, and its definition, of a few users at a time."""

    def __init__(self, device: str, dtype: torch.dtype, sizes: Sizes):
        self.device, self.sizes = device, sizes
        self.lengths = lognormal_lengths(sizes.users, sizes.mean, 20 * sizes.mean, 1.0)
        self.offsets = offsets_of(self.lengths)
        counts = torch.full_like(self.lengths, sizes.candidates)
        self.index = jm.CandidateIndex.from_counts(counts).to(device)
        rows, events, e = sizes.users * sizes.candidates, int(self.offsets[-1]), sizes.width
        h1, h2 = sizes.hidden
        shapes = [(rows, e), (events, e), (h1, 4 * e), (h1,), (h2, h1), (h2,), (1, h2), (1,)]
        names = "q", "k", "w1", "b1", "w2", "b2", "w3", "b3"
        tensors = random_tensors(device, dtype, *shapes)
        scaled = [x * x.shape[1] ** -0.5 if n[0] == "w" else x for n, x in zip(names, tensors)]
        self.inputs = leaves(**dict(zip(names, scaled)))
        (self.grad,) = random_tensors(device, dtype, (rows, e))
        self.kv_offsets = self.offsets.to(device)

    def pairs(self, users: range) -> tuple[Tensor, Tensor]:
        """The pairs of adjacent users: rows of q and of k."""
        lengths = self.lengths[users.start : users.stop].repeat_interleave(self.sizes.candidates)
        starts = self.offsets[users.start : users.stop].repeat_interleave(self.sizes.candidates)
        first = users.start * self.sizes.candidates
        i = torch.arange(first, first + len(lengths)).repeat_interleave(lengths)
        within = torch.arange(len(i)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        j = starts.repeat_interleave(lengths) + within
        return i.to(self.device), j.to(self.device)

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = max(1, 2**20 // (self.sizes.candidates * self.sizes.mean))
        for first in range(0, self.sizes.users, step):
            yield self.pairs(range(first, min(first + step, self.sizes.users)))

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in self.inputs.values()]
        grad = self.grad.to(dtype)
        totals = [torch.zeros_like(x, dtype=torch.float64) for x in (self.grad, *inputs)]
        for i, j in self.chunks():
            out = materialized(*inputs, i, j)
            for total, x in zip(totals, (out.detach(), *torch.autograd.grad(out, inputs, grad))):
                total += x
        names = "out", *(f"d{name}" for name in self.inputs)
        return {f"{name}/all": x for name, x in zip(names, totals)}

    def implementation(self, forward, note: str = "") -> Implementation:
        return Implementation(
            lambda: forward(**self.inputs), self.inputs, lambda _, x: {"all": x}, self.grad, note
        )

    def ours(self) -> Implementation:
        def forward(q, k, w1, b1, w2, b2, w3, b3):
            return F.din_attention(
                q, k, k, self.index, self.kv_offsets, [w1, w2, w3], [b1, b2, b3], activation="relu"
            )

        return self.implementation(forward)

    def materialized(self, compiled: bool) -> Implementation:
        i, j = self.pairs(range(self.sizes.users))
        function = torch.compile(materialized) if compiled else materialized
        return self.implementation(partial(function, i=i, j=j), "the pairs are given")

    def gemm(self, flops: float) -> Implementation:
        size = 4096 if self.device == "cuda" else 64
        rows = max(1, round(flops / (2 * size * size)))
        x, y = random_tensors(self.device, self.grad.dtype, (rows, size), (size, size))
        inputs = {"x": x, "y": y}
        some = {"out": x[:1] @ y}
        return Implementation(
            lambda: x @ y, inputs, lambda name, z: {"gemm": z[:1] - some[name] + 1}, whole=False
        )

    def setup(self) -> Setup:
        e, (h1, h2) = self.sizes.width, self.sizes.hidden
        pairs = int(self.lengths.sum()) * self.sizes.candidates
        flops = 2.0 * pairs * (e * h1 + h1 * h2 + h2 + e)
        read, out = sum(x.nbytes for x in self.inputs.values()), self.grad.nbytes

        def reference(dtype: torch.dtype) -> dict[str, Tensor]:
            return self.reference(dtype) | {
                "out/gemm": torch.ones(1, 4096 if self.device == "cuda" else 64).to(self.device)
            }

        implementations = {
            OURS: self.ours,
            MATERIALIZED: partial(self.materialized, False),
            GEMM: partial(self.gemm, flops),
        }
        if self.device == "cuda":
            implementations[COMPILED] = partial(self.materialized, True)
        return Setup(
            implementations,
            reference,
            self.grad.dtype,
            flops=flops,
            backward_flops=2 * flops,
            bytes=read + out,
            backward_bytes=2 * read + out,
            attainable=ATTAINABLE.get(device_name(self.device)),
            baseline=COMPILED if self.device == "cuda" else MATERIALIZED,
        )


FULL = Sizes(512, 50, 400, 64), Sizes(4096, 1, 50, 128)
CPU = Sizes(16, 50, 400, 64), Sizes(512, 1, 50, 128)
TINY = (Sizes(3, 2, 5, 8, (7, 5)),)


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: bf16. CPU: fp32 and fewer users."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [
        Case("DIN", sizes.name, lambda sizes=sizes: Problem(device, dtype, sizes).setup())
        for sizes in (TINY if tiny else FULL if device == "cuda" else CPU)
    ]


if __name__ == "__main__":
    sys.exit(main("din", make_cases))
