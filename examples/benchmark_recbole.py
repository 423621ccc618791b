"""Trains a sequence model of RecBole beside those of train_hstu.py: python
examples/benchmark_recbole.py [--data PATH] [--model SASRec] [--set KEY=VALUE ...] [--out FILE]

The split, the choice of the best epoch and the ranking are those of train_hstu.py, all else is
RecBole's. Ctrl-C ends the training, and the best epoch so far is tested.
RecBole 1.2.1 needs older packages than it says:

    pip install recbole==1.2.1 "numpy<2" "pandas<3" "setuptools<81"
"""

import argparse
import copy
import os
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import trainer
from baselines import Datasets, batches_of
from data.event_log import EventLog
from ranking_data import first_of_equal
from sequence_data import SequenceBatch
from torch import nn
from train_hstu import COLUMNS, load_datasets
from training import (
    check_at_least_1,
    next_item_metrics,
    pick_device,
    rank_unseen,
    save_json,
    seed_number,
)

NAME = "log"  # of the data set in RecBole
SETTINGS = {  # of RecBole, for the split of train_hstu.py and losses that draw no items
    "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
    "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full"},
    "train_neg_sample_args": None,
    "show_progress": False,
}


def write_log(log: EventLog, folder: Path) -> None:
    """Write the log in RecBole's form. RecBole holds times in float32, in which those a second
    apart may be equal. So the time of an event is its place in the user's history."""
    place = np.arange(len(log)) - first_of_equal(log.user)
    events = zip(log.user.tolist(), log.item.tolist(), place.tolist())
    folder.mkdir()
    with (folder / f"{NAME}.inter").open("w", encoding="utf-8") as file:
        file.write("user_id:token\titem_id:token\ttimestamp:float\n")
        file.writelines(f"{user}\t{item}\t{time}\n" for user, item, time in events)


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: list[SequenceBatch], ids: torch.Tensor, max_history: int
) -> dict[str, float]:
    """Metrics of a model of RecBole, in which item i has the id `ids[i]`."""
    model.eval()
    ranks = []
    for batch in batches:
        items = batch.ids["item"]
        lengths = items.lengths().long()
        padded = ids.new_zeros(len(lengths), max_history)
        place = torch.arange(max_history, device=ids.device)
        padded[place < lengths[:, None]] = ids[items.values()]
        scores = model.full_sort_predict({"item_id_list": padded, "item_length": lengths})
        ranks.append(rank_unseen(scores[:, ids], batch.next_items(), batch.seen["seen"]))
    return next_item_metrics(torch.cat(ranks))


def train(datasets: Datasets, options: argparse.Namespace) -> dict[str, Any]:
    """The results of each epoch, with the CPU seconds of the training up to then, and those of the
    best one's weights on the test split."""
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer, init_seed

    write_log(datasets["train"].log, Path(NAME))
    fixed = {
        "data_path": ".",
        "MAX_ITEM_LIST_LENGTH": options.max_history,
        "seed": options.seed,
        # RecBole sets the variable to it, and looks for no GPU if it is empty
        "gpu_id": os.environ.get("CUDA_VISIBLE_DEVICES", "0") if options.device == "cuda" else "",
    }
    given = dict(setting.split("=", 1) for setting in options.set)
    sys.argv[1:] = []  # which Config reads too
    config = Config(options.model, NAME, config_dict=SETTINGS | fixed | given)
    device = config["device"]
    init_seed(config["seed"], config["reproducibility"])
    dataset = create_dataset(config)
    training, validation, _ = data_preparation(config, dataset)
    model = get_model(config["model"])(config, training.dataset).to(device)
    tokens = [str(item) for item in range(datasets["train"].log.num_items)]
    ids = torch.from_numpy(dataset.token2id("item_id", tokens)).to(device)
    batches = {name: batches_of(datasets[name], device) for name in ("valid", "test")}
    epochs: list[dict[str, float]] = []
    best: dict[str, Any] = {"ndcg@10": -1.0}

    class Trainer(get_trainer(config["MODEL_TYPE"], config["model"])):
        def _valid_epoch(self, *_: Any, **__: Any) -> tuple[float, dict[str, float]]:
            metrics = evaluate(model, batches["valid"], ids, options.max_history)
            epochs.append({**metrics, "cpu_seconds": time.process_time() - begin})
            print(f"epoch {len(epochs)}  held-out NDCG@10 {metrics['ndcg@10']:.4f}", flush=True)
            if metrics["ndcg@10"] > best["ndcg@10"]:
                best.update(metrics, epoch=len(epochs), weights=copy.deepcopy(model.state_dict()))
            return metrics["ndcg@10"], metrics

    begin = time.process_time()
    try:
        Trainer(config, model).fit(training, validation, verbose=False, saved=False)
    except KeyboardInterrupt:
        if not epochs:
            raise
    model.load_state_dict(best["weights"])
    test = evaluate(model, batches["test"], ids, options.max_history)
    packages = {name: version(name) for name in ("recbole", "torch", "numpy", "pandas")}
    own = {name: getattr(options, name) for name in ("seed", "max_history", "device")}
    return {
        "settings": own | given | packages,
        "epochs": epochs,
        "best_epoch": best["epoch"],
        "test": test,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = trainer.log_parser(__doc__.partition("\n\n")[0])
    parser.add_argument("--model", default="SASRec", help="name of the model in RecBole")
    parser.add_argument("--max-history", type=int, default=50, help="most inputs of a history")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings of RecBole"
    )
    parser.add_argument("--seed", type=seed_number, default=0, help="seed")
    parser.add_argument("--out", type=Path, help="file for the metrics; none if not given")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.set_defaults(intervals=False, relative_time=0)
    options = parser.parse_args(arguments)
    check_at_least_1(parser, options, ("users", "max_history", "threads"))
    if find_spec("recbole") is None:
        sys.exit("benchmark_recbole: the package recbole is not installed; see the file's begin")
    torch.set_num_threads(options.threads)
    out = options.out and options.out.resolve()
    try:
        options.device = pick_device(options.device).type
        datasets = load_datasets(options)
    except (ValueError, OSError) as error:
        sys.exit(f"benchmark_recbole: {error}")
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # RecBole writes logs into the current folder
        results = train(datasets, options)
    trainer.print_table({"results": {options.model: results}}, COLUMNS)
    if out is not None:
        save_json(out, results)


if __name__ == "__main__":
    main()
