"""`--help` of each program describes each option and its default."""

import argparse
import ast
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES, BENCHMARKS = ROOT / "examples", ROOT / "kernels/benchmarks"
FILES = [*EXAMPLES.glob("*.py"), *BENCHMARKS.glob("*.py"), ROOT / "tests/fuzz.py"]
PROGRAMS = [
    path
    for path in sorted(FILES)
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
]


class Parser(Exception):
    """Raised by `parse_args`, with the parser."""


def parser_of(program, monkeypatch):
    def stop(parser, *_):
        raise Parser(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [program.name])
    monkeypatch.syspath_prepend(program.parent)
    with pytest.raises(Parser) as stopped:
        runpy.run_path(str(program), run_name="__main__")
    return stopped.value.args[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_each_option_has_a_text_and_a_default(program, monkeypatch):
    parser = parser_of(program, monkeypatch)
    module = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8")))
    paragraph, description = module.partition("\n\n")[0].split(), parser.description.split()
    assert description and (len(description) >= len(paragraph) or description[-1][-1] == ".")
    options = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    assert options and [action.option_strings for action in options if not action.help] == []
    text = " ".join(parser.format_help().split())
    assert "%(" not in text and "(default: None)" not in text
    for action in options:
        if (
            not action.required
            and action.default not in (None, False)
            and action.help != argparse.SUPPRESS
        ):
            # argparse breaks lines behind hyphens too, such as those of a path
            default = "".join(f"(default: {action.default})".split())
            assert default in text.replace(" ", "") or "default" in action.help, (
                action.option_strings
            )


@pytest.mark.parametrize(
    "program",
    [EXAMPLES / "train_dlrm.py", EXAMPLES / "benchmark_dlrm.py"],
    ids=lambda path: path.stem,
)
def test_a_negative_seed_ends_with_one_line(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program.name, "--seed", "-1"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().err.endswith("error: argument --seed: must be 0 or more, not -1\n")


def test_programs_are_found():
    assert {
        "train_dlrm",
        "train_hstu",
        "serve_ranking",
        "bench_attention",
        "compare",
        "schedule_picture",
        "fuzz",
    } <= {path.stem for path in PROGRAMS}


@pytest.mark.parametrize(
    ("program", "package", "options"),
    [
        ("serving_ray", "ray", ["--weights=any.pt"]),
        ("mlperf_serving", "mlperf_loadgen", ["--weights=any.pt", "--qps=1"]),
        ("benchmark_dlrm_v3", "mlperf_loadgen", ["--qps=1"]),
    ],
)
def test_a_missing_package_ends_with_one_line(program, package, options, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", [program, *options])
    with pytest.raises(
        SystemExit, match=rf'^{program}: \w+ is not installed: pip install "\.\[serve-more\]"$'
    ):
        runpy.run_path(str(EXAMPLES / f"{program}.py"), run_name="__main__")
