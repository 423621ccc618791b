"""Layers in training: activation checkpointing, autocast, GradScaler, fused optimizers and
optimizers inside the backward."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .cases import SIZES, OnUsers, make, training_step
from .table import feature


def inputs_of(case, device="cpu"):
    torch.manual_seed(1)
    return [x.to(device) for x in case.model.inputs(*SIZES[0])]


class Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, *inputs):
        return checkpoint(self.model, *inputs, use_reentrant=self.reentrant)


def steps_with_grads(model, inputs):
    """As `training_step`, by `backward`, which reentrant checkpoints need."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    model.zero_grad()
    torch.manual_seed(2)
    out = model(*leaves)
    out.square().mean().backward()
    return [out, *(x.grad for x in (*model.parameters(), *leaves) if x.requires_grad)]


@pytest.mark.parametrize("reentrant", [False, True])
@feature("activation checkpointing")
def test_checkpointing(case, reentrant):
    model, inputs = make(case), inputs_of(case)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    expected = steps_with_grads(copy.deepcopy(model), inputs)
    for x, y in zip(
        steps_with_grads(Checkpointed(model, reentrant), inputs), expected, strict=True
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@feature("autocast")
def test_autocast(case, dtype):
    model, inputs = make(case), inputs_of(case)
    with torch.autocast("cpu", dtype):
        out, *grads = training_step(model, inputs)
    with_residual = "GDPABlock", "HSTULayer", "HSTUStack", "JaggedEncoderLayer", "JaggedEncoder"
    residual = case.layer in with_residual or issubclass(case.model, OnUsers)
    assert out.dtype == (torch.float32 if residual else dtype) and all(
        grad.dtype == torch.float32 for grad in grads
    )
    for x, y in zip([out, *grads], training_step(model, inputs), strict=True):
        assert (x - y).norm() < 0.05 * y.norm() + 1e-6  # softmax's gradient of a key's bias is 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@feature("GradScaler")
def test_grad_scaler(case, device):
    model, inputs = make(case, device), inputs_of(case, device)
    expected = [x.grad for x in stepped(copy.deepcopy(model), inputs)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    with torch.autocast(device, torch.float16):
        out = model(*inputs)
    scaler.scale(out.float().square().mean()).backward()
    scaler.unscale_(optimizer)
    for x, y in zip(model.parameters(), expected, strict=True):
        assert (x.grad - y).norm() < 0.05 * y.norm() + 1e-6
    before = [x.detach().clone() for x in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(x, y) for x, y in zip(model.parameters(), before))

    before = [x.detach().clone() for x in model.parameters()]
    optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        out = model(*inputs)
    (scaler.scale(out.float().square().mean()) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), before))


def stepped(model, inputs, optimizer=None, steps=1):
    """The parameters after steps of the optimizer, which may be None."""
    for _ in range(steps):
        model.zero_grad()
        model(*inputs).square().mean().backward()
        if optimizer:
            optimizer.step()
    return list(model.parameters())


@feature("fused optimizers", fast=6)
def test_fused_optimizers(case):
    # Adam divides by gradients near 0
    inputs = [x.double() if x.is_floating_point() else x for x in inputs_of(case)]
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        results = []
        for options in (dict(foreach=False), dict(foreach=True), dict(fused=True)):
            model = make(case).double()
            results.append(
                stepped(model, inputs, kind(model.parameters(), lr=0.01, **options), steps=2)
            )
        torch.testing.assert_close(results[1:], results[:1] * 2)


@feature("in-backward optimizers", fast=6)
def test_in_backward_optimizers(case):
    apply_in_backward = pytest.importorskip(
        "torchrec.optim.apply_optimizer_in_backward"
    ).apply_optimizer_in_backward
    model, inputs = make(case), inputs_of(case)
    twin, hooked = copy.deepcopy(model), copy.deepcopy(model)
    expected = stepped(twin, inputs, torch.optim.Adam(twin.parameters(), lr=0.01), steps=2)

    apply_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.01})
    torch.testing.assert_close(stepped(model, inputs, steps=2), expected)

    optimizers = {x: torch.optim.Adam([x], lr=0.01) for x in hooked.parameters()}
    for x in hooked.parameters():
        x.register_post_accumulate_grad_hook(lambda x: optimizers[x].step())
    torch.testing.assert_close(stepped(hooked, inputs, steps=2), expected)
