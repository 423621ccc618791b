"""docs/compatibility.md, which is printed from the list, and the tests of its rows."""

import re
from pathlib import Path

import jagged_modules as jm

from .cases import CASES
from .table import FEATURES, NOTES, document

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == document(), f"run: python -m tests.compatibility.table {PAGE}"


def test_every_row_has_one_test_in_its_file_marked_gpu_if_it_needs_one():
    for file, rows in FEATURES.items():
        found = re.findall(
            r'^(@pytest.mark.gpu\n)?@feature\("([^"]+)"',
            (Path(__file__).parent / file).read_text(),
            re.MULTILINE,
        )
        assert sorted((name, bool(gpu)) for gpu, name in found) == sorted(
            (row.name, row.gpu) for row in rows
        )


def test_every_layer_is_tested():
    public = {
        name
        for name in jm.__all__
        if isinstance(getattr(jm, name), type) and hasattr(getattr(jm, name), "forward")
    }
    layers = {case.layer for case in CASES.values()}
    assert public == layers == {type(case.build(device="meta")).__name__ for case in CASES.values()}


def test_notes_belong_to_cells():
    names = {row.name for rows in FEATURES.values() for row in rows}
    assert all(
        name in names and layer in {case.layer for case in CASES.values()} for name, layer in NOTES
    )
