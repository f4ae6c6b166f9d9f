"""Bad input is refused in one line that names it, and good input in unusual form is taken: tables in tests/misuse.

A table has rows of a call, the class of the error, and what its message says; or of a call whose value is true.
"""

import inspect
from importlib import import_module

import pytest

from cfl.core import plugins
from tests.misuse import arguments

PARTS = ("arguments", "data", "folders", "health", "hooks", "privacy")


def rows(table):
    """The rows of all parts' tables of that name, as parameters of a test."""
    tables = {part: getattr(import_module(f"tests.misuse.{part}"), table) for part in PARTS}
    return [pytest.param(row, id=f"{part}: {name}") for part, cases in tables.items() for name, row in cases.items()]


def called(call, tmp_path):
    """The value of a call. One with a parameter that needs a value gets a temporary folder."""
    taken = inspect.signature(call).parameters.values()
    needs = any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in taken)
    return call(tmp_path) if needs else call()


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    monkeypatch.setitem(plugins.strategies._items, *arguments.PLUGIN)


@pytest.mark.parametrize("row", rows("CASES"))
def test_bad_input_is_refused_in_one_line_that_names_it(row, tmp_path):
    call, error, message = row
    with pytest.raises(error, match=message) as found:
        called(call, tmp_path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("row", rows("WELCOME"))
def test_good_input_in_unusual_form_is_taken(row, tmp_path):
    assert called(row, tmp_path)
