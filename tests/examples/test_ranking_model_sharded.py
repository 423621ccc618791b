"""The whole ranking model, sharded over two processes, in TorchRec's training pipelines: they
pipeline all of its collections."""

import pytest
import torch
from ranking_data import RankingBatch
from ranking_model import RankingModel
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from .ranking_batches import BATCHES, CONFIG, TABLES, make_batch

SHARDERS = (EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder())
COLLECTIONS = {"sequences": SHARDERS[0], "user_bags": SHARDERS[1], "item_bags": SHARDERS[1]}


class Task(nn.Module):
    """The model with its loss, the form that the pipelines train."""

    def __init__(self):
        super().__init__()
        self.model = RankingModel(TABLES, CONFIG)

    def forward(self, batch: RankingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(batch)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def shard(task: Task, rank: int, world_size: int) -> DistributedModelParallel:
    plan = {}
    for name, sharder in COLLECTIONS.items():
        collection = getattr(task.model, name)
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
        tables = sharder.shardable_parameters(collection)
        # Tables alternate between ranks, so features come back in another order. Bags are not
        # row-wise, because TorchRec's reduce-scatter over gloo needs the same number of rows on
        # each rank, and the bags of items have as many as there are events.
        kinds = {table: table_wise(rank=1 - place % 2) for place, table in enumerate(tables)}
        if name == "sequences":
            kinds["item"] = row_wise()
        plan[f"model.{name}"] = construct_module_sharding_plan(
            collection, kinds, sharder, world_size, device_type="cpu"
        )
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    return DistributedModelParallel(
        task, env, torch.device("cpu"), ShardingPlan(plan), sharders=list(SHARDERS)
    )


def train_in_pipelines() -> None:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    lengths = list(BATCHES.values())[rank]
    batches = [make_batch(*lengths, seed=seed) for seed in range(3)]
    results = []
    for pipeline in (TrainPipelineBase, TrainPipelineSparseDist):
        torch.manual_seed(0)
        sharded = shard(Task(), rank, world_size)
        dense = [parameter for name, parameter in sharded.named_parameters() if ".head." in name]
        pipe = pipeline(sharded, torch.optim.SGD(dense, lr=0.5), torch.device("cpu"))
        source = iter(batches)
        results.append([pipe.progress(source) for _ in batches])
        if pipeline is TrainPipelineSparseDist:
            assert len(pipe._pipelined_modules) == len(COLLECTIONS)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.slow
def test_whole_model_in_the_pipelines(two_ranks):
    two_ranks.run(train_in_pipelines)
