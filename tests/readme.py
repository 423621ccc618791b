"""The Python examples of README.md and of other documents."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def examples(document: Path = README) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


def example_with(text: str) -> str:
    (example,) = (code for code in examples() if text in code)
    return example
