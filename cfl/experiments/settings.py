"""The settings of a comparison: options to vary, and options of a grid, each with its values."""

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from cfl.config.overrides import flat, parse, read_value
from cfl.core import ConfigError

VALIDATION = 0.1
"""Share of the training samples that a grid holds out if the configuration holds none out."""


class Settings:
    """Combinations of values. varied, searched: the options of `--vary` and of `--grid`, each with its values.

    vary, grid: texts such as "key=a,b"; fixed: options, or groups of them, that cannot vary, with what to do instead;
    overrides, scale: of all runs. Raises ConfigError for another text, a fixed option, an option that is given in two
    places, and for a grid whose runs would hold out no samples, or different ones.
    """

    def __init__(
        self,
        vary: Sequence[str],
        grid: Sequence[str],
        fixed: Mapping[str, str],
        overrides: Sequence[str],
        scale: str | None,
    ) -> None:
        self.varied, self.searched = _values(vary, "--vary", fixed), _values(grid, "--grid", fixed)
        given, scales = parse(overrides), [] if scale is None else ["scale"]
        places: dict[str, Collection[str]] = {"--set": flat(given), "--scale": scales}  # one would win silently
        for flag, options in (("--vary", self.varied), ("--grid", self.searched)):
            single = _single(options)
            for place, names in places.items():
                if both := [name for name in single if name in names]:
                    raise ConfigError(f"{both[0]} is in {place} and in {flag}; leave it out of one of them")
            places[flag] = single
        if not grid:
            return
        if "validation" in {**self.varied, **self.searched}:
            raise ConfigError("with --grid, all runs hold out the same samples: set validation once, by --set")
        if not given.get("validation", VALIDATION):
            raise ConfigError("--grid chooses by held-out samples; set validation above 0, or leave it out")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each combination; the values of the last option change fastest."""
        options = {**self.varied, **self.searched}
        for values in itertools.product(*options.values()):
            yield dict(zip(options, values, strict=True))


def label(method: str, setting: Mapping[str, Any]) -> str:
    """Name a method with a setting."""
    return ", ".join([method, *(f"{name}={value}" for name, value in setting.items())])


def _single(options: Mapping[str, Sequence[Any]]) -> list[str]:
    """Names of the options that the values set, also where a value is a group of options."""
    texts = [f"{name}={json.dumps(value, default=str)}" for name, values in options.items() for value in values]
    return [name for text in texts for name in flat(parse(text))]


def _values(texts: Sequence[str], flag: str, fixed: Mapping[str, str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip()
        read = read_value(name, f"[{values}]") if equals and name else []
        if not read:
            raise ConfigError(f"{flag} takes key=value,value, such as strategy.threshold=0.8,0.9, not '{text}'")
        if remedy := fixed.get(name.partition(".")[0]):
            raise ConfigError(f"{flag} cannot take {name}; {remedy}")
        if name in found:
            raise ConfigError(f"{flag} takes {name} once, with all its values: {flag} {name}=A,B")
        found[name] = read
    return found
