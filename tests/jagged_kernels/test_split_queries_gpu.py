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
    layer = jm.JaggedTargetAttention(128, 2)
    targets, do = torch.randn(2, 20_000, 1, 128).bfloat16()
    history, offsets = torch.randn(150, 128).bfloat16(), torch.tensor([0, 130])

    def gradients(device, dtype):
        layer.to(device, dtype)
        rows = history if device == "cuda" else history[:130]  # an error where the host knows it
        leaves = [x.to(device, dtype).requires_grad_() for x in (targets, rows)]
        users = torch.zeros(len(targets), dtype=torch.int64, device=device)
        out = layer(leaves[0], jm.Jagged(leaves[1], offsets.to(device)), users)
        return torch.autograd.grad(out, [*leaves, *layer.parameters()], do.to(device, dtype))

    dtargets, dhistory, *found = gradients("cuda", torch.bfloat16)
    assert not dhistory[130:].any()
    for x, expected in zip([dtargets, dhistory[:130], *found], gradients("cpu", torch.float64)):
        assert (x.cpu() - expected).norm() <= 2e-2 * expected.norm()
