"""JaggedDINAttention, against the modules of a padded model."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import jagged_modules as jm

OFFSETS, CANDIDATES = torch.tensor([0, 2, 2, 7]), torch.tensor([2, 0, 1, 2, 0])
E, ROWS = 8, 7


class Dice(nn.Module):
    """The published activation, on rows."""

    def __init__(self, size, **norm):
        super().__init__()
        self.bn = nn.BatchNorm1d(size, **norm)
        self.alpha = nn.Parameter(torch.rand(size))

    def forward(self, x):
        p = torch.sigmoid(self.bn(x))
        return x * (p + self.alpha * (1 - p))


def padded_model(mlp, targets, history, normalize=None):
    """The result for each target, with a row of features for each pair."""
    rows = [(i, j) for i, user in enumerate(CANDIDATES.tolist())
            for j in range(*OFFSETS[user : user + 2].tolist())]  # fmt: skip
    i, j = torch.tensor(rows).unbind(1)
    q, k = targets[i, 0], history[j]
    s = mlp(torch.cat([q, k, q - k, q * k], 1)).squeeze(1)
    out = torch.zeros(len(targets), E)
    for target in range(len(targets)):
        p = s[i == target]
        p = p.softmax(0) if normalize else p
        out[target] = p @ history[j[i == target]]
    return out[:, None]


def randomize(module):
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if x.is_floating_point():
            x.data.copy_(torch.rand(x.shape) + 0.5 if "var" in name else 0.3 * torch.randn(x.shape))
    return module


def published(kind):
    """The attention MLP of a library, by this test's own modules of the same names and order."""
    width = 4 * E
    if kind == "TorchEasyRec":  # an MLP of pairs of a linear and an activation, and a linear
        norm = dict(eps=1e-5)
        perceptrons = [
            nn.Sequential(nn.Linear(before, size), Dice(size, **norm))
            for before, size in ((width, 6), (6, 5))
        ]
        return nn.ModuleList([nn.ModuleList(perceptrons), nn.Linear(5, 1)])
    if kind == "DeepCTR-Torch":  # linears before activations, and dropout
        mlp = nn.Module()
        mlp.dropout = nn.Dropout(0.5)
        mlp.linears = nn.ModuleList([nn.Linear(width, 6), nn.Linear(6, 5)])
        mlp.activation_layers = nn.ModuleList([Dice(6, eps=1e-9), Dice(5, eps=1e-9)])
        return nn.ModuleList([mlp, nn.Linear(5, 1)])
    norm = dict(affine=False, eps=1e-9, momentum=0.01)  # FuxiCTR
    return nn.Sequential(nn.Linear(width, 6), Dice(6, **norm), nn.Linear(6, 1))


def in_order(mlp):
    """What the library computes: each linear, and the activation behind it."""
    parts = [x for x in mlp.modules() if isinstance(x, (nn.Linear, Dice))]
    linears = [x for x in parts if isinstance(x, nn.Linear)]
    others = [x for x in parts if isinstance(x, Dice)]
    return nn.Sequential(*(x for pair in zip(linears, others) for x in pair), linears[-1])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["TorchEasyRec", "DeepCTR-Torch", "FuxiCTR"])
def test_weights_of_other_libraries(kind, training):
    mlp = randomize(published(kind))
    layer = jm.JaggedDINAttention.from_torch(mlp, normalize="softmax").train(training)
    reference = in_order(mlp).train(training)
    targets = torch.randn(5, 1, E, requires_grad=True)
    history = torch.randn(ROWS, E, requires_grad=True)
    out = layer(targets, (history, OFFSETS), CANDIDATES)
    expected = padded_model(reference, targets, history, "softmax")
    torch.testing.assert_close(out, expected)
    do = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad(out, (targets, history), do),
        torch.autograd.grad(expected, (targets, history), do),
    ):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert_same_statistics(layer, reference)


def assert_same_statistics(layer, reference):
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        ours = [getattr(x.norm, name) for x in layer.units]
        theirs = [getattr(x.bn, name) for x in reference if isinstance(x, Dice)]
        torch.testing.assert_close(ours, theirs)


def norms_of(module):
    return [x for x in module.modules() if isinstance(x, nn.BatchNorm1d)]


def test_frozen_norms():
    """Norms in eval mode in a layer in training, as where pretrained statistics are kept."""
    mlp = randomize(published("TorchEasyRec"))
    layer, reference = jm.JaggedDINAttention.from_torch(mlp), in_order(mlp)
    targets, history = torch.randn(5, 1, E), torch.randn(ROWS, E)
    for norm in norms_of(layer) + norms_of(reference):
        norm.eval()
    out = layer(targets, (history, OFFSETS), CANDIDATES)
    torch.testing.assert_close(out, padded_model(reference, targets, history))
    assert_same_statistics(layer, reference)


def test_statistics_that_are_means_of_all_batches():
    """As torch.optim.swa_utils.update_bn sets norms."""
    mlp = randomize(published("TorchEasyRec"))
    layer, reference = jm.JaggedDINAttention.from_torch(mlp), in_order(mlp)
    for norm in norms_of(layer) + norms_of(reference):
        norm.reset_running_stats()
        norm.momentum = None
    for _ in range(3):
        targets, history = torch.randn(5, 1, E), torch.randn(ROWS, E)
        layer(targets, (history, OFFSETS), CANDIDATES)
        padded_model(reference, targets, history)
        assert_same_statistics(layer, reference)


def test_norms_that_a_layer_does_not_compute():
    layer = jm.JaggedDINAttention(E, (6, 5), "dice")
    inputs = torch.randn(5, 1, E), (torch.randn(ROWS, E), OFFSETS), CANDIDATES
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    with pytest.raises(TypeError, match=r"norms must be torch.nn.BatchNorm1d, .*SyncBatchNorm"):
        synchronised(*inputs)
    assert synchronised.eval()(*inputs).shape == (5, 1, E)
    layer = jm.JaggedDINAttention(E, (6, 5), "dice")
    layer.units[1].norm.eval()
    with pytest.raises(ValueError, match=r"norms must be all in .* eval mode, got \[True, False\]"):
        layer(*inputs)


def test_a_layer_has_the_mode_of_its_mlp():
    """Dice's statistics are those of the batch in training alone. A new list is in training."""
    mlp = randomize(published("FuxiCTR")).eval().requires_grad_(False)
    layer = jm.JaggedDINAttention.from_torch(nn.ModuleList([mlp]))
    targets, history = torch.randn(5, 1, E), torch.randn(ROWS, E)
    out = layer(targets, (history, OFFSETS), CANDIDATES)
    torch.testing.assert_close(out, padded_model(mlp, targets, history))
    assert not any(x.requires_grad for x in layer.parameters())
    trained = jm.JaggedDINAttention.from_torch(mlp.train().requires_grad_(True))
    assert trained.training and all(x.requires_grad for x in trained.parameters())


@pytest.mark.parametrize("shared", [True, False])
def test_slopes_of_prelu(shared):
    def prelu(size):
        return nn.PReLU(1 if shared else size)

    mlp = nn.Sequential(nn.Linear(32, 6), prelu(6), nn.Linear(6, 5), prelu(5), nn.Linear(5, 1))
    layer = jm.JaggedDINAttention.from_torch(randomize(mlp))
    targets, history = torch.randn(5, 1, E), torch.randn(ROWS, E)
    out = layer(targets, (history, OFFSETS), CANDIDATES)
    torch.testing.assert_close(out, padded_model(mlp, targets, history))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(module):
    module.register_forward_hook(lambda module, given, out: 2 * out)
    return module


@pytest.mark.parametrize(
    "mlp, message",
    [
        (nn.Linear(32, 1), "two or more linears"),
        (nn.Sequential(nn.Linear(32, 4), nn.Tanh(), nn.Linear(4, 1)), "one activation"),
        (nn.Sequential(nn.Linear(32, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)), "but the"),
        (nn.Sequential(nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 2)), "to 1, got linears"),
        (nn.Sequential(nn.Linear(32, 4, bias=False), nn.ReLU(), nn.Linear(4, 1)), "biases"),
        (nn.Sequential(nn.Linear(32, 4), nn.ReLU(), Doubled(4, 1)), "forward of an nn.Linear"),
        (nn.Sequential(nn.Linear(32, 4), hooked(nn.ReLU()), nn.Linear(4, 1)), "no part hooks"),
    ],
)
def test_modules_that_are_not_an_attention_mlp(mlp, message):
    with pytest.raises(ValueError, match=message):
        jm.JaggedDINAttention.from_torch(mlp)


@pytest.mark.parametrize("activation", ["sigmoid", "dice"])
def test_cached_histories(activation):
    layer = jm.JaggedDINAttention(E, (6, 5), activation).eval()
    history = torch.randn(ROWS, E)
    targets = torch.randn(5, 2, E)
    expected = layer(targets, (history, OFFSETS), CANDIDATES)
    cache = layer.cache((history, OFFSETS))
    assert cache.layers[0].values.shape == (ROWS, 1, E + 6)
    torch.testing.assert_close(layer.score(targets, cache, CANDIDATES), expected)
    first = layer.cache((history[[0, 2, 3, 4]], torch.tensor([0, 1, 1, 4])))
    _, new = layer.append((history[[1, 5, 6]], torch.tensor([0, 1, 1, 3])), first)
    torch.testing.assert_close(layer.score(targets, first.append(new), CANDIDATES), expected)
    selected = layer.score(targets[:1], cache.select([2]), torch.tensor([0]))
    torch.testing.assert_close(selected, expected[:1])


def test_a_mask():
    """In calls, of cached histories, in graphs and programs, and with weights of a trained MLP."""
    mask = jm.AttentionMask(window=(4, 1), recent_history=4)
    layer = jm.JaggedDINAttention(E, (6, 5), "silu", mask=mask)
    targets, history = torch.randn(5, 2, E), torch.randn(ROWS, E)
    inputs = targets, (history, OFFSETS), CANDIDATES
    linears = list(layer.linears)
    parameters = [x.weight for x in linears], [x.bias for x in linears]
    given = targets, history, history, CANDIDATES, OFFSETS, *parameters
    options = dict(activation="silu", implementation="reference")
    expected = jm.functional.din_attention(*given, mask=mask, **options)
    assert not torch.allclose(expected, jm.functional.din_attention(*given, **options))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    exported = torch.export.export(layer, inputs).module()
    mlp = nn.Sequential(linears[0], nn.SiLU(), linears[1], nn.SiLU(), linears[2])
    loaded = jm.JaggedDINAttention.from_torch(mlp, mask=mask)
    for call in (layer, compiled, exported, loaded):
        torch.testing.assert_close(call(*inputs), expected)
    cache = layer.cache((history, OFFSETS))
    torch.testing.assert_close(layer.score(targets, cache, CANDIDATES), expected)


def test_forms_of_targets():
    layer = jm.JaggedDINAttention(E, (6,), normalize="softmax")
    history = jm.Jagged(torch.randn(ROWS, E), OFFSETS)
    targets = torch.randn(3, 2, E)
    dense = layer(targets, history)
    index = torch.tensor([0, 1, 2])
    torch.testing.assert_close(layer(targets, history, index), dense)
    jagged = layer(jm.Jagged(targets.flatten(0, 1), torch.tensor([0, 2, 4, 6])), history)
    torch.testing.assert_close(jagged.values, dense.flatten(0, 1))
    assert not dense[1].any()  # no events


def test_parameters_are_initialised_after_to_empty():
    layer = jm.JaggedDINAttention(E, (6,), "dice", device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    (units,) = layer.units
    assert not units.slope.any() and not units.norm.running_mean.any()
    assert (units.norm.running_var == 1).all()


def test_state_is_saved_and_loaded():
    layer, other = (jm.JaggedDINAttention(E, (6, 5), "dice", affine=True) for _ in range(2))
    targets, history = torch.randn(5, 1, E), (torch.randn(ROWS, E), OFFSETS)
    layer(targets, history, CANDIDATES)  # changes running statistics
    other.load_state_dict(layer.state_dict())
    a, b = (x.eval()(targets, history, CANDIDATES) for x in (layer, other))
    assert torch.equal(a, b)


@pytest.mark.parametrize("activation", ["relu", "dice"])
def test_compiled_and_exported(activation):
    layer = jm.JaggedDINAttention(E, (6, 5), activation)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = torch.randn(5, 1, E), (torch.randn(ROWS, E), OFFSETS), CANDIDATES
    out = compiled(*inputs)
    torch.testing.assert_close(out, layer(*inputs))
    out.sum().backward()
    exported = torch.export.export(layer.eval(), inputs).module()
    torch.testing.assert_close(exported(*inputs), layer(*inputs))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(hidden=()), "hidden must be a tuple"),
        (dict(hidden=(0,)), "hidden must be at least 1"),
        (dict(activation="gelu"), "activation must be one of"),
        (dict(normalize="mean"), "normalize must be"),
        (dict(features=("x",)), "features must be"),
        (dict(eps=-1), "eps must be"),
        (dict(mask="causal"), "mask must be an AttentionMask"),
        (dict(dtype=torch.int8), "dtype must be"),
    ],
)
def test_errors_of_the_constructor(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jm.JaggedDINAttention(**(dict(embedding_dim=E) | change))


@pytest.mark.parametrize(
    "change",
    [
        lambda linears: linears[1].register_forward_hook(lambda *_: None),
        lambda linears: prune.l1_unstructured(linears[0], "weight", 0.5),
        lambda linears: setattr(linears[0], "forward", lambda x: x),
        lambda linears: linears.append(Doubled(linears.pop(-1).in_features, 1)),
    ],
    ids=["hook", "prune", "forward", "subclass"],
)
def test_linears_that_must_be_called_are_errors(change):
    layer = jm.JaggedDINAttention(E, (6,))
    change(layer.linears)
    inputs = torch.randn(5, 1, E), (torch.randn(ROWS, E), OFFSETS), CANDIDATES
    with pytest.raises(TypeError, match="without hooks or a forward of their own"):
        layer(*inputs)


def test_a_parametrised_linear_computes_its_weight():
    layer = jm.JaggedDINAttention(E, (6,))
    inputs = torch.randn(5, 1, E), (torch.randn(ROWS, E), OFFSETS), CANDIDATES
    expected = layer(*inputs)
    nn.utils.parametrizations.weight_norm(layer.linears[0])
    torch.testing.assert_close(layer(*inputs), expected)
    layer.linears[0].parametrizations.weight.original0.data *= 2
    assert not torch.allclose(layer(*inputs), expected)


def test_errors_of_the_call():
    layer = jm.JaggedDINAttention(E, (6,))
    history = torch.randn(ROWS, E), OFFSETS
    with pytest.raises(ValueError, match="targets must have shape"):
        layer(torch.randn(5, 1, E + 1), history, CANDIDATES)
    with pytest.raises(ValueError, match="history's values must have shape"):
        layer(torch.randn(5, 1, E), (torch.randn(ROWS, E + 1), OFFSETS), CANDIDATES)
    masked = jm.JaggedDINAttention(E, (6,), mask=jm.AttentionMask(num_targets=torch.tensor([1, 0])))
    with pytest.raises(ValueError, match=r"mask.num_targets must have shape \[B\] = \[3\]"):
        masked(torch.randn(5, 1, E), history, CANDIDATES)
    with pytest.raises(ValueError, match="cache's values must have shape"):
        layer.score(torch.randn(3, 1, E), jm.JaggedDINAttention(E, (5,)).cache(history))
    with jm.batch_invariant(True), pytest.raises(ValueError, match="no batch-invariant form"):
        layer(torch.randn(5, 1, E), history, CANDIDATES)
