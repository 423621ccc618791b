"""Bad input of F.jagged_attention: the error names the argument, the value and what was
expected."""

import pytest
import torch
from marks import raising

import jagged_modules as jm
from jagged_modules import functional as F

from .attention_cases import make_qkv

GOOD = dict(zip("qkv", make_qkv(6, 6))) | dict(q_offsets=torch.tensor([0, 2, 6]))
SMALL_TILES = jm.zigzag_schedule([2, 4], [2, 4], num_heads=2, block_m=8, block_n=16)
SCHEDULE = jm.zigzag_schedule([2, 4], [2, 4], num_heads=4, block_m=16, block_n=16)
GROUPS = dict(q_offsets=torch.tensor([0, 2, 6, 6]), kv_offsets=torch.tensor([0, 6]))
NO_KEYS = dict(k=torch.ones(0, 2, 8), v=torch.ones(0, 2, 8), kv_offsets=torch.tensor([0]))
SILU = dict(activation="silu")
TARGETS = jm.AttentionMask(causal=True, num_targets=torch.tensor([3, 4]))
BAD = [
    *raising(
        TypeError,
        {
            "q must be a torch.Tensor, got NoneType": dict(q=None),
            "v must be a torch.Tensor, got list": dict(v=[1.0]),
            "k must be float64, .* on cpu, got torch.int64": dict(
                k=torch.ones(6, 2, 8, dtype=torch.int64)
            ),
            "q_offsets must be a torch.Tensor, got NoneType": dict(q_offsets=None),
            "q_offsets must be a torch.Tensor, got list": dict(q_offsets=[0, 2, 6]),
            "q_offsets must be int32 or int64, got torch.float32": dict(
                q_offsets=torch.tensor([0.0, 6.0])
            ),
            "max_seqlen_q must be an int, got str": dict(max_seqlen_q="4"),
            "scale must be a number, got Tensor": dict(scale=torch.tensor(0.5)),
            "scale must be a number, got bool": dict(scale=True),
            r"output_scale must be a number or a tensor \[B\], got bool": SILU
            | dict(output_scale=True),
            "scale must be a number, got str": dict(scale="big"),
            r"output_scale must be a number or a tensor \[B\], got str": SILU
            | dict(output_scale="1"),
            "output_scale must be float64, .*, got torch.int64": SILU
            | dict(output_scale=torch.tensor([1, 2])),
            "mask must be an AttentionMask or a function, got Tensor": dict(mask=torch.ones(6, 6)),
            "schedule must be a TileSchedule, got int": dict(schedule=3),
        },
    ),
    *raising(
        ValueError,
        {
            r"q must have shape \[Lq, H, D\], got \[6, 16\]": dict(q=torch.ones(6, 16)),
            r"k must have shape \[Lk, Hkv, D\], got \[6, 2, 8, 1\]": dict(k=torch.ones(6, 2, 8, 1)),
            "k must have q's dtype, torch.float32, got torch.float64": dict(
                k=torch.ones(6, 2, 8, dtype=torch.float64)
            ),
            "v must be on q's device, cpu, got meta": dict(v=torch.ones(6, 2, 8, device="meta")),
            r"v must have k's rows and heads, \[6, 2\], got \[5, 2\]": dict(v=torch.ones(5, 2, 8)),
            "k must have q's rows, 6, because they have the same offsets, got 5": dict(
                k=torch.ones(5, 2, 8), v=torch.ones(5, 2, 8)
            ),
            "k must have q's rows, 6, because they have the same offsets, got 7": dict(
                k=torch.ones(7, 2, 8), v=torch.ones(7, 2, 8)
            ),
            r"v must have k's rows and heads, \[6, 2\], got \[6, 1\]": dict(v=torch.ones(6, 1, 8)),
            "k must have q's head dim, 8, got 4": dict(k=torch.ones(6, 2, 4)),
            "q's heads must be a multiple of k's, got 3 and 2": dict(q=torch.ones(6, 3, 8)),
            "q's heads must be a multiple of k's, got 0 and 2": dict(q=torch.ones(6, 0, 8)),
            "v's head dim must be 1 to 256, got 257": dict(v=torch.ones(6, 2, 257)),
            "v's head dim must be 1 to 256, got 0": dict(v=torch.ones(6, 2, 0)),
            "q_offsets must be on q's device, cpu, or the host, got meta": dict(
                q_offsets=torch.tensor([0, 2, 6], device="meta")
            ),
            "q_offsets must end at the number of rows, 6, got 5": dict(
                q_offsets=torch.tensor([0, 2, 5])
            ),
            "q_offsets must not decrease, got 4 then 2 at segment 1": dict(
                q_offsets=torch.tensor([0, 4, 2, 6])
            ),
            "q_offsets must start at 0, got 1": dict(q_offsets=torch.tensor([1, 6])),
            'q_offsets must be a tensor or "shared", got "all"': dict(q_offsets="all"),
            'q_offsets and kv_offsets cannot both be "shared"': dict(q_offsets="shared"),
            "q_offsets must describe as many segments as kv_offsets, .*, got 2 and 3": dict(
                kv_offsets=torch.tensor([0, 2, 4, 6])
            ),
            "q_offsets must describe .* or a multiple of them, got 3 and 2": GROUPS
            | dict(kv_offsets=torch.tensor([0, 2, 6])),
            "mask.num_targets must be None with several query groups, got 3 groups": GROUPS
            | dict(mask=jm.AttentionMask(num_targets=torch.tensor([1]))),
            r"output_scale must have shape \[B\] = \[3\], got \[1\]": GROUPS
            | SILU
            | dict(output_scale=torch.ones(1)),
            "kv_offsets must end at the number of rows, 6, got 7": dict(
                kv_offsets=torch.tensor([0, 3, 7])
            ),
            "q_offsets must have segments of at most max_seqlen_q = 3 rows, got 4": dict(
                max_seqlen_q=3
            ),
            "kv_offsets must have segments of at most max_seqlen_kv = 3 rows, got 4": dict(
                max_seqlen_kv=3
            ),
            "activation must be one of .*softmax.*, got 'relux'": dict(activation="relux"),
            "activation must be one of .*softmax.*, got None": dict(activation=None),
            r"output_scale must have shape \[B\] = \[2\], got \[3\]": SILU
            | dict(output_scale=torch.ones(3)),
            r"output_scale must have shape \[B\] = \[2\], got \[\]": SILU
            | dict(output_scale=torch.tensor(0.5)),
            "output_scale must be on q's device, cpu, or the host, got meta": SILU
            | dict(output_scale=torch.ones(2, device="meta")),
            "output_scale must be 1 with softmax, got 0.5": dict(output_scale=0.5),
            "output_scale must be 1 with softmax, got tensor": dict(output_scale=torch.ones(2)),
            "mask must be None where keys are shared by all segments": dict(
                mask=TARGETS, kv_offsets="shared"
            ),
            r"mask.num_targets must have shape \[B\] = \[2\], got \[1\]": dict(
                mask=jm.AttentionMask(num_targets=torch.tensor([1]))
            ),
            "mask.num_targets must be on q's device": dict(
                mask=jm.AttentionMask(num_targets=torch.tensor([1, 2], device="meta"))
            ),
            "implementation must be one of .*, got 'cuda'": dict(implementation="cuda"),
            "schedule was built for 4 heads, q has 2": dict(schedule=SCHEDULE),
        },
    ),
    (
        GROUPS | NO_KEYS,
        ValueError,
        (
            "q_offsets must describe as many segments as kv_offsets, or a multiple of them, got 3"
            " and 0"
        ),
    ),
    (
        dict(mask=TARGETS),
        ValueError,
        "mask.num_targets must be at most the segment's length, got 3 of 2 at segment 0",
    ),
    (
        dict(schedule=SMALL_TILES),
        ValueError,
        r"schedule must have a block_m of \(16, 32, 64, 128, 192\), the kernels' tiles, got 8",
    ),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        F.jagged_attention(**(GOOD | change))


def test_triton_on_the_host_says_what_to_ask_for():
    pytest.importorskip("triton")
    with pytest.raises(
        ValueError,
        match="^implementation='triton' needs CUDA tensors, got cpu tensors; 'auto' takes both",
    ):
        F.jagged_attention(*make_qkv(6, 6), GOOD["q_offsets"], implementation="triton")


def test_triton_in_float64_is_refused():
    pytest.importorskip("triton")
    with pytest.raises(
        ValueError,
        match="q must be float32, .* on cpu with implementation='triton', got torch.float64",
    ):
        F.jagged_attention(
            *make_qkv(6, 6, dtype=torch.float64), GOOD["q_offsets"], implementation="triton"
        )
    with pytest.raises(
        ValueError, match="implementation='hopper' needs CUDA tensors, got cpu tensors"
    ):
        F.jagged_attention(*make_qkv(6, 6), GOOD["q_offsets"], implementation="hopper")
