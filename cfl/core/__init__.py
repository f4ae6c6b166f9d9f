"""The lowest part: trees, randomness, options, errors, registries. It imports from no other part of `cfl`."""

from cfl.core.errors import (
    RAW,
    Busy,
    CallbackError,
    CflError,
    CheckpointError,
    ConfigError,
    DataError,
    HookError,
    RoundAborted,
    UpdateError,
    unknown,
    warn,
)
from cfl.core.options import option
from cfl.core.tree import Tree

__all__ = [
    "RAW", "Busy", "CallbackError", "CflError", "CheckpointError", "ConfigError", "DataError", "HookError",
    "RoundAborted", "Tree", "UpdateError", "option", "unknown", "warn",
]  # fmt: skip
