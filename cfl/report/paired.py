"""Paired differences between methods: runs of a seed share random draws, so few seeds suffice to see a difference."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cfl.core.metrics import NONE, percent
from cfl.experiments.compare import Group
from cfl.report.tables import SCORES, Metrics

MEASURES = ("acc", "fgt")
_ROUNDED = 1e-12  # differences of fractions below it are rounding errors
TITLE = "paired differences, percentage points"


def differences(runs: Sequence[Metrics], others: Sequence[Metrics]) -> dict[str, Any] | None:
    """Mean differences (runs less others) of ACC and FGT over the common seeds; None for fewer than two seeds.

    Each is a dict of fractions with mean; low and high, the 95 % confidence interval; and p of a two-sided paired
    t-test. All are NaN if FGT is not defined; low, high and p if all differences are equal, but not 0: their deviation
    says nothing then. seeds: the common seeds.
    """
    seeds = common_seeds([runs, others])
    if len(seeds) < 2:
        return None
    gaps = {name: _scores(runs, name, seeds) - _scores(others, name, seeds) for name in MEASURES}
    return {"seeds": seeds, **{name: _paired(gap) for name, gap in gaps.items()}}


def against(groups: Sequence[Group], method: str) -> dict[str, dict[str, Any]]:
    """Differences of each group from its counterparts of `method`, by names such as "fot less fedavg"."""
    others = [group for group in groups if group.method != method]
    pairs = [(group, other) for group in others for other in group.counterparts(groups, method)]
    found = {f"{a.label} less {b.label}": differences(a.results(), b.results()) for a, b in pairs}
    return {name: row for name, row in found.items() if row}


class Ranking(NamedTuple):
    """The group with the best mean of a score, and how far the others are from it, over the seeds that all share.

    best: number of the group; mean, std: of its score, a fraction; gaps: number of each other group that has the score
    to its difference from the best, as by `differences`; seeds: those that all groups share.
    """

    best: int
    mean: float
    std: float
    gaps: dict[int, dict[str, float]]
    seeds: list[int]

    @property
    def rivals(self) -> list[int]:
        """The groups that are not told apart from the best: the 95 % interval contains 0, or the means print alike.

        A group without an interval is not told apart either.
        """
        return [
            number
            for number, gap in self.gaps.items()
            if not (gap["low"] > 0 or gap["high"] < 0) or percent(self.mean + gap["mean"]) == percent(self.mean)
        ]

    @property
    def marked(self) -> set[int]:
        """The groups to mark as the best ones: the best and its rivals; none if these are all groups."""
        return {self.best, *self.rivals} if len(self.rivals) < len(self.gaps) else set()


def ranking(groups: Sequence[Sequence[Metrics]], name: str) -> Ranking | None:
    """Rank groups of runs by a score; None if fewer than two groups have it, or share fewer than two seeds.

    name: "acc", "fgt" or "learning_accuracy". The lowest FGT is the best, and the highest of the others.
    """
    seeds = common_seeds(groups)
    if len(seeds) < 2:
        return None
    scores = {number: _scores(runs, name, seeds) for number, runs in enumerate(groups)}
    scores = {number: own for number, own in scores.items() if not np.isnan(own).any()}
    if len(scores) < 2:
        return None
    sign = -1 if name == "fgt" else 1
    best = max(scores, key=lambda number: sign * scores[number].mean())
    gaps = {number: _paired(own - scores[best]) for number, own in scores.items() if number != best}
    return Ranking(best, float(scores[best].mean()), float(scores[best].std()), gaps, seeds)


def marked(groups: Sequence[Sequence[Metrics]]) -> dict[str, set[int]]:
    """Score to the numbers of the groups to mark as the best; nothing if groups have different seeds, or one seed."""
    if len({frozenset(run["seed"] for run in runs) for runs in groups}) > 1:
        return {}
    return {name: found.marked for name in SCORES if (found := ranking(groups, name))}


def common_seeds(groups: Iterable[Sequence[Metrics]]) -> list[int]:
    """The seeds that all groups of runs have, in rising order."""
    return sorted(set.intersection(*({run["seed"] for run in runs} for runs in groups)))


def _scores(runs: Sequence[Metrics], name: str, seeds: Sequence[int]) -> np.ndarray:
    """The score of each seed; NaN if it is not defined."""
    by_seed = {run["seed"]: run.get(name) for run in runs}
    return np.array([by_seed[seed] for seed in seeds], dtype=float)


def _paired(gaps: np.ndarray) -> dict[str, float]:
    from scipy import stats

    mean, error = float(gaps.mean()), float(gaps.std(ddof=1) / len(gaps) ** 0.5)
    if max(abs(mean), error) < _ROUNDED:
        return {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    if error < _ROUNDED or np.isnan(mean):
        return {"mean": mean, "low": float("nan"), "high": float("nan"), "p": float("nan")}
    student = stats.t(len(gaps) - 1)
    half = float(student.ppf(0.975)) * error
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": float(2 * student.sf(abs(mean) / error))}


def texts(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Titles, and a row per pair ("fot less fedavg"): mean differences in percentage points, with interval and p."""
    titles = [title for name in MEASURES for title in heads(name)]
    lines = [
        [label, *(cell for name in MEASURES for cell in cells(row[name])), str(len(row["seeds"]))]
        for label, row in rows.items()
    ]
    return ["methods", *titles, "seeds"], lines


def heads(name: str) -> list[str]:
    """Titles of the columns of `cells`. name: "acc" or "fgt"."""
    return [f"{name.upper()} difference", "95 % interval", "p"]


def cells(row: Mapping[str, float]) -> list[str]:
    """A difference, its 95 % interval and p, as texts; dashes if the difference is not defined."""
    if np.isnan(row["mean"]):
        return [NONE] * 3
    points = {name: 100 * row[name] for name in ("mean", "low", "high")}
    if np.isnan(row["p"]):
        return [f"{points['mean']:+.1f}", NONE, NONE]
    p = f"{row['p']:.3f}" if row["p"] >= 0.0005 else "< 0.001"  # 0.000 reads as 0
    return [f"{points['mean']:+.1f}", f"{points['low']:+.1f} to {points['high']:+.1f}", p]
