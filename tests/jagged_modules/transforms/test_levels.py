"""Attention to histories of several levels, of users and vendors for example: keys and values are
computed at their own level, and no row is copied to a finer one."""

import copy

import torch
from marks import slow_after
from torch import nn

from jagged_modules.transforms import fuse_broadcasts
from jagged_modules.transforms.runtime import attend_levels_in_place

from .test_replication import matmul_rows

WIDTH, HEADS, OF_USER, OF_VENDOR = 16, 2, 9, 5
# users, vendors, items; the first are those of the example. Users without vendors, and one of each
SIZES = [(3, 40, 600), (2, 7, 30), (1, 1, 2), (5, 12, 13)]
JOINED = {
    "nested": lambda x, y, m, n: torch.cat([x[m][n], y[n]], 1),
    "composed": lambda x, y, m, n: torch.cat([x.index_select(0, m[n]), y[n]], 1),
    "joined per vendor": lambda x, y, m, n: torch.cat([x[m], y], 1)[n],
    "vendor first": lambda x, y, m, n: torch.cat([y[n], x[m][n]], 1),
    "three parts": lambda x, y, m, n: torch.cat([x[m][n], y[n], x.tanh()[m][n]], 1),
    "one layer first": lambda x, y, m, n: torch.cat([x.tanh()[m][n], y[n]], 1) * 2,
}


class ByHand(nn.Module):
    """softmax(q kᵀ) v."""

    def __init__(self):
        super().__init__()
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, query, history):
        key, value = self.kv(history).relu().chunk(2, -1)
        return (query @ key.mT * 0.3).softmax(-1) @ value


class Fused(ByHand):
    """scaled_dot_product_attention of heads."""

    def forward(self, query, history):
        key, value = (
            x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in self.kv(history).chunk(2, -1)
        )
        query = query.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(query, key, value)
        return out.transpose(1, 2).flatten(2)


class MultiHead(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, query, history):
        return self.attention(query, history, history, need_weights=self.need_weights)[0]


ATTENTIONS = {
    "by hand": ByHand,
    "scaled_dot_product_attention": Fused,
    "multi-head": lambda: MultiHead(False),
    "multi-head with weights": lambda: MultiHead(True),
}


class Model(nn.Module):
    def __init__(self, joined, attention):
        super().__init__()
        self.joined, self.attention = joined, attention
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, users, vendors, items, user_of_vendor, vendor_of_item):
        history = self.joined(users, vendors, user_of_vendor, vendor_of_item)
        interest = self.attention(items[:, None], history)[:, 0]
        return self.head(torch.cat([interest, items], 1))


def inputs(users, vendors, items):
    return (
        torch.randn(users, OF_USER, WIDTH).double(),
        torch.randn(vendors, OF_VENDOR, WIDTH).double(),
        torch.randn(items, WIDTH).double(),
        torch.randint(users, (vendors,)),
        torch.randint(vendors, (items,)),
    )


def fused_of(joined, attention):
    torch.manual_seed(0)
    model = Model(JOINED[joined], ATTENTIONS[attention]()).double().eval()
    return model, fuse_broadcasts(model, inputs(*SIZES[0]))


CASES = [
    ("nested", "scaled_dot_product_attention"),
    ("joined per vendor", "multi-head"),
    ("composed", "by hand"),
    ("three parts", "multi-head with weights"),
]
OTHERS = [(x, y) for x in JOINED for y in ATTENTIONS if (x, y) not in CASES]


@slow_after(len(CASES), "joined, attention", CASES + OTHERS)
@torch.no_grad()
def test_levels_are_read_in_place(joined, attention):
    model, fused = fused_of(joined, attention)
    graph = copy.deepcopy(fused)
    for sizes in SIZES:
        given = inputs(*sizes)
        for module in (fused, graph):
            torch.testing.assert_close(module(*given), model(*given))
    called = [x for x in graph.graph.nodes if x.target is attend_levels_in_place]
    assert len(called) == 1
    # no row of a history is gathered, and each level's keys and values are computed once
    assert "gather" not in {x.operator for x in fused.report.ranges.operators}
    users, vendors, items = 3, 40, 600
    rows = matmul_rows(graph, *inputs(users, vendors, items))
    histories = {users * OF_USER, vendors * OF_VENDOR}
    assert histories <= set(rows) <= {*histories, items}


@torch.no_grad()
def test_a_row_of_a_level_reaches_its_own_items_alone():
    _, fused = fused_of("nested", "scaled_dot_product_attention")
    users, vendors, items, user_of_vendor, vendor_of_item = inputs(3, 40, 600)
    user_of_vendor[user_of_vendor == 2] = 0
    for level, of_item in ((users, user_of_vendor[vendor_of_item]), (vendors, vendor_of_item)):
        for row in (0, 2):
            kept = level[row].clone()
            level[row] = torch.nan
            found = fused(users, vendors, items, user_of_vendor, vendor_of_item)
            assert torch.equal(found.isnan().any(1), of_item == row)
            level[row] = kept


@torch.no_grad()
def test_a_level_of_the_caller_and_one_of_the_model():
    """Their maps are not related."""

    class OfCaller(Model):
        def forward(self, users, vendors, items, vendor_of_item):
            history = torch.cat([users, vendors[vendor_of_item]], 1)
            return self.head(torch.cat([self.attention(items[:, None], history)[:, 0], items], 1))

    torch.manual_seed(0)
    model = OfCaller(None, Fused()).double().eval()
    example = (
        torch.randn(64, OF_USER, WIDTH).double(),
        torch.randn(16, OF_VENDOR, WIDTH).double(),
        torch.randn(64, WIDTH).double(),
        torch.randint(16, (64,)),
    )
    fused = fuse_broadcasts(model, example, request_only=["users"], max_batch=(4, 600))
    assert any(x.target is attend_levels_in_place for x in fused.graph.nodes)
    users, vendors, items, _, vendor_of_item = inputs(3, 20, 50)
    index = torch.randint(3, (50,))
    torch.testing.assert_close(
        fused(users, vendors, items, vendor_of_item, candidate_to_user=index),
        model(users[index], vendors, items, vendor_of_item),
    )


@torch.no_grad()
def test_an_exported_program_has_any_sizes():
    model, fused = fused_of("joined per vendor", "multi-head")
    shapes = fused.report.ranges.dynamic_shapes()
    module = torch.export.export(fused, inputs(3, 20, 50), dynamic_shapes=shapes).module()
    for sizes in SIZES[:2]:
        given = inputs(*sizes)
        torch.testing.assert_close(module(*given), model(*given))


def unchanged(joined, attention):
    """That an attention reads no levels in place, and its results are the model's."""
    torch.manual_seed(0)
    model = Model(joined, attention).double().eval()
    fused = fuse_broadcasts(model, inputs(*SIZES[0]))
    assert not any(x.target is attend_levels_in_place for x in fused.graph.nodes)
    for sizes in SIZES:
        given = inputs(*sizes)
        torch.testing.assert_close(copy.deepcopy(fused)(*given), model(*given))


class Mixing(Fused):
    """Keys that mix the rows of a history."""

    def forward(self, query, history):
        return super().forward(query, history + history.cumsum(1))


@torch.no_grad()
def test_keys_that_mix_rows_stay_as_they_are():
    unchanged(JOINED["nested"], Mixing())


class Across(nn.Module):
    """The rows of a history are the columns of its keys."""

    def forward(self, query, history):
        rows = history.shape[1]
        key = history.mT
        return nn.functional.scaled_dot_product_attention(query[..., :rows], key, key)


@torch.no_grad()
def test_keys_along_another_dimension_stay_as_they_are():
    class Padded(Across):
        def forward(self, query, history):
            return nn.functional.pad(super().forward(query, history), (0, 2))

    assert OF_USER + OF_VENDOR == WIDTH - 2
    unchanged(JOINED["nested"], Padded())


class Masked(Fused):
    """Keys of some rows are hidden, by a mask of each item."""

    def forward(self, query, history):
        key = self.kv(history)[:, None, :, :WIDTH]
        mask = (history[..., 0] < 0.5)[:, None, None]
        return nn.functional.scaled_dot_product_attention(query[:, None], key, key, mask)[:, 0]


@torch.no_grad()
def test_hidden_keys_stay_hidden():
    unchanged(JOINED["nested"], Masked())
