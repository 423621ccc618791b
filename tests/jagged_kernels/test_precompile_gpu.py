"""On a GPU, a process that cannot compile trains layers with kernels that were compiled before."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.training_steps import training_steps

from .batches import FIRST_BATCHES, LATER_BATCHES

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
NAMES = ["JaggedTargetAttention(64, 2)", "HSTUStack(128, 2, num_layers=2)"]
CONFIGS = [
    {"layer": "JaggedTargetAttention", "arguments": {"embedding_dim": 64, "num_heads": 2}},
    {
        "layer": "HSTUStack",
        "arguments": {
            "embedding_dim": 128,
            "num_heads": 2,
            "num_layers": 2,
            "config": {"scaling_seqlen": 512},
        },
    },
]
TRAIN = """
import sys
import torch
from triton import compiler
from triton.runtime import build
from tests.jagged_kernels.test_precompile_gpu import trained

def refuse(*args, **options):
    raise AssertionError("compiles")

compiler.compile = build._build = refuse
torch.ones(16, 16, device="cuda") @ torch.ones(16, 16, device="cuda")
torch.cuda.synchronize()
torch.save(trained(sys.argv[1]), sys.argv[2])
"""


def trained(name: str) -> list[torch.Tensor]:
    """The layer's parameters after its first step; other steps follow."""
    torch.manual_seed(1)
    step = training_steps("cuda", torch.bfloat16)[name]()
    start = time.perf_counter()
    step(*FIRST_BATCHES[0])
    torch.cuda.synchronize()
    print(f"{name}: first step {time.perf_counter() - start:.3f} s")
    parameters = [x.detach().cpu() for x in step.layer.parameters()]
    for batch in FIRST_BATCHES[1:] + LATER_BATCHES:
        step(*batch)
    return parameters


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A folder of kernels, made by a process that sees no GPU."""
    folder = tmp_path_factory.mktemp("kernels")
    configs, out = folder / "layers.json", folder / "kernels"
    configs.write_text(json.dumps([{**config, "dtypes": ["bfloat16"]} for config in CONFIGS]))
    major, minor = torch.cuda.get_device_capability()
    run(
        *("-m", "jagged_modules.precompile", "--capability", f"{major}.{minor}"),
        *("--configs", str(configs), "--out", str(out)),
        CUDA_VISIBLE_DEVICES="",
    )
    return out


def run(*arguments: str, **environment: str) -> None:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    environment = os.environ | {"PYTHONPATH": paths} | environment
    subprocess.run([sys.executable, *arguments], env=environment, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_compiled(kernels, tmp_path, name):
    """With no C compiler and no cache that can be written, for batches of many sizes. The results
    are those of kernels that were compiled here."""
    out = tmp_path / "parameters.pt"
    environment = dict(JAGGED_KERNELS=str(kernels), PATH="", TRITON_CACHE_DIR="/dev/null/cache")
    run("-W", "error::RuntimeWarning", "-c", TRAIN, name, str(out), **environment)
    for found, expected in zip(torch.load(out), trained(name), strict=True):
        assert torch.isfinite(found).all() and torch.equal(found, expected)
