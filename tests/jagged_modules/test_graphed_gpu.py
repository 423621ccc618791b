"""jm.graphed on a GPU: replayed graphs against the module itself, for batches of changing sizes and
lengths."""

import copy

import pytest
import torch
from torch import nn

import jagged_modules as jm

pytestmark = pytest.mark.gpu
WIDTH, HEADS = 128, 2  # heads of 64: Hopper's kernels in 16 bits
BATCHES = [  # lengths of histories
    [90, 0, 200, 31, 5, 150, 64, 128],
    [85, 0, 190, 40, 0, 155, 70, 120],  # the same bucket
    [1],
    [256, 256],  # exactly a capacity
    [0, 0, 0],
    [],
    [3, 0, 5, 2, 1, 1, 4],
    [90, 0, 201, 30, 5, 150, 64, 127],
]


def leaf(*shape, dtype):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def poison(graph):
    """Overwrite all buffers, as if other batches had been there. Their offsets are then no offsets
    either."""
    for step in graph._steps.values():
        for x in (*step.buffers, *(x for x in step.gradients if x is not None)):
            x.detach().fill_(float("nan") if x.is_floating_point() else -(2**30))


def assert_close(found, expected, dtype):
    """Of several tensors, each to a fraction of its largest element, or to a fifth of that of the
    largest of all: some gradients are differences that vanish but for rounding."""
    largest = max(
        (y.abs().max().item() for y in expected if y is not None and y.numel()), default=0
    )
    for x, y in zip(found, expected):
        assert (x is None) == (y is None)
        if x is None:
            continue
        assert x.shape == y.shape and x.dtype == y.dtype and x.isfinite().all()
        if y.numel():
            allowed = (1e-4 if dtype == torch.float32 else 2e-2) * max(
                y.abs().max().item(), largest / 5
            )
            assert (x - y).abs().max() <= allowed, ((x - y).abs().max().item(), allowed)


def step(module, arguments, wanted):
    """The result, and the gradients of `wanted` and of the parameters."""
    out = module(*arguments)
    out = (
        out.values
        if isinstance(out, jm.Jagged)
        else out[0]
        if isinstance(out, (tuple, list))
        else out
    )
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)
    return [
        out,
        *torch.autograd.grad(
            (out.float() * weights).sum(), [*wanted, *module.parameters()], allow_unused=True
        ),
    ]


def history_of(offsets_of, lengths, dtype):
    values = leaf(sum(lengths), WIDTH, dtype=dtype)
    return (values, offsets_of(lengths).cuda()), values


def on_rows(offsets_of, lengths, dtype):
    history, values = history_of(offsets_of, lengths, dtype)
    return (history,), (values,)


def with_targets(offsets_of, lengths, dtype):
    history, values = history_of(offsets_of, lengths, dtype)
    return (history, torch.tensor(lengths, dtype=torch.int64).cuda() // 3), (values,)


def with_candidates(kind):
    def arguments(offsets_of, lengths, dtype):
        history, values = history_of(offsets_of, lengths, dtype)
        counts = [(7 * b + 3) % 11 for b in range(len(lengths))]
        targets = leaf(sum(counts), 1, WIDTH, dtype=dtype)
        map_ = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        index = {
            "sorted": lambda: jm.CandidateIndex.from_offsets(offsets_of(counts).cuda()),
            "unsorted": lambda: jm.CandidateIndex.from_map(
                map_[torch.randperm(len(map_))].cuda(), len(counts)
            ),
        }[kind]()
        return (targets, history, index), (targets, values)

    return arguments


def compressed(offsets_of, lengths, dtype):
    counts = [(7 * b + 3) % 11 for b in range(len(lengths))]
    candidates, users = (
        leaf(sum(counts), 5, 64, dtype=dtype),
        leaf(len(lengths), 7, 64, dtype=dtype),
    )
    return (candidates, users, jm.CandidateIndex.from_offsets(offsets_of(counts).cuda())), (
        candidates,
        users,
    )


HSTU = jm.HSTUConfig(scaling_seqlen=200, max_attn_len=64)
CASES = {
    "target_attention-sorted": (
        lambda: jm.JaggedTargetAttention(WIDTH, HEADS),
        with_candidates("sorted"),
    ),
    "target_attention-unsorted": (
        lambda: jm.JaggedTargetAttention(WIDTH, HEADS),
        with_candidates("unsorted"),
    ),
    "hstu": (lambda: jm.HSTUStack(WIDTH, HEADS, 2, HSTU), with_targets),
    "gdpa": (lambda: jm.JaggedGDPA(WIDTH, HEADS), on_rows),
    "gdpa-softmax-causal": (
        lambda: jm.JaggedGDPA(WIDTH, HEADS, "softmax", jm.AttentionMask(causal=True)),
        on_rows,
    ),
    "pooling": (lambda: jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(num_seeds=3)), on_rows),
    "block_attention": (
        lambda: jm.BlockDiagonalSelfAttention(WIDTH, HEADS, max_seqlen=256),
        on_rows,
    ),
    "linear_compress": (lambda: jm.LinearCompressEmbedding(5, 16, 7), compressed),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_replays_give_the_modules_results_and_gradients(offsets_of, case, dtype):
    build, arguments_of = CASES[case]
    module = build().to("cuda", dtype)
    graph = jm.graphed(module)
    for lengths in BATCHES:
        arguments, wanted = arguments_of(offsets_of, lengths, dtype)
        poison(graph)
        assert_close(step(graph, arguments, wanted), step(module, arguments, wanted), dtype)
        with torch.no_grad():
            poison(graph)
            assert_close(
                step_without_gradients(graph, arguments),
                step_without_gradients(module, arguments),
                dtype,
            )
    assert graph.captures < 2 * len(BATCHES)


def step_without_gradients(module, arguments):
    out = module(*arguments)
    return [out[0] if isinstance(out, tuple) else out]


def test_a_replayed_step_is_two_launches_of_graphs_without_a_sync(offsets_of):
    module = jm.JaggedTargetAttention(WIDTH, HEADS, device="cuda")
    graph = jm.graphed(module)
    batches = [
        with_candidates("sorted")(offsets_of, lengths, torch.float32) for lengths in BATCHES[:2]
    ]
    for arguments, wanted in batches:
        step(graph, arguments, wanted)
    assert graph.captures == 1
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for arguments, wanted in batches:
            step(graph, arguments, wanted)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(graph, *batches[0])
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("cudaGraphLaunch") == 2, {
        name: count for name, count in counts.items() if name.startswith("cu")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_when_batch_invariant(offsets_of, dtype):
    module = jm.JaggedGDPA(WIDTH, HEADS, "softmax").to("cuda", dtype)
    graph = jm.graphed(module)
    for lengths in BATCHES[:3]:
        history, values = history_of(offsets_of, lengths, dtype)
        results = []
        for called in (module, graph):
            with jm.batch_invariant(True):
                out = called(history)[0]
            results.append((out, *torch.autograd.grad(out.square().sum(), values)))
        assert all(torch.equal(x, y) for x, y in zip(*results))
    assert graph.captures


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = jm.HSTUStack(WIDTH, HEADS, 2, HSTU)
        self.attention = jm.JaggedTargetAttention(WIDTH, HEADS)
        self.head = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, targets, history, candidates):
        encoded, offsets = self.encoder(history)
        return self.head(
            self.attention(targets, (encoded, offsets), candidates).squeeze(1)
        ).squeeze(1)


def test_training_a_model(offsets_of):
    """Parameters after steps of an optimizer, each after two batches whose gradients accumulate,
    are those of the plain model."""
    torch.manual_seed(0)
    model = Ranker().cuda()
    other = copy.deepcopy(model)
    graph = jm.graphed(other, max_graphs=3)
    for called in (model, graph):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(called.parameters(), lr=1e-2, momentum=0.9, foreach=True)
        for number in range(6):
            for lengths in (BATCHES[number % 2], BATCHES[(6, 0, 1, 7, 3, 2)[number]]):
                arguments, _ = with_candidates("sorted")(offsets_of, lengths, torch.float32)
                called(*arguments).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(graph._steps) == 3 and graph.captures > 3
    for (name, x), y in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(
            y, x, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_several_calls_before_a_backward(offsets_of):
    module = jm.JaggedGDPA(WIDTH, HEADS).cuda()
    graph = jm.graphed(module)
    (x, _), (y, _) = (history_of(offsets_of, lengths, torch.float32) for lengths in BATCHES[:2])
    parameters = [*module.parameters()]
    expected = torch.autograd.grad(
        module(x)[0].square().mean() + module(y)[0].square().mean(), parameters
    )
    for _ in range(2):
        first = graph(x)[0].square().mean()
        with torch.no_grad():
            graph(y)
        total = first + graph(y)[0].square().mean()
        torch.testing.assert_close(
            torch.autograd.grad(total, parameters), expected, rtol=1e-4, atol=1e-6
        )
        del first, total
    out = graph(x)[0]
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a graphed module's backward runs once for each call"):
        out.sum().backward()


def test_modes_dtypes_and_dropout(offsets_of):
    graph = jm.graphed(jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(dropout=0.5)).cuda())
    history, values = history_of(offsets_of, BATCHES[0], torch.float32)
    first, second = graph(history)[0].detach(), graph(history)[0].detach()
    assert not torch.equal(first, second)  # each replay draws other numbers
    graph.eval()
    first, second = graph(history)[0].detach(), graph(history)[0].detach()
    assert torch.equal(first, second)
    with torch.autocast("cuda", torch.bfloat16):
        out, expected = graph(history)[0], graph._inner(history)[0]
    assert out.dtype == torch.bfloat16
    assert_close([out], [expected], torch.bfloat16)
    out.float().sum().backward()
    assert values.grad.dtype == torch.float32 and values.grad.isfinite().all()
    graph.bfloat16()
    assert not graph._steps
    out = graph((values.detach().bfloat16(), history[1].cpu()))[0]  # offsets on the host
    assert_close([out], [graph._inner((values.detach().bfloat16(), history[1]))[0]], torch.bfloat16)


def test_dropped_graphs_free_their_memory(offsets_of):
    graph = jm.graphed(jm.JaggedGDPA(WIDTH, HEADS).cuda(), max_graphs=2)
    allocated = []
    for _ in range(3):
        for rows in (500, 1000, 2000, 4000):
            graph(history_of(offsets_of, [rows // 2, rows // 2], torch.float32)[0])[
                0
            ].sum().backward()
            graph.zero_grad()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert graph.captures == 12 and len(graph._steps) == 2
    assert allocated[2] <= allocated[1] + 2**20, allocated
