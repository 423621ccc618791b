"""The Python examples of README.md and of each page of the documentation run. README.md is short,
with the figures of the record."""

import json
import re

import pytest
from readme import PAGES, ROOT, examples, run_examples

WITH_CODE = [page.relative_to(ROOT) for page in PAGES if examples(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=str)
def test_examples_run(page):
    if any("torchrec" in code for code in examples(page)):
        pytest.importorskip("torchrec")
    run_examples(page)


@pytest.mark.parametrize("page", WITH_CODE, ids=str)
def test_lines_of_code_fit_on_a_page(page):
    """Longer ones must be scrolled, on the site and on GitHub."""
    assert [line for code in examples(page) for line in code.splitlines() if len(line) > 100] == []


def test_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    (example,) = examples("README.md")
    assert len(example.splitlines()) <= 11


SELF_128 = ("attention", "jagged self-attention", "B64 N2048 H4 D128")
SELF_64 = ("attention", "jagged self-attention", "B64 N2048 H4 D64")
TARGET = ("attention", "target attention", "history 1024")
LINEAR = ("linear_compress", "batch size, 70 candidates per user", "B=1024")
WIDE_ROWS, LONG = (
    ("leaderboard", "HSTU attention", x) for x in ("B128 N1024 D128", "B32 N4096 D64")
)
WIDE, NARROW = (
    ("leaderboard", "HSTU layer", x)
    for x in ("B256 mean 474 N1024 D128", "B512 mean 190 N2280 D64")
)
META_ATTENTION, META_LAYER = "Meta HSTU attention (Triton), TMA", "Meta STU (Triton), no recompute"


@pytest.mark.parametrize(
    "claim, case, peer, time",
    [
        (
            "**{}× faster** than cuDNN attention with K and V replicated",
            TARGET,
            "replicate + SDPA cuDNN",
            "forward_ms",
        ),
        (
            "**{}× faster** than cuDNN attention with candidates folded",
            TARGET,
            "SDPA cuDNN, folded",
            "forward_ms",
        ),
        (
            "**{}× faster** than padded flash attention",
            SELF_128,
            "SDPA flash, padded",
            "forward_backward_ms",
        ),
        ("**{}×** than `varlen_attn`", SELF_128, "varlen_attn (FA2)", "forward_backward_ms"),
        ("{}×: FlashAttention-4 is as fast", SELF_128, "FlashAttention-4", "forward_backward_ms"),
        ("**{}× faster** than FlashAttention", SELF_64, "FlashAttention-4", "forward_backward_ms"),
        ("**{}× to 2.5× faster** than Meta's in", WIDE_ROWS, META_ATTENTION, "forward_backward_ms"),
        ("**1.7× to {}× faster** than Meta's in", LONG, META_ATTENTION, "forward_backward_ms"),
        ("**{}× to 1.6× faster** than Meta's STU", WIDE, META_LAYER, "forward_backward_ms"),
        ("**1.2× to {}× faster** than Meta's STU", NARROW, META_LAYER, "forward_backward_ms"),
        ("**{}× faster** than users replicated per candidate", LINEAR, "replicated", "forward_ms"),
        ("**{}×** than separate GEMMs padded by hand", LINEAR, "padded", "forward_ms"),
    ],
)
def test_speed_ups_are_those_of_the_record(claim, case, peer, time):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (stated,) = re.findall(re.escape(claim).replace(r"\{\}", r"([\d.]+)"), text)
    record = json.loads((ROOT / "kernels/benchmarks/results/nvidia-h200/record.json").read_text())
    rows = [row for row in record["rows"] if (row["op"], row["table"], row["case"]) == case]
    times = {row["implementation"]: row[time] for row in rows if row.get(time)}
    assert float(stated) == round(
        times[peer] / times["jagged_modules"], len(stated.partition(".")[2])
    )


def test_results_repeat_the_speed_ups():
    text, index, results = (
        (ROOT / page).read_text(encoding="utf-8")
        for page in ("README.md", "docs/index.md", "docs/results.md")
    )
    stated = re.findall(r"[\d.]+×", re.search(r"\| what \|.*?\n\n", text, re.DOTALL)[0] + index)
    assert len(stated) > 10 and {ratio for ratio in stated if ratio not in results} == set()
