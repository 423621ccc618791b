"""Measures the training step of train_dlrm.py's model, of the same model by hand with padding, and
of a baseline on jagged rows: python examples/benchmark_dlrm.py

All have the same parameters, batches and embeddings (TorchRec's; on a GPU with the optimizer fused
into their backward). padded_layers.py says what "by hand" means, jagged_baseline.py which kernels
the baseline has; --model measures a published model of models/ and its padded form. Prints
samples/s (a sample is a candidate), peak memory, time by stage and the model FLOP utilisation (MFU)
of each layer, beside published claims, and writes them as JSON.

Lengths are log-normal with the given means and maxima, or those of a rating log (--data). Defaults
are small on a CPU. On a GPU, a step has thousands of samples, in bfloat16.

FLOPs are those of the forward on rows that exist, 2 per multiply-add of a GEMM, times 3 for forward
and backward. MFU is relative to the speed of a large GEMM on the same machine in the same dtype.
Padding and recomputation are not counted.
"""

import argparse
import copy
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from balanced_sampler import BalancedBatchSampler
from data.forms import add_form_options, form_of
from data.logs import read_ratings
from jagged_baseline import BASELINE
from padded_layers import PADDED, Padded
from ranking_data import (
    RankingBatch,
    RankingDataset,
    TableSizes,
    add_popularity,
    keyed,
    make_chunks,
)
from ranking_model import JAGGED, PARTS, RankingConfig, RankingHead, RankingModel
from step_profile import STAGES, profile_steps
from torch import nn
from torch.nn import functional
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode
from torchrec.modules.fused_embedding_modules import fuse_embedding_optimizer
from training import (
    HelpFormatter,
    check_at_least_1,
    peak_memory,
    pick_device,
    save_json,
    seed_number,
    synchronize,
    time_steps,
)

import jagged_modules as jm
import jagged_modules.flops  # noqa: F401  (counts our operators)

MODELS = {
    "jagged": (JAGGED, False),
    "jagged-compiled": (JAGGED, True),
    "padded": (PADDED, False),
    "padded-compiled": (PADDED, True),
    "baseline": (BASELINE, False),
    "baseline-compiled": (BASELINE, True),
}
# Defaults of the options by the type of the device. Lengths are (mean, max).
SIZES = {
    "cpu": dict(
        batch_size=32,
        history=(30, 100),
        stream=(60, 200),
        candidates=(4, 13),
        items=2000,
        features=(4, 3),
        feature_rows=1000,
        embedding_dim=64,
        num_batches=3,
    ),
    "cuda": dict(
        batch_size=512,
        history=(150, 500),
        stream=(600, 2000),
        candidates=(16, 53),
        items=1_000_000,
        features=(32, 8),
        feature_rows=1000,
        embedding_dim=256,
        num_batches=8,
    ),
}
# Options of the model that are at least 1.
COUNTS = (
    "batch_size",
    "history",
    "stream",
    "candidates",
    "items",
    "features",
    "feature_rows",
    "embedding_dim",
    "num_batches",
    "num_heads",
)
COUNTS += ("num_layers", "num_compressed")
SPREAD = 2_147_483_647  # a prime, of which the number of rows is no multiple
CLAIMS = (  # what was published, and our figure that is closest to it
    (
        "GDPA kernel (Meta, B200): training throughput of the whole model",
        "+30 %",
        "samples_per_second",
    ),
    (
        "Jagged feature interaction and Flash Attention (Meta): QPS of production models",
        "+10 %",
        "samples_per_second",
    ),
    ("the same: memory of production models", "-18 %", "peak_memory_mb"),
    ("TLX block attention (Meta, B200): MFU of the self-attention layers", "+30.6 %", "stream_mfu"),
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--data",
        help=(
            "rating log whose lengths and features are used instead of random ones; random if not"
            " given"
        ),
    )
    add_form_options(parser)
    parser.add_argument(
        "--model",
        dest="head",
        choices=("dlrm", *models.MODELS),
        default="dlrm",
        help="dlrm, with --parts, or a published model, without streams and MFU",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        help="models to measure, in turn; all if not given. A published model has no baseline",
    )
    add_model_options(parser, SIZES)
    add_run_options(parser)
    parser.add_argument(
        "--plain-embeddings",
        action="store_true",
        help=(
            "tables whose gradients are dense; always so on a CPU. On a GPU the default updates"
            " tables in the backward, and its lookup waits for the GPU once per feature, which"
            " delays both models alike"
        ),
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmark_dlrm.json"), help="file for the results"
    )
    options = parser.parse_args(arguments)
    check_at_least_1(parser, options, (*COUNTS, "threads"))
    options.device = pick_device(options.device)
    if options.models is None:
        options.models = [
            name for name in MODELS if options.head == "dlrm" or not name.startswith("baseline")
        ]
    if options.head != "dlrm":
        options.parts = []
        if any(name.startswith("baseline") for name in options.models):
            parser.error(
                f"--models must be jagged or padded with --model {options.head}, not baseline"
            )
    set_sizes(options, SIZES[options.device.type])
    return options


def add_model_options(parser: argparse.ArgumentParser, sizes: dict[str, dict[str, Any]]) -> None:
    """Options of the model and of random batches. `sizes`: the defaults that `set_sizes` sets, by
    type of device."""
    parser.add_argument(
        "--parts",
        nargs="*",
        choices=PARTS,
        default=list(PARTS),
        help="parts of the model, as in train_dlrm.py",
    )
    by_device = "; ".join(f"{device}: {values}" for device, values in sizes.items())
    parser.add_argument(
        "--batch-size",
        type=int,
        help=f"users per batch. Defaults of this and the following options: {by_device}",
    )
    for name, what in (
        ("history", "events of a history"),
        ("stream", "events of a stream"),
        ("candidates", "candidates of a user"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs=2,
            metavar=("MEAN", "MAX"),
            help=f"numbers of {what}; of a log only MAX is used",
        )
    parser.add_argument("--items", type=int, help="rows of the table of items")
    parser.add_argument(
        "--features",
        type=int,
        nargs=2,
        metavar=("USER", "ITEM"),
        help="numbers of side features, each of one id",
    )
    parser.add_argument("--feature-rows", type=int, help="rows of the table of a side feature")
    parser.add_argument(
        "--embedding-dim", type=int, help="width of the embeddings and of the layers"
    )
    parser.add_argument("--num-batches", type=int, help="different batches")
    parser.add_argument("--num-heads", type=int, default=4, help="attention heads")
    parser.add_argument(
        "--num-layers", type=int, default=1, help="blocks of GDPA, one after another"
    )
    parser.add_argument(
        "--block-size",
        type=int,
        choices=(16, 32, 64, 128),
        default=64,
        help="events of a stream that see one another",
    )
    parser.add_argument(
        "--num-compressed", type=int, default=16, help="embeddings that linear compression leaves"
    )
    parser.add_argument(
        "--ids",
        choices=("uniform", "zipf"),
        default="uniform",
        help="how often a table's rows occur; see draw_ids",
    )
    parser.add_argument(
        "--seed", type=seed_number, default=0, help="seed of the weights and of the random batches"
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options of a training step."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="dropout probability in all layers"
    )
    parser.add_argument(
        "--fp32", action="store_true", help="no autocast to bfloat16; always so on a CPU"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")


def set_sizes(options: argparse.Namespace, sizes: dict[str, Any]) -> None:
    """Set the options that were not given."""
    for name, value in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


# -- batches ---------------------------------------------------------------------------------------


def lognormal_lengths(
    generator: np.random.Generator, size: int, mean: float, longest: int, sigma: float = 1.1
) -> np.ndarray:
    """`size` lengths round(s · exp(sigma · N(0, 1))), clipped to [1, longest], with the factor s
    that gives the wanted mean."""
    if not 1 <= mean <= longest:
        raise ValueError(
            f"the mean length must be between 1 and the maximum, {longest}, not {mean}"
        )
    shape, low, high = np.exp(sigma * generator.standard_normal(size)), 1e-6, 1e6 * longest
    for _ in range(100):  # the mean grows with s: bisection
        middle = (low * high) ** 0.5
        low, high = (
            (low, middle) if np.clip(middle * shape, 1, longest).mean() > mean else (middle, high)
        )
    return np.rint(np.clip(low * shape, 1, longest)).astype(np.int64)


def draw_ids(generator: np.random.Generator, rows: int, size: int, law: str) -> np.ndarray:
    """Random ids of a table: all equally often ("uniform"), or the k-th most frequent one in
    proportion to about 1 / k ("zipf").

    The frequent ids are spread over the table, as hashing does it.
    """
    if law == "uniform":
        return generator.integers(rows, size=size)
    rank = (rows ** generator.random(size)).astype(np.int64) - 1  # the logarithm of k is uniform
    return rank * SPREAD % rows


def random_batches(
    options: argparse.Namespace,
    rank: int = 0,
    sampler: type[BalancedBatchSampler] = BalancedBatchSampler,
    ranks: int = 1,
) -> tuple[TableSizes, list[RankingBatch]]:
    """A rank's batches of random ids, and the sizes of their tables. The sampler deals the users of
    all ranks' batches out to the ranks."""
    users, items = (
        {f"{who}_{i}": options.feature_rows for i in range(count)}
        for who, count in zip(("user", "item"), options.features, strict=True)
    )
    tables = TableSizes(options.items, ratings=5, ages=16, user_features=users, item_features=items)
    for_lengths = np.random.default_rng(options.seed)
    generator = np.random.default_rng((options.seed, rank))

    def lengths() -> np.ndarray:
        size = ranks * options.batch_size
        of_all = np.stack(
            [
                lognormal_lengths(for_lengths, size, *getattr(options, x))
                for x in ("history", "stream", "candidates")
            ]
        )
        (share,) = sampler(torch.from_numpy(of_all.sum(0)), options.batch_size, rank, ranks)
        return of_all[:, share]

    def ids(rows: int, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return draw_ids(generator, rows, lengths.sum(), options.ids), lengths

    def batch() -> RankingBatch:
        past, stream, targets = lengths()
        one = np.ones(options.batch_size, np.int64)
        each = np.ones(past.sum() + targets.sum(), np.int64)
        sequences = {
            **{
                f"history_{name}": ids(getattr(tables, f"{name}s"), past)
                for name in ("item", "rating", "age")
            },
            **{
                f"stream_{name}": ids(getattr(tables, f"{name}s"), stream)
                for name in ("item", "rating")
            },
            "target_item": ids(tables.items, targets),
        }
        return RankingBatch(
            ids=keyed(sequences),
            users=keyed({name: ids(rows, one) for name, rows in users.items()}),
            items=keyed({name: ids(rows, each) for name, rows in items.items()}),
            labels=torch.from_numpy(generator.integers(2, size=targets.sum()).astype(np.float32)),
        )

    return tables, [batch() for _ in range(options.num_batches)]


def log_batches(options: argparse.Namespace) -> tuple[TableSizes, list[RankingBatch]]:
    """Batches of a rating log, drawn at random, and the sizes of their tables."""
    log = read_ratings(options.data, form_of(options))
    everything = np.ones(len(log), dtype=bool)
    chunks = make_chunks(log, everything, options.candidates[1], options.history[1])
    dataset = RankingDataset(add_popularity(log, everything), chunks, options.stream[1])
    generator = np.random.default_rng(options.seed)
    return dataset.tables, [
        dataset[generator.integers(len(dataset), size=options.batch_size)]
        for _ in range(options.num_batches)
    ]


def length_statistics(batches: list[RankingBatch]) -> dict[str, dict[str, float]]:
    keys = {"history": "history_item", "stream": "stream_item", "candidates": "target_item"}
    lengths = {
        name: torch.cat([batch.ids[key].lengths() for batch in batches]).float()
        for name, key in keys.items()
    }
    return {name: {"mean": x.mean().item(), "max": x.max().item()} for name, x in lengths.items()}


# -- models ----------------------------------------------------------------------------------------


def make_config(options: argparse.Namespace) -> RankingConfig:
    names = {field.name for field in dataclasses.fields(RankingConfig)} & vars(options).keys()
    longest = {
        f"max_{name}": getattr(options, name)[1] for name in ("history", "stream", "candidates")
    }
    return RankingConfig(**{name: getattr(options, name) for name in names}, **longest)


def make_model(name: str, tables: TableSizes, options: argparse.Namespace) -> RankingModel:
    """The model of the options in a form of `MODELS`."""
    layers, _ = MODELS[name]
    forms = models.PADDED if layers is PADDED else models.MODELS
    head = forms.get(options.head)
    return RankingModel(tables, make_config(options), layers, options.device, head)


class Step:
    """A training step of a model with Adam, from the parameters `initial`.

    On a GPU, tables are updated in their backward, unless the options say otherwise. TorchRec
    cannot do this on a CPU.
    """

    def __init__(
        self,
        name: str,
        tables: TableSizes,
        options: argparse.Namespace,
        initial: dict[str, torch.Tensor],
    ):
        _, compiled = MODELS[name]
        device = options.device
        self.model = make_model(name, tables, options)
        parameters, on_gpu = self.model.parameters(), device.type == "cuda"
        if on_gpu and not options.plain_embeddings:
            self.model = fuse_embedding_optimizer(
                self.model, torch.optim.Adam, {"lr": 1e-3}, device
            )
            parameters = self.model.head.parameters()
        self.model.load_state_dict(initial)
        self.optimizer = torch.optim.Adam(parameters, fused=on_gpu)
        self.autocast = partial(
            torch.autocast, device.type, torch.bfloat16, enabled=on_gpu and not options.fp32
        )
        if compiled:
            self.model.head.compile()
        self.compiled = compiled
        for collection in (self.model.sequences, self.model.user_bags, self.model.item_bags):
            collection.forward = in_range("embeddings", collection.forward)

    def __call__(self, batch: RankingBatch) -> torch.Tensor:
        with self.autocast():
            logits = self.model(batch)
        loss = functional.binary_cross_entropy_with_logits(logits.float(), batch.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def in_range(name: str, function: Callable) -> Callable:
    """The function, inside a named range of the profiler."""

    def call(*arguments: Any) -> Any:
        with record_function(name):
            return function(*arguments)

    return call


# -- utilisation of the layers ---------------------------------------------------------------------


def layer_flops(model: RankingModel, batch: RankingBatch) -> dict[str, int]:
    """FLOPs of the forward of each layer of our model, on the rows that exist. None of a published
    model."""
    if not isinstance(model.head, RankingHead):
        return {}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch)
    counts = counter.get_flop_counts()
    layers = [name for name in ("interaction", *PARTS) if getattr(model.head, name) is not None]
    return {name: sum(counts[f"RankingModel.head.{name}"].values()) for name in layers}


def captured_inputs(step: Step, batch: RankingBatch, names: Iterable[str]) -> dict[str, tuple]:
    """The arguments of the head's layers in a forward of the batch."""
    found: dict[str, tuple] = {}
    hooks = [
        getattr(step.model.head, name).register_forward_pre_hook(
            lambda _, inputs, name=name: found.update({name: inputs})
        )
        for name in names
    ]
    with torch.no_grad(), step.autocast():
        model = step.model
        x = model.unpack(
            model.sequences(batch.ids), model.user_bags(batch.users), model.item_bags(batch.items)
        )
        step.model.head.forward(x)  # not compiled
    for hook in hooks:
        hook.remove()
    return found


def as_leaf(x: Any) -> Any:
    """The argument of a layer as one that gets a gradient."""
    if isinstance(x, torch.Tensor):
        return x.detach().requires_grad_()
    if isinstance(x, Padded):
        return Padded(as_leaf(x.values), x.lengths)
    return x.with_values(as_leaf(x.values)) if isinstance(x, jm.Jagged) else x


def result_tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, tuple):
        return [tensor for part in x for tensor in result_tensors(part)]
    return [x if isinstance(x, torch.Tensor) else x.values]


def time_layers(
    step: Step, batch: RankingBatch, names: Iterable[str], device: torch.device, repeats: int = 10
) -> dict[str, float]:
    """Seconds of forward and backward of each layer, mean of `repeats` after a warm-up."""
    seconds = {}
    for name, inputs in captured_inputs(step, batch, names).items():
        layer = copy.deepcopy(getattr(step.model.head, name)).train()
        inputs = [as_leaf(x) for x in inputs]
        if step.compiled:
            layer.compile()

        def run(layer: nn.Module = layer, inputs: list = inputs) -> None:
            with step.autocast():
                outputs = result_tensors(layer(*inputs))
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

        for _ in range(3):
            run()
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        seconds[name] = (time.perf_counter() - begin) / repeats
    return seconds


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large GEMM: the best of ten."""
    size = 8192 if device.type == "cuda" else 1024
    x = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        begin = time.perf_counter()
        x @ x
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


# -- program ---------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    device = options.device
    tables, batches = random_batches(options) if options.data is None else log_batches(options)
    lengths = length_statistics(batches)
    batches = [batch.to(device) for batch in batches]
    torch.manual_seed(options.seed)
    model, steps = make_model("jagged", tables, options), {}
    initial, flops = model.state_dict(), layer_flops(model, batches[0])
    for name in options.models:
        begin = time.perf_counter()
        steps[name] = Step(name, tables, options, initial)
        for batch in batches:  # compiles, more than once because shapes differ
            steps[name](batch)
        print(f"{name}: first steps took {time.perf_counter() - begin:.0f} s", flush=True)
    seconds = time_steps(steps, batches, device)
    print(
        "steps in ms: " + ", ".join(f"{name} {1e3 * each:.2f}" for name, each in seconds.items()),
        flush=True,
    )

    dtype = torch.bfloat16 if device.type == "cuda" and not options.fp32 else torch.float32
    peak, samples = peak_flops(device, dtype), sum(map(len, batches)) / len(batches)
    results = {}
    for name, step in steps.items():
        times = time_layers(step, batches[0], flops, device)
        profiled = profile_steps(
            lambda step=step: [step(batch) for batch in batches[:3]], len(batches[:3]), device
        )
        results[name] = {
            "step_ms": 1e3 * seconds[name],
            "samples_per_second": samples / seconds[name],
            "peak_memory_mb": (
                max(peak_memory(partial(step, batch), device) for batch in batches) / 1e6
            ),
            "stages_ms": profiled.stages,
            "slowest_ms": profiled.slowest,
            "layer_ms": {layer: 1e3 * time for layer, time in times.items()},
            "layer_mfu": {layer: 3 * flops[layer] / time / peak for layer, time in times.items()},
        }
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    return {
        "device": (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"{platform.machine()}, {options.threads} threads"
        ),
        "torch": torch.__version__,
        "dtype": str(dtype),
        "settings": settings | {"device": str(device)},
        "lengths": lengths,
        "samples_per_step": samples,
        "head_parameters": sum(parameter.numel() for parameter in model.head.parameters()),
        "gemm_tflops": peak / 1e12,
        "forward_gflops": {name: count / 1e9 for name, count in flops.items()},
        "results": results,
        "claims": compare_with_claims(results) if options.head == "dlrm" else [],
    }


def compare_with_claims(results: dict[str, Any]) -> list[dict[str, str]]:
    """The published claims, with the change from the fastest model of each other kind to our
    fastest one."""

    def best(kind: str) -> dict[str, Any] | None:
        own = [result for name, result in results.items() if name.startswith(kind)]
        if not own:
            return None
        utilisation = [result["layer_mfu"].get("stream", float("nan")) for result in own]
        fastest = min(own, key=lambda result: result["step_ms"])
        return fastest | {"stream_mfu": max(utilisation)}

    ours, others = best("jagged"), {kind: best(kind) for kind in ("padded", "baseline")}
    return [
        {
            "claim": claim,
            "published": published,
            "ours": f"{100 * (ours[key] / other[key] - 1):+.1f} %",
            "of": key,
            "over": kind,
        }
        for kind, other in others.items()
        for claim, published, key in CLAIMS
        if ours and other
    ]


def print_report(report: dict[str, Any]) -> None:
    lengths = ", ".join(
        f"{name} {x['mean']:.0f} / {x['max']:.0f}" for name, x in report["lengths"].items()
    )
    print(
        f"{report['device']}, torch {report['torch']}, {report['dtype']};"
        f" {report['samples_per_step']:.0f} samples per step"
    )
    print(
        f"mean / max lengths: {lengths}; {report['head_parameters']:,} dense parameters; GEMM"
        f" {report['gemm_tflops']:.3g} TFLOP/s"
    )
    results = report["results"]
    rows: dict[str, Callable[[dict], str]] = {
        "step ms": lambda x: f"{x['step_ms']:.1f}",
        "samples/s": lambda x: f"{x['samples_per_second']:,.0f}",
        "peak MB": lambda x: f"{x['peak_memory_mb']:,.0f}",
        **{
            f"{stage} ms": lambda x, stage=stage: f"{x['stages_ms'][stage]:.1f}" for stage in STAGES
        },
        **{
            f"MFU {name} %": lambda x, name=name: f"{100 * x['layer_mfu'][name]:.1f}"
            for name in report["forward_gflops"]
        },
    }
    print(f"\n{'':>18}" + "".join(f"{name:>17}" for name in results))
    for label, value in rows.items():
        print(f"{label:>18}" + "".join(f"{value(result):>17}" for result in results.values()))
    if report["claims"]:
        print(f"\n{'published':>10}{'ours':>12}{'over':>10}")
    for claim in report["claims"]:
        figures = f"{claim['published']:>10}{claim['ours']:>12}{claim['over']:>10}"
        print(f"{figures}  {claim['claim']}")


def main(arguments: list[str] | None = None) -> None:
    try:
        options = parse_arguments(arguments)
        report = measure(options)
    except (ValueError, OSError) as error:
        sys.exit(f"benchmark_dlrm: {error}")
    print_report(report)
    save_json(options.out, json.loads(json.dumps(report)))
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
