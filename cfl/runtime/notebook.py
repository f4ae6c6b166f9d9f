"""Results as HTML for notebooks: tables without style sheets and scripts, readable on light and dark pages."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from cfl.core.metrics import percent

MOST_NUMBERS = 12  # rows or columns of a shaded table with numbers; more would not be legible
MATRIX = "Accuracy on each task (columns) after each task (rows), percent"
_SHADES = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Colours (red, green, blue) of 0, 25, 50, 75 and 100 percent: viridis, by van der Walt and Smith (2015)."""


def result(metrics: Mapping[str, Any]) -> str:
    """HTML of a run: ACC and FGT, megabytes up and down, and the accuracy matrix. metrics: as in metrics.json."""
    title = f"{metrics['method']} on {metrics['benchmark']}, seed {metrics['seed']}"
    titles = ["ACC %", "FGT %", "up MB", "down MB"]
    scores = [percent(metrics["acc"]), percent(metrics["fgt"])]
    sent = [f"{metrics[way] / 1e6:.1f}" for way in ("bytes_up", "bytes_down")]
    matrix = metrics["accuracy_matrix"]
    tasks = range(len(matrix))
    return f"{table(titles, [[*scores, *sent]], title)}<p>{MATRIX}</p>{shaded(matrix, tasks, tasks)}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> str:
    """HTML of a table below its title. rows: texts, one per title of a column."""
    lines = [f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows]
    head = "".join(f"<th>{escape(text)}</th>" for text in titles)
    above = f"<p>{escape(title)}</p>" if title else ""
    return f"{above}<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def scale() -> str:
    """HTML of the scale of the shades of `shaded`."""
    colours = ",".join(f"rgb{colour}" for colour in _SHADES)
    bar = f'<span class="bar" style="background:linear-gradient(to right,{colours})"></span>'
    return f'<span class="scale" role="img" aria-label="0 to 100 percent, dark to light">0 {bar} 100 %</span>'


def shaded(rows: Sequence[Sequence[float | None]], names: Iterable[object], columns: Iterable[object]) -> str:
    """HTML of a table of fractions in percent, each on a shade from dark (0) to light (1).

    rows: None or NaN for an empty cell; names, columns: of the rows and columns. A table of more than `MOST_NUMBERS`
    rows or columns shows a number only when pointed at.
    """
    columns = list(columns)
    numbers = max(len(rows), len(columns)) <= MOST_NUMBERS
    head = "".join(f'<th scope="col">{escape(str(text))}</th>' for text in columns)
    lines = [
        f'<tr><th scope="row">{escape(str(name))}</th>{"".join(_cell(value, numbers) for value in row)}</tr>'
        for name, row in zip(names, rows, strict=True)
    ]
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: float | None, number: bool) -> str:
    if value is None or math.isnan(value):
        return "<td></td>"
    if not number:
        return f'<td style="background:{_shade(value)[0]}" title="{percent(value)} %"></td>'
    ground, ink = _shade(value)
    return f'<td style="background:{ground};color:{ink}">{100 * value:z.0f}</td>'


def _shade(value: float) -> tuple[str, str]:
    """Colour of a fraction, and black or white for the text on it: the one with a contrast of 4.5 or more."""
    place = min(max(value, 0.0), 1.0) * (len(_SHADES) - 1)
    low = min(int(place), len(_SHADES) - 2)
    mixed = [a + (b - a) * (place - low) for a, b in zip(_SHADES[low], _SHADES[low + 1], strict=True)]
    return "#" + "".join(f"{round(one):02x}" for one in mixed), "#fff" if value < 0.44 else "#000"
