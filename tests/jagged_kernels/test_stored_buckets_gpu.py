"""Attention on a GPU with stored buckets of a time bias. Their kernel, and how long they are kept:
interpreter/test_stored_buckets.py. Accuracy: test_cells_gpu.py."""

import dataclasses

import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.schedule import host_schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="kernels for compute capability 9.0",
    ),
]
CAUSAL = jm.AttentionMask(causal=True)


def problem(offsets, dim):
    """A function of a schedule that attends, its inputs, its schedule, and the timestamps."""
    lengths = torch.randint(0, 400, (40,), generator=torch.Generator().manual_seed(1))
    rows = int(lengths.sum())
    q, k, v = (
        torch.randn(rows, 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    tables = [torch.randn(shape, device="cuda", requires_grad=True) for shape in ((799,), (4, 65))]
    times = torch.randn(rows, device="cuda").mul(2).exp().mul(400).long().cumsum(0)
    segments = offsets(lengths.tolist(), "cuda")
    sizes = dict(num_heads=4, num_kv_heads=4, head_dim=dim, dtype=q.dtype, mask=CAUSAL)
    schedule = host_schedule(lengths, lengths, **sizes).to("cuda")

    def attend(schedule):
        bias = jm.RelativeBias(*tables, times)
        options = dict(activation="silu", output_scale=1 / 400, mask=CAUSAL, bias=bias)
        return F.jagged_attention(q, k, v, segments, schedule=schedule, **options)

    return attend, (q, k, v, *tables), schedule, times


def without_buckets(schedule):
    return dataclasses.replace(schedule, num_blocks=None)


@pytest.mark.parametrize("dim", [64, 128])
def test_twenty_runs_agree_bit_for_bit(offsets, dim):
    attend, inputs, schedule, _ = problem(offsets, dim)
    runs = []
    for _ in range(20):
        out = attend(schedule)
        runs.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], run))


def test_a_write_to_the_timestamps_is_noticed(offsets):
    attend, _, schedule, times = problem(offsets, 64)
    before = attend(schedule)
    times.mul_(50)
    after, expected = attend(schedule), attend(without_buckets(schedule))
    assert not torch.equal(before, after)
    assert (after - expected).norm() <= 1e-2 * expected.norm()


@torch.no_grad()
def test_a_graph_follows_the_timestamps(offsets):
    attend, _, schedule, times = problem(offsets, 64)
    attend(schedule)  # stored
    expected = attend(without_buckets(schedule))  # compiles what the graph runs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(schedule)
    graph.replay()
    assert torch.equal(out, expected)
    times.mul_(50)
    graph.replay()
    assert torch.equal(out, attend(without_buckets(schedule)))
    assert not torch.equal(out, expected)
