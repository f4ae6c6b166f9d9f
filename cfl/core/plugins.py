"""Registries of strategies, local regularizers, benchmarks and models, open to other packages through entry points.

A third-party package registers an object in its own setup.cfg:

    [options.entry_points]
    cfl.strategies =
        my-method = my_package.my_method:MyMethod
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from cfl.core.errors import ConfigError, unknown


class Registry:
    """A map from names to objects: built-in objects register on import, third-party objects through entry points.

    kind: the word for an object in errors; group: the entry-point group; home: the package of the built-in objects.
    """

    def __init__(self, kind: str, group: str, home: str) -> None:
        self.kind, self.group, self.home = kind, group, home
        self._items: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def register(self, name: str, source: str = "") -> Callable[[Any], Any]:
        """Decorator that registers an object as `name`. Raises ValueError if the name is taken.

        source: paper and section, for objects without an attribute `source`.
        """

        def enter(item: Any) -> Any:
            there = self._items.get(name, item)
            if _place(there) != _place(item):  # the same definition: a notebook cell that runs again
                raise ValueError(f"{self.kind} '{name}' is registered already, by {there!r}; choose another name")
            self._items[name], self._sources[name] = item, source
            return item

        return enter

    def names(self) -> list[str]:
        """All names, sorted, including those of installed third-party packages."""
        import_module(self.home)
        return sorted({*self._items, *(point.name for point in _points(self.group))})

    def source(self, name: str) -> str:
        """Source of the object of that name: paper and section."""
        return getattr(self.get(name), "source", "") or self._sources.get(name, "")

    def get(self, name: str) -> Any:
        """Return the object of that name. Raises ConfigError with the nearest valid name."""
        import_module(self.home)
        if name not in self._items:
            for point in _points(self.group):
                if point.name == name:
                    self._items[name] = point.load()
                    break
            else:
                raise unknown(self.kind, name, self.names())
        return self._items[name]


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    """Entry points of a group, cached: they do not change while a process runs, and the search is slow."""
    return tuple(entry_points(group=group))


def _place(item: Any) -> Any:
    """Identity of an object: module and qualified name of a class or function, else its id."""
    return (item.__module__, item.__qualname__) if hasattr(item, "__qualname__") else id(item)


strategies = Registry("method", "cfl.strategies", "cfl.methods.strategies")
local = Registry("local regularizer", "cfl.local", "cfl.methods.regularizers")
benchmarks = Registry("benchmark", "cfl.benchmarks", "cfl.streams")
models = Registry("model", "cfl.models", "cfl.models")

DEFAULT_METHOD = "fedavg"


def roles(label: str) -> tuple[str, tuple[str, ...]]:
    """Split "fot+fedsol" into the strategy and the local regularizers; regularizers alone run under FedAvg.

    Raises ConfigError for an unknown name, with the nearest valid name.
    """
    first, *rest = (name.strip() for name in label.split("+"))
    if first not in strategies.names() and first in local.names():
        first, rest = DEFAULT_METHOD, [first, *rest]
    if first not in strategies.names():
        raise unknown("method", first, [*strategies.names(), *local.names()])
    for name in rest:
        if name in strategies.names() and name not in local.names():
            raise ConfigError(f"'{label}' names two strategies; name one, and local regularizers after it")
        local.get(name)
    return first, tuple(rest)
