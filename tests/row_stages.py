"""The stages of HSTU's node in plain torch, for tests on the CPU in any dtype."""

from __future__ import annotations

import torch
from jagged_kernels.attention.params import pack, unpack
from torch import Tensor
from torch.nn import functional as nnf

from jagged_modules.containers.padding import padded_to
from jagged_modules.cpu.attention import attention_cpu
from jagged_modules.functional.attention_call import parsed_call
from jagged_modules.layers.hstu_node import Stages


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps, groups=1, rms=False) -> Tensor:
    """The definition of the norms."""
    x = torch.unflatten(x, 1, (groups, -1))
    if not rms:
        x = x - x.mean(2, keepdim=True)
    x = (x * torch.rsqrt(x.square().mean(2, keepdim=True) + eps)).flatten(1) * weight
    return x if bias is None else x + bias


def kept(seed: Tensor | None, dropout: float, like: Tensor) -> Tensor:
    """Factors of dropout."""
    if seed is None:
        return torch.ones_like(like)
    generator = torch.Generator().manual_seed(int(seed))
    drawn = torch.rand(like.shape, generator=generator, dtype=torch.float64)
    return (drawn >= dropout).to(like.dtype) / (1 - dropout)


def gated(u, a, weight, bias, factors, *norm) -> Tensor:
    """The definition of the gate. factors: of dropout."""
    u = nnf.silu(u)
    return torch.cat([u, a, u * normed(a, weight, bias, *norm)], 1) * factors


def _derived(function, inputs: list[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """The gradients of the inputs; None of None."""
    with torch.enable_grad():
        inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
        given = [x for x in inputs if x is not None]
        grads = iter(torch.autograd.grad(function(*inputs), given, grad))
        return [None if x is None else next(grads) for x in inputs]


def _sums(weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.stack([weight, torch.zeros_like(weight) if bias is None else bias])


def cleared(x: Tensor, end: Tensor | None) -> Tensor:
    """x with 0 in the rows behind the end."""
    if end is None:
        return x
    return x.masked_fill((torch.arange(len(x)) >= end[-1])[:, None], 0)


def _row_norm(x, weight, bias, dtype, eps, groups, rms, columns=0, end=None, after=None, rows=None):
    statistics = x.new_empty(x.shape[0], groups), x.new_empty(x.shape[0], groups)
    assert columns == 0  # for 16 bits alone
    y = normed(cleared(x, end), weight, bias, eps, groups, rms)
    y = cleared(y, end).to(dtype)
    return y if rows is None else padded_to(y, rows), *statistics


def _row_norm_backward(dy, x, mean, rstd, weight, residual, eps, rms, end):
    bias = None if rms else torch.zeros_like(weight)
    norm, dy, x = (eps, rstd.shape[1], rms), cleared(dy, end), cleared(x, end)
    dx, *sums = _derived(lambda *given: normed(*given, *norm), [x, weight, bias], dy)
    return dx + cleared(residual, end), _sums(*sums)


def _gate(u, a, weight, bias, seed, dropout, eps, groups, rms):
    factors = kept(seed, dropout, a.new_empty(a.shape[0], 3 * a.shape[1]))
    statistics = a.new_empty(a.shape[0], groups), a.new_empty(a.shape[0], groups)
    return gated(u, a, weight, bias, factors, eps, groups, rms), *statistics


def _gate_linear_backward(
    dout, given, operands, bias, projection, seed, dropout, eps, rms, outs, needs, end=None
):
    u, a, _, rstd, weight = operands
    dout = padded_to(cleared(dout, end), len(a))
    factors = kept(seed, dropout, a.new_empty(a.shape[0], 3 * a.shape[1]))

    def function(*inputs):
        *of_gate, projection = inputs
        return gated(*of_gate, factors, eps, rstd.shape[1], rms) @ projection.t()

    if given is not None:  # what the forward kept
        torch.testing.assert_close(
            given, gated(u, a, weight, bias, factors, eps, rstd.shape[1], rms)
        )
    du, da, *sums, dprojection = _derived(function, [u, a, weight, bias, projection], dout)
    outs[0].fill_(torch.nan)[:, : a.shape[1]] = du
    outs[1].copy_(da)
    return _sums(*sums), dprojection if needs else projection.new_empty(0)


def _attention(*arguments):
    call = unpack(*arguments)[0]
    return attention_cpu(call), call.q.new_empty(call.q.shape[1], 0)


def _attention_backward(do, results, out, of_keys, columns, *arguments):
    call = unpack(*arguments)[0]
    params = call.params
    tables = [params.position_bias, params.time_bias]

    def function(q, k, v, position_bias, time_bias):
        of_call = params._replace(position_bias=position_bias, time_bias=time_bias)
        return attention_cpu(call._replace(q=q, k=k, v=v, params=of_call))

    *grads, dposition, dtime = _derived(function, [call.q, call.k, call.v, *tables], do)
    for first, x in zip(columns, grads):
        out[:, first : first + x[0].numel()] = x.flatten(1)
    return tuple(do.new_empty(0) if x is None else x for x in (dposition, dtime))


STAGES = Stages(
    _row_norm, _row_norm_backward, _gate, _gate_linear_backward, _attention, _attention_backward
)


def attention_arguments(like, q_shape, v_shape, segments, options):
    """`functional.attention.attention_arguments` without a list of tiles, which kernels need."""
    q, v = like.expand(q_shape), like.expand(v_shape)
    return pack(parsed_call(q, q, v, segments, segments, options).call)
