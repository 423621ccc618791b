"""Cases: descriptions of calls of public functions. Random ones from the supported space, and
smaller ones for shrinking a failure.

A case always builds the same tensors. `fuzz.py` runs random cases,
`jagged_kernels/test_cells_gpu.py` a fixed matrix.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator

from space import HALVES, LIMITS, OPERATORS, POISONS, Limits, Range


@dataclasses.dataclass(frozen=True)
class Case:
    """A complete description of one call of a public function.

    Attributes:
        lengths: lengths of the segments, one list for each jagged operand.
        seed: seed of the values.
        poison: "nan" or "inf" is written to one segment in a second run, in which the other
            segments must not change.
    """

    function: str
    device: str
    dtype: str
    options: dict
    lengths: list[list[int]]
    seed: int = 0
    poison: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


# -- making cases ----------------------------------------------------------------------------------

EDGES = [edge + step for edge in (16, 32, 64, 128, 192) for step in (-1, 0, 1)]


def random_case(function: str, seed: int, device: str, **fixed) -> Case:
    """A case drawn by `seed`. fixed: a dtype or options that are not drawn."""
    return with_random_data(random_configuration(function, seed, device, **fixed), seed)


def simplest_case(function: str, device: str, dtype: str, **given) -> Case:
    """A case without segments: the given options, and the simplest value (the smallest size) of
    every other option."""
    operator = OPERATORS[function]
    axes = {name: operator.axis(name, device)[0] for name in operator.names()}
    options = {
        name: x.low if isinstance(x, Range) else list(x) if isinstance(x, tuple) else x
        for name, x in axes.items()
    } | given
    return legal(
        Case(function, device, dtype, options, [[] for _ in range(operator.num_lists(options))])
    )


def random_configuration(function: str, seed: int, device: str, **fixed) -> Case:
    """A case with a drawn dtype and drawn options that decide the kernel; data axes have their
    simplest values, without segments."""
    operator, rng = OPERATORS[function], random.Random(f"{function} {device} {seed}")
    dtype = fixed.pop("dtype", None) or rng.choice(operator.dtypes[device])
    options = {
        name: _draw(rng, operator.axis(name, device))
        if decides_kernel
        else operator.axis(name, device)[0]
        for name, decides_kernel in operator.names().items()
    }
    return legal(
        Case(
            function,
            device,
            dtype,
            options | fixed,
            [[] for _ in range(operator.num_lists(options | fixed))],
        )
    )


def with_random_data(case: Case, seed: int, **fixed) -> Case:
    """The case with lengths and options of data axes drawn by `seed`."""
    operator, rng = OPERATORS[case.function], random.Random(f"data {case.function} {seed}")
    options = {name: _draw(rng, operator.axis(name, case.device)) for name in operator.data_axes}
    lengths = _draw_lengths(rng, operator.num_lists(case.options), LIMITS[case.device])
    data = dict(
        options=case.options | options | fixed,
        lengths=lengths,
        seed=seed,
        poison=rng.choice(POISONS),
    )
    return legal(dataclasses.replace(case, **data))


def _draw(rng: random.Random, axis: tuple):
    value = rng.choice(axis)
    value = value.draw(rng) if isinstance(value, Range) else value
    return list(value) if isinstance(value, tuple) else value  # JSON has no tuples


def _draw_lengths(rng: random.Random, num_lists: int, limits: Limits) -> list[list[int]]:
    num_segments = rng.choice([0, 1, 1, 2, 3, 4, 6, 9, limits.segments])
    return [_draw_list(rng, num_segments, limits.rows) for _ in range(num_lists)]


def _draw_list(rng: random.Random, num_segments: int, most_rows: int) -> list[int]:
    kind = rng.choice(["mixed", "mixed", "edges", "equal", "one huge", "at most one", "none"])
    huge, equal = rng.randrange(max(num_segments, 1)), rng.choice([1, *EDGES])
    draw = {
        "mixed": lambda b: rng.choice(
            [0, 1, rng.randint(2, 15), rng.choice(EDGES), rng.randint(0, 300)]
        ),
        "edges": lambda b: rng.choice(EDGES),
        "equal": lambda b: equal,
        "one huge": lambda b: (
            rng.randint(most_rows // 2, most_rows) if b == huge else rng.randint(0, 3)
        ),
        "at most one": lambda b: rng.randint(0, 1),
        "none": lambda b: 0,
    }[kind]
    return [draw(b) for b in range(num_segments)]


def legal(case: Case) -> Case:
    """The case made valid: compatible options, the right number of lists of lengths, and sizes
    within the device's limits."""
    operator, limits, options = OPERATORS[case.function], LIMITS[case.device], dict(case.options)
    if options.get("implementation") == "reference" and case.dtype in HALVES:
        options["implementation"] = "auto"  # the definition rounds every step to the dtype
    if options.get("behind"):
        operator.fix_rows_behind(options)
    operator.fix(case.dtype, options)
    num_lists = operator.num_lists(options)
    lengths = [list(x) for x in (case.lengths * num_lists)[:num_lists]]
    while operator.parts(options, lengths, case.device == "interpreter") > limits.parts and any(
        map(sum, lengths)
    ):
        lengths = (
            [side[:-1] for side in lengths]
            if len(lengths[0]) > 1
            else [[n // 2] for (n,) in lengths]
        )
    while (
        operator.work(options, lengths) > limits.work or max(map(sum, lengths)) > limits.rows
    ) and any(map(any, lengths)):
        longest = max(lengths, key=lambda side: max(side, default=0))
        longest[longest.index(max(longest))] //= 2
    return dataclasses.replace(case, options=options, lengths=lengths)


# -- smaller cases ---------------------------------------------------------------------------------


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases with fewer segments, shorter lengths, smaller sizes or simpler options; the largest
    reductions first."""
    seen = {case.to_json()}
    for lengths in _smaller_lengths(case.lengths):
        yield from _new(dataclasses.replace(case, lengths=lengths), seen)
    if case.poison == "inf":
        yield from _new(dataclasses.replace(case, poison="nan"), seen)
    operator = OPERATORS[case.function]
    for name in operator.names():
        for value in _simpler_values(case.options[name], operator.axis(name, case.device)):
            yield from _new(dataclasses.replace(case, options=case.options | {name: value}), seen)


def _new(case: Case, seen: set[str]) -> Iterator[Case]:
    case = legal(case)
    if case.to_json() not in seen:
        seen.add(case.to_json())
        yield case


def _smaller_lengths(lengths: list[list[int]]) -> Iterator[list[list[int]]]:
    num_segments = len(lengths[0])
    size = num_segments
    while size > 0:
        for start in range(0, num_segments, size):
            yield [side[:start] + side[start + size :] for side in lengths]
        size //= 2
    for i, side in enumerate(lengths):
        for b, length in enumerate(side):
            for shorter in sorted({0, 1, length // 2, length - 1}):
                if 0 <= shorter < length:
                    yield [*lengths[:i], [*side[:b], shorter, *side[b + 1 :]], *lengths[i + 1 :]]


def _simpler_values(value, axis: tuple) -> Iterator:
    """The axis' values before this one; for a size, the bounds of smaller classes, half the size,
    and one less."""
    for simpler in axis:
        if isinstance(simpler, Range):
            if isinstance(value, int) and simpler.low <= value:
                yield from sorted({simpler.low, value // 2, value - 1} - {value, 0})
                continue
            return
        simpler = list(simpler) if isinstance(simpler, tuple) else simpler
        if simpler == value:
            return
        yield simpler
