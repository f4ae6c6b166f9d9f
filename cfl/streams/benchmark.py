"""Benchmarks: named streams."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cfl.core import ConfigError, DataError, unknown
from cfl.core.plugins import benchmarks
from cfl.core.typed import described, typed, typed_fields
from cfl.streams.store import Stream
from cfl.streams.tokens import TextOptions

ORDERS = ("random", "natural")


@dataclass(frozen=True)
class Benchmark:
    """A named stream; register an instance in `cfl.plugins.benchmarks`.

    build: (tasks, seed, data_root, download, class_order) -> Stream; tasks is None for the benchmark's default number;
    summary: one line; source: paper and section;
    names: of the tasks, if a run may select tasks by name: `build` then takes a number, None or a tuple of names;
    text: whether the samples are texts: `build` then takes a sixth argument, the `TextOptions`.
    Raises ConfigError for fields of another type and a `build` that does not take these arguments.
    """

    build: Callable[..., Stream]
    summary: str
    source: str
    names: tuple[str, ...] = ()
    text: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        typed_fields(self)
        more = {"text": TextOptions()} if self.text else {}
        try:
            inspect.signature(self.build).bind(None, 0, None, False, "random", *more.values())
        except TypeError as error:
            taken = ", ".join(["tasks, seed, data_root, download, class_order", *more])
            raise ConfigError(f"Benchmark.build must take ({taken}): {error}") from error


@typed
def build(
    name: str,
    *,
    tasks: int | Sequence[str] | None = None,
    seed: int = 0,
    data_root: Path | str | None = None,
    download: bool = False,
    class_order: str = "random",
    text: TextOptions = TextOptions(),
) -> Stream:
    """Build the stream of a registered benchmark.

    tasks: number of tasks, from the first (default: the benchmark's own), or some of `Benchmark.names`, in that order;
    data_root: folder of the data sets (default: the environment variable CFL_DATA); download: fetch missing data;
    class_order: "random" (by seed) or "natural", for streams that split the classes; text: for streams of texts.
    Raises ConfigError for an argument of another type, an unknown name and a value out of range, DataError for missing
    or damaged data and a benchmark that builds no `Stream`.
    """
    benchmark = benchmarks.get(name)
    if class_order not in ORDERS:
        raise unknown("class order", class_order, ORDERS)
    if tasks is not None and not isinstance(tasks, int):
        tasks = _checked(tasks, name, benchmark.names)
    root = None if data_root is None else Path(data_root)
    stream = benchmark.build(tasks, seed, root, download, class_order, *([text] if benchmark.text else []))
    if not isinstance(stream, Stream):
        raise DataError(f"benchmark '{name}' must build a cfl.Stream, not {described(stream)}")
    stream = stream if stream.name == name else replace(stream, name=name)
    return selected(stream, tasks) if isinstance(tasks, int) else stream


def check_count(name: str, tasks: int | None, most: int) -> None:
    """Raise ConfigError for a number of tasks that a benchmark cannot have; None stands for the benchmark's own."""
    if tasks is not None and not 1 <= tasks <= most:
        known = f"in [1, {most}] for '{name}'" if most > 1 else f"1 for '{name}', which is a single task"
        raise ConfigError(f"tasks must be {known}, not {tasks}")


def selected(stream: Stream, tasks: int | Sequence[str] | None) -> Stream:
    """Select tasks of a stream: the first `tasks`, the tasks of these names in this order, or all of them for None.

    Raises ConfigError for a number or a name that the stream does not have, and for names that are not the first ones
    of a stream that numbers the classes of all tasks.
    """
    if tasks is None or tasks == len(stream):
        return stream
    if isinstance(tasks, int):
        if tasks > len(stream):
            raise ConfigError(f"tasks is {tasks}, but stream '{stream.name}' has {len(stream)}; set tasks=null for all")
        check_count(stream.name, tasks, len(stream))
        return replace(stream, tasks=stream.tasks[:tasks])
    named = {task.name: task for task in stream.tasks}
    names = _checked(tasks, stream.name, tuple(named))
    if len(named) < len(stream):
        raise ConfigError(
            f"several tasks of stream '{stream.name}' have one name, so tasks must be a number, not {list(names)}"
        )
    if stream.growing and names != tuple(named)[: len(names)]:
        raise ConfigError(
            f"stream '{stream.name}' numbers the classes of its tasks one after another, so only its first tasks can "
            f"be selected, in their order, not {list(names)}; select them before you set scenario=class"
        )
    return replace(stream, tasks=tuple(named[name] for name in names))


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
