"""The gain is that of timed calls. The clock is the number of elements that operators wrote."""

import contextlib
import sys
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jagged_modules.tracing import is_recording
from jagged_modules.transforms import fuse, fuse_broadcasts, timing

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def times():
    """As they are timed, not as estimated."""


class Elements(TorchDispatchMode):
    """Attributes:
    written: the number of elements that operators wrote.
    """

    def __init__(self):
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(results) if isinstance(x, torch.Tensor))
        self.written += sum(x for x in sizes if isinstance(x, int))  # not those of a capture
        return results


@pytest.fixture
def clock(monkeypatch):
    with Elements() as elements:

        def now():
            return elements.written

        clocks = types.SimpleNamespace(thread_time=now, perf_counter=now)
        monkeypatch.setattr(timing, "time", clocks)
        yield now


class Rows(nn.Module):
    """Layers of the user's rows, and of both. Counts the rows of its calls."""

    def __init__(self, width=512):
        super().__init__()
        self.user, self.head = nn.Linear(8, width), nn.Linear(width + 4, 1)
        self.calls = []

    def forward(self, user, item):
        if not torch.compiler.is_exporting():
            self.calls.append((len(user), len(item)))
        return self.head(torch.cat([self.user(user).relu(), item], 1))


def fused_of(model, max_batch=(3, 50), **options):
    example = dict(user=torch.randn(8, 8), item=torch.randn(8, 4))
    return fuse_broadcasts(
        model.eval(), example, request_only=["user"], max_batch=max_batch, **options
    )


def test_the_gain_is_that_of_calls(clock):
    """Of the model on gathered rows, and of the result."""
    model = Rows()
    fused = fused_of(model)
    assert {x for x in model.calls if x[1] == 50} == {(50, 50)}
    user, item, index = torch.randn(3, 8), torch.randn(50, 4), torch.arange(50) % 3

    def elements(call):
        start = clock()
        with torch.no_grad():
            call()
        return clock() - start

    before = elements(lambda: model(user.index_select(0, index), item))
    after = elements(lambda: fused(user, item, candidate_to_user=index))
    report = fused.report
    assert (report.times.model, report.times.graph) == (before, after)
    assert report.gain == before / after > 1.5 and report.times == report.eager_times
    calls = "eager calls, 50 candidates of 3 users"
    text = (
        f"{1e3 * before:.3g} → {1e3 * after:.3g} ms, {report.gain:.2f} times as fast as the model"
    )
    assert f"\ntimed: {text} ({calls})\n" in str(report)


def test_the_model_runs_where_it_is_as_fast(monkeypatch):
    """Whatever the estimates say."""
    for of_model, of_graph, runs in ((1.0, 1.1, True), (1.0, 0.995, True), (1.0, 0.98, False)):
        monkeypatch.setattr(timing, "least_seconds", lambda *_, x=(of_model, of_graph): x)
        report = fused_of(Rows()).report
        assert report.runs_model == runs and not report.eager_calls_run_model
        assert report.gain == (1 if runs else of_model / of_graph)
        assert report.before.total > 1.2 * report.after.total
        assert ("every call runs the model itself" in str(report)) == runs


def test_calls_through_a_compiler_decide(monkeypatch):
    """Eager calls of a graph that the host issues more slowly run the model."""
    seconds = iter([(1.0, 1.5), (1.0, 0.25)])
    monkeypatch.setattr(timing, "least_seconds", lambda *_: next(seconds))
    seen = []

    def compiled(module):
        seen.append(module)
        return module

    model = Rows()
    fused = fused_of(model, through=compiled)
    assert [seen[0].model, *seen[1:]] == [model, fused]
    report = fused.report
    assert report.gain == 4 and report.eager_times.gain == 1 / 1.5
    assert report.eager_calls_run_model and not report.runs_model
    assert "(through compiled, 50 candidates of 3 users)" in str(report)


@pytest.mark.parametrize("seconds, is_slow", [(timing.SECONDS, True), (0.01, False)])
def test_the_least_of_calls_in_turn(monkeypatch, seconds, is_slow):
    """ROUNDS of slow calls, SECONDS of fast ones, after others that do not count."""
    now, calls = [0.0], {"model": 0, "graph": 0}

    def call(name, factor):
        number = calls[name] - timing.WARM_UPS
        assert sum(calls.values()) % 2 == (name == "graph")
        calls[name] += 1
        # warm-ups would be the least; of the others the third is
        now[0] += factor * (1e-6 if number < 0 else seconds * (1 + abs(number - 2)))

    clocks = types.SimpleNamespace(thread_time=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(timing, "time", clocks)
    found = timing.least_seconds([partial(call, "model", 3), partial(call, "graph", 1)], CPU)
    assert found == pytest.approx([3 * seconds, seconds])
    rounds = calls["model"] - timing.WARM_UPS
    assert rounds == calls["graph"] - timing.WARM_UPS >= timing.ROUNDS
    assert (rounds == timing.ROUNDS) == is_slow and now[0] > timing.SECONDS


@pytest.mark.parametrize("threads, clock", [(1, "thread_time"), (2, "perf_counter")])
def test_which_clock(monkeypatch, threads, clock):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    seconds = iter(range(1000))
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(**{clock: lambda: next(seconds)}))
    assert timing.least_seconds([int, int], CPU) == [1, 1]


def test_calls_that_fail_leave_the_estimate(clock):
    class Limited(Rows):
        def forward(self, user, item):
            if not torch.compiler.is_exporting() and len(item) > 49:
                raise RuntimeError("out of memory")
            return super().forward(user, item)

    report = fused_of(Limited()).report
    assert report.times is None and report.untimed == "RuntimeError: out of memory"
    assert report.gain == report.before.total / report.after.total > 1
    assert f"estimate: {report.gain:.2f} times as fast; RuntimeError: out of memory" in str(report)


def test_large_batches_are_timed_in_part(monkeypatch, clock):
    model = Rows()
    whole = fused_of(model, max_batch=(30, 3000)).report.before.bytes
    monkeypatch.setattr(fuse, "MOST_BYTES", whole / 10)
    model.calls.clear()
    fused_of(model, max_batch=(30, 3000))
    assert max(model.calls) == (300, 300)


def test_offsets_of_bags_count_the_candidates(clock):
    """Repeated, they would be none. Other rows are those of the example."""

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.user = nn.EmbeddingBag(8, 4, mode="sum"), nn.Linear(8, 4)
            self.seen = []

        def forward(self, user, ids, offsets):
            if not torch.compiler.is_exporting():
                self.seen.append((ids, offsets))
            return self.user(user) * self.bag(ids, offsets)

    model, rows = Bags().eval(), torch.arange(8)
    example = dict(user=torch.randn(8, 8), ids=rows.clone(), offsets=rows)
    report = fuse_broadcasts(model, example, request_only=["user"], max_batch=(2, 20)).report
    assert report.times is not None
    ids, offsets = next(x for x in model.seen if len(x[0]) == 20)
    assert offsets.tolist() == list(range(20)) and ids.tolist() == [x % 8 for x in range(20)]


def test_a_model_that_replicates_rows_is_called_as_in_the_example(clock):
    class Replicates(Rows):
        def forward(self, user, item, index):
            return super().forward(user[index], item)

    example = torch.randn(3, 8), torch.randn(40, 4), torch.arange(40) % 3
    report = fuse_broadcasts(Replicates().eval(), example).report
    assert report.times.calls == "eager calls" and report.gain > 1.5


def test_the_time_of_a_gpu(monkeypatch):
    """Between events around a call that the host issued while the GPU was busy, on the path that
    CUDA graphs record."""
    log, least = [], iter([5.0, 3.0, 4.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return next(least)

    fakes = dict(
        Event=Event,
        device=lambda device: contextlib.nullcontext(),
        synchronize=lambda: log.append("synchronize"),
        _sleep=lambda cycles: log.append(cycles),
    )
    for name, own in fakes.items():
        monkeypatch.setattr(torch.cuda, name, own)

    def call():
        assert is_recording(CPU)
        log.append("call")

    assert timing.device_seconds(call, torch.device("cuda"), busy=0.5) == 3e-3
    own = ["synchronize", 0.5 * timing.CYCLES, "record", "call", "record", "wait"]
    assert log == ["call"] * timing.WARM_UPS + own * timing.ROUNDS


class OfDict(Rows):
    def forward(self, features, *, item):
        return super().forward(features["user"], item)


class OfBags(Rows):
    def __init__(self):
        from .test_models import DIM, FEATURES, bags

        super().__init__()
        self.bags, self.user = bags(), nn.Linear(len(FEATURES) * DIM, 512)

    def forward(self, user, item):
        return super().forward(self.bags(user).values(), item)


def example_of(kind):
    """The inputs, and the name of the user's."""
    user, item = torch.randn(8, 8), torch.randn(8, 4)
    if kind is OfDict:
        return dict(features=dict(user=user, other=torch.randn(2, 3)), item=item), "features.user"
    if kind is OfBags:
        from .test_models import sparse

        user = sparse(8)
    return dict(user=user, item=item), "user"


@pytest.mark.parametrize("through", [None, partial(torch.compile, backend="eager")])
@pytest.mark.parametrize("kind", [Rows, OfDict, OfBags])
def test_both_calls_compute_the_same(monkeypatch, kind, through):
    """Of 20 candidates of 3 users."""
    if kind is OfBags:
        pytest.importorskip("torchrec")
    results = []

    def seconds(calls, device):
        results.append([call() for call in calls])
        return [2.0, 1.0]

    monkeypatch.setattr(timing, "least_seconds", seconds)
    example, name = example_of(kind)
    report = fuse_broadcasts(
        kind().eval(), example, request_only=[name], max_batch=(3, 20), through=through
    ).report
    assert report.untimed == "" and report.gain == 2
    assert len(results) == 1 + (through is not None)
    for of_model, of_graph in results:
        assert of_model.shape == (20, 1)
        torch.testing.assert_close(of_model, of_graph)


class Features(nn.Module):
    def forward(self, features, item, /, *, scale):
        return features["user"].sum(1) + features["more"][0].sum(1) * scale + item.sum(1)


def test_the_models_rows_are_gathered_in_few_calls():
    """Paths of pytree would take longer than a small model, which would then seem slow."""
    users, index = torch.randn(3, 8), torch.arange(50) % 3
    features, item = dict(user=users, more=[users + 1]), torch.randn(50, 4)
    scale = torch.tensor(2.0)
    model, visited = timing.LeftIn(Features(), ["features.user", "features.more.0"]), []

    def record(frame, event, _):
        if event == "call" and frame.f_globals["__name__"] == "torch.utils._pytree":
            visited.append(frame.f_code.co_name)

    sys.setprofile(record)
    try:
        found = model(features, item, scale=scale, candidate_to_user=index)
    finally:
        sys.setprofile(None)
    assert visited == []
    gathered = dict(user=users[index], more=[users[index] + 1])
    torch.testing.assert_close(found, Features()(gathered, item, scale=scale))
