"""The options that no section declares, those of models, methods and regularizers, and the messages for wrong ones."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from cfl.config.schema import RunConfig
from cfl.core import options, plugins
from cfl.core.errors import ConfigError, unknown, wanted


def check_keys(data: Mapping[str, Any], section: type[BaseModel], prefix: str, method: str, regularizers: Any) -> None:
    """Raise ConfigError for the first key that no option has."""
    for name, value in data.items():
        field = section.model_fields.get(name)
        if field is None:
            dotted = f"{prefix}{name}"
            if isinstance(value, Mapping) and value and not prefix:  # `fedsol.rho` is meant to be found too
                dotted += f".{next(iter(value))}"
            raise unknown_option(dotted, option_names(method, regularizers), method)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            check_keys(value, kind, f"{prefix}{name}.", method, regularizers)
        elif isinstance(value, Mapping) and "dict" not in str(kind):
            dotted = f"{prefix}{name}.{next(iter(value), '')}"
            raise unknown_option(dotted, option_names(method, regularizers), method)


def unknown_option(dotted: str, names: Iterable[str], method: str = "") -> ConfigError:
    """The error for an option that is not among the `names`, with the nearest one, which another method may have.

    method: that of the run; empty where there are several, and the names are those of all.
    """
    names, group = list(names), dotted.partition(".")[0]
    if f"regularizer.{dotted}" in names:
        return ConfigError(f"unknown option '{dotted}'; did you mean 'regularizer.{dotted}'?")
    others = {} if group in RunConfig.model_fields and group != "strategy" else _of_methods()
    every = [*names, *(name for name in others if name not in names)]
    # The group is what users forget most: "threshold" is meant to find strategy.threshold.
    key = _leaf if "." not in dotted or group == "strategy" else str
    known = {key(name): name for name in reversed(every)}
    near = [known[one] for one in get_close_matches(key(dotted).lower(), known, n=1, cutoff=0.7)]
    if not near or (near[0] in names and "." in dotted):
        return unknown("option", dotted, names)
    parts = [f"unknown option '{dotted}'; did you mean '{near[0]}'?"] if near[0] != dotted else []
    parts += [_owned(near[0], others[near[0]], method)] if near[0] not in names else []
    return ConfigError(" ".join(parts))


def _owned(option: str, owners: Sequence[str], method: str) -> str:
    """Who has an option that the run's method, or those of several runs, have not."""
    lacking = f"'{method}' has no option {option}" if method else f"no method named here has the option {option}"
    have = f"{', '.join(map(repr, owners))} {'has' if len(owners) == 1 else 'have'}"
    return f"{lacking}; {have}" + (f": add --method {owners[0]}" if method else "")


def _of_methods() -> dict[str, list[str]]:
    """The options of all methods, each with the methods that have it."""
    found: dict[str, list[str]] = {}
    for method in plugins.strategies.names():
        for row in options.describe(plugins.strategies.get(method)):
            found.setdefault(f"strategy.{row['name']}", []).append(method)
    return found


def _leaf(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def option_names(method: str = "", regularizers: Any = ()) -> Iterable[str]:
    """The options of a run; without a method those of every run."""
    for name, field in RunConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from (f"{name}.{inner}" for inner in kind.model_fields)
        else:
            yield name
    if method in plugins.strategies.names():
        yield from (f"strategy.{row['name']}" for row in options.describe(plugins.strategies.get(method)))
    known = plugins.local.names()
    for owner in regularizers if isinstance(regularizers, (list, tuple)) else ():
        if owner in known:
            yield from (f"regularizer.{owner}.{row['name']}" for row in options.describe(plugins.local.get(owner)))


def one_line(error: ValidationError) -> ConfigError:
    """The first fault of a pydantic error as `option must be ..., not ...`."""
    fault = error.errors()[0]
    dotted, schema, value = "", RunConfig.model_json_schema(), fault["input"]
    definitions = schema["$defs"]
    for part in fault["loc"]:
        if part not in schema.get("properties", {}):
            break
        dotted, schema = f"{dotted}.{part}".lstrip("."), schema["properties"][part]
        schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    choices = schema.get("enum") or schema.get("items", {}).get("enum")
    if choices:
        return unknown(f"value of {dotted}", str(value), choices)
    return ConfigError(f"{dotted} must be {wanted(schema)}, not {value!r}")
