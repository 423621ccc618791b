"""F.jagged_attention on the CPU: shapes, layouts, dtypes, autograd."""

import math
from functools import partial

import accuracy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS
from jagged_modules.cpu import attention as cpu
from jagged_modules.cpu import attention_math as cpu_blocks

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_qkv(q_rows, kv_rows, heads=2, kv_heads=None, dim=8, v_dim=None, dtype=torch.float32):
    kv_heads = kv_heads or heads
    shapes = (q_rows, heads, dim), (kv_rows, kv_heads, dim), (kv_rows, kv_heads, v_dim or dim)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def check(q, k, v, q_offsets, kv_offsets, grad=None, output_scale=1.0, **options):
    """Hold the function and its gradients to the accuracy rule; also that of an output_scale which requires one."""
    tensors = dict(q=q, k=k, v=v)
    if isinstance(output_scale, torch.Tensor) and output_scale.requires_grad:
        tensors["output_scale"] = output_scale

    def operator(q, k, v, output_scale=output_scale):
        return F.jagged_attention(q, k, v, q_offsets, kv_offsets, output_scale=output_scale, **options)

    def bounds(q, k, v, *rest):
        return accuracy.attention(q, k, v, rest[-1], q_offsets, kv_offsets, output_scale=output_scale, **options)

    accuracy.check(operator, bounds, tensors, grad)


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


@pytest.mark.parametrize("dim, v_dim", [(1, 1), (8, 8), (24, 40), (40, 24), (72, 72), (17, 33), (128, 64), (200, 8), (256, 256)])
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
    exact = F.jagged_attention(*(x.double() for x in (q, k, v)), offsets_of([5, 7]), scale=scale, implementation="reference")
    torch.testing.assert_close(out, exact.float())
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


# -- activations, masks, output scales -----------------------------------------------------------------------------------------


def mask_of(name, num_targets):
    num_targets = torch.tensor(num_targets)
    return {
        "none": None,
        "causal": jm.AttentionMask(causal=True),
        "window": jm.AttentionMask(window=(2, 1)),
        "targets": jm.AttentionMask(num_targets=num_targets, target_group_size=2),
        "hstu": jm.AttentionMask(True, None, num_targets, 2, contextual_seqlen=2, max_attn_len=3, min_full_attn_seqlen=1),
    }[name]


MASKS = ["none", "causal", "window", "targets", "hstu"]
MASKED_LENGTHS = {  # queries, keys, targets
    "equal": ([6, 6, 6], [6, 6, 6], [0, 3, 3]),
    "empty": ([0, 5, 4, 0], [3, 5, 0, 0], [1, 2, 0, 0]),
    "fewer-queries": ([2, 1, 7], [9, 8, 7], [2, 1, 7]),
    "more-queries": ([9, 5, 4], [4, 5, 1], [2, 0, 1]),
    "many": ([3, 5, 0, 8] * 9, [3, 6, 2, 4] * 9, [1, 0, 2] * 12),
    "several-blocks": ([300, 2], [310, 2], [150, 0]),
    "no-segments": ([], [], []),
}


@pytest.fixture(params=MASKED_LENGTHS)
def masked_lengths(request):
    return MASKED_LENGTHS[request.param]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_masks(activation, mask, offsets_of):
    q_lengths, kv_lengths, targets = [7, 0, 9, 7, 3], [7, 4, 5, 7, 0], [2, 1, 3, 2, 0]
    tensors = make_qkv(sum(q_lengths), sum(kv_lengths), heads=4, kv_heads=2, v_dim=5)
    options = dict(activation=activation, mask=mask_of(mask, targets), output_scale=1.0 if activation == "softmax" else 0.3)
    check(*tensors, offsets_of(q_lengths), offsets_of(kv_lengths), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_in_every_dtype(activation, dtype, offsets_of):
    tensors = make_qkv(12, 13, dtype=DTYPES[dtype])
    mask = mask_of("hstu", [1, 2])
    check(*tensors, offsets_of([5, 7]), offsets_of([6, 7]), activation=activation, mask=mask)


@pytest.mark.parametrize("mask", MASKS[1:])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_lengths_under_masks(activation, mask, masked_lengths, offsets_of):
    q_lengths, kv_lengths, targets = masked_lengths
    tensors = make_qkv(sum(q_lengths), sum(kv_lengths))
    options = dict(activation=activation, mask=mask_of(mask, targets)) if targets else dict(activation=activation)
    check(*tensors, offsets_of(q_lengths), offsets_of(kv_lengths), **options)


@pytest.mark.parametrize("rows, scores, most", [(1, 1, 1), (2, 60, 10**6), (10**6, 150, 40), (3, 10**6, 30)])
@pytest.mark.parametrize("mask", ["none", "hstu"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_blocks_of_any_size(activation, mask, rows, scores, most, monkeypatch, offsets_of):
    """Cut by rows, by heads and by segments."""
    monkeypatch.setattr(cpu_blocks, "ROWS", rows)
    monkeypatch.setattr(cpu_blocks, "MOST_SCORES", most)
    for module in (cpu, cpu_blocks):
        monkeypatch.setattr(module, "scores_at_a_time", lambda: scores)
    lengths, targets = [5, 5, 3, 5, 9, 5], [2, 2, 0, 2, 1, 2]
    tensors = make_qkv(32, 32, heads=4, kv_heads=2, v_dim=5)
    check(*tensors, offsets_of(lengths), None, activation=activation, mask=mask_of(mask, targets))
    tensors = make_qkv(4, 32, heads=4, kv_heads=2, v_dim=5)
    check(*tensors, "shared", offsets_of(lengths), activation=activation, mask=mask_of(mask, targets))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["none", "causal", "hstu"])
@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_shared_queries_of_every_kind(activation, mask, dtype, offsets_of):
    tensors = make_qkv(4, 13, heads=4, kv_heads=2, v_dim=12, dtype=DTYPES[dtype])
    options = dict(activation=activation, mask=mask_of(mask, [2, 0, 1, 0]))
    check(*tensors, "shared", offsets_of([6, 0, 1, 6]), **options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("activation", ["relu", "gelu_taylor"])
def test_shared_keys_of_every_activation(activation, dtype, offsets_of):
    tensors = make_qkv(13, 6, heads=4, kv_heads=2, v_dim=12, dtype=DTYPES[dtype])
    check(*tensors, offsets_of([6, 0, 7]), "shared", activation=activation, output_scale=0.2)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["none", "q", "kv"])
def test_a_scale_for_each_segment(shared, dtype, requires_grad, offsets_of):
    offsets, factor = offsets_of([6, 0, 7]), torch.tensor([0.5, 2.0, -3.0], dtype=DTYPES[dtype], requires_grad=requires_grad)
    q_offsets, kv_offsets = ("shared" if name == shared else offsets for name in ("q", "kv"))
    tensors = make_qkv(4 if shared == "q" else 13, 4 if shared == "kv" else 13, heads=4, kv_heads=2, dtype=DTYPES[dtype])
    check(*tensors, q_offsets, kv_offsets, activation="silu", output_scale=factor)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shared", ["none", "kv", "groups"])
def test_a_scale_keeps_half_precision_in_range(shared, requires_grad, offsets_of):
    """Weights of 181 for 500 keys of value 8 add up to 720,000, more than fp16 holds; a thousandth of it is 724."""
    q, k, v = (torch.full((500, 1, 8), 8.0, dtype=torch.float16) for _ in range(3))
    lengths = {"none": ([500], offsets_of([500])), "kv": ([200, 300], "shared"), "groups": ([200, 300], offsets_of([500]))}[shared]
    factor = torch.full((len(lengths[0]),), 1e-3, requires_grad=requires_grad)
    out = F.jagged_attention(q, k, v, offsets_of(lengths[0]), lengths[1], activation="silu", output_scale=factor)
    torch.testing.assert_close(out.float(), torch.full_like(out, 500 * 8 * 512 / 8**0.5 * 1e-3).float(), rtol=1e-3, atol=0)
    if requires_grad:
        out.float().sum().backward()
        expected = torch.tensor(lengths[0]) * 8 * 500 * 8 * 512 / 8**0.5
        torch.testing.assert_close(factor.grad, expected, rtol=1e-3, atol=0)


def test_the_gradient_of_a_scale_is_summed_in_fp32(offsets_of):
    q, factor = torch.ones(1000, 1, 8, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    out = F.jagged_attention(q, q, q / 1000, offsets_of([1000]), activation="identity", output_scale=factor)
    (grad,) = torch.autograd.grad(out.sum(), factor)
    assert abs(grad.item() / float(out.double().sum()) - 1) < torch.finfo(torch.bfloat16).eps


def test_a_scale_of_zero_has_a_gradient(offsets_of):
    tensors, factor = make_qkv(6, 6), torch.zeros(2, requires_grad=True)
    out = F.jagged_attention(*tensors, offsets_of([2, 4]), activation="silu", output_scale=factor)
    (grad,) = torch.autograd.grad(out.sum(), factor)
    unscaled = F.jagged_attention(*tensors, offsets_of([2, 4]), activation="silu")
    assert not out.any()
    torch.testing.assert_close(grad, torch.stack([unscaled[:2].sum(), unscaled[2:].sum()]))


def test_scales_in_another_dtype_keep_that_of_the_output(offsets_of):
    tensors, factor = make_qkv(13, 13, dtype=torch.bfloat16), torch.tensor([0.5, 0.25], dtype=torch.float64)
    for output_scale in (factor, factor.clone().requires_grad_()):
        out = F.jagged_attention(*tensors, offsets_of([6, 7]), activation="relu", output_scale=output_scale)
        assert out.dtype == torch.bfloat16
        scaled = F.jagged_attention(*tensors, offsets_of([6, 7]), activation="relu")  # powers of 2 round nothing
        assert torch.equal(out[:6], scaled[:6] * 0.5) and torch.equal(out[6:], scaled[6:] * 0.25)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_rows_that_see_nothing_give_zero(activation, offsets_of):
    """Two rows before the first column."""
    q, k, v = (x.requires_grad_() for x in make_qkv(6, 4))
    out = F.jagged_attention(q, k, v, offsets_of([6]), offsets_of([4]), activation=activation, mask=jm.AttentionMask(causal=True))
    dq, dk, dv = torch.autograd.grad(out.sum(), [q, k, v])
    assert not out[:2].any() and not dq[:2].any()
    assert out[2:].all() and dq[3:].all() and all(x.isfinite().all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize("activation", ["softmax", "silu", "identity"])
def test_masked_columns_reach_nothing(activation, offsets_of):
    """Values and gradients are those of the segment without the columns; huge numbers there change no bit."""
    tensors, mask = make_qkv(8, 8), jm.AttentionMask(window=(2, 0))
    inputs = [x.requires_grad_() for x in tensors]
    out = F.jagged_attention(*inputs, offsets_of([8]), activation=activation, mask=mask)[-1]
    grads = torch.autograd.grad(out.sum(), inputs)
    assert not any(x[:5].any() for x in grads)
    changed = [torch.cat([1e30 * x[:5], x[5:]]) for x in tensors]
    assert torch.equal(F.jagged_attention(*changed, offsets_of([8]), activation=activation, mask=mask)[-1], out)


def test_gradients_at_the_kink_are_torchs(offsets_of):
    """All scores are exactly 0."""
    q, k, v = torch.zeros(3, 1, 2, requires_grad=True), torch.ones(3, 1, 2), torch.ones(3, 1, 2)
    for activation, slope in [("relu", 0.0), ("leaky_relu", 0.01), ("gelu_taylor", 0.5), ("hardswish", 0.5), ("sigmoid", 0.25)]:
        (dq,) = torch.autograd.grad(F.jagged_attention(q, k, v, offsets_of([3]), activation=activation, scale=1.0).sum(), q)
        torch.testing.assert_close(dq, torch.full_like(q, 6 * slope))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offset_dtypes_give_the_same(dtype, offsets_of):
    q, k, v = make_qkv(9, 6)
    expected = F.jagged_attention(q, k, v, offsets_of([4, 5]), offsets_of([0, 6]))
    assert torch.equal(F.jagged_attention(q, k, v, offsets_of([4, 5], dtype), offsets_of([0, 6], dtype)), expected)


def test_a_bound_on_the_lengths_changes_nothing(offsets_of):
    q, k, v = make_qkv(9, 9)
    expected = F.jagged_attention(q, k, v, offsets_of([4, 5]))
    assert torch.equal(F.jagged_attention(q, k, v, offsets_of([4, 5]), max_seqlen_q=5, max_seqlen_kv=100), expected)


def test_packed_projection_is_read_in_place(offsets_of):
    packed = torch.randn(14, 3, 2, 8)
    check(*packed.unbind(1), offsets_of([9, 5]), None)


def test_any_strides(offsets_of):
    q = torch.randn(2, 14, 8).transpose(0, 1)
    k = torch.randn(14, 8, 2).transpose(1, 2)
    v = torch.randn(28, 4, 16)[::2, ::2, ::2]
    check(q, k, v, offsets_of([9, 5]), None)


@pytest.mark.parametrize("grad", [torch.tensor(0.5).expand(14, 2, 8), torch.randn(8, 2, 14).permute(2, 1, 0)], ids=["expanded", "permuted"])
def test_gradients_of_any_strides(grad, offsets_of):
    check(*make_qkv(14, 14), offsets_of([9, 5]), None, grad=grad)


@pytest.mark.parametrize("activation, mask", [("softmax", None), ("softmax", jm.AttentionMask(True)), ("silu", jm.AttentionMask(True))])
@pytest.mark.parametrize("lengths", [[9, 9, 6, 9], [1, 300, 2, 290]])
def test_nan_in_a_segment_stays_there(lengths, activation, mask, offsets_of):
    """Values and gradients of the others are as without it, of segments of equal length too, computed in one call."""
    offsets, total = offsets_of(lengths), sum(lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def run(poison):
        torch.manual_seed(1)
        q, k, v, grad = torch.randn(4, total, 2, 8)
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


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_inputs(needed, offsets_of):
    offsets = offsets_of([4, 3])
    tensors = make_qkv(7, 7, dtype=torch.float64)
    grad = torch.randn(7, 2, 8, dtype=torch.float64)

    def gradients(implementation):
        inputs = [x.clone().requires_grad_(i in needed) for i, x in enumerate(tensors)]
        F.jagged_attention(*inputs, offsets, implementation=implementation).backward(grad)
        return [x.grad for x in inputs]

    torch.testing.assert_close(gradients("auto"), gradients("reference"))


def test_the_same_tensor_as_query_key_and_value(offsets_of):
    x = torch.randn(9, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: F.jagged_attention(x, x, x, offsets_of([4, 5])), x)


@pytest.mark.parametrize("q_offsets, kv_offsets", [([0, 2, 2, 5], [0, 4, 6, 6]), ("shared", [0, 3, 6]), ([0, 2, 5], "shared")])
def test_gradcheck(q_offsets, kv_offsets):
    q_offsets, kv_offsets = (x if isinstance(x, str) else torch.tensor(x) for x in (q_offsets, kv_offsets))
    inputs = [x.requires_grad_() for x in make_qkv(5, 6, heads=2, kv_heads=1, dim=3, v_dim=2, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda q, k, v: F.jagged_attention(q, k, v, q_offsets, kv_offsets, scale=-0.4), inputs)


@pytest.mark.parametrize("activation, output_scale", [("silu", 0.3), ("gelu_taylor", torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64))])
@pytest.mark.parametrize("q_shared", [False, True])
def test_gradcheck_of_masked_activations(q_shared, activation, output_scale, offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(3, 8, heads=2, kv_heads=1, dim=3, v_dim=2, dtype=torch.float64)]
    if isinstance(output_scale, torch.Tensor):
        inputs.append(output_scale.clone().requires_grad_())
    q_offsets, mask = "shared" if q_shared else offsets_of([2, 0, 1]), mask_of("hstu", [2, 1, 0])

    def attend(q, k, v, output_scale=output_scale):
        return F.jagged_attention(q, k, v, q_offsets, offsets_of([5, 1, 2]), activation=activation, mask=mask, output_scale=output_scale)

    assert torch.autograd.gradcheck(attend, inputs)


def test_gradcheck_of_masked_softmax(offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(8, 5, heads=2, kv_heads=1, dim=3, v_dim=2, dtype=torch.float64)]
    mask = jm.AttentionMask(window=(2, 0))
    assert torch.autograd.gradcheck(lambda q, k, v: F.jagged_attention(q, k, v, offsets_of([6, 2]), offsets_of([3, 2]), mask=mask), inputs)


def test_gradcheck_of_a_scale_with_shared_keys(offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(5, 4, dim=3, dtype=torch.float64)]
    factor = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, output_scale):
        return F.jagged_attention(q, k, v, offsets_of([2, 3]), "shared", activation="gelu", output_scale=output_scale)

    assert torch.autograd.gradcheck(attend, [*inputs, factor])


@pytest.mark.parametrize("activation, mask", [("softmax", None), ("softmax", jm.AttentionMask(True)), ("silu", jm.AttentionMask(True))])
def test_two_runs_are_bitwise_equal(activation, mask, offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(400, 400)]
    offsets = offsets_of([100, 7, 280, 13])

    def run():
        out = F.jagged_attention(*inputs, offsets, activation=activation, mask=mask)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_work_is_that_of_the_real_rows(offsets_of):
    """Scores computed, counted from the shapes given to torch's fused kernel: every query of a segment with its keys, nothing else."""
    q_lengths, kv_lengths = torch.randint(0, 200, (2, 60)).tolist()
    inputs = [x.requires_grad_() for x in make_qkv(sum(q_lengths), sum(kv_lengths), heads=3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        F.jagged_attention(*inputs, offsets_of(q_lengths), offsets_of(kv_lengths)).sum().backward()

    def scores(name, q_argument):
        shapes = [event.input_shapes[q_argument : q_argument + 2] for event in profile.events() if event.name == name]
        return sum(q[0] * q[1] * q[2] * k[2] for q, k in shapes)

    real = 3 * sum(n * m for n, m in zip(q_lengths, kv_lengths))
    assert scores("aten::_scaled_dot_product_flash_attention_for_cpu", 0) == real
    assert scores("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 1) == real


def products(profile) -> int:
    """Multiply-adds of all batched matrix products."""
    operands = {"aten::bmm": (0, 1), "aten::baddbmm_": (1, 2)}
    shapes = [[event.input_shapes[i] for i in operands[event.name]] for event in profile.events() if event.name in operands]
    return sum(left[0] * left[1] * left[2] * right[2] for left, right in shapes)


@pytest.mark.parametrize("name, share", [("none", 1.0), ("causal", 0.6), ("window", 0.1)])
def test_products_of_an_activation(name, share, offsets_of):
    """2 products forward and 5 backward over the real pairs of rows, of which the columns that a block of rows sees."""
    lengths = [1500, 0, 40, 1, 40] if name == "none" else [2000]
    inputs = [x.requires_grad_() for x in make_qkv(sum(lengths), sum(lengths), heads=4, kv_heads=2)]
    mask = None if name == "none" else mask_of(name, [0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        F.jagged_attention(*inputs, offsets_of(lengths), activation="silu", mask=mask).sum().backward()
    real = 7 * 4 * 8 * sum(n * n for n in lengths)
    assert products(profile) == real if mask is None else share / 2 * real < products(profile) <= share * real


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_no_scores_are_kept(activation, offsets_of, one_thread):
    """The backward of 2000 rows keeps q, k and v, with softmax also the output and a number for each row; and the scores of a few rows
    exist at a time."""
    rows, heads = 2000, 2
    inputs = [x.requires_grad_() for x in make_qkv(rows, rows, heads)]
    saved = []

    def save(x):
        saved.append(x.untyped_storage().nbytes())
        return x

    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        torch.autograd.graph.saved_tensors_hooks(save, lambda x: x),
    ):
        mask = jm.AttentionMask(causal=True, num_targets=torch.tensor([30]))
        F.jagged_attention(*inputs, offsets_of([rows]), activation=activation, mask=mask).sum().backward()
    size = inputs[0].nbytes
    assert max(saved) == size and saved.count(size) == (4 if activation == "softmax" else 3)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert size <= largest <= heads * rows * rows * 4 / 10


@settings(max_examples=150)
@given(data=st.data())
def test_any_activation_and_mask(data, offsets_of):
    segments = data.draw(st.integers(1, 5))
    q_lengths, kv_lengths = (data.draw(st.lists(st.integers(0, 20), min_size=segments, max_size=segments)) for _ in "qk")
    targets = torch.tensor([data.draw(st.integers(0, n)) for n in kv_lengths])
    side = st.none() | st.integers(0, 12)
    max_attn_len = data.draw(st.integers(0, 9))
    mask = jm.AttentionMask(
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.tuples(side, side)),
        num_targets=data.draw(st.sampled_from([None, targets])),
        target_group_size=data.draw(st.integers(1, 4)),
        contextual_seqlen=data.draw(st.integers(0, 4)),
        max_attn_len=max_attn_len,
        min_full_attn_seqlen=data.draw(st.integers(0, 4)) if max_attn_len else 0,
    )
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    output_scale = 1.0 if activation == "softmax" else data.draw(st.sampled_from([0.25, torch.rand(segments)]))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    dim, v_dim = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    q_offsets, q_rows = offsets_of(q_lengths), sum(q_lengths)
    if data.draw(st.booleans()):
        q_offsets, q_rows = "shared", 5
    tensors = make_qkv(q_rows, sum(kv_lengths), kv_heads * group, kv_heads, dim, v_dim, data.draw(st.sampled_from([*DTYPES.values()])))
    options = dict(activation=activation, mask=mask, output_scale=output_scale)
    check(*tensors, q_offsets, offsets_of(kv_lengths), **options)


@given(data=st.data())
def test_any_lengths_and_heads(data, offsets_of):
    segments = data.draw(st.integers(0, 6))
    lengths = st.lists(st.integers(0, 40), min_size=segments, max_size=segments)
    q_lengths, kv_lengths = data.draw(lengths), data.draw(lengths)
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dim, v_dim = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    tensors = make_qkv(sum(q_lengths), sum(kv_lengths), kv_heads * group, kv_heads, dim, v_dim, dtype)
    check(*tensors, offsets_of(q_lengths), offsets_of(kv_lengths))


# -- modes -------------------------------------------------------------------------------------------------------------------


def test_no_grad(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    with torch.no_grad():
        out = F.jagged_attention(q, k, v, offsets_of([4, 3]))
    assert not out.requires_grad
    assert torch.equal(out, F.jagged_attention(q, k, v, offsets_of([4, 3])))


def test_inference_mode(offsets_of):
    with torch.inference_mode():
        assert F.jagged_attention(*make_qkv(7, 7), offsets_of([4, 3])).shape == (7, 2, 8)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_autocast_computes_in_its_dtype(implementation, offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.jagged_attention(q, k.half(), v, offsets_of([4, 3]), implementation=implementation)
    assert out.dtype == torch.bfloat16
    expected = F.jagged_attention(*(x.bfloat16() for x in (q, k, v)), offsets_of([4, 3]), implementation=implementation)
    torch.testing.assert_close(out, expected, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps * float(v.detach().abs().max()))
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == torch.float32


@pytest.mark.parametrize("activation", ["softmax", "silu", "gelu_taylor"])
def test_a_backward_inside_autocast_has_the_gradients_of_one_outside(activation, offsets_of):
    tensors, grads = [x.requires_grad_() for x in make_qkv(7, 7)], []
    for inside in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = F.jagged_attention(*tensors, offsets_of([4, 3]), activation=activation)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            grads.append(torch.autograd.grad(out, tensors, torch.ones_like(out)))
    assert all(torch.equal(inner, outer) for inner, outer in zip(*grads))


def test_results_may_be_changed_in_place(offsets_of):
    """Softmax's not: as torch's own, it keeps them for its backward."""
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    F.jagged_attention(q, k, v, offsets_of([4, 3]), activation="silu").relu_().sum().backward()
    assert q.grad.isfinite().all()


def test_forward_mode_is_refused_where_it_would_give_nothing(offsets_of):
    q, k, v = make_qkv(7, 7)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="forward mode"):
            F.jagged_attention(dual, k, v, offsets_of([4, 3]))
        out = F.jagged_attention(dual, k, v, offsets_of([4, 3]), implementation="reference")
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None


def test_autocast_leaves_float64_alone(offsets_of):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.jagged_attention(*make_qkv(7, 7, dtype=torch.float64), offsets_of([4, 3])).dtype == torch.float64


def test_second_derivatives_raise(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    grads = torch.autograd.grad(F.jagged_attention(q, k, v, offsets_of([4, 3])).sum(), [q, k, v], create_graph=True)
    with pytest.raises(RuntimeError, match="jagged_attention.*twice"):
        sum(g.sum() for g in grads).backward()


def test_the_reference_has_second_derivatives(offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(4, 4, dim=2, dtype=torch.float64)]
    offsets = offsets_of([3, 1])
    assert torch.autograd.gradgradcheck(lambda *x: F.jagged_attention(*x, offsets, implementation="reference"), inputs)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_function_transforms_raise(transform, offsets_of):
    x, offsets = torch.randn(2, 7, 2, 4), offsets_of([4, 3])

    def attend(x):
        return F.jagged_attention(x, x, x, offsets)

    with pytest.raises(RuntimeError, match="jagged_attention.*torch.func"):
        if transform == "vmap":
            torch.vmap(attend)(x)
        elif transform == "grad":
            torch.func.grad(lambda x: attend(x).sum())(x[0])
        else:
            torch.func.jvp(attend, (x[0],), (x[1],))


def test_vmap_of_the_reference(offsets_of):
    x, offsets = torch.randn(2, 7, 2, 4), offsets_of([4, 3])
    batched = torch.vmap(lambda x: F.jagged_attention(x, x, x, offsets, implementation="reference"))(x)
    torch.testing.assert_close(batched, torch.stack([F.jagged_attention(x[i], x[i], x[i], offsets) for i in range(2)]))


# -- bad input ---------------------------------------------------------------------------------------------------------------


GOOD = dict(zip("qkv", make_qkv(6, 6))) | dict(q_offsets=torch.tensor([0, 2, 6]))
SMALL_TILES = jm.zigzag_schedule([2, 4], [2, 4], num_heads=2, block_m=8, block_n=16, num_workers=1)
SCHEDULE = jm.zigzag_schedule([2, 4], [2, 4], num_heads=4, block_m=16, block_n=16, num_workers=1)
GROUPS = dict(q_offsets=torch.tensor([0, 2, 6, 6]), kv_offsets=torch.tensor([0, 6]))
NO_KEYS = dict(k=torch.ones(0, 2, 8), v=torch.ones(0, 2, 8), kv_offsets=torch.tensor([0]))
SILU, TARGETS = dict(activation="silu"), jm.AttentionMask(causal=True, num_targets=torch.tensor([3, 4]))
BAD = [
    (dict(q=None), TypeError, "q must be a torch.Tensor, got NoneType"),
    (dict(v=[1.0]), TypeError, "v must be a torch.Tensor, got list"),
    (dict(k=torch.ones(6, 2, 8, dtype=torch.int64)), TypeError, "k must be float64, .* on cpu, got torch.int64"),
    (dict(q=torch.ones(6, 16)), ValueError, r"q must have shape \[Lq, H, D\], got \[6, 16\]"),
    (dict(k=torch.ones(6, 2, 8, 1)), ValueError, r"k must have shape \[Lk, Hkv, D\], got \[6, 2, 8, 1\]"),
    (dict(k=torch.ones(6, 2, 8, dtype=torch.float64)), ValueError, "k must have q's dtype, torch.float32, got torch.float64"),
    (dict(v=torch.ones(6, 2, 8, device="meta")), ValueError, "v must be on q's device, cpu, got meta"),
    (dict(v=torch.ones(5, 2, 8)), ValueError, r"v must have k's rows and heads, \[6, 2\], got \[5, 2\]"),
    (dict(v=torch.ones(6, 1, 8)), ValueError, r"v must have k's rows and heads, \[6, 2\], got \[6, 1\]"),
    (dict(k=torch.ones(6, 2, 4)), ValueError, "k must have q's head dim, 8, got 4"),
    (dict(q=torch.ones(6, 3, 8)), ValueError, "q's heads must be a multiple of k's, got 3 and 2"),
    (dict(q=torch.ones(6, 0, 8)), ValueError, "q's heads must be a multiple of k's, got 0 and 2"),
    (dict(v=torch.ones(6, 2, 257)), ValueError, "v's head dim must be 1 to 256, got 257"),
    (dict(v=torch.ones(6, 2, 0)), ValueError, "v's head dim must be 1 to 256, got 0"),
    (dict(q_offsets=None), TypeError, "q_offsets must be a torch.Tensor, got NoneType"),
    (dict(q_offsets=[0, 2, 6]), TypeError, "q_offsets must be a torch.Tensor, got list"),
    (dict(q_offsets=torch.tensor([0.0, 6.0])), TypeError, "q_offsets must be int32 or int64, got torch.float32"),
    (dict(q_offsets=torch.tensor([0, 2, 6], device="meta")), ValueError, "q_offsets must be on q's device, cpu, or the host, got meta"),
    (dict(q_offsets=torch.tensor([0, 2, 5])), ValueError, "q_offsets must end at the number of rows, 6, got 5"),
    (dict(q_offsets=torch.tensor([0, 4, 2, 6])), ValueError, "q_offsets must not decrease, got 4 then 2 at segment 1"),
    (dict(q_offsets=torch.tensor([1, 6])), ValueError, "q_offsets must start at 0, got 1"),
    (dict(q_offsets="all"), ValueError, 'q_offsets must be a tensor or "shared", got "all"'),
    (dict(q_offsets="shared"), ValueError, 'q_offsets and kv_offsets cannot both be "shared"'),
    (dict(kv_offsets=torch.tensor([0, 2, 4, 6])), ValueError, "q_offsets must describe as many segments as kv_offsets, .*, got 2 and 3"),
    (GROUPS | dict(kv_offsets=torch.tensor([0, 2, 6])), ValueError, "q_offsets must describe .* or a multiple of them, got 3 and 2"),
    (GROUPS | NO_KEYS, ValueError, "q_offsets must describe as many segments as kv_offsets, or a multiple of them, got 3 and 0"),
    (GROUPS | dict(mask=jm.AttentionMask()), ValueError, "mask must be None with several query groups, got 3 segments of q_offsets, 1 of"),
    (GROUPS | SILU | dict(output_scale=torch.ones(1)), ValueError, r"output_scale must have shape \[B\] = \[3\], got \[1\]"),
    (dict(kv_offsets=torch.tensor([0, 3, 7])), ValueError, "kv_offsets must end at the number of rows, 6, got 7"),
    (dict(max_seqlen_q=3), ValueError, "q_offsets has a segment of 4 rows, longer than max_seqlen_q = 3"),
    (dict(max_seqlen_kv=3), ValueError, "kv_offsets has a segment of 4 rows, longer than max_seqlen_kv = 3"),
    (dict(max_seqlen_q="4"), TypeError, "max_seqlen_q must be an int, got str"),
    (dict(scale=torch.tensor(0.5)), TypeError, "scale must be a number, got Tensor"),
    (dict(scale="big"), TypeError, "scale must be a number, got str"),
    (dict(activation="relux"), ValueError, "activation must be one of .*softmax.*, got 'relux'"),
    (dict(activation=None), ValueError, "activation must be one of .*softmax.*, got None"),
    (SILU | dict(output_scale="1"), TypeError, r"output_scale must be a number or a tensor \[B\], got str"),
    (SILU | dict(output_scale=torch.tensor([1, 2])), TypeError, "output_scale must be float64, .*, got torch.int64"),
    (SILU | dict(output_scale=torch.ones(3)), ValueError, r"output_scale must have shape \[B\] = \[2\], got \[3\]"),
    (SILU | dict(output_scale=torch.tensor(0.5)), ValueError, r"output_scale must have shape \[B\] = \[2\], got \[\]"),
    (SILU | dict(output_scale=torch.ones(2, device="meta")), ValueError, "output_scale must be on q's device, cpu, or the host, got meta"),
    (dict(output_scale=0.5), ValueError, "output_scale must be 1 with softmax, got 0.5"),
    (dict(output_scale=torch.ones(2)), ValueError, "output_scale must be 1 with softmax, got tensor"),
    (dict(mask=torch.ones(6, 6)), TypeError, "mask must be an AttentionMask, got Tensor"),
    (dict(mask=TARGETS, kv_offsets="shared"), ValueError, "mask must be None where keys are shared by all segments"),
    (dict(mask=jm.AttentionMask(num_targets=torch.tensor([1]))), ValueError, r"mask.num_targets must have shape \[B\] = \[2\], got \[1\]"),
    (dict(mask=jm.AttentionMask(num_targets=torch.tensor([1, 2], device="meta"))), ValueError, "mask.num_targets must be on q's device"),
    (dict(mask=TARGETS), ValueError, "mask.num_targets must be at most the segment's length, got 3 of 2 at segment 0"),
    (dict(implementation="cuda"), ValueError, "implementation must be one of .*, got 'cuda'"),
    (dict(schedule=3), TypeError, "schedule must be a TileSchedule, got int"),
    (dict(schedule=SCHEDULE), ValueError, "schedule was built for 4 heads, q has 2"),
    (dict(schedule=SMALL_TILES), ValueError, r"schedule must have a block_m of \(16, 32, 64, 128, 192\), the kernels' tiles, got 8"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        F.jagged_attention(**(GOOD | change))


def test_triton_on_the_host_says_what_to_ask_for():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="^implementation='triton' needs CUDA tensors, got cpu tensors; 'auto' takes both"):
        F.jagged_attention(*make_qkv(6, 6), GOOD["q_offsets"], implementation="triton")


def test_triton_in_float64_is_refused():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="q must be float32, .* on cpu with implementation='triton', got torch.float64"):
        F.jagged_attention(*make_qkv(6, 6, dtype=torch.float64), GOOD["q_offsets"], implementation="triton")
    with pytest.raises(ValueError, match="implementation='hopper' needs CUDA tensors, got cpu tensors"):
        F.jagged_attention(*make_qkv(6, 6), GOOD["q_offsets"], implementation="hopper")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 100.0, 0.0])
@pytest.mark.parametrize("shared", [False, True])
def test_a_segments_scale_changes_no_bit_of_the_others(offsets_of, value, shared):
    """Where several segments of queries read the same keys, all scales are divided by one factor."""
    q, k, v = (torch.randn(rows, 2, 8).bfloat16() for rows in (20, 9, 9))
    scales, kv_offsets = torch.tensor([0.5, 2.0, 1.0, -3.0]), "shared" if shared else offsets_of([5, 4])

    def attend():
        return F.jagged_attention(q, k, v, offsets_of([4, 6, 7, 3]), kv_offsets, activation="silu", output_scale=scales)

    expected, scales[3] = attend(), value
    out = attend()
    assert torch.equal(out[:17], expected[:17]) and not torch.equal(out[17:], expected[17:])


def test_scales_of_less_precision_than_the_operands(offsets_of):
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (20, 9, 9))
    q_offsets, kv_offsets, scales = offsets_of([4, 6, 7, 3]), offsets_of([5, 4]), torch.tensor([0.3, 2.0, 0.7, -3.0])
    outputs = [F.jagged_attention(q, k, v, q_offsets, kv_offsets, activation="silu", output_scale=x) for x in (scales, scales.double())]
    torch.testing.assert_close(*outputs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name, mask", [("q", None), ("q", jm.AttentionMask(causal=True)), ("k", None), ("v", None)])
def test_what_is_not_finite_shows_where_the_definition_has_it(name, mask, value, offsets_of):
    """And nowhere else: a row that sees nothing stays 0."""
    tensors = {x: torch.randn(12, 2, 8) for x in "qkv"}
    tensors[name][5, 0, 2] = value
    q_offsets, kv_offsets = offsets_of([3, 6, 3]), offsets_of([3, 4, 5])
    run = partial(F.jagged_attention, *tensors.values(), q_offsets, kv_offsets, mask=mask)
    assert torch.equal(run().isfinite(), run(implementation="reference").isfinite())
    assert not run().isfinite().all()
