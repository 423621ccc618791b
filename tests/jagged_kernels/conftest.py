"""The tolerance rule and the attention check shared by interpreter and GPU tests."""

import pytest
import torch

from jagged_modules import functional as F

MIXED = ([3, 0, 1, 70, 5, 130, 17, 9, 0, 257, 128], [5, 4, 0, 100, 33, 64, 16, 1, 0, 300, 129])
LENGTHS = {  # query and key lengths of the segments
    "mixed": MIXED,
    "empty-ends": ([0, 0, 64, 0, 1, 0], [0, 3, 64, 0, 65, 7]),
    "no-keys": ([4, 130], [0, 0]),
    "no-queries": ([0, 0], [4, 130]),
    "skewed": ([1] * 12 + [300], [2] * 12 + [500]),
    "nothing": ([0], [0]),
}


def offsets_of(lengths, device="cpu", dtype=torch.int64):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype, device=device)


def assert_close_to_exact(name, actual, same_dtype, exact, factor):
    """|actual - exact| <= factor · |plain torch in the same dtype - exact| + a rounding band, in the 2-norm and the maximum norm."""
    assert actual.shape == exact.shape and actual.dtype == same_dtype.dtype, name
    eps = torch.finfo(actual.dtype).eps
    for norm, kind in ((torch.linalg.vector_norm, "2-norm"), (lambda x: x.abs().amax() if x.numel() else x.sum(), "maximum")):
        error, reference = norm(actual.double() - exact).item(), norm(same_dtype.double() - exact).item()
        bound = factor * reference + eps * norm(exact).item()
        assert error <= bound, f"{name}, {kind}: error {error:.3e} > {bound:.3e} (plain torch: {reference:.3e})"


@pytest.fixture
def check_one_key(poisoned_memory):
    """Segments of one key: out = v exactly, dv the sum of do, and dq = dk = 0, where plain torch cancels exactly and the kernels up
    to rounding of dP and rowsum(dO o O), each at most |do| |v|."""

    def check(dtype, device):
        q_offsets, kv_offsets = offsets_of([1, 3, 1], device), offsets_of([1, 1, 1], device)
        q, k, v = (torch.randn(n, 2, 24, device=device).to(dtype).requires_grad_() for n in (5, 3, 3))
        out = F.jagged_attention(q, k, v, q_offsets, kv_offsets, implementation="triton")
        do = torch.randn_like(out)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
        user = torch.tensor([0, 1, 1, 1, 2], device=device)
        assert torch.equal(out, v[user])
        expected = torch.zeros_like(v, dtype=torch.float64).index_add(0, user, do.double()).to(dtype)
        torch.testing.assert_close(dv, expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(torch.float32).eps)
        bound = 8 * torch.finfo(torch.float32).eps * 24**-0.5 * do.norm() * v.norm() * max(q.norm(), k.norm())
        assert dq.norm() <= bound and dk.norm() <= bound

    return check


@pytest.fixture
def offsets():
    return offsets_of


@pytest.fixture
def poisoned_memory():
    """torch.empty gives NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def check_attention(poisoned_memory):
    """Compare implementation="triton" with the fp64 reference, forward and every gradient; returns (out, dq, dk, dv)."""

    def check(lengths, dtype, device, heads=(4, 2), dims=(24, 40), shared=None, tensors=None, grad=None, **options):
        q_lengths, kv_lengths = LENGTHS[lengths] if isinstance(lengths, str) else lengths
        q_offsets = "shared" if shared == "q" else offsets_of(q_lengths, device)
        kv_offsets = "shared" if shared == "kv" else offsets_of(kv_lengths, device)
        rows = 37 if shared == "q" else sum(q_lengths), 53 if shared == "kv" else sum(kv_lengths)
        if tensors is None:
            generator = torch.Generator().manual_seed(len(q_lengths) + sum(dims))
            shapes = (rows[0], heads[0], dims[0]), (rows[1], heads[1], dims[0]), (rows[1], heads[1], dims[1])
            tensors = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
        exact_tensors = [x.detach().double().requires_grad_() for x in tensors]
        actual = F.jagged_attention(*tensors, q_offsets, kv_offsets, implementation="triton", **options)
        options.pop("schedule", None)
        same_dtype = F.jagged_attention(*tensors, q_offsets, kv_offsets, implementation="reference", **options)
        exact = F.jagged_attention(*exact_tensors, q_offsets, kv_offsets, implementation="reference", **options)
        assert_close_to_exact("out", actual, same_dtype, exact, factor=2)
        grad = torch.randn(exact.shape, device=device, dtype=torch.float64).to(dtype) if grad is None else grad(exact).to(dtype)
        gradients = torch.autograd.grad(actual, tensors, grad)
        same_dtype_gradients = torch.autograd.grad(same_dtype, tensors, grad)
        exact_gradients = torch.autograd.grad(exact, exact_tensors, grad.double())
        for name, *values in zip(("dq", "dk", "dv"), gradients, same_dtype_gradients, exact_gradients):
            assert_close_to_exact(name, *values, factor=3)
        return actual.detach(), *gradients

    return check
