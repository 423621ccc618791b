"""Which kernels of DIN's attention run, and their launch configurations."""

from __future__ import annotations

import dataclasses

import torch

from ..common.configs import padded_dim

MAX_SIZE = 256  # columns of q, k and v, and units of a hidden layer
MAX_LAYERS = 2
# Elements of D and W2, which stay in shared memory, by bytes of an element. In fp32 their
# transposes stay there too: with 2**14 elements, dkdv needs more than Hopper's 227 KB.
MAX_WEIGHTS = {2: 2**15, 4: 7 * 2**11}


@dataclasses.dataclass(frozen=True)
class DINConfig:
    """block: events of a tile. num_warps, num_stages: of the launch. ctas_per_sm: programs per SM
    at most, of the kernels whose programs take many rows of q. max_registers: of a thread."""

    block: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    max_registers: int | None = None


# More programs than run at once, because histories have different lengths. Each one of the backward
# has a part of the weights' gradients in memory.
CTAS = dict(fwd=16, moments=6, dq=4, dmlp=4, dkdv=1)
HOPPER_CTAS = dict(fwd=32, mlp=6, events=1)


def din_config(
    kernel: str,
    itemsize: int,
    width: int,
    hidden: tuple[int, ...],
    activation: str = "relu",
    softmax: bool = False,
    capability: tuple[int, int] = (9, 0),
) -> DINConfig:
    """Launch configuration of a kernel, "fwd", "moments", "dq", "dmlp" or "dkdv". width: the larger
    one of E and Ev."""
    config = _din_config(kernel, itemsize, width, hidden, activation)
    if kernel == "fwd" and softmax and capability[0] in (10, 11):
        # Scores of 64 events would be in tensor memory: Triton 3.6 does not compile their softmax.
        return dataclasses.replace(config, block=min(config.block, 32))
    return config


def _din_config(
    kernel: str, itemsize: int, width: int, hidden: tuple[int, ...], activation: str
) -> DINConfig:
    large = width > 128 or max(hidden) > 128
    if itemsize == 4:  # an fp32 MMA is six of bf16: registers limit the tiles
        return DINConfig(16 if large else 32, 8 if large else 4, 1, CTAS[kernel])
    if large:
        return DINConfig(32 if kernel in ("dq", "dmlp") else 64, 8, 1, CTAS[kernel])
    # A warpgroup takes 64 rows of an MMA: eight warps would compute the same rows twice.
    # with 168 registers, three programs of four warps run at once on an SM of 65536
    max_registers = 168 if kernel == "fwd" and width <= 64 else None
    # In a pipeline Dice's tables would be copied too, number by number. The forward waits for
    # events: H200, E = 64, ReLU 1.2 ms in two stages, 1.0 in three; Dice 3.1, and 2.6 in one.
    # PReLU's backward 7.4 ms in two stages, 6.7 in one.
    stages = 3 if kernel == "fwd" else 2
    if kernel in ("dq", "dmlp", "dkdv") and activation in ("dice", "prelu"):
        stages = 1
    elif activation == "dice" and kernel == "fwd":
        stages = 1
    return DINConfig(64, 4, stages, CTAS[kernel], max_registers)


def hopper_config(kernel: str, width: int, hidden: tuple[int, ...]) -> DINConfig:
    """Launch configuration of "fwd", hopper_forward.py, "mlp", both launches of hopper_rows.py, or
    "events", hopper_events.py. With 128 registers a thread four programs of the forward run at once
    on an SM, which hide one another's waits, but larger accumulators would not fit; with more, two
    do."""
    if kernel != "fwd":
        return DINConfig(64, 4, 4, HOPPER_CTAS[kernel], 255)
    four = width <= 64 and hidden[0] <= 80 and hidden[1] <= 40
    return DINConfig(64, 4, 4, HOPPER_CTAS[kernel], 128 if four else None)


HOPPER_STAGES = 4  # tiles of events in shared memory


@dataclasses.dataclass(frozen=True)
class DINProblem:
    """What decides which kernels run. same: v is k. aligned: TMA can read rows of k."""

    width: int
    hidden: tuple[int, ...]
    dtype: torch.dtype
    same: bool
    aligned: bool
    device_type: str
    capability: tuple[int, int]


def runs_on_hopper(problem: DINProblem, backward: bool) -> bool:
    """Whether the forward is that of hopper_forward.py, and the backward that of hopper_rows.py and
    hopper_events.py, which keep the accumulators of all units in registers, and run two programs at
    once on an SM at least. The backward's registers suffice for fewer units."""
    limits = (64, 80, 64) if backward else (128, 128, 64)
    sizes = (problem.width, *problem.hidden)
    if len(problem.hidden) != 2 or any(x > limit for x, limit in zip(sizes, limits)):
        return False
    first, second = (sum(n for _, n in pieces(x, 8)) for x in problem.hidden)
    width = max(64, padded_dim(problem.width))
    elements = HOPPER_STAGES * 64 * width + first * (width + second)
    return (
        (problem.device_type, problem.capability) == ("cuda", (9, 0))
        and problem.dtype == torch.bfloat16
        and problem.same
        and problem.aligned
        and 2 * elements <= 108 * 1024  # bytes of the forward, of 113 KiB
    )


def pieces(units: int, smallest: int = 16) -> tuple[tuple[int, int], ...]:
    """(first unit, size) of the pieces of a layer: sizes that are powers of two and at least
    `smallest`, the smallest side of an MMA. At most two, as many small MMAs cost more than
    padding."""
    whole = 1 << (units - 1).bit_length()
    half = whole // 2
    rest = max(smallest, 1 << max(0, units - half - 1).bit_length())
    if half < smallest or half + rest >= whole:
        return ((0, max(smallest, whole)),)
    return (0, half), (half, rest)


def has_kernels(width: int, v_width: int, hidden: tuple[int, ...], itemsize: int) -> bool:
    """Whether the kernels take q and k of `width` columns, v of `v_width`, and this MLP."""
    if len(hidden) > MAX_LAYERS or max(width, v_width, *hidden) > MAX_SIZE:
        return False
    units = [sum(size for _, size in pieces(n)) for n in hidden]
    return units[0] * (padded_dim(width) + sum(units[1:])) <= MAX_WEIGHTS[itemsize]
