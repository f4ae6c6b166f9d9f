"""Tables for the terminal, and the summary of runs with several methods and seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

Metrics = Mapping[str, Any]
Matrix = Sequence[Sequence[float | None]]
_SCORES = {"acc": "ACC %", "fgt": "FGT %", "learning_accuracy": "LA %"}
_COSTS = {  # title in a table, and its unit
    "bytes_up": ("up MB", 1e6),
    "bytes_down": ("down MB", 1e6),
    "client_bytes": ("stored KB", 1e3),
    "client_seconds": ("clients s", 1),
    "server_seconds": ("server s", 1),
}
_TITLES = {
    **_SCORES,
    "epsilon": "epsilon",
    **{name: title for name, (title, _) in _COSTS.items()},
    "seconds": "seconds",
    "seeds": "seeds",
}
# What is written in another way inside code in a Markdown table, and in LaTeX.
_IN_CODE = str.maketrans({"`": "'", "|": r"\|", "\n": " "})
_IN_TEX = str.maketrans(
    {name: rf"\{name}" for name in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
)
NONE = "–"  # stands where there is no number


class Cell(NamedTuple):
    """A cell of a table of results; best: whether it is to be marked as the best of those compared."""

    text: str
    best: bool = False


def matrix(rows: Matrix, title: str) -> Table:
    """The accuracy matrix in percent: a row after each task, a column a task tested on.

    rows: (tasks, tasks) fractions, None for tasks not yet seen.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("after task", justify="right")
    for task in range(max(map(len, rows), default=0)):
        table.add_column(f"task {task}", justify="right")
    for task, row in enumerate(rows):
        table.add_row(str(task), *("" if value is None else f"{value:.1%}" for value in row))
    return table


def mean_matrix(runs: Sequence[Metrics]) -> list[list[float | None]]:
    """The entrywise mean of the runs' accuracy matrices; None where a run has none."""
    stack = np.array([run["accuracy_matrix"] for run in runs], dtype=float)  # None becomes NaN
    return [[None if np.isnan(value) else float(value) for value in row] for row in stack.mean(axis=0)]


def summary(runs: Sequence[Metrics]) -> dict[str, Any]:
    """Mean and population standard deviation over runs of one method.

    acc, fgt, learning_accuracy (fractions), bytes_up, bytes_down (of all clients), client_bytes (stored on a client
    between rounds, mean), seconds, client_seconds (of all clients, one by one), server_seconds, and epsilon where
    there is privacy: each a dict with mean and std, NaN where not defined or not stored; seeds: the seeds.
    """
    out: dict[str, Any] = {"seeds": [run["seed"] for run in runs]}
    for name in (*_SCORES, *_COSTS, "seconds", *(["epsilon"] if "epsilon" in runs[0] else [])):
        values = np.array([run.get(name) for run in runs], dtype=float)  # None becomes NaN
        out[name] = {"mean": float(values.mean()), "std": float(values.std())}
    return out


def percent(value: float) -> str:
    """A fraction in percent with one decimal; a dash for what is not defined (forgetting after one task)."""
    return NONE if math.isnan(value) else f"{100 * value:z.1f}"


def spread(score: Mapping[str, float], runs: int) -> str:
    """Mean ± standard deviation of fractions in percent; one run has no deviation to speak of."""
    mean = percent(score["mean"])
    return mean if runs == 1 or math.isnan(score["mean"]) else f"{mean} ± {percent(score['std'])}"


def head(names: Sequence[str]) -> list[str]:
    """Titles, with units, of columns that `cells` fills."""
    return [_TITLES[name] for name in names]


def cells(summaries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[Cell]]:
    """A row for each summary: scores in percent with their deviation, means of costs; the best scores are marked.

    names: of columns, fields of a summary. Scores that print the same are equally good; one row has no best, and
    neither have rows of different seeds.
    """
    best = {name: _best(summaries, name) for name in names}
    return [[Cell(_text(row, name), place in best[name]) for name in names] for place, row in enumerate(summaries)]


def same_seeds(summaries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all are of runs with the same seeds, and so of the same draws."""
    return len({frozenset(row["seeds"]) for row in summaries}) == 1


def _best(summaries: Sequence[Mapping[str, Any]], name: str) -> set[int]:
    """Places of the rows whose score prints as the best one; none where nothing is compared."""
    means = [row[name]["mean"] for row in summaries] if name in _SCORES and same_seeds(summaries) else []
    known = [mean for mean in means if not math.isnan(mean)]
    if len(known) < 2:
        return set()
    top = percent(min(known) if name == "fgt" else max(known))
    return {place for place, mean in enumerate(means) if percent(mean) == top}


def compared(summaries: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """A line a method: mean ± standard deviation of ACC and FGT in percent, and the means of what it costs.

    Megabytes (1e6 bytes) sent up and down in the whole run, kilobytes that a client stores, seconds computed.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    spent = ["epsilon"] if any("epsilon" in row for row in summaries.values()) else []
    names = ["acc", "fgt", *spent, *_COSTS, "seeds"]
    for text in head(names):
        table.add_column(text, justify="right")
    for method, row in zip(summaries, cells(list(summaries.values()), names), strict=True):
        table.add_row(method, *(cell.text for cell in row))
    return table


def markdown(titles: Sequence[str], rows: Sequence[Sequence[Cell]], labels: int = 1) -> str:
    """A Markdown table: the first `labels` columns are code to the left, numbers lie to the right, the best bold."""
    lines = [list(titles), ["---"] * labels + ["---:"] * (len(titles) - labels)]
    for row in rows:
        names = [f"`{cell.text.translate(_IN_CODE)}`" if cell.text else "" for cell in row[:labels]]
        lines.append([*names, *(f"**{cell.text}**" if cell.best else cell.text for cell in row[labels:])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(titles: Sequence[str], rows: Sequence[Sequence[Cell]], labels: int = 1) -> str:
    """A LaTeX table with the rules of the package booktabs: the first `labels` columns to the left, the best bold."""
    lines = [[text.translate(_IN_TEX) for text in titles]]
    for row in rows:
        texts = [(cell.text.translate(_IN_TEX), cell.best) for cell in row]
        lines.append([rf"\textbf{{{text}}}" if best else text for text, best in texts])
    first, *rest = [" & ".join(line) + r" \\" for line in lines]
    columns = "l" * labels + "r" * (len(titles) - labels)
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    table = [begin, r"\toprule", first, r"\midrule", *rest, r"\bottomrule", end]
    return "".join(f"{line}\n" for line in table)


def listing(rows: Sequence[tuple[str, str, str]], title: str) -> Table:
    """Names with a line on each and its source."""
    table = Table(title=title, title_justify="left")
    for name, wrap in (("name", True), ("what it is", False), ("source", False)):
        table.add_column(name, no_wrap=wrap)
    for row in rows:
        table.add_row(*row)
    return table


def answers(rows: Sequence[tuple[str, str]], title: str) -> Table:
    """Questions and their answers."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def hyper_parameters(rows: Sequence[Mapping[str, Any]], prefix: str) -> Table:
    """Hyper-parameters as `--set` takes them: name, default, valid values, meaning, source."""
    table = Table()
    for name in ("option", "default", "valid", "meaning", "source"):
        table.add_column(name, no_wrap=name == "option")
    for row in rows:
        default = "none" if row["default"] is None else str(row["default"])
        table.add_row(f"{prefix}{row['name']}", default, row["range"], row["help"], row["source"])
    return table


def _text(row: Mapping[str, Any], name: str) -> str:
    if name == "seeds":
        return str(len(row["seeds"]))
    score = row.get(name, {"mean": math.nan})
    if name in _SCORES:
        return spread(score, len(row["seeds"]))
    digits, unit = (2 if name == "epsilon" else 1), _COSTS.get(name, ("", 1))[1]
    return NONE if math.isnan(score["mean"]) else f"{score['mean'] / unit:.{digits}f}"
