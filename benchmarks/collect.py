"""Store finished runs under benchmarks/results/runs, and write benchmarks/RESULTS.md from all that are stored.

    python benchmarks/collect.py [RUN_OR_FOLDER ...]

A stored run is config.yaml, metrics.json, timing.json, and machine.json with the machine and the day on which it ended.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Container, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise, product
from pathlib import Path

from host import about

from cfl.assembly.resolve import load
from cfl.config.overrides import read_yaml
from cfl.core import ConfigError
from cfl.experiments import reproduce
from cfl.experiments.compare import experiment, finished, place, tells_how
from cfl.report import reproduced, tables
from cfl.report.overview import overview
from cfl.report.repeat import command
from cfl.report.runs import FinishedRun, Scene, read, scenes
from cfl.report.tables import Cell
from cfl.runtime.run_folder import write_json

HERE = Path(__file__).parent
RUNS, PAGE = HERE / "results" / "runs", HERE / "RESULTS.md"
SCALES = {"paper": "full length", "small": "small", "smoke": "smoke"}
MORE: tuple[dict[str, str], ...] = (
    {},
    {"precision": "bf16"},
)  # options with which the papers' tables are shown, in sections of their own

_HEAD = """# Results

Made by `python benchmarks/collect.py` from the runs in `benchmarks/results/runs`; nothing here is typed by hand.
Scores are mean ± population standard deviation over the seeds. Differences are ours less the paper's, in brackets
in standard deviations of both where ours has two runs or more. At small scale the numbers are others than the paper's,
which stand there for the order. "Full length" is a benchmark's preset without `--scale`, with the options named.
ACC is the mean accuracy on all tasks after the last one, FGT the mean loss of accuracy since a task was learned, LA the
mean accuracy on each task when it was just learned, and "tasks" the share of test samples whose task is inferred
correctly. Bold: the best, and every score that the seeds do not tell apart from it (`docs/report.md`).
Dashes: nothing printed, not run, or not in `cfl`. Runs shared the machine with others, so seconds are upper bounds.
`docs/reproduce.md` says how to run more.
"""


def store(run: Path, runs: Path = RUNS) -> None:
    """Copy what is worth keeping of a finished run; one that is stored already, perhaps by an earlier version, stays.

    machine.json comes last: without it, the copy was killed and is made again.
    """
    config = load(read_yaml(run / "config.yaml"))
    stored = finished(runs) if runs.is_dir() else {}
    target = place("", config, runs / config.scale / config.benchmark, stored.get(experiment(config))).folder
    if (target / "machine.json").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "timing.json", "metrics.json"):
        if (run / name).exists():  # seconds may not be there
            shutil.copy(run / name, target)
    ended = datetime.fromtimestamp((run / "metrics.json").stat().st_mtime, UTC)
    write_json(target / "machine.json", {"ended": f"{ended:%Y-%m-%d}", **about("torch")})


def page(runs: Path = RUNS) -> str:
    """RESULTS.md of the stored runs: the papers' tables at each scale, then what is in none of them."""
    stored = read([runs]).runs
    used: set[str] = set()
    sections = [_HEAD, _machines(runs)]
    for scale in SCALES:
        for table, options in product(reproduce.tables().values(), MORE):
            wanted = {"scale": scale, **options}.items()
            there, more = [run for run in stored if wanted <= run.options.items()], [*map("=".join, options.items())]
            shown = _table(table, scale, more, runs, there, used) if there else []
            if shown:
                words = ", ".join((SCALES[scale], *(f"`{option}`" for option in more)))
                given = "".join(f" --set {option}" for option in more)
                line = f"cfl-run reproduce {table.name} --scale {scale}{given} --stored benchmarks/results/runs --show"
                sections += [f"## {table.title} ({words})\n\n```\n{line}\n```\n", *shown]
                notes = () if more else table.notes  # they stand in the section above
                sections += ["\n".join(f"- {note}" for note in notes) + "\n"] if notes else []
    rest = [run for run in stored if run.config is None or experiment(run.config) not in used]
    for scale, words in SCALES.items():
        found = scenes([run for run in rest if run.options["scale"] == scale])
        for benchmark in sorted({scene.benchmark for scene in found}):
            sections += [f"## {benchmark}, not in a paper ({words})\n"]
            sections += [line for scene in found if scene.benchmark == benchmark for line in _scene(scene)]
    return "\n".join(sections)


def _scene(scene: Scene) -> list[str]:
    """A table of runs that are in no paper: the options that they share, their commands, and their scores."""
    titles, rows, labels = overview([replace(scene, setting="")])
    configs = [group.runs[0].config for group in scene.groups]
    made = [(command(config) if config else None) or [] for config in configs]
    setting = list(filter(None, scene.setting.split(", ")))
    settings = [*setting, *_shared(made, setting)]
    for group, row, given in zip(scene.groups, rows, made, strict=True):
        if given:  # the label says what differs between the rows, not what differs from the preset
            own = ", ".join(_options(given, settings))
            row[0] = Cell(group.runs[0].metrics["method"] + (f" ({own})" if own else ""))
    lines = "\n".join(shlex.join(one) for one in made if one)
    return [
        *([f"With {', '.join(f'`{option}`' for option in settings)}:\n"] if settings else []),
        *([f"```\n{lines}\n```\n"] if lines else []),
        tables.markdown(titles, rows, labels),
    ]


def _shared(commands: Sequence[Sequence[str]], setting: Container[str]) -> list[str]:
    """The options that all commands set, but for those of the setting and of how runs are computed."""
    first, *others = [_options(words, setting) for words in commands]
    return [text for text in first if all(text in other for other in others)]


def _options(words: Sequence[str], aside: Container[str]) -> list[str]:
    """What a command sets, as labels write it, but for how runs are computed and what is said elsewhere."""
    given = [tables.shortened(word) for flag, word in pairwise(words) if flag == "--set"]
    return [text for text in given if not tells_how(text.partition("=")[0]) and text not in aside]


def _table(
    table: reproduce.Table,
    scale: str,
    more: Sequence[str],
    folder: Path,
    stored: Sequence[FinishedRun],
    used: set[str],
) -> list[str]:
    """The blocks of a table that have runs; adds the hashes of those to `used`.

    more: options of all runs, with which rows without runs are left out; stored: the runs of that scale.
    """
    benchmarks, seeds = ({run.metrics[name] for run in stored} for name in ("benchmark", "seed"))
    near = replace(table, cells=[cell for cell in table.cells if cell.spec.get("benchmark") in (None, *benchmarks)])
    found = near.runs([], sorted(seeds), scale, more, folder / "missing", [folder])
    found = {cell: [run for run in own if run.results()] for cell, own in found.items()}
    used |= {experiment(run.config) for own in found.values() for run in own}
    places = {(cell.part, cell.column) for cell, own in found.items() if own}
    rows = {cell.row for cell, own in found.items() if own or not more}
    shown = {cell: own for cell, own in found.items() if (cell.part, cell.column) in places and cell.row in rows}
    ours = {cell: reproduce.scores(table.measures, own) for cell, own in shown.items()}
    return [_block(*block) for block in reproduced.blocks(table, ours, scale)]


def _block(title: str, heads: list[str], rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(heads) - 1)
    return "\n".join([f"**{title}**", "", *(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)), ""])


def _machines(runs: Path) -> str:
    """Which machines the runs are of, and from when to when."""
    days: dict[str, list[str]] = {}
    for path in sorted(runs.rglob("machine.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        machine = f"{data['processor']}, {data['cores']} cores, {data['system']}, torch {data['torch']}"
        days.setdefault(machine, []).append(data["ended"])
    return "".join(f"- {m}: runs: {len(d)}, {' to '.join(sorted({min(d), max(d)}))}\n" for m, d in sorted(days.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="finished runs, or folders that hold some at any depth")
    try:
        own = finished(*parser.parse_args().folders)
    except ConfigError as error:
        parser.error(str(error))
    for path in own.values():
        store(path)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{len(finished(RUNS))} runs stored; {PAGE} written")


if __name__ == "__main__":
    main()
