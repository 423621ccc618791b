"""The backward that writes the gradients of a projection as one tensor, on a GPU."""

import random

import pytest
import torch
from marks import slow_after
from torch import library

from jagged_modules.functional.attention import with_schedule
from jagged_modules.functional.attention_call import AttentionOptions, Side, parse_call

pytestmark = pytest.mark.gpu

random.seed(0)
BATCHES = {  # those of `select` with kernels of their own, and others
    "mixed": [3, 0, 1, 70, 5, 130, 17, 257, 128, 700],
    "short": [random.randint(0, 40) for _ in range(4000)],
    "long": [2100, 3000, 1, 2500],
}


@slow_after(
    9,
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
        )
        for batch in BATCHES
    ],
)
def test_gradients_are_those_in_tensors_of_their_own(
    check_packed_gradients, batch, dim, activation, mask
):
    check_packed_gradients(
        BATCHES[batch], torch.bfloat16, "cuda", (4, 4), dim, "auto", mask, activation=activation
    )


@pytest.mark.parametrize("kernels", ["triton", "hopper"], indirect=True)
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)], ids=str)
def test_rows_behind_the_end_and_grouped_heads(check_packed_gradients, kernels, heads):
    lengths = BATCHES["mixed"]
    check_packed_gradients(lengths, torch.float16, "cuda", heads, 64, kernels, behind=77)


@pytest.mark.parametrize("batch", BATCHES)
def test_fp32(check_packed_gradients, batch):
    check_packed_gradients(BATCHES[batch][:20], torch.float32, "cuda", (4, 2), 64, "auto")


def test_the_operator_passes_opcheck(offsets):
    from jagged_kernels.attention.op import attention_forward, triton_attention_packed_backward

    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    side = Side(offsets([70, 100, 130], "cuda"))
    call = parse_call(q, k, v, side, side, AttentionOptions()).call
    out, lse, arguments = attention_forward(with_schedule(call, trains=True))
    packed = out.new_zeros(300, 3 * 256)
    inputs = torch.randn_like(out), [out, lse], packed, [0, 256, 512], *arguments
    library.opcheck(triton_attention_packed_backward, inputs)
