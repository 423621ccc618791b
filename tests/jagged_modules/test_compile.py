"""torch.compile of the functions and layers: one graph for batches of all sizes."""

import sys

import pytest
import torch
from marks import slow_after

import jagged_modules as jm
from jagged_modules import functional as F

from .graph_cases import (
    DIM,
    HEADS,
    SIZES,
    WIDTH,
    compiled,
    compress_inputs,
    random_offsets,
    random_targets,
)


def assert_compiles_once(function, batches) -> None:
    """One graph for all batches; values and gradients of every floating-point input as without
    compilation."""
    graph, counter = compiled(function)
    for inputs in batches:
        results = []
        for call in (function, graph):
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
            out = call(*leaves)
            results.append(
                [
                    out,
                    *torch.autograd.grad(
                        out.square().sum(), [x for x in leaves if x.requires_grad]
                    ),
                ]
            )
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


def qkv(q_rows, kv_rows):
    return (
        torch.randn(q_rows, HEADS, DIM),
        torch.randn(kv_rows, HEADS, DIM),
        torch.randn(kv_rows, HEADS, DIM),
    )


def test_self_attention():
    batches = [(*qkv(rows, rows), random_offsets(users, rows)) for users, rows, _ in SIZES]
    assert_compiles_once(lambda q, k, v, offsets: F.jagged_attention(q, k, v, offsets), batches)


def test_cross_attention():
    batches = [
        (*qkv(c, rows), random_offsets(users, c), random_offsets(users, rows))
        for users, rows, c in SIZES
    ]
    assert_compiles_once(lambda *x: F.jagged_attention(*x, scale=0.2), batches)


def test_self_target_attention():
    batches = [
        (*qkv(rows, rows), qkv(c, 0)[0], random_offsets(users, rows), random_offsets(users, c))
        for users, rows, c in SIZES
    ]

    def attend(q, k, v, q_candidates, offsets, candidate_offsets):
        return torch.cat(F.self_target_attention(q, q_candidates, k, v, offsets, candidate_offsets))

    assert_compiles_once(attend, batches)


@slow_after(1, "activation", ["softmax", "silu"])
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


@slow_after(1, "activation", ["softmax", "silu"])
@pytest.mark.parametrize("given", ["defaults", "everything"])
def test_bias_made_in_the_graph(given, activation):
    """Tables that serve segments of all lengths; boundaries are constants of the graph, or
    inputs."""

    def attend(q, k, v, position, time, timestamps, boundaries, offsets):
        others = (
            dict(
                boundaries=boundaries, query_timestamps=timestamps + 5, query_shift=offsets[1:] % 3
            )
            if given == "everything"
            else {}
        )
        bias = jm.RelativeBias(position, time, timestamps, **others)
        return F.jagged_attention(
            q, k, v, offsets, mask=jm.AttentionMask(causal=True), activation=activation, bias=bias
        )

    batches = []
    for users, rows, _ in SIZES:
        tables = torch.randn(2 * max(SIZES)[1] + 299), torch.randn(HEADS, 10)
        edges = torch.randint(100, (9,)).sort().values
        batches.append(
            (
                *qkv(rows, rows),
                *tables,
                torch.randint(200, (rows,)),
                edges,
                random_offsets(users, rows),
            )
        )
    assert_compiles_once(attend, batches)


def test_bias_made_outside_of_the_graph():
    def attend(q, k, v, offsets, bias):
        return F.jagged_attention(q, k, v, offsets, activation="silu", bias=bias)

    graph, counter = compiled(attend)
    for users, rows, _ in SIZES:
        bias = jm.RelativeBias(
            torch.randn(301), torch.randn(HEADS, 10), torch.randint(200, (rows,))
        )
        inputs = *qkv(rows, rows), random_offsets(users, rows), bias
        torch.testing.assert_close(graph(*inputs), attend(*inputs))
    assert counter.frame_count == 1


def in_graph(layer):
    """The layer on a Jagged that the graph makes."""
    return lambda values, offsets, longest: layer(jm.Jagged(values, offsets, longest)).values


def score_cached(stack):
    def serve(values, offsets, longest):
        history = jm.Jagged(values, offsets, longest)
        return stack.score(history, stack.cache(history)).values

    return serve


def attend_rows(q_offsets=None, kv_offsets=None):
    """Attention of rows with sizes that follow from the batch's longest segment."""

    def attend(values, offsets, longest):
        x = values.unflatten(1, (HEADS, -1))
        options = dict(max_seqlen_q=longest, max_seqlen_kv=longest)
        operands = x[:3] if q_offsets else x, *([x[:3]] * 2 if kv_offsets else [x, x])
        options = {} if q_offsets or kv_offsets else options
        return F.jagged_attention(
            *operands,
            q_offsets or offsets,
            kv_offsets or offsets,
            activation="silu",
            output_scale=1 / longest,
            **options,
        )

    return attend


def attend_to_own_rows(values, offsets, longest):
    """Every row is a candidate of the user of the row."""
    x = values.unflatten(1, (HEADS, -1))
    index = jm.CandidateIndex.from_offsets(offsets)
    options = dict(max_seqlen_q=longest, max_seqlen_kv=longest)
    return F.target_attention(
        x[:, None], x, x, index, offsets, activation="silu", output_scale=longest**-0.5, **options
    )


LONGEST = {  # functions of values, offsets, and the length of the longest segment
    "HSTULayer": lambda: in_graph(jm.HSTULayer(WIDTH, HEADS)),
    "jagged_attention": attend_rows,
    "target_attention": lambda: attend_to_own_rows,
    "jagged_dense_bmm": lambda: (
        lambda x, offsets, n: F.jagged_dense_bmm(
            x, F.jagged_jagged_bmm(x, x, offsets, max_seqlen=n), offsets, max_seqlen=n
        )
    ),
    "jagged_softmax": lambda: lambda x, offsets, n: F.jagged_softmax(x, offsets, max_seqlen=n),
    "jagged_to_padded": lambda: (
        lambda x, offsets, n: F.jagged_to_padded(x, offsets, n, padding_value=1 / n)
    ),
    "jagged_attention-shared-q": lambda: attend_rows(q_offsets="shared"),
    "jagged_attention-shared-kv": lambda: attend_rows(kv_offsets="shared"),
    "HSTULayer-dropout": lambda: in_graph(
        jm.HSTULayer(WIDTH, HEADS, jm.HSTUConfig(dropout=0.1)).eval()
    ),
    "HSTULayer-masked": lambda: in_graph(
        jm.HSTULayer(WIDTH, HEADS, jm.HSTUConfig(contextual_seqlen=2, relative_position=200))
    ),
    "HSTUStack": lambda: in_graph(jm.HSTUStack(WIDTH, HEADS, 2)),
    "HSTUStack-score": lambda: score_cached(jm.HSTUStack(WIDTH, HEADS, 2)),
    "JaggedGDPA": lambda: in_graph(
        jm.JaggedGDPA(
            WIDTH, HEADS, config=jm.GDPAConfig(output_scale=0.3, scale=0.2, dropout=0.1)
        ).eval()
    ),
}


@slow_after(1, "floats_as_inputs", [False, True])
@slow_after(6, "name", LONGEST)
def test_sizes_that_follow_from_the_longest_segment(name, floats_as_inputs):
    """No graph for each length: no number that follows from it is a constant of the graph."""
    function = LONGEST[name]()
    graph, counter = compiled(function, floats_as_inputs)
    compilations = []
    for users, rows, _ in SIZES[:3]:
        offsets, values = random_offsets(users, rows), torch.randn(rows, WIDTH, requires_grad=True)
        results = []
        for call in (function, graph):
            out = call(values, offsets, int(offsets.diff().max()))
            results.append([out, *torch.autograd.grad(out.square().sum(), values)])
        torch.testing.assert_close(*results)
        compilations.append(counter.frame_count)
    assert (
        set(compilations) <= ({1, 2} if floats_as_inputs else {1}) and len(set(compilations)) == 1
    )


@slow_after(1, "kind", ["nested", "Jagged"])
def test_containers_that_know_their_longest_segment(kind):
    """Made outside of the graph. Shortest segments of 0 and 1 rows would take graphs of their own:
    torch compiles sizes 0 and 1 apart."""
    layer = jm.HSTULayer(WIDTH, HEADS)
    graph, counter = compiled(layer)
    for users, rows, _ in SIZES[:3]:
        lengths = torch.full((users,), 2)
        lengths[0] += rows - 2 * users
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        values = torch.randn(rows, WIDTH)
        x = jm.Jagged(values, offsets, int(lengths.max()))
        if kind == "nested":
            x = torch.nested.nested_tensor_from_jagged(
                values, offsets, min_seqlen=2, max_seqlen=x.max_seqlen
            )
        out, expected = graph(x), layer(x)
        assert type(out) is type(x)
        torch.testing.assert_close(jm.Jagged.wrap(out).values, jm.Jagged.wrap(expected).values)
        assert jm.Jagged.wrap(out).max_seqlen == lengths.max()
    assert counter.frame_count == 1


@slow_after(1, "kv_offsets", [None, "shared"])
@pytest.mark.parametrize("kind", ["number", "tensor", "parameter"])
def test_output_scale(kind, kv_offsets):
    def attend(q, k, v, offsets, output_scale):
        factor = {"number": 0.125, "tensor": output_scale.detach(), "parameter": output_scale}[kind]
        return (
            F.jagged_attention(q, k, v, offsets, kv_offsets, activation="silu", output_scale=factor)
            * output_scale.sum()
        )

    batches = [
        (*qkv(rows, rows), random_offsets(users, rows), torch.rand(users))
        for users, rows, _ in SIZES
    ]
    assert_compiles_once(attend, batches)


@pytest.mark.parametrize("shared", ["q", "kv"])
def test_shared_operands(shared):
    if shared == "q":
        batches = [(*qkv(3, rows), random_offsets(users, rows)) for users, rows, _ in SIZES]
        assert_compiles_once(
            lambda q, k, v, offsets: F.jagged_attention(q, k, v, "shared", offsets), batches
        )
    else:
        batches = [(*qkv(rows, 3), random_offsets(users, rows)) for users, rows, _ in SIZES]
        assert_compiles_once(
            lambda q, k, v, offsets: F.jagged_attention(q, k, v, offsets, "shared"), batches
        )


def user_index(form, users, count):
    """The input from which the graph makes the users of the candidates."""
    return (
        torch.randint(users, (count,))
        if form in ("tensor", "map")
        else random_offsets(users, count)
    )


@slow_after(1, "form", ["tensor", "map", "offsets"])
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
        batches.append(
            (
                torch.randn(count, 4, HEADS, DIM),
                k,
                v,
                random_offsets(users, rows),
                user_index(form, users, count),
            )
        )
    assert_compiles_once(attend, batches)


@slow_after(1, "form", ["tensor", "map", "offsets"])
@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_linear_compress(implementation, form):
    def compress(w_user, w_candidate, users, candidates, index):
        if form == "map":
            index = jm.CandidateIndex.from_map(index, users.shape[0])
        elif form == "offsets":
            index = jm.CandidateIndex.from_offsets(index)
        return F.linear_compress(
            (w_user, w_candidate), (users, candidates), index, implementation=implementation
        )

    batches = []
    for users, _, count in SIZES:
        embeddings = torch.randn(users, 9, WIDTH), torch.randn(count, 10, WIDTH)
        batches.append(
            (torch.randn(4, 9), torch.randn(4, 10), *embeddings, user_index(form, users, count))
        )
    assert_compiles_once(compress, batches)


@slow_after(1, "rotary", [None, "qk", "qkv", "given"])
def test_block_diagonal_attention(rotary):
    tables = jm.Rotary.from_frequencies(DIM, 100)

    def attend(q, k, v, offsets, positions):
        made = rotary and jm.Rotary(
            tables.cos,
            tables.sin,
            "qkv" if rotary == "qkv" else "qk",
            positions if rotary == "given" else None,
        )
        return F.block_diagonal_attention(q, k, v, offsets, block_size=16, rotary=made)

    batches = [
        (*qkv(rows, rows), random_offsets(users, rows), torch.randint(100, (rows,)))
        for users, rows, _ in SIZES
    ]
    assert_compiles_once(attend, batches)


@slow_after(1, "rotary", [None, "qk"])
@slow_after(1, "kind", ["pair", "Jagged", "JaggedTensor"])
def test_block_diagonal_layer(kind, rotary):
    torchrec = pytest.importorskip("torchrec")
    wrap = {
        "pair": lambda values, offsets: (values, offsets),
        "Jagged": jm.Jagged,
        "JaggedTensor": lambda values, offsets: torchrec.JaggedTensor(
            values, lengths=offsets.diff()
        ),
    }[kind]
    layer = jm.BlockDiagonalSelfAttention(
        WIDTH, HEADS, block_size=16, rotary=rotary, max_seqlen=100
    )
    graph, counter = compiled(layer)
    for users, rows, _ in SIZES:
        x = wrap(torch.randn(rows, WIDTH), random_offsets(users, rows))
        results = []
        for call in (layer, graph):
            out = call(x)
            assert type(out) is type(x)
            values = jm.Jagged.wrap(out).values
            results.append(
                [values, *torch.autograd.grad(values.square().sum(), list(layer.parameters()))]
            )
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


JAGGED = {
    "jagged_dense_bmm": lambda x, w, offsets: F.jagged_dense_bmm(x, w, offsets),
    "jagged_jagged_bmm": lambda x, w, offsets: F.jagged_jagged_bmm(
        x, F.jagged_dense_bmm(x, w, offsets), offsets
    ),
    "jagged_softmax": lambda x, w, offsets: F.jagged_softmax(x, offsets) * w.sum(),
    "jagged_linear": lambda x, w, offsets: F.jagged_linear(x, w, w[:, 0], offsets, "silu"),
    "jagged_linear-shared": lambda x, w, offsets: F.jagged_linear(
        x, w[0].T, w[0, 0], None, "gelu_taylor"
    ),
    # a float default is traced twice
    "jagged_layer_norm": lambda x, w, offsets: F.jagged_layer_norm(x, eps=1e-6) * w.sum(),
    "jagged_dense_add": lambda x, w, offsets: F.jagged_dense_add(
        x, w.repeat(1, 9, 1)[..., :DIM], offsets
    ),
    "jagged_concat": lambda x, w, offsets: F.jagged_concat([x, x * w.sum()], [offsets, offsets])[0],
    "jagged_split": lambda x, w, offsets: (
        F.jagged_split(x, offsets, offsets.diff(), x.shape[0])[0][0] * w.sum()
    ),
    "jagged_sum": lambda x, w, offsets: F.jagged_sum(x, offsets) * w.sum(),
    "jagged_mean": lambda x, w, offsets: F.jagged_mean(x, offsets) * w.sum(),
    "jagged_max": lambda x, w, offsets: F.jagged_max(x, offsets) * w.sum(),
    "jagged_last": lambda x, w, offsets: F.jagged_sum(*F.jagged_last(x, offsets, 2)) * w.sum(),
    "jagged_between": lambda x, w, offsets: (
        F.jagged_between(x, offsets, times=x[:, 0], start=0, end=offsets[1:].to(x))[0].sum()
        * w.sum()
    ),
    "jagged_select": lambda x, w, offsets: (
        F.jagged_select(x, offsets, offsets[:1].repeat(2), 2 * x.shape[0])[0] * w.sum()
    ),
    "jagged_to_padded": lambda x, w, offsets: F.jagged_to_padded(x, offsets, 100) * w.sum(),
    "padded_to_jagged": lambda x, w, offsets: (
        F.padded_to_jagged(w.repeat(1, 9, 1), offsets, x.shape[0]) * x.sum()
    ),
}


@pytest.mark.parametrize("operator", JAGGED)
def test_jagged_operators(operator):
    batches = []
    for users, rows, _ in SIZES:
        batches.append(
            (torch.randn(rows, DIM), torch.randn(users, DIM, 20), random_offsets(users, rows))
        )
    assert_compiles_once(JAGGED[operator], batches)


@pytest.mark.parametrize("operator", JAGGED)
def test_rows_whose_number_is_read_from_a_tensor(operator):
    """As that of a feature's rows, which a KeyedJaggedTensor reads from its lengths: no branch may
    depend on it."""

    def of_a_feature(x, counts, w, offsets):
        own, _ = x.split(counts.tolist())
        return JAGGED[operator](own, w, offsets)

    batches = []
    for users, rows in [*(size[:2] for size in SIZES), (4, 0)]:
        offsets = random_offsets(users, rows) if rows else torch.zeros(users + 1, dtype=torch.int64)
        x, w = torch.randn(rows + 3, DIM), torch.randn(users, DIM, 20)
        batches.append((x, torch.tensor([rows, 3]), w, offsets))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_compiles_once(of_a_feature, batches)


def test_candidates_whose_number_is_read_from_a_tensor():
    def of_a_feature(x, counts, weights, user_weights, users, users_of):
        sizes = counts.tolist()
        own, of_own = (y.split(sizes)[0] for y in (x, users_of))
        return F.linear_compress((user_weights, weights), (users, own), of_own)

    batches = []
    for users, count in [*(size[::2] for size in SIZES), (4, 0)]:
        rows = torch.randn(count + 3, 9, DIM), torch.tensor([count, 3])
        weights = torch.randn(10, 9), torch.randn(10, 17), torch.randn(users, 17, DIM)
        batches.append((*rows, *weights, torch.randint(users, (count + 3,))))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_compiles_once(of_a_feature, batches)


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


@slow_after(1, "kind", ["pair", "Jagged", "JaggedTensor", "nested"])
def test_layer_with_every_container(kind):
    """The container is made outside of the graph, as a data loader or an embedding does."""
    torchrec = pytest.importorskip("torchrec")
    wrap = {
        "pair": lambda values, offsets: (values, offsets),
        "Jagged": jm.Jagged,
        "JaggedTensor": lambda values, offsets: torchrec.JaggedTensor(
            values, lengths=offsets.diff()
        ),
        "nested": torch.nested.nested_tensor_from_jagged,
    }[kind]
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    graph, counter = compiled(layer)
    for users, rows, _ in SIZES:
        targets = torch.randn(users, 3, WIDTH)
        values = torch.randn(rows, WIDTH)
        offsets = random_offsets(users, rows)
        out = graph(targets, wrap(values, offsets))
        torch.testing.assert_close(out, layer(targets, (values, offsets)))
        out.sum().backward()
    assert counter.frame_count == 1


def test_a_masked_nested_history_and_its_targets():
    """The number of query groups is no guard, with nested tensors' sizes either."""
    mask = jm.AttentionMask(causal=True)
    layer = jm.JaggedSelfTargetAttention(WIDTH, HEADS, mask=mask)
    graph, counter = compiled(layer)
    for users, rows, count in SIZES[:2]:
        values, of_values = torch.randn(rows, WIDTH), random_offsets(users, rows)
        targets, of_targets = torch.randn(count, WIDTH), random_offsets(users, count)
        history = torch.nested.nested_tensor_from_jagged(values, of_values)
        outs = graph(history, torch.nested.nested_tensor_from_jagged(targets, of_targets))
        expected = layer((values, of_values), (targets, of_targets))
        torch.testing.assert_close([x.values() for x in outs], [x for x, _ in expected])
    assert counter.frame_count == 1


@slow_after(1, "kind", ["Jagged", "JaggedTensor"])
def test_layer_gives_the_same_container(kind):
    torchrec = pytest.importorskip("torchrec")
    wrap = (
        jm.Jagged
        if kind == "Jagged"
        else lambda values, offsets: torchrec.JaggedTensor(values, lengths=offsets.diff())
    )
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    graph, counter = compiled(layer)
    for users, rows, count in SIZES:
        history = wrap(torch.randn(rows, WIDTH), random_offsets(users, rows))
        targets = wrap(torch.randn(count, WIDTH), random_offsets(users, count))
        out, expected = graph(targets, history), layer(targets, history)
        assert type(out) is type(targets)
        torch.testing.assert_close(jm.Jagged.wrap(out).values, jm.Jagged.wrap(expected).values)
    assert counter.frame_count == 1


@slow_after(1, "form", ["map", "counts"])
def test_layer_with_candidates(form):
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    graph, counter = compiled(layer)
    for users, rows, count in SIZES:
        users_of = torch.randint(users, (count,))
        if form == "map":
            index = jm.CandidateIndex.from_map(users_of, users)
        else:
            index = jm.CandidateIndex.from_counts(torch.bincount(users_of, minlength=users))
        inputs = (
            torch.randn(count, 3, WIDTH),
            (torch.randn(rows, WIDTH), random_offsets(users, rows)),
            index,
        )
        out = graph(*inputs)
        torch.testing.assert_close(out, layer(*inputs))
        out.sum().backward()
    assert counter.frame_count == 1


def test_compressing_layer_with_keyed_tensors():
    torchrec = pytest.importorskip("torchrec")
    names = [str(i) for i in range(10)]
    layer = jm.LinearCompressEmbedding(
        10, 4, 9, candidate_features=names[::-1], user_features=names[:9]
    )
    graph, counter = compiled(layer)
    for sizes in SIZES:
        candidates, shared, _, users_of, _ = compress_inputs(*sizes)
        keyed = [
            torchrec.KeyedTensor(
                list(map(str, range(x.shape[1]))), [WIDTH] * x.shape[1], x.flatten(1)
            )
            for x in (candidates, shared)
        ]
        out = graph(*keyed, jm.CandidateIndex.from_map(users_of, sizes[0]))
        torch.testing.assert_close(out, layer(candidates.flip(1), shared, users_of))
        out.sum().backward()
    assert counter.frame_count == 1


def test_inductor():
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    torch._dynamo.reset()
    graph = torch.compile(layer, fullgraph=True, dynamic=True)
    for users, rows, _ in SIZES[:2]:
        inputs = (
            torch.randn(users, 3, WIDTH),
            (torch.randn(rows, WIDTH), random_offsets(users, rows)),
        )
        expected = torch.autograd.grad(layer(*inputs).square().sum(), list(layer.parameters()))
        torch.testing.assert_close(
            torch.autograd.grad(graph(*inputs).square().sum(), list(layer.parameters())), expected
        )


@pytest.mark.parametrize("given", [int, torch.Tensor])
def test_inductor_splits_equal_lengths(given):
    """Inductor makes int64 of the sums of equal int32 lengths, and what is behind reads int32."""
    offsets = torch.tensor([0, 3, 5, 9, 14], dtype=torch.int32)

    def call(x, offsets):
        first = 2 if given is int else torch.full((len(offsets) - 1,), 2, dtype=torch.int32)
        return F.jagged_split(x, offsets, first, 2 * (len(offsets) - 1))

    torch._dynamo.reset()
    x = torch.randn(14, 3)
    graph = torch.compile(call, dynamic=True)
    torch.testing.assert_close(graph(x, offsets), call(x, offsets), rtol=0, atol=0)


CACHING = {
    "target attention": lambda: jm.JaggedTargetAttention(WIDTH, HEADS),
    "gdpa": lambda: jm.JaggedGDPA(WIDTH, HEADS),
    "hstu": lambda: jm.HSTUStack(WIDTH, HEADS, 2, jm.HSTUConfig(scaling_seqlen=50)),
    "hstu-limited": lambda: jm.HSTUStack(
        WIDTH, HEADS, 2, jm.HSTUConfig(scaling_seqlen=50, max_attn_len=9, relative_position=200)
    ),
}


@slow_after(1, "name", CACHING)
def test_cached_histories_and_new_events(name):
    """cache, append and score in one graph."""
    layer = CACHING[name]()

    def serve(history, events, targets, offsets, event_offsets, target_offsets):
        cache = layer.cache((history, offsets))
        _, added = layer.append((events, event_offsets), cache)
        if layer.max_cached_rows is None:  # else the number of rows that are kept depends on values
            cache = cache.append(added)
        scores, _ = layer.score((targets, target_offsets), cache)
        return torch.cat([scores.flatten(), *(x.values.flatten() for x in added.layers)])

    graph, counter = compiled(serve)
    compilations = []
    for users, rows, c in SIZES:
        sizes = rows, c, 2 * c + 3
        inputs = *(torch.randn(n, WIDTH) for n in sizes), *(random_offsets(users, n) for n in sizes)
        with torch.no_grad():
            torch.testing.assert_close(graph(*inputs), serve(*inputs))
        compilations.append(counter.frame_count)
    assert set(compilations) == {1}


@pytest.mark.gpu
def test_offsets_that_are_a_slice_in_the_graph():
    """Inductor searches a slice of a tensor from the tensor's start on (torch 2.11)."""

    def most(x, bounds):
        return F.jagged_max(x, bounds[1:])

    x, bounds = torch.randn(9, 2, device="cuda"), torch.tensor([-7, 0, 4, 4, 9], device="cuda")
    torch._dynamo.reset()
    graph = torch.compile(most, fullgraph=True, dynamic=True)
    assert torch.equal(graph(x, bounds), most(x, bounds))
