"""Write reports to files; the suffix selects the format."""

import os
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from cfl.core import ConfigError, warn
from cfl.core.files import replace
from cfl.report import figures, html, runs, spreadsheet, tables, unfinished
from cfl.report.overview import overview
from cfl.report.runs import Found

_LINES = (".html", ".png", ".pdf")  # reports with lines that --highlight makes wide
_KINDS: dict[str, Callable[[Found, str | None], str | bytes]] = {
    ".html": lambda found, highlight: html.page(found, date=date.today().isoformat(), highlight=highlight),
    ".csv": lambda found, _: spreadsheet.text(found),
    ".md": lambda found, _: tables.markdown(*overview(runs.scenes(found.runs))),
    ".tex": lambda found, _: tables.latex(*overview(runs.scenes(found.runs))),
    ".png": lambda found, highlight: figures.stream(runs.scenes(found.runs), "png", highlight),
    ".pdf": lambda found, highlight: figures.stream(runs.scenes(found.runs), "pdf", highlight),
}


def files(folders: Sequence[Path], outputs: Sequence[Path], highlight: str | None = None) -> Sequence[Path]:
    """Write a report of the runs in some folders to each output.

    .html: a page; .csv: a row for each run; .md and .tex: the summary as a Markdown or LaTeX table; .png and .pdf:
    accuracy over the tasks, as a figure. highlight: a method whose lines are wide in pages and figures.
    Raises ConfigError for an unknown suffix, a folder without a finished run, an output that cannot be written, a
    figure if no run has two tasks, and a method to highlight if no run is of it or no output has lines.
    """
    for path in outputs:
        if path.suffix not in _KINDS:
            raise ConfigError(f"the name of a report must end in {', '.join(_KINDS)}, not '{path.name}'")
    if highlight is not None and not any(path.suffix in _LINES for path in outputs):
        raise ConfigError(f"--highlight is for lines; the name of one report must end in {', '.join(_LINES)}")
    found = runs.read(folders)
    others = [path.name for path in outputs if path.suffix != ".html"]  # the page lists these runs
    if others and (text := unfinished.counted(found)):
        what = "it" if len(found.failed) + len(found.unfinished) == 1 else "them"
        verb = "leaves" if len(others) == 1 else "leave"
        warn(f"of the runs, {text}; {', '.join(others)} {verb} {what} out")
    for path in outputs:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = _KINDS[path.suffix](found, highlight)
            data = content.encode() if isinstance(content, str) else content
            target = path.resolve()  # of a link
            replace(target, data, target.with_name(f".{target.name}.{os.getpid()}.tmp"))
        except OSError as error:
            raise ConfigError(f"'{path}' cannot be written ({error.strerror}); choose another --output") from None
    return outputs
