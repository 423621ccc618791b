"""Fixtures of the kernels' tests: those of one operator, which its interpreter and GPU tests share,
are in fixtures/."""

import pytest
import torch

from .fixtures.activations import check_activation
from .fixtures.attention import (
    check_attention,
    check_empty_shared_operands,
    check_one_key,
    check_scales_with_a_gradient,
    check_self_target_attention,
    check_very_negative_scores,
)
from .fixtures.bias import check_sums_stay_in_memory
from .fixtures.block_attention import (
    check_block_attention,
    check_block_layer_memory,
    check_packed_block_attention,
)
from .fixtures.delta import check_delta
from .fixtures.din import check_din
from .fixtures.hopper import hopper_attention, hopper_din, one_pass_calls, one_pass_counts
from .fixtures.jagged_matmul import jagged_matmuls
from .fixtures.jagged_ops import assert_neighbours_kept, assert_second_derivatives, jagged_pair
from .fixtures.jagged_softmax import assert_hidden_lines_give_0, jagged_softmaxes
from .fixtures.linear_compress import (
    check_compress_in_autocast,
    check_linear_compress,
    compress_inputs,
)
from .fixtures.packed import (
    check_packed,
    check_packed_neighbours,
    check_packed_tiles,
    packed_launches,
)
from .fixtures.packed_gradients import check_packed_gradients
from .fixtures.padding import by_kernels, check_padding
from .fixtures.pages import check_compiled_pages, check_pages
from .fixtures.rows import (
    check_activation_of_rows,
    check_end,
    check_gate,
    check_residual_norm,
    check_row_norm,
)
from .fixtures.split_queries import check_split_queries
from .fixtures.tile_list import (
    check_grouped_tiles,
    check_random_tiles,
    check_tile_list,
    check_tiles,
)


@pytest.fixture
def record_cell(record_property):
    """Records the operator, dtype, size and options that a test covers, and the largest head dim,
    for the matrix of `make test-gpu`."""

    def record(operator, dtype, dims, *options):
        names = {
            torch.float64: "fp64",
            torch.float32: "fp32",
            torch.float16: "fp16",
            torch.bfloat16: "bf16",
        }
        record_property(
            "cell",
            f"{operator}|{names[dtype]}|D{max(*dims, 1)}|"
            + (" ".join(filter(None, options)) or "plain"),
        )

    return record


@pytest.fixture
def change_selection(monkeypatch):
    """Replaces a rule or limit of attention/select.py, also for inputs for which kernels have been
    selected before."""
    from jagged_kernels.attention import op, select

    def change(name, value):
        monkeypatch.setattr(select, name, value)
        op._selection.cache_clear()

    yield change
    op._selection.cache_clear()


@pytest.fixture
def check_bits_beside_other_kernels():
    """Checks that steps give the same bits while two streams run them and a third one matrix
    multiplications. The thread blocks of a launch then run in any number and order."""

    def check(step, repeats):
        """step: its number -> tensors."""
        streams = [torch.cuda.Stream() for _ in range(3)]
        matrix = torch.randn(3000, 3000, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        runs = []
        for number in range(repeats):
            for stream in streams[:2]:
                with torch.cuda.stream(stream):
                    runs.append(step(number))
            with torch.cuda.stream(streams[2]):
                matrix @ matrix
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0]))

    return check


@pytest.fixture
def offsets(offsets_of):
    """lengths, device -> offsets `[B + 1]`."""
    return lambda lengths, device="cpu": offsets_of(lengths).to(device)


@pytest.fixture
def check_cuda_graph(offsets):
    """Checks that a captured `attend(q, k, v, offsets)` of 300 rows gives the results of new
    lengths when it is replayed."""

    def check(attend):
        q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        segments = offsets([70, 100, 130], "cuda")
        attend(q, k, v, segments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend(q, k, v, segments)
        for lengths in ([70, 100, 130], [0, 300, 0], [299, 0, 1]):
            segments.copy_(offsets(lengths, "cuda"))
            graph.replay()
            assert torch.equal(captured, attend(q, k, v, segments))

    return check


@pytest.fixture
def assert_no_synchronisation():
    """Checks that a step does not synchronise with the device; its first call may, while it
    compiles."""

    def check(step):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return check
