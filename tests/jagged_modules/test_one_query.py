"""Softmax attention on the CPU of segments with one query row each."""

import accuracy
import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.cpu import attention, one_query
from jagged_modules.layers import target_node

LENGTHS = [3, 0, 50, 1, 50, 17, 0]
OFFSETS, QUERIES = torch.tensor([0, *LENGTHS]).cumsum(0), torch.arange(len(LENGTHS) + 1)


@pytest.fixture
def chunks(monkeypatch):
    """The chunks that are computed forward."""
    found, forward = [], one_query.forward

    def counted(chunk, *others):
        found.append(chunk)
        forward(chunk, *others)

    monkeypatch.setattr(one_query, "forward", counted)
    return found


def operands(dtype=torch.float32, heads=2, dim=8, v_dim=8):
    kv = torch.randn(sum(LENGTHS), 2 * heads, max(dim, v_dim)).to(dtype)  # as a projection's
    k, v = kv.chunk(2, 1)
    return torch.randn(len(LENGTHS), heads, dim).to(dtype), k[..., :dim], v[..., :v_dim]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [one_query.CHUNK, 100])
def test_accuracy(monkeypatch, chunks, dtype, size):
    monkeypatch.setattr(one_query, "CHUNK", size)
    q, k, v = operands(dtype, v_dim=5)
    accuracy.check(
        lambda q, k, v: F.jagged_attention(q, k, v, QUERIES, OFFSETS, scale=-0.7),
        lambda q, k, v, do: accuracy.attention(q, k, v, do, QUERIES, OFFSETS, scale=-0.7),
        dict(q=q, k=k, v=v),
    )
    assert len(chunks) == (5 if size == 100 else 1)
    assert sum(chunk.num_keys for chunk in chunks) == sum(LENGTHS)


def test_results_are_those_of_groups(monkeypatch, chunks):
    """In float64, of a layer too, with targets in any order. It projects the history, as of few
    rows."""
    monkeypatch.setattr(target_node, "_has_few_candidates", lambda *_: False)
    layer = jm.JaggedTargetAttention(16, 2).double()
    targets, history = (torch.randn(n, 16, dtype=torch.float64) for n in (7, sum(LENGTHS)))
    users = torch.tensor([4, 0, 6, 2, 1, 5, 3])

    def results():
        inputs = [x.clone().requires_grad_() for x in (targets, history)]
        out = layer(inputs[0][:, None], (inputs[1], OFFSETS), users)
        return [out, *torch.autograd.grad(out.sin().sum(), [*inputs, *layer.parameters()])]

    found = results()
    assert len(chunks) == 1
    monkeypatch.setattr(attention, "has_one_query_each", lambda call: False)
    torch.testing.assert_close(found, results())
    assert len(chunks) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_values_that_are_not_finite_stay_in_their_segment(chunks, name, value):
    """And give there what the definition gives."""
    tensors, rows = dict(zip("qkv", operands())), dict(q=slice(2, 3), k=slice(10, 12))
    do = torch.randn(len(LENGTHS), 2, 8)

    def results(implementation):
        leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
        out = F.jagged_attention(*leaves, QUERIES, OFFSETS, implementation=implementation)
        return [out, *torch.autograd.grad(out, leaves, do)]

    clean = results("auto")
    tensors[name][rows.get(name, rows["k"])] = value
    found, expected = results("auto"), results("reference")
    own = [rows["q"], rows["q"], slice(3, 53), slice(3, 53)]  # of the third segment
    for x, y, z, part in zip(found, clean, expected, own):
        others = torch.ones(len(x), dtype=torch.bool)
        others[part] = False
        assert torch.equal(x[others], y[others])
        assert torch.equal(x.isnan(), z.isnan())


def test_no_keys(chunks):
    q, k, v = (x.requires_grad_() for x in (torch.randn(3, 2, 4), *torch.randn(2, 0, 2, 4)))
    out = F.jagged_attention(q, k, v, torch.arange(4), torch.zeros(4, dtype=torch.long))
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert len(chunks) == 1 and not any(x.any() for x in (out, *gradients))


@pytest.mark.parametrize(
    "options",
    [
        dict(mask=jm.AttentionMask(causal=True)),
        dict(activation="silu"),
        dict(bias=jm.RelativeBias(torch.randn(99))),
    ],
    ids=["mask", "activation", "bias"],
)
def test_other_options_are_computed_in_groups(chunks, options):
    F.jagged_attention(*operands(), QUERIES, OFFSETS, **options)
    assert not chunks


def test_other_queries_are_computed_in_groups(chunks):
    q, k, v = operands()
    for queries in (torch.tensor([0, 2, 3, 4, 5, 6, 7, 7]), torch.tensor([0, 0, 2, 3, 4, 5, 6, 7])):
        F.jagged_attention(q, k, v, queries, OFFSETS)
    F.jagged_attention(q, k[:, :1], v[:, :1], QUERIES, OFFSETS)
    with jm.batch_invariant(True):
        F.jagged_attention(q, k, v, QUERIES, OFFSETS)
    assert not chunks


def test_the_order_of_histories_is_kept(monkeypatch):
    """No operator sorts or gathers the rows of a history that is projected."""
    monkeypatch.setattr(target_node, "_has_few_candidates", lambda *_: False)
    layer = jm.JaggedTargetAttention(16, 2)
    history, targets = torch.randn(sum(LENGTHS), 16), torch.randn(7, 1, 16)
    layer(targets, (history, OFFSETS))
    with torch.profiler.profile(record_shapes=True) as profile:
        layer(targets, (history, OFFSETS)).sum().backward()
    moved = [x for x in profile.events() if x.name in ("aten::index_copy_", "aten::sort")]
    taken = [x for x in profile.events() if x.name == "aten::index_select"]
    assert not moved and all(x.input_shapes[0][0] != len(history) for x in taken)
