"""The report's FLOPs are those that torch counts in the model and in the fused graph, and its other
figures read them."""

import copy

import pytest
import torch
from marks import slow_after
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import jagged_modules.flops  # noqa: F401  # registers the formulas
from jagged_modules.transforms import fuse_broadcasts
from jagged_modules.transforms.bags import select_rows

pytest.importorskip("torchrec")

from .test_models_dtypes import CASES

USERS, CANDIDATES = 15, 1024


def measured(module, **inputs):
    """In torch, fused operators of a CPU have no formulas: of nn.MultiheadAttention, attention and
    nn.LSTM."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.mkldnn.flags(enabled=False),
        ):
            with FlopCounterMode(display=False) as counter:
                module(**inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return counter.get_total_flops()


def checked_report(model, inputs, shared, users, candidates):
    """The report of a model fused for these numbers of users and candidates. Its FLOPs are those of
    a call.

    inputs: a function of both numbers.
    """
    torch.manual_seed(0)
    fused = fuse_broadcasts(
        model.eval(), inputs(64, 64), request_only=shared, max_batch=(users, candidates)
    )
    given, index = inputs(users, candidates), torch.arange(candidates) % users
    replicated = {name: select_rows(x, index) if name in shared else x for name, x in given.items()}
    graph, report = copy.deepcopy(fused), fused.report
    assert (report.before.flops, report.after.flops) == (
        measured(model, **replicated),
        measured(graph, **given, candidate_to_user=index),
    )
    return report


class Compress(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, rows))

    def forward(self, user, item):
        return self.weight @ torch.cat([user, item], 1)


@pytest.mark.parametrize("of_user, of_item, mflop", [(13, 87, 91.4), (50, 50, 53.2)])
def test_products_that_a_compression_replaces(of_user, of_item, mflop):
    def inputs(users, candidates):
        return dict(user=torch.randn(users, of_user, 64), item=torch.randn(candidates, of_item, 64))

    report = checked_report(Compress(of_user + of_item), inputs, ("user",), USERS, CANDIDATES)
    (site,) = report.sites
    assert (site.decision, site.reason) == ("fused", "linear_compress")
    assert (site.before.flops, site.after.flops) == (report.before.flops, report.after.flops)
    assert (
        round(report.before.flops / 1e6, 1) == 104.9 and round(report.after.flops / 1e6, 1) == mflop
    )
    read = 4 * (8 * (of_user + of_item) + 64 * (USERS * of_user + CANDIDATES * of_item))
    assert report.after.bytes == read + 4 * CANDIDATES * 8 * 64


def test_products_that_an_attention_replaces():
    class ByHand(nn.Module):
        def forward(self, history, item):
            return ((item[:, None] @ history.mT * 0.3).softmax(-1) @ history)[:, 0]

    def inputs(users, candidates):
        return dict(history=torch.randn(users, 20, 32), item=torch.randn(candidates, 32))

    report = checked_report(ByHand(), inputs, ("history",), USERS, CANDIDATES)
    assert [(site.decision, site.after.flops) for site in report.sites] == [
        ("fused", 2 * CANDIDATES * 20 * 32)
    ] * 2
    assert round(report.after.flops / 1e6, 2) == 2.62
    assert report.after.bytes == 4 * (2 * USERS * 20 * 32 + 2 * CANDIDATES * 32)


class Operators(nn.Module):
    """Other operators with GEMMs, on the user's rows, and on the candidates'."""

    def __init__(self):
        super().__init__()
        self.gru, self.lstm = (
            nn.GRU(8, 6, batch_first=True, bidirectional=True),
            nn.LSTM(6, 4, batch_first=True),
        )
        self.conv, self.grouped = nn.Conv1d(12, 4, 3, padding="same"), nn.Conv1d(12, 4, 3, groups=2)
        self.weight = nn.Parameter(torch.randn(12, 8))

    def of_rows(self, x):
        gated = self.gru(x)[0]
        sums = torch.einsum("btd,de,bse->bts", gated, self.weight, x).sum((1, 2)) + torch.tensordot(
            gated, self.weight, 1
        ).sum((1, 2))
        rows = (
            self.conv(gated.mT).sum((1, 2))
            + self.grouped(gated.mT).sum((1, 2))
            + self.lstm(gated[..., :6])[0].sum((1, 2))
        )
        return sums + rows + gated[:, 0] @ self.weight[:, 0]

    def forward(self, history, item):
        return self.of_rows(history) + self.of_rows(item)


def test_operators_with_gemms():
    def inputs(users, candidates):
        return dict(history=torch.randn(users, 5, 8), item=torch.randn(candidates, 5, 8))

    assert any(
        site.decision == "moved"
        for site in checked_report(Operators(), inputs, ("history",), 4, 2000).sites
    )


FIRST = ["attention, multi-head", "own layers", "wukong", "parts, head"]


@slow_after(len(FIRST), "name", [*FIRST, *(name for name in CASES if name not in FIRST)])
def test_models(name):
    case = CASES[name]

    def inputs(users, candidates):
        """In fp64. No key is hidden: the report counts all."""
        given = case.inputs(users, candidates)
        return given | {
            key: torch.zeros_like(x) if x.dtype == torch.bool else x.double()
            for key, x in given.items()
            if isinstance(x, torch.Tensor)
        }

    checked_report(case.model().double(), inputs, case.shared, 5, 40)


class OfUser(nn.Module):
    """Layers of the user, and one of the user and the item."""

    def __init__(self, width, depth):
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(depth)]
        self.user, self.head = nn.Sequential(*layers), nn.Linear(2 * width, width)

    def forward(self, user, item):
        return self.head(torch.cat([self.user(user), item], 1))


@pytest.mark.parametrize("depth", [2, 6])
def test_the_gain_of_gemms_is_that_of_their_flops(depth):
    """Within 15 %: of large GEMMs, the FLOPs are nearly all of the estimated cost."""
    width, users, candidates = 1024, 8, 2048

    def inputs(rows):
        return torch.randn(rows, width), torch.randn(rows, width)

    fused = fuse_broadcasts(
        OfUser(width, depth).eval(), inputs(8), request_only=["user"], max_batch=(users, candidates)
    )
    # of the head, the half that reads the item has a row for each candidate
    rows_before, rows_after = (depth + 2) * candidates, (depth + 1) * users + candidates
    report = fused.report
    assert report.before.flops / report.after.flops == rows_before / rows_after
    assert report.gain == pytest.approx(rows_before / rows_after, rel=0.15)
    assert report.gain == pytest.approx(report.before.total / report.after.total)


def test_a_gather_to_an_inner_level_has_the_rows_of_this_level():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16, bias=False)

        def forward(self, vendors, users, items, vendor_of_user, user_of_item):
            vendor = self.layer(vendors)[vendor_of_user][user_of_item]
            return (vendor + users[user_of_item]).exp() * items

    vendors, users, items = 3, 100, 2000
    rows = [torch.randn(count, 16) for count in (vendors, users, items)]
    maps = torch.randint(vendors, (users,)), torch.randint(users, (items,))
    report = fuse_broadcasts(Nested().eval(), (*rows, *maps)).report
    of_layer, gathers, others = 2 * vendors + 16, 2 * users + 2 * items, 5 * users + 3 * items
    # an operand of another level is estimated with the rows of its own base
    expected = 4 * 16 * (of_layer + gathers + others)
    assert report.after.bytes == pytest.approx(expected, rel=0.02)


def test_a_report_says_that_the_model_runs():
    class Product(nn.Module):
        def forward(self, user, item):
            return user * item

    inputs = torch.randn(8, 4), torch.randn(8, 4)
    report = fuse_broadcasts(Product().eval(), inputs, request_only=["user"]).report
    assert report.runs_model and report.gain == 1
    assert "every call runs the model itself" in str(report)
