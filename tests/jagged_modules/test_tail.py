"""Rows behind the last segment, where only a graph's device knows the lengths: the CPU path under
torch.compile."""

import pytest
import torch
from marks import slow_after
from tails import LAYERS, ON_KERNELS, ON_TORCH, check, compiled, layer_case

import jagged_modules as jm
from jagged_modules import functional as F

CASES = ON_KERNELS | ON_TORCH


@slow_after(1, "dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_functions_in_a_graph(name, dtype):
    check(CASES[name], compiled(CASES[name].call), dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_a_graph(name):
    layer, case = layer_case(name)
    check(case, compiled(case.call), torch.float32, parameters=layer.parameters())


@pytest.fixture
def candidates():
    """candidate → user with indices out of range in between, and a mask of the others."""
    users = torch.tensor([-1, 2, 0, 4, 3, 0, 2**31 - 1, 2, 2, -(2**31)])
    return users, (users >= 0) & (users < 4)


def tailed_rows(x, real):
    """x, with NaN in the rows that are not real."""
    return x.masked_fill(~real.view(-1, *[1] * (x.dim() - 1)), float("nan")).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_candidates_of_no_user_in_a_graph(candidates, offsets_of, dtype):
    users, real = candidates
    q = torch.randn(10, 2, 2, 8)
    k = torch.randn(9, 2, 8)
    v = torch.randn(9, 2, 8)
    offsets = offsets_of([3, 0, 5, 1])
    all_q, some_q = tailed_rows(q, real), q[real].requires_grad_()
    k.requires_grad_()

    def attend(q, users):
        return F.target_attention(q, k, v, jm.CandidateIndex.from_map(users, 4), offsets)

    found = compiled(attend)(all_q, users.to(dtype))
    expected = attend(some_q, users[real].to(dtype))
    grad = torch.randn(10, 2, 2, 8)
    found = found, *torch.autograd.grad(found, (all_q, k), tailed_rows(grad, real).detach())
    expected = expected, *torch.autograd.grad(expected, (some_q, k), grad[real])
    for x, y in zip(found[:2], expected[:2]):
        torch.testing.assert_close(x[real], y)
        assert not x[~real].any()
    torch.testing.assert_close(found[2], expected[2])


@pytest.mark.parametrize("layer", [jm.JaggedTargetAttention, jm.JaggedSelfTargetAttention])
def test_layers_with_candidates_of_no_user_in_a_graph(candidates, offsets_of, layer):
    (users, real), layer = candidates, layer(16, 2)
    targets, history = torch.randn(10, 3, 16), (torch.randn(9, 16), offsets_of([3, 0, 5, 1]))
    all_targets, some_targets = targets.clone().requires_grad_(), targets[real].requires_grad_()

    def score(targets, users):
        if isinstance(layer, jm.JaggedTargetAttention):
            return layer(targets, history, users)
        return layer(history, targets, users)[1]

    found, expected = compiled(score)(all_targets, users), score(some_targets, users[real])
    grad = torch.randn(10, 3, 16)
    found.backward(grad.masked_fill(~real[:, None, None], 0))
    # the bias, as without a history
    assert torch.equal(found[~real], found[~real][:1, :1].expand_as(found[~real]))
    assert not all_targets.grad[~real].any()
    found = (
        found.detach(),
        all_targets.grad,
        *(x.grad for x in layer.parameters() if x.grad is not None),
    )
    layer.zero_grad(set_to_none=True)
    expected.backward(grad[real])
    expected = (
        expected,
        some_targets.grad,
        *(x.grad for x in layer.parameters() if x.grad is not None),
    )
    for x, y in zip(found[:2], expected[:2]):
        torch.testing.assert_close(x[real], y)
    for x, y in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)  # sums of the rows in another order


def test_compression_clamps_indices_in_a_graph(candidates):
    users, _ = candidates
    weights = [torch.randn(3, 4), torch.randn(3, 5)]
    embeddings = [torch.randn(4, 4, 6), torch.randn(10, 5, 6)]
    expected = F.linear_compress(weights, embeddings, users.clamp(0, 3))
    assert torch.equal(compiled(F.linear_compress)(weights, embeddings, users), expected)
    index = compiled(
        lambda users: F.linear_compress(weights, embeddings, jm.CandidateIndex.from_map(users, 4))
    )(users)
    assert torch.equal(
        index, F.linear_compress(weights, embeddings, torch.where(users < 0, 3, users).clamp(max=3))
    )
