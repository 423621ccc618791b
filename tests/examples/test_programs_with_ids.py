"""The programs keep the published ids: from the log to the answer, and from one run to the next."""

import html
import re
import urllib.parse

import pytest
import torch
from checkpoints import load_weights
from serving_models import make_ranker

for _name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

import serve_ranking
from serving_app import Service

from .running import LIMITS, Running
from .serving import CACHE, CPU, PROGRAMS

TINY = "--device cpu --epochs 1 --embedding-dim 16 --num-heads 2 --max-history 20".split()
every_program = pytest.mark.parametrize("name", PROGRAMS)
USERS = {  # the ids of a log
    "text": ["007", "7", "a/b", "é ?", *(f"u{n}" for n in range(8))],
    "integers": [2**70, -5, 0, 2**53, 2**53 + 1, *range(10, 17)],
    "from 1": [*range(1, 13)],
}


def quote(user):
    return urllib.parse.quote(str(user), safe="")


def rows_of(users, items=range(40)):
    """Ratings of the items. Each user has others."""
    return [
        (user, items[(7 * n + 3 * step) % 40], 1 + (n + step) % 5, 100 * step)
        for n, user in enumerate(users)
        for step in range(20)
    ]


def write(folder, rows):
    path = folder / "u.data"
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


def train(name, out, log, *options):
    PROGRAMS[name].main([*TINY, "--data", str(log), "--out", str(out), *options])
    return out / name / "weights.pt"


@every_program
@pytest.mark.parametrize("users", USERS.values(), ids=USERS)
def test_requests_and_answers_have_the_ids_of_the_log(tmp_path, name, users):
    """Each user's events are those of the log. The order of the ids in the file decides about
    nothing."""
    items = (
        [f"item {number}" if number % 2 else str(number) for number in range(40)]
        if users == USERS["text"]
        else range(100, 140)
    )
    rows = rows_of(users, items)
    ranker = make_ranker(
        load_weights(train(name, tmp_path / "out", write(tmp_path, rows))), CPU, CACHE
    )
    running = Running(Service(ranker, LIMITS))
    try:
        for user in users:
            found = running.client.get(
                f"/users/{quote(user)}", params={"candidates": [items[3]]}
            ).json()
            seen = [event["item"] for event in found["events"]]
            assert (found["user"], type(found["user"])) == (user, type(user))
            assert (
                seen + found["held_out"] == [item for x, item, *_ in rows if x == user]
                and len(seen) >= 16
            )
            answers = [
                running.rank({"user": form, "candidates": [items[3], str(items[9])]}).json()
                for form in (user, str(user))
            ]
            assert answers[0]["scores"] == pytest.approx(answers[1]["scores"], abs=1e-5)
            assert [(answer["user"], type(answer["user"])) for answer in answers] == [
                (user, type(user))
            ] * 2
        for unknown in ("07", "nobody", 10**30, "", "None"):
            assert running.rank({"user": unknown, "candidates": [items[3]]}).status_code == 404
        event = {"item": items[5], **({"rating": 4} if ranker.ratings else {})}
        assert (
            running.rank(
                {"user": str(users[1]), "candidates": [items[3]], "events": [event]}
            ).status_code
            == 200
        )
        newest = [
            running.client.get(f"/users/{quote(user)}").json()["events"][-1]["item"] == items[5]
            for user in users[:2]
        ]
        assert newest == [False, True]
    finally:
        running.stop()


@every_program
def test_a_log_with_columns_of_other_names(tmp_path, name):
    """Is read in the same way by training, by a run that goes on, and by the server."""
    rows = "".join(
        f"{1000 * time};{item};{user};{int(rating > 2)}\n"
        for user, item, rating, time in rows_of(USERS["text"], [f"i{n}" for n in range(40)])
    )
    log = tmp_path / "clicks.txt"
    log.write_text("ms;what;who;clicked\n" + rows, encoding="utf-8")
    form = ["--columns", "user=who", "item=what", "rating=clicked", "time=ms", "--time-unit", "ms"]
    form += ["--separator", ";", *(["--liked", "1"] if name == "attention" else [])]
    weights = load_weights(train(name, tmp_path / "out", log, *form))
    train(name, tmp_path / "out", log, *form, "--epochs", "2", "--resume")
    assert weights.vocabulary.names["user"] == sorted(USERS["text"])
    running = Running(Service(make_ranker(weights, CPU, CACHE), LIMITS))
    try:
        first = html.escape(min(USERS["text"]))
        assert f'id="user" value="{first}"' in running.client.get("/").text
        found = running.client.get("/users/u3", params={"candidates": ["i5"]}).json()
        items = [event["item"] for event in found["events"]] + found["held_out"]
        assert items == [
            row.split(";")[1] for row in rows.splitlines() if row.split(";")[2] == "u3"
        ]
    finally:
        running.stop()


@pytest.mark.parametrize("columns", [["rating=3"], ["time=4"], []], ids=str)
def test_a_ranking_model_needs_ratings_and_times(tmp_path, columns):
    log = write(tmp_path, rows_of(range(12)))
    with pytest.raises(
        SystemExit, match="train_dlrm: .*u.data: a ranking model needs a column of .*; train_hstu"
    ):
        train("attention", tmp_path / "out", log, "--columns", "user=1", "item=2", *columns)


OTHER_LOGS = {  # of as many users, items and events
    "other users": rows_of(range(2, 14)),
    "other items": rows_of(range(1, 13), [*range(39), 99]),
    "ids that are text": rows_of(["01", *range(2, 13)]),
}
OTHER_EVENTS = {
    "items of other users": rows_of([2, 1, *range(3, 13)]),
    "another rating": [(1, 0, 2, 0), *rows_of(range(1, 13))[1:]],
    "another time": [(1, 0, 1, 1), *rows_of(range(1, 13))[1:]],
}


@every_program
def test_another_log_is_refused(tmp_path, name):
    """With one line, by training that is resumed and by the server, although all sizes are
    equal."""
    log, out = write(tmp_path, rows_of(range(1, 13))), tmp_path / "out"
    weights = train(name, out, log)
    other = tmp_path / "other"
    other.mkdir()
    for rows in (OTHER_LOGS | OTHER_EVENTS).values():
        with pytest.raises(SystemExit) as served:
            serve_ranking.main(
                ["--weights", str(weights), "--device", "cpu", "--data", str(write(other, rows))]
            )
        where = (
            "its ids are the same, its"
            if rows in OTHER_EVENTS.values()
            else r"row \d+ of '\w+' is "
        )
        pattern = (
            rf"serve_ranking: {other}/u.data is not the log that the weights were trained on:"
            rf" fingerprint \w{{16}}, not \w{{16}}; {where}"
        )
        assert re.match(pattern, served.value.code), served.value.code
    for rows in (OTHER_LOGS | OTHER_EVENTS).values():
        write(tmp_path, rows)
        with pytest.raises(
            SystemExit,
            match=r"epoch-1 is of a run with other settings: log_fingerprint '\w{16}' -> '\w{16}'$",
        ):
            train(name, out, log, "--epochs", "2", "--resume")
    train(name, out, write(tmp_path, rows_of(range(1, 13))), "--epochs", "2", "--resume")


@every_program
def test_new_weights_may_be_of_a_log_with_other_events(tmp_path, name):
    """The server that reads them keeps its histories. It refuses those of a log with other ids,
    whose rows are of the wrong users."""
    log = write(tmp_path, rows_of(range(1, 13)))
    ranker = make_ranker(load_weights(train(name, tmp_path / "out", log)), CPU, CACHE)
    newer = load_weights(
        train(name, tmp_path / "newer", write(tmp_path, OTHER_EVENTS["items of other users"]))
    )
    assert ranker.load(newer) and not ranker.load(newer)
    other = load_weights(
        train(name, tmp_path / "other", write(tmp_path, OTHER_LOGS["other users"]))
    )
    prints = f"{other.vocabulary.fingerprint}, not {newer.vocabulary.fingerprint}"
    with pytest.raises(
        ValueError,
        match=(
            f"^the weights are of a log with other ids: fingerprint {prints}; row 0 of 'user' is 2,"
            " not 1$"
        ),
    ):
        ranker.load(other)
    assert not ranker.load(newer)


def test_weights_without_ids_are_refused(tmp_path):
    """As earlier versions wrote them."""
    torch.save({"settings": {}, "tensors": {}}, tmp_path / "weights.pt")
    with pytest.raises(
        SystemExit,
        match=(
            "^serve_ranking: .*weights.pt is not a file of weights: it has no ids.* train the model"
            " anew$"
        ),
    ):
        serve_ranking.main(["--weights", str(tmp_path / "weights.pt")])
