"""F.block_diagonal_attention on the CPU, against a loop over segments and blocks."""

import functools

import accuracy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jagged_modules as jm
from jagged_modules import functional as F

from .block_attention_cases import blockwise_attention, make_qkv, make_rotary

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
ROTARIES = [None, "qk", "qkv", "qk-given", "qkv-given"]
LENGTHS = {
    "below": [15, 31, 63, 127],
    "whole": [16, 32, 64, 128],
    "above": [17, 33, 65, 129],
    "one-row": [1, 1, 2],
    "empty": [0, 0, 40, 0, 0, 0, 70, 0],
    "all-empty": [0, 0],
    "long": [700, 3],
    "no-segments": [],
}


@pytest.fixture(params=["auto", "reference"])
def implementation(request):
    return request.param


def check_bounds(q, k, v, offsets, implementation="auto", grad=None, **options):
    """Check values and gradients by the accuracy rule. The reference rounds each operation to 16
    bits, unless it rotates."""

    def bounds(*x):
        if (
            implementation == "reference"
            and options.get("rotary") is None
            and q.dtype.itemsize == 2
        ):
            return accuracy.definition(
                lambda *y: blockwise_attention(*y, offsets, **options), dict(zip("qkv", x)), x[-1]
            )
        return accuracy.block_attention(*x, offsets, **options)

    def operator(*x):
        return F.block_diagonal_attention(*x, offsets, implementation=implementation, **options)

    accuracy.check(operator, bounds, dict(q=q, k=k, v=v), grad)


@pytest.fixture
def check(implementation):
    """q, k, v, offsets → `check_bounds` of both implementations."""
    return functools.partial(check_bounds, implementation=implementation)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_segments(lengths, block_size, check, offsets_of):
    lengths = LENGTHS[lengths]
    check(*make_qkv(sum(lengths)), offsets_of(lengths), block_size=block_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_of_one_row(dtype, implementation, assert_one_key):
    def attend(q, k, v, offsets, _):
        return F.block_diagonal_attention(q, k, v, offsets, implementation=implementation)

    assert_one_key(attend, [1, 1, 1], DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", ROTARIES)
def test_rotary_in_every_dtype(rotary, dtype, check, offsets_of):
    lengths = [33, 0, 16, 7, 50]
    tensors = make_qkv(sum(lengths), dtype=DTYPES[dtype])
    check(
        *tensors,
        offsets_of(lengths, torch.int32),
        block_size=16,
        rotary=make_rotary(rotary, 8, sum(lengths)),
    )


@pytest.mark.parametrize("rotary", ["qk", "qkv"])
def test_rotated_operands_are_not_rounded(rotary, implementation, offsets_of):
    """The error of q's gradient is less than half of that with rotated q and k rounded to bf16."""
    exact = [x.double().requires_grad_() for x in make_qkv(256, dim=64, dtype=torch.bfloat16)]
    offsets = offsets_of([256])
    tables, grad = make_rotary(rotary, 64, max_seqlen=256), torch.randn(256, 2, 64).bfloat16()
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in exact)
    rotated = [
        F.apply_rotary(x, tables.cos, tables.sin)
        for x in ((q, k, v) if rotary == "qkv" else (q, k))
    ]
    outs = [
        F.block_diagonal_attention(*exact, offsets, rotary=tables, implementation=implementation),
        F.block_diagonal_attention(q, k, v, offsets, rotary=tables, implementation=implementation),
        F.block_diagonal_attention(
            *rotated, *(() if rotary == "qkv" else (v,)), offsets, implementation=implementation
        ),
    ]
    expected, ours, rounded = (
        torch.autograd.grad(out, x, grad.to(out.dtype))[0].double()
        for out, x in zip(outs, (exact[0], q, q))
    )
    assert (ours - expected).norm() < 0.5 * (rounded - expected).norm()


@pytest.mark.parametrize("rotary", [None, "qkv"])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 2), (6, 2), (5, 1)])
def test_grouped_heads(heads, kv_heads, rotary, check, offsets_of):
    check(
        *make_qkv(60, heads, kv_heads),
        offsets_of([37, 23]),
        block_size=16,
        rotary=make_rotary(rotary, 8),
    )


@pytest.mark.parametrize(
    "dim, rotary",
    [
        (1, None),
        (17, None),
        (33, None),
        (256, None),
        (2, "qkv"),
        (6, "qk"),
        (72, "qkv"),
        (256, "qk"),
    ],
)
def test_head_dims(dim, rotary, check, offsets_of):
    check(
        *make_qkv(60, dim=dim),
        offsets_of([37, 0, 23]),
        block_size=16,
        rotary=make_rotary(rotary, dim),
    )


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1, 10.0])
def test_scale(scale, check, offsets_of):
    check(*make_qkv(60), offsets_of([37, 23]), block_size=16, scale=scale)


@pytest.mark.parametrize("rotary", [None, "qkv"])
@pytest.mark.parametrize("kind", ["contiguous", "expanded", "transposed", "sliced"])
def test_packed_views_and_gradients_of_any_stride(kind, rotary, check, offsets_of):
    grad = {
        "contiguous": torch.randn(60, 2, 8),
        "expanded": torch.ones(1).expand(60, 2, 8),
        "transposed": torch.randn(8, 2, 60).permute(2, 1, 0),
        "sliced": torch.randn(60, 3, 16)[:, 1:, ::2],
    }[kind]
    packed = torch.randn(60, 3, 2, 8)
    check(
        *packed.unbind(1),
        offsets_of([37, 23]),
        block_size=16,
        rotary=make_rotary(rotary, 8),
        grad=grad,
    )
    check(
        *torch.randn(8, 3, 2, 60).permute(3, 1, 2, 0).unbind(1),
        offsets_of([37, 23]),
        rotary=make_rotary(rotary, 8),
        grad=grad,
    )


@given(data=st.data())
def test_anything(data, offsets_of):
    lengths = data.draw(st.lists(st.integers(0, 80), max_size=6))
    kv_heads, group, pairs = (data.draw(st.integers(1, most)) for most in (3, 3, 10))
    options = dict(block_size=data.draw(st.sampled_from([16, 32, 64, 128])))
    options |= dict(
        rotary=make_rotary(data.draw(st.sampled_from(ROTARIES)), 2 * pairs, sum(lengths))
    )
    offsets = offsets_of(lengths, data.draw(st.sampled_from([torch.int32, torch.int64])))
    tensors = make_qkv(
        sum(lengths),
        kv_heads * group,
        kv_heads,
        2 * pairs,
        data.draw(st.sampled_from([*DTYPES.values()])),
    )
    check_bounds(*tensors, offsets, **options)


@pytest.mark.parametrize("rotary", [None, "qk", "qkv-given"])
def test_gradcheck(rotary, implementation, offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(19, 2, 1, 2, torch.float64)]
    options = dict(block_size=16, rotary=make_rotary(rotary, 2, 19), implementation=implementation)
    assert torch.autograd.gradcheck(
        lambda *x: F.block_diagonal_attention(*x, offsets_of([2, 0, 17]), **options), inputs
    )


@pytest.mark.parametrize(
    "row, block",
    [(0, (0, 16)), (15, (0, 16)), (16, (16, 20)), (20, (20, 36)), (38, (36, 39)), (39, (39, 40))],
)
def test_a_row_changes_its_own_block_alone(row, block, implementation, offsets_of):
    q, k, v = make_qkv(40)
    offsets = offsets_of([20, 0, 19, 1])
    options = dict(block_size=16, rotary=make_rotary("qkv", 8), implementation=implementation)
    before = F.block_diagonal_attention(q, k, v, offsets, **options)
    for x in (q, k, v):
        x[row] += 1
    changed = (F.block_diagonal_attention(q, k, v, offsets, **options) != before).any(2).any(1)
    assert changed.nonzero().flatten().tolist() == list(range(*block))


def test_given_positions_equal_to_those_in_the_segments(offsets_of):
    tensors, offsets, rotary = make_qkv(30), offsets_of([20, 0, 10]), make_rotary("qk", 8)
    positions = torch.cat([torch.arange(20), torch.arange(10)]).int()
    given = jm.Rotary(rotary.cos, rotary.sin, "qk", positions)
    attended = [
        F.block_diagonal_attention(*tensors, offsets, block_size=16, rotary=x)
        for x in (rotary, given)
    ]
    assert torch.equal(*attended)


def test_only_differences_of_positions_matter(offsets_of):
    tensors = make_qkv(30, dtype=torch.float64)
    offsets = offsets_of([20, 10])
    rotary = make_rotary("qk", 8)
    positions = torch.cat([torch.arange(20) + 7, torch.arange(10) + 900])
    given = jm.Rotary(rotary.cos, rotary.sin, "qk", positions)
    attended = [
        F.block_diagonal_attention(*tensors, offsets, block_size=16, rotary=x)
        for x in (rotary, given)
    ]
    torch.testing.assert_close(*attended, rtol=0, atol=1e-5)  # the tables are fp32


def test_no_large_tensor_is_made(tensor_sizes, one_thread, offsets_of):
    """Forward and backward make nothing larger than q, k and v together: far from a score for each
    pair of rows of a segment."""
    inputs = [x.requires_grad_() for x in make_qkv(4000, dim=16)]
    with tensor_sizes() as sizes:
        out = F.block_diagonal_attention(
            *inputs,
            offsets_of([4000]),
            block_size=16,
            rotary=make_rotary("qkv", 16, max_seqlen=4000),
        )
        torch.autograd.grad(out.sum(), inputs)
    assert 0 < max(sizes.made) <= sum(x.numel() for x in inputs)


@pytest.mark.parametrize("rotary", [None, "qk", "qkv"])
def test_the_backward_keeps_q_k_v_and_the_output(rotary, saved_tensors, offsets_of):
    """With rotary, the rotated q, k and v. Nothing else has as many elements."""
    tensors = [x.requires_grad_() for x in make_qkv(2000)]
    with saved_tensors() as saved:
        out = F.block_diagonal_attention(
            *tensors, offsets_of([1500, 0, 500]), rotary=make_rotary(rotary, 8, max_seqlen=1500)
        )
    assert sorted(x for x in saved.storages.values() if x >= out.numel()) == [out.numel()] * 4
    unturned = tensors if rotary is None else tensors[2:] if rotary == "qk" else []
    assert saved.storages.keys() >= {x.data_ptr() for x in (*unturned, out)}


def test_autocast_computes_in_its_dtype(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.block_diagonal_attention(
            q, k.half(), v, offsets_of([20]), rotary=make_rotary("qk", 8)
        )
    expected = F.block_diagonal_attention(
        *(x.bfloat16() for x in (q, k, v)), offsets_of([20]), rotary=make_rotary("qk", 8)
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out,
        expected,
        rtol=0,
        atol=4 * torch.finfo(torch.bfloat16).eps * float(v.detach().abs().max()),
    )
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == torch.float32


def test_second_derivatives(offsets_of):
    def gradients(**options):
        inputs = [x.requires_grad_() for x in make_qkv(3, 1, dim=2, dtype=torch.float64)]
        options |= dict(rotary=make_rotary("qkv", 2))
        return inputs, lambda *x: F.block_diagonal_attention(*x, offsets_of([1, 2]), **options)

    inputs, attend = gradients(implementation="reference")
    assert torch.autograd.gradgradcheck(attend, inputs)
    inputs, attend = gradients()
    grads = torch.autograd.grad(attend(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        sum(g.sum() for g in grads).backward()


def test_packed_equals_separate_tensors(offsets_of):
    qkv, offsets = torch.randn(60, 3, 2, 8), offsets_of([37, 23])
    assert torch.equal(
        F.block_diagonal_attention_packed(qkv, offsets),
        F.block_diagonal_attention(*qkv.unbind(1), offsets),
    )
