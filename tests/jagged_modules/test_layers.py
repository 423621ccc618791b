"""What holds for every layer: built on meta, with Linears replaced, fed by TorchRec's lazy results, in sharded models."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import jagged_modules as jm

WIDTH, HEADS = 64, 4
OFFSETS = torch.tensor([0, 20, 20, 50])
USERS = torch.tensor([2, 0, 2, 0])


def rows(count=50):
    return torch.randn(count, WIDTH), OFFSETS


def on_rows(layer):
    return layer(rows())[0]


def pooled(layer):
    return layer(rows())


def scored(stack):
    return torch.cat([stack.score((torch.randn(50, WIDTH), OFFSETS), stack.cache(rows()))[0], on_rows(stack)])


def on_candidates(layer):
    return layer(torch.randn(4, 2, WIDTH), rows(), USERS)


def compressed(layer):
    return layer(torch.randn(4, 30, WIDTH), torch.randn(3, 20, WIDTH), USERS)


def gdpa(**fields):
    return lambda device=None: jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(**fields), device=device)


HSTU = jm.HSTUConfig(scaling_seqlen=30)
LAYERS = {  # what builds the layer on a device, and what calls it
    "JaggedTargetAttention": (lambda device=None: jm.JaggedTargetAttention(WIDTH, HEADS, device=device), on_candidates),
    "JaggedGDPA": (gdpa(qk_norm=True), on_rows),
    "JaggedGDPA-seeds": (gdpa(num_seeds=8), pooled),
    "JaggedGDPA-weights": (gdpa(num_weights=8), on_rows),
    "GDPABlock": (lambda device=None: jm.GDPABlock(WIDTH, HEADS, device=device), on_rows),
    "HSTULayer": (lambda device=None: jm.HSTULayer(WIDTH, HEADS, HSTU, device=device), on_rows),
    "HSTUStack": (lambda device=None: jm.HSTUStack(WIDTH, HEADS, 2, HSTU, device=device), scored),
    "LinearCompressEmbedding": (lambda device=None: jm.LinearCompressEmbedding(30, 40, 20, device=device), compressed),
    "BlockDiagonalSelfAttention": (lambda device=None: jm.BlockDiagonalSelfAttention(WIDTH, HEADS, max_seqlen=99, device=device), on_rows),
    "BlockDiagonalSelfAttention-none": (lambda device=None: jm.BlockDiagonalSelfAttention(WIDTH, HEADS, 16, None, device=device), on_rows),
    "JaggedMLP": (lambda device=None: jm.JaggedMLP([WIDTH, 80, 40], "silu", device=device), on_rows),
}
every_layer = pytest.mark.parametrize("build, call", LAYERS.values(), ids=LAYERS)
WITH_LINEARS = {name: entry for name, entry in LAYERS.items() if name != "LinearCompressEmbedding"}
every_layer_with_linears = pytest.mark.parametrize("build, call", WITH_LINEARS.values(), ids=WITH_LINEARS)


def called(layer, call, seed=3):
    torch.manual_seed(seed)
    return call(layer)


# -- the meta device -------------------------------------------------------------------------------------------------------------


def reset_by_torchrec(layer):
    """As DistributedModelParallel does: parameters and buffers on meta module by module, reset where a module owns such parameters."""
    parallel = pytest.importorskip("torchrec.distributed.model_parallel").DistributedModelParallel
    wrapper = parallel.__new__(parallel)
    nn.Module.__init__(wrapper)
    wrapper.device = torch.device("cpu")
    wrapper._init_parameters(layer)
    return layer.to("cpu")


def reset_by_fsdp(layer):
    """As FullyShardedDataParallel does: every module that owns parameters or buffers is allocated and reset by itself."""
    for module in layer.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    return layer


def reset_at_once(layer):
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    return layer


def assert_same_distribution(x, expected):
    """Mean and standard deviation within six times their spread for so many elements."""
    assert x.shape == expected.shape and x.dtype == expected.dtype
    spread, slack = expected.std(), 6 / expected.numel() ** 0.5
    assert (x.mean() - expected.mean()).abs() <= slack * spread
    assert (x.std() - spread).abs() <= slack * spread


@pytest.mark.parametrize("materialise", [reset_by_torchrec, reset_by_fsdp, reset_at_once])
@every_layer
def test_a_layer_built_on_meta_equals_a_direct_build(build, call, materialise, poisoned_memory):
    layer = build("meta")
    assert all(x.is_meta for x in layer.parameters())
    layer, expected = materialise(layer), build()
    parameters, buffers = dict(expected.named_parameters()), dict(expected.named_buffers())
    assert dict(layer.named_parameters()).keys() == parameters.keys() and dict(layer.named_buffers()).keys() == buffers.keys()
    for name, x in layer.named_parameters():
        assert_same_distribution(x, parameters[name])
    assert all(torch.equal(x, buffers[name]) for name, x in layer.named_buffers())
    layer.load_state_dict(expected.state_dict())
    assert torch.equal(called(layer, call), called(expected, call))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_rotary_tables_are_on_the_layers_gpu(device):
    layer, expected = jm.BlockDiagonalSelfAttention(WIDTH, HEADS, max_seqlen=99, device=device), jm.BlockDiagonalSelfAttention(WIDTH, HEADS)
    layer = layer.to_empty(device="cuda") if device == "meta" else layer.to("cuda")
    layer.load_state_dict(expected.state_dict())
    assert all(x.is_cuda and x.dtype == torch.float32 for x in layer.buffers())
    values, offsets = rows()
    torch.testing.assert_close(layer((values.cuda(), offsets.cuda()))[0].cpu(), expected((values, offsets))[0])


# -- replaced Linears ------------------------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A Linear with a low-rank addition. It has none of a Linear's attributes."""

    def __init__(self, linear):
        super().__init__()
        self.base = linear
        self.down, self.up = nn.Linear(linear.in_features, 2, bias=False), nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def quantized(linear):
    plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    plain.load_state_dict(linear.state_dict())
    return quantize_dynamic(nn.Sequential(plain))[0]


def quantize_dynamic(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that quantisation moves to another package
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def linears(layer):
    return [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]


def replaced(layer, names, replace):
    layer = copy.deepcopy(layer)
    for name in names:
        parent, _, attribute = name.rpartition(".")
        setattr(layer.get_submodule(parent), attribute, replace(layer.get_submodule(name)))
    return layer


@every_layer_with_linears
def test_lora_instead_of_linears(build, call):
    """Each Linear alone is replaced, then all. The addition is part of the result and learns. Resetting reaches the wrapped Linear."""
    layer = build()
    names = linears(layer)
    expected = called(layer, call)
    assert names
    for chosen in (*([name] for name in names), names):
        adapted = replaced(layer, chosen, LoRA)
        out = called(adapted, call)
        assert out.shape == expected.shape and not torch.allclose(out, expected)
        out.square().sum().backward()
        for name in chosen:
            wrapper = adapted.get_submodule(name)
            assert wrapper.up.weight.grad.any() and wrapper.base.weight.grad.any()
            before = wrapper.base.weight.clone()
            adapted.reset_parameters()
            assert not torch.equal(wrapper.base.weight, before)


@every_layer_with_linears
def test_quantized_linears(build, call):
    layer = build().eval()
    with torch.no_grad():
        expected = called(layer, call)
        for chosen in (*([name] for name in linears(layer)), linears(layer)):
            out = called(replaced(layer, chosen, quantized), call)
            assert 0 < (out - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", WITH_LINEARS)
def test_dynamic_quantisation_of_a_layer(name):
    build, call = WITH_LINEARS[name]
    layer = build().eval()
    small = quantize_dynamic(layer)
    assert linears(small) == []
    with torch.no_grad():
        expected = called(layer, call)
        assert 0 < (called(small, call) - expected).norm() < 0.1 * expected.norm()


# -- TorchRec's lazy results -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, (_, call) in LAYERS.items() if call in (on_rows, pooled, scored)])
@pytest.mark.parametrize("kind", ["JaggedTensor", "KeyedJaggedTensor"])
def test_lazy_rows(kind, name):
    torchrec, types = pytest.importorskip("torchrec"), pytest.importorskip("torchrec.distributed.types")
    layer, (values, offsets) = LAYERS[name][0](), rows()
    x = {
        "JaggedTensor": torchrec.JaggedTensor(values, offsets=offsets),
        "KeyedJaggedTensor": torchrec.KeyedJaggedTensor(["a"], values, offsets=offsets),
    }[kind]
    results = [layer(given) for given in (types.LazyNoWait(x), x)]
    if name != "JaggedGDPA-seeds":
        assert [type(out) for out in results] == [type(x)] * 2
        results = [out.values() for out in results]
    assert torch.equal(*results)


def test_lazy_targets_and_candidates():
    torchrec, lazy = pytest.importorskip("torchrec"), pytest.importorskip("torchrec.distributed.types").LazyNoWait
    layer, history = jm.JaggedTargetAttention(WIDTH, HEADS), torchrec.JaggedTensor(*rows()[:1], offsets=OFFSETS)
    targets, dense = torchrec.JaggedTensor(torch.randn(50, WIDTH), offsets=OFFSETS), torch.randn(3, 2, WIDTH)
    assert torch.equal(layer(lazy(targets), lazy(history)).values(), layer(targets, history).values())
    assert torch.equal(layer(lazy(dense), lazy(history)), layer(dense, history))
    assert jm.CandidateIndex.from_jagged(lazy(targets)).host_counts.tolist() == [20, 0, 30]


def test_a_lazy_result_is_waited_for_once():
    torchrec, types = pytest.importorskip("torchrec"), pytest.importorskip("torchrec.distributed.types")
    waits = []

    class Lazy(types.LazyAwaitable):
        def _wait_impl(self):
            waits.append(self)
            return torchrec.JaggedTensor(rows()[0], offsets=OFFSETS)

    x = Lazy()
    for _ in range(2):
        jm.JaggedMLP([WIDTH, 8])(x)
    assert waits == [x]


# -- sharded models --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    return [out, values.grad, *(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)]


def jagged_tensors(model, values):
    return model(pytest.importorskip("torchrec").JaggedTensor(values, offsets=OFFSETS)).values()


STEPS = {
    "pair": lambda model, values: model((values, OFFSETS))[0],
    "Jagged": lambda model, values: model(jm.Jagged(values, OFFSETS, max_seqlen=30)).values,
    "by keyword": lambda model, values: model(x=jm.Jagged(values, OFFSETS)).values,
    "targets": lambda model, values: model(jm.Jagged(values, OFFSETS), torch.tensor([2, 0, 5])).values,
    "JaggedTensor": jagged_tensors,
    "score": lambda model, values: model.score(jm.Jagged(values, OFFSETS), model.cache(jm.Jagged(values, OFFSETS))).values,
}


@pytest.mark.parametrize("call", STEPS.values(), ids=STEPS)
def test_training_steps_of_a_sharded_hstu(one_process, call):
    """The backward needs whole parameters again. fully_shard sees from tensors in the layers' outputs when it does."""
    stack = jm.HSTUStack(WIDTH, HEADS, 2, HSTU)
    ours = training_step(sharded(stack, ["layers.0", "layers.1"]), call)
    torch.testing.assert_close(ours, training_step(stack, call))  # "score" adds the gradients of both uses of the rows in either order


@pytest.mark.parametrize("call", STEPS.values(), ids=STEPS)
def test_mixed_precision_of_a_sharded_hstu(one_process, call):
    """Rows and parameters are cast where a layer is called."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    stack = jm.HSTUStack(WIDTH, HEADS, 2, HSTU)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    out, *grads = training_step(sharded(stack, ["layers.0", "layers.1"], mp_policy=policy), call)
    expected, *_ = training_step(copy.deepcopy(stack).bfloat16(), lambda model, values: call(model, values.bfloat16()))
    assert torch.equal(out, expected) and all(grad.dtype == torch.float32 for grad in grads)


@pytest.mark.parametrize("call", [STEPS["pair"], STEPS["Jagged"]], ids=["pair", "Jagged"])
def test_sharded_layers_one_after_another(one_process, call):
    model = nn.Sequential(
        jm.GDPABlock(WIDTH, HEADS),
        jm.BlockDiagonalSelfAttention(WIDTH, HEADS, 16),
        jm.HSTULayer(WIDTH, HEADS, HSTU),
        jm.JaggedGDPA(WIDTH, HEADS),
        jm.JaggedMLP([WIDTH, 80, 40]),
    )
    ours = training_step(sharded(model, "01234"), call)
    assert all(torch.equal(x, y) for x, y in zip(ours, training_step(model, call), strict=True))


@torch.no_grad()
def test_an_hstu_under_fully_sharded_data_parallel(one_process):
    """Its parameters are whole only while a layer is called, which caching and scoring must do."""
    stack, x = jm.HSTUStack(WIDTH, HEADS, 2, HSTU), rows()
    expected, _ = stack.score(x, stack.cache(x))
    stack = sharded(stack, ["layers.0", "layers.1"])
    assert torch.equal(stack.score(x, stack.cache(x))[0], expected)


FEATURES = ["item", "price", "brand"]


class Ranker(nn.Module):
    """Compressed features of a bag collection, and a layer on the rows of a sequence collection; everything on the meta device."""

    def __init__(self, torchrec):
        super().__init__()
        sizes, meta = dict(embedding_dim=8, num_embeddings=20), torch.device("meta")
        bags = [torchrec.EmbeddingBagConfig(name=name, feature_names=[name], **sizes) for name in FEATURES]
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
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    model = Ranker(torchrec)
    kinds = dict(item="data_parallel", price="table_wise", brand="data_parallel", events="table_wise")
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in kinds.items()}
    topology = Topology(world_size=1, local_world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)

    bags = torchrec.KeyedJaggedTensor(FEATURES, torch.randint(20, (12,)), lengths=torch.tensor([1, 2, 1, 0, 3, 1, 1, 1, 2]))
    sequences = torchrec.KeyedJaggedTensor(["events"], torch.randint(20, (9,)), lengths=torch.tensor([4, 5]))
    out, events, embedded = model(bags, sequences)
    assert embedded.keys() != FEATURES
    (weight,) = model.module.compress.weights
    torch.testing.assert_close(out, weight @ torch.stack([embedded[name] for name in FEATURES], dim=1))
    assert_same_distribution(weight, jm.LinearCompressEmbedding(3, 500).weights[0])
    direct = jm.BlockDiagonalSelfAttention(8, 2, max_seqlen=10)
    direct.load_state_dict(model.module.attention.state_dict())
    rows = model.module.sequences(sequences)["events"]
    assert torch.equal(events.values(), direct((rows.values(), rows.offsets()))[0])
    (out.square().sum() + events.values().square().sum()).backward()
    assert all(x.grad.any() for layer in (model.module.compress, model.module.attention) for x in layer.parameters())
