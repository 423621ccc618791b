"""The Python examples of README.md."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def example_with(text: str) -> str:
    (example,) = (code for code in examples() if text in code)
    return example
