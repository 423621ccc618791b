"""Under jm.batch_invariant(True) a segment has the same bits alone and in any batch: operators and
layers on a GPU, with lengths for which the default selects different kernels, tiles and splits."""

import pytest
import torch

pytest.importorskip("triton")

import jagged_modules as jm
from jagged_modules import functional as F

from ..batch_invariance import check, layers, operators

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 2, 17, 63, 64, 65, 200, 900, 2900]
OWN = [1, 17, 130, 1100]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = dict(dim=64, width=72)  # supported by Hopper's kernels
NAMES = list(operators("cpu", torch.float32))
WITH_HOPPER_KERNELS = [name for name in NAMES if "attention" in name or "compress" in name]


@pytest.mark.parametrize("dtype, batches", [("bf16", 200), ("fp32", 40)])
@pytest.mark.parametrize("name", NAMES)
def test_operators(name, dtype, batches):
    check(operators("cuda", DTYPES[dtype], **SIZES)[name], LENGTHS, OWN, batches)


@pytest.mark.parametrize("name", WITH_HOPPER_KERNELS)
def test_portable_kernels_on_hopper(name):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the portable kernels are those of test_operators")
    check(
        operators("cuda", torch.bfloat16, **SIZES, implementation="triton")[name], LENGTHS, OWN, 200
    )


@pytest.mark.parametrize("implementation", ["auto", "triton"])
@pytest.mark.parametrize(
    "name", ["attention", "attention-causal", "attention-silu", "target-attention"]
)
def test_wide_heads(name, implementation):
    """By default one kernel computes all gradients of long segments of these sizes."""
    check(
        operators("cuda", torch.float16, dim=128, heads=4, implementation=implementation)[name],
        [1, 64, 900, 2900],
        [130, 1100],
        60,
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", layers("cpu", torch.float32))
def test_layers(name, dtype):
    check(layers("cuda", DTYPES[dtype], width=128)[name], LENGTHS, OWN, 60)


def test_many_rows_of_a_long_segment():
    """A long segment is split at the same rows for any batch size."""
    for name in ("softmax", "jagged-bmm"):
        check(operators("cuda", torch.bfloat16, **SIZES)[name], [5, 40_000], [5000], 12)


def test_a_single_row_of_unaligned_rows():
    """A single row of a buffer with rows that are not aligned to 16 bytes, which Hopper's kernels
    do not support for several rows."""
    buffer = torch.randn(40, 2 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    rows = buffer[:, :128].unflatten(1, (2, 64))
    with jm.batch_invariant(True):
        for operator in (
            lambda x, offsets: F.jagged_attention(x, x, x, offsets),
            lambda x, offsets: F.block_diagonal_attention(x, x, x, offsets),
        ):
            alone = operator(rows[:1], torch.tensor([0, 1]))
            assert torch.equal(alone, operator(rows, torch.tensor([0, 1, 40]))[:1])


def test_schedules_of_another_mode_or_tile_are_not_used():
    lengths = torch.tensor([20, 300, 7])
    q, k, v = (
        torch.randn(int(lengths.sum()), 2, 64, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    with jm.batch_invariant(True):
        expected = F.jagged_attention(q, k, v, offsets)
        for block in (16, 64, 128, 192):
            schedule = jm.zigzag_schedule(lengths, lengths, num_heads=2, block_m=block, block_n=64)
            assert torch.equal(
                F.jagged_attention(q, k, v, offsets, schedule=schedule.to("cuda")), expected
            )


def test_a_backward_in_a_thread_of_autograd_takes_the_mode_of_its_forward(monkeypatch):
    from jagged_kernels.attention import op as attention
    from jagged_kernels.attention.params import unpack

    seen, backward = [], attention.triton_attention_backward
    monkeypatch.setattr(
        attention,
        "triton_attention_backward",
        lambda do, results, *args: (
            seen.append(unpack(*args)[0].params) or backward(do, results, *args)
        ),
    )
    q = torch.randn(7, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with jm.batch_invariant(True), jm.backward_workspace(2**20):
        out = F.jagged_attention(q, q, q, torch.tensor([0, 3, 7]))
    out.sum().backward()
    assert [(params.workspace, params.batch_invariant) for params in seen] == [(2**20, True)]
