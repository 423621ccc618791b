import sys
from pathlib import Path

import torch

# The programs in examples/ import the modules beside them, as Python does for a script it runs.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

# These models are too small for a second thread to pay, and under load threads that wait for one another cost minutes.
torch.set_num_threads(1)
