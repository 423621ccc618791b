"""The picture of the gap between real and synthetic lengths."""

import json

import length_gaps
import pytest
import record_pictures
from bench_everyday import MEASURED


def row(case, name, forward, both, table=MEASURED):
    figures = {"forward_tflops": forward, "forward_backward_tflops": both}
    return {"table": table, "case": case, "implementation": name, **figures}


ROWS = [
    row("shop D64, real", "a", 100.0, 80.0),
    row("shop D64, real", "b", 50.0, None),
    row("shop D64, real, causal", "a", 10.0, 10.0),
    row("shop D64, uniform", "a", 150.0, 100.0),
    row("shop D64, uniform", "b", 200.0, 100.0),
    row("shop D64, equal", "a", 300.0, 160.0),
    row("shop D64, uniform", "a", 1.0, 1.0, "another table"),
]


def test_gaps_are_those_of_the_same_file_and_implementation():
    assert length_gaps.length_gaps(ROWS, "uniform") == [
        {"case": "shop D64", "implementation": "a", "forward": 1.5, "forward_backward": 1.25},
        {"case": "shop D64", "implementation": "b", "forward": 4.0, "forward_backward": None},
    ]
    assert length_gaps.length_gaps(ROWS, "equal") == [
        {"case": "shop D64", "implementation": "a", "forward": 3.0, "forward_backward": 2.0}
    ]


def test_the_picture_is_drawn_from_runs(tmp_path):
    run, out = tmp_path / "run.json", tmp_path / "gaps.png"
    run.write_text(json.dumps({"rows": ROWS}))
    assert length_gaps.main([str(run), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_record_draws_the_gaps_of_uniform_lengths():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    record_pictures.real_lengths(axes, length_gaps.length_gaps(ROWS, "uniform"))
    labels = [x.get_text() for x in axes.get_xticklabels()]
    assert labels == ["shop D64, forward", "shop D64, forward + backward"]
    assert [bar.get_height() for bar in axes.patches] == [1.5, 1.25, 4.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere.json"], "no file nowhere.json"), (["RUN", "--kind", "lognormal"], "no run has")],
)
def test_bad_arguments_end_with_one_line(arguments, message, tmp_path, capsys):
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"rows": ROWS}))
    arguments = [str(run) if x == "RUN" else x for x in arguments]
    with pytest.raises(SystemExit):
        length_gaps.main([*arguments, "--out", str(tmp_path / "gaps.png")])
    assert message in capsys.readouterr().err and not (tmp_path / "gaps.png").exists()
