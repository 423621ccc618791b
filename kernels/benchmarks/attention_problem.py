"""Attention within segments of any lengths: inputs, this project's forms of it, peers, and the
definition."""

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property, partial

import peers
import torch
from inputs import (
    attention_setup,
    by_rows,
    exact,
    leaves,
    named,
    offsets_of,
    our_kernels,
    padded_form,
    plain_attention,
    random_tensors,
    sample_segments,
    timed_schedule,
    varlen_attention,
)
from names import FA2
from runner import Implementation, Setup
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

import jagged_modules as jm
from jagged_modules import functional as F


@dataclasses.dataclass(frozen=True)
class Attention:
    """Lengths of the segments, and the attention within them. kv_lengths: None for
    self-attention."""

    q_lengths: Tensor
    num_heads: int
    head_dim: int
    kv_lengths: Tensor | None = None
    causal: bool = False
    activation: str = "softmax"

    @property
    def lengths(self) -> tuple[Tensor, Tensor]:
        return self.q_lengths, self.q_lengths if self.kv_lengths is None else self.kv_lengths

    @cached_property
    def options(self) -> dict:
        """Arguments of jagged_attention."""
        scale = 1.0 if self.activation == "softmax" else 1 / int(self.lengths[1].max())
        mask = jm.AttentionMask(causal=True) if self.causal else None
        return {"activation": self.activation, "output_scale": scale, "mask": mask}

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        q, kv = self.lengths
        return int((q * (q + 1) // 2 if self.causal else q * kv).sum())

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """On ``[..., N, D]`` in plain torch. Padded keys count with softmax, but not with silu(0) =
        0."""
        seen = (
            torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            if self.causal
            else None
        )
        if self.activation == "softmax":
            return plain_attention(q, k, v, seen)
        weights = silu((q / math.sqrt(self.head_dim)) @ k.transpose(-1, -2))
        weights = weights if seen is None else weights.masked_fill(~seen, 0.0)
        return (self.options["output_scale"] * weights) @ v


class Problem:
    """Inputs of an attention, implementations of it, and the definition on sampled segments."""

    def __init__(self, device: str, dtype: torch.dtype, attention: Attention):
        self.device, self.dtype, self.attention = device, dtype, attention
        q_lengths, kv_lengths = attention.lengths
        self.max_q, self.max_kv = int(q_lengths.max()), int(kv_lengths.max())
        q_offsets, kv_offsets = offsets_of(q_lengths), offsets_of(kv_lengths)
        self.q_offsets = q_offsets.to(device)
        self.kv_offsets = self.q_offsets if attention.kv_lengths is None else kv_offsets.to(device)
        q_shape, kv_shape = (
            (int(x.sum()), attention.num_heads, attention.head_dim) for x in attention.lengths
        )
        q, k, v, self.grad = random_tensors(device, dtype, q_shape, kv_shape, kv_shape, q_shape)
        self.inputs = leaves(q=q, k=k, v=v)
        # with one key, softmax's dq and dk are 0
        samples = [b for b in sample_segments(kv_lengths) if kv_lengths[b] > 1]
        self.q_rows, self.kv_rows = (
            {b: slice(*x[b : b + 2].tolist()) for b in samples} for x in (q_offsets, kv_offsets)
        )

    def setup(
        self, implementations: dict[str, Callable[[], Implementation]], baseline: str = ""
    ) -> Setup:
        q_bytes, kv_bytes = (self.inputs[name].numel() * self.dtype.itemsize for name in ("q", "k"))
        flops = 4.0 * self.attention.num_heads * self.attention.head_dim * self.attention.pairs
        return attention_setup(
            implementations,
            self.reference,
            self.dtype,
            self.device,
            flops,
            bytes=2.0 * q_bytes + 2.0 * kv_bytes,
            backward_bytes=3.0 * q_bytes + 4.0 * kv_bytes,
            baseline=baseline,
        )

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        results, (q, k, v) = {}, self.inputs.values()
        for b, rows in self.q_rows.items():
            qkv = q[rows], *(x[self.kv_rows[b]] for x in (k, v))
            results |= named(b, exact(by_rows(self.attention.plain), qkv, self.grad[rows], dtype))
        return results

    def implementation(
        self, forward, inputs=None, grad=None, rows_of=lambda x, b, rows: x[rows], **extra
    ) -> Implementation:
        """``rows_of(x, b, rows)`` returns segment b's ``[N, H, D]`` of a result in the layout of
        ``inputs``."""

        def pick(name, x):
            rows = self.q_rows if name in ("out", "dq") else self.kv_rows
            return {b: rows_of(x, b, rows[b]) for b in rows}

        inputs = self.inputs if inputs is None else inputs
        return Implementation(
            lambda: forward(**inputs), inputs, pick, self.grad if grad is None else grad, **extra
        )

    def schedule(self, kernels: str = "auto") -> tuple[jm.TileSchedule, dict[str, float]]:
        return timed_schedule(
            *self.attention.lengths, self.inputs["q"], self.attention.options["mask"], kernels
        )

    def ours(self, kernels: str = "auto") -> Implementation:
        schedule, build_ms = self.schedule(kernels)
        return self.scheduled(schedule, kernels, host_ms=build_ms)

    def our_implementations(self) -> dict[str, Callable[[], Implementation]]:
        return {
            name: partial(self.ours, kernels) for name, kernels in our_kernels(self.device).items()
        }

    def scheduled(
        self, schedule: jm.TileSchedule | None, kernels: str = "auto", **extra
    ) -> Implementation:
        """With a given schedule. None: the operator lists the tiles on the device."""
        options = {
            "max_seqlen_q": self.max_q,
            "max_seqlen_kv": self.max_kv,
            "schedule": schedule,
            "implementation": kernels,
        }
        offsets = {"q_offsets": self.q_offsets, "kv_offsets": self.kv_offsets}
        return self.implementation(
            partial(F.jagged_attention, **offsets, **options, **self.attention.options), **extra
        )

    def schedule_in_each_call(self) -> Implementation:
        """Self-attention whose schedule is built on the host, as layers do it. Offsets are another
        tensor each time, so none is kept."""
        sizes = {
            "num_heads": self.attention.num_heads,
            "head_dim": self.attention.head_dim,
            "dtype": self.dtype,
        }
        sizes["mask"] = self.attention.options["mask"]

        def forward(q, k, v):
            segments = jm.Jagged(
                q.detach(),
                self.q_offsets.detach(),
                self.max_q,
                host_lengths=self.attention.q_lengths,
            )
            schedule = segments.schedule(**sizes)
            return F.jagged_attention(
                q, k, v, segments.offsets, schedule=schedule, **self.attention.options
            )

        return self.implementation(forward)

    def varlen(self, attention: Callable[..., Tensor]) -> Implementation:
        sizes = self.q_offsets, self.kv_offsets, self.max_q, self.max_kv
        return self.implementation(lambda q, k, v: attention(q, k, v, *sizes))

    def flash(self) -> dict[str, Callable[[], Implementation]]:
        """FlashAttention with offsets; on CUDA only."""
        causal = self.attention.causal
        modules = peers.FLASH_ATTENTION if self.device == "cuda" else {}
        newer = {
            name: lambda module=module: self.varlen(peers.flash_attention(module, causal))
            for name, module in modules.items()
        }
        return (
            ({FA2: lambda: self.varlen(partial(varlen_attention, causal=causal))} | newer)
            if modules
            else {}
        )

    def padded(self) -> Implementation:
        """On ``[B, H, N, D]``. Under a causal mask no valid query sees padding, as it comes
        later."""
        q_valid, kv_valid = (
            (torch.arange(int(x.max())) < x[:, None]).to(self.device)
            for x in self.attention.lengths
        )
        if self.attention.activation != "softmax":
            forward = self.attention.plain
        elif self.attention.causal or bool(kv_valid.all()):
            forward = partial(scaled_dot_product_attention, is_causal=self.attention.causal)
        else:
            forward = partial(scaled_dot_product_attention, attn_mask=kv_valid[:, None, None, :])
        return self.implementation(
            lambda q, k, v: forward(q, k, v),
            *padded_form(self.inputs, self.grad, q_valid, kv_valid),
            note="padded inputs",
        )
