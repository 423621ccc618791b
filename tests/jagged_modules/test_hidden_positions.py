"""Values that are not finite under a mask, on the CPU: rows that see one are not finite, no other
segment has it, and a hidden score changes nothing."""

import math

import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import POINTWISE

LENGTHS, TARGETS, HEADS, KV_HEADS = [150, 3, 3, 0], [5, 1, 2, 0], 4, 2
MASKS = {
    "causal": dict(causal=True),
    "targets": dict(
        causal=True, num_targets=torch.tensor(TARGETS), contextual_seqlen=2, max_attn_len=40
    ),
    "window": dict(window=(3, 2)),
    "prefix": dict(causal=True, window=(30, None), global_prefix=2, recent_history=60),
}


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


@pytest.mark.parametrize("activation", ["softmax", "silu", "identity"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value", [math.nan, -math.inf], ids=str)
@pytest.mark.parametrize("operand", ["q", "k", "v", "do"])
def test_rows_that_see_it_are_not_finite(operands, operand, value, mask, activation):
    operands[operand][[130, 151]], mask = value, jm.AttentionMask(**MASKS[mask])
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    ours = run(
        lambda q, k, v: F.jagged_attention(q, k, v, offsets, activation=activation, mask=mask),
        operands,
    )
    expected = run(lambda q, k, v: attention_of_visible_pairs(q, k, v, mask, activation), operands)
    assert not all(y.isfinite().all() for y in expected), "a row sees it"
    for x, y in zip(ours, expected, strict=True):
        assert not (x.isfinite() & ~y.isfinite()).any()
        torch.testing.assert_close(x[153:], y[153:])  # the segment as long as that of row 151


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


@pytest.mark.parametrize("poisoned", range(3), ids="qkv")
def test_a_neighbours_nan_stays_in_it_where_queries_see_no_key(poisoned, offsets_of):
    """The first queries of segments with more queries than keys, under a causal mask."""
    offsets = offsets_of([5, 4]), offsets_of([2, 1])
    q, do = torch.randn(2, 9, 2, 8)
    k, v = torch.randn(2, 3, 2, 8)

    def of_the_first_segment(*qkv):
        leaves = [x.clone().requires_grad_() for x in qkv]
        out = F.jagged_attention(*leaves, *offsets, mask=jm.AttentionMask(causal=True))
        dq, dk, dv = torch.autograd.grad(out, leaves, do)
        return out[:5], dq[:5], dk[:2], dv[:2]

    expected, given = of_the_first_segment(q, k, v), [x.clone() for x in (q, k, v)]
    given[poisoned][-1] = torch.nan
    for x, y in zip(of_the_first_segment(*given), expected):
        assert torch.equal(x, y) and y.isfinite().all()
