"""Contact sheets of the images that methods have made, as parts of a page."""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from cfl.core import ConfigError
from cfl.report.runs import FinishedRun
from cfl.runtime import contact_sheet

_WORDS = (
    "Images that the methods made, at the end of a task. Each row is a class, and the numbers of the rows are those of "
    "the classes of the head. The pictures are in the folder images of each run."
)


class Maker(NamedTuple):
    """A run that may have contact sheets, with its name and its mark on the page. mark: HTML."""

    name: str
    mark: str
    run: FinishedRun


def parts(makers: Iterable[Maker]) -> Iterator[str]:
    """HTML with the last contact sheet of each run, and the earlier ones folded below it; nothing without a sheet.

    Raises ConfigError for a file that holds no picture.
    """
    if having := [maker for maker in makers if maker.run.sheets]:
        yield f'<p class="quiet">{_WORDS}</p>\n<div class="figures">{"".join(map(_of_run, having))}</div>'


def _of_run(maker: Maker) -> str:
    *earlier, last = maker.run.sheets
    if not earlier:
        return f"<div>{_figure(maker, last)}</div>\n"
    drawn = "".join(_figure(maker, task) for task in reversed(earlier))
    title = f"Earlier task{'s' * (len(earlier) > 1)} of {maker.name}"
    return f"<div>{_figure(maker, last)}<details><summary>{escape(title)}</summary>{drawn}</details></div>\n"


def _figure(maker: Maker, task: int) -> str:
    path = maker.run.sheets[task]
    (width, height), rows = _read(path)
    name = escape(f"{maker.name}, task {task}")
    many = f"; {rows} rows" if rows else ""
    about = f"Images made by {name}{many}, a row for each class of the head"
    data = b64encode(path.read_bytes()).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{about}" width="{width}" height="{height}">'
    inside = f'<div class="grid">{_numbers(range(rows))}{image}</div>'
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{inside}</div>'
    return f'<figure class="sheet"><figcaption>{maker.mark} {name}</figcaption>{box}</figure>\n'


def _numbers(rows: Sequence[int]) -> str:
    """Numbers to the left of the rows of a sheet."""
    return f'<div class="rows" aria-hidden="true">{"".join(f"<span>{row}</span>" for row in rows)}</div>'


def _read(path: Path) -> tuple[tuple[int, int], int]:
    """Width and height of a sheet, and its number of rows; 0 if the file does not say it."""
    try:
        return contact_sheet.measured(path)
    except OSError:
        raise ConfigError(f"'{path}' is damaged; repeat the run, or move the file away") from None
