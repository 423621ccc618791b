"""Layers as one autograd node, against the chain of their modules, compiled, and their floor.

    # on a CUDA device: bf16 autocast, fp32 rows and parameters
    python kernels/benchmarks/bench_layers.py
    python kernels/benchmarks/bench_layers.py --only HSTU
    python kernels/benchmarks/bench_layers.py --widths --impl "jagged|Meta"
    # the CPU path: fp32, smaller shapes
    python kernels/benchmarks/bench_layers.py --device cpu
    python kernels/benchmarks/bench_layers.py --tiny --device cpu

The floor is the layer's GEMMs by torch and its attention by this project's kernels, forward and
backward, on tensors of their own: what no layer around these kernels can take less than. Layers
have no dropout, so that results can be compared: with those of the modules in fp32 (on the CPU in
fp64).
"""

import argparse
import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import stu
import torch
from inputs import leaves, lognormal_lengths, offsets_of, random_tensors, uniform_lengths
from layer_forms import Form, compiled
from names import OURS
from runner import Case, Implementation, Setup, main
from torch import Tensor, nn
from user_layers import (
    NestedEncoder,
    TorchEncoder,
    UserBlockAttention,
    UserEncoder,
    UserGDPABlock,
    UserHSTU,
    UserLayer,
    UserTargetAttention,
)

import jagged_modules as jm
from jagged_modules import functional as F

MODULES, COMPILED, FLOOR = "a chain of modules", f"{OURS}, compiled", "floor"
NESTED, PADDED = "nested tensors, compiled", "nn.TransformerEncoderLayer, padded, compiled"
BF16_ROWS, USER = f"{OURS}, bf16 rows", "a user's layer, compiled"
SELF, TARGET = "layers of one container", "target attention layer"
WIDTHS = "HSTULayer by width and heads"
COMPRESS = "linear compression layer"


# -- the floor -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Floor:
    """linears: (rows, in features, out features). attention: of q, k and v, `[rows, H, D]` of these
    rows."""

    linears: list[tuple[int, int, int]]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    rows: tuple[int, int]
    num_heads: int
    head_dim: int

    def implementation(self, device: str, dtype: torch.dtype) -> Implementation:
        sizes = [(rows, k) for rows, k, _ in self.linears]
        weights = [(n, k) for _, k, n in self.linears]
        grads = [(rows, n) for rows, _, n in self.linears]
        heads = self.num_heads, self.head_dim
        operands = [(rows, *heads) for rows in (self.rows[0], *self.rows[1:] * 2, self.rows[0])]
        xs, ws, dys, (q, k, v, do) = (
            random_tensors(device, dtype, *shapes) for shapes in (sizes, weights, grads, operands)
        )
        given = leaves(q=q, k=k, v=v)
        done: dict[str, Tensor] = {}

        def forward() -> None:
            for x, w in zip(xs, ws):
                x @ w.t()
            with torch.enable_grad():
                done["out"] = self.attention(*given.values())

        def backward() -> None:
            for x, w, dy in zip(xs, ws, dys):
                dy @ w
                dy.t() @ x
            torch.autograd.grad(done["out"], tuple(given.values()), do)

        number = leaves(number=torch.ones(1, device=device))
        return Implementation(
            lambda: _Calls.apply(*number.values(), forward, backward),
            number,
            lambda name, x: {FLOOR: x},
            torch.ones(1, device=device),
            whole=False,
        )


class _Calls(torch.autograd.Function):
    """x, after a call; its gradient after another."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.call = backward
        forward()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad.clone(), None, None


# -- layers ----------------------------------------------------------------------------------------


Forms = Mapping[str, Callable[[], Form]]


def in_modules(layer: nn.Module) -> nn.Module:
    """A copy that calls its modules, because they have hooks."""
    layer = copy.deepcopy(layer)
    if isinstance(layer, jm.LinearCompressEmbedding):
        layer.__class__ = CastFirst
    for module in layer.modules():
        module.register_forward_hook(lambda *_: None)
    return layer


class CastFirst(jm.LinearCompressEmbedding):
    """Casts its operands as autocast casts those of torch's operators."""

    def forward(self, candidates: Tensor, users: Tensor, index: jm.CandidateIndex) -> Tensor:
        autocasts = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocasts else users.dtype
        weights, embeddings = (
            [x.to(dtype) for x in operands] for operands in (self.weights, (users, candidates))
        )
        return F.linear_compress(weights, embeddings, index)


def layers(
    device: str,
    layer: nn.Module,
    call: Callable[..., Tensor],
    shapes: dict[str, tuple[int, ...]],
    floor: Callable[[], Floor],
    others: Forms,
) -> Setup:
    """call: of the layer and the inputs of these shapes. others: ways to compute the layer besides
    this project's."""
    on_gpu = device == "cuda"
    inputs = leaves(**dict(zip(shapes, random_tensors(device, torch.float32, *shapes.values()))))
    autocast = partial(torch.autocast, "cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext
    with torch.no_grad(), autocast():
        (grad,) = random_tensors(device, torch.float32, call(layer, *inputs.values()).shape)

    def of(form: Form) -> Implementation:
        return form.implementation(inputs, grad, autocast)

    def own(layer: nn.Module, **options) -> Implementation:
        return of(Form(partial(call, layer), dict(layer.named_parameters()), **options))

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        modules = in_modules(layer)
        if dtype != torch.float64:
            exact = own(modules)
        elif on_gpu:  # no kernel takes fp64
            exact = own(modules, autocast=False)
        else:
            exact = own(modules.double(), dtype=dtype)
        results = {f"{name}/all": x for name, x in exact.run(backward=True).items()}
        ones = torch.ones(1, device=device)
        return results | {f"out/{FLOOR}": ones, f"dnumber/{FLOOR}": ones}

    dtype = torch.bfloat16 if on_gpu else torch.float32
    implementations = {
        MODULES: lambda: own(in_modules(layer)),
        OURS: lambda: own(layer),
        COMPILED: lambda: of(compiled(layer, call)),
        **{name: lambda make=make: of(make()) for name, make in others.items()},
        FLOOR: lambda: floor().implementation(device, dtype),
    }
    return Setup(implementations, reference, dtype, baseline=MODULES)


def linears_of(layer: nn.Module, rows: int) -> list[tuple[int, int, int]]:
    return [
        (rows, module.in_features, module.out_features)
        for module in layer.modules()
        if isinstance(module, nn.Linear)
    ]


def of_one_container(
    device: str,
    make: Callable[[], nn.Module],
    user: type[UserLayer],
    attention: Callable[..., Tensor],
    lengths: Tensor,
    options: dict,
) -> Setup:
    """user: the layer as a user would write it. attention: of q, k, v and offsets, with these
    options. All lengths are known on the host."""
    torch.manual_seed(0)
    layer, offsets = make().to(device), offsets_of(lengths).to(device)
    rows, width = int(lengths.sum()), layer.embedding_dim
    shared = jm.Jagged(
        torch.empty(rows, 0, device=device), offsets, int(lengths.max()), host_lengths=lengths
    )

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(shared.with_values(x)).values

    def by_user() -> Form:
        own = user(layer).to(device)
        segments: Any = offsets
        if isinstance(own, UserBlockAttention):
            segments = own.blocks(lengths).to(device)
        elif isinstance(own, UserEncoder):
            segments = offsets, int(lengths.max())
        return compiled(own, lambda layer, x: layer(x, segments))

    def floor() -> Floor:
        heads, dim = layer.num_heads, width // layer.num_heads
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        given = dict(options)
        if attention is F.jagged_attention:
            mask = options.get("mask")
            given["schedule"] = shared.schedule(
                num_heads=heads, head_dim=dim, dtype=dtype, mask=mask
            )
        parts = linears_of(layer, rows)
        return Floor(parts, lambda *x: attention(*x, offsets, **given), (rows, rows), heads, dim)

    others: dict[str, Callable[[], Form]] = {USER: by_user}
    if isinstance(layer, jm.HSTULayer):
        others |= hstu_forms(layer, lengths, call)
    if isinstance(layer, jm.JaggedEncoderLayer):
        others |= encoder_forms(layer, offsets, lengths)
    return layers(device, layer, call, {"x": (rows, width)}, floor, others)


def hstu_forms(layer: jm.HSTULayer, lengths: Tensor, call: Callable[..., Tensor]) -> Forms:
    """Meta's layer, which keeps its rows in bf16, and ours with such rows."""
    options = dict(dtype=torch.bfloat16, bound=stu.BOUND)

    def by_meta(recompute: bool) -> Form:
        form = stu.stu(layer, lengths, recompute)
        return Form(*form, autocast=False, layout=stu.transposed, **options)

    def own() -> Form:
        return Form(partial(call, layer), dict(layer.named_parameters()), **options)

    peers = {name: partial(by_meta, recompute) for name, recompute in stu.RECOMPUTES.items()}
    on_gpu = layer.out_proj.weight.is_cuda  # without autocast, rows have the parameters' dtype
    return ({BF16_ROWS: own} if on_gpu else {}) | peers


def encoder_forms(layer: jm.JaggedEncoderLayer, offsets: Tensor, lengths: Tensor) -> Forms:
    """torch's layer on padded rows, and one on nested tensors, which torch's does not train on."""
    device, longest = offsets.device, int(lengths.max())
    valid = (torch.arange(longest) < lengths[:, None]).to(device)

    def padded() -> Form:
        return compiled(TorchEncoder(layer).to(device), lambda own, x: own(x, ~valid), valid=valid)

    def nested() -> Form:
        own = NestedEncoder(layer).to(device)
        return compiled(own, lambda own, x: own(x, (offsets.long(), longest)))

    return {PADDED: padded, NESTED: nested}


def of_targets(
    device: str, kind: type[nn.Module], width: int, heads: int, lengths: Tensor, candidates: Tensor
) -> Setup:
    """Candidates in any order. Where the history has results too, all are concatenated."""
    torch.manual_seed(0)
    layer, offsets = kind(width, heads).to(device), offsets_of(lengths).to(device)
    has_own = kind is jm.JaggedSelfTargetAttention
    users = torch.arange(len(lengths)).repeat_interleave(candidates)
    users = users[torch.randperm(len(users), generator=torch.Generator().manual_seed(0))]
    index = jm.CandidateIndex.from_map(users.to(device), len(lengths))
    rows = int(lengths.sum())
    shared = jm.Jagged(torch.empty(rows, 0, device=device), offsets, host_lengths=lengths)

    def call(layer: nn.Module, targets: Tensor, history: Tensor) -> Tensor:
        if has_own:
            values, out = layer(shared.with_values(history), targets, index)
            return torch.cat([values.values, out.squeeze(1)])
        return layer(targets, shared.with_values(history), index).squeeze(1)

    def by_user() -> Form:
        order = users.argsort(stable=True).to(device)
        segments = offsets_of(candidates).to(device), offsets
        longest = int(candidates.max()), int(lengths.max())
        own = UserTargetAttention(layer).to(device)
        return compiled(own, lambda layer, *x: layer(*x, order, segments, longest))

    def floor() -> Floor:
        count, q_offsets = len(users), index.offsets
        linears = [(count, width, width), (rows, width, 2 * width), (count, width, width)]
        if has_own:
            linears[1] = rows, width, 3 * width
            linears.append((rows, width, width))
            count, q_offsets = count + rows, torch.cat([offsets, q_offsets[1:] + rows])
        return Floor(
            linears,
            lambda *x: F.jagged_attention(*x, q_offsets, offsets),
            (count, rows),
            heads,
            width // heads,
        )

    shapes = {"targets": (len(users), 1, width), "history": (rows, width)}
    return layers(device, layer, call, shapes, floor, {} if has_own else {USER: by_user})


def of_embeddings(device: str, sizes: tuple[int, int, int, int, int, int]) -> Setup:
    """sizes: users, candidates of each, their embeddings K_user and K, compressed ones, width."""
    torch.manual_seed(0)
    users, ratio, k_user, k, compressed, width = sizes
    layer, count = jm.LinearCompressEmbedding(k, compressed, k_user, device), users * ratio
    index = jm.CandidateIndex.from_counts(torch.full((users,), ratio, device=device))

    def floor() -> Floor:
        linears = [(users * width, k_user, compressed), (count * width, k, compressed)]
        return Floor(linears, lambda q, k, v: q + k + v, (1, 1), 1, 8)

    return layers(
        device,
        layer,
        lambda layer, candidates, users: layer(candidates, users, index),
        {"candidates": (count, k, width), "users": (users, k_user, width)},
        floor,
        {},
    )


# -- cases -----------------------------------------------------------------------------------------

# segments, mean and maximum length of each layer's cases; "full": all segments have the maximum;
# "compress": see of_embeddings
FULL = dict(
    hstu=[(256, 474, 1024), (512, 190, 2280)],
    full=(128, 1024),
    gdpa=(512, 278, 3336),
    block=(1024, 282, 3384),
    encoder=(1024, 107, 512),
    target=(512, 377, 4524),
    compress=(32, 32, 1178, 866, 433, 256),
)
CPU = dict(
    hstu=[(16, 60, 128), (32, 30, 360)],
    full=(8, 128),
    gdpa=(32, 45, 540),
    block=(32, 40, 480),
    encoder=(32, 30, 150),
    target=(64, 50, 600),
    compress=(4, 8, 118, 87, 43, 32),
)
TINY = dict(
    hstu=[(3, 5, 16), (3, 4, 48)],
    full=(2, 8),
    gdpa=(3, 5, 60),
    block=(3, 20, 240),
    encoder=(3, 5, 60),
    target=(3, 5, 60),
    compress=(2, 3, 5, 4, 3, 8),
)
WIDTHS_AND_HEADS = (64, 128, 256, 512, 1024), (1, 4, 8)
MAX_HEAD_DIM = 256


def lengths_of(count: int, mean: float, longest: int) -> Tensor:
    return lognormal_lengths(count, mean, longest, 1.1)


def self_case(
    device: str,
    table: str,
    layers: tuple[Callable[[], nn.Module], type[UserLayer]],
    name: str,
    lengths: Tensor,
    **options,
) -> Case:
    """layers: this project's and a user's. options: of the attention."""
    is_in_blocks = layers[1] is UserBlockAttention
    attention = F.block_diagonal_attention if is_in_blocks else F.jagged_attention
    setup = partial(of_one_container, device, *layers, attention, lengths, options)
    return Case(table, f"{name}, {int(lengths.sum())} rows", setup, picture="ms")


def hstu_case(device: str, table: str, width: int, heads: int, lengths: Tensor) -> Case:
    """Weights are divided by the maximum length, as in Meta's layer."""
    longest = int(lengths.max())
    config = jm.HSTUConfig(scaling_seqlen=longest)
    hstu = dict(activation="silu", output_scale=1 / longest, mask=config.mask())
    both = partial(jm.HSTULayer, width, heads, config), UserHSTU
    each = ", all segments full" if len(lengths.unique()) == 1 else ""
    return self_case(device, table, both, f"HSTULayer({width}, {heads}){each}", lengths, **hstu)


def make_cases(device: str, tiny: bool, widths: bool = False) -> list[Case]:
    """CUDA: bf16 autocast. CPU: fp32 and smaller shapes. ``tiny``: everything, small. ``widths``:
    HSTULayer by width and heads instead of all layers."""
    sizes = TINY if tiny else FULL if device == "cuda" else CPU
    if widths:
        return width_cases(device, tiny, lengths_of(*sizes["hstu"][0]))
    (width, narrow), heads = ((16, 8), 2) if tiny else ((512, 256), 4)
    cases = [
        hstu_case(device, SELF, width, heads, lengths)
        for width, lengths in [
            (width, lengths_of(*sizes["hstu"][0])),
            (narrow, lengths_of(*sizes["hstu"][1])),
            (width, torch.full(sizes["full"][:1], sizes["full"][1])),
        ]
    ]
    block_size = 16 if tiny else 64
    gdpa = partial(GDPABlock, width, heads), UserGDPABlock
    block = (
        partial(jm.BlockDiagonalSelfAttention, width, heads, block_size, None),
        UserBlockAttention,
    )
    options = dict(norm_first=True, activation="gelu")
    encoder = partial(jm.JaggedEncoderLayer, width, 2 * heads, 4 * width, **options), UserEncoder
    for both, size, options in [
        (gdpa, sizes["gdpa"], dict(activation="gelu")),
        (block, sizes["block"], dict(block_size=block_size)),
        (encoder, sizes["encoder"], {}),
    ]:
        name = f"{both[0].func.__name__}({width}, {both[0].args[1]})"
        cases.append(self_case(device, SELF, both, name, lengths_of(*size), **options))
    lengths = lengths_of(*sizes["target"])
    candidates = uniform_lengths(len(lengths), 1, 5 if tiny else 99)
    for kind in (jm.JaggedTargetAttention, jm.JaggedSelfTargetAttention):
        setup = partial(of_targets, device, kind, narrow, heads, lengths, candidates)
        name = f"{kind.__name__}({narrow}, {heads}), {int(lengths.sum())} rows"
        name = f"{name}, {int(candidates.sum())} candidates"
        cases.append(Case(TARGET, name, setup, picture="ms"))
    users, ratio, k_user, k, compressed, width = of_users = sizes["compress"]
    name = f"LinearCompressEmbedding({k}, {compressed}, {k_user}), width {width}, {users} users"
    setup = partial(of_embeddings, device, of_users)
    cases.append(Case(COMPRESS, f"{name}, {users * ratio} candidates", setup, picture="ms"))
    return cases


def width_cases(device: str, tiny: bool, lengths: Tensor) -> list[Case]:
    widths, heads = ((16, 32), (1, 2)) if tiny else WIDTHS_AND_HEADS
    return [
        hstu_case(device, WIDTHS, width, count, lengths)
        for width in widths
        for count in heads
        if width // count <= MAX_HEAD_DIM
    ]


class GDPABlock(jm.GDPABlock):
    """With GELU, and its sizes."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, "gelu")
        self.embedding_dim, self.num_heads = width, heads


def summary(rows: list[dict]) -> list[str]:
    """The share of the floor in the time of each layer."""
    key, lines = "forward_backward_ms", []
    floors = {row["case"]: row for row in rows if row["implementation"] == FLOOR and key in row}
    for row in rows:
        if row["implementation"] != FLOOR and row["case"] in floors and key in row:
            share = floors[row["case"]][key] / row[key]
            lines.append(f"{row['case']}, {row['implementation']}: floor / time = {share:.2f}")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--widths", action="store_true", help=f"measures {WIDTHS} instead")
    own, _ = parser.parse_known_args()
    cases = partial(make_cases, widths=own.widths)
    sys.exit(main("layers", cases, summary=summary, own_options=[parser]))
