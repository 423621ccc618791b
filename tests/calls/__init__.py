"""Runs the call that a `Case` describes, and checks results and gradients against their models."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import accuracy
import torch
from cases import Case
from forms import unchanged
from torch import Tensor

from . import attention, din, jagged_ops, linear_compress, rows
from .maker import Call, Maker, lay_out

BUILDERS = {
    "jagged_attention": attention.jagged_attention,
    "target_attention": attention.target_attention,
    "din_attention": din.din_attention,
    "self_target_attention": attention.self_target_attention,
    "block_diagonal_attention": attention.block_diagonal_attention,
    "block_diagonal_attention_packed": attention.block_diagonal_attention_packed,
    "apply_rotary": attention.apply_rotary,
    "linear_compress": linear_compress.linear_compress,
    "jagged_dense_bmm": jagged_ops.jagged_dense_bmm,
    "jagged_jagged_bmm": jagged_ops.jagged_jagged_bmm,
    "jagged_softmax": jagged_ops.jagged_softmax,
    "jagged2_softmax": jagged_ops.jagged2_softmax,
    "jagged_jagged_bmm_jagged_out": jagged_ops.jagged_outer,
    "array_jagged_bmm_jagged_out": jagged_ops.array_jagged_bmm,
    "jagged_linear": jagged_ops.jagged_linear,
    "jagged_dense_add": rows.dense("jagged_dense_add"),
    "jagged_dense_mul": rows.dense("jagged_dense_mul"),
    "jagged_layer_norm": rows.jagged_layer_norm,
    "jagged_concat": rows.jagged_concat,
    "jagged_split": rows.jagged_split,
    "jagged_sum": jagged_ops.reduction("jagged_sum"),
    "jagged_mean": jagged_ops.reduction("jagged_mean"),
    "jagged_max": rows.jagged_max,
    "jagged_first": rows.part("jagged_first"),
    "jagged_last": rows.part("jagged_last"),
    "jagged_between": rows.jagged_between,
    "jagged_select": rows.jagged_select,
    "jagged_to_padded": rows.jagged_to_padded,
    "padded_to_jagged": rows.padded_to_jagged,
}


def check(case: Case) -> None:
    """Check the accuracy of results and gradients and, if the case has poison, that NaN or infinity
    in one segment changes no other.

    Raises:
        AssertionError: an error beyond its bound, another dtype or shape, a changed bit in another
            segment, a result or gradient of a row behind the last segment that is not 0, or an
            index tensor that was written to.
    """
    check_call(build(case), case)


def check_call(call: Call, case: Case, in_graph: bool = False) -> None:
    """`check` of a call of the case, which the caller may have changed. in_graph: as in
    `evaluate`."""
    inputs, gradients, actual = evaluate(call, case, in_graph=in_graph)
    has_equal_terms = case.options.get("values") in ("zeros", "equal rows") or case.options[
        "grad"
    ] in ("one number", "one row")
    with torch.no_grad(), accuracy.equal_terms() if has_equal_terms else nullcontext():
        expected = call.model(inputs, gradients)
    if has_equal_terms:
        # Equal numbers have equal roundings, which add up: only the largest error is a bound, not
        # the standard deviation.
        expected = {
            name: x if isinstance(x, Tensor) else x._replace(rms=x.error)
            for name, x in expected.items()
        }
    floating = {name: x for name, x in actual.items() if not isinstance(expected[name], Tensor)}
    for name, x in actual.items():
        if name not in floating:
            assert torch.equal(x.cpu().long(), expected[name]), (
                f"{name}: {x.tolist()}, expected {expected[name].tolist()}"
            )
        else:
            of_input = inputs.get(name.removeprefix("d"))  # a gradient's dtype is the input's
            dtype = getattr(torch, case.dtype) if of_input is None else of_input.dtype
            assert x.dtype == dtype, f"{name}: {x.dtype}, expected {dtype}"
    accuracy.assert_accurate(floating, {name: expected[name] for name in floating}, case.function)
    if case.poison is not None:
        _check_other_segments(case, call, actual)


def build(case: Case) -> Call:
    """The case's call."""
    make = Maker(case)
    call = BUILDERS[case.function](make, case.options, case.lengths)
    return dataclasses.replace(call, indices=make.indices)


def evaluate(
    call: Call, case: Case, poisoned: int | None = None, in_graph: bool = False
) -> tuple[dict, dict, dict]:
    """(inputs, gradients of the results, results and gradients of the inputs that require one),
    each by name.

    Rows behind the last segment are left out: they are NaN in operands and gradients, and must be 0
    in results and in their gradients.

    poisoned: the segment whose operands and gradients are NaN or infinite. in_graph: the results
    are those of a replayed CUDA graph.
    """
    make = Maker(case, stream=1)
    tensors = {name: _poisoned(x, name, call, case, poisoned) for name, x in call.inputs.items()}
    tensors = {
        name: _with_rows_behind(x, make) if name in call.rows else x for name, x in tensors.items()
    }
    wanted = _wanted(list(tensors), case.options.get("requires", "all"))
    inputs = {name: x.detach().requires_grad_(name in wanted) for name, x in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of operators that are not deterministic
        # torch.empty returns NaN, which shows elements that were not written
        torch.use_deterministic_algorithms(True, warn_only=True)
        with unchanged(*call.indices):
            with make.defaults():
                outputs = call.function(**inputs)
            results = {name: x for name, x in outputs.items() if x.is_floating_point()}
            gradients = {
                name: _poisoned(make.gradient(x), name, call, case, poisoned)
                for name, x in results.items()
            }
            for name in gradients.keys() & call.rows if make.behind else ():
                if gradients[name].stride(0):  # not expanded
                    gradients[name][-make.behind :] = float("nan")
            of_inputs = _gradients(results, wanted, inputs, gradients, make)
            if in_graph:
                # their graph has nodes of the default stream, also for the inputs
                outputs = results = of_inputs = None
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    outputs = call.function(**inputs)
                    of_inputs = _gradients(
                        {name: outputs[name] for name in gradients}, wanted, inputs, gradients, make
                    )
                graph.replay()
                torch.cuda.synchronize()
        torch.use_deterministic_algorithms(False)
    actual = {name: x.detach() for name, x in outputs.items()} | {
        f"d{name}": x for name, x in zip(wanted, of_inputs)
    }
    if make.behind:
        rows = call.rows | {f"d{name}" for name in call.rows}
        for name in actual.keys() & rows:
            assert not actual[name][-make.behind :].any(), (
                f"{case.function}: {name} of rows behind the last segment is not 0"
            )
        inputs, gradients, actual = (
            {name: x[: -make.behind] if name in rows else x for name, x in part.items()}
            for part in (inputs, gradients, actual)
        )
    return inputs, gradients, actual


def _gradients(
    results: dict, wanted: list[str], inputs: dict, gradients: dict, make: Maker
) -> Sequence[Tensor]:
    with make.defaults():
        return torch.autograd.grad(
            list(results.values()),
            [inputs[name] for name in wanted],
            list(gradients.values()),
            materialize_grads=True,
        )


def _with_rows_behind(x: Tensor, make: Maker) -> Tensor:
    if not make.behind:
        return x
    return lay_out(
        torch.cat([x, x.new_full((make.behind, *x.shape[1:]), float("nan"))]),
        make.options["layout"],
    )


def _wanted(names: list[str], requires: str) -> list[str]:
    return {
        "all": names,
        "first": names[:1],
        "last": names[-1:],
        "all but first": names[1:] or names,
    }[requires]


def _poisoned(x: Tensor, name: str, call: Call, case: Case, segment: int | None) -> Tensor:
    """Write NaN or infinity to a segment's rows of x, in place. An expanded gradient, whose rows
    share memory, is not changed."""
    if segment is not None and name in call.segments and x.numel() and x.stride(0):
        owners = call.segments[name]
        x[: len(owners)][owners == segment] = float(case.poison)
    return x


def _check_other_segments(case: Case, call: Call, clean: dict[str, Tensor]) -> None:
    num_segments = max((int(x.max()) + 1 for x in call.segments.values() if x.numel()), default=0)
    if num_segments == 0:
        return
    segment = case.seed % num_segments
    _, _, actual = evaluate(call, case, segment)
    owners = call.segments | {
        f"d{name}": call.segments[name] for name in call.inputs if name in call.segments
    }
    for name in actual.keys() & owners.keys():
        others = owners[name] != segment
        now, before = actual[name][others], clean[name][others]
        # a gradient is NaN where the result overflows
        kept = (now == before) | (now.isnan() & before.isnan())
        assert kept.all(), (
            f"{case.function}: {case.poison} in segment {segment} changes {name} of others"
        )
