"""The options that no section declares, those of models, methods and regularizers, and the messages for wrong ones."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from cfl import options, plugins
from cfl.config.sections import RunConfig
from cfl.errors import ConfigError, unknown, wanted
from cfl.privacy import rules


def check_keys(data: Mapping[str, Any], section: type[BaseModel], prefix: str, method: str, regularizers: Any) -> None:
    """Raise ConfigError for the first key that no option has."""
    for name, value in data.items():
        field = section.model_fields.get(name)
        if field is None:
            dotted = f"{prefix}{name}"
            if isinstance(value, Mapping) and value and not prefix:  # `fedsol.rho` is meant to be found too
                dotted += f".{next(iter(value))}"
            raise _unknown_option(dotted, method, regularizers)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            check_keys(value, kind, f"{prefix}{name}.", method, regularizers)
        elif isinstance(value, Mapping) and "dict" not in str(kind):
            raise _unknown_option(f"{prefix}{name}.{next(iter(value), '')}", method, regularizers)


def _unknown_option(dotted: str, method: str, regularizers: Any) -> ConfigError:
    names = list(_option_names(method, regularizers))
    if f"regularizer.{dotted}" in names:
        return ConfigError(f"unknown option '{dotted}'; did you mean 'regularizer.{dotted}'?")
    # The group is what users forget most: "threshold" is meant to find strategy.threshold.
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = [] if "." in dotted else get_close_matches(dotted, by_leaf, n=1, cutoff=0.7)
    if near:
        return ConfigError(f"unknown option '{dotted}'; did you mean '{by_leaf[near[0]]}'?")
    return unknown("option", dotted, names)


def _option_names(method: str, regularizers: Any = ()) -> Iterable[str]:
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


def check_network(config: RunConfig) -> None:
    """Raise ConfigError where the network has layers that differential privacy excludes."""
    from cfl.models import sample

    if config.dp.level != "none" and (module := sample(config.model.name, config.model.options)) is not None:
        rules.check_model(module, config)


def filled(config: RunConfig) -> dict[str, Any]:
    """The options of the model, of the method and of every regularizer, checked, with defaults."""
    from cfl import models  # brings torch, which reading a preset does not need

    options = models.filled(config.model.name, config.model.options)
    own = _hyper(plugins.strategies.get(config.method), config.strategy, "strategy")
    others = {
        name: _hyper(plugins.local.get(name), config.regularizer.get(name, {}), f"regularizer.{name}")
        for name in config.regularizers
    }
    return {"model": config.model.model_copy(update={"options": options}), "strategy": own, "regularizer": others}


def _hyper(cls: type, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    hints = get_type_hints(cls)
    optional = {name for name, hint in hints.items() if type(None) in get_args(hint) and str not in get_args(hint)}
    # YAML spells it null, but the messages and most users say none.
    values = {name: None if value == "none" and name in optional else value for name, value in values.items()}
    built: Any = options.build(cls, values, prefix)
    return {field.name: getattr(built, field.name) for field in fields(built) if field.init}


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
