"""Launches of functions that move or change rows, where the host does not know their end."""

import pytest
import torch
from torch.autograd import forward_ad

pytest.importorskip("triton")

from jagged_kernels.precompile.recorder import recorded_launches

from jagged_modules import functional as F

PADDED, JAGGED = "to_padded_kernel", "to_jagged_kernel"
LAUNCHES = {  # function of x, y, weight, bias and offsets, its inputs, launches of both ways
    "to padded": (lambda x, y, w, b, o: F.jagged_to_padded(x, o, 9), "x", [PADDED], [JAGGED]),
    "to jagged": (lambda x, y, w, b, o: F.padded_to_jagged(y, o, 70), "y", [JAGGED], [PADDED]),
    "add": (lambda x, y, w, b, o: F.jagged_dense_add(x, y, o), "xy", [JAGGED], [JAGGED, PADDED]),
    "add, y": (lambda x, y, w, b, o: F.jagged_dense_add(x, y, o), "y", [JAGGED], [PADDED]),
    "mul": (lambda x, y, w, b, o: F.jagged_dense_mul(x, y, o), "xy", [JAGGED], [JAGGED, PADDED]),
    "linear": (
        lambda x, y, w, b, o: F.jagged_linear(x, w, b, activation="gelu"),
        "xwb",
        ["activation_fwd_kernel"],
        ["activation_bwd_kernel"],
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(offsets, name):
    function, wanted, forward, backward = LAUNCHES[name]
    sizes = dict(x=(70, 32), y=(3, 9, 32), w=(48, 32), b=(48,))
    given = {key: torch.randn(size).bfloat16() for key, size in sizes.items()}
    inputs = [given[key].requires_grad_() for key in wanted]
    with recorded_launches() as launches:
        out = function(*given.values(), offsets([40, 0, 20]))
        assert [x.kernel for x in launches] == forward
        launches.clear()
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert [x.kernel for x in launches] == backward


def test_forward_mode_takes_torchs_operators(offsets):
    """Kernels would give no derivative."""
    x, of_rows = torch.randn(70, 32), offsets([40, 0, 20])
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with recorded_launches() as launches:
            out = F.jagged_to_padded(dual, of_rows, 9)
        assert forward_ad.unpack_dual(out).tangent.sum() == 32 * 18 and not launches
