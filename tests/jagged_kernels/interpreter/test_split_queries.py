"""Very many query rows of a segment: dk and dv are sums over chunks of them."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients(check_split_queries, dtype):
    check_split_queries("some", dtype, "cpu", activation="silu", output_scale=torch.rand(4) + 0.5)
    check_split_queries("one", dtype, "cpu", activation="softmax")
