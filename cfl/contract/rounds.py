"""Rounds: the phase of a round, the privacy of its uploads, and the description that hooks get."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from cfl.contract.client import Client
from cfl.contract.samples import Samples
from cfl.core import ConfigError, Tree, unknown
from cfl.models import Model

_COHORTS = Literal["sampled", "available", "none"]

STAGES = ("keys", "shares", "upload", "unmask")
"""Stages of a round, in order, at which a client may drop out; at "unmask" the client has already sent its upload."""


@dataclass(frozen=True)
class Phase:
    """A named sequence of rounds within a task.

    cohort: "sampled" draws the configured number of clients, "available" takes all clients with data of the task;
    "none" takes no client: the server works alone, in `absorb`, with a checkpoint after each round.
    train: clients train locally; work: clients run the strategy's `work`, after training if both are set.
    stores: the results of `work` stay with the client, and nothing is uploaded.
    diagnostic: the phase is a measurement of the simulator, and its bytes are not counted.
    Uploads of phases with `stores` or `diagnostic` get no mask, clipping, noise or accounting, so these may not train.
    Raises ConfigError for a missing name, an unknown cohort, rounds other than a whole number of at least 0, a
    phase with clients and neither `train` nor `work`, or without clients and one of them, a phase named "train" without
    `train`, and `train` with `stores` or `diagnostic`.
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
        name: Any = self.name
        rounds: Any = self.rounds
        if not isinstance(name, str) or not name or not isinstance(rounds, Integral):
            raise ConfigError(f"a phase has a name and a whole number of rounds, not {name!r} and {rounds!r}")
        if self.rounds < 0 or (self.train or self.work) == (self.cohort == "none"):
            raise ConfigError(
                f"phase '{self.name}' has {self.rounds} rounds, cohort={self.cohort}, train={self.train} and "
                f"work={self.work}"
            )
        if self.name == "train" and not self.train:  # its rounds would draw with the keys of training rounds
            raise ConfigError("a phase called 'train' has to train; give this phase of `plan` another name")
        if self.train and (self.stores or self.diagnostic):
            kind = "stores" if self.stores else "diagnostic"
            raise ConfigError(
                f"phase '{self.name}' has train=True and {kind}=True, so its updates would be sent without protection; "
                f"set train=False, or {kind}=False"
            )

    @property
    def protected(self) -> bool:
        """Whether uploads get masks, clipping, noise and accounting, where the run has them."""
        return not (self.diagnostic or self.stores)


class Privacy(NamedTuple):
    """Differential privacy of the uploads of `work`, for strategies that scale uploads or allow for the noise.

    level: with "client", a client's whole upload of a round is clipped to the norm `clip`; with "example", the strategy
    itself bounds the contribution of each sample to the uploads of `work` by that norm.
    hidden: True if the cohort and its size are protected too.
    noise: standard deviation of the noise in each entry of the sum; set in `absorb`.
    """

    level: str
    clip: float
    hidden: bool = False
    noise: float = 0.0


class Pixels(NamedTuple):
    """Normalisation of 8-bit images: an input is (image / 255 - mean) / std.

    mean, std: broadcastable to an image, such as (channels, 1, 1), or None where the images are not normalised so.
    """

    mean: Tensor | None
    std: Tensor | None


@dataclass(frozen=True)
class RoundInfo:
    """A round, as hooks see it.

    task, round: counted from 0, the round within its phase; tasks: number of tasks.
    clients: ids of the cohort, ascending; in `absorb` and `server_step`, of those whose uploads are in the sums.
    names: parameters and buffers that are broadcast; frozen: the parameters among them that are not trained.
    heads: tasks whose heads are broadcast; population: number of clients in the run; lr: local learning rate.
    key: integer for the draws of this round, the same for all clients; public: inputs that everybody may see, or None.
    owners: number of clients with data to train on.
    fraction: `clients` as a share of these owners; with agg.weights=samples, their share of the owners' samples.
    trained: number of earlier training rounds of this task.
    expected: number of clients that sums are divided by. It is the average size of a cohort if the size is protected;
    otherwise, in `absorb`, it is the number of `clients`.
    dropped: id to the stage at which the client drops out; privacy: None without differential privacy.
    pixels_of: of the images of each task so far; None for a task whose inputs are no 8-bit images.
    masked: with a growing head, a loss of the task's samples has the logits of its classes alone (class_loss=current).
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
    pixels_of: tuple[Pixels | None, ...] = (None,)
    masked: bool = False

    def __repr__(self) -> str:
        return f"RoundInfo({self.place}, {len(self.clients)} clients, lr={self.lr:g})"

    @property
    def place(self) -> str:
        """Task, phase and round, for messages."""
        return f"task {self.task}, phase {self.phase.name}, round {self.round}"

    @property
    def pixels(self) -> Pixels | None:
        """Normalisation of the images of the round's task; None if its inputs are no 8-bit images."""
        return self.pixels_of[-1]

    @property
    def uploading(self) -> tuple[int, ...]:
        """Ids of the clients that send their uploads; some may drop out afterwards."""
        return tuple(id for id in self.clients if self.dropped.get(id, "unmask") == "unmask")


TreesByOwner = dict[str, Tree]
"""Trees by owner: "strategy", "work", or the name of a regularizer."""

Server = dict[str, Tree]
"""The server's state: "params", which is the global model, the trees of the strategy, and those of regularizers."""


class RoundInputs(NamedTuple):
    """Inputs of a round. shared: the broadcast, by owner; states: client id to state.

    clients: all or some of `info.uploading`, or, if that is empty, one client whose upload shows the shapes.
    """

    info: RoundInfo
    shared: TreesByOwner
    clients: Sequence[Client]
    states: Mapping[int, Tree]

    def __repr__(self) -> str:
        return f"RoundInputs({self.info.place}, {len(self.clients)} clients)"
