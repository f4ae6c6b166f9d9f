"""What a round is: its phase, the privacy of its uploads, and its description for strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from cfl.contract.data import Samples
from cfl.core.errors import ConfigError, unknown
from cfl.core.tree import Tree
from cfl.models.handle import Model

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


TreesByOwner = dict[str, Tree]
"""Trees by owner: "strategy", "work", or the name of a local regularizer."""

Server = dict[str, Tree]
"""The server's state: "params" (the global model) and whatever trees the strategy adds."""
