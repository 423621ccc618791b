"""Layers as one autograd node on a GPU: against float64, beside the chain of modules, compiled, in
CUDA graphs."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from tails import gemm_shapes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import jagged_modules as jm
from jagged_modules.functional.linear import relu_linear
from jagged_modules.layers import (
    block_attention_node,
    encoder_node,
    gdpa_node,
    mlp_node,
    one_node,
    self_target_node,
    target_node,
)

pytestmark = pytest.mark.gpu
LENGTHS, CONTEXTS = [70, 0, 1, 300, 129, 64], [40, 5, 200, 0, 64, 33]
# Roundings of one element, of operands and of results, on the way from an input to a gradient:
# x, norm, q, k, scores, P, h, y, dy, dh, dP, dS, dq, dn, those of two weights, and of q and dq
# once more with norms. Of an encoder also: two sums, their norm, z, h, y, the gradients of all of
# these, and two weights.
ROUNDINGS, ROUNDINGS_OF_ENCODERS = 18, 32
WORKSPACE = 48 * 2**20  # bytes, of a GEMM
CAUSAL = jm.AttentionMask(causal=True)
LAYERS = {
    "gdpa": lambda width, heads: jm.JaggedGDPA(width, heads),
    "block": lambda width, heads: jm.GDPABlock(width, heads),
    "softmax": lambda width, heads: jm.GDPABlock(width, heads, "softmax", CAUSAL),
    "context": lambda width, heads: jm.GDPABlock(width, heads, "silu"),
    "weights": lambda width, heads: jm.GDPABlock(
        width, heads, config=jm.GDPAConfig(num_weights=50)
    ),
    "blocks": lambda width, heads: jm.BlockDiagonalSelfAttention(width, heads),
    "targets": lambda width, heads: jm.JaggedTargetAttention(width, heads),
    "qk-norm": lambda width, heads: jm.JaggedGDPA(width, heads, config=jm.GDPAConfig(qk_norm=True)),
    "seeds": lambda width, heads: jm.JaggedGDPA(
        width, heads, "softmax", config=jm.GDPAConfig(num_seeds=SEEDS, qk_norm=True)
    ),
    "mlp": lambda width, heads: jm.JaggedMLP([width, 2 * width, width], "gelu"),
    "swiglu": lambda width, heads: jm.JaggedMLP([width, 2 * width, width], "swiglu"),
    "self-targets": lambda width, heads: jm.JaggedSelfTargetAttention(width, heads),
    "encoder-first": lambda width, heads: jm.JaggedEncoderLayer(
        width, heads, 2 * width, norm_first=True, norm="rms", activation="swiglu"
    ),
    "encoder-behind": lambda width, heads: jm.JaggedEncoderLayer(
        width, heads, 2 * width, activation="gelu", mask=CAUSAL
    ),
    "encoder-queries": lambda width, heads: jm.JaggedEncoderLayer(
        width, heads, 2 * width, norm_first="queries", activation="silu", mask=CAUSAL
    ),
}
# Their gradients have steps, where an error of z counts in full: not beside float64 in 16 bits.
WITH_STEPS = {
    "relu": lambda width, heads: jm.JaggedMLP([width, 2 * width, width]),
    "encoder-relu": lambda width, heads: jm.JaggedEncoderLayer(width, heads, 2 * width),
}
ENCODERS = [name for name in LAYERS if name.startswith("encoder")]
SEEDS = 32
# widths, heads; every second of them has small head dims and large ones
SIZES = [(64, 1), (96, 1), (512, 4), (64, 4), (96, 4), (256, 2), (128, 8), (1024, 8)]


@pytest.fixture
def nodes(monkeypatch):
    """The calls of nodes."""
    calls = []
    for module in (
        gdpa_node,
        block_attention_node,
        target_node,
        self_target_node,
        mlp_node,
        encoder_node,
    ):

        def forward(ctx, *inputs, original=module._Node.forward):
            calls.append(original)
            return original(ctx, *inputs)

        monkeypatch.setattr(module._Node, "forward", staticmethod(forward))
    return calls


@contextlib.contextmanager
def in_modules():
    """Layers call their modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_node, "may_be_one_node", lambda *_, **__: False)
        yield


class Case:
    """A layer, in float64 on the CPU and on the GPU, and its inputs."""

    def __init__(self, name, width=64, heads=2, dtype=torch.float32, lengths=LENGTHS):
        torch.manual_seed(0)
        self.layer = (LAYERS | WITH_STEPS)[name](width, heads).to(dtype)
        self.exact = copy.deepcopy(self.layer).double()
        self.layer.cuda()
        rows, has_targets = [sum(lengths)], name == "self-targets"
        rows += [sum(CONTEXTS)] if name in ("context", "targets") or has_targets else []
        self.inputs = [torch.randn(n, width).to(dtype) for n in rows]
        self.others = rows[1] if has_targets else 0  # rows of the result besides those of x
        results = len(lengths) * SEEDS if name == "seeds" else rows[0] + self.others
        self.do = torch.randn(results, width).to(dtype)
        self.offsets = torch.tensor([0, *lengths]).cumsum(0)
        self.context_offsets = torch.tensor([0, *CONTEXTS]).cumsum(0)

    @staticmethod
    def forward(layer, offsets, context_offsets, x, context=None):
        pairs = () if context is None else ((context, context_offsets),)
        out = layer((x, offsets), *pairs)
        if isinstance(layer, jm.JaggedSelfTargetAttention):
            return torch.cat([values for values, _ in out])
        return out.flatten(0, 1) if isinstance(out, torch.Tensor) else out[0]

    def run(self, layer, *inputs):
        offsets = (x.to(inputs[0].device) for x in (self.offsets, self.context_offsets))
        return self.forward(layer, *offsets, *inputs)

    def results(self, layer, run=None, **autocast):
        """The result, and the gradients of inputs and parameters."""
        first = next(layer.parameters())
        inputs = [x.to(first).requires_grad_() for x in self.inputs]
        with torch.autocast("cuda", torch.bfloat16, **autocast):
            out = (run or self.run)(layer, *inputs)
        wanted = [*inputs, *layer.parameters()]
        return [out.detach(), *torch.autograd.grad(out, wanted, self.do.to(out))]


def assert_rounded(actual, expected, dtype, rows, name=""):
    """The errors' root mean square is at most that of ROUNDINGS independent errors in the worst
    direction, relative to that of the values. fp32: of sums of so many terms, added in any
    order."""
    roundings = ROUNDINGS_OF_ENCODERS if name.startswith("encoder") else ROUNDINGS
    error = roundings * torch.finfo(dtype).eps / 2
    if dtype == torch.float32:
        error *= rows**0.5
    for x, y in zip(actual, expected, strict=True):
        x, y = x.double().cpu(), y.double().cpu()
        assert x.shape == y.shape and x.isfinite().all()
        assert (x - y).square().mean().sqrt() <= error * y.square().mean().sqrt() + 1e-30


@pytest.mark.parametrize(
    "name, precision, width, heads",
    [
        (name, precision, *SIZES[(i + 2 * j) % len(SIZES)])
        for i, name in enumerate(LAYERS)
        for j, precision in enumerate(["autocast", "bf16", "fp16", "fp32"])
    ],
)
def test_results_and_gradients(nodes, name, precision, width, heads):
    """Each layer in each precision, and each precision at each size."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    case = Case(name, width, heads, dtype)
    actual = case.results(case.layer, enabled=precision == "autocast")
    assert len(nodes) == 1
    operands = torch.bfloat16 if precision == "autocast" else dtype
    without = "gdpa", "qk-norm", "seeds", "blocks", "targets", "self-targets", "mlp", "swiglu"
    has_residual = name not in without
    assert actual[0].dtype == (dtype if has_residual else operands)
    assert all(x.dtype == dtype for x in actual[1:])
    assert_rounded(actual, case.results(case.exact, enabled=False), operands, sum(LENGTHS), name)


@pytest.mark.parametrize("name", LAYERS)
def test_it_takes_no_more_memory_and_launches_than_the_modules(name):
    """Peak memory of a step, but for the workspaces of GEMMs with results in fp32, and kernels and
    copies of it."""
    case = Case(name, 512, 4, lengths=[2000, 1000, 0, 3000, 1, 2999])

    def measured():
        case.results(case.layer)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        case.results(case.layer)
        peak = torch.cuda.max_memory_allocated()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            case.results(case.layer)
            torch.cuda.synchronize()
        return peak, sum(event.count for event in profile.key_averages())

    peak, launches = measured()
    with in_modules():
        peak_of_modules, launches_of_modules = measured()
    assert peak <= peak_of_modules + WORKSPACE
    assert launches <= launches_of_modules


@pytest.mark.parametrize("name", ["targets", "gdpa"])
def test_batches_of_similar_sizes_have_gemms_of_the_same_shapes(name):
    found = []
    for last in (64, 65):
        case = Case(name, lengths=[*LENGTHS[:-1], last])
        case.results(case.layer)  # the first call compiles
        found.append(gemm_shapes(lambda case=case: case.results(case.layer)))
    assert found[0] and found[0] == found[1]


@pytest.mark.parametrize("name", LAYERS)
def test_without_gradients_a_forward_has_the_same_bits_in_less_memory(name):
    case, peaks, results = Case(name, 512, 4, lengths=[2000, 0, 1, 2999]), [], []
    case.context_offsets = torch.tensor([0, 40, 45, 245, sum(CONTEXTS)])
    inputs = [x.cuda() for x in case.inputs]
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), torch.autocast("cuda", torch.bfloat16):
            case.run(case.layer, *inputs)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results.append(case.run(case.layer, *inputs).detach())
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert torch.equal(*results) and peaks[1] < peaks[0]


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "gdpa"])
def test_compiled(name):
    """One graph for all lengths, with the results of the node."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case = Case(name)
    compiled = torch.compile(Case.forward, fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, [3, 90, 20, 0, 7, 200]):
        offsets, rows = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
        case.offsets, case.inputs[0] = offsets, torch.randn(rows, 64)
        case.do = torch.randn(len(lengths) * SEEDS if name == "seeds" else rows + case.others, 64)

        def run(layer, *inputs):
            return compiled(layer, case.offsets.cuda(), case.context_offsets.cuda(), *inputs)

        expected = case.results(case.exact, enabled=False)
        assert_rounded(case.results(case.layer, run), expected, torch.bfloat16, rows, name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "name", ["block", "context", "blocks", "targets", "self-targets", "swiglu", "encoder-behind"]
)
def test_in_a_cuda_graph(name):
    case = Case(name)
    inputs = [x.cuda() for x in case.inputs]
    case.offsets, case.context_offsets = case.offsets.cuda(), case.context_offsets.cuda()
    case.do = case.do.cuda()

    def step():
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.autocast("cuda", torch.bfloat16):
            out = case.run(case.layer, *leaves)
        return [
            out,
            *torch.autograd.grad(out, [*leaves, *case.layer.parameters()], case.do.to(out)),
        ]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in inputs:
        x.normal_()
    graph.replay()
    assert_rounded(captured, step(), torch.bfloat16, sum(LENGTHS), name)


@pytest.mark.parametrize(
    "name",
    ["gdpa", "block", "blocks", "qk-norm", "swiglu", "encoder-first", "encoder-behind"]
    + ["encoder-queries"],
)
def test_no_synchronisation_and_rows_behind_the_end(name):
    """A NaN behind the last segment reaches nothing."""
    case = Case(name)
    x = torch.cat([case.inputs[0], torch.full((50, 64), float("nan"))])
    case.inputs, case.offsets = [x], case.offsets.cuda()
    case.context_offsets = case.context_offsets.cuda()
    case.do = torch.cat([case.do, torch.full((50, 64), float("nan"))]).cuda()
    out, dx, *others = case.results(case.layer)
    assert not out[-50:].any() and not dx[-50:].any()
    assert all(x.isfinite().all() for x in (out, dx, *others))
    leaf = x.cuda().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = case.run(case.layer, leaf)
        out.backward(case.do)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "name", [x for x in LAYERS | WITH_STEPS if x not in ("self-targets", "seeds")]
)
def test_no_rows(name):
    case = Case(name, lengths=[0, 0, 0, 0, 0, 0])
    out, dx, *others = case.results(case.layer)
    assert out.shape == dx.shape == (0, 64)
    assert all(not x.any() for x in others)


@pytest.mark.parametrize("name", ["block", "blocks"])
def test_a_backward_inside_autocast(name):
    """It computes in the dtype of the forward."""
    case = Case(name)
    expected = case.results(case.layer, enabled=False)

    def run(layer, *inputs):
        with torch.autocast("cuda", enabled=False):
            return case.run(layer, *inputs)

    inputs = [x.cuda().requires_grad_() for x in case.inputs]
    with torch.autocast("cuda", torch.bfloat16):
        out = run(case.layer, *inputs)
        actual = [
            out,
            *torch.autograd.grad(out, [*inputs, *case.layer.parameters()], case.do.to(out)),
        ]
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.fixture
def mesh():
    """Of one GPU."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", LAYERS)
def test_fully_sharded(nodes, mesh, name):
    """FSDP2 gathers a layer's parameters before its node reads them: the same bits."""
    case = Case(name)
    out, *grads = case.results(case.layer)
    nodes.clear()
    layer = fully_shard(case.layer, mesh=mesh)
    leaves = [x.cuda().requires_grad_() for x in case.inputs]
    with torch.autocast("cuda", torch.bfloat16):
        sharded = case.run(layer, *leaves)
    sharded.backward(case.do.to(sharded))
    assert len(nodes) == 1 and torch.equal(sharded, out)
    found = [x.grad for x in leaves] + [x.grad.full_tensor() for x in layer.parameters()]
    assert all(torch.equal(x, y) for x, y in zip(found, grads, strict=True))


class LowRank(torch.nn.Module):
    """A frozen Linear beside a trained one of rank 4."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = torch.nn.Linear(linear.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("mlp", "swiglu")])
def test_a_low_rank_adapter(nodes, name):
    case = Case(name)
    for layer in (case.layer, case.exact):
        key = [key for key, x in layer.named_modules() if type(x) is torch.nn.Linear][0]
        adapter = LowRank(layer.get_submodule(key))
        layer.set_submodule(key, adapter.to(next(layer.parameters())))
    names = [key for key, x in case.layer.named_parameters() if x.requires_grad]
    with torch.no_grad():
        for x, y in zip(case.layer.parameters(), case.exact.parameters(), strict=True):
            y.copy_(x)

    def results(layer, enabled):
        inputs = [x.to(next(layer.parameters())).requires_grad_() for x in case.inputs]
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            out = case.run(layer, *inputs)
        wanted = [*inputs, *(layer.get_parameter(key) for key in names)]
        return [out.detach(), *torch.autograd.grad(out, wanted, case.do.to(out))]

    actual = results(case.layer, True)
    assert not nodes
    expected = results(case.exact, False)
    assert_rounded(actual, expected, torch.bfloat16, sum(LENGTHS), name)


@pytest.mark.parametrize("name", ["block", "blocks"])
def test_modules_with_hooks_are_called(nodes, name):
    case = Case(name)
    expected = case.results(case.layer, enabled=False)
    nodes.clear()
    calls = []
    for module in case.layer.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: calls.append(None))
    actual = case.results(case.layer, enabled=False)
    assert not nodes and len(calls) == (3 if name == "block" else 2)
    assert_rounded(actual, expected, torch.float32, sum(LENGTHS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ENCODERS)
def test_the_dtype_of_rows_in_16_bits_under_autocast(nodes, name, dtype):
    """Is that of the modules."""
    case = Case(name)
    x = case.inputs[0].cuda().to(dtype).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        out = case.run(case.layer, x)
        with in_modules():
            expected = case.run(case.layer, x)
    assert len(nodes) == 1 and out.dtype == expected.dtype
    (dx,) = torch.autograd.grad(out, x, case.do.to(out))
    assert dx.dtype == dtype and dx.isfinite().all()


@pytest.mark.parametrize("name", ENCODERS)
def test_what_is_frozen(nodes, name):
    """It gets no gradient, and the others the same as before."""
    case = Case(name)
    (whole, *grads), x = case.results(case.layer), case.inputs[0].cuda()
    named = dict(case.layer.named_parameters())
    for frozen in (list(named)[::2], list(named)[1::2], list(named)[:8], list(named)[8:]):
        for key, parameter in named.items():
            parameter.requires_grad_(key not in frozen)
        with torch.autocast("cuda", torch.bfloat16):
            out = case.run(case.layer, x)
        left = {key: grad for key, grad in zip(named, grads[1:]) if key not in frozen}
        found = torch.autograd.grad(out, [named[key] for key in left], case.do.to(out))
        assert torch.equal(out, whole)
        for grad, expected in zip(found, left.values(), strict=True):
            torch.testing.assert_close(grad, expected)
    assert len(nodes) == 5


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("enabled", [True, False])
def test_dropout_of_an_encoder(nodes, name, enabled):
    """The elements that a seed keeps are those of the modules."""
    case = Case(name)
    for module in case.layer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.25

    def run(layer, x):
        torch.manual_seed(3)
        return case.run(layer, x)

    out, dx, *_ = case.results(case.layer, run, enabled=enabled)
    assert len(nodes) == 1
    x, do = case.inputs[0].cuda().requires_grad_(), case.do.cuda()
    with in_modules(), torch.autocast("cuda", torch.bfloat16, enabled=enabled):
        of_modules = run(case.layer, x)
    (expected,) = torch.autograd.grad(of_modules, x, do.to(of_modules))
    operands = torch.bfloat16 if enabled else torch.float32
    assert_rounded([out, dx], [of_modules, expected], operands, sum(LENGTHS), name)


@pytest.mark.parametrize("probability", [0, 0.25])
@pytest.mark.parametrize("name", WITH_STEPS)
def test_relu(nodes, name, probability):
    """In fp32, beside the modules."""
    case = Case(name)
    for module in case.layer.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = probability

    def results():
        torch.manual_seed(3)
        return case.results(case.layer, enabled=False)

    actual = results()
    assert len(nodes) == 1
    with in_modules():
        assert_rounded(actual, results(), torch.float32, sum(LENGTHS), name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 5000])
def test_relu_in_a_gemm(rows, dtype):
    """Of rows of any stride: bits of the ReLU after a GEMM, or its rounding. A NaN stays in its
    row, and is no 0."""
    x, weight, bias = (torch.randn(n, 96, device="cuda", dtype=dtype) for n in (rows, 64, 1))
    x[rows // 2, 3] = float("nan")
    x, weight, bias = x[:, :72], weight[:, :72], bias[0, :64]
    found = relu_linear(x, weight, bias)
    assert found[rows // 2].isnan().all() and int(found.isnan().sum()) == 64
    exact = torch.relu(x.double() @ weight.double().t() + bias.double())
    size = x.double().abs() @ weight.double().abs().t() + bias.double().abs()  # of the sum's terms
    # one rounding, and those of 73 terms in fp32
    bound = torch.finfo(dtype).eps / 2 * exact + 73 * torch.finfo(torch.float32).eps * size
    others = torch.arange(rows, device="cuda") != rows // 2
    assert (found.double() - exact).abs()[others].le(1.01 * bound[others]).all()


@pytest.mark.parametrize("name", ["block", "blocks"])
def test_a_second_derivative_raises(name):
    case = Case(name)
    x = case.inputs[0].cuda().requires_grad_()
    (dx,) = torch.autograd.grad(case.run(case.layer, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        dx.sum().backward()


@pytest.mark.parametrize("rows_of_each", [1, 3])
def test_many_targets_in_another_order(rows_of_each):
    x = torch.randn(6000 * rows_of_each, 256, device="cuda", dtype=torch.bfloat16)
    assert x.numel() >= target_node.MANY
    order = torch.randperm(6000, device="cuda")
    expected = x.view(6000, -1)[order].view(x.shape)
    assert torch.equal(target_node.in_order(x, order), expected)
