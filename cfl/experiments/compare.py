"""Many runs: which ones a comparison needs, and what is known of those that are finished.

A run's folder is named by method, seed and a hash of what decides its result. So a killed comparison finds its runs
again, several can share a folder, and what is finished is read and not run again.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cfl.assembly.resolve import dump, load, resolve
from cfl.config.overrides import read_value, read_yaml, scoped
from cfl.config.schema import RunConfig
from cfl.core import options, plugins
from cfl.core.errors import ConfigError
from cfl.core.plugins import roles
from cfl.run import checkpoint
from cfl.run.run_folder import read_json

HOW = ("engine", "block", "workers", "threads", "device", "checkpoint_every")
"""Options of how a run is computed: two that differ in nothing else have the same result, up to rounding."""
OWN = ("benchmark", "method", "seed")
"""Options that name a run among others."""


def digest(config: RunConfig) -> str:
    """Ten hex digits that differ between runs of different results."""
    decisive = {name: value for name, value in dump(config).items() if name not in HOW}
    return checkpoint.fingerprint(decisive)[:10]


@dataclass(frozen=True)
class Run:
    """A run and the folder that it has, or is to have. name: for people, among its like."""

    name: str
    config: RunConfig
    folder: Path

    @cached_property
    def digest(self) -> str:
        """The hash of its configuration; the name of a stored folder may have one of an earlier version."""
        return digest(self.config)

    def results(self) -> dict[str, Any] | None:
        """Its metrics, `timing` as in timing.json, and what `spent` makes of it; None where not finished.

        Raises ConfigError for a damaged file.
        """
        if not (metrics := read_json(self.folder / "metrics.json")):
            return None
        timing = read_json(self.folder / "timing.json")
        return {**metrics, **spent(timing), "timing": timing}


def spent(timing: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """`client_seconds` and `server_seconds` of a run's timing.json; nothing where it was not stored."""
    return {f"{who.removesuffix('s')}_seconds": sum(timing[who].values()) for who in ("clients", "server") if timing}


def place(name: str, config: RunConfig, folder: Path) -> Run:
    """A run in a folder of many."""
    return Run(name, config, folder / f"{config.label}-seed{config.seed}-{digest(config)}")


def alone(config: RunConfig) -> str:
    """A name for the folder of a run that is not one of many; its hash is there if options are not the preset's."""
    name = f"{config.benchmark}-{config.label}-seed{config.seed}"
    with suppress(ConfigError):  # some methods need options
        if digest(resolve(config.benchmark, method=config.label, seed=config.seed)) == digest(config):
            return name
    return f"{name}-{digest(config)}"


def finished(*folders: Path) -> dict[str, Path]:
    """The folders of finished runs below some folders, at any depth, by the hash of their configurations.

    Raises ConfigError for a folder that is not there, whose runs would be computed again, and names a run that has
    options which are not known here.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"'{folder}' is no folder; name one that holds finished runs")
    paths = [path.parent for folder in folders for path in sorted(folder.rglob("metrics.json"))]
    found = {}
    for path in (path for path in paths if (path / "config.yaml").is_file()):
        data = read_yaml(path / "config.yaml")
        try:
            found[digest(load(data))] = path
        except ConfigError as error:
            raise ConfigError(f"the run '{path}' is of another version, move it away: {error}") from None
    return found


def finished_in(folder: Path) -> dict[str, Path]:
    """As `finished`, in the folder of a comparison: it may not be there yet, what is not known here is passed over."""
    found = {}
    for path in sorted(folder.glob("*/metrics.json")):
        with suppress(ConfigError):
            found[digest(load(read_yaml(path.parent / "config.yaml")))] = path.parent
    return found


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone. varied: option to value, of those that are varied and that it has."""

    method: str
    varied: Mapping[str, Any]
    runs: Sequence[Run]

    @property
    def label(self) -> str:
        """The method, and the options in which it differs from other groups of the method."""
        return _label(self.method, self.varied)

    def results(self) -> list[dict[str, Any]]:
        """The metrics of its finished runs."""
        return [metrics for run in self.runs if (metrics := run.results()) is not None]

    def counterparts(self, groups: Sequence[Group], method: str) -> list[Group]:
        """The groups of another method with the same values of the varied options that both have."""
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
    scale: str | None = None,
    engine: str | None = None,
) -> list[Group]:
    """The runs of methods x settings x seeds, in that order.

    methods: "fedavg,fot+fedsol"; seeds: "0..2" or "0,3,5"; overrides: "key=value" for all runs; vary: "key=a,b", each
    combination of which is a setting. A method gets those of the others' hyper-parameters not.
    Raises ConfigError in one line for whatever cannot be run: nothing may show after hours.
    """
    names, numbers = [name.strip() for name in methods.split(",")], seeds_of(seeds)
    if len(set(names)) < len(names):
        raise ConfigError(f"--methods takes each method once, not '{methods}'")
    plugins.benchmarks.get(benchmark)  # which a configuration may not know, but a run has to
    groups: dict[str, Group] = {}
    there = finished_in(folder)  # an earlier version may have named them by another hash
    varying = [_values(text) for text in vary]
    for name, count in Counter(values[0][0] for values in varying).items():
        if count > 1:
            raise ConfigError(f"--vary takes {name} once, with all its values: --vary {name}=A,B")
    for combination in itertools.product(*varying):
        settings = [f"{name}={json.dumps(value, default=str)}" for name, value in combination]
        own = for_methods(names, [*overrides, *settings])
        for name in names:
            varied = {key: value for (key, value), text in zip(combination, settings, strict=True) if text in own[name]}
            label, runs = _label(name, varied), []
            if label in groups:  # what a method does not have is not varied for it
                continue
            for seed in numbers:
                config = resolve(benchmark, method=name, overrides=own[name], seed=seed, scale=scale, engine=engine)
                run = place(f"{label}, seed {seed}", config, folder)
                runs.append(replace(run, folder=there.get(run.digest, run.folder)))
            groups[label] = Group(name, varied, runs)
    return sorted(groups.values(), key=lambda group: names.index(group.method))


def for_methods(names: Sequence[str], overrides: Sequence[str], fixed: Sequence[str] = OWN) -> dict[str, list[str]]:
    """The methods, each with the overrides that are for it: of hyper-parameters its own.

    Raises ConfigError for an option that no method has, and for one that is `fixed` otherwise.
    """
    for name in (text.partition("=")[0].strip() for text in overrides):
        if name in fixed:
            raise ConfigError(f"--set cannot take {name}, which is given otherwise; see the command's --help")
    known: dict[str, list[str]] = {}
    for name in names:
        method, regularizers = roles(name)
        owners = {"strategy": plugins.strategies.get(method)}
        owners |= {f"regularizer.{own}": plugins.local.get(own) for own in regularizers}
        known[name] = [f"{owner}.{row['name']}" for owner, item in owners.items() for row in options.describe(item)]
    return scoped(overrides, known)


def _label(method: str, varied: Mapping[str, Any]) -> str:
    return ", ".join([method, *(f"{name}={value}" for name, value in varied.items())])


def seeds_of(text: str) -> list[int]:
    """The seeds of "0..2" (both ends included) or "0,3,5"."""
    first, dots, last = text.partition("..")
    try:
        numbers = list(range(int(first), int(last) + 1)) if dots else [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds takes 0..2 or 0,3,5, not '{text}'")
    return numbers


def _values(text: str) -> list[tuple[str, Any]]:
    """The pairs of name and value of "key=a,b"."""
    name, equals, values = text.partition("=")
    name = name.strip()
    found = read_value(name, f"[{values}]") if equals and name else []
    if not found:
        raise ConfigError(f"--vary takes key=value,value, such as strategy.threshold=0.8,0.9, not '{text}'")
    if name in (*HOW, *OWN):
        raise ConfigError(f"--vary cannot take {name}, which is no setting of a method; see 'cfl-run compare --help'")
    return [(name, value) for value in found]
