"""The dtypes that each function supports on each device. `validation.check_dtype` enforces this
table, `dtype_table` prints it."""

from __future__ import annotations

import torch

# supported by every function on the CPU, CUDA and meta
EVERYWHERE = (torch.float32, torch.float16, torch.bfloat16)
FLOATS = (torch.float64, *EVERYWHERE)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_REAL = (*FLOATS, *_INTEGERS[1:])
_ANY = (*FLOATS, torch.complex64, torch.complex128, *_INTEGERS)

# by their dtypes on the CPU, on meta and of "reference", and those of the kernels
_FUNCTIONS: dict[str, tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]] = {
    """jagged_attention target_attention self_target_attention block_diagonal_attention
    block_diagonal_attention_packed din_attention linear_compress jagged_dense_bmm
    jagged_jagged_bmm jagged_sum jagged_mean jagged_softmax jagged_jagged_bmm_jagged_out
    array_jagged_bmm_jagged_out jagged2_softmax""": (FLOATS, EVERYWHERE),
    "jagged_layer_norm jagged_dense_add jagged_dense_mul apply_rotary": (FLOATS, FLOATS),
    """jagged_concat jagged_split jagged_first jagged_last jagged_between jagged_select
    jagged_to_padded padded_to_jagged""": (_ANY, _ANY),
    "jagged_max": (_REAL, _REAL),
}
DTYPES = {name: dtypes for names, dtypes in _FUNCTIONS.items() for name in names.split()}
DTYPES["jagged_linear (weight per segment)"] = FLOATS, EVERYWHERE
DTYPES["jagged_linear (one weight)"] = FLOATS, FLOATS


class WrongDtype(TypeError, ValueError):
    """Unsupported dtype. Subclasses both TypeError and ValueError."""


def uses_kernels(device: torch.device, implementation: str) -> bool:
    """Whether a function with kernels runs them, on this device and with this implementation."""
    return implementation != "reference" and (implementation != "auto" or device.type == "cuda")


def dtypes_of(
    function: str, device: torch.device, implementation: str = "auto"
) -> tuple[torch.dtype, ...]:
    """The dtypes that the function supports: for its floating-point arguments, or for the values of
    functions that only move rows."""
    plain, kernels = DTYPES[function]
    return kernels if uses_kernels(device, implementation) else plain


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """The dtypes as text, for example "float32, float16 or bfloat16"."""
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def dtype_table() -> str:
    """`DTYPES` as a markdown table."""
    lines = [
        '| function | CPU, meta, or `implementation="reference"` | CUDA kernels |',
        "|---|---|---|",
    ]
    for dtypes in dict.fromkeys(DTYPES.values()):
        functions = ", ".join(
            f"`{function}`" for function, taken in DTYPES.items() if taken == dtypes
        )
        on_cuda = "the same" if dtypes[1] == dtypes[0] else names(dtypes[1])
        lines.append(f"| {functions} | {names(dtypes[0])} | {on_cuda} |")
    return "\n".join(lines)
