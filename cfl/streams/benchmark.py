"""Benchmarks: named streams."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfl.core import ConfigError, unknown
from cfl.core.plugins import benchmarks
from cfl.streams.store import Stream


@dataclass(frozen=True)
class Benchmark:
    """A named stream; register an instance in `cfl.plugins.benchmarks`.

    build: (tasks, seed, data_root, download, class_order) -> Stream; tasks is None for the benchmark's default number;
    summary: one line; source: paper and section;
    names: of the tasks, if a run may select tasks by name: `build` then takes a number, None or a tuple of names.
    """

    build: Callable[[Any, int, Path | None, bool, str], Stream]
    summary: str
    source: str
    names: tuple[str, ...] = ()


def build(
    name: str,
    *,
    tasks: int | Sequence[str] | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    download: bool = False,
    class_order: str = "random",
) -> Stream:
    """Build the stream of a registered benchmark.

    tasks: number of tasks, from the first (default: the benchmark's own), or some of `Benchmark.names`, in that order;
    data_root: folder of the data sets (default: the environment variable CFL_DATA); download: fetch missing data;
    class_order: "random" (by seed) or "natural", for streams that split the classes.
    Raises ConfigError for an unknown name or a value out of range, DataError for missing or damaged data.
    """
    benchmark = benchmarks.get(name)
    if tasks is not None and not isinstance(tasks, int):
        tasks = _checked(tasks, name, benchmark.names)
    return benchmark.build(tasks, seed, data_root, download, class_order)


def _checked(tasks: Sequence[str], name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Names of tasks as a tuple; raises ConfigError unless the benchmark has all of them and each occurs once."""
    if not known:
        raise ConfigError(f"tasks must be a number for '{name}', whose tasks have no names, not {list(tasks)}")
    for task in tasks:
        if task not in known:
            raise unknown(f"task of '{name}'", task, known)
    if not tasks or len(set(tasks)) < len(tasks):
        raise ConfigError(f"tasks of '{name}' must name at least one task, each once, not {list(tasks)}")
    return tuple(tasks)
