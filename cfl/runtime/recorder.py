"""What a run leaves behind: rows of rounds, seconds, bytes, checkpoints and metrics, in its folder and for its sink."""

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
from torch import Tensor

from cfl.assembly import resolve
from cfl.config.schema import RunConfig
from cfl.contract import RoundInputs
from cfl.core import CheckpointError, ConfigError, Tree, machine
from cfl.engines import Outcome
from cfl.runtime import checkpoint, contact_sheet
from cfl.runtime.callback_set import CallbackSet
from cfl.runtime.fingerprint import CHECKPOINTS, Fingerprint, code
from cfl.runtime.later_tasks import extend
from cfl.runtime.privacy_budget import Budget
from cfl.runtime.rounds import Rounds
from cfl.runtime.run_folder import (
    ERROR,
    MADE_OF,
    MODEL,
    RunFolder,
    has_rounds,
    plain,
    read_config,
    read_json,
    read_made_of,
    read_rows,
)
from cfl.runtime.sinks import Sink
from cfl.runtime.state import RunState


class Recorder:
    """Record a run. folder: the run's folder, or None; fingerprint: of the run.

    writer: writes checkpoints; as a context manager it waits at its end until the last one is on disk.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        sink: Sink,
        state: RunState,
        rounds: Rounds,
        budget: Budget,
        fingerprint: Fingerprint,
        callbacks: CallbackSet,
    ) -> None:
        self.folder, self.sink, self.state, self.rounds, self.budget = folder, sink, state, rounds, budget
        self.fingerprint, self.callbacks = fingerprint, callbacks
        self._deciding = callbacks.digests()  # at the start: a callback may keep figures in itself
        self._device = machine.device(rounds.config.device)
        self.writer = checkpoint.Writer(folder.checkpoints if folder else None, sink.warn)
        self._clock = time.monotonic()
        self._seconds: dict[str, float] = defaultdict(float)  # of the round in progress

    def start(self, config: RunConfig, about: Mapping[str, Any], notes: list[str], resume: bool) -> None:
        """Write the configuration, restore the last checkpoint if `resume` is set, and announce the run.

        about: contents of model.json.
        """
        fresh, tasks = self.state.server, self.rounds.tasks
        if self.folder is not None:
            if not resume:
                checkpoint.clear(self.folder.checkpoints)
            elif found := self._last(self.folder):
                self.state.restore(*found, device=self._device)
                self._check_callbacks(found[1].get("callbacks", {}))
                notes = [*notes, f"resumed after {self.state.done} of {self._total()} rounds"]
            else:
                self._check_replaced(self.folder)
                notes = [*notes, f"'{self.folder.path}' holds no checkpoint: the run starts from its first round"]
            self.folder.truncate_rounds(self.state.done)
            self.folder.truncate_sheets(len(self.state.reports))
            if self.callbacks:
                self.callbacks.begin(read_rows(self.folder.path))
            if (before := len(self.state.accuracy_matrix)) < tasks:
                extend(self.state, fresh, self.rounds, self.fingerprint, self.folder)
                self.folder.keep_metrics(before)
                self.save(wait=True)  # before config.yaml, which fits no earlier checkpoint
                notes = [*notes, f"the run had {before} of the {tasks} tasks"]
            self.folder.write_config(resolve.dump(config))
            self.folder.write(MODEL, about)
            place = {"states": self.fingerprint.states}
            self.folder.write(MADE_OF, {"run": self.fingerprint.parts, "code": code(config), "place": place})
            self.folder.remove_error()  # of an earlier session
        self.sink.start(config, notes, self._total())
        self._clock = time.monotonic()  # a sink may take seconds to start

    def images(self, task: int, made: Tensor | None) -> None:
        """Write the images that the strategy has made by the end of a task as a contact sheet."""
        if self.folder is not None and made is not None:
            self.folder.write_sheet(task, contact_sheet.png(made))

    def lap(self, what: str, measured: float = 0.0) -> None:
        """Book the seconds since the last lap on "clients", "server", "evaluate", "callbacks" or "checkpoint".

        measured: seconds among them that went into measurements, and count as "evaluate".
        """
        machine.synchronize(self._device)
        before, self._clock = self._clock, time.monotonic()
        self._seconds[what] += self._clock - before - measured
        self._seconds["evaluate"] += measured

    def row(self, inputs: RoundInputs, outcome: Outcome, local: Mapping[str, list[Any]], held: int) -> dict[str, Any]:
        """The row of a round before it is evaluated, as JSON data; books the seconds of clients and server.

        local: figures of the local models; held: bytes of the broadcast that the clients had already.
        """
        info, seconds = inputs.info, {kind: self._seconds.pop(kind, 0.0) for kind in ("clients", "server")}
        for kind, own in seconds.items():
            self.state.spent("measurement" if info.phase.diagnostic else kind, info.phase.name, own)
        return plain(
            {
                "task": info.task,
                "phase": info.phase.name,
                "round": info.round,
                **outcome.figures(),
                "dropped": info.dropped,
                "accuracy": None,
                "lr": info.lr,
                **outcome.traffic(info, inputs.shared, held),
                "seconds": sum(seconds.values()),
                **({"local": dict(local)} if local else {}),
            }
        )

    def round(self, row: dict[str, Any], ends_task: bool) -> None:
        """Record a round, its task if the task is over, and a checkpoint if one is due."""
        state = self.state
        state.count(row)
        state.local = row.get("local", state.local)
        for what in sorted(self._seconds):
            state.spent("measurement", what, self._seconds[what])
        self._seconds.clear()
        self._write(row, ends_task)
        if ends_task or state.done % self.rounds.config.checkpoint_every == 0:
            self.save(wait=state.position == len(self.rounds.schedule))
        self.lap("checkpoint")
        state.spent("measurement", "checkpoint", self._seconds.pop("checkpoint"))

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint if the run has a folder. wait: return only when the checkpoint is on disk."""
        if self.folder is not None:
            self.folder.sync_rounds()  # a checkpoint never counts more rounds than rounds.jsonl has lines on disk
            trees, meta, states = self.state.saved()
            meta |= {"callbacks": self._deciding} if self._deciding else {}
            meta["options"] = {name: getattr(self.rounds.config, name) for name in ("tasks", "rounds")}
            self.writer.save(self.state.position, trees, {**meta, "fingerprint": self.fingerprint.text}, states)
            if wait:
                self.writer.wait()

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of the whole run."""
        if self.folder is not None:
            self.folder.write("timing.json", self.state.seconds)  # before metrics.json, which marks a run as finished
            self.folder.write("metrics.json", metrics)
        self.sink.finish(metrics)

    def failed(self, error: Exception, position: int | None) -> None:
        """Write error.json: class, message in one line, task, phase and round of an error that ends the run, and date.

        position: of the round in the schedule, None for an error after the last round.
        """
        if self.folder is None:
            return
        place: dict[str, Any] = dict.fromkeys(("task", "phase", "round"))
        if position is not None:
            task, phase, number = self.rounds.schedule[position]
            place = {"task": task, "phase": phase.name, "round": number}
        found = {"error": type(error).__name__, "message": " ".join(str(error).split()), **place}
        try:
            self.folder.write(ERROR, {**found, "date": datetime.now(UTC).isoformat(timespec="seconds")})
        except ConfigError as unwritable:  # the disk may be full, which must not hide the error itself
            self.sink.warn(str(unwritable))

    def _write(self, row: dict[str, Any], ends_task: bool) -> None:
        task = row["task"]
        if self.folder is not None:
            self.folder.append_round(row)
        self.sink.round({**row, "rounds_done": self.state.done, "rounds_total": self._total()})
        if ends_task:
            private = self.rounds.config.dp.level != "none"
            spent = {"epsilon": self.budget.so_far(self.state.position)} if private else {}
            seen = np.arange(self.rounds.tasks) <= task
            accuracies = row_of(np.where(seen, self.state.accuracy_matrix[task], np.nan))
            held = row_of(self.state.validation_matrix[task])
            validation = {"validation": held} if held[task] is not None else {}
            names = {"task": task, "name": self.fingerprint.stream.tasks[task].name}
            callbacks = {"callbacks": own} if (own := self.state.reports[task].get("callbacks")) else {}
            self.sink.task({**names, "accuracy": accuracies, **validation, **spent, **callbacks})

    def _total(self) -> int:
        """Number of rounds of the run, as far as it is known."""
        return len(self.rounds.schedule) - len(self.state.skipped)

    def _last(self, folder: RunFolder) -> tuple[dict[str, Tree], dict[str, Any]] | None:
        """Load the last checkpoint. Raises CheckpointError that names what differs from the run in the folder."""
        there, made_of = read_config(folder.path), read_made_of(folder.path)
        parts, place = made_of.get("run", {}), made_of.get("place", {}).get("states", self.fingerprint.states)
        if place != self.fingerprint.states:
            if place != CHECKPOINTS and (folder.path / "metrics.json").exists():
                raise CheckpointError(
                    f"'{folder.path}' holds a finished run that keeps the states of clients {place}, so it cannot go "
                    f"on with later tasks; start another run from its model (option start, --from '{folder.path}')"
                )
            raise CheckpointError(
                f"'{folder.path}' holds a run that keeps the states of clients {place}, not {self.fingerprint.states}; "
                "continue it with the command that began it"
            )
        own, tasks, now = self.fingerprint, self.rounds.tasks, self.rounds.tasks

        def required(trees: Mapping[str, Tree], meta: Mapping[str, Any]) -> str:
            nonlocal own, tasks
            if (tasks := len(trees["run"]["acc"])) < now:
                own = self.fingerprint.of_first(tasks, meta.get("options", {}))
            return own.text

        try:
            return self.writer.load(required)
        except CheckpointError as error:
            classes = self.fingerprint.stream.tasks[0].classes
            head = read_json(folder.path / MODEL).get("outputs", classes)
            wider = f"its first head has {head} classes there, and {classes} here" if head != classes else ""
            fewer = f"it has {tasks} tasks there, and {now} here" if tasks > now else ""
            changed = own.changed_option(there) or fewer or wider or own.changed(there, parts)
            raise CheckpointError(f"{error}: {changed}" if changed else str(error)) from None

    def _check_replaced(self, folder: RunFolder) -> None:
        """Raise CheckpointError if a run without a checkpoint would be lost: results, or rounds with other options."""
        if (folder.path / "metrics.json").exists():
            raise CheckpointError(
                f"'{folder.path}' holds the results of a run, and no checkpoint of it; choose another --output"
            )
        if has_rounds(folder.path) and (changed := self.fingerprint.changed_option(read_config(folder.path))):
            raise CheckpointError(
                f"'{folder.path}' holds the first rounds of a run with another configuration; choose another --output, "
                f"or repeat the options of that run: {changed}"
            )

    def _check_callbacks(self, there: Mapping[str, str]) -> None:
        """Raise CheckpointError unless later rounds depend on the same callbacks; one that failed may be mended."""
        failed = self.state.pending[1] if self.state.pending else None
        names = [name for name in {**there, **self._deciding} if there.get(name) != self._deciding.get(name)]
        if self.state.position < len(self.rounds.schedule) and (names := [name for name in names if name != failed]):
            assert self.folder is not None
            raise CheckpointError(
                f"'{self.folder.path}' holds a run whose rounds depend on callbacks, and '{names[0]}' is new, missing "
                "or changed; repeat the callbacks of that run, or choose another output"
            )


def row_of(values: np.ndarray) -> list[float | None]:
    """A row of the accuracy matrix as JSON holds it: None for NaN."""
    return [None if math.isnan(value) else float(value) for value in values]
