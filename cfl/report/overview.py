"""The summary of scenes: a row per group with scores and costs."""

from collections.abc import Sequence

from cfl.report import paired, tables
from cfl.report.runs import Scene
from cfl.report.tables import Cell


def overview(scenes: Sequence[Scene]) -> tuple[list[str], list[list[Cell]], int]:
    """Summary table: titles, a row per group, and the number of leading columns that hold names.

    The names are the benchmark and the setting, if they differ or are set, and the label of the group.
    """
    titles, blocks = by_scene(scenes)
    labels = {"benchmark": len({scene.benchmark for scene in scenes}) > 1, "setting": any(s.setting for s in scenes)}
    shown = [name for name, more_than_one in labels.items() if more_than_one]
    rows = [
        [*(Cell(getattr(scene, name)) for name in shown), *row]
        for scene, rows in zip(scenes, blocks, strict=True)
        for row in rows
    ]
    return [*shown, *titles], rows, len(shown) + 1


def by_scene(scenes: Sequence[Scene]) -> tuple[list[str], list[list[list[Cell]]]]:
    """Titles of the summary, and for each scene a row per group: its label, its scores, its costs and its seeds."""
    names = ["acc", "fgt", "learning_accuracy", *tables.OPTIONAL, "bytes_up", "bytes_down", "seconds", "seeds"]
    summaries = [[tables.summary(group.metrics) for group in scene.groups] for scene in scenes]
    every = [row for rows in summaries for row in rows]
    names = [name for name in names if name not in tables.OPTIONAL or any(name in row for row in every)]
    blocks = []
    for scene, own in zip(scenes, summaries, strict=True):
        best = paired.marked([group.metrics for group in scene.groups])
        rows = tables.cells(own, names, best)
        blocks.append([[Cell(group.label), *row] for group, row in zip(scene.groups, rows, strict=True)])
    return ["method", *tables.head(names)], blocks
