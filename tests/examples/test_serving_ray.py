"""Replicas on Ray Serve on this machine: affinity of users, scores, faults, scaling, and a replica
that is killed. Skipped without Ray."""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

httpx = pytest.importorskip("httpx", reason='needs the extra "serve"')
ray = pytest.importorskip("ray", reason='needs the package "ray[serve]"')
serve = pytest.importorskip("ray.serve", reason='needs the package "ray[serve]"')

import serving_ray
import serving_replicas
from fastapi import HTTPException
from ray.serve.exceptions import BackPressureError

from ..marks import PATIENCE
from .serving import Requests, body_of, ranker_of

TWO = ["--min-replicas", "2", "--max-replicas", "2"]
DELAYS = ["--look-back", "11", "--upscale-delay", "1", "--downscale-delay", "1"]
DEADLINE = {"deadline_ms": 1e3 * PATIENCE}
ONE_OR_TWO = ["--max-replicas", "2", "--target-ongoing-requests", "5", *DELAYS]
NO_REPLICA = [
    (["--min-replicas", "0"], "not 0 and 4"),
    (["--min-replicas", "3", "--max-replicas", "2"], "not 3 and 2"),
]


# -- without processes of Ray ----------------------------------------------------------------------


async def owners_of(sets_of_replicas, users):
    """For each set of replicas the replica of each user."""
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID
    from ray.serve.request_router import ReplicaID

    deployment, config = DeploymentID("Replica"), serving_replicas.ROUTER
    router = config.get_request_router_class()(deployment, DeploymentHandleSource.REPLICA)
    router.initialize_state(**config.request_router_kwargs)
    owners = []
    for names in sets_of_replicas:
        router.update_replicas(
            [SimpleNamespace(replica_id=ReplicaID(name, deployment)) for name in names]
        )
        replicas, chosen = list(router.curr_replicas.values()), []
        for user in range(users):
            request = SimpleNamespace(
                metadata=SimpleNamespace(session_id=str(user)), routing_context=SimpleNamespace()
            )
            ((replica,),) = await router.choose_replicas(replicas, request)
            chosen.append(replica.replica_id.unique_id)
        owners.append(chosen)
    return owners


def test_few_users_move_when_a_replica_comes_or_goes():
    """The new replica takes users of all others, no user moves between the others, and all return
    when it goes."""
    four, five, users = "abcd", "abcde", 5000
    before, with_e, reordered, after = asyncio.run(owners_of([four, five, five[::-1], four], users))
    moved = [(old, new) for old, new in zip(before, with_e, strict=True) if old != new]
    assert {new for _, new in moved} == {"e"} and {old for old, _ in moved} == set(four)
    assert 0.1 < len(moved) / users < 0.3  # 1 in 5, and the hash ring's unevenness
    assert min(before.count(name) for name in four) > 0.15 * users
    assert with_e == reordered and before == after


@pytest.mark.parametrize(("arguments", "message"), NO_REPLICA)
def test_numbers_of_replicas_that_do_not_fit_end_with_one_line(arguments, message):
    with pytest.raises(
        SystemExit,
        match=(
            f"serving_ray: --min-replicas must be at least 1 and at most --max-replicas, {message}"
        ),
    ):
        serving_ray.main(["--weights", "any.pt", *arguments])


class Replicas:
    """Two replicas and their store in this process, and a ranker that scores the same requests."""

    def __init__(self, weights, monkeypatch):
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="name"))
        monkeypatch.setattr(serve, "get_replica_context", lambda: context)
        self.store = serving_replicas.EventStore.func_or_class()
        handle = SimpleNamespace(
            **{name: SimpleNamespace(remote=getattr(self.store, name)) for name in ("get", "add")}
        )
        options = serving_ray.parse_arguments(
            ["--weights", str(weights), "--device", "cpu", "--cache-mb", "10"]
        )
        self.replicas = [serving_replicas.Replica.func_or_class(handle, options) for _ in range(2)]
        self.handle, self.offline = handle, ranker_of(weights, 0)
        self.requests = Requests(self.offline)

    def close(self):
        for replica in self.replicas:
            replica.service.batcher.close()

    async def rank(self, index, request):
        """The status, and the scores or None."""
        status, answer = await self.replicas[index].rank(body_of(request, self.offline, **DEADLINE))
        return status, torch.tensor(answer["scores"]) if status == 200 else None

    async def check(self, index, user, events=0):
        """The scores of the replica are those of the ranker in this process."""
        request = self.requests.of(user, events)
        status, scores = await self.rank(index, request)
        assert status == 200
        torch.testing.assert_close(scores, self.offline.score([request])[0])


@pytest.fixture(params=["attention", "hstu"])
def local(request, served, monkeypatch):
    replicas = Replicas(served[request.param], monkeypatch)
    yield replicas
    replicas.close()


def test_a_user_who_moves_keeps_the_new_events(local):
    async def move():
        for step, index in enumerate([0, 0, 1, 1, 0, 1, 0, 0]):
            for user in (3, 4):
                await local.check(index, user, events=(step + user) % 3)

    asyncio.run(move())
    encoded = [replica.service.ranker.counts["encoded"] for replica in local.replicas]
    assert sum(encoded) < 16  # those who stayed were cached


def test_two_replicas_that_add_events_of_a_user_at_once(local):
    """As when one router knows of a new replica and another does not yet. Both events are stored,
    and both replicas read them."""

    async def collide():
        await local.check(0, 3, events=1)
        requests = [local.requests.of(3, events=1) for _ in local.replicas]
        answers = await asyncio.gather(
            *(local.rank(index, request) for index, request in enumerate(requests))
        )
        assert [status for status, _ in answers] == [200, 200]
        stored = local.offline.histories.items.rows(
            event["item"] for event in local.store.events["3"]
        ).tolist()[1:]
        for request in sorted(requests, key=lambda request: stored.index(request.events.item[0])):
            local.offline._add_events([request])
        for index in (0, 1, 0):
            await local.check(index, 3, events=index)

    asyncio.run(collide())


def test_a_user_whose_id_is_a_number_or_text(local):
    """It is one user, whose events meet in the store."""

    async def send():
        for index, form in ((0, int), (1, str), (0, str)):
            request = local.requests.of(3, events=1)
            body = body_of(request, local.offline, **DEADLINE)
            status, answer = await local.replicas[index].rank({**body, "user": form(body["user"])})
            assert (status, answer["user"]) == (200, 3)
            torch.testing.assert_close(
                torch.tensor(answer["scores"]), local.offline.score([request])[0]
            )

    asyncio.run(send())
    assert [*local.store.events] == ["3"] and len(local.store.events["3"]) == 3


def test_events_that_could_not_be_stored_are_forgotten(local):
    """The request fails, and can be sent again."""

    async def fail(*_):
        raise ConnectionError

    async def send():
        await local.check(0, 3, events=1)
        request, add = local.requests.of(3, events=2), local.handle.add.remote
        local.handle.add.remote = fail
        assert (await local.rank(0, request))[0] == 500
        local.handle.add.remote = add
        await local.check(0, 3)
        assert (await local.rank(0, request))[0] == 200
        local.offline.score([request])
        await local.check(0, 3)
        await local.check(1, 3)

    asyncio.run(send())


def test_a_deadline_counts_while_the_user_has_other_requests(local):
    """The second one waits for its turn until the deadline has passed."""

    async def send():
        replica, get = local.replicas[0], local.handle.get.remote

        async def slow(*arguments):
            await asyncio.sleep(0.1)
            return await get(*arguments)

        local.handle.get.remote = slow
        body = body_of(local.requests.of(3), local.offline, **DEADLINE)
        return await asyncio.gather(replica.rank(body), replica.rank({**body, "deadline_ms": 50}))

    (first, _), (second, answer) = asyncio.run(send())
    assert (first, second) == (200, 504) and "the deadline passed in the queue" in answer


def test_requests_that_ray_refuses():
    """With 429, as those that a replica refuses."""

    async def refuse(_):
        raise BackPressureError(num_queued_requests=1000, max_queued_requests=1000)

    handle = SimpleNamespace(rank=SimpleNamespace(remote=refuse))
    ingress = SimpleNamespace(replicas=SimpleNamespace(options=lambda session_id: handle))
    with pytest.raises(HTTPException, match="429: 1000 requests wait for the user's replica"):
        asyncio.run(
            serving_replicas.Ingress.func_or_class.rank(
                ingress, serving_replicas.RankBody(user=3, candidates=[1])
            )
        )


# -- with processes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """The port of Ray Serve."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {
        "env_vars": {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
    }
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        runtime_env=environment,
        logging_level="error",
    )
    serve.start(http_options={"port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


class Deployment:
    """The replicas, a client, and a ranker that scores the same requests in this process."""

    def __init__(self, port, weights, *arguments):
        options = serving_ray.parse_arguments(
            ["--weights", str(weights), "--device", "cpu", "--cpus", "0.5", *arguments]
        )
        serve.run(serving_replicas.make_application(options))
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)
        self.offline = ranker_of(weights, 0)
        self.requests = Requests(self.offline)
        self.lock, self.weights = threading.Lock(), weights

    def rank(self, user, events=0):
        """Send a request, and compare the scores with those in this process. Returns the replica
        that answered."""
        with self.lock:
            request = self.requests.of(user, events)
        answer = self.client.post("/rank", json=body_of(request, self.offline, **DEADLINE))
        assert answer.status_code == 200, answer.text
        with self.lock:
            (expected,) = self.offline.score([request])
        torch.testing.assert_close(torch.tensor(answer.json()["scores"]), expected)
        return answer.json()["replica"]

    def counts(self):
        """The counts of each replica."""
        return {counts["replica"]: counts for counts in self.client.get("/counts").json()}


@pytest.fixture(scope="module", params=["attention", "hstu"])
def two(request, cluster, served):
    """Always two replicas."""
    return Deployment(cluster, served[request.param], *TWO)


@pytest.mark.slow
def test_two_replicas(two, tmp_path):
    users = range(12)
    replicas = [[two.rank(user, events=step % 2) for user in users] for step in range(4)]
    assert replicas == [replicas[0]] * 4
    counts = two.counts()
    assert (
        counts.keys() == set(replicas[0])
        and len({x["process"] for x in counts.values()} | {os.getpid()}) == 3
    )
    for name, x in counts.items():
        assert x["reused"] + x["appended"] + x["encoded"] == 4 * replicas[0].count(name) and x[
            "reused"
        ] >= replicas[0].count(name)
    # they are those in place
    assert two.client.post("/reload").json() == {"weights_version": [1, 1]}
    two.weights.rename(tmp_path / "weights.pt")
    answer = two.client.post("/reload")
    assert answer.status_code == 409 and "No such file" in answer.json()["error"]
    (tmp_path / "weights.pt").rename(two.weights)
    for body, status in (
        ('{"user": 99, "candidates": [1]}', 404),
        ('{"user": 1, "candidates": []}', 422),
        ('{"user": 1, "candidates": [-1]}', 422),
        ('{"user": NaN, "candidates": [1]}', 422),
        ('{"user": 1', 400),
        ('{"user": 1, "candidates": [1]}' + " " * 1_000_000, 413),
    ):
        answer = two.client.post(
            "/rank", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == status and answer.json()["error"]
    assert [two.rank(user) for user in users] == replicas[0]


@pytest.mark.slow
def test_a_replica_that_is_killed(two):
    """The other replica goes on, and serves the users of the first with their new events. Ray
    replaces the replica."""
    users = range(12)
    replicas = [two.rank(user, events=1) for user in users]
    killed, other = replicas[0], next(name for name in replicas if name != replicas[0])
    os.kill(two.counts()[killed]["process"], signal.SIGKILL)
    assert two.rank(replicas.index(other)) == other
    end = time.monotonic() + PATIENCE
    while (
        two.client.post("/rank", json={"user": 0, "candidates": [1]}).status_code != 200
        or len(two.counts()) < 2
    ):
        assert time.monotonic() < end
        time.sleep(0.5)
    after = [two.rank(user, events=1) for user in users]
    assert killed not in after
    assert len(set(after)) == 2 and all(
        new == other
        for old, new in zip(replicas, after, strict=True)
        if old == other and new in replicas
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "hstu"])
def test_scaling_from_one_replica_to_two_and_back(cluster, served, name):
    """All requests are answered with the scores of the whole histories, and users move only when a
    replica comes or goes.

    12 users send one request after the other, then 3 of them, which are too few for two replicas,
    but some request is always on its way.
    """
    deployment = Deployment(cluster, served[name], *ONE_OR_TWO)
    replicas, failures, users = defaultdict(list), [], range(12)
    is_calm, stop = threading.Event(), threading.Event()

    def send(user):
        try:
            while not stop.is_set():
                replicas[user].append(deployment.rank(user, events=len(replicas[user]) % 2))
                time.sleep(1 if is_calm.is_set() and user >= 3 else 0)
        except BaseException as error:
            failures.append(error)
            raise

    def wait_for(number):
        end = time.monotonic() + PATIENCE
        while len(deployment.counts()) != number and not failures:
            assert time.monotonic() < end, number
            time.sleep(0.5)

    threads = [threading.Thread(target=send, args=(user,)) for user in users]
    wait_for(1)
    (first,) = deployment.counts()
    for thread in threads:
        thread.start()
    try:
        wait_for(2)
        time.sleep(2)
        is_calm.set()
        wait_for(1)
        time.sleep(2)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert len({name for user in users for name in replicas[user]}) == 2
    for user in users:
        moves = sum(old != new for old, new in zip(replicas[user], replicas[user][1:]))
        assert replicas[user][0] == first and moves <= 2, replicas[user]
