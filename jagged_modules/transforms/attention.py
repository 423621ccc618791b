"""Attention of candidates to their user's keys and values, found in a captured graph.

It is one operator (scaled_dot_product_attention), or softmax(scale · q kᵀ + mask) v, as
nn.MultiheadAttention computes it if it returns its weights. Keys and values that are G[map] are
then read in place by `target_attention`; if the users' own queries attend to them too, by one
`self_target_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ..validation import MAX_HEAD_DIM
from .analysis import Analysis
from .calls import TO_SHAPE, Call, is_operator, positional
from .lineage import Lineage, Size, common, shape_of, size_of

aten = torch.ops.aten
KEEPS_VALUES = (aten.clone.default, aten.alias.default, aten.detach.default)
VIEWS_OF_MASKS = (
    *KEEPS_VALUES, *TO_SHAPE, aten.expand.default, aten.unsqueeze.default, aten.slice.Tensor
)  # fmt: skip
ZEROS = (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)


@dataclass
class TargetAttention:
    """An attention whose keys and values are G[map].

    Attributes:
        node: its result, `[B, H, Lq, D]` or with dimensions 0 and 1 as one, as all operands.
        query, key, value: operands; the key is transposed if `transposed`.
        hidden: `[B, T]`, which keys are hidden; visible ones if `hidden_is_visible`. None: all are
            visible.
        scale: of the scores.
        empty: the result of a query that sees no key: scaled_dot_product_attention gives 0, a
            softmax NaN.
        reads: pairs of a value and the operator of the captured graph that reads it, which will not
            be computed.
        lineage: of key and value.
        causal: whether later keys are hidden too; of an `own` alone.
        own: an attention of queries that are G[map] to the same keys and values.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    transposed: bool
    scale: float
    empty: float
    hidden: fx.Node | None = None
    hidden_is_visible: bool = False
    reads: set[tuple[fx.Node, fx.Node]] = field(default_factory=set)
    lineage: Lineage | None = None
    causal: bool = False
    own: TargetAttention | None = None
    products = ()

    @property
    def name(self) -> str:
        return "target_attention" if self.own is None else "self_target_attention"

    @property
    def inputs(self) -> list[fx.Node]:
        return [self.query, *self.operands]

    @property
    def operands(self) -> list[fx.Node]:
        """The operands whose bases are read."""
        return [self.key, self.value, *([] if self.hidden is None else [self.hidden])]


def find_attentions(
    graph: fx.Graph, analysis: Analysis, estimate: Callable[[Size], int]
) -> dict[fx.Node, TargetAttention]:
    """All attentions with keys and values of fewer than half as many users as there are candidates,
    by the node of their result."""
    found = {}
    for node in graph.nodes:
        match = _operator(node, estimate) or _softmax(node, estimate)
        if match is not None and _is_supported(match, analysis) and match.lineage is not None:
            if 2 * estimate(match.lineage.base_rows) <= estimate(match.lineage.rows):
                found[node] = match
    for node in graph.nodes if found else ():
        if node in analysis.lineages:
            own = _operator(node, estimate, takes_causal=True) or _softmax(node, estimate)
            for match in found.values():
                if own is not None and match.own is None and _reads_alike(own, match, analysis):
                    match.own = own
                    break
    return found


def _reads_alike(own: TargetAttention, match: TargetAttention, analysis: Analysis) -> bool:
    """Whether both attend to the same keys in the same way, `own` from queries that are G[map]."""
    # `empty` follows from `transposed`
    alike = "key", "value", "hidden", "hidden_is_visible", "transposed", "scale"
    if any(getattr(own, x) != getattr(match, x) for x in alike) or not _is_plain(own):
        return False
    if own.causal and own.query.meta["val"].shape[-2] != own.value.meta["val"].shape[-2]:
        return False  # torch aligns the first query with the first key
    assert match.lineage is not None
    wanted = replace(match.lineage, post=analysis.lineages[match.key].post)
    lineages = [analysis.lineages.get(x) for x in (match.key, own.node, own.query)]
    return all(x == wanted and x.base_rows == wanted.base_rows for x in lineages if x) and (
        None not in lineages
    )


def _is_supported(match: TargetAttention, analysis: Analysis) -> bool:
    """Whether the lineages fit. Sets `match.lineage`."""
    lineages = [analysis.lineages.get(x) for x in match.operands]
    own = analysis.lineages.get(match.node)
    if own is not None or any(
        x is None or x.dim != 0 or x.is_uniform or x.pre != 1 for x in lineages
    ):
        return False
    key, value, *hidden = [x for x in lineages if x is not None]
    if key.post != value.post or not key.post.is_Integer or any(x.is_folded for x in hidden):
        return False
    if not _is_plain(match):
        return False
    if len(match.query.meta["val"].shape) == 4 and key.post != 1:
        return False
    match.lineage = common([Lineage(x.maps, 0) for x in (key, value, *hidden)])
    return match.lineage is not None


def _is_plain(match: TargetAttention) -> bool:
    """Whether the operands have one dtype (softmax can convert) and batches that torch does not
    broadcast."""
    operands = match.query, match.key, match.value
    queries, keys, values = (shape_of(x.meta["val"])[:-2] for x in operands)
    dtypes = {x.meta["val"].dtype for x in (match.node, *operands)}
    return len(dtypes) == 1 and keys == values and keys in (queries, (*queries[:1], 1))


def find_unmasked(graph: fx.Graph, estimate: Callable[[Size], int]) -> list[TargetAttention]:
    """All attentions without masks, whatever their keys are."""
    matches = (_operator(node, estimate) or _softmax(node, estimate) for node in graph.nodes)
    return [x for x in matches if x is not None and x.hidden is None and _is_plain(x)]


def _operator(
    node: fx.Node, estimate: Callable[[Size], int], takes_causal: bool = False
) -> TargetAttention | None:
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    call = Call(node, {})
    query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    if call["dropout_p"] or (call["is_causal"] and not takes_causal) or call["enable_gqa"]:
        return None
    if not _is_dense(query, key, value):
        return None
    scale = (
        call["scale"] if call["scale"] is not None else 1 / math.sqrt(int(call.shape(query)[-1]))
    )
    reads, causal = {(key, node), (value, node)}, call["is_causal"]
    match = TargetAttention(node, query, key, value, False, scale, 0.0, reads=reads, causal=causal)
    return match if mask is None or _add_mask(match, mask, node, estimate) else None


def _softmax(node: fx.Node, estimate: Callable[[Size], int]) -> TargetAttention | None:
    """softmax(scores) v, where the scores are q kᵀ times numbers, plus a mask of 0 and -inf, or
    with keys set to -inf."""
    if node.target not in (aten.bmm.default, aten.matmul.default):
        return None
    weights, value = positional(node)[:2]
    softmax = _through(weights)
    if softmax.target is not aten.softmax.int:
        return None
    if softmax.args[1] not in (-1, softmax.meta["val"].dim() - 1) or not _has_one_use(softmax):
        return None
    scores, scale, masks = _through(softmax.args[0]), 1.0, []
    while _has_one_use(scores):
        call = Call(scores, {}) if is_operator(scores) else None
        if call is None:
            return None
        if scores.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(
            call["other"], (int, float)
        ):
            scale *= call["other"] if scores.target is aten.mul.Tensor else 1 / call["other"]
            scores = _through(call["self"])
        elif scores.target is aten.masked_fill.Scalar and call["value"] == -math.inf:
            masks.append((call["mask"], scores))
            scores = _through(call["self"])
        elif (
            scores.target is aten.add.Tensor
            and call["alpha"] == 1
            and isinstance(call["other"], fx.Node)
        ):
            masks.append((call["other"], scores))
            scores = _through(call["self"])
        else:
            break
    if (
        scores.target is aten.baddbmm.default
        and Call(scores, {})["beta"] == Call(scores, {})["alpha"] == 1
    ):
        masks.append((positional(scores)[0], scores))
        query, key = positional(scores)[1:3]
    elif scores.target in (aten.bmm.default, aten.matmul.default):
        query, key = positional(scores)[:2]
    else:
        return None
    if not _has_one_use(scores) or len(masks) > 1 or scale <= 0 or not _is_dense(query, key, value):
        return None
    match = TargetAttention(
        node, query, key, value, True, scale, math.nan, reads={(key, scores), (value, node)}
    )
    return match if not masks or _add_mask(match, masks[0][0], masks[0][1], estimate) else None


def _through(x: Any) -> Any:
    """The operand of copies. Dropout in eval mode is captured as one."""
    while isinstance(x, fx.Node) and x.target in KEEPS_VALUES:
        x = x.args[0]
    return x


def _has_one_use(x: fx.Node) -> bool:
    return len(x.users) == 1


def _is_dense(query: Any, key: Any, value: Any) -> bool:
    """Whether the operands have 3 or 4 dimensions and head dims that the kernels take."""
    values = [x.meta["val"] for x in (query, key, value)]
    widths = [values[0].shape[-1], values[2].shape[-1]]
    same = {x.dim() for x in values} in ({3}, {4}) and all(x.is_floating_point() for x in values)
    return same and all(isinstance(width, int) and width <= MAX_HEAD_DIM for width in widths)


# -- masks -----------------------------------------------------------------------------------------


def _add_mask(
    match: TargetAttention, mask: fx.Node, reader: fx.Node, estimate: Callable[[Size], int]
) -> bool:
    """Whether the mask hides keys of a row alike from all heads and queries. Then it becomes part
    of the match."""
    chain: list[fx.Node] = []
    source = _skip_views(mask, chain)
    visible = reader.target is aten.scaled_dot_product_attention.default
    if source.meta["val"].dtype != torch.bool:  # added to the scores: must be 0 or -inf
        if source.target is not aten.masked_fill.Scalar:
            return False
        call, visible = Call(source, {}), False
        is_bias = call["value"] == -math.inf and call["self"].target in ZEROS
        if not is_bias or call.shape(call["mask"]) != call.shape():
            return False
        source = _skip_views(call["mask"], chain)
    elif reader.target not in (aten.scaled_dot_product_attention.default, aten.masked_fill.Scalar):
        return False
    while source.target in (aten.bitwise_not.default, aten.logical_not.default):
        source, visible = _skip_views(source.args[0], chain), not visible
    if source.meta["val"].dim() != 2 or source.meta["val"].dtype != torch.bool:
        return False
    if not _hides_keys(match, source, chain, estimate):
        return False
    match.hidden, match.hidden_is_visible = source, visible
    match.reads.add((mask, reader))
    return True


def _skip_views(x: Any, chain: list[fx.Node]) -> Any:
    """The value that x is a view or copy of. The views are appended to `chain`."""
    while x.target in VIEWS_OF_MASKS:
        chain.append(x)
        x = x.args[0]
    return x


def _hides_keys(
    match: TargetAttention, source: fx.Node, chain: list[fx.Node], estimate: Callable[[Size], int]
) -> bool:
    """Whether the views `chain` of source give mask[b, h, q, t] = source[b, t] for all b, h, q, t.
    Runs them for two batches."""
    batch, keys = shape_of(source.meta["val"])
    scores = shape_of(match.query.meta["val"])[:-1]
    if not batch.is_Symbol:
        return False
    for rows in (2, 3):

        def size(x: Any, rows: int = rows) -> int:
            return estimate(x.subs({batch: rows}))

        numbers = torch.arange(rows * size(keys), device="cpu").view(rows, size(keys))
        result = _run(list(reversed(chain)), numbers, size)
        heads = [size(x) for x in scores]
        per_head = heads[0] // rows if len(heads) == 2 else heads[1]
        expected = numbers[:, None, None].expand(rows, per_head, heads[-1], -1)
        expected = expected.flatten(0, 1) if len(heads) == 2 else expected
        try:
            if not torch.equal(torch.broadcast_to(result, expected.shape), expected):
                return False
        except RuntimeError:
            return False
    return True


def _run(chain: list[fx.Node], numbers: torch.Tensor, size: Callable[[Any], int]) -> torch.Tensor:
    """The views of `chain`, one after another, of numbers."""
    for node in chain:
        if node.target in KEEPS_VALUES:
            continue
        args = map_arg(node.args[1:], lambda x: size(size_of(x.meta["val"])))
        target: Any = aten.reshape.default if node.target in TO_SHAPE else node.target
        numbers = target(numbers, *args)
    return numbers
