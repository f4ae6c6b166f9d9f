"""A sink that writes to an MLflow tracking store, by default an SQLite file on this machine."""

import contextlib
import logging
import os
import re
import time
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import FileLock

from cfl.assembly.resolve import dump
from cfl.config.overrides import flat
from cfl.config.schema import RunConfig
from cfl.core import machine, packages, warn
from cfl.runtime.scalars import Scalars, ScalarSink

_RUN = "mlflow-run"  # file in the run's folder: id of its run in the store
_NAME = 250  # characters of a metric's name that MLflow takes
_LONGEST, _MOST = 6000, 100  # characters of a parameter's value, and parameters in a call, that MLflow takes


class MlflowSink(ScalarSink):
    """Writes options as parameters, and scalars by number of finished rounds.

    folder: of the run; store: tracking URI, by default of `mlflow.db` beside the folder, which all runs there share.
    The experiment has the name of the benchmark. A resumed run continues its run in the store; rounds that are repeated
    there after a kill have the same values, and are written once. In a store that does not know the run, as after a
    move of the folder, a new one begins, with a warning.
    In names of metrics, "_" replaces what MLflow refuses. Raises ConfigError if MLflow is not installed.
    """

    def __init__(self, folder: Path, store: str | None = None) -> None:
        packages.need("mlflow", "a sink for MLflow (--mlflow)")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow reads it when it is imported
        self._mlflow = import_module("mlflow")
        self._folder, self._store = folder, store or _in_file(folder.resolve().parent / "mlflow.db")
        self._client: Any = None
        self._id, self._written = "", 0
        self._ended: set[str] = set()  # "task/N" of the tasks whose accuracies the store has

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Open the store, and find or begin the run there."""
        super().start(config, notes, total_rounds)
        self._folder.mkdir(parents=True, exist_ok=True)
        with machine.log_level("mlflow", logging.WARNING), self._alone():  # without remarks on the tables that it makes
            self._client = self._mlflow.MlflowClient(tracking_uri=self._store)
            if not self._continued():
                self._begin(config)

    def round(self, row: dict[str, Any]) -> None:
        super().round(row)
        self._write({"round": self._step})

    def task(self, row: dict[str, Any]) -> None:
        if f"task/{row['task']}" not in self._ended:  # a kill came between the task's last round and this
            self._written = min(self._written, self._step - 1)
        super().task(row)

    def finish(self, metrics: dict[str, Any]) -> None:
        self._written = 0
        super().finish(metrics)
        self._client.set_terminated(self._id)
        self._id = ""

    def close(self) -> None:
        """Mark a run that has not finished as killed."""
        if self._id:
            self._client.set_terminated(self._id, status="KILLED")

    def _alone(self) -> AbstractContextManager[Any]:
        """Keep other runs from an SQLite file: two that make its tables or an experiment at once fail."""
        if not self._store.startswith("sqlite:///"):
            return contextlib.nullcontext()
        return FileLock(f"{import_module('sqlalchemy').make_url(self._store).database}.lock")

    def _continued(self) -> bool:
        """Continue the folder's run in the store, if both have it."""
        known = self._folder / _RUN
        if not known.exists():
            return False
        id = known.read_text(encoding="utf-8")
        try:
            metrics = self._client.get_run(id).data.metrics
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            warn(
                f"'{self._store}' lacks the run of '{known}', as after a move of the folder; a new MLflow run begins, "
                "without the rounds before"
            )
            return False
        self._id, self._written = id, int(metrics.get("round", 0))
        self._ended = {name for name in metrics if name.startswith("task/")}
        self._client.update_run(id, status="RUNNING")
        return True

    def _begin(self, config: RunConfig) -> None:
        run = self._client.create_run(self._experiment(config.benchmark), run_name=self._folder.name)
        self._id = run.info.run_id
        entity = self._mlflow.entities.Param
        params = [entity(name, str(value)[:_LONGEST]) for name, value in flat(dump(config)).items()]
        for first in range(0, len(params), _MOST):
            self._client.log_batch(self._id, params=params[first : first + _MOST])
        (self._folder / _RUN).write_text(self._id, encoding="utf-8")

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    def _write(self, scalars: Scalars) -> None:
        if self._step > self._written:
            entity, now = self._mlflow.entities.Metric, int(1000 * time.time())  # milliseconds
            metrics = [entity(_allowed(name), value, now, self._step) for name, value in scalars.items()]
            self._client.log_batch(self._id, metrics)


def _in_file(path: Path) -> str:
    """URL of an SQLite file, in whose path a "?" or "%41" would have a meaning."""
    return str(import_module("sqlalchemy").URL.create("sqlite", database=str(path)).render_as_string())


def _allowed(name: str) -> str:
    """The name of a metric as MLflow takes it: of some characters alone, and without parts such as ".." or ""."""
    parts = re.sub(r"[^/\w.: -]", "_", name)[:_NAME].split("/")
    return "/".join(part for part in parts if part.strip(".")) or "_"
