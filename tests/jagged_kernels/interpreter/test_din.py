"""DIN's attention in Triton's interpreter (fp32 and fp16)."""

import pytest
import torch
from din_problem import ACTIVATIONS, MASKS, problem
from marks import slow_after
from torch import library

from jagged_modules import AttentionMask

FP32, FP16 = torch.float32, torch.float16

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PARAMETERLESS = "sigmoid", "silu", "identity"
# users without events or candidates, several blocks of events and groups of candidates
SEGMENTS = dict(candidates=[0, 3, 1, 3, 0] + [4] * 17, lengths=[1, 40, 3, 33, 5, 0])


# each activation and each mask is tested with one of both sums
@slow_after(
    7,
    "activation, normalize",
    [(x, "softmax" if x in PARAMETERLESS else None) for x in ACTIVATIONS]
    + [(x, None if x in PARAMETERLESS else "softmax") for x in ACTIVATIONS],
)
def test_forward_and_gradients(check_din, activation, normalize):
    check_din(activation, FP32, "cpu", normalize=normalize, width=10, **SEGMENTS)


@slow_after(
    5,
    "mask, activation, normalize",
    [(x, "dice", None if x in ("hstu", "truncated") else "softmax") for x in MASKS]
    + [(x, "dice", "softmax" if x in ("hstu", "truncated") else None) for x in MASKS]
    + [(x, "silu", y) for x in MASKS for y in (None, "softmax")],
)
def test_masks(check_din, mask, activation, normalize):
    """Blocks that no row sees, that some see, and rows that see nothing."""
    options = dict(candidates=[0, 3, 0, 3, 3], lengths=[1, 3, 0, 35, 0], hidden=(5, 3), width=4)
    check_din(activation, FP32, "cpu", normalize=normalize, mask=mask, **options)


@slow_after(1, "mask", ["hstu", "truncated"])
def test_masks_in_half_precision(check_din, mask):
    options = dict(width=16, v_width=None, hidden=(40,), n_q=3, normalize="softmax", mask=mask)
    check_din("sigmoid", FP16, "cpu", candidates=[0, 1], lengths=[3, 66], **options)


@slow_after(2, "activation", ["sigmoid", "prelu", "dice", "relu"])
def test_half_precision(check_din, activation):
    check_din(activation, FP16, "cpu", width=16, v_width=None, hidden=(40, 36), **SEGMENTS)


@slow_after(
    2, "sizes", [((5,), 3, 17), ((20, 40), 16, None), ((16, 16), 17, 5), ((80,), 1, 1)], ids=str
)
def test_sizes(check_din, sizes):
    hidden, width, v_width = sizes
    options = dict(candidates=[0, 1, 1], lengths=[2, 35])
    check_din("silu", FP32, "cpu", hidden=hidden, width=width, v_width=v_width, **options)


def test_scores_that_grow_along_the_history():
    """The sums of softmax are rescaled in each block."""
    options = dict(candidates=[0, 1], lengths=[100, 100], normalize="softmax", features=("q", "k"))
    case = problem("identity", FP32, v_width=5, **options)
    growing = torch.linspace(-4, 4, 100)
    rows = torch.cat([growing, -growing])  # of one of both users they fall instead
    case.tensors["k"] = rows[:, None] * case.tensors["k"][:1]
    expected = case.results(case.definition)
    for name, x in case.kernel_results().items():
        torch.testing.assert_close(x, expected[name], rtol=1e-3, atol=1e-4)


def test_query_rows_and_one_layer_of_dice(check_din):
    options = dict(candidates=[1, 0], lengths=[2, 5], n_q=3, hidden=(7,), v_width=None)
    check_din("dice", FP32, "cpu", normalize="softmax", **options)


@pytest.mark.parametrize("activation", ["relu", "dice"])
def test_nothing_to_attend(activation):
    for candidates, lengths in (([], [3, 1]), ([0, 1], [0, 0]), ([], []), ([], [0])):
        case = problem(activation, FP32, candidates=candidates, lengths=lengths)
        results = case.kernel_results()
        assert all(not x.any() and x.isfinite().all() for x in results.values())


def test_a_neighbours_nan_stays_where_it_is():
    case = problem("silu", FP32, candidates=[0, 1, 2], lengths=[5, 40, 3], normalize="softmax")

    def results(spoiled):
        for name in "kv":
            case.tensors[name] = case.tensors[name].clone()
            case.tensors[name][5:45] = torch.nan if spoiled else 0.0
        return case.kernel_results()

    clean, spoiled = results(False), results(True)
    assert torch.equal(clean["out"][[0, 2]], spoiled["out"][[0, 2]])
    assert torch.equal(clean["q"][[0, 2]], spoiled["q"][[0, 2]])
    for name in "kv":
        rows = [*range(5), *range(45, 48)]
        assert torch.equal(clean[name][rows], spoiled[name][rows])


def test_rows_that_are_strided_views():
    """As a cache has them: events beside what the first linear adds for them."""
    case = problem("relu", FP32, width=6, v_width=None)
    expected = case.results(case.definition)
    for name in "qk":
        x = case.tensors[name]
        wider = torch.full((x.shape[0], 11), torch.nan)
        wider[:, :6] = x
        case.tensors[name] = wider[:, :6]
    for name, x in case.kernel_results().items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-5)


def test_moments_are_those_of_all_pairs_where_the_mean_is_large():
    """A difference of sums of squares would have no correct digit."""
    from jagged_kernels.din.op import triton_din_moments

    case = problem("dice", FP32, hidden=(7,), width=6, v_width=None, candidates=[1] * 30)
    q, k = case.tensors["q"], case.tensors["k"]
    case.kv_offsets = torch.tensor([0, 2, 12])
    a, of_k = torch.randn(30, 7) + 1e3, torch.randn(7, 6)
    weight, tables = torch.randn(7, 6), [torch.zeros(7, 7)]
    weights, biases = [weight, torch.randn(1, 7)], [torch.zeros(1)]
    segments = [torch.tensor([0, 0, 30]), case.kv_offsets, None]
    found = triton_din_moments([q, k, a, of_k], weights, biases, tables, segments, "dice", 0)
    matrices = of_k.double() + weight.double() * q[:, None].double()  # [30, 7, 6]
    z = k[2:].double() @ matrices.mT + a[:, None].double()
    variance, mean = torch.var_mean(z.flatten(0, 1), 0, correction=0)
    assert (found[0] == 300).all()
    torch.testing.assert_close(found[1], mean.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[2], variance.float(), rtol=1e-4, atol=0)


def test_no_second_derivative():
    case = problem("silu", FP32, candidates=[0, 1], lengths=[2, 3])
    values = [x.requires_grad_() for x in case.tensors.values()]
    out = case.call(*values, implementation="triton")
    (dq,) = torch.autograd.grad(out.sum(), values[0], create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        dq.sum().backward()


def test_operators_pass_opcheck():
    from jagged_kernels.din import op

    offsets, table = torch.tensor([0, 2, 3]), [torch.rand(7, 5)]
    q, k, a, of_k = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 5), torch.randn(5, 4)
    given = [q, k, a, of_k], [torch.randn(5, 4), torch.randn(1, 5)], [torch.randn(1)], table
    rows, targets = torch.randn(3), torch.tensor([1, 0])
    mask = list(AttentionMask(causal=True, num_targets=targets).params)
    segments, seen = [offsets, offsets, None], [offsets, offsets, targets]
    for operator, arguments in (
        (op.triton_din, (*given, segments, "dice", True)),
        (op.triton_din_moments, (*given, segments, "dice", 0)),
        (op.triton_din_backward, (q, rows, rows, *given, segments, "dice", True, -1)),
        (op.triton_din_backward, (q, rows, rows, *given, segments, "dice", True, 0)),
        (op.triton_din, (*given, seen, "dice", True, mask)),
        (op.triton_din_moments, (*given, seen, "dice", 0, mask)),
        (op.triton_din_backward, (q, rows, rows, *given, seen, "dice", True, -1, mask)),
    ):
        library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_sizes_that_the_kernels_do_not_take():
    for options in (
        dict(hidden=(5, 4, 3)),
        dict(hidden=(257,)),
        dict(width=300),
        dict(hidden=(256, 256)),
    ):
        case = problem("relu", FP32, candidates=[0], lengths=[1], **options)
        with pytest.raises(ValueError, match="one or two hidden layers of at most 256 units"):
            case.call(*case.tensors.values(), implementation="triton")
