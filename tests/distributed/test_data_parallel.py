"""The layers in DistributedDataParallel and FSDP2: ten steps of two processes equal ten of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import jagged_modules as jm

STEPS, USERS, DIM = 10, 6, 16


class Encoder(nn.Module):
    """All layers with parameters, one after another: one number per candidate."""

    def __init__(self):
        super().__init__()
        self.hstu = jm.HSTUStack(DIM, num_heads=2, num_layers=1, config=jm.HSTUConfig(scaling_seqlen=10))
        self.blocks = jm.BlockDiagonalSelfAttention(DIM, num_heads=2, block_size=4, rotary="qk", max_seqlen=16)
        self.gdpa = jm.GDPABlock(DIM, num_heads=2, config=jm.GDPAConfig(num_weights=8))
        self.attention = jm.JaggedTargetAttention(DIM, num_heads=2)
        self.compress = jm.LinearCompressEmbedding(num_candidate_embeddings=2, num_compressed=2, num_user_embeddings=1)
        self.mlp = jm.JaggedMLP(2 * DIM, [8, 1])

    def forward(self, events, lengths, candidates, counts):
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        x = self.gdpa(self.blocks(self.hstu(jm.Jagged(events, offsets))))
        index = jm.CandidateIndex.from_counts(counts)
        interest = self.attention(candidates[:, None], x, index)[:, 0]
        users = torch.segment_reduce(x.values, "sum", lengths=lengths, axis=0, unsafe=True, initial=0)[:, None]
        compressed = self.compress(torch.stack([candidates, interest], dim=1), users, index)
        return self.mlp(compressed.flatten(1)).squeeze(1)


def batch(step: int, users: slice):
    """Users of a step's batch, with their events, candidates and labels."""
    torch.manual_seed(step)
    lengths, counts = torch.randint(0, 9, (USERS,)), torch.randint(1, 4, (USERS,))
    events, candidates, labels = torch.randn(USERS, 8, DIM), torch.randn(USERS, 3, DIM), torch.randn(USERS, 3)
    picked = [torch.cat([x[u, : n[u]] for u in range(USERS)[users]]) for x, n in ((events, lengths), (candidates, counts), (labels, counts))]
    return (picked[0], lengths[users], picked[1], counts[users]), picked[2]


def train(wrap: str | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Encoder()
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
        inputs, labels = batch(step, users)
        losses = (model(*inputs) - labels).square()
        count = torch.tensor(float(len(losses)))
        if wrap:
            dist.all_reduce(count)
        (losses.sum() * world_size / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    module = model.module if wrap == "ddp" else model
    return {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in module.state_dict().items()}


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(two_ranks, wrap):
    torch.manual_seed(0)
    initial, expected = Encoder().state_dict(), train(None)
    for actual in two_ranks.run(train, wrap):
        for name, x in expected.items():
            # As in test_plans.py: eight roundings per step, of the largest weight or change.
            changed = (x - initial[name]).abs().max()
            bound = STEPS * 8 * 2**-24 * torch.maximum(x.abs().max(), changed)
            assert (actual[name] - x).abs().max() <= bound, name
            assert changed > 20 * bound or "rotary" in name, f"{name} hardly learned"
