"""BlockDiagonalSelfAttention on the CPU."""

import copy
import pickle

import pytest
import torch

import jagged_modules as jm

from .block_attention_cases import blockwise_attention, make_rotary


def make_layer(rotary="qk", **options):
    return jm.BlockDiagonalSelfAttention(
        12, 3, block_size=16, rotary=rotary, max_seqlen=100, **options
    )


@pytest.mark.parametrize("rotary", ["qk", "qkv", None])
def test_layer_equals_the_loop(rotary, offsets_of):
    layer = make_layer(rotary).double()
    offsets = offsets_of([40, 0, 7, 16])
    x = torch.randn(63, 12, dtype=torch.float64)

    def loop(x):
        q, k, v = (
            projected.unflatten(1, (3, 4)) for projected in layer.qkv_proj(x).chunk(3, dim=1)
        )
        return layer.out_proj(
            blockwise_attention(q, k, v, offsets, 16, rotary=make_rotary(rotary, 4)).flatten(1)
        )

    results, grad = [], torch.randn(63, 12, dtype=torch.float64)
    for run in (lambda x: layer((x, offsets))[0], loop):
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        results.append([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], grad)])
    torch.testing.assert_close(*results)


def test_containers(container, offsets_of):
    layer, values, offsets = make_layer(), torch.randn(51, 12), offsets_of([40, 0, 11])
    x = container(values, offsets)
    out = layer(x)
    assert type(out) is type(x)
    assert torch.equal(jm.Jagged.wrap(out).values, layer((values, offsets))[0])
    assert torch.equal(jm.Jagged.wrap(out).offsets, offsets)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_rows(lengths, offsets_of):
    layer, x = make_layer(), torch.zeros(0, 12, requires_grad=True)
    values, _ = layer((x, offsets_of(lengths)))
    values.sum().backward()
    assert values.shape == x.grad.shape == (0, 12)


def test_embedding_collection_outputs():
    torchrec = pytest.importorskip("torchrec")
    table = torchrec.EmbeddingConfig(
        name="table", embedding_dim=12, num_embeddings=50, feature_names=["history"]
    )
    collection = torchrec.EmbeddingCollection(tables=[table])
    ids = torchrec.KeyedJaggedTensor(
        ["history"], torch.randint(50, (30,)), lengths=torch.tensor([20, 0, 10], dtype=torch.int32)
    )
    out = make_layer()(collection(ids)["history"])
    assert isinstance(out, torchrec.JaggedTensor) and out.lengths().tolist() == [20, 0, 10]
    out.values().square().sum().backward()
    (weight,) = collection.parameters()
    assert weight.grad.abs().sum() > 0


def test_state_dict_round_trip_without_the_tables(offsets_of):
    layer, other, x = make_layer(), make_layer(), (torch.randn(30, 12), offsets_of([30]))
    assert list(layer.state_dict()) == [
        f"{name}_proj.{kind}" for name in ("qkv", "out") for kind in ("weight", "bias")
    ]
    assert not torch.equal(layer(x)[0], other(x)[0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], other(x)[0])
    make_layer(None).load_state_dict(layer.state_dict())


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["deepcopy", "pickle"],
)
def test_copies(clone, offsets_of):
    layer, x = make_layer(), (torch.randn(30, 12), offsets_of([30]))
    twin = clone(layer)
    assert torch.equal(twin(x)[0], layer(x)[0])
    twin(x)[0].sum().backward()
    assert layer.qkv_proj.weight.grad is None and twin.qkv_proj.weight.grad is not None


def assert_fresh(layer):
    """Tables are right and parameters those of a new layer, initialised by the same seed."""
    torch.manual_seed(5)
    expected = make_layer()
    for tensors in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(x, tensors)()) for x in (layer, expected))
        assert ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in theirs
        )


def test_meta_tensors_are_materialised_by_reset_parameters():
    layer = make_layer(device="meta")
    assert all(x.is_meta for x in layer.parameters()) and not any(
        x.is_meta for x in layer.buffers()
    )
    layer.to_empty(device="cpu")
    for x in (*layer.parameters(), *layer.buffers()):
        torch.nn.init.constant_(x, float("nan"))
    torch.manual_seed(5)
    layer.reset_parameters()
    assert_fresh(layer)


def test_meta_tensors_are_materialised_by_torchrec():
    parallel = pytest.importorskip("torchrec.distributed.model_parallel").DistributedModelParallel
    layer, wrapper = make_layer(device="meta"), parallel.__new__(parallel)
    torch.nn.Module.__init__(wrapper)
    wrapper.device = torch.device("cpu")
    torch.manual_seed(5)
    wrapper._init_parameters(layer)
    assert_fresh(layer)


def test_shapes_on_the_meta_device():
    x = torch.empty(50, 12, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    assert make_layer(device="meta")(x)[0].shape == (50, 12)


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "to", "fp32-again"])
def test_tables_stay_fp32(convert, offsets_of):
    layer, tables = make_layer(), [x.clone() for x in make_layer().buffers()]
    if convert == "to":
        layer = torch.nn.Sequential(layer).to("cpu", torch.bfloat16)[0]
    else:
        layer = layer.bfloat16().float() if convert == "fp32-again" else getattr(layer, convert)()
    assert len(tables) == 2
    assert all(
        x.dtype == torch.float32 and torch.equal(x, table)
        for x, table in zip(layer.buffers(), tables, strict=True)
    )
    dtype = layer.out_proj.weight.dtype
    assert layer((torch.randn(30, 12, dtype=dtype), offsets_of([30])))[0].dtype == dtype


@pytest.mark.parametrize("rotary", ["qk", "qkv", None])
def test_layer_keeps_x_q_k_v_and_the_attended_rows(
    rotary, saved_tensors, tensor_sizes, one_thread, offsets_of
):
    """These are kept for the backward. Nothing larger than q, k and v together is allocated: a step
    is linear in the number of rows."""
    layer = jm.BlockDiagonalSelfAttention(12, 3, block_size=16, rotary=rotary, max_seqlen=4000)
    x = torch.randn(4000, 12, requires_grad=True)
    with tensor_sizes() as sizes:
        with saved_tensors() as saved:
            out, _ = layer((x, offsets_of([4000])))
        out.sum().backward()
    # in "qk", v stays a view of the packed projection
    kept = {None: [1, 1, 3], "qk": [1, 1, 1, 1, 3], "qkv": [1, 1, 1, 1, 1]}[rotary]
    assert sorted(size for size in saved.storages.values() if size >= x.numel()) == [
        number * x.numel() for number in kept
    ]
    assert max(sizes.made) == 3 * x.numel()


@pytest.mark.parametrize("rotary", ["qk", "qkv", None])
def test_training_step_changes_every_parameter(rotary, offsets_of):
    layer = make_layer(rotary)
    before = copy.deepcopy(layer.state_dict())
    layer((torch.randn(30, 12), offsets_of([10, 20])))[0].square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert [name for name, x in layer.state_dict().items() if torch.equal(x, before[name])] == []


def test_traced_by_torchrec_as_a_leaf(offsets_of):
    tracer = pytest.importorskip("torchrec.fx").Tracer(leaf_modules=["BlockDiagonalSelfAttention"])
    model = torch.nn.Sequential(make_layer())
    traced = torch.fx.GraphModule(model, tracer.trace(model))
    x = (torch.randn(30, 12), offsets_of([30]))
    assert torch.equal(traced(x)[0], model(x)[0])


def test_extra_repr():
    assert "embedding_dim=12, num_heads=3, block_size=16, rotary='qk', max_seqlen=100" in repr(
        make_layer()
    )


BAD_LAYERS = [
    (
        dict(embedding_dim=10, num_heads=4),
        ValueError,
        "embedding_dim must be a multiple of num_heads, got 10 and 4",
    ),
    (dict(embedding_dim=8, num_heads=0), ValueError, "num_heads must be at least 1, got 0"),
    (dict(embedding_dim=8.0, num_heads=1), TypeError, "embedding_dim must be an int, got float"),
    (
        dict(embedding_dim=1024, num_heads=2),
        ValueError,
        "embedding_dim / num_heads must be at most 256, got 512",
    ),
    (
        dict(embedding_dim=10, num_heads=2),
        ValueError,
        "embedding_dim / num_heads must be even with rotary, got 10 and 2",
    ),
    (dict(block_size=20), ValueError, r"block_size must be one of \(16, 32, 64, 128\), got 20"),
    (dict(block_size=None), TypeError, "block_size must be an int, got NoneType"),
    (dict(rotary="v"), ValueError, 'rotary must be "qk", "qkv" or None, got \'v\''),
    (dict(rotary=True), ValueError, 'rotary must be "qk", "qkv" or None, got True'),
    (dict(max_seqlen=0), ValueError, "max_seqlen must be at least 1, got 0"),
    (dict(max_seqlen=None), TypeError, "max_seqlen must be an int, got NoneType"),
]


@pytest.mark.parametrize(
    "arguments, error, message", BAD_LAYERS, ids=[message[:40] for _, _, message in BAD_LAYERS]
)
def test_bad_constructor(arguments, error, message):
    with pytest.raises(error, match=message):
        jm.BlockDiagonalSelfAttention(**(dict(embedding_dim=12, num_heads=3) | arguments))


def test_odd_heads_without_rotary(offsets_of):
    assert jm.BlockDiagonalSelfAttention(10, 2, rotary=None)((torch.randn(7, 10), offsets_of([7])))[
        0
    ].shape == (7, 10)


BAD_FORWARDS = [
    (torch.randn(5, 12), TypeError, "x must be a JaggedTensor.*got Tensor"),
    (
        (torch.randn(5, 12).double(), torch.tensor([0, 5])),
        ValueError,
        "x's values must have the layer's dtype, torch.float32, got",
    ),
    (
        (torch.randn(5, 11), torch.tensor([0, 5])),
        ValueError,
        r"x's values must have shape \[L, 12\], got \[5, 11\]",
    ),
    (
        (torch.randn(5, 1, 12), torch.tensor([0, 5])),
        ValueError,
        r"x's values must have shape \[L, 12\], got \[5, 1, 12\]",
    ),
    (
        (torch.randn(5, 12), torch.tensor([0, 4])),
        ValueError,
        "offsets must end at the number of rows, 5, got 4",
    ),
    (
        (torch.randn(101, 12), torch.tensor([0, 101])),
        ValueError,
        "x's offsets must have segments of at most max_seqlen = 100 rows, got 101",
    ),
]


@pytest.mark.parametrize(
    "x, error, message", BAD_FORWARDS, ids=[message[:40] for _, _, message in BAD_FORWARDS]
)
def test_bad_forward(x, error, message):
    with pytest.raises(error, match=message):
        make_layer()(x)


def test_without_rotary_no_segment_is_too_long(offsets_of):
    assert make_layer(None)((torch.randn(101, 12), offsets_of([101])))[0].shape == (101, 12)
