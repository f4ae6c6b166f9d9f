"""Runs of a comparison: plan them, find the finished ones, and read their results.

A run's folder is named by method, seed and a hash of what determines its figures. So a killed comparison finds its runs
again, comparisons can share a folder, and finished runs are read instead of repeated.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from cfl import models
from cfl.assembly.resolve import dump, load, resolve
from cfl.config.overrides import change, read_yaml, scoped
from cfl.config.schema import RunConfig, TextConfig
from cfl.core import ConfigError, plugins, unknown
from cfl.core.plugins import roles
from cfl.experiments.settings import VALIDATION, Settings
from cfl.experiments.settings import label as labelled
from cfl.runtime import checkpoint, fingerprint
from cfl.runtime.model_file import objects_in
from cfl.runtime.run_folder import read_json, read_made_of
from cfl.runtime.table import spent, stoppers

HOW = ("engine", "block", "compile", "workers", "threads", "device", "checkpoint_every", "flower")
"""Options of how a run is computed. They change results by rounding, and by draws in the network, see `digest`."""
OWN = {
    "benchmark": "compare on one benchmark at a time",
    "method": "name the methods in --methods",
    "seed": "name the seeds in --seeds",
}
"""Options that tell runs apart, with the arguments that commands have for them."""
OTHER_FOLDER = "it says how runs are computed: give each value a comparison with an --output of its own"
MOST_SEEDS = 10_000


def tells_how(name: str) -> bool:
    """Whether an option, by dotted name, is in `HOW` or in a group of it."""
    return name.partition(".")[0] in HOW


def experiment(config: RunConfig) -> str:
    """Hash the experiment, ten hex digits: all options but `HOW`. Runs of one experiment agree in distribution."""
    return checkpoint.fingerprint(_options(config))[:10]


def digest(config: RunConfig, code: Mapping[str, str] | None = None) -> str:
    """Hash what determines a run's figures, up to rounding: ten hex digits.

    That is the experiment, the options that change draws in the network, the code of other packages, the models that
    the run starts from, and the tokenizer.
    code: hashes as by `fingerprint.code`, by default of the present code.
    """
    code = fingerprint.code(config) if code is None else code
    more = {"draws": _draws(config), "code": code}
    return checkpoint.fingerprint({**_options(config), **{name: own for name, own in more.items() if own}})[:10]


def _options(config: RunConfig) -> dict[str, Any]:
    # Without held-out samples, options of texts and hostile clients, the hashes are those of versions that had none.
    later = {"validation": not config.validation, "text": config.text == TextConfig()}
    later |= {"attack": config.attack.name == "none"}
    skipped = {*HOW, *(name for name, default in later.items() if default)}
    return {name: value for name, value in dump(config).items() if name not in skipped}


def _draws(config: RunConfig) -> dict[str, Any]:
    """Options that change draws in the network; empty if it has no draws, or each client has a generator on the CPU."""
    shared: dict[str, Any] = {"block": config.block} if "vmapped" in config.engine else {}
    shared |= {"engine": "auto"} if config.engine == "auto" else {}
    shared |= {"engine": "flower", "block": config.block} if config.engine == "flower" else {}
    shared |= {} if config.device == "cpu" else {"device": config.device}
    return shared if shared and _network_draws(config.model.name, json.dumps(config.model.options)) else {}


@cache
def _network_draws(name: str, options: str) -> bool:
    return models.draws(name, json.loads(options))


def _answers(config: RunConfig, folder: Path) -> Iterator[str]:
    """The digests of all plans that a finished run fulfils: its own plan, and plans that leave block or engine open."""
    code = read_made_of(folder).get("code", {})
    plain = {name: own for name, own in code.items() if not name.startswith(fingerprint.SOURCES)}
    opened: list[dict[str, Any]] = [{}, {"block": None}, {"block": None, "engine": "auto"}]
    for known, left_open in product((code, plain), opened):
        yield digest(config.model_copy(update=left_open), known)


@dataclass(frozen=True)
class Run:
    """A planned or finished run, and its folder. name: for messages."""

    name: str
    config: RunConfig
    folder: Path

    def results(self) -> dict[str, Any] | None:
        """Return the metrics, the result of `spent`, and `timing` as in timing.json; None if the run is not finished.

        Raises ConfigError for a damaged file.
        """
        if not (metrics := read_json(self.folder / "metrics.json")):
            return None
        timing = read_json(self.folder / "timing.json", dict[str, dict[str, float]])
        return {**metrics, **spent(timing), "timing": timing}


def place(name: str, config: RunConfig, folder: Path, found: Path | None = None) -> Run:
    """Return a run with its own folder inside `folder`, or with the folder `found` of a finished run.

    Raises ConfigError if its own folder has the results of another run.
    """
    run, there = Run(name, config, found or folder / f"{config.label}-seed{config.seed}-{digest(config)}"), config
    if found is None and (run.folder / "metrics.json").exists():
        with suppress(ConfigError):  # as in `finished_in`
            there = load(read_yaml(run.folder / "config.yaml"))
    if there is not config and experiment(there) != experiment(config):
        changed = change(dump(there), dump(config))
        raise ConfigError(
            f"'{run.folder}' holds the results of another run than this comparison put there: {changed}; move it away, "
            "or choose another --output"
        )
    return run


def alone(config: RunConfig) -> str:
    """Name the folder of a single run; the name ends in a hash if options differ from the preset."""
    name = f"{config.benchmark}-{config.label}-seed{config.seed}"
    with suppress(ConfigError):  # some methods need options
        if experiment(resolve(config.benchmark, method=config.label, seed=config.seed)) == experiment(config):
            return name
    return f"{name}-{experiment(config)}"


def finished(*folders: Path) -> dict[str, Path]:
    """Find the finished runs that their config.yaml describes in some folders, at any depth: experiment to folder.

    Raises ConfigError for a missing folder, since its runs would be repeated, and for a run with unknown options.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"'{folder}' is not a folder; name a folder with finished runs")
    paths = [path.parent for folder in folders for path in sorted(folder.rglob("metrics.json")) if _planned(path)]
    found = {}
    for path in (path for path in paths if (path / "config.yaml").is_file()):
        data = read_yaml(path / "config.yaml")
        try:
            config = load(data)
        except ConfigError as error:
            raise ConfigError(f"the run '{path}' is from another version, move it away: {error}") from None
        if not objects_in(path, config.benchmark):
            found[experiment(config)] = path
    return found


def finished_in(folder: Path) -> dict[Path, RunConfig]:
    """Find the finished runs in an output folder, if it exists; skip those with unknown options or own objects."""
    found = {}
    for path in filter(_planned, sorted(folder.glob("*/metrics.json"))):
        with suppress(ConfigError):
            config = load(read_yaml(path.parent / "config.yaml"))
            if not objects_in(path.parent, config.benchmark):
                found[path.parent] = config
    return found


def _planned(metrics: Path) -> bool:
    """Whether a run has all the rounds of its configuration: no callback has stopped it."""
    return not stoppers(read_json(metrics))


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed only.

    varied: the varied options that the method has, with their values; searched: the same for the options of a grid.
    """

    method: str
    varied: Mapping[str, Any]
    runs: Sequence[Run]
    searched: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The method, its varied options, and those of a grid."""
        return labelled(self.method, {**self.varied, **self.searched})

    def results(self) -> list[dict[str, Any]]:
        """Return the results of the finished runs."""
        return [metrics for run in self.runs if (metrics := run.results()) is not None]

    def counterparts(self, groups: Sequence[Group], method: str) -> list[Group]:
        """Select the groups of `method` that agree in all varied options that both groups have."""
        return [
            other
            for other in groups
            if other.method == method
            and all(other.varied.get(name, value) == value for name, value in self.varied.items())
        ]


def plan(
    benchmark: str,
    methods: str,
    seeds: str,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    vary: Sequence[str] = (),
    grid: Sequence[str] = (),
    scale: str | None = None,
    engine: str | None = None,
) -> list[Group]:
    """Plan the runs of methods x settings x seeds, in that order.

    methods: "fedavg,fot+fedsol"; seeds: "0..2" or "0,3,5"; overrides: "key=value" for all runs; vary and grid:
    "key=a,b", whose combinations are the settings. With a grid, runs hold validation data out; see `choices`.
    Hyper-parameters that a method does not define are not passed to it.
    Raises ConfigError in one line for every invalid option, so that nothing fails after hours.
    """
    names, numbers = [name.strip() for name in methods.split(",")], seeds_of(seeds)
    if "" in names:
        raise ConfigError(f"--methods has an empty name in '{methods}'; leave out a comma, or name a method there")
    if len(set(names)) < len(names):
        raise ConfigError(f"--methods takes each method once, not '{methods}'")
    plugins.benchmarks.get(benchmark)  # `resolve` accepts benchmarks that are not registered
    groups: dict[str, Group] = {}
    # By content: an earlier version may have named a folder by another hash.
    stored = {own: path for path, config in finished_in(folder).items() for own in _answers(config, path)}
    fixed = dict.fromkeys(HOW, OTHER_FOLDER) | OWN
    settings = Settings(vary, grid, fixed, overrides, scale)
    for setting in settings:
        texts = {name: f"{name}={json.dumps(value, default=str)}" for name, value in setting.items()}
        own = for_methods(names, [*overrides, *texts.values()])
        for method in names:
            mine = {name: value for name, value in setting.items() if texts[name] in own[method]}
            label, runs = labelled(method, mine), list[Run]()
            if label in groups:  # the method lacks an option in which this setting differs from an earlier one
                continue
            for seed in numbers:
                config = resolve(benchmark, method=method, overrides=own[method], seed=seed, scale=scale, engine=engine)
                if grid and not config.validation:
                    config = config.model_copy(update={"validation": VALIDATION})
                runs.append(place(f"{label}, seed {seed}", config, folder, stored.get(digest(config))))
            searched = {name: mine.pop(name) for name in settings.searched if name in mine}
            groups[label] = Group(method, mine, runs, searched)
    return sorted(groups.values(), key=lambda group: names.index(group.method))


def reference(groups: Sequence[Group], method: str | None) -> str:
    """Return the method with which the others are paired, by default the first; ConfigError if no group has it."""
    known = [group.method for group in groups]
    if method is not None and method not in known:
        raise unknown("method of --against", method, {*known})
    return known[0] if method is None else method


def for_methods(names: Sequence[str], overrides: Sequence[str], fixed: Collection[str] = OWN) -> dict[str, list[str]]:
    """Select the overrides of each method: all but the hyper-parameters of other methods.

    Raises ConfigError for an option that no method has, and for a `fixed` option.
    """
    for name in (text.partition("=")[0].strip() for text in overrides):
        if name in fixed:
            raise ConfigError(f"--set cannot take {name}; the command sets it by an argument of its own, see --help")
    known: dict[str, list[str]] = {}
    for name in names:
        method, regularizers = roles(name)
        owners = {"strategy": plugins.strategies.get(method)}
        owners |= {f"regularizer.{own}": plugins.local.get(own) for own in regularizers}
        known[name] = [f"{owner}.{own.name}" for owner, item in owners.items() for own in fields(item) if own.init]
    return scoped(overrides, known)


def seeds_of(text: str) -> list[int]:
    """Read seeds from "0..2" (both ends included) or "0,3,5"."""
    first, dots, last = text.partition("..")
    try:
        numbers = [int(first), int(last)] if dots else [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if dots and numbers:
        low, high = numbers
        if low > high:
            raise ConfigError(f"--seeds {text} has the larger seed first; write {high}..{low}")
        if high - low >= MOST_SEEDS:
            raise ConfigError(f"--seeds {text} names {high - low + 1} seeds; name at most {MOST_SEEDS}")
        numbers = list(range(low, high + 1))
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds takes 0..2 or 0,3,5, not '{text}'")
    return numbers
