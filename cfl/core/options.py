"""Hyper-parameters as dataclass fields that document and check themselves.

A strategy or regularizer is a frozen dataclass whose fields are made by `option`. The command line, `cfl-run describe`
and the configuration read the hyper-parameters from these fields alone.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from cfl.core.errors import ConfigError, unknown, wanted

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
    """Declare a hyper-parameter: default, meaning, source and valid values.

    above: exclusive lower bound; at_least, at_most: inclusive bounds; source: paper and section.
    """
    metadata = dict(help=help, source=source, choices=choices, above=above, at_least=at_least, at_most=at_most)
    return dataclasses.field(default=default, metadata=metadata)


def build(cls: type[T], values: dict[str, Any], prefix: str) -> T:
    """Make a hyper-parameter dataclass from option values.

    prefix: the group of the options on the command line ("strategy", "regularizer.fedsol"), for error messages.
    Raises ConfigError for unknown names (with the nearest valid name), wrong types and values out of range.
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
    """Raise ConfigError if an object that was made without `build` has a value that `build` rejects."""
    cls = type(item)
    bare = [name for kind in cls.__mro__ for name, value in vars(kind).items() if isinstance(value, dataclasses.Field)]
    if bare:
        raise ConfigError(
            f"{cls.__name__}.{bare[0]} is an option, but {cls.__name__} is not a dataclass; add @dataclass(frozen=True)"
        )
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.metadata:
            _checked(f"{prefix}.{field.name}", getattr(item, field.name), hints[field.name], field.metadata)


def describe(cls: type) -> list[dict[str, Any]]:
    """List the hyper-parameters of a class in field order: dicts with name, default, help, source and range."""
    return [
        {"name": field.name, "default": field.default, **field.metadata, "range": _range(field.metadata)}
        for field in dataclasses.fields(cls)
        if field.metadata
    ]


def _checked(name: str, value: Any, hint: Any, meta: Any) -> Any:
    """Return a valid value, converted from int to float if the hint asks for a float. Raises ConfigError."""
    adapter = _adapter(hint, *(meta.get(bound) for bound in ("above", "at_least", "at_most")))
    choices = meta.get("choices") or adapter.json_schema().get("enum")
    if choices and value not in choices:
        raise unknown(f"value of {name}", str(value), choices)
    try:
        return adapter.validate_python(value)
    except ValidationError:
        raise ConfigError(f"{name} must be {wanted(adapter.json_schema())}, not {value!r}") from None


@cache
def _adapter(hint: Any, above: float | None, at_least: float | None, at_most: float | None) -> TypeAdapter:
    limits = Field(gt=above, ge=at_least, le=at_most)  # for numbers only, not for the "auto" of `float | str`
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    bounded: Any = reduce(or_, [Annotated[kind, limits] if kind in (int, float) else kind for kind in kinds])
    return TypeAdapter(bounded, config=ConfigDict(strict=True, allow_inf_nan=False))


def _range(meta: Any) -> str:
    if meta.get("choices"):
        return ", ".join(map(str, meta["choices"]))
    low, least, most = meta.get("above"), meta.get("at_least"), meta.get("at_most")
    if low is None and least is None and most is None:
        return ""
    left = f"({low:g}" if low is not None else f"[{least:g}" if least is not None else "(-inf"
    return f"{left}, {most:g}]" if most is not None else f"{left}, inf)"
