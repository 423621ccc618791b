"""The record: of the runs of tiny benchmarks, of the results that are in the repository, and of rows made for a test."""

import json
import math
import re
import shutil
from pathlib import Path

import bench_attention
import bench_block_attention
import bench_gdpa
import bench_jagged_ops
import bench_linear_compress
import headline
import pytest
import record
import record_pictures
import runner
from headline import Column, Headline, Row
from published import HEADLINES, OURS, PORTABLE

BENCHES = {
    "attention": bench_attention,
    "block_attention": bench_block_attention,
    "gdpa": bench_gdpa,
    "jagged_ops": bench_jagged_ops,
    "linear_compress": bench_linear_compress,
}
RESULTS = Path(record.__file__).parent / "results" / "nvidia-h200"
DATE = "2026-11-21"
FAST = ["--tiny", "--device", "cpu", "--pause", "0", "--warmup", "0", "--rep", "0.1"]


def result(implementation: str = OURS, status: str = "ok", case: str = "a", **values) -> dict:
    return {"table": "t", "case": case, "implementation": implementation, "status": status, "picture": "", **values}


def run_of(folder: Path, name: str, rows: list[dict], date: str = f"{DATE}T00:00:00+00:00", **extra) -> None:
    environment = {"device": "a device", "date": date, "command": "python bench_op.py --out /somewhere --pause 0", "torch": "2"}
    run = {"op": "op", "environment": environment, "protocol": {"text": "As ever."}, "complete": True, "rows": rows, **extra}
    (folder / f"{date[:10]}-{name}.json").write_text(json.dumps(run))


# -- a table -----------------------------------------------------------------------------------------------------------


def table(*columns: Column, row: Row) -> list[str]:
    measured = [
        result(forward_ms=2.0, backward_ms=8.0, note="padded; 12 MFLOP forward"),
        result("peer", forward_ms=6.0, backward_ms=12.0),
        result("absent", "unavailable: ImportError: a|b"),
        result("half", "wrong: forward+backward: dq", forward_ms=3.0),
    ]
    head = Headline("k", "title", "source", "published", "caveat", "op", "t", columns, [row])
    return headline.cells(head, row, record.by_key({"op": "op", **x} for x in measured))


def test_values_literals_ratios_and_what_is_missing():
    columns = [Column("published"), Column("ms", "forward_ms/backward_ms"), Column("over", "forward_ms/backward_ms", OURS, "peer")]
    assert table(*columns, row=Row("x", "a", OURS, cells=["1.9"])) == ["1.9", "2 / 8", "3 / 1.5"]
    assert table(*columns, row=Row("x", "b", OURS)) == ["", "missing", "missing"]
    assert table(*columns, row=Row("x", cells=["1.9"], instead="no")) == ["1.9", "no", ""]
    assert table(*columns[:2], row=Row("x", "a", OURS, cells=["", "–"])) == ["", "–"]


def test_an_unavailable_peer_says_so_and_a_wrong_gradient_leaves_the_forward():
    columns = [Column("ms", "forward_ms"), Column("both", "forward_ms/backward_ms"), Column("back", "backward_ms")]
    assert table(*columns, row=Row("x", "a", "absent")) == ["unavailable: ImportError: a\\|b"] * 3
    assert table(*columns, row=Row("x", "a", "half")) == ["3", "3 / –", "wrong: forward+backward: dq"]


def test_derived_values():
    assert table(Column("µs", "forward_us"), Column("FLOPs", "mflop"), row=Row("x", "a", OURS)) == ["2000", "12"]
    assert table(Column("µs", "backward_us"), Column("FLOPs", "mflop"), row=Row("x", "a", "peer")) == ["missing", "missing"]


def test_headlines_name_cases_that_the_benchmarks_have():
    """Of tables of another form there are no cases; their titles are checked with the tiny run below."""
    cases = {(op, case.table, case.name) for op, bench in BENCHES.items() for case in bench.make_cases("cuda", tiny=False)}
    for head in HEADLINES:
        named = {(head.op, row.table or head.table, row.case) for row in head.rows if row.case}
        assert named <= cases or head.key == "block_table_8", named - cases
        assert all(len(row.cells) <= len(head.columns) for row in head.rows)
        assert head.caveat and head.source
    assert len({head.key for head in HEADLINES}) == len(HEADLINES)


# -- collecting --------------------------------------------------------------------------------------------------------


def test_a_case_has_the_rows_of_one_run_the_fullest_and_then_the_latest(tmp_path):
    run_of(tmp_path, "op", [result(forward_ms=1.0), result("peer", forward_ms=9.0), result(case="b", forward_ms=4.0)])
    run_of(tmp_path, "op-2", [result(forward_ms=2.0), result(case="b", forward_ms=5.0)], date=f"{DATE}T01:00:00+00:00")
    rows = record.make_record(tmp_path, DATE)["rows"]
    assert [(row["case"], row["implementation"], row["forward_ms"], row["file"]) for row in rows] == [
        ("a", OURS, 1.0, f"{DATE}-op.json"),
        ("a", "peer", 9.0, f"{DATE}-op.json"),
        ("b", OURS, 5.0, f"{DATE}-op-2.json"),
    ]


def test_cases_that_the_day_left_out_are_those_of_the_latest_day_before(tmp_path):
    for day in ("2026-11-18", "2026-11-19", "2026-11-20", "2026-11-23"):
        rows = [result(case=case, forward_ms=float(day[-2:])) for case in "ab"]
        run_of(tmp_path, "op", [*rows, result("peer", forward_ms=9.0)], date=f"{day}T00:00:00+00:00")
    run_of(tmp_path, "op", [result(forward_ms=1.0)])
    made = record.make_record(tmp_path, DATE)
    assert [(row["case"], row["implementation"], row["forward_ms"]) for row in made["rows"]] == [("a", OURS, 1.0), ("b", OURS, 20.0)]
    assert [run["file"] for run in made["runs"]] == ["2026-11-20-op.json", f"{DATE}-op.json"]


def test_tables_of_another_form_are_rows_and_no_path_or_traceback_is_kept(tmp_path):
    others = {"errors": [{"rotary": "qk", "implementation": OURS, "max": 0.5}], "failed": [{"status": "unavailable: x", "traceback": "y"}]}
    run_of(tmp_path, "op", [result(status="wrong: x", traceback="File /somewhere")], other_tables=others)
    made = record.make_record(tmp_path, DATE)
    rows = record.by_key(made["rows"])
    assert rows["op", "errors", "qk", OURS]["max"] == 0.5 and rows["op", "errors", "qk", OURS]["status"] == "ok"
    assert rows["op", "failed", "", "(table)"]["status"] == "unavailable: x"
    assert "/somewhere" not in json.dumps(made) and made["runs"][0]["environment"]["command"] == "python bench_op.py --pause 0"


def test_without_a_gpu_the_folder_must_be_named(monkeypatch, capsys):
    monkeypatch.setattr(record.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        record.main([])
    assert "name the folder" in capsys.readouterr().err


def test_the_latest_date_is_the_default_and_an_empty_folder_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no results"):
        record.main([str(tmp_path)])
    for date in ("2026-01-02", "2026-01-01"):
        (tmp_path / f"{date}-op.json").touch()
        (tmp_path / f"{date}.json").touch()
    assert record.latest_date(tmp_path) == "2026-01-02"
    with pytest.raises(FileNotFoundError, match="2026-01-03"):
        record.make_record(tmp_path, "2026-01-03")


# -- whole records -----------------------------------------------------------------------------------------------------


def copy_of_results(folder: Path) -> Path:
    for path in RESULTS.glob(f"{DATE}-*.json"):
        shutil.copy(path, folder)
    return folder


def test_the_record_of_the_results_in_the_repository(tmp_path):
    assert record.main([str(copy_of_results(tmp_path)), "--date", DATE]) == 0
    text = (tmp_path / "README.md").read_text()
    for head in HEADLINES:
        assert f"## {head.title}\n" in text
        for row in head.rows:
            assert f"| {row.what} | " in text
    assert "| 2 padded to multiples of 8 | 0.798 | 2.44 | 0.568 | 0.557 |" in text
    assert "| q and kv full L=2048 | 453 / 345 |" in text
    for name in record_pictures.PICTURES:
        assert f"({name})" in text and 1_000 < (tmp_path / name).stat().st_size < 100_000
    made = json.loads((tmp_path / f"{DATE}.json").read_text())
    names = {path.name for path in RESULTS.glob(f"{DATE}-*.json")}
    assert {run["file"] for run in made["runs"]} == names
    cases = {(row["op"], row["table"], row["case"]) for row in made["rows"]}
    for name in names:
        run = json.loads((RESULTS / name).read_text())
        assert {(run["op"], row["table"], row["case"]) for row in run["rows"]} <= cases
    first = (tmp_path / "README.md").read_text()
    assert record.main([str(tmp_path)]) == 0  # its own file is not a run
    assert (tmp_path / "README.md").read_text() == first


def test_tiny_runs_resume_and_their_record_shows_what_is_missing(tmp_path, capsys):
    def bench(*options: str) -> str:
        assert runner.main("linear_compress", bench_linear_compress.make_cases, [*FAST, "--out", str(tmp_path), *options]) == 0
        return capsys.readouterr().out

    bench("--only", "batch size")
    bench("--resume")
    assert "nothing left" in bench("--resume")
    runs = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*-linear_compress*.json"))]
    first, second = ({(row["table"], row["case"]) for row in run["rows"]} for run in runs)
    assert len(first) == len(second) == 2 and not first & second
    assert all(run["complete"] and run["seconds"] > 0 for run in runs)
    record.main([str(tmp_path)])
    made = json.loads(next(tmp_path.glob("????-??-??.json")).read_text())
    assert len(made["rows"]) == sum(len(run["rows"]) for run in runs)
    text = (tmp_path / "README.md").read_text()
    assert "| 1 decomposed | 1.389 | 1.40 | 1.224 | missing |" in text
    assert "missing: profile_kernels.py was not run" in text


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_points_of_a_picture():
    rows = [
        {"op": "o", **result(case="history 1024", forward_tflops=2.0)},
        {"op": "o", **result(case="history 512", forward_tflops=1.0)},
        {"op": "o", **result(PORTABLE, case="history 512")},
        {"op": "o", **result(case="history 204..512", forward_tflops=3.0)},
        {"op": "other", **result(case="history 256", forward_tflops=4.0)},
    ]
    assert record_pictures.series(rows, "o", "t", r"history (\d+)", "forward_tflops") == {OURS: [(512, 1.0), (1024, 2.0)]}


def test_published_stages_are_those_of_the_ladder():
    (ladder,) = (head for head in HEADLINES if head.key == "lce_ladder")
    published = [float(row.cells[1]) for row in ladder.rows if row.cells and row.cells[1] not in ("", "1")]
    assert all(math.isclose(a, b, rel_tol=5e-3) for a, b in zip(published, record_pictures.PUBLISHED_STAGES.values(), strict=True))
    assert [re.match(r"\d", row.what) is not None for row in ladder.rows] == [False] * 2 + [True] * 6
