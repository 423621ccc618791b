"""Eager calls run the model itself where the host would take longer to issue the graph."""

import types

import pytest
import torch
from torch import nn

import jagged_modules as jm
from jagged_modules.transforms import dispatch, fuse, fuse_broadcasts
from jagged_modules.transforms.timing import Times

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def eager_gain(monkeypatch):
    """Of eager calls, and of the graph in others."""
    gain = dict(eager=0.5, other=2)

    def times(*given):
        return tuple(Times(gain[x], 1, x) for x in ("other", "eager"))

    monkeypatch.setattr(fuse.Placement, "_calls", lambda *_: types.SimpleNamespace(times=times))
    return gain


class Attention(nn.Module):
    """Of candidates to their user's history."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, history, item):
        keys = history * 2
        return self.attention(item[:, None], keys, keys, need_weights=False)[0].squeeze(1)


class Replicating(Attention):
    def forward(self, history, item, index):
        return super().forward(history[index], item)


def fused_of(device, events, replicating=False):
    torch.manual_seed(0)
    model = (Replicating if replicating else Attention)().eval().to(device)
    history, item = torch.randn(64, events, 32), torch.randn(64, 32)
    if replicating:
        example = history[:4].to(device), item.to(device), torch.arange(64, device=device) // 16
        return model, fuse_broadcasts(model, example)
    inputs = history.to(device), item.to(device)
    batch = (4, 64)
    return model, fuse_broadcasts(model, inputs, request_only=["history"], max_batch=batch)


def counted(model):
    """Calls of the model's own attention."""
    calls = []
    model.attention.register_forward_hook(lambda *_: calls.append(1))
    return calls


@DEVICES
@pytest.mark.parametrize("replicating", [False, True])
def test_eager_calls_of_a_small_model(device, replicating):
    """They run the model. A compiler and an exported program have the graph."""
    model, fused = fused_of(device, 8, replicating)
    report = fused.report
    assert report.eager_calls_run_model and not report.runs_model
    assert report.gain == 2 and "\neager calls run the model itself" in str(report)
    calls = counted(model)
    index = torch.tensor([0, 0, 1, 2, 2, 2], device=device)
    history, item = torch.randn(3, 8, 32, device=device), torch.randn(6, 32, device=device)
    given = dict(history=history, item=item)
    given |= {"index" if replicating else "candidate_to_user": index}
    with torch.no_grad():
        expected = Attention.forward(model, history[index], item)
        calls.clear()
        found = fused(**given)
        assert calls == [1]
        assert torch.equal(found, expected)
        users, larger = torch.randn(4, 8, 32), torch.randn(65, 32)  # than the example
        inputs = users, larger, torch.arange(65) // 17
        fused(**dict(zip(given, (x.to(device) for x in inputs), strict=True)))
        assert calls == [1]
        graph = torch.compile(fused, backend="eager", dynamic=True)(**given)
        program = torch.export.export(fused, (), given).module()(**given)
    assert calls == [1]
    for x in (graph, program):
        torch.testing.assert_close(x, expected, rtol=1e-3, atol=1e-3)


def test_a_large_model_runs_the_graph(eager_gain):
    eager_gain["eager"] = 1.5
    model, fused = fused_of("cpu", 8)
    assert not fused.report.eager_calls_run_model and "eager calls" not in str(fused.report)
    calls = counted(model)
    index = torch.arange(64) // 16
    fused(torch.randn(4, 8, 32), torch.randn(64, 32), candidate_to_user=index)
    assert not calls


@pytest.mark.gpu
def test_cuda_graphs_have_the_graph():
    """Those of `jm.graphed`, and those that a program captures, with their warm-up."""
    model, fused = fused_of("cuda", 8)
    calls = counted(model)
    index = torch.tensor([0, 0, 1, 2, 2, 2], device="cuda")
    inputs = torch.randn(3, 8, 32, device="cuda"), torch.randn(6, 32, device="cuda")
    with torch.no_grad():
        expected = fused(*inputs, candidate_to_user=index)
        assert calls == [1]
        replayed = jm.graphed(fused)(*inputs, candidate_to_user=index)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fused(*inputs, candidate_to_user=index)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            captured = fused(*inputs, candidate_to_user=index)
        graph.replay()
    assert calls == [1]
    for found in (replayed, captured):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "device, stream, eager", [("cpu", 0, True), ("cuda", 0, True), ("cuda", 1, False)]
)
def test_what_an_eager_call_is(monkeypatch, device, stream, eager):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: 0)
    assert dispatch._is_eager(torch.device(device)) == eager
