"""RelativeBias on the CPU: results, gradients of the tables, buckets, errors."""

import dataclasses
import itertools
import pickle
from fractions import Fraction
from math import ceil, factorial, floor

import pytest
import torch
from calls import check
from cases import legal, simplest_case, with_random_data
from marks import raising, slow_after
from space import BIASES, MASKS
from torch.nn.functional import pad, scaled_dot_product_attention

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS

from .attention_cases import make_qkv

LARGEST = 2**63 - 1
LENGTHS = [[3, 0, 1, 70, 40], [3, 4, 0, 90, 40]]


def check_case(lengths=LENGTHS, dtype="float32", device="cpu", **options):
    """Results and every gradient by the accuracy rule."""
    case = simplest_case(
        "jagged_attention",
        device,
        dtype,
        **dict(heads=[4, 2], head_dim=20, operands="cross") | options,
    )
    check(legal(dataclasses.replace(case, lengths=[list(x) for x in lengths], seed=1)))


@slow_after(2, "dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tables", ["shared", "per head", "in the operands' dtype"])
@pytest.mark.parametrize("bias", BIASES)
def test_tables(bias, tables, dtype):
    for activation in ("softmax", "silu"):
        check_case(
            bias=bias,
            tables=tables,
            dtype=dtype,
            activation=activation,
            query_times=tables == "per head",
        )


@slow_after(2, "mask", [None, *MASKS])
@pytest.mark.parametrize("bias", BIASES)
def test_query_groups(bias, mask):
    options = dict(query_times=mask is None, query_shift=mask is None, buckets=7, tables="per head")
    options |= dict(bias=bias, mask=mask, operands="3 groups")
    check_case([[3, 0, 1, 70], [5, 4, 90, 1], [0, 3, 1, 1], [3, 4, 0, 80]], **options)


@slow_after(3, "activation", ACTIVATIONS)
@pytest.mark.parametrize("query_shift", [False, True], ids=["", "shifted"])
def test_activations(activation, query_shift):
    scale = 1 if activation == "softmax" else "tensor with gradient"
    check_case(
        bias="both", activation=activation, query_shift=query_shift, output_scale=scale, buckets=128
    )


@slow_after(3, "mask", MASKS)
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_masks(mask, activation):
    check_case(
        bias="both", mask=mask, activation=activation, tables="per head", timestamps="unsorted"
    )


@pytest.mark.parametrize("timestamps", ["sorted", "unsorted", "equal", "huge", "far apart"])
@slow_after(2, "buckets", [7, 300, 0, 1, 128])
@pytest.mark.parametrize("boundaries", ["default", "explicit", "duplicates"])
def test_timestamps(timestamps, buckets, boundaries):
    check_case(
        bias="time",
        timestamps=timestamps,
        buckets=buckets,
        boundaries=boundaries,
        query_times=buckets % 2 == 0,
    )


@pytest.mark.parametrize("mask", [None, "targets"])
def test_equal_segments_that_are_not_adjacent(mask):
    """The CPU computes segments of equal lengths together, with their timestamps of keys and of
    queries, shifts and numbers of targets."""
    lengths = [[2, 3, 2, 3, 2, 3], [5, 4, 5, 4, 5, 4]]
    check_case(
        lengths, bias="both", mask=mask, timestamps="unsorted", query_times=True, query_shift=True
    )


@slow_after(2, "seed", range(40))
def test_random_options(seed):
    case = simplest_case(
        "jagged_attention", "cpu", "float32", bias="both", heads=[2, 1], head_dim=9
    )
    check(with_random_data(case, seed))


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["softmax", "silu", "identity"])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per-head"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_gradcheck(masked, per_head, activation, offsets_of):
    inputs = make_qkv(6, 8, heads=2, kv_heads=1, dim=3, v_dim=2, dtype=torch.float64)
    inputs += [torch.randn((2, n) if per_head else n, dtype=torch.float64) for n in (11, 4)]
    fields = dict(
        timestamps=torch.randint(40, (8,)),
        boundaries=torch.tensor([0, 3, 20]),
        query_shift=torch.tensor([0, 2, -1]),
    )
    mask = jm.AttentionMask(causal=True) if masked else None

    def attend(q, k, v, position, time):
        bias = jm.RelativeBias(position, time, **fields)
        return F.jagged_attention(
            q,
            k,
            v,
            offsets_of([3, 0, 3]),
            offsets_of([4, 1, 3]),
            activation=activation,
            mask=mask,
            bias=bias,
        )

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("needed", [(3,), (4,), (0, 4), (1, 3), (3, 4)], ids=str)
def test_gradients_of_some_inputs(needed, offsets_of):
    tensors = [
        *make_qkv(7, 7, dtype=torch.float64),
        torch.randn(13, dtype=torch.float64),
        torch.randn(2, 4, dtype=torch.float64),
    ]
    times, grad = torch.randint(40, (7,)), torch.randn(7, 2, 8, dtype=torch.float64)

    def gradients(implementation):
        inputs = [x.clone().requires_grad_(i in needed) for i, x in enumerate(tensors)]
        bias = jm.RelativeBias(*inputs[3:], times)
        F.jagged_attention(
            *inputs[:3], offsets_of([4, 3]), bias=bias, implementation=implementation
        ).backward(grad)
        return [x.grad for x in inputs if x.requires_grad]

    torch.testing.assert_close(gradients("auto"), gradients("reference"))


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("lengths", [([], []), ([0], [3]), ([2, 0], [0, 0])], ids=str)
def test_segments_without_scores(lengths, implementation, offsets_of):
    """The gradients of the tables are zeros."""
    q, k, v = make_qkv(*map(sum, lengths))
    tables = torch.randn(11, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    bias = jm.RelativeBias(
        *tables, torch.arange(len(k)), query_shift=torch.zeros(len(lengths[0]), dtype=torch.int64)
    )
    out = F.jagged_attention(
        q, k, v, *map(offsets_of, lengths), bias=bias, implementation=implementation
    )
    for table, gradient in zip(tables, torch.autograd.grad(out.sum(), tables)):
        assert gradient.shape == table.shape and not gradient.any()


def test_runs_agree_bit_for_bit(offsets_of):
    q, k, v = make_qkv(60, 60)
    tables = (torch.randn(81).requires_grad_(), torch.randn(2, 9).requires_grad_())
    grad = torch.randn_like(q)
    runs = []
    for _ in range(5):
        out = F.jagged_attention(
            q, k, v, offsets_of([20, 40]), bias=jm.RelativeBias(*tables, torch.arange(60))
        )
        runs.append((out, *torch.autograd.grad(out, tables, grad)))
    assert all(torch.equal(x, y) for run in runs for x, y in zip(run, runs[0]))


# -- special tables --------------------------------------------------------------------------------


def dense(q, k, v, lengths, bias_of, causal):
    """Padded attention of each segment to itself; bias_of: length → `[H, N, N]`."""
    outputs = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v))):
        n = len(parts[0])
        bias = bias_of(n).masked_fill(
            ~torch.ones(n, n, dtype=torch.bool).tril() & causal, float("-inf")
        )
        outputs.append(
            scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in parts), attn_mask=bias
            ).transpose(0, 1)
        )
    return torch.cat(outputs)


def t5_buckets(distance, num_buckets=32, max_distance=128):
    """Buckets of j - i, both directions: half are exact, the others grow by a factor (Raffel et al.
    2020, arXiv:1910.10683)."""
    half, ahead = num_buckets // 2, (distance > 0).long() * (num_buckets // 2)
    d, exact = distance.abs(), num_buckets // 4
    log = (
        exact
        + (
            torch.log(d.clamp(min=1) / exact)
            / torch.log(torch.tensor(max_distance / exact))
            * (half - exact)
        ).long()
    )
    return ahead + torch.where(d < exact, d, log.clamp(max=half - 1))


@pytest.mark.parametrize("kind", ["alibi", "t5"])
def test_alibi_and_t5(kind, offsets_of):
    longest, lengths, heads = 150, [3, 150, 40], 4
    q, k, v = make_qkv(sum(lengths), sum(lengths), heads=heads, dtype=torch.float64)
    distances = torch.arange(1 - longest, longest)
    if kind == "alibi":
        slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64)
        table = -slopes[:, None] * distances.abs()
        of_distance = lambda d: -slopes[:, None, None] * d.abs()
    else:
        weights = torch.randn(32, heads, dtype=torch.float64)
        table = weights[t5_buckets(distances)].T
        of_distance = lambda d: weights[t5_buckets(d)].permute(2, 0, 1)
    out = F.jagged_attention(
        q,
        k,
        v,
        offsets_of(lengths),
        mask=jm.AttentionMask(causal=kind == "alibi"),
        bias=jm.RelativeBias(table),
    )
    expected = dense(
        q,
        k,
        v,
        lengths,
        lambda n: of_distance(torch.arange(n) - torch.arange(n)[:, None]),
        kind == "alibi",
    )
    torch.testing.assert_close(out, expected)


def test_queries_after_cached_keys(offsets_of):
    """Queries that are not among the keys: as the last rows of attention to keys and themselves
    that they do not see."""
    q, k, v = make_qkv(12, 12)
    times, asked = torch.randint(100, (12,)), torch.randint(100, (12,))
    tables = torch.randn(2, 23), torch.randn(2, 5)
    mask = jm.AttentionMask(num_targets=torch.tensor([2, 3]), causal=True)
    whole = jm.RelativeBias(*tables, times, query_timestamps=asked)
    out = F.jagged_attention(q, k, v, offsets_of([5, 7]), bias=whole, mask=mask, activation="silu")
    cached, targets = torch.tensor([0, 1, 2, 5, 6, 7, 8]), torch.tensor([3, 4, 9, 10, 11])
    shifted = dict(query_timestamps=asked[targets], query_shift=torch.tensor([2, 3]))
    bias = jm.RelativeBias(*tables, times[cached], **shifted)
    found = F.jagged_attention(
        q[targets],
        k[cached],
        v[cached],
        offsets_of([2, 3]),
        offsets_of([3, 4]),
        bias=bias,
        activation="silu",
    )
    own = torch.nn.functional.silu(
        (q[targets] * k[targets]).sum(-1) * 8**-0.5
        + of_self(tables, asked[targets] - times[targets])
    )
    torch.testing.assert_close(found + own[..., None] * v[targets], out[targets])


def of_self(tables, distances):
    position, time = tables
    buckets = torch.bucketize(distances.abs(), jm.RelativeBias.log_boundaries(4), right=True)
    return position[:, 11] + time[:, buckets].T


# -- segments longer than the position table -------------------------------------------------------


def test_longer_segments_are_refused_on_the_host(offsets_of):
    q, k, v = make_qkv(9, 9)
    bias = jm.RelativeBias(torch.zeros(9))
    with pytest.raises(
        ValueError,
        match="q_offsets must have segments of at most 5 rows, those of bias.position, got 6",
    ):
        F.jagged_attention(q, k, v, offsets_of([3, 6]), bias=bias)
    with pytest.raises(
        ValueError,
        match="kv_offsets must have segments of at most 5 rows, those of bias.position, got 7",
    ):
        F.jagged_attention(q, k, v, offsets_of([5, 4]), offsets_of([7, 2]), bias=bias)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_distances_beyond_the_table_count_as_its_last(implementation, monkeypatch, offsets_of):
    """Where the values of offsets are not read."""
    monkeypatch.setattr(
        "jagged_modules.functional.attention_bias.values_are_checkable", lambda x: False
    )
    q, k, v = (x.requires_grad_() for x in make_qkv(30, 30))
    results = []
    table = torch.randn(2, 2 * 7 - 1)
    for wide in (False, True):
        leaf = table.clone().requires_grad_()
        bias = jm.RelativeBias(pad(leaf, (20, 20), mode="replicate") if wide else leaf)
        out = F.jagged_attention(
            q, k, v, offsets_of([25, 5]), bias=bias, implementation=implementation
        )
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, leaf))])
    torch.testing.assert_close(*results)


# -- buckets ---------------------------------------------------------------------------------------


def powers_of_e(exponent, count, bits=400):
    """(lower, upper) bounds of e^(exponent · k) for k = 1, ..., count, as exact fractions."""
    below = sum((exponent**n / factorial(n) for n in range(80)), Fraction(0))
    above = below + 2 * exponent**80 / factorial(80)
    below = Fraction(floor(below * 2**bits), 2**bits)
    above = Fraction(ceil(above * 2**bits), 2**bits)
    return [(below**k, above**k) for k in range(1, count + 1)]


def test_log_boundaries_are_the_least_integers_of_their_buckets():
    boundaries = jm.RelativeBias.log_boundaries(150).tolist()
    for boundary, (below, above) in zip(
        boundaries, powers_of_e(Fraction(301, 1000), 150), strict=True
    ):
        assert ceil(below) == ceil(above), "the bounds are too far apart"
        assert boundary == min(ceil(below), LARGEST)
    assert boundaries[:6] == [2, 2, 3, 4, 5, 7] and boundaries[144] < LARGEST == boundaries[145]
    assert jm.RelativeBias.log_boundaries(0).shape == (0,)
    assert torch.equal(
        jm.RelativeBias.log_boundaries(300)[:150], jm.RelativeBias.log_boundaries(150)
    )


def edges_of(boundaries):
    """Distances at, below and above every boundary, of both signs, in random order."""
    distances = torch.cat(
        [
            boundaries - 1,
            boundaries,
            boundaries.clamp(max=LARGEST - 1) + 1,
            torch.tensor([0, 1, 2**40]),
        ]
    ).clamp(min=0)
    distances = torch.cat([distances, -distances])
    return distances[torch.randperm(len(distances))]


@pytest.mark.parametrize("origin", [0, -(2**40), 10**9])
@pytest.mark.parametrize("boundaries", ["log", "random", "duplicates", "none"])
def test_edges_of_buckets(boundaries, origin, offsets_of):
    """One key, whose result is the bias alone, and the gradient of the table: the number of scores
    in each bucket. All are integers."""
    sizes = dict(random=(2**50, 40), duplicates=(20, 40), none=(1, 0))
    given = (
        None
        if boundaries == "log"
        else torch.randint(sizes[boundaries][0], sizes[boundaries][1:]).sort().values
    )
    edges = jm.RelativeBias.log_boundaries(128) if given is None else given
    distances = edges_of(edges)
    expected = (edges[:, None] <= distances.abs()).sum(0)
    table = torch.arange(len(edges) + 1.0, requires_grad=True)
    bias = dict(
        timestamps=torch.tensor([origin]), query_timestamps=distances + origin, boundaries=given
    )
    q, k, v = torch.zeros(len(distances), 1, 8), torch.zeros(1, 1, 8), torch.ones(1, 1, 1)
    for implementation in ("auto", "reference"):
        attention = dict(
            activation="identity",
            scale=1.0,
            bias=jm.RelativeBias(time=table, **bias),
            implementation=implementation,
        )
        out = F.jagged_attention(
            q, k, v, offsets_of([len(distances)]), offsets_of([1]), **attention
        )
        assert torch.equal(out.flatten().long(), expected)
        (counts,) = torch.autograd.grad(out.sum(), table)
        assert torch.equal(counts.long(), expected.bincount(minlength=len(table)))


# -- the object, and errors ------------------------------------------------------------------------


def test_without_a_bias_nothing_changes(offsets_of):
    q, k, v = make_qkv(9, 9)
    assert torch.equal(
        F.jagged_attention(q, k, v, offsets_of([5, 4]), bias=None),
        F.jagged_attention(q, k, v, offsets_of([5, 4])),
    )


def test_boundaries_are_made_on_demand():
    bias = jm.RelativeBias(time=torch.zeros(2, 5), timestamps=torch.arange(3))
    assert bias.boundaries is None and torch.equal(
        bias.with_boundaries().boundaries, jm.RelativeBias.log_boundaries(4)
    )
    only = jm.RelativeBias(position=torch.zeros(7))
    assert only.with_boundaries() is only and only.max_seqlen == 4 and bias.max_seqlen is None
    assert repr(bias) == "RelativeBias(time=[2, 5], timestamps=[3])"
    again = pickle.loads(pickle.dumps(bias))
    assert torch.equal(again.time, bias.time) and again.boundaries is None


POSITION, TIME, TIMES = torch.zeros(9), torch.zeros(4), torch.arange(6)
TIMED = dict(time=TIME, timestamps=TIMES)
BAD_FIELDS = [
    *raising(
        ValueError,
        {
            "^position or time must be given, got None for both": {},
            r"position must have shape \[2N - 1\] or \[H, 2N - 1\], got \[8\]": dict(
                position=torch.zeros(8)
            ),
            r"position must have shape \[2N - 1\] or \[H, 2N - 1\], got \[0\]": dict(
                position=torch.zeros(0)
            ),
            r"position must have shape \[2N - 1\] or \[H, 2N - 1\], got \[2, 2, 9\]": dict(
                position=torch.zeros(2, 2, 9)
            ),
            r"position must have shape \[2N - 1\] or \[H, 2N - 1\], got \[\]": dict(
                position=torch.zeros(())
            ),
            r"time must have shape \[K \+ 1\] or \[H, K \+ 1\], got \[2, 0\]": dict(
                TIMED, time=torch.zeros(2, 0)
            ),
            r"time must have shape \[K \+ 1\] or \[H, K \+ 1\], got \[1, 2, 3\]": dict(
                TIMED, time=torch.zeros(1, 2, 3)
            ),
            "timestamps must be given with time, got None": dict(time=TIME),
            "timestamps must be None without time, got a Tensor": dict(
                position=POSITION, timestamps=TIMES
            ),
            "boundaries must be None without time, got a Tensor": dict(
                position=POSITION, boundaries=TIMES
            ),
            "query_timestamps must be None without time, got a Tensor": dict(
                position=POSITION, query_timestamps=TIMES
            ),
            r"timestamps must be 1-D, got shape \[1, 6\]": dict(TIMED, timestamps=TIMES[None]),
            "boundaries must have one element less than time has buckets, 3, got 2": dict(
                TIMED, boundaries=torch.tensor([1, 2])
            ),
            r"boundaries must not decrease, got tensor\(\[1, 3, 2\]\)": dict(
                TIMED, boundaries=torch.tensor([1, 3, 2])
            ),
            r"query_shift must .*1-D.*": dict(position=POSITION, query_shift=TIMES[None]),
        },
    ),
    *raising(
        TypeError,
        {
            "position must be a torch.Tensor, got list": dict(position=[0.0]),
            "position must be float64, .*, got torch.int64": dict(
                position=torch.zeros(9, dtype=torch.int64)
            ),
            "time must be a torch.Tensor, got float": dict(TIMED, time=0.5),
            "timestamps must be a torch.Tensor, got list": dict(TIMED, timestamps=[1, 2]),
            "timestamps must be int64, got torch.int32": dict(TIMED, timestamps=TIMES.int()),
            "query_timestamps must be int64, got torch.float32": dict(
                TIMED, query_timestamps=TIMES.float()
            ),
            "boundaries must be int64, got torch.int32": dict(
                TIMED, boundaries=torch.tensor([1, 2, 3]).int()
            ),
            "query_shift must be a torch.Tensor, got list": dict(
                position=POSITION, query_shift=[0]
            ),
            "query_shift must be int32 or int64, got torch.float32": dict(
                position=POSITION, query_shift=torch.zeros(2)
            ),
        },
    ),
]


@pytest.mark.parametrize(
    "fields, error, message", BAD_FIELDS, ids=[message[:50] for _, _, message in BAD_FIELDS]
)
def test_bad_fields(fields, error, message):
    with pytest.raises(error, match=message):
        jm.RelativeBias(**fields)


@pytest.mark.parametrize("count, error", [(-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_bad_numbers_of_buckets(count, error):
    with pytest.raises(error, match="num_buckets must be"):
        jm.RelativeBias.log_boundaries(count)


GOOD = dict(zip("qkv", make_qkv(6, 6))) | dict(q_offsets=torch.tensor([0, 2, 6]))
NO_POSITION = "bias must be None where segments share queries or keys: rows have no position"


def given(**fields):
    return dict(bias=jm.RelativeBias(**fields))


BAD = [
    *raising(TypeError, {"bias must be a RelativeBias, got Tensor": dict(bias=torch.zeros(9))}),
    *raising(
        ValueError,
        {
            "bias.position must be on q's device, cpu, got meta": given(
                position=POSITION.to("meta")
            ),
            "bias.time must be on q's device, cpu, got meta": given(
                **TIMED | dict(time=TIME.to("meta"))
            ),
            "bias.timestamps must be on q's device, cpu, got meta": given(
                **TIMED | dict(timestamps=TIMES.to("meta"))
            ),
            "bias.boundaries must be on q's device, cpu, got meta": given(
                **TIMED, boundaries=TIMES[:3].to("meta")
            ),
            "bias.query_timestamps must be on q's device, cpu, got meta": given(
                **TIMED, query_timestamps=TIMES.to("meta")
            ),
            "bias.query_shift must be on q's device, cpu, got meta": given(
                position=POSITION, query_shift=TIMES[:2].to("meta")
            ),
            "bias.position must have one row for each of q's 2 heads, got 3": given(
                position=torch.zeros(3, 9)
            ),
            "bias.position must have one row for each of q's 2 heads, got 1": given(
                position=torch.zeros(1, 9)
            ),
            "bias.time must have one row for each of q's 2 heads, got 4": given(
                **TIMED | dict(time=torch.zeros(4, 4))
            ),
            "bias.timestamps must have one element for each row of k, 6, got 5": given(
                **TIMED | dict(timestamps=TIMES[:5])
            ),
            "bias.query_timestamps must have one element for each row of q, 6, got 5": given(
                **TIMED, query_timestamps=TIMES[:5]
            ),
            r"bias.query_shift must have one element for each segment of q, 2, got 3": given(
                position=POSITION, query_shift=TIMES[:3]
            ),
        },
    ),
    (given(position=POSITION) | dict(kv_offsets="shared"), ValueError, NO_POSITION),
    (
        given(position=POSITION) | dict(q_offsets="shared", kv_offsets=torch.tensor([0, 2, 6])),
        ValueError,
        NO_POSITION,
    ),
    (
        given(position=torch.zeros(5)),
        ValueError,
        "q_offsets must have segments of at most 3 rows, those of bias.position, got 4",
    ),
]


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("change, error, message", BAD, ids=[message[:50] for _, _, message in BAD])
def test_bad_bias(change, error, message, implementation):
    with pytest.raises(error, match=message):
        F.jagged_attention(**(GOOD | change), implementation=implementation)


@pytest.mark.parametrize(
    "fields", list(itertools.product([True, False], [torch.int32, torch.int64])), ids=str
)
def test_query_shift_of_any_integers(fields, offsets_of):
    shared, dtype = fields
    q, k, v = make_qkv(6, 6)
    shift = torch.tensor([0, 3])
    bias = jm.RelativeBias(
        torch.randn(9) if shared else torch.randn(2, 9), query_shift=shift.to(dtype)
    )
    runs = [
        F.jagged_attention(q, k, v, offsets_of([2, 4]), bias=bias, implementation=x)
        for x in ("auto", "reference")
    ]
    torch.testing.assert_close(*runs)
