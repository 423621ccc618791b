"""Jagged attention against torch and peers: self-attention over jagged sequences, target attention
with shared users.

    # on a CUDA device: both tables, the memory sweep, the ladder
    python kernels/benchmarks/bench_attention.py
    # the CPU path against padded attention
    python kernels/benchmarks/bench_attention.py --device cpu
    python kernels/benchmarks/bench_attention.py --tiny --device cpu

TFLOP/s count the useful work, 4·H·D·Σ(lq·lk) forward and 2.5 times that backward, for every
implementation alike. The floor is the time of that work at the rate that long GEMMs attain on an
H200.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial

import peers
import torch
from inputs import (
    attention_setup,
    by_rows,
    exact,
    leaves,
    named,
    offsets_of,
    our_implementations,
    our_kernels,
    pad,
    plain_attention,
    random_tensors,
    sample_segments,
    timed_schedule,
    uniform_lengths,
    varlen_attention,
)
from names import DENSE, DENSE_FLASH, FA2, OURS, PORTABLE, UNFUSED
from runner import Case, Implementation, Setup, main
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import jagged_modules as jm
from jagged_modules import functional as F

# -- the definition, and padded forms of it --------------------------------------------------------


def reference(samples: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of sampled segments: ``samples[part]`` holds their q, k, v and output
    gradient, each ``[N, H, D]``."""
    results = {}
    for part, (*qkv, grad) in samples.items():
        results |= named(part, exact(by_rows(plain_attention), qkv, grad, dtype))
    return results


def sdpa(
    backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    """torch's scaled_dot_product_attention, by one backend or (None) the one it chooses."""
    if backend is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)


# -- self-attention --------------------------------------------------------------------------------


def self_attention(
    device: str,
    dtype: torch.dtype,
    lengths: Tensor,
    num_heads: int,
    head_dim: int,
    cpu_table: bool = False,
) -> Setup:
    """Jagged self-attention. ``cpu_table``: the peers pad and unpad in the measured call, as models
    on a CPU do."""
    max_seqlen, total = int(lengths.max()), int(lengths.sum())
    host_offsets = offsets_of(lengths)
    offsets = host_offsets.to(device)
    valid = (torch.arange(max_seqlen) < lengths[:, None]).to(device)
    q, k, v, grad = random_tensors(device, dtype, *[(total, num_heads, head_dim)] * 4)
    inputs = leaves(q=q, k=k, v=v)
    parts = {
        segment: slice(*host_offsets[segment : segment + 2].tolist())
        for segment in sample_segments(lengths)
    }

    def jagged(forward, **extra):
        return Implementation(
            lambda: forward(**inputs),
            inputs,
            lambda name, x: {b: x[rows] for b, rows in parts.items()},
            grad,
            **extra,
        )

    def ours(kernels: str):
        schedule, build_ms = timed_schedule(lengths, lengths, q, implementation=kernels)
        forward = partial(
            F.jagged_attention,
            q_offsets=offsets,
            max_seqlen_q=max_seqlen,
            schedule=schedule,
            implementation=kernels,
        )
        return jagged(forward, host_ms=build_ms)

    def unfused():
        """Composed of jagged operators, which have no heads. q is scaled, as it is smaller than the
        scores."""
        plan = F.ScorePlan.from_offsets(host_offsets).to(device)

        def forward(q, k, v):
            scores = F.jagged_jagged_bmm_jagged_out(q[:, 0] / math.sqrt(head_dim), k[:, 0], plan)
            return F.array_jagged_bmm_jagged_out(F.jagged2_softmax(scores, plan), v[:, 0], plan)[
                :, None
            ]

        return jagged(forward)

    def varlen(attention=varlen_attention):
        return jagged(lambda q, k, v: attention(q, k, v, offsets, offsets, max_seqlen, max_seqlen))

    def sll():
        """FBGEMM's computes softmax(q kᵀ) v / max_seqlen, so q, v and their gradients are scaled to
        match."""
        attention = peers.sll("multi_head_jagged_flash_attention")
        factors = {"q": head_dim**-0.5, "k": 1.0, "v": float(max_seqlen)}
        heads_first = leaves(
            **{name: factors[name] * x.transpose(0, 1) for name, x in inputs.items()}
        )

        def pick(name, x):
            x = x * factors.get(name.removeprefix("d"), 1.0)
            return {b: x[:, rows].transpose(0, 1) for b, rows in parts.items()}

        return Implementation(
            lambda: attention(*heads_first.values(), offsets, max_seqlen),
            heads_first,
            pick,
            grad.transpose(0, 1).contiguous(),
            note="q and v scaled beforehand",
        )

    def padded(attention, masked: bool):
        """On inputs that are already padded, ``[B, H, N, D]``: padding and unpadding are not
        measured."""
        dense = leaves(**{name: pad(x, valid).transpose(1, 2) for name, x in inputs.items()})
        right = [b for b in parts if masked or lengths[b] == max_seqlen]
        return Implementation(
            lambda: attention(*dense.values(), valid[:, None, None, :] if masked else None),
            dense,
            lambda name, x: {b: x[b, :, : lengths[b]].transpose(0, 1) for b in right},
            pad(grad, valid).transpose(1, 2).contiguous(),
            note="padded inputs"
            if masked
            else "padded inputs, no mask: right for segments of full length only",
        )

    def pad_and_unpad(attention):
        def forward(q, k, v):
            dense = (pad(x, valid).transpose(1, 2) for x in (q, k, v))
            return attention(*dense, valid[:, None, None, :]).transpose(1, 2)[valid]

        return jagged(forward)

    if cpu_table:
        others = {
            "pad + SDPA (key mask) + unpad": partial(pad_and_unpad, partial(sdpa, None)),
            "pad + math + unpad": partial(pad_and_unpad, plain_attention),
        }
    else:
        others = {
            FA2: varlen,
            **{
                name: lambda module=module: varlen(peers.flash_attention(module))
                for name, module in peers.FLASH_ATTENTION.items()
            },
            peers.SLL: sll,
            DENSE_FLASH: partial(padded, partial(sdpa, SDPBackend.FLASH_ATTENTION), False),
            "SDPA cuDNN, padded": partial(padded, partial(sdpa, SDPBackend.CUDNN_ATTENTION), False),
            DENSE: partial(padded, plain_attention, True),
        }
        others |= {UNFUSED: unfused} if num_heads == 1 else {}
    flops = 4.0 * num_heads * head_dim * float(lengths.double().square().sum())
    implementations = our_implementations(device, head_dim, ours) | others
    samples = {b: (q[rows], k[rows], v[rows], grad[rows]) for b, rows in parts.items()}
    return attention_setup(implementations, partial(reference, samples), dtype, device, flops)


# -- target attention ------------------------------------------------------------------------------


def target_attention(
    device: str,
    dtype: torch.dtype,
    counts: Tensor,
    histories: Tensor,
    num_queries: int,
    num_heads: int,
    head_dim: int,
) -> Setup:
    """Candidates (``counts`` per user) of ``num_queries`` rows each attend to their user's history
    (``histories`` rows).

    "Folded" treats a user's candidates as one query sequence. "replicate" copies the history to
    each candidate, as models without in-kernel broadcast do; it pads jagged histories and masks the
    padding.
    """
    num_users, num_candidates, max_history = len(counts), int(counts.sum()), int(histories.max())
    equal_histories = bool((histories == max_history).all())
    equal_counts = bool((counts == counts[0]).all())
    max_rows = int(counts.max()) * num_queries
    host_candidate_offsets, host_kv_offsets = offsets_of(counts), offsets_of(histories)
    q_offsets = (host_candidate_offsets * num_queries).to(device)
    kv_offsets = host_kv_offsets.to(device)
    candidate_to_user = torch.arange(num_users).repeat_interleave(counts).to(device)
    q_shape = (num_candidates, num_queries, num_heads, head_dim)
    kv_shape = (int(histories.sum()), num_heads, head_dim)
    q, k, v, grad = random_tensors(device, dtype, q_shape, kv_shape, kv_shape, q_shape)
    inputs = leaves(q=q, k=k, v=v)
    users = sample_segments(histories)
    candidates_of = {u: slice(*host_candidate_offsets[u : u + 2].tolist()) for u in users}
    history_of = {u: slice(*host_kv_offsets[u : u + 2].tolist()) for u in users}

    def pick(name, x):
        if name in ("out", "dq"):
            return {u: x[candidates_of[u]].flatten(0, 1) for u in users}
        return {u: x[history_of[u]] for u in users}

    def folded(forward, **extra):
        return Implementation(lambda: forward(**inputs), inputs, pick, grad, **extra)

    def ours(kernels: str):
        candidates = jm.CandidateIndex.from_counts(counts.to(device))
        schedule, build_ms = timed_schedule(
            counts * num_queries, histories, q, implementation=kernels
        )
        shared = {
            "candidates": candidates,
            "kv_offsets": kv_offsets,
            "max_seqlen_kv": max_history,
            "schedule": schedule,
        }
        return folded(
            partial(F.target_attention, **shared, implementation=kernels), host_ms=build_ms
        )

    def varlen(attention=varlen_attention):
        def forward(q, k, v):
            return attention(
                q.flatten(0, 1), k, v, q_offsets, kv_offsets, max_rows, max_history
            ).view(q_shape)

        return folded(forward)

    def ikbo():
        attention = peers.ikbo_attention()
        detached = {name: x.detach() for name, x in inputs.items()}
        return Implementation(
            lambda: attention(*detached.values(), candidate_to_user, max_history),
            detached,
            pick,
            note="forward only",
        )

    def cudnn_folded():
        def forward(q, k, v):
            users_first = (
                x.view(num_users, -1, num_heads, head_dim).transpose(1, 2) for x in (q, k, v)
            )
            return sdpa(SDPBackend.CUDNN_ATTENTION, *users_first).transpose(1, 2).reshape(q_shape)

        return folded(forward)

    def replicated(in_measured_call: bool):
        valid = (torch.arange(max_history) < histories[:, None]).to(device)
        mask = None if equal_histories else valid[candidate_to_user][:, None, None, :]
        backend = SDPBackend.CUDNN_ATTENTION if equal_histories else None
        dense = leaves(k=pad(k, valid), v=pad(v, valid))
        if not in_measured_call:
            dense = leaves(**{name: x[candidate_to_user] for name, x in dense.items()})
        own = {"q": inputs["q"], **dense}

        def forward():
            q, k, v = own.values()
            if in_measured_call:
                k, v = k.index_select(0, candidate_to_user), v.index_select(0, candidate_to_user)
            return sdpa(backend, *(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2)

        def pick_replicated(name, x):
            if name in ("out", "dq"):
                return pick(name, x)
            per_user = {
                u: x[u] if in_measured_call else x[candidates_of[u]].double().sum(0) for u in users
            }
            return {u: rows[: histories[u]] for u, rows in per_user.items()}

        return Implementation(
            forward,
            own,
            pick_replicated,
            grad,
            note="" if in_measured_call else "K and V come replicated",
        )

    implementations = our_implementations(device, head_dim, ours)
    implementations[f"{FA2}, folded"] = varlen
    for name, module in peers.FLASH_ATTENTION.items():
        implementations[f"{name}, folded"] = lambda module=module: varlen(
            peers.flash_attention(module)
        )
    if equal_histories and equal_counts:
        implementations |= {"SDPA cuDNN, folded": cudnn_folded, peers.IKBO: ikbo}
    kind = "cuDNN" if equal_histories else "with key mask"
    implementations[f"replicate + SDPA {kind}"] = partial(replicated, True)
    implementations[f"SDPA {kind}, replicated"] = partial(replicated, False)
    flops = 4.0 * num_heads * head_dim * num_queries * float((counts * histories).sum())
    samples = {
        u: (
            q[candidates_of[u]].flatten(0, 1),
            k[history_of[u]],
            v[history_of[u]],
            grad[candidates_of[u]].flatten(0, 1),
        )
        for u in users
    }
    return attention_setup(implementations, partial(reference, samples), dtype, device, flops)


def self_and_target_attention(
    device: str,
    dtype: torch.dtype,
    counts: Tensor,
    histories: Tensor,
    num_queries: int,
    num_heads: int,
    head_dim: int,
) -> Setup:
    """A user's own rows and the user's candidates (``counts``, of ``num_queries`` rows each) attend
    to the user's history.

    Measured in one launch of each kernel, and for each kind of query alone. The two times alone add
    up to those of two launches, without adding two dk and two dv.
    """
    lengths = {"own rows": histories, "candidates": counts * num_queries}
    shapes = {kind: (int(rows.sum()), num_heads, head_dim) for kind, rows in lengths.items()}
    k, v, *queries = random_tensors(
        device, dtype, *[shapes["own rows"]] * 2, *shapes.values(), *shapes.values()
    )
    q_of, grad_of = dict(zip(lengths, queries[:2])), dict(zip(lengths, queries[2:]))
    users, host_kv_offsets = sample_segments(histories), offsets_of(histories)
    kv_offsets = host_kv_offsets.to(device)

    def joined(parts: dict[str, Tensor], kinds: tuple[str, ...]) -> Tensor:
        return torch.cat([parts[kind] for kind in kinds])

    def rows_of(user: int, offsets: Tensor) -> Tensor:
        """A user's rows of all kinds. All segments of one kind precede those of the next."""
        starts = range(user, len(offsets) - 1, len(histories))
        return torch.cat([torch.arange(*offsets[i : i + 2].tolist()) for i in starts]).to(device)

    def sample(kinds: tuple[str, ...]) -> dict:
        q = joined(q_of, kinds)
        grad = joined(grad_of, kinds)
        offsets = offsets_of(joined(lengths, kinds))
        rows = {u: (rows_of(u, offsets), rows_of(u, host_kv_offsets)) for u in users}
        return {
            f"{' and '.join(kinds)} of {u}": (q[own], k[history], v[history], grad[own])
            for u, (own, history) in rows.items()
        }

    def implementation(kernels: str, kinds: tuple[str, ...]) -> Implementation:
        inputs, rows = leaves(q=joined(q_of, kinds), k=k, v=v), joined(lengths, kinds)
        offsets = offsets_of(rows)
        schedule, build_ms = timed_schedule(rows, histories, inputs["q"], implementation=kernels)
        options = {"schedule": schedule, "implementation": kernels}
        forward = partial(
            F.jagged_attention, *inputs.values(), offsets.to(device), kv_offsets, **options
        )

        def pick(name, x):
            return {
                f"{' and '.join(kinds)} of {u}": x[
                    rows_of(u, host_kv_offsets if name in ("dk", "dv") else offsets)
                ]
                for u in users
            }

        return Implementation(
            forward,
            inputs,
            pick,
            joined(grad_of, kinds),
            host_ms=build_ms,
            whole=len(kinds) == len(lengths),
        )

    both = tuple(lengths)
    implementations = {
        name: partial(implementation, kernels, both)
        for name, kernels in our_kernels(device).items()
    }
    implementations |= {
        f"{OURS}, {kind} alone": partial(implementation, "auto", (kind,)) for kind in both
    }
    samples = sample(both) | {part: x for kind in both for part, x in sample((kind,)).items()}
    flops = 4.0 * num_heads * head_dim * float((sum(lengths.values()) * histories).sum())
    return attention_setup(implementations, partial(reference, samples), dtype, device, flops)


# -- cases -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the tables. ``self_shapes``, ``ladder`` and ``cpu_shapes`` hold (B, maximum
    length, H, D)."""

    self_shapes: list[tuple[int, int, int, int]]
    ladder: list[tuple[int, int, int, int]]
    cpu_shapes: list[tuple[int, int, int, int]]
    histories: list[int]
    long_histories: list[int]  # too long to replicate keys
    sweep: list[int]
    sweep_history: int
    num_candidates: int
    num_users: int
    num_queries: int
    num_heads: int
    head_dim: int


FULL = Sizes(
    self_shapes=[(128, 1024, 4, 64), (64, 2048, 4, 64), (64, 2048, 4, 128), (1024, 256, 4, 128)],
    ladder=[(256, longest, 1, 128) for longest in (128, 256, 512, 1024)],
    cpu_shapes=[(256, 512, 4, 64)],
    histories=[512, 1024, 2048, 4096],
    long_histories=[8192, 16384],
    sweep=[256, 512, 1024, 2048, 4096],
    sweep_history=1024,
    num_candidates=2048,
    num_users=32,
    num_queries=64,
    num_heads=2,
    head_dim=128,
)
TINY = Sizes(
    self_shapes=[(4, 24, 2, 16)],
    ladder=[(4, 12, 1, 16), (4, 24, 1, 16)],
    cpu_shapes=[(6, 24, 2, 16)],
    histories=[20],
    long_histories=[40],
    sweep=[6, 12],
    sweep_history=10,
    num_candidates=12,
    num_users=3,
    num_queries=5,
    num_heads=2,
    head_dim=16,
)


def odd_counts(num_candidates: int, num_users: int) -> Tensor:
    """Candidates per user, odd and unequal, about ``num_candidates`` together."""
    return uniform_lengths(num_users, 1, 2 * num_candidates // num_users - 1) | 1


def keep_implementations(
    setup: Callable[[], Setup], prefixes: tuple[str, ...], without: tuple[str, ...] = ()
) -> Setup:
    """The setup with only the implementations whose name starts with one of ``prefixes``, without
    those named in ``without``."""
    whole = setup()
    kept = {
        name: build
        for name, build in whole.implementations.items()
        if name.startswith(prefixes) and name not in without
    }
    return dataclasses.replace(whole, implementations=kept)


def many_candidates(device: str, dtype: torch.dtype) -> list[Case]:
    """10,000 candidates of 1 to 1,000 users and 30,000 of 3, of 1 to 64 query rows. Histories are
    short, so that their copies for all candidates fit."""
    groups, rows = ((1000, 10), (100, 100), (10, 1000), (1, 10_000), (3, 10_000)), (1, 8, 64)

    def setup(count: int, ratio: int, queries: int):
        lengths = torch.full((count,), ratio), torch.full((count,), 128)
        return partial(target_attention, device, dtype, *lengths, queries, num_heads=2, head_dim=64)

    return [
        Case(
            "target attention, many candidates",
            f"{ratio} per user, B={count * ratio}, {queries} query rows",
            setup(count, ratio, queries),
        )
        for queries in rows
        for count, ratio in groups
    ]


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: both tables, the memory sweep and the ladder, bf16. CPU: the table of the CPU path,
    fp32. ``tiny``: everything, small."""
    sizes = TINY if tiny else FULL
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    num_users, per_row = sizes.num_users, (sizes.num_queries, sizes.num_heads, sizes.head_dim)

    def of_self(shapes, **options):
        for batch, longest, heads, dim in shapes:
            given = device, dtype, uniform_lengths(batch, 1, longest), heads, dim
            name = f"B{batch} N{longest} H{heads} D{dim}"
            yield name, partial(self_attention, *given, **options)

    def target(counts: Tensor, histories: Tensor):
        return partial(target_attention, device, dtype, counts, histories, *per_row)

    def equal_groups(num_candidates: int, history: int):
        counts = torch.full((num_users,), num_candidates // num_users)
        return target(counts, torch.full((num_users,), history))

    cases = []
    if device == "cpu":
        table = "jagged self-attention, padding included"
        cases += [Case(table, *x) for x in of_self(sizes.cpu_shapes, cpu_table=True)]
        if not tiny:
            return cases
    cases += [Case("jagged self-attention", *x) for x in of_self(sizes.self_shapes)]
    for history in sizes.histories + sizes.long_histories:
        setup = equal_groups(sizes.num_candidates, history)
        if history in sizes.long_histories:
            kept = OURS, "varlen_attn", "SDPA cuDNN, folded", "Flash", peers.IKBO
            setup = partial(keep_implementations, setup, kept)
        cases.append(Case("target attention", f"history {history}", setup))
    for history in sizes.histories:
        least = int(0.4 * history)  # mean/max 0.7
        lengths = uniform_lengths(num_users, least, history)
        setup = target(odd_counts(sizes.num_candidates, num_users), lengths)
        table = "target attention, jagged histories, odd groups"
        cases.append(Case(table, f"history {least}..{history}", setup))
    for history in sizes.histories[:3]:
        lengths, candidates = uniform_lengths(num_users, 1, history), sizes.num_candidates // 4
        given = device, dtype, odd_counts(candidates, num_users), lengths, *per_row
        table = "self and target attention in one launch"
        name = f"history 1..{history}, {candidates} candidates"
        cases.append(Case(table, name, partial(self_and_target_attention, *given)))
    if not tiny:
        cases += many_candidates(device, dtype)
    without = dict(without=(PORTABLE,))
    for candidates in sizes.sweep:
        setup = equal_groups(candidates, sizes.sweep_history)
        setup = partial(keep_implementations, setup, (OURS, "replicate + SDPA"), **without)
        table = "target attention, memory of a training step"
        cases.append(Case(table, f"{candidates} candidates", setup, timed=False))
    for name, setup in of_self(sizes.ladder):
        kept = DENSE, UNFUSED, DENSE_FLASH, OURS
        setup = partial(keep_implementations, setup, kept, **without)
        table = "ladder: dense, jagged, each unfused and fused"
        cases.append(Case(table, name, setup, picture="ms"))
    return cases


if __name__ == "__main__":
    sys.exit(main("attention", make_cases))
