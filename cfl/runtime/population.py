"""The clients of a run, and their data of each task."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from cfl.aggregation.attacks import hostile
from cfl.config.schema import RunConfig
from cfl.contract import STAGES, Client, Phase, Share
from cfl.core import ConfigError, DataError, rng
from cfl.streams import Stream
from cfl.streams.partition import Deal, deal, stated
from cfl.streams.store import TaskSamples


class Population:
    """The data of a stream, partitioned over clients. deals: the partition of each task.

    train: the training samples of each task; reversed: the same for the clients in `hostile`, who reverse the labels.

    Raises ConfigError if a task has no owner, or if a batch is larger than a client's data.
    """

    def __init__(self, stream: Stream, config: RunConfig) -> None:
        self.stream, self.config = stream, config
        self.deals = [self._dealt(task) for task in range(len(stream))]
        self.train = [task.train for task in stream.tasks]
        self.hostile = hostile(config) if config.attack.name == "label_flip" else frozenset()
        self.reversed = {task: _reversed(samples) for task, samples in enumerate(self.train) if self.hostile}
        # these take time proportional to the population, hence once per task
        self.owners = lru_cache(maxsize=2)(self._owners)
        self._weights = lru_cache(maxsize=2)(self._weights_of_all)

    def client(self, id: int, task: int, now: tuple[int, ...]) -> Client:
        """Make a client for a round of `task`. now: the tasks whose data it trains on."""
        shares = {
            held: Share(self.reversed[held] if id in self.hostile else self.train[held], self.deals[held].of(id))
            for held in sorted({*range(task + 1), *now})
        }
        return Client(id, shares, task, now)

    def expected(self, phase: Phase, tasks: tuple[int, ...]) -> float:
        """Expected cohort size of a round. tasks: those whose data clients train on."""
        if phase.cohort == "none":
            return 0.0
        owners = len(self.owners(tasks))
        return float(min(self.config.cohort, owners) if phase.cohort == "sampled" else owners)

    def cohort(self, phase: Phase, tasks: tuple[int, ...], trained: int, key: int) -> tuple[int, ...]:
        """Ids of a round's cohort, ascending: all owners of data of the tasks, or a draw of them by the round's key.

        trained: number of earlier training rounds of the run. Poisson sampling draws each client independently, the
        others draw the same number of clients in every round. In training, sampling=round draws by `trained` in place
        of the key.
        """
        owners, expected = self.owners(tasks), self.expected(phase, tasks)
        if not expected:
            return ()
        if expected >= len(owners):
            return owners
        by_number = self.config.sampling == "round" and phase.train
        source = rng.legacy_generator(trained) if by_number else rng.numpy_generator(rng.key(key, "cohort"))
        if self.config.sampling == "poisson":  # one draw per owner, so a round's cost grows with their number
            drawn = np.flatnonzero(source.random(len(owners)) < expected / len(owners))
        else:
            drawn = np.sort(source.choice(len(owners), self.config.cohort, replace=False))
        return tuple(owners[place] for place in drawn.tolist())

    def dropped(self, ids: tuple[int, ...], key: int) -> dict[int, str]:
        """Clients that drop out of a round, each with its stage, drawn uniformly."""
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
        """Share of the clients in the weight of all owners of data of the tasks; see `RoundInfo`."""
        weights, total = self._weights(tasks)
        return int(weights[list(ids)].sum()) / total if total else 0.0  # nodes may have no data of a task

    def notes(self) -> list[str]:
        """Lines for the start of a run: clients without data, and a partition that ignores the stream's clients."""
        without = {task: int((dealt.sizes == 0).sum()) for task, dealt in enumerate(self.deals)}
        counts = ", ".join(f"task {task}: {count}" for task, count in without.items() if count)
        lines = [f"clients without data are never sampled: {counts}"] if counts else []
        name = self.config.partition.name
        if name != "stream" and any(task.clients is not None for task in self.stream.tasks):
            lines.append(
                f"partition.name={name} deals all samples anew; partition.name=stream leaves each to the client that "
                "the stream names"
            )
        return lines

    def _owners(self, tasks: tuple[int, ...]) -> tuple[int, ...]:
        """Ids of the clients with data of at least one of the tasks, ascending."""
        return tuple(np.flatnonzero(self._samples(tasks)).tolist())

    def _samples(self, tasks: tuple[int, ...]) -> np.ndarray:
        """Number of samples of the tasks on each client, (clients,) int64."""
        return np.sum([self.deals[task].sizes for task in tasks], axis=0)

    def _weights_of_all(self, tasks: tuple[int, ...]) -> tuple[np.ndarray, int]:
        """Weight of each client, (clients,) int64, and their sum."""
        samples = self._samples(tasks)
        weights = samples if self.config.agg.weights == "samples" else np.minimum(samples, 1)
        return weights, int(weights.sum())

    def _dealt(self, task: int) -> Deal:
        try:
            return self._deal(task)
        except (ConfigError, DataError) as error:
            if not self.config.validation:
                raise
            left = f"validation={self.config.validation:g} leaves {len(self.stream.tasks[task].train)} training samples"
            raise type(error)(f"{error} ({left} of the task)") from None

    def _deal(self, task: int) -> Deal:
        partition, batch = self.config.partition, self.config.local.batch_size
        own = self.stream.tasks[task]
        if partition.name == "stream":
            return stated(own.clients, task, partition.clients)
        dealt = deal(own.train.targets, task, seed=self.config.seed, **partition.model_dump())
        if not len(dealt.order):
            raise ConfigError(f"no client holds data of task {task}; lower partition.clients")
        smallest = dealt.sizes[dealt.sizes > 0].min()
        # These partitions may leave a client fewer samples than a batch; it then trains on these.
        if batch > smallest and partition.name not in ("dirichlet", "lda"):
            raise ConfigError(
                f"local.batch_size={batch} is more than the {smallest} samples that a client has of task {task}; "
                f"set local.batch_size to at most {smallest}, or lower partition.clients"
            )
        return dealt


def _reversed(samples: TaskSamples) -> TaskSamples:
    """The samples with the order of the task's labels reversed: y becomes classes - 1 - y in a head of its own."""
    return replace(samples, targets=samples.targets.min() + samples.targets.max() - samples.targets)
