"""Reading options: YAML with scientific numbers, `key=value` overrides, and merging of nested mappings."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cfl.errors import ConfigError


class _Loader(yaml.SafeLoader):
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


def parse(overrides: Sequence[str]) -> dict[str, Any]:
    """Nested mapping of "a.b=value" texts, later ones over earlier ones; raises ConfigError for what is not one."""
    nested: dict[str, Any] = {}
    for text in overrides:
        dotted, equals, value = text.partition("=")
        parts = dotted.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set takes key=value, such as local.lr=0.05, not '{text}'")
        try:
            item = yaml.load(value, Loader=_Loader)
        except yaml.YAMLError:
            raise ConfigError(f"the value of {dotted} is not valid YAML: '{value}'") from None
        for part in reversed(parts):
            item = {part: item}
        nested = merged(nested, item)
    return nested


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
