"""What all engines share: how the clients' results of a round become its outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from cfl.aggregation.plain import UploadSum
from cfl.contract.data import Client
from cfl.contract.regularizer import Gathers
from cfl.contract.rounds import RoundInfo, TreesByOwner
from cfl.core import tree
from cfl.core.errors import RoundAborted, UpdateError
from cfl.core.tree import Tree

Observe = Callable[[int, Tree], None]
Sums = Callable[[RoundInfo, Mapping[str, Gathers]], UploadSum]


@dataclass
class Outcome:
    """What a round's clients give: their uploads put together, states, and figures.

    mean: weighted means; plain sums of "work"; what regularizers send as their `gathers` says.
    states: client id to new state; excluded: clients whose upload was not finite; aborted: why there is no sum.
    bytes_up, bytes_down: of all clients, the second without what was broadcast; noise: see `Privacy`; clipped: entries
    beyond the range of integers; shortened: clients whose upload was scaled down to dp.clip.
    loss: mean training loss of the clients' last local epochs, None where nobody trained.
    """

    mean: TreesByOwner = field(default_factory=dict)
    states: dict[int, Tree] = field(default_factory=dict)
    excluded: list[int] = field(default_factory=list)
    aborted: str | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    noise: float = 0.0
    clipped: int = 0
    shortened: int = 0
    loss: float | None = None

    def figures(self) -> dict[str, Any]:
        """What a run records of it."""
        names = ("excluded", "aborted", "clipped", "shortened", "loss")
        return {"clients": len(self.states), **{name: getattr(self, name) for name in names}}

    def traffic(self, info: RoundInfo, shared: TreesByOwner) -> dict[str, int]:
        """Bytes of a round of all clients, with the broadcast `shared` to each; none for what is only a measurement."""
        broadcast = len(info.clients) * sum(map(tree.nbytes, shared.values()))
        counts = {"bytes_up": self.bytes_up, "bytes_down": broadcast + self.bytes_down}
        return dict.fromkeys(counts, 0) if info.phase.diagnostic else counts

    def faults(self, info: RoundInfo) -> Iterator[str]:
        """What went wrong that a run can go on with."""
        for client in self.excluded:
            yield f"client {client} left out: NaN or infinity in its update ({info.place})"
        if self.aborted is not None:
            yield f"round aborted, nothing is changed ({info.place}): {self.aborted}"
        if self.clipped:
            yield (
                f"{self.clipped} entries of uploads were beyond the range of integers and clipped ({info.place}); "
                "raise secure.bits or lower secure.fraction_bits"
            )


@dataclass
class Collected:
    """What clients leave beside the sum of their uploads.

    states, losses: of those whose uploads are in the sum, by id; a loss is the mean () of the last local epoch.
    """

    states: dict[int, Tree] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    excluded: list[int] = field(default_factory=list)


class Engine(Protocol):
    """Computes rounds. gathers: of each regularizer, see `LocalRegularizer`; sums: makes the sum of uploads.

    grown: bytes that other processes have taken for it.
    """

    grown: int = 0

    @property
    def gathers(self) -> Mapping[str, Gathers]: ...

    @property
    def sums(self) -> Sums: ...

    def collect(
        self,
        total: UploadSum,
        info: RoundInfo,
        shared: TreesByOwner,
        states: Mapping[int, Tree],
        clients: Sequence[Client],
        observe: Observe | None,
    ) -> Collected:
        """Compute clients and add their uploads to `total`. Raises UpdateError for an upload that is not finite."""
        ...

    def round(
        self,
        info: RoundInfo,
        shared: TreesByOwner,
        states: Mapping[int, Tree],
        clients: Sequence[Client],
        observe: Observe | None = None,
    ) -> Outcome:
        """One round over the cohort's clients. Raises UpdateError for an upload that is not finite.

        clients: of `info.uploading`, all or some; or, where those are none, one that shows what an upload looks like.
        observe: called with each client's id and model after its local training.
        """
        total, outcome = self.sums(info, self.gathers), Outcome()
        try:
            total.open()
            found = self.collect(total, info, shared, states, clients, observe)
            outcome.states = {id: found.states[id] for id in sorted(found.states)}
            outcome.excluded = sorted(found.excluded)
            if outcome.excluded and not outcome.states:
                raise UpdateError(f"no client's update was finite ({info.place}); lower local.lr")
            outcome.mean = total.close()
            if info.phase.train and found.losses:
                losses = torch.stack([found.losses[id] for id in sorted(found.losses)]).tolist()
                outcome.loss = sum(losses) / len(losses)
        except RoundAborted as error:
            outcome.aborted, outcome.states = str(error), {}
        outcome.bytes_up, outcome.bytes_down = total.traffic()
        outcome.noise, outcome.clipped, outcome.shortened = total.noise, total.clipped, total.shortened
        return outcome

    def close(self) -> None:
        """Give back what an engine holds beyond a round; another round may still follow."""
        return
