"""The bytes that examples/communication.py computes are those that two processes exchange, for
every sharding plan.

TorchRec does not offer row-wise bags on the CPU, because gloo cannot gather unequal shares. The
case "row_wise bags" allows them, with equal shares.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("torchrec")

import benchmark_dlrm
import communication
import sharding
from ranking_data import RankingBatch
from ranking_model import RankingModel
from sharding import PLANS, OptimizerSpec
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan

CPU, RANKS, ROWS, KINDS = torch.device("cpu"), 2, 30, communication.Traffic._fields
TINY = f"""--device cpu --batch-size 6 --history 6 20 --stream 12 40 --candidates 2 6 --items 50 --features 3 2 --feature-rows {ROWS}
    --embedding-dim 16 --num-heads 2 --block-size 16 --num-batches 4 --num-compressed 4""".split()  # noqa: E501
ROW_WISE_BAGS = "row_wise bags"
BYTES = {"long int": 8, "int": 4, "float": 4}  # names as in the profiler
# Ranges of TorchRec around its collectives.
RANGES = {
    "## all2all_data:kjt splits ##": "splits",
    "## all2all_data:kjt lengths ##": "lengths",
    "## all2all_data:kjt values ##": "ids",
    "## All2All_Seq_fwd ##": "embeddings",
    "## All2All_Pooled_fwd ##": "embeddings",
    "## ReduceScatterBase_fwd (tensor) ##": "embeddings",
    "## All2All_Seq_bwd ##": "gradients",
    "## All2All_Pooled_bwd ##": "gradients",
    "## ReduceScatterBase_bwd (all_gather) ##": "gradients",
}


class Task(NamedTuple):
    """A rank's batches, and what makes the model on a device."""

    batches: list[RankingBatch]
    make_model: Callable[[torch.device], RankingModel]


def make_task(rank: int, case: str) -> Task:
    """The ranks have different batch sizes, but for row-wise bags."""
    shares = (
        ["--history", "6", "6", "--candidates", "2", "2"]
        if case == ROW_WISE_BAGS
        else ["--batch-size", str(6 - rank)]
    )
    options = benchmark_dlrm.parse_arguments([*TINY, *shares, "--seed", str(rank)])
    tables, batches = benchmark_dlrm.random_batches(options)
    generator = torch.Generator().manual_seed(rank)
    batches = [
        replace(x, users=several_ids(x.users, generator), items=several_ids(x.items, generator))
        for x in batches
    ]
    config = benchmark_dlrm.make_config(options)
    return Task(batches, lambda device: RankingModel(tables, config, device=device))


def several_ids(bags: KeyedJaggedTensor, generator: torch.Generator) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids in place of one, so that embeddings of bags are not as many as ids."""
    lengths = torch.randint(
        4, bags.lengths().shape, generator=generator, dtype=bags.lengths().dtype
    )
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(bags.keys(), ids, lengths)


class Step(NamedTuple):
    """What a process did in a step."""

    sent: dict[str, float]  # bytes to the other rank, by kind
    plan: ShardingPlan
    looked_up: communication.Features  # of the batch that the step trains on
    exchanged: communication.Features  # of the batch whose ids are exchanged meanwhile


def sent_bytes(events: list[Any], rank: int) -> dict[str, float]:
    """Bytes that the rank sent in torch.distributed's collectives, which the profiler records with
    shapes and splits, by kind.

    With a ring, a reduce-scatter sends (N - 1) / N of its input, an all-gather N - 1 times, an
    all-reduce 2 (N - 1) / N times it.
    """
    sent, reduced = Counter[str](), []
    for event in events:
        name = event.name()
        if name == "c10d::alltoall_base_":
            splits = event.concrete_inputs()[4] or [event.shapes()[1][0] // RANKS] * RANKS
            row = payload(event, 1) / max(event.shapes()[1][0], 1)
            sent[kind_of(event, events)] += row * sum(
                part for to, part in enumerate(splits) if to != rank
            )
        elif name == "c10d::_reduce_scatter_base_":
            sent[kind_of(event, events)] += (RANKS - 1) / RANKS * payload(event, 1)
            reduced.append(payload(event, 1))
        elif name == "c10d::_allgather_base_":
            sent[kind_of(event, events)] += (RANKS - 1) * payload(event, 1)
        elif name == "gloo:all_reduce":  # c10d's own record has no shape
            sent["dense"] += 2 * (RANKS - 1) / RANKS * payload(event, 0)
        else:
            assert not name.startswith(("c10d::", "gloo:")) or name in (
                "c10d::allreduce_",
                "gloo:all_to_all",
                "gloo:all_gather",
            ), name
    # gloo's reduce-scatter is an all-reduce
    sent["dense"] -= 2 * (RANKS - 1) / RANKS * sum(reduced)
    return {kind: float(sent[kind]) for kind in KINDS}


def payload(event: Any, argument: int) -> int:
    """Bytes of a tensor argument."""
    return math.prod(event.shapes()[argument]) * BYTES[event.dtypes()[argument]]


def kind_of(event: Any, events: list[Any]) -> str:
    (kind,) = (
        RANGES[other.name()]
        for other in events
        if other.name() in RANGES and contains(other, event)
    )
    return kind


def contains(outer: Any, inner: Any) -> bool:
    return (
        outer.start_thread_id() == inner.start_thread_id()
        and outer.start_ns() <= inner.start_ns() <= outer.end_ns()
    )


def step(case: str) -> Step:
    """A case is one of `PLANS` or `ROW_WISE_BAGS`."""
    if case == ROW_WISE_BAGS:
        with patch.object(
            EmbeddingBagCollectionSharder, "sharding_types", lambda self, device_type: ["row_wise"]
        ):
            result = train_step("row_wise", make_task(sharding.rank(), case))
        assert {
            how.sharding_type for tables in result.plan.plan.values() for how in tables.values()
        } == {"row_wise"}
        return result
    return train_step(case, make_task(sharding.rank(), case))


def train_step(plan: str, task: Task) -> Step:
    """The second step of training. It exchanges the ids of a batch and looks up those of an earlier
    one."""
    tables = OptimizerSpec(torch.optim.Adagrad, dict(lr=0.05))
    dense = OptimizerSpec(torch.optim.AdamW, dict(lr=1e-3))
    model, optimizer = sharding.build(task.make_model, CPU, plan, tables, dense)

    def forward(batch: RankingBatch) -> tuple[torch.Tensor, None]:
        losses = functional.binary_cross_entropy_with_logits(
            model(batch), batch.labels, reduction="none"
        )
        return sharding.global_mean(losses), None

    pipeline = sharding.make_pipeline(model, optimizer, CPU, forward)
    model.train()
    source = iter(task.batches)
    pipeline.progress(source)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        pipeline.progress(source)
    sent = sent_bytes(list(recorded.profiler.kineto_results.events()), sharding.rank())
    # After two steps, three batches were exchanged.
    return Step(
        sent,
        model.plan,
        communication.features(task.batches[1]),
        communication.features(task.batches[2]),
    )


@pytest.fixture(scope="module", params=[*PLANS, ROW_WISE_BAGS])
def steps(request, two_ranks) -> list[Step]:
    return two_ranks.run(step, request.param)


def model_of(steps: list[Step], without: str | None = None) -> list[dict[str, float]]:
    """What `communication` computes that each rank sends, if need be without one of the modules."""
    plan = ShardingPlan(
        {path: tables for path, tables in steps[0].plan.plan.items() if path != without}
    )
    model = make_task(0, "auto").make_model(torch.device("meta"))
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
