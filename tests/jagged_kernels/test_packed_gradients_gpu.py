"""The backward that writes the gradients of a projection as one tensor, on a GPU."""

import random

import pytest
import torch
from jagged_kernels.attention.params import PackedGradients
from marks import slow_after
from torch import library

from jagged_modules.functional.attention import attention_forward
from jagged_modules.functional.attention_arguments import Side, parse_arguments
from jagged_modules.functional.attention_call import AttentionOptions

pytestmark = pytest.mark.gpu

random.seed(0)
BATCHES = {  # those of `select` with kernels of their own, and others
    "mixed": ([3, 0, 1, 70, 5, 130, 17, 257, 128, 700], [5, 4, 0, 100, 33, 64, 16, 300, 129, 65]),
    "short": (
        [random.randint(0, 40) for _ in range(4000)],
        [random.randint(0, 30) for _ in range(4000)],
    ),
    "long": ([2100, 3000, 1, 2500], [2500, 1900, 30, 2050]),
    "few queries": ([20, 3, 64, 1] * 30, [2000, 1500, 900, 1100] * 30),
}


@slow_after(
    12,
    "batch, dim, activation, mask",
    [
        (batch, dim, activation, mask)
        for dim, activation, mask in (
            (128, "softmax", None),
            (64, "gelu_tanh", None),
            (96, "softmax", "causal"),
            (128, "gelu_tanh", None),
            (64, "softmax", None),
            (40, "silu", "causal"),
            (128, "silu", "causal"),
            (24, "softmax", None),
            (192, "softmax", "causal"),
        )
        for batch in BATCHES
    ],
)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_gradients_are_those_in_tensors_of_their_own(
    check_packed_gradients, batch, dim, activation, mask, cross
):
    lengths, kv_lengths = BATCHES[batch]
    check_packed_gradients(
        lengths, kv_lengths if cross else None, torch.bfloat16, "cuda", (4, 4), dim, "auto", mask,
        activation=activation,
    )  # fmt: skip


@pytest.mark.parametrize("kernels", ["triton", "hopper"])
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)], ids=str)
def test_rows_behind_the_end_and_grouped_heads(check_packed_gradients, kernels, heads):
    lengths, kv_lengths = BATCHES["mixed"]
    for others in (None, kv_lengths):
        check_packed_gradients(
            lengths, others, torch.float16, "cuda", heads, 64, kernels, behind=77
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("behind", [0, 77])
def test_shared_queries(check_packed_gradients, dtype, behind):
    lengths, _ = BATCHES["mixed"]
    check_packed_gradients(
        lengths, lengths, dtype, "cuda", (4, 4), 64, "auto", behind=behind, shared=32
    )


def test_fp32(check_packed_gradients):
    for lengths, kv_lengths in BATCHES.values():
        check_packed_gradients(lengths[:10], None, torch.float32, "cuda", (4, 2), 64, "auto")
        check_packed_gradients(
            lengths[:10], kv_lengths[:10], torch.float32, "cuda", (4, 2), 64, "auto"
        )


@pytest.mark.parametrize("together", [True, False])
def test_the_operator_passes_opcheck(offsets, together):
    from jagged_kernels.attention.op import triton_attention_packed_backward

    segments = offsets([70, 100, 130], "cuda")
    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    side = Side(segments)
    call = parse_arguments(q, k, v, side, side, AttentionOptions()).call
    with torch.no_grad():
        out, lse, arguments = attention_forward(call, trains=True)
    outs = PackedGradients.empty(arguments[:3], together)
    inputs = torch.randn_like(out), [out, lse], *outs, *arguments
    library.opcheck(triton_attention_packed_backward, inputs)
