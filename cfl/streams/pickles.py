"""Load pickled data sets without running code: only NumPy arrays and plain containers are allowed.

Python's own unpickler in C, and NumPy's functions in C, crash on some damaged files. So the unpickler is the one in
Python, and NumPy gets checked values only.
"""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cfl.core import DataError

_PLAIN = "biufcSU"  # kinds of a dtype whose values are bytes, not objects


def _dtype(code: str, *_options: Any) -> np.dtype:
    """Make a dtype of its own, since `__setstate__` changes it."""
    kind = np.dtype(str(code), copy=True)
    if kind.kind not in _PLAIN:
        raise pickle.UnpicklingError(f"it holds an array of {kind}, not of numbers or strings")
    return kind


def _empty(*_options: Any) -> np.ndarray:
    """Make an array that `__setstate__` fills."""
    return np.empty(0, np.int8)


def _array(data: bytes | bytearray, kind: np.dtype, shape: tuple[int, ...], order: str = "C") -> np.ndarray:
    return np.frombuffer(data, kind).reshape(shape, order="F" if order == "F" else "C")


def _scalar(kind: np.dtype, data: bytes) -> Any:
    return _array(data, kind, ())[()]


def _latin1(text: str, _encoding: str) -> bytes:
    return text.encode("latin1")


_BUILTINS = {kind.__name__: kind for kind in (list, dict, set, tuple, range, int, bytes, bytearray)} | {"xrange": range}
_build: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]
_NUMPY = {"ndarray": "ndarray", "dtype": _dtype, "_reconstruct": _empty, "scalar": _scalar, "_frombuffer": _array}


class _Plain(pickle._Unpickler):
    """An unpickler of NumPy arrays and plain containers only, under the names of any NumPy and Python version."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

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

    def load_build(self) -> None:
        """Set the state of an array or a dtype, if it is one that NumPy writes."""
        target, state = self.stack[-2:]
        if isinstance(target, np.ndarray):
            _, shape, kind, _, data = state
            sizes = [*map(int, shape), kind.itemsize]
            fits = isinstance(kind, np.dtype) and isinstance(data, bytes | str)
            fits = fits and min(sizes) >= 0 and len(data) == math.prod(sizes)
        else:
            _, order, *parts, size, alignment, flags = state
            fits = isinstance(target, np.dtype) and order in ("<", ">", "=", "|") and parts == [None] * 3
            fits = fits and (size, alignment) in ((-1, -1), (target.itemsize, target.alignment))
            fits = fits and flags == target.flags
        if not fits:
            raise pickle.UnpicklingError("an array or its dtype is damaged")
        _build(self)

    dispatch[pickle.BUILD[0]] = load_build


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
