"""Which rows of q the backward's kernels of events compute for a block of events."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..attention.mask import Blocks, first_target_column, num_masked_blocks, row_blocks


class Queries(NamedTuple):
    """The rows of q that may see events of a block: how many, first_target of the mask, and these
    rows, as Blocks of one row."""

    count: tl.tensor
    first_target: tl.tensor
    rows: Blocks


@triton.jit
def load_queries(user, users, start, q_len, kv_len, OPTIONS: tl.constexpr):
    """The Queries of a user's block of events from `start` on."""
    MASK: tl.constexpr = OPTIONS.mask
    if MASK is None:
        return Queries(q_len, 0, ())
    else:
        first_target = first_target_column(users.num_targets, user, kv_len, MASK)
        rows = all_masked(row_blocks(start, q_len, kv_len, first_target, MASK, 1, OPTIONS.block))
        return Queries(num_masked_blocks(rows), first_target, rows)


@triton.jit
def all_masked(blocks):
    """The Blocks, none of which counts as full: then `masked_block` finds each of them."""
    return Blocks(
        blocks.first, blocks.count, blocks.second_first, blocks.second_count,
        blocks.third_first, blocks.third_count, 0, 0, 0,
    )  # fmt: skip
