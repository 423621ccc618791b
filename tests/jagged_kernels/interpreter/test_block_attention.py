"""The block attention kernels in Triton's interpreter (fp32 and fp16; its bf16 arithmetic is wrong)."""

import pytest
import torch

from jagged_modules import functional as F

DTYPES = [torch.float32, torch.float16]
LENGTHS = [3, 0, 70, 130, 0, 0, 64, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 5, 0], [200], [0], [], [1] * 20], ids=str)
def test_forward_and_gradients(check_block_attention, lengths, block_size, dtype):
    check_block_attention(lengths, dtype, "cpu", block_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotate", ["qk", "qkv"])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_rotary(check_block_attention, block_size, rotate, dtype):
    check_block_attention(LENGTHS, dtype, "cpu", block_size, rotate=rotate)


def test_given_positions(check_block_attention):
    positions = torch.randint(0, 130, (sum(LENGTHS),))
    check_block_attention(LENGTHS, torch.float32, "cpu", rotate="qkv", positions=positions)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (4, 1)], ids=str)
def test_heads(check_block_attention, heads):
    check_block_attention(LENGTHS, torch.float32, "cpu", heads=heads, rotate="qk")


@pytest.mark.parametrize("dim", [8, 17, 40, 64, 96, 128])
def test_head_dims(check_block_attention, dim):
    check_block_attention([3, 70, 0], torch.float16, "cpu", heads=(2, 1), dim=dim, rotate=None if dim % 2 else "qkv")


def test_packed_views_and_gradients_of_any_stride(check_block_attention):
    packed = torch.randn(sum(LENGTHS), 3, 2, 24)
    for grad in (
        lambda out: torch.ones(()).expand_as(out),
        lambda out: torch.randn(out.shape[::-1]).permute(2, 1, 0),
        lambda out: torch.randn(*out.shape[:2], 2 * out.shape[2])[..., ::2],
    ):
        check_block_attention(LENGTHS, torch.float32, "cpu", tensors=packed.unbind(1), grad=grad, rotate="qk")


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_scale(check_block_attention, scale):
    check_block_attention(LENGTHS, torch.float32, "cpu", scale=scale)


def test_a_neighbours_nan_stays_where_it_is(offsets):
    q, k, v = (torch.randn(130, 2, 16) for _ in range(3))
    for x in (q, k, v):
        x[:30], x[100:] = float("nan"), float("nan")
        x.requires_grad_()
    out = F.block_diagonal_attention(q, k, v, offsets([30, 70, 30]), block_size=32, implementation="triton")
    grad = torch.randn_like(out)
    grad[:30], grad[100:] = float("nan"), float("nan")
    for x in (out, *torch.autograd.grad(out, (q, k, v), grad)):
        assert x[30:100].isfinite().all() and x[:30].isnan().all() and x[100:].isnan().all()


def test_nothing_is_saved_but_the_inputs(offsets):
    q, k, v = (torch.randn(sum(LENGTHS), 2, 16, requires_grad=True) for _ in range(3))
    segments, saved = offsets(LENGTHS), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        F.block_diagonal_attention(q, k, v, segments, implementation="triton")
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (q, k, v, segments)}


def test_no_second_derivative(offsets):
    q, k, v = (torch.randn(5, 2, 16, requires_grad=True) for _ in range(3))
    out = F.block_diagonal_attention(q, k, v, offsets([5]), implementation="triton")
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        gradient.sum().backward()


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(16, 48)

    def forward(self, x, x_offsets):
        q, k, v = self.projection(x).unflatten(1, (3, 2, 8)).unbind(1)
        return F.block_diagonal_attention(q, k, v, x_offsets, block_size=16, implementation="triton")


def test_compiled_without_recompiling_per_batch(offsets):
    model = Attention()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, lengths in enumerate(([5, 30, 4], [5, 2], [0, 9, 71, 1])):
        batch = torch.randn(sum(lengths), 16), offsets(lengths)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(*batch)
        gradients = [torch.autograd.grad(x.square().sum(), model.projection.weight)[0] for x in (out, model(*batch))]
        assert torch.equal(out, model(*batch)) and torch.equal(*gradients)


def test_operator_passes_opcheck(offsets):
    from jagged_kernels.block_attention import triton_block_attention

    q, k, v = (torch.randn(sum(LENGTHS), 2, 16, requires_grad=True) for _ in range(3))
    torch.library.opcheck(triton_block_attention, (q, k, v, offsets(LENGTHS), None, None, None, False, False, 32, 0.25, "triton"))
