"""The direction of the imports, and what may be named where: read from the source, not from a running program."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cfl"
FOUNDATION = {"tree", "rng", "options", "errors", "types", "optim"}
CLOSED_TO_METHODS = {
    "engines",
    "runner",
    "session",
    "rounds",
    "streams",
    "privacy",
    "record",
    "config",
    "cli",
    "machine",
    "testing",
}
KNOWN_METHODS = r"\bfot\b|\bgpm\b|\bewc\b|fedsol|fedavg"
# package -> modules that may import it; None: any one module
HOMES = {
    "avalanche": {"cfl.streams.avalanche"},
    "opacus": None,
    "tensorboard": None,
    "matplotlib": None,
    "flwr": None,
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


def imports(module: str, source: str, for_types: bool = True) -> set[str]:
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
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).endswith(("import_module", "__import__")):
                found.add(str(node.args[0].value))
    return found


def own(module: str, source: str, for_types: bool = True) -> set[str]:
    """The parts of cfl (the name after "cfl.") that the text imports."""
    return {name.split(".")[1] for name in imports(module, source, for_types) if name.startswith("cfl.")}


def modules_of(*parts: str) -> list[str]:
    return [module for module in sources() if module.split(".")[1:2] and module.split(".")[1] in parts]


def method_names() -> re.Pattern[str]:
    """The names under which methods and regularizers register, and some well-known ones, in any case."""
    enters = re.compile(r"""\b(?:strategies|local)\.register\(\s*["']([^"']+)["']""")
    names = {name for source in sources().values() for name in enters.findall(source)}
    return re.compile("|".join([KNOWN_METHODS, *(rf"\b{re.escape(name)}\b" for name in sorted(names))]), re.IGNORECASE)


def uses(pattern: str) -> set[str]:
    return {module for module, source in sources().items() if re.search(pattern, source)}


def test_the_reader_of_imports_sees_every_form():
    source = "import a.b as c\ndef f():\n    from cfl import tree\n    from . import x\n    from ..g import y\n"
    source += "    import_module('late')\nif TYPE_CHECKING:\n    import cfl.h\nelse:\n    import z\n"
    expected = {"a.b", "cfl", "cfl.tree", "cfl.p", "cfl.p.x", "cfl.g", "cfl.g.y", "late", "z"}
    assert imports("cfl.p.module", source, for_types=False) == expected
    assert imports("cfl.p.module", source) == expected | {"cfl.h"}
    assert own("cfl.p.module", source) == {"tree", "p", "g", "h"}


def test_the_methods_are_found():
    assert all(method_names().search(text) for text in ("# as FedAvg does", "if name == 'fot':", "fedprox"))
    assert not method_names().search("a foot, average, local")


def test_the_sources_are_found():
    assert {"cfl", "cfl.tree", "cfl.rng", "cfl.checkpoint", "cfl.streams"} <= set(sources())


@pytest.mark.parametrize("module", modules_of(*FOUNDATION))
def test_the_foundation_imports_only_itself(module):
    # An annotation may name the model handle; it is not imported when the program runs.
    assert own(module, sources()[module], for_types=False) <= FOUNDATION
    assert own(module, sources()[module]) <= FOUNDATION | {"models"}


@pytest.mark.parametrize("module", modules_of("strategies", "local"))
def test_methods_do_not_know_what_runs_them(module):
    assert own(module, sources()[module]).isdisjoint(CLOSED_TO_METHODS)


@pytest.mark.parametrize("module", modules_of("engines", "runner", "session", "rounds", "privacy"))
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
    assert users <= home if home else len(users) <= 1, f"{package} is imported by {sorted(users)}"


def test_nothing_is_pickled():
    pickling = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    users = {m for m, s in sources().items() if any(name.split(".")[0] in pickling for name in imports(m, s))}
    # messages between a process and its own forks; data sets that others pickled, of which only arrays are read
    assert users <= {"cfl.engines.arena", "cfl.streams.pickles"}
    assert not any({"torch.load", "torch.save"} & imports(m, s) for m, s in sources().items())
    assert uses(r"\btorch\.(load|save)\b|allow_pickle\s*=\s*True") == set()


def test_only_rng_seeds():
    assert uses(r"\bmanual_seed(_all)?\b|\brandom\.seed\b|\bset_rng_state\b") <= {"cfl.rng"}


def test_import_is_light():
    heavy = [
        "avalanche",
        "torchvision",
        "matplotlib",
        "sklearn",
        "tensorboard",
        "opacus",
        "flwr",
        "scipy",
        "cryptography",
    ]
    code = f"import cfl, sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
