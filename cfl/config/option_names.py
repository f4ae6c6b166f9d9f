"""Names of all options, also those of methods and regularizers, and error messages for unknown options."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel

from cfl.config.schema import RunConfig
from cfl.core import ConfigError, options, plugins, unknown

GROUPS = {  # groups of options with fixed names -> their options
    name: list(inner)
    for name, field in RunConfig.model_fields.items()
    if (inner := getattr(field.annotation, "model_fields", None))
}


def option_names(method: str = "", regularizers: Any = ()) -> Iterable[str]:
    """Yield the options of a run; without a method, only those that all runs have."""
    for name in RunConfig.model_fields:
        yield from (f"{name}.{inner}" for inner in GROUPS[name]) if name in GROUPS else [name]
    if method in plugins.strategies.names():
        yield from (f"strategy.{row['name']}" for row in options.describe(plugins.strategies.get(method)))
    known = plugins.local.names()
    for owner in regularizers if isinstance(regularizers, (list, tuple)) else ():
        if owner in known:
            yield from (f"regularizer.{owner}.{row['name']}" for row in options.describe(plugins.local.get(owner)))


def check_keys(data: Mapping[str, Any], section: type[BaseModel], prefix: str, method: str, regularizers: Any) -> None:
    """Raise ConfigError for the first unknown key."""
    for name, value in data.items():
        field = section.model_fields.get(name)
        if field is None:
            dotted = f"{prefix}{name}"
            if isinstance(value, Mapping) and value and not prefix:  # finds `regularizer.fedsol.rho` for `fedsol.rho`
                dotted += f".{next(iter(value))}"
            raise unknown_option(dotted, option_names(method, regularizers), method)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            check_keys(value, kind, f"{prefix}{name}.", method, regularizers)
        elif isinstance(value, Mapping) and "dict" not in str(kind):
            dotted = f"{prefix}{name}.{next(iter(value), '')}"
            raise unknown_option(dotted, option_names(method, regularizers), method)


def unknown_option(dotted: str, names: Iterable[str], method: str = "") -> ConfigError:
    """Make the error for an option that is not in `names`; it suggests the nearest option, also of another method.

    method: of the run; empty for several methods, with the names of all their options.
    """
    names, (group, _, rest) = list(names), dotted.partition(".")
    if dotted in names:  # as one key of a mapping
        return ConfigError(f"'{dotted}' must be nested in a mapping, as {{'{group}': {{'{rest}': ...}}}}")
    if f"regularizer.{dotted}" in names:
        return ConfigError(f"unknown option '{dotted}'; did you mean 'regularizer.{dotted}'?")
    if group in plugins.local.names() and rest in {row["name"] for row in options.describe(plugins.local.get(group))}:
        return ConfigError(f"unknown option '{dotted}'; add --local {group}, and set 'regularizer.{dotted}'")
    if group == "methods":
        return ConfigError(f"unknown option '{dotted}': only presets have 'methods'; set 'strategy.NAME'")
    others = {} if group in RunConfig.model_fields and group != "strategy" else strategy_options()
    every = [*names, *(name for name in others if name not in names)]
    # Users often forget the group: "threshold" finds strategy.threshold.
    key = _leaf if "." not in dotted or group == "strategy" else str
    known = {key(name): name for name in reversed(every)}
    near = [known[one] for one in get_close_matches(key(dotted).lower(), known, n=1, cutoff=0.7)]
    if not near or (near[0] in names and "." in dotted):
        return unknown("option", dotted, names)
    parts = [f"unknown option '{dotted}'; did you mean '{near[0]}'?"] if near[0] != dotted else []
    parts += [_owned(near[0], others[near[0]], method)] if near[0] not in names else []
    return ConfigError(" ".join(parts))


def _owned(option: str, owners: Sequence[str], method: str) -> str:
    """Name the methods that have an option, which the run's method or methods lack."""
    lacking = f"'{method}' has no option {option}" if method else f"no method named here has the option {option}"
    have = f"{', '.join(map(repr, owners))} {'has' if len(owners) == 1 else 'have'}"
    return f"{lacking}; {have}" + (f": add --method {owners[0]}" if method else "")


def strategy_options() -> dict[str, list[str]]:
    """Return the options of all strategies, each with the strategies that have it."""
    found: dict[str, list[str]] = {}
    for method in plugins.strategies.names():
        with suppress(ConfigError):  # a method that cannot be loaded is in the way of no other
            for row in options.describe(plugins.strategies.get(method)):
                found.setdefault(f"strategy.{row['name']}", []).append(method)
    return found


def _leaf(dotted: str) -> str:
    return dotted.rpartition(".")[2]
