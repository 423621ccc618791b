"""F.jagged_attention on the CPU: activations, masks, output scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS
from jagged_modules.cpu import attention_math as cpu_blocks
from jagged_modules.cpu import groups as cpu

from .attention_cases import DTYPES, check, make_qkv, mask_of

MASKS = ["none", "causal", "window", "targets", "hstu", "semi-local"]
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
    options = dict(
        activation=activation,
        mask=mask_of(mask, targets),
        output_scale=1.0 if activation == "softmax" else 0.3,
    )
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
    options = (
        dict(activation=activation, mask=mask_of(mask, targets))
        if targets
        else dict(activation=activation)
    )
    check(*tensors, offsets_of(q_lengths), offsets_of(kv_lengths), **options)


@pytest.mark.parametrize(
    "rows, scores, most", [(1, 1, 1), (2, 60, 10**6), (10**6, 150, 40), (3, 10**6, 30)]
)
@pytest.mark.parametrize("mask", ["none", "hstu"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_blocks_of_any_size(activation, mask, rows, scores, most, monkeypatch, offsets_of):
    """Blocks of some rows, of some heads and of some segments."""
    monkeypatch.setattr(cpu_blocks, "ROWS", rows)
    monkeypatch.setattr(cpu_blocks, "MOST_SCORES", most)
    for module in (cpu, cpu_blocks):
        monkeypatch.setattr(module, "SCORES_AT_A_TIME", scores)
    lengths, targets = [5, 5, 3, 5, 9, 5], [2, 2, 0, 2, 1, 2]
    tensors = make_qkv(32, 32, heads=4, kv_heads=2, v_dim=5)
    check(*tensors, offsets_of(lengths), None, activation=activation, mask=mask_of(mask, targets))
    tensors = make_qkv(4, 32, heads=4, kv_heads=2, v_dim=5)
    check(
        *tensors, "shared", offsets_of(lengths), activation=activation, mask=mask_of(mask, targets)
    )


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
    offsets = offsets_of([6, 0, 7])
    factor = torch.tensor([0.5, 2.0, -3.0], dtype=DTYPES[dtype], requires_grad=requires_grad)
    q_offsets, kv_offsets = ("shared" if name == shared else offsets for name in ("q", "kv"))
    tensors = make_qkv(
        4 if shared == "q" else 13,
        4 if shared == "kv" else 13,
        heads=4,
        kv_heads=2,
        dtype=DTYPES[dtype],
    )
    check(*tensors, q_offsets, kv_offsets, activation="silu", output_scale=factor)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("shared", ["none", "kv", "groups"])
def test_a_scale_keeps_half_precision_in_range(shared, requires_grad, offsets_of):
    """Weights of 181 for 500 keys of value 8 add up to 720,000, more than fp16 holds; a thousandth
    of it is 724."""
    q, k, v = (torch.full((500, 1, 8), 8.0, dtype=torch.float16) for _ in range(3))
    lengths = {
        "none": ([500], offsets_of([500])),
        "kv": ([200, 300], "shared"),
        "groups": ([200, 300], offsets_of([500])),
    }[shared]
    factor = torch.full((len(lengths[0]),), 1e-3, requires_grad=requires_grad)
    out = F.jagged_attention(
        q, k, v, offsets_of(lengths[0]), lengths[1], activation="silu", output_scale=factor
    )
    torch.testing.assert_close(
        out.float(), torch.full_like(out, 500 * 8 * 512 / 8**0.5 * 1e-3).float(), rtol=1e-3, atol=0
    )
    if requires_grad:
        out.float().sum().backward()
        expected = torch.tensor(lengths[0]) * 8 * 500 * 8 * 512 / 8**0.5
        torch.testing.assert_close(factor.grad, expected, rtol=1e-3, atol=0)


def test_the_gradient_of_a_scale_is_summed_in_fp32(offsets_of):
    q = torch.ones(1000, 1, 8, dtype=torch.bfloat16)
    factor = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    out = F.jagged_attention(
        q, q, q / 1000, offsets_of([1000]), activation="identity", output_scale=factor
    )
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
    tensors = make_qkv(13, 13, dtype=torch.bfloat16)
    factor = torch.tensor([0.5, 0.25], dtype=torch.float64)
    for output_scale in (factor, factor.clone().requires_grad_()):
        out = F.jagged_attention(
            *tensors, offsets_of([6, 7]), activation="relu", output_scale=output_scale
        )
        assert out.dtype == torch.bfloat16
        # powers of 2 round nothing
        scaled = F.jagged_attention(*tensors, offsets_of([6, 7]), activation="relu")
        assert torch.equal(out[:6], scaled[:6] * 0.5) and torch.equal(out[6:], scaled[6:] * 0.25)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_rows_that_see_nothing_give_zero(activation, offsets_of):
    """Two rows are before the first column."""
    q, k, v = (x.requires_grad_() for x in make_qkv(6, 4))
    out = F.jagged_attention(
        q,
        k,
        v,
        offsets_of([6]),
        offsets_of([4]),
        activation=activation,
        mask=jm.AttentionMask(causal=True),
    )
    dq, dk, dv = torch.autograd.grad(out.sum(), [q, k, v])
    assert not out[:2].any() and not dq[:2].any()
    assert out[2:].all() and dq[3:].all() and all(x.isfinite().all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize("activation", ["softmax", "silu", "identity"])
def test_masked_columns_reach_nothing(activation, offsets_of):
    """Values and gradients are those of the segment without the columns; huge numbers there change
    no bit."""
    tensors, mask = make_qkv(8, 8), jm.AttentionMask(window=(2, 0))
    inputs = [x.requires_grad_() for x in tensors]
    out = F.jagged_attention(*inputs, offsets_of([8]), activation=activation, mask=mask)[-1]
    grads = torch.autograd.grad(out.sum(), inputs)
    assert not any(x[:5].any() for x in grads)
    changed = [torch.cat([1e30 * x[:5], x[5:]]) for x in tensors]
    assert torch.equal(
        F.jagged_attention(*changed, offsets_of([8]), activation=activation, mask=mask)[-1], out
    )


def test_gradients_at_the_kink_are_torchs(offsets_of):
    """All scores are exactly 0."""
    q, k, v = torch.zeros(3, 1, 2, requires_grad=True), torch.ones(3, 1, 2), torch.ones(3, 1, 2)
    for activation, dact in [
        ("relu", 0.0),
        ("leaky_relu", 0.01),
        ("gelu_taylor", 0.5),
        ("hardswish", 0.5),
        ("sigmoid", 0.25),
    ]:
        (dq,) = torch.autograd.grad(
            F.jagged_attention(q, k, v, offsets_of([3]), activation=activation, scale=1.0).sum(), q
        )
        torch.testing.assert_close(dq, torch.full_like(q, 6 * dact))


def multiply_adds(profile) -> int:
    """Multiply-adds of all batched GEMMs."""
    operands = {"aten::bmm": (0, 1), "aten::baddbmm_": (1, 2)}
    shapes = [
        [event.input_shapes[i] for i in operands[event.name]]
        for event in profile.events()
        if event.name in operands
    ]
    return sum(left[0] * left[1] * left[2] * right[2] for left, right in shapes)


@pytest.mark.parametrize("name, share", [("none", 1.0), ("causal", 0.6), ("window", 0.1)])
def test_work_of_an_activation(name, share, offsets_of):
    """2 GEMMs forward and 5 backward over the real rows, and under a mask over the columns that a
    block of rows sees."""
    lengths = [1500, 0, 40, 1, 40] if name == "none" else [2000]
    inputs = [x.requires_grad_() for x in make_qkv(sum(lengths), sum(lengths), heads=4, kv_heads=2)]
    mask = None if name == "none" else mask_of(name, [0])
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        F.jagged_attention(
            *inputs, offsets_of(lengths), activation="silu", mask=mask
        ).sum().backward()
    real = 7 * 4 * 8 * sum(n * n for n in lengths)
    assert (
        multiply_adds(profile) == real
        if mask is None
        else share / 2 * real < multiply_adds(profile) <= share * real
    )


@settings(max_examples=150)
@given(data=st.data())
def test_any_activation_and_mask(data, offsets_of):
    segments = data.draw(st.integers(1, 5))
    q_lengths, kv_lengths = (
        data.draw(st.lists(st.integers(0, 20), min_size=segments, max_size=segments)) for _ in "qk"
    )
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
        global_prefix=data.draw(st.sampled_from([0, 0, 1, 5])),
        recent_history=data.draw(st.sampled_from([0, 0, 1, 6])),
    )
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    output_scale = (
        1.0 if activation == "softmax" else data.draw(st.sampled_from([0.25, torch.rand(segments)]))
    )
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    dim, v_dim = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    q_offsets, q_rows = offsets_of(q_lengths), sum(q_lengths)
    if data.draw(st.booleans()):
        q_offsets, q_rows = "shared", 5
    tensors = make_qkv(
        q_rows,
        sum(kv_lengths),
        kv_heads * group,
        kv_heads,
        dim,
        v_dim,
        data.draw(st.sampled_from([*DTYPES.values()])),
    )
    options = dict(activation=activation, mask=mask, output_scale=output_scale)
    check(*tensors, q_offsets, offsets_of(kv_lengths), **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 100.0, 0.0])
@pytest.mark.parametrize("shared", [False, True])
def test_a_segments_scale_changes_no_bit_of_the_others(offsets_of, value, shared):
    """Where several segments of queries read the same keys, all scales are divided by one
    factor."""
    q, k, v = (torch.randn(rows, 2, 8).bfloat16() for rows in (20, 9, 9))
    scales = torch.tensor([0.5, 2.0, 1.0, -3.0])
    kv_offsets = "shared" if shared else offsets_of([5, 4])

    def attend():
        return F.jagged_attention(
            q, k, v, offsets_of([4, 6, 7, 3]), kv_offsets, activation="silu", output_scale=scales
        )

    expected, scales[3] = attend(), value
    out = attend()
    assert torch.equal(out[:17], expected[:17]) and not torch.equal(out[17:], expected[17:])


def test_scales_of_less_precision_than_the_operands(offsets_of):
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (20, 9, 9))
    q_offsets = offsets_of([4, 6, 7, 3])
    kv_offsets = offsets_of([5, 4])
    scales = torch.tensor([0.3, 2.0, 0.7, -3.0])
    outputs = [
        F.jagged_attention(q, k, v, q_offsets, kv_offsets, activation="silu", output_scale=x)
        for x in (scales, scales.double())
    ]
    torch.testing.assert_close(*outputs, rtol=1e-14, atol=1e-14)
