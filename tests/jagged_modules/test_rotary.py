"""Rotary positions: apply_rotary, its tables and the arguments of Rotary."""

import math

import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.rotary import rotary_tables


def rotated(x, cos, sin):
    """The rotation as a product of complex numbers, in float64."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())[:, None]).flatten(
        -2
    )


def angles(rows, pairs, dtype=torch.float32):
    angle = torch.randn(rows, pairs, dtype=torch.float64)
    return angle.cos().to(dtype), angle.sin().to(dtype)


# -- apply_rotary ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 3, 8), (1, 1, 2), (4, 2, 6), (0, 2, 4), (3, 0, 4)])
def test_equals_complex_multiplication(shape):
    x, (cos, sin) = (
        torch.randn(shape, dtype=torch.float64),
        angles(shape[0], shape[2] // 2, torch.float64),
    )
    torch.testing.assert_close(F.apply_rotary(x, cos, sin), rotated(x, cos, sin))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_is_computed_in_fp32_or_better_and_rounded_once(dtype, table_dtype):
    x, tables = torch.randn(50, 2, 8).to(dtype), angles(50, 4, table_dtype)
    out = F.apply_rotary(x, *tables)
    assert out.dtype == dtype
    if dtype.itemsize == 2:
        assert torch.equal(out, F.apply_rotary(x.float(), *tables).to(dtype))
    else:  # the tables are rounded to x's dtype
        tables = [table.to(dtype) for table in tables]
        torch.testing.assert_close(
            out.double(),
            rotated(x, *tables),
            rtol=0,
            atol=4 * torch.finfo(dtype).eps * float(x.abs().max()),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_the_inverse_rotation(dtype):
    x, (cos, sin) = torch.randn(7, 2, 8, dtype=dtype, requires_grad=True), angles(7, 4)
    strided = torch.randn(8, 2, 7, dtype=dtype).permute(2, 1, 0)
    expanded = torch.ones(1, dtype=dtype).expand(7, 2, 8)
    for grad in (torch.randn(7, 2, 8, dtype=dtype), strided, expanded):
        (actual,) = torch.autograd.grad(F.apply_rotary(x, cos, sin), x, grad)
        assert torch.equal(actual, F.apply_rotary(grad, cos, -sin))


def test_gradcheck():
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    tables = angles(3, 2, torch.float64)
    assert torch.autograd.gradcheck(F.apply_rotary, (x, *tables))


def test_a_packed_view_is_left_as_it_is():
    packed, tables = torch.randn(6, 3, 2, 8), angles(6, 4)
    before = packed.clone()
    for x in packed.unbind(1):
        assert torch.equal(F.apply_rotary(x, *tables), F.apply_rotary(x.contiguous(), *tables))
    assert torch.equal(packed, before)


ROWS, TABLE = torch.randn(5, 2, 8), torch.randn(5, 4)
BAD_ROTATIONS = [
    ((None, TABLE, TABLE), TypeError, "x must be a torch.Tensor, got NoneType"),
    ((ROWS.long(), TABLE, TABLE), TypeError, "x must be float64, .* on cpu, got torch.int64"),
    ((ROWS[0], TABLE, TABLE), ValueError, r"x must have shape \[L, H, D\], got \[2, 8\]"),
    ((ROWS, 1.0, TABLE), TypeError, "cos must be a torch.Tensor, got float"),
    ((ROWS, TABLE[0], TABLE), ValueError, r"cos must have shape \[L, D / 2\], got \[4\]"),
    ((ROWS, TABLE, TABLE.long()), TypeError, "sin must be float64, .* on cpu, got torch.int64"),
    (
        (ROWS, TABLE, TABLE[:4]),
        ValueError,
        r"sin must have shape \[L, D / 2\] of x \[5, 2, 8\] with D even, got \[4, 4\]",
    ),
    (
        (ROWS, TABLE[:, :3], TABLE),
        ValueError,
        r"cos must have shape \[L, D / 2\] of x \[5, 2, 8\] with D even, got \[5, 3\]",
    ),
    (
        (ROWS[..., :7], TABLE[:, :3], TABLE[:, :3]),
        ValueError,
        r"cos must have .* of x \[5, 2, 7\] with D even, got \[5, 3\]",
    ),
]


@pytest.mark.parametrize(
    "arguments, error, message",
    BAD_ROTATIONS,
    ids=[message[:40] for _, _, message in BAD_ROTATIONS],
)
def test_bad_rotation(arguments, error, message):
    with pytest.raises(error, match=message):
        F.apply_rotary(*arguments)


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_tables_are_the_float64_values_rounded_once(theta):
    """At a position of a million an angle held in fp32 would be off by 0.03."""
    positions, dim = 1 << 20, 6
    tables = rotary_tables(dim, positions, theta)
    for table, function in zip(tables, (math.cos, math.sin), strict=True):
        assert table.shape == (positions, dim // 2) and table.dtype == torch.float32
        for position in (0, 1, 2, 4095, 100_003, positions - 1):
            exact = torch.tensor(
                [function(position * theta ** (-2 * i / dim)) for i in range(dim // 2)],
                dtype=torch.float64,
            )
            rounding = torch.finfo(torch.float32).eps / 4  # half the spacing of numbers up to 1
            assert (table[position] - exact).abs().max() <= rounding + positions * torch.finfo(
                torch.float64
            ).eps


def test_rotary_from_frequencies():
    rotary = jm.Rotary.from_frequencies(8, 20, "qkv", theta=100.0, device="cpu")
    cos, sin = rotary_tables(8, 20, 100.0)
    assert torch.equal(rotary.cos, cos) and torch.equal(rotary.sin, sin)
    assert rotary.rotate == "qkv" and rotary.positions is None
    assert jm.Rotary.from_frequencies(8, 20, device="meta").cos.is_meta


BAD_ROTARIES = [
    (dict(cos=None), TypeError, "cos must be a torch.Tensor, got NoneType"),
    (
        dict(cos=TABLE.long()),
        TypeError,
        "cos must be float64, float32, float16 or bfloat16, got torch.int64",
    ),
    (dict(cos=TABLE[0]), ValueError, r"cos must have shape \[P, D / 2\], got \[4\]"),
    (dict(sin=TABLE[None]), ValueError, r"sin must have shape \[P, D / 2\], got \[1, 5, 4\]"),
    (dict(sin=TABLE[:3]), ValueError, r"sin must have cos's shape, \[5, 4\], got \[3, 4\]"),
    (dict(linear="yes"), TypeError, "linear must be a bool, got str"),
    (dict(precise=1), TypeError, "precise must be a bool, got int"),
    (dict(rotate="q"), ValueError, 'rotate must be "qk" or "qkv", got \'q\''),
    (dict(rotate=None), ValueError, 'rotate must be "qk" or "qkv", got None'),
    (dict(positions=[0, 1]), TypeError, "positions must be a torch.Tensor, got list"),
    (
        dict(positions=torch.ones(5)),
        TypeError,
        "positions must be int32 or int64, got torch.float32",
    ),
    (
        dict(positions=torch.ones(5, 1, dtype=torch.int64)),
        ValueError,
        r"positions must be 1-D, got shape \[5, 1\]",
    ),
]


@pytest.mark.parametrize(
    "change, error, message", BAD_ROTARIES, ids=[message[:40] for _, _, message in BAD_ROTARIES]
)
def test_bad_rotary(change, error, message):
    with pytest.raises(error, match=message):
        jm.Rotary(**(dict(cos=TABLE, sin=TABLE) | change))


BAD_FREQUENCIES = [
    ((7, 10), ValueError, "head_dim must be even for rotary pairs, got 7"),
    ((0, 10), ValueError, "head_dim must be at least 1, got 0"),
    ((8.0, 10), TypeError, "head_dim must be an int, got float"),
    ((8, 0), ValueError, "max_seqlen must be at least 1, got 0"),
    ((8, "10"), TypeError, "max_seqlen must be an int, got str"),
    ((8, 10, "qk", "10000"), TypeError, "theta must be a number, got str"),
    ((8, 10, "qk", 0), ValueError, "theta must be positive, got 0"),
    ((8, 10, "qk", float("nan")), ValueError, "theta must be .*, got nan"),
    ((8, 10, "k"), ValueError, 'rotate must be "qk" or "qkv", got \'k\''),
]


@pytest.mark.parametrize(
    "arguments, error, message",
    BAD_FREQUENCIES,
    ids=[message[:40] for _, _, message in BAD_FREQUENCIES],
)
def test_bad_frequencies(arguments, error, message):
    with pytest.raises(error, match=message):
        jm.Rotary.from_frequencies(*arguments)
