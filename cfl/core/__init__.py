"""The ground floor: trees, randomness, options, errors, registries. Nothing here imports from the floors above."""

from cfl.core.errors import Busy, CflError, CheckpointError, ConfigError, DataError, RoundAborted, UpdateError, unknown
from cfl.core.options import option
from cfl.core.tree import Tree

__all__ = [
    "Busy", "CflError", "CheckpointError", "ConfigError", "DataError", "RoundAborted", "Tree", "UpdateError", "option",
    "unknown",
]  # fmt: skip
