"""Latency of ranking models whose callers repeat the rows of users for their candidates: as they
are, split by hand, and fused.

    # one table of all forms and modes; "..." below is this command
    python kernels/benchmarks/bench_broadcast.py --only "^models" --rep 5 --warmup 2 --pause 0.02
    # without split: less to compile
    ... --only "^models" --impl "left in|fused" --rep 5 --warmup 2 --pause 0.02
    # more ratios, nothing compiled
    ... --impl "eager|graphs" --rep 10 --pause 0.05
    # fused against left in, call by call
    ... --only "^one candidate"
    # smaller models
    ... --device cpu
    ... --tiny --device cpu

"left in": the rows of users are gathered for the candidates, then the model runs. "split": a net of
users and a net of candidates, cut by hand where the rows were repeated. "fused":
jm.transforms.fuse_broadcasts of the model, placed for 1,024 candidates of 15 users in all cases.
Each form is measured eager, under torch.compile with dynamic sizes, and as a CUDA graph of the
eager call. Times are wall times of host and device together; the first table also has the time in
which the host issues a call, with nothing else to do on the device. The speed-ups in tables are
over "left in, eager"; the first table compares within each mode. Models come without embedding
lookups.
"""

import copy
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from broadcast_models import NETS, Net, Sizes
from names import OURS
from runner import Case, Implementation, Setup, main
from torch import Tensor, nn

import jagged_modules as jm

LEFT_IN, SPLIT, FUSED = "left in", "split", f"{OURS}, fused"
EAGER, COMPILED, GRAPHS = "eager", "compiled", "graphs"
MODELS = "models"
PER_USER = "candidates per user"
IN_TURN = "one candidate per user, calls in turn"
SAMPLED = 16  # rows that are checked
EXAMPLE_ROWS = 32  # of the export


@dataclass(frozen=True)
class Scale:
    """sizes: of the models. batch: users and candidates that all are placed for. ratios: candidates
    per user of tables of one model."""

    sizes: Sizes
    batch: tuple[int, int]
    ratios: tuple[int, ...]
    swept: tuple[str, ...] = (
        "DIN, nn.MultiheadAttention",
        "nn.TransformerEncoder",
        "Wukong",
        "TorchRec DLRM",
        "TorchRec DLRM_Projection",
    )

    @property
    def batches(self) -> tuple[tuple[int, int], ...]:
        """Of the tables of all models: `batch`, and one candidate per user."""
        return self.batch, (self.batch[1], self.batch[1])


FULL = Scale(Sizes(128, 4, 200, 512, 64, 8, (1024, 512)), (15, 1024), (10, 100, 1000, 10000))
CPU = Scale(Sizes(64, 4, 50, 128, 24, 4, (128, 64)), (15, 1024), (10, 100, 1000))
TINY = Scale(Sizes(16, 2, 5, 8, 6, 2, (8,)), (2, 24), (20,))


def setting(device: str, tiny: bool) -> tuple[Scale, torch.dtype]:
    scale = TINY if tiny else FULL if device == "cuda" else CPU
    return scale, torch.bfloat16 if device == "cuda" else torch.float32


def modes_on(device: str) -> list[str]:
    return [EAGER, COMPILED, *([GRAPHS] if device == "cuda" else [])]


def candidates_of(batch: tuple[int, int]) -> Tensor:
    """The user of each candidate, grouped by user."""
    users, candidates = batch
    return torch.arange(candidates) * users // candidates


class LeftIn(nn.Module):
    """The model, behind a gather of the rows of users."""

    def __init__(self, net: Net):
        super().__init__()
        self.model, self.shared = net.model, net.shared

    def forward(self, candidate_to_user: Tensor, **inputs: Tensor) -> Tensor:
        shared = {name: inputs[name].index_select(0, candidate_to_user) for name in self.shared}
        return self.model(**(inputs | shared))


@functools.cache
def made(name: str, scale: Scale, device: str, dtype: torch.dtype) -> tuple[Net, nn.Module]:
    """A net, and its fused form. One for all cases."""
    torch.manual_seed(0)
    net = NETS[name](scale.sizes)
    for module in (net.model, net.split):
        if module is not None:
            module.to(device, dtype)
    if not net.shared:
        example = moved(net.inputs(*scale.batch), device, dtype)
        return net, jm.transforms.fuse_broadcasts(net.model, example)
    example = moved(net.inputs(EXAMPLE_ROWS, EXAMPLE_ROWS), device, dtype)
    return net, jm.transforms.fuse_broadcasts(
        net.model, example, request_only=net.shared, max_batch=scale.batch
    )


def forms(name: str, scale: Scale, device: str, dtype: torch.dtype) -> dict[str, nn.Module]:
    net, fused = made(name, scale, device, dtype)
    return {
        LEFT_IN: LeftIn(net) if net.shared else net.model,
        **({SPLIT: net.split} if net.split else {}),
        FUSED: fused,
    }


@functools.lru_cache(maxsize=1)
def compiled_forms(
    name: str, scale: Scale, device: str, dtype: torch.dtype
) -> dict[str, nn.Module]:
    """For all batches of a model, whose cases follow one another."""
    torch._dynamo.reset()
    return {
        form: torch.compile(module, dynamic=True, fullgraph=True)
        for form, module in forms(name, scale, device, dtype).items()
    }


def given(
    name: str, scale: Scale, batch: tuple[int, int], device: str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The inputs of all forms."""
    net = made(name, scale, device, dtype)[0]
    index = {"candidate_to_user": candidates_of(batch).to(device)} if net.shared else {}
    return moved(net.inputs(*batch), device, dtype) | index


def compile_forms(name: str, scale: Scale, device: str, dtype: torch.dtype) -> None:
    with torch.no_grad():
        for batch in scale.batches:
            for module in compiled_forms(name, scale, device, dtype).values():
                module(**given(name, scale, batch, device, dtype))


@functools.cache
def fill_caches(scale: Scale, device: str, dtype: torch.dtype) -> None:
    """Compiles all models at the same time, in processes that leave their results in inductor's
    caches."""
    code = "import torch; from bench_broadcast import *; compile_forms({!r}, {!r}, {!r}, {!r})"
    environment = os.environ | {
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    commands = [[sys.executable, "-c", code.format(name, scale, device, dtype)] for name in NETS]
    processes = [
        subprocess.Popen(x, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for x in commands
    ]
    for process in processes:
        process.wait()


def moved(inputs: dict[str, Tensor], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: x.to(device, dtype if x.is_floating_point() else None) for name, x in inputs.items()
    }


def graphed(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The replay of a CUDA graph of the call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):  # compiles kernels
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def host_ms(call: Callable[[], Tensor], calls: int = 50) -> float:
    """Median time in which the host issues a call, ms. The device has nothing else to do."""
    times = []
    with torch.no_grad():
        for _ in range(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[calls // 5 :])


def compare(
    name: str, scale: Scale, batch: tuple[int, int], device: str, dtype: torch.dtype
) -> Setup:
    """All forms of a model in all modes, for a number of users and of candidates."""
    net, inputs = made(name, scale, device, dtype)[0], given(name, scale, batch, device, dtype)
    rows = torch.linspace(0, batch[1] - 1, SAMPLED).long().to(device)

    def implementation(form: str, mode: str) -> Implementation:
        if mode == COMPILED and device == "cuda":
            fill_caches(scale, device, dtype)
        module = (compiled_forms if mode == COMPILED else forms)(name, scale, device, dtype)[form]
        call = partial(module, **inputs)
        host = {"host issues it in": host_ms(call)} if device == "cuda" and mode != GRAPHS else {}
        call = graphed(call) if mode == GRAPHS else call
        return Implementation(
            call, inputs, lambda _, x: {"sampled": x.reshape(-1, 1)[rows]}, host_ms=host
        )

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        """On the host if the model repeats rows itself: this project's kernels have no fp64."""
        where = device if net.shared else "cpu"
        model = copy.deepcopy(net.model).to(where, dtype)
        x = moved(inputs, where, dtype)
        chosen = rows.to(where)
        if net.shared:
            of_users = x.pop("candidate_to_user")[rows]
            x = {key: value[of_users if key in net.shared else rows] for key, value in x.items()}
        with torch.no_grad():
            out = model(**x).reshape(-1, 1)
        return {"out/sampled": (out if net.shared else out[chosen]).to(device)}

    names = forms(name, scale, device, dtype)
    implementations = {
        f"{form}, {mode}": partial(implementation, form, mode)
        for form in names
        for mode in modes_on(device)
    }
    return Setup(implementations, reference, dtype, baseline=f"{LEFT_IN}, {EAGER}")


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: bf16, 1,024 candidates of 15 users, one per user, and 10 to 10,000 per user. CPU: fp32,
    smaller models. ``tiny``: all small."""
    scale, dtype = setting(device, tiny)
    total = scale.batch[1]

    def case(table: str, label: str, name: str, batch: tuple[int, int]) -> Case:
        return Case(
            table, label, partial(compare, name, scale, batch, device, dtype), wall=1, picture="ms"
        )

    cases = [
        case(f"{MODELS}, {total} candidates of {batch[0]} users", name, name, batch)
        for name in NETS
        for batch in scale.batches
    ]
    for name in scale.swept:
        for ratio in scale.ratios if name in NETS else ():
            users = max(1, total // ratio)
            cases.append(
                case(
                    f"{PER_USER}: {name}",
                    f"{ratio} each of {users} users",
                    name,
                    (users, users * ratio),
                )
            )
    return cases


def compare_in_turn(device: str, tiny: bool) -> list[dict]:
    """Wall times with one candidate per user: the model and its fused form are called in turn, so
    that both see the same machine."""
    scale, dtype = setting(device, tiny)
    if device == "cuda":
        fill_caches(scale, device, dtype)
    return [in_turn(name, mode, device, tiny) for name in NETS for mode in modes_on(device)]


def in_turn(name: str, mode: str, device: str, tiny: bool) -> dict:
    """A row of `compare_in_turn`."""
    scale, dtype = setting(device, tiny)
    inputs = given(name, scale, scale.batches[1], device, dtype)
    made_forms = (compiled_forms if mode == COMPILED else forms)(name, scale, device, dtype)
    calls = [partial(made_forms[form], **inputs) for form in (LEFT_IN, FUSED)]
    try:
        left, fused = medians_in_turn(
            [graphed(x) for x in calls] if mode == GRAPHS else calls,
            device,
            turns=2 if tiny else 400,
        )
    # nested tensors of nn.TransformerEncoder on CUDA
    except torch._dynamo.exc.Unsupported as error:
        return {"model": name, "mode": mode, "error": str(error).splitlines()[0]}
    return {
        "model": name,
        "mode": mode,
        "left in, ms": left,
        "fused, ms": fused,
        "more, %": 100 * (fused / left - 1),
    }


def medians_in_turn(calls: list[Callable[[], Tensor]], device: str, turns: int) -> list[float]:
    """Median wall time of each call, ms. The first tenth of the calls is left out."""
    times: list[list[float]] = [[] for _ in calls]
    with torch.no_grad():
        for turn in range(turns + turns // 10):
            for call, seen in list(zip(calls, times))[:: -1 if turn % 2 else 1]:
                begin = time.perf_counter()
                call()
                if device == "cuda":
                    torch.cuda.synchronize()
                seen.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(seen[turns // 10 :]) for seen in times]


def table_of_forms(rows: list[dict]) -> list[str]:
    """One line per case: ms of each form in each mode, and what the fused form saves of the time of
    "left in". On CUDA "wall / host"."""
    measured = {
        (row["table"], row["case"], *row["implementation"].rsplit(", ", 1)): row
        for row in rows
        if "forward_ms" in row
    }
    cells = {
        key: " / ".join(f"{ms:.3f}" for ms in (row["forward_ms"], *row.get("host_ms", {}).values()))
        for key, row in measured.items()
    }
    modes = [mode for mode in (EAGER, GRAPHS, COMPILED) if any(key[3] == mode for key in measured)]
    lines = [
        [
            "case",
            *(
                f"{form}, {mode}"
                for mode in modes
                for form in ("left in", "split", "fused", "saves")
            ),
        ]
    ]
    for table, case in dict.fromkeys(key[:2] for key in measured):
        lines.append([f"{table.removeprefix(MODELS + ', ')}: {case}"])
        for mode in modes:
            keys = [(table, case, form, mode) for form in (LEFT_IN, SPLIT, FUSED)]
            left, _, fused = (measured.get(key, {}).get("forward_ms") for key in keys)
            saved = [f"{100 * (1 - fused / left):+.0f} %" if left and fused else ""]
            lines[-1] += [*(cells.get(key, "") for key in keys), *saved]
    lines.insert(1, ["---"] * len(lines[0]))
    return ["\n".join(f"| {' | '.join(line)} |" for line in lines)]


if __name__ == "__main__":
    sys.exit(
        main(
            "broadcast", make_cases, summary=table_of_forms, other_tables={IN_TURN: compare_in_turn}
        )
    )
