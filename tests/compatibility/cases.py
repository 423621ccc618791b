"""A small model around each layer: tensors in, one tensor out. Tests of all layers run over
CASES."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import jagged_modules as jm

WIDTH, HEADS, USER_FEATURES = 32, 2, 2
FEATURES = ["history", "candidates"]  # of the batches of sharded models
# users, history rows, candidates; no two sizes of a batch are equal
SIZES = [(5, 41, 11), (6, 83, 23), (7, 59, 37)]


def random_offsets(segments: int, total: int) -> Tensor:
    return torch.cat(
        [
            torch.zeros(1, dtype=torch.int64),
            torch.randint(total, (segments - 1,)).sort().values,
            torch.tensor([total]),
        ]
    )


class OnRows(nn.Module):
    """The layer maps rows to rows."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    @staticmethod
    def inputs(users: int, rows: int, candidates: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, WIDTH), random_offsets(users, rows)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.layer((values, offsets))[0]


class Pooled(OnRows):
    """The layer maps the rows of each segment to a dense tensor."""

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.layer((values, offsets))


class OnUsers(OnRows):
    """The layer maps rows and users' features to rows."""

    @staticmethod
    def inputs(users: int, rows: int, candidates: int) -> tuple[Tensor, ...]:
        return *OnRows.inputs(users, rows, candidates), torch.randn(users, USER_FEATURES, WIDTH)

    def forward(self, values: Tensor, offsets: Tensor, features: Tensor) -> Tensor:
        return self.layer((values, offsets), features)[0]


class Exchanged(OnUsers):
    """The layer maps rows and users' features to both: each row's result and its user's."""

    def forward(self, values: Tensor, offsets: Tensor, features: Tensor) -> Tensor:
        (rows, _), vectors = self.layer((values, offsets), features)
        # without a gate, a mean square after the last norm would have no gradient
        places = torch.arange(values.shape[0], device=values.device)
        users = torch.searchsorted(offsets, places, right=True) - 1
        return rows + vectors.relu().mean(1)[users]


class OnCandidates(OnRows):
    """Candidates, in any order, attend to their user's rows. users_of: a map, or its index."""

    @staticmethod
    def inputs(users: int, rows: int, candidates: int) -> tuple[Tensor, ...]:
        targets = torch.randn(candidates, 1, WIDTH)
        return (
            targets,
            torch.randn(rows, WIDTH),
            random_offsets(users, rows),
            torch.randint(users, (candidates,)),
        )

    def forward(
        self, targets: Tensor, values: Tensor, offsets: Tensor, users_of: Tensor | jm.CandidateIndex
    ) -> Tensor:
        if isinstance(users_of, Tensor):
            users_of = jm.CandidateIndex.from_map(users_of, offsets.shape[0] - 1)
        return self.layer(targets, (values, offsets), users_of)


class OnHistoryAndCandidates(OnCandidates):
    """The candidates' results attend to the history's."""

    def forward(self, targets: Tensor, values: Tensor, offsets: Tensor, users_of: Tensor) -> Tensor:
        index = jm.CandidateIndex.from_map(users_of, offsets.shape[0] - 1)
        (rows, _), out = self.layer((values, offsets), targets, index)
        rows, out = (x.unflatten(-1, (HEADS, -1)) for x in (rows, out))
        return jm.functional.target_attention(out, rows, rows, index, offsets).flatten(2)


class Compressed(OnRows):
    """Dense embeddings of candidates and of their users."""

    @staticmethod
    def inputs(users: int, rows: int, candidates: int) -> tuple[Tensor, ...]:
        return (
            torch.randn(candidates, 2, WIDTH),
            torch.randn(users, 2, WIDTH),
            torch.randint(users, (candidates,)),
        )

    def forward(self, candidates: Tensor, users: Tensor, users_of: Tensor) -> Tensor:
        return self.layer(candidates, users, users_of)


class Case(NamedTuple):
    name: str
    model: type[OnRows]
    build: Callable[..., nn.Module]  # builds the layer, given its device and dtype by keyword

    @property
    def layer(self) -> str:
        """The layer's class: some are built in several ways."""
        return self.name.partition("-")[0]


def gdpa(**fields):
    return lambda **options: jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(**fields), **options)


def compress(**options):
    return jm.LinearCompressEmbedding(
        2, 200, 2, candidate_features=FEATURES, user_features=FEATURES, **options
    )


HSTU = jm.HSTUConfig(scaling_seqlen=30)
INTERFORMER = jm.InterFormerConfig(num_weights=24, window=9)
KUNLUN = jm.KunlunConfig(num_seeds=8, num_tokens=3, rank=2, num_weights=24, window=9)
CASES = {  # the last ones consist of the others, or vary them
    case.name: case
    for case in (
        Case(
            "JaggedTargetAttention",
            OnCandidates,
            lambda **options: jm.JaggedTargetAttention(WIDTH, HEADS, **options),
        ),
        Case(
            "JaggedSelfTargetAttention",
            OnHistoryAndCandidates,
            lambda **options: jm.JaggedSelfTargetAttention(WIDTH, HEADS, **options),
        ),
        Case(
            "JaggedDINAttention",
            OnCandidates,
            lambda **options: jm.JaggedDINAttention(WIDTH, (20, 9), **options),
        ),
        Case("JaggedGDPA", OnRows, gdpa(qk_norm=True)),
        Case("HSTULayer", OnRows, lambda **options: jm.HSTULayer(WIDTH, HEADS, HSTU, **options)),
        Case("LinearCompressEmbedding", Compressed, compress),
        Case(
            "BlockDiagonalSelfAttention",
            OnRows,
            lambda **options: jm.BlockDiagonalSelfAttention(
                WIDTH, HEADS, 16, max_seqlen=99, **options
            ),
        ),
        Case(
            "JaggedMLP", OnRows, lambda **options: jm.JaggedMLP([WIDTH, 24, 40], "silu", **options)
        ),
        Case("GDPABlock", OnRows, lambda **options: jm.GDPABlock(WIDTH, HEADS, **options)),
        Case(
            "JaggedEncoderLayer",
            OnRows,
            lambda **options: jm.JaggedEncoderLayer(WIDTH, HEADS, 24, norm_first=True, **options),
        ),
        Case(
            "JaggedEncoder",  # whose last norm would have no gradient of a mean square
            OnRows,
            lambda **options: jm.JaggedEncoder(
                [
                    jm.JaggedEncoderLayer(
                        WIDTH, HEADS, 24, norm_first=True, activation="swiglu", **options
                    )
                ]
            ),
        ),
        Case(
            "JaggedPFFN",
            OnUsers,
            lambda **options: jm.JaggedPFFN(WIDTH, HEADS, USER_FEATURES, 24, **options),
        ),
        Case(
            "JaggedSeedPooling",
            Pooled,
            lambda **options: jm.JaggedSeedPooling(WIDTH, HEADS, 8, 3, rank=2, **options),
        ),
        Case(
            "JaggedInterFormer",
            Exchanged,
            lambda **options: jm.JaggedInterFormer(
                WIDTH, HEADS, USER_FEATURES, config=INTERFORMER, **options
            ),
        ),
        Case(
            "JaggedKunlun",
            Exchanged,
            lambda **options: jm.JaggedKunlun(
                WIDTH, HEADS, USER_FEATURES, config=KUNLUN, **options
            ),
        ),
        Case("HSTUStack", OnRows, lambda **options: jm.HSTUStack(WIDTH, HEADS, 2, HSTU, **options)),
        Case(
            "JaggedDINAttention-mask",
            OnCandidates,
            lambda **options: jm.JaggedDINAttention(
                WIDTH, (20, 9), mask=jm.AttentionMask(causal=True, window=(20, None)), **options
            ),
        ),
        Case("JaggedGDPA-seeds", Pooled, gdpa(num_seeds=8)),
        Case("JaggedGDPA-weights", OnRows, gdpa(num_weights=8)),
    )
}


def make(case: Case, device: str | torch.device | None = None) -> nn.Module:
    """The model around a new layer with weights that depend on nothing before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return case.model(case.build(device=device))


def training_step(model: nn.Module, inputs: Sequence[Any]) -> list[Tensor]:
    """The result, and the gradients of the parameters and of the floating-point inputs, of a loss
    that is the mean square."""
    rows = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs]
    leaves = [x.detach().requires_grad_() if own else x for x, own in zip(inputs, rows)]
    wanted = [*model.parameters(), *(x for x, own in zip(leaves, rows) if own)]
    out = model(*leaves)
    return [out, *torch.autograd.grad(out.float().square().mean(), wanted)]


def assert_same_distribution(x, expected):
    """Mean and standard deviation within six times their spread for so many elements."""
    assert x.shape == expected.shape and x.dtype == expected.dtype
    if expected.numel() == 1:
        return
    spread, slack = expected.std(), 6 / expected.numel() ** 0.5
    assert (x.mean() - expected.mean()).abs() <= slack * spread
    assert (x.std() - spread).abs() <= slack * spread
