"""The Triton kernel that computes delta, in Triton's interpreter."""

import torch


def test_delta(check_delta):
    check_delta(torch.float16, "cpu")
