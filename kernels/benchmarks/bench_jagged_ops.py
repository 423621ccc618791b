"""GEMMs and softmaxes within jagged segments, against torch on padded tensors.

    # on a CUDA device, fp32 with tf32 GEMMs
    python kernels/benchmarks/bench_jagged_ops.py
    python kernels/benchmarks/bench_jagged_ops.py --only "operators"    # one of the tables
    # the CPU path, smaller shapes
    python kernels/benchmarks/bench_jagged_ops.py --device cpu
    python kernels/benchmarks/bench_jagged_ops.py --tiny --device cpu

GB count every input and the output once; in the backward the inputs, the output's gradient and
theirs. TFLOP/s count the GEMMs of real rows, twice that backward. The floor is the longer of the
times of both on an H200. Speed-ups are over "torch, padded".
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod

import peers
import torch
from inputs import leaves, offsets_of, random_tensors, sample_segments, uniform_lengths
from names import OURS, PADDED
from runner import Case, Implementation, Setup, device_name, main
from torch import Tensor, bmm

from jagged_modules import functional as F

CONVERTED = "torch, padded with conversions"
# bytes/s of large copies, FLOP/s of dense tf32 GEMMs
ATTAINABLE = {"NVIDIA H200": (4.24e12, 350e12)}
PRECISION = (
    'fp32; on CUDA GEMMs use tf32 (torch.set_float32_matmul_precision("high")), also those that'
    " give the bound."
)


# -- operators -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator on jagged and on padded tensors.

    Dimensions are letters: L rows of all segments, B segments, P scores of all segments (N_b² each,
    in one flat buffer), widths D, T, H. In padded tensors, L is ``[B, N]`` and P is ``[B, N, N]``.

    Args:
        ours: ``ours(*inputs, plan)`` for operators with scores, else ``ours(*inputs, offsets,
            max_seqlen=...)``.
        padded: ``padded(hidden, *inputs)``, where ``hidden`` ``[B, N]`` is True in the padding.
        inputs: dimensions of the inputs by name.
        out: dimensions of the output.
        gemm: dimensions of the GEMM, whose product is the number of multiplications; empty for a
            softmax.
    """

    ours: Callable[..., Tensor]
    padded: Callable[..., Tensor]
    inputs: dict[str, str]
    out: str
    gemm: str = ""

    @property
    def dimensions(self) -> str:
        return "".join((*self.inputs.values(), self.out))


OUTER = "jagged_jagged_bmm_jagged_out, x with"
outer, array = F.jagged_jagged_bmm_jagged_out, F.array_jagged_bmm_jagged_out
OPERATORS = {
    "jagged_dense_bmm": Operator(
        F.jagged_dense_bmm, lambda _, x, y: bmm(x, y), {"x": "LD", "y": "BDT"}, "LT", "LDT"
    ),
    "jagged_jagged_bmm": Operator(
        F.jagged_jagged_bmm, lambda _, x, y: bmm(x.mT, y), {"x": "LD", "y": "LT"}, "BDT", "LDT"
    ),
    f"{OUTER} itself": Operator(
        lambda x, plan: outer(x, x, plan), lambda _, x: bmm(x, x.mT), {"x": "LD"}, "P", "PD"
    ),
    f"{OUTER} another": Operator(
        outer, lambda _, x, y: bmm(x, y.mT), {"x": "LD", "y": "LD"}, "P", "PD"
    ),
    "array_jagged_bmm_jagged_out": Operator(
        array, lambda _, p, y: bmm(p, y), {"p": "P", "y": "LD"}, "LD", "PD"
    ),
    "jagged_softmax": Operator(
        F.jagged_softmax,
        lambda gap, x: x.masked_fill(gap[:, :, None], -inf).softmax(1),
        {"x": "LH"},
        "LH",
    ),
    "jagged2_softmax": Operator(
        F.jagged2_softmax,
        lambda gap, p: p.masked_fill(gap[:, None, :], -inf).softmax(2),
        {"p": "P"},
        "P",
    ),
}


class Conversion(torch.autograd.Function):
    """Converts between jagged and padded. torch's kernels for that have no derivatives; each is the
    other's backward."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x.contiguous())

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad.contiguous()), None, None


def mantissa_of_tf32(x: Tensor) -> Tensor:
    """x as tensor cores read it in tf32, without the lower 13 bits of fp32's mantissa. torch may
    compute small GEMMs in fp32."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


# -- one shape -------------------------------------------------------------------------------------


class Problem:
    """Inputs of an operator in one shape, implementations of it, and its definition on sampled
    segments, padded."""

    def __init__(self, device: str, lengths: Tensor, operator: str, width: int, columns: int):
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
        self.name, self.operator, self.device = operator, OPERATORS[operator], device
        self.lengths, self.longest = lengths.tolist(), int(lengths.max())
        host_offsets = offsets_of(lengths)
        plan = F.ScorePlan.from_offsets(host_offsets)
        self.offsets, self.plan = host_offsets.to(device), plan.to(device)
        self.starts = {"L": host_offsets.tolist(), "P": plan.p_offsets.tolist()}
        self.hidden = (torch.arange(self.longest) >= lengths[:, None]).to(device)
        self.sizes = {
            "L": plan.x_rows,
            "P": plan.total,
            "B": len(lengths),
            "D": width,
            "T": columns,
            "H": width,
        }
        layouts = [*self.operator.inputs.values(), self.operator.out]
        *inputs, self.grad = random_tensors(
            device, torch.float32, *(tuple(self.sizes[d] for d in layout) for layout in layouts)
        )
        self.inputs = leaves(**dict(zip(self.operator.inputs, inputs)))
        self.samples = sorted(sample_segments(lengths), key=lambda b: -self.lengths[b])

    def setup(self, with_peers: bool = True) -> Setup:
        implementations = {OURS: self.ours}
        if with_peers:
            implementations[PADDED] = self.padded
            if "P" not in self.operator.dimensions:  # torch has no conversion of scores
                implementations[CONVERTED] = self.converted
            implementations |= self.sll() if self.device == "cuda" else {}
        operands = sum(x.nbytes for x in self.inputs.values())
        out = self.grad.nbytes
        flops = self.flops()
        return Setup(
            implementations,
            self.reference,
            torch.float32,
            flops=flops,
            backward_flops=2 * flops,
            bytes=operands + out,
            backward_bytes=2 * operands + out,
            attainable=ATTAINABLE.get(device_name(self.device)),
            baseline=PADDED,
        )

    def flops(self, padded: bool = False) -> float:
        rows = len(self.lengths) * self.longest
        sizes = self.sizes | ({"L": rows, "P": rows * self.longest} if padded else {})
        return 2.0 * prod(sizes[d] for d in self.operator.gemm) * bool(self.operator.gemm)

    def pad(self, layout: str, x: Tensor, segments: Sequence[int]) -> Tensor:
        """The segments of a jagged tensor, padded with zeros."""
        if layout[0] == "B":
            return x[list(segments)]
        starts, n = self.starts[layout[0]], self.longest
        padded = x.new_zeros(len(segments), n, *(x.shape[1:] or (n,)))
        for row, b in zip(padded, segments):
            length, values = self.lengths[b], x[starts[b] : starts[b + 1]]
            if layout == "P":
                row[:length, :length] = values.view(length, length)
            else:
                row[:length] = values
        return padded

    def sampled(self, layout: str, x: Tensor) -> dict[str, Tensor]:
        """The sampled segments of a padded tensor, with zeros in the padding.

        The longest one is a part of its own: errors are relative, and a softmax over many rows has
        smaller values.
        """
        if layout[0] != "B":
            hidden = self.hidden[self.samples][:, :, None]
            x = x.masked_fill(hidden | hidden.transpose(1, 2) if layout == "P" else hidden, 0.0)
        return {"longest": x[:1], "others": x[1:]}

    def layout(self, result: str) -> str:
        return self.operator.out if result == "out" else self.operator.inputs[result[1:]]

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        layouts = self.operator.inputs
        tf32 = dtype == torch.float32 and self.device == "cuda" and self.operator.gemm

        def operand(layout, x):
            x = self.pad(layout, x.detach(), self.samples)
            return mantissa_of_tf32(x).double() if tf32 else x.to(dtype)

        inputs = [operand(layouts[name], x).requires_grad_() for name, x in self.inputs.items()]
        out = self.operator.padded(self.hidden[self.samples], *inputs)
        gradients = torch.autograd.grad(out, inputs, operand(self.operator.out, self.grad))
        results = {"out": out.detach()} | {f"d{name}": x for name, x in zip(layouts, gradients)}
        return {
            f"{name}/{part}": rows
            for name, x in results.items()
            for part, rows in self.sampled(self.layout(name), x).items()
        }

    def note(self, flops: float) -> str:
        return f"{flops / 1e6:.0f} MFLOP forward" if flops else ""

    def jagged(self, forward: Callable[..., Tensor], flops: float) -> Implementation:
        def pick(name, x):
            return self.sampled(self.layout(name), self.pad(self.layout(name), x, self.samples))

        return Implementation(
            lambda: forward(*self.inputs.values()), self.inputs, pick, self.grad, self.note(flops)
        )

    def ours(self) -> Implementation:
        operator = self.operator
        if "P" in operator.dimensions:
            return self.jagged(lambda *inputs: operator.ours(*inputs, self.plan), self.flops())
        return self.jagged(
            lambda *inputs: operator.ours(*inputs, self.offsets, max_seqlen=self.longest),
            self.flops(),
        )

    def sll(self) -> dict[str, Callable[[], Implementation]]:
        """FBGEMM's operators, forward only."""
        offsets, name = self.offsets.long(), self.name.partition(",")[0]
        inputs = tuple(x.detach() for x in self.inputs.values())
        if self.name == f"{OUTER} itself":
            inputs *= 2

        def implementation(forward: Callable[..., Tensor]) -> Implementation:
            whole = self.jagged(lambda *_: forward(*inputs), self.flops())
            return dataclasses.replace(
                whole,
                inputs=dict(enumerate(inputs)),
                note="; ".join(filter(None, ["forward only", whole.note])),
            )

        peer_operators = peers.sll_operators(
            offsets.diff(), offsets, self.plan.p_offsets.to(offsets), self.longest
        )
        return {
            peer: partial(implementation, of[name])
            for peer, of in peer_operators.items()
            if name in of
        }

    def padded(self) -> Implementation:
        """On inputs that are already padded; the output stays padded."""
        operator, segments = self.operator, range(len(self.lengths))
        inputs = leaves(
            **{
                name: self.pad(operator.inputs[name], x.detach(), segments)
                for name, x in self.inputs.items()
            }
        )
        return Implementation(
            lambda: operator.padded(self.hidden, *inputs.values()),
            inputs,
            lambda name, x: self.sampled(self.layout(name), x[self.samples]),
            self.pad(operator.out, self.grad, segments),
            note="; ".join(filter(None, ["padded inputs", self.note(self.flops(padded=True))])),
        )

    def converted(self) -> Implementation:
        operator, offsets = self.operator, self.offsets.long()

        def pad(x, fill=0.0):
            return torch.ops.aten._jagged_to_padded_dense_forward(
                x, [offsets], [self.longest], fill
            )

        def unpad(x):
            return torch.ops.aten._padded_dense_to_jagged_forward(x, [offsets], self.sizes["L"])

        def forward(*inputs):
            # makes a mask unnecessary for softmax
            to_padded = pad if operator.gemm else partial(pad, fill=-inf)
            inputs = [Conversion.apply(x, to_padded, unpad) if x.dim() == 2 else x for x in inputs]
            out = operator.padded(self.hidden, *inputs) if operator.gemm else inputs[0].softmax(1)
            return Conversion.apply(out, unpad, pad) if operator.out[0] == "L" else out

        return self.jagged(forward, self.flops(padded=True))


# -- cases -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the tables."""

    operators: list[tuple[str, int, int, int, int]]  # operator, B, maximum length, D, T
    paper: tuple[int, int, int, int]
    skewed: tuple[int, int, int]  # short segments, their maximum length, the length of the long one
    width: int  # D and T of the skewed


def table_of(
    batch: int, shorter: int, longer: int, narrow: int, wide: int, deep: int
) -> list[tuple[str, int, int, int, int]]:
    gemms = [(shorter, narrow, narrow), (longer, wide, wide)]
    shapes = [
        (name, batch, *shape)
        for name in ("jagged_dense_bmm", "jagged_jagged_bmm")
        for shape in gemms
    ]
    scores = [f"{OUTER} itself", f"{OUTER} another", "array_jagged_bmm_jagged_out"]
    shapes += [(name, batch, shorter, deep, 0) for name in scores]
    return shapes + [
        ("jagged_softmax", batch, shorter, narrow, 0),
        ("jagged2_softmax", batch, shorter, 0, 0),
    ]


FULL = Sizes(
    table_of(1024, 100, 200, narrow=64, wide=128, deep=1024),
    (1024, 200, 256, 8),
    skewed=(1000, 20, 60_000),
    width=64,
)
CPU = Sizes(
    table_of(64, 100, 200, narrow=64, wide=128, deep=256),
    (64, 200, 256, 8),
    skewed=(200, 20, 6_000),
    width=64,
)
TINY = Sizes(
    table_of(6, 10, 14, narrow=8, wide=16, deep=24), (6, 14, 24, 8), skewed=(10, 4, 60), width=8
)


def make_cases(device: str, tiny: bool) -> list[Case]:
    """fp32, on the CPU smaller shapes. ``tiny``: everything, small."""
    sizes = TINY if tiny else FULL if device == "cuda" else CPU

    def case(table: str, name: str, *problem, peers: bool = True) -> Case:
        return Case(table, name, lambda: Problem(device, *problem).setup(peers), picture="ms")

    def uniform(
        table: str, operator: str, batch: int, longest: int, width: int, columns: int
    ) -> Case:
        widths = zip("DTH", (width, columns, width))
        widths = [
            f"{letter}{size}" for letter, size in widths if letter in OPERATORS[operator].dimensions
        ]
        name = " ".join([operator, f"B{batch}", f"N≤{longest}", *widths])
        return case(table, name, uniform_lengths(batch, 1, longest), operator, width, columns)

    cases = [uniform("operators", *shape) for shape in sizes.operators]
    batch, longest, width, columns = sizes.paper
    table = f"Table 1 of the paper: B={batch}, N≤{longest}, D={width}, T={columns}"
    cases += [uniform(table, name, *sizes.paper) for name in OPERATORS if name != f"{OUTER} itself"]
    # the paper's has as many columns as T
    cases.append(uniform(table, "jagged_softmax", batch, longest, columns, columns))
    count, short, long = sizes.skewed
    skewed = torch.cat([uniform_lengths(count, 1, short), torch.tensor([long])])
    even = (torch.arange(count + 2) * skewed.sum() // (count + 1)).diff()
    table = (
        f"skewed: {skewed.sum()} rows, D=T={sizes.width}, {count} segments of 1..{short} and one of"
        f" {long}, or all even"
    )
    for name in ("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax"):
        for kind, lengths in (("skewed", skewed), ("even", even)):
            cases.append(
                case(table, f"{name}, {kind}", lengths, name, sizes.width, sizes.width, peers=False)
            )
    return cases


def summary(rows: list[dict]) -> list[str]:
    """The precision, and the time per row of skewed segments beside that of even ones."""
    lines = [PRECISION]
    rows = {
        row["case"]: row
        for row in rows
        if row["table"].startswith("skewed") and "forward_backward_ms" in row
    }
    for name in (case.removesuffix(", even") for case in rows if case.endswith(", even")):
        both = [rows[f"{name}, {kind}"] for kind in ("skewed", "even") if f"{name}, {kind}" in rows]
        forward, training = (
            " and ".join(f"{row[key] / int(row['table'].split()[1]) * 1e6:.3g}" for row in both)
            for key in ("forward_ms", "forward_backward_ms")
        )
        lines.append(
            f"{name}, skewed and even, ns per row: forward {forward}, forward + backward"
            f" {training}."
        )
    return lines


if __name__ == "__main__":
    sys.exit(main("jagged_ops", make_cases, summary=summary))
