"""Caches of outputs alone: next-item models of short windows on a GPU."""

import argparse
from dataclasses import replace

import numpy as np
import pytest
import torch

# `make test-gpu` also runs without it
pytest.importorskip("torchrec", reason="the programs need it")

import serving_models
import serving_next_item
from checkpoints import load_weights
from serving_models import add_cache_options, add_ranker_options, ranker_from_options
from serving_outputs import OutputCache
from serving_warm_up import warm_up

import jagged_modules as jm

from .serving import CACHE, CPU, Requests, ranker_of
from .test_serving_rankers import assert_same_scores

ROW_BYTES = 4 * 16  # of the tests' models
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def make(request, served, padded, monkeypatch):
    """Makes a ranker with a cache of so many outputs, on the CPU too."""
    monkeypatch.setitem(serving_next_item.ENCODED_ANEW, "cpu", 1e9)

    def make(count=CACHE // ROW_BYTES, device=CPU):
        bytes_ = count * ROW_BYTES
        return ranker_of(served["hstu"], bytes_, device=device, graphs=request.param)

    return make


@pytest.mark.parametrize("device", DEVICES)
def test_scores_equal_those_without_a_cache(make, served, device):
    """Of 40 batches with new events, until some histories outgrow the model's window; in a cache
    that evicts, too."""
    device = torch.device(device)
    whole = ranker_of(served["hstu"], 0, device=device)
    large, small = make(device=device), make(8, device)
    requests = Requests(whole)
    for _ in range(40):
        batch = requests.batch()
        expected = whole.score(batch)
        for ranker in (large, small):
            assert_same_scores(ranker.score(batch), expected)
    assert isinstance(large.cache, OutputCache)
    for ranker in (large, small):
        counts, kept = ranker.counts, ranker.cache.statistics()
        assert counts["appended"] == 0 and sum(counts.values()) == 200
        assert kept.users == len(ranker.cache) and kept.bytes == kept.users * ROW_BYTES
        # one of the check that a history fits
        assert kept.hits + kept.misses == 201 and counts["reused"] <= kept.hits
    assert large.counts["reused"] > 60 and large.cache.statistics().evictions == 0
    assert len(small.cache) == 8 and small.cache.statistics().evictions > 20


def test_a_failure_changes_nothing(make, served, monkeypatch):
    ranker, whole = make(), ranker_of(served["hstu"], 0)
    requests = Requests(ranker)
    failing = [requests.of(1, events=2), requests.of(2, events=1), requests.of(3)]
    ranker.score([requests.of(1), requests.of(3)])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ranker.score(failing)
    after = [requests.of(user) for user in (1, 2, 3)]
    assert_same_scores(ranker.score(after), whole.score(after))
    assert_same_scores(ranker.score(failing), whole.score(failing))


def test_events_that_are_not_stored(make, served):
    ranker, whole = make(), ranker_of(served["hstu"], 0)
    requests = Requests(ranker)
    tried = [replace(requests.of(1, events=2), stores_events=False), requests.of(2, events=1)]
    for batch in (tried, [requests.of(1), requests.of(2)]):
        assert_same_scores(ranker.score(batch), whole.score(batch))


def test_other_weights(make, served):
    ranker, whole = make(), ranker_of(served["hstu"], 0)
    batch = [Requests(ranker).of(user) for user in range(5)]
    ranker.score(batch)
    weights = load_weights(served["hstu"])
    changed = {name: x + 0.01 for name, x in weights.tensors.items()}
    for x in (ranker, whole):
        assert x.load(replace(weights, tensors=changed))
    assert_same_scores(ranker.score(batch), whole.score(batch))


def test_a_batch_that_the_cache_has_no_room_for(make):
    ranker = make(4)
    with pytest.raises(jm.CacheFull, match="^max_bytes allows 4 rows, but there are 5 users$"):
        ranker.score([Requests(ranker).of(user) for user in range(5)])


def test_no_graph_is_captured_after_a_warm_up(make, poisoned_memory):
    ranker = make()
    warm_up(ranker, max_users=25, max_candidates=500)
    before, requests = ranker.captures, Requests(ranker)
    assert not len(ranker.cache) and not sum(ranker.counts.values())
    for _ in range(40):
        users = requests.random.permutation(25)[: requests.random.integers(1, 26)].tolist()
        ranker.score(
            [requests.of(user, *requests.random.integers([0, 1], [3, 20])) for user in users]
        )
        ranker.cache.evict(requests.random.integers(25, size=3).tolist())
    assert ranker.captures == before


@pytest.mark.parametrize(
    "option", [dict(page_rows=16), dict(cache_dtype=torch.int8), dict(slack=9)]
)
def test_options_of_pages_and_of_appended_events_have_pages(make, served, option):
    ranker = ranker_of(served["hstu"], **option)
    assert isinstance(ranker.cache, jm.PagedHistoryCache)


def test_windows_that_are_encoded_anew(served, monkeypatch):
    ranker = ranker_of(served["hstu"])
    assert isinstance(ranker.cache, jm.PagedHistoryCache)  # on a CPU
    work = 60 * sum(x.numel() for x in ranker.model.encoder.encoder.parameters())
    for limit, kind in ((work - 1, jm.PagedHistoryCache), (work, OutputCache)):
        monkeypatch.setitem(serving_next_item.ENCODED_ANEW, "cpu", limit)
        assert isinstance(ranker_of(served["hstu"]).cache, kind)


def test_the_default_budget(served, monkeypatch):
    """256 MB; none for ranking models of windows that are not cached."""
    parser = argparse.ArgumentParser()
    add_ranker_options(parser)
    add_cache_options(parser)
    options = parser.parse_args(["--device", "cpu"])
    budgets = []
    for longest in (0, 59, 60):
        monkeypatch.setitem(serving_models.NOT_CACHED, "cpu", longest)
        for name in ("hstu", "attention"):
            cache = ranker_from_options(load_weights(served[name]), options).cache
            budgets.append(None if cache is None else cache.max_bytes)
    assert budgets == [256_000_000] * 5 + [None]


def test_the_least_recently_used_rows_are_given_to_others():
    """Against a list of users, in 300 random calls."""
    random = np.random.default_rng(0)
    cache, order, rows = OutputCache(7 * 8 + 3, 8), [], {}
    for _ in range(300):
        users = random.permutation(12)[: random.integers(1, 8)].tolist()
        assert cache.missing(users) == [user for user in users if user not in order]
        order = [x for x in order if x not in users] + [x for x in users if x in order]
        order += [x for x in users if x not in order]
        order = order[-7:]
        given = cache.slots(users).tolist()
        assert len(set(given)) == len(users) and set(given) <= set(range(1, 8))
        assert all(rows.get(user, row) == row for user, row in zip(users, given))
        rows = {x: row for x, row in (rows | dict(zip(users, given))).items() if x in order}
        assert len(set(rows.values())) == len(rows) == len(cache)
        if random.random() < 0.2:
            gone = random.permutation(12)[:3].tolist()
            cache.evict(gone)
            order = [x for x in order if x not in gone]
            rows = {x: row for x, row in rows.items() if x in order}
        assert all((x in cache) == (x in order) for x in range(12))
    cache.clear()
    assert not len(cache) and cache.statistics().bytes == 0
