"""Members of a run with checked hooks: a hook that fails or returns a wrong result raises an error that names it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any, TypeVar

from cfl.contract.promises import PROMISES
from cfl.contract.regularizer import LocalRegularizer
from cfl.core import RAW, HookError, content
from cfl.core.errors import line_in

T = TypeVar("T", bound=LocalRegularizer)


class Checked:
    """A member whose hooks raise HookError if they fail or return another result than they have to.

    Other attributes are those of the member.
    """

    def __init__(self, member: LocalRegularizer) -> None:
        self._member = member

    def __getattr__(self, name: str) -> Any:
        if name == "_member":  # of a copy that is being made
            raise AttributeError(name)
        value = getattr(self._member, name)
        return partial(_called, self._member, name, value) if name in PROMISES else value


def with_hooks(member: T, hooks: Mapping[str, Callable[..., Any]]) -> T:
    """Return a copy of a member with these hooks in place of its own."""
    clone, base = copy.copy(member), type(member)
    object.__setattr__(clone, "__class__", type(base.__name__, (base,), {"__slots__": (), **hooks}))
    return clone


def fault(member: LocalRegularizer, hook: str, result: Any, args: Sequence[Any]) -> str:
    """Describe what is wrong with a hook's result, as a sentence without its subject; empty if nothing is wrong.

    hook: also "around gradient", for a call of the function that `around` returned; args: of the call.
    """
    found = PROMISES[hook].fault(result, member, *args)
    return f"returned {found}; it has to return {PROMISES[hook].text}" if found else ""


def _called(member: LocalRegularizer, hook: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a hook, or the function that `around` returned, and check the result."""
    name = f"{type(member).__name__}.{hook.removesuffix(' gradient')}"
    try:
        result = function(*args)
    except RAW as error:
        text = ": ".join(filter(None, [type(error).__name__, str(error)]))  # a StopIteration has no text
        raise HookError(f"{name} raises {text}{_line(function, error)}") from error
    if text := fault(member, hook, result, args):
        raise HookError(f"{name} {text}")
    return partial(_called, member, "around gradient", result) if hook == "around" else result


def _line(function: Callable[..., Any], error: BaseException) -> str:
    """The line of a hook's file at which an error arose, such as " (line 12 of mine.py)"; empty for hooks of `cfl`."""
    code = getattr(unwrap(function), "__code__", None)  # not that of a decorator, such as `torch.no_grad()`
    line = line_in(code.co_filename, error) if code is not None and content.foreign(function) else None
    return f" (line {line} of {Path(code.co_filename).name})" if code is not None and line else ""
