"""Every attention kernel in Triton's interpreter (fp32 and fp16; its bf16 arithmetic is wrong)."""

import dataclasses

import pytest
import torch
from marks import slow_after

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules import zigzag_schedule
from jagged_modules.activations import ACTIVATIONS
from jagged_modules.schedule import host_schedule

SELF = [3, 0, 1, 70, 40]
MASKS = [  # the other activation of a mask is in test_attention_bias.py
    ("causal", "softmax"),
    ("window", "softmax"),
    ("hstu", "softmax"),
    ("causal", "silu"),
    ("window", "silu"),
    ("causal-window", "softmax"),
    ("targets", "silu"),
    ("grouped-targets", "softmax"),
    ("long-context", "silu"),
    ("band", "softmax"),
    ("open-targets", "silu"),
    ("semi-local", "softmax"),
    ("truncated", "silu"),
    ("open-truncated", "silu"),
]
DTYPES = [torch.float32, torch.float16]


@slow_after(1, "dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", ["mixed", "empty-ends", "no-keys", "no-queries", "nothing"])
def test_forward_and_gradients(check_attention, lengths, dtype):
    check_attention(lengths, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_segments_of_one_key(check_one_key, dtype):
    check_one_key(dtype, "cpu")


@pytest.mark.parametrize("dims", [(8, 8), (20, 72), (64, 64), (128, 96)], ids=str)
def test_head_dims(check_attention, dims):
    check_attention(([3, 70, 0], [65, 20, 4]), torch.float32, "cpu", heads=(2, 2), dims=dims)


@slow_after(1, "dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", ["q", "kv"])
def test_shared_operands(check_attention, shared, dtype):
    check_attention("mixed", dtype, "cpu", shared=shared)


@slow_after(
    3,
    "lengths, dtype",
    [
        *((x, torch.float32) for x in ("two-groups", "three-groups", "groups-of-one-segment")),
        ("two-groups", torch.float16),
    ],
    ids=str,
)
def test_several_query_groups(check_attention, lengths, dtype):
    check_attention(lengths, dtype, "cpu", heads=(2, 1))
    check_attention(
        lengths,
        dtype,
        "cpu",
        heads=(2, 2),
        dims=(16, 16),
        activation="gelu_tanh",
        output_scale=0.02,
    )


def test_several_query_groups_with_a_scale_per_segment(check_attention):
    lengths = ([3, 70, 0, 20, 5, 0], [65, 20, 4])
    schedule = dict(num_heads=4, num_kv_heads=2, head_dim=40, dtype=torch.float32)
    schedule = host_schedule(*map(torch.tensor, lengths), **schedule)
    check_attention(
        lengths,
        torch.float32,
        "cpu",
        activation="sigmoid",
        output_scale=torch.rand(6) + 0.1,
        schedule=schedule,
    )


def test_user_rows_and_candidates_together(check_self_target_attention):
    check_self_target_attention([3, 0, 70], [20, 4, 0], torch.float32, "cpu")


OF_USERS_ROWS = {
    "causal": dict(causal=True),
    "window": dict(window=(30, 3)),
    "hstu": dict(causal=True, contextual_seqlen=3, max_attn_len=20, min_full_attn_seqlen=10),
    "semi-local": dict(causal=True, window=(9, None), global_prefix=20, recent_history=40),
}


@slow_after(
    5,
    "activation, mask",
    [("softmax", x) for x in OF_USERS_ROWS] + [("silu", x) for x in reversed(OF_USERS_ROWS)],
)
def test_a_mask_of_the_users_own_rows(check_self_target_attention, mask, activation):
    lengths, candidates = [3, 0, 150, 5], [20, 4, 70, 90]
    options = dict(activation=activation, mask=jm.AttentionMask(**OF_USERS_ROWS[mask]))
    check_self_target_attention(lengths, candidates, torch.float32, "cpu", **options)


@slow_after(
    3,
    "activation, dtype",
    [
        *((x, torch.float32) for x in ACTIVATIONS[1:]),
        *((x, torch.float16) for x in ACTIVATIONS[1::3]),
    ],
    ids=str,
)
def test_activations(check_attention, activation, dtype):
    check_attention(
        ([3, 70, 0, 20], [65, 20, 4, 0]),
        dtype,
        "cpu",
        activation=activation,
        scale=0.3,
        output_scale=0.02,
    )


@slow_after(3, "mask, activation", MASKS)
def test_masks(check_attention, mask, activation):
    lengths = (SELF, SELF) if activation == "softmax" else ([80, 3, 0, 9], [70, 90, 5, 0])
    check_attention(lengths, torch.float32, "cpu", heads=(2, 1), activation=activation, mask=mask)


@slow_after(1, "activation", ["softmax", "silu"])
def test_the_first_tile_of_a_segment_is_the_one_that_is_not_full(check_attention, activation):
    """Under a causal mask, of tiles with 128 rows: 150 rows are 86 and 64."""
    lengths = [150, 3, 0, 70, 129], [150, 9, 4, 200, 190]
    check_attention(lengths, torch.float16, "cpu", activation=activation, mask="causal")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_very_negative_scores_under_a_mask(check_very_negative_scores, dtype):
    check_very_negative_scores(dtype, "cpu")


@slow_after(1, "shared", ["q", "kv"])
def test_shared_operands_with_a_scale_per_segment(check_attention, shared):
    lengths = [3, 70, 0, 20], [65, 20, 4, 0]
    for output_scale in (
        torch.rand(4) + 0.1,
        torch.rand(8, dtype=torch.float64)[::2],
        torch.rand(()).expand(4),
    ):
        check_attention(
            lengths,
            torch.float32,
            "cpu",
            shared=shared,
            activation="sigmoid",
            output_scale=output_scale,
        )


@slow_after(
    4,
    "shared, dtype",
    [
        *((x, torch.float32) for x in ("none", "q", "kv", "groups")),
        ("none", torch.float16),
        ("q", torch.float16),
    ],
    ids=str,
)
def test_scales_with_a_gradient(check_scales_with_a_gradient, shared, dtype):
    check_scales_with_a_gradient(shared, dtype, "cpu", "triton")


def test_masked_host_schedule(check_attention):
    lengths, mask = torch.tensor(SELF), jm.AttentionMask(causal=True)
    schedule = host_schedule(
        lengths, lengths, num_heads=2, num_kv_heads=1, head_dim=40, dtype=torch.float32, mask=mask
    )
    check_attention(
        (SELF, SELF),
        torch.float32,
        "cpu",
        heads=(2, 1),
        activation="silu",
        mask=mask,
        schedule=schedule,
    )


def test_empty_shared_operands(check_empty_shared_operands):
    check_empty_shared_operands("cpu")


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_scale(check_attention, scale):
    check_attention("empty-ends", torch.float32, "cpu", scale=scale)


def test_host_schedule(check_attention):
    lengths = [3, 0, 130, 65], [70, 4, 0, 129]
    schedule = host_schedule(
        *map(torch.tensor, lengths), num_heads=4, num_kv_heads=2, head_dim=40, dtype=torch.float32
    )
    check_attention(lengths, torch.float32, "cpu", schedule=schedule)


def test_a_users_own_schedule(check_attention):
    lengths = [3, 0, 130, 65], [70, 4, 0, 129]
    schedule = zigzag_schedule(*lengths, num_heads=4, block_m=32, block_n=16)
    check_attention(lengths, torch.float32, "cpu", schedule=schedule)


def test_a_second_derivative_is_refused(offsets):
    q = torch.randn(5, 2, 16, requires_grad=True)
    out = F.jagged_attention(q, q, q, offsets([2, 3]), implementation="triton")
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="jagged_attention is not differentiable twice"):
        gradient.sum().backward()


def test_a_schedule_of_other_lengths_is_refused(check_attention):
    lengths = torch.tensor([3, 0, 130])
    schedule = host_schedule(
        lengths, lengths, num_heads=4, num_kv_heads=2, head_dim=40, dtype=torch.float32
    )
    with pytest.raises(
        ValueError,
        match="schedule was built for other lengths: it has 0 tiles of segment 1, q_offsets need 4",
    ):
        check_attention(([3, 4], [3, 4]), torch.float32, "cpu", schedule=schedule)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_schedule_that_counts_long_segments_as_short_is_refused(check_attention, half):
    """Kernels for packed tiles would not take them, and the others neither."""
    lengths = torch.tensor([3, 20]), torch.tensor([3, 70])
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=40, dtype=torch.float32)
    schedules = [
        host_schedule(lengths[0], x, **sizes) for x in (lengths[1], lengths[1].clamp(max=60))
    ]
    schedule = dataclasses.replace(
        schedules[half == "forward"], backward=schedules[half == "backward"].backward
    )
    with pytest.raises(
        ValueError, match="it counts segment 1 as short, which has 20 queries and 70 keys"
    ):
        check_attention(lengths, torch.float32, "cpu", schedule=schedule)


def test_packed_views_and_expanded_gradients(check_attention):
    packed = torch.randn(80, 3, 2, 24)
    lengths = [50, 30], [50, 30]
    for grad in (
        lambda out: torch.ones(()).expand_as(out),
        lambda out: torch.randn(1, *out.shape[1:]).expand_as(out),
    ):
        check_attention(lengths, torch.float32, "cpu", tensors=packed.unbind(1), grad=grad)


def test_a_neighbours_nan_stays_where_it_is(offsets):
    q, k, v = (torch.randn(100, 2, 16) for _ in range(3))
    for x in (q, k, v):
        x[40:] = float("nan")
        x.requires_grad_()
    segments = offsets([40, 60])
    out = F.jagged_attention(q, k, v, segments, implementation="triton")
    grad = torch.randn_like(out)
    grad[40:] = float("nan")
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    assert out[40:].isnan().all()
    for x in (out, *gradients):
        assert x[:40].isfinite().all()
