import torch
from models import wukong

from jagged_modules import CandidateIndex


def test_the_first_layer_does_not_replicate_users(tensor_sizes):
    users, candidates, size, width = 3, 400, 500, 8
    layer = wukong.WukongLayer(16, width, num_candidate_embeddings=2, num_user_embeddings=size)
    inputs = (
        torch.randn(candidates, 2, width, requires_grad=True),
        torch.randn(users, size, width, requires_grad=True),
    )
    with tensor_sizes() as sizes:
        layer(
            *inputs, CandidateIndex.from_counts(torch.tensor([100, 0, 300]))
        ).square().sum().backward()
    assert max(sizes.made) < candidates * size * width / 10
    assert all(x.grad.any() for x in inputs)


def test_a_later_layer_is_the_formula():
    layer, x = wukong.WukongLayer(16, 8), torch.randn(5, 16, 8)
    (w_compress,), (y_transposed,) = layer.compress.weights, layer.project.weights
    interacted = layer.mlp(x @ x.mT @ y_transposed.T)
    torch.testing.assert_close(
        layer(x), layer.norm(torch.cat([interacted, w_compress @ x], dim=1) + x)
    )
