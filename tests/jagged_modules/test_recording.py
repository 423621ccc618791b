"""Containers while torch.compile or a CUDA graph records. tests/compatibility captures the layers
on a GPU."""

import torch

import jagged_modules as jm
from jagged_modules.containers import candidates, jagged


def test_caches_are_neither_read_nor_written_while_a_graph_records(monkeypatch, offsets_of):
    """The recorded calls are repeated with other lengths in the same tensors."""
    history = jm.Jagged(torch.randn(5, 8), offsets_of([2, 3])).to("meta")
    index = jm.CandidateIndex.from_counts(torch.tensor([1, 2]))

    def derived():
        return (
            history.schedule(num_heads=2, head_dim=4, dtype=torch.float32),
            index.users(3),
            index.query_offsets(2),
        )

    with monkeypatch.context() as recording:
        for module in (candidates, jagged):
            recording.setattr(module, "is_recording", lambda x: True)
        recorded = derived()
    kept = derived()
    with monkeypatch.context() as recording:
        for module in (candidates, jagged):
            recording.setattr(module, "is_recording", lambda x: True)
        again = derived()
    assert recorded[0] is again[0] is None and kept[0] is not None
    for old, x, new in zip(recorded[1:], kept[1:], again[1:]):
        assert torch.equal(old, x) and torch.equal(new, x) and len({id(old), id(x), id(new)}) == 3
    assert all(x is y for x, y in zip(derived(), kept))
