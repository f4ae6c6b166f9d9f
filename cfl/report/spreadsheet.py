"""Finished runs as a CSV file, a row for each; written by the standard library, so that reports need no pandas."""

import csv
import io
from collections.abc import Iterable, Iterator

from cfl.report.runs import FinishedRun, Found, differing, option_text
from cfl.runtime import table


def text(found: Found) -> str:
    """CSV with the columns of `cfl.runtime.table.row`, and of the options those that two runs have set differently.

    Cells are empty for figures and options that a run does not have. The last column is the folder.
    """
    names = [name for name in differing(found.runs) if len({*_values(found.runs, name)}) > 1]
    rows = [_row(run, names) for run in found.runs]
    columns = {name: None for row in rows for name in row}
    tasks = [name for name in columns if name.startswith("task_") and name.split("_")[1].isdigit()]  # last, as to read
    ordered = [*(name for name in columns if name not in (*tasks, "folder")), *tasks, "folder"]
    out = io.StringIO()
    writer = csv.DictWriter(out, ordered, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _values(runs: Iterable[FinishedRun], name: str) -> Iterator[str]:
    """The values of an option in the runs that have it: most options of a method are missing in other methods."""
    return (option_text(run, name) for run in runs if name in run.options)


def _row(run: FinishedRun, names: list[str]) -> dict[str, object]:
    scenario = run.scenario or run.options.get("scenario")
    options = {name: run.options[name] for name in names if name in run.options}
    return {**table.row(run.metrics, scenario, options, run.timing), "folder": str(run.path)}
