"""Callbacks: a user's own metrics, and decisions to stop early.

A callback observes: it gets copies, and its figures are recorded beside those of the run. Only a class that defines
`stop` can change a run. `stop` sees nothing but recorded rows, so a run decides alike however often it is killed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from cfl.config.schema import RunConfig
from cfl.core import ConfigError, Tree, tree, unknown
from cfl.core.typed import typed_fields
from cfl.runtime.serving import Predictor
from cfl.streams import Stream

Row = Mapping[str, Any]
Stop = Literal["phase", "run"]
Metrics = Mapping[str, float]


@dataclass(frozen=True, eq=False)
class View:
    """What a callback sees of a run. rows: of the current task so far, as in rounds.jsonl, read-only."""

    rows: Sequence[Row]
    _predictor: Predictor = field(repr=False)
    _stream: Stream = field(repr=False)

    @property
    def row(self) -> Row:
        """Row of the round that has just ended."""
        return self.rows[-1]

    @property
    def task(self) -> int:
        """Number of the current task."""
        return self.row["task"]

    @property
    def phase(self) -> str:
        """Name of the current phase."""
        return self.row["phase"]

    @property
    def round(self) -> int:
        """Number of the round within its phase."""
        return self.row["round"]

    @cached_property
    def params(self) -> Tree:
        """A copy of the global model's parameters and buffers; names with "@" belong to one task."""
        return tree.clone(self._predictor.server["params"])

    def accuracy(self, task: int) -> float:
        """Fraction of correct predictions on the test samples of a task up to the current one; ConfigError for others.

        It is the figure that the accuracy matrix would have if the task ended here.
        """
        self._check(task)
        tasks = sorted({task, self.task}) if self._predictor.model.growing else [task]
        tests = {one: self._stream.tasks[one].test for one in tasks}
        return self._predictor.accuracies(tests, self._predictor.inference(self.task))[tasks.index(task)]

    def samples(self, task: int) -> tuple[Tensor, Tensor]:
        """Test samples of a task up to the current one: inputs (n, *input_shape) and labels (n,) int64, as copies."""
        self._check(task)
        test = self._stream.tasks[task].test
        return test.gather(torch.arange(len(test), device=test.targets.device))

    def logits(self, x: Tensor, task: int | None = None) -> Tensor:
        """Outputs (n, classes) of the global model for inputs (n, *input_shape), as `samples` returns them.

        task: see `cfl.SavedRun.logits`. Raises ConfigError for a task that is unknown or missing.
        """
        if task is not None:
            self._check(task)
        return self._predictor.logits(x, task, self.task)

    def _check(self, task: int) -> None:
        if not 0 <= task <= self.task:
            raise ConfigError(f"task is {task}; the run has tasks 0 to {self.task} so far")


class Callback:
    """Base class of callbacks: each method may be overridden.

    name: key of the metrics in the files of a run, by default the name of the class.
    The `on_` methods return metrics, a mapping from names to numbers, or None.
    """

    name: str = ""

    def check(self, config: RunConfig) -> None:
        """Raise ConfigError if the callback cannot work with a configuration; called before the first round."""

    def on_round(self, view: View) -> Metrics | None:
        """Called after each round of each phase. Metrics go into the row of the round in rounds.jsonl."""

    def on_task(self, view: View) -> Metrics | None:
        """Called after the last round of a task. Metrics go into the task's entry of `by_task` in metrics.json."""

    def on_end(self, view: View) -> Metrics | None:
        """Called after the last round of the run. Metrics go into metrics.json."""

    def stop(self, rows: Sequence[Row]) -> Stop | None:
        """Decide after a round what to skip; a class without this method cannot change a run.

        rows: of the current task so far, with the metrics of callbacks. With differential privacy, what nothing
        protects, such as `loss`, is left out, in the rows of the other methods, too. The result must depend on the rows
        alone.
        "phase" skips the remaining rounds of the phase; the task's other phases follow, since methods prepare the next
        task in them. "run" skips the later tasks, too. None skips nothing.
        """


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Ends a phase once a metric has not improved for some evaluations.

    metric: "accuracy" on the current task, which needs the option `eval_every`; "loss", the mean training loss; or a
    metric of another callback, as "Name.metric".
    patience: recorded values in a row that do not improve on the best one by more than `min_delta`; mode: "max" if
    larger is better, "min" if smaller is, None for the usual one of accuracy and loss.
    Raises ConfigError for a metric that the run does not record.
    """

    metric: str = "accuracy"
    patience: int = 3
    min_delta: float = 0.0
    mode: str | None = None
    name: str = ""

    def __post_init__(self) -> None:
        typed_fields(self)
        usual = {"accuracy": "max", "loss": "min"}
        if self.metric not in usual and "." not in self.metric:
            raise unknown("metric of EarlyStopping", self.metric, [*usual, "Name.metric of a callback"])
        if self.mode is None and self.metric not in usual:
            raise ConfigError(f"EarlyStopping cannot know whether '{self.metric}' should rise; set mode to min or max")
        mode = self.mode or usual[self.metric]
        if mode not in usual.values():
            raise unknown("mode of EarlyStopping", mode, usual.values())
        if self.patience < 1 or not self.min_delta >= 0:  # as for NaN
            raise ConfigError(
                f"EarlyStopping needs patience >= 1 and min_delta >= 0, not {self.patience} and {self.min_delta}"
            )
        object.__setattr__(self, "mode", mode)

    def check(self, config: RunConfig) -> None:
        if self.metric == "accuracy" and not config.eval_every:
            raise ConfigError("EarlyStopping watches accuracy, but eval_every=0 records it once a task; set eval_every")
        if self.metric == "loss" and config.dp.level != "none":
            raise ConfigError(
                "EarlyStopping watches loss, which differential privacy does not protect; use metric='accuracy'"
            )

    def on_task(self, view: View) -> None:
        # rows lack `clients` where cohorts are secret; the loss, which needs some, is then refused
        if any(row.get("clients", 1) for row in view.rows) and all(self._value(row) is None for row in view.rows):
            raise ConfigError(f"EarlyStopping watches '{self.metric}', which no round of task {view.task} has recorded")

    def stop(self, rows: Sequence[Row]) -> Stop | None:
        sign = 1 if self.mode == "max" else -1
        best, waited = -float("inf"), 0
        for row in rows:
            value = self._value(row) if row["phase"] == rows[-1]["phase"] else None
            if value is not None:
                better = sign * value > best + self.min_delta
                best, waited = (sign * value, 0) if better else (best, waited + 1)
        return "phase" if waited >= self.patience else None

    def _value(self, row: Row) -> float | None:
        if "." not in self.metric:
            return row.get(self.metric)
        callbacks = row.get("callbacks", {})
        named = {f"{owner}.{name}": value for owner, own in callbacks.items() for name, value in own.items()}
        return named.get(self.metric)  # both names may have dots
