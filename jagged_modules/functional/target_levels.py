"""Attention of candidates to histories of several levels, for example of their user and of their
vendor.

    S_l = scale · q k_lᵀ,  lse = log Σ_l exp(lse_l),  O = Σ_l exp(lse_l − lse) O_l
    P_l = exp(S_l − lse),  dS_l = P_l ∘ (dO V_lᵀ − rowsum(dO ∘ O)),  dq = Σ_l scale · dS_l K_l

Each level is one attention of the candidates, grouped by their parents in that level, to the
level's own histories: keys of a coarser level are read in place. The backward of a level is that of
its attention alone, given O and lse of all levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jagged_kernels.schedule.host import TileSchedule
from torch import Tensor
from torch.nn.functional import pad

from ..containers.candidates import CandidateIndex
from ..containers.jagged import Jagged
from ..dtypes import autocast
from ..scalars import is_sequence, to_ints
from ..segments import RowSegments, check_device, check_offsets, parse_segments
from ..validation import check_implementation, check_tensor
from .attention import attention_backward, attention_forward, computed
from .attention_arguments import ATTENTION_IMPLEMENTATIONS, check_scalars
from .attention_call import AttentionOptions, check_operands, checked_call
from .nodes import apply, differentiable_once

LEVELS = ("joint", "each")
Operands = Sequence[Tensor]  # k `[L, Hkv, D]` and v `[L, Hkv, Dv]` of a level


class Level(NamedTuple):
    """Targets and their histories of one level, parsed.

    Attributes:
        queries: the query rows, grouped by history. keys: the histories.
        candidates: the parent of each candidate, on q's device; None where rows have another form.
        shape: the first two dimensions of targets in a dense tensor; None for rows of a container.
        container: whose values the targets are. history: that of the histories; a layer has it.
    """

    queries: RowSegments
    keys: RowSegments
    candidates: CandidateIndex | None = None
    shape: Sequence[int] | None = None
    container: Jagged | None = None
    history: Jagged | None = None

    @property
    def end(self) -> Tensor | None:
        """Where the history's rows may have to be cleared, see `tail.py`."""
        return None if self.history is None or self.history.is_clean else self.keys.end

    def schedule(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> TileSchedule | None:
        """The attention's schedule, which the history keeps. None without a history, or if none is
        kept and the host does not know the candidates of each user, or no other call has their
        index: kernels then build it."""
        index = self.candidates
        if self.history is None:
            return None
        if index is not None and index.is_of_one_call and not self.history.segmentation.prepared:
            return None
        if index is not None and index.is_sorted:
            if index.host_counts is None and not self.history.segmentation.schedules:
                return None
        queries = self.container if index is None else index
        rows = 1 if self.shape is None else self.shape[1]
        return self.history.schedule(
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=dtype,
            queries=rows if queries is None else queries,
            rows_per_candidate=1 if index is None else rows,
        )

    def grouped(self, x: Tensor) -> Tensor:
        """x `[*shape, ...]` as rows grouped by history."""
        if self.candidates is not None:
            x = self.candidates.by_user(x)
        return x if self.shape is None else x.flatten(0, 1)

    def ungrouped(self, x: Tensor) -> Tensor:
        """Undo `grouped`."""
        if self.shape is None:
            return x
        x = torch.unflatten(x, 0, self.shape)
        return x if self.candidates is None else self.candidates.as_given(x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """The attention of q `[*shape, H, D]` to this level."""
        if self.history is not None:
            schedule = self.schedule(q.shape[-2], q.shape[-1], q.dtype)
            options = options._replace(schedule=schedule)
        call = checked_call(self.grouped(q), k, v, self.queries, self.keys, options)
        return self.ungrouped(computed(call))

    def parents(self, num_candidates: int) -> Tensor:
        """`[num_candidates]`; behind the last history for a candidate without one."""
        assert self.candidates is not None
        return self.candidates.users(num_candidates)


def parse_levels(
    q: Tensor, given: dict[str, Any], max_seqlens: dict[str, Any], options: AttentionOptions
) -> tuple[Tensor, list[Operands], list[Level]]:
    """q in the dtype of autocast, and k and v of the levels, and the levels. Raises as
    `target_attention`.

    Args:
        given: k, v, candidates and kv_offsets by their names in errors; k is a list or a tuple.
        max_seqlens: which must be None, by their names.
    """
    number, implementation = len(given["k"]), options.implementation
    for name, x in given.items():
        if not is_sequence(x) or len(x) != number or not number:
            raise ValueError(
                f"{name} must be a tuple with an entry for each level, as k, which has {number},"
                f" got {len(x) if is_sequence(x) else type(x).__name__}"
            )
    unused = ("mask", "schedule", "pages", "dropout_seed")
    for name, x in ({name: getattr(options, name) for name in unused} | max_seqlens).items():
        if x is not None:
            raise ValueError(f"{name} must be None with several levels, got {type(x).__name__}")
    check_scalars(options.activation, options.scale, options.output_scale)
    if isinstance(options.output_scale, Tensor):
        raise TypeError("output_scale must be a number with several levels, got Tensor")
    check_tensor("q", q, 4, "[num_candidates, n_q, H, D]", "target_attention", implementation)
    check_implementation(implementation, ATTENTION_IMPLEMENTATIONS, q.device)
    q = autocast(q)
    operands: list[Operands] = []
    levels: list[Level] = []
    for i, (k, v, candidates, offsets) in enumerate(zip(*given.values())):
        for name, x, shape in ((f"k[{i}]", k, "[L, Hkv, D]"), (f"v[{i}]", v, "[L, Hkv, Dv]")):
            check_tensor(name, x, 3, shape, "target_attention", implementation)
        k, v, name = autocast(k), autocast(v), f"kv_offsets[{i}]"
        check_operands(q.flatten(0, 1), k, v)
        check_offsets(name, offsets, k.shape[0])
        check_device(name, offsets, q.device, "q's")
        index, queries = CandidateIndex.parse(
            candidates, q, offsets.shape[0] - 1, q.shape[1], own=f"candidates[{i}]"
        )
        keys = parse_segments(name, offsets, k.shape[0], q.device)
        operands.append((k, v))
        levels.append(Level(queries, keys, index, q.shape[:2]))
    if len({v.shape[1:] for _, v in operands}) != 1:
        shapes = [list(v.shape) for _, v in operands]
        raise ValueError(f"v must have the same heads and head dim in each level, got {shapes}")
    return q, operands, levels


def attend_to_levels(
    q: Tensor,
    operands: Sequence[Operands],
    levels: Sequence[Level],
    options: AttentionOptions,
    jointly: bool,
) -> tuple[Tensor, ...]:
    """The attention of q `[*shape, H, D]` to each level by itself, or one to the keys of all levels
    as if they were one segment."""
    if not jointly or len(levels) == 1:
        return tuple(x.attend(q, k, v, options) for x, (k, v) in zip(levels, operands))
    by_definition = options.implementation == "reference"
    if options.activation != "softmax" and not by_definition:
        return (torch.stack(attend_to_levels(q, operands, levels, options, False)).sum(0),)
    if by_definition:
        return (_joint_by_definition(q, operands, levels, options),)
    keys_and_values = [x for k_and_v in operands for x in k_and_v]
    if torch.compiler.is_compiling():  # Dynamo takes no tensor twice
        keys_and_values = [x.view_as(x) for x in keys_and_values]
    # the node must not keep the values of histories
    alone = tuple(x._replace(container=None, history=None) for x in levels)
    return (apply(_Joint, q, *keys_and_values, alone, options),)


def _joint_by_definition(
    q: Tensor, operands: Sequence[Operands], levels: Sequence[Level], options: AttentionOptions
) -> Tensor:
    """With a copy of the keys of all levels for each candidate."""
    parents = [to_ints(level.parents(q.shape[0])) for level in levels]
    bounds = [to_ints(level.keys.offsets) for level in levels]
    keys, values, ends = [operands[0][0][:0]], [operands[0][1][:0]], [0]
    for of_candidate in zip(*parents):
        ends.append(ends[-1])
        for (of_keys, of_values), parent, rows in zip(operands, of_candidate, bounds):
            first, last = rows[parent : parent + 2] if parent < len(rows) - 1 else (0, 0)
            keys.append(of_keys[first:last])
            values.append(of_values[first:last])
            ends[-1] += last - first
    k, v, offsets = torch.cat(keys), torch.cat(values), torch.tensor(ends, device=q.device)
    queries = RowSegments.equal(q.shape[1], q.shape[0], offsets)
    out = computed(checked_call(q.flatten(0, 1), k, v, queries, RowSegments(offsets), options))
    return torch.unflatten(out, 0, q.shape[:2])


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, *arguments: Any) -> Tensor:
        *keys_and_values, levels, options = arguments
        outs: list[Tensor] = []
        sums: list[Tensor] = []
        saved: list[Tensor | None] = []
        of_levels: list[tuple[Any, ...]] = []
        for level, k, v in zip(levels, keys_and_values[::2], keys_and_values[1::2]):
            call = checked_call(level.grouped(q), k, v, level.queries, level.keys, options).call
            out, lse, of_level = attention_forward(call, any(ctx.needs_input_grad))
            outs.append(level.ungrouped(out))
            sums.append(_sums_of_keys(level, level.ungrouped(_rows_of(lse))))
            saved += *of_level[:3], *of_level.segments
            of_levels.append(of_level[4:])  # without tensors
            ctx.of_kernels = lse.dim() == 2
        out, lse = _combined(outs, torch.stack(sums), ctx.of_kernels)
        ctx.levels, ctx.options = levels, of_levels
        ctx.save_for_backward(out, lse, *saved)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, *saved = ctx.saved_tensors
        count = len(saved) // len(ctx.levels)
        dqs: list[Tensor] = []
        gradients: list[Tensor] = []
        for i, (level, options) in enumerate(zip(ctx.levels, ctx.options)):
            q, k, v, *segments = saved[i * count : (i + 1) * count]
            do_rows, out_rows, lse_rows = (level.grouped(x) for x in (do.to(out.dtype), out, lse))
            results = [out_rows, _as_stored(lse_rows, ctx.of_kernels)]
            dq, dk, dv, *_ = attention_backward(do_rows, results, q, k, v, segments, *options)
            dqs.append(level.ungrouped(dq))
            gradients += dk, dv
        return torch.stack(dqs).sum(0), *gradients, None, None


# The log-sum-exp of the kernels is [H, rows], in base 2; that of the CPU path [rows, H, 1].


def _rows_of(lse: Tensor) -> Tensor:
    """`[rows, H]`."""
    return lse.t() if lse.dim() == 2 else lse.squeeze(2)


def _as_stored(lse: Tensor, of_kernels: bool) -> Tensor:
    """Undo `_rows_of`."""
    return lse.t().contiguous() if of_kernels else lse.unsqueeze(2)


def _sums_of_keys(level: Level, lse: Tensor) -> Tensor:
    """lse `[num_candidates, n_q, H]`, -infinity for candidates without keys in this level."""
    lengths = pad(level.keys.offsets.diff(), (0, 1))  # a candidate may have no parent
    has_keys = lengths.index_select(0, level.parents(lse.shape[0])) > 0
    return lse.where(has_keys[:, None, None], float("-inf"))


def _combined(outs: Sequence[Tensor], sums: Tensor, of_kernels: bool) -> tuple[Tensor, Tensor]:
    """O `[num_candidates, n_q, H, Dv]` and lse `[num_candidates, n_q, H]` of all levels. outs: O of
    each level. sums: `[levels, num_candidates, n_q, H]`, their lse. of_kernels: whether in base
    2."""
    exp, log = (torch.exp2, torch.log2) if of_kernels else (torch.exp, torch.log)
    top = sums.amax(0)
    top = top.where(top != float("-inf"), 0.0)
    shares = exp(sums - top)
    total = shares.sum(0)
    shares = shares / total.where(total != 0, 1.0)
    out = sum(x * share[..., None] for x, share in zip(outs, shares))
    assert isinstance(out, Tensor)
    return out.to(outs[0].dtype), top + log(total)
