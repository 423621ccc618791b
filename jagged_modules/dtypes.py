"""The dtypes that each function supports on each device, and those of autocast.
`validation.check_dtype` enforces the table, `dtype_table` prints it."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

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


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x under autocast, which does not change float64, as in torch's attention."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def autocast(x: Tensor) -> Tensor:
    """x in the dtype of `autocast_dtype`."""
    dtype = autocast_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def autocast_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`autocast` of each. They nearly always have one dtype and one device, for which one look at
    the setting is enough."""
    dtype, device = autocast_dtype(q), q.device
    q, k, v = [x if x.dtype == dtype and x.device == device else autocast(x) for x in (q, k, v)]
    return q, k, v


def in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Under autocast, the tensors in the dtype to which torch promotes theirs, as those of
    torch.cat; otherwise as they are."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return [x.to(dtype) for x in tensors]


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
