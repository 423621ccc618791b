"""Threads and processes at once, with shared layers and with the very first call of a process:
results as of one thread."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from marks import slow_after

import jagged_modules as jm
from jagged_modules.containers.schedules import Sizes, kept_schedule
from jagged_modules.segments import MAX_SCHEDULES

from .processes import WORKERS, in_threads
from .training_steps import make_steps, run_steps


def test_threads_share_layers():
    steps = make_steps()
    expected = [run_steps(steps, seed, 3) for seed in range(WORKERS)]
    for results, alone in zip(
        in_threads(lambda seed: run_steps(steps, seed, 3)), expected, strict=True
    ):
        assert all(map(torch.equal, results, alone))


def output(way: str, device: str) -> list[str]:
    """What the program of processes.py prints."""
    program = pathlib.Path(__file__).with_name("processes.py")
    environment = os.environ | dict(
        PYTHONPATH=os.pathsep.join(sys.path), CUBLAS_WORKSPACE_CONFIG=":4096:8"
    )
    result = subprocess.run(
        [sys.executable, program, way, device], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def serial(request):
    """A device, and the output there of one thread."""
    return request.param, output("serial", request.param)


@slow_after(1, "way", ["fork", "threads", "spawn"])
def test_first_calls(serial, way):
    device, expected = serial
    if way == "fork" and device == "cuda":
        pytest.skip("CUDA does not work in forked processes")
    assert len(set(expected)) == WORKERS
    assert output(way, device) == expected


def test_threads_that_prepare_one_jagged_more_often_than_it_keeps(offsets_of):
    """Every thread gets the schedule of its own queries, while the others evict it."""
    keys = jm.Jagged(torch.randn(70, 4), offsets_of([30, 40]))
    sizes = Sizes.of(1, None, 16, torch.float32)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def prepare(number):
            for step in range(60):
                queries = 1 + number * 60 + step
                schedule = kept_schedule(keys, queries, 1, sizes, None)
                assert int(schedule.num_tiles[0]) == 2 * (-(-queries // schedule.block_m))

        in_threads(prepare)
    finally:
        sys.setswitchinterval(before)
    assert len(keys.segmentation.schedules) <= MAX_SCHEDULES


def test_threads_get_one_segmentation_id():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            index = jm.CandidateIndex.from_counts(torch.tensor([3, 1]))
            jagged = jm.Jagged(torch.randn(4, 2), torch.tensor([0, 3, 4]))
            assert (
                len(
                    set(
                        in_threads(
                            lambda _, index=index, jagged=jagged: (
                                index.segmentation_id,
                                jagged.segmentation_id,
                            )
                        )
                    )
                )
                == 1
            )
    finally:
        sys.setswitchinterval(before)


def test_values_cached_in_inference_mode_serve_training():
    """An index caches users of candidates and offsets of queries. Autograd refuses tensors made in
    inference mode."""
    index = jm.CandidateIndex.from_map(torch.tensor([1, 0, 1]), 2)
    layer = jm.LinearCompressEmbedding(3, 2, 4)
    embeddings = torch.randn(3, 3, 8), torch.randn(2, 4, 8)
    with torch.inference_mode():
        expected = layer(*embeddings, index)
        assert index.query_offsets(2).tolist() == [0, 2, 6]
    out = layer(*embeddings, index)
    out.sum().backward()
    assert torch.equal(out, expected) and not index.query_offsets(2).is_inference()
