"""The output folder of a run, and its files."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from pydantic import BaseModel, TypeAdapter, ValidationError

from cfl.config.option_names import GROUPS
from cfl.config.overrides import read_yaml
from cfl.core import Busy, ConfigError, files

MADE_OF, MODEL, IMAGES, ERROR = "made_of.json", "model.json", "images", "error.json"
PROJECT = "forward.py"  # beside the config.yaml in a project of Flower's, which is no run
_LOCK = ".lock"
_PATIENCE = 0.5  # seconds to wait for the lock; `busy` holds it for less
_RESTORE = "put the whole file back, or begin again with another --output"


class RunFolder:
    """A run's folder: `config.yaml`, `metrics.json`, `made_of.json`, `model.json`, `timing.json`,
    `rounds.jsonl`, `checkpoints/`, `images/` if the method makes images, and `error.json` if an error ended the run.

    resume: continue the run in the folder. The folder stays locked until `close` or the end of the process.
    Raises ConfigError if the folder cannot be written, or holds a run and `resume` is False; Busy if another process
    has locked it.
    """

    def __init__(self, path: Path | str, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._rounds = self.path / "rounds.jsonl"
        if not resume and self._holds_run():
            raise self._used() if self.busy(self.path) else self._full()
        files.make_folder(self.checkpoints, self.path, "--output")
        self._lock = FileLock(self.path / _LOCK)
        try:
            self._lock.acquire(timeout=_PATIENCE)
        except Timeout:
            raise self._used() from None
        except OSError as error:  # the lock of another user
            raise ConfigError(
                f"'{self.path / _LOCK}' cannot be locked ({error.strerror}); choose another --output"
            ) from None
        if not resume and self._holds_run():  # of a process that held the lock until now
            self._lock.release()
            raise self._full()
        with suppress(OSError):  # where a lock keeps others from writing, the file stays empty
            (self.path / _LOCK).write_text(str(os.getpid()))

    def _holds_run(self) -> bool:
        return self._rounds.exists() or (self.path / "metrics.json").exists()

    def _full(self) -> ConfigError:
        return ConfigError(
            f"'{self.path}' already holds a run; use --resume (from Python resume=True) or another --output"
        )

    def _used(self) -> Busy:
        pid = ""
        with suppress(OSError):
            pid = (self.path / _LOCK).read_text(errors="replace").strip()
        process = f"process {pid}" if pid.isdigit() else "another process"
        return Busy(f"{process} uses '{self.path}'; wait for it, or choose another --output")

    @staticmethod
    def busy(path: Path) -> bool:
        """Return True if another process has locked that folder; False where the lock cannot be opened."""
        if not (path / _LOCK).exists():
            return False
        try:
            with FileLock(path / _LOCK, timeout=0):
                return False
        except Timeout:
            return True
        except OSError:  # a folder of another user, or a read-only one: nothing tells
            return False

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved configuration (plain data) to `config.yaml`."""
        _write(self.path / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False).encode())

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, see `write_json`."""
        write_json(self.path / name, data)

    def keep_metrics(self, tasks: int) -> None:
        """Rename metrics.json, which marks a run as finished, to metrics-<tasks>-tasks.json."""
        new = self.path / f"metrics-{tasks}-tasks.json"
        with _writing(new), suppress(FileNotFoundError):  # the session before was killed here
            (self.path / "metrics.json").replace(new)

    def remove_error(self) -> None:
        """Remove `error.json`: the run goes on. Raises ConfigError if the file cannot be removed."""
        with _writing(self.path / ERROR):
            (self.path / ERROR).unlink(missing_ok=True)

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Append a line to `rounds.jsonl`; `sync_rounds` flushes it to disk. Raises ConfigError if the write fails."""
        with _writing(self._rounds), self._rounds.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(row), allow_nan=False) + "\n")

    def sync_rounds(self) -> None:
        """Flush `rounds.jsonl` to disk, so that it survives a loss of power. Raises ConfigError if that fails."""
        with _writing(self._rounds):
            files.sync(self._rounds)
            files.sync(self.path)  # its entry for the file, which `truncate_rounds` has replaced

    def truncate_rounds(self, n_lines: int) -> None:
        """Keep the first `n_lines` complete lines of `rounds.jsonl`; later rounds, after the checkpoint, are repeated.

        Raises ConfigError if the file has fewer complete lines, or one that holds no round.
        """
        try:
            raw = self._rounds.read_bytes() if self._rounds.exists() else b""
        except OSError as error:
            raise ConfigError(f"'{self._rounds}' cannot be read ({error.strerror}); {_RESTORE}") from None
        lines = raw.split(b"\n")[:-1][:n_lines]  # a kill may leave an incomplete line after the last newline
        if len(lines) < n_lines:
            raise ConfigError(
                f"'{self._rounds}' was shortened: it has {len(lines)} rounds, and the checkpoint {n_lines}; {_RESTORE}"
            )
        for number, line in enumerate(lines, 1):
            try:
                _row(line)
            except ValueError:
                raise ConfigError(
                    f"line {number} of '{self._rounds}' is damaged: it holds no round; {_RESTORE}"
                ) from None
        _write(self._rounds, b"".join(line + b"\n" for line in lines))

    def write_sheet(self, task: int, png: bytes) -> None:
        """Write `images/task-<task>.png` atomically. Raises ConfigError if the write fails."""
        path = self.path / IMAGES / f"task-{task}.png"
        with _writing(path):
            path.parent.mkdir(exist_ok=True)
            _write(path, png)
            files.sync(path.parent)

    def truncate_sheets(self, n_tasks: int) -> None:
        """Keep the contact sheets of the first `n_tasks` tasks; later tasks, after the checkpoint, are repeated."""
        for task, path in sheets(self.path).items():
            if task >= n_tasks:
                with _writing(path):
                    path.unlink()


def sheets(folder: Path) -> dict[int, Path]:
    """Return the contact sheets of a run's folder: number of the task, in rising order, to the PNG file."""
    found = ((re.fullmatch(r"task-(\d+)\.png", path.name), path) for path in (folder / IMAGES).glob("task-*.png"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


class Metrics(BaseModel):
    """What `metrics.json` has, beside other figures."""

    method: str
    benchmark: str
    seed: int
    acc: float | None
    accuracy_matrix: list[list[float | None]]
    bytes_by_phase: dict[str, dict[str, float]] = {}
    by_task: list[dict[str, Any]] = []
    stopped: list[dict[str, Any]] = []
    callbacks: dict[str, dict[str, float | None]] = {}


class _Round(BaseModel):
    """What each line of `rounds.jsonl` has, beside other figures."""

    task: int
    phase: str
    round: int
    loss: float | None


def _row(line: bytes) -> dict[str, Any]:
    """Read a line of `rounds.jsonl`. Raises ValueError for one that holds no round."""
    row: dict[str, Any] = json.loads(line)
    _Round.model_validate(row, strict=True)
    return row


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file atomically. NaN is written as null. Raises ConfigError if the file cannot be written."""
    _write(path, json.dumps(plain(data), indent=2, allow_nan=False).encode() + b"\n")


def read_config(folder: Path) -> dict[str, Any]:
    """Read a run's `config.yaml`; empty if the file does not exist. Raises ConfigError for a damaged file."""
    path = folder / "config.yaml"
    try:
        options = read_yaml(path) if path.exists() else {}
        if wrong := next((name for name in GROUPS if not isinstance(options.get(name, {}), dict)), None):
            raise ConfigError(f"{wrong} in '{path}' must be a group of options, not {options[wrong]!r:.40}")
        return options
    except ConfigError as error:
        raise ConfigError(f"{error}; put the file back or move it away, or choose another --output") from None


def has_rounds(folder: Path) -> bool:
    """Whether a round was recorded in a run's folder."""
    rounds = folder / "rounds.jsonl"
    return rounds.exists() and b"\n" in rounds.read_bytes()


def runs_in(folder: Path) -> list[Path]:
    """Folders of runs at any depth, sorted, also with a damaged config.yaml; without projects of Flower's."""
    found = (path for path in sorted(folder.rglob("config.yaml")) if not path.with_name(PROJECT).exists())
    return [path.parent for path in found if _of_run(path)]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's `rounds.jsonl`; none without the file.

    Raises ConfigError for a file that is damaged or cannot be read.
    """
    path = folder / "rounds.jsonl"
    try:
        return [_row(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
    except ValueError:
        raise ConfigError(f"'{path}' is damaged; repeat the run, or move the file away") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read ({error.strerror})") from None


def read_json(path: Path, kind: Any = dict[str, Any]) -> dict[str, Any]:
    """Read the mapping in a JSON file; empty if the file does not exist.

    kind: type of the mapping, or a model of pydantic for it. Raises ConfigError for a file that does not hold it, or
    cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        TypeAdapter(kind).validate_python(data, strict=True)
    except ValueError as error:  # bytes that are no text, text that is no JSON, or JSON of another type
        what = f" ({first_fault(error)})" if isinstance(error, ValidationError) else ""
        raise ConfigError(f"'{path}' is damaged{what}; move its folder away, then repeat the run") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read ({error.strerror})") from None
    return data


def first_fault(error: ValidationError) -> str:
    """The first entry that pydantic refuses, and why; without an entry if it refuses the whole."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def read_made_of(folder: Path) -> dict[str, dict[str, str]]:
    """Read a run's `made_of.json`; empty if the file does not exist. Raises ConfigError for a damaged file."""
    return read_json(folder / MADE_OF, dict[str, dict[str, str]])


def plain(value: Any) -> Any:
    """Convert a value to JSON data: NaN and infinities to None, tuples to lists, NumPy and torch values to numbers."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _of_run(config: Path) -> bool:
    try:
        return "benchmark" in read_yaml(config)
    except ConfigError:  # the reader of the run reports it
        return True


def _write(path: Path, data: bytes) -> None:
    with _writing(path):
        files.replace(path, data, path.with_name(f".{path.name}.{os.getpid()}.tmp"))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise ConfigError if a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be written ({error.strerror}); free space there, fix its permissions or choose another "
            "--output"
        ) from None
