"""On a GPU: several streams, two devices, data loaders that fork after CUDA is initialised, and
running out of memory."""

import gc
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import jagged_modules as jm
from jagged_modules import functional as F

from .processes import in_threads
from .training_steps import make_steps, run_steps

pytestmark = pytest.mark.gpu


def assert_close(results, expected) -> None:
    assert len(results) == len(expected)
    for x, y in zip(results, expected):
        assert x.shape == y.shape and (
            not y.numel() or (x.cpu() - y.cpu()).abs().max() <= 1e-5 * y.abs().max().cpu()
        )


def test_streams():
    """Steps are queued alternately on separate streams, and no stream waits for another."""
    steps = make_steps("cuda")
    expected = [run_steps(steps, seed, 3, "cuda") for seed in range(4)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(3):
        results = []
        for seed, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append(run_steps(steps, seed, 3, "cuda"))
        torch.cuda.synchronize()
        for some, alone in zip(results, expected, strict=True):
            assert_close(some, alone)


def test_one_history_on_several_streams():
    """The schedule and the users of candidates, which the first stream cached with a history, serve
    the others."""
    offsets = torch.arange(0, 64 * 101, 100)
    history = jm.Jagged(torch.randn(6400, 32), offsets).to("cuda")
    index = jm.CandidateIndex.from_map(torch.randint(64, (500,)), 64).to("cuda")
    layer, targets = (
        jm.JaggedTargetAttention(32, 2, device="cuda"),
        torch.randn(500, 3, 32, device="cuda"),
    )
    expected = layer(targets, history, index)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results += [layer(targets, history, index) for _ in range(3)]
    torch.cuda.synchronize()
    assert_close(results, [expected] * len(results))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestTwoGpus:
    devices = "cuda:0", "cuda:1"

    def test_in_turn(self):
        """The current device is the first throughout."""
        steps = [make_steps(device) for device in self.devices]
        for seed in range(3):
            first, second = (
                run_steps(some, seed, 2, device) for some, device in zip(steps, self.devices)
            )
            assert torch.cuda.current_device() == 0
            assert {x.device for x in second} == {torch.device("cuda:1")}
            assert_close(second, first)

    def test_in_threads(self):
        steps = [make_steps(device) for device in self.devices]
        expected = [run_steps(steps[0], seed, 2, "cuda:0") for seed in range(8)]
        results = in_threads(
            lambda seed: run_steps(steps[seed % 2], seed, 2, self.devices[seed % 2])
        )
        for some, alone in zip(results, expected, strict=True):
            assert_close(some, alone)

    def test_a_history_that_moves(self):
        """Its schedule follows it, and goes back with it."""
        history = jm.Jagged(torch.randn(300, 32), torch.tensor([0, 100, 300]))
        layers = [jm.JaggedGDPA(32, 2, device=device) for device in self.devices]
        layers[1].load_state_dict(layers[0].state_dict())
        outs = [
            layer(history.to(device)).values
            for _ in range(2)
            for layer, device in zip(layers, self.devices)
        ]
        assert [str(x.device) for x in outs] == [*self.devices] * 2
        assert_close(outs, outs[:1] * 4)


class Prepared(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        assert not torch.cuda.is_initialized()  # that of the parent is none of a forked process
        lengths = torch.randint(1, 200, (20,), generator=torch.Generator().manual_seed(number))
        history = jm.Jagged(
            torch.randn(int(lengths.sum()), 32),
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        )
        return history.prepare(num_heads=2, head_dim=16)


def test_data_loader_that_forks_after_cuda_is_initialised():
    layer = jm.JaggedGDPA(32, 2, device="cuda")
    torch.cuda.synchronize()
    for history in DataLoader(
        Prepared(), batch_size=None, num_workers=2, pin_memory=True, multiprocessing_context="fork"
    ):
        assert history.values.is_pinned() and len(history.segmentation.schedules) == 1
        on_device = history.to("cuda", non_blocking=True)
        out = layer(on_device)
        assert len(history.segmentation.schedules) == 1, "the worker's schedule was used"
        unprepared = jm.Jagged(on_device.values, on_device.offsets.clone())
        assert_close([out.values], [layer(unprepared).values])


def test_a_write_to_offsets_on_the_device_builds_another_schedule():
    layer, rows = jm.JaggedGDPA(32, 2, device="cuda"), torch.randn(400, 32, device="cuda")
    buffer = torch.tensor([0, 300, 400], device="cuda")
    history = jm.Jagged(rows, buffer, host_lengths=torch.tensor([300, 100]))
    layer(history)
    for bounds in ([0, 20, 400], [0, 399, 400]):
        buffer[1:].copy_(torch.tensor(bounds[1:]))
        expected = layer(jm.Jagged(rows, torch.tensor(bounds, device="cuda")))
        assert torch.equal(layer(history).values, expected.values)
        assert history.host_lengths is None


def test_the_gpu_as_default_device():
    """What belongs on the host is made there."""
    lengths = torch.tensor([300, 100])
    rows, offsets = torch.randn(400, 32), torch.tensor([0, 300, 400])
    layer = jm.JaggedGDPA(32, 2, device="cuda")
    expected = layer(jm.Jagged(rows.cuda(), offsets.cuda()))
    with torch.device("cuda"):
        history = jm.Jagged(rows.cuda(), offsets.cuda(), host_lengths=lengths).prepare(
            num_heads=2, head_dim=16
        )
        listed = jm.Jagged(rows.cuda(), offsets.cuda(), host_lengths=[300, 100])
        results = [layer(x).values for x in (history, listed)]
        assert jm.AttentionMask(causal=True).picture(2) == "# .\n# #"
    for result in results:
        assert torch.equal(result, expected.values)


def _attention(rows, function=F.jagged_attention):
    offsets = torch.arange(0, rows + 1, rows // 4, device="cuda")
    q, k, v = (
        torch.randn(rows, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    return function(q, k, v, offsets), (q, k, v)


def _block_attention(rows):
    return _attention(rows, F.block_diagonal_attention)


def _linear_compress(rows):
    weights = [
        torch.randn(64, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for k in (24, 40)
    ]
    users, candidates = rows // 160, rows // 16
    shapes = (users, 24, 64), (candidates, 40, 64)
    embeddings = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    ]
    index = torch.arange(candidates, device="cuda") % users
    return F.linear_compress(weights, embeddings, index), (*weights, *embeddings)


def _matmuls(rows):
    offsets = torch.arange(0, rows + 1, rows // 4, device="cuda")
    x, y = (
        torch.randn(rows, 64, device="cuda", requires_grad=True),
        torch.randn(4, 64, 256, device="cuda", requires_grad=True),
    )
    return F.jagged_softmax(F.jagged_dense_bmm(x, y, offsets), offsets), (x, y)


def allocated_in_the_end(expected: int) -> int:
    """Bytes allocated on the GPU. If a backward fails, autograd's thread releases its tensors after
    the caller has the error."""
    for _ in range(100):
        gc.collect()
        if torch.cuda.memory_allocated() == expected:
            break
        time.sleep(0.05)
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize(
    "make", [_attention, _block_attention, _linear_compress, _matmuls], ids=lambda x: x.__name__[1:]
)
def test_out_of_memory_leaves_nothing_behind(make):
    """Steps run out of memory, each at a later allocation. A small step then has the same results,
    and nothing stays allocated."""

    def step(rows):
        torch.manual_seed(0)
        out, inputs = make(rows)
        return [out.detach(), *torch.autograd.grad(out.sum(), inputs)]

    expected = step(1600)
    step(160_000)
    gc.collect()
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    failures, passed = 0, False
    try:
        for megabytes in range(8, 4000, 16):
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(
                (torch.cuda.memory_reserved() + megabytes * 2**20) / total
            )
            try:
                step(160_000)
                passed = True
            except torch.OutOfMemoryError:
                failures += 1
            torch.cuda.set_per_process_memory_fraction(1.0)
            assert all(map(torch.equal, step(1600), expected))
            assert allocated_in_the_end(before) == before
            if passed:
                break
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert passed and failures > 5
    assert all(map(torch.equal, step(1600), expected))
