"""Dropout of attention weights: which are dropped, on the CPU, and the layers' options."""

import math
from functools import partial

import accuracy
import pytest
import torch
from accuracy.dropout import dropout_numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS
from jagged_modules.dropout import Dropout, _philox

from .attention_cases import DTYPES, check, make_qkv, mask_of
from .graph_cases import compiled

SEED = torch.tensor(0x1234567890ABCDEF)
DROPOUT = dict(dropout_p=0.3, dropout_seed=SEED)
LENGTHS = [3, 0, 40, 20, 3, 20]


def attend(q, k, v, offsets, **options):
    return F.jagged_attention(q, k, v, offsets, **options, **DROPOUT)


def kept_weights(q_lengths, kv_lengths, heads, p, offsets_of, seed=SEED, **options):
    """Whether each weight is kept, `[H, Lq, longest]`, as the function shows it: with weights that
    are all 1 / keys, and a value for each place."""
    longest = max(kv_lengths)
    q, k = torch.zeros(sum(q_lengths), heads, 4), torch.zeros(sum(kv_lengths), heads, 4)
    v = torch.cat([torch.eye(longest)[:n] for n in kv_lengths])[:, None].expand(-1, heads, -1)
    offsets = offsets_of(q_lengths), offsets_of(kv_lengths)
    out = F.jagged_attention(q, k, v, *offsets, dropout_p=p, dropout_seed=seed, **options)
    return (out > 0).transpose(0, 1)


# -- the numbers -----------------------------------------------------------------------------------


def test_philox_gives_the_published_words():
    """Philox-2x32 with 7 rounds, from the known answers of Random123."""
    zero, ones = torch.tensor(0), torch.tensor(2**32 - 1)
    assert [int(x) for x in _philox(zero, zero, zero)] == [0x257A3673, 0xCD26BE2A]
    assert [int(x) for x in _philox(ones, ones, ones)] == [0xAB302C4D, 0x3DC9D239]


@pytest.mark.parametrize("seed", [0, -1, 0x1234567890ABCDEF, -(2**63)])
@pytest.mark.parametrize("rows, keys", [((0, 40), (0, 33)), ((5, 43), (9, 70)), ((16, 17), (8, 9))])
def test_each_number_has_its_formula(seed, rows, keys):
    seed, heads = torch.tensor(seed), torch.tensor([0, 5])
    start = torch.tensor([[0], [37], [2**33 + 5]])
    dropped = Dropout(0.25, seed).dropped(start, heads, slice(*rows), slice(*keys))
    i, j = torch.arange(*rows)[:, None], torch.arange(*keys)
    numbers = dropout_numbers(seed, heads[:, None, None], start[..., None, None], i, j)
    assert torch.equal(dropped, numbers < 0.25 * 2**16)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_weights_are_dropped_as_p_says(p, offsets_of):
    kept = kept_weights([400, 300], [256, 200], 4, p, offsets_of)
    kept = torch.cat([kept[:, :400].flatten(), kept[:, 400:, :200].flatten()]).double()
    deviation = math.sqrt(p * (1 - p) / len(kept))
    assert abs(float(kept.mean()) - (1 - p)) < 4 * deviation


def test_weights_are_dropped_independently(offsets_of):
    """Correlations of rows, of keys, of heads, of segments and of seeds, at all distances up to 40:
    each is 0 within the deviation of a mean of independent numbers."""
    p, rows = 0.4, 256
    kept = kept_weights([rows, rows], [rows, rows], 2, p, offsets_of).double()
    other = kept_weights([rows, rows], [rows, rows], 2, p, offsets_of, SEED + 1).double()
    signs = (kept - (1 - p)) / math.sqrt(p * (1 - p))
    others = (other - (1 - p)) / math.sqrt(p * (1 - p))

    def check_pair(x, y):
        assert abs(float((x * y).mean())) < 4.5 / math.sqrt(x.numel())

    for distance in range(1, 41):
        check_pair(signs[:, distance:], signs[:, :-distance])
        check_pair(signs[..., distance:], signs[..., :-distance])
        check_pair(signs[:, distance:, distance:], signs[:, :-distance, :-distance])
    check_pair(signs[0], signs[1])
    check_pair(signs[:, :rows], signs[:, rows:])
    check_pair(signs, others)


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_the_expected_result_is_that_without_dropout(activation, offsets_of):
    """Segments with equal rows drop weights independently."""
    repeats = 2000
    q, k, v = (x.repeat(repeats, 1, 1) for x in make_qkv(13, 13, dtype=torch.float64))
    offsets = offsets_of([13] * repeats)
    expected = F.jagged_attention(q[:13], k[:13], v[:13], offsets[:2], activation=activation)
    results = attend(q, k, v, offsets, activation=activation).unflatten(0, (repeats, 13))
    deviation = results.std(0) / math.sqrt(repeats)
    assert bool(((results.mean(0) - expected).abs() < 5 * deviation).all())


def test_the_reference_is_torch_with_the_same_weights_dropped(offsets_of):
    q, k, v = make_qkv(9, 9, dtype=torch.float64)
    kept = kept_weights([9], [9], 2, 0.3, offsets_of)
    options = dict(implementation="reference", **DROPOUT)
    out = F.jagged_attention(q, k, v, offsets_of([9]), **options)
    p = torch.softmax(torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(8), -1)
    p = p * kept / (1 - round(0.3 * 2**16) / 2**16)
    torch.testing.assert_close(out, torch.einsum("hij,jhd->ihd", p, v), rtol=1e-12, atol=1e-12)


# -- what a number follows from --------------------------------------------------------------------


def test_bits_follow_from_the_start_of_a_segment_and_places_in_it(offsets_of):
    kept = kept_weights([5, 40, 20], [5, 40, 20], 2, 0.3, offsets_of)
    other_lengths = kept_weights([5, 30, 30], [11, 25, 9], 2, 0.3, offsets_of)
    assert torch.equal(kept[:, 5:35, :25], other_lengths[:, 5:35, :25])
    moved = kept_weights([6, 40], [5, 40], 2, 0.3, offsets_of)
    assert not torch.equal(kept[:, 5:45], moved[:, 6:46])
    with jm.batch_invariant(True):
        kept, moved = (kept_weights([n, 40], [5, 40], 2, 0.3, offsets_of)[:, n:] for n in (5, 6))
    assert torch.equal(kept, moved)


def test_seeds_and_heads_differ(offsets_of):
    kept = kept_weights([40], [40], 2, 0.3, offsets_of)
    assert not torch.equal(kept[0], kept[1])
    for seed in (SEED + 1, SEED + 2**40):
        assert not torch.equal(kept, kept_weights([40], [40], 2, 0.3, offsets_of, seed))


def test_without_a_seed_torchs_generator_gives_one(offsets_of):
    q, k, v = make_qkv(40, 40)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results += [F.jagged_attention(q, k, v, offsets_of([40]), dropout_p=0.3) for _ in range(2)]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[4])


@pytest.mark.parametrize("p", [0, 0.0, 1e-7])
def test_nothing_is_dropped(p, offsets_of):
    q, k, v = make_qkv(40, 40)
    state = torch.get_rng_state()
    out = F.jagged_attention(q, k, v, offsets_of([40]), dropout_p=p)
    assert torch.equal(out, F.jagged_attention(q, k, v, offsets_of([40])))
    assert torch.equal(state, torch.get_rng_state())


def test_almost_everything_is_dropped(offsets_of):
    """p is rounded to 1 - 2^-16, not to 1."""
    kept = kept_weights([2000], [256], 2, 0.9999999, offsets_of).double()
    assert 1 <= float(kept.sum()) < 50  # 16 are expected


# -- the CPU path, against the model ---------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, implementation",
    [*((dtype, "auto") for dtype in DTYPES), ("fp64", "reference"), ("fp32", "reference")],
)
def test_forward_and_gradients(dtype, implementation, offsets_of):
    tensors = make_qkv(sum(LENGTHS), sum(LENGTHS), 4, 2, 8, 12, DTYPES[dtype])
    offsets = offsets_of(LENGTHS)
    accuracy.check(
        partial(attend, offsets=offsets, implementation=implementation),
        lambda *x: accuracy.attention(*x, offsets, **DROPOUT),
        dict(zip("qkv", tensors)),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, offsets_of):
    tensors = make_qkv(50, 62, 4, 2, dtype=torch.float64)
    scale = 1.0 if activation == "softmax" else torch.rand(3, dtype=torch.float64) + 0.1
    offsets = offsets_of([3, 40, 7]), offsets_of([41, 20, 1])
    check(*tensors, *offsets, activation=activation, output_scale=scale, **DROPOUT)


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("mask", ["causal", "window", "targets", "hstu", "semi-local"])
def test_masks(mask, activation, offsets_of):
    tensors = make_qkv(160, 160, dtype=torch.float64)
    offsets = offsets_of([20, 133, 7])
    options = dict(mask=mask_of(mask, [3, 5, 7]), activation=activation)
    check(*tensors, offsets, offsets, **options, **DROPOUT)


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("shared", ["q", "kv", "groups"])
def test_shared_operands(shared, activation, offsets_of):
    q_rows = 9 if shared == "q" else 62
    tensors = make_qkv(q_rows, 7 if shared == "kv" else 31, dtype=torch.float64)
    q_offsets = offsets_of([11, 20, 0, 20, 3, 8] if shared == "groups" else [11, 20, 31])
    q_offsets = "shared" if shared == "q" else q_offsets
    kv_offsets = "shared" if shared == "kv" else offsets_of([11, 20, 0])
    check(*tensors, q_offsets, kv_offsets, activation=activation, **DROPOUT)


def test_with_a_bias(offsets_of):
    q, k, v = make_qkv(30, 30, dtype=torch.float64)
    tables = torch.randn(2, 39, dtype=torch.float64, requires_grad=True)

    def results(implementation):
        bias = jm.RelativeBias(position=tables)
        options = dict(bias=bias, implementation=implementation, **DROPOUT)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = F.jagged_attention(*leaves, offsets_of([10, 20]), **options)
        return out, *torch.autograd.grad(out.square().sum(), (*leaves, tables))

    for x, y in zip(results("auto"), results("reference")):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_the_function(offsets_of):
    tensors = [x.requires_grad_() for x in make_qkv(9, 9, 2, 1, 3, dtype=torch.float64)]
    for activation in ("softmax", "gelu"):
        function = partial(attend, offsets=offsets_of([4, 5]), activation=activation)
        assert torch.autograd.gradcheck(function, tensors)


def test_memory_does_not_grow_with_the_scores(tensor_sizes, offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(3000, 3000, 1, 1))
    with tensor_sizes() as sizes:
        out = F.jagged_attention(q, k, v, offsets_of([3000]), **DROPOUT)
        out.sum().backward()
    assert max(sizes.made) < 3000 * 3000 // 2


def test_target_attention_of_shuffled_candidates(offsets_of):
    """The user's query rows, grouped, are one segment."""
    users = torch.tensor([1, 0, 1, 1, 0])
    q, k, v = torch.randn(5, 2, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    offsets = offsets_of([4, 5])
    out = F.target_attention(q, k, v, users, offsets, **DROPOUT)
    order = users.sort(stable=True).indices
    grouped = F.jagged_attention(
        q[order].flatten(0, 1), k, v, offsets_of([4, 6]), offsets, **DROPOUT
    )
    assert torch.equal(out[order].flatten(0, 1), grouped)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_block_attention_has_a_segment_for_each_block(implementation, offsets_of):
    q, k, v = make_qkv(50, 50)
    out = F.block_diagonal_attention(
        q, k, v, offsets_of([20, 30]), block_size=16, implementation=implementation, **DROPOUT
    )
    blocks = offsets_of([16, 4, 16, 14])
    assert torch.equal(
        out, F.jagged_attention(q, k, v, blocks, implementation=implementation, **DROPOUT)
    )
    packed = F.block_diagonal_attention_packed(
        torch.stack([q, k, v], 1), offsets_of([20, 30]), block_size=16, **DROPOUT
    )
    torch.testing.assert_close(out, packed)


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(dropout_p=1), ValueError, "dropout_p must be below 1, got 1"),
        (dict(dropout_p=-0.1), ValueError, "dropout_p must be 0 to 1, got -0.1"),
        (dict(dropout_p=math.nan), ValueError, "dropout_p must be 0 to 1, got nan"),
        (dict(dropout_p="a"), TypeError, "dropout_p must be a number, got str"),
        (dict(dropout_p=0.1, dropout_seed=3), TypeError, "dropout_seed must be a torch.Tensor"),
        (
            dict(dropout_p=0.1, dropout_seed=torch.tensor([3])),
            ValueError,
            r"dropout_seed must be int64 of shape \[\], got torch.int64 \[1\]",
        ),
        (
            dict(dropout_p=0.1, dropout_seed=torch.tensor(3.0)),
            ValueError,
            r"dropout_seed must be int64 of shape \[\], got torch.float32 \[\]",
        ),
        (
            dict(dropout_p=0.1, dropout_seed=torch.tensor(3, device="meta")),
            ValueError,
            "dropout_seed must be on q's device, cpu, or the host, got meta",
        ),
    ],
)
def test_errors(options, error, message, offsets_of):
    q, k, v = make_qkv(5, 5)
    for function in (F.jagged_attention, F.block_diagonal_attention):
        with pytest.raises(error, match=message):
            function(q, k, v, offsets_of([2, 3]), **options)
    with pytest.raises(error, match=message):
        F.target_attention(
            q[:, None], k, v, torch.tensor([0, 0, 1, 1, 1]), offsets_of([2, 3]), **options
        )


# -- layers ----------------------------------------------------------------------------------------

X = torch.randn(50, 32), torch.tensor([0, 20, 50])
TARGETS, USERS = torch.randn(4, 1, 32), torch.tensor([0, 0, 0, 1])


def _gdpa(p, **config):
    return jm.JaggedGDPA(32, 4, config=jm.GDPAConfig(attention_dropout=p, **config))


LAYERS = {  # p → the layer, and the layer → a result
    "JaggedTargetAttention": (
        lambda p: jm.JaggedTargetAttention(32, 4, attention_dropout=p),
        lambda layer: layer(TARGETS, X, USERS),
    ),
    "JaggedSelfTargetAttention": (
        lambda p: jm.JaggedSelfTargetAttention(32, 4, attention_dropout=p),
        lambda layer: torch.cat(
            [layer(X, TARGETS, USERS)[0][0], layer(X, TARGETS, USERS)[1][:, 0]]
        ),
    ),
    "JaggedGDPA": (_gdpa, lambda layer: layer(X)[0]),
    "JaggedGDPA-seeds": (lambda p: _gdpa(p, num_seeds=5), lambda layer: layer(X)),
    "JaggedGDPA-weights": (lambda p: _gdpa(p, num_weights=9), lambda layer: layer(X)[0]),
    "HSTULayer": (
        lambda p: jm.HSTULayer(32, 4, jm.HSTUConfig(attention_dropout=p, scaling_seqlen=50)),
        lambda layer: layer(X)[0],
    ),
    "BlockDiagonalSelfAttention": (
        lambda p: jm.BlockDiagonalSelfAttention(32, 4, 16, attention_dropout=p),
        lambda layer: layer(X)[0],
    ),
    "JaggedEncoderLayer": (
        lambda p: jm.JaggedEncoderLayer(32, 4, 64, dropout=p),
        lambda layer: layer(X)[0],
    ),
}


def gradients(layer, out):
    grads = torch.autograd.grad(out.square().sum(), tuple(layer.parameters()))
    return [out.detach(), *grads]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_drop_in_training_alone(name):
    make, call = LAYERS[name]
    layer, plain = make(0.3), make(0)
    plain.load_state_dict(layer.state_dict())
    torch.manual_seed(5)
    out = call(layer)
    assert not torch.equal(out, call(layer)), "each call has a seed of its own"
    torch.manual_seed(5)
    assert torch.equal(out, call(layer))
    assert not torch.allclose(out, call(plain), atol=1e-3)
    assert torch.equal(call(layer.eval()), call(plain.eval()))


@pytest.mark.parametrize("name", LAYERS)
def test_a_checkpoint_drops_the_same_weights_again(name):
    make, call = LAYERS[name]
    layer = make(0.3)
    for reentrant in (False, True):
        torch.manual_seed(5)
        expected = gradients(layer, call(layer))
        torch.manual_seed(5)
        start = torch.zeros(
            (), requires_grad=True
        )  # a reentrant one needs an input with a gradient
        out = checkpoint(lambda x: call(layer) + x, start, use_reentrant=reentrant)
        if reentrant:
            out.square().sum().backward()
            grads = [x.grad for x in layer.parameters()]
        else:
            grads = torch.autograd.grad(out.square().sum(), tuple(layer.parameters()))
        for x, y in zip(expected[1:], grads):
            torch.testing.assert_close(x, y)
        layer.zero_grad()


@pytest.mark.parametrize("name", ["JaggedTargetAttention", "JaggedGDPA", "HSTULayer"])
def test_compiled_layers_drop_the_same_weights(name):
    make, call = LAYERS[name]
    layer = make(0.3)
    graph, _ = compiled(call)
    for seed in (5, 6):
        torch.manual_seed(seed)
        expected = gradients(layer, call(layer))
        torch.manual_seed(seed)
        for x, y in zip(expected, gradients(layer, graph(layer))):
            torch.testing.assert_close(x, y)


def test_inductor_compiles_the_function(offsets_of):
    """It draws other seeds than eager torch; a given one drops the same weights."""
    q, k, v = make_qkv(30, 30)

    @torch.compile(fullgraph=True, dynamic=True)
    def attend(q, k, v, offsets, seed):
        return F.jagged_attention(q, k, v, offsets, dropout_p=0.3, dropout_seed=seed)

    for seed in (SEED, SEED + 1, None):
        for lengths in ([10, 20], [30]):
            out = attend(q, k, v, offsets_of(lengths), seed)
            if seed is not None:
                options = dict(dropout_p=0.3, dropout_seed=seed)
                assert torch.equal(out, F.jagged_attention(q, k, v, offsets_of(lengths), **options))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("p", [1.0, -0.5])
def test_layers_check_the_probability(name, p):
    make, _ = LAYERS[name]
    message = "must be below 1, got 1.0" if p == 1 else "must be 0 to 1, got -0.5"
    with pytest.raises(ValueError, match=f"dropout {message}"):
        make(p)


def test_from_torch_maps_dropout_to_the_weights():
    module = nn.MultiheadAttention(32, 4, dropout=0.25)
    for layer in (jm.JaggedTargetAttention.from_torch(module), jm.JaggedGDPA.from_torch(module)):
        of_weights = getattr(layer, "config", layer).attention_dropout
        assert (of_weights, layer.dropout.p) == (0.25, 0)
    encoder = jm.JaggedEncoderLayer.from_torch(nn.TransformerEncoderLayer(32, 4, dropout=0.25))
    config = encoder.attention.config
    assert (config.attention_dropout, config.dropout, encoder.dropout.p) == (0.25, 0, 0.25)
