"""Predicts the communication of training on many ranks: python examples/communication.py --step-ms
100 --bandwidth 50e9

Computes the bytes that each rank of train_dlrm.py's model sends to each other one in a training
step, from the sharding plan and the batches, and from these the step time and the scaling
efficiency. It needs neither a GPU nor other processes. The batch size is that of a rank, so a
rank's work stays the same on any number of ranks (weak scaling).

In a step of sharding.py's pipeline, ranks with sharded tables exchange:

    splits       for each module and type of sharding, the sizes of the two exchanges that follow,
                 and the batch size; int64
    lengths      of the features, to each rank that holds a shard of their table
    ids          to the rank that holds their row (row-wise), or each shard of their table
                 (column-wise and table-wise)
    embeddings   back from the shard: those of the ids of a sequence, or of each bag. Row-wise
                 shards of bags send partial sums, by a reduce-scatter
    gradients    of the embeddings: the same bytes in the other direction; of row-wise bags by an
                 all-gather
    dense        all-reduce of the gradients of all other parameters, and of the number of losses
                 (`sharding.global_mean`)

tests/distributed/test_communication.py compares the bytes with those that two processes exchange.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import benchmark_dlrm
import sharding
import torch
from benchmark_dlrm import COUNTS, add_model_options, make_config, random_batches, set_sizes
from ranking_data import RankingBatch
from ranking_model import RankingModel
from sharding import EXACT_EXCHANGE, Exchange
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardMetadata
from training import HelpFormatter, check_at_least_1, positive

# Tables of 21.6 GB for a GPU.
SIZES = {
    "cpu": benchmark_dlrm.SIZES["cpu"],
    "cuda": {**benchmark_dlrm.SIZES["cuda"], "items": 16_000_000, "feature_rows": 128_000},
}

INT64, FP32 = torch.int64.itemsize, torch.float32.itemsize
# numbers of lengths and of ids, and the batch size: what TorchRec's KJTAllToAll sends to each rank
SPLITS = 3
BACKWARD = 2 / 3  # share of a step's computation: the backward of a GEMM is two GEMMs


# -- bytes -----------------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """Bytes of a training step that rank s sends to rank d: float64 [N, N] each, 0 on the diagonal.
    The head of this file says of what."""

    splits: torch.Tensor
    lengths: torch.Tensor
    ids: torch.Tensor
    embeddings: torch.Tensor
    gradients: torch.Tensor
    dense: torch.Tensor

    def sent(self, rank: int) -> dict[str, float]:
        """Bytes that the rank sends, by kind."""
        return {kind: matrix[rank].sum().item() for kind, matrix in self._asdict().items()}

    def busiest(self) -> dict[str, float]:
        """Bytes that the busiest rank sends, or receives if that is more, by kind."""
        return {
            kind: torch.maximum(matrix.sum(dim=0), matrix.sum(dim=1)).max().item()
            for kind, matrix in self._asdict().items()
        }


Features = dict[str, KeyedJaggedTensor]


def features(batch: RankingBatch) -> Features:
    """The input of each collection of a `RankingModel`, by its name in the model."""
    return {"sequences": batch.ids, "user_bags": batch.users, "item_bags": batch.items}


def count_traffic(
    model: nn.Module,
    plan: ShardingPlan,
    inputs: Sequence[Features],
    exchange: Exchange = EXACT_EXCHANGE,
) -> Traffic:
    """The bytes of a training step.

    Args:
        model: the model before it is sharded. It may be on the meta device.
        plan: the plan of its tables, with types of `sharding.SHARDING_TYPES`. Modules that it
            leaves out are replicated.
        inputs: of each rank, the input of each module in the plan, by the module's path. Inputs
            have no weights.
        exchange: how ranks send embeddings.
    """
    for path, tables in plan.plan.items():
        for table, how in tables.items():
            if how.sharding_type not in sharding.SHARDING_TYPES:
                raise ValueError(
                    f"plan: {path}.{table} is {how.sharding_type}, not one of"
                    f" {sorted(sharding.SHARDING_TYPES)}"
                )
    ranks = len(inputs)
    exchanges = sum(
        len({how.sharding_type for how in tables.values()}) for tables in plan.plan.values()
    )
    # once for ranks with the same batch
    rows = {id(own): _exchanged(model, plan, own, ranks, exchange) for own in inputs}
    lengths, ids, embeddings = (
        torch.stack(column) for column in zip(*(rows[id(own)] for own in inputs))
    )
    traffic = Traffic(
        splits=torch.full((ranks, ranks), float(exchanges * SPLITS * INT64), dtype=torch.float64),
        lengths=lengths,
        ids=ids,
        embeddings=embeddings.T.clone(),
        gradients=embeddings,
        dense=all_reduce(replicated_bytes(model, plan), ranks) + all_reduce(FP32, ranks),
    )
    for matrix in traffic:
        matrix.fill_diagonal_(0)  # a rank's own part stays in its memory
    return traffic


class Exchanged(NamedTuple):
    """Bytes that one rank sends to the shards on each rank, and the embeddings that it gets from
    there: float64 [N] each."""

    lengths: torch.Tensor
    ids: torch.Tensor
    embeddings: torch.Tensor


def _exchanged(
    model: nn.Module,
    plan: ShardingPlan,
    own: Features,
    ranks: int,
    exchange: Exchange = EXACT_EXCHANGE,
) -> Exchanged:
    total = Exchanged(*torch.zeros(3, ranks, dtype=torch.float64))
    for path, tables in plan.plan.items():
        module = model.get_submodule(path)
        pooled = not isinstance(module, EmbeddingCollection)
        for config in module.embedding_bag_configs() if pooled else module.embedding_configs():
            features = [own[path][name] for name in config.feature_names]
            lengths, ids = (
                torch.cat([x(feature) for feature in features])
                for x in (KeyedJaggedTensor.lengths, KeyedJaggedTensor.values)
            )
            if exchange.unique_ids and not pooled:
                ids = ids.unique()
            for shard in shards(tables[config.name]):
                rank = shard.placement.rank()
                columns, count = shard.shard_sizes[1], ids_in_shard(ids, shard, config)
                total.lengths[rank] += len(lengths) * lengths.element_size()
                total.ids[rank] += count * ids.element_size()
                total.embeddings[rank] += (
                    (len(lengths) if pooled else count) * columns * exchange.itemsize
                )
    return total


def shards(table: ParameterSharding) -> list[ShardMetadata]:
    """The shards of a table. A row-wise one has a shard on each rank, if need be without rows."""
    return table.sharding_spec.shards


def ids_in_shard(
    ids: torch.Tensor, shard: ShardMetadata, config: EmbeddingConfig | EmbeddingBagConfig
) -> int:
    first, rows = shard.shard_offsets[0], shard.shard_sizes[0]
    if rows == config.num_embeddings:
        return len(ids)
    return int(((ids >= first) & (ids < first + rows)).sum())


def replicated_bytes(model: nn.Module, plan: ShardingPlan) -> int:
    """Bytes of the gradients that DistributedDataParallel averages: of the parameters outside of
    sharded modules."""
    sharded = tuple(f"{path}." for path in plan.plan)
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not name.startswith(sharded)
    }
    return sum(parameter.numel() * parameter.element_size() for parameter in trained.values())


def all_reduce(num_bytes: int, ranks: int) -> torch.Tensor:
    """[N, N] of a ring all-reduce: each rank sends 2 (N - 1) / N of the bytes to the next one
    (Patarasuk and Yuan 2009, section 3)."""
    ring = torch.eye(ranks, dtype=torch.float64).roll(1, dims=1)
    return ring * (2 * (ranks - 1) / ranks * num_bytes)


# -- time ------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """Seconds of a step, and its efficiency: the samples/s of N ranks divided by N times those of
    one."""

    step: float
    efficiency: float


def predict(one_rank_step: float, bytes_by_kind: dict[str, float], bandwidth: float) -> Prediction:
    """The step time on N ranks, if each computes what one rank does in its step:

        max(T + t_embeddings + t_gradients + max(0, t_dense - 2/3 T),       the step's critical path
            t_ids + t_embeddings + t_gradients + t_dense)                   all that the links carry

    T is the step of one rank, and each t the bytes of the busiest rank divided by the bandwidth.
    The exchange of splits, lengths and ids (t_ids) is that of the next batch, in the background
    (TorchRec's TrainPipelineSparseDist). Embeddings and their gradients are waited for. The
    all-reduce of dense gradients runs during the backward, which is 2/3 of T
    (DistributedDataParallel; Li et al. 2020, arXiv:2006.15704, section 3.2.3). Efficiency is T /
    step, because each rank has its own batch.

    Left out: latencies, shards whose lookups take longer than others, waiting for the slowest rank,
    and the time that collectives take from computation on a GPU.

    Args:
        one_rank_step: seconds.
        bytes_by_kind: `Traffic.busiest`.
        bandwidth: bytes/s that a rank sends, while it receives as many.
    """
    for name, value in (("one_rank_step", one_rank_step), ("bandwidth", bandwidth)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, not {value}")
    seconds = {kind: num_bytes / bandwidth for kind, num_bytes in bytes_by_kind.items()}
    ahead = seconds["splits"] + seconds["lengths"] + seconds["ids"]
    waited = seconds["embeddings"] + seconds["gradients"]
    critical = one_rank_step + waited + max(0.0, seconds["dense"] - BACKWARD * one_rank_step)
    step = max(critical, ahead + waited + seconds["dense"])
    return Prediction(step, one_rank_step / step)


# -- program ---------------------------------------------------------------------------------------


def predicted_traffic(
    model: RankingModel,
    plan: ShardingPlan,
    batches: Sequence[RankingBatch],
    ranks: int,
    exchange: Exchange,
) -> Traffic:
    """The traffic if the ranks take these batches in turn."""
    inputs = [features(batch) for batch in batches]
    return count_traffic(
        model, plan, [inputs[rank % len(inputs)] for rank in range(ranks)], exchange
    )


def make_plan(model: RankingModel, options: argparse.Namespace, ranks: int) -> ShardingPlan:
    """The plan that sharding.py makes on this number of ranks, of which 8, or their largest common
    divisor with 8, are on a host."""
    if options.plan == "data_parallel":
        return ShardingPlan({})
    memory = int(options.memory_gb * 1e9)
    sharders = sharding.make_sharders(options.device, sharding.exchange_of(options))
    return sharding.make_planner(
        model, options.plan, options.device, ranks, math.gcd(ranks, 8), sharders, memory
    ).plan(model, sharders)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--step-ms",
        type=positive,
        required=True,
        help="step of one rank, as benchmark_scaling.py measures it",
    )
    parser.add_argument(
        "--bandwidth",
        type=positive,
        required=True,
        help="bytes/s that a rank sends, while it receives as many",
    )
    parser.add_argument(
        "--world-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 64], help="numbers of ranks"
    )
    parser.add_argument(
        "--plan",
        choices=sharding.PLANS,
        default="auto",
        help="how ranks share the embedding tables",
    )
    parser.add_argument("--device", choices=SIZES, default="cuda", help="what the plan is for")
    parser.add_argument("--memory-gb", type=positive, default=80.0, help="memory of a GPU")
    sharding.add_exchange_options(parser)
    add_model_options(parser, SIZES)
    options = parser.parse_args(arguments)
    set_sizes(options, SIZES[options.device])
    check_at_least_1(parser, options, (*COUNTS, "world_sizes"))
    return options


COLUMNS = ("ids", "embeddings", "gradients", "dense")


def summed_ids(bytes_by_kind: dict[str, float]) -> dict[str, float]:
    """The bytes by name of `COLUMNS`: splits and lengths count as ids."""
    ids = sum(bytes_by_kind[kind] for kind in ("splits", "lengths", "ids"))
    return {"ids": ids} | {kind: bytes_by_kind[kind] for kind in COLUMNS[1:]}


def print_table(rows: Iterable[tuple[int, dict[str, float], Prediction]]) -> None:
    """A line for each number of ranks, with the bytes of the busiest rank by kind."""
    print(
        f"{'ranks':>6}"
        + "".join(f"{f'{name} MB':>15}" for name in COLUMNS)
        + f"{'step ms':>10}{'efficiency':>12}"
    )
    for ranks, bytes_by_kind, prediction in rows:
        megabytes = "".join(
            f"{num_bytes / 1e6:>15,.3f}" for num_bytes in summed_ids(bytes_by_kind).values()
        )
        print(
            f"{ranks:>6}{megabytes}{1e3 * prediction.step:>10.1f}{prediction.efficiency:>12.3f}",
            flush=True,
        )


def run(options: argparse.Namespace) -> None:
    tables, batches = random_batches(options)
    model = RankingModel(tables, make_config(options), device=torch.device("meta"))
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.tables())
    print(
        f"tables of {size / 1e9:.3g} GB, plan {options.plan}, {options.batch_size} users per rank;"
        " bytes of the busiest rank per step"
    )

    def row(ranks: int) -> tuple[int, dict[str, float], Prediction]:
        plan, exchange = make_plan(model, options, ranks), sharding.exchange_of(options)
        busiest = predicted_traffic(model, plan, batches, ranks, exchange).busiest()
        return ranks, busiest, predict(1e-3 * options.step_ms, busiest, options.bandwidth)

    print_table(row(ranks) for ranks in options.world_sizes)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    try:
        run(options)
    except ValueError as error:
        sys.exit(f"communication: {error}")


if __name__ == "__main__":
    main()
