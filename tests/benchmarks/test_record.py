"""The record of a device: how runs are merged, its tables and its pictures, on a few rows made for
the test."""

import json
import math
import re
from pathlib import Path

import bench_attention
import bench_batch_invariant
import bench_bias
import bench_block_attention
import bench_din
import bench_everyday
import bench_gdpa
import bench_jagged_ops
import bench_layers
import bench_levels
import bench_linear_compress
import bench_user_blocks
import headline
import leaderboard
import pytest
import record
import record_pictures
import runner
import sources
from headline import Column, Headline, Row
from names import INPUT_REPLICATED, OURS, PORTABLE
from published import HEADLINES
from unpublished import TABLES

BENCHES = {
    "attention": bench_attention,
    "batch_invariant": bench_batch_invariant,
    "bias": bench_bias,
    "block_attention": bench_block_attention,
    "din": bench_din,
    "everyday": bench_everyday,
    "gdpa": bench_gdpa,
    "jagged_ops": bench_jagged_ops,
    "layers": bench_layers,
    "leaderboard": leaderboard,
    "levels": bench_levels,
    "linear_compress": bench_linear_compress,
    "user_blocks": bench_user_blocks,
}
DATE = "2026-11-21"
RESULTS = Path(record.__file__).parent / "results"
FAST = ["--tiny", "--device", "cpu", "--pause", "0", "--warmup", "0", "--rep", "0.1"]


def result(implementation: str = OURS, status: str = "ok", case: str = "a", **values) -> dict:
    return {
        "table": "t",
        "case": case,
        "implementation": implementation,
        "status": status,
        "picture": "",
        **values,
    }


def save_run(
    folder: Path,
    rows: list[dict],
    date: str = DATE,
    device: str = "a device",
    op: str = "op",
    **extra,
) -> Path:
    """Saves a run as the benchmarks do. ``date``: a day, or a day and a time."""
    date = date if "T" in date else f"{date}T00:00:00+00:00"
    environment = {
        "date": date,
        "command": "python bench_op.py --out /somewhere --pause 0",
        "device": device,
        "torch": "2",
        "kernels": sources.state(op),
    }
    run = {
        "op": op,
        "environment": environment,
        "protocol": {"text": "As ever."},
        "complete": True,
        "rows": rows,
        **extra,
    }
    (folder / "runs").mkdir(exist_ok=True)
    path = folder / "runs" / f"{date[:10]}-{op}-{len(list((folder / 'runs').iterdir()))}.json"
    path.write_text(json.dumps(run))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# -- a table ---------------------------------------------------------------------------------------


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
    columns = [
        Column("published"),
        Column("ms", "forward_ms/backward_ms"),
        Column("over", "forward_ms/backward_ms", OURS, "peer"),
    ]
    assert table(*columns, row=Row("x", "a", OURS, cells=["1.9"])) == ["1.9", "2 / 8", "3 / 1.5"]
    assert table(*columns, row=Row("x", "b", OURS)) == ["", "missing", "missing"]
    assert table(*columns, row=Row("x", cells=["1.9"], instead="no")) == ["1.9", "no", ""]
    assert table(*columns[:2], row=Row("x", "a", OURS, cells=["", "–"])) == ["", "–"]


def test_an_unavailable_peer_says_so_and_a_wrong_gradient_leaves_the_forward():
    columns = [
        Column("ms", "forward_ms"),
        Column("both", "forward_ms/backward_ms"),
        Column("back", "backward_ms"),
    ]
    assert table(*columns, row=Row("x", "a", "absent")) == ["unavailable: ImportError: a\\|b"] * 3
    assert table(*columns, row=Row("x", "a", "half")) == [
        "3",
        "3 / –",
        "wrong: forward+backward: dq",
    ]


def test_derived_values():
    assert table(Column("µs", "forward_us"), Column("FLOPs", "mflop"), row=Row("x", "a", OURS)) == [
        "2000",
        "12",
    ]
    assert table(
        Column("µs", "backward_us"), Column("FLOPs", "mflop"), row=Row("x", "a", "peer")
    ) == ["missing", "missing"]


def test_headlines_name_cases_that_the_benchmarks_have():
    """Tables of another form have no cases. The tiny run below checks their titles."""
    cases = {
        (op, case.table, case.name)
        for op, bench in BENCHES.items()
        for case in bench.make_cases("cuda", tiny=False)
    }
    for head in (*HEADLINES, *TABLES):
        named = {(head.op, row.table or head.table, row.case) for row in head.rows if row.case}
        assert named <= cases or head.key == "block_table_8", named - cases
        assert all(len(row.cells) <= len(head.columns) for row in head.rows)
        assert head.caveat and head.source
    assert len({head.key for head in (*HEADLINES, *TABLES)}) == len(HEADLINES) + len(TABLES)


# -- merging runs ----------------------------------------------------------------------------------


def measured(made: dict) -> list[tuple]:
    return [
        (row["case"], row["implementation"], row["forward_ms"], row["date"][:13])
        for row in made["rows"]
    ]


def test_a_case_has_the_rows_of_the_fullest_then_the_latest_run(tmp_path):
    save_run(
        tmp_path,
        [result(forward_ms=1.0), result("peer", forward_ms=9.0), result(case="b", forward_ms=4.0)],
    )
    save_run(
        tmp_path,
        [result(forward_ms=2.0), result(case="b", forward_ms=5.0)],
        f"{DATE}T01:00:00+00:00",
    )
    assert measured(record.make_record(tmp_path)) == [
        ("a", OURS, 1.0, f"{DATE}T00"),
        ("a", "peer", 9.0, f"{DATE}T00"),
        ("b", OURS, 5.0, f"{DATE}T01"),
    ]


def test_the_latest_day_wins_and_runs_without_rows_in_the_record_are_not_listed(tmp_path):
    for day in ("2026-11-19", "2026-11-20", "2026-11-23"):
        rows = [result(case=case, forward_ms=float(day[-2:])) for case in "ab"]
        save_run(tmp_path, [*rows, result("peer", forward_ms=9.0)], day)
    save_run(tmp_path, [result(forward_ms=1.0)])
    made = record.make_record(tmp_path, DATE)
    assert measured(made) == [("a", OURS, 1.0, f"{DATE}T00"), ("b", OURS, 20.0, "2026-11-20T00")]
    assert [run["environment"]["date"][:10] for run in made["runs"]] == [
        "2026-11-20",
        DATE,
    ] and made["date"] == DATE
    assert record.make_record(tmp_path)["date"] == "2026-11-23"


def test_rows_of_the_saved_record_count_as_runs(tmp_path):
    """Also rows of deleted runs: the repository keeps no runs."""
    first = save_run(
        tmp_path,
        [result(forward_ms=1.0), result("peer", forward_ms=9.0), result(case="b", forward_ms=4.0)],
    )
    record.main([str(tmp_path)])
    first.unlink()
    save_run(
        tmp_path,
        [result(case="c", forward_ms=3.0), result(forward_ms=2.0)],
        f"{DATE}T01:00:00+00:00",
    )
    before = [
        ("a", OURS, 1.0, f"{DATE}T00"),
        ("a", "peer", 9.0, f"{DATE}T00"),
        ("b", OURS, 4.0, f"{DATE}T00"),
    ]
    assert measured(record.make_record(tmp_path)) == [*before, ("c", OURS, 3.0, f"{DATE}T01")]
    record.main([str(tmp_path)])
    save_run(tmp_path, [result(forward_ms=0.5)], "2026-11-22")
    made = record.make_record(tmp_path)
    assert (
        measured(made)[0] == ("a", OURS, 0.5, "2026-11-22T00")
        and len(made["rows"]) == 3
        and len(made["runs"]) == 3
    )


def test_a_record_made_again_is_the_same_with_its_runs_and_without(tmp_path):
    save_run(tmp_path, [result(case="b", forward_ms=4.0), result(forward_ms=1.0)], "2026-11-20")
    save_run(
        tmp_path,
        [result(forward_ms=2.0), result("peer", forward_ms=9.0), result(case="c", forward_ms=1.0)],
    )
    record.main([str(tmp_path)])
    made = files_of(tmp_path)
    assert made.keys() == {"record.json", "README.md", *record_pictures.PICTURES}
    record.main([str(tmp_path)])
    assert files_of(tmp_path) == made
    for path in (tmp_path / "runs").iterdir():
        path.unlink()
    record.main([str(tmp_path)])
    assert files_of(tmp_path) == made


def test_the_profile_is_the_latest_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(record.profile_kernels, "parse", lambda text: [{"kernel": text}])
    save_run(tmp_path, [result()])
    assert record.make_record(tmp_path)["profile"] == []
    for day in ("2026-11-20", "2026-11-22"):
        (tmp_path / "runs" / f"{day}-profile.csv").write_text(day)
    assert record.make_record(tmp_path)["profile"] == [{"kernel": "2026-11-22"}]
    made = record.make_record(tmp_path, DATE)
    assert made["profile"] == [{"kernel": "2026-11-20"}]
    (tmp_path / "record.json").write_text(json.dumps(made))
    for path in (tmp_path / "runs").glob("*.csv"):
        path.unlink()
    assert record.make_record(tmp_path)["profile"] == [{"kernel": "2026-11-20"}]


def test_tables_of_another_form_are_rows_and_no_path_or_traceback_is_kept(tmp_path):
    others = {
        "errors": [{"rotary": "qk", "implementation": OURS, "max": 0.5}],
        "failed": [{"status": "unavailable: x", "traceback": "y"}],
    }
    save_run(
        tmp_path, [result(status="wrong: x", traceback="File /somewhere")], other_tables=others
    )
    made = record.make_record(tmp_path)
    rows = record.by_key(made["rows"])
    assert (
        rows["op", "errors", "qk", OURS]["max"] == 0.5
        and rows["op", "errors", "qk", OURS]["status"] == "ok"
    )
    assert rows["op", "failed", "", "(table)"]["status"] == "unavailable: x"
    assert (
        "/somewhere" not in json.dumps(made)
        and made["runs"][0]["environment"]["command"] == "python bench_op.py --pause 0"
    )


def test_without_a_gpu_the_folder_must_be_named(monkeypatch, capsys):
    monkeypatch.setattr(record.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        record.main([])
    assert "name the folder" in capsys.readouterr().err


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no record.json"):
        record.main([str(tmp_path)])
    save_run(tmp_path, [result()], "2026-01-02")
    with pytest.raises(FileNotFoundError, match="until 2026-01-01"):
        record.make_record(tmp_path, "2026-01-01")


# -- whole records ---------------------------------------------------------------------------------


def test_the_readme_has_every_headline_and_the_measured_rows_beside_it(tmp_path):
    table, case = "GDPA (gelu_tanh)", "q and kv full L=2048"
    row = result(case=case, forward_tflops=682.0, backward_tflops=560.0, forward_floor_percent=93.5)
    stages = [
        result(name, case="B=1024", forward_ms=ms)
        for name, ms in ((INPUT_REPLICATED, 1.98), ("padded", 0.56))
    ]
    save_run(tmp_path, [{**row, "table": table}], op="gdpa", device="NVIDIA H200")
    save_run(
        tmp_path,
        [{**stage, "table": "batch size, 70 candidates per user"} for stage in stages],
        op="linear_compress",
    )
    assert record.main([str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    for head in (*HEADLINES, *TABLES):
        assert f"## {head.title}\n" in text
        for row in head.rows:
            assert f"| {row.what} | " in text
    assert (
        "| q and kv full L=2048 | 453 / 345 | missing | missing | missing | 682 / 560 | missing |"
        " 93.5 / – |" in text
    )
    assert "| 1 decomposed | 1.389 | 1.40 | 1.224 | missing |" in text
    assert (
        "| 2 padded to multiples of 8 | 0.798 | 2.44 | 0.568 | 0.56 | 3.54 | missing | missing |"
        in text
    )
    assert "missing: profile_kernels.py was not run" in text
    assert (
        "| gdpa | 2026-11-21T00:00:00+00:00 | not noted | `python bench_op.py --pause 0` |" in text
    )
    for name in record_pictures.PICTURES:
        assert f"({name})" in text and (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_rows_older_than_a_change_of_their_kernels_are_marked(tmp_path, monkeypatch):
    for name in ("attention", "common", "din", "schedule"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("1")
    monkeypatch.setattr(sources, "KERNELS", tmp_path)
    table, case = "GDPA (gelu_tanh)", "q and kv full L=2048"
    rows = [{**result(case=case, forward_tflops=682.0), "table": table}]
    save_run(tmp_path, rows, op="gdpa", device="NVIDIA H200")
    made = record.make_record(tmp_path)
    (tmp_path / "din" / "a.py").write_text("2")
    assert "| q and kv full L=2048 | 453 / 345 |" in record.markdown(made, [])
    (tmp_path / "common" / "a.py").write_text("2")
    text = record.markdown(made, [])
    assert "| q and kv full L=2048 † | 453 / 345 |" in text
    assert (
        "| q jagged, kv full L=512 | " in text and "| gdpa | 2026-11-21T00:00:00+00:00 † |" in text
    )
    assert '"†": measured before the last change' in text


def test_a_run_notes_its_commit_and_the_state_of_its_kernels(monkeypatch):
    assert re.fullmatch("[0-9a-f]{40}[+]?|unknown", sources.commit())
    monkeypatch.setenv("COMMIT", "abc")
    assert runner.environment("cpu")["commit"] == "abc"
    states = {sources.state(op) for op in ("attention", "din", "layers")}
    assert len(states) == 3 and sources.state("gdpa") == sources.state("attention")
    folders = {path.name for path in sources.KERNELS.iterdir()}
    assert {folder for of_op in sources.FOLDERS.values() for folder in of_op} <= folders


def test_the_record_of_a_cpu_has_the_tables_as_they_are(tmp_path):
    save_run(
        tmp_path,
        [result(forward_ms=2.0, forward_tflops=0.1), result("peer", forward_ms=6.0)],
        device="CPU x, 2 threads",
    )
    record.main([str(tmp_path)])
    assert files_of(tmp_path).keys() == {"record.json", "README.md"}
    text = (tmp_path / "README.md").read_text()
    assert (
        "| case | implementation | forward ms | forward TFLOP/s |" in text
        and "| a | peer | 6 | – |" in text
    )


def test_tiny_runs_resume_and_become_a_record(tmp_path, capsys):
    def bench(*options: str) -> str:
        options = [*FAST, "--out", str(tmp_path / "runs"), *options]
        assert runner.main("linear_compress", bench_linear_compress.make_cases, options) == 0
        return capsys.readouterr().out

    bench("--only", "batch size")
    bench("--resume")
    assert "nothing left" in bench("--resume")
    runs = [
        json.loads(path.read_text())
        for path in sorted((tmp_path / "runs").glob("*-linear_compress*.json"))
    ]
    first, second = ({(row["table"], row["case"]) for row in run["rows"]} for run in runs)
    assert len(first) == len(second) == 2 and not first & second
    assert all(run["complete"] and run["seconds"] > 0 for run in runs)
    record.main([str(tmp_path)])
    made = json.loads((tmp_path / "record.json").read_text())
    assert len(made["rows"]) == sum(len(run["rows"]) for run in runs) and len(made["runs"]) == 2


@pytest.mark.parametrize(
    "folder",
    [path.parent for path in sorted(RESULTS.glob("*/record.json"))],
    ids=lambda folder: folder.name,
)
def test_the_saved_readme_is_that_of_the_saved_record(folder):
    """The folder has nothing else but a few pictures. Figures are not checked here."""
    files = {path.name for path in folder.iterdir() if path.is_file()}
    pictures = {name for name in files if name.endswith(".png")}
    assert files - pictures == {"README.md", "record.json"} and len(pictures) <= 5
    made = record.markdown(
        json.loads((folder / "record.json").read_text()), record_pictures.PICTURES
    )
    assert (folder / "README.md").read_text() == made


# -- pictures --------------------------------------------------------------------------------------


def test_points_of_a_picture():
    rows = [
        {"op": "o", **result(case="history 1024", forward_tflops=2.0)},
        {"op": "o", **result(case="history 512", forward_tflops=1.0)},
        {"op": "o", **result(PORTABLE, case="history 512")},
        {"op": "o", **result(case="history 204..512", forward_tflops=3.0)},
        {"op": "other", **result(case="history 256", forward_tflops=4.0)},
    ]
    assert record_pictures.series(rows, "o", "t", r"history (\d+)", "forward_tflops") == {
        OURS: [(512, 1.0), (1024, 2.0)]
    }


def test_published_stages_are_those_of_the_ladder():
    (ladder,) = (head for head in HEADLINES if head.key == "lce_ladder")
    published = [
        float(row.cells[1]) for row in ladder.rows if row.cells and row.cells[1] not in ("", "1")
    ]
    assert all(
        math.isclose(a, b, rel_tol=5e-3)
        for a, b in zip(published, record_pictures.PUBLISHED_STAGES.values(), strict=True)
    )
    assert [re.match(r"\d", row.what) is not None for row in ladder.rows] == [False] * 2 + [
        True
    ] * 6
