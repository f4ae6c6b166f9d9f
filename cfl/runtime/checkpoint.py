"""Checkpoints: safetensors files, written atomically and verified by a checksum when loaded. No pickle is involved.

A file holds named trees and JSON metadata. The safetensors header has one metadata entry, `cfl`: JSON of the checksum,
the metadata and the names of all trees and leaves in order (safetensors itself sorts tensors and drops empty trees).
Several entries could break the rule that equal input gives equal bytes: safetensors does not promise their order. The
checksum covers every byte of the file except its own digits.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import load as _parse
from safetensors.torch import save as _serialise

from cfl.core import CheckpointError, ConfigError, Tree, files

_NAME = re.compile(r"checkpoint-(\d{6,})\.safetensors")
_TEMPORARY = "checkpoint-*.safetensors.tmp"
_DIGITS = 64
# The entry is a string inside the header's JSON, so its quotes are escaped once. Quotes in names and metadata are
# escaped twice and do not match.
_MARK = rb"{\"checksum\":\""


def save(folder: Path, serial: int, trees: Mapping[str, Tree], meta: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write `folder`/checkpoint-<serial>.safetensors, then remove all but the newest `keep` checkpoints.

    serial: increases from checkpoint to checkpoint; trees: name to tree of tensors of any shape, layout and device;
    meta: JSON data (tuples are loaded as lists) with a "fingerprint", which `load_latest` compares.
    A kill at any moment leaves the earlier checkpoints intact. Equal input gives equal bytes.
    Raises CheckpointError if the folder cannot be written, ConfigError for a serial below 0 or keep below 1.
    """
    if serial < 0 or keep < 1:
        raise ConfigError(f"a checkpoint needs serial >= 0 and keep >= 1, not serial {serial} and keep {keep}")
    content = _encode(trees, meta)
    target = folder / f"checkpoint-{serial:06d}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder.glob(_TEMPORARY))
        files.replace(target, content, folder / f"{target.name}.tmp")
        files.sync(folder)
        _remove(old for old in _checkpoints(folder)[keep:] if old != target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {folder}: {error.strerror or error}; "
            "free space there, fix its permissions or choose another --output"
        ) from error
    return target


class Writer:
    """Writes checkpoints to a folder (None: nowhere) in a background thread, one at a time.

    Each checkpoint gets a new thread, which takes no lock, so the process may fork at any time. A `with` block waits
    for the last write at its end. If the block itself raises, `warn` gets the message of a failed write instead.
    """

    def __init__(self, folder: Path | None, warn: Callable[[str], None]) -> None:
        self.folder, self.warn = folder, warn
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, serial: int, trees: Mapping[str, Tree], meta: Mapping[str, Any]) -> None:
        """Wait for the previous checkpoint, then start `checkpoint.save`. Neither dictionaries nor leaves may change.

        Raises the error of the previous write, as `wait` does.
        """
        self.wait()
        if self.folder is not None:
            self._thread = threading.Thread(target=self._write, args=(self.folder, serial, trees, meta))
            self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises the error of its write, such as CheckpointError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, folder: Path, serial: int, trees: Mapping[str, Tree], meta: Mapping[str, Any]) -> None:
        try:
            save(folder, serial, trees, meta)
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
    folder: Path, fingerprint: str, warn: Callable[[str], None]
) -> tuple[dict[str, Tree], dict[str, Any]] | None:
    """Return the trees (on the CPU) and the metadata of the newest readable checkpoint, None if no checkpoint exists.

    fingerprint: required value of meta["fingerprint"]; warn: receives one message for each damaged checkpoint skipped.
    Raises CheckpointError if that checkpoint belongs to another configuration, if all checkpoints are damaged, or if
    the folder cannot be listed.
    """
    try:
        found = _checkpoints(folder)
    except OSError as error:
        raise CheckpointError(f"cannot list {folder}: {error.strerror}; choose another --output") from error
    for path in found:
        try:
            trees, meta = _decode(path.read_bytes())
        except (OSError, ValueError) as error:
            warn(f"checkpoint {path} is damaged and skipped: {error}")
            continue
        if meta.get("fingerprint") != fingerprint:
            raise CheckpointError(
                f"{folder} holds a run with another configuration; "
                "choose another --output, or repeat the options of that run"
            )
        return trees, meta
    if found:
        raise CheckpointError(f"no checkpoint in {folder} can be read; remove them to restart from the first round")
    return None


def fingerprint(config: Mapping[str, Any]) -> str:
    """Hash a configuration's canonical JSON (BLAKE2b, 64 hex digits). The order of the keys does not matter.

    Raises TypeError for values that JSON cannot represent.
    """
    return _digest(_json(config).encode())


def clear(folder: Path) -> None:
    """Remove all checkpoints of a folder and the temporary files of killed writes. Other files stay.

    Raises CheckpointError if a file cannot be removed.
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
    # A JSON list: no separator is safe, because both names may contain any character.
    return _json([tree, leaf])


def _encode(trees: Mapping[str, Tree], meta: Mapping[str, Any]) -> bytearray:
    # Clones: safetensors rejects tensors that share memory, such as the leaves of a broadcast tree.
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
    """Invert `_encode`. Raises ValueError, with the reason, for damaged bytes."""
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
    """Return the checkpoint files of a folder, newest first."""
    if not folder.exists():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(((int(match[1]), path) for match, path in named), reverse=True)]


def _remove(paths: Iterator[Path] | list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
