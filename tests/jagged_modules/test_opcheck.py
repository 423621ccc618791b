"""torch's opcheck of the registered CPU operators: schema, fake kernel, autograd, dynamic
shapes."""

import pytest
import torch
from jagged_kernels.attention.params import (
    AttentionCall,
    AttentionParams,
    MaskParams,
    Segments,
    pack,
)
from torch import library

from jagged_modules import functional as F


def check_attention(call):
    """Forward and backward."""
    operators, arguments = torch.ops.jagged_modules, pack(call)
    library.opcheck(operators.attention_cpu.default, arguments)
    results = [x.detach() for x in operators.attention_cpu(*arguments)]
    detached = arguments._replace(
        **{name: getattr(arguments, name).detach() for name in "qkv"},
        bias=[x if x is None else x.detach() for x in arguments.bias],
    )
    backward = torch.randn_like(results[0]), results, *detached
    library.opcheck(operators.attention_cpu_backward.default, backward)


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("q_shared", [False, True])
def test_opcheck(q_shared, activation, masked, offsets_of):
    q, k, v = (
        torch.randn(n, h, d, requires_grad=True) for n, h, d in ((4, 4, 8), (7, 2, 8), (7, 2, 6))
    )
    q_offsets, kv_offsets = offsets_of([4, 4] if q_shared else [3, 1]), offsets_of([2, 5])
    mask, num_targets = (
        (MaskParams(1, -1, 3, 1, 1, 0, 2, 0), torch.tensor([1, 2])) if masked else (None, None)
    )
    segment_scale, output_scale = (
        (None, 1.0) if activation == "softmax" else (torch.tensor([0.5, 2.0]), 0.1)
    )
    params = AttentionParams(
        0.3, activation, mask, output_scale, num_targets=num_targets, segment_scale=segment_scale
    )
    segments = Segments(q_offsets, kv_offsets, q_shared=q_shared)
    check_attention(AttentionCall(q, k, v, segments, params))


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_opcheck_with_dropout(activation, offsets_of):
    q, k, v = (
        torch.randn(n, h, d, requires_grad=True) for n, h, d in ((4, 4, 8), (7, 2, 8), (7, 2, 6))
    )
    params = AttentionParams(0.3, activation, dropout_p=0.25, dropout_seed=torch.tensor(7))
    segments = Segments(offsets_of([3, 1]), offsets_of([2, 5]))
    check_attention(AttentionCall(q, k, v, segments, params))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("tables", ["position", "time", "both"])
def test_opcheck_with_a_bias(tables, activation, dtype, offsets_of):
    q, k, v = (
        torch.randn(n, h, d, dtype=dtype, requires_grad=True)
        for n, h, d in ((4, 4, 8), (7, 2, 8), (7, 2, 6))
    )
    position, time = torch.randn(1, 9, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    of_time = dict(
        time_bias=time, timestamps=torch.randint(50, (7,)), boundaries=torch.tensor([1, 5, 20])
    )
    fields = dict(position_bias=position) | (
        of_time | dict(query_timestamps=torch.randint(50, (4,))) if tables == "both" else {}
    )
    fields = (of_time if tables == "time" else fields) | dict(query_shift=torch.tensor([0, 3]))
    output_scale = 1.0 if activation == "softmax" else 0.1
    params = AttentionParams(
        0.3,
        activation,
        MaskParams(1, -1, 3, 0, 1, 0, 2, 0),
        output_scale,
        table_gradients=True,
        **fields,
    )
    segments = Segments(offsets_of([3, 1]), offsets_of([2, 5]))
    check_attention(AttentionCall(q, k, v, segments, params))


def test_opcheck_of_strided_low_precision_inputs(offsets_of):
    packed = torch.randn(7, 3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    offsets = offsets_of([2, 0, 5], torch.int32)
    segments = Segments(offsets, offsets.clone())
    arguments = pack(AttentionCall(*packed.unbind(1), segments, AttentionParams(0.3)))
    library.opcheck(torch.ops.jagged_modules.attention_cpu.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_jagged_matmuls(dtype, offsets_of):
    operators = torch.ops.jagged_modules
    plan = F.ScorePlan.from_offsets(offsets_of([2, 0, 3], torch.int32), offsets_of([4, 5, 1]))
    shapes = (plan.x_rows, 4), (plan.y_rows, 4), (plan.total,)
    x, y, p = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    library.opcheck(operators.outer_cpu.default, (x, y, *plan.offsets, plan.total))
    library.opcheck(operators.matmul_cpu.default, (p, y, *plan.offsets, plan.x_rows, False))
    library.opcheck(operators.matmul_cpu.default, (p, x, *plan.offsets, plan.y_rows, True))
    for columns in (False, True):
        library.opcheck(operators.softmax_cpu.default, (p, *plan.offsets, columns))
        library.opcheck(
            operators.softmax_backward_cpu.default,
            (p.detach(), p.detach().exp(), *plan.offsets, columns),
        )
