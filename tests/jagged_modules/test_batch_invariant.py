"""Under jm.batch_invariant(True) a segment gives the same bits alone and in any batch: on the CPU,
forward and gradients."""

import pytest
import torch
from marks import slow_after
from torch.utils._python_dispatch import TorchDispatchMode

import jagged_modules as jm
from jagged_modules import functional as F

from ..batch_invariance import check, layers, names, operators
from .graph_cases import compiled

LENGTHS = [0, 1, 2, 3, 5, 8, 15, 16, 17, 33]
OWN = [1, 6, 17, 23]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", names(operators("cpu", torch.float32)))
def test_operators(name):
    check(operators("cpu", torch.float32)[name], LENGTHS, OWN, 60)


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
@pytest.mark.parametrize("name", operators("cpu", torch.float32))
def test_dtypes(name, dtype):
    check(operators("cpu", DTYPES[dtype])[name], LENGTHS, OWN, 12)


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "attention-hstu",
        "attention-silu",
        "jagged-bmm",
        "linear",
        "linear-compress",
        "softmax",
    ],
)
def test_threads_and_larger_sizes(name, threads):
    """Rows and segments that torch would divide among threads."""
    check(operators("cpu", torch.float32, dim=40, width=72)[name], [0, 5, 64, 130], [90], 4, most=3)


@pytest.mark.parametrize("name", layers("cpu", torch.float32))
def test_layers(name):
    check(layers("cpu", torch.float32)[name], LENGTHS, OWN, 40, most=4)


@pytest.mark.parametrize(
    "name",
    ["attention", "attention-candidates", "dense-bmm", "softmax", "linear", "linear-segments"],
)
def test_results_are_those_of_the_default_but_for_rounding(name):
    operator = operators("cpu", torch.float64)[name]
    segments = [operator.operands(length) for length in (3, 0, 17, 1)]
    offsets = {
        name: torch.tensor([0, *(x[name].shape[0] for x in segments)]).cumsum(0)
        for name in segments[0]
    }
    operands = {name: torch.cat([x[name] for x in segments]) for name in segments[0]}
    wanted = [operands[name].requires_grad_() for name in operator.gradients]
    default = operator.apply(operands, offsets)
    with jm.batch_invariant(True):
        fixed = operator.apply(operands, offsets)
    torch.testing.assert_close(fixed, default)
    grads = (
        torch.autograd.grad(out, wanted, torch.cos(default.detach())) for out in (fixed, default)
    )
    for found, expected in zip(*grads):
        torch.testing.assert_close(found, expected)


def test_gradients_of_weights_and_of_second_order():
    x = torch.randn(5, 4).double()
    weight = torch.randn(3, 4).double()
    bias = torch.randn(3).double()
    e = torch.randn(5, 4, 2).double()
    with jm.batch_invariant(True):
        inputs = [z.requires_grad_() for z in (x, weight, bias, e)]
        assert torch.autograd.gradcheck(
            lambda x, w, b, _: F.jagged_linear(x, w, b, activation="gelu"), inputs
        )
        assert torch.autograd.gradgradcheck(lambda x, w, b, _: F.jagged_linear(x, w, b), inputs)
        assert torch.autograd.gradcheck(lambda x, w, b, e: F.linear_compress(w, e), inputs)
        with pytest.raises(RuntimeError, match="not differentiable twice"):
            (grad,) = torch.autograd.grad(
                F.jagged_linear(x, weight, bias, activation="gelu").sum(), x, create_graph=True
            )
            torch.autograd.grad(grad.sum(), x)


class _Gemms(TorchDispatchMode):
    """Records in `names` the operators that multiply matrices."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in function.__name__ or "matmul" in function.__name__:
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_compression_multiplies_no_batch_of_matrices():
    """The bits of torch.bmm depend on the batch with some processors only, so this test looks at
    the operators."""
    weights = [torch.randn(5, k) for k in (3, 4)]
    embeddings = [torch.randn(b, k, 8).requires_grad_() for b, k in ((2, 3), (6, 4))]
    with _Gemms() as gemms:
        with jm.batch_invariant(True):
            out = F.linear_compress(weights, embeddings, torch.arange(6) % 2)
        torch.autograd.grad(out.sum(), embeddings)
    assert gemms.names == ["jagged_modules::batched_matmul_cpu"] * 4


@pytest.mark.parametrize("name", ["interformer", "kunlun"])
def test_layers_of_features_multiply_no_batch_of_matrices(name):
    operator = layers("cpu", torch.float32)[name]
    with _Gemms() as gemms:
        operator.run([operator.operands(length) for length in (3, 5)])
    assert gemms.names and all(name.startswith("jagged_modules::") for name in gemms.names)


def test_sums_of_half_precision_under_scales():
    """Where scales are factored out, sums that are larger than fp16 holds are scaled before they
    are rounded to it."""
    rows = 2000
    k = torch.full((rows, 1, 8), 10.0, dtype=torch.float16)
    q, offsets = torch.ones(3, 1, 8, dtype=torch.float16), torch.tensor([0, 1, 3])
    flags = dict(activation="relu", output_scale=torch.tensor([1e-3, 1e-4], dtype=torch.float16))
    default = F.jagged_attention(q, k, k, offsets, "shared", **flags)
    with jm.batch_invariant(True):
        fixed = F.jagged_attention(q, k, k, offsets, "shared", **flags)
    assert default.isfinite().all()
    torch.testing.assert_close(fixed, default)


def test_modules_are_called_so_that_hooks_and_replacements_work():
    mlp, calls = jm.JaggedMLP([8, 8], "silu"), []
    x = torch.randn(3, 8), torch.tensor([0, 3])
    attention = jm.JaggedTargetAttention(8, 2)
    attention.q_proj.register_forward_hook(lambda module, args, out: calls.append(out.shape))
    attention.out_proj = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU())
    with jm.batch_invariant(True):
        attention(x, x)
        mlp(x)
    assert calls == [(3, 8)]


def test_no_part_of_the_mode_stays_behind():
    layer, x = jm.JaggedMLP([8, 8], "silu"), (torch.randn(3, 8), torch.tensor([0, 3]))
    before = layer(x)[0]
    with pytest.raises(ValueError), jm.batch_invariant(True):
        layer((torch.randn(3, 9), x[1]))
    assert torch.equal(layer(x)[0], before)


def test_schedules_of_the_mode_are_their_own():
    jagged = jm.Jagged(torch.randn(40, 8), torch.tensor([0, 10, 40]))
    sizes = dict(num_heads=2, head_dim=64, dtype=torch.float16)
    with jm.batch_invariant(True):
        fixed = jagged.prepare(**sizes).to("meta").schedule(**sizes)
    default = jagged.prepare(**sizes).to("meta").schedule(**sizes)
    # short segments take the smaller tile by default
    assert (fixed.block_m, default.block_m) == (128, 64)


@slow_after(
    1, "name", ["linear", "linear-segments", "linear-compress", "attention", "attention-hstu"]
)
def test_under_torch_compile(name):
    operator = operators("cpu", torch.float32)[name]
    graph, _ = compiled(operator.apply)
    check(
        operator.__class__(operator.operands, graph, operator.result, operator.gradients),
        [2, 3, 9, 17],
        [5],
        6,
    )


@slow_after(1, "name", ["gdpa", "mlp", "hstu"])
def test_layers_under_torch_compile(name):
    operator = layers("cpu", torch.float32)[name]
    graph, _ = compiled(operator.apply)
    check(
        operator.__class__(operator.operands, graph, operator.result, operator.gradients),
        [2, 3, 9, 17],
        [5],
        4,
    )
