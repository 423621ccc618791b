"""Rankers of files of weights, and the options of the programs that serve them."""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train_dlrm
import train_hstu
from checkpoints import Weights
from data.event_log import EventLog
from published_ids import Ids, Vocabulary
from ranking_data import RankingDataset, ranges
from ranking_model import INTERACTIONS, PaddedTargetAttention
from sequence_data import SequenceDataset, Windows
from sequence_model import ENCODERS
from serving_histories import Histories
from serving_next_item import SequenceRanker
from serving_rankers import CacheKind, Ranker
from serving_ranking import RankingRanker
from training import pick_device

CACHED_PARTS = {"compress", "gdpa"}  # the user's vectors of the other parts depend on the history
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# longest windows of ranking models that are not cached by default, by device
NOT_CACHED = {"cuda": 512}
CACHE_DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def add_ranker_options(parser: argparse.ArgumentParser) -> None:
    """The options of `make_ranker` that programs have in common."""
    parser.add_argument(
        "--data",
        help="path of the log that the model was trained on; the one that it had then if not given",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the dense layers and the cache; tables are float32",
    )
    parser.add_argument(
        "--cache-dtype",
        choices=CACHE_DTYPES,
        help="8 bits for cached keys and values, for more users; those of --dtype if not given",
    )
    parser.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        help="replay batches from CUDA graphs; on a GPU they are, if not given",
    )


def uses_graphs(options: argparse.Namespace, device: torch.device) -> bool:
    """Whether batches are replayed from CUDA graphs. ValueError for --graphs on another device."""
    if options.graphs and device.type != "cuda":
        raise ValueError(f"--graphs needs a CUDA device, got {device}")
    return device.type == "cuda" if options.graphs is None else options.graphs


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """The options of one cache, of `ranker_from_options`."""
    parser.add_argument(
        "--cache-mb",
        type=float,
        help="budget of the history cache; 0: no cache, as on a GPU for ranking models of short"
        " windows if not given; else 256",
    )
    parser.add_argument(
        "--page-rows",
        type=int,
        help="rows of the cache's pages; 128 on a GPU, else 16, if not given",
    )
    parser.add_argument(
        "--history-slack",
        type=int,
        default=0,
        help="events that a next-item model's history leaves out when it outgrows the window, so"
        " that as many are appended before it is encoded anew",
    )


def ranker_from_options(
    weights: Weights, options: argparse.Namespace, without_log: bool = False
) -> Ranker:
    """The ranker of a file of weights and the options of `add_ranker_options` and
    `add_cache_options`."""
    device, megabytes = pick_device(options.device), options.cache_mb
    if megabytes is None:
        megabytes = 256 if options.cache_dtype or cache_saves_time(weights, device) else 0
    kinds = dict(
        dtype=DTYPES[options.dtype],
        graphs=uses_graphs(options, device),
        cache_dtype=CACHE_DTYPES.get(options.cache_dtype),
        without_log=without_log,
        slack=options.history_slack,
    )
    budget = int(megabytes * 1e6)
    return make_ranker(weights, device, budget, options.data, options.page_rows, **kinds)


def cache_saves_time(weights: Weights, device: torch.device) -> bool:
    """Whether a cache saves time: not on a GPU with a ranking model, whose keys and values of few
    events take less time than their pages."""
    settings = weights.settings
    return settings["model"] in ENCODERS or settings["max_history"] > NOT_CACHED.get(device.type, 0)


def options_of(program: Any, settings: dict[str, Any], data: str | None) -> argparse.Namespace:
    """The options of the training program that wrote the settings, with another path of the log if
    `data` is given. FileNotFoundError if the training's is not there."""
    options = program.parse_arguments([])
    vars(options).update({name: value for name, value in settings.items() if name in vars(options)})
    if data is None and options.data is not None and not Path(options.data).exists():
        raise FileNotFoundError(
            f"no file or folder {options.data}, where the training's log was: give --data"
        )
    return argparse.Namespace(**{**vars(options), "data": data or options.data})


def make_ranker(
    weights: Weights,
    device: torch.device,
    cache_bytes: int,
    data: str | None = None,
    page_rows: int | None = None,
    fuse_broadcasts: bool = True,
    dtype: torch.dtype = torch.float32,
    graphs: bool = False,
    cache_dtype: torch.dtype | None = None,
    without_log: bool = False,
    slack: int = 0,
) -> Ranker:
    """The ranker of a file of weights and its log. The histories are those before the test split.

    Args:
        cache_bytes: budget of the cache; 0: none.
        data: path of the training's log; the one that it had if None.
        page_rows: rows of the cache's pages; those of `PAGE_ROWS` if None.
        fuse_broadcasts: whether the interaction "padded" is passed through
            `jm.transforms.fuse_broadcasts`. Others repeat no history.
        dtype: of the dense layers and of the cache.
        graphs: whether batches are replayed from CUDA graphs.
        cache_dtype: of cached keys and values in 8 bits; `dtype` if None.
        without_log: whether no log is read, and the histories of its users are empty.
        slack: see `CacheKind`.

    Raises:
        ValueError: the model has no ranker, or none with a cache or without a log; the log is not
            that of the training; a history does not fit the cache; there is a cache_dtype or a
            slack and no cache; a slack and no next-item model.
    """
    name, cache = weights.settings["model"], CacheKind(cache_bytes, page_rows, cache_dtype, slack)
    if cache_dtype is not None and not cache_bytes:
        raise ValueError("--cache-dtype needs a cache, got --cache-mb 0")
    if slack and not (cache_bytes and name in ENCODERS):
        what = f"--cache-mb {cache_bytes / 1e6:g} of {name}"
        raise ValueError(f"--history-slack needs a next-item model with a cache, got {what}")
    if without_log and name not in ENCODERS:
        raise ValueError(f"--without-log needs a next-item model, not {name}, which has features")
    options = dict(cache=cache, dtype=dtype, graphs=graphs)
    if name in INTERACTIONS:
        ranker = _ranking_ranker(weights, device, data, **options)
        if fuse_broadcasts and isinstance(ranker.model.head.interaction, PaddedTargetAttention):
            ranker.model.head.interaction.fuse_broadcasts()
    elif name in ENCODERS:
        ranker = _sequence_ranker(weights, device, data, without_log, **options)
    else:
        raise ValueError(
            f"no ranker for the model {name!r}; models are {(*INTERACTIONS, *ENCODERS)}"
        )
    ranker.load(weights)
    ranker.check_cache()
    return ranker


def _check_log(
    weights: Weights, dataset: RankingDataset | SequenceDataset, data: str | None
) -> None:
    """ValueError unless the dataset is of the log that the weights were trained on."""
    trained, given = weights.settings.get("log_fingerprint"), dataset.log.fingerprint
    if given != trained:
        difference = (
            dataset.vocabulary.difference(weights.vocabulary)
            or "its ids are the same, its events or side features are not"
        )
        source = "the generated log" if data is None else data
        raise ValueError(
            f"{source} is not the log that the weights were trained on: fingerprint {given}, not"
            f" {trained}; {difference}"
        )


def _ranking_ranker(
    weights: Weights, device: torch.device, data: str | None, **run: Any
) -> RankingRanker:
    settings = weights.settings
    options = options_of(train_dlrm, settings, data)
    if run["cache"].max_bytes and (
        options.interaction != "attention" or not set(options.parts) <= CACHED_PARTS
    ):
        what = f"interaction {options.interaction} and parts {sorted(options.parts)}"
        raise ValueError(
            f"a cache needs the interaction 'attention' and parts of {sorted(CACHED_PARTS)}, not"
            f" {what}; serve without a cache"
        )
    dataset = train_dlrm.load_datasets(options)["test"]
    _check_log(weights, dataset, options.data)
    log, held_out = dataset.log, ranges(dataset.chunks.start, dataset.chunks.end)[0]
    model = train_dlrm.make_model(options, dataset.tables, None, device)
    state = _state(log, dataset.rating_index, held_out)
    run |= dict(max_history=options.max_history, settings=settings, vocabulary=dataset.vocabulary)
    return RankingRanker(model, dataset, **state, **run)


def _sequence_ranker(
    weights: Weights, device: torch.device, data: str | None, without_log: bool, **run: Any
) -> SequenceRanker:
    settings = weights.settings
    options = options_of(train_hstu, {**settings, "data": None} if without_log else settings, data)
    if options.model != "hstu" or options.intervals or options.relative_time:
        what = (
            f"{options.model}, intervals {options.intervals}, relative_time {options.relative_time}"
        )
        raise ValueError(
            "a next-item model is served with the encoder hstu, without intervals and"
            f" relative_time, not {what}"
        )
    if without_log:
        dataset = _without_events(weights.vocabulary)
    else:
        dataset = train_hstu.load_datasets(options)["test"]
        _check_log(weights, dataset, options.data)
    log = dataset.log
    model = train_hstu.make_model(options, options.model, log.num_items, device)
    state = _state(log, np.zeros_like(log.item), dataset.windows.end)
    run |= dict(max_history=options.max_history, settings=settings, vocabulary=dataset.vocabulary)
    return SequenceRanker(model, **state, **run)


def _without_events(vocabulary: Vocabulary) -> SequenceDataset:
    """The users and the items of a vocabulary, without events."""
    users, items = (Ids(vocabulary.names[table]) for table in ("user", "item"))
    none = np.zeros(0, np.int64)
    return SequenceDataset(EventLog(none, none, None, users, items), Windows(none, none))


def _state(log: EventLog, rating: np.ndarray, held_out: np.ndarray) -> dict[str, Any]:
    kept = np.ones(len(log), dtype=bool)
    kept[held_out] = False
    items = defaultdict(list)
    for user, item in zip(log.user[held_out].tolist(), log.item[held_out].tolist(), strict=True):
        items[user].append(item)
    return dict(histories=Histories(log, rating, kept), held_out=dict(items))
