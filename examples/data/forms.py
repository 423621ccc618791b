"""How logs are written: their columns, separators and units."""

import re
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path

# names of columns in lower case, without underscores
ALIASES = {
    "user": "user userid uid reviewerid visitorid customerid".split(),
    "item": "item itemid iid movieid parentasin asin productid businessid videoid".split(),
    "rating": "rating overall stars score".split(),
    "time": "time timestamp ts unixreviewtime date".split(),
}
TYPE = re.compile(":(token|float)(_seq)?$")  # in names of RecBole
NAMED_SEPARATORS = {"tab": "\t", "space": " "}
TIME_UNITS = {"s": 1, "ms": 10**3, "us": 10**6}  # in a second
HEADER = "name columns by --columns user=COLUMN item=COLUMN rating=COLUMN time=COLUMN"


@dataclass(frozen=True)
class Form:
    """How a log is written. The file decides about what is None.

    Args:
        columns: the column of `user`, `item`, `rating` and `time`: its name in the header, or its
            place, from 1.
        separator: what is between two columns.
        header: whether the first line has names of columns.
        time_unit: a key of `TIME_UNITS`; seconds if None. Dates are in UTC.
    """

    columns: dict[str, str] = field(default_factory=dict)
    separator: str | None = None
    header: bool | None = None
    time_unit: str | None = None

    def __post_init__(self) -> None:
        for role in self.columns.keys() - ALIASES:
            raise ValueError(f"columns must be of {', '.join(ALIASES)}, not of {role!r}")
        if self.columns and not {"user", "item"} <= self.columns.keys():
            raise ValueError(f"columns must name user and item, not only {', '.join(self.columns)}")
        for role, column in self.columns.items():
            if column.isdigit() and int(column) < 1:
                raise ValueError(f"the column of {role} must be a name or a place from 1, not 0")
            if self.header is False and not column.isdigit():
                raise ValueError(f"without a header, {role} must be a place, not {column!r}")


def add_form_options(parser: ArgumentParser) -> None:
    """The options of `form_of`."""
    parser.add_argument(
        "--columns",
        nargs="+",
        type=_column,
        metavar="ROLE=COLUMN",
        help=f"columns of {', '.join(ALIASES)}, by their names in the header or places from 1:"
        " user=uid item=iid time=ts; known names or MovieLens' order if not given",
    )
    parser.add_argument("--separator", help="between columns; found in the first line if not given")
    parser.add_argument(
        "--header",
        action=BooleanOptionalAction,
        help="whether the first line has names of columns; found if not given",
    )
    parser.add_argument(
        "--time-unit", choices=TIME_UNITS, help="of the log's times; seconds if not given"
    )


def form_of(options: Namespace) -> Form:
    return Form(
        dict(column.split("=", 1) for column in options.columns or ()),
        NAMED_SEPARATORS.get(options.separator, options.separator),
        options.header,
        options.time_unit,
    )


def _column(text: str) -> str:
    role, _, column = text.partition("=")
    if role not in ALIASES or not column:
        raise ArgumentTypeError(f"expected {'|'.join(ALIASES)}=COLUMN, not {text!r}")
    return text


def find_columns(path: Path, names: list[str], form: Form) -> tuple[dict[str, int], bool]:
    """The place of each column in a row, and whether the first line, with these `names`, is a
    header."""
    names = [TYPE.sub("", name.strip()) for name in names]
    if form.columns:
        by_name = {role: name for role, name in form.columns.items() if not name.isdigit()}
        if missing := [name for name in by_name.values() if name not in names]:
            raise ValueError(f"{path}: no column {', '.join(missing)} in the header {names}")
        has_header = bool(by_name) if form.header is None else form.header
        return {
            role: names.index(name) if role in by_name else int(name) - 1
            for role, name in form.columns.items()
        }, has_header
    plain = [name.replace("_", "").lower() for name in names]
    places = {
        role: next((plain.index(alias) for alias in aliases if alias in plain), None)
        for role, aliases in ALIASES.items()
    }
    places = {role: place for role, place in places.items() if place is not None}
    if form.header is not False and (form.header or places.keys() & {"user", "item"}):
        if missing := [role for role in ("user", "item") if role not in places]:
            raise ValueError(
                f"{path}: no column known as {' and '.join(missing)} in the header {names};"
                f" {HEADER}"
            )
        return places, True
    if len(names) == 2 or len(names) > 3:
        return dict(zip(ALIASES, range(4 if len(names) > 3 else 2))), False
    raise ValueError(
        f"{path}: expected the columns user, item or user, item, rating, time, not {names};"
        f" {HEADER}"
    )


def column_names(path: Path, names: list[str], form: Form) -> dict[str, str]:
    """The name of each column of a log whose columns all have `names`."""
    places, _ = find_columns(path, names, replace(form, header=True))
    if behind := [place + 1 for place in places.values() if place >= len(names)]:
        raise ValueError(f"{path}: no column {behind[0]}, only {len(names)}: {names}")
    return {role: names[place] for role, place in places.items()}
