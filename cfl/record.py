"""The folder of a run and the sinks that show its progress."""

import contextlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import yaml
from filelock import FileLock, Timeout

from cfl.config import RunConfig
from cfl.errors import Busy, ConfigError

_LOCK = ".lock"
_LOOK = 0.5  # seconds: longer than another process takes to see whether the folder is busy


class RunFolder:
    """A run's folder: `config.yaml`, `metrics.json`, `timing.json`, `rounds.jsonl`, `checkpoints/`.

    resume: continue what the folder holds. Raises ConfigError where it cannot be written, or holds a run and
    `resume` is False; Busy where another process is at it. It is this one's until `close`, or the end of the process.
    """

    def __init__(self, path: Path | str, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._rounds, self._metrics = self.path / "rounds.jsonl", self.path / "metrics.json"
        if not resume and (self._rounds.exists() or self._metrics.exists()):
            raise ConfigError(f"'{self.path}' holds a run already; use --resume or another --output")
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"the output folder '{self.path}' cannot be written ({error.strerror}); choose another --output"
            ) from None
        self._lock = FileLock(self.path / _LOCK)
        try:
            self._lock.acquire(timeout=_LOOK)
        except Timeout:
            raise Busy(f"another process is at '{self.path}'; wait for it, or choose another --output") from None

    @staticmethod
    def busy(path: Path) -> bool:
        """Whether another process is at that folder."""
        if not (path / _LOCK).exists():
            return False
        try:
            with FileLock(path / _LOCK, timeout=0):
                return False
        except Timeout:
            return True

    def close(self) -> None:
        """Let other processes have the folder."""
        self._lock.release()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved configuration (plain data) to `config.yaml`."""
        _replace(self.path / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False))

    def read_config(self) -> dict[str, Any]:
        """What `config.yaml` holds; nothing where there is none."""
        path = self.path / "config.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write `metrics.json`, atomically: it is there whole or not at all; NaN is written as null."""
        write_json(self._metrics, metrics)

    def write_timing(self, seconds: Mapping[str, Mapping[str, float]]) -> None:
        """Write `timing.json`: who spent them, to phase, to seconds. No other figure differs when a run is repeated."""
        write_json(self.path / "timing.json", seconds)

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Add a line to `rounds.jsonl`, on its way to the disk when this returns; ConfigError where it cannot be."""
        try:
            with self._rounds.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(row), allow_nan=False) + "\n")
                file.flush()
        except OSError as error:
            raise _unwritable(self._rounds, error) from None

    def sync_rounds(self) -> None:
        """Have `rounds.jsonl` on the disk, so that it survives a loss of power; ConfigError where it cannot be."""
        try:
            for path in (self._rounds, self.path):  # the folder has its name, which `truncate_rounds` gave it
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise _unwritable(self._rounds, error) from None

    def truncate_rounds(self, n_lines: int) -> None:
        """Keep the first `n_lines` whole lines of `rounds.jsonl`: what came after the checkpoint is done again.

        Raises ConfigError where fewer whole lines are there than the checkpoint knows of.
        """
        raw = self._rounds.read_bytes() if self._rounds.exists() else b""
        lines = raw.split(b"\n")[:-1]  # what follows the last newline was torn by a kill
        if len(lines) < n_lines:
            raise ConfigError(
                f"'{self._rounds}' has {len(lines)} whole lines, {n_lines} were expected; use another --output"
            )
        _replace(self._rounds, "".join(f"{line.decode()}\n" for line in lines[:n_lines]))


class Sink(Protocol):
    """What a run reports to while it goes on; rows are documented at the methods of `PlainSink`."""

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """The run begins; notes: what the user should know of it (the coverage of a projection, ...)."""

    def round(self, row: dict[str, Any]) -> None:
        """A round is done."""

    def task(self, row: dict[str, Any]) -> None:
        """A task is done and evaluated."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def warn(self, text: str) -> None:
        """Something went wrong that the run can go on with."""

    def finish(self, metrics: dict[str, Any]) -> None:
        """The run is done."""

    def close(self) -> None:
        """Give the terminal back, however the run ended."""


class NullSink:
    """A sink that shows nothing but warnings."""

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Show nothing."""

    def round(self, row: dict[str, Any]) -> None:
        """Show nothing."""

    def task(self, row: dict[str, Any]) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def warn(self, text: str) -> None:
        """Issue a Python warning, which standard error shows: no progress does not mean no faults."""
        warnings.warn(text, stacklevel=2)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to give back."""


class PlainSink:
    """Plain lines for logs and pipes: some twenty rounds of a run, every task, every note."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file, self._began, self._every = file, 0.0, 1
        self._before: int | None = None  # rounds of earlier sessions

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Name the run: benchmark, method, seed, number of rounds; then the notes."""
        self._began, self._every = time.monotonic(), max(1, total_rounds // 20)
        self._say(f"{config.benchmark}, {config.label}, seed {config.seed}: {total_rounds} rounds")
        for text in notes:
            self.note(text)

    def round(self, row: dict[str, Any]) -> None:
        """row: task, phase, round, loss, accuracy (fraction or None), rounds_done, rounds_total among others."""
        done, total = row["rounds_done"], row["rounds_total"]
        self._before = done - 1 if self._before is None else self._before
        if done % self._every and done != total:
            return
        each = (time.monotonic() - self._began) / (done - self._before)
        left = f", {_clock(each * (total - done))} left" if done < total else ""
        self._say(f"  round {done}/{total}: task {row['task']}, {row['phase']}{_scores(row)}{left}")

    def task(self, row: dict[str, Any]) -> None:
        """row: task, name, accuracy (fractions on every task, None for those not yet seen)."""
        self._say(task_line(row))

    def note(self, text: str) -> None:
        """Print the note."""
        self._say(f"note: {text}")

    def warn(self, text: str) -> None:
        """Print the warning to standard error."""
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Nothing to add: the caller prints the results."""

    def close(self) -> None:
        """Nothing to give back."""

    def _say(self, text: str) -> None:
        print(text, file=self._file or sys.stdout, flush=True)


class RichSink:
    """A live progress bar for terminals: task, round, accuracy and time left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[scores]}"),
            TimeRemainingColumn(),
        )
        self._accuracy: float | None = None
        self._placed = False

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Name the run, print the notes and open the bar."""
        title = f"{config.benchmark}, {config.label}, seed {config.seed}"
        self._id = self._bar.add_task(title, total=total_rounds, scores="")
        self._bar.start()
        for text in notes:
            self.note(text)

    def round(self, row: dict[str, Any]) -> None:
        """Move the bar; rows as for `PlainSink`. The last known accuracy stays in sight."""
        self._accuracy = row.get("accuracy") if row.get("accuracy") is not None else self._accuracy
        scores = f"task {row['task']} {row['phase']}{_scores({**row, 'accuracy': self._accuracy})}"
        if not self._placed:  # a resumed run: the rounds of earlier sessions count as done, not as this session's speed
            self._bar.reset(self._id, completed=row["rounds_done"] - 1, total=row["rounds_total"])
            self._placed = True
        self._bar.update(self._id, completed=row["rounds_done"], total=row["rounds_total"], scores=scores)
        if row["rounds_done"] == row["rounds_total"]:
            self._bar.refresh()

    def task(self, row: dict[str, Any]) -> None:
        """Print the accuracies above the bar; rows as for `PlainSink`."""
        self._accuracy = row["accuracy"][row["task"]]
        self._bar.console.print(task_line(row), markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Print the note above the bar."""
        self._bar.console.print(f"note: {text}", markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """Print the warning to standard error, which the bar leaves alone."""
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Close the bar."""
        self._bar.stop()

    def close(self) -> None:
        """Give the terminal back, however the run ended."""
        self._bar.stop()


class Sinks:
    """Several sinks that are told the same."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Tell each one."""
        for sink in self._sinks:
            sink.start(config, notes, total_rounds)

    def round(self, row: dict[str, Any]) -> None:
        """Tell each one."""
        for sink in self._sinks:
            sink.round(row)

    def task(self, row: dict[str, Any]) -> None:
        """Tell each one."""
        for sink in self._sinks:
            sink.task(row)

    def note(self, text: str) -> None:
        """Tell each one."""
        for sink in self._sinks:
            sink.note(text)

    def warn(self, text: str) -> None:
        """Tell each one."""
        for sink in self._sinks:
            sink.warn(text)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Tell each one."""
        for sink in self._sinks:
            sink.finish(metrics)

    def close(self) -> None:
        """Close each one."""
        for sink in self._sinks:
            sink.close()


def console_sink(quiet: bool) -> Sink:
    """The sink for this process's standard output: none, a live bar on a terminal, plain lines elsewhere."""
    if quiet:
        return NullSink()
    return RichSink() if sys.stdout.isatty() else PlainSink()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file, atomically; NaN is written as null. Raises ConfigError where it cannot be written."""
    _replace(path, json.dumps(plain(data), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where there is no file. Raises ConfigError for a damaged one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"'{path}' is damaged; move its folder away, and run it again")
    return data


def plain(value: Any) -> Any:
    """JSON data of a value: NaN and infinities to None, tuples to lists, numpy and torch scalars to numbers."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def task_line(row: Mapping[str, Any]) -> str:
    """What a finished task came to, in a line; rows as for `PlainSink.task`."""
    seen = [f"{value:.1%}" for value in row["accuracy"] if value is not None]
    spent = f", epsilon {row['epsilon']:.3g} so far" if "epsilon" in row else ""
    return f"after task {row['task']} ({row['name']}): accuracy {' '.join(seen)}{spent}"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"'{path}' cannot be written ({error.strerror}); choose another --output")


def _scores(row: Mapping[str, Any]) -> str:
    parts = [f", loss {row['loss']:.3f}"] if row.get("loss") is not None else []
    return "".join(parts + ([f", accuracy {row['accuracy']:.1%}"] if row.get("accuracy") is not None else []))


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
