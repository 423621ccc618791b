"""Norms of rows and HSTU's gate on a GPU."""

import pytest
import torch
from accuracy.rows import Norm

from .fixtures.rows import ACTIVATIONS, by_width

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ROWS = [1, 37, 3000]


@pytest.mark.parametrize(
    "dtypes",
    [(FP32, BF16, FP32), (BF16, BF16, BF16), (FP32, FP16, FP32), (FP16,) * 3, (FP32,) * 3],
    ids=str,
)
@by_width
def test_row_norm(check_row_norm, record_cell, width, norm, dtypes):
    record_cell("row_norm", dtypes[0], (width,), str(dtypes[1]))
    for rows in ROWS:
        check_row_norm(rows, width, norm, dtypes, "cuda", residual=rows != 37)


@by_width
def test_rows_behind_the_end(check_end, width, norm):
    for rows in (0, 1, 3000):
        check_end(rows, width, norm, (FP32, BF16), "cuda")


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    [(FP32, BF16, FP32), (BF16, BF16, FP32), (FP32, FP16, FP32), (FP16,) * 3, (FP32,) * 3],
    ids=str,
)
@by_width
def test_residual_norm(check_residual_norm, record_cell, width, norm, dtypes, has_bias):
    record_cell("row_norm_residual", dtypes[0], (width,), str(dtypes[1]))
    for rows in ROWS:
        check_residual_norm(rows, width, norm, dtypes, "cuda", has_bias, both=rows != 37)
    check_residual_norm(20_000, 512, Norm(), dtypes, "cuda")


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("name, gated", ACTIVATIONS)
def test_activation(check_activation_of_rows, record_cell, name, gated, dtype):
    for rows, width in ((1, 64), (37, 27), (3000, 100), (20_000, 512)):
        record_cell("activation", dtype, (width,), "gated" if gated else "")
        check_activation_of_rows(rows, width, dtype, "cuda", name, gated)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@by_width
def test_gate(check_gate, record_cell, width, norm, dropout, dtype):
    record_cell("gate", dtype, (width,), "dropout" if dropout else "")
    for rows in ROWS:
        check_gate(rows, width, norm, dtype, "cuda", dropout)


def test_more_rows_than_programs(check_row_norm, check_gate):
    """Each program adds several tiles to its sums."""
    check_row_norm(20_000, 512, Norm(), (FP32, BF16, FP32), "cuda")
    check_gate(20_000, 512, Norm(), BF16, "cuda", 0.1)


def test_a_gradient_that_is_cast_by_halves(check_gate, monkeypatch):
    from jagged_kernels.rows import op

    monkeypatch.setattr(op, "HALVED", 1)
    for rows, width in ((1, 64), (9001, 512)):
        check_gate(rows, width, Norm(), BF16, "cuda", 0.1)
