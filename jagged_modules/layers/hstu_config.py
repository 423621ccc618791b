"""Options of an HSTU, checks of its inputs, and which rows of a history later rows see."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from ..containers.jagged import Jagged
from ..containers.offsets import rows_and_segments, segments_and_positions
from ..dropout import check_dropout
from ..masks import LENGTHS, AttentionMask, field_of_later_rows, is_visible
from ..scalars import check_choice, check_equal, check_kind, check_number, check_sizes, possessive
from ..segments import check_integers, values_are_checkable
from .norms import NORM_KINDS

RECOMPUTED = "norm", "activation", "projection"


@dataclasses.dataclass(frozen=True)
class HSTUConfig:
    """The options that all layers of an HSTU share.

    Args:
        head_dim: width of q and k per head; embedding_dim / num_heads if None.
        linear_dim: width of u and v per head; embedding_dim / num_heads if None.
        dropout: dropout probability, applied to the input of the output projection.
        scaling_seqlen: attention weights are divided by this length. If None, they are divided by
            the container's max_seqlen, which the host must know. A fixed number makes a row's
            result independent of the rest of the batch.
        contextual_seqlen, max_attn_len, min_full_attn_seqlen: parameters of the causal mask, see
            `AttentionMask`.
        target_group_size, global_prefix, recent_history: more of them.
        relative_position: the most rows N of a segment. Each layer then learns a bias of attention
            scores by relative position, see `RelativeBias`. 0: none.
        relative_time: number K of boundaries between buckets of time differences. Each layer then
            learns a bias by these buckets, with the boundaries of `RelativeBias.log_boundaries(K)`,
            and needs timestamps. 0: none.
        norm: of the layer's input, and of attention's output. "layer": LayerNorms. "rms": root mean
            square norms, without biases. "group": a LayerNorm of the input, and one of each head of
            the output, with a weight and a bias for each column. Meta's group norm has one of each
            for a head: repeat these linear_dim times.
        recompute: what the backward computes again instead of keeping it from the forward, where a
            layer is one autograd node (on a GPU, without hooks on its modules). "norm": the normed
            input, embedding_dim columns; costs a pass over the rows. "activation": the input of the
            output projection, 3 H linear_dim columns; costs nothing but writing it, so it is the
            default. "projection": u, v, q and k; costs a GEMM.
        attention_dropout: dropout probability of the attention weights, below 1. The published
            layer has none.

    Both biases are the published ones and cost a lookup for each score. Production models often add
    embeddings of a row's position, and of the time since the previous row, to the input instead, at
    no cost in attention.

    Raises:
        TypeError, ValueError: a field has another type or is out of range.
    """

    head_dim: int | None = None
    linear_dim: int | None = None
    dropout: float = 0.0
    scaling_seqlen: int | None = None
    contextual_seqlen: int = 0
    max_attn_len: int = 0
    min_full_attn_seqlen: int = 0
    target_group_size: int = 1
    global_prefix: int = 0
    recent_history: int = 0
    relative_position: int = 0
    relative_time: int = 0
    norm: str = "layer"
    recompute: tuple[str, ...] = ("activation",)
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "head_dim", "linear_dim", "scaling_seqlen", optional=True)
        check_number("dropout", self.dropout, 0, 1)
        check_dropout("attention_dropout", self.attention_dropout)
        check_sizes(self, "relative_position", "relative_time", at_least=0)
        check_choice("norm", self.norm, tuple(NORM_KINDS))
        check_kind("recompute", self.recompute, tuple, "a tuple of names")
        for name in self.recompute:
            check_choice("each of recompute", name, RECOMPUTED)
        self.mask()  # checks the mask's fields

    def mask(self, num_targets: Tensor | None = None) -> AttentionMask:
        """The layers' attention mask, for example for `Jagged.prepare`.

        Args:
            num_targets: as in `AttentionMask`.
        """
        fields = {name: getattr(self, name) for name in LENGTHS}
        return AttentionMask(causal=True, num_targets=num_targets, **fields)


def check_appendable(config: HSTUConfig) -> None:
    """ValueError unless the rows of a history stay the same when later events follow it."""
    why = "to append events to a cache: otherwise "
    if config.scaling_seqlen is None:
        raise ValueError(
            f"config.scaling_seqlen must be given {why}all rows change with the length, got None"
        )
    name, effect = field_of_later_rows(config.mask()), "later events change earlier rows"
    if name is None and config.max_attn_len and config.global_prefix:
        name, effect = "global_prefix", "cached rows have gaps between their positions"
    if name is not None:
        beside = "with max_attn_len " if name in ("min_full_attn_seqlen", "global_prefix") else ""
        raise ValueError(
            f"config.{name} must be 0 {beside}{why}{effect}, got {getattr(config, name)}"
        )


def check_lengths(name: str, config: HSTUConfig, *offsets: Tensor) -> None:
    """ValueError if a segment, with these parts, has more rows than config.relative_position and
    the host knows the lengths."""
    if not config.relative_position or not all(values_are_checkable(x) for x in offsets):
        return
    if offsets[0].shape[0] < 2:
        return
    longest = int(torch.stack([x.diff().long().cpu() for x in offsets]).sum(0).max())
    if longest > config.relative_position:
        verb = "has" if len(offsets) == 1 else "have"
        raise ValueError(
            f"{name} {verb} a segment of {longest} rows, more than config.relative_position,"
            f" {config.relative_position}"
        )


def check_row_timestamps(
    name: str, x: Tensor | None, owner: str, rows: Jagged, config: HSTUConfig
) -> None:
    if not config.relative_time:
        if x is not None:
            raise ValueError(
                f"{name} must be None without config.relative_time, got a {type(x).__name__}"
            )
        return
    if x is None:
        raise ValueError(f"{name} must be given with config.relative_time, got None")
    check_integers(name, x, (torch.int64,))
    check_equal(name, f"have one element for each row of {owner}", rows.num_rows, x.shape[0])
    check_equal(name, f"be on the device of {possessive(owner)} values", rows.device, x.device)


class Times(NamedTuple):
    """The timestamps of rows, which may follow those of cached histories."""

    timestamps: Tensor | None
    query_timestamps: Tensor | None
    cache_timestamps: Tensor | None = None

    def check(self, owner: str, rows: Jagged, config: HSTUConfig) -> None:
        """Check those of rows, whose owner errors call `owner`."""
        check_row_timestamps("timestamps", self.timestamps, owner, rows, config)
        if self.query_timestamps is not None:
            check_row_timestamps("query_timestamps", self.query_timestamps, owner, rows, config)

    def completed(self, rows: Jagged) -> Times:
        """query_timestamps, if None: the timestamps of the next rows of the segments, and of a
        segment's last row its own. A bias of cached keys cannot find these rows among its keys."""
        timestamps = self.timestamps
        if timestamps is None or self.query_timestamps is not None:
            return self
        offsets = rows.offsets.to(timestamps.device, non_blocking=True)
        index, segments = rows_and_segments(offsets, timestamps.shape[0])
        following = torch.minimum(index + 1, offsets[1:][segments] - 1)
        return self._replace(query_timestamps=timestamps[following])


def rows_seen_by_targets(
    history: Jagged, config: HSTUConfig
) -> tuple[Tensor | slice, Tensor | None]:
    """The rows of the histories that later targets see, and the offsets of these rows. All rows and
    None if the mask hides none. Without a global prefix they are the last rows of a history, so the
    relative positions of targets to cached rows are those in the whole history."""
    limit = 0 if config.min_full_attn_seqlen else config.max_attn_len  # targets are exempt
    if not (config.contextual_seqlen or limit or config.recent_history):
        return slice(None), None
    if config.relative_position and config.global_prefix:
        raise ValueError(
            "config.global_prefix must be 0 to cache with relative_position and a limit of the"
            " visible rows (contextual_seqlen, max_attn_len, recent_history): cached rows would"
            f" have gaps between their positions; got {config.global_prefix}"
        )
    lengths = history.offsets.diff() if history.host_lengths is None else history.host_lengths
    if lengths.is_meta:
        raise ValueError(
            "history's offsets must be on the host if the config has max_attn_len, recent_history"
            " or contextual_seqlen, got meta offsets: the number of cached rows depends on their"
            " values"
        )
    offsets = nnf.pad(lengths.cumsum(0), (1, 0))
    segments, positions = segments_and_positions(offsets, history.values.shape[0])
    length = nnf.pad(lengths, (0, 1))[segments]  # 0 behind the last segment
    # What a target sees that follows the history.
    seen = is_visible(config.mask(), length, positions, length + 1, 1) & (positions < length)
    kept_offsets = nnf.pad(seen.cumsum(0), (1, 0))[offsets]
    rows = seen.nonzero().squeeze(1)
    return rows.to(history.values.device), kept_offsets.to(history.offsets.dtype)
