"""Events that outlive the process, and users who are not in the log."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# `make test-gpu` also runs without these
for _name in ("torchrec", "fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

from serving_app import Service
from serving_bodies import Event, RankBody
from serving_events import NotStored, SQLiteEvents, StoredEvent
from serving_rankers import Ranker

from .running import LIMITS, Running
from .serving import Requests, body_of, ranker_of
from .test_serving_rankers import assert_same_scores

EXAMPLES = Path(__file__).parents[2] / "examples"


def event(user: str, number: int) -> StoredEvent:
    return StoredEvent(user, str(number), number / 2)


@pytest.fixture
def open_store(tmp_path):
    """keep, log → a store of the one file, which is closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(keep=100, log="a log") -> SQLiteEvents:
            store = SQLiteEvents(tmp_path / "events", log, keep)
            stack.callback(store.close)
            return store

        yield opened


def test_events_are_there_after_the_file_is_closed(open_store):
    """In their order, with ids that look like numbers and others, with a rating and without."""
    events = [event("7", 1), event("ä/'", 2), event("7", 0), StoredEvent("7", "007", None)]
    store = open_store()
    store.append(events[:3])
    store.append(events[3:])
    store.close()
    assert open_store().load() == events


def test_the_events_are_bounded(open_store):
    """After each append, a user has the last `keep` events at least, and fewer than 2 * keep. Other
    users keep theirs."""
    store = open_store(keep=4)
    store.append([event("bob", number) for number in range(3)])
    for end in range(3, 90, 3):
        store.append([event("ann", number) for number in range(end - 3, end)])
        if end == 33:  # the counts are those of the file
            store.close()
            store = open_store(keep=4)
        found = [x for x in store.load() if x.user == "ann"]
        assert found == [event("ann", number) for number in range(end - len(found), end)]
        assert min(end, 4) <= len(found) < 8
    store.append([event("ann", number) for number in range(20)])  # more than 2 * keep at once
    assert [x for x in store.load() if x.user == "ann"] == [event("ann", i) for i in range(16, 20)]
    assert len([x for x in store.load() if x.user == "bob"]) == 3


def test_a_user_is_forgotten(open_store):
    store = open_store(keep=2)
    store.append([event("ann", 1), event("ann", 2), event("bob", 1)])
    store.forget("ann")
    store.forget("nobody")
    assert store.load() == [event("bob", 1)]
    store.append([event("ann", 3)])
    assert store.load()[1:] == [event("ann", 3)]


def test_files_that_cannot_be_opened(open_store, tmp_path):
    path = tmp_path / "events"
    open_store().close()
    with pytest.raises(
        ValueError, match="events that follow another log: fingerprint a log, not b"
    ):
        open_store(log="b")
    store = open_store()
    with pytest.raises(OSError, match="events is not a file .* opened: database is locked"):
        open_store()
    store.close()
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(OSError, match="events is not a file .* opened: file is not a database"):
        open_store()
    with pytest.raises(OSError, match="unable to open database file"):
        SQLiteEvents(tmp_path / "nowhere" / "events", "a log", 1)


APPEND = """
import sys
from pathlib import Path
from serving_events import SQLiteEvents, StoredEvent

store = SQLiteEvents(Path(sys.argv[1]), "a log", 10**6)
number = len(store.load())
print("open", flush=True)
while True:
    store.append([StoredEvent("ann", str(number + i), None) for i in range(3)])
    number += 3
    print(number, flush=True)
"""


def test_a_process_that_is_killed_in_the_middle_of_appends(open_store, tmp_path):
    """Six times, after another number of appends. Each acknowledged event is there, none twice, and
    each append as a whole."""
    command = [sys.executable, "-c", APPEND, str(tmp_path / "events")]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    for appends in (1, 2, 20, 3, 50, 7):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            acknowledged = [process.stdout.readline() for _ in range(appends + 1)][-1]
            process.send_signal(signal.SIGKILL)
            acknowledged = (acknowledged, *process.stdout.readlines())[-1]
        store = open_store()
        items = [int(x.item) for x in store.load()]
        store.close()
        assert items == list(range(len(items)))
        # one append may be stored that was not acknowledged yet
        assert len(items) - int(acknowledged) in (0, 3)


# A disk that loses what was not synced: a folder to which a file is copied when it is synced, and
# from which files that are no more are removed when their folder is.
DISK = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static void copy(int from, const char *to) {
    char unfinished[PATH_MAX + 16], block[65536];
    snprintf(unfinished, sizeof unfinished, "%s.unfinished", to);
    int file = open(unfinished, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ssize_t size, place = 0;
    for (; (size = pread(from, block, sizeof block, place)) > 0; place += size)
        if (write(file, block, size) != size) abort();
    close(file);
    rename(unfinished, to);
}

static void remove_others(int folder, const char *disk) {
    char path[PATH_MAX];
    DIR *files = opendir(disk);
    for (struct dirent *x; (x = readdir(files));) {
        snprintf(path, sizeof path, "%s/%s", disk, x->d_name);
        if (faccessat(folder, x->d_name, F_OK, 0)) unlink(path);
    }
    closedir(files);
}

static int synced(const char *name, int file) {
    int result = ((int (*)(int))dlsym(RTLD_NEXT, name))(file);
    char link[64], path[PATH_MAX], own[2 * PATH_MAX], *disk = getenv("DISK");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    struct stat kind;
    if (result || size < 0 || fstat(file, &kind)) return result;
    path[size] = 0;
    snprintf(own, sizeof own, "%s/%s", disk, basename(path));
    if (S_ISDIR(kind.st_mode)) remove_others(file, disk);
    if (S_ISREG(kind.st_mode)) copy(file, own);
    return result;
}
int fsync(int file) { return synced("fsync", file); }
int fdatasync(int file) { return synced("fdatasync", file); }
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and gcc"
)
def test_acknowledged_events_outlive_a_loss_of_power(tmp_path):
    """The files as they were last synced, after so many appends, and after a checkpoint."""
    library, disk = tmp_path / "disk.so", tmp_path / "disk"
    (tmp_path / "disk.c").write_text(DISK)
    build = ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "disk.c", "-ldl"]
    subprocess.run(build, check=True)
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES), "DISK": str(disk)}
    environment |= {"LD_PRELOAD": str(library)}
    for appends in (1, 7, 400):  # the last ones fill the log, which is then written to the file
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        path = tmp_path / f"events{appends}"
        command = [sys.executable, "-c", APPEND, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            acknowledged = [process.stdout.readline() for _ in range(appends + 1)][-1]
            process.send_signal(signal.SIGKILL)
            acknowledged = (acknowledged, *process.stdout.readlines())[-1]
        store = SQLiteEvents(disk / path.name, "a log", 10**6)
        items = [int(x.item) for x in store.load()]
        store.close()
        assert items == list(range(len(items)))
        assert len(items) - int(acknowledged) in (0, 3)


@pytest.fixture
def start():
    """Arguments of a service → it runs, until the end of the test at the latest."""
    with contextlib.ExitStack() as stack:

        def running(ranker: Ranker, **options) -> Running:
            running = Running(Service(ranker, LIMITS, **options))
            stack.callback(running.stop)
            return running

        yield running


def opened(path: Path, ranker: Ranker) -> SQLiteEvents:
    return SQLiteEvents(path, ranker.settings["log_fingerprint"], ranker.longest_window)


@pytest.mark.parametrize("name", ["attention", "hstu"])
def test_a_service_goes_on_with_the_events_of_the_last_one(start, served, tmp_path, name):
    """Its scores are those of a ranker with all events. Users have fewer, as many and more events
    than the model sees."""
    whole, path = ranker_of(served[name], 0), tmp_path / "events"
    requests = Requests(whole)
    for _ in range(3):
        ranker = ranker_of(served[name])
        running = start(ranker, store=opened(path, ranker))
        for user, count in ((3, 1), (4, 0), (5, 20), (5, 20), (5, 11), (3, 2)):
            request = requests.of(user, events=count)
            answer = running.rank(body_of(request, whole))
            assert answer.json()["scores"] == pytest.approx(
                whole.score([request])[0].tolist(), rel=1.3e-6, abs=1e-5
            )
        assert running.admin.delete("/users/4").status_code == 204
        running.stop()
    ranker = ranker_of(served[name])
    ranker.keep_events(store := opened(path, ranker))
    after = [requests.of(user) for user in (3, 4, 5)]
    assert_same_scores(ranker.score(after), whole.score(after))
    ranker.forget_user(5)
    store.close()
    store = opened(path, ranker)
    assert {x.user for x in store.load()} == {"3"}
    store.close()


def test_events_are_stored_before_they_are_answered(start, served, tmp_path):
    """All of a batch, or none: a request whose events cannot be stored gets 503, changes no
    history, and can be sent again. Requests without events are answered."""
    ranker = ranker_of(served["attention"])
    store = opened(tmp_path / "events", ranker)
    running = start(ranker, store=store)
    good = {"user": 3, "candidates": [4, 6, 8]}
    new = {**good, "events": [{"item": 9, "rating": 4}, {"item": 4, "rating": 1}]}
    before, length = running.rank(good).json()["scores"], ranker.histories.length(3)
    store._file.execute(
        "CREATE TRIGGER full BEFORE INSERT ON events WHEN NEW.item = '4'"
        " BEGIN SELECT raise(ABORT, 'database or disk is full'); END"
    )
    answer = running.rank(new)
    assert answer.status_code == 503 and answer.json() == {
        "error": "the events could not be stored: database or disk is full"
    }
    assert store.load() == [] and ranker.histories.length(3) == length
    assert running.rank(good).json()["scores"] == pytest.approx(before, rel=1.3e-6, abs=1e-5)
    store._file.execute("DROP TRIGGER full")
    assert running.rank(new).status_code == 200
    assert store.load() == [StoredEvent("3", "9", 4.0), StoredEvent("3", "4", 1.0)]
    assert ranker.histories.length(3) == length + 2
    running.stop()
    with pytest.raises(sqlite3.ProgrammingError):
        store.load()  # closed


def test_a_user_who_cannot_be_forgotten(start, served, tmp_path):
    ranker = ranker_of(served["attention"])
    running = start(ranker, store=opened(tmp_path / "events", ranker))
    new = {"user": 3, "candidates": [4], "events": [{"item": 9, "rating": 4}]}
    assert running.rank(new).status_code == 200
    length = ranker.histories.length(3)
    ranker.store._file.execute(
        "CREATE TRIGGER kept BEFORE DELETE ON events BEGIN SELECT raise(ABORT, 'read only'); END"
    )
    answer = running.admin.delete("/users/3")
    assert answer.status_code == 503
    assert answer.json() == {"error": "the events could not be removed: read only"}
    assert ranker.histories.length(3) == length
    with pytest.raises(NotStored):
        ranker.forget_user(3)
    running.stop()


@pytest.mark.parametrize(
    "wrong", [event("99", 1), StoredEvent("3", "no item", 4.0), StoredEvent("3", "4", 4.5)]
)
def test_a_store_with_events_of_other_ids(served, open_store, wrong):
    store = open_store()
    store.append([StoredEvent("3", "4", 4.0), wrong])
    ranker = ranker_of(served["attention"])
    with pytest.raises(ValueError, match="is not an event of the log's ids"):
        ranker.keep_events(store)


@pytest.mark.parametrize("name", ["attention", "hstu"])
@pytest.mark.parametrize("cache", [0, 10**7])
def test_the_scores_of_an_empty_history(start, served, name, cache):
    """Of an unknown user: those of a known one without features, whose only events are the
    request's. They are not stored, and other unknown users do not see them."""
    ranker, known = ranker_of(served[name], cache), ranker_of(served[name], 0)
    known.histories._offsets[:] = 0
    if name == "attention":
        known.step.users.fill_(-1)
    running = start(ranker, unknown_users="empty")
    requests = Requests(known)
    for user in ("nobody", "nobody", 25):
        request = requests.of(7, events=2)
        body = body_of(request, known, user=user)
        answer = running.rank(body).json()
        expected = known.score([request])[0].tolist()
        assert answer["scores"] == pytest.approx(expected, rel=1.3e-6, abs=1e-5)
        assert answer["user"] == user and answer["unknown_user"] == "empty"
        known.forget()
    answer = running.rank({"user": 25, "candidates": [4, 6]})
    if name == "attention":
        expected = known.score([requests.of(7, candidates=2)])
        assert answer.status_code == 200 and len(answer.json()["scores"]) == len(expected[0])
    else:
        assert answer.status_code == 422 and "user 25 has no events yet" in answer.json()["error"]
    assert "unknown_user" not in running.rank({"user": 3, "candidates": [4]}).json()
    assert running.metric("rank_unknown_users_total") == 3 + (name == "attention")
    assert not ranker.histories._added and (not cache or ranker.cache.users() == [3])
    running.stop()


def test_unknown_users_of_a_batch_do_not_see_one_another(start, served):
    """One has events, the other none."""
    ranker = ranker_of(served["attention"])
    service = start(ranker, unknown_users="empty").service
    bodies = [RankBody(user="ann", candidates=[4, 6], events=[Event(item=9, rating=5)])]
    bodies.append(RankBody(user="bob", candidates=[4, 6]))
    both = ranker.score([service.to_request(body) for body in bodies])
    for body, scores in zip(bodies, both, strict=True):
        assert_same_scores([scores], ranker.score([service.to_request(body)]))
    assert not torch.equal(*both)


@pytest.mark.parametrize("name", ["attention", "hstu"])
def test_the_popularity_of_candidates(start, served, name):
    ranker = ranker_of(served[name])
    running, histories = start(ranker, unknown_users="popular"), ranker.histories
    events = [{"item": 4, "rating": 4 if ranker.ratings else None}]
    rows = [histories.popularity.argmax(), histories.popularity.argmin(), 4]
    candidates = [histories.items[row] for row in rows]
    body = {"user": "nobody", "candidates": candidates, "events": events}
    answer = running.rank(body).json()
    assert answer["scores"] == [histories._item.tolist().count(row) for row in rows]
    assert answer["scores"][0] > answer["scores"][1] and answer["unknown_user"] == "popular"
    inputs = [
        {"name": "user", "shape": [1], "datatype": "BYTES", "data": ["nobody"]},
        {"name": "candidates", "shape": [2], "datatype": "INT64", "data": candidates[:2]},
    ]
    found = running.client.post("/v2/models/ranker/infer", json={"inputs": inputs}).json()
    assert found["outputs"][0]["data"] == answer["scores"][:2]
    assert found["parameters"] == {"unknown_user": "popular"}
    for wrong in ({"candidates": [-1]}, {"events": [{"item": -1, "rating": 4}]}):
        assert running.rank({**body, **wrong}).status_code == 422
    assert running.client.get("/users/nobody").status_code == 404
    scores = running.rank({"user": 3, "candidates": candidates}).json()["scores"]
    assert scores != answer["scores"] and not histories._added
    running.stop()


def test_an_unknown_policy(served):
    message = r"unknown_users must be of \('error', 'empty', 'popular'\), got 'guess'"
    with pytest.raises(ValueError, match=message):
        Service(ranker_of(served["attention"]), LIMITS, unknown_users="guess")
