"""Which kernels a schedule is made for: those of the GPU, also where CUDA is not initialised, as in a data loader's worker."""

import pytest
import torch
from jagged_kernels.attention.configs import attention_tile

from jagged_modules import schedule
from jagged_modules.functional import attention as functional


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


@pytest.mark.parametrize("capability, hopper", [((9, 0), True), ((8, 0), False), (None, False), ("no driver", False)], ids=str)
def test_tiles_are_those_of_the_machines_gpu(monkeypatch, capability, hopper):
    monkeypatch.setattr(schedule.ctypes, "CDLL", no_driver if capability == "no driver" else lambda name: Driver(capability))
    monkeypatch.setattr(schedule.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(schedule, "_first_gpu_is_hopper", schedule._first_gpu_is_hopper.__wrapped__)
    sizes = dict(num_heads=2, num_kv_heads=2, head_dim=64, itemsize=2)
    for rows in (100, 5):  # kernels for compute capability 9.0 are not taken for segments so short
        made = schedule.host_schedule(torch.tensor([rows, rows]), torch.tensor([rows, rows]), **sizes)
        expected = attention_tile(64, 2, rows, hopper and rows == 100)
        assert (made.block_m, made.backward.block_m) == (expected.query, expected.key)


class Made(Exception):
    """A schedule would have been made."""


@pytest.mark.parametrize(
    "rows, activation, head_dim, implementation, q_shared, hopper",
    [
        (200, "softmax", 128, "auto", False, True),
        (5, "softmax", 128, "auto", False, False),
        (5, "softmax", 128, "hopper", False, True),
        (200, "gelu", 128, "auto", False, True),
        (200, "gelu", 64, "auto", False, False),
        (20, "softmax", 64, "auto", True, True),
    ],
)
def test_tiles_made_within_a_call_are_those_of_the_kernels_that_it_takes(
    monkeypatch, rows, activation, head_dim, implementation, q_shared, hopper
):
    kernels = pytest.importorskip("jagged_kernels.attention.op")

    def made(*args, hopper, **sizes):
        raise Made(hopper)

    monkeypatch.setattr(kernels, "attention_on_hopper", lambda *args: True)
    monkeypatch.setattr(functional, "device_schedule", made)
    segments = 4
    offsets = torch.arange(segments + 1) * rows
    q = torch.zeros((60 if q_shared else segments * rows, 2, head_dim), dtype=torch.bfloat16)
    k = torch.zeros((segments * rows, 2, head_dim), dtype=torch.bfloat16)
    flags = dict(activation=activation, mask=None, num_targets=None, segment_scale=None, output_scale=1.0)
    with pytest.raises(Made) as schedule_of:
        functional._triton_attention(
            q, k, k, offsets, offsets, None, implementation, scale=1.0, q_shared=q_shared, kv_shared=False, **flags
        )
    assert schedule_of.value.args == (hopper,)
