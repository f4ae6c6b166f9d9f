"""The choice among the settings of a grid, by validation data alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from cfl.config.overrides import assignment
from cfl.core import plugins
from cfl.experiments.compare import Group, for_methods


@dataclass(frozen=True)
class Choice:
    """The settings of a method under one combination of varied options, in the order given."""

    groups: Sequence[Group]

    @cached_property
    def scores(self) -> list[float | None]:
        """Validation ACC of each setting, the mean over its seeds, a fraction; None if any of its runs failed."""
        every = [(group, group.results()) for group in self.groups]
        return [
            fmean(run["validation_acc"] for run in found) if len(found) == len(group.runs) else None
            for group, found in every
        ]

    @property
    def best(self) -> Group | None:
        """The first setting with the best score; None if runs of all settings failed."""
        known = [(score, group) for score, group in zip(self.scores, self.groups, strict=True) if score is not None]
        return max(known, key=lambda pair: pair[0])[1] if known else None


def choices(groups: Sequence[Group]) -> list[Choice]:
    """Sort the groups of a plan by method and varied options: within each, the grid leaves a choice."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault((group.method, json.dumps(dict(group.varied), default=str)), []).append(group)
    return [Choice(own) for own in found.values()]


def commands(
    benchmark: str, groups: Sequence[Group], methods: Sequence[str], overrides: Sequence[str], flags: Sequence[str]
) -> list[list[str]]:
    """Return commands that run these groups on all training samples; methods of equal settings share one.

    methods, overrides: of the runs of the grid; flags: further words of each command.
    """
    shared: list[tuple[list[str], dict[str, Any]]] = []
    for group in groups:
        setting = {**group.varied, **group.searched}
        for names, known in shared:  # a method ignores hyper-parameters of others
            if group.method not in names and all(known.get(name, value) == value for name, value in setting.items()):
                names.append(group.method)
                known.update(setting)
                break
        else:
            shared.append(([group.method], setting))
    kept = [text for text in overrides if text.partition("=")[0].strip() != "validation"]
    own = for_methods(methods, kept)
    found = []
    for names, setting in shared:
        fit = [text for text in kept if any(text in own[name] for name in names)]
        texts = [*fit, *(assignment(name, value) for name, value in setting.items())]
        words = [word for text in texts for word in ("--set", text)]
        found.append([*plugins.program(), "compare", benchmark, "--methods", ",".join(names), *words, *flags])
    return found
