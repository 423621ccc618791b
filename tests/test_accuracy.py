"""The accuracy rule itself: it accepts honest arithmetic in any order of summation, and rejects
mutants, on several random inputs.

Mutants and honest programs are written in plain torch. What they compute with is rounded by casts;
sums are made in fp32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import accuracy
import pytest
import torch
from accuracy.dropout import Dropout

import jagged_modules as jm
from jagged_modules.bias import position_index, time_buckets

SEEDS = range(5)
HALVES = [torch.bfloat16, torch.float16]


def cut_to_tf32(x):
    """An fp32 operand with the 13 lowest bits of its mantissa cut off, as tensor cores read it."""
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


# -- sums in any order -----------------------------------------------------------------------------


def reversed_order(a, b):
    return (a.flip(-1) @ b.flip(-2)).clone()


def one_after_the_other_of(terms):
    total = torch.zeros_like(terms[..., 0, :])
    for k in range(terms.shape[-2]):
        total = total + terms[..., k, :]
    return total


def one_after_the_other(a, b):
    return one_after_the_other_of(a[..., :, :, None] * b[..., None, :, :])


def by_blocks(a, b, block=16):
    parts = zip(a.split(block, -1), b.split(block, -2))
    return functools.reduce(torch.add, [x @ y for x, y in parts])


def pairwise(a, b):
    terms = a[..., :, :, None] * b[..., None, :, :]
    while terms.shape[-2] > 1:
        terms = torch.nn.functional.pad(terms, (0, 0, 0, terms.shape[-2] % 2))
        terms = terms[..., ::2, :] + terms[..., 1::2, :]
    return terms.squeeze(-2)


def smallest_first(a, b):
    terms = a[..., :, :, None] * b[..., None, :, :]
    return one_after_the_other_of(terms.gather(-2, terms.abs().argsort(-2)))


def sorted_by_sign(a, b):
    """All negative terms, then all positive ones: partial sums as large as they can be."""
    terms = a[..., :, :, None] * b[..., None, :, :]
    return one_after_the_other_of(terms.sort(-2).values)


ORDERS = [
    torch.matmul,
    reversed_order,
    one_after_the_other,
    by_blocks,
    pairwise,
    smallest_first,
    sorted_by_sign,
]


# -- attention -------------------------------------------------------------------------------------

ROWS, KEYS, HEADS, DIM = 96, 112, 2, 32
SCALE = DIM**-0.5


def attention_inputs(seed, dtype):
    torch.manual_seed(seed)
    return [torch.randn(n, HEADS, DIM).to(dtype) for n in (ROWS, KEYS, KEYS, ROWS)]


class Changes(NamedTuple):
    """Changes to the arithmetic of attention.

    matmul: computes the MMAs. operand is applied to the operands of each MMA, score to S, weight to
    P, delta to rowsum(dO ∘ out), gradient to dS, and result to out before its rounding. weight and
    gradient None: rounding to the operands' dtype, as in the kernels. keys: how many are read.
    rescale: whether softmax rescales its sums.
    """

    matmul: Callable = torch.matmul
    operand: Callable = lambda x: x
    score: Callable = lambda x: x
    weight: Callable | None = None
    delta: Callable = lambda x: x
    gradient: Callable | None = None
    result: Callable = lambda x: x
    keys: int = KEYS
    rescale: bool = True


def attend(q, k, v, do, activation, changes):
    """One segment's attention and gradients as kernels compute them, key block by key block in
    fp32, of all heads at a time."""
    matmul, operand, score, weight, delta, gradient, result, keys, rescale = changes
    dtype = q.dtype
    weight, gradient = (
        f if f is not None else lambda x: x.to(dtype).float() for f in (weight, gradient)
    )
    q, k, v, do = (x.float().transpose(0, 1) for x in (q, k, v, do))
    k, v = k[:, :keys], v[:, :keys]

    def mma(a, b):
        return matmul(operand(a), operand(b))

    scores = score(mma(q, k.mT) * SCALE)
    if activation == "silu":
        p = torch.nn.functional.silu(scores)
        dact = torch.sigmoid(scores) * (1 + scores * (1 - torch.sigmoid(scores)))
        out = mma(weight(p), v)
        ds = dact * mma(do, v.mT)
    else:
        largest = torch.full_like(scores[..., :1], -torch.inf)
        total = torch.zeros(HEADS, ROWS, 1)
        acc = torch.zeros(HEADS, ROWS, DIM)
        for columns in torch.arange(keys).split(32):
            new = torch.maximum(largest, scores[..., columns].amax(-1, keepdim=True))
            terms = torch.exp(scores[..., columns] - new)
            factor = torch.exp(largest - new) if rescale else torch.ones_like(new)
            total = total * torch.exp(largest - new) + terms.sum(-1, keepdim=True)
            acc, largest = acc * factor + mma(weight(terms), v[:, columns]), new
        out = acc / total
        p = torch.exp(scores - (largest + total.log()))
        row_sum = (do * out.to(dtype).float()).sum(-1, keepdim=True)
        ds = p * (mma(do, v.mT) - delta(row_sum))
    ds = gradient(ds)
    dk, dv = (torch.zeros(HEADS, KEYS, DIM) for _ in range(2))
    dk[:, :keys], dv[:, :keys] = mma(ds.mT, q) * SCALE, mma(weight(p).mT, do)
    results = {"out": result(out), "dq": mma(ds, k) * SCALE, "dk": dk, "dv": dv}
    return {name: x.transpose(0, 1).to(dtype) for name, x in results.items()}


def worst_of_attention(seed, dtype, arithmetic, activation="softmax", **changes):
    """The largest ratio of an error to its bound, of each result."""
    inputs = attention_inputs(seed, dtype)
    offsets = torch.tensor([0, ROWS]), torch.tensor([0, KEYS])
    bounds = accuracy.attention(*inputs, *offsets, activation=activation, arithmetic=arithmetic)
    actual = attend(*inputs, activation, Changes(**changes))
    return {name: max(accuracy.compare(actual[name], bounds[name], name)) for name in bounds}


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("matmul", ORDERS, ids=lambda x: x.__name__)
def test_attention_in_any_order_is_accepted(matmul, dtype, activation):
    for seed in SEEDS[:2]:
        worst = worst_of_attention(seed, dtype, accuracy.KERNELS, activation, matmul=matmul)
        assert max(worst.values()) <= 1, worst


def exactly(x):
    return x


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_attention_without_the_roundings_that_kernels_may_make_is_accepted(dtype):
    for arithmetic in (accuracy.KERNELS, accuracy.TORCH_CPU):
        worst = worst_of_attention(0, dtype, arithmetic, weight=exactly, gradient=exactly)
        assert max(worst.values()) <= 1, worst


def rounded_to(dtype):
    return lambda x: x.to(dtype).float()


ATTENTION_MUTANTS = {  # changes, dtype, results that must be rejected
    "last key dropped": (dict(keys=KEYS - 1), None, ["out", "dq", "dk", "dv"]),
    "sums not rescaled": (dict(rescale=False), None, ["out"]),
    "tf32": (dict(operand=cut_to_tf32), torch.float32, ["out", "dq", "dk", "dv"]),
    "weights in bf16": (dict(weight=rounded_to(torch.bfloat16)), torch.float32, ["out", "dv"]),
    "gradients of scores in fp16": (
        dict(gradient=rounded_to(torch.float16)),
        torch.float32,
        ["dq", "dk"],
    ),
    "rowsum(dO ∘ out) left out": (dict(delta=torch.zeros_like), None, ["dq", "dk"]),
    "out rounded to bf16 first": (dict(result=rounded_to(torch.bfloat16)), torch.float16, ["out"]),
}


@pytest.mark.parametrize("mutant", ATTENTION_MUTANTS)
def test_attention_mutants_are_rejected(mutant):
    changes, only, names = ATTENTION_MUTANTS[mutant]
    for seed in SEEDS:
        for dtype in [torch.float32, *HALVES] if only is None else [only]:
            worst = worst_of_attention(seed, dtype, accuracy.KERNELS, **changes)
            assert all(worst[name] > 1 for name in names), worst


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "name, names", [("score", ["out", "dv"]), ("weight", ["out", "dv"]), ("gradient", ["dq", "dk"])]
)
def test_one_rounding_too_many_is_rejected(name, names, dtype, activation):
    """Scores rounded to 16 bits where weights may be too; weights, or gradients of scores, where
    they may not."""
    if name == "score":
        changes, arithmetic = dict(score=rounded_to(dtype)), accuracy.KERNELS
    else:
        changes = dict(weight=exactly, gradient=exactly) | {name: rounded_to(dtype)}
        arithmetic = accuracy.TORCH_CPU
    for seed in SEEDS:
        worst = worst_of_attention(seed, dtype, arithmetic, activation, **changes)
        assert any(worst[result] > 1 for result in names), worst


# -- block attention with rotary and dropout -------------------------------------------------------

LENGTHS, BLOCK, BLOCK_DIM = [287, 285, 3, 173], 32, 4


class BlockChanges(NamedTuple):
    """Changes to the arithmetic of block attention.

    operand is applied to rotated q and k after their rounding, score to S, delta to
    rowsum(P ∘ dP), and gradient to dq and dk before they are rotated back. tile: positions are
    counted from the start of a tile of this number of rows. turn: the sign of the rotation back.
    """

    operand: Callable = lambda x: x
    score: Callable = lambda x: x
    delta: Callable = lambda x: x
    gradient: Callable = lambda x: x
    tile: int = 64
    turn: int = -1


def rotated_pairs(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def attend_in_blocks(q, k, v, do, rotary, dropout, changes):
    """Gradients of block attention as kernels compute them, block by block in fp32. dropout:
    1 / (1 - p) or 0 for rows of a block."""
    dtype, results = q.dtype, [torch.zeros(q.shape) for _ in range(3)]
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for start, end in zip(starts, starts[1:]):
        for rows in torch.arange(start, end).split(BLOCK):
            positions = (rows - start) % changes.tile
            cos, sin = (table[positions][:, None] for table in (rotary.cos, rotary.sin))
            of_block = [x[rows].float() for x in (q, k, v, do)]
            of_block[:2] = (
                changes.operand(rotated_pairs(x, cos, sin).to(dtype).float()) for x in of_block[:2]
            )
            qb, kb, vb, dob = (x.transpose(0, 1) for x in of_block)
            scores = changes.score(qb @ kb.mT * BLOCK_DIM**-0.5)
            p, factors = scores.softmax(-1), dropout(rows)
            dp = dob @ vb.mT * factors
            delta = changes.delta((p * dp).sum(-1, keepdim=True))
            ds = (p * (dp - delta) * BLOCK_DIM**-0.5).to(dtype).float()
            found = ds @ kb, ds.mT @ qb, (p * factors).to(dtype).float().mT @ dob
            for i, (total, x) in enumerate(zip(results, found)):
                x = x.transpose(0, 1)
                if i < 2:
                    x = rotated_pairs(changes.gradient(x), cos, changes.turn * sin)
                total[rows] = x
    return dict(zip(("dq", "dk", "dv"), (x.to(dtype) for x in results)))


def worst_of_blocks(seed, dtype, p, **changes):
    """As `worst_of_attention`."""
    torch.manual_seed(seed)
    q, k, v, do = (torch.randn(sum(LENGTHS), HEADS, BLOCK_DIM).to(dtype) for _ in range(4))
    rotary = jm.Rotary.from_frequencies(BLOCK_DIM, max(LENGTHS))
    dropout_seed = torch.randint(2**62, ()) if p else None
    bounds = accuracy.block_attention(
        q, k, v, do, torch.tensor([0, *LENGTHS]).cumsum(0), block_size=BLOCK, rotary=rotary,
        dropout_p=p, dropout_seed=dropout_seed, arithmetic=accuracy.KERNELS,
    )  # fmt: skip

    def dropout(rows):
        if not p:
            return 1.0
        of_block = Dropout.of(p, dropout_seed, [rows], sum(LENGTHS))
        return of_block.factors(rows[None], len(rows), HEADS, HEADS).float()

    actual = attend_in_blocks(q, k, v, do, rotary, dropout, BlockChanges(**changes))
    return {name: max(accuracy.compare(actual[name], bounds[name], name)) for name in actual}


@pytest.mark.parametrize("tile", [BLOCK, 64, 512])
@pytest.mark.parametrize("p", [0, 0.5, 0.999])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_positions_from_any_row_are_accepted(dtype, p, tile):
    """With much dropout, a row of dk is one pair's. Its small components have the roundings of its
    large ones at another angle, and the whole row those of one row of q."""
    for seed in SEEDS:
        worst = worst_of_blocks(seed, dtype, p, tile=tile)
        assert max(worst.values()) <= 1, worst


BLOCK_MUTANTS = {  # changes, results that must be rejected in fp16
    "rotated further": (dict(turn=1), ["dq", "dk"]),
    "rowsum(P ∘ dP) left out": (dict(delta=torch.zeros_like), ["dq", "dk"]),
    "scores in bf16": (dict(score=rounded_to(torch.bfloat16)), ["dq", "dk", "dv"]),
    "bf16 before the rotation back": (dict(gradient=rounded_to(torch.bfloat16)), ["dq", "dk"]),
    "q and k rounded to bf16": (dict(operand=rounded_to(torch.bfloat16)), ["dq", "dk", "dv"]),
}


@pytest.mark.parametrize("p", [0, 0.5])
@pytest.mark.parametrize("mutant", BLOCK_MUTANTS)
def test_mutants_of_block_attention_are_rejected(mutant, p):
    changes, names = BLOCK_MUTANTS[mutant]
    for seed in SEEDS:
        worst = worst_of_blocks(seed, torch.float16, p, **changes)
        assert all(worst[name] > 1 for name in names), worst


# -- attention with a bias -------------------------------------------------------------------------

LONGEST, BUCKETS = 60, 9  # distances beyond the table count as its last
EDGES = torch.tensor([0, 1, 2, 4, 8, 16, 64, 64, 300])


def bias_inputs(seed):
    torch.manual_seed(seed)
    times = dict(
        timestamps=torch.randint(400, (KEYS,)),
        query_timestamps=torch.randint(400, (ROWS,)),
        boundaries=EDGES,
    )
    return jm.RelativeBias(
        torch.randn(HEADS, 2 * LONGEST - 1).requires_grad_(),
        torch.randn(BUCKETS + 1).requires_grad_(),
        **times,
    )


def in_order(ds, index, entries):
    """Sums `[H, entries]` of dS `[H, rows, keys]` by entry, one term after the other."""
    return torch.zeros(len(ds), entries, dtype=ds.dtype).index_add(
        1, index.flatten(), ds.flatten(1)
    )


def backwards(ds, index, entries):
    return in_order(ds.flip(1, 2), index.flip(0, 1), entries)


def by_rows(ds, index, entries):
    return sum(in_order(ds[:, row : row + 1], index[row : row + 1], entries) for row in range(ROWS))


def smallest_terms_first(ds, index, entries):
    order = ds.flatten(1).abs().argsort(1)
    return torch.stack(
        [in_order(x[None, i], index.flatten()[i], entries)[0] for x, i in zip(ds.flatten(1), order)]
    )


def of_tensor_cores(ds, index, entries):
    return torch.einsum("hij,ije->he", ds, torch.nn.functional.one_hot(index, entries).float())


def worst_of_bias(
    seed,
    dtype,
    activation,
    summed=in_order,
    table=exactly,
    edges=EDGES,
    gradient=exactly,
    factor=1.0,
):
    """The largest ratio of an error to its bound. summed: sums dS. table, gradient: applied to the
    tables and to dS before its sums."""
    inputs, bias = attention_inputs(seed, dtype), bias_inputs(seed)
    offsets = torch.tensor([0, ROWS]), torch.tensor([0, KEYS])
    bounds = accuracy.attention(
        *inputs, *offsets, activation=activation, bias=bias, arithmetic=accuracy.KERNELS
    )
    positions = position_index(torch.arange(ROWS) + KEYS - ROWS, torch.arange(KEYS), LONGEST)
    buckets = time_buckets(bias.query_timestamps, bias.timestamps, edges)
    of_scores = table(bias.position.detach())[:, positions] + table(bias.time.detach())[buckets]
    kept = []

    def keep(ds):
        kept.append(ds)
        return ds.to(dtype).float()

    actual = attend(*inputs, activation, Changes(score=lambda x: x + of_scores, gradient=keep))
    ds = gradient(kept[0]) * factor
    actual["dposition"] = summed(ds, positions, 2 * LONGEST - 1).float()
    actual["dtime"] = summed(ds, buckets, BUCKETS + 1).float().sum(0)
    return {name: max(accuracy.compare(actual[name], bounds[name], name)) for name in bounds}


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    "summed",
    [in_order, backwards, by_rows, smallest_terms_first, of_tensor_cores],
    ids=lambda x: x.__name__,
)
def test_gradients_of_tables_in_any_order_are_accepted(summed, dtype, activation):
    for seed in SEEDS[:2]:
        worst = worst_of_bias(seed, dtype, activation, summed)
        assert max(worst.values()) <= 1, worst


BIAS_MUTANTS = {  # changes, dtypes, results that must be rejected
    "last key not summed": (
        dict(gradient=lambda x: x * (torch.arange(KEYS) < KEYS - 1)),
        None,
        ["dposition", "dtime"],
    ),
    "first row not summed": (
        dict(gradient=lambda x: x * (torch.arange(ROWS) > 0)[:, None]),
        None,
        ["dposition", "dtime"],
    ),
    "times the scale": (dict(factor=SCALE), None, ["dposition", "dtime"]),
    "dS in bf16": (
        dict(gradient=rounded_to(torch.bfloat16)),
        [torch.float32, torch.float16],
        ["dposition", "dtime"],
    ),
    "dS in fp16": (
        dict(gradient=rounded_to(torch.float16)),
        [torch.float32],
        ["dposition", "dtime"],
    ),
    "dS in tf32": (dict(gradient=cut_to_tf32), [torch.float32], ["dposition", "dtime"]),
    "tables in bf16": (
        dict(table=rounded_to(torch.bfloat16)),
        [torch.float32, torch.float16],
        ["out", "dq"],
    ),
    "tables in tf32": (dict(table=cut_to_tf32), [torch.float32], ["out", "dq"]),
    "boundaries belong to the bucket below": (
        dict(edges=EDGES + 1),
        None,
        ["out", "dq", "dk", "dv", "dtime"],
    ),
    "sums in bf16": (
        dict(summed=lambda x, *rest: in_order(x.bfloat16(), *rest)),
        [torch.float32, torch.float16],
        ["dposition", "dtime"],
    ),
}


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("mutant", BIAS_MUTANTS)
def test_bias_mutants_are_rejected(mutant, activation):
    changes, dtypes, names = BIAS_MUTANTS[mutant]
    for seed in SEEDS[:2]:
        for dtype in dtypes or [torch.float32, *HALVES]:
            worst = worst_of_bias(seed, dtype, activation, **changes)
            assert all(worst[name] > 1 for name in names), (dtype, worst)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_ds_rounded_like_the_operands_is_rejected(dtype):
    """The tables' gradients are sums of dS before it is rounded for the MMAs. (With softmax, `out`
    as it was rounded has larger errors.)"""
    for seed in SEEDS[:2]:
        worst = worst_of_bias(seed, dtype, "silu", gradient=rounded_to(dtype))
        assert worst["dposition"] > 1, worst


# -- linear compression ----------------------------------------------------------------------------


def compress_inputs(seed, dtype):
    torch.manual_seed(seed)
    weights = [(torch.randn(24, k) * k**-0.5).to(dtype) for k in (40, 33)]
    embeddings = [torch.randn(b, k, 16).to(dtype) for b, k in ((7, 40), (60, 33))]
    return weights, embeddings, torch.randint(0, 7, (60,)), torch.randn(60, 24, 16).to(dtype)


def compressed(
    weights, embeddings, index, do, matmul=torch.matmul, shared=exactly, sums=None, candidates=60
):
    """The fused implementation, with gradients, in fp32. shared is applied to the shared level's
    result, sums to sums of gradients."""
    dtype = do.dtype
    sums = sums or rounded_to(dtype)
    (w_user, w), (users, e), do = (
        [x.float() for x in weights],
        [x.float() for x in embeddings],
        do.float(),
    )
    grad = sums(torch.zeros(7, 24, 16).index_add(0, index[:candidates], do[:candidates]))
    results = {"out": matmul(w, e) + shared(matmul(w_user, users))[index]}
    for level, (gradient, weight, embedding) in enumerate(((grad, w_user, users), (do, w, e))):
        flat = (x.transpose(0, 1).flatten(1) for x in (gradient, embedding))
        rows, columns = flat
        results |= {
            f"dweights[{level}]": matmul(rows, columns.mT),
            f"dembeddings[{level}]": matmul(weight.mT, gradient),
        }
    return {name: x.to(dtype) for name, x in results.items()}


def worst_of_compress(seed, dtype, **changes):
    weights, embeddings, index, do = compress_inputs(seed, dtype)
    bounds = accuracy.linear_compress(weights, embeddings, [index], do, arithmetic=accuracy.KERNELS)
    actual = compressed(weights, embeddings, index, do, **changes)
    return {name: max(accuracy.compare(actual[name], bounds[name], name)) for name in bounds}


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    "matmul",
    [torch.matmul, reversed_order, one_after_the_other, by_blocks],
    ids=lambda x: x.__name__,
)
def test_compression_in_any_order_is_accepted(matmul, dtype):
    worst = worst_of_compress(0, dtype, matmul=matmul)
    assert max(worst.values()) <= 1, worst


def test_compression_mutants_are_rejected():
    def tf32(a, b):
        return cut_to_tf32(a) @ cut_to_tf32(b)

    for seed in SEEDS:
        for dtype in HALVES:
            assert worst_of_compress(seed, dtype, shared=rounded_to(dtype))["out"] > 1
            assert worst_of_compress(seed, dtype, candidates=59)["dweights[0]"] > 1
        worst = worst_of_compress(seed, torch.float32, matmul=tf32)
        assert min(worst.values()) > 1, worst
        assert (
            worst_of_compress(seed, torch.float32, sums=rounded_to(torch.bfloat16))["dweights[0]"]
            > 1
        )


# -- matrix multiplication and softmax -------------------------------------------------------------


def matmul_results(seed, matmul, terms=300):
    """x[0] @ y[0] with positive terms, whose partial sums grow, against its bounds."""
    torch.manual_seed(seed)
    x, y, do = torch.rand(20, terms), torch.rand(1, terms, 12), torch.randn(20, 12)
    bound = accuracy.jagged_dense_bmm(x, y, torch.tensor([0, 20]), do)["out"]
    return max(accuracy.compare(matmul(x, y[0]), bound))


@pytest.mark.parametrize("matmul", ORDERS, ids=lambda x: x.__name__)
def test_positive_terms_in_any_order_are_accepted(matmul):
    assert max(matmul_results(seed, matmul) for seed in SEEDS) <= 1


@pytest.mark.parametrize(
    "matmul",
    [
        lambda a, b: cut_to_tf32(a) @ cut_to_tf32(b),
        lambda a, b: a[:, :-1] @ b[:-1],
        lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
        lambda a, b: functools.reduce(
            lambda s, k: (s + a[:, k, None] * b[k]).half().float(),
            range(a.shape[1]),
            torch.zeros(20, 12),
        ),
    ],
    ids=["tf32", "dropped term", "bf16", "summed in fp16"],
)
def test_matmul_mutants_are_rejected(matmul):
    assert min(matmul_results(seed, matmul) for seed in SEEDS) > 1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_softmax_mutants_are_rejected(dtype):
    for seed in SEEDS:
        torch.manual_seed(seed)
        x = (3 * torch.randn(200, 6)).to(dtype)
        do = torch.randn(200, 6).to(dtype)
        offsets = torch.tensor([0, 90, 200])
        bound = accuracy.jagged_softmax(x, offsets, do)["out"]

        def ratio(function, x=x, bound=bound):
            out = torch.cat([function(part.float()) for part in x.split([90, 110])])
            return max(accuracy.compare(out.to(x.dtype), bound))

        assert ratio(lambda x: x.softmax(0)) <= 1
        assert (
            ratio(
                lambda x: (
                    torch.exp(x - x.amax(0)).to(dtype).float() / torch.exp(x - x.amax(0)).sum(0)
                )
            )
            > 1
        ), "rounded twice"
        assert (
            ratio(lambda x: torch.exp(x - x.amax(0)) / torch.exp(x - x.amax(0))[:-1].sum(0)) > 1
        ), "a term dropped"


# -- numbers that are not finite -------------------------------------------------------------------


def exact_bound(x):
    return accuracy.Bound.exact(x).rounded(torch.float16)


def test_overflow_is_expected_where_the_exact_value_overflows():
    bound = exact_bound(torch.tensor([1e6, -1e6, 2.0], dtype=torch.float64))
    assert accuracy.compare(torch.tensor([torch.inf, -torch.inf, 2.0]).half(), bound).largest == 0
    with pytest.raises(AssertionError, match="65504.0 where inf was expected"):
        accuracy.compare(torch.tensor([65504.0, -torch.inf, 2.0]).half(), bound)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_number_is_expected_where_the_exact_value_is_one(wrong):
    with pytest.raises(AssertionError, match="where 2.0 was expected"):
        accuracy.compare(torch.tensor([wrong]).half(), exact_bound(torch.tensor([2.0])))
    with pytest.raises(AssertionError, match="where nan was expected"):
        accuracy.compare(torch.tensor([2.0]).half(), exact_bound(torch.tensor([torch.nan])))


def test_subnormal_results_have_the_spacing_of_fp16():
    exact = torch.tensor([2.0**-24 * 1.5, 2.0**-26], dtype=torch.float64)
    accuracy.assert_accurate({"x": exact.half()}, {"x": exact_bound(exact)})
    with pytest.raises(AssertionError, match="x: the largest error is"):
        accuracy.assert_accurate({"x": (exact + 2.0**-23).half()}, {"x": exact_bound(exact)})


def test_gradients_of_negative_scales_have_positive_bounds():
    _, k, v, _ = attention_inputs(0, torch.float16)
    offsets, scales = torch.tensor([0, 40, KEYS]), torch.tensor([-2.0, 3.0]).half().requires_grad_()
    bound = accuracy.attention(
        k,
        k,
        v,
        torch.randn(KEYS, HEADS, DIM).half(),
        offsets,
        activation="silu",
        output_scale=scales,
    )
    assert ((bound["doutput_scale"].error > 0) & bound["doutput_scale"].error.isfinite()).all()
    v = v.clone()
    v[60:] *= 60000 / v.abs().max()  # results of the second segment overflow fp16
    bound = accuracy.attention(
        k,
        k,
        v,
        torch.randn(KEYS, HEADS, DIM).half(),
        offsets,
        activation="silu",
        output_scale=scales,
    )
    assert bound["doutput_scale"].error.isfinite().tolist() == [True, False]


def test_a_deviation_of_an_exponent_is_multiplied_by_the_exponential():
    score, rms = torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64)
    weight = accuracy.Bound(score, 100 * rms, rms, torch.float32).exp(4)
    for deviations, accepted in ((7.9, True), (8.1, False)):
        actual = (deviations * rms).exp()
        assert (accuracy.compare(actual, weight).largest <= 1) == accepted


def test_results_and_bounds_have_the_same_names_and_shapes():
    bound = exact_bound(torch.zeros(2))
    with pytest.raises(AssertionError, match="shape"):
        accuracy.compare(torch.zeros(3), bound)
    with pytest.raises(AssertionError, match="results"):
        accuracy.assert_accurate({"out": torch.zeros(2)}, {"out": bound, "dx": bound})


# -- definitions in plain torch --------------------------------------------------------------------


def normed(x, weight):
    centred = x - x.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_definitions_accept_themselves_and_reject_mutants(dtype):
    lower = torch.float16 if dtype == torch.float32 else torch.float8_e4m3fn
    for seed in SEEDS:
        torch.manual_seed(seed)
        tensors = dict(x=torch.randn(60, 24).to(dtype), weight=torch.randn(24).to(dtype))
        bound = accuracy.definition(normed, tensors, torch.randn(60, 24).to(dtype))["out"]
        x, weight = tensors.values()
        assert max(accuracy.compare(normed(x, weight), bound)) <= 1
        assert max(accuracy.compare(normed(x.float(), weight.float()).to(dtype), bound)) <= 1
        assert max(accuracy.compare(normed(x.to(lower).to(dtype), weight), bound)) > 1
        assert max(accuracy.compare(normed(x, weight) * (24 / 23) ** 0.5, bound)) > 1


def test_equal_terms_round_in_one_direction():
    term = torch.tensor(819.45 * 2**-13)  # sums above 1,024 have a spacing of 2^-13
    total = torch.zeros(())
    for _ in range(20_000):
        total += term
    terms = accuracy.Bound.exact(term.expand(1, 20_000))
    with accuracy.equal_terms():
        bound = terms.sum(1)
    assert (
        accuracy.compare(total[None], terms.sum(1)).largest
        > 1
        > accuracy.compare(total[None], bound).largest
        > 0.1
    )
    assert accuracy.compare((total - 40 * term)[None], bound).largest > 1
