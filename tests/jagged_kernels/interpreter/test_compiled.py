"""Every function under torch.compile with symbolic sizes, forward and backward, its kernels run by
the interpreter."""

import functools

import pytest

from ..compiled_calls import FUNCTIONS, NAMES, assert_compiles_once

SIZES = [(3, 7, 4), (5, 11, 6)]  # segments, rows, candidates: few, for the interpreter


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_for_all_lengths_and_batch_sizes(name):
    function, make_inputs = FUNCTIONS[name]
    call = functools.partial(function, implementation="triton")
    assert_compiles_once(call, [make_inputs(*sizes) for sizes in SIZES])
