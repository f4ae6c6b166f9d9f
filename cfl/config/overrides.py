"""Reading options: YAML with scientific numbers, `key=value` overrides, and merging of nested mappings."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cfl.config.option_names import option_names, unknown_option
from cfl.config.schema import RunConfig
from cfl.core.errors import ConfigError


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml where it is there
    """YAML 1.1 takes `1e-5` for a string; this loader takes it for a number, as everybody means it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def read_yaml(path: Any) -> dict[str, Any]:
    """The mapping in a YAML file (a path or a package resource); raises ConfigError that names the file."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration '{path}': {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"the configuration '{path}' is not valid YAML{where}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration '{path}' must hold options as 'key: value'")
    return data


def read_value(name: str, text: str) -> Any:
    """The YAML value of an option; raises ConfigError that names the option."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):  # such as a date without such a day
        raise ConfigError(f"the value of {name} is not valid YAML: '{text}'") from None


def parse(overrides: Sequence[str]) -> dict[str, Any]:
    """Nested mapping of "a.b=value" texts, later ones over earlier ones; raises ConfigError for what is not one."""
    nested: dict[str, Any] = {}
    for text in overrides:
        dotted, equals, value = text.partition("=")
        parts = dotted.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set takes key=value, such as local.lr=0.05, not '{text}'")
        item = read_value(dotted, value)
        for part in reversed(parts):
            item = {part: item}
        clash = _clash(nested, item)
        if clash:
            raise ConfigError(f"--set gives {clash} a value, and also sets a key inside it; leave out one of the two")
        nested = merged(nested, item)
    return nested


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by the dotted names that `--set` takes."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        dotted = prefix if f"{prefix}{name}" == "model.options" else f"{prefix}{name}."
        out |= flat(value, dotted) if isinstance(value, Mapping) else {dotted[:-1]: value}
    return out


def assignment(name: str, value: Any) -> str:
    """An option as `--set` takes it."""
    plain = f"{name}={value}"
    same = isinstance(value, str) and parse([plain]) == parse([f"{name}={json.dumps(value)}"])
    return plain if same else f"{name}={json.dumps(value, separators=(',', ':'))}"


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first option in which two resolved configurations differ, in words; empty where none does."""
    there, here = flat(before), flat(after)
    for name in {**here, **there}:
        if name not in there or name not in here or there[name] != here[name]:
            texts = (assignment(name, own[name]) if name in own else f"no {name}" for own in (there, here))
            return "{} there, {} here".format(*texts)
    return ""


def scoped(overrides: Sequence[str], known: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """For each of several methods, the overrides without those of `strategy` and `regularizer` that only others have.

    known: method to the dotted names of its own options. Raises ConfigError for one of those groups that no method has,
    and for a name that is no option of a run.
    """
    everyone = {name for names in known.values() for name in names}
    kept: dict[str, list[str]] = {owner: [] for owner in known}
    for text in overrides:
        dotted = text.partition("=")[0].strip()
        if dotted.startswith(("strategy.", "regularizer.")) and dotted not in everyone:
            raise unknown_option(dotted, everyone)
        if dotted.partition(".")[0] not in RunConfig.model_fields:
            raise unknown_option(dotted, [*option_names(), *everyone])
        for owner, names in known.items():
            if dotted not in everyone or dotted in names:
                kept[owner].append(text)
    return kept


def check_shape(data: Mapping[str, Any], sections: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError where a layer has something else than a name, or than a group of options, where one belongs.

    sections: group to its options; the groups with free keys, and `methods` and `variants` of presets, are known here.
    """
    for name in ("benchmark", "method"):
        if not isinstance(data.get(name, ""), str):
            raise ConfigError(f"{name} must be a name, not {data[name]!r}")
    for name, options in {**sections, "strategy": ["<option>"]}.items():
        _group(name, data.get(name, {}), ", ".join(f"{name}.{option}" for option in options))
    for name, inner in {"regularizer": "<name>.<option>", "methods": "<method>", "variants": "<option>"}.items():
        _group(name, data.get(name, {}), f"{name}.{inner}")
        for key, value in data.get(name, {}).items():
            _group(f"{name}.{key}", value, f"{name}.{inner}")
    for dotted, cases in data.get("variants", {}).items():
        for value, case in cases.items():
            _group(f"variants.{dotted}.{value}", case, "the options of a run")
            check_shape(case, sections)


def _group(name: str, value: Any, inner: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is a group of options, not {value!r}; set one of {inner}")


def _clash(low: Mapping[str, Any], high: Mapping[str, Any], prefix: str = "") -> str:
    """The dotted name of what is a mapping on one side and a plain value on the other; empty where nothing is."""
    for name in low.keys() & high.keys():
        under, over, dotted = low[name], high[name], f"{prefix}{name}"
        if isinstance(under, Mapping) and isinstance(over, Mapping):
            if inner := _clash(under, over, f"{dotted}."):
                return inner
        elif isinstance(under, Mapping) or isinstance(over, Mapping):
            return dotted
    return ""


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """A new mapping with the values of `high` over those of `low`, mappings merged key by key."""
    out = dict(low)
    for name, value in high.items():
        under = out.get(name)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        out[name] = merged(under, value) if both and under is not None else value
    return out


def without(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A copy that lacks those keys."""
    return {name: value for name, value in data.items() if name not in names}
