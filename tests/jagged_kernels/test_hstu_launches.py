"""Which kernels an HSTULayer launches: those that take whole rows, unless its modules must be
called."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import jagged_modules as jm

pytest.importorskip("triton")

from jagged_kernels.precompile.recorder import recorded_launches

ROWS = {"row_norm_fwd_kernel", "row_norm_bwd_kernel", "gate_fwd_kernel", "gate_bwd_kernel"}


def launched(offsets, change=None, rows=300, **fields):
    """How often a training step launches each of the kernels that take whole rows."""
    config = jm.HSTUConfig(scaling_seqlen=100, dropout=0.1, **fields)
    layer = jm.HSTULayer(64, 2, config).bfloat16()
    if change is not None:
        change(layer)
    x = torch.randn(rows, 64).bfloat16().requires_grad_()
    with recorded_launches() as launches:
        layer((x, offsets([100, rows - 100])))[0].sum().backward()
    return Counter(x.kernel for x in launches if x.kernel in ROWS)


@pytest.mark.parametrize("recompute, norms", [((), 1), (("norm", "activation"), 2)])
@pytest.mark.parametrize("norm", ["layer", "rms", "group"])
def test_a_training_step(offsets, norm, recompute, norms):
    expected = dict.fromkeys(ROWS, 1) | dict(row_norm_fwd_kernel=norms)
    assert launched(offsets, norm=norm, recompute=recompute) == expected


def _replace_dropout(layer):
    layer.dropout = nn.AlphaDropout(0.1)


def _add_a_bias(layer):
    layer.out_proj = nn.Linear(192, 64).bfloat16()


def _set_forward(layer):
    forward = layer.uvqk_proj.forward
    layer.uvqk_proj.forward = lambda x: forward(x)


def _parametrise(layer):
    parametrize.register_parametrization(layer.uvqk_proj, "weight", nn.Identity())


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.output_norm.register_forward_hook(lambda *_: None),
        lambda layer: layer.input_norm.register_full_backward_hook(lambda *_: None),
        _replace_dropout,
        _add_a_bias,
        _parametrise,
        _set_forward,
    ],
    ids=["hook", "backward-hook", "dropout", "bias", "parametrised", "forward"],
)
def test_modules_that_must_be_called(offsets, change):
    assert not launched(offsets, change)


def test_batch_invariance_calls_the_modules(offsets):
    with jm.batch_invariant(True):
        assert not launched(offsets)
