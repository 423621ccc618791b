"""Capture of a model as one functional graph of aten operators, with symbolic sizes."""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..scalars import check_kind
from .lineage import Size, size_of

LARGE_BATCHES = [2**i + j for i in range(10, 32) for j in (-1, 0, 1)]
MAP_NAME = "candidate_to_user"
BATCH_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default
# of inputs on a GPU, the conditions of its sizes by which torch chooses a kernel of cuDNN
CUDNN_SIZES = re.compile(r"<= (880801|65535)$")
COPIES_OF_CONSTANTS = torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.clone.default


class Example(NamedTuple):
    """A call of a model, with which it is captured and compared."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs by the names of forward's parameters."""
        bound = inspect.signature(self.model.forward).bind(*self.args, **self.kwargs)
        return dict(bound.arguments)


@dataclass
class Captured:
    """A captured model.

    Attributes:
        module: has the model's parameters and buffers under their names.
        graph: of the module. It stays when the module gets another one.
        example: of the capture.
        inputs: the placeholders of each entry of forward's inputs, by its name: see `named`.
        hints: sizes of the example, by symbol.
        labels: where each symbol is a size, for instance "history[0]".
    """

    module: fx.GraphModule
    graph: fx.Graph
    example: Example
    inputs: dict[str, list[fx.Node]]
    hints: dict[Size, int]
    labels: dict[Size, str]

    def add_map(self, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        """An input candidate_to_user of forward, with one entry for each row of `like`."""
        graph, value = self.graph, like.meta["val"]
        with graph.inserting_after(list(graph.find_nodes(op="placeholder"))[-1]):
            node = graph.placeholder(MAP_NAME)
        with value.fake_mode:
            node.meta["val"] = torch.empty((value.shape[0],), dtype=dtype, device=value.device)
        codegen: Any = graph._codegen
        info = codegen.pytree_info
        _, args, kwargs = self.example
        spec = pytree.tree_structure((args, {**kwargs, MAP_NAME: None}))
        codegen.pytree_info = info._replace(orig_args=[*info.orig_args, MAP_NAME], in_spec=spec)
        self.module._in_spec = spec  # pyright: ignore[reportAttributeAccessIssue]
        return node


def _tile(x: Tensor, dims: Sequence[int]) -> Tensor:
    """As `repeat`, of which there are rules."""
    return x.repeat([1] * (x.dim() - len(dims)) + list(dims))


def export(
    example: Example, dynamic_shapes: Any = None, replicated: Sequence[str] = ()
) -> torch.export.ExportedProgram:
    """Export the model, without its in-place writes. Attention stays one operator where the model
    calls it as one.

    The first dimension of each tensor is dynamic unless dynamic_shapes, in torch.export's format,
    says otherwise. The fused operators that nn.MultiheadAttention and nn.TransformerEncoder use in
    eval mode are off during the capture: they have no rules. So is cuDNN, whose batch norm is
    another operator, and the caller's autocast, whose casts would become part of the graph: it acts
    on the calls of the result, as on those of the model.
    """
    model, args, kwargs = example
    if dynamic_shapes is None:
        dynamic_shapes = _first_dims(example, replicated)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    settings = contextlib.ExitStack()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        settings.enter_context(torch.backends.cudnn.flags(enabled=False))
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            settings.enter_context(torch.autocast(device, enabled=False))
        root = _with_one_batch(model, replicated) if replicated else model
        exported = torch.export.export(
            root, args, kwargs, dynamic_shapes=dynamic_shapes
        ).run_decompositions({torch.ops.aten.tile.default: _tile})
    except Exception as error:
        raise ValueError(
            f"model must be one that torch.export captures, got {type(error).__name__}: {error}"
        ) from error
    finally:
        settings.close()
        torch.backends.mha.set_fastpath_enabled(fastpath)
    signature = exported.graph_signature
    written = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    if written:
        raise ValueError(
            "model must not write to its buffers or inputs, but forward writes to"
            f" {sorted(map(str, written.values()))}"
        )
    sizes = _first_sizes(example)
    rows = {x.size for x in sizes if x.name in replicated}
    batch = [x.guard for x in sizes if x.size in rows]
    normalises = bool(exported.graph.find_nodes(op="call_function", target=BATCH_NORM))
    branches = [
        guard
        for guard in getattr(exported, "_guards_code", [])
        if _is_branch(guard, batch) and not (normalises and CUDNN_SIZES.search(guard))
    ]
    if branches:
        raise ValueError(
            "model must compute the same for all sizes, but the capture holds only for"
            f" {', '.join(branches)}"
        )
    views = exported.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    if not all(_is_tile_list(node.args[0]) for node in views):
        raise ValueError(
            "model must not call as_strided: its result depends on the strides of its operand,"
            " which the result does not keep"
        )
    return exported


def captured_from(exported: torch.export.ExportedProgram, example: Example) -> Captured:
    """A graph with the model's parameters and buffers. example: that of `export`."""
    module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    # they compare inputs with the example, and wrap the attributes in one more call
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()
    _drop_assertions(module.graph)
    _read_numbers(module)
    hints, labels = dict[Size, int](), dict[Size, str]()
    names, inputs = _input_names(example), dict[str, list[fx.Node]]()
    for name, node in zip(names, module.graph.find_nodes(op="placeholder")):
        inputs.setdefault(name, []).append(node)
        # a KeyedJaggedTensor has several
        node.meta["input"] = name if names.count(name) == 1 else node.name
        if isinstance(node.meta.get("val"), torch.Tensor):
            for dim, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt) and size_of(size).is_Symbol:
                    hints[size_of(size)] = size.node.hint
                    labels.setdefault(size_of(size), f"{node.meta['input']}[{dim}]")
    return Captured(module, module.graph, example, inputs, hints, labels)


def _drop_assertions(graph: fx.Graph) -> None:
    """Remove the assertions that a size is at least 2. They are torch.export's own, for sizes that
    are no input's."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        condition = node.args[0]
        if (
            isinstance(condition, fx.Node)
            and condition.target is operator.ge
            and condition.args[1] == 2
        ):
            graph.erase_node(node)


def _read_numbers(module: fx.GraphModule) -> None:
    """Replace fills with a constant without dimensions, as `torch.tensor(-1e9)`, by fills with its
    number. torch.export has names of its own for constants of the code, unlike for buffers."""
    aten = torch.ops.aten
    fills: dict[Any, tuple[Any, int]] = {
        aten.masked_fill.Tensor: (aten.masked_fill.Scalar, 0),
        aten.where.self: (aten.where.ScalarOther, 1),
    }
    for node in module.graph.nodes:
        if node.target not in fills:
            continue
        target, position = fills[node.target]
        *given, value = node.args
        while isinstance(value, fx.Node) and value.target in COPIES_OF_CONSTANTS:
            value = value.args[0]
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            continue
        path, _, name = str(value.target).rpartition(".")
        constant = getattr(module.get_submodule(path), name)
        keeps_dtype = node.meta["val"].dtype == given[position].meta["val"].dtype
        if name.startswith("lifted_tensor_") and not constant.dim() and keeps_dtype:
            node.target, node.args = target, (*given, constant.item())


def named(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the inputs: tensors, KeyedJaggedTensors and values of other types. Their names
    are those of forward's parameters, with the keys, positions and fields that lead to an entry of
    a container: "features.user.age"."""
    entries: dict[str, Any] = {}

    def add(name: str, x: Any) -> Any:
        if name in entries:
            raise ValueError(f"inputs must have entries of different names, but two are {name!r}")
        entries[name] = x

    for name, x in inputs.items():
        _visit(add, name, x)
    return entries


def map_named(
    function: Callable[[Any], Any], inputs: dict[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """The inputs with the function of those entries that `names` has."""

    def mapped(name: str, x: Any) -> Any:
        return function(x) if name in names else x

    return {name: _visit(mapped, name, x) for name, x in inputs.items()}


def _visit(function: Callable[[str, Any], Any], name: str, x: Any) -> Any:
    """The input with the function of each entry's name and of the entry. Python's own containers
    take a tenth of the time that pytree's paths take, which eager calls would notice."""
    if isinstance(x, torch.Tensor):
        return function(name, x)
    if type(x) is dict:
        return {key: _visit(function, f"{name}.{key}", own) for key, own in x.items()}
    if type(x) in (list, tuple):
        return type(x)(_visit(function, f"{name}.{i}", own) for i, own in enumerate(x))
    return pytree.tree_map_with_path(
        lambda path, own: function(_name((pytree.MappingKey(name), *path)), own),
        x,
        is_leaf=is_keyed_jagged,
    )


def _name(path: Iterable[Any]) -> str:
    """Of an entry: the keys, positions and fields that lead to it."""
    fields = {pytree.MappingKey: "key", pytree.SequenceKey: "idx", pytree.GetAttrKey: "name"}
    return ".".join(str(getattr(step, fields[type(step)])) for step in path)


def _input_names(example: Example) -> list[str]:
    """The name of the entry for each leaf of the inputs."""
    model, args, kwargs = example
    positional = inspect.signature(model.forward).bind_partial(*args).arguments
    return [
        name for name, x in named({**positional, **kwargs}).items() for _ in pytree.tree_leaves(x)
    ]


def _first_dims(example: Example, replicated: Sequence[str]) -> Any:
    """dynamic_shapes in which the first dimension of each tensor is dynamic. KeyedJaggedTensors of
    `replicated` have one batch."""
    inputs = example.inputs
    # by identity: the lengths are tensors of their own
    keys = {
        id(x.lengths()): len(x.keys())
        for name, x in named(inputs).items()
        if name in replicated and is_keyed_jagged(x)
    }

    def dims(x: Any) -> Any:
        if id(x) in keys:
            return {0: keys[id(x)] * torch.export.Dim("batch", min=2)}
        return {0: torch.export.Dim.AUTO} if isinstance(x, torch.Tensor) and x.dim() else None

    return {name: dims_of(x, dims) for name, x in inputs.items()}


def dims_of(x: Any, dims: Callable[[Any], Any]) -> Any:
    """dynamic_shapes of an input, from those of its leaves, in the order of the leaves. Containers
    other than Python's are given as lists of their entries."""
    if isinstance(x, Mapping):
        return {key: dims_of(entry, dims) for key, entry in x.items()}
    if isinstance(x, (list, tuple)):
        entries = [dims_of(entry, dims) for entry in x]
        return type(x)(*entries) if hasattr(x, "_fields") else type(x)(entries)
    container = None if isinstance(x, torch.Tensor) else pytree.SUPPORTED_NODES.get(type(x))
    if container is None:
        return dims(x)
    return [dims_of(leaf, dims) for leaf in container.flatten_fn(x)[0]]


def _with_one_batch(model: nn.Module, replicated: Sequence[str]) -> nn.Module:
    """The model, with its own parts, for torch.export: all plain inputs with the rows of the
    `replicated` ones have one symbol for them. torch.export would find out only where an operator
    compares them, and otherwise compute with fractions of two symbols."""

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        symbols = [
            x
            for x in _first_sizes(Example(module, args, kwargs))
            if isinstance(x.size, torch.SymInt)
        ]
        batch = next((x.size for x in symbols if x.name in replicated), None)
        for x in symbols:
            if batch is not None and x.size.node.hint == batch.node.hint:
                torch._check(x.size == batch)

    root = object.__new__(type(model))
    vars(root).update(vars(model), _forward_pre_hooks=model._forward_pre_hooks.copy())
    vars(root)["_forward_pre_hooks_with_kwargs"] = model._forward_pre_hooks_with_kwargs.copy()
    root.register_forward_pre_hook(compare, with_kwargs=True)
    return root


class FirstSize(NamedTuple):
    """The first size of a tensor: the input that has it, its name in the guards of a capture, and
    its value."""

    name: str
    guard: str
    size: Any


def _first_sizes(example: Example) -> list[FirstSize]:
    """Of the tensors of all inputs but KeyedJaggedTensors."""
    entries = pytree.tree_flatten_with_path(example.inputs, is_leaf=is_keyed_jagged)[0]
    tensors = [(path, x) for path, x in entries if isinstance(x, torch.Tensor) and x.dim()]
    return [
        FirstSize(_name(path), f"L{pytree.keystr(path)}.size()[0]", x.shape[0])
        for path, x in tensors
    ]


def is_keyed_jagged(x: Any) -> bool:
    """Whether it is TorchRec's KeyedJaggedTensor, whose lengths have one row per key and sample.
    TorchRec need not be installed."""
    # torch.compile cannot iterate over the bases of Python's types
    plain = (torch.Tensor, dict, list, tuple, int, float, str, type(None))
    return not isinstance(x, plain) and any(
        kind.__name__ == "KeyedJaggedTensor" for kind in type(x).__mro__
    )


def by_lengths(x: Any) -> Any:
    """A KeyedJaggedTensor with lengths alone: it may have offsets too, or instead, as soon as they
    were read once. A graph has one of these forms."""
    if x.variable_stride_per_key() or x.offsets_or_none() is None:
        return x
    return type(x)(x.keys(), x.values(), x.weights_or_none(), lengths=x.lengths())


def _is_tile_list(x: Any) -> bool:
    """Whether x is the buffer of an attention's tiles, which has no rows of a model."""
    return str(x.target) == "jagged_kernels.tile_lists.default"


def _is_branch(guard: str, batch: Sequence[str]) -> bool:
    """Whether a guard of the capture is a choice that the model made by a size, such as
    `size > 20`.

    A guard of the batch alone is one unless it holds for all batches. Of the others, equations are
    conditions of the operators, such as equal sizes of operands, except for remainders other than
    0. Comparisons with 0, 1 and 2 are torch.export's own. batch: the names in guards of the sizes
      that are the batch.
    """
    for size in batch:
        guard = guard.replace(size, "batch")
    if "L[" not in guard and "batch" in guard:
        return not _holds_for_every_batch(guard)
    comparison = re.search(r"(!=|<=?|>=?)\s*(.+)$", guard)
    if comparison is None:
        return "%" in guard and not guard.endswith("== 0")
    return "%" in guard or comparison[1].startswith("<") or comparison[2] not in ("0", "1", "2")


def _holds_for_every_batch(guard: str) -> bool:
    """Whether a guard, in which "batch" is the only name, holds for 3 to 1024, and up to 2³¹ for
    powers of two and their neighbours."""
    code = compile(guard, "guard", "eval")
    try:
        return all(
            eval(code, {"max": max, "min": min, "batch": size})
            for size in (*range(3, 1025), *LARGE_BATCHES)
        )
    except (NameError, ArithmeticError):  # another function of torch's; a division by zero
        return False


def evaluate(size: Size, hints: Mapping[Size, int], unknown: int) -> int:
    """The value of a size, with `unknown` for symbols without a hint."""
    symbols: Any = size.free_symbols
    values: Any = {symbol: hints.get(symbol, unknown) for symbol in symbols}
    return int(size.subs(values))


def example_of(model: nn.Module, example_inputs: Any) -> Example:
    """The inputs, without gaps between rows: torch.export would take strides of the example for
    conditions of the model. Raises as `fuse_broadcasts`."""

    def dense(x: Any) -> Any:
        if is_keyed_jagged(x):
            return by_lengths(x)
        return x.contiguous() if isinstance(x, torch.Tensor) and x.layout == torch.strided else x

    check_kind("model", model, nn.Module, "an nn.Module")
    training = [name or "the model" for name, module in model.named_modules() if module.training]
    if training:
        raise ValueError(f"model must be in eval mode, got {training[0]} in training mode")
    if example_inputs is None:
        raise ValueError(
            "example_inputs must be the inputs of forward, which the capture of the model needs,"
            " got None"
        )
    args, kwargs = example_inputs, dict[str, Any]()
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    if isinstance(args, torch.Tensor) or not isinstance(args, (tuple, list)):
        raise TypeError(
            "example_inputs must be a tuple of inputs or a dict of them by name, got"
            f" {type(example_inputs).__name__}"
        )
    given = pytree.tree_map(dense, (tuple(args), kwargs), is_leaf=is_keyed_jagged)
    return Example(model, *given)
