"""An error of a layer names the argument as the layer's caller wrote it, not as the layer names it
internally."""

import re

import pytest
import torch

import jagged_modules as jm

WIDTH, OFFSETS, USERS = 32, torch.tensor([0, 2, 5]), torch.tensor([0, 0, 1, 1])
ROWS = torch.ones(5, WIDTH), OFFSETS
FOREIGN = re.compile(
    r"\b(q|k|v)('s| must| has)|\b(q_offsets|kv_offsets|queries|weights\[|embeddings\[|indices)\b"
)


def container(values, offsets):
    """Wrong containers, from rows of two segments."""
    return {
        "dtype": (values.double(), offsets),
        "integers": (values.long(), offsets),
        "device": (values.to("meta"), offsets),
        "devices": (values.to("meta"), offsets.to("meta")),
        "offsets' device": (values, offsets.to("meta")),
        "dims": (values[:, None], offsets),
        "width": (values[:, :-1], offsets),
        "rows": (values[:-1], offsets),
        "offsets' dtype": (values, offsets.float()),
        "offsets' dims": (values, offsets[None]),
        "no offsets": (values, offsets[:0]),
        "kind": 3,
    }


def segments(values, offsets):
    return {"fewer": (values, offsets[[0, -1]]), "more": (values, offsets[[0, 1, 2, 2]])}


def dense(x):
    wrong = dict(dtype=x.double(), integers=x.long(), device=x.to("meta"), dims=x[0], kind=3)
    return wrong | dict(last=x[..., :-1], rows=x[:-1])


def integers(x):
    wrong = dict(
        dtype=x.float(), device=x.to("meta"), dims=x[None], fewer=x[:-1], more=torch.cat([x, x[:1]])
    )
    return wrong | dict(negative=-x - 1, large=x + 100, kind="x")


def times(x):
    """Wrong timestamps: any value is a right one."""
    return {
        how: wrong for how, wrong in integers(x).items() if how not in ("negative", "large")
    } | dict(int32=x.int(), none=None)


def index(users):
    maps = dict(users=(users, 3), fewer=(users[:-1], 2))
    return (
        integers(users)
        | {f"index of {name}": jm.CandidateIndex.from_map(*x) for name, x in maps.items()}
        | {"index's device": jm.CandidateIndex.from_map(users, 2).to("meta")}
    )


def caches():
    def of(width=WIDTH, heads=4, rows=ROWS, device=None, dtype=torch.float32):
        stack = jm.HSTUStack(width, heads, 2, CONFIG, device=device).to(dtype)
        return stack.cache(
            (torch.ones(5, width, device=device, dtype=dtype), rows[1].to(device or "cpu"))
        )

    wrong = dict(
        heads=of(heads=2),
        width=of(width=64),
        dtype=of(dtype=torch.float64),
        device=of(device="meta"),
    )
    return wrong | dict(
        fewer=of(rows=(None, OFFSETS[[0, 2]])),
        kind=[1],
        dims=jm.HistoryCache((jm.Jagged(*ROWS),) * 2),
        tensors=jm.HistoryCache((ROWS[0],) * 2),
    )


def single_caches(layer, make):
    """Wrong caches of a layer with one Jagged of keys and values."""
    values, rows = layer.cache(ROWS).layers[0].values, jm.Jagged(*ROWS)
    wrong = dict(
        heads=make(2).cache(ROWS),
        layers=CACHE,
        fewer=layer.cache((ROWS[0], OFFSETS[[0, 2]])),
        kind=[1],
        dims=jm.HistoryCache((rows,)),
    )
    wrong |= dict(
        dtype=make(4).double().cache((ROWS[0].double(), OFFSETS)),
        tensors=jm.HistoryCache((values,)),
    )
    return wrong | dict(device=jm.HistoryCache((rows.with_values(values).to("meta"),)))


CONFIG = jm.HSTUConfig(scaling_seqlen=10)
HSTU, LAYER = jm.HSTUStack(WIDTH, 4, 2, CONFIG), jm.HSTULayer(WIDTH, 4, CONFIG)
CACHE = HSTU.cache(ROWS)
TIMED = jm.HSTUStack(
    WIDTH, 4, 2, jm.HSTUConfig(scaling_seqlen=10, relative_position=10, relative_time=8)
)
TIMES = torch.arange(5)
TIMED_LAYER, TIMED_CACHE = TIMED.layers[0], TIMED.cache(ROWS, TIMES)
TARGET = jm.JaggedTargetAttention(WIDTH, 4)
GDPA = jm.JaggedGDPA(WIDTH, 4)
GDPA_BLOCK = jm.GDPABlock(WIDTH, 4)
BLOCK, MLP = jm.BlockDiagonalSelfAttention(WIDTH, 4, 16), jm.JaggedMLP([WIDTH, 16])
COMPRESS, TWO_LEVELS = jm.LinearCompressEmbedding(6, 4, 5), jm.LinearCompressEmbedding(6, 4, [5, 5])
CANDIDATES, EMBEDDINGS, SHARED = torch.ones(4, 1, WIDTH), torch.ones(4, 6, 8), torch.ones(2, 5, 8)
X, COUNTS = container(*ROWS), torch.tensor([1, 1])

CALLS = {  # a call with one wrong argument: what errors must call it, the call, the wrong values
    "target dense": ("targets", lambda x: TARGET(x, ROWS), dense(torch.ones(2, 3, WIDTH))),
    "target jagged": ("targets", lambda x: TARGET(x, ROWS), X | segments(*ROWS)),
    "target history": (
        "history",
        lambda x: TARGET(torch.ones(2, 3, WIDTH), x),
        X | segments(*ROWS),
    ),
    "target of candidates": ("targets", lambda x: TARGET(x, ROWS, USERS), dense(CANDIDATES)),
    "target candidates": ("candidates", lambda x: TARGET(CANDIDATES, ROWS, x), index(USERS)),
    "gdpa x": ("x", GDPA, X),
    "gdpa x with context": ("x", lambda x: GDPA(x, ROWS), X | segments(*ROWS)),
    "gdpa context": ("context", lambda x: GDPA(ROWS, x), X | segments(*ROWS)),
    "gdpa num_targets": ("num_targets", lambda x: GDPA(ROWS, None, x), integers(COUNTS)),
    "gdpa block x": ("x", GDPA_BLOCK, X),
    "gdpa block context": ("context", lambda x: GDPA_BLOCK(ROWS, x), X | segments(*ROWS)),
    "gdpa block num_targets": (
        "num_targets",
        lambda x: GDPA_BLOCK(ROWS, None, x),
        integers(COUNTS),
    ),
    "block x": ("x", BLOCK, X),
    "mlp x": ("x", MLP, X),
    "hstu layer x": ("x", LAYER, X),
    "hstu layer num_targets": ("num_targets", lambda x: LAYER(ROWS, x), integers(COUNTS)),
    "hstu layer num_targets with cache": (
        "num_targets",
        lambda x: LAYER.score(ROWS, CACHE.layers[0], x),
        integers(torch.tensor([2, 3])),
    ),
    "hstu layer cache": (
        "cache",
        lambda x: LAYER.score(ROWS, x.layers[0] if isinstance(x, jm.HistoryCache) else x),
        caches(),
    ),
    "hstu layer history": ("history", LAYER.cache, X),
    "hstu layer targets": (
        "targets",
        lambda x: LAYER.score(x, CACHE.layers[0]),
        X | segments(*ROWS),
    ),
    "hstu layer events": (
        "events",
        lambda x: LAYER.append(x, CACHE.layers[0]),
        X | segments(*ROWS),
    ),
    "hstu layer cache_rows": (
        "cache_rows",
        lambda x: LAYER.cache(ROWS, x),
        dict(dtype=COUNTS.float(), dims=COUNTS[None]),
    ),
    "hstu layer timestamps": (
        "timestamps",
        lambda x: TIMED_LAYER(ROWS, timestamps=x),
        times(TIMES),
    ),
    "hstu layer cache_timestamps": (
        "cache_timestamps",
        lambda x: TIMED_LAYER.score(
            ROWS, TIMED_CACHE.layers[0], timestamps=TIMES, cache_timestamps=x
        ),
        times(TIMES),
    ),
    "hstu timestamps": ("timestamps", lambda x: TIMED(ROWS, timestamps=x), times(TIMES)),
    "hstu history's timestamps": ("timestamps", lambda x: TIMED.cache(ROWS, x), times(TIMES)),
    "hstu targets' timestamps": (
        "timestamps",
        lambda x: TIMED.score(ROWS, TIMED_CACHE, timestamps=x),
        times(TIMES),
    ),
    "hstu long x": ("x", TIMED, dict(longer=(torch.ones(11, WIDTH), torch.tensor([0, 0, 11])))),
    "hstu x": ("x", HSTU, X),
    "hstu num_targets": ("num_targets", lambda x: HSTU(ROWS, x), integers(COUNTS)),
    "hstu history": ("history", HSTU.cache, X),
    "hstu targets": ("targets", lambda x: HSTU.score(x, CACHE), X | segments(*ROWS)),
    "hstu cache": (
        "cache",
        lambda x: HSTU.score(ROWS, x),
        caches() | dict(layers=jm.HistoryCache(CACHE.layers[:1])),
    ),
    "hstu events": ("events", lambda x: HSTU.append(x, CACHE), X | segments(*ROWS)),
    "hstu cache of events": (
        "cache",
        lambda x: HSTU.append(ROWS, x),
        caches() | dict(layers=jm.HistoryCache(CACHE.layers[:1])),
    ),
    "hstu events' timestamps": (
        "timestamps",
        lambda x: TIMED.append(ROWS, TIMED_CACHE, timestamps=x),
        times(TIMES),
    ),
    "target cached history": ("history", TARGET.cache, X),
    "target cached targets": (
        "targets",
        lambda x: TARGET.score(x, TARGET.cache(ROWS)),
        X | segments(*ROWS),
    ),
    "target cache": (
        "cache",
        lambda x: TARGET.score(ROWS, x),
        single_caches(TARGET, lambda heads: jm.JaggedTargetAttention(WIDTH, heads)),
    ),
    "target events": (
        "events",
        lambda x: TARGET.append(x, TARGET.cache(ROWS)),
        X | segments(*ROWS),
    ),
    "gdpa cached context": ("context", GDPA.cache, X),
    "gdpa cached x": ("x", lambda x: GDPA.score(x, GDPA.cache(ROWS)), X | segments(*ROWS)),
    "gdpa cache": (
        "cache",
        lambda x: GDPA.score(ROWS, x),
        single_caches(GDPA, lambda heads: jm.JaggedGDPA(WIDTH, heads)),
    ),
    "gdpa events": ("events", lambda x: GDPA.append(x, GDPA.cache(ROWS)), X | segments(*ROWS)),
    "compress candidate_embeddings": (
        "candidate_embeddings",
        lambda x: COMPRESS(x, SHARED, USERS),
        dense(EMBEDDINGS),
    ),
    "compress user_embeddings": (
        "user_embeddings",
        lambda x: COMPRESS(EMBEDDINGS, x, USERS),
        dense(SHARED),
    ),
    "compress candidates": ("candidates", lambda x: COMPRESS(EMBEDDINGS, SHARED, x), index(USERS)),
    "compress level": (
        "user_embeddings[1]",
        lambda x: TWO_LEVELS(EMBEDDINGS, [SHARED, x], [USERS, USERS]),
        dense(SHARED),
    ),
    "compress candidates of level": (
        "candidates[1]",
        lambda x: TWO_LEVELS(EMBEDDINGS, [SHARED] * 2, [USERS, x]),
        index(USERS),
    ),
}
CASES = {
    f"{call}-{how}": (name, run, x)
    for call, (name, run, wrong) in CALLS.items()
    for how, x in wrong.items()
}


@pytest.mark.parametrize("name, run, x", CASES.values(), ids=CASES)
def test_an_error_names_the_argument_that_the_caller_wrote(name, run, x):
    with pytest.raises(
        (TypeError, ValueError), match=rf"(?<![.\w]){re.escape(name)}($|\W)"
    ) as error:
        run(x)
    assert not FOREIGN.search(str(error.value))


def test_mask_of_the_layer_is_named_as_such():
    layer = jm.JaggedGDPA(WIDTH, 4, mask=jm.AttentionMask(num_targets=COUNTS[:1]))
    with pytest.raises(
        ValueError, match=r"^mask.num_targets must have shape \[B\] = \[2\], got \[1\]"
    ):
        layer(ROWS)
    with pytest.raises(
        ValueError,
        match="^mask.num_targets must be on the layer's device, cpu, or the host, got meta",
    ):
        jm.JaggedGDPA(WIDTH, 4, mask=jm.AttentionMask(num_targets=COUNTS.to("meta")))(ROWS)
    with pytest.raises(ValueError, match=r"^num_targets must have shape \[B\] = \[2\], got \[1\]"):
        layer(ROWS, num_targets=COUNTS[:1])
