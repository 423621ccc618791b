"""The block attention kernels on a GPU, through the public function."""

import dataclasses
from functools import partial

import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [3, 0, 70, 5, 130, 0, 0, 64, 1, 400, 65]
ROTARIES = [(None, True), ("qk", True), ("qk", False), ("qkv", True)]


@pytest.fixture(params=["triton", "hopper"])
def kernels(request):
    return request.param


def applies(kernels="triton", dtype=torch.bfloat16, **_):
    """Whether the kernels take what a test with such parameters gives them; the others are not
    collected."""
    on_hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
    return kernels == "triton" or on_hopper and dtype != torch.float32


def inputs(rows=0, heads=4, dim=64, requires_grad=True):
    return [
        torch.randn(
            rows or sum(LENGTHS),
            heads,
            dim,
            device="cuda",
            dtype=torch.bfloat16,
            requires_grad=requires_grad,
        )
        for _ in range(3)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotate, linear", ROTARIES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_forward_and_gradients(check_block_attention, kernels, block_size, rotate, linear, dtype):
    heads = (4, 4) if kernels == "hopper" else (4, 2)
    check_block_attention(
        LENGTHS, dtype, "cuda", block_size, heads, 64, rotate, linear=linear, kernels=kernels
    )


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rotate, linear", ROTARIES[1:], ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("kernels", ["hopper"], indirect=True)
def test_precise(check_block_attention, kernels, block_size, rotate, linear, dim):
    options = dict(rotate=rotate, linear=linear, precise=True, kernels=kernels)
    check_block_attention(LENGTHS, torch.bfloat16, "cuda", block_size, (4, 4), dim, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[0, 0, 5, 0], [3000], [0], [], [1] * 200, [0] * 3000 + [64, 7]],
    ids=lambda x: str(x)[:12],
)
def test_lengths(check_block_attention, lengths, dtype):
    check_block_attention(
        lengths, dtype, "cuda", heads=(2, 2), dim=128, rotate="qkv", kernels="auto"
    )


@pytest.mark.parametrize("rotate", [None, "qk", "qkv"], ids=str)
@pytest.mark.parametrize("dim", [8, 17, 40, 72, 96, 128, 256])
def test_head_dims(check_block_attention, dim, rotate):
    check_block_attention(
        LENGTHS,
        torch.bfloat16,
        "cuda",
        heads=(3, 3),
        dim=dim,
        rotate=rotate if dim % 2 == 0 else None,
        kernels="auto",
    )


@pytest.mark.parametrize("rotate", [None, "qk"], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (8, 1), (6, 3)], ids=str)
def test_heads(check_block_attention, heads, rotate):
    check_block_attention(
        LENGTHS, torch.bfloat16, "cuda", heads=heads, dim=40, rotate=rotate, kernels="auto"
    )
    check_block_attention(LENGTHS, torch.bfloat16, "cuda", heads=heads, dim=128, rotate=rotate)


def test_given_positions(check_block_attention, kernels):
    positions = torch.randint(0, 400, (sum(LENGTHS),), device="cuda")
    for rotate in ("qk", "qkv"):
        check_block_attention(
            LENGTHS,
            torch.bfloat16,
            "cuda",
            heads=(4, 4),
            rotate=rotate,
            positions=positions,
            kernels=kernels,
        )


@pytest.mark.parametrize("dim", [18, 64], ids=["unaligned", "aligned"])
def test_packed_views_and_gradients_of_any_stride(check_block_attention, dim):
    packed = torch.randn(sum(LENGTHS), 3, 3, dim, device="cuda", dtype=torch.bfloat16)
    for grad in (
        lambda out: torch.ones((), dtype=out.dtype, device="cuda").expand_as(out),
        lambda out: torch.randn(out.shape[::-1], dtype=out.dtype, device="cuda").permute(2, 1, 0),
        lambda out: torch.randn(*out.shape[:2], 2 * out.shape[2], dtype=out.dtype, device="cuda")[
            ..., ::2
        ],
    ):
        check_block_attention(
            LENGTHS,
            torch.bfloat16,
            "cuda",
            tensors=packed.unbind(1),
            grad=grad,
            rotate="qk",
            kernels="auto",
        )


@pytest.mark.parametrize("factors", [(1e6, 1e-6), (1e-6, 1e6), (1e-12, 1e10)], ids=str)
def test_rotated_operands_of_any_magnitude(check_block_attention, kernels, factors):
    """Also where q, k or the gradient leave the range of fp16, in which `precise` holds them."""
    tensors = [x.detach() for x in inputs()]
    tensors[0] *= factors[0]
    tensors[1] *= factors[1]
    for size in (1e-10, 1e10):
        options = dict(tensors=tensors, rotate="qk", precise=True, kernels=kernels)
        check_block_attention(
            LENGTHS,
            torch.bfloat16,
            "cuda",
            grad=lambda out, size=size: torch.randn_like(out) * size,
            **options,
        )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nan_and_infinity_stay_in_their_block(kernels, offsets, value):
    q, k, v = inputs(128, requires_grad=False)
    rotary = dataclasses.replace(jm.Rotary.from_frequencies(64, 128, device="cuda"), precise=True)
    expected = F.block_diagonal_attention(
        q, k, v, offsets([128], "cuda"), block_size=16, rotary=rotary, implementation=kernels
    )
    q[3], k[5] = value, value
    out = F.block_diagonal_attention(
        q, k, v, offsets([128], "cuda"), block_size=16, rotary=rotary, implementation=kernels
    )
    torch.testing.assert_close(out[16:], expected[16:])


@pytest.mark.parametrize("rotate", [None, "qk", "qkv"], ids=str)
def test_a_neighbours_nan_stays_where_it_is(kernels, offsets, rotate):
    q, k, v = inputs()
    with torch.no_grad():
        for x in (q, k, v):
            x[:73], x[-65:] = float("nan"), float("nan")  # all segments but [5, 130, 64, 1, 400]
    rotary = rotate and jm.Rotary.from_frequencies(64, 400, rotate, device="cuda")
    out = F.block_diagonal_attention(
        q, k, v, offsets(LENGTHS, "cuda"), rotary=rotary, implementation=kernels
    )
    grad = torch.randn_like(out)
    grad[:73], grad[-65:] = float("nan"), float("nan")
    for result in (out, *torch.autograd.grad(out, (q, k, v), grad)):
        assert (
            result[73:-65].isfinite().all()
            and result[:73].isnan().all()
            and result[-65:].isnan().all()
        )


def test_a_larger_batch(check_block_attention, kernels):
    """Every program has several tiles."""
    lengths = torch.randint(0, 700, (300,)).tolist()
    for rotate in (None, "qk", "qkv"):
        check_block_attention(
            lengths, torch.bfloat16, "cuda", heads=(4, 4), dim=128, rotate=rotate, kernels=kernels
        )


@pytest.mark.parametrize("rotate", [None, "qk"], ids=str)
def test_twenty_runs_agree_bit_for_bit(kernels, offsets, rotate):
    q, k, v = inputs(20_000, 4, 128)
    segments, grad, runs = offsets([5000, 14_999, 1], "cuda"), torch.randn_like(q), []
    rotary = rotate and jm.Rotary.from_frequencies(128, 15_000, rotate, device="cuda")
    for _ in range(20):
        out = F.block_diagonal_attention(q, k, v, segments, rotary=rotary, implementation=kernels)
        runs.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


@pytest.mark.large_memory
def test_elements_past_two_to_the_31(offsets, kernels):
    """Rows whose offset in elements takes more than 32 bits; the same rows alone give the same
    results."""
    rows, heads, dim = 2**31 // (8 * 128) + 100, 8, 128
    q = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    start = rows - 90
    segments = torch.tensor([0, 64, start, rows], device="cuda")
    out = F.block_diagonal_attention(q, q, q, segments, implementation=kernels)
    (grad,) = torch.autograd.grad(
        out, q, torch.ones((), device="cuda", dtype=out.dtype).expand_as(out).contiguous()
    )
    last = q.detach()[start:].requires_grad_()
    alone = F.block_diagonal_attention(
        last, last, last, offsets([90], "cuda"), implementation=kernels
    )
    assert torch.equal(out[start:], alone)
    assert torch.equal(grad[start:], torch.autograd.grad(alone, last, torch.ones_like(alone))[0])


def test_no_synchronisation(assert_no_synchronisation, kernels, offsets):
    q, k, v = inputs()
    segments = offsets(LENGTHS, "cuda")
    assert_no_synchronisation(
        lambda: (
            F.block_diagonal_attention(q, k, v, segments, implementation=kernels).sum().backward()
        )
    )


def test_several_streams(kernels, offsets):
    q, k, v = inputs(20_000, 4, 128, requires_grad=False)
    segments = offsets([5000, 15_000], "cuda")
    expected = F.block_diagonal_attention(q, k, v, segments, implementation=kernels)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            results.append(F.block_diagonal_attention(q, k, v, segments, implementation=kernels))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_cuda_graph_with_new_lengths(kernels, check_cuda_graph):
    check_cuda_graph(partial(F.block_diagonal_attention, implementation=kernels))


def test_hopper_refuses_what_its_kernels_do_not_take(offsets):
    q, k, v = inputs(heads=2)
    for tensors in (
        (q.float(), k.float(), v.float()),
        (q, k[:, :1], v[:, :1]),
        inputs(dim=20),
        inputs(dim=136),
    ):
        with pytest.raises(ValueError, match="implementation 'hopper' takes"):
            F.block_diagonal_attention(*tensors, offsets(LENGTHS, "cuda"), implementation="hopper")


# -- q, k and v in one tensor ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotate", [None, "qk", "qkv"], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_packed(check_packed_block_attention, block_size, rotate, dtype):
    check_packed_block_attention(
        LENGTHS, dtype, "cuda", block_size, dim=64, rotate=rotate, kernels="auto"
    )


@pytest.mark.parametrize("dim, heads", [(8, 1), (17, 3), (40, 2), (96, 4), (128, 4), (256, 1)])
def test_packed_heads(check_packed_block_attention, dim, heads):
    check_packed_block_attention(
        LENGTHS,
        torch.bfloat16,
        "cuda",
        heads=heads,
        dim=dim,
        rotate=None if dim % 2 else "qk",
        kernels="auto",
    )


@pytest.mark.parametrize("rotate", ["qk", "qkv"])
def test_packed_with_angles_that_are_not_linear_in_the_position(
    check_packed_block_attention, rotate
):
    check_packed_block_attention(
        LENGTHS, torch.bfloat16, "cuda", dim=64, rotate=rotate, linear=False, kernels="auto"
    )


@pytest.mark.parametrize("lengths", [[0], [], [1] * 200, [3000]], ids=str)
def test_packed_lengths(check_packed_block_attention, lengths):
    check_packed_block_attention(
        lengths, torch.float16, "cuda", dim=128, rotate="qkv", kernels="auto"
    )


# -- what is kept and made -------------------------------------------------------------------------


@pytest.mark.parametrize("rotary", [None, "qk", "qkv"])
def test_nothing_is_saved_but_the_inputs(rotary, offsets, saved_tensors):
    q, k, v = (
        torch.randn(sum(LENGTHS), 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    segments, rotary = (
        offsets(LENGTHS, "cuda"),
        rotary and jm.Rotary.from_frequencies(64, 400, rotary, device="cuda"),
    )
    with saved_tensors() as saved:
        F.block_diagonal_attention(q, k, v, segments, rotary=rotary)
    inputs = [q, k, v, segments] if rotary is None else [q, k, v, segments, rotary.cos, rotary.sin]
    assert saved.storages.keys() == {x.data_ptr() for x in inputs}


@pytest.mark.parametrize("rotary", [None, "qk", "qkv"])
def test_layer_keeps_the_projection_and_copies_nothing(rotary, check_block_layer_memory):
    layer = jm.BlockDiagonalSelfAttention(
        64, 2, rotary=rotary, max_seqlen=400, device="cuda"
    ).bfloat16()
    x = torch.randn(sum(LENGTHS), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    check_block_layer_memory(layer, x, LENGTHS)


# -- accuracy of fused rotary ----------------------------------------------------------------------


def rotated_in_bf16(x, cos, sin):
    """Rotary as models without a kernel compute it: tables in bf16, and every operation rounded, in
    the backward too."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


@pytest.mark.parametrize(
    "kernels, precise, limit",
    [("triton", False, 0.75), ("hopper", False, 0.75), ("hopper", True, 0.5)],
    indirect=["kernels"],
)
@pytest.mark.parametrize("rotate", ["qk", "qkv"])
def test_gradients_are_more_accurate_than_with_rotary_in_bf16(
    kernels, precise, limit, rotate, offsets
):
    """The error against float64 is less than 3/4, and with `precise` less than half, of that of
    bf16 rotary before a separate attention."""
    lengths = torch.randint(1, 513, (64,)).tolist()
    q, k, v, grad = (
        torch.randn(sum(lengths), 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    segments, rotary = (
        offsets(lengths, "cuda"),
        jm.Rotary.from_frequencies(128, 512, rotate, device="cuda"),
    )
    rotary = dataclasses.replace(rotary, precise=precise)
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])
    cos, sin = (table[positions, None].bfloat16() for table in (rotary.cos, rotary.sin))

    def fused(q, k, v, implementation=kernels):
        return F.block_diagonal_attention(
            q, k, v, segments, rotary=rotary, implementation=implementation
        )

    def apart(q, k, v):
        q, k = rotated_in_bf16(q, cos, sin), rotated_in_bf16(k, cos, sin)
        v = rotated_in_bf16(v, cos, sin) if rotate == "qkv" else v
        return F.block_diagonal_attention(q, k, v, segments, implementation=kernels)

    def gradients(attend, dtype=torch.bfloat16):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*inputs), inputs[:2], grad.to(dtype))

    exact = gradients(lambda *tensors: fused(*tensors, "reference"), torch.float64)
    for ours, theirs, truth in zip(gradients(fused), gradients(apart), exact, strict=True):
        errors = [(x - truth).abs() for x in (ours, theirs)]
        root_mean_square = [error.square().mean().sqrt() for error in errors]
        # The largest error of each segment, averaged over segments: that of the whole batch would
        # depend on a single element.
        largest = [
            torch.stack([part.max() for part in error.split(lengths)]).mean() for error in errors
        ]
        for ours_of_all, theirs_of_all in (root_mean_square, largest):
            assert ours_of_all < limit * theirs_of_all


def test_no_rows(kernels, offsets):
    q, k, v = (x[:0].detach().requires_grad_() for x in inputs())
    out = F.block_diagonal_attention(q, k, v, offsets([0, 0], "cuda"), implementation=kernels)
    for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert x.shape == q.shape
