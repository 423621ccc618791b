"""What runs on a GPU for a RelativeBias besides the attention kernels."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.schedule import host_schedule

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
    "as_strided",
    "promote_types",
    "slice",
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


def test_buckets_are_stored_once_for_all_layers(offsets):
    """In the first forward, if the host knows the lengths: other layers and the backwards launch
    nothing for buckets. Boundaries of equal values are as good as the same."""
    q, k, v = torch.randn(190, 3, 4, 64).bfloat16().requires_grad_().unbind(1)
    lengths, segments, times = torch.tensor([100, 90]), offsets([100, 90]), torch.arange(190)
    sizes = dict(num_heads=4, num_kv_heads=4, head_dim=64, dtype=q.dtype)
    schedule = host_schedule(lengths, lengths, capability=(9, 0), **sizes)
    with recorded_launches() as launches:
        for _ in range(2):
            table = torch.randn(4, 21).requires_grad_()
            boundaries = jm.RelativeBias.log_boundaries(20)
            bias = jm.RelativeBias(time=table, timestamps=times, boundaries=boundaries)
            options = dict(activation="silu", bias=bias, schedule=schedule)
            F.jagged_attention(q, k, v, segments, **options).sum().backward()
    launched = Counter(x.kernel for x in launches)
    assert (
        launched["attention_fwd_hopper_kernel"] == launched["attention_bwd_dq_hopper_kernel"] == 2
    )
    assert launched["stored_buckets_kernel"] == 1
