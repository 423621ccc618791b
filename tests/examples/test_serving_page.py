"""The page in a real browser: headless Chromium loads it from a running service, runs its script
and prints the document."""

import re
import shutil
import subprocess

import pytest
import torch

for _name in ("fastapi", "uvicorn", "httpx", "prometheus_client"):
    pytest.importorskip(_name, reason='needs the extra "serve"')

import serving_app
from serving_app import Service

from ..marks import PATIENCE
from .running import LIMITS, Running
from .serving import ranker_of

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")


@pytest.fixture(params=["attention", "hstu"])
def running(request, served):
    running = Running(Service(ranker_of(served[request.param]), LIMITS))
    yield running
    running.stop()


def document(running: Running, query: str) -> str:
    """The document after the script ran."""
    url = f"http://127.0.0.1:{running.address[1]}/?{query}"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=8000",
        "--dump-dom",
    ]
    return subprocess.run(
        [BROWSER, *options, url], capture_output=True, text=True, timeout=PATIENCE, check=True
    ).stdout


def rows(text: str, table: str) -> list[list[str]]:
    body = re.search(rf'<tbody id="{table}">(.*?)</tbody>', text, re.DOTALL)[1]
    return [
        re.findall(r"<td>(.*?)</td>", row, re.DOTALL)
        for row in re.findall(r"<tr.*?>(.*?)</tr>", body, re.DOTALL)
    ]


def test_the_page_shows_history_ranking_attention_and_latency(running):
    ranker = running.service.ranker
    found = document(running, "user=3&candidates=4 6 8")
    ranking = rows(found, "ranking")
    scores = running.rank({"user": 3, "candidates": [4, 6, 8]}).json()["scores"]
    order = torch.tensor(scores).argsort(descending=True).tolist()
    assert ranking == [
        [str(i + 1), str(4 + 2 * k), f"{scores[k]:.4f}"] for i, k in enumerate(order)
    ]
    assert re.search(
        r'role="status">3 candidates in \d+\.\d ms, of which \d+\.\d ms in the queue; weights'
        r" version 1<",
        found,
    )
    expected = running.client.get("/users/3", params={"candidates": [4 + 2 * order[0]]}).json()
    history = rows(found, "history")
    assert [int(row[0]) for row in history] == [
        event["item"] for event in reversed(expected["events"])
    ]
    if ranker.needs_history:
        assert history[0][2] == "none: candidates do not attend to the history"
    else:
        weights = [float(re.search(r'data-weight="(.*?)"', row[2])[1]) for row in history]
        assert weights == [float(f"{x:.4f}") for x in reversed(expected["attention"][0])]


def test_the_page_takes_the_held_out_items_and_shows_errors(running):
    assert [int(row[1]) for row in rows(document(running, "user=3"), "ranking")]
    assert "404: no user '99' in the log, whose first user is 0" in document(
        running, "user=99&candidates=4"
    )


def test_a_chosen_candidate_is_an_event_of_the_user_who_is_shown(running, tmp_path, monkeypatch):
    """Also if another user's number was typed since."""
    script = """<script>
      const click = () => {
        if (!element("history").rows.length) return setTimeout(click, 20);
        element("user").value = 4;
        element("choose").click();
      };
      click();
    </script>"""
    page = tmp_path / "page.html"
    page.write_text(serving_app.PAGE.read_text().replace("</body>", f"{script}</body>"))
    monkeypatch.setattr(serving_app, "PAGE", page)
    histories = running.service.ranker.histories
    before = [histories.length(user) for user in (3, 4)]
    newest = rows(document(running, "user=3&candidates=4"), "history")[0]
    assert newest[0] == "4" and [histories.length(user) for user in (3, 4)] == [
        before[0] + 1,
        before[1],
    ]
