"""The oracle itself: against one dense masked softmax over all rows, and against finite differences."""

import pytest
import torch

from jagged_modules.reference import attention_reference


def dense_attention(q, k, v, q_lengths, kv_lengths, scale):
    """Every query row against every key row, the pairs of different segments masked out."""
    q_segment, kv_segment = (torch.arange(len(n)).repeat_interleave(torch.tensor(n, dtype=torch.int64)) for n in (q_lengths, kv_lengths))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = scores.masked_fill(q_segment[:, None] != kv_segment, float("-inf"))
    visible = (q_segment[:, None] == kv_segment).any(1)
    p = torch.zeros_like(scores)
    p[:, visible] = torch.softmax(scores[:, visible], dim=-1)
    return torch.einsum("hij,jhd->ihd", p, v)


@pytest.mark.parametrize(
    "q_lengths, kv_lengths, heads, kv_heads",
    [([3, 1, 5], [3, 1, 5], 2, 2), ([2, 0, 4], [5, 3, 1], 4, 2), ([2, 3], [0, 4], 3, 1), ([], [], 1, 1)],
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
    torch.testing.assert_close(torch.autograd.grad(actual, [q, k, v], **options), torch.autograd.grad(expected, [q, k, v], **options))


def test_shared_queries_are_every_segments_queries(offsets_of):
    seeds = torch.randn(3, 2, 4, dtype=torch.float64)
    k, v = torch.randn(6, 2, 4, dtype=torch.float64), torch.randn(6, 2, 5, dtype=torch.float64)
    shared = attention_reference(seeds, k, v, offsets_of([3, 3]), offsets_of([2, 4]), scale=1.0, q_shared=True)
    torch.testing.assert_close(shared, dense_attention(seeds.repeat(2, 1, 1), k, v, [3, 3], [2, 4], 1.0))


def test_reference_passes_gradcheck(offsets_of):
    q, k, v = (torch.randn(n, h, 3, dtype=torch.float64, requires_grad=True) for n, h in ((5, 2), (6, 1), (6, 1)))
    offsets, kv_offsets = offsets_of([2, 0, 3]), offsets_of([4, 2, 0])
    assert torch.autograd.gradcheck(lambda *x: attention_reference(*x, offsets, kv_offsets, scale=0.7), (q, k, v))
