"""Each factor (as 5.4×) of README.md and of docs/results.md is that of a record, in a table of the
record of its row. Each record notes when, where and how it was measured."""

import importlib
import json
import re

import pytest
from readme import ROOT

H200 = "kernels/benchmarks/results/nvidia-h200/record.json"
CPU = "kernels/benchmarks/results/cpu/record.json"
MOVE = "docs/guides/should-i-move.md"
SCALING, MOVIELENS = (
    f"examples/results/{name}.json" for name in ("ranking-scaling", "movielens-100k")
)
OURS = tuple(
    f"jagged_modules{form}" for form in ("", ", backward_workspace(0)", ", triton", ", softmax")
)
# beginning of a row's first cell -> what it is measured by: operator, table and case in a record.
# The first that fits counts; a row without an entry continues the row above.
ROWS = {
    r"\[?a whole ranking model": SCALING,
    "target attention, 10,000": ("attention", "target attention, many candidates", ".*"),
    "target attention": ("attention", "target attention", "history 1024"),
    "jagged self-attention, forward \\+ backward, on 2 CPU": CPU,
    "the same, head dim 64": ("attention", "jagged self-attention", "B64 N2048 H4 D64"),
    "(jagged )?self-attention": ("attention", "jagged self-attention", "B64 N2048 H4 D(64|128)"),
    "GDPA": ("gdpa", r"GDPA \(gelu_tanh\)", "q and kv jagged L=1024"),
    "HSTU's attention": ("gdpa", "HSTU .*", "B128 N2048 D64"),
    "HSTU attention": (
        "leaderboard",
        "HSTU attention",
        "B(128 N1024|32 N4096) D64|B(256 mean 474|128) N1024 D128",
    ),
    "HSTU layer": ("leaderboard", "HSTU layer", "B256 mean 474 N1024 D128|B512 mean 190 N2280 D64"),
    "linear compression": ("linear_compress", "batch size.*", "B=1024"),
    "block-diagonal attention": ("block_attention", "block attention.*|with rotary.*", "1609731.*"),
    "the same with rotary": ("block_attention", "with rotary.*", "1609731.*"),
    r"\[operators\]": ("jagged_ops", "Table 1.*", ".*"),
    "ranking model of": MOVIELENS,
    # of the page for those who consider to move
    "padded layers": (SCALING, ("attention", "jagged self-attention", "B64 N2048 H4 D128")),
    "FlashAttention": ("attention", "jagged self-attention", "B64 N2048 H4 D(64|128)"),
    "FlexAttention": ("gdpa", "HSTU .*", "B128 N2048 D64"),
    "Meta's GDPA": ("gdpa", r"GDPA \(gelu_tanh\)", "q and kv jagged L=1024"),
    "generative-recommenders|recsys-examples|TorchEasyRec": ("leaderboard", ".*", ".*"),
}
MEASURES = ("forward_ms", "backward_ms", "forward_backward_ms", "forward_peak_bytes")
MEASURES += ("forward_backward_peak_bytes",)


def read(name) -> dict:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def factors_between(own: dict, peer: dict, measures: tuple[str, ...]) -> set[float]:
    """How many times less a form of ours takes, and how many times more."""
    pairs = [(own[x], peer[x]) for x in measures if own.get(x) and peer.get(x)]
    return {y / x for x, y in pairs} | {x / y for x, y in pairs}


def rows_that_fit(source) -> list[dict]:
    """Rows of the record that an entry of ROWS names."""
    fits = (".*",) * 3 if source == CPU else source
    return [
        row
        for row in read(CPU if source == CPU else H200)["rows"]
        if all(re.fullmatch(x, row[key]) for x, key in zip(fits, ("op", "table", "case")))
    ]


def factors(source) -> set[float]:
    """Empty if nothing was measured. source: a file, an entry of ROWS, or several of these."""
    if source[0] == SCALING:
        return set.union(*map(factors, source))
    if source == SCALING:
        results = read(source)["results"]
        own, peer = results["jagged-compiled"], results["padded-compiled"]
        return factors_between(own, peer, ("samples_per_s", "peak_memory_mb"))
    if source == MOVIELENS:
        (ranking,) = (x for name, x in read(source).items() if name.startswith("ranking:"))
        results = [seed["results"] for seed in ranking.values()]
        pairs = [(x["attention"], x["padded"]) for x in results]
        return set.union(*(factors_between(*x, ("step_ms", "peak_memory_mb")) for x in pairs))
    cases: dict = {}
    for row in rows_that_fit(source):
        case = tuple(row[key] for key in ("op", "table", "case"))
        cases.setdefault(case, {})[row["implementation"]] = row
    return {
        factor
        for rows in cases.values()
        for own in OURS
        for peer in rows.keys() - set(OURS)
        for factor in factors_between(rows.get(own, {}), rows[peer], MEASURES)
    }


def stated(text: str) -> list[str]:
    return re.findall(r"(\d*\.?\d+)(?=×| to [\d.]+×)", text)


def is_one_of(text: str, known: set[float]) -> bool:
    """Whether a factor rounds to the text, to its last digit."""
    step = 10.0 ** -len(text.partition(".")[2])
    return any(abs(factor - float(text)) <= 0.5001 * step for factor in known)


def rows_of(page: str) -> list[tuple]:
    """The rows of the table of what is faster, and what each is measured by."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| (?:what|from) \|.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    rows, source = [], None
    for line in table.splitlines()[2:]:
        what = line.strip("| ").partition(" | ")[0] if not line.startswith("| |") else ""
        source = next((x for start, x in ROWS.items() if re.match(start, what)), source)
        rows.append((line, source))
    return rows


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", MOVE])
def test_factors_of_the_table_are_those_of_the_record(page):
    rows = rows_of(page)
    assert len(rows) >= 7 and sum(len(stated(line)) for line, _ in rows) >= 12
    wrong = {
        line: [x for x in stated(line) if not is_one_of(x, factors(source))]
        for line, source in rows
    }
    assert {line: texts for line, texts in wrong.items() if texts} == {}


@pytest.mark.parametrize("page", [MOVE, "README.md", "docs/index.md", "docs/results.md"])
def test_factors_of_the_text_are_those_of_a_record(page):
    known = set().union(*map(factors, ROWS.values()))
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [x for x in stated(text) if not is_one_of(x, known)] == []


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_a_page_says_that_rows_are_older_than_their_kernels(page, monkeypatch):
    """Each row of the table has a † if what it is measured by is older."""
    monkeypatch.syspath_prepend(ROOT / "kernels" / "benchmarks")
    sources = importlib.import_module("sources")
    current = {
        (x["op"], x["environment"]["date"]) for x in read(H200)["runs"] if sources.is_current(x)
    }
    tables = [(line, source) for line, source in rows_of(page) if isinstance(source, tuple)]
    for line, source in tables:
        runs = {(row["op"], row["date"]) for row in rows_that_fit(source)}
        assert ("†" in line) == (not runs <= current), line


def test_a_wrong_factor_is_found():
    known = factors(ROWS["HSTU's attention"])
    assert is_one_of("29", known) and not is_one_of("30", known)
    assert stated("**1.5× / 3.6× faster**, .91×, 1.3 to 7.4×, 64 × 2048") == [
        "1.5",
        "3.6",
        ".91",
        "1.3",
        "7.4",
    ]


@pytest.mark.parametrize("name", [H200, CPU])
def test_a_record_notes_when_where_and_how(name):
    """Runs of 24 November and later also note the commit and the state of their kernels."""
    record = read(name)
    for run in record["runs"]:
        facts = run["environment"]
        needed = {"date", "device", "command", "torch", "python"}
        if facts["date"] >= "2026-11-24":
            needed |= {"commit", "kernels"}
        assert needed <= facts.keys() and run["protocol"]["text"]
    begun = {(run["op"], run["environment"]["date"]) for run in record["runs"]}
    assert {(row["op"], row["date"]) for row in record["rows"]} <= begun


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples/results").iterdir()), ids=lambda path: path.stem
)
def test_results_of_examples_note_when_and_where(path):
    record = read(path)
    runs = [record.get("settings", record), *record.get("runs", [])]
    assert {"date", "commit"} <= record.keys() and any("device" in run for run in runs)


def test_figures_of_histories_in_8_bits():
    """Those of docs/serving.md, in their order."""
    record = read("examples/results/cached-ranks.json")["rows"]
    rows = {(x["dtype"], x["cache"]): x for x in record}
    fp32, bfloat16 = (rows[x, "as the model"] for x in ("float32", "bfloat16"))
    int8, float8 = (rows["float32", x] for x in ("int8", "float8"))
    assert int8["users_per_gb"] == float8["users_per_gb"]
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    paragraph = text.partition("**8 bits**")[2].partition("\n\n")[0]
    assert re.findall(r"\d+,\d{3}|\d+\.\d(?= %)|\.\d{4}", paragraph) == [
        *(f"{x['users_per_gb']:,}" for x in (fp32, bfloat16, int8)),
        *(f"{100 * x['equal_top_10']:.1f}" for x in (int8, float8, bfloat16)),
        *(f"{x['ndcg@10']:.4f}"[1:] for x in (fp32, int8, float8, bfloat16)),
    ]


LOADS = "0.25 of the knee", "0.5 of the knee", "0.75 of the knee", "knee"
BATCHES = [(users, new) for users, shares in ((1, (0, 1)), (32, (0, 0.2, 1))) for new in shares]


def figures_of_the_server(record: dict) -> list[str]:
    """Rows of the tables of docs/serving.md, "-" where nothing was measured, and a sentence about a
    soak, if there was one."""
    latencies, rows = {}, []
    for x in sorted(record["results"], key=lambda x: x["rate"]):
        key = x["way"], x.get("kind", "knee")
        if key[1] != "knee":
            latencies[key] = x
        elif key not in latencies or latencies[key].get("is_good"):
            good = x["p99_ms"] <= 80 and not (x["refused"] or x["late"] or x["failed"])
            if good or key not in latencies:
                latencies[key] = x | {"is_good": good}
            else:
                latencies[key] = latencies[key] | {"is_good": False}
    for way in dict.fromkeys(x["way"] for x in record["results"]):
        found = [latencies.get((way, kind)) for kind in LOADS]
        cells = ["-" if x is None else f"{x['p50_ms']:.1f}, {x['p99_ms']:.1f}" for x in found]
        rows.append(f"| {way} | {found[-1]['rate']:,.0f} | {' | '.join(cells)} |")
    batches = {tuple(key.split(" | ")): ms for key, ms in record["batch_ms"].items()}
    for way in dict.fromkeys(key[0] for key in batches):
        pairs = [
            [batches.get((way, f"{users} x {count}", f"events {new:g}")) for count in (10, 70)]
            for users, new in BATCHES
        ]
        cells = ["-" if None in pair else " / ".join(f"{x:.2f}" for x in pair) for pair in pairs]
        rows.append(f"| {way} | {' | '.join(cells)} |")
    if soak := record.get("soak"):
        lost = sum(x["refused"] + x["late"] + x["failed"] for x in soak)
        length = f"{sum(x['seconds'] for x in soak):.0f} s"
        end = f" and {soak[-1]['memory_mb']:,.0f} MB at the end" if len(soak) > 1 else ""
        rows.append(
            f"A soak of {length} at {soak[0]['rate']:,.0f} requests/s: p99 at most"
            f" {max(x['p99_ms'] for x in soak):.1f} ms, {lost} requests not answered, memory of the"
            f" process {soak[0]['memory_mb']:,.0f} MB after the first minute{end}."
        )
    return rows


def test_figures_of_the_server():
    record = read("examples/results/serving-h200.json")
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    section = text.partition("**One H200**")[2].partition("\n**")[0]
    rows = re.findall(r"^(?:\| (?:next-item|ranking), |A soak of ).*$", section, re.MULTILINE)
    assert rows == figures_of_the_server(record)


def test_costs_beside_recbole():
    """Those of the pages. RecBole pads each history to its number of inputs."""
    record = read("examples/results/recbole.json")
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    section = text.partition("### Beside RecBole")[2].partition("\n### ")[0]
    targets = record["targets_of_an_epoch"]
    assert f"the same {targets:,} targets" in section
    rows = re.findall(
        r"^\| [A-Z].*? \| (\d+) \| (\d+) \| ([\d,]+) \| (\d+) \|$", section, re.MULTILINE
    )
    assert len(rows) == len(record["runs"])
    for (width, inputs, number, seconds), run in zip(rows, record["runs"]):
        assert (int(width), int(inputs)) == (run["width"], run["inputs"])
        padded = run["inputs"] if "RecBole" in run["model"] else 1
        assert number == f"{run['rows_of_an_epoch']:,}" == f"{targets * padded:,}"
        assert is_one_of(seconds, {run["cpu_seconds_of_an_epoch"]})
    theirs, ours, _ = (run["cpu_seconds_of_an_epoch"] for run in record["runs"])
    guide = (ROOT / MOVE).read_text(encoding="utf-8")
    assert f"an epoch of SASRec in {ours:.0f} CPU seconds, not {theirs:.0f}" in guide


def test_gains_of_other_public_models():
    """Each row of the table in the guide of fuse_broadcasts is one or several of the record."""
    record = read("examples/results/public-models-cpu.json")["rows"]
    known = {(x["reported_gain"], x["measured_gain"], *x["eager_ms"]) for x in record}
    text = (ROOT / "docs/guides/broadcast.md").read_text(encoding="utf-8")
    table = text.partition("public-models-cpu.json")[2].partition("Of the record's models")[0]
    rows = re.findall(
        r"^\| [A-Z].*? \| .*?\| ([\d., ]+) \| ([\d., ]+) \| (.*) \|$", table, re.MULTILINE
    )
    assert len(rows) == 11
    for reported, measured, times in rows:
        times = re.findall(r"([\d.,]+) → ([\d.]+)", times)
        stated = zip(reported.split(", "), measured.split(", "), times, strict=True)
        for gain, found, (before, after) in stated:
            before = before.replace(",", "")
            rounded = (
                (x, y, f"{a:.{decimals(before)}f}", f"{b:.{decimals(after)}f}")
                for x, y, a, b in known
            )
            assert (float(gain), float(found), before, after) in rounded


def test_gains_of_public_models_on_a_gpu():
    """Each cell of the table is one or several rows of the record."""
    record = read("examples/results/public-models.json")["rows"]
    text = (ROOT / "docs/guides/broadcast.md").read_text(encoding="utf-8")
    table = text.partition("models on one H200")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ")[1:] for line in re.findall(r"^\| [A-Z].*", table, re.M)]
    assert len(rows) == 10
    stated = 0
    for cells in rows:
        for mode, gains, times in zip(("graphs", "compiled", "eager"), cells[::2], cells[1::2]):
            known = {
                (f"{x[f'{mode}_reported']:.2f}, {x[f'{mode}_measured']:.2f}", *map(number, ms))
                for x in record
                if (ms := x.get(f"{mode}_ms"))
            }
            for pair, ms in zip(gains.split("; "), times.split("; "), strict=True):
                if pair != "–":
                    assert (pair, *ms.split(" → ")) in known
                    stated += 1
    assert stated == sum(
        f"{mode}_ms" in x for x in record for mode in ("graphs", "compiled", "eager")
    )


def decimals(number: str) -> int:
    return len(number.partition(".")[2])


def test_steps_of_the_examples():
    """Those of the guide to performance, rounded as in it."""
    runs = read("examples/results/training-steps.json")["runs"]
    results = {name: x for run in runs for name, x in run["results"].items()}
    text = (ROOT / "docs/guides/performance.md").read_text(encoding="utf-8")
    sentence = text.partition("Synchronised steps")[2].partition("([record]")[0]
    dlrm = [results[name] for name in ("attention", "padded", "mean")]
    assert re.findall(r"\d+\.\d|\d+(?=,| and 18| MB)", sentence.partition("autocast")[2]) == [
        *(f"{x['step_ms']:.1f}" for x in dlrm),
        *(f"{x['peak_memory_mb']:.0f}" for x in dlrm),
        *(f"{results[name]['step_ms']:.1f}" for name in ("hstu", "sasrec")),
    ]


def number(x: float | None) -> str:
    return "–" if x is None else f"{x:.3g}".removeprefix("0")


def test_layers_beside_their_floors():
    """Each row of the table is that of the record; the share is its floor over its time."""
    rows = {(row["case"], row["implementation"]): row for row in read(H200)["rows"]}
    text = (ROOT / "docs/decisions/layers-as-nodes.md").read_text(encoding="utf-8")
    stated = re.findall(r"^\| `(\w+\(\d+, \d+\))`, (.*?) \| (.*) \|$", text, re.MULTILINE)
    assert len(stated) == 8
    forms = ["floor", "jagged_modules", "jagged_modules, compiled", "a user's layer, compiled"]
    for layer, size, cells in stated:
        found = [rows.get((f"{layer}, {size}", form)) for form in forms]
        floor, node, compiled, user = (row and row["forward_backward_ms"] for row in found)
        times = [floor, node, floor / node, compiled, user]
        memory = [row and row["forward_backward_peak_bytes"] / 2**20 for row in found[1::2]]
        expected = [number(x) for x in times]
        expected += ["–" if x is None else f"{x:,.0f}" for x in memory]
        assert cells.split(" | ") == expected, layer


def test_biases_beside_flex_attention():
    """ms forward / forward + backward, of softmax over full segments."""
    rows = {
        (row["case"], row["implementation"]): [
            number(row.get(part)) for part in ("forward_ms", "forward_backward_ms")
        ]
        for row in read(H200)["rows"]
        if row["op"] == "bias" and row["table"].startswith("softmax")
    }
    text = (ROOT / "docs/decisions/relative-bias.md").read_text(encoding="utf-8")
    table = text.partition("Beside `flex_attention`")[2]
    cases = [(dim, bias) for dim in (64, 128) for bias in ("position", "position and time")]
    for label, name in ("here", "jagged_modules"), ("`flex_attention`", "flex_attention"):
        (line,) = re.findall(rf"^\| {label} \| (.*) \|$", table, re.MULTILINE)
        found = [rows[f"B128 N1024 D{dim}", f"{name}, {bias}"] for dim, bias in cases]
        assert [cell.split(" / ") for cell in line.split(" | ")] == found


def test_dins_table():
    """ms forward, ms forward + backward, MB."""
    rows = {(row["case"], row["implementation"]): row for row in read(H200)["rows"]}
    text = (ROOT / "docs/guides/din.md").read_text(encoding="utf-8")
    table = text.partition("| activation |")[2].partition("\n\n")[0]
    stated = re.findall(r"^\| (\w+) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    assert len(stated) == 4
    for activation, *cells in stated:
        case = f"512 users, 50 per user, 400 events, E=64, {activation.lower()}"
        for cell, name in zip(cells, ("jagged_modules", "a row for each pair"), strict=True):
            row = rows[case, name]
            times = [row["forward_ms"], row["forward_backward_ms"]]
            memory = f"{row['forward_backward_peak_bytes'] / 1e6:,.0f}"
            assert cell == ", ".join([*map(number, times), memory])


def test_free_running_steps():
    """Those of the guide to performance: kept objects, new ones, on the host, graphed, padded."""
    rows = {
        (row["case"].partition(" ")[0], row["implementation"]): row["forward_backward_ms"]
        for row in read(H200)["rows"]
        if row["table"] == "free-running training steps"
    }
    text = (ROOT / "docs/guides/performance.md").read_text(encoding="utf-8")
    sentence, _, table = text.partition("free-running`")[2].partition("\n|")
    forms = [", the same objects", "", ", offsets and map on the host", ", graphed"]
    names = [*(f"JaggedTargetAttention{form}" for form in forms), "nn.MultiheadAttention, padded"]
    longer = []
    for users in 64, 512:
        (line,) = re.findall(rf"^\| {users} × \d+, 1 to .*?\| (.*) \|$", table, re.MULTILINE)
        *jagged, graphed, padded = (rows[f"B{users}", name] for name in names)
        times = [f"{x:.2f}" for x in (*jagged, graphed, padded)]
        assert line.replace("*", "").split(" | ") == times
        assert graphed < padded / 2
        longer += [round(100 * (x / padded - 1)) for x in jagged]
    stated = re.findall(r"(\d+) to (\d+) % longer", sentence)
    assert stated == [(str(min(longer)), str(max(longer)))]
