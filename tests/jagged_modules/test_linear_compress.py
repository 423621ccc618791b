"""F.linear_compress and LinearCompressEmbedding: equal to the replicated computation, without
replicating anything."""

import copy
import pickle

import accuracy
import pytest
import torch
from marks import raising

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.functional.linear_compress import COMPRESS_IMPLEMENTATIONS

LEVELS = {  # batch sizes, embeddings per row, of each level, coarsest first
    "one": ([7], [5]),
    "two": ([3, 7], [11, 5]),
    "three": ([2, 3, 7], [3, 11, 5]),
    "one-user": ([1, 7], [4, 6]),
    "one-candidate": ([3, 1], [4, 6]),
    "no-candidates": ([3, 0], [4, 6]),
    "aligned": ([3, 7], [16, 8]),
}
IMPLEMENTATIONS = [name for name in COMPRESS_IMPLEMENTATIONS if name not in ("triton", "hopper")]


def random_level(batch, num_embeddings, num_compressed=3, width=9, **options):
    """A level's weight and embeddings."""
    return torch.randn(num_compressed, num_embeddings, **options), torch.randn(
        batch, num_embeddings, width, **options
    )


def random_levels(batches, sizes, **options):
    """Weights and embeddings of all levels, and unsorted maps onto the shared ones."""
    weights, embeddings = zip(
        *(random_level(batch, size, **options) for batch, size in zip(batches, sizes, strict=True))
    )
    return (
        weights,
        embeddings,
        [torch.randint(max(batch, 1), (batches[-1],)) for batch in batches[:-1]],
    )


def compress(implementation, indices):
    """linear_compress of (*weights, *embeddings)."""
    return lambda *x: F.linear_compress(
        x[: len(x) // 2], x[len(x) // 2 :], indices, implementation=implementation
    )


def check(weights, embeddings, indices, implementation="auto", maps=None, grad=None, operator=None):
    """Check the function, or an operator of (*weights, *embeddings), by the accuracy rule. maps:
    the indices as tensors."""
    levels = {f"weights[{i}]": x for i, x in enumerate(weights)} | {
        f"embeddings[{i}]": x for i, x in enumerate(embeddings)
    }

    def bounds(*x):
        return accuracy.linear_compress(
            weights, embeddings, indices if maps is None else maps, x[-1]
        )

    accuracy.check(
        compress(implementation, indices) if operator is None else operator, bounds, levels, grad
    )


# -- the function ----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)
@pytest.mark.parametrize("levels", LEVELS)
def test_equals_the_replicated_gemm(levels, dtype, implementation):
    weights, embeddings, indices = random_levels(*LEVELS[levels], dtype=dtype)
    check(weights, embeddings, indices, implementation)


def test_reference_is_the_formula():
    (w_user, w_candidate), (users, candidates), (index,) = random_levels(
        *LEVELS["two"], dtype=torch.float64
    )
    expected = torch.stack(
        [w_user @ users[index[b]] + w_candidate @ candidates[b] for b in range(7)]
    )
    torch.testing.assert_close(
        F.linear_compress(
            (w_user, w_candidate), (users, candidates), index, implementation="reference"
        ),
        expected,
    )
    torch.testing.assert_close(
        F.linear_compress(w_candidate, candidates, implementation="reference"),
        w_candidate @ candidates,
    )


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 0, 4], [0, 0, 7], [0, 0, 0]], ids=str)
def test_every_form_of_the_index(counts):
    """Users without candidates are legal; their embeddings get a gradient of 0."""
    users, counts = torch.arange(3).repeat_interleave(torch.tensor(counts)), torch.tensor(counts)
    weights, embeddings, _ = random_levels([3, len(users)], [11, 5])
    shuffled = users[torch.randperm(len(users))]
    forms = [
        (users, form)
        for form in (
            users.int(),
            jm.CandidateIndex.from_counts(counts),
            jm.CandidateIndex.from_map(users, 3),
        )
    ]
    forms += [
        (shuffled, shuffled),
        (shuffled, jm.CandidateIndex.from_map(shuffled, 3)),
        (shuffled, (shuffled,)),
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    forms += [
        (users, jm.CandidateIndex.from_offsets(offsets)),
        (users, jm.CandidateIndex.from_jagged((users, offsets))),
    ]
    for map_, form in forms:
        check(weights, embeddings, form, maps=[map_])


def test_maps_and_indices_mixed():
    weights, embeddings, indices = random_levels(*LEVELS["three"])
    mixed = [jm.CandidateIndex.from_map(indices[0], 2), indices[1]]
    check(weights, embeddings, mixed, maps=indices)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_users_and_no_candidates(implementation):
    weights, embeddings, indices = random_levels([0, 0], [4, 6])
    leaves = [x.requires_grad_() for x in (*weights, *embeddings)]
    out = compress(implementation, indices)(*leaves)
    assert out.shape == (0, 3, 9)
    out.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in leaves)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_shared_level_without_rows(device):
    """A device's indices are not read, so the shape is what tells."""
    weights = [torch.ones(3, k, device=device) for k in (4, 6)]
    embeddings = [torch.ones(n, k, 9, device=device) for n, k in ((0, 4), (2, 6))]
    users = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(
        ValueError, match=r"embeddings\[0\] must have rows, as embeddings\[1\] has 2, got 0"
    ):
        F.linear_compress(weights, embeddings, users)
    layer = jm.LinearCompressEmbedding(6, 3, 4, device=device)
    with pytest.raises(
        ValueError, match="user_embeddings must have rows, as candidate_embeddings has 2, got 0"
    ):
        layer(embeddings[1], embeddings[0], users)


@pytest.mark.parametrize(
    "implementation", [name for name in IMPLEMENTATIONS if name != "reference"]
)
@pytest.mark.parametrize("levels", ["one", "two", "three"])
def test_gradcheck(levels, implementation):
    weights, embeddings, indices = random_levels(*LEVELS[levels], width=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        compress(implementation, indices), [x.requires_grad_() for x in (*weights, *embeddings)]
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "grad",
    [torch.ones(()).expand(7, 3, 9), torch.randn(9, 3, 7).permute(2, 1, 0)],
    ids=["expanded", "strided"],
)
def test_gradients_of_any_stride(grad, implementation):
    weights, embeddings, indices = random_levels(*LEVELS["two"])
    assert not grad.is_contiguous() and grad.shape == (7, 3, 9)
    check(weights, embeddings, indices, implementation, grad=grad)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inputs_of_any_stride(implementation):
    """Weights with rows padded in storage, transposed weights, embeddings that are slices of wider
    ones, expanded embeddings."""
    weights, embeddings, indices = random_levels(*LEVELS["two"])
    weights = (
        torch.full((3, 16), float("nan"))[:, :11].copy_(weights[0]),
        torch.empty(5, 3).T.copy_(weights[1]),
    )
    embeddings = (
        embeddings[0][:1].expand(3, -1, -1),
        torch.empty(7, 8, 12)[:, 2:7, 1:10].copy_(embeddings[1]),
    )
    assert not any(x.is_contiguous() for x in (*weights, *embeddings))
    check(weights, embeddings, indices, implementation)


def test_nothing_is_replicated(tensor_sizes):
    """No tensor is larger than the output and the candidates' embeddings: not a user's embeddings
    once per candidate [B, Ku, N], and not a weight's gradient once per row [B, M, K]."""
    users, candidates, user_size, size, compressed, width = 4, 500, 256, 24, 32, 16
    weights, embeddings, indices = random_levels(
        [users, candidates], [user_size, size], num_compressed=compressed, width=width
    )
    leaves = [x.requires_grad_() for x in (*weights, *embeddings)]
    largest = candidates * max(compressed, size) * width
    assert largest < candidates * compressed * size and largest < candidates * user_size * width
    with tensor_sizes() as sizes:
        compress("auto", indices)(*leaves).square().sum().backward()
    assert max(sizes.made) == largest
    with tensor_sizes() as sizes:
        compress("reference", indices)(*leaves).square().sum().backward()
    assert max(sizes.made) >= candidates * (user_size + size) * width, "what the count would show"


def test_second_derivatives():
    weights, embeddings, indices = random_levels(*LEVELS["two"])
    leaves = [x.double().requires_grad_() for x in (*weights, *embeddings)]
    torch.autograd.gradgradcheck(
        lambda *x: compress("auto", indices)(*x).square(), leaves, fast_mode=True
    )


def test_autocast():
    weights, embeddings, indices = random_levels(*LEVELS["two"])
    leaves = [x.requires_grad_() for x in (*weights, *embeddings)]
    with torch.autocast("cpu", torch.bfloat16):
        out = compress("auto", indices)(*leaves)
        mixed = compress("auto", indices)(*weights, embeddings[0].bfloat16(), embeddings[1])
    assert out.dtype == torch.bfloat16 and torch.equal(out, mixed)
    assert torch.equal(out, compress("auto", indices)(*(x.bfloat16() for x in leaves)))
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), leaves))


# -- the layer -------------------------------------------------------------------------------------

SHARED = {"one": 0, "two": 11, "three": (3, 11)}  # num_user_embeddings for the sizes of LEVELS


def names(count):
    return [f"feature {i}" for i in range(count)]


def keyed_tensor(torchrec, embeddings, keys):
    """The KeyedTensor of embeddings `[B, K, N]` with the K keys."""
    return torchrec.KeyedTensor(keys, [embeddings.shape[2]] * len(keys), embeddings.flatten(1))


def layer_and_inputs(levels, dtype=torch.float32, **features):
    """A layer from 5 candidate embeddings to 3, and its three arguments."""
    layer = jm.LinearCompressEmbedding(5, 3, SHARED[levels], **features).to(dtype)
    _, (*shared, candidate), indices = random_levels(*LEVELS[levels], dtype=dtype)
    return layer, (candidate, shared or None, indices or None)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)
@pytest.mark.parametrize("levels", SHARED)
def test_layer_applies_its_weights(levels, dtype):
    layer, (candidate, shared, indices) = layer_and_inputs(levels, dtype)
    names = [name for name, _ in layer.named_parameters()]
    shared = shared or []

    def run(*x):
        weights, embeddings = x[: len(names)], x[len(names) :]
        arguments = embeddings[-1], list(embeddings[:-1]), indices
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), arguments)

    check(list(layer.parameters()), [*shared, candidate], indices or [], operator=run)


def test_one_shared_level_needs_no_list():
    layer, (candidate, (shared,), (users,)) = layer_and_inputs("two")
    expected = layer(candidate, [shared], [users])
    assert torch.equal(layer(candidate, shared, users), expected)
    assert torch.equal(layer(candidate, shared, jm.CandidateIndex.from_map(users, 3)), expected)
    grouped = jm.CandidateIndex.from_counts(torch.bincount(users, minlength=3))
    assert torch.equal(
        layer(candidate, shared, grouped), layer(candidate, shared, users.sort().values)
    )


def test_initialised_as_one_linear_over_all_levels():
    layer = jm.LinearCompressEmbedding(600, 50, (100, 300))
    linear = torch.nn.Linear(1000, 50, bias=False)
    for weight in layer.weights:
        assert 0.99 * linear.weight.abs().max() < weight.abs().max() <= 1000**-0.5
    assert [list(x.shape) for x in layer.state_dict().values()] == [[50, 100], [50, 300], [50, 600]]
    assert sum(x.numel() for x in layer.parameters()) == linear.weight.numel()


def test_keyed_tensors_are_not_copied():
    torchrec = pytest.importorskip("torchrec")
    layer, (candidate, (shared,), (users,)) = layer_and_inputs(
        "two", candidate_features=names(5), user_features=names(11)
    )
    keyed = [keyed_tensor(torchrec, x, names(x.shape[1])) for x in (candidate, shared)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.data_ptr()) or x, lambda x: x
    ):
        out = layer(keyed[0], keyed[1], users)
    assert torch.equal(out, layer(candidate, shared, users))
    assert {x.values().data_ptr() for x in keyed} <= set(saved)


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [1, 0, 2, 3, 4], [2, 4, 0, 1, 3]], ids=str)
def test_the_order_of_a_keyed_tensor_does_not_matter(order):
    torchrec = pytest.importorskip("torchrec")
    layer, (candidate, _, _) = layer_and_inputs("one", candidate_features=names(5))

    def run(candidate, weight):
        keyed = keyed_tensor(torchrec, candidate[:, order], [names(5)[i] for i in order])
        return torch.func.functional_call(layer, {"weights.0": weight}, keyed)

    def bounds(candidate, weight, do):
        of_levels = accuracy.linear_compress([weight], [candidate], [], do)
        return dict(
            out=of_levels["out"],
            dcandidate=of_levels["dembeddings[0]"],
            dweight=of_levels["dweights[0]"],
        )

    accuracy.check(run, bounds, dict(candidate=candidate, weight=layer.weights[0].detach()))


def test_features_of_several_levels():
    """A level without names takes tensors."""
    torchrec = pytest.importorskip("torchrec")
    features = dict(user_features=[names(3), None], candidate_features=tuple(names(5)))
    layer, (candidate, (coarse, shared), indices) = layer_and_inputs("three", **features)
    keyed, reversed_keyed = (
        keyed_tensor(torchrec, x.flip(1), names(x.shape[1])[::-1]) for x in (candidate, coarse)
    )
    assert torch.equal(
        layer(keyed, [reversed_keyed, shared], indices), layer(candidate, [coarse, shared], indices)
    )
    with pytest.raises(
        ValueError,
        match=r"user_embeddings\[1\] must be a torch.Tensor if the layer has no user_features",
    ):
        layer(keyed, [reversed_keyed, keyed], indices)


BAD_FEATURES = [  # of a layer with candidate features a, b and c
    (["a", "b"], r"once, got 2: missing \['c'\], unexpected \[\]"),
    (["c", "b", "d"], r"once, got 3: missing \['a'\], unexpected \['d'\]"),
    (["a", "b", "c", "d"], r"once, got 4: missing \[\], unexpected \['d'\]"),
    (["a", "b", "c", "a"], r"once, got 4: missing \[\], unexpected \[\]"),
]


@pytest.mark.parametrize("keys, message", BAD_FEATURES, ids=[str(keys) for keys, _ in BAD_FEATURES])
def test_missing_and_unexpected_features(keys, message):
    torchrec = pytest.importorskip("torchrec")
    layer = jm.LinearCompressEmbedding(3, 2, candidate_features=["a", "b", "c"])
    with pytest.raises(
        ValueError, match="candidate_embeddings must have each of the layer's 3 features " + message
    ):
        layer(keyed_tensor(torchrec, torch.randn(2, len(keys), 4), keys))


def test_bad_keyed_tensors():
    torchrec = pytest.importorskip("torchrec")
    keyed = keyed_tensor(torchrec, torch.randn(2, 3, 4), ["a", "b", "c"])
    with pytest.raises(
        ValueError,
        match=(
            r"candidate_embeddings must be a torch.Tensor .* no candidate_features, .* \['a', 'b',"
            r" 'c'\]"
        ),
    ):
        jm.LinearCompressEmbedding(3, 2)(keyed)
    transposed = torchrec.KeyedTensor(["a", "b"], [4, 4], torch.randn(8, 8), key_dim=0)
    with pytest.raises(
        ValueError,
        match="candidate_embeddings must be a KeyedTensor with key_dim 1, .*got key_dim 0",
    ):
        jm.LinearCompressEmbedding(2, 2, candidate_features=["a", "b"])(transposed)
    uneven = torchrec.KeyedTensor(["a", "b"], [9, 18], torch.randn(7, 27))
    with pytest.raises(
        ValueError, match=r"candidate_embeddings must have features of one width, got \[9, 18\]"
    ):
        jm.LinearCompressEmbedding(2, 2, candidate_features=["a", "b"])(uneven)


def test_lazy_embeddings():
    torchrec = pytest.importorskip("torchrec")
    lazy = pytest.importorskip("torchrec.distributed.types").LazyNoWait
    layer, (candidate, (shared,), (users,)) = layer_and_inputs("two", candidate_features=names(5))
    keyed = keyed_tensor(torchrec, candidate, names(5))
    assert torch.equal(layer(lazy(keyed), lazy(shared), users), layer(candidate, shared, users))


def test_gradients_reach_embedding_bags():
    torchrec = pytest.importorskip("torchrec")

    def bags(*features):
        configs = [
            torchrec.EmbeddingBagConfig(
                name=x, embedding_dim=4, num_embeddings=20, feature_names=[x]
            )
            for x in features
        ]
        return torchrec.EmbeddingBagCollection(tables=configs)

    def ids(rows, *features):
        lengths = torch.randint(1, 4, (rows * len(features),))
        return torchrec.KeyedJaggedTensor(
            list(features), torch.randint(20, (int(lengths.sum()),)), lengths=lengths
        )

    users, items = bags("age", "city", "clicks"), bags("item", "price")
    features = dict(candidate_features=["item", "price"], user_features=["age", "city", "clicks"])
    layer = jm.LinearCompressEmbedding(2, 6, 3, **features)
    out = layer(
        items(ids(5, "item", "price")),
        users(ids(3, "age", "city", "clicks")),
        torch.tensor([2, 0, 2, 1, 1]),
    )
    assert out.shape == (5, 6, 4)
    out.square().sum().backward()
    assert all(x.grad.any() for module in (users, items, layer) for x in module.parameters())


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD])
def test_fused_optimizers_step_as_others_do(optimizer):
    """They take parameters for dense memory, so rows of K = 11 and 5 must follow one another
    without gaps."""
    layer, arguments = layer_and_inputs("three")
    twin = copy.deepcopy(layer)
    for module, fused in ((layer, True), (twin, False)):
        optimize = optimizer(module.parameters(), lr=0.1, fused=fused)
        for _ in range(3):
            optimize.zero_grad()
            module(*arguments).square().mean().backward()
            optimize.step()
    torch.testing.assert_close(list(layer.parameters()), list(twin.parameters()))


def test_state_dict_round_trip():
    (layer, arguments), (other, _) = layer_and_inputs("three"), layer_and_inputs("three")
    assert not torch.equal(layer(*arguments), other(*arguments))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(*arguments), other(*arguments))
    assert list(layer.state_dict()) == ["weights.0", "weights.1", "weights.2"]


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["deepcopy", "pickle"],
)
def test_copies(clone):
    layer, arguments = layer_and_inputs("two")
    twin = clone(layer)
    assert torch.equal(twin(*arguments), layer(*arguments))
    twin(*arguments).sum().backward()
    assert layer.weights[0].grad is None and twin.weights[0].grad is not None


def test_meta_parameters_are_materialised_by_reset_parameters():
    layer = jm.LinearCompressEmbedding(5, 3, 11, device="meta")
    assert all(x.is_meta for x in layer.parameters())
    arguments = (torch.empty(*shape, device="meta") for shape in ((7, 5, 9), (2, 11, 9)))
    assert layer(*arguments, torch.empty(7, dtype=torch.int64, device="meta")).shape == (7, 3, 9)
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    expected = jm.LinearCompressEmbedding(5, 3, 11).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in layer.state_dict().items())


# -- bad input -------------------------------------------------------------------------------------

USER, CANDIDATE = random_level(2, 4), random_level(3, 6)
GOOD = dict(
    weights=[USER[0], CANDIDATE[0]],
    embeddings=[USER[1], CANDIDATE[1]],
    indices=[torch.tensor([1, 0, 1])],
)
INDEX = jm.CandidateIndex.from_counts(torch.tensor([1, 2]))
BAD_CALLS = [
    *raising(
        ValueError,
        {
            r"implementation must be one of \('auto', .*'hopper'\), got 'cutlass'": dict(
                implementation="cutlass"
            ),
            r"^weights must have shape \[M, K\], got \[4\]": dict(
                weights=USER[0][0], embeddings=USER[1], indices=None
            ),
            "^embeddings must have weights' dtype, .*32, got .*64": dict(
                weights=USER[0], embeddings=USER[1].double(), indices=None
            ),
            r"weights\[0\] must have shape \[M, K\], got \[2, 4, 9\]": dict(
                weights=[USER[1], CANDIDATE[0]]
            ),
            r"embeddings\[1\] must have shape \[B, K, N\], got \[6, 9\]": dict(
                embeddings=[USER[1], CANDIDATE[1][0]]
            ),
            r"embeddings\[0\] .* K = 4, that of weights\[0\], got \[2, 3, 9\]": dict(
                embeddings=[USER[1][:, :3], CANDIDATE[1]]
            ),
            r"weights\[1\] must have weights\[0\]'s M, 3, got 2": dict(
                weights=[USER[0], CANDIDATE[0][:2]]
            ),
            r"embeddings\[1\] .* N = 9, that of embeddings\[0\], got \[3, 6, 8\]": dict(
                embeddings=[USER[1], CANDIDATE[1][..., :8]]
            ),
            r"weights\[1\] must be on weights\[0\]'s device, meta, got cpu": dict(
                weights=[USER[0].to("meta"), CANDIDATE[0]]
            ),
            r"weights\[1\] must have weights\[0\]'s dtype.*float16, got.*float32": dict(
                weights=[USER[0].half(), CANDIDATE[0]]
            ),
            r"^indices describe 3 users, embed.*0\] has 2": dict(
                indices=jm.CandidateIndex.from_counts(torch.tensor([1, 2, 0]))
            ),
            r"describe 2 candidates, embeddings\[1\] has 3": dict(
                indices=jm.CandidateIndex.from_counts(torch.tensor([1, 1]))
            ),
            r"^indices must be 1-D, got shape \[1, 3\]": dict(indices=torch.tensor([[1, 0, 1]])),
            r"^indices must have one entry per row of embeddings\[1\], 3, got 2": dict(
                indices=torch.tensor([1, 0])
            ),
            r"^indices must be on .* cpu, or the host, got meta": dict(
                indices=torch.zeros(3, dtype=torch.int64, device="meta")
            ),
            r"^indices must be 0 to 1, the rows of embeddings\[0\], got values 0 to 2": dict(
                indices=torch.tensor([1, 0, 2])
            ),
            r"^indices must be 0 to 1, .*got values -1 to 1": dict(
                indices=torch.tensor([1, -1, 1])
            ),
        },
    ),
    *raising(
        TypeError,
        {
            "^weights must be a tensor or a sequence of them, got str": dict(weights="W"),
            "^embeddings must be a tensor or a sequence of them, got ndarray": dict(
                embeddings=USER[1].numpy()
            ),
            r"weights\[1\] must be a torch.Tensor, got NoneType": dict(weights=[USER[0], None]),
            r"embeddings\[0\] must be float64, .* on cpu, got torch.int64": dict(
                embeddings=[USER[1].long(), CANDIDATE[1]]
            ),
            r"indices\[0\] must be a torch.Tensor, got list": dict(indices=[[1, 0, 1]]),
            r"^indices must be int32 or int64, got torch.float32": dict(
                indices=torch.tensor([1.0, 0.0, 1.0])
            ),
        },
    ),
    (
        dict(indices=None),
        ValueError,
        "one entry per level, and indices one less, got 2 weights, 2 embeddings and 0 indices",
    ),
    (
        dict(weights=USER[0]),
        ValueError,
        "one entry per level, and indices one less, got 1 weights, 2 embeddings and 1 indices",
    ),
    (
        dict(weights=()),
        ValueError,
        "one entry per level, and indices one less, got 0 weights, 2 embeddings and 1 indices",
    ),
]


@pytest.mark.parametrize(
    "change, error, message", BAD_CALLS, ids=[message[:40] for _, _, message in BAD_CALLS]
)
def test_bad_input_of_the_function(change, error, message):
    with pytest.raises(error, match=message):
        F.linear_compress(**(GOOD | change))


BAD_LAYERS = [
    *raising(
        ValueError,
        {
            "num_candidate_embeddings must be at least 1, got 0": ((0, 4),),
            "num_compressed must be at least 1, got 0": ((3, 0),),
            "num_user_embeddings must be at least 0, got -1": ((3, 4, -1),),
            r"num_user_embeddings\[1\] must be at least 1, got 0": ((3, 4, (6, 0)),),
        },
    ),
    *raising(
        TypeError,
        {
            "num_candidate_embeddings must be an int, got float": ((3.0, 4),),
            "num_user_embeddings must be an int or a sequence of ints, got str": ((3, 4, "6"),),
        },
    ),
]
BAD_NAMES = [
    *raising(
        ValueError,
        {
            r"candidate_features must be 3 different names, got \['a', 'b'\]": dict(
                candidate_features=["a", "b"]
            ),
            r"candidate_features must be 3 different names, got \['a', 'b', 'a'\]": dict(
                candidate_features=["a", "b", "a"]
            ),
            r"user_features must have one entry per shared level, 0, got \[\['a'\]\]": dict(
                user_features=["a"]
            ),
            r"user_features must be 2 different names, got \['a'\]": dict(
                num_user_embeddings=2, user_features=["a"]
            ),
            r"user_features must have one entry per shared level, 2, got": dict(
                num_user_embeddings=(1, 2), user_features=[["a"]]
            ),
        },
    ),
    *raising(
        TypeError,
        {
            "candidate_features must be a sequence of names, got 'abc'": dict(
                candidate_features="abc"
            ),
            r"candidate_features must be a sequence of names, got \[1, 2, 3\]": dict(
                candidate_features=[1, 2, 3]
            ),
            r"user_features\[0\] must be a sequence of names, got 'a'": dict(
                num_user_embeddings=(1, 2), user_features=["a", "b"]
            ),
        },
    ),
]


@pytest.mark.parametrize(
    "features, error, message", BAD_NAMES, ids=[message[:60] for _, _, message in BAD_NAMES]
)
def test_bad_names_of_features(features, error, message):
    with pytest.raises(error, match=message):
        jm.LinearCompressEmbedding(3, 4, **features)


@pytest.mark.parametrize(
    "arguments, error, message", BAD_LAYERS, ids=[message[:40] for _, _, message in BAD_LAYERS]
)
def test_bad_constructor(arguments, error, message):
    with pytest.raises(error, match=message):
        jm.LinearCompressEmbedding(*arguments)


BAD_FORWARDS = [
    *raising(
        ValueError,
        {
            r"user_embeddings must have shape .* K = 4, .*got \[3, 6, 9\]": (
                (CANDIDATE[1], CANDIDATE[1], INDEX),
            ),
            r"candidate_embeddings must have shape \[B, K, N\], got \[3, 54\]": (
                (CANDIDATE[1].flatten(1), USER[1], INDEX),
            ),
            "user_embeddings must have one entry per shared level, 1, got 0": ((CANDIDATE[1],),),
            "candidates must have one entry per shared level, 1, got 0": ((CANDIDATE[1], USER[1]),),
            "user_embeddings must have one entry per shared level, 1, got 2": (
                (CANDIDATE[1], [USER[1]] * 2, INDEX),
            ),
            "^candidates .* one entry per row of candidate_embeddings, 3, got 2": (
                (CANDIDATE[1], USER[1], torch.tensor([0, 1])),
            ),
            "^candidates must be 0 to 1, the rows of user_embeddings, .* 0 to 2": (
                (CANDIDATE[1], USER[1], torch.tensor([0, 1, 2])),
            ),
            "candidates must have one entry per shared level, 1, got 2": (
                (CANDIDATE[1], USER[1], [INDEX] * 2),
            ),
            "^candidates describe 2 users, user_embeddings has 3": (
                (CANDIDATE[1], CANDIDATE[1][:, :4], INDEX),
            ),
            "^candidate_embeddings must have the layer's dtype, .*32, got .*64": (
                (CANDIDATE[1].double(), USER[1], INDEX),
            ),
            "^user_embeddings must be on the layer's device, cpu, got meta": (
                (CANDIDATE[1], USER[1].to("meta"), INDEX),
            ),
            "^candidate_embeddings .* N = 8, that of user_embeddings, got": (
                (CANDIDATE[1], USER[1][..., :8], INDEX),
            ),
        },
    ),
    *raising(
        TypeError,
        {
            "candidate_embeddings must be a torch.Tensor, got str": (
                ("candidates", USER[1], INDEX),
            ),
            "^candidates must be int32 or int64, got torch.float32": (
                (CANDIDATE[1], USER[1], torch.tensor([0.0, 1.0, 1.0])),
            ),
        },
    ),
    (
        (CANDIDATE[1][:, :5], USER[1], INDEX),
        ValueError,
        r"candidate_embeddings must have shape .* K = 6, that of the layer, got .*5",
    ),
]


@pytest.mark.parametrize(
    "arguments, error, message", BAD_FORWARDS, ids=[message[:40] for _, _, message in BAD_FORWARDS]
)
def test_bad_forward(arguments, error, message):
    with pytest.raises(error, match=message):
        jm.LinearCompressEmbedding(6, 3, 4)(*arguments)
