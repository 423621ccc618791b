"""The layers of the ranking model on jagged rows, without kernels for Hopper and without layers of
one node: `RankingModel(tables, config, layers=BASELINE)`. Nothing is padded, and a state_dict of
the model fits.

- Softmax attention, also in blocks of a stream and by learned queries, is FlashAttention-2 for
  variable lengths (`torch.nn.attention.varlen`), between projections and rotation in torch.
- Other attention, of GDPA and of the PFFN, is this project's portable Triton kernel, in place of
  the published Triton kernel.
- Linear compression multiplies the users' vectors once per user, repeats the results for the
  candidates and adds them.

RMSNorms, gates and the MLPs of InterFormer are those of jagged_modules, as is attention on a CPU.
On a GPU, FlashAttention takes fp16 and bf16 only.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from padded_layers import LinearCompress
from ranking_model import Layers, StreamEncoder, make_interaction, per_candidate
from torch import nn
from torch.nn.attention.varlen import varlen_attn

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.containers.offsets import block_offsets


def attend(
    layer: Any,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    offsets: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    activation: str = "softmax",
    output_scale: float = 1,
) -> torch.Tensor:
    """The layer's projection [Lq, E] of the attention of q to k and v, each [L, H, D].

    offsets, longest: of the segments of queries and of keys.
    """
    q, k, v = qkv
    q, k = q.to(v.dtype), k.to(v.dtype)
    if q.is_cuda and activation == "softmax":
        out = varlen_attn(q, k, v, *(x.int() for x in offsets), *longest)
    else:
        out = F.jagged_attention(
            q, k, v, *offsets,
            max_seqlen_q=longest[0], max_seqlen_kv=longest[1],
            activation=activation, output_scale=output_scale,
            implementation="triton" if q.is_cuda else "auto",
        )  # fmt: skip
    return layer.out_proj(layer.dropout(out.flatten(1)))


def project(linear: nn.Linear, rows: torch.Tensor, parts: int, head_dim: int) -> Any:
    """Rows [L, E] in parts of heads, each [L, H, D]."""
    return linear(rows).unflatten(-1, (parts, -1, head_dim)).unbind(1)


class GDPA(jm.JaggedGDPA):
    """With the options that the model has."""

    def forward(self, x: jm.Jagged, context: jm.Jagged | None = None, *_: None) -> Any:
        config, users = self.config, x.offsets.shape[0] - 1
        keys = x if context is None else context
        k, v = project(self.kv_proj, keys.values, 2, self.head_dim)
        if config.num_seeds:
            q, longest = self.seeds.repeat(users, 1, 1), config.num_seeds
            offsets = torch.arange(users + 1, device=q.device) * longest
        else:
            (q,), offsets = project(self.q_proj, x.values, 1, self.head_dim), x.offsets
            longest = x.max_seqlen
        out = attend(
            self,
            (self.q_norm(q), self.k_norm(k), v),
            (offsets, keys.offsets.to(offsets.dtype)),
            (longest, keys.max_seqlen),
            self.activation,
            config.output_scale,
        )
        return out.unflatten(0, (users, longest)) if config.num_seeds else x.with_values(out)


class TargetAttention(jm.JaggedTargetAttention):
    def forward(self, targets: jm.Jagged, history: jm.Jagged) -> jm.Jagged:
        (q,) = project(self.q_proj, targets.values, 1, self.head_dim)
        kv = project(self.kv_proj, history.values, 2, self.head_dim)
        longest = targets.max_seqlen, history.max_seqlen
        out = attend(self, (q, *kv), (targets.offsets, history.offsets), longest)
        return targets.with_values(out)


class BlockAttention(jm.BlockDiagonalSelfAttention):
    """Blocks are segments."""

    dropout = nn.Identity()

    def forward(self, x: jm.Jagged) -> jm.Jagged:
        rows, size = x.values.shape[0], self.block_size
        q, k, v = project(self.qkv_proj, x.values, 3, self.head_dim)
        position = torch.arange(rows, device=q.device)
        position -= per_candidate(x.offsets[:-1], x.offsets, rows)
        tables = self.tables.cos[position], self.tables.sin[position]
        blocks = block_offsets(x.offsets, size, rows)
        qkv = F.apply_rotary(q, *tables), F.apply_rotary(k, *tables), v
        return x.with_values(attend(self, qkv, (blocks, blocks), (size, size)))


CLASSES = {
    jm.JaggedGDPA: GDPA,
    jm.JaggedTargetAttention: TargetAttention,
    jm.BlockDiagonalSelfAttention: BlockAttention,
    jm.LinearCompressEmbedding: LinearCompress,
}


def baseline(make: Callable[..., nn.Module], *sizes: Any, **options: Any) -> nn.Module:
    """The module that `make` returns, with the forwards of this file."""
    module = make(*sizes, **options)
    for part in module.modules():
        part.__class__ = CLASSES.get(type(part), type(part))
    return module


BASELINE = Layers(
    jm.Jagged,
    *(
        partial(baseline, make)
        for make in (
            make_interaction,
            StreamEncoder,
            jm.GDPABlock,
            jm.JaggedInterFormer,
            jm.LinearCompressEmbedding,
        )
    ),
)
