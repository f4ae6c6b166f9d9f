"""A stream of seconds, shared by tests: three tasks of two Gaussian classes in eight dimensions."""

from typing import Any

import torch

import cfl
from cfl import rng
from cfl.models.handle import Model
from cfl.tree import Tree
from cfl.types import EMPTY, Batch, Ctx, Parts

DIMENSIONS, CLASSES = 8, 2


def stream(tasks: int = 3, train: int = 48, test: int = 40, multi_head: bool = False) -> cfl.Stream:
    """`tasks` tasks of `train` and `test` samples (d=8); class c of task t is centred on axis 2t + c."""
    parts = []
    for task in range(tasks):
        draws = rng.generator(rng.key(0, "toy", task))
        y = torch.arange(train + test) % CLASSES
        x = torch.randn(train + test, DIMENSIONS, generator=draws) * 0.3
        x[torch.arange(len(y)), 2 * task + y] += 1.0
        parts.append((x[:train], y[:train], x[train:], y[train:]))
    return cfl.from_tensors(parts, name="toy", multi_head=multi_head)


def config(*overrides: str, method: str = "fot", **options: Any) -> cfl.RunConfig:
    """A small run: 4 clients, 3 a round, 2 rounds a task, an 8-6-6-2 MLP."""
    return cfl.resolve(
        "permuted-digits",
        method=method,
        overrides=[
            "tasks=3",
            "rounds=2",
            "cohort=3",
            "partition.clients=4",
            "local.batch_size=4",
            "model.hidden=[6,6]",
            *overrides,
        ],
        **options,
    )


def context(shared: Parts, state: Tree, batch: Batch, model: Model | None = None, task: int = 0, **more: Any) -> Ctx:
    """What a hook sees, where a test calls it without an engine: no memory, step 0, key 0."""
    ctx = Ctx(shared, state, batch, EMPTY, None, model, task, 0, 0)  # type: ignore[arg-type]
    return ctx._replace(**more)
