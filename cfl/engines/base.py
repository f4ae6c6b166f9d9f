"""The engine interface, and how the results of a round's clients become its outcome."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from cfl.aggregation.plain import UploadSum
from cfl.contract import Client, Gathers, RoundInfo, RoundInputs, TreesByOwner
from cfl.core import RoundAborted, Tree, UpdateError, tree

Observe = Callable[[int, Tree], None]
Sums = Callable[[RoundInfo, Mapping[str, Gathers]], UploadSum]


@dataclass
class Outcome:
    """Result of a round's clients: aggregated uploads, new states, and figures.

    mean: weighted means of the strategy's uploads; uploads of "work" and of regularizers as their `gathers` says;
    states: client id to new state; excluded: clients whose upload was not finite; aborted: reason for a missing sum;
    bytes_up, bytes_down: bytes of all clients, the second without the broadcast; noise: see `Privacy`;
    clipped: number of entries beyond the range of integers; shortened: number of clients whose upload was scaled down
    to dp.clip; zeroed: ids of those among them whose upload was not finite, which counts as zero and leaves their
    state as it was; loss: mean training loss of the clients' last local epochs, None if no client trained;
    missing: client to the reason why it did not answer; wire: bytes of messages between processes by direction.
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
    zeroed: list[int] = field(default_factory=list)
    loss: float | None = None
    missing: dict[int, str] = field(default_factory=dict)
    wire: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return the figures that a run records."""
        names = ("excluded", "aborted", "clipped", "shortened", "loss")
        missing = {"missing": self.missing} if self.missing else {}
        return {"clients": len(self.states), **{name: getattr(self, name) for name in names}, **missing, **self.wire}

    def traffic(self, info: RoundInfo, shared: TreesByOwner, held: int = 0) -> dict[str, int]:
        """Return the bytes of all clients, including the broadcast `shared` to each; 0 in a diagnostic phase.

        held: bytes of the broadcast that clients have already, see `Strategy.kept`.
        """
        broadcast = len(info.clients) * sum(map(tree.nbytes, shared.values())) - held
        counts = {"bytes_up": self.bytes_up, "bytes_down": broadcast + self.bytes_down}
        return dict.fromkeys(counts, 0) if info.phase.diagnostic else counts

    def faults(self, info: RoundInfo) -> Iterator[str]:
        """Yield a message for each fault that does not stop the run."""
        for client in self.excluded:
            yield f"client {client} excluded: NaN or infinity in its update ({info.place})"
        for client in self.zeroed:  # the run's owner sees this, not the server
            yield f"client {client} counts as zero: NaN or infinity in its update ({info.place}); lower local.lr"
        for client, why in self.missing.items():
            yield f"client {client} is missing ({info.place}): {why}"
        if self.aborted is not None:
            yield f"round aborted, nothing is changed ({info.place}): {self.aborted}"
        if self.clipped:
            yield (
                f"{self.clipped} entries of uploads exceeded the range of integers and were clipped ({info.place}); "
                "raise secure.bits or lower secure.fraction_bits"
            )


@dataclass
class Collected:
    """Results of clients beside the sum of their uploads.

    states, losses: by id, of the clients in the sum; a loss is the mean () of the last local epoch;
    excluded: ids of the clients whose upload was not finite.
    """

    states: dict[int, Tree] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    excluded: list[int] = field(default_factory=list)


class Engine(Protocol):
    """Computes rounds. gathers: of each owner of uploads; sums: makes the sum of a round's uploads.

    grown: bytes by which the engine's largest other process has grown.
    """

    grown: int = 0

    @property
    def gathers(self) -> Mapping[str, Gathers]: ...

    @property
    def sums(self) -> Sums: ...

    def collect(self, total: UploadSum, inputs: RoundInputs, observe: Observe | None) -> Collected:
        """Compute clients and add their uploads to `total`. Other parameters and errors are those of `round`."""
        ...

    def fault(self, inputs: RoundInputs, client: Client) -> str:
        """Compute a client's update again; return why it is not finite, and which options to lower."""
        ...

    def round(self, inputs: RoundInputs, observe: Observe | None = None) -> Outcome:
        """Compute a round of the cohort. observe: called with each client's id and model after its local training.

        Raises UpdateError for an upload that is not finite, unless such clients are excluded and others remain.
        """
        info = inputs.info
        total, outcome = self.sums(info, self.gathers), Outcome()
        try:
            total.open()
            found = self.collect(total, inputs, observe)
            outcome.states = {id: found.states[id] for id in sorted(found.states)}
            outcome.excluded = sorted(found.excluded)
            if outcome.excluded and not outcome.states:
                why = self.fault(inputs, inputs.clients[0])
                raise UpdateError(f"no client's update was finite ({info.place}): {why}")
            outcome.mean = total.close()
            if info.phase.train and found.losses:
                losses = torch.stack([found.losses[id] for id in sorted(found.losses)]).tolist()
                outcome.loss = sum(losses) / len(losses)
                if not math.isfinite(outcome.loss) and info.privacy is None:
                    raise UpdateError(
                        f"the training loss is not finite, but all updates are ({info.place}); "
                        "lower local.lr, or check the loss of the strategy"
                    )
        except RoundAborted as error:
            outcome.aborted, outcome.states = str(error), {}
        outcome.bytes_up, outcome.bytes_down = total.traffic()
        outcome.noise, outcome.clipped, outcome.shortened = total.noise, total.clipped, total.shortened
        outcome.zeroed = sorted(total.zeroed)
        return outcome

    def close(self) -> None:
        """Release what the engine holds between rounds, such as processes. Another round may follow."""
        return


class OuterEngine(Engine):
    """An engine that has clients computed by engines like `inner` in other processes."""

    inner: Engine

    @property
    def gathers(self) -> Mapping[str, Gathers]:
        return self.inner.gathers

    @property
    def sums(self) -> Sums:
        return self.inner.sums

    def fault(self, inputs: RoundInputs, client: Client) -> str:
        return self.inner.fault(inputs, client)
