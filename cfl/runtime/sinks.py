"""Sinks: receivers of a run's progress."""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import IO, Any, Protocol, runtime_checkable

from cfl.config.schema import RunConfig
from cfl.core import warn


@runtime_checkable
class Sink(Protocol):
    """Receives the progress of a run. `PlainSink` documents the rows."""

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Start a run of `total_rounds` rounds. notes: remarks for the user, such as the coverage of a projection."""

    def round(self, row: dict[str, Any]) -> None:
        """Report a finished round."""

    def task(self, row: dict[str, Any]) -> None:
        """Report a finished and evaluated task."""

    def note(self, text: str) -> None:
        """Report a remark for the user."""

    def warn(self, text: str) -> None:
        """Report a fault that does not stop the run."""

    def finish(self, metrics: dict[str, Any]) -> None:
        """Report the results of a finished run."""

    def close(self) -> None:
        """Release the terminal and files, also after an error."""


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
        """Issue a Python warning, so that faults appear on standard error."""
        warn(text)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to release."""


class PlainSink:
    """Plain lines for logs and pipes: about twenty rounds of a run, every task, every note."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file, self._began, self._every = file, 0.0, 1
        self._before: int | None = None  # rounds finished before this session
        self._held = False  # whether training samples are held out, so that nobody should look at test accuracy

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Print benchmark, method, seed and number of rounds, then the notes."""
        self._held = bool(config.validation)
        self._began, self._every = time.monotonic(), max(1, total_rounds // 20)
        self._say(f"{config.title}: {total_rounds} rounds")
        for text in notes:
            self.note(text)

    def round(self, row: dict[str, Any]) -> None:
        """Print a round. row: as in rounds.jsonl (task, phase, loss, accuracy, ...), rounds_done, rounds_total."""
        done, total = row["rounds_done"], row["rounds_total"]
        self._before = done - 1 if self._before is None else self._before
        if done % self._every and done != total:
            return
        each = (time.monotonic() - self._began) / (done - self._before)
        left = f", {_clock(each * (total - done))} left" if done < total else ""
        shown = {**row, "accuracy": None} if self._held else row
        self._say(f"  round {done}/{total}: task {row['task']}, {row['phase']}{_scores(shown)}{left}")

    def task(self, row: dict[str, Any]) -> None:
        """Print a task. row: task, name, accuracy (fraction for each task, None for tasks not seen yet).

        With held-out training samples, validation is the accuracy on them, which is printed in place of the other.
        """
        self._say(task_line(row))

    def note(self, text: str) -> None:
        """Print the note."""
        self._say(f"note: {text}")

    def warn(self, text: str) -> None:
        """Print the warning to standard error."""
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Print nothing: the caller prints the results."""

    def close(self) -> None:
        """Nothing to release."""

    def _say(self, text: str) -> None:
        print(text, file=self._file or sys.stdout, flush=True)


class RichSink:
    """A live progress bar for terminals: task, phase, rounds, loss, accuracy and time left."""

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
        self._placed = self._held = False

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Open the bar under the run's name, and print the notes."""
        self._held = bool(config.validation)
        self._id = self._bar.add_task(config.title, total=total_rounds, scores="")
        self._bar.start()
        for text in notes:
            self.note(text)

    def round(self, row: dict[str, Any]) -> None:
        """Advance the bar; rows as for `PlainSink`. The bar keeps showing the last known accuracy."""
        if row.get("accuracy") is not None and not self._held:
            self._accuracy = row["accuracy"]
        scores = f"task {row['task']} {row['phase']}{_scores({**row, 'accuracy': self._accuracy})}"
        if not self._placed:  # in a resumed run, the rounds of earlier sessions count as done but not as speed
            self._bar.reset(self._id, completed=row["rounds_done"] - 1, total=row["rounds_total"])
            self._placed = True
        self._bar.update(self._id, completed=row["rounds_done"], total=row["rounds_total"], scores=scores)
        if row["rounds_done"] == row["rounds_total"]:
            self._bar.refresh()

    def task(self, row: dict[str, Any]) -> None:
        """Print the accuracies above the bar; rows as for `PlainSink`."""
        self._accuracy = row.get("validation", row["accuracy"])[row["task"]]
        self._bar.console.print(task_line(row), markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Print the note above the bar."""
        self._bar.console.print(f"note: {text}", markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """Print the warning to standard error, which the bar does not use."""
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Close the bar."""
        self._bar.stop()

    def close(self) -> None:
        """Release the terminal, also after an error."""
        self._bar.stop()


class Sinks:
    """Several sinks as one: each call goes to all of them."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Call each sink."""
        for sink in self._sinks:
            sink.start(config, notes, total_rounds)

    def round(self, row: dict[str, Any]) -> None:
        """Call each sink."""
        for sink in self._sinks:
            sink.round(row)

    def task(self, row: dict[str, Any]) -> None:
        """Call each sink."""
        for sink in self._sinks:
            sink.task(row)

    def note(self, text: str) -> None:
        """Call each sink."""
        for sink in self._sinks:
            sink.note(text)

    def warn(self, text: str) -> None:
        """Call each sink."""
        for sink in self._sinks:
            sink.warn(text)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Call each sink."""
        for sink in self._sinks:
            sink.finish(metrics)

    def close(self) -> None:
        """Close each sink, also after one that fails."""
        with contextlib.ExitStack() as at_end:
            for sink in reversed(self._sinks):  # the stack calls the last one first
                at_end.callback(sink.close)


def console_sink(quiet: bool) -> Sink:
    """Return the sink for the console: warnings only if `quiet`, a live bar on a terminal, else plain lines."""
    if quiet:
        return NullSink()
    return RichSink() if sys.stdout.isatty() else PlainSink()


def usual_sink(progress: bool | None) -> Sink:
    """Return the sink of `cfl.run`. progress: whether to show it; None: in a terminal and in a notebook."""
    watched = sys.stdout.isatty() or _in_notebook()
    return console_sink(quiet=not (watched if progress is None else progress))


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; other packages import ipykernel in scripts as well."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()


def task_line(row: Mapping[str, Any]) -> str:
    """Format the accuracies after a task as a line; rows as for `PlainSink.task`, with an optional epsilon."""
    # Who chooses options by held-out samples should not see the accuracy on test samples meanwhile.
    kind, values = ("validation accuracy", row["validation"]) if "validation" in row else ("accuracy", row["accuracy"])
    seen = [f"{value:.1%}" for value in values if value is not None]
    spent = f", epsilon {row['epsilon']:.3g} so far" if "epsilon" in row else ""
    return f"after task {row['task']} ({row['name']}): {kind} {' '.join(seen)}{spent}"


def _scores(row: Mapping[str, Any]) -> str:
    parts = [f", loss {row['loss']:.3f}"] if row.get("loss") is not None else []
    return "".join(parts + ([f", accuracy {row['accuracy']:.1%}"] if row.get("accuracy") is not None else []))


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
