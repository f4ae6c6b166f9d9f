"""A sink that writes TensorBoard event files."""

from pathlib import Path
from typing import Any

import yaml

from cfl.assembly.resolve import dump
from cfl.config.schema import RunConfig
from cfl.core import packages
from cfl.runtime.sinks import NullSink


class TensorBoardSink(NullSink):
    """Writes scalars by number of finished rounds, and the configuration as text; each round is flushed when it ends.

    folder: receives the event files. A resumed run continues at its own round and hides later rounds of the killed run.
    Raises ConfigError if TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        packages.need("tensorboard", "a sink for TensorBoard (--tensorboard)")
        self._folder = folder
        self._writer: Any = None
        self._text, self._step = "", 0

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Keep the configuration: the file opens at the first round, which tells where the run continues."""
        self._text, self._step = yaml.safe_dump(dump(config), sort_keys=False), total_rounds

    def round(self, row: dict[str, Any]) -> None:
        """Write mean training loss, accuracy on the current task (a fraction), and bytes by phase."""
        self._step = row["rounds_done"]
        scores = {name: row[name] for name in ("loss", "accuracy") if row[name] is not None}
        self._write({**scores, **{f"{name}/{row['phase']}": row[name] for name in ("bytes_up", "bytes_down")}})

    def task(self, row: dict[str, Any]) -> None:
        """Write the accuracy on each task seen so far, a fraction."""
        self._write({f"task/{j}": value for j, value in enumerate(row["accuracy"]) if value is not None})

    def warn(self, text: str) -> None:
        """Write nothing: another sink shows warnings."""

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write ACC and FGT, fractions."""
        self._write({name.upper(): metrics[name] for name in ("acc", "fgt") if metrics[name] == metrics[name]})

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, scalars: dict[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._step)
            self._writer.add_text("config", f"```\n{self._text}```", self._step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, self._step)
        self._writer.flush()
