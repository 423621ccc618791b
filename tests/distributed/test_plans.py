"""Training on two processes equals training on one, for every sharding plan.

Ten steps of batches of five examples: rank 0 has three and rank 1 two of them. The last batch has
one example, so rank 1 has none.
"""

import copy
import itertools
from functools import partial

import pytest
import torch

from ..marks import slow_after
from .ranks import one_rank
from .rounding import assert_trained_alike

pytest.importorskip("torchrec")

import sharding
import train_dlrm
import train_hstu
from checkpoints import find_checkpoint, save_checkpoint
from ranking_model import PARTS
from sharding import PLANS, OptimizerSpec

PROGRAMS = {  # program: module, model, options
    "dlrm": (train_dlrm, "attention", []),
    "whole": (
        train_dlrm,
        "attention",
        ["--parts", *PARTS, "--max-stream", "50", "--block-size", "16"],
    ),
    "hstu": (train_hstu, "hstu", ["--temperature", "4", "--intervals"]),
}
STEPS, BATCH_SIZE = 10, 5
# Ten steps of these magnify an error little. Adagrad with its usual eps would turn a gradient that
# is nothing but rounding into a whole step, and so would Adam. HSTU at its usual temperature
# doubles an error per step.
OPTIMIZERS = {
    "sgd": OptimizerSpec(torch.optim.SGD, dict(lr=0.1)),
    "adagrad": OptimizerSpec(torch.optim.Adagrad, dict(lr=0.01, eps=0.1)),
}


def make_trainer(
    program: str, folder, plan: str = "auto", optimizer: str = "sgd", device_type: str = "cpu"
):
    """A trainer without dropout, whose training data are ten batches. On a GPU it computes in fp32,
    as on the CPU."""
    module, name, own = PROGRAMS[program]

    class Trainer(module.Trainer):
        def optimizers(self):
            return OPTIMIZERS[optimizer], OPTIMIZERS["sgd"]

    arguments = (
        f"--device {device_type} --users 12 --embedding-dim 16 --num-heads 2 --dropout 0"
        " --max-history 20".split()
    )
    options = module.parse_arguments(
        [
            *arguments,
            *own,
            "--batch-size",
            str(BATCH_SIZE),
            "--sharding",
            plan,
            "--out",
            str(folder),
        ]
    )
    datasets = module.load_datasets(options)
    train = copy.copy(datasets["train"])
    part = "windows" if program == "hstu" else "chunks"
    rows = {
        field: rows[: (STEPS - 1) * BATCH_SIZE + 1]
        for field, rows in vars(getattr(train, part)).items()
    }
    setattr(train, part, type(getattr(train, part))(**rows))
    return Trainer(
        options, name, {**datasets, "train": train}, sharding.rank_device(torch.device(device_type))
    )


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}


def save(trainer) -> None:
    save_checkpoint(trainer.checkpoints, {}, trainer.vocabulary, [], trainer._state())


def load(trainer) -> None:
    sharding.init_optimizer_state(trainer.optimizer)
    find_checkpoint(trainer.checkpoints).load_into(trainer._state())


def train(trainer, steps: slice = slice(None)) -> list[float]:
    """The mean loss of all ranks in each of the steps."""
    trainer.model.train()
    losses = list(trainer.run(list(trainer.batches("train", shuffle_seed=0))[steps]))
    sums = [sharding.all_sum(x.sum().item(), len(x), device=x.device) for x in losses]
    return [total / count for total, count in sums]


def train_from_checkpoint(
    *args, steps: slice = slice(None)
) -> tuple[list[float], dict[str, float]]:
    """Load, train and save. Returns the losses and the held-out metrics."""
    trainer = make_trainer(*args)
    load(trainer)
    losses = train(trainer, steps)
    save(trainer)
    return losses, trainer.evaluate("valid", trainer.average.average)


CASES = [
    *[(plan, "dlrm", "sgd") for plan in PLANS],
    *[
        ("row_wise", "whole", "sgd"),
        ("row_wise", "hstu", "sgd"),
        ("column_wise", "hstu", "adagrad"),
        ("data_parallel", "hstu", "adagrad"),
    ],
]
OTHERS = [case for case in itertools.product(PLANS, PROGRAMS, OPTIMIZERS) if case not in CASES]


def check_two_train_as_one(ranks, *args) -> None:
    """args: of make_trainer."""
    one = make_trainer(*args)
    initial = weights(one)
    save(one)
    results = ranks.run(train_from_checkpoint, *args)
    losses = train(one)
    metrics = one.evaluate("valid", one.average.average)
    expected = weights(one)
    load(one)  # what two ranks saved
    assert_trained_alike(weights(one), expected, initial, STEPS, slow=["head.stream.pool.seeds"])
    for their_losses, their_metrics in results:
        assert their_losses == pytest.approx(losses, rel=STEPS * 8 * 2**-24)
        assert their_metrics == pytest.approx(metrics, rel=1e-5)


@slow_after(len(CASES), "plan, program, optimizer", [*CASES, *OTHERS])
def test_two_processes_train_as_one(two_ranks, tmp_path, plan, program, optimizer):
    check_two_train_as_one(two_ranks, program, tmp_path, plan, optimizer)


@pytest.mark.gpu
@pytest.mark.large_memory
@pytest.mark.parametrize("program", PROGRAMS)
def test_two_gpus_train_as_one(two_gpus, trains_tables_on_gpus, tmp_path, program):
    """All plans and optimizers, through NCCL."""
    for plan, optimizer in itertools.product(PLANS, OPTIMIZERS):
        check_two_train_as_one(
            two_gpus, program, tmp_path / f"{plan}-{optimizer}", plan, optimizer, "cuda"
        )


def test_a_run_goes_on_under_other_plans_and_on_other_numbers_of_processes(two_ranks, tmp_path):
    """With the accumulators of Adagrad, which each plan holds in another form."""
    task = "dlrm", tmp_path
    one = make_trainer(*task, optimizer="adagrad")
    initial = weights(one)
    save(one)
    losses = two_ranks.run(
        partial(train_from_checkpoint, steps=slice(0, 3)), *task, "row_wise", "adagrad"
    )[0][0]
    losses += two_ranks.run(
        partial(train_from_checkpoint, steps=slice(3, 5)), *task, "column_wise", "adagrad"
    )[0][0]
    losses += two_ranks.run(
        partial(train_from_checkpoint, steps=slice(5, 7)), *task, "data_parallel", "adagrad"
    )[0][0]
    with one_rank():
        losses += train_from_checkpoint(*task, "table_wise", "adagrad", steps=slice(7, 9))[0]
    losses += train_from_checkpoint(*task, "auto", "adagrad", steps=slice(9, STEPS))[0]
    expected_losses = train(one)
    expected = weights(one)
    load(one)
    assert losses == pytest.approx(expected_losses, rel=STEPS * 8 * 2**-24)
    assert_trained_alike(weights(one), expected, initial, STEPS)


def first_weights(folder, plan: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the table of items, and a dense weight, before training."""
    weights = make_trainer("dlrm", folder, plan).model.state_dict()
    items = weights["sequences.embeddings.item.weight"]
    return (items if plan == "data_parallel" else items.local_tensor()).detach(), weights[
        "head.over.0.weight"
    ].detach()


@pytest.mark.parametrize("plan", ["row_wise", "data_parallel"])
def test_ranks_start_with_their_own_rows_and_the_same_dense_layers(two_ranks, tmp_path, plan):
    (rows, dense), (other_rows, other_dense) = two_ranks.run(first_weights, tmp_path, plan)
    assert torch.equal(dense, other_dense)
    assert (
        torch.equal(rows, other_rows) if plan == "data_parallel" else not (rows == other_rows).any()
    )
    for x in (rows, other_rows):
        # Normal with a deviation of .05, whose estimate from n values has a relative deviation of 1
        # / sqrt(2 n).
        assert x.std().item() == pytest.approx(0.05, rel=5 / (2 * x.numel()) ** 0.5)
