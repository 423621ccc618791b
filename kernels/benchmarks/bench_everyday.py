"""Attention where users are: many short segments of lognormal lengths, one query row per candidate,
segments of medium length, wide heads.

    # on a CUDA device
    python kernels/benchmarks/bench_everyday.py
    # some of the cases
    python kernels/benchmarks/bench_everyday.py --only "self-attention.*B2048"
    # lengths of each FILE, integers between white space, and synthetic ones of as many rows
    python kernels/benchmarks/bench_everyday.py --lengths FILE... --only "from FILE"
    # events per user of MovieLens-100k, and of a log with a line of items per user
    cut -f 1 u.data | sort | uniq -c | awk '{print $1}' > ml-100k.txt
    awk '{print NF - 1}' Beauty.txt > beauty.txt
    # the CPU path, smaller shapes
    python kernels/benchmarks/bench_everyday.py --device cpu
    python kernels/benchmarks/bench_everyday.py --tiny --device cpu

TFLOP/s count 4·H·D forward for each pair of a query and a key it sees and 2.5 times that backward,
for every implementation alike. GB count q, k, v and the output once; in the backward q, k, v, the
output's gradient and theirs. The floor is the time of these bytes or, where it is longer, of the
FLOPs on an H200. Padded peers get padded inputs. The tables of wall time measure training steps
with autograd's own threads, as by default, and with the backward in the caller's thread. Those of
free-running steps do not wait for the device between steps, under bf16 autocast on CUDA.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from attention_problem import Attention, Problem
from inputs import (
    jagged_over_full,
    leaves,
    lognormal_lengths,
    offsets_of,
    pad,
    plain_attention,
    random_tensors,
    uniform_lengths,
)
from jagged_kernels.common.device import device_properties
from names import FA2, OURS
from runner import Case, Implementation, Setup, main
from torch import Tensor, nn
from torch.nn.functional import linear

import jagged_modules as jm

PADDED = "SDPA, padded"
PADDED_HSTU = "bmm + silu + bmm, padded"
HOST, DEVICE = f"{OURS}, lengths on the host", f"{OURS}, lengths on the device"
LAYER, PADDED_LAYER = "JaggedTargetAttention", "nn.MultiheadAttention, padded"
GRAPHED, COMPILED = f"{LAYER}, graphed", f"{LAYER}, compiled"
SAME, ON_HOST = f"{LAYER}, the same objects", f"{LAYER}, offsets and map on the host"
UNSORTED, ROUND_ROBIN = f"{OURS}, unsorted", f"{OURS}, sorted, round-robin"
CALLER = "autograd in the caller's thread"

SELF = "self-attention, lognormal lengths"
MEASURED = "self-attention, lengths from FILE"
SYNTHETIC = ("lognormal", "uniform", "equal")
HSTU = "HSTU (silu, causal), lognormal lengths"
TARGET = "target attention, a query row per candidate"
MEDIUM = "medium segments"
WIDE = "wide heads, causal"
LONG = "long causal segments, with and without a schedule"
ORDER = "order of tiles"
WALL = "wall time of a training step"
FREE = "free-running training steps"
FREE_STEPS = 20  # from one synchronisation to the next


# -- kernel time -----------------------------------------------------------------------------------


def everyday(problem: Callable[[], Problem]) -> Setup:
    """Ours with a given schedule, and all peers. FlashAttention has no SiLU."""
    problem = problem()
    ours = problem.our_implementations()
    if problem.attention.activation != "softmax":
        return problem.setup(ours | {PADDED_HSTU: problem.padded}, baseline=PADDED_HSTU)
    return problem.setup(ours | problem.flash() | {PADDED: problem.padded}, baseline=FA2)


def with_and_without_schedule(problem: Callable[[], Problem]) -> Setup:
    """The schedule is given; built from lengths that the host knows; listed by the device."""
    problem = problem()
    ours = {
        OURS: problem.ours,
        HOST: problem.schedule_in_each_call,
        DEVICE: partial(problem.scheduled, None),
    }
    return problem.setup(ours | problem.flash() | {PADDED: problem.padded}, baseline=OURS)


# -- the order of tiles ----------------------------------------------------------------------------


def unsorted(schedule: jm.TileSchedule) -> Tensor:
    """The order of segments, heads and blocks."""
    if not len(schedule.tiles):
        return schedule.tiles.new_zeros(0)
    segment, head, block = schedule.tiles.long().unbind(1)
    return ((segment * schedule.num_heads + head) * (block.max() + 1) + block).argsort()


def round_robin(schedule: jm.TileSchedule, num_workers: int) -> Tensor:
    """Undoes the zigzag: each full odd wave is reversed, so that tile i goes to worker i mod
    num_workers.

    Hopper's kernels with large tiles have that many workers. Others have several on a
    multiprocessor, so for them this is another order.
    """
    position = torch.arange(len(schedule.tiles), device=schedule.tiles.device)
    wave, lane = position // num_workers, position % num_workers
    full = wave < len(position) // num_workers
    return torch.where((wave % 2 == 1) & full, position - lane + num_workers - 1 - lane, position)


def reordered(
    schedule: jm.TileSchedule, order: Callable[[jm.TileSchedule], Tensor]
) -> jm.TileSchedule:
    """The schedule, and its backward, with the tiles of long segments in another order. Those of
    short segments stay behind them: packed tiles may replace them."""
    long, backward = int(schedule.num_tiles[1]), schedule.backward
    first = order(dataclasses.replace(schedule, tiles=schedule.tiles[:long]))
    positions = torch.cat([first, torch.arange(long, len(schedule.tiles), device=first.device)])
    return dataclasses.replace(
        schedule,
        tiles=schedule.tiles[positions].contiguous(),
        backward=None if backward is None else reordered(backward, order),
    )


def orders(problem: Callable[[], Problem]) -> Setup:
    """Workers take tiles by position: as they come, longest first in turn, longest first in a
    zigzag (ours)."""
    problem = problem()

    def ordered(order: Callable[[jm.TileSchedule], Tensor]) -> Implementation:
        schedule, _ = problem.schedule()
        return problem.scheduled(reordered(schedule, order))

    on_gpu = torch.cuda.is_available()
    num_workers = device_properties(torch.device("cuda", 0)).num_sms if on_gpu else 132
    in_turn = partial(round_robin, num_workers=num_workers)
    others = {UNSORTED: partial(ordered, unsorted), ROUND_ROBIN: partial(ordered, in_turn)}
    return problem.setup(others | {OURS: problem.ours}, baseline=UNSORTED)


# -- wall time -------------------------------------------------------------------------------------


def target_layer(
    device: str, dtype: torch.dtype, attention: Attention, free: bool = False
) -> Setup:
    """The layer step, with the gradients of all parameters, and new offsets in each call; also from
    CUDA graphs, and compiled. nn.MultiheadAttention has the same parameters. free: rows and
    parameters are fp32, under autocast to dtype, and the candidates' users are a map."""
    counts, histories = attention.lengths
    width = attention.num_heads * attention.head_dim
    torch.manual_seed(0)
    kept = torch.float32 if free else dtype
    layer = jm.JaggedTargetAttention(width, attention.num_heads).to(device, kept)
    candidate_offsets, history_offsets = (offsets_of(x).to(device) for x in attention.lengths)
    host_map = torch.arange(len(counts)).repeat_interleave(counts)
    shape = (int(counts.sum()), width)
    targets, history, grad = random_tensors(
        device, kept, shape, (int(histories.sum()), width), shape
    )
    grad = grad.to(dtype)
    inputs = leaves(targets=targets[:, None], history=history) | dict(layer.named_parameters())
    autocast = partial(torch.autocast, device, dtype) if kept != dtype else contextlib.nullcontext

    def of(module: nn.Module, segments: Callable[[], tuple]) -> Implementation:
        def forward():
            offsets, candidates = segments()
            return module(inputs["targets"], (inputs["history"], offsets), candidates)

        return Implementation(
            forward,
            inputs,
            lambda name, x: {"all": x[:, 0] if name in ("out", "dtargets") else x},
            grad[:, None],
            around=autocast,
        )

    def with_map(module: nn.Module = layer, where: str = device) -> Implementation:
        """Its offsets and its map are new objects in each call."""
        offsets, users = offsets_of(histories).to(where), host_map.to(where)
        return of(module, lambda: (offsets.clone(), users.clone()))

    def same() -> Implementation:
        index = jm.CandidateIndex.from_map(host_map.to(device), len(counts))
        return of(layer, lambda: (history_offsets, index))

    def ours(module: nn.Module = layer) -> Implementation:
        def segments():
            index = jm.CandidateIndex.from_offsets(candidate_offsets.detach())
            return history_offsets.detach(), index

        return of(module, segments)

    def graphed() -> Implementation:
        return ours(jm.graphed(layer))

    def compiled() -> Implementation:
        return ours(torch.compile(layer))

    def padded() -> Implementation:
        peer = nn.MultiheadAttention(width, attention.num_heads, batch_first=True).to(device, kept)
        joined = {
            f"in_proj_{kind}": torch.cat([inputs[f"{x}.{kind}"] for x in ("q_proj", "kv_proj")])
            for kind in ("weight", "bias")
        }
        peer.load_state_dict(
            joined | {f"out_proj.{kind}": inputs[f"out_proj.{kind}"] for kind in ("weight", "bias")}
        )
        q_valid, kv_valid = (
            (torch.arange(int(x.max())) < x[:, None]).to(device) for x in attention.lengths
        )
        dense = leaves(targets=pad(targets, q_valid), history=pad(history, kv_valid))
        rows_of = {"out": q_valid, "dtargets": q_valid, "dhistory": kv_valid}

        def forward():
            q, kv = dense.values()
            return peer(q, kv, kv, key_padding_mask=~kv_valid, need_weights=False)[0]

        def pick(name, x):
            return {"all": x[rows_of[name]] if name in rows_of else x}

        return Implementation(
            forward,
            dense | dict(peer.named_parameters()),
            pick,
            pad(grad, q_valid),
            note="padded inputs",
            around=autocast,
        )

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        x = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
        q = linear(x["targets"][:, 0], x["q_proj.weight"], x["q_proj.bias"])
        k, v = linear(x["history"], x["kv_proj.weight"], x["kv_proj.bias"]).chunk(2, dim=1)
        # [H, L, D]
        heads = [y.unflatten(1, (attention.num_heads, -1)).transpose(0, 1) for y in (q, k, v)]
        users = zip(
            *(y.split(n.tolist(), dim=1) for y, n in zip(heads, (counts, histories, histories)))
        )
        out = (
            torch.cat([plain_attention(*user) for user in users], dim=1).transpose(0, 1).flatten(1)
        )
        out = linear(out, x["out_proj.weight"], x["out_proj.bias"])
        d = dict(zip(x, torch.autograd.grad(out, tuple(x.values()), grad.to(dtype))))
        joined = {
            f"in_proj_{kind}": torch.cat([d[f"q_proj.{kind}"], d[f"kv_proj.{kind}"]])
            for kind in ("weight", "bias")
        }
        return {"out/all": out.detach()} | {
            f"d{name}/all": y for name, y in (d | joined | {"targets": d["targets"][:, 0]}).items()
        }

    if free:
        implementations = {
            SAME: same,
            LAYER: with_map,
            ON_HOST: partial(with_map, where="cpu"),
            GRAPHED: lambda: with_map(jm.graphed(layer)),
        }
    else:
        implementations = {LAYER: ours, GRAPHED: graphed, COMPILED: compiled}
    implementations |= {PADDED_LAYER: padded}
    return Setup(implementations, reference, dtype, baseline=PADDED_LAYER)


def in_both_threads(setup: Callable[[], Setup]) -> Setup:
    """Each implementation with and without autograd's own threads. Times only: kernels have tables
    of their own."""
    setup = setup()
    without_threads = partial(torch.autograd.set_multithreading_enabled, False)

    def in_caller(build: Callable[[], Implementation]) -> Implementation:
        return dataclasses.replace(build(), around=without_threads)

    implementations = {}
    for name, build in setup.implementations.items():
        implementations |= {name: build, f"{name}, {CALLER}": partial(in_caller, build)}
    return Setup(implementations, setup.reference, setup.dtype, baseline=setup.baseline)


# -- cases -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lognormal:
    """Segments of lognormal lengths."""

    batch: int
    mean: int
    longest: int
    head_dim: int
    sigma: float = 1.1

    @property
    def name(self) -> str:
        return (
            f"B{self.batch} mean {self.mean} max {self.longest} sigma {self.sigma} D{self.head_dim}"
        )

    def lengths(self) -> Tensor:
        return lognormal_lengths(self.batch, self.mean, self.longest, self.sigma)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Segments of uniform lengths shortest..longest."""

    batch: int
    shortest: int
    longest: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"B{self.batch} N{self.shortest}..{self.longest} D{self.head_dim}"

    def lengths(self) -> Tensor:
        return uniform_lengths(self.batch, self.shortest, self.longest)

    def full(self) -> Tensor:
        """Segments of length ``longest`` with as many pairs of rows in total."""
        return torch.full(
            (max(1, round(self.lengths().square().sum().item() / self.longest**2)),), self.longest
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the tables."""

    num_heads: int
    self_attention: list[Lognormal]
    hstu: int  # how many of them
    histories: list[Lognormal]
    max_candidates: int
    medium: list[Uniform]
    long: list[Uniform]
    wide: list[Uniform]
    host_bound: Uniform  # so few rows that the host's time counts
    host_bound_histories: Lognormal
    # heads, candidates of a user, their histories
    free_running: list[tuple[int, int, Uniform]]
    file_batch: int
    file_dims: tuple[int, ...]


TUNED = [Lognormal(2048, 55, 500, 128), Lognormal(1024, 107, 1000, 64)]
VARIANTS = [Lognormal(4096, 30, 300, 64), Lognormal(512, 200, 2000, 96)]
VARIANTS += [Lognormal(1024, 107, 1000, 64, sigma) for sigma in (0.6, 1.6)]
FULL = Sizes(
    num_heads=4,
    self_attention=TUNED + VARIANTS,
    hstu=2,
    histories=[Lognormal(512, 300, 3000, dim) for dim in (64, 128)],
    max_candidates=200,
    medium=[
        Uniform(768, 1, 1000, 64),
        Uniform(1536, 1, 512, 64),
        Uniform(768, 1, 1000, 128),
        Uniform(1536, 1, 512, 128),
    ],
    long=[Uniform(8, 4096, 8192, 64)],
    wide=[Uniform(64, 1024, 1024, dim) for dim in (192, 256, 136, 160, 224)],
    host_bound=Uniform(32, 96, 96, 128),
    host_bound_histories=Lognormal(64, 100, 1000, 64),
    free_running=[(2, 10, Uniform(64, 1, 99, 32)), (4, 20, Uniform(512, 1, 199, 32))],
    file_batch=1024,
    file_dims=(64, 128),
)
CPU = dataclasses.replace(
    FULL,
    self_attention=[Lognormal(64, 55, 500, 64), Lognormal(32, 107, 1000, 64)],
    hstu=1,
    histories=[Lognormal(16, 300, 3000, 64)],
    medium=[Uniform(24, 1, 512, 64)],
    long=[Uniform(2, 256, 512, 64)],
    wide=[Uniform(4, 128, 128, 256)],
    host_bound=Uniform(4, 32, 32, 64),
    host_bound_histories=Lognormal(4, 50, 200, 64),
    free_running=[(2, 10, Uniform(64, 1, 99, 32))],
    file_batch=32,
    file_dims=(64,),
)
TINY = Sizes(
    num_heads=2,
    self_attention=[Lognormal(6, 5, 20, 8), Lognormal(4, 5, 20, 16, 1.6)],
    hstu=1,
    histories=[Lognormal(4, 6, 20, 8)],
    max_candidates=5,
    medium=[Uniform(6, 1, 20, 8)],
    long=[Uniform(2, 10, 20, 8)],
    wide=[Uniform(2, 8, 8, 136)],
    host_bound=Uniform(2, 5, 5, 8),
    host_bound_histories=Lognormal(2, 5, 10, 8),
    free_running=[(2, 3, Uniform(4, 1, 9, 4))],
    file_batch=5,
    file_dims=(8,),
)


def read_lengths(path: str) -> tuple[str, Tensor]:
    """The name of a text file, and its integers that are not 0."""
    lengths = torch.tensor([int(x) for x in Path(path).read_text().split()])
    return Path(path).stem, lengths[lengths > 0]


def real_and_synthetic(real: Tensor) -> dict[str, Tensor]:
    """The lengths, and those of as many segments and rows, up to rounding: lognormal ones with the
    mean, the maximum and the deviation of the logarithms of the real ones, uniform ones, and equal
    ones."""
    count, mean = len(real), round(real.double().mean().item())
    sigma = real.double().log().std(correction=0).item()
    return {
        "real": real,
        "lognormal": lognormal_lengths(count, mean, int(real.max()), sigma),
        "uniform": uniform_lengths(count, 1, 2 * mean - 1),
        "equal": torch.full((count,), mean),
    }


def make_cases(device: str, tiny: bool, measured: Mapping[str, Tensor] | None = None) -> list[Case]:
    """CUDA: bf16. CPU: fp32 and smaller shapes. ``tiny``: everything, small. ``measured``: lengths
    to draw batches from, by name."""
    sizes = TINY if tiny else FULL if device == "cuda" else CPU
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cases = []

    def add(
        table: str,
        name: str,
        setup: Callable[[Callable[[], Problem]], Setup],
        attention: Attention,
        **options,
    ) -> None:
        cases.append(
            Case(table, name, partial(setup, partial(Problem, device, dtype, attention)), **options)
        )

    def attention(lengths: Tensor, head_dim: int, **options) -> Attention:
        return Attention(lengths, sizes.num_heads, head_dim, **options)

    def add_both_masks(table: str, name: str, lengths: Tensor, head_dim: int) -> None:
        add(table, name, everyday, attention(lengths, head_dim))
        add(table, f"{name}, causal", everyday, attention(lengths, head_dim, causal=True))

    for name, lengths in (measured or {}).items():
        generator = torch.Generator().manual_seed(0)
        drawn = lengths[torch.randint(len(lengths), (sizes.file_batch,), generator=generator)]
        batch = f"{name} B{len(drawn)} mean {drawn.double().mean():.0f} max {drawn.max()}"
        for dim in sizes.file_dims:
            for kind, x in real_and_synthetic(drawn).items():
                add(MEASURED, f"{batch} D{dim}, {kind}", everyday, attention(x, dim))
            causal = attention(drawn, dim, causal=True)
            add(MEASURED, f"{batch} D{dim}, real, causal", everyday, causal)
    for shape in sizes.self_attention:
        add_both_masks(SELF, shape.name, shape.lengths(), shape.head_dim)
    for shape in sizes.self_attention[: sizes.hstu]:
        add(
            HSTU,
            shape.name,
            everyday,
            attention(shape.lengths(), shape.head_dim, causal=True, activation="silu"),
        )
    counts = {
        shape: uniform_lengths(shape.batch, 1, sizes.max_candidates) for shape in sizes.histories
    }
    targets = {
        shape: attention(counts[shape], shape.head_dim, kv_lengths=shape.lengths())
        for shape in sizes.histories
    }
    for shape, target in targets.items():
        add(TARGET, f"{shape.name}, 1..{sizes.max_candidates} candidates", everyday, target)
    for shape in sizes.medium:
        for kind, lengths in (("jagged", shape.lengths()), ("full", shape.full())):
            add(
                MEDIUM,
                f"{kind} N{shape.longest} D{shape.head_dim}",
                everyday,
                attention(lengths, shape.head_dim),
            )
    for shape in sizes.long:
        add(
            LONG,
            shape.name,
            with_and_without_schedule,
            attention(shape.lengths(), shape.head_dim, causal=True),
        )
    for shape in sizes.wide:
        causal = attention(shape.lengths(), shape.head_dim, causal=True)
        add(WIDE, shape.name, everyday, causal)
    for shape in sizes.self_attention[:2]:
        add(ORDER, shape.name, orders, attention(shape.lengths(), shape.head_dim), picture="ms")

    def add_wall(name: str, setup: Callable[[], Setup]) -> None:
        cases.append(Case(WALL, name, partial(in_both_threads, setup), wall=1, picture="ms"))

    for shape in (sizes.self_attention[1], sizes.host_bound):
        for causal, what, setup in (
            (False, "attention", everyday),
            (True, "causal attention", with_and_without_schedule),
        ):
            problem = partial(
                Problem, device, dtype, attention(shape.lengths(), shape.head_dim, causal=causal)
            )
            add_wall(f"{what}, {shape.name}", partial(setup, problem))
    few = sizes.host_bound_histories
    few_targets = attention(
        uniform_lengths(few.batch, 1, sizes.max_candidates), few.head_dim, kv_lengths=few.lengths()
    )
    for history, target in (next(iter(targets.items())), (few, few_targets)):
        add_wall(
            f"target attention layer, new offsets, {history.name}",
            partial(target_layer, device, dtype, target),
        )
    for heads, count, shape in sizes.free_running:
        lengths = shape.lengths(), torch.full((shape.batch,), count)
        target = Attention(lengths[1], heads, shape.head_dim, kv_lengths=lengths[0])
        setup = partial(target_layer, device, dtype, target, free=True)
        name = f"{shape.name} H{heads}, {count} candidates each"
        cases.append(Case(FREE, name, setup, wall=FREE_STEPS, picture="ms"))
    return cases


summary = partial(jagged_over_full, table=MEDIUM, both="forward_backward_tflops")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--lengths",
        type=read_lengths,
        nargs="+",
        metavar="FILE",
        help=f"adds cases, {MEASURED!r}: integers between white space",
    )
    own, _ = parser.parse_known_args()
    sys.exit(
        main(
            "everyday",
            partial(make_cases, measured=dict(own.lengths or ())),
            summary=summary,
            own_options=[parser],
        )
    )
