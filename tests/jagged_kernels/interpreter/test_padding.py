"""Jagged rows and padded ones in Triton's interpreter (bfloat16 is copied only)."""

import pytest
import torch
from torch import library
from torch.autograd import gradcheck, gradgradcheck

from ..fixtures.padding import SHAPES, by_lengths, calls

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("behind", [0, 3])
@by_lengths
def test_shapes(check_padding, lengths, behind):
    for shape in SHAPES:
        check_padding(lengths, shape, torch.float32, "cpu", behind=behind)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.bool], ids=str
)
@by_lengths
def test_dtypes(check_padding, lengths, dtype):
    for index in (torch.int32, torch.int64):
        check_padding(lengths, (5,), dtype, "cpu", index, 2)
