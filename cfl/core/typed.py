"""Arguments of public functions, and fields of records, checked against their annotations."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from reprlib import repr as shortened
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from cfl.core.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_hints = functools.cache(get_type_hints)
_WORDS = {
    int: "a whole number", float: "a number", str: "a string", bool: "True or False", NoneType: "None",
    Mapping: "a dict", Path: "a path", type: "a class", Callable: "a function", Iterable: "a list",
}  # fmt: skip


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: an argument that is not of the annotated type raises a ConfigError, which names it.

    NumPy's numbers become Python's, and other sequences become tuples where the annotation is a tuple or a sequence.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            call, hints = signature.bind(*args, **kwargs), _hints(function)
        except TypeError as error:
            raise ConfigError(f"{function.__name__}: {error}; see its documentation") from None
        for name, value in call.arguments.items():
            if name in hints:
                call.arguments[name] = _converted(f"{function.__name__}: {name}", value, hints[name])
        return function(*call.args, **call.kwargs)

    return checked


def typed_fields(record: Any) -> None:
    """For the `__post_init__` of a frozen dataclass: check and convert its fields, as `typed` does arguments."""
    kind: Any = type(record)
    for name, hint in _hints(kind).items():
        value = _converted(f"{type(record).__name__}.{name}", getattr(record, name), hint)
        object.__setattr__(record, name, value)


def described(value: Any) -> str:
    """A value in a few words, for an error: a number or a text as it is, else its type."""
    if value is None or isinstance(value, str | int | float):
        return shortened(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, list | tuple):
        kinds = " and ".join(sorted({type(each).__name__ for each in value}))
        return f"a {type(value).__name__} of {len(value)} {kinds}".rstrip()
    dtype = f" and dtype {value.dtype}" if hasattr(value, "dtype") else ""
    return f"an object of type {type(value).__name__}{dtype}"


def _converted(name: str, value: Any, hint: Any) -> Any:
    try:
        return _as(value, hint)
    except TypeError:
        remedy = "; pass an object of it" if isinstance(value, type) and not _kinds(hint) <= _WORDS.keys() else ""
        raise ConfigError(f"{name} must be {_words(hint)}, not {described(value)}{remedy}") from None


def _as(value: Any, hint: Any) -> Any:
    """The value as the annotated type. Raises TypeError if it is of another one."""
    kind, inner, truth = get_origin(hint) or hint, get_args(hint), isinstance(value, bool)
    if kind in (Union, UnionType):
        for each in inner:
            try:
                return _as(value, each)
            except TypeError:
                continue
    elif kind in (tuple, Sequence) and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(_as(each, inner[0]) for each in value)
    elif kind is int and isinstance(value, Integral) and not truth:
        return int(value)
    elif kind is float and isinstance(value, Real) and not truth:
        return int(value) if isinstance(value, Integral) else float(value)
    elif kind is bool and isinstance(value, np.bool_):
        return bool(value)
    elif kind is Any or kind not in (int, tuple, Sequence) and isinstance(value, kind):
        if not (isinstance(value, type) and getattr(kind, "_is_protocol", False)):  # a class in place of its object
            return value
    raise TypeError


def _kinds(hint: Any) -> set[Any]:
    """The types that an annotation takes, those of a list's entries included."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    return {kind} if kind in _WORDS or not inner else set().union(*map(_kinds, inner))


def _words(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_words, inner))
    if kind in (tuple, Sequence):
        return "a list" if inner[0] is Any else f"a list (each {_words(inner[0])})"
    return _WORDS.get(kind, f"a {kind.__name__}")
