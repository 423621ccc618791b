"""Which GPU a schedule is made for where CUDA is not initialised, as in a data loader's worker."""

import pytest
import torch
from jagged_kernels.configs import attention_tile

from jagged_modules import schedule


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
