"""The library needs torch and nothing else, and its modules have no import cycles."""

import ast
import graphlib
import importlib.util
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
"""  # noqa: E501


FIRST_STEP_ON_A_GPU = """
import sys
import torch
import jagged_modules as jm
from jagged_kernels.precompile.recorder import recorded_launches
history = torch.randn(9, 64), torch.tensor([0, 3, 9])
with recorded_launches() as launches:
    jm.JaggedTargetAttention(64, 2)(torch.randn(2, 1, 64), history).sum().backward()
    jm.BlockDiagonalSelfAttention(64, 2)(history)[0].sum().backward()
    jm.JaggedGDPA(64, 2)(history)[0].sum().backward()
assert launches
slow = {"torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor"}
assert not slow & sys.modules.keys(), slow & sys.modules.keys()
"""


def modules() -> dict[str, Path]:
    files = [(ROOT, file) for file in (ROOT / "jagged_modules").rglob("*.py")]
    files += [
        (ROOT / "kernels", file) for file in (ROOT / "kernels" / "jagged_kernels").rglob("*.py")
    ]
    return {
        ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): file
        for folder, file in files
    }


def imports(name: str, file: Path, known: dict[str, Path]) -> set[str]:
    """The known modules that a module imports, those within functions included, those for type
    checkers not."""
    tree, found = ast.parse(file.read_text()), set()
    for block in [
        x
        for x in ast.walk(tree)
        if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING"
    ]:
        block.body.clear()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else node.module
            )
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in known else base)
    return found & known.keys()


def test_no_import_cycles():
    known = modules()
    graph = {name: imports(name, file, known) for name, file in known.items()}
    assert "jagged_kernels.attention.op" in graph["jagged_modules.functional.attention"], (
        "imports within functions count"
    )
    # CycleError names the modules of a cycle
    list(graphlib.TopologicalSorter(graph).static_order())


def run(program: str) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env=environment)


def test_training_with_torch_alone():
    run(TRAIN_WITHOUT_EXTRAS)


def test_what_a_first_step_imports():
    """torch._dynamo takes seconds: only a trace needs it."""
    run(FIRST_STEP_ON_A_GPU)
