"""The attention kernels on a GPU, through the public functions.

Kernels compile for seconds: what is not about head dims, heads and types runs those of `CASES`,
with four query heads on two key heads. Two parameters that touch different lines of a kernel are
not multiplied: `alternate` pairs them, so that each value meets several of the other.
"""

from functools import partial

import pytest
import torch
from jagged_kernels.attention import select
from jagged_kernels.attention.params import (
    AttentionCall,
    AttentionParams,
    MaskParams,
    Segments,
    TileList,
    pack,
)
from jagged_kernels.attention.select import hopper_is_supported
from space import MASKS
from torch import library

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS
from jagged_modules.schedule import host_schedule

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SELF = [3, 0, 1, 70, 5, 130, 64, 9, 257, 128, 400]
CASES = [
    ((24, 40), torch.float32),
    ((24, 40), torch.bfloat16),
    ((64, 64), torch.float16),
    ((128, 128), torch.bfloat16),
]
DIMS = [
    (8, 8),
    (24, 40),
    (40, 64),
    (64, 64),
    (96, 96),
    (128, 72),
    (128, 128),
    (200, 72),
    (256, 256),
]


def applies(
    kernels="triton",
    dtype=torch.bfloat16,
    dims=None,
    dim=None,
    case=None,
    mask=None,
    shared="none",
    activation="softmax",
    **_,
):
    """Whether the kernels take what a test with such parameters gives them; the others are not
    collected."""
    if kernels == "triton":
        return True
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return False
    if kernels == "hopper-wide" and (mask is not None or shared not in ("none", None)):
        return False
    # longer blocks are masked as short ones are
    causal = jm.AttentionMask(causal=True)
    if kernels == "hopper-long" and mask not in (None, "causal", "hstu", causal):
        return False
    # one 16-bit dtype is enough for the variants
    if kernels != "hopper" and dtype == torch.float16:
        return False
    # and these activations
    if kernels != "hopper" and activation not in ("softmax", "silu", "gelu_tanh"):
        return False
    dims, dtype = case or (dims, dtype)
    dims = (dims, dims) if isinstance(dims, int) else dims
    return hopper_is_supported(*(dims or (dim or 64,) * 2), dtype, (9, 0))


def alternate(number, values):
    return values[number % len(values)]


@pytest.fixture(params=["triton", "hopper", "hopper-long", "hopper-wide"])
def kernels(request, change_selection):
    """Implementations; Hopper's with small tiles, with large tiles and blocks for long segments,
    and with large tiles and wide heads."""
    implementation, *variant = request.param.split("-")
    if variant:
        change_selection("small_tiles_are_faster", lambda *_: (False, False))
    if variant == ["long"]:
        change_selection("long_key_blocks_are_faster", lambda *_: True)
    return implementation


@pytest.fixture
def check_attention(check_attention, kernels, request):
    """With all `kernels`. Default head dims: 24 and 40 for the portable kernels, 64 for Hopper's,
    128 with wide heads."""
    wide = request.node.callspec.params["kernels"] == "hopper-wide"
    default_dims = (24, 40) if kernels == "triton" else (128, 128) if wide else (64, 64)

    def check(lengths, dtype, device, dims=default_dims, tensors=None, **options):
        check_attention(
            lengths, dtype, device, dims=dims, tensors=tensors, kernels=kernels, **options
        )

    return check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(check_attention, dims, dtype):
    check_attention("mixed", dtype, "cuda", dims=dims)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths",
    ["empty-ends", "no-keys", "no-queries", "skewed", "nothing", ([], []), ([3000], [2500])],
    ids=str,
)
def test_lengths(check_attention, lengths, dtype):
    check_attention(lengths, dtype, "cuda", dims=(64, 64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_segments_of_one_key(check_one_key, kernels, dtype):
    check_one_key(dtype, "cuda", 24 if kernels == "triton" else 64, kernels)


@pytest.mark.parametrize("shared", ["q", "kv"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_operands(check_attention, shared, case):
    dims, dtype = case
    check_attention("mixed", dtype, "cuda", shared=shared, dims=dims)


@pytest.mark.parametrize("keys", [64, 128, 192])
@pytest.mark.parametrize("activation", ["softmax", "gelu_tanh"])
@pytest.mark.parametrize("dim", [64, 128])
def test_shared_keys_of_whole_blocks(change_selection, keys, activation, dim):
    """Kernels for them have no code for ends of segments (HopperConfig.whole_blocks), and the bits
    of those that have it."""
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    operands = [make(rows, 2, dim).requires_grad_() for rows in (1000, keys, keys)]
    gradient, results = make(1000, 2, dim), []
    offsets = torch.tensor([0, 300, 300, 1000], device="cuda"), "shared"
    for most in select.WHOLE_BLOCKS, {}:
        change_selection("WHOLE_BLOCKS", most)
        out = F.jagged_attention(*operands, *offsets, activation=activation)
        results.append([out, *torch.autograd.grad(out, operands[:1], gradient)])
    for found, expected in zip(*results):
        assert found.abs().sum() > 0
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("lengths", ["two-groups", "three-groups", "groups-of-one-segment"])
def test_several_query_groups(check_attention, lengths, case):
    (dims, dtype), index = case, CASES.index(case)
    activation, heads = (
        alternate(index, ["softmax", "gelu_tanh"]),
        alternate(index // 2, [(4, 4), (4, 2)]),
    )
    check_attention(lengths, dtype, "cuda", heads=heads, dims=dims, activation=activation)


@pytest.mark.parametrize("dim, activation", [(64, "softmax"), (128, "gelu_tanh")])
@pytest.mark.parametrize("query_groups", [2, 3])
def test_many_segments_of_several_query_groups(check_attention, activation, query_groups, dim):
    """Tiles of keys whose query groups have no, one and many blocks in any order."""
    queries, keys = (
        torch.randint(0, 300, (n,), generator=torch.Generator().manual_seed(n))
        for n in (query_groups * 80, 80)
    )
    queries[::3], keys[::7] = 0, 0
    queries[1::29] = 1500
    output_scale = 1 if activation == "softmax" else torch.rand(len(queries), device="cuda") + 0.1
    options = dict(dims=(dim, dim), activation=activation, output_scale=output_scale)
    check_attention((queries.tolist(), keys.tolist()), torch.bfloat16, "cuda", **options)


MASKS_OF_USERS = (
    None,
    jm.AttentionMask(causal=True),
    jm.AttentionMask(window=(100, 3)),
    jm.AttentionMask(causal=True, contextual_seqlen=3, max_attn_len=90, min_full_attn_seqlen=40),
    jm.AttentionMask(causal=True, window=(70, None), global_prefix=20, recent_history=200),
)


@pytest.mark.parametrize("mask", MASKS_OF_USERS, ids=range(len(MASKS_OF_USERS)))
@pytest.mark.parametrize("activation", ["softmax", "gelu_tanh"])
@pytest.mark.parametrize(
    "case",
    [(24, torch.float32), (64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)],
    ids=str,
)
def test_user_rows_and_candidates_together(
    check_self_target_attention, kernels, case, activation, mask
):
    (dim, dtype), lengths, candidates = case, SELF, [200, 3, 0, 5, 0, 1, 129, 64, 65, 17, 300]
    options = dict(dim=dim, kernels=kernels, activation=activation, mask=mask)
    check_self_target_attention(lengths, candidates, dtype, "cuda", **options)


# the next two tests compile these kernels once
TWO_QUERY_GROUPS = pytest.mark.parametrize("dim, activation", [(64, "softmax"), (128, "silu")])


@TWO_QUERY_GROUPS
def test_runs_and_schedules_of_several_query_groups_agree_bit_for_bit(
    offsets, kernels, activation, dim
):
    queries, keys = (
        torch.randint(0, 400, (n,), generator=torch.Generator().manual_seed(5)) for n in (64, 32)
    )
    q, k, v = (
        torch.randn(int(n.sum()), h, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n, h in ((queries, 4), (keys, 2), (keys, 2))
    )
    schedule = host_schedule(
        queries, keys, num_heads=4, num_kv_heads=2, head_dim=dim, dtype=torch.bfloat16
    )
    segments, grad, runs = (
        [offsets(x.tolist(), "cuda") for x in (queries, keys)],
        torch.randn_like(q),
        [],
    )
    for option in (schedule, None, None):
        out = F.jagged_attention(
            q, k, v, *segments, activation=activation, schedule=option, implementation=kernels
        )
        runs.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


@TWO_QUERY_GROUPS
def test_nan_in_a_query_group_reaches_the_keys_that_it_reads(offsets, kernels, dim, activation):
    queries, keys = offsets([70, 100, 130, 50, 90, 65], "cuda"), offsets([40, 129, 64], "cuda")
    rows_and_heads = (505, 4), (233, 2), (233, 2)
    q, k, v = (
        torch.randn(n, h, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n, h in rows_and_heads
    )
    with torch.no_grad():
        q[350:440] = float("nan")
    out = F.jagged_attention(q, k, v, queries, keys, activation=activation, implementation=kernels)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    for x, first, end in ((out, 350, 440), (dq, 350, 440), (dk, 40, 169), (dv, 40, 169)):
        assert (
            x[:first].isfinite().all() and x[first:end].isnan().all() and x[end:].isfinite().all()
        )


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (8, 1), (6, 3)], ids=str)
def test_heads(check_attention, heads):
    check_attention(
        "mixed", torch.bfloat16, "cuda", heads=heads, dims=(128, 128) if heads[0] == 6 else (40, 40)
    )


def test_empty_shared_operands(check_empty_shared_operands, kernels):
    check_empty_shared_operands("cuda", 64, torch.bfloat16, kernels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_delta(check_delta, dtype):
    check_delta(dtype, "cuda")


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_scale(check_attention, scale):
    check_attention("mixed", torch.float16, "cuda", scale=scale)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations(check_attention, activation):
    """In bf16, which has its own functions. test_cells_gpu.py has all dtypes."""
    dims = alternate(ACTIVATIONS.index(activation), [(64, 64), (128, 128)])
    check_attention(
        "mixed",
        torch.bfloat16,
        "cuda",
        dims=dims,
        activation=activation,
        scale=0.3,
        output_scale=0.02,
    )


@pytest.mark.parametrize(
    "case, mask",
    [(alternate(i + j, CASES), mask) for i, mask in enumerate(MASKS) for j in (0, 2)],
    ids=str,
)
@pytest.mark.parametrize("lengths", ["self", "mixed"])
def test_masks(check_attention, lengths, mask, case):
    """Each with two of the cases; test_cells_gpu.py has other pairs."""
    (dims, dtype), activation = case, alternate(list(MASKS).index(mask) // 2, ["softmax", "silu"])
    check_attention(
        (SELF, SELF) if lengths == "self" else lengths,
        dtype,
        "cuda",
        activation=activation,
        mask=mask,
        dims=dims,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_very_negative_scores_under_a_mask(check_very_negative_scores, case):
    dims, dtype = case
    check_very_negative_scores(dtype, "cuda", dims)


@pytest.mark.parametrize("mask", ["hstu"])
@pytest.mark.parametrize("activation", ACTIVATIONS[1::2])
def test_activations_under_a_mask(check_attention, activation, mask):
    dims = alternate(ACTIVATIONS.index(activation) // 2, [(128, 128), (64, 64)])
    check_attention(
        (SELF, SELF),
        torch.bfloat16,
        "cuda",
        dims=dims,
        activation=activation,
        mask=mask,
        scale=0.3,
        output_scale=0.02,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", ["q", "kv"])
@pytest.mark.parametrize("activation", ["gelu_tanh", "sigmoid"])
def test_shared_operands_with_pointwise_activations(check_attention, activation, shared, dtype):
    output_scale = torch.rand(11, device="cuda") + 0.1
    check_attention(
        "mixed", dtype, "cuda", shared=shared, activation=activation, output_scale=output_scale
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", ["none", "q", "kv", "groups"])
def test_scales_with_a_gradient(check_scales_with_a_gradient, kernels, shared, dtype):
    check_scales_with_a_gradient(shared, dtype, "cuda", kernels, repeats=16)


@pytest.mark.parametrize("dims", [(8, 8), (96, 96), (200, 72), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_pointwise_head_dims(check_attention, kernels, dtype, dims):
    mask = (
        None
        if kernels == "hopper"
        else alternate(dims[0] // 8 + DTYPES.index(dtype), [None, "hstu"])
    )
    check_attention(
        (SELF, SELF), dtype, "cuda", dims=dims, activation="silu", mask=mask, output_scale=0.05
    )


@pytest.mark.parametrize("dim", [20, 64], ids=["unaligned", "aligned"])
def test_packed_views_and_gradients_of_any_stride(check_attention, dim):
    lengths = [50, 30, 200], [50, 30, 200]
    packed = torch.randn(280, 3, 2, dim, device="cuda", dtype=torch.bfloat16)
    for grad in (
        lambda out: torch.ones((), dtype=out.dtype, device="cuda").expand_as(out),
        lambda out: torch.randn(1, *out.shape[1:], dtype=out.dtype, device="cuda").expand_as(out),
        lambda out: torch.randn(out.shape[::-1], dtype=out.dtype, device="cuda").permute(2, 1, 0),
        lambda out: torch.randn(*out.shape[:2], 2 * out.shape[2], dtype=out.dtype, device="cuda")[
            ..., ::2
        ],
    ):
        check_attention(lengths, torch.bfloat16, "cuda", tensors=packed.unbind(1), grad=grad)


def test_one_row_and_one_head_of_odd_stride(check_attention):
    """A dimension of size 1 may have any stride."""
    q = torch.randn(1, 193, device="cuda", dtype=torch.bfloat16)[:, None, :64]
    k, v = (
        torch.randn(3, 64, device="cuda", dtype=torch.bfloat16).as_strided((3, 1, 64), (64, 7, 1))
        for _ in range(2)
    )
    check_attention(([1], [3]), torch.bfloat16, "cuda", tensors=[q, k, v])


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("mask", [None, jm.AttentionMask(causal=True)], ids=["", "causal"])
@pytest.mark.parametrize("dims", [(24, 40), (64, 64), (128, 128)], ids=str)
def test_a_neighbours_nan_stays_where_it_is(offsets, kernels, dims, mask, activation):
    shapes = (4, dims[0]), (2, dims[0]), (2, dims[1])
    q, k, v = (torch.randn(300, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    for x in (q, k, v):
        x[:70], x[170:] = float("nan"), float("nan")
        x.requires_grad_()
    out = F.jagged_attention(
        q,
        k,
        v,
        offsets([70, 100, 130], "cuda"),
        activation=activation,
        mask=mask,
        implementation=kernels,
    )
    grad = torch.randn_like(out)
    grad[:70], grad[170:] = float("nan"), float("nan")
    for x in (out, *torch.autograd.grad(out, (q, k, v), grad)):
        assert x[70:170].isfinite().all() and x[:70].isnan().all() and x[170:].isnan().all()


@pytest.mark.large_memory
def test_more_than_two_to_the_31_elements(offsets, kernels):
    rows, heads, dim = 2**31 // 512 + 1000, 4, 128
    q = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    segments = offsets([rows - 700, 700], "cuda")
    tail = q[rows - 700 :]
    lengths = offsets([0, 700], "cuda")
    out = F.jagged_attention(tail, q, q, lengths, segments, implementation=kernels)
    expected = F.jagged_attention(
        tail.float(), tail.float(), tail.float(), offsets([700], "cuda"), implementation="reference"
    )
    assert ((out.float() - expected).norm() / expected.norm()).item() < 5e-3


@pytest.mark.parametrize("activation", ["softmax", "gelu_tanh", "silu"])
@pytest.mark.parametrize("mask", [None, jm.AttentionMask(causal=True)], ids=["", "causal"])
def test_twenty_runs_agree_bit_for_bit(offsets, kernels, activation, mask):
    lengths = torch.randint(0, 400, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    q, k, v = (
        torch.randn(sum(lengths), h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (4, 2, 2)
    )
    grad = torch.randn_like(q)
    runs = []
    for _ in range(20):
        out = F.jagged_attention(
            q,
            k,
            v,
            offsets(lengths, "cuda"),
            activation=activation,
            mask=mask,
            implementation=kernels,
        )
        runs.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


@pytest.mark.parametrize("dim, activation", [(64, "softmax"), (128, "silu")])
@pytest.mark.parametrize("kernels", ["triton", "hopper"], indirect=True)
def test_twenty_runs_with_a_bias_agree_bit_for_bit(offsets, kernels, dim, activation):
    lengths = torch.randint(0, 400, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    q, k, v = (
        torch.randn(sum(lengths), 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    tables = [torch.randn(shape, device="cuda", requires_grad=True) for shape in ((799,), (4, 9))]
    times, grad, runs = torch.randint(10_000, (len(q),), device="cuda"), torch.randn_like(q), []
    for _ in range(20):
        bias, mask = jm.RelativeBias(*tables, times), jm.AttentionMask(causal=True)
        out = F.jagged_attention(
            q,
            k,
            v,
            offsets(lengths, "cuda"),
            activation=activation,
            mask=mask,
            bias=bias,
            implementation=kernels,
        )
        runs.append((out, *torch.autograd.grad(out, (q, k, v, *tables), grad)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


@pytest.mark.parametrize("dim", [64, 128, 156])
def test_sums_of_positions_stay_in_memory(check_sums_stay_in_memory, kernels, dim):
    if kernels == "hopper" and dim > 128:
        pytest.skip("no Hopper kernel for this head dim")
    check_sums_stay_in_memory("cuda", torch.bfloat16, 2, dim, kernels)


# entries of Hopper's kernels serve the first and the second, its other paths the others
BOUNDARIES = {
    "log": jm.RelativeBias.log_boundaries(71),
    "duplicates": torch.tensor([3, 3, 3, 100, 100, 5000, 2**20, 2**20]),
    "dense": 1000 + 36 * torch.arange(128),
    "far": torch.tensor([1, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**33, 2**45]),
}


@pytest.mark.parametrize("order", ["sorted", "mixed"])
@pytest.mark.parametrize(
    "boundaries, dim", list(zip(BOUNDARIES.values(), [64, 128] * 2)), ids=BOUNDARIES
)
@pytest.mark.parametrize("stored", [False, True], ids=["", "stored"])
@pytest.mark.parametrize("kernels", ["triton", "hopper"], indirect=True)
def test_buckets_are_exact_at_all_boundaries(offsets, kernels, boundaries, dim, order, stored):
    """Each result is the bias alone, and the table's gradient the number of scores in each bucket:
    integers that bf16 and fp32 hold. stored: with a schedule of known lengths."""
    if stored and kernels == "triton":
        pytest.skip("only Hopper's kernels read stored buckets")
    distances = torch.cat(
        [boundaries - 1, boundaries, boundaries + 1, torch.tensor([0, 1, 7])]
    ).repeat(3)
    distances = torch.cat([distances, -distances])
    distances = (
        distances.sort().values if order == "sorted" else distances[torch.randperm(len(distances))]
    )
    buckets = (boundaries[:, None] <= distances.abs()).sum(0)
    # three keys, and a query row sees one of them: that of its segment
    origin = torch.tensor([-(2**40), 10**9, 77])
    table = torch.arange(len(boundaries) + 1.0, device="cuda", requires_grad=True)
    bias = jm.RelativeBias(
        time=table,
        timestamps=origin.cuda(),
        query_timestamps=(origin[:, None] + distances).flatten().cuda(),
        boundaries=boundaries.cuda(),
    )
    q, k, v = (
        torch.zeros(n, 1, dim, device="cuda", dtype=torch.bfloat16)
        for n in (3 * len(distances), 3, 3)
    )
    v[..., 0] = 1
    lengths = [len(distances)] * 3, [1, 1, 1]
    sizes = dict(num_heads=1, num_kv_heads=1, head_dim=dim, dtype=q.dtype)
    schedule = host_schedule(*map(torch.tensor, lengths), **sizes) if stored else None
    out = F.jagged_attention(
        q,
        k.requires_grad_(),
        v,
        *(offsets(x, "cuda") for x in lengths),
        activation="identity",
        scale=1.0,
        bias=bias,
        schedule=schedule,
        implementation=kernels,
    )
    assert torch.equal(out[:, 0, 0].cpu().long(), buckets.repeat(3))
    counts, _ = torch.autograd.grad(out[..., 0].sum(), (table, k))
    assert torch.equal(counts.cpu().long(), 3 * buckets.bincount(minlength=len(table)))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kernels", ["triton", "hopper"], indirect=True)
def test_a_time_bias_of_long_segments(offsets, kernels, dim):
    """Hopper's kernels find the ranges of buckets of 16 blocks of 64 rows at a time."""
    lengths = [2500, 70, 1100]
    q, k, v, grad = (
        torch.randn(sum(lengths), 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    times = torch.randn(sum(lengths), device="cuda").mul(2).exp().mul(400).long().cumsum(0)
    inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(65, device="cuda"))]
    results = []
    for dtype, implementation in ((torch.bfloat16, kernels), (torch.float64, "reference")):
        *rows, table = given = [
            x.to(dtype if x.dim() == 3 else torch.promote_types(dtype, torch.float32))
            for x in inputs
        ]
        bias, mask = jm.RelativeBias(time=table, timestamps=times), jm.AttentionMask(causal=True)
        segments = offsets(lengths, "cuda")
        out = F.jagged_attention(
            *rows,
            segments,
            activation="silu",
            output_scale=1 / 2500,
            mask=mask,
            bias=bias,
            implementation=implementation,
        )
        results.append((out, *torch.autograd.grad(out, given, grad.to(dtype))))
    for result, expected in zip(*results):
        assert ((result - expected).norm() / expected.norm()).item() < 1e-2


def test_host_and_device_schedules_agree_bit_for_bit(offsets, kernels):
    lengths = torch.randint(0, 400, (64,), generator=torch.Generator().manual_seed(2))
    q, k, v = (
        torch.randn(
            int(lengths.sum()), 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(3)
    )
    segments = offsets(lengths.tolist(), "cuda")
    schedule = host_schedule(
        lengths, lengths, num_heads=4, num_kv_heads=4, head_dim=64, dtype=torch.bfloat16
    )
    results = []
    for option in (schedule, None):
        out = F.jagged_attention(q, k, v, segments, schedule=option, implementation=kernels)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("block_m", [16, 64, 128, 192])
def test_a_users_own_schedule(check_attention, block_m):
    lengths = [3, 200, 65], [70, 4, 129]
    for dims in ((64, 64), (128, 128)):
        schedule = jm.zigzag_schedule(*lengths, num_heads=4, block_m=block_m, block_n=64)
        check_attention(lengths, torch.bfloat16, "cuda", dims=dims, schedule=schedule)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("activation", ["softmax", "gelu_tanh"])
def test_tiles_of_one_block_and_of_many(check_attention, activation, dim):
    """A thread block's rings serve tiles of no, one and many blocks in any order."""
    lengths = torch.randint(0, 300, (2, 160), generator=torch.Generator().manual_seed(3))
    lengths[1, ::3] = 0
    lengths[1, 1::7] = torch.randint(
        1, 2000, (len(lengths[1, 1::7]),), generator=torch.Generator().manual_seed(4)
    )
    check_attention(
        lengths.tolist(), torch.bfloat16, "cuda", dims=(dim, dim), activation=activation
    )


def test_cuda_graph_with_new_lengths(check_cuda_graph, kernels):
    check_cuda_graph(partial(F.jagged_attention, implementation=kernels))


@pytest.mark.parametrize(
    "activation, mask",
    [("softmax", None), ("silu", [1, -1, -1, 1, 1, 2, 50, 0])],
    ids=["softmax", "silu-hstu"],
)
def test_operators_pass_opcheck(offsets, kernels, activation, mask):
    from jagged_kernels.attention.op import triton_attention
    from jagged_kernels.attention.tile_lists import Lists, TiledSide, list_tiles, tile_lists

    segments = offsets([70, 100, 130], "cuda")
    q, k, v = (
        torch.randn(300, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    targets = None if mask is None else torch.tensor([5, 0, 130], device="cuda")
    queries, keys = TiledSide(300, 4, 128), TiledSide(300, 4, 64)
    library.opcheck(
        tile_lists, (segments, segments, list(queries), list(keys), [True, True], mask, targets)
    )
    tiles, key_tiles = list_tiles(
        (segments, segments), queries, keys, Lists(True, True), mask, targets
    )
    rule = mask and MaskParams(*mask)
    params = AttentionParams(
        0.125, activation, rule, 0.5, implementation=kernels, num_targets=targets
    )
    call = AttentionCall(q, k, v, Segments(segments, segments), params)
    library.opcheck(triton_attention, pack(call, TileList(*tiles, 128), TileList(*key_tiles, 64)))


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("kernels", ["triton", "hopper"], indirect=True)
def test_operators_with_a_bias_pass_opcheck(offsets, kernels, activation):
    from jagged_kernels.attention.op import triton_attention, triton_attention_backward
    from jagged_kernels.attention.tile_lists import Lists, TiledSide, list_tiles

    segments = offsets([70, 100, 130], "cuda")
    q, k, v = (
        torch.randn(300, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    position, time = (
        torch.randn(1, 299, device="cuda", requires_grad=True),
        torch.randn(4, 4, device="cuda", requires_grad=True),
    )
    fields = dict(
        timestamps=torch.randint(50, (300,), device="cuda"),
        boundaries=torch.tensor([1, 5, 20], device="cuda"),
    )
    fields |= dict(position_bias=position, time_bias=time)
    params = AttentionParams(
        0.125, activation, implementation=kernels, table_gradients=True, **fields
    )
    tiles, key_tiles = list_tiles(
        (segments, segments), TiledSide(300, 4, 128), TiledSide(300, 4, 64), Lists(True, True)
    )
    call = AttentionCall(q, k, v, Segments(segments, segments), params)
    arguments = pack(call, TileList(*tiles, 128), TileList(*key_tiles, 64))
    library.opcheck(triton_attention, arguments)
    results = list(triton_attention(*arguments))
    detached = arguments._replace(
        **{name: getattr(arguments, name).detach() for name in "qkv"},
        bias=[x if x is None else x.detach() for x in arguments.bias],
    )
    backward = torch.randn_like(q), [x.detach() for x in results], *detached
    library.opcheck(triton_attention_backward, backward)


def test_several_streams_at_once(offsets, kernels):
    segments = offsets([700, 0, 1300], "cuda")
    q, k, v = (torch.randn(2000, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = F.jagged_attention(q, k, v, segments, implementation=kernels)
    torch.cuda.synchronize()
    streams, outputs = [torch.cuda.Stream() for _ in range(4)], []
    for stream in streams:
        with torch.cuda.stream(stream):
            outputs.append(
                [F.jagged_attention(q, k, v, segments, implementation=kernels) for _ in range(5)]
            )
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for outs in outputs for out in outs)
