"""What goes with the score gradients that Hopper's backward keeps, in Triton's interpreter."""

import pytest
import torch


@pytest.mark.parametrize("query_block", [64, 128])
@pytest.mark.parametrize("capacity", [0, 3, 40, 10_000])
def test_places_of_score_gradients(check_places, capacity, query_block):
    check_places(capacity, query_block, "cpu")


def test_delta(check_delta):
    check_delta(torch.float16, "cpu")
