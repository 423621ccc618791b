"""DIN's attention in plain torch, with bounded memory. The CPU path.

Pairs are computed in chunks of at most CHUNK, or of one candidate's events if those are more. The
GEMMs of a chunk are over all of its pairs; the backward computes a chunk's hidden units again.
Segments with equal numbers of candidates and of events are computed together. Pairs that a mask
hides are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jagged_kernels.common.autograd import refuse_derivative, refuse_twice
from jagged_kernels.din.results import empty_gradients, joined_moments
from jagged_kernels.schedule.cost import MaskParams
from torch import Tensor
from torch.nn.functional import linear, pad

from ..masks import AttentionMask, is_visible
from ..segments import are_single
from .buckets import Rows, compute_dtype, groups
from .din_units import Kept, Units
from .one_query import bags, chunks, segment_softmax
from .operators import host_operator

CHUNK = 4096  # pairs: their hidden units stay in the processor's cache
MASKED_CHUNK = 16  # chunks of pairs, of which a mask may hide most, at a time


class Chunk(NamedTuple):
    """S segments of C candidates and N events: indices of their rows, and how many of each. Pairs
    are in the order of segments, candidates and events."""

    q_rows: Tensor
    kv_rows: Tensor
    shape: tuple[int, int, int]

    def of_q(self, x: Tensor) -> Tensor:
        """Rows of candidates, as operands of `of_pairs`."""
        s, c, _ = self.shape
        return x.view(s, c, 1, -1)

    def of_k(self, x: Tensor) -> Tensor:
        """Rows of events, as operands of `of_pairs`."""
        s, _, n = self.shape
        return x.view(s, 1, n, -1)

    def of_pairs(self, x: Tensor) -> Tensor:
        """Rows of pairs `[P, width]` or `[P]`."""
        return x.view(*self.shape, -1)

    def over_events(self, x: Tensor) -> Tensor:
        """The sums of `of_pairs` for each candidate."""
        return x.sum(2).flatten(0, 1)

    def over_candidates(self, x: Tensor) -> Tensor:
        """The sums of `of_pairs` for each event."""
        return x.sum(1).flatten(0, 1)

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Of scores `[P]`, and their log-sum-exp for each candidate."""
        scores = scores.view(self.shape)
        return scores.softmax(2).flatten(), scores.logsumexp(2).flatten()

    def weighted(self, p: Tensor, v: Tensor) -> Tensor:
        """Σ p v for each candidate."""
        s, _, n = self.shape
        return (p.view(self.shape) @ v.view(s, n, -1)).flatten(0, 1)

    def of_weights(self, do: Tensor, v: Tensor) -> Tensor:
        """The gradient of p: do · v of each pair."""
        s, c, n = self.shape
        return (do.view(s, c, -1) @ v.view(s, n, -1).mT).flatten()

    def of_values(self, p: Tensor, do: Tensor) -> Tensor:
        """The gradient of v: Σ p do for each event."""
        s, c, _ = self.shape
        return (p.view(self.shape).mT @ do.view(s, c, -1)).flatten(0, 1)


class Single(NamedTuple):
    """Adjacent candidates, each with events of its own: segments of one candidate, or under a mask
    the events that each candidate sees. Pairs are events, those of candidate i from offsets[i] on,
    and `segment` has their candidates. Methods as in Chunk."""

    q_rows: slice
    kv_rows: slice | Tensor
    offsets: Tensor
    segment: Tensor

    def of_q(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.segment)

    def of_k(self, x: Tensor) -> Tensor:
        return x

    def of_pairs(self, x: Tensor) -> Tensor:
        return x.view(len(self.segment), -1)

    def over_events(self, x: Tensor) -> Tensor:
        return bags(x, self.offsets)

    def over_candidates(self, x: Tensor) -> Tensor:
        return x

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        p, lse = segment_softmax(scores[:, None].clone(), self.offsets, self.segment)
        return p.flatten(), lse.flatten()

    def weighted(self, p: Tensor, v: Tensor) -> Tensor:
        return bags(v, self.offsets, p)

    def of_weights(self, do: Tensor, v: Tensor) -> Tensor:
        return (self.of_q(do) * v).sum(1)

    def of_values(self, p: Tensor, do: Tensor) -> Tensor:
        return self.of_q(do).mul_(p[:, None])


def _chunks(segments: list[Tensor | None], mask: list[int] | None) -> Iterator[Chunk | Single]:
    q_offsets, kv_offsets, num_targets = segments
    assert q_offsets is not None and kv_offsets is not None
    if mask is not None:
        rule = AttentionMask.from_params(MaskParams(*mask), num_targets)
        yield from _visible_chunks(q_offsets.long(), kv_offsets.long(), rule)
        return
    if are_single(q_offsets, kv_offsets):
        yield from (Single(*chunk) for chunk in chunks(kv_offsets, CHUNK) if chunk.num_keys)
        return
    for candidates, events in groups(q_offsets, kv_offsets):
        q_rows, kv_rows = _indices(candidates), _indices(events)
        per_chunk = max(1, CHUNK // events.length)  # candidates
        count, pieces = max(1, per_chunk // candidates.length), q_rows.split(per_chunk, 1)
        for part in pieces if len(pieces) > 1 else [q_rows]:
            for q_part, kv_part in zip(part.split(count), kv_rows.split(count)):
                shape = len(q_part), q_part.shape[1], events.length
                yield Chunk(q_part.flatten(), kv_part.flatten(), shape)


def _visible_chunks(q_offsets: Tensor, kv_offsets: Tensor, mask: AttentionMask) -> Iterator[Single]:
    users = torch.repeat_interleave(q_offsets.diff())  # of the rows of q, as are those below
    events = kv_offsets.diff()[users]
    columns = torch.arange(len(users), device="cpu") - q_offsets[users + 1] + events
    targets = torch.zeros_like(events)
    if mask.num_targets is not None:
        targets = mask.num_targets.long()[users]
    for rows, _, offsets, row in chunks(pad(events.cumsum(0), (1, 0)), MASKED_CHUNK * CHUNK):
        event = torch.arange(len(row), device="cpu") - offsets[row]
        i, n, t = (x[rows][row] for x in (columns, events, targets))
        seen = is_visible(mask, i, event, n, t).nonzero().squeeze(1)
        row, event = row[seen], event[seen]
        kv_rows = kv_offsets[users[rows]][row] + event
        counts = torch.bincount(row, minlength=rows.stop - rows.start)
        for some, pairs, of_some, of_pairs in chunks(pad(counts.cumsum(0), (1, 0)), CHUNK):
            if pairs.stop > pairs.start:
                q_rows = slice(rows.start + some.start, rows.start + some.stop)
                yield Single(q_rows, kv_rows[pairs], of_some, of_pairs)


def _rows(x: Tensor, rows: Tensor | slice) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _indices(rows: Rows) -> Tensor:
    found = rows.rows
    if isinstance(found, slice):
        found = torch.arange(found.start, found.stop, device="cpu")
    return found.view(-1, rows.length)


class _Operands:
    """The operator's tensors in the dtype of its arithmetic."""

    def __init__(
        self,
        rows: list[Tensor],
        weights: list[Tensor],
        biases: list[Tensor],
        tables: list[Tensor | None],
        activation: str,
    ) -> None:
        self.dtype = compute_dtype(rows[0])
        self.rows = dict(zip("qkabv", rows))
        self.weights, self.biases = ([x.to(self.dtype) for x in xs] for xs in (weights, biases))
        self.units = [Units(activation, table) for table in tables]

    def take(self, name: str, rows: Tensor | slice) -> Tensor:
        """These rows of an operand."""
        return _rows(self.rows[name if name in self.rows else "k"], rows).to(self.dtype)

    def pairs(self, chunk: Chunk | Single) -> tuple[Tensor, Tensor]:
        """The chunk's q ∘ k `[P, E]`, and z of the first layer `[P, H]`."""
        q, a = (chunk.of_q(self.take(x, chunk.q_rows)) for x in "qa")
        k, b = (chunk.of_k(self.take(x, chunk.kv_rows)) for x in "kb")
        x = (q * k).view(-1, q.shape[-1])
        z = (a + b).view(len(x), -1)
        return x, z.addmm_(x, self.weights[0].mT)

    def linear(self, layer: int, h: Tensor) -> Tensor:
        """z of a later layer."""
        return linear(h, self.weights[layer], self.biases[layer - 1])

    def scores(self, h: Tensor) -> Tensor:
        """`[P]`, of the last hidden layer's h."""
        return torch.addmv(self.biases[-1], h, self.weights[-1].flatten())

    def hidden(self, chunk: Chunk | Single, layer: int) -> Tensor:
        """The chunk's z of a hidden layer."""
        _, z = self.pairs(chunk)
        for at in range(layer):
            z = self.linear(at + 1, self.units[at].activated(z))
        return z


def _empty_results(operands: list[Tensor], *_: object) -> tuple[Tensor, Tensor]:
    q, v = operands[0], operands[-1] if len(operands) == 5 else operands[1]
    lse = q.new_empty(q.shape[:1], dtype=compute_dtype(q))
    return q.new_empty((q.shape[0], v.shape[1])), lse


@host_operator("din_attention_cpu", _empty_results)
def din_attention_cpu(
    operands: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    tables: list[Tensor | None],
    segments: list[Tensor | None],
    activation: str,
    softmax: bool,
    mask: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sums of the events.

    Args:
        operands: q `[R, E]`, k `[L, E]`, and a `[R, H1]`, b `[L, H1]`: what the first layer adds
            for a row of q and for an event; then v `[L, Ev]`, unless v is k.
        weights: D `[H1, E]` of the products, then those of the other layers `[H_l, H_(l-1)]`; the
            last one is `[1, H]`.
        biases: of the layers but the first.
        tables: `[7, H_l]` of each hidden layer, see UnitTable; None for activations without
            parameters.
        segments: the offsets of rows of q and of events `[B + 1]`, and the number of targets of
            each segment `[B]`, if the mask has them.
        mask: the fields of a MaskParams; None: each row of q sees all events of its segment.

    Returns:
        `[R, Ev]` of q's dtype, and the scores' log-sum-exp `[R]`, 0 without softmax.
    """
    given = _Operands(operands, weights, biases, tables, activation)
    last = len(tables) - 1
    out, lse = (x.zero_() for x in _empty_results(operands))
    for chunk in _chunks(segments, mask):
        p = given.scores(given.units[last].activated(given.hidden(chunk, last)))
        if softmax:
            p, lse[chunk.q_rows] = chunk.softmax(p)
        result = chunk.weighted(p, given.take("v", chunk.kv_rows))
        out[chunk.q_rows] = result.to(out.dtype)
    return out, lse


def _empty_moments(operands: list[Tensor], weights: list[Tensor], *others: Any) -> Tensor:
    layer = others[4]
    shape = 3, weights[layer].shape[0]
    return operands[0].new_empty(shape, dtype=compute_dtype(operands[0]))


@host_operator("din_moments_cpu", _empty_moments)
def din_moments_cpu(
    operands: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    tables: list[Tensor | None],
    segments: list[Tensor | None],
    activation: str,
    layer: int,
    mask: list[int] | None = None,
) -> Tensor:
    """Number of pairs, mean and variance of z of a hidden layer, over all pairs that are seen:
    `[3, H]`. tables: of the layers before; that of this one is not read."""
    given = _Operands(operands, weights, biases, tables, activation)
    parts = [operands[0].new_zeros((3, weights[layer].shape[0]), dtype=given.dtype)]
    for chunk in _chunks(segments, mask):
        z = given.hidden(chunk, layer)
        variance, mean = torch.var_mean(z, 0, correction=0)
        parts.append(torch.stack([torch.full_like(mean, len(z)), mean, variance * len(z)]))
    return joined_moments(torch.stack(parts))


@host_operator(
    "din_attention_cpu_backward",
    lambda do, lse, delta, operands, weights, biases, tables, *others: empty_gradients(
        operands, weights, biases, tables, compute_dtype(do), others[3]
    ),
)
def din_attention_backward_cpu(
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    operands: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    tables: list[Tensor | None],
    segments: list[Tensor | None],
    activation: str,
    softmax: bool,
    layer: int,
    mask: list[int] | None = None,
) -> list[Tensor]:
    """Gradients of the operands, the weights and the biases, and sums `[3, H]` of each hidden
    layer, which are the gradients of slope, bias and weight of its table. Without tables there are
    no sums.

    Args:
        lse, delta: of the kernels; not read here.
        layer: that of which only the sums are wanted; -1: all. The sums of a layer need d0 and d1
            of the layers behind it.
    """
    given = _Operands(operands, weights, biases, tables, activation)
    gradients = _Gradients(given)
    for chunk in _chunks(segments, mask):
        gradients.add(chunk, _rows(do, chunk.q_rows).to(given.dtype), softmax, layer)
    if layer >= 0:
        return [gradients.sums[layer]]
    rows = [x.to(operands[0].dtype) for x in gradients.rows.values()]
    return [
        *rows,
        *gradients.weights,
        *gradients.biases,
        *(gradients.sums if tables[0] is not None else []),
    ]


for _op in din_attention_cpu, din_moments_cpu:
    refuse_derivative(_op, "din_attention's operators have no derivative: its node has one")
refuse_twice("din_attention", din_attention_backward_cpu)


class _Gradients:
    """Sums of the gradients over chunks, in the dtype of the arithmetic."""

    def __init__(self, given: _Operands) -> None:
        self.given = given
        self.rows = {name: torch.zeros_like(x, dtype=given.dtype) for name, x in given.rows.items()}
        self.weights = [torch.zeros_like(x) for x in given.weights]
        self.biases = [torch.zeros_like(x) for x in given.biases]
        self.sums = [x.new_zeros((3, x.shape[0])) for x in given.weights[:-1]]

    def add(self, chunk: Chunk | Single, do: Tensor, softmax: bool, layer: int) -> None:
        """Add the chunk's. do `[S · C, Ev]`: the result's gradients."""
        given = self.given
        (x, z), kept = given.pairs(chunk), list[Kept]()
        for at, units in enumerate(given.units):
            kept.append(units.kept(given.linear(at, kept[-1].h) if at else z))
        p = given.scores(kept[-1].h)
        ds = chunk.of_weights(do, given.take("v", chunk.kv_rows))
        if softmax:
            p, _ = chunk.softmax(p)
            total = chunk.over_events(chunk.of_pairs(p * ds))
            ds = p * (chunk.of_pairs(ds) - chunk.of_q(total)).flatten()
        self._add_rows("v", chunk.kv_rows, chunk.of_values(p, do))
        dz = ds.unsqueeze(1)
        for at in reversed(range(len(kept))):
            self.weights[at + 1].addmm_(dz.mT, kept[at].h)
            self.biases[at] += dz.sum(0)
            weight = given.weights[at + 1]
            dh = dz * weight if len(weight) == 1 else dz @ weight
            dz, sums = given.units[at].gradients(dh, kept[at])
            if sums is not None:
                self.sums[at] += sums
            if at == layer:
                return
        self.weights[0].addmm_(dz.mT, x)
        dx, dz = chunk.of_pairs(torch.mm(dz, given.weights[0], out=x)), chunk.of_pairs(dz)
        q = chunk.of_q(given.take("q", chunk.q_rows))
        k = chunk.of_k(given.take("k", chunk.kv_rows))
        self._add_rows("a", chunk.q_rows, chunk.over_events(dz))
        self._add_rows("b", chunk.kv_rows, chunk.over_candidates(dz))
        self._add_rows("q", chunk.q_rows, chunk.over_events(dx * k))
        self._add_rows("k", chunk.kv_rows, chunk.over_candidates(dx.mul_(q)))

    def _add_rows(self, name: str, rows: Tensor | slice, gradient: Tensor) -> None:
        x = self.rows[name if name in self.rows else "k"]
        if isinstance(rows, slice):
            x[rows] += gradient
        else:
            x.index_add_(0, rows, gradient)
