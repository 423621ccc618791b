"""Linear compression of user and candidate embeddings against plain torch, in the stages of the
published ablation.

    # on a CUDA device, fp16
    python kernels/benchmarks/bench_linear_compress.py
    python kernels/benchmarks/bench_linear_compress.py --only "B=1024: 10 "   # one case
    python kernels/benchmarks/bench_linear_compress.py --only "many candidates"
    # the CPU path, smaller shapes
    python kernels/benchmarks/bench_linear_compress.py --device cpu
    python kernels/benchmarks/bench_linear_compress.py --tiny --device cpu

TFLOP/s count the useful work, 2·M·N·(Kc·B + Ku·U) forward and twice that backward, without padding.
GB count every operand, result and gradient once. The floor is the longer of the times of both on an
H200. Speed-ups are over "replicated".
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import cached_property, partial

import peers
import torch
from inputs import leaves, our_kernels, random_tensors
from names import INPUT_REPLICATED, OURS
from runner import Case, Implementation, Setup, device_name, main
from torch import Tensor
from torch.nn.functional import pad

import jagged_modules as jm
from jagged_modules import functional as F

REPLICATED = "replicated"
THREE_LEVELS = f"{OURS}, users as two levels"
CUBLAS = "cuBLAS candidate GEMM alone"
# bytes/s of the data sheet, FLOP/s of long fp16 GEMMs
ATTAINABLE = {"NVIDIA H200": (4.8e12, 729e12)}
# (B, candidates per user) -> ms forward of FBGEMM's Triton kernel and Meta's TLX kernel, measured
# earlier on an H200
PEERS = {
    (1024, 70): (0.567, 0.494),
    (2048, 70): (1.198, 1.077),
    (3072, 70): (1.822, 1.880),
    (1024, 10): (0.646, 0.555),
    (1024, 1000): (0.570, 0.498),
}


def peers_note(batch: int, ratio: int) -> str:
    if (batch, ratio) not in PEERS:
        return ""
    fbgemm, tlx = PEERS[batch, ratio]
    return (
        f"not measured in this run but earlier on an H200, forward: FBGEMM Triton {fbgemm} ms, Meta"
        f" TLX {tlx} ms"
    )


# -- plain torch -----------------------------------------------------------------------------------


def gemm(weight: Tensor, embedding: Tensor) -> Tensor:
    """W @ E[b] for every b, without a copy of E. Autograd computes a weight gradient for every b
    and sums them."""
    return torch.bmm(weight.expand(embedding.shape[0], -1, -1), embedding)


def decomposed(
    multiply: Callable[[Tensor, Tensor], Tensor], index: Tensor, w_user, w_cand, e_user, e_cand
) -> Tensor:
    return multiply(w_user, e_user).index_select(0, index) + multiply(w_cand, e_cand)


# -- one shape -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the tables: W is ``[M, K]`` of users and of candidates, E ``[·, K, N]``."""

    m: int
    n: int
    k_user: int
    k_cand: int
    batches: list[int]
    ratio: int
    ratios: list[int]
    ratio_batch: int


class Problem:
    """Inputs of one shape, ways to compress them, and the definition on a sample: all candidates of
    the first and of the last user, and three rows of the weights. Candidates are sorted by user,
    ``ratio`` of each."""

    def __init__(self, device: str, dtype: torch.dtype, sizes: Sizes, batch: int, ratio: int):
        self.device, self.dtype = device, dtype
        users = torch.arange(batch) // ratio
        counts = users.bincount()
        self.index, self.candidates = (
            users.to(device),
            jm.CandidateIndex.from_counts(counts).to(device),
        )
        shapes = [(sizes.m, k) for k in (sizes.k_user, sizes.k_cand)]
        shapes += [
            (len(counts), sizes.k_user, sizes.n),
            (batch, sizes.k_cand, sizes.n),
            (batch, sizes.m, sizes.n),
        ]
        w_user, w_cand, e_user, e_cand, self.grad = random_tensors(device, dtype, *shapes)
        w_user, w_cand = w_user * sizes.k_user**-0.5, w_cand * sizes.k_cand**-0.5
        self.inputs = leaves(w_user=w_user, w_cand=w_cand, e_user=e_user, e_cand=e_cand)
        rows = torch.tensor(sorted({0, sizes.m // 2, sizes.m - 1}), device=device)
        some_users = torch.tensor(sorted({0, len(counts) - 1}), device=device)
        some_candidates = torch.isin(self.index, some_users).nonzero().squeeze(1)
        self.sampled = {
            "out": (some_candidates,),
            "dw_user": (rows, slice(sizes.k_user)),
            "dw_cand": (rows, slice(sizes.k_cand)),
            "dw": (rows,),
            "de_user": (some_users, slice(sizes.k_user)),
            "de_cand": (some_candidates, slice(sizes.k_cand)),
        }
        self.sampled |= {f"d{part}": self.sampled[f"d{part[0]}_user"] for part in self.halves}

    @cached_property
    def halves(self) -> dict[str, Tensor]:
        """The users' weight and embeddings as those of two levels of half of K each: the same work,
        and the same result."""
        half, names = self.inputs["w_user"].shape[1] // 2, ("first", "second")
        split = {x: self.inputs[f"{x}_user"].split([half, half], 1) for x in "we"}
        return leaves(**{f"{x}_{name}": y for x in "we" for name, y in zip(names, split[x])})

    def setup(self, note: str) -> Setup:
        stages = our_kernels(self.device)
        implementations = {
            OURS: partial(self.ours, stages.pop(OURS), note),
            REPLICATED: self.replicated,
            INPUT_REPLICATED: self.input_replicated,
            "decomposed": partial(self.plain, gemm, self.inputs),
            "padded": partial(self.plain, gemm),
            "padded, torch.matmul": partial(self.plain, torch.matmul),
        }
        implementations |= {name: partial(self.ours, stage) for name, stage in stages.items()}
        implementations[THREE_LEVELS] = self.three_levels
        if self.device == "cuda":
            implementations |= {CUBLAS: self.candidate_gemm, peers.IKBO: self.ikbo}
        else:
            implementations[f"{OURS}, reference"] = partial(self.ours, "reference")
        flops = (
            2.0
            * self.grad[0].numel()
            * sum(self.inputs[name].shape[:2].numel() for name in ("e_user", "e_cand"))
        )
        operands, out = sum(x.nbytes for x in self.inputs.values()), self.grad.nbytes
        return Setup(
            implementations,
            self.reference,
            self.dtype,
            flops=flops,
            backward_flops=2 * flops,
            bytes=operands + self.index.nbytes + out,
            backward_bytes=2 * operands + out,
            attainable=ATTAINABLE.get(device_name(self.device)),
            baseline=REPLICATED,
        )

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        (candidates,), (users, _), (rows,) = (
            self.sampled[name] for name in ("out", "de_user", "dw")
        )
        w_user, w_cand, e_user, e_cand = (x.detach() for x in self.inputs.values())

        def differentiate(index, wanted, operands, grad):
            operands = [x.to(dtype).requires_grad_(i in wanted) for i, x in enumerate(operands)]
            out = decomposed(torch.matmul, index, *operands)
            return out.detach(), *torch.autograd.grad(
                out, [operands[i] for i in wanted], grad.to(dtype)
            )

        index = torch.searchsorted(users, self.index[candidates])
        sample = (w_user, w_cand, e_user[users], e_cand[candidates])
        out, de_user, de_cand = differentiate(index, (2, 3), sample, self.grad[candidates])
        _, dw_user, dw_cand = differentiate(
            self.index, (0, 1), (w_user[rows], w_cand[rows], e_user, e_cand), self.grad[:, rows]
        )
        return {
            "out/sampled": out,
            "out/gemm": w_cand.to(dtype) @ e_cand[candidates].to(dtype),
            "dw_user/sampled": dw_user,
            "dw_cand/sampled": dw_cand,
            "dw/sampled": torch.cat([dw_user, dw_cand], dim=1),
            "de_user/sampled": de_user,
            "de_cand/sampled": de_cand,
        } | {
            f"d{x}_{name}/sampled": half
            for x, whole in (("w", dw_user), ("e", de_user))
            for name, half in zip(("first", "second"), whole.chunk(2, 1))
        }

    def implementation(
        self,
        forward: Callable[..., Tensor],
        inputs: dict[str, Tensor],
        part: str = "sampled",
        **extra,
    ) -> Implementation:
        return Implementation(
            lambda: forward(**inputs),
            inputs,
            lambda name, x: {part: x[self.sampled[name]]},
            self.grad,
            **extra,
        )

    @cached_property
    def padded_inputs(self) -> dict[str, Tensor]:
        """The inputs with K padded with zeros to a multiple of 8: the last dimension of a weight,
        the last but one of embeddings."""
        k = {name: x.shape[1] for name, x in self.inputs.items()}
        return leaves(
            **{
                name: pad(x, (0, -k[name] % 8) if x.dim() == 2 else (0, 0, 0, -k[name] % 8))
                for name, x in self.inputs.items()
            }
        )

    def ours(self, stage: str, note: str = "") -> Implementation:
        def forward(w_user, w_cand, e_user, e_cand):
            return F.linear_compress(
                [w_user, w_cand], [e_user, e_cand], self.candidates, implementation=stage
            )

        return self.implementation(forward, self.inputs, note=note)

    def three_levels(self) -> Implementation:
        def forward(w_first, w_second, e_first, e_second, w_cand, e_cand):
            weights, embeddings = [w_first, w_second, w_cand], [e_first, e_second, e_cand]
            return F.linear_compress(weights, embeddings, [self.candidates] * 2)

        own = {name: self.inputs[name] for name in ("w_cand", "e_cand")}
        return self.implementation(forward, self.halves | own)

    def replicated(self) -> Implementation:
        def forward(w, e_user, e_cand):
            return gemm(w, torch.cat([e_user.index_select(0, self.index), e_cand], dim=1))

        w_user, w_cand, e_user, e_cand = self.inputs.values()
        return self.implementation(
            forward,
            leaves(w=torch.cat([w_user, w_cand], dim=1)) | {"e_user": e_user, "e_cand": e_cand},
        )

    def input_replicated(self) -> Implementation:
        """As the published baseline is measured: without the copies of users to candidates."""
        w_user, w_cand, e_user, e_cand = (x.detach() for x in self.inputs.values())
        inputs = {
            "w": torch.cat([w_user, w_cand], dim=1),
            "e": torch.cat([e_user.index_select(0, self.index), e_cand], dim=1),
        }
        return self.implementation(lambda w, e: gemm(w, e), inputs, note="forward only")

    def ikbo(self) -> Implementation:
        compress = peers.ikbo_linear_compress()
        inputs = {name: x.detach() for name, x in self.padded_inputs.items()}
        index = self.index.int()
        return self.implementation(
            lambda **inputs: compress(**inputs, index=index),
            inputs,
            note="forward only; padded inputs",
        )

    def plain(
        self, multiply: Callable[[Tensor, Tensor], Tensor], inputs: dict[str, Tensor] | None = None
    ) -> Implementation:
        """Decomposed. ``inputs``: default padded."""
        notes = [] if inputs else ["padded inputs"]
        if multiply is torch.matmul:
            notes.append("transposes a copy of E; one GEMM for a weight's gradient")
        return self.implementation(
            partial(decomposed, multiply, self.index),
            inputs or self.padded_inputs,
            note="; ".join(notes),
        )

    def candidate_gemm(self) -> Implementation:
        inputs = {name: self.padded_inputs[name].detach() for name in ("w_cand", "e_cand")}
        note = "a part of the work; padded inputs"
        return self.implementation(
            lambda w_cand, e_cand: gemm(w_cand, e_cand), inputs, "gemm", note=note, whole=False
        )


# -- cases -----------------------------------------------------------------------------------------

RATIOS = [2, 5, 10, 50, 100, 1000]
FULL = Sizes(
    m=433,
    n=256,
    k_user=1178,
    k_cand=866,
    batches=[512, 1024, 2048, 3072],
    ratio=70,
    ratios=RATIOS,
    ratio_batch=1024,
)
CPU = Sizes(
    m=109,
    n=64,
    k_user=294,
    k_cand=218,
    batches=[128, 256],
    ratio=70,
    ratios=RATIOS,
    ratio_batch=128,
)
TINY = Sizes(
    m=13, n=8, k_user=22, k_cand=18, batches=[10, 20], ratio=7, ratios=[2, 100], ratio_batch=10
)


# many candidates: smaller matrices, so that replicated users fit
MANY = Sizes(
    m=128, n=128, k_user=256, k_cand=128, batches=[], ratio=0, ratios=[], ratio_batch=10_000
)  # fmt: skip
MANY_RATIOS = [(10_000, 10), (10_000, 100), (10_000, 1000), (10_000, 10_000), (30_000, 10_000)]


def many_cases(device: str, dtype: torch.dtype) -> list[Case]:
    """From 1 to 1,000 users. The name of the table is what --only matches."""

    def setup(batch: int, ratio: int) -> Setup:
        return Problem(device, dtype, MANY, batch, ratio).setup("")

    return [
        Case(
            "many candidates",
            f"{ratio} per user, B={batch}",
            partial(setup, batch, ratio),
            picture="ms",
        )
        for batch, ratio in MANY_RATIOS
    ]


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: fp16. CPU: fp32 and smaller shapes. ``tiny``: everything, small."""
    sizes = TINY if tiny else FULL if device == "cuda" else CPU
    dtype = torch.float16 if device == "cuda" else torch.float32

    def case(table: str, name: str, batch: int, ratio: int, picture: str) -> Case:
        def setup() -> Setup:
            return Problem(device, dtype, sizes, batch, ratio).setup(peers_note(batch, ratio))

        return Case(table, name, setup, picture=picture)

    by_batch = f"batch size, {sizes.ratio} candidates per user"
    by_ratio = f"candidates per user, B={sizes.ratio_batch}"
    many = many_cases(device, dtype) if device == "cuda" else []
    cases = [case(by_batch, f"B={batch}", batch, sizes.ratio, "ms") for batch in sizes.batches]
    return (
        cases
        + [
            case(by_ratio, f"{ratio} per user", sizes.ratio_batch, ratio, "speedup")
            for ratio in sizes.ratios
        ]
        + many
    )


if __name__ == "__main__":
    sys.exit(main("linear_compress", make_cases))
