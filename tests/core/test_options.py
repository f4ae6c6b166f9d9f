"""Hyper-parameters: what a dataclass accepts, and what the errors say."""

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any, Literal

import pytest

from cfl.core import ConfigError, option, options, unknown


@dataclass(frozen=True)
class Rule:
    rho: float = option(2.0, "strength", source="eq. 11", at_least=0.0)
    threshold: float = option(0.9, "kept energy", above=0.0, at_most=1.0)
    size: int = option(3, "samples", at_least=1)
    temperature: float | None = option(None, "softness, or none", above=0.0)
    scope: Literal["head", "all"] = option("all", "where", choices=("head", "all"))
    decay: bool = option(False, "whether to shrink")


def test_defaults_and_given_values():
    assert options.build(Rule, {}, "strategy") == Rule()
    built = options.build(Rule, {"rho": 0.5, "scope": "head", "decay": True, "temperature": 2.5, "size": 7}, "strategy")
    assert built == Rule(rho=0.5, size=7, temperature=2.5, scope="head", decay=True)


def test_whole_numbers_become_floats_where_a_float_is_meant():
    built = options.build(Rule, {"rho": 1, "temperature": 4}, "strategy")
    assert type(built.rho) is float and type(built.temperature) is float
    assert options.build(Rule, {"temperature": None}, "strategy").temperature is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rh": 1.0}, r"unknown option 'strategy\.rh'; did you mean 'strategy\.rho'\?"),
        ({"treshold": 1.0}, r"did you mean 'strategy\.threshold'\?"),
        ({"rho": -0.1}, r"strategy\.rho must be a number in \[0, inf\), not -0\.1"),
        ({"rho": float("nan")}, r"strategy\.rho must be a number in \[0, inf\), not nan"),
        ({"threshold": 0.0}, r"strategy\.threshold must be a number in \(0, 1\], not 0\.0"),
        ({"threshold": 1.5}, r"strategy\.threshold must be a number in \(0, 1\], not 1\.5"),
        ({"temperature": 0}, r"strategy\.temperature must be a number in \(0, inf\) or none, not 0"),
        ({"size": 0}, r"strategy\.size must be a whole number in \[1, inf\), not 0"),
        ({"size": 2.5}, r"strategy\.size must be a whole number in \[1, inf\), not 2\.5"),
        ({"size": True}, r"strategy\.size must be a whole number in \[1, inf\), not True"),
        ({"rho": True}, r"strategy\.rho must be a number in \[0, inf\), not True"),
        ({"rho": None}, r"strategy\.rho must be a number in \[0, inf\), not None"),
        ({"rho": "2"}, r"strategy\.rho must be a number in \[0, inf\), not '2'"),
        ({"decay": 1}, r"strategy\.decay must be true or false, not 1"),
        ({"temperature": "x"}, r"strategy\.temperature must be a number in \(0, inf\) or none, not 'x'"),
        ({"scope": "heads"}, r"unknown value of strategy\.scope 'heads'; did you mean 'head'\?"),
    ],
)
def test_errors_name_the_option_and_say_what_is_valid(values, message):
    with pytest.raises(ConfigError, match=message):
        options.build(Rule, values, "strategy")


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Painted:
    colour: Colour | None = option(None, "of an enumeration")
    size: Decimal = option(Decimal(1), "of a type with a pattern")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"colour": "purple"}, "strategy.colour must be one of red or none, not 'purple'"),
        ({"size": "x"}, "strategy.size must be a number or a name, not 'x'"),
    ],
)
def test_errors_on_types_that_a_schema_does_not_describe(values, message):
    with pytest.raises(ConfigError, match=message):
        options.build(Painted, values, "strategy")


@pytest.mark.parametrize("values", [{"threshold": 1.0}, {"rho": 0.0}, {"size": 1}])
def test_inclusive_bounds_are_valid(values):
    built = options.build(Rule, values, "strategy")
    assert {name: getattr(built, name) for name in values} == values


def test_numeric_choices_are_checked() -> None:
    @dataclass(frozen=True)
    class Grid:
        bits: int = option(16, "bits", choices=(16, 32))

    assert options.build(Grid, {"bits": 32}, "strategy").bits == 32
    with pytest.raises(ConfigError, match=r"unknown value of strategy\.bits '24'"):
        options.build(Grid, {"bits": 24}, "strategy")


def test_bounds_hold_for_the_numbers_of_a_union() -> None:
    @dataclass(frozen=True)
    class Mixed:
        lr: float | str = option("auto", "rate, or auto", above=0.0)

    assert options.build(Mixed, {"lr": "auto"}, "strategy").lr == "auto"
    assert options.build(Mixed, {"lr": 2}, "strategy").lr == 2.0
    with pytest.raises(ConfigError, match=r"strategy\.lr must be a number in \(0, inf\) or a name, not 0\.0"):
        options.build(Mixed, {"lr": 0.0}, "strategy")


def test_objects_are_checked_as_options_are() -> None:
    options.check(Rule(), "strategy")
    options.check(object(), "strategy")  # nothing to check
    with pytest.raises(ConfigError, match=r"strategy\.rho must be a number in \[0, inf\), not -0\.1"):
        options.check(Rule(rho=-0.1), "strategy")

    class Bare(Rule):
        beta: float = option(0.5, "of a class that is no dataclass")

    with pytest.raises(ConfigError, match=r"Bare\.beta is an option, but .* add @dataclass\(frozen=True\)"):
        options.check(Bare(), "strategy")


def test_the_prefix_is_that_of_the_command_line():
    with pytest.raises(ConfigError, match=r"regularizer\.fedsol\.rho"):
        options.build(Rule, {"rho": -1.0}, "regularizer.fedsol")


def test_describe_lists_options_in_field_order():
    rows = options.describe(Rule)
    assert [row["name"] for row in rows] == ["rho", "threshold", "size", "temperature", "scope", "decay"]
    assert [row["range"] for row in rows] == ["[0, inf)", "(0, 1]", "[1, inf)", "(0, inf)", "head, all", "true, false"]
    assert (rows[0]["default"], rows[0]["help"], rows[0]["source"]) == (2.0, "strength", "eq. 11")


def test_describe_shows_the_type_of_an_option_without_bounds():
    @dataclass(frozen=True)
    class Typed:
        reduce: Literal["mean", "late"] = option("mean", "how")
        when: Literal["early"] | None = option(None, "when")
        name: str = option("x", "what")
        count: int = option(1, "how many")
        rate: float | None = option(None, "how fast")
        widths: tuple[int, ...] = option((1,), "sizes")
        names: list[str] = option(["a"], "parts")
        kinds: tuple[Literal["a", "b"], ...] = option(("a",), "which")
        rule: Rule | None = option(None, "an object")
        other: Any = option(None, "an object")

    assert {row["name"]: row["range"] for row in options.describe(Typed)} == {
        "reduce": "mean, late",
        "when": "early or none",
        "name": "text",
        "count": "whole number",
        "rate": "number or none",
        "widths": "list of whole numbers",
        "names": "list of texts",
        "kinds": "list of a, b",
        "rule": "value or none",
        "other": "anything",
    }


def test_fields_that_are_no_options_are_not_described():
    @dataclass(frozen=True)
    class Mixed:
        plain: int = 1
        told: int = option(2, "told")

    assert [row["name"] for row in options.describe(Mixed)] == ["told"]


def test_steep_options_are_those_whose_value_matters():
    @dataclass(frozen=True)
    class Steep:
        strength: float = option(2.0, "a weight", steep="local")
        off: float = option(0.0, "a weight that is off", steep="local")
        limit: float | str | None = option(None, "a limit that is absent", steep="local")
        safe: float | str | None = option("auto", "a limit that sets itself", steep="local")
        rate: float = option(0.1, "of the server", steep="server")
        plain: float = option(1.0, "of no steps")

    assert options.steep(Steep(), "strategy", "local") == ["strategy.strength (now 2.0)", "strategy.limit (now none)"]
    assert options.steep(Steep(), "regularizer.x", "server") == ["regularizer.x.rate (now 0.1)"]
    assert options.steep(object(), "strategy", "local") == []


def test_unknown_without_a_near_name_lists_all():
    assert str(unknown("method", "zzz", ["fot", "fedavg"])) == "unknown method 'zzz'; known: fedavg, fot"
    assert str(unknown("method", "zzz", [])) == "unknown method 'zzz'; known: none"
