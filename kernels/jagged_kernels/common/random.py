"""Counter-based random numbers (Salmon et al. 2011): a function of a counter and a key, so nothing
is stored between the forward and the backward."""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)  # with 7 or more, Philox-2x32 passes BigCrush
MULTIPLIER = tl.constexpr(0xD256D193)
KEY_STEP = tl.constexpr(0x9E3779B9)


@triton.jit
def philox(low, high, key):
    """Philox-2x32: two random 32-bit words for each counter (low, high), two uint32 tensors of one
    shape."""
    for _ in tl.static_range(ROUNDS):
        upper = tl.umulhi(low, MULTIPLIER)
        low, high = upper ^ key ^ high, tl.mul(low, MULTIPLIER, sanitize_overflow=False)
        key = tl.add(key, KEY_STEP, sanitize_overflow=False)
    return low, high
