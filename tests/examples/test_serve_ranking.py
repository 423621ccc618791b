"""The program itself: starts from one command, answers all requests before it stops, and comes back
after it was killed."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

for _name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

import httpx
import serve_ranking
from checkpoints import load_weights
from load_generator import address_of
from serving_events import SQLiteEvents

from .. import warm
from ..marks import PATIENCE

ROOT = Path(__file__).parents[2]


class Program:
    """python examples/serve_ranking.py, and a client."""

    def __init__(self, *arguments, verify=True):
        paths = [str(ROOT), str(ROOT / "kernels"), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"}
        options = ["--device", "cpu", "--port", "0", "--deadline-ms", 1e3 * PATIENCE, *arguments]
        program = ROOT / "examples" / "serve_ranking.py"
        self.process = warm.Popen([program, *options], env=environment)
        address, self.before = address_of(self.process, PATIENCE)
        self.client = httpx.Client(base_url=address, timeout=PATIENCE, verify=verify)
        assert self.is_healthy()

    def is_healthy(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def rank(self, user: int) -> httpx.Response:
        return self.client.post("/rank", json={"user": user, "candidates": [4, 6, 8]})

    def received(self) -> float:
        """The number of requests that wait or were answered."""
        names = r'rank_queue_length|rank_requests_total\{status="200"\}'
        return sum(
            map(
                float,
                re.findall(rf"^(?:{names}) (\S+)$", self.client.get("/metrics").text, re.MULTILINE),
            )
        )

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def test_a_terminated_program_answers_all_requests(served):
    program = Program("--weights", served["attention"], "--max-wait-ms", 2000)
    with ThreadPoolExecutor(10) as threads:
        answers = [threads.submit(program.rank, user) for user in range(10)]
        end = time.monotonic() + PATIENCE
        while program.received() < 10:  # they wait for others of their batch
            assert time.monotonic() < end
        assert program.end(signal.SIGTERM) in (0, -signal.SIGTERM)
        assert [answer.result().status_code for answer in answers] == [200] * 10
    assert not program.is_healthy()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "hstu"])
def test_a_killed_program_serves_the_same_scores_after_a_restart(served, name):
    scores = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        program = Program("--weights", served[name])
        scores.append([program.rank(user).json()["scores"] for user in (1, 2, 1)])
        program.end(number)
    assert scores[0] == scores[1]


@pytest.fixture
def certificate(tmp_path):
    """Of 127.0.0.1, and the key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    options = "req -x509 -nodes -newkey rsa:2048 -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", *options.split(), "-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def test_a_killed_program_has_the_events_that_it_acknowledged(served, tmp_path, certificate):
    """Each once, though it is killed while four clients send events. With a file of options, TLS,
    an access log and the admin's port."""
    (tmp_path / "token").write_text("a token of the admin")
    paths = {"weights": served["attention"], "events": tmp_path / "events"}
    paths |= {"access-log": tmp_path / "access.jsonl", "admin-token": tmp_path / "token"}
    paths |= {"tls-certificate": certificate[0], "tls-key": certificate[1]}
    config = tmp_path / "options.toml"
    numbers = "admin-port = 0\nmax-candidates = 7\nport = 1\n"  # the port is overridden
    config.write_text(numbers + "".join(f"{k} = {str(x)!r}\n" for k, x in paths.items()))
    verify = ssl.create_default_context(cafile=certificate[0])
    weights = load_weights(served["attention"])
    items = weights.vocabulary.names["item"]

    def send(program: Program, user: int, first: int) -> int:
        """Send events until none is acknowledged any more. Returns the number of the last one."""
        for number, item in enumerate(items[first:], first):
            event = {"item": item, "rating": 4}
            body = {"user": user, "candidates": [4], "events": [event]}
            try:
                assert program.client.post("/rank", json=body).status_code == 200
            except httpx.TransportError:
                return number
            acknowledged.release()
        raise AssertionError("the program was not killed")

    stored = dict.fromkeys((1, 2, 3, 4), 0)
    for _ in range(2):
        program, acknowledged = Program("--config", config, verify=verify), threading.Semaphore(0)
        for user, count in stored.items():
            events = program.client.get(f"/users/{user}").json()["events"][-count or 50 :]
            assert not count or [x["item"] for x in events] == items[max(0, count - 50) : count]
        with ThreadPoolExecutor(4) as threads:
            sent = {user: threads.submit(send, program, user, n) for user, n in stored.items()}
            assert all(acknowledged.acquire(timeout=PATIENCE) for _ in range(40))
            program.end(signal.SIGKILL)
        log = weights.settings["log_fingerprint"]
        store = SQLiteEvents(tmp_path / "events", log, len(items))
        for user in stored:
            known = [x.item for x in store.load() if x.user == str(user)]
            assert known == [str(item) for item in items[: len(known)]]
            # one may be stored that was not acknowledged yet
            assert len(known) - sent[user].result() in (0, 1)
            stored[user] = len(known)
        store.close()
    lines = [json.loads(x) for x in (tmp_path / "access.jsonl").read_text().splitlines()]
    # a line follows its answer: each kill may lose the last one of each client
    assert [(x["path"], x["status"]) for x in lines].count(("/rank", 200)) >= 80 - 2 * len(stored)


def test_the_admin_of_the_program(served, tmp_path):
    """Its port is printed first. The options are those of the command line and of the file."""
    (tmp_path / "token").write_text("a token of the admin")
    (tmp_path / "options.json").write_text('{"max_queue": 9, "name": "x", "max-users": 5}')
    options = ["--weights", served["attention"], "--admin-token", tmp_path / "token"]
    options += ["--admin-port", 0, "--config", tmp_path / "options.json", "--name", "mine"]
    program = Program(*options)
    address = re.search(r"^admin on (\S+)$", program.before, re.MULTILINE)[1]
    headers = {"authorization": "Bearer a token of the admin"}
    with httpx.Client(base_url=address, timeout=PATIENCE, headers=headers) as admin:
        assert admin.post("/reload").json() == {"weights_version": 1}
        found = admin.get("/config").json()
        expected = {"max-queue": 9, "max-users": 5, "name": "mine", "device": "cpu"}
        assert {name: found[name] for name in expected} == expected
        assert "a token" not in str(found)
    assert program.client.get("/v2/models/mine").status_code == 200
    assert program.end(signal.SIGTERM) in (0, -signal.SIGTERM)


def test_printed_options_are_a_file_of_options(tmp_path, capsys):
    config = tmp_path / "options.toml"
    options = [
        "--cache-mb=64",
        "--max-queue=9",
        "--no-graphs",
        "--access-log=-",
        "--events",
        'a "name"',
    ]
    serve_ranking.main([*options, "--print-config"])
    config.write_text(printed := capsys.readouterr().out)
    serve_ranking.main([f"--config={config}", "--print-config"])
    assert capsys.readouterr().out == printed
    for line in ("max-queue = 9", "graphs = false", r'events = "a \"name\""', "cache-mb = 64.0"):
        assert f"{line}\n" in printed


@pytest.mark.slow
def test_without_weights_a_small_model_is_trained_once(tmp_path):
    outputs = []
    for _ in range(2):
        program = Program("--out", tmp_path)
        assert program.rank(1).status_code == 200
        program.end(signal.SIGTERM)
        outputs.append(program.before)
    assert ["training a small model" in output for output in outputs] == [True, False]
    assert (tmp_path / "attention" / "weights.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "nowhere.pt"], "serve_ranking: .*No such file or directory: 'nowhere.pt'"),
        (
            ["--weights", str(ROOT / "README.md")],
            "serve_ranking: .*README.md is not a file of weights: .* not written by torch.save$",
        ),
    ],
)
def test_bad_options_end_with_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        serve_ranking.main(arguments)


def test_an_unknown_device(served):
    message = "serve_ranking: device must be auto, cpu, cuda, cuda:0, ..., not 'no'"
    with pytest.raises(SystemExit, match=message):
        serve_ranking.main(["--weights", str(served["attention"]), "--device", "no"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        # the batches would have no requests, without end
        ("--max-users", "max_users must be at least 1, got 0"),
        ("--max-queue", "max_queue must be at least 1, got 0"),
        ("--max-candidates", "max_candidates must be at least 1, got 0"),
        ("--deadline-ms", "deadline must be positive, got 0.0 s"),
        ("--page-rows", "page_rows must be at least 1, got 0"),
    ],
)
def test_limits_of_zero(served, option, message):
    with pytest.raises(SystemExit, match=f"serve_ranking: {message}"):
        serve_ranking.main(["--weights", str(served["attention"]), option, "0"])


@pytest.mark.parametrize("name", ["attention", "hstu"])
# less than a page; less than the longest history
@pytest.mark.parametrize("megabytes", ["0.0001", "0.005"])
def test_a_cache_without_room_for_a_history(served, name, megabytes):
    message = (
        f"^serve_ranking: --cache-mb {megabytes} is too small for the longest history: max_bytes"
        " (must be at least a page|allows)"
    )
    with pytest.raises(SystemExit, match=message):
        serve_ranking.main(["--weights", str(served[name]), "--cache-mb", megabytes])


def test_weights_whose_scores_are_infinite(served, tmp_path):
    content = torch.load(served["attention"])
    content["tensors"] = {name: torch.full_like(x, 3e38) for name, x in content["tensors"].items()}
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(SystemExit, match="^serve_ranking: the model's scores are not finite"):
        serve_ranking.main(["--weights", str(tmp_path / "weights.pt")])


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_wait_that_no_thread_can_wait(served, value):
    """The scoring thread would end, again and again."""
    with pytest.raises(
        SystemExit, match="serve_ranking: max_wait must be finite and at least 0, got"
    ):
        serve_ranking.main(["--weights", str(served["attention"]), f"--max-wait-ms={value}"])


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("threads", "0", "at least 1, not 0"),
        ("port", "99999", "at least 0 and below 65536, not 99999"),
        ("cache-mb", "nan", "finite and at least 0, not nan"),
        ("cache-mb", "-1", "finite and at least 0, not -1.0"),
        ("admin-port", "-1", "at least 0 and below 65536, not -1"),
        ("name", "a/b", "letters, digits, '_', '.' or '-', not 'a/b'"),
        ("tls-key", "x", "given together with --tls-certificate"),
    ],
)
def test_bad_options(capsys, option, value, expected):
    with pytest.raises(SystemExit):
        serve_ranking.main([f"--{option}={value}"])
    assert f"--{option} must be {expected}" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--data", "x"], ["--unknown-users", "popular"]])
def test_what_needs_a_log(capsys, options):
    with pytest.raises(SystemExit):
        serve_ranking.main(["--without-log", *options])
    message = "--without-log cannot be given with --data or --unknown-users popular"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--admin-token", "nowhere"], "No such file or directory: 'nowhere'"),
        (["--events", "nowhere/events"], "nowhere/events is not a file of events"),
        (["--tls-certificate", "nowhere", "--tls-key", "nowhere"], "No such file or directory"),
        (["--access-log", "nowhere/log"], "No such file or directory: .*nowhere/log"),
    ],
)
def test_files_of_options_that_are_not_there(served, options, message):
    with pytest.raises(SystemExit, match=f"^serve_ranking: .*{message}"):
        serve_ranking.main(["--weights", str(served["attention"]), "--port=0", *options])


def test_a_port_that_is_taken(served):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"^serve_ranking: cannot listen on 127.0.0.1, port {port}: Address already in use"
        with pytest.raises(SystemExit, match=message):
            serve_ranking.main(["--weights", str(served["attention"]), f"--port={port}"])
