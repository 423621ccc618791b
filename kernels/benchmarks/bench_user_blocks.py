"""Layers between users' histories and their other features (PFFN, seed pooling, InterFormer,
Kunlun) against the same in plain torch on padded histories, compiled.

    python kernels/benchmarks/bench_user_blocks.py                # CUDA: bf16 autocast, fp32 rows
    python kernels/benchmarks/bench_user_blocks.py --device cpu   # the CPU path: fp32
    python kernels/benchmarks/bench_user_blocks.py --tiny --device cpu

The padded forms take the layers' parameters. Histories are padded before the measured call.
"""

import contextlib
import sys
from collections.abc import Callable
from functools import partial

import torch
from inputs import leaves, lognormal_lengths, offsets_of, random_tensors
from layer_forms import Form, compiled
from names import OURS
from runner import Case, Implementation, Setup, main
from torch import Tensor, nn
from torch.nn import functional as nnf

import jagged_modules as jm

COMPILED, PADDED = f"{OURS}, compiled", "torch, padded, compiled"
TABLE, FEATURES = "layers of histories and features", 16
FULL, CPU, TINY = (1024, 150, 500), (32, 45, 180), (3, 5, 16)  # users, mean and longest history


# -- plain torch, x [B, N, E] with `seen` [B, N] ---------------------------------------------------


def heads(layer: nn.Module, x: Tensor) -> Tensor:
    return x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)


def attend(layer: nn.Module, x: Tensor | None, rows: Tensor, seen: Tensor | None) -> Tensor:
    """x or the layer's seeds attend to the rows that are seen, [B, N] or [B, M, N]."""
    k, v = (heads(layer, part) for part in layer.kv_proj(rows).chunk(2, -1))
    seeds = layer.seeds.transpose(0, 1).expand(len(rows), -1, -1, -1) if x is None else None
    q = heads(layer, layer.q_proj(x)) if seeds is None else seeds
    q, k = layer.q_norm(q).to(v.dtype), layer.k_norm(k).to(v.dtype)
    if layer.activation == "softmax":
        mask = None if seen is None else seen.view(len(rows), 1, -1, rows.shape[1])
        out = nnf.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    else:
        out = nnf.gelu(q @ k.mT * q.shape[-1] ** -0.5, approximate="tanh") @ v
    return layer.out_proj(out.transpose(1, 2).flatten(2))


def block(layer, x: Tensor, seen: Tensor | None, context: Tensor | None = None) -> Tensor:
    normed = layer.norm(x)
    return x + attend(layer.attention, normed, normed if context is None else context, seen)


def compress(layer: nn.Module, x: Tensor) -> Tensor:
    return layer.weights[0] @ x


def pffn(layer: nn.Module, x: Tensor, seen: Tensor, features: Tensor) -> tuple[Tensor]:
    return (block(layer.block, x, None, compress(layer.compress, layer.norm(features))),)


def pooling(layer: nn.Module, x: Tensor, seen: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    pooled = compress(layer.compress, attend(layer.attention, None, x, seen))
    return x, layer.mix(pooled.unflatten(1, (-1, layer.rank)).flatten(2))


def interact(layer: nn.Module, *vectors: Tensor) -> Tensor:
    x = torch.cat(vectors, 1)
    columns, shortcut = compress(layer.compress, x).split(layer.sizes, 1)
    hidden = nnf.silu(layer.linear1(layer.products_norm((x @ columns.mT).flatten(1))))
    return layer.norm(layer.linear2(hidden).unflatten(1, (layer.sizes[1], -1)) + shortcut)


def near(x: Tensor, seen: Tensor, window: int | None, tokens: int = 0) -> Tensor:
    """Which rows see which, [B, N, N]: those of a window, and tokens at the start. Each row sees
    the first one, so that those of the padding see any."""
    place = torch.arange(x.shape[1], device=x.device)
    if window is None:
        return (seen | (place == 0))[:, None]
    sees = (place[:, None] - place).abs() <= window
    sees = sees | (place < tokens) | (place < tokens)[:, None]
    return (seen[:, None] & sees) | (place == place[:, None])


def interformer(layer, x: Tensor, seen: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    config, cls = layer.config, layer.config.num_cls
    ends = seen.sum(1)[:, None] + cls
    for i, own in enumerate(layer.layers):
        summary = own.features_gate(compress(own.compress, features))
        if i == 0:
            x, seen = torch.cat([summary.to(x.dtype), x], 1), nnf.pad(seen, (cls, 0), value=True)
        last = ends + torch.arange(-config.num_recent, 0, device=x.device)
        index = last.clamp(min=0)[..., None].expand(-1, -1, x.shape[2])
        recent = x.gather(1, index) * (last >= cls)[..., None]
        vectors = torch.cat([x[:, :cls], attend(own.pool, None, x, seen), recent], 1)
        vectors = features, own.history_gate(vectors)
        (x,) = pffn(own.pffn, x, seen, summary)
        x = block(own.attention, x, near(x, seen, config.window, cls))
        features = interact(own.interaction, *vectors)
    return x[:, cls:], features


def kunlun(layer, x: Tensor, seen: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    for own in layer.layers:
        of_features = own.linear2(nnf.silu(own.linear1(compress(own.compress, features))))
        if own.pool is not None:
            _, summary = pooling(own.pool, x, seen)
        features = interact(own.interaction, of_features, summary)
        if own.pffn is not None:
            (x,) = pffn(own.pffn, x, seen, of_features)
        if own.attention is not None:
            x = block(own.attention, x, near(x, seen, layer.config.window))
    return x, features


# -- cases -----------------------------------------------------------------------------------------


def mean_vector(x: Tensor) -> Tensor:
    """Of each user, in fp32 at least: its gradient is a sum over the user's rows."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).mean(1)


class Both(nn.Module):
    """The layer's rows, with the mean of its users' vectors added to each: one result."""

    def __init__(self, layer: nn.Module, features: Tensor, plain: Callable | None = None) -> None:
        super().__init__()
        self.layer, self.plain = layer, plain
        pools = isinstance(layer, jm.JaggedSeedPooling)
        self.features = None if pools else nn.Parameter(features)

    def forward(self, x: Tensor, segments: jm.Jagged, users: Tensor, seen: Tensor) -> Tensor:
        if self.plain is not None:
            x, *vectors = self.plain(self.layer, x, seen, self.features)
            return x + sum(mean_vector(y)[:, None] for y in vectors)
        rows, features = segments.with_values(x), self.features
        if isinstance(self.layer, jm.JaggedSeedPooling):
            return x + mean_vector(self.layer(rows)).index_select(0, users)
        if isinstance(self.layer, jm.JaggedPFFN):
            return self.layer(rows, features).values
        rows, vectors = self.layer(rows, features)
        return rows.values + mean_vector(vectors).index_select(0, users)


def of_layer(device: str, make: Callable, plain: Callable, lengths: Tensor, width: int) -> Setup:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    (features,) = random_tensors(device, torch.float32, (len(lengths), FEATURES, width))
    own = Both(make().to(device), features)
    by_hand = Both(own.layer, features, plain)
    by_hand.features = own.features
    rows, longest = int(lengths.sum()), int(lengths.max())
    x, grad = random_tensors(device, torch.float32, (rows, width), (rows, width))
    empty = torch.empty(rows, 0, device=device)
    offsets = offsets_of(lengths).to(device)
    segments = jm.Jagged(empty, offsets, longest, host_lengths=lengths)
    users = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
    seen = (torch.arange(longest) < lengths[:, None]).to(device)
    given = segments, users, seen

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x, *given)

    def of(form: Form) -> Implementation:
        autocasts = device == "cuda" and form.autocast
        around = partial(torch.autocast, "cuda", dtype) if autocasts else contextlib.nullcontext
        return form.implementation(leaves(x=x), grad, around)

    def reference(exact: torch.dtype) -> dict[str, Tensor]:
        layer = Both(make().to(device), features, plain).to(exact)
        layer.load_state_dict({name: y.to(exact) for name, y in own.state_dict().items()})
        for module in layer.modules():
            if isinstance(module, nn.RMSNorm):
                module.eps = torch.finfo(torch.float32).eps  # torch's default in fp32
        options = dict(dtype=exact, autocast=False, valid=seen)
        form = of(Form(partial(call, layer), dict(layer.named_parameters()), **options))
        results = form.run(backward=True).items()
        return {f"{name}/all": y[seen] if name in ("out", "dx") else y for name, y in results}

    implementations = {
        OURS: lambda: of(Form(partial(call, own), dict(own.named_parameters()))),
        COMPILED: lambda: of(compiled(own, call)),
        PADDED: lambda: of(compiled(by_hand, call, valid=seen)),
    }
    return Setup(implementations, reference, dtype, baseline=PADDED)


def make_cases(device: str, tiny: bool) -> list[Case]:
    users, mean, longest = TINY if tiny else FULL if device == "cuda" else CPU
    width, count = (16, 2) if tiny else (256, 4) if device == "cuda" else (64, 2)
    lengths = lognormal_lengths(users, mean, longest, 1.1)
    window, sizes = (4 if tiny else 64), (width, count)
    of_interformer = jm.InterFormerConfig(window=window)
    of_kunlun = jm.KunlunConfig(window=window)
    layers = [
        (pffn, partial(jm.JaggedPFFN, *sizes, FEATURES, width)),
        (pooling, partial(jm.JaggedSeedPooling, *sizes, 32, 8)),
        (interformer, partial(jm.JaggedInterFormer, *sizes, FEATURES, 2, of_interformer)),
        (kunlun, partial(jm.JaggedKunlun, *sizes, FEATURES, 2, of_kunlun)),
    ]
    return [
        Case(
            TABLE,
            f"{make.func.__name__}({width}, {count}), {int(lengths.sum())} rows, {users} users",
            partial(of_layer, device, make, plain, lengths, width),
            picture="ms",
        )
        for plain, make in layers
    ]


if __name__ == "__main__":
    sys.exit(main("user_blocks", make_cases))
