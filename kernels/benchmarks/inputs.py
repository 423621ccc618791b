"""What the benchmarks share: random jagged inputs, this project's kernels to measure, attention in
plain torch and FlashAttention-2."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from names import NO_WORKSPACE, OURS, PORTABLE
from runner import Implementation, Setup, device_name, host_median_ms
from torch import Tensor

import jagged_modules as jm
from jagged_modules.schedule import host_schedule

BACKWARD_FLOPS = 2.5  # attention's forward has two GEMMs, its backward five of the same size
# bytes/s of large copies, FLOP/s of long 16-bit GEMMs
ATTAINABLE = {"NVIDIA H200": (4.24e12, 729e12)}


# -- inputs ----------------------------------------------------------------------------------------


def uniform_lengths(count: int, low: int, high: int) -> Tensor:
    """Host lengths spread evenly over low..high, both included, in random order. The mean is not
    random."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return torch.linspace(low, high, count, dtype=torch.float64).round().long()[order]


def lognormal_lengths(count: int, mean: float, longest: int, sigma: float) -> Tensor:
    """Random host lengths, proportional to exp(sigma · N(0, 1)): scaled to the mean, then clipped
    to 1..longest."""
    lengths = (
        sigma * torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ).exp()
    return (lengths * (mean / lengths.mean())).round().long().clamp(1, longest)


def offsets_of(lengths: Tensor) -> Tensor:
    """int32 ``[B + 1]`` host offsets."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def sample_segments(lengths: Tensor) -> list[int]:
    """The segments to check: the longest, the one of median length, and the last."""
    by_length = lengths.argsort().tolist()
    return sorted({by_length[-1], by_length[len(lengths) // 2], len(lengths) - 1})


def random_tensors(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, device=device, dtype=dtype, generator=generator) for shape in shapes]


def leaves(**tensors: Tensor) -> dict[str, Tensor]:
    """The tensors by name, as contiguous leaves that require a gradient."""
    return {name: x.detach().contiguous().requires_grad_() for name, x in tensors.items()}


def pad(values: Tensor, valid: Tensor) -> Tensor:
    """``[L, H, D]`` -> ``[B, N, H, D]`` with zeros where ``valid`` ``[B, N]`` is False."""
    padded = values.new_zeros(*valid.shape, *values.shape[1:])
    padded[valid] = values
    return padded


# -- the definition --------------------------------------------------------------------------------


def by_rows(attention: Callable[..., Tensor], *others: object) -> Callable[..., Tensor]:
    """An attention on ``[H, N, D]`` as one on ``[N, H, D]``. others: its further arguments."""
    return lambda *qkv: attention(*(x.transpose(0, 1) for x in qkv), *others).transpose(0, 1)


def exact(
    attention: Callable[..., Tensor],
    qkv: Iterable[Tensor],
    grad: Tensor,
    dtype: torch.dtype,
    others: Iterable[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Output, and the gradients of q, k, v and other leaves."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in qkv]
    out = attention(*inputs)
    return out.detach(), *torch.autograd.grad(out, (*inputs, *others), grad.to(dtype))


def named(part: object, results: Iterable[Tensor]) -> dict[str, Tensor]:
    """Output and gradients of q, k and v, as a reference names them."""
    return {f"{name}/{part}": x for name, x in zip(("out", "dq", "dk", "dv"), results)}


def attention_setup(
    implementations: dict[str, Callable[[], Implementation]],
    reference: Callable[[torch.dtype], dict[str, Tensor]],
    dtype: torch.dtype,
    device: str,
    flops: float,
    **options: Any,
) -> Setup:
    """flops: of the forward."""
    options = {"attainable": ATTAINABLE.get(device_name(device))} | options
    options["backward_flops"] = BACKWARD_FLOPS * flops
    return Setup(implementations, reference, dtype, flops=flops, **options)


# -- implementations -------------------------------------------------------------------------------


def padded_form(
    inputs: dict[str, Tensor], grad: Tensor, q_valid: Tensor, kv_valid: Tensor
) -> tuple[dict[str, Tensor], Tensor, Callable[[Tensor, int, slice], Tensor]]:
    """q, k and v as leaves ``[B, H, N, D]``, grad so, and a segment's ``[N, H, D]`` of a result."""
    valid = {"q": q_valid, "k": kv_valid, "v": kv_valid}
    return (
        leaves(**{name: pad(x, valid[name]).transpose(1, 2) for name, x in inputs.items()}),
        pad(grad, q_valid).transpose(1, 2).contiguous(),
        lambda x, b, rows: x[b, :, : rows.stop - rows.start].transpose(0, 1),
    )


def our_kernels(device: str) -> dict[str, str]:
    """Name -> ``implementation``: "auto", and on compute capability 9.0 also the portable
    kernels."""
    both = (
        device == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() == (9, 0)
    )
    return {OURS: "auto", PORTABLE: "triton"} if both else {OURS: "auto"}


def our_implementations(
    device: str, head_dim: int, build: Callable[[str], Implementation]
) -> dict[str, Callable[[], Implementation]]:
    """``build`` for each of our kernels, and on Hopper also without the workspace in which the
    backward adds up dq."""
    implementations = {
        name: partial(build, kernels) for name, kernels in our_kernels(device).items()
    }
    if PORTABLE in implementations and head_dim > 64:
        implementations[NO_WORKSPACE] = lambda: dataclasses.replace(
            build("auto"), around=partial(jm.backward_workspace, 0)
        )
    return implementations


def timed_schedule(
    q_lengths: Tensor,
    kv_lengths: Tensor,
    q: Tensor,
    mask: jm.AttentionMask | None = None,
    implementation: str = "auto",
) -> tuple[jm.TileSchedule, dict[str, float]]:
    """The schedule of forward and backward on q's device, and ``{name: ms}`` of building it on the
    host."""
    sizes = {
        "num_heads": q.shape[-2],
        "num_kv_heads": q.shape[-2],
        "head_dim": q.shape[-1],
        "dtype": q.dtype,
    }
    build = partial(
        host_schedule, q_lengths, kv_lengths, mask=mask, implementation=implementation, **sizes
    )
    return build().to(q.device), {"schedule on the host": host_median_ms(build, rep_ms=5.0)}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v on ``[..., N, D]`` in plain torch; False in ``mask`` hides a
    key."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def varlen_attention(
    q, k, v, q_offsets, kv_offsets, max_q: int, max_kv: int, causal: bool = False
) -> Tensor:
    """FlashAttention-2 with offsets, as torch ships it."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        q,
        k,
        v,
        q_offsets,
        kv_offsets,
        max_q,
        max_kv,
        **({"window_size": (-1, 0)} if causal else {}),
    )


# -- a summary -------------------------------------------------------------------------------------


def jagged_over_full(rows: list[dict], table: str, both: str) -> list[str]:
    """Our TFLOP/s on jagged segments in % of those on full ones: of the forward, and of the pass
    whose column is ``both``."""
    ours = {
        row["case"]: row
        for row in rows
        if row["table"] == table and row["implementation"] == OURS and row.get(both)
    }
    lines, name = [], both.removesuffix("_tflops").replace("_", "+")
    for case, row in ours.items():
        full = ours.get(case.replace("jagged", "full"), row)
        if full is not row:
            forward, other = (100 * row[x] / full[x] for x in ("forward_tflops", both))
            lines.append(
                f"{case}: {forward:.0f} % of full segments' TFLOP/s forward, {other:.0f} % {name}"
                f" ({OURS})."
            )
    return lines
