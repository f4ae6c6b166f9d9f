"""Tables for the terminal, and the summary of runs with several methods and seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

Metrics = Mapping[str, Any]
Matrix = Sequence[Sequence[float | None]]
_COSTS = {  # title in a table, and its unit
    "bytes_up": ("up MB", 1e6),
    "bytes_down": ("down MB", 1e6),
    "client_bytes": ("stored KB", 1e3),
    "client_seconds": ("clients s", 1),
    "server_seconds": ("server s", 1),
}


NONE = "–"  # stands where there is no number


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

    acc, fgt (fractions, NaN where not defined), bytes_up, bytes_down (of all clients), client_bytes (stored on a client
    between rounds, mean), seconds, client_seconds (of all clients, one by one), server_seconds, and epsilon where
    there is privacy: each a dict with mean and std; seeds: the seeds.
    """
    out: dict[str, Any] = {"seeds": [run["seed"] for run in runs]}
    for name in ("acc", "fgt", *_COSTS, "seconds", *(["epsilon"] if "epsilon" in runs[0] else [])):
        values = np.array([run[name] for run in runs], dtype=float)  # None becomes NaN
        out[name] = {"mean": float(values.mean()), "std": float(values.std())}
    return out


def percent(value: float) -> str:
    """A fraction in percent with one decimal; a dash for what is not defined (forgetting after one task)."""
    return NONE if math.isnan(value) else f"{100 * value:.1f}"


def spread(score: Mapping[str, float], runs: int) -> str:
    """Mean ± standard deviation of fractions in percent; one run has no deviation to speak of."""
    mean = percent(score["mean"])
    return mean if runs == 1 or math.isnan(score["mean"]) else f"{mean} ± {percent(score['std'])}"


def compared(summaries: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """A line a method: mean ± standard deviation of ACC and FGT in percent, and the means of what it costs.

    Megabytes (1e6 bytes) sent up and down in the whole run, kilobytes that a client stores, seconds computed.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    spent = ["epsilon"] if any("epsilon" in row for row in summaries.values()) else []
    for name in ("ACC %", "FGT %", *spent, *(title for title, _ in _COSTS.values()), "seeds"):
        table.add_column(name, justify="right")
    for method, row in summaries.items():
        scores = [spread(row[name], len(row["seeds"])) for name in ("acc", "fgt")]
        scores += [f"{row[name]['mean']:.2f}" for name in spent]
        costs = [f"{row[name]['mean'] / unit:.1f}" for name, (_, unit) in _COSTS.items()]
        table.add_row(method, *scores, *costs, str(len(row["seeds"])))
    return table


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
