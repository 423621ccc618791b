"""The arguments of attention's operators, and the call that they are made from."""

import pytest
import torch
from jagged_kernels.attention.pages import Pages
from jagged_kernels.attention.params import (
    Arguments,
    AttentionCall,
    AttentionParams,
    MaskParams,
    Options,
    Segments,
    SegmentTensors,
    TileList,
    pack,
    unpack,
)

from jagged_modules.cpu import attention as _cpu  # noqa: F401 - defines the operators


def tensors(count):
    return [torch.zeros(1) for _ in range(count)]


def full_call(flag):
    """With a value of its own in each field, and tiles."""
    tables = tensors(10)
    params = AttentionParams(
        0.5, "silu", MaskParams(*range(10)), 0.25, flag, "hopper", 7, not flag, *tables, 0.125,
        *tensors(1),
    )  # fmt: skip
    pages = Pages(torch.zeros(1, dtype=torch.int32), 128, 11)
    segments = Segments(*tensors(2), flag, not flag, flag, pages)
    call = AttentionCall(*tensors(3), segments, params)
    return call, TileList(*tensors(2), 64), TileList(*tensors(2), 192)


def same(x, y):
    """Whether two calls have the same tensors, and equal other fields of the same types."""
    if isinstance(x, (tuple, list)):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    if isinstance(x, Pages):
        return same([x.table, x.page_rows, x.num_rows], [y.table, y.page_rows, y.num_rows])
    return x is y or (not isinstance(x, torch.Tensor) and type(x) is type(y) and not x != y)


@pytest.mark.parametrize("flag", [False, True])
def test_every_field_returns(flag):
    given = full_call(flag)
    assert same(unpack(*pack(*given)), given)
    params = given[0].params
    assert None not in (*params, *given[0].segments, *given[1], *given[2])
    assert len({id(x) for x in params if isinstance(x, torch.Tensor)}) == 11


def test_what_is_left_out_returns():
    given = AttentionCall(*tensors(3), Segments(*tensors(2)), AttentionParams(1.0))
    assert same(unpack(*pack(given)), (given, TileList(), TileList()))


def test_equal_offsets_stay_one_tensor():
    offsets = torch.zeros(1)
    call = AttentionCall(*tensors(3), Segments(offsets, offsets), AttentionParams(1.0))
    assert unpack(*pack(call))[0].segments.is_self_attention


def test_groups_are_the_named_fields():
    (call, queries, keys), arguments = full_call(True), pack(*full_call(True))
    assert len(arguments.segments) == len(SegmentTensors._fields)
    assert len(arguments.options) == len(Options._fields)
    arguments = pack(call, queries, keys)
    segments = SegmentTensors(*arguments.segments)
    assert segments.segment_scale is call.params.segment_scale and segments.tiles is queries.tiles
    assert Options(*arguments.options).table_gradients == call.params.table_gradients


@pytest.mark.parametrize(
    "operator",
    ["jagged_modules.attention_cpu", "jagged_kernels.attention", "jagged_kernels.paged_attention"],
)
def test_operators_take_the_arguments(operator):
    pytest.importorskip("jagged_kernels.attention.op")
    namespace, name = operator.split(".")
    operators = getattr(torch.ops, namespace)
    names = [x.name for x in getattr(operators, name).default._schema.arguments]
    assert names == list(Arguments._fields)
    if name != "paged_attention":
        backward = getattr(operators, f"{name}_backward").default._schema.arguments
        assert [x.name for x in backward] == ["do", "results", *names]
