"""Buckets of a time bias that are stored for a batch: the kernel, and how long they are kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jagged_modules as jm

pytest.importorskip("triton")

from jagged_kernels.attention import stored_buckets
from jagged_kernels.attention.bias import BYTE_ORDER
from jagged_kernels.attention.params import AttentionCall, AttentionParams, Segments
from jagged_kernels.attention.stored_buckets import make_buckets, with_stored_buckets

from jagged_modules.bias import next_timestamps, time_buckets
from jagged_modules.schedule import host_schedule

BOUNDARIES = {
    "log": jm.RelativeBias.log_boundaries(40),
    "none": torch.zeros(0, dtype=torch.int64),
    "duplicates": torch.tensor([0, 3, 3, 3, 100, 2**33]),
    "most": 7 * torch.arange(255),
}


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def call_of(q_lengths, kv_lengths, boundaries, largest=10**6, query_times=False, shift=None):
    """An attention with random timestamps; q, k and v are not read."""
    lengths = torch.tensor(q_lengths), torch.tensor(kv_lengths)
    q = torch.zeros(sum(q_lengths), 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(sum(kv_lengths), 1, 64, dtype=torch.bfloat16)
    times, queries = (torch.randint(-largest, largest, (len(x),)) for x in (k, q))
    params = AttentionParams(
        0.125,
        time_bias=torch.randn(1, len(boundaries) + 1),
        timestamps=times,
        boundaries=boundaries,
        query_timestamps=queries if query_times else None,
        query_shift=None if shift is None else torch.tensor(shift),
    )
    sizes = dict(num_heads=1, num_kv_heads=1, head_dim=64, dtype=q.dtype)
    schedule = host_schedule(*lengths, **sizes)
    segments = Segments(offsets_of(q_lengths), offsets_of(kv_lengths))
    return AttentionCall(q, k, k, segments, params, schedule)


def buckets_of(stored, segment, q_len, kv_len):
    """Of a segment, `[q_len, kv_len]`."""
    number, places = torch.arange(64 * 64), torch.zeros(2, 64 * 64, dtype=torch.int64)
    for bit, place in enumerate(BYTE_ORDER):
        places += (number >> bit & 1) * torch.tensor(place)[:, None]
    of_queries, of_keys = -(-q_len // 64), -(-kv_len // 64)
    first = int(stored.first_blocks[segment])
    blocks = torch.empty(of_queries, of_keys, 64, 64, dtype=torch.uint8)
    given = stored.buckets[first : first + of_queries * of_keys].view(of_queries, of_keys, -1)
    blocks[:, :, places[0], places[1]] = given
    return blocks.transpose(1, 2).reshape(64 * of_queries, -1)[:q_len, :kv_len].long()


def check_buckets(call, q_lengths, kv_lengths):
    params, stored = call.params, make_buckets(call)
    assert len(stored.buckets) == call.schedule.num_blocks
    of_keys = params.timestamps.split(kv_lengths)
    for b, (q_len, kv_len) in enumerate(zip(q_lengths, kv_lengths)):
        if not q_len or not kv_len:
            continue
        shift = 0 if params.query_shift is None else int(params.query_shift[b])
        if params.query_timestamps is None:
            u = next_timestamps(torch.arange(q_len) + kv_len - q_len + shift, of_keys[b])
        else:
            u = params.query_timestamps.split(q_lengths)[b]
        expected = time_buckets(u, of_keys[b], params.boundaries)
        assert torch.equal(buckets_of(stored, b, q_len, kv_len), expected)


@pytest.mark.parametrize(
    "query_times, shift", [(False, None), (True, None), (False, [9, 0, -70, 3])]
)
@pytest.mark.parametrize("boundaries", BOUNDARIES.values(), ids=BOUNDARIES)
def test_buckets(boundaries, query_times, shift):
    lengths = [70, 0, 129, 5], [100, 3, 130, 64]
    largest = 10**4 if len(boundaries) == 255 else 10**12
    check_buckets(call_of(*lengths, boundaries, largest, query_times, shift), *lengths)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=1, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_buckets_of_random_lengths(lengths, seed):
    torch.manual_seed(seed)
    q_lengths, kv_lengths = ([x[i] for x in lengths] for i in (0, 1))
    call = call_of(q_lengths, kv_lengths, BOUNDARIES["log"])
    if call.schedule.num_blocks:
        check_buckets(call, q_lengths, kv_lengths)


def test_blocks_are_those_of_the_first_query_group():
    call = call_of([70, 10, 5, 200], [100, 3], BOUNDARIES["log"])
    assert call.schedule.num_blocks == 2 * 2 + 1
    check_buckets(call, [70, 10], [100, 3])


def kept(call, **fields):
    """The stored buckets of the call with other params."""
    return with_stored_buckets(call._replace(params=call.params._replace(**fields))).params.buckets


def test_buckets_are_kept_until_what_they_follow_from_changes():
    call = call_of([70, 5], [70, 5], BOUNDARIES["log"], query_times=True)
    params = call.params
    first = kept(call)
    others = dict(time_bias=torch.zeros(4, 41), scale=2.0, boundaries=params.boundaries.clone())
    assert kept(call) is kept(call, **others) is first
    for name in ("timestamps", "query_timestamps"):
        before = kept(call)
        getattr(params, name).add_(1000)
        assert kept(call) is not before
        assert torch.equal(kept(call), make_buckets(call).buckets)
    segments = call.segments._replace(q_offsets=call.segments.q_offsets.clone())
    for other in (
        call._replace(segments=segments),
        call._replace(params=params._replace(boundaries=params.boundaries + 1)),
        call._replace(params=params._replace(query_timestamps=None)),
        call._replace(params=params._replace(query_shift=torch.tensor([1, 2]))),
    ):
        before = kept(call)
        assert kept(other) is not before
        assert torch.equal(kept(other), make_buckets(other).buckets)


def test_buckets_live_as_long_as_the_timestamps():
    call = call_of([70, 5], [70, 5], BOUNDARIES["log"])
    count = len(stored_buckets._kept)
    assert kept(call) is not None and len(stored_buckets._kept) == count + 1
    del call
    assert len(stored_buckets._kept) == count


def test_the_oldest_buckets_are_dropped_above_the_limit(monkeypatch):
    calls = [call_of([70, 5], [70, 5], BOUNDARIES["log"]) for _ in range(3)]
    buckets = [kept(call) for call in calls]
    assert all(kept(call) is x for call, x in zip(calls, buckets))
    monkeypatch.setattr(stored_buckets, "LIMIT", 2 * 5 * 64**2)
    calls[0].params.timestamps.add_(1)  # stored again, as the most recent
    latest = kept(calls[0])
    assert latest is not buckets[0]
    assert calls[1].params.timestamps not in stored_buckets._kept
    assert kept(calls[2]) is buckets[2] and kept(calls[0]) is latest


def test_no_buckets_are_stored(monkeypatch):
    """Above the limit of memory, with more boundaries than a byte counts, and of tensors without a
    version."""
    call = call_of([70, 5], [70, 5], BOUNDARIES["log"])
    boundaries = torch.arange(256)
    assert kept(call, boundaries=boundaries, time_bias=torch.zeros(1, 257)) is None
    with torch.inference_mode():
        assert kept(call, timestamps=call.params.timestamps.clone()) is None
        assert not kept(call).is_inference()  # a later backward may save it
    monkeypatch.setattr(stored_buckets, "LIMIT", 5 * 64**2)
    assert kept(call) is not None
    monkeypatch.setattr(stored_buckets, "LIMIT", 5 * 64**2 - 1)
    assert kept(call) is None
