"""Transformer encoders, and weights of torch's modules."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import jagged_modules as jm

LENGTHS, WIDTH, HEADS, FFN = torch.tensor([3, 0, 7, 1]), 24, 4, 40
LONGEST = 7
PADDING = torch.arange(LONGEST) >= LENGTHS[:, None]


def rows_of(x, side="right"):
    return jm.Jagged.from_padded(x, LENGTHS, side=side)


def padded(dtype=torch.float64):
    return torch.randn(4, LONGEST, WIDTH, dtype=dtype)


def encoder_layer(**options):
    options = (
        dict(dim_feedforward=FFN, dropout=0.1, batch_first=True, dtype=torch.float64) | options
    )
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return layer


def assert_equal_on_rows(own, module, x, **masks):
    """Results and gradients of the real rows."""
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    out = own(rows_of(mine)).values
    expected = module(theirs, src_key_padding_mask=PADDING, **masks)[~PADDING]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, mine, grad)[0],
        torch.autograd.grad(expected, theirs, grad)[0],
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    "activation",
    ["relu", "gelu", nn.GELU(), nn.functional.silu],
    ids=["relu", "gelu", "GELU()", "silu"],
)
@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_of_torch(norm_first, activation, causal):
    module = encoder_layer(norm_first=norm_first, activation=activation)
    own = jm.JaggedEncoderLayer.from_torch(
        module, jm.AttentionMask(causal=True) if causal else None
    )
    mask = nn.Transformer.generate_square_subsequent_mask(LONGEST, dtype=torch.float64)
    assert not own.training
    assert_equal_on_rows(own, module, padded(), **(dict(src_mask=mask) if causal else {}))


def test_a_layer_without_biases():
    module = encoder_layer(bias=False, layer_norm_eps=1e-3)
    assert_equal_on_rows(jm.JaggedEncoderLayer.from_torch(module), module, padded())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(WIDTH, dtype=torch.float64)], ids=["", "norm"])
def test_a_stack_of_torch(norm):
    module = nn.TransformerEncoder(encoder_layer(), 2, norm, enable_nested_tensor=False).eval()
    own = jm.JaggedEncoder.from_torch(module)
    assert len(own.layers) == 2 and own.layers[0].dropout.p == 0.1
    assert_equal_on_rows(own, module, padded())


def test_a_layer_that_occurs_twice():
    module = nn.TransformerEncoder(encoder_layer(), 1, enable_nested_tensor=False).eval()
    module.layers.append(module.layers[0])
    own = jm.JaggedEncoder.from_torch(module)
    assert len(own.layers) == 2 and own.layers[0] is own.layers[1]
    assert_equal_on_rows(own, module, padded())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layers", [0, 2], ids=["a layer", "a stack of nested tensors"])
def test_the_fast_path_of_torch(layers):
    """Without gradients, torch runs a kernel for a whole layer."""
    module, x = encoder_layer(), padded()
    own = jm.JaggedEncoderLayer.from_torch(module)
    if layers:
        module = nn.TransformerEncoder(module, layers, enable_nested_tensor=True).eval()
        own = jm.JaggedEncoder.from_torch(module)
    kernel = mock.Mock(wraps=torch._transformer_encoder_layer_fwd)
    with torch.no_grad(), mock.patch.object(torch, "_transformer_encoder_layer_fwd", kernel):
        expected = module(x, src_key_padding_mask=PADDING)[~PADDING]
        out = own(rows_of(x)).values
    assert kernel.call_count == max(1, layers)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


class Projections(nn.Module):
    """An encoder layer with four linears, as of BERT, after the residuals; or with convolutions of
    single rows, before them, as of SASRec."""

    def __init__(self, is_sasrec, bias=True):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in "qkvo")
        make = (lambda *sizes: nn.Conv1d(*sizes, 1)) if is_sasrec else nn.Linear
        self.up, self.down = make(WIDTH, FFN), make(FFN, WIDTH)
        norm = nn.RMSNorm if is_sasrec else nn.LayerNorm
        self.norm1, self.norm2 = (norm(WIDTH, eps=1e-3) for _ in range(2))
        self.is_sasrec = is_sasrec

    def attend(self, x, padding):
        q, k, v = (linear(x).unflatten(2, (HEADS, -1)) for linear in (self.q, self.k, self.v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, ~padding[:, None, None])
        return self.out(out.transpose(1, 2).flatten(2))

    def feed(self, x):
        if self.is_sasrec:
            return self.down(nn.functional.leaky_relu(self.up(x.mT))).mT
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x, src_key_padding_mask):
        if self.is_sasrec:
            x = x + self.attend(self.norm1(x), src_key_padding_mask)
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attend(x, src_key_padding_mask))
        return self.norm2(x + self.feed(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_sasrec", [True, False])
def test_a_layer_of_other_modules(is_sasrec, bias):
    module = Projections(is_sasrec, bias).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    own = jm.JaggedEncoderLayer.from_parts(
        (module.q, module.k, module.v, module.out),
        (module.up, module.down),
        (module.norm1, module.norm2),
        num_heads=HEADS,
        norm_first=is_sasrec,
        activation="leaky_relu" if is_sasrec else "gelu",
        dropout=0.1,
    )
    assert not own.training and own.dropout.p == 0.1
    assert_equal_on_rows(own, module, padded())


@pytest.mark.parametrize("joined", ["qkv", "kv"])
def test_linears_of_several_projections(joined):
    module, linears = Projections(is_sasrec=False).double().eval(), {}
    parts = [getattr(module, name) for name in joined]
    linears[joined] = nn.Linear(WIDTH, len(joined) * WIDTH).double()
    linears[joined].load_state_dict(
        {name: torch.cat([getattr(x, name) for x in parts]) for name in ("weight", "bias")}
    )
    own = jm.JaggedEncoderLayer.from_parts(
        (*([] if joined == "qkv" else [module.q]), linears[joined], module.out),
        (module.up, module.down),
        (module.norm1, module.norm2),
        num_heads=HEADS,
        activation="gelu",
    )
    assert_equal_on_rows(own, module, padded())


def test_parts_without_parameters():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    norms = [nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2)]
    linears = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(FFN, WIDTH, bias=False)
    own = jm.JaggedEncoderLayer.from_parts(attention, linears, norms)
    assert own.norm1.weight.eq(1).all() and not own.norm1.bias.any() and not own.linear1.bias.any()
    assert own.training


@pytest.mark.parametrize("given, expected", [({}, 0.3), ({"dropout": 0}, 0)])
def test_dropout_of_parts(given, expected):
    """That of the nn.MultiheadAttention unless another is given."""
    attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.3)
    linears, norms = (nn.Linear(WIDTH, WIDTH),) * 2, (nn.LayerNorm(WIDTH),) * 2
    own = jm.JaggedEncoderLayer.from_parts(attention, linears, norms, **given)
    assert own.dropout.p == own.attention.config.attention_dropout == expected


class OwnNorm(nn.Module):
    """A norm as other libraries write it: torch's LayerNorm or RMSNorm, or one that divides by the
    unbiased deviation."""

    def __init__(self, is_rms=False, std=False):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(WIDTH))
        self.beta = None if is_rms else nn.Parameter(torch.randn(WIDTH))
        self.variance_epsilon, self.std = 1e-3, std

    def forward(self, x):
        if self.beta is None:
            return self.gamma * x * (x.square().mean(-1, True) + self.variance_epsilon).rsqrt()
        x = x - x.mean(-1, True)
        deviation = (x.square().mean(-1, True) + self.variance_epsilon).sqrt()
        if self.std:
            deviation = x.std(-1, keepdim=True) + self.variance_epsilon
        return self.gamma * x / deviation + self.beta


@pytest.mark.parametrize("is_rms", [True, False])
def test_norms_and_activations_by_what_they_compute(is_rms):
    module = Projections(is_sasrec=False).double().eval()
    module.norm1, module.norm2 = (OwnNorm(is_rms).double() for _ in range(2))
    own = jm.JaggedEncoderLayer.from_parts(
        (module.q, module.k, module.v, module.out),
        (module.up, module.down),
        (module.norm1, module.norm2),
        num_heads=HEADS,
        activation=lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    )
    assert own.activation == "gelu" and isinstance(own.norm1, nn.RMSNorm) == is_rms
    assert_equal_on_rows(own, module, padded())


class OfTorch(nn.LayerNorm):
    """torch's with a forward of its own. scale: of the result."""

    def __init__(self, scale=1.0):
        super().__init__(WIDTH)
        self.scale = scale

    def forward(self, x):
        return self.scale * super().forward(x)


def hooked(module, hook=lambda module, given, out: 2 * out):
    module.register_forward_hook(hook)
    return module


@pytest.mark.parametrize(
    "norms",
    [
        (OwnNorm(std=True), OwnNorm(std=True)),
        (nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)),
        (nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, eps=1e-3)),
        (nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)),
        (nn.LayerNorm(WIDTH), nn.Identity()),
        (nn.LayerNorm(WIDTH), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))),
        (OfTorch(scale=2.0), nn.LayerNorm(WIDTH)),
        (nn.LayerNorm(WIDTH), hooked(nn.LayerNorm(WIDTH))),
    ],
    ids="deviation two-kinds two-eps no-eps no-norm norm-and-linear scaled hook".split(),
)
def test_norms_that_are_called(norms):
    module = Projections(is_sasrec=False).double().eval()
    module.norm1, module.norm2 = (copy.deepcopy(norm).double() for norm in norms)
    own = jm.JaggedEncoderLayer.from_parts(
        (module.q, module.k, module.v, module.out),
        (module.up, module.down),
        (module.norm1, module.norm2),
        num_heads=HEADS,
        activation="gelu",
    )
    assert own.norm1 is not module.norm1 and not own.norm1.training
    assert_equal_on_rows(own, module, padded())


def test_a_norm_of_torch_that_computes_in_fp32():
    class InFloat32(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.float()).to(x.dtype)

    norms = [InFloat32(WIDTH) for _ in range(2)]
    own = jm.JaggedEncoderLayer.from_parts(**(PARTS | dict(norms=norms)))
    assert not {InFloat32} & {type(own.norm1), type(own.norm2)}


class InTraining(nn.LayerNorm):
    """Its error in eval mode is not one of dtypes."""

    def forward(self, x):
        if not self.training:
            raise RuntimeError("there are no statistics")
        return super().forward(x) + 1


class OfShorterRows(OwnNorm):
    def forward(self, x):
        return super().forward(x[:, 1:])


@pytest.mark.parametrize(
    "norm, error, message",
    [
        (InTraining(WIDTH), RuntimeError, "^there are no statistics"),
        (OfShorterRows(), ValueError, r"by itself, got .*: The size of tensor a"),
    ],
    ids=["mode", "shape"],
)
def test_errors_of_norms(norm, error, message):
    with pytest.raises(error, match=message):
        jm.JaggedEncoderLayer.from_parts(**(PARTS | dict(norms=[norm] * 2)))


def test_gate_and_values_in_two_linears():
    module = Projections(is_sasrec=False).double().eval()
    gate, values, down = (nn.Linear(*x).double() for x in 2 * [(WIDTH, FFN)] + [(FFN, WIDTH)])
    module.feed = lambda x: down(nn.functional.silu(gate(x)) * values(x))
    own = jm.JaggedEncoderLayer.from_parts(
        (module.q, module.k, module.v, module.out),
        (gate, values, down),
        (module.norm1, module.norm2),
        num_heads=HEADS,
        activation="swiglu",
    )
    assert_equal_on_rows(own, module, padded())


@pytest.mark.parametrize(
    "given, name",
    [
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.LeakyReLU(), "leaky_relu"),
        (nn.Hardswish(), "hardswish"),
        (nn.ReLU(inplace=True), "relu"),
    ],
    ids=str,
)
def test_activations_of_torch_by_their_values(given, name):
    module = encoder_layer(activation=given)
    own = jm.JaggedEncoderLayer.from_torch(module)
    assert own.activation == name
    assert_equal_on_rows(own, module, padded())


class OwnLinear(nn.Module):
    """A linear with a transposed weight, or another function of the same parameters."""

    def __init__(self, inputs, outputs, factor=1):
        super().__init__()
        self.w = nn.Parameter(torch.randn(inputs, outputs))
        self.b, self.factor = nn.Parameter(torch.randn(outputs)), factor

    def forward(self, x):
        return x @ self.w * self.factor + self.b


class OriginalSASRec(nn.Module):
    """A layer as SASRec's authors have it: keys and values of rows without a norm, no linear
    behind the attention, residuals of normed rows."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.up, self.down = OwnLinear(WIDTH, FFN), OwnLinear(FFN, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-3), nn.LayerNorm(WIDTH, eps=1e-3)

    def forward(self, x, src_key_padding_mask):
        normed = self.norm1(x)
        of = zip((self.q, self.k, self.v), (normed, x, x))
        q, k, v = (linear(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for linear, y in of)
        causal = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
        mask = ~src_key_padding_mask[:, None, None] & causal
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        normed = self.norm2(normed + out.transpose(1, 2).flatten(2))
        return normed + self.down(self.up(normed).relu())


def test_the_original_sasrec():
    module = OriginalSASRec().double().eval()
    own = jm.JaggedEncoderLayer.from_parts(
        (module.q, module.k, module.v, nn.Identity()),
        (module.up, module.down),
        (module.norm1, module.norm2),
        num_heads=HEADS,
        norm_first="queries",
        mask=jm.AttentionMask(causal=True),
    )
    assert_equal_on_rows(own, module, padded())
    own(rows_of(padded())).values.square().sum().backward()
    trained = {name for name, x in own.named_parameters() if x.grad is not None}
    assert trained == {x for x, _ in own.named_parameters() if "out_proj" not in x}


class LowRank(nn.Linear):
    """Not the linear of its weight."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.a, self.b = (nn.Parameter(torch.ones(n, 2)) for n in (inputs, outputs))

    def forward(self, x):
        return super().forward(x) + x @ self.a @ self.b.T


class DoubledConv(nn.Conv1d):
    def forward(self, input):
        return 2 * super().forward(input)


PARTS = dict(
    attention=[nn.Linear(WIDTH, WIDTH) for _ in "qkvo"],
    linears=(nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)),
    norms=[nn.LayerNorm(WIDTH)] * 2,
    num_heads=HEADS,
)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(num_heads=None), ValueError, "four linears with num_heads, got 4 modules and n"),
        (dict(attention=PARTS["attention"][:1]), ValueError, "got 1 modules and num_heads 4"),
        (dict(attention=PARTS["attention"][:3]), ValueError, r"Identity\(\), got \[24, 24\] o"),
        (dict(activation=nn.GLU()), ValueError, "activation must have the values of one of"),
        (dict(attention=nn.Linear(2, 2)), TypeError, "module must be an nn.MultiheadAttention"),
        (
            dict(linears=(nn.Conv1d(WIDTH, FFN, 3), PARTS["linears"][1])),
            ValueError,
            r"linears\[0\] must have kernel_size 1, stride 1, padding 0 and groups 1",
        ),
        (dict(attention=[nn.ReLU()] * 4), TypeError, r"attention\[0\] must be an nn.Linear"),
        (dict(linears=[nn.Bilinear(2, 2, 2)] * 2), TypeError, r"linears\[0\] must be an nn.Linear"),
        (dict(linears=[LowRank(WIDTH, WIDTH)] * 2), TypeError, "computes the same, got LowRank"),
        (dict(linears=[OwnLinear(WIDTH, WIDTH, 2)] * 2), TypeError, "a module that computes the s"),
        (
            dict(linears=(hooked(nn.Linear(WIDTH, FFN)), PARTS["linears"][1])),
            TypeError,
            r"linears\[0\] must have no hooks and no forward of its own",
        ),
        (
            dict(linears=(PARTS["linears"][0], hooked(nn.Conv1d(FFN, WIDTH, 1)))),
            TypeError,
            r"linears\[1\] must have no hooks",
        ),
        (
            dict(linears=(PARTS["linears"][0], DoubledConv(FFN, WIDTH, 1))),
            TypeError,
            r"linears\[1\] must be an nn.Linear",
        ),
        (dict(norms=[nn.BatchNorm1d(WIDTH)] * 2), ValueError, "norm1 must compute each row of wid"),
        (dict(norms=[nn.Linear(WIDTH, FFN)] * 2), ValueError, "each row of width 24 by itself, go"),
        (dict(norms=[nn.Linear(FFN, WIDTH)] * 2), ValueError, "norm1 must compute each row of wid"),
        (dict(norms=[len] * 2), TypeError, "norm1 must be an nn.LayerNorm, .* got builtin"),
        (dict(activation=torch.tanh), ValueError, "activation must have the values of one of"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(changes, error, message):
    with pytest.raises(error, match=message):
        jm.JaggedEncoderLayer.from_parts(**(PARTS | changes))


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_weight_that_a_hook_makes():
    """It is that of the last call, not of the parameters."""
    linear = nn.utils.weight_norm(nn.Linear(WIDTH, FFN))
    parts = PARTS | dict(linears=(linear, PARTS["linears"][1]))
    with pytest.raises(TypeError, match=r"linears\[0\] must have no hooks .* remove_weight_norm"):
        jm.JaggedEncoderLayer.from_parts(**parts)
    nn.utils.remove_weight_norm(linear)
    own = jm.JaggedEncoderLayer.from_parts(**parts)
    torch.testing.assert_close(own.linear1.weight, linear.weight)


@pytest.mark.parametrize("bias", [True, False])
def test_attention_of_torch(bias):
    module = nn.MultiheadAttention(
        WIDTH, HEADS, dropout=0.2, bias=bias, batch_first=True, dtype=torch.float64
    ).eval()
    x, targets = padded(), torch.randn(4, 2, WIDTH, dtype=torch.float64)
    expected, _ = module(targets, x, x, key_padding_mask=PADDING, need_weights=False)
    layer = jm.JaggedTargetAttention.from_torch(module)
    out, has_rows = layer(targets, rows_of(x)), LENGTHS > 0
    torch.testing.assert_close(out[has_rows], expected[has_rows])
    assert layer.attention_dropout == 0.2 and layer.dropout.p == 0 and not layer.training
    own = jm.JaggedGDPA.from_torch(module, jm.AttentionMask(causal=True))
    causal = nn.Transformer.generate_square_subsequent_mask(LONGEST, dtype=torch.float64)
    expected, _ = module(x, x, x, attn_mask=causal, need_weights=False)
    torch.testing.assert_close(own(rows_of(x)).values, expected[~PADDING])


def test_layers_of_frozen_modules_are_frozen():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    makers = {
        jm.JaggedEncoderLayer.from_torch: encoder,
        jm.JaggedTargetAttention.from_torch: encoder.self_attn,
        jm.JaggedGDPA.from_torch: encoder.self_attn,
    }
    for trains in (True, False):
        encoder.requires_grad_(trains)
        for make, module in makers.items():
            assert all(x.requires_grad == trains for x in make(module).parameters())
    encoder.norm1.requires_grad_(True)
    assert all(x.requires_grad for x in jm.JaggedEncoderLayer.from_torch(encoder).parameters())


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_swiglu_and_norms(norm, norm_first):
    layer = jm.JaggedEncoderLayer(
        WIDTH,
        HEADS,
        FFN,
        norm=norm,
        norm_first=norm_first,
        activation="swiglu",
        dtype=torch.float64,
    )
    x, offsets = torch.randn(9, WIDTH, dtype=torch.float64), torch.tensor([0, 4, 4, 9])

    def attended(y):
        return layer.attention((y, offsets))[0]

    def ffn(y):
        a, b = layer.linear1(y).chunk(2, 1)
        return layer.linear2(nn.functional.silu(a) * b)

    if norm_first:
        middle = x + attended(layer.norm1(x))
        expected = middle + ffn(layer.norm2(middle))
    else:
        middle = layer.norm1(x + attended(x))
        expected = layer.norm2(middle + ffn(middle))
    torch.testing.assert_close(layer((x, offsets))[0], expected)


def test_dropout_is_reproducible_and_every_parameter_learns():
    layer = jm.JaggedEncoderLayer(WIDTH, HEADS, FFN, dropout=0.5)
    x, offsets = torch.randn(9, WIDTH), torch.tensor([0, 4, 4, 9])
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(layer((x, offsets))[0])
    assert torch.equal(*results) and not torch.equal(results[0], layer((x, offsets))[0])
    results[0].square().sum().backward()
    assert all(parameter.grad.any() for parameter in layer.parameters())


class OwnAttention(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        return super().forward(query, key, 2 * value, **options)


def test_a_nan_stays_in_its_segment():
    encoder = jm.JaggedEncoder([jm.JaggedEncoderLayer(WIDTH, HEADS, FFN) for _ in range(2)])
    x, offsets = torch.randn(9, WIDTH), torch.tensor([0, 4, 4, 9])
    clean = encoder((x, offsets))[0]
    x[4] = torch.nan
    out = encoder((x, offsets))[0]
    assert torch.equal(out[:4], clean[:4]) and out[4:].isnan().any()


def without_attention_dropout():
    module = encoder_layer()
    module.self_attn.dropout = 0
    return module


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: jm.JaggedEncoderLayer(WIDTH, 5, FFN), ValueError, "num_heads"),
        (lambda: jm.JaggedEncoderLayer(WIDTH, HEADS, 0), ValueError, "ffn_dim"),
        (lambda: jm.JaggedEncoderLayer(WIDTH, 2, 8, norm_first="k"), TypeError, "bool or .q"),
        (lambda: jm.JaggedEncoderLayer(WIDTH, HEADS, FFN, norm="batch"), ValueError, "norm must"),
        (
            lambda: jm.JaggedEncoderLayer(WIDTH, HEADS, FFN, activation="tanh"),
            ValueError,
            "activation must be one of",
        ),
        (lambda: jm.JaggedEncoder([]), ValueError, "layers must have one layer or more"),
        (lambda: jm.JaggedEncoder([nn.Linear(2, 2)]), TypeError, r"layers\[0\] must be a Jagged"),
        (
            lambda: jm.JaggedEncoderLayer.from_torch(nn.Linear(2, 2)),
            TypeError,
            "module must be an nn.TransformerEncoderLayer, got Linear",
        ),
        (
            lambda: jm.JaggedTargetAttention.from_torch(OwnAttention(8, 2)),
            TypeError,
            "the forward of an nn.MultiheadAttention and no hooks, got OwnAttention",
        ),
        (
            lambda: jm.JaggedGDPA.from_torch(hooked(nn.MultiheadAttention(8, 2))),
            TypeError,
            "got MultiheadAttention with hooks, or a forward of its own",
        ),
        (
            lambda: jm.JaggedEncoderLayer.from_torch(without_attention_dropout()),
            ValueError,
            r"self_attn, dropout, .* must have one probability, got \[0, 0.1, 0.1, 0.1\]",
        ),
        (
            lambda: jm.JaggedEncoderLayer.from_torch(encoder_layer(activation=torch.tanh)),
            ValueError,
            "module's activation must have the values of one of",
        ),
        (
            lambda: jm.JaggedTargetAttention.from_torch(nn.MultiheadAttention(8, 2, kdim=4)),
            ValueError,
            "kdim and vdim must be embed_dim, 8, got 4 and 8",
        ),
        (
            lambda: jm.JaggedGDPA.from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True)),
            ValueError,
            "got add_bias_kv=True",
        ),
        (
            lambda: jm.JaggedGDPA.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True)),
            ValueError,
            "got add_zero_attn=True",
        ),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
