"""Padded tensors in and out of Jagged, with padding on either side or anywhere."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.containers import padding

LENGTHS, WIDTH = torch.tensor([2, 0, 4, 1]), 4


def real(side):
    positions = torch.arange(WIDTH)
    return (positions if side == "right" else positions.flip(0)) < LENGTHS[:, None]


@pytest.fixture(params=["right", "left"])
def side(request):
    return request.param


def test_there_and_back(side):
    x, mask = torch.randn(4, WIDTH, 3, requires_grad=True), real(side)
    jagged = jm.Jagged.from_padded(x, LENGTHS, side=side)
    assert jagged.max_seqlen == 4 and torch.equal(jagged.host_lengths, LENGTHS)
    assert torch.equal(jagged.values, x[mask])
    padded = jagged.to_padded(padding_value=-1, side=side)
    assert torch.equal(padded, torch.where(mask[..., None], x, -1))
    (dx,) = torch.autograd.grad(padded.sum(), x)
    assert torch.equal(dx, mask[..., None].float().expand_as(x))
    wide = jagged.to_padded(6, side=side)
    assert torch.equal(
        wide[:, :4] if side == "right" else wide[:, 2:], padded.clamp(min=-9) * mask[..., None]
    )


def test_a_mask_may_have_padding_between_rows():
    x, mask = torch.randn(5, 7, 2), torch.rand(5, 7) > 0.5
    jagged = jm.Jagged.from_padded(x, mask=mask)
    assert torch.equal(jagged.values, x[mask])
    assert torch.equal(jagged.offsets.diff(), mask.sum(1))


@pytest.mark.parametrize("given", ["lengths", "mask"])
def test_lengths_that_only_a_device_knows(monkeypatch, given, side):
    x = torch.randn(4, WIDTH, 3)
    options = dict(lengths=LENGTHS) if given == "lengths" else dict(mask=real(side))
    expected = jm.Jagged.from_padded(x, **options, side=side)
    monkeypatch.setattr(padding, "values_are_checkable", lambda x: False)
    values, offsets, longest, host = padding.real_rows(
        x, options.get("lengths"), options.get("mask"), side
    )
    assert torch.equal(offsets, expected.offsets) and host is None and longest == WIDTH
    assert torch.equal(values[:7], expected.values)
    assert values.shape == (16, 3) and not values[7:].any()


@pytest.mark.parametrize("kept", ["newest", "oldest"])
def test_longer_segments_are_truncated_on_request(side, kept):
    values, offsets = torch.arange(7.0), torch.tensor([0, 2, 2, 7])
    with pytest.raises(ValueError, match=r"longer than max_seqlen|max_seqlen"):
        F.jagged_to_padded(values, offsets, 3)
    out = F.jagged_to_padded(values, offsets, 3, -1, side=side, truncate=kept)
    last = [4, 5, 6] if kept == "newest" else [2, 3, 4]
    first = [0, 1, -1] if side == "right" else [-1, 0, 1]
    assert out.tolist() == [first, [-1] * 3, last]
    jagged = jm.Jagged(values, offsets)
    assert torch.equal(jagged.to_padded(3, -1, side, kept), out)


def test_empty_tensors():
    assert (
        jm.Jagged.from_padded(torch.randn(0, 3, 2), torch.zeros(0, dtype=torch.int64)).num_rows == 0
    )
    jagged = jm.Jagged.from_padded(torch.randn(2, 0, 2), torch.zeros(2, dtype=torch.int64))
    assert jagged.to_padded().shape == (2, 0, 2)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({}, ValueError, "one of lengths and mask must be given, got neither"),
        (dict(lengths=LENGTHS, mask=real("left")), ValueError, "must be given, got both"),
        (dict(lengths=[2, 0, 4, 1]), TypeError, "lengths must be a torch.Tensor, got list"),
        (dict(lengths=LENGTHS[:3]), ValueError, r"must have shape \[B\] = \[4\], got \[3\]"),
        (dict(lengths=real("left")), ValueError, r"got \[4, 4\]; a mask is given as mask="),
        (dict(lengths=LENGTHS + 1), ValueError, r"must be 0 to x's N, 4, got \[3, 1, 5, 2\]"),
        (dict(lengths=LENGTHS - 1), ValueError, "lengths must be 0 to x's N"),
        (dict(lengths=LENGTHS.float()), TypeError, "lengths"),
        (dict(mask=real("left").int()), ValueError, "mask must be bool, True for real rows"),
        (dict(mask=real("left")[:, :3]), ValueError, r"mask must have shape \[B, N\] = \[4, 4\]"),
        (dict(lengths=LENGTHS, side="top"), ValueError, "side must be one of"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        jm.Jagged.from_padded(torch.randn(4, WIDTH, 3), **options)


def test_a_width_that_nothing_knows(monkeypatch):
    jagged = jm.Jagged(torch.randn(7, 3), torch.tensor([0, 7]))
    monkeypatch.setattr(type(jagged), "host_lengths", None)
    with pytest.raises(ValueError, match="max_seqlen must be given"):
        jagged.to_padded()


# -- reductions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_reductions_of_any_row_shape(shape):
    x, offsets = torch.randn(9, *shape, dtype=torch.float64), torch.tensor([0, 2, 2, 9])
    parts = [x[:2], x[2:2], x[2:]]
    for reduce, expected in ((F.jagged_sum, torch.Tensor.sum), (F.jagged_mean, torch.Tensor.mean)):
        rows = [expected(part, 0) if len(part) else x.new_zeros(shape) for part in parts]
        torch.testing.assert_close(reduce(x, offsets), torch.stack(rows))
    rows = [part.amax(0) if len(part) else x.new_full(shape, 5) for part in parts]
    assert torch.equal(F.jagged_max(x, offsets, 5), torch.stack(rows))


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_sums_of_rows_without_columns(implementation):
    x, offsets = torch.randn(3, 0, requires_grad=True), torch.tensor([0, 2, 3])
    sums = F.jagged_sum(x, offsets, implementation=implementation)
    assert sums.shape == (2, 0)
    sums.sum().backward()


def test_sums_of_long_segments_add_sums_of_blocks():
    """One fp32 sum of so many rows has an error of 2e-4."""
    x, offsets = torch.full((200_001,), 0.1), torch.tensor([0, 1, 200_001])
    torch.testing.assert_close(F.jagged_mean(x, offsets), x[:2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("reduce", [F.jagged_sum, F.jagged_softmax])
def test_sums_and_softmaxes_make_no_call_for_each_length(reduce):
    calls = []
    for lengths in ([3, 0, 4], range(200)):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        x = torch.randn(int(offsets[-1]), 4, requires_grad=True)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            reduce(x, offsets).sum().backward()
        calls.append(len(seen.events()))
    assert calls[1] <= calls[0] + 10


def test_a_mean_does_not_overflow():
    x = torch.full((100, 2), 60_000.0, dtype=torch.float16)
    assert F.jagged_mean(x, torch.tensor([0, 100])).eq(60_000).all()


def test_sums_may_be_written_to():
    x = torch.randn(5, 3, requires_grad=True)
    F.jagged_sum(x, torch.tensor([0, 2, 5])).mul_(2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_the_gradient_of_a_maximum_goes_to_its_first_row():
    x = torch.tensor([[1.0, 2], [3, 2], [3, 1]], requires_grad=True)
    F.jagged_max(x, torch.tensor([0, 3])).sum().backward()
    assert x.grad.tolist() == [[0, 1], [1, 0], [0, 0]]


def test_a_nan_is_the_maximum_of_its_segment_alone():
    x = torch.tensor([1.0, torch.nan, 3, 4])
    out = F.jagged_max(x, torch.tensor([0, 3, 4]))
    assert out[0].isnan() and out[1] == 4


def test_reductions_have_gradients_of_any_order():
    x, offsets = torch.randn(7, 2, dtype=torch.float64), torch.tensor([0, 3, 3, 7])
    x.requires_grad_()
    for reduce in (F.jagged_sum, F.jagged_mean):
        assert torch.autograd.gradgradcheck(lambda x, f=reduce: f(x.square(), offsets), x)
    assert torch.autograd.gradgradcheck(lambda x: F.jagged_last(x.square(), offsets, 2)[0], x)


@pytest.mark.parametrize("k", [2, [1, 3, 0]], ids=str)
def test_last_rows_by_number_and_for_each_segment(k):
    x, offsets = torch.arange(7), torch.tensor([0, 2, 6, 7])
    k = torch.tensor(k) if isinstance(k, list) else k
    last, ends = F.jagged_last(x, offsets, k)
    first, same = F.jagged_first(x, offsets, k)
    assert torch.equal(ends, same)
    if isinstance(k, int):
        assert last.tolist() == [0, 1, 4, 5, 6] and first.tolist() == [0, 1, 2, 3, 6]
    else:
        assert last.tolist() == [1, 3, 4, 5] and first.tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("compiles", [False, True])
def test_more_rows_than_the_dtype_of_offsets_counts(compiles):
    def parts(k):
        offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
        return [part(torch.arange(3), offsets, k) for part in (F.jagged_first, F.jagged_last)]

    if compiles:
        parts = torch.compile(parts, backend="eager")
    for k in (2**32, torch.tensor([2**32, 2**40])):
        for values, ends in parts(k):
            assert values.tolist() == [0, 1, 2]
            assert ends.tolist() == [0, 1, 3] and ends.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64], ids=str)
def test_rows_between_times(dtype):
    x, offsets = torch.arange(7.0, requires_grad=True), torch.tensor([0, 2, 2, 7])
    times = torch.tensor([10, 80, 95, 30, 90, 60, 89]).to(dtype)
    bounds = dict(start=torch.tensor([10, 0, 60]), end=torch.tensor([80, 99, 90]))
    bounds = {name: bound.to(dtype) for name, bound in bounds.items()}
    found, ends = F.jagged_between(x, offsets, times=times, **bounds)
    assert found.tolist() == [0, 5, 6] and ends.tolist() == [0, 1, 1, 3]
    found.sum().backward()
    assert x.grad.tolist() == [1, 0, 0, 0, 0, 1, 1]
    found, ends = F.jagged_between(x, offsets, times=times, start=60)
    assert found.tolist() == [1, 2, 4, 5, 6] and ends.tolist() == [0, 1, 1, 5]
    assert torch.equal(F.jagged_between(x, offsets, times=times)[0], x)


def test_rows_behind_the_last_segment_are_not_between():
    @torch.compile(backend="eager")
    def between(x, offsets, times):
        return F.jagged_between(x, offsets, times=times, start=60)

    times = torch.tensor([80, 10, 95, 70, 70])
    found, ends = between(torch.arange(1, 6), torch.tensor([0, 2, 3]), times)
    assert found.tolist() == [1, 3, 0, 0, 0] and ends.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("compiles", [False, True])
def test_bounds_beyond_the_dtype_of_times(dtype, compiles):
    """As seconds in int32 and a bound that means no limit."""
    x, offsets, times = torch.arange(3), torch.tensor([0, 3]), torch.tensor([5, 0, 100]).to(dtype)

    def between(start, end):
        return F.jagged_between(x, offsets, times=times, start=start, end=end)[0]

    if compiles:
        between = torch.compile(between, backend="eager")
    for limit in (300, 2**16, 2**31, 2**62):
        assert between(-limit, limit).tolist() == [0, 1, 2]
        assert not between(limit, None).any() and not between(None, -limit).any()


def test_rows_between_times_of_meta_rows():
    x, offsets, times = torch.empty(5, 2, device="meta"), torch.tensor([0, 2, 5]), torch.arange(5)
    found, ends = F.jagged_between(x, offsets, times=times, start=1)
    assert found.is_meta and found.shape == x.shape and ends.shape == offsets.shape


def test_times_are_compared_exactly():
    x, offsets, now = torch.arange(3), torch.tensor([0, 3]), 1_700_000_000_123
    times = now + torch.tensor([-1, 0, 1])
    for bound in (now, torch.tensor([now])):
        assert F.jagged_between(x, offsets, times=times, start=bound)[0].tolist() == [1, 2]
        assert F.jagged_between(x, offsets, times=times, end=bound)[0].tolist() == [0]


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(times=[1, 2, 3]), TypeError, "times must be a torch.Tensor, got list"),
        (dict(times=torch.arange(4)), ValueError, r"times .* \[L\] = \[3\], got torch.int64 \[4\]"),
        (dict(times=torch.ones(3) > 0), ValueError, "times must be real numbers"),
        (dict(end=2**63), ValueError, "end must be a number of int64, got 9223372036854775808"),
        (dict(start=1.5), TypeError, "start must be a number as times, torch.int64, .* got float"),
        (dict(end=torch.ones(2)), ValueError, "end must be numbers as times, torch.int64, got"),
        (dict(end=torch.arange(3)), ValueError, r"end must be .* \[B\] = \[2\], got"),
    ],
    ids=str,
)
def test_wrong_times(options, error, message):
    options = dict(times=torch.arange(3)) | options
    with pytest.raises(error, match=message):
        F.jagged_between(torch.randn(3, 2), torch.tensor([0, 1, 3]), **options)


def test_reductions_of_containers(container):
    x, offsets = torch.randn(7, 3), torch.tensor([0, 2, 2, 7])
    rows = container(x, offsets)
    for reduce in (F.jagged_sum, F.jagged_mean, F.jagged_max):
        assert torch.equal(reduce(rows), reduce(x, offsets))
    for part, options in (
        (F.jagged_first, dict(k=2)),
        (F.jagged_last, dict(k=2)),
        (F.jagged_between, dict(times=torch.arange(7), start=1)),
    ):
        found = part(rows, **options)
        for own, expected in zip(found, part(x, offsets, **options)):
            assert torch.equal(own, expected)
        assert torch.equal(F.jagged_sum(found), F.jagged_sum(*found))  # what it returns is one too
    with pytest.raises(TypeError, match=r"x must be a JaggedTensor, .* got Tensor"):
        F.jagged_sum(x)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, o: F.jagged_last(x, o, -1), "k must be"),
        (lambda x, o: F.jagged_last(x, o, torch.tensor([1, -1])), "k must not be negative, got -1"),
        (lambda x, o: F.jagged_first(x, o, torch.tensor([1])), r"k must have shape \[B\] = \[2\]"),
        (lambda x, o: F.jagged_max(x[:4], o), "offsets"),
        (
            lambda x, o: F.jagged_max(x.long(), o, 0.5),
            "empty must be an integer for x of torch.int64",
        ),
        (lambda x, o: F.jagged_sum(x[:4], o), "offsets"),
        (lambda x, o: F.jagged_sum(x, o, max_seqlen=2), "max_seqlen"),
        (lambda x, o: F.jagged_sum(x, o, implementation="cpu"), "implementation must be one of"),
    ],
)
def test_wrong_arguments_of_reductions(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(5, 2), torch.tensor([0, 2, 5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_what_is_added(dtype):
    x, offsets = torch.randn(50, 3), torch.tensor([0, 20, 50])
    with torch.autocast("cpu", dtype):
        total, mean = F.jagged_sum(x, offsets), F.jagged_mean(x, offsets)
    assert torch.equal(total, F.jagged_sum(x, offsets))
    assert torch.equal(mean, F.jagged_mean(x, offsets))
