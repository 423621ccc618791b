"""torch's default device and dtype change no result: what the library makes for itself is where it
belongs."""

import ast
from pathlib import Path

import pytest
import torch
from compatibility.cases import CASES, SIZES, make, training_step
from jagged_kernels.precompile import recorder

import jagged_modules as jm

FACTORIES = {*recorder.FACTORIES, "as_tensor"}
ROOT = Path(__file__).parents[2]


# unless they are given a dtype
OF_FLOATS = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}


def factories_without(keyword: str, factories: set[str], source: str) -> list[int]:
    """Lines of calls of torch's factories that follow a default, because they are not given the
    keyword."""
    calls = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    )
    torchs = (
        x
        for x in calls
        if x.func.attr in factories
        and isinstance(x.func.value, ast.Name)
        and x.func.value.id == "torch"
    )
    return [
        x.lineno for x in torchs if not any(given.arg in (keyword, None) for given in x.keywords)
    ]


@pytest.mark.parametrize(
    "keyword, factories, folders",
    [
        ("device", FACTORIES, ["jagged_modules", "kernels/jagged_kernels"]),
        ("dtype", OF_FLOATS, ["kernels/jagged_kernels"]),
    ],
)
def test_factories_follow_no_default(keyword, factories, folders):
    assert factories_without(keyword, factories, f"torch.zeros(3)\ntorch.ones(3, {keyword}=x)") == [
        1
    ]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): factories_without(keyword, factories, path.read_text())
        for path in files
    }
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_layers_do_not_follow_the_defaults(case, dtype):
    """Under a default device whose tensors have no values."""
    model, inputs = make(case), case.model.inputs(*SIZES[0])
    expected = training_step(model, inputs)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            results = training_step(model, inputs)
    finally:
        torch.set_default_dtype(default)
    for result, x in zip(results, expected):
        assert torch.equal(result, x)


def test_a_picture_of_a_mask_does_not_follow_the_default_device():
    with torch.device("meta"):
        assert jm.AttentionMask(causal=True).picture(2) == "# .\n# #"
