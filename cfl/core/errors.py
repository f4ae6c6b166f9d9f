"""Errors that a user can act on: each message names the thing at fault and says what to do."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

MOST_NAMES = 8  # names that one line lists
FEW_NAMES = 5  # so few are always listed


class CflError(Exception):
    """Base of all errors raised by `cfl` on purpose; `cfl-run` prints them in one line."""


class ConfigError(CflError):
    """An option, name or value that cannot be used; `cfl-run` exits with status 2."""


class DataError(CflError):
    """A data set that is missing or cannot be dealt to the clients as asked."""


class CheckpointError(CflError):
    """A checkpoint that is damaged or belongs to another run."""


class Busy(CflError):
    """A folder that another process writes to."""


class UpdateError(CflError):
    """A client's upload that cannot be used (NaN or infinity)."""


class RoundAborted(CflError):
    """A round that ends without a sum, such as one with too few clients left; the run goes on with the next one."""


def unknown(kind: str, name: str, known: Iterable[object]) -> ConfigError:
    """A ConfigError for a `name` that is not among the `known` ones, with the nearest valid one."""
    known = sorted(map(str, known))
    folded = {one.lower(): one for one in known}
    near = [folded[one] for one in get_close_matches(name.lower(), folded, n=1, cutoff=0.5)]
    more = f", ... (and {len(known) - MOST_NAMES} more)" if len(known) > MOST_NAMES else ""
    names = f"known: {', '.join(known[:MOST_NAMES]) or 'none'}{more}"
    hint = f"did you mean '{near[0]}'?" if near else names
    if near and len(known) <= FEW_NAMES:
        hint = f"{hint} {names}"
    return ConfigError(f"unknown {kind} '{name}'; {hint}")


def wanted(schema: Mapping[str, Any]) -> str:
    """What a JSON schema asks for, in words."""
    if "anyOf" in schema:
        return " or ".join(map(wanted, schema["anyOf"]))
    if "const" in schema:
        return f"'{schema['const']}' (this version has nothing else)"
    if "pattern" in schema:
        return str(schema["description"])
    words = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a name",
        "object": "a group",
    }
    text = words.get(schema["type"], schema["type"])
    if schema["type"] == "array":
        return f"a list (each {wanted(schema['items'])})"
    if schema["type"] not in ("integer", "number"):
        return text
    low = f"[{schema['minimum']}" if "minimum" in schema else f"({schema.get('exclusiveMinimum', '-inf')}"
    if "maximum" in schema:
        return f"{text} in {low}, {schema['maximum']}]"
    return f"{text} in {low}, {schema.get('exclusiveMaximum', 'inf')})"
