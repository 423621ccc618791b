"""Dropout on the weights P of attention, in device code: which of them are kept. The definition is
in `jagged_modules/dropout.py`.

A weight has a 16-bit number, and is kept if this is at least `threshold`: p is a multiple of 2^-16.
One call of Philox-2x32 with 7 rounds gives 64 bits, the numbers of four weights: of two query rows,
i and i + 8, and two keys, j and j + 8.

    i, j      the query row and the key, counted from the start of their segment
    counter   (row of the segment's start + (i & ~8), (j & ~8) ^ seed >> 32)
    key       seed ^ query head
    number    half (j >> 3) & 1 of word (i >> 3) & 1

All of this follows from the seed and the pair alone. A thread has the four weights side by side in
an MMA's result, transposed or not, and the compiler merges their four calls into one.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.random import philox

NUMBERS = tl.constexpr(2**16)  # of which `threshold` drop a weight


class Dropout(NamedTuple):
    """What the weights of a head and a segment have in common: Philox's key, the upper word of the
    seed, the row of the segment's start, the threshold, and the factor of weights that are kept."""

    key: tl.tensor
    high: tl.tensor
    start: tl.tensor
    threshold: tl.tensor
    factor: tl.tensor


@triton.jit
def kept_factor(threshold):
    """1 / (1 - p)."""
    return NUMBERS / (NUMBERS - threshold)


@triton.jit
def dropout_of_head(seed_ptr, threshold, head, start):
    """threshold: as a float, because Triton would compile a kernel again for an integer that is a
    multiple of 16."""
    seed = tl.load(seed_ptr)
    return Dropout(
        seed.to(tl.uint32) ^ tl.cast(head, tl.uint32),
        (seed >> 32).to(tl.uint32),
        tl.cast(start, tl.uint32),
        tl.cast(threshold, tl.int32),
        kept_factor(threshold),
    )


@triton.jit
def of_other_head(dropout, head, start):
    """The Dropout of a head and a segment, from that of head 0, without another load."""
    key, start = dropout.key ^ tl.cast(head, tl.uint32), tl.cast(start, tl.uint32)
    return Dropout(key, dropout.high, start, dropout.threshold, dropout.factor)


@triton.jit
def _counters(first, places):
    """first + places without bit 3, modulo 2^32. LLVM removes a bit of equal places by `&` in ways
    that it does not find equal."""
    places = (places - (places & 8)).to(tl.uint32)
    return tl.add(tl.cast(first, tl.uint32), places, sanitize_overflow=False)


@triton.jit
def is_kept(dropout, rows, keys, row=0, column=0):
    """Whether weights are kept, in the shape that rows and keys, i and j above, have together.
    row, column: multiples of 16 from which `rows` and `keys` are counted. A number that a loop
    changes belongs there: among the places, it hides from LLVM which of them share a call."""
    start = tl.add(dropout.start, tl.cast(row, tl.uint32), sanitize_overflow=False)
    low, high = tl.broadcast(_counters(start, rows), _counters(column, keys) ^ dropout.high)
    first, second = philox(low, high, dropout.key)
    words = tl.where((rows & 8) == 0, first, second)
    numbers = tl.where((keys & 8) == 0, words & 0xFFFF, words >> 16)
    return numbers.to(tl.int32) >= dropout.threshold
