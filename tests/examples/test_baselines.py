import json

import baselines
import numpy as np
import pytest
import torch
from data.event_log import RatingLog
from generated_log import generate_log
from sequence_data import make_datasets
from train_hstu import evaluate_popularity
from training import MISSED, next_item_metrics

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def datasets():
    return make_datasets(generate_log(num_users=40, num_items=60, mean_length=30, selectivity=1.0))


def histories(datasets, split):
    """The items of each tested user up to the split's target, and the target."""
    log, windows = datasets[split].log, datasets[split].windows
    for end in windows.end.tolist():
        items = log.item[: end + 1][log.user[: end + 1] == log.user[end]].tolist()
        yield items[:-1], items[-1]


def test_counts_are_of_the_users_that_chose_both(datasets):
    """Users' held-out events are left out, and items chosen twice count once."""
    repeated = RatingLog.from_columns(
        [0] * 6 + [1] * 4, [5, 6, 5, 7, 8, 9, 5, 7, 6, 9], [3.0] * 10, [*range(10)]
    )
    for data, with_valid in ((datasets, False), (datasets, True), (make_datasets(repeated), True)):
        expected = torch.zeros(data["test"].log.num_items, data["test"].log.num_items)
        for items, _ in histories(data, "test" if with_valid else "valid"):
            for first in set(items):
                for second in set(items):
                    expected[first, second] += 1
        assert torch.equal(baselines.counts(data, with_valid, CPU).float(), expected)


def test_ease_is_the_ridge_regression_of_each_item_by_the_others(datasets):
    chosen = torch.randn(30, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = baselines.ease(chosen.T @ chosen, penalty=2.0)
    for item in range(6):
        others = [other for other in range(6) if other != item]
        x = chosen[:, others]
        weights = torch.linalg.solve(
            x.T @ x + 2.0 * torch.eye(5, dtype=torch.float64), x.T @ chosen[:, item]
        )
        torch.testing.assert_close(found[others, item], weights, rtol=1e-9, atol=1e-12)
        assert found[item, item] == 0


def test_neighbours_are_the_most_similar_items():
    together = torch.tensor([[4.0, 2, 3], [2, 4, 0], [3, 0, 9]], dtype=torch.float64)
    cosine = {(0, 1): 2 / (4 + 1), (0, 2): 3 / (6 + 1)}
    found = baselines.similarity(together, neighbours=1, shrink=1)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[2, 0], expected[0, 1], expected[0, 2] = cosine[0, 2], cosine[0, 1], cosine[0, 2]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_metrics_are_those_of_scores_summed_over_each_users_items(datasets, decay):
    """The latest choice of an item decides about its weight."""
    generator = torch.Generator().manual_seed(1)
    items = torch.randint(30, (600,), generator=generator).numpy()
    repeated = RatingLog.from_columns(
        np.repeat(np.arange(40), 15), items, np.ones(600), np.arange(600)
    )
    for data in (datasets, make_datasets(repeated)):
        size = data["test"].log.num_items
        matrix = torch.rand(size, size, dtype=torch.float64, generator=generator)
        ranks = []
        for items, target in histories(data, "test"):
            weight = {item: decay ** (len(items) - 1 - at) for at, item in enumerate(items)}
            scores = sum(matrix[item] * each for item, each in weight.items())
            unseen = [item for item in range(size) if item not in weight and item != target]
            rank = sum(bool(scores[item] >= scores[target]) for item in unseen)
            ranks.append(MISSED if target in weight else rank)
        batches = baselines.batches_of(data["test"], CPU)
        assert baselines.evaluate(batches, matrix, decay) == pytest.approx(
            next_item_metrics(torch.tensor(ranks)), rel=1e-12
        )


def test_the_program_prints_and_writes_a_row_of_each_model(tmp_path, capsys):
    arguments = ["--users", "40", "--out", str(tmp_path / "metrics.json")]
    log = generate_log(num_users=40, selectivity=1.0, seed=0)
    baselines.main(arguments)
    results = json.loads((tmp_path / "metrics.json").read_text())
    assert len(results) == 2 * sum(len(models) for _, models in baselines.MODELS.values())
    assert results["popularity"]["test"] == pytest.approx(evaluate_popularity(make_datasets(log)))
    assert results["item-kNN"]["test"]["ndcg@10"] > results["popularity"]["test"]["ndcg@10"]
    printed = capsys.readouterr().out
    for name, result in results.items():
        assert f"{name}  " in printed and f"{result['test']['hr@10']:.4f}" in printed
        assert set(result["settings"]) - {"decay"} in (set(), {"neighbours", "shrink"}, {"penalty"})


def test_bad_input_ends_with_one_line():
    with pytest.raises(SystemExit, match="^baselines: no file or folder nowhere"):
        baselines.main(["--data", "nowhere"])


def test_a_log_with_too_many_items_is_refused(datasets, monkeypatch):
    monkeypatch.setattr(baselines, "MOST_ITEMS", 59)
    with pytest.raises(ValueError, match="a log must have at most 59 items, not 60"):
        baselines.measure(datasets, CPU)
