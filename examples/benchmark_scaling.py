"""Measures training of train_dlrm.py's whole model on N processes: torchrun --nproc-per-node N
examples/benchmark_scaling.py

Tables are sharded (--plan) and updated in the backward, and the ids of the next batch are exchanged
ahead, as in train_dlrm.py under torchrun. Each process has its own random batches of --batch-size
users: its work stays the same on any number of processes (weak scaling). balanced_sampler.py deals
the users of a step out to the processes; --sampler shuffled shows what this saves. By default the
tables have 22 GB on a GPU, besides as many bytes of Adagrad's state.

Prints samples/s of all processes (a sample is a candidate), step time, memory, and the time by
stage, and writes them as JSON. With --baseline FILE, the JSON of a run on fewer processes, also the
scaling: where the time went, and what communication.py predicts.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import communication
import sharding
import torch
import torch.distributed as dist
from balanced_sampler import SAMPLERS
from benchmark_dlrm import (
    COUNTS,
    MODELS,
    add_model_options,
    add_run_options,
    length_statistics,
    make_config,
    random_batches,
    set_sizes,
)
from ranking_data import RankingBatch, TableSizes
from ranking_model import RankingModel
from sharding import OptimizerSpec
from step_profile import STAGES, Profile, profile_steps
from torch.nn import functional
from torchrec.distributed.train_pipeline import TrainPipelineBase
from training import (
    HelpFormatter,
    check_at_least_1,
    peak_memory,
    pick_device,
    positive,
    save_json,
    seconds,
    synchronize,
)

# Stages of a step, whose times add up to it. A collective is exposed while nothing else runs.
ALL_STAGES = (*STAGES, "exposed collectives")
# options in which a run may differ from its baseline
NOT_COMPARED = ("out", "baseline", "bandwidth", "timeout", "passes")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="jagged",
        help="our layers, or those by hand of padded_layers.py",
    )
    parser.add_argument(
        "--plan",
        choices=sharding.PLANS,
        default="auto",
        help="how the processes share the embedding tables",
    )
    parser.add_argument(
        "--sampler",
        choices=SAMPLERS,
        default="balanced",
        help="which process gets which users of a step",
    )
    sharding.add_exchange_options(parser)
    add_model_options(parser, communication.SIZES)
    add_run_options(parser)
    parser.add_argument(
        "--passes",
        type=int,
        default=5,
        help="passes through the batches, of which the median is taken",
    )
    parser.add_argument("--baseline", type=Path, help="JSON of a run on fewer processes")
    parser.add_argument(
        "--bandwidth",
        type=positive,
        default=50e9,
        help="bytes/s that a process sends, for the prediction",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=300, help="seconds that processes wait for one another"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmark_scaling.json"), help="file for the results"
    )
    options = parser.parse_args(arguments)
    check_at_least_1(parser, options, (*COUNTS, "threads", "passes"))
    return options


# -- training --------------------------------------------------------------------------------------


def make_model(
    options: argparse.Namespace, tables: TableSizes, device: torch.device
) -> RankingModel:
    """The model of the options on a device."""
    layers, compiled = MODELS[options.model]
    model = RankingModel(tables, make_config(options), layers, device)
    if compiled:
        model.head.compile()
    return model


class Training:
    """The sharded model in its pipeline, which goes through the batches again and again.

    Args:
        tables: sizes of the tables.
        batches: this rank's batches, on the CPU.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device,
        tables: TableSizes,
        batches: Sequence[RankingBatch],
    ):
        self.device, self.batches = device, batches
        self.autocast = partial(
            torch.autocast,
            device.type,
            torch.bfloat16,
            enabled=device.type == "cuda" and not options.fp32,
        )
        torch.manual_seed(options.seed + sharding.rank())
        self.model, optimizer = sharding.build(
            partial(make_model, options, tables),
            device,
            options.plan,
            OptimizerSpec(torch.optim.Adagrad, dict(lr=0.05, eps=1e-8)),
            OptimizerSpec(torch.optim.AdamW, dict(lr=1e-3)),
            sharding.exchange_of(options),
        )
        self.model.train()
        self.pipeline: TrainPipelineBase = sharding.make_pipeline(
            self.model, optimizer, device, self._forward
        )
        self.source: Iterator[RankingBatch] = itertools.cycle(batches)

    def _forward(self, batch: RankingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        with self.autocast():
            logits = self.model(batch)
        losses = functional.binary_cross_entropy_with_logits(
            logits.float(), batch.labels, reduction="none"
        )
        return sharding.global_mean(losses), losses.detach()

    def step(self) -> torch.Tensor:
        """A training step. Returns the losses of this rank's candidates."""
        return self.pipeline.progress(self.source)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def pass_seconds(self) -> float:
        """Seconds of a pass through the batches, with one synchronisation at its end, on the
        slowest rank."""
        synchronize(self.device)
        sharding.barrier()
        begin = time.perf_counter()
        self.train(len(self.batches))
        synchronize(self.device)
        return max_over_ranks(time.perf_counter() - begin, self.device)

    def table_bytes(self) -> int:
        """Bytes of this rank's shards, and of replicated tables, without the optimizer's state."""
        names = tuple(communication.features(self.batches[0]))
        state = {
            name: x
            for name, x in self.model.state_dict().items()
            if name.startswith(names) and name.endswith(".weight")
        }
        return sum(x.numel() * x.element_size() for x in sharding.local_tensors(state))


def max_over_ranks(value: float, device: torch.device) -> float:
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def gather(value: float) -> list[float]:
    """The values of all ranks."""
    values: list[Any] = [None] * sharding.world_size()
    dist.all_gather_object(values, value)
    return values


# -- measurement -----------------------------------------------------------------------------------


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The content of the JSON, without the scaling. All ranks call it. The lengths and the traffic
    follow from this rank's batches."""
    torch.set_num_threads(options.threads)
    tables, batches = random_batches(
        options, sharding.rank(), SAMPLERS[options.sampler], sharding.world_size()
    )
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    training = Training(options, device, tables, batches)
    training.train(len(batches))  # allocates memory, and on a GPU compiles kernels
    median = statistics.median([training.pass_seconds() for _ in range(options.passes)])
    peak = max_over_ranks(peak_memory(training.step, device), device)
    steps = min(len(batches), 3)
    profiled = mean_profile(profile_steps(lambda: training.train(steps), steps, device), device)

    (samples,) = sharding.all_sum(sum(map(len, batches)), device=device)
    model = make_model(options, tables, torch.device("meta"))
    exchange = sharding.exchange_of(options)
    traffic = communication.predicted_traffic(
        model, training.model.plan, batches, sharding.world_size(), exchange
    )
    return {
        "world_size": sharding.world_size(),
        "torch": torch.__version__,
        "settings": settings(options, device),
        "lengths": length_statistics(batches),
        "samples_per_step": samples / len(batches),
        "samples_per_second": samples / median,
        "step_ms": 1e3 * median / len(batches),
        "peak_memory_mb": peak / 1e6,
        "table_mb": [num_bytes / 1e6 for num_bytes in gather(training.table_bytes())],
        **profiled,
        "traffic_bytes": traffic.busiest(),
    }


def settings(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What must be equal in a baseline."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    own = {
        setting: value for setting, value in vars(options).items() if setting not in NOT_COMPARED
    }
    return json.loads(json.dumps(own | {"device": name}))


def mean_profile(profiled: Profile, device: torch.device) -> dict[str, Any]:
    """Means over ranks of the milliseconds of a step: by stage, and of all collectives. They
    include the profiler's own time."""
    values = (*profiled.stages.values(), profiled.exposed, profiled.collectives)
    *stages, collectives = (
        total / sharding.world_size() for total in sharding.all_sum(*values, device=device)
    )
    return {"stages_ms": dict(zip(ALL_STAGES, stages, strict=True)), "collectives_ms": collectives}


# -- scaling ---------------------------------------------------------------------------------------


def read_baseline(path: Path, world_size: int, own_settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a run that can be compared: on fewer processes, with the same settings."""
    try:
        baseline = json.loads(path.read_text())
        others, _, _ = baseline["world_size"], baseline["settings"], baseline["samples_per_second"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--baseline: {path} is not a file of this program: {error!r}") from error
    if others >= world_size:
        raise ValueError(
            f"--baseline must be a run on fewer than {world_size} processes, not on {others}"
        )
    for name, value in own_settings.items():
        if baseline["settings"].get(name) != value:
            raise ValueError(
                f"--baseline must have the same {name}, {value}, not"
                f" {baseline['settings'].get(name)}"
            )
    return baseline


def scaling(report: dict[str, Any], baseline: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """How a run compares with the baseline on fewer processes.

    speed-up: the ratio of their samples/s. efficiency: the speed-up divided by the ratio of the
    numbers of processes. lost_ms: by how much each stage of a step takes longer. predicted: what
    `communication.predict` says, if the baseline is one process, which it starts from.
    """
    speed_up = report["samples_per_second"] / baseline["samples_per_second"]
    stages = {name: report["stages_ms"][name] - baseline["stages_ms"][name] for name in ALL_STAGES}
    predicted = None
    if baseline["world_size"] == 1:
        step, efficiency = communication.predict(
            1e-3 * baseline["step_ms"], report["traffic_bytes"], bandwidth
        )
        predicted = {"step_ms": 1e3 * step, "efficiency": efficiency, "bandwidth": bandwidth}
    return {
        "baseline_world_size": baseline["world_size"],
        "baseline_step_ms": baseline["step_ms"],
        "speed_up": speed_up,
        "efficiency": speed_up * baseline["world_size"] / report["world_size"],
        "lost_ms": stages,
        "predicted": predicted,
    }


# -- program ---------------------------------------------------------------------------------------


def print_report(report: dict[str, Any]) -> None:
    tables = report["table_mb"]
    settings = report["settings"]
    device = f"{report['settings']['device']}, torch {report['torch']}"
    print(
        f"{report['world_size']} processes, {device}, {settings['model']} layers, plan"
        f" {settings['plan']}"
    )
    print(
        f"{report['samples_per_second']:,.0f} samples/s; a step has"
        f" {report['samples_per_step']:,.0f} and takes {report['step_ms']:.2f} ms"
    )
    print(
        f"tables of {min(tables):,.1f} to {max(tables):,.1f} MB per process; a step's peak is"
        f" {report['peak_memory_mb']:,.1f} MB more"
    )
    lost = report.get("scaling", {}).get("lost_ms", {})
    print(
        "\nms of a step under the profiler, mean of all processes"
        + (", and what is lost to the baseline" if lost else "")
    )
    for name, milliseconds in report["stages_ms"].items():
        print(f"{name:>20}{milliseconds:>10.2f}" + (f"{lost[name]:>+10.2f}" if lost else ""))
    print(f"{'all collectives':>20}{report['collectives_ms']:>10.2f}")
    sent = communication.summed_ids(report["traffic_bytes"])
    print(
        "\nMB that the busiest process sends: "
        + ", ".join(f"{kind} {num_bytes / 1e6:,.3f}" for kind, num_bytes in sent.items())
    )
    if "scaling" in report:
        print_scaling(report["scaling"], report["world_size"])


def print_scaling(result: dict[str, Any], world_size: int) -> None:
    before = result["baseline_world_size"]
    print(
        f"speed-up from {before} to {world_size} processes: {result['speed_up']:.2f}, efficiency"
        f" {result['efficiency']:.3f}"
    )
    predicted = result["predicted"]
    if predicted is None:
        print("no prediction: it starts from a run on one process")
    else:
        print(
            f"predicted at {predicted['bandwidth']:.3g} bytes/s: efficiency"
            f" {predicted['efficiency']:.3f}, step {predicted['step_ms']:.2f} ms after"
            f" {result['baseline_step_ms']:.2f} ms"
        )


def run(options: argparse.Namespace) -> None:
    if not sharding.is_distributed():
        raise ValueError("start it with torchrun --nproc-per-node N, where N may be 1")
    device = sharding.rank_device(pick_device(options.device))
    set_sizes(options, communication.SIZES[device.type])
    baseline = None
    if options.baseline is not None:
        baseline = read_baseline(options.baseline, sharding.world_size(), settings(options, device))
    report = measure(options, device)
    if baseline is not None:
        report["scaling"] = scaling(report, baseline, options.bandwidth)
    if sharding.rank() == 0:
        print_report(report)
        save_json(options.out, report)
        print(f"\nwritten to {options.out}")


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with sharding.process_group(options.device, options.timeout):
        try:
            run(options)
        except (ValueError, OSError) as error:
            sys.exit(f"benchmark_scaling: {error}")


if __name__ == "__main__":
    main()
