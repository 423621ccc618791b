"""faster_export.py: what torch.export sees and what it leaves are as torch makes them."""

import faster_export
import torch
from torch.export import exported_program


def kernels(operators):
    return {op: set(op.py_kernels) for op in operators}, set(faster_export._rules)


def test_kernels_during_and_after_an_export_are_torchs():
    operators = faster_export._collect()
    assert exported_program._collect_all_valid_cia_ops() == operators
    before = {op: dict(op.py_kernels) for op in operators}
    softmax = torch.ops.aten.softmax.int
    during = []
    for decomposed in (None, softmax, None):
        how = dict.fromkeys(operators, exported_program._special_op_to_preserve_cia)
        if decomposed:
            how[decomposed] = torch.softmax
        for override in (faster_export._override, *[faster_export._override_once] * 2):
            with override(dict(how)):
                composite = torch._C.DispatchKey.CompositeImplicitAutograd
                assert all(op.py_kernels[composite] is f for op, f in how.items())
                during.append(kernels(operators))
            assert before == {op: op.py_kernels for op in operators}
    assert all(x == during[0] for x in during)
