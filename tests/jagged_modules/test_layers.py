"""Layers fed by TorchRec's lazy results, and in sharded models. tests/compatibility has what holds
for every layer."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import jagged_modules as jm

from ..compatibility.cases import CASES, OnRows, Pooled, assert_same_distribution
from ..distributed.ranks import one_rank

WIDTH, HEADS = 64, 4
OFFSETS = torch.tensor([0, 20, 20, 50])


def rows(count=50):
    return torch.randn(count, WIDTH), OFFSETS


HSTU = jm.HSTUConfig(scaling_seqlen=30)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_rotary_tables_are_on_the_layers_gpu(device):
    layer = jm.BlockDiagonalSelfAttention(WIDTH, HEADS, max_seqlen=99, device=device)
    expected = jm.BlockDiagonalSelfAttention(WIDTH, HEADS)
    layer = layer.to_empty(device="cuda") if device == "meta" else layer.to("cuda")
    layer.load_state_dict(expected.state_dict())
    assert all(x.is_cuda and x.dtype == torch.float32 for x in layer.buffers())
    values, offsets = rows()
    torch.testing.assert_close(
        layer((values.cuda(), offsets.cuda()))[0].cpu(), expected((values, offsets))[0]
    )


# -- TorchRec's lazy results -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [case.name for case in CASES.values() if case.model in (OnRows, Pooled)]
)
@pytest.mark.parametrize("kind", ["JaggedTensor", "KeyedJaggedTensor"])
def test_lazy_rows(kind, name):
    torchrec = pytest.importorskip("torchrec")
    types = pytest.importorskip("torchrec.distributed.types")
    layer, (values, offsets) = CASES[name].build(), OnRows.inputs(5, 41, 0)
    x = {
        "JaggedTensor": torchrec.JaggedTensor(values, offsets=offsets),
        "KeyedJaggedTensor": torchrec.KeyedJaggedTensor(["a"], values, offsets=offsets),
    }[kind]
    results = [layer(given) for given in (types.LazyNoWait(x), x)]
    if CASES[name].model is OnRows:
        assert [type(out) for out in results] == [type(x)] * 2
        results = [out.values() for out in results]
    assert torch.equal(*results)


def test_lazy_targets_and_candidates():
    torchrec = pytest.importorskip("torchrec")
    lazy = pytest.importorskip("torchrec.distributed.types").LazyNoWait
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    history = torchrec.JaggedTensor(*rows()[:1], offsets=OFFSETS)
    targets = torchrec.JaggedTensor(torch.randn(50, WIDTH), offsets=OFFSETS)
    dense = torch.randn(3, 2, WIDTH)
    assert torch.equal(
        layer(lazy(targets), lazy(history)).values(), layer(targets, history).values()
    )
    assert torch.equal(layer(lazy(dense), lazy(history)), layer(dense, history))
    assert jm.CandidateIndex.from_jagged(lazy(targets)).host_counts.tolist() == [20, 0, 30]


def test_a_lazy_result_is_waited_for_once():
    torchrec = pytest.importorskip("torchrec")
    types = pytest.importorskip("torchrec.distributed.types")
    waits = []

    class Lazy(types.LazyAwaitable):
        def _wait_impl(self):
            waits.append(self)
            return torchrec.JaggedTensor(rows()[0], offsets=OFFSETS)

    x = Lazy()
    for _ in range(2):
        jm.JaggedMLP([WIDTH, 8])(x)
    assert waits == [x]


# -- sharded models --------------------------------------------------------------------------------


@pytest.fixture
def one_process():
    with one_rank():
        yield


def sharded(model, modules, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = copy.deepcopy(model), init_device_mesh("cpu", (1,))
    for name in (*modules, ""):
        fully_shard(model.get_submodule(name), mesh=mesh, **options)
    return model


def training_step(model, call):
    values = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = call(model, values)
    out.float().square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [
        out,
        values.grad,
        *(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads),
    ]


def jagged_tensors(model, values):
    return model(pytest.importorskip("torchrec").JaggedTensor(values, offsets=OFFSETS)).values()


STEPS = {
    "pair": lambda model, values: model((values, OFFSETS))[0],
    "Jagged": lambda model, values: model(jm.Jagged(values, OFFSETS, max_seqlen=30)).values,
    "by keyword": lambda model, values: model(x=jm.Jagged(values, OFFSETS)).values,
    "targets": lambda model, values: (
        model(jm.Jagged(values, OFFSETS), torch.tensor([2, 0, 5])).values
    ),
    "JaggedTensor": jagged_tensors,
    "score": lambda model, values: (
        model.score(jm.Jagged(values, OFFSETS), model.cache(jm.Jagged(values, OFFSETS))).values
    ),
}


@pytest.mark.parametrize("call", STEPS.values(), ids=STEPS)
def test_training_steps_of_a_sharded_hstu(one_process, call):
    """The backward needs whole parameters again. fully_shard sees from tensors in the layers'
    outputs when it does."""
    stack = jm.HSTUStack(WIDTH, HEADS, 2, HSTU)
    ours = training_step(sharded(stack, ["layers.0", "layers.1"]), call)
    # "score" adds the gradients of both uses of the rows in either order
    torch.testing.assert_close(ours, training_step(stack, call))


@pytest.mark.parametrize("call", STEPS.values(), ids=STEPS)
def test_mixed_precision_of_a_sharded_hstu(one_process, call):
    """Rows and parameters are cast where a layer is called."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    stack = jm.HSTUStack(WIDTH, HEADS, 2, HSTU)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    out, *grads = training_step(sharded(stack, ["layers.0", "layers.1"], mp_policy=policy), call)
    expected, *_ = training_step(
        copy.deepcopy(stack).bfloat16(), lambda model, values: call(model, values.bfloat16())
    )
    assert torch.equal(out, expected) and all(grad.dtype == torch.float32 for grad in grads)


@torch.no_grad()
def test_an_hstu_under_fully_sharded_data_parallel(one_process):
    """Its parameters are whole only while a layer is called, which caching and scoring must do."""
    stack, x = jm.HSTUStack(WIDTH, HEADS, 2, HSTU), rows()
    expected, _ = stack.score(x, stack.cache(x))
    stack = sharded(stack, ["layers.0", "layers.1"])
    assert torch.equal(stack.score(x, stack.cache(x))[0], expected)


FEATURES = ["item", "price", "brand"]


class Ranker(nn.Module):
    """Compressed features of a bag collection, and a layer on the rows of a sequence collection;
    everything on the meta device."""

    def __init__(self, torchrec):
        super().__init__()
        sizes, meta = dict(embedding_dim=8, num_embeddings=20), torch.device("meta")
        bags = [
            torchrec.EmbeddingBagConfig(name=name, feature_names=[name], **sizes)
            for name in FEATURES
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables=bags, device=meta)
        sequences = [torchrec.EmbeddingConfig(name="events", feature_names=["events"], **sizes)]
        self.sequences = torchrec.EmbeddingCollection(tables=sequences, device=meta)
        self.compress = jm.LinearCompressEmbedding(3, 500, candidate_features=FEATURES, device=meta)
        self.attention = jm.BlockDiagonalSelfAttention(8, 2, max_seqlen=10, device=meta)

    def forward(self, bags, sequences):
        embedded, events = self.bags(bags), self.sequences(sequences)["events"]
        return self.compress(embedded), self.attention(events), embedded


@pytest.mark.filterwarnings("ignore")  # TorchRec's and torch's own
def test_a_sharded_model(one_process):
    """Built on meta, with a plan by which the bags come in another order."""
    torchrec = pytest.importorskip("torchrec")
    from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )

    model = Ranker(torchrec)
    kinds = dict(
        item="data_parallel", price="table_wise", brand="data_parallel", events="table_wise"
    )
    constraints = {
        name: ParameterConstraints(sharding_types=[kind]) for name, kind in kinds.items()
    }
    topology = Topology(world_size=1, local_world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)

    bags = torchrec.KeyedJaggedTensor(
        FEATURES, torch.randint(20, (12,)), lengths=torch.tensor([1, 2, 1, 0, 3, 1, 1, 1, 2])
    )
    sequences = torchrec.KeyedJaggedTensor(
        ["events"], torch.randint(20, (9,)), lengths=torch.tensor([4, 5])
    )
    out, events, embedded = model(bags, sequences)
    assert embedded.keys() != FEATURES
    (weight,) = model.module.compress.weights
    torch.testing.assert_close(
        out, weight @ torch.stack([embedded[name] for name in FEATURES], dim=1)
    )
    assert_same_distribution(weight, jm.LinearCompressEmbedding(3, 500).weights[0])
    direct = jm.BlockDiagonalSelfAttention(8, 2, max_seqlen=10)
    direct.load_state_dict(model.module.attention.state_dict())
    rows = model.module.sequences(sequences)["events"]
    assert torch.equal(events.values(), direct((rows.values(), rows.offsets()))[0])
    (out.square().sum() + events.values().square().sum()).backward()
    assert all(
        x.grad.any()
        for layer in (model.module.compress, model.module.attention)
        for x in layer.parameters()
    )
