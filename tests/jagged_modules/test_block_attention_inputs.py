"""Bad input of F.block_diagonal_attention: the error names the argument, the value and what was
expected."""

import pytest
import torch
from marks import raising

import jagged_modules as jm
from jagged_modules import functional as F

from .block_attention_cases import make_qkv

COS, SIN = (torch.randn(5, 4) for _ in range(2))
TABLES, NARROW = jm.Rotary(COS, SIN), jm.Rotary(COS[:, :3], SIN[:, :3])
ODD = dict(zip("qkv", make_qkv(6, dim=7)))
GOOD = dict(zip("qkv", make_qkv(6))) | dict(offsets=torch.tensor([0, 2, 6]))


def positions(*values):
    return dict(rotary=jm.Rotary(COS, SIN, positions=torch.tensor(values)))


BAD_CALLS = [
    *raising(
        TypeError,
        {
            "q must be a torch.Tensor, got NoneType": dict(q=None),
            "k must be float64, .* on cpu, got torch.int64": dict(
                k=torch.ones(6, 2, 8, dtype=torch.int64)
            ),
            "offsets must be a torch.Tensor, got NoneType": dict(offsets=None),
            "offsets must be a torch.Tensor, got str": dict(offsets="shared"),
            "offsets must be int32 or int64, got torch.float32": dict(
                offsets=torch.tensor([0.0, 6.0])
            ),
            "block_size must be an int, got float": dict(block_size=16.0),
            "scale must be a number, got Tensor": dict(scale=torch.tensor(0.5)),
            "schedule must be a TileSchedule, got int": dict(schedule=3),
            "rotary must be a Rotary, got str": dict(rotary="qk"),
        },
    ),
    *raising(
        ValueError,
        {
            r"v must have shape \[L, H, D\], got \[6, 16\]": dict(v=torch.ones(6, 16)),
            "k must have q's dtype, torch.float32, got torch.float64": dict(
                k=torch.ones(6, 2, 8, dtype=torch.float64)
            ),
            "v must be on q's device, cpu, got meta": dict(v=torch.ones(6, 2, 8, device="meta")),
            "k must have q's head dim, 8, got 4": dict(k=torch.ones(6, 2, 4)),
            r"v must have k's rows and heads, \[6, 2\], got \[5, 2\]": dict(v=torch.ones(5, 2, 8)),
            r"k and v must be \[L, Hkv, D\] of q \[6, 2, 8\], got \[5, 2, 8\]": dict(
                k=torch.ones(5, 2, 8), v=torch.ones(5, 2, 8)
            ),
            "q's heads must be a multiple of k's, got 3 and 2": dict(q=torch.ones(6, 3, 8)),
            "q's head dim must be 1 to 256, got 257": dict(zip("qkv", make_qkv(6, dim=257))),
            "q's head dim must be 1 to 256, got 0": dict(zip("qkv", make_qkv(6, dim=0))),
            r"offsets must have shape \[B \+ 1\], got \[0\]": dict(
                offsets=torch.zeros(0, dtype=torch.int64)
            ),
            "^offsets must end at the number of rows, 6, got 5": dict(
                offsets=torch.tensor([0, 2, 5])
            ),
            "^offsets must start at 0, got 1": dict(offsets=torch.tensor([1, 6])),
            "^offsets must not decrease, got 4 then 2 at segment 1": dict(
                offsets=torch.tensor([0, 4, 2, 6])
            ),
            "^offsets must be on q's device, cpu, or the host, got meta": dict(
                offsets=torch.tensor([0, 6], device="meta")
            ),
            r"block_size must be one of \(16, 32, 64, 128\), got 48": dict(block_size=48),
            "block_size must be at least 1, got 0": dict(block_size=0),
            "implementation must be one of .*, got 'cuda'": dict(implementation="cuda"),
            r"must have shape \[P, D / 2\] with D = 8 even, got \[5, 3\]": dict(rotary=NARROW),
            r"must have shape \[P, D / 2\] with D = 7 even, got \[5, 3\]": ODD
            | dict(rotary=NARROW),
            "rotary's cos and sin must not require gradients": dict(
                rotary=jm.Rotary(COS, SIN.clone().requires_grad_())
            ),
            "rotary's positions must have one entry per row, 6, got 3": positions(0, 1, 2),
            "rotary's positions must be 0 to 4, the rows of cos, got values 0 to 5": positions(
                0, 1, 2, 3, 4, 5
            ),
            "rotary's positions must be 0 to 4, the rows of cos, got values -1 to 4": positions(
                0, 1, 2, 3, 4, -1
            ),
        },
    ),
    (
        dict(v=torch.ones(6, 2, 4)),
        ValueError,
        r"k and v must be \[L, Hkv, D\] of q \[6, 2, 8\], got \[6, 2, 8\] and \[6, 2, 4\]",
    ),
    (
        dict(rotary=TABLES, offsets=torch.tensor([0, 6])),
        ValueError,
        "offsets must have segments of at most rotary.s max_seqlen = 5 rows, got 6",
    ),
]


@pytest.mark.parametrize(
    "change, error, message", BAD_CALLS, ids=[message[:40] for _, _, message in BAD_CALLS]
)
def test_bad_input_of_the_function(change, error, message):
    with pytest.raises(error, match=message):
        F.block_diagonal_attention(**(GOOD | change))


def test_given_positions_let_a_segment_be_longer_than_the_tables():
    rotary = jm.Rotary(COS, SIN, positions=torch.tensor([0, 1, 2, 3, 4, 0]))
    assert F.block_diagonal_attention(
        **(GOOD | dict(offsets=torch.tensor([0, 6]), rotary=rotary))
    ).shape == (6, 2, 8)


@pytest.mark.parametrize(
    "qkv, error, message",
    [
        (None, TypeError, "qkv must be a torch.Tensor, got NoneType"),
        (torch.ones(5, 2, 8), ValueError, r"qkv must have shape \[L, 3, H, D\], got \[5, 2, 8\]"),
        (
            torch.ones(5, 2, 1, 8),
            ValueError,
            r"qkv must have shape \[L, 3, H, D\], got \[5, 2, 1, 8\]",
        ),
    ],
    ids=["none", "dimensions", "two"],
)
def test_bad_packed_input(qkv, error, message, offsets_of):
    with pytest.raises(error, match=message):
        F.block_diagonal_attention_packed(qkv, offsets_of([5]))
