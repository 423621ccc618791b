"""public_models.py on stand-ins: CUDA graphs of models that make tensors on the host."""

import argparse
import contextlib
import gc
import types
import weakref

import public_models
import pytest
import torch


def test_copies_are_found_by_what_they_hold():
    """The first call makes one more, as of what a model keeps."""
    kept = []

    def call():
        if not kept:
            kept.append(torch.tensor([1, 2]).to("meta"))
        return torch.tensor([5, 6, 7]).to("meta"), torch.tensor([5.0, 6.0, 7.0]).to("meta")

    with public_models.HostConstants() as constants:
        calls = [call() for _ in range(3)]
    assert len(constants.copies) == 3
    for own in calls:
        assert [(x.shape, x.dtype) for x in own] == [((3,), torch.int64), ((3,), torch.float32)]
        assert all(x is y for x, y in zip(own, calls[0]))


def test_indices_of_the_host_are_copied_once():
    x, index = torch.empty(4, 8, device="meta"), torch.tensor([3, 0])
    with public_models.HostConstants() as constants:
        results = [x[index], x[index.clone()], x[index.flip(0)]]
    assert len(constants.copies) == 2 and all(y.shape == (2, 8) for y in results)


@pytest.fixture
def graphs(monkeypatch):
    """torch.cuda's names that `replayed` uses: a capture calls as any other call."""
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    graph = types.SimpleNamespace(replay=lambda: None)
    for name, own in dict(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda of: contextlib.nullcontext(),
        CUDAGraph=lambda: graph,
        graph=lambda of: contextlib.nullcontext(),
    ).items():
        monkeypatch.setattr(torch.cuda, name, own)


def test_a_graph_keeps_the_copies_that_it_reads(graphs):
    copies = []

    def call():
        copies.append(weakref.ref(torch.tensor([1, 2]).to("meta")))

    replay = public_models.replayed(call)
    gc.collect()
    assert copies[-1]() is not None
    del replay
    gc.collect()
    assert copies[-1]() is None


def test_a_note_names_the_operator_that_cannot_be_captured(monkeypatch, graphs):
    calls = []

    def call():
        calls.append(torch.ones(3).masked_select(torch.ones(3) > 0))
        if len(calls) > 3:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(public_models.NotCaptured, match=r"aten\.masked_select.* waits for the dev"):
        public_models.replayed(call)

    def measured(public, fused, mode, calls, device):
        if mode == public_models.GRAPHS:
            raise public_models.NotCaptured("no CUDA graph")
        return 4.0, 2.0

    report = types.SimpleNamespace(gain=1.5, runs_model=True)
    fused = types.SimpleNamespace(report=report)
    monkeypatch.setattr(public_models, "built", lambda *given: (None, "owner abc"))
    monkeypatch.setattr(public_models, "fused_for", lambda *given: fused)
    monkeypatch.setattr(public_models, "measured", measured)
    options = argparse.Namespace(
        folder=None, device=torch.device("cpu"), report=False, calls=1, mode=["graphs", "eager"]
    )
    cells = public_models.timed_cells("A", options)
    assert cells[2:] == ["1.50", "–", "–", "1.50", "2.00", "4 → 2", "the model runs; no CUDA graph"]
