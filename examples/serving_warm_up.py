"""Warm-up of a ranker, so that no request waits for kernels to be compiled or loaded, or for graphs
to be captured."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from serving_histories import NONE, NewEvents, Request
from serving_rankers import Ranker
from serving_steps import CAPACITIES

import jagged_modules as jm

WARM_UP_USERS = 1000  # of whom some have the shortest and the longest histories


def warm_up(ranker: Ranker, max_users: int, max_candidates: int) -> None:
    """Score batches of many sizes, up to these users and candidates, so that no request waits
    for kernels to be compiled or loaded.

    Which kernels run depends on the numbers of users and candidates and on mean lengths. So
    batches have the shortest histories of some users, the longest, or both, and mix users with
    whole histories to encode and users with a new event. With graphs, it captures those of all
    combinations of capacities instead.

    Call it before the first request: no event and no history of it stays.
    """
    if ranker.run is not ranker.step:
        _capture_graphs(ranker, max_users, max_candidates)
        ranker.forget()
        ranker.counts = dict.fromkeys(ranker.counts, 0)
        return
    with_events = (
        user for user in range(ranker.histories.num_users) if ranker.histories.length(user)
    )
    users = sorted(itertools.islice(with_events, WARM_UP_USERS), key=ranker.histories.length)
    for count in _powers(2, min(max_users, len(users))):
        for chosen in (
            users[:count],
            users[-count:],
            users[: count // 2] + users[len(users) - (count + 1) // 2 :],
        ):
            # requests that need so much memory are split
            with suppress(torch.OutOfMemoryError, jm.CacheFull):
                _warm_up(ranker, chosen, max_candidates // count)
        ranker.forget()
    ranker.counts = dict.fromkeys(ranker.counts, 0)


def _capture_graphs(ranker: Ranker, max_users: int, max_candidates: int) -> None:
    """Score a batch of each combination of capacities, of users who are not in the log: so they
    have any number of events. `longest` of padded models has graphs of its own."""
    rows = _smallest("events", max_users * ranker.max_history)
    if ranker.cache is not None:  # graphs of fewer pages per user are not used behind it
        with suppress(jm.CacheFull):
            ranker.score(_new_users(ranker, 0, ranker.max_history))
    has_pages = isinstance(ranker.cache, jm.PagedHistoryCache)
    kept = _smallest("kept", max_users * ranker.max_history) if has_pages else [0]
    for cached in kept:
        ranker.forget()
        for new in rows if ranker.cache is None else [0, *rows]:
            known = _new_users(ranker, 0, max(cached - new, not new))
            batch = _new_users(ranker, max_users, new)  # who are not among the known ones
            if len(known + batch) > max_users:
                continue
            with suppress(torch.OutOfMemoryError, jm.CacheFull):
                if known and known[0].user not in ranker.cache:
                    ranker.score(known)
                known = [replace(x, events=NONE) for x in known]
                batch = known + [replace(x, stores_events=False) for x in batch]
                for targets in _smallest("targets", max_candidates):
                    candidates = np.zeros(max(1, targets + 1 - len(batch)), np.int64)
                    ranker.score([replace(batch[0], candidates=candidates), *batch[1:]])


def _new_users(ranker: Ranker, first: int, rows: int) -> list[Request]:
    """Requests of users behind those of the log, with so many events."""
    lengths = [ranker.max_history] * (rows // ranker.max_history)
    lengths += [rows % ranker.max_history] * (rows % ranker.max_history > 0)
    events = [NewEvents(*np.zeros((2, length), np.int64)) for length in lengths]
    item, user = np.zeros(1, np.int64), ranker.histories.num_users + first
    return [Request(user + i, item, new) for i, new in enumerate(events)]


def _warm_up(ranker: Ranker, users: list[int], max_candidates: int) -> None:
    item, event = np.zeros(1, np.int64), NewEvents(np.zeros(1, np.int64), np.zeros(1, np.int64))
    for num_new in {len(users), len(users) // 2, 1, 0}:
        # encodes the histories that are not cached
        ranker.score([Request(user, item) for user in users])
        if ranker.cache is not None:
            ranker.cache.evict(users[:num_new])
        ranker.score([Request(user, item, event, stores_events=False) for user in users])
    # of one user, each with a history to encode, a cached one, and a new event
    kinds = (NONE, NONE, event) if len(users) == 1 else (NONE,)
    for candidates in _powers(10, max_candidates):
        items = np.arange(candidates) % ranker.histories.num_items
        for new in kinds:
            ranker.score([Request(user, items, new, not len(new.item)) for user in users])


def _smallest(name: str, limit: int) -> list[int]:
    """The smallest size of each capacity of this argument's rows, up to the limit."""
    capacities = CAPACITIES[name]
    return [1, *(x + 1 for x in capacities[:-1] if x < limit)]


def _powers(base: int, limit: int) -> Iterator[int]:
    """1, base, base², ... below the limit, and the limit."""
    power = 1
    while power < limit:
        yield power
        power *= base
    if limit > 0:
        yield limit
