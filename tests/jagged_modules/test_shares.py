"""Operators on the CPU divide groups of segments among threads, in which torch's operators use no
others."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from jagged_kernels.common.one_thread import one_thread
from torch.utils._python_dispatch import TorchDispatchMode

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.cpu import shares
from jagged_modules.cpu.shares import LARGE, SHARE, in_shares

PROGRAM = """
import os
import threading
import torch
import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.cpu import shares

torch.set_num_threads(2)  # MKL then has a number of threads of its own
lengths = [50, 3, 40, 20, 50, 31, 32, 33]
offsets = torch.tensor([0, *lengths]).cumsum(0)
rows = int(offsets[-1])
q, k, v = (torch.randn(rows, 4, 24, requires_grad=True) for _ in range(3))
x, y, matrices = (torch.randn(*size, requires_grad=True) for size in ((rows, 64), (rows, 64), (len(lengths), 64, 32)))
plan = F.ScorePlan.from_offsets(offsets)
p = torch.randn(plan.total, requires_grad=True)
hstu = dict(mask=jm.AttentionMask(causal=True, contextual_seqlen=2), activation="silu")
bias = jm.RelativeBias(torch.randn(2 * 60 - 1, requires_grad=True))
calls = dict(
    attention=lambda: F.jagged_attention(q, k, v, offsets),
    causal=lambda: F.jagged_attention(q, k, v, offsets, mask=jm.AttentionMask(causal=True)),
    window=lambda: F.jagged_attention(q, k, v, offsets, mask=jm.AttentionMask(window=(9, 0))),
    hstu=lambda: F.jagged_attention(q, k, v, offsets, **hstu),
    bias=lambda: F.jagged_attention(q, k, v, offsets, bias=bias, **hstu),
    dense_bmm=lambda: F.jagged_dense_bmm(x, matrices, offsets),
    jagged_bmm=lambda: F.jagged_jagged_bmm(x, y, offsets),
    outer=lambda: F.jagged_jagged_bmm_jagged_out(x, y, plan),
    array_bmm=lambda: F.array_jagged_bmm_jagged_out(p, x, plan),
    softmax=lambda: F.jagged_softmax(x, offsets),
    softmax2=lambda: F.jagged2_softmax(p, plan),
    block=lambda: F.block_diagonal_attention(q, k, v, offsets, block_size=16),
    one_query=lambda: F.jagged_attention(q[: len(lengths)], k, v, torch.arange(len(lengths) + 1), offsets),
)

def threads_of_torch():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def check(name, before):
    if threads_of_torch() != before:
        raise SystemExit(f"{name} used torch's threads")

before = threads_of_torch()
for shares.SHARE in (2**60, 1):  # computed by one thread, and by two of Python's
    for fixed in (False, True):
        with jm.batch_invariant(fixed):
            for name, call in calls.items():
                out = call()
                check(name, before)
                out.backward(torch.ones_like(out))
                check(name + "'s backward", before)
    print(threading.active_count())
torch.zeros(100_000).exp()
print(threads_of_torch() - before, torch.get_num_threads())
"""  # noqa: E501


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"),
    reason="counts the threads of a process as Linux shows them",
)
def test_no_operator_uses_torchs_threads():
    """torch starts its threads at the first operator that uses them. The library's calls come first
    and must not start them."""
    environment = os.environ | dict(OMP_NUM_THREADS="2", PYTHONPATH=os.pathsep.join(sys.path))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "1\n2\n1 2\n"


def run(costs, threads, divisible=True):
    """What `in_shares` computes where: the items, torch's number of threads, and whether in the
    caller's thread, of each share."""

    def compute(share):
        return share, torch.get_num_threads(), threading.current_thread() is threading.main_thread()

    with one_thread():
        return in_shares(compute, list(range(len(costs))), costs.__getitem__, threads, divisible)


@pytest.mark.parametrize(
    "costs, threads, divisible, expected",
    [
        ([], 4, True, [([], 1, True)]),
        ([SHARE // 2] * 3, 4, True, [([0, 1, 2], 1, True)]),
        ([SHARE] * 5, 1, True, [([0, 1, 2, 3, 4], 1, True)]),
        ([SHARE] * 5, 2, True, [([0, 2, 4], 1, True), ([1, 3], 1, False)]),
        ([1, 2 * SHARE, 3, 3 * SHARE, SHARE], 2, True, [([2, 3], 1, True), ([0, 1, 4], 1, False)]),
        ([1, LARGE, 2], 2, True, [([1], 2, True), ([0, 2], 1, True)]),
        ([1, LARGE, 2], 2, False, [([1], 1, True), ([0, 2], 1, False)]),
        ([LARGE], 1, True, [([0], 1, True)]),
    ],
)
def test_shares(costs, threads, divisible, expected):
    assert run(costs, threads, divisible) == expected


def test_the_first_error_is_raised_after_all_threads_ended():
    ended = []

    def compute(share):
        if share == [0]:
            raise ValueError("the caller's share")
        ended.extend(share)

    with pytest.raises(ValueError, match="the caller's share"), one_thread():
        in_shares(compute, [0, 1, 2], lambda _: SHARE, 3)
    assert sorted(ended) == [1, 2]
    with pytest.raises(ZeroDivisionError), one_thread():
        in_shares(lambda share: 1 // (share[0] - 1), [0, 1], lambda _: SHARE, 2)


@pytest.fixture
def three_shares(monkeypatch):
    """Calls a function twice: with one thread, and with three of which each computes small
    shares."""

    def both(call):
        before, results = torch.get_num_threads(), []
        monkeypatch.setattr(shares, "SHARE", 1)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                results.append(call())
            finally:
                torch.set_num_threads(before)
        return results

    return both


@pytest.mark.parametrize("fixed", [False, True], ids=["default", "batch-invariant"])
@pytest.mark.parametrize(
    "case",
    [
        "self",
        "hstu",
        "groups",
        "shared-queries",
        "bias",
        "dense-bmm",
        "softmax",
        "outer",
        "linear-segments",
    ],
)
def test_results_do_not_depend_on_the_number_of_threads(case, fixed, three_shares, offsets_of):
    """All bits are equal, but for sums over all segments: gradients of tables and of shared
    queries."""
    lengths, others = [5, 3, 0, 17, 5, 33, 1], [2, 3, 1, 0, 2, 9, 4]
    offsets, rows = offsets_of(lengths), sum(lengths)
    q, k, v = (
        torch.randn(n, 4, 8, dtype=torch.float64, requires_grad=True) for n in (rows, rows, rows)
    )
    candidates = torch.randn(sum(others), 4, 8, dtype=torch.float64, requires_grad=True)
    x, y = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True)
        for size in ((rows, 6), (len(lengths), 6, 5))
    )
    table = torch.randn(4, 2 * 40 - 1, requires_grad=True)
    mask = jm.AttentionMask(causal=True, contextual_seqlen=2)
    plan = F.ScorePlan.from_offsets(offsets)
    call, leaves = {
        "self": (lambda: F.jagged_attention(q, k, v, offsets), (q, k, v)),
        "hstu": (
            lambda: F.jagged_attention(q, k, v, offsets, activation="silu", mask=mask),
            (q, k, v),
        ),
        "groups": (
            lambda: torch.cat(
                F.self_target_attention(q, candidates, k, v, offsets, offsets_of(others))
            ),
            (q, candidates, k, v),
        ),
        "shared-queries": (lambda: F.jagged_attention(q[:3], k, v, "shared", offsets), (k, v, q)),
        "bias": (
            lambda: F.jagged_attention(q, k, v, offsets, mask=mask, bias=jm.RelativeBias(table)),
            (q, k, v, table),
        ),
        "dense-bmm": (lambda: F.jagged_dense_bmm(x, y, offsets), (x, y)),
        "softmax": (lambda: F.jagged_softmax(x, offsets), (x,)),
        "outer": (lambda: F.jagged_jagged_bmm_jagged_out(x, x * 2, plan), (x,)),
        "linear-segments": (
            lambda: F.jagged_linear(x, y, None, offsets, activation="gelu"),
            (x, y),
        ),
    }[case]

    def step():
        with jm.batch_invariant(fixed):
            out = call()
        return out.detach(), *torch.autograd.grad(out, leaves, out.detach() * 3 - 0.5)

    for number, (one, three) in enumerate(zip(*three_shares(step), strict=True)):
        if case in ("shared-queries", "bias") and number == len(leaves):
            torch.testing.assert_close(three, one)
        else:
            assert torch.equal(three, one)


def test_inference_mode_and_forked_processes(three_shares, offsets_of):
    """Threads have modes of their own, and a forked process has no threads but one."""
    q, offsets = torch.randn(12, 2, 8), offsets_of([3, 4, 5])

    def attend():
        with torch.inference_mode():
            return F.jagged_attention(q, q, q, offsets)

    one, three = three_shares(attend)
    assert torch.equal(one, three)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writer, bytes([all(map(torch.equal, three_shares(attend), (one, one)))]))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"\1"


@pytest.mark.parametrize("strides", [(448, 64, 1), (0, 0, 0), (1, 50, 350), (0, 64, 1)], ids=str)
def test_compression_gives_bmm_no_strided_matrices(strides):
    """torch.bmm would multiply them one by one, each in all of torch's threads."""

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.bmm.default:
                assert all(1 in x.stride()[1:] for x in args)
                counts.append(len(args[0]))
            return function(*args, **(kwargs or {}))

    counts, storage = [], torch.randn(50 * 7 * 64)
    embeddings = storage.as_strided((50, 7, 64), strides).requires_grad_()
    with Products():
        out = F.linear_compress(torch.randn(11, 7), embeddings)
        torch.autograd.grad(out, embeddings, storage[0].expand_as(out))
    assert counts == [50, 50]
