"""Attention within blocks of rows of jagged segments, without and with rotary, against torch's
fused attention.

    python kernels/benchmarks/bench_block_attention.py                        # on a CUDA device
    python kernels/benchmarks/bench_block_attention.py --only "rotary|bf16"   # some of the tables
    # the CPU path, smaller shapes
    python kernels/benchmarks/bench_block_attention.py --device cpu
    python kernels/benchmarks/bench_block_attention.py --tiny --device cpu

GB count q, k, v and the output once; in the backward q, k, v, the output's gradient and theirs. The
floor is the time of these bytes or of the FLOPs on an H200. TFLOP/s count 4·H·D for each pair of
rows of a block and 2.5 times that backward. Speed-ups are over FlashAttention-2.
"""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch._functorch.config
from inputs import (
    attention_setup,
    by_rows,
    exact,
    leaves,
    named,
    offsets_of,
    our_kernels,
    plain_attention,
    random_tensors,
    sample_segments,
    uniform_lengths,
    varlen_attention,
)
from names import FA2_BLOCKS as FA2
from names import OURS, PRECISE
from runner import Case, Implementation, Setup, main
from torch import Tensor

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.containers.offsets import block_offsets, positions_in_segments
from jagged_modules.rotary import apply_rotary

REFERENCE = f"{OURS}, reference"
FLEX = "flex_attention"
SEPARATE = "separate rotary"
BLOCKS_NOTE = "offsets of the blocks made beforehand"
TABLES_NOTE = "cos and sin of each row gathered beforehand"


def rotate_all(cos: Tensor, sin: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [apply_rotary(x, cos, sin) for x in tensors]


def rotate_in_bf16(cos: Tensor, sin: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Rotary as models without a kernel compute it: every operation is rounded, in the backward
    too."""
    cos, sin = (table.bfloat16()[:, None] for table in (cos, sin))
    pairs = [x.unflatten(-1, (-1, 2)).unbind(-1) for x in tensors]
    return [
        torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
        for first, second in pairs
    ]


def compiled(function: Callable, **options) -> Callable:
    """torch.compile without donated buffers: the backward is timed repeatedly on one retained
    graph."""
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, **options)


# -- one shape -------------------------------------------------------------------------------------


class Problem:
    """Inputs of one shape, implementations of attention on them, and the definition on sampled
    segments (``whole``: on all)."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        lengths: Tensor,
        num_heads: int,
        head_dim: int,
        block_size: int,
        rotate="",
        whole=False,
    ):
        self.device, self.dtype, self.block_size, self.total = (
            device,
            dtype,
            block_size,
            int(lengths.sum()),
        )
        host_offsets = offsets_of(lengths)
        self.offsets = host_offsets.to(device)
        self.blocks = (
            block_offsets(host_offsets, block_size, self.total).unique_consecutive().to(device)
        )
        self.rotary = (
            jm.Rotary.from_frequencies(head_dim, int(lengths.max()), rotate, device=device)
            if rotate
            else None
        )
        q, k, v, self.grad = random_tensors(device, dtype, *[(self.total, num_heads, head_dim)] * 4)
        self.inputs = leaves(q=q, k=k, v=v)
        samples = range(len(lengths)) if whole else sample_segments(lengths)
        self.rows = [slice(*host_offsets[b : b + 2].tolist()) for b in samples]

    @property
    def precise(self) -> jm.Rotary:
        return dataclasses.replace(self.rotary, precise=True)

    def setup(
        self, implementations: dict[str, Callable[[], Implementation]], baseline: str
    ) -> Setup:
        flops = 4.0 * self.grad[0].numel() * float(self.blocks.diff().double().square().sum())
        return attention_setup(
            implementations,
            self.reference,
            self.dtype,
            self.device,
            flops,
            bytes=4 * self.grad.nbytes,
            backward_bytes=7 * self.grad.nbytes,
            baseline=baseline,
        )

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        def in_blocks(*qkv):
            positions = torch.arange(len(qkv[0]), device=self.device)
            rotated = self.rotated(rotate_all, self.tables(positions), *qkv)
            blocks = zip(*(x.split(self.block_size) for x in rotated))
            return torch.cat([by_rows(plain_attention)(*block) for block in blocks])

        inputs = self.inputs.values()
        results = (
            exact(in_blocks, (x[rows] for x in inputs), self.grad[rows], dtype)
            for rows in self.rows
        )
        return named("sampled", map(torch.cat, zip(*results)))

    def tables(self, positions: Tensor) -> tuple[Tensor, ...]:
        return (
            () if self.rotary is None else (self.rotary.cos[positions], self.rotary.sin[positions])
        )

    def rotated(
        self, rotate: Callable, tables: tuple[Tensor, ...], *qkv: Tensor
    ) -> tuple[Tensor, ...]:
        """q, k and v. Those that ``self.rotary`` names are rotated by ``tables``."""
        if self.rotary is None:
            return qkv
        count = len(self.rotary.rotate)
        return *rotate(*tables, *qkv[:count]), *qkv[count:]

    def implementation(
        self, forward, inputs=None, grad=None, rows_of=lambda x, rows: x[rows], **extra
    ) -> Implementation:
        """``rows_of(x, rows)`` returns rows ``[N, H, D]`` of a result in the layout of
        ``inputs``."""

        def pick(name, x):
            return {"sampled": torch.cat([rows_of(x, rows) for rows in self.rows])}

        inputs = self.inputs if inputs is None else inputs
        return Implementation(
            lambda: forward(**inputs), inputs, pick, self.grad if grad is None else grad, **extra
        )

    def ours(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return F.block_diagonal_attention(
            q, k, v, self.offsets, block_size=self.block_size, **options
        )

    def our_implementations(self, **options) -> dict[str, Callable[[], Implementation]]:
        kernels = our_kernels(self.device).items()
        return {
            name: partial(self.implementation, partial(self.ours, implementation=x, **options))
            for name, x in kernels
        }

    def varlen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, self.blocks, self.blocks, self.block_size, self.block_size)

    def separate_rotary(
        self, attention: Callable, note: str = TABLES_NOTE, rotate: Callable = rotate_all
    ) -> Implementation:
        """Rotary in one separate kernel before ``attention``; on the CPU in plain torch."""
        tables = self.tables(positions_in_segments(self.offsets, self.total))
        if self.device == "cuda" and rotate is rotate_all:
            # static shapes are fastest, and dynamo caches only a few graphs of a function
            torch.compiler.reset()
            # no fp32 intermediate
            rotate = compiled(rotate_all, dynamic=False, options={"force_pointwise_cat": True})
        return self.implementation(
            lambda q, k, v: attention(*self.rotated(rotate, tables, q, k, v)), note=note
        )

    def flex(self) -> Implementation:
        """flex_attention, compiled, with all blocks in one sequence; the block mask separates
        them."""
        from torch.nn.attention.flex_attention import flex_attention

        attention = partial(compiled(flex_attention, dynamic=True), block_mask=self.flex_mask())
        return self.implementation(
            lambda q, k, v: attention(q, k, v),
            leaves(**{name: x.transpose(0, 1)[None] for name, x in self.inputs.items()}),
            self.grad.transpose(0, 1)[None].contiguous(),
            lambda x, rows: x[0, :, rows].transpose(0, 1),
            note="block mask made beforehand",
        )

    def flex_mask(self, tile: int = 128):
        """The block mask, from the first and last tile that each tile sees: create_block_mask would
        evaluate all total² pairs of rows."""
        from torch.nn.attention.flex_attention import BlockMask

        rows = torch.arange(self.total, dtype=torch.int32, device=self.device)
        block = torch.searchsorted(self.blocks, rows, right=True, out_int32=True) - 1
        first = self.blocks[block[::tile]] // tile
        last = (
            self.blocks[block[(rows[::tile] + tile - 1).clamp(max=self.total - 1)] + 1] - 1
        ) // tile
        tiles = torch.arange(len(first), dtype=torch.int32, device=self.device)
        seen = (first[:, None] + tiles).clamp(max=len(first) - 1)[None, None]

        def same_block(batch, head, i, j):
            return block[i] == block[j]

        count, lengths = (last - first + 1)[None, None], (self.total, self.total)
        return BlockMask.from_kv_blocks(
            count, seen, BLOCK_SIZE=tile, mask_mod=same_block, seq_lengths=lengths
        )


# -- tables ----------------------------------------------------------------------------------------


def without_rotary(problem: Callable[[], Problem], flex: bool = False) -> Setup:
    problem = problem()
    implementations = problem.our_implementations()
    if problem.device == "cuda":
        implementations[FA2] = partial(problem.implementation, problem.varlen, note=BLOCKS_NOTE)
        implementations |= {FLEX: problem.flex} if flex else {}
    return problem.setup(implementations, FA2)


def with_rotary(problem: Callable[[], Problem]) -> Setup:
    problem = problem()
    implementations = problem.our_implementations(rotary=problem.rotary) | {
        PRECISE: partial(problem.implementation, partial(problem.ours, rotary=problem.precise)),
        f"{SEPARATE} + {OURS}": partial(problem.separate_rotary, problem.ours),
    }
    if problem.device == "cuda":
        implementations[f"{SEPARATE} + {FA2}"] = partial(
            problem.separate_rotary, problem.varlen, f"{TABLES_NOTE}; {BLOCKS_NOTE}"
        )
    return problem.setup(implementations, f"{SEPARATE} + {FA2}")


def accuracy(device: str, tiny: bool) -> list[dict]:
    """Absolute errors of all rows in bf16, against float64 on the same standard normal inputs."""
    sizes, table = sizes_of(device, tiny), []
    batch, longest = sizes.accuracy
    lengths = uniform_lengths(batch, 1, longest)
    for rotate in ("qk", "qkv"):
        problem = Problem(
            device,
            torch.bfloat16,
            lengths,
            sizes.num_heads,
            sizes.head_dim,
            sizes.block_size,
            rotate,
            whole=True,
        )
        exact = problem.reference(torch.float64)
        peer, attention = (
            (FA2, problem.varlen)
            if device == "cuda"
            else (REFERENCE, partial(problem.ours, implementation="reference"))
        )
        ours, precise = (
            problem.implementation(partial(problem.ours, rotary=x))
            for x in (problem.rotary, problem.precise)
        )
        in_bf16 = problem.separate_rotary(attention, rotate=rotate_in_bf16)
        separate = {
            f"{SEPARATE} + {peer}": problem.separate_rotary(attention),
            f"{SEPARATE} in bf16 + {peer}": in_bf16,
        }
        rows = []
        for name, implementation in ({OURS: ours, PRECISE: precise} | separate).items():
            row = {"rotary": rotate, "implementation": name}
            for result, x in implementation.run(backward=True).items():
                errors = (
                    implementation.pick(result, x)["sampled"] - exact[f"{result}/sampled"]
                ).abs()
                row |= {
                    f"max {result}": errors.max().item(),
                    f"mean {result}": errors.mean().item(),
                }
            rows.append(row)
        largest = {row["implementation"]: row["max dq"] for row in rows}
        for row in rows:
            row["max dq of ours over it"] = largest[OURS] / row["max dq"]
            row["of ours, precise"] = largest[PRECISE] / row["max dq"]
        table += rows
    return table


# -- cases -----------------------------------------------------------------------------------------


def lengths_of_total(count: int, total: int) -> Tensor:
    """Uniform lengths with exactly that total."""
    ends = uniform_lengths(count, 1, 2 * total // count - 1).cumsum(0).double()
    return (ends * (total / ends[-1])).round().long().diff(prepend=torch.zeros(1, dtype=torch.long))


def lengths_of_mean(count: int, longest: int, mean: float) -> Tensor:
    """Lengths up to ``longest`` with a mean of ``mean * longest``: uniform for 0.5, all equal for
    1."""
    return (
        (longest * (uniform_lengths(count, 1, longest).double() / longest) ** (1 / mean - 1))
        .round()
        .long()
        .clamp(min=1)
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the tables."""

    num_heads: int
    head_dim: int
    block_size: int
    batch: int
    totals: list[int]
    rotary_backward: tuple[int, int]  # rows, H
    sweep_total: int
    sweep: list[tuple[int, int, float]]  # D, maximum length, mean over maximum
    accuracy: tuple[int, int]  # B, maximum length


SWEEP = [(128, 2048, mean) for mean in (0.3, 0.5, 0.7, 1.0)]
SWEEP += [(128, longest, 0.5) for longest in (512, 1024, 4096, 7168)] + [
    (64, longest, 0.5) for longest in (512, 2048, 7168)
]
FULL = Sizes(
    num_heads=4,
    head_dim=128,
    block_size=64,
    batch=1152,
    totals=[704_106, 1_609_731],
    rotary_backward=(1_735_537, 3),
    sweep_total=400_000,
    sweep=SWEEP,
    accuracy=(64, 512),
)
CPU = Sizes(
    num_heads=4,
    head_dim=64,
    block_size=64,
    batch=64,
    totals=[39_117, 89_430],
    rotary_backward=(89_430, 3),
    sweep_total=40_000,
    sweep=[(64, 512, 0.3), (64, 512, 1.0), (64, 2048, 0.5)],
    accuracy=(16, 512),
)
TINY = Sizes(
    num_heads=2,
    head_dim=16,
    block_size=16,
    batch=6,
    totals=[100, 190],
    rotary_backward=(120, 3),
    sweep_total=100,
    sweep=[(16, 20, 0.3), (8, 40, 0.5)],
    accuracy=(4, 40),
)


def sizes_of(device: str, tiny: bool) -> Sizes:
    return TINY if tiny else FULL if device == "cuda" else CPU


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: bf16. CPU: fp32 and smaller shapes. ``tiny``: everything, small."""
    sizes = sizes_of(device, tiny)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def case(
        table,
        name,
        setup,
        lengths,
        rotate="",
        head_dim=sizes.head_dim,
        block_size=sizes.block_size,
        heads=sizes.num_heads,
    ) -> Case:
        problem = partial(Problem, device, dtype, lengths, heads, head_dim, block_size, rotate)
        return Case(table, name, partial(setup, problem), backward_alone=True, picture="ms")

    shape = f"B={sizes.batch} H={sizes.num_heads} D={sizes.head_dim}"
    block = f"blocks of {sizes.block_size}"
    by_total = {total: lengths_of_total(sizes.batch, total) for total in sizes.totals}
    alone = partial(without_rotary, flex=True)
    cases = [
        case(f"block attention, {shape}, {block}", f"{total} rows", alone, by_total[total])
        for total in sizes.totals
    ]
    for total in sizes.totals:
        table = f"with rotary, {shape}, {block}"
        cases += [
            case(table, f"{total} rows, {rotate}", with_rotary, by_total[total], rotate)
            for rotate in ("qk", "qkv")
        ]
    total, heads = sizes.rotary_backward
    table = f"backward of rotary, B={sizes.batch} H={heads} D={sizes.head_dim}, {block}"
    lengths = lengths_of_total(sizes.batch, total)
    cases.append(case(table, f"{total} rows, no rotary", without_rotary, lengths, heads=heads))
    cases.append(case(table, f"{total} rows, qkv", with_rotary, lengths, "qkv", heads=heads))
    for head_dim, longest, mean in sizes.sweep:
        lengths = lengths_of_mean(round(sizes.sweep_total / (mean * longest)), longest, mean)
        table = f"lengths, about {sizes.sweep_total} rows, {block}"
        name = f"D={head_dim}, N={longest}, mean {mean} N, B={len(lengths)}"
        cases.append(case(table, name, without_rotary, lengths, head_dim=head_dim))
    table, lengths = f"block sizes, {shape}, {sizes.totals[0]} rows", by_total[sizes.totals[0]]
    return cases + [
        case(table, f"blocks of {size}", without_rotary, lengths, block_size=size)
        for size in (16, 32, 64, 128)
    ]


if __name__ == "__main__":
    sys.exit(
        main("block_attention", make_cases, other_tables={"absolute errors in bf16": accuracy})
    )
