"""Tables of the papers: the printed numbers of each cell, the runs that reproduce it, and their results.

The tables are stored in `cfl/experiments/papers/*.yaml`, with numbers as printed: percent, seconds or megabytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from cfl.assembly.resolve import resolve
from cfl.config.overrides import read_yaml
from cfl.config.schema import RunConfig
from cfl.core import unknown
from cfl.experiments.compare import OWN, Run, experiment, finished, finished_in, for_methods, place

Results = Mapping[str, Any]
_OPTIONS = ("set", "exact", "reduced")  # at every scale; at paper scale only; at the other scales


@dataclass(frozen=True)
class Score:
    """A number of a paper or of our runs. std: population standard deviation, None if unknown; runs: their number.

    digits: number of decimals that the paper prints.
    """

    mean: float
    std: float | None = None
    runs: int | None = None
    digits: int = field(default=2, compare=False)

    def gap(self, printed: Score) -> float | None:
        """Difference from the printed score, over the root of the summed variances; None for a single run of ours."""
        if self.std is None:
            return None
        spread = math.hypot(self.std, printed.std or 0.0)
        return (self.mean - printed.mean) / spread if spread > 0 else None


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell of a table. paper: printed score by measure, None if not printed.

    spec: benchmark and method of its runs, without a method if cfl lacks it, and options under each key of `_OPTIONS`.
    """

    part: str
    row: str
    column: str
    paper: Mapping[str, Score | None]
    spec: Mapping[str, Any]

    @property
    def method(self) -> str:
        """Method of the runs; empty if cfl lacks it."""
        return str(self.spec.get("method", ""))

    def runs(
        self,
        seeds: Iterable[int],
        scale: str,
        overrides: Sequence[str],
        folder: Path,
        stored: Mapping[str, Path] = MappingProxyType({}),
    ) -> list[Run]:
        """Return a run per seed; no runs if cfl lacks the method.

        stored: experiment to the folder of a finished run, of any engine.
        """
        if not self.method:
            return []
        own = [*self.spec["set"], *self.spec["exact" if scale == "paper" else "reduced"], *overrides]
        name = ", ".join(filter(None, (self.column, self.part, self.row)))
        config = resolve(self.spec["benchmark"], method=self.method, overrides=own, scale=scale)
        configs = [config.model_copy(update={"seed": seed}) for seed in seeds]
        return [place(f"{name}, seed {one.seed}", one, folder, stored.get(experiment(one))) for one in configs]


@dataclass(frozen=True)
class Table:
    """A table of a paper."""

    name: str
    title: str
    measures: Sequence[str]
    notes: Sequence[str]
    cells: Sequence[Cell]

    def runs(
        self,
        only: Sequence[str],
        seeds: Sequence[int],
        scale: str,
        overrides: Sequence[str],
        folder: Path,
        stored: Sequence[Path] = (),
    ) -> dict[Cell, list[Run]]:
        """Return the runs of the cells selected by `only`, with folders inside `folder`.

        A run that is finished in `folder`, or at any depth of the `stored` folders, keeps its folder.
        Raises ConfigError for options that cannot run.
        """
        own_runs = {experiment(config): path for path, config in finished_in(folder).items()}
        known, cells = own_runs | finished(*stored), self.only(only)
        own = for_methods(list({cell.method for cell in cells} - {""}), overrides, (*OWN, "scale"))
        return {cell: cell.runs(seeds, scale, own.get(cell.method, ()), folder, known) for cell in cells}

    def only(self, names: Sequence[str]) -> list[Cell]:
        """Select cells by names of parts, rows and columns; ConfigError for an unknown name.

        Several names of one kind select their union; names of different kinds select the intersection.
        """
        places = {cell: (cell.part, cell.row, cell.column) for cell in self.cells}
        kinds = [set(kind) for kind in zip(*places.values(), strict=True)]
        for name in names:
            if not any(name in kind for kind in kinds):
                raise unknown(f"part, row or column of {self.name}", name, set.union(*kinds) - {""})
        kept = [kind & set(names) or kind for kind in kinds]
        return [cell for cell, own in places.items() if all(map(set.__contains__, kept, own))]


def scores(measures: Sequence[str], runs: Sequence[Run]) -> dict[str, Score]:
    """Scores of the finished runs of a cell, by measure; empty if no run is finished."""
    found = [(results, run.config) for run in runs if (results := run.results()) is not None]
    out = {}
    for name in measures if found else ():
        values = np.array([measure(name)[1](*one) for one in found])
        out[name] = Score(float(values.mean()), float(values.std()) if len(values) > 1 else None, len(values))
    return out


@cache
def tables() -> dict[str, Table]:
    """Read all tables, by name."""
    found = {}
    for path in sorted((files("cfl.experiments") / "papers").iterdir(), key=lambda path: path.name):
        for name, data in read_yaml(path).items():
            found[name] = Table(name, data["title"], data["measures"], data.get("notes", ()), tuple(_cells(data)))
    return found


def table(name: str) -> Table:
    """Return the table of this name; ConfigError with the nearest name if unknown."""
    if name not in tables():
        raise unknown("table", name, tables())
    return tables()[name]


def _cells(data: Mapping[str, Any]) -> Iterable[Cell]:
    for part, rows in data["paper"].items():
        whole = data.get("parts", {}).get(part, {})
        columns = whole.get("columns", data.get("columns"))
        for row, printed in rows.items():
            for (column, own), numbers in zip(columns.items(), printed, strict=True):
                # Later layers win; their options are appended.
                layers = [data.get("rows", {}).get(row, {}), whole, own]
                layers += [layer.get("rows", {}).get(row, {}) for layer in (whole, own)]
                spec = {key: one for layer in layers for key, one in layer.items() if key in ("benchmark", "method")}
                spec |= {key: list(_flat(layer.get(key, []) for layer in layers)) for key in _OPTIONS}
                texts = itertools.zip_longest(data["measures"], numbers.split(), fillvalue="-")
                yield Cell(part, row, column, {name: _score(text) for name, text in texts}, spec)


def _flat(texts: Iterable[Any]) -> Iterable[str]:
    for one in texts:
        yield from [one] if isinstance(one, str) else _flat(one)


def _score(text: str) -> Score | None:
    """Read "85.68±0.57", "7.15" or "-"."""
    mean, _, std = text.partition("±")
    digits = max(len(number.partition(".")[2]) for number in (mean, std))
    return None if text == "-" else Score(float(mean), float(std) if std else None, digits=digits)


def measure(name: str) -> tuple[str, Callable[[Results, RunConfig], float]]:
    """Title of a measure, and its function of a run's results and configuration, in the papers' units."""
    plain, number = re.fullmatch(r"([a-z_]+)(\d*)", name).groups()  # type: ignore[union-attr]
    title, function = _MEASURES[plain]
    return title.format(number), partial(function, int(number)) if number else function


def _percent(name: str) -> Callable[[Results, RunConfig], float]:
    return lambda results, config: math.nan if results[name] is None else 100 * results[name]


def _task(number: int, results: Results, config: RunConfig) -> float:
    last = results["accuracy_matrix"][-1]
    return 100 * last[number - 1] if number <= len(last) else math.nan


def _use(results: Results, config: RunConfig) -> float:
    use = list(results["subspace_use"].values())
    return 100 * float(np.mean(use)) if use else math.nan


def _times(results: Results, config: RunConfig, phase: str) -> float:
    """Count participations in a phase of FOT, over all clients, if every round has a full cohort.

    NaN for rounds given by the names of tasks, since the run may lack some of these tasks.
    """
    tasks, rounds = len(results["accuracy_matrix"]), config.rounds
    if isinstance(rounds, Mapping):
        return math.nan
    trained = tasks * rounds if isinstance(rounds, int) else sum(rounds)
    if phase == "train":
        return config.cohort * trained
    return _measured(config) * (tasks - 1)


def _measured(config: RunConfig) -> float:
    """Count the clients whose layer inputs FOT measures after a task, if all have data of it; NaN for other methods."""
    clients = {"sampled": config.cohort, "all": config.partition.clients}
    return clients.get(config.strategy.get("participants", ""), math.nan)


def _each(total: float | None, times: float) -> float:
    """Divide, or return NaN for a phase that the run did not reach and for seconds that were not stored."""
    return math.nan if total is None else total / times


def _seconds(phase: str) -> Callable[[Results, RunConfig], float]:
    """Seconds of one client: per local epoch in phase "train", else per participation."""
    return lambda results, config: _each(
        results["timing"].get("clients", {}).get(phase),
        _times(results, config, phase) * (config.local.epochs if phase == "train" else 1),
    )


def _sent(phase: str) -> Callable[[Results, RunConfig], float]:
    """Megabytes that a client sends per participation in a phase."""
    return lambda results, config: _each(
        results["bytes_by_phase"].get(phase, {}).get("up"), 1_000_000 * _times(results, config, phase)
    )


def _basis(results: Results, config: RunConfig) -> float:
    """Megabytes of the basis, broadcast with the model; the first basis is empty, so NaN for fewer than three tasks."""
    tasks, model = len(results["accuracy_matrix"]), _sent("train")(results, config)
    if tasks < 3 or "gpse" not in results["bytes_by_phase"]:
        return math.nan
    down = results["bytes_by_phase"]["gpse"]["down"] / _measured(config) / 1e6
    return (down - (tasks - 1) * model) / (tasks - 2)


def _cost(number: int, results: Results, config: RunConfig) -> float:
    """t R 2 M + (t - 1)(A + O): the arithmetic of FOT's Table 13, with the paper's R and the run's M, A and O."""
    rounds = resolve(config.benchmark).rounds
    assert isinstance(rounds, int)
    if "participants" not in config.strategy:  # no GPSE: R (up + down), with all that the method sends
        sent = sum(phase["up"] + phase["down"] for phase in results["bytes_by_phase"].values())
        return number * rounds * sent / 1e6 / _times(results, config, "train")
    once = _sent("gpse")(results, config) + _basis(results, config)
    return number * rounds * 2 * _sent("train")(results, config) + (number - 1) * once


_MEASURES: dict[str, tuple[str, Callable[..., float]]] = {
    "acc": ("ACC %", _percent("acc")),
    "fgt": ("FGT %", _percent("fgt")),
    "task": ("T{} %", _task),
    "use": ("used %", _use),
    "epoch_seconds": ("local epoch s", _seconds("train")),
    "gpse_seconds": ("GPSE s", _seconds("gpse")),
    "model_mb": ("model MB", _sent("train")),
    "sketch_mb": ("sketch {{A}} MB", _sent("gpse")),
    "basis_mb": ("basis {{O}} MB", _basis),
    "cost": ("after task {} MB", _cost),
}
