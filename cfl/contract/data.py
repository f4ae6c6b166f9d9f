"""What clients hold: samples, batches of them, a client's shares of the tasks, and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cfl.core import rng


class Batch(NamedTuple):
    """A minibatch of one client.

    x: (batch, ...) inputs; y: (batch,) int64 labels in [0, classes of the task's head);
    mask: (batch,) 1.0 for a sample, 0.0 for padding; ids: (batch,) int64, the same for a sample wherever it is held.
    task: (batch,) int64 task of each sample, or None where all are of the round's task.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    ids: Tensor
    task: Tensor | None = None


EMPTY = Batch(*(torch.empty(0) for _ in range(4)))


class Samples(Protocol):
    """Samples of one task: index (n,) int64 ids, targets (n,) int64, and gather(rows, key) -> x (b, ...), y (b,).

    key: of the random changes of training images, where the samples have such; None: the images as they are.
    augment: the kinds of those changes, empty for none.
    """

    @property
    def augment(self) -> tuple[str, ...]: ...

    @property
    def index(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def gather(self, rows: Tensor, key: int | None = None) -> tuple[Tensor, Tensor]: ...


class Share(NamedTuple):
    """What a client holds of a task. rows: (n,) int64 positions among the task's samples."""

    samples: Samples
    rows: Tensor


MEMORY = "memory"
"""The leaf of a strategy's client state that points to samples: (m, 2) int64, task and position in the client's share.

The engine turns it into `ctx.memory`; the samples themselves stay where they are, and count as stored on the client.
"""


@dataclass(frozen=True, eq=False)
class Client:
    """A client and its own data. shares: by task; task: the round's; now: the tasks whose data it trains on.

    The other tasks' data are gone, but for what its memory points to.
    """

    id: int
    shares: Mapping[int, Share]
    task: int
    now: tuple[int, ...]

    def __len__(self) -> int:
        return sum(len(self.shares[task].rows) for task in self.now)

    @property
    def device(self) -> torch.device:
        """Where its data lie."""
        return self.shares[self.task].rows.device

    @property
    def targets(self) -> Tensor:
        """(n,) labels of the data that it trains on."""
        return torch.cat([self.shares[task].samples.targets[self.shares[task].rows] for task in self.now])

    def steps(self, size: int) -> int:
        """Batches of that size in a local epoch."""
        return -(-len(self) // size)

    def batches(self, size: int, order: Tensor | None = None, key: int | None = None) -> Iterator[Batch]:
        """All samples to train on once, at most `size` at a time, in the given order (n,) or as they lie.

        key: of the random changes of training images; None: the images as they are.
        """
        whole = torch.arange(len(self), device=self.device) if order is None else order
        return self.gathered(whole.split(size), key)

    def shuffled(self, size: int, source: torch.Generator) -> list[Tensor]:
        """Positions (b,) for the batches of an epoch: all samples once, in random order."""
        return list(torch.randperm(len(self), generator=source).to(self.device).split(size))

    def draws(self, size: int, steps: int, source: torch.Generator) -> list[Tensor]:
        """Positions (b,) for Poisson batches: each sample is in each one independently, `size` of them on average."""
        drawn = (torch.rand(steps, len(self), generator=source) < size / len(self)).to(self.device)
        return [row.nonzero().flatten() for row in drawn]

    def gathered(self, parts: Iterable[Tensor], key: int | None = None) -> Iterator[Batch]:
        """`batch` for each of several positions (b,), with a key of its own."""
        changed = any(self.shares[task].samples.augment for task in self.now)
        for number, part in enumerate(parts):
            yield self.batch(part, rng.key(key, number) if changed and key is not None else None)

    def batch(self, positions: Tensor, key: int | None = None) -> Batch:
        """The samples at positions (b,) in all that it trains on; for none of them a sample of padding."""
        if not len(positions):
            padding = self.batch(positions.new_zeros(1), key)
            return padding._replace(mask=torch.zeros_like(padding.mask))
        if self.now != (self.task,):
            return self.recall(torch.cat([self._places(task) for task in self.now])[positions], key)
        samples, rows = self.shares[self.task]
        held = rows[positions]
        x, y = samples.gather(held, key)
        return Batch(x, y, torch.ones(len(held), dtype=x.dtype, device=x.device), samples.index[held])

    def recall(self, places: Tensor, key: int | None = None) -> Batch:
        """The samples at places (m, 2), as in `MEMORY`, with the task of each; key: as for `batches`."""
        if not len(places):
            samples, rows = self.shares[self.task]
            x, y = samples.gather(rows[:0])
            return Batch(x, y, torch.ones(0, dtype=x.dtype, device=x.device), rows[:0], rows[:0])
        parts, order = [], []
        for task in places[:, 0].unique().tolist():
            at = (places[:, 0] == task).nonzero().flatten()
            samples, rows = self.shares[task]
            mine = rows[places[at, 1]]
            own = None if key is None else rng.key(key, "task", task)
            parts.append((*samples.gather(mine, own), samples.index[mine]))
            order.append(at)
        back = torch.cat(order).argsort()
        x, y, ids = (torch.cat(leaves)[back] for leaves in zip(*parts, strict=True))
        return Batch(x, y, torch.ones(len(x), dtype=x.dtype, device=x.device), ids, places[:, 0])

    def may_store(self, places: Tensor, before: Tensor) -> bool:
        """Whether all places (m, 2) lie in the client's data of this round, or were in its memory before (n, 2)."""
        sizes, known = {task: len(self.shares[task].rows) for task in self.now}, set(map(tuple, before.tolist()))
        return all(
            0 <= position < sizes.get(task, 0) or (task, position) in known for task, position in places.tolist()
        )

    def _places(self, task: int) -> Tensor:
        rows = self.shares[task].rows
        return torch.stack([torch.full_like(rows, task), torch.arange(len(rows), device=rows.device)], dim=1)
