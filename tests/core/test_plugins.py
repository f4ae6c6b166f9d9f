"""Registries: built-ins, entry points of other packages, and names that are taken or unknown."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from cfl.core import ConfigError, plugins
from cfl.core.plugins import Registry


@pytest.fixture
def registry():
    return Registry("thing", "cfl.test-things", "math")  # any module serves as the home of no built-ins


@pytest.fixture
def third_party(monkeypatch):
    """One installed package that offers `square-root`, as importlib.metadata would list it."""
    points = EntryPoints([EntryPoint("square-root", "math:sqrt", "cfl.test-things")])
    monkeypatch.setattr(plugins, "_points", lambda group: points.select(group=group))


def test_register_and_get(registry):
    @registry.register("seven")
    class Seven:
        pass

    assert registry.get("seven") is Seven
    assert registry.names() == ["seven"]


def test_a_name_is_taken_once(registry):
    first, second = object(), object()
    registry.register("one")(first)
    registry.register("one")(first)  # a module that is imported twice
    with pytest.raises(ValueError, match=r"thing 'one' is registered already, by <object"):
        registry.register("one")(second)
    assert registry.get("one") is first


def test_a_class_that_is_defined_again_at_the_same_place_takes_the_name(registry):
    def cell():
        @registry.register("one")
        class One:
            pass

        return One

    cell()
    again = cell()  # as a cell of a notebook that runs again
    assert registry.get("one") is again


def test_entry_points_are_listed_and_loaded(registry, third_party):
    import math

    registry.register("alpha")(1)
    assert registry.names() == ["alpha", "square-root"]
    assert registry.get("square-root") is math.sqrt


def test_built_ins_win_over_entry_points(registry, third_party):
    registry.register("square-root")("ours")
    assert registry.get("square-root") == "ours"
    assert registry.names() == ["square-root"]


def test_unknown_names_suggest_the_nearest(registry, third_party):
    with pytest.raises(ConfigError, match=r"unknown thing 'sqare-root'; did you mean 'square-root'\?"):
        registry.get("sqare-root")
    with pytest.raises(ConfigError, match=r"unknown thing 'zz'; known: square-root"):
        registry.get("zz")


def test_the_built_ins_are_there():
    assert {"fedavg", "fot"} <= set(plugins.strategies.names())
    assert "fedprox" in plugins.local.names()
    assert {"mlp", "alexnet_cl", "resnet18"} <= set(plugins.models.names())
    with pytest.raises(ConfigError, match=r"unknown method 'fedagv'; did you mean 'fedavg'\?"):
        plugins.strategies.get("fedagv")
