"""A sink that writes a run of Weights & Biases to files on this machine; `wandb sync` uploads them."""

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from cfl.assembly.resolve import dump
from cfl.config.schema import RunConfig
from cfl.core import packages
from cfl.runtime.scalars import Scalars, ScalarSink

_PROJECT, _LONGEST = re.compile(r"[/\\#?%:]"), 128  # what W&B refuses in the name of a project, and its characters


class WandbSink(ScalarSink):
    """Writes the configuration, and scalars by number of finished rounds, in offline mode: no network and no login.

    folder: of the run; the files are in its folder `wandb`. The project has the name of the benchmark, with "_" for
    what W&B refuses. A resumed run writes a further folder `offline-run-...` with the same id.
    Raises ConfigError if wandb is not installed.
    """

    def __init__(self, folder: Path) -> None:
        packages.need("wandb", "a sink for Weights & Biases (--wandb)")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb reads it when it is imported
        self._wandb = import_module("wandb")
        self._folder = folder
        self._run: Any = None

    def start(self, config: RunConfig, notes: list[str], total_rounds: int) -> None:
        """Begin the run, or a further part of it."""
        super().start(config, notes, total_rounds)
        self._folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted((self._folder / "wandb").glob("offline-run-*/run-*.wandb"))
        self._run = self._wandb.init(
            project=_PROJECT.sub("_", config.benchmark)[:_LONGEST],
            name=self._folder.name,
            id=earlier[-1].stem.removeprefix("run-") if earlier else None,
            config=dump(config),
            settings=self._wandb.Settings(
                mode="offline",
                root_dir=str(self._folder),
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                reinit="create_new",
            ),
        )

    def finish(self, metrics: dict[str, Any]) -> None:
        super().finish(metrics)
        self._end(0)

    def close(self) -> None:
        """Mark a run that has not finished as failed."""
        self._end(1)

    def _end(self, status: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=status)
            self._run = None

    def _write(self, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=self._step)
