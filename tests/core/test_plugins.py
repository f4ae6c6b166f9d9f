"""Registries: built-ins, entry points of other packages, and names that are taken or unknown."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from cfl.contract import Strategy
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
    with pytest.raises(ConfigError, match=r"thing 'one' is registered already, by <object.*, and now by <object"):
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


@pytest.mark.parametrize(
    ("registry", "base", "parent"),
    [
        (plugins.strategies, Strategy, "fedavg"),
        (plugins.strategies, plugins.strategies.get("fot"), "fot"),
        (plugins.local, plugins.local.get("fedprox"), "fedprox"),
    ],
)
def test_a_subclass_of_a_method_does_not_inherit_its_source(registry, base, parent, monkeypatch):
    monkeypatch.setattr(registry, "_items", dict(registry._items))
    monkeypatch.setattr(registry, "_sources", dict(registry._sources))

    class Mine(base):
        pass

    class Cited(base):
        source = "ours, 2026"

    registry.register("mine")(Mine)
    registry.register("cited")(Cited)
    assert registry.source("mine") == "" and registry.source("cited") == "ours, 2026"
    assert registry.source(parent)


def test_entry_points_are_listed_and_loaded(registry, third_party):
    import math

    registry.register("alpha")(1)
    assert registry.names() == ["alpha", "square-root"]
    assert registry.get("square-root") is math.sqrt


def test_a_name_of_a_built_in_and_of_an_entry_point_is_refused(registry, third_party):
    import math

    registry.register("square-root")("ours")
    with pytest.raises(ConfigError, match=r"by 'ours', and now by .*sqrt.* of the entry point math:sqrt; choose"):
        registry.get("square-root")
    assert registry.names() == ["square-root"]

    again = Registry("thing", "cfl.test-things", "math")
    again.register("square-root")(math.sqrt)  # a package that registers what its entry point offers
    assert again.get("square-root") is math.sqrt


def test_an_entry_point_that_cannot_be_loaded_is_named(registry, monkeypatch):
    points = EntryPoints([EntryPoint("gone", "math:nothing", "cfl.test-things")])
    monkeypatch.setattr(plugins, "_points", lambda group: points.select(group=group))
    with pytest.raises(ConfigError, match=r"thing 'gone' cannot be loaded from math:nothing: AttributeError"):
        registry.get("gone")


def test_the_built_ins_are_there_before_a_name_is_registered() -> None:
    """In a fresh process, whose first use of the registry is a decorator."""
    code = """
import cfl
try:
    cfl.plugins.strategies.register("fot")(type("Mine", (cfl.Strategy,), {}))
except cfl.errors.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "FOT" in done.stdout and "Mine" in done.stdout


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


OWN = """
from beside import VALUE
from cfl.core import plugins

plugins.models.register("of-a-file")(lambda shape, outputs: VALUE)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for files with plug-ins; what they change in the process is undone."""
    monkeypatch.delenv(plugins.FILES, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(plugins.models, "_items", {**plugins.models._items})
    (tmp_path / "beside.py").write_text("VALUE = 7")
    return tmp_path


def test_files_register_objects_in_this_process_and_those_that_it_starts(folder):
    file = folder / "file_with_a_model.py"
    file.write_text(OWN)
    plugins.add_files([file])
    assert plugins.models.get("of-a-file")((), 1) == 7
    code = "from cfl.core import plugins; print('of-a-file' in plugins.models.names())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, r"there is no Python file '.*absent.py'"),
        ("text.txt", "", r"there is no Python file '.*text.txt'"),
        ("json.py", "", r"'.*json.py' cannot be imported, since a module 'json' is there; rename the file"),
        ("ending.py", "import sys; sys.exit('usage')", r"'.*ending.py' cannot be imported: SystemExit: usage"),
        ("colon:.py", "", r"the path '.*colon:.py' has a ':', which separates files in CFL_PLUGINS; rename it"),
        ("failing.py", "import cfl\n\n1 / 0", r"imported: ZeroDivisionError: division by zero \(line 3\)"),
        ("broken.py", "import cfl\n1 +", r"imported: SyntaxError: invalid syntax \(broken.py, line 2\)$"),
    ],
)
def test_files_that_cannot_be_imported_are_named(folder, name, text, message):
    if text is not None:
        (folder / name).write_text(text)
    for _ in range(2):  # a second try gives the same answer
        with pytest.raises(ConfigError, match=message):
            plugins.add_files([folder / name])


@pytest.mark.parametrize("order", [("its_child.py", "its_base.py"), ("its_base.py", "its_child.py")])
def test_files_may_import_each_other_and_use_the_registries(folder, monkeypatch, order):
    (folder / "its_base.py").write_text("from cfl.core import plugins\n\nKNOWN = plugins.models.names()\n" + OWN)
    (folder / "its_child.py").write_text("import its_base\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv(plugins.FILES, order[0])  # by a path that does not hold in another folder
    monkeypatch.syspath_prepend(folder)
    plugins.add_files([folder / ".." / folder.name / order[1], folder / order[1]])
    monkeypatch.chdir("/")
    assert plugins.models.get("of-a-file")((), 1) == 7


def test_a_script_that_is_a_plugin_itself_registers_once(folder):
    script = folder / "its_own_script.py"
    script.write_text(OWN + "print(plugins.models.get('of-a-file')((), 1))")
    words = [sys.executable, script.name]
    found = subprocess.run(
        words, capture_output=True, text=True, cwd=folder, env={**os.environ, plugins.FILES: script.name}
    )
    assert found.stdout == "7\n", found.stderr
