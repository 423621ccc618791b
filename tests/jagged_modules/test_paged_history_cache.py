"""PagedHistoryCache: pages, eviction, budgets, versions of weights, threads, 10^5 users."""

import gc
import random
import threading

import pytest
import torch
from jagged_kernels.attention.pages import SMALLEST_PAGE

import jagged_modules as jm
from jagged_modules.serving import storage

from .caching import Rows, Timeline, hstu, jagged, rows_of
from .hstu_cases import HEADS, WIDTH, config_of
from .processes import WORKERS, in_threads

ROW_BYTES = 4 * 2  # of Rows on fp32 rows of width 2


def rows_for(user: int, begin: int, end: int) -> torch.Tensor:
    """Rows [n, 2] that tell the user and the position."""
    return torch.stack(
        [torch.full((end - begin,), float(user)), torch.arange(float(begin), end)], dim=1
    )


def cache_of(
    pages: int, page_rows: int = 4, max_cached_rows: int | None = None
) -> jm.PagedHistoryCache:
    return jm.PagedHistoryCache(Rows(max_cached_rows), pages * page_rows * ROW_BYTES, page_rows)


def put(cache: jm.PagedHistoryCache, lengths: dict[int, int]) -> None:
    cache.put(list(lengths), jagged([rows_for(user, 0, n) for user, n in lengths.items()]))


def assert_holds(cache: jm.PagedHistoryCache, ranges: dict[int, tuple[int, int]]) -> None:
    """The cache returns these rows of each user, bit by bit."""
    kept = rows_of(cache.select(list(ranges)))
    for (user, (begin, end)), rows in zip(ranges.items(), kept, strict=True):
        assert torch.equal(rows, rows_for(user, begin, end)), user


# -- pages -----------------------------------------------------------------------------------------


def test_any_order_and_repeated_users():
    cache = cache_of(9)
    put(cache, {7: 5, 8: 0, 9: 4})
    kept = rows_of(cache.select([9, 7, 8, 9]))
    assert [rows.tolist() for rows in kept] == [
        rows_for(u, 0, n).tolist() for u, n in ((9, 4), (7, 5), (8, 0), (9, 4))
    ]


@pytest.mark.parametrize("limit", [None, 6])
def test_random_calls_equal_a_dictionary(limit):
    """Puts, appends and evictions of 12 users in a budget that rarely has room for them, for 400
    steps."""
    generator, cache, expected = random.Random(0), cache_of(20, 4, limit), {}
    for step in range(400):
        users = generator.sample(range(12), generator.randint(1, 3))
        counts = [generator.randint(0, 9) for _ in users]
        if step % 7 == 6:
            cache.evict(users)
        elif set(users) <= set(expected) and all(
            expected[u][1] - expected[u][0] < 16 for u in users
        ):
            ends = [expected[u][1] for u in users]
            cache.append(
                users, jagged([rows_for(u, end, end + n) for u, end, n in zip(users, ends, counts)])
            )
            for u, end, n in zip(users, ends, counts):
                begin = expected[u][0] if limit is None else max(expected[u][0], end + n - limit)
                expected[u] = (begin, end + n)
        else:
            put(cache, dict(zip(users, counts)))
            expected |= {u: (0, n) for u, n in zip(users, counts)}
        expected = {u: x for u, x in expected.items() if u in cache}
        assert_holds(cache, expected)
        assert cache.statistics().rows == sum(end - begin for begin, end in expected.values())
        assert cache.statistics().bytes <= cache.max_bytes
    assert cache.statistics().evictions > 20


@pytest.mark.parametrize("page_rows, on_host", [(16, False), (128, False), (128, True)])
def test_slots(page_rows, on_host):
    """After each of 200 random writes: no two users have one slot, that of a user is the same as
    before if nothing of this user was written, and selections in pages have the same ones."""
    generator, cache = random.Random(0), cache_of(20, page_rows)
    cache.layer.takes_host_tables = on_host
    cache = jm.PagedHistoryCache(cache.layer, cache.max_bytes, page_rows)
    assert cache.num_slots == 0 == len(cache.slots([]))
    put(cache, {0: 3})
    assert cache.num_slots == 20
    known = {}
    for _ in range(200):
        users = generator.sample(range(12), generator.randint(1, 3))
        counts = [generator.randint(0, page_rows) for _ in users]
        if all(user in cache for user in users) and generator.random() < 0.8:
            cache.append(users, jagged([rows_for(*x) for x in zip(users, counts, counts)]))
            cache.append(users, jagged([rows_for(user, 0, n) for user, n in zip(users, counts)]))
        else:
            put(cache, dict(zip(users, counts)))
        cached = cache.users()
        slots = cache.slots(cached)
        assert slots.dtype == torch.int64 and slots.device.type == "cpu"
        lengths = cache.select(cached).layers[0].offsets.diff()
        assert torch.equal(slots == 0, lengths == 0)
        taken = slots[slots > 0].tolist()
        assert len(set(taken)) == len(taken) and all(1 <= slot <= 20 for slot in taken)
        found = dict(zip(cached, slots.tolist()))
        assert all(known.get(u, slot) == slot for u, slot in found.items() if u not in users)
        known = found
        if cache.reads_pages:
            assert torch.equal(cache.select(cached).layers[0].slots, slots)
    assert cache.statistics().evictions
    with pytest.raises(KeyError, match="99"):
        cache.slots([cached[0], 99])


def test_the_least_recently_used_users_lose_their_pages():
    cache = cache_of(4)
    put(cache, {1: 4, 2: 4, 3: 4, 4: 4})
    cache.select([1])
    cache.append([2], jagged([rows_for(2, 4, 4)]))
    put(cache, {5: 8})
    assert [user in cache for user in (1, 2, 3, 4, 5)] == [True, True, False, False, True]
    assert cache.statistics().evictions == 2
    assert_holds(cache, {1: (0, 4), 2: (0, 4), 5: (0, 8)})


def test_the_cached_users_by_their_last_use():
    layer = Rows()
    cache = jm.PagedHistoryCache(layer, 2**20)
    assert cache.users() == []
    cache.put(["a", "b", "c"], jagged([torch.randn(2, 2)] * 3))
    cache.select(["a"])
    assert cache.users() == ["b", "c", "a"]
    with torch.no_grad():
        layer.weight.add_(1)
    assert cache.users() == []
    cache.put(["d"], jagged([torch.randn(2, 2)]))
    assert cache.users() == ["d"] and len(cache) == 4


def test_histories_that_begin_anew():
    """The events of these users are all of their history, whether or not they were cached."""
    cache, rows = jm.PagedHistoryCache(Rows(), 2**20), torch.randn(5, 2)
    with pytest.raises(KeyError, match="user 'a' is not cached: put the history first"):
        cache.append(["a"], jagged([rows]), anew=["a"])
    cache.put(["a", "b"], jagged([rows, rows]))
    cache.append(["c", "a", "b"], jagged([rows[:2], rows[:1], rows[3:]]), anew=["c", "b"])
    expected = torch.cat([rows, rows[:1]]), rows[3:], rows[:2]
    found = rows_of(cache.select(["a", "b", "c"]))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(ValueError, match="^anew must be of the users, got 'b'$"):
        cache.append(["a"], jagged([rows]), anew=["b"])
    with pytest.raises(TypeError, match="^users must be a list or a tuple of keys, got str$"):
        cache.append(["a"], jagged([rows]), anew="a")


def test_a_failed_call_caches_no_history_anew():
    cache = cache_of(3)
    put(cache, {1: 4, 2: 4})
    with pytest.raises(jm.CacheFull):
        cache.append([1, 2], jagged([rows_for(1, 4, 5), rows_for(2, 0, 13)]), anew=[2])
    assert_holds(cache, {1: (0, 4)})
    assert 2 not in cache and cache.statistics().bytes == cache.max_bytes // 3


@pytest.mark.parametrize("kind,page_rows", [("rows", 4), ("hstu", 16), ("hstu", 128)])
def test_histories_that_begin_anew_are_not_cached_before_they_are_written(kind, page_rows):
    """What other threads find while the layer computes: they would score an empty history."""
    layer = Rows() if kind == "rows" else hstu(config_of(), dtype=torch.float32)
    width, append, found = 2 if kind == "rows" else WIDTH, layer.append, []

    def noted(*args, **options):
        found.append((cache.missing(["a", "b", "c"]), cache.users(), "a" in cache, "b" in cache))
        with pytest.raises(KeyError, match="^\"user 'b' is not cached: put the history first\"$"):
            cache.select(["a", "b"])
        return append(*args, **options)

    cache = jm.PagedHistoryCache(layer, 2**22, page_rows)
    cache.put(["a", "b"], jagged([torch.randn(5, width)] * 2))
    layer.append = noted
    cache.append(["c", "a", "b"], jagged([torch.randn(2, width)] * 3), anew=["c", "b"])
    assert found == [(["b", "c"], ["a"], True, False)]
    assert cache.missing(["a", "b", "c"]) == []
    assert cache.select(["a", "b", "c"]).layers[0].offsets.tolist() == [0, 7, 9, 11]
    with pytest.raises(KeyError, match="user 'x' is not cached"):
        cache.append(["b", "x"], jagged([torch.randn(1, width)] * 2), anew=["b"])
    assert "b" not in cache


def test_the_users_of_a_call_do_not_evict_one_another():
    cache = cache_of(3)
    put(cache, {1: 4, 2: 4, 3: 4})
    cache.append([2, 1], jagged([rows_for(2, 4, 5), rows_for(1, 4, 4)]))
    assert_holds(cache, {1: (0, 4), 2: (0, 5)})
    assert 3 not in cache


def test_more_than_the_budget_changes_nothing():
    cache = cache_of(3)
    put(cache, {1: 4, 2: 8})
    message = r"^max_bytes allows 3 pages of 4 rows, but the histories of these 1 users need 4$"
    with pytest.raises(jm.CacheFull, match=message):
        put(cache, {1: 13})
    with pytest.raises(jm.CacheFull, match=message):
        cache.append([2], jagged([rows_for(2, 8, 13)]))
    with pytest.raises(
        jm.CacheFull, match="^max_bytes must be at least a page of 16 rows, 128, got 100$"
    ):
        jm.PagedHistoryCache(Rows(), 100).put([1], jagged([rows_for(1, 0, 1)]))
    assert_holds(cache, {1: (0, 4), 2: (0, 8)})
    assert cache.statistics() == jm.CacheStatistics(2, 12, 96, 96, 0, 0, 0)


def test_statistics_and_forgetting():
    cache = cache_of(10)
    assert (
        cache.statistics() == jm.CacheStatistics(0, 0, 0, cache.max_bytes, 0, 0, 0)
        and len(cache) == 0
    )
    put(cache, {1: 5, 2: 1})
    assert cache.missing([1, 3, 2, 4]) == [3, 4]
    assert cache.statistics() == jm.CacheStatistics(
        2, 6, 3 * 4 * ROW_BYTES, cache.max_bytes, 2, 2, 0
    )
    storage = cache._rows.values.data_ptr()
    cache.evict([1, 3])
    assert len(cache) == 1 and 1 not in cache
    cache.clear()
    assert len(cache) == 0
    put(cache, {1: 40})
    assert_holds(cache, {1: (0, 40)})
    assert cache._rows.values.data_ptr() == storage


def test_pages_made_in_inference_mode_serve_outside_of_it():
    stack, timeline = hstu(config_of()), Timeline([[3, 2], [1, 1]], [0, 0])
    cache = jm.PagedHistoryCache(stack, 2**20)
    with torch.inference_mode():
        cache.put([1, 2], jagged(timeline.take(timeline.rows, 0)))
    cache.append([1, 2], jagged(timeline.take(timeline.rows, 1)))
    assert cache.select([1, 2]).layers[2].offsets.tolist() == [0, 4, 7]


def test_a_score_is_not_changed_by_later_calls():
    cache = cache_of(3)
    put(cache, {1: 4})
    before = cache.select([1])
    put(cache, {2: 12})
    assert torch.equal(rows_of(before)[0], rows_for(1, 0, 4))


# -- weights ---------------------------------------------------------------------------------------


def in_place(layer):
    with torch.no_grad():
        layer.layers[0].out_proj.weight += 1


def loaded(layer):
    layer.load_state_dict(hstu(config_of()).state_dict())


def replaced(layer):
    layer.layers[1].output_norm.weight = torch.nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))


def fused_step(layer):
    """torch counts no write of it."""
    parameter = layer.layers[0].out_proj.weight
    parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(layer.parameters(), fused=True).step()


@pytest.mark.parametrize("change", [in_place, loaded, replaced, fused_step])
def test_rows_of_other_weights_are_not_cached(change):
    timeline, stack = Timeline([[3, 2], [1, 1]], [1, 1]), hstu(config_of())
    cache, history = jm.PagedHistoryCache(stack, 2**20), jagged(timeline.take(timeline.rows, 0))
    cache.put(["a", "b"], history)
    assert "a" in cache
    change(stack)
    assert "a" not in cache and cache.missing(["a", "b"]) == ["a", "b"]
    for call in (
        lambda: cache.select(["a"]),
        lambda: cache.append(["a"], jagged(timeline.take(timeline.rows, 1)[:1])),
    ):
        with pytest.raises(
            KeyError, match="user 'a' was cached with other weights: put the history first"
        ):
            call()
    cache.put(["b"], jagged(timeline.take(timeline.rows, 0)[1:]))
    kept = cache.select(["b"]).layers
    for x, y in zip(kept, stack.cache(jagged(timeline.take(timeline.rows, 0)[1:])).layers):
        assert torch.equal(x.values, y.values)


def test_steps_that_change_nothing_of_the_layer():
    """Those of other parameters, and those behind the cache's life."""
    layer, other = jm.JaggedTargetAttention(8, 2), torch.nn.Linear(2, 2)
    cache = jm.PagedHistoryCache(layer, 2**20)
    cache.put(["a"], (torch.randn(3, 8), torch.tensor([0, 3])))
    for x in (*layer.parameters(), *other.parameters()):
        x.grad = torch.ones_like(x)
    own, others = layer.q_proj.weight, other.weight
    versions = own._version, others._version
    torch.optim.SGD(other.parameters(), fused=True).step()
    assert "a" in cache and (own._version, others._version) == versions
    step = torch.optim.SGD(layer.parameters(), fused=True).step
    step()
    assert "a" not in cache and own._version == versions[0] + 1
    del cache
    gc.collect()
    step()
    assert own._version == versions[0] + 1


def test_new_weights_at_the_address_of_old_ones():
    """Memory of replaced weights is free. Here weights that are replaced twice get the memory of
    those that computed the rows."""
    layer = jm.JaggedTargetAttention(8, 2).eval()
    cache, parameter = jm.PagedHistoryCache(layer, 2**20), next(layer.parameters())
    memory = parameter.detach().clone(), parameter.detach().clone()
    for number in range(4):
        parameter.data = memory[number % 2].mul_(1.5)
        assert "a" not in cache
        if number == 0:
            cache.put(["a"], (torch.randn(3, 8), torch.tensor([0, 3])))
            assert "a" in cache


# -- threads and size ------------------------------------------------------------------------------


def test_threads_append_and_select():
    """Each thread appends to its own users and selects those of all threads, in a budget that
    evicts: every selected user has the rows from 0 to some length, without a gap, and its owner
    finds exactly what was appended."""
    cache, lost, selected = cache_of(60), [0] * WORKERS, [0] * WORKERS

    def work(worker: int) -> None:
        generator, lengths = random.Random(worker), {}
        for _ in range(150):
            user, count = worker * 100 + generator.randrange(6), generator.randint(0, 5)
            try:
                if lengths.get(user, 0) + count > 30 or user not in lengths:
                    raise KeyError
                cache.append([user], jagged([rows_for(user, lengths[user], lengths[user] + count)]))
                lengths[user] += count
            except KeyError:
                lost[worker] += user in lengths
                put(cache, {user: count})
                lengths[user] = count
            others = [
                x for x in (w * 100 + generator.randrange(6) for w in range(WORKERS)) if x in cache
            ]
            try:
                kept = rows_of(cache.select([user, *others]))
            except KeyError:  # evicted in between
                continue
            selected[worker] += len(others)
            assert len(kept[0]) == lengths[user]
            for other, rows in zip([user, *others], kept):
                assert torch.equal(rows, rows_for(other, 0, len(rows)))

    in_threads(work)
    assert sum(lost) > 0 and min(selected) > 50
    assert cache.statistics().evictions > 0


@pytest.mark.parametrize("page_rows", [4, 128])
def test_threads_score_while_others_append(page_rows):
    """Scores of one thread equal those of the full forward at some number of events, while another
    thread appends one by one."""
    timeline, stack = Timeline([[2, 3], *[[1, 1]] * 12], [1, 1]), hstu(config_of(), 2)
    targets, cache = timeline.take(timeline.rows, -1), jm.PagedHistoryCache(stack, 2**20, page_rows)

    def expected(events: int) -> torch.Tensor:
        rows = [
            torch.cat([x[: start + events], t])
            for x, start, t in zip(timeline.rows, timeline.parts[0], targets)
        ]
        full = stack(jagged(rows), torch.tensor([1, 1]))
        return full.values[full.offsets[1:] - 1]

    with torch.no_grad():
        possible = [expected(events) for events in range(13)]
        cache.put([0, 1], jagged(timeline.take(timeline.rows, 0)))
        scores, done = [], threading.Event()

        def score() -> None:
            with torch.no_grad():
                while not done.is_set():
                    scores.append(stack.score(jagged(targets), cache.select([0, 1])).values)

        thread = threading.Thread(target=score)
        thread.start()
        for i in range(1, 13):
            cache.append([0, 1], jagged(timeline.take(timeline.rows, i)))
        done.set()
        thread.join()
        scores.append(stack.score(jagged(targets), cache.select([0, 1])).values)
    assert len(scores) > 3
    for found in scores:
        torch.testing.assert_close(found, min(possible, key=lambda x: (x - found).abs().max()))
    torch.testing.assert_close(scores[-1], possible[-1])


def test_a_hundred_thousand_users():
    users, size = 100_000, 20_000
    lengths = torch.randint(1, 9, (users,), generator=torch.Generator().manual_seed(1)).tolist()
    cache = cache_of(90_000, 4)
    for begin in range(0, users, size):
        some = range(begin, begin + size)
        counts = torch.tensor(lengths[begin : begin + size])
        user, position = (
            torch.arange(begin, begin + size).repeat_interleave(counts),
            torch.cat([torch.arange(n) for n in counts.tolist()]),
        )
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        cache.put(list(some), jm.Jagged(torch.stack([user, position], dim=1).float(), offsets))
    found = cache.statistics()
    pages = [-(-n // 4) for n in lengths]
    assert found.evictions == users - found.users > 20_000
    assert (
        found.bytes
        == sum(pages[-found.users :]) * 4 * ROW_BYTES
        <= cache.max_bytes
        < sum(pages[-found.users - 1 :]) * 4 * ROW_BYTES
    )
    some = random.Random(0).sample(range(users - found.users, users), 1000)
    assert_holds(cache, {user: (0, lengths[user]) for user in some})


# -- bad input -------------------------------------------------------------------------------------


def test_users_that_are_not_cached():
    cache = cache_of(9)
    for call in (lambda: cache.select([1]), lambda: cache.append([1], jagged([rows_for(1, 0, 1)]))):
        with pytest.raises(KeyError, match="user 1 is not cached: put the history first"):
            call()
    nobody = jagged([rows_for(1, 0, 1)]).values[:0], torch.tensor([0])
    for call in (lambda: cache.select([]), lambda: cache.append([], nobody)):
        with pytest.raises(
            KeyError, match="no user is given, and nothing is cached yet: put a history first"
        ):
            call()
    put(cache, {1: 4})
    with pytest.raises(KeyError, match="user 2 is not cached"):
        cache.select([1, 2])


def test_bad_arguments():
    cache, one = cache_of(9), jagged([rows_for(1, 0, 1)])
    put(cache, {1: 1, 2: 1})
    two = jagged([rows_for(1, 1, 2), rows_for(1, 1, 2)])
    for call, error, message in (
        (
            lambda: jm.PagedHistoryCache(torch.nn.Linear(2, 2), 1),
            TypeError,
            "^layer must be an HSTUStack, JaggedTargetAttention or JaggedGDPA, got Linear",
        ),
        (
            lambda: jm.PagedHistoryCache("x", 1),
            TypeError,
            "^layer must be a layer with cache and append, got str",
        ),
        (
            lambda: jm.PagedHistoryCache(Rows(), 0),
            ValueError,
            "^max_bytes must be at least 1, got 0",
        ),
        (
            lambda: jm.PagedHistoryCache(Rows(), 1.5),
            TypeError,
            "^max_bytes must be an int, got float",
        ),
        (
            lambda: jm.PagedHistoryCache(Rows(), 1, 0),
            ValueError,
            "^page_rows must be at least 1, got 0",
        ),
        (
            lambda: cache.put([1, 2], one),
            ValueError,
            "^users must be one per segment of history, 1, got 2",
        ),
        (
            lambda: cache.append([1, 2], one),
            ValueError,
            "^users must be one per segment of events, 1, got 2",
        ),
        (lambda: cache.put([1, 1], two), ValueError, "^users must not be repeated, got 1 twice"),
        (lambda: cache.append([2, 2], two), ValueError, "^users must not be repeated, got 2 twice"),
        (
            lambda: cache.put({1}, one),
            TypeError,
            "^users must be a list or a tuple of keys, got set",
        ),
        (
            lambda: cache.append({1}, one),
            TypeError,
            "^users must be a list or a tuple of keys, got set",
        ),
        (
            lambda: cache.select(user for user in [1, 2]),
            TypeError,
            "^users must be a list or a tuple of keys, got generator",
        ),
        (
            lambda: cache.select("12"),
            TypeError,
            "^users must be a list or a tuple of keys, got str",
        ),
        (
            lambda: cache.evict("12"),
            TypeError,
            "^users must be an iterable of keys, got the one key '12'",
        ),
        (
            lambda: cache.missing(b"12"),
            TypeError,
            "^users must be an iterable of keys, got the one key b'12'",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    assert_holds(cache, {1: (0, 1), 2: (0, 1)})


def test_a_layer_that_changed_its_dtype_or_sizes():
    layer, x = (
        jm.JaggedTargetAttention(WIDTH, HEADS),
        (torch.randn(5, WIDTH), torch.tensor([0, 2, 5])),
    )
    cache = jm.PagedHistoryCache(layer, 2**20)
    cache.put([1, 2], x)
    layer.double()
    with pytest.raises(
        ValueError, match="must keep the dtype of the first put, torch.float32, got torch.float64$"
    ):
        cache.put([1, 2], (x[0].double(), x[1]))
    assert len(cache) == 2 and cache.missing([1, 2]) == [1, 2]
    rows = cache_of(9)
    put(rows, {1: 3})
    with pytest.raises(
        ValueError, match=r"must keep the shape of the first put, \(1, 1, 2\), got \(1, 1, 3\)$"
    ):
        rows.append([1], (torch.randn(1, 3), torch.tensor([0, 1])))
    assert_holds(rows, {1: (0, 3)})


def _fail_after(write):
    def failing(*args):
        write(*args)
        raise ZeroDivisionError

    return failing


def test_users_whose_histories_could_not_be_copied_are_forgotten(monkeypatch):
    cache = cache_of(9)
    put(cache, {1: 3, 2: 3})
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_rows", _fail_after(storage.write_rows))
        with pytest.raises(ZeroDivisionError):
            put(cache, {1: 4})
    assert 1 not in cache
    assert_holds(cache, {2: (0, 3)})
    assert cache.statistics().rows == 3


@pytest.mark.parametrize("is_read", [False, True])
def test_events_that_could_not_be_copied_change_nothing(monkeypatch, is_read):
    """They evict user 1, and are written to its pages."""
    cache = cache_of(6, SMALLEST_PAGE)
    put(cache, {1: 300, 2: 100, 3: 5})
    selected, before = cache.select([3]) if is_read else None, cache.statistics()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_rows", _fail_after(storage.write_rows))
        with pytest.raises(ZeroDivisionError):
            cache.append([2], jagged([rows_for(2, 100, 400)]))
    assert cache.statistics() == before
    assert cache.users() == [1, 3, 2]
    assert_holds(cache, {1: (0, 300), 2: (0, 100), 3: (0, 5)})
    cache.append([2], jagged([rows_for(2, 100, 400)]))
    assert cache.users() == [3, 2] and cache.statistics().evictions == 1
    assert_holds(cache, {2: (0, 400), 3: (0, 5)})
    assert selected is None or torch.equal(rows_of(selected)[0], rows_for(3, 0, 5))


def test_the_layers_errors_change_nothing():
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    cache, x = jm.PagedHistoryCache(layer, 2**20), (torch.randn(5, WIDTH), torch.tensor([0, 2, 5]))
    cache.put([1, 2], x)
    before = cache.select([1, 2]).layers[0].values
    for owner, call in (("history's", cache.put), ("events'", cache.append)):
        with pytest.raises(
            ValueError, match=rf"^{owner} values must have shape \[L, 8\], got \[5, 7\]"
        ):
            call([1, 2], (x[0][:, :7], x[1]))
    assert torch.equal(cache.select([1, 2]).layers[0].values, before)
