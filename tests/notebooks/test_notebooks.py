"""Every notebook runs as it stands, and its committed outputs are whole and say nothing of the
machine that made them."""

import os
import re
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason='needs the extra "notebooks"')
from nbclient import NotebookClient

from ..marks import PATIENCE

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w./])/(home|root|tmp|work|usr|Users|opt|mnt|var)/")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook, folder):
    metadata = {"path": str(folder)}
    NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": metadata}).execute()


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
def test_runs_in_its_folder(notebook):
    execute(notebook, ROOT / "notebooks")
    assert [
        output
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.get("name") == "stderr"
    ] == []


@pytest.mark.parametrize("folder", [ROOT, ROOT / "notebooks"], ids=["root", "notebooks"])
def test_finds_the_project(notebook, folder, monkeypatch):
    """The first cell does, in the lines before its imports."""
    first, _, _ = code_cells(notebook)[0].source.partition("%matplotlib")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    names = {}
    exec(compile(first, "first cell", "exec"), names)
    assert names["root"] == ROOT and sys.path[-1] == "elsewhere"
    assert {str(ROOT), str(ROOT / "kernels")} <= set(map(os.path.normpath, sys.path))


def test_finds_the_installed_package(notebook, tmp_path, monkeypatch):
    """Outside of a clone. Its modules beside the programs would hide others of their names."""
    first, _, _ = code_cells(notebook)[0].source.partition("%matplotlib")
    root = tmp_path / "site" / "jagged_modules"
    (root / "examples").mkdir(parents=True)
    (root / "examples" / "train_dlrm.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(root.parent)])
    names = {}
    exec(compile(first, "first cell", "exec"), names)
    assert names["root"] == root
    assert sys.path == [str(root / "examples"), str(tmp_path), str(root.parent)]


def test_committed_outputs_are_whole(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert any("image/png" in output.get("data", {}) for output in outputs)
    texts = [
        output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs
    ]
    assert [text for text in texts if MACHINE_PATH.search(text)] == []
