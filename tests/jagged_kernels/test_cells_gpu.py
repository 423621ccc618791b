"""Every cell of the matrix (`cells.py`) on a GPU: forward and every gradient against float64
models."""

import pytest
import torch
from calls import check
from cells import CELLS

pytestmark = pytest.mark.gpu
EXPECTED_CELLS = [cell.name for cell in CELLS]


@pytest.mark.parametrize(
    "cell", CELLS, ids=lambda cell: cell.name.replace("|", "-").replace(" ", "_")
)
def test_cell(record_property, cell):
    record_property("cell", cell.name)
    if "hopper" in cell.name and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels for compute capability 9.0")
    for case in cell.cases:
        check(case)
