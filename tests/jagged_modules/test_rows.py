"""Row operators of jagged tensors: conversions, concatenation, splits, dense arithmetic."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagged_modules import functional as F
from jagged_modules.functional import rows as jagged_rows

from .segments import DTYPES, check_definition, joined, split

ROW_LENGTHS = [[3, 0, 2, 5], [0, 0], [], [1, 1, 1], [400, 1]]


def padded_loop(values, offsets, max_seqlen, padding_value=0.0):
    out = values.new_full((len(offsets) - 1, max_seqlen, *values.shape[1:]), padding_value)
    for block, rows in zip(out, split(values, offsets)):
        block[: len(rows)] = rows
    return out


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", ROW_LENGTHS)
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.int64, torch.bool])
def test_conversions(dtype, lengths, index, conversions, offsets_of):
    offsets, longest = offsets_of(lengths, index), max([0, *lengths])
    for shape in ((), (3,), (2, 3)):
        values = torch.randint(2 if dtype == torch.bool else 100, (sum(lengths), *shape)).to(dtype)
        padded = F.jagged_to_padded(values, offsets, longest + 2, 1)
        assert padded.dtype == dtype and torch.equal(
            padded, padded_loop(values, offsets, longest + 2, 1)
        )
        assert torch.equal(F.padded_to_jagged(padded, offsets), values)
        assert torch.equal(F.padded_to_jagged(padded, offsets, sum(lengths)), values)


@given(data=st.data())
def test_conversions_round_trip(data, offsets_of):
    lengths = data.draw(st.lists(st.integers(0, 20), max_size=6))
    width = data.draw(st.integers(0, 4))
    offsets, longest = offsets_of(lengths), max([0, *lengths])
    values = torch.randn(sum(lengths), width)
    padded = F.jagged_to_padded(
        values,
        offsets,
        longest + data.draw(st.integers(0, 3)),
        data.draw(st.floats(-5, 5, width=32)),
    )
    assert torch.equal(F.padded_to_jagged(padded, offsets), values)
    again = F.jagged_to_padded(F.padded_to_jagged(padded, offsets), offsets, longest)
    assert torch.equal(again, F.jagged_to_padded(values, offsets, longest))


def test_second_derivatives_of_conversions(conversions, offsets_of):
    """FBGEMM's operator gives wrong ones."""
    offsets, x = offsets_of([1, 2]), torch.randn(3, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(
        F.jagged_to_padded(x, offsets, 2).pow(3).sum(), x, create_graph=True
    )
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), x), (6 * x,))


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_fbgemm_converts_what_needs_no_gradient(grad_enabled, offsets_of):
    pytest.importorskip("fbgemm_gpu")
    x = torch.randn(3, 2, requires_grad=True)
    with torch.set_grad_enabled(grad_enabled), torch.profiler.profile() as profile:
        F.jagged_to_padded(x, offsets_of([1, 2]), 2)
    assert any("fbgemm" in event.name for event in profile.events()) is not grad_enabled


@pytest.mark.parametrize("padding_value", [2**63 - 1, 2**53 + 1, 2**31, -(2**31), -(2**63)])
def test_large_integers_as_padding(conversions, offsets_of, padding_value):
    """FBGEMM takes the padding value as fp64."""
    offsets, values = offsets_of([1, 2]), torch.arange(6).view(3, 2)
    assert torch.equal(
        F.jagged_to_padded(values, offsets, 2, padding_value),
        padded_loop(values, offsets, 2, padding_value),
    )


@pytest.mark.parametrize("lengths", ROW_LENGTHS)
def test_gradients_of_conversions(lengths, conversions, offsets_of):
    offsets, longest = offsets_of(lengths), max([0, *lengths])
    values = torch.randn(sum(lengths), 3, requires_grad=True)
    dense = torch.randn(len(lengths), longest, 3, requires_grad=True)
    grads = (
        torch.randn(3, longest, len(lengths)).permute(2, 1, 0),
        torch.randn(1, 3).expand(sum(lengths), 3),
    )
    (dvalues,) = torch.autograd.grad(F.jagged_to_padded(values, offsets, longest), values, grads[0])
    (ddense,) = torch.autograd.grad(F.padded_to_jagged(dense, offsets), dense, grads[1])
    assert torch.equal(dvalues, F.padded_to_jagged(grads[0], offsets))
    assert torch.equal(ddense, padded_loop(grads[1], offsets, longest))


def test_rows_past_the_block(offsets_of, monkeypatch, conversions):
    """Offsets on a device are not read. A long segment is truncated to N rows, and rows that a
    dense block does not have are 0."""
    from jagged_modules import segments as checks

    for module in (checks, jagged_rows):
        monkeypatch.setattr(module, "values_are_checkable", lambda x: False)
    offsets, values = offsets_of([1, 4, 2]), torch.randn(7, 3, requires_grad=True)
    padded = F.jagged_to_padded(values, offsets, 2)
    rows = [0, 1, 2, 5, 6]
    assert (
        torch.equal(padded.flatten(0, 1)[[0, 2, 3, 4, 5]], values[rows]) and not padded[0, 1].any()
    )
    (grad,) = torch.autograd.grad(padded.sum(), values)
    assert grad.sum(1).tolist() == [3, 3, 3, 0, 0, 3, 3]
    dense = torch.randn(3, 3, 3, requires_grad=True)
    taken = F.padded_to_jagged(dense, offsets, 7)
    assert (
        torch.equal(taken[[0, 1, 2, 3, 5, 6]], dense[[0, 1, 1, 1, 2, 2], [0, 0, 1, 2, 0, 1]])
        and not taken[4].any()
    )
    (grad,) = torch.autograd.grad(taken.sum(), dense)
    assert grad.sum(2).tolist() == [[3, 0, 0], [3, 3, 3], [3, 3, 0]]
    assert torch.equal(F.jagged_dense_add(values, dense, offsets)[4], values[4])
    assert not F.jagged_dense_mul(values, dense, offsets)[4].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", ROW_LENGTHS)
def test_dense_arithmetic(lengths, dtype, offsets_of):
    offsets, b, longest = offsets_of(lengths), len(lengths), max([0, *lengths])
    x = torch.randn(sum(lengths), 3).to(DTYPES[dtype])
    y = torch.randn(b, longest + 1, 3).to(DTYPES[dtype])

    def rows(y):
        return joined([block[:n] for block, n in zip(y, lengths)], y.flatten(0, 1)[:0])

    check_definition(
        lambda x, y: F.jagged_dense_add(x, y, offsets), lambda x, y: x + rows(y), dict(x=x, y=y)
    )
    check_definition(
        lambda x, y: F.jagged_dense_mul(x, y, offsets), lambda x, y: x * rows(y), dict(x=x, y=y)
    )


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths",
    [[[3, 0, 2]], [[3, 0, 2], [1, 4, 0]], [[0, 1], [2, 0], [0, 3]], [[0, 0], [0, 0]], [[], []]],
)
def test_concat(lengths, index, offsets_of):
    offsets = [offsets_of(x, index) for x in lengths]
    values = [torch.randn(sum(x), 2, 3) for x in lengths]
    expected = [
        rows for segment in zip(*(split(x, o) for x, o in zip(values, offsets))) for rows in segment
    ]
    out, bounds = F.jagged_concat(values, offsets)
    assert torch.equal(out, joined(expected, values[0][:0]))
    assert bounds.dtype == index and bounds.tolist() == offsets_of(map(sum, zip(*lengths))).tolist()


@pytest.mark.parametrize(
    "lengths, first",
    [([3, 0, 2], [1, 0, 2]), ([3, 4], 2), ([2, 1], [0, 0]), ([2, 1], [2, 1]), ([], []), ([], 3)],
)
def test_split(lengths, first, offsets_of):
    x, offsets = torch.randn(sum(lengths), 2), offsets_of(lengths, torch.int32)
    counts = [first] * len(lengths) if isinstance(first, int) else first
    (head, head_offsets), (tail, tail_offsets) = F.jagged_split(
        x, offsets, first if isinstance(first, int) else torch.tensor(first).long()
    )
    parts = split(x, offsets)
    assert torch.equal(head, joined([rows[:n] for rows, n in zip(parts, counts)], x[:0]))
    assert torch.equal(tail, joined([rows[n:] for rows, n in zip(parts, counts)], x[:0]))
    assert head_offsets.diff().tolist() == counts and head_offsets.dtype == torch.int32
    assert torch.equal(head_offsets + tail_offsets, offsets)
    again, again_offsets = F.jagged_concat([head, tail], [head_offsets, tail_offsets])
    assert torch.equal(again, x) and torch.equal(again_offsets, offsets)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths, chosen",
    [
        ([3, 0, 2], [2, 0, 1, 0, 0]),
        ([3, 0, 2], [1, 1]),
        ([3, 0, 2], []),
        ([0, 0], [1, 0]),
        ([], []),
    ],
)
def test_select(lengths, chosen, index, offsets_of, monkeypatch):
    x, offsets = torch.randn(sum(lengths), 2), offsets_of(lengths, index)
    parts = split(x, offsets)
    expected = joined([parts[b] for b in chosen], x[:0])
    picked = torch.tensor(chosen, dtype=index)
    out, bounds = F.jagged_select(x, offsets, picked)
    assert torch.equal(out, expected) and bounds.dtype == index
    assert bounds.diff().tolist() == [lengths[b] for b in chosen]
    for _ in range(2):
        out, again = F.jagged_select(x, offsets, picked, len(expected) + 3)
        assert torch.equal(again, bounds) and torch.equal(out[:-3], expected)
        assert not out[-3:].any()
        # as if only a device knew the lengths
        monkeypatch.setattr(jagged_rows, "values_are_checkable", lambda x: False)


def test_gradients_of_a_segment_that_is_selected_often_are_summed_in_fp32(offsets_of):
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    picked = torch.zeros(1000, dtype=torch.int64)
    out, _ = F.jagged_select(x, offsets_of([1, 1]), picked)
    out.backward(torch.ones_like(out))
    assert out.dtype == torch.bfloat16 and x.grad.tolist() == [[1000.0] * 3, [0.0] * 3]


def test_gradcheck_of_rows(offsets_of):
    offsets, others = offsets_of([2, 0, 3]), offsets_of([1, 2, 0])
    x, z, dense = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 2), (3, 2), (3, 3, 2))
    )
    checks = [
        (lambda x: F.jagged_to_padded(x, offsets, 4, 1.5), [x]),
        (lambda dense: F.padded_to_jagged(dense, offsets), [dense]),
        (lambda x, dense: F.jagged_dense_mul(x, dense, offsets), [x, dense]),
        (lambda x, z: F.jagged_concat([x, z], [offsets, others])[0], [x, z]),
        (lambda x: F.jagged_select(x, offsets, torch.tensor([2, 0, 2]))[0], [x]),
        (lambda x: F.jagged_split(x, offsets, torch.tensor([1, 0, 2]))[0][0], [x]),
        (lambda x: F.jagged_split(x, offsets, torch.tensor([1, 0, 2]))[1][0], [x]),
    ]
    for function, inputs in checks:
        assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(
            function, inputs
        )
