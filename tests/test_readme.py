"""The Python examples of README.md and of each page of the documentation run as they stand. README.md is short."""

import pytest
from readme import PAGES, ROOT, examples, run_examples

WITH_CODE = [page.relative_to(ROOT) for page in PAGES if examples(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=str)
def test_examples_run(page):
    if any("torchrec" in code for code in examples(page)):
        pytest.importorskip("torchrec")
    run_examples(page)


@pytest.mark.parametrize("page", WITH_CODE, ids=str)
def test_lines_of_code_fit_on_a_page(page):
    """Longer ones must be scrolled, on the site and on GitHub."""
    assert [line for code in examples(page) for line in code.splitlines() if len(line) > 100] == []


def test_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    (example,) = examples("README.md")
    assert len(example.splitlines()) <= 10
