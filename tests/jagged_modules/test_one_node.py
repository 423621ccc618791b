"""Layers as one autograd node: equal to the chain of modules in float64. Here the CPU path computes
the attention that kernels compute on a GPU."""

import copy
import sys

import pytest
import torch
from alive import Alive
from row_stages import cleared, normed
from tails import check, gemm_shapes, layer_case
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from jagged_kernels.block_attention import op as block_op

import jagged_modules as jm
from jagged_modules.activations import POINTWISE, swiglu
from jagged_modules.containers.padding import padded_to
from jagged_modules.functional import block_attention
from jagged_modules.functional.nodes import is_last_backward
from jagged_modules.layers import block_attention as block_layer
from jagged_modules.layers import (
    block_attention_node,
    encoder_node,
    gdpa_node,
    mlp_node,
    one_node,
    residual_node,
    self_target_node,
    target_node,
)
from jagged_modules.layers.norms import NormOptions
from jagged_modules.scalars import rounded_size

LENGTHS, CONTEXTS = [5, 0, 1, 19], [3, 2, 4, 0]
WIDTH = 24


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


# -- what kernels compute, by the CPU path ---------------------------------------------------------


def block_forward(qkv, offsets, tables, rotation, block_size, *_):
    rotary = None
    if tables[0] is not None:
        rotary = jm.Rotary(tables[0], tables[1], "qkv" if rotation[0] else "qk", linear=True)
    return block_attention.block_diagonal_attention_packed(
        qkv, offsets, block_size=block_size, rotary=rotary
    )


def block_gradient(do, qkv, *arguments):
    with torch.enable_grad():
        qkv = qkv.detach().requires_grad_()
        out = block_forward(qkv, *arguments)
    return torch.autograd.grad(out, qkv, do)[0]


def row_norm(x, weight, bias, dtype, norm, columns=0, end=None):
    eps, groups, rms = norm
    x, eps = cleared(x, end), torch.finfo(x.dtype).eps if eps is None else eps
    in_groups = x.unflatten(1, (groups, -1))
    mean = in_groups.mean(2)
    centred = in_groups if rms else in_groups - mean[..., None]
    rstd = torch.rsqrt(centred.square().mean(2) + eps)
    y = cleared(normed(x, weight, bias, eps, groups, rms), end).to(dtype)
    return y, mean, rstd


def row_norm_gradients(dy, x, weight, mean, rstd, residual, norm, end):
    """By the formula of `jagged_kernels/rows/op.py`."""
    dy, x, groups = cleared(dy, end), cleared(x, end), (rstd.shape[1], -1)
    xhat, g = (x.unflatten(1, groups) for x in (x, dy * weight))
    xhat = (xhat if norm.rms else xhat - mean[..., None]) * rstd[..., None]
    dx = g - xhat * (g * xhat).mean(2, keepdim=True)
    dx = (dx if norm.rms else dx - g.mean(2, keepdim=True)) * rstd[..., None]
    dx = dx.flatten(1) if residual is None else dx.flatten(1) + cleared(residual, end)
    return dx, ((dy * xhat.flatten(1)).sum(0), None if norm.rms else dy.sum(0))


def residual_norm(x, added, weight, bias, dtypes, norm, end, has_sum=True):
    total, (dtype, second) = cleared(x if added is None else x + added, end), dtypes
    y, mean, rstd = row_norm(total, weight, bias, dtype, norm, end=end)
    if added is not None and not has_sum:
        total = torch.full_like(total, torch.nan)
    return total, y, None if second is None else y.to(second), mean, rstd


def residual_norm_gradients(dy, added, x, weight, mean, rstd, residual, dtype, norm, end, dropout):
    dy = dy if added is None else dy + added
    dx, of_weights = row_norm_gradients(dy, x, weight, mean, rstd, residual, norm, end)
    kept, _ = dropout
    rows = dx if kept is None else dx * kept * one_node.dropout_scale(*dropout)
    return residual_node.Stream(dx, None, rows.to(dtype), rows.sum(0)), of_weights


def normed_columns_gradients(grads, x, weight, rstd):
    dy = grads[:, : x.shape[1]]
    norm = NormOptions(None, rstd.shape[1], True)
    dx, (dweight, _) = row_norm_gradients(dy, x, weight, None, rstd, None, norm, None)
    dy.copy_(dx)
    return dweight


def activated(z, activation, gated):
    assert not gated or activation == "silu"
    return swiglu(z) if gated else POINTWISE[activation].function(z)


def activation_gradients(dy, z, activation, gated, end, scale=1.0):
    dy, z = cleared(dy, end), cleared(z, end)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        (dz,) = torch.autograd.grad(activated(z, activation, gated), z, dy * scale)
    return dz, dz.sum(0)


def activated_again(dy, z, activation, gated, kept, scale):
    factor = scale if kept is None else kept * scale
    dz, sums = activation_gradients(dy * factor, z, activation, gated, None)
    y = activated(z, activation, gated) * factor
    if is_last_backward():
        dz = z.copy_(dz)
    return dy.copy_(y), dz, sums


@pytest.fixture
def nodes(monkeypatch):
    """The number of calls of nodes, which layers on the CPU take too."""
    calls = []

    def replace(module, name, function):
        monkeypatch.setattr(module, name, function)

    def counted(node):
        forward = node.forward

        def call(ctx, *inputs):
            calls.append(node)
            return forward(ctx, *inputs)

        monkeypatch.setattr(node, "forward", staticmethod(call))

    def is_plain(x, *modules, on_cpu=False):  # the rule without the GPU
        return all(map(one_node._is_plain, modules))

    replace(one_node, "may_be_one_node", is_plain)
    replace(target_node, "_has_few_candidates", lambda *_: False)
    replace(block_layer, "runs_kernels", lambda *_: True)
    for module in (gdpa_node, residual_node):
        replace(module, "row_norm", row_norm)
    replace(residual_node, "row_norm_gradients", row_norm_gradients)
    replace(residual_node, "residual_norm", residual_norm)
    replace(residual_node, "residual_norm_gradients", residual_norm_gradients)
    replace(gdpa_node, "normed_columns_gradients", normed_columns_gradients)
    replace(mlp_node, "activated", activated)
    replace(mlp_node, "activation_gradients", activation_gradients)
    replace(mlp_node, "activated_again", activated_again)
    replace(block_op, "triton_block_attention_packed", block_forward)
    replace(block_op, "triton_block_attention_packed_backward", block_gradient)
    counted(gdpa_node._Node)
    counted(block_attention_node._Node)
    counted(target_node._Node)
    counted(mlp_node._Node)
    counted(encoder_node._Node)
    counted(self_target_node._Node)
    return calls


# -- layers ----------------------------------------------------------------------------------------


class Case:
    """A layer in float64 with random norms, and its inputs."""

    def __init__(self, make, context=False, **call):
        torch.manual_seed(0)
        self.layer = make().double()
        for name, parameter in self.layer.named_parameters():
            if "norm" in name:
                nn.init.normal_(parameter)
        self.inputs = [torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64)]
        if context:
            self.inputs.append(torch.randn(sum(CONTEXTS), WIDTH, dtype=torch.float64))
        self.call = call

    def run(self, layer, x, context=None):
        pair = () if context is None else ((context, offsets_of(CONTEXTS)),)
        return layer((x, offsets_of(LENGTHS)), *pair, **self.call)[0]

    def results(self, layer, run=None, frozen=()):
        """The result, and the gradients of inputs and parameters; None of frozen ones."""
        layer = copy.deepcopy(layer)
        inputs = [x.clone().requires_grad_() for x in self.inputs]
        named = dict(zip(("x", "context"), inputs)) | dict(layer.named_parameters())
        for name in frozen:
            named[name].requires_grad_(False)
        out = (run or self.run)(layer, *inputs)
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator, dtype=out.dtype))
        return [out.detach(), *(x.grad for x in named.values())]


class TargetCase(Case):
    """Targets of histories, several of which have equal lengths."""

    def __init__(self, targets, candidates=None, kind=jm.JaggedTargetAttention):
        super().__init__(lambda: kind(WIDTH, 4, target_dim=7))
        torch.manual_seed(1)
        self.lengths, self.candidates = [3, 0, 5, 3, 1, 5], candidates
        self.inputs = [torch.randn(*shape, dtype=torch.float64) for shape in (targets, (17, WIDTH))]

    def run(self, layer, x, context):
        history = context, offsets_of(self.lengths)
        if x.dim() == 2:
            return layer((x, offsets_of([2, 1, 0, 2, 1, 1])), history)[0]
        return layer(x, history, self.candidates)


class SelfTargetCase(TargetCase):
    """Of targets and histories. The results are one: those of the history, then the targets'."""

    def __init__(self, *targets):
        super().__init__(*targets, kind=jm.JaggedSelfTargetAttention)

    def run(self, layer, x, context):
        if x.dim() == 2:
            x = x, offsets_of([2, 1, 0, 2, 1, 1])
        (values, _), results = layer((context, offsets_of(self.lengths)), x, self.candidates)
        results = results[0] if isinstance(results, tuple) else results.flatten(0, 1)
        return torch.cat([values, results])


class SeedCase(Case):
    def __init__(self, *arguments, **config):
        super().__init__(gdpa(jm.JaggedGDPA, *arguments, num_seeds=3, **config))

    def run(self, layer, x):
        return layer((x, offsets_of(LENGTHS))).flatten(0, 1)


def gdpa(kind=jm.JaggedGDPA, activation="gelu_tanh", mask=None, **config):
    return lambda: kind(WIDTH, 4, activation, mask, jm.GDPAConfig(**config))


def blocks(rotary, **options):
    return lambda: jm.BlockDiagonalSelfAttention(WIDTH, 4, 16, rotary, **options)


def encoder(norm_first, norm, activation, **options):
    return lambda: jm.JaggedEncoderLayer(
        WIDTH, 4, 11, norm_first=norm_first, norm=norm, activation=activation, **options
    )


CAUSAL = jm.AttentionMask(causal=True)
TARGETS = torch.tensor([2, 0, 0, 4])
CASES = {
    "layer": lambda: Case(gdpa()),
    "block": lambda: Case(gdpa(jm.GDPABlock)),
    "softmax": lambda: Case(gdpa(jm.GDPABlock, "softmax", CAUSAL), num_targets=TARGETS),
    "grouped": lambda: Case(gdpa(jm.GDPABlock, num_kv_heads=2, output_scale=0.3, scale=-0.5)),
    "wide": lambda: Case(gdpa(head_dim=10)),
    "context": lambda: Case(gdpa(num_kv_heads=1), context=True),
    "qk-norm": lambda: Case(gdpa(num_kv_heads=2, qk_norm=True)),
    "block-qk-norm": lambda: Case(gdpa(jm.GDPABlock, "softmax", qk_norm=True)),
    "context-qk-norm": lambda: Case(gdpa(num_kv_heads=2, qk_norm=True), context=True),
    "block-context": lambda: Case(gdpa(jm.GDPABlock, "silu"), context=True),
    "weights": lambda: Case(gdpa(num_weights=7)),
    "block-weights": lambda: Case(gdpa(jm.GDPABlock, "softmax", num_weights=7, num_kv_heads=2)),
    "seeds": lambda: SeedCase("softmax"),
    "seeds-qk-norm": lambda: SeedCase(num_kv_heads=2, qk_norm=True),
    "blocks": lambda: Case(blocks(None)),
    "rotary": lambda: Case(blocks("qk")),
    "targets": lambda: TargetCase((6, 2, 7)),
    "container": lambda: TargetCase((7, 7)),
    "candidates": lambda: TargetCase((9, 3, 7), torch.tensor([5, 0, 2, 2, 1, 0, 5, 3, 2])),
    "grouped-candidates": lambda: TargetCase((4, 1, 7), torch.tensor([0, 2, 2, 5])),
    "ordered": lambda: TargetCase((6, 2, 7), torch.tensor([5, 0, 2, 3, 1, 4])),
    "self-ordered": lambda: SelfTargetCase((6, 2, 7), torch.tensor([5, 0, 2, 3, 1, 4])),
    "self-container": lambda: SelfTargetCase((7, 7)),
    "self-candidates": lambda: SelfTargetCase((9, 3, 7), torch.tensor([5, 0, 2, 2, 1, 0, 5, 3, 2])),
    "self-grouped": lambda: SelfTargetCase((4, 1, 7), torch.tensor([0, 2, 2, 5])),
    "self-without": lambda: SelfTargetCase((0, 1, 7), torch.zeros(0, dtype=torch.long)),
    "rotated-values": lambda: Case(blocks("qkv")),
    "mlp": lambda: Case(lambda: jm.JaggedMLP([WIDTH, 7, 13, 5], "gelu")),
    "relu": lambda: Case(lambda: jm.JaggedMLP([WIDTH, 7, 13, 5])),
    "swiglu": lambda: Case(lambda: jm.JaggedMLP([WIDTH, 7, 5], "swiglu")),
    "encoder-first": lambda: Case(encoder(True, "layer", "swiglu", mask=CAUSAL)),
    "encoder-behind": lambda: Case(encoder(False, "layer", "gelu"), num_targets=TARGETS),
    "encoder-queries": lambda: Case(encoder("queries", "layer", "gelu"), num_targets=TARGETS),
    "encoder-queries-rms": lambda: Case(encoder("queries", "rms", "relu", mask=CAUSAL)),
}
CASES |= {
    f"encoder-{norm_first}-{norm}-{activation}": lambda options=(norm_first, norm, activation): (
        Case(encoder(*options))
    )
    for norm_first in (True, False)
    for norm in ("layer", "rms")
    for activation in ("relu", "gelu", "silu", "swiglu")
}


def in_modules(case, **options):
    """The results of the chain of modules: a hook prevents nodes."""
    layer = copy.deepcopy(case.layer)
    for module in layer.modules():
        module.register_forward_hook(lambda *_: None)
    return case.results(layer, **options)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_modules(nodes, name):
    case = CASES[name]()
    expected = in_modules(case)
    assert not nodes
    torch.testing.assert_close(case.results(case.layer), expected)
    assert len(nodes) == 1


ROUNDED = "layer", "softmax", "wide", "context", "qk-norm", "context-qk-norm", "weights", "seeds"
ROUNDED += "seeds-qk-norm", "targets", "container", "candidates", "grouped-candidates", "ordered"


@pytest.fixture
def rounded(monkeypatch):
    """Nodes take rows of 0 behind their own, as on a GPU where they copy them in 16 bits."""

    own = one_node.gemm_rows

    def rows(x, end, dtype, num_rows=None, has_columns=True):
        x = own(x, end, dtype, num_rows, has_columns)
        return padded_to(x, num_rows or len(x)) if x.dim() == 2 else x

    for module in (one_node, gdpa_node, target_node):
        monkeypatch.setattr(module, "gemm_rows", rows)
    monkeypatch.setattr(one_node, "rounded_rows", lambda x, *_: rounded_size(len(x)))


@pytest.mark.parametrize("name", ROUNDED)
def test_rows_of_zeros_behind_those_of_a_node(nodes, rounded, poisoned_memory, name):
    test_results_and_gradients_are_those_of_the_modules(nodes, name)


def test_batches_of_similar_sizes_have_gemms_of_the_same_shapes(nodes, rounded):
    found = []
    for last in (5, 6):
        case = CASES["grouped-candidates"]()
        case.lengths[-1] = last
        case.inputs[1] = torch.randn(sum(case.lengths), WIDTH, dtype=torch.float64)
        found.append(gemm_shapes(lambda case=case: case.results(case.layer)))
    assert found[0] == found[1] and len(found[0]) == 9 and len(nodes) == 2


def test_many_rows_are_rounded_up_by_less():
    for rows, expected in ((999, 1024), (95_939, 96_256)):
        x = torch.empty(rows, 512, device="meta")
        assert one_node.rounded_rows(x, None, torch.bfloat16) == expected


def test_the_output_too_where_only_the_device_knows(
    nodes, rounded, only_the_device_knows, monkeypatch
):
    found = []
    for last in (19, 20):
        monkeypatch.setattr(sys.modules[__name__], "LENGTHS", [*LENGTHS[:-1], last])
        case = CASES["layer"]()
        found.append(gemm_shapes(lambda case=case: case.results(case.layer)))
    assert found[0] == found[1] and len(found[0]) == 6 and len(nodes) == 2


FROZEN = [
    "block",
    "block-qk-norm",
    "context-qk-norm",
    "block-context",
    "block-weights",
    "seeds-qk-norm",
    "rotary",
    "candidates",
    "self-ordered",
    "mlp",
    "relu",
    "swiglu",
    "encoder-first",
    "encoder-behind",
    "encoder-queries",
    "encoder-False-rms-relu",
]


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_gets_no_gradient(nodes, name):
    case = CASES[name]()
    whole = case.results(case.layer)
    names = ["x", "context"][: len(case.inputs)]
    names += [name for name, _ in case.layer.named_parameters()]
    of_output = [x for x in names if "out_proj" in x] or names[-2:]
    halves = names[::2], names[1::2], [x for x in names if x not in of_output]
    for frozen in (*([x] for x in names), *halves):
        gradients = dict(zip(names, case.results(case.layer, frozen=frozen)[1:]))
        for key, expected in zip(names, whole[1:]):
            torch.testing.assert_close(gradients[key], None if key in frozen else expected)


@pytest.mark.parametrize(
    "name",
    ["block", "seeds", "rotary", "candidates", "self-candidates", "mlp", "relu"]
    + ["encoder-first", "encoder-behind", "encoder-queries", "encoder-False-rms-relu"],
)
def test_checkpoints_retained_graphs_and_no_gradients(nodes, name):
    case = CASES[name]()
    expected = case.results(case.layer)

    def with_checkpoint(layer, *inputs):
        return checkpoint(case.run, layer, *inputs, use_reentrant=False)

    torch.testing.assert_close(case.results(case.layer, with_checkpoint), expected)
    x, *others = (x.clone().requires_grad_() for x in case.inputs)
    out = case.run(case.layer, x, *others)
    first, second = (torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with torch.no_grad():
        assert torch.equal(case.run(case.layer, x, *others), out) and out.requires_grad


class Projections(TorchDispatchMode):
    """How many results of earlier projections exist when each projection starts."""

    def __init__(self):
        super().__init__()
        self.results, self.alive = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_projection = function.overloadpacket is torch.ops.aten.addmm
        if is_projection:
            self.alive.append(sum(not x.expired() for x in self.results))
        result = function(*args, **(kwargs or {}))
        if is_projection:
            self.results.append(StorageWeakRef(result.untyped_storage()))
        return result


@pytest.mark.parametrize(
    "name, count",
    [
        ("block", 1),
        ("context", 2),
        ("rotary", 1),
        ("candidates", 2),
        ("self-candidates", 2),
        ("encoder-first", 1),
        ("encoder-behind", 3),
        ("encoder-queries", 2),
    ],
)
def test_without_gradients_projections_are_free_before_that_of_the_output(nodes, name, count):
    """count: of projections before that of the output."""
    case = CASES[name]()
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled), Projections() as projections:
            out = case.run(case.layer, *case.inputs)
        assert (projections.alive[count] > 0) == enabled == out.requires_grad


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_memory_of_a_block_when_its_attentions_backward_begins(
    nodes, monkeypatch, activation, is_kept
):
    """The copy of the result's gradient is free, and the rows of the output's projection too, if
    they are not the attention's result, which a softmax's gradient reads."""
    layer, alive, own = gdpa(jm.GDPABlock, activation)(), [], gdpa_node.packed_gradients
    x, dout = torch.randn(2, 1009, WIDTH)

    def noting(*args, **options):
        alive.append(counter.bytes_per_row())
        return own(*args, **options)

    monkeypatch.setattr(gdpa_node, "packed_gradients", noting)
    monkeypatch.setattr("jagged_modules.functional.nodes.SMALL", 0)
    with Alive(1009) as counter, torch.autocast("cpu", torch.bfloat16):
        x = x.clone().requires_grad_()
        out = layer((x, offsets_of([500, 0, 509])))[0]
        out.backward(dout, retain_graph=is_kept)
    wide, narrow = 4 * WIDTH, 2 * WIDTH
    of_rows = 2 * wide + narrow + 8  # x, the result, normed rows and statistics
    qkv_and_dh, h, copy = 4 * narrow, narrow, narrow
    kept = h + copy if is_kept else 0
    if activation == "softmax":
        kept = max(kept, h) + 4 * layer.attention.num_heads  # and logarithms
    assert alive == [of_rows + qkv_and_dh + kept]
    assert len(nodes) == 1


def test_a_result_that_nothing_reads_gives_no_gradient(nodes):
    case = CASES["self-candidates"]()
    for index, unread in enumerate(("target_out_proj", "out_proj")):

        def run(layer, x, history, index=index):
            (values, _), out = layer((history, offsets_of(case.lengths)), x, case.candidates)
            return (values, out)[index]

        expected, found = in_modules(case, run=run), case.results(case.layer, run)
        torch.testing.assert_close(found, expected)
        names = [name for name, _ in case.layer.named_parameters()]
        assert found[3 + names.index(f"{unread}.weight")] is None
    assert len(nodes) == 2


@pytest.mark.parametrize("probability", [0.3, 1.0])
@pytest.mark.parametrize("activation", ["gelu_tanh", "softmax"])
def test_dropout(nodes, activation, probability):
    """The same random numbers as the module's. It is off outside of training."""
    case = Case(gdpa(jm.GDPABlock, activation, dropout=probability))

    def run(layer, x):
        torch.manual_seed(3)
        return case.run(layer, x)

    expected, results = in_modules(case, run=run), case.results(case.layer, run)
    for x, y in zip(results[1:], expected[1:]):
        assert x.isfinite().all() and x.shape == y.shape
    case.layer.eval()
    torch.testing.assert_close(case.results(case.layer), in_modules(case))


@pytest.mark.parametrize("probability", [0.3, 1.0])
@pytest.mark.parametrize(
    "name", ["encoder-first", "encoder-behind", "encoder-queries", "encoder-False-rms-relu"]
)
def test_dropout_of_an_encoder(nodes, name, probability):
    """The gradient is the derivative for the elements that are kept: the same for a seed."""
    case = CASES[name]()
    for module in case.layer.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
    (x,), parameters = case.inputs, list(case.layer.parameters())
    vectors = [torch.randn_like(x) for x in (x, *parameters)]

    def run(x, *values):
        torch.manual_seed(3)
        named = dict(zip(dict(case.layer.named_parameters()), values))
        arguments = (x, offsets_of(LENGTHS)), case.call.get("num_targets")
        return torch.func.functional_call(case.layer, named, arguments)[0].sin().sum()

    leaves = [x.detach().requires_grad_() for x in (x, *parameters)]
    grads = torch.autograd.grad(run(*leaves), leaves)
    assert len(nodes) == 1
    with torch.no_grad():
        ahead, behind = (
            run(*(x + step * v for x, v in zip(leaves, vectors))) for step in (1e-6, -1e-6)
        )
    slope = sum((grad * v).sum() for grad, v in zip(grads, vectors))
    torch.testing.assert_close(slope, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-6)
    case.layer.eval()
    torch.testing.assert_close(case.results(case.layer), in_modules(case))


@pytest.mark.parametrize("name", ["mlp", "relu", "encoder-False-rms-relu", "layer"])
def test_the_result_outlives_the_backward(nodes, name):
    case = CASES[name]()
    out = case.run(case.layer, *(x.clone().requires_grad_() for x in case.inputs))
    before = out.detach().clone()
    out.sum().backward()
    assert torch.equal(out, before) and len(nodes) == 1


@pytest.mark.parametrize("name", [name for name in CASES if name != "relu"])
def test_the_result_may_be_written_to(nodes, rounded, name):
    """Except where the backward reads it, as that of torch's ReLU."""
    case = CASES[name]()

    def run(layer, *inputs, times=torch.mul):
        def call(*arguments, **options):
            results = layer(*arguments, **options)
            return tree_map(lambda x: times(x, 2) if x.requires_grad else x, results)

        return case.run(call, *inputs)

    expected = case.results(case.layer, run)
    found = case.results(case.layer, lambda *inputs: run(*inputs, times=torch.Tensor.mul_))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(nodes) == 2


@pytest.mark.parametrize("name", ["layer", "weights", "targets", "candidates", "rotary", "mlp"])
def test_so_may_one_that_is_cleared_in_place(
    nodes, rounded, only_the_device_knows, monkeypatch, name
):
    def zero_tail(x, end, *others):  # as on a GPU
        for y, of in ((x, end), *others):
            if of is not None:
                y[int(of[-1]) :] = 0
        return x

    for module in (gdpa_node, target_node, block_attention_node, mlp_node):
        monkeypatch.setattr(module, "with_zero_tail", zero_tail)
    test_the_result_may_be_written_to(nodes, rounded, name)


def test_relu_keeps_the_next_layers_input_alone(nodes):
    """Other activations keep z beside it."""

    def kept(activation):
        case, sizes = Case(lambda: jm.JaggedMLP([WIDTH, 7, 13, 5], activation)), {}

        def pack(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = case.run(case.layer, *case.inputs)
        assert out.requires_grad  # and keeps the storages
        return sum(sizes.values())

    assert kept("gelu") - kept("relu") == (7 + 13) * 8 * sum(LENGTHS)


@pytest.mark.parametrize("activation, count", [("relu", 0), ("gelu", 2)])
def test_an_encoder_computes_activations_but_relu_again(nodes, monkeypatch, activation, count):
    calls = []

    def count_calls(name):
        own = getattr(mlp_node, name)

        def counted(*arguments):
            calls.append(arguments)
            return own(*arguments)

        monkeypatch.setattr(mlp_node, name, counted)

    count_calls("activated")
    count_calls("activated_again")
    case = Case(encoder(True, "layer", activation))
    case.results(case.layer)
    assert len(calls) == count


@pytest.mark.parametrize("name", ["layer", "block", "rotary", "mlp", "relu", "encoder-behind"])
def test_no_rows(nodes, name):
    case = CASES[name]()
    x = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    out = case.layer((x, torch.zeros(3, dtype=torch.long)))[0]
    out.sum().backward()
    assert out.shape[0] == 0 and x.grad.shape == (0, WIDTH)
    assert all(not parameter.grad.any() for parameter in case.layer.parameters())
    assert len(nodes) == 1


@pytest.mark.parametrize(
    "name", ["block", "rotary", "candidates", "self-candidates", "encoder-first"]
)
def test_a_second_derivative_raises(nodes, name):
    case = CASES[name]()
    x, *others = (x.clone().requires_grad_() for x in case.inputs)
    out = case.run(case.layer, x, *others)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        dx.sum().backward()
    # nor is it 0 where autograd follows only the paths to the tensors that it is asked for
    for source in (x, *others, *case.layer.parameters()):
        (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="not differentiable twice"):
            torch.autograd.grad(dx.sum(), source, allow_unused=True)


def test_a_graph_of_gradients_of_a_checkpoint(nodes):
    """What a node saved is unpacked once, as torch.utils.checkpoint demands."""
    case = CASES["candidates"]()
    x, *others = (x.clone().requires_grad_() for x in case.inputs)
    (expected,) = torch.autograd.grad(case.run(case.layer, x, *others).sum(), x)
    out = checkpoint(case.run, case.layer, x, *others, use_reentrant=False)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(dx, expected)


def replaced(layer, name):
    """The layer with a module that computes something else."""
    parent, _, child = name.rpartition(".")
    setattr(layer.get_submodule(parent), child, nn.Sequential(layer.get_submodule(name)))
    return layer


def set_forward(module):
    """As libraries that move weights to a device for each call do."""
    forward = module.forward
    module.forward = lambda x: forward(x).cos()


def set_tensor(module, name):
    """A tensor that is no parameter, in the place of one."""
    parameter = getattr(module, name)
    delattr(module, name)
    setattr(module, name, parameter.detach().cos())


def pruned(layer):
    """With linears whose weights were pruned: they come behind the biases."""
    for module in layer.modules():
        if type(module) is nn.Linear:
            prune.identity(module, "weight")
            prune.remove(module, "weight")


@pytest.mark.parametrize(
    "name, change, count",
    [
        *[(name, pruned, 1) for name in ("layer", "context", "candidates", "mlp", "encoder-first")],
        ("block", lambda layer: replaced(layer, "attention.q_proj"), 0),
        ("block", lambda layer: replaced(layer, "attention.dropout"), 0),
        ("block", lambda layer: replaced(layer, "norm"), 1),
        ("layer", lambda layer: layer.kv_proj.register_forward_pre_hook(lambda *_: None), 0),
        ("block", lambda layer: layer.attention.register_forward_hook(lambda *_: None), 1),
        ("block", lambda layer: nn.utils.parametrizations.weight_norm(layer.attention.out_proj), 0),
        ("block", lambda layer: set_forward(layer.attention.out_proj), 0),
        ("candidates", lambda layer: set_forward(layer.kv_proj), 0),
        ("candidates", lambda layer: set_tensor(layer.q_proj, "weight"), 0),
        ("self-candidates", lambda layer: set_tensor(layer.out_proj, "bias"), 0),
        ("rotary", lambda layer: replaced(layer, "qkv_proj"), 0),
        ("rotary", lambda layer: setattr(layer.out_proj, "bias", None), 0),
        ("mlp", lambda layer: replaced(layer, "layers.1"), 0),
        ("self-candidates", lambda layer: replaced(layer, "target_out_proj"), 0),
        ("encoder-first", lambda layer: replaced(layer, "linear2"), 1),
        ("encoder-first", lambda layer: replaced(layer, "norm2"), 1),
        ("encoder-first", lambda layer: replaced(layer, "dropout"), 1),
        ("encoder-first", lambda layer: setattr(layer.norm1, "bias", None), 1),
        ("encoder-first", lambda layer: replaced(layer, "attention.out_proj"), 0),
    ],
)
def test_modules_that_are_not_plain_are_called(nodes, name, change, count):
    """count: of nodes. An attention without its block's or encoder's norm may still be one."""
    case = CASES[name]()
    change(case.layer)
    result = case.run(case.layer, *case.inputs)
    assert len(nodes) == count
    called = copy.deepcopy(case.layer)
    for module in called.modules():
        module.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(case.run(called, *case.inputs), result)


@pytest.mark.parametrize(
    "make",
    [gdpa(qk_norm=True, num_weights=3), gdpa(activation="softmax", scale=-0.5)],
    ids=["normed-weights", "negative-scale"],
)
def test_options_that_no_node_computes(nodes, make):
    case = Case(make)
    case.layer((case.inputs[0], offsets_of(LENGTHS)))
    assert not nodes


@pytest.mark.parametrize("frees_x", [True, False])
@pytest.mark.parametrize("wanted", [(1, 1, 1), (0, 0, 1), (1, 1, 0), (0, 1, 0)], ids=str)
def test_a_bias_gradient_from_the_weights_gemm(wanted, frees_x):
    x, weight, dy = torch.randn(50, 6), torch.randn(4, 6), torch.randn(50, 4)
    wide = torch.cat([x, torch.ones(50, 1), torch.zeros(50, 31)], 1)
    assert torch.equal(one_node.linear(wide, weight, None), x @ weight.t())
    options = dy, wide, weight, wanted, torch.float32, torch.float32
    grads = one_node.linear_gradients(*options, frees_x=frees_x)
    for grad, is_wanted, expected in zip(grads, wanted, (dy @ weight, dy.t() @ x, dy.sum(0))):
        if not is_wanted:
            assert grad is None
        else:
            torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(
    "name",
    [
        "JaggedGDPA",
        "JaggedGDPA-context",
        "JaggedGDPA-weights",
        "GDPABlock",
        "BlockDiagonalSelfAttention",
        "JaggedMLP",
        "JaggedTargetAttention",
        "JaggedTargetAttention-candidates",
        "JaggedEncoder",
    ],
)
def test_rows_behind_the_end(nodes, only_the_device_knows, name):
    """NaN in them, and in their gradients, reaches nothing."""
    layer, case = layer_case(name, dtype=torch.float64)
    check(case, case.call, torch.float64, parameters=layer.parameters())
    assert len(nodes) == 2


@pytest.mark.parametrize(
    "name",
    ["JaggedGDPA", "JaggedGDPA-context", "JaggedTargetAttention"]
    + ["JaggedTargetAttention-candidates"],
)
def test_rows_of_zeros_behind_rows_behind_the_end(nodes, rounded, only_the_device_knows, name):
    test_rows_behind_the_end(nodes, only_the_device_knows, name)
