"""Host schedules and checks do not wait for torch's thread pool."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from jagged_kernels.common.one_thread import one_thread

BOOKKEEPING = {
    "schedule": ("zigzag_schedule(lengths, lengths, num_heads=4, block_m=64, block_n=64)"),
    "schedule-masked": (
        "zigzag_schedule(lengths, lengths, num_heads=4, block_m=64, block_n=64, mask=mask)"
    ),
    "schedule-many-segments": (
        "zigzag_schedule([64] * 40_000, [64] * 40_000, num_heads=1, block_m=64, block_n=64)"
    ),
    "offsets": "check_offsets('offsets', torch.tensor(list(range(40_000))), 39_999)",
    "candidates": "jm.CandidateIndex.from_map(torch.tensor([u % 999 for u in range(40_000)]), 999)",
    "prepare": (
        "jm.Jagged(torch.empty(32 * 900, 1), torch.tensor(range(0, 32 * 901,"
        " 32))).prepare(num_heads=45, head_dim=64)"
    ),
}
PROGRAM = """
import os
import torch
import jagged_modules as jm
from jagged_modules.segments import check_offsets
from jagged_kernels.schedule.host import zigzag_schedule

def threads():
    return len(os.listdir("/proc/self/task"))

mask, lengths = jm.AttentionMask(causal=True, max_attn_len=100), [n % 1500 for n in range(0, 9000, 10)]
before = threads()
for name, call in {BOOKKEEPING!r}.items():
    eval(call)
    if threads() > before:
        print(name)
        break
else:
    torch.zeros(100_000).exp()
    print("an operator of torch", threads() - before, torch.get_num_threads())
"""  # noqa: E501


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"),
    reason="counts the threads of a process as Linux shows them",
)
def test_bookkeeping_starts_no_thread():
    """torch starts its pool at the first operator that uses it. The library's calls come first and
    must not start it."""
    environment = os.environ | dict(OMP_NUM_THREADS="2", PYTHONPATH=os.pathsep.join(sys.path))
    program = [sys.executable, "-c", PROGRAM.replace("{BOOKKEEPING!r}", repr(BOOKKEEPING))]
    result = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "an operator of torch 1 2\n"


def test_other_threads_keep_their_number_of_threads():
    threads, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError, match="the caller's"), one_thread():
            thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            seen.append(torch.get_num_threads())
            raise RuntimeError("the caller's")
        assert [*seen, torch.get_num_threads()] == [3, 1, 3]
    finally:
        torch.set_num_threads(threads)
