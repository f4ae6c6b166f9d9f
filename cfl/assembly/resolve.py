"""The configuration of a run: every option with its default and valid range, and the layers that fill it in.

Layers, later ones win: defaults, the benchmark's preset (`cfl/presets/<benchmark>.yaml`) or a resolved `config.yaml`,
`key=value` overrides, flags. A resolved configuration names every hyper-parameter, so it repeats its run to the byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from cfl import models
from cfl.assembly import methods, privacy_rules
from cfl.config.option_names import check_keys, one_line, unknown_option
from cfl.config.overrides import parse, read_yaml
from cfl.config.presets import check_scale, layered, normal, preset
from cfl.config.schema import RunConfig
from cfl.core import options, plugins
from cfl.core.errors import ConfigError
from cfl.core.plugins import DEFAULT_METHOD


def resolve(
    benchmark: str | None = None,
    *,
    method: str | None = None,
    regularizers: Sequence[str] = (),
    overrides: Sequence[str] = (),
    seed: int | None = None,
    file: Path | None = None,
    engine: str | None = None,
    scale: str | None = None,
) -> RunConfig:
    """The full configuration of a run, from the layers that the module names.

    method: a strategy, a local regularizer (then under FedAvg), or several joined by "+", such as "fot+fedsol";
    regularizers: more of them; overrides: "key=value" with dotted keys and YAML values; file: a resolved `config.yaml`,
    which replaces the preset; scale: which variant of the preset, "paper" (as written), "small" or "smoke".
    Raises ConfigError in one line for unknown names, wrong values and a file that cannot be read.
    """
    flags = dict(benchmark=benchmark, method=method, seed=seed, engine=engine, scale=scale)
    given = {name: value for name, value in flags.items() if value is not None}
    top = normal(parse(overrides), given)
    base = normal(read_yaml(file)) if file else {}
    name = top.get("benchmark", base.get("benchmark"))
    if base.get("benchmark", name) != name:
        raise ConfigError(f"'{file}' is for benchmark '{base['benchmark']}', not '{name}'; name that one or none")
    if name is None:
        raise ConfigError("no benchmark is given; name one (see 'cfl-run list benchmarks') or pass --config FILE")
    if not file:
        base = normal(preset(name), {"benchmark": name})
    check_scale(base, top.get("scale"), f"'{file or name}'")
    if regularizers:  # further ones, whatever layer names the first
        plugins.roles("+".join([DEFAULT_METHOD, *regularizers]))
        top["regularizers"] = [*top.get("regularizers", base.get("regularizers", ())), *regularizers]
    return load(layered(base, top))


def load(data: Mapping[str, Any]) -> RunConfig:
    """A configuration from plain data (the inverse of `dump`), checked against the methods' and models' own options.

    Raises ConfigError in one line that names the option, the value and what is valid.
    """
    data = normal(data)
    check_keys(data, RunConfig, "", data.get("method", DEFAULT_METHOD), data.get("regularizers", ()))
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise one_line(error) from None
    config = config.model_copy(update=filled(config))
    methods.check_network(config)
    built = methods.build(config)
    methods.check(built, config)
    privacy_rules.check(built, config)
    return config


def dump(config: RunConfig) -> dict[str, Any]:
    """Plain data (lists, dicts, numbers, strings) of a configuration, hyper-parameters at their defaults included."""
    return config.model_copy(update=filled(config)).model_dump(mode="json")


def json_schema() -> dict[str, Any]:
    """The JSON schema of `config.yaml`."""
    return RunConfig.model_json_schema()


def filled(config: RunConfig) -> dict[str, Any]:
    """The options of the model, of the method and of every regularizer, checked, with defaults."""
    of_model = models.filled(config.model.name, config.model.options)
    strategy = plugins.strategies.get(config.method)
    known = [f"strategy.{field.name}" for field in fields(strategy) if field.init]
    if strange := [dotted for name in config.strategy if (dotted := f"strategy.{name}") not in known]:
        raise unknown_option(strange[0], known, config.method)
    own = _hyper(strategy, config.strategy, "strategy")
    others = {
        name: _hyper(plugins.local.get(name), config.regularizer.get(name, {}), f"regularizer.{name}")
        for name in config.regularizers
    }
    return {"model": config.model.model_copy(update={"options": of_model}), "strategy": own, "regularizer": others}


def _hyper(cls: type, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    hints = get_type_hints(cls)
    optional = {name for name, hint in hints.items() if type(None) in get_args(hint) and str not in get_args(hint)}
    # YAML spells it null, but the messages and most users say none.
    values = {name: None if value == "none" and name in optional else value for name, value in values.items()}
    built: Any = options.build(cls, values, prefix)
    return {field.name: getattr(built, field.name) for field in fields(built) if field.init}
