"""JaggedPFFN, JaggedSeedPooling, JaggedInterFormer and JaggedKunlun: equal to the papers' formulas
for one user after another, with gradients."""

import copy
import dataclasses

import pytest
import torch

import jagged_modules as jm

from . import user_blocks

WIDTH, HEADS, FEATURES, USERS = 24, 3, 5, 4
LENGTHS = [9, 0, 1, 30]
# of results and gradients: those of a layer's stages, of which there are up to 50, add up
ROUNDINGS = 8
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
PFFN = WIDTH, HEADS, FEATURES, 7
POOL = WIDTH, HEADS, 6
STACK = WIDTH, HEADS, FEATURES


def interformer(layers=2, **fields):
    return jm.JaggedInterFormer(*STACK, layers, jm.InterFormerConfig(**fields))


def kunlun(layers=3, **fields):
    sizes = dict(num_seeds=6, num_tokens=2, rank=3)
    return jm.JaggedKunlun(*STACK, layers, jm.KunlunConfig(**sizes | fields))


LAYERS = {
    "pffn": lambda: jm.JaggedPFFN(*PFFN),
    "pffn-identity": lambda: jm.JaggedPFFN(*PFFN, "identity"),
    "pffn-scale": lambda: jm.JaggedPFFN(*PFFN, config=jm.GDPAConfig(scale=1 / 30)),
    "pma": lambda: jm.JaggedSeedPooling(*POOL),
    "hsp": lambda: jm.JaggedSeedPooling(*POOL, 2, rank=3),
    "pma-features": lambda: jm.JaggedSeedPooling(*POOL, num_features=FEATURES),
    "hsp-features": lambda: jm.JaggedSeedPooling(*POOL, 2, FEATURES, 3),
    "interformer": interformer,
    "interformer-window": lambda: interformer(window=3, num_recent=3, activation="identity"),
    "interformer-no-recent": lambda: interformer(1, num_recent=0, num_weights=9, rank=2),
    "kunlun": lambda: kunlun(window=2),
    "kunlun-all": lambda: kunlun(2, skip=False, max_seqlen=30, window=None, num_summary=2),
}
REFERENCES = {
    jm.JaggedPFFN: user_blocks.pffn,
    jm.JaggedSeedPooling: user_blocks.seed_pooling,
    jm.JaggedInterFormer: user_blocks.interformer,
    jm.JaggedKunlun: user_blocks.kunlun,
}


def is_pooling(layer):
    return isinstance(layer, jm.JaggedSeedPooling)


def make(name, dtype=torch.float64):
    """The layer, whose results for other events and features differ by much."""
    layer = LAYERS[name]().to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return layer


def inputs(name, dtype=torch.float64):
    features = [torch.randn(USERS, FEATURES, WIDTH, dtype=dtype)]
    return [torch.randn(sum(LENGTHS), WIDTH, dtype=dtype), *features * (name not in ("pma", "hsp"))]


def run(layer, x, *features, offsets=OFFSETS):
    """The results as a list of tensors."""
    out = layer((x, offsets), *features)
    if is_pooling(layer):
        return [out]
    return [out[0]] if isinstance(layer, jm.JaggedPFFN) else [out[0][0], out[1]]


def reference(layer, x, *features):
    results = []
    for b, rows in enumerate(x.split(LENGTHS)):
        out = REFERENCES[type(layer)](layer, rows, *(y[b] for y in features))
        results.append(out if isinstance(out, tuple) else (out,))
    first, *others = zip(*results)
    first = torch.stack(first) if is_pooling(layer) else torch.cat(first)
    return [first, *map(torch.stack, others)]


def step(function, layer, arguments, change=lambda x: x):
    """The results, and the gradients of inputs and parameters, for gradients of the results that
    are changed first."""
    leaves = [x.detach().requires_grad_() for x in arguments]
    out = function(layer, *leaves)
    torch.manual_seed(1)
    # in any of the dtypes without an error
    grads = [torch.randn(x.shape).bfloat16().double() for x in out]
    grads = [change(x).to(y) for x, y in zip(grads, out)]
    wanted = [*leaves, *layer.parameters()]
    return [*out, *torch.autograd.grad(out, wanted, grads)]


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients(name):
    layer, arguments = make(name), inputs(name)
    for x, y in zip(step(run, layer, arguments), step(reference, layer, arguments), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def rms(x):
    return x.double().square().mean().sqrt()


def assert_rounded(actual, name, layer, arguments, eps):
    """The results are those of float64, up to what ROUNDINGS times an independent error of `eps` in
    each input, parameter and gradient changes in them, which is measured in float64."""
    layer, arguments = copy.deepcopy(layer).double().cpu(), [x.double().cpu() for x in arguments]
    for module in layer.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = torch.finfo(torch.float32).eps  # torch's default where it computes in fp32
    exact = step(reference, layer, arguments)

    def changed(x):
        return x * (1 + eps * torch.randn_like(x))

    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(changed(parameter))
    other = step(reference, layer, [changed(x) for x in arguments], changed)
    for x, y, z in zip(actual, exact, other, strict=True):
        assert rms(x.cpu() - y) <= ROUNDINGS * rms(z - y), (name, rms(x.cpu() - y), rms(z - y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name, dtype):
    layer, arguments = make(name, dtype), inputs(name, dtype)
    actual = step(run, layer, arguments)
    assert all(x.dtype == dtype for x in actual)
    assert_rounded(actual, name, layer, arguments, torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("name", LAYERS)
def test_a_user_does_not_see_another(name):
    layer, (x, *features) = make(name), inputs(name)
    expected = run(layer, x, *features)
    poisoned = x.clone()
    poisoned[: LENGTHS[0]] = torch.nan
    for y in features:
        y[0] = torch.nan
    first, *others = run(layer, poisoned, *features)
    begin = 1 if is_pooling(layer) else LENGTHS[0]
    torch.testing.assert_close(first[begin:], expected[0][begin:], rtol=1e-12, atol=1e-12)
    for y, own in zip(others, expected[1:], strict=True):
        torch.testing.assert_close(y[1:], own[1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_meta_device_and_state(name):
    """A layer of the meta device gets the state of another."""
    layer, arguments = make(name), inputs(name)
    state = layer.state_dict()
    with torch.device("meta"):
        other = LAYERS[name]().double()
    other = other.to_empty(device="cpu")
    other.reset_parameters()
    assert all(x.isfinite().all() for x in other.parameters())
    other.load_state_dict(state)
    for x, y in zip(run(other, *arguments), run(layer, *arguments), strict=True):
        assert torch.equal(x, y)


STATE = {
    "interformer": [
        "compress.weights.0",
        "features_gate.linear1",
        "features_gate.linear2",
        "pool.seeds",
        "pool.kv_proj",
        "pool.out_proj",
        "history_gate.linear1",
        "history_gate.linear2",
        "interaction.compress.weights.0",
        "interaction.products_norm",
        "interaction.linear1",
        "interaction.linear2",
        "interaction.norm",
        "pffn.block.attention",
        "pffn.block.norm",
        "pffn.compress.weights.0",
        "pffn.norm",
        "attention.attention",
        "attention.norm",
    ],
    "kunlun": [
        "compress.weights.0",
        "linear1",
        "linear2",
        "pool.attention",
        "pool.compress.weights.0",
        "pool.mix",
        "pffn.block.attention",
        "pffn.block.norm",
        "pffn.compress.weights.0",
        "pffn.norm",
        "interaction.compress.weights.0",
        "interaction.products_norm",
        "interaction.linear1",
        "interaction.linear2",
        "interaction.norm",
    ],
}


@pytest.mark.parametrize("name", STATE)
def test_names_of_the_state(name):
    """Checkpoints of today load tomorrow."""
    keys = [x.removeprefix("layers.0.") for x in make(name).state_dict() if x[7:9] == "0."]
    found = {y for y in STATE[name] for x in keys if x == y or x.startswith(f"{y}.")}
    assert found == set(STATE[name])
    assert all(any(x == y or x.startswith(f"{y}.") for y in STATE[name]) for x in keys)


def test_layers_that_skip():
    """Odd layers have no pooling and no feed-forward network, even ones no self-attention."""
    first, second, third = kunlun().layers
    assert first.pool and first.pffn and not first.attention
    assert second.attention and not second.pool and not second.pffn
    assert third.pool and not third.attention
    assert all(x.pool and x.pffn and x.attention for x in kunlun(skip=False).layers)


def test_no_row_is_padded_and_no_user_copied():
    """With one long history, no tensor has the size of a padded one."""
    lengths = torch.tensor([300, *[1] * 40])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    longest, largest = len(lengths) * 300 * WIDTH, 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return out

    for layer in (interformer(window=3), kunlun(window=3)):
        features = torch.randn(len(lengths), FEATURES, WIDTH)
        with Sizes():
            layer((torch.randn(int(lengths.sum()), WIDTH), offsets), features)
    assert largest < longest


@pytest.mark.parametrize("name", ["pffn", "interformer", "kunlun"])
def test_containers(name):
    layer, (x, features) = make(name), inputs(name)
    torchrec = pytest.importorskip("torchrec")
    (expected, *_) = run(layer, x, features)
    keyed = torchrec.KeyedJaggedTensor(["a"], x, offsets=OFFSETS)
    for history in (jm.Jagged(x, OFFSETS), torchrec.JaggedTensor(x, offsets=OFFSETS), keyed):
        out = layer(history, features)
        out = out if name == "pffn" else out[0]
        assert type(out) is type(history)
        values = out.values if isinstance(out, jm.Jagged) else out.values()
        torch.testing.assert_close(values, expected)


def test_dropout_is_of_training():
    layer, arguments = make("interformer"), inputs("interformer")
    dropping = interformer(dropout=0.5).double()
    dropping.load_state_dict(layer.state_dict())
    assert not torch.equal(run(dropping, *arguments)[0], run(layer, *arguments)[0])
    assert torch.equal(run(dropping.eval(), *arguments)[0], run(layer, *arguments)[0])


def test_rows_behind_the_end(only_the_device_knows):
    """Rows that belong to no user are not read, and are 0 in the results."""
    for name in ("pffn", "hsp", "interformer-window", "kunlun"):
        layer, (x, *features) = make(name), inputs(name)
        expected = run(layer, x, *features)
        tailed = torch.cat([x, x.new_full((5, WIDTH), torch.nan)])
        first, *others = run(layer, tailed, *features, offsets=OFFSETS.clone())
        if not is_pooling(layer):
            assert not first[len(x) :].any()
            first = first[: len(x)]
        for y, own in zip([first, *others], expected, strict=True):
            torch.testing.assert_close(y, own)


X, Y = (torch.randn(sum(LENGTHS), WIDTH), OFFSETS), torch.randn(USERS, FEATURES, WIDTH)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: jm.JaggedPFFN(*PFFN)(X, Y[:2]), ValueError, "features must have shape"),
        (lambda: jm.JaggedPFFN(*PFFN)(X, [1]), TypeError, "features must be a torch.Tensor"),
        (lambda: jm.JaggedPFFN(*PFFN)(X, Y.double()), ValueError, "features must have the layer's"),
        (lambda: jm.JaggedPFFN(*PFFN)(X, Y.to_sparse()), ValueError, "must be a dense tensor"),
        (
            lambda: jm.JaggedPFFN(*PFFN, config=jm.GDPAConfig(num_weights=2)),
            ValueError,
            "config.num_weights must be 0",
        ),
        (lambda: jm.JaggedSeedPooling(*POOL)(X, Y), ValueError, "features must be None"),
        (
            lambda: jm.JaggedSeedPooling(*POOL, num_features=FEATURES)(X),
            TypeError,
            "features must be a torch.Tensor",
        ),
        (lambda: jm.JaggedSeedPooling(WIDTH, HEADS, 0), ValueError, "num_seeds must be"),
        (lambda: jm.JaggedInterFormer(-1, *STACK[1:]), ValueError, "embedding_dim must be"),
        (lambda: jm.JaggedKunlun("32", *STACK[1:]), TypeError, "embedding_dim must be"),
        (lambda: jm.JaggedInterFormer(*STACK, 0), ValueError, "num_layers must be"),
        (lambda: jm.JaggedInterFormer(*STACK, config=3), TypeError, "config must be"),
        (lambda: jm.JaggedKunlun(*STACK, config=3), TypeError, "config must be"),
        (
            lambda: interformer()((X[0][:, :5], OFFSETS), Y),
            ValueError,
            "history's values must have",
        ),
        (lambda: kunlun()(X, Y[:, :2]), ValueError, "features must have shape"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("config", [jm.InterFormerConfig, jm.KunlunConfig])
def test_errors_of_configs(config):
    wrong = dict(activation="gelu_none", dropout=2, skip=1)
    for field in dataclasses.fields(config):
        with pytest.raises((TypeError, ValueError), match=field.name):
            config(**{field.name: wrong.get(field.name, -1)})
