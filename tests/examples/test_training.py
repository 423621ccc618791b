import math
from functools import partial

import pytest
import torch
import training
from torch.nn import functional
from torchmetrics.functional.retrieval import (
    retrieval_hit_rate,
    retrieval_normalized_dcg,
    retrieval_reciprocal_rank,
)
from torchrec import JaggedTensor
from training import (
    MISSED,
    draw_curves,
    next_item_metrics,
    peak_memory,
    pick_device,
    rank_unseen,
    ranking_metrics,
    seed_epoch,
    time_steps,
    write_atomically,
)

CPU = torch.device("cpu")


def test_auc_and_normalized_entropy_of_a_worked_case():
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0])
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0])
    metrics = ranking_metrics(logits, labels)
    # Liked at 2.0 and 0.0 against disliked at -1.0 and 0.5: three of the four pairs are in order.
    # The base rate 1/2 costs log 2.
    log_loss = sum(math.log1p(math.exp(-logit)) for logit in (2.0, 1.0, -0.5, 0.0)) / 4
    assert metrics == pytest.approx(
        {"auc": 0.75, "normalized_entropy": log_loss / math.log(2)}, rel=1e-9
    )


def test_metrics_need_both_labels():
    with pytest.raises(ValueError, match="all 3 labels are equal"):
        ranking_metrics(torch.randn(3), torch.ones(3))


@pytest.mark.parametrize("logits", [[40.0, 50.0, 50.0, 70.0], [-900.0, -50.0, -50.0, -40.0]])
def test_auc_of_logits_whose_probabilities_are_equal(logits):
    """Of the four pairs three are in order and one is a tie."""
    assert ranking_metrics(torch.tensor(logits), torch.tensor([0.0, 0.0, 1.0, 1.0]))[
        "auc"
    ] == pytest.approx(7 / 8)


def test_metrics_of_a_diverged_model():
    with pytest.raises(ValueError, match="1 of 3 logits are NaN: the training diverged"):
        ranking_metrics(torch.tensor([0.5, math.nan, 1.0]), torch.tensor([0.0, 1.0, 1.0]))


def test_rank_counts_unseen_items_that_score_at_least_as_high():
    scores = torch.tensor([[0.9, 0.5, 0.7, 0.5, 0.1]]).repeat(4, 1)
    scores[3, 2] = math.nan  # a target without a score comes last
    targets = torch.tensor([3, 3, 0, 2])
    seen = JaggedTensor(values=torch.tensor([0, 0, 0, 4]), lengths=torch.tensor([0, 1, 1, 2]))
    # The third user has seen the target before: it is missed.
    assert rank_unseen(scores, targets, seen).tolist() == [3, 2, MISSED, 2]


def test_a_missed_target_adds_nothing():
    found, with_missed = (
        next_item_metrics(torch.tensor(ranks), cutoffs=(2, 500))
        for ranks in ([0, 7], [0, 7, MISSED, MISSED])
    )
    assert with_missed == pytest.approx({name: value / 2 for name, value in found.items()})


def test_items_that_are_seen_twice_do_not_raise_the_hit_rate():
    """A model that scores the latest item highest, of users who chose each item of theirs twice."""
    items = torch.arange(50)
    seen = JaggedTensor(values=items.repeat_interleave(2), lengths=torch.full((25,), 4))
    scores = torch.nn.functional.one_hot(items[1::2], 50).float()
    metrics = next_item_metrics(rank_unseen(scores, items[1::2], seen))
    assert metrics["hr@10"] == 0 and metrics["mrr"] == pytest.approx(0)


def test_next_item_metrics_are_those_of_torchmetrics():
    scores = torch.rand(50, 30)
    targets = torch.randint(30, (50,))
    nothing = JaggedTensor(
        values=torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(50, dtype=torch.int64)
    )
    metrics = next_item_metrics(rank_unseen(scores, targets, nothing), cutoffs=(5, 20))
    relevant = functional.one_hot(targets, 30)
    expected_metrics = {
        "hr@5": partial(retrieval_hit_rate, top_k=5),
        "ndcg@5": partial(retrieval_normalized_dcg, top_k=5),
        "hr@20": partial(retrieval_hit_rate, top_k=20),
        "ndcg@20": partial(retrieval_normalized_dcg, top_k=20),
        "mrr": retrieval_reciprocal_rank,
    }
    assert list(metrics) == list(expected_metrics)
    for name, metric in expected_metrics.items():
        expected = (
            torch.stack([metric(*pair) for pair in zip(scores, relevant, strict=True)])
            .mean()
            .item()
        )
        assert 0 < metrics[name] == pytest.approx(expected, rel=1e-6)


def test_random_numbers_of_an_epoch_do_not_depend_on_earlier_ones():
    seeds = [seed_epoch(1, 2), seed_epoch(1, 3)]
    after_others = torch.rand(4)
    assert seed_epoch(1, 3) == seeds[1] != seeds[0]
    assert torch.equal(torch.rand(4), after_others)
    # the order of the data is that of all ranks, the dropout is not
    assert seed_epoch(1, 3, rank=1) == seeds[1]
    assert not torch.equal(torch.rand(4), after_others)


def test_a_failing_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "new folder" / "metrics.json"
    write_atomically(path, lambda file: file.write_text("old"))

    def fail_half_way(file):
        file.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail_half_way)
    assert path.read_text() == "old"


def test_peak_memory_is_the_most_held_at_once():
    def step():
        first = torch.ones(1_000_000)  # 4 MB
        second = first + 1  # 8 MB held
        del first
        return second * 2  # 8 MB again

    assert 8_000_000 <= peak_memory(step, CPU) < 8_100_000


def test_steps_are_timed_by_their_median(monkeypatch):
    """By a clock that the steps move. The first batch of each round takes much longer."""
    now = [0.0]

    def step(seconds):
        def move(batch):
            now[0] += seconds + batch

        return move

    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    assert time_steps({"short": step(1.0), "long": step(5.0)}, [100.0, 0.0, 0.0], CPU) == {
        "short": 1.0,
        "long": 5.0,
    }


def test_curves_show_what_they_are_given():
    epochs = [
        {"epoch": 1, "loss": 0.7, "valid_auc": 0.5},
        {"epoch": 2, "loss": 0.6, "valid_auc": 0.6},
    ]
    figure = draw_curves({"attention": epochs, "mean": epochs[:1]})
    loss, auc = ([list(line.get_ydata()) for line in axis.lines] for axis in figure.axes)
    assert (loss, auc) == ([[0.7, 0.6], [0.7]], [[0.5, 0.6], [0.5]])


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_device_must_be_there():
    assert pick_device("auto") == CPU
    with pytest.raises(ValueError, match="torch sees no GPU"):
        pick_device("cuda")


def test_unknown_device():
    with pytest.raises(ValueError, match="device must be auto, cpu, .* not 'gpu'"):
        pick_device("gpu")
