"""Rankings with histories cached in 8 bits, of a model of generated data."""

import json

import numpy as np
import pytest

# `make test-gpu` also runs without it
pytest.importorskip("torchrec", reason="the programs need it")

import cached_ranks
import torch
from serving_rankers import NONE, Request
from torchrec import JaggedTensor

from .serving import ranker_of


def test_ranks_with_a_cache_in_8_bits(served, tmp_path, capsys):
    """Each last event is appended to cached rows. A cache in fp32 changes no ranking, one in 8 bits
    few, and holds almost 4 times the users of fp32, twice those of bfloat16."""
    path = tmp_path / "ranks.json"
    arguments = ["--weights", str(served["hstu"]), "--cache-mb", "10", "--device", "cpu"]
    cached_ranks.main([*arguments, "--json", str(path)])
    rows = {(x["dtype"], x["cache"]): x for x in json.loads(path.read_text())["rows"]}
    assert (
        len(rows) == 8 and str(rows["float32", "int8"]["users_per_gb"]) in capsys.readouterr().out
    )
    none, fp32, int8, float8 = (rows["float32", name] for name in cached_ranks.CACHES)
    assert none["equal_top_10"] == fp32["equal_top_10"] == 1 and none["hr@10"] == fp32["hr@10"]
    assert fp32["appended"] > 10 and "users_per_gb" not in none
    for row in rows.values():
        assert row["top_10_in_common"] > 0.9
        if row["cache"] not in ("none", "as the model"):
            row_bytes = 8 * 2 + 4  # 8 numbers of keys and 8 of values, and their factor
            of_model = 1e9 / fp32["users_per_gb"]
            assert 1e9 / row["users_per_gb"] == pytest.approx(of_model * row_bytes / 64, rel=1e-3)
    assert 0 < max(1 - x["top_10_in_common"] for x in (int8, float8))  # the cache is in 8 bits


def test_the_scores_are_those_of_the_whole_history(served):
    """Without a cache: of all items after the log's events before the held-out one."""
    scores, targets, seen = cached_ranks.scores_of(ranker_of(served["hstu"], 0))
    whole = ranker_of(served["hstu"], 0)
    users = list(whole.held_out)
    assert len(users) == len(scores) == len(targets) == len(seen.lengths())
    for user, row, target, items in zip(users, scores, targets, seen.to_dense(), strict=True):
        request = Request(user, np.arange(whole.histories.num_items))
        torch.testing.assert_close(row, whole.score([request])[0])
        assert [target] == whole.held_out[user]
        assert items.tolist() == whole.histories.window(user, NONE, 10**9).item.tolist()


def test_best_unseen():
    scores = torch.arange(24.0).reshape(2, 12)
    seen = JaggedTensor(torch.tensor([11, 0, 10]), lengths=torch.tensor([1, 2]))
    best = cached_ranks.best_unseen(scores, seen)
    assert [x.nonzero().flatten().tolist() for x in best] == [[*range(1, 11)], [*range(1, 10), 11]]
    assert torch.equal(scores, torch.arange(24.0).reshape(2, 12))
    few = cached_ranks.best_unseen(
        torch.zeros(1, 3), JaggedTensor(torch.tensor([1]), lengths=torch.tensor([1]))
    )
    assert few.tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("attention", [], "must be of a next-item model, not attention"),
        ("hstu", ["--data", "no.csv"], "cached_ranks: no file or folder no.csv"),
        ("hstu", ["--page-rows", "0"], "cached_ranks: page_rows must be at least 1, got 0"),
    ],
    ids=["model", "data", "pages"],
)
def test_bad_arguments_end_with_one_line(served, model, options, message):
    with pytest.raises(SystemExit, match=message):
        cached_ranks.main(["--weights", str(served[model]), "--device", "cpu", *options])


def test_a_dtype_without_a_cache(served):
    with pytest.raises(ValueError, match="--cache-dtype needs a cache, got --cache-mb 0"):
        ranker_of(served["attention"], 0, cache_dtype=torch.int8)
