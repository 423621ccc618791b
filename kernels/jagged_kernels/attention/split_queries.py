"""The backward of segments that have very many query rows for few keys.

A tile of keys visits all query rows of its segment, so few tiles of keys leave most of a GPU idle.
Here each segment becomes `chunks` segments with a part of its query rows and a copy of its keys.
dq is that of the copies; dk and dv are fp32 partial sums, added in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .params import AttentionCall


class SplitQueries(NamedTuple):
    """call: of the chunks. places: `[chunks, rows]`, where the copies of each row of k lie."""

    call: AttentionCall
    places: Tensor

    @classmethod
    def of(cls, call: AttentionCall, chunks: int) -> SplitQueries:
        """Nothing is read from the device. The call has one query group, and neither mask, bias nor
        dropout: these depend on places in a segment."""
        segments, params = call.segments, call.params
        chunk = torch.arange(chunks, device=call.k.device)
        starts, lengths = segments.kv_offsets[:-1, None], segments.kv_offsets.diff()[:, None]
        of_keys = starts * chunks + lengths * chunk
        of_queries = segments.q_offsets[:-1, None].long()
        of_queries = of_queries + segments.q_offsets.diff()[:, None] * chunk // chunks
        q_offsets, kv_offsets = (
            torch.cat([first.flatten(), offsets[-1:] * factor]).to(offsets.dtype)
            for first, offsets, factor in (
                (of_queries, segments.q_offsets, 1),
                (of_keys, segments.kv_offsets, chunks),
            )
        )
        num_rows = call.k.shape[0]
        rows = torch.arange(num_rows, device=call.k.device)
        # rows behind the last segment are one more
        bounds = torch.nn.functional.pad(segments.kv_offsets, (0, 1), value=num_rows)
        segment = torch.searchsorted(segments.kv_offsets[1:], rows, right=True)
        first = bounds[segment]
        places = rows + (chunks - 1) * first + chunk[:, None] * (bounds[segment + 1] - first)
        k, v = (x.new_empty(chunks * num_rows, *x.shape[1:]) for x in (call.k, call.v))
        k[places], v[places] = call.k, call.v
        if params.segment_scale is not None:
            params = params._replace(segment_scale=params.segment_scale.repeat_interleave(chunks))
        segments = segments._replace(q_offsets=q_offsets, kv_offsets=kv_offsets)
        return cls(call._replace(k=k, v=v, segments=segments, params=params), places)

    def partial(self) -> list[Tensor]:
        """Empty dk and dv of the chunks."""
        return [torch.empty_like(x, dtype=torch.float32) for x in (self.call.k, self.call.v)]

    def add(self, partial: Tensor, out: Tensor) -> None:
        """Write the sums over the chunks."""
        out.copy_(partial[self.places].sum(0))
