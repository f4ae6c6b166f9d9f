"""Registries of strategies, local regularizers, benchmarks and models, open to other packages and to single files.

A third-party package registers an object in its own setup.cfg:

    [options.entry_points]
    cfl.strategies =
        my-method = my_package.my_method:MyMethod

A file registers objects by the decorators. The environment variable CFL_PLUGINS names such files, and so does
`cfl-run --plugin`. Processes that a run starts inherit the variable.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from cfl.core.errors import ConfigError, UnknownName, line_in, reason, unknown

FILES = "CFL_PLUGINS"
_MARKS = "+,/.="  # they separate names from each other and from options


class Registry:
    """A map from names to objects: built-in objects register on import, third-party objects through entry points.

    kind: the word for an object in errors; group: the entry-point group; home: the package of the built-in objects.
    base: "module:class"; objects must be subclasses of it with `extends`, else instances; but: a subclass that they
    must not extend.
    """

    def __init__(
        self, kind: str, group: str, home: str, base: str = "builtins:object", *, extends: bool = False, but: str = ""
    ) -> None:
        self.kind, self.group, self.home, self.base, self.extends, self.but = kind, group, home, base, extends, but
        self._items: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}, {len(self.names())} names)"

    def register(self, name: str, source: str = "") -> Callable[[Any], Any]:
        """Decorator that registers an object as `name`. The same definition may be registered again, as in a notebook.

        source: paper and section, for objects without an attribute `source`.
        Raises ConfigError for a name that is taken or not valid, and for an object of another kind.
        """
        if not isinstance(name, str) or not name or name != name.strip() or set(name) & set(_MARKS):
            raise ConfigError(f"the name of a {self.kind} must be a plain word without {_MARKS}, not {name!r}")
        import_module(self.home)  # so that its names are taken

        def enter(item: Any) -> Any:
            self._enter(name, item, "")
            self._sources[name] = source
            return item

        return enter

    def names(self) -> list[str]:
        """All names, sorted, including those of installed third-party packages and of the files in `FILES`."""
        self._load()
        return sorted({*self._items, *(point.name for point in _points(self.group))})

    def source(self, name: str) -> str:
        """Source of the object of that name: paper and section. A class does not inherit that of another method."""
        item = self.get(name)
        own = vars(item).get("source", "") if isinstance(item, type) else getattr(item, "source", "")
        return own or self._sources.get(name, "")

    def get(self, name: str) -> Any:
        """Return the object of that name.

        Raises ConfigError for an unknown name, with the nearest valid name; for a name that two objects have; and for
        an object of another package, or a file, that cannot be imported.
        """
        self._load()
        for point in _points(self.group):
            if point.name == name:
                self._enter(name, _loaded(point, self.kind), f" of the entry point {point.value}")
        if name not in self._items:
            raise UnknownName(str(unknown(self.kind, name, self.names())))
        return self._items[name]

    def _load(self) -> None:
        """Register the built-in objects, and those of the files in `FILES`."""
        import_module(self.home)
        for path in files():
            _import(path)

    def _enter(self, name: str, item: Any, whence: str) -> None:
        """Store an object. whence: the entry point that offers it, for errors; empty for `register`."""
        kind, name_of = _class(self.base), self.base.partition(":")[2]
        fits = isinstance(item, type) and issubclass(item, kind) if self.extends else isinstance(item, kind)
        if not fits or (self.but and issubclass(item, _class(self.but))):
            what = f"a class that extends {name_of}" if self.extends else f"a {name_of}"
            what += f" and not {self.but.partition(':')[2]}" * bool(self.but)
            raise ConfigError(f"{self.kind} '{name}' must be {what}, not {item!r}{whence}")
        there = self._items.get(name, item)
        if _place(there) != _place(item):
            raise ConfigError(
                f"{self.kind} '{name}' is registered already, by {there!r}, and now by {item!r}{whence}; "
                "choose another name for one of them"
            )
        self._items[name] = item


def files() -> list[Path]:
    """The files that the environment variable CFL_PLUGINS names; it has absolute paths afterwards."""
    found = [Path(name).resolve() for name in os.environ.get(FILES, "").split(os.pathsep) if name]
    if found:  # a process may change its folder
        os.environ[FILES] = os.pathsep.join(map(str, found))
    return found


@contextlib.contextmanager
def read_from(file: Path | str | None) -> Iterator[None]:
    """Add to the error for an unknown name how to make it known, if the configuration is read from a file."""
    try:
        yield
    except UnknownName as error:
        if file is None:
            raise
        raise ConfigError(
            f"{error} (if a Python file of yours registers it, give that file to cfl-run --plugin, or import it)"
        ) from None


def program() -> list[str]:
    """The first words of a command line that runs with these files."""
    return ["cfl-run", *(word for path in files() for word in ("--plugin", str(path)))]


def add_files(paths: Iterable[Path]) -> None:
    """Add files to CFL_PLUGINS, for this process and those that it starts, and import them."""
    every = dict.fromkeys([*files(), *(path.resolve() for path in paths)])
    for path in every:
        if os.pathsep in str(path):
            raise ConfigError(f"the path '{path}' has a '{os.pathsep}', which separates files in {FILES}; rename it")
    os.environ[FILES] = os.pathsep.join(map(str, every))
    for path in every:
        _import(path)


def _import(path: Path) -> None:
    """Import a file, as a module of its name, once in a process. Raises ConfigError if that fails."""
    if any(_is(sys.modules.get(name), path) for name in (path.stem, "__main__")):
        return  # imported, or being imported, perhaps by another file or as the script that runs
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"there is no Python file '{path}' to take plug-ins from; see --plugin and {FILES}")
    spec = spec_from_file_location(path.stem, path)
    if path.stem in sys.modules or spec is None or spec.loader is None:
        raise ConfigError(f"'{path}' cannot be imported, since a module '{path.stem}' is there; rename the file")
    if str(path.parent) not in sys.path:  # for modules beside it
        sys.path.append(str(path.parent))
    module = sys.modules[path.stem] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file raises
        del sys.modules[path.stem]
        line = line_in(str(path), error)  # None for a syntax error, which names its line itself
        where = f" (line {line})" if line else ""
        raise ConfigError(f"'{path}' cannot be imported: {reason(error)}{where}") from error


def _is(module: ModuleType | None, path: Path) -> bool:
    """Whether a module is that of a file."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    """Entry points of a group, cached: they do not change while a process runs, and the search is slow."""
    return tuple(entry_points(group=group))


def _class(address: str) -> type:
    """The class at "module:class"."""
    module, _, name = address.partition(":")
    found: type = getattr(import_module(module), name)
    return found


def _loaded(point: EntryPoint, kind: str) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever the other package raises
        raise ConfigError(f"{kind} '{point.name}' cannot be loaded from {point.value}: {reason(error)}") from error


def _place(item: Any) -> Any:
    """Identity of an object: module and qualified name of a class or function, else its id."""
    return (item.__module__, item.__qualname__) if hasattr(item, "__qualname__") else id(item)


strategies = Registry("method", "cfl.strategies", "cfl.methods.strategies", "cfl.contract:Strategy", extends=True)
local = Registry(
    "local regularizer", "cfl.local", "cfl.methods.regularizers", "cfl.contract:LocalRegularizer", extends=True,
    but="cfl.contract:Strategy",
)  # fmt: skip
benchmarks = Registry("benchmark", "cfl.benchmarks", "cfl.streams", "cfl.streams.benchmark:Benchmark")
models = Registry("model", "cfl.models", "cfl.models", "collections.abc:Callable")
engines = Registry("engine", "cfl.engines", "cfl.flower", "collections.abc:Callable")

DEFAULT_METHOD = "fedavg"


def roles(label: str) -> tuple[str, tuple[str, ...]]:
    """Split "fot+fedsol" into the strategy and the local regularizers; regularizers alone run under FedAvg.

    Raises ConfigError for an unknown name, with the nearest valid name.
    """
    first, *rest = (name.strip() for name in label.split("+"))
    second = next((name for name in rest if name in strategies.names() and name not in local.names()), None)
    if second and first in strategies.names():
        raise ConfigError(f"'{label}' names two strategies; name one, and local regularizers after it")
    if second and first in local.names():
        others = [first, *(name for name in rest if name != second)]
        raise ConfigError(f"'{label}' names the strategy after a regularizer; write {'+'.join([second, *others])}")
    if first not in strategies.names() and first in local.names():
        first, rest = DEFAULT_METHOD, [first, *rest]
    if "," in label:
        together = label.replace(",", "+")
        raise ConfigError(f"'{label}' is no method; write {together} to combine them, or compare them with --methods")
    if first not in strategies.names():
        raise UnknownName(str(unknown("method", first, [*strategies.names(), *local.names()])))
    check_local(rest)
    return first, tuple(rest)


def check_local(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is not that of a local regularizer, with the nearest valid name."""
    for name in names:
        if name in strategies.names() and name not in local.names():
            raise ConfigError(f"'{name}' is a strategy, not a local regularizer; name it as the method")
        local.get(name)
