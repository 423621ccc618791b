"""Very many query rows of a segment on a GPU: dk and dv are sums over chunks of them."""

import pytest
import torch

import jagged_modules as jm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("lengths", ["some", "one"])
@pytest.mark.parametrize(
    "kernels, dtype, dims",
    [
        ("triton", torch.float32, (24, 40)),
        ("triton", torch.float16, (64, 64)),
        ("hopper", torch.bfloat16, (64, 64)),
        ("hopper", torch.bfloat16, (128, 128)),
    ],
    ids=str,
)
def test_gradients(check_split_queries, kernels, dtype, dims, lengths, activation):
    if kernels == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    options = dict(kernels=kernels, dims=dims, activation=activation)
    check_split_queries(lengths, dtype, "cuda", **options)


def test_a_layer_with_one_user():
    """Gradients that go into columns of a packed projection, and rows behind the last segment."""
    layer = jm.JaggedTargetAttention(128, 2, device="cuda", dtype=torch.float64)
    targets = torch.randn(20_000, 1, 128, device="cuda", dtype=torch.float64)
    history = torch.randn(150, 128, device="cuda", dtype=torch.float64)
    offsets, users = torch.tensor([0, 130], device="cuda"), torch.zeros(20_000, device="cuda")
    do = torch.randn_like(targets)

    def gradients(dtype):
        leaves = [x.to(dtype).detach().requires_grad_() for x in (targets, history)]
        out = layer.to(dtype)(leaves[0], jm.Jagged(leaves[1], offsets), users.long())
        return torch.autograd.grad(out, [*leaves, *layer.parameters()], do.to(dtype))

    for x, expected in zip(gradients(torch.bfloat16), gradients(torch.float64)):
        assert (x - expected).norm() <= 2e-2 * expected.norm()
