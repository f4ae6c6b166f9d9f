"""The command `cfl-run`. Each module registers its commands; `cfl-run --help` has the order of these imports."""
# ruff: noqa: I001

from cfl.cli import train, evaluate, compare, look, federation, completion
from cfl.cli.app import app, main

__all__ = ["app", "compare", "completion", "evaluate", "federation", "look", "main", "train"]
