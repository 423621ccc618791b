"""NaN and infinity at positions that a mask hides, on the CPU: no result and no gradient has a term
of a hidden pair."""

import math
from functools import partial

import pytest
import torch
from marks import slow_after

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS, POINTWISE

LENGTHS, TARGETS, HEADS, KV_HEADS = [150, 3, 3, 0], [5, 1, 2, 0], 4, 2
MASKS = {
    "causal": dict(causal=True),
    "targets": dict(
        causal=True, num_targets=torch.tensor(TARGETS), contextual_seqlen=2, max_attn_len=40
    ),
    "window": dict(window=(3, 2)),
    "prefix": dict(causal=True, window=(30, None), global_prefix=2, recent_history=60),
}
# At NaN, torch's hardswish has a gradient of 0 or NaN, by memory address. Autograd's of relu(x)² is
# 0 below 0 whatever its factor is.
TESTED = [name for name in ACTIVATIONS if name not in ("hardswish", "relu_squared")]


def attention_of_visible_pairs(q, k, v, mask, activation):
    """Each query row by itself, with the keys and values that it sees and no others."""
    rows, start = [], 0
    for length, targets in zip(LENGTHS, TARGETS):
        keep = mask.keep(length, length, targets if mask.num_targets is not None else 0)
        for i in range(length):
            seen = start + keep[i].nonzero().squeeze(1)
            keys, values = (x[seen].repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
            scores = torch.einsum("hd,jhd->hj", q[start + i], keys) * q.shape[2] ** -0.5
            p = (
                scores.softmax(-1)
                if activation == "softmax"
                else POINTWISE[activation].function(scores)
            )
            rows.append(torch.einsum("hj,jhd->hd", p, values))
        start += length
    return torch.stack(rows)


def run(function, operands):
    leaves = [operands[name].clone().requires_grad_() for name in ("q", "k", "v")]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, operands["do"].to(out.dtype))]


@pytest.fixture
def operands():
    torch.manual_seed(0)
    heads = dict(q=HEADS, k=KV_HEADS, v=KV_HEADS, do=HEADS)
    return {name: torch.randn(sum(LENGTHS), n, 8, dtype=torch.float64) for name, n in heads.items()}


def check(operands, mask, activation):
    mask = jm.AttentionMask(**MASKS[mask])
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    ours = run(
        lambda q, k, v: F.jagged_attention(q, k, v, offsets, activation=activation, mask=mask),
        operands,
    )
    expected = run(lambda q, k, v: attention_of_visible_pairs(q, k, v, mask, activation), operands)
    assert not all(y.isfinite().all() for y in expected), "the poison is seen somewhere"
    for name, x, y in zip(("out", "dq", "dk", "dv"), ours, expected):
        torch.testing.assert_close(x, y, equal_nan=True, msg=partial("{}: {}".format, name))


@slow_after(3, "activation", TESTED)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("operand", ["q", "k", "v", "do"])
def test_nan_reaches_only_rows_that_see_it(operands, operand, mask, activation):
    operands[operand][[130, 151, 154]] = math.nan
    check(operands, mask, activation)


@pytest.mark.parametrize("activation", ["softmax", "silu", "identity"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("operand", ["k", "v", "do"])
def test_infinity_reaches_only_rows_that_see_it(operands, operand, mask, activation):
    operands[operand][130, :, 3], operands[operand][133, :, 3], operands[operand][154, :, 5] = (
        math.inf,
        -math.inf,
        math.inf,
    )
    check(operands, mask, activation)


@pytest.mark.parametrize("activation", ["softmax", "identity"])
def test_hidden_scores_may_be_too_large_for_the_dtype(activation):
    q, k, v = (torch.ones(3, 1, 8, requires_grad=True) for _ in range(3))
    scale = torch.tensor([1.0, 1.0, 1e30])[:, None, None]
    offsets, mask = torch.tensor([0, 3]), jm.AttentionMask(window=(0, 0))
    out = F.jagged_attention(
        q * scale.flip(0), k * scale, v, offsets, activation=activation, mask=mask, scale=1e-9
    )
    out.sum().backward()
    assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))


def test_a_poisoned_segment_changes_no_bit_of_another(operands):
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask, rows = jm.AttentionMask(causal=True), slice(LENGTHS[0], None)

    def attend(q, k, v):
        with jm.batch_invariant(True):
            return F.jagged_attention(q, k, v, offsets, mask=mask)

    clean = run(attend, operands)
    operands["k"][130] = math.nan
    for x, y in zip(clean, run(attend, operands)):
        assert torch.equal(x[rows], y[rows])
