"""Keep the figures of a comparison as a file under benchmarks/results.

    python benchmarks/store_compare.py FOLDER FILE [--seconds]

FOLDER: the output of `cfl-run compare`; what is kept is its compare.json, the day and the machine, and of each method
and seed the accuracies that `eval_every` asked for. Seconds are kept on request: other work may have run beside.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from host import about

from cfl.config.overrides import read_yaml
from cfl.runtime.run_folder import read_json, write_json


def stored(folder: Path, seconds: bool = False) -> dict[str, Any]:
    """What is kept of the comparison in a folder."""
    found = read_json(folder / "compare.json")
    ended = datetime.fromtimestamp((folder / "compare.json").stat().st_mtime, UTC)
    methods = {}
    for name, figures in found["methods"].items():
        kept = {key: value for key, value in figures.items() if seconds or not key.endswith("seconds")}
        methods[name] = kept | _curves([folder / run for run in found["runs"][name]])
    about_runs = {"benchmark": found["benchmark"], "command": found["command"], "date": f"{ended:%Y-%m-%d}"}
    return {**about_runs, "machine": about("torch"), "methods": methods}


def _curves(runs: Sequence[Path]) -> dict[str, list[list[float]]]:
    """For each run, the accuracies on the task at hand every so many rounds of training, where they were asked for."""
    curves: dict[str, list[list[float]]] = {}
    for run in runs:
        if every := read_yaml(run / "config.yaml")["eval_every"]:
            rows = map(json.loads, (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines())
            due = [row for row in rows if row["phase"].startswith("train") and (row["round"] + 1) % every == 0]
            curves.setdefault(f"accuracy_every_{every}_rounds", []).append([row["accuracy"] for row in due])
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="output of cfl-run compare")
    parser.add_argument("file", type=Path, help="JSON file to write")
    parser.add_argument("--seconds", action="store_true", help="keep seconds, too")
    given = parser.parse_args()
    write_json(given.file, stored(given.folder, given.seconds))


if __name__ == "__main__":
    main()
