"""Report page on finished runs: one HTML file without scripts or network requests."""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

import numpy as np

from cfl.core import plugins
from cfl.core.version import __version__
from cfl.report import figures, paired, sheets, tables, unfinished, verdict
from cfl.report.elements import breaking, code, count, folded, grouped, listed, mark, quiet, section, table
from cfl.report.figures import Figure, Panel, Styles
from cfl.report.overview import by_scene, overview
from cfl.report.repeat import command
from cfl.report.runs import FinishedRun, Found, RunGroup, Scene, differing, option_text, scenes
from cfl.report.tables import Cell
from cfl.runtime import notebook

Named = Sequence[tuple[str, RunGroup]]  # the groups of all scenes, each with its name on the page
_WIDTH = 74  # rem, of the page on a wide screen, as in page.css
_WORDS = (
    "Scores are mean ± population standard deviation over seeds. ACC is the mean accuracy on all tasks after the last "
    "task. FGT is the mean accuracy lost since a task was learned. LA is the mean accuracy just after learning a task. "
    "MB are 1e6 bytes, summed over all clients and rounds. Seconds are wall-clock time, evaluations included."
)
_FURTHER = {  # columns of `tables.OPTIONAL`; epsilon has a section of its own
    "fwt": "FWT is the mean accuracy on a task just before learning it, less that of the initial model.",
    "validation_acc": "val. ACC is ACC on held-out training samples.",
    "task_accuracy": "tasks % is the share of test samples whose task is inferred right.",
}
_BOLD = (
    "Bold: the best score, and every score that prints like it or whose paired difference from it has a 95 % interval "
    "that contains 0. If that holds for all, or if groups have fewer than two seeds or different ones, nothing is bold."
)


def page(found: Found, *, date: str, highlight: str | None = None) -> str:
    """Build the page: summary, figures, costs, privacy, configuration, commands.

    date: day of writing, as text; highlight: as for `figures.styles`.
    """
    shown = scenes(found.runs)
    several = len(shown) > 1
    groups = [(scene, group) for scene in shown for group in scene.groups]
    named = [(f"{_place(scene)}, {group.label}" if several else group.label, group) for scene, group in groups]
    styles = figures.styles(shown, highlight)
    title = f"{listed(scene.benchmark for scene in shown)}: {listed(run.metrics['method'] for run in found.runs)}"
    text = overview(shown)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _head(found, date),
        *(_lead(scene) for scene in shown if not several),
        _summary(shown, several),
        quiet(_WORDS),
        *(quiet(text) for name, text in _FURTHER.items() if any(name in run.metrics for run in found.runs)),
        quiet(_BOLD) if any(len(scene.groups) > 1 and len(scene.groups[0].runs) > 1 for scene in shown) else "",
        *map(quiet, _missing(found)),
        section("Runs without results", *unfinished.parts(found), name="unfinished"),
        *(_scene(scene, styles, several) for scene in shown),
        section("Synthetic images", *sheets.parts(_makers(named, styles))),
        section("Privacy spent", _privacy(named)),
        section("Configuration", *_configuration(named)),
        section("Commands to repeat the runs", *_repeat(named)),
        section(
            "Summary table as text",
            folded("Markdown", tables.markdown(*text)),
            folded("LaTeX (requires the booktabs package)", tables.latex(*text)),
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


def _head(found: Found, date: str) -> str:
    """Numbers of runs, seeds, date and version."""
    without = unfinished.counted(found)
    link = f'; <a href="#unfinished">{escape(without)}</a>' if without else ""
    runs = escape(f"{count(found.runs, 'run')}, {verdict.seed_names(found.runs)}")
    return f'<p class="quiet">{runs}{link}. {escape(f"Written {date} by cfl {__version__}.")}</p>'


def _lead(scene: Scene) -> str:
    text = escape(verdict.sentences(scene)).replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")
    return f'<p class="lead">{text}</p>'


def _summary(shown: Sequence[Scene], several: bool) -> str:
    titles, blocks = by_scene(shown)
    return grouped(
        titles, [(_place(scene) if several else "", rows) for scene, rows in zip(shown, blocks, strict=True)]
    )


def _scene(scene: Scene, styles: Styles, several: bool) -> str:
    """Section with the figures and costs of the groups of a scene."""
    groups = scene.groups
    items = "".join(f"<li>{mark(styles[group.label])} {escape(tables.unbroken(group.label))}</li>" for group in groups)
    key = f'<ul class="key">{items}</ul>' if len(groups) > 1 else ""
    accuracy = "".join(_figure(figure) for figure in figures.accuracy(groups, styles))
    matrices = _panels(notebook.MATRIX, figures.matrices(groups), styles)
    subspaces = _panels(
        "Share of each layer (rows) after each task (columns), percent", figures.subspaces(groups), styles
    )
    parts = [_lead(scene)] if several else []
    for title, part in (
        ("Paired differences from the best, percentage points", _differences(groups)),
        ("Accuracy and forgetting", f'{key}<div class="figures">{accuracy}</div>'),
        ("Accuracy matrices", matrices),
        ("Subspaces", subspaces),
        ("Bytes by phase", _costs(groups, "MB", _megabytes)),
        ("Seconds by role and phase", _costs(groups, "s", _seconds)),
    ):
        parts += [f"<h3>{title}</h3>{part}"] if part else []
    return section(_place(scene) if several else "Results", *parts)


def _differences(groups: Sequence[RunGroup]) -> str:
    """Table of the differences of each group from the best one in ACC and in FGT; empty without two seeds to pair."""
    metrics = [group.metrics for group in groups]
    found = {name: ranked for name in paired.MEASURES if (ranked := paired.ranking(metrics, name))}
    if not found:
        return ""
    rows = []
    for number, group in enumerate(groups):
        texts = [group.label]
        for ranked in found.values():
            gap = ranked.gaps.get(number)
            texts += paired.cells(gap) if gap else ["best" if number == ranked.best else tables.NONE, "", ""]
        rows.append([Cell(text) for text in texts])
    return table(["method", *(title for name in found for title in paired.heads(name))], rows)


def _figure(figure: Figure) -> str:
    return f"<figure><figcaption>{escape(figure.title)}</figcaption>\n{figure.svg}</figure>\n"


def _panels(about: str, panels: Iterable[Panel], styles: Styles) -> str:
    """Small multiples: shaded tables of all groups with one scale; empty without panels."""
    shown, drawn = list(panels), ""
    if not shown:
        return ""
    for one in shown:
        what = f'<span class="quiet">{escape(one.title)}</span>' if one.title else ""
        shaded = notebook.shaded(one.rows.tolist(), one.names, range(one.rows.shape[1]))
        name = escape(": ".join(filter(None, (one.label, one.title))))
        inside = f'<div class="scroll shaded" tabindex="0" role="region" aria-label="{name}">{shaded}</div>'
        drawn += f'<div class="panel"><p>{mark(styles[one.label])} {breaking(one.label)} {what}</p>{inside}</div>\n'
    rows = math.ceil(len(shown) / max(1, _WIDTH // max(map(_panel_width, shown))))
    columns = math.ceil(len(shown) / rows)  # as many in each row as in the others, if possible
    caption = f'<figcaption class="quiet">{escape(about)} {notebook.scale()}</figcaption>'
    return f'<figure>{caption}<div class="panels" style="--columns:{columns}">{drawn}</div></figure>'


def _panel_width(panel: Panel) -> float:
    """Width in rem with the gap, as in page.css."""
    cell = 3 if max(panel.rows.shape) <= notebook.MOST_NUMBERS else 1.2
    return max(12, 2 + cell * panel.rows.shape[1]) + 2.5


def _costs(groups: Sequence[RunGroup], unit: str, amounts: Callable[[FinishedRun], dict[str, float]]) -> str:
    """Table of the amounts that the groups spent, mean over their runs, without columns of zeros.

    Empty if no run stored them, or all are 0.
    """
    found = {group.label: [spent for run in group.runs if (spent := amounts(run))] for group in groups}
    columns = {}
    for name in sorted({name for runs in found.values() for run in runs for name in run}):
        texts = [
            f"{np.mean([run.get(name, 0) for run in runs]):.2f}" if runs else tables.NONE for runs in found.values()
        ]
        if {*texts} - {"0.00", tables.NONE}:
            columns[f"{name}, {unit}"] = texts
    rows = [[Cell(label), *map(Cell, texts)] for label, *texts in zip(found, *columns.values(), strict=True)]
    return table(["method", *columns], rows) if columns else ""


def _megabytes(run: FinishedRun) -> dict[str, float]:
    phases = run.metrics.get("bytes_by_phase", {})
    return {f"{phase} {way}": phases[phase][way] / 1e6 for phase in phases for way in ("up", "down")}


def _seconds(run: FinishedRun) -> dict[str, float]:
    return {f"{who}: {what}": value for who, phases in run.timing.items() for what, value in phases.items()}


def _makers(named: Named, styles: Styles) -> Iterator[sheets.Maker]:
    """Every run, named by its group and its seed."""
    for name, group in named:
        for run in group.runs:
            yield sheets.Maker(f"{name}, seed {run.metrics['seed']}", mark(styles[group.label]), run)


def _privacy(named: Named) -> str:
    """Table of the privacy spent by groups with differential privacy, mean over their runs; else empty."""
    rows = []
    for name, group in named:
        runs = [run for run in group.metrics if "epsilon" in run]
        if runs:
            spent = [np.mean([run["epsilon"] for run in runs])]
            spent += [np.mean([epsilon for run in runs for epsilon in run["epsilon_by_client"].values()] or [0.0])]
            spent += [runs[0]["delta"], np.mean([run["noise_multiplier"] for run in runs])]
            rows.append([name, runs[0]["epsilon_of"], *(f"{value:.3g}" for value in spent)])
    titles = ["method", "covers", "largest epsilon", "mean epsilon of clients", "delta", "noise / clip"]
    return table(titles, [[Cell(text) for text in row] for row in rows], 2) if rows else ""


def _configuration(named: Named) -> Iterator[str]:
    """Table of the options in which the groups of a benchmark differ, then the configuration of each group."""
    firsts = {name: group.runs[0] for name, group in named}
    for benchmark in dict.fromkeys(run.metrics["benchmark"] for run in firsts.values()):
        own = {name: run for name, run in firsts.items() if run.metrics["benchmark"] == benchmark}
        rows = [[option, *(option_text(run, option) for run in own.values())] for option in differing(own.values())]
        if rows:
            yield table(["option", *own], [[Cell(text) for text in row] for row in rows])
    for name, group in named:
        path = group.runs[0].path / "config.yaml"
        yield folded(f"{name}: {path}", path.read_text(encoding="utf-8"))


def _repeat(named: Named) -> Iterator[str]:
    """A shell command for each group, and the machines of the runs if they are stored."""
    lines = []
    for name, group in named:
        run = group.runs[0]
        if run.objects:
            own = ", ".join(f"{kind} ({', '.join(names)})" for kind, names in run.objects.items())
            lines.append(" ".join(f"# {name}: has its own {own}; repeat it by your program".split()) + "\n")
            continue
        again = command(run.config) if run.config else None
        if again is None:  # no options give this configuration, so the command names its file
            file = str(run.path / "config.yaml")
            again = [*plugins.program(), "train", "--config", file, "--seed", str(run.metrics["seed"])]
        folder = f"runs/again/{re.sub('[^a-zA-Z0-9.=+-]+', '-', name).strip('-')}-seed$seed"
        once = shlex.join(again).replace(f"--seed {run.metrics['seed']}", "--seed $seed", 1)
        seeds = " ".join(str(other.metrics["seed"]) for other in group.runs)
        lines.append(f"# {' '.join(name.split())}\nfor seed in {seeds}; do {once} --output {folder}; done\n")
    yield code("\n".join(lines))
    if any("stream" in group.runs[0].objects for _, group in named):
        yield quiet("If a Python file registers the stream, write this report by cfl-run --plugin FILE report.")
    machines = {json.dumps(run.machine) for _, group in named for run in group.runs if run.machine}
    for text in sorted(machines):
        yield quiet("Computed on: " + ", ".join(f"{name} {value}" for name, value in json.loads(text).items()))


def _missing(found: Found) -> Iterator[str]:
    """Sentences on what the page leaves out of the finished runs, and why."""
    for path, first in found.twice.items():
        yield f"Left out because it has the configuration and the seed of {first}: {path}"
    for fault in found.damaged.values():
        yield f"A run is left out: {fault}"
    for what, file in (("training loss", "rounds.jsonl"), ("seconds by phase", "timing.json")):
        without = [run for run in found.runs if not (run.path / file).is_file()]
        if without:
            yield f"No {what} for {count(without, 'run')}: {file} is missing."


def _place(scene: Scene) -> str:
    return f"{scene.benchmark} ({scene.setting})" if scene.setting else scene.benchmark
