"""The ground floor: trees, randomness, options, errors, registries. Nothing here imports from the floors above."""

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
