"""Reads the texts of a log's columns, in blocks of rows.

`csv` and `json` read text. pyarrow's reader takes an eighth of the time, which is 7 s for a million
rows, but no separator of two characters, and its errors do not name the line of a bad value.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, TextIO

from .forms import Form, column_names, find_columns

SEPARATORS = ("\t", "::", ",", ";")  # that a first line is searched for
BLOCK = 1 << 11  # rows; Python's garbage collector takes long to pass over many more lists
SEQUENCES = "expected ids separated by spaces: a user's id, then item ids from oldest to newest"

# numbers of lines, and texts by role
Block = tuple[Sequence[int], dict[str, list[str]]]


def read_blocks(path: Path, form: Form) -> Iterator[Block]:
    """The texts of a log's columns by role, some thousand rows at a time.

    Raises ValueError if columns are missing, there are no rows, or a compressed or Parquet file is
    damaged.
    """
    is_parquet, empty = path.is_dir() or path.suffix == ".parquet", True
    try:
        for block in (_parquet_blocks if is_parquet else _text_blocks)(path, form):
            yield block
            empty = False
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be decompressed: {error}") from error
    if empty:
        raise ValueError(f"{path} has no rows")


def _text_blocks(path: Path, form: Form) -> Iterator[Block]:
    with open_text(path) as file:
        lines = enumerate(file, start=1)
        number, first = next((line for line in lines if line[1].strip()), (0, ""))
        if not number:
            raise ValueError(f"{path} is empty")
        lines = chain([(number, first)], lines)
        separator = form.separator or next((x for x in SEPARATORS if x in first), None)
        if first.startswith("{"):
            columns = column_names(path, list(_record(path, number, first)), form)
            places = dict(zip(columns, range(4)))
            rows = _json_rows(path, lines, columns)
        elif separator is None and not form.columns:
            return (yield from _sequences(path, lines))
        else:
            separator = separator or " "
            _, names = next(_rows(path, [(number, first)], separator))
            places, has_header = find_columns(path, names, form)
            rows = islice(_rows(path, lines, separator), int(has_header), None)
        while block := list(islice(rows, BLOCK)):
            whole = list(takewhile(lambda row: max(places.values()) < len(row[1]), block))
            if whole:
                numbers, values = zip(*whole)
                yield numbers, {role: [row[at] for row in values] for role, at in places.items()}
            if len(whole) < len(block):
                number, row = block[len(whole)]
                raise ValueError(
                    f"{path}, line {number}: expected the columns {', '.join(places)} separated by"
                    f" {separator!r}, not {separator.join(row)[:100]!r}"
                )


def open_text(path: Path) -> TextIO:
    """The text of a file. Bytes that are not UTF-8 become characters that no id has."""
    how = dict(encoding="utf-8-sig", errors="surrogateescape", newline="")
    return gzip.open(path, "rt", **how) if path.suffix == ".gz" else path.open(**how)


Rows = Iterator[tuple[int, list[str]]]  # numbers of lines, and fields


def _rows(path: Path, lines: Iterable[tuple[int, str]], separator: str) -> Rows:
    """The fields of each line that is not blank. They may be quoted, unless tabs, spaces or several
    characters separate them."""
    if separator == "\t" or separator == " " or len(separator) > 1:
        for number, line in lines:
            if line.strip():
                row = line.rstrip("\r\n").split(separator)
                yield number, [field for field in row if field] if separator == " " else row
        return
    number = 0

    def texts() -> Iterator[str]:
        nonlocal number
        for at, line in lines:
            number = at
            yield line

    try:
        for row in csv.reader(texts(), delimiter=separator, strict=True):
            if len(row) > 1 or (row and row[0].strip()):
                yield number, row
    except csv.Error as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


def _json_rows(path: Path, lines: Iterable[tuple[int, str]], columns: dict[str, str]) -> Rows:
    """The fields of these columns in each line's object."""
    for number, line in lines:
        if line.strip():
            record = _record(path, number, line)
            values = {role: record.get(name) for role, name in columns.items()}
            for role, value in values.items():
                if isinstance(value, (list, dict)):  # its text would be an id
                    raise ValueError(
                        f"{path}, line {number}: expected one {role}, not {str(value)[:100]}"
                    )
            yield number, ["" if value is None else str(value) for value in values.values()]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: expected a JSON object, not {line[:100]!r}")
    return record


def _sequences(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Block]:
    """The events of a sequence file."""
    line_of: dict[str, int] = {}  # user -> number of the user's line
    numbers, users, items = [], [], []
    for number, line in lines:
        user, *own = [id for id in line.rstrip("\r\n").split(" ") if id] or [""]
        if not user:
            continue
        where = f"{path}, line {number}: {SEQUENCES};"
        if found := [separator for separator in SEPARATORS if separator in line]:
            raise ValueError(f"{where} an id must have no separator of columns, not {found[0]!r}")
        if not own:
            raise ValueError(
                f"{where} user {user} has no items. If a line has columns, give --separator"
            )
        if user in line_of:
            raise ValueError(
                f"{where} expected one line per user; user {user} has line {line_of[user]} too."
                " If a line is an event, give --columns user=1 item=2"
            )
        line_of[user] = number
        numbers += [number] * len(own)
        users += [user] * len(own)
        items += own
        if len(numbers) >= BLOCK:
            yield numbers, {"user": users, "item": items}
            numbers, users, items = [], [], []
    if numbers:
        yield numbers, {"user": users, "item": items}


def _parquet_blocks(path: Path, form: Form) -> Iterator[Block]:
    try:
        import pyarrow as pa
        from pyarrow import dataset
    except ImportError as error:
        raise ValueError(f"{path}: Parquet needs the package pyarrow, not installed") from error
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    try:
        table = dataset.dataset([str(file) for file in files], format="parquet")
        columns = column_names(path, table.schema.names, form)
        kinds = {role: table.schema.field(name).type for role, name in columns.items()}
        for role in ("user", "item"):
            if pa.types.is_floating(kinds[role]):
                raise ValueError(f"{path}: the {role}s must be integers or text, not {kinds[role]}")
        start = 1
        for batch in table.to_batches(columns=[*columns.values()], batch_size=BLOCK):
            block = {}
            for role, name in columns.items():
                values = batch.column(name)
                if pa.types.is_timestamp(kinds[role]):
                    values = values.cast(pa.timestamp("us"), safe=False)
                block[role] = [text or "" for text in values.cast(pa.string()).to_pylist()]
            if len(batch):
                yield range(start, start + len(batch)), block
            start += len(batch)
    except pa.ArrowException as error:  # files that differ in types, lists, damage
        raise ValueError(f"{path} cannot be read: {error}") from error
