"""F.target_attention and JaggedTargetAttention: equal to the replicated computation, without
replicating anything."""

import copy
import pickle

import accuracy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from marks import raising

import jagged_modules as jm
from jagged_modules import functional as F


def replicated_attention(q, k, v, candidate_to_user, kv_offsets):
    """The user's keys and values copied for every candidate, then dense softmax: q [C, n_q, H, D]
    -> [C, n_q, H, Dv]."""
    outputs = []
    for query, user in zip(q, candidate_to_user.tolist(), strict=True):
        rows = slice(int(kv_offsets[user]), int(kv_offsets[user + 1]))
        group = q.shape[2] // k.shape[1]
        keys, values = k[rows].repeat_interleave(group, 1), v[rows].repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", query, keys) * q.shape[3] ** -0.5
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
    return torch.stack(outputs) if outputs else q.new_zeros(0, *q.shape[1:3], v.shape[2])


def check(candidate_to_user, kv_offsets, operator, q, k, v, **options):
    """Check target attention of q `[C, n_q, H, D]` and its gradients against the attention of each
    user's candidates together."""
    order, rows = torch.argsort(candidate_to_user, stable=True), q.shape[1]
    counts = torch.bincount(candidate_to_user, minlength=len(kv_offsets) - 1)
    q_offsets = rows * torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])

    def bounds(q, k, v, *rest):
        queries, do = (x[order].flatten(0, 1) for x in (q, rest[-1]))
        grouped = accuracy.attention(queries, k, v, do, q_offsets, kv_offsets, **options)
        own_order = {
            name: grouped[name].map(lambda x: x.unflatten(0, (-1, rows))[order.argsort()])
            for name in ("out", "dq")
        }
        return grouped | own_order

    tensors = dict(q=q, k=k, v=v) | (
        {"output_scale": options["output_scale"]} if "output_scale" in options else {}
    )
    accuracy.check(operator, bounds, tensors)


@pytest.fixture(scope="module")
def attention():
    """JaggedTargetAttention in float64: width 12, targets of width 10, 3 heads."""
    torch.manual_seed(0)
    return jm.JaggedTargetAttention(12, 3, target_dim=10).double()


def replicated_layer(layer, targets, history_values, candidate_to_user, kv_offsets):
    """The layer on [C, n_q, E_t] targets, by `replicated_attention`."""
    q = layer.q_proj(targets).unflatten(-1, (layer.num_heads, layer.head_dim))
    k, v = (
        layer.kv_proj(history_values).unflatten(1, (2, layer.num_heads, layer.head_dim)).unbind(1)
    )
    return layer.out_proj(replicated_attention(q, k, v, candidate_to_user, kv_offsets).flatten(2))


def outputs_and_gradients(run, layer, *inputs):
    """Values, and gradients of inputs and of every parameter, for a fixed random gradient of the
    output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = run(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    return [
        out,
        *torch.autograd.grad(
            out, [*inputs, *layer.parameters()], grad, allow_unused=True, materialize_grads=True
        ),
    ]


# -- the function ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_q", [1, 2, 5])
@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 0, 5], [0, 0, 7], [0, 0, 0]])
@pytest.mark.parametrize("shuffled", [False, True], ids=["grouped", "shuffled"])
def test_equals_replicated_attention(counts, n_q, shuffled, offsets_of):
    users = torch.arange(3).repeat_interleave(torch.tensor(counts))
    if shuffled:
        users = users[torch.randperm(len(users))]
    index, offsets = jm.CandidateIndex.from_map(users, 3), offsets_of([4, 6, 0])
    tensors = torch.randn(len(users), n_q, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 6)
    check(users, offsets, lambda q, k, v: F.target_attention(q, k, v, index, offsets), *tensors)


@pytest.mark.parametrize("users", [[0, 2, 2], [2, 0, 1, 2, 0], []], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_index_tensor_gives_the_results_of_a_candidate_index(
    users, dtype, attention, offsets_of
):
    users, offsets = torch.tensor(users, dtype=dtype), offsets_of([4, 0, 6])
    index = jm.CandidateIndex.from_map(users, 3)
    q, k, v = torch.randn(len(users), 2, 2, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    assert torch.equal(
        F.target_attention(q, k, v, users, offsets), F.target_attention(q, k, v, index, offsets)
    )
    targets = torch.randn(len(users), 2, 10).double()
    history = (torch.randn(10, 12).double(), offsets)
    assert torch.equal(attention(targets, history, users), attention(targets, history, index))


def test_ten_thousand_candidates_of_one_user(offsets_of):
    index = jm.CandidateIndex.from_counts(torch.tensor([2, 10_000, 0]))
    offsets = offsets_of([3, 20, 5])
    tensors = torch.randn(10_002, 1, 2, 8), torch.randn(28, 2, 8), torch.randn(28, 2, 8)
    check(
        index.candidate_to_user,
        offsets,
        lambda q, k, v: F.target_attention(q, k, v, index, offsets),
        *tensors,
    )


def test_a_history_shared_by_all_users(offsets_of):
    index = jm.CandidateIndex.from_map(torch.tensor([1, 0, 1]), 2)
    tensors = (torch.randn(n, 2, 8) for n in (6, 5, 5))
    q, k, v = tensors
    of_one = torch.zeros(3, dtype=torch.int64)
    check(
        of_one,
        offsets_of([5]),
        lambda q, k, v: F.target_attention(q, k, v, index, "shared"),
        q.unflatten(0, (3, 2)),
        k,
        v,
    )


def test_gradcheck(offsets_of):
    index = jm.CandidateIndex.from_map(torch.tensor([2, 0, 2]), 3)
    inputs = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 2, 2, 2), (5, 1, 2), (5, 1, 3))
    ]
    assert torch.autograd.gradcheck(
        lambda q, k, v: F.target_attention(q, k, v, index, offsets_of([3, 1, 1])), inputs
    )


@pytest.mark.parametrize("shuffled", [False, True], ids=["grouped", "shuffled"])
def test_memory_does_not_grow_with_candidates_times_history(shuffled, one_thread):
    """In a training step nothing is allocated, or saved for the backward, that is larger than what
    exists once: the candidates' rows or the histories' rows."""
    users, candidates, history, width = 4, 40_000, 1000, 16
    layer = jm.JaggedTargetAttention(width, 2)
    candidate_to_user = torch.arange(users).repeat_interleave(candidates // users)
    if shuffled:
        candidate_to_user = candidate_to_user[torch.randperm(candidates)]
    index = jm.CandidateIndex.from_map(candidate_to_user, users)
    targets = torch.randn(candidates, 1, width, requires_grad=True)
    values = torch.randn(users * history, width, requires_grad=True)
    saved = []

    def save(x):
        saved.append(x.untyped_storage().nbytes())
        return x

    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
        torch.autograd.graph.saved_tensors_hooks(save, lambda x: x),
    ):
        layer(targets, (values, torch.arange(users + 1) * history), index).sum().backward()
    rows = max(candidates, 2 * users * history) * width * 4
    assert 0 < max(saved) <= rows, "k and v of the histories are the largest tensors saved"
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= rows, (
        "far from a score or a copy of a key for every candidate and history row"
    )


@pytest.mark.parametrize("users", [[0, 0, 2, 2, 2], [2, 0, 2, 2, 0]], ids=["grouped", "shuffled"])
def test_activations_with_a_scale_for_each_user(users, offsets_of):
    index = jm.CandidateIndex.from_map(torch.tensor(users), 3)
    offsets = offsets_of([4, 6, 3])
    scale = torch.tensor([0.5, 2.0, 0.1])

    def operator(q, k, v, scale):
        return F.target_attention(q, k, v, index, offsets, activation="silu", output_scale=scale)

    tensors = torch.randn(5, 1, 2, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8)
    check(
        torch.tensor(users),
        offsets,
        operator,
        *tensors,
        activation="silu",
        output_scale=scale.requires_grad_(),
    )


# -- the layer -------------------------------------------------------------------------------------


@given(data=st.data())
def test_candidates_equal_replicated_histories(data, attention, offsets_of):
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    users = torch.tensor(
        data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=12)), dtype=torch.int64
    )
    n_q = data.draw(st.integers(1, 5))
    offsets, index = offsets_of(lengths), jm.CandidateIndex.from_map(users, len(lengths))
    inputs = (
        torch.randn(len(users), n_q, 10, dtype=torch.float64),
        torch.randn(sum(lengths), 12, dtype=torch.float64),
    )
    actual = outputs_and_gradients(
        lambda t, h: attention(t, (h, offsets), index), attention, *inputs
    )
    expected = outputs_and_gradients(
        lambda t, h: replicated_layer(attention, t, h, users, offsets), attention, *inputs
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("targets_per_row", [0, 1, 3])
def test_dense_targets(targets_per_row, attention, offsets_of):
    offsets = offsets_of([4, 0, 7])
    inputs = (
        torch.randn(3, targets_per_row, 10, dtype=torch.float64),
        torch.randn(11, 12, dtype=torch.float64),
    )
    actual = outputs_and_gradients(lambda t, h: attention(t, (h, offsets)), attention, *inputs)
    expected = outputs_and_gradients(
        lambda t, h: replicated_layer(attention, t, h, torch.arange(3), offsets), attention, *inputs
    )
    torch.testing.assert_close(actual, expected)


def test_jagged_targets(attention, offsets_of):
    offsets, counts = offsets_of([4, 0, 7]), [2, 1, 3]
    users = torch.arange(3).repeat_interleave(torch.tensor(counts))
    inputs = torch.randn(6, 10, dtype=torch.float64), torch.randn(11, 12, dtype=torch.float64)
    actual = outputs_and_gradients(
        lambda t, h: attention((t, offsets_of(counts)), (h, offsets))[0], attention, *inputs
    )
    expected = outputs_and_gradients(
        lambda t, h: replicated_layer(attention, t[:, None], h, users, offsets).flatten(0, 1),
        attention,
        *inputs,
    )
    torch.testing.assert_close(actual, expected)


def test_an_empty_history_gives_the_output_bias(attention, offsets_of):
    out = attention(
        torch.randn(2, 3, 10, dtype=torch.float64),
        (torch.zeros(0, 12, dtype=torch.float64), offsets_of([0, 0])),
    )
    assert torch.equal(out, attention.out_proj.bias.expand(2, 3, 12))


def test_containers(container, attention, offsets_of):
    history_values = torch.randn(11, 12, dtype=torch.float64)
    target_values = torch.randn(6, 10, dtype=torch.float64)
    dense = torch.randn(3, 2, 10, dtype=torch.float64)
    history = container(history_values, offsets_of([4, 0, 7]))
    targets = container(target_values, offsets_of([2, 1, 3]))
    expected, _ = attention(
        (target_values, offsets_of([2, 1, 3])), (history_values, offsets_of([4, 0, 7]))
    )
    out = attention(targets, history)
    assert type(out) is type(targets)
    assert torch.equal(jm.Jagged.wrap(out).values, expected)
    assert torch.equal(jm.Jagged.wrap(out).offsets, offsets_of([2, 1, 3]))
    assert torch.equal(
        attention(dense, history), attention(dense, (history_values, offsets_of([4, 0, 7])))
    )


def test_embedding_collection_outputs():
    torchrec = pytest.importorskip("torchrec")
    tables = [
        torchrec.EmbeddingConfig(
            name="table", embedding_dim=12, num_embeddings=50, feature_names=["history", "target"]
        )
    ]
    collection = torchrec.EmbeddingCollection(tables=tables)
    ids = torchrec.KeyedJaggedTensor(
        ["history", "target"],
        torch.randint(50, (12,)),
        lengths=torch.tensor([3, 0, 4, 1, 1, 3], dtype=torch.int32),
    )
    embeddings = collection(ids)
    assert embeddings["history"].offsets_or_none() is None
    layer = jm.JaggedTargetAttention(12, 2)
    out = layer(embeddings["target"], embeddings["history"])
    assert isinstance(out, torchrec.JaggedTensor) and out.lengths().tolist() == [1, 1, 3]
    out.values().sum().backward()
    (weight,) = collection.parameters()
    assert weight.grad.abs().sum() > 0


def test_state_dict_round_trip(offsets_of):
    layer, other = jm.JaggedTargetAttention(8, 2), jm.JaggedTargetAttention(8, 2)
    targets, history = torch.randn(2, 3, 8), (torch.randn(5, 8), offsets_of([2, 3]))
    assert not torch.equal(layer(targets, history), other(targets, history))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(targets, history), other(targets, history))


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["deepcopy", "pickle"],
)
def test_copies(clone, offsets_of):
    layer = jm.JaggedTargetAttention(8, 2)
    targets, history = torch.randn(2, 3, 8), (torch.randn(5, 8), offsets_of([2, 3]))
    twin = clone(layer)
    assert torch.equal(twin(targets, history), layer(targets, history))
    twin(targets, history).sum().backward()
    assert layer.q_proj.weight.grad is None and twin.q_proj.weight.grad is not None


def test_meta_parameters_are_materialised_by_reset_parameters():
    layer = jm.JaggedTargetAttention(8, 2, device="meta")
    assert all(x.is_meta for x in layer.parameters())
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    expected = jm.JaggedTargetAttention(8, 2).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in layer.state_dict().items())


def test_shapes_on_the_meta_device():
    layer = jm.JaggedTargetAttention(8, 2, device="meta")
    history = torch.empty(11, 8, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    assert layer(torch.empty(3, 2, 8, device="meta"), history).shape == (3, 2, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, offsets_of):
    layer = jm.JaggedTargetAttention(8, 2).to(dtype)
    assert (
        layer(
            torch.randn(2, 3, 8, dtype=dtype), (torch.randn(5, 8, dtype=dtype), offsets_of([2, 3]))
        ).dtype
        == dtype
    )


def test_training_step_changes_every_parameter(offsets_of):
    layer = jm.JaggedTargetAttention(8, 2)
    before = copy.deepcopy(layer.state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.randn(2, 3, 8), (torch.randn(5, 8), offsets_of([2, 3]))).square().sum().backward()
    optimizer.step()
    unchanged = [name for name, x in layer.state_dict().items() if torch.equal(x, before[name])]
    assert not unchanged


def test_traced_by_torchrec_as_a_leaf(offsets_of):
    tracer = pytest.importorskip("torchrec.fx").Tracer(leaf_modules=["JaggedTargetAttention"])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = jm.JaggedTargetAttention(8, 2)

        def forward(self, targets, history):
            return self.attention(targets, history).relu()

    model = Model()
    traced = torch.fx.GraphModule(model, tracer.trace(model))
    targets, history = torch.randn(2, 3, 8), (torch.randn(5, 8), offsets_of([2, 3]))
    assert torch.equal(traced(targets, history), model(targets, history))


# -- bad input -------------------------------------------------------------------------------------


GOOD = dict(
    q=torch.randn(3, 2, 2, 8),
    k=torch.randn(5, 2, 8),
    v=torch.randn(5, 2, 8),
    kv_offsets=torch.tensor([0, 3, 5]),
)
INDEX = jm.CandidateIndex.from_counts(torch.tensor([1, 2]))
WRONG_CANDIDATES = (
    r"candidates must be a CandidateIndex \(from_jagged makes it of a container\) or a"
    r" torch.Tensor, got "
)
BAD_CALLS = [
    *raising(
        ValueError,
        {
            r"q must have shape \[num_candidates, n_q, H, D\], got \[3, 2, 8\]": dict(
                q=torch.randn(3, 2, 8)
            ),
            r"^candidates must be 1-D, got shape \[1, 3\]": dict(
                candidates=torch.tensor([[0, 1, 1]])
            ),
            "^candidates must be 0 to num_users - 1 = 1, got values 0 to 2": dict(
                candidates=torch.tensor([0, 2, 1])
            ),
            "candidates describe 2 candidates, the queries have 3": dict(
                candidates=torch.tensor([0, 1])
            ),
            "candidates describe 3 candidates, the queries have 4": dict(q=torch.randn(4, 2, 2, 8)),
            "candidates describe 2 users, the history has 3": dict(
                kv_offsets=torch.tensor([0, 2, 3, 5])
            ),
            "describe 2 candidates, the queries have 3": dict(
                candidates=jm.CandidateIndex.from_map(torch.tensor([1, 0]), 2)
            ),
            '^kv_offsets must be a tensor or "shared", got "all"': dict(
                kv_offsets="all", candidates=torch.tensor([0, 1, 1])
            ),
            r"^kv_offsets must be 1-D, got shape \[\]": dict(kv_offsets=torch.tensor(5)),
            r"^kv_offsets must have shape \[B \+ 1\], got \[0\]": dict(
                kv_offsets=torch.tensor([], dtype=torch.int64)
            ),
            "kv_offsets must end at the number of rows, 5, got 6": dict(
                kv_offsets=torch.tensor([0, 3, 6])
            ),
            "kv_offsets must have segments of at most max_seqlen_kv = 2 rows, got 3": dict(
                max_seqlen_kv=2
            ),
        },
    ),
    *raising(
        TypeError,
        {
            "q must be a torch.Tensor, got NoneType": dict(q=None),
            "^candidates must be int32 or int64, got torch.float32": dict(
                candidates=torch.tensor([0.0, 1.0, 1.0])
            ),
            'a CandidateIndex where kv_offsets is "shared", got Tensor': dict(
                candidates=torch.tensor([0, 1, 1]), kv_offsets="shared"
            ),
            "^kv_offsets must be a torch.Tensor.*got list": dict(
                kv_offsets=[0, 3, 5], candidates=torch.tensor([0, 1, 1])
            ),
            "kv_offsets must be a torch.Tensor.*got NoneType": dict(kv_offsets=None),
        },
    ),
    (dict(candidates=[0, 1, 1]), TypeError, WRONG_CANDIDATES + "list"),
]


@pytest.mark.parametrize(
    "change, error, message", BAD_CALLS, ids=[message[:40] for _, _, message in BAD_CALLS]
)
def test_bad_input_of_the_function(change, error, message):
    with pytest.raises(error, match=message):
        F.target_attention(**(GOOD | dict(candidates=INDEX) | change))


BAD_LAYERS = [
    *raising(
        ValueError,
        {
            "embedding_dim must be a multiple of num_heads, got 10 and 4": dict(
                embedding_dim=10, num_heads=4
            ),
            "num_heads must be at least 1, got 0": dict(embedding_dim=8, num_heads=0),
            "embedding_dim must be at least 1, got 0": dict(embedding_dim=0, num_heads=1),
            "target_dim must be at least 1, got 0": dict(
                embedding_dim=8, num_heads=2, target_dim=0
            ),
            "embedding_dim / num_heads must be at most 256, got 512": dict(
                embedding_dim=1024, num_heads=2
            ),
        },
    ),
    *raising(
        TypeError,
        {
            "embedding_dim must be an int, got float": dict(embedding_dim=8.0, num_heads=1),
            "num_heads must be an int, got str": dict(embedding_dim=8, num_heads="2"),
        },
    ),
]


@pytest.mark.parametrize(
    "arguments, error, message", BAD_LAYERS, ids=[message[:40] for _, _, message in BAD_LAYERS]
)
def test_bad_constructor(arguments, error, message):
    with pytest.raises(error, match=message):
        jm.JaggedTargetAttention(**arguments)


HISTORY = torch.randn(5, 8), torch.tensor([0, 2, 5])
BAD_FORWARDS = [
    *raising(
        ValueError,
        {
            r"targets must have shape \[B, T, E_t\] with E_t = 8, got \[2, 3, 7\]": (
                (torch.randn(2, 3, 7), HISTORY),
            ),
            "targets must have the layer's dtype, torch.float32, got torch.float64": (
                (torch.randn(2, 3, 8).double(), HISTORY),
            ),
            r"targets must have shape \[B, T, E_t\] with E_t = 8, got \[2, 8\]": (
                (torch.randn(2, 8), HISTORY),
            ),
            "targets without candidates must be one per history segment, 2, got 3": (
                (torch.randn(3, 1, 8), HISTORY),
            ),
            r"history's values must have shape \[L, 8\], got \[5, 9\]": (
                (torch.randn(2, 1, 8), (torch.randn(5, 9), HISTORY[1])),
            ),
            "offsets must end at the number of rows, 5, got 4": (
                (torch.randn(2, 1, 8), (torch.randn(5, 8), torch.tensor([0, 2, 4]))),
            ),
            r"targets' values must have shape \[L, 8\], got \[4, 7\]": (
                ((torch.randn(4, 7), torch.tensor([0, 1, 4])), HISTORY),
            ),
            "the same number of segments, got 1 and 2": (
                ((torch.randn(4, 8), torch.tensor([0, 4])), HISTORY),
            ),
            "targets and history must have the same number of segments, got 4 and 2": (
                ((torch.randn(4, 8), torch.arange(5)), HISTORY),
            ),
            "^targets must be a dense tensor, got a nested": (
                (torch.nested.nested_tensor([torch.ones(1, 8)] * 3), HISTORY, INDEX),
            ),
            "^candidates must be 0 to num_users - 1 = 1, got values 0 to 3": (
                (torch.randn(3, 1, 8), HISTORY, torch.tensor([0, 1, 3])),
            ),
            "candidates describe 3 candidates, targets have 4": (
                (torch.randn(4, 1, 8), HISTORY, INDEX),
            ),
        },
    ),
    *raising(
        TypeError,
        {
            "history must be a JaggedTensor.*got Tensor": (
                (torch.randn(2, 1, 8), torch.randn(5, 8)),
            ),
            "targets must be a JaggedTensor.*got str": (("targets", HISTORY),),
            r"targets must be a torch.Tensor \[num_candidates, n_q, E_t\], got tuple": (
                (HISTORY, HISTORY, INDEX),
            ),
        },
    ),
    ((torch.randn(3, 1, 8), HISTORY, (0, 1, 1)), TypeError, WRONG_CANDIDATES + "tuple"),
    ((torch.randn(3, 1, 8), HISTORY, jm.Jagged(*HISTORY)), TypeError, WRONG_CANDIDATES + "Jagged"),
]


@pytest.mark.parametrize(
    "arguments, error, message", BAD_FORWARDS, ids=[message[:40] for _, _, message in BAD_FORWARDS]
)
def test_bad_forward(arguments, error, message):
    with pytest.raises(error, match=message):
        jm.JaggedTargetAttention(8, 2)(*arguments)


def test_a_history_whose_values_or_offsets_are_replaced_is_parsed_again(offsets_of):
    layer, targets = jm.JaggedTargetAttention(8, 2), torch.randn(2, 1, 8)
    history = jm.Jagged(torch.randn(5, 8), offsets_of([2, 3]))
    layer(targets, history)
    history.values = torch.randn(6, 8)
    with pytest.raises(
        ValueError, match="history's offsets must end at the number of rows, 6, got 5"
    ):
        layer(targets, history)
    history.offsets[-1] = 6
    expected = layer(targets, jm.Jagged(history.values, offsets_of([2, 4])))
    torch.testing.assert_close(layer(targets, history), expected)
