"""The bytes that examples/communication.py computes are those that two processes exchange, for every sharding plan."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("torchrec")

import benchmark_dlrm  # noqa: E402
import communication  # noqa: E402
import sharding  # noqa: E402
from ranking_data import RankingBatch  # noqa: E402
from ranking_model import RankingModel  # noqa: E402
from sharding import PLANS, OptimizerSpec  # noqa: E402
from torchrec.distributed.types import ShardingPlan  # noqa: E402

CPU, RANKS, KINDS = torch.device("cpu"), 2, communication.Traffic._fields
TINY = """--device cpu --batch-size 6 --history 6 20 --stream 12 40 --candidates 2 6 --items 50 --features 3 2 --feature-rows 30
    --embedding-dim 16 --num-heads 2 --block-size 16 --num-batches 4 --num-compressed 4""".split()
BYTES = {"long int": 8, "int": 4, "float": 4}  # names as in the profiler
# Ranges of TorchRec around its collectives.
RANGES = {
    "## all2all_data:kjt splits ##": "splits",
    "## all2all_data:kjt lengths ##": "lengths",
    "## all2all_data:kjt values ##": "ids",
    "## All2All_Seq_fwd ##": "embeddings",
    "## All2All_Pooled_fwd ##": "embeddings",
    "## All2All_Seq_bwd ##": "gradients",
    "## All2All_Pooled_bwd ##": "gradients",
}


class Task(NamedTuple):
    """A rank's batches, and what makes the model on a device."""

    batches: list[RankingBatch]
    make_model: Callable[[torch.device], RankingModel]


def make_task(rank: int) -> Task:
    """The ranks have different batch sizes."""
    options = benchmark_dlrm.parse_arguments([*TINY, "--seed", str(rank), "--batch-size", str(6 - rank)])
    tables, batches = benchmark_dlrm.random_batches(options)
    config = benchmark_dlrm.make_config(options)
    return Task(batches, lambda device: RankingModel(tables, config, device=device))


class Step(NamedTuple):
    """What a process did in a step."""

    sent: dict[str, float]  # bytes to the other rank, by kind
    plan: ShardingPlan
    looked_up: communication.Features  # of the batch that the step trains on
    exchanged: communication.Features  # of the batch whose ids are exchanged meanwhile


def sent_bytes(events: list[Any], rank: int) -> dict[str, float]:
    """Bytes that the rank sent in torch.distributed's collectives, which the profiler records with shapes and splits, by kind."""
    sent = Counter[str]()
    for event in events:
        if event.name() == "c10d::alltoall_base_":
            (size, *rest), splits = event.shapes()[1], event.concrete_inputs()[4] or None
            row = math.prod(rest) * BYTES[event.dtypes()[1]]
            (kind,) = (RANGES[other.name()] for other in events if other.name() in RANGES and contains(other, event))
            sent[kind] += row * sum(part for to, part in enumerate(splits or [size // RANKS] * RANKS) if to != rank)
        elif event.name() == "gloo:all_reduce":
            payload = math.prod(event.shapes()[0]) * BYTES[event.dtypes()[0]]
            sent["dense"] += 2 * (RANKS - 1) / RANKS * payload
        elif event.name().startswith(("c10d::", "gloo:")):
            assert event.name() in ("c10d::allreduce_", "gloo:all_to_all"), event.name()
    return {kind: float(sent[kind]) for kind in KINDS}


def contains(outer: Any, inner: Any) -> bool:
    return outer.start_thread_id() == inner.start_thread_id() and outer.start_ns() <= inner.start_ns() <= outer.end_ns()


def step(plan: str) -> Step:
    """The second step of training. It exchanges the ids of a batch and looks up those of an earlier one."""
    rank = sharding.rank()
    task = make_task(rank)
    tables, dense = OptimizerSpec(torch.optim.Adagrad, dict(lr=0.05)), OptimizerSpec(torch.optim.AdamW, dict(lr=1e-3))
    model, optimizer = sharding.build(task.make_model, CPU, plan, tables, dense)

    def forward(batch: RankingBatch) -> tuple[torch.Tensor, None]:
        losses = functional.binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="none")
        return sharding.global_mean(losses), None

    pipeline = sharding.make_pipeline(model, optimizer, CPU, forward)
    model.train()
    source = iter(task.batches)
    pipeline.progress(source)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        pipeline.progress(source)
    sent = sent_bytes(list(recorded.profiler.kineto_results.events()), rank)
    # After two steps, three batches were exchanged.
    return Step(sent, model.plan, communication.features(task.batches[1]), communication.features(task.batches[2]))


@pytest.fixture(scope="module", params=PLANS)
def steps(request, two_ranks) -> list[Step]:
    return two_ranks.run(step, request.param)


def model_of(steps: list[Step], without: str | None = None) -> list[dict[str, float]]:
    """What `communication` computes that each rank sends, if need be without one of the modules."""
    plan = ShardingPlan({path: tables for path, tables in steps[0].plan.plan.items() if path != without})
    model = make_task(0).make_model(torch.device("meta"))
    exchanged = communication.count_traffic(model, plan, [own.exchanged for own in steps])
    looked_up = communication.count_traffic(model, plan, [own.looked_up for own in steps])
    traffic = exchanged._replace(embeddings=looked_up.embeddings, gradients=looked_up.gradients)
    return [traffic.sent(rank) for rank in range(RANKS)]


def test_bytes_are_those_that_two_processes_send(steps):
    measured = [own.sent for own in steps]
    assert model_of(steps) == measured
    for sent in measured:
        kinds = KINDS if steps[0].plan.plan else ["dense"]
        assert min(sent[kind] for kind in kinds) > 0  # so no term can be left out


def test_bytes_differ_without_a_module(steps):
    for path in steps[0].plan.plan:
        for own, expected in zip(model_of(steps, without=path), steps, strict=True):
            assert all(own[kind] != expected.sent[kind] for kind in KINDS), path
