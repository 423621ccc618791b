"""One program on many processes: `torchrun --nproc-per-node N program.py` shards the embedding
tables and replicates the dense layers.

Gradients. Each rank backpropagates `global_mean` of its own losses: their sum times world_size /
(number of losses of all ranks). The mean over ranks of these is the mean over all losses. Both
kinds of parameters average their gradients over ranks: DistributedDataParallel those of dense
layers and of replicated tables, the backward of TorchRec's collectives (comm_ops.py,
GRADIENT_DIVISION) those of sharded tables. So every parameter gets the gradient that one process
computes from the whole batch, however unequal the shares are.

Optimizers. A sharded table is updated in the backward (a fused optimizer), and only in the rows
that the batch reads. Adagrad with an accumulator per element gives the same result for any plan:
untouched rows stay as they are, and no value depends on the shape of a shard. Row-wise Adagrad does
not, because a column-wise shard has its own accumulator per row. FBGEMM has no Adam on the CPU.

Exchange. Two options make ranks on GPUs send fewer bytes, see `Exchange`. With neither, results are
those of one process.
"""

import argparse
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import (
    ModuleSharder,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

# Suppress notes of torch and TorchRec about their own code.
logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)
for note in ("Please use DTensor instead", "`broadcast_buffers` is deprecated"):
    warnings.filterwarnings("ignore", note, FutureWarning)

PLANS = ("auto", "row_wise", "column_wise", "table_wise", "data_parallel")
# The types of tables in a plan: those that both kinds of collections have, and whose traffic
# communication.py models.
SHARDING_TYPES = frozenset({"row_wise", "column_wise", "table_wise"})


# -- processes -------------------------------------------------------------------------------------


@contextmanager
def process_group(device_name: str, timeout: float) -> Iterator[None]:
    """The processes that torchrun started, as the default group. Without torchrun there is none,
    and the program is one process.

    Rank 0 alone prints. An error is printed by each rank that has one. If a process ends, torchrun
    ends the others at once. If one hangs, they end after `timeout` seconds in a collective.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    gpu = None
    if device_name.startswith("cuda") or (device_name == "auto" and torch.cuda.is_available()):
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout), device_id=gpu
    )
    if rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        yield
    except RuntimeError as error:
        note = (
            "If another rank ended first, this is the consequence. --resume continues from the last"
            " checkpoint."
        )
        print(
            f"rank {rank()} of {world_size()} stops: {error}\n{note}", file=sys.stderr, flush=True
        )
        raise
    # After an error the group is left alone: its destruction may wait for a rank that is gone.
    dist.destroy_process_group()
    # A sharded model is a reference cycle that holds the group, whose threads would outlive Python
    # and abort the process.
    gc.collect()


def is_distributed() -> bool:
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def rank_device(device: torch.device) -> torch.device:
    """The device of this rank: of torchrun's processes the GPU that `process_group` chose."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device.type == "cuda" and is_distributed()
        else device
    )


def barrier() -> None:
    if is_distributed():
        dist.barrier()


def all_sum(*values: float, device: torch.device) -> list[float]:
    """The sums of the values over all ranks."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    if is_distributed():
        dist.all_reduce(sums)
    return sums.tolist()


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, on the CPU. Ranks may have different numbers of rows."""
    rows = rows.cpu()
    if not is_distributed():
        return rows
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, rows)
    return torch.cat(parts)


def global_mean(losses: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mean of all ranks' losses, times the number of ranks. See the head of
    this file.

    Args:
        losses: [n], possibly empty.
    """
    count = torch.full((), float(len(losses)), device=losses.device)
    if is_distributed():
        dist.all_reduce(count)
    return losses.sum() / (count / world_size())


# -- model and optimizers --------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch.optim class and its keyword arguments."""

    optimizer: type[torch.optim.Optimizer]
    kwargs: dict[str, Any]

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return self.optimizer(parameters, **self.kwargs)


class Exchange(NamedTuple):
    """How ranks send embeddings, and their gradients, to one another.

    Attributes:
        bf16: in bfloat16 instead of fp32. TorchRec has this for GPUs.
        unique_ids: an id that a table gets several times in a rank's sequences is sent once, and so
            is its embedding. FBGEMM has this for GPUs. It waits for the GPU once per batch, ahead
            of the batch's step.
    """

    bf16: bool = False
    unique_ids: bool = False

    @property
    def itemsize(self) -> int:
        return torch.bfloat16.itemsize if self.bf16 else torch.float32.itemsize


EXACT_EXCHANGE = Exchange()


def add_exchange_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bf16-exchange",
        action="store_true",
        help="torchrun's processes send embeddings in bfloat16 (GPU only)",
    )
    parser.add_argument(
        "--unique-ids",
        action="store_true",
        help="they send each id of a batch's sequences once (GPU only)",
    )


def exchange_of(options: argparse.Namespace) -> Exchange:
    return Exchange(options.bf16_exchange, options.unique_ids)


def make_sharders(device_type: str, exchange: Exchange) -> list[ModuleSharder]:
    """TorchRec's sharders of the two kinds of collections."""
    if device_type != "cuda" and any(exchange):
        raise ValueError(f"--bf16-exchange and --unique-ids need GPUs; the device is {device_type}")
    codecs = None
    if exchange.bf16:
        config = QCommsConfig(forward_precision=CommType.BF16, backward_precision=CommType.BF16)
        codecs = get_qcomm_codecs_registry(config, device=torch.device(device_type))
    return [
        EmbeddingCollectionSharder(
            qcomm_codecs_registry=codecs, use_index_dedup=exchange.unique_ids
        ),
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs),
    ]


def build(
    make_model: Callable[[torch.device], nn.Module],
    device: torch.device,
    plan: str,
    tables: OptimizerSpec,
    dense: OptimizerSpec,
    exchange: Exchange = EXACT_EXCHANGE,
) -> tuple[nn.Module, CombinedOptimizer]:
    """The model and its optimizers. With a process group the tables are sharded.

    Seed each rank differently before the call: ranks initialise their own shards. The dense layers
    of rank 0 are broadcast.

    Args:
        make_model: makes the model on a device. Its `tables()` are the embedding tables.
        plan: one of `PLANS`.
        tables, dense: optimizers of the embedding tables and of all other parameters.
        exchange: of sharded tables.
    """
    sharders = make_sharders(device.type, exchange)
    shards_tables = is_distributed() and plan != "data_parallel"
    # a table that is sharded may fit no single device
    model = make_model(torch.device("meta") if shards_tables else device)
    is_table = set(model.tables())
    table_names = [name for name, parameter in model.named_parameters() if parameter in is_table]
    optimizers: list[KeyedOptimizer] = []
    if shards_tables:
        # a copy, because TorchRec adds to it
        apply_optimizer_in_backward(tables.optimizer, is_table, dict(tables.kwargs))
    if is_distributed():
        sharding_plan = (
            make_plan(model, device, plan, sharders) if shards_tables else ShardingPlan({})
        )
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        model = DistributedModelParallel(model, env, device, sharding_plan, sharders)
        optimizers.append(model.fused_optimizer)

    # which the fused optimizer does not update
    others = dict(in_backward_optimizer_filter(model.named_parameters()))
    replicated = {name: others.pop(name) for name in table_names if name in others}
    optimizers += [
        KeyedOptimizerWrapper(group, spec)
        for group, spec in ((others, dense), (replicated, tables))
        if group
    ]
    return model, CombinedOptimizer(optimizers)


def make_plan(
    model: nn.Module, device: torch.device, plan: str, sharders: list[ModuleSharder]
) -> ShardingPlan:
    """TorchRec's plan for the processes of the group. `plan` is the type of all tables; "auto"
    leaves the choice to the planner."""
    memory = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    )
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    planner = make_planner(model, plan, device.type, world_size(), ranks_per_host, sharders, memory)
    return planner.collective_plan(model, sharders, dist.group.WORLD)


def make_planner(
    model: nn.Module,
    plan: str,
    device_type: str,
    ranks: int,
    ranks_per_host: int,
    sharders: list[ModuleSharder],
    memory: int | None = None,
) -> EmbeddingShardingPlanner:
    """TorchRec's planner for any number of ranks, which need not be there.

    On the CPU TorchRec has no row-wise bags, because gloo cannot gather unequal shares in their
    backward. They become table-wise.

    Args:
        model: the model, which may be on the meta device.
        plan: one of `PLANS` but data_parallel.
        device_type: cpu or cuda.
        memory: bytes of a GPU; TorchRec's default, 32 GiB, if None.
    """
    constraints = {}
    for module in model.modules():
        for sharder in sharders:
            if isinstance(module, sharder.module_type):
                # Tables are not replicated one by one: FBGEMM's operator for that pools on the CPU
                # where it should not.
                types = set(sharder.sharding_types(device_type)) & SHARDING_TYPES
                if plan != "auto":
                    types = {plan if plan in types else ShardingType.TABLE_WISE.value}
                for name, table in sharder.shardable_parameters(module).items():
                    constraints[name] = ParameterConstraints(
                        sharding_types=sorted(types),
                        # Not the kernels that cache a table on the device: averages and checkpoints
                        # read the weights in place.
                        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
                        min_partition=column_width(name, table.shape[1], ranks),
                    )
    return EmbeddingShardingPlanner(
        topology=Topology(
            ranks, compute_device=device_type, local_world_size=ranks_per_host, hbm_cap=memory
        ),
        constraints=constraints,
        # a share of the memory for everything but tables
        storage_reservation=FixedPercentageStorageReservation(0.15),
    )


def column_width(table: str, embedding_dim: int, ranks: int) -> int:
    """Columns of a column-wise shard: a part for each rank if that is a multiple of 4, which FBGEMM
    needs, else all of them."""
    if embedding_dim % 4:
        raise ValueError(
            f"table {table}: FBGEMM shards embeddings whose width is a multiple of 4, not"
            f" {embedding_dim}"
        )
    width, rest = divmod(embedding_dim, ranks)
    return embedding_dim if rest or width % 4 else width


@dataclass(frozen=True)
class CustomForward:
    """What TrainPipelineBase takes for a model: the model's mode, and another forward. The other
    pipelines have an argument for this."""

    model: nn.Module
    forward: Callable

    @property
    def training(self) -> bool:
        return self.model.training

    def __call__(self, batch: Any) -> Any:
        return self.forward(batch)


def make_pipeline(
    model: nn.Module, optimizer: KeyedOptimizer, device: torch.device, forward: Callable
) -> TrainPipelineBase:
    """TorchRec's pipeline: copies the next batch ahead and, with sharded tables, exchanges its ids
    ahead.

    Args:
        forward: maps a batch to (loss, output).
    """
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        return TrainPipelineSparseDist(model, optimizer, device, custom_model_fwd=forward)
    return TrainPipelineBase(CustomForward(model, forward), optimizer, device)


def run_pipeline(pipeline: TrainPipelineBase, batches: Iterable) -> Iterator[Any]:
    """The output of each batch: of a training step, or if the model is in eval mode of its
    forward."""
    pipeline.reset()
    batches = iter(batches)
    while True:
        try:
            output = pipeline.progress(batches)
        except StopIteration:
            return
        yield output


# -- weights ---------------------------------------------------------------------------------------


def local_tensors(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What this rank holds of the weights: whole dense tensors, and shards of ShardedTensors."""
    shards = (x.local_shards() if isinstance(x, ShardedTensor) else [x] for x in weights.values())
    return [getattr(x, "tensor", x) for parts in shards for x in parts]


def clone(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: x.detach().clone(memory_format=torch.preserve_format) for name, x in weights.items()
    }


@torch.no_grad()
def copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    """Copy weights into others of the same names and plan."""
    for x, own in zip(local_tensors(source), local_tensors(target), strict=True):
        own.copy_(x)


@torch.no_grad()
def swap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Exchange the values of weights of the same names and plan."""
    if first is not second:
        for x, y in zip(local_tensors(first), local_tensors(second), strict=True):
            kept = x.clone()
            x.copy_(y)
            y.copy_(kept)


def init_optimizer_state(optimizer: CombinedOptimizer) -> None:
    """Make the tensors of the state, which torch.optim makes in its first step. This changes the
    weights: load them afterwards."""
    for _, part in optimizer.optimizers:
        if isinstance(part, KeyedOptimizerWrapper) and not part.state:
            part.init_state()
            part.zero_grad()


def optimizer_state(optimizer: CombinedOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of the state by parameter, under names that do not depend on the plan."""
    state = optimizer.state_dict()["state"]
    return {parameter: _by_common_names(tensors) for parameter, tensors in state.items() if tensors}


def _by_common_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adagrad's accumulator is "TABLE.momentum1" in FBGEMM and "sum" in torch, beside a count of
    steps without effect."""
    for name, x in tensors.items():
        if name == "sum" or name.endswith(".momentum1"):
            return {"sum": x}
    return tensors
