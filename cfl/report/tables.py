"""Tables for the terminal, for Markdown and for LaTeX, and the summary of runs over seeds."""

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from rich.table import Column, Table

from cfl.core.metrics import NONE, percent

Metrics = Mapping[str, Any]
Matrix = Sequence[Sequence[float | None]]
SCORES = {"acc": "ACC %", "fgt": "FGT %", "learning_accuracy": "LA %"}
"""Scores of a run, fractions, and their titles in a table."""
OPTIONAL = {"fwt": "FWT %", "validation_acc": "val. ACC %", "task_accuracy": "tasks %", "epsilon": "epsilon"}
"""Figures that only some runs have, and their titles in a table."""
_COSTS = {  # title in a table, and divisor of its unit
    "bytes_up": ("up MB", 1e6),
    "bytes_down": ("down MB", 1e6),
    "client_bytes": ("stored KB", 1e3),
    "client_seconds": ("clients s", 1),
    "server_seconds": ("server s", 1),
}
_TITLES = {
    **SCORES,
    **OPTIONAL,
    **{name: title for name, (title, _) in _COSTS.items()},
    "seconds": "seconds",
    "seeds": "seeds",
}
# Characters to escape in the code of a Markdown table, and in LaTeX.
_IN_CODE = str.maketrans({"`": "'", "|": r"\|", "\n": " "})
_IN_TEX = str.maketrans(
    {name: rf"\{name}" for name in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
)


def shortened(text: str) -> str:
    """Write three or more equal entries in a row of a list once, with their number: [2,1,1,1] becomes [2,3 x 1]."""
    entries = r"(?<=[\[,])([^\[\],]+)(?:,\1){2,}(?=[\],])"
    return re.sub(entries, lambda found: f"{found[0].count(',') + 1} x {found[1]}", text)


def unbroken(text: str) -> str:
    """The text with no-break spaces in entries of one word that `shortened` has written."""
    return re.sub(r"(?<=[\[, ])(\d+) x (?=[^\[\], ]+[\],])", "\\1\u00a0x\u00a0", text)


class Cell(NamedTuple):
    """A cell of a table of results. best: mark it as the best of the compared results."""

    text: str
    best: bool = False


def matrix(rows: Matrix, title: str) -> Table:
    """Table of the accuracy matrix in percent: a row after each task, a column per tested task.

    rows: (tasks, tasks) fractions, None for tasks not yet seen.
    """
    heads = ["after task", *(f"task {task}" for task in range(max(map(len, rows), default=0)))]
    table = Table(*(Column(text, justify="right") for text in heads), title=title, title_justify="left")
    for task, row in enumerate(rows):
        table.add_row(str(task), *("" if value is None else f"{value:.1%}" for value in row))
    return table


def evaluated(found: Sequence[tuple[str, float]], title: str) -> Iterator[Table | str]:
    """Accuracy on each of some sets of samples, and their mean if there are several. found: names and fractions."""
    table = Table("samples", Column("accuracy", justify="right"))
    for name, value in found:
        table.add_row(name, f"{value:.1%}")
    yield title
    yield table
    if len(found) > 1:
        yield f"ACC {percent(sum(value for _, value in found) / len(found))}%"


def run(metrics: Metrics, title: str, folder: Path) -> Iterator[Table | str]:
    """Results of a run for the terminal: accuracy matrix, local models, privacy spent, ACC and FGT, and the folder."""
    yield matrix(metrics["accuracy_matrix"], f"Accuracy: {title}")
    if "task_accuracy" in metrics:
        yield f"Test samples whose task is inferred right: {percent(metrics['task_accuracy'])}%"
    if "validation_acc" in metrics:
        yield f"Held-out training samples: ACC {percent(metrics['validation_acc'])}%"
    if local := metrics.get("local_accuracy"):
        known, told = [one for one in local if one is not None], list[str]()
        if known:
            told = [f"{percent(sum(known) / len(known))}% on average", f"{percent(min(known))}% for the worst"]
        if len(known) < len(local):
            told.append(f"{len(local) - len(known)} of {len(local)} with outputs that are not finite")
        yield f"Local models of the last cohort: {', '.join(told)}"
    if "epsilon" in metrics:
        spent = f"epsilon {metrics['epsilon']:.3g} at delta {metrics['delta']:g}"
        yield f"Differential privacy: {spent} per client, for {metrics['epsilon_of']}"
    shown = {name.upper(): percent(metrics[name]) for name in ("acc", "fgt", "fwt") if name in metrics}
    scores = [f"{name} {value}%" for name, value in shown.items() if value != NONE]
    yield "; ".join(filter(None, (", ".join(scores), f"results in {folder}")))


def mean_matrix(runs: Sequence[Metrics]) -> list[list[float | None]]:
    """Entrywise mean of the accuracy matrices of some runs; None for entries that a run lacks."""
    stack = np.array([run["accuracy_matrix"] for run in runs], dtype=float)  # None becomes NaN
    return [[None if np.isnan(value) else float(value) for value in row] for row in stack.mean(axis=0)]


def summary(runs: Sequence[Metrics]) -> dict[str, Any]:
    """Mean and population standard deviation over runs of one method.

    Keys: acc, fgt, learning_accuracy (fractions); bytes_up, bytes_down (all clients); client_bytes (mean bytes that a
    client stores between rounds); seconds; client_seconds (wall clock of the cohort, with the sum of uploads);
    server_seconds; epsilon with differential privacy; validation_acc with held-out samples, task_accuracy with inferred
    tasks and fwt with later tasks evaluated (fractions). Values: dicts with mean and std, NaN if undefined or not
    stored. seeds: list of the seeds.
    """
    out: dict[str, Any] = {"seeds": [run["seed"] for run in runs]}
    for name in (*SCORES, *_COSTS, "seconds", *(name for name in OPTIONAL if name in runs[0])):
        values = np.array([run.get(name) for run in runs], dtype=float)  # None becomes NaN
        out[name] = {"mean": float(values.mean()), "std": float(values.std())}
    return out


def spread(score: Mapping[str, float], runs: int, decimals: int = 1) -> str:
    """Format mean ± standard deviation of fractions in percent; a single run has no standard deviation."""
    mean = percent(score["mean"], decimals)
    return mean if runs == 1 or math.isnan(score["mean"]) else f"{mean} ± {percent(score['std'], decimals)}"


def head(names: Sequence[str]) -> list[str]:
    """Titles, with units, of the columns of `cells`."""
    return [_TITLES[name] for name in names]


def cells(
    summaries: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    best: Mapping[str, Container[int]] = MappingProxyType({}),
) -> list[list[Cell]]:
    """A row per summary: scores in percent with standard deviation, and means of costs.

    names: keys of a summary, one per column; best: name of a score to the numbers of the rows to mark as the best.
    """
    return [
        [Cell(_text(row, name), place in best.get(name, ())) for name in names] for place, row in enumerate(summaries)
    ]


def filled(titles: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> Table:
    """A table for the terminal of names in the first column and numbers in the others."""
    names, *numbers = titles
    columns = [Column(names, overflow="fold"), *(Column(text, justify="right") for text in numbers)]
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def compared_texts(summaries: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Titles, and a row per method: mean ± standard deviation of ACC and FGT in percent, and mean costs.

    Costs: megabytes (1e6 bytes) sent up and down in the whole run, kilobytes that a client stores, and seconds.
    """
    found = [name for name in OPTIONAL if any(name in row for row in summaries.values())]
    names = ["acc", "fgt", *found, *_COSTS, "seeds"]
    rows = zip(summaries, cells(list(summaries.values()), names), strict=True)
    return ["method", *head(names)], [[method, *(cell.text for cell in row)] for method, row in rows]


def markdown(titles: Sequence[str], rows: Sequence[Sequence[Cell]], labels: int = 1) -> str:
    """A Markdown table: code in the first `labels` columns, then right-aligned numbers, the best ones bold."""
    lines = [list(titles), ["---"] * labels + ["---:"] * (len(titles) - labels)]
    for row in rows:
        names = [f"`{cell.text.translate(_IN_CODE)}`" if cell.text else "" for cell in row[:labels]]
        lines.append([*names, *(f"**{cell.text}**" if cell.best else cell.text for cell in row[labels:])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(titles: Sequence[str], rows: Sequence[Sequence[Cell]], labels: int = 1) -> str:
    """A LaTeX table for the booktabs package: `labels` left-aligned columns, then numbers, the best ones bold."""
    lines = [[text.translate(_IN_TEX) for text in titles]]
    for row in rows:
        texts = [(cell.text.translate(_IN_TEX), cell.best) for cell in row]
        lines.append([rf"\textbf{{{text}}}" if best else text for text, best in texts])
    first, *rest = [" & ".join(line) + r" \\" for line in lines]
    columns = "l" * labels + "r" * (len(titles) - labels)
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    table = [begin, r"\toprule", first, r"\midrule", *rest, r"\bottomrule", end]
    return "".join(f"{line}\n" for line in table)


def failures(reasons: Mapping[str, str]) -> Table:
    """A row per reason, with the names of the runs that failed for it. reasons: by run; their last lines are shown."""
    shown: dict[str, list[str]] = {}
    for name, text in reasons.items():
        shown.setdefault(text.strip().rpartition("\n")[2], []).append(name)
    table = Table("runs", "error", title="failed runs", title_justify="left")
    for text, names in shown.items():
        table.add_row("\n".join(names), text)
    return table


def listing(rows: Sequence[Sequence[str]], title: str) -> Table:
    """A row per name: name, summary and, for names that have one, source."""
    heads = Column("name", no_wrap=True), "summary", "source"
    table = Table(*heads[: len(rows[0])], title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def answers(rows: Sequence[tuple[str, str]], title: str) -> Table:
    """A row per question, with its answer."""
    table = Table(Column(no_wrap=True), Column(), title=title, title_justify="left", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def hyper_parameters(rows: Sequence[Mapping[str, Any]], prefix: str) -> Table:
    """A row per hyper-parameter: name for `--set`, default (MISSING if it has none), valid values, meaning, source.

    Meaning and source are left out if no row has one.
    """
    texts = {title: key for title, key in (("meaning", "help"), ("source", "source")) if any(row[key] for row in rows)}
    table = Table(Column("option", no_wrap=True), "default", "valid", *texts)
    for row in rows:
        words = "none" if row["default"] is None else "required" if row["default"] is MISSING else str(row["default"])
        table.add_row(f"{prefix}{row['name']}", words, row["range"], *(row[key] for key in texts.values()))
    return table


def _text(row: Mapping[str, Any], name: str) -> str:
    if name == "seeds":
        return str(len(row["seeds"]))
    score = row.get(name, {"mean": math.nan})
    if name in {*SCORES, *OPTIONAL} - {"epsilon"}:
        return spread(score, len(row["seeds"]))
    digits, unit = (2 if name == "epsilon" else 1), _COSTS.get(name, ("", 1))[1]
    figure = score["mean"] / unit
    if name.startswith("bytes") and 0 < figure < 0.05:  # small models
        return f"{figure:.1g}"
    return NONE if math.isnan(figure) else f"{figure:.{digits}f}"
