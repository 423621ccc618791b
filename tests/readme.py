"""The Python examples of README.md and of the pages of docs/."""

import contextlib
import re
import sys
import types
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]


def examples(page: str | Path) -> list[str]:
    """The fenced blocks of a page, by its path in the repository."""
    return re.findall(
        r"^```python\n(.*?)^```",
        (ROOT / page).read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )


def example_with(page: str, text: str) -> str:
    (example,) = (code for code in examples(page) if text in code)
    return example


def run_examples(page: str | Path) -> None:
    """Run a page's blocks one after another, in a module of its own: some use names of an earlier
    one."""
    name = "page_" + re.sub(r"\W", "_", str(page))
    # torch.compile and pickle look functions up by their module
    module = sys.modules[name] = types.ModuleType(name)
    codes = examples(page)
    try:
        with shortly_timed() if "fuse_broadcasts" in "".join(codes) else contextlib.nullcontext():
            for code in codes:
                exec(compile(code, str(page), "exec"), vars(module))
    finally:
        del sys.modules[name]


def shortly_timed():
    """`fuse_broadcasts` times calls for a hundredth of the time."""
    return mock.patch("jagged_modules.transforms.timing.SECONDS", 0.01)
