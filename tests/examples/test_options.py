"""`--help` of each program describes each option and its default."""

import argparse
import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = [path for path in sorted(EXAMPLES.glob("*.py")) if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")]
NEEDS = {"serving_ray": "ray.serve", "mlperf_serving": "mlcommons_loadgen"}


class Parser(Exception):
    """Raised by `parse_args`, with the parser."""


def parser_of(program, monkeypatch):
    def stop(parser, *_):
        raise Parser(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [program.name])
    with pytest.raises(Parser) as stopped:
        runpy.run_path(str(program), run_name="__main__")
    return stopped.value.args[0]


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_each_option_has_a_text_and_a_default(program, monkeypatch):
    if program.stem in NEEDS and not is_installed(NEEDS[program.stem]):
        pytest.skip(f"needs {NEEDS[program.stem]}")
    parser = parser_of(program, monkeypatch)
    assert parser.description
    options = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    assert options and [action.option_strings for action in options if not action.help] == []
    text = " ".join(parser.format_help().split())
    assert "%(" not in text and "(default: None)" not in text
    for action in options:
        if not action.required and action.default not in (None, False):
            assert f"(default: {action.default})" in text or "default" in action.help, action.option_strings


def test_programs_are_found():
    assert {"train_dlrm", "train_hstu", "serve_ranking", "wukong"} <= {path.stem for path in PROGRAMS}
