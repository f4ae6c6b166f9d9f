"""A stream and a run of seconds, shared by tests: those of the conformance kit."""

from typing import Any

import cfl
from cfl.models.handle import Model
from cfl.testing.toys import CLASSES, DIMENSIONS, toy_config
from cfl.testing.toys import toy_stream as stream
from cfl.tree import Tree
from cfl.types import EMPTY, Batch, Ctx, Parts

__all__ = ["CLASSES", "DIMENSIONS", "config", "context", "stream"]


def config(*overrides: str, method: str = "fot", **options: Any) -> cfl.RunConfig:
    """A small run: 4 clients, 3 a round, 2 rounds a task, an 8-6-6-2 MLP."""
    return toy_config(*overrides, method=method, **options)


def context(shared: Parts, state: Tree, batch: Batch, model: Model | None = None, task: int = 0, **more: Any) -> Ctx:
    """What a hook sees, where a test calls it without an engine: no memory, step 0, key 0."""
    ctx = Ctx(shared, state, batch, EMPTY, None, model, task, step=0, lr=0.1, key=0)  # type: ignore[arg-type]
    return ctx._replace(**more)
