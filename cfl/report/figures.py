"""The figures of groups that are compared: what they show, as SVG."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cfl.report import plots
from cfl.report.plots import Series, Style
from cfl.report.runs import Group, Run

Styles = Mapping[str, Style]  # by the label of a group
Values = Callable[[Run], Sequence[float] | np.ndarray]  # of a run, empty where they are not stored
_FEW = 40  # bars that can be told apart in a figure
_POINTS = 250  # of a line; of more the means are drawn


class Figure(NamedTuple):
    """A title, the SVG, and the label of the group that it shows; none where it shows all."""

    title: str
    svg: str
    label: str = ""


def accuracy(groups: Sequence[Group], styles: Styles) -> Iterator[Figure]:
    """Accuracy over the stream and of each task, forgetting, and the training loss where it is stored."""
    curves: dict[str, Values] = {
        "Mean accuracy on the tasks seen so far": lambda run: _mean(_matrix(run).T),
        "Accuracy on the first task": lambda run: _matrix(run)[:, 0],
    }
    for title, values in curves.items():
        if series := _series(groups, styles, values):
            yield _lines(title, series, xlabel="after task", ylabel="accuracy, %")
    tasks: dict[str, tuple[str, Values]] = {
        "Accuracy on each task at the end": ("accuracy, %", lambda run: _matrix(run)[-1]),
        "Forgetting of each task": ("accuracy lost, %", _forgotten),
    }
    for title, (label, values) in tasks.items():
        series = _series(groups, styles, values)
        if sum(len(one.mean) for one in series) > _FEW:
            yield _lines(title, series, xlabel="task", ylabel=label)
        elif series:
            names = [str(task) for task in range(max(len(one.mean) for one in series))]
            yield Figure(title, plots.bars(names, series, about=_about(title, series), xlabel="task", ylabel=label))
    if series := _series(groups, styles, _losses):
        rows = next(rows for group in groups if (rows := _training(group.runs[0])))
        starts = [place for place in range(1, len(rows)) if rows[place]["task"] != rows[place - 1]["task"]]
        look = {"marks": False, "breaks": starts, "xlabel": "round of training", "ylabel": "loss"}
        yield _lines("Training loss; dotted lines: a new task", [_thinned(one) for one in series], **look)


def matrices(groups: Sequence[Group]) -> Iterator[Figure]:
    """The accuracy matrix of each group, the mean over its runs."""
    for group in groups:
        rows = _mean([_matrix(run) for run in group.runs])
        about = f"Accuracy matrix of {group.label}; the last row in percent: {_numbers(rows[-1])}"
        names = [str(task) for task in range(len(rows))]
        drawn = plots.heat(rows, names, about=about, xlabel="tested on task", ylabel="after task")
        yield Figure("", drawn, group.label)


def subspaces(groups: Sequence[Group]) -> Iterator[Figure]:
    """For methods that have them, of each layer the protected share of its inputs, the energy that it covers, and what
    a projection took away of the steps."""
    titles = {
        "subspace_use": "share of the input space in use, %",
        "coverage": "input energy covered, %",
        "removed": "energy of the steps projected away, %",
    }
    for group in groups:
        reports = [run.metrics["by_task"] for run in group.runs if run.metrics.get("by_task")]
        for field, title in titles.items():
            layers = list(dict.fromkeys(name for tasks in reports for one in tasks for name in one.get(field, ())))
            if layers:
                shares = [[[one.get(field, {}).get(name) for one in tasks] for name in layers] for tasks in reports]
                rows = 100 * _mean(np.array(shares, dtype=float))
                about = f"{title}, of {group.label}; after the last task: {_numbers(rows[:, -1], layers)}"
                yield Figure(
                    title, plots.heat(rows, layers, about=about, xlabel="after task", ylabel="layer"), group.label
                )


def _lines(title: str, series: Sequence[Series], **look: Any) -> Figure:
    return Figure(title, plots.lines(series, about=_about(title, series), **look))


def _about(title: str, series: Sequence[Series]) -> str:
    last = [f"{one.label} {one.mean[~np.isnan(one.mean)][-1]:.3g}" for one in series]
    return f"{title}. The last values: {', '.join(last)}"


def _numbers(values: Iterable[float], names: Sequence[str] = ()) -> str:
    texts = [f"{value:.3g}" for value in values]
    return ", ".join(map(" ".join, zip(names, texts, strict=True)) if names else texts)


def _series(groups: Sequence[Group], styles: Styles, values: Values) -> list[Series]:
    """Mean and deviation over the runs of each group; groups without any value are left out."""
    out = []
    for group in groups:
        rows = [row for run in group.runs if len(row := values(run))]
        if rows and not np.isnan(stack := np.array(rows, dtype=float)).all():
            out.append(Series(group.label, styles[group.label], np.arange(len(rows[0])), _mean(stack), _std(stack)))
    return out


def _mean(stack: Any) -> np.ndarray:
    """Mean over the first axis of what is there; NaN where nothing is."""
    return np.ma.filled(np.ma.masked_invalid(stack).mean(axis=0), np.nan)


def _std(stack: Any) -> np.ndarray:
    return np.ma.filled(np.ma.masked_invalid(stack).std(axis=0), np.nan)


def _thinned(one: Series) -> Series:
    """At most as many points as can be seen, the means of those that fall together."""
    parts = np.array_split(np.arange(len(one.mean)), min(_POINTS, len(one.mean)))
    x, mean, std = (np.array([_mean(values[part]) for part in parts]) for values in (one.x, one.mean, one.std))
    return replace(one, x=x, mean=mean, std=std)


def _matrix(run: Run) -> np.ndarray:
    """(tasks, tasks) percent, NaN for tasks not yet seen."""
    return 100 * np.array(run.metrics["accuracy_matrix"], dtype=float)


def _forgotten(run: Run) -> np.ndarray:
    """Of every task but the last; nothing where one model does not learn them one after another."""
    matrix = _matrix(run)
    return (matrix.diagonal() - matrix[-1])[:-1] if run.metrics.get("fgt") is not None else np.empty(0)


def _training(run: Run) -> list[dict[str, Any]]:
    """The rounds of phases that train."""
    phases = {row["phase"] for row in run.rounds if row["loss"] is not None}
    return [row for row in run.rounds if row["phase"] in phases]


def _losses(run: Run) -> np.ndarray:
    return np.array([row["loss"] for row in _training(run)], dtype=float)
