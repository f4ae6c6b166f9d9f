"""A paper's table beside ours, for the terminal and in Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rich.table import Table as Shown

from cfl.report.tables import NONE
from cfl.reproduce import Cell, Score, Table, measure

Ours = Mapping[Cell, Mapping[str, Score]]
Block = tuple[str, list[str], list[list[str]]]  # title, heads, rows
_WIDE = 2  # measures that a row has room for beside each other


def blocks(table: Table, ours: Ours) -> list[Block]:
    """A block for each column and part of the table; ours: what its cells gave, those without runs left empty."""
    found = []
    cells = sorted(ours, key=lambda cell: list(dict.fromkeys(c.column for c in ours)).index(cell.column))
    for (column, part), group in groupby(cells, key=lambda cell: (cell.column, cell.part)):
        own = list(group)
        title = ": ".join([table.title, ", ".join(filter(None, (column, part)))])
        shown = [name for name in table.measures if any(cell.paper[name] or name in ours[cell] for cell in own)]
        build = _beside if len(shown) <= _WIDE else _below
        found.append((title, *build(shown, own, ours)))
    return found


def shown(table: Table, ours: Ours, scale: str) -> Iterator[Shown | str]:
    """The blocks for the terminal, and what is to be known of them."""
    yield from map(rich, blocks(table, ours))
    yield from (f"note: {note}" for note in table.notes)
    if scale != "paper":
        yield f"note: at {scale} scale the numbers are others than the paper's; compare their order"


def rich(block: Block) -> Shown:
    """A block for the terminal."""
    title, heads, rows = block
    shown = Shown(title=title, title_justify="left")
    for place, head in enumerate(heads):
        shown.add_column(head, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def markdown(block: Block) -> str:
    """A block in Markdown."""
    title, heads, rows = block
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    return "\n".join([f"**{title}**", "", *(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))])


def _beside(shown: Sequence[str], cells: Iterable[Cell], ours: Ours) -> tuple[list[str], list[list[str]]]:
    """A row a cell: for each measure what the paper has, what we have, and the difference."""
    titles = [measure(name)[0] for name in shown]
    heads = ["", *(f"{title} {what}" for title in titles for what in ("paper", "ours", "difference")), "runs"]
    rows = []
    for cell in cells:
        texts = [text for name in shown for text in _three(cell.paper[name], ours[cell].get(name))]
        runs = max((score.runs or 0 for score in ours[cell].values()), default=0)
        rows.append([cell.row, *texts, str(runs or NONE)])
    return heads, rows


def _below(shown: Sequence[str], cells: Iterable[Cell], ours: Ours) -> tuple[list[str], list[list[str]]]:
    """Two rows a cell: what the paper has, and what we have below it."""
    heads, rows = ["", "", *(measure(name)[0] for name in shown), "runs"], []
    for cell in cells:
        own = [ours[cell].get(name) for name in shown]
        rows.append([cell.row, "paper", *(_text(cell.paper[name]) for name in shown), ""])
        rows.append(["", "ours", *map(_text, own), str(max((score.runs or 0 for score in own if score), default=NONE))])
    return heads, rows


def _three(printed: Score | None, own: Score | None) -> tuple[str, str, str]:
    if own is None or printed is None or own.mean != own.mean:
        return _text(printed), _text(own), ""
    gap = own.gap(printed)
    return (
        _text(printed),
        _text(own),
        f"{own.mean - printed.mean:+.2f}" + (f" ({gap:+.1f} σ)" if gap is not None else ""),
    )


def _text(score: Score | None) -> str:
    if score is None or score.mean != score.mean:
        return NONE
    digits = 3 if abs(score.mean) < 0.1 and score.std is None and score.mean else 2
    return f"{score.mean:.{digits}f}" + ("" if score.std is None else f" ± {score.std:.{digits}f}")
