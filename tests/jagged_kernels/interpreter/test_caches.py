"""What launchers keep from call to call depends on widths and options, not on lengths and batch
sizes."""

import pytest
import torch

from ...jagged_modules.training_steps import cache_sizes
from ..compiled_calls import FUNCTIONS, NAMES


@pytest.mark.parametrize("name", NAMES)
def test_other_batches_add_nothing(name):
    function, make_inputs = FUNCTIONS[name]
    kept = []
    for sizes in ((2, 5, 3), (3, 7, 4)):
        inputs = [
            x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in make_inputs(*sizes)
        ]
        function(*inputs, implementation="triton").sum().backward()
        kept.append(cache_sizes())
    assert kept[0] == kept[1]
