"""The block attention kernels on a GPU, through the public function."""

import pytest
import torch

from jagged_modules import functional as F

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [3, 0, 70, 5, 130, 0, 0, 64, 1, 400, 65]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotate", [None, "qk", "qkv"], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_forward_and_gradients(check_block_attention, block_size, rotate, dtype):
    check_block_attention(LENGTHS, dtype, "cuda", block_size, dim=64, rotate=rotate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[0, 0, 5, 0], [3000], [0], [], [1] * 200], ids=str)
def test_lengths(check_block_attention, lengths, dtype):
    check_block_attention(lengths, dtype, "cuda", dim=128, rotate="qkv")


@pytest.mark.parametrize("rotate", [None, "qkv"], ids=str)
@pytest.mark.parametrize("dim", [8, 17, 40, 96, 128, 256])
def test_head_dims(check_block_attention, dim, rotate):
    check_block_attention(LENGTHS, torch.bfloat16, "cuda", dim=dim, rotate=rotate if dim % 2 == 0 else None)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (8, 1), (6, 3)], ids=str)
def test_heads(check_block_attention, heads):
    check_block_attention(LENGTHS, torch.float16, "cuda", heads=heads, dim=40, rotate="qk")


def test_given_positions(check_block_attention):
    positions = torch.randint(0, 400, (sum(LENGTHS),), device="cuda")
    check_block_attention(LENGTHS, torch.bfloat16, "cuda", rotate="qkv", positions=positions)


@pytest.mark.parametrize("dim", [18, 64], ids=["unaligned", "aligned"])
def test_packed_views_and_gradients_of_any_stride(check_block_attention, dim):
    packed = torch.randn(sum(LENGTHS), 3, 3, dim, device="cuda", dtype=torch.bfloat16)
    for grad in (
        lambda out: torch.ones((), dtype=out.dtype, device="cuda").expand_as(out),
        lambda out: torch.randn(out.shape[::-1], dtype=out.dtype, device="cuda").permute(2, 1, 0),
        lambda out: torch.randn(*out.shape[:2], 2 * out.shape[2], dtype=out.dtype, device="cuda")[..., ::2],
    ):
        check_block_attention(LENGTHS, torch.bfloat16, "cuda", tensors=packed.unbind(1), grad=grad, rotate="qk")


def test_twenty_runs_agree_bit_for_bit(offsets):
    q, k, v = (torch.randn(sum(LENGTHS), 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    segments, grad, runs = offsets(LENGTHS, "cuda"), torch.randn_like(q), []
    for _ in range(20):
        out = F.block_diagonal_attention(q, k, v, segments, implementation="triton")
        runs.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


def test_no_synchronisation(offsets):
    q, k, v = (torch.randn(sum(LENGTHS), 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    segments = offsets(LENGTHS, "cuda")
    for implementation in ("triton", "auto"):
        F.block_diagonal_attention(q, k, v, segments, implementation=implementation).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for implementation in ("triton", "auto"):
            F.block_diagonal_attention(q, k, v, segments, implementation=implementation).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_with_new_lengths(offsets):
    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    segments = offsets([70, 100, 130], "cuda")
    F.block_diagonal_attention(q, k, v, segments, implementation="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = F.block_diagonal_attention(q, k, v, segments, implementation="triton")
    for lengths in ([70, 100, 130], [0, 300, 0], [299, 0, 1]):
        segments.copy_(offsets(lengths, "cuda"))
        graph.replay()
        assert torch.equal(captured, F.block_diagonal_attention(q, k, v, segments, implementation="triton"))
