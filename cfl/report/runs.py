"""Finished runs read back from their folders, sorted into groups that differ in the seed alone."""

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cfl.assembly.resolve import dump, load, resolve
from cfl.config.overrides import assignment, flat, read_yaml
from cfl.config.presets import preset
from cfl.config.schema import RunConfig
from cfl.core.errors import ConfigError
from cfl.experiments.compare import HOW, spent
from cfl.report import tables
from cfl.report.tables import Cell
from cfl.run.run_folder import read_json

_NEEDED = ("method", "benchmark", "seed", "acc", "accuracy_matrix")


@dataclass(frozen=True)
class Run:
    """A finished run: its files as they are stored; rounds and timing are empty where only the results were kept.

    config: None where a name in it is not known here, such as that of a method from another package.
    """

    path: Path
    metrics: dict[str, Any]
    options: dict[str, Any]  # dotted name to value
    config: RunConfig | None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, dict[str, float]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """What runs have in common that differ in the seed alone."""
        decisive = {name: value for name, value in self.options.items() if name not in {*HOW, "seed"}}
        return json.dumps([self.metrics["benchmark"], self.metrics["method"], decisive], sort_keys=True)

    @cached_property
    def given(self) -> set[str]:
        """The options that the benchmark's preset chooses by method, where the run has what that gives its own."""
        cases = preset(self.metrics["benchmark"]).get("variants", {}).get("method", {})
        names = {name for case in cases.values() for name in flat(case)}
        plain = _resolved(self.config, ()) if names and self.config else None
        own = flat(dump(plain)) if plain else {}
        return {name for name in names & own.keys() if own[name] == self.options.get(name)}


@dataclass(frozen=True)
class Found:
    """What the folders hold. twice: runs left out, to the ones that have the same configuration."""

    runs: list[Run]
    unfinished: list[Path]
    twice: dict[Path, Path]


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone. label: the method, and the options in which it differs from the others."""

    label: str
    runs: list[Run]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each run, with the seconds that clients and server spent, where they are stored."""
        return [{**run.metrics, **spent(run.timing)} for run in self.runs]


@dataclass(frozen=True)
class Scene:
    """Groups that are compared with each other. setting: what sets the scene apart from others of the benchmark."""

    benchmark: str
    setting: str
    groups: list[Group]


def read(paths: Iterable[Path]) -> Found:
    """All runs in these folders, at any depth; raises ConfigError for a path without one, and for a damaged file."""
    folders: dict[Path, None] = {}  # in order, each one once
    for path in paths:
        found = [file.parent for file in sorted(path.rglob("config.yaml")) if "benchmark" in read_yaml(file)]
        if not found:
            raise ConfigError(f"'{path}' is no run and holds none; a run's folder has config.yaml and metrics.json")
        folders |= dict.fromkeys(found)
    runs: dict[tuple[str, int], Run] = {}
    unfinished, twice = [], {}
    for folder in folders:
        if not (folder / "metrics.json").is_file():
            unfinished.append(folder)
            continue
        run = _run(folder)
        first = runs.setdefault((run.key, run.metrics["seed"]), run)
        if first.path.resolve() != folder.resolve():
            twice[folder] = first.path
    if not runs:
        names, killed = ", ".join(f"'{folder}'" for folder in unfinished), unfinished[0]
        again = ["cfl-run", "train", "--config", f"{killed / 'config.yaml'}", "--output", f"{killed}", "--resume"]
        others = ", or all with the command that began them" if len(unfinished) > 1 else ""
        raise ConfigError(f"no run is finished in {names}; continue with: {shlex.join(again)}{others}")
    return Found(list(runs.values()), unfinished, twice)


def scenes(runs: Sequence[Run]) -> list[Scene]:
    """The runs by what they can be compared on: benchmark, and the options in which its runs differ.

    Where every setting has a single group, the settings are what is compared: they share a scene.
    """
    out = []
    for benchmark in sorted({run.metrics["benchmark"] for run in runs}):
        groups: dict[str, list[Run]] = {}
        for run in runs:
            if run.metrics["benchmark"] == benchmark:
                groups.setdefault(run.key, []).append(run)
        ordered = [sorted(group, key=lambda run: run.metrics["seed"]) for group in groups.values()]
        firsts = [group[0] for group in ordered]
        free = [name for name in differing(firsts) if len({_setting(run, name) for run in firsts}) > 1]
        ordered.sort(key=lambda group: _order(group[0], free))
        settings = _settings([group[0] for group in ordered], free)
        if len(set(settings)) == len(ordered):
            named = zip(ordered, settings, strict=True)
            out.append(Scene(benchmark, "", [Group(_label(group[0], [setting]), group) for group, setting in named]))
            continue
        for setting in dict.fromkeys(settings):
            own = [group for group, its in zip(ordered, settings, strict=True) if its == setting]
            out.append(Scene(benchmark, setting, _groups(own)))
    return out


def overview(scenes: Sequence[Scene]) -> tuple[list[str], list[list[Cell]], int]:
    """The summary table: titles, a row a group, and how many of the first columns are names."""
    names = ["acc", "fgt", "learning_accuracy", "epsilon", "bytes_up", "bytes_down", "seconds", "seeds"]
    summaries = [[tables.summary(group.metrics) for group in scene.groups] for scene in scenes]
    names = [name for name in names if name != "epsilon" or any("epsilon" in row for rows in summaries for row in rows)]
    labels = {"benchmark": len({scene.benchmark for scene in scenes}) > 1, "setting": any(s.setting for s in scenes)}
    shown = [name for name, more_than_one in labels.items() if more_than_one]
    rows = [
        [*(Cell(getattr(scene, name)) for name in shown), Cell(group.label), *cells]
        for scene, own in zip(scenes, summaries, strict=True)
        for group, cells in zip(scene.groups, tables.cells(own, names), strict=True)
    ]
    return [*shown, "method", *tables.head(names)], rows, len(shown) + 1


def differing(runs: Collection[Run]) -> list[str]:
    """Names of the options in which runs differ, but for names of methods, seeds, and how runs are computed."""
    names = dict.fromkeys(name for run in runs for name in run.options)
    aside = {*HOW, "seed", "method", "regularizers", "benchmark"}
    return [name for name in names if name not in aside and len({_text(run, name) for run in runs}) > 1]


def option_text(run: Run, name: str) -> str:
    """The value of an option as `--set` takes it; a dash where the run has no such option."""
    return assignment(name, run.options[name]).partition("=")[2] if name in run.options else tables.NONE


def command(config: RunConfig) -> list[str] | None:
    """The shortest `cfl-run train` found that gives this configuration; None where none does.

    The options in which it differs from the preset are set, those that follow from others are taken out again.
    """
    given: list[str] = []
    wanted = flat(dump(config))
    for _ in range(3):  # an option may choose a variant of the preset, which brings others
        now = flat(dump(found)) if (found := _resolved(config, given)) else wanted
        given += [assignment(name, value) for name, value in wanted.items() if name not in now or now[name] != value]
    if _resolved(config, given) != config:
        return None
    for text in list(given):
        fewer = [other for other in given if other != text]
        given = fewer if _resolved(config, fewer) == config else given
    flags = ["--method", config.label, "--seed", str(config.seed)]
    flags += ["--scale", config.scale] if config.scale != "paper" else []
    return ["cfl-run", "train", config.benchmark, *flags, *(word for text in given for word in ("--set", text))]


def _resolved(config: RunConfig, overrides: Sequence[str]) -> RunConfig | None:
    """The preset for the same names and seed with these options; None where they do not fit."""
    try:
        return resolve(config.benchmark, method=config.label, seed=config.seed, scale=config.scale, overrides=overrides)
    except ConfigError:
        return None


def _run(folder: Path) -> Run:
    metrics, data = read_json(folder / "metrics.json"), read_yaml(folder / "config.yaml")
    if missing := [name for name in _NEEDED if name not in metrics]:
        raise ConfigError(f"'{folder / 'metrics.json'}' is not the result of a run: it has no '{missing[0]}'")
    try:
        config = load(data)
    except ConfigError:
        config = None
    options = flat(dump(config) if config else data)
    rounds = folder / "rounds.jsonl"
    lines = rounds.read_text(encoding="utf-8").splitlines() if rounds.is_file() else []
    try:
        rows = [json.loads(line) for line in lines]
    except json.JSONDecodeError:
        raise ConfigError(f"'{rounds}' is damaged; run it again, or move the file away") from None
    timing, machine = (read_json(folder / name) for name in ("timing.json", "machine.json"))
    return Run(folder, metrics, options, config, rows, timing, machine)


def _settings(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """These options of each run in words; a value that most of the settings share goes without saying."""
    texts = [tuple(_setting(run, name) for name in names) for run in runs]
    columns = [Counter(column) for column in zip(*set(texts), strict=True)]
    usual = [text if 2 * count > len(set(texts)) else "" for column in columns for text, count in column.most_common(1)]
    return [", ".join(text for text, other in zip(row, usual, strict=True) if text not in ("", other)) for row in texts]


def _groups(groups: Sequence[list[Run]]) -> list[Group]:
    """Groups of one setting: by their methods, and the options in which those of a method differ."""
    made = []
    for group in groups:
        first = group[0]
        own = differing([other[0] for other in groups if other[0].metrics["method"] == first.metrics["method"]])
        made.append(Group(_label(first, [_text(first, name) for name in own]), group))
    return made


def _label(run: Run, texts: Iterable[str]) -> str:
    shown = ", ".join(filter(None, texts))
    return f"{run.metrics['method']} ({shown})" if shown else run.metrics["method"]


def _of_method(name: str) -> bool:
    return name.startswith(("strategy.", "regularizer."))


def _setting(run: Run, name: str) -> str:
    """An option in words; nothing for one that belongs to the method."""
    return "" if _of_method(name) or name in run.given else _text(run, name)


def _text(run: Run, name: str) -> str:
    return assignment(name, run.options[name]) if name in run.options else ""


def _order(run: Run, names: Iterable[str]) -> list[Any]:
    """A key that sorts numbers by their value: settings, then methods, then the options of methods."""
    own = [value for name, value in run.options.items() if _of_method(name)]
    settings = (None if name in run.given else run.options.get(name) for name in names)
    values = [*settings, run.metrics["method"], *own]
    return [(isinstance(v, (int, float)), v if isinstance(v, (int, float)) else str(v)) for v in values]
