"""Targets with histories in several levels: user → vendor → item."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jagged_modules as jm
from jagged_modules import functional as F
from tests import accuracy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HIERARCHIES = {  # of each level: histories' lengths; candidates
    "two": ([[4, 0, 7], [2, 0, 3, 1, 9]], 13),
    "three": ([[70, 3], [5, 1, 0, 129], [2, 2, 0, 1, 1]], 16),
    "one to one": ([[3] * 6, [1, 5, 2, 0, 4, 8]], 6),
    "one user": ([[150], [6] * 20], 100),
    "10,000 to one": ([[9], [4, 0]], 10_000),
    "empty level": ([[0, 0], [3, 0, 2]], 7),
    "no histories": ([[0], [0, 0]], 3),
    "no candidates": ([[4], [2, 3]], 0),
}


class Case:
    """A batch of candidates with a parent in each level, in float64 on the host."""

    def __init__(self, name, order="any", heads=(2, 2), dims=(8, 8), rows=2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.lengths, count = HIERARCHIES[name] if isinstance(name, str) else name
        self.maps = [torch.randint(len(x), (count,), generator=generator) for x in self.lengths]
        if order == "one to one":
            self.maps = [torch.randperm(count, generator=generator) for _ in self.lengths]
        elif order == "grouped":
            self.maps = [x.sort().values for x in self.maps]
        self.candidates = self.maps

        def randn(*shape):
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        self.q = randn(count, rows, heads[0], dims[0])
        self.k = [randn(sum(x), heads[1], dims[0]) for x in self.lengths]
        self.v = [randn(sum(x), heads[1], dims[1]) for x in self.lengths]
        self.offsets = [torch.tensor([0, *x]).cumsum(0) for x in self.lengths]

    def run(self, dtype=torch.float64, device="cpu", **options):
        """The results, and the gradients of q and of each level's k and v."""
        operands = self.q, *self.k, *self.v
        tensors = [x.clone().to(device, dtype).requires_grad_() for x in operands]
        n = len(self.k)
        maps, offsets = ([x.to(device) for x in y] for y in (self.candidates, self.offsets))
        out = F.target_attention(
            tensors[0], tensors[1 : 1 + n], tensors[1 + n :], maps, offsets, **options
        )
        out = torch.cat(out, -1) if isinstance(out, tuple) else out
        generator = torch.Generator().manual_seed(1)
        self.do = torch.randn(out.shape, dtype=torch.float64, generator=generator)
        grads = torch.autograd.grad(out, tensors, self.do.to(out))
        return [x.detach().cpu() for x in (out, *grads)]

    def definition(self, q, *keys_and_values):
        """The softmax over a candidate's keys in all levels."""
        _n, group = len(self.k), self.q.shape[2] // max(1, self.k[0].shape[1])
        hidden, copies = [], []
        for index in zip(self.maps, self.offsets):
            users, offsets = (x.to(q.device) for x in index)
            places = torch.arange(int(offsets.diff().max()), device=q.device)
            hidden.append((places >= offsets.diff()[users][:, None])[:, None, None])
            copies.append((offsets[users][:, None] + places).masked_fill(hidden[-1][:, 0, 0], 0))
        operands = [
            (x[rows] if len(x) else x.new_zeros(*rows.shape, *x.shape[1:]))
            .repeat_interleave(group, 2)
            .transpose(1, 2)
            for x, rows in zip(keys_and_values, copies * 2)
        ]
        return _Joint.apply(hidden, q.transpose(1, 2), *operands).transpose(1, 2)


class _Joint(torch.autograd.Function):
    """Its backward reads the rounded result, as FlashAttention's does."""

    @staticmethod
    def forward(ctx, hidden, q, *keys_and_values):
        n, scale = len(hidden), q.shape[-1] ** -0.5
        k, v = keys_and_values[:n], keys_and_values[n:]
        scores = [
            (q @ x.transpose(2, 3) * scale).masked_fill(h, float("-inf")) for x, h in zip(k, hidden)
        ]
        sizes, scores = [x.shape[-1] for x in scores], torch.cat(scores, -1)
        nothing = (scores == float("-inf")).all(-1, keepdim=True)
        p = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        parts = [x @ y for x, y in zip(p.split(sizes, -1), v)]
        out = sum(parts[1:], parts[0])
        ctx.sizes, ctx.scale = sizes, scale
        ctx.save_for_backward(p, out, q, *keys_and_values)
        return out

    @staticmethod
    def backward(ctx, do):
        p, out, q, *keys_and_values = ctx.saved_tensors
        n = len(ctx.sizes)
        delta, dqs, dks, dvs = (do * out).sum(-1, keepdim=True), [], [], []
        for part, k, v in zip(p.split(ctx.sizes, -1), keys_and_values[:n], keys_and_values[n:]):
            ds = part * (do @ v.transpose(2, 3) - delta) * ctx.scale
            dqs.append(ds @ k)
            dks.append(ds.transpose(2, 3) @ q)
            dvs.append(part.transpose(2, 3) @ do)
        return None, sum(dqs[1:], dqs[0]), *dks, *dvs


def _gradients(out, tensors, grad):
    """0 for an operand without rows, which the definition does not read."""
    return torch.autograd.grad(out, tensors, grad, materialize_grads=True)


def assert_same(found, expected, tolerance=1e-12):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("order", ["any", "grouped"])
@pytest.mark.parametrize("name", HIERARCHIES)
def test_joint_levels_are_one_history(name, order):
    order = "one to one" if name == "one to one" else order
    case = Case(name, order, heads=(4, 2))
    out, *grads = case.run()
    tensors = [x.clone().requires_grad_() for x in (case.q, *case.k, *case.v)]
    expected = case.definition(*tensors)
    assert_same([out, *grads], [expected, *_gradients(expected, tensors, case.do)])


lengths_of_a_level = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(
    st.lists(lengths_of_a_level, min_size=1, max_size=4), st.integers(0, 12), st.integers(0, 2**16)
)
def test_random_hierarchies(lengths, count, seed):
    """Each parent has one in the next coarser level; the levels come in any order."""
    case, generator = Case((lengths, count), heads=(2, 1), seed=seed), torch.Generator()
    generator.manual_seed(seed)
    sizes = [len(x) for x in lengths]
    index = jm.CandidateIndex.from_map(case.maps[-1], sizes[-1])
    case.candidates = [index]
    for coarser, finer in zip(sizes[-2::-1], sizes[:0:-1]):
        parents = torch.randint(coarser, (finer,), generator=generator)
        if seed % 2:
            parents = parents.sort().values
        index = jm.CandidateIndex.from_map(parents, coarser).compose(index)
        case.candidates.insert(0, index)
    order = torch.randperm(len(sizes), generator=generator).tolist()
    for name in ("lengths", "candidates", "k", "v", "offsets"):
        setattr(case, name, [getattr(case, name)[i] for i in order])
    case.maps = [x.candidate_to_user for x in case.candidates]
    out, *grads = case.run()
    tensors = [x.clone().requires_grad_() for x in (case.q, *case.k, *case.v)]
    expected = case.definition(*tensors)
    assert_same([out, *grads], [expected, *_gradients(expected, tensors, case.do)])


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("levels", ["joint", "each"])
@pytest.mark.parametrize("name", ["two", "three", "empty level", "no histories"])
def test_reference(name, levels, activation):
    case, options = Case(name), dict(levels=levels, activation=activation, output_scale=1)
    assert_same(case.run(**options), case.run(**options, implementation="reference"))


def test_each_level_is_an_attention_by_itself():
    case = Case("three", dims=(8, 16))
    alone = [
        F.target_attention(case.q, k, v, users, offsets)
        for k, v, users, offsets in zip(case.k, case.v, case.maps, case.offsets)
    ]
    results = F.target_attention(
        case.q, case.k, case.v, case.maps, case.offsets, levels="each", implementation="auto"
    )
    assert isinstance(results, tuple) and all(map(torch.equal, results, alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy(dtype):
    check_accuracy("two", (8, 8), dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 128), (40, 24)], ids=str)
@pytest.mark.parametrize("name", ["three", "one user", "empty level"])
def test_accuracy_on_a_gpu(name, dims, dtype):
    check_accuracy(name, dims, dtype, "cuda")


def check_accuracy(name, dims, dtype, device):
    case = Case(name, dims=dims, heads=(4, 2), seed=len(name) + sum(dims))
    for x in (case.q, *case.k, *case.v):
        x.copy_(x.to(dtype))
    found = case.run(dtype, device)
    names = ["q", *(f"{x}{i}" for x in "kv" for i in range(len(case.k)))]
    tensors = dict(zip(names, (x.to(device) for x in (case.q, *case.k, *case.v))))
    do = case.do.to(device, dtype)
    bounds = accuracy.definition(case.definition, tensors, do, samples=64)
    found = dict(zip(["out", *(f"d{x}" for x in names)], (x.to(device) for x in found)))
    accuracy.assert_accurate(found, bounds)


def test_a_poisoned_parent_reaches_its_own_leaves_alone():
    case = Case("three")
    clean = case.run()
    vendor = next(x for x in case.maps[1].tolist() if case.lengths[1][x])
    start, end = case.offsets[1][vendor : vendor + 2].tolist()
    case.k[1][start:end] = case.v[1][start:end] = torch.nan
    out, dq, *grads = case.run()
    children = (case.maps[1] == vendor) & (end > start)
    assert children.any() and not children.all()
    for x, before in zip((out, dq), clean):
        assert x[children].isnan().all()
        torch.testing.assert_close(x[~children], before[~children], rtol=0, atol=1e-12)
    kin = torch.zeros(len(case.lengths[0]), dtype=torch.bool)  # users with a child of that vendor
    kin[case.maps[0][children]] = True
    of_user = torch.repeat_interleave(kin, case.offsets[0].diff())
    assert grads[0][of_user].isnan().all() and grads[0][~of_user].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_candidates_of_no_parent(device):
    """Where the device alone knows that an index is out of range, it is a level without keys."""
    case = Case("two")
    maps = [case.maps[0].clone(), case.maps[1].clone()]
    maps[0][3], maps[1][5] = 99, -1
    if device == "cpu":
        with pytest.raises(ValueError, match=r"candidates\[0\] must be 0 to"):
            F.target_attention(case.q, case.k, case.v, maps, case.offsets)
        return
    dtype = torch.float32
    arguments = [[x.to(device, dtype) for x in y] for y in (case.k, case.v)]
    offsets = [x.to(device) for x in case.offsets]
    out = F.target_attention(
        case.q.to(device, dtype), *arguments, [x.to(device) for x in maps], offsets
    ).cpu()
    for row, level in ((3, 1), (5, 0)):
        alone = F.target_attention(
            case.q[row : row + 1], case.k[level], case.v[level],
            case.maps[level][row : row + 1], case.offsets[level],
        )  # fmt: skip
        torch.testing.assert_close(out[row], alone[0].float(), rtol=1e-5, atol=1e-5)


def test_compose():
    generator = torch.Generator().manual_seed(0)
    for vendors, users in ((5, 3), (1, 1), (40, 7)):
        vendor_to_user = torch.randint(users, (vendors,), generator=generator)
        item_to_vendor = torch.randint(vendors, (30,), generator=generator)
        for of_vendors in (vendor_to_user, vendor_to_user.sort().values):
            for of_items in (item_to_vendor, item_to_vendor.sort().values):
                coarse = jm.CandidateIndex.from_map(of_vendors, users)
                index = coarse.compose(jm.CandidateIndex.from_map(of_items, vendors))
                assert index.num_users == users
                assert torch.equal(index.candidate_to_user, of_vendors[of_items])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sorted_vendors", [True, False])
@pytest.mark.parametrize("sorted_items", [True, False])
def test_compose_on_a_device(sorted_vendors, sorted_items, device):
    vendors = torch.tensor([0, 0, 2, 3]) if sorted_vendors else torch.tensor([2, 0, 3, 0])
    items = torch.tensor([0, 1, 1, 2, 3, 3]) if sorted_items else torch.tensor([3, 1, 0, 1, 2, 3])
    counts = torch.bincount(vendors, minlength=4), torch.bincount(items, minlength=4)
    finer, coarse = (
        jm.CandidateIndex.from_counts(n.to(device))
        if is_sorted
        else jm.CandidateIndex.from_map(x.to(device), 4)
        for is_sorted, n, x in zip((sorted_items, sorted_vendors), counts[::-1], (items, vendors))
    )
    found = coarse.compose(finer)
    assert torch.equal(found.candidate_to_user.cpu().long(), vendors[items])


def test_errors_of_compose():
    index = jm.CandidateIndex.from_map(torch.tensor([1, 0]), 2)
    with pytest.raises(TypeError, match="finer must be a CandidateIndex, got Tensor"):
        index.compose(torch.tensor([0]))
    with pytest.raises(
        ValueError, match="the index's groups describe 2 candidates, finer has users 3"
    ):
        index.compose(jm.CandidateIndex.from_counts(torch.tensor([1, 1, 1])))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            dict(v=0),
            "v must be a tuple with an entry for each level, as k, which has 2, got Tensor",
        ),
        (dict(kv_offsets=slice(1)), "kv_offsets must be a tuple .* which has 2, got 1"),
        (dict(levels="all"), "levels must be one of"),
        (dict(mask=jm.AttentionMask(causal=True)), "mask must be None with several levels"),
        (dict(max_seqlen_q=5), "max_seqlen_q must be None with several levels, got int"),
        (dict(dropout_seed=torch.tensor(1)), "dropout_seed must be None with several levels"),
        (dict(activation="tanh"), "activation must be one of"),
    ],
)
def test_errors(change, error):
    case = Case("two")
    given = dict(k=case.k, v=case.v, candidates=case.maps, kv_offsets=case.offsets)
    for name, x in change.items():
        given[name] = given[name][x] if name in given else x
    with pytest.raises((TypeError, ValueError), match=error):
        F.target_attention(case.q, **given)


def test_errors_name_the_level():
    case = Case("two", dims=(8, 8))
    maps = [case.maps[0], torch.full_like(case.maps[1], 99)]
    with pytest.raises(ValueError, match=r"candidates\[1\] must be 0 to num_users - 1 = .*99"):
        F.target_attention(case.q, case.k, case.v, maps, case.offsets)
    maps[1] = jm.CandidateIndex.from_map(case.maps[1][:-1], len(case.offsets[1]) - 1)
    with pytest.raises(ValueError, match=r"candidates\[1\] describe .* candidates, the queries"):
        F.target_attention(case.q, case.k, case.v, maps, case.offsets)
    with pytest.raises(ValueError, match=r"kv_offsets\[1\] must end at the number of rows"):
        F.target_attention(
            case.q, case.k, case.v, case.maps, [case.offsets[0], case.offsets[1][:-1]]
        )
    with pytest.raises(ValueError, match=r"v\[1\] must have shape \[L, Hkv, Dv\]"):
        F.target_attention(case.q, case.k, [case.v[0], case.v[1][0]], case.maps, case.offsets)
    with pytest.raises(ValueError, match="v must have the same heads and head dim in each level"):
        F.target_attention(case.q, case.k, [case.v[0], case.v[1][..., :4]], case.maps, case.offsets)
    with pytest.raises(TypeError, match="output_scale must be a number with several levels"):
        F.target_attention(
            case.q, case.k, case.v, case.maps, case.offsets,
            activation="silu", output_scale=torch.ones(3),
        )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_of_weights(device):
    """Values of ones: a result is the sum of the weights that are kept. A finite difference along
    a direction is the gradient's."""
    case = Case("two", rows=50)
    dtype = torch.float64 if device == "cpu" else torch.float32
    case.v = [torch.ones_like(x) for x in case.v]

    def run():
        torch.manual_seed(3)
        return case.run(dtype, device, dropout_p=0.5)

    out, dq, *grads = run()
    assert all(map(torch.equal, run(), (out, dq, *grads)))
    has_keys = sum(x.diff()[m] for x, m in zip(case.offsets, case.maps)) > 0
    assert abs(float(out[has_keys].mean()) - 1) < 0.05 and out[has_keys].std() > 0.1
    for x, gradient in zip((case.q, *case.k, *case.v), (dq, *grads)):
        generator = torch.Generator().manual_seed(5)
        step = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        values, size = [], 1e-5 if device == "cpu" else 1e-2
        for sign in (1, -1):
            x += sign * size * step
            values.append((run()[0].double() * case.do).sum())
            x -= sign * size * step
        slope = float(values[0] - values[1]) / (2 * size)
        expected = float((gradient.double() * step).sum())
        assert slope == pytest.approx(expected, rel=1e-6 if device == "cpu" else 1e-2, abs=1e-2)


def test_no_second_derivative():
    case = Case("two")
    q = case.q.requires_grad_()
    out = F.target_attention(q, case.k, case.v, case.maps, case.offsets)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        dq.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        torch.autograd.grad(dq.sum(), q, allow_unused=True)


def test_autocast():
    case = Case("two")
    tensors = [x.float() for x in (case.q, *case.k, *case.v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = F.target_attention(tensors[0], tensors[1:3], tensors[3:], case.maps, case.offsets)
    assert out.dtype == torch.bfloat16


# -- layers ----------------------------------------------------------------------------------------


class Batch:
    """Users, vendors and items of a layer; joined: each item's histories as one."""

    def __init__(self):
        torch.manual_seed(0)
        self.offsets = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 2, 2, 5, 6, 8])
        self.rows = [torch.randn(int(x[-1]), 16, dtype=torch.float64) for x in self.offsets]
        self.targets = torch.randn(11, 2, 16, dtype=torch.float64)
        vendors = jm.CandidateIndex.from_map(torch.randint(5, (11,)), 5)
        users = jm.CandidateIndex.from_map(torch.tensor([2, 0, 1, 0, 2]), 3).compose(vendors)
        self.candidates = users, vendors
        for x in self.inputs:
            x.requires_grad_()

    @property
    def inputs(self):
        return [self.targets, *self.rows]

    @property
    def histories(self):
        return tuple(zip(self.rows, self.offsets))

    def joined(self):
        parts, ends = [], [0]
        for parents in zip(*(x.candidate_to_user for x in self.candidates)):
            of_item = [x[o[p] : o[p + 1]] for x, o, p in zip(self.rows, self.offsets, parents)]
            parts += of_item
            ends.append(ends[-1] + sum(map(len, of_item)))
        return torch.cat(parts), torch.tensor(ends)

    def gradients(self, out, layer):
        torch.manual_seed(1)
        return _gradients(out, [*self.inputs, *layer.parameters()], torch.randn_like(out))


def test_target_layer():
    batch, layer = Batch(), jm.JaggedTargetAttention(16, 2, dtype=torch.float64)
    out = layer(batch.targets, batch.histories, batch.candidates)
    expected = layer(batch.targets, batch.joined())
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert_same(batch.gradients(out, layer), batch.gradients(expected, layer), 1e-10)
    caches = tuple(layer.cache(x) for x in batch.histories)
    scored = layer.score(batch.targets, caches, batch.candidates)
    torch.testing.assert_close(scored, expected, rtol=1e-12, atol=1e-12)


def test_target_layer_with_a_result_for_each_level():
    batch, layer = Batch(), jm.JaggedTargetAttention(16, 2, dtype=torch.float64, levels="each")
    results = layer(batch.targets, batch.histories, batch.candidates)
    alone = [layer(batch.targets, *x) for x in zip(batch.histories, batch.candidates)]
    assert_same(results, alone)


def test_self_target_layer():
    batch, layer = Batch(), jm.JaggedSelfTargetAttention(16, 2, dtype=torch.float64)
    histories, out = layer(batch.histories, batch.targets, batch.candidates)
    alone = [
        layer(x, batch.targets, index)[0] for x, index in zip(batch.histories, batch.candidates)
    ]
    for (values, offsets), (expected, own_offsets) in zip(histories, alone, strict=True):
        assert offsets is own_offsets
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    _, expected = layer(batch.joined(), batch.targets, torch.arange(len(batch.targets)))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert_same(batch.gradients(out, layer), batch.gradients(expected, layer), 1e-10)


@pytest.mark.parametrize("layer", ["target", "self and target"])
def test_layers_compile(layer):
    batch = Batch()
    if layer == "target":
        layer = jm.JaggedTargetAttention(16, 2, dtype=torch.float64)
        arguments = batch.targets, batch.histories, batch.candidates
    else:
        layer = jm.JaggedSelfTargetAttention(16, 2, dtype=torch.float64)
        arguments = batch.histories, batch.targets, batch.candidates
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected, out = layer(*arguments), compiled(*arguments)
    if isinstance(out, tuple):
        out, expected = out[1], expected[1]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert_same(batch.gradients(out, layer), batch.gradients(expected, layer), 1e-10)


@pytest.mark.parametrize(
    ("histories", "error"),
    [
        (slice(1), r"history must be a tuple with an entry for each level.* have 2, got 1"),
        (0, r"history\[0\] must be a JaggedTensor.*got Tensor"),
    ],
)
def test_errors_of_layers(histories, error):
    batch = Batch()
    for layer in (jm.JaggedTargetAttention, jm.JaggedSelfTargetAttention):
        made, given = layer(16, 2, dtype=torch.float64), batch.histories[histories]
        order = [given, batch.targets]
        if layer is jm.JaggedTargetAttention:
            order.reverse()
        with pytest.raises((TypeError, ValueError), match=error):
            made(*order, batch.candidates)
        order[order.index(given)] = batch.histories
        users, vendors = batch.candidates
        with pytest.raises(ValueError, match=r"candidates\[1\] describe 2 users, the history has"):
            made(*order, (users, jm.CandidateIndex.from_counts(torch.tensor([1, 1]))))
        with pytest.raises(ValueError, match=r"candidates\[1\] must be 0 to num_users"):
            made(*order, (users, torch.full((len(batch.targets),), 99)))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_on_a_gpu(autocast):
    """Rows behind the end of what the device knows: of a history, and of the targets."""
    batch, layer = Batch(), jm.JaggedTargetAttention(16, 2, dtype=torch.float64)
    expected = layer(batch.targets, batch.histories, batch.candidates)
    gradients = batch.gradients(expected, layer)
    torch.manual_seed(1)
    grad = torch.randn_like(expected)
    layer = layer.to("cuda", torch.float32)
    tail = torch.full((3, 16), torch.nan)
    rows = [torch.cat([x.detach().float(), tail]).cuda().requires_grad_() for x in batch.rows]
    targets = batch.targets.detach().float().cuda().requires_grad_()
    histories = [(x, o.cuda()) for x, o in zip(rows, batch.offsets)]
    candidates = [x.candidate_to_user.cuda() for x in batch.candidates]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = layer(targets, histories, candidates)
    parameters = list(layer.parameters())
    found = torch.autograd.grad(out, [targets, *rows, *parameters], grad.cuda().to(out))
    tolerance = 5e-2 if autocast else 1e-4
    for x, y in zip((out, *found), (expected, *gradients), strict=True):
        x = x.detach().cpu().double()
        assert not x[len(y) :].any()
        torch.testing.assert_close(x[: len(y)], y, rtol=tolerance, atol=tolerance)


def test_compiled_keys_that_are_values():
    """Dynamo takes no tensor twice as inputs of a node."""
    case = Case("two")
    q = case.q.requires_grad_()

    def run():
        return F.target_attention(q, case.k, case.k, case.maps, case.offsets)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = [(out, *torch.autograd.grad(out.sin().sum(), q)) for out in (compiled(), run())]
    torch.testing.assert_close(*results)
