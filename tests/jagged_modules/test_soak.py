"""Thousands of steps of random shapes: memory stays flat, caches do not grow, nothing compiles
after the first steps.

SOAK_STEPS=20000 runs as many steps; by default there are few on the CPU and 20,000 on a GPU.
"""

import gc
import itertools
import os

import pytest
import torch

import jagged_modules as jm

from .training_steps import Batch, cache_sizes, make_steps

STEPS = int(os.environ.get("SOAK_STEPS", 0))
RSS_GROWTH = 24 * 2**20  # bytes; the allocator's own ups and downs took up to 10 MB


def resident_bytes() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(steps: int, device, extra=lambda: ()):
    """Run the steps. Return cache sizes, objects, bytes and the result of `extra` after a fifth of
    them, and at the end."""
    cycle = itertools.cycle(make_steps(device).values())
    generator = torch.Generator().manual_seed(1)
    held = []
    for number in range(1, steps + 1):
        next(cycle)(Batch(generator, device))
        if number in (steps // 5, steps):
            gc.collect()
            held.append((cache_sizes(), len(gc.get_objects()), resident_bytes(), extra()))
    return held


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="reads the memory of a process as Linux shows it"
)
def test_nothing_grows_on_the_cpu():
    (caches, objects, resident, _), (caches_after, objects_after, resident_after, _) = soak(
        STEPS or 1000, "cpu"
    )
    assert caches_after == caches
    assert objects_after <= objects + 100
    assert resident_after <= resident + RSS_GROWTH


def test_sizes_of_caches_are_seen():
    """The test above would notice growth: one kept batch is one more entry."""
    jm.Jagged(torch.randn(3, 2), torch.tensor([0, 1, 3]))
    before, kept = cache_sizes(), jm.Jagged(torch.randn(3, 2), torch.tensor([0, 1, 3]))
    after = cache_sizes()
    (grown,) = (name for name in after if after[name] != before[name])
    assert grown.endswith("._segmentations") and after[grown] == before[grown] + 1
    del kept
    assert cache_sizes() == before


@pytest.mark.gpu
def test_nothing_grows_on_a_gpu(monkeypatch):
    from triton import knobs

    # what Triton compiles or takes from its cache on disk: each a specialisation that no launch
    # before it had
    compiled = []
    others = knobs.compilation.listener
    monkeypatch.setattr(
        knobs.compilation,
        "listener",
        lambda **what: (compiled.append(what["src"].name), others and others(**what)),
    )
    held = soak(STEPS or 20_000, "cuda", lambda: (torch.cuda.memory_allocated(), len(compiled)))
    (
        (caches, objects, resident, (allocated, compilations)),
        (caches_after, objects_after, resident_after, _),
    ) = held
    assert compiled and compiled[compilations:] == []
    assert caches_after == caches
    assert objects_after <= objects + 100
    assert resident_after <= resident + RSS_GROWTH
    assert held[1][3][0] == allocated
