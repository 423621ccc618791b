"""HSTU's attention and whole layer beside every implementation that a team could take instead.

    python kernels/benchmarks/leaderboard.py                          # on a CUDA device
    python kernels/benchmarks/leaderboard.py --only D128 --limit 60   # seconds for each peer
    python kernels/benchmarks/leaderboard.py --peers "^jagged|Meta"
    python kernels/benchmarks/leaderboard.py --tiny --device cpu

Each implementation is checked and measured in a process of its own, so that one that crashes or
hangs is a row with its error. All measure a case before the next one begins. A row is printed as
soon as it is measured. --together measures them in one process, in less time. Peers are imported
from where their users have them, on PYTHONPATH:

- Meta's `generative_recommenders`, and `torchrec`, which it imports. The configurations that a
  kernel tries are compiled in parallel, then timed for a tenth of its default.
- Helion's `examples/jagged_hstu_attn.py`, by its folder. It has no targets and no backward, and
  hides a row from itself, which the check finds.
- `flash_attn`. FlashAttention and flex_attention compute softmax: another function.

NVIDIA's figures are read off the plots of recsys-examples.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import bench_layers
import peers
import report
import stu
import torch
from bench_gdpa import FLEX, SOFTMAX_NOTE, Function, Problem
from inputs import varlen_attention
from names import FA2, OURS
from protocol import Protocol
from runner import Case, Implementation, Setup, main, release_memory, run_case
from torch import Tensor

META, META_TMA = "Meta HSTU attention (Triton)", "Meta HSTU attention (Triton), TMA"
HELION = "Helion's example"
NVIDIA = "NVIDIA CUTLASS, published for an H100"
ATTENTION, LAYER = "HSTU attention", "HSTU layer"
SPENT = "unavailable: its time is spent"
SHOWN = ("case", "implementation", "forward ms", "fwd+bwd ms", "fwd+bwd peak MB", "remarks")
# table -> its implementations, each of which is a process
PEERS = {
    ATTENTION: [OURS, META, META_TMA, HELION, FLEX, FA2, *peers.FLASH_ATTENTION],
    LAYER: [
        OURS,
        bench_layers.COMPILED,
        bench_layers.BF16_ROWS,
        *stu.RECOMPUTES,
        bench_layers.USER,
        bench_layers.FLOOR,
    ],
}
# with TMA or without -> what the autotuner of Meta's backward chose, whose key leaves TMA out
CHOICES: dict[bool, dict] = {False: {}, True: {}}
# (B, N, D) -> ms of forward, and of forward + backward; H=4, causal
PUBLISHED = {
    (128, 512, 64): (0.101, 0.357),
    (128, 1024, 64): (0.272, 0.937),
    (128, 2048, 64): (0.748, 2.83),
    (128, 1024, 128): (0.352, 1.48),
    (128, 2048, 128): (1.20, 4.67),
}


# -- attention -------------------------------------------------------------------------------------


def attention(device: str, lengths: Tensor, heads: int, dim: int, targets: int) -> Setup:
    """Causal, with SiLU / N. targets: the last rows of each segment, which see no other target."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    num_targets = lengths.clamp(max=targets)
    problem = Problem(device, dtype, lengths, lengths, heads, dim, num_targets=num_targets)
    silu = Function("silu", problem.softmax.scale, output_scale=1 / problem.max_kv)
    implementations = {
        OURS: partial(problem.ours, silu),
        META: lambda: meta(problem, silu, enable_tma=False),
        META_TMA: lambda: meta(problem, silu, enable_tma=True),
    }
    if device == "cuda":
        implementations[FLEX] = problem.flex
        if not targets:
            implementations |= {HELION: lambda: helion(problem, silu)} | flash(problem)
    return problem.setup((silu, problem.softmax), implementations)


def meta(problem: Problem, silu: Function, enable_tma: bool) -> Implementation:
    """Its kernels of both passes. They choose among configurations by N, as its models set it."""
    common = importlib.import_module("generative_recommenders.common")
    operator = stu.attention_operator()
    common.set_static_max_seq_lens([problem.max_q])
    offsets = problem.q_offsets.long()

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operator._hstu_attn_bwd.cache = CHOICES[enable_tma]
        return operator.triton_hstu_mha(
            N=problem.max_q,
            alpha=silu.scale,
            q=q,
            k=k,
            v=v,
            seq_offsets=offsets,
            num_targets=problem.mask.num_targets,
            enable_tma=enable_tma,
        )

    return problem.implementation(silu, forward, bound=stu.BOUND)


def helion(problem: Problem, silu: Function) -> Implementation:
    os.environ.setdefault("HELION_AUTOTUNE_EFFORT", "quick")  # the full search takes minutes
    kernel = importlib.import_module("jagged_hstu_attn")._helion_jagged_attention_kernel
    inputs = {name: x.detach() for name, x in problem.inputs.items()}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(problem.max_q, silu.scale, q, k, v, problem.q_offsets)

    return problem.implementation(silu, forward, inputs, bound=stu.BOUND, note="forward only")


def flash(problem: Problem) -> dict[str, Callable[[], Implementation]]:
    def of(attend: Callable[..., Tensor]) -> Implementation:
        return problem.by_offsets(problem.softmax, attend, SOFTMAX_NOTE)

    newer = {
        name: lambda module=module: of(peers.flash_attention(module, causal=True))
        for name, module in peers.FLASH_ATTENTION.items()
    }
    return {FA2: lambda: of(partial(varlen_attention, causal=True))} | newer


@functools.cache  # once
def compile_before_tuning() -> None:
    """Triton's autotuner compiles a kernel's configurations in parallel, then times them."""
    import triton.testing
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, triton.testing.do_bench

    def prune_and_compile(self, kwargs: dict) -> list:
        configs = prune(self, kwargs)
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            AsyncCompileMode(pool, ignore_errors=True),  # the tuner meets and reports them
        ):
            for config in configs:
                given = {**kwargs, **config.all_kwargs(), "warmup": True}
                if config.pre_hook is not None:  # sets the block shapes of TMA descriptors
                    config.pre_hook({**self.nargs, **given})
                self.fn.run(*self.nargs.values(), **given)
        return configs

    Autotuner.prune_configs = prune_and_compile
    shorter = dict(warmup=2.5, rep=10)
    triton.testing.do_bench = lambda call, **options: bench(call, **(options | shorter))


# -- cases -----------------------------------------------------------------------------------------

LONGEST = (1024, 2048, 4096, 512, 8192)
# rows of full segments, head dims, heads; segments, mean and maximum of lognormal lengths; targets
FULL = dict(rows=131_072, longest=LONGEST, dims=(128, 64, 256), heads=4, targets=20)
FULL |= dict(lognormal=[(256, 474, 1024), (512, 190, 2280)])
TINY = dict(rows=32, longest=(8, 16), dims=(8,), heads=2, targets=2, lognormal=[(3, 5, 16)])


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: bf16. CPU: fp32, with the sizes of a CUDA device unless ``tiny``. The first ones are
    those to have if a run is stopped."""
    sizes = TINY if tiny else FULL
    heads, cases = sizes["heads"], []

    def add(name: str, dim: int, lengths: Tensor, targets: int = 0) -> None:
        name = f"{name} D{dim}" + (f", {targets} targets" if targets else "")
        setup = partial(attention, device, lengths, heads, dim, targets)
        cases.append(Case(ATTENTION, name, setup, picture="ms"))

    def add_layer(name: str, dim: int, lengths: Tensor) -> None:
        case = bench_layers.hstu_case(device, LAYER, heads * dim, heads, lengths)
        cases.append(dataclasses.replace(case, name=f"{name} D{dim}"))

    full = {n: torch.full((sizes["rows"] // n,), n) for n in sizes["longest"]}
    lognormal = {
        f"B{shape[0]} mean {shape[1]} N{shape[2]}": bench_layers.lengths_of(*shape)
        for shape in sizes["lognormal"]
    }
    for dim in sizes["dims"]:
        for name, lengths in lognormal.items():
            add_layer(name, dim, lengths)
    for longest, lengths in full.items():
        for dim in sizes["dims"]:
            add(f"B{len(lengths)} N{longest}", dim, lengths)
    for name, lengths in lognormal.items():
        for dim in sizes["dims"]:
            add(name, dim, lengths)
            add(name, dim, lengths, sizes["targets"])
    for longest, lengths in full.items():
        for dim in sizes["dims"]:
            add_layer(f"B{len(lengths)} N{longest}", dim, lengths)
    for batch, longest, dim in PUBLISHED:
        if not tiny and batch * longest != sizes["rows"]:
            add(f"B{batch} N{longest}", dim, torch.full((batch,), longest))
    return cases


# -- processes -------------------------------------------------------------------------------------


class Peer:
    """An implementation in a process of its own, which ends after an error: the next case begins
    another. left: the seconds that it may still take."""

    def __init__(self, name: str, tiny: bool, protocol: Protocol, left: float):
        self.name, self.left, self.missing = name, left, ""
        self.command = command(name, tiny, protocol)
        self.process: Any = None  # after it has ended
        self.start()

    def start(self) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)
        self.process = subprocess.Popen(self.command, text=True, **pipes)

    def stop(self) -> str:
        """How its process ended."""
        code = self.process.poll()
        self.process.kill()
        self.process.communicate()
        self.process = None
        with self.errors:
            self.errors.seek(0)
            last = self.errors.read().strip().split("\n\n")[-1]
        return f"its process ended with {code}: {' '.join(last.split())[-200:] or 'no message'}"

    def measure(self, case: Case) -> list[dict]:
        """Its row of the case; none if it cannot compute what the case asks for."""
        if self.missing or self.left <= 0:
            return [blank(case, self.name, self.missing or SPENT)]
        if self.process is None:
            self.start()
        begin = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            print(f"{case.table}: {case.name}", file=self.process.stdin, flush=True)
        ready, _, _ = select.select([self.process.stdout], [], [], self.left)
        answer = self.process.stdout.readline() if ready else ""
        self.left -= time.monotonic() - begin
        rows = json.loads(answer) if answer else [blank(case, self.name, SPENT)]
        if ready and not answer:  # the end of its output
            self.process.wait()
            rows = [blank(case, self.name, f"unavailable: {self.stop()}")]
        for row in rows:
            if row["status"].startswith("unavailable: ModuleNotFoundError"):
                self.missing = row["status"]
            if row["status"] != "ok" and self.process is not None:
                self.stop()  # after an error of the device, a process cannot go on
        return rows


def command(name: str, tiny: bool, protocol: Protocol) -> list[str]:
    options = dict(name=name, tiny=tiny, protocol=dataclasses.asdict(protocol))
    return [sys.executable, __file__, "--serve", json.dumps(options)]


def serve(name: str, tiny: bool, protocol: dict) -> None:
    """Measures the cases named on stdin. A line of stdout has a case's rows; a peer prints to
    stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = protocol["device"]
    if device == "cuda" and name.startswith("Meta"):
        compile_before_tuning()
    cases = {f"{case.table}: {case.name}": case for case in make_cases(device, tiny)}
    for line in sys.stdin:
        only = re.compile(f"^{re.escape(name)}$")
        rows = run_case(cases[line.strip()], Protocol(**protocol), only)
        release_memory(device)
        print(json.dumps(rows), file=answers, flush=True)


class Board:
    """The peers of a run. limit: seconds for each."""

    def __init__(self, tiny: bool, limit: float):
        self.tiny, self.limit, self.peers = tiny, limit, {}

    def run(self, case: Case, protocol: Protocol, chosen: re.Pattern) -> list[dict]:
        names = [name for name in PEERS[case.table] if chosen.search(name)]
        for name in names:  # all begin at once
            if (case.table, name) not in self.peers:
                self.peers[case.table, name] = Peer(name, self.tiny, protocol, self.limit)
        found = (self.peers[case.table, name].measure(case) for name in names)
        rows = []
        for row in itertools.chain(published(case, chosen), itertools.chain.from_iterable(found)):
            rows.append(row)
            print(" | ".join([row["table"], *(report.COLUMNS[x](row) for x in SHOWN)]), flush=True)
        return rows

    def close(self) -> None:
        for peer in self.peers.values():
            if peer.process is not None:
                peer.stop()


def blank(case: Case, implementation: str, status: str = "ok") -> dict:
    row = dict(table=case.table, case=case.name, picture=case.picture)
    return {**row, "implementation": implementation, "status": status}


def published(case: Case, chosen: re.Pattern) -> list[dict]:
    shapes = {f"B{b} N{n} D{d}": times for (b, n, d), times in PUBLISHED.items()}
    if case.table != ATTENTION or case.name not in shapes or not chosen.search(NVIDIA):
        return []
    times = dict(zip(("forward_ms", "forward_backward_ms"), shapes[case.name]))
    return [{**blank(case, NVIDIA), "note": "not measured here", **times}]


def summary(rows: list[dict]) -> list[str]:
    """Each case: the time of the fastest peer that computes the same here over our shortest."""
    others, lines = (bench_layers.FLOOR, NVIDIA), []
    chosen = [row for row in rows if row["status"] == "ok" and row["implementation"] not in others]
    chosen = [row for row in chosen if not row.get("note", "").startswith(SOFTMAX_NOTE)]
    for table, case in dict.fromkeys((row["table"], row["case"]) for row in chosen):
        of_case = [row for row in chosen if (row["table"], row["case"]) == (table, case)]
        for key in ("forward_ms", "forward_backward_ms"):
            times: tuple[dict, dict] = {}, {}
            for row in of_case:
                if key in row:
                    times[row["implementation"].startswith(OURS)][row["implementation"]] = row[key]
            if all(times):
                (peer, theirs), (own, ms) = (min(x.items(), key=lambda y: y[1]) for x in times)
                lines.append(f"{table}: {case}: {key}: {own} is {theirs / ms:.2f} × {peer}")
    return lines


def together(case: Case, protocol: Protocol, chosen: re.Pattern) -> list[dict]:
    """The rows of a case, all measured in this process."""
    if protocol.device == "cuda":
        compile_before_tuning()
    names = "|".join(map(re.escape, filter(chosen.search, PEERS[case.table])))
    return published(case, chosen) + run_case(case, protocol, re.compile(f"^({names})$"))


def run_board(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    text = "seconds that each implementation of a table may take (default: %(default)s)"
    parser.add_argument("--limit", type=float, default=600.0, help=text)
    text = "one process for all: faster, but a crash ends the run"
    parser.add_argument("--together", action="store_true", help=text)
    own, others = parser.parse_known_args(argv)
    if own.together:
        return main("leaderboard", make_cases, argv, summary, own_options=[parser], run=together)
    board = Board("--tiny" in others, own.limit)
    try:
        return main("leaderboard", make_cases, argv, summary, own_options=[parser], run=board.run)
    finally:
        board.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(**json.loads(sys.argv[2]))
    else:
        sys.exit(run_board())
