"""Models of other projects, not edited, and this project's examples: equal results, and the users'
part at the users' rows."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from marks import slow_after
from torch import nn

from jagged_modules.transforms import fuse_broadcasts
from jagged_modules.transforms.bags import select_rows

from .test_replication import matmul_rows

torchrec = pytest.importorskip("torchrec")
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection

DIM, DENSE, FEATURES = 8, 5, ("f0", "f1", "f2")


def bags():
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=20, feature_names=[name]
            )
            for name in FEATURES
        ]
    )


def sparse(rows):
    lengths = torch.randint(0, 4, (len(FEATURES) * rows,))
    return KeyedJaggedTensor(
        list(FEATURES), torch.randint(0, 20, (int(lengths.sum()),)), lengths=lengths
    )


TORCHREC = {
    "DLRM": lambda: DLRM(bags(), DENSE, [16, DIM], [16, 1]),
    "DLRM_DCN": lambda: DLRM_DCN(
        bags(), DENSE, [16, DIM], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=4
    ),
    "DLRM_Projection": lambda: DLRM_Projection(
        bags(),
        DENSE,
        [16, DIM],
        [16, 1],
        interaction_branch1_layer_sizes=[16, 16],
        interaction_branch2_layer_sizes=[16, 16],
    ),
    "SimpleDeepFMNN": lambda: SimpleDeepFMNN(
        DENSE, bags(), hidden_layer_size=16, deep_fm_dimension=4
    ),
}


@pytest.mark.parametrize("name", TORCHREC)
def test_torchrec(name):
    """The dense features are the user's: their tower runs once per user."""
    model = TORCHREC[name]().eval()
    example, shared = (torch.randn(64, DENSE), sparse(64)), ("dense_features",)
    fused = fuse_broadcasts(model, example, request_only=shared, max_batch=(4, 100_000))
    graph = copy.deepcopy(fused)  # without the calls of the model for U >= C
    for users, index in ((3, [2, 0, 2, 2, 0]), (6, [4, 4]), (1, [0, 0])):
        index = torch.tensor(index)
        dense, features = torch.randn(users, DENSE), sparse(len(index))
        expected = model(dense[index], features)
        for module in (graph, fused):
            torch.testing.assert_close(module(dense, features, candidate_to_user=index), expected)
    rows = matmul_rows(
        fused, torch.randn(3, DENSE), sparse(50), candidate_to_user=torch.arange(50) % 3
    )
    assert rows.count(3) >= 2
    assert fused.report.after.total < fused.report.before.total


@slow_after(2, "name", TORCHREC)
def test_torchrec_bags_of_users(name):
    """The sparse features are the user's: each bag is looked up once per user."""
    model = TORCHREC[name]().eval()
    fused = fuse_broadcasts(
        model, (torch.randn(64, DENSE), sparse(64)), request_only=("sparse_features",)
    )
    graph = copy.deepcopy(fused)  # without the calls of the model for U >= C
    for users, index in ((3, [2, 0, 2, 2, 0]), (6, [4, 4]), (1, [0, 0])):
        index = torch.tensor(index)
        dense, features = torch.randn(len(index), DENSE), sparse(users)
        expected = model(dense, select_rows(features, index))
        for module in (graph, fused):
            torch.testing.assert_close(module(dense, features, candidate_to_user=index), expected)
    bags = [site for site in fused.report.sites if site.operator.startswith("embedding_bag")]
    assert [(site.decision, site.rows_before, site.rows_after) for site in bags] == [
        ("moved", 64, 4)
    ] * len(FEATURES)


def test_torchrec_all_inputs_of_users():
    model = TORCHREC["DLRM"]().eval()
    fused = fuse_broadcasts(
        model,
        (torch.randn(64, DENSE), sparse(64)),
        request_only=("sparse_features", "dense_features"),
    )
    index, dense, features = torch.tensor([2, 0, 2, 2, 0]), torch.randn(3, DENSE), sparse(3)
    torch.testing.assert_close(
        fused(dense, features, candidate_to_user=index),
        model(dense[index], select_rows(features, index)),
    )
    assert max(matmul_rows(fused, dense, features, candidate_to_user=index)) <= 3 * 4
    with pytest.raises(ValueError, match="must be 0 to 2"):
        fused(dense, features, candidate_to_user=index + 1)


def by_offsets(features):
    return KeyedJaggedTensor(features.keys(), features.values(), offsets=features.offsets())


def with_both(features):
    """As after an embedding that read the offsets."""
    features.offsets()
    return features


@pytest.mark.parametrize("other", [by_offsets, with_both])
@pytest.mark.parametrize("of_users", [True, False])
def test_features_with_offsets(other, of_users):
    """In the example, and in calls that run the graph (3 users) and the model (6)."""
    model = TORCHREC["DLRM"]().eval()
    shared = ("dense_features", "sparse_features") if of_users else ("dense_features",)
    for given in (sparse(64), other(sparse(64))):
        example = torch.randn(64, DENSE), given
        fused = fuse_broadcasts(model, example, request_only=shared, max_batch=(4, 100_000))
        for users in (3, 6):
            index, dense = torch.tensor([2, 0, 2, 2, 0]), torch.randn(users, DENSE)
            features = sparse(users if of_users else len(index))
            expected = model(dense[index], select_rows(features, index) if of_users else features)
            found = fused(dense, other(features), candidate_to_user=index)
            torch.testing.assert_close(found, expected)


def test_other_keys():
    """The graph has the keys by their position."""
    fused = fuse_broadcasts(
        TORCHREC["DLRM"]().eval(),
        (torch.randn(64, DENSE), sparse(64)),
        request_only=("dense_features", "sparse_features"),
    )
    index, dense, features = torch.tensor([2, 0, 2, 2, 0]), torch.randn(3, DENSE), sparse(3)
    for other in (
        features.permute([*range(1, len(FEATURES)), 0]),
        features.permute([0]),
        torch.ones(3),
    ):
        with pytest.raises(
            ValueError,
            match="sparse_features must be a KeyedJaggedTensor with the keys of example_inputs",
        ):
            fused(dense, other, candidate_to_user=index)


def test_other_numbers_of_samples():
    example = torch.randn(64, DENSE), sparse(64)
    shared, sizes = ("dense_features",), (4, 100_000)
    fused = fuse_broadcasts(
        TORCHREC["DLRM"]().eval(), example, request_only=shared, max_batch=sizes
    )
    with pytest.raises(
        ValueError, match="sparse_features must have one sample per candidate, 5, got 4"
    ):
        fused(torch.randn(3, DENSE), sparse(4), candidate_to_user=torch.tensor([2, 0, 2, 2, 0]))
    fused = fuse_broadcasts(
        TORCHREC["DLRM"]().eval(), example, request_only=("dense_features", "sparse_features")
    )
    with pytest.raises(ValueError, match="sparse_features must have one sample per user, 3, got 4"):
        fused(torch.randn(3, DENSE), sparse(4), candidate_to_user=torch.tensor([2, 0, 2, 2, 0]))


def test_features_that_are_not_pooled():
    class Reads(nn.Module):
        def forward(self, dense, features):
            return dense + features.lengths().view(len(FEATURES), -1).T[:, :1]

    with pytest.raises(
        ValueError, match="request_only input 'features' must be read by embedding bags"
    ):
        fuse_broadcasts(
            Reads().eval(), (torch.randn(64, DENSE), sparse(64)), request_only=("features",)
        )


def test_select_rows():
    features, index = sparse(4), torch.tensor([3, 1, 1])
    chosen = select_rows(features, index)
    for key in FEATURES:
        expected = [features[key].to_dense()[i].tolist() for i in index]
        assert [x.tolist() for x in chosen[key].to_dense()] == expected


class WukongLayer(nn.Module):
    """A Wukong layer on plain matmul: a linear compression beside a factorization machine's MLP,
    and a residual."""

    def __init__(self, num_inputs, num_outputs, dim, rank=4):
        super().__init__()
        self.compress, self.residual = (
            nn.Parameter(torch.randn(num_outputs // scale, num_inputs)) for scale in (2, 1)
        )
        self.project = nn.Parameter(torch.randn(num_inputs, rank))
        self.mlp = nn.Sequential(
            nn.Linear(num_inputs * rank, 32), nn.ReLU(), nn.Linear(32, num_outputs // 2 * dim)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        interactions = torch.matmul(x, torch.matmul(x.transpose(1, 2), self.project))
        machine = self.mlp(interactions.flatten(1)).unflatten(1, (-1, x.shape[2]))
        return self.norm(
            torch.cat([machine, torch.matmul(self.compress, x)], 1) + torch.matmul(self.residual, x)
        )


class Wukong(nn.Module):
    def __init__(self, num_user, num_item, dim):
        super().__init__()
        self.layers = nn.Sequential(
            WukongLayer(num_user + num_item, 8, dim), WukongLayer(8, 8, dim)
        )
        self.head = nn.Linear(8 * dim, 1)

    def forward(self, user, item):
        return self.head(self.layers(torch.cat([user, item], 1)).flatten(1))


def test_wukong():
    """The first layer's compressions are computed by `linear_compress`, the projection Xᵀ Y in two
    parts."""
    model = Wukong(num_user=40, num_item=10, dim=16).eval()
    inputs = torch.randn(64, 40, 16), torch.randn(64, 10, 16)
    fused = fuse_broadcasts(model, inputs, request_only=("user",))
    index = torch.tensor([2, 0, 2, 2, 0])
    user, item = torch.randn(3, 40, 16), torch.randn(5, 10, 16)
    torch.testing.assert_close(
        fused(user, item, candidate_to_user=index), model(user[index], item), rtol=1e-4, atol=1e-4
    )
    assert [site.decision for site in fused.report.sites].count("fused") == 2
    assert fused.report.after.total < fused.report.before.total


class Head(nn.Module):
    """The dense part of this project's ranking model on plain tensors, as its lookups give them."""

    def __init__(self, head, inputs):
        super().__init__()
        self.head, self.inputs = head, inputs

    def forward(self, history, history_offsets, items, item_features, item_offsets, users):
        return self.head(
            self.inputs(
                history, history_offsets, None, None, items, item_features, item_offsets, users
            )
        )


def test_this_projects_example(monkeypatch):
    """examples/ranking_model.py repeats user vectors with repeat_interleave. Its jagged layers have
    no rule and stay."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    for name in ("ranking_model", "ranking_data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from ranking_model import Inputs, RankingConfig, RankingHead

    dim, features = 64, 90
    config = RankingConfig(
        embedding_dim=dim, num_heads=2, max_history=12, max_candidates=70, parts=("gdpa",)
    )
    model = Head(RankingHead(config, features, 2), Inputs).eval()

    def inputs(history, candidates):
        history, candidates = torch.tensor([0, *history]), torch.tensor([0, *candidates])
        events = torch.randn(int(history.sum()), dim)
        items = torch.randn(int(candidates.sum()), dim)
        users = torch.randn(len(history) - 1, features, dim)
        return (
            events,
            history.cumsum(0),
            items,
            torch.randn(len(items), 2, dim),
            candidates.cumsum(0),
            users,
        )

    fused = fuse_broadcasts(model, inputs([3, 2, 5], [70, 1, 60]))
    for lengths in (([3, 2, 5], [2, 1, 5]), ([1, 0], [3, 4]), ([4, 5, 6, 7], [1, 1, 0, 2])):
        example = inputs(*lengths)
        torch.testing.assert_close(fused(*example), model(*example), rtol=1e-4, atol=1e-4)
    assert any(site.operator == "gather" for site in fused.report.sites)
