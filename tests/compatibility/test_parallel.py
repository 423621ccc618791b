"""Layers in DistributedDataParallel, FSDP2, tensor parallel plans and torch.distributed.checkpoint,
in two processes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import jagged_modules as jm

from .cases import CASES, SIZES, OnRows, make
from .table import feature


class WithUnusedParameters(nn.Module):
    """Rows come out in a container, `kind`. Some parameters get no gradient."""

    def __init__(self, model, kind):
        super().__init__()
        self.model, self.unused, self.kind = model, nn.Linear(2, 2), kind

    def forward(self, values, offsets, *others):
        out = self.model(values, offsets, *others)
        if type(self.model) is not OnRows:
            return out
        if self.kind == "Jagged":
            return jm.Jagged(out, offsets)
        return pytest.importorskip("torchrec").JaggedTensor(out, offsets=offsets)


def gradients(model, inputs):
    out = model(*inputs)
    rows = out if isinstance(out, torch.Tensor) else jm.Jagged.wrap(out).values
    rows.square().mean().backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in grads]


def fully_sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {
    "DDP": DistributedDataParallel,
    "unused, Jagged": lambda model: DistributedDataParallel(
        WithUnusedParameters(model, "Jagged"), find_unused_parameters=True
    ),
    "unused, JaggedTensor": lambda model: DistributedDataParallel(
        WithUnusedParameters(model, "JaggedTensor"), static_graph=True
    ),
    "FSDP2": fully_sharded,
}


def train(name, wrapper):
    """Each process has its own batch. Twice, because a wrapper may prepare something in its first
    step."""
    case, rank = CASES[name], dist.get_rank()
    model, plain = WRAPPERS[wrapper](make(case)), make(case)
    for _ in range(2):
        torch.manual_seed(rank)
        inputs = case.model.inputs(*SIZES[rank])
        expected = gradients(plain, inputs)
        for grad in expected:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        torch.testing.assert_close(gradients(model, inputs), expected)
        model.zero_grad()
        plain.zero_grad()


@feature("DDP")
def test_ddp(case, two_ranks):
    two_ranks.run(train, case.name, "DDP")


@feature("DDP, unused parameters")
def test_ddp_with_unused_parameters(case, two_ranks):
    two_ranks.run(train, case.name, "unused, Jagged")
    if case.model is OnRows:
        two_ranks.run(train, case.name, "unused, JaggedTensor")


@feature("FSDP2")
def test_fsdp2(case, two_ranks):
    two_ranks.run(train, case.name, "FSDP2")


def train_with_a_result_that_ddp_does_not_find():
    """torch's own error. Where it no longer comes, docs/compatibility.md says too much."""
    model = WithUnusedParameters(make(CASES["JaggedGDPA"]), "JaggedTensor")
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
        gradients(
            DistributedDataParallel(model, find_unused_parameters=True), OnRows.inputs(*SIZES[0])
        )


def test_ddp_does_not_look_into_torchrecs_containers(two_ranks):
    pytest.importorskip("torchrec")
    two_ranks.run(train_with_a_result_that_ddp_does_not_find)


def train_sharded_by_columns(name):
    """Both processes have the same batch."""
    case, model, plain = CASES[name], make(CASES[name]), make(CASES[name])
    mesh = init_device_mesh("cpu", (2,))
    linears = [path for path, x in model.named_modules() if isinstance(x, nn.Linear)]
    gathered, whole = dict(output_layouts=Replicate()), dict(input_layouts=Replicate())
    by_columns = {path: ColwiseParallel(**gathered) for path in linears}
    by_rows = {path: RowwiseParallel(**whole) for path in linears if path.endswith("out_proj")}
    parallelize_module(model, mesh, by_columns | by_rows)
    torch.manual_seed(0)
    inputs = case.model.inputs(*SIZES[0])
    torch.testing.assert_close(model(*inputs), plain(*inputs))
    torch.testing.assert_close(gradients(model, inputs), gradients(plain, inputs))
    sharded = [
        path for path, x in model.named_modules() if hasattr(getattr(x, "weight", None), "to_local")
    ]
    assert set(sharded) == set(linears)
    if by_rows:
        # A DTensor, or the process's part of the columns. Other linears would make the processes
        # wait for each other.
        options = dict(use_local_output=False) if dist.get_rank() else {}
        projections = [path for path in linears if path.endswith("_proj")]
        apart = parallelize_module(
            make(case), mesh, {path: ColwiseParallel(**options) for path in projections}
        )
        with pytest.raises(
            ValueError,
            match=(
                r"_proj must give \d+ columns, got (\d+|a DTensor); a tensor parallel plan must"
                r" gather them"
            ),
        ):
            apart(*inputs)


@feature("tensor parallel")
def test_tensor_parallel(case, two_ranks):
    two_ranks.run(train_sharded_by_columns, case.name)


def save(name, path):
    dcp.save(get_model_state_dict(fully_sharded(make(CASES[name]))), checkpoint_id=path)


@feature("torch.distributed.checkpoint")
def test_distributed_checkpoint(case, two_ranks, tmp_path):
    two_ranks.run(save, case.name, tmp_path / "checkpoint")
    model = case.model(case.build())
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    model.load_state_dict(state)
    for x, y in zip(model.state_dict().values(), make(case).state_dict().values(), strict=True):
        assert torch.equal(x, y)
