"""Attention with a RelativeBias in Triton's interpreter (fp32 and fp16)."""

import dataclasses

import pytest
import torch
from calls import check
from cases import legal, random_configuration, simplest_case, with_random_data
from marks import slow_after
from space import BIASES, MASKS
from torch.nn.functional import pad

import jagged_modules as jm
from jagged_modules import functional as F

LENGTHS = [[3, 0, 70, 33], [65, 4, 20, 40]]
LARGEST = 2**63 - 1
SMALL = 2**31 - 2  # the largest distance that the table of leading bits serves
# Of the two activations, each mask has the one that it lacks in test_attention.py.
OTHER_MASKS = [
    (mask, ("silu", "softmax")[i % 2])
    for i, mask in enumerate(x for x in MASKS if x not in ("hstu", "truncated"))
]


def check_case(lengths=LENGTHS, dtype="float32", **options):
    """Results and every gradient by the accuracy rule; the second segment is NaN in a second
    run."""
    options = dict(heads=[2, 1], head_dim=20, operands="cross") | options
    case = simplest_case("jagged_attention", "interpreter", dtype, **options)
    check(
        legal(dataclasses.replace(case, lengths=[list(x) for x in lengths], seed=1, poison="nan"))
    )


TABLES = ["shared", "per head", "in the operands' dtype"]


@slow_after(
    6,
    "tables, bias, dtype",
    [
        *((tables, bias, "float32") for tables in TABLES for bias in BIASES),
        *((*pair, "float16") for pair in zip(TABLES, BIASES)),
    ],
)
def test_tables(bias, tables, dtype):
    check_case(
        bias=bias,
        tables=tables,
        dtype=dtype,
        query_times=tables == "per head",
        query_shift=tables != "shared",
    )


@slow_after(2, "activation", ["silu", "gelu", "softmax", "identity", "gelu_taylor"])
def test_activations(activation):
    """The bias is added before the activation, all of which test_attention.py has."""
    scale = 1 if activation == "softmax" else "tensor with gradient"
    check_case(
        bias="both",
        tables="per head",
        activation=activation,
        output_scale=scale,
        buckets=1,
        heads=[2, 2],
    )


@slow_after(
    2,
    "mask, activation",
    [("hstu", "softmax"), ("truncated", "softmax"), ("hstu", "silu"), *OTHER_MASKS],
)
def test_masks(mask, activation):
    check_case(
        bias="both", mask=mask, activation=activation, tables="per head", timestamps="unsorted"
    )


@slow_after(
    3,
    "bias, mask, activation, dtype",
    [
        ("both", None, "softmax", "float32"),
        ("position", "causal", "silu", "float16"),
        ("time", "window", "softmax", "float32"),
        ("both", "causal", "gelu", "float16"),
    ],
)
def test_query_groups(bias, mask, activation, dtype):
    given = dict(bias=bias, mask=mask, activation=activation, query_shift=True, buckets=7)
    given |= dict(tables="shared" if mask else "per head", query_times=activation == "softmax")
    lengths = [[3, 70, 0, 33], [65, 1, 4, 20], [0, 3, 5, 40], [65, 4, 0, 40]]
    for count in (2, 3):
        sides = [*lengths[:count], lengths[-1]]
        check_case(sides, dtype, operands=f"{count} groups", **given)


@slow_after(
    2,
    "timestamps, buckets",
    [  # each of either with two of the other
        ("unsorted", 128),
        ("huge", 128),
        ("unsorted", 300),
        ("huge", 0),
        ("sorted", 0),
        ("sorted", 1),
        ("equal", 1),
        ("equal", 7),
        ("far apart", 7),
        ("far apart", 300),
    ],
)
def test_timestamps(timestamps, buckets):
    check_case(
        bias="time",
        timestamps=timestamps,
        buckets=buckets,
        boundaries="explicit",
        query_times=buckets % 2 == 0,
    )


@slow_after(1, "scale", [-0.5, 0.0, 1e-25])
def test_scales_that_the_kernels_cannot_divide_by(scale):
    check_case(bias="both", scale=scale)
    check_case(bias="both", scale=scale, activation="silu")


@slow_after(1, "head_dim", [72, 8, 128])
def test_head_dims(head_dim):
    check_case(bias="both", head_dim=head_dim, lengths=([3, 70], [65, 4]))


@pytest.mark.parametrize("implementation", ["triton", "auto"])
def test_any_strides(implementation):
    """Integers that are columns of a matrix, such as the timestamps in a table of events, and
    transposed tables."""

    def spread(x):
        return torch.stack([torch.full_like(x, 77), x], dim=-1)[..., 1]

    offsets = torch.tensor([0, 40, 70])
    q = k = v = torch.randn(70, 2, 16, generator=torch.Generator().manual_seed(1))
    numbers = dict(
        timestamps=torch.arange(70) * 50,
        boundaries=torch.tensor([10, 100, 1000]),
        query_timestamps=torch.arange(70) * 51,
    )
    numbers |= dict(query_shift=torch.tensor([3, 1]))
    tables = dict(position=torch.randn(2, 99), time=torch.randn(2, 4))
    plain, spread_out = (
        F.jagged_attention(
            q,
            k,
            v,
            offsets,
            activation="silu",
            implementation=implementation,
            bias=jm.RelativeBias(**fields),
        )
        for fields in (
            tables | numbers,
            {name: spread(x) for name, x in (tables | numbers).items()},
        )
    )
    assert torch.equal(plain, spread_out)


def test_host_schedule():
    check_case(bias="both", schedule=True, max_seqlen=True, mask="causal", activation="silu")


@slow_after(2, "seed", range(12))
def test_random_options(seed):
    bias = list(BIASES)[seed % 3]
    case = random_configuration(
        "jagged_attention", seed, "interpreter", bias=bias, operands=("self", "cross")[seed % 2]
    )
    check(with_random_data(case, seed))


# -- buckets ---------------------------------------------------------------------------------------


def edges_of(boundaries):
    """Distances at, below and above every boundary, in both signs."""
    distances = torch.cat(
        [boundaries - 1, boundaries, boundaries.clamp(max=LARGEST - 1) + 1, torch.tensor([0, 1])]
    ).clamp(min=0)
    return torch.cat([distances, -distances])


def assert_exact(distances, boundaries, origin, offsets):
    """With one key, which is at `origin`, each result is the bias alone; the table's gradient is
    the number of scores in each bucket.

    All are integers, which fp32 holds exactly.
    """
    expected = (boundaries[:, None] <= distances.abs()).sum(0)
    table = torch.arange(len(boundaries) + 1.0, requires_grad=True)
    bias = jm.RelativeBias(
        time=table,
        timestamps=torch.tensor([origin]),
        query_timestamps=origin + distances,
        boundaries=boundaries,
    )
    q, k, v = torch.zeros(len(distances), 1, 16), torch.zeros(1, 1, 16), torch.ones(1, 1, 16)
    k.requires_grad_()
    segments = offsets([len(distances)]), offsets([1])
    out = F.jagged_attention(
        q, k, v, *segments, activation="identity", scale=1.0, bias=bias, implementation="triton"
    )
    assert torch.equal(out[:, 0, 0].long(), expected)
    counts, _ = torch.autograd.grad(out[..., 0].sum(), (table, k))
    assert torch.equal(counts.long(), expected.bincount(minlength=len(table)))


@slow_after(
    4,
    "largest, order, origin",
    [  # each two values of two parameters meet
        (SMALL, "mixed", -(2**40)),
        (SMALL, "sorted", 0),
        (LARGEST, "mixed", 10**9),
        (LARGEST, "sorted", -(2**40)),
        (SMALL, "sorted", 10**9),
        (LARGEST, "mixed", 0),
    ],
)
def test_edges_of_the_default_boundaries(order, largest, origin, offsets):
    """In order, a tile has few buckets, which are compared one by one; otherwise many, found by
    leading bits if the distances are small."""
    boundaries = jm.RelativeBias.log_boundaries(128)
    distances = edges_of(boundaries)
    distances = distances[distances.abs() <= largest]
    distances = (
        distances.sort().values if order == "sorted" else distances[torch.randperm(len(distances))]
    )
    assert_exact(distances, boundaries, origin, offsets)


@slow_after(2, "seed", range(6))
@pytest.mark.parametrize("largest", [200, SMALL, 2**45])
def test_edges_of_random_boundaries(largest, seed, offsets):
    """With duplicates, in all magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    count = (30, 128, 129, 7, 1, 300)[seed % 6]
    boundaries = (
        (largest ** torch.rand(count, generator=generator, dtype=torch.float64))
        .long()
        .sort()
        .values
    )
    boundaries[::5] = (
        boundaries[1::5][: len(boundaries[::5])]
        if count > 5 and count % 5 == 0
        else boundaries[::5]
    )
    distances = edges_of(boundaries.sort().values)
    distances = distances[distances.abs() <= largest][
        torch.randperm(int((distances.abs() <= largest).sum()), generator=generator)
    ]
    assert_exact(distances[:200], boundaries.sort().values, 12345 - seed * 2**33, offsets)


def test_boundaries_below_zero_and_the_largest(offsets):
    boundaries = torch.tensor([-5, 0, 0, 1, SMALL, SMALL + 1, SMALL + 2, 2**32, LARGEST])
    distances = torch.tensor(
        [0, 1, 2, SMALL - 1, SMALL, SMALL + 1, SMALL + 2, SMALL + 3, 2**32 - 1, 2**32, 2**62]
    )
    for some in (distances, distances[:5], distances[5:]):
        assert_exact(torch.cat([some, -some]), boundaries, 0, offsets)


def test_keys_and_queries_of_many_times(offsets):
    """Both sides of a block differ: gradients of the table count all pairs."""
    lengths, boundaries = [70, 130], jm.RelativeBias.log_boundaries(20)
    t, u = (torch.randint(-(10**6), 10**6, (sum(lengths),)) for _ in range(2))
    table = torch.zeros(21, requires_grad=True)
    q = torch.zeros(sum(lengths), 1, 16)
    bias = jm.RelativeBias(time=table, timestamps=t, query_timestamps=u)
    v = torch.ones(sum(lengths), 1, 1)
    out = F.jagged_attention(
        q,
        q,
        v,
        offsets(lengths),
        activation="identity",
        scale=1.0,
        bias=bias,
        implementation="triton",
    )
    (counts,) = torch.autograd.grad(out.sum(), table)
    pairs = [(a[:, None] - b).abs().flatten() for a, b in zip(u.split(lengths), t.split(lengths))]
    expected = (boundaries[:, None] <= torch.cat(pairs)).sum(0).bincount(minlength=21)
    assert torch.equal(counts.long(), expected)


# -- positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, 128, 200])
def test_sums_of_positions_stay_in_memory(check_sums_stay_in_memory, head_dim):
    check_sums_stay_in_memory("cpu", torch.float32, 2, head_dim, "triton")


def test_positions_are_exact(offsets):
    """Results are the position biases, and gradients of the table count the pairs of a distance;
    both are integers."""
    lengths, keys, longest, shift = [70, 3, 129], [65, 200, 128], 200, torch.tensor([0, -7, 260])
    table = torch.arange(2 * longest - 1.0).requires_grad_()
    q, k = torch.zeros(sum(lengths), 1, 16), torch.zeros(sum(keys), 1, 16)
    weights = (torch.arange(sum(keys)) % 5).float()
    bias = jm.RelativeBias(table, query_shift=shift)
    options = dict(activation="identity", scale=1.0, bias=bias, implementation="triton")
    out = F.jagged_attention(
        q, k, weights[:, None, None], offsets(lengths), offsets(keys), **options
    )
    (gradient,) = torch.autograd.grad(out.sum(), table)
    expected, counts = [], torch.zeros(2 * longest - 1)
    for n, m, s, w in zip(lengths, keys, shift.tolist(), weights.split(keys)):
        index = (torch.arange(m) - (torch.arange(n)[:, None] + m - n + s) + longest - 1).clamp(
            0, 2 * longest - 2
        )
        expected.append((index * w).sum(1))
        counts.index_add_(0, index.flatten(), w.expand(n, m).flatten())
    assert torch.equal(out.flatten(), torch.cat(expected))
    assert torch.equal(gradient, counts)


def test_distances_beyond_the_table_count_as_its_last(offsets, monkeypatch):
    """Where the values of offsets are not read, as on a device."""
    monkeypatch.setattr(
        "jagged_modules.functional.attention_bias.values_are_checkable", lambda x: False
    )
    q, k, v = (torch.randn(150, 1, 16, requires_grad=True) for _ in range(3))
    table, results = torch.randn(1, 2 * 7 - 1), []
    for wide in (False, True):
        leaf = table.clone().requires_grad_()
        bias = jm.RelativeBias(pad(leaf, (160, 160), mode="replicate") if wide else leaf)
        out = F.jagged_attention(q, k, v, offsets([145, 5]), bias=bias, implementation="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, leaf))])
    *same, (narrow, wide) = zip(*results)
    assert all(torch.equal(a, b) for a, b in same)
    torch.testing.assert_close(narrow, wide)


def test_a_table_of_one_row(offsets):
    """N = 1: segments of one row, or a constant."""
    q, k, v = (torch.randn(3, 2, 16) for _ in range(3))
    table = torch.tensor([[2.0], [-1.0]], requires_grad=True)
    options = dict(activation="identity", scale=1.0, implementation="triton")
    out = F.jagged_attention(q, k, v, offsets([1, 1, 1]), bias=jm.RelativeBias(table), **options)
    torch.testing.assert_close(out, ((q * k).sum(-1) + table[:, 0])[..., None] * v)


# -- runs ------------------------------------------------------------------------------------------


def test_runs_agree_bit_for_bit(offsets):
    q, k, v = (torch.randn(90, 2, 16) for _ in range(3))
    tables = (torch.randn(161).requires_grad_(), torch.randn(2, 9).requires_grad_())
    grad = torch.randn_like(q)
    runs = []
    for _ in range(2):
        bias = jm.RelativeBias(*tables, torch.arange(90) * 7)
        out = F.jagged_attention(q, k, v, offsets([80, 10]), bias=bias, implementation="triton")
        runs.append((out, *torch.autograd.grad(out, tables, grad)))
    assert all(torch.equal(x, y) for run in runs for x, y in zip(run, runs[0]))


def test_zeros_change_nothing(offsets):
    q, k, v = (torch.randn(100, 2, 16) for _ in range(3))
    bias = jm.RelativeBias(torch.zeros(2, 199), torch.zeros(4), torch.randint(100, (100,)))
    outputs = [
        F.jagged_attention(q, k, v, offsets([60, 40]), bias=x, implementation="triton")
        for x in (None, bias)
    ]
    assert torch.equal(*outputs)
