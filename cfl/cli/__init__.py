"""The command `cfl-run`."""

from cfl.cli import federation  # registers its commands
from cfl.cli.commands import app, main

__all__ = ["app", "federation", "main"]
