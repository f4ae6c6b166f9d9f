"""Hyper-parameters as dataclass fields that document and check themselves.

A strategy or regularizer is a frozen dataclass whose fields are made by `option`; the command line, `cfl-run describe`
and the configuration read them from there and from nowhere else.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from cfl.core.errors import ConfigError, unknown

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    source: str = "",
    choices: Sequence[Any] | None = None,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A hyper-parameter: its default, its meaning, where it comes from, and its valid values.

    above: exclusive lower bound; at_least, at_most: inclusive bounds; source: paper and section.
    """
    metadata = dict(help=help, source=source, choices=choices, above=above, at_least=at_least, at_most=at_most)
    return dataclasses.field(default=default, metadata=metadata)


def build(cls: type[T], values: dict[str, Any], prefix: str) -> T:
    """Make a hyper-parameter dataclass from option values.

    prefix: what stands before the names on the command line ("strategy", "regularizer.fedsol"), for error messages.
    Raises ConfigError for unknown names (with the nearest valid one), wrong types and values out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    checked = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown("option", f"{prefix}.{name}", [f"{prefix}.{known}" for known in fields])
        checked[name] = _checked(f"{prefix}.{name}", value, hints[name], fields[name].metadata)
    return cls(**checked)


def check(item: Any, prefix: str) -> None:
    """Raise ConfigError where an object made without `build` has a value that `build` would not take."""
    cls = type(item)
    bare = [name for kind in cls.__mro__ for name, value in vars(kind).items() if isinstance(value, dataclasses.Field)]
    if bare:
        raise ConfigError(
            f"{cls.__name__}.{bare[0]} is an option, but the class is no dataclass; add @dataclass(frozen=True)"
        )
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.metadata:
            _checked(f"{prefix}.{field.name}", getattr(item, field.name), hints[field.name], field.metadata)


def describe(cls: type) -> list[dict[str, Any]]:
    """The hyper-parameters of a class: a list of dicts with name, default, help, source and range, in field order."""
    return [
        {"name": field.name, "default": field.default, **field.metadata, "range": _range(field.metadata)}
        for field in dataclasses.fields(cls)
        if field.metadata
    ]


def _checked(name: str, value: Any, hint: Any, meta: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) is not None else (hint,)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        value = float(value)
    plain = tuple(kind for kind in kinds if isinstance(kind, type))
    if plain and (not isinstance(value, plain) or isinstance(value, bool) and bool not in plain):
        wanted = " or ".join("none" if kind is type(None) else kind.__name__ for kind in plain)
        raise ConfigError(f"{name} must be {wanted}, not {value!r}")
    if meta.get("choices") and value not in meta["choices"]:
        raise unknown(f"value of {name}", str(value), map(str, meta["choices"]))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, least, most = meta.get("above"), meta.get("at_least"), meta.get("at_most")
        if not math.isfinite(value) or any(
            (low is not None and value <= low, least is not None and value < least, most is not None and value > most)
        ):
            raise ConfigError(f"{name} must be in {_range(meta)}, not {value}")
    return value


def _range(meta: Any) -> str:
    if meta.get("choices"):
        return ", ".join(map(str, meta["choices"]))
    low, least, most = meta.get("above"), meta.get("at_least"), meta.get("at_most")
    if low is None and least is None and most is None:
        return ""
    left = f"({low:g}" if low is not None else f"[{least:g}" if least is not None else "(-inf"
    return f"{left}, {most:g}]" if most is not None else f"{left}, inf)"
