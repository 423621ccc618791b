"""Problems of DIN's attention, for the CPU, the interpreter and a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import linear

from jagged_modules import AttentionMask, functional, reference
from jagged_modules.reference import din_attention_reference
from jagged_modules.unit_activations import UnitParameters

ACTIVATIONS = ("sigmoid", "relu", "prelu", "dice", "dice-eval", "silu", "identity")
MASKS = {  # fields of AttentionMask; num_targets: of the users, the last one's over and over
    "causal": dict(causal=True, window=(20, None)),
    "hstu": dict(
        causal=True, num_targets=(1, 0, 2), contextual_seqlen=2, max_attn_len=24,
        min_full_attn_seqlen=1,
    ),
    "truncated": dict(window=(40, 3), recent_history=30, global_prefix=2),
    "band": dict(max_attn_len=3, contextual_seqlen=1),
    "own": dict(causal=True, window=(0, 0), num_targets=(0,), recent_history=1),
}  # fmt: skip
KINKED = ("relu", "prelu")  # their derivatives jump
# Where z is within a few standard deviations of the kink, its error may put it on either side. One
# side in a thousand, 3 deviations away, would be missing in most sets of samples; from an error 4
# times as large, each set has about 15 of 64.
ENLARGED = 4.0
FEATURES = "q", "k", "q-k", "q*k"  # as published


@dataclasses.dataclass
class Problem:
    """Arguments of `din_attention`. `tensors`: those that have gradients, by name."""

    tensors: dict[str, Tensor]
    candidates: Tensor
    kv_offsets: Tensor
    options: dict
    layers: int
    statistics: dict

    def _lists(self, tensors: dict[str, Tensor]) -> tuple[list, list, UnitParameters | None]:
        def named(stem):
            return [tensors[f"{stem}{i}"] for i in range(9) if f"{stem}{i}" in tensors]

        units = None
        if named("slope"):
            norms = {x: named(x) or None for x in ("norm_weight", "norm_bias")}
            units = UnitParameters(
                named("slope"), norms["norm_weight"], norms["norm_bias"], **self.statistics
            )
        return named("weight"), named("bias"), units

    def call(self, *values: Tensor, implementation: str = "auto") -> Tensor:
        """The function under test, of the values of `tensors`."""
        named = dict(zip(self.tensors, values))
        q, k = named["q"], named["k"]
        v, (weights, biases, units) = named.get("v", k), self._lists(named)
        return functional.din_attention(
            q, k, v, self.candidates, self.kv_offsets, weights, biases,
            units=units, implementation=implementation, **self.options,
        )  # fmt: skip

    def definition(self, *values: Tensor) -> Tensor:
        """The reference, which materialises pairs, in the order of the candidates."""
        named = dict(zip(self.tensors, values))
        q, k = named["q"], named["k"]
        v, (weights, biases, units) = named.get("v", k), self._lists(named)
        order = self.candidates.argsort(stable=True)
        users = torch.arange(len(self.kv_offsets), device=q.device)
        q_offsets = torch.searchsorted(self.candidates[order].contiguous(), users)
        rows = q[order].reshape(-1, q.shape[-1])
        n_q = q.shape[1] if q.dim() == 3 else 1
        o = dict(normalize=None, features=FEATURES, mask=None) | self.options
        out = din_attention_reference(
            rows, k, v, q_offsets * n_q, self.kv_offsets, weights, biases,
            o["activation"], o["normalize"], o["features"], units, o["mask"],
        )  # fmt: skip
        return out.view(*q.shape[:-1], v.shape[1])[order.argsort()]

    def results(self, function, do: Tensor | None = None) -> dict[str, Tensor]:
        """out, and the gradients of all tensors."""
        values = [x.detach().requires_grad_() for x in self.tensors.values()]
        out = function(*values)
        do = gradient(out) if do is None else do
        gradients = torch.autograd.grad(out, values, do)
        return dict(out=out.detach(), **dict(zip(self.tensors, gradients)))

    def kernel_results(self) -> dict[str, Tensor]:
        """`results` of the kernels."""
        return self.results(lambda *x: self.call(*x, implementation="triton"))


def gradient(out: Tensor) -> Tensor:
    """A gradient of a result."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).to(out.dtype).to(out.device)


def problem(
    activation: str = "relu",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    *,
    candidates: list[int] = (2, 0, 1, 2, 3, 0, 2),
    lengths: list[int] = (3, 0, 7, 2),
    width: int = 6,
    v_width: int | None = 5,
    hidden: tuple[int, ...] = (7, 4),
    n_q: int = 0,
    mask: str | None = None,
    **options,
) -> Problem:
    """candidates: the user of each. lengths: of the histories. v_width None: v is k. n_q: query
    rows of a candidate; 0: q has two dimensions. mask: of MASKS."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)

    rows, features = sum(lengths), options.get("features", FEATURES)
    tensors = dict(q=random(len(candidates), *[n_q] * (n_q > 0), width), k=random(rows, width))
    if v_width is not None:
        tensors["v"] = random(rows, v_width)
    sizes = [len(features) * width, *hidden, 1]
    for i, (before, size) in enumerate(zip(sizes, sizes[1:])):
        tensors[f"weight{i}"] = random(size, before, scale=before**-0.5)
    tensors |= {f"bias{i}": random(size, scale=0.3) for i, size in enumerate(sizes[1:])}
    statistics = {}
    name, _, evaluates = activation.partition("-")
    if name in ("prelu", "dice"):
        tensors |= {f"slope{i}": random(size, scale=0.3) for i, size in enumerate(hidden)}
    if name == "dice":
        for stem, one in (("norm_weight", 1.0), ("norm_bias", 0.0)):
            tensors |= {f"{stem}{i}": one + random(n, scale=0.2) for i, n in enumerate(hidden)}
    if evaluates:
        means = [random(size, scale=0.2) for size in hidden]
        statistics = dict(running_means=means, running_vars=[x.exp() for x in means])
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
    index = torch.tensor(list(candidates), dtype=torch.long).to(device)
    if mask is not None:
        fields = dict(MASKS[mask])
        if targets := fields.pop("num_targets", None):
            given = [min(n, targets[min(b, len(targets) - 1)]) for b, n in enumerate(lengths)]
            fields["num_targets"] = torch.tensor(given, dtype=torch.int32).to(device)
        options["mask"] = AttentionMask(**fields)
    return Problem(
        tensors, index, offsets, dict(activation=name, **options), len(hidden), statistics
    )


@contextlib.contextmanager
def roundings_of_kernels(case: Problem):
    """The definition rounds what kernels round.

    The part of each feature in the first linear, and that of a difference as the difference of two
    parts: near a kink errors are larger than z, and where q is nearly k those of the difference's
    weight are larger than its gradient. The two sums of a score's gradient, p (v · do - out · do):
    where p is nearly 1, errors are larger than their difference. The side of a kink follows from an
    error ENLARGED times as large. Its first run must be exact."""
    width, exact_z, pairs = case.tensors["k"].shape[1], deque(), []

    def pair_features(q, k, features):
        pairs[:] = q, k, features, of_pairs(q, k, features)
        return pairs[-1]

    def by_feature(x, weight, bias):
        q, k, features, first = pairs
        if x is not first and x.shape[1] <= width:
            return linear(x, weight, bias)
        weights = weight.split(width, 1)
        parts = [linear(*part) for part in zip(x.split(width, 1), weights)]
        for name, minuend, other in (("q-k", q, k), ("k-q", k, q)):
            if x is first and name in features:
                i = features.index(name)
                parts[i] = linear(minuend, weights[i]) - linear(other, weights[i])
        return sum(parts, bias)

    def on_either_side(z, name, units):
        if name not in KINKED:
            return activation(z, name, units)
        exact = exact_z.popleft() if len(exact_z) == case.layers else z.detach()
        exact_z.append(exact)
        positive = exact + ENLARGED * (z - exact) > 0
        return torch.where(positive, z, (units.slope if units else 0.0) * z)

    def softmax_of_rows(s, i, num_rows):
        return s, softmax(s.detach(), i, num_rows)

    def weighted_sums(p, v, i, num_rows):
        if isinstance(p, Tensor):
            return sums(p, v, i, num_rows)
        return _SoftmaxSums.apply(*p, v, i, num_rows)

    softmax, sums = reference._softmax_of_rows, reference._weighted_sums
    activation, of_pairs = reference.unit_activation, reference.pair_features
    with (
        mock.patch.object(reference, "pair_features", pair_features),
        mock.patch.object(reference, "linear", by_feature),
        mock.patch.object(reference, "unit_activation", on_either_side),
        mock.patch.object(reference, "_softmax_of_rows", softmax_of_rows),
        mock.patch.object(reference, "_weighted_sums", weighted_sums),
    ):
        yield


class _SoftmaxSums(torch.autograd.Function):
    """Sums of rows v with the softmax p of scores s."""

    @staticmethod
    def forward(ctx, s, p, v, i, num_rows):
        out = v.new_zeros(num_rows, v.shape[1]).index_add(0, i, p[:, None] * v)
        ctx.save_for_backward(p, v, i, out)
        return out

    @staticmethod
    def backward(ctx, do):
        p, v, i, out = ctx.saved_tensors
        delta = (out * do).sum(1)
        ds = p * ((v * do[i]).sum(1) - delta[i])
        return ds, None, p[:, None] * do[i], None, None
