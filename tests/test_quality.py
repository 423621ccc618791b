"""Each metric of a model (as .0924) in README.md and docs/results.md is that of a record. In a
table it is that of the row's model and the column's metric."""

import json
import re
from math import sqrt
from statistics import mean, stdev

import pytest
from readme import ROOT

METRICS = ("hr@10", "ndcg@10", "hr@50", "ndcg@50", "mrr")
PUBLISHED = {  # on Amazon Beauty, by arXiv:2508.06450 and what it cites
    "published: SASRec with sampled softmax": [[0.0921], [0.0531]],
    "published: [eSASRec](https://arxiv.org/abs/2508.06450)": [[0.0928], [0.0523]],
    "published: HSTU": [[0.0788], [0.0439]],
}
OPTIONS = {  # of a row's runs, besides the settings of all of them
    "SASRec": {"--model sasrec"},
    "HSTU": set(),
    "HSTU, `--relative-position`": {"--relative-position"},
    "HSTU, `--relative-position --relative-time 128`": {
        "--relative-position",
        "--relative-time 128",
    },
}
DECIMAL = r"(?<![\w.])\.\d+(?![\d×])"
# of the runs with earlier defaults
TABLES = {"Amazon Beauty": "Beauty", "MovieLens-100k": "MovieLens-100k"}
# of those with today's
DEFAULTS = {
    "Amazon Beauty": "Beauty",
    "Amazon Sports and Outdoors": "Sports",
    "Amazon Toys and Games": "Toys",
    "Yelp": "Yelp",
    "MovieLens-100k": "MovieLens-100k",
}


def read(name: str) -> dict:
    return json.loads((ROOT / "examples/results" / f"{name}.json").read_text(encoding="utf-8"))


def rows_of_record(data: str, earlier: bool = True) -> dict[str, list[list[float]]]:
    """Row → the mean and the standard deviation of each metric; of what has no seeds, its value.
    earlier: of the runs with the defaults of the tables, not of those with today's."""
    record = read("next-item")
    measured = {"popularity": record["popularity"][data]} if data in record["popularity"] else {}
    for name, run in record["baselines"].get(data, {}).items():
        if isinstance(run, dict):  # no note
            measured[name] = run["test"]
    rows = {name: [[test[x]] for x in METRICS] for name, test in measured.items()}
    for run in record["runs"]:
        options = {
            option
            for option in ("--model sasrec", "--relative-position", "--relative-time 128")
            if option in run["command"]
        }
        seeds = [seed["test"] for seed in run["seeds"]]
        of_table = run["data"] == data and ("--ahead 0" in run["command"]) == earlier
        # earlier settings with one seed were tried for comparison, and are in no table
        if of_table and len(seeds) > (1 if earlier else 0) and options in OPTIONS.values():
            name = next(name for name, each in OPTIONS.items() if each == options)
            values = [[seed[x] for seed in seeds] for x in METRICS]
            rows[name] = [[mean(x), *([stdev(x)] if len(x) > 1 else [])] for x in values]
    return rows


def of_recbole() -> list[list[float]]:
    seeds = [seed["test"] for seed in read("recbole")["trained"]["seeds"]]
    values = [[seed[x] for seed in seeds] for x in METRICS]
    return [[mean(x), *([stdev(x)] if len(x) > 1 else [])] for x in values]


def todays_hstu(data: str) -> list[list[float]]:
    rows = rows_of_record(data, earlier=False)
    (row,) = (values for name, values in rows.items() if name.startswith("HSTU"))
    return row


def is_rounded(text: str, value: float) -> bool:
    """Whether the value rounds to the text, as .0924, to its last digit."""
    return abs(value - float(text)) <= 0.5001 * 10.0 ** (1 - len(text))


@pytest.mark.parametrize("title", TABLES)
def test_a_row_has_the_metrics_of_its_runs(title):
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\| {title} \| .*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    known = rows_of_record(TABLES[title]) | PUBLISHED
    today = rows_of_record(TABLES[title], earlier=False)
    known["HSTU, today's defaults"] = todays_hstu(TABLES[title])
    known["SASRec, today's defaults, one seed"] = today.get("SASRec", [])
    known["SASRec of RecBole"] = of_recbole()
    lines = table.splitlines()[2:]
    assert len(lines) >= 2
    for line in lines:
        name, *cells = (cell.strip(" *") for cell in line.strip("| ").split(" | "))
        metrics = known[name.removesuffix(", earlier defaults")]
        assert metrics, line
        for cell, values in zip(cells, metrics):
            for stated, value in zip(re.findall(DECIMAL, cell), values):
                assert is_rounded(stated, value), (line, stated, value)


def standard_errors(first: list[float], second: list[float], users: int) -> float:
    """How many standard errors the first model's hit rate is above the second's, each a list of its
    seeds' values. Users are drawn, and seeds; the models are taken as independent."""
    variance = sum(
        mean(x) * (1 - mean(x)) / users + (stdev(x) ** 2 / len(x) if len(x) > 1 else 0)
        for x in (first, second)
    )
    return (mean(first) - mean(second)) / sqrt(variance)


def users_of(data: str) -> int:
    (users,) = re.findall(r"([\d,]+) users", read("next-item")["data"][data])
    return int(users.replace(",", ""))


def seeds_of_hstu(data: str, sasrec: bool = False, metric: str = "hr@10") -> list[float]:
    """The hit rate of each seed, with today's defaults; of SASRec's if so."""
    (run,) = (
        run
        for run in read("next-item")["runs"]
        if run["data"] == data
        and "--ahead 0" not in run["command"]
        and ("sasrec" in run["command"]) == sasrec
    )
    return [seed["test"][metric] for seed in run["seeds"]]


def test_models_that_are_not_trained_have_the_metrics_of_their_runs():
    """And HSTU's HR@10 is as many standard errors above the best of them as the page says."""
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| HR@10, NDCG@10 \| .*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    (_, *titles), _, hstu, *lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    record = read("next-item")
    names = ["EASE, decay", "item-kNN", "popularity"]
    fitted = [f"{name}, fitted to validation" for name in names]
    above = "HSTU above the best of the three, standard errors"
    assert [name for name, *_ in lines] == [*names, above, *fitted, above]
    assert titles == [data for data in DEFAULTS.values() if data in record["baselines"]]
    for place, data in enumerate(titles, start=1):
        measured = {"popularity": {"test": record["popularity"][data]}} | record["baselines"][data]
        stated = re.findall(DECIMAL, hstu[place])
        assert all(map(is_rounded, stated, (x for x, *_ in todays_hstu(data)[:2])))
        best: list[float] = []
        for name, *cells in lines:
            cell = cells[place - 1]
            if name in measured:
                test = measured[name]["test"]
                stated = re.findall(DECIMAL, cell)
                assert len(stated) == 2
                assert all(map(is_rounded, stated, (test[x] for x in METRICS))), (name, data)
                best.append(test["hr@10"])
            elif name != above:
                assert cell == "–"
            else:
                errors = standard_errors(seeds_of_hstu(data), [max(best)], users_of(data))
                assert cell == f"{errors:.1f}".replace("-", "−"), (data, errors)
                best.clear()


def test_claims_about_standard_errors():
    """Those above published models, and how far models fitted to validation are from HSTU."""
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    stated = re.findall(
        r"([\d.]+)(?: standard errors)? above the published|([\d.]+) above eSASRec", text
    )
    own, users = seeds_of_hstu("Beauty"), users_of("Beauty")
    published = [standard_errors(own, hr, users) for hr, _ in PUBLISHED.values()]
    assert [x or y for x, y in stated] == [f"{published[place]:.1f}" for place in (2, 0, 1)]
    record = read("next-item")
    errors = {
        (data, name, metric): standard_errors(
            seeds_of_hstu(data, metric=metric), [run["test"][metric]], users_of(data)
        )
        for data, measured in record["baselines"].items()
        for name, run in measured.items()
        if isinstance(run, dict)
        for metric in ("hr@10", "hr@50")
    }
    fitted = {
        data: errors[data, "item-kNN, fitted to validation", "hr@10"]
        for data in record["baselines"]
    }
    assert -2 < min(fitted["Sports"], fitted["Yelp"]) and 0 < fitted["Toys"] < 2
    assert max(fitted["Sports"], fitted["Yelp"], errors["Yelp", "item-kNN", "hr@10"]) < 0
    assert errors["MovieLens-100k", "EASE, decay, fitted to validation", "hr@10"] < 2
    (least,) = re.findall(r"HR@50 is at least ([\d.]+) standard errors above", text)
    assert least == f"{min(x for (*_, metric), x in errors.items() if metric == 'hr@50'):.1f}"
    (repeated,) = re.findall(r"the users of ([\d,]+) test items", record["data"]["Yelp"])
    share = int(repeated.replace(",", "")) / users_of("Yelp")
    assert f"{100 * share:.0f} % of Yelp's test items" in text
    own, other = (seeds_of_hstu("MovieLens-100k", sasrec) for sasrec in (False, True))
    assert abs(standard_errors(own, other, users_of("MovieLens-100k"))) < 2


def test_claims_about_recbole():
    """Its epochs, and how far the HR@10 of HSTU and of our SASRec is from its."""
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    seeds = read("recbole")["trained"]["seeds"]
    epochs = sorted({seed["epochs"] for seed in seeds})
    (stated,) = re.findall(r"It took ([\d to]+) epochs(, where)?", text)
    ends = [seed["epochs"] == 300 or seed["epochs"] - seed["best_epoch"] >= 11 for seed in seeds]
    assert stated[0].split(" to ") == [f"{x}" for x in (epochs[0], epochs[-1])[: len(epochs)]]
    assert all(ends) == (not stated[1])
    (claims,) = re.findall(
        r"HSTU's is ([\d.]+) standard errors (above|below) and our SASRec's ([\d.]+) (above|below)",
        text.replace("\n", " "),
    )
    its = [seed["test"]["hr@10"] for seed in seeds]
    for place, sasrec in enumerate((False, True)):
        own = seeds_of_hstu("MovieLens-100k", sasrec)
        errors = standard_errors(own, its, users_of("MovieLens-100k"))
        assert claims[2 * place] == f"{abs(errors):.1f}"
        assert (claims[2 * place + 1] == "above") == (errors >= 0)
        assert abs(errors) < 2 or "the three are not told apart" not in text


def test_todays_defaults_have_the_metrics_of_their_runs():
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| HSTU \| HR@10.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [line[0].partition(":")[0] for line in lines] == [*DEFAULTS]
    for (_, *cells), data in zip(lines, DEFAULTS.values()):
        assert len(cells) == len(METRICS)
        for cell, values in zip(cells, todays_hstu(data)):
            assert all(map(is_rounded, re.findall(DECIMAL, cell), values)), (data, cell, values)


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_metrics_of_the_text_are_those_of_a_record(page):
    known = [value for values in of_recbole() for value in values]
    of_defaults = [rows_of_record(data, earlier=False) for data in DEFAULTS.values()]
    for rows in (*map(rows_of_record, TABLES.values()), *of_defaults, PUBLISHED):
        known += [value for metrics in rows.values() for values in metrics for value in values]
    (ranking,) = (x for name, x in read("movielens-100k").items() if name.startswith("ranking:"))
    for model in ("attention", "padded", "mean"):
        areas = [seed["results"][model]["test"]["auc"] for seed in ranking.values()]
        known += [mean(areas), max(areas) - min(areas)]
    text = (ROOT / page).read_text(encoding="utf-8")
    stated = re.findall(DECIMAL, text)
    assert len(stated) >= 4
    assert [x for x in stated if not any(is_rounded(x, value) for value in known)] == []


def test_a_wrong_metric_is_found():
    assert is_rounded(".0545", 0.05448) and not is_rounded(".0545", 0.05456)
    assert standard_errors([0.5], [0.25, 0.35], 100) == pytest.approx(
        0.2 / sqrt(0.25 / 100 + 0.3 * 0.7 / 100 + 0.005 / 2)
    )
    assert is_rounded(".056", 0.05601) and not is_rounded(".056", 0.0552)
    assert re.findall(DECIMAL, "of .0545, .91×, 1.5 or 0.98") == [".0545"]
