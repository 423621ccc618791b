"""F.jagged_attention on the CPU: gradcheck, autocast, inference mode, function transforms."""

import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F

from .attention_cases import make_qkv, mask_of


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_inputs(needed, offsets_of):
    offsets = offsets_of([4, 3])
    tensors = make_qkv(7, 7, dtype=torch.float64)
    grad = torch.randn(7, 2, 8, dtype=torch.float64)

    def gradients(implementation):
        inputs = [x.clone().requires_grad_(i in needed) for i, x in enumerate(tensors)]
        F.jagged_attention(*inputs, offsets, implementation=implementation).backward(grad)
        return [x.grad for x in inputs]

    torch.testing.assert_close(gradients("auto"), gradients("reference"))


def test_the_same_tensor_as_query_key_and_value(offsets_of):
    x = torch.randn(9, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: F.jagged_attention(x, x, x, offsets_of([4, 5])), x)


@pytest.mark.parametrize(
    "q_offsets, kv_offsets",
    [([0, 2, 2, 5], [0, 4, 6, 6]), ("shared", [0, 3, 6]), ([0, 2, 5], "shared")],
)
def test_gradcheck(q_offsets, kv_offsets):
    q_offsets, kv_offsets = (
        x if isinstance(x, str) else torch.tensor(x) for x in (q_offsets, kv_offsets)
    )
    inputs = [
        x.requires_grad_()
        for x in make_qkv(5, 6, heads=2, kv_heads=1, dim=3, v_dim=2, dtype=torch.float64)
    ]
    assert torch.autograd.gradcheck(
        lambda q, k, v: F.jagged_attention(q, k, v, q_offsets, kv_offsets, scale=-0.4), inputs
    )


@pytest.mark.parametrize(
    "activation, output_scale",
    [("silu", 0.3), ("gelu_taylor", torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64))],
)
@pytest.mark.parametrize("q_shared", [False, True])
def test_gradcheck_of_masked_activations(q_shared, activation, output_scale, offsets_of):
    inputs = [
        x.requires_grad_()
        for x in make_qkv(3, 8, heads=2, kv_heads=1, dim=3, v_dim=2, dtype=torch.float64)
    ]
    if isinstance(output_scale, torch.Tensor):
        inputs.append(output_scale.clone().requires_grad_())
    q_offsets, mask = "shared" if q_shared else offsets_of([2, 0, 1]), mask_of("hstu", [2, 1, 0])

    def attend(q, k, v, output_scale=output_scale):
        return F.jagged_attention(
            q,
            k,
            v,
            q_offsets,
            offsets_of([5, 1, 2]),
            activation=activation,
            mask=mask,
            output_scale=output_scale,
        )

    assert torch.autograd.gradcheck(attend, inputs)


def test_gradcheck_of_masked_softmax(offsets_of):
    inputs = [
        x.requires_grad_()
        for x in make_qkv(8, 5, heads=2, kv_heads=1, dim=3, v_dim=2, dtype=torch.float64)
    ]
    mask = jm.AttentionMask(window=(2, 0))
    assert torch.autograd.gradcheck(
        lambda q, k, v: F.jagged_attention(
            q, k, v, offsets_of([6, 2]), offsets_of([3, 2]), mask=mask
        ),
        inputs,
    )


def test_gradcheck_of_a_scale_with_shared_keys(offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(5, 4, dim=3, dtype=torch.float64)]
    factor = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, output_scale):
        return F.jagged_attention(
            q, k, v, offsets_of([2, 3]), "shared", activation="gelu", output_scale=output_scale
        )

    assert torch.autograd.gradcheck(attend, [*inputs, factor])


def test_no_grad(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    with torch.no_grad():
        out = F.jagged_attention(q, k, v, offsets_of([4, 3]))
    assert not out.requires_grad
    assert torch.equal(out, F.jagged_attention(q, k, v, offsets_of([4, 3])))


def test_inference_mode(offsets_of):
    with torch.inference_mode():
        assert F.jagged_attention(*make_qkv(7, 7), offsets_of([4, 3])).shape == (7, 2, 8)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_autocast_computes_in_its_dtype(implementation, offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.jagged_attention(q, k.half(), v, offsets_of([4, 3]), implementation=implementation)
    assert out.dtype == torch.bfloat16
    expected = F.jagged_attention(
        *(x.bfloat16() for x in (q, k, v)), offsets_of([4, 3]), implementation=implementation
    )
    torch.testing.assert_close(
        out,
        expected,
        rtol=0,
        atol=4 * torch.finfo(torch.bfloat16).eps * float(v.detach().abs().max()),
    )
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == torch.float32


@pytest.mark.parametrize("activation", ["softmax", "silu", "gelu_taylor"])
def test_a_backward_inside_autocast_has_the_gradients_of_one_outside(activation, offsets_of):
    tensors, grads = [x.requires_grad_() for x in make_qkv(7, 7)], []
    for inside in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = F.jagged_attention(*tensors, offsets_of([4, 3]), activation=activation)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            grads.append(torch.autograd.grad(out, tensors, torch.ones_like(out)))
    assert all(torch.equal(inner, outer) for inner, outer in zip(*grads))


def test_results_may_be_changed_in_place(offsets_of):
    """Except those of softmax: it keeps them for its backward, as torch does."""
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    F.jagged_attention(q, k, v, offsets_of([4, 3]), activation="silu").relu_().sum().backward()
    assert q.grad.isfinite().all()


def test_forward_mode_is_refused_where_it_would_give_nothing(offsets_of):
    q, k, v = make_qkv(7, 7)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="forward mode"):
            F.jagged_attention(dual, k, v, offsets_of([4, 3]))
        out = F.jagged_attention(dual, k, v, offsets_of([4, 3]), implementation="reference")
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None


def test_autocast_leaves_float64_alone(offsets_of):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (
            F.jagged_attention(*make_qkv(7, 7, dtype=torch.float64), offsets_of([4, 3])).dtype
            == torch.float64
        )


def test_second_derivatives_raise(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    grads = torch.autograd.grad(
        F.jagged_attention(q, k, v, offsets_of([4, 3])).sum(), [q, k, v], create_graph=True
    )
    with pytest.raises(RuntimeError, match="attention is not differentiable twice"):
        sum(g.sum() for g in grads).backward()


def test_the_reference_has_second_derivatives(offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(4, 4, dim=2, dtype=torch.float64)]
    offsets = offsets_of([3, 1])
    assert torch.autograd.gradgradcheck(
        lambda *x: F.jagged_attention(*x, offsets, implementation="reference"), inputs
    )


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_function_transforms_raise(transform, offsets_of):
    x, offsets = torch.randn(2, 7, 2, 4), offsets_of([4, 3])

    def attend(x):
        return F.jagged_attention(x, x, x, offsets)

    with pytest.raises(
        RuntimeError,
        match=(
            "jagged_attention.*torch.func.*: use torch.autograd.grad, and a loop in place of vmap"
        ),
    ):
        if transform == "vmap":
            torch.vmap(attend)(x)
        elif transform == "grad":
            torch.func.grad(lambda x: attend(x).sum())(x[0])
        else:
            torch.func.jvp(attend, (x[0],), (x[1],))


def test_vmap_of_the_reference(offsets_of):
    x, offsets = torch.randn(2, 7, 2, 4), offsets_of([4, 3])
    batched = torch.vmap(
        lambda x: F.jagged_attention(x, x, x, offsets, implementation="reference")
    )(x)
    torch.testing.assert_close(
        batched, torch.stack([F.jagged_attention(x[i], x[i], x[i], offsets) for i in range(2)])
    )
