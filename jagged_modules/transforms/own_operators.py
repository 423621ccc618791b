"""Rules for this project's own operators, and attention of candidates to their user's keys found in
them.

The rows of a dense batch `[B, n, E]` are segments of equal length: their offsets are arange(B + 1)
* n. Attention computes each segment by itself. So if queries, keys and values are G[map], it moves.
If only keys and values are, `target_attention` reads them in place. Offsets that the graph does not
make in this way say nothing about the segments, and keep the operator.

jagged_linear, jagged_layer_norm and JaggedMLP are captured as aten operators, which have rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
from jagged_kernels.attention.params import Arguments, unpack
from torch import fx

from .analysis import Analysis
from .calls import Call, Moved, equal_segments, rule
from .lineage import Lineage, Size, common
from .runtime import attend_equal_segments

ATTENTIONS = ("jagged_modules.attention_cpu.default", "jagged_kernels.attention.default")
LINEAR_COMPRESS = "jagged_kernels.linear_compress.default"


@dataclass(frozen=True)
class SegmentAttention:
    """Attention of candidates' queries to keys and values that are G[map], in segments of equal
    length.

    Attributes:
        node: of the operator, with its result and its log-sum-exp.
        query: its queries.
        operands: key and value, whose bases are read.
        reads: as of `TargetAttention`.
        options: the other arguments of `attend_equal_segments`.
        lineage: of key and value.
    """

    node: fx.Node
    query: fx.Node
    operands: tuple[fx.Node, fx.Node]
    reads: set[tuple[fx.Node, fx.Node]]
    options: dict[str, Any]
    lineage: Lineage
    name = "target_attention"
    products = ()

    @property
    def inputs(self) -> list[fx.Node]:
        return [self.query, *self.operands]


def find_segment_attentions(
    graph: fx.Graph, analysis: Analysis, estimate: Callable[[Size], int]
) -> dict[fx.Node, SegmentAttention]:
    """All such attentions without masks, with fewer than half as many users as there are
    candidates, by their node."""
    found = {}
    for node in graph.nodes:
        if str(node.target) not in ATTENTIONS or node in analysis.lineages:
            continue
        if any(user.args[1] != 0 for user in node.users):
            continue
        call = Call(node, analysis.lineages)
        attention = _attention_call(call)
        options, lineage = _options(attention), _of_segments(call, attention, "kv")
        if options is None or lineage is None or options["mask"] is not None:
            continue
        if call.lineage(attention.q) is not None:
            continue
        if 2 * estimate(lineage.base_rows) <= estimate(lineage.rows):
            keys = attention.k, attention.v
            reads = {(x, node) for x in keys}
            found[node] = SegmentAttention(node, attention.q, keys, reads, options, lineage)
    return found


def _attention_call(call: Call) -> Any:
    """An `AttentionCall` with nodes instead of tensors."""
    return unpack(*(call[name] for name in Arguments._fields))[0]


def _options(call: Any) -> dict[str, Any] | None:
    """The arguments of `attend_equal_segments` besides the operands. None if segments differ
    otherwise than by their rows."""
    segments, params = call.segments, call.params
    queries, keys = equal_segments(segments.q_offsets), equal_segments(segments.kv_offsets)
    if segments.q_shared or segments.kv_shared or params.batch_invariant:
        return None
    if queries is None or keys is None or queries[0] != keys[0]:
        return None
    if any(isinstance(x, fx.Node) for x in params):  # numbers of targets, scales, a bias
        return None
    return dict(
        scale=params.scale,
        activation=params.activation,
        mask=None if params.mask is None else list(params.mask),
        output_scale=params.output_scale,
        implementation=params.implementation,
        q_rows=queries[1],
        kv_rows=keys[1],
    )


def _of_segments(call: Call, attention: Any, names: str) -> Lineage | None:
    """The common lineage of operands, whose rows are segments of the lengths that the offsets
    say."""
    lineages = []
    for name in names:
        offsets = attention.segments.q_offsets if name == "q" else attention.segments.kv_offsets
        own, segments = call.lineage(getattr(attention, name)), equal_segments(offsets)
        if own is None or own.is_uniform or segments is None:
            return None
        number, length = segments
        if (own.dim, own.pre, own.post, own.rows) != (0, 1, length, number):
            return None
        lineages.append(Lineage(own.maps, 0))
    return common(lineages)


@rule(*ATTENTIONS)
def attention(call: Call) -> Moved | None:
    """Each segment is computed by itself. Without the log-sum-exp, which only a backward reads."""
    own = _attention_call(call)
    options, lineage = _options(own), _of_segments(call, own, "qkv")
    if options is None or lineage is None or any(user.args[1] != 0 for user in call.node.users):
        return None
    return Moved(
        replace(lineage, post=sympy.Integer(options["q_rows"])),
        options,
        target=attend_equal_segments,
    )


@rule(LINEAR_COMPRESS)
def linear_compress(call: Call) -> Moved | None:
    """Each candidate is computed by itself, from its embedding and its rows of the shared levels,
    which are the same for all."""
    *shared, finest = call["embeddings"]
    given = [
        *call["weights"],
        *shared,
        *(x for x in (*call["orders"], *call["offsets"]) if x is not None),
    ]
    lineages = [call.lineage(x) for x in (finest, *call["indices"])]
    if any(x is None or x.dim or x.is_folded for x in lineages):
        return None
    if any(call.lineage(x) for x in given) or len(given) > 2 * len(shared) + 1:
        return None
    lineage = common([x for x in lineages if x])
    return lineage and Moved(lineage)
