"""The first training steps of a layer compile every kernel that later ones launch, whatever the
lengths.

Triton compiles another variant of a kernel for an integer argument of 1, for one divisible by 16,
and for a pointer aligned to 16 bytes.
"""

import pytest
import torch
from marks import SLOW

import jagged_modules as jm

pytest.importorskip("triton")

from benchmarks.training_steps import training_steps
from jagged_kernels.precompile.recorder import recorded_launches

from .batches import FIRST_BATCHES, LATER_BATCHES

LAYERS = list(training_steps("cpu", torch.float32))


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=SLOW), torch.bfloat16], ids=str
)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_later_batches_need_no_other_kernels(name, capability, dtype):
    with recorded_launches(capability) as launches:
        step = training_steps("cuda", dtype)[name]()
        for batch in FIRST_BATCHES:
            step(*batch)
        compiled = set(launches)
        assert compiled
        for batch in LATER_BATCHES:
            launches.clear()
            step(*batch)
            assert [x for x in launches if x not in compiled] == [], batch


@pytest.mark.parametrize("implementation", ["triton", "auto"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_a_bias_is_compiled_once_for_all_lengths(offsets, activation, implementation):
    """Of one pair of tables; without a bias, other kernels run."""
    from jagged_modules import functional as F

    def launched(lengths, biased=True):
        q, k, v = torch.randn(sum(lengths), 3, 4, 64).bfloat16().requires_grad_().unbind(1)
        tables = torch.randn(399).requires_grad_(), torch.randn(4, 21).requires_grad_()
        bias = jm.RelativeBias(*tables, torch.arange(sum(lengths))) if biased else None
        with recorded_launches() as launches:
            F.jagged_attention(
                q,
                k,
                v,
                offsets(lengths),
                activation=activation,
                bias=bias,
                implementation=implementation,
            ).sum().backward()
        return {x for x in launches if x.kernel.startswith("attention")}

    first = launched([100, 90])
    assert len(first) == 3
    for lengths in ([1, 160], [160, 33], [130, 180, 1, 148]):
        assert launched(lengths) == first
    assert not launched([100, 90], biased=False) & first


@pytest.mark.parametrize("rows", [1, 15, 16, 17])
@pytest.mark.parametrize("heads, dim", [(1, 20), (1, 64), (3, 40)])
def test_attention_of_one_row_is_compiled_as_that_of_many(offsets, heads, dim, rows):
    """Strides of tensors whose rows are not aligned to 16 bytes, including tensors of one row."""
    from jagged_modules import functional as F

    def launched(rows):
        q, k, v = torch.randn(rows, 3, heads, dim).bfloat16().requires_grad_().unbind(1)
        with recorded_launches() as launches:
            F.jagged_attention(q, k, v, offsets([rows]), implementation="triton").sum().backward()
        return set(launches)

    assert launched(rows) == launched(18)
