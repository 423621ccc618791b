"""Rows behind the last segment: the kernels, in graphs that do not know the lengths."""

import pytest
import torch
from marks import slow_after
from tails import LAYERS, ON_KERNELS, ON_TORCH, check, compiled, layer_case
from torch import library

from jagged_modules.functional.tail import leaving, without_tail
from jagged_modules.layers import target_node


@slow_after(1, "dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ON_KERNELS)
def test_functions(poisoned_memory, name, dtype):
    check(ON_KERNELS[name], compiled(ON_KERNELS[name].call), dtype, implementation="triton")


@pytest.fixture
def only_the_device_knows(monkeypatch):
    """Eager calls take the path of CUDA tensors whose offsets the host has not seen; attention
    itself runs on the CPU."""
    from jagged_kernels.common import tail as kernels

    from jagged_modules.segments import Segmentation

    monkeypatch.setattr("jagged_modules.segments.values_are_checkable", lambda x: False)
    for name in ("tail.runs_kernels", "linear.runs_row_kernels"):
        monkeypatch.setattr(f"jagged_modules.functional.{name}", lambda x: True)
    monkeypatch.setattr(Segmentation, "lengths_on_host", lambda segmentation, offsets: None)
    for name in ("zero_tails", "kept_rows"):
        monkeypatch.setattr(kernels, f"{name}_on_device", getattr(kernels, name))


@pytest.mark.parametrize("few", [0, 2**20])
@pytest.mark.parametrize("name", ["attention", "target"])
def test_results_of_few_elements(only_the_device_knows, poisoned_memory, monkeypatch, name, few):
    """They are 0 before the kernel, others are cleared behind it."""
    monkeypatch.setattr("jagged_kernels.attention.op.FEW", few)
    check(ON_KERNELS[name], ON_KERNELS[name].call, torch.float32, implementation="triton")


@pytest.mark.parametrize("name", LAYERS)
def test_layers(only_the_device_knows, poisoned_memory, name):
    layer, case = layer_case(name)
    check(case, case.call, torch.float32, parameters=layer.parameters())


def test_linear_of_all_rows(only_the_device_knows, poisoned_memory):
    case = ON_TORCH["linear"]
    check(case, case.call, torch.float32)


@pytest.mark.parametrize("ends", [(0, 0), (10, 3), (14, 14)], ids=str)
def test_tails_are_zeroed_in_one_launch(poisoned_memory, offsets, ends):
    from jagged_kernels.common.tail import zero_tails

    x, y = torch.randn(14, 3, 700), torch.randn(14, 5).half()
    expected = [torch.cat([z[:end], torch.zeros_like(z[end:])]) for z, end in zip((x, y), ends)]
    zero_tails((x, offsets([ends[0], 0])), (y, offsets([ends[1]]).int()), (x[:0], offsets([0])))
    assert torch.equal(x, expected[0]) and torch.equal(y, expected[1])


def test_the_tail_of_one_tensor_in_a_graph(offsets):
    """The operator writes to what the graph has computed."""
    from jagged_kernels.common.tail import triton_zero_tail, zero_tail

    def call(x, end):
        y = x * 2
        zero_tail(y, end)
        return y

    x, end = torch.randn(7, 3), offsets([2, 3])
    expected = torch.cat([2 * x[:5], torch.zeros(2, 3)])
    assert torch.equal(call(x, end), expected)
    assert torch.equal(compiled(call)(x, end), expected)
    library.opcheck(triton_zero_tail, (x, end), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("shape", [(300,), (300, 5), (300, 2, 700), (300, 1100), (0, 4)], ids=str)
@pytest.mark.parametrize("strided", [True, False])
def test_rows_before_the_end_are_kept(poisoned_memory, offsets, shape, strided):
    from jagged_kernels.common.tail import kept_rows

    x = torch.randn(*shape, 2)[..., 0] if strided else torch.randn(shape)
    expected = torch.cat([x[:170], torch.zeros_like(x[170:])])
    x[170:] = float("nan")
    assert torch.equal(kept_rows(x, offsets([70, 100])), expected)


@pytest.mark.parametrize("has_end", [True, False])
def test_a_sum_of_rows(poisoned_memory, offsets, has_end):
    from jagged_kernels.common.tail import kept_rows

    x, y, end = torch.randn(30, 2 * 70)[:, ::2], torch.randn(30, 70).half(), 17 if has_end else 30
    expected = torch.cat([x[:end] + y[:end], torch.zeros(30 - end, 70)])
    x[end:], y[end:] = torch.nan, torch.nan
    assert torch.equal(kept_rows(x, offsets([7, 10]) if has_end else None, None, 0, y), expected)


@pytest.mark.parametrize("columns", [5, 1100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_in_an_order(poisoned_memory, columns, dtype):
    from jagged_kernels.common.tail import kept_rows

    x, order = torch.randn(300, columns), torch.randperm(300).to(dtype)
    assert torch.equal(kept_rows(x, None, order=order), x[order])
    whole = torch.zeros(300, columns + 9)
    kept_rows(x, None, order=order, out=whole[:, 2:-7])
    assert torch.equal(whole, torch.nn.functional.pad(x[order], (2, 7)))


@pytest.mark.parametrize("rows_of_each", [1, 3])
def test_many_targets_are_ordered_by_the_kernel(monkeypatch, rows_of_each):
    """By the launch on their device, which is here the current one."""
    monkeypatch.setattr(target_node, "MANY", 0)
    monkeypatch.setattr(target_node, "runs_kernels", lambda x: True)
    monkeypatch.setattr("jagged_kernels.common.ops.current_device", lambda: None)
    x, order = torch.randn(20 * rows_of_each, 7), torch.randperm(20)
    expected = x.view(20, -1)[order].view(x.shape)
    strided, out = torch.cat([x, x], 1)[:, :7], torch.empty(len(x), 9)[:, 1:8]
    for given in (x, strided):
        assert torch.equal(target_node.in_order(given, order), expected)
    assert torch.equal(target_node.in_order(strided, order, out), expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("columns", [5, 1100])
@pytest.mark.parametrize("end", [170, 300, None])
def test_a_copy_for_a_gemm_has_more_rows(monkeypatch, poisoned_memory, offsets, columns, end):
    from jagged_kernels.rows.copies import copied_rows

    monkeypatch.setattr("jagged_kernels.common.ops.current_device", lambda: None)
    of_segments, last = None if end is None else offsets([7, end - 7]), end or 300
    x = torch.randn(300, 2 * columns)[:, ::2]
    x[last:] = torch.nan
    out = copied_rows(x, of_segments, torch.float16, 304, 4)
    expected = torch.nn.functional.pad(x[:last].half(), (0, 0, 0, 304 - last))
    assert torch.equal(out[:, :columns], expected)
    assert torch.equal(out[:300, columns:], torch.eye(4)[:1].expand(300, 4).half())
    assert not out[300:, columns + 1 :].any() and out[300:, columns].le(1).all()


@pytest.mark.parametrize("columns", [5, 1100])
@pytest.mark.parametrize("has_end", [True, False])
def test_columns_behind_rows(poisoned_memory, offsets, columns, has_end):
    from jagged_kernels.common.tail import kept_rows

    x, end = torch.randn(300, columns), 170 if has_end else 300
    out = kept_rows(x, offsets([70, 100]) if has_end else None, torch.float16, 32)
    assert torch.equal(out[:end, :columns], x[:end].half()) and not out[end:, :columns].any()
    assert out[:, columns:].tolist() == [[1.0, *[0.0] * 31]] * 300


def test_derivatives_of_any_order(only_the_device_knows, offsets):
    x, end = torch.randn(7, 3, dtype=torch.float64, requires_grad=True), offsets([2, 3])
    for function in (lambda x: without_tail(x, end), lambda x: leaving(x * 1, end)):
        assert torch.autograd.gradcheck(function, (x,)) and torch.autograd.gradgradcheck(
            function, (x,)
        )
