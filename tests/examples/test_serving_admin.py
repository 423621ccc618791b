"""The admin's interface, over real sockets."""

import pytest

for _name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

from serving_admin import read_token
from serving_app import Service

from .running import LIMITS, TOKEN, Running
from .serving import ranker_of

REQUESTS = [("POST", "/reload"), ("GET", "/config"), ("DELETE", "/users/3")]


@pytest.fixture(scope="module")
def running(served):
    running = Running(Service(ranker_of(served["attention"]), LIMITS))
    yield running
    running.stop()


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer x" + TOKEN, f"Basic {TOKEN}", TOKEN])
@pytest.mark.parametrize("method, path", REQUESTS)
def test_without_the_token_nothing_is_done(running, method, path, header):
    headers = {} if header is None else {"authorization": header}
    running.admin.headers.pop("authorization")
    try:
        answer = running.admin.request(method, path, headers=headers)
    finally:
        running.admin.headers["authorization"] = f"Bearer {TOKEN}"
    assert answer.status_code == 401 and answer.json() == {"error": "a token is needed"}
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "x-request-id" in answer.headers


@pytest.mark.parametrize("method, path", REQUESTS)
def test_the_public_port_has_none_of_its_requests(running, method, path):
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = running.client.request(method, path, headers=headers)
    assert answer.status_code in (404, 405)


def test_the_admins_port_has_no_public_requests(running):
    for path in ("/", "/health", "/metrics", "/users/3", "/openapi.json", "/docs"):
        assert running.admin.get(path).status_code in (404, 405)
    assert running.admin.post("/rank", json={"user": 3, "candidates": [4]}).status_code == 404


def test_the_configuration(running):
    assert running.admin.get("/config").json() == {"port": 0}


def test_a_user_is_forgotten(running):
    """The events of requests, not those of the log."""
    body = {"user": 3, "candidates": [4, 6, 8]}
    before = running.rank(body).json()["scores"]
    running.rank({**body, "events": [{"item": 9, "rating": 4}]})
    assert running.rank(body).json()["scores"] != before
    assert running.admin.delete("/users/3").status_code == 204
    assert running.rank(body).json()["scores"] == pytest.approx(before, rel=1.3e-6, abs=1e-5)
    answer = running.admin.delete("/users/99")
    assert answer.status_code == 404 and "no user '99' in the log" in answer.json()["error"]


def test_a_short_token_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text(f" {'x' * 16}\n")
    assert read_token(path) == "x" * 16
    path.write_text(f" {'x' * 15}\n")
    with pytest.raises(ValueError, match="must have a token of at least 16 characters, got 15"):
        read_token(path)
