"""Hashes of what no option describes: tensors, objects of users, and the code behind them.

Equal content has equal hashes in every process, because hashes include no addresses and no shortened tensors.
"""

import contextlib
import inspect
import json
import sys
import tokenize
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import cached_property, partial
from hashlib import blake2b
from importlib import metadata
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_KNOWN = {"cfl", "torch", "numpy", *sys.stdlib_module_names}  # their code is not hashed, an upgrade continues a run
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages
_OF_MODULES = set(vars(nn.Module()))
_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))  # of mappings
_PIECE = 1 << 24  # bytes of rows that are gathered at once


def digest(value: Any) -> str:
    """Hash any value: 32 hex digits. Parameters count by shape and dtype, functions and classes by their source."""
    return blake2b(json.dumps(_Describer()(value)).encode(), digest_size=16).hexdigest()


def of_rows(rows: Tensor, index: Tensor) -> str:
    """Hash the rows `index` (n,) of a tensor (N, ...): 32 hex digits. The rows are gathered in pieces."""
    state = blake2b(str((rows.dtype, tuple(rows.shape[1:]))).encode(), digest_size=16)
    for part in index.split(max(1, _PIECE // max(1, rows[:1].nbytes))):
        state.update(_raw(rows.index_select(0, part)))
    return state.hexdigest()


def foreign(item: Any) -> bool:
    """True for a class or function outside of `cfl`, torch, NumPy and the standard library."""
    item = getattr(item, "func", item) if isinstance(item, partial) else item
    return str(getattr(item, "__module__", None)).partition(".")[0] not in {*_KNOWN, "None"}


def state(item: Any) -> dict[str, Any]:
    """The attributes of an object, without cached properties and without those of every `nn.Module`."""
    own = {name: getattr(item, name) for kind in type(item).__mro__ for name in _slots(kind) if hasattr(item, name)}
    own |= getattr(item, "__dict__", {})
    skipped = _OF_MODULES if isinstance(item, nn.Module) else set[str]()
    return {
        name: value
        for name, value in own.items()
        if name not in skipped and not isinstance(getattr(type(item), name, None), cached_property)
    }


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [name for name in ([slots] if isinstance(slots, str) else slots) if name not in ("__dict__", "__weakref__")]


class _Describer:
    """Describes values as JSON data; each function and class is described once."""

    def __init__(self) -> None:
        self._met: dict[int, Any] = {}  # functions and classes by their ids
        self._above: list[int] = []  # ids of the values that contain the current one

    def __call__(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return int(value) if value.is_integer() else value
        if id(value) in self._above:
            return "a value that contains this one"
        self._above.append(id(value))
        try:
            return self._compound(value)
        finally:
            self._above.pop()

    def _compound(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return [str(value.dtype), list(value.shape), value.requires_grad]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return self._array(value)
        if isinstance(value, Tensor):
            return [str(value.dtype), list(value.shape), blake2b(_raw(value), digest_size=16).hexdigest()]
        if isinstance(value, Mapping):
            return [[self(name), self(item)] for name, item in value.items()]
        if isinstance(value, (list, tuple)):
            return [self(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return self._unordered(value)
        if isinstance(value, partial):
            return ["partial", self(value.func), self(value.args), self(value.keywords)]
        if isinstance(value, MethodType):
            return [self(value.__func__), self(value.__self__)]
        if isinstance(value, (FunctionType, type)):
            return self._code(value)
        return self._object(value)

    def _unordered(self, items: Collection[Any]) -> list[Any]:
        """Describe a set alike in whatever order: its items by the names of what they use, then each of these.

        What they use are the functions and classes that were not met before.
        """
        known = {*self._met}
        found = [self(item) for item in items]
        used = [each for id, each in self._met.items() if id not in known]
        if used:  # once more, with names in place of what the first item that uses it has described
            found = [self(item) for item in items]
        for each in used:
            del self._met[id(each)]
            found.append(self(each))
        return sorted(found, key=json.dumps)

    def _array(self, value: np.ndarray) -> Any:
        if isinstance(value, np.ma.MaskedArray):
            return [self(value.filled()), self(np.ma.getmaskarray(value))]
        try:
            return self(torch.from_numpy(np.array(value)))
        except (TypeError, ValueError):  # torch has no texts, dates, records, or other orders of bytes
            return [str(value.dtype), list(value.shape), blake2b(value.tobytes(), digest_size=16).hexdigest()]

    def _object(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            buffers = {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in value.named_buffers(recurse=False)}
            leaves, children = dict(value.named_parameters(recurse=False)), dict(value.named_children())
            return [self(type(value)), self([leaves, buffers, children, state(value)])]
        held = _held(value)
        if (state(value) or hasattr(value, "__dict__")) and not isinstance(value, ModuleType):
            return [self(type(value)), self(state(value)), *([self(held)] if held else [])]
        if held and not _shown(value):
            return [_name(type(value)), self(held)]
        text = getattr(value, "__name__", None) or repr(value)
        return [_name(type(value)), "" if " at 0x" in text else text]

    def _code(self, item: Any) -> Any:
        if id(item) in self._met or not isinstance(item, type) and not foreign(item):
            return _name(item)
        self._met[id(item)] = item
        if isinstance(item, FunctionType):
            return self._function(item)
        return [_name(item), *(self._class(base) for base in item.__mro__ if foreign(base))]

    def _function(self, function: FunctionType) -> Any:
        """Name, source, defaults, and the outer values that it uses. Without a source, as at a prompt, its bytecode."""
        code, cells = function.__code__, []
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # the cell of a name that is not set yet
                cells.append(cell.cell_contents)
        named = _reached({*_names(code)}, function.__globals__, set())
        used = [item for item in named if _plain(item) or isinstance(item, (FunctionType, type)) and foreign(item)]
        source = _source(function) or [code.co_code.hex(), *filter(_plain, code.co_consts)]
        return [_name(function), source, self([function.__defaults__, function.__kwdefaults__, cells, used])]

    def _class(self, cls: type) -> Any:
        """Name, the source of its module, and its functions.

        A script is not hashed as a whole, because it may contain the call that resumes the run.
        """
        module = sys.modules.get(cls.__module__)
        source = _source(module) or _version(cls.__module__) if cls.__module__ != "__main__" else ""
        return [_name(cls), source, [[name, self(function)] for name, function in _functions(cls)]]


def _reached(names: set[str], values: Mapping[str, Any], met: set[str]) -> Iterator[Any]:
    """The values that code with these names reads from its module, or as attributes of the user's other modules.

    met: names of modules that are read already.
    """
    for name in sorted(names & values.keys()):
        value = values[name]
        if not isinstance(value, ModuleType):
            yield value
        elif value.__name__ not in met and _of_user(value):
            met.add(value.__name__)
            yield from _reached(names, vars(value), met)


def _of_user(module: ModuleType) -> bool:
    """Whether a module is the user's own: what installed ones hold depends on what the process has imported."""
    known = module.__name__.partition(".")[0] in _KNOWN
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return not known and any(place and not {*PurePath(place).parts} & _INSTALLED for place in places)


def _held(value: Any) -> list[Any]:
    """What a collection holds that is neither a list, a tuple, a set nor a mapping; empty for anything else."""
    if isinstance(value, memoryview):  # of some formats it has no items
        return [value.format, [*(value.shape or ())], value.tobytes().hex()]
    if isinstance(value, np.ndarray):
        return [[*value.shape], value.tolist()] if value.nbytes else []
    if isinstance(value, deque):
        return [value.maxlen, *value] if value else []
    return list(value) if isinstance(value, _VIEWS) else []


def _shown(value: Any, above: tuple[int, ...] = ()) -> bool:
    """Whether the text of a value shows all of it, in every process; that of a tensor or of a long array does not.

    above: ids of the values that contain this one.
    """
    if id(value) in above:
        return True
    inside = partial(_shown, above=(*above, id(value)))
    if isinstance(value, np.ndarray):
        return value.size <= np.get_printoptions()["threshold"] and all(map(inside, value.flat))
    if type(value) in (list, tuple, deque) or isinstance(value, _VIEWS):
        return all(map(inside, value))
    if type(value) is dict:
        return all(map(inside, value.items()))
    if isinstance(value, (Tensor, set, frozenset)):
        return False
    bare = isinstance(value, (Enum, PurePath)) or not (state(value) or hasattr(value, "__dict__"))
    return bare and " at 0x" not in repr(value)


def _functions(cls: type) -> Iterator[tuple[str, Any]]:
    """The functions that the class defines, without those that `dataclass` makes."""
    for name, item in vars(cls).items():
        if isinstance(item, property):
            item = item.fget
        item = getattr(item, "__func__", getattr(item, "func", item))  # of a static, class or cached one
        if isinstance(item, FunctionType) and (not name.startswith("__") or _source(item)):
            yield name, item


def _names(code: CodeType) -> Iterator[str]:
    """The global names in a function's code, and in that of functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _source(item: Any) -> str:
    """The source text; empty if there is none, or if its lines in a file that has changed are not Python."""
    try:
        return inspect.getsource(item)
    except (OSError, TypeError, tokenize.TokenError):
        return ""


def _version(module: str) -> str:
    try:
        return metadata.version(module.partition(".")[0])
    except metadata.PackageNotFoundError:
        return ""


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))


def _name(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row."""
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
