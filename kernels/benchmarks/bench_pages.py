"""Target attention to cached histories: keys and values read in pages, against rows that are gathered first.

    python kernels/benchmarks/bench_pages.py                                  # on a CUDA device
    python kernels/benchmarks/bench_pages.py --only "attention"               # one of the tables
    python kernels/benchmarks/bench_pages.py --tiny --device cpu              # the CPU gathers in both cases

The pages of a batch lie in random places, and a row has the keys and values of LAYERS layers. "attention" is that of one layer: its share
of the gather, and the kernel. "scores" is what a server computes per batch, `layer.score(targets, cache.select(users))` of a target
attention; its time is that of host and device together. Speed-ups are over the gather.
"""

import dataclasses
import sys
from functools import partial

import torch
from inputs import ATTAINABLE, offsets_of, our_kernels, plain_attention, random_tensors, sample_segments, timed_schedule, uniform_lengths
from names import OURS
from runner import Case, Implementation, Setup, device_name, main
from torch import Tensor
from torch.nn.functional import linear

import jagged_modules as jm
from jagged_modules import functional as F

LAYERS = 4
PAGE_ROWS = 128
GATHERED, IN_PAGES, NO_GATHER = f"{OURS}, gathered", f"{OURS}, in pages", f"{OURS}, rows gathered before"


def pages_of(lengths: Tensor, device: str) -> tuple[jm.Pages, Tensor]:
    """Pages in random order for segments of these lengths, and the storage's row of each of their rows."""
    counts = ((lengths + PAGE_ROWS - 1) // PAGE_ROWS).tolist()
    numbers = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).split(counts)
    within = [torch.arange(n) for n in lengths.tolist()]
    rows = torch.cat([own[i // PAGE_ROWS] * PAGE_ROWS + i % PAGE_ROWS for own, i in zip(numbers, within)])
    pages = jm.Pages.of([own.tolist() for own in numbers], lengths.tolist(), PAGE_ROWS)
    return pages.to(torch.device(device)), rows.to(device)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """num_targets: of each user. histories: longest ones; lengths are 0.4 to 1 of it."""

    num_users: int
    histories: tuple[int, ...]
    num_targets: tuple[int, ...]
    num_heads: int
    head_dims: tuple[int, ...]

    def lengths(self, history: int) -> Tensor:
        return uniform_lengths(self.num_users, int(0.4 * history), history)


FULL = Sizes(num_users=64, histories=(256, 1024, 4096), num_targets=(10, 100, 1000), num_heads=4, head_dims=(64, 128))
TINY = Sizes(num_users=3, histories=(150,), num_targets=(2,), num_heads=2, head_dims=(16,))


def attention(device: str, dtype: torch.dtype, sizes: Sizes, history: int, num_targets: int, head_dim: int) -> Setup:
    """One layer's attention of each user's targets to the user's history."""
    lengths, heads = sizes.lengths(history), sizes.num_heads
    counts = torch.full_like(lengths, num_targets)
    pages, index = pages_of(lengths, device)
    storage_rows = len(pages.table) * PAGE_ROWS
    q, storage = random_tensors(device, dtype, (int(counts.sum()), heads, head_dim), (storage_rows, LAYERS, heads, 2 * head_dim))
    layer, q_offsets, kv_offsets = storage[:, 1], offsets_of(counts), offsets_of(lengths)
    gathered, segments = layer.index_select(0, index), (q_offsets.to(device), kv_offsets.to(device))
    samples = sample_segments(lengths)

    def rows_of(x: Tensor, offsets: Tensor, user: int) -> Tensor:
        return x[int(offsets[user]) : int(offsets[user + 1])]

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        outs = {}
        for user in samples:
            k, v = rows_of(gathered, kv_offsets, user).to(dtype).transpose(0, 1).chunk(2, dim=2)
            outs[f"out/{user}"] = plain_attention(rows_of(q, q_offsets, user).to(dtype).transpose(0, 1), k, v).transpose(0, 1)
        return outs

    def implementation(rows_now, kernels: str, **extra) -> Implementation:
        schedule, build_ms = timed_schedule(counts, lengths, q, implementation=kernels)
        options = {"schedule": schedule, "implementation": kernels, **extra}

        def forward() -> Tensor:
            return F.jagged_attention(q, *rows_now().chunk(2, dim=2), *segments, **options)

        return Implementation(forward, {"q": q}, lambda _, x: {user: rows_of(x, q_offsets, user) for user in samples}, host_ms=build_ms)

    implementations = {}
    for name, kernels in our_kernels(device).items():
        suffix = name.removeprefix(OURS)
        implementations |= {
            GATHERED + suffix: partial(implementation, lambda: layer.index_select(0, index), kernels),
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


def scores(device: str, dtype: torch.dtype, sizes: Sizes, history: int, num_targets: int, head_dim: int) -> Setup:
    """Scores of a batch of cached users by a target attention, from a cache that holds four times as many."""
    width, users = sizes.num_heads * head_dim, list(range(4 * sizes.num_users))
    lengths = sizes.lengths(history).repeat(4)
    offsets = offsets_of(lengths)
    layer = jm.JaggedTargetAttention(width, sizes.num_heads, device=device, dtype=dtype)
    rows, targets = random_tensors(device, dtype, (int(lengths.sum()), width), (sizes.num_users, num_targets, width))
    batch = torch.randperm(len(users), generator=torch.Generator().manual_seed(1))[: sizes.num_users].tolist()
    samples = sample_segments(lengths[batch])

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        weights = {name: x.detach().to(dtype) for name, x in layer.named_parameters()}

        def project(x: Tensor, name: str) -> Tensor:
            return linear(x.to(dtype), weights[f"{name}.weight"], weights[f"{name}.bias"])

        outs = {}
        for i in samples:
            history_rows = rows[int(offsets[batch[i]]) : int(offsets[batch[i] + 1])]
            q, kv = project(targets[i], "q_proj"), project(history_rows, "kv_proj")
            parts = (x.unflatten(1, (sizes.num_heads, head_dim)).transpose(0, 1) for x in (q, *kv.chunk(2, dim=1)))
            outs[f"out/{i}"] = project(plain_attention(*parts).transpose(0, 1).flatten(1), "out_proj")
        return outs

    def implementation(page_rows: int) -> Implementation:
        cache = jm.PagedHistoryCache(layer, int((lengths + page_rows).sum()) * 2 * width * dtype.itemsize, page_rows)
        cache.put(users, jm.Jagged(rows, offsets.to(device), host_lengths=lengths))
        return Implementation(
            lambda: layer.score(targets, cache.select(batch)), {"targets": targets}, lambda _, x: {i: x[i] for i in samples}
        )

    return Setup({GATHERED: partial(implementation, 16), IN_PAGES: partial(implementation, PAGE_ROWS)}, reference, dtype, baseline=GATHERED)


def make_cases(device: str, tiny: bool) -> list[Case]:
    """On CUDA in bf16, on the CPU in fp32."""
    sizes, dtype = TINY if tiny else FULL, torch.bfloat16 if device == "cuda" else torch.float32
    cases = []
    for table, setup, wall in (("attention to histories in pages", attention, False), ("scores of cached histories", scores, True)):
        for history in sizes.histories:
            for num_targets in sizes.num_targets:
                for head_dim in sizes.head_dims[-1:] if wall else sizes.head_dims:
                    made = partial(setup, device, dtype, sizes, history, num_targets, head_dim)
                    cases.append(Case(table, f"history {history}, {num_targets} targets, D{head_dim}", made, wall=wall, picture="ms"))
    return cases


if __name__ == "__main__":
    sys.exit(main("pages", make_cases))
