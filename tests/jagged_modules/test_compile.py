"""Under torch's graph tools: torch's opcheck, torch.compile without a recompilation from batch to batch, torch.export, torch.fx."""

import sys

import pytest
import torch
from torch import library
from torch._dynamo.testing import CompileCounterWithBackend

import jagged_modules as jm
from jagged_modules import functional as F

HEADS, DIM, WIDTH = 2, 16, 32
SIZES = [(5, 41, 11), (6, 83, 23), (7, 59, 37), (13, 14, 15)]  # users, history rows, candidates; no two sizes of a batch equal


def random_offsets(segments: int, total: int) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(total, (segments - 1,)).sort().values, torch.tensor([total])])


def compiled(function):
    """The function compiled as one graph, and the counter of compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, dynamic=True, backend=counter), counter


def assert_compiles_once(function, batches) -> None:
    """One graph for all batches; values and gradients of every floating-point input as without compilation."""
    graph, counter = compiled(function)
    for inputs in batches:
        results = []
        for call in (function, graph):
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
            out = call(*leaves)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x for x in leaves if x.requires_grad])])
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("q_shared", [False, True])
def test_opcheck(q_shared, activation, masked, offsets_of):
    q, k, v = (torch.randn(n, h, d, requires_grad=True) for n, h, d in ((4, 4, 8), (7, 2, 8), (7, 2, 6)))
    q_offsets, kv_offsets = offsets_of([4, 4] if q_shared else [3, 1]), offsets_of([2, 5])
    mask = ([1, -1, 3, 1, 1, 0, 2, 0], torch.tensor([1, 2])) if masked else (None, None)
    scales = (None, 1.0) if activation == "softmax" else (torch.tensor([0.5, 2.0]), 0.1)
    arguments = q, k, v, q_offsets, kv_offsets, 0.3, q_shared, activation, *mask, *scales
    library.opcheck(torch.ops.jagged_modules.attention_cpu.default, arguments)
    grad = torch.randn(8 if q_shared else 4, 4, 6)
    saved = torch.ops.jagged_modules.attention_cpu(*arguments) if activation == "softmax" else (None, None)
    arguments = (grad, *(x if x is None else x.detach() for x in (q, k, v, *saved)), *arguments[3:])
    library.opcheck(torch.ops.jagged_modules.attention_cpu_backward.default, arguments)


def test_opcheck_of_strided_low_precision_inputs(offsets_of):
    packed = torch.randn(7, 3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    offsets = offsets_of([2, 0, 5], torch.int32)
    arguments = *packed.unbind(1), offsets, offsets.clone(), 0.3, False, "softmax", None, None, None, 1.0
    library.opcheck(torch.ops.jagged_modules.attention_cpu.default, arguments)


def qkv(q_rows, kv_rows):
    return torch.randn(q_rows, HEADS, DIM), torch.randn(kv_rows, HEADS, DIM), torch.randn(kv_rows, HEADS, DIM)


def test_self_attention():
    batches = [(*qkv(rows, rows), random_offsets(users, rows)) for users, rows, _ in SIZES]
    assert_compiles_once(lambda q, k, v, offsets: F.jagged_attention(q, k, v, offsets), batches)


def test_cross_attention():
    batches = [(*qkv(c, rows), random_offsets(users, c), random_offsets(users, rows)) for users, rows, c in SIZES]
    assert_compiles_once(lambda *x: F.jagged_attention(*x, scale=0.2), batches)


def test_self_target_attention():
    batches = [(*qkv(rows, rows), qkv(c, 0)[0], random_offsets(users, rows), random_offsets(users, c)) for users, rows, c in SIZES]

    def attend(q, k, v, q_candidates, offsets, candidate_offsets):
        return torch.cat(F.self_target_attention(q, q_candidates, k, v, offsets, candidate_offsets))

    assert_compiles_once(attend, batches)


def random_targets(offsets: torch.Tensor) -> torch.Tensor:
    return (torch.rand(len(offsets) - 1) * (offsets.diff() + 1)).long()


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_mask_made_in_the_graph(activation):
    def attend(q, k, v, offsets, num_targets):
        mask = jm.AttentionMask(causal=True, num_targets=num_targets, max_attn_len=9)
        return F.jagged_attention(q, k, v, offsets, mask=mask, activation=activation)

    batches = []
    for users, rows, _ in SIZES:
        offsets = random_offsets(users, rows)
        batches.append((*qkv(rows, rows), offsets, random_targets(offsets)))
    assert_compiles_once(attend, batches)


def test_mask_made_outside_of_the_graph():
    def attend(q, k, v, offsets, mask):
        return F.jagged_attention(q, k, v, offsets, mask=mask, activation="silu")

    graph, counter = compiled(attend)
    for users, rows, _ in SIZES:
        offsets = random_offsets(users, rows)
        mask = jm.AttentionMask(causal=True, num_targets=random_targets(offsets), window=(9, 3))
        inputs = *qkv(rows, rows), offsets, mask
        torch.testing.assert_close(graph(*inputs), attend(*inputs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kv_offsets", [None, "shared"])
@pytest.mark.parametrize("kind", ["number", "tensor", "parameter"])
def test_output_scale(kind, kv_offsets):
    def attend(q, k, v, offsets, output_scale):
        factor = {"number": 0.125, "tensor": output_scale.detach(), "parameter": output_scale}[kind]
        return F.jagged_attention(q, k, v, offsets, kv_offsets, activation="silu", output_scale=factor) * output_scale.sum()

    batches = [(*qkv(rows, rows), random_offsets(users, rows), torch.rand(users)) for users, rows, _ in SIZES]
    assert_compiles_once(attend, batches)


@pytest.mark.parametrize("shared", ["q", "kv"])
def test_shared_operands(shared):
    if shared == "q":
        batches = [(*qkv(3, rows), random_offsets(users, rows)) for users, rows, _ in SIZES]
        assert_compiles_once(lambda q, k, v, offsets: F.jagged_attention(q, k, v, "shared", offsets), batches)
    else:
        batches = [(*qkv(rows, 3), random_offsets(users, rows)) for users, rows, _ in SIZES]
        assert_compiles_once(lambda q, k, v, offsets: F.jagged_attention(q, k, v, offsets, "shared"), batches)


def user_index(form, users, count):
    """The input from which the graph makes the users of the candidates."""
    return torch.randint(users, (count,)) if form in ("tensor", "map") else random_offsets(users, count)


@pytest.mark.parametrize("form", ["tensor", "map", "offsets"])
def test_target_attention(form):
    def attend(q, k, v, offsets, candidates):
        if form == "map":
            candidates = jm.CandidateIndex.from_map(candidates, offsets.shape[0] - 1)
        elif form == "offsets":
            candidates = jm.CandidateIndex.from_offsets(candidates)
        return F.target_attention(q, k, v, candidates, offsets)

    batches = []
    for users, rows, count in SIZES:
        _, k, v = qkv(1, rows)
        batches.append((torch.randn(count, 4, HEADS, DIM), k, v, random_offsets(users, rows), user_index(form, users, count)))
    assert_compiles_once(attend, batches)


@pytest.mark.parametrize("form", ["tensor", "map", "offsets"])
@pytest.mark.parametrize("implementation", ["reference", "decomposed", "padded"])
def test_linear_compress(implementation, form):
    def compress(w_user, w_candidate, users, candidates, index):
        if form == "map":
            index = jm.CandidateIndex.from_map(index, users.shape[0])
        elif form == "offsets":
            index = jm.CandidateIndex.from_offsets(index)
        return F.linear_compress((w_user, w_candidate), (users, candidates), index, implementation=implementation)

    batches = []
    for users, _, count in SIZES:
        embeddings = torch.randn(users, 9, WIDTH), torch.randn(count, 10, WIDTH)
        batches.append((torch.randn(4, 9), torch.randn(4, 10), *embeddings, user_index(form, users, count)))
    assert_compiles_once(compress, batches)


@pytest.mark.parametrize("rotary", [None, "qk", "qkv", "given"])
def test_block_diagonal_attention(rotary):
    tables = jm.Rotary.from_frequencies(DIM, 100)

    def attend(q, k, v, offsets, positions):
        made = rotary and jm.Rotary(tables.cos, tables.sin, "qkv" if rotary == "qkv" else "qk", positions if rotary == "given" else None)
        return F.block_diagonal_attention(q, k, v, offsets, block_size=16, rotary=made)

    batches = [(*qkv(rows, rows), random_offsets(users, rows), torch.randint(100, (rows,))) for users, rows, _ in SIZES]
    assert_compiles_once(attend, batches)


@pytest.mark.parametrize("rotary", [None, "qk"])
@pytest.mark.parametrize("kind", ["pair", "Jagged", "JaggedTensor"])
def test_block_diagonal_layer(kind, rotary):
    torchrec = pytest.importorskip("torchrec")
    wrap = {
        "pair": lambda values, offsets: (values, offsets),
        "Jagged": jm.Jagged,
        "JaggedTensor": lambda values, offsets: torchrec.JaggedTensor(values, lengths=offsets.diff()),
    }[kind]
    layer = jm.BlockDiagonalSelfAttention(WIDTH, HEADS, block_size=16, rotary=rotary, max_seqlen=100)
    graph, counter = compiled(layer)
    for users, rows, _ in SIZES:
        x = wrap(torch.randn(rows, WIDTH), random_offsets(users, rows))
        results = []
        for call in (layer, graph):
            out = call(x)
            assert type(out) is type(x)
            values = jm.Jagged.wrap(out).values
            results.append([values, *torch.autograd.grad(values.square().sum(), list(layer.parameters()))])
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_jagged_products(dtype, offsets_of):
    operators = torch.ops.jagged_modules
    plan = F.ScorePlan.from_offsets(offsets_of([2, 0, 3], torch.int32), offsets_of([4, 5, 1]))
    shapes = (plan.x_rows, 4), (plan.y_rows, 4), (plan.total,)
    x, y, p = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    library.opcheck(operators.outer_cpu.default, (x, y, *plan.offsets, plan.total))
    library.opcheck(operators.product_cpu.default, (p, y, *plan.offsets, plan.x_rows, False))
    library.opcheck(operators.product_cpu.default, (p, x, *plan.offsets, plan.y_rows, True))
    for columns in (False, True):
        library.opcheck(operators.softmax_cpu.default, (p, *plan.offsets, columns))
        library.opcheck(operators.softmax_backward_cpu.default, (p.detach(), p.detach().exp(), *plan.offsets, columns))


JAGGED = {
    "jagged_dense_bmm": lambda x, w, offsets: F.jagged_dense_bmm(x, w, offsets),
    "jagged_jagged_bmm": lambda x, w, offsets: F.jagged_jagged_bmm(x, F.jagged_dense_bmm(x, w, offsets), offsets),
    "jagged_softmax": lambda x, w, offsets: F.jagged_softmax(x, offsets) * w.sum(),
    "jagged_linear": lambda x, w, offsets: F.jagged_linear(x, w, w[:, 0], offsets, "silu"),
    "jagged_linear-shared": lambda x, w, offsets: F.jagged_linear(x, w[0].T, w[0, 0], None, "gelu_taylor"),
    "jagged_layer_norm": lambda x, w, offsets: F.jagged_layer_norm(x, eps=1e-6) * w.sum(),  # a float default is traced twice
    "jagged_dense_add": lambda x, w, offsets: F.jagged_dense_add(x, w.repeat(1, 9, 1)[..., :DIM], offsets),
    "jagged_concat": lambda x, w, offsets: F.jagged_concat([x, x * w.sum()], [offsets, offsets])[0],
    "jagged_split": lambda x, w, offsets: F.jagged_split(x, offsets, offsets.diff(), x.shape[0])[0][0] * w.sum(),
    "jagged_to_padded": lambda x, w, offsets: F.jagged_to_padded(x, offsets, 100) * w.sum(),
    "padded_to_jagged": lambda x, w, offsets: F.padded_to_jagged(w.repeat(1, 9, 1), offsets, x.shape[0]) * x.sum(),
}


@pytest.mark.parametrize("operator", JAGGED)
def test_jagged_operators(operator):
    batches = []
    for users, rows, _ in SIZES:
        batches.append((torch.randn(rows, DIM), torch.randn(users, DIM, 20), random_offsets(users, rows)))
    assert_compiles_once(JAGGED[operator], batches)


@pytest.mark.parametrize("library", ["fbgemm", "torch"])
def test_padding_without_gradients(library, monkeypatch):
    if library == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    else:
        monkeypatch.delitem(sys.modules, "fbgemm_gpu", raising=False)
    graph, counter = compiled(lambda x, offsets: F.jagged_to_padded(x, offsets, 100))
    for users, rows, _ in SIZES:
        x, offsets = torch.randn(rows, DIM), random_offsets(users, rows)
        assert torch.equal(graph(x, offsets), F.jagged_to_padded(x, offsets, 100))
    assert counter.frame_count == 1


def test_unfused_attention_with_a_plan_made_outside_of_the_graph():
    def attend(q, k, v, plan):
        p = F.jagged2_softmax(F.jagged_jagged_bmm_jagged_out(q, k, plan), plan)
        return F.array_jagged_bmm_jagged_out(F.jagged2_softmax(p, plan, dim=-2), v, plan)

    graph, counter = compiled(attend)
    for users, rows, count in SIZES:
        plan = F.ScorePlan.from_offsets(random_offsets(users, count), random_offsets(users, rows))
        inputs = [torch.randn(n, DIM, requires_grad=True) for n in (count, rows, rows)]
        results = []
        for call in (attend, graph):
            out = call(*inputs, plan)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


def test_jagged_mlp():
    mlp = jm.JaggedMLP([DIM, WIDTH, 4], "gelu")
    batches = [(torch.randn(rows, DIM), random_offsets(users, rows)) for users, rows, _ in SIZES]
    assert_compiles_once(lambda *x: mlp(x)[0], batches)


@pytest.mark.parametrize("kind", ["pair", "Jagged", "JaggedTensor", "nested"])
def test_layer_with_every_container(kind):
    """The container is made outside of the graph, as a data loader or an embedding does."""
    torchrec = pytest.importorskip("torchrec")
    wrap = {
        "pair": lambda values, offsets: (values, offsets),
        "Jagged": jm.Jagged,
        "JaggedTensor": lambda values, offsets: torchrec.JaggedTensor(values, lengths=offsets.diff()),
        "nested": torch.nested.nested_tensor_from_jagged,
    }[kind]
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    graph, counter = compiled(layer)
    for users, rows, _ in SIZES:
        targets, values, offsets = torch.randn(users, 3, WIDTH), torch.randn(rows, WIDTH), random_offsets(users, rows)
        out = graph(targets, wrap(values, offsets))
        torch.testing.assert_close(out, layer(targets, (values, offsets)))
        out.sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["Jagged", "JaggedTensor"])
def test_layer_gives_the_same_container(kind):
    torchrec = pytest.importorskip("torchrec")
    wrap = jm.Jagged if kind == "Jagged" else lambda values, offsets: torchrec.JaggedTensor(values, lengths=offsets.diff())
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    graph, counter = compiled(layer)
    for users, rows, count in SIZES:
        history = wrap(torch.randn(rows, WIDTH), random_offsets(users, rows))
        targets = wrap(torch.randn(count, WIDTH), random_offsets(users, count))
        out, expected = graph(targets, history), layer(targets, history)
        assert type(out) is type(targets)
        torch.testing.assert_close(jm.Jagged.wrap(out).values, jm.Jagged.wrap(expected).values)
    assert counter.frame_count == 1


@pytest.mark.parametrize("form", ["map", "counts"])
def test_layer_with_candidates(form):
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    graph, counter = compiled(layer)
    for users, rows, count in SIZES:
        users_of = torch.randint(users, (count,))
        if form == "map":
            index = jm.CandidateIndex.from_map(users_of, users)
        else:
            index = jm.CandidateIndex.from_counts(torch.bincount(users_of, minlength=users))
        inputs = torch.randn(count, 3, WIDTH), (torch.randn(rows, WIDTH), random_offsets(users, rows)), index
        out = graph(*inputs)
        torch.testing.assert_close(out, layer(*inputs))
        out.sum().backward()
    assert counter.frame_count == 1


def compress_inputs(users, _, count):
    """Candidate embeddings, user embeddings and vendor embeddings for 3 users of each vendor, and the maps of users and vendors."""
    candidates, shared, vendors = torch.randn(count, 10, WIDTH), torch.randn(users, 9, WIDTH), torch.randn(3 * users, 8, WIDTH)
    return candidates, shared, vendors, torch.randint(users, (count,)), torch.randint(3 * users, (count,))


def test_compressing_layer_with_keyed_tensors():
    torchrec = pytest.importorskip("torchrec")
    names = [str(i) for i in range(10)]
    layer = jm.LinearCompressEmbedding(10, 4, 9, candidate_features=names[::-1], user_features=names[:9])
    graph, counter = compiled(layer)
    for sizes in SIZES:
        candidates, shared, _, users_of, _ = compress_inputs(*sizes)
        keyed = [torchrec.KeyedTensor(list(map(str, range(x.shape[1]))), [WIDTH] * x.shape[1], x.flatten(1)) for x in (candidates, shared)]
        out = graph(*keyed, jm.CandidateIndex.from_map(users_of, sizes[0]))
        torch.testing.assert_close(out, layer(candidates.flip(1), shared, users_of))
        out.sum().backward()
    assert counter.frame_count == 1


def test_inductor():
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    torch._dynamo.reset()
    graph = torch.compile(layer, fullgraph=True, dynamic=True)
    for users, rows, _ in SIZES[:2]:
        inputs = torch.randn(users, 3, WIDTH), (torch.randn(rows, WIDTH), random_offsets(users, rows))
        expected = torch.autograd.grad(layer(*inputs).square().sum(), list(layer.parameters()))
        torch.testing.assert_close(torch.autograd.grad(graph(*inputs).square().sum(), list(layer.parameters())), expected)


class Ranker(torch.nn.Module):
    """Tensors in, tensors out: what is exported for serving."""

    def __init__(self):
        super().__init__()
        self.attention = jm.JaggedTargetAttention(WIDTH, HEADS)

    def forward(self, targets, history, offsets, candidate_to_user):
        index = jm.CandidateIndex.from_map(candidate_to_user, offsets.shape[0] - 1)
        return self.attention(targets, (history, offsets), index)


def ranker_inputs(users, rows, count):
    return torch.randn(count, 1, WIDTH), torch.randn(rows, WIDTH), random_offsets(users, rows), torch.randint(users, (count,))


def test_export_with_users_candidates_and_rows_dynamic():
    model = Ranker()
    candidates, rows, boundaries = (torch.export.Dim(name) for name in ("candidates", "rows", "boundaries"))
    shapes = dict(targets={0: candidates}, history={0: rows}, offsets={0: boundaries}, candidate_to_user={0: candidates})
    exported = torch.export.export(model, ranker_inputs(*SIZES[0]), dynamic_shapes=shapes).module()
    for sizes in [*SIZES, (2, 3, 400)]:
        inputs = ranker_inputs(*sizes)
        torch.testing.assert_close(exported(*inputs), model(*inputs))


class Compressor(torch.nn.Module):
    """Three levels, the users' by a CandidateIndex made in the graph."""

    def __init__(self):
        super().__init__()
        self.compress = jm.LinearCompressEmbedding(10, 4, (9, 8))

    def forward(self, candidates, shared, vendors, users_of, vendors_of):
        index = jm.CandidateIndex.from_map(users_of, shared.shape[0])
        return self.compress(candidates, [shared, vendors], [index, vendors_of])


def test_export_of_linear_compress_with_all_batch_sizes_dynamic():
    model = Compressor()
    count, users, vendors = (torch.export.Dim(name) for name in ("count", "users", "vendors"))
    shapes = dict(candidates={0: count}, shared={0: users}, vendors={0: vendors}, users_of={0: count}, vendors_of={0: count})
    exported = torch.export.export(model, compress_inputs(*SIZES[0]), dynamic_shapes=shapes).module()
    for sizes in [*SIZES, (2, 0, 400)]:
        inputs = compress_inputs(*sizes)
        torch.testing.assert_close(exported(*inputs), model(*inputs))


class Scorer(torch.nn.Module):
    """HSTU's attention: the mask is made of an input."""

    def forward(self, x, offsets, num_targets, output_scale):
        mask = jm.AttentionMask(causal=True, num_targets=num_targets)
        return F.jagged_attention(x, x, x, offsets, mask=mask, activation="silu", output_scale=output_scale)


def scorer_inputs(users, rows, _):
    offsets = random_offsets(users, rows)
    return torch.randn(rows, HEADS, DIM), offsets, random_targets(offsets), torch.rand(users)


def test_export_of_masked_attention():
    users, rows = torch.export.Dim("users"), torch.export.Dim("rows")
    shapes = dict(x={0: rows}, offsets={0: users + 1}, num_targets={0: users}, output_scale={0: users})
    exported = torch.export.export(Scorer(), scorer_inputs(*SIZES[0]), dynamic_shapes=shapes).module()
    for sizes in SIZES:
        inputs = scorer_inputs(*sizes)
        torch.testing.assert_close(exported(*inputs), Scorer()(*inputs))


class BlockEncoder(torch.nn.Module):
    """The function with given positions, then the layer with its own."""

    def __init__(self):
        super().__init__()
        self.attention = jm.BlockDiagonalSelfAttention(WIDTH, HEADS, block_size=16, rotary="qkv", max_seqlen=1000)
        self.tables = jm.Rotary.from_frequencies(DIM, 1000)

    def forward(self, x, offsets, positions):
        heads = x.unflatten(1, (HEADS, DIM))
        rotary = jm.Rotary(self.tables.cos, self.tables.sin, positions=positions)
        out = F.block_diagonal_attention(heads, heads, heads, offsets, block_size=32, rotary=rotary)
        return self.attention((out.flatten(1), offsets))[0]


def encoder_inputs(users, rows, _):
    return torch.randn(rows, WIDTH), random_offsets(users, rows), torch.randint(1000, (rows,))


def test_export_of_block_diagonal_attention():
    model, rows, boundaries = BlockEncoder(), torch.export.Dim("rows"), torch.export.Dim("boundaries")
    shapes = dict(x={0: rows}, offsets={0: boundaries}, positions={0: rows})
    exported = torch.export.export(model, encoder_inputs(*SIZES[0]), dynamic_shapes=shapes).module()
    for sizes in [*SIZES, (2, 700, 0)]:
        inputs = encoder_inputs(*sizes)
        torch.testing.assert_close(exported(*inputs), model(*inputs))


def test_symbolic_trace_of_block_diagonal_attention(offsets_of):
    rotary = jm.Rotary.from_frequencies(4, 10)

    class Attention(torch.nn.Module):
        def forward(self, x, offsets):
            return F.block_diagonal_attention(x, x, x, offsets, rotary=rotary).relu()

    traced = torch.fx.symbolic_trace(Attention())
    inputs = torch.randn(9, 2, 4), offsets_of([4, 5])
    assert torch.equal(traced(*inputs), Attention()(*inputs))


def test_symbolic_trace_keeps_the_functions_whole(offsets_of):
    class Attention(torch.nn.Module):
        def forward(self, x, offsets):
            return F.jagged_attention(x, x, x, offsets).relu()

    traced = torch.fx.symbolic_trace(Attention())
    assert [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"] == ["jagged_attention"]
    x, offsets = torch.randn(9, 2, 4), offsets_of([4, 5])
    assert torch.equal(traced(x, offsets), Attention()(x, offsets))


def test_symbolic_trace_keeps_the_jagged_operators_whole(offsets_of):
    class Model(torch.nn.Module):
        def forward(self, x, y, offsets):
            return F.jagged_softmax(F.jagged_dense_bmm(x, y, offsets), offsets)

    traced = torch.fx.symbolic_trace(Model())
    names = [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"]
    assert names == ["jagged_dense_bmm", "jagged_softmax"]
    inputs = torch.randn(9, 4), torch.randn(2, 4, 3), offsets_of([4, 5])
    assert torch.equal(traced(*inputs), Model()(*inputs))


def test_symbolic_trace_of_a_mask(offsets_of):
    class Attention(torch.nn.Module):
        def forward(self, x, offsets, output_scale):
            mask = jm.AttentionMask(causal=True, window=(3, None))
            return F.jagged_attention(x, x, x, offsets, mask=mask, activation="relu", output_scale=output_scale)

    traced = torch.fx.symbolic_trace(Attention())
    inputs = torch.randn(9, 2, 4), offsets_of([4, 5]), torch.rand(2)
    assert torch.equal(traced(*inputs), Attention()(*inputs))


def test_symbolic_trace_of_linear_compress():
    layer = jm.LinearCompressEmbedding(10, 4, 9)
    traced = torch.fx.symbolic_trace(layer)
    assert [node.target.__name__ for node in traced.graph.nodes if node.op == "call_function"] == ["_dense", "_dense", "linear_compress"]
    candidates, shared, _, users_of, _ = compress_inputs(*SIZES[0])
    assert torch.equal(traced(candidates, shared, users_of), layer(candidates, shared, users_of))
