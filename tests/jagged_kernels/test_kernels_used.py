"""docs/kernels-used.md, which is printed from the selectors."""

from pathlib import Path

from jagged_kernels.kernels_used import document

PAGE = Path(__file__).parents[2] / "docs" / "kernels-used.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == document(), f"run: python -m jagged_kernels.kernels_used {PAGE}"


def test_it_names_both_kernels():
    lines = document().splitlines()
    assert any("| fp16, bf16 | 65 to 128 | triton" in line and "| hopper 128×128, 128×64, 128×64 |" in line for line in lines)
