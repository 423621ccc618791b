"""Norms of rows and HSTU's gate in Triton's interpreter (fp32 and fp16; its bf16 arithmetic is
wrong)."""

import weakref

import pytest
import torch
from accuracy.rows import Norm
from marks import slow_after
from torch import library
from torch.nn.functional import pad

from ..fixtures.rows import ACTIVATIONS, ROWS, by_width

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FP32, FP16 = torch.float32, torch.float16


@slow_after(
    1,
    "dtypes",
    [(FP32, FP16, FP32), (FP16, FP16, FP16), (FP32,) * 3],
    ids=["mixed", "fp16", "fp32"],
)
@by_width
def test_row_norm(check_row_norm, width, norm, dtypes):
    for rows in ROWS if width < 512 else ROWS[:2]:
        check_row_norm(rows, width, norm, dtypes, "cpu", residual=rows != 37)


@slow_after(
    1,
    "dtypes",
    [(FP32, FP16, FP32), (FP16, FP16, FP16), (FP32,) * 3],
    ids=["mixed", "fp16", "fp32"],
)
@by_width
def test_residual_norm(check_residual_norm, width, norm, dtypes):
    for rows in ROWS if width < 512 else ROWS[:2]:
        options = dict(has_bias=rows != 37, both=rows != 130)
        check_residual_norm(rows, width, norm, dtypes, "cpu", **options)


@by_width
def test_rows_behind_the_end(check_end, width, norm):
    for rows in (0, 1, 37):
        check_end(rows, width, norm, (FP32, FP16), "cpu")


@pytest.mark.parametrize("kept", [True, False])
def test_the_gradient_behind_the_end_is_not_read(offsets, kept):
    from jagged_kernels.rows import op

    u, a, weight = torch.randn(20, 32), torch.randn(20, 32), torch.randn(32)
    dout, projection = torch.randn(20, 8), torch.randn(8, 96)
    gated, *statistics = op.triton_gate(u, a, weight, None, None, 0.0, 1e-6)
    operands = gated if kept else None, [u, a, *statistics, weight]

    def results(*end):
        outs = [torch.empty_like(u), torch.empty_like(a)]
        given = None, projection, None, 0.0, 1e-6, False, outs, True, *end
        return *outs, *op.triton_gate_linear_backward(dout, *operands, *given)

    dout[13:] = 0
    expected = results()
    dout[13:] = torch.nan
    found = results(offsets([6, 7]))
    assert all(map(torch.equal, found, expected)) and not found[0][13:].any()


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name, gated", ACTIVATIONS)
def test_activation(check_activation_of_rows, name, gated, dtype):
    for rows, width in ((37, 40), (1, 27), (3, 300)):
        check_activation_of_rows(rows, width, dtype, "cpu", name, gated)


@slow_after(1, "dtype", [FP32, FP16], ids=["fp32", "fp16"])
@slow_after(1, "dropout", [0.3, 0.0])
@by_width
def test_gate(check_gate, width, norm, dropout, dtype):
    for rows in ROWS if width < 512 else ROWS[:2]:
        check_gate(rows, width, norm, dtype, "cpu", dropout)


def gate(rows, seed, dropout, width=32):
    from jagged_kernels.rows import op

    u = torch.ones(rows, width)
    a, weight = torch.linspace(1, 2, width).expand(rows, width), torch.ones(width)
    return op.triton_gate(u, a, weight, None, seed, dropout, 1e-6, 1, True)[0]


def test_dropout_depends_on_seed_row_and_column():
    first, second = (gate(200, torch.tensor(seed), 0.5) != 0 for seed in (7, 7 + 2**40))
    rates = first.double().mean(0), first.double().mean(1)
    assert all(abs(rate - 0.5).max() < 0.25 for rate in rates)
    assert abs((first == second).double().mean() - 0.5) < 0.03
    assert not torch.equal(first[:100], first[100:]) and not torch.equal(
        first[:, :32], first[:, 32:64]
    )
    # a row's factors do not depend on the number of rows
    assert torch.equal(gate(30, torch.tensor(7), 0.5) != 0, first[:30])


def test_everything_is_dropped():
    assert not gate(5, torch.tensor(7), 1.0).any()


def test_activations_of_no_rows_and_of_a_nan():
    from jagged_kernels.rows import activation as op

    dx, sums = op.triton_activation_backward(torch.ones(0, 7), torch.ones(0, 14), "silu", True)
    assert dx.shape == (0, 14) and sums.shape == (14,) and not sums.any()
    x = torch.randn(9, 64)
    x[4] = torch.nan
    y, (dx, _) = (
        op.triton_activation(x, "silu", True),
        op.triton_activation_backward(torch.ones(9, 32), x, "silu", True),
    )
    y_again, dx_again = torch.ones(9, 32), torch.empty_like(x)
    op.triton_activation_again_backward(y_again, x, dx_again, "silu", True)
    for z in (y, dx, y_again, dx_again):
        assert z[4].isnan().all() and z[:4].isfinite().all() and z[5:].isfinite().all()


@pytest.mark.parametrize("rows", [0, 3])
def test_a_frozen_projection_and_no_rows(rows):
    from jagged_kernels.rows import op

    u, a, weight = torch.randn(rows, 32), torch.randn(rows, 32), torch.randn(32)
    _, mean, rstd = op.triton_gate(u, a, weight, weight, None, 0.0, 1e-6)
    projection, dout = torch.randn(8, 96), torch.randn(rows, 8)

    def results(needs_projection):
        grads, da = outs = [torch.empty(rows, 37), torch.empty_like(a)]
        sums, dprojection = op.triton_gate_linear_backward(
            dout, None, [u, a, mean, rstd, weight], weight, projection, None, 0.0, 1e-6, False,
            outs, needs_projection,
        )  # fmt: skip
        return grads[:, :32], da, sums, dprojection

    *frozen, nothing = results(False)
    *trained, dprojection = results(True)
    assert nothing.shape == (0,) and dprojection.shape == (8, 96)
    assert all(map(torch.equal, frozen, trained))
    y, mean, rstd = op.triton_row_norm(u, weight, weight, FP16, 1e-6)
    dx, sums = op.triton_row_norm_backward(y, u, mean, rstd, weight, None, 1e-6)
    assert y.shape == dx.shape == (rows, 32) and sums.shape == (2, 32)
    if rows == 0:
        assert not sums.any() and not frozen[2].any() and not dprojection.any()


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("end", [None, 4])
def test_a_result_with_fewer_rows_than_its_gate(dtype, end):
    """The others have gradients of 0."""
    from jagged_kernels.rows import op

    u, a, weight = torch.randn(9, 32).half(), torch.randn(9, 32).half(), torch.randn(32)
    dout, projection = torch.randn(6, 8).to(dtype), torch.randn(8, 96).half()
    end = None if end is None else torch.tensor([0, end])
    _, mean, rstd = op.triton_gate(u, a, weight, None, None, 0.0, *Norm())

    def results(dout):
        grads, da = outs = [torch.empty_like(u), torch.empty_like(a)]
        sums = op.triton_gate_linear_backward(
            dout, None, [u, a, mean, rstd, weight], None, projection, None, 0.0, 1e-6, False, outs,
            True, end,
        )  # fmt: skip
        return grads, da, *sums

    found = results(dout)
    assert not found[0][6:].any() and not found[1][6:].any() and found[0][:4].all()
    assert all(map(torch.equal, found, results(pad(dout, (0, 0, 0, 3)))))


def test_a_gradient_that_is_cast_by_halves(check_gate, monkeypatch):
    """One half's copy is free before the other's is made."""
    from jagged_kernels.rows import op

    copies, own = [], op.kept_rows

    def noting(x, *args, **options):
        assert all(copy() is None for _, copy in copies)
        y = own(x, *args, **options)
        copies.append((len(x), weakref.ref(y)))
        return y

    monkeypatch.setattr(op, "HALVED", 1)
    monkeypatch.setattr(op, "kept_rows", noting)
    for rows, dropout, halves in ((1, 0.0, [1]), (37, 0.0, [24, 13]), (130, 0.3, [72, 58])):
        copies.clear()
        check_gate(rows, 96, Norm(groups=3), FP16, "cpu", dropout)
        assert [n for n, _ in copies] == halves * (len(copies) // len(halves))


@pytest.mark.parametrize("norm", [Norm(), Norm(groups=2), Norm(rms=True)], ids=str)
def test_a_rows_nan_stays_there(norm):
    from jagged_kernels.rows import op

    u, a, weight = torch.randn(9, 32), torch.randn(9, 32), torch.randn(32)
    dout, projection = torch.randn(9, 8), torch.randn(8, 96)

    def results():
        out, mean, rstd = op.triton_gate(u, a, weight, None, None, 0.0, *norm)
        y, *statistics = op.triton_row_norm(a, weight, None, FP32, *norm)
        dx, _ = op.triton_row_norm_backward(y, a, *statistics, weight, None, norm.eps, norm.rms)
        grads, da = outs = [torch.empty_like(u), torch.empty_like(a)]
        op.triton_gate_linear_backward(
            dout, None, [u, a, mean, rstd, weight], None, projection, None, 0.0, norm.eps, norm.rms,
            outs, True,
        )  # fmt: skip
        return out, y, dx, grads, da

    clean = results()
    u[4], a[4], dout[4] = torch.nan, torch.nan, torch.nan
    for x, spoiled in zip(clean, results()):
        rows = torch.arange(9) != 4
        assert torch.equal(x[rows], spoiled[rows]) and spoiled[4].isnan().all()


def test_operators_pass_opcheck():
    from jagged_kernels.rows import activation, op

    x, weight, seed = torch.randn(5, 3, 32)[:, 1], torch.randn(32), torch.tensor(3)
    checks = dict(test_utils=("test_schema", "test_faketensor"))
    for groups, rms in ((1, False), (2, True)):
        bias = None if rms else weight
        given = x, weight, bias, FP16, 1e-6, groups, rms
        library.opcheck(op.triton_row_norm, given, **checks)
        y, mean, rstd = op.triton_row_norm(*given)
        library.opcheck(
            op.triton_row_norm_backward, (y, x, mean, rstd, weight, x, 1e-6, rms), **checks
        )
        given = x.half(), weight, bias, FP16, 1e-6, groups, rms, 32, torch.tensor([0, 3]), y
        _, mean, rstd = op.triton_row_norm(*given)
        library.opcheck(op.triton_row_norm, given, **checks)
        given = torch.randn(5, 80).half(), 40, x.half(), mean, rstd, weight, 1e-6, rms
        library.opcheck(op.triton_row_norm_packed_backward, given, **checks)
        for copy in (None, FP16):
            given = x, x.half(), weight, bias, FP32, copy, 1e-6, groups, rms
            library.opcheck(op.triton_residual_norm, given, **checks)
            total, y, _, mean, rstd = op.triton_residual_norm(*given)
            given = y, None, total, mean, rstd, weight, y, copy, rms
            library.opcheck(op.triton_residual_norm_backward, given, **checks)
        given = x, x, weight, bias, seed, 0.5, 1e-6, groups, rms
        library.opcheck(op.triton_gate, given, **checks)
        _, mean, rstd = op.triton_gate(*given)
        outs, options = [torch.empty(5, 64), torch.empty(5, 32)], (bias, torch.randn(8, 96), seed)
        operands = None, [x, x, mean, rstd, weight], *options, 0.5, 1e-6, rms, outs
        library.opcheck(
            op.triton_gate_linear_backward, (torch.randn(5, 8), *operands, True), **checks
        )
    given = torch.randn(5, 3, 32)[:, 1], "silu", True
    library.opcheck(activation.triton_activation, given, **checks)
    given = torch.randn(5, 16), *given, torch.tensor([0, 3])
    library.opcheck(activation.triton_activation_backward, given, **checks)
    given = torch.randn(5, 16), torch.randn(5, 32), torch.randn(5, 32), "silu", True
    library.opcheck(activation.triton_activation_again_backward, given, **checks)
    with pytest.raises(RuntimeError, match="twice"):
        x = x.clone().requires_grad_()
        y, mean, rstd = op.triton_row_norm(x, weight, None, FP32, 1e-6)
        (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        dx.sum().backward()
