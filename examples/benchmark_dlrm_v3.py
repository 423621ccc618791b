"""Measures a ranker of the form of MLPerf's DLRMv3: python examples/benchmark_dlrm_v3.py

An HSTU reads each user's events and, behind them, the candidates, which see the events but not one
another. Tables are smaller than MLPerf's (--ids), ids and lengths are random: it is not an official
result. --qps 500 1000 runs MLPerf's LoadGen at these rates, in the Server scenario, with and
without cached histories; mlperf_serving.py runs it on a trained ranker.

Prints training samples/s (a sample is a candidate), step time and peak memory, and the time of a
batch of requests: eager, replayed from CUDA graphs, and with cached histories. Times are wall times
of one synchronised call. Writes them as JSON, with the commit, which the environment variable
COMMIT names where there is no git. --out examples/results/dlrm-v3.json is a record's place.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import mlperf_scenario
import torch
from torch import nn
from torch.nn import functional
from training import (
    HelpFormatter,
    check_at_least_1,
    peak_memory,
    pick_device,
    save_json,
    time_steps,
)

import jagged_modules as jm

SIZES = {  # option: default on a GPU, on a CPU, help
    "width": (512, 32, "embedding dim"),
    "heads": (4, 2, "attention heads"),
    "layers": (5, 2, "HSTU layers"),
    "ids": (1_000_000, 1000, "rows of the table of items and users"),
    "train_users": (32, 4, "users of a training step"),
    "train_history": (4096, 64, "longest history in training; lengths are uniform to it"),
    "train_candidates": (64, 4, "candidates of a user in training"),
    "requests": (32, 4, "requests of a batch, one user each"),
    "history": (1024, 32, "events of a request's user"),
    "candidates": (2048, 16, "candidates of a request"),
    "batches": (8, 2, "random batches, each of which is timed three times"),
}
ACTIONS = 16  # kinds of actions


class Batch(NamedTuple):
    """Rows of each user: its own, those of its events, those of its candidates.

    Attributes:
        rows: `[L, 2]`, id and action; a candidate's action is 0.
        num_targets: `[B]`, candidates of each user.
        targets: `[N]`, the candidates among the rows.
        labels: `[N]`; none in batches that are not trained on.
    """

    rows: jm.Jagged
    num_targets: torch.Tensor
    targets: torch.Tensor
    labels: torch.Tensor

    @property
    def candidates(self) -> jm.Jagged:
        """`[N, 2]` of the candidates alone."""
        offsets = functional.pad(self.num_targets.cumsum(0), (1, 0))
        return jm.Jagged(self.rows.values[self.targets], offsets)

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(x.to(device) for x in self))


def joined(batches: list[Batch], device: torch.device) -> Batch:
    """The users of several batches of the host in one on the device, without labels. A GPU gets
    them in one copy from page-locked memory, which waits for nothing."""
    starts = torch.tensor([0, *(len(x.rows.values) for x in batches)]).cumsum(0)
    integers = [
        (x.rows.values.flatten(), x.rows.offsets[:-1] + start, x.num_targets, x.targets + start)
        for x, start in zip(batches, starts)
    ]
    fields = [list(each) for each in zip(*integers)]
    fields[1].append(starts[-1:])
    sizes = [sum(map(len, each)) for each in fields]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    torch.cat([x for each in fields for x in each], out=packed)
    values, offsets, num_targets, targets = packed.to(device, non_blocking=True).split(sizes)
    rows = jm.Jagged(values.view(-1, 2), offsets)
    return Batch(rows, num_targets, targets, labels=torch.empty(0))


def random_batch(events: torch.Tensor, candidates: int, options: argparse.Namespace) -> Batch:
    """On the host. events: how many each user has."""
    offsets = functional.pad((1 + events + candidates).cumsum(0), (1, 0))
    targets = (offsets[1:, None] - candidates + torch.arange(candidates)).flatten()
    ids = torch.randint(options.ids, (int(offsets[-1]),))
    actions = torch.randint(1, ACTIONS, ids.shape).index_fill_(0, targets, 0)
    num_targets, labels = torch.full_like(events, candidates), torch.randint(2, targets.shape)
    rows = jm.Jagged(torch.stack([ids, actions], dim=1), offsets)
    return Batch(rows, num_targets, targets, labels.float())


class Ranker(nn.Module):
    """Logits of all rows, of which those of candidates count."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        width, device = options.width, options.device
        self.ids, self.actions = (
            nn.Embedding(count, width, device=device, sparse=True)
            for count in (options.ids, ACTIONS)
        )
        config = jm.HSTUConfig(scaling_seqlen=1 + options.history + options.candidates)
        self.hstu = jm.HSTUStack(width, options.heads, options.layers, config, device=device)
        self.head = nn.Linear(width, 1, device=device)

    def embedded(self, rows: jm.Jagged) -> jm.Jagged:
        ids, actions = rows.values.T.contiguous()  # columns are looked up by a slower kernel
        return rows.with_values(self.ids(ids) + self.actions(actions))

    def forward(
        self,
        rows: jm.Jagged,
        num_targets: torch.Tensor | None = None,
        cache: jm.HistoryCache | None = None,
    ) -> torch.Tensor:
        """The rows' logits `[L]`. With a cache, of the users' own rows and events, they are those
        of candidates; else num_targets says how many of each user's rows are."""
        x = self.embedded(rows)
        x = self.hstu(x, num_targets) if cache is None else self.hstu.score(x, cache)
        return self.head(x.values).squeeze(1)

    def keys_and_values(self, history: jm.Jagged) -> jm.HistoryCache:
        return self.hstu.cache(self.embedded(history))


def score(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The candidates' logits `[N]` of a Ranker, or of one that is replayed from graphs."""
    return model(batch.rows, batch.num_targets)[batch.targets]


def score_cached(model: nn.Module, cache: jm.HistoryCache, batch: Batch) -> torch.Tensor:
    """As `score`. cache: of the rows of the users and their events."""
    return model(batch.candidates, cache=cache)


def replayed(model: Ranker, options: argparse.Namespace) -> nn.Module:
    """The model, replayed from CUDA graphs of sixteen numbers of requests of equal sizes."""
    most, history = options.requests, 1 + options.history
    counts = sorted({-(-most * i // 16) for i in range(1, 17)})
    rows = {size * n for size in (options.candidates, history + options.candidates) for n in counts}
    # one segment more is the padding's
    return jm.graphed(
        model,
        capacities=[n + 1 for n in counts],
        rows=dict(rows=sorted(rows), cache=[history * n for n in counts]),
        max_graphs=2 * len(counts),
    )


def measure_training(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of Adam, and of SGD for the tables, under autocast to bfloat16."""
    model, device = Ranker(options), options.device
    tables = [*model.ids.parameters(), *model.actions.parameters()]
    rest = [*model.hstu.parameters(), *model.head.parameters()]
    optimizers = torch.optim.SGD(tables, 0.1), torch.optim.Adam(rest, 1e-3)

    def step(batch: Batch) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logits = score(model, batch)
        functional.binary_cross_entropy_with_logits(logits.float(), batch.labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    users, candidates = options.train_users, options.train_candidates
    batches = [
        random_batch(torch.randint(options.train_history + 1, (users,)), candidates, options).to(
            device
        )
        for _ in range(options.batches)
    ]
    seconds = time_steps({"step": step}, batches, device)["step"]
    return {
        "rows": sum(len(x.rows.values) for x in batches) / len(batches),
        "step_ms": 1e3 * seconds,
        "samples_per_second": users * candidates / seconds,
        "peak_mib": peak_memory(lambda: step(batches[0]), device) / 2**20,
    }


@torch.inference_mode()
def measure_inference(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a batch of requests in bfloat16, by how it is computed."""
    model = Ranker(options).to(torch.bfloat16).eval()
    events = torch.full((options.requests,), options.history)
    requests = [
        random_batch(events, options.candidates, options).to(options.device)
        for _ in range(options.batches)
    ]
    history = random_batch(events, 0, options).to(options.device)
    cache = model.keys_and_values(history.rows)
    ways = {"eager": partial(score, model), "cached": partial(score_cached, model, cache)}
    if options.device.type == "cuda":
        graphs = replayed(model, options)
        ways["graphs"] = partial(score, graphs)
        ways["cached, graphs"] = partial(score_cached, graphs, cache)
    return {name: 1e3 * x for name, x in time_steps(ways, requests, options.device).items()}


class Server:
    """Answers queries in a thread of its own: as many at once as wait, at most `most`. While a GPU
    computes a batch, the host issues the next one.

    Args:
        answer: logits of the queries with these indices, on any device.
        complete: is told the ids of the queries that are answered.
    """

    def __init__(
        self,
        answer: Callable[[list[int]], torch.Tensor],
        most: int,
        complete: Callable[[list[int]], None],
    ):
        self.answer, self.most, self.complete = answer, most, complete
        self.waiting: SimpleQueue[Any] = SimpleQueue()
        self.failure: Exception | None = None
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def issue(self, queries: list[Any]) -> None:
        for query in queries:
            self.waiting.put(query)

    def close(self) -> None:
        """Waits for what is left. Raises what a batch raised last."""
        self.waiting.put(None)
        self.thread.join()
        if self.failure is not None:
            raise self.failure

    @torch.inference_mode()
    def _run(self) -> None:
        issued: deque[tuple[list[int], Any]] = deque()
        more = True
        while more or issued:
            if more and not (issued and self.waiting.empty()):
                batch = self._next_batch()
                more = batch[-1] is not None
                if queries := batch if more else batch[:-1]:
                    issued.append(self._issued(queries))
                if more and len(issued) < 2:
                    continue
            if issued:
                self._finish(*issued.popleft())

    def _next_batch(self) -> list[Any]:
        """What waits, at least one entry. The last one may be None, behind which nothing comes."""
        batch = [self.waiting.get()]
        while batch[-1] is not None and len(batch) < self.most and not self.waiting.empty():
            batch.append(self.waiting.get())
        return batch

    def _issued(self, queries: list[Any]) -> tuple[list[int], Any]:
        """The queries' ids, and the event behind which a GPU has their logits on the host."""
        event = None
        try:
            logits = self.answer([x.index for x in queries])
            logits.to("cpu", non_blocking=True)
            if logits.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
        except Exception as error:  # LoadGen waits until each query is complete
            self.failure = error
        return [x.id for x in queries], event

    def _finish(self, ids: list[int], event: Any) -> None:
        try:
            if event is not None:
                event.synchronize()
        except Exception as error:
            self.failure = error
        self.complete(ids)


@torch.inference_mode()
def measure_server(options: argparse.Namespace) -> dict[str, list[dict[str, str]]]:
    """LoadGen's summaries in bfloat16, for each rate of queries, by how they are computed."""
    model, device = Ranker(options).to(torch.bfloat16).eval(), options.device
    events = torch.full((1,), options.history)
    queries = [random_batch(events, options.candidates, options) for _ in range(options.samples)]
    history = random_batch(events.expand(options.samples), 0, options).to(device)
    row = 4 * options.width * options.layers  # bytes of keys and values
    pages = options.samples * (2 + options.history // 128)
    cache = jm.PagedHistoryCache(model.hstu, max_bytes=128 * row * pages, page_rows=128)
    cache.put(list(range(options.samples)), model.embedded(history.rows))

    def batch(indices: list[int]) -> Batch:
        return joined([queries[i] for i in indices], device)

    ways: dict[str, Callable[[list[int]], torch.Tensor]] = {
        "eager": lambda indices: score(model, batch(indices)),
        "cached": lambda indices: score_cached(model, cache.select(indices), batch(indices)),
    }
    if device.type == "cuda":
        graphs = replayed(model, options)
        ways["graphs"] = lambda indices: score(graphs, batch(indices))
        ways["cached, graphs"] = lambda indices: score_cached(
            graphs, cache.select(indices), batch(indices)
        )
    results: dict[str, list[dict[str, str]]] = {name: [] for name in ways}
    for name, answer in ways.items():
        for size in range(1, min(options.requests, options.samples) + 1):  # compiles, and captures
            answer(list(range(size)))
        for qps in options.qps:
            server = Server(answer, options.requests, mlperf_scenario.complete)
            folder = options.out.parent / f"loadgen-{name.replace(', ', '-')}-{qps:g}"
            results[name].append(mlperf_scenario.serve(server.issue, qps, options, folder))
            server.close()
    return results


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    for name, (on_gpu, on_cpu, text) in SIZES.items():
        text += f" (default: {on_gpu} on a GPU, {on_cpu} on a CPU)"
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of batches and parameters")
    parser.add_argument(
        "--qps", type=float, nargs="+", default=[], help="queries per second of LoadGen's runs"
    )
    mlperf_scenario.add_options(parser, samples=256, seconds=10)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmark_dlrm_v3.json"), help="results"
    )
    options = parser.parse_args(arguments)
    options.device = pick_device(options.device)
    for name, (on_gpu, on_cpu, _) in SIZES.items():
        vars(options).setdefault(name, on_gpu if options.device.type == "cuda" else on_cpu)
    check_at_least_1(parser, options, (*SIZES, "samples"))
    return options


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return os.environ.get("COMMIT") or subprocess.check_output(git, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.qps:
        mlperf_scenario.require("benchmark_dlrm_v3")
    torch.manual_seed(options.seed)
    device = options.device
    on_gpu = device.type == "cuda"
    report = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "command": "python examples/benchmark_dlrm_v3.py, with the sizes below",
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {platform.machine()}",
        "torch": torch.__version__,
        "sizes": {name: getattr(options, name) for name in SIZES},
        "training": measure_training(options),
        "inference_ms": measure_inference(options),
    }
    served = measure_server(options) if options.qps else {}
    if served:
        limits = {name: getattr(options, name) for name in ("limit_ms", "seconds", "samples")}
        report["server"] = {**limits, **served}
    training = report["training"]
    print(
        f"training, {training['rows']:,.0f} rows: {training['step_ms']:.2f} ms,"
        f" {training['samples_per_second']:,.0f} samples/s, {training['peak_mib']:,.0f} MiB"
    )
    for name, ms in report["inference_ms"].items():
        rate = 1e3 * options.requests / ms
        print(f"requests, {name}: {ms:.2f} ms, {rate:,.0f} requests/s")
    for name, runs in served.items():
        for run in runs:
            facts = ", ".join(f"{key} {value}" for key, value in run.items())
            print(f"LoadGen's Server scenario, {name}: {facts}")
    save_json(options.out, report)


if __name__ == "__main__":
    main(sys.argv[1:])
