"""The stages of a step, from the profiler's events."""

import time
from types import SimpleNamespace

import pytest
import step_profile
import torch
from torch.autograd import DeviceType


def test_stages_are_found_from_the_operators_around():
    def operator(*names):
        event = None
        for name in names:
            event = SimpleNamespace(name=name, cpu_parent=event)
        return step_profile.stage_of(event)

    assert operator("autograd::engine", "EmbeddingBackward0", "aten::add") == "embeddings"
    assert operator("embeddings", "aten::index_select") == "embeddings"
    assert operator("jagged_kernels::attention", "aten::empty") == "our kernels"
    assert operator("Optimizer.step#Adam.step", "aten::mul") == "optimizer"
    assert operator("aten::linear", "aten::addmm") == "dense"
    assert (
        operator("## start_sparse_data_dist 3 ##", "fbgemm::permute_2D_sparse_data") == "embeddings"
    )
    assert operator("autograd::engine", "All2All_Pooled_ReqBackward", "aten::copy_") == "embeddings"
    assert operator("DistributedDataParallel.forward", "aten::mul") == "dense"


def test_time_is_split_by_what_runs_at_once():
    spans = [
        step_profile.Span("compute", 0, 10),
        step_profile.Span("collective", 6, 14),
        step_profile.Span("compute", 2, 8),
        step_profile.Span("collective", 20, 21),
    ]
    both = frozenset({"compute", "collective"})
    compute = frozenset({"compute"})
    collective = frozenset({"collective"})
    assert step_profile.time_by_activities(spans) == {compute: 6, both: 4, collective: 4 + 1}
    assert step_profile.time_by_activities([]) == {}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_collectives_are_no_computation(on_gpu):
    def activity(name, device, annotation=False):
        return step_profile.activity_of(
            SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation), on_gpu
        )

    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    assert activity("gloo:all_to_all", cpu, annotation=True) == (None if on_gpu else "collective")
    assert activity("aten::addmm", cpu) == (None if on_gpu else "compute")
    assert activity("All2All_Seq_ReqBackward", cpu) == (None if on_gpu else "wait")
    assert activity("## forward 3 ##", cpu, annotation=True) is None
    if on_gpu:
        assert (
            activity("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", gpu)
            == "collective"
        )
        assert activity("nccl:all_to_all", gpu, annotation=True) is None
        assert activity("sm90_xmma_gemm", gpu) == "compute"


def test_stages_add_up_to_the_time_of_the_steps(monkeypatch):
    """As the program's clock has it, at the begin and the end."""
    clock, times = time.perf_counter, []

    def run():
        for _ in range(4):
            torch.ones(100, 100) @ torch.ones(100, 100)
            time.sleep(0.01)

    monkeypatch.setattr(
        step_profile.time, "perf_counter", lambda: times.append(clock()) or times[-1]
    )
    profiled = step_profile.profile_steps(run, 4, torch.device("cpu"))
    begin, end = times
    assert sum(profiled.stages.values()) == pytest.approx(1e3 * (end - begin) / 4)
    assert profiled.stages["host"] >= 10 and profiled.stages["dense"] > 0
    assert profiled.collectives == profiled.exposed == 0
