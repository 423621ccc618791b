"""JaggedSelfTargetAttention: equal to a layer for each part, in one call of the attention
operator."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import jagged_modules as jm
from jagged_modules import functional as F

WIDTH, HEADS, TARGET_WIDTH = 16, 2, 6
OFFSETS = torch.tensor([0, 4, 4, 9])


class Attentions(TorchDispatchMode):
    """Counts calls of the attention operator."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.ops.jagged_modules.attention_cpu.default
        return function(*args, **(kwargs or {}))


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return jm.JaggedSelfTargetAttention(WIDTH, HEADS, TARGET_WIDTH).double()


def heads(x):
    return x.unflatten(-1, (HEADS, -1))


def in_two_calls(layer, history, targets, candidates):
    """The events' results by `jagged_attention`, the candidates' by JaggedTargetAttention with the
    same weights."""
    k, v = heads(layer.kv_proj(history).unflatten(-1, (2, WIDTH))).unbind(1)
    own = F.jagged_attention(heads(layer.q_proj(history)), k, v, OFFSETS).flatten(1)
    other = jm.JaggedTargetAttention(WIDTH, HEADS, TARGET_WIDTH).double()
    for name, source in dict(
        q_proj="target_proj", kv_proj="kv_proj", out_proj="target_out_proj"
    ).items():
        setattr(other, name, getattr(layer, source))
    return layer.out_proj(own), other(targets, (history, OFFSETS), candidates)


@pytest.mark.parametrize(
    "index", [[2, 0, 2, 1, 0], [0, 0, 1, 2, 2], []], ids=["any order", "grouped", "none"]
)
def test_candidates(layer, index):
    index = torch.tensor(index, dtype=torch.int64)
    history = torch.randn(9, WIDTH).double().requires_grad_()
    targets = torch.randn(len(index), 3, TARGET_WIDTH).double().requires_grad_()
    leaves = [history, targets, *layer.parameters()]
    with Attentions() as mode:
        (values, offsets), out = layer((history, OFFSETS), targets, index)
    assert mode.calls == 1 and torch.equal(offsets, OFFSETS)
    expected = in_two_calls(layer, history, targets, jm.CandidateIndex.from_map(index, 3))
    torch.testing.assert_close((values, out), expected)
    gradients, theirs = (
        torch.autograd.grad(x[0].square().sum() + x[1].square().sum(), leaves)
        for x in ((values, out), expected)
    )
    torch.testing.assert_close(gradients, theirs)


def test_jagged_targets(layer):
    history, targets = torch.randn(9, WIDTH).double(), torch.randn(5, TARGET_WIDTH).double()
    counts = torch.tensor([0, 2, 3, 5])
    values, out = layer(jm.Jagged(history, OFFSETS), jm.Jagged(targets, counts))
    expected = in_two_calls(
        layer, history, targets[:, None], jm.CandidateIndex.from_offsets(counts)
    )
    torch.testing.assert_close((values.values, out.values), (expected[0], expected[1][:, 0]))


HISTORY = torch.randn(9, WIDTH).double(), OFFSETS
BAD = {
    "history's width": (
        (HISTORY[0][:, :8], OFFSETS),
        torch.randn(2, 1, 6).double(),
        [0, 1],
        ValueError,
        "history's values must have shape",
    ),
    "targets' width": (
        HISTORY,
        torch.randn(2, 1, 7).double(),
        [0, 1],
        ValueError,
        r"targets must have shape .*E_t = 6, got \[2, 1, 7\]",
    ),
    "two dimensions": (
        HISTORY,
        torch.randn(2, 6).double(),
        [0, 1],
        ValueError,
        r"\[num_candidates, n_q, E_t\]",
    ),
    "no candidates": (
        HISTORY,
        torch.randn(3, 1, 6).double(),
        None,
        TypeError,
        "or a dense tensor .* with candidates, got a Tensor without candidates",
    ),
    "candidates": (
        HISTORY,
        torch.randn(2, 1, 6).double(),
        [0, 1, 1],
        ValueError,
        "candidates describe 3 candidates, targets have 2",
    ),
    "no such user": (
        HISTORY,
        torch.randn(2, 1, 6).double(),
        [0, 3],
        ValueError,
        "candidates must be 0 to num_users - 1 = 2",
    ),
    "dense targets": (HISTORY, torch.randn(2, 1, 6).double(), None, TypeError, "targets"),
    "other segments": (
        HISTORY,
        (torch.randn(2, 6).double(), torch.tensor([0, 2])),
        None,
        ValueError,
        "same number of segments, got 1 and 3",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs(layer, name):
    history, targets, candidates, error, message = BAD[name]
    with pytest.raises(error, match=message):
        layer(history, targets, candidates if candidates is None else torch.tensor(candidates))


def test_construction():
    with pytest.raises(ValueError, match="num_heads"):
        jm.JaggedSelfTargetAttention(16, 3)
    assert "target_dim=16" in repr(jm.JaggedSelfTargetAttention(16, 2))
