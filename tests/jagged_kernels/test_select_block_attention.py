"""Which kernels of block attention run, as a table; without a GPU."""

import pytest
import torch
from jagged_kernels.block_attention.configs import (
    BlockAttentionConfig,
    HopperBlockAttentionConfig,
    fits_shared_memory,
)
from jagged_kernels.block_attention.params import RotaryParams
from jagged_kernels.block_attention.select import select_block_attention
from jagged_kernels.common.configs import KernelChoice

from jagged_modules.functional.block_attention import runs_kernels

from ..kernels_used import TYPICAL_BLOCKS

TABLE = torch.ones(4, 32)
TYPICAL = TYPICAL_BLOCKS._replace(head_dim=64)
UNSUPPORTED_BY_HOPPER = {
    "fp32": dict(dtype=torch.float32),
    "grouped heads": dict(num_kv_heads=2),
    "head dim not a multiple of 8": dict(head_dim=20),
    "wide heads": dict(head_dim=136),
    "unaligned rows": dict(aligned=False),
    "A100": dict(capability=(8, 0)),
    "Blackwell": dict(capability=(10, 0)),
    "interpreter": dict(device_type="cpu"),
}


@pytest.mark.parametrize("kernel", ["fwd", "bwd"])
@pytest.mark.parametrize("implementation", ["auto", "hopper"])
@pytest.mark.parametrize(
    "changes",
    [{}, dict(dtype=torch.float16), dict(head_dim=8), dict(head_dim=128), dict(block_size=128)],
    ids=str,
)
def test_hopper(kernel, implementation, changes):
    assert (
        select_block_attention(kernel, TYPICAL._replace(**changes), implementation).backend
        == "hopper"
    )


@pytest.mark.parametrize("kernel", ["fwd", "bwd"])
@pytest.mark.parametrize("reason", UNSUPPORTED_BY_HOPPER)
def test_triton(kernel, reason):
    problem = TYPICAL._replace(**UNSUPPORTED_BY_HOPPER[reason])
    assert select_block_attention(kernel, problem, "auto").backend == "triton"
    with pytest.raises(
        ValueError,
        match=(
            r"implementation 'hopper' takes .*; got torch\.\w+ on (cuda|cpu) with capability"
            r" \d+\.0, D = "
        ),
    ):
        select_block_attention(kernel, problem, "hopper")


@pytest.mark.parametrize("kernel", ["fwd", "bwd"])
def test_hopper_drops_no_weights(kernel):
    problem = TYPICAL._replace(dropout=True)
    assert select_block_attention(kernel, problem, "auto").backend == "triton"
    with pytest.raises(ValueError, match="'hopper' takes no dropout of attention weights"):
        select_block_attention(kernel, problem, "hopper")


@pytest.mark.parametrize("kernel", ["fwd", "bwd"])
def test_explicit_triton(kernel):
    assert select_block_attention(kernel, TYPICAL, "triton").backend == "triton"


@pytest.mark.parametrize(
    "kernel, changes, implementation, config",
    [
        (
            "fwd",
            {},
            "auto",
            HopperBlockAttentionConfig(64, 64, heads_per_cta=4, num_warps=4, max_registers=168),
        ),
        (
            "bwd",
            {},
            "auto",
            HopperBlockAttentionConfig(64, 64, heads_per_cta=4, num_warps=4, max_registers=168),
        ),
        (
            "bwd",
            dict(head_dim=72),
            "auto",
            HopperBlockAttentionConfig(64, 128, heads_per_cta=4, num_warps=4, max_registers=None),
        ),
        (
            "fwd",
            dict(num_heads=6, num_kv_heads=6),
            "auto",
            HopperBlockAttentionConfig(64, 64, 3, num_warps=4, max_registers=168),
        ),
        (
            "fwd",
            dict(block_size=128),
            "auto",
            HopperBlockAttentionConfig(128, 64, 4, num_warps=8, max_registers=None),
        ),
        (
            "fwd",
            dict(block_size=16),
            "triton",
            BlockAttentionConfig(64, 64, num_warps=4, num_stages=3),
        ),
        (
            "fwd",
            dict(rotary="relative"),
            "triton",
            BlockAttentionConfig(64, 64, num_warps=4, num_stages=2, ctas_per_sm=2),
        ),
        (
            "bwd",
            dict(rotary="absolute", num_kv_heads=2),
            "triton",
            BlockAttentionConfig(64, 64, num_warps=8, num_stages=2),
        ),
        (
            "fwd",
            dict(capability=(8, 0)),
            "auto",
            BlockAttentionConfig(64, 64, num_warps=4, num_stages=1, ctas_per_sm=4),
        ),
        (
            "fwd",
            dict(dtype=torch.float32, head_dim=128, block_size=16),
            "auto",
            BlockAttentionConfig(32, 128, num_warps=8, num_stages=1),
        ),
        (
            "fwd",
            dict(head_dim=8),
            "triton",
            BlockAttentionConfig(64, 32, num_warps=4, num_stages=3),
        ),
    ],
)
def test_configurations(kernel, changes, implementation, config):
    problem = TYPICAL._replace(**changes)
    backend = "hopper" if isinstance(config, HopperBlockAttentionConfig) else "triton"
    assert select_block_attention(kernel, problem, implementation) == KernelChoice(backend, config)


@pytest.mark.parametrize(
    "head_dim, itemsize, capability, block_size, group, expected",
    [
        (256, 2, (9, 0), 64, 1, True),
        (136, 2, (9, 0), 128, 1, False),
        (256, 4, (9, 0), 64, 1, False),
        (64, 4, (9, 0), 128, 1, False),
        (128, 2, (8, 0), 64, 1, True),
        (64, 2, (8, 0), 128, 1, False),
        (128, 2, (8, 6), 64, 1, True),
        (128, 2, (8, 6), 64, 2, False),
        (64, 4, (12, 0), 64, 1, False),
    ],
)
def test_whether_a_block_has_kernels(head_dim, itemsize, capability, block_size, group, expected):
    assert fits_shared_memory(head_dim, itemsize, capability, block_size, group) == expected
    sizes = torch.float32, head_dim, block_size, group
    assert runs_kernels(torch.device("cuda"), *sizes, implementation="hopper")


@pytest.mark.parametrize(
    "given, kind",
    [
        (dict(cos=None, sin=None), "none"),
        ({}, "relative"),
        (dict(precise=True), "relative"),
        (dict(positions=TABLE[:, 0].long()), "absolute"),  # a tile's rows may have any positions
        (dict(rotate_v=True), "absolute"),  # rotated values do not depend on differences alone
        (dict(linear=False), "absolute"),
    ],
)
def test_where_positions_may_be_counted_from_a_tile(given, kind):
    plain = RotaryParams(TABLE, TABLE, positions=None, rotate_v=False, linear=True, precise=False)
    assert plain._replace(**given).kind == kind
