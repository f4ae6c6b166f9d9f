"""Report page on finished runs: one HTML file without scripts or network requests."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from cfl.core.version import __version__
from cfl.report import figures, sheets, tables
from cfl.report.figures import Figure
from cfl.report.plots import Style
from cfl.report.runs import FinishedRun, Found, RunGroup, Scene, command, differing, option_text, overview, scenes
from cfl.report.tables import Cell

_NAMED = 4  # largest number of groups that a sentence names
Styles = Mapping[str, Style]
_WORDS = (
    "Scores are mean ± population standard deviation over seeds; the best scores are bold. ACC is the mean accuracy on "
    "all tasks after the last task. FGT is the mean accuracy lost since a task was learned. LA is the mean accuracy "
    "just after learning a task. MB are 1e6 bytes, summed over all clients and rounds. Seconds are the wall-clock time "
    "of all rounds."
)


def page(found: Found, *, date: str) -> str:
    """Build the page: summary, figures, costs, privacy, configuration, commands. date: day of writing, as text."""
    shown = scenes(found.runs)
    several = len(shown) > 1
    labels = dict.fromkeys(group.label for scene in shown for group in scene.groups)
    styles = {label: Style(number) for number, label in enumerate(labels)}
    table = overview(shown)
    title = f"{_listed(scene.benchmark for scene in shown)}: {_listed(run.metrics['method'] for run in found.runs)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _quiet(f"{_count(found.runs, 'run')}, {_seed_names(found.runs)}. Written {date} by cfl {__version__}."),
        *(f'<p class="lead">{escape(_verdict(scene, several))}</p>' for scene in shown),
        _table(*table),
        _quiet(_WORDS),
        *map(_quiet, _missing(found)),
        *(_scene(scene, styles, several) for scene in shown),
        _section("Synthetic images", *sheets.parts(_makers(shown, styles, several))),
        _section("Privacy spent", _privacy(shown, several)),
        _section("Configuration", *_configuration(shown, several)),
        _section("Commands to repeat the runs", *_repeat(shown, several)),
        _section(
            "Summary table as text",
            _folded("Markdown", tables.markdown(*table)),
            _folded("LaTeX (requires the booktabs package)", tables.latex(*table)),
        ),
    ]
    return _document(title, "\n".join(filter(None, parts)))


def _document(title: str, body: str) -> str:
    style = (files("cfl") / "report" / "page.css").read_text(encoding="utf-8")
    # Names in a run may contain HTML: the policy blocks scripts and requests.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _verdict(scene: Scene, several: bool) -> str:
    """Sentence that names the groups and the best ones; no group is the best if the seeds differ."""
    place = f"On {_place(scene)}: " if several else ""
    summaries = [tables.summary(group.metrics) for group in scene.groups]
    if len(scene.groups) == 1:
        (row,), (group,) = summaries, scene.groups
        acc, fgt = (tables.spread(row[score], len(group.runs)) for score in ("acc", "fgt"))
        forgets = "" if fgt == tables.NONE else f" and an FGT of {fgt} %"
        return f"{place}{group.label} reaches an ACC of {acc} %{forgets}, over {_count(group.runs, 'seed')}."
    won: dict[str, list[str]] = {}  # groups to what they won
    for name, what in (("acc", "the highest ACC"), ("fgt", "the lowest FGT")):
        marks = [cells[0].best for cells in tables.cells(summaries, [name])]
        if any(marks):
            best = [group for group, marked in zip(scene.groups, marks, strict=True) if marked]
            scores = [row[name] for row, marked in zip(summaries, marks, strict=True) if marked]
            values = _listed(tables.spread(score, len(scene.groups[0].runs)) for score in scores)
            won.setdefault(_listed(group.label for group in best), []).append(f"{what} ({values} %)")
    claims = [f"{who} {'have' if ' and ' in who else 'has'} {' and '.join(what)}" for who, what in won.items()]
    number = len(scene.groups)
    who = _listed(group.label for group in scene.groups) if number <= _NAMED else f"{number} groups"
    if not tables.same_seeds(summaries):
        return f"{place}{who} have different seeds, so no group is marked as the best: {_seeds(scene)}."
    over = _count(scene.groups[0].runs, "seed")
    return place + "; ".join(filter(None, (f"{who} are compared over {over}", " and ".join(claims)))) + "."


def _seeds(scene: Scene) -> str:
    """List the groups by their seeds."""
    sharing: dict[str, list[str]] = {}
    for group in scene.groups:
        sharing.setdefault(_seed_names(group.runs), []).append(group.label)
    return "; ".join(f"{_listed(labels)} with {seeds}" for seeds, labels in sharing.items())


def _seed_names(runs: Sequence[FinishedRun]) -> str:
    numbers = sorted({run.metrics["seed"] for run in runs})
    return f"seed{'s' * (len(numbers) > 1)} {_listed(map(str, numbers))}"


def _scene(scene: Scene, styles: Styles, several: bool) -> str:
    """Section with the figures and costs of the groups of a scene."""
    groups = scene.groups
    items = "".join(f"<li>{_mark(styles[group.label])} {escape(group.label)}</li>" for group in groups)
    key = f'<ul class="key">{items}</ul>' if len(groups) > 1 else ""
    parts = []
    for title, drawn, above in (
        ("Accuracy and forgetting", figures.accuracy(groups, styles), key),
        ("Accuracy matrices, percent", figures.matrices(groups), ""),
        ("Subspaces", figures.subspaces(groups), ""),
    ):
        if texts := [_figure(figure, styles) for figure in drawn]:
            parts.append(f'<h3>{title}</h3>{above}<div class="figures">{"".join(texts)}</div>')
    for title, table in (
        ("Bytes by phase", _costs(groups, "MB", _megabytes)),
        ("Seconds by role and phase", _costs(groups, "s", _seconds)),
    ):
        parts += [f"<h3>{title}</h3>{table}"] if table else []
    return _section(_place(scene) if several else "Results", *parts)


def _figure(figure: Figure, styles: Styles) -> str:
    whose = f"{_mark(styles[figure.label])} {escape(figure.label)}" if figure.label else ""
    title = ": ".join(filter(None, (whose, escape(figure.title))))
    return f"<figure><figcaption>{title}</figcaption>\n{figure.svg}</figure>\n"


def _costs(groups: Sequence[RunGroup], unit: str, amounts: Callable[[FinishedRun], dict[str, float]]) -> str:
    """Table of the amounts that the groups spent, mean over their runs; empty if no run stored them."""
    found = {group.label: [spent for run in group.runs if (spent := amounts(run))] for group in groups}
    names = sorted({name for runs in found.values() for run in runs for name, amount in run.items() if amount})
    rows = [
        [label, *(f"{np.mean([run.get(name, 0) for run in runs]):.2f}" if runs else tables.NONE for name in names)]
        for label, runs in found.items()
    ]
    titles = ["method", *(f"{name}, {unit}" for name in names)]
    return _table(titles, [[Cell(text) for text in row] for row in rows]) if names else ""


def _megabytes(run: FinishedRun) -> dict[str, float]:
    phases = run.metrics.get("bytes_by_phase", {})
    return {f"{phase} {way}": phases[phase][way] / 1e6 for phase in phases for way in ("up", "down")}


def _seconds(run: FinishedRun) -> dict[str, float]:
    return {f"{who}: {what}": value for who, phases in run.timing.items() for what, value in phases.items()}


def _makers(shown: Sequence[Scene], styles: Styles, several: bool) -> Iterator[sheets.Maker]:
    """Every run, named by its group and its seed."""
    for scene, group in _all(shown):
        for run in group.runs:
            name = f"{_name(scene, group, several)}, seed {run.metrics['seed']}"
            yield sheets.Maker(name, _mark(styles[group.label]), run)


def _privacy(shown: Sequence[Scene], several: bool) -> str:
    """Table of the privacy spent by groups with differential privacy, mean over their runs; else empty."""
    rows = []
    for scene, group in _all(shown):
        runs = [run for run in group.metrics if "epsilon" in run]
        if runs:
            spent = [np.mean([run["epsilon"] for run in runs])]
            spent += [np.mean([list(run["epsilon_by_client"].values()) for run in runs])]
            spent += [runs[0]["delta"], runs[0]["noise_multiplier"]]
            rows.append([_name(scene, group, several), runs[0]["epsilon_of"], *(f"{value:.3g}" for value in spent)])
    titles = ["method", "covers", "largest epsilon", "mean epsilon of clients", "delta", "noise / clip"]
    return _table(titles, [[Cell(text) for text in row] for row in rows], 2) if rows else ""


def _configuration(shown: Sequence[Scene], several: bool) -> Iterator[str]:
    """Table of the options in which the groups of a benchmark differ, then the configuration of each group."""
    for benchmark in dict.fromkeys(scene.benchmark for scene in shown):
        named = {_name(s, group, several): group.runs[0] for s, group in _all(shown) if s.benchmark == benchmark}
        rows = [[option, *(option_text(run, option) for run in named.values())] for option in differing(named.values())]
        if rows:
            yield _table(["option", *named], [[Cell(text) for text in row] for row in rows])
    for scene, group in _all(shown):
        path = group.runs[0].path / "config.yaml"
        yield _folded(f"{_name(scene, group, several)}: {path}", path.read_text(encoding="utf-8"))


def _repeat(shown: Sequence[Scene], several: bool) -> Iterator[str]:
    """A shell command for each group, and the machines of the runs if they are stored."""
    lines = []
    for scene, group in _all(shown):
        name, run = _name(scene, group, several), group.runs[0]
        again = command(run.config) if run.config else None
        if again is None:  # no options give this configuration, so the command names its file
            again = ["cfl-run", "train", "--config", str(run.path / "config.yaml"), "--seed", str(run.metrics["seed"])]
        folder = f"runs/again/{re.sub('[^a-zA-Z0-9.=+-]+', '-', name).strip('-')}-seed$seed"
        once = shlex.join(again).replace(f"--seed {run.metrics['seed']}", "--seed $seed", 1)
        seeds = " ".join(str(other.metrics["seed"]) for other in group.runs)
        lines.append(f"# {' '.join(name.split())}\nfor seed in {seeds}; do {once} --output {folder}; done\n")
    yield _code("\n".join(lines))
    machines = {json.dumps(run.machine) for _, group in _all(shown) for run in group.runs if run.machine}
    for text in sorted(machines):
        yield _quiet("Computed on: " + ", ".join(f"{name} {value}" for name, value in json.loads(text).items()))


def _missing(found: Found) -> Iterator[str]:
    """Sentences on what the page leaves out, and why."""
    for path in found.unfinished:
        yield f"Left out because it is not finished: {path}"
    for path, first in found.twice.items():
        yield f"Left out because it has the configuration and the seed of {first}: {path}"
    for what, file in (("training loss", "rounds.jsonl"), ("seconds by phase", "timing.json")):
        without = [run for run in found.runs if not (run.path / file).is_file()]
        if without:
            yield f"No {what} for {_count(without, 'run')}: {file} is missing."


def _all(shown: Iterable[Scene]) -> Iterator[tuple[Scene, RunGroup]]:
    return ((scene, group) for scene in shown for group in scene.groups)


def _place(scene: Scene) -> str:
    return f"{scene.benchmark} ({scene.setting})" if scene.setting else scene.benchmark


def _name(scene: Scene, group: RunGroup, several: bool) -> str:
    return f"{_place(scene)}, {group.label}" if several else group.label


def _section(title: str, *parts: str) -> str:
    """A section; empty if all its parts are empty."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(parts)}\n</section>" if any(parts) else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[Cell]], labels: int = 1) -> str:
    """A table that scrolls in its own box. labels: number of leading columns that hold names, not numbers."""
    side = ['class="name"' if column < labels else "" for column in range(len(titles))]
    head = "".join(f'<th scope="col" {how}>{escape(text)}</th>' for text, how in zip(titles, side, strict=True))
    body = ""
    for row in rows:
        names = "".join(f'<th scope="row" class="name">{escape(cell.text)}</th>' for cell in row[:labels])
        texts = (f"<b>{escape(cell.text)}</b>" if cell.best else escape(cell.text) for cell in row[labels:])
        body += f"<tr>{names}{''.join(f'<td>{text}</td>' for text in texts)}</tr>\n"
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(", ".join(titles))}">{table}</div>'


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{_code(text)}</details>\n"


def _code(text: str) -> str:
    return f'<pre tabindex="0">{escape(text)}</pre>'


def _quiet(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def _mark(style: Style) -> str:
    return f'<span class="mark" style="color:{style.colour}" aria-hidden="true">{style.symbol}</span>'


def _count(things: Sequence[Any], what: str) -> str:
    return f"{len(things)} {what}{'s' * (len(things) != 1)}"


def _listed(names: Iterable[str]) -> str:
    """Join names as in a sentence, without duplicates."""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} and {last}" if most else last
