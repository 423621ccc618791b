"""What rows behind the last segment cost: launches of the kernels that clear them, and none where
the host knows the lengths."""

from collections import Counter

import pytest
import torch
from tails import layer_case

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.segments import Segmentation, remember

pytest.importorskip("triton")

from jagged_kernels.precompile.recorder import recorded_launches

TO_CLEAR = "zero_tails_kernel", "keep_rows_kernel"
COSTS = {  # of a layer: launches of each kernel in the forward, and in the backward
    "JaggedMLP": [(1, 1), (0, 0)],
    "JaggedTargetAttention": [(1, 2), (1, 1)],
    "JaggedSelfTargetAttention": [(2, 2), (1, 2)],
    "JaggedGDPA": [(1, 1), (1, 1)],
    "JaggedGDPA-context": [(1, 2), (1, 1)],
    "JaggedGDPA-seeds": [(0, 1), (1, 0)],
    "GDPABlock": [(1, 0), (1, 1)],
    "HSTULayer": [(1, 0), (1, 1)],
    "HSTUStack": [(2, 0), (2, 2)],  # of two layers
    "HSTUStack-score": [(5, 0), (5, 5)],  # and the cache
    "BlockDiagonalSelfAttention": [(2, 1), (1, 1)],
}


def cleared(launches):
    """How often each of the two kernels was launched."""
    counts = Counter(x.kernel for x in launches)
    launches.clear()
    return tuple(counts[name] for name in TO_CLEAR)


@pytest.mark.parametrize("name", COSTS)
def test_launches_of_a_layer(offsets, name):
    layer, case = layer_case(name, dtype=torch.bfloat16)
    lengths = dict(x=[30, 0, 40, 20], y=[10, 1, 20, 30])
    tensors = {
        x[0]: torch.randn(sum(lengths[x[-1]]), 32, requires_grad=True).bfloat16()
        for x in case.inputs
    }
    with recorded_launches() as launches:
        out = case.call(tensors, {side: offsets(x) for side, x in lengths.items()})
        forward = cleared(launches)
        sum(x.sum() for x in (out if isinstance(out, tuple) else (out,))).backward()
        assert [forward, cleared(launches)] == COSTS[name]


@pytest.mark.parametrize("name", COSTS)
def test_no_launches_where_the_host_knows_the_lengths(offsets, name):
    layer, case = layer_case(name, dtype=torch.bfloat16)
    lengths = dict(x=[30, 0, 40, 20], y=[10, 1, 20, 30])
    tensors = {
        x[0]: torch.randn(sum(lengths[x[-1]]), 32, requires_grad=True).bfloat16()
        for x in case.inputs
    }
    known = {side: offsets(x) for side, x in lengths.items()}
    with recorded_launches() as launches:
        for side, x in known.items():
            # as host_lengths do, from which a schedule would be built
            segmentation = Segmentation()
            segmentation._num_rows = sum(lengths[side])
            remember(x, segmentation)
        out = case.call(tensors, known)
        sum(x.sum() for x in (out if isinstance(out, tuple) else (out,))).backward()
        assert cleared(launches) == (0, 0)


def test_each_pass_of_a_function_clears_all_its_tensors_in_one_launch(offsets, monkeypatch):
    monkeypatch.setattr("jagged_kernels.attention.op.FEW", 0)
    q, k, v = torch.randn(90, 3, 4, 64).bfloat16().requires_grad_().unbind(1)
    x, y = torch.randn(90, 16, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    with recorded_launches() as launches:
        for call in (
            lambda o: F.jagged_attention(q, k, v, o),
            lambda o: F.block_diagonal_attention(q, k, v, o),
            lambda o: F.jagged_softmax(x, o),
            lambda o: F.jagged_dense_bmm(x, y, o),
        ):
            out = call(offsets([30, 0, 60]))
            assert cleared(launches) == (1, 0)
            out.sum().backward()
            assert cleared(launches) == (1, 0)


def test_lengths_on_the_host_that_end_elsewhere_are_an_error(offsets):
    known = jm.Jagged(torch.randn(90, 1), offsets([30, 60]), host_lengths=torch.tensor([30, 60]))
    q = torch.randn(100, 2, 64).bfloat16()
    with (
        recorded_launches(),
        pytest.raises(ValueError, match="q_offsets must end at the number of rows, 100, got 90"),
    ):
        F.jagged_attention(q, q, q, known.offsets)
