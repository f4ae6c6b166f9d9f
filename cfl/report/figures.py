"""Figures of compared groups: SVG with a description of the values shown, and panels of shaded tables."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from cfl.core import ConfigError, unknown
from cfl.core.metrics import seen_accuracy
from cfl.report import plots, tables
from cfl.report.plots import Series, Style
from cfl.report.runs import FinishedRun, RunGroup, Scene

Styles = Mapping[str, Style]  # label of a group to its style
Values = Callable[[FinishedRun], Sequence[float] | np.ndarray]  # empty if the run did not store them
_FEW = 40  # largest number of bars that a reader can tell apart
_SEEN = "Mean accuracy on the tasks seen so far"
_POINTS = 250  # largest number of points of a line; longer lines show means


class Figure(NamedTuple):
    """A figure of all groups: a title, and the SVG."""

    title: str
    svg: str


class Panel(NamedTuple):
    """A shaded table of one group, beside others of its kind. rows: fractions, NaN for none; names: of the rows."""

    label: str
    title: str
    rows: np.ndarray
    names: Sequence[object]


def styles(scenes: Sequence[Scene], highlight: str | None = None) -> Styles:
    """A style for each label; groups with the same label look alike in all scenes.

    highlight: a method, such as "fot+fedprox", whose lines are wide and all others narrow.
    Raises ConfigError if no run is of this method.
    """
    methods = {group.label: group.runs[0].metrics["method"] for scene in scenes for group in scene.groups}
    if highlight is None:
        return {label: Style(number) for number, label in enumerate(methods)}
    if highlight not in methods.values():
        raise unknown("method", highlight, {*methods.values()})
    widths = {label: 3.0 if method == highlight else 1.0 for label, method in methods.items()}
    return {label: Style(number, width) for number, (label, width) in enumerate(widths.items())}


def stream(scenes: Sequence[Scene], kind: str, highlight: str | None = None) -> bytes:
    """A file with the mean accuracy on the tasks seen so far, a panel for each scene. kind: "png" or "pdf".

    highlight: as for `styles`. Raises ConfigError if no run has two tasks.
    """
    looks = styles(scenes, highlight)
    panels = []
    for scene in scenes:
        if series := [one for one in _series(scene.groups, looks, _seen) if len(one.mean) > 1]:
            panels.append((", ".join(filter(None, (scene.benchmark, scene.setting))), series))
    if not panels:
        raise ConfigError(f"a .{kind} shows accuracy over the tasks, and no run has two tasks; write a page or a table")
    return plots.panels(panels, kind, xlabel="after task", ylabel=f"{_SEEN.lower()}, %")


def accuracy(groups: Sequence[RunGroup], styles: Styles) -> Iterator[Figure]:
    """Accuracy over the stream and per task, forgetting, and the training loss if it is stored."""
    curves: dict[str, Values] = {
        _SEEN: _seen,
        "Accuracy on the first task": lambda run: _matrix(run)[:, 0],
    }
    for title, values in curves.items():
        series = _series(groups, styles, values)
        if max((len(one.mean) for one in series), default=0) > 1:  # a single task makes no line
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
    longest = _longest([run for group in groups for run in group.runs])
    if series := _series(groups, styles, partial(_losses, longest)):
        starts = [*accumulate(longest.values())][:-1]
        look = {"marks": False, "breaks": starts, "xlabel": "training round", "ylabel": "loss"}
        yield _lines("Training loss (dotted: a new task)", [_thinned(one) for one in series], **look)


def matrices(groups: Sequence[RunGroup]) -> Iterator[Panel]:
    """Accuracy matrix of each group, mean over its runs."""
    for group in groups:
        rows = np.array(tables.mean_matrix(group.metrics), dtype=float)  # None becomes NaN
        yield Panel(group.label, "", rows, range(len(rows)))


def subspaces(groups: Sequence[RunGroup]) -> Iterator[Panel]:
    """For methods with subspaces, by layer and task: protected share of the input space, input energy that it covers,
    and step energy that the projection removed."""
    titles = {
        "subspace_use": "share of the input space in use",
        "coverage": "input energy covered",
        "removed": "step energy removed by projection",
    }
    for group in groups:
        every = [run.metrics["by_task"] for run in group.runs if run.metrics.get("by_task")]
        for field, title in titles.items():
            # A strategy of the user's own may report another figure of that name.
            reports = [tasks for tasks in every if all(isinstance(one.get(field, {}), dict) for one in tasks)]
            layers = list(dict.fromkeys(name for tasks in reports for one in tasks for name in one.get(field, ())))
            if layers:
                # None becomes NaN
                by_layer = [[[one.get(field, {}).get(name) for one in tasks] for tasks in reports] for name in layers]
                yield Panel(group.label, title, np.array([_mean(_stacked(rows)) for rows in by_layer]), layers)


def _lines(title: str, series: Sequence[Series], **look: Any) -> Figure:
    return Figure(title, plots.lines(series, about=_about(title, series), **look))


def _about(title: str, series: Sequence[Series]) -> str:
    last = [f"{one.label} {one.mean[~np.isnan(one.mean)][-1]:.3g}" for one in series]
    return f"{title}. Last values: {', '.join(last)}"


def _series(groups: Sequence[RunGroup], styles: Styles, values: Values) -> list[Series]:
    """Mean and standard deviation over the runs of each group, without groups that have no values."""
    out = []
    for group in groups:
        rows = [row for run in group.runs if len(row := values(run))]
        if rows and not np.isnan(stack := _stacked(rows)).all():
            out.append(Series(group.label, styles[group.label], np.arange(stack.shape[1]), _mean(stack), _std(stack)))
    return out


def _stacked(rows: Sequence[Sequence[float] | np.ndarray]) -> np.ndarray:
    """Rows of numbers as an array; rows of runs that a callback has stopped are shorter, and end in NaN."""
    stack = np.full((len(rows), max(map(len, rows))), np.nan)
    for place, row in enumerate(rows):
        stack[place, : len(row)] = row
    return stack


def _mean(stack: Any) -> np.ndarray:
    """Mean over the first axis without NaN; NaN if all values are NaN."""
    return np.ma.filled(np.ma.masked_invalid(stack).mean(axis=0), np.nan)


def _std(stack: Any) -> np.ndarray:
    return np.ma.filled(np.ma.masked_invalid(stack).std(axis=0), np.nan)


def _thinned(one: Series) -> Series:
    """Reduce a line to at most `_POINTS` points, each the mean of neighbouring points, without those that are NaN."""
    known = np.flatnonzero(~np.isnan(one.mean))
    parts = np.array_split(known, min(_POINTS, len(known)))
    x, mean, std = (np.array([_mean(values[part]) for part in parts]) for values in (one.x, one.mean, one.std))
    return replace(one, x=x, mean=mean, std=std)


def _matrix(run: FinishedRun) -> np.ndarray:
    """(tasks, tasks) percent, NaN for tasks not yet seen."""
    return 100 * np.array(run.metrics["accuracy_matrix"], dtype=float)


def _seen(run: FinishedRun) -> np.ndarray:
    """Mean accuracy on the tasks seen so far, after each task, percent."""
    return seen_accuracy(_matrix(run))


def _forgotten(run: FinishedRun) -> np.ndarray:
    """Accuracy lost on every task but the last, percent; empty if forgetting is not defined for the run."""
    matrix = _matrix(run)
    return (matrix.diagonal() - matrix[-1])[:-1] if run.metrics.get("fgt") is not None else np.empty(0)


def _training(run: FinishedRun) -> list[dict[str, Any]]:
    """Rows of the rounds in training phases."""
    phases = {row["phase"] for row in run.rounds if row["loss"] is not None}
    return [row for row in run.rounds if row["phase"] in phases]


def _longest(runs: Sequence[FinishedRun]) -> dict[int, int]:
    """Largest number of training rounds of each task that has any, in the order of the tasks."""
    counts = [Counter(row["task"] for row in _training(run)) for run in runs]
    return {task: max(count[task] for count in counts) for task in sorted(set().union(*counts))}


def _losses(longest: Mapping[int, int], run: FinishedRun) -> np.ndarray:
    """Loss of each training round; NaN for those that the run lacks at the end of a task, so that tasks are aligned."""
    if not (rows := _training(run)):
        return np.empty(0)
    found = [[row["loss"] for row in rows if row["task"] == task] for task in longest]
    padded = [own + [None] * (rounds - len(own)) for own, rounds in zip(found, longest.values(), strict=True)]
    return np.concatenate(padded).astype(float)
