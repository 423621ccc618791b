"""HistoryCache.select and append: rows, gradients, sizes and errors. test_append.py compares their
scores with the full forward."""

import random

import pytest
import torch

import jagged_modules as jm

from .caching import HSTU_CONFIGS, Timeline, hstu, jagged
from .hstu_cases import HEADS, WIDTH

SHAPES = [(2, 6), (1, 3)]  # heads and widths of two layers
LENGTHS = [[3, 0, 1, 5], [0, 0], [1], [], [0, 7, 2]]


def cache_of(
    lengths,
    timed=False,
    max_seqlen=None,
    max_rows=None,
    dtype=torch.float64,
    offsets_dtype=torch.int64,
):
    """A cache of two layers with random rows, which need gradients."""
    offsets = torch.nn.functional.pad(
        torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)
    ).to(offsets_dtype)
    total = sum(lengths)
    first = jm.Jagged(
        torch.randn(total, *SHAPES[0], dtype=dtype, requires_grad=True), offsets, max_seqlen
    )
    second = first.with_values(torch.randn(total, *SHAPES[1], dtype=dtype, requires_grad=True))
    return jm.HistoryCache(
        (first, second), torch.randint(100, (total,)) if timed else None, max_rows
    )


def columns(cache):
    """For each layer, and the timestamps if there are any, the rows of each segment."""
    tensors = [x.values for x in cache.layers] + (
        [] if cache.timestamps is None else [cache.timestamps]
    )
    return [list(x.split(cache.layers[0].offsets.diff().tolist())) for x in tensors]


def assert_holds(cache, expected):
    """expected: as `columns`."""
    assert cache.num_segments == len(expected[0])
    for layer in cache.layers:
        assert (
            layer.host_lengths.tolist()
            == layer.offsets.diff().tolist()
            == [len(x) for x in expected[0]]
        )
        assert layer.segmentation_id == cache.layers[0].segmentation_id
    for found, wanted in zip(columns(cache), expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("timed", [False, True], ids=["plain", "timed"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_select(lengths, timed):
    cache = cache_of(lengths, timed, max_seqlen=9, max_rows=8)
    for count in (0, 1, len(lengths), 2 * len(lengths)):
        segments = [random.randrange(len(lengths)) for _ in range(count if lengths else 0)]
        selected = cache.select(segments)
        assert_holds(selected, [[x[b] for b in segments] for x in columns(cache)])
        assert (selected.layers[0].max_seqlen, selected.max_rows) == (9, 8)


@pytest.mark.parametrize(
    "of", [list, tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)]
)
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
def test_select_takes_sequences_and_tensors(of, offsets_dtype):
    cache = cache_of([3, 0, 1], offsets_dtype=offsets_dtype)
    assert_holds(cache.select(of([2, 0, 2])), [[x[b] for b in (2, 0, 2)] for x in columns(cache)])


@pytest.mark.parametrize("timed", [False, True], ids=["plain", "timed"])
@pytest.mark.parametrize("max_rows", [None, 1, 4, 100])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_append(lengths, max_rows, timed):
    for new_lengths in ([0] * len(lengths), [1] * len(lengths), lengths[::-1]):
        cache, new = (cache_of(x, timed, max_rows=max_rows) for x in (lengths, new_lengths))
        grown, kept = cache.append(new), slice(-max_rows if max_rows else None, None)
        assert_holds(
            grown,
            [
                [torch.cat(rows)[kept] for rows in zip(*x)]
                for x in zip(columns(cache), columns(new))
            ],
        )
        assert grown.max_rows == max_rows


@pytest.mark.parametrize(
    "old, new, max_rows, expected",
    [(5, 2, None, 7), (None, 2, None, None), (5, None, 6, None), (5, 2, 6, 6), (5, 2, 9, 7)],
)
def test_max_seqlen_of_a_grown_cache(old, new, max_rows, expected):
    parts = [cache_of([1, 2], max_seqlen=x, max_rows=max_rows) for x in (old, new)]
    assert parts[0].append(parts[1]).layers[0].max_seqlen == expected


@pytest.mark.parametrize("max_rows", [None, 3])
def test_gradients(max_rows):
    cache, new = cache_of([3, 0, 1], max_rows=max_rows), cache_of([1, 2, 0], max_rows=max_rows)
    tensors = [x.values for part in (cache, new) for x in part.layers]

    def grown(*values):
        parts = [
            jm.HistoryCache(
                tuple(x.with_values(y) for x, y in zip(part.layers, pair)), None, max_rows
            )
            for part, pair in ((cache, values[:2]), (new, values[2:]))
        ]
        return tuple(x.values for x in parts[0].append(parts[1]).select([2, 0, 0]).layers)

    assert torch.autograd.gradcheck(grown, tensors)


def test_the_rows_are_copies():
    cache, new = cache_of([2, 1]), cache_of([0, 0])
    for made in (cache.select([0, 1]), cache.append(new)):
        for x, y in zip(made.layers, cache.layers):
            assert torch.equal(x.values, y.values) and x.values.data_ptr() != y.values.data_ptr()


def test_keys_of_a_keyed_jagged_tensor():
    torchrec = pytest.importorskip("torchrec")
    history = torchrec.KeyedJaggedTensor(
        ["a", "b"], torch.randn(5, WIDTH), lengths=torch.tensor([2, 3])
    )
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    cache = layer.cache(history)
    assert cache.append(layer.append(history, cache)[1]).layers[0].feature_keys == ["a", "b"]
    assert cache.select([1, 0]).layers[0].feature_keys is None, (
        "segments in another order belong to other keys"
    )


@pytest.mark.parametrize("name", ["plain", "short", "all"])
def test_scores_of_selected_histories(name):
    """Those of one user at a time."""
    timeline, stack, segments = (
        Timeline([[4, 0, 7, 1, 0]], [2, 1, 4, 0, 3]),
        hstu(HSTU_CONFIGS[name]),
        [2, 0, 2, 1, 4],
    )
    timed = stack.config.relative_time > 0
    cache = stack.cache(jagged(timeline.take(timeline.rows, 0)), **timeline.times_of(0, timed))

    def scores(chosen, cache):
        targets = [timeline.take(timeline.rows, -1)[b] for b in chosen]
        times = (
            dict(timestamps=timeline.times, query_timestamps=timeline.next_times) if timed else {}
        )
        times = {
            key: torch.cat([timeline.take(x, -1)[b] for b in chosen]) for key, x in times.items()
        }
        return stack.score(jagged(targets), cache, **times).values

    expected = torch.cat([scores([b], cache.select([b])) for b in segments])
    torch.testing.assert_close(scores(segments, cache.select(segments)), expected)


def test_learning_through_a_grown_cache():
    """Parameters get the gradients of the full forward."""
    layer = jm.JaggedTargetAttention(WIDTH, HEADS).double()
    rows, targets = (
        torch.randn(6, WIDTH, dtype=torch.float64),
        torch.randn(2, 3, WIDTH, dtype=torch.float64),
    )
    layer(targets, (rows, torch.tensor([0, 2, 6]))).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    cache = layer.cache((rows[[0, 2, 3]], torch.tensor([0, 1, 3])))
    cache = cache.append(layer.append((rows[[1, 4, 5]], torch.tensor([0, 1, 3])), cache)[1])
    layer.score(targets, cache).square().sum().backward()
    for p, grad in zip(layer.parameters(), expected):
        torch.testing.assert_close(p.grad, grad)


# -- errors ----------------------------------------------------------------------------------------

SEGMENTS = {
    "^segments must be a tensor or a sequence of ints, got str": "ab",
    "^segments must be int32 or int64, got torch.float32": [0.5],
    "^segments must be int32 or int64, got torch.bool": torch.tensor([True]),
    r"^segments must be 1-D, got shape \[1, 1\]": [[0]],
    r"^segments must be 0 to B - 1 = 2, got 3": [0, 3],
    r"^segments must be 0 to B - 1 = 2, got -1": torch.tensor([-1]),
    "^segments must be on a device with values": torch.tensor([1], device="meta"),
}


@pytest.mark.parametrize("message, segments", SEGMENTS.items())
def test_wrong_segments(message, segments):
    with pytest.raises((TypeError, ValueError), match=message):
        cache_of([3, 0, 1]).select(segments)


def _with(**fields):
    return lambda cache: jm.HistoryCache(
        **dict(layers=cache.layers, timestamps=cache.timestamps, max_rows=cache.max_rows) | fields
    )


def _mapped(change):
    return lambda cache: jm.HistoryCache(tuple(change(x) for x in cache.layers))


NEW = {
    "^new must be a HistoryCache, got tuple": lambda cache: cache.layers,
    "^new must have the cache's number of layers, 2, got 1": lambda cache: jm.HistoryCache(
        cache.layers[:1]
    ),
    "^new must have at least 1 layer, got 0": _with(layers=()),
    "^new must be a HistoryCache of Jagged layers, got Tensor": lambda cache: jm.HistoryCache(
        (cache.layers[0].values,) * 2
    ),
    r"^new must have the cache's heads and widths, \[\[2, 6\], \[1, 3\]\], got \[\[2\], \[1\]\]": (
        _mapped(lambda x: x.with_values(x.values[..., 0]))
    ),
    "^new must have the cache's dtypes, .*float64.*, got .*float32": _mapped(
        lambda x: x.with_values(x.values.float())
    ),
    "^new must have the cache's devices, .*cpu.*, got .*meta": _mapped(lambda x: x.to("meta")),
    "^new must have the cache's max_rows, None, got 4": _with(max_rows=4),
    "^new must have the cache's timestamps, False, got True": _with(timestamps=torch.arange(4)),
    r"^new must have as many rows in each layer and in its timestamps, got \[4, 4, 3\]": _with(
        timestamps=torch.arange(3)
    ),
    "^new and cache must have the same number of segments, got 2 and 3": lambda cache: cache.select(
        [0, 2]
    ),
}


@pytest.mark.parametrize("message, change", NEW.items())
def test_wrong_new_rows(message, change):
    cache = cache_of([3, 0, 1])
    with pytest.raises((TypeError, ValueError), match=message):
        cache.append(change(cache))


def test_lengths_on_meta():
    cache = jm.JaggedTargetAttention(WIDTH, HEADS, device="meta").cache(
        (torch.ones(5, WIDTH, device="meta"), torch.ones(3).long().to("meta"))
    )
    with pytest.raises(ValueError, match="^cache's offsets must be on a device with values"):
        cache.select([0])
    assert cache.append(cache).layers[0].values.shape[0] == 10
