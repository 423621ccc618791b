"""torch's FLOP counter knows the operators: GEMMs of the real rows, on the host and in the kernels'
operators."""

import pytest
import torch
from jagged_kernels.attention.params import AttentionCall, AttentionParams, Segments, pack
from torch.utils.flop_counter import FlopCounterMode

import jagged_modules as jm
from jagged_modules import flops
from jagged_modules import functional as F
from jagged_modules.functional.linear import relu_linear
from jagged_modules.layers import hstu

OFFSETS = torch.tensor([0, 3, 3, 8])
PAIRS = 3 * 3 + 5 * 5


def count(call, *leaves):
    with FlopCounterMode(display=False) as counter:
        out = call(*leaves)
        forward = counter.get_total_flops()
        if leaves and leaves[0].requires_grad:
            out.sum().backward()
    return forward, counter.get_total_flops() - forward


def rows(*shape, device="cpu", n=3):
    return [torch.randn(shape, device=device, requires_grad=True) for _ in range(n)]


# Kernels' operators run on meta tensors. There, offsets have no values, so segments count as
# equally long.
DEVICES = [pytest.param("cpu", "auto", id="host"), pytest.param("meta", "triton", id="kernels")]


@pytest.mark.parametrize("device,implementation", DEVICES)
def test_attention(device, implementation):
    pairs = PAIRS if device == "cpu" else 8 * 8 // 3
    forward, backward = count(
        lambda *x: F.jagged_attention(*x, OFFSETS, implementation=implementation),
        *rows(8, 4, 16, device=device),
    )
    assert (forward, backward) == (4 * pairs * 2 * (16 + 16), 4 * pairs * 2 * 5 * 16)


@pytest.mark.parametrize("device,implementation", DEVICES)
def test_target_attention_counts_no_copies(device, implementation):
    q = torch.randn(3, 2, 4, 16, device=device)
    k, v = torch.randn(2, 8, 4, 16, device=device)
    index = jm.CandidateIndex.from_counts(torch.tensor([1, 0, 2]))
    forward, _ = count(
        lambda: F.target_attention(q, k, v, index, OFFSETS, implementation=implementation)
    )
    assert forward == 4 * (2 * 3 + 4 * 5 if device == "cpu" else 6 * 8 // 3) * 2 * (16 + 16)


@pytest.mark.parametrize("device,implementation", DEVICES)
def test_din_attention(device, implementation):
    q, k = rows(3, 6, device=device, n=1)[0], rows(8, 6, device=device, n=1)[0]
    index = jm.CandidateIndex.from_counts(torch.tensor([1, 0, 2]))
    weights = [torch.randn(size, device=device) for size in ((5, 24), (4, 5), (1, 4))]
    biases = [torch.randn(size, device=device) for size in (5, 4, 1)]
    forward, backward = count(
        lambda q, k: F.din_attention(
            q, k, k, index, OFFSETS, weights, biases, activation="relu",
            implementation=implementation,
        ),
        q, k,
    )  # fmt: skip
    pairs = 3 + 2 * 5 if device == "cpu" else 3 * 8 // 3
    linears = 6 * 5 + 5 * 4 + 4
    # what the first linear adds for q, and for k, which the kernels have in the pairs' GEMM
    of_rows = 2 * 3 * 6 * 5 + (2 * 8 * 6 * 5 if device == "cpu" else 0)
    assert forward == pairs * 2 * (linears + 6) + of_rows
    assert backward == pairs * 2 * (3 * linears + 2 * 6) + of_rows


@pytest.mark.parametrize("device,implementation", DEVICES)
def test_keys_in_pages(device, implementation):
    q, storage = torch.randn(8, 4, 16, device=device), torch.randn(384, 2, 28, device=device)
    pages, keys = jm.Pages.of([[1], [], [2, 0]], [5, 0, 140], 128), torch.tensor([0, 5, 5, 145])
    k, v = storage.split([16, 12], dim=2)
    options = dict(pages=pages, implementation=implementation)
    forward, _ = count(lambda: F.jagged_attention(q, k, v, OFFSETS, keys, **options))
    assert forward == 4 * (3 * 5 + 5 * 140 if device == "cpu" else 8 * 145 // 3) * 2 * (16 + 12)


@pytest.mark.parametrize("device,implementation", DEVICES)
def test_shared_operands_and_query_groups(device, implementation):
    seeds, (k, v) = torch.randn(2, 4, 16, device=device), torch.randn(2, 8, 4, 16, device=device)
    assert (
        count(
            lambda: F.jagged_attention(
                seeds, k, v, "shared", OFFSETS, implementation=implementation
            )
        )[0]
        == 4 * 2 * 8 * 2 * 32
    )
    assert (
        count(
            lambda: F.jagged_attention(
                k, seeds, seeds, OFFSETS, "shared", implementation=implementation
            )
        )[0]
        == 4 * 8 * 2 * 2 * 32
    )
    groups = torch.tensor([0, 3, 3, 8, 9, 9, 11])
    q = torch.randn(11, 4, 16, device=device)
    forward, _ = count(
        lambda: F.jagged_attention(q, k, v, groups, OFFSETS, implementation=implementation)
    )
    assert forward == 4 * (PAIRS + 1 * 3 + 2 * 5 if device == "cpu" else 11 * 8 // 3) * 2 * 32


@pytest.mark.parametrize("device,implementation", DEVICES)
def test_block_attention(device, implementation):
    q, k, v = rows(50, 4, 16, device=device)
    offsets = torch.tensor([0, 20, 50])
    pairs = 16**2 + 4**2 + 16**2 + 14**2 if device == "cpu" else 50 * 16
    call = lambda *x: F.block_diagonal_attention(
        *x, offsets, block_size=16, implementation=implementation
    )
    assert count(call, q, k, v) == (4 * pairs * 2 * 32, 4 * pairs * 2 * 5 * 16)
    qkv = torch.randn(50, 3, 4, 16, device=device)
    assert (
        count(
            lambda: F.block_diagonal_attention_packed(
                qkv, offsets, block_size=16, implementation=implementation
            )
        )[0]
        == 4 * pairs * 64
    )


@pytest.mark.parametrize("device,implementation", DEVICES)
def test_matrix_multiplications(device, implementation):
    x, y = rows(8, 16, device=device, n=2)
    matrices = torch.randn(3, 16, 5, device=device, requires_grad=True)
    options = dict(implementation=implementation)
    assert count(lambda *args: F.jagged_dense_bmm(*args, OFFSETS, **options), x, matrices) == (
        2 * 8 * 16 * 5,
        2 * 2 * 8 * 16 * 5,
    )
    assert count(lambda *args: F.jagged_jagged_bmm(*args, OFFSETS, **options), x, y) == (
        2 * 8 * 16 * 16,
        2 * 2 * 8 * 16 * 16,
    )
    plan = F.ScorePlan.from_offsets(OFFSETS).to(device)
    assert count(lambda *args: F.jagged_jagged_bmm_jagged_out(*args, plan, **options), x, y) == (
        2 * PAIRS * 16,
        2 * 2 * PAIRS * 16,
    )
    p = torch.randn(PAIRS, device=device, requires_grad=True)
    assert count(lambda *args: F.array_jagged_bmm_jagged_out(*args, plan, **options), p, y) == (
        2 * PAIRS * 16,
        2 * 2 * PAIRS * 16,
    )


@pytest.mark.parametrize("device,implementation", DEVICES)
def test_linear_compression(device, implementation):
    weights = [torch.randn(7, k, device=device, requires_grad=True) for k in (6, 4)]
    embeddings = [
        torch.randn(b, k, 16, device=device, requires_grad=True) for b, k in ((3, 6), (5, 4))
    ]
    users = torch.tensor([0, 2, 2, 0, 1], device=device)
    call = lambda *x: F.linear_compress(
        tuple(x[:2]), tuple(x[2:]), (users,), implementation=implementation
    )
    work = 2 * 7 * 16 * (3 * 6 + 5 * 4)
    assert count(call, *weights, *embeddings) == (work, 2 * work)


def test_kernels_formulas_with_offsets_that_have_values():
    q, k, v = rows(8, 4, 16)
    attention, blocks, packed = (
        flops.OF_KERNELS[name]
        for name in ("attention", "block_attention", "block_attention_packed_backward")
    )
    groups, params = torch.tensor([0, 3, 3, 8, 9, 9, 11]), AttentionParams(1.0)
    of_groups = pack(AttentionCall(*rows(11, 4, 16, n=1), k, v, Segments(groups, OFFSETS), params))
    assert attention(*of_groups, out_val=None) == 4 * (PAIRS + 3 + 10) * 2 * 32
    arguments = pack(AttentionCall(q, k, v, Segments(OFFSETS, OFFSETS), params))
    backward = flops.OF_KERNELS["attention_backward"]
    assert backward(q, [None, None], *arguments, out_val=None) == 4 * PAIRS * 2 * 5 * 16
    options = (OFFSETS, [None] * 3, [False] * 3, 4)
    assert blocks(q, k, v, *options, out_val=None) == 4 * (3 * 3 + 4 * 4 + 1) * 2 * 32
    assert (
        packed(q, torch.randn(8, 3, 4, 16), *options, out_val=None)
        == 4 * (3 * 3 + 4 * 4 + 1) * 2 * 5 * 16
    )


def test_a_layer_and_offsets_without_values():
    """The projections are torch's. Without values, segments count as equally long."""
    attention = jm.JaggedTargetAttention(32, 4)
    forward, backward = count(
        lambda *x: attention(*x[:1], (x[1], OFFSETS)), *rows(3, 2, 32, n=1), *rows(8, 32, n=1)
    )
    projections = 2 * 6 * 32 * 32 + 2 * 8 * 32 * 64 + 2 * 6 * 32 * 32
    assert (forward, backward) == (
        projections + 4 * 2 * 8 * 2 * 16,
        2 * projections + 4 * 2 * 8 * 2 * 5 * 8,
    )
    meta = jm.JaggedTargetAttention(32, 4, device="meta")
    targets = torch.empty(2, 2, 32)
    values = torch.empty(8, 32)
    offsets = torch.empty(3, dtype=torch.int64)
    call = lambda: meta(targets.to("meta"), (values.to("meta"), offsets.to("meta")))
    projections = 2 * 4 * 32 * 32 + 2 * 8 * 32 * 64 + 2 * 4 * 32 * 32
    assert count(call)[0] == projections + 4 * (4 * 8 // 2) * 2 * 16


def test_hstu_as_one_node(monkeypatch):
    """As many as the modules count, on meta tensors."""
    pytest.importorskip("triton")
    found = []
    for takes_kernels in (False, True):
        monkeypatch.setattr(hstu, "takes_kernels", lambda *_, value=takes_kernels: value)
        layer = jm.HSTULayer(32, 2, jm.HSTUConfig(scaling_seqlen=5), device="meta")
        (x,) = rows(8, 32, device="meta", n=1)
        found.append(count(lambda x, layer=layer: layer((x, OFFSETS))[0], x))
    assert found[0] == found[1]


def test_relu_in_a_gemm():
    x, weight = torch.randn(8, 32), torch.randn(16, 32)
    assert count(lambda: relu_linear(x, weight, torch.zeros(16)))[0] == 2 * 8 * 32 * 16


def test_each_operator_with_matrix_multiplications_has_a_formula():
    """The others move rows, add them up, or take a softmax, a norm, an activation or a gate."""
    without = {"tile_lists", "jagged_sum", "jagged_symmetric", "gate", "zero_tail"}
    without |= {"jagged_to_padded", "padded_to_jagged", "jagged_dense", "launch"}
    without |= {
        name
        for name in dir(torch.ops.jagged_kernels)
        if "softmax" in name or name.startswith(("row_norm", "activation"))
    }
    defined = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("jagged_kernels::")
    }
    assert defined - without == set(flops.OF_KERNELS)
    host = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("jagged_modules::")
    }
    moves = {name for name in host if "softmax" in name or "pointwise" in name}
    endings = "_cpu", "_cpu_backward", "_cpu_packed_backward"
    assert {name for name in host - moves if name.endswith(endings)} == set(flops.ON_THE_HOST)
