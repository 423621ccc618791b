"""CandidateIndex: all ways to build it give the same index."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from marks import raising

import jagged_modules as jm


def assert_same_index(a: jm.CandidateIndex, b: jm.CandidateIndex) -> None:
    assert torch.equal(a.offsets, b.offsets)
    assert torch.equal(a.candidate_to_user, b.candidate_to_user)


@given(counts=st.lists(st.integers(0, 5), max_size=8), data=st.data())
def test_a_map_in_any_order(counts, data):
    users = [user for user, count in enumerate(counts) for _ in range(count)]
    candidate_to_user = torch.tensor(
        data.draw(st.permutations(users)),
        dtype=data.draw(st.sampled_from([torch.int32, torch.int64])),
    )
    index = jm.CandidateIndex.from_map(candidate_to_user, len(counts))
    assert index.num_users == len(counts)
    assert index.offsets.diff().tolist() == counts
    assert index.host_counts.tolist() == counts
    assert torch.equal(index.candidate_to_user, candidate_to_user.long())
    assert index.is_sorted == (candidate_to_user.tolist() == users)
    if not index.is_sorted:
        assert candidate_to_user[index.order].tolist() == users
        assert torch.equal(index.order[index.inverse], torch.arange(len(users)))
        grouped = [index.order[start:end] for start, end in zip(index.offsets, index.offsets[1:])]
        assert all((candidates.diff() > 0).all() for candidates in grouped), (
            "a user's candidates keep their order"
        )


def test_an_index_or_a_map():
    index = jm.CandidateIndex.from_map(torch.tensor([2, 0, 2]), 3)
    assert jm.CandidateIndex.wrap(index, 5) is index
    assert_same_index(jm.CandidateIndex.wrap(torch.tensor([2, 0, 2]), 3), index)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_offsets_map_and_container_agree(dtype):
    expected = jm.CandidateIndex.from_map(torch.tensor([0, 0, 0, 2, 2], dtype=dtype), 3)
    counts, offsets = torch.tensor([3, 0, 2], dtype=dtype), torch.tensor([0, 3, 3, 5], dtype=dtype)
    assert expected.is_sorted
    assert_same_index(jm.CandidateIndex.from_counts(counts), expected)
    assert_same_index(jm.CandidateIndex.from_offsets(offsets), expected)
    assert_same_index(jm.CandidateIndex.from_jagged((torch.randn(5, 4), offsets)), expected)
    assert_same_index(
        jm.CandidateIndex.from_jagged(jm.Jagged(torch.randn(5, 4), offsets)), expected
    )


def test_from_torchrec_containers_with_lengths_only():
    torchrec = pytest.importorskip("torchrec")
    expected = jm.CandidateIndex.from_counts(torch.tensor([3, 0, 2, 1]))
    jagged = torchrec.JaggedTensor(torch.arange(6), lengths=torch.tensor([3, 0, 2, 1]))
    assert_same_index(jm.CandidateIndex.from_jagged(jagged), expected)
    keyed = torchrec.KeyedJaggedTensor(["a"], torch.arange(6), lengths=torch.tensor([3, 0, 2, 1]))
    assert_same_index(jm.CandidateIndex.from_jagged(keyed), expected)


def test_several_keys_are_refused():
    torchrec = pytest.importorskip("torchrec")
    keyed = torchrec.KeyedJaggedTensor(
        ["a", "b"], torch.arange(6), lengths=torch.tensor([3, 0, 2, 1])
    )
    with pytest.raises(
        ValueError, match=r"x must have one key, the candidates, got \['a', 'b'\]; pass x\[key\]"
    ):
        jm.CandidateIndex.from_jagged(keyed)
    assert jm.CandidateIndex.from_jagged(keyed["b"]).offsets.tolist() == [0, 2, 3]


def test_no_candidates_and_no_users():
    for index in (
        jm.CandidateIndex.from_map(torch.zeros(0, dtype=torch.int64), 3),
        jm.CandidateIndex.from_counts(torch.tensor([0, 0, 0])),
    ):
        assert index.offsets.tolist() == [0, 0, 0, 0] and index.candidate_to_user.numel() == 0
    assert jm.CandidateIndex.from_counts(torch.zeros(0, dtype=torch.int64)).num_users == 0


def test_query_rows_of_a_user():
    index = jm.CandidateIndex.from_counts(torch.tensor([3, 0, 2]))
    assert index.query_offsets(4).tolist() == [0, 12, 12, 20]
    assert index.query_offsets(4) is index.query_offsets(4), "computed once for all layers"
    assert index.query_segments(4).host_lengths.tolist() == [12, 0, 8]
    strided = torch.tensor([[0, 7], [3, 7], [3, 7], [5, 7]])[:, 0]
    index = jm.CandidateIndex.from_offsets(strided)
    first, again = (jm.CandidateIndex.parse(index, torch.randn(5, 1), 3, 1)[1] for _ in range(2))
    segments = [first, index.query_segments(1), again]
    assert segments[0].offsets.is_contiguous()
    assert all(x.offsets is segments[0].offsets for x in segments), "copied once"
    segments = jm.Jagged(torch.randn(5, 2), strided).query_segments(1)
    assert segments.offsets.is_contiguous() and segments.host_lengths.tolist() == [3, 0, 2]
    assert index.query_offsets(3).tolist() == [0, 9, 9, 15], (
        "another layer may have another number of rows"
    )


def test_layers_with_other_numbers_of_query_rows_share_an_index():
    layer, history = jm.JaggedTargetAttention(8, 2), (torch.randn(6, 8), torch.tensor([0, 2, 2, 6]))
    index, targets = jm.CandidateIndex.from_map(torch.tensor([2, 0, 2, 1]), 3), torch.randn(4, 3, 8)
    for rows in (2, 3):
        expected = layer(targets[:, :rows], history, torch.tensor([2, 0, 2, 1]))
        assert torch.equal(layer(targets[:, :rows], history, index), expected)


@given(counts=st.lists(st.integers(0, 5), max_size=8), data=st.data())
def test_users_where_the_number_of_candidates_is_known(counts, data):
    """Candidates are in any order, and some users have none."""
    candidate_to_user = torch.tensor(
        data.draw(
            st.permutations([user for user, count in enumerate(counts) for _ in range(count)])
        )
    )
    candidate_to_user = candidate_to_user.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    index = jm.CandidateIndex.from_map(candidate_to_user, len(counts))
    assert torch.equal(index.users(len(candidate_to_user)), candidate_to_user.long())
    grouped = jm.CandidateIndex.from_counts(torch.tensor(counts, dtype=torch.int64))
    assert torch.equal(
        grouped.users(len(candidate_to_user)), candidate_to_user.sort().values.long()
    )


def test_users_are_computed_once_and_on_the_device_of_the_index():
    index = jm.CandidateIndex.from_map(torch.tensor([2, 0, 2]), 3)
    assert index.users(3) is index.users(3)
    assert index.to("meta").users(3).device.type == "meta"
    assert torch.equal(pickle.loads(pickle.dumps(index)).users(3), torch.tensor([2, 0, 2]))


def test_users_of_another_number_of_candidates_are_not_those_computed_before():
    index = jm.CandidateIndex.from_counts(torch.tensor([1, 2]))
    assert index.users(3).tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match="candidates describe 3 candidates, num_candidates is 2"):
        index.users(2)
    unknown = jm.CandidateIndex.from_offsets(torch.empty(3, dtype=torch.int64, device="meta"))
    assert [unknown.users(n).shape[0] for n in (3, 2)] == [3, 2]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_moved_index_groups_the_same_candidates(device):
    """The order is a cycle of three, so that its inverse is another permutation."""
    index = jm.CandidateIndex.from_map(torch.tensor([1, 2, 0]), 3)
    # `to` returns self where it has nothing to move
    moved = index._map(torch.clone) if device == "cpu" else index.to(device)
    assert moved.users(3).tolist() == [1, 2, 0] and moved.candidate_to_user.tolist() == [1, 2, 0]
    x = torch.arange(3, device=device)
    assert torch.equal(moved.ungrouped(x.index_select(0, moved.order)), x)
    assert moved.offsets.device.type == device and moved.host_counts.tolist() == [1, 1, 1]


def test_users_under_compile():
    torch._dynamo.reset()
    graph = torch.compile(
        lambda index, count: index.users(count), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for candidate_to_user in ([2, 0, 2], [0, 0, 3, 3, 3], [1]):
        candidate_to_user = torch.tensor(candidate_to_user)
        index = jm.CandidateIndex.from_map(candidate_to_user, 4)
        made = graph(index, len(candidate_to_user))
        assert torch.equal(made, candidate_to_user)
        assert index.users(len(candidate_to_user)) is not made, "nothing made in a graph is kept"


def test_copies_keep_the_segmentation_id():
    index = jm.CandidateIndex.from_map(torch.tensor([1, 0, 1]), 2)
    assert pickle.loads(pickle.dumps(index)).segmentation_id != index.segmentation_id, (
        "nobody had asked for the id when it was pickled"
    )
    assert pickle.loads(pickle.dumps(index)).segmentation_id == index.segmentation_id
    assert index.to("meta").segmentation_id == index.segmentation_id
    assert index.to("meta").host_counts.tolist() == [1, 2]
    assert (
        jm.CandidateIndex.from_map(torch.tensor([1, 0, 1]), 2).segmentation_id
        != index.segmentation_id
    )


BAD = [
    *raising(
        TypeError,
        {
            "candidate_to_user must be a torch.Tensor, got list": lambda: (
                jm.CandidateIndex.from_map([0, 1], 2)
            ),
            "candidate_to_user must be int32 or int64, got torch.float32": lambda: (
                jm.CandidateIndex.from_map(torch.tensor([0.0]), 2)
            ),
            "num_users must be an int, got float": lambda: jm.CandidateIndex.from_map(
                torch.tensor([0]), 2.0
            ),
            "candidates_per_user must be int32 or int64, got torch.bool": lambda: (
                jm.CandidateIndex.from_counts(torch.tensor([True]))
            ),
            "x must be a JaggedTensor.*got Tensor": lambda: jm.CandidateIndex.from_jagged(
                torch.tensor([0])
            ),
        },
    ),
    *raising(
        ValueError,
        {
            r"candidate_to_user must be 1-D, got shape \[1, 1\]": lambda: (
                jm.CandidateIndex.from_map(torch.tensor([[0]]), 2)
            ),
            "candidate_to_user must be 0 to .*= 1, got.* 2": lambda: jm.CandidateIndex.from_map(
                torch.tensor([0, 2]), 2
            ),
            "candidate_to_user must be 0 to .*= 1, got.*-1": lambda: jm.CandidateIndex.from_map(
                torch.tensor([-1, 0]), 2
            ),
            "num_users must be at least 0, got -1": lambda: jm.CandidateIndex.from_map(
                torch.tensor([0]), -1
            ),
            "candidates_per_user must not be negative, got -2": lambda: (
                jm.CandidateIndex.from_counts(torch.tensor([1, -2]))
            ),
            "candidate_offsets must start at 0, got 1": lambda: jm.CandidateIndex.from_offsets(
                torch.tensor([1, 2])
            ),
            "candidate_offsets must not decrease, got 2 then 1": lambda: (
                jm.CandidateIndex.from_offsets(torch.tensor([0, 2, 1]))
            ),
            r"candidate_offsets must be 1-D, got shape \[\]": lambda: (
                jm.CandidateIndex.from_offsets(torch.tensor(0))
            ),
            "describe 5 candidates, num_candidates is 7": lambda: jm.CandidateIndex.from_offsets(
                torch.tensor([0, 2, 5])
            ).users(7),
            "describe 2 candidates, num_candidates is 3": lambda: jm.CandidateIndex.from_map(
                torch.tensor([1, 0]), 2
            ).users(3),
        },
    ),
]


@pytest.mark.parametrize("build, error, message", BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_input(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_a_write_to_the_offsets_is_noticed():
    buffer = torch.tensor([0, 1, 3])
    index = jm.CandidateIndex.from_offsets(buffer)
    assert index.users(3).tolist() == [0, 1, 1] and index.query_offsets(2).tolist() == [0, 2, 6]
    buffer[1] = 2
    assert index.users(3).tolist() == [0, 0, 1] and index.query_offsets(2).tolist() == [0, 4, 6]
    assert index.host_counts.tolist() == [2, 1]
