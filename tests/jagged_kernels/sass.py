"""Finds uniform registers that a kernel reads before it writes them: a bug of ptxas, which is
visible in machine code only.

Where several branches or loops have an MMA with an operand at the same address in shared memory,
ptxas 12.8 may compute its descriptor in the first of them only. If that one has not run, the others
read the descriptor from unwritten registers: an illegal address, or wrong results. Kernels avoid it
by computing such addresses in each branch or loop (`opaque` in common/pipeline.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import re
import subprocess
import tempfile

from triton import knobs

LABEL = re.compile(r"(\.L\w+|\$[\w$]+):")
INSTRUCTION = re.compile(
    r"/\*[0-9a-f]+\*/\s+(?P<text>(?P<predicate>@!?U?P\w+\s+)?(?P<name>[\w.]+)\s*(?P<operands>.*?))\s*(?:;|\(\*)"
)
TARGET = re.compile(r"\.L\w+")
CALLED = re.compile(r"`\((\$[\w$]+)\)")
REGISTER = re.compile(r"\bUR(\d+)")


@dataclasses.dataclass
class Instruction:
    text: str
    reads: set[int]
    writes: set[int]
    successors: list[int]


def unwritten_registers(cubin: bytes) -> list[str]:
    """`find_unwritten` in a compiled kernel."""
    return find_unwritten(disassembled(cubin))


@functools.lru_cache(maxsize=2)  # a test may read the code that `unwritten_registers` has read
def disassembled(cubin: bytes) -> str:
    """The machine code of a compiled kernel as nvdisasm prints it."""
    return _output(cubin, knobs.nvidia.nvdisasm.path, "--print-code")


def spilled_bytes(cubin: bytes) -> int:
    """Bytes of local memory of a thread: what did not fit into its registers."""
    return _used(cubin, "STACK")


def registers_per_thread(cubin: bytes) -> int:
    return _used(cubin, "REG")


def _used(cubin: bytes, resource: str) -> int:
    usage = _output(cubin, knobs.nvidia.cuobjdump.path, "-res-usage")
    return int(re.search(rf"{resource}:(\d+)", usage)[1])


def _output(cubin: bytes, *command: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        return subprocess.run([*command, file], capture_output=True, text=True, check=True).stdout


def find_unwritten(listing: str) -> list[str]:
    """Registers that are unwritten on some path to an instruction that reads them, each with this
    instruction.

    listing: of nvdisasm. A write under a predicate counts: readers have the same predicate, or are
    in a branch that has it.
    """
    instructions = parse(listing)
    # on every path to an instruction; None: no path is known yet
    written: list[set[int] | None] = [None] * len(instructions)
    written[0] = set()
    pending = [0]
    while pending:
        i = pending.pop()
        after = written[i] | instructions[i].writes
        for j in instructions[i].successors:
            before = after if written[j] is None else written[j] & after
            if before != written[j]:
                written[j] = before
                pending.append(j)
    reached = [(x, before) for x, before in zip(instructions, written) if before is not None]
    return [
        f"UR{register}: {x.text}" for x, before in reached for register in sorted(x.reads - before)
    ]


def parse(listing: str) -> list[Instruction]:
    labels, rows = {}, []
    for line in map(str.strip, listing.splitlines()):
        if label := LABEL.fullmatch(line):
            labels[label[1]] = len(rows)
        elif row := INSTRUCTION.match(line):
            rows.append((row, line))
    instructions, calls = [], []
    for i, (row, line) in enumerate(rows):
        name, *suffixes = row["name"].split(".")
        operands = re.split(r",\s*(?![^\[]*\])", row["operands"])
        jumps = name in ("BRA", "BRX")  # the listing names all targets of an indexed one
        successors = [labels[x] for x in TARGET.findall(line)] if jumps else []
        assert successors or not jumps, f"no target: {line}"
        ends = jumps or name in ("EXIT", "RET")
        if i + 1 < len(rows) and (
            not ends or row["predicate"] or name == "BRA" and len(operands) > 1
        ):
            successors.append(i + 1)
        if name == "CALL":
            calls.append((i, labels[CALLED.search(line)[1]]))
        reads, writes = registers(suffixes, operands)
        # writes the lower half, and leaves the upper one as it is
        if name == "UPRMT" and operands[2:] == ["0x7632", operands[0]]:
            reads -= writes
        # saves a register that is reused for a while, even if nothing was written to it
        if name == "MOV":
            reads = set()
        instructions.append(Instruction(row["text"], reads, writes, successors))
    for call, function in calls:
        instructions[call].writes = written_until_return(instructions[function:])
    return instructions


def written_until_return(instructions: list[Instruction]) -> set[int]:
    """Uniform registers that a function writes, such as a division of 64-bit integers: its results
    among them."""
    body = itertools.takewhile(lambda x: not x.text.startswith("RET"), instructions)
    return set().union(*(x.writes for x in body))


def registers(suffixes: list[str], operands: list[str]) -> tuple[set[int], set[int]]:
    """Uniform registers that an instruction reads and writes. It writes its first operand, or, if
    that is a predicate, the second too."""
    result = 1 if len(operands) > 1 and re.match(r"U?P[T\d]", operands[0]) else 0
    pair = "64" in suffixes or "WIDE" in suffixes
    reads, writes = set(), set()
    for i, operand in enumerate(operands):
        for first in map(int, REGISTER.findall(operand)):
            if i == result and operand.startswith("UR"):
                writes |= {first, first + 1} if pair else {first}
            # two registers for each operand; the first ones go unread where it is in registers of
            # its own
            elif "gdesc" in operand:
                reads |= set(range(first + (2 if operands[1].startswith("R") else 0), first + 4))
            else:  # of a pair, the first: that is enough
                reads.add(first)
    return reads, writes
