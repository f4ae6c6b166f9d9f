"""The figures of a run as named numbers, for sinks that draw curves."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from cfl.config.schema import RunConfig
from cfl.runtime.sinks import NullSink

Scalars = Mapping[str, float]


class ScalarSink(NullSink, ABC):
    """Base of sinks that write scalars by number of completed rounds. A subclass defines `_write`."""

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Keep the configuration: the first round tells where a resumed run continues."""
        self._config, self._step = config, total_rounds

    def round(self, row: dict[str, Any]) -> None:
        """Write loss, accuracy on the current task (a fraction), bytes by phase, and the metrics of callbacks."""
        self._step = row["rounds_done"]
        scores = {name: row[name] for name in ("loss", "accuracy")}
        traffic = {f"{name}/{row['phase']}": row[name] for name in ("bytes_up", "bytes_down")}
        self._write(_known({**scores, **traffic, **_owned(row.get("callbacks", {}))}))

    def task(self, row: dict[str, Any]) -> None:
        """Write the accuracy on each task seen so far, a fraction, and the metrics of callbacks."""
        accuracies = {f"task/{j}": value for j, value in enumerate(row["accuracy"])}
        self._write(_known({**accuracies, **_owned(row.get("callbacks", {}))}))

    def warn(self, text: str) -> None:
        """Write nothing: another sink shows warnings."""

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write ACC and FGT (fractions), the bytes of the whole run, and the metrics of callbacks."""
        scores = {name.upper(): metrics[name] for name in ("acc", "fgt")}
        traffic = {f"total/{name}": metrics[name] for name in ("bytes_up", "bytes_down")}
        self._write(_known({**scores, **traffic, **_owned(metrics.get("callbacks", {}))}))

    @abstractmethod
    def _write(self, scalars: Scalars) -> None:
        """Write scalars at the current step."""


def _owned(metrics: Mapping[str, Scalars]) -> dict[str, float]:
    return {f"{owner}/{name}": value for owner, own in metrics.items() for name, value in own.items()}


def _known(scalars: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are numbers, and not NaN."""
    return {name: value for name, value in scalars.items() if value is not None and value == value}
