"""The backward that writes the gradients of a projection as one tensor, in Triton's interpreter."""

import pytest
import torch

SELF = [3, 0, 1, 70, 40]


@pytest.mark.parametrize("kv_lengths", [None, [5, 2, 0, 33, 64]], ids=["self", "cross"])
@pytest.mark.parametrize(
    "activation, mask, dtype",
    [("softmax", None, torch.float32), ("gelu_tanh", "causal", torch.float16)],
)
def test_gradients_are_those_in_tensors_of_their_own(
    check_packed_gradients, activation, mask, dtype, kv_lengths
):
    check_packed_gradients(SELF, kv_lengths, dtype, "cpu", activation=activation, mask=mask)


@pytest.mark.parametrize("kv_lengths", [None, [5, 2, 0, 33, 9]], ids=["self", "cross"])
def test_short_segments(check_packed_gradients, packed_launches, kv_lengths):
    lengths = [3, 0, 1, 30, 12]
    check_packed_gradients(lengths, kv_lengths, torch.float16, "cpu", (2, 1), 16)
    assert packed_launches == dict(forward=1, backward=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_shared_queries(check_packed_gradients, dtype):
    check_packed_gradients(SELF, SELF, dtype, "cpu", shared=3)


@pytest.mark.parametrize("lengths", [[0], [0, 0]], ids=str)
def test_no_rows(check_packed_gradients, lengths):
    check_packed_gradients(lengths, None, torch.float32, "cpu")
    check_packed_gradients(lengths, [4, 3][: len(lengths)], torch.float32, "cpu")


@pytest.mark.parametrize("kv_lengths", [None, [5, 2, 0, 33, 64]], ids=["self", "cross"])
@pytest.mark.parametrize("apart", [False, True])
def test_rows_behind_the_end(check_packed_gradients, kv_lengths, apart):
    options = dict(behind=7, apart=apart)
    check_packed_gradients(SELF, kv_lengths, torch.float32, "cpu", **options)
