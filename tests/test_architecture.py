"""The direction of the imports, and what may be named where: read from the source, not from a running program."""

import ast
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cfl"
# From the ground up: a part of cfl imports from those before it alone, and so none of those after it.
FLOORS = (
    "core",
    "models",
    "contract",
    "methods",
    "config",
    "streams",
    "aggregation",
    "assembly",
    "engines",
    "runtime",
    "flower",
    "experiments",
    "report",
    "cfl",  # the public names, in cfl/__init__.py
    "testing",
    "cli",
)
NAMELESS = ("aggregation", "engines", "runtime")  # what runs methods names none
KNOWN_METHODS = r"\bfot\b|\bgpm\b|\bewc\b|fedsol|fedavg"
# package -> modules that may import it, with those inside; None: any one module
HOMES = {
    "avalanche": {"cfl.streams.avalanche"},
    "opacus": None,
    "tensorboard": None,
    "matplotlib": None,
    "mlflow": None,
    "pandas": None,
    "wandb": None,
    "flwr": {"cfl.flower"},
}


@cache
def sources() -> dict[str, str]:
    """Module name (of a package: the package's) -> source text."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def nodes(source: str, for_types: bool):
    """All nodes of the text; without `for_types`, none below an `if TYPE_CHECKING:`."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        yield node
        skip = not for_types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        waiting += node.orelse if skip else ast.iter_child_nodes(node)


@cache
def imports(module: str, source: str, for_types: bool = True) -> frozenset[str]:
    """Every module that the text imports, at any depth; `from a import b` counts as a and as a.b."""
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    found = set()
    for node in nodes(source, for_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = parents[: len(parents) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            names = {f"{base}.{alias.name}" for alias in node.names}
            parts = base == "cfl" and names <= set(sources())  # `from cfl import models` takes a part, no public name
            found |= names if parts else {base, *names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).endswith(("import_module", "__import__")):
                found.add(str(node.args[0].value))
    return frozenset(found)


def floor(module: str) -> str:
    """The part of cfl to which a module belongs."""
    return module.split(".")[1] if "." in module else module


def upwards(module: str, source: str) -> list[str]:
    """What the text imports of other parts that are not below its own."""
    mine = floor(module)
    taken = {name for name in imports(module, source) & set(sources()) if floor(name) != mine}
    return sorted(name for name in taken if FLOORS.index(floor(name)) > FLOORS.index(mine))


def modules_of(*parts: str) -> list[str]:
    return [module for module in sources() if floor(module) in parts]


def method_names() -> re.Pattern[str]:
    """The names under which methods and regularizers register, and some well-known ones, in any case."""
    enters = re.compile(r"""\b(?:strategies|local)\.register\(\s*["']([^"']+)["']""")
    found = {name for source in sources().values() for name in enters.findall(source)}
    names = found - {"target", "median"}  # common nouns
    return re.compile("|".join([KNOWN_METHODS, *(rf"\b{re.escape(name)}\b" for name in sorted(names))]), re.IGNORECASE)


def uses(pattern: str) -> set[str]:
    return {module for module, source in sources().items() if re.search(pattern, source)}


def test_the_reader_of_imports_sees_every_form():
    source = "import a.b as c\ndef f():\n    from cfl import tree\n    from . import x\n    from ..g import y\n"
    source += "    import_module('late')\nif TYPE_CHECKING:\n    import cfl.h\nelse:\n    import z\n"
    expected = {"a.b", "cfl", "cfl.tree", "cfl.p", "cfl.p.x", "cfl.g", "cfl.g.y", "late", "z"}
    assert imports("cfl.p.module", source, for_types=False) == expected
    assert imports("cfl.p.module", source) == expected | {"cfl.h"}


def test_the_methods_are_found():
    assert all(method_names().search(text) for text in ("# as FedAvg does", "if name == 'fot':", "fedprox"))
    assert not method_names().search("a foot, average, local")


def test_the_sources_are_found():
    assert {"cfl", "cfl.core.tree", "cfl.contract", "cfl.methods.strategies.fot", "cfl.cli"} <= set(sources())


def test_the_plan_names_every_part_of_the_package():
    assert {floor(module) for module in sources()} == set(FLOORS)
    assert len(FLOORS) < 20


def test_contributing_draws_the_parts_in_their_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawing = text.partition("```mermaid\nflowchart TB\n")[2].partition("```")[0]
    drawn = re.findall(r'^ +(\w+)\["\1: .+"\]$', drawing, re.MULTILINE)
    arrows = re.findall(r"(\w+) (?=--> (\w+))", drawing)
    assert tuple(reversed(drawn)) == FLOORS
    assert arrows == list(zip(drawn, drawn[1:], strict=False))


@pytest.mark.parametrize("module", sorted(sources()))
def test_no_import_goes_up(module):
    """Neither when the program runs nor for types alone."""
    assert upwards(module, sources()[module]) == []


def test_an_import_that_goes_up_is_found():
    assert upwards("cfl.methods.strategies.fot", "from cfl.runtime.session import Session") == ["cfl.runtime.session"]
    assert upwards("cfl.core.tree", "if TYPE_CHECKING:\n    from cfl import models") == ["cfl.models"]
    assert upwards("cfl.report.html", "import cfl") == ["cfl"]
    assert upwards("cfl.report.html", "from cfl.experiments import compare") == []


@pytest.mark.parametrize("part", FLOORS)
def test_no_modules_of_a_part_import_each_other_in_a_circle(part):
    graph = {m: (imports(m, sources()[m]) & set(sources())) - {m} for m in modules_of(part)}
    inside = {m: {name for name in names if name in graph} for m, names in graph.items()}
    for face in [m for m in inside if (ROOT / m.replace(".", "/")).is_dir()]:
        for names in inside.values():  # a package hands names on, and imports what it hands on
            names.discard(face)
    left = dict(inside)
    while free := [module for module, names in left.items() if not names & set(left)]:
        for module in free:
            del left[module]
    assert sorted(left) == []


@pytest.mark.parametrize("module", sorted(sources()))
def test_files_and_functions_are_short(module):
    source = sources()[module]
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    long = [n.name for n in functions if n.end_lineno - n.lineno >= 60]
    assert len(source.splitlines()) <= 300 and long == []


@pytest.mark.parametrize("module", modules_of(*NAMELESS))
def test_what_runs_methods_knows_no_method_by_name(module):
    lines, methods = sources()[module].splitlines(), method_names()
    assert [f"{module}:{i}: {line}" for i, line in enumerate(lines, 1) if methods.search(line)] == []


@pytest.mark.parametrize(("package", "home"), HOMES.items())
def test_heavy_packages_are_imported_in_one_place(package, home):
    users = {
        module
        for module, source in sources().items()
        if any(re.search(rf"(^|\.){package}(\.|$)", n) for n in imports(module, source) if not n.startswith("cfl"))
    }
    strays = {module for module in users if not any(f"{module}.".startswith(f"{one}.") for one in home or ())}
    assert not strays if home else len(users) <= 1, f"{package} is imported by {sorted(users)}"


def test_nothing_is_pickled():
    pickling = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    users = {m for m, s in sources().items() if any(name.split(".")[0] in pickling for name in imports(m, s))}
    # messages between a process and its own forks; data sets that others pickled, of which only arrays are read
    assert users <= {"cfl.engines.shared_memory", "cfl.streams.pickles"}
    assert not any({"torch.load", "torch.save"} & imports(m, s) for m, s in sources().items())
    assert uses(r"\btorch\.(load|save)\b|allow_pickle\s*=\s*True") == set()


def test_only_rng_seeds():
    assert uses(r"\bmanual_seed(_all)?\b|\brandom\.seed\b|\bset_rng_state\b") <= {"cfl.core.rng"}


def test_documented_modules_keep_their_addresses():
    """Programs written for the addresses of version 0.1.0 import the very objects that the package uses."""
    code = """
    from cfl.errors import ConfigError
    from cfl.losses import masked_mean
    from cfl.options import option
    from cfl.sinks import PlainSink
    from cfl.strategies.base import Strategy, with_consolidation
    from cfl.tensorboard import TensorBoardSink
    from cfl.types import MEMORY, Batch, Phase
    from cfl import plugins, rng, tree
    import cfl.tree
    import cfl
    assert (Strategy, Phase, option, cfl.tree) == (cfl.Strategy, cfl.Phase, cfl.option, tree)
    try:
        cfl.resolve("no-such-benchmark", method="no-such-method")
    except ConfigError:
        print("ok")
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout.strip()) == (0, "ok"), result.stderr


def test_import_is_light():
    heavy = [
        "avalanche",
        "torchvision",
        "matplotlib",
        "sklearn",
        "tensorboard",
        "opacus",
        "flwr",
        "mlflow",
        "pandas",
        "wandb",
        "scipy",
        "cryptography",
    ]
    code = f"import cfl, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
