"""F.jagged_attention on the CPU: lengths, heads, layouts, values that are not finite, work and
memory."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jagged_modules as jm
from jagged_modules import functional as F

from .attention_cases import DTYPES, check, make_qkv

LENGTHS = {
    "equal": ([4, 4, 4], [4, 4, 4]),
    "one-row": ([1, 1, 1], [1, 2, 1]),
    "odd": ([3, 7, 13], [5, 11, 1]),
    "empty-queries": ([0, 6, 0], [3, 4, 2]),
    "empty-keys": ([2, 6, 3], [0, 4, 0]),
    "empty-both": ([0, 0], [0, 0]),
    "skewed": ([1, 700, 2], [900, 3, 1]),
    "many": ([5, 2, 0, 9] * 30, [1, 8, 3, 0] * 30),
    "no-segments": ([], []),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_segments(lengths, dtype, offsets_of):
    q_lengths, kv_lengths = LENGTHS[lengths]
    tensors = make_qkv(sum(q_lengths), sum(kv_lengths), dtype=DTYPES[dtype])
    check(*tensors, offsets_of(q_lengths), offsets_of(kv_lengths))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_lengths", [[1, 1, 1], [1, 0, 3], [5]], ids=str)
def test_one_key(q_lengths, dtype, assert_one_key):
    assert_one_key(F.jagged_attention, q_lengths, DTYPES[dtype])


@pytest.mark.parametrize(
    "dim, v_dim",
    [(1, 1), (8, 8), (24, 40), (40, 24), (72, 72), (17, 33), (128, 64), (200, 8), (256, 256)],
)
def test_head_dims(dim, v_dim, offsets_of):
    tensors = make_qkv(15, 12, dim=dim, v_dim=v_dim)
    check(*tensors, offsets_of([5, 0, 10]), offsets_of([7, 2, 3]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 2), (6, 2), (5, 1)])
def test_grouped_heads(heads, kv_heads, dtype, offsets_of):
    tensors = make_qkv(20, 31, heads, kv_heads, v_dim=16, dtype=DTYPES[dtype])
    check(*tensors, offsets_of([9, 11]), offsets_of([30, 1]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kv_lengths", [[3, 9, 1], [2, 0, 5], [0], []])
def test_shared_queries(kv_lengths, dtype, offsets_of):
    tensors = make_qkv(3, sum(kv_lengths), heads=4, kv_heads=2, dtype=DTYPES[dtype])
    check(*tensors, "shared", offsets_of(kv_lengths))


@pytest.mark.parametrize("q_lengths", [[3, 9, 1], [2, 0, 5], [0], []])
def test_shared_keys(q_lengths, offsets_of):
    tensors = make_qkv(sum(q_lengths), 6, heads=4, kv_heads=2)
    check(*tensors, offsets_of(q_lengths), "shared")


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1.0, 10.0])
def test_scale(scale, offsets_of):
    check(*make_qkv(12, 12), offsets_of([5, 7]), None, scale=scale)


@pytest.mark.parametrize("scale", [-1e4, 1e4])
def test_scores_far_outside_the_exponentials_range(scale, offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(12, 12))
    out = F.jagged_attention(q, k, v, offsets_of([5, 7]), scale=scale)
    exact = F.jagged_attention(
        *(x.double() for x in (q, k, v)),
        offsets_of([5, 7]),
        scale=scale,
        implementation="reference",
    )
    torch.testing.assert_close(out, exact.float())
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offset_dtypes_give_the_same(dtype, offsets_of):
    q, k, v = make_qkv(9, 6)
    expected = F.jagged_attention(q, k, v, offsets_of([4, 5]), offsets_of([0, 6]))
    assert torch.equal(
        F.jagged_attention(q, k, v, offsets_of([4, 5], dtype), offsets_of([0, 6], dtype)), expected
    )


def test_max_seqlen_changes_no_result(offsets_of):
    q, k, v = make_qkv(9, 9)
    expected = F.jagged_attention(q, k, v, offsets_of([4, 5]))
    assert torch.equal(
        F.jagged_attention(q, k, v, offsets_of([4, 5]), max_seqlen_q=5, max_seqlen_kv=100), expected
    )


def test_packed_projection_is_read_in_place(offsets_of):
    packed = torch.randn(14, 3, 2, 8)
    check(*packed.unbind(1), offsets_of([9, 5]), None)


def test_any_strides(offsets_of):
    q = torch.randn(2, 14, 8).transpose(0, 1)
    k = torch.randn(14, 8, 2).transpose(1, 2)
    v = torch.randn(28, 4, 16)[::2, ::2, ::2]
    check(q, k, v, offsets_of([9, 5]), None)


@pytest.mark.parametrize(
    "grad",
    [torch.tensor(0.5).expand(14, 2, 8), torch.randn(8, 2, 14).permute(2, 1, 0)],
    ids=["expanded", "permuted"],
)
def test_gradients_of_any_strides(grad, offsets_of):
    check(*make_qkv(14, 14), offsets_of([9, 5]), None, grad=grad)


@pytest.mark.parametrize(
    "activation, mask",
    [("softmax", None), ("softmax", jm.AttentionMask(True)), ("silu", jm.AttentionMask(True))],
)
@pytest.mark.parametrize("lengths", [[9, 9, 6, 9], [1, 300, 2, 290]])
@pytest.mark.parametrize("dim", [8, 13])  # rows of 13 floats start at any multiple of 4 bytes
def test_nan_in_a_segment_stays_there(lengths, dim, activation, mask, offsets_of):
    """Values and gradients of other segments do not change, even of segments of equal length, which
    are computed in one call."""
    offsets, total = offsets_of(lengths), sum(lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def run(poison):
        torch.manual_seed(1)
        q, k, v, grad = torch.randn(4, total, 2, dim)
        for x in (q, k, v, grad):
            x[rows == 1] += poison
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = F.jagged_attention(*inputs, offsets, activation=activation, mask=mask)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    for clean, poisoned in zip(run(0.0), run(float("nan")), strict=True):
        assert torch.equal(clean[rows != 1], poisoned[rows != 1])
        assert poisoned[rows == 1].isnan().all()


def test_nan_keys_without_queries_reach_nothing(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(5, 7))
    with torch.no_grad():
        k[:4], v[:4], q[:] = float("nan"), float("nan"), 1.0
    out = F.jagged_attention(q, k, v, offsets_of([0, 5]), offsets_of([4, 3]))
    dq, dk, dv = torch.autograd.grad(out.sum(), [q, k, v])
    assert out.isfinite().all() and dq.isfinite().all()
    assert not dk[:4].any() and not dv[:4].any()


def test_queries_without_keys_get_zero(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(5, 3))
    with torch.no_grad():
        q[:2] = float("nan")
    out = F.jagged_attention(q, k, v, offsets_of([2, 3]), offsets_of([0, 3]))
    assert not out[:2].any()
    dq, _, _ = torch.autograd.grad(out.sum(), [q, k, v])
    assert not dq[:2].any()


@pytest.mark.parametrize(
    "activation, mask",
    [("softmax", None), ("softmax", jm.AttentionMask(True)), ("silu", jm.AttentionMask(True))],
)
def test_two_runs_are_bitwise_equal(activation, mask, offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(400, 400)]
    offsets = offsets_of([100, 7, 280, 13])

    def run():
        out = F.jagged_attention(*inputs, offsets, activation=activation, mask=mask)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_work_is_that_of_the_real_rows(offsets_of):
    """Scores computed, counted from the shapes given to torch's fused kernel: every query of a
    segment with its keys, nothing else."""
    q_lengths, kv_lengths = torch.randint(0, 200, (2, 60)).tolist()
    inputs = [x.requires_grad_() for x in make_qkv(sum(q_lengths), sum(kv_lengths), heads=3)]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        F.jagged_attention(*inputs, offsets_of(q_lengths), offsets_of(kv_lengths)).sum().backward()

    def scores(name, q_argument):
        shapes = [
            event.input_shapes[q_argument : q_argument + 2]
            for event in profile.events()
            if event.name == name
        ]
        return sum(q[0] * q[1] * q[2] * k[2] for q, k in shapes)

    real = 3 * sum(n * m for n, m in zip(q_lengths, kv_lengths))
    assert scores("aten::_scaled_dot_product_flash_attention_for_cpu", 0) == real
    assert scores("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 1) == real


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_no_scores_are_kept(activation, offsets_of, one_thread):
    """For 2000 rows, the backward keeps q, k and v, and with softmax the output and one number per
    row. Scores exist for a few rows at a time."""
    rows, heads = 2000, 2
    inputs = [x.requires_grad_() for x in make_qkv(rows, rows, heads)]
    saved = []

    def save(x):
        saved.append(x.untyped_storage().nbytes())
        return x

    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
        torch.autograd.graph.saved_tensors_hooks(save, lambda x: x),
    ):
        mask = jm.AttentionMask(causal=True, num_targets=torch.tensor([30]))
        F.jagged_attention(
            *inputs, offsets_of([rows]), activation=activation, mask=mask
        ).sum().backward()
    size = inputs[0].nbytes
    assert max(saved) == size and saved.count(size) == (4 if activation == "softmax" else 3)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert size <= largest <= heads * rows * rows * 4 / 10


@given(data=st.data())
def test_any_lengths_and_heads(data, offsets_of):
    segments = data.draw(st.integers(0, 6))
    lengths = st.lists(st.integers(0, 40), min_size=segments, max_size=segments)
    q_lengths, kv_lengths = data.draw(lengths), data.draw(lengths)
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dim, v_dim = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    tensors = make_qkv(
        sum(q_lengths), sum(kv_lengths), kv_heads * group, kv_heads, dim, v_dim, dtype
    )
    check(*tensors, offsets_of(q_lengths), offsets_of(kv_lengths))


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize(
    "name, mask", [("q", None), ("q", jm.AttentionMask(causal=True)), ("k", None), ("v", None)]
)
def test_nan_and_infinity_are_where_the_definition_has_them(name, mask, value, offsets_of):
    """And nowhere else. A row that sees nothing stays 0."""
    tensors = {x: torch.randn(12, 2, 8) for x in "qkv"}
    tensors[name][5, 0, 2] = value
    q_offsets, kv_offsets = offsets_of([3, 6, 3]), offsets_of([3, 4, 5])
    run = partial(F.jagged_attention, *tensors.values(), q_offsets, kv_offsets, mask=mask)
    assert torch.equal(run().isfinite(), run(implementation="reference").isfinite())
    assert not run().isfinite().all()


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("case", ["all keys NaN", "all scores -infinity", "a score +infinity"])
def test_rows_without_a_softmax_are_nan(case, rows, offsets_of):
    """Also where torch's fused attention returns 0. The gradients are NaN where those of the
    reference are."""
    q, k, v = torch.randn(4, 4, 8), torch.randn(rows + 5, 2, 8), torch.randn(rows + 5, 2, 8)
    if case == "all keys NaN":
        k[:rows, 1] = math.nan
    else:
        q[:2], k[:rows] = -3e19, 3e19
        k[0] *= -1.0 if case == "a score +infinity" else 1.0
    tensors = [x.requires_grad_() for x in (q, k, v)]
    results = []
    for implementation in ("auto", "reference"):
        out = F.jagged_attention(
            *tensors,
            offsets_of([2, 2]),
            offsets_of([rows, 5]),
            scale=1.0,
            implementation=implementation,
        )
        results.append([out, *torch.autograd.grad(out.sum(), tensors)])
    for x, expected in zip(*results, strict=True):
        torch.testing.assert_close(x, expected, equal_nan=True)
    assert results[0][0].isnan().any()
