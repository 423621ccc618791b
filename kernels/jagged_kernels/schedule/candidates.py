"""Candidates grouped by user on the device, in one launch: a stable sort by counting.

A candidate's place is the number of candidates that come before it: those of lower users, and
earlier ones of its own user. A user's offset is the number of candidates of lower users. Each
program counts for a block of candidates or of users by comparing with all candidates, which for a
batch's numbers takes less time than the launches of a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.device import cdiv
from ..common.ops import on_the_tensors_device
from ..common.ptxas import safe_ptxas

BLOCK, CHUNK = 64, 256  # candidates of a program, and those that it compares with at a time


@triton.jit
def _users(map_ptr, candidates, num_candidates, num_users):
    """The users of a vector of candidates; num_users for a candidate of no user, and 2^31 - 1
    behind the last candidate."""
    users = tl.load(map_ptr + candidates, mask=candidates < num_candidates, other=0)
    users = tl.where((users < 0) | (users >= num_users), num_users, users).to(tl.int32)
    return tl.where(candidates < num_candidates, users, 2147483647)


@safe_ptxas
@triton.jit(do_not_specialize=["num_candidates", "num_users", "num_blocks"])
def group_candidates_kernel(
    map_ptr, offsets_ptr, order_ptr, inverse_ptr, num_candidates, num_users, num_blocks,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The first num_blocks programs place candidates, the others write users' offsets."""
    places = tl.program_id(0) < num_blocks
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of_users = index - num_blocks * BLOCK
    user = tl.where(places, _users(map_ptr, index, num_candidates, num_users), of_users)
    position = tl.where(places, index, 0)  # no candidate is before the first: lower users alone
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_candidates, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other = _users(map_ptr, others, num_candidates, num_users)
        earlier = (other[None, :] == user[:, None]) & (others[None, :] < position[:, None])
        before += tl.sum(((other[None, :] < user[:, None]) | earlier).to(tl.int32), 1)
    real = places & (index < num_candidates)
    tl.store(order_ptr + before, index.to(tl.int64), mask=real)
    tl.store(inverse_ptr + index, before.to(tl.int64), mask=real)
    is_user = (tl.program_id(0) >= num_blocks) & (of_users <= num_users)
    tl.store(offsets_ptr + of_users, before, mask=is_user)


def group_candidates(candidate_to_user: Tensor, num_users: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets `[num_users + 1]`, order and inverse `[num_candidates]` of a contiguous map with at
    least one candidate. Those whose user is out of range come last, behind the last user.

    Returns:
        int64 tensors.
    """
    num_candidates = candidate_to_user.shape[0]
    sizes = num_users + 1, num_candidates, num_candidates
    outputs = candidate_to_user.new_empty(sum(sizes), dtype=torch.int64).split_with_sizes(sizes)
    num_blocks = cdiv(num_candidates, BLOCK)
    numbers = num_candidates, num_users, num_blocks
    group_candidates_kernel[(num_blocks + cdiv(num_users + 1, BLOCK),)](
        candidate_to_user, *outputs, *numbers, BLOCK=BLOCK, CHUNK=CHUNK
    )
    return outputs


# On the device of the map.
group_candidates_on_device = on_the_tensors_device(group_candidates)
