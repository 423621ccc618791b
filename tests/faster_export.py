"""Makes torch.export faster.

For each export, torch looks up all composite operators again for each namespace of operators, and
makes the kernels of 500 of them, 20 each, anew: together more than half of the time that the export
of a small model takes. torch has no public names for either, and may rename them.
"""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from torch._export import utils
from torch._subclasses import fake_impls
from torch.export import exported_program

Kernels = dict[object, Callable]
_look_up = getattr(utils, "_materialize_cpp_cia_ops", None)
_collect = getattr(exported_program, "_collect_all_valid_cia_ops", None)
_override = getattr(exported_program, "_override_composite_implicit_decomp", None)
_rules = getattr(fake_impls, "op_implementations_dict", None)
APPLIES = None not in (_look_up, _collect, _override, _rules)
# (operator, its decomposition) → its kernels elsewhere and in an export, and its rule for fake
# tensors there
_kept: dict[tuple, tuple[Kernels, Kernels, Callable]] = {}


def _collect_after_one_look_up():
    _look_up()
    with mock.patch.object(utils, "_materialize_cpp_cia_ops", lambda: None):
        return _collect()


def _set_kernels(operator, kernels: Kernels) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()


@contextlib.contextmanager
def _override_once(decompositions: dict) -> Iterator[None]:
    """As torch's, with the kernels that it made before for the same decomposition of an operator
    that had the same kernels."""
    before = {op: dict(op.py_kernels) for op in decompositions}
    has_rule = {op for op in decompositions if op in _rules}
    known = {
        op: _kept[op, how]
        for op, how in decompositions.items()
        if (op, how) in _kept and _kept[op, how][0] == before[op] and op not in has_rule
    }
    with _override({op: how for op, how in decompositions.items() if op not in known}):
        for op, how in decompositions.items():
            if op not in known and op not in has_rule:
                _kept[op, how] = before[op], dict(op.py_kernels), _rules[op]
        for op, (_, kernels, rule) in known.items():
            _set_kernels(op, kernels)
            _rules[op] = rule
        try:
            yield
        finally:
            for op in known:
                _set_kernels(op, before[op])
                _rules.pop(op, None)


def make_faster() -> None:
    if APPLIES:
        exported_program._collect_all_valid_cia_ops = _collect_after_one_look_up
        exported_program._override_composite_implicit_decomp = _override_once
