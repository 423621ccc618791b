"""A sampler that balances the work of data-parallel ranks, and what it saves: python
examples/balanced_sampler.py [--measure]

Histories differ in length, so ranks with equal numbers of samples have unequal work, and in each
step all wait for the slowest. This sampler gives every rank the same number of samples and nearly
the same cost.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from threading import Barrier

import torch
from torch import Tensor
from torch.multiprocessing import get_context, spawn
from torch.utils.data import DataLoader, Sampler

import jagged_modules as jm


class BalancedBatchSampler(Sampler[list[int]]):
    """The batches of one rank, for DataLoader's `batch_sampler`.

    A step's global batch is that of a plain shuffle: the next `world_size * batch_size` samples of
    a permutation. The sampler chooses only which rank gets which of them, so a loss that is a mean
    over the global batch, and its gradients, do not change.

    Algorithm: sort the global batch by decreasing cost. In each of `batch_size` rounds, take the
    next `world_size` samples and give each rank one: the costliest to the rank with the least cost
    so far (longest processing time first, with equal counts). The costs of two ranks then differ by
    no more than the largest difference of costs within one round.

    Each rank computes all of this itself, from (seed, epoch) and the costs: nothing is
    communicated. Every sample occurs once per epoch. If the last global batch is smaller, ranks
    have one sample more or less there, and a rank has none (an empty batch) if there are fewer
    samples than ranks.

    Args:
        costs: `[num_samples]` cost of each sample, the same on all ranks: its length, or a function
            of it such as `attention_cost`.
        batch_size: samples per rank and step.
        rank, world_size: this rank, and the number of ranks.
        seed: seed of the shuffle.
        drop_last: leave out the samples of a last, smaller global batch.

    Example::

        sampler = BalancedBatchSampler(
            attention_cost(lengths, 256), batch_size=32,
            rank=dist.get_rank(), world_size=dist.get_world_size(),
        )
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
        for epoch in range(first_epoch, 10):
            # resumes within an epoch
            sampler.set_epoch(epoch, first_step if epoch == first_epoch else 0)
            for batch in loader: ...
    """

    def __init__(
        self,
        costs: Tensor,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.costs = torch.as_tensor(costs, dtype=torch.float64, device="cpu")
        if self.costs.dim() != 1 or not (self.costs >= 0).all():
            raise ValueError(
                "costs must be one number of 0 or more for each sample, got shape"
                f" {list(self.costs.shape)}"
            )
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size must be 1 or more and rank one of world_size, got {batch_size}, {rank}"
                f" and {world_size}"
            )
        self.batch_size, self.rank, self.world_size, self.seed, self.drop_last = (
            batch_size,
            rank,
            world_size,
            seed,
            drop_last,
        )
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """The next iteration is over this epoch, from this step on."""
        self.epoch, self.first_step = epoch, first_step

    def __len__(self) -> int:
        size = self.world_size * self.batch_size
        steps = len(self.costs) // size if self.drop_last else -(-len(self.costs) // size)
        return max(0, steps - self.first_step)

    def __iter__(self) -> Iterator[list[int]]:
        for samples in self.assignment()[:, self.rank].tolist():
            yield [sample for sample in samples if sample >= 0]

    def assignment(self) -> Tensor:
        """`[steps, world_size, batch_size]` the samples of all ranks; -1 where the last global
        batch has no sample."""
        size = self.world_size * self.batch_size
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.costs), generator=generator)
        order = (
            order[: len(order) // size * size]
            if self.drop_last
            else torch.nn.functional.pad(order, (0, -len(order) % size), value=-1)
        )
        samples = order.view(-1, size)[self.first_step :]
        costs = torch.where(samples >= 0, self.costs[samples], -1)  # absent samples come last
        costs, by_cost = costs.sort(dim=1, descending=True, stable=True)
        samples = samples.gather(1, by_cost)

        totals = costs.new_zeros(len(samples), self.world_size)
        assigned = torch.empty(len(samples), self.world_size, self.batch_size, dtype=torch.int64)
        for i, (dealt, added) in enumerate(
            zip(samples.split(self.world_size, dim=1), costs.split(self.world_size, dim=1))
        ):
            # the rank with the least cost gets the first, costliest sample
            ranks = totals.argsort(dim=1, stable=True)
            totals.scatter_add_(1, ranks, added.clamp(min=0))
            assigned[:, :, i].scatter_(1, ranks, dealt)
        return assigned


class ShuffledBatchSampler(BalancedBatchSampler):
    """The same global batches, each cut into ranks as the permutation has it: what a plain
    distributed sampler does."""

    def __init__(self, costs: Tensor, *args, **options) -> None:
        super().__init__(torch.zeros(len(costs)), *args, **options)


def attention_cost(lengths: Tensor, width: int) -> Tensor:
    """Multiplications of an attention layer, up to a factor: four projections of L rows, and two
    products of L by L rows."""
    return lengths * (4 * width**2) + lengths**2 * (2 * width)


def lognormal_lengths(count: int, mean: float, sigma: float, longest: int, seed: int = 0) -> Tensor:
    """Lognormal lengths of this mean, before those above `longest` are cut to it."""
    normal = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return (normal * sigma - sigma**2 / 2).exp().mul(mean).round().clamp(1, longest).long()


# -- what it saves ---------------------------------------------------------------------------------


def rank_costs(sampler: BalancedBatchSampler, costs: Tensor) -> Tensor:
    """`[steps, world_size]` total cost of each rank's batch."""
    assigned = sampler.assignment()
    return torch.where(assigned >= 0, costs[assigned], 0).sum(dim=2)


def idle(costs: Tensor) -> float:
    """Share of the ranks' time spent waiting for the slowest, given the times
    `[steps, world_size]`."""
    return 1 - float(costs.mean() / costs.max(dim=1).values.mean())


SAMPLERS = {"shuffled": ShuffledBatchSampler, "balanced": BalancedBatchSampler}


def print_predicted(costs: dict[str, Tensor], batch_size: int) -> None:
    """The table of idle time by the cost model. A step has whole batches."""
    print("ranks | cost      | idle, shuffled | idle, balanced | speed-up of a step")
    for world_size in (2, 8, 16, 64):
        for name, cost in costs.items():
            if (needed := world_size * batch_size) > len(cost):
                print(f"{world_size:5} | {name:9} | needs --samples of at least {needed}")
                continue
            by_rank = [
                rank_costs(kind(cost, batch_size, 0, world_size, drop_last=True), cost)
                for kind in SAMPLERS.values()
            ]
            slowest = [x.max(dim=1).values.mean() for x in by_rank]
            print(
                f"{world_size:5} | {name:9} | {idle(by_rank[0]):14.1%} | {idle(by_rank[1]):14.2%} |"
                f" {slowest[0] / slowest[1]:.2f}"
            )


def measure(
    rank: int,
    barrier: Barrier,
    times: Tensor,
    lengths: Tensor,
    costs: Tensor,
    options: argparse.Namespace,
) -> None:
    """Time a layer's training step in one of two processes, on the same global batches in both
    distributions.

    The processes start each step together, at `barrier`. `times` is shared memory: seconds,
    `[samplers, steps, ranks]`.
    """
    torch.set_num_threads(1)
    layer = jm.HSTULayer(
        options.width, num_heads=2, config=jm.HSTUConfig(scaling_seqlen=options.longest)
    )
    samplers = [
        kind(costs, options.batch_size, rank, 2, drop_last=True) for kind in SAMPLERS.values()
    ]
    loaders = [
        DataLoader(lengths.tolist(), batch_sampler=sampler, collate_fn=torch.tensor)
        for sampler in samplers
    ]
    for step, batches in zip(range(times.shape[1]), zip(*loaders)):
        for kind, batch in enumerate(batches):
            offsets = torch.nn.functional.pad(batch.cumsum(0), (1, 0))
            events = torch.randn(int(offsets[-1]), options.width)
            barrier.wait()
            start = time.perf_counter()
            layer((events, offsets))[0].square().mean().backward()
            times[kind, step, rank] = time.perf_counter() - start


def print_measured(lengths: Tensor, costs: Tensor, options: argparse.Namespace) -> None:
    """The table's last row: idle time of two processes on this CPU."""
    times = torch.zeros(len(SAMPLERS), options.steps + 1, 2, dtype=torch.float64).share_memory_()
    # Not a process group: the threads of Gloo may outlive Python, and abort the process.
    spawn(measure, (get_context("spawn").Barrier(2), times, lengths, costs, options), nprocs=2)
    times = times[:, 1:]  # without the first step, which allocates
    shuffled, balanced = (x.max(dim=1).values.mean() for x in times)
    print(
        f"    2 | measured  | {idle(times[0]):14.1%} | {idle(times[1]):14.1%} |"
        f" {shuffled / balanced:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--samples", type=int, default=64 * 1024, help="number of samples")
    parser.add_argument(
        "--mean", type=float, default=600, help="mean length, before the longest are cut"
    )
    parser.add_argument(
        "--sigma", type=float, default=1.0, help="standard deviation of the lengths' logarithm"
    )
    parser.add_argument(
        "--longest", type=int, default=2048, help="longer histories are cut to this length"
    )
    parser.add_argument("--width", type=int, default=256, help="width of the layer")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
    parser.add_argument(
        "--measure", action="store_true", help="also measure two processes on the CPU"
    )
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    options = parser.parse_args()
    for name in ("samples", "mean", "longest", "width", "batch_size", "steps"):
        if not getattr(options, name) >= 1:  # NaN too
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}"
            )
    if not 0 <= options.sigma < math.inf:
        parser.error(f"--sigma must be a finite number of 0 or more, not {options.sigma}")
    needed = 2 * options.batch_size * (options.steps + 1)
    if options.measure and options.samples < needed:
        parser.error(
            f"--measure needs --samples of at least 2 * batch_size * (steps + 1) = {needed}, not"
            f" {options.samples}"
        )
    lengths = lognormal_lengths(options.samples, options.mean, options.sigma, options.longest)
    costs = {
        "tokens": lengths.double(),
        "attention": attention_cost(lengths.double(), options.width),
    }
    print(
        f"lengths: mean {lengths.double().mean():.0f}, longest {lengths.max()},"
        f" {options.batch_size} samples per rank and step"
    )
    print_predicted(costs, options.batch_size)
    if options.measure:
        print_measured(lengths, costs["attention"], options)


if __name__ == "__main__":
    main()
