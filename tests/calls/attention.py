"""Calls of attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import accuracy
import torch
from cases import Case
from forms import is_on_host
from space import BIASES, MASKS, form_of
from torch import Tensor

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.schedule import host_schedule

from .maker import Call, Maker, lay_out, offsets_of, stacked


def attention_mask(make: Maker, o: dict, key_lengths: list[int]) -> jm.AttentionMask | None:
    if o.get("mask") is None:
        return None
    fields = dict(MASKS[o["mask"]])
    if "num_targets" in fields:  # from none to all of a segment
        longest = torch.tensor(key_lengths, dtype=torch.int64, device=make.device).clamp(
            max=fields["num_targets"]
        )
        targets = torch.minimum(
            make.integers(0, fields["num_targets"] + 20, len(key_lengths)), longest
        )
        if "expanded" in o["form of num_targets"] and len(key_lengths):
            targets = targets.min().expand_as(targets)
        fields["num_targets"] = make.index("num_targets", targets)
    return jm.AttentionMask(**fields)


def _output_scale(make: Maker, o: dict, num_segments: int) -> float | Tensor:
    if o["output_scale"] not in ("tensor", "tensor with gradient"):
        return o["output_scale"]
    if o["output_scale"] == "tensor with gradient":
        return make.values(num_segments)
    return make.index("output_scale", make.values(num_segments).float())


def _attention_tensors(make: Maker, o: dict, q_rows: int, kv_rows: int) -> dict[str, Tensor]:
    heads, kv_heads = o["heads"]
    v_dim = o["v_dim"] or o["head_dim"]
    shapes = dict(
        q=(q_rows, heads, o["head_dim"]),
        k=(kv_rows, kv_heads, o["head_dim"]),
        v=(kv_rows, kv_heads, v_dim),
    )
    storage = o.get("storage", "own")
    if storage == "one":
        return _in_one_storage(make, shapes)
    tensors = {name: make.tensor(*shape) for name, shape in shapes.items()}
    return tensors | dict(v=tensors["k"]) if storage == "k is v" else tensors


def _dropout(make: Maker, o: dict) -> dict[str, float | Tensor]:
    """Arguments of dropout; none for a p of 0."""
    if not o["dropout_p"]:
        return {}
    seed = make.integers(-(2**62), 2**62, 1)[0]
    return dict(dropout_p=o["dropout_p"], dropout_seed=seed)


def _in_one_storage(make: Maker, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Views of one packed projection, or of one flat tensor if there are more queries than keys, or
    fewer."""
    (q_rows, heads, dim), (kv_rows, kv_heads, _), _ = shapes.values()
    if q_rows == kv_rows:
        parts = (
            make.values(q_rows, heads + 2 * kv_heads, dim)
            .contiguous()
            .split([heads, kv_heads, kv_heads], 1)
        )
        return dict(zip(shapes, parts))
    parts = make.values(sum(map(math.prod, shapes.values()))).split(
        [math.prod(shape) for shape in shapes.values()]
    )
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}


def _schedule(
    make: Maker, o: dict, q_lengths: list[int], kv_lengths: list[int], mask: jm.AttentionMask | None
) -> jm.TileSchedule | None:
    """The schedule that a data loader would build."""
    if not o["schedule"] or make.case.device == "cpu" or o["implementation"] == "reference":
        return None
    sizes = dict(
        num_heads=o["heads"][0],
        num_kv_heads=o["heads"][1],
        head_dim=max(o["head_dim"], o["v_dim"] or 0),
    )
    lengths = [torch.tensor(x, dtype=torch.int64) for x in (q_lengths, kv_lengths)]
    with make.defaults():
        return host_schedule(*lengths, **sizes, dtype=getattr(torch, make.case.dtype), mask=mask)


def _bias(
    make: Maker, o: dict, q_lengths: list[int], kv_lengths: list[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tables of a RelativeBias, and its other fields. q_lengths: of all query groups."""
    own = q_lengths[: len(kv_lengths)]
    names, longest = BIASES.get(o["bias"], ()), max(1, *own, *kv_lengths, 1)
    if not names:
        return {}, {}
    positions = {"longest": longest, "more": longest + 3, "fewer": longest}[o["positions"]]
    # not checked, but limited
    if o["positions"] == "fewer" and make.case.device == "cuda" and not _lengths_are_on_the_host(o):
        positions = -(-longest // 2)
    sizes = dict(position=2 * positions - 1, time=o["buckets"] + 1)
    tables, fields = {name: _table(make, o, sizes[name]) for name in names}, {}
    if "time" in names:
        fields["timestamps"] = _timestamps(make, o["timestamps"], kv_lengths)
        if o["query_times"]:
            fields["query_timestamps"] = _timestamps(make, o["timestamps"], q_lengths)
        if o["boundaries"] != "default":
            few = o["boundaries"] == "duplicates"
            edges = 10 ** (
                torch.rand(
                    o["buckets"], generator=make.generator, device=make.device, dtype=torch.float64
                )
                * (1 if few else 12)
            )
            fields["boundaries"] = edges.long().sort().values
    if o["query_shift"]:
        fields["query_shift"] = make.integers(-5, 40, len(q_lengths))
    return tables, {name: make.index(name, x) for name, x in fields.items()}


def _bias_of(inputs: dict[str, Tensor], fields: dict[str, Tensor]) -> jm.RelativeBias | None:
    tables = {name: inputs[name] for name in ("position", "time") if name in inputs}
    return jm.RelativeBias(**tables, **fields) if tables else None


def _lengths_are_on_the_host(o: dict) -> bool:
    names = "q_offsets", "kv_offsets", "offsets"
    return any(is_on_host(o[form_of(name)]) for name in names if form_of(name) in o)


def _table(make: Maker, o: dict, entries: int) -> Tensor:
    shape = (entries,) if o["tables"] == "shared" else (o["heads"][0], entries)
    if o["tables"] == "in the operands' dtype" or o["values"] != "normal":
        table = make.values(*shape)
    else:
        table = torch.randn(shape, generator=make.generator, device=make.device)
    return (
        table
        if o["tables"] == "in the operands' dtype"
        else table.to(torch.promote_types(make.dtype, torch.float32))
    )


def _timestamps(make: Maker, kind: str, lengths: list[int]) -> Tensor:
    rows = sum(lengths) + make.behind
    if kind == "equal":
        return torch.full((rows,), 10**9, device=make.device)
    if kind == "huge":  # differences beyond int32 too
        return make.integers(-(2**40), 2**40, rows)
    steps = make.integers(0, 2**33 if kind == "far apart" else 5000, rows)
    return make.integers(0, 10**7, rows) if kind == "unsorted" else steps.cumsum(0)


def jagged_attention(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    operands = o["operands"]
    *queries, keys = lengths if len(lengths) > 1 else lengths * 2
    q_lengths = [n for side in queries for n in side]
    q_shared, kv_shared = operands == "q shared", operands == "kv shared"
    tensors = _attention_tensors(
        make,
        o,
        o["shared_rows"] if q_shared else sum(q_lengths),
        o["shared_rows"] if kv_shared else sum(keys),
    )
    q_segments = torch.cat([make.segments(side) for side in queries])
    rows = make.segments([o["shared_rows"]] * len(keys)) if q_shared else q_segments
    segments = (
        dict(out=rows)
        | ({} if q_shared else dict(q=rows))
        | ({} if kv_shared else dict.fromkeys("kv", make.segments(keys)))
    )
    mask, scales = attention_mask(make, o, keys), _output_scale(make, o, len(q_lengths))
    if o["output_scale"] == "tensor with gradient":
        tensors["output_scale"] = scales
        segments["output_scale"] = torch.arange(len(q_lengths), device=make.device) % max(
            len(keys), 1
        )

    tables, fields = _bias(make, o, q_lengths, keys)
    tensors |= tables

    q_offsets = "shared" if q_shared else make.offsets("q_offsets", q_lengths)
    kv_offsets = (
        "shared" if kv_shared else None if operands == "self" else make.offsets("kv_offsets", keys)
    )
    options = dict(activation=o["activation"], scale=o["scale"], mask=mask) | _dropout(make, o)
    call_options = dict(
        implementation=o["implementation"], schedule=_schedule(make, o, q_lengths, keys, mask)
    )
    if not q_shared:
        call_options["max_seqlen_q"] = make.max_seqlen(q_lengths)
    if not kv_shared:
        call_options["max_seqlen_kv"] = make.max_seqlen(keys)

    def function(q, k, v, output_scale=scales, **inputs):
        own = dict(options, output_scale=output_scale, bias=_bias_of(inputs, fields))
        return dict(out=F.jagged_attention(q, k, v, q_offsets, kv_offsets, **own, **call_options))

    def model(inputs, gradients):
        q, k, v = (inputs[name] for name in "qkv")
        own = dict(options, output_scale=inputs.get("output_scale", scales))
        own["bias"] = _bias_of(inputs, fields)
        both = (
            "shared" if q_shared else offsets_of(q_lengths),
            "shared" if kv_shared else offsets_of(keys),
        )
        return accuracy.attention(q, k, v, gradients["out"], *both, **own)

    rows = (() if q_shared else ("q", "out")) + (() if kv_shared else ("k", "v"))
    return Call(tensors, function, model, segments, frozenset(rows))


def candidate_index(
    make: Maker, kind: str, counts: list[int]
) -> tuple[Tensor, Callable[[], jm.CandidateIndex]]:
    """The user of each candidate, and what makes an index of this kind."""
    users = make.segments(counts)
    if kind == "shuffled map":
        users = users[torch.randperm(len(users), generator=make.generator, device=make.device)]
    given = {"counts": torch.tensor(counts, dtype=torch.int64), "offsets": offsets_of(counts)}
    index = make.index("candidates", given.get(kind, users))
    of_kind = {
        "counts": jm.CandidateIndex.from_counts,
        "offsets": jm.CandidateIndex.from_offsets,
    }.get(kind, lambda x: jm.CandidateIndex.from_map(x, len(counts)))
    return users, lambda: of_kind(index)


def target_attention(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    counts, keys = lengths
    rows = o["rows"]
    users, index = candidate_index(make, o["index"], counts)
    tensors = _attention_tensors(make, o | dict(layout="contiguous"), len(users) * rows, sum(keys))
    tensors["q"] = tensors["q"].unflatten(0, (len(users), rows))
    tensors = {name: lay_out(x, o["layout"]) for name, x in tensors.items()}
    segments = dict(q=users, out=users) | dict.fromkeys("kv", make.segments(keys))
    mask, scales = attention_mask(make, o, keys), _output_scale(make, o, len(counts))
    if o["output_scale"] == "tensor with gradient":
        tensors["output_scale"], segments["output_scale"] = (
            scales,
            torch.arange(len(counts), device=make.device),
        )
    kv_offsets = make.offsets("kv_offsets", keys)
    query_lengths = [n * rows for n in counts]
    options = dict(activation=o["activation"], scale=o["scale"], mask=mask) | _dropout(make, o)
    call_options = dict(
        implementation=o["implementation"], schedule=_schedule(make, o, query_lengths, keys, mask)
    )
    call_options |= dict(
        max_seqlen_q=make.max_seqlen(query_lengths), max_seqlen_kv=make.max_seqlen(keys)
    )

    def function(q, k, v, output_scale=scales):
        return dict(
            out=F.target_attention(
                q, k, v, index(), kv_offsets, output_scale=output_scale, **options, **call_options
            )
        )

    def model(inputs, gradients):
        order = users.sort(stable=True).indices
        inverse = order.argsort()
        q, do = (x[order].flatten(0, 1) for x in (inputs["q"], gradients["out"]))
        k, v = inputs["k"], inputs["v"]
        offsets = torch.tensor([0, *query_lengths]).cumsum(0).to(q.device)
        factor = inputs.get("output_scale", scales)
        bounds = accuracy.attention(
            q, k, v, do, offsets, offsets_of(keys), output_scale=factor, **options
        )
        return bounds | {
            name: bounds[name].map(lambda x: x.unflatten(0, (len(users), rows))[inverse])
            for name in ("out", "dq")
        }

    return Call(tensors, function, model, segments, frozenset("kv"))


def self_target_attention(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    users, candidates = lengths
    rows = sum(users), sum(candidates)
    tensors = _attention_tensors(make, o, sum(rows), rows[0])
    one_tensor = o["query_tensors"] == "one tensor"  # whose parts are read in place
    if not one_tensor:
        parts = tensors.pop("q").split(rows)
        tensors = (
            dict(q_user=lay_out(parts[0], o["layout"]), q_candidates=lay_out(parts[1], o["layout"]))
            | tensors
        )
    of_users, of_candidates = make.segments(users), make.segments(candidates)
    segments = dict(
        q_user=of_users,
        q_candidates=of_candidates,
        k=of_users,
        v=of_users,
        user=of_users,
        candidates=of_candidates,
    )
    segments["q"] = torch.cat([of_users, of_candidates])
    scales = _output_scale(make, o, 2 * len(users))
    if o["output_scale"] == "tensor with gradient":
        tensors["output_scale"] = scales
        segments["output_scale"] = torch.arange(2 * len(users), device=make.device) % max(
            len(users), 1
        )
    offsets = make.offsets("offsets", users), make.offsets("candidate_offsets", candidates)
    mask = attention_mask(make, o, users)
    tables, fields = _bias(make, o, users, users)
    tensors |= tables
    options = dict(activation=o["activation"], scale=o["scale"], mask=mask) | _dropout(make, o)

    def function(k, v, q=None, q_user=None, q_candidates=None, output_scale=scales, **inputs):
        queries = q.split(rows) if one_tensor else (q_user, q_candidates)
        flags = dict(options, output_scale=output_scale, implementation=o["implementation"])
        flags["bias"] = _bias_of(inputs, fields)
        return dict(
            zip(("user", "candidates"), F.self_target_attention(*queries, k, v, *offsets, **flags))
        )

    def model(inputs, gradients):
        q = inputs["q"] if one_tensor else torch.cat([inputs["q_user"], inputs["q_candidates"]])
        do = torch.cat([gradients["user"], gradients["candidates"]])
        both = torch.cat([torch.tensor([0, *users, *candidates])]).cumsum(0).to(q.device)
        factor = inputs.get("output_scale", scales)
        own = dict(options, output_scale=factor, bias=_bias_of(inputs, fields))
        keys = inputs["k"], inputs["v"]
        bounds = accuracy.attention(q, *keys, do, both, offsets_of(users), **own)
        names = dict(out=("user", "candidates")) | (
            {} if one_tensor else dict(dq=("dq_user", "dq_candidates"))
        )
        for name, (first, second) in names.items():
            bound = bounds.pop(name)
            bounds[first], bounds[second] = (
                bound.map(lambda x: x[: rows[0]]),
                bound.map(lambda x: x[rows[0] :]),
            )
        return bounds

    behind = () if one_tensor else ("q_user", "q_candidates", "k", "v", "user", "candidates")
    return Call(tensors, function, model, segments, frozenset(behind))


def _rotary(make: Maker, o: dict, lengths: list[int]) -> jm.Rotary | None:
    if o["rotary"] is None:
        return None
    num_positions = max(1, *lengths, 1)
    if o["angles"] == "linear":
        rotary = jm.Rotary.from_frequencies(
            o["head_dim"], num_positions, o["rotary"], device=make.device
        )
        return dataclasses.replace(rotary, precise=o["precise"])
    angles = 6 * torch.rand(
        num_positions, o["head_dim"] // 2, generator=make.generator, device=make.device
    )
    positions = None
    if o["angles"] == "positions":
        positions = make.index(
            "positions", make.integers(0, num_positions, sum(lengths) + make.behind)
        )
    return jm.Rotary(angles.cos(), angles.sin(), o["rotary"], positions, precise=o["precise"])


def _without_rows_behind(options: dict, lengths: list[int]) -> dict:
    rotary = options["rotary"]
    if rotary is None or rotary.positions is None:
        return options
    return dict(
        options, rotary=dataclasses.replace(rotary, positions=rotary.positions[: sum(lengths)])
    )


def _keeps_units(o: dict) -> bool | None:
    """Whether the kernels keep rotated operands in higher precision; None: "auto" may select those
    that do."""
    return o["precise"] and {"hopper": True, "auto": None}.get(o["implementation"], False)


def _is_composed(case: Case) -> bool:
    """Whether blocks too large for a kernel of their own are rotated first and then given to jagged
    attention."""
    o, dtype = case.options, getattr(torch, case.dtype)
    if case.device != "cuda" or o["implementation"] == "reference":
        return False
    from jagged_modules.functional.block_attention import runs_kernels

    group = o["heads"][0] // o["heads"][1]
    sizes = dtype, o["head_dim"], o["block_size"], group
    return not runs_kernels(torch.device("cuda", 0), *sizes, o["implementation"])


def block_diagonal_attention(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    tensors = _attention_tensors(make, o | dict(v_dim=None), sum(lengths), sum(lengths))
    options = dict(block_size=o["block_size"], scale=o["scale"], rotary=_rotary(make, o, lengths))
    options |= _dropout(make, o)
    offsets = make.offsets("offsets", lengths)

    def function(q, k, v):
        return dict(
            out=F.block_diagonal_attention(
                q, k, v, offsets, implementation=o["implementation"], **options
            )
        )

    def model(inputs, gradients):
        arithmetic = dict(precise=_keeps_units(o), composed=_is_composed(make.case))
        return accuracy.block_attention(
            *inputs.values(),
            gradients["out"],
            offsets_of(lengths),
            **arithmetic,
            **_without_rows_behind(options, lengths),
        )

    return Call(
        tensors,
        function,
        model,
        dict.fromkeys(("q", "k", "v", "out"), make.segments(lengths)),
        frozenset(("q", "k", "v", "out")),
    )


def block_diagonal_attention_packed(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    (lengths,) = lengths
    tensors = dict(qkv=make.tensor(sum(lengths), 3, o["heads"][0], o["head_dim"]))
    options = dict(block_size=o["block_size"], rotary=_rotary(make, o, lengths)) | _dropout(make, o)
    offsets = make.offsets("offsets", lengths)

    def function(qkv):
        return dict(
            out=F.block_diagonal_attention_packed(
                qkv, offsets, implementation=o["implementation"], **options
            )
        )

    def model(inputs, gradients):
        arithmetic = dict(precise=_keeps_units(o), composed=_is_composed(make.case))
        bounds = accuracy.block_attention(
            *inputs["qkv"].unbind(1),
            gradients["out"],
            offsets_of(lengths),
            **arithmetic,
            **_without_rows_behind(options, lengths),
        )
        return dict(
            out=bounds["out"], dqkv=stacked([bounds[name] for name in ("dq", "dk", "dv")], 1)
        )

    return Call(
        tensors,
        function,
        model,
        dict.fromkeys(("qkv", "out"), make.segments(lengths)),
        frozenset(("qkv", "out")),
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> accuracy.Bound:
    cos, sin = (
        accuracy.Bound.exact(table[:, None].to(torch.promote_types(x.dtype, torch.float32)))
        for table in (cos, sin)
    )
    first, second = (accuracy.Bound.exact(part) for part in x.unflatten(-1, (-1, 2)).unbind(-1))
    pair = first * cos - second * sin, second * cos + first * sin
    return stacked(pair, -1).map(lambda y: y.flatten(-2)).rounded(x.dtype)


def apply_rotary(make: Maker, o: dict, lengths: list[list[int]]) -> Call:
    rows, dim = sum(lengths[0]), o["head_dim"]
    angles = 6 * torch.rand(rows, dim // 2, generator=make.generator, device=make.device)
    cos, sin = angles.cos(), angles.sin()
    return Call(
        dict(x=make.tensor(rows, o["heads"][0], dim)),
        lambda x: dict(out=F.apply_rotary(x, cos, sin)),
        lambda inputs, gradients: dict(
            out=_rotated(inputs["x"], cos, sin), dx=_rotated(gradients["out"], cos, -sin)
        ),
        dict.fromkeys(("x", "out"), make.segments(lengths[0])),
    )
