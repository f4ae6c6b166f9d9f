"""The clients of a run, and what each of them holds of every task."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from cfl import rng
from cfl.errors import ConfigError
from cfl.streams import Stream
from cfl.streams.partition import Deal, deal
from cfl.types import STAGES, Client, Phase, Share

if TYPE_CHECKING:
    from cfl.config import RunConfig


class Population:
    """The data of a stream dealt to clients. deals: one a task.

    Raises ConfigError where nobody holds data of a task, and for batches larger than a client's data.
    """

    def __init__(self, stream: Stream, config: RunConfig) -> None:
        self.stream, self.config = stream, config
        self.deals = [self._deal(task) for task in range(len(stream))]
        self.owners = cache(self._owners)
        self._weight_of_all = cache(lambda tasks: sum(self._weight(id, tasks) for id in self.owners(tasks)))

    def client(self, id: int, task: int, now: tuple[int, ...]) -> Client:
        """A client in a round of a task, with the tasks whose data it trains on."""
        shares = {
            held: Share(self.stream.tasks[held].train, self.deals[held].rows[id])
            for held in sorted({*range(task + 1), *now})
        }
        return Client(id, shares, task, now)

    def expected(self, phase: Phase, tasks: tuple[int, ...]) -> float:
        """Clients that a round draws on average; tasks: those whose data clients train on."""
        owners = len(self.owners(tasks))
        return float(min(self.config.cohort, owners) if phase.cohort == "sampled" else owners)

    def cohort(self, phase: Phase, tasks: tuple[int, ...], key: int) -> tuple[int, ...]:
        """Ids of a round's clients, ascending: all that hold data of the tasks, or a draw of them by the round's key.

        A fixed draw has the same number of clients in every round; a Poisson draw takes each one independently.
        """
        owners, expected = self.owners(tasks), self.expected(phase, tasks)
        if expected >= len(owners):
            return owners
        source = rng.numpy_generator(rng.key(key, "cohort"))
        if self.config.sampling == "poisson":
            drawn = source.random(len(owners)) < expected / len(owners)
            return tuple(id for id, taken in zip(owners, drawn, strict=True) if taken)
        return tuple(sorted(int(id) for id in source.choice(owners, self.config.cohort, replace=False)))

    def dropped(self, ids: tuple[int, ...], key: int) -> dict[int, str]:
        """Those of the clients that drop out of a round, with the stage, any one as likely as the others."""
        if not self.config.drop_rate:
            return {}
        source = rng.numpy_generator(rng.key(key, "drop"))
        draws, stages = source.random(len(ids)), source.integers(len(STAGES), size=len(ids))
        return {
            id: STAGES[stage]
            for id, draw, stage in zip(ids, draws, stages, strict=True)
            if draw < self.config.drop_rate
        }

    def fraction(self, ids: tuple[int, ...], tasks: tuple[int, ...]) -> float:
        """The share of those clients in the weight of all that hold data of the tasks; see `RoundInfo`."""
        return sum(self._weight(id, tasks) for id in ids) / self._weight_of_all(tasks)

    def notes(self) -> list[str]:
        """A line on clients without data, where there are some."""
        without = {task: len(dealt.without_data) for task, dealt in enumerate(self.deals) if dealt.without_data}
        if not without:
            return []
        counts = ", ".join(f"task {task}: {count}" for task, count in without.items())
        return [f"clients without data are never sampled: {counts}"]

    def _owners(self, tasks: tuple[int, ...]) -> tuple[int, ...]:
        """Ids of the clients that hold data of one of the tasks, ascending."""
        return tuple(sorted({id for task in tasks for id in self.deals[task].owners}))

    def _weight(self, id: int, tasks: tuple[int, ...]) -> int:
        if self.config.agg.weights == "uniform":
            return 1
        return sum(len(self.deals[task].rows[id]) for task in tasks)

    def _deal(self, task: int) -> Deal:
        partition, batch = self.config.partition, self.config.local.batch_size
        targets = self.stream.tasks[task].train.targets
        dealt = deal(targets.cpu(), task, seed=self.config.seed, **partition.model_dump())
        if not dealt.owners:
            raise ConfigError(f"no client holds data of task {task}; lower partition.clients")
        smallest = min(len(dealt.rows[id]) for id in dealt.owners)
        # A draw may leave a client less than a batch: it then trains on that.
        if batch > smallest and partition.name not in ("dirichlet", "lda"):
            raise ConfigError(
                f"local.batch_size={batch} is more than the {smallest} samples that a client has of task {task}; "
                f"set local.batch_size to at most {smallest}, or lower partition.clients"
            )
        return Deal(tuple(rows.to(targets.device) for rows in dealt.rows))
