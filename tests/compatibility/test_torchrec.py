"""Layers behind TorchRec's collections: its tracer, sharding plans, pipelines and quantisation."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import jagged_modules as jm

from .cases import (
    CASES,
    FEATURES,
    WIDTH,
    Compressed,
    Exchanged,
    OnCandidates,
    OnHistoryAndCandidates,
    OnUsers,
    Pooled,
)
from .table import NOTES, feature

torchrec = pytest.importorskip("torchrec")

from torchrec.distributed import DistributedModelParallel
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.train_pipeline.experimental_pipelines import (
    TrainEvalHybridPipelineBase,
    TrainPipelineSparseDistT,
)
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.fx import symbolic_trace
from torchrec.inference.modules import quantize_inference_model
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRec's and torch's own

NUM_ITEMS, USERS, STEPS, RATE = 20, 4, 3, 0.5
PLANS = {
    "data_parallel": plans.data_parallel(),
    "table_wise": plans.table_wise(rank=1),
    "row_wise": plans.row_wise(),
    "column_wise": plans.column_wise(ranks=[1, 0]),
    "table_row_wise": plans.table_row_wise(host_index=0),
    "grid_shard": plans.grid_shard(host_indexes=[0]),
}


class Model(nn.Module):
    """A case's layer on what collections return for its features. Returns loss and result, as
    pipelines expect."""

    def __init__(self, case, device="cpu"):
        super().__init__()
        self.layer, self.kind = case.build(device=device), case.model
        options, device = dict(embedding_dim=WIDTH, num_embeddings=NUM_ITEMS), torch.device(device)
        if self.kind is Compressed:
            self.embeddings, self.of_users = (
                torchrec.EmbeddingBagCollection(
                    tables=[
                        torchrec.EmbeddingBagConfig(
                            name=f"{level}_{name}", feature_names=[name], **options
                        )
                        for name in FEATURES
                    ],
                    device=device,
                )
                for level in ("candidates", "users")
            )
        else:
            tables = [torchrec.EmbeddingConfig(name="item", feature_names=FEATURES, **options)]
            self.embeddings = torchrec.EmbeddingCollection(tables=tables, device=device)

    def forward(self, features):
        embedded = self.embeddings(features)
        if self.kind is Compressed:
            users_of = torch.arange(USERS, device=features.device()).flip(0)
            out = self.layer(embedded, self.of_users(features), users_of)
        elif self.kind is OnCandidates:
            candidates = embedded["candidates"]
            index = jm.CandidateIndex.from_jagged(candidates)
            out = self.layer(candidates.values().unsqueeze(1), embedded["history"], index)
        elif self.kind is OnHistoryAndCandidates:
            candidates = embedded["candidates"]
            history, out = self.layer(
                embedded["history"],
                candidates.values().unsqueeze(1),
                jm.CandidateIndex.from_jagged(candidates),
            )
            out = torch.cat([history.values(), out[:, 0]])
        elif issubclass(self.kind, OnUsers):
            pooled = [
                jm.functional.jagged_mean(embedded[key].values(), embedded[key].offsets())
                for key in FEATURES
            ]
            out = self.layer(embedded["history"], torch.stack(pooled, dim=1))
            if self.kind is Exchanged:
                history, vectors = out
                out = torch.cat([history.values(), vectors.flatten(0, 1).relu()])
            else:
                out = out.values()
        else:
            out = self.layer(embedded["history"])
            out = out if self.kind is Pooled else out.values()
        return out.square().mean(), out.detach()


def make_model(name, device="cpu"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(CASES[name]).to(device)


def make_batches(rank=0, device="cpu"):
    """Another batch for each step and rank, of users without history too."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 6, (len(FEATURES) * USERS,), generator=generator).index_fill(
            0, torch.tensor(USERS - 1), 0
        )
        lengths[0], lengths[USERS] = 3, 2
        ids = torch.randint(NUM_ITEMS, (int(lengths.sum()),), generator=generator)
        batches.append(
            torchrec.KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, lengths).to(
                torch.device(device)
            )
        )
    return batches


def collections(model):
    return {name: module for name, module in model.named_children() if name != "layer"}


def sharded(name, plan, device="cpu", replicas=1):
    """The model in DistributedModelParallel, or in DMPCollection if there are replicas of its
    tables; their optimizer, SGD, runs in the backward unless they are data-parallel."""
    model, shardings = make_model(name, device), {}
    size = dist.get_world_size() // replicas
    for path, collection in collections(model).items():
        if (
            plan == "data_parallel"
            and device == "cpu"
            and isinstance(collection, torchrec.EmbeddingCollection)
        ):
            continue  # what is in no plan is replicated by DistributedDataParallel
        if plan != "data_parallel":
            apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": RATE})
        tables = plans.apply_to_all(collection, PLANS[plan])
        shardings[path] = plans.construct_module_sharding_plan(
            collection, tables, local_size=size, world_size=size, device_type=device
        )
    device, plan = torch.device(device), ShardingPlan(shardings)
    if replicas > 1:
        world = dist.group.WORLD
        parallel = DMPCollection(model, device, plan, world.size(), size, world)
    else:
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        parallel = DistributedModelParallel(model, env, device, plan)
    load_state(parallel, make_model(name, device).state_dict())  # sharded bags are initialised anew
    return parallel


def load_state(model, state):
    """The state of an unsharded model."""
    for name, x in model.state_dict().items():
        if isinstance(x, ShardedTensor):
            for shard in x.local_shards():
                (row, column), (rows, columns) = (
                    shard.metadata.shard_offsets,
                    shard.metadata.shard_sizes,
                )
                shard.tensor.copy_(state[name][row : row + rows, column : column + columns])
        elif isinstance(x, DTensor):  # DMPCollection's; of a whole table
            (shard,) = x.to_local().local_shards()
            shard.copy_(state[name])
        else:
            x.copy_(state[name])


def dense_optimizer(model, plan):
    in_backward = () if plan == "data_parallel" else tuple(collections(model.module))
    return torch.optim.SGD(
        [x for name, x in model.named_parameters() if not name.startswith(in_backward)], lr=RATE
    )


def expected_steps(name, batches, device="cpu"):
    """The results of plain steps of one unsharded model on the batches of all ranks, and the
    layer's parameters at the end."""
    model = make_model(name, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    results = []
    for batch in batches:
        optimizer.zero_grad()
        loss, out = model(batch)
        loss.backward()
        for x in model.parameters():
            dist.all_reduce(x.grad)
            x.grad /= dist.get_world_size()
        optimizer.step()
        results.append(out)
    return [*results, *model.layer.parameters()]


class Steps:
    """Plain steps, with the interface of a pipeline."""

    def __init__(self, model, optimizer, device):
        self.model, self.optimizer = model, optimizer

    def progress(self, source):
        self.optimizer.zero_grad()
        loss, out = self.model(self.next_batch(source))
        loss.backward()
        self.optimizer.step()
        return out

    def next_batch(self, source):
        return next(source)


class Synced(Steps):
    """Steps after which the replicas of the tables become their mean."""

    def progress(self, source):
        out = super().progress(source)
        self.model.sync()
        return out


def train(name, plan="row_wise", pipeline=Steps, device="cpu", replicas=1):
    batches = make_batches(dist.get_rank(), device)
    model = sharded(name, plan, device, replicas)
    pipe = pipeline(model, dense_optimizer(model, plan), torch.device(device))
    source = iter(batches)
    results = [pipe.progress(source) for _ in batches]
    assert len(getattr(pipe, "_pipelined_modules", collections(model.module))) == len(
        collections(model.module)
    )
    torch.testing.assert_close(
        [*results, *layer_parameters(model)], expected_steps(name, batches, device)
    )


def layer_parameters(model):
    return [x for name, x in model.named_parameters() if name.startswith("layer.")]


@feature("DMP, data_parallel")
def test_data_parallel(case, two_ranks):
    two_ranks.run(train, case.name, "data_parallel")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_data_parallel_sequences(case, gpu_group):
    """On the CPU, test_data_parallel leaves EmbeddingCollections out of the plan."""
    train(case.name, "data_parallel", device=gpu_group)


@feature("DMP, table_wise")
def test_table_wise(case, two_ranks):
    two_ranks.run(train, case.name, "table_wise")


@feature("DMP, row_wise")
def test_row_wise(case, two_ranks):
    two_ranks.run(train, case.name, "row_wise")


@feature("DMP, column_wise")
def test_column_wise(case, two_ranks):
    two_ranks.run(train, case.name, "column_wise")


@feature("DMP, table_row_wise")
def test_table_row_wise(case, two_ranks):
    two_ranks.run(train, case.name, "table_row_wise")


@feature("DMP, grid_shard")
def test_grid_shard(case, two_ranks):
    two_ranks.run(train, case.name, "grid_shard")


def train_under_all_plans():
    for name, plan in itertools.product(CASES, PLANS):
        note = NOTES.get((f"DMP, {plan}", CASES[name].layer))
        if note is None or note.error is None:
            train(name, plan, device=f"cuda:{dist.get_rank()}")


@pytest.mark.gpu
@pytest.mark.large_memory
def test_two_gpus(two_gpus, trains_tables_on_gpus):
    """All layers under all plans, through NCCL."""
    two_gpus.run(train_under_all_plans)


def train_replicas(name):
    train(name, "row_wise", Synced, f"cuda:{dist.get_rank()}", replicas=2)


@pytest.mark.large_memory
@pytest.mark.gpu
@feature("DMPCollection")
def test_replicas_of_tables(case, two_gpus, trains_tables_on_gpus):
    """It takes no CPU."""
    two_gpus.run(train_replicas, case.name)


class Staged(Steps):
    """StagedTrainPipeline with the stages of TrainPipelineSparseDist."""

    def __init__(self, model, optimizer, device):
        super().__init__(model, optimizer, device)
        copy_stream, dist_stream = (torch.cuda.Stream() for _ in range(2))
        exchange = SparseDataDistUtil(model, dist_stream)
        stages = [
            PipelineStage("copy", lambda batch: batch.to(device, non_blocking=True), copy_stream),
            PipelineStage(
                "exchange",
                exchange.start_sparse_data_dist,
                dist_stream,
                fill_callback=exchange.wait_sdd_fill_callback,
            ),
        ]
        self.next_batch = StagedTrainPipeline(
            stages, compute_stream=torch.cuda.current_stream()
        ).progress


@feature("TrainPipelineBase")
def test_base(case, two_ranks):
    two_ranks.run(train, case.name, "row_wise", TrainPipelineBase)


@feature("TrainPipelineSparseDist")
def test_sparse_dist(case, two_ranks):
    two_ranks.run(train, case.name, "row_wise", TrainPipelineSparseDist)


@feature("TrainPipelineSparseDistLite")
def test_sparse_dist_lite(case, two_ranks):
    two_ranks.run(train, case.name, "row_wise", TrainPipelineSparseDistLite)


@feature("TrainPipelineSparseDistT", fast=2)
def test_sparse_dist_with_a_thread(case, two_ranks):
    two_ranks.run(train, case.name, "row_wise", TrainPipelineSparseDistT)


@feature("TrainEvalHybridPipelineBase", fast=2)
def test_hybrid(case, two_ranks):
    two_ranks.run(train, case.name, "row_wise", TrainEvalHybridPipelineBase)


def evaluate_in_pipeline(name):
    batches = make_batches(dist.get_rank())
    model, plain = sharded(name, "row_wise").eval(), make_model(name).eval()
    pipe = EvalPipelineSparseDist(model, dense_optimizer(model, "row_wise"), torch.device("cpu"))
    source = iter(batches)
    results = [pipe.progress(source) for _ in batches]
    torch.testing.assert_close(results, [plain(batch)[1] for batch in batches])


@feature("EvalPipelineSparseDist")
def test_eval(case, two_ranks):
    two_ranks.run(evaluate_in_pipeline, case.name)


@pytest.mark.gpu
@feature("TrainPipelineFusedSparseDist")
def test_fused_sparse_dist(case, gpu_group):
    train(case.name, "row_wise", TrainPipelineFusedSparseDist, gpu_group)


@pytest.mark.gpu
@feature("TrainPipelineSemiSync")
def test_semi_sync(case, gpu_group):
    train(case.name, "row_wise", TrainPipelineSemiSync, gpu_group)


@pytest.mark.gpu
@feature("PrefetchTrainPipelineSparseDist")
def test_prefetch(case, gpu_group):
    train(case.name, "row_wise", PrefetchTrainPipelineSparseDist, gpu_group)


@pytest.mark.gpu
@feature("StagedTrainPipeline")
def test_staged(case, gpu_group):
    train(case.name, "row_wise", Staged, gpu_group)


@feature("TorchRec's tracer")
def test_tracer(case):
    model, batch = make_model(case.name), make_batches()[0]
    traced = symbolic_trace(model)
    assert "layer" in [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert torch.equal(traced(batch)[1], model(batch)[1])


@feature("permuted features")
def test_permuted_features(case):
    model, batch = make_model(case.name), make_batches()[0]
    results = []
    for features in (batch, batch.permute([1, 0])):
        model.zero_grad()
        loss, out = model(features)
        loss.backward()
        results.append([out, *(x.grad.clone() for x in model.parameters())])
    torch.testing.assert_close(*results)


def with_managed_ids(model, rows):
    """The model with large ids, which MPZCH maps; each collection adds their rows to `rows`. Tables
    of the same features share a map: on a GPU, the order in which ids enter it decides."""
    managed, device, maps = copy.deepcopy(model), next(model.parameters()).device, {}
    for name, collection in collections(managed).items():
        bags = isinstance(collection, torchrec.EmbeddingBagCollection)
        tables = collection.embedding_bag_configs() if bags else collection.embedding_configs()
        for table in tables:
            if (key := tuple(table.feature_names)) not in maps:
                maps[key] = HashZchManagedCollisionModule(
                    zch_size=NUM_ITEMS, device=device, total_num_buckets=1
                )
        modules = {table.name: maps[tuple(table.feature_names)] for table in tables}
        kind = (
            ManagedCollisionEmbeddingBagCollection if bags else ManagedCollisionEmbeddingCollection
        )
        mapped = kind(collection, ManagedCollisionCollection(modules, tables), True)
        mapped.register_forward_hook(
            lambda _, features, result: rows.append(result[1]) or result[0]
        )
        setattr(managed, name, mapped)
    return managed


def with_large_ids(batch):
    ids = 10**12 + 7**9 * batch.values()
    return torchrec.KeyedJaggedTensor(FEATURES, ids, lengths=batch.lengths())


@feature("MPZCH, evaluation")
@torch.no_grad()
def test_managed_ids(case):
    """An id that was never entered has the row of its hash."""
    model, batch, rows = make_model(case.name).eval(), make_batches()[0], []
    _, out = with_managed_ids(model, rows).eval()(with_large_ids(batch))
    assert rows[0].values().unique().numel() > NUM_ITEMS // 4
    assert torch.equal(out, model(rows[0])[1])


@pytest.mark.gpu
@feature("MPZCH, training")
def test_managed_ids_in_training(case, trains_tables_on_gpus):
    """FBGEMM enters new ids on a GPU only."""
    model, rows = make_model(case.name, "cuda"), []
    managed = with_managed_ids(model, rows)
    optimizers = [
        torch.optim.SGD([x for x in each.parameters() if x.requires_grad], lr=RATE)
        for each in (managed, model)
    ]
    row_of = {}  # of each id that the first table has entered
    for batch in make_batches(device="cuda"):
        rows.clear()
        large, results = with_large_ids(batch), []
        for each, optimizer, features in zip((managed, model), optimizers, (large, None)):
            optimizer.zero_grad()
            loss, out = each(rows[0] if features is None else features)
            loss.backward()
            optimizer.step()
            results.append(out)
        torch.testing.assert_close(*results)
        first = FEATURES[0]
        for id, row in zip(large[first].values().tolist(), rows[0][first].values().tolist()):
            assert row_of.setdefault(id, row) == row
    trained = [x for x in managed.parameters() if x.requires_grad]
    assert len({*row_of.values()}) == len(row_of) > NUM_ITEMS // 4
    torch.testing.assert_close(trained, [*model.parameters()])


@feature("TorchRec quantisation")
@torch.no_grad()
def test_quantisation(case):
    model, batch = make_model(case.name), make_batches()[0]
    _, expected = model(batch)
    small = quantize_inference_model(copy.deepcopy(model))
    _, out = small(batch)
    assert type(small.embeddings) is not type(model.embeddings)
    assert 0 < (out - expected).norm() < 0.1 * expected.norm()
