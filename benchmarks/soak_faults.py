"""Faults at the writes of a run, for soak.py and tests: kills, torn writes, full disks, flushes that fail.

A run writes through a few functions of Python's `os` and `pathlib`. Inside `faulty`, each of their calls counts as a
write, and one of them fails in a chosen way. A thread writes the checkpoints, so the order of writes varies a little.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

KINDS = ("kill before", "kill after", "torn write", "full disk", "flush fails")
ONLY = {"torn write": "write", "flush fails": "fsync"}  # the writes that a kind of fault can meet; else all
CUTS = frozenset(KINDS[:3])  # after these the process is gone; after the others it has to end in an error of cfl


@dataclass
class Writes:
    """Counts the writes in a folder, and lets one of those that the fault can meet fail.

    at: number of the write among these, from 0, or -1 for none; kind: one of `KINDS`; die: called where the process
    would be killed; it must not return.
    made: what was called so far: "write", "fsync", "replace" or "unlink".
    """

    folder: Path
    at: int = -1
    kind: str = ""
    die: Callable[[], None] = lambda: os._exit(137)
    made: list[str] = field(default_factory=list)

    def call(self, what: str, write: Callable[..., Any], *args: Any, flush: Callable[[], None] = lambda: None) -> Any:
        """Make a write, or fail in it. flush: brings what is written so far to the disk."""
        before = self.met
        self.made.append(what)
        if before != self.at or self.met == before:
            return write(*args)
        if self.kind == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.kind == "flush fails":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.kind == "kill after":
            write(*args)
        elif self.kind == "torn write":
            write(args[0][: len(args[0]) // 2])
            flush()
        self.die()

    @property
    def met(self) -> int:
        """Number of writes so far that the fault can meet."""
        return self.made.count(ONLY[self.kind]) if self.kind in ONLY else len(self.made)


class _File:
    """An open file whose writes count."""

    def __init__(self, file: IO[Any], writes: Writes) -> None:
        self._file, self._writes = file, writes

    def write(self, data: Any) -> Any:
        return self._writes.call("write", self._file.write, data, flush=self._file.flush)

    def __enter__(self) -> "_File":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def faulty(writes: Writes) -> Iterator[Writes]:
    """Let the writes inside count, and one fail. Only those in `writes.folder` count, and all flushes."""
    open_, replace, fsync, unlink = Path.open, os.replace, os.fsync, Path.unlink

    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = open_(path, mode, *args, **options)
        return _File(file, writes) if mode[0] in "wa" and path.is_relative_to(writes.folder) else file

    def replaced(source: Any, target: Any) -> None:
        here = Path(target).is_relative_to(writes.folder)
        writes.call("replace", replace, source, target) if here else replace(source, target)

    def flushed(descriptor: int) -> None:
        writes.call("fsync", fsync, descriptor)

    def removed(path: Path, missing_ok: bool = False) -> None:
        here = path.is_relative_to(writes.folder)
        writes.call("unlink", unlink, path, missing_ok) if here else unlink(path, missing_ok)

    with (
        patch.object(Path, "open", opened),
        patch.object(os, "replace", replaced),
        patch.object(os, "fsync", flushed),
        patch.object(Path, "unlink", removed),
    ):
        yield writes
