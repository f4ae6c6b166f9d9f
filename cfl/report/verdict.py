"""What runs show, in sentences. Claims rest on differences that are paired over seeds."""

import math
from collections.abc import Sequence

from cfl.core.metrics import percent
from cfl.report import paired, tables
from cfl.report.elements import count, listed
from cfl.report.paired import Ranking
from cfl.report.runs import FinishedRun, RunGroup, Scene

_NAMED = 4  # largest number of groups that a sentence names
_CLAIMS = {"acc": ("ACC", "highest", "above"), "fgt": ("FGT", "lowest", "below")}


def sentences(scene: Scene) -> str:
    """Name the groups of a scene, and the best ones if their runs share two seeds or more."""
    groups = scene.groups
    if len(groups) == 1:
        return _alone(groups[0])
    metrics = [group.metrics for group in groups]
    found = {name: ranked for name in _CLAIMS if (ranked := paired.ranking(metrics, name))}
    if not found:
        return _not_compared(groups)
    seeds = found["acc"].seeds
    shared = f"{_who(groups)} are compared over {count(seeds, 'seed')}"
    if {len(group.runs) for group in groups} != {len(seeds)}:
        shared = f"{_who(groups)} have different seeds ({_by_seeds(groups)}), and {shared} that all have"
    return " ".join([f"{shared}.", *(_claim(name, ranked, groups) for name, ranked in found.items())])


def seed_names(runs: Sequence[FinishedRun]) -> str:
    """The seeds of some runs, as in "seeds 0 and 1"."""
    numbers = sorted({run.metrics["seed"] for run in runs})
    return f"seed{'s' * (len(numbers) > 1)} {listed(map(str, numbers))}"


def _alone(group: RunGroup) -> str:
    acc, fgt = _scores(group)
    forgets = "" if fgt == tables.NONE else f" and an FGT of {fgt} %"
    over = seed_names(group.runs) if len(group.runs) == 1 else count(group.runs, "seed")
    return f"{group.label} reaches an ACC of {acc} %{forgets}, over {over}."


def _not_compared(groups: Sequence[RunGroup]) -> str:
    """Figures without a claim: the groups have one seed, or share fewer than two."""
    if len({seed_names(group.runs) for group in groups}) > 1:
        return f"{_who(groups)} share fewer than two seeds, so they are not compared: {_by_seeds(groups)}."
    if len(groups) <= _NAMED:
        found = {group.label: _scores(group) for group in groups}  # bounds and streams of one task have no FGT
        both = [f"{acc} % and {fgt} % for {label}" for label, (acc, fgt) in found.items() if fgt != tables.NONE]
        alone = [f"{acc} % for {label}" for label, (acc, fgt) in found.items() if fgt == tables.NONE]
        parts = [f"{what} {listed(each)}" for what, each in (("ACC and FGT are", both), ("ACC is", alone)) if each]
        figures = f"With {seed_names(groups[0].runs)}, {'; '.join(parts)}."
    else:
        means = [tables.summary(group.metrics)["acc"]["mean"] for group in groups]
        known = [mean for mean in means if not math.isnan(mean)]
        low, high = (percent(extreme(known, default=None)) for extreme in (min, max))
        given = f"the ACC of {count(known, 'group')} lies between {low} % and {high} %"
        few = f"{len(known)} of {count(groups, 'group')} have an ACC" + f", of {low} %" * len(known)
        figures = f"With {seed_names(groups[0].runs)}, {given if len(known) > 1 else few}."
    return figures if len(groups[0].runs) > 1 else f"{figures} One seed shows no difference to be relied on."


def _claim(name: str, ranked: Ranking, groups: Sequence[RunGroup]) -> str:
    """Sentence on the best group in a score, and on the groups that are not told apart from it."""
    title, extreme, side = _CLAIMS[name]
    score = f"{percent(ranked.mean)} ± {percent(ranked.std)} %"
    who, rivals = groups[ranked.best].label, [groups[number] for number in ranked.rivals]
    if rivals:
        part = f"{len(rivals)} of" if len(rivals) < len(ranked.gaps) else "any of"
        others = _who(rivals) if len(rivals) <= _NAMED else f"{part} the {len(ranked.gaps)} others"
        seeds = count(ranked.seeds, "seed")
        return f"{who} has the {extreme} mean {title} ({score}), but {seeds} do not tell it apart from {others}."
    nearest = min(ranked.gaps, key=lambda number: abs(ranked.gaps[number]["mean"]))
    points = sorted(abs(100 * ranked.gaps[nearest][end]) for end in ("low", "high"))
    gap = f"{abs(100 * ranked.gaps[nearest]['mean']):.1f} points {side} {groups[nearest].label}"
    interval = f"95 % interval {points[0]:.1f} to {points[1]:.1f}"
    return f"{who} has the {extreme} {title} ({score}), {gap} ({interval})."


def _scores(group: RunGroup) -> tuple[str, str]:
    row = tables.summary(group.metrics)
    return tables.spread(row["acc"], len(group.runs)), tables.spread(row["fgt"], len(group.runs))


def _who(groups: Sequence[RunGroup]) -> str:
    return listed(group.label for group in groups) if len(groups) <= _NAMED else f"{len(groups)} groups"


def _by_seeds(groups: Sequence[RunGroup]) -> str:
    """List the groups by their seeds."""
    sharing: dict[str, list[str]] = {}
    for group in groups:
        sharing.setdefault(seed_names(group.runs), []).append(group.label)
    return "; ".join(f"{listed(labels)} with {seeds}" for seeds, labels in sharing.items())
