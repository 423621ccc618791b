import copy
import json
import sys
from types import ModuleType, SimpleNamespace

import benchmark_recbole
import pytest
import torch
from baselines import batches_of
from data.event_log import RatingLog
from data.logs import read_log
from generated_log import generate_log
from sequence_data import make_datasets
from torch import nn
from training import MISSED, next_item_metrics

CPU = torch.device("cpu")
MAX_HISTORY = 5
NUM_ITEMS = 30


class OfTheWholeHistory(nn.Module):
    """In RecBole's form: the score of an item depends on its id and on the order of the history."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("table", torch.rand(NUM_ITEMS + 1, NUM_ITEMS + 1, generator=generator))

    def full_sort_predict(self, interaction):
        items, lengths = interaction["item_id_list"], interaction["item_length"]
        return torch.stack(
            [self.of(row[:length].tolist()) for row, length in zip(items, lengths.tolist())]
        )

    def of(self, ids):
        return sum(self.table[id] * (place + 1) for place, id in enumerate(ids))


@pytest.fixture
def datasets():
    log = generate_log(num_users=20, num_items=NUM_ITEMS, mean_length=12, selectivity=1.0)
    return make_datasets(log, MAX_HISTORY)


@pytest.fixture
def ids():
    return torch.randperm(NUM_ITEMS, generator=torch.Generator().manual_seed(2)) + 1


def metrics_of(model, dataset, ids):
    """Metrics of the latest events' scores, with a loop over users."""
    log, ranks = dataset.log, []
    for end in dataset.windows.end.tolist():
        seen = log.item[:end][log.user[:end] == log.user[end]].tolist()
        scores = model.of([ids[item] for item in seen[-MAX_HISTORY:]])[ids]
        target = log.item[end]
        above = sum(
            bool(scores[item] >= scores[target]) for item in set(range(NUM_ITEMS)) - {*seen}
        )
        ranks.append(MISSED if target in seen else above - 1)
    return next_item_metrics(torch.tensor(ranks))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_metrics_are_those_of_the_latest_events_and_unseen_items(datasets, ids, split):
    model = OfTheWholeHistory(seed=1)
    batches = batches_of(datasets[split], CPU)
    found = benchmark_recbole.evaluate(model, batches, ids, MAX_HISTORY)
    assert found == pytest.approx(metrics_of(model, datasets[split], ids), rel=1e-12)
    assert 0 < found["ndcg@10"] < 1


def test_the_written_log_has_the_order_of_the_read_one(tmp_path):
    """Also of events a second apart, which are equal in float32, and of those at the same time."""
    begin = 2**30
    times = [begin + 1, begin, begin + 2, begin, begin, begin + 5]
    log = RatingLog.from_columns([7, 7, 7, 7, 9, 9], [3, 1, 4, 2, 1, 3], [1.0] * 6, times)
    benchmark_recbole.write_log(log, tmp_path / "log")
    found = read_log(tmp_path / "log")
    order = [str(log.item[row]) for row in range(6)]
    assert [str(found.items[item]) for item in found.item] == order
    assert found.user.tolist() == log.user.tolist()
    assert found.timestamp.tolist() == [0, 1, 2, 3, 0, 1]


def test_the_weights_of_the_best_epoch_are_tested(datasets, ids, tmp_path, monkeypatch):
    """With a stand-in for RecBole, which is not installed. Its epochs have the weights of three
    seeds, and Ctrl-C ends the last one."""
    models = [OfTheWholeHistory(seed) for seed in range(3)]
    given = {}

    class Trainer:
        def __init__(self, config, model):
            self.model = model

        def fit(self, training, validation, **_):
            for each in models:
                self.model.load_state_dict(copy.deepcopy(each.state_dict()))
                score, metrics = self._valid_epoch(validation, show_progress=False)
                assert score == metrics["ndcg@10"]
            raise KeyboardInterrupt

    def make_config(model, name, config_dict):
        given.update(config_dict, model=model)
        return {
            "model": model,
            "MODEL_TYPE": "sequential",
            "reproducibility": True,
            "device": CPU,
        } | config_dict

    dataset = SimpleNamespace(token2id=lambda _, tokens: ids[[*map(int, tokens)]].numpy())
    loader = SimpleNamespace(dataset=dataset)
    parts = {
        "recbole": {},
        "recbole.config": {"Config": make_config},
        "recbole.data": {
            "create_dataset": lambda config: dataset,
            "data_preparation": lambda config, dataset: (loader, loader, loader),
        },
        "recbole.utils": {
            "get_model": lambda name: lambda config, dataset: OfTheWholeHistory(seed=9),
            "get_trainer": lambda kind, name: Trainer,
            "init_seed": lambda seed, reproducibility: None,
        },
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents, __spec__=SimpleNamespace())
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(benchmark_recbole, "version", lambda name: f"{name}'s")
    monkeypatch.setattr(benchmark_recbole, "load_datasets", lambda options: datasets)
    monkeypatch.setattr(sys, "argv", ["benchmark_recbole.py", "--seed=5"])
    monkeypatch.chdir(tmp_path)
    options = ["--max-history", str(MAX_HISTORY), "--set", "hidden_size=32", "--out", "found.json"]
    benchmark_recbole.main(options)
    results = json.loads((tmp_path / "found.json").read_text())
    values = [metrics_of(model, datasets["valid"], ids)["ndcg@10"] for model in models]
    best = max(range(3), key=values.__getitem__)
    assert [epoch["ndcg@10"] for epoch in results["epochs"]] == pytest.approx(values)
    assert results["best_epoch"] == best + 1
    assert results["test"] == pytest.approx(metrics_of(models[best], datasets["test"], ids))
    assert given["hidden_size"] == "32" and given["MAX_ITEM_LIST_LENGTH"] == MAX_HISTORY
    assert given["eval_args"]["split"] == {"LS": "valid_and_test"} and given["seed"] == 0
    assert results["settings"]["recbole"] == "recbole's"
    assert given["gpu_id"] == ""

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(benchmark_recbole, "pick_device", torch.device)
        patch.setenv("CUDA_VISIBLE_DEVICES", "3")
        benchmark_recbole.main([*options, "--device", "cuda"])
    assert given["gpu_id"] == "3"

    models.clear()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):  # before the first epoch
        benchmark_recbole.main(options)


def test_a_missing_package_ends_with_one_line(monkeypatch):
    monkeypatch.setattr(benchmark_recbole, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="^benchmark_recbole: the package recbole is not"):
        benchmark_recbole.main([])
