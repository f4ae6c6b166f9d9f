"""The arguments of `cfl.run`: names, classes and plain data become the configuration and the objects of a run."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from torch import nn

from cfl.assembly import methods
from cfl.assembly.resolve import dump, load
from cfl.config.schema import RunConfig
from cfl.contract import Gathers, LocalRegularizer, Strategy
from cfl.contract.composed import STRATEGY, prefix
from cfl.core import ConfigError, options, plugins, unknown
from cfl.core.typed import described
from cfl.streams import Stream

T = TypeVar("T", bound=LocalRegularizer)
Given = Mapping[str, Any] | Sequence[str] | str | None


def configured(
    config: RunConfig | Mapping[str, Any],
    stream: Stream | str | None,
    strategy: Strategy | type[Strategy] | str | None,
    regularizers: Given,
    model: nn.Module | str | None,
) -> RunConfig:
    """Return the configuration of a run, changed by the arguments that are registered names.

    A name comes with its default options, unless the configuration already has this name. Raises ConfigError.
    """
    config = load(config) if isinstance(config, Mapping) else RunConfig.model_validate(config)
    changed: dict[str, Any] = {}
    if isinstance(stream, str):
        plugins.benchmarks.get(stream)  # `load` accepts benchmarks that are not registered
        changed["benchmark"] = stream
    if isinstance(model, str) and model != config.model.name:
        changed["model"] = config.model.model_dump(mode="json", exclude={"options"}) | {"name": model}
    if isinstance(strategy, str) and strategy != config.method:
        if "+" in strategy or (strategy in plugins.local.names() and strategy not in plugins.strategies.names()):
            raise ConfigError(
                f"strategy='{strategy}' is not one strategy; name local regularizers in regularizers=[...]"
            )
        changed |= {"method": strategy, "strategy": {}}
    if regularizers is not None:
        named = _named(regularizers, config)
        if ((*named,), named) != (config.regularizers, config.regularizer):
            changed |= {"regularizers": [*named], "regularizer": named}
    return load({**dump(config), **changed}) if changed else config


def members(
    config: RunConfig, strategy: Strategy | type[Strategy] | str | None, regularizers: Given
) -> dict[str, LocalRegularizer]:
    """Return the strategy and the regularizers of a run by owner; given ones replace those of the configuration.

    config: as `configured` returned it. Raises ConfigError for objects and names that no member can have.
    """
    made = methods.build(config)
    own = made[STRATEGY] if strategy is None or isinstance(strategy, str) else _made(strategy, Strategy, STRATEGY)
    names = [name for name in made if name != STRATEGY]
    if regularizers is not None:
        names = [regularizers] if isinstance(regularizers, str) else [*regularizers]
    found = {STRATEGY: own}
    for name in names:
        methods.check_name(name)
        given = regularizers[name] if isinstance(regularizers, Mapping) else {}
        found[name] = made[name] if isinstance(given, Mapping) else _made(given, LocalRegularizer, name)
    return found


def _named(regularizers: Given, config: RunConfig) -> dict[str, Any]:
    """The given regularizers that a configuration can name: name to options."""
    if isinstance(regularizers, Mapping):
        known = {name: config.regularizer.get(name, {}) for name in config.regularizers}
        found = {name: own if isinstance(own, Mapping) else known.get(name) for name, own in regularizers.items()}
        return {name: values for name, values in found.items() if values is not None}
    names = [regularizers] if isinstance(regularizers, str) else list(regularizers or ())
    if len(set(names)) < len(names):
        raise ConfigError(f"regularizers must differ from each other, not {', '.join(names)}")
    plugins.check_local(names)
    return {name: config.regularizer.get(name, {}) for name in names}


def _made(given: Any, base: type[T], owner: str) -> T:
    """Return the object, or an object of a class that needs no arguments. Raises ConfigError for any other."""
    group = prefix(owner)
    if isinstance(given, type) and issubclass(given, base):
        given = options.build(given, {}, group)
    if not isinstance(given, base):
        remedy = "pass a local regularizer as regularizers={name: object}" if owner == STRATEGY else "see cfl.run"
        raise ConfigError(f"{group} must be a cfl.{base.__name__}, not {described(given)}; {remedy}")
    if owner != STRATEGY and isinstance(given, Strategy):
        raise ConfigError(f"{group} is the strategy {type(given).__name__}; pass it as strategy=...")
    if given.gathers not in get_args(Gathers):
        raise unknown(f"value of {type(given).__name__}.gathers", str(given.gathers), get_args(Gathers))
    return given
