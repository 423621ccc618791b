"""The operators in C++, beside Python's: the same results within rounding, for the whole space of
calls on the CPU."""

import random
import shutil

import accuracy
import pytest
import torch
from calls import check
from cases import random_case
from din_problem import MASKS, problem
from jagged_kernels.attention.autograd import differentiate_attention
from jagged_kernels.attention.params import SegmentTensors

import jagged_modules as jm
from jagged_modules import cpp_library
from jagged_modules import functional as F
from jagged_modules.activations import ACTIVATIONS
from jagged_modules.cpu import attention as python
from jagged_modules.functional import din_node

from ..compiled import library, object_file

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OFFSETS = torch.tensor([0, 3, 3, 73, 210])  # one tile of keys, several, none
TWO = torch.tensor([0, 2, 6])


@pytest.fixture(scope="module")
def operator(tmp_path_factory):
    out = library(tmp_path_factory.mktemp("library") / "libjagged_modules.so")
    torch.ops.load_library(str(out))
    found = torch.ops.jagged_modules_cpp.attention_cpu.default
    differentiate_attention(found, python.cpu_backward)
    return found


@pytest.fixture
def calls(operator, monkeypatch):
    """Attention calls C++ where it does not drop weights. The list of what it was called with."""
    called = []

    def call(*arguments):
        if SegmentTensors(*arguments[3]).dropout_seed is not None:
            return python_operator(*arguments)
        called.append(arguments)
        return operator(*arguments)

    python_operator = python._OPERATOR
    monkeypatch.setattr(python, "_OPERATOR", call)
    return called


@pytest.fixture
def din_calls(operator, monkeypatch):
    """As `calls`, of DIN's attention."""
    found, called = torch.ops.jagged_modules_cpp.din_attention_cpu.default, []
    monkeypatch.setattr(
        din_node,
        "din_attention_cpu",
        lambda *arguments: called.append(arguments) or found(*arguments),
    )
    return called


@pytest.mark.parametrize("source", sorted(cpp_library.SOURCES.glob("*.cpp")), ids=lambda x: x.name)
def test_a_source_compiles_without_warnings(source, tmp_path):
    assert object_file(source, cpp_library.command(tmp_path / "library.so")).exists()


@pytest.mark.parametrize("name", ["attention_cpu", "din_attention_cpu"])
def test_schemas_are_those_of_python(operator, name):
    schemas = [
        str(getattr(getattr(torch.ops, space), name).default._schema)
        for space in ("jagged_modules_cpp", "jagged_modules")
    ]
    assert schemas[0].replace("_cpp::", "::") == schemas[1]


@pytest.mark.parametrize(
    "activation", ["sigmoid", "silu", "relu", "identity", "prelu", "dice-eval"]
)
def test_random_calls_of_din_attention(din_calls, activation):
    fixed = dict(activation=activation, implementation="auto")
    for seed, normalize in enumerate([None, "softmax"]):
        check(random_case("din_attention", seed, "cpu", normalize=normalize, **fixed))
    assert len(din_calls) >= 2


@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("activation", ["relu", "prelu", "dice-eval"])
def test_din_attention_is_its_definition(din_calls, activation, normalize):
    case = problem(activation, candidates=[0, 1, 3, 3], lengths=(3, 0, 7, 70), normalize=normalize)
    values = case.tensors.values()
    torch.testing.assert_close(case.call(*values), case.definition(*values))
    assert din_calls


@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_din_attention(din_calls, mask, normalize):
    options = dict(candidates=[0, 1, 3, 3], lengths=(3, 0, 7, 70), normalize=normalize, mask=mask)
    case = problem("silu", n_q=3, **options)
    values = case.tensors.values()
    torch.testing.assert_close(case.call(*values), case.definition(*values))
    assert all(arguments[-1] is not None for arguments in din_calls)


def din_attention(rows, offsets, weights):
    """q is k; the hidden units are those of weights."""
    biases = [torch.ones(3), torch.zeros(1)]
    index, options = jm.CandidateIndex.from_offsets(offsets), dict(normalize="softmax")
    return F.din_attention(
        *[rows] * 3, index, offsets, weights, biases, activation="silu", **options
    )


def test_bits_of_din_attention_depend_on_nothing_else(din_calls):
    rows, weights = torch.randn(210, 5), [torch.randn(3, 20), torch.randn(1, 3)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        out = din_attention(rows, OFFSETS, weights)
    finally:
        torch.set_num_threads(threads)
    alone = din_attention(rows[73:], torch.tensor([0, 137]), weights)
    assert torch.equal(out[73:], alone)
    assert len(din_calls) == 2


@pytest.mark.parametrize(
    "place, given, message",
    [
        (
            4,
            [torch.tensor([0, 7, 6]), TWO, None],
            "q_offsets must not decrease, got 7 before 6 at segment 1",
        ),
        (
            4,
            [TWO, torch.tensor([0, 2, 9]), None],
            "kv_offsets must be 0 to 6, the number of rows, got 0 to 9",
        ),
        (
            4,
            [TWO, torch.tensor([0, 6]), None],
            "q_offsets must be of 1 segments, as kv_offsets, got 2",
        ),
        (
            1,
            [torch.ones(3, 7), torch.ones(1, 3)],
            r"weights must be of shape \[3, 8\], got \[3, 7\]",
        ),
        (0, [torch.ones(6, 8)] * 4, r"a must be of shape \[6, 3\], got \[6, 8\]"),
        (2, [torch.ones(0)], "biases must have 1 elements, got 0"),
        (2, [], "biases must be of 1 layers, got 0"),
        (5, "gelu!", "din_attention_cpu: no activation gelu!"),
        (5, "dice", "din_attention_cpu: no activation dice"),
    ],
)
def test_operands_of_din_attention_that_are_no_addresses(operator, place, given, message):
    rows = torch.ones(6, 8)
    operands = [rows, rows, torch.ones(6, 3), torch.ones(6, 3)]
    weights, biases = [torch.ones(3, 8), torch.ones(1, 3)], [torch.ones(1)]
    arguments = [operands, weights, biases, [None], [TWO, TWO, None], "relu", True]
    arguments[place] = given
    with pytest.raises(RuntimeError, match=message):
        torch.ops.jagged_modules_cpp.din_attention_cpu(*arguments)


@pytest.mark.parametrize(
    "function", ["jagged_attention", "target_attention", "block_diagonal_attention"]
)
def test_random_calls(calls, function):
    """Forward, and the gradients that Python computes from the log-sum-exp of C++. A NaN of a
    segment stays in it."""
    for seed in range(12):
        check(random_case(function, seed, "cpu", dropout_p=0))
    assert len(calls) >= 12


@pytest.mark.parametrize("bias", [None, "both"])
def test_mask_and_bias_are_those_of_the_first_query_group(calls, bias):
    fixed = dict(dropout_p=0, operands="2 groups", mask="causal", bias=bias)
    for seed in range(4):
        check(random_case("jagged_attention", seed, "cpu", **fixed))
    assert all(mask is not None and x[0].shape != x[1].shape for _, _, _, x, _, mask, *_ in calls)
    assert all((x[0] is not None) == (bias is not None) for _, _, _, _, x, *_ in calls)
    assert calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(calls, activation, dtype):
    q, k, v = (4 * torch.randn(210, heads, 40, dtype=dtype) for heads in (4, 2, 2))
    accuracy.check(
        lambda q, k, v: F.jagged_attention(q, k, v, OFFSETS, activation=activation),
        lambda q, k, v, do: accuracy.attention(q, k, v, do, OFFSETS, activation=activation),
        dict(q=q, k=k, v=v),
    )
    assert calls


def test_masks(calls):
    """With scores of 1 and one-hot values, the results are what a row sees."""
    pick, ones = random.Random(0), torch.ones(140, 1, 1)
    for keys in 5, 64, 140:
        for _ in range(60):
            limit = lambda: pick.choice([0, 0, 1, 3, 40])
            targets = pick.choice([None, 0, 1, 4])
            mask = jm.AttentionMask(
                causal=pick.random() < 0.5,
                window=pick.choice([None, (3, None), (None, 2), (70, 1), (0, 0)]),
                num_targets=None if targets is None else torch.tensor([targets]),
                target_group_size=pick.choice([1, 2, 3]),
                contextual_seqlen=limit(),
                max_attn_len=limit(),
                min_full_attn_seqlen=limit(),
                global_prefix=limit(),
                recent_history=limit(),
            )
            queries = pick.choice([keys, 1, keys + 3 if keys < 100 else 40])
            seen = F.jagged_attention(
                ones[:queries],
                ones[:keys],
                torch.eye(keys)[:, None],
                torch.tensor([0, queries]),
                torch.tensor([0, keys]),
                activation="identity",
                mask=mask,
            )
            kept = mask.keep(queries, keys, targets or 0)
            assert torch.equal(seen[:, 0], kept.float()), (mask, queries, keys)
    assert len(calls) > 100


@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_a_segments_bits_depend_on_nothing_else(calls, activation):
    q = torch.randn(210, 2, 24)
    mask = jm.AttentionMask(causal=True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        out = F.jagged_attention(q, q, q, OFFSETS, activation=activation, mask=mask)
    finally:
        torch.set_num_threads(threads)
    x, offsets = q[73:], torch.tensor([0, 137])
    alone = F.jagged_attention(x, x, x, offsets, activation=activation, mask=mask)
    assert torch.equal(out[73:], alone)
    assert len(calls) == 2


def test_infinite_scores_give_what_softmax_does(calls):
    q = torch.tensor([1.0, 1.0, -1.0])[:, None, None]
    k = torch.tensor([-torch.inf, 2.0, -torch.inf])[:, None, None]
    out = F.jagged_attention(q, k, q, torch.arange(4), scale=1.0)
    expected = torch.tensor([torch.nan, 1.0, torch.nan])
    torch.testing.assert_close(out.flatten(), expected, equal_nan=True)
    assert calls


def call(operator, tensors):
    """tensors: those of the segments, then those of the bias."""
    x, options, factors = torch.randn(6, 1, 8), [0, 0, 1, 0, 0, *[-1] * 5], [1.0, 1.0]
    operator(x, x, x, tensors[:10], tensors[10:], None, options, factors, "softmax", "auto")


@pytest.mark.parametrize(
    "offsets, message",
    [
        ([0, 5, 3], "q_offsets must not decrease, got 5 before 3 at segment 1"),
        ([0, 5, 9], "q_offsets must be 0 to 6, the number of rows, got 0 to 9"),
        ([-1, 5, 6], "q_offsets must be 0 to 6, the number of rows, got -1 to 6"),
        ([], "q_offsets must have 1 elements, got 0"),
    ],
)
def test_offsets_that_are_no_addresses(operator, offsets, message):
    with pytest.raises(RuntimeError, match=message):
        call(operator, [torch.tensor(offsets, dtype=torch.int64)] * 2 + [None] * 14)


@pytest.mark.parametrize("keys", [[0], [0, 2, 4, 6]])
def test_other_numbers_of_segments(operator, keys):
    offsets = torch.tensor([0, 2, 6]), torch.tensor(keys)
    message = f"q_offsets must be of {len(keys) - 1} segments, as kv_offsets, or a multiple, got 2"
    with pytest.raises(RuntimeError, match=message):
        call(operator, [*offsets, *[None] * 14])


@pytest.mark.parametrize(
    "place, message",
    [
        (2, "num_targets must have 2 elements, got 1"),
        (3, "segment_scale must have 2 elements, got 1"),
        (4, "attention_cpu: pages are not supported"),
        (9, "attention_cpu: dropout is not supported"),
        (12, "timestamps must have 6 elements, got 1"),
        (14, "query_timestamps must have 6 elements, got 1"),
        (15, "query_shift must have 2 elements, got 1"),
    ],
)
def test_what_is_too_short_or_not_computed(operator, place, message):
    offsets = torch.tensor([0, 4, 6])
    tensors = [offsets, offsets, *[None] * 14]
    tensors[place] = torch.tensor([1])
    with pytest.raises(RuntimeError, match=message):
        call(operator, tensors)
