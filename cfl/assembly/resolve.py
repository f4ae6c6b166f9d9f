"""Resolve the configuration of a run: combine its layers, fill in defaults, and check all options.

Layers, later ones win: defaults, the benchmark's preset (`cfl/presets/<benchmark>.yaml`) or a resolved `config.yaml`,
`key=value` overrides, flags. A resolved configuration names every hyper-parameter, so it repeats its run to the byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from cfl import models
from cfl.assembly import methods, privacy_rules
from cfl.config.option_names import check_keys, unknown_option
from cfl.config.overrides import flat, parse, read_yaml
from cfl.config.presets import check_scale, layered, normal, preset
from cfl.config.schema import RunConfig
from cfl.core import ConfigError, options, plugins
from cfl.core.plugins import DEFAULT_METHOD
from cfl.core.typed import typed
from cfl.models import pretrained


@typed
def resolve(
    benchmark: str | None = None,
    *,
    method: str | None = None,
    regularizers: str | Sequence[str] | None = (),
    overrides: str | Sequence[str] = (),
    seed: int | None = None,
    file: Path | str | None = None,
    engine: str | None = None,
    scale: str | None = None,
) -> RunConfig:
    """Return the full configuration of a run: every option has a value, so it repeats the run to the byte.

    Its layers, later ones win: defaults, the preset of the benchmark or `file`, `overrides`, and the other arguments.

    method: a strategy, a local regularizer (under FedAvg), or several joined by "+", such as "fot+fedsol";
    regularizers: further local regularizers, or one; overrides: "key=value" with dotted keys and YAML values, or a list
    of them; file: a resolved `config.yaml` in place of the preset; scale: variant of the preset: "paper" (as written),
    "small" or "smoke".
    Raises ConfigError in one line for unknown names, wrong types and values, and an unreadable file.
    """
    flags = dict(benchmark=benchmark, method=method, seed=seed, engine=engine, scale=scale)
    given = {name: value for name, value in flags.items() if value is not None}
    layer = parse(overrides)
    top = _with_network(normal(layer, given))
    if benchmark is not None and (named := layer.get("benchmark", benchmark)) != benchmark:
        raise ConfigError(
            f"the argument names benchmark '{benchmark}', and --set benchmark={named}; name it by the argument alone"
        )
    with plugins.read_from(file):
        base = normal(read_yaml(file)) if file is not None else {}
    name = top.get("benchmark", base.get("benchmark"))
    if base.get("benchmark", name) != name:
        raise ConfigError(f"'{file}' is for benchmark '{base['benchmark']}', not '{name}'; name that benchmark or none")
    if not name:
        raise ConfigError("no benchmark is given; name one (see 'cfl-run list benchmarks') or pass --config FILE")
    if file is None:
        base = normal(preset(name), {"benchmark": name})
    check_scale(base, top.get("scale"), f"'{file or name}'")
    if more := [regularizers] if isinstance(regularizers, str) else regularizers:  # in addition to those of any layer
        plugins.check_local(more)
        given = top.get("regularizers", base.get("regularizers", ()))
        top["regularizers"] = [*given, *more] if isinstance(given, (list, tuple)) else given  # `load` refuses others
    with plugins.read_from(file):
        return load(layered(base, top))


@typed
def load(data: Mapping[str, Any]) -> RunConfig:
    """Make a configuration from plain data, the inverse of `dump`, and check the options of methods and model.

    Raises ConfigError in one line with the option, its value and the valid values.
    """
    data = normal(data)
    check_keys(data, RunConfig, "", data.get("method", DEFAULT_METHOD), data.get("regularizers", ()))
    config = RunConfig.model_validate(data)
    config = config.model_copy(update=filled(config))
    _check_plain(config)
    methods.check_network(config)
    built = methods.build(config)
    methods.check(built, config)
    privacy_rules.check(built, config)
    return config


def dump(config: RunConfig) -> dict[str, Any]:
    """Convert a configuration to plain data (lists, dicts, numbers, strings), with all default hyper-parameters."""
    return config.model_copy(update=filled(config)).model_dump(mode="json")


def filled(config: RunConfig) -> dict[str, Any]:
    """Check the options of the model, the strategy and the regularizers, and fill in their defaults."""
    of_model = models.filled(config.model.name, config.model.options, config.model.weights)
    strategy = plugins.strategies.get(config.method)
    known = [f"strategy.{field.name}" for field in fields(strategy) if field.init]
    if unknown := [dotted for name in config.strategy if (dotted := f"strategy.{name}") not in known]:
        raise unknown_option(unknown[0], known, config.method)
    own = _hyper(strategy, config.strategy, "strategy")
    others = {
        name: _hyper(plugins.local.get(name), config.regularizer.get(name, {}), f"regularizer.{name}")
        for name in config.regularizers
    }
    return {"model": config.model.model_copy(update={"options": of_model}), "strategy": own, "regularizer": others}


def _with_network(layer: dict[str, Any]) -> dict[str, Any]:
    """Return a layer with the name of the network that its `model.weights` are of, unless it names one."""
    model = layer.get("model", {})
    if not isinstance(weights := model.get("weights"), str) or "name" in model:
        return layer
    return {**layer, "model": {**model, "name": pretrained.network(weights)}}


def _hyper(cls: type, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    built: Any = options.build(cls, dict(values), prefix)
    return {field.name: getattr(built, field.name) for field in fields(built) if field.init}


def _check_plain(config: RunConfig) -> None:
    """Raise ConfigError for an option whose value no file can hold, such as a function."""
    groups = {"model.options": config.model.options, "strategy": config.strategy, "regularizer": config.regularizer}
    for group, values in groups.items():
        for name, value in flat(values, f"{group}.").items():
            try:
                to_jsonable_python(value)
            except (PydanticSerializationError, ValueError):
                raise ConfigError(
                    f"{name} is {value!r}, which config.yaml cannot hold; make it a number, a text or a list of them, "
                    "or pass an object to cfl.run"
                ) from None
