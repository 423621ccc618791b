"""Runs what a `Case` describes, and holds results and gradients to their models."""

from __future__ import annotations

import warnings

import accuracy
import torch
from cases import Case
from torch import Tensor

from . import attention, products, rows
from .maker import Call, Maker

BUILDERS = {
    "jagged_attention": attention.jagged_attention,
    "target_attention": attention.target_attention,
    "self_target_attention": attention.self_target_attention,
    "block_diagonal_attention": attention.block_diagonal_attention,
    "block_diagonal_attention_packed": attention.block_diagonal_attention_packed,
    "apply_rotary": attention.apply_rotary,
    "linear_compress": products.linear_compress,
    "jagged_dense_bmm": products.jagged_dense_bmm,
    "jagged_jagged_bmm": products.jagged_jagged_bmm,
    "jagged_softmax": products.jagged_softmax,
    "jagged2_softmax": products.jagged2_softmax,
    "jagged_jagged_bmm_jagged_out": products.jagged_outer,
    "array_jagged_bmm_jagged_out": products.array_jagged_bmm,
    "jagged_linear": products.jagged_linear,
    "jagged_dense_add": rows.dense("jagged_dense_add"),
    "jagged_dense_mul": rows.dense("jagged_dense_mul"),
    "jagged_layer_norm": rows.jagged_layer_norm,
    "jagged_concat": rows.jagged_concat,
    "jagged_split": rows.jagged_split,
    "jagged_to_padded": rows.jagged_to_padded,
    "padded_to_jagged": rows.padded_to_jagged,
}


def check(case: Case) -> None:
    """AssertionError unless results and gradients are as accurate as their models say, and, where the case has poison, those of other
    segments the same, bit for bit, when one segment's operands are NaN or infinite."""
    call = BUILDERS[case.function](Maker(case), case.options, case.lengths)
    inputs, gradients, actual = _evaluate(call, case)
    with torch.no_grad():
        expected = call.model(inputs, gradients)
    if case.options.get("values") in ("zeros", "equal rows") or case.options["grad"] in ("one number", "one row"):
        # Equal numbers have equal roundings, which add up: the largest error alone is a bound.
        expected = {name: x if isinstance(x, Tensor) else x._replace(rms=x.error) for name, x in expected.items()}
    floating = {name: x for name, x in actual.items() if not isinstance(expected[name], Tensor)}
    for name, x in actual.items():
        if name not in floating:
            assert torch.equal(x.cpu().long(), expected[name]), f"{name}: {x.tolist()}, expected {expected[name].tolist()}"
        else:
            assert str(x.dtype) == f"torch.{case.dtype}", f"{name}: {x.dtype}, expected {case.dtype}"
    accuracy.assert_accurate(floating, {name: expected[name] for name in floating}, case.function)
    if case.poison is not None:
        _check_other_segments(case, call, actual)


def _evaluate(call: Call, case: Case, poisoned: int | None = None) -> tuple[dict, dict, dict]:
    """The call's leaves, the gradients of its results, and its results with the gradients of the leaves that want one.

    poisoned: a segment whose operands and gradients are NaN or infinite.
    """
    make = Maker(case, stream=1)
    tensors = {name: _poisoned(x, name, call, case, poisoned) for name, x in call.inputs.items()}
    wanted = _wanted(list(tensors), case.options.get("requires", "all"))
    inputs = {name: x.detach().requires_grad_(name in wanted) for name, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN, so that an element nobody wrote shows
        outputs = call.function(**inputs)
        results = {name: x for name, x in outputs.items() if x.is_floating_point()}
        gradients = {name: _poisoned(make.gradient(x), name, call, case, poisoned) for name, x in results.items()}
        of_inputs = torch.autograd.grad(
            list(results.values()), [inputs[name] for name in wanted], list(gradients.values()), materialize_grads=True
        )  # fmt: skip
        torch.use_deterministic_algorithms(False)
    actual = {name: x.detach() for name, x in outputs.items()} | {f"d{name}": x for name, x in zip(wanted, of_inputs)}
    return inputs, gradients, actual


def _wanted(names: list[str], requires: str) -> list[str]:
    return {"all": names, "first": names[:1], "last": names[-1:], "all but first": names[1:] or names}[requires]


def _poisoned(x: Tensor, name: str, call: Call, case: Case, segment: int | None) -> Tensor:
    """x, written to in place, with NaN or infinities in the rows of a segment; an expanded gradient, whose rows are one, as it is."""
    if segment is not None and name in call.segments and x.numel() and x.stride(0):
        x[call.segments[name] == segment] = float(case.poison)
    return x


def _check_other_segments(case: Case, call: Call, clean: dict[str, Tensor]) -> None:
    num_segments = max((int(x.max()) + 1 for x in call.segments.values() if x.numel()), default=0)
    if num_segments == 0:
        return
    segment = case.seed % num_segments
    _, _, actual = _evaluate(call, case, segment)
    owners = call.segments | {f"d{name}": call.segments[name] for name in call.inputs if name in call.segments}
    for name in actual.keys() & owners.keys():
        others = owners[name] != segment
        kept = torch.equal(actual[name][others], clean[name][others])
        assert kept, f"{case.function}: {case.poison} in segment {segment} changes {name} of others"
