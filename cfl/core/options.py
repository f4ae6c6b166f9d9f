"""Hyper-parameters as dataclass fields that document and check themselves.

A strategy or regularizer is a frozen dataclass whose fields are made by `option`. The command line, `cfl-run describe`
and the configuration read the hyper-parameters from these fields alone.
"""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cache, reduce
from operator import or_
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, PydanticInvalidForJsonSchema, PydanticUserError, TypeAdapter, ValidationError

from cfl.core.errors import CflError, ConfigError, reason, unknown, wanted

T = TypeVar("T")
_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "string": "text",
    "null": "none",
    "array": "list",
    "object": "mapping",
}
"""Types of a JSON schema in words."""
_EXACT = (bool, int, float, str)  # types without conversions: `true` is not 1, and 1 is not "1"


def option(
    default: Any,
    help: str,
    *,
    source: str = "",
    choices: Sequence[Any] | None = None,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    steep: Literal["", "local", "server"] = "",
) -> Any:
    """Declare a hyper-parameter: default, meaning, source and valid values.

    above: exclusive lower bound; at_least, at_most: inclusive bounds; source: paper and section;
    choices and bounds of a list hold for each of its entries;
    steep: "local" if a large value can make the steps of clients diverge, "server" for the step of the server; None, in
    place of a limit, counts as large.
    """
    metadata = dict(help=help, source=source, choices=choices, above=above, at_least=at_least, at_most=at_most)
    metadata |= {"steep": steep} if steep else {}
    if isinstance(default, list | dict | set):  # each object has its own
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build(cls: type[T], values: dict[str, Any], prefix: str) -> T:
    """Make a hyper-parameter dataclass from option values.

    prefix: the group of the options on the command line ("strategy", "regularizer.fedsol"), for error messages.
    Lists become tuples where the field is a tuple, and the word none becomes None where the field may be None.
    Raises ConfigError for unknown names (with the nearest valid name), wrong types, values out of range, an option
    without default that has no value, and values that the class itself refuses.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = _hints(cls)
    valid = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown("option", f"{prefix}.{name}", [f"{prefix}.{known}" for known in fields])
        valid[name] = checked(f"{prefix}.{name}", value, hints[name], fields[name].metadata)
    for name in required(cls):
        if name not in valid:
            raise ConfigError(f"{prefix}.{name} of {cls.__name__} has no default; give it a value")
    try:
        return cls(**valid)
    except CflError:
        raise
    except Exception as error:  # of its own __post_init__
        raise ConfigError(f"{cls.__name__} refuses the options of {prefix}: {reason(error)}") from error


def fill(item: Any, values: Mapping[str, Any]) -> None:
    """Set each option of a frozen dataclass that is None to its value in a preset; called in its `__post_init__`."""
    for name, value in values.items():
        if getattr(item, name) is None:
            object.__setattr__(item, name, value)


def given(value: T | None) -> T:
    """The value of an option after `fill`."""
    assert value is not None
    return value


def check(item: Any, prefix: str) -> None:
    """Raise ConfigError if an object that was made without `build` has a value that `build` rejects."""
    cls = type(item)
    bare = [name for kind in cls.__mro__ for name, value in vars(kind).items() if isinstance(value, dataclasses.Field)]
    if bare:
        raise ConfigError(
            f"{cls.__name__}.{bare[0]} is an option, but {cls.__name__} is not a dataclass; add @dataclass(frozen=True)"
        )
    hints = _hints(cls)
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.metadata:
            checked(f"{prefix}.{field.name}", getattr(item, field.name), hints[field.name], field.metadata)


def describe(cls: type) -> list[dict[str, Any]]:
    """List the hyper-parameters of a class in field order: dicts with name, default, help, source and range.

    range: choices, bounds, or else the type, in words. The default is MISSING if there is none. Of the fields that
    `option` did not make, those without default are listed. Raises ConfigError for an annotation that cannot be read.
    """
    hints, plain = _hints(cls), {"help": "", "source": ""}
    return [
        {
            "name": field.name,
            "default": _default(field),
            **(field.metadata or plain),
            "range": _range(field.metadata) or _kind(hints[field.name]),
        }
        for field in dataclasses.fields(cls)
        if field.metadata or field.name in required(cls)
    ]


def required(cls: type) -> list[str]:
    """The names of the hyper-parameters without default."""
    return [one.name for one in dataclasses.fields(cls) if one.init and _default(one) is dataclasses.MISSING]


def steep(item: Any, prefix: str, whose: str) -> list[str]:
    """List the options with `steep` equal to `whose`, which can make steps too long, with their values."""
    fields = dataclasses.fields(item) if dataclasses.is_dataclass(item) else ()
    values = {field.name: getattr(item, field.name) for field in fields if field.metadata.get("steep") == whose}
    acting = {name: value for name, value in values.items() if value is None or (value and not isinstance(value, str))}
    return [f"{prefix}.{name} (now {'none' if value is None else value})" for name, value in acting.items()]


def _default(field: "dataclasses.Field[Any]") -> Any:
    """The default of a field; MISSING if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _hints(cls: type) -> dict[str, Any]:
    """The types of a class's fields. Raises ConfigError for an annotation that cannot be read."""
    try:
        return get_type_hints(cls)
    except (NameError, TypeError, SyntaxError) as error:
        raise ConfigError(f"the annotations of {cls.__name__} cannot be read: {reason(error)}") from error


def checked(name: str, value: Any, hint: Any, meta: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a valid value of an option, converted to the type of the hint. meta: see `option`. Raises ConfigError."""
    try:
        adapter = _adapter(hint, *(meta.get(bound) for bound in ("above", "at_least", "at_most")))
    except PydanticUserError as error:
        raise ConfigError(f"{name} has the type {hint}, which is no type of an option: {reason(error)}") from error
    schema = _schema(adapter, hint)
    choices = meta.get("choices") or _literals(schema)
    kinds = get_args(hint)
    if isinstance(value, str) and value == "none" and NoneType in kinds and str not in kinds and value not in choices:
        value = None  # YAML spells it null, but the messages and most users say none
    try:
        valid = adapter.validate_python(value)
    except ValidationError:
        if choices:
            raise unknown(f"value of {name}", str(value), choices) from None
        raise ConfigError(f"{name} must be {wanted(schema)}, not {value!r}") from None
    if meta.get("choices"):
        for one in valid if isinstance(valid, list | tuple) and valid not in choices else [valid]:
            if one not in choices and not (one is None and NoneType in kinds):
                raise unknown(f"value of {name}", str(one), choices)
    return valid


@cache
def _adapter(hint: Any, above: float | None, at_least: float | None, at_most: float | None) -> TypeAdapter:
    typed = _typed(hint, (above, at_least, at_most))
    return TypeAdapter(typed, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))


def _typed(hint: Any, limits: tuple[float | None, ...]) -> Any:
    """The type, in which numbers, truth values and texts are not converted. limits: bounds of its numbers."""
    if hint in _EXACT:
        above, at_least, at_most = limits if hint in (int, float) else (None,) * 3  # not of the str in float | str
        return Annotated[hint, Field(strict=True, gt=above, ge=at_least, le=at_most)]
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return reduce(or_, [_typed(each, limits) for each in inner])
    if isinstance(kind, type) and issubclass(kind, Collection) and inner and ... not in inner[:1]:
        return kind[tuple(each if each is ... else _typed(each, limits) for each in inner)]  # type: ignore[index]
    return hint


@cache
def _schema(adapter: TypeAdapter, hint: Any) -> dict[str, Any]:
    """The JSON schema of a type, or the name of a type that has none."""
    try:
        return adapter.json_schema()
    except PydanticInvalidForJsonSchema:
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        return {"type": " or ".join("none" if one is NoneType else getattr(one, "__name__", str(one)) for one in kinds)}


def _literals(schema: Mapping[str, Any]) -> list[Any]:
    """The literals of a type that consists of literals and None; empty for other types."""
    parts = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    return parts[0].get("enum", []) if len(parts) == 1 else []


def _range(meta: Any) -> str:
    if meta.get("choices"):
        return ", ".join(map(str, meta["choices"]))
    low, least, most = meta.get("above"), meta.get("at_least"), meta.get("at_most")
    if low is None and least is None and most is None:
        return ""
    left = f"({low:g}" if low is not None else f"[{least:g}" if least is not None else "(-inf"
    return f"{left}, {most:g}]" if most is not None else f"{left}, inf)"


def _kind(hint: Any) -> str:
    """The values of a type in words; empty for a type that no option can have."""
    try:
        return _words(_schema(_adapter(hint, None, None, None), hint))
    except PydanticUserError:
        return ""


def _words(schema: Mapping[str, Any]) -> str:
    """Describe in a few words the values that a JSON schema accepts."""
    if "anyOf" in schema:
        return " or ".join(map(_words, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum") or [schema["const"]]))
    kind, inner = schema.get("type", "value" if "$ref" in schema else "anything"), schema.get("items")
    if kind == "array" and inner:
        named = inner.get("type") in ("integer", "number", "string") and not {"enum", "const"} & inner.keys()
        return f"list of {_words(inner)}" + "s" * named
    return _TYPES.get(kind, kind)
