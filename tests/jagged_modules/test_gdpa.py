"""JaggedGDPA and GDPABlock: equal to dense attention written in plain torch, in every use."""

import copy
import dataclasses
import functools
import pickle

import pytest
import torch
from marks import raising, slow_after
from torch import nn
from torch.nn import functional as nnf

import jagged_modules as jm
from jagged_modules.activations import ACTIVATIONS

from .graph_cases import compiled, random_offsets

WIDTH, HEADS = 8, 2
DENSE_ACTIVATIONS = {
    "softmax": lambda x: x.softmax(-1),
    "relu": nnf.relu,
    "silu": nnf.silu,
    "gelu_tanh": lambda x: nnf.gelu(x, approximate="tanh"),
}


def dense_gdpa(layer, x, context, keep=None, bias=None):
    """The layer on one segment `[N, E]` with keys `[M, E]`: `[N, E]`, or `[S, E]` with seeds. bias:
    `[H, N, M]`."""
    parameters, config, dim = dict(layer.named_parameters()), layer.config, layer.head_dim

    def heads(rows, weight, bias):
        return (rows @ weight.T + bias).reshape(len(rows), -1, dim).transpose(0, 1)

    def rms_norm(rows, weight):
        return (
            rows
            * (rows.square().mean(-1, keepdim=True) + torch.finfo(rows.dtype).eps).rsqrt()
            * weight
        )

    q = (
        layer.seeds.transpose(0, 1)
        if config.num_seeds
        else heads(x, layer.q_proj.weight, layer.q_proj.bias)
    )
    if config.num_weights:
        k, v = layer.key_weights.transpose(0, 1), layer.value_weights.transpose(0, 1)
    else:
        k, v = heads(context, layer.kv_proj.weight, layer.kv_proj.bias).chunk(2)
    if config.qk_norm:
        q, k = rms_norm(q, parameters["q_norm.weight"]), rms_norm(k, parameters["k_norm.weight"])
    k, v = (y.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=0) for y in (k, v))
    scores = q @ k.transpose(1, 2) * (dim**-0.5 if config.scale is None else config.scale)
    if bias is not None:
        scores = scores + bias
    if layer.activation == "softmax" and keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    p = DENSE_ACTIVATIONS[layer.activation](scores)
    p = (
        p * config.output_scale
        if keep is None
        else (p * config.output_scale).masked_fill(~keep, 0.0)
    )
    return (p @ v).transpose(0, 1).flatten(1) @ layer.out_proj.weight.T + layer.out_proj.bias


def rows_of(out):
    """Values of a Jagged or a pair; a dense result as it is."""
    return out if isinstance(out, torch.Tensor) else jm.Jagged.wrap(out).values


def outputs_and_gradients(run, layer, *inputs):
    """Values, and gradients of inputs and of every parameter, for a fixed random gradient of the
    output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = run(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, [*inputs, *layer.parameters()], grad)]


def assert_equals_dense(
    layer, x_lengths, context_lengths, offsets_of, keep=lambda b: None, num_targets=None
):
    """Self-attention if context_lengths is None."""
    x_offsets = offsets_of(x_lengths)
    inputs = [
        torch.randn(sum(lengths), WIDTH, dtype=torch.float64)
        for lengths in (x_lengths, context_lengths)
        if lengths is not None
    ]

    def run(x, context=None):
        return rows_of(
            layer(
                (x, x_offsets),
                None if context is None else (context, offsets_of(context_lengths)),
                num_targets,
            )
        )

    def dense(x, context=None):
        segments = x.split(x_lengths)
        contexts = segments if context is None else context.split(context_lengths)
        outputs = [
            dense_gdpa(layer, *pair, keep(b))
            for b, pair in enumerate(zip(segments, contexts, strict=True))
        ]
        return torch.stack(outputs) if layer.config.num_seeds else torch.cat(outputs)

    torch.testing.assert_close(
        outputs_and_gradients(run, layer, *inputs), outputs_and_gradients(dense, layer, *inputs)
    )


USES = {
    "plain": jm.GDPAConfig(),
    "scales": jm.GDPAConfig(scale=1.0, output_scale=0.1),
    "grouped-heads": jm.GDPAConfig(num_kv_heads=1),
    "wide-heads": jm.GDPAConfig(head_dim=7),
    "qk-norm": jm.GDPAConfig(qk_norm=True, num_kv_heads=1),
    "seeds": jm.GDPAConfig(num_seeds=3),
    "seeds-qk-norm": jm.GDPAConfig(num_seeds=3, qk_norm=True, num_kv_heads=1),
    "weights": jm.GDPAConfig(num_weights=5),
    "weights-qk-norm": jm.GDPAConfig(num_weights=5, qk_norm=True, num_kv_heads=1, head_dim=5),
}


@pytest.mark.parametrize("config", USES.values(), ids=USES)
@pytest.mark.parametrize("activation", ["softmax", "gelu_tanh"])
def test_equals_dense_attention(config, activation, offsets_of):
    if activation == "softmax":
        config = dataclasses.replace(config, output_scale=1.0)
    layer = jm.JaggedGDPA(WIDTH, HEADS, activation, config=config).double()
    for norm in (layer.q_norm, layer.k_norm):
        if config.qk_norm:
            nn.init.normal_(norm.weight)
    assert_equals_dense(layer, [4, 1, 7], None, offsets_of)
    if not (config.num_seeds or config.num_weights):
        assert_equals_dense(layer, [4, 1, 7], [2, 5, 3], offsets_of)


@pytest.mark.parametrize("targets", ["mask", "call", "both"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_masks(targets, cross, offsets_of):
    lengths, context_lengths, num_targets = [4, 1, 7], [6, 3, 7], [1, 0, 3]
    stale = torch.tensor([0, 0, 1])
    mask = jm.AttentionMask(
        causal=True,
        num_targets=dict(call=None, mask=torch.tensor(num_targets), both=stale)[targets],
    )
    layer = jm.JaggedGDPA(WIDTH, HEADS, "silu", mask).double()
    columns = context_lengths if cross else lengths
    assert_equals_dense(
        layer,
        lengths,
        context_lengths if cross else None,
        offsets_of,
        keep=lambda b: mask.keep(lengths[b], columns[b], num_targets[b]),
        num_targets=None if targets == "mask" else torch.tensor(num_targets),
    )


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_bias(activation, cross, offsets_of):
    """A dense bias per segment, with gradients of both tables; the block passes it on."""
    lengths, columns = [4, 1, 7], [6, 3, 7] if cross else [4, 1, 7]
    block = jm.GDPABlock(WIDTH, HEADS, activation, jm.AttentionMask(causal=True)).double()
    tables = [
        torch.randn(HEADS, 2 * 7 - 1, dtype=torch.float64),
        torch.randn(5, dtype=torch.float64),
    ]
    x, context = (torch.randn(sum(n), WIDTH, dtype=torch.float64) for n in (lengths, columns))
    t = torch.randint(100, (sum(columns),))
    u = torch.randint(100, (sum(lengths),))
    boundaries = torch.tensor([1, 5, 10, 60])

    def ours(x, context, position, time):
        bias = jm.RelativeBias(
            position, time, timestamps=t, boundaries=boundaries, query_timestamps=u
        )
        return rows_of(
            block(
                (x, offsets_of(lengths)),
                (context, offsets_of(columns)) if cross else None,
                bias=bias,
            )
        )

    def dense(x, context, position, time):
        normed, outputs = nnf.rms_norm(x, (WIDTH,), block.norm.weight), []
        keys = context if cross else normed
        for n, m, rows, own, at, asked in zip(
            lengths,
            columns,
            normed.split(lengths),
            keys.split(columns),
            t.split(columns),
            u.split(lengths),
        ):
            i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
            distance = (asked[:, None] - at).abs()
            bucket = sum((distance >= edge).long() for edge in boundaries)
            outputs.append(
                dense_gdpa(
                    block.attention, rows, own, j <= i, position[:, j - i + 6] + time[bucket]
                )
            )
        return x + torch.cat(outputs)

    inputs = [x, context, *tables] if cross else [x, x, *tables]
    results = []
    for run in (ours, dense):
        leaves = [y.clone().requires_grad_() for y in inputs]
        out = run(*leaves)
        gradients = torch.autograd.grad(
            out.square().sum(), [*leaves, *block.parameters()], materialize_grads=True
        )
        results.append([out, *gradients])
    torch.testing.assert_close(*results)


def test_targets_without_another_mask(offsets_of):
    layer = jm.JaggedGDPA(WIDTH, HEADS, "relu").double()
    keep = jm.AttentionMask().keep(5, 5, 2)
    assert not keep[:3, 3:].any() and keep[:, :3].all()
    assert_equals_dense(
        layer, [5], None, offsets_of, keep=lambda b: keep, num_targets=torch.tensor([2])
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_trains(activation, offsets_of):
    layer = jm.JaggedGDPA(WIDTH, HEADS, activation)
    layer((torch.randn(5, WIDTH), offsets_of([2, 3])))[0].square().sum().backward()
    assert all(
        x.grad.abs().sum() > 0 for name, x in layer.named_parameters() if name != "q_proj.bias"
    )


def test_no_segments_and_empty_segments(offsets_of):
    for config in USES.values():
        layer = jm.JaggedGDPA(WIDTH, HEADS, config=config)
        for lengths in ([], [0, 0], [0, 2, 0]):
            out = rows_of(layer((torch.randn(sum(lengths), WIDTH), offsets_of(lengths))))
            assert out.shape == (
                (len(lengths), 3, WIDTH) if config.num_seeds else (sum(lengths), WIDTH)
            )
    pooled = jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(num_seeds=3))
    assert torch.equal(
        pooled((torch.zeros(0, WIDTH), offsets_of([0, 0]))),
        pooled.out_proj.bias.expand(2, 3, WIDTH),
    )


def test_dropout(offsets_of):
    layer = jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(dropout=0.5))
    plain = jm.JaggedGDPA(WIDTH, HEADS)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, WIDTH), offsets_of([2, 3])
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])


def test_containers(container, offsets_of):
    values = torch.randn(11, WIDTH)
    context_values = torch.randn(6, WIDTH)
    offsets = offsets_of([4, 0, 7])
    layer = jm.JaggedGDPA(WIDTH, HEADS)
    x = container(values, offsets)
    context = container(context_values, offsets_of([2, 1, 3]))
    for out, (expected, _) in (
        (layer(x), layer((values, offsets))),
        (layer(x, context), layer((values, offsets), (context_values, offsets_of([2, 1, 3])))),
    ):
        assert type(out) is type(x)
        assert torch.equal(jm.Jagged.wrap(out).values, expected)
        assert torch.equal(jm.Jagged.wrap(out).offsets, offsets)
    assert type(jm.GDPABlock(WIDTH, HEADS)(x)) is type(x)
    assert jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(num_seeds=2))(x).shape == (3, 2, WIDTH)


def test_initialisation_of_learned_rows():
    seeds = jm.JaggedGDPA(64, HEADS, config=jm.GDPAConfig(num_seeds=50)).seeds
    feed_forward = jm.JaggedGDPA(64, HEADS, config=jm.GDPAConfig(num_weights=50))
    for rows, std in (
        (seeds, 1.0),
        (feed_forward.key_weights, 1.0),
        (feed_forward.value_weights, 50**-0.5),
    ):
        assert (
            rows.shape == (50, HEADS, 32)
            and abs(rows.mean()) < 0.1 * std
            and abs(rows.std() / std - 1) < 0.1
        )


@pytest.mark.parametrize("config", USES.values(), ids=USES)
def test_state_dict_round_trip(config, offsets_of):
    layer, other = (jm.JaggedGDPA(WIDTH, HEADS, config=config) for _ in range(2))
    x = torch.randn(5, WIDTH), offsets_of([2, 3])
    assert not torch.equal(rows_of(layer(x)), rows_of(other(x)))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(rows_of(layer(x)), rows_of(other(x)))


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["deepcopy", "pickle"],
)
def test_copies(clone, offsets_of):
    layer = jm.JaggedGDPA(WIDTH, HEADS, mask=jm.AttentionMask(causal=True))
    x = torch.randn(5, WIDTH), offsets_of([2, 3])
    assert torch.equal(clone(layer)(x)[0], layer(x)[0])


@pytest.mark.parametrize("config", USES.values(), ids=USES)
def test_meta_parameters_are_materialised_by_reset_parameters(config):
    layer, expected = (
        jm.JaggedGDPA(WIDTH, HEADS, config=config, device=device) for device in ("meta", None)
    )
    assert all(x.is_meta for x in layer.parameters())
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, float("nan"))
    for module in (layer, expected):
        torch.manual_seed(5)
        module.reset_parameters()
    assert all(
        torch.equal(x, expected.state_dict()[name]) for name, x in layer.state_dict().items()
    )


@pytest.mark.parametrize("config", USES.values(), ids=USES)
def test_shapes_on_the_meta_device(config):
    layer = jm.JaggedGDPA(WIDTH, HEADS, config=config, device="meta")
    out = rows_of(
        layer(
            (
                torch.empty(11, WIDTH, device="meta"),
                torch.empty(4, dtype=torch.int64, device="meta"),
            )
        )
    )
    assert out.shape == ((3, 3, WIDTH) if config.num_seeds else (11, WIDTH))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, offsets_of):
    for config in USES.values():
        out = jm.JaggedGDPA(WIDTH, HEADS, config=config).to(dtype)(
            (torch.randn(5, WIDTH, dtype=dtype), offsets_of([2, 3]))
        )
        assert rows_of(out).dtype == dtype


class Encoder(nn.Module):
    """The layers that published models stack: self-attention, a feed-forward, cross-attention to
    context, pooling."""

    def __init__(self):
        super().__init__()
        self.attention = jm.GDPABlock(
            WIDTH, HEADS, mask=jm.AttentionMask(causal=True), config=jm.GDPAConfig(qk_norm=True)
        )
        self.feed_forward = jm.GDPABlock(WIDTH, HEADS, config=jm.GDPAConfig(num_weights=16))
        self.cross = jm.GDPABlock(WIDTH, HEADS, config=jm.GDPAConfig(num_kv_heads=1))
        self.pooling = jm.JaggedGDPA(WIDTH, HEADS, "softmax", config=jm.GDPAConfig(num_seeds=2))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, context):
        x = self.cross(self.feed_forward(self.attention(x)), context)
        return self.head(self.pooling(x).flatten(1)).squeeze(1)


def test_training(offsets_of):
    """Whether the last event also occurs in the context: every parameter learns, and the loss falls
    to a tenth."""
    model, items = Encoder(), torch.randn(4, WIDTH)
    offsets, ids = offsets_of([3] * 16), torch.randint(4, (16, 3))
    context = torch.randint(4, (16, 1))
    labels = (ids[:, -1:] == context).float().squeeze(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(150):
        logits = model(
            (items[ids.flatten()], offsets), (items[context.flatten()], offsets_of([1] * 16))
        )
        losses.append(nnf.binary_cross_entropy_with_logits(logits, labels))
        optimizer.zero_grad()
        losses[-1].backward()
        if len(losses) == 2:  # biases of queries and keys may not change in the first step
            assert all(x.grad.abs().sum() > 0 for x in model.parameters())
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]


def test_block_is_norm_attention_residual(offsets_of):
    block = jm.GDPABlock(WIDTH, HEADS)
    values, offsets = torch.randn(5, WIDTH), offsets_of([2, 3])
    expected = values + block.attention((nnf.rms_norm(values, (WIDTH,)), offsets))[0]
    torch.testing.assert_close(block((values, offsets))[0], expected)


# -- graph tools -----------------------------------------------------------------------------------

SIZES = [(5, 41), (6, 83), (7, 59), (13, 14)]  # segments, rows


def batches():
    for segments, rows in SIZES:
        offsets = random_offsets(segments, rows)
        yield (
            torch.randn(rows, WIDTH),
            offsets,
            torch.minimum(offsets.diff(), torch.randint(3, (segments,))),
        )


@slow_after(1, "use", ["plain", "grouped-heads", "qk-norm", "seeds", "weights", "mask", "targets"])
def test_compiles_once(use):
    mask = jm.AttentionMask(causal=True) if use in ("mask", "targets") else None
    layer = jm.JaggedGDPA(WIDTH, HEADS, mask=mask, config=USES.get(use)).double()

    def run(values, offsets, num_targets):
        return rows_of(
            layer((values, offsets), num_targets=num_targets if use == "targets" else None)
        )

    graph, counter = compiled(run)
    compilations = []
    for values, offsets, num_targets in batches():
        calls = [
            functools.partial(call, offsets=offsets, num_targets=num_targets)
            for call in (run, graph)
        ]
        pairs = (outputs_and_gradients(call, layer, values.double()) for call in calls)
        torch.testing.assert_close(*pairs)
        compilations.append(counter.frame_count)
    assert set(compilations) == {1}


def test_traced_by_torchrec_as_a_leaf(offsets_of):
    tracer = pytest.importorskip("torchrec.fx").Tracer(leaf_modules=["JaggedGDPA"])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(num_seeds=2))

        def forward(self, x):
            return self.attention(x).relu()

    model = Model()
    traced = torch.fx.GraphModule(model, tracer.trace(model))
    x = torch.randn(5, WIDTH), offsets_of([2, 3])
    assert torch.equal(traced(x), model(x))


# -- bad input -------------------------------------------------------------------------------------

CAUSAL = jm.AttentionMask(causal=True)
BAD_LAYERS = [
    *raising(
        ValueError,
        {
            "embedding_dim must be a multiple of num_heads, got 10 and 4": dict(
                embedding_dim=10, num_heads=4
            ),
            "num_heads must be at least 1, got 0": dict(num_heads=0),
            "embedding_dim / num_heads must be at most 256, got 512": dict(embedding_dim=1024),
            "head_dim must be at most 256, got 257": dict(config=jm.GDPAConfig(head_dim=257)),
            "num_heads must be a multiple of num_kv_heads, got 2 and 3": dict(
                config=jm.GDPAConfig(num_kv_heads=3)
            ),
            "activation must be one of .*got 'swish'": dict(activation="swish"),
            "output_scale must be 1 with softmax, got 0.5": dict(
                activation="softmax", config=jm.GDPAConfig(output_scale=0.5)
            ),
            "mask must be None with num_seeds or num_weights": dict(
                mask=CAUSAL, config=jm.GDPAConfig(num_weights=2)
            ),
        },
    ),
    *raising(
        TypeError,
        {
            "embedding_dim must be an int, got float": dict(embedding_dim=8.0),
            "mask must be an AttentionMask, got str": dict(mask="causal"),
            "config must be a GDPAConfig, got dict": dict(config=dict(num_seeds=2)),
        },
    ),
    (
        dict(mask=CAUSAL, config=jm.GDPAConfig(num_seeds=2)),
        ValueError,
        "mask must be None with num_seeds or num_weights",
    ),
]


@pytest.mark.parametrize(
    "change, error, message", BAD_LAYERS, ids=[message[:40] for _, _, message in BAD_LAYERS]
)
def test_bad_constructor(change, error, message):
    with pytest.raises(error, match=message):
        jm.JaggedGDPA(**(dict(embedding_dim=WIDTH, num_heads=HEADS) | change))


BAD_CONFIGS = [
    *raising(
        ValueError,
        {
            "head_dim must be at least 1, got 0": dict(head_dim=0),
            "dropout must be 0 to 1, got 2.0": dict(dropout=2.0),
            "num_seeds must be at least 0, got -1": dict(num_seeds=-1),
            "num_kv_heads must be at least 1, got 0": dict(num_kv_heads=0),
            "num_seeds and num_weights must not both be given, got 2 and 3": dict(
                num_seeds=2, num_weights=3
            ),
        },
    ),
    *raising(
        TypeError,
        {
            "qk_norm must be a bool, got str": dict(qk_norm="rms"),
            "scale must be a number, got Tensor": dict(scale=torch.ones(())),
            "output_scale must be a number, got NoneType": dict(output_scale=None),
            "num_weights must be an int, got float": dict(num_weights=1.5),
        },
    ),
]


@pytest.mark.parametrize(
    "fields, error, message", BAD_CONFIGS, ids=[message[:40] for _, _, message in BAD_CONFIGS]
)
def test_bad_config(fields, error, message):
    with pytest.raises(error, match=message):
        jm.GDPAConfig(**fields)


def timed(rows, queries=None):
    asked = None if queries is None else torch.arange(queries)
    return jm.RelativeBias(
        time=torch.zeros(3), timestamps=torch.arange(rows), query_timestamps=asked
    )


X, TARGETS = (torch.randn(5, WIDTH), torch.tensor([0, 2, 5])), torch.tensor([1, 1])
POSITION = jm.RelativeBias(torch.zeros(5))
BAD_FORWARDS = [
    *raising(
        TypeError,
        {
            "x must be a JaggedTensor.*got Tensor": ({}, dict(x=torch.randn(5, WIDTH))),
            "num_targets must be a torch.Tensor, got int": ({}, dict(num_targets=2)),
            "bias must be a RelativeBias, got Tensor": ({}, dict(bias=torch.zeros(5))),
        },
    ),
    *raising(
        ValueError,
        {
            "x's values must have the layer's dtype, torch.float32, got torch.float64": (
                {},
                dict(x=(X[0].double(), X[1])),
            ),
            "x's values must be on the layer's device, cpu, got meta": (
                {},
                dict(x=(X[0].to("meta"), X[1])),
            ),
            r"x's values must have shape \[L, 8\], got \[5, 9\]": (
                {},
                dict(x=(torch.randn(5, 9), X[1])),
            ),
            r"context's values must have shape \[L, 8\], got \[5, 9\]": (
                {},
                dict(context=(torch.randn(5, 9), X[1])),
            ),
            "the same number of segments, got 2 and 1": (
                {},
                dict(context=(X[0], torch.tensor([0, 5]))),
            ),
            r"num_targets must have shape \[B\] = \[2\], got \[1\]": (
                {},
                dict(num_targets=torch.tensor([1])),
            ),
            "context must be None with num_seeds or num_weights, got tuple": (
                dict(num_seeds=2),
                dict(context=X),
            ),
            "num_targets must be None with num_seeds or num_weights, got Tensor": (
                dict(num_weights=2),
                dict(num_targets=TARGETS),
            ),
            "bias must be None with num_seeds or num_weights, got RelativeBias": (
                dict(num_seeds=2),
                dict(bias=POSITION),
            ),
            "bias.position must have one row for each of the layer's 2 heads, got 3": (
                {},
                dict(bias=jm.RelativeBias(torch.zeros(3, 5))),
            ),
            "x must have segments of at most 2 rows, those of bias.position, got 3": (
                {},
                dict(bias=jm.RelativeBias(torch.zeros(3))),
            ),
            "bias.position must be on the layer's device, cpu, got meta": (
                {},
                dict(bias=jm.RelativeBias(torch.zeros(5, device="meta"))),
            ),
            "bias.timestamps must have one element for each row of x, 5, got 4": (
                {},
                dict(bias=timed(4)),
            ),
            "for each row of context, 7, got 5": (
                {},
                dict(bias=timed(5), context=(torch.randn(7, WIDTH), torch.tensor([0, 3, 7]))),
            ),
            "bias.query_timestamps must have one element for each row of x, 5, got 3": (
                {},
                dict(bias=timed(5, 3)),
            ),
            "query_shift .* for each segment of x, 2, got 1": (
                {},
                dict(bias=jm.RelativeBias(torch.zeros(5), query_shift=TARGETS[:1])),
            ),
        },
    ),
    (
        {},
        dict(context=(X[0].long(), X[1])),
        ValueError,
        "context's values must have the layer's dtype, torch.float32, got torch.int64",
    ),
    (
        {},
        dict(num_targets=torch.tensor([1, 4])),
        ValueError,
        "num_targets must be at most the segment's length, got 4 of 3 at segment 1",
    ),
    (
        dict(num_weights=2),
        dict(context=X),
        ValueError,
        "context must be None with num_seeds or num_weights, got tuple",
    ),
    (
        dict(num_weights=2),
        dict(bias=POSITION),
        ValueError,
        "bias must be None with num_seeds or num_weights, got RelativeBias",
    ),
]


@pytest.mark.parametrize(
    "fields, change, error, message",
    BAD_FORWARDS,
    ids=[message[:40] for *_, message in BAD_FORWARDS],
)
def test_bad_forward(fields, change, error, message):
    layer = jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(**fields))
    with pytest.raises(error, match=message):
        layer(**(dict(x=X) | change))


def test_bad_block():
    with pytest.raises(
        ValueError, match="num_seeds must be 0: pooled rows have no residual, got 2"
    ):
        jm.GDPABlock(WIDTH, HEADS, config=jm.GDPAConfig(num_seeds=2))
    with pytest.raises(ValueError, match=r"x's values must have shape \[L, 8\], got \[5, 9\]"):
        jm.GDPABlock(WIDTH, HEADS)((torch.randn(5, 9), X[1]))


def test_extra_repr():
    layer = jm.JaggedGDPA(32, 2, "silu", jm.AttentionMask(causal=True), jm.GDPAConfig(dropout=0.5))
    assert (
        "embedding_dim=32, num_heads=2, activation='silu', mask=AttentionMask(causal=True),"
        " config=GDPAConfig(" in repr(layer)
    )
