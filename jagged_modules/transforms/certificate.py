"""Checks of a fused model against its original on example inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from .bags import num_rows, select_rows
from .calls import flat
from .capture import Example, map_named, named

# The model and its fused form round differently. Roundings of n operators add up like a random
# walk, to sqrt(n) eps of the largest element. The largest of many elements has several times as
# much.
ROUNDINGS = 8
# Results that are much smaller than the terms of their sums differ by more: by what they change if
# the model's parameters change by eps of themselves, up or down at random, tried so many times.
TRIES = 8


def coarsest_eps(graph: fx.Graph) -> float:
    """The largest eps of the dtypes of a captured graph's values: results in float32 may come from
    bfloat16."""
    values = [
        x
        for node in graph.nodes
        for x in flat(node.meta.get("val"))
        if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return max((torch.finfo(x.dtype).eps for x in values), default=0.0)


def certify(
    example: Example, fused: fx.GraphModule, names: tuple[str, ...], eps: float = 0.0
) -> str:
    """Compare both on the example inputs. A sentence for the report; ValueError if results differ
    by more than rounding. eps: of the coarsest dtype that is computed in.

    With request_only (`names` of entries of the inputs), the example's first rows become users, of
    which each has several candidates or none. Then the rows of one user are replaced by other rows
    of the example, which should change the results of this user's candidates and of no other.
    Numbers that the example does not have may be out of a model's range: an input in floating point
    may hold ids, counts, probabilities or masks.
    """
    model, args, kwargs = example
    roundings = ROUNDINGS * math.sqrt(sum(node.op == "call_function" for node in fused.graph.nodes))
    with torch.no_grad():
        if not names:
            found = _seeded(fused, args, kwargs)
            error = _compare(partial(_seeded, model, args, kwargs), model, found, roundings, eps)
            return f"results equal on the example inputs, largest relative difference {error:.1e}"
        given = example.inputs
        rows = num_rows(named(given)[names[0]])[0]
        num_users = max(rows // 2, 1)
        # with more than two, the last one has no candidate
        chosen = num_users if num_users < 3 else num_users - 1
        users = torch.arange(rows, device="cpu") * 7 % chosen
        run, found = _both(model, fused, _of_rows(given, names, range(num_users)), names, users)
        error = _compare(run, model, found, roundings, eps)
        other = _other_row(given, names, rows)
        changes = "example_inputs have the rows of one user only, so no others were tried"
        if other is not None:
            changed = _of_rows(given, names, [other, *range(1, num_users)])
            run, found_after = _both(model, fused, changed, names, users)
            error = max(error, _compare(run, model, found_after, roundings, eps))
            own, others = _changed_rows(found, found_after, users == 0)
            changes = (
                f"other rows of one user change {own} of its {int((users == 0).sum())} candidates"
                f" and {others} of {int((users != 0).sum())} others"
            )
    return (
        f"results equal for {rows} candidates of {num_users} users, largest relative difference"
        f" {error:.1e}; {changes}"
    )


def _of_rows(given: dict[str, Any], names: tuple[str, ...], rows: Sequence[int]) -> dict[str, Any]:
    """The inputs, with these rows of those that `names` has."""
    return map_named(lambda x: select_rows(x, torch.tensor(rows, device="cpu")), given, names)


def _other_row(given: dict[str, Any], names: tuple[str, ...], rows: int) -> int | None:
    """The last row of the example that is not as the first one."""

    def leaves(row: int) -> list[Any]:
        one = named(_of_rows(given, names, [row]))
        return pytree.tree_leaves([one[name] for name in names])

    first = leaves(0)
    return next(
        (row for row in range(rows - 1, 0, -1) if not all(map(_are_equal, first, leaves(row)))),
        None,
    )


def _are_equal(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, Tensor) else x == y


def _changed_rows(before: Any, after: Any, own: Tensor) -> tuple[int, int]:
    """The numbers of candidates whose results differ, of those of one user and of others."""
    changed = torch.zeros_like(own)
    for x, y in zip(pytree.tree_leaves(before), pytree.tree_leaves(after)):
        if isinstance(x, Tensor) and x.shape[:1] == own.shape:
            differ = (x != y) & ~((x != x) & (y != y))  # NaN that stays NaN is no change
            changed |= differ.reshape(len(differ), -1).any(1).cpu()
    return int((changed & own).sum()), int((changed & ~own).sum())


def _both(
    model: nn.Module,
    fused: fx.GraphModule,
    shared: dict[str, Any],
    names: tuple[str, ...],
    users: Tensor,
) -> tuple[Callable[..., Any], Any]:
    """What calls the model with replicated rows, and the results of the fused model."""
    replicated = map_named(lambda x: select_rows(x, users), shared, names)
    device = next(x.device for x in pytree.tree_leaves(shared) if isinstance(x, Tensor))
    found = _call(fused, {**shared, "candidate_to_user": users.to(device)})
    return partial(_call, model, replicated), found


def _seeded(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    parameters: dict[str, Tensor] | None = None,
) -> Any:
    """The results, with the same random numbers in each call. parameters: in place of the
    module's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return functional_call(module, parameters or {}, tuple(args), kwargs)


def _call(
    module: nn.Module, inputs: dict[str, Any], parameters: dict[str, Tensor] | None = None
) -> Any:
    kinds = inspect.signature(module.forward).parameters
    positional = [x for x in inputs if kinds[x].kind is not inspect.Parameter.KEYWORD_ONLY]
    others = {name: x for name, x in inputs.items() if name not in positional}
    return _seeded(module, [inputs[x] for x in positional], others, parameters)


def _compare(
    run: Callable[..., Any], model: nn.Module, found: Any, roundings: float, eps: float
) -> float:
    """The largest `_difference` from the results of run(). ValueError if it is more than rounding.
    run: calls the model, also with other parameters."""
    largest = 0.0
    expected, found = pytree.tree_leaves(run()), pytree.tree_leaves(found)
    for position, (x, y) in enumerate(zip(expected, found)):
        if not isinstance(x, Tensor):
            continue  # a constant of the capture
        if x.shape != y.shape or x.dtype != y.dtype:
            raise ValueError(
                f"output {position} must be {list(x.shape)} {x.dtype}, got {list(y.shape)}"
                f" {y.dtype} from the fused model"
            )
        error, unit = _difference(x, y), 0.0
        if x.is_floating_point():
            unit = max(torch.finfo(x.dtype).eps, eps)
        allowed = roundings * unit
        if allowed < error < math.inf:
            tries = [run(_rounded(model, unit, seed)) for seed in range(TRIES)]
            changes = torch.stack([pytree.tree_leaves(z)[position] - x for z in tries])
            change = changes[:, x.isfinite()].float().square().mean().sqrt()
            allowed = max(allowed, ROUNDINGS * float(change) / _scale(x))
        if not error <= allowed:
            raise ValueError(
                f"output {position} of the fused model must equal the model's within {allowed:.1e},"
                f" got a difference of {error:.1e}"
            )
        largest = max(largest, error)
    return largest


def _difference(x: Tensor, y: Tensor) -> float:
    """The largest, relative to the largest element of x; infinity if integers differ, or where x is
    not finite."""
    if not x.is_floating_point():
        return 0.0 if torch.equal(x, y) else math.inf
    finite = x.isfinite()
    if not torch.equal(x[~finite].nan_to_num(), y[~finite].nan_to_num()):
        return math.inf
    return float((x - y)[finite].abs().max()) / _scale(x) if finite.any() else 0.0


def _scale(x: Tensor) -> float:
    """The largest finite element of x, at least a number that divides."""
    finite = x[x.isfinite()].abs()
    return max(float(finite.max()) if finite.numel() else 0.0, 1e-30)


def _rounded(model: nn.Module, eps: float, seed: int) -> dict[str, Tensor]:
    """The model's parameters, each element changed by eps of itself, up or down."""
    generator = torch.Generator().manual_seed(seed)

    def rounded(x: Tensor) -> Tensor:
        signs = torch.randint(2, x.shape, generator=generator, device="cpu") * 2 - 1
        return x * (1 + eps * signs.to(x))

    floats = ((name, x) for name, x in model.named_parameters() if x.is_floating_point())
    return {name: rounded(x) for name, x in floats}
