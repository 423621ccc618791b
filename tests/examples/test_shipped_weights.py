"""The trained weights of examples/weights: small, and served without a log."""

from pathlib import Path

import pytest

for _name in ("torchrec", "fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

import serve_ranking
from checkpoints import load_weights

from .running import Running

PATH = Path(__file__).parents[2] / "examples/weights/ml-100k.pt"
STAR_WARS, EMPIRE, JEDI = 50, 172, 181  # ids of MovieLens-100k


@pytest.fixture(scope="module")
def running():
    options = ["--weights", str(PATH), "--without-log", "--device", "cpu"]
    options += ["--unknown-users", "empty"]
    running = Running(serve_ranking.make_service(serve_ranking.parse_arguments(options)))
    yield running
    running.stop()


def test_the_file_is_small_and_names_no_path_of_a_machine():
    assert PATH.stat().st_size < 1_000_000
    assert load_weights(PATH).settings["data"] == "data/ml-100k"


@pytest.mark.parametrize("user", [7, "a new one"])
def test_it_ranks_a_sequel_first(running, user):
    """Among all items, but those of the request's events."""
    items = [item for item in range(1, 1683) if item not in (STAR_WARS, EMPIRE)]
    events = [{"item": STAR_WARS}, {"item": EMPIRE}]
    answer = running.rank({"user": user, "candidates": items, "events": events})
    assert answer.status_code == 200, answer.text
    scores = answer.json()["scores"]
    best = sorted(zip(scores, items, strict=True), reverse=True)[:10]
    assert JEDI in [item for _, item in best]


def test_a_user_has_the_events_of_earlier_requests_alone(running):
    body = {"user": 8, "candidates": [JEDI]}
    assert running.rank(body).status_code == 422  # the log has some, but it was not read
    first = running.rank({**body, "events": [{"item": STAR_WARS}, {"item": EMPIRE}]}).json()
    assert running.rank(body).json()["scores"] == pytest.approx(first["scores"])
