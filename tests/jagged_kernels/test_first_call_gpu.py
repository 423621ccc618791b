"""After a layer's first training steps on a GPU, later ones compile nothing."""

import pytest
import torch
from benchmarks.training_steps import training_steps

from .batches import FIRST_BATCHES, LATER_BATCHES

knobs = pytest.importorskip("triton").knobs
pytestmark = pytest.mark.gpu
LAYERS = list(training_steps("cpu", torch.float32))


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that are compiled or loaded from Triton's disk cache during the test."""
    names, before = [], knobs.compilation.listener

    def note(**what):
        names.append(what["src"].name)
        return before(**what) if before else None

    monkeypatch.setattr(knobs.compilation, "listener", note)
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_later_steps_compile_nothing(compiled, name, dtype):
    step = training_steps("cuda", dtype)[name]()
    for batch in FIRST_BATCHES:
        step(*batch)
    compiled.clear()
    for batch in LATER_BATCHES:
        step(*batch)
        assert compiled == [], batch
