"""The ranking model of docs/guides/torchrec.md, sharded, in TorchRec's pipelines: they trace it,
and train it as plain steps do."""

import dataclasses
import types

import pytest
import torch
from readme import example_with
from torch import nn

torchrec = pytest.importorskip("torchrec")

from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

PIPELINES = (TrainPipelineBase, TrainPipelineSparseDist, TrainPipelineSparseDistLite)
# they use CUDA streams
GPU_PIPELINES = (
    *PIPELINES,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    PrefetchTrainPipelineSparseDist,
)
PLANS = {
    "row_wise": row_wise(),
    "table_wise": table_wise(rank=1),
    "column_wise": column_wise(ranks=[1, 0]),
}
NUM_ITEMS, STEPS, RATE = 50, 3, 0.5


@dataclasses.dataclass
class Batch(Pipelineable):
    features: torchrec.KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        return Batch(
            *(x.to(device=device, non_blocking=non_blocking) for x in (self.features, self.labels))
        )

    def record_stream(self, stream):
        self.features.record_stream(stream)
        self.labels.record_stream(stream)


class Task(nn.Module):
    """The guide's model with its loss, the form that the pipelines train."""

    def __init__(self, device):
        super().__init__()
        self.model = guide().Ranker(NUM_ITEMS, device=device)

    def forward(self, batch):
        logits = self.model(batch.features)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def guide() -> types.ModuleType:
    module = types.ModuleType("guide_ranker")
    exec(example_with("docs/guides/torchrec.md", "class Ranker(nn.Module)"), vars(module))
    return module


def make_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (2 * 4,), generator=generator)
    ids = torch.randint(NUM_ITEMS, (int(lengths.sum()),), generator=generator)
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(["history", "candidates"], ids, lengths)
    return Batch(features, torch.rand(int(lengths[4:].sum()), generator=generator).round())


def train_in_pipelines(
    plan: str, pipelines: tuple = PIPELINES, device: torch.device | None = None
) -> None:
    device = torch.device("cpu") if device is None else device
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    batches = [make_batch(world * step + rank) for step in range(STEPS)]
    results = []
    for pipeline in pipelines:
        torch.manual_seed(0)
        task = Task(device)
        apply_optimizer_in_backward(
            torch.optim.SGD, task.model.embeddings.parameters(), {"lr": RATE}
        )
        sharder = EmbeddingCollectionSharder()
        module_plan = construct_module_sharding_plan(
            task.model.embeddings, {"item": PLANS[plan]}, sharder, world, device_type=device.type
        )
        env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
        sharded = DistributedModelParallel(
            task, env, device, ShardingPlan({"model.embeddings": module_plan}), sharders=[sharder]
        )
        dense = [
            parameter
            for name, parameter in sharded.named_parameters()
            if ".embeddings." not in name
        ]
        pipe = pipeline(sharded, torch.optim.SGD(dense, lr=RATE), device)
        source = iter(batches)
        logits = [pipe.progress(source) for _ in range(STEPS)]
        if pipeline is not TrainPipelineBase:
            assert pipe._pipelined_modules == [sharded.module.model.embeddings]
        results.append([*logits, *(parameter.detach().clone() for parameter in dense)])
    for pipeline, result in zip(pipelines[1:], results[1:], strict=True):
        for x, expected in zip(result, results[0], strict=True):
            assert torch.equal(x, expected), pipeline


@pytest.mark.parametrize("plan", PLANS)
def test_guides_model_in_the_pipelines(two_ranks, plan):
    two_ranks.run(train_in_pipelines, plan)


@pytest.mark.gpu
def test_guides_model_in_the_pipelines_on_a_gpu(gpu_group):
    train_in_pipelines("row_wise", GPU_PIPELINES, torch.device(gpu_group))


def train_in_gpu_pipelines() -> None:
    for plan in PLANS:
        train_in_pipelines(plan, GPU_PIPELINES, torch.device("cuda", torch.distributed.get_rank()))


@pytest.mark.gpu
@pytest.mark.large_memory
def test_guides_model_in_the_pipelines_on_two_gpus(two_gpus, trains_tables_on_gpus):
    two_gpus.run(train_in_gpu_pipelines)
