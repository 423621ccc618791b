"""DIN's attention on the CPU, against its definition."""

import itertools

import accuracy
import pytest
import torch
from din_problem import ACTIVATIONS, MASKS, problem
from marks import slow_after
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jagged_modules import AttentionMask, CandidateIndex, functional
from jagged_modules.cpu import din
from jagged_modules.unit_activations import UnitParameters

FEATURE_ORDERS = [("q", "k", "q-k", "q*k"), ("q*k", "k"), ("k-q",), ("k", "q")]


def assert_as_defined(case, **tolerance):
    expected = case.results(case.definition)
    for name, x in case.results(case.call).items():
        torch.testing.assert_close(
            x, expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_and_gradients(activation, normalize):
    assert_as_defined(problem(activation, normalize=normalize))


@pytest.mark.parametrize("features", FEATURE_ORDERS, ids="+".join)
def test_features_in_any_order(features):
    assert_as_defined(problem("sigmoid", features=features))


@pytest.mark.parametrize("hidden", [(5,), (6, 5, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "dice"])
def test_numbers_of_layers(activation, hidden):
    assert_as_defined(problem(activation, hidden=hidden))


# of a user's candidates, those before the first event see nothing under some masks
MANY = dict(candidates=[2, 0, 1, 2, 3, 0, 2, 3, 3, 2, 2], lengths=[1, 0, 7, 9])


@pytest.mark.parametrize("normalize", [None, "softmax"])
@slow_after(2, "activation", ["dice", "silu", "prelu", "dice-eval", "relu"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(activation, normalize, mask):
    assert_as_defined(problem(activation, normalize=normalize, mask=mask, **MANY))


@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_no_user(mask):
    """Numbers of targets are empty then."""
    assert_as_defined(problem("silu", mask=mask, candidates=[], lengths=[]))


@pytest.mark.parametrize("chunk, masked", [(1, 1), (3, 4), (100, 1)])
def test_chunks_of_pairs_that_are_seen(monkeypatch, chunk, masked):
    monkeypatch.setattr(din, "CHUNK", chunk)
    monkeypatch.setattr(din, "MASKED_CHUNK", masked)
    for n_q, v_width in ((0, 5), (2, None)):
        case = problem("dice", normalize="softmax", mask="hstu", n_q=n_q, v_width=v_width, **MANY)
        assert_as_defined(case)


@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_definition_of_masks(mask, normalize):
    """Pair by pair: `AttentionMask` says which of them have a score, and which Dice counts."""
    case = problem("dice", normalize=normalize, mask=mask, hidden=(7,), **MANY)
    x, rule = case.tensors, case.options["mask"]
    pairs, z = [], []
    for user, (start, end) in enumerate(itertools.pairwise(case.kv_offsets.tolist())):
        own = (case.candidates == user).nonzero().flatten().tolist()
        targets = 0 if rule.num_targets is None else int(rule.num_targets[user])
        keep = rule.keep(len(own), end - start, targets)
        for i, j in itertools.product(range(len(own)), range(end - start)):
            if keep[i, j]:
                q, k = x["q"][own[i]], x["k"][start + j]
                pairs.append((own[i], start + j))
                z.append(x["weight0"] @ torch.cat([q, k, q - k, q * k]) + x["bias0"])
    expected = torch.zeros(len(case.candidates), 5, dtype=torch.float64)
    if pairs:
        z = torch.stack(z)
        n = (z - z.mean(0)) / (z.var(0, correction=0) + 1e-8).sqrt()
        p = torch.sigmoid(n * x["norm_weight0"] + x["norm_bias0"])
        s = (z * (p + x["slope0"] * (1 - p))) @ x["weight1"][0] + x["bias1"]
        for candidate in {i for i, _ in pairs}:
            of = [at for at, (i, _) in enumerate(pairs) if i == candidate]
            weights = s[of].softmax(0) if normalize else s[of]
            expected[candidate] = weights @ x["v"][[pairs[at][1] for at in of]]
    torch.testing.assert_close(case.definition(*x.values()), expected)


def test_what_a_mask_hides_is_not_read():
    """And an AttentionMask that hides nothing changes no bit."""
    case = problem("silu", mask="truncated", candidates=[0, 1], lengths=[5, 40], n_q=2)
    clean = case.results(case.call)
    for name in "kv":
        case.tensors[name] = case.tensors[name].clone()
        case.tensors[name][5 + 3] = torch.nan  # behind the prefix, before the recent history
    found = case.results(case.call)
    of_events = found.pop("weight0")  # a GEMM of all events has its gradient
    assert of_events.isnan().any()
    assert all(torch.equal(x, clean[name]) for name, x in found.items())
    case = problem("silu")
    expected, case.options["mask"] = case.call(*case.tensors.values()), AttentionMask()
    assert torch.equal(case.call(*case.tensors.values()), expected)


ONE_EACH = dict(candidates=[3, 0, 2, 4, 1], lengths=[3, 0, 7, 2, 1])


@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("activation", ["relu", "dice"])
@pytest.mark.parametrize("chunk", [2, 100])
def test_one_candidate_of_each_user(monkeypatch, activation, normalize, chunk):
    """In chunks of segments of any lengths."""
    monkeypatch.setattr(din, "CHUNK", chunk)
    for v_width in (5, None):
        case = problem(activation, normalize=normalize, v_width=v_width, **ONE_EACH)
        assert_as_defined(case)
    segments = [torch.arange(6), case.kv_offsets, None]
    assert all(isinstance(x, din.Single) for x in din._chunks(segments, None))


@pytest.mark.parametrize("activation", ["relu", "prelu", "dice-eval"])
@pytest.mark.parametrize("options", [{}, ONE_EACH], ids=["", "one-each"])
def test_a_nan_stays_with_its_user(activation, options):
    case = problem(activation, **options)
    clean = case.results(case.call)
    case.tensors["k"][1] = torch.nan  # of the first user
    found, own = case.results(case.call), case.candidates == 0
    for name, others in dict(out=~own, q=~own, k=slice(3, None), v=slice(3, None)).items():
        assert torch.equal(found[name][others], clean[name][others])
    assert found["out"][own].isnan().all()


@pytest.mark.parametrize("n_q", [1, 3])
def test_query_rows_of_a_candidate(n_q):
    assert_as_defined(problem(n_q=n_q, normalize="softmax"))


@pytest.mark.parametrize("chunk", [1, 5, 12])
@pytest.mark.parametrize("activation", ["relu", "dice"])
def test_chunks_of_pairs(monkeypatch, activation, chunk):
    monkeypatch.setattr(din, "CHUNK", chunk)
    candidates, lengths = [0, 1, 1, 2, 2, 2, 4, 4, 4, 3], [5, 3, 4, 2, 4]
    assert_as_defined(problem(activation, candidates=candidates, lengths=lengths))


@pytest.mark.parametrize("activation", ["relu", "dice"])
def test_nothing_to_attend(activation):
    for candidates, lengths in (([], [3, 1]), ([0, 1], [0, 0]), ([], []), ([], [0])):
        case = problem(activation, candidates=candidates, lengths=lengths)
        results = case.results(case.call)
        assert all(not x.any() and x.isfinite().all() for x in results.values())


@slow_after(1, "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["sigmoid", "prelu", "dice", "dice-eval"])
def test_accuracy(activation, dtype):
    """Results and gradients are as close to float64 as one rounding of each operation lets them
    be."""
    case = problem(activation, dtype, candidates=[0, 1, 1, 2] * 4, lengths=[5, 40, 0], width=16)
    function = lambda *tensors: case.call(*tensors)  # noqa: E731
    actual, do = accuracy.results(function, case.tensors)
    accuracy.assert_accurate(actual, accuracy.definition(case.definition, case.tensors, do))


def test_running_statistics_are_those_of_batch_norm():
    """Of real pairs; a batch without pairs changes nothing."""
    case = problem("dice", hidden=(7,))
    norm = nn.BatchNorm1d(7, eps=1e-8, momentum=0.3, dtype=torch.float64)
    case.statistics = dict(
        running_means=[norm.running_mean.clone()], running_vars=[norm.running_var.clone()],
        training=True, momentum=0.3,
    )  # fmt: skip
    assert_as_defined(case)
    pairs = [(c, j) for c, user in enumerate(case.candidates.tolist())
             for j in range(*case.kv_offsets[user : user + 2].tolist())]  # fmt: skip
    i, j = torch.tensor(pairs).unbind(1)
    q, k = case.tensors["q"][i], case.tensors["k"][j]
    x = torch.cat([q, k, q - k, q * k], 1)
    norm(x @ case.tensors["weight0"].T + case.tensors["bias0"])
    exactly = dict(rtol=1e-12, atol=1e-12)  # the momentum too is in float64
    torch.testing.assert_close(case.statistics["running_means"][0], norm.running_mean, **exactly)
    torch.testing.assert_close(case.statistics["running_vars"][0], norm.running_var, **exactly)
    empty = problem("dice", hidden=(7,), candidates=[1])
    empty.statistics = case.statistics
    empty.call(*empty.tensors.values())
    torch.testing.assert_close(case.statistics["running_means"][0], norm.running_mean, **exactly)


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        self.largest = max(self.largest, *sizes, 0)
        return out


@pytest.mark.parametrize("activation", ["relu", "dice"])
def test_no_tensor_has_a_row_for_each_pair(monkeypatch, activation):
    monkeypatch.setattr(din, "CHUNK", 64)
    case = problem(activation, candidates=[0] * 40, lengths=[50], hidden=(7, 4))
    with _Largest() as mode:
        case.results(case.call)
    assert mode.largest < 40 * 50


def test_results_are_deterministic():
    case = problem("dice", torch.float32, candidates=[0, 1] * 20, lengths=[30, 70])
    first, second = case.results(case.call), case.results(case.call)
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_values_that_are_the_keys():
    for n_q in (0, 2):
        assert_as_defined(problem("dice", v_width=None, n_q=n_q))


def test_a_candidate_index():
    case = problem()
    expected = case.call(*case.tensors.values())
    case.candidates = CandidateIndex.from_map(case.candidates, 4)
    assert torch.equal(case.call(*case.tensors.values()), expected)


def test_autocast():
    case = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        results = case.results(case.call)
    assert results["out"].dtype == torch.bfloat16 and results["weight0"].dtype == torch.float32


def test_the_definition_has_its_gradients():
    for activation, mask in (("sigmoid", None), ("dice", None), ("dice", "hstu")):
        case = problem(activation, normalize="softmax", mask=mask)
        inputs = [x.requires_grad_() for x in case.tensors.values()]
        assert torch.autograd.gradcheck(case.definition, inputs, fast_mode=True)


def test_the_reference_is_differentiable_twice_and_the_operator_is_not():
    case = problem("sigmoid")
    values = [x.requires_grad_() for x in case.tensors.values()]
    for implementation in ("reference", "auto"):
        out = case.call(*values, implementation=implementation)
        (dq,) = torch.autograd.grad(out.sum(), values[0], create_graph=True)
        if implementation == "reference":
            dq.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="not differentiable twice"):
                dq.sum().backward()


def test_statistics_come_in_pairs():
    with pytest.raises(ValueError, match="both running_means and running_vars"):
        UnitParameters([torch.zeros(7)], running_vars=[torch.ones(7)])


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(activation="gelu"), ValueError, "activation must be one of"),
        (dict(normalize="sum"), ValueError, "normalize must be"),
        (dict(mask="causal"), TypeError, "mask must be an AttentionMask"),
        (
            dict(mask=AttentionMask(num_targets=torch.tensor([1]))),
            ValueError,
            r"mask.num_targets must have shape \[B\] = \[4\], got \[1\]",
        ),
        (
            dict(mask=AttentionMask(num_targets=torch.tensor([4, 0, 0, 0]))),
            ValueError,
            "mask.num_targets must be at most the segment's length, got 4 of 3 at segment 0",
        ),
        (dict(features=("q", "q")), ValueError, "features must be different"),
        (dict(features=("q+k",)), ValueError, "features must be different"),
        (dict(weights=[torch.zeros(1, 24)]), ValueError, "of the same two or more linears"),
        (dict(biases=torch.zeros(7)), TypeError, "biases must be a list"),
        (dict(k=torch.zeros(12, 5)), ValueError, "k must have q's width"),
        (dict(v=torch.zeros(11, 6)), ValueError, "v k's rows"),
        (dict(kv_offsets=torch.tensor([0, 3])), ValueError, "must end at the number of rows"),
        (dict(candidates=torch.tensor([9] * 7)), ValueError, "candidates must be"),
        (dict(activation="dice"), ValueError, "'dice' needs units"),
        (dict(units=UnitParameters([torch.zeros(7)])), ValueError, "'relu' takes no units"),
        (
            dict(activation="prelu", units=UnitParameters([torch.zeros(3), torch.zeros(4)])),
            ValueError,
            r"units.slopes must be one tensor \[H\] for each hidden layer",
        ),
    ],
)
def test_errors(change, error, message):
    case = problem(dtype=torch.float32)
    tensors = case.tensors
    arguments = dict(
        q=tensors["q"], k=tensors["k"], v=tensors["v"],
        candidates=case.candidates, kv_offsets=case.kv_offsets,
        weights=[tensors[f"weight{i}"] for i in range(3)],
        biases=[tensors[f"bias{i}"] for i in range(3)], activation="relu",
    )  # fmt: skip
    with pytest.raises(error, match=message):
        functional.din_attention(**(arguments | change))
