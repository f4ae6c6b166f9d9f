"""A toy stream and a toy configuration, whose runs take a fraction of a second."""

from typing import Any

import torch

from cfl.assembly.resolve import resolve
from cfl.config.schema import RunConfig
from cfl.core import rng
from cfl.streams import Stream, from_tensors

DIMENSIONS, CLASSES = 8, 2


def toy_stream(tasks: int = 3, train: int = 48, test: int = 40, multi_head: bool = False) -> Stream:
    """Return a stream of `tasks` tasks, each with `train` and `test` samples (d=8).

    Samples of class c in task t are centred on axis 2t + c, and 20 public samples on the origin.
    """
    parts = []
    for task in range(tasks):
        draws = rng.generator(rng.key(0, "toy", task))
        y = torch.arange(train + test) % CLASSES
        x = torch.randn(train + test, DIMENSIONS, generator=draws) * 0.3
        x[torch.arange(len(y)), 2 * task + y] += 1.0
        parts.append((x[:train], y[:train], x[train:], y[train:]))
    public = torch.randn(20, DIMENSIONS, generator=rng.generator(rng.key(0, "toy", "public")))
    return from_tensors(parts, name="toy", multi_head=multi_head, public=public)


def toy_config(*overrides: str, **layers: Any) -> RunConfig:
    """Return a small run: 4 clients, cohorts of 3, 2 rounds per task, an 8-6-6-2 MLP unless the overrides name a model.

    layers: as for `cfl.resolve`.
    """
    small = ["tasks=null", "rounds=2", "cohort=3", "partition.clients=4", "local.batch_size=4"]
    if not any(override.startswith(("model.name=", "model.weights=")) for override in overrides):
        small.append("model.hidden=[6,6]")
    return resolve("permuted-digits", overrides=[*small, *overrides], **layers)
