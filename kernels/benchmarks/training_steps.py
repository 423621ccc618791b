"""A training step of each layer for batches of given lengths, for first_call.py and the tests of
compilation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import jagged_modules as jm

Lengths = Sequence[int]
Step = Callable[[Lengths, Lengths], None]  # rows of each user's history and of its candidates


def _offsets(lengths: Lengths, device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device)


class _Steps:
    """Builds training steps on one device, in one dtype: forward, backward, and the update of all
    parameters."""

    def __init__(self, device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=True)

    def jagged(self, lengths: Lengths, dim: int) -> jm.Jagged:
        return jm.Jagged(self.rows(sum(lengths), dim), _offsets(lengths, self.device))

    def train(
        self, layer: nn.Module, forward: Callable[[nn.Module, Lengths, Lengths], Tensor]
    ) -> Step:
        layer = layer.to(self.device, self.dtype)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)

        def step(history: Lengths, candidates: Lengths) -> None:
            optimizer.zero_grad()
            forward(layer, history, candidates).sum().backward()
            optimizer.step()

        step.layer = layer  # for tests
        return step

    def target_attention(self, dim: int, heads: int) -> Step:
        def forward(layer, history, candidates):
            index = jm.CandidateIndex.from_offsets(_offsets(candidates, self.device))
            return layer(self.rows(sum(candidates), 1, dim), self.jagged(history, dim), index)

        return self.train(jm.JaggedTargetAttention(dim, heads), forward)

    def self_attention(self, layer: nn.Module, dim: int) -> Step:
        def forward(layer, history, candidates):
            out = layer(self.jagged(history, dim))
            return out.values if isinstance(out, jm.Jagged) else out

        return self.train(layer, forward)

    def hstu(self, dim: int, heads: int) -> Step:
        config = jm.HSTUConfig(scaling_seqlen=512)

        def forward(layer, history, candidates):
            lengths = [h + c for h, c in zip(history, candidates)]
            return layer(self.jagged(lengths, dim), torch.tensor(candidates).to(self.device)).values

        return self.train(jm.HSTUStack(dim, heads, 2, config), forward)

    def linear_compress(self, depths: tuple[int, int], num_compressed: int, width: int) -> Step:
        def forward(layer, history, candidates):
            index = jm.CandidateIndex.from_offsets(_offsets(candidates, self.device))
            users, items = (
                self.rows(n, depth, width)
                for n, depth in zip((len(candidates), sum(candidates)), depths)
            )
            return layer(items, users, index)

        return self.train(jm.LinearCompressEmbedding(depths[1], num_compressed, depths[0]), forward)


def training_steps(device, dtype: torch.dtype) -> dict[str, Callable[[], Step]]:
    """Name of a layer → a function that makes the layer and returns its training step."""
    steps = _Steps(device, dtype)
    return {
        "JaggedTargetAttention(64, 2)": lambda: steps.target_attention(64, 2),
        "JaggedTargetAttention(256, 4)": lambda: steps.target_attention(256, 4),
        "JaggedGDPA(128, 1)": lambda: steps.self_attention(jm.JaggedGDPA(128, 1), 128),
        "JaggedGDPA(128, 2, num_seeds=16)": lambda: steps.self_attention(
            jm.JaggedGDPA(128, 2, config=jm.GDPAConfig(num_seeds=16)), 128
        ),
        "JaggedGDPA(128, 2, num_weights=64)": lambda: steps.self_attention(
            jm.JaggedGDPA(128, 2, config=jm.GDPAConfig(num_weights=64)), 128
        ),
        "HSTUStack(128, 2, num_layers=2)": lambda: steps.hstu(128, 2),
        "BlockDiagonalSelfAttention(128, 2)": lambda: steps.self_attention(
            jm.BlockDiagonalSelfAttention(128, 2), 128
        ),
        "JaggedMLP([64, 128, 64])": lambda: steps.self_attention(
            jm.JaggedMLP([64, 128, 64], "gelu_tanh"), 64
        ),
        "LinearCompressEmbedding(40, 64, 100)": lambda: steps.linear_compress((100, 40), 64, 128),
    }
