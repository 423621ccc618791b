"""Attention of candidates to replicated keys and values becomes target attention, which reads them
in place."""

import copy
import functools
import math

import pytest
import torch
from marks import slow_after
from torch import nn

from jagged_modules.transforms import fuse_broadcasts
from jagged_modules.transforms.clean_up import VIEWS
from jagged_modules.transforms.fuse import make_plan
from jagged_modules.transforms.runtime import attend_in_place, visible_first

from .captured import capture, everything

HEADS, DIM, KEYS, ITEMS = 2, 8, 7, 64


class MultiheadDIN(nn.Module):
    """DIN on nn.MultiheadAttention: the item attends to the history, of which padding is hidden."""

    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.over = nn.Linear(2 * DIM, 1)

    def forward(self, history, padding, item):
        interest, _ = self.attention(
            item[:, None], history, history, key_padding_mask=padding, **self.options
        )
        return self.over(torch.cat([interest[:, 0], item], -1))


class ByHand(nn.Module):
    """softmax(q kᵀ) v of four dimensions, with scores of hidden keys set to -inf."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, history, padding, item):
        q = self.q(item).view(-1, 1, HEADS, DIM // HEADS).transpose(1, 2)
        k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in self.kv(history).chunk(2, -1))
        scores = (q @ k.mT / math.sqrt(DIM // HEADS)).masked_fill(
            padding[:, None, None, :], -math.inf
        )
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(1)


class OneHead(nn.Module):
    """Without heads and masks."""

    def forward(self, history, padding, item):
        return ((item[:, None] @ history.mT * 0.3).softmax(-1) @ history)[:, 0] + padding.any(
            1, keepdim=True
        )


class Fused(ByHand):
    """The same by scaled_dot_product_attention, whose mask is True for visible keys."""

    def forward(self, history, padding, item):
        q = self.q(item).view(-1, 1, HEADS, DIM // HEADS).transpose(1, 2)
        k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in self.kv(history).chunk(2, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v, ~padding[:, None, None, :])
        return out.transpose(1, 2).flatten(1)


MODELS = {
    "multi-head": MultiheadDIN,
    "multi-head without weights": lambda: MultiheadDIN(need_weights=False),
    "by hand": ByHand,
    "one head": OneHead,
    "operator": Fused,
}


def replicated(model, history, padding, item, index):
    return model(history[index], padding[index], item)


def fused_by_caller(model):
    inputs = (
        torch.randn(64, KEYS, DIM),
        torch.zeros(64, KEYS, dtype=torch.bool),
        torch.randn(64, DIM),
    )
    return fuse_broadcasts(model, inputs, request_only=("history", "padding"))


def uses_target_attention(fused):
    return any(
        getattr(node.target, "__name__", "") == "attend_in_place" for node in fused.graph.nodes
    )


@functools.cache
def model_and_fused(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    return model, fused_by_caller(model)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    model, fused = model_and_fused(name)
    assert uses_target_attention(fused)
    assert "fused" in str(fused.report)
    graph = copy.deepcopy(fused)  # without the calls of the model for U >= C
    for users, index in ((3, [2, 0, 2, 2, 0]), (1, [0, 0, 0]), (6, [4]), (1, [0])):
        index, history, item = (
            torch.tensor(index),
            torch.randn(users, KEYS, DIM),
            torch.randn(len(index), DIM),
        )
        padding = torch.rand(users, KEYS) < 0.4  # no prefix
        padding[:, 3] = False
        expected = replicated(model, history, padding, item, index)
        torch.testing.assert_close(graph(history, padding, item, candidate_to_user=index), expected)


@pytest.mark.parametrize(
    "name", ["multi-head", "multi-head without weights", "by hand", "operator"]
)
def test_a_user_without_visible_keys_is_as_in_the_model(name):
    """scaled_dot_product_attention gives 0, a softmax NaN. Other users are not affected."""
    model, fused = model_and_fused(name)
    history = torch.randn(3, KEYS, DIM)
    item = torch.randn(5, DIM)
    index = torch.tensor([1, 0, 1, 2, 0])
    padding = torch.zeros(3, KEYS, dtype=torch.bool)
    padding[1] = True
    expected = replicated(model, history, padding, item, index)
    assert expected[index != 1].isfinite().all()
    torch.testing.assert_close(
        fused(history, padding, item, candidate_to_user=index), expected, equal_nan=True
    )


class OtherMask(ByHand):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, history, padding, item):
        q = self.q(item).view(-1, 1, HEADS, DIM // HEADS).transpose(1, 2).expand(-1, -1, KEYS, -1)
        k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in self.kv(history).chunk(2, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, self.mask(history, padding))


MASKS = {
    "a bias": lambda history, padding: padding[:, None, None, :].float(),
    "per query": lambda history, padding: padding[:, None, :, None].expand(-1, 1, -1, KEYS),
    "not a padding mask": lambda history, padding: torch.zeros(history.shape[:2]).masked_fill(
        padding, -2.0
    )[:, None, None],
    "causal": lambda history, padding: torch.ones(KEYS, KEYS, dtype=torch.bool).tril(),
}


@slow_after(2, "name", MASKS)
def test_other_masks_keep_the_operator(name):
    model = OtherMask(MASKS[name]).eval()
    fused = fused_by_caller(model)
    assert not uses_target_attention(fused)
    history = torch.randn(3, KEYS, DIM)
    item = torch.randn(5, DIM)
    index = torch.tensor([1, 0, 1, 2, 0])
    padding = torch.rand(3, KEYS) < 0.4
    padding[:, 0] = False
    expected = replicated(model, history, padding, item, index)
    torch.testing.assert_close(
        fused(history, padding, item, candidate_to_user=index), expected, equal_nan=True
    )


BROADCAST = {
    "queries of all candidates": ((1, 2, 3, 8), (2, 2)),
    "one head of queries": ((ITEMS, 1, 3, 8), (2, 2)),
    "one head of values": ((ITEMS, 2, 3, 8), (2, 1)),
    "one head of keys and values": ((ITEMS, 2, 3, 8), (1, 1)),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_operands_that_broadcast(name):
    """Only one head of keys and values is read in place."""
    query, heads = BROADCAST[name]

    class Model(nn.Module):
        def forward(self, query, key, value, index):
            return nn.functional.scaled_dot_product_attention(query, key[index], value[index])

    example = (
        torch.randn(query),
        torch.randn(3, heads[0], KEYS, 8),
        torch.randn(3, heads[1], KEYS, 8),
        torch.arange(ITEMS) % 3,
    )
    captured = capture(Model().eval(), example, {})
    plan = make_plan(captured, None, captured.hints, everything)
    fused, decisions = plan.apply()
    assert bool(decisions.fused) == (name == "one head of keys and values")
    torch.testing.assert_close(fused(*example), Model()(*example))


def test_a_softmax_in_another_dtype_stays():
    class Model(nn.Module):
        def forward(self, query, key, value, index):
            return torch.softmax(query @ key[index].mT, -1, dtype=torch.float32) @ value[index]

    example = (
        torch.randn(ITEMS, 3, 8).half(),
        torch.randn(3, KEYS, 8).half(),
        torch.randn(3, KEYS, 8),
        torch.arange(ITEMS) % 3,
    )
    fused = fuse_broadcasts(Model().eval(), example)
    assert not uses_target_attention(fused)
    torch.testing.assert_close(fused(*example), Model()(*example))


def test_the_history_is_not_replicated():
    """No tensor of candidates × history is allocated."""
    _, fused = model_and_fused("multi-head")
    shapes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            shapes.extend(
                x.numel()
                for x in torch.utils._pytree.tree_leaves(result)
                if isinstance(x, torch.Tensor)
            )
            return result

    candidates, users = 300, 3
    with torch.no_grad(), Sizes():
        padding = torch.zeros(users, KEYS, dtype=torch.bool)
        fused(
            torch.randn(users, KEYS, DIM),
            padding,
            torch.randn(candidates, DIM),
            candidate_to_user=torch.arange(candidates) % users,
        )
    assert max(shapes) < candidates * KEYS * DIM


@pytest.mark.parametrize("users, keys", [(1, 1), (1, 4), (3, 5)])
def test_order_of_visible_keys(users, keys):
    torch.manual_seed(0)
    for hidden in (
        torch.zeros(users, keys) > 0,
        torch.ones(users, keys) > 0,
        torch.rand(users, keys) < 0.5,
    ):
        rows, offsets = visible_first(hidden)
        visible = (~hidden).flatten().nonzero()[:, 0]
        assert torch.equal(rows[: len(visible)], visible) and int(rows.max()) < hidden.numel()
        assert (
            torch.equal(offsets[:-1], torch.tensor([0, *(~hidden).sum(1).cumsum(0)]))
            and offsets[-1] == len(rows) == hidden.numel()
        )


def test_keys_and_values_are_no_copies_of_the_projection():
    """The graph has views alone between the projection of the history and the attention."""
    _, fused = model_and_fused("multi-head")
    (attention,) = fused.graph.find_nodes(op="call_function", target=attend_in_place)
    for x in attention.args[1:3]:
        while x.target is not torch.ops.aten.linear.default:
            assert x.target in (*VIEWS, torch.ops.aten.select.int)
            x = x.args[0]
        assert x.args[0].name == "history"


class LengthsDIN(nn.Module):
    """The mask comes from lengths, and no operator but the attention joins the history and the
    item."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, item, history, lengths):
        hidden = torch.arange(history.shape[1], device=lengths.device) >= lengths[:, None]
        return self.attention(
            item[:, None], history, history, key_padding_mask=hidden, need_weights=False
        )[0][:, 0]


@pytest.mark.parametrize("rows, events", [(20, 50), (20, 16), (16, 16)])
def test_all_inputs_have_one_batch(rows, events):
    """Whatever the example's sizes: torch.export may have a symbol for the rows of each input."""
    model, auto = LengthsDIN().eval(), torch.export.Dim.AUTO
    example = (
        torch.randn(rows, DIM),
        torch.randn(rows, events, DIM),
        torch.randint(1, events, (rows,)),
    )
    shapes = ({0: auto}, {0: auto, 1: auto}, {0: auto})
    hooks = dict(model._forward_pre_hooks)
    fused = fuse_broadcasts(
        model, example, request_only=["history", "lengths"], dynamic_shapes=shapes
    )
    assert [site.decision for site in fused.report.sites if "attention" in site.operator] == [
        "fused"
    ]
    assert model._forward_pre_hooks == hooks
    item = torch.randn(30, DIM)
    history = torch.randn(4, 9, DIM)
    lengths = torch.randint(1, 9, (4,))
    index = torch.randint(4, (30,))
    torch.testing.assert_close(
        fused(item, history, lengths, candidate_to_user=index),
        model(item, history[index], lengths[index]),
    )
