"""Which kernels a schedule is made for: those of the GPU, also where CUDA is not initialised, as in
a data loader's worker."""

import re

import pytest
import torch
from jagged_kernels.attention.select import AttentionProblem, select
from jagged_kernels.common import device
from jagged_kernels.schedule.host import zigzag_schedule

from jagged_modules import AttentionMask, functional
from jagged_modules.schedule import host_schedule

MASK = AttentionMask(causal=True)


class Driver:
    """NVIDIA's management library, of one GPU or none."""

    def __init__(self, capability):
        self.capability = capability

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        return 0 if self.capability else 6

    def nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
        major._obj.value, minor._obj.value = self.capability
        return 0


def no_driver(name):
    raise OSError(name)


@pytest.mark.parametrize(
    "capability, seen",
    [((9, 0), (9, 0)), ((8, 0), (8, 0)), (None, None), ("no driver", None)],
    ids=str,
)
def test_tiles_are_those_of_the_machines_gpu(monkeypatch, capability, seen):
    monkeypatch.setattr(
        device.ctypes,
        "CDLL",
        no_driver if capability == "no driver" else lambda name: Driver(capability),
    )
    monkeypatch.setattr(device.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(device, "_driver_capability", device._driver_capability.__wrapped__)
    assert device.gpu_capability() == seen
    sizes = dict(num_heads=2, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    for rows in (100, 5):
        lengths = torch.tensor([rows, rows])
        made = host_schedule(lengths, lengths, **sizes)
        problem = AttentionProblem(
            64,
            64,
            torch.bfloat16,
            seen,
            q_rows=2 * rows,
            q_segments=2,
            kv_rows=2 * rows,
            kv_segments=2,
        )
        tile = select(problem).tile
        assert (made.block_m, made.backward.block_m) == (tile.query, tile.key)


def test_head_dims_that_hoppers_kernels_do_not_support_get_the_portable_tile():
    sizes = dict(num_heads=2, num_kv_heads=2, dtype=torch.bfloat16, capability=(9, 0))
    lengths = torch.tensor([600, 800])
    assert [
        host_schedule(lengths, lengths, head_dim=head_dim, **sizes).block_m for head_dim in (64, 60)
    ] == [192, 128]


class Made(Exception):
    """A schedule would have been made."""


@pytest.mark.parametrize(
    "rows, activation, head_dim, implementation, q_shared, tile",
    [
        (200, "softmax", 128, "auto", False, 128),
        (5, "softmax", 128, "auto", False, 64),
        (5, "softmax", 128, "hopper", False, 64),
        (200, "gelu", 128, "auto", False, 128),
        (200, "gelu_taylor", 128, "auto", False, 64),
        (700, "gelu", 64, "auto", False, 64),
        (200, "softmax", 64, "auto", False, 64),
        (700, "softmax", 64, "auto", False, 192),
        (200, "softmax", 64, "triton", False, 128),
        (2, "softmax", 64, "auto", True, 64),
    ],
)
def test_tiles_made_within_a_call_are_those_of_the_kernels_that_it_takes(
    monkeypatch, offsets_of, rows, activation, head_dim, implementation, q_shared, tile
):
    kernels = pytest.importorskip("jagged_kernels.attention.op")
    pytest.importorskip("triton")
    from jagged_kernels.attention.params import unpack
    from jagged_kernels.precompile.recorder import recorded_launches

    seen, operator = [], kernels.triton_attention

    def record(*args):
        seen.append(unpack(*args))
        return operator(*args)

    monkeypatch.setattr(kernels, "triton_attention", record)
    q, k = (
        torch.zeros((n, 2, head_dim), dtype=torch.bfloat16)
        for n in (60 if q_shared else 4 * rows, 4 * rows)
    )
    with recorded_launches((9, 0)) as launches:
        offsets = offsets_of([rows] * 4)
        options = dict(activation=activation, implementation=implementation)
        functional.jagged_attention(q, k, k, "shared" if q_shared else offsets, offsets, **options)
    (_, queries, _), *_ = seen
    assert queries.block == tile
    assert [launch.kernel for launch in launches].count("tile_list_kernel") == 1, (
        "the kernels take the list as it is"
    )


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "mask, kernels",
    [(None, ["tile_list_kernel"]), (MASK, ["tile_work_kernel", "masked_list_kernel"])],
)
def test_a_training_step_lists_the_tiles_of_both_sides_at_once(
    offsets_of, mask, kernels, head_dim, capability
):
    """The backward takes the forward's lists. Without a backward, there is no list of key tiles."""
    pytest.importorskip("triton")
    from jagged_kernels.precompile.recorder import recorded_launches

    q = torch.zeros((800, 2, head_dim), dtype=torch.bfloat16, requires_grad=True)
    with recorded_launches(capability) as launches:
        functional.jagged_attention(q, q, q, offsets_of([200] * 4), mask=mask).sum().backward()
    of_keys = re.compile(r"\(\d+, \d+, True, 1, 1,")  # constants of a kernel that lists key tiles
    names = [
        launch.kernel
        for launch in launches
        if launch.kernel in ("tile_list_kernel", "tile_work_kernel", "masked_list_kernel")
    ]
    assert names == kernels
    assert all(
        of_keys.search(launch.specialisation) for launch in launches if launch.kernel in kernels
    )
    with recorded_launches(capability) as launches, torch.no_grad():
        functional.jagged_attention(q, q, q, offsets_of([200] * 4), mask=mask)
    of_forward = [launch for launch in launches if launch.kernel in kernels]
    assert [launch.kernel for launch in of_forward] == kernels
    assert not any(of_keys.search(launch.specialisation) for launch in of_forward)


@pytest.mark.parametrize(
    "options, grouped",
    [
        (dict(capability=(9, 0)), True),
        (dict(capability=(8, 0)), False),
        (dict(capability=(9, 0), implementation="triton"), False),
        (dict(capability=(9, 0), batch_invariant=True), False),
    ],
    ids=str,
)
def test_key_tiles_are_listed_in_groups_for_hoppers_kernels_alone(options, grouped):
    lengths = torch.tensor([2048, 4096, 2048])
    sizes = dict(num_heads=4, num_kv_heads=4)
    backward = host_schedule(
        lengths, lengths, **sizes, head_dim=64, dtype=torch.bfloat16, **options
    ).backward
    by_work = zigzag_schedule(
        lengths,
        lengths,
        num_heads=4,
        block_m=backward.block_m,
        block_n=backward.block_n,
        key_tiles=True,
    )
    assert torch.equal(backward.tiles, by_work.tiles) != grouped


# the first tile has less work than the next ones
WINDOW = dict(mask=AttentionMask(window=(None, 300)), head_dim=64)


@pytest.mark.parametrize(
    "made_for, change, given",
    [
        (dict(), dict(), True),
        (dict(), dict(head_dim=64), False),
        (dict(), dict(mask=None, head_dim=64), False),
        (WINDOW, dict(mask=None), False),
        (WINDOW, dict(mask=AttentionMask(causal=True)), False),
        (WINDOW, dict(), True),
    ],
    ids=str,
)
def test_the_one_pass_backward_gets_no_list_in_another_order(offsets_of, made_for, change, given):
    """A schedule for another head dim or mask: the backward then lists its own tiles. Another order
    of tiles would be a deadlock."""
    pytest.importorskip("triton")
    from jagged_kernels.precompile.recorder import recorded_launches

    made_for = dict(head_dim=128, mask=AttentionMask(causal=True)) | made_for
    lengths, options = torch.tensor([2048, 2048]), made_for | change
    schedule = host_schedule(
        lengths,
        lengths,
        num_heads=8,
        num_kv_heads=8,
        dtype=torch.bfloat16,
        capability=(9, 0),
        **made_for,
    )
    assert not schedule.backward.ascending
    q = torch.zeros((4096, 8, options["head_dim"]), dtype=torch.bfloat16, requires_grad=True)
    segments = offsets_of(lengths.tolist())
    with recorded_launches() as launches:
        out = functional.jagged_attention(
            q, q, q, segments, mask=options["mask"], schedule=schedule
        )
        launches.clear()
        out.sum().backward()
    listed = {"tile_list_kernel", "grouped_list_kernel"} <= {launch.kernel for launch in launches}
    assert listed != given
    assert ("attention_bwd_hopper_kernel" in {launch.kernel for launch in launches}) != given
