"""Helpers of tests of jagged operators: dtypes, segments as lists and back, checks against a
definition in plain torch."""

import accuracy
import torch

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def split(x, offsets):
    return x.split(offsets.diff().tolist())


def joined(parts, like):
    """The parts concatenated along their rows. `like` has no rows; without parts, it keeps the
    gradient."""
    return torch.cat([like, *parts])


def check_definition(operator, definition, tensors):
    """Check an operator against its definition in plain torch."""
    accuracy.check(operator, lambda *x: accuracy.definition(definition, tensors, x[-1]), tensors)
