"""The papers' tables: what each cell printed, which runs are to give the same, and what they gave.

The tables are in `cfl/experiments/papers/*.yaml`. Their numbers are as printed there: percent, seconds or megabytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from cfl.assembly.resolve import resolve
from cfl.config.overrides import read_yaml
from cfl.config.schema import RunConfig
from cfl.core.errors import unknown
from cfl.experiments.compare import OWN, Run, finished, finished_in, for_methods, place

Results = Mapping[str, Any]
_OPTIONS = ("set", "exact", "reduced")  # at every scale; at paper scale alone; at all others


@dataclass(frozen=True)
class Score:
    """A number of a paper, or of ours: mean, population standard deviation (None where there is none), runs.

    digits: as many as the paper prints after the point.
    """

    mean: float
    std: float | None = None
    runs: int | None = None
    digits: int = field(default=2, compare=False)

    def gap(self, printed: Score) -> float | None:
        """This less the printed one in standard deviations of both together; None for a single run of ours."""
        if self.std is None:
            return None
        spread = math.hypot(self.std, printed.std or 0.0)
        return (self.mean - printed.mean) / spread if spread > 0 else None


@dataclass(frozen=True, eq=False)
class Cell:
    """A cell of a table. paper: what it printed, by measure (None: nothing); spec: what runs, by name of a key."""

    part: str
    row: str
    column: str
    paper: Mapping[str, Score | None]
    spec: Mapping[str, Any]

    @property
    def method(self) -> str:
        """What runs; empty where it is not in cfl."""
        return str(self.spec.get("method", ""))

    def runs(self, seeds: Iterable[int], scale: str, overrides: Sequence[str], folder: Path) -> list[Run]:
        """Its runs in a folder of many; none where the method is not in cfl."""
        if not self.method:
            return []
        own = [*self.spec["set"], *self.spec["exact" if scale == "paper" else "reduced"], *overrides]
        name = ", ".join(filter(None, (self.column, self.part, self.row)))
        config = resolve(self.spec["benchmark"], method=self.method, overrides=own, scale=scale)
        return [place(f"{name}, seed {seed}", config.model_copy(update={"seed": seed}), folder) for seed in seeds]


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
        """The runs of its cells in a folder of many, or where a finished one is stored.

        only: see `only`. Raises ConfigError for what cannot run like this.
        """
        there, cells = finished_in(folder) | finished(*stored), self.only(only)
        own = for_methods(list({cell.method for cell in cells} - {""}), overrides, (*OWN, "scale"))

        def found(run: Run) -> Run:
            return replace(run, folder=there.get(run.digest, run.folder))

        return {cell: [*map(found, cell.runs(seeds, scale, own.get(cell.method, ()), folder))] for cell in cells}

    def only(self, names: Sequence[str]) -> list[Cell]:
        """Its cells in the parts, columns and rows named (any of a kind, and all kinds); ConfigError for others."""
        own = {cell: (cell.part, cell.row, cell.column) for cell in self.cells}
        kinds = [set(kind) for kind in zip(*own.values(), strict=True)]
        for name in names:
            if not any(name in kind for kind in kinds):
                raise unknown(f"part, row or column of {self.name}", name, set.union(*kinds) - {""})
        kept = [kind & set(names) or kind for kind in kinds]
        return [c for c, places in own.items() if all(one in kind for one, kind in zip(places, kept, strict=True))]


def scores(measures: Sequence[str], runs: Sequence[Run]) -> dict[str, Score]:
    """What the finished ones of a cell's runs gave, by measure; empty where none is finished."""
    found = [(results, run.config) for run in runs if (results := run.results()) is not None]
    out = {}
    for name in measures if found else ():
        values = np.array([measure(name)[1](*one) for one in found])
        out[name] = Score(float(values.mean()), float(values.std()) if len(values) > 1 else None, len(values))
    return out


@cache
def tables() -> dict[str, Table]:
    """All tables by name."""
    found = {}
    for path in sorted((files("cfl.experiments") / "papers").iterdir(), key=lambda path: path.name):
        for name, data in read_yaml(path).items():
            found[name] = Table(name, data["title"], data["measures"], data.get("notes", ()), tuple(_cells(data)))
    return found


def table(name: str) -> Table:
    """The table of that name; raises ConfigError with the nearest one."""
    if name not in tables():
        raise unknown("table", name, tables())
    return tables()[name]


def _cells(data: Mapping[str, Any]) -> Iterable[Cell]:
    for part, rows in data["paper"].items():
        whole = data.get("parts", {}).get(part, {})
        columns = whole.get("columns", data.get("columns"))
        for row, printed in rows.items():
            for (column, own), numbers in zip(columns.items(), printed, strict=True):
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
    """The number of "85.68±0.57", "7.15" or "-"."""
    mean, _, std = text.partition("±")
    digits = max(len(number.partition(".")[2]) for number in (mean, std))
    return None if text == "-" else Score(float(mean), float(std) if std else None, digits=digits)


def measure(name: str) -> tuple[str, Callable[[Results, RunConfig], float]]:
    """Title and function of a measure: from results and configuration of a run to what the papers print."""
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
    """How often a client took part in a phase of FOT, over all clients, where every round has a whole cohort.

    NaN for rounds by the names of tasks, some of which may not be in the run.
    """
    tasks, rounds = len(results["accuracy_matrix"]), config.rounds
    if isinstance(rounds, Mapping):
        return math.nan
    trained = tasks * rounds if isinstance(rounds, int) else sum(rounds)
    if phase == "train":
        return config.cohort * trained
    return _measured(config) * (tasks - 1)


def _measured(config: RunConfig) -> int:
    """Clients whose layer inputs FOT measures after a task, where all have data of it."""
    return config.cohort if config.strategy["participants"] == "sampled" else config.partition.clients


def _each(total: float | None, times: float) -> float:
    """NaN for a phase that the run did not come to, and for seconds that were not stored."""
    return math.nan if total is None else total / times


def _seconds(phase: str) -> Callable[[Results, RunConfig], float]:
    """Of one client: a local epoch, or what it does once after a task."""
    return lambda results, config: _each(
        results["timing"].get("clients", {}).get(phase),
        _times(results, config, phase) * (config.local.epochs if phase == "train" else 1),
    )


def _sent(phase: str) -> Callable[[Results, RunConfig], float]:
    return lambda results, config: _each(
        results["bytes_by_phase"].get(phase, {}).get("up"), 1_000_000 * _times(results, config, phase)
    )


def _basis(results: Results, config: RunConfig) -> float:
    """The basis goes down with the model; the first one is empty, so that two tasks show none."""
    tasks, model = len(results["accuracy_matrix"]), _sent("train")(results, config)
    if tasks < 3:
        return math.nan
    down = results["bytes_by_phase"]["gpse"]["down"] / _measured(config) / 1e6
    return (down - (tasks - 1) * model) / (tasks - 2)


def _cost(number: int, results: Results, config: RunConfig) -> float:
    """t R 2 M + (t - 1)(A + O): the arithmetic of FOT's Table 13, with R of the paper and what a run has sent."""
    rounds = resolve(config.benchmark).rounds
    assert isinstance(rounds, int)
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
