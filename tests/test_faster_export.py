"""faster_export.py: what torch.export sees and what it leaves are as torch makes them."""

import faster_export
import pytest
import torch
from torch.export import exported_program


def kernels(operators):
    return {op: set(op.py_kernels) for op in operators}, set(faster_export._rules)


@pytest.mark.skipif(not faster_export.APPLIES, reason="this torch has other names")
def test_kernels_during_and_after_an_export_are_torchs():
    operators = faster_export._collect()
    assert exported_program._collect_all_valid_cia_ops() == operators
    before = {op: dict(op.py_kernels) for op in operators}
    composite, during = torch._C.DispatchKey.CompositeImplicitAutograd, []
    for softmax in ({}, {torch.ops.aten.softmax.int: torch.softmax}, {}):
        how = dict.fromkeys(operators, exported_program._special_op_to_preserve_cia) | softmax
        for override in (faster_export._override, *[faster_export._override_once] * 2):
            with override(dict(how)):
                assert all(op.py_kernels[composite] is f for op, f in how.items())
                during.append(kernels(operators))
            assert before == {op: op.py_kernels for op in operators}
    assert all(x == during[0] for x in during)
