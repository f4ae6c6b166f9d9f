"""Load pickled data sets without running code: only NumPy arrays and plain containers are allowed."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray, numeric

from cfl.core import DataError

_BUILTINS = {kind.__name__: kind for kind in (list, dict, set, tuple, range, int, bytes, bytearray)} | {"xrange": range}
_NUMPY = {
    "ndarray": np.ndarray,
    "dtype": np.dtype,
    "_reconstruct": multiarray._reconstruct,
    "scalar": multiarray.scalar,
    "_frombuffer": numeric._frombuffer,  # type: ignore[attr-defined]
}


class _Plain(pickle.Unpickler):
    """An unpickler of NumPy arrays and plain containers only, under the names of any NumPy and Python version."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[str, Any] = {}
        if module in ("builtins", "__builtin__"):
            known = _BUILTINS
        elif module.partition(".")[0] == "numpy":
            known = _NUMPY
        elif (module, name) == ("_codecs", "encode"):  # bytes that Python 3 wrote in protocols below 3
            return _latin1
        if name not in known:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no array or plain container")
        return known[name]


def load(path: Path) -> Any:
    """Load a pickle of NumPy arrays, numbers, strings, and lists, tuples, sets and dictionaries of them.

    Pickles of Python 2 are read too, with their strings as Latin-1. Raises DataError for a file that cannot be read and
    for one that holds anything else; no code of the file runs.
    """
    try:
        with path.open("rb") as file:
            return _Plain(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise any error
        raise DataError(f"{path} cannot be read as a pickle of arrays ({error}); replace it") from error


def _latin1(text: str, _encoding: str) -> bytes:
    return text.encode("latin1")
