"""Figures of results, as PNG files or SVG text. Importing this module does not import matplotlib."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from io import BytesIO, StringIO
from pathlib import Path
from textwrap import fill
from typing import Any
from zlib import crc32

import numpy as np

from cfl.core import ConfigError
from cfl.core.metrics import seen_accuracy
from cfl.report import tables
from cfl.runtime.notebook import MOST_NUMBERS

# Okabe and Ito (2008), with grey and purple for black and yellow: for colour-blind readers, on white and on black.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080", "#AA3377")
_MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "*": "★", "P": "✚"}
_INK = "#010203"  # placeholder for the colour of the surrounding text, as in page.mplstyle


@dataclass(frozen=True)
class Style:
    """Colour and marker of a group in every figure, chosen by its number. symbol: the marker as a character.

    width: of its lines, points.
    """

    number: int
    width: float = 1.6

    @property
    def colour(self) -> str:
        return _COLOURS[self.number % len(_COLOURS)]

    @property
    def marker(self) -> str:
        """Marker; another one when the colours repeat, since there are fewer."""
        return list(_MARKERS)[self.number % len(_MARKERS)]

    @property
    def symbol(self) -> str:
        return _MARKERS[self.marker]


@dataclass(frozen=True)
class Series:
    """Values of a group at the positions x: mean and standard deviation over its runs, NaN for missing values."""

    label: str
    style: Style
    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def lines(series: Sequence[Series], *, about: str, marks: bool = True, breaks: Sequence[int] = (), **axes: Any) -> str:
    """SVG with a line per group, and its standard deviation as a shade. about: description for screen readers.

    The vertical axis starts at 0, so that heights can be compared; with a negative mean, it starts below the lines.
    marks: draw markers; breaks: positions of vertical lines, such as starts of tasks; axes: properties, such as xlabel.
    """
    with _drawing():
        figure, plot = _figure(1, *_SIZE)
        for one in series:
            _curve(plot, one, one.style.marker if marks else "")
        for place in breaks:
            plot.axvline(place, color=_INK, alpha=0.25, linewidth=0.6, linestyle=":")
        plot.set(**axes)
        if not any((one.mean < 0).any() for one in series):
            plot.update_datalim([(0, 0)], updatex=False)  # so that the margin above is a share of the whole axis
            plot.set_ylim(bottom=0)
        if marks:
            plot.set_xticks(_ticks(max(len(one.x) for one in series)))
        else:
            plot.xaxis.get_major_locator().set_params(integer=True)
        return _svg(figure, about)


@contextmanager
def _as_written() -> Iterator[None]:
    """Names in figures may have dollar signs, between which matplotlib would set mathematics."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        yield


@_as_written()
def panels(shown: Sequence[tuple[str, Sequence[Series]]], kind: str, **axes: Any) -> bytes:
    """A file with a panel for each title, two in a row, and a line for each group in it. kind: "png" or "pdf".

    The panels share the vertical axis, which fits the lines. axes: as for `lines`.
    """
    rows, columns = -(-len(shown) // 2), min(2, len(shown))
    labels = {one.label: _wrapped(one.label, 34) for _, series in shown for one in series}
    high = max(3.9 * rows, 0.5 + 0.2 * sum(text.count("\n") + 1 for text in labels.values()))  # inches
    figure, grid = _figure(columns, high, 4.3 * columns + 3.2, nrows=rows, sharey=True, squeeze=False)
    known: dict[str, Any] = {}
    for plot, (title, series) in zip(grid.flat, shown, strict=False):
        known |= {labels[one.label]: _curve(plot, one, one.style.marker) for one in series}
        plot.set(xticks=_ticks(max(len(one.x) for one in series)), **axes)
        plot.set_title(_wrapped(title, 48), fontsize=10)
        plot.grid(alpha=0.3)
    for plot in grid.flat[len(shown) :]:
        plot.set_visible(False)
    for plot in grid[:, 1:].flat:
        plot.set_ylabel("")
    figure.legend(known.values(), known, loc="outside right center", frameon=False, fontsize=9)
    file = BytesIO()
    figure.savefig(file, format=kind, dpi=150, metadata={"CreationDate": None} if kind == "pdf" else None)
    return file.getvalue()


def _curve(plot: Any, one: Series, marker: str) -> Any:
    """Draw the mean as a line, which is returned, and the standard deviation as a shade."""
    look = {"color": one.style.colour, "linewidth": one.style.width, "marker": marker, "markersize": 5}
    (line,) = plot.plot(one.x, one.mean, zorder=2 + one.style.width / 10, **look)  # a wide line hides narrow ones
    if np.nanmax(one.std, initial=0) > 0:
        plot.fill_between(
            one.x, one.mean - one.std, one.mean + one.std, color=one.style.colour, alpha=0.18, linewidth=0
        )
    return line


def _wrapped(text: str, width: int) -> str:
    """Text in lines of `width` characters; values of a list are kept whole, also those written as 9 x 100."""
    return fill(re.sub(r",(?=\S)", ", ", tables.unbroken(text)), width)


def bars(names: Sequence[str], series: Sequence[Series], *, about: str, **axes: Any) -> str:
    """SVG with a bar per name and group, and its standard deviation. about, axes: as for `lines`."""
    with _drawing():
        figure, plot = _figure(1, *_SIZE)
        width = 0.84 / len(series)
        for number, one in enumerate(series):
            places = one.x + (number - (len(series) - 1) / 2) * width
            error = {"ecolor": _INK, "elinewidth": 0.8, "capsize": 1.5}
            std = one.std if one.std.any() else None
            plot.bar(places, one.mean, width * 0.92, color=one.style.colour, yerr=std, error_kw=error)
        plot.set(xticks=range(len(names)), xticklabels=names, **axes)
        plot.grid(visible=False, axis="x")
        return _svg(figure, about)


def _save(figure: Any, path: Path) -> None:
    """Write a PNG file. Raises ConfigError if it cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written ({error.strerror}); choose another --output") from None


@_as_written()
def accuracy(rows: Sequence[Sequence[float | None]], title: str, path: Path) -> None:
    """Draw the accuracy matrix, and the accuracy on each task over the stream, to a PNG file.

    rows: (tasks, tasks) fractions, None for tasks not yet seen.
    """
    matrix = 100 * np.array(rows, dtype=float)
    figure, (left, right) = _figure(2)
    _heat_map(left, matrix, figure)
    _curves(right, matrix)
    figure.suptitle(title, fontsize=12)
    _save(figure, path)


@_as_written()
def comparison(
    summaries: Mapping[str, Mapping[str, Any]],
    matrices: Mapping[str, Sequence[Sequence[float | None]]],
    title: str,
    path: Path,
) -> None:
    """Draw ACC and FGT of each method (mean, standard deviation), and the mean accuracy on seen tasks, to a PNG file.

    summaries: method to its `tables.summary`; matrices: method to its mean accuracy matrix (fractions).
    """
    methods, places = list(summaries), np.arange(len(summaries))
    labels = {method: _wrapped(method, 28) for method in methods}
    lines = max(text.count("\n") + 1 for text in labels.values())
    wide = 10 + 0.14 * max(0, max(len(part) for text in labels.values() for part in text.split("\n")) - 8)  # inches
    figure, (left, right) = _figure(2, max(4.2, 1.5 + max(0.5, 0.22 * lines) * len(methods)), wide)
    for shift, name, colour in ((-0.2, "acc", "0.35"), (0.2, "fgt", "0.75")):  # greys: colours stand for methods
        means = [100 * summaries[method][name]["mean"] for method in methods]
        stds = [100 * summaries[method][name]["std"] for method in methods]
        bars = left.barh(places + shift, means, 0.4, xerr=stds, capsize=3, color=colour, label=name.upper())
        texts = ["" if np.isnan(mean) else f"{mean:z.1f}" for mean in means]  # FGT may be undefined
        left.bar_label(bars, texts, padding=3, fontsize=9)
    left.set(yticks=places, yticklabels=labels.values(), xlabel="percent", title="after the last task")
    left.invert_yaxis()  # the first method on top, as in the table
    left.margins(x=0.14)
    left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    for number, (method, rows) in enumerate(matrices.items()):
        seen, style = 100 * seen_accuracy(np.array(rows, dtype=float)), Style(number)
        one = Series(method, style, np.arange(len(seen)), seen, np.zeros(len(seen)))
        _curve(right, one, style.marker).set(label=labels[method], markerfacecolor="none", markersize=7)
    right.set(
        xticks=_ticks(max(map(len, matrices.values()))),
        ylim=(0, 102),
        xlabel="after task",
        ylabel="mean accuracy on tasks seen, %",
        title="over the stream",
    )
    right.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    right.grid(alpha=0.3)
    figure.suptitle(title, fontsize=12)
    _save(figure, path)


def _figure(columns: int, height: float = 4.2, width: float = 10, nrows: int = 1, **axes: Any) -> tuple[Any, Any]:
    # pyplot would select a window system and keep every figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(nrows, columns, **axes)


def _heat_map(axes: Any, matrix: np.ndarray, figure: Any) -> None:
    image = axes.imshow(matrix, vmin=0, vmax=100, cmap="viridis", interpolation="none")
    if len(matrix) <= MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(matrix):
            if not np.isnan(value):
                colour = "black" if value > 60 else "white"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=9)
    figure.colorbar(image, ax=axes, label="accuracy, %", shrink=0.85)
    ticks = _ticks(len(matrix))
    axes.set(xticks=ticks, yticks=ticks, xlabel="tested on task", ylabel="after task", title="accuracy matrix")


def _curves(axes: Any, matrix: np.ndarray) -> None:
    for task in range(matrix.shape[1]):
        after = np.arange(task, len(matrix))
        axes.plot(after, matrix[task:, task], marker="o", markersize=4, color=f"C{task % 10}", label=f"task {task}")
    axes.set(xticks=_ticks(len(matrix)), ylim=(0, 102), xlabel="after task", ylabel="accuracy, %", title="each task")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=1 + matrix.shape[1] // 16)


def _ticks(tasks: int) -> list[int]:
    return list(range(0, tasks, 1 + tasks // 16))


_SIZE = 2.95, 4.9  # inches, height and width: on a phone, text is as large as a footnote


def _drawing() -> AbstractContextManager[None]:
    from matplotlib import rc_context

    return rc_context(fname=str(files("cfl") / "report" / "page.mplstyle"))


def _svg(figure: Any, about: str) -> str:
    """Return the figure as an element of a page, which sets width, colour and font; ids are unique to the figure."""
    file = StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    head, _, body = file.getvalue().partition("<svg ")[2].partition(">")
    names = dict(re.findall(r'(\S+)="([^"]*)"', head))
    used, own = set(re.findall(r"#([\w.]+)", body)), f"f{crc32(body.encode()):08x}-"
    for pattern, new in (
        (r"<style.*?</style>| font-family:[^;]*;| transform=\"rotate\(-0 [^\"]*\"", ""),
        (r' id="([\w.]+)"', lambda found: f' id="{own}{found[1]}"' if found[1] in used else ""),
        (r'(url\(|href=")#', rf"\1#{own}"),
        (r"<[^>]+>", lambda found: re.sub(r"(\d\.\d\d)\d+", r"\1", found[0])),  # two decimals suffice
        (r"(?<=base64,)\s+|\s+(?=[<\"])", ""),
        (r"\s*\n\s*", " "),
        (_INK, "currentColor"),
    ):
        body = re.sub(pattern, new, body, flags=re.DOTALL)
    spaces = " ".join(f'{name}="{names[name]}"' for name in ("viewBox", "xmlns", "xmlns:xlink"))
    return f'<svg role="img" aria-label="{escape(about)}" {spaces}>{body}'
