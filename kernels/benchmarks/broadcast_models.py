"""Ranking models written for one batch, in which the rows of users are repeated for their
candidates: for bench_broadcast.py.

TorchRec's models are not edited. Their nets behind the embedding lookups are called on embeddings.
"""

import copy
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

HAS_TORCHREC = importlib.util.find_spec("torchrec") is not None
MAX_CANDIDATES = 2**14  # of a user
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))


@dataclass(frozen=True)
class Sizes:
    """Widths of the models. events: of a history. profile: dense features of a user. *_features:
    embeddings of a user and of an item."""

    dim: int
    heads: int
    events: int
    profile: int
    user_features: int
    item_features: int
    hidden: tuple[int, ...]


@dataclass(frozen=True)
class Net:
    """A model, and what its callers give it.

    Args:
        model: forward takes one row per candidate of each input, or repeats rows itself.
        inputs: random inputs of a number of users and of candidates, by name, in which the shared
            ones have one row per user.
        shared: inputs that the caller repeats for each candidate; none if the model does.
        split: the model as a net of users and a net of candidates, cut by hand where the rows were
            repeated; takes one row per user of the shared inputs, and candidate_to_user. None where
            nothing is computed from the user alone.
    """

    model: nn.Module
    inputs: Callable[[int, int], dict[str, Tensor]]
    shared: tuple[str, ...] = ()
    split: nn.Module | None = None


def random_rows(
    shapes: dict[str, tuple[int, ...]],
    shared: tuple[str, ...],
    masks: tuple[str, ...],
    users: int,
    candidates: int,
) -> dict[str, Tensor]:
    """Inputs with rows of these shapes. masks: True for the last fifth of each row, which is
    padding."""
    generator, inputs = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        rows = users if name in shared else candidates
        if name in masks:
            inputs[name] = (torch.arange(shape[0]) >= -(-shape[0] * 4 // 5)).repeat(rows, 1)
        else:
            inputs[name] = torch.randn(rows, *shape, generator=generator)
    return inputs


def make_net(
    model: nn.Module,
    split: nn.Module | None,
    shared: tuple[str, ...],
    masks: tuple[str, ...] = (),
    **shapes: tuple[int, ...],
) -> Net:
    """A Net whose split form has the model's parameters."""
    if split is not None:
        split.load_state_dict(model.state_dict())
        split.eval()
    return Net(model.eval(), partial(random_rows, shapes, shared, masks), shared, split)


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in zip(widths, widths[1:]):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# -- DIN -------------------------------------------------------------------------------------------


class Din(nn.Module):
    """Attention of the item to the history on nn.MultiheadAttention, and a tower of the user's
    profile."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.attention = nn.MultiheadAttention(sizes.dim, sizes.heads, batch_first=True)
        self.profile = mlp((sizes.profile, *sizes.hidden, sizes.dim))
        self.over = mlp((3 * sizes.dim, *sizes.hidden, 1))

    def forward(self, history: Tensor, padding: Tensor, profile: Tensor, item: Tensor) -> Tensor:
        return self.behind_profile(history, padding, self.profile(profile), item)

    def behind_profile(
        self, history: Tensor, padding: Tensor, user: Tensor, item: Tensor
    ) -> Tensor:
        interest, _ = self.attention(
            item[:, None], history, history, key_padding_mask=padding, need_weights=False
        )
        return self.over(torch.cat([interest[:, 0], user, item], 1))


class SplitDin(Din):
    def forward(
        self,
        history: Tensor,
        padding: Tensor,
        profile: Tensor,
        item: Tensor,
        candidate_to_user: Tensor,
    ) -> Tensor:
        user = self.profile(profile)
        return self.behind_profile(
            *(x.index_select(0, candidate_to_user) for x in (history, padding, user)), item
        )


def din(sizes: Sizes) -> Net:
    shapes = dict(
        history=(sizes.events, sizes.dim),
        padding=(sizes.events,),
        profile=(sizes.profile,),
        item=(sizes.dim,),
    )
    return make_net(
        Din(sizes), SplitDin(sizes), ("history", "padding", "profile"), ("padding",), **shapes
    )


# -- a user encoder --------------------------------------------------------------------------------


class Encoder(nn.Module):
    """An nn.TransformerEncoder over the history and a tower of the profile: most of the work is the
    user's."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        layer = nn.TransformerEncoderLayer(sizes.dim, sizes.heads, 4 * sizes.dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.profile = mlp((sizes.profile, *sizes.hidden, sizes.dim))
        self.over = mlp((3 * sizes.dim, *sizes.hidden, 1))

    def user(self, history: Tensor, profile: Tensor) -> Tensor:
        return torch.cat([self.encoder(history).mean(1), self.profile(profile)], 1)

    def forward(self, history: Tensor, profile: Tensor, item: Tensor) -> Tensor:
        return self.over(torch.cat([self.user(history, profile), item], 1))


class SplitEncoder(Encoder):
    def forward(
        self, history: Tensor, profile: Tensor, item: Tensor, candidate_to_user: Tensor
    ) -> Tensor:
        return self.over(
            torch.cat([self.user(history, profile).index_select(0, candidate_to_user), item], 1)
        )


def encoder(sizes: Sizes) -> Net:
    shapes = dict(history=(sizes.events, sizes.dim), profile=(sizes.profile,), item=(sizes.dim,))
    return make_net(Encoder(sizes), SplitEncoder(sizes), ("history", "profile"), **shapes)


# -- Wukong ----------------------------------------------------------------------------------------


class WukongLayer(nn.Module):
    """A linear compression beside a factorization machine's MLP, and a residual, on plain
    matmul."""

    def __init__(self, num_inputs: int, num_outputs: int, sizes: Sizes, rank: int = 8):
        super().__init__()
        self.compress, self.residual = (
            nn.Parameter(torch.randn(n, num_inputs) / num_inputs)
            for n in (num_outputs // 2, num_outputs)
        )
        self.project = nn.Parameter(torch.randn(num_inputs, rank) / num_inputs)
        self.mlp = mlp((num_inputs * rank, *sizes.hidden, num_outputs // 2 * sizes.dim))
        self.norm = nn.LayerNorm(sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        interactions = torch.matmul(x, torch.matmul(x.transpose(1, 2), self.project))
        machine = self.mlp(interactions.flatten(1)).unflatten(1, (-1, x.shape[2]))
        return self.norm(
            torch.cat([machine, torch.matmul(self.compress, x)], 1) + torch.matmul(self.residual, x)
        )


class Wukong(nn.Module):
    """Two layers over the embeddings of user and item. All operators read both."""

    def __init__(self, sizes: Sizes, width: int = 16):
        super().__init__()
        inputs = sizes.user_features + sizes.item_features
        self.layers = nn.Sequential(
            WukongLayer(inputs, width, sizes), WukongLayer(width, width, sizes)
        )
        self.over = mlp((width * sizes.dim, *sizes.hidden, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.over(self.layers(torch.cat([user, item], 1)).flatten(1))


def wukong(sizes: Sizes) -> Net:
    shapes = dict(user=(sizes.user_features, sizes.dim), item=(sizes.item_features, sizes.dim))
    return make_net(Wukong(sizes), None, ("user",), **shapes)


# -- TorchRec --------------------------------------------------------------------------------------


class BehindLookups(nn.Module):
    """A TorchRec model on embeddings. The lookups come before it, as in serving."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.dense_arch, self.inter_arch, self.over_arch = (
            model.dense_arch,
            model.inter_arch,
            model.over_arch,
        )
        # SimpleDeepFMNN
        self.by_feature: list[str] | None = getattr(model.inter_arch, "sparse_feature_names", None)

    def forward(self, profile: Tensor, user: Tensor, item: Tensor) -> Tensor:
        return self.behind_dense(self.dense_arch(profile), user, item)

    def behind_dense(self, dense: Tensor, user: Tensor, item: Tensor) -> Tensor:
        embeddings = torch.cat([user, item], 1)
        return self.over_arch(
            self.inter_arch(
                dense,
                dict(zip(self.by_feature, embeddings.unbind(1))) if self.by_feature else embeddings,
            )
        )


class SplitBehindLookups(BehindLookups):
    def forward(
        self, profile: Tensor, user: Tensor, item: Tensor, candidate_to_user: Tensor
    ) -> Tensor:
        dense, user = (
            x.index_select(0, candidate_to_user) for x in (self.dense_arch(profile), user)
        )
        return self.behind_dense(dense, user, item)


def torchrec_net(name: str) -> Callable[[Sizes], Net]:
    def make(sizes: Sizes) -> Net:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.models import deepfm, dlrm

        features = [f"feature_{i}" for i in range(sizes.user_features + sizes.item_features)]
        bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=f"t_{x}", embedding_dim=sizes.dim, num_embeddings=2, feature_names=[x]
                )
                for x in features
            ]
        )
        options: dict[str, dict[str, object]] = {
            "DLRM": {},
            "DLRM_DCN": dict(dcn_num_layers=2, dcn_low_rank_dim=sizes.dim),
            "DLRM_Projection": {
                f"interaction_branch{i}_layer_sizes": [sizes.dim, 8 * sizes.dim] for i in (1, 2)
            },
        }
        if name in options:
            arguments = bags, sizes.profile, [*sizes.hidden, sizes.dim], [*sizes.hidden, 1]
            model = getattr(dlrm, name)(*arguments, **options[name])
        else:
            model = deepfm.SimpleDeepFMNN(
                sizes.profile, bags, hidden_layer_size=sizes.hidden[0], deep_fm_dimension=sizes.dim
            )
        shapes = dict(
            profile=(sizes.profile,),
            user=(sizes.user_features, sizes.dim),
            item=(sizes.item_features, sizes.dim),
        )
        return make_net(
            BehindLookups(model),
            SplitBehindLookups(copy.deepcopy(model)),
            ("profile", "user"),
            **shapes,
        )

    return make


# -- this project's example ------------------------------------------------------------------------


class ExampleHead(nn.Module):
    """The net behind the lookups of examples/ranking_model.py. It repeats the users' vectors
    itself."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        from ranking_model import Inputs, RankingConfig, RankingHead

        config = RankingConfig(
            embedding_dim=sizes.dim,
            num_heads=sizes.heads,
            max_history=sizes.events,
            max_candidates=MAX_CANDIDATES,
            parts=("gdpa",),
        )
        self.head, self.inputs = (
            RankingHead(config, sizes.user_features, sizes.item_features),
            Inputs,
        )

    def forward(
        self,
        history: Tensor,
        history_offsets: Tensor,
        items: Tensor,
        item_features: Tensor,
        item_offsets: Tensor,
        users: Tensor,
    ) -> Tensor:
        inputs = self.inputs(
            history, history_offsets, None, None, items, item_features, item_offsets, users
        )
        return self.head(inputs)[:, None]


def example_head(sizes: Sizes) -> Net:
    def inputs(users: int, candidates: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        return dict(
            history=random(users * sizes.events, sizes.dim),
            history_offsets=torch.arange(users + 1) * sizes.events,
            items=random(candidates, sizes.dim),
            item_features=random(candidates, sizes.item_features, sizes.dim),
            item_offsets=torch.arange(users + 1) * candidates // users,
            users=random(users, sizes.user_features, sizes.dim),
        )

    return Net(ExampleHead(sizes).eval(), inputs)


NETS: dict[str, Callable[[Sizes], Net]] = {
    "DIN, nn.MultiheadAttention": din,
    "nn.TransformerEncoder": encoder,
    "Wukong": wukong,
}
if HAS_TORCHREC:
    NETS |= {
        f"TorchRec {name}": torchrec_net(name)
        for name in ("DLRM", "DLRM_DCN", "DLRM_Projection", "SimpleDeepFMNN")
    }
    NETS["examples/ranking_model.py"] = example_head
