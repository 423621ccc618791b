"""The leaderboard: each implementation runs in a process of its own, which may crash or hang."""

import json
import sys
import textwrap
from types import SimpleNamespace

import bench_layers
import leaderboard
import pytest
import runner
import stu

from .. import warm
from ..marks import PATIENCE

# stands in for Meta's package: computes the definition, and crashes with TMA
PACKAGE = {
    "common.py": """
        static = []

        def set_static_max_seq_lens(lengths):
            static[:] = lengths
    """,
    "ops/triton/triton_hstu_attention.py": """
        import os
        import torch
        from types import SimpleNamespace
        from generative_recommenders import common

        _hstu_attn_bwd = SimpleNamespace(configs=[])

        def triton_hstu_mha(N, alpha, q, k, v, seq_offsets, num_targets, enable_tma):
            if enable_tma:
                os.abort()
            assert common.static == [N] and num_targets is None
            outs = []
            for q, k, v in zip(*(x.split(seq_offsets.diff().tolist()) for x in (q, k, v))):
                scores = torch.einsum("qhd,khd->hqk", q, k) * alpha
                weights = (torch.nn.functional.silu(scores) / N).tril()
                outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            print("a peer may print")
            return torch.cat(outs)
    """,
}
CASES = leaderboard.make_cases("cpu", True)
CASE, OTHER, *_ = [case for case in CASES if case.table == leaderboard.ATTENTION]
FAST = ["--rounds", "1", "--pause", "0", "--warmup", "0", "--rep", "0.1"]


def test_a_crash_is_a_row(tmp_path, monkeypatch, capsys):
    for name, text in PACKAGE.items():
        path = tmp_path / "generative_recommenders" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    popen = lambda command, stderr, **_: warm.Popen(command[1:], stderr=stderr)  # noqa: E731
    monkeypatch.setattr(leaderboard, "subprocess", SimpleNamespace(Popen=popen, PIPE=None))
    only = f"^{CASE.table}: {CASE.name}$"
    arguments = ["--tiny", "--device", "cpu", "--only", only, "--peers", "HSTU attention", *FAST]
    assert leaderboard.run_board([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-leaderboard.json")
    rows = {row["implementation"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == [leaderboard.META, leaderboard.META_TMA]
    right, crashed = rows.values()
    assert right["status"] == "ok" and right["forward_ms"] and right["forward_backward_ms"]
    assert crashed["status"].startswith("unavailable: its process ended with -6")
    assert f"{CASE.table} | {CASE.name} | {leaderboard.META} |" in capsys.readouterr().out


def test_together_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "Peer", None)  # begins a process
    only, peers = f"^{CASE.table}: {CASE.name}$", rf"^{leaderboard.OURS}$|^Meta.*\(Triton\)$"
    arguments = ["--tiny", "--device", "cpu", "--together", "--only", only, "--peers", peers, *FAST]
    assert leaderboard.run_board([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-leaderboard.json")
    ours, meta = json.loads(path.read_text())["rows"]
    assert ours["status"] == "ok" and ours["forward_backward_ms"]
    assert meta["implementation"] == leaderboard.META and meta["status"].startswith("unavailable")


@pytest.fixture
def peer(monkeypatch):
    """Makes one whose process runs the given code."""
    peers = []

    def make(code: str, left: float) -> leaderboard.Peer:
        monkeypatch.setattr(leaderboard, "command", lambda *_: [sys.executable, "-c", code])
        peers.append(leaderboard.Peer("a peer", True, runner.Protocol("cpu"), left))
        return peers[-1]

    yield make
    for one in peers:
        if one.process is not None:
            one.stop()


def test_a_peer_that_hangs_is_stopped(peer):
    one = peer("import time; time.sleep(60)", 0.1)
    for _ in range(2):
        (row,) = one.measure(CASE)
        assert row["status"] == leaderboard.SPENT and one.process is None


@pytest.mark.parametrize("said, message", [("no device\n\n", "no device"), ("", "no message")])
def test_a_peer_that_cannot_begin_has_a_row_for_each_case(peer, said, message):
    one = peer(f"raise SystemExit({said!r})" if said else "import os; os._exit(1)", PATIENCE)
    for _ in range(2):
        (row,) = one.measure(CASE)
        assert row["status"] == f"unavailable: its process ended with 1: {message}"


def test_a_process_ends_after_an_error(peer):
    row = {"status": "unavailable: forward: AcceleratorError"}
    one = peer(f"import json; input(); print(json.dumps([{row}])); input()", PATIENCE)
    first = one.process
    assert one.measure(CASE) == one.measure(CASE) == [row]
    assert first.poll() is not None and one.process is None


def test_a_missing_peer_is_not_started_again(peer):
    row = {"status": "unavailable: ModuleNotFoundError: No module named 'x'"}
    one = peer(f"import json; input(); print(json.dumps([{row}]))", PATIENCE)
    assert one.measure(CASE) == [row]
    (again,) = one.measure(OTHER)
    assert again["status"] == row["status"] and one.process is None


def test_every_implementation_has_a_process():
    for case in CASES:
        assert set(case.setup().implementations) - {bench_layers.MODULES} <= set(
            leaderboard.PEERS[case.table]
        )


def test_the_summary_compares_with_the_fastest_that_computes_the_same():
    def row(implementation: str, ms: float, **columns) -> dict:
        return {
            **leaderboard.blank(CASE, implementation),
            "status": "ok",
            "forward_ms": ms,
            **columns,
        }

    rows = [
        row(leaderboard.OURS, 2.0),
        row(leaderboard.META, 3.0),
        row(leaderboard.META_TMA, 2.5),
        row(leaderboard.FA2, 1.0, note=leaderboard.SOFTMAX_NOTE),
        row(leaderboard.NVIDIA, 1.0),
        row(stu.STU, 1.0, status="wrong: forward"),
    ]
    (line,) = leaderboard.summary(rows)
    assert line.endswith(f"forward_ms: {leaderboard.OURS} is 1.25 × {leaderboard.META_TMA}")


def test_cases_are_in_order_and_published_rows_have_some():
    """A run that is stopped has layers and attention of full segments first."""
    cases = leaderboard.make_cases("cpu", False)
    assert [case.table for case in cases[:7]] == [leaderboard.LAYER] * 6 + [leaderboard.ATTENTION]
    assert len({(case.table, case.name) for case in cases}) == len(cases)
    names = {case.name for case in cases}
    assert {f"B{b} N{n} D{d}" for b, n, d in leaderboard.PUBLISHED} <= names
