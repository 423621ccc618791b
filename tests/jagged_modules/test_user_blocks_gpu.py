"""JaggedPFFN, JaggedSeedPooling, JaggedInterFormer and JaggedKunlun on a GPU: results and gradients
against float64."""

import pytest
import torch

from . import test_user_blocks as cpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", cpu.LAYERS)
def test_against_float64(name, dtype):
    layer, arguments = cpu.make(name, dtype), cpu.inputs(name, dtype)
    offsets = cpu.OFFSETS.cuda()

    def run(layer, *arguments):
        return cpu.run(layer, *arguments, offsets=offsets)

    actual = cpu.step(run, layer.cuda(), [x.cuda() for x in arguments])
    assert all(x.dtype == dtype and x.is_cuda for x in actual)
    cpu.assert_rounded(actual, name, layer, arguments, torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("name", ["pffn", "hsp", "interformer-window", "kunlun"])
def test_autocast(name):
    layer, arguments = cpu.make(name, torch.float32), cpu.inputs(name, torch.float32)
    offsets = cpu.OFFSETS.cuda()

    def run(layer, *arguments):
        with torch.autocast("cuda", torch.bfloat16):
            return cpu.run(layer, *arguments, offsets=offsets)

    actual = cpu.step(run, layer.cuda(), [x.cuda() for x in arguments])
    cpu.assert_rounded(actual, name, layer, arguments, 2**-9)
