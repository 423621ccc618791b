"""Training on two processes equals training on one, for every sharding plan.

Ten steps of batches of five examples: rank 0 has three and rank 1 two of them, and of the last batch, which has one example, rank 1 has none.
"""

import copy
import itertools

import pytest
import torch

from ..marks import slow_after

pytest.importorskip("torchrec")

import sharding  # noqa: E402
import train_dlrm  # noqa: E402
import train_hstu  # noqa: E402
from checkpoints import find_checkpoint, save_checkpoint  # noqa: E402
from sharding import PLANS, OptimizerSpec  # noqa: E402

PROGRAMS = {"dlrm": (train_dlrm, "attention", []), "hstu": (train_hstu, "hstu", ["--temperature", "1"])}
STEPS, BATCH_SIZE = 10, 5
# Ten steps of these magnify an error little. Adagrad with its usual eps would turn a gradient that is nothing but rounding into a whole step, and
# so would Adam; HSTU at its usual temperature doubles an error per step.
OPTIMIZERS = {
    "sgd": OptimizerSpec(torch.optim.SGD, dict(lr=0.1)),
    "adagrad": OptimizerSpec(torch.optim.Adagrad, dict(lr=0.01, eps=0.1)),
}


def make_trainer(program: str, folder, plan: str = "auto", optimizer: str = "sgd"):
    """A trainer without dropout, whose training data are ten batches."""
    module, name, own = PROGRAMS[program]

    class Trainer(module.Trainer):
        def optimizers(self):
            return OPTIMIZERS[optimizer], OPTIMIZERS["sgd"]

    arguments = ["--device", "cpu", "--users", "12", "--embedding-dim", "16", "--num-heads", "2", "--dropout", "0", "--max-history", "20"]
    options = module.parse_arguments([*arguments, *own, "--batch-size", str(BATCH_SIZE), "--sharding", plan, "--out", str(folder)])
    datasets = module.load_datasets(options)
    train = copy.copy(datasets["train"])
    part = "chunks" if program == "dlrm" else "windows"
    rows = {field: rows[: (STEPS - 1) * BATCH_SIZE + 1] for field, rows in vars(getattr(train, part)).items()}
    setattr(train, part, type(getattr(train, part))(**rows))
    return Trainer(options, name, {**datasets, "train": train}, torch.device("cpu"))


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}


def save(trainer) -> None:
    save_checkpoint(trainer.checkpoints, {}, [], trainer._state())


def load(trainer) -> None:
    sharding.init_optimizer_state(trainer.optimizer)
    find_checkpoint(trainer.checkpoints).load_into(trainer._state())


def train(trainer) -> list[float]:
    """The mean loss of all ranks in each of the steps."""
    trainer.model.train()
    losses = [x for x in trainer.run(trainer.batches("train", shuffle_seed=0))]
    sums = [sharding.all_sum(x.sum().item(), len(x), device=x.device) for x in losses]
    return [total / count for total, count in sums]


def train_from_checkpoint(*args) -> tuple[list[float], dict[str, float]]:
    """Load, train and save. Returns the losses and the held-out metrics."""
    trainer = make_trainer(*args)
    load(trainer)
    losses = train(trainer)
    save(trainer)
    return losses, trainer.evaluate("valid", trainer.average.average)


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]) -> None:
    """Both sum the same terms in another order. A step rounds a weight once, and the gradient that it adds has gone through a chain of about
    twenty layers, whose roundings add up to about their square root: eight roundings per step, of the largest weight or change."""
    for name, x in expected.items():
        changed = (x - initial[name]).abs().max()
        bound = STEPS * 8 * 2**-24 * torch.maximum(x.abs().max(), changed)
        assert (actual[name] - x).abs().max() <= bound, name
        assert changed > 20 * bound, f"{name} hardly learned"


CASES = [
    *[(plan, "dlrm", "sgd") for plan in PLANS],
    *[("row_wise", "hstu", "sgd"), ("column_wise", "hstu", "adagrad"), ("data_parallel", "hstu", "adagrad")],
]
OTHERS = [case for case in itertools.product(PLANS, PROGRAMS, OPTIMIZERS) if case not in CASES]


@slow_after(len(CASES), "plan, program, optimizer", [*CASES, *OTHERS])
def test_two_processes_train_as_one(two_ranks, tmp_path, plan, program, optimizer):
    one = make_trainer(program, tmp_path, plan, optimizer)
    initial = weights(one)
    save(one)
    results = two_ranks.run(train_from_checkpoint, program, tmp_path, plan, optimizer)
    losses = train(one)
    metrics = one.evaluate("valid", one.average.average)
    expected = weights(one)
    load(one)  # what two ranks saved
    assert_equal(weights(one), expected, initial)
    for their_losses, their_metrics in results:
        assert their_losses == pytest.approx(losses, rel=STEPS * 8 * 2**-24)
        assert their_metrics == pytest.approx(metrics, rel=1e-5)
