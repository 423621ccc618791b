"""When attention's operators are called past torch's dispatcher."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from jagged_kernels.attention import op
from jagged_kernels.attention.params import (
    AttentionCall,
    AttentionParams,
    MaskParams,
    Segments,
    pack,
)
from jagged_kernels.common import ops
from jagged_kernels.precompile.recorder import recorded_launches
from jagged_kernels.schedule.host import TileSchedule


class Subclass(torch.Tensor):
    pass


class Seen(TorchDispatchMode):
    """Records the names of this package's operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "jagged_kernels":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def operands():
    return tuple(torch.zeros(60, 2, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))


def call(q, k, v):
    offsets = torch.tensor([0, 60])
    tiles = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)
    params = AttentionParams(1.0, mask=MaskParams(1, -1, -1, 0, 1, 0, 0, 0))
    schedule = TileSchedule(*tiles, 128, 64, num_heads=2)
    return AttentionCall(q, k, v, Segments(offsets, offsets), params, schedule)


def chosen(q, k, v, **replaced):
    inputs = call(q, k, v)
    inputs = pack(inputs._replace(**replaced), inputs.schedule.tile_list)
    return ops.direct(op.triton_attention, inputs, inputs[:3])


def test_a_launcher_replaces_its_operator_for_plain_tensors_on_a_gpu_alone():
    q, k, v = operands()
    assert chosen(q, k, v) is op.triton_attention, "host tensors"
    lazy = torch._neg_view(q.detach())
    zeros = torch._efficientzerotensor(q.shape, dtype=q.dtype)
    with recorded_launches():
        assert chosen(q, k, v) is ops._launchers[op.triton_attention]
        for x in (lazy, zeros, q.as_subclass(Subclass)):
            assert chosen(q, k, x) is chosen(x, k, v) is op.triton_attention
        offsets = torch.tensor([0, 60])
        segments = Segments(offsets, offsets.as_subclass(Subclass))
        assert chosen(q, k, v, segments=segments) is op.triton_attention, "in a list"
        with torch.profiler.profile():
            assert chosen(q, k, v) is op.triton_attention
        with Seen():
            assert chosen(q, k, v) is op.triton_attention
        with torch.overrides.BaseTorchFunctionMode():
            assert chosen(q, k, v) is op.triton_attention
        with torch.autograd.forward_ad.dual_level():  # refused by the caller
            assert chosen(q, k, v) is ops._launchers[op.triton_attention]
        assert ops.direct(print, pack(call(q, k, v)), (q,)) is print, "not an operator"


@pytest.mark.parametrize("observed", [False, True])
def test_forward_and_backward_launch_the_same_kernels(observed):
    q, k, v = operands()
    seen = Seen()
    with recorded_launches() as launches:
        if observed:
            with seen:
                out = op.attention(call(q, k, v))
                grads = torch.autograd.grad(
                    out, (q, k, v), torch.zeros(60, 2, 64, dtype=torch.float16)
                )
        else:
            out = op.attention(call(q, k, v))
            grads = torch.autograd.grad(out, (q, k, v), torch.zeros(60, 2, 64, dtype=torch.float16))
    assert [x.shape for x in grads] == [q.shape] * 3
    attention_kernels = [x.kernel for x in launches if x.kernel.startswith("attention")]
    assert attention_kernels == [
        "attention_fwd_hopper_kernel",
        "attention_bwd_dq_hopper_kernel",
        "attention_bwd_dkdv_hopper_kernel",
    ]
    assert [x for x in seen.names if x.startswith("attention")] == (
        ["attention", "attention_backward"] if observed else []
    )


def test_a_second_derivative_is_refused():
    q, k, v = operands()
    with recorded_launches():
        out = op.attention(call(q, k, v))
        (dq,) = torch.autograd.grad(
            out, q, torch.zeros(60, 2, 64, dtype=torch.float16), create_graph=True
        )
        with pytest.raises(RuntimeError, match="not differentiable twice"):
            dq.sum().backward()
