"""Checkpoints: files of trees, written atomically and verified when loaded. No pickle is involved.

A checkpoint is one file with JSON metadata and the trees that are written every time. The clients' states are in packs,
see `cfl.runtime.packs`. The file names each pack by its checksum, and its own checksum covers these names.
"""

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cfl.core import CheckpointError, Tree, files, machine
from cfl.runtime import tree_file
from cfl.runtime.packs import NAMES, Packs

KEPT = 2  # checkpoints in a folder: if the last one is damaged, the one before is used
_NAME = re.compile(r"checkpoint-(\d{6,})\.safetensors")
_TEMPORARY = "*.safetensors.tmp"

Required = Callable[[Mapping[str, Tree], Mapping[str, Any]], str]
"""The fingerprint that a checkpoint with these trees and metadata must have."""


def save(
    folder: Path,
    serial: int,
    trees: Mapping[str, Tree],
    meta: Mapping[str, Any],
    states: Mapping[str, Tree] | None = None,
    packs: Packs | None = None,
) -> Path:
    """Write `folder`/checkpoint-<serial>.safetensors and its packs, then remove all but the newest two checkpoints.

    serial: increases from checkpoint to checkpoint; trees: name to tree of tensors of any shape, layout and device;
    meta: JSON data (tuples are loaded as lists) with a "fingerprint", which `load_latest` compares; states: more trees,
    by other names, of which few differ from those of the last checkpoint; packs: what was written to this folder
    before, None to write all states.
    A kill at any moment leaves the earlier checkpoints intact. Equal input and equal packs give equal bytes.
    Raises CheckpointError if the folder cannot be written.
    """
    target = folder / f"checkpoint-{serial:06d}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder.glob(_TEMPORARY))
        needed = (packs or Packs()).write(folder, states or {})
        content = tree_file.encode(trees, meta=dict(meta), packs=needed)
        files.replace(target, content, folder / f"{target.name}.tmp")
        files.sync(folder)
        _remove_old(folder, target, {name for name, _ in needed})
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {folder}: {error.strerror or error}; "
            "free space there, fix its permissions or choose another --output"
        ) from error
    return target


def oldest(folder: Path) -> int:
    """Return the serial of the oldest checkpoint in a folder, 0 if there is none."""
    return min((int(found[1]) for path in folder.glob("*") if (found := _NAME.fullmatch(path.name))), default=0)


class Writer:
    """Writes checkpoints to a folder (None: nowhere) in a background thread, one at a time.

    Each checkpoint gets a new thread, and `machine.await_writers` waits for it before a fork. A `with` block waits for
    the last write at its end. If the block itself raises, `warn` gets the message of a failed write instead.
    """

    def __init__(self, folder: Path | None, warn: Callable[[str], None]) -> None:
        self.folder, self.warn = folder, warn
        self.packs = Packs()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def load(self, fingerprint: str | Required) -> tuple[dict[str, Tree], dict[str, Any]] | None:
        """Return what `load_latest` does. The next `save` writes only the states that differ from it."""
        if self.folder is None:
            return None
        return load_latest(self.folder, fingerprint, self.warn, self.packs)

    def save(
        self, serial: int, trees: Mapping[str, Tree], meta: Mapping[str, Any], states: Mapping[str, Tree] | None = None
    ) -> None:
        """Wait for the previous checkpoint, then start `checkpoint.save`. Neither dictionaries nor leaves may change.

        Raises the error of the previous write, as `wait` does.
        """
        self.wait()
        if self.folder is not None:
            given = self.folder, serial, trees, meta, states, self.packs
            self._thread = threading.Thread(target=self._write, args=given, name=machine.WRITER)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises the error of its write, such as CheckpointError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, *given: Any) -> None:
        try:
            save(*given)
        except BaseException as failure:  # of any kind: `wait` raises it in the run's thread
            self._failure = failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            self.warn(str(failure))


def load_latest(
    folder: Path,
    fingerprint: str | Required | None,
    warn: Callable[[str], None],
    packs: Packs | None = None,
) -> tuple[dict[str, Tree], dict[str, Any]] | None:
    """Return all trees (on the CPU) and the metadata of the newest readable checkpoint, None if no checkpoint exists.

    fingerprint: required value of meta["fingerprint"], None for any; warn: receives one message for each damaged
    checkpoint skipped; packs: learns what the checkpoint's packs hold.
    The states come after the other trees, by name.
    Raises CheckpointError if that checkpoint belongs to another configuration, if all checkpoints are damaged, or if
    the folder cannot be listed.
    """
    packs = packs or Packs()
    try:
        found = _checkpoints(folder)
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {error.strerror}; choose another --output") from error
    for path in found:
        try:
            trees, entry = tree_file.decode(path.read_bytes())
            required = fingerprint(trees, entry["meta"]) if callable(fingerprint) else fingerprint
            if required is not None and entry["meta"].get("fingerprint") != required:
                raise CheckpointError(
                    f"{folder} holds a run with another configuration; "
                    "choose another --output, or repeat the options, code and data of that run"
                )
            states = packs.read(folder, entry.get("packs", []))  # files of earlier versions have none
        except (OSError, ValueError) as error:
            warn(f"checkpoint {path} is damaged and skipped: {error}")
            continue
        return {**trees, **dict(sorted(states.items()))}, entry["meta"]
    if found:
        raise CheckpointError(f"no checkpoint in {folder} can be read; remove them to restart from the first round")
    return None


def fingerprint(config: Mapping[str, Any]) -> str:
    """Hash a configuration's canonical JSON (BLAKE2b, 64 hex digits). The order of the keys does not matter.

    Raises TypeError for values that JSON cannot represent.
    """
    return tree_file.digest(tree_file.canonical(config).encode())


def clear(folder: Path) -> None:
    """Remove all checkpoints of a folder and the temporary files of killed writes. Other files stay.

    Raises CheckpointError if a file cannot be removed.
    """
    try:
        _remove([*_checkpoints(folder), *folder.glob(NAMES), *folder.glob(_TEMPORARY)])
    except OSError as error:
        raise CheckpointError(
            f"cannot remove checkpoints from {folder}: {error.strerror}; fix its permissions"
        ) from error


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint files of a folder, newest first."""
    if not folder.exists():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(((int(match[1]), path) for match, path in named), reverse=True)]


def _remove_old(folder: Path, target: Path, needed: set[str]) -> None:
    """Remove all but the newest checkpoints and `target`, then the packs that none of these needs."""
    found = _checkpoints(folder)
    _remove(old for old in found[KEPT:] if old != target)
    loose = {path.name for path in folder.glob(NAMES)} - needed
    for other in (path for path in found[:KEPT] if loose and path != target):
        try:
            loose -= {name for name, _ in tree_file.entry(other.read_bytes()).get("packs", [])}
        except (OSError, ValueError):  # damaged: nothing can be loaded from it
            continue
    _remove(folder / name for name in loose)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
