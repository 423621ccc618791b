"""Layers in DistributedDataParallel, FSDP2 and torch.distributed.checkpoint, in two processes."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .cases import CASES, SIZES, make
from .table import feature


def gradients(model, inputs):
    model(*inputs).square().mean().backward()
    return [x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad for x in model.parameters()]


def fully_sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS = {"DDP": DistributedDataParallel, "FSDP2": fully_sharded}


def train(name, wrapper):
    """Each process has its own batch. Twice, because a wrapper may prepare something in its first step."""
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


@feature("FSDP2")
def test_fsdp2(case, two_ranks):
    two_ranks.run(train, case.name, "FSDP2")


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
