"""A client's data and memory."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cfl.contract.batching import Batching
from cfl.contract.samples import Share

MEMORY = "memory"
"""Name of the leaf of a strategy's client state that refers to stored samples.

The leaf holds places (m, 2) int64: each row is a task and a position in the client's share of that task. The engine
draws `ctx.memory` from it. The samples themselves stay in the client's shares, and count as stored on the client.
"""


@dataclass(frozen=True, eq=False)
class Client(Batching):
    """A client and its data; `Batching` has the methods that draw batches.

    id: counted from 0; shares: task to the client's share of it; task: the round's task; now: the tasks to train on.
    Of the other tasks, a client may use only the samples that its memory refers to.
    """

    id: int
    shares: Mapping[int, Share]
    task: int
    now: tuple[int, ...]

    def __repr__(self) -> str:
        samples = sum(len(share.rows) for share in self.shares.values())
        return f"Client(id={self.id}, task={self.task}, {samples} samples of {len(self.shares)} tasks)"

    @property
    def targets(self) -> Tensor:
        """(n,) int64 labels of the samples to train on."""
        return torch.cat([self.shares[task].samples.targets[self.shares[task].rows] for task in self.now])

    def may_store(self, places: Tensor, before: Tensor) -> bool:
        """True if each place (m, 2) is in the tasks to train on, or in the client's memory `before` (n, 2)."""
        sizes, known = {task: len(self.shares[task].rows) for task in self.now}, set(map(tuple, before.tolist()))
        return all(
            0 <= position < sizes.get(task, 0) or (task, position) in known for task, position in places.tolist()
        )
