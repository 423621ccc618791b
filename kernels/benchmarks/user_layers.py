"""Layers as a user would write them for `torch.compile`: torch's modules, this project's pointwise
attention, and torch's varlen attention where attention is softmax.

Submodules have the names of this project's layer, whose weights they take.
"""

import torch
from inputs import offsets_of, varlen_attention
from torch import Tensor, nn

import jagged_modules as jm
from jagged_modules import functional as F


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, segments: tuple, longest: tuple) -> Tensor:
    """segments, longest: of queries and of keys."""
    if q.is_cuda:
        return varlen_attention(q, k, v, *segments, *longest)
    return F.jagged_attention(q, k, v, *segments)  # torch has varlen attention for CUDA alone


class UserLayer(nn.Module):
    """A layer with the sizes of this project's layer; a subclass makes its modules."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.width, self.heads = layer.embedding_dim, layer.num_heads
        self.make(layer)
        self.load_state_dict(layer.state_dict())

    def make(self, layer: nn.Module) -> None:
        raise NotImplementedError

    def in_heads(self, x: Tensor, parts: int = 1) -> tuple[Tensor, ...]:
        """The parts of a projection, each `[L, H, D]`."""
        return x.unflatten(1, (parts, self.heads, -1)).unbind(1)


class UserHSTU(UserLayer):
    def make(self, layer: jm.HSTULayer) -> None:
        width = self.width  # of the rows, and of all heads together
        self.length = layer.config.scaling_seqlen
        self.input_norm = nn.LayerNorm(width, layer.input_norm.eps)
        self.uvqk_proj = nn.Linear(width, 4 * width)
        self.output_norm = nn.LayerNorm(width, layer.output_norm.eps)
        self.out_proj = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        u, v, q, k = self.in_heads(self.uvqk_proj(self.input_norm(x)), 4)
        mask = jm.AttentionMask(causal=True)
        options = dict(activation="silu", output_scale=1 / self.length, mask=mask)
        a = F.jagged_attention(q, k, v, offsets, **options).flatten(1)
        u = nn.functional.silu(u.flatten(1))
        y = u * self.output_norm(a.float())
        return x + self.out_proj(torch.cat([u, a, y], dim=1))


class UserGDPABlock(UserLayer):
    def make(self, layer: jm.GDPABlock) -> None:
        width = self.width
        self.norm = nn.RMSNorm(width, layer.norm.eps)
        projections = dict(q_proj=width, kv_proj=2 * width, out_proj=width)
        self.attention = nn.ModuleDict(
            {name: nn.Linear(width, columns) for name, columns in projections.items()}
        )

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        normed, of = self.norm(x), self.attention
        (q,), (k, v) = self.in_heads(of["q_proj"](normed)), self.in_heads(of["kv_proj"](normed), 2)
        a = F.jagged_attention(q, k, v, offsets, activation="gelu")
        return x + of["out_proj"](a.flatten(1))


class UserEncoder(UserLayer):
    """A pre-norm encoder layer."""

    def make(self, layer: jm.JaggedEncoderLayer) -> None:
        width, ffn = self.width, layer.ffn_dim
        projections = dict(q_proj=width, kv_proj=2 * width, out_proj=width)
        self.attention = nn.ModuleDict(
            {name: nn.Linear(width, columns) for name, columns in projections.items()}
        )
        self.norm1, self.norm2 = (nn.LayerNorm(width, layer.norm1.eps) for _ in range(2))
        self.linear1, self.linear2 = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def ffn(self, x: Tensor) -> Tensor:
        return self.linear2(nn.functional.gelu(self.linear1(x)))

    def forward(self, x: Tensor, segments: tuple[Tensor, int]) -> Tensor:
        """segments: offsets, and the longest one's rows."""
        normed, of = self.norm1(x), self.attention
        (q,), (k, v) = self.in_heads(of["q_proj"](normed)), self.in_heads(of["kv_proj"](normed), 2)
        a = self.attend(q, k, v, *segments)
        x = x + of["out_proj"](a.flatten(1))
        return x + self.ffn(self.norm2(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        return softmax_attention(q, k, v, (offsets, offsets), (longest, longest))


class NestedEncoder(UserEncoder):
    """With torch's attention of nested tensors."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged
        if not q.is_cuda:
            q, k, v = (x.contiguous() for x in (q, k, v))
        q, k, v = (nested(x, offsets, max_seqlen=longest).transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()


class TorchEncoder(UserEncoder):
    """torch's layer of padded rows `[B, N, E]`, with these parameters."""

    def make(self, layer: jm.JaggedEncoderLayer) -> None:
        super().make(layer)
        options = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        sizes = self.width, self.heads, layer.ffn_dim
        peer = nn.TransformerEncoderLayer(*sizes, layer_norm_eps=layer.norm1.eps, **options)
        self.peer = [peer.to("meta")]  # no submodule: its parameters are those above

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """hidden: `[B, N]`, the rows of no segment."""
        named = dict(self.named_parameters())
        given = {name: y for name, y in named.items() if not name.startswith("attention")}
        for kind in ("weight", "bias"):
            q, kv = (named[f"attention.{name}.{kind}"] for name in ("q_proj", "kv_proj"))
            given[f"self_attn.in_proj_{kind}"] = torch.cat([q, kv])
            given[f"self_attn.out_proj.{kind}"] = named[f"attention.out_proj.{kind}"]
        options = dict(src_key_padding_mask=hidden)
        return torch.func.functional_call(self.peer[0], given, (x,), options)


class UserBlockAttention(UserLayer):
    """Blocks are segments of their own."""

    def make(self, layer: jm.BlockDiagonalSelfAttention) -> None:
        self.block_size = layer.block_size
        self.qkv_proj = nn.Linear(self.width, 3 * self.width)
        self.out_proj = nn.Linear(self.width, self.width)

    def blocks(self, lengths: Tensor) -> Tensor:
        """Offsets of the blocks of segments of these lengths: once for a batch, on the host."""
        counts = -(-lengths // self.block_size)
        ends = lengths.cumsum(0).repeat_interleave(counts)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(counts)
        number = torch.arange(len(starts)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        sizes = (ends - starts - number * self.block_size).clamp(max=self.block_size)
        return offsets_of(sizes)

    def forward(self, x: Tensor, blocks: Tensor) -> Tensor:
        q, k, v = self.in_heads(self.qkv_proj(x), 3)
        a = softmax_attention(q, k, v, (blocks, blocks), (self.block_size, self.block_size))
        return self.out_proj(a.flatten(1))


class UserTargetAttention(UserLayer):
    """Candidates are sorted by user before the attention."""

    def make(self, layer: jm.JaggedTargetAttention) -> None:
        self.q_proj = nn.Linear(self.width, self.width)
        self.kv_proj = nn.Linear(self.width, 2 * self.width)
        self.out_proj = nn.Linear(self.width, self.width)

    def forward(
        self, targets: Tensor, history: Tensor, order: Tensor, segments: tuple, longest: tuple
    ) -> Tensor:
        """order: the candidates, sorted by user. segments, longest: of candidates and history."""
        (q,) = self.in_heads(self.q_proj(targets.squeeze(1)[order]))
        k, v = self.in_heads(self.kv_proj(history), 2)
        a = softmax_attention(q, k, v, segments, longest).flatten(1)
        out = self.out_proj(a)
        return torch.empty_like(out).index_copy(0, order, out)
