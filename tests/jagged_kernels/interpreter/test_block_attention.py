"""The block attention kernels in Triton's interpreter (fp32 and fp16; its bf16 arithmetic is
wrong)."""

from functools import partial

import pytest
import torch
from marks import slow_after
from torch import library

import jagged_modules as jm
from jagged_modules import functional as F

DTYPES = [torch.float32, torch.float16]
LENGTHS = [3, 0, 70, 0, 0, 64, 1]
ROTARIES = [None, "qk", "qkv"]
FORMS = {
    "three": lambda qkv, *args, **options: F.block_diagonal_attention(
        *qkv.unbind(1), *args, **options
    ),
    "packed": F.block_diagonal_attention_packed,
}


@slow_after(
    6,
    "block_size, lengths, dtype",
    [
        *(
            (16, lengths, torch.float32)
            for lengths in (LENGTHS, [0, 0, 5, 0], [200], [0], [], [1] * 5)
        ),
        *(
            (size, lengths, torch.float32)
            for size in (32, 64, 128)
            for lengths in (LENGTHS, [200], [1] * 5)
        ),
        *((size, LENGTHS, torch.float16) for size in (16, 32, 64, 128)),
    ],
    ids=str,
)
def test_forward_and_gradients(check_block_attention, lengths, block_size, dtype):
    check_block_attention(lengths, dtype, "cpu", block_size)


@slow_after(
    2,
    "block_size, rotate, dtype",
    [
        *((size, rotate, torch.float32) for size in (16, 64, 128) for rotate in ("qk", "qkv")),
        *(
            (size, rotate, torch.float16)
            for size, rotate in ((16, "qkv"), (64, "qk"), (128, "qkv"))
        ),
    ],
    ids=str,
)
def test_rotary(check_block_attention, block_size, rotate, dtype):
    check_block_attention(LENGTHS, dtype, "cpu", block_size, rotate=rotate)


def test_given_positions(check_block_attention):
    positions = torch.randint(0, 70, (sum(LENGTHS),))
    for rotate in ("qk", "qkv"):
        check_block_attention(LENGTHS, torch.float32, "cpu", rotate=rotate, positions=positions)


@slow_after(1, "heads", [(6, 2), (1, 1), (3, 3), (4, 1)], ids=str)
def test_heads(check_block_attention, heads):
    check_block_attention(LENGTHS, torch.float32, "cpu", heads=heads, rotate="qk")


@pytest.mark.parametrize("dim", [8, 17, 40, 64, 96, 128])
def test_head_dims(check_block_attention, dim):
    check_block_attention(
        [3, 70, 0], torch.float16, "cpu", heads=(2, 1), dim=dim, rotate=None if dim % 2 else "qkv"
    )


def test_packed_views_and_gradients_of_any_stride(check_block_attention):
    packed = torch.randn(sum(LENGTHS), 3, 2, 24)
    for grad in (
        lambda out: torch.ones(()).expand_as(out),
        lambda out: torch.randn(out.shape[::-1]).permute(2, 1, 0),
        lambda out: torch.randn(*out.shape[:2], 2 * out.shape[2])[..., ::2],
    ):
        check_block_attention(
            LENGTHS, torch.float32, "cpu", tensors=packed.unbind(1), grad=grad, rotate="qk"
        )


@slow_after(1, "scale", [-0.3, 0.0, 2.0])
def test_scale(check_block_attention, scale):
    check_block_attention(LENGTHS, torch.float32, "cpu", scale=scale)


def test_a_neighbours_nan_stays_where_it_is(offsets):
    q, k, v = (torch.randn(130, 2, 16) for _ in range(3))
    for x in (q, k, v):
        x[:30], x[100:] = float("nan"), float("nan")
        x.requires_grad_()
    out = F.block_diagonal_attention(
        q, k, v, offsets([30, 70, 30]), block_size=32, implementation="triton"
    )
    grad = torch.randn_like(out)
    grad[:30], grad[100:] = float("nan"), float("nan")
    for x in (out, *torch.autograd.grad(out, (q, k, v), grad)):
        assert x[30:100].isfinite().all() and x[:30].isnan().all() and x[100:].isnan().all()


@pytest.mark.parametrize("rotary", ROTARIES)
def test_nothing_is_saved_but_the_inputs(rotary, offsets, saved_tensors):
    q, k, v = (torch.randn(sum(LENGTHS), 2, 16, requires_grad=True) for _ in range(3))
    segments, rotary = offsets(LENGTHS), rotary and jm.Rotary.from_frequencies(16, 200, rotary)
    with saved_tensors() as saved:
        F.block_diagonal_attention(q, k, v, segments, rotary=rotary, implementation="triton")
    inputs = [q, k, v, segments] if rotary is None else [q, k, v, segments, rotary.cos, rotary.sin]
    assert saved.storages.keys() == {x.data_ptr() for x in inputs}


@pytest.mark.parametrize("form", FORMS)
def test_no_second_derivative(form, offsets):
    qkv = torch.randn(5, 3, 2, 16, requires_grad=True)
    out = FORMS[form](qkv, offsets([5]), implementation="triton")
    (gradient,) = torch.autograd.grad(out.square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        gradient.sum().backward()


class Attention(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.projection, self.form = torch.nn.Linear(16, 48), FORMS[form]

    def forward(self, x, x_offsets):
        qkv = self.projection(x).unflatten(1, (3, 2, 8))
        return self.form(qkv, x_offsets, block_size=16, implementation="triton")


@slow_after(1, "form", FORMS)
def test_compiled_without_recompiling_per_batch(form, offsets):
    torch._dynamo.reset()
    model = Attention(form)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, lengths in enumerate(([5, 30, 4], [5, 2], [0, 9, 71, 1])):
        batch = torch.randn(sum(lengths), 16), offsets(lengths)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(*batch)
        gradients = [
            torch.autograd.grad(x.square().sum(), model.projection.weight)[0]
            for x in (out, model(*batch))
        ]
        assert torch.equal(out, model(*batch)) and torch.equal(*gradients)


@slow_after(1, "rotary", [None, "qk"])
@pytest.mark.parametrize("form", FORMS)
def test_operators_pass_opcheck(form, rotary, offsets):
    from jagged_kernels.block_attention import op as kernels

    qkv, grad, segments = torch.randn(43, 3, 2, 16), torch.randn(43, 2, 16), offsets([3, 0, 40])
    rotary = rotary and jm.Rotary.from_frequencies(16, 40, rotary)
    tables = [None] * 3 if rotary is None else [rotary.cos, rotary.sin, None]
    options = tables, [False, rotary is not None, False, False, True], 32, 0.25, "triton"
    packed = "_packed" if form == "packed" else ""
    op, backward_op = (
        getattr(kernels, f"triton_block_attention{packed}{suffix}") for suffix in ("", "_backward")
    )
    tensors = [qkv] if packed else qkv.unbind(1)
    library.opcheck(op, (*(x.clone().requires_grad_() for x in tensors), segments, *options))
    library.opcheck(backward_op, (grad, *tensors, segments, *options))


# -- q, k and v in one tensor ----------------------------------------------------------------------


@slow_after(1, "dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotate", ROTARIES)
@pytest.mark.parametrize("lengths", [LENGTHS, [0], []], ids=str)
def test_packed(check_packed_block_attention, lengths, rotate, dtype):
    check_packed_block_attention(lengths, dtype, "cpu", block_size=32, rotate=rotate)


@pytest.mark.parametrize("dim, heads", [(8, 1), (17, 3), (40, 2), (128, 1)])
def test_packed_heads(check_packed_block_attention, dim, heads):
    check_packed_block_attention(
        [3, 70, 0], torch.float16, "cpu", heads=heads, dim=dim, rotate=None if dim % 2 else "qk"
    )


@pytest.mark.parametrize("rotate", ["qk", "qkv"])
def test_packed_with_angles_that_are_not_linear_in_the_position(
    check_packed_block_attention, rotate
):
    check_packed_block_attention(LENGTHS, torch.float32, "cpu", rotate=rotate, linear=False)


def test_packed_where_a_block_is_too_large(check_packed_block_attention):
    check_packed_block_attention(
        [3, 130], torch.float32, "cpu", block_size=128, dim=40, rotate="qk"
    )


def test_packed_of_any_stride(check_packed_block_attention):
    for qkv in (
        torch.randn(138, 3, 24, 2).mT,
        torch.randn(138, 2, 3, 24).transpose(1, 2),
        torch.randn(138, 3, 2, 48)[..., ::2],
    ):
        check_packed_block_attention(
            [3, 0, 135],
            torch.float32,
            "cpu",
            qkv=qkv,
            rotate="qk",
            grad=lambda out: torch.randn(out.shape[::-1]).permute(2, 1, 0),
        )


@pytest.mark.parametrize("rotary", ROTARIES)
def test_layer_keeps_the_projection_and_copies_nothing(
    rotary, check_block_layer_memory, monkeypatch
):
    by_kernels = partial(F.block_diagonal_attention_packed, implementation="triton")
    monkeypatch.setattr(
        "jagged_modules.layers.block_attention.block_diagonal_attention_packed", by_kernels
    )
    layer = jm.BlockDiagonalSelfAttention(32, 2, block_size=32, rotary=rotary, max_seqlen=130)
    check_block_layer_memory(layer, torch.randn(sum(LENGTHS), 32, requires_grad=True), LENGTHS)


def test_hopper_is_refused_where_its_kernels_do_not_run(offsets):
    q = torch.randn(43, 2, 16)
    with pytest.raises(
        ValueError, match="'hopper' takes .* capability 9.0.* got torch.float32 on cpu"
    ):
        F.block_diagonal_attention(q, q, q, offsets([3, 0, 40]), implementation="hopper")
