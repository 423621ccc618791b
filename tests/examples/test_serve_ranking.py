"""The program itself: starts from one command, answers all requests before it stops, and comes back
after it was killed."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

for _name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

import httpx
import serve_ranking
from load_generator import address_of

from ..marks import PATIENCE

ROOT = Path(__file__).parents[2]


class Program:
    """python examples/serve_ranking.py, and a client."""

    def __init__(self, *arguments):
        paths = [str(ROOT), str(ROOT / "kernels"), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"}
        options = ["--device", "cpu", "--port", "0", "--deadline-ms", 1e3 * PATIENCE, *arguments]
        command = [sys.executable, str(ROOT / "examples" / "serve_ranking.py"), *map(str, options)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        address, self.before = address_of(self.process, PATIENCE)
        self.client = httpx.Client(base_url=address, timeout=PATIENCE)
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
            "serve_ranking: .*README.md is not a file of weights",
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
    ],
)
def test_bad_options(capsys, option, value, expected):
    with pytest.raises(SystemExit):
        serve_ranking.main([f"--{option}={value}"])
    assert f"--{option} must be {expected}" in capsys.readouterr().err
