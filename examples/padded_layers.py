"""The layers of the ranking model as a careful user would write them in plain torch:
`RankingModel(tables, config, layers=PADDED)`.

Each class has the parameters of the layer that it derives from, so a state_dict fits both. Only
`forward` differs:

- Events are padded once, after the pointwise layers, to the maximum length, which needs no
  synchronisation and keeps shapes static.
- A user's candidates are queries of one padded history, which is not repeated.
- Softmax attention is torch's `scaled_dot_product_attention` with a mask. GELU attention is two
  batched GEMMs. torch.compile can fuse what is between them.
- Blocks of a stream are rows of a batch, so that block attention does no work outside the blocks.
- Linear compression multiplies the users' vectors once per user, and adds the result to those of
  the candidates.

Layers without a mask for padding (norms, projections) compute the padding too. All are made for
torch.compile.
"""

from dataclasses import dataclass

import torch
from ranking_model import Layers, RankingConfig, StreamEncoder, per_candidate
from torch.nn import functional
from torchrec import EmbeddingBagCollection  # noqa: F401  (loads FBGEMM's operators)

import jagged_modules as jm


@dataclass
class Padded:
    """Padded rows: segment b is `values[b, :lengths[b]]`. The other values are arbitrary."""

    values: torch.Tensor  # [B, N, E]
    lengths: torch.Tensor  # [B]

    @property
    def seen(self) -> torch.Tensor:
        """Which rows exist, bool [B, N]."""
        return (
            torch.arange(self.values.shape[1], device=self.lengths.device) < self.lengths[:, None]
        )


def pad(values: torch.Tensor, offsets: torch.Tensor, max_seqlen: int) -> Padded:
    return Padded(
        torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [max_seqlen], 0.0),
        offsets.diff(),
    )


def unpad(x: torch.Tensor, offsets: torch.Tensor, total: int) -> torch.Tensor:
    """The rows [total, E] of x [B, N, E] that exist."""
    users = per_candidate(torch.arange(x.shape[0], device=x.device), offsets, total)
    rows = torch.arange(total, device=x.device) - offsets[users] + users * x.shape[1]
    return x.flatten(0, 1).index_select(0, rows)  # unlike x[...], its backward does not sort


def split_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[B, N, H · D] → [B, H, N, D]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Softmax attention [B, H, M, D] to the keys [B, H, N, D] that are `seen` [B, N]. Without any
    it is 0, as in jagged_modules."""
    v = v * seen[:, None, :, None].to(v.dtype)
    # softmax over no key is undefined; the first value is 0 then
    first = torch.arange(seen.shape[1], device=seen.device) == 0
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=(seen | first)[:, None, None, :]
    )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, in interleaved pairs, in fp32. x: [B, H, N, D]; cos, sin: [N, D / 2]."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return (
        torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
        .flatten(-2)
        .to(x.dtype)
    )


def gdpa(
    layer: jm.JaggedGDPA, x: torch.Tensor, context: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """GELU or softmax attention of the rows of x [B, N, E] to those of context [B, M, E] that are
    `seen` [B, M]; all if None."""
    q = split_heads(layer.q_proj(x), layer.head_dim)
    k, v = (split_heads(rows, layer.head_dim) for rows in layer.kv_proj(context).chunk(2, dim=-1))
    if layer.activation == "softmax":
        return layer.out_proj(layer.dropout(merge_heads(attend(q, k, v, seen))))
    if seen is not None:
        v = v * seen[:, None, :, None].to(v.dtype)
    scores = layer.q_norm(q).to(v.dtype) @ layer.k_norm(k).to(v.dtype).mT * layer.head_dim**-0.5
    weights = functional.gelu(scores, approximate="tanh") * layer.config.output_scale
    return layer.out_proj(layer.dropout(merge_heads(weights @ v)))


def pool(layer: jm.JaggedGDPA, x: Padded) -> torch.Tensor:
    """[B, seeds, E]: softmax attention of the layer's seeds to the rows of x."""
    k, v = (split_heads(rows, layer.head_dim) for rows in layer.kv_proj(x.values).chunk(2, dim=-1))
    # [B, H, seeds, D]
    seeds = layer.seeds.transpose(0, 1).to(k.dtype).expand(k.shape[0], -1, -1, -1)
    return layer.out_proj(layer.dropout(merge_heads(attend(seeds, k, v, x.seen))))


def update(block: jm.GDPABlock, x: Padded, context: torch.Tensor | None = None) -> Padded:
    """The block's result for the rows of x, which attend to those of x that exist, or to those of
    context [B, M, E]."""
    normed = block.norm(x.values)
    rows, seen = (normed, x.seen) if context is None else (context, None)
    return Padded(x.values + gdpa(block.attention, normed, rows, seen), x.lengths)


class GDPABlock(jm.GDPABlock):
    def forward(self, x: Padded) -> Padded:
        return update(self, x)


class TargetAttention(jm.JaggedTargetAttention):
    def attend(self, targets: torch.Tensor, history: Padded) -> torch.Tensor:
        """[B, T, E] of targets [B, T, E]."""
        q = split_heads(self.q_proj(targets), self.head_dim)
        k, v = (
            split_heads(rows, self.head_dim)
            for rows in self.kv_proj(history.values).chunk(2, dim=-1)
        )
        return self.out_proj(merge_heads(attend(q, k, v, history.seen)))

    def forward(self, targets: jm.Jagged, history: Padded) -> jm.Jagged:
        queries = pad(targets.values, targets.offsets, targets.max_seqlen).values
        return targets.with_values(
            unpad(self.attend(queries, history), targets.offsets, targets.values.shape[0])
        )


def make_interaction(
    name: str, embedding_dim: int, num_heads: int, device: torch.device | None = None
) -> TargetAttention:
    if name != "attention":
        raise ValueError(f"interaction must be 'attention' with padded layers, not {name!r}")
    return TargetAttention(embedding_dim, num_heads, device=device)


class InterFormer(jm.JaggedInterFormer):
    def __init__(self, *sizes: int, device: torch.device | None = None):
        super().__init__(*sizes, device=device)
        for module in self.modules():
            if type(module) is jm.LinearCompressEmbedding:
                module.__class__ = LinearCompress

    def forward(self, history: Padded, users: torch.Tensor) -> tuple[Padded, torch.Tensor]:
        config, cls = self.config, self.config.num_cls
        last = torch.arange(-config.num_recent, 0, device=users.device)
        for i, layer in enumerate(self.layers):
            of_users = layer.features_gate(layer.compress(users))
            if i == 0:
                values = torch.cat([of_users.to(history.values.dtype), history.values], dim=1)
                history = Padded(values, history.lengths + cls)
            recent = history.lengths[:, None] + last  # [B, num_recent]
            index = recent.clamp(min=0)[..., None].expand(-1, -1, self.embedding_dim)
            events = history.values.gather(1, index) * (recent >= cls)[..., None]
            vectors = [history.values[:, :cls], pool(layer.pool, history), events]
            of_history = layer.history_gate(torch.cat(vectors, dim=1))
            users = layer.interaction(torch.cat([users, of_history], dim=1))
            pffn = layer.pffn
            history = update(pffn.block, history, pffn.compress(pffn.norm(of_users)))
            history = update(layer.attention, history)
        return Padded(history.values[:, cls:], history.lengths - cls), users


class Stream(StreamEncoder):
    def __init__(self, config: RankingConfig, device: torch.device | None = None):
        super().__init__(config, device)
        self.num_blocks = -(-config.max_stream // config.block_size)

    def forward(self, stream: Padded) -> torch.Tensor:
        stream = Padded(
            stream.values + self._attend_in_blocks(self.norm(stream.values), stream.lengths),
            stream.lengths,
        )
        return pool(self.pool, stream)

    def _attend_in_blocks(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Block attention of x [B, N, E], as a batch of B · num_blocks blocks."""
        layer, (batch, rows, width), size = self.attention, x.shape, self.attention.block_size
        qkv = functional.pad(layer.qkv_proj(x), (0, 0, 0, self.num_blocks * size - rows))
        # [B, H, N, D]
        q, k, v = (split_heads(part, layer.head_dim) for part in qkv.chunk(3, dim=-1))
        cos, sin = (
            functional.pad(table[:rows], (0, 0, 0, q.shape[2] - rows))
            for table in (layer.tables.cos, layer.tables.sin)
        )

        def blocks(part: torch.Tensor) -> torch.Tensor:
            # [B · num_blocks, H, size, D]
            return part.unflatten(2, (self.num_blocks, size)).transpose(1, 2).flatten(0, 1)

        # rows of each block, if > 0
        in_block = lengths[:, None] - torch.arange(self.num_blocks, device=lengths.device) * size
        seen = torch.arange(size, device=lengths.device) < in_block.flatten()[:, None]
        out = attend(blocks(rotate(q, cos, sin)), blocks(rotate(k, cos, sin)), blocks(v), seen)
        out = out.transpose(1, 2).reshape(batch, self.num_blocks * size, width)[:, :rows]
        return layer.out_proj(out)


class LinearCompress(jm.LinearCompressEmbedding):
    def forward(
        self,
        candidates: torch.Tensor,
        users: torch.Tensor | None = None,
        index: jm.CandidateIndex | None = None,
    ) -> torch.Tensor:
        *shared, of_candidates = self.weights
        compressed = of_candidates @ candidates
        for weight in shared:
            compressed += per_candidate(weight @ users, index.offsets, candidates.shape[0])
        return compressed


PADDED = Layers(pad, make_interaction, Stream, GDPABlock, InterFormer, LinearCompress)
