"""After a layer's first training steps on a GPU, later ones compile nothing."""

import pytest
import torch
from benchmarks.training_steps import training_steps

from .batches import FIRST_BATCHES, LATER_BATCHES

pytestmark = pytest.mark.gpu
LAYERS = list(training_steps("cpu", torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_later_steps_compile_nothing(compiled_kernels, name, dtype):
    step = training_steps("cuda", dtype)[name]()
    for batch in FIRST_BATCHES:
        step(*batch)
    compiled_kernels.clear()
    for batch in LATER_BATCHES:
        step(*batch)
        assert compiled_kernels == [], batch
