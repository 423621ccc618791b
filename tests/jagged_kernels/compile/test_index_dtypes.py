"""What public functions launch for tensors of indices of different integer dtypes compiles: every
combination of int32 and int64."""

import dataclasses
import functools
import itertools

import pytest
import torch
from marks import SLOW, diagonal_first, slow_after

pytest.importorskip("triton")

from calls import build
from cases import Case
from index_calls import FUNCTIONS, arguments_of, function_case
from jagged_kernels.precompile.recorder import Launch, recorded_launches
from space import OPERATORS

OF_SCHEDULES = {
    "_pack_kernel",
    "group_candidates_kernel",
    "grouped_list_kernel",
    "masked_list_kernel",
    "tile_list_kernel",
    "tile_work_kernel",
}
# of the arguments in turn; the plain one is the last
COMBINATIONS = list(itertools.product(("int32", ""), repeat=2))
NAMES = [
    name for name, (function, _, _) in FUNCTIONS.items() if OPERATORS[function].implementations
]
# changes of a case: kernels for short segments, those for Hopper, and those for a few candidates of
# each of many users
SIZES = {
    "short": lambda case: case,
    "long": lambda case: _with_head_dim(case, [[40 * n for n in side] for side in case.lengths]),
    "many users": lambda case: _with_head_dim(
        case, [[20] * 330, [400] * 330], heads=[2, 2], values="zeros"
    ),
}
CASES = [("target_attention-map", "many users"), *diagonal_first(NAMES, ("short", "long"))]


def _with_head_dim(case: Case, lengths: list[list[int]], **options) -> Case:
    options |= dict(head_dim=64) if "head_dim" in case.options else {}
    return dataclasses.replace(case, options=case.options | options, lengths=lengths)


def launched(
    name: str, size: str, dtypes: tuple[str, str], capability: tuple[int, int]
) -> set[Launch]:
    """The kernels that a call and its backward launch, its tensors of indices having these dtypes
    in turn."""
    forms = {
        argument: dtype if dtype in allowed else ""
        for (argument, allowed), dtype in zip(arguments_of(name).items(), itertools.cycle(dtypes))
    }
    call = build(SIZES[size](function_case(name, "cpu", "bfloat16", **forms)))
    inputs = {name: x.detach().requires_grad_() for name, x in call.inputs.items()}
    with recorded_launches(capability) as launches:
        results = list(call.function(**inputs).values())
        torch.autograd.grad(results, list(inputs.values()), [torch.empty_like(x) for x in results])
    return set(launches)


@functools.cache
def compiled(launch: Launch) -> bytes:
    return launch.compile().asm["cubin"]


@pytest.mark.parametrize("capability", [(9, 0), pytest.param((8, 0), marks=SLOW)], ids=str)
@pytest.mark.parametrize("kernels", ["of schedules", pytest.param("all", marks=SLOW)])
@slow_after(1 + len(NAMES), "name, size", CASES)
def test_each_combination_of_dtypes_compiles(name, size, kernels, capability):
    """Kernels of the plain form are compiled by the tests of each operator, so that only those are
    compiled here that other dtypes add.

    Kernels that make schedules read two tensors of indices in the same way. They compile in a
    second.
    """
    *mixed, plain = (launched(name, size, dtypes, capability) for dtypes in COMBINATIONS)
    assert plain
    for launch in sorted(set().union(*mixed) - plain, key=str):
        if kernels == "all" or launch.kernel in OF_SCHEDULES:
            assert compiled(launch)
