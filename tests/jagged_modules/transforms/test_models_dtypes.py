"""Fused models in fp32 and bf16, on the CPU and on a GPU: within the rounding of the operations of
the original."""

import copy
import dataclasses
import functools
from collections.abc import Callable

import accuracy
import pytest
import torch
from marks import slow_after
from torch import Tensor, nn

import jagged_modules as jm
from jagged_modules.transforms import fuse_broadcasts, placement
from jagged_modules.transforms.bags import select_rows
from jagged_modules.transforms.capture import is_keyed_jagged

pytest.importorskip("torchrec")

from . import test_attention, test_fusions, test_models, test_replication

EXAMPLE, USERS, CANDIDATES = 64, 5, 40


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of one batch, and its inputs by name, of which the shared ones have one row per user.

    in_parts: sums over users' and candidates' features are computed in parts, each of which is
    rounded. So the operations whose rounding counts are those of the fused graph, without
    attention. In fp64 it computes what the model does, as the other tests show.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict]
    shared: tuple[str, ...]
    in_parts: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def _attention(users, candidates):
    padding = torch.rand(users, test_attention.KEYS) < 0.4
    padding[:, 3] = False
    history = torch.randn(users, test_attention.KEYS, test_attention.DIM)
    item = torch.randn(candidates, test_attention.DIM)
    return dict(history=history, padding=padding, item=item)


def _features(users, candidates):
    user, item = test_fusions.inputs(users, candidates)
    return dict(user=user, item=item)


def _wukong(users, candidates):
    return dict(user=torch.randn(users, 40, 16), item=torch.randn(candidates, 10, 16))


def _ranking(users, candidates):
    return dict(
        history=torch.randn(users, 5, 8),
        profile=torch.randn(users, 4),
        item=torch.randn(candidates, 8),
    )


def _torchrec(users, candidates):
    return dict(
        dense_features=torch.randn(users, test_models.DENSE),
        sparse_features=test_models.sparse(candidates),
    )


class OwnLayers(nn.Module):
    """This project's layers on a dense batch."""

    def __init__(self):
        super().__init__()
        self.encoder, self.attention = (
            jm.JaggedGDPA(8, 2),
            jm.JaggedTargetAttention(8, 2, target_dim=8),
        )

    def forward(self, history, profile, item):
        offsets = torch.arange(history.shape[0] + 1, device=history.device) * history.shape[1]
        values, _ = self.encoder((history.flatten(0, 1), offsets))
        return self.attention(item[:, None], (values, offsets))[:, 0] + profile.sum(1, keepdim=True)


CASES = {
    f"attention, {name}": Case(make, _attention, ("history", "padding"))
    for name, make in test_attention.MODELS.items()
}
CASES |= {"transformer": Case(test_replication.Ranking, _ranking, ("history", "profile"))}
CASES |= {"own layers": Case(OwnLayers, _ranking, ("history", "profile"))}
CASES |= {
    "wukong": Case(functools.partial(test_models.Wukong, 40, 10, 16), _wukong, ("user",), True)
}
FP32 = (torch.float32,)  # TorchRec's embedding bags return fp32
CASES |= {
    f"torchrec, {name}": Case(make, _torchrec, ("dense_features",), dtypes=FP32)
    for name, make in test_models.TORCHREC.items()
}
CASES |= {
    f"parts, {name}": Case(make, _features, ("user",), True)
    for name, make in test_fusions.MODELS.items()
    # each of its products is summed 32 times: their rounding errors are not independent
    if name != "interaction"
}
# each model in one dtype, alternately, then in the other
_BY_DTYPE = [(name, *case.dtypes[:: 1 - i % 2 * 2]) for i, (name, case) in enumerate(CASES.items())]
DTYPES = [(name, first) for name, first, *_ in _BY_DTYPE]
DTYPES += [(name, *other) for name, _, *other in _BY_DTYPE if other]
NAMES = [f"{name}, {str(dtype).removeprefix('torch.')}" for name, dtype in DTYPES]


def moved(x, device, dtype):
    """An input on a device, floating-point tensors in a dtype."""
    if is_keyed_jagged(x):
        return x.to(torch.device(device))
    return x.to(device, dtype if x.is_floating_point() else None)


def check(name, device, dtype):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().to(device, dtype).eval()
    example = {key: moved(x, device, dtype) for key, x in case.inputs(EXAMPLE, EXAMPLE).items()}
    fused = fuse_broadcasts(model, example, request_only=case.shared)
    assert any(site.decision in ("moved", "fused") for site in fused.report.sites)
    given = {key: moved(x, "cpu", dtype) for key, x in case.inputs(USERS, CANDIDATES).items()}
    index = torch.arange(CANDIDATES) * 7 % (USERS - 1)  # a user has none
    with torch.no_grad():
        found = fused(
            **{key: moved(x, device, dtype) for key, x in given.items()},
            candidate_to_user=index.to(device),
        )

    floating = {
        key: x for key, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()
    }

    exact = copy.deepcopy(fused if case.in_parts else model).cpu().double()

    def definition(*tensors):
        inputs = given | dict(zip(floating, tensors))
        if case.in_parts:
            return exact(**inputs, candidate_to_user=index)
        return exact(
            **{key: select_rows(x, index) if key in case.shared else x for key, x in inputs.items()}
        )

    bounds = accuracy.definition(
        definition, floating, torch.ones_like(found, device="cpu"), gradients=False
    )
    accuracy.assert_accurate({"out": found.cpu()}, bounds, f"{name} {dtype}")


@pytest.fixture
def free_calls(monkeypatch):
    """Parts of models as small as these would not pay for their calls."""
    free = dataclasses.replace(placement.CPU, kernel=0.0)
    for name in ("CPU", "GPU"):
        monkeypatch.setattr(placement, name, free)


@slow_after(10, "name, dtype", DTYPES, ids=NAMES)
def test_on_the_cpu(name, dtype, free_calls):
    check(name, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name, dtype", DTYPES, ids=NAMES)
def test_on_a_gpu(name, dtype, free_calls):
    check(name, "cuda", dtype)
