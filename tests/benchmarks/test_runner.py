"""The benchmark runner from command line to files, on the CPU with small row sums."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import report
import runner
import torch
from runner import Case, Implementation, Setup

FAST = ["--device", "cpu", "--pause", "0", "--warmup", "0", "--rep", "0.1"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def squares_setup(rows: int, **functions) -> Setup:
    """out = x² on ``[rows, 8]``; the reference covers the first two rows."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    grad = torch.ones_like(x)

    def reference(dtype):
        sample = x.detach()[:2].to(dtype)
        return {"out/first": sample * sample, "dx/first": 2 * sample}

    def build(function):
        return Implementation(lambda: function(x), {"x": x}, lambda name, t: {"first": t[:2]}, grad)

    implementations = {name: partial(build, function) for name, function in functions.items()}
    return Setup(
        implementations,
        reference,
        torch.float32,
        flops=8.0 * rows,
        backward_flops=16.0 * rows,
        bytes=64.0 * rows,
    )


def multiply(x):
    return x * x


def power(x):
    return x**2


def missing(x):
    import a_package_nobody_has  # noqa: F401


def last_row_lost(x):
    """Right on the sampled rows; the last row is never written."""
    out = torch.full_like(x, float("nan"))
    out[:-1] = x[:-1] ** 2
    return out


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad


def run(tmp_path: Path, cases: list[Case], *arguments: str) -> tuple[int, dict, Path]:
    status = runner.main(
        "squares", lambda device, tiny: cases, [*FAST, "--out", str(tmp_path), *arguments]
    )
    (path,) = tmp_path.glob("*-squares.json")
    return status, json.loads(path.read_text()), path


def squares_case(name: str = "4 rows", timed: bool = True, **functions) -> Case:
    return Case("squares", name, partial(squares_setup, 4, **functions), timed=timed)


def test_a_run_leaves_json_table_and_picture_that_agree(tmp_path, capsys):
    cases = [
        squares_case(multiply=multiply, power=power),
        squares_case("untimed", timed=False, multiply=multiply),
    ]
    status, results, path = run(tmp_path, cases, "--rounds", "3")

    assert status == 0
    assert results["complete"]
    assert results["environment"]["torch"] == torch.__version__
    assert results["protocol"]["rounds"] == 3 and "3 rounds" in results["protocol"]["text"]
    assert [(row["case"], row["implementation"]) for row in results["rows"]] == [
        ("4 rows", "multiply"),
        ("4 rows", "power"),
        ("untimed", "multiply"),
    ]
    for row in results["rows"][:2]:
        for key, flops in (("forward", 32.0), ("forward_backward", 96.0)):
            assert len(row[f"{key}_rounds_ms"]) == 3
            assert row[f"{key}_ms"] == min(row[f"{key}_rounds_ms"]) > 0
            assert row[f"{key}_tflops"] == pytest.approx(flops / row[f"{key}_ms"] / 1e9)
            # torch counts no CPU memory: nothing is made up
            assert row[f"{key}_peak_bytes"] is None
        assert row["input_bytes"] == 4 * 8 * 4
        assert set(row["forward_backward_errors"]) == {"out/first", "dx/first"}
    assert "forward_ms" not in results["rows"][2]

    table = path.with_suffix(".md").read_text()
    assert table in capsys.readouterr().out
    (line,) = (line for line in table.splitlines() if line.startswith("| 4 rows | power |"))
    assert report.number(results["rows"][1]["forward_ms"]) in line
    assert "peak MB" not in table  # a column without a figure is left out
    assert path.with_suffix(".png").read_bytes().startswith(PNG_SIGNATURE)
    # no temporary file stays
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".md", ".png"]


def test_an_unavailable_implementation_is_reported_and_the_others_are_measured(tmp_path, capsys):
    status, results, path = run(tmp_path, [squares_case(missing=missing, multiply=multiply)])
    unavailable, measured = results["rows"]
    assert status == 0
    assert (
        unavailable["status"]
        == "unavailable: forward: ModuleNotFoundError: No module named 'a_package_nobody_has'"
    )
    assert "a_package_nobody_has" in unavailable["traceback"]
    assert "forward_ms" not in unavailable and measured["forward_ms"] > 0
    assert unavailable["status"] in path.with_suffix(".md").read_text()
    assert unavailable["status"] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda x: x * x * 1.001, r"out/first has relative error 1\.00e-03"),
        (lambda x: (x * x).to(torch.float16).float(), r"out/first has relative error"),
        (lambda x: (x * x)[:, :4], r"shape \(2, 4\)"),
        (last_row_lost, "out is not finite everywhere"),
    ],
    ids=["scaled", "low-precision", "shape", "unwritten-row"],
)
def test_a_wrong_implementation_is_never_timed(tmp_path, function, complaint):
    status, results, _ = run(tmp_path, [squares_case(wrong=function, multiply=multiply)])
    wrong, right = results["rows"]
    assert status == 1
    assert re.match("wrong: .*" + complaint, wrong["status"])
    assert not [key for key in wrong if key.endswith("_ms") and key != "host_ms"]
    assert right["status"] == "ok" and right["forward_ms"] > 0


def test_a_wrong_gradient_leaves_the_forward_only(tmp_path):
    status, results, _ = run(tmp_path, [squares_case(wrong=WrongGradient.apply)])
    (row,) = results["rows"]
    assert status == 1
    assert row["status"].startswith("wrong: forward+backward: dx/first has relative error 5.00e-01")
    assert row["forward_ms"] > 0 and "forward_backward_ms" not in row


def test_outputs_are_poisoned_before_the_checked_call():
    """A function that keeps handing out its first output is caught, because that memory was filled
    with NaN."""
    once = torch.zeros(4, 8)
    calls = []

    def writes_only_once(x):
        if not calls:
            once.copy_(x.detach() ** 2)
        calls.append(1)
        return once

    case = Case("squares", "kept output", lambda: forward_only(writes_only_once))
    (row,) = runner.run_case(case, runner.Protocol("cpu"), re.compile(""))
    assert row["status"] == "wrong: forward: out is not finite everywhere"


def forward_only(function) -> Setup:
    setup = squares_setup(4, f=function)
    built = setup.implementations["f"]()
    x = built.inputs["x"].detach()
    implementation = Implementation(lambda: function(x), {"x": x}, built.pick)
    return Setup({"f": lambda: implementation}, setup.reference, setup.dtype)


def test_an_implementation_without_gradients_is_measured_forward_only(tmp_path):
    _, results, _ = run(tmp_path, [Case("squares", "forward", lambda: forward_only(multiply))])
    (row,) = results["rows"]
    assert row["forward_ms"] > 0
    assert not [key for key in row if key.startswith("forward_backward")]


def test_the_backward_alone_is_measured_on_a_kept_graph(tmp_path):
    calls = []

    def multiply_and_count(x):
        calls.append(torch.is_grad_enabled())
        return x * x

    case = Case(
        "squares", "alone", partial(squares_setup, 4, count=multiply_and_count), backward_alone=True
    )
    _, results, path = run(tmp_path, [case], "--rounds", "2")
    (row,) = results["rows"]
    assert set(row["forward_backward_errors"]) == {"out/first", "dx/first"}  # checked as always
    assert row["forward_ms"] > 0 and "forward_backward_ms" not in row
    assert (
        row["backward_ms"] == min(row["backward_rounds_ms"]) and len(row["backward_rounds_ms"]) == 2
    )
    assert row["backward_tflops"] == pytest.approx(64.0 / row["backward_ms"] / 1e9)
    assert sum(calls) == 2 + 2  # two checks, one graph a round however often its backward runs
    assert "| backward ms |" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize("steps", [1, 3])
def test_wall_time_ends_when_the_device_is_done(steps, monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("done"))
    wall_ms, host_ms = runner.measure_ms(
        lambda: events.append("call"),
        runner.Protocol("cuda", pause_s=0, warmup_ms=0, rep_ms=0),
        steps,
    )
    assert wall_ms >= 0 and host_ms is None
    # to warm up, and at least three times
    assert events == ["done", *[*["call"] * steps, "done"] * 4]


def test_wall_time_is_of_each_step(monkeypatch):
    times = itertools.count(step=60.0)  # seconds between two readings
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(times))
    assert runner.wall_median_ms(lambda: None, 0.0, 0.0, 20) == 3000.0


@pytest.mark.parametrize(("attainable", "floor_ms"), [((1e9, 1e6), 32e-3), ((1e6, 1e9), 256e-3)])
def test_floor_and_speed_up(tmp_path, attainable, floor_ms):
    """32 FLOP and 256 bytes forward: the longer of the two is the floor."""
    setup = dataclasses.replace(
        squares_setup(4, power=power, multiply=multiply), attainable=attainable, baseline="multiply"
    )
    _, results, path = run(tmp_path, [Case("squares", "a", lambda: setup, picture="speedup")])
    first, baseline = results["rows"]
    assert baseline["forward_speedup"] == 1
    assert first["forward_speedup"] == pytest.approx(baseline["forward_ms"] / first["forward_ms"])
    assert first["forward_floor_ms"] == pytest.approx(floor_ms)
    assert first["forward_floor_percent"] == pytest.approx(100 * floor_ms / first["forward_ms"])
    assert [column for _, column, _, _ in report.measured_panels(results["rows"])] == [
        "forward_speedup",
        "forward_backward_speedup",
    ]
    assert "| forward % of floor |" in path.with_suffix(".md").read_text()


def test_floor_and_speed_up_of_the_backward_alone(tmp_path):
    setup = dataclasses.replace(
        squares_setup(4, power=power, multiply=multiply), attainable=(1e6, 1e6), baseline="multiply"
    )
    setup = dataclasses.replace(setup, backward_bytes=128.0)
    _, results, path = run(tmp_path, [Case("squares", "a", lambda: setup, backward_alone=True)])
    first, baseline = results["rows"]
    assert first["backward_speedup"] == pytest.approx(
        baseline["backward_ms"] / first["backward_ms"]
    )
    assert first["backward_floor_percent"] == pytest.approx(100 * 128e-3 / first["backward_ms"])
    text = path.with_suffix(".md").read_text()
    assert "| backward % of floor |" in text and "| backward speed-up |" in text


def test_the_summary_stands_above_the_tables(tmp_path):
    arguments = [*FAST, "--out", str(tmp_path)]
    cases = [squares_case("a", multiply=multiply), squares_case("b", multiply=multiply)]
    runner.main(
        "squares",
        lambda device, tiny: cases,
        arguments,
        summary=lambda rows: [f"There are {len(rows)} rows."],
    )
    (path,) = tmp_path.glob("*-squares.md")
    text = path.read_text()
    assert 0 < text.index("There are 2 rows.") < text.index("## squares")


def test_tables_of_another_form_stand_below(tmp_path):
    def broken(device, tiny):
        raise MemoryError("too large")

    def sides(device, tiny):
        return [
            {"device": device, "side": 0.5, "text": "a|b"},
            {"device": f"tiny: {tiny}", "other": 12345.6},
        ]

    def run_main(*options):
        cases, others = [squares_case(multiply=multiply)], {"sides": sides, "areas": broken}
        arguments = [*FAST, "--tiny", "--out", str(tmp_path), *options]
        return runner.main("squares", lambda device, tiny: cases, arguments, other_tables=others)

    assert run_main() == 0
    (path,) = tmp_path.glob("*-squares.json")
    lines = path.with_suffix(".md").read_text().splitlines()
    start = lines.index("## sides")
    assert lines.index("## squares") < start
    assert lines[start + 2 : start + 6] == [
        "| device | side | text | other |",
        "|---|---|---|---|",
        "| cpu | 0.5 | a\\|b | – |",
        "| tiny: True | – | – | 12346 |",
    ]
    assert "| unavailable: MemoryError: too large |" in lines
    results = json.loads(path.read_text())
    assert results["complete"] and "MemoryError" in results["other_tables"]["areas"][0]["traceback"]

    run_main("--only", "sides")
    results = json.loads(next(tmp_path.glob("*-squares-2.json")).read_text())
    assert not results["rows"] and list(results["other_tables"]) == ["sides"]


def test_a_setup_that_fails_is_a_row_too(tmp_path):
    def broken():
        raise MemoryError("too large")

    _, results, _ = run(
        tmp_path, [Case("squares", "huge", broken), squares_case(multiply=multiply)]
    )
    assert [(row["implementation"], row["status"]) for row in results["rows"]] == [
        ("(setup)", "unavailable: MemoryError: too large"),
        ("multiply", "ok"),
    ]


def test_only_and_impl_select(tmp_path):
    cases = [
        squares_case("a", multiply=multiply, power=power),
        squares_case("b", multiply=multiply, power=power),
    ]
    _, results, _ = run(tmp_path, cases, "--only", "squares: b", "--impl", "^pow")
    assert [(row["case"], row["implementation"]) for row in results["rows"]] == [("b", "power")]
    with pytest.raises(SystemExit):
        runner.main(
            "squares",
            lambda device, tiny: cases,
            [*FAST, "--out", str(tmp_path), "--only", "nothing"],
        )


def test_a_second_run_of_a_day_does_not_overwrite_the_first(tmp_path):
    _, _, first = run(tmp_path, [squares_case(multiply=multiply)])
    text = first.read_text()
    runner.main(
        "squares", lambda device, tiny: [squares_case(power=power)], [*FAST, "--out", str(tmp_path)]
    )
    assert first.read_text() == text
    assert len(list(tmp_path.glob("*-squares-2.*"))) == 3


def test_cases_finished_before_a_kill_are_kept(tmp_path):
    """The process is killed, uncatchably, in its second case."""
    script = tmp_path / "bench_killed.py"
    script.write_text(
        textwrap.dedent("""
            import os, signal, sys
            import runner
            from test_runner import multiply, squares_case

            killed = runner.Case("squares", "killed", lambda: os.kill(os.getpid(), signal.SIGKILL))
            runner.main("squares", lambda device, tiny: [squares_case(multiply=multiply), killed], sys.argv[1:])
            """)  # noqa: E501
    )
    path = os.pathsep.join([str(Path(runner.__file__).parent), str(Path(__file__).parent)])
    out = tmp_path / "results"
    command = [sys.executable, str(script), *FAST, "--out", str(out)]
    process = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False
    )
    assert process.returncode == -9
    (saved,) = out.glob("*.json")
    results = json.loads(saved.read_text())
    assert not results["complete"]
    assert [row["case"] for row in results["rows"]] == ["4 rows"]
    assert results["rows"][0]["forward_ms"] > 0
    assert "did not finish" in saved.with_suffix(".md").read_text()


def test_report_redraws_from_json(tmp_path):
    _, _, path = run(tmp_path, [squares_case(multiply=multiply)])
    table = path.with_suffix(".md").read_text()
    path.with_suffix(".md").unlink()
    path.with_suffix(".png").unlink()
    subprocess.run([sys.executable, report.__file__, str(path)], check=True)
    assert path.with_suffix(".md").read_text() == table
    assert path.with_suffix(".png").read_bytes().startswith(PNG_SIGNATURE)


def test_options_of_the_report(capsys, tmp_path):
    for arguments, code, message in (
        (["--help"], 0, "usage: .* RUN.json"),
        ([str(tmp_path / "x.json")], 2, "error: no file .*x.json"),
    ):
        with pytest.raises(SystemExit) as error:
            report.main(arguments)
        printed = capsys.readouterr()
        assert error.value.code == code and re.search(message, printed.out + printed.err)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")

    def half(temporary):
        temporary.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        report.write_atomically(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.12345, "0.123"), (3.0, "3"), (1234.5, "1234"), (45.67, "45.7")],
)
def test_numbers_in_tables(value, text):
    assert report.number(value) == text


def test_no_benchmark_imports_another():
    """Except bench_batch_invariant, which measures the cases of the others."""
    benches = set(Path(runner.__file__).parent.glob("bench_*.py"))
    importing = {
        path.name
        for path in benches
        if re.search(r"^ *(from|import) bench_", path.read_text(), re.MULTILINE)
    }
    assert len(benches) >= 6 and importing == {"bench_batch_invariant.py"}
