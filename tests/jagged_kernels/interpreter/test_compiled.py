"""Every function under torch.compile with symbolic sizes, forward and backward, its kernels run by the interpreter."""

import functools

import pytest

from ..compiled_calls import FUNCTIONS, SIZES, assert_compiles_once


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_for_all_lengths_and_batch_sizes(name):
    function, make_inputs = FUNCTIONS[name]
    call = functools.partial(function, implementation="triton")
    assert_compiles_once(call, [make_inputs(*sizes) for sizes in SIZES[1:]])
