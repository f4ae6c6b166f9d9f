"""The values that pass between runner, engines and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from cfl import rng
from cfl.errors import ConfigError, unknown
from cfl.tree import Tree

if TYPE_CHECKING:
    from cfl.models.handle import Model


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


class Forward(Protocol):
    """Outputs of the model in its current mode at `params`; what is not in `params` is as it came down.

    Running statistics that `params` does not hold are the client's own; they stay as they are.

    Without `heads`, (batch, classes): each sample through the head of its own task. With a tuple of tasks,
    (batch, heads, classes): every sample through each of their heads (a single-head model has one, whatever is asked).
    Heads with fewer classes than others are filled up with a number so low that its softmax is 0.
    dropout: False switches `nn.Dropout` off, for a reference that is not to be noisy.
    features: True gives what enters the last Linear layer instead, (batch, d).
    """

    def __call__(
        self,
        params: Tree,
        batch: Batch,
        heads: tuple[int, ...] | None = None,
        *,
        dropout: bool = True,
        features: bool = False,
    ) -> Tensor: ...


class Ctx(NamedTuple):
    """All that a client hook may see.

    shared: what came down, the same for all clients; shared["params"] is the global model at the start of the round.
    sent: the part of it that a regularizer's own `provide` gave.
    state: this client's own tree, as `init_client`, `work` or the last `finish` left it.
    memory: at most a batch of the samples that the strategy's state points to, drawn for this step; perhaps none.
    forward: the model as a function; model: its layers and names.
    step: number of the local step, from 0; lr, momentum: of the local optimiser (momentum 0 where it has none).
    key: integer to derive generators from, unique to client and step.
    client: () int64, the client's id, to look up what was sent for each client; public: the public data, if any.
    lent: in `finish`, whether another one has borrowed the terms of this one.
    features: in `penalty`, (batch, d): what entered the last Linear layer in the pass that gave the logits.
    correction: in `around`, the gradient by `params` of the terms of the regularizer that `borrows` names.
    """

    shared: Mapping[str, Tree]
    state: Tree
    batch: Batch
    memory: Batch
    forward: Forward
    model: Model
    task: int
    step: int
    lr: float
    key: int
    sent: Tree = {}
    momentum: float = 0.0
    client: Tensor = torch.tensor(0)
    public: Samples | None = None
    lent: bool = False
    features: Tensor | None = None
    correction: Callable[[Tree], Tree] | None = None


_COHORTS = Literal["sampled", "available"]

STAGES = ("keys", "shares", "upload", "unmask")
"""The stages of a round in which a client may drop out; one that drops out at "unmask" has sent its upload."""


@dataclass(frozen=True)
class Phase:
    """A named run of rounds inside a task.

    cohort: "sampled" draws the configured number of clients, "available" takes all that hold data of the task.
    train: clients train locally; work: clients run the strategy's `work` (after training, where both are set).
    stores: what `work` makes stays with the client, and nothing goes up.
    diagnostic: a measurement of the simulator, not counted in bytes.
    Raises ConfigError for a cohort of another name, fewer than no rounds, a phase in which nobody does anything, and
    one called "train" that does not train.
    """

    name: str
    rounds: int = 1
    cohort: _COHORTS = "sampled"
    train: bool = True
    work: bool = False
    stores: bool = False
    diagnostic: bool = False

    def __post_init__(self) -> None:
        if self.cohort not in get_args(_COHORTS):
            raise unknown(f"cohort of phase '{self.name}'", str(self.cohort), get_args(_COHORTS))
        if self.rounds < 0 or not (self.train or self.work):
            raise ConfigError(f"phase '{self.name}' has {self.rounds} rounds, train={self.train} and work={self.work}")
        if self.name == "train" and not self.train:  # it would draw as the training rounds do
            raise ConfigError("a phase called 'train' has to train; give this one another name")


class Privacy(NamedTuple):
    """The differential privacy of what `work` sends, so that a strategy can scale for it and allow for the noise.

    level: "client" clips a client's whole upload of a round to the norm `clip`; under "example" the strategy itself
    keeps each sample's part in what `work` sends to that norm; hidden: who takes part, and how many, is protected too;
    noise: its standard deviation in each entry of the sum.
    """

    level: str
    clip: float
    hidden: bool = False
    noise: float = 0.0


@dataclass(frozen=True)
class RoundInfo:
    """One round, as strategies see it.

    task, round: counted from 0, the round within its phase; clients: ids of the cohort, ascending.
    names: parameters and buffers that travel; frozen: those among them that do not train.
    heads: tasks whose heads travel; population: number of clients that there are; lr: learning rate of local training;
    key: integer for this round's draws, the same for all clients; public: inputs that everybody may see, if any.
    owners: number of clients that hold data to train on; fraction: the share of those clients, or with
    agg.weights=samples of their samples, that `clients` make up; trained: rounds of training in this task so far.
    expected: clients that a sum is divided by, where how many there are is protected: as many as the sampling draws on
    average; in `absorb` else the number of `clients`; dropped: ids that drop out of the round, with the stage;
    privacy: None without differential privacy.
    """

    task: int
    tasks: int
    phase: Phase
    round: int
    clients: tuple[int, ...]
    names: tuple[str, ...]
    frozen: frozenset[str]
    heads: tuple[int, ...]
    population: int
    lr: float
    model: Model
    key: int
    public: Samples | None = None
    owners: int = 1
    fraction: float = 1.0
    trained: int = 0
    expected: float = 1.0
    dropped: Mapping[int, str] = field(default_factory=dict)
    privacy: Privacy | None = None

    @property
    def place(self) -> str:
        """Where a run is, for messages."""
        return f"task {self.task}, phase {self.phase.name}, round {self.round}"

    @property
    def uploading(self) -> tuple[int, ...]:
        """Ids of the cohort's clients that get as far as sending their uploads."""
        return tuple(id for id in self.clients if self.dropped.get(id, "unmask") == "unmask")


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


Parts = dict[str, Tree]
"""Trees by owner: "strategy", "work", or the name of a local regularizer."""

Server = dict[str, Tree]
"""The server's state: "params" (the global model) and whatever trees the strategy adds."""
