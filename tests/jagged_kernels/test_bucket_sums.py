"""The PTX that sums dS by stored buckets, which Triton's interpreter does not run: one warp, by the
few instructions that it has, in Python."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")

from jagged_kernels.attention.hopper.bias_sums import THREADS, add_groups

LANES = 32
OUTPUTS, SCORES, WORDS, ADDRESS, FACTOR = 0, 32, 64, 72, 104  # numbers of the first operands
SUMS = 1 << 33  # an address that does not fit into 32 bits


def run_warp(ptx, scores, buckets, factor):
    """The sums of each lane, `{(lane, bucket): sum}`, of dS and buckets `[LANES, 32]` in the order
    of the bytes in memory."""
    lines = [x.strip() for x in ptx.replace(";", "\n").split("\n")]
    lines = [x.strip("{} ") for x in lines if x.strip("{} ") and not x.strip("{} ").startswith(".")]
    words = torch.zeros(LANES, 8, dtype=torch.int64)
    for byte in range(4):
        words += buckets[:, byte::4] << 8 * byte
    registers = {f"${ADDRESS}": [SUMS] * LANES, f"${FACTOR}": [factor] * LANES}
    registers |= {f"${SCORES + i}": scores[:, i].tolist() for i in range(32)}
    registers |= {f"${WORDS + i}": words[:, i].tolist() for i in range(8)}
    sums = {}

    def value(name, lane):
        if name.startswith("0f"):
            assert name == "0f00000000"
            return 0.0
        return int(name, 0) if re.fullmatch(r"(0x)?[0-9a-fA-F]+", name) else registers[name][lane]

    def permuted(lane, word, other, selector):
        given = value(word, lane) | value(other, lane) << 32
        chosen = [value(selector, lane) >> 4 * i & 15 for i in range(4)]
        return sum((given >> 8 * byte & 255) << 8 * i for i, byte in enumerate(chosen))

    compute = {
        "and.b32": lambda lane, x, y: value(x, lane) & value(y, lane),
        "prmt.b32": permuted,
        "setp.ne.s32": lambda lane, x, y: value(x, lane) != value(y, lane),
        "setp.ne.or.s32": lambda lane, x, y, p: value(x, lane) != value(y, lane) or value(p, lane),
        "add.f32": lambda lane, x, y: value(x, lane) + value(y, lane),
        "fma.rn.f32": lambda lane, x, y, z: value(x, lane) * value(y, lane) + value(z, lane),
        "selp.f32": lambda lane, x, y, p: value(x if registers[p][lane] else y, lane),
        "mov.b32": lambda lane, x: value(x, lane),
        "mov.f32": lambda lane, x: value(x, lane),
        "mad.wide.u32": lambda lane, x, y, z: value(x, lane) * value(y, lane) + value(z, lane),
    }
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.endswith(":"):
            continue
        predicate, name, rest = re.fullmatch(r"(?:@(\w+) )?(\S+) (.*)", line).groups()
        operands = [x.strip() for x in rest.split(",")]
        if name == "bra":
            taken = [predicate is None or registers[predicate][lane] for lane in range(LANES)]
            assert len(set(taken)) == 1, "a warp diverges"
            at = lines.index(operands[0] + ":") if taken[0] else at
        elif name == "vote.sync.any.pred":
            registers[operands[0]] = [any(registers[operands[1]])] * LANES
        elif name == "red.relaxed.gpu.global.add.f32":
            for lane in range(LANES):
                if predicate is None or registers[predicate][lane]:
                    offset = registers[operands[0].strip("[]")][lane] - SUMS
                    assert offset % (4 * THREADS) == 0
                    place = lane, offset // (4 * THREADS)
                    sums[place] = sums.get(place, 0.0) + registers[operands[1]][lane]
        else:
            results = [compute[name](lane, *operands[1:]) for lane in range(LANES)]
            registers[operands[0]] = results
    return sums


@pytest.mark.parametrize("largest", [1, 2, 255])
@pytest.mark.parametrize("run", [1, 3, 4, 8, 32])
def test_sums_of_each_bucket(largest, run):
    """Of runs of equal buckets, in one lane or in all; each score has one part in one sum."""
    scores = torch.randint(-50, 50, (LANES, 32)).double()
    buckets = torch.randint(0, largest + 1, (LANES, -(-32 // run))).repeat_interleave(run, 1)
    buckets = buckets[:, :32]
    if run == 3:  # most lanes have one bucket, and wait for the others
        buckets[5:] = largest
    ptx = add_groups()
    sums = run_warp(getattr(ptx, "value", ptx), scores, buckets, 0.5)
    expected = {}
    for lane in range(LANES):
        for score, bucket in zip(scores[lane].tolist(), buckets[lane].tolist()):
            place = lane, bucket
            expected[place] = expected.get(place, 0.0) + 0.5 * score
    assert sums == expected
