"""Histories that a PagedHistoryCache selects in pages: scores, pins, streams of calls, threads."""

import copy
import gc
import random

import pytest
import torch
from torch.utils._pytree import tree_leaves

import jagged_modules as jm
from jagged_modules import containers
from jagged_modules.containers.pages import PagedRows
from jagged_modules.serving.storage import RowStorage

from .caching import HSTU_CONFIGS, Rows, Timeline, hstu, jagged, rows_of
from .hstu_cases import HEADS, WIDTH
from .processes import WORKERS, in_threads
from .test_paged_history_cache import cache_of, put, rows_for

PAGE = 128
HISTORIES, TARGETS = [300, 0, 128, 257, 5], [2, 1, 3, 0, 4]


def is_in_pages(kv: jm.HistoryCache) -> bool:
    """Whether no row of any layer has been copied."""
    return all(isinstance(x, PagedRows) and "values" not in vars(x) for x in kv.layers)


def test_parsing_segments_copies_no_row():
    layer, timeline = layers()["target"]().double(), Timeline([HISTORIES], TARGETS)
    cache = jm.PagedHistoryCache(layer, 2**24, PAGE)
    cache.put(list("abcde"), jagged(timeline.take(timeline.rows, 0)))
    kv = cache.select(list("abcde"))
    kv.layers[0].parsed("history")
    assert is_in_pages(kv)


# -- scores ----------------------------------------------------------------------------------------


def layers() -> dict:
    config = jm.HSTUConfig(scaling_seqlen=400, head_dim=3, linear_dim=5)
    timed = jm.HSTUConfig(scaling_seqlen=400, relative_position=400, relative_time=6)
    grouped = jm.GDPAConfig(qk_norm=True, num_kv_heads=1, head_dim=6)
    return {
        "target": lambda: jm.JaggedTargetAttention(WIDTH, HEADS),
        "gdpa": lambda: jm.JaggedGDPA(
            WIDTH, HEADS, "softmax", jm.AttentionMask(causal=True), grouped
        ),
        "hstu": lambda: hstu(config),
        "hstu-timed": lambda: hstu(timed),
    }


@pytest.mark.parametrize("name", layers())
def test_scores_equal_those_of_copied_rows(name):
    """Histories of up to three pages; their last rows are appended."""
    layer, timed = layers()[name]().double().eval(), name == "hstu-timed"
    timeline = Timeline([HISTORIES, [1, 2, 0, 3, 0]], TARGETS)
    caches = [jm.PagedHistoryCache(layer, 2**24, rows) for rows in (PAGE, 3)]
    users, targets = list("abcde"), jagged(timeline.take(timeline.rows, -1))
    for cache in caches:
        cache.put(users, jagged(timeline.take(timeline.rows, 0)), **timeline.times_of(0, timed))
        cache.append(users, jagged(timeline.take(timeline.rows, 1)), **timeline.times_of(1, timed))
    paged, copied = (cache.select(users) for cache in caches)
    with torch.no_grad():
        scores = layer.score(targets, paged, **timeline.times_of(-1, timed)).values
    assert is_in_pages(paged) and not isinstance(copied.layers[0], PagedRows)
    torch.testing.assert_close(
        scores, layer.score(targets, copied, **timeline.times_of(-1, timed)).values
    )


@pytest.mark.parametrize(
    "fields", [{}, {"max_attn_len": 200}, {"relative_position": 400}, {"relative_time": 6}], ids=str
)
def test_appended_events_are_written_to_pages_and_read_there(fields, monkeypatch):
    """No cached row of keys and values is copied, also where max_attn_len has cut a history within
    a page, and each layer attends once."""
    copied, attended = [], []
    gather, attend = containers.pages.gather_keys, jm.HSTULayer._attend
    monkeypatch.setattr(
        containers.pages, "gather_keys", lambda *args: copied.append(1) or gather(*args)
    )
    monkeypatch.setattr(RowStorage, "gather", lambda *_: copied.append(1))
    monkeypatch.setattr(
        jm.HSTULayer, "_attend", lambda *args: attended.append(args[-1]) or attend(*args)
    )
    timeline = Timeline([HISTORIES, [1, 2, 0, 3, 0], [0, 140, 1, 2, 3]], [0] * 5)
    layer, timed, users = (
        hstu(jm.HSTUConfig(scaling_seqlen=400, **fields)),
        "relative_time" in fields,
        list("abcde"),
    )
    cache = jm.PagedHistoryCache(layer, 2**24, PAGE)
    cache.put(users, jagged(timeline.take(timeline.rows, 0)), **timeline.times_of(0, timed))
    full = list(
        layer(jagged(timeline.rows), **timeline.times_of(None, timed)).values.split(
            timeline.lengths
        )
    )
    attended.clear()
    for i in (1, 2):
        out = cache.append(
            users, jagged(timeline.take(timeline.rows, i)), **timeline.times_of(i, timed)
        )
        torch.testing.assert_close(out.values, torch.cat(timeline.take(full, i)))
    assert not copied and len(attended) == 2 * len(layer.layers) and None not in attended
    cache.clear()
    cache.put(
        ["f"],
        jagged([torch.randn(0, WIDTH, dtype=torch.float64)]),
        **({"timestamps": torch.zeros(0).long()} if timed else {}),
    )
    assert cache.statistics().bytes == 0, "no page is pinned"


def test_relative_positions_of_a_cut_history():
    """The position table has no room for the rows of a page before the cut, so the rows that are
    seen are copied."""
    timeline, layer = (
        Timeline([[300], [1], [1]], [2]),
        hstu(jm.HSTUConfig(scaling_seqlen=9, max_attn_len=200, relative_position=203)),
    )
    cache = jm.PagedHistoryCache(layer, 2**24, PAGE)
    with pytest.raises(
        ValueError, match="segment of 300 rows, more than config.relative_position, 203"
    ):
        cache.put(["a"], jagged(timeline.take(timeline.rows, 0)))
    cache.put(["a"], jagged([timeline.rows[0][:150]]))
    for begin, end in ((150, 200), (200, 203), (203, 204)):
        cache.append(["a"], jagged([timeline.rows[0][begin:end]]))
    assert cache.statistics().rows == 200


def test_an_append_that_fails_leaves_the_cache_as_it_was(monkeypatch):
    """In the second layer, after the first has written rows. New pages are free again, and the next
    append overwrites the rows."""
    timeline, layer = (
        Timeline([[120, 5], [300, 1]], [0, 0], torch.float32),
        hstu(jm.HSTUConfig(scaling_seqlen=400), dtype=torch.float32),
    )
    cache = jm.PagedHistoryCache(layer, 2**24, PAGE)
    cache.put([0, 1], jagged(timeline.take(timeline.rows, 0)))
    before, rows = cache.statistics(), cache.select([0, 1]).layers[1].values
    with monkeypatch.context() as patch:
        patch.setattr(layer.layers[1], "_project", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.append([0, 1], jagged(timeline.take(timeline.rows, 1)))
    assert cache.statistics() == before and torch.equal(cache.select([0, 1]).layers[1].values, rows)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="the dtype of the first put, torch.float32, got torch.b"),
    ):
        cache.append([0, 1], jagged(timeline.take(timeline.rows, 1)))
    assert cache.statistics() == before
    full = layer(jagged(timeline.rows)).values.split(timeline.lengths)
    out = cache.append([0, 1], jagged(timeline.take(timeline.rows, 1)))
    torch.testing.assert_close(out.values, torch.cat(timeline.take(list(full), 1)))


@pytest.mark.parametrize("dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_an_append_that_fails_evicts_nobody(monkeypatch, dtype):
    """All pages are in use. The first layer has written the events to pages of two others, when the
    second one raises."""
    layer = hstu(jm.HSTUConfig(scaling_seqlen=400, relative_time=20), dtype=torch.float32)
    rows, users = [torch.randn(n, WIDTH) for n in (100, 200, 10, 50)], [0, 1, 2, 3]
    page = jm.PagedHistoryCache(layer, 2**24, PAGE, dtype)
    page.put([0], jagged(rows[:1]), timestamps=torch.arange(100))
    cache = jm.PagedHistoryCache(layer, 5 * page.statistics().bytes, PAGE, dtype)
    cache.put(users, jagged(rows), timestamps=torch.cat([torch.arange(len(x)) for x in rows]))
    before, kept = cache.statistics(), cache.select(users)
    times, values = kept.timestamps, [x.values for x in kept.layers]
    events, of_events = jagged([torch.randn(250, WIDTH)]), torch.arange(50, 300)
    del kept  # and its pins
    with monkeypatch.context() as patch:
        patch.setattr(layer.layers[1], "_project", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.append([3], events, timestamps=of_events)
    assert cache.statistics() == before and cache.users() == users
    found = cache.select(users)
    for x, y in zip([found.timestamps, *(x.values for x in found.layers)], [times, *values]):
        assert torch.equal(x, y)
    del found
    cache.append([3], events, timestamps=of_events)
    assert cache.users() == [2, 3] and cache.statistics().evictions == 2


def test_candidates_of_a_target_attention():
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    cache, rows = jm.PagedHistoryCache(layer, 2**22, PAGE), torch.randn(sum(HISTORIES), WIDTH)
    cache.put(list(range(5)), jagged(list(rows.split(HISTORIES))))
    history = jagged([rows.split(HISTORIES)[i] for i in (3, 0, 3)])
    with torch.no_grad():
        kv = cache.select([3, 0, 3])
        for targets, candidates in (
            (torch.randn(4, 2, WIDTH), torch.tensor([2, 0, 0, 1])),
            (torch.randn(3, 7, WIDTH), None),
        ):
            torch.testing.assert_close(
                layer.score(targets, kv, candidates), layer(targets, history, candidates)
            )
    assert is_in_pages(kv)


def test_gradients_of_targets_flow_through_copied_rows():
    layer, rows = jm.JaggedTargetAttention(WIDTH, HEADS), torch.randn(200, WIDTH)
    cache = jm.PagedHistoryCache(layer, 2**22, PAGE)
    cache.put([1], jagged([rows]))
    targets = torch.randn(1, 3, WIDTH, requires_grad=True)
    out = layer.score(targets, cache.select([1]))
    torch.testing.assert_close(out, layer(targets, jagged([rows])))
    (gradient,) = torch.autograd.grad(out.sum(), targets)
    assert gradient.any()


def test_a_cut_history_is_copied():
    """The last rows that max_attn_len keeps may begin within a page."""
    timeline, stack = Timeline([[130, 2], [1, 1], [1, 1]], [1, 2]), hstu(HSTU_CONFIGS["short"])
    cache = jm.PagedHistoryCache(stack, 2**24, PAGE)
    cache.put([0, 1], jagged(timeline.take(timeline.rows, 0)))
    for part in (1, 2):
        cache.append([0, 1], jagged(timeline.take(timeline.rows, part)))
    kv = cache.select([0, 1])
    assert not isinstance(kv.layers[0], PagedRows)
    full = stack(jagged(timeline.rows), torch.tensor([1, 2]))
    expected = torch.cat(timeline.take(list(full.values.split(timeline.lengths)), -1))
    torch.testing.assert_close(
        stack.score(jagged(timeline.take(timeline.rows, -1)), kv).values, expected
    )


def test_selected_histories_are_containers_as_any_other():
    """select, append, pytrees, copies and devices see the rows."""
    cache = cache_of(9, PAGE)
    put(cache, {7: 200, 8: 3})
    kv = cache.select([8, 7])
    (layer,), expected = kv.layers, [rows_for(8, 0, 3), rows_for(7, 0, 200)]
    assert (layer.num_rows, layer.num_segments, layer.device) == (
        203,
        2,
        torch.device("cpu"),
    ) and is_in_pages(kv)
    assert layer.host_lengths.tolist() == [3, 200]
    grown = kv.append(Rows().cache(jagged([rows_for(8, 3, 5), rows_for(7, 200, 200)])))
    for found in (
        kv,
        copy.deepcopy(kv),
        kv.select([0, 1]),
        jm.HistoryCache((layer.to("cpu"),)),
        jm.HistoryCache((layer.with_values(layer.values),)),
    ):
        assert all(torch.equal(x, y) for x, y in zip(rows_of(found), expected, strict=True))
    assert torch.equal(rows_of(grown)[0], rows_for(8, 0, 5))
    leaves = [layer.storage, layer.offsets, layer.pages.table, 203]
    assert all(x is y for x, y in zip(tree_leaves(kv), leaves, strict=True))


# -- pins ------------------------------------------------------------------------------------------


def test_pages_that_are_read_are_not_written_to():
    cache = cache_of(3, PAGE)
    put(cache, {1: 200})
    kv = cache.select([1])
    put(cache, {1: 5})  # takes the third page: the others are read
    message = (
        "^max_bytes allows 3 pages of 128 rows, of which selected histories read 2, but the"
        " histories of these 1 users need 2$"
    )
    with pytest.raises(jm.CacheFull, match=message):
        put(cache, {2: 200})
    assert 1 in cache and cache.statistics().bytes == cache.max_bytes
    put(cache, {2: 5})
    assert 1 not in cache and torch.equal(rows_of(kv)[0], rows_for(1, 0, 200))
    del kv
    put(cache, {3: 200})
    assert cache.statistics().bytes == cache.max_bytes
    assert torch.equal(rows_of(cache.select([2, 3]))[1], rows_for(3, 0, 200))


def test_a_layer_of_a_selected_history_pins_its_pages():
    cache = cache_of(1, PAGE)
    put(cache, {1: 100})
    layer = cache.select([1, 1]).layers[0]
    cache.clear()
    with pytest.raises(jm.CacheFull, match="of which selected histories read 1"):
        put(cache, {2: 1})
    assert torch.equal(layer.values, rows_for(1, 0, 100).repeat(2, 1)[:, None])
    del layer
    put(cache, {2: 1})
    assert len(cache) == 1 and cache.statistics().bytes == cache.max_bytes


def test_events_are_appended_to_a_page_that_is_read():
    cache = cache_of(2, PAGE)
    put(cache, {1: 100})
    before = cache.select([1])
    cache.append([1], jagged([rows_for(1, 100, 150)]))
    after = cache.select([1])
    assert torch.equal(rows_of(before)[0], rows_for(1, 0, 100)) and torch.equal(
        rows_of(after)[0], rows_for(1, 0, 150)
    )
    assert before.layers[0].storage.data_ptr() == after.layers[0].storage.data_ptr()


def test_random_calls_while_histories_are_read():
    """Selected histories, held for some steps, keep their rows; pages come back when they are
    dropped."""
    generator, cache, lengths, held, full = random.Random(0), cache_of(14, PAGE), {}, [], 0
    for step in range(400):
        user, count = generator.randrange(5), generator.randint(0, 250)
        try:
            if step % 11 == 0:
                cache.evict([user])
            elif user in cache and lengths[user] + count < 500:
                cache.append([user], jagged([rows_for(user, lengths[user], lengths[user] + count)]))
                lengths[user] += count
            else:
                put(cache, {user: count})
                lengths[user] = count
        except jm.CacheFull:
            full += 1
        users = [x for x in generator.sample(range(5), 2) if x in cache]
        if users:
            held.append((cache.select(users), [(x, lengths[x]) for x in users]))
        if len(held) > generator.randrange(6):
            kv, expected = held.pop(generator.randrange(len(held)))
            for (owner, length), rows in zip(expected, rows_of(kv), strict=True):
                assert torch.equal(rows, rows_for(owner, 0, length))
            del kv
    held.clear()
    assert 0 < full < 200
    put(cache, {9: 14 * PAGE})
    assert torch.equal(rows_of(cache.select([9]))[0], rows_for(9, 0, 14 * PAGE))


def test_threads_score_while_others_replace_append_and_evict():
    """Each thread scores histories of its users that it selected before its last write, while all
    threads write to one cache."""
    layer = jm.JaggedTargetAttention(WIDTH, HEADS).eval()
    cache, scored = jm.PagedHistoryCache(layer, 24 * PAGE * 2 * WIDTH * 4, PAGE), [0] * WORKERS

    def work(worker: int) -> None:
        generator, rows = (
            random.Random(worker),
            torch.randn(2, 400, WIDTH, generator=torch.Generator().manual_seed(worker)),
        )
        targets, lengths, before = torch.randn(1, 3, WIDTH), [0, 0], None
        with torch.no_grad():
            for _ in range(60):
                which, count = generator.randrange(2), generator.randint(1, 150)
                user, begin = (worker, which), lengths[which]
                try:
                    if user in cache and begin + count <= 400:
                        cache.append([user], jagged([rows[which, begin : begin + count]]))
                        lengths[which] = begin + count
                    else:
                        cache.evict([user])
                        cache.put([user], jagged([rows[which, :count]]))
                        lengths[which] = count
                    now = cache.select([user]), rows[which, : lengths[which]]
                # evicted in between; or other threads read too many pages
                except (KeyError, jm.CacheFull):
                    continue
                for kv, history in filter(None, (before, now)):
                    torch.testing.assert_close(
                        layer.score(targets, kv), layer(targets, jagged([history]))
                    )
                    assert is_in_pages(kv)
                    scored[worker] += 1
                before = now
                del kv, now

    in_threads(work)
    assert min(scored) > 20 and cache.statistics().evictions > 0
    gc.collect()
    cache.clear()
    cache.put([0], jagged([torch.randn(24 * PAGE, WIDTH)]))  # all pages are free again


def test_a_cache_that_is_only_read_does_not_grow():
    cache = cache_of(4, PAGE)
    put(cache, {1: 200})
    for _ in range(20):
        cache.select([1, 1])
    assert len(cache._read) <= 1 and len(cache._table._readers) <= 2


@pytest.mark.parametrize("is_read", [False, True])
def test_histories_begin_anew_in_their_pages(is_read):
    """A shorter history frees those that it does not need. Pages that are read stay as they are,
    and are free when they are read no more."""
    cache = jm.PagedHistoryCache(Rows(), 2**20, PAGE)
    old, new = torch.randn(300, 2), torch.randn(5, 2)
    cache.put(["a"], jagged([old]))
    pages, page = set(cache._table.users["a"].pages), cache.statistics().bytes // 3
    selected = cache.select(["a"]) if is_read else None
    cache.append(["a"], jagged([new]), anew=["a"])
    assert torch.equal(*rows_of(cache.select(["a"])), new)
    if selected is not None:
        assert torch.equal(*rows_of(selected), old)
        assert cache._table.users["a"].pages[0] not in pages
        assert cache.statistics().bytes == 4 * page
    else:
        assert cache._table.users["a"].pages[0] in pages
    del selected
    cache.append(["a"], jagged([new[:1]]))
    assert cache.statistics().bytes == page
