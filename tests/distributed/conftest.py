import sys
from pathlib import Path

import torch

# The tests train the models of examples/, whose modules import those beside them.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

torch.set_num_threads(1)
