"""JaggedSelfTargetAttention as one autograd node on a GPU, beside its modules and float64:
candidates in any form, empty histories, frozen parameters, rows behind the end."""

import copy

import pytest
import torch

import jagged_modules as jm
from jagged_modules.layers import one_node, self_target_node

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
LENGTHS, WIDTH, TARGET_WIDTH = [70, 0, 1, 300, 129, 64], 64, 40
USERS = torch.tensor([5, 0, 2, 2, 1, 0, 5, 3, 2, 1, 3, 3])
FORMS = {  # of the targets
    "any order": USERS,
    "grouped": USERS.sort().values,
    "one user": torch.full((300,), 3),
    "none": USERS[:0],
}
PRECISIONS = {  # dtype of rows and parameters, autocast
    "fp32": (torch.float32, None),
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}
# Roundings of one element on the way from an input to a gradient, as in test_one_node_gpu.py
ROUNDINGS = 16


@pytest.fixture
def nodes(monkeypatch):
    """The calls of the node."""
    calls, original = [], self_target_node._Node.forward

    def forward(ctx, *inputs):
        calls.append(None)
        return original(ctx, *inputs)

    monkeypatch.setattr(self_target_node._Node, "forward", staticmethod(forward))
    return calls


class Case:
    """The layer on the GPU and in float64 on the CPU, and its inputs. tail: rows of NaN behind the
    last history and the last target, which are then grouped by user."""

    def __init__(self, users, dtype=torch.float32, tail=0):
        torch.manual_seed(0)
        self.layer = jm.JaggedSelfTargetAttention(WIDTH, 4, TARGET_WIDTH).to(dtype)
        self.exact = copy.deepcopy(self.layer).double()
        self.layer.cuda()
        self.users, self.tail, self.rows = users, tail, (sum(LENGTHS), len(users))
        self.inputs = [
            torch.randn(self.rows[0], WIDTH).to(dtype),
            torch.randn(self.rows[1], 2, TARGET_WIDTH).to(dtype),
        ]
        shapes = (self.rows[0], WIDTH), (self.rows[1], 2, WIDTH)
        self.grads = [torch.randn(*shape).to(dtype) for shape in shapes]
        self.offsets = torch.tensor([0, *LENGTHS]).cumsum(0)

    def with_tail(self, x):
        return torch.cat([x, x.new_full((self.tail, *x.shape[1:]), torch.nan)])

    def results(self, layer, frozen=(), autocast=None):
        """Both results and all gradients by name; None of what is frozen. Without the tail, which
        is checked to be 0."""
        device, dtype = next(layer.parameters()).device, next(layer.parameters()).dtype
        tail = self.tail if device.type == "cuda" else 0
        of_rows = self.with_tail if tail else lambda x: x
        history, targets = (of_rows(x.to(device, dtype)).detach() for x in self.inputs)
        inputs = dict(history=history.requires_grad_(), targets=targets.requires_grad_())
        named = inputs | dict(layer.named_parameters())
        for name, x in named.items():
            x.requires_grad_(name not in frozen).grad = None
        index = jm.CandidateIndex.from_map(self.users.to(device), len(LENGTHS))
        if tail:
            index = jm.CandidateIndex.from_offsets(index.offsets)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            (values, _), out = layer((history, self.offsets.to(device)), targets, index)
        results = [values, out]
        torch.autograd.backward(results, [of_rows(g.to(x)) for g, x in zip(self.grads, results)])
        found = dict(values=values, out=out) | {name: x.grad for name, x in named.items()}
        for name in ("values", "out", "history", "targets"):
            if tail and found[name] is not None:
                assert not found[name][-tail:].any()
                found[name] = found[name][:-tail]
        return found

    def modules(self, layer, *args, **kwargs):
        """The results of the chain of modules."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_node, "may_be_one_node", lambda *_, **__: False)
            return self.results(layer, *args, **kwargs)


def assert_rounded(found, expected, dtype):
    """As in test_one_node_gpu.py."""
    error = ROUNDINGS * torch.finfo(dtype).eps / 2
    if dtype == torch.float32:
        error *= sum(LENGTHS) ** 0.5
    assert found.keys() == expected.keys()
    for name, x in found.items():
        y = expected[name]
        assert (x is None) == (y is None), name
        if x is None:
            continue
        x, y = x.detach().double().cpu(), y.detach().double().cpu()
        assert x.shape == y.shape and x.isfinite().all(), name
        if x.numel():
            error_of_all = (x - y).square().mean().sqrt()
            assert error_of_all <= error * y.square().mean().sqrt() + 1e-30, name


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients(nodes, form, precision):
    dtype, autocast = PRECISIONS[precision]
    case = Case(FORMS[form], dtype)
    found = case.results(case.layer, autocast=autocast)
    assert len(nodes) == 1
    for name, x in found.items():
        expected = autocast if autocast and name in ("values", "out") else dtype
        assert x.dtype == expected, name
    for others in (found, case.modules(case.layer, autocast=autocast)):
        assert_rounded(others, case.modules(case.exact), autocast or dtype)
    assert len(nodes) == 1


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_rows_behind_the_end(nodes, autocast):
    """NaN there reaches nothing."""
    case = Case(FORMS["grouped"], tail=50)
    found = case.results(case.layer, autocast=autocast)
    assert len(nodes) == 1
    assert_rounded(found, case.modules(case.exact), autocast or torch.float32)


def test_frozen_parameters(nodes):
    case = Case(FORMS["any order"])
    names = ["history", "targets", *(name for name, _ in case.layer.named_parameters())]
    halves = names[::2], names[1::2], [x for x in names if "out_proj" not in x]
    for frozen in (*([name] for name in names), *halves):
        found = case.results(case.layer, frozen, torch.bfloat16)
        assert all((found[name] is None) == (name in frozen) for name in names)
        assert_rounded(found, case.modules(case.exact, frozen), torch.bfloat16)


def test_without_gradients(nodes):
    """The same bits, in less memory than with gradients."""
    case, peaks, results = Case(FORMS["any order"], torch.bfloat16), [], []
    index = jm.CandidateIndex.from_map(case.users.cuda(), len(LENGTHS))
    inputs = (case.inputs[0].cuda(), case.offsets.cuda()), case.inputs[1].cuda(), index
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            case.layer(*inputs)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            (values, _), out = case.layer(*inputs)
        peaks.append(torch.cuda.max_memory_allocated())
        results.append((values.detach(), out.detach()))
    assert all(map(torch.equal, *results)) and peaks[1] < peaks[0]
    assert len(nodes) == 4
