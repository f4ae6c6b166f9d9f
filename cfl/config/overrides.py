"""Read, write and merge options: YAML files, `key=value` overrides and nested mappings."""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cfl.config.option_names import option_names, unknown_option
from cfl.config.schema import RunConfig
from cfl.core import ConfigError


class _Twice(yaml.constructor.ConstructorError):
    """A key that a mapping has twice."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml if installed
    """YAML loader that reads `1e-5` as a number, a string in YAML 1.1, and refuses a key that is given twice."""

    def get_single_node(self) -> Any:
        root = super().get_single_node()  # merge keys are not resolved yet
        _check_keys(root, set())
        return root


def _check_keys(node: Any, seen: set[int]) -> None:
    """Raise _Twice for a scalar key that a mapping below a node has twice. seen: nodes that were checked."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    pairs = node.value if isinstance(node, yaml.MappingNode) else [(None, value) for value in node.value]
    known: set[tuple[str, str]] = set()
    for key, value in pairs:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in known:
                raise _Twice(None, None, f"'{key.value}' is given twice", key.start_mark)
            known.add((key.tag, key.value))
        _check_keys(value, seen)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def read_yaml(path: Any) -> dict[str, Any]:
    """Return the mapping in a YAML file (a path or a package resource). Raises ConfigError with the file's name."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        inside = Path(path) / "config.yaml"  # the path may be the folder of a run, or one that cannot even be looked at
        remedy = f"; pass the file in it, '{inside}'" if os.path.isfile(inside) else ""
        raise ConfigError(f"cannot read the configuration '{path}': {reason}{remedy}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as a date that does not exist
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        why = f": {error.problem}; join the two" if isinstance(error, _Twice) else ""
        raise ConfigError(f"the configuration '{path}' is not valid YAML{where}{why}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration '{path}' must hold options as 'key: value'")
    return data


def read_value(name: str, text: str) -> Any:
    """Return the YAML value of an option. Raises ConfigError with the option's name."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError):  # ValueError: such as a date that does not exist
        raise ConfigError(f"the value of {name} is not valid YAML: '{text}'") from None


def parse(overrides: str | Sequence[str]) -> dict[str, Any]:
    """Return a text "a.b=value", or several, as a nested mapping; later texts win. Raises ConfigError for others."""
    nested: dict[str, Any] = {}
    for text in [overrides] if isinstance(overrides, str) else overrides:
        dotted, equals, value = text.partition("=")
        parts = dotted.strip().split(".")
        if not equals or not all(parts) or not value.strip():
            raise ConfigError(f"an override is key=value, such as local.lr=0.05, not '{text}'")
        item = read_value(dotted, value)
        for part in reversed(parts):
            item = {part: item}
        clash = _clash(nested, item)
        if clash:
            raise ConfigError(f"--set sets {clash} and also a key inside it; leave out one of the two")
        nested = merged(nested, item)
    return nested


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options by the dotted names that `--set` takes."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        dotted = prefix if f"{prefix}{name}" == "model.options" else f"{prefix}{name}."
        out |= flat(value, dotted) if isinstance(value, Mapping) else {dotted[:-1]: value}
    return out


def assignment(name: str, value: Any) -> str:
    """Return an option and its value as an argument of `--set`."""
    plain = f"{name}={value}"
    same = isinstance(value, str) and value.strip() and parse([plain]) == parse([f"{name}={json.dumps(value)}"])
    return plain if same else f"{name}={json.dumps(value, separators=(',', ':'))}"


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Describe the first option in which two resolved configurations differ; empty if they are equal."""
    there, here = flat(before), flat(after)
    for name in {**here, **there}:
        if name not in there or name not in here or there[name] != here[name]:
            texts = (assignment(name, own[name]) if name in own else f"no {name}" for own in (there, here))
            return "{} there, {} here".format(*texts)
    return ""


def scoped(overrides: Sequence[str], known: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Return for each method the overrides without those `strategy` and `regularizer` options that only others have.

    known: method to the dotted names of its own options. Raises ConfigError for options in these groups that no method
    has, and for names that are not options of a run.
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


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new mapping with the values of `high` over those of `low`; mappings are merged key by key."""
    out = dict(low)
    for name, value in high.items():
        under = low.get(name)
        out[name] = merged(under, value) if isinstance(value, Mapping) and isinstance(under, Mapping) else value
    return out


def without(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a copy without the keys `names`."""
    return {name: value for name, value in data.items() if name not in names}


def _clash(low: Mapping[str, Any], high: Mapping[str, Any], prefix: str = "") -> str:
    """Return the dotted name of an entry that is a mapping on one side only; empty if there is no such entry."""
    for name in low.keys() & high.keys():
        under, over, dotted = low[name], high[name], f"{prefix}{name}"
        if isinstance(under, Mapping) and isinstance(over, Mapping):
            if inner := _clash(under, over, f"{dotted}."):
                return inner
        elif isinstance(under, Mapping) or isinstance(over, Mapping):
            return dotted
    return ""
