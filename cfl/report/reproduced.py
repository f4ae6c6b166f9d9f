"""A paper's table next to our results."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rich.table import Table as Shown

from cfl.core.metrics import NONE
from cfl.experiments.reproduce import Cell, Score, Table, measure

Ours = Mapping[Cell, Mapping[str, Score]]
Block = tuple[str, list[str], list[list[str]]]  # title, heads, rows
_WIDE = 2  # largest number of measures with paper and ours side by side


def blocks(table: Table, ours: Ours, scale: str) -> list[Block]:
    """Return a block per column and part of the table. ours: scores by cell, empty for cells without runs.

    Only the paper scale shows differences from the paper, since shorter runs are not comparable.
    """
    found = []
    columns = list(dict.fromkeys(cell.column for cell in ours))
    cells = sorted(ours, key=lambda cell: columns.index(cell.column))
    for (column, part), group in groupby(cells, key=lambda cell: (cell.column, cell.part)):
        own = list(group)
        title = ": ".join([table.title, ", ".join(filter(None, (column, part)))])
        shown = [name for name in table.measures if any(cell.paper[name] or name in ours[cell] for cell in own)]
        heads, rows = _beside(shown, own, ours, scale == "paper") if len(shown) <= _WIDE else _below(shown, own, ours)
        found.append((title, heads, rows))
    return found


def shown(table: Table, ours: Ours, scale: str) -> Iterator[Shown | str]:
    """Blocks for the terminal, followed by notes."""
    yield from map(rich, blocks(table, ours, scale))
    yield from (f"note: {note}" for note in table.notes)
    if scale != "paper":
        yield f"note: numbers at {scale} scale differ from the paper's; compare their order"


def rich(block: Block) -> Shown:
    """Format a block for the terminal."""
    title, heads, rows = block
    shown = Shown(title=title, title_justify="left")
    for place, head in enumerate(heads):
        shown.add_column(head, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def _beside(shown: Sequence[str], cells: Iterable[Cell], ours: Ours, differ: bool) -> tuple[list[str], list[list[str]]]:
    """A row per cell: for each measure the paper's score, our score and, if wanted, the difference."""
    whats = ("paper", "ours", "difference")[: 3 if differ else 2]
    heads = ["", *(f"{measure(name)[0]} {what}" for name in shown for what in whats), "runs"]
    rows = []
    for cell in cells:
        texts = [text for name in shown for text in _three(cell.paper[name], ours[cell].get(name))[: len(whats)]]
        runs = max((score.runs or 0 for score in ours[cell].values()), default=0)
        rows.append([cell.row, *texts, str(runs or NONE)])
    return heads, rows


def _below(shown: Sequence[str], cells: Iterable[Cell], ours: Ours) -> tuple[list[str], list[list[str]]]:
    """Two rows per cell: the paper's scores, and our scores below them."""
    heads, rows = ["", "", *(measure(name)[0] for name in shown), "runs"], []
    for cell in cells:
        own = {name: ours[cell].get(name) for name in shown}
        texts = [text(score, _digits(cell.paper[name])) for name, score in own.items()]
        rows.append([cell.row, "paper", *(text(cell.paper[name]) for name in shown), ""])
        runs = max((score.runs or 0 for score in own.values() if score), default=0)
        rows.append(["", "ours", *texts, str(runs or NONE)])
    return heads, rows


def _three(printed: Score | None, own: Score | None) -> tuple[str, str, str]:
    digits = _digits(printed)
    texts = text(printed), text(own, digits)
    if own is None or printed is None or math.isnan(own.mean):
        return *texts, ""
    gap = own.gap(printed)
    return *texts, f"{own.mean - printed.mean:+.{digits}f}" + (f" ({gap:+.1f} σ)" if gap is not None else "")


def _digits(printed: Score | None) -> int:
    """Number of decimals of our scores: as many as in the paper, at least two."""
    return max(2, printed.digits if printed else 0)


def text(score: Score | None, digits: int | None = None) -> str:
    """Format a score, and a missing one as a dash. digits: number of decimals; None: as in the paper."""
    if score is None or math.isnan(score.mean):
        return NONE
    places = score.digits if digits is None else digits
    return f"{score.mean:z.{places}f}" + ("" if score.std is None else f" ± {score.std:.{places}f}")
