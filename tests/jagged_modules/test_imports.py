"""The library needs torch and nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TRAIN_WITHOUT_EXTRAS = """
import sys
for extra in ("torchrec", "fbgemm_gpu", "triton", "numpy", "tqdm", "torchmetrics"):
    sys.modules[extra] = None  # importing it fails
import torch
import jagged_modules as jm
from jagged_modules import functional as F
layer = jm.JaggedTargetAttention(8, 2)
history = jm.Jagged(torch.randn(5, 8), torch.tensor([0, 2, 5]))
history.prepare(num_heads=2, head_dim=4)
layer(torch.randn(2, 3, 8), history).sum().backward()
index = jm.CandidateIndex.from_map(torch.tensor([1, 0, 1]), 2)
layer(torch.randn(3, 1, 8), history, index).sum().backward()
compress = jm.LinearCompressEmbedding(3, 4, 5)
compress(torch.randn(3, 3, 8), torch.randn(2, 5, 8), index).sum().backward()
blocks = jm.BlockDiagonalSelfAttention(8, 2)
blocks(history).values.sum().backward()
mlp = jm.JaggedMLP([8, 3])
mlp(history).values.sum().backward()
F.jagged_softmax(F.jagged_to_padded(history.values, history.offsets, 3).flatten(1), torch.tensor([0, 2]))
assert all(p.grad is not None for module in (layer, compress, blocks, mlp) for p in module.parameters())
"""


def test_training_with_torch_alone():
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", TRAIN_WITHOUT_EXTRAS], check=True, env=environment)
