"""A sink that writes TensorBoard event files."""

from pathlib import Path
from typing import Any

import yaml

from cfl.assembly.resolve import dump
from cfl.core import packages
from cfl.runtime.scalars import Scalars, ScalarSink


class TensorBoardSink(ScalarSink):
    """Writes scalars by number of finished rounds, and the configuration as text; each round is flushed when it ends.

    folder: receives the event files. A resumed run continues at its own round and hides later rounds of the killed run.
    Raises ConfigError if TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        packages.need("tensorboard", "a sink for TensorBoard (--tensorboard)")
        self._folder = folder
        self._writer: Any = None
        self._repeats: int | None = None  # first round of this session; later points of earlier sessions are hidden

    def round(self, row: dict[str, Any]) -> None:
        """Write the figures of a round, see `ScalarSink`."""
        if self._writer is None:
            self._repeats = row["rounds_done"]
        super().round(row)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, scalars: Scalars) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._repeats)
            text = yaml.safe_dump(dump(self._config), sort_keys=False)
            self._writer.add_text("config", f"```\n{text}```", self._step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, self._step)
        self._writer.flush()
