"""Elements of a page: tables, sections, folded text. Texts are escaped unless a parameter says that it is HTML."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from cfl.report.plots import Style
from cfl.report.tables import Cell, unbroken

Rows = Sequence[Sequence[Cell]]


def section(title: str, *parts: str, name: str = "") -> str:
    """A section; empty if all its parts are empty. parts: HTML; name: for links to the section."""
    place = f' id="{name}"' if name else ""
    return f"<section{place}>\n<h2>{escape(title)}</h2>\n{''.join(parts)}\n</section>" if any(parts) else ""


def table(titles: Sequence[str], rows: Rows, labels: int = 1) -> str:
    """A table that scrolls in its own box. labels: number of leading columns that hold names, not numbers."""
    return grouped(titles, [("", rows)], labels)


def grouped(titles: Sequence[str], blocks: Sequence[tuple[str, Rows]], labels: int = 1) -> str:
    """A table of several blocks of rows, each below its title; an empty title takes no line."""
    side = ['class="name"' if column < labels else "" for column in range(len(titles))]
    head = "".join(f'<th scope="col" {how}>{escape(text)}</th>' for text, how in zip(titles, side, strict=True))
    body = ""
    for title, rows in blocks:
        above = f'<th scope="rowgroup" class="block" colspan="{len(titles)}"><span>{escape(title)}</span></th>'
        lines = [f"<tr>{above}</tr>\n"] if title else []
        for row in rows:
            names = "".join(
                f'<th scope="row" class="name"><span>{breaking(cell.text)}</span></th>' for cell in row[:labels]
            )
            texts = (f"<b>{escape(cell.text)}</b>" if cell.best else escape(cell.text) for cell in row[labels:])
            lines.append(f"<tr>{names}{''.join(f'<td>{text}</td>' for text in texts)}</tr>\n")
        body += f"<tbody>\n{''.join(lines)}</tbody>\n"
    inside = f"<table>\n<thead><tr>{head}</tr></thead>\n{body}</table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(", ".join(titles))}">{inside}</div>'


def breaking(name: str) -> str:
    """A name that may break after punctuation, but neither within a number nor within an entry such as 9 x 100."""
    return "<wbr>".join(escape(part) for part in re.split(r"(?<=[_,=+])|(?<=\.)(?=\D)", unbroken(name)))


def folded(title: str, text: str) -> str:
    """Text that opens at a click on its title."""
    return f"<details><summary>{escape(title)}</summary>{code(text)}</details>\n"


def code(text: str) -> str:
    """Text as it stands, such as a command."""
    return f'<pre tabindex="0">{escape(text)}</pre>'


def quiet(text: str) -> str:
    """A paragraph in small print."""
    return f'<p class="quiet">{escape(text)}</p>'


def mark(style: Style) -> str:
    """The sign of a group in its colour."""
    return f'<span class="mark" style="color:{style.colour}" aria-hidden="true">{style.symbol}</span>'


def count(things: Sequence[Any], what: str) -> str:
    """Number of things with their name, as in "2 runs"."""
    return f"{len(things)} {what}{'s' * (len(things) != 1)}"


def listed(names: Iterable[str]) -> str:
    """Join names as in a sentence, without duplicates."""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} and {last}" if most else last
