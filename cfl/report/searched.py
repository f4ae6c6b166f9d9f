"""Results of a grid: the validation accuracy of all settings, and which of them was chosen."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Column, Table

from cfl.experiments.compare import Group
from cfl.experiments.grid import Choice
from cfl.report import tables


def table(choices: Sequence[Choice]) -> Table:
    """A row per setting: validation ACC in percent, and no accuracy on test samples, by which nobody should choose."""
    numbers = [Column(text, justify="right") for text in ("val. ACC %", "seeds")]
    title = "grid: accuracy on the held-out training samples"
    shown = Table("setting", *numbers, "chosen", title=title, title_justify="left")
    for choice in choices:
        for group in choice.groups:
            found = group.results()
            scores = tables.summary(found)["validation_acc"] if found else {"mean": math.nan}
            score = tables.spread(scores, len(found), decimals=2)  # of few samples: close settings are common
            mark = "yes" if group is choice.best else _failures(group)
            shown.add_row(group.label, score, str(len(found)), mark)
    return shown


def stored(choices: Sequence[Choice]) -> dict[str, Any]:
    """For JSON: label of a setting to its options, its runs, whether it was chosen, and the summary of its runs."""
    return {
        group.label: {
            "method": group.method,
            "setting": {**group.varied, **group.searched},
            "chosen": group is choice.best,
            "runs": [run.folder.name for run in group.runs if run.results() is not None],
            "failed": len(group.runs) - len(group.results()),
            **(tables.summary(found) if (found := group.results()) else {}),
        }
        for choice in choices
        for group in choice.groups
    }


def notes(choices: Sequence[Choice]) -> Iterator[str]:
    """A line for each method without a choice, among ties, and for a chosen number at an end of three or more."""
    for choice in choices:
        if choice.best is None:
            first = choice.groups[0]
            yield f"no setting of {first.method} is chosen: runs of each of its {len(choice.groups)} failed"
            continue
        if len(choice.groups) > 1 and len({*choice.scores}) == 1:
            yield f"{choice.best.label}: all {len(choice.groups)} settings have the same score; the first one is chosen"
            continue
        for name, value in choice.best.searched.items():
            tried = [group.searched[name] for group in choice.groups]
            if all(isinstance(each, int | float) for each in tried) and len({*tried}) > 2:
                ends = {min(tried): "smallest value; try smaller", max(tried): "largest value; try larger"}
                if value in ends:
                    yield f"{choice.best.label}: {name}={value} is the {ends[value]} ones, too"


def _failures(group: Group) -> str:
    failed = len(group.runs) - len(group.results())
    return f"no: {failed} of {len(group.runs)} runs failed" if failed else ""
