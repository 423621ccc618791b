import sys
from pathlib import Path

import pytest
import torch

from .ranks import Ranks

# The tests train the models of examples/, whose modules import those beside them.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def two_ranks():
    """Two processes of one gloo group: `two_ranks.run(function, *args)`."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()
