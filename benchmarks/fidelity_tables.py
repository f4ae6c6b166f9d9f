"""What the parts of `fidelity.py` share: tables as the page shows them, and runs."""

from __future__ import annotations

import math
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
    """Figures of runs, a list each; of those by layer, the mean over layers; None where there is none, or NaN."""
    found = [[result.metrics.get(name, math.nan) for result in results] for name in names]
    means = [
        [fmean(value.values() or [math.nan]) if isinstance(value, dict) else value for value in values]
        for values in found
    ]
    return [None if any(map(math.isnan, values)) else values for values in means]
