"""Attention to keys in pages, in Triton's interpreter (fp32 and fp16)."""

import pytest
import torch
from marks import slow_after

from jagged_modules.activations import ACTIVATIONS


@slow_after(1, "dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", ["mixed", "empty-ends", "no-keys", "no-queries", "nothing"])
def test_lengths(check_pages, lengths, dtype):
    check_pages(lengths, dtype, "cpu")


@pytest.mark.parametrize("page_rows", [256, 1024])
def test_larger_pages(check_pages, page_rows):
    check_pages(([3, 70], [1100, 40]), torch.float32, "cpu", page_rows=page_rows, heads=(1, 1))


@slow_after(
    2,
    "activation",
    [
        "silu",
        "gelu_taylor",
        *(x for x in ACTIVATIONS if x not in ("softmax", "silu", "gelu_taylor")),
    ],
)
def test_activations(check_pages, activation):
    check_pages(([3, 70], [300, 20]), torch.float32, "cpu", heads=(2, 1), activation=activation)


@slow_after(
    3,
    "mask, activation",
    [
        ("hstu", "silu"),
        ("semi-local", "softmax"),
        ("window", "softmax"),
        ("causal", "silu"),
        ("grouped-targets", "softmax"),
        ("open-targets", "silu"),
        ("truncated", "softmax"),
    ],
)
def test_masks(check_pages, mask, activation):
    check_pages(
        ([3, 70, 9], [300, 40, 129]),
        torch.float32,
        "cpu",
        heads=(2, 1),
        mask=mask,
        activation=activation,
    )


@slow_after(1, "mask", [None, "causal"])
def test_bias(check_pages, mask):
    check_pages(
        ([3, 70, 9], [300, 40, 129]), torch.float32, "cpu", heads=(2, 1), bias=True, mask=mask
    )


@slow_after(2, "mask, bias", [(None, False), ("semi-local", False), ("causal", True)])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bits(check_pages, stored, mask, bias):
    """The rows are those that the storage stands for, rounded to q's dtype."""
    lengths = [3, 70, 9], [300, 40, 129]
    for dtype in (torch.float32, torch.float16):
        check_pages(lengths, dtype, "cpu", heads=(4, 2), stored=stored, mask=mask, bias=bias)


def test_one_graph_for_all_lengths(check_compiled_pages):
    check_compiled_pages("cpu")
