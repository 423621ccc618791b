"""Layers as one autograd node, against the chain of their modules, compiled, and their floor.

    # on a CUDA device: bf16 autocast, fp32 rows and parameters
    python kernels/benchmarks/bench_layers.py
    python kernels/benchmarks/bench_layers.py --only HSTU
    # the CPU path: fp32, smaller shapes
    python kernels/benchmarks/bench_layers.py --device cpu
    python kernels/benchmarks/bench_layers.py --tiny --device cpu

The floor is the layer's GEMMs by torch and its attention by this project's kernels, forward and
backward, on tensors of their own: what no layer around these kernels can take less than. Layers
have no dropout, so that results can be compared: with those of the modules in fp32 (on the CPU in
fp64).
"""

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable
from functools import partial

import torch
from inputs import leaves, lognormal_lengths, offsets_of, random_tensors, uniform_lengths
from names import OURS
from runner import Case, Implementation, Setup, main
from torch import Tensor, nn

import jagged_modules as jm
from jagged_modules import functional as F

MODULES, COMPILED, FLOOR = "a chain of modules", f"{OURS}, compiled", "floor"
SELF, TARGET = "layers of one container", "target attention layer"
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
) -> Setup:
    """call: of the layer and the inputs of these shapes."""
    on_gpu = device == "cuda"
    layer = layer.to(device)
    inputs = leaves(**dict(zip(shapes, random_tensors(device, torch.float32, *shapes.values()))))
    autocast = partial(torch.autocast, "cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext
    with torch.no_grad(), autocast():
        (grad,) = random_tensors(device, torch.float32, call(layer, *inputs.values()).shape)

    def of(layer: nn.Module, around=autocast, dtype: torch.dtype = torch.float32) -> Implementation:
        x = leaves(**{name: tensor.to(dtype) for name, tensor in inputs.items()})

        def forward() -> Tensor:
            with around():
                return call(layer, *x.values()).to(dtype)

        named = getattr(layer, "_orig_mod", layer).named_parameters()  # of what is compiled
        parameters = {name.replace(".", "_"): parameter for name, parameter in named}
        return Implementation(
            forward, x | parameters, lambda name, result: {"all": result}, grad.to(dtype)
        )

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        modules = in_modules(layer)
        if dtype != torch.float64:
            exact = of(modules)
        elif on_gpu:  # no kernel takes fp64
            exact = of(modules, contextlib.nullcontext)
        else:
            exact = of(modules.double(), contextlib.nullcontext, dtype)
        results = {f"{name}/all": x for name, x in exact.run(backward=True).items()}
        ones = torch.ones(1, device=device)
        return results | {f"out/{FLOOR}": ones, f"dnumber/{FLOOR}": ones}

    dtype = torch.bfloat16 if on_gpu else torch.float32
    implementations = {
        MODULES: lambda: of(in_modules(layer)),
        OURS: lambda: of(layer),
        COMPILED: lambda: of(torch.compile(layer, dynamic=True)),
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
    attention: Callable[..., Tensor],
    lengths: Tensor,
    options: dict,
) -> Setup:
    """attention: of q, k, v and offsets, with these options. All lengths are known on the host."""
    torch.manual_seed(0)
    layer, offsets = make(), offsets_of(lengths).to(device)
    rows, width = int(lengths.sum()), layer.embedding_dim
    shared = jm.Jagged(
        torch.empty(rows, 0, device=device), offsets, int(lengths.max()), host_lengths=lengths
    )

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(shared.with_values(x)).values

    def floor() -> Floor:
        heads, dim = layer.num_heads, layer.head_dim
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        given = dict(options)
        if attention is F.jagged_attention:
            mask = options.get("mask")
            given["schedule"] = shared.schedule(
                num_heads=heads, head_dim=dim, dtype=dtype, mask=mask
            )
        parts = linears_of(layer, rows)
        return Floor(parts, lambda *x: attention(*x, offsets, **given), (rows, rows), heads, dim)

    return layers(device, layer, call, {"x": (rows, width)}, floor)


def of_targets(
    device: str, kind: type[nn.Module], width: int, heads: int, lengths: Tensor, candidates: Tensor
) -> Setup:
    """Candidates in any order. Where the history has results too, all are concatenated."""
    torch.manual_seed(0)
    layer, offsets = kind(width, heads), offsets_of(lengths).to(device)
    has_own = kind is jm.JaggedSelfTargetAttention
    users = torch.arange(len(lengths)).repeat_interleave(candidates)
    users = users[torch.randperm(len(users), generator=torch.Generator().manual_seed(0))]
    index = jm.CandidateIndex.from_map(users.to(device), len(lengths))
    rows = int(lengths.sum())
    shared = jm.Jagged(torch.empty(rows, 0, device=device), offsets, host_lengths=lengths)

    def call(layer: nn.Module, targets: Tensor, history: Tensor) -> Tensor:
        if has_own:
            values, out = layer(shared.with_values(history), targets, index)
            return torch.cat([values.values, out[:, 0]])
        return layer(targets, shared.with_values(history), index)[:, 0]

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
    return layers(device, layer, call, shapes, floor)


def of_embeddings(device: str, sizes: tuple[int, int, int, int, int, int]) -> Setup:
    """sizes: users, candidates of each, their embeddings K_user and K, compressed ones, width."""
    torch.manual_seed(0)
    users, ratio, k_user, k, compressed, width = sizes
    layer, count = jm.LinearCompressEmbedding(k, compressed, k_user), users * ratio
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
    )


# -- cases -----------------------------------------------------------------------------------------

# segments and mean lengths of each layer's two cases; the widths belong to them
FULL = dict(hstu=[(256, 375), (512, 190)], gdpa=(512, 278), block=(1024, 282), target=(512, 377))
FULL["compress"] = 32, 32, 1178, 866, 433, 256  # see of_embeddings
CPU = dict(hstu=[(16, 60), (32, 30)], gdpa=(32, 45), block=(32, 40), target=(64, 50))
CPU["compress"] = 4, 8, 118, 87, 43, 32
TINY = dict(hstu=[(3, 5), (3, 4)], gdpa=(3, 5), block=(3, 20), target=(3, 5))
TINY["compress"] = 2, 3, 5, 4, 3, 8


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: bf16 autocast. CPU: fp32 and smaller shapes. ``tiny``: everything, small."""
    sizes = TINY if tiny else FULL if device == "cuda" else CPU
    widths = (16, 8) if tiny else (512, 256)
    heads, cases = (2 if tiny else 4), []

    def lengths_of(segments: int, mean: int) -> Tensor:
        return lognormal_lengths(segments, mean, 12 * mean, 1.1)

    def add(name: str, make, attention, size: tuple[int, int], **options) -> None:
        lengths = lengths_of(*size)
        setup = partial(of_one_container, device, make, attention, lengths, options)
        cases.append(Case(SELF, f"{name}, {int(lengths.sum())} rows", setup, picture="ms"))

    for width, size in zip(widths, sizes["hstu"]):
        config = jm.HSTUConfig(scaling_seqlen=1000)
        hstu = dict(activation="silu", output_scale=1e-3, mask=config.mask())
        make = partial(jm.HSTULayer, width, heads, config)
        add(f"HSTULayer({width}, {heads})", make, F.jagged_attention, size, **hstu)
    width = widths[0]
    make = partial(GDPABlock, width, heads)
    gelu = dict(activation="gelu")
    add(f"GDPABlock({width}, {heads})", make, F.jagged_attention, sizes["gdpa"], **gelu)
    make = partial(jm.BlockDiagonalSelfAttention, width, heads, 16 if tiny else 64, None)
    blocks, size = F.block_diagonal_attention, dict(block_size=16 if tiny else 64)
    name = f"BlockDiagonalSelfAttention({width}, {heads})"
    add(name, make, blocks, sizes["block"], **size)
    width, lengths = widths[1], lengths_of(*sizes["target"])
    candidates = uniform_lengths(len(lengths), 1, 5 if tiny else 99)
    for kind in (jm.JaggedTargetAttention, jm.JaggedSelfTargetAttention):
        setup = partial(of_targets, device, kind, width, heads, lengths, candidates)
        name = f"{kind.__name__}({width}, {heads}), {int(lengths.sum())} rows"
        name = f"{name}, {int(candidates.sum())} candidates"
        cases.append(Case(TARGET, name, setup, picture="ms"))
    users, ratio, k_user, k, compressed, width = of_users = sizes["compress"]
    name = f"LinearCompressEmbedding({k}, {compressed}, {k_user}), width {width}, {users} users"
    setup = partial(of_embeddings, device, of_users)
    cases.append(Case(COMPRESS, f"{name}, {users * ratio} candidates", setup, picture="ms"))
    return cases


class GDPABlock(jm.GDPABlock):
    """With GELU, and the sizes of its attention."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, "gelu")
        self.embedding_dim, self.num_heads = width, heads
        self.head_dim = self.attention.head_dim


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
    sys.exit(main("layers", make_cases, summary=summary))
