"""Attention of candidates to their users' histories, with scores from an MLP (DIN)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jagged_kernels.din.configs import MAX_WEIGHTS, has_kernels
from torch import Tensor
from torch.nn.functional import linear

from ..containers.candidates import CandidateIndex
from ..containers.padding import padded_to
from ..dtypes import autocast
from ..masks import AttentionMask, check_num_targets
from ..reference import din_attention_reference
from ..scalars import check_choice, check_kind, is_sequence
from ..segments import RowSegments, check_device, check_offsets, normal_form, parse_segments
from ..unit_activations import (
    FEATURES,
    UNIT_ACTIVATIONS,
    WITH_PARAMETERS,
    UnitParameters,
    first_layer,
)
from ..validation import check_dtype, check_tensor
from .attention_arguments import check_mask
from .din_node import DINCall, DINTensors, weighted_events
from .operands import checked_operands, runs_kernels
from .tail import entering


class DINMlp(NamedTuple):
    """The MLP of the scores, as `din_attention` takes it, checked."""

    weights: list[Tensor]
    biases: list[Tensor]
    activation: str
    normalize: str | None
    features: tuple[str, ...]
    units: UnitParameters | None


def din_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    candidates: CandidateIndex | Tensor,
    kv_offsets: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    activation: str,
    normalize: str | None = None,
    features: Sequence[str] = ("q", "k", "q-k", "q*k"),
    units: UnitParameters | None = None,
    mask: AttentionMask | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Sums of the events of each candidate's user, weighted by an MLP's scores of the pairs of
    candidate and event: the attention of DIN (Zhou et al. 2018, arXiv:1706.06978).

    For each pair, x = concat(features), h = activation(W x + b) for each hidden layer, and the
    score is s = w · h + b of the last linear. The first linear is computed as A q + B k +
    D (q ∘ k), and no tensor has a row for each pair, forward or backward: the CPU path computes
    pairs in chunks, the kernels in tiles, and the backward computes the scores again.

    Args:
        q: `[C, E]` or `[C, n_q, E]`, one or n_q query rows of each candidate; fp32, fp16 or bf16
            (on the CPU also fp64).
        k: `[L, E]`, the events of the users' histories, of q's dtype.
        v: `[L, Ev]`, what is summed, of q's dtype. The published model has v = k; the kernels then
            read it once if both are the same tensor.
        candidates: the user of each candidate: a `CandidateIndex`, or `[C]` int32 or int64 in any
            order.
        kv_offsets: `[num_users + 1]` int32 or int64, on q's device or the host.
        weights: of the linears, `[H1, |features| · E]`, `[H2, H1]`, ..., `[1, H_last]`; at least
            two.
        biases: of the linears, `[H1]`, `[H2]`, ..., `[1]`.
        activation: "sigmoid", "relu", "silu", "identity", "prelu" or "dice". The last two need
            `units`.
        normalize: None: the weights are the scores, as published. "softmax": over the events.
        features: the features in the order of the first weight's columns, each of "q", "k",
            "q-k", "k-q" and "q*k" at most once.
        units: slopes of PReLU, or slopes and statistics of Dice.
        mask: which events each query row sees; all if None. As in `target_attention`, the query
            rows of a user, in the order of q, are the last rows of the history. A hidden event has
            no weight, and no part in Dice's statistics.
        implementation: "auto", "reference" or "triton". The kernels take one or two hidden layers
            of at most 256 units, E and Ev up to 256, and E · H1 + H1 · H2 up to 32768 (14336 in
            fp32), with sizes rounded up to sums of powers of two. Other sizes run on a GPU as
            "reference" only, which has a row for each pair.

    Returns:
        `[C, Ev]` or `[C, n_q, Ev]`, in q's order. 0 for a candidate that sees no event. There are
        gradients of q, k, v, the weights, biases, slopes, and norm weights and biases. They are
        deterministic.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes, devices or offsets do not match; an unknown name; units that are
            missing, or not wanted; "auto" or "triton" on a GPU with sizes that the kernels do not
            take.
        RuntimeError: a second derivative, or a torch.func transform; "reference" supports both, and
            does not update running statistics.

    Example::

        q, history = torch.randn(3, 8), torch.randn(5, 8)  # two users with 2 and 3 events
        candidates, offsets = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 5])
        weights = [torch.randn(16, 32), torch.randn(1, 16)]
        biases = [torch.zeros(16), torch.zeros(1)]
        out = jm.functional.din_attention(
            q, history, history, candidates, offsets, weights, biases, activation="sigmoid"
        )  # [3, 8]
    """
    many = getattr(q, "ndim", 2) == 3
    q, k, v = checked_operands(
        "din_attention",
        implementation,
        q=(q, "[C, n_q, E]" if many else "[C, E]"),
        k=(k, "[L, E]"),
        v=(v, "[L, Ev]"),
    )
    if k.shape[1] != q.shape[-1] or v.shape[0] != k.shape[0]:
        raise ValueError(
            f"k must have q's width, {q.shape[-1]}, and v k's rows, got k {list(k.shape)} and v"
            f" {list(v.shape)}"
        )
    mlp = checked_mlp(q, DINMlp(weights, biases, activation, normalize, features, units))  # type: ignore[arg-type]  # checked there
    check_offsets("kv_offsets", kv_offsets, k.shape[0])
    check_device("kv_offsets", kv_offsets, q.device, "q's")
    check_mask(mask)
    if mask is not None:
        check_num_targets("mask.num_targets", mask.num_targets, kv_offsets, q.device, "q's")
    keys = parse_segments("kv_offsets", kv_offsets, k.shape[0], q.device)
    rows = q.shape[1] if many else 1
    index, queries = CandidateIndex.parse(candidates, q, kv_offsets.shape[0] - 1, rows)
    grouped = index.grouped(q).reshape(-1, q.shape[-1])
    if implementation == "reference":
        out = din_attention_reference(grouped, k, v, queries.offsets, keys.offsets, *mlp, mask)
        out = padded_to(out, grouped.shape[0])
    else:
        kernels = runs_kernels(implementation, q)
        if not kernels:  # they read no rows behind the end
            k, v = (entering(k, keys.end),) * 2 if v is k else (entering(k, keys.end), v)
        out = attend_by_mlp(grouped, k, v, None, queries, keys, mlp, kernels, mask)
    return index.ungrouped(out.view(*q.shape[:-1], v.shape[1]))


def event_part(k: Tensor, mlp: DINMlp) -> Tensor:
    """What the first linear adds for each event, `[L, H1]`."""
    return linear(k, first_layer(mlp.weights[0], mlp.features, k.shape[1])[1])


def attend_by_mlp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor | None,
    queries: RowSegments,
    keys: RowSegments,
    mlp: DINMlp,
    kernels: bool,
    mask: AttentionMask | None,
) -> Tensor:
    """`din_attention` of checked operands: q `[R, E]` grouped by user, and b `event_part` of k or
    None. The kernels take its weight instead of b."""
    of_q, of_k, of_products = first_layer(mlp.weights[0], mlp.features, k.shape[1])
    q = entering(q, queries.end)
    a, units = linear(q, of_q, mlp.biases[0]), mlp.units
    if kernels:
        check_kernel_sizes(q, v, mlp)
        b = of_k
    elif b is None:
        b = linear(k, of_k)
    tensors = DINTensors(
        [q, k, a, b, *([] if v is k else [v])],
        [of_products, *mlp.weights[1:]],
        list(mlp.biases[1:]),
        *(list(x or ()) for x in (
            units and units.slopes, units and units.norm_weights, units and units.norm_biases
        )),
    )  # fmt: skip
    params, num_targets = None, None
    if mask is not None and not mask.hides_nothing():
        params, num_targets = list(mask.params), mask.num_targets
    if num_targets is not None:
        num_targets = normal_form(num_targets, q.device)
    call = DINCall(
        [queries.offsets, keys.offsets, num_targets], mlp.activation, mlp.normalize == "softmax",
        len(mlp.weights) - 1, kernels,
        mlp.activation == "dice" and units is not None and units.uses_batch, params,
    )  # fmt: skip
    return weighted_events(tensors, call, units)


def check_kernel_sizes(q: Tensor, v: Tensor, mlp: DINMlp) -> None:
    """ValueError for a dtype or sizes that the kernels do not take."""
    check_dtype("q", q, "din_attention")
    hidden = tuple(x.shape[0] for x in mlp.weights[:-1])
    itemsize = q.element_size()
    if not has_kernels(q.shape[1], v.shape[1], hidden, itemsize):
        raise ValueError(
            "the kernels take one or two hidden layers of at most 256 units, E and Ev up to 256,"
            f" and E · H1 + H1 · H2 up to {MAX_WEIGHTS[itemsize]} in {q.dtype}, with sizes rounded"
            f" up to sums of powers of two, got hidden {list(hidden)}, E = {q.shape[1]} and"
            f" Ev = {v.shape[1]}; implementation 'reference' takes any, with a row for each pair of"
            " candidate and event"
        )


def checked_mlp(q: Tensor, mlp: DINMlp) -> DINMlp:
    """The MLP for rows like q's, in autocast's dtype. Raises as `din_attention`."""
    check_choice("activation", mlp.activation, UNIT_ACTIVATIONS)
    check_choice("normalize", mlp.normalize, (None, "softmax"))
    features = checked_features(mlp.features)
    for name, given in (("weights", mlp.weights), ("biases", mlp.biases)):
        check_kind(name, given, (list, tuple), "a list or tuple")
    if len(mlp.weights) < 2 or len(mlp.biases) != len(mlp.weights):
        raise ValueError(
            "weights and biases must be of the same two or more linears, got"
            f" {len(mlp.weights)} and {len(mlp.biases)}"
        )
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    columns = len(features) * q.shape[-1]
    for i, (weight, bias) in enumerate(zip(mlp.weights, mlp.biases)):
        weights.append(_of_dtype(f"weights[{i}]", weight, 2, "[H, columns]", q))
        biases.append(_of_dtype(f"biases[{i}]", bias, 1, "[H]", q))
        last = i == len(mlp.weights) - 1
        if weight.shape[1] != columns or (last and weight.shape[0] != 1):
            raise ValueError(
                f"weights[{i}] must have shape [{1 if last else 'H'}, {columns}], got"
                f" {list(weight.shape)}"
            )
        columns = weight.shape[0]
        if bias.shape[0] != columns:
            raise ValueError(f"biases[{i}] must have shape [{columns}], got {list(bias.shape)}")
    _check_units(mlp.activation, mlp.units, [len(x) for x in biases[:-1]], q)
    return DINMlp(weights, biases, mlp.activation, mlp.normalize, features, mlp.units)


def checked_features(features: Sequence[str]) -> tuple[str, ...]:
    """ValueError unless these are different features, at least one."""
    known = is_sequence(features) and all(str(name) in FEATURES for name in features)
    if not known or not features or len(set(features)) != len(features):
        raise ValueError(
            f"features must be different ones of {tuple(FEATURES)}, at least one, got {features!r}"
        )
    return tuple(features)


def _of_dtype(name: str, x: Tensor, dim: int, shape: str, q: Tensor) -> Tensor:
    check_tensor(name, x, dim, shape)
    x = autocast(x)
    if x.dtype != q.dtype or x.device != q.device:
        raise ValueError(
            f"{name} must have q's dtype and device, {q.dtype} on {q.device}, got {x.dtype} on"
            f" {x.device}"
        )
    return x


def _check_units(
    activation: str, units: UnitParameters | None, hidden: list[int], q: Tensor
) -> None:
    if (activation in WITH_PARAMETERS) != (units is not None):
        needs = "needs" if activation in WITH_PARAMETERS else "takes no"
        raise ValueError(f"activation {activation!r} {needs} units")
    if units is None:
        return
    check_kind("units", units, UnitParameters, "a jagged_modules.UnitParameters")
    for name in ("slopes", "norm_weights", "norm_biases", "running_means", "running_vars"):
        tensors = getattr(units, name)
        if tensors is None:
            continue
        shapes = [list(x.shape) for x in tensors]
        if shapes != [[size] for size in hidden] or any(x.device != q.device for x in tensors):
            raise ValueError(
                f"units.{name} must be one tensor [H] for each hidden layer, with H of {hidden}, on"
                f" {q.device}, got shapes {shapes} on {[str(x.device) for x in tensors]}"
            )
