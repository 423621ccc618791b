"""A table of the record: published figures as literals, and beside them values of measured rows.

Values without a measurement read "missing", so that a table always has the same rows.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from report import number, shorten

MISSING = "missing"
Key = tuple[str, str, str, str]  # op, table, case, implementation


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        value: key of a measured row, such as "forward_ms", or several separated by "/"; empty if
            all cells are literals.
        implementation: the implementation whose value is shown; empty: the row's.
        over: another implementation; its value divided by this one's is shown.
    """

    heading: str
    value: str = ""
    implementation: str = ""
    over: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        what: the first cell.
        case, implementation, table: of the measured row; an empty table is the headline's.
        cells: literals of the first columns; "" leaves the column's own value.
        instead: text of the first measured column of a row without a case.
    """

    what: str
    case: str = ""
    implementation: str = ""
    table: str = ""
    cells: Sequence[str] = ()
    instead: str = ""


def rows_of(cells: Mapping[str, Sequence[str]]) -> list[Row]:
    """Rows that have the names of their cases, with literals."""
    return [Row(case, case, cells=literals) for case, literals in cells.items()]


@dataclass(frozen=True)
class Headline:
    """A table of the record.

    Args:
        op: the benchmark that measures it.
        published: what is published, and the unit of all figures.
        caveat: what limits the comparison.
    """

    key: str
    title: str
    source: str
    published: str
    caveat: str
    op: str
    table: str
    columns: Sequence[Column]
    rows: Sequence[Row]


# -- values of measured rows -----------------------------------------------------------------------


def microseconds(key: str) -> Callable[[Mapping], float | None]:
    return lambda row: None if row.get(key) is None else 1e3 * row[key]


def peak_mb(row: Mapping) -> float | None:
    peak = row.get("forward_backward_peak_bytes")
    return None if peak is None else peak / 1e6


def megaflop(row: Mapping) -> float | None:
    """FLOPs of the forward in the row's note; a padded implementation's include the padding."""
    noted = re.search(r"(\d+) MFLOP", row.get("note", ""))
    return float(noted[1]) if noted else None


DERIVED = {
    "forward_us": microseconds("forward_ms"),
    "forward_backward_us": microseconds("forward_backward_ms"),
    "forward_backward_peak_mb": peak_mb,
    "mflop": megaflop,
}


def value_of(row: Mapping | None, key: str) -> float | None:
    if row is None:
        return None
    return DERIVED[key](row) if key in DERIVED else row.get(key)


def cell(headline: Headline, row: Row, column: Column, measured: Mapping[Key, Mapping]) -> str:
    """The text of a measured column: numbers, "missing", "not installed", or the status of a
    failure."""
    if not row.case:
        return ""

    def find(implementation: str) -> Mapping | None:
        return measured.get((headline.op, row.table or headline.table, row.case, implementation))

    found = find(column.implementation or row.implementation)
    if (
        found is not None
        and found["status"] != "ok"
        and value_of(found, column.value.split("/")[0]) is None
    ):
        missing = found["status"].startswith("unavailable: ModuleNotFoundError")
        return "not installed" if missing else shorten(found["status"], 40).replace("|", "\\|")
    values = [value_of(found, key) for key in column.value.split("/")]
    if column.over:
        others = [value_of(find(column.over), key) for key in column.value.split("/")]
        values = [
            other / value if value and other else None for value, other in zip(values, others)
        ]
    if all(value is None for value in values):
        return MISSING
    return " / ".join("–" if value is None else number(value) for value in values)


def cells(headline: Headline, row: Row, measured: Mapping[Key, Mapping]) -> list[str]:
    """The cells of a row after the first."""
    literals = [*row.cells, *[""] * (len(headline.columns) - len(row.cells))]
    pairs = zip(literals, headline.columns)
    texts = [
        literal or (cell(headline, row, column, measured) if column.value else "")
        for literal, column in pairs
    ]
    if row.instead:
        texts[next(i for i, column in enumerate(headline.columns) if column.value)] = row.instead
    return texts


def markdown(headline: Headline, measured: Mapping[Key, Mapping]) -> list[str]:
    lines = ["", f"## {headline.title}", "", f"Source: {headline.source}. {headline.published}", ""]
    lines += [f"Caveat: {headline.caveat}", ""]
    headings = ["", *(column.heading for column in headline.columns)]
    lines += [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return lines + [
        f"| {row.what}{mark(headline, row, measured)} |"
        f" {' | '.join(cells(headline, row, measured))} |"
        for row in headline.rows
    ]


def mark(headline: Headline, row: Row, measured: Mapping[Key, Mapping]) -> str:
    """Of a row that shows figures of a run of other kernels than now."""
    case = headline.op, row.table or headline.table, row.case
    shown = {row.implementation, *(column.implementation for column in headline.columns)}
    keys = ((*case, implementation) for implementation in shown)
    return " †" if any(measured.get(key, {}).get("outdated") for key in keys) else ""
