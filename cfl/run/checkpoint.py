"""Checkpoints: one safetensors file each, written atomically, checked by a hash on the way back, without pickle.

A file holds named trees and JSON meta data. The safetensors header has one metadata entry, `cfl`: JSON of the checksum,
the meta data and the names of all trees and leaves in order (safetensors itself sorts tensors and drops empty trees).
One entry only, because safetensors does not promise an order of several and equal input has to give equal bytes. The
checksum covers every byte of the file but its own digits.
"""

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import load as _parse
from safetensors.torch import save as _serialise

from cfl.core.errors import CheckpointError, ConfigError
from cfl.core.tree import Tree

_NAME = re.compile(r"checkpoint-(\d{6,})\.safetensors")
_TEMPORARY = "checkpoint-*.safetensors.tmp"
_DIGITS = 64
# As it stands in the file: inside a JSON string, so its quotes are escaped. Quotes in names and in the meta data are
# escaped once more and do not match.
_MARK = rb"{\"checksum\":\""


def save(folder: Path, serial: int, trees: Mapping[str, Tree], meta: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write `folder`/checkpoint-<serial>.safetensors, then remove all but the newest `keep` checkpoints.

    serial: grows from checkpoint to checkpoint; trees: name -> tree of tensors of any shape, layout and device;
    meta: what JSON can hold (tuples come back as lists); `load_latest` needs a "fingerprint" in it.
    A kill at any moment leaves the checkpoints before it whole. Equal input gives equal bytes.
    Raises CheckpointError where the folder cannot be written, ConfigError for a serial below 0 or keep below 1.
    """
    if serial < 0 or keep < 1:
        raise ConfigError(f"a checkpoint needs serial >= 0 and keep >= 1, not serial {serial} and keep {keep}")
    content = _encode(trees, meta)
    target = folder / f"checkpoint-{serial:06d}.safetensors"
    temporary = folder / f"{target.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder.glob(_TEMPORARY))
        try:
            _write_synced(temporary, content)
            os.replace(temporary, target)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(folder)
        _remove(old for old in _checkpoints(folder)[keep:] if old != target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {folder}: {error.strerror or error}; "
            "free space there, fix its permissions or choose another --output"
        ) from error
    return target


class Writer:
    """Writes checkpoints to a folder (None: nowhere) in a thread, one at a time, while the run goes on.

    Each has a thread of its own that takes no lock, so that processes may be forked at any time. As a context manager
    it waits at the end; where the run has failed already, `warn` gets what a write raised.
    """

    def __init__(self, folder: Path | None, warn: Callable[[str], None]) -> None:
        self.folder, self.warn = folder, warn
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, serial: int, trees: Mapping[str, Tree], meta: Mapping[str, Any]) -> None:
        """Begin `checkpoint.save`, once the one before is on disk; neither dictionaries nor leaves may change later.

        Raises what the write before raised, as `wait` does.
        """
        self.wait()
        if self.folder is not None:
            self._thread = threading.Thread(target=self._write, args=(self.folder, serial, trees, meta))
            self._thread.start()

    def wait(self) -> None:
        """Return when the last checkpoint is on disk. Raises what `checkpoint.save` did: CheckpointError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, folder: Path, serial: int, trees: Mapping[str, Tree], meta: Mapping[str, Any]) -> None:
        try:
            save(folder, serial, trees, meta)
        except BaseException as failure:  # whatever it is, the run's own thread has to raise it
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
    folder: Path, fingerprint: str, warn: Callable[[str], None]
) -> tuple[dict[str, Tree], dict[str, Any]] | None:
    """The trees (on the CPU) and the meta data of the newest readable checkpoint, None where there is no checkpoint.

    fingerprint: what meta["fingerprint"] must be; warn: gets one message per damaged checkpoint, which is passed over.
    Raises CheckpointError where the checkpoint is of another configuration, where all are damaged, and where the folder
    cannot be listed.
    """
    try:
        found = _checkpoints(folder)
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {error.strerror}; choose another --output") from error
    for path in found:
        try:
            trees, meta = _decode(path.read_bytes())
        except (OSError, ValueError) as error:
            warn(f"checkpoint {path} is damaged and passed over: {error}")
            continue
        if meta.get("fingerprint") != fingerprint:
            raise CheckpointError(
                f"{folder} holds a run with another configuration; "
                "choose another --output, or repeat the options of that run"
            )
        return trees, meta
    if found:
        raise CheckpointError(f"no checkpoint in {folder} can be read; remove them to start again from the first round")
    return None


def fingerprint(config: Mapping[str, Any]) -> str:
    """A hash (64 hex digits, BLAKE2b) of a configuration's canonical JSON: the order of its keys does not matter.

    Raises TypeError for values that JSON cannot hold.
    """
    return _digest(_json(config).encode())


def clear(folder: Path) -> None:
    """Remove all checkpoints of a folder and what a killed `save` left there; other files stay.

    Raises CheckpointError where they cannot be removed.
    """
    try:
        _remove([*_checkpoints(folder), *folder.glob(_TEMPORARY)])
    except OSError as error:
        raise CheckpointError(
            f"cannot remove checkpoints from {folder}: {error.strerror}; fix its permissions"
        ) from error


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(*parts: bytes | memoryview) -> str:
    state = blake2b(digest_size=_DIGITS // 2)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def _key(tree: str, leaf: str) -> str:
    # A JSON list, since no separator is safe: both names may hold any character.
    return _json([tree, leaf])


def _encode(trees: Mapping[str, Tree], meta: Mapping[str, Any]) -> bytearray:
    # Each leaf is cloned: safetensors refuses tensors that share memory, as the leaves of a broadcast tree do.
    leaves = {
        _key(tree, name): leaf.detach().cpu().contiguous().clone()
        for tree, content in trees.items()
        for name, leaf in content.items()
    }
    layout = [[tree, list(content)] for tree, content in trees.items()]
    entry = _json({"checksum": "0" * _DIGITS, "meta": dict(meta), "trees": layout})  # "checksum" sorts first
    data = bytearray(_serialise(leaves, {"cfl": entry}))
    start, end = _checksum_span(data)
    view = memoryview(data)
    data[start:end] = _digest(view[:start], view[end:]).encode()
    return data


def _decode(data: bytes) -> tuple[dict[str, Tree], dict[str, Any]]:
    """The inverse of `_encode`; raises ValueError with the reason for bytes that it did not make."""
    start, end = _checksum_span(data)
    view = memoryview(data)
    if _digest(view[:start], view[end:]).encode() != data[start:end]:
        raise ValueError("its checksum does not match its content")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entry = json.loads(header["__metadata__"]["cfl"])
    leaves = _parse(data)
    trees = {tree: {name: leaves[_key(tree, name)] for name in names} for tree, names in entry["trees"]}
    return trees, entry["meta"]


def _checksum_span(data: bytes | bytearray) -> tuple[int, int]:
    start = data.find(_MARK)
    if start < 0:
        raise ValueError("its header has no checksum")
    start += len(_MARK)
    return start, start + _DIGITS


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoint files of a folder, newest first."""
    if not folder.exists():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(((int(match[1]), path) for match, path in named), reverse=True)]


def _write_synced(path: Path, data: bytearray) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(paths: Iterator[Path] | list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
