"""The folder of a run, and its files."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from cfl.core.errors import Busy, ConfigError

_LOCK = ".lock"
_LOOK = 0.5  # seconds: longer than another process takes to see whether the folder is busy


class RunFolder:
    """A run's folder: `config.yaml`, `metrics.json`, `timing.json`, `rounds.jsonl`, `checkpoints/`.

    resume: continue what the folder holds. Raises ConfigError where it cannot be written, or holds a run and
    `resume` is False; Busy where another process is at it. It is this one's until `close`, or the end of the process.
    """

    def __init__(self, path: Path | str, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._rounds, self._metrics = self.path / "rounds.jsonl", self.path / "metrics.json"
        if not resume and (self._rounds.exists() or self._metrics.exists()):
            raise ConfigError(f"'{self.path}' holds a run already; use --resume or another --output")
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"the output folder '{self.path}' cannot be written ({error.strerror}); choose another --output"
            ) from None
        self._lock = FileLock(self.path / _LOCK)
        try:
            self._lock.acquire(timeout=_LOOK)
        except Timeout:
            raise Busy(f"another process is at '{self.path}'; wait for it, or choose another --output") from None

    @staticmethod
    def busy(path: Path) -> bool:
        """Whether another process is at that folder."""
        if not (path / _LOCK).exists():
            return False
        try:
            with FileLock(path / _LOCK, timeout=0):
                return False
        except Timeout:
            return True

    def close(self) -> None:
        """Let other processes have the folder."""
        self._lock.release()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved configuration (plain data) to `config.yaml`."""
        _replace(self.path / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False))

    def read_config(self) -> dict[str, Any]:
        """What `config.yaml` holds; nothing where there is none."""
        path = self.path / "config.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write `metrics.json`, atomically: it is there whole or not at all; NaN is written as null."""
        write_json(self._metrics, metrics)

    def write_timing(self, seconds: Mapping[str, Mapping[str, float]]) -> None:
        """Write `timing.json`: who spent them, to phase, to seconds. No other figure differs when a run is repeated."""
        write_json(self.path / "timing.json", seconds)

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Add a line to `rounds.jsonl`, on its way to the disk when this returns; ConfigError where it cannot be."""
        try:
            with self._rounds.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(row), allow_nan=False) + "\n")
                file.flush()
        except OSError as error:
            raise _unwritable(self._rounds, error) from None

    def sync_rounds(self) -> None:
        """Have `rounds.jsonl` on the disk, so that it survives a loss of power; ConfigError where it cannot be."""
        try:
            for path in (self._rounds, self.path):  # the folder has its name, which `truncate_rounds` gave it
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise _unwritable(self._rounds, error) from None

    def truncate_rounds(self, n_lines: int) -> None:
        """Keep the first `n_lines` whole lines of `rounds.jsonl`: what came after the checkpoint is done again.

        Raises ConfigError where fewer whole lines are there than the checkpoint knows of.
        """
        raw = self._rounds.read_bytes() if self._rounds.exists() else b""
        lines = raw.split(b"\n")[:-1]  # what follows the last newline was torn by a kill
        if len(lines) < n_lines:
            raise ConfigError(
                f"'{self._rounds}' has {len(lines)} whole lines, {n_lines} were expected; use another --output"
            )
        _replace(self._rounds, "".join(f"{line.decode()}\n" for line in lines[:n_lines]))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file, atomically; NaN is written as null. Raises ConfigError where it cannot be written."""
    _replace(path, json.dumps(plain(data), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where there is no file. Raises ConfigError for a damaged one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"'{path}' is damaged; move its folder away, and run it again")
    return data


def plain(value: Any) -> Any:
    """JSON data of a value: NaN and infinities to None, tuples to lists, numpy and torch scalars to numbers."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"'{path}' cannot be written ({error.strerror}); choose another --output")
