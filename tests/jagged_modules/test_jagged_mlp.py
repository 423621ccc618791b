"""JaggedMLP against a sequence of torch's own layers."""

import copy

import pytest
import torch

import jagged_modules as jm
from jagged_modules.activations import POINTWISE, swiglu

DIMS = [6, 8, 3]


@pytest.mark.parametrize("activation", [*POINTWISE, "swiglu"])
def test_linear_layers_each_with_an_activation(activation, offsets_of):
    mlp = jm.JaggedMLP(DIMS, activation).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    function = swiglu if activation == "swiglu" else POINTWISE[activation].function
    results = []
    for run in (
        lambda x: mlp((x, offsets_of([2, 3])))[0],
        lambda x: function(mlp.layers[1](function(mlp.layers[0](x)))),
    ):
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        results.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *mlp.parameters()])])
    torch.testing.assert_close(*results)


def test_equals_torchrecs_mlp(offsets_of):
    theirs = pytest.importorskip("torchrec.modules.mlp").MLP(DIMS[0], DIMS[1:], activation="relu")
    ours, x = jm.JaggedMLP(DIMS), torch.randn(5, 6)
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    torch.testing.assert_close(ours((x, offsets_of([2, 3])))[0], theirs(x))


def test_swiglu_has_two_outputs_for_each_column():
    mlp, x = jm.JaggedMLP([6, 8], "swiglu"), torch.randn(5, 6)
    a, b = (x @ mlp.layers[0].weight.t() + mlp.layers[0].bias).split(8, 1)
    torch.testing.assert_close(mlp((x, torch.tensor([0, 5])))[0], a / (1 + (-a).exp()) * b)


def test_containers(container, offsets_of):
    mlp, values, offsets = jm.JaggedMLP(DIMS), torch.randn(5, 6), offsets_of([2, 0, 3])
    x = container(values, offsets)
    out = mlp(x)
    assert type(out) is type(x)
    assert torch.equal(jm.Jagged.wrap(out).values, mlp((values, offsets))[0])
    assert torch.equal(jm.Jagged.wrap(out).offsets, offsets)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_no_rows(lengths, offsets_of):
    mlp, x = jm.JaggedMLP(DIMS), torch.zeros(0, 6, requires_grad=True)
    values, _ = mlp((x, offsets_of(lengths)))
    values.sum().backward()
    assert values.shape == (0, 3) and x.grad.shape == (0, 6)


def test_meta_parameters_are_materialised_by_reset_parameters():
    mlp = jm.JaggedMLP(DIMS, device="meta")
    assert all(x.is_meta for x in mlp.parameters())
    mlp.to_empty(device="cpu")
    for x in mlp.parameters():
        torch.nn.init.constant_(x, float("nan"))
    torch.manual_seed(5)
    mlp.reset_parameters()
    torch.manual_seed(5)
    assert all(
        torch.equal(*pair)
        for pair in zip(mlp.parameters(), jm.JaggedMLP(DIMS).parameters(), strict=True)
    )


def test_training_step_changes_every_parameter(offsets_of):
    mlp = jm.JaggedMLP(DIMS, "silu")
    before = copy.deepcopy(mlp.state_dict())
    mlp((torch.randn(5, 6), offsets_of([2, 3])))[0].square().sum().backward()
    torch.optim.SGD(mlp.parameters(), lr=0.1).step()
    assert [name for name, x in mlp.state_dict().items() if torch.equal(x, before[name])] == []


def test_extra_repr():
    assert "activation='silu'" in repr(jm.JaggedMLP(DIMS, "silu"))


BAD = [
    (dict(dims=6), TypeError, "dims must be a sequence of ints, got int"),
    (dict(dims=[6]), ValueError, r"dims must be two sizes or more, got \[6\]"),
    (dict(dims=[6, 0]), ValueError, r"dims\[1\] must be at least 1, got 0"),
    (dict(dims=[6, 2.0]), TypeError, r"dims\[1\] must be an int, got float"),
    (
        dict(dims=DIMS, activation="softmax"),
        ValueError,
        "activation must be one of .*, got 'softmax'",
    ),
    (
        dict(dims=DIMS, activation=["relu"]),
        ValueError,
        r"activation must be one of .*, got \['relu'\]",
    ),
]


@pytest.mark.parametrize(
    "arguments, error, message", BAD, ids=[message[:30] for _, _, message in BAD]
)
def test_bad_sizes(arguments, error, message):
    with pytest.raises(error, match=message):
        jm.JaggedMLP(**arguments)


def test_bad_input(offsets_of):
    mlp = jm.JaggedMLP(DIMS)
    with pytest.raises(ValueError, match=r"x's values must have shape \[L, 6\], got \[5, 7\]"):
        mlp((torch.ones(5, 7), offsets_of([2, 3])))
    with pytest.raises(
        ValueError, match="x's values must have the layer's dtype, torch.float32, got torch.float64"
    ):
        mlp((torch.ones(5, 6, dtype=torch.float64), offsets_of([2, 3])))
    with pytest.raises(TypeError, match="x must be a JaggedTensor, .* got Tensor"):
        mlp(torch.ones(5, 6))
