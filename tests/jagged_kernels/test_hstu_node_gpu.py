"""HSTULayer as one autograd node on a GPU."""

import accuracy
import pytest
import torch
from torch import nn

import jagged_modules as jm
from jagged_modules.functional.attention import (
    attention_arguments,
    attention_backward,
    attention_forward,
    computed,
    packed_gradients,
)
from jagged_modules.functional.attention_call import AttentionOptions, parsed_call
from jagged_modules.functional.target_attention import joined_segments
from jagged_modules.layers import hstu, hstu_node
from jagged_modules.layers.hstu_config import RECOMPUTED

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
LENGTHS = [33, 0, 130, 1, 20]
TARGETS = [3, 0, 20, 1, 4]
SIZES = [(64, 1), (96, 3), (256, 2)]
FORMS = {  # dtype of rows and parameters, autocast
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}


def make(size, dtype, **fields):
    width, heads = size
    layer = jm.HSTULayer(width, heads, jm.HSTUConfig(scaling_seqlen=50, **fields))
    for name, parameter in layer.named_parameters():
        scale = width**-0.5 if parameter.dim() == 2 else 0.3
        nn.init.normal_(parameter, std=scale)
        if name.endswith("norm.weight"):
            nn.init.normal_(parameter, 1.0, 0.3)
    return layer.to("cuda", dtype), torch.randn(sum(LENGTHS), width).to("cuda", dtype)


def call(layer, x, offsets, autocast=None):
    with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
        return layer((x, offsets), torch.tensor(TARGETS, device=x.device))[0]


def results(layer, x, offsets, autocast=None):
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    out = call(layer, x, offsets, autocast)
    names, parameters = zip(*layer.named_parameters())
    grads = torch.autograd.grad(out, [x, *parameters], gradient(out))
    return dict(zip(("out", "x", *names), (out.detach(), *grads), strict=True))


@pytest.fixture
def bounds_of(monkeypatch):
    """Bounds of the layer's results, of its definition on the CPU. factors: of dropout."""

    def by_definition(q, k, v, queries, keys, options):
        options = options._replace(implementation="reference")
        return computed(parsed_call(q, k, v, queries, keys, options))

    def bounds(layer, x, offsets, factors, operand):
        width, config = layer.embedding_dim, jm.HSTUConfig(**vars(layer.config))
        copy = jm.HSTULayer(width, layer.num_heads, config).double()
        if factors is not None:
            monkeypatch.setattr(copy.dropout, "forward", lambda y: y * factors)
        names, parameters = zip(*layer.named_parameters())

        def function(x, *parameters):
            state = dict(zip(names, parameters, strict=True))
            given = (x, offsets.cpu()), torch.tensor(TARGETS)
            return torch.func.functional_call(copy, state, given)[0]

        tensors = {"x": x.cpu()} | {name: y.cpu() for name, y in zip(names, parameters)}
        with monkeypatch.context() as patched:
            patched.setattr(hstu, "attend", by_definition)
            return accuracy.definition(function, tensors, gradient(x).cpu().to(operand), samples=48)

    return bounds


def gradient(out):
    """That of the result, which is exact in bf16."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(out)


def kept(layer, rows):
    """Dropout's factors for the seed that `results` gives the layer."""
    from jagged_kernels.rows import op

    p, width = layer.dropout.p, layer.output_norm.weight.shape[0]
    if not p:
        return None
    torch.manual_seed(3)
    seed = hstu_node.dropout_seed(layer, torch.empty(0, device="cuda"))
    ones = torch.ones(rows, width, device="cuda")
    groups = getattr(layer.output_norm, "groups", 1)
    out = op.triton_gate(ones, ones, 0 * ones[0], ones[0], seed, p, 1e-6, groups)[0]
    return (out != 0).cpu().double() / (1 - p)


@pytest.mark.parametrize(
    "norm, dropout, recompute",
    [
        ("layer", 0.2, ("norm", "activation")),
        ("layer", 0.0, ()),
        ("rms", 0.2, ("projection",)),
        ("group", 0.2, RECOMPUTED),
    ],
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_is_within_the_bounds_of_its_definition(
    bounds_of, offsets, size, form, norm, dropout, recompute
):
    dtype, autocast = FORMS[form]
    ends = offsets(LENGTHS, "cuda")
    layer, x = make(size, dtype, norm=norm, dropout=dropout, recompute=recompute)
    assert hstu_node.takes_kernels(layer, x)
    found = results(layer, x, ends, autocast)
    assert all(y.dtype == dtype for y in found.values())
    found = {name if name == "out" else f"d{name}": y.cpu() for name, y in found.items()}
    bounds = bounds_of(layer, x, ends, kept(layer, len(x)), autocast or dtype)
    accuracy.assert_accurate(found, bounds)


@pytest.mark.parametrize(
    "lengths", [[5, 0, 12] * 40, [300, 64, 129, 1], [2000, 1500, 0, 700]], ids=["5", "300", "2000"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [128, 64, 40])
def test_gradients_of_attention_in_columns_of_one_tensor(offsets, dim, dtype, lengths):
    """Have the bits of those in tensors of their own, whichever kernels compute them."""
    from jagged_kernels.attention import op

    rows, like = sum(lengths), torch.empty((), dtype=dtype, device="cuda")
    segments = jm.Jagged(like.expand(rows, 1), offsets(lengths, "cuda")).parsed("x")
    options = AttentionOptions("silu", None, 0.01, jm.AttentionMask(causal=True))
    arguments = attention_arguments(like, (rows, 2, dim), (rows, 2, dim), segments, options)
    packed = torch.randn(rows, 8 * dim, device="cuda").to(dtype)
    _, v, q, k = packed.unflatten(1, (4, 2, dim)).unbind(1)
    do = torch.randn(rows, 2, dim, device="cuda").to(dtype)
    given = do, [None, like.new_empty((2, 0), dtype=torch.float32)]
    out, columns = torch.full_like(packed, torch.nan), [4 * dim, 6 * dim, 2 * dim]
    op.triton_attention_packed_backward(*given, out, None, columns, q, k, v, *arguments[3:])
    expected = op.triton_attention_backward(*given, q, k, v, *arguments[3:])
    for first, x in zip(columns, expected):
        assert torch.equal(out[:, first : first + 2 * dim], x.flatten(1))
    assert out[:, : 2 * dim].isnan().all()


@pytest.mark.parametrize("lengths", [[5, 0, 12] * 40, [300, 64, 129, 1], [2000, 1500, 0, 700]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [128, 64, 40])
def test_gradients_of_two_lists_of_queries_in_columns_of_one_tensor(offsets, dim, dtype, lengths):
    """The same of the rows of histories and of candidates, where only the device knows their
    ends."""
    history, tail = sum(lengths), 50
    targets = [7] * len(lengths)
    rows = history + tail, sum(targets) + tail
    qkv = torch.randn(sum(rows), 3, 2, dim, device="cuda").to(dtype)
    q, (k, v) = qkv[:, 0], (x[: rows[0]] for x in qkv[:, 1:].unbind(1))
    like = torch.empty((), device="cuda")
    users, candidates = (
        jm.Jagged(like.expand(count, 1), offsets(x, "cuda")).parsed("x")
        for count, x in zip(rows, (lengths, targets))
    )
    queries, keys, _ = joined_segments(users, candidates, rows, {})
    call = parsed_call(q, k, v, queries, keys, AttentionOptions()).call
    out, lse, arguments = attention_forward(call, True)
    do = torch.randn_like(out)
    dqkv, _ = packed_gradients(do, [out, lse], True, *arguments)
    expected = attention_backward(do, [out, lse], *arguments)
    for i, x in enumerate(expected[:3]):
        assert torch.equal(dqkv[: len(x), 2 * dim * i : 2 * dim * (i + 1)], x.flatten(1))
    assert not dqkv[history : rows[0]].any() and not dqkv[-tail:, : 2 * dim].any()


def test_kept_and_computed_again_have_the_same_bits(offsets):
    found = []
    for recompute in ((), ("norm", "activation"), RECOMPUTED):
        torch.manual_seed(0)
        layer, x = make((512, 4), torch.float32, dropout=0.1, recompute=recompute)
        found.append(results(layer, x, offsets(LENGTHS, "cuda"), torch.bfloat16))
    first = found[0]
    for others in found[1:]:
        for name in first:
            assert torch.equal(first[name], others[name]), name


def test_hooks_are_called_and_get_what_the_modules_give(offsets):
    layer, x = make((96, 3), torch.float32)
    ends = offsets(LENGTHS, "cuda")
    node, seen = results(layer, x, ends), []
    for module in (layer.input_norm, layer.uvqk_proj, layer.output_norm, layer.out_proj):
        handle = module.register_forward_hook(lambda module, *_: seen.append(module))
        assert not hstu_node.takes_kernels(layer, x)
        modules = results(layer, x, ends)
        assert seen.pop() is module and not seen
        handle.remove()
        for name, y in modules.items():
            torch.testing.assert_close(node[name], y, rtol=1e-3, atol=1e-3, msg=name)
    layer.register_forward_hook(lambda *_: None)
    assert hstu_node.takes_kernels(layer, x)


@pytest.mark.parametrize("frozen", ["out_proj", "uvqk_proj", "output_norm", "input_norm"], ids=str)
def test_frozen_parameters(offsets, frozen):
    layer, x = make((64, 1), torch.float32)
    ends = offsets(LENGTHS, "cuda")
    whole = results(layer, x, ends, torch.bfloat16)
    getattr(layer, frozen).requires_grad_(False)
    out = call(layer, x, ends, torch.bfloat16)  # x has no gradient either
    out.backward(gradient(out))
    for name, parameter in layer.named_parameters():
        if name.startswith(frozen):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, whole[name]), name


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_compiled(offsets, norm):
    layer, x = make((512, 4), torch.float32, norm=norm)
    ends = offsets(LENGTHS, "cuda")
    eager = results(layer, x, ends, torch.bfloat16)
    x = x.requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    out = call(compiled, x, ends, torch.bfloat16)
    grads = torch.autograd.grad(out, [x, *layer.parameters()], gradient(out))
    for (name, expected), y in zip(eager.items(), (out, *grads), strict=True):
        error = (y - expected).norm() / expected.norm()
        assert error < 2 * torch.finfo(torch.bfloat16).eps, (name, float(error))


def test_a_graph_drops_other_elements_in_each_replay(offsets):
    layer, x = make((64, 1), torch.float32, dropout=0.5)
    ends = offsets(LENGTHS, "cuda")
    x = jm.Jagged(x, ends, max_seqlen=130)
    with torch.no_grad():
        for _ in range(2):
            layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x).values
        replays = []
        for _ in range(2):
            graph.replay()
            replays.append(out.clone())
    assert not torch.equal(*replays)


def test_cached_and_scored_rows_take_the_kernels(offsets, monkeypatch):
    layer, x = make((96, 3), torch.float32, norm="group")

    def run():
        layer.zero_grad()
        history, targets = x[:40].clone().requires_grad_(), x[40:50].clone().requires_grad_()
        ends, target_ends = offsets([30, 10], "cuda"), offsets([4, 6], "cuda")
        updated, kv = layer.cache((history, ends))
        scored = layer.score((targets, target_ends), jm.Jagged(kv, ends))
        (updated[0].sin().sum() + scored[0].cos().sum()).backward()
        grads = [history.grad, targets.grad, *(p.grad for p in layer.parameters())]
        return [updated[0], scored[0], *grads]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kernels = run()
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert {"row_norm_fwd_kernel", "gate_fwd_kernel", "gate_bwd_kernel"} <= names
    for module in (hstu, hstu_node):
        monkeypatch.setattr(module, "takes_kernels", lambda layer, x: False)
    for own, expected in zip(kernels, run(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)


def test_memory_of_a_step(offsets):
    """Rows of 512 columns: at the end of the forward the projection, attention's output and the
    normed rows with their columns of `gemm_rows` are kept, 6 KiB a row, and nothing else of the
    size of rows."""
    layer, _ = make((512, 4), torch.float32, dropout=0.1)
    lengths = [500] * 64
    x = torch.randn(sum(lengths), 512, device="cuda", requires_grad=True)
    jagged = jm.Jagged(x, offsets(lengths), max_seqlen=500)
    call_layer = torch.autocast("cuda", dtype=torch.bfloat16)(lambda: layer(jagged).values)
    call_layer().sum().backward()
    x.grad = None
    layer.zero_grad()
    before = torch.cuda.memory_allocated()
    out = call_layer()
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    assert kept < 1.05 * (6 * 512 + 32) * 2 * len(x) + 8 * 2**20


def test_memory_of_a_forward_without_gradients(offsets):
    """At most the projection, attention's output and the gate's exist at a time: 8 KiB a row."""
    layer, _ = make((512, 4), torch.float32)
    lengths = [500] * 64
    x = torch.randn(sum(lengths), 512, device="cuda")
    jagged = jm.Jagged(x, offsets(lengths), max_seqlen=500)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        layer(jagged)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(jagged)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.05 * 8 * 512 * 2 * len(x) + 8 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stack_without_gradients_adds_in_place(offsets, dtype):
    """The bits of the layers one after another, as near to those with gradients as a rounding."""
    stack = jm.HSTUStack(96, 3, 3, jm.HSTUConfig(scaling_seqlen=50)).to("cuda", dtype)
    x, ends = torch.randn(sum(LENGTHS), 96).to("cuda", dtype), offsets(LENGTHS, "cuda")
    before, expected = x.clone(), x
    with torch.no_grad():
        for layer in stack.layers:
            expected = call(layer, expected, ends)
        out = call(stack, x, ends)
    assert torch.equal(out, expected) and torch.equal(x, before)
    trained = call(stack, x, ends)
    assert trained.requires_grad
    error = (out - trained).norm() / trained.norm()
    assert error < 2 * torch.finfo(torch.bfloat16).eps
