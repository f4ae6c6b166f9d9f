"""A sink that writes TensorBoard's event files."""

from pathlib import Path
from typing import Any

import yaml

from cfl.assembly.resolve import dump
from cfl.config.schema import RunConfig
from cfl.run.sinks import NullSink


class TensorBoardSink(NullSink):
    """Scalars over the rounds done, the configuration as a text; every round is on the disk when it is over.

    folder: of the event files. A resumed run goes on at its own round; later ones of the killed run are hidden.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._text, self._step = "", 0

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Keep the configuration: only the first round says where the run goes on."""
        self._text, self._step = yaml.safe_dump(dump(config), sort_keys=False), total_rounds

    def round(self, row: dict[str, Any]) -> None:
        """Mean training loss, accuracy on the current task (a fraction), and bytes by phase."""
        self._step = row["rounds_done"]
        scores = {name: row[name] for name in ("loss", "accuracy") if row[name] is not None}
        self._write({**scores, **{f"{name}/{row['phase']}": row[name] for name in ("bytes_up", "bytes_down")}})

    def task(self, row: dict[str, Any]) -> None:
        """The accuracy on each task seen so far, a fraction."""
        self._write({f"task/{j}": value for j, value in enumerate(row["accuracy"]) if value is not None})

    def warn(self, text: str) -> None:
        """Nothing: another sink tells the user."""

    def finish(self, metrics: dict[str, Any]) -> None:
        """ACC and FGT, fractions."""
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
