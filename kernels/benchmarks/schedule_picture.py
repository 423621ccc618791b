"""Load per worker of the attention kernels' tile schedule, before and after the zigzag (after
Figure 5 of the GDPA post).

    # B=1152, maximum length 512, mean/max 0.3, 132 workers
    python kernels/benchmarks/schedule_picture.py
    python kernels/benchmarks/schedule_picture.py --batch 64 --max-length 1024 --out schedule.png

Three schedules of the same work: *dense enumeration* has a tile for every block up to the maximum
length, in order, so that empty tiles take slots; *valid tiles* leaves those out; *zigzag* sorts
tiles by work (``jm.zigzag_schedule``) and assigns them in alternating directions. Makespan over
mean is the load of the busiest worker over the average load; 1 is best.
"""

import argparse
import sys
from pathlib import Path

import torch
from jagged_kernels.schedule.cost import tile_work
from report import PICTURE_STYLE, write_atomically
from torch import Tensor

import jagged_modules as jm

PICTURE = Path(__file__).parents[2] / "docs" / "decisions" / "zigzag-schedule.png"


def cdiv(lengths: Tensor, block: int) -> Tensor:
    return (lengths + block - 1) // block


def round_robin_loads(work: Tensor, num_workers: int) -> Tensor:
    """``[num_workers]`` total work where tile i goes to worker i mod num_workers."""
    return torch.zeros(num_workers, dtype=torch.int64).index_add_(
        0, torch.arange(len(work)) % num_workers, work.long()
    )


def zigzag_loads(work: Tensor, num_workers: int) -> Tensor:
    """``[num_workers]`` total work where every other wave of tiles goes to the workers in reverse
    order."""
    position = torch.arange(len(work))
    wave, lane = position // num_workers, position % num_workers
    return torch.zeros(num_workers, dtype=torch.int64).index_add_(
        0, torch.where(wave % 2 == 0, lane, num_workers - 1 - lane), work.long()
    )


def loads_per_worker(
    lengths: Tensor, max_length: int, num_heads: int, block_m: int, block_n: int, num_workers: int
) -> dict[str, Tensor]:
    """Key blocks that each worker visits in self-attention over segments of ``lengths``,
    ``[num_workers]`` for each schedule."""
    blocks = torch.arange(cdiv(torch.tensor(max_length), block_m))
    # segment, head, block
    valid = (blocks < cdiv(lengths, block_m)[:, None]).repeat_interleave(num_heads, dim=0).flatten()
    work = valid * cdiv(lengths, block_n).repeat_interleave(num_heads * len(blocks))
    schedule = jm.zigzag_schedule(
        lengths, lengths, num_heads=num_heads, block_m=block_m, block_n=block_n
    )
    segment, _, block = schedule.tiles.unbind(1)
    scheduled = tile_work((segment, block), lengths, lengths, (block_m, block_n))
    return {
        "dense enumeration": round_robin_loads(work, num_workers),
        "valid tiles": round_robin_loads(work[valid], num_workers),
        "zigzag": zigzag_loads(scheduled, num_workers),
    }


def imbalance(loads: Tensor) -> float:
    """Makespan over mean."""
    return (loads.max() / loads.double().mean()).item()


def save_picture(loads: dict[str, Tensor], title: str, path: Path) -> None:
    """A panel per schedule: a bar per worker, a line at the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use(PICTURE_STYLE)
    figure, panels = plt.subplots(1, len(loads), figsize=(5 * len(loads), 3.4), sharey=True)
    for axes, (name, load) in zip(panels, loads.items()):
        axes.bar(range(len(load)), load.tolist(), width=1.0, color="C0")
        axes.axhline(load.double().mean().item(), color="C3", linewidth=1, label="mean")
        axes.set_title(f"{name}: makespan / mean {imbalance(load):.3f}")
        axes.set_xlabel("worker")
    panels[0].set_ylabel("load (key blocks)")
    panels[0].legend()
    figure.suptitle(title)
    write_atomically(path, lambda partial: figure.savefig(partial, dpi=110))
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Load per worker before and after the zigzag schedule.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--batch", type=int, default=1152, help="segments of the batch")
    parser.add_argument("--max-length", type=int, default=512, help="rows of the longest segment")
    parser.add_argument(
        "--sparsity", type=float, default=0.3, help="mean length over maximum length"
    )
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--block-m", type=int, default=128, help="query rows of a tile")
    parser.add_argument("--block-n", type=int, default=64, help="keys of a block")
    parser.add_argument(
        "--workers", type=int, default=132, help="thread blocks that the tiles are assigned to"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    parser.add_argument("--out", type=Path, default=PICTURE, help="file of the picture")
    options = parser.parse_args(argv)

    low, high = length_range(options.max_length, options.sparsity)
    lengths = torch.randint(
        low, high + 1, (options.batch,), generator=torch.Generator().manual_seed(options.seed)
    )
    loads = loads_per_worker(
        lengths,
        options.max_length,
        options.heads,
        options.block_m,
        options.block_n,
        options.workers,
    )
    title = (
        f"B={options.batch}, lengths {low} to {high} of {options.max_length}, {options.heads}"
        f" heads, {options.workers} workers"
    )

    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_picture(loads, title, options.out)
    print(title)
    for name, load in loads.items():
        print(f"{name:20s} makespan / mean {imbalance(load):.3f}")
    return 0


def length_range(max_length: int, sparsity: float) -> tuple[int, int]:
    """Bounds of the uniform lengths with that mean: from 1 up where the mean allows it, else down
    from the maximum."""
    if not 0 < sparsity <= 1:
        raise ValueError(f"sparsity must be in (0, 1], got {sparsity}")
    mean = sparsity * max_length
    return (
        (1, max(1, round(2 * mean) - 1))
        if sparsity <= 0.5
        else (round(2 * mean) - max_length, max_length)
    )


if __name__ == "__main__":
    sys.exit(main())
