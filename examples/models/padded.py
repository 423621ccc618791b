"""The published models by hand in plain torch, with padding. Each class has the parameters of the
model that it derives from, so a state_dict fits both. Only the part that reads histories differs:

- Histories are padded to `max_history` and the candidates of a user to `max_candidates`, which
  needs no synchronisation. What the published model computes per candidate, from a history that is
  repeated, is computed per user if the result is the same (BST, SASRec, OneTrans, Wukong).
- Softmax attention is torch's `scaled_dot_product_attention` with a mask.
- Layers without a mask for padding (norms, projections, feed-forwards) compute the padding too.
"""

import torch
from padded_layers import merge_heads, split_heads, unpad
from ranking_model import per_candidate
from torch import nn
from torch.nn import functional

import jagged_modules as jm
from jagged_modules import functional as F

from .bst import BST
from .din import DIN
from .onetrans import OneTrans, OneTransBlock
from .sasrec import SASRec
from .transact import TransAct
from .wukong import Wukong


def pad(
    values: torch.Tensor, offsets: torch.Tensor, size: int, side: str = "right"
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, size, E], with the padding on this side, and which of the rows are real, bool [B,
    size]."""
    place = torch.arange(size, device=values.device)
    real = (place if side == "right" else place.flip(0)) < offsets.diff()[:, None]
    return F.jagged_to_padded(values, offsets, size, side=side), real


def pad_history(history: jm.Jagged) -> tuple[torch.Tensor, torch.Tensor]:
    """With the padding before the events, as SASRec has it: the newest ones are a slice."""
    return pad(history.values, history.offsets, history.max_seqlen, "left")


def visible(
    real: torch.Tensor, num_targets: int = 0, group: int = 1, causal: bool = False
) -> torch.Tensor:
    """Which rows see one another, bool [B, 1, N + T, N + T]: T target rows behind the events, that
    see the events and the earlier rows of their group. All rows see themselves, because softmax
    over no row is undefined."""
    size = real.shape[1] + num_targets
    row = torch.arange(size, device=real.device)
    group_of = torch.where(row < real.shape[1], -1, (row - real.shape[1]) // group)
    same = group_of[:, None] == group_of
    earlier = row[:, None] >= row
    events = functional.pad(real, (0, num_targets))[:, None]
    among_events = events & earlier if causal else events
    return (among_events | (same & earlier & (group_of >= 0)) | (row[:, None] == row))[:, None]


def encode(layer: jm.JaggedEncoderLayer, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The encoder layer of x [B, N, E]."""

    def attended(rows: torch.Tensor) -> torch.Tensor:
        own = layer.attention
        q, k, v = (
            split_heads(part, own.head_dim)
            for part in (own.q_proj(rows), *own.kv_proj(rows).chunk(2, dim=-1))
        )
        dropout = own.config.attention_dropout if own.training else 0.0
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return own.out_proj(merge_heads(out))

    def feed_forward(rows: torch.Tensor) -> torch.Tensor:
        return layer.linear2(layer.dropout(layer.linear1(rows).relu()))

    if layer.norm_first:
        x = x + layer.dropout(attended(layer.norm1(x)))
        return x + layer.dropout(feed_forward(layer.norm2(x)))
    x = layer.norm1(x + layer.dropout(attended(x)))
    return layer.norm2(x + layer.dropout(feed_forward(x)))


class PaddedDIN(DIN):
    """A row for each pair of a candidate and an event or padding, of the four features."""

    def interest(self, history, targets, candidates):
        k, real = (per_candidate(x, candidates.offsets, len(targets)) for x in pad_history(history))
        q = targets[:, None].expand_as(k)
        *hidden, last = self.attention.linears
        h = torch.cat([q, k, q - k, q * k], dim=-1)
        for linear, units in zip(hidden, self.attention.units, strict=True):
            h = dice(linear(h), real, units)
        weights = last(h) * real[..., None].to(h.dtype)
        return (weights.mT @ k)[:, 0]


def dice(z: torch.Tensor, real: torch.Tensor, units: nn.Module) -> torch.Tensor:
    """Dice of z [C, N, H], with the statistics of the rows that are `real`."""
    norm = units.norm
    mean, variance = norm.running_mean, norm.running_var
    if norm.training:
        rows, count = real[..., None].to(z.dtype), real.sum().clamp(min=1)
        mean = (z * rows).sum((0, 1)) / count
        variance = ((z - mean).square() * rows).sum((0, 1)) / count
        with torch.no_grad():
            norm.num_batches_tracked += 1
            unbiased = variance * count / (count - 1).clamp(min=1)
            weight = norm.momentum * real.any().to(norm.running_mean)
            norm.running_mean.lerp_(mean.to(norm.running_mean), weight)
            norm.running_var.lerp_(unbiased.to(norm.running_var), weight)
    p = torch.sigmoid((z - mean) * (variance + norm.eps).rsqrt())
    return z * (p + units.slope * (1 - p))


class PaddedTransAct(TransAct):
    """Each candidate's copy of its user's history is padded."""

    def pooled(self, events, targets, candidates):
        rows, real = (
            per_candidate(x, candidates.offsets, len(targets)) for x in pad_history(events)
        )
        x = torch.cat([rows, targets[:, None].expand(-1, rows.shape[1], -1)], dim=2)
        mask = visible(real)
        for layer in self.encoder.layers:
            x = encode(layer, x, mask)
        newest = (x * real[..., None].to(x.dtype))[:, -self.num_newest :]
        most = x.masked_fill(~real[..., None], -torch.inf).amax(1)
        most = most.masked_fill(~real.any(1)[:, None], 0)
        missing = max(self.num_newest - x.shape[1], 0)
        newest = functional.pad(newest, (0, 0, missing, 0))
        return torch.cat([newest.flatten(1), self.pool_proj(most)], dim=1)


class PaddedBST(BST):
    """The candidates of a user behind its history, in one padded sequence."""

    def interest(self, history, targets, candidates):
        events, real = pad_history(history)
        padded, _ = pad(targets, candidates.offsets, self.config.max_candidates)
        size = padded.shape[1]
        x = encode(self.layer, torch.cat([events, padded], dim=1), visible(real, size))
        return unpad(x[:, -size:], candidates.offsets, len(targets))


class PaddedSASRec(SASRec):
    """As published: padding before the events."""

    def newest(self, events):
        x, real = pad_history(events)
        mask = visible(real, causal=True)
        for layer in self.encoder.layers:
            x = encode(layer, x, mask)
        return self.encoder.norm(x[:, -1]) * real[:, -1:].to(x.dtype)


class PaddedOneTransBlock(OneTransBlock):
    """Of events [B, N, E] and which of them are real. Padding is before the events, so the last
    ones are a slice."""

    def __init__(self, config, num_tokens, num_updated, device=None):
        super().__init__(config, num_tokens, num_updated, device)
        self.max_candidates = config.max_candidates

    def forward(self, events, tokens, candidates):
        x, real = events
        of_events, of_tokens = self.qkv(self.norm1(x), self.norm1(tokens))
        padded, _ = pad(of_tokens.flatten(1), candidates.offsets, self.max_candidates)
        padded = padded.unflatten(2, of_tokens.shape[1:]).flatten(1, 2)
        first, count = x.shape[1] - self.num_updated, padded.shape[1]
        q, k, v = (
            split_heads(part, part.shape[-1] // self.num_heads)
            for part in torch.cat([of_events, padded], dim=1).chunk(3, dim=-1)
        )
        mask = visible(real, count, self.num_tokens, causal=True)
        out = merge_heads(
            functional.scaled_dot_product_attention(
                q[:, :, first:], k, v, attn_mask=mask[:, :, first:]
            )
        )
        of_events, of_tokens = out.split([self.num_updated, count], dim=1)
        of_tokens = of_tokens.unflatten(1, (self.max_candidates, -1)).flatten(2)
        of_tokens = unpad(of_tokens, candidates.offsets, len(tokens))
        updated, tokens = self.update(x[:, first:], tokens, of_events, of_tokens)
        return (updated, real[:, first:]), tokens


class PaddedOneTrans(OneTrans):
    block = PaddedOneTransBlock

    def history(self, x):
        return pad_history(super().history(x))


class PaddedWukong(Wukong):
    """Users' vectors are repeated for each candidate, and compressed with its own."""

    def mean(self, history):
        events, real = pad_history(history)
        return events.sum(1) / real.sum(1, keepdim=True).clamp(min=1)

    def combine(self, items, users, candidates):
        first, *others = self.layers
        vectors = torch.cat([per_candidate(users, candidates.offsets, len(items)), items], dim=1)
        x = first.interact(torch.cat(list(first.compress.weights), dim=1) @ vectors, items)
        for layer in others:
            x = layer(x)
        return x
