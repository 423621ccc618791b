"""Tiles in groups of segments, on Hopper: the order of the list changes no bit of a result, and
small groups of targets end."""

import pytest
import torch
from jagged_kernels.schedule import cost
from marks import ON_HOPPER

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.schedule import host_schedule

pytestmark = ON_HOPPER
LENGTHS = [1000, 300, 0, 513, 700, 64, 1]
MASKS = {
    "causal": dict(causal=True),
    "targets": dict(
        causal=True, contextual_seqlen=3, num_targets=torch.tensor([20, 300, 0, 1, 0, 0, 1])
    ),
    "window": dict(window=(200, 100)),
}


def on_gpu(mask):
    return jm.AttentionMask(
        **{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in MASKS[mask].items()}
    )


@pytest.mark.parametrize("scheduled", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [72, 128])
def test_groups_change_no_bits(offsets, monkeypatch, dim, mask, activation, scheduled):
    monkeypatch.setattr(cost, "GROUP_ELEMENTS", 2**18)  # 500 rows of 4 heads
    lengths, segments = torch.tensor(LENGTHS), offsets(LENGTHS, "cuda")
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=dim, dtype=torch.bfloat16)
    leaves = [
        torch.randn(
            sum(LENGTHS), heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (4, 2, 2)
    ]
    do = torch.randn_like(leaves[0])

    def step():
        schedule = host_schedule(
            lengths, lengths, mask=jm.AttentionMask(**MASKS[mask]), **sizes
        ).to("cuda")
        given = schedule if scheduled else None
        out = F.jagged_attention(
            *leaves,
            segments,
            activation=activation,
            mask=on_gpu(mask),
            schedule=given,
            implementation="hopper",
        )
        return [schedule.tiles, schedule.backward.tiles], [
            out,
            *torch.autograd.grad(out, leaves, do),
        ]

    grouped, results = step()
    monkeypatch.setattr(cost, "GROUPED_SEQLEN", 2**30)
    by_work, expected = step()
    assert not any(torch.equal(x, y) for x, y in zip(grouped, by_work))
    assert all(torch.equal(x, y) for x, y in zip(results, expected))


@pytest.mark.parametrize("elements", [1, 2**30])
def test_the_one_pass_backward_of_targets(check_attention, monkeypatch, elements):
    """Fewer queries than keys, in groups of one history and of all."""
    monkeypatch.setattr(cost, "one_pass_elements", lambda *_: elements)
    check_attention(
        ([900, 800, 700], [3000, 2100, 2000]),
        torch.bfloat16,
        "cuda",
        dims=(64, 64),
        heads=(2, 1),
        kernels="hopper",
    )
