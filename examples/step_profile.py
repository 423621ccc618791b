"""Time of a training step by stage, from torch's profiler: for benchmark_dlrm.py and
benchmark_scaling.py."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from training import synchronize

STAGES = ("embeddings", "our kernels", "optimizer", "dense", "host")


class Profile(NamedTuple):
    """Milliseconds of a step, under the profiler, which slows the host.

    On a GPU, these are kernels, and `host` is the time in which the GPU waits. On a CPU, these are
    operators, and `host` is the time outside of them. `our kernels` are the operators of
    jagged_modules. `embeddings` are lookups, and what prepares ids and embeddings for their
    exchange. `dense` is everything else that computes. Collectives of torch.distributed are in no
    stage.
    """

    stages: dict[str, float]  # by name of `STAGES`
    slowest: dict[str, float]  # the kernels or operators that take the most time, by name
    collectives: float  # including the time in which they wait for another rank
    exposed: float  # the part of it in which nothing else runs: the step is its stages and this


class Span(NamedTuple):
    """An activity that lasts from start to end, in microseconds."""

    activity: str
    start: float
    end: float


def profile_steps(
    run: Callable[[], Any], steps: int, device: torch.device, num_slowest: int = 15
) -> Profile:
    """The profile of `run`, a call that makes this number of steps."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as recorded:
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        wall = 1e6 * (time.perf_counter() - begin)
    stages, names = dict.fromkeys(STAGES, 0.0), Counter[str]()
    spans: list[Span] = []
    for event in recorded.events():
        activity = activity_of(event, on_gpu)
        if activity:
            spans.append(Span(activity, event.time_range.start, event.time_range.end))
        if activity == "compute":
            names[event.name] += (
                event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            )
        if event.device_type == DeviceType.CPU and not event.is_user_annotation:
            kernels = sum(
                kernel.duration for kernel in event.kernels if not is_collective(kernel.name)
            )
            stages[stage_of(event)] += (
                kernels if on_gpu else event.self_cpu_time_total * (activity == "compute")
            )
    if on_gpu:  # kernels of compiled code have no operator
        stages["dense"] = names.total() - sum(
            stages[name] for name in ("embeddings", "our kernels", "optimizer")
        )
    active = time_by_activities(spans)
    collectives = {running: us for running, us in active.items() if "collective" in running}
    exposed = sum(
        us for running, us in collectives.items() if "wait" in running or "compute" not in running
    )
    stages["host"] = max(wall - sum(stages.values()) - exposed, 0.0)

    def milliseconds(totals: Iterable[tuple[str, float]]) -> dict[str, float]:
        return {name: total / 1e3 / steps for name, total in totals}

    totals = milliseconds({"collectives": sum(collectives.values()), "exposed": exposed}.items())
    return Profile(
        milliseconds(stages.items()), milliseconds(names.most_common(num_slowest)), **totals
    )


def is_collective(name: str) -> bool:
    """Whether NCCL's kernel or gloo's range has this name."""
    return name.startswith(("nccl", "gloo:"))


def activity_of(event: Any, on_gpu: bool) -> str | None:
    """What an event of the profiler means for the device: collective, compute, wait (for a
    collective), or None for nothing."""
    if on_gpu:
        if event.device_type == DeviceType.CPU or event.is_user_annotation:
            return None
        return "collective" if is_collective(event.name) else "compute"
    if is_collective(event.name):  # runs in a thread of its own
        return "collective"
    if event.is_user_annotation:
        return None
    # These autograd functions of TorchRec's comm_ops.py wait for collectives, in the forward and in
    # the backward.
    waits = event.name.startswith("All2All") and event.name.endswith(("_Wait", "_ReqBackward"))
    return "wait" if waits else "compute"


def time_by_activities(spans: Iterable[Span]) -> dict[frozenset[str], float]:
    """Microseconds in which exactly these activities ran."""
    changes = sorted(
        (moment, change, span.activity)
        for span in spans
        for moment, change in ((span.start, 1), (span.end, -1))
    )
    times, running, last = dict[frozenset[str], float](), Counter[str](), 0.0
    for moment, change, activity in changes:
        if active := frozenset(+running):
            times[active] = times.get(active, 0.0) + moment - last
        running[activity] += change
        last = moment
    return times


# Parts of the names of operators and ranges: FBGEMM's lookups, and TorchRec's exchange of ids and
# embeddings.
EMBEDDINGS = (
    "embedding",
    "lookup",
    "_dist",
    "all2all",
    "reducescatter",
    "kjt",
    "_jagged_tensors",
    "copy_batch_to_gpu",
)


def stage_of(event: Any) -> str:
    """The stage of an operator, from the names of the operators and ranges around it."""
    while event is not None:
        name = event.name.lower()
        if name.startswith(("jagged_kernels::", "jagged_modules::")):
            return "our kernels"
        if any(part in name for part in EMBEDDINGS):
            return "embeddings"
        if name.startswith("optimizer"):
            return "optimizer"
        event = event.cpu_parent
    return "dense"
