"""Cached histories: keys and values read in pages, against rows that are gathered first, and
against histories that are encoded anew.

    python kernels/benchmarks/bench_pages.py                                  # on a CUDA device
    python kernels/benchmarks/bench_pages.py --only "attention"               # one of the tables
    # the CPU gathers in both cases
    python kernels/benchmarks/bench_pages.py --tiny --device cpu

The pages of a batch lie in random places, and a row has the keys and values of LAYERS layers.
"attention" is that of one layer: its share of the gather, and the kernel; also with keys and
values in 8 bits. "scores" is what a server
computes per batch, `layer.score(targets, cache.select(users))` of a target attention; its time is
that of host and device together. Speed-ups are over the gather.

"HSTU stack" is what a server of a stack of LAYERS layers computes per batch: scores of each user's
targets after a new event. Either the event is appended to the cached history, which targets then
read in its pages, or the history is encoded anew, with event and targets in one forward; speed-ups
are over that. Times are those of host and device together. Containers are made in each call, as a
server has to, so that no schedule of an earlier call fits.

"DLRMv3-like stack" is the same with the sizes of MLPerf's recommender: 5 layers of width 512, 2,048
candidates for each of 32 users. Embeddings, the item tower and the heads are not part of it.
"""

import copy
import dataclasses
import sys
from functools import partial

import torch
from inputs import (
    ATTAINABLE,
    offsets_of,
    our_kernels,
    plain_attention,
    random_tensors,
    sample_segments,
    timed_schedule,
    uniform_lengths,
)
from names import OURS
from runner import Case, Implementation, Setup, device_name, main
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.containers.pages import in_8_bits

LAYERS = 4
PAGE_ROWS = 128
GATHERED = f"{OURS}, gathered"
IN_PAGES = f"{OURS}, in pages"
NO_GATHER = f"{OURS}, rows gathered before"
IN_8_BITS = f"{OURS}, in pages of int8"
ROUNDED = 0.03  # error of scores whose keys and values have 8 bits
APPENDED, ANEW = f"{OURS}, event appended", f"{OURS}, encoded anew"


def pages_of(lengths: Tensor, device: str) -> tuple[jm.Pages, Tensor]:
    """Pages in random order for segments of these lengths, and the storage's row of each of their
    rows."""
    counts = ((lengths + PAGE_ROWS - 1) // PAGE_ROWS).tolist()
    numbers = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).split(counts)
    within = [torch.arange(n) for n in lengths.tolist()]
    rows = torch.cat(
        [own[i // PAGE_ROWS] * PAGE_ROWS + i % PAGE_ROWS for own, i in zip(numbers, within)]
    )
    pages = jm.Pages.of([own.tolist() for own in numbers], lengths.tolist(), PAGE_ROWS)
    return pages.to(torch.device(device)), rows.to(device)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """num_targets: of each user. histories: longest ones; lengths are ``shortest`` to 1 of it."""

    num_users: int
    histories: tuple[int, ...]
    num_targets: tuple[int, ...]
    num_heads: int
    head_dims: tuple[int, ...]
    num_layers: int = LAYERS
    shortest: float = 0.4

    def lengths(self, history: int) -> Tensor:
        return uniform_lengths(self.num_users, int(self.shortest * history), history)


FULL = Sizes(
    num_users=64,
    histories=(256, 1024, 4096),
    num_targets=(10, 100, 1000),
    num_heads=4,
    head_dims=(64, 128),
)
SCORES = dataclasses.replace(FULL, head_dims=(128,))
STACK = Sizes(
    num_users=32, histories=(1024, 4096, 8192), num_targets=(10,), num_heads=4, head_dims=(64, 128)
)
DLRM_V3 = Sizes(32, (1024, 4096), (2048,), 4, (128,), num_layers=5, shortest=1.0)
TINY = Sizes(num_users=3, histories=(150,), num_targets=(2,), num_heads=2, head_dims=(16,))


def attention(
    device: str, dtype: torch.dtype, sizes: Sizes, history: int, num_targets: int, head_dim: int
) -> Setup:
    """One layer's attention of each user's targets to the user's history."""
    lengths, heads = sizes.lengths(history), sizes.num_heads
    counts = torch.full_like(lengths, num_targets)
    pages, index = pages_of(lengths, device)
    storage_rows = len(pages.table) * PAGE_ROWS
    q, storage = random_tensors(
        device,
        dtype,
        (int(counts.sum()), heads, head_dim),
        (storage_rows, LAYERS, heads, 2 * head_dim),
    )
    layer, q_offsets, kv_offsets = storage[:, 1], offsets_of(counts), offsets_of(lengths)
    gathered, segments = layer.index_select(0, index), (q_offsets.to(device), kv_offsets.to(device))
    samples = sample_segments(lengths)

    def rows_of(x: Tensor, offsets: Tensor, user: int) -> Tensor:
        return x[int(offsets[user]) : int(offsets[user + 1])]

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        outs = {}
        for user in samples:
            k, v = rows_of(gathered, kv_offsets, user).to(dtype).transpose(0, 1).chunk(2, dim=2)
            outs[f"out/{user}"] = plain_attention(
                rows_of(q, q_offsets, user).to(dtype).transpose(0, 1), k, v
            ).transpose(0, 1)
        return outs

    def implementation(
        rows_now, kernels: str, bound: float | None = None, **extra
    ) -> Implementation:
        schedule, build_ms = timed_schedule(counts, lengths, q, implementation=kernels)
        options = {"schedule": schedule, "implementation": kernels, **extra}

        def forward() -> Tensor:
            return F.jagged_attention(q, *rows_now().chunk(2, dim=2), *segments, **options)

        return Implementation(
            forward,
            {"q": q},
            lambda _, x: {user: rows_of(x, q_offsets, user) for user in samples},
            host_ms=build_ms,
            bound=bound,
        )

    numbers, factors = in_8_bits(storage, torch.int8)
    small, scaled = numbers[:, 1], dataclasses.replace(pages, scales=factors[:, 1])
    implementations = {
        IN_8_BITS: partial(implementation, lambda: small, "auto", ROUNDED, pages=scaled)
    }
    for name, kernels in our_kernels(device).items():
        suffix = name.removeprefix(OURS)
        implementations |= {
            GATHERED + suffix: partial(
                implementation, lambda: layer.index_select(0, index), kernels
            ),
            IN_PAGES + suffix: partial(implementation, lambda: layer, kernels, pages=pages),
            NO_GATHER + suffix: partial(implementation, lambda: gathered, kernels),
        }
    return Setup(
        implementations,
        reference,
        dtype,
        flops=4.0 * heads * head_dim * float((counts * lengths).sum()),
        bytes=float(gathered.nbytes + 2 * q.nbytes),
        attainable=ATTAINABLE.get(device_name(device)),
        baseline=GATHERED,
    )


def scores(
    device: str, dtype: torch.dtype, sizes: Sizes, history: int, num_targets: int, head_dim: int
) -> Setup:
    """Scores of a batch of cached users by a target attention, from a cache that holds four times
    as many."""
    width, users = sizes.num_heads * head_dim, list(range(4 * sizes.num_users))
    lengths = sizes.lengths(history).repeat(4)
    offsets = offsets_of(lengths)
    layer = jm.JaggedTargetAttention(width, sizes.num_heads, device=device, dtype=dtype)
    rows, targets = random_tensors(
        device, dtype, (int(lengths.sum()), width), (sizes.num_users, num_targets, width)
    )
    batch = torch.randperm(len(users), generator=torch.Generator().manual_seed(1))[
        : sizes.num_users
    ].tolist()
    samples = sample_segments(lengths[batch])

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        weights = {name: x.detach().to(dtype) for name, x in layer.named_parameters()}

        def project(x: Tensor, name: str) -> Tensor:
            return linear(x.to(dtype), weights[f"{name}.weight"], weights[f"{name}.bias"])

        outs = {}
        for i in samples:
            history_rows = rows[int(offsets[batch[i]]) : int(offsets[batch[i] + 1])]
            q, kv = project(targets[i], "q_proj"), project(history_rows, "kv_proj")
            parts = (
                x.unflatten(1, (sizes.num_heads, head_dim)).transpose(0, 1)
                for x in (q, *kv.chunk(2, dim=1))
            )
            outs[f"out/{i}"] = project(
                plain_attention(*parts).transpose(0, 1).flatten(1), "out_proj"
            )
        return outs

    def implementation(page_rows: int) -> Implementation:
        cache = jm.PagedHistoryCache(
            layer, int((lengths + page_rows).sum()) * 2 * width * dtype.itemsize, page_rows
        )
        cache.put(users, jm.Jagged(rows, offsets.to(device), host_lengths=lengths))
        return Implementation(
            lambda: layer.score(targets, cache.select(batch)),
            {"targets": targets},
            lambda _, x: {i: x[i] for i in samples},
        )

    return Setup(
        {GATHERED: partial(implementation, 16), IN_PAGES: partial(implementation, PAGE_ROWS)},
        reference,
        dtype,
        baseline=GATHERED,
    )


def batch_of(values: Tensor, lengths: Tensor) -> jm.Jagged:
    return jm.Jagged(values, offsets_of(lengths).to(values.device), host_lengths=lengths)


@torch.no_grad()
def plain_stack(stack: jm.HSTUStack, x: Tensor, num_targets: int) -> Tensor:
    """The targets' rows of a stack over one user's rows x ``[N, E]``, of which the last are
    targets, in x's dtype."""
    row = torch.arange(len(x), device=x.device)
    seen = (row <= row[:, None]) & (row < len(x) - num_targets) | (row == row[:, None])
    for layer in copy.deepcopy(stack).to(x.dtype).layers:
        projected = linear(
            plain_norm(x, layer.input_norm), layer.uvqk_proj.weight, layer.uvqk_proj.bias
        )
        # [H, N, D]
        u, v, q, k = projected.unflatten(1, (4, layer.num_heads, layer.head_dim)).permute(
            1, 2, 0, 3
        )
        scores = silu(q @ k.mT * layer.head_dim**-0.5) / layer.config.scaling_seqlen
        u, a = (y.transpose(0, 1).flatten(1) for y in (silu(u), scores.masked_fill(~seen, 0) @ v))
        x = x + linear(
            torch.cat([u, a, u * plain_norm(a, layer.output_norm)], dim=1), layer.out_proj.weight
        )
    return x[-num_targets:]


def plain_norm(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    return layer_norm(x, x.shape[1:], norm.weight, norm.bias, norm.eps)


def hstu_stack(
    device: str, dtype: torch.dtype, sizes: Sizes, history: int, num_targets: int, head_dim: int
) -> Setup:
    """Scores of each user's targets after a new event, from cached histories without it, and from
    whole histories."""
    width, users = sizes.num_heads * head_dim, list(range(sizes.num_users))
    lengths = sizes.lengths(history)
    counts = torch.full_like(lengths, num_targets)
    config = jm.HSTUConfig(scaling_seqlen=history)
    sizes_of_stack = width, sizes.num_heads, sizes.num_layers
    stack = jm.HSTUStack(*sizes_of_stack, config, device=device, dtype=dtype).eval()
    (rows,) = random_tensors(device, dtype, (int((lengths + 1 + counts).sum()), width))
    parts = torch.stack([lengths, torch.ones_like(lengths), counts], dim=1).flatten().tolist()
    known, events, targets = (torch.cat(rows.split(parts)[part::3]) for part in range(3))
    samples = sample_segments(lengths)

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        by_user = rows.split((lengths + 1 + counts).tolist())
        return {f"out/{i}": plain_stack(stack, by_user[i].to(dtype), num_targets) for i in samples}

    def appended() -> Implementation:
        cache = jm.PagedHistoryCache(
            stack,
            int((lengths + 1 + PAGE_ROWS).sum()) * sizes.num_layers * 2 * width * dtype.itemsize,
            PAGE_ROWS,
        )
        cache.put(users, batch_of(known, lengths))

        def forward() -> Tensor:
            cache.append(users, batch_of(events, torch.ones_like(lengths)))
            out = stack.score(batch_of(targets, counts), cache.select(users)).values
            for pages in cache._table.users.values():  # the next call appends the same event
                pages.length -= 1
            return out

        return Implementation(
            forward,
            {"events": events, "targets": targets},
            lambda _, x: {i: x.split(num_targets)[i] for i in samples},
        )

    def anew() -> Implementation:
        num_targets_now, ends = counts.to(device), (lengths + 1 + counts).cumsum(0).tolist()
        return Implementation(
            lambda: stack(batch_of(rows, lengths + 1 + counts), num_targets_now).values,
            {"rows": rows},
            lambda _, x: {i: x[ends[i] - num_targets : ends[i]] for i in samples},
        )

    return Setup({ANEW: anew, APPENDED: appended}, reference, dtype, baseline=ANEW)


def make_cases(device: str, tiny: bool) -> list[Case]:
    """On CUDA in bf16, on the CPU in fp32."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cases = []
    for table, setup, full, wall in (
        ("attention to histories in pages", attention, FULL, 0),
        ("scores of cached histories", scores, SCORES, 1),
        ("HSTU stack", hstu_stack, STACK, 1),
        ("DLRMv3-like stack", hstu_stack, DLRM_V3, 1),
    ):
        sizes = TINY if tiny else full
        for history in sizes.histories:
            for num_targets in sizes.num_targets:
                for head_dim in sizes.head_dims:
                    made = partial(setup, device, dtype, sizes, history, num_targets, head_dim)
                    cases.append(
                        Case(
                            table,
                            f"history {history}, {num_targets} targets, D{head_dim}",
                            made,
                            wall=wall,
                            picture="ms",
                        )
                    )
    return cases


if __name__ == "__main__":
    sys.exit(main("pages", make_cases))
