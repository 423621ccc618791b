"""Compiles kernels ahead of time, without a GPU, as they are compiled for a launch."""

from collections.abc import Callable, Iterable

from jagged_kernels.attention.bias import Bias, TableSums
from jagged_kernels.attention.params import BiasKind, MaskParams
from jagged_kernels.common.ptxas import compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from ..sass import unwritten_registers

MASKS = {
    "none": None,
    "hstu": MaskParams(1, -1, -1, 1, 2, 3, 100, 20),
    "window": MaskParams(0, 64, 32, 0, 1, 0, 0, 0),
    "semi-local": MaskParams(1, 256, -1, 1, 1, 0, 0, 0, global_prefix=70, recent_history=1000),
    "grouped": MaskParams(1, 256, -1, 0, 1, 3, 0, 0, global_prefix=70, grouped=1),
}
BIASES = {  # what a RelativeBias has
    "position": BiasKind(position=True, boundaries=0, query_times=False, shift=False),
    "both": BiasKind(position=True, boundaries=128, query_times=False, shift=False),
    "all": BiasKind(position=True, boundaries=128, query_times=True, shift=True),
    "stored": BiasKind(True, boundaries=128, query_times=False, shift=False, stored=True),
    "stored times": BiasKind(False, boundaries=128, query_times=True, shift=True, stored=True),
}
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


def compile_for(
    capability: int,
    kernel,
    constants: dict,
    type_of: Callable[[str], str | tuple | None],
    aligned: Iterable[str] | None = None,
    **options,
):
    """The compiled Triton or Gluon kernel. For compute capability 9.0, checks that it reads no
    register before it writes it.

    Args:
        capability: of the GPU, for example 90.
        constants: values of `tl.constexpr` arguments; names that are not the kernel's are ignored.
        type_of: name of any other argument → its Triton type, a tuple of types for a tuple, or None
            for "i32". A "constexpr" in a tuple is None.
        aligned: pointers whose addresses are multiples of 16 bytes, by default all. A tuple stands
            for each of its pointers, "tuple.field" for one of them.
        options: of the launch, `num_warps` for example.
    """
    types = {arg: "constexpr" if arg in constants else type_of(arg) for arg in kernel.arg_names}
    signature = {arg: "i32" if type is None else type for arg, type in types.items()}
    aligned = (
        [arg for arg, type in signature.items() if str(type).startswith("*")]
        if aligned is None
        else aligned
    )
    attributes = {path: DIVISIBLE_BY_16 for arg in aligned for path in _paths(signature, arg)}
    used = {arg: value for arg, value in constants.items() if arg in signature}
    tuples = ((i, types) for i, types in enumerate(signature.values()) if isinstance(types, tuple))
    used |= {
        (i, j): None for i, types in tuples for j, type in enumerate(types) if type == "constexpr"
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, signature=signature, constexprs=used, attrs=attributes
    )
    return compile_source(capability, source, **options)


def compile_source(capability: int, source: ASTSource, **options):
    """As `compile_for`, of a kernel whose signature is made by the caller."""
    compiled = compile_kernel(source, GPUTarget("cuda", capability, 32), options)
    if capability == 90:
        unwritten = unwritten_registers(compiled.asm["cubin"])
        assert not unwritten, unwritten
    return compiled


def gluon_descriptor(dtype: str, box: list[int]) -> str:
    """The type of a tensor descriptor for Gluon, of "bf16", "fp16" or "fp32"."""
    element = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(box, element)
    return f"tensordesc<{dtype}{box},{layout!r}>"


def bias_constants(kind: BiasKind | None, sums: bool) -> dict:
    """Constants of attention's kernels with a RelativeBias or without. sums: the gradients of its
    tables are summed."""
    has_sums = sums and kind is not None
    constants = dict(
        BIAS=kind, HAS_SUMS=has_sums, BUCKETS=max(1, 2 * kind.boundaries) if has_sums else 0
    )
    return constants | ({} if kind else dict(bias=None)) | ({} if has_sums else dict(sums=None))


def bias_types(arg: str, kind: BiasKind, scratch: bool, entries: bool) -> tuple | None:
    """The types of the arguments "bias" and "sums"; None for any other argument. scratch: sums need
    scratch memory. entries: a bias by time has entries."""

    def given(*types: str, by: bool) -> list[str]:
        return list(types) if by else ["constexpr"] * len(types)

    position, time = kind.position, kind.boundaries > 0
    if arg == "bias":
        tables = (
            *given("*fp32", "i32", "i32", by=position),
            *given("*fp32", "i32", "*i64", "i32", "*i32", "*i32", by=time),
            *given("*i32", "i32", by=time and entries),
            *given("*i64", by=time),
        )
        extremes = given("*i64", "*i64", by=time and entries)
        return Bias(
            *tables, *given("*i64", by=kind.query_times), *given("*i64", by=kind.shift), *extremes,
            *given("*i32", by=kind.stored),
        )  # fmt: skip
    if arg == "sums":
        tables = *given("*fp32", "i32", by=position), *given("*fp32", "i32", "i32", by=time)
        return TableSums(*tables, *given("*fp32", by=position and scratch))
    return None


def _paths(signature: dict, name: str) -> list[tuple[int, ...]]:
    """The positions of a pointer, or of each in a tuple, as Triton names them; none of a
    constant."""
    arg, _, field = name.partition(".")
    position, type = list(signature).index(arg), signature[arg]
    if isinstance(type, tuple):
        names = getattr(type, "_fields", [""] * len(type))
        return [
            (position, i)
            for i, (of_item, item) in enumerate(zip(names, type))
            if item.startswith("*") and field in ("", of_item)
        ]
    return [] if type == "constexpr" else [(position,)]
