"""Read finished runs from their folders, and group the runs that differ in the seed only."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cfl.assembly.resolve import dump, load
from cfl.config.overrides import assignment, flat, merged, read_yaml
from cfl.config.presets import preset
from cfl.config.schema import RunConfig
from cfl.core import CheckpointError, ConfigError, content, warn
from cfl.experiments.compare import tells_how
from cfl.report import tables
from cfl.report.repeat import continuing, resolved
from cfl.runtime import model_file
from cfl.runtime.run_folder import ERROR, Metrics, read_json, read_made_of, read_rows, runs_in, sheets
from cfl.runtime.table import spent, stoppers

_TRAINING = ("rounds", "local.", "agg.", "server.")  # options that are often chosen for each method
OBJECTS, DATA, SCENARIO = "objects", "data", "scenario"
_METHODS = ("strategy.", "regularizer.")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run and the contents of its files; `rounds`, `timing` and `machine` are empty without their file.

    config: None if a name is unknown, such as a method of another package; options: dotted name to value, and `OBJECTS`
    to names and hash of the network, strategy and regularizers of the user's own, if the run had any; sheets: task to
    the picture of the images that the method had made by its end; data, scenario: hash of the stream, and its scenario,
    both empty if they are not stored; objects: see `cfl.runtime.model_file.own_objects`.
    """

    path: Path
    metrics: dict[str, Any]
    options: dict[str, Any]
    config: RunConfig | None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, dict[str, float]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    sheets: dict[int, Path] = field(default_factory=dict)
    data: str = ""
    scenario: str = ""
    objects: dict[str, list[str]] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """Text that is equal for runs that differ in the seed only."""
        decisive = {k: value for k, value in self.options.items() if not tells_how(k) and k != "seed"}
        decisive |= {SCENARIO: self.scenario} if self.scenario else {}  # which the option may leave open
        own = [self.metrics["benchmark"], self.metrics["method"], len(self.metrics["accuracy_matrix"])]
        return json.dumps([*own, decisive, self.stopped], sort_keys=True)

    @property
    def stopped(self) -> str:
        """Names of the callbacks that have stopped the run or parts of it; empty for a run at full length."""
        return ", ".join(stoppers(self.metrics))

    @cached_property
    def given(self) -> set[str]:
        """Options that the benchmark's preset sets by method, if the run has the preset's value for its method."""
        cases = preset(self.metrics["benchmark"]).get("variants", {}).get("method", {})
        names = {name for case in cases.values() for name in flat(case)}
        plain = resolved(self.config, ()) if names and self.config else None
        own = flat(dump(plain)) if plain else {}
        return {name for name in names & own.keys() if own[name] == self.options.get(name)}


@dataclass(frozen=True)
class Found:
    """Contents of some folders.

    unfinished: folders of runs without results that no error has ended; twice: folder that is left out, to that of an
    equal run; failed: folder of a run that an error has ended, to its error.json; damaged: folder to what is damaged.
    """

    runs: list[FinishedRun]
    unfinished: list[Path]
    twice: dict[Path, Path]
    failed: dict[Path, dict[str, Any]]
    damaged: dict[Path, str]


@dataclass(frozen=True)
class RunGroup:
    """Finished runs that differ in the seed only. label: the method, and the options that tell the group apart."""

    label: str
    runs: list[FinishedRun]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each run, with the seconds of clients and server if they are stored."""
        return [{**run.metrics, **spent(run.timing)} for run in self.runs]


@dataclass(frozen=True)
class Scene:
    """Groups to compare with each other. setting: options that tell the scene from others of the benchmark."""

    benchmark: str
    setting: str
    groups: list[RunGroup]


def read(paths: Iterable[Path]) -> Found:
    """Read all runs in these folders, at any depth; ConfigError for a path without runs.

    A run with a damaged file is left out with a warning, and a ConfigError if there is no other. Runs of equal options
    and seed on other data are told apart by an option `DATA`.
    """
    folders: dict[Path, None] = {}  # ordered, without duplicates
    for path in paths:
        if not (found := runs_in(path)):
            raise ConfigError(f"'{path}' contains no run; the folder of a run has config.yaml and metrics.json")
        folders |= dict.fromkeys(found)
    runs: dict[tuple[str, int], list[FinishedRun]] = {}
    unfinished, twice, failed, damaged = [], {}, {}, {}
    for folder in folders:
        try:
            data, ended = read_yaml(folder / "config.yaml"), (folder / "metrics.json").is_file()
            run, error = (_run(folder, data), {}) if ended else (None, read_json(folder / ERROR))
        except (CheckpointError, ConfigError) as caught:
            damaged[folder] = str(caught)
            continue
        if run is None:
            if error:
                failed[folder] = {"error": "an error", "message": "without a message", **error}
            else:
                unfinished.append(folder)
            continue
        others = runs.setdefault((run.key, run.metrics["seed"]), [])
        first = next((own for own in others if own.data == run.data or not (own.data and run.data)), None)
        if first is None:
            others.append(run)
        elif first.path.resolve() != folder.resolve():
            twice[folder] = first.path
    if damaged and not (runs or unfinished or failed):
        raise ConfigError(next(iter(damaged.values())))
    for fault in damaged.values():
        warn(f"a run is left out: {fault}")
    if not runs:
        raise _none_finished(unfinished, failed)
    return Found(list(_by_data(runs.values())), unfinished, twice, failed, damaged)


def _by_data(runs: Collection[Sequence[FinishedRun]]) -> Iterator[FinishedRun]:
    """Yield runs, given by key and seed; an option `DATA` tells apart those of a seed that is there on several data."""
    # Data may follow from the seed: other seeds get the option only if they share data with one.
    mixed = {same[0].key for same in runs if len(same) > 1}
    seeds = Counter((run.key, run.data) for same in runs for run in same)
    for same in runs:
        for run in same:
            told = run.key in mixed and (len(same) > 1 or seeds[run.key, run.data] > 1)
            yield replace(run, options={**run.options, DATA: f"hash-{run.data[:6]}"}) if told else run


def _none_finished(unfinished: Sequence[Path], failed: Mapping[Path, Mapping[str, Any]]) -> ConfigError:
    names = ", ".join(f"'{folder}'" for folder in (*unfinished, *failed))
    if not unfinished:
        folder, error = next(iter(failed.items()))
        return ConfigError(f"no run is finished in {names}; '{folder}' failed: {error['error']}: {error['message']}")
    others = ", or repeat the command that began them all" if len(unfinished) + len(failed) > 1 else ""
    return ConfigError(f"no run is finished in {names}; continue with: {continuing(unfinished[0])}{others}")


def scenes(runs: Sequence[FinishedRun]) -> list[Scene]:
    """Sort runs into scenes by benchmark and setting: the options, not of the method, in which its runs differ.

    An option of the training, such as local.lr, belongs to the method if each method has one value of it. If every
    setting has a single group, one scene compares the settings. Scenes that compare groups come first.
    """
    by_benchmark: dict[str, list[FinishedRun]] = {}
    for run in runs:
        by_benchmark.setdefault(run.metrics["benchmark"], []).append(run)
    found = [scene for name in sorted(by_benchmark) for scene in _scenes(name, by_benchmark[name])]
    return sorted(found, key=lambda scene: len(scene.groups) == 1)


def _scenes(benchmark: str, runs: Sequence[FinishedRun]) -> list[Scene]:
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    ordered = [sorted(group, key=lambda run: run.metrics["seed"]) for group in groups.values()]
    firsts = [group[0] for group in ordered]
    free = [name for name in differing(firsts) if len({_setting(run, name) for run in firsts}) > 1]
    tied = [name for name in free if name.startswith(_TRAINING) and _one_by_method(firsts, name)]
    free = [name for name in free if name not in tied]
    ordered.sort(key=lambda group: _order(group[0], free))
    settings = _settings([group[0] for group in ordered], free)
    named = list(zip(settings, ordered, strict=True))
    chosen = _chosen([group[0] for group in ordered], tied)
    if len(set(settings)) == len(ordered):
        texts = [(setting, chosen[group[0].metrics["method"]]) for setting, group in named]
        labels = [_label(group[0], own) for group, own in zip(ordered, texts, strict=True)]
        return [Scene(benchmark, "", list(map(RunGroup, labels, ordered)))]
    by_setting = {setting: [group for own, group in named if own == setting] for setting in settings}
    return [Scene(benchmark, setting, _groups(own, chosen)) for setting, own in by_setting.items()]


def differing(runs: Collection[FinishedRun]) -> list[str]:
    """Names of the options in which runs differ, without benchmark, method, regularizers, seed and `HOW`."""
    aside = ("seed", "method", "regularizers", "benchmark")
    names = dict.fromkeys(name for run in runs for name in run.options if not tells_how(name) and name not in aside)
    return [name for name in names if len({_text(run, name) for run in runs}) > 1]


def option_text(run: FinishedRun, name: str) -> str:
    """Value of an option in the form of `--set`; a dash if the run has no such option."""
    return assignment(name, run.options[name]).partition("=")[2] if name in run.options else tables.NONE


def _run(folder: Path, data: Mapping[str, Any]) -> FinishedRun:
    metrics = read_json(folder / "metrics.json", Metrics)
    try:
        config = load(data)
    except ConfigError:
        config = None  # with an unknown method, options that the run's version lacked are filled in below
    options = flat(dump(config) if config else merged(RunConfig(benchmark="").model_dump(mode="json"), data))
    about, parts = model_file.read(folder), read_made_of(folder).get("run", {})
    own = model_file.own_objects({"stream": metrics["benchmark"], **about}, options["benchmark"])
    if "stream" in own and options["tasks"] is None:
        options["tasks"] = len(metrics["accuracy_matrix"])  # the stream may have had later tasks
    if kinds := [name for kind, names in own.items() if kind != "stream" for name in names]:
        kept = {name: one for name, one in parts.items() if name.startswith(("the code of ", "the network", *_METHODS))}
        options[OBJECTS] = f"{'+'.join(kinds)}-{content.digest(kept)[:6]}"
    hashes = {name: one for name, one in parts.items() if name.startswith("the data of ")}
    timing, machine = read_json(folder / "timing.json", dict[str, dict[str, float]]), read_json(folder / "machine.json")
    origin = content.digest(hashes) if hashes else "", about.get("scenario", ""), own
    return FinishedRun(folder, metrics, options, config, read_rows(folder), timing, machine, sheets(folder), *origin)


def _settings(runs: Sequence[FinishedRun], names: Sequence[str]) -> list[str]:
    """Write these options of each run as text; a value shared by most of the settings is omitted."""
    texts = [tuple(_setting(run, name) for name in names) for run in runs]
    return [tables.shortened(text) for text in _unusual(texts, set(texts))]


def _chosen(runs: Iterable[FinishedRun], names: Sequence[str]) -> dict[str, str]:
    """Each method's value of these options as text; a value shared by most of the methods is omitted."""
    texts = {run.metrics["method"]: tuple(_setting(run, name) for name in names) for run in runs}
    return dict(zip(texts, _unusual(texts.values(), texts.values()), strict=True))


def _unusual(texts: Iterable[tuple[str, ...]], among: Collection[tuple[str, ...]]) -> list[str]:
    """Join each row of texts, without those that more than half of the rows `among` have in the same place.

    The scenario stays: a reader cannot guess which one is left out.
    """
    columns = [Counter(column).most_common(1) for column in zip(*among, strict=True)]
    usual = [
        text if 2 * count > len(among) and not text.startswith(f"{SCENARIO}=") else "" for [(text, count)] in columns
    ]
    return [", ".join(text for text, other in zip(row, usual, strict=True) if text not in ("", other)) for row in texts]


def _one_by_method(runs: Iterable[FinishedRun], name: str) -> bool:
    """Whether each method has a single value of an option."""
    pairs = {(run.metrics["method"], _setting(run, name)) for run in runs}
    return len(pairs) == len({method for method, _ in pairs})


def _groups(groups: Sequence[list[FinishedRun]], chosen: Mapping[str, str]) -> list[RunGroup]:
    """Label the groups of a setting by method, what is chosen for it, and the options in which its groups differ."""
    made = []
    for group in groups:
        first = group[0]
        own = differing([other[0] for other in groups if other[0].metrics["method"] == first.metrics["method"]])
        texts = [chosen[first.metrics["method"]], *(_text(first, name) for name in own)]
        made.append(RunGroup(_label(first, texts), group))
    return made


def _label(run: FinishedRun, texts: Iterable[str]) -> str:
    shown = tables.shortened(", ".join(filter(None, [*texts, f"stopped by {run.stopped}" if run.stopped else ""])))
    return f"{run.metrics['method']} ({shown})" if shown else run.metrics["method"]


def _setting(run: FinishedRun, name: str) -> str:
    """An option as text; empty for an option that belongs to the method."""
    return "" if name.startswith((*_METHODS, OBJECTS)) or name in run.given else _text(run, name)


def _text(run: FinishedRun, name: str) -> str:
    if name == SCENARIO and run.scenario:
        return assignment(name, run.scenario)
    return assignment(name, run.options[name]) if name in run.options else ""


def _order(run: FinishedRun, names: Iterable[str]) -> list[Any]:
    """Key for sorting by setting, then method, then the method's options; numbers are sorted by value."""
    own = [value for name, value in run.options.items() if name.startswith((*_METHODS, OBJECTS))]
    settings = (None if name in run.given else run.options.get(name) for name in names)
    values = [*settings, run.metrics["method"], *own]
    return [(isinstance(v, (int, float)), v if isinstance(v, (int, float)) else str(v)) for v in values]
