"""Run several configurations in parallel, each in a separate process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cfl.assembly.privacy_rules import check_packages
from cfl.assembly.resolve import dump, load
from cfl.config.schema import RunConfig
from cfl.core import Busy, CflError, machine
from cfl.experiments.compare import HOW, Run
from cfl.runtime.run_folder import RunFolder, read_config
from cfl.runtime.sinks import NullSink, task_line

_POLL = 1.0  # seconds between checks of runs that another process works on


def run_all(
    runs: Sequence[Run],
    *,
    jobs: int | None = None,
    quiet: bool = False,
    data_root: Path | None = None,
    download: bool = False,
) -> dict[str, str]:
    """Finish all runs and return the reason of each failure by name of the run; a failure does not stop the others.

    jobs: number of parallel runs; None: that of `default_jobs`.
    Finished runs are kept, unfinished runs are continued, and runs of another process are waited for.
    Ctrl-C saves every run after its current round; a second Ctrl-C stops at once.
    Raises ConfigError before the first run if a package that a run needs is not installed.
    """
    missing = [run for run in runs if run.results() is None]
    for run in missing:
        check_packages(run.config)
    if jobs is None:
        jobs = default_jobs([run.config for run in missing])
    board = Board(len(runs), len(runs) - len(missing), quiet)
    queue = _Queue(missing, board, data_root, download)
    with board, ThreadPoolExecutor(jobs) as pool:
        workers = [pool.submit(queue.work) for _ in range(min(jobs, len(missing)))]
        try:
            for worker in workers:
                worker.result()
        except KeyboardInterrupt:
            board.warn("interrupted: each run is saved after its round; repeat the command to continue")
            raise
        finally:
            queue.stop()
    return queue.failed


def default_jobs(configs: Sequence[RunConfig]) -> int:
    """Return how many runs have a core for each of their threads; 1 if a run uses all cores or a GPU by itself."""
    if any(config.engine not in ("loop", "vmapped") or config.device != "cpu" for config in configs):
        return 1
    return max(1, machine.cores() // max((config.threads for config in configs), default=1))


class Board:
    """Progress of all runs: a line per event and, on a terminal, a bar per active run. quiet: show warnings only."""

    def __init__(self, total: int, finished: int, quiet: bool) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
        self._bars = Progress(*columns, TimeRemainingColumn(), transient=True, disable=quiet or not sys.stdout.isatty())
        self._quiet, self._total, self._done = quiet, total, finished
        self._rows: dict[str, Any] = {}
        if finished:
            self.say(f"{finished} of {total} runs are finished already")

    def __enter__(self) -> Board:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def round(self, name: str, done: int, total: int) -> None:
        """Show that a run has done `done` of `total` rounds."""
        if name not in self._rows:
            self._rows[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._rows[name], completed=done, total=total)

    def end(self, name: str, metrics: dict[str, Any] | None) -> None:
        """Show that a run has ended. metrics: None if it failed."""
        if name in self._rows:
            self._bars.remove_task(self._rows.pop(name))
        if metrics is not None:
            self._done += 1
            held = metrics.get("validation_acc")  # shown in place of the accuracy on test samples, as in `task_line`
            score = f"ACC {metrics['acc']:.1%}" if held is None else f"validation ACC {held:.1%}"
            self.say(f"{name}: done, {score} ({self._done} of {self._total} runs)")

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        if not self._quiet:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line to standard error, which the bars do not use."""
        print(text, file=sys.stderr, flush=True)


class _Queue:
    """Queue of runs for several threads, each with a process of its own. failed: name of a run to reason."""

    def __init__(self, runs: Sequence[Run], board: Board, data_root: Path | None, download: bool) -> None:
        self._waiting, self._board, self._data = list(runs), board, (data_root, download)
        self._lock, self._processes, self._stopped = threading.Lock(), list[BaseProcess](), False
        self.failed: dict[str, str] = {}

    def work(self) -> None:
        """Send runs to a process, one after another, until the queue is empty."""
        process: BaseProcess | None = None
        while (run := self._next()) is not None:
            if process is None or not process.is_alive():
                channel, process = self._start()
                if process is None:
                    return
            try:
                channel.send((dump(run.config), run.folder))
                self._follow(run, channel)
            except (EOFError, OSError):
                process.join()
                if not self._stopped:
                    self._fail(run, f"its process ended with status {process.exitcode}; repeat the command")
            if run not in self._waiting:
                self._board.end(run.name, run.results())

    def stop(self) -> None:
        """Interrupt the processes, which save their runs after the round; Ctrl-C meanwhile ends them at once."""
        with self._lock:
            self._stopped = True
        try:
            for process in self._processes:
                with suppress(ProcessLookupError):  # it may end meanwhile
                    if process.is_alive() and process.pid:
                        os.kill(process.pid, signal.SIGINT)
            for process in self._processes:
                process.join()
        except KeyboardInterrupt:
            for process in self._processes:
                process.terminate()
            raise

    def _start(self) -> tuple[Connection, BaseProcess | None]:
        # Do not fork this process, which has threads: the fork server has only imported the modules of a run.
        context: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
        multiprocessing.set_forkserver_preload(["cfl.runtime.runner", "sklearn.datasets"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, *self._data))
        with self._lock:
            if self._stopped:
                return ours, None
            process.start()
            self._processes.append(process)
        theirs.close()
        return ours, process

    def _next(self) -> Run | None:
        """Take the first run that no other process works on; None if no run is left."""
        while True:
            with self._lock:
                for run in list(self._waiting):
                    if (metrics := run.results()) is not None:  # another process has finished it
                        self._waiting.remove(run)
                        self._board.end(run.name, metrics)
                    elif not RunFolder.busy(run.folder):
                        self._waiting.remove(run)
                        return run
                if self._stopped or not self._waiting:
                    return None
            time.sleep(_POLL)

    def _follow(self, run: Run, channel: Connection) -> None:
        """Handle the messages of the run's process until the run ends."""
        while (message := channel.recv())[0] != "end":
            kind, value = message
            if kind == "round":
                self._board.round(run.name, *value)
            elif kind == "task":
                self._board.say(f"{run.name}: {value}")
            elif kind == "warn":
                self._board.warn(f"warning: {run.name}: {value}")
            elif kind == "busy":
                self._waiting.append(run)
            else:
                self._fail(run, value)

    def _fail(self, run: Run, reason: str) -> None:
        self.failed[run.name] = reason
        self._board.warn(f"cfl-run: {run.name} failed: {reason}")


class _PipeSink(NullSink):
    """Sink of a run in a process: sends all events to the parent process, and stops the run if the parent is gone."""

    def __init__(self, channel: Connection) -> None:
        self._channel, self._orphaned = channel, False

    def round(self, row: dict[str, Any]) -> None:
        self.send("round", (row["rounds_done"], row["rounds_total"]))

    def task(self, row: dict[str, Any]) -> None:
        self.send("task", task_line(row))

    def warn(self, text: str) -> None:
        self.send("warn", text)

    def send(self, kind: str, value: Any) -> None:
        """Send a message to the parent process."""
        try:
            self._channel.send((kind, value))
        except OSError:
            if not self._orphaned:
                self._orphaned = True
                signal.raise_signal(signal.SIGINT)  # as Ctrl-C: saves after the round; a second one would not wait


def _serve(channel: Connection, data_root: Path | None, download: bool) -> None:  # pragma: no cover
    """Compute all runs sent by the parent: a process per run would spend more time on imports than on a short run."""
    with suppress(EOFError, KeyboardInterrupt):
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)  # Ctrl-C at the terminal reaches the parent only, which passes it on
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background jobs of scripts ignore it
        machine.keep_memory()
        sink = _PipeSink(channel)
        try:
            while True:
                config, folder = channel.recv()
                _run(config, folder, sink, data_root, download)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent may interrupt a process that ends anyway


def _run(
    config: dict[str, Any], folder: Path, sink: _PipeSink, data_root: Path | None, download: bool
) -> None:  # pragma: no cover
    """Compute one run, and tell the parent how it ended."""
    from cfl.runtime.runner import run

    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: sink.warn(str(message))
            settings = _as_begun(config, folder)
            run(settings, output=folder, resume=True, sink=sink, data_root=data_root, download=download)
    except Busy:
        sink.send("busy", None)
    except CflError as error:
        sink.send("failed", str(error))
    except Exception:
        sink.send("failed", traceback.format_exc())
    sink.send("end", None)


def _as_begun(config: dict[str, Any], folder: Path) -> RunConfig:
    """Return the configuration with the `HOW` options of the run's start: only they continue it to the byte."""
    before = read_config(folder)
    return load({**config, **{name: before[name] for name in HOW if name in before}})
