"""Checks of single hooks: a subclass of the method's class checks arguments, result and side effects of each call."""

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.contract import Client, LocalRegularizer, Strategy
from cfl.contract.checked import fault, with_hooks
from cfl.contract.promises import PROMISES
from cfl.core import Tree
from cfl.core.errors import few

# (hook, task, phase, names of what trains in the round, or does not) to name to shape and type
Uploads = dict[tuple[str, int, str, frozenset[str]], dict[str, Any]]
PARTS = {"finish": ("upload", "state"), "work": ("upload", "state"), "server_step": ("step", "own")}
UNCHANGED = ("augment", "around", "penalty", "adjust", "cap", "aggregate")  # those of the base class are not called
FEW = 16  # samples of a batch whose task is inferred for each alone
FINITE = (
    "loss",
    "penalty",
    "around gradient",
    "adjust",
    "finish",
    "send",
    "work",
    "cap",
    "aggregate",
    "server_step",
    "serve",
)


class Faults:
    """List of faults without duplicates. found: pairs of hook and text."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def add(self, hook: str, text: str) -> None:
        """Record a fault."""
        if (hook, text) not in self.found:
            self.found.append((hook, text))

    def __bool__(self) -> bool:
        return bool(self.found)


class HookFailed(Exception):
    """A hook raised an exception; the fault is recorded."""


def watched(method: LocalRegularizer, faults: Faults) -> Any:
    """Return a copy of the method whose hooks record faults."""
    base = type(method)
    idle = [hook for hook in UNCHANGED if getattr(base, hook) is getattr(LocalRegularizer, hook)]
    hooks = [hook for hook in PROMISES if hasattr(base, hook) and hook not in idle]
    uploads: Uploads = {}

    def watch(hook: str) -> Callable[..., Any]:
        names, takes = [*signature(getattr(Strategy, hook)).parameters][1:], signature(getattr(base, hook))

        def call(self: Any, *args: Any, **named: Any) -> Any:
            try:
                given = dict(zip(names, takes.bind(self, *args, **named).args[1:], strict=False))
            except TypeError as error:
                faults.add(hook, f"does not take the arguments ({', '.join(names)}): {error}")
                raise HookFailed from error
            result = _observed(partial(getattr(base, hook), self, *args, **named), hook, given, self, faults)
            if hook == "around":
                return lambda *places: _observed(
                    partial(result, *places), "around gradient", dict(zip(("params", "ctx"), places)), self, faults
                )
            if hook in ("finish", "work"):
                _check_upload(hook, given, result[0], uploads, faults)
            if hook == "infer_task" and result is not None:
                _check_each(partial(getattr(base, hook), self), given, result, faults)
            return result

        return call

    return with_hooks(method, {hook: watch(hook) for hook in hooks})


def _check_upload(hook: str, given: Mapping[str, Any], upload: Tree, uploads: Uploads, faults: Faults) -> None:
    """Compare names, shapes and types of an upload with those of the first upload of the task and phase.

    Rounds that train other parameters than the rounds before, see `Strategy.paused`, have first uploads of their own.
    """
    place = given["info"] if hook == "work" else given["ctx"]
    phase, kind = (place.phase.name, place.frozen) if hook == "work" else ("", frozenset(given["params"]))
    found = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in upload.items()}
    first = uploads.setdefault((hook, place.task, phase, kind), found)
    if changed := sorted(name for name in {*found, *first} if found.get(name) != first.get(name)):
        text = f"names, shapes or types of its upload differ between calls ({', '.join(changed)})"
        faults.add(hook, f"{text}; the server sums the uploads of a phase, so all must be alike")


def _check_each(infer: Callable[..., Any], given: Mapping[str, Any], tasks: Tensor, faults: Faults) -> None:
    """Compare the tasks inferred in a batch with those of some of its samples, each in a batch of its own."""
    x = given["x"]
    rows = range(0, len(x), -(-len(x) // FEW))
    try:
        alone = [infer(*{**given, "x": x[row : row + 1]}.values()) for row in rows]
    except Exception as error:
        faults.add("infer_task", f"raises {type(error).__name__} for a batch of one sample: {error}")
        raise HookFailed from error
    if not all(isinstance(one, Tensor) and one.equal(tasks[row : row + 1]) for row, one in zip(rows, alone)):
        text = "the task of a sample depends on the other samples of the batch"
        faults.add("infer_task", f"{text}; infer it from the sample and the server's trees alone")


def unlike(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two values differ, such as "'state/seen'"; tensors to the bit (NaN equals NaN)."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        alike = alike and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))
    elif isinstance(a, Mapping) and isinstance(b, Mapping) and list(a) == list(b):
        for name in a:
            yield from unlike(a[name], b[name], f"{path}/{name}" if path else str(name))
        return
    elif isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        for number, pair in enumerate(zip(a, b, strict=True)):
            yield from unlike(*pair, f"{path}[{number}]")
        return
    else:
        nested = isinstance(a, (Tensor, Mapping)) or isinstance(b, (Tensor, Mapping))
        alike = a is b or (not nested and bool(a == b or (a != a and b != b)))
    if not alike:
        yield f"'{path}'" if path else "the whole"


def _observed(call: Callable[[], Any], hook: str, given: Mapping[str, Any], method: Any, faults: Faults) -> Any:
    """Call a hook twice and return its first result; record what is wrong with it, and side effects.

    hook: also "around gradient", for a call of the function that `around` returned.
    """
    name = hook.removesuffix(" gradient")
    before = {path: leaf.clone() for path, leaf in _tensors(given)}
    draws, own = _global_draws(), _print([vars(method), _class_values(method)])
    try:
        result, again = call(), call()
    except HookFailed:
        raise
    except Exception as error:
        faults.add(name, f"raises {type(error).__name__}: {error}")
        raise HookFailed from error
    after = dict(_tensors(given))
    if written := [path for path in before if path not in after or any(unlike(before[path], after[path]))]:
        faults.add(name, f"writes to {few(written, 2)} in place; make a new tensor or dictionary")
    if added := [path for path in after if path not in before]:
        faults.add(name, f"adds {few(added, 2)} to its arguments; make a new dictionary")
    if _global_draws() != draws:
        faults.add(name, "draws from a global generator; use cfl.rng.generator(ctx.key) or cfl.rng.generator(info.key)")
    if text := fault(method, hook, result, [*given.values()]):
        faults.add(name, text)
        raise HookFailed
    if _print([vars(method), _class_values(method)]) != own:
        faults.add(name, "keeps state on the object or its class; return it as client state or as a tree of the server")
    elif not callable(result):
        _check_values(hook, name, _parts(name, result), _parts(name, again), faults)
    return result


def _check_values(hook: str, name: str, result: Any, again: Any, faults: Faults) -> None:
    """Compare the results of two calls with the same arguments, and look for NaN."""
    if differing := [*unlike(result, again)]:
        text = f"returns different results for the same arguments ({few(differing, 2)} differs)"
        faults.add(name, f"{text}; draw from ctx.key or info.key, keep no state")
    leaves = dict(_tensors(torch.as_tensor(result) if isinstance(result, float) else result))
    if bad := [path for path, leaf in leaves.items() if hook in FINITE and not bool(torch.isfinite(leaf).all())]:
        where = f" in {few(bad, 2)}" if bad[0] else ""
        faults.add(name, f"returns NaN or infinity{where}; guard divisions, roots and logarithms")
        raise HookFailed  # later hooks would pass it on


def _parts(hook: str, result: Any) -> Any:
    """Name the parts of a pair, for paths in messages."""
    return dict(zip(PARTS[hook], result, strict=True)) if hook in PARTS else result


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested values with its path, such as grads['0.weight'] or ctx.state['seen']."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _tensors(item, f"{path}[{name!r}]" if path else str(name))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield from _tensors(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Client):
        yield from _tensors({task: share.rows for task, share in value.shares.items()}, f"{path}.rows")


def _global_draws() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), kind, np.asarray(keys).tobytes(), *rest, random.getstate()


def _class_values(method: Any) -> dict[str, Any]:
    """Attributes of a class that are not functions: a method could hide state in them."""
    kinds = (list, dict, set, Tensor, int, float)
    return {
        f"{parent.__name__}.{name}": value
        for parent in type(method).__mro__
        for name, value in vars(parent).items()
        if isinstance(value, kinds) and not name.startswith("__")
    }


def _print(value: Any) -> str:
    """Return a text that changes if the value changes."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_print(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_print, value)) + "]"
    return repr(value)
