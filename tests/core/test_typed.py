"""Arguments and fields that are checked against their annotations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from cfl.core import ConfigError
from cfl.core.typed import described, typed, typed_fields


@typed
def called(count: int, share: float = 0.5, names: Sequence[str] | None = None, *, quick: bool = False) -> list[object]:
    """Return the arguments."""
    return [count, share, names, quick]


@dataclass(frozen=True)
class Record:
    names: tuple[str, ...]
    next: "Record | None" = None

    def __post_init__(self) -> None:
        typed_fields(self)


def test_numbers_of_numpy_become_pythons_and_lists_tuples():
    found = called(np.int16(3), np.float32(0.25), ["a"], quick=np.bool_(True))
    assert found == [3, 0.25, ("a",), True]
    assert [type(each) for each in found] == [int, float, tuple, bool]
    assert called(3, 1)[1:] == [1, None, False]  # defaults are not touched, and a whole number is a number
    assert Record(["a", "b"], Record(())).names == ("a", "b")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((True,), "called: count must be a whole number, not True"),
        ((2.0,), "called: count must be a whole number, not 2.0"),
        ((1, "0.5"), "called: share must be a number, not '0.5'"),
        ((1, 0.5, "ab"), r"called: names must be a list \(each a string\) or None, not 'ab'"),
        ((1, 0.5, [1]), r"called: names must be a list \(each a string\) or None, not a list of 1 int"),
    ],
)
def test_an_argument_of_another_type_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        called(*arguments)
    with pytest.raises(ConfigError, match="called: quick must be True or False, not 1"):
        called(1, quick=1)
    with pytest.raises(ConfigError, match=r"Record.next must be a Record or None, not the class Record"):
        Record((), Record)


def test_descriptions_are_one_line():
    values = (None, 3, "a" * 999, Record, [1, "a"], np.zeros((99, 99)))
    assert [described(value) for value in values] == [
        "None",
        "3",
        "'aaaaaaaaaaaa...aaaaaaaaaaaaa'",
        "the class Record",
        "a list of 2 int and str",
        "an object of type ndarray and dtype float64",
    ]
