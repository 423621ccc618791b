"""The linear compression kernels on a GPU, through the public function."""

import time

import pytest
import torch
from torch import library

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.cpu.linear_compress import linear_compress_cpu

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


HEIGHTS, DEPTHS = [8, 64, 65, 128, 192, 193, 256, 320, 449, 577, 1000], [1, 64, 65, 500, 2000]


@pytest.fixture(params=["triton", "hopper"])
def kernels(request):
    return request.param


def applies(kernels="triton", dtype=torch.bfloat16, width=8, depths=(), **_):
    """Whether the kernels take what a test with such parameters gives them; the others are not
    collected. fp16 code differs from bf16 code in a type only, so it runs with one list of
    depths."""
    if dtype == torch.float16 and len(depths) not in (0, 3):
        return False
    on_hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
    return kernels == "triton" or on_hopper and dtype != torch.float32 and width % 8 == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["map", "grouped"])
@pytest.mark.parametrize(
    "batches, depths",
    [
        ([37], [33]),
        ([3, 70], [1178, 866]),
        ([40, 200], [99, 40]),
        ([2, 30, 50], [40, 331, 170]),
        ([2, 9, 30, 80], [40, 331, 65, 170]),
        ([1, 1], [1, 70]),
    ],
    ids=str,
)
def test_forward_and_gradients(check_linear_compress, kernels, batches, depths, grouped, dtype):
    check_linear_compress(batches, depths, 433, 256, dtype, "cuda", grouped, kernels=kernels)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("cast", ["weights", "embeddings", "both"])
def test_autocast_is_part_of_the_node(check_compress_in_autocast, kernels, cast, dtype):
    check_compress_in_autocast(cast, dtype, "cuda", kernels, [40, 200], [99, 331], 256)


@pytest.mark.parametrize(
    "num_compressed, width, dtype",
    [
        (*sizes, dtype)
        for i, sizes in enumerate(
            [(1, 1), (64, 16), (130, 37), (200, 64), (128, 128), (5, 260), (300, 320)]
        )
        for dtype in (torch.float32, DTYPES[1 + i % 2])
    ],
    ids=str,
)
def test_sizes(check_linear_compress, kernels, num_compressed, width, dtype):
    check_linear_compress([2, 30], [8, 173], num_compressed, width, dtype, "cuda", kernels=kernels)


@pytest.mark.parametrize(
    "num_compressed, depth", [(height, DEPTHS[i % 5]) for i, height in enumerate(HEIGHTS)]
)
def test_heights_and_depths(check_linear_compress, kernels, num_compressed, depth):
    """Hopper's kernel, in which both are constants, compiles for ten seconds."""
    check_linear_compress(
        [3, 150], [depth, depth], num_compressed, 136, torch.bfloat16, "cuda", kernels=kernels
    )


@pytest.mark.parametrize(
    "num_compressed, depth",
    [
        (64, 8),
        (64, 64),
        (128, 33),
        (128, 65),
        (192, 8),
        (192, 64),
        (300, 33),
        (300, 65),
        (433, 8),
        (433, 64),
        (1000, 33),
        (1000, 65),
    ],
)
def test_one_shallow_level(check_linear_compress, kernels, num_compressed, depth):
    """One K step: the assembler lost operands when it computed tiles of two heights at once."""
    check_linear_compress(
        [150], [depth], num_compressed, 256, torch.float16, "cuda", kernels=kernels
    )


@pytest.mark.parametrize("strides", [(1, 33), (40, 1), (66, 2), (0, 0)], ids=str)
def test_weights_of_any_stride(check_linear_compress, kernels, strides):
    def strided(x):
        return x if x.dim() == 3 else x.new_empty(66 * 70).normal_().as_strided(x.shape, strides)

    check_linear_compress(
        [2, 9], [33, 33], 33, 256, torch.bfloat16, "cuda", change=strided, kernels=kernels
    )


@pytest.mark.parametrize("width", [256, 64])
@pytest.mark.parametrize(
    "batches", [[3, 20, 7, 150, 200], [1, 1, 10_000], [300, 300, 300], [1, 400, 5]], ids=str
)
def test_several_shared_levels(check_linear_compress, kernels, batches, width):
    """More than one launch of Hopper's kernel takes, 10,000 to 1, 1 to 1, and rows without
    candidates."""
    depths = [33, 8, 130, 64, 24][-len(batches) :]
    check_linear_compress(batches, depths, 130, width, torch.float16, "cuda", kernels=kernels)


@pytest.mark.parametrize("candidates", [1, 8, 16, 131, 1000])
@pytest.mark.parametrize("num_compressed", [433, 449, 512])
def test_every_output_is_written(check_linear_compress, kernels, candidates, num_compressed):
    check_linear_compress(
        [5, candidates], [72, 100], num_compressed, 256, torch.float16, "cuda", kernels=kernels
    )


@pytest.mark.parametrize("users", [1, 50, 400])
def test_more_tiles_than_programs(check_linear_compress, kernels, users):
    """Also with users without candidates."""
    check_linear_compress(
        [users, 300], [130, 100], 433, 256, torch.float16, "cuda", kernels=kernels
    )


@pytest.mark.parametrize("num_sms", [1, 7, 1000])
@pytest.mark.parametrize("kernels", ["hopper"], indirect=True)
def test_any_number_of_programs(check_linear_compress, monkeypatch, kernels, num_sms):
    """Fewer programs than the GPU runs at once, and more: these depend only on programs that
    finish."""
    from jagged_kernels.common.device import DeviceProperties
    from jagged_kernels.linear_compress import hopper_launch

    monkeypatch.setattr(
        hopper_launch, "device_properties", lambda device: DeviceProperties((9, 0), num_sms)
    )
    check_linear_compress([200, 300], [130, 100], 433, 256, torch.float16, "cuda", kernels=kernels)


@pytest.mark.parametrize(
    "batches, depths",
    [([0, 0], [3, 4]), ([2, 0], [3, 4]), ([3, 2], [0, 4]), ([3, 2], [4, 0])],
    ids=str,
)
def test_nothing_to_multiply(check_linear_compress, batches, depths):
    check_linear_compress(batches, depths, 5, 8, torch.float16, "cuda", kernels="auto")


@pytest.mark.parametrize("width", [256, 40])
def test_inputs_and_gradients_of_any_stride(check_linear_compress, kernels, width):
    def transposed_rows(x):
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    def wider(x):
        return torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)[..., : x.shape[-1]]

    def repeated(x):
        return x[:1].expand_as(x)

    for change, aligned in ((transposed_rows, False), (wider, True), (repeated, False)):
        taken_by = kernels if aligned else "auto"
        check_linear_compress(
            [2, 9], [33, 64], 70, width, torch.bfloat16, "cuda", change=change, kernels=taken_by
        )
    for grad in (
        lambda out: torch.ones((), dtype=out.dtype, device="cuda").expand_as(out),
        lambda out: torch.randn(out.shape[::-1], dtype=out.dtype, device="cuda").permute(2, 1, 0),
        lambda out: torch.randn(*out.shape[:2], 2 * out.shape[2], dtype=out.dtype, device="cuda")[
            ..., ::2
        ],
    ):
        check_linear_compress(
            [2, 9], [33, 64], 70, width, torch.bfloat16, "cuda", grad=grad, kernels=kernels
        )


def test_hopper_refuses_what_its_kernel_does_not_take(compress_inputs):
    def inputs(dtype=torch.float16, width=16, batches=(2, 9)):
        return compress_inputs(batches, [33, 64], 70, width, dtype, "cuda")

    weights, (users, candidates), indices = inputs()
    repeated = weights, [users, candidates[:1].expand_as(candidates)], indices
    for bad in (inputs(torch.float32), inputs(width=12), repeated):
        with pytest.raises(ValueError, match="implementation 'hopper' takes"):
            F.linear_compress(*bad, implementation="hopper")
    assert F.linear_compress(*inputs(batches=(2, 0)), implementation="hopper").shape == (0, 70, 16)


def test_a_neighbours_nan_stays_where_it_is(compress_inputs, kernels):
    weights, (users, candidates), _ = compress_inputs(
        [3, 9], [33, 70], 150, 256, torch.float16, "cuda"
    )
    users[1], candidates[4] = float("nan"), float("nan")
    index = torch.tensor([0, 0, 1, 2, 2, 0, 2, 2, 0], device="cuda")
    users.requires_grad_(), candidates.requires_grad_()
    out = F.linear_compress(weights, [users, candidates], index, implementation=kernels)
    touched = [2, 4]
    assert out[touched].isnan().all() and out[[0, 1, 3, 5, 6, 7, 8]].isfinite().all()
    grad = torch.randn_like(out)
    grad[touched] = float("nan")
    d_users, d_candidates = torch.autograd.grad(out, (users, candidates), grad)
    assert d_users[1:].isnan().all() and d_users[0].isfinite().all()
    assert (
        d_candidates[touched].isnan().all() and d_candidates[[0, 1, 3, 5, 6, 7, 8]].isfinite().all()
    )


@pytest.mark.large_memory
def test_more_than_two_to_the_31_elements(kernels):
    candidates = torch.randn(
        2**31 // (64 * 256) + 100, 64, 256, device="cuda", dtype=torch.float16, requires_grad=True
    )
    weight = torch.randn(70, 64, device="cuda", dtype=torch.float16)
    out = F.linear_compress(weight, candidates, implementation=kernels)
    (gradient,) = torch.autograd.grad(out, candidates, out)
    for actual, expected in ((out, weight @ candidates[-50:]), (gradient, weight.T @ out[-50:])):
        assert ((actual[-50:] - expected).float().norm() / expected.float().norm()).item() < 2e-3


@pytest.mark.parametrize("batches", [[7, 300], [7, 40, 3, 300]], ids=str)
def test_twenty_runs_agree_bit_for_bit(compress_inputs, kernels, batches):
    depths = [331, 65, 200, 170][-len(batches) :]
    weights, embeddings, indices = compress_inputs(
        batches, depths, 433, 256, torch.bfloat16, "cuda"
    )
    inputs = [x.requires_grad_() for x in (*weights, *embeddings)]
    grad = torch.randn(300, 433, 256, device="cuda", dtype=torch.bfloat16)
    runs = []
    for _ in range(20):
        out = F.linear_compress(weights, embeddings, indices, implementation=kernels)
        runs.append((out, *torch.autograd.grad(out, inputs, grad)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


def test_no_synchronisation(assert_no_synchronisation, compress_inputs, kernels):
    weights, embeddings, (index,) = compress_inputs(
        [7, 30], [33, 17], 43, 64, torch.float16, "cuda"
    )
    inputs = [x.requires_grad_() for x in (*weights, *embeddings)]
    grouped = jm.CandidateIndex.from_counts(
        torch.full((7,), 4).index_fill(0, torch.tensor([0]), 6).cuda()
    )

    def step():
        for indices in ([index], [grouped]):
            torch.autograd.grad(
                F.linear_compress(weights, embeddings, indices, implementation=kernels).sum(),
                inputs,
            )

    assert_no_synchronisation(step)


def test_cuda_graph_with_new_values_and_another_map(compress_inputs, kernels):
    weights, embeddings, (index,) = compress_inputs(
        [7, 30], [331, 170], 433, 256, torch.float16, "cuda"
    )
    inputs = [x.requires_grad_() for x in (*weights, *embeddings)]
    grad = torch.randn(30, 433, 256, device="cuda", dtype=torch.float16)

    def step():
        out = F.linear_compress(weights, embeddings, [index], implementation=kernels)
        return out, *torch.autograd.grad(out, inputs, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        index.copy_(torch.randint(0, 7, (30,)))
        embeddings[1].data.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step()))


def test_compiled_without_recompiling_per_batch(compress_inputs, kernels):
    weights, _, _ = compress_inputs([1, 1], [33, 17], 43, 64, torch.float16, "cuda")
    weights = [x.requires_grad_() for x in weights]

    def step(users, candidates, index):
        return F.linear_compress(weights, [users, candidates], [index], implementation=kernels)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for number, batches in enumerate(([3, 9], [2, 40], [8, 5])):
        _, embeddings, indices = compress_inputs(batches, [33, 17], 43, 64, torch.float16, "cuda")
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(*embeddings, *indices)
        assert torch.equal(out, step(*embeddings, *indices))
        out.sum().backward()


def test_peak_memory_does_not_grow_with_the_replication(kernels):
    """A step's memory is that of the actual rows. A replicated [B, Ku + Kc, N], or weight gradients
    [B, M, Kc], would exceed it."""
    weights = [
        torch.randn(64, k, device="cuda", dtype=torch.float16, requires_grad=True)
        for k in (1024, 64)
    ]
    candidates = torch.randn(1024, 64, 128, device="cuda", dtype=torch.float16, requires_grad=True)
    peaks = []
    for num_users in (8, 8, 2, 1):
        users = torch.randn(
            num_users, 1024, 128, device="cuda", dtype=torch.float16, requires_grad=True
        )
        index = torch.arange(1024, device="cuda") * num_users // 1024
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = F.linear_compress(weights, [users, candidates], index, implementation=kernels)
        torch.autograd.grad(out.square().sum(), (*weights, users, candidates))
        del out
        peaks.append(torch.cuda.max_memory_allocated() - before)
        # the thread that ran the backward may still hold gradients, which the next peak would lack
        for _ in range(500):
            if torch.cuda.memory_allocated() <= before:
                break
            time.sleep(0.01)
    # the replicated users alone are 16 times the candidates
    assert max(peaks[1:]) < 8 * candidates.nbytes, peaks
    assert peaks[3] <= peaks[2] <= peaks[1], peaks


def test_autocast(compress_inputs, kernels):
    weights, embeddings, indices = compress_inputs([7, 30], [33, 17], 43, 64, torch.float32, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = F.linear_compress(weights, embeddings, indices, implementation=kernels)
    halves = ([x.bfloat16() for x in tensors] for tensors in (weights, embeddings))
    expected = F.linear_compress(*halves, indices, implementation=kernels)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)


def test_operator_passes_opcheck(compress_inputs, kernels):
    from jagged_kernels.linear_compress.op import triton_linear_compress

    weights, embeddings, indices = compress_inputs([7, 30], [33, 17], 43, 64, torch.float16, "cuda")
    weights, embeddings = (
        [x.requires_grad_() for x in tensors] for tensors in (weights, embeddings)
    )
    library.opcheck(triton_linear_compress, (weights, embeddings, indices, [None], [None], kernels))


def test_error_is_at_most_that_of_cublas(compress_inputs, kernels):
    """The fused sum rounds once: its error against fp32 is no more than that of 16-bit GEMM
    results, gathered and added."""
    weights, embeddings, indices = compress_inputs(
        [15, 200], [1178, 866], 433, 256, torch.float16, "cuda"
    )
    in_fp64 = ([x.double() for x in tensors] for tensors in (weights, embeddings))
    exact = F.linear_compress(*in_fp64, indices, implementation="reference")
    ours = F.linear_compress(weights, embeddings, indices, implementation=kernels)
    decomposed = linear_compress_cpu(weights, embeddings, indices)  # takes any device
    assert (ours - exact).norm() <= (decomposed - exact).norm()


def test_several_streams_at_once(compress_inputs, kernels):
    inputs = compress_inputs([7, 200], [331, 170], 433, 256, torch.float16, "cuda")
    expected = F.linear_compress(*inputs, implementation=kernels)
    torch.cuda.synchronize()
    streams, outputs = [torch.cuda.Stream() for _ in range(4)], []
    for stream in streams:
        with torch.cuda.stream(stream):
            outputs.append([F.linear_compress(*inputs, implementation=kernels) for _ in range(5)])
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for outs in outputs for out in outs)


@pytest.mark.parametrize("kernels", ["hopper"], indirect=True)
def test_ten_thousand_launches_on_several_streams(compress_inputs, kernels):
    """Thread blocks of a launch wait for one another. None waits forever, even while other launches
    occupy the SMs."""
    cases = []
    for batches, depths in (([40, 100], [300, 70]), ([3, 70], [200, 40]), ([130, 30], [64, 200])):
        inputs = compress_inputs(batches, depths, 200, 136, torch.float16, "cuda")
        cases.append((inputs, F.linear_compress(*inputs, implementation=kernels)))
    streams = [torch.cuda.Stream() for _ in range(4)]
    wrong = [torch.zeros((), device="cuda", dtype=torch.bool) for _ in streams]
    torch.cuda.synchronize()
    with torch.no_grad():
        for i in range(10_000):
            inputs, expected = cases[i % len(cases)]
            with torch.cuda.stream(streams[i % len(streams)]):
                out = F.linear_compress(*inputs, implementation=kernels)
                if i % 5 == 0:
                    wrong[i % len(streams)] |= (out != expected).any()
    torch.cuda.synchronize()
    assert not any(wrong)
