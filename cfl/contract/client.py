"""A client's data and memory, and minibatches: in order, shuffled, by Poisson sampling, or from the memory."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl.contract.samples import Batch, Share, batched, joined
from cfl.core import rng

MEMORY = "memory"
"""Name of the leaf of a strategy's client state that refers to stored samples.

The leaf holds places (m, 2) int64: each row is a task and a position in the client's share of that task. The engine
draws `ctx.memory` from it. The samples themselves stay in the client's shares, and count as stored on the client.
"""


@dataclass(frozen=True, eq=False)
class Client:
    """A client and its data: the samples to train on, and batches of them.

    id: counted from 0; shares: task to the client's share of it; task: the round's task; now: the tasks to train on.
    Of the other tasks, a client may use only the samples that its memory refers to.
    Positions count the samples to train on from 0: the shares of the tasks in `now`, one after another.
    Argument `key`: seeds the random augmentation of training images; None for the original images.
    """

    id: int
    shares: Mapping[int, Share]
    task: int
    now: tuple[int, ...]

    def __repr__(self) -> str:
        samples = sum(len(share.rows) for share in self.shares.values())
        return f"Client(id={self.id}, task={self.task}, {samples} samples of {len(self.shares)} tasks)"

    def __len__(self) -> int:
        return sum(len(self.shares[task].rows) for task in self.now)

    @property
    def device(self) -> torch.device:
        """Device of the data."""
        return self.shares[self.task].rows.device

    @property
    def targets(self) -> Tensor:
        """(n,) int64 labels of the samples to train on."""
        return torch.cat([self.shares[task].samples.targets[self.shares[task].rows] for task in self.now])

    def steps(self, size: int) -> int:
        """Number of batches of `size` samples in a local epoch."""
        return -(-len(self) // size)

    def shuffled(self, size: int, source: torch.Generator) -> list[Tensor]:
        """Draw the positions (b,) of an epoch's batches: every sample once, in random order."""
        return list(torch.randperm(len(self), generator=source).to(self.device).split(size))

    def draws(self, size: int, steps: int, source: np.random.Generator) -> list[Tensor]:
        """Draw the positions (b,) of `steps` Poisson batches.

        Each batch includes each sample independently with probability min(1, size / n), n being the number of samples.
        """
        drawn = source.random((steps, len(self))) < size / len(self)
        return [torch.as_tensor(row.nonzero()[0], device=self.device) for row in drawn]

    def batches(
        self, size: int, order: Tensor | None = None, key: int | None = None, *, together: bool = False
    ) -> Iterator[Batch]:
        """Yield every sample once, `size` at a time. order: (n,) positions; None for the stored order.

        together: whether a single last sample joins the batch before, see `Model.joins_last`.
        """
        whole = torch.arange(len(self), device=self.device) if order is None else order
        return self.gathered(batched(whole, size, together), key)

    def gathered(self, parts: Iterable[Tensor], key: int | None = None) -> Iterator[Batch]:
        """Yield the batch at each of several positions (b,); each batch derives its own key."""
        augmented = any(self.shares[task].samples.augment for task in self.now)
        for number, part in enumerate(parts):
            yield self.batch(part, rng.key(key, number) if augmented and key is not None else None)

    def batch(self, positions: Tensor, key: int | None = None) -> Batch:
        """Gather the samples at positions (b,); without positions, a batch of one padding sample."""
        if not len(positions):
            padding = self.batch(positions.new_zeros(1), key)
            return padding._replace(mask=torch.zeros_like(padding.mask))
        if self.now != (self.task,):
            return self.recall(torch.cat([self._tasks_and_positions(task) for task in self.now])[positions], key)
        samples, rows = self.shares[self.task]
        chosen = rows[positions]
        x, y = samples.gather(chosen, key)
        return Batch.whole(x, y, samples.index[chosen])

    def recall(self, places: Tensor, key: int | None = None) -> Batch:
        """Gather the samples at places (m, 2), see `MEMORY`, with the task of each; an empty batch if m is 0."""
        if not len(places):
            samples, rows = self.shares[self.task]
            x, y = samples.gather(rows[:0])
            return Batch.whole(x, y, rows[:0], rows[:0])
        parts, order = [], []
        for task in places[:, 0].unique().tolist():
            at = (places[:, 0] == task).nonzero().flatten()
            samples, rows = self.shares[task]
            chosen = rows[places[at, 1]]
            own_key = None if key is None else rng.key(key, "task", task)
            parts.append((*samples.gather(chosen, own_key), samples.index[chosen]))
            order.append(at)
        back = torch.cat(order).argsort()
        x, y, ids = (joined(leaves)[back] for leaves in zip(*parts, strict=True))
        return Batch.whole(x, y, ids, places[:, 0])

    def may_store(self, places: Tensor, before: Tensor) -> bool:
        """True if each place (m, 2) is in the tasks to train on, or in the client's memory `before` (n, 2)."""
        sizes, known = {task: len(self.shares[task].rows) for task in self.now}, set(map(tuple, before.tolist()))
        return all(
            0 <= position < sizes.get(task, 0) or (task, position) in known for task, position in places.tolist()
        )

    def _tasks_and_positions(self, task: int) -> Tensor:
        """(n, 2) the task, and the position in the client's share of it, of every sample of the share."""
        rows = self.shares[task].rows
        return torch.stack([torch.full_like(rows, task), torch.arange(len(rows), device=rows.device)], dim=1)
