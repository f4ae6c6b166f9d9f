"""Errors that a user can act on: each message names the thing at fault and says what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class CflError(Exception):
    """Base of all errors raised by `cfl` on purpose; `cfl-run` prints them in one line."""


class ConfigError(CflError):
    """An option, name or value that cannot be used; `cfl-run` exits with status 2."""


class DataError(CflError):
    """A data set that is missing or cannot be dealt to the clients as asked."""


class CheckpointError(CflError):
    """A checkpoint that is damaged or belongs to another run."""


class UpdateError(CflError):
    """A client's upload that cannot be used (NaN or infinity)."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """A ConfigError for a `name` that is not among the `known` ones, with the nearest valid one."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}"
    return ConfigError(f"unknown {kind} '{name}'; {hint}")
