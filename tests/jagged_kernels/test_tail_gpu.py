"""Rows behind the last segment on a GPU, which alone knows the lengths: eager calls, graphs of
torch.compile, CUDA graphs."""

import pytest
import torch
from tails import LAYERS, ON_KERNELS, ON_TORCH, check, compiled, layer_case

import jagged_modules as jm
from jagged_modules import functional as F

pytestmark = pytest.mark.gpu
CASES = ON_KERNELS | ON_TORCH
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-3}
MODES = {"eager": lambda call: call, "compiled": compiled}


@pytest.mark.parametrize("repeats", [1, 7])  # short segments have kernels of their own
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_functions(poisoned_memory, name, mode, dtype, repeats):
    case = CASES[name]
    check(
        case,
        MODES[mode](case.call),
        dtype,
        "cuda",
        dim=64,
        repeats=repeats,
        tolerance=TOLERANCES[dtype],
    )


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize(
    "name", [name for name in ON_KERNELS if name.startswith(("attention", "target", "block"))]
)
def test_both_backends(poisoned_memory, name, implementation):
    if implementation == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    case = ON_KERNELS[name]
    check(
        case,
        case.call,
        torch.bfloat16,
        "cuda",
        dim=64,
        repeats=7,
        tolerance=2e-2,
        implementation=implementation,
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(poisoned_memory, name, mode, dtype):
    layer, case = layer_case(name, dim=64, device="cuda", dtype=dtype)
    options = dict(parameters=layer.parameters(), dim=64, repeats=7, tolerance=TOLERANCES[dtype])
    check(case, MODES[mode](case.call), dtype, "cuda", **options)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: jm.HSTUStack(128, 2, 2, jm.HSTUConfig(scaling_seqlen=100)),
        lambda: jm.JaggedGDPA(128, 2),
        lambda: jm.BlockDiagonalSelfAttention(128, 2, max_seqlen=400),
        lambda: jm.JaggedMLP([128, 64, 128]),
    ],
    ids=["HSTUStack", "JaggedGDPA", "BlockDiagonalSelfAttention", "JaggedMLP"],
)
def test_a_cuda_graph_with_a_static_buffer(offsets, layer):
    """Offsets change between replays: results and gradients of the real rows are those of eager
    calls without a tail."""
    layer = layer().cuda().bfloat16()
    x = torch.randn(400, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient, segments = torch.randn_like(x), offsets([100, 0, 150, 50], "cuda")
    wanted = [x, *layer.parameters()]

    def step(x, segments, gradient, wanted):
        (out, _) = layer((x, segments))
        return out.detach(), *torch.autograd.grad(out, wanted, gradient)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(x, segments, gradient, wanted)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, segments, gradient, wanted)
    for lengths in ([100, 0, 150, 50], [0, 300, 0, 100], [3, 1, 0, 9], [0, 0, 0, 0]):
        rows = sum(lengths)
        with torch.no_grad():
            segments.copy_(offsets(lengths, "cuda"))
            for tensor in (x, gradient):
                tensor.copy_(torch.randn_like(tensor))
                tensor[rows:] = float("nan")
        graph.replay()
        exact = x[:rows].detach().requires_grad_()
        expected = step(
            exact, offsets(lengths, "cuda"), gradient[:rows], [exact, *layer.parameters()]
        )
        for found, y, has_rows in zip(
            captured, expected, (True, True, *(False for _ in layer.parameters())), strict=True
        ):
            assert not has_rows or not found[rows:].any()
            found = found[:rows] if has_rows else found
            assert found.isfinite().all() and (
                not found.numel()
                or (found - y).abs().max() <= 2e-2 * max(y.abs().max().item(), 1e-3)
            )


@pytest.mark.parametrize("mode", MODES)
def test_candidates_of_no_user(offsets, mode):
    users = torch.tensor([-1, 2, 0, 4, 3, 0, 2**31 - 1, 2, 2, -(2**31)], device="cuda")
    real = (users >= 0) & (users < 4)
    layer = jm.JaggedTargetAttention(128, 2).cuda()
    targets, history = (
        torch.randn(10, 2, 128, device="cuda"),
        (torch.randn(90, 128, device="cuda"), offsets([30, 0, 50, 10], "cuda")),
    )
    found, expected = (
        MODES[mode](layer)(targets, history, users),
        layer(targets[real], history, users[real]),
    )
    torch.testing.assert_close(found[real], expected, rtol=1e-3, atol=1e-4)
    # as without a history
    torch.testing.assert_close(
        found[~real], layer.out_proj.bias.expand_as(found[~real]), rtol=1e-3, atol=1e-4
    )
    gradient = torch.randn_like(found)
    gradient[~real] = 0
    parameters = list(layer.parameters())
    for x, y in zip(
        torch.autograd.grad(found, parameters, gradient),
        torch.autograd.grad(expected, parameters, gradient[real]),
    ):
        assert (x - y).abs().max() <= 1e-3 * y.abs().max()


@pytest.mark.parametrize("implementation", ["auto", "triton", "reference"])
def test_compression_clamps_indices(implementation):
    users = torch.tensor([-1, 2, 0, 4, 3, 0, 2**31 - 1, 2, 2, -(2**31)], device="cuda")
    weights = [torch.randn(64, k, device="cuda", dtype=torch.bfloat16) for k in (40, 48)]
    embeddings = [
        torch.randn(n, k, 128, device="cuda", dtype=torch.bfloat16) for n, k in ((4, 40), (10, 48))
    ]
    found, expected = (
        F.linear_compress(weights, embeddings, x, implementation=implementation)
        for x in (users, users.clamp(0, 3))
    )
    assert torch.equal(found, expected)
    index = jm.CandidateIndex.from_map(users, 4)
    nearest = torch.where(users < 0, 3, users).clamp(max=3)
    assert torch.equal(
        F.linear_compress(weights, embeddings, index, implementation=implementation),
        F.linear_compress(weights, embeddings, nearest, implementation=implementation),
    )


def test_a_tail_costs_no_synchronisation(offsets, assert_no_synchronisation):
    layer = jm.HSTULayer(128, 2, jm.HSTUConfig(scaling_seqlen=100)).cuda()
    x, segments = (
        torch.randn(400, 128, device="cuda", requires_grad=True),
        offsets([100, 0, 150, 50], "cuda"),
    )
    assert_no_synchronisation(lambda: layer((x, segments))[0].sum().backward())
