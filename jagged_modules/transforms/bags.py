"""Inputs of the caller's that are TorchRec KeyedJaggedTensors: their embedding bags run on the
users' rows.

Replicating a KeyedJaggedTensor repeats segments, so its values are no G[map]. But a bag's sum
depends on its own segment alone. All operators that read nothing but such an input (offsets from
lengths, values by key, the bags) run on the users' input, and the bags' results are G[map].
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..scalars import check_equal
from .calls import Call, first_of, is_tensor, positional
from .capture import MAP_NAME, Captured, by_lengths, is_keyed_jagged, named
from .lineage import Lineage, Map, Size, shape_of

aten = torch.ops.aten
BAGS = (aten.embedding_bag.padding_idx, aten.embedding_bag.default)
ASSERTIONS = (aten._assert_tensor_metadata.default, aten._assert_scalar.default)


@dataclass(frozen=True)
class Bags:
    """The embedding bags of inputs of the caller's.

    Attributes:
        leaves: placeholders of the inputs.
        nodes: operators that read nothing else.
        results: those of `nodes` that are the results of bags, `[C, D]`.
        lengths: a placeholder of lengths, and its number of keys.
    """

    leaves: frozenset[fx.Node]
    nodes: frozenset[fx.Node]
    results: frozenset[fx.Node]
    lengths: tuple[fx.Node, int]


def find_bags(captured: Captured, names: list[str]) -> Bags | None:
    """The bags of these inputs, None without such inputs. ValueError if an input is used other than
    by embedding bags."""
    if not names:
        return None
    leaves = {x: name for name in names for x in captured.inputs[name] if is_tensor(x)}
    inputs: dict[fx.Node, str] = dict(leaves)
    constants, results, lengths = set[fx.Node](), set[fx.Node](), None
    for node in captured.graph.nodes:
        read = [
            x
            for x in node.all_input_nodes
            if x not in constants and (x in inputs or not is_size(x))
        ]
        if node.op == "get_attr" or (
            node.op == "call_function" and constants.issuperset(node.all_input_nodes)
        ):
            constants.add(node)
        elif node.op == "call_function" and read and all(x in inputs for x in read):
            if node.target is operator.getitem and read[0].target in BAGS:
                lengths = _check_bag(read[0], inputs[read[0]], leaves)
                results.add(node)
            else:
                inputs[node] = inputs[read[0]]
    for node, name in inputs.items():
        for user in node.users:
            if (
                not is_size(node)
                and not is_size(user)
                and user not in inputs
                and user not in results
                and user.target not in ASSERTIONS
            ):
                raise ValueError(
                    f"request_only input {name!r} must be read by embedding bags only, but"
                    f" {user.target} reads it too"
                )
    if lengths is None:
        raise ValueError(
            f"request_only inputs {names} must be read by embedding bags, but there are none"
        )
    given = frozenset(leaves)
    return Bags(given, frozenset({*inputs, *results}) - given, frozenset(results), lengths)


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number or a comparison of numbers."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, int))


def _check_bag(bag: fx.Node, name: str, leaves: dict[fx.Node, str]) -> tuple[fx.Node, int]:
    """The lengths of a bag, and their number of keys. ValueError unless bag b of the result reads
    segment b of one key of the input."""
    call = Call(bag, {})
    key, offsets = _item(call["offsets"], aten.unbind.int)
    joined = _cat(offsets)
    view = None
    if joined is not None and joined[1].target is aten.cumsum.default:
        view = positional(joined[1])[0]
    lengths = positional(view)[0] if view is not None and view.target is aten.view.default else None
    values = [x for x in (call["indices"], call["per_sample_weights"]) if x is not None]
    splits = [_item(x, aten.split_with_sizes.default) for x in values]
    matches = lengths in leaves and bool(call["include_last_offset"])
    for own, split in splits:
        whole, sizes = positional(split)[:2] if split is not None else (None, [])
        matches &= own == key and whole in leaves and _sums_by_key(sizes, lengths)
    if not matches or lengths is None or view is None:
        raise ValueError(
            f"request_only input {name!r} must be read by the embedding bags of an"
            f" EmbeddingBagCollection, got {bag.target}"
        )
    return lengths, int(shape_of(view.meta["val"])[0])


def _item(x: Any, target: Any) -> tuple[int, fx.Node | None]:
    """(index, call) if x is one result of a call of the operator."""
    matches = (
        isinstance(x, fx.Node)
        and x.target is operator.getitem
        and positional(x)[0].target is target
    )
    return (positional(x)[1], positional(x)[0]) if matches else (-1, None)


def _cat(unbind: fx.Node | None) -> list[Any] | None:
    """[zeros, sums] if the operand of unbind is their concatenation along the last dimension."""
    cat = positional(unbind)[0] if unbind is not None else None
    parts = []
    if cat is not None and cat.target is aten.cat.default and positional(cat)[1:] in ([-1], [1]):
        parts = positional(cat)[0]
    return parts if len(parts) == 2 and parts[0].target is aten.new_zeros.default else None


def _sums_by_key(sizes: list[Any], lengths: Any) -> bool:
    """Whether sizes[k] is the sum of the lengths of key k."""
    for key, size in enumerate(sizes):
        number = None
        if isinstance(size, fx.Node) and size.target is aten.item.default:
            number = positional(size)[0]
        index, unbind = _item(number, aten.unbind.int)
        total = positional(unbind)[0] if unbind is not None else None
        if index != key or total is None or total.target is not aten.sum.dim_IntList:
            return False
        summed, dims = positional(total)[:2]
        if dims != [1] or positional(summed)[0] is not lengths:
            return False
    return True


def with_checked_entries(
    fused: fx.GraphModule,
    example: Mapping[str, Any],
    names: Sequence[str],
    arguments: Sequence[str],
) -> None:
    """Let `fused` refuse containers with other entries than the example's, KeyedJaggedTensors with
    other keys, which the graph has by position, and another number of samples: those of `names`
    (request_only) have one per user, others that have one per row in the example one per candidate.
    example: its entries by name. arguments: of forward, by position."""
    keys = {name: list(x.keys()) for name, x in example.items() if is_keyed_jagged(x)}
    containers = {
        argument: _inside(argument, example) for argument in arguments if argument not in example
    }
    if not keys and not containers:
        return
    rows = num_rows(example[names[0]])[0] if names else 0
    sampled = [name for name in keys if name in names or example[name].stride() == rows]
    of_graph = type(fused).forward

    @functools.wraps(of_graph)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = named(dict(zip(arguments, args)) | kwargs)
        for argument, expected in containers.items():
            own = _inside(argument, given)
            check_equal(argument, "have the entries of example_inputs", expected, own)
        for name, expected in keys.items():
            x: Any = given.get(name)
            if not is_keyed_jagged(x) or list(x.keys()) != expected:
                found = list(x.keys()) if is_keyed_jagged(x) else type(x).__name__
                raise ValueError(
                    f"{name} must be a KeyedJaggedTensor with the keys of example_inputs,"
                    f" {expected}, got {found}"
                )
        for name in () if torch.compiler.is_compiling() else sampled:
            row, owner = "candidate", MAP_NAME
            if name in names:
                row, owner = "user", names[0]
            numbers = num_rows(given.get(owner))[:1]
            if numbers:
                check_equal(name, f"have one sample per {row}", numbers[0], given[name].stride())
        if any(given[name].offsets_or_none() is not None for name in keys):
            args, kwargs = pytree.tree_map(
                lambda x: by_lengths(x) if is_keyed_jagged(x) else x,
                (args, kwargs),
                is_leaf=is_keyed_jagged,
            )
        return of_graph(self, *args, **kwargs)

    type(fused).forward = forward


def _inside(argument: str, entries: Iterable[str]) -> list[str]:
    """The names of the entries of an argument."""
    return sorted(name for name in entries if name.partition(".")[0] == argument)


# -- KeyedJaggedTensors in examples ----------------------------------------------------------------


def num_rows(x: Any) -> list[int]:
    """The numbers of rows of the tensors of an input, or of samples of a KeyedJaggedTensor."""
    if is_keyed_jagged(x):
        return [x.stride()]
    return [len(tensor) for tensor in pytree.tree_leaves(x) if isinstance(tensor, Tensor)]


def select_rows(x: Any, rows: Tensor) -> Any:
    """Rows of a tensor, or samples of a KeyedJaggedTensor."""
    if not is_keyed_jagged(x):
        return x[rows.to(x.device)]
    rows = rows.to(x.lengths().device)
    lengths = x.lengths().view(len(x.keys()), -1)
    starts = (x.lengths().cumsum(0) - x.lengths()).view_as(lengths)[:, rows].flatten()
    chosen = lengths[:, rows].flatten()
    first = (chosen.cumsum(0) - chosen).repeat_interleave(chosen)
    index = starts.repeat_interleave(chosen) + torch.arange(len(first), device=first.device) - first
    weights = x.weights_or_none()
    return type(x)(
        x.keys(), x.values()[index], None if weights is None else weights[index], lengths=chosen
    )


@dataclass(frozen=True)
class Batch:
    """Inputs that the caller of the captured model replicates.

    Attributes:
        map: the input candidate_to_user.
        users: tensors of which the new graph takes one row per user, with their names.
        candidates: other inputs with one row per candidate, with their names.
        bags: embedding bags of KeyedJaggedTensors of which the new graph takes one sample per user.
        rows: the number of candidates.
    """

    map: fx.Node
    users: dict[fx.Node, str]
    candidates: dict[fx.Node, str]
    bags: Bags | None
    rows: Size

    def lineages(self, num_users: Size) -> dict[fx.Node, Lineage]:
        """Each of the users' inputs and bags, as the captured graph sees it."""
        bags = self.bags.results if self.bags else ()
        values = [*self.users, *bags, *(positional(x)[0] for x in bags)]
        found: dict[fx.Node, Lineage] = {}
        for x in values:
            rows = shape_of(first_of(x.meta["val"]))[0]
            found[x] = Lineage((Map("index", self.map, 0, num_users, rows),), 0)
        return found

    def offsets(self, given: Mapping[str, Any]) -> frozenset[str]:
        """Names of the candidates' inputs that are offsets of bags of one id. given: the inputs of
        an example."""
        entries = named(given)
        read = {
            Call(x, {})["offsets"]
            for node in self.candidates
            for x in node.users
            if x.target in BAGS
        }
        return frozenset(
            name
            for node, name in self.candidates.items()
            if node in read and entries[name].tolist() == list(range(len(entries[name])))
        )
