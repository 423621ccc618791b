"""The Python examples of README.md and of each page of the documentation run as they stand. README.md is short."""

import pytest
from readme import PAGES, ROOT, examples, run_examples

WITH_CODE = [page.relative_to(ROOT) for page in PAGES if examples(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=str)
def test_examples_run(page):
    if any("torchrec" in code for code in examples(page)):
        pytest.importorskip("torchrec")
    run_examples(page)


def test_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    (example,) = examples("README.md")
    assert len(example.splitlines()) <= 10
