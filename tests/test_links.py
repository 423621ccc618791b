"""Relative links in the documents lead to files, and their anchors to headings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "kernels/README.md",
        )
    ),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
    *sorted((ROOT / "kernels" / "benchmarks" / "results").glob("*/README.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
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


@pytest.mark.parametrize(
    "document",
    [*DOCUMENTS, *sorted((ROOT / "examples").glob("*/README.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_link_is_dead(document):
    assert dead_links(document) == []


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# A `name`, twice\n```\n# no heading\n```\n")
    document = tmp_path / "document.md"
    alive = "[a](other.md) [b](other.md#a-name-twice) [c](https://github.com/x/y.md) [d](#here)"
    document.write_text(f"# Here\n{alive} ![e](x.png) [f](other.md#no-heading)")
    assert dead_links(document) == ["x.png", "other.md#no-heading"]


def test_each_page_is_in_the_documentation():
    """The table of contents of docs/index.md, of the reference or of the decisions names each
    page."""
    listed = set()
    docs = ROOT / "docs"
    for index in (docs / "index.md", docs / "api" / "index.md", docs / "decisions" / "README.md"):
        listed.add(index)
        for entries in re.findall(r"```\{toctree\}\n(.*?)```", index.read_text(), re.DOTALL):
            for entry in (
                line for line in entries.splitlines() if line and not line.startswith(":")
            ):
                found = [index.parent / f"{entry}{suffix}" for suffix in (".md", ".ipynb")]
                paths = {path.resolve() for name in found for path in name.parent.glob(name.name)}
                assert paths, f"{index.name}: {entry}"
                listed |= paths
    pages = {path for path in DOCUMENTS if path != ROOT / "README.md"} | set(
        (ROOT / "notebooks").glob("*.ipynb")
    )
    assert pages == listed
