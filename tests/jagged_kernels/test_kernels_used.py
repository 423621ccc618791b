"""docs/kernels-used.md, which is printed from the selectors."""

from pathlib import Path

import pytest

from ..kernels_used import document

PAGE = Path(__file__).parents[2] / "docs" / "kernels-used.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == document(), f"run: python -m tests.kernels_used {PAGE}"


@pytest.mark.parametrize(
    "section, row",
    [
        ("Attention", "| fp16, bf16 | 65 to 128 | triton 64×64, 64×32, 64×32 | "),
        (
            "Block attention",
            (
                "| fp16, bf16 | 65 to 128 | triton 64×128, 64×128 | triton 64×128, 64×128 | hopper"
                " 64×128, 64×128 | "
            ),
        ),
        ("DIN's attention", "| fp16, bf16 | forward, dk and dv | 64, 4 | 64, 8 |"),
        ("Linear compression", "| fp16, bf16 | 128 | triton 128×128×32 | hopper 192×128×64 | "),
        (
            "Jagged matrix multiplications",
            "| `jagged_jagged_bmm` | fp16, bf16 | 16×16×64 | 64×64×64 | 128×128×32 | 128×128×32 |",
        ),
        ("Jagged softmax", "| fp32 | 64×16 | 64×32 | 64×32 |"),
        ("Rows", "| backward of the gate | 4×64, 1 | 2×128, 1 | 1×512, 2 | "),
        ("Rows", "| activation | 32×64, 4 | 16×128, 4 | 8×256, 4 | "),
    ],
)
def test_every_operator_has_its_section(section, row):
    _, _, text = document().partition(f"\n## {section}\n")
    assert row in text.partition("\n## ")[0]
