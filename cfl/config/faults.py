"""Faults of a configuration in one line."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cfl.core import ConfigError, unknown
from cfl.core.errors import wanted


def one_line(error: ValidationError, schema: Mapping[str, Any]) -> ConfigError:
    """Describe the first fault of a pydantic error as `option must be ..., not ...`."""
    fault = error.errors()[0]
    place, value, definitions = fault["loc"], fault["input"], schema["$defs"]
    dotted = ".".join(map(str, place))
    if fault["type"] == "missing":
        return ConfigError(f"no {dotted} is given; name one (see 'cfl-run list {dotted}s')")
    if fault["type"] == "extra_forbidden":
        return unknown("option", dotted, [*schema["properties"]])
    depth = 0
    while depth < len(place) and place[depth] in schema.get("properties", {}):
        schema, depth = schema["properties"][place[depth]], depth + 1
        schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    dotted = ".".join(map(str, place[:depth]))
    if place[-1] == "[key]":
        return ConfigError(f"the names of options in {dotted} must be texts, not {value!r}")
    inside = schema.get("items", {}) if len(place) > depth else {}
    if choices := schema.get("enum") or inside.get("enum"):
        return unknown(f"value of {dotted}", str(value), choices)
    return ConfigError(f"{dotted} must be {wanted(schema)}, not {value!r}")
