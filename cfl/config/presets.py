"""Presets of benchmarks, with their methods, variants and scales, and the options that are layered over them."""

from collections.abc import Hashable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from cfl.config.option_names import GROUPS
from cfl.config.overrides import merged, read_yaml, without
from cfl.config.schema import ModelConfig
from cfl.core import ConfigError, plugins
from cfl.core.plugins import DEFAULT_METHOD


def preset(benchmark: str) -> dict[str, Any]:
    """Return the preset of a benchmark as written, with `methods` and `variants`; empty if there is no preset."""
    found = {path.name: path for path in (files("cfl") / "presets").iterdir()}
    path = found.get(f"{benchmark}.yaml")
    return read_yaml(path) if path else {}


def tasks_of(benchmark: str, scale: str) -> Any:
    """The option `tasks` of a preset at a scale, as `RunConfig` has it; None if the preset has none."""
    tasks = layered(normal(preset(benchmark)), {"scale": scale}).get("tasks")
    return tuple(tasks) if isinstance(tasks, list) else tasks


def normal(layer: Mapping[str, Any], flags: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Normalise a layer with `flags` over it: split "fot+fedsol" into its methods, move a model's options to `options`.

    Raises ConfigError if the layer has another value in place of a name or a group of options.
    """
    _check_shape(layer)
    data = merged(_routed(layer), flags)
    label = data.get("method")
    if not isinstance(label, str):
        return data
    method, first = plugins.roles(label)
    more = data.get("regularizers", ())
    return {**data, "method": method, "regularizers": [*first, *more] if isinstance(more, (list, tuple)) else more}


def check_scale(base: Mapping[str, Any], scale: Any, where: str) -> None:
    """Raise ConfigError for a scale that the preset or `config.yaml` lacks."""
    known = [base.get("scale", "paper"), *base.get("variants", {}).get("scale", {})]
    if scale is not None and scale not in known:
        raise ConfigError(f"{where} has no scale '{scale}'; it has {', '.join(known)}")


def layered(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Return `top` over `base`; both together select among the `methods` and `variants` of `base`."""
    both = merged(base, top)
    for dotted, cases in base.get("variants", {}).items():
        section, _, name = str(dotted).rpartition(".")
        group = both.get(section) if section else both
        value = group.get(name) if isinstance(group, Mapping) else None
        base = _over(base, _routed(cases.get(value, {}) if isinstance(value, Hashable) else {}))
    method = both.get("method", DEFAULT_METHOD)
    if "method" in base and base["method"] != method:
        base = without(base, "strategy")  # hyper-parameters of another method
    if isinstance(top.get("regularizers"), list) and "regularizer" in base:
        kept = {name: own for name, own in base["regularizer"].items() if name in top["regularizers"]}
        base = {**base, "regularizer": kept}
    own = base.get("methods", {})
    used = both.get("regularizers")
    names = [name for name in used if isinstance(name, str)] if isinstance(used, (list, tuple)) else []
    others = {name: own[name] for name in names if name in own}
    base = merged(base, {"strategy": own.get(method, {}), **({"regularizer": others} if others else {})})
    return _over(without(base, "methods", "variants"), top)


def _over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Return `top` merged over `base`, without the model options of `base` if `top` has another model or weights."""
    model, new = base.get("model", {}), top.get("model", {})
    weights = model.get("weights")
    if new.get("name", _model_name(base)) != _model_name(base) or new.get("weights", weights) != weights:
        base = {**base, "model": without(model, "options")}
    return merged(base, top)


def _model_name(data: Mapping[str, Any]) -> Any:
    return data.get("model", {}).get("name", "mlp")


def _routed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with the keys of `model` that are not fields of ModelConfig moved to `model.options`."""
    model = data.get("model")
    if model is None:
        return dict(data)
    own = {name: value for name, value in model.items() if name in ModelConfig.model_fields}
    extra = {name: value for name, value in model.items() if name not in own}
    return {**data, "model": merged(own, {"options": extra}) if extra else own}


def _check_shape(layer: Mapping[str, Any]) -> None:
    """Raise ConfigError if a layer, or a variant in it, has another value in place of a name or a group of options."""
    for name in ("benchmark", "method"):
        if not isinstance(layer.get(name, ""), str):
            raise ConfigError(f"{name} must be a name, not {layer[name]!r}")
    for name, options in {**GROUPS, "strategy": ["<option>"]}.items():
        _check_group(name, layer.get(name, {}), ", ".join(f"{name}.{option}" for option in options))
    for name, inner in {"regularizer": "<name>.<option>", "methods": "<method>", "variants": "<option>"}.items():
        _check_group(name, layer.get(name, {}), f"{name}.{inner}")
        for key, value in layer.get(name, {}).items():
            _check_group(f"{name}.{key}", value, f"{name}.{inner}")
    for dotted, cases in layer.get("variants", {}).items():
        for value, case in cases.items():
            _check_group(f"variants.{dotted}.{value}", case, "the options of a run")
            _check_shape(case)


def _check_group(name: str, value: Any, inner: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a group of options, not {value!r}; set one of {inner}")
