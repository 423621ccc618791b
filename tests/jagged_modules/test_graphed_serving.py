"""jm.graphed replays `score` and `append`, with the histories of a PagedHistoryCache. On the CPU
`direct_graphs` takes the place of CUDA graphs."""

import pytest
import torch

import jagged_modules as jm
from jagged_modules.captured_step import RUNNERS
from jagged_modules.containers.pages import PagedRows
from jagged_modules.padded_arguments import Arguments, Buckets, capacities_of
from jagged_modules.padded_buffers import Buffers

from ..direct_graphs import Direct, poison
from .caching import Timeline, hstu, jagged
from .hstu_cases import HEADS, WIDTH
from .test_history_in_pages import HISTORIES, PAGE, TARGETS, layers

APPENDED = [[1, 2, 0, 3, 0], [0, 140, 1, 2, 3], [1, 0, 2, 3, 1], [0, 0, 0, 0, 0]]
SHORT = {"hstu-short": lambda: hstu(jm.HSTUConfig(scaling_seqlen=400, max_attn_len=200))}
CACHING = layers() | SHORT


@pytest.mark.parametrize(
    "page_rows, stored", [(PAGE, None), (3, None), (PAGE, torch.int8)], ids=str
)
@pytest.mark.parametrize("name", CACHING)
def test_scores_and_appends_of_a_cache(padded, poisoned_memory, name, page_rows, stored):
    """Each score sees the rows that were appended since the last one, and the graph of one bucket
    serves several of them."""
    layer, timed = CACHING[name]().double().eval(), name == "hstu-timed"
    graph = jm.graphed(layer)
    timeline = Timeline([HISTORIES, *APPENDED], TARGETS)
    plain, replayed = (
        jm.PagedHistoryCache(layer, 2**24, page_rows, stored),
        jm.PagedHistoryCache(graph, 2**24, page_rows, stored),
    )
    users, targets = list("abcde"), jagged(timeline.take(timeline.rows, -1))
    calls = 0
    for part in range(1 + len(APPENDED)):
        events = jagged(timeline.take(timeline.rows, part))
        times = timeline.times_of(part, timed)
        poison(graph)
        if not part:
            plain.put(users, events, **times), replayed.put(users, events, **times)
        else:
            expected, found = (x.append(users, events, **times) for x in (plain, replayed))
            if expected is not None:
                torch.testing.assert_close(found.values, expected.values)
        poison(graph)
        with torch.no_grad():
            kept = replayed.select(users)
            if name != "hstu-short":  # whose histories may begin within a page
                assert isinstance(kept.layers[0], PagedRows) == (page_rows == PAGE)
            times = timeline.times_of(-1, timed)
            found = graph.score(targets, kept, **times).values
            expected = layer.score(targets, plain.select(users), **times).values
        torch.testing.assert_close(found, expected)
        calls += 1 + (part > 0)
    assert 1 < len(graph._steps) < calls


def test_padding_is_written_to_the_spare_row(padded):
    """All other rows of the storage are as they were, and a call without events writes none."""
    layer = hstu(jm.HSTUConfig(scaling_seqlen=400))
    cache = jm.PagedHistoryCache(jm.graphed(layer), 2**19, PAGE)
    cache.put(list("ab"), jagged([torch.randn(n, WIDTH, dtype=torch.float64) for n in (130, 7)]))
    storage = cache._rows.values.nan_to_num_()  # pages that nothing was written to
    for counts in ([1, 4], [0, 0], [3, 0]):
        before = storage[:-1].clone()
        cache.append(
            list("ab"), jagged([torch.randn(n, WIDTH, dtype=torch.float64) for n in counts])
        )
        changed = (storage[:-1] != before).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert len(changed) == sum(counts)
    assert cache.layer._steps


@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
def test_graphs_take_the_tables_of_pages_from_the_host(padded, monkeypatch, stored):
    """No replay makes their copies on the device. What runs without a graph makes one for all
    layers."""
    layer = hstu(jm.HSTUConfig(scaling_seqlen=400)).eval()
    graph, appended = jm.graphed(layer), []
    cache = jm.PagedHistoryCache(graph, 2**20, PAGE, stored)
    plain = jm.PagedHistoryCache(layer, 2**20, PAGE, stored)
    events, targets = (jagged([torch.randn(n, WIDTH).double()]) for n in (3, 2))
    with_room = cache._rows.with_room

    def kept_with_room(*args):
        appended.append(with_room(*args))
        return appended[-1]

    monkeypatch.setattr(cache._rows, "with_room", kept_with_room)
    history = jagged([torch.randn(200, WIDTH).double()])
    for x in (cache, plain):
        x.put(["a"], history), x.append(["a"], events)
    kept, expected = cache.select(["a"]), plain.select(["a"])
    with torch.no_grad():
        scores = graph.score(targets, kept).values
        read = [*kept.layers, *appended[0]]
        assert not any({"offsets", "pages"} & vars(x).keys() for x in read)
        for x in (kept, expected):
            torch.testing.assert_close(scores, layer.score(targets, x).values)
    first, second, *_ = kept.layers
    assert first.offsets is second.offsets and first.pages.table is second.pages.table
    assert first.segmentation is second.segmentation
    assert torch.equal(first.segmentation.host_lengths, torch.tensor([203]))


def test_each_storage_has_graphs_of_its_own(padded):
    layer = jm.JaggedTargetAttention(WIDTH, HEADS).eval()
    graph, targets = jm.graphed(layer), torch.randn(1, 3, WIDTH)
    caches = [jm.PagedHistoryCache(layer, 2**20, PAGE) for _ in range(2)]
    with torch.no_grad():
        for number, cache in enumerate(caches, start=1):
            cache.put(["a"], jagged([torch.randn(200, WIDTH)]))
            kept = cache.select(["a"])
            for _ in range(2):
                torch.testing.assert_close(graph.score(targets, kept), layer.score(targets, kept))
            assert len(graph._steps) == number


def test_scores_with_gradients_read_copied_rows(padded):
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    graph, targets = jm.graphed(layer), torch.randn(1, 3, WIDTH, requires_grad=True)
    cache = jm.PagedHistoryCache(layer, 2**20, PAGE)
    cache.put(["a"], jagged([torch.randn(200, WIDTH)]))
    gradients = [
        torch.autograd.grad(x.score(targets, cache.select(["a"])).square().sum(), targets)
        for x in (layer, graph)
    ]
    torch.testing.assert_close(*gradients)
    assert graph._steps


def test_methods_that_are_not_replayed():
    """`cache` may wait for the device; a module's own `score` is its own."""

    class Own(torch.nn.Linear):
        def score(self, x):
            return self(x)

    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    assert jm.graphed(layer).cache == layer.cache
    own = Own(WIDTH, 8)
    assert jm.graphed(own).score == own.score


def test_a_method_has_the_errors_of_the_layer(padded):
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    graph, cache = jm.graphed(layer), layer.cache(jagged([torch.randn(3, WIDTH)]))
    with pytest.raises(ValueError, match="targets must have"):
        graph.score(torch.randn(1, 3, WIDTH + 1), cache)
    with pytest.raises(TypeError, match="cache must be"):
        graph.score(torch.randn(1, 3, WIDTH), "none")


def test_arguments_on_the_host_go_to_the_device_in_one_copy():
    """Their buffers are parts of one tensor, each at a multiple of 128 bytes."""
    args = (
        torch.randn(5, 3),
        torch.arange(10).view(5, 2),
        jm.Jagged(torch.randint(9, (7,), dtype=torch.int32), torch.tensor([0, 2, 7])),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([[True]] * 5),
    )
    arguments = Arguments(args, {}, [], {})
    capacities = capacities_of(arguments.leaves, Buckets(8))
    buffers = Buffers(arguments.leaves, capacities, torch.device("cpu"))
    packed = buffers._on_device
    for fill in (255, 0):
        buffers._on_host.fill_(fill)
        packed.fill_(fill)
        buffers.pad(arguments.leaves, capacities)
        for x, leaf in zip(buffers.tensors, arguments.leaves, strict=True):
            begin = x.data_ptr() - packed.data_ptr()
            assert begin % 128 == 0 and 0 <= begin and begin + x.nbytes <= len(packed)
            rows = leaf.tensor.shape[0] if leaf.tensor.dim() else None
            assert x.dtype == leaf.tensor.dtype and torch.equal(
                x[:rows] if rows else x, leaf.tensor
            )
            if leaf.kind == "rows":
                assert not x[rows:].any()


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CACHING)
def test_replays_have_the_bits_of_the_padded_calls(monkeypatch, name, dtype):
    """Of scores and appends, between which others are appended."""
    layer, timed = CACHING[name]().to("cuda", dtype).eval(), name == "hstu-timed"
    timeline = Timeline([HISTORIES, *APPENDED], TARGETS, dtype, device="cuda")
    caches = [jm.PagedHistoryCache(jm.graphed(layer), 2**24, PAGE) for _ in range(2)]
    users, targets = list("abcde"), jagged(timeline.take(timeline.rows, -1))

    def score(cache, **times):
        return cache.layer.score(targets, cache.select(users), **times).values

    def results(call, *args, **times):
        """Of the graphs, and of what they were captured from."""
        with monkeypatch.context() as patch:
            found = call(caches[0], *args, **times)
            patch.setitem(RUNNERS, "cuda", Direct)
            return found, call(caches[1], *args, **times)

    for part in range(1 + len(APPENDED)):
        events, times = jagged(timeline.take(timeline.rows, part)), timeline.times_of(part, timed)
        if not part:
            results(jm.PagedHistoryCache.put, users, events, **times)
        else:
            found, expected = results(jm.PagedHistoryCache.append, users, events, **times)
            assert found is None or torch.equal(found.values, expected.values)
        times = timeline.times_of(-1, timed)
        with torch.no_grad():
            found, expected = results(score, **times)
            plain = layer.score(targets, caches[1].select(users), **times).values
        assert torch.equal(found, expected)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(found, plain, atol=tolerance, rtol=tolerance)
    assert all(len(cache.layer._steps) > 1 for cache in caches)


@pytest.mark.gpu
def test_a_replay_with_arguments_on_the_host_copies_once():
    class Sums(torch.nn.Embedding):
        def forward(self, ids, others):
            return super().forward(ids[0]).sum(1), super().forward(others)

    graph = jm.graphed(Sums(50, 8, device="cuda")).requires_grad_(False)
    ids = torch.randint(50, (7, 2)), torch.tensor([0, 3, 7])
    others = torch.randint(50, (5,))
    graph(ids, others)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        found = graph(ids, others)
        torch.cuda.synchronize()
    for x, y in zip(found, graph._inner((ids[0].cuda(), ids[1]), others.cuda())):
        assert torch.equal(x, y)
    copies = {x.key: x.count for x in profile.key_averages() if "HtoD" in x.key}
    assert copies == {"Memcpy HtoD (Pinned -> Device)": 1}
    assert graph.captures == 1


@pytest.mark.gpu
def test_an_append_and_a_score_copy_once_each():
    """Page tables, offsets, the rows to write and the rows of the call are one copy."""
    layer = hstu(jm.HSTUConfig(scaling_seqlen=400)).float().cuda().eval()
    cache = jm.PagedHistoryCache(jm.graphed(layer), 2**24, PAGE)
    events, targets = (jagged([torch.randn(n, WIDTH)]) for n in (1, 2))
    cache.put(["a"], jagged([torch.randn(200, WIDTH, device="cuda")]))

    @torch.no_grad()
    def step():
        cache.append(["a"], events)
        cache.layer.score(targets, cache.select(["a"]))
        torch.cuda.synchronize()

    step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    copies = {x.key: x.count for x in profile.key_averages() if "HtoD" in x.key}
    assert copies == {"Memcpy HtoD (Pinned -> Device)": 2}


@pytest.mark.gpu
def test_pages_are_read_as_long_as_a_copy_of_their_table_exists():
    """Also if that of the host is gone."""
    layer = jm.JaggedTargetAttention(WIDTH, HEADS, device="cuda")
    cache = jm.PagedHistoryCache(jm.graphed(layer), 2**20, PAGE)
    cache.put(["a"], jagged([torch.randn(200, WIDTH, device="cuda")]))
    table = cache.select(["a"]).layers[0].pages.table
    pages = set(cache._table.users["a"].pages)
    with cache._ordered():
        assert pages <= cache._table._pins
    del table
    with cache._ordered():
        assert not cache._table._pins
