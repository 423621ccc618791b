"""Small training steps of every layer, and of operators without a layer, on random batches: for
tests of threads, processes, memory and caches."""

import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import jagged_modules as jm
from jagged_modules import functional as F

WIDTH, HEADS = 32, 2


class Batch:
    """Up to 12 users with up to 40 events each, and their candidates in any order, drawn by the
    generator."""

    def __init__(self, generator: torch.Generator, device="cpu"):
        def below(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=generator)

        lengths = below(41, 1 + int(below(12, 1)))
        self.users, self.num_candidates = len(lengths), 1 + int(below(20, 1))
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        self.plan = F.ScorePlan.from_offsets(offsets).to(device)
        self.offsets, self.rows = offsets.to(device), int(offsets[-1])
        self.users_of = below(self.users, self.num_candidates).to(device)
        self.num_targets = (lengths // 3).to(device)
        self.device, self.generator = device, generator

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def history(self) -> tuple[Tensor, Tensor]:
        return self.randn(self.rows, WIDTH), self.offsets


def make_steps(device="cpu") -> dict[str, Callable[[Batch], list[Tensor]]]:
    """Name → a step: forward and backward on a batch, which returns the result and the
    gradients."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    attention = jm.JaggedTargetAttention(WIDTH, HEADS, device=device)
    gdpa = jm.JaggedGDPA(
        WIDTH, HEADS, mask=jm.AttentionMask(causal=True, max_attn_len=9), device=device
    )
    pooling = jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(num_seeds=3), device=device)
    hstu = jm.HSTUStack(WIDTH, HEADS, 2, jm.HSTUConfig(scaling_seqlen=40), device=device)
    blocks = jm.BlockDiagonalSelfAttention(
        WIDTH, HEADS, block_size=16, max_seqlen=64, device=device
    )
    compress = jm.LinearCompressEmbedding(10, 4, 9, device=device)
    mlp = jm.JaggedMLP([WIDTH, 16, 8], device=device)
    torch.set_rng_state(generator_state)

    def target_attention(batch):
        index = jm.CandidateIndex.from_map(batch.users_of, batch.users)
        return attention(batch.randn(batch.num_candidates, 2, WIDTH), batch.history(), index)

    def linear_compress(batch):
        return compress(
            batch.randn(batch.num_candidates, 10, WIDTH),
            batch.randn(batch.users, 9, WIDTH),
            batch.users_of,
        )

    def scores(batch):
        x = batch.randn(batch.rows, WIDTH).requires_grad_()
        y = batch.randn(batch.users, WIDTH, 8).requires_grad_()
        p = F.jagged2_softmax(F.jagged_jagged_bmm_jagged_out(x, x * 2, batch.plan), batch.plan)
        attended = F.array_jagged_bmm_jagged_out(p, F.jagged_softmax(x, batch.offsets), batch.plan)
        out = F.jagged_dense_bmm(attended, y, batch.offsets)
        return torch.cat([out.flatten(), F.jagged_jagged_bmm(out, x, batch.offsets).flatten()])

    def training(call, module=None):
        def step(batch):
            out = call(batch)
            parameters = [] if module is None else list(module.parameters())
            loss = out.square().sum()
            return [out.detach(), *(torch.autograd.grad(loss, parameters) if parameters else [])]

        return step

    return {
        "target_attention": training(target_attention, attention),
        "gdpa": training(lambda batch: gdpa(batch.history())[0], gdpa),
        "pooling": training(lambda batch: pooling(batch.history()), pooling),
        "hstu": training(lambda batch: hstu(batch.history(), batch.num_targets)[0], hstu),
        "blocks": training(lambda batch: blocks(batch.history())[0], blocks),
        "linear_compress": training(linear_compress, compress),
        "mlp": training(lambda batch: mlp(batch.history())[0], mlp),
        "scores": training(scores),
    }


def run_steps(steps, seed: int, count: int, device="cpu") -> list[Tensor]:
    """The results and gradients of every step on `count` random batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        x for _ in range(count) for step in steps.values() for x in step(Batch(generator, device))
    ]


def cache_sizes() -> dict[str, int]:
    """Number of entries of every functools cache without a limit, and of every container, in this
    package's modules and classes."""
    sizes = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.split(".")[0] not in (
            "jagged_modules",
            "jagged_kernels",
        ):
            continue
        owners = {name: module} | {
            f"{name}.{key}": x
            for key, x in vars(module).items()
            if isinstance(x, type) and x.__module__ == name
        }
        for owner, namespace in owners.items():
            for key, x in list(vars(namespace).items()):
                if key.startswith("__"):
                    continue
                if hasattr(x, "cache_info") and x.cache_info().maxsize is None:
                    sizes[f"{owner}.{key}"] = x.cache_info().currsize
                elif isinstance(x, (dict, list, set, WeakTensorKeyDictionary)):
                    sizes[f"{owner}.{key}"] = len(x)
    return sizes
