"""Relative links in the documents lead to files, and their anchors to headings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "kernels/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "kernels" / "benchmarks" / "results").glob("*/README.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(document: Path) -> list[str]:
    dead = []
    for link in LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or anchor and anchor not in anchors(path.read_text()):
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_dead(document):
    assert dead_links(document) == []


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# A `name`, twice\n```\n# no heading\n```\n")
    document = tmp_path / "document.md"
    alive = "[a](other.md) [b](other.md#a-name-twice) [c](https://github.com/x/y.md) [d](#here)"
    document.write_text(f"# Here\n{alive} ![e](x.png) [f](other.md#no-heading)")
    assert dead_links(document) == ["x.png", "other.md#no-heading"]
