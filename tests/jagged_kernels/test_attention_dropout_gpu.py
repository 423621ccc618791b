"""Dropout of attention weights on a GPU."""

import math
from functools import partial

import pytest
import torch
from jagged_kernels.attention.select import hopper_is_supported

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
KERNELS = [  # implementation, head dims, dtype
    ("triton", dims, dtype) for dims, dtype in SIZES
] + [
    ("hopper", dims, dtype)
    for dims, dtype in [((40, 64), torch.float16), *SIZES]
    if hopper_is_supported(*dims, dtype, (9, 0))
]


@pytest.fixture(autouse=True)
def hopper_needs_its_gpu(request):
    if "hopper" in request.node.name and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize(
    "lengths, activation, mask, heads, shared, kernels, dims, dtype",
    [case + kernels for i, case in enumerate(CASES) for kernels in KERNELS[i % 2 :: 2]],
)
def test_forward_and_gradients(
    check_attention, lengths, activation, mask, heads, shared, kernels, dims, dtype
):
    """Each case with every second of the kernels, each of them with half of the cases."""
    options = dict(heads=heads, activation=activation, mask=mask, shared=shared, kernels=kernels)
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


def weights_by_kernel(dim, shared, offsets, **options):
    """The weights of equal scores, computed by the forward, the dq and the dk, dv kernel: there is
    a value, a key, or a gradient of the output for each place. Of three segments, whose rows or
    keys may be shared, and 4 query heads for 2 key heads, which are summed by the last kernel."""
    lengths = [300, 5, 130]
    places = [torch.arange(n, device="cuda") for n in lengths]
    of_keys = places[0] if shared == "kv" else torch.cat(places)
    num_queries = 300 if shared == "q" else sum(lengths)
    segments = ["shared" if shared == name else offsets(lengths, "cuda") for name in ("q", "kv")]

    def windows(places):
        """`[rows, 1, dim]`: a one where a row's place is that of the column."""
        for first in range(0, int(places.max()) + 1, dim):
            columns = first + torch.arange(dim, device="cuda")
            yield (places[:, None] == columns)[:, None].bfloat16()

    def attend(q, k, v, activation):
        return F.jagged_attention(q, k, v, *segments, activation=activation, **options)

    q = torch.zeros(num_queries, 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ones = torch.ones(len(of_keys), 2, dim, device="cuda", dtype=torch.bfloat16)
    by_forward, by_dq, by_dv = [], [], []
    for window in windows(of_keys):
        window = window.expand(-1, 2, -1).contiguous()
        by_forward.append(attend(q, ones, window, "softmax").detach())
        by_dq += torch.autograd.grad(attend(q, window, ones, "sigmoid").sum(), q)
    v = ones.clone().requires_grad_()
    out = attend(q, ones, v, "softmax")
    for window in windows(torch.arange(len(out), device="cuda")):
        by_dv += torch.autograd.grad(out, v, window.expand_as(out), retain_graph=True)
    return [torch.cat(x, -1) for x in (by_forward, by_dq, by_dv)]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("invariant", [False, True], ids=["by batch", "invariant"])
@pytest.mark.parametrize("shared", [None, "q", "kv"], ids=str)
def test_hopper_drops_what_the_portable_kernels_drop(shared, invariant, dim, offsets):
    """A weight that one drops and the other keeps is half of a sum of two, or more."""
    with jm.batch_invariant(invariant):
        hopper, portable = (
            weights_by_kernel(dim, shared, offsets, implementation=x, **DROPOUT)
            for x in ("hopper", "triton")
        )
        everything = weights_by_kernel(dim, shared, offsets, implementation="triton")
    # dq of shared rows is a sum over segments: 5 of 300 places are in three of them, 125 in two.
    # dv is a sum over two heads. By place, all segments drop the same.
    of_dq = 0.792 if shared == "q" and not invariant else 0.7
    expected = 0.7, of_dq, 0.91
    for ours, others, whole, share in zip(hopper, portable, everything, expected):
        torch.testing.assert_close(ours, others, rtol=0.03, atol=0)
        kept = float((ours[:, 0] > 0).sum() / (whole[:, 0] > 0).sum())
        assert abs(kept - share) < 0.02


def test_hopper_drops_by_place_where_keys_lie_in_pages(check_pages):
    check_pages(
        ([3, 70, 300], [130, 270, 390]), torch.bfloat16, "cuda", dims=(64, 64),
        kernels="hopper", **DROPOUT,
    )  # fmt: skip


def test_hopper_blocks_refuse_it(offsets):
    q = torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="'hopper' takes no dropout of attention weights"):
        F.block_diagonal_attention(
            q, q, q, offsets([40, 60], "cuda"), implementation="hopper", **DROPOUT
        )


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
