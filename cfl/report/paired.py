"""Paired differences between methods: runs of a seed share random draws, so few seeds suffice to see a difference."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from cfl.experiments.compare import Group
from cfl.report.tables import NONE, Metrics

MEASURES = ("acc", "fgt")


def differences(runs: Sequence[Metrics], others: Sequence[Metrics]) -> dict[str, Any] | None:
    """Mean differences (runs less others) of ACC and FGT over the common seeds; None for fewer than two seeds.

    Each is a dict of fractions with mean; low and high, the 95 % confidence interval; and p of a two-sided paired
    t-test. All are NaN if FGT is not defined. seeds: the common seeds.
    """
    by_seed = [{run["seed"]: run for run in each} for each in (runs, others)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if len(seeds) < 2:
        return None
    out: dict[str, Any] = {"seeds": seeds}
    for name in MEASURES:
        ours, theirs = (np.array([each[seed][name] for seed in seeds], dtype=float) for each in by_seed)
        out[name] = _paired(ours - theirs)
    return out


def against(groups: Sequence[Group], method: str) -> dict[str, dict[str, Any]]:
    """Differences of each group from its counterparts of `method`, by names such as "fot less fedavg"."""
    others = [group for group in groups if group.method != method]
    pairs = [(group, other) for group in others for other in group.counterparts(groups, method)]
    found = {f"{a.label} less {b.label}": differences(a.results(), b.results()) for a, b in pairs}
    return {name: row for name, row in found.items() if row}


def _paired(gaps: np.ndarray) -> dict[str, float]:
    from scipy import stats

    mean, error = float(gaps.mean()), float(gaps.std(ddof=1) / len(gaps) ** 0.5)
    if error == 0 or np.isnan(mean):  # equal differences: an interval of width 0
        return {"mean": mean, "low": mean, "high": mean, "p": float("nan") if np.isnan(mean) else float(mean == 0)}
    student = stats.t(len(gaps) - 1)
    half = float(student.ppf(0.975)) * error
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": float(2 * student.sf(abs(mean) / error))}


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per pair ("fot less fedavg"): mean differences in percentage points, with 95 % interval and p."""
    shown = Table(title="paired differences, percentage points", title_justify="left")
    shown.add_column("methods")
    for name in MEASURES:
        for title in (f"{name.upper()} difference", "95 % interval", "p"):
            shown.add_column(title, justify="right")
    shown.add_column("seeds", justify="right")
    for label, row in rows.items():
        cells = [cell for name in MEASURES for cell in _cells(row[name])]
        shown.add_row(label, *cells, str(len(row["seeds"])))
    return shown


def _cells(row: Mapping[str, float]) -> list[str]:
    if np.isnan(row["mean"]):
        return [NONE] * 3
    points = {name: 100 * row[name] for name in ("mean", "low", "high")}
    return [f"{points['mean']:+.1f}", f"{points['low']:+.1f} to {points['high']:+.1f}", f"{row['p']:.3f}"]
