"""Functions that fused graphs call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..validation import check_integers, values_are_checkable


def checked_map(candidate_to_user: Tensor, users: Mapping[str, Tensor], candidates: Mapping[str, Tensor]) -> Tensor:
    """candidate_to_user itself, if it and the inputs' numbers of rows match. torch.compile and torch.export do not trace the checks.

    Raises:
        TypeError: candidate_to_user is no integer tensor.
        ValueError: it has not one entry per candidate; `users` or `candidates` differ in their rows; a host map is out of range.
    """
    if torch.compiler.is_compiling():
        return candidate_to_user
    check_integers("candidate_to_user", candidate_to_user)
    owner, num_users = next((name, x.shape[0]) for name, x in users.items())
    for name, x in users.items():
        if x.shape[0] != num_users:
            raise ValueError(f"{name} must have one row per user, {num_users} as {owner}, got {x.shape[0]}")
    for name, x in candidates.items():
        if x.shape[0] != candidate_to_user.shape[0]:
            raise ValueError(f"{name} must have one row per candidate, {candidate_to_user.shape[0]} as candidate_to_user, got {x.shape[0]}")
    if values_are_checkable(candidate_to_user) and candidate_to_user.numel():
        low, high = int(candidate_to_user.min()), int(candidate_to_user.max())
        if low < 0 or high >= num_users:
            raise ValueError(f"candidate_to_user must be 0 to {num_users - 1}, the rows of {owner}, got values {low} to {high}")
    return candidate_to_user
