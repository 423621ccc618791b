"""DIN's attention: the registered operators and their launches.

    z1 = (B + D ∘ q) k + a,  h = act(z),  z2 = W2 h1 + b2,  s = w · h + b3
    out = Σ_i p_i v_i  with  p = s, or the softmax of s over the events

a is what the first layer adds for a row of q; its GEMM, and those of its gradients, are the
caller's. Kernels: triton_forward.py and triton_backward.py; on Hopper hopper_forward.py,
hopper_rows.py and hopper_events.py. configs.py has the launch configurations. Results
are deterministic: each row of a result has one program, and gradients of the MLP are parts of a
fixed number of programs, summed in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..common.activations import activation_factors, activation_function
from ..common.autograd import refuse_derivative
from ..common.configs import padded_dim
from ..common.device import (
    cdiv,
    contiguous_last_dim,
    device_properties,
    has_descriptor,
    precision,
    row_strides,
)
from ..common.ops import operator
from ..common.pipeline import TensorDescriptor, descriptor
from ..common.tail import zero_tails
from ..schedule.cost import MaskParams
from .configs import DINConfig, DINProblem, din_config, hopper_config, pieces, runs_on_hopper
from .hopper_events import din_bwd_events_hopper_kernel
from .hopper_forward import din_fwd_hopper_kernel
from .hopper_rows import din_bwd_rows_hopper_kernel
from .mlp import Operands, Options, Unit, Users, has_table
from .results import empty_gradients, joined_moments
from .triton_backward import din_bwd_dkdv_kernel, din_bwd_dmlp_kernel, din_bwd_dq_kernel
from .triton_forward import din_fwd_kernel, din_moments_kernel, din_units_kernel


class _Launch(NamedTuple):
    """Arguments that the kernels share, and their constants."""

    operands: Operands
    strides: tuple[int, ...]
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]
    constants: dict
    config: DINConfig

    @property
    def tensors(self) -> tuple:
        """The first arguments of each kernel."""
        return self.operands, self.strides, self.weights, self.biases, self.tables

    @property
    def events(self) -> TensorDescriptor:
        """Of Hopper's tiles of events."""
        return descriptor(self.operands.k, 64, max(64, self.constants["OPTIONS"].block_e))

    def programs(self, rows: int) -> int:
        """Programs of a kernel whose programs take many rows of q."""
        device = self.operands.q.device
        return max(1, min(rows, device_properties(device).num_sms * self.config.ctas_per_sm))


def _prepare(
    kernel: str,
    operands: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    tables: Sequence[Tensor | None],
    activation: str,
    softmax: bool = False,
    only: int = -1,
    mask: list[int] | None = None,
) -> _Launch:
    same = len(operands) == 4
    q, k, a, of_k, v = map(contiguous_last_dim, [*operands, operands[1]][:5])
    given = Operands(q, k, a, of_k.contiguous(), v)
    width, v_width = given.q.shape[1], given.v.shape[1]
    hidden = tuple(x.shape[0] for x in weights[:-1])
    sizes, (capability, _) = (max(width, v_width), hidden), device_properties(q.device)
    config = din_config(kernel, q.element_size(), *sizes, activation, softmax, capability)
    bfloat16 = given.q.dtype == torch.bfloat16
    name = "sigmoid" if has_table(activation) else activation
    align, strides = row_strides(*given)
    options = Options(
        width=width,
        v_width=v_width,
        block_e=padded_dim(width),
        block_v=padded_dim(v_width),
        hidden=hidden,
        pieces=tuple(map(pieces, hidden)),
        block=config.block,
        align=align,
        precision=precision(given.q),
        units=activation if activation in ("relu", "prelu", "dice") else None,
        factors=activation_factors(name, bfloat16, 1.0),
        softmax=softmax,
        same=same,
        only=only,
        mask=None if mask is None else MaskParams(*mask),
    )
    constants = dict(
        ACTIVATION=activation_function(name, bfloat16),
        OPTIONS=options,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    contiguous = (
        tuple(x.contiguous() for x in xs if x is not None) for xs in (weights, biases, tables)
    )
    return _Launch(given, tuple(strides), *contiguous, constants, config)


def _unit_rows(tables: Sequence[Tensor | None], activation: str) -> Sequence[Tensor | None]:
    """Tables as the portable kernels take them: with Dice, each has the rows of a Unit."""
    given = tuple(x.contiguous() for x in tables if x is not None)
    if activation != "dice" or not given:
        return tables
    hidden = tuple(x.shape[1] for x in given)
    units = tuple(x.new_empty((len(Unit._fields), x.shape[1])) for x in given)
    block = max(map(triton.next_power_of_2, hidden))
    din_units_kernel[(1,)](given, units, HIDDEN=hidden, BLOCK=block)
    return units


def _runs_hopper(launch: _Launch, backward: bool) -> bool:
    k, options = launch.operands.k, launch.constants["OPTIONS"]
    problem = DINProblem(
        options.width, options.hidden, k.dtype, options.same, has_descriptor(k[:, None]),
        k.device.type, device_properties(k.device).capability,
    )  # fmt: skip
    return runs_on_hopper(problem, backward)


def _on_hopper(launch: _Launch, kernel: str, only: int = -1) -> _Launch:
    """A launch of one of Hopper's kernels, as `hopper_config` names them. only: of its Options."""
    options = launch.constants["OPTIONS"]
    config = hopper_config(kernel, options.width, options.hidden)
    by_size = options.pieces[0], pieces(options.hidden[1], 8 if kernel == "fwd" else 16)
    constants = launch.constants | dict(
        OPTIONS=options._replace(pieces=by_size, only=only), maxnreg=config.max_registers
    )
    return launch._replace(constants=constants, config=config)


def _fake(operands, *_):
    q, v = operands[0], operands[1 if len(operands) == 4 else 4]
    return q.new_empty((q.shape[0], v.shape[1])), q.new_empty(q.shape[:1], dtype=torch.float32)


@operator("din_attention", fake=_fake)
def triton_din(
    operands: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    tables: list[Tensor | None],
    segments: list[Tensor | None],
    activation: str,
    softmax: bool,
    mask: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sums of the events.

    Args:
        operands: q `[R, E]`, k `[L, E]`, a `[R, H1]`, B `[H1, E]`, and v `[L, Ev]` unless it is k;
            fp32, fp16 or bf16.
        weights: D `[H1, E]`, then `[H2, H1]` of a second hidden layer, then `[1, H]`.
        biases: of the layers but the first.
        tables: fp32 `[7, H]` of each hidden layer with "prelu" or "dice", otherwise None.
        segments: the offsets of rows of q and of events `[B + 1]`, and the number of targets of
            each user `[B]`, if the mask has them.
        mask: the fields of a MaskParams; None: each row of q sees all of its user's events.

    Returns:
        `[R, Ev]`, and the scores' log-sum-exp, fp32 `[R]`, which is not written without softmax.
        Rows behind the last segment are 0.
    """
    tensors = operands, weights, biases, tables
    launch = _prepare("fwd", *tensors, activation, softmax, mask=mask)
    out, lse = _fake(operands)
    rows, num_users = out.shape[0], segments[0].shape[0] - 1
    users = Users(*segments)
    if rows == 0 or num_users == 0:
        return out.zero_(), lse.zero_()
    if _runs_hopper(launch, backward=False):
        launch = _on_hopper(launch, "fwd")
        din_fwd_hopper_kernel[(launch.programs(rows),)](
            launch.events, *launch.tensors, (out, lse), users, rows, num_users, **launch.constants
        )
        return out, lse
    launch = launch._replace(tables=tuple(_unit_rows(launch.tables, activation)))
    din_fwd_kernel[(launch.programs(rows),)](
        *launch.tensors, (out, lse), users, rows, num_users, **launch.constants
    )
    return out, lse


def _moments_fake(operands, weights, biases, tables, segments, activation, layer, *mask):
    return operands[0].new_empty((3, weights[layer].shape[0]), dtype=torch.float32)


@operator("din_moments", fake=_moments_fake)
def triton_din_moments(
    operands: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    tables: list[Tensor | None],
    segments: list[Tensor | None],
    activation: str,
    layer: int,
    mask: list[int] | None = None,
) -> Tensor:
    """Number of pairs, mean and variance of z of a hidden layer, over all pairs that are
    seen: fp32 `[3, H]`. tables: that of this layer is not read. Others: as `triton_din`."""
    tensors = operands, weights, biases, _unit_rows(tables, activation)
    launch = _prepare("moments", *tensors, activation, only=layer, mask=mask)
    rows, num_users = operands[0].shape[0], segments[0].shape[0] - 1
    size = 3, weights[layer].shape[0]
    if rows == 0 or num_users == 0:
        return operands[0].new_zeros(size, dtype=torch.float32)
    users = Users(*segments)
    programs = launch.programs(rows)
    parts = operands[0].new_empty((programs, *size), dtype=torch.float32)
    din_moments_kernel[(programs,)](
        *launch.tensors, parts, users, rows, num_users, **launch.constants
    )
    return joined_moments(parts)


def _backward_fake(
    do, lse, delta, operands, weights, biases, tables, segments, activation, softmax, layer, *mask,
):  # fmt: skip
    return empty_gradients(operands, weights, biases, tables, torch.float32, layer)


@operator("din_attention_backward", fake=_backward_fake)
def triton_din_backward(
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    operands: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    tables: list[Tensor | None],
    segments: list[Tensor | None],
    activation: str,
    softmax: bool,
    layer: int,
    mask: list[int] | None = None,
) -> list[Tensor]:
    """Gradients of the operands, in their dtype; of the weights and the biases, and sums `[3, H]`
    of each table, in fp32. The sums are the gradients of slope, bias and weight of the table.

    Args:
        lse, delta: fp32 `[R]`, of the forward, and out · do; read with softmax only.
        layer: the hidden layer of which only the sums are wanted; -1: all. They need d0 and d1 of
            the layers behind it.
    """
    results = empty_gradients(operands, weights, biases, tables, torch.float32, layer)
    rows, num_users = operands[0].shape[0], segments[0].shape[0] - 1
    if rows == 0 or num_users == 0 or operands[1].shape[0] == 0:
        return [x.zero_() for x in results]
    users = Users(*segments)
    tensors = operands, weights, biases, _unit_rows(tables, activation), activation, softmax
    last, count, do = len(biases) - 1, len(operands), do.contiguous()
    launch, hidden = _prepare("dmlp", *tensors, layer, mask), [x.shape[0] for x in weights[:-1]]
    hopper = layer < 0 and _runs_hopper(launch, backward=True)
    if hopper:
        launch = _on_hopper(launch, "mlp")  # the number of programs of both launches
    programs = launch.programs(rows)
    sizes = [x.numel() for x in (*weights[1:], *biases)]
    parts = do.new_empty((programs, sum(sizes)), dtype=torch.float32)
    sums = [do.new_zeros((programs, 3, size), dtype=torch.float32) for size in hidden]
    dq, dk, da, _, dv = (*results[:count], results[0])[:5] if layer < 0 else [do] * 5
    first = do.new_zeros((programs, 2, *weights[0].shape[::-1]), dtype=torch.float32)
    of_mlp, of_rows = (do, lse, delta, parts, sums[last]), (do, lse, delta, dq, da, first, sums[0])
    numbers = users, rows, num_users
    tiles = cdiv(dk.shape[0], 64) + num_users
    if hopper:
        for only, found in enumerate((of_rows, of_mlp)):
            launch = _on_hopper(launch, "mlp", only)
            din_bwd_rows_hopper_kernel[(programs,)](
                launch.events, *launch.tensors, found, *numbers, **launch.constants
            )
        launch = _on_hopper(launch, "events")
        din_bwd_events_hopper_kernel[(tiles,)](
            launch.events, *launch.tensors, (do, lse, delta, dk), users, num_users,
            **launch.constants,
        )  # fmt: skip
    else:
        if layer in (-1, last):
            din_bwd_dmlp_kernel[(programs,)](*launch.tensors, of_mlp, *numbers, **launch.constants)
        if layer < last:
            launch = _prepare("dq", *tensors, layer, mask)
            din_bwd_dq_kernel[(programs,)](*launch.tensors, of_rows, *numbers, **launch.constants)
        if layer < 0:
            launch = _prepare("dkdv", *tensors, mask=mask)
            tiles = cdiv(dk.shape[0], launch.config.block) + num_users
            din_bwd_dkdv_kernel[(tiles,)](
                *launch.tensors, (do, lse, delta, dk, dv), users, num_users, **launch.constants
            )
    if layer >= 0:
        return [sums[layer].sum(0)]
    zero_tails((dq, segments[0]), (da, segments[0]))
    zero_tails(*((x, segments[1]) for x in (dk, dv)[: count - 3]))
    d_products, d_of_k = first.sum(0).mT
    results[3].copy_(d_of_k)
    found = list(parts.sum(0).split(sizes))
    if last == 1:  # which the kernel stores transposed
        found[0] = found[0].view(hidden).t().reshape(-1)
    # copies, because an operator's results share no memory
    found = [x.view(y.shape).clone() for x, y in zip(found, (*weights[1:], *biases))]
    of_tables = (x.sum(0) for x in sums if tables[0] is not None)
    return [*results[:count], d_products.contiguous(), *found, *of_tables]


refuse_derivative(
    triton_din_backward,
    "din_attention is not differentiable twice: its backward has no derivative of its own",
)
