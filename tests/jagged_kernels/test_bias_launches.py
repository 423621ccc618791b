"""What runs on a GPU for a RelativeBias besides the attention kernels."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import jagged_modules as jm
from jagged_modules import functional as F

pytest.importorskip("triton")

from jagged_kernels.precompile.recorder import recorded_launches

# Operators that run nothing, or are part of another: zeros calls zero_, and that fill_ where memory
# is small and on the host.
NOT_COUNTED = {
    "empty",
    "empty_like",
    "empty_strided",
    "fill_",
    "new_empty",
    "promote_types",
    "to",
    "zeros",
}


def counted(call, launches):
    """The result of a call, and how often each kernel of ours but attention's, and each operator of
    torch that runs one, was called."""
    with profile(activities=[ProfilerActivity.CPU]) as events:
        result = call()
    operators = (
        event.name.removeprefix("aten::")
        for event in events.events()
        if event.name.startswith("aten::")
    )
    kernels = [x.kernel for x in launches if not x.kernel.startswith("attention")]
    launches.clear()
    return result, Counter(kernels) + Counter(name for name in operators if name not in NOT_COUNTED)


@pytest.mark.parametrize("implementation", ["hopper", "triton"])
def test_launches_of_a_bias(offsets, implementation):
    """One in each direction makes its tables, and one sums the gradients. Torch only zeroes memory,
    once for each table."""
    q, k, v = torch.randn(190, 3, 4, 64).bfloat16().requires_grad_().unbind(1)
    tables = torch.randn(4, 399).requires_grad_(), torch.randn(4, 21).requires_grad_()

    def launched(bias):
        options = dict(activation="silu", bias=bias, implementation=implementation)
        inputs = (q, k, v, *(tables if bias else ()))
        with recorded_launches() as launches:
            # the first call makes the default boundaries
            F.jagged_attention(q, k, v, offsets([100, 90]), **options)
            launches.clear()
            out, forward = counted(
                lambda: F.jagged_attention(q, k, v, offsets([100, 90]), **options), launches
            )
            _, backward = counted(
                lambda: torch.autograd.grad(out, inputs, torch.empty_like(out)), launches
            )
        return forward, backward

    (plain_forward, plain_backward), (forward, backward) = (
        launched(None),
        launched(jm.RelativeBias(*tables, torch.arange(190))),
    )
    assert forward - plain_forward == Counter(bias_tables_kernel=1)
    assert backward - plain_backward == Counter(bias_tables_kernel=1, sum_tables_kernel=1, zero_=2)
