"""Dropout of attention weights on a GPU."""

import math
from functools import partial

import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F

from .fixtures.packed import EVERY_KIND, EVERY_PAIR

pytestmark = pytest.mark.gpu
SEED = torch.tensor(0x1234567890ABCDEF)
DROPOUT = dict(dropout_p=0.3, dropout_seed=SEED)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SELF = [3, 0, 1, 70, 5, 130, 64, 9, 257, 128, 400]
SIZES = [  # head dims, dtype
    ((24, 40), torch.float32),
    ((24, 40), torch.bfloat16),
    ((64, 64), torch.float16),
    ((128, 128), torch.bfloat16),
    ((256, 200), torch.bfloat16),
]
CASES = [  # lengths, activation, mask, heads, shared operand
    ("mixed", "softmax", None, (4, 2), None),
    ((SELF, SELF), "silu", "hstu", (2, 2), None),
    ((SELF, SELF), "softmax", "causal", (4, 2), None),
    ((SELF, SELF[::-1]), "gelu_tanh", "window", (4, 1), None),
    ("mixed", "softmax", None, (4, 2), "q"),
    ("mixed", "sigmoid", None, (4, 2), "kv"),
    ("two-groups", "softmax", None, (2, 1), None),
    ("three-groups", "relu", None, (2, 2), None),
]


@pytest.mark.parametrize("dims, dtype", SIZES, ids=str)
@pytest.mark.parametrize("lengths, activation, mask, heads, shared", CASES)
def test_forward_and_gradients(
    check_attention, lengths, activation, mask, heads, shared, dims, dtype
):
    options = dict(heads=heads, activation=activation, mask=mask, shared=shared, kernels="auto")
    check_attention(lengths, dtype, "cuda", dims=dims, **options, **DROPOUT)


@pytest.mark.parametrize("lengths", [EVERY_KIND, EVERY_PAIR], ids=["self", "cross"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("activation, mask", [("softmax", None), ("silu", "hstu")])
def test_packed_tiles(check_packed, activation, mask, dtype, lengths):
    options = dict(heads=(4, 2), dims=(64, 64), activation=activation, mask=mask, kernels="auto")
    check_packed(lengths, dtype, "cuda", **options, **DROPOUT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "block_size, heads, rotate", [(16, (2, 2), None), (32, (4, 2), "qkv"), (64, (2, 2), "qk")]
)
def test_blocks(check_block_attention, block_size, heads, rotate, dtype):
    sizes = dict(block_size=block_size, heads=heads, dim=64, rotate=rotate, kernels="auto")
    check_block_attention(SELF, dtype, "cuda", **sizes, **DROPOUT)


def test_a_bias_and_its_gradients(offsets):
    """Against the definition, in fp32."""
    q, k, v = torch.randn(3, 293, 2, 64, device="cuda").unbind(0)
    table = torch.randn(2, 399, device="cuda", requires_grad=True)

    def results(implementation):
        bias = jm.RelativeBias(position=table)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = dict(bias=bias, implementation=implementation, **DROPOUT)
        out = F.jagged_attention(*leaves, offsets([93, 200], "cuda"), **options)
        return out, *torch.autograd.grad(out.square().sum(), (*leaves, table))

    for x, y in zip(results("auto"), results("reference")):
        assert float((x - y).norm() / y.norm()) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[5, 256, 120], [9] * 9000], ids=["tiles", "packed tiles"])
def test_the_weights_are_those_of_the_cpu(lengths, dtype, offsets):
    """Equal scores, and a value for each place, show which weights are kept."""
    longest, rows = max(lengths), sum(lengths)
    q = torch.zeros(rows, 2, 64)
    v = torch.cat([torch.eye(longest)[:n] for n in lengths])[:, None].expand(-1, 2, -1)
    segments = offsets(lengths)

    def kept(device):
        own = [x.to(device, dtype) for x in (q, q, v)]
        return F.jagged_attention(*own, segments.to(device), **DROPOUT) > 0

    assert torch.equal(kept("cuda").cpu(), kept("cpu"))


@pytest.mark.parametrize("function", ["jagged", "block"])
def test_hopper_kernels_refuse_it(function, offsets):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    q = torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16)
    attend = F.jagged_attention if function == "jagged" else F.block_diagonal_attention
    with pytest.raises(ValueError, match="'hopper' takes no dropout of attention weights"):
        attend(q, q, q, offsets([40, 60], "cuda"), implementation="hopper", **DROPOUT)


def test_a_graph_drops_other_weights_at_each_replay(offsets):
    """The seed is drawn in the graph, so forward and backward of a replay agree."""
    q, k, v = (torch.randn(300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
    segments = offsets([70, 100, 130], "cuda")

    def step():
        out = F.jagged_attention(q, k, v, segments, dropout_p=0.3)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    results = []
    for seed in (1, 2, 1):
        torch.cuda.manual_seed(seed)
        graph.replay()
        results.append([x.clone() for x in captured])
    assert all(torch.equal(x, y) for x, y in zip(results[0], results[2]))
    assert not torch.equal(results[0][0], results[1][0])
    # out is linear in v, so <dv, v> = sum(out)
    for out, _, _, dv in results:
        total, terms = (dv.double() * v).sum(), (dv.double() * v).abs().sum()
        assert abs(float(total - out.double().sum())) < 1e-5 * float(terms)


def attend_to_users(layer, x):
    return layer(x[0].view(-1, 1, 128), x, torch.arange(len(x[0]), device="cuda") % 3)


def attend_to_both(layer, x):
    (values, _), out = layer(x, x[0][:30, None], torch.arange(30, device="cuda") % 3)
    return torch.cat([values, out[:, 0]])


def update(layer, x):
    return layer(x)[0]


HSTU = jm.HSTUConfig(attention_dropout=0.3, scaling_seqlen=200)
LAYERS = {
    "JaggedTargetAttention": (
        partial(jm.JaggedTargetAttention, attention_dropout=0.3),
        attend_to_users,
    ),
    "JaggedSelfTargetAttention": (
        partial(jm.JaggedSelfTargetAttention, attention_dropout=0.3),
        attend_to_both,
    ),
    "JaggedGDPA": (partial(jm.JaggedGDPA, config=jm.GDPAConfig(attention_dropout=0.3)), update),
    "HSTULayer": (partial(jm.HSTULayer, config=HSTU), update),
    "BlockDiagonalSelfAttention": (
        partial(jm.BlockDiagonalSelfAttention, attention_dropout=0.3),
        update,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers(name, dtype, offsets):
    """As one node, and by their modules, which a hook asks for, from the same seed."""
    make, call = LAYERS[name]
    layer = make(128, 2, device="cuda", dtype=dtype)
    x = torch.randn(500, 128, device="cuda", dtype=dtype), offsets([130, 170, 200], "cuda")
    torch.manual_seed(3)
    out = call(layer, x)
    assert not torch.equal(out, call(layer, x))
    torch.manual_seed(3)
    assert torch.equal(out, call(layer, x))
    grads = torch.autograd.grad(out.float().square().sum(), tuple(layer.parameters()))
    assert all(bool(g.isfinite().all()) for g in grads)
    for module in layer.children():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: None)
    torch.manual_seed(3)
    by_modules = call(layer, x)
    by_modules_grads = torch.autograd.grad(
        by_modules.float().square().sum(), tuple(layer.parameters())
    )
    limit = 1e-3 if dtype == torch.float32 else 0.05
    for a, b in zip((out, *grads), (by_modules, *by_modules_grads)):
        assert float((a.float() - b.float()).norm()) < limit * max(float(b.float().norm()), 1e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_layers(name, offsets):
    make, call = LAYERS[name]
    layer = make(128, 2, device="cuda")
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    x = torch.randn(500, 128, device="cuda"), offsets([130, 170, 200], "cuda")
    out = compiled(layer, x)
    assert not torch.equal(out, compiled(layer, x))
    out.sum().backward()
    layer.eval()
    torch.testing.assert_close(compiled(layer, x), call(layer, x), rtol=1e-3, atol=1e-3)


def test_as_many_weights_are_dropped_as_p_says(offsets):
    rows, p = 250, 0.3
    v = torch.eye(rows, device="cuda")[:, None].expand(-1, 4, -1)
    q = torch.zeros(rows, 4, 64, device="cuda")
    kept = F.jagged_attention(q, q, v, offsets([rows], "cuda"), dropout_p=p) > 0
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * deviation
