"""Measures a ranker under load: python examples/load_serving.py --weights FILE [--rates 50 100 ...
| --soak SECONDS] [--out FOLDER]

--from-json FILE prints the table and draws the picture of an earlier run again.

An open loop: requests arrive as a Poisson process, whether or not earlier ones are answered, and
latency counts from a request's planned arrival. Users are drawn by a Zipf law, their histories are
those of the log. Some requests bring a new event. For each number of candidates and each rate, a
row has latencies, refused and late requests, hit rate, memory, and time by stage. Without --rates
they are fractions of the throughput of a full queue, which is measured first.

The ways to serve that are compared: with each budget of --cache-mb, with pages of each --page-rows,
and with --padded FILE, a model of train_dlrm.py --interaction padded, which replicates the user's
history per candidate: as it is, and through `fuse_broadcasts`.

The queue, batches and the model are in this process, without HTTP. With --processes they are in so
many processes, each with a part of the users. With --http they are in a process of their own,
`serve_ranking.py`.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from checkpoints import load_weights
from load_generator import InProcess, OverHTTP, Processes, Target, Workload
from matplotlib import style
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from serving_app import Service, ServiceLimits, tune_process
from serving_batcher import Limits
from serving_models import CACHE_DTYPES, DTYPES, add_ranker_options, make_ranker, uses_graphs
from serving_rankers import NONE, Ranker, Request
from training import PICTURE_STYLE, HelpFormatter, pick_device, write_atomically

FRACTIONS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2)  # of the throughput of a full queue
REPEATED = 4000  # requests, to measure the throughput of a full queue
STAGES = ("queue", "lookup", "cache", "score")


@dataclass(frozen=True)
class Result:
    """What was measured at one rate. Latencies are of answers with scores. hit_rate: requests whose
    history was reused or appended to.

    way: how the model was served, see `ways_to_serve`.
    device_mb: the most memory that tensors took on the GPU.
    stage_ms: mean milliseconds, of queue per request, of the others per batch.
    """

    model: str
    way: str
    candidates: int
    rate: float
    seconds: float
    answered: int
    refused: int
    late: int
    failed: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    candidates_per_second: float
    hit_rate: float
    batch_users: float
    memory_mb: float
    device_mb: float
    cache_mb: float
    stage_ms: dict[str, float]

    def is_good(self, limit_ms: float) -> bool:
        """Whether all requests were answered, 99 % of them within the limit."""
        return self.p99_ms <= limit_ms and not (self.refused or self.late or self.failed)


def measure(
    target: Target, workload: Workload, model: str, way: str, rate: float, seconds: float
) -> Result:
    arrivals = workload.arrivals(rate, seconds)
    requests = workload.requests(len(arrivals))
    before = target.metrics()
    statuses, latencies = target.drive(requests, arrivals)
    after = target.metrics()

    def change(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def mean(name: str, labels: str = "") -> float:
        return change(f"{name}_sum{labels}") / max(1.0, change(f"{name}_count{labels}"))

    good = 1e3 * np.array(
        [x for x, status in zip(latencies, statuses, strict=True) if status == 200] or [np.nan]
    )
    kinds = {
        name: change(f"rank_histories_{name}_total") for name in ("reused", "appended", "encoded")
    }
    answered = statuses.count(200)
    refused, late = statuses.count(429), statuses.count(504)
    return Result(
        model,
        way,
        workload.num_candidates,
        rate,
        seconds,
        answered,
        refused,
        late,
        len(statuses) - answered - refused - late,
        *(float(np.percentile(good, q)) for q in (50, 95, 99)),
        answered * workload.num_candidates / seconds,
        (kinds["reused"] + kinds["appended"]) / max(1.0, sum(kinds.values())),
        mean("rank_batch_users"),
        after["process_resident_memory_bytes"] / 1e6,
        after.get("rank_device_peak_bytes", 0.0) / 1e6,
        after.get("history_cache_bytes", 0.0) / 1e6,
        {stage: 1e3 * mean("rank_stage_seconds", f'{{stage="{stage}"}}') for stage in STAGES},
    )


@dataclass(frozen=True)
class Way:
    """A way to serve: file of weights, budget, rows of the pages and dtype of the cache, whether
    broadcasts are fused."""

    weights: Path
    cache_mb: float
    page_rows: int | None = None
    fused: bool = True
    cache_dtype: str | None = None

    def make_ranker(self, options: argparse.Namespace) -> Ranker:
        weights, device, dtype = (
            load_weights(self.weights),
            pick_device(options.device),
            DTYPES[options.dtype],
        )
        return make_ranker(
            weights,
            device,
            int(self.cache_mb * 1e6),
            options.data,
            self.page_rows,
            self.fused,
            dtype,
            uses_graphs(options, device),
            CACHE_DTYPES.get(self.cache_dtype),
        )

    def server_options(self, options: argparse.Namespace) -> list[str]:
        """Those of `serve_ranking.py`."""
        given = {
            name: getattr(options, name)
            for name in (
                "data",
                "device",
                "threads",
                "dtype",
                "max_users",
                "max_wait_ms",
                "deadline_ms",
            )
        }
        given |= dict(
            weights=self.weights,
            cache_mb=self.cache_mb,
            page_rows=self.page_rows,
            cache_dtype=self.cache_dtype,
            max_candidates=max(options.candidates),
        )
        graphs = {None: [], True: ["--graphs"], False: ["--no-graphs"]}[options.graphs]
        return graphs + [
            f"--{name.replace('_', '-')}={value}"
            for name, value in given.items()
            if value is not None
        ]


@contextmanager
def serve(
    ranker: Ranker, way: Way, options: argparse.Namespace, candidates: int
) -> Iterator[Target]:
    """The ranker behind a queue, in this process or, made anew, in others."""
    if options.http:
        with OverHTTP(ranker, *way.server_options(options)) as target:
            yield target
        return
    if options.processes > 1:
        with Processes(options.processes, serve_alone, way, options, candidates) as target:
            yield target
        return
    ranker.forget()
    batch_candidates = max(options.batch_candidates, 2 * candidates)
    batches = Limits(
        max_users=options.max_users,
        max_candidates=batch_candidates,
        max_wait=options.max_wait_ms / 1e3,
    )
    service = Service(ranker, ServiceLimits(batches, deadline=options.deadline_ms / 1e3))
    tune_process()
    if ranker.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield InProcess(service)
    service.batcher.close()


@contextmanager
def serve_alone(way: Way, options: argparse.Namespace, candidates: int) -> Iterator[Target]:
    """A new ranker behind a queue, in this process."""
    options.processes = 1
    torch.set_num_threads(options.threads)
    with serve(way.make_ranker(options), way, options, candidates) as target:
        yield target


def run(
    target: Target, workload: Workload, options: argparse.Namespace, model: str, way: str
) -> list[Result]:
    """The results at all rates."""
    requests = workload.requests(REPEATED)
    target.capacity(requests, options.warm_up)  # fills the cache
    capacity = target.capacity(requests, options.warm_up)
    rates = options.rates or [fraction * capacity for fraction in options.fractions]
    if options.soak:
        rates = [options.soak_fraction * capacity] * round(options.soak / options.seconds)
    results = []
    for rate in rates:
        results.append(measure(target, workload, model, way, rate, options.seconds))
        print(format_row(results[-1]), flush=True)
    return results


def ways_to_serve(options: argparse.Namespace) -> dict[str, Way]:
    """The ways that the options compare: "cache", "no cache", "padded", "padded, fused". Several
    budgets or sizes of pages are named."""
    ways = {}
    for cache_mb in options.cache_mb:
        for page_rows in options.page_rows or [None]:
            budget = f" of {cache_mb:g} MB" if sum(map(bool, options.cache_mb)) > 1 else ""
            pages = f", pages of {page_rows}" if len(options.page_rows or []) > 1 else ""
            ways |= {
                f"cache{budget}{pages}" if cache_mb else "no cache": Way(
                    options.weights,
                    cache_mb,
                    page_rows,
                    cache_dtype=options.cache_dtype if cache_mb else None,
                )
            }
    padded = (
        {"padded": Way(options.padded, 0, fused=False), "padded, fused": Way(options.padded, 0)}
        if options.padded
        else {}
    )
    return ways | padded


COLUMNS = (
    "| candidates | served with | offered/s | p50 ms | p95 ms | p99 ms | refused | late |"
    " candidates/s | hit rate | users per batch | MB |"
)
COLUMNS += " GPU's MB | queue, lookup, cache, score ms |"


def format_row(x: Result) -> str:
    stages = ", ".join(f"{x.stage_ms[stage]:.1f}" for stage in STAGES)
    cells = (
        f"{x.candidates:,}",
        x.way,
        f"{x.rate:,.0f}",
        *(f"{y:.1f}" for y in (x.p50_ms, x.p95_ms, x.p99_ms)),
        x.refused,
        x.late,
        f"{x.candidates_per_second:,.0f}",
        f"{x.hit_rate:.2f}",
        f"{x.batch_users:.1f}",
        f"{x.memory_mb:,.0f}",
        f"{x.device_mb:,.0f}",
        stages,
    )
    return f"| {' | '.join(map(str, cells))} |"


def knee(results: list[Result], limit_ms: float) -> Result | None:
    """The highest rate up to which all requests were answered in time, 99 % of them within the
    limit."""
    good = None
    for result in sorted(results, key=lambda x: x.rate):
        if not result.is_good(limit_ms):
            break
        good = result
    return good


def format_knees(results: list[Result], limit_ms: float) -> str:
    """A table of the knees, by candidates: all about the first way to serve, and rate and p99 of
    the others."""
    first, *others = ways = list(dict.fromkeys(x.way for x in results))
    header = [
        "candidates",
        f"requests/s at p99 ≤ {limit_ms:g} ms, {first}",
        "p50 ms",
        "p99 ms",
        "candidates/s",
    ]
    header += [title for way in others for title in (way, "p99 ms")]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for candidates in sorted({x.candidates for x in results}):
        cells = [f"{candidates:,}"]
        for way in ways:
            x = knee([x for x in results if x.candidates == candidates and x.way == way], limit_ms)
            found = (
                ["-"] * 4
                if x is None
                else [
                    f"{x.rate:,.0f}",
                    f"{x.p50_ms:.1f}",
                    f"{x.p99_ms:.1f}",
                    f"{x.candidates_per_second:,.0f}",
                ]
            )
            cells += found if way == first else [found[0], found[2]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@style.context(PICTURE_STYLE)
def draw(results: list[Result], limit_ms: float) -> Figure:
    """p50 and p99 against offered load, one panel per number of candidates, three in a row: a page
    shows them 800 pixels wide."""
    counts, ways = sorted({x.candidates for x in results}), dict.fromkeys(x.way for x in results)
    rows = -(-len(counts) // 3)
    figure = Figure(figsize=(9.0, 0.6 + 2.7 * rows))
    panels = figure.subplots(rows, min(len(counts), 3), sharey=True, squeeze=False).flatten()
    for axis in panels[len(counts) :]:
        axis.remove()
    for axis, candidates in zip(panels, counts):
        for number, way in enumerate(ways):
            color = to_hex(f"C{number}")  # the style ends before the picture is saved
            rows = sorted(
                (x for x in results if x.candidates == candidates and x.way == way),
                key=lambda x: x.rate,
            )
            for name, line in (("p50_ms", "--"), ("p99_ms", "-")):
                values = [getattr(x, name) for x in rows]
                axis.plot(
                    [x.rate for x in rows],
                    values,
                    line,
                    color=color,
                    marker=".",
                    label=f"{way}, {name[:3]}",
                )
        axis.axhline(limit_ms, color="gray", linewidth=0.8, label=f"limit, {limit_ms:g} ms")
        axis.set(
            title=f"{candidates:,} candidate{'s' if candidates > 1 else ''}",
            xlabel="offered requests/s",
            yscale="log",
        )
        axis.set_xlim(left=0)
    for axis in panels[::3]:
        axis.set_ylabel("latency, ms")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


# -- files -----------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, str]:
    """What the figures depend on."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def save_results(path: Path, settings: dict[str, Any], results: list[Result]) -> None:
    """Write what `load_results` reads: JSON with a line for each result."""
    lines = ",\n".join(f"  {json.dumps(_rounded(asdict(x)))}" for x in results)
    text = f'{{\n"settings": {json.dumps(settings)},\n"results": [\n{lines}\n]\n}}\n'
    write_atomically(path, lambda file: file.write_text(text))


def load_results(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """The settings and the results of a run."""
    content = json.loads(path.read_text())
    return content["settings"], [Result(**x) for x in content["results"]]


def _rounded(x: Any) -> Any:
    """With 5 significant digits."""
    if isinstance(x, dict):
        return {name: _rounded(value) for name, value in x.items()}
    return float(f"{x:.5g}") if isinstance(x, float) else x


def show(results: list[Result], limit_ms: float, picture: Path) -> None:
    """Print the table of the knees and draw the picture."""
    print(f"\n{format_knees(results, limit_ms)}")
    write_atomically(picture, lambda file: draw(results, limit_ms).savefig(file, dpi=150))
    print(f"\nwritten to {picture}")


# -- batches without a queue -----------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """Batches of so many users who are cached, some of whom have a new event."""

    users: int
    with_events: int
    candidates: int

    def draw(self, workload: Workload, rounds: int) -> list[list[Request]]:
        """A batch for each round."""
        return [
            workload.batch(self.users, self.with_events, self.candidates) for _ in range(rounds)
        ]


def time_batches(
    rankers: Sequence[Ranker], forms: Sequence[Form], workload: Workload, rounds: int
) -> dict[Form, list[float]]:
    """Median milliseconds of a batch of each form, of each ranker.

    A round has one batch of each form, which all rankers score in turn: what changes with time, as
    clocks and other load do, meets all of them alike. The same rounds were run before, so that all
    is compiled, captured and allocated. Before each batch its users are scored without events, so
    they are cached, and the events of a round are forgotten after it.
    """
    batches = {form: form.draw(workload, rounds) for form in forms}
    times: dict[Form, list[list[float]]] = {form: [[] for _ in rankers] for form in forms}
    for number in [*range(rounds), *range(rounds)]:
        for form in forms:
            batch = batches[form][number]
            for ranker, own in zip(rankers, times[form], strict=True):
                ranker.score([replace(x, events=NONE) for x in batch])
                begin = time.perf_counter()
                ranker.score(batch)
                own.append(1e3 * (time.perf_counter() - begin))
        for ranker in rankers:
            ranker.forget()
    return {form: [median(own[rounds:]) for own in of_form] for form, of_form in times.items()}


def print_batches(options: argparse.Namespace) -> None:
    """A table of the time of a batch of each form, of each way to serve."""
    ways = ways_to_serve(options)
    rankers = [way.make_ranker(options) for way in ways.values()]
    workload = Workload(rankers[0], 0, 0, options.zipf)
    forms = [
        Form(users, with_events, candidates)
        for users in options.batch_users
        for with_events in sorted({0, round(options.new_events * users), users})
        for candidates in options.candidates
    ]
    tune_process()
    names = " | ".join(f"{way}, ms" for way in ways)
    print(f"| users | with a new event | candidates | {names} |\n|{'---|' * (3 + len(ways))}")
    for form, times in time_batches(rankers, forms, workload, options.batches).items():
        cells = f"{form.users} | {form.with_events} | {form.candidates:,}"
        print(f"| {cells} | {' | '.join(f'{x:.3f}' for x in times)} |", flush=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    add = parser.add_argument
    add("--weights", type=Path, help="weights.pt of a training run")
    add_ranker_options(parser)
    add(
        "--padded",
        type=Path,
        help="weights.pt of a ranking model with --interaction padded, to compare",
    )
    add(
        "--from-json",
        type=Path,
        metavar="FILE",
        help="results.json of a run, whose table and picture are made again",
    )
    add(
        "--out",
        type=Path,
        default=Path("runs/load"),
        help="folder for results.json and the picture",
    )
    add("--picture", type=Path, help="file of the picture; OUT/latency.png if not given")
    add(
        "--candidates",
        type=int,
        nargs="+",
        default=[1, 10, 70, 1000, 10_000],
        help="candidates of a request",
    )
    add(
        "--rates",
        type=float,
        nargs="+",
        help="requests per second; fractions of the throughput if not given",
    )
    add("--fractions", type=float, nargs="+", default=FRACTIONS, help="fractions of the throughput")
    add("--seconds", type=float, default=5, help="of each rate")
    add("--warm-up", type=float, default=2.0, help="seconds with a full queue before")
    add(
        "--cache-mb",
        type=float,
        nargs="+",
        default=[256, 0],
        help="budgets of the cache to compare; 0: no cache",
    )
    add(
        "--page-rows",
        type=int,
        nargs="+",
        help="rows of a page to compare; 128 on a GPU, else 16, if not given",
    )
    add("--new-events", type=float, default=0.2, help="fraction of requests with a new event")
    add("--zipf", type=float, default=1.0, help="exponent of the users' popularity")
    add("--limit-ms", type=float, default=80, help="limit of p99 that defines the knee")
    add("--deadline-ms", type=float, default=1000, help="deadline of each request")
    add("--max-users", type=int, default=Limits.max_users, help="requests of a batch")
    add(
        "--batch-candidates",
        type=int,
        default=20_000,
        help="of a batch, or twice those of a request; not with --http",
    )
    add(
        "--max-wait-ms",
        type=float,
        default=1e3 * Limits.max_wait,
        help="how long a request waits for others of its batch",
    )
    add(
        "--http",
        action="store_true",
        help="serve in a process of its own, and send the requests over HTTP",
    )
    add(
        "--processes",
        type=int,
        default=1,
        help="serve in so many processes, each with a part of the users",
    )
    add(
        "--batches",
        type=int,
        default=0,
        help="only time so many batches of each form, without a queue, of each way in turn",
    )
    add(
        "--batch-users",
        type=int,
        nargs="+",
        default=[1, 32],
        help="users of such batches, of whom none, the fraction --new-events, or all have an event",
    )
    add("--soak", type=int, default=0, help="seconds at one rate, to see whether the memory grows")
    add(
        "--soak-fraction",
        type=float,
        default=0.5,
        help="rate of a soak as a fraction of the throughput",
    )
    options = parser.parse_args(arguments)
    if (options.weights is None) == (options.from_json is None):
        parser.error("give either --weights or --from-json")
    if options.http and options.processes > 1:
        parser.error("give either --http or --processes")
    if options.http and options.padded:
        parser.error("--padded cannot be measured with --http: servers do not replicate histories")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    picture = options.picture or options.out / "latency.png"
    if options.from_json:
        settings, results = load_results(options.from_json)
        return show(results, settings["limit_ms"], picture)
    torch.set_num_threads(options.threads)
    if options.batches:
        return print_batches(options)
    device, results = pick_device(options.device), []
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    } | machine(device)
    print(f"{COLUMNS}\n|{'---|' * (COLUMNS.count('|') - 1)}")
    for name, way in ways_to_serve(options).items():
        ranker = way.make_ranker(options)
        for candidates in options.candidates:
            workload = Workload(ranker, candidates, options.new_events, options.zipf)
            with serve(ranker, way, options, candidates) as target:
                results += run(target, workload, options, type(ranker).__name__, name)
            save_results(options.out / "results.json", settings, results)
    if options.soak:
        memory = [x.memory_mb for x in results]
        print(
            f"\nmemory: {memory[0]:,.0f} MB first, {memory[-1]:,.0f} MB last, {fmean(memory):,.0f}"
            " MB on average"
        )
    else:
        # Read back, so that the table has the digits that --from-json prints.
        show(load_results(options.out / "results.json")[1], options.limit_ms, picture)
    print(f"results: {options.out / 'results.json'}")


if __name__ == "__main__":
    main()
