"""The clients of a run, and what each of them holds of every task."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cfl.config.schema import RunConfig
from cfl.contract.data import Client, Share
from cfl.contract.rounds import STAGES, Phase
from cfl.core import rng
from cfl.core.errors import ConfigError
from cfl.streams import Stream
from cfl.streams.partition import Deal, deal


class Population:
    """The data of a stream dealt to clients. deals: one a task.

    Raises ConfigError where nobody holds data of a task, and for batches larger than a client's data.
    """

    def __init__(self, stream: Stream, config: RunConfig) -> None:
        self.stream, self.config = stream, config
        self.deals = [self._deal(task) for task in range(len(stream))]
        # what costs time in the size of the population is done once for the tasks that are at hand
        self.owners = lru_cache(maxsize=2)(self._owners)
        self._weights = lru_cache(maxsize=2)(self._weights_of_all)

    def client(self, id: int, task: int, now: tuple[int, ...]) -> Client:
        """A client in a round of a task, with the tasks whose data it trains on."""
        shares = {
            held: Share(self.stream.tasks[held].train, self.deals[held].of(id))
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
        if self.config.sampling == "poisson":  # a draw an owner: the only thing in a round that grows with them
            drawn = np.flatnonzero(source.random(len(owners)) < expected / len(owners))
        else:
            drawn = np.sort(source.choice(len(owners), self.config.cohort, replace=False))
        return tuple(owners[place] for place in drawn.tolist())

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
        weights, total = self._weights(tasks)
        return int(weights[list(ids)].sum()) / total

    def notes(self) -> list[str]:
        """A line on clients without data, where there are some."""
        without = {task: int((dealt.sizes == 0).sum()) for task, dealt in enumerate(self.deals)}
        counts = ", ".join(f"task {task}: {count}" for task, count in without.items() if count)
        return [f"clients without data are never sampled: {counts}"] if counts else []

    def _owners(self, tasks: tuple[int, ...]) -> tuple[int, ...]:
        """Ids of the clients that hold data of one of the tasks, ascending."""
        return tuple(np.flatnonzero(self._samples(tasks)).tolist())

    def _samples(self, tasks: tuple[int, ...]) -> np.ndarray:
        """How many samples of the tasks each client holds, (clients,) int64."""
        return np.sum([self.deals[task].sizes for task in tasks], axis=0)

    def _weights_of_all(self, tasks: tuple[int, ...]) -> tuple[np.ndarray, int]:
        """The weight of each client, (clients,) int64, and the sum of them."""
        samples = self._samples(tasks)
        weights = samples if self.config.agg.weights == "samples" else np.minimum(samples, 1)
        return weights, int(weights.sum())

    def _deal(self, task: int) -> Deal:
        partition, batch = self.config.partition, self.config.local.batch_size
        targets = self.stream.tasks[task].train.targets
        dealt = deal(targets, task, seed=self.config.seed, **partition.model_dump())
        if not len(dealt.order):
            raise ConfigError(f"no client holds data of task {task}; lower partition.clients")
        smallest = dealt.sizes[dealt.sizes > 0].min()
        # A draw may leave a client less than a batch: it then trains on that.
        if batch > smallest and partition.name not in ("dirichlet", "lda"):
            raise ConfigError(
                f"local.batch_size={batch} is more than the {smallest} samples that a client has of task {task}; "
                f"set local.batch_size to at most {smallest}, or lower partition.clients"
            )
        return dealt
