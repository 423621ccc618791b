"""F.self_target_attention, and query groups of F.jagged_attention, which it uses: equal to a call
for each group."""

import accuracy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from marks import raising

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.functional.target_attention import joined_rows

LENGTHS = {  # queries, a multiple of the keys; keys
    "two": ([3, 0, 5, 2, 7, 1, 0, 2], [4, 2, 0, 6]),
    "three": ([4, 4, 0, 1, 9, 2, 4, 4, 4], [5, 5, 1]),
    "one-segment": ([3, 0, 8], [6]),
    "empty": ([0, 0, 0, 0], [3, 0]),
}


def make_qkv(q_rows, kv_rows, dtype=torch.float64):
    return [
        torch.randn(n, h, d, dtype=torch.float64).to(dtype)
        for n, h, d in ((q_rows, 4, 6), (kv_rows, 2, 6), (kv_rows, 2, 5))
    ]


def outputs_and_gradients(function, *tensors):
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))]


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize(
    "activation, output_scale", [("softmax", 1.0), ("gelu_tanh", 0.3), ("silu", "tensor")]
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_groups_equal_a_call_for_each(
    lengths, activation, output_scale, implementation, offsets_of
):
    queries, keys = LENGTHS[lengths]
    groups = [queries[first : first + len(keys)] for first in range(0, len(queries), len(keys))]
    rows, scales = [sum(x) for x in groups], [output_scale] * len(groups)
    if output_scale == "tensor":
        output_scale = torch.rand(len(queries), dtype=torch.float64)
        scales = output_scale.split(len(keys))

    def together(q, k, v):
        options = dict(
            activation=activation, output_scale=output_scale, implementation=implementation
        )
        return F.jagged_attention(q, k, v, offsets_of(queries), offsets_of(keys), **options)

    def apart(q, k, v):
        parts = zip(q.split(rows), groups, scales)
        options = dict(activation=activation, implementation="reference")
        return torch.cat(
            [
                F.jagged_attention(
                    x, k, v, offsets_of(n), offsets_of(keys), output_scale=s, **options
                )
                for x, n, s in parts
            ]
        )

    tensors = make_qkv(sum(queries), sum(keys))
    torch.testing.assert_close(
        outputs_and_gradients(together, *tensors), outputs_and_gradients(apart, *tensors)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_groups_in_every_dtype(activation, dtype, offsets_of):
    queries, keys = (offsets_of(x) for x in LENGTHS["three"])
    accuracy.check(
        lambda *x: F.jagged_attention(*x, queries, keys, activation=activation),
        lambda *x: accuracy.attention(*x, queries, keys, activation=activation),
        dict(zip("qkv", make_qkv(32, 11, dtype))),
    )


@pytest.mark.parametrize("operands", ["groups", "shared keys"])
def test_scales_of_very_different_size_in_fp16(operands, offsets_of):
    """The keys' sums times another segment's scale are beyond fp16's range, or below it; times
    their own they are not."""
    queries = offsets_of([3, 2, 4, 1])
    keys = "shared" if operands == "shared keys" else offsets_of([40, 30])
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float16) for n in (10, 70, 70))
    v, scales = v * 3000, torch.tensor([5.0, 1e-3, 1e-6, 0.1])
    options = dict(activation="silu", output_scale=scales)
    accuracy.check(
        lambda *x: F.jagged_attention(*x, queries, keys, **options),
        lambda *x: accuracy.attention(*x, queries, keys, **options),
        dict(q=q, k=k, v=v),
        grad=torch.randn(10, 2, 8, dtype=torch.float16) * 1e-2,
    )


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_gradcheck_of_groups(activation, offsets_of):
    queries, keys = (offsets_of(x) for x in ([2, 0, 1, 1, 2, 1], [3, 2, 0]))
    inputs = [x.requires_grad_() for x in make_qkv(7, 5)]
    inputs += (
        [] if activation == "softmax" else [torch.rand(6, dtype=torch.float64, requires_grad=True)]
    )

    def attend(q, k, v, output_scale=1):
        return F.jagged_attention(
            q, k, v, queries, keys, activation=activation, output_scale=output_scale
        )

    assert torch.autograd.gradcheck(attend, inputs)


MASKS = {
    "none": None,
    "all": jm.AttentionMask(),
    "causal": jm.AttentionMask(causal=True),
    "window": jm.AttentionMask(window=(3, 1)),
    "hstu": jm.AttentionMask(
        causal=True, contextual_seqlen=2, max_attn_len=3, min_full_attn_seqlen=2
    ),
    "semi-local": jm.AttentionMask(
        causal=True, window=(2, None), global_prefix=1, recent_history=5
    ),
}


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("mask", list(MASKS)[1:])
def test_a_mask_is_that_of_the_first_group(mask, activation, implementation, offsets_of):
    """Of a user without candidates or without rows, and of users with equal lengths, too."""
    users, candidates, others = [9, 0, 4, 4, 1], [3, 2, 0, 5, 20], [1, 0, 5, 5, 0]
    keys, groups = offsets_of(users), [users, candidates, others]
    options = dict(activation=activation, implementation=implementation)

    def together(q, k, v):
        queries = offsets_of(users + candidates + others)
        return F.jagged_attention(q, k, v, queries, keys, mask=MASKS[mask], **options)

    def apart(q, k, v):
        parts = zip(q.split([sum(x) for x in groups]), groups, (MASKS[mask], None, None))
        outs = [
            F.jagged_attention(
                x, k, v, offsets_of(n), keys, mask=m, activation=activation, implementation="auto"
            )
            for x, n, m in parts
        ]
        return torch.cat(outs)

    tensors = make_qkv(sum(map(sum, groups)), sum(users))
    torch.testing.assert_close(
        outputs_and_gradients(together, *tensors), outputs_and_gradients(apart, *tensors)
    )


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per head"])
def test_a_bias_is_that_of_the_users(shared, activation, implementation, offsets_of):
    """Candidates have none, and reach no gradient of a table, even where one is infinite."""
    users, candidates = [9, 0, 4, 4, 1], [3, 2, 0, 5, 20]
    rows, heads = [sum(users), sum(candidates)], () if shared else (4,)
    q, k, v = make_qkv(sum(rows), rows[0])
    tables = [torch.randn(*heads, n, dtype=torch.float64) for n in (17, 4)]
    times = torch.randint(50, (3, rows[0]))
    fields = dict(timestamps=times[0], query_timestamps=times[1], boundaries=torch.arange(3) * 9)
    fields |= dict(query_shift=torch.tensor([2, 0, -1, 0, 7]))
    offsets, options = offsets_of(users), dict(activation=activation, mask=MASKS["causal"])

    def together(q, k, v, *tables):
        options["bias"] = jm.RelativeBias(*tables, **fields)
        parts = *q.split(rows), k, v, offsets, offsets_of(candidates)
        return torch.cat(F.self_target_attention(*parts, implementation=implementation, **options))

    def apart(q, k, v, *tables):
        own, others = q.split(rows)
        options["bias"] = jm.RelativeBias(*tables, **fields)
        of_users = F.jagged_attention(own, k, v, offsets, **options)
        of_others = offsets_of(candidates), offsets
        return torch.cat(
            [of_users, F.jagged_attention(others, k, v, *of_others, activation=activation)]
        )

    expected = outputs_and_gradients(apart, q, k, v, *tables)
    torch.testing.assert_close(outputs_and_gradients(together, q, k, v, *tables), expected)
    if implementation == "auto":
        q[-1] = float("inf")
        assert all(
            map(torch.equal, outputs_and_gradients(together, q, k, v, *tables)[4:], expected[4:])
        )


@given(data=st.data())
def test_any_users_and_candidates(data, offsets_of):
    segments = data.draw(st.integers(0, 6))
    lengths, candidates = (
        data.draw(st.lists(st.integers(0, 20), min_size=segments, max_size=segments))
        for _ in range(2)
    )
    activation = data.draw(st.sampled_from(["softmax", "silu", "relu"]))
    output_scale = (
        1.0
        if activation == "softmax"
        else data.draw(st.sampled_from([0.25, torch.rand(2 * segments)]))
    )
    mask = MASKS[data.draw(st.sampled_from(list(MASKS)))]
    in_place, rows = data.draw(st.booleans()), [sum(lengths), sum(candidates)]
    users, targets = offsets_of(lengths), offsets_of(candidates)
    options = dict(activation=activation, output_scale=output_scale, mask=mask)

    def operator(q, k, v):
        parts = [x if in_place else x.clone() for x in q.split(rows)]
        outputs = F.self_target_attention(*parts, k, v, users, targets, **options)
        assert [x.shape for x in outputs] == [(n, 4, 5) for n in rows]
        return torch.cat(outputs)

    def bounds(*x):
        return accuracy.attention(*x, torch.cat([users, targets[1:] + rows[0]]), users, **options)

    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    accuracy.check(operator, bounds, dict(zip("qkv", make_qkv(sum(rows), rows[0], dtype))))


@pytest.mark.parametrize("needed", [(0,), (1,), (0, 1), (2,)], ids=str)
def test_gradients_of_some_inputs(needed, offsets_of):
    """q_user and q_candidates may be rows of one buffer, whichever of them needs a gradient."""
    q, k, v = make_qkv(9, 5)
    inputs = [
        x.detach().requires_grad_(i in needed) for i, x in enumerate((*q.split([5, 4]), k, v))
    ]
    (q_user, q_candidates, k, v), users, targets = inputs, offsets_of([2, 3]), offsets_of([3, 1])
    assert joined_rows(q_user, q_candidates).data_ptr() == q_user.data_ptr()
    together = F.self_target_attention(*inputs, users, targets)
    apart = (
        F.jagged_attention(q_user, k, v, users),
        F.jagged_attention(q_candidates, k, v, targets, users),
    )
    leaves = [inputs[i] for i in needed]
    torch.testing.assert_close(
        *(torch.autograd.grad(sum(x.square().sum() for x in y), leaves) for y in (together, apart))
    )


def test_rows_in_one_buffer_are_not_copied():
    packed = torch.randn(9, 3, 2, 4, requires_grad=True)
    for q in (packed[:, 0], packed[:, 1, :, ::2], packed.detach()[:, 2]):
        x, y = q.split([5, 4])
        joined = joined_rows(x, y)
        assert (
            joined.data_ptr() == q.data_ptr()
            and joined.stride() == q.stride()
            and torch.equal(joined, q)
        )
        for other in (
            (y, x),
            (x, y.clone()),
            (x[:4], y),
            (x, y[1:]),
            (x[:, :1], y[:, 1:]),
            (x[:0], y[:0]),
            (q[:1].expand(5, -1, -1), y),
        ):
            joined = joined_rows(*other)
            assert joined.untyped_storage().data_ptr() != q.untyped_storage().data_ptr() or not len(
                joined
            )
            assert torch.equal(joined, torch.cat(other))


def test_results_are_views_of_one_tensor(offsets_of):
    q, k, v = make_qkv(9, 5)
    user, candidates = F.self_target_attention(
        *q.split([5, 4]), k, v, offsets_of([2, 3]), offsets_of([3, 1])
    )
    assert (
        candidates.data_ptr() == user.data_ptr() + user.nbytes
        and user.is_contiguous()
        and candidates.is_contiguous()
    )


def test_offsets_of_two_dtypes(offsets_of):
    q, k, v = make_qkv(9, 5)
    results = (
        F.self_target_attention(
            *q.split([5, 4]), k, v, offsets_of([2, 3], dtype), offsets_of([3, 1])
        )
        for dtype in (torch.int32, torch.int64)
    )
    assert all(map(torch.equal, *results))


GOOD = dict(zip(("q_user", "k", "v"), (torch.randn(5, 2, 8) for _ in range(3)))) | dict(
    q_candidates=torch.randn(4, 2, 8)
)
GOOD |= dict(offsets=torch.tensor([0, 2, 5]), candidate_offsets=torch.tensor([0, 3, 4]))
TIMES = torch.arange(5)
BAD = [
    *raising(
        TypeError,
        {
            "q_user must be a torch.Tensor, got NoneType": dict(q_user=None),
            "offsets must be a torch.Tensor, got list": dict(offsets=[0, 2, 5]),
            "offsets must be a torch.Tensor, got str": dict(offsets="shared"),
            "bias must be a RelativeBias, got Tensor": dict(bias=torch.ones(9)),
        },
    ),
    *raising(
        ValueError,
        {
            r"q_candidates must have shape \[C, H, D\], got \[4, 16\]": dict(
                q_candidates=torch.ones(4, 16)
            ),
            "must have q_user's dtype, torch.float32, got torch.float64": dict(
                q_candidates=GOOD["q_candidates"].double()
            ),
            "q_candidates must have q_user's device, cpu, got meta": dict(
                q_candidates=torch.ones(4, 2, 8, device="meta")
            ),
            "k must have q_user's rows, 5, got 6": dict(
                k=torch.ones(6, 2, 8), v=torch.ones(6, 2, 8)
            ),
            "candidate_offsets must end at the number of rows, 4, got 5": dict(
                candidate_offsets=torch.tensor([0, 3, 5])
            ),
            "must describe the same number of segments, got 2 and 1": dict(
                candidate_offsets=torch.tensor([0, 4])
            ),
            "mask.num_targets must be None with several query groups, got 2 groups": dict(
                mask=jm.AttentionMask(num_targets=torch.tensor([1, 1]))
            ),
            r"output_scale must have shape \[B\] = \[4\], got \[2\]": dict(
                activation="silu", output_scale=torch.ones(2)
            ),
            "bias.position must have one row for each of q_user's 2 heads, got 3": dict(
                bias=jm.RelativeBias(torch.ones(3, 9))
            ),
            "bias.timestamps must have one element for each row of k, 5, got 9": dict(
                bias=jm.RelativeBias(None, torch.ones(4), torch.arange(9))
            ),
        },
    ),
    (
        dict(q_candidates=torch.ones(4, 1, 8)),
        ValueError,
        r"q_candidates must have q_user's heads and head dim, \[2, 8\], got \[1, 8\]",
    ),
    (
        dict(bias=jm.RelativeBias(torch.ones(3))),
        ValueError,
        "^offsets must have segments of at most 2 rows, those of bias.position, got 3",
    ),
    (
        dict(bias=jm.RelativeBias(None, torch.ones(4), TIMES, query_timestamps=torch.arange(9))),
        ValueError,
        "bias.query_timestamps must have one element for each row of q_user, 5, got 9",
    ),
    (
        dict(bias=jm.RelativeBias(torch.ones(9), query_shift=torch.zeros(4).long())),
        ValueError,
        "bias.query_shift must have one element for each segment of q_user, 2, got 4",
    ),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        F.self_target_attention(**(GOOD | change))


def test_autocast_takes_candidates_of_another_dtype():
    q_user, k, v = torch.randn(3, 5, 2, 8)
    q_candidates, offsets = torch.randn(3, 2, 8).bfloat16(), torch.tensor([0, 2, 5])
    at = offsets, torch.tensor([0, 1, 3])
    with torch.autocast("cpu", torch.bfloat16):
        found = F.self_target_attention(q_user, q_candidates, k, v, *at)
    rounded = [x.bfloat16() for x in (q_user, q_candidates, k, v)]
    for x, expected in zip(found, F.self_target_attention(*rounded, *at)):
        assert torch.equal(x, expected)
    with pytest.raises(ValueError, match="q_candidates must have q_user's dtype"):
        F.self_target_attention(q_user, q_candidates, k, v, *at)
