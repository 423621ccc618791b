"""examples/sharding.py: what a process group leaves behind."""

import gc
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrec")

import sharding
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from ..marks import PATIENCE
from .ranks import one_rank

SGD = sharding.OptimizerSpec(torch.optim.SGD, dict(lr=0.1))


class Bags(nn.Module):
    """A table and a dense layer."""

    def __init__(self, device: torch.device):
        super().__init__()
        config = EmbeddingBagConfig(
            name="table", embedding_dim=4, num_embeddings=8, feature_names=["id"]
        )
        self.bags, self.dense = (
            EmbeddingBagCollection([config], device=device),
            nn.Linear(4, 1, device=device),
        )

    def tables(self) -> list[nn.Parameter]:
        return list(self.bags.parameters())


def gloo_threads() -> set[str]:
    """Ids of this process's threads that belong to gloo."""
    return {
        x.parent.name for x in Path("/proc/self/task").glob("*/comm") if "gloo" in x.read_text()
    }


def torchrun_group(monkeypatch):
    """`sharding.process_group` in this process, as the only one of torchrun."""
    names = dict(
        TORCHELASTIC_RUN_ID="test",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=0,
        RANK=0,
        WORLD_SIZE=1,
        LOCAL_RANK=0,
    )
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    return sharding.process_group("cpu", PATIENCE)


GROUPS = {"sharding.process_group": torchrun_group, "one_rank": lambda _: one_rank()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_no_thread_of_gloo_outlives_the_group(group, monkeypatch):
    """A sharded model is a reference cycle that holds the group. Threads that still run when Python
    ends abort the process."""
    gc.collect()
    before = gloo_threads()
    gc.disable()  # only the group's own end may collect
    try:
        with group(monkeypatch):
            sharding.build(Bags, torch.device("cpu"), "table_wise", SGD, SGD)
            assert gloo_threads() > before
        assert gloo_threads() == before
    finally:
        gc.enable()
