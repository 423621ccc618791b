"""The Python examples of documents run as they stand, one after another: some use names of an earlier one."""

from pathlib import Path

import pytest
from readme import README, examples


@pytest.mark.parametrize("document", [README, Path(README.parent, "docs", "serving.md")], ids=lambda x: x.name)
def test_examples_run(document):
    pytest.importorskip("torchrec")
    names = {"__name__": "readme"}
    for code in examples(document):
        exec(compile(code, document.name, "exec"), names)
