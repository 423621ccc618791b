"""Steps of rankers: those from graphs give the scores of the model, ids go to the device in one
copy, sums of bags are TorchRec's."""

import argparse
import sys
from collections import Counter

import numpy as np
import pytest
import torch

# `make test-gpu` also runs without it
pytest.importorskip("torchrec", reason="the programs need it")

import serving_next_item
from checkpoints import load_weights
from data.event_log import Categorical
from ranking_data import bags, keyed
from ranking_model import embedding_bags, stack_bags
from serving_models import add_cache_options, add_ranker_options, ranker_from_options, uses_graphs
from serving_steps import FeatureTable, sums_of_bags, to_device
from serving_warm_up import warm_up
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import jagged_modules as jm
from jagged_modules.captured_step import RUNNERS

from ..direct_graphs import Direct
from .serving import CACHE, CPU, Requests, ranker_of
from .test_serving_rankers import assert_same_scores, every_model


@every_model
@pytest.mark.parametrize("page_rows", [16, 128])
@pytest.mark.parametrize("cache", [0, 200_000, CACHE])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_graphs_give_the_scores_of_the_model(served, padded, name, page_rows, cache, device):
    """Of 30 batches of 1 to 5 users with new events, which are read by later batches. Some share
    graphs."""
    if not cache and page_rows == 128:
        pytest.skip("there are no pages")
    plain, graphed = (
        ranker_of(served[name], cache, page_rows, torch.device(device), graphs=graphs)
        for graphs in (False, True)
    )
    requests, calls = Requests(plain), 0
    for _ in range(30):
        batch = requests.batch(int(requests.random.integers(1, 6)))
        assert_same_scores(graphed.score(batch), plain.score(batch))
        calls += 1
    assert graphed.counts == plain.counts and 1 < len(graphed.run._steps)
    if not cache:
        assert len(graphed.run._steps) < calls


class Outside(TorchDispatchMode):
    """Counts the operators that run outside of replays, whose results are those of the capture."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[str(op)] += 1
        return op(*args, **(kwargs or {}))


class Unseen(Direct):
    """A replay that `Outside` does not see."""

    replays = 0

    def forward(self):
        Unseen.replays += 1
        with _disable_current_modes():
            return super().forward()


@pytest.mark.parametrize(
    "name, count, limit",
    [("hstu", 5, 14), ("hstu", 1, 14), ("attention", 5, 14), ("attention", 1, 14)],
)
def test_a_batch_of_cached_users_runs_little_outside_of_its_graphs(
    served, monkeypatch, poisoned_memory, name, count, limit
):
    """Users with and without a new event are one replay, and no row is read or written outside."""
    monkeypatch.setitem(RUNNERS, "cpu", Unseen)
    monkeypatch.setattr(Unseen, "replays", 0)
    ranker = ranker_of(served[name], CACHE, 128, graphs=True)
    requests = Requests(ranker)
    users = [user for user in range(25) if ranker.histories.length(user) < 40][:count]
    for _ in range(2):
        ranker.score([requests.of(user, int(user == users[0]), 3) for user in users])
    before, Unseen.replays = ranker.run.captures, 0
    with Outside() as outside:
        ranker.score([requests.of(user, int(user == users[0]), 3) for user in users])
    assert ranker.run.captures == before and Unseen.replays == 1
    assert sum(outside.counts.values()) <= limit
    for op in ("index_select", "index.Tensor", "searchsorted.Tensor", "index_copy_"):
        assert not any(x.startswith(f"aten.{op}") for x in outside.counts)


class Frozen(Direct):
    """A replay without any work of the host. The results are those of the capture."""

    def __init__(self, forward, *others):
        super().__init__(forward, *others)
        self.outputs = [x.detach() for x in forward()]

    def forward(self):
        return self.outputs


@pytest.mark.parametrize(
    "name, cache, pages, new, most",
    [
        ("hstu", CACHE, 128, 0, 72),
        ("hstu", CACHE, 128, 1, 130),
        ("hstu", CACHE, None, 1, 78),
        ("hstu", 0, 128, 1, 89),
        ("attention", CACHE, 128, 1, 136),
    ],
)
def test_calls_of_a_batch(served, monkeypatch, name, cache, pages, new, most):
    """Of Python functions of this project, for 20 users, so many of whom have new events: on a GPU,
    small models wait for them. At most as many as with Python 3.11; lower them with the calls."""
    monkeypatch.setitem(RUNNERS, "cpu", Frozen)
    monkeypatch.setitem(serving_next_item.ENCODED_ANEW, "cpu", 1e9)
    ranker = ranker_of(served[name], cache, pages, graphs=True)
    requests, found = Requests(ranker), []
    users = sorted(range(25), key=ranker.histories.length)[:20]

    def note(frame, event, _):
        if event == "call" and frame.f_globals["__name__"].startswith(("jagged_", "serving_")):
            found.append(frame.f_code.co_name)

    for _ in range(3):
        batch = [requests.of(user, int(i < new), 3) for i, user in enumerate(users)]
        captures, before = ranker.captures, sys.getprofile()
        found.clear()
        sys.setprofile(note)
        try:
            ranker.score(batch)
        finally:
            sys.setprofile(before)
    assert ranker.captures == captures and 50 < len(found) <= most


@every_model
@pytest.mark.parametrize("cache", [0, CACHE], ids=["none", "CACHE"])
def test_no_graph_is_captured_after_a_warm_up(served, padded, poisoned_memory, name, cache):
    """In 60 random batches of 1 to 25 users, with and without new events, of 1 to 80 candidates per
    user, as in `test_no_kernel_is_compiled_after_a_warm_up`; the cache loses some of them."""
    ranker = ranker_of(served[name], cache, 128, graphs=True)
    warm_up(ranker, max_users=25, max_candidates=2000)
    before, requests = ranker.captures, Requests(ranker)
    assert before == len(ranker.run._steps)
    for _ in range(60):
        users = requests.random.permutation(25)[: requests.random.integers(1, 26)].tolist()
        batch = [
            requests.of(user, *requests.random.integers([0, 1], [3, 81]).tolist()) for user in users
        ]
        ranker.score(batch)
        if ranker.cache is not None:
            ranker.cache.evict(requests.random.integers(25, size=3).tolist())
    assert ranker.captures == before


def test_graphs_are_the_default_on_a_gpu_alone(served):
    parser = argparse.ArgumentParser()
    add_ranker_options(parser), add_cache_options(parser)

    def parse(*options):
        return parser.parse_args(["--device", "cpu", *options])

    for options, on_gpu in (((), True), (("--graphs",), True), (("--no-graphs",), False)):
        assert uses_graphs(parse(*options), torch.device("cuda", 1)) == on_gpu
    assert not uses_graphs(parse(), CPU) and not uses_graphs(parse("--no-graphs"), CPU)
    with pytest.raises(ValueError, match="^--graphs needs a CUDA device, got cpu$"):
        ranker_from_options(load_weights(served["hstu"]), parse("--graphs"))


def test_ids_go_to_the_device_in_one_copy():
    """Each with its type, shape and values. What is on the device is passed on."""
    ids, history = torch.arange(6).view(3, 2), torch.tensor([0, 1, 3])
    given = dict(a=ids, b=jm.Jagged(ids + 7, history, 5), c=None, d=3)
    device = torch.device("cpu", 0)  # another one than that of the tensors
    moved = to_device(given, device)
    assert (
        moved["a"].untyped_storage().data_ptr() == moved["b"].offsets.untyped_storage().data_ptr()
    )
    assert torch.equal(moved["a"], ids) and torch.equal(moved["b"].values, ids + 7)
    assert torch.equal(moved["b"].offsets, history) and moved["b"].max_seqlen == 5
    assert torch.equal(moved["b"].host_lengths, torch.tensor([1, 2]))
    assert moved["c"] is None and moved["d"] == 3
    assert to_device(given, torch.device("cpu")) is given


def test_columns_of_features():
    """A bag of categories, an empty one, and a feature with one category each. Their sums are those
    of TorchRec's bags."""
    bag = Categorical(np.array([4, 2, 7]), np.array([0, 2, 2, 3]), 8)
    features = {"bag": bag, "one": Categorical.single(np.array([5, 6, 0]))}
    table = FeatureTable(features, 3)
    assert table.widths == [2, 1]
    assert table.columns.tolist() == [[4, 2, 5], [-1, -1, 6], [7, -1, 0], [-1, -1, -1]]
    collection = embedding_bags({name: x.cardinality for name, x in features.items()}, 4)
    users = np.array([2, 0, 1, 0])
    expected = collection(keyed({name: bags(x, users) for name, x in features.items()}))
    ids = torch.from_numpy(table.columns[users])
    found = sums_of_bags(collection, list(features), ids, table.widths)
    torch.testing.assert_close(found, stack_bags(expected, list(features)), rtol=0, atol=0)


@pytest.mark.parametrize("name, dtype", {"int8": torch.int8, "float8": torch.float8_e4m3fn}.items())
def test_a_cache_in_8_bits_by_option(served, name, dtype):
    """For the ranker, and for the ways of the load generator that have a cache."""
    parser = argparse.ArgumentParser()
    add_ranker_options(parser), add_cache_options(parser)
    arguments = ["--device", "cpu", "--cache-mb", "10", "--cache-dtype", name]
    weights = load_weights(served["hstu"])
    ranker = ranker_from_options(weights, parser.parse_args(arguments))
    assert ranker.cache._rows.stored_dtype == dtype and ranker.dtype == torch.float32
    given = ["--weights", str(served["hstu"]), "--cache-mb", "10", "0", "--cache-dtype", name]
    load_serving = pytest.importorskip("load_serving", reason="it needs fastapi")
    options = load_serving.parse_arguments([*given, "--device", "cpu"])
    cached, whole = load_serving.ways_to_serve(options).values()
    assert cached.make_ranker(options).cache._rows.stored_dtype == dtype
    assert f"--cache-dtype={name}" in cached.server_options(options)
    assert whole.make_ranker(options).cache is None
    assert "cache-dtype" not in "".join(whole.server_options(options))
