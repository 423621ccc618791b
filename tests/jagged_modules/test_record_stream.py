"""`record_stream` of the containers marks every tensor on a device, and no other."""

import pytest
import torch

import jagged_modules as jm


@pytest.fixture
def recorded(monkeypatch):
    """The tensors whose record_stream was called."""
    tensors = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: tensors.append(x), raising=False
    )
    return tensors


def test_jagged_on_a_device(recorded, offsets_of):
    history = jm.Jagged(torch.empty(8, 4, device="meta"), offsets_of([3, 5]).to("meta"))
    history.record_stream(None)
    assert [id(x) for x in recorded] == [id(history.values), id(history.offsets)]


def test_jagged_with_host_offsets(recorded, offsets_of):
    history = jm.Jagged(torch.empty(8, 4), offsets_of([3, 5]))
    on_device = history.with_values(torch.empty(8, 4, device="meta"))
    history.record_stream(None)
    assert not recorded
    on_device.record_stream(None)
    assert all(x.is_meta for x in recorded) and any(x is on_device.values for x in recorded)


def test_candidate_index_on_a_device(recorded):
    index = jm.CandidateIndex.from_map(torch.tensor([1, 0, 1]), num_users=2)
    index.record_stream(None)
    assert not recorded
    moved = index.to("meta")
    users, query_offsets = moved.users(3), moved.query_offsets(2)
    moved.record_stream(None)
    assert [id(x) for x in recorded] == [
        id(x) for x in (moved.offsets, moved.order, moved.inverse, users, query_offsets)
    ]


def test_schedules_on_a_device(recorded):
    schedule = jm.zigzag_schedule([3, 5], [3, 5], num_heads=1, block_m=64, block_n=64)
    schedule.record_stream(None)
    assert not recorded
    moved = schedule.to("meta")
    moved.record_stream(None)
    assert [id(x) for x in recorded] == [id(moved.tiles), id(moved.num_tiles)]
