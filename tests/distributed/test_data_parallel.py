"""The layers in DistributedDataParallel and FSDP2: ten steps of two processes equal ten of one
process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import jagged_modules as jm

from .rounding import assert_trained_alike

STEPS, USERS, DIM = 10, 6, 16


class Encoder(nn.Module):
    """All layers with parameters, one after another: one number per candidate."""

    def __init__(self):
        super().__init__()
        self.hstu = jm.HSTUStack(
            DIM, num_heads=2, num_layers=1, config=jm.HSTUConfig(scaling_seqlen=10)
        )
        self.blocks = jm.BlockDiagonalSelfAttention(
            DIM, num_heads=2, block_size=16, rotary="qk", max_seqlen=32
        )
        self.gdpa = jm.GDPABlock(DIM, num_heads=2, config=jm.GDPAConfig(num_weights=8))
        self.attention = jm.JaggedTargetAttention(DIM, num_heads=2)
        self.compress = jm.LinearCompressEmbedding(
            num_candidate_embeddings=2, num_compressed=2, num_user_embeddings=1
        )
        self.mlp, self.head = jm.JaggedMLP([2 * DIM, 8], activation="silu"), nn.Linear(8, 1)

    def forward(self, events, lengths, candidates, counts):
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        x = self.gdpa(self.blocks(self.hstu(jm.Jagged(events, offsets))))
        index = jm.CandidateIndex.from_counts(counts)
        interest = self.attention(4 * candidates[:, None], x, index)[:, 0]
        users = torch.segment_reduce(
            x.values, "sum", lengths=lengths, axis=0, unsafe=True, initial=0
        )[:, None]
        compressed = self.compress(torch.stack([candidates, interest], dim=1), users, index)
        return self.head(self.mlp((compressed.flatten(1), index.offsets))[0]).squeeze(1)


def batch(step: int, users: slice):
    """Users of a step's batch, with their events, candidates and labels."""
    torch.manual_seed(step)
    lengths, counts = torch.randint(0, 25, (USERS,)), torch.randint(1, 4, (USERS,))
    events = torch.randn(USERS, 24, DIM)
    candidates = torch.randn(USERS, 3, DIM)
    labels = torch.randn(USERS, 3)
    lengths, counts = lengths[users], counts[users]
    has_event, is_candidate = (
        torch.arange(width) < n[:, None] for width, n in ((24, lengths), (3, counts))
    )
    return (events[users][has_event], lengths, candidates[users][is_candidate], counts), labels[
        users
    ][is_candidate]


def train(wrap: str | None, device_type: str = "cpu") -> dict[str, torch.Tensor]:
    """The parameters after training in this process alone, or with one of the wrappers."""
    torch.manual_seed(0)
    model = Encoder().to(device_type)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if wrap else (0, 1)
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp2":
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        # The last batch is all of rank 0. The others are cut unevenly.
        cut = USERS if step == STEPS - 1 else 2
        users = slice(0, USERS) if not wrap else (slice(0, cut), slice(cut, USERS))[rank]
        inputs, labels = tree_map(lambda x: x.to(device_type), batch(step, users))
        losses = (model(*inputs) - labels).square()
        count = torch.tensor(float(len(losses)), device=device_type)
        if wrap:
            dist.all_reduce(count)
        (losses.sum() * world_size / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    module = model.module if wrap == "ddp" else model
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu()
        for name, x in module.named_parameters()
    }


def check_two_train_as_one(ranks, wrap, device_type="cpu"):
    torch.manual_seed(0)
    initial, expected = dict(Encoder().named_parameters()), train(None, device_type)
    for actual in ranks.run(train, wrap, device_type):
        assert_trained_alike(actual, expected, initial, STEPS)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(two_ranks, wrap):
    check_two_train_as_one(two_ranks, wrap)


@pytest.mark.gpu
@pytest.mark.large_memory
def test_two_gpus_train_as_one(two_gpus):
    for wrap in ("ddp", "fsdp2"):
        check_two_train_as_one(two_gpus, wrap, "cuda")
