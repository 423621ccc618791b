"""The oracle itself: against one dense masked softmax over all rows, and against finite
differences."""

import pytest
import torch

from jagged_modules.masks import AttentionMask
from jagged_modules.reference import attention_reference


def dense_attention(
    q, k, v, q_lengths, kv_lengths, scale, function=None, mask=None, targets=None, output_scale=None
):
    """Every query row against every key row. Pairs of different segments, and pairs that the mask
    hides, are masked out.

    function: of the scores, softmax if None. targets, output_scale: of each segment.
    """
    q_segment, kv_segment = (
        torch.arange(len(n)).repeat_interleave(torch.tensor(n, dtype=torch.int64))
        for n in (q_lengths, kv_lengths)
    )
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    seen = q_segment[:, None] == kv_segment
    if mask is not None:
        seen &= torch.block_diag(
            *(mask.keep(*sizes) for sizes in zip(q_lengths, kv_lengths, targets))
        )
    p = torch.zeros_like(scores)
    if function is None:
        p[:, seen.any(1)] = torch.softmax(
            scores.masked_fill(~seen, float("-inf"))[:, seen.any(1)], dim=-1
        )
    else:
        p[:, seen] = function(scores[:, seen])
    if output_scale is not None:
        p = p * output_scale[q_segment][:, None]
    return torch.einsum("hij,jhd->ihd", p, v)


@pytest.mark.parametrize(
    "q_lengths, kv_lengths, heads, kv_heads",
    [
        ([3, 1, 5], [3, 1, 5], 2, 2),
        ([2, 0, 4], [5, 3, 1], 4, 2),
        ([2, 3], [0, 4], 3, 1),
        ([], [], 1, 1),
    ],
)
def test_reference_is_masked_dense_attention(q_lengths, kv_lengths, heads, kv_heads, offsets_of):
    q = torch.randn(sum(q_lengths), heads, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(sum(kv_lengths), kv_heads, 6, dtype=torch.float64, requires_grad=True)
    v = torch.randn(sum(kv_lengths), kv_heads, 4, dtype=torch.float64, requires_grad=True)
    expected = dense_attention(q, k, v, q_lengths, kv_lengths, 0.3)
    actual = attention_reference(q, k, v, offsets_of(q_lengths), offsets_of(kv_lengths), scale=0.3)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    options = dict(grad_outputs=grad, materialize_grads=True, allow_unused=True)
    if not q_lengths:
        return
    torch.testing.assert_close(
        torch.autograd.grad(actual, [q, k, v], **options),
        torch.autograd.grad(expected, [q, k, v], **options),
    )


@pytest.mark.parametrize("activation", ["softmax", "identity", "silu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "fields", [dict(), dict(global_prefix=1, recent_history=3)], ids=["", "prefix"]
)
def test_masks_activations_and_scales(causal, activation, fields, offsets_of):
    """With rows that see nothing: queries before the first key."""
    q_lengths, kv_lengths, targets = [3, 5, 0, 4], [3, 2, 2, 9], [1, 0, 2, 3]
    mask = AttentionMask(
        causal,
        (7, 2),
        torch.tensor(targets),
        target_group_size=2,
        max_attn_len=4,
        min_full_attn_seqlen=1,
        **fields,
    )
    options = dict(
        mask=mask,
        output_scale=None
        if activation == "softmax"
        else torch.tensor([0.5, 3.0, 1.0, -0.25], dtype=torch.float64),
    )
    inputs = [
        torch.randn(n, h, 3, dtype=torch.float64, requires_grad=True)
        for n, h in ((12, 4), (16, 2), (16, 2))
    ]
    function = {"softmax": None, "identity": lambda x: x, "silu": lambda x: x * torch.sigmoid(x)}[
        activation
    ]
    expected = dense_attention(
        *inputs, q_lengths, kv_lengths, 0.3, function, targets=targets, **options
    )
    options["output_scale"] = 1.0 if activation == "softmax" else options["output_scale"]
    actual = attention_reference(
        *inputs,
        offsets_of(q_lengths),
        offsets_of(kv_lengths),
        scale=0.3,
        activation=activation,
        **options,
    )
    assert not causal or not expected[3:6].any()
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    )


def test_one_scale_for_all_segments(offsets_of):
    q, k, v = torch.randn(3, 7, 2, 4, dtype=torch.float64)
    options = dict(scale=0.3, activation="relu")
    expected = attention_reference(q, k, v, offsets_of([4, 3]), offsets_of([4, 3]), **options) * 0.2
    torch.testing.assert_close(
        attention_reference(
            q, k, v, offsets_of([4, 3]), offsets_of([4, 3]), output_scale=0.2, **options
        ),
        expected,
    )


def test_shared_queries_are_every_segments_queries(offsets_of):
    seeds = torch.randn(3, 2, 4, dtype=torch.float64)
    k, v = torch.randn(6, 2, 4, dtype=torch.float64), torch.randn(6, 2, 5, dtype=torch.float64)
    shared = attention_reference(
        seeds, k, v, offsets_of([3, 3]), offsets_of([2, 4]), scale=1.0, q_shared=True
    )
    torch.testing.assert_close(
        shared, dense_attention(seeds.repeat(2, 1, 1), k, v, [3, 3], [2, 4], 1.0)
    )


def test_reference_passes_gradcheck(offsets_of):
    q, k, v = (
        torch.randn(n, h, 3, dtype=torch.float64, requires_grad=True)
        for n, h in ((5, 2), (6, 1), (6, 1))
    )
    offsets, kv_offsets = offsets_of([2, 0, 3]), offsets_of([4, 2, 0])
    assert torch.autograd.gradcheck(
        lambda *x: attention_reference(*x, offsets, kv_offsets, scale=0.7), (q, k, v)
    )
    output_scale = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    options = dict(scale=0.7, activation="gelu_taylor", mask=AttentionMask(causal=True))
    assert torch.autograd.gradcheck(
        lambda q, k, v, output_scale: attention_reference(
            q, k, v, offsets, kv_offsets, output_scale=output_scale, **options
        ),
        (q, k, v, output_scale),
    )
