"""A training step with jagged attention on a GPU: kernels chosen, synchronisation, memory,
torch.compile, autocast."""

import pytest
import torch
from jagged_kernels.attention.select import hopper_is_supported

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.schedule import host_schedule

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "dim, activation",
    [
        (24, "softmax"),
        (64, "softmax"),
        (64, "silu"),
        (64, "gelu_taylor"),
        (128, "gelu"),
        (128, "gelu_taylor"),
    ],
)
def test_auto_takes_hoppers_kernels_where_they_are_faster(offsets, dim, activation, dtype):
    supported = hopper_is_supported(dim, dim, dtype, torch.cuda.get_device_capability())
    applies = supported and (dim, activation) != (128, "gelu_taylor")
    q, k, v = (
        torch.randn(200, 2, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        F.jagged_attention(
            q, k, v, offsets([100] * 2, "cuda"), activation=activation
        ).sum().backward()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if event.key.startswith("attention_")]
    assert len(names) == 3 and all(("hopper" in name) == applies for name in names)


def test_hopper_refuses_what_its_kernels_do_not_support(offsets):
    q = torch.randn(300, 4, 72, device="cuda", dtype=torch.bfloat16)
    segments = offsets([70, 100, 130], "cuda")
    for x in (q.float(), q[..., :32], q[..., :70]):
        with pytest.raises(
            ValueError, match="'hopper' takes fp16 or bf16 on a GPU of compute capability 9.0"
        ):
            F.jagged_attention(x, x, x, segments, implementation="hopper")
    with pytest.raises(
        ValueError,
        match=(
            "'hopper' takes no tensor output_scale in fp16 where segments share keys: use bf16, a"
            " number"
        ),
    ):
        options = dict(
            activation="silu", output_scale=torch.ones(3, device="cuda"), implementation="hopper"
        )
        F.jagged_attention(*[q.half()] * 3, segments, "shared", **options)
    if torch.cuda.get_device_capability() == (9, 0):
        unaligned = q[..., 1:65]
        with pytest.raises(
            ValueError, match="'hopper' takes rows that begin at 16-byte boundaries"
        ):
            F.jagged_attention(
                unaligned, q[..., :64], q[..., :64], segments, implementation="hopper"
            )
        F.jagged_attention(unaligned, q[..., :64], q[..., :64], segments)


def test_debug_checks_look_at_device_values(offsets):
    q = torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16)
    lengths, segments = torch.tensor([70, 100, 130]), offsets([70, 100, 130], "cuda")
    schedule = host_schedule(
        lengths, lengths, num_heads=4, num_kv_heads=4, head_dim=64, dtype=torch.bfloat16
    )
    with jm.debug_checks(True):
        F.jagged_attention(q, q, q, segments, schedule=schedule)
        with pytest.raises(ValueError, match="schedule was built for other lengths"):
            F.jagged_attention(q, q, q, offsets([1, 1, 298], "cuda"), schedule=schedule)
        with pytest.raises(
            ValueError, match="q_offsets must end at the number of rows, 300, got 200"
        ):
            F.jagged_attention(q, q, q, offsets([70, 130], "cuda"))
        with pytest.raises(ValueError, match="must not decrease"):
            F.jagged_attention(q, q, q, torch.tensor([0, 200, 100, 300], device="cuda"))


def test_no_synchronisation(assert_no_synchronisation, offsets):
    q, k, v = (
        torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    segments = offsets([70, 100, 130], "cuda")
    layer = jm.JaggedTargetAttention(32, 4, device="cuda")
    history = jm.Jagged(torch.randn(300, 32, device="cuda"), segments)
    candidates = jm.CandidateIndex.from_map(torch.tensor([2, 0, 2, 1], device="cuda"), 3)
    targets = torch.randn(4, 1, 32, device="cuda")

    def step():
        F.jagged_attention(q, k, v, segments).sum().backward()
        sum(
            x.sum() for x in F.self_target_attention(q, k[:0], k, v, segments, segments * 0)
        ).backward()
        layer(targets, history, candidates).sum().backward()

    assert_no_synchronisation(step)


def test_compiled_without_recompiling_per_batch(offsets):
    layer = jm.JaggedTargetAttention(32, 4, device="cuda")

    def step(targets, values, history_offsets, candidate_offsets):
        return layer(
            targets, (values, history_offsets), jm.CandidateIndex.from_offsets(candidate_offsets)
        )

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for number, (history, counts) in enumerate(
        [([3, 5, 9], [2, 1, 4]), ([40, 5], [1, 2]), ([7, 0, 2, 11], [9, 0, 1, 1])]
    ):
        args = (
            torch.randn(sum(counts), 1, 32, device="cuda"),
            torch.randn(sum(history), 32, device="cuda"),
            offsets(history, "cuda"),
            offsets(counts, "cuda"),
        )
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(*args)
        torch.testing.assert_close(out, step(*args), rtol=1e-4, atol=1e-5)
        out.sum().backward()


@pytest.mark.parametrize("counts", [[0, 1, 3, 10_000], [1, 1, 1, 1], [0, 0, 0, 7]], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_target_attention_equals_replicated_histories(offsets, counts, rows):
    history = [200, 1, 0, 77]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3))
    users = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[order]
    q = torch.randn(len(users), rows, 2, 32, device="cuda", requires_grad=True)
    k, v = (torch.randn(sum(history), 2, 32, device="cuda", requires_grad=True) for _ in range(2))
    out = F.target_attention(
        q, k, v, jm.CandidateIndex.from_map(users.cuda(), 4), offsets(history, "cuda")
    )
    grad = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), grad)

    exact_q, exact_k, exact_v = (x.detach().double().requires_grad_() for x in (q, k, v))
    bounds = offsets(history).tolist()
    exact = torch.zeros(out.shape, dtype=torch.float64, device="cuda")
    for user in range(4):
        chosen, keys = (users == user).cuda(), slice(bounds[user], bounds[user + 1])
        if history[user] and chosen.any():
            scores = torch.einsum("cqhd,jhd->cqhj", exact_q[chosen], exact_k[keys]) * 32**-0.5
            exact = exact.index_put(
                (chosen.nonzero().flatten(),),
                torch.einsum("cqhj,jhd->cqhd", scores.softmax(-1), exact_v[keys]),
            )
    exact_gradients = torch.autograd.grad(exact, (exact_q, exact_k, exact_v), grad.double())
    for actual, expected in zip((out, *gradients), (exact, *exact_gradients)):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_peak_memory_does_not_grow_with_candidates_times_history():
    """A step's memory is proportional to candidates + history rows: more candidates of a long
    history add only their own rows."""
    history, dim = [4096] * 4, 64
    layer = jm.JaggedTargetAttention(dim, 4, device="cuda")
    values = torch.randn(sum(history), dim, device="cuda")
    peaks = []
    for candidates in (256, 512, 1024):
        index = jm.CandidateIndex.from_counts(torch.full((4,), candidates))
        targets = torch.randn(4 * candidates, 1, dim, device="cuda", requires_grad=True)
        jagged = jm.Jagged(
            values, torch.arange(5, device="cuda") * 4096, host_lengths=torch.tensor(history)
        )
        layer(targets, jagged, index).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(targets, jagged, index).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    extra_rows = 4 * 512 * dim * 4
    # a replicated K and V would add 2 · 4096 rows for each candidate
    assert peaks[2] - peaks[1] < 32 * extra_rows, peaks


@pytest.mark.parametrize("shared", ["q", "kv"])
def test_shared_operands_are_not_replicated(shared):
    """The forward keeps only its output for the backward, and a step's peak is far below a copy of
    K and V for each segment."""
    segments = torch.arange(257, device="cuda") * 64
    rows = dict(q=64, k=64 * 256, v=64 * 256) if shared == "q" else dict(q=64 * 256, k=1024, v=1024)
    q, k, v = (
        torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in rows.values()
    )
    offsets = ("shared", segments) if shared == "q" else (segments, "shared")
    for measured in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = F.jagged_attention(q, k, v, *offsets, activation="gelu_tanh")
        held = torch.cuda.memory_allocated() - before
        torch.autograd.grad(out.sum(), (q, k, v))
        peak = torch.cuda.max_memory_allocated() - before
        if measured:
            assert held < 1.2 * out.nbytes, (held, out.nbytes)
            # with 1024 rows of K and V for each of 256 segments: 32 outputs
            assert peak < 8 * out.nbytes, (peak, out.nbytes)
        del out


def test_autocast(offsets):
    q, k, v = (torch.randn(300, 4, 64, device="cuda") for _ in range(3))
    segments = offsets([70, 100, 130], "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = F.jagged_attention(q, k, v, segments)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, F.jagged_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), segments))
