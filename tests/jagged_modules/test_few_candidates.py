"""JaggedTargetAttention on the CPU with few candidates for each user, whose history is not
projected."""

import accuracy
import pytest
import torch
import torch.nn.functional as F

import jagged_modules as jm
from jagged_modules.cpu import shares
from jagged_modules.layers import target_node

LENGTHS = [3, 0, 50, 1, 50, 17, 0]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
USERS = torch.tensor([4, 0, 6, 2, 1, 5, 3])


@pytest.fixture
def pooled(monkeypatch):
    """The sizes of the calls that do not project the history."""
    found, pool = [], target_node.pool

    def counted(q, x, *others):
        found.append((tuple(q.shape), tuple(x.shape)))
        return pool(q, x, *others)

    monkeypatch.setattr(target_node, "pool", counted)
    return found


def inputs(dtype=torch.float64, width=32, target_dim=32):
    shapes = (len(LENGTHS), 1, target_dim), (sum(LENGTHS), width)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def results(layer, targets, history, users=USERS):
    """The result, and the gradients of both and of the parameters."""
    wanted = [x for x in (targets, history, *layer.parameters()) if x.requires_grad]
    out = layer(targets, (history, OFFSETS), users)
    return [out, *torch.autograd.grad(out.sin().sum(), wanted)]


FORMS = {
    "one in order": (7, 1, None),
    "one of each user": (7, 1, USERS),
    "two of each user": (7, 2, None),
    "other numbers, two queries": (6, 2, torch.tensor([3, 0, 3, 4, 2, 6])),
    "none": (0, 1, torch.zeros(0, dtype=torch.int64)),
}


@pytest.mark.parametrize("heads, width", [(1, 32), (5, 40), (8, 64)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [shares.SHARE, 1000])
def test_results_are_those_with_projections(monkeypatch, pooled, heads, width, form, share):
    monkeypatch.setattr(shares, "SHARE", share)
    layer = jm.JaggedTargetAttention(width, heads, target_dim=10).double()
    number, queries, users = FORMS[form]
    targets = torch.randn(number, queries, 10, dtype=torch.float64).requires_grad_()
    given = targets, inputs(width=width)[1], users
    found = results(layer, *given)
    assert pooled == [((number * queries, heads, width), (sum(LENGTHS), width))]
    monkeypatch.setattr(target_node, "_has_few_candidates", lambda *_: False)
    torch.testing.assert_close(found, results(layer, *given))
    assert len(pooled) == 1


def test_targets_in_a_container(monkeypatch, pooled):
    layer = jm.JaggedTargetAttention(32, 2).double()
    _, history = inputs()
    rows, offsets = torch.randn(9, 32, dtype=torch.float64), [0, 2, 3, 3, 5, 6, 8, 9]
    targets = jm.Jagged(rows.requires_grad_(), torch.tensor(offsets))

    def found():
        out = layer(targets, (history, OFFSETS)).values
        return [out, *torch.autograd.grad(out.sin().sum(), [rows, history, *layer.parameters()])]

    expected = found()
    assert len(pooled) == 1
    monkeypatch.setattr(target_node, "_has_few_candidates", lambda *_: False)
    torch.testing.assert_close(expected, found())
    assert len(pooled) == 1


@pytest.mark.parametrize("lengths", [[4] * 6, [9, 2, 2, 1, 0, 7]])
def test_histories_that_are_sorted_already(monkeypatch, pooled, lengths):
    layer = jm.JaggedTargetAttention(32, 2).double()
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    history = torch.randn(sum(lengths), 32, dtype=torch.float64).requires_grad_()
    targets = torch.randn(6, 1, 32, dtype=torch.float64)

    def found():
        out = layer(targets, (history, offsets))
        return [out, *torch.autograd.grad(out.sin().sum(), [history, *layer.parameters()])]

    expected = found()
    monkeypatch.setattr(target_node, "_has_few_candidates", lambda *_: False)
    torch.testing.assert_close(expected, found())
    assert len(pooled) == 1


def test_accuracy(pooled):
    """In float32, beside the same products in float64."""
    layer = jm.JaggedTargetAttention(32, 2)
    targets, history = inputs(torch.float32, 32, 32)
    tensors = dict(targets=targets, history=history) | dict(layer.named_parameters())
    tensors = {name.replace(".", "_"): x.detach() for name, x in tensors.items()}

    def ours(targets, history, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters))
        return torch.func.functional_call(layer, named, (targets, (history, OFFSETS)))

    def theirs(targets, history, q_weight, q_bias, kv_weight, kv_bias, out_weight, out_bias):
        q = F.linear(targets, q_weight, q_bias).view(-1, 2, 16)
        of_keys, of_values = kv_weight.view(2, 2, 16, 32)
        q = (q[:, :, None] @ of_keys)[:, :, 0]
        outs = []
        for of_segment, x in zip(q, history.split(LENGTHS)):
            u = (of_segment @ x.T / 4).softmax(1) @ x  # [H, E]
            out = (of_values @ u[..., None]).flatten() + kv_bias[32:] * bool(len(x))
            outs.append(F.linear(out, out_weight, out_bias))
        return torch.stack(outs)[:, None]

    accuracy.check(ours, lambda *x: accuracy.definition(theirs, tensors, x[-1]), tensors)
    assert pooled


@pytest.mark.parametrize("name", ["targets", "history", "q_proj.weight", "kv_proj.bias"])
def test_what_requires_no_gradient_gets_none(pooled, name):
    layer = jm.JaggedTargetAttention(32, 2).double()
    targets, history = inputs()
    named = dict(targets=targets, history=history) | dict(layer.named_parameters())
    expected = dict(zip(named, results(layer, targets, history)[1:]))
    named[name].requires_grad_(False)
    del expected[name]
    assert len(pooled) == 1
    found = results(layer, targets, history)[1:]
    torch.testing.assert_close(found, list(expected.values()))


@pytest.mark.parametrize("name", ["targets", "history"])
def test_values_that_are_not_finite_stay_in_their_segment(pooled, name):
    layer = jm.JaggedTargetAttention(32, 2).double()
    given = dict(zip(("targets", "history"), inputs()))
    clean = results(layer, *given.values(), None)[:3]
    own = dict(targets=2, history=slice(10, 12))
    with torch.no_grad():
        given[name][own[name]] = torch.nan
    found = results(layer, *given.values(), None)[:3]
    for x, y, part in zip(found, clean, (2, 2, slice(3, 53))):
        others = torch.ones(len(x), dtype=torch.bool)
        others[part] = False
        assert torch.equal(x[others], y[others]) and x[part].isnan().all()
    assert len(pooled) == 2


def test_other_calls_project_the_history(pooled):
    def call(layer, *given):
        layer(*given)
        assert not pooled

    layer, dropped = (jm.JaggedTargetAttention(32, 2, attention_dropout=x) for x in (0, 0.1))
    targets, history = inputs(torch.float32)
    rows = (history, OFFSETS)
    call(layer, targets.expand(7, 9, 32), rows)  # many queries for each user
    call(dropped, targets, rows)
    call(jm.JaggedTargetAttention(32, 32), targets, rows)  # many heads
    narrow = [x[..., :16] for x in (targets, history)]
    call(jm.JaggedTargetAttention(16, 2), narrow[0], (narrow[1], OFFSETS))
    call(layer, targets, (history[:12], torch.arange(8).clamp(max=6) * 2))  # few rows
    with jm.batch_invariant(True):
        call(layer, targets, rows)
    with torch.autocast("cpu", torch.bfloat16):
        call(layer, targets, rows)
    dropped.eval()(targets, rows)
    assert len(pooled) == 1


def test_a_second_derivative_raises(pooled):
    layer, (targets, history) = jm.JaggedTargetAttention(32, 2).double(), inputs()
    out = layer(targets, (history, OFFSETS))
    (dx,) = torch.autograd.grad(out.sum(), history, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        torch.autograd.grad(dx.sum(), history)


def test_memory(pooled):
    """Neither keys and values nor a query for each row: less than the history's projection."""
    layer = jm.JaggedTargetAttention(32, 2)
    history, offsets = torch.randn(4096, 32, requires_grad=True), torch.arange(0, 4097, 64)
    targets = torch.randn(64, 1, 32)

    def step():
        layer(targets, (history, offsets)).sum().backward()

    step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    sizes = [x.cpu_memory_usage for x in profile.events()]
    assert len(pooled) == 2 and max(sizes) < 4096 * 64 * 4
