"""Rows of files of texts: JSON lines, and tables with a delimiter."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from cfl.core import DataError

Row = tuple[str, str, str]
"""A text, its second text (empty if there is none), and the label as written."""

_LONGEST = 1 << 24  # characters of a field; csv refuses more than 131,072 unless told otherwise


@dataclass(frozen=True)
class Columns:
    """Which columns of a file hold what.

    first: the texts; second: None, or the texts that form pairs with them; label: the labels; labels: each label as
    written, and its class number; skipped: labels whose rows are left out; only: columns with the value that the wanted
    rows have, where a file has the column; header: names of the columns, of a table whose first line has none;
    delimiter, quoted, encoding: of a table.
    """

    first: str
    second: str | None
    label: str
    labels: Mapping[str, int]
    skipped: Sequence[str] = ()
    only: Mapping[str, str] = field(default_factory=dict)
    header: Sequence[str] | None = None
    delimiter: str = "\t"
    quoted: bool = False
    encoding: str = "utf-8"


def json_lines(file: Path, columns: Columns) -> list[Row]:
    """Rows of a file with a JSON object in each line. Raises DataError for another file."""
    found: list[Row] = []
    try:
        with file.open(encoding=columns.encoding) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"line {number} of {file} is no JSON ({error}); replace the file") from error
                found += _picked([row] if isinstance(row, dict) else [{}], columns, file, number)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is no text in {columns.encoding} ({error}); replace it") from error
    return found


def delimited(file: Path, columns: Columns) -> list[Row]:
    """Rows of a table with tabs or commas. Raises DataError for a file without the columns, or one cut off."""
    before = csv.field_size_limit(_LONGEST)
    try:
        with file.open(newline="", encoding=columns.encoding) as lines:
            table = csv.reader(
                lines, delimiter=columns.delimiter, quoting=csv.QUOTE_MINIMAL if columns.quoted else csv.QUOTE_NONE
            )
            header = columns.header or next(table, [])
            rows = (dict(zip(header, row)) for row in table if row)
            return _picked(rows, columns, file, 1 if columns.header else 2)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as a table ({error}); replace it") from error
    finally:
        csv.field_size_limit(before)


def _picked(rows: Iterable[Mapping[str, Any]], columns: Columns, file: Path, first: int) -> list[Row]:
    """The wanted columns of the wanted rows. first: number of the first line, for messages."""
    wanted = [columns.first, *([columns.second] if columns.second else []), columns.label]
    found: list[Row] = []
    for number, row in enumerate(rows, first):
        if missing := [name for name in wanted if row.get(name) is None]:
            has = ", ".join(islice(row, 8)) or "nothing"
            raise DataError(f"row {number} of {file} has no {missing[0]}, it has {has}; replace the file")
        if all(row.get(name, value) == value for name, value in columns.only.items()):
            text, *other, label = (str(row[name]) for name in wanted)
            found.append((text, other[0] if other else "", label))
    return found
