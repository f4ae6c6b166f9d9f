"""The values that pass between runner, engines and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from cfl.tree import Tree

if TYPE_CHECKING:
    from cfl.models.handle import Model


class Batch(NamedTuple):
    """A minibatch of one client.

    x: (batch, ...) inputs; y: (batch,) int64 labels in [0, classes of the task's head);
    mask: (batch,) 1.0 for a sample, 0.0 for padding; ids: (batch,) int64, the same for a sample wherever it is held.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    ids: Tensor


class Ctx(NamedTuple):
    """All that a client hook may see.

    shared: what came down, the same for all clients; shared["params"] is the global model at the start of the round.
    state: this client's own tree, as `init_client` or the last `finish` left it.
    forward: (params, x) -> logits (batch, classes) in the model's current mode.
    step: number of the local step, from 0; key: integer to derive generators from, unique to client and step.
    """

    shared: Mapping[str, Tree]
    state: Tree
    batch: Batch
    forward: Callable[[Tree, Tensor], Tensor]
    task: int
    step: int
    key: int


@dataclass(frozen=True)
class Phase:
    """A named run of rounds inside a task.

    cohort: "sampled" draws the configured number of clients, "available" takes all that hold data of the task.
    train: clients train locally; work: clients run the strategy's `work` (after training, where both are set).
    diagnostic: a measurement of the simulator, not counted in bytes.
    """

    name: str
    rounds: int = 1
    cohort: Literal["sampled", "available"] = "sampled"
    train: bool = True
    work: bool = False
    diagnostic: bool = False


@dataclass(frozen=True)
class RoundInfo:
    """One round, as strategies see it.

    task, round: counted from 0, the round within its phase; clients: ids of the cohort, ascending.
    names: parameters and buffers of this task that travel; frozen: those among them that do not train.
    key: integer for this round's draws, the same for all clients.
    """

    task: int
    tasks: int
    phase: Phase
    round: int
    clients: tuple[int, ...]
    names: tuple[str, ...]
    frozen: frozenset[str]
    model: Model
    key: int


class Samples(Protocol):
    """Samples of one task: index (n,) int64 ids, targets (n,) int64, and gather(rows) -> x (b, ...), y (b,)."""

    @property
    def index(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Client:
    """A client's data of the current task. rows: (n,) int64 positions among the task's samples."""

    id: int
    samples: Samples
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[Batch]:
        """All samples once, at most `size` at a time, in the given order (n,) or as they lie."""
        rows = self.rows if order is None else self.rows[order]
        for part in rows.split(size):
            x, y = self.samples.gather(part)
            yield Batch(x, y, torch.ones(len(part), dtype=x.dtype, device=x.device), self.samples.index[part])


Parts = dict[str, Tree]
"""Trees by owner: "strategy", "work", or the name of a local regularizer."""

Server = dict[str, Tree]
"""The server's state: "params" (the global model) and whatever trees the strategy adds."""
