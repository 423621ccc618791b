"""The attention of a history to itself, and that of targets to it, become one self_target_attention
where both read the same keys and values."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from jagged_modules.transforms import fuse_broadcasts

HEADS, DIM, EVENTS, USERS, ITEMS = 2, 8, 7, 5, 128


class Attentions(TorchDispatchMode):
    """Counts attention operators, torch's and this project's."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += "attention" in str(function)
        return function(*args, **(kwargs or {}))


def by_hand(q, k, v, hidden=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def without_mask(own, target, k, v, padding):
    return scaled_dot_product_attention(own, k, v), scaled_dot_product_attention(target, k, v)


def causal(own, target, k, v, padding):
    of_users = scaled_dot_product_attention(own, k, v, is_causal=True)
    return of_users, scaled_dot_product_attention(target, k, v)


def padded(own, target, k, v, padding):
    visible = ~padding[:, None, None]
    of_users = scaled_dot_product_attention(own, k, v, visible)
    return of_users, scaled_dot_product_attention(target, k, v, visible)


def softmax(own, target, k, v, padding):
    hidden = padding[:, None, None]
    return by_hand(own, k, v, hidden), by_hand(target, k, v, hidden)


def one_dimension(own, target, k, v, padding):
    """Batch and heads are one dimension, as in nn.MultiheadAttention that returns weights."""
    own, target, k, v = (x.flatten(0, 1) for x in (own, target, k, v))
    of_users, of_targets = ((q @ k.mT).softmax(-1) @ v for q in (own, target))
    return of_users.unflatten(0, (-1, HEADS)), of_targets.unflatten(0, (-1, HEADS))


def targets_first(own, target, k, v, padding):
    of_targets = scaled_dot_product_attention(target, k, v)
    return scaled_dot_product_attention(own.relu(), k, v), of_targets


def read_between(own, target, k, v, padding):
    return scaled_dot_product_attention(own, k, v).relu(), scaled_dot_product_attention(
        target, k, v
    )


def few_rows(own, target, k, v, padding):
    """The last two events attend."""
    own = own[:, :, -2:]
    return scaled_dot_product_attention(own, k, v), scaled_dot_product_attention(target, k, v)


def other_mask(own, target, k, v, padding):
    of_users = scaled_dot_product_attention(own, k, v, ~padding[:, None, None])
    return of_users, scaled_dot_product_attention(target, k, v)


def mask_of_targets(own, target, k, v, padding):
    of_users = scaled_dot_product_attention(own, k, v, is_causal=True)
    return of_users, scaled_dot_product_attention(target, k, v, ~padding[:, None, None])


def causal_from_the_first(own, target, k, v, padding):
    """torch aligns few queries with the first keys, this project with the last."""
    of_users = scaled_dot_product_attention(own[:, :, -2:], k, v, is_causal=True)
    return of_users, scaled_dot_product_attention(target, k, v)


def window(own, target, k, v, padding):
    seen = torch.ones(EVENTS, EVENTS, dtype=torch.bool).tril().triu(-1)
    of_users = scaled_dot_product_attention(own, k, v, seen)
    return of_users, scaled_dot_product_attention(target, k, v)


def other_scale(own, target, k, v, padding):
    of_users = scaled_dot_product_attention(own, k, v, scale=0.3)
    return of_users, scaled_dot_product_attention(target, k, v)


def other_values(own, target, k, v, padding):
    return scaled_dot_product_attention(own, k, v.relu()), scaled_dot_product_attention(
        target, k, v
    )


def other_keys(own, target, k, v, padding):
    return scaled_dot_product_attention(own, k.relu(), v), scaled_dot_product_attention(
        target, k, v
    )


def one_after_the_other(own, target, k, v, padding):
    of_users = scaled_dot_product_attention(own, k, v)
    target = target + of_users.mean(2, keepdim=True)
    return of_users, scaled_dot_product_attention(target, k, v)


JOINED = [
    without_mask,
    causal,
    padded,
    softmax,
    one_dimension,
    targets_first,
    few_rows,
    read_between,
]
APART = [
    other_mask, mask_of_targets, causal_from_the_first, window, other_scale, other_values,
    other_keys, one_after_the_other,
]  # fmt: skip


class Multihead(nn.Module):
    """nn.MultiheadAttention of a history to itself and of targets to it, by one module or two."""

    def __init__(self, by_one=True, weights=False, targets_first=False, **options):
        super().__init__()
        self.own = nn.MultiheadAttention(DIM, HEADS, **options)
        self.target = self.own if by_one else nn.MultiheadAttention(DIM, HEADS, **options)
        self.weights, self.targets_first = weights, targets_first

    def forward(self, history, padding, item):
        item = item[:, None]
        if not self.own.batch_first:
            history, item = history.transpose(0, 1), item.transpose(0, 1)
        queries = [(self.own, history), (self.target, item)]
        order = -1 if self.targets_first else 1
        of_users, of_targets = [
            attention(x, history, history, padding, self.weights)[0]
            for attention, x in queries[::order]
        ][::order]
        if not self.own.batch_first:
            of_users, of_targets = of_users.transpose(0, 1), of_targets.transpose(0, 1)
        return of_users.relu().mean(1) + of_targets.flatten(1)


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.own, self.target, self.kv = (nn.Linear(DIM, n * DIM) for n in (1, 1, 2))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, history, padding, item):
        own, k, v = (
            x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for x in (self.own(history), *self.kv(history).chunk(2, -1))
        )
        target = self.target(item).unflatten(-1, (HEADS, 1, -1))
        of_users, of_targets = self.attend(own, target, k, v, padding)
        pooled = self.out(of_users.transpose(1, 2).flatten(2)).relu().mean(1)
        return pooled + of_targets.flatten(1)


def inputs(users=USERS, items=ITEMS):
    lengths = torch.randint(1, EVENTS + 1, (users, 1))
    shared = torch.randn(users, EVENTS, DIM), torch.arange(EVENTS) >= lengths
    return shared, torch.randn(items, DIM), torch.randint(users, (items,))


def fused_model(attend):
    model = (attend if isinstance(attend, nn.Module) else Model(attend)).eval()
    (history, padding), item, index = inputs()
    arguments = history[index], padding[index], item
    return model, fuse_broadcasts(model, arguments, request_only=["history", "padding"])


def decisions(fused):
    return sorted(
        (x.decision, x.reason) for x in fused.report.sites if x.reason.endswith("target_attention")
    )


MULTIHEAD = {
    "batch first": dict(batch_first=True),
    "sequence and targets first": dict(targets_first=True),
    "weights, no bias": dict(batch_first=True, weights=True, bias=False),
}


@pytest.mark.parametrize(
    "attend", [*JOINED, *(pytest.param(Multihead(**x), id=name) for name, x in MULTIHEAD.items())]
)
@torch.no_grad()
def test_one_launch(attend):
    model, fused = fused_model(attend)
    for users, items in ((USERS, ITEMS), (3, 50)):
        (history, padding), item, index = inputs(users, items)
        with Attentions() as counter:
            found = fused(history, padding, item, candidate_to_user=index)
        assert counter.calls == 1
        expected = model(history[index], padding[index], item)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert ("moved", "self_target_attention") in decisions(fused)
    assert ("fused", "self_target_attention") in decisions(fused)
    assert "self_target_attention" in str(fused.report)


@pytest.mark.parametrize(
    "attend", [*APART, pytest.param(Multihead(by_one=False, batch_first=True), id="two modules")]
)
@torch.no_grad()
def test_two_launches(attend):
    """Other keys or values, masks that are not the same, or an order."""
    model, fused = fused_model(attend)
    (history, padding), item, index = inputs()
    with Attentions() as counter:
        found = fused(history, padding, item, candidate_to_user=index)
    assert counter.calls == 2
    expected = model(history[index], padding[index], item)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert {reason for _, reason in decisions(fused)} == {"target_attention"}


@pytest.mark.parametrize("attend", [partial(padded), partial(softmax)], ids=["operator", "softmax"])
@torch.no_grad()
def test_a_user_without_visible_keys_is_as_in_the_model(attend):
    model, fused = fused_model(attend)
    (history, padding), item, index = inputs()
    padding[1] = True
    found = fused(history, padding, item, candidate_to_user=index)
    expected = model(history[index], padding[index], item)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@torch.no_grad()
def test_exported_and_compiled():
    model, fused = fused_model(causal)
    (history, padding), item, index = inputs()
    expected = model(history[index], padding[index], item)
    given = dict(candidate_to_user=index)
    program = torch.export.export(fused, (history, padding, item), given).module()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True, dynamic=True)
    for call in (program, compiled):
        found = call(history, padding, item, **given)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
