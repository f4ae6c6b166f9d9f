"""The layers of a configuration: a preset with its methods, variants and scales, and what is set over it."""

from collections.abc import Hashable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from cfl.config.overrides import check_shape, merged, read_yaml, without
from cfl.config.schema import ModelConfig, RunConfig
from cfl.core import plugins
from cfl.core.errors import ConfigError
from cfl.core.plugins import DEFAULT_METHOD


def preset(benchmark: str) -> dict[str, Any]:
    """The preset of a benchmark as written, `methods` and `variants` included; empty where there is none."""
    path = files("cfl") / "presets" / f"{benchmark}.yaml"
    return read_yaml(path) if path.is_file() else {}


def normal(layer: Mapping[str, Any], flags: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """A layer with `flags` over it, in one form: "fot+fedsol" split into its members, a model's arguments in `options`.

    Raises ConfigError where it has something else than a name, or than a group of options, where one belongs.
    """
    sections = {name: getattr(field.annotation, "model_fields", None) for name, field in RunConfig.model_fields.items()}
    check_shape(layer, {name: list(inner) for name, inner in sections.items() if inner})
    data = merged(_routed(layer), flags)
    label = data.get("method")
    if not isinstance(label, str):
        return data
    method, first = plugins.roles(label)
    more = data.get("regularizers", ())
    return {**data, "method": method, "regularizers": [*first, *more] if isinstance(more, (list, tuple)) else more}


def check_scale(base: Mapping[str, Any], scale: Any, where: str) -> None:
    """Raise ConfigError for a scale that neither the preset nor the `config.yaml` has."""
    known = [base.get("scale", "paper"), *base.get("variants", {}).get("scale", {})]
    if scale is not None and scale not in known:
        raise ConfigError(f"{where} has no scale '{scale}'; it has {', '.join(known)}")


def layered(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`, whose `methods` and `variants` are resolved by what the two say together."""
    both = merged(base, top)
    for dotted, cases in base.get("variants", {}).items():
        section, _, name = str(dotted).rpartition(".")
        group = both.get(section) if section else both
        value = group.get(name) if isinstance(group, Mapping) else None
        base = _over(base, _routed(cases.get(value, {}) if isinstance(value, Hashable) else {}))
    method = both.get("method", DEFAULT_METHOD)
    if "method" in base and base["method"] != method:
        base = without(base, "strategy")  # the other method's hyper-parameters mean nothing here
    if isinstance(top.get("regularizers"), list) and "regularizer" in base:
        kept = {name: own for name, own in base["regularizer"].items() if name in top["regularizers"]}
        base = {**base, "regularizer": kept}
    own = base.get("methods", {})
    used = both.get("regularizers")
    others = {name: own[name] for name in (used if isinstance(used, (list, tuple)) else ()) if name in own}
    base = merged(base, {"strategy": own.get(method, {}), **({"regularizer": others} if others else {})})
    return _over(without(base, "methods", "variants"), top)


def _over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` merged over `base`, whose options of a model go if `top` names another one."""
    model = base.get("model", {})
    if top.get("model", {}).get("name", _model_name(base)) != _model_name(base):
        base = {**base, "model": without(model, "options")}
    return merged(base, top)


def _model_name(data: Mapping[str, Any]) -> Any:
    return data.get("model", {}).get("name", "mlp")


def _routed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same data with the keys of `model` that are no field of it moved to `model.options`."""
    model = data.get("model")
    if model is None:
        return dict(data)
    own = {name: value for name, value in model.items() if name in ModelConfig.model_fields}
    extra = {name: value for name, value in model.items() if name not in own}
    return {**data, "model": merged(own, {"options": extra}) if extra else own}
