"""Arrays in .npz files."""

import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cfl.core import DataError

DAMAGED = (
    RuntimeError, OSError, MemoryError, ValueError, EOFError, KeyError, SyntaxError, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Errors of Python and NumPy at a damaged file."""


def read(path: Path, names: Sequence[str], again: str = "") -> dict[str, Any]:
    """Read the arrays of these names. again: other ways to get the file, for errors. Raises DataError for other files.

    NumPy's own errors advise to allow pickles, hence other ones.
    """
    remedy = f"{again}write it with numpy.savez from {', '.join(names)}"
    if not path.exists():
        raise DataError(f"there is no file '{path}'; {remedy}")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} cannot be read as an npz file: it is no npz archive, or only a part of one; {remedy}")
    what, found = f"{path}", dict[str, Any]()
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := [name for name in names if name not in file]:
                held = ", ".join(sorted(file)[:8]) or "nothing"
                raise DataError(f"{path} has no array {missing[0]}; it must hold {', '.join(names)}, not {held}")
            for name in names:
                what = f"array {name} of {path}"
                found[name] = file[name]
                if not isinstance(found[name], np.ndarray):  # NumPy returns an entry of another format as bytes
                    raise ValueError(f"{name} is no array")
    except DAMAGED as error:
        raise DataError(f"{what} cannot be read: it is damaged or no array; {remedy}") from error
    return found
