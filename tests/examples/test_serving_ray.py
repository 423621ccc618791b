"""Two shards on Ray Serve on this machine: affinity of users, scores, faults, and a replica that is killed. Skipped without Ray."""

import os
import signal
import socket
import sys
import time

import pytest
import torch

from .serving import Requests, ranker_of

httpx = pytest.importorskip("httpx", reason='needs the extra "serve"')
ray = pytest.importorskip("ray", reason='needs the package "ray[serve]"')
serve = pytest.importorskip("ray.serve", reason='needs the package "ray[serve]"')
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["attention", "hstu"])
def deployed(request, served):
    """The weights, and a client of their deployment."""
    import serving_ray

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}}
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, runtime_env=environment, logging_level="error")
    serve.start(http_options={"port": port})
    weights = served[request.param]
    options = serving_ray.parse_arguments(["--weights", str(weights), "--shards", "2", "--device", "cpu", "--cpus", "0.5"])
    serve.run(serving_ray.make_application(options))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield weights, client
    serve.shutdown()
    ray.shutdown()


def test_two_shards(deployed):
    weights, client = deployed
    offline, requests = ranker_of(weights, 0), None
    requests = Requests(offline)
    ratings = offline.ratings or [None]
    for step in range(4):
        for user in (2, 3, 4, 7):
            request = requests.of(user, events=step % 2)
            events = [{"item": int(i), "rating": ratings[r]} for i, r in zip(*request.events, strict=True)]
            answer = client.post("/rank", json={"user": user, "candidates": request.candidates.tolist(), "events": events}).json()
            assert answer["shard"] == user % 2
            torch.testing.assert_close(torch.tensor(answer["scores"]), offline.score([request])[0])
    counts = client.get("/counts").json()
    assert len({x["process"] for x in counts} | {os.getpid()}) == 3
    for shard in counts:
        assert shard["reused"] + shard["appended"] + shard["encoded"] == 8 and shard["reused"] >= 2
    assert client.post("/reload").json() == {"weights_version": [2, 2]}
    for body, status in (
        ({"user": 99, "candidates": [1]}, 404),
        ({"user": 1, "candidates": []}, 422),
        ({"user": 1, "candidates": [-1]}, 422),
    ):
        assert client.post("/rank", json=body).status_code == status
    assert client.post("/rank", json={"user": 1, "candidates": [1]}).status_code == 200


def test_a_replica_that_is_killed(deployed):
    """The other shard goes on, and Ray replaces the replica."""
    _, client = deployed
    before = client.get("/counts").json()
    os.kill(before[0]["process"], signal.SIGKILL)
    assert client.post("/rank", json={"user": 1, "candidates": [1]}).status_code == 200
    end = time.monotonic() + 120
    while time.monotonic() < end:
        answer = client.post("/rank", json={"user": 2, "candidates": [1, 2]})
        if answer.status_code == 200:
            break
        time.sleep(0.5)
    assert len(answer.json()["scores"]) == 2
    after = client.get("/counts").json()
    assert after[0]["process"] != before[0]["process"] and after[1]["process"] == before[1]["process"]
