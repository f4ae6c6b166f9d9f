"""What the parts of `fidelity.py` share: tables as the page shows them, and runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import cfl

SEEDS = (0, 1, 2)


class Table(NamedTuple):
    """columns: head to the format of its numbers, with "%" in front for percent; of a list, mean and deviation."""

    title: str
    columns: dict[str, str]
    rows: list[list[Any]]


def cell(value: Any, form: str) -> str:
    """A value as the page shows it."""
    if isinstance(value, list):
        return f"{cell(fmean(value), form)} ± {cell(pstdev(value), form)}"
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value * (100 if form[:1] == '%' else 1):{form.lstrip('%')}}"


def markdown(table: Table) -> str:
    forms = table.columns.values()
    lines = [[cell(value, form) for value, form in zip(row, forms, strict=True)] for row in table.rows]
    rule = "|".join(["", *("---" for _ in forms), ""])
    return "\n".join([f"| {' | '.join(table.columns)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


@cache
def run(benchmark: str, method: str, seed: int, *overrides: str) -> cfl.Result:
    engine = ["engine=vmapped", "block=10"]
    return cfl.run(cfl.resolve(benchmark, method=method, seed=seed, overrides=[*engine, *overrides]))


def measured(results: Sequence[cfl.Result], *names: str) -> list[list[float] | None]:
    """Figures of runs, a list each; of those by layer, the mean over layers; None where a run has none."""

    def mean(figure: Any) -> float | None:
        if not isinstance(figure, dict):
            return figure
        return fmean(figure.values()) if figure and None not in figure.values() else None

    found = [[mean(result.metrics.get(name)) for result in results] for name in names]
    return [None if None in values else values for values in found]
