"""Rankers: cached scores equal those of the whole model, failures change nothing, served scores
equal the offline evaluation."""

import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

# `make test-gpu` also runs without it
pytest.importorskip("torchrec", reason="the programs need it")

import train_dlrm
import train_hstu
from checkpoints import Weights, export_weights, load_weights
from estimated_times import estimated_times
from ranking_data import RankingDataset
from ranking_model import RankingHead
from sequence_model import QueryEncoder
from serving_models import make_ranker, options_of
from serving_rankers import NONE, PAGE_ROWS, NewEvents, Request
from serving_warm_up import warm_up
from training import rank_unseen

import jagged_modules as jm

from .serving import CACHE, CPU, PROGRAMS, Requests, ranker_of, train

NAMES = list(PROGRAMS)
every_model = pytest.mark.parametrize("name", NAMES)


def assert_same_scores(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@every_model
@pytest.mark.parametrize("page_rows", [16, 128])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cached_scores_equal_those_without_a_cache(served, name, page_rows, device):
    """Of 40 batches with new events, until some histories outgrow the model's window; in a cache
    that evicts, too."""
    small = {"attention": 100_000, "hstu": 200_000}[name]
    rankers = [
        ranker_of(served[name], cache, page_rows, torch.device(device))
        for cache in (0, CACHE, small)
    ]
    requests = Requests(rankers[0])
    for _ in range(40):
        batch = requests.batch()
        expected, *found = (ranker.score(batch) for ranker in rankers)
        for scores in found:
            assert_same_scores(scores, expected)
    _, large, small = rankers
    assert large.counts["reused"] > 20 and large.cache.statistics().evictions == 0
    assert small.cache.statistics().evictions > 20
    assert rankers[0].counts == {"reused": 0, "appended": 0, "encoded": 200}
    if name == "hstu":
        assert large.counts["appended"] > 5
        assert max(large.histories.length(user) for user in range(25)) > large.max_history


@every_model
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16(served, name, device):
    """Dense layers and cache are bfloat16, tables and scores fp32. After other weights were loaded,
    too."""
    settings = [(CACHE, torch.bfloat16), (0, torch.bfloat16), (0, torch.float32)]
    cached, whole, exact = (
        ranker_of(served[name], cache, 128, torch.device(device), dtype)
        for cache, dtype in settings
    )
    requests, weights = Requests(cached), load_weights(served[name])
    for ranker in (cached, whole, exact):
        ranker.load(weights)
    for _ in range(10):
        batch = requests.batch()
        found = [torch.cat(ranker.score(batch)) for ranker in (cached, whole, exact)]
        assert all(x.dtype == torch.float32 for x in found)
        scale = found[2].abs().max()
        assert 0 < (found[1] - found[2]).abs().max() < 0.03 * scale  # it would be 0 in fp32
        assert (found[0] - found[1]).abs().max() < 0.03 * scale
    assert cached.cache.select([batch[0].user]).layers[0].values.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in cached.model.tables())


@every_model
def test_scores_of_a_history_of_one_event_that_grows(served, name):
    whole, cached = ranker_of(served[name], 0), ranker_of(served[name])
    for ranker in (whole, cached):
        ranker.histories._offsets[:] = 0  # nobody has events
    requests = Requests(whole)
    for events in (1, 0, 1, 2, 0):
        batch = [requests.of(3, events=events)]
        assert_same_scores(cached.score(batch), whole.score(batch))


@pytest.mark.parametrize(
    "name, cache, slack, message",
    [
        ("hstu", CACHE, 60, "^--history-slack must be 0 to 59, .* got 60$"),
        ("hstu", CACHE, -1, "^--history-slack must be 0 to 59, .* got -1$"),
        ("hstu", 0, 5, "^--history-slack needs a next-item model .* got --cache-mb 0 of hstu$"),
        (
            "attention",
            CACHE,
            5,
            "^--history-slack needs a next-item .* got --cache-mb 10 of attention$",
        ),
    ],
)
def test_slack_that_cannot_be(served, name, cache, slack, message):
    with pytest.raises(ValueError, match=message):
        ranker_of(served[name], cache, slack=slack)


@every_model
def test_several_requests_of_a_user(served, name):
    """Scored together, after the events of the first, in the order of the requests."""
    together, alone = ranker_of(served[name]), ranker_of(served[name], 0)
    requests = Requests(alone)
    for _ in range(3):
        batch = [
            requests.of(user, events=events)
            for user, events in ((7, 2), (3, 0), (7, 0), (9, 1), (3, 0), (7, 0))
        ]
        assert_same_scores(together.score(batch), [alone.score([request])[0] for request in batch])


@every_model
def test_requests_of_a_user_of_which_one_stores_its_events(served, name):
    """Those of the other are not stored, and what is cached of the user goes."""
    ranker = ranker_of(served[name])
    requests = Requests(ranker)
    lengths = [ranker.histories.length(user) for user in (7, 8)]
    batch = [requests.of(7, events=2), replace(requests.of(7), stores_events=False)]
    batch += [requests.of(7), replace(requests.of(8, events=1), stores_events=False)]
    ranker.score(batch)
    assert [ranker.histories.length(user) for user in (7, 8)] == [lengths[0] + 2, lengths[1]]
    assert 7 not in ranker.cache and 8 not in ranker.cache


@pytest.mark.parametrize("page_rows, graphs", [(16, False), (128, False), (128, True)])
def test_a_history_that_outgrows_the_window_with_slack(served, padded, page_rows, graphs):
    """Of 6 events behind a full window, one encodes anew, without the 5 oldest. Scores are those of
    a model that is given just this window. An evicted user's window is as short."""
    bare = ranker_of(served["hstu"], 0, without_log=True)
    ranker = ranker_of(served["hstu"], CACHE, page_rows, graphs=graphs, slack=5)
    most, requests, windows = ranker.max_history, Requests(ranker), []
    for step in range(most + 20):
        request = requests.of(3, events=int(step < most + 17), candidates=4)
        if step == most + 18:
            ranker.cache.evict([3])
        encoded = ranker.counts["encoded"]
        (found,) = ranker.score([request])
        length = ranker.histories.length(3)
        if not windows or ranker.counts["encoded"] > encoded:
            windows.append(length if length <= most else most - 5)
        else:
            windows.append(windows[-1] + len(request.events.item))
        events = ranker.histories.window(3, NONE, windows[-1])
        alone = Request(3, request.candidates, events, stores_events=False)
        assert_same_scores([found], bare.score([alone]))
    first = windows.index(most)
    cycle = [*range(most - 5, most + 1)]
    assert windows[first + 1 : first + 13] == cycle * 2 and windows[-2:] == [most - 5] * 2
    assert ranker.counts["appended"] > ranker.counts["encoded"]


@pytest.mark.parametrize("cache", [0, CACHE])
def test_scores_without_a_log_are_those_of_the_same_events(served, cache):
    """The requests bring the histories that the log would."""
    whole, bare = (ranker_of(served["hstu"], cache, without_log=x) for x in (False, True))
    requests = Requests(whole).batch()
    histories = [whole.histories.window(x.user, x.events, whole.max_history) for x in requests]
    assert min(len(history.item) for history in histories) > 1
    found = [replace(x, events=y) for x, y in zip(requests, histories, strict=True)]
    assert_same_scores(bare.score(found), whole.score(requests))
    assert bare.histories.users[3] == whole.histories.users[3] and not bare.held_out
    again = [replace(x, events=NONE) for x in requests]
    assert_same_scores(bare.score(again), whole.score(again))


def test_a_ranking_model_needs_its_log(served):
    with pytest.raises(ValueError, match="--without-log needs a next-item model, not attention"):
        ranker_of(served["attention"], without_log=True)


@every_model
def test_the_default_size_of_pages(served, name):
    """On a GPU attention reads pages of 128 rows. Any size can be chosen."""
    assert ranker_of(served[name]).cache.page_rows == 16 and PAGE_ROWS["cuda"] == 128
    assert ranker_of(served[name], page_rows=64).cache.page_rows == 64
    assert ranker_of(served[name], 0, page_rows=64).cache is None


@every_model
@pytest.mark.parametrize("cache", [0, 100_000, CACHE])
def test_a_warm_up_leaves_nothing(served, name, cache):
    """It scores batches of all sizes, of new, cached and grown histories. Then the ranker is as
    new."""
    ranker, new = ranker_of(served[name], cache), ranker_of(served[name], cache)
    score, sizes = ranker.score, set()

    def note(batch):
        scores = score(batch)
        sizes.add((len(batch), len(scores[0]), any(len(x.events.item) for x in batch)))
        return scores

    ranker.score = note
    warm_up(ranker, max_users=9, max_candidates=900)
    ranker.score = score
    assert {(1, 900, False), (1, 1, True), (2, 1, True)} < sizes
    # too small for them
    assert {(8, 100, False), (9, 1, True), (9, 100, False)} < sizes or cache == 100_000
    batch = Requests(ranker).batch()
    assert_same_scores(ranker.score(batch), new.score(batch))
    assert ranker.counts == new.counts
    assert [ranker.histories.length(user) for user in range(25)] == [
        new.histories.length(user) for user in range(25)
    ]


@pytest.mark.gpu
@every_model
@pytest.mark.parametrize("cache", [0, CACHE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_kernel_is_compiled_after_a_warm_up(served, name, cache, dtype, compiled_kernels):
    """In 60 random batches of 1 to 25 users, with and without new events, of 1 to 80 candidates per
    user."""
    ranker = ranker_of(served[name], cache, device=torch.device("cuda"), dtype=dtype)
    warm_up(ranker, max_users=25, max_candidates=2000)
    assert compiled_kernels
    compiled_kernels.clear()
    requests = Requests(ranker)
    for _ in range(60):
        users = requests.random.permutation(25)[: requests.random.integers(1, 26)].tolist()
        batch = [
            requests.of(user, *requests.random.integers([0, 1], [3, 81]).tolist()) for user in users
        ]
        ranker.score(batch)
        assert compiled_kernels == [], [(len(x.events.item), len(x.candidates)) for x in batch]


@every_model
def test_a_ranker_that_forgets(served, name):
    """The scores are those of a new ranker, and encode the histories anew."""
    ranker, new = ranker_of(served[name]), ranker_of(served[name])
    requests = Requests(ranker)
    ranker.score([requests.of(1, events=2), requests.of(2)])
    ranker.forget()
    batch = [requests.of(1), requests.of(2, events=1)]
    assert_same_scores(ranker.score(batch), new.score(batch))
    assert ranker.counts["encoded"] == 4 and not ranker.counts["reused"]


def test_numbers_of_events_of_evicted_users_are_dropped(served):
    """Of next-item models, when there are many others. Without a cache there are none."""
    ranker, whole = ranker_of(served["hstu"], 200_000), ranker_of(served["hstu"], 0)
    requests = Requests(ranker)
    ranker._held = dict.fromkeys(range(100, 2500), 1)
    for user in range(12):
        batch = [requests.of(user)]
        assert_same_scores(ranker.score(batch), whole.score(batch))
    assert ranker._held.keys() - set(range(12)) == set() < ranker._held.keys()
    assert not whole._held


@every_model
def test_a_failure_changes_nothing(served, name, monkeypatch):
    """An error after the cache was written: the events are not stored, and the next scores are
    right."""
    ranker, whole = ranker_of(served[name]), ranker_of(served[name], 0)
    requests = Requests(ranker)
    warm, failing, after = (
        [requests.of(1)],
        [requests.of(1, events=2), requests.of(2, events=1)],
        [requests.of(1), requests.of(2)],
    )
    ranker.score(warm)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ranker.score(failing)
    assert_same_scores(ranker.score(after), whole.score(after))
    assert_same_scores(ranker.score(failing), whole.score(failing))


@every_model
def test_a_failure_that_took_pages_of_others(served, name, monkeypatch):
    """An error behind all writes of a step: users whose pages were taken score as before."""
    ranker, whole = ranker_of(served[name], 200_000, 128), ranker_of(served[name], 0)
    requests = Requests(ranker)
    batches = [[requests.of(user) for user in (i, i + 1)] for i in range(0, 24, 2)]
    for batch in batches:
        ranker.score(batch)
    known = ranker.cache.users()
    assert 2 <= len(known) < 24
    with monkeypatch.context() as patch:
        last = {"hstu": (QueryEncoder, "vectors"), "attention": (RankingHead, "logits")}[name]
        patch.setattr(*last, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ranker.score(
                [requests.of(user, events=1) for user in range(24) if user not in known][:2]
            )
    batch = [requests.of(user) for user in known]
    for request in batch:
        assert_same_scores(ranker.score([request]), whole.score([request]))


@every_model
def test_events_that_are_replaced(served, name):
    """The scores are those of a ranker that never had the first events, also for a user who was
    cached."""
    ranker, whole = ranker_of(served[name]), ranker_of(served[name], 0)
    requests = Requests(ranker)
    ranker.score([requests.of(1, events=2), requests.of(2)])
    events = requests.of(1, events=3).events
    ranker.replace_events(1, events)
    whole.histories.add(1, events, whole.longest_window)
    for count in (0, 1, 0):
        after = [requests.of(1, events=count), requests.of(2)]
        assert_same_scores(ranker.score(after), whole.score(after))


def test_events_that_are_added(served):
    """As joined arrays have them; what was read before stays as it was. Windows are the last events
    of these, of the log's before and of new ones."""
    histories, random = ranker_of(served["hstu"]).histories, np.random.default_rng(0)
    log = [np.array(histories.window(user, NONE, 10**6)) for user in range(3)]
    expected, read = {}, []
    for _ in range(300):
        user, count, keep = (int(random.integers(n)) for n in (3, 9, 40))
        events = NewEvents(*random.integers(100, size=(2, count)))
        if random.random() < 0.05:
            histories.replace(user, events)
            expected[user] = np.array(events)
        else:
            histories.add(user, events, keep + 1)
            if count:
                known = expected.get(user, np.zeros((2, 0), np.int64))
                expected[user] = np.concatenate([known, events], axis=1)[:, -keep - 1 :]
        items, ratings = [], []
        histories.collect(user, NONE, 10**6, items, ratings)
        if user in expected and expected[user].shape[1]:
            read.append(((items[1], ratings[1]), expected[user]))
        known = np.concatenate([log[user], expected.get(user, log[user][:, :0])], axis=1)
        for count in (1, 3, 20, len(known[0]) + 3):
            window = np.concatenate([known, events], axis=1)[:, -count:]
            np.testing.assert_array_equal(np.array(histories.window(user, events, count)), window)
    assert len(read) > 200
    for found, wanted in read:
        np.testing.assert_array_equal(np.array(found), wanted)


@every_model
def test_a_batch_that_the_cache_has_no_room_for(served, name):
    ranker = ranker_of(served[name], 40_000)
    with pytest.raises(jm.CacheFull):
        ranker.score([Requests(ranker).of(user) for user in range(12)])


@every_model
def test_other_weights(served, name, tmp_path):
    """After a reload, scores are those of the new weights, for cached users too. Weights of another
    model are refused."""
    ranker, other = ranker_of(served[name]), train(tmp_path, name, "--seed", "1")
    batch = Requests(ranker).batch()
    before = ranker.score([Request(x.user, x.candidates) for x in batch])
    fresh = ranker_of(served[name], 0)
    for x in (ranker, fresh):
        new = {
            key: value + 0.01 if value.is_floating_point() else value
            for key, value in x.model.state_dict().items()
        }
        assert x.load(Weights(x.settings, x.vocabulary, new))
    batch = [Request(x.user, x.candidates) for x in batch]
    after = ranker.score(batch)
    assert_same_scores(after, fresh.score(batch))
    assert not any(torch.equal(x, y) for x, y in zip(before, after))
    ranker.load(load_weights(served[name]))
    assert_same_scores(ranker.score(batch), before)
    larger = train(tmp_path, name, "--embedding-dim", "32")
    assert larger == other
    with pytest.raises(ValueError, match="^the weights are of another model: .* differ$"):
        ranker.load(load_weights(larger))
    assert_same_scores(ranker.score(batch), before)


@pytest.mark.parametrize(
    ("name", "setting", "value", "error"),
    [
        ("attention", "num_heads", 1, "num_heads is 1, not 2"),
        ("attention", "max_history", 50, "max_history is 50, not 60"),
        ("hstu", "scores", "dot", "scores is 'dot', not 'cosine'"),
    ],
)
def test_weights_of_another_model_with_equal_shapes(served, name, setting, value, error):
    """They would be computed with the old settings, and the scores would not be those of the
    offline evaluation."""
    ranker, weights = ranker_of(served[name]), load_weights(served[name])
    batch = Requests(ranker).batch()
    before = ranker.score(batch)
    other = {key: x + 1 if x.is_floating_point() else x for key, x in weights.tensors.items()}
    with pytest.raises(ValueError, match=f"^the weights are of another model: {error}$"):
        ranker.load(Weights({**weights.settings, setting: value}, weights.vocabulary, other))
    assert_same_scores(ranker.score([Request(x.user, x.candidates) for x in batch]), before)
    ranker.load(
        Weights(
            {**weights.settings, "epochs": 7, "seed": 5, "dropout": 0.1},
            weights.vocabulary,
            weights.tensors,
        )
    )


# -- logged against served -------------------------------------------------------------------------


def test_served_scores_equal_the_offline_evaluation_of_a_ranking_model(served):
    """Each chunk of the test split as a request: its candidates, after the events since the user's
    chunk before."""
    ranker, weights = ranker_of(served["attention"]), load_weights(served["attention"])
    dataset: RankingDataset = train_dlrm.load_datasets(
        options_of(train_dlrm, weights.settings, None)
    )["test"]
    chunks, log = dataset.chunks, dataset.log
    offline, known = ranker_of(served["attention"], 0).model, {}
    compared = 0
    for chunk in range(len(chunks)):
        user, end = int(log.user[chunks.start[chunk]]), int(chunks.history_end[chunk])
        first = np.searchsorted(log.user, user)
        begin = known.get(user, int(first) + ranker.histories.length(user))
        new = slice(begin, max(begin, end))
        if end < begin:
            continue  # ties: events at the time of the split are in the served history already
        request = Request(
            user,
            log.item[chunks.start[chunk] : chunks.end[chunk]],
            NewEvents(log.item[new], dataset.rating_index[new]),
        )
        with torch.no_grad():
            expected = offline(dataset[[chunk]])
        torch.testing.assert_close(ranker.score([request])[0], expected)
        known[user] = max(begin, end)
        compared += len(expected)
    assert compared > 0.9 * len(dataset.labels()) and ranker.counts["encoded"] > 0


def test_served_scores_equal_the_offline_evaluation_of_a_next_item_model(served):
    """Scores of all items after the history of the test split, whose last event comes with the
    request; and the target's rank."""
    ranker, weights = ranker_of(served["hstu"]), load_weights(served["hstu"])
    dataset = train_hstu.load_datasets(options_of(train_hstu, weights.settings, None))["test"]
    model, everything = ranker_of(served["hstu"], 0).model, np.arange(ranker.histories.num_items)
    users = dataset.log.user[dataset.windows.end]
    batch = dataset[list(range(len(dataset)))].add_rivals(torch.from_numpy(everything))
    with torch.no_grad():
        vectors = model(batch)
    last = batch.last_inputs()
    expected = vectors.queries[last] @ vectors.rivals.T
    found = torch.stack([ranker.score([Request(int(user), everything)])[0] for user in users])
    torch.testing.assert_close(found, expected)
    again = torch.stack(ranker.score([Request(int(user), everything, NONE) for user in users]))
    torch.testing.assert_close(again, expected)
    ranks = [
        rank_unseen(scores, batch.targets[last], batch.seen["seen"]) for scores in (found, expected)
    ]
    assert torch.equal(*ranks)


# -- files of weights ------------------------------------------------------------------------------


class Payload:
    """A pickle that would make a folder when it is read."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "save",
    [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))],
    ids=["torch.save", "pickle"],
)
def test_a_file_of_weights_runs_no_code(tmp_path, save):
    save({"settings": {}, "tensors": Payload(tmp_path / "ran")}, tmp_path / "weights.pt")
    with pytest.raises(
        ValueError, match="weights.pt is not a file of weights: it has more"
    ) as told:
        load_weights(tmp_path / "weights.pt")
    assert not (tmp_path / "ran").exists() and "weights_only" not in str(told.value)


def test_a_folder_of_weights(tmp_path):
    with pytest.raises(ValueError, match="is a folder, not a file of weights; in it: none"):
        load_weights(tmp_path)
    (tmp_path / "hstu").mkdir()
    (tmp_path / "hstu" / "weights.pt").touch()
    with pytest.raises(ValueError, match="in it: .*hstu.weights.pt$"):
        load_weights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04"])
def test_a_file_that_is_none_of_weights(tmp_path, content):
    (tmp_path / "weights.pt").write_bytes(content)
    with pytest.raises(ValueError, match="is not a file of weights"):
        load_weights(tmp_path / "weights.pt")


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"settings": {}},
        {"settings": {}, "tensors": [1]},
        {"settings": {}, "tensors": {"x": 1}},
    ],
)
def test_a_file_of_something_else(tmp_path, content):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="is not a file of weights"):
        load_weights(tmp_path / "weights.pt")


def test_weights_are_the_best_average(served):
    """Those of the checkpoint, in a file that was exported again."""
    for path in served.values():
        first = load_weights(path)
        assert export_weights(path.parent) == path
        again = load_weights(path)
        assert first.settings == again.settings and first.tensors.keys() == again.tensors.keys()
        assert all(torch.equal(x, again.tensors[name]) for name, x in first.tensors.items())


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        export_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "attention",
            ["--parts", "stream", "compress"],
            r"parts of \['compress', 'gdpa'\], not interaction attention and parts",
        ),
        ("hstu", ["--intervals"], "is served with the encoder hstu, without intervals"),
    ],
)
def test_models_without_a_cache(tmp_path, name, arguments, message):
    weights = train(tmp_path, name, *arguments)
    with pytest.raises(ValueError, match=message):
        ranker_of(weights)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_with_streams_is_served_without_a_cache(tmp_path, padded, device):
    weights = train(tmp_path, "attention", "--parts", "stream", "compress", "gdpa", "interformer")
    plain, graphed = (
        ranker_of(weights, 0, None, torch.device(device), graphs=graphs) for graphs in (False, True)
    )
    requests = Requests(plain)
    for _ in range(3):
        batch = requests.batch()
        scores = plain.score(batch)
        assert all(x.isfinite().all() for x in scores)
        assert_same_scores(graphed.score(batch), scores)
    assert graphed.run._steps


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_padded_model_repeats_no_history(served, padded, device):
    """Its scores, through `fuse_broadcasts`, are those of the model as it is. Also after other
    weights were loaded, and from graphs."""
    weights = load_weights(served["padded"])
    with estimated_times():
        *fused, plain = (
            make_ranker(weights, torch.device(device), 0, fuse_broadcasts=fuse, graphs=graphs)
            for fuse, graphs in ((True, False), (True, True), (False, False))
        )
    requests = Requests(plain)
    for ranker in fused:
        ranker.model.head.interaction.attention.register_forward_hook(
            lambda *_: pytest.fail("the histories were repeated")
        )
    for ranker in (*fused, plain):
        for x in ranker.model.parameters():
            x.data += 0.01
    for number in range(3):
        batch = [requests.of(user, events=user % 3, candidates=9) for user in range(8 - number)]
        expected = plain.score(batch)
        for ranker in fused:
            assert_same_scores(ranker.score(batch), expected)
    assert fused[1].run._steps


def test_attention_weights(served):
    """They are those of the layer: the values that they weigh give its result."""
    ranker = ranker_of(served["attention"], 0)
    weights = ranker.attention(4, np.array([5, 6, 7]))
    assert weights.shape == (3, min(60, ranker.histories.length(4)))
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(3))
    alone = ranker.attention(4, np.array([6]))
    torch.testing.assert_close(alone[0], weights[1])
    assert ranker_of(served["hstu"]).attention(4, np.array([5])) is None
    assert ranker.device == CPU


@pytest.mark.parametrize("program", [train_dlrm, train_hstu], ids=lambda x: x.__name__)
def test_a_log_that_is_no_longer_where_the_training_had_it(tmp_path, program):
    settings = {"data": "gone.csv"}
    with pytest.raises(FileNotFoundError, match="no file or folder gone.csv, .*: give --data"):
        options_of(program, settings, None)
    assert options_of(program, settings, str(tmp_path)).data == str(tmp_path)
