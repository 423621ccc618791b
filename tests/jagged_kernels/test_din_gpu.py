"""DIN's attention on a GPU."""

import pytest
import torch
from din_problem import ACTIVATIONS, MASKS, problem

import jagged_modules as jm

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
SEGMENTS = dict(
    candidates=[0, 3, 1, 3, 0] + [4] * 35 + [6] * 3, lengths=[1, 64, 3, 65, 128, 0, 300]
)
DTYPES = pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(check_din, activation, dtype):
    normalize = "softmax" if dtype == FP16 else None
    options = dict(width=64, v_width=None, hidden=(80, 40), normalize=normalize)
    check_din(activation, dtype, "cuda", **options, **SEGMENTS)


@DTYPES
@pytest.mark.parametrize(
    "sizes",
    [
        ((5,), 3, 17),
        ((33, 16), 96, None),
        ((16, 200), 40, 128),
        ((128, 100), 128, None),
        ((128,), 256, None),
        ((80, 40), 128, None),
        ((128, 64), 64, None),
        ((5, 3), 20, None),
        ((80, 64), 64, None),
        ((33, 16), 40, None),
        ((64, 32), 8, None),
    ],
    ids=str,
)
def test_sizes(check_din, sizes, dtype):
    hidden, width, v_width = sizes
    options = dict(hidden=hidden, width=width, v_width=v_width, normalize="softmax")
    options |= dict(candidates=[0, 1, 1, 1], lengths=[2, 70])
    if dtype == FP32 and hidden[0] * (width + sum(hidden[1:])) > 14336:  # of shared memory
        with pytest.raises(ValueError, match="up to 14336"):
            problem("silu", dtype, "cuda", **options).kernel_results()
    else:
        check_din("silu", dtype, "cuda", **options)


@pytest.mark.parametrize("mask", [None, "hstu", "truncated", "band"])
@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("activation", ["relu", "dice-eval", "sigmoid"])
def test_rows_of_many_lengths(check_din, activation, normalize, mask, monkeypatch):
    """Tiles of a row of q are loaded while those of the row before are computed. A program has
    seven rows or eight, some of them without events."""
    from jagged_kernels.din import op

    monkeypatch.setattr(op._Launch, "programs", lambda launch, rows: 32)
    lengths = [0, 1, 64, 65, 0, 0, 200, 128, 300, 63, 129, 0]
    options = dict(width=64, v_width=None, hidden=(80, 40), normalize=normalize, mask=mask)
    candidates = [i % 12 for i in range(240)]
    check_din(activation, BF16, "cuda", candidates=candidates, lengths=lengths, **options)


@pytest.mark.parametrize("mask", [None, "hstu", "causal"])
@pytest.mark.parametrize("activation", ["relu", "dice-eval"])
def test_portable_kernels(check_din, activation, mask, monkeypatch):
    """Where Hopper's would run."""
    from jagged_kernels.din import op

    monkeypatch.setattr(op, "_runs_hopper", lambda _, backward: False)
    options = dict(width=64, v_width=None, hidden=(80, 40), normalize=None, mask=mask)
    check_din(activation, BF16, "cuda", **options, **SEGMENTS)


@DTYPES
@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(check_din, mask, activation, normalize, dtype):
    options = dict(width=64, v_width=None, hidden=(80, 40), normalize=normalize, mask=mask)
    check_din(activation, dtype, "cuda", **options, **SEGMENTS)


@pytest.mark.parametrize("normalize", [None, "softmax"])
@pytest.mark.parametrize("activation", ["sigmoid", "dice-eval"])
@pytest.mark.parametrize("mask", ["causal", "truncated"])
def test_nan_of_hidden_events_and_neighbours(mask, activation, normalize):
    """NaN of events that no row sees does not reach the result."""
    options = dict(width=64, v_width=None, hidden=(80, 40), normalize=normalize, mask=mask)
    case = problem(activation, BF16, "cuda", candidates=[0, 2, 2], lengths=[90, 70, 300], **options)
    k = case.tensors["k"].requires_grad_()
    clean = case.call(*case.tensors.values())
    (dk,) = torch.autograd.grad(clean.float().sum(), k)
    hidden = dk.eq(0).all(1)
    assert hidden.sum() > 300  # of 460
    case.tensors["k"] = k.detach().masked_fill(hidden[:, None], torch.nan)
    assert torch.equal(case.call(*case.tensors.values()), clean)


def test_query_rows(check_din):
    check_din("dice", FP32, "cuda", n_q=3, width=16, hidden=(20,), v_width=None, **SEGMENTS)


@pytest.mark.parametrize("activation", ["relu", "dice"])
def test_results_are_deterministic(activation):
    options = dict(candidates=[0, 1] * 600, lengths=[500, 70], width=64, v_width=None)
    case = problem(activation, BF16, "cuda", hidden=(80, 40), **options)
    first, second = case.kernel_results(), case.kernel_results()
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_nothing_to_attend():
    for candidates, lengths in (([], [3, 1]), ([0, 1], [0, 0]), ([], []), ([], [0])):
        case = problem("dice", FP32, "cuda", candidates=candidates, lengths=lengths)
        results = case.kernel_results()
        assert all(not x.any() and x.isfinite().all() for x in results.values())


def test_no_memory_for_pairs():
    """A result and all gradients take less memory than one number for each pair."""
    case = problem(
        "relu", BF16, "cuda", candidates=[0] * 4000, lengths=[4000], width=16, v_width=None
    )
    case.kernel_results()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.kernel_results()
    assert torch.cuda.max_memory_allocated() - before < 4000 * 4000 * 2


@pytest.mark.parametrize("activation", ["sigmoid", "dice"])
def test_rows_behind_the_last_segment(activation):
    """NaN there reaches nothing, where only the device knows the lengths."""
    layer = jm.JaggedDINAttention(32, (20, 18), activation, device="cuda")
    targets = torch.randn(6, 1, 32, device="cuda")
    users = torch.tensor([0, 1, 1, 0, 2, 2], device="cuda")
    offsets = torch.tensor([0, 40, 40, 107], device="cuda")
    given = torch.randn(150, 32, device="cuda")
    given[107:] = torch.nan
    results = []
    for rows in (107, 150):
        history = given[:rows].clone().requires_grad_()
        layer.zero_grad()
        out = layer(targets, (history, offsets.clone()), users)
        out.sum().backward()
        gradients = [x.grad for x in layer.parameters()]
        results.append([out, history.grad[:107], *gradients])
        assert not history.grad[107:].any()
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_layer_compiled_and_cached():
    layer = jm.JaggedDINAttention(64, (80, 40), "prelu", normalize="softmax", device="cuda")
    offsets = torch.tensor([0, 40, 40, 107], device="cuda")
    history = torch.randn(107, 64, device="cuda"), offsets
    targets, users = torch.randn(5, 2, 64, device="cuda"), torch.tensor([0, 1, 1, 0, 2]).cuda()
    expected = layer(targets, history, users)
    cached = layer.score(targets, layer.cache(history), users)
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-5)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    out = compiled(targets, history, users)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    out.sum().backward()
