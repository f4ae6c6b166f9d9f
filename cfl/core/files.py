"""Folders to write to, atomic writes of files, and flushes to disk."""

import contextlib
import os
from pathlib import Path

from cfl.core.errors import ConfigError


def replace(path: Path, data: bytes | bytearray, temporary: Path) -> None:
    """Write a file atomically: after a kill or an error, `path` holds either its old content or all of `data`.

    temporary: a file in the folder of `path`; it receives the data, is flushed to disk, then takes the name `path`. An
    OSError removes it, a kill may leave it. Raises OSError. After a loss of power the new name is certain only once
    `sync` has flushed the folder.
    """
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(inside: Path, folder: Path, option: str) -> None:
    """Make a folder inside `folder`, or `folder` itself. option: that names `folder`, for messages.

    Raises ConfigError if `folder` cannot be written.
    """
    try:
        inside.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the folder '{folder}' cannot be written ({error.strerror}); choose another {option}"
        ) from None
