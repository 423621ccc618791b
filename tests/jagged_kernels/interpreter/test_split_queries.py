"""Very many query rows of a segment: dk and dv are sums over chunks of them."""

import pytest
import torch
from marks import SLOW


@pytest.mark.parametrize(
    "lengths, activation, dtype",
    [
        ("some", "softmax", torch.float32),
        ("one", "silu", torch.float16),
        pytest.param("some", "silu", torch.float32, marks=SLOW),
        pytest.param("one", "softmax", torch.float16, marks=SLOW),
    ],
    ids=str,
)
def test_gradients(check_split_queries, lengths, activation, dtype):
    check_split_queries(lengths, dtype, "cpu", activation=activation)
