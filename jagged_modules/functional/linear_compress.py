"""Linear compression of embeddings on one or several levels (users, candidates)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..containers.candidates import CandidateIndex
from ..cpu.linear_compress import linear_compress_cpu
from ..dtypes import WrongDtype, autocast, autocast_dtype, uses_kernels
from ..reference import linear_compress_reference
from ..scalars import check_equal, possessive
from ..segments import (
    check_device,
    check_index_values,
    check_integers,
    may_have_tail,
    normal_form,
    values_are_checkable,
)
from ..settings import is_batch_invariant
from ..validation import check_implementation, check_tensor, refuse_transforms

COMPRESS_IMPLEMENTATIONS = ("auto", "reference", "triton", "hopper")


class LevelNames(NamedTuple):
    """The names of the arguments of `linear_compress` in error messages, one per level. owners:
    what other arguments must match."""

    weights: list[str]
    embeddings: list[str]
    indices: list[str]
    owners: list[str]


def linear_compress(
    weights: Tensor | Sequence[Tensor],
    embeddings: Tensor | Sequence[Tensor],
    indices: Tensor | CandidateIndex | Sequence[Tensor | CandidateIndex] | None = None,
    *,
    implementation: str = "auto",
) -> Tensor:
    """Linear compression of the embeddings of candidates and of entities that many candidates share
    (users, vendors).

        out[b] = W @ E[b]                                            one level
        out[b] = W_user @ E_user[user_of[b]] + W_cand @ E_cand[b]    users and candidates
        out[b] = Σ_l W_l @ E_l[index_l[b]]                           any levels, candidates last

    One GEMM per level has that level's own batch size, and its result is added to those of the
    candidates. No embedding is replicated, forward or backward. Gradients flow to all weights and
    embeddings; those of a shared level are summed over its candidates first.

    Args:
        weights: W `[M, K]`, or one `[M, K_l]` per level, coarsest first. fp32, fp16 or bf16, on the
            CPU also fp64. Rows that start at 16-byte boundaries load fastest; other weights are
            copied to such rows.
        embeddings: E `[B, K, N]`, or one `[B_l, K_l, N]` per level, the candidates' last.
        indices: for each level but the last, the row of that level for each of the B candidates:
            `[B]` int32 or int64 in any order, or a `CandidateIndex`. None with one level. A row may
            have no candidates. Where the values are not read, on a device and under torch.compile,
            an index out of range counts as the nearest row. A candidate of a `CandidateIndex` that
            belongs to no user reads the last row, and adds nothing to the gradients of that level.
        implementation: one of
            "reference": replicates all levels and computes one GEMM;
            "triton": Triton. Adds the other levels to the accumulator of the candidates' GEMM, in
            fp32, and rounds once, with several shared levels in one launch; "hopper": the same for
            compute capability 9.0, in one launch for up to three shared levels. Needs a 16-bit
            dtype, N a multiple of 8, and embeddings with rows that start at 16-byte boundaries;
            "auto": on CUDA "hopper" if it supports the operands and N > 64, else "triton"; on other
            devices one GEMM per level in torch, then gather and add.

    Returns:
        `[B, M, N]`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes, devices or indices do not match; a shared level without rows.
        RuntimeError: a second derivative of the kernels; "reference" and the CPU support
            it. A torch.func transform (vmap, grad, jvp); "reference" supports it.
    """
    indices = [] if indices is None else indices
    arguments = dict(weights=weights, embeddings=embeddings, indices=indices)
    given = {name: _level_names(name, x) for name, x in arguments.items()}
    names = LevelNames(**given, owners=given["weights"])
    levels = _levels(weights), _levels(embeddings), _levels(indices)
    return compress_levels(*levels, names, implementation)


def compress_levels(
    weights: list[Tensor],
    embeddings: list[Tensor],
    indices: list[Tensor | CandidateIndex],
    level_names: tuple[list[str], ...],
    implementation: str = "auto",
) -> Tensor:
    """`linear_compress` of lists, whose errors call the arguments by level_names: the fields of
    `LevelNames`, because torch.fx would record the making of a named tuple."""
    names = LevelNames(*level_names)
    _check_linear_compress(weights, embeddings, indices, implementation, names)
    rows, device = embeddings[-1].shape[0], embeddings[-1].device
    maps = [
        _index_map(x, rows, embedding.shape[0], device) for x, embedding in zip(indices, embeddings)
    ]
    batch_invariant = is_batch_invariant(implementation)
    if implementation == "reference":
        return linear_compress_reference(*_autocast(weights, embeddings), maps)
    grouped = [x.to(device) if isinstance(x, CandidateIndex) else None for x in indices]
    orders = [None if x is None else x.order for x in grouped]
    offsets = [None if x is None else normal_form(x.offsets, device) for x in grouped]
    return _compress(weights, embeddings, maps, orders, offsets, implementation, batch_invariant)


def compress_unchecked(
    weights: list[Tensor], embeddings: list[Tensor], indices: list[Tensor]
) -> Tensor:
    """`linear_compress` of operands on one device that are known to match."""
    ungrouped: list[Tensor | None] = [None] * len(indices)
    return _compress(
        weights, embeddings, indices, ungrouped, ungrouped, "auto", is_batch_invariant("auto")
    )


def _compress(
    weights: list[Tensor],
    embeddings: list[Tensor],
    maps: list[Tensor],
    orders: list[Tensor | None],
    offsets: list[Tensor | None],
    implementation: str,
    batch_invariant: bool,
) -> Tensor:
    """All implementations but "reference". orders, offsets: as `CandidateIndex` has them, None for
    a map."""
    refuse_transforms("linear_compress does")
    if not uses_kernels(embeddings[-1].device, implementation):
        return linear_compress_cpu(*_autocast(weights, embeddings), maps, batch_invariant)

    from jagged_kernels.linear_compress.op import linear_compress as launch

    options, dtype = (implementation, batch_invariant), autocast_dtype(embeddings[-1])
    return launch(weights, embeddings, maps, orders, offsets, *options, dtype=dtype)


def _autocast(weights: list[Tensor], embeddings: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [autocast(x) for x in weights], [autocast(x) for x in embeddings]


def _index_map(
    index: Tensor | CandidateIndex, rows: int, size: int, device: torch.device
) -> Tensor:
    """The row of a shared level of `size` rows for each of `rows` candidates. The kernels would
    read other memory by an index out of range, or wait for a row that nothing computes, so an index
    that the host has not checked is clamped."""
    if isinstance(index, CandidateIndex):
        users = index.to(device).users(rows)
        if may_have_tail("indices", index.offsets, rows, device):
            return users.clamp(max=size - 1)
        return users
    users = normal_form(index, device)
    return users if values_are_checkable(index) else users.clamp(0, size - 1)


def _levels(x: Any) -> list[Any]:
    return [x] if isinstance(x, (Tensor, CandidateIndex)) else list(x)


def _level_names(name: str, x: Any) -> list[str]:
    """The caller's name of each level: `name` or `name[level]`. TypeError unless x is one level or
    a sequence of levels."""
    if isinstance(x, (Tensor, CandidateIndex)):
        return [name]
    # an object with a dtype is an array
    if type(x) in (str, dict, set) or not hasattr(x, "__len__") or hasattr(x, "dtype"):
        raise TypeError(f"{name} must be a tensor or a sequence of them, got {type(x).__name__}")
    return [f"{name}[{level}]" for level in range(len(x))]


def _check_linear_compress(
    weights: list[Tensor],
    embeddings: list[Tensor],
    indices: list[Tensor | CandidateIndex],
    implementation: str,
    names: LevelNames,
) -> None:
    """Raise unless all arguments match. Errors about a weight call it names.weights[level]. Errors
    that compare another argument with it call it names.owners[level]."""
    if not len(weights) == len(embeddings) == len(indices) + 1:
        sizes = f"{len(weights)} weights, {len(embeddings)} embeddings and {len(indices)} indices"
        raise ValueError(
            "weights and embeddings must have one entry per level, and indices one less, got"
            f" {sizes}"
        )
    first = names.weights[0]
    for name, weight in zip(names.weights, weights):
        check_tensor(name, weight, 2, "[M, K]", "linear_compress", implementation)
        _check_alike(name, weight, first, weights[0])
        if weight.shape[0] != weights[0].shape[0]:
            m, got = weights[0].shape[0], weight.shape[0]
            raise ValueError(f"{name} must have {first}'s M, {m}, got {got}")
    for level, (weight, embedding) in enumerate(zip(weights, embeddings)):
        name, weight_name = names.embeddings[level], names.owners[level]
        check_tensor(name, embedding, 3, "[B, K, N]", "linear_compress", implementation)
        _check_alike(name, embedding, weight_name, weight)
        for dimension, size, owner in (
            ("K", weight.shape[1], weight_name),
            ("N", embeddings[0].shape[2], names.embeddings[0]),
        ):
            if embedding.shape["BKN".index(dimension)] != size:
                shape = f"[B, K, N] with {dimension} = {size}, that of {owner}"
                raise ValueError(f"{name} must have shape {shape}, got {list(embedding.shape)}")
    check_implementation(
        implementation, COMPRESS_IMPLEMENTATIONS, embeddings[-1].device, reads_offsets=False
    )
    candidates = names.embeddings[-1], embeddings[-1]
    for name, index, owner, shared in zip(names.indices, indices, names.embeddings, embeddings):
        _check_index(name, index, *candidates, owner, shared.shape[0])


def _check_alike(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """ValueError unless both have the same device and, possibly after autocast, the same dtype."""
    if x.device != other.device:
        raise ValueError(
            f"{name} must be on {possessive(other_name)} device, {other.device}, got {x.device}"
        )
    if x.dtype != other.dtype and autocast_dtype(x) != autocast_dtype(other):
        raise WrongDtype(
            f"{name} must have {possessive(other_name)} dtype, {other.dtype}, got {x.dtype}"
        )


def _check_index(
    name: str,
    index: Tensor | CandidateIndex,
    candidates_name: str,
    candidates: Tensor,
    shared_name: str,
    size: int,
) -> None:
    """Raise unless the index maps each row of the candidates' embeddings to one of the `size` rows
    of a shared level's embeddings."""
    rows = candidates.shape[0]
    if isinstance(index, CandidateIndex):
        index.check(rows, size, name, f"{candidates_name} has", f"{shared_name} has")
        given = index.offsets
    else:
        check_integers(name, index)
        check_equal(name, f"have one entry per row of {candidates_name}", rows, index.shape[0])
        given = index
    check_device(name, given, candidates.device, "the embeddings'")
    if size == 0 and rows != 0:  # no index is in range, nor can one of a device be clamped
        raise ValueError(f"{shared_name} must have rows, as {candidates_name} has {rows}, got 0")
    if given is index:
        check_index_values(name, given, size, f"{{}}, the rows of {shared_name}")
