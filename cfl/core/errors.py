"""Errors and warnings that a user can act on: each message names the thing at fault and says what to do."""

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import inf
from traceback import extract_tb, walk_stack
from types import MappingProxyType
from typing import Any

MOST_NAMES = 8  # names in one line of a message
FEW_NAMES = 5  # up to this number, all names are listed

RAW = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
    StopIteration, TypeError, ValueError,
)  # fmt: skip
"""Errors of Python and of libraries that a fault in a hook can raise."""


class CflError(Exception):
    """Base class of the errors that `cfl` raises on purpose; `cfl-run` prints them in one line."""


class ConfigError(CflError):
    """An invalid option, name or value; `cfl-run` exits with status 2."""


class UnknownName(ConfigError):
    """A name that nothing is registered as."""


class DataError(CflError):
    """A data set that is missing, or cannot be partitioned as configured."""


class CheckpointError(CflError):
    """A checkpoint that is damaged or belongs to another run."""


class Busy(CflError):
    """A folder that another process is writing to."""


class UpdateError(CflError):
    """An upload that cannot be aggregated, such as one with NaN or infinity."""


class HookError(UpdateError):
    """A hook of a method fails, or returns another result than it has to."""


class CallbackError(CflError):
    """A callback that fails, or returns another result than it has to. callback: its name."""

    def __init__(self, text: str, callback: str = "") -> None:
        super().__init__(text)
        self.callback = callback


class RoundAborted(CflError):
    """A round without an aggregate, for example with too few clients left; the run continues with the next round."""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning whose place is the line that called `cfl`, such as that of `cfl.run` in a notebook."""
    stack = enumerate(walk_stack(sys._getframe()), 1)
    own = [level for level, (frame, _) in stack if f"{frame.f_globals.get('__name__')}.".startswith("cfl.")]
    warnings.warn(text, category, stacklevel=own[-1] + 1)


def unknown(kind: str, name: str, known: Iterable[object]) -> ConfigError:
    """Make a ConfigError for an unknown `name` that suggests the nearest of the `known` names."""
    known = sorted(map(str, known))
    folded = {one.lower(): one for one in known}
    near = [folded[one] for one in get_close_matches(name.lower(), folded, n=1, cutoff=0.5)]
    more = f", ... (and {len(known) - MOST_NAMES} more)" if len(known) > MOST_NAMES else ""
    names = f"known: {', '.join(known[:MOST_NAMES]) or 'none'}{more}"
    hint = f"did you mean '{near[0]}'?" if near else names
    if near and len(known) <= FEW_NAMES:
        hint = f"{hint} {names}"
    return ConfigError(f"unknown {kind} '{name}'; {hint}")


def few(names: Sequence[str], most: int) -> str:
    """Join the first names, and say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def reason(error: BaseException) -> str:
    """Describe an exception of other code in one line: its text, with its class unless the text is clear alone."""
    text = " ".join(str(error).split())
    if text and isinstance(error, CflError | RuntimeError | TypeError | ValueError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def line_in(file: str, error: BaseException) -> int | None:
    """Return the innermost line of a file at which an error arose; None if it passed through no line of the file."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


def wanted(schema: Mapping[str, Any], known: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Describe in words the values that a JSON schema accepts. known: schemas that it refers to, by name."""
    known = schema.get("$defs", known)
    if "$ref" in schema:
        return wanted(known[schema["$ref"].rpartition("/")[2]], known)
    if "anyOf" in schema:
        return " or ".join(wanted(one, known) for one in schema["anyOf"])
    if "const" in schema:
        return f"'{schema['const']}'"
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "pattern" in schema:
        return str(schema.get("description", "a text"))
    if not schema:
        return "anything"
    words = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a name",
        "object": "a group",
        "null": "none",
        "array": "a list",
    }
    text = words.get(schema["type"], schema["type"])
    if schema.get("prefixItems"):
        return f"a list of {' and '.join(map(wanted, schema['prefixItems']))}"
    if schema.get("items"):
        return f"a list (each {wanted(schema['items'])})"
    if schema["type"] not in ("integer", "number"):
        return text
    low = f"[{_exact(schema['minimum'])}" if "minimum" in schema else f"({_exact(schema.get('exclusiveMinimum', -inf))}"
    high = f"{_exact(schema['maximum'])}]" if "maximum" in schema else f"{_exact(schema.get('exclusiveMaximum', inf))})"
    return text if (low, high) == ("(-inf", "inf)") else f"{text} in {low}, {high}"


def _exact(bound: float) -> str:
    """All digits of a whole number, and 15 of another."""
    return str(bound) if isinstance(bound, int) else f"{bound:.15g}"
