"""Models on a GPU are captured, fused and exported without one: with fake tensors. Their graphs
have the operators of kernels."""

import types

import pytest
import torch
from jagged_kernels.common import device as launch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

import jagged_modules as jm
from jagged_modules.transforms import fuse
from jagged_modules.transforms.capture import BATCH_NORM, Example

from .captured import capture

pytest.importorskip("torchrec")

from . import test_models_dtypes

WIDTH, USERS, CANDIDATES = 64, 4, 64

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="a build of torch without CUDA has no fake tensors of its devices",
)


class Compress(nn.Module):
    """LinearCompressEmbedding of users' and items' features."""

    def __init__(self):
        super().__init__()
        self.compress = jm.LinearCompressEmbedding(42, 8)

    def forward(self, user, item):
        return self.compress(torch.cat([user, item], 1)).relu()


def features(users, candidates):
    return dict(user=torch.randn(users, 40, WIDTH), item=torch.randn(candidates, 2, WIDTH))


class DIN(nn.Module):
    """Scores of an MLP with hidden layers of these sizes."""

    def __init__(self, *hidden, **options):
        super().__init__()
        sizes, layers = [4 * WIDTH, *hidden], []
        for columns, units in zip(sizes, sizes[1:]):
            layers += [nn.Linear(columns, units, **options), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(sizes[-1], 1, **options))

    def forward(self, history, mask, item):
        q = item[:, None].expand_as(history)
        scores = self.mlp(torch.cat([q, history, q - history, q * history], -1)) * mask[..., None]
        return (scores * history).sum(1)


def padded(users, candidates):
    return dict(
        history=torch.randn(users, 50, WIDTH),
        mask=torch.ones(users, 50, dtype=torch.bool),
        item=torch.randn(candidates, WIDTH),
    )


def in_float64(users, candidates):
    given = padded(users, candidates)
    return given | {name: given[name].double() for name in ("history", "item")}


CASES = {  # the functions that the fused graph calls
    "own layers": (
        test_models_dtypes.CASES["own layers"],
        {"attend_equal_segments", "group_candidates", "attend_segments_in_place"},
    ),
    "multi-head": (
        test_models_dtypes.CASES["attention, multi-head"],
        {"group_candidates", "attend_in_place"},
    ),
    "operator": (
        test_models_dtypes.CASES["attention, operator"],
        {"group_candidates", "attend_in_place"},
    ),
    "compress": (test_models_dtypes.Case(Compress, features, ("user",)), set()),
    "din": (
        test_models_dtypes.Case(lambda: DIN(80, 40), padded, ("history", "mask")),
        {"group_candidates", "attend_by_mlp_in_place"},
    ),
    "din of three layers": (
        test_models_dtypes.Case(lambda: DIN(80, 40, 20), padded, ("history", "mask")),
        set(),
    ),
    "din in float64": (
        test_models_dtypes.Case(
            lambda: DIN(80, 40, dtype=torch.float64), in_float64, ("history", "mask")
        ),
        set(),
    ),
}
# the operators of this project that the exported program has, besides or instead of attention's
OPERATORS = {
    "compress": {"linear_compress"},
    "din": {"din_attention"},
    "din of three layers": set[str](),
    "din in float64": set[str](),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """torch reports a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device=None: types.SimpleNamespace(multi_processor_count=100),
    )
    launch.device_properties.cache_clear()
    yield
    launch.device_properties.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_fused_and_exported(name):
    case, expected = CASES[name]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), torch.no_grad():
        model, example = case.model().eval(), case.inputs(CANDIDATES, CANDIDATES)
        captured = capture(model, (), example, None, case.shared)
        batch = fuse._batch(captured, case.shared, Example(model, (), example).inputs)
        with unset_fake_temporarily(), torch.device("cpu"):  # masks are followed on numbers
            plan = fuse.make_plan(
                captured, batch, fuse._hints(captured, batch, (USERS, CANDIDATES))
            )
            fused, _ = plan.apply()
        called = {
            node.target.__name__
            for node in fused.graph.nodes
            if "runtime" in getattr(node.target, "__module__", "")
        }
        assert called == expected | {"checked_map", "check_inputs"}
        given = case.inputs(USERS, CANDIDATES) | dict(
            candidate_to_user=torch.arange(CANDIDATES) % USERS
        )
        sizes = {rows: {0: torch.export.Dim(rows)} for rows in ("users", "candidates")}
        shapes = {key: sizes["users" if key in case.shared else "candidates"] for key in given}
        program = torch.export.export(fused, (), given, dynamic_shapes=shapes)
    operators = {
        str(node.target).split(".")[1]
        for node in program.graph.nodes
        if str(node.target).startswith("jagged_kernels.")
    }
    if name in OPERATORS:
        assert operators == OPERATORS[name]
    else:
        assert "attention" in operators


class Normed(nn.Module):
    """A batch norm of the events."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(50)

    def forward(self, history, mask, item):
        return self.norm(history * item[:, None])


def test_batch_norm_of_events():
    """torch compares the batch with cuDNN's limits. The graph has the operator of all sizes."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), torch.no_grad():
        example = padded(CANDIDATES, CANDIDATES)
        graph = capture(Normed().eval(), (), example, None, ("history", "mask")).graph
    assert graph.find_nodes(op="call_function", target=BATCH_NORM)
